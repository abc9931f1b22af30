"""What gradient_accumulation.py is compared with: one process, formulas, counts."""

import argparse
import dataclasses
import functools
import itertools
import statistics

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from advanced_parts.kept_bytes import kept_for_backward
from dist_common.links import slow_group
from legacy_common import data, models, runtime
from legacy_common.lab import proofs
from legacy_common.lab.traffic import RING_FACTOR, TrafficCounter
from legacy_common.measure import StepTimer

MODEL = dataclasses.replace(models.PRESETS["tiny"], num_layers=2)
BUCKET_MIB = 0.25  # several buckets for a model as small as this
LR = 0.1  # of SGD
MOST = 4  # micro-batches of the counted steps, unless a flag gives their number or size
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
    """What all parts of the script share: sizes, text, and the loss that is accumulated.

    Raises: UsageError where micro-batch size x accumulation x ranks cannot be the global batch.
    """

    def __init__(self, report, summed_loss) -> None:
        args = report.args
        self.report, self.args, self.device = report, args, report.device
        self.ranks, self.rank = report.world.world_size, report.world.rank
        self.summed_loss = summed_loss
        if args.micro_batch_size is None:
            share, rest = divmod(args.global_batch_size, self.ranks)
            steps = args.grad_accum_steps or max(n for n in range(1, MOST + 1) if share % n == 0)
            args.micro_batch_size = 1 if rest else max(share // steps, 1)
        self.identity = data.settle_batch_sizes(args, self.ranks)
        self.config = dataclasses.replace(MODEL, max_seq_len=args.seq_len)
        self.gradient_bytes = 4 * self.config.num_parameters()
        # An epoch of two whole steps and one that holds half a batch and one sequence.
        self.samples = 2 * args.global_batch_size + args.global_batch_size // 2 + 1
        text = data.load_text()
        self.ragged = Ragged(text, args.seq_len, self.samples)
        self.even = data.Sequences(text, args.seq_len, self.samples)
        self.order = data.ShardedSampler(self.samples, 0, 1, args.seed).global_order()

    def model(self) -> models.Transformer:
        """Return the model with the same weights on every rank and in every call."""
        runtime.seed_everything(self.args.seed)
        return models.Transformer(self.config).to(self.device)

    def ddp(self, group=None) -> DDP:
        """Return the model for all ranks, its buckets settled by a first step."""
        ddp = DDP(self.model(), bucket_cap_mb=BUCKET_MIB, process_group=group)
        self.summed_loss(ddp, *self.batch(self.even, [0])).backward()
        ddp.zero_grad()
        return ddp

    def batch(self, sequences, indices) -> list[torch.Tensor]:
        """Return the inputs and targets of some sequences. Shapes: (B, T) both."""
        items = [sequences[index] for index in indices]
        return [torch.stack(part).to(self.device) for part in zip(*items, strict=True)]

    def dealt(self, sequences, rank: int, extra: int = 0) -> list[list[torch.Tensor]]:
        """Return the micro-batches of a rank's first step, and `extra` ones of the next."""
        size, count = self.args.micro_batch_size, self.args.grad_accum_steps + extra
        places = torch.arange(rank, count * size * self.ranks, self.ranks)
        return [self.batch(sequences, part) for part in places.split(size)]

    def right_gradient(self, sequences, indices: range) -> torch.Tensor:
        """Return the gradient of the mean over all tokens of some sequences, in one process."""
        model, batch = self.model(), self.batch(sequences, indices)
        loss = self.summed_loss(model, *batch) / tokens_in(batch[1])
        return proofs.gradient_of_one_process(model, [loss])


def tokens_in(targets: torch.Tensor) -> int:
    """Return how many tokens the loss counts; the script's `counted` is compared with it."""
    return int((targets != data.IGNORED).sum())


def gradient(model) -> torch.Tensor:
    """Return a model's gradient as one vector."""
    return proofs.flat(p.grad for p in model.parameters())


def distance(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return how far a vector is from the right one, as a part of the right one's length."""
    return ((found - right).norm() / right.norm()).item()


def shown(error: float) -> str:
    """Return a distance for a table: what rounding explains is no percentage."""
    return f"{error:.1e}" if error < TOLERANCE else f"{error:.1%}"


def check_factorizations(job: Job, train) -> list[torch.Tensor]:
    """Train an epoch in every factorization; check losses and weights; print a table.

    Also measures the bytes kept for backward and the speed. Return the gradients of one process.
    """
    report, share = job.report, job.args.global_batch_size // job.ranks
    losses, start, end, gradients = train_alone(job)
    tokens = int(job.ragged.lengths[job.order].sum())
    rows, source = [], "one process, the whole batch at once"
    for size in (size for size in range(1, share + 1) if share % size == 0):
        name, batches = f"{size} x {share // size} x {job.ranks}", epoch_of(job, size, len(losses))
        model = job.ddp()
        optimizer = torch.optim.SGD(model.parameters(), LR)
        with TrafficCounter() as counter:
            found = train(model, optimizer, batches)
        check = f"{name}: largest error of a loss"
        proofs.same_losses(report, found, losses, TOLERANCE, check, source)
        error = (proofs.flat(model.parameters()) - end).abs().max() / (end - start).abs().max()
        error = max(runtime.gather(error.item()))
        report.check(f"{name}: weights, relative error", error, 0, TOLERANCE, source)
        # Beside a gradient a step all-reduces its number of tokens and its loss.
        check, steps = f"{name}, an epoch: bytes all-reduced", len(losses)
        proofs.one_gradient_sent(report, model, counter, (8 + 4) * steps, check, steps)
        kept, (expected, origin) = kept_bytes(job, size), kept_formula(job, size)
        tolerance = expected // 1000  # a GPU's attention kernels keep some numbers of their own
        report.check(f"{name}: bytes kept for backward", kept, expected, tolerance, origin)
        dist.barrier()
        with StepTimer(job.device, warmup=0) as timer:  # an epoch in which nothing is counted
            train(model, optimizer, batches)
        errors = f"{(found - losses).abs().max():.1e}", f"{error:.1e}"
        sizes = f"{counter.nbytes['all_reduce'] // steps:,}", f"{kept:,}"
        rows.append((name, *errors, *sizes, f"{tokens / timer.steps_ms[0] * 1e3:,.0f} tok/s"))
    report.metrics["losses"] = losses.tolist()
    values = ", ".join(f"{loss:.4f}" for loss in losses)
    lengths = f"{job.samples} sequences of 1 to {job.args.seq_len} tokens"
    report.say(f"{len(losses)} steps, {lengths}, losses {values}")
    headers = ("loss error", "weights error", "handed over", "bytes kept", "speed")
    report.table(rows, ("micro x acc. x ranks", *headers))
    return gradients


def epoch_of(job: Job, size: int, steps: int) -> list:
    """Return an epoch's steps on this rank, in micro-batches of `size` sequences each."""
    count = job.args.global_batch_size // job.ranks // size
    factors = {"micro_batch_size": size, "grad_accum_steps": count}
    args = argparse.Namespace(**vars(job.args) | factors)
    sampler = data.ShardedSampler(job.samples, job.rank, job.ranks, args.seed)
    epoch = itertools.islice(data.job_batches(job.ragged, sampler, args), steps)
    return [[[tensor.to(job.device) for tensor in batch] for batch in step] for step in epoch]


def train_alone(job: Job) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Train with each whole batch at once; return losses, weights before and after, gradients."""
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    start, losses, gradients = proofs.flat(model.parameters()), [], []
    for indices in job.order.split(job.args.global_batch_size):
        inputs, targets = job.batch(job.ragged, indices)
        loss = job.summed_loss(model, inputs, targets) / tokens_in(targets)
        loss.backward()
        losses.append(loss.detach())
        gradients.append(gradient(model))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), start, proofs.flat(model.parameters()), gradients


def kept_bytes(job: Job, size: int) -> int:
    """Return the bytes that autograd keeps for the backward of a micro-batch."""
    model = job.model()
    with kept_for_backward(model) as kept:
        job.summed_loss(model, *job.batch(job.even, range(size)))
    return sum(kept.values())


def kept_formula(job: Job, size: int) -> tuple[int, str]:
    """Return the bytes that a micro-batch of `size` sequences should keep, and where it is from."""
    config, T = job.config, job.args.seq_len
    D, heads = config.dim, config.num_heads
    kv_dim = config.num_kv_heads * (D // heads)
    # Each norm keeps its input, the scaled input, its result and its root; attention queries, keys,
    # values, output, a copy of the heads and a number per head; SwiGLU four tensors of its width.
    block = 2 * (3 * D + 1) + 3 * D + 2 * kv_dim + heads + 4 * config.ffn_dim
    # Head: a norm and its root, probabilities; the token and its target.
    token = 4 * (config.num_layers * block + 3 * D + 1 + config.vocab_size) + 2 * 8
    once = 4 * (T * D // heads + 1)  # two rotary tables, and a number of the loss
    if job.device.type == "cpu":
        return once + size * T * token, "sizes of the tensors that backward needs"
    # A GPU's norms and attention keep other tensors.
    return once + size * (kept_bytes(job, 1) - once), "proportional to the micro-batch size"


def check_sending(job: Job, ways, factors_of) -> None:
    """Count the all-reduces of a step of each way, compare its gradient with one process, time it.

    Time: the shortest of a few steps over --link, since a busy machine spoils one.
    """
    report, steps = job.report, job.args.grad_accum_steps
    group, how = slow_group(job.args.link)
    report.say(how)
    micro_batches = job.dealt(job.ragged, job.rank)
    factors = factors_of(micro_batches)
    expected = job.right_gradient(job.ragged, range(job.args.global_batch_size))
    model = job.ddp()
    with TrafficCounter() as counter:  # one backward of DDP's own
        job.summed_loss(model, *micro_batches[0]).backward()
    buckets = report.metrics["buckets"] = counter.calls["all_reduce"]
    backwards = {"send each": steps, "no_sync": 1, "forward outside": steps, "forward inside": 0}
    rows = []
    for name, way in ways.items():
        model = job.ddp()
        with TrafficCounter() as counter:
            way(model, micro_batches, factors)
        calls, sent = counter.calls["all_reduce"], counter.nbytes["all_reduce"]
        claim, source = "all-reduces per step", f"in {backwards[name]} of {steps} backwards"
        report.check(f"{name}: {claim}", calls, backwards[name] * buckets, 0, source)
        check = f"{name}, a step: bytes all-reduced"
        proofs.one_gradient_sent(report, model, counter, name=check, share=backwards[name])
        if name != "forward inside":
            proofs.same_gradient(report, model, expected, TOLERANCE, f"{name}: {ERROR}")
        own = gradient(model)
        sets = len({round(value, 9) for value in runtime.gather(own.norm().item())})
        alike = "the same" if sets == 1 else "each rank its own"
        row = [name, str(calls), f"{sent:,}", f"{distance(own, expected):.1e}", alike]

        model, timer = job.ddp(group), StepTimer(job.device, warmup=0)
        for _ in range(3):
            dist.barrier()
            with timer:
                way(model, micro_batches, factors)
        row.append(f"{min(timer.steps_ms):.1f} ms")
        if job.args.link:
            busy = RING_FACTOR["all_reduce"](job.ranks) * sent / job.args.link * 1e3
            report.metrics[f"{name}: sending ms"] = busy
            row.append(f"{busy:.1f} ms")
        rows.append(row)
    report.say(f"one step, {steps} micro-batches, {buckets} buckets:")
    headers = "way", "all-reduces", "bytes", "gradient error", "on the ranks", "step", "link busy"
    report.table(rows, headers[: len(rows[0])])


def check_weighings(job: Job, accumulate, weighings) -> None:
    """Print how far each weighing's gradient is from the right one; check those that are right."""
    report, rows = job.report, {name: [name] for name in weighings}
    times = job.args.grad_accum_steps
    wrong = {"sum of micro-batch means": (times - 1, 1e-4, "gradient x accumulation")}
    for kind, sequences in (("full sequences", job.even), ("1 to T tokens", job.ragged)):
        right = job.right_gradient(sequences, range(job.args.global_batch_size))
        batches = job.dealt(sequences, job.rank)
        for name, factors_of in weighings.items():
            model = job.ddp()
            accumulate(model, batches, factors_of(batches))
            error = report.metrics[f"{name}, {kind}"] = distance(gradient(model), right)
            rows[name].append(shown(error))
            due = wrong.get(name, (0, TOLERANCE, "one process"))
            if name == "mean over all tokens" or kind == "full sequences":
                report.check(f"{name}, {kind}: {DISTANCE}", error, *due)
    report.say("error of the gradient, as a part of its length:")
    report.table(rows.values(), ("the loss is a", "full sequences", "1 to T tokens"))


def check_optimizers(job: Job, gradients: list[torch.Tensor]) -> None:
    """Feed optimizers with gradients, and with these times the accumulation; compare the moves."""
    steps, weights = job.args.grad_accum_steps, proofs.flat(job.model().parameters())
    clip = statistics.median(gradient.norm().item() for gradient in gradients)
    adamw = functools.partial(torch.optim.AdamW, weight_decay=0)
    optimizers = {
        "SGD": torch.optim.SGD,
        "AdamW, eps 1e-30": functools.partial(adamw, eps=1e-30),
        "AdamW, eps 1e-8": adamw,
        "AdamW, weight decay 0.1": functools.partial(adamw, weight_decay=0.1),
        "AdamW, norm clipped": adamw,
        "Adam, L2 weight decay 0.1": functools.partial(torch.optim.Adam, weight_decay=0.1),
    }

    def move(name, scale):
        weight = weights.clone().requires_grad_()
        optimizer = optimizers[name]([weight], lr=1e-3)
        for each in gradients:
            weight.grad = each * scale
            if "clipped" in name:
                torch.nn.utils.clip_grad_norm_([weight], clip)
            optimizer.step()
        return weight.detach() - weights

    linear, rows = {"SGD": steps - 1, "AdamW, eps 1e-30": 0}, []
    source = "linear in the gradient, or free of its size"
    for name in optimizers:
        error = job.report.metrics[f"unscaled: {name}"] = distance(move(name, steps), move(name, 1))
        rows.append((name, f"{error:.3%}"))
        if name in linear:
            job.report.check(f"{name}: {DISTANCE}", error, linear[name], 1e-4 * steps, source)
    times = f"gradients x {steps}, {len(gradients)} steps"
    job.report.say(f"{times}: how far the weights' moves differ")
    job.report.table(rows, ("optimizer", "difference"))


def check_remainder(job: Job, accumulate, by_tokens, carry_over) -> None:
    """Take an epoch of one whole step and one micro-batch per rank; compare what becomes of it."""
    report, steps = job.report, job.args.grad_accum_steps
    if steps == 1:
        report.say("one micro-batch per step: no step of an epoch is left incomplete")
        return
    whole = job.args.global_batch_size
    epoch = whole + whole // steps
    *first, leftover = job.dealt(job.even, job.rank, extra=1)
    right = job.right_gradient(job.even, range(whole, epoch))
    found = []
    for factors in (by_tokens([leftover]), [1 / tokens_in(leftover[1]) / steps]):
        model = job.ddp()
        accumulate(model, [leftover], factors)
        found.append(distance(gradient(model), right))

    model, carried = job.ddp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # so that the weights stay the same
    optimizer.register_step_pre_hook(lambda *_: carried.append(gradient(model)))
    carry_over(model, optimizer, [[*first, leftover], first], steps)
    found.append(distance(carried[1], job.right_gradient(job.even, range(epoch))))

    rows = [("dropped", "1", f"{whole} of {epoch}", "-")]
    becomes = {  # how many steps and sequences; the error, and why
        "a step, divided by what it holds": (2, epoch, 0, "one process"),
        "a step, divided by a whole step": (2, epoch, 1 - 1 / steps, "1 micro-batch is there"),
        "carried into the next epoch": (1, whole, 1 / steps, "1 micro-batch more than divided by"),
    }
    for (name, (taken, seen, due, source)), error in zip(becomes.items(), found, strict=True):
        report.check(f"{name}: {DISTANCE}", max(runtime.gather(error)), due, TOLERANCE, source)
        rows.append((name, str(taken), f"{seen} of {epoch}", shown(error)))
    report.say(f"an epoch of {epoch} sequences, {whole} to a step; the last ones are:")
    report.table(rows, ("", "steps", "sequences", "gradient error"))
