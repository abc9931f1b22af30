"""One step of gradient_accumulation.py: the gradient of one process, sends, what a token counts."""

import argparse
import dataclasses

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from dist_common import data, models, proofs, runtime
from dist_common.cli import UsageError
from dist_common.measure import CollectiveCounter

MODEL = dataclasses.replace(models.PRESETS["tiny"], num_layers=2)
BUCKET_MIB = 0.25  # several buckets for a model as small as this
LR = 0.1  # of SGD
MOST = 4  # micro-batches of the counted steps, unless a flag says otherwise
# float32 keeps 1.2e-7 of a number; sums of a few hundred terms, in another order. SGD's update is
# proportional to the gradient, so it enlarges no rounding, as Adam's does for gradients near 0.
TOLERANCE = 1e-5
ERROR = "gradient, relative error"
DISTANCE = "distance from the right one"


class Ragged(data.Sequences):
    """Sequences of 1 to T tokens, of random lengths: targets of IGNORED fill them up."""

    def cut(self, text: torch.Tensor) -> torch.Tensor:
        draw = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, self.seq_len + 1, (len(text) // self.seq_len,), generator=draw)
        return torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))


class Job:
    """What all parts of the script share: sizes, text, and the loss that is accumulated."""

    def __init__(self, report, summed_loss) -> None:
        self.report, self.args, self.device = report, report.args, report.device
        self.ranks, self.rank = report.world.world_size, report.world.rank
        self.summed_loss = summed_loss
        args = self.args
        self.divisors = settle_factors(args, self.ranks)
        self.config = dataclasses.replace(MODEL, max_seq_len=args.seq_len)
        self.identity = data.settle_batch_sizes(args, self.ranks)
        # An epoch of two whole steps and one that holds half a batch and one sequence.
        self.samples = 2 * args.global_batch_size + args.global_batch_size // 2 + 1
        text = data.load_text()
        self.ragged = Ragged(text, args.seq_len, self.samples)
        self.even = data.Sequences(text, args.seq_len, self.samples)
        self.order = data.ShardedSampler(self.samples, 0, 1, args.seed).global_order()

    def describe(self) -> tuple[str, str]:
        """Return the lines to print at the start."""
        weights = f"{self.config.num_parameters():,} weights, {4 * self.config.num_parameters():,}"
        return f"{weights} bytes of gradient; SGD", f"counted steps: {self.identity}"

    def model(self) -> models.Transformer:
        """Return the model with the same weights on every rank and in every call."""
        runtime.seed_everything(self.args.seed)
        return models.Transformer(self.config).to(self.device)

    def ddp(self, group=None) -> DDP:
        """Return the model for all ranks, its buckets settled by a first step."""
        ids = [self.device.index] if self.device.type == "cuda" else None
        ddp = DDP(self.model(), ids, bucket_cap_mb=BUCKET_MIB, process_group=group)
        self.summed_loss(ddp, *self.batch(self.even, [0])).backward()
        ddp.zero_grad()
        return ddp

    def batch(self, sequences, indices) -> list[torch.Tensor]:
        """Return the inputs and targets of some sequences. Shapes: (B, T) both."""
        items = [sequences[int(index)] for index in indices]
        batch = data.collate(len(items), self.args.seq_len, items)
        return [tensor.to(self.device) for tensor in batch]

    def dealt(self, sequences, first=0, micro_batches=None, rank=None) -> list[list[torch.Tensor]]:
        """Return a rank's micro-batches of the counted size, from sequence `first` on."""
        count, size = micro_batches or self.args.grad_accum_steps, self.args.micro_batch_size
        places = torch.arange(first, first + count * size * self.ranks)
        mine = places[(self.rank if rank is None else rank) :: self.ranks]
        return [self.batch(sequences, part) for part in mine.split(size)]

    def one_process(self, batches, divisors) -> torch.Tensor:
        """Return the gradient of summed losses, each divided by its divisor, without ranks."""
        model = self.model()
        losses = (
            self.summed_loss(model, *batch) / divisor
            for batch, divisor in zip(batches, divisors, strict=True)
        )
        return proofs.gradient_of_one_process(model, losses)


def settle_factors(args, ranks: int) -> list[int]:
    """Choose factors that no flag gives; return every micro-batch size that divides the batch.

    Raises: UsageError where micro-batch size x accumulation x ranks cannot be the global batch.
    """
    total, size, steps = args.global_batch_size, args.micro_batch_size, args.grad_accum_steps
    data.settle_batch_sizes(  # a batch that no number of micro-batches makes ends here
        argparse.Namespace(global_batch_size=total, micro_batch_size=1, grad_accum_steps=None),
        ranks,
    )
    share = total // ranks
    if size is None:
        if steps is None:
            steps = max(n for n in range(1, MOST + 1) if share % n == 0)
        if share % steps:
            raise UsageError(
                f"--global-batch-size {total} must be a micro-batch size x {ranks} ranks x "
                f"--grad-accum-steps {steps}, a multiple of {ranks * steps}"
            )
        args.micro_batch_size = share // steps
    return [size for size in range(1, share + 1) if share % size == 0]


def tokens_in(targets: torch.Tensor) -> int:
    """Return how many tokens the loss counts; the script's `counted` is compared with it."""
    return int((targets != data.IGNORED).sum())


def distance(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return how far a vector is from the right one, as a part of the right one's length."""
    return ((found - right).norm() / right.norm()).item()


# what is sent


def check_sending(job: Job, ways, traps, factors_of) -> None:
    """Count the all-reduces of a step of each way, and compare its gradient with one process."""
    report, steps = job.report, job.args.grad_accum_steps
    micro_batches = job.dealt(job.ragged)
    factors = factors_of(micro_batches)
    expected = right_gradient(job, job.ragged)
    gradient_bytes = 4 * job.config.num_parameters()
    model = job.ddp()
    with CollectiveCounter() as counter:  # one backward of DDP's own
        job.summed_loss(model, *micro_batches[0]).backward()
    buckets = counter.calls["allreduce_"]
    backwards = {"send each": steps, "no_sync": 1, "forward outside": steps, "forward inside": 0}
    rows = []
    for name, way in {**ways, **traps}.items():
        model = job.ddp()
        with CollectiveCounter() as counter:
            way(model, micro_batches, factors)
        calls, sent = counter.calls["allreduce_"], counter.bytes["allreduce_"]
        due, source = backwards[name], f"in {backwards[name]} of {steps} backwards"
        report.check(f"{name}: all-reduces per step", calls, due * buckets, 0, source)
        bytes_due = due * gradient_bytes
        report.check(f"{name}, a step: bytes all-reduced", sent, bytes_due, 0, source)
        if name != "forward inside":
            proofs.same_gradient(report, model, expected, TOLERANCE, f"{name}: {ERROR}")
        own = proofs.flat(p.grad for p in model.parameters())
        sets = len({round(value, 9) for value in runtime.gather(own.norm().item())})
        alike = "the same" if sets == 1 else "each rank its own"
        rows.append((name, str(calls), f"{sent:,}", f"{distance(own, expected):.1e}", alike))
        report.metrics |= {f"{name}: calls": calls, f"{name}: bytes": sent}
    report.metrics["buckets"] = buckets
    report.say(f"one step, {steps} micro-batches, {buckets} buckets:")
    headers = ("way", "all-reduces", "bytes", "gradient error", "on the ranks")
    report.table(rows, headers)


def right_gradient(job: Job, sequences) -> torch.Tensor:
    """Return the gradient of the mean over all tokens of a global batch, in one process."""
    batch = job.batch(sequences, range(job.args.global_batch_size))
    return job.one_process([batch], [tokens_in(batch[1])])


# what a token counts


def check_weighings(job: Job, accumulate, weighings) -> None:
    """Print each weighing's gradient error; check it against the same weighing in one process."""
    report, rows = job.report, {name: [name] for name in weighings}
    for kind, sequences in (("full sequences", job.even), ("1 to T tokens", job.ragged)):
        right = right_gradient(job, sequences)
        mine = job.dealt(sequences)
        everyone = [job.dealt(sequences, rank=rank) for rank in range(job.ranks)]
        for name, factors_of in weighings.items():
            model = job.ddp()
            accumulate(model, mine, factors_of(mine))
            found = proofs.flat(p.grad for p in model.parameters())
            expected = job.one_process(sum(everyone, []), divisors_of(name, everyone))
            claim = f"{name}, {kind}: {ERROR}"
            proofs.same_gradient(report, model, expected, TOLERANCE, claim, "derived divisors")
            error = distance(found, right)
            rows[name].append(f"{error:.1e}" if error < TOLERANCE else f"{error:.1%}")
            report.metrics[f"{name}, {kind}"] = error
    steps = job.args.grad_accum_steps
    name = "sum of micro-batch means"
    found = report.metrics[f"{name}, full sequences"]
    report.check(f"{name}: {DISTANCE}", found, steps - 1, 1e-4, "gradient x accumulation")
    report.say("error of the gradient, as a part of its length:")
    headers = ("the loss is a", "full sequences", "1 to T tokens")
    report.table(rows.values(), headers)


def divisors_of(name: str, everyone) -> list[float]:
    """Return what divides the summed loss of each rank's each micro-batch, for the plain mean.

    DDP's mean over ranks is one of the divisors.
    """
    tokens = [[tokens_in(targets) for _, targets in micro_batches] for micro_batches in everyone]
    ranks, steps = len(tokens), len(tokens[0])
    total = sum(map(sum, tokens))
    divisor = {
        "mean over all tokens": lambda own, here: total,
        "mean of micro-batch means": lambda own, here: here * steps * ranks,
        "mean of rank means": lambda own, here: sum(own) * ranks,
        "sum of micro-batch means": lambda own, here: here * ranks,
    }[name]
    return [divisor(own, here) for own in tokens for here in own]


# the end of an epoch


def check_remainder(job: Job, accumulate, by_tokens, carry_over) -> None:
    """Take an epoch of one whole step and one micro-batch per rank; compare what becomes of it."""
    report, steps = job.report, job.args.grad_accum_steps
    if steps == 1:
        report.say("one micro-batch per step: no step of an epoch is left incomplete")
        return
    whole = job.args.global_batch_size
    rest = whole // steps
    leftover = job.dealt(job.even, first=whole, micro_batches=1)
    right = job.batch(job.even, range(whole, whole + rest))
    right = job.one_process([right], [tokens_in(right[1])])
    full = [1 / tokens_in(targets) / steps for _, targets in leftover]
    rows = [("dropped", "1", f"{whole} of {whole + rest}", "-")]
    for name, factors in (("by what it holds", by_tokens(leftover)), ("by a whole step", full)):
        model = job.ddp()
        accumulate(model, leftover, factors)
        error = distance(proofs.flat(p.grad for p in model.parameters()), right)
        if name == "by what it holds":
            claim = f"last step, divided {name}: {ERROR}"
            proofs.same_gradient(report, model, right, TOLERANCE, claim)
        else:
            claim, due = f"last step, divided {name}: {DISTANCE}", 1 - 1 / steps
            report.check(claim, error, due, TOLERANCE, "1 of its micro-batches is there")
        shown = f"{error:.1e}" if error < TOLERANCE else f"{error:.1%}"
        rows.append((f"a step, divided {name}", "2", f"{whole + rest} of {whole + rest}", shown))
        report.metrics[f"remainder {name}"] = error

    model = job.ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # so that the weights stay the same
    found = []
    optimizer.register_step_pre_hook(
        lambda *_: found.append(proofs.flat(p.grad for p in model.parameters()))
    )
    first = job.dealt(job.even)
    carry_over(model, optimizer, [first + leftover, first], steps)
    held = job.batch(job.even, range(whole + rest))
    right = job.one_process([held], [tokens_in(held[1])])
    error = distance(found[1], right)
    claim = f"carried into the next epoch: {DISTANCE}"
    report.check(claim, error, 1 / steps, TOLERANCE, "1 micro-batch more than it is divided by")
    rows.append(("carried into the next epoch", "1", f"{whole} of {whole + rest}", f"{error:.1%}"))
    report.metrics["remainder carried"] = error
    report.say(f"an epoch of {whole + rest} sequences, {whole} to a step; the last ones are:")
    report.table(rows, ("", "steps", "sequences", "gradient error"))
