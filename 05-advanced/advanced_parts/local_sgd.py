"""What local_sgd.py trains and is compared with: all ranks in one process, bytes, formulas."""

import math
from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import vector_to_parameters
from torch.utils.data import Subset

from legacy_common import data, measure, models, runtime
from legacy_common.cli import UsageError
from legacy_common.lab import proofs, traffic

HELD_OUT = 20  # every 20th sequence of the text is for testing
# float32 keeps 1.2e-7 of a number; sums of a few hundred, in another order, over some rounds.
TOLERANCE = 1e-5  # relative to how far the weights moved
# AdamW's first step after a reset is gradient / (|gradient| + eps): at the default of 1e-8 a
# gradient that is all rounding error steps as far as any other. Both sides take a larger one.
PROOF_EPS = 1e-5
ROUNDS, STEPS_PER_ROUND = 4, 6  # of the proofs


class Task:
    """Predict the next byte of Python's library: each rank trains on other modules of it."""

    def __init__(self, args, world, device) -> None:
        self.args, self.device, self.ranks, self.rank = args, device, world.world_size, world.rank
        self.sequences = data.Sequences(data.load_text(max_bytes=1_000_000), args.seq_len)
        numbers = torch.arange(len(self.sequences))
        if len(numbers) < HELD_OUT * self.ranks:
            few = f"--seq-len {args.seq_len} cuts the text into {len(numbers)} sequences"
            needed = f"{self.ranks} ranks need {HELD_OUT * self.ranks}"
            raise UsageError(f"{few}, {needed}: take a smaller one")
        self.config = models.TransformerConfig(256, 32, 1, 2, 1, 88, args.seq_len)
        held_out = numbers % HELD_OUT == 0
        self.shards = numbers[~held_out].tensor_split(self.ranks)
        test = Subset(self.sequences, numbers[held_out][::6].tolist())
        self.test = next(data.batches_of(test, 1, len(test), 0, len(test), device))
        most = min(len(shard) for shard in self.shards)
        if args.micro_batch_size > most:
            raise UsageError(f"--micro-batch-size must be at most {most}, the sequences of a rank")
        shard = f"{most:,} sequences of its own"
        self.says = f"{self.config.num_parameters():,} weights; each rank has {shard}"

    def build(self, setting, inner: str = "AdamW", eps: float = 1e-8):
        """Return the same model on every rank, and an inner optimizer for it."""
        runtime.seed_everything(self.args.seed)
        model = models.Transformer(self.config).to(self.device)
        if inner == "SGD":
            return model, torch.optim.SGD(model.parameters(), lr=0.5)
        # A k times larger batch has less noise: AdamW bears a learning rate sqrt(k) times larger.
        lr = self.args.lr * math.sqrt(setting.accumulate)
        return model, torch.optim.AdamW(model.parameters(), lr=lr, eps=eps)

    def batches(self, steps: int, setting, rank: int | None = None):
        """Yield a rank's batches, from its own part of the text. Shapes: (B, T) twice."""
        rank = self.rank if rank is None else rank
        draw = torch.Generator().manual_seed(1000 * self.args.seed + rank)
        shard = self.shards[rank]
        shuffled = Subset(self.sequences, shard[torch.randperm(len(shard), generator=draw)])
        size = self.args.micro_batch_size * setting.accumulate
        return data.batches_of(shuffled, steps, size, 0, size, self.device)

    @torch.no_grad()
    def held_out_loss(self, model) -> float:
        """Return the loss on text that no rank trained on, the mean over the ranks' models."""
        tokens, targets = self.test
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        dist.all_reduce(loss)
        return loss.item() / self.ranks


def warmup_and_decay(optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Raise the learning rate over a tenth of the steps, then lower it along a cosine to 0."""
    warmup = max(1, steps // 10)

    def factor(step: int) -> float:
        rest = max(0, step - warmup) / max(1, steps - warmup)
        return min(1, (step + 1) / warmup) * (1 + math.cos(math.pi * rest)) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def time_rounds(batches: Iterator, steps: int, timer: measure.StepTimer) -> Iterator:
    """Pass batches on, and time each `steps` of them, until the next batch is asked for."""
    while taken := list(islice(batches, steps)):
        with timer:
            yield from taken


def simulate(task: Task, setting, steps: int) -> torch.Tensor:
    """Play all ranks in one process, one after the other; return rank 0's weights as one vector.

    The outer step is written out: v = momentum v + g, then weights - lr (g + momentum v)
    (Nesterov's momentum as Sutskever et al., 2013, section 2, up to a change of variables).
    """
    every = (task.build(setting, eps=PROOF_EPS) for _ in range(task.ranks))
    replicas, optimizers = zip(*every, strict=True)
    schedules = [warmup_and_decay(optimizer, steps) for optimizer in optimizers]
    agreed = proofs.flat(replicas[0].parameters())
    velocity = torch.zeros_like(agreed)
    streams = [task.batches(steps, setting, rank) for rank in range(task.ranks)]
    for step, batches in enumerate(zip(*streams, strict=True), 1):
        workers = zip(replicas, optimizers, schedules, batches, strict=True)
        for model, optimizer, schedule, (tokens, targets) in workers:
            optimizer.zero_grad()
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
            schedule.step()
        if step % setting.every:
            continue
        mean = torch.stack([proofs.flat(model.parameters()) for model in replicas]).mean(0)
        if setting.method == "DiLoCo":
            gradient = agreed - mean
            velocity = setting.outer_momentum * velocity + gradient
            mean = agreed - setting.outer_lr * (gradient + setting.outer_momentum * velocity)
        agreed = mean
        for model in replicas:
            # A copy for each: the parameters become views of what they are given.
            vector_to_parameters(agreed.clone(), model.parameters())
        # Of each weight in turn: what each rank's optimizer remembers.
        for states in zip(*(optimizer.state.values() for optimizer in optimizers), strict=True):
            for name in ("exp_avg", "exp_avg_sq") if setting.moments == "averaged" else ():
                mean = torch.stack([state[name] for state in states]).mean(0)
                for state in states:
                    state[name].copy_(mean)
        if setting.moments == "reset":
            for optimizer in optimizers:
                optimizer.state.clear()
    return proofs.flat(replicas[0].parameters())


def relative_error(ours: torch.Tensor, theirs: torch.Tensor, start: torch.Tensor) -> float:
    """Return how far two results are apart, as a part of the way since `start`; the worst rank."""
    error = (ours - theirs).norm() / (theirs - start).norm()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    return error.item()


def check_rounds(report, task: Task, train, make) -> None:
    """Check averaging and DiLoCo against one process, and that ranks agree after each round."""
    steps, h = ROUNDS * STEPS_PER_ROUND, STEPS_PER_ROUND
    moments = [make(f"averaging, moments {m}", "averaging", h, m) for m in ("averaged", "reset")]
    most = []
    for setting in [make("averaging", "averaging", h), make("DiLoCo", "DiLoCo", h), *moments]:
        model, optimizer = task.build(setting, eps=PROOF_EPS)
        start, seen = proofs.flat(model.parameters()), []

        def look(*_, model=model, seen=seen):
            seen.append(sets_and_drift(model))

        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)
        train(setting, model, optimizer, task.batches(steps, setting), steps)
        look()
        sets, drifts = zip(*seen, strict=True)
        most.append(f"{max(drifts):.0%} with {setting.name}")
        end, name = proofs.flat(model.parameters()), f"{setting.name}: weights, relative error"
        error = relative_error(end, simulate(task, setting, steps), start)
        report.check(name, error, 0, TOLERANCE, "all ranks in one process")
        before, after = sets[0::2], sets[1::2]  # the inner steps
        name, source = f"{setting.name}: sets of weights", "each rank's own samples"
        report.check(f"{name} after a round", max(before[h::h]), 1, 0, "what all ranks agree on")
        report.check(f"{name} within a round", min(after), task.ranks, 0, source)
    apart = ", ".join(most[:2])
    report.say(f"largest distance of a rank from the mean of all, in {h} steps: {apart}")


def sets_and_drift(model) -> tuple[int, float]:
    """Return how many sets of weights the ranks hold, bit by bit, and how far this one's is.

    A distance from the mean of all ranks, as a part of the mean's length. A collective.
    """
    weights = runtime.gather(proofs.flat(model.parameters()).cpu())
    mean = torch.stack(weights).mean(0)
    drift = (weights[dist.get_rank()] - mean).norm() / mean.norm()
    return len({own.numpy().tobytes() for own in weights}), drift.item()


def compare(report, task: Task, settings, results) -> None:
    """Check the bytes all-reduced in whole rounds; print each setting's bytes, times and loss."""
    rows, ring, args = [], traffic.RING_FACTOR["all_reduce"](task.ranks), task.args
    steps = args.whole_rounds
    for setting, (loss, counter, step_ms) in zip(settings, results, strict=True):
        name, sent = setting.name, counter.nbytes["all_reduce"]
        # DDP: each gradient in each step. A round: each weight, and two moments where averaged.
        numbers = 3 if setting.moments == "averaged" else int(setting.method != "alone")
        numbers *= steps // (setting.every * setting.accumulate) * task.config.num_parameters()
        most, source = max(runtime.gather(sent)), "a gradient a step, or the weights a round"
        report.check(f"{name}: bytes in {steps} steps", most, 4 * numbers, 0, source)
        per_step = sent / steps
        sending_ms = per_step * ring / args.link * 1e3
        times = f"{sending_ms:.2f} ms", f"{step_ms:.1f} ms"
        rows.append((name, f"{per_step / 1e3:,.1f} kB", *times, f"{loss:.3f}"))
        values = {"loss": loss, "bytes per step": per_step, "sending_ms": sending_ms}
        values["step_time_ms"] = step_ms
        report.metrics |= {f"{name}: {what}": value for what, value in values.items()}
    samples = f"{args.max_steps * args.micro_batch_size * task.ranks:,} samples"
    per = f"per step of {args.micro_batch_size} sequences on each rank"
    report.say(f"after {samples}; {per}, mean over rounds:")
    report.table(rows, ("setting", "all-reduced", "sending", "step", "held-out loss"))
