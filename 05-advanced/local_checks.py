"""Check local_sgd.py: all ranks played in one process, the bytes; its tables and pictures."""

import hashlib
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import vector_to_parameters

from dist_common import measure, models, proofs, runtime
from dist_common.report import figure
from local_task import Task, warmup_and_decay

# float32 keeps 1.2e-7 of a number; sums of a few hundred, in another order, over some rounds.
TOLERANCE = 1e-5  # relative to how far the weights moved
# AdamW's first step after a reset is gradient / (|gradient| + eps): at the default of 1e-8 a
# gradient that is all rounding error steps as far as any other. Both sides take a larger one.
PROOF_EPS = 1e-5
ROUNDS, STEPS_PER_ROUND = 4, 6  # of the proofs
GPUS, FLOPS, BUSY = 8, 989e12, 0.4  # a worker: H100s, bfloat16 operations/s of each, part in use
TOKENS = 524_288  # per worker and step
LINKS = {"100 Mbit/s": 0.1e9, "1 Gbit/s": 1e9, "10 Gbit/s": 10e9, "400 Gbit/s": 400e9}  # bit/s


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
        for rank, (tokens, targets) in enumerate(batches):
            optimizers[rank].zero_grad()
            F.cross_entropy(replicas[rank](tokens).flatten(0, 1), targets.flatten()).backward()
            optimizers[rank].step()
            schedules[rank].step()
        if step % setting.every:
            continue
        mean = torch.stack([proofs.flat(model.parameters()) for model in replicas]).mean(0)
        if setting.method == "DiLoCo":
            gradient = agreed - mean
            velocity = setting.outer_momentum * velocity + gradient
            agreed = agreed - setting.outer_lr * (gradient + setting.outer_momentum * velocity)
        else:
            agreed = mean
        for model in replicas:
            # A copy for each: the parameters become views of what they are given.
            vector_to_parameters(agreed.clone(), model.parameters())
        _settle_moments(setting.moments, replicas, optimizers)
    return proofs.flat(replicas[0].parameters())


def _settle_moments(moments: str, replicas, optimizers) -> None:
    if moments == "reset":
        for optimizer in optimizers:
            optimizer.state.clear()
    if moments == "averaged":
        for copies in zip(*(model.parameters() for model in replicas), strict=True):
            states = [opt.state[p] for opt, p in zip(optimizers, copies, strict=True)]
            for name in ("exp_avg", "exp_avg_sq"):
                mean = torch.stack([state[name] for state in states]).mean(0)
                for state in states:
                    state[name].copy_(mean)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor, start: torch.Tensor) -> float:
    """Return how far two results are apart, as a part of the way since `start`; the worst rank."""
    error = (ours - theirs).norm() / (theirs - start).norm()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    return error.item()


def weight_sets(model) -> int:
    """Return how many different sets of weights the ranks hold, bit by bit. A collective."""
    weights = proofs.flat(model.parameters()).cpu().numpy().tobytes()
    return len(set(runtime.gather(hashlib.sha256(weights).hexdigest())))


def drift(model) -> float:
    """Return the distance of this rank's weights from the mean, as a part of the mean's length."""
    own = proofs.flat(model.parameters())
    mean = own.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    return ((own - mean).norm() / mean.norm()).item()


def check_rounds(report, task: Task, train, make) -> dict[str, list[float]]:
    """Check averaging and DiLoCo against one process, and that ranks agree after each round.

    Return the drift after each inner step and after each round, by setting.
    """
    steps, h = ROUNDS * STEPS_PER_ROUND, STEPS_PER_ROUND
    settings = [make("averaging", "averaging", h), make("DiLoCo", "DiLoCo", h)]
    settings += [make(f"averaging, moments {m}", "averaging", h, m) for m in ("averaged", "reset")]
    drifts = {}
    for setting in settings:
        model, optimizer = task.build(setting, eps=PROOF_EPS)
        start = proofs.flat(model.parameters())
        seen = _Watch(model, optimizer)
        train(setting, model, optimizer, task.batches(steps, setting), steps)
        seen.before_step()
        expected = simulate(task, setting, steps)
        error = relative_error(proofs.flat(model.parameters()), expected, start)
        source = "all ranks in one process"
        report.check(f"{setting.name}: weights, relative error", error, 0, TOLERANCE, source)
        agree, differ = max(seen.before[h::h]), min(seen.after)
        name = f"{setting.name}: sets of weights"
        report.check(f"{name} after a round", agree, 1, 0, "what all ranks agree on")
        report.check(f"{name} within a round", differ, task.ranks, 0, "each rank's own samples")
        drifts[setting.name] = seen.drifts
    for name in ("averaging", "DiLoCo"):
        report.metrics[f"{name} drift"] = drifts[name]
    most = ", ".join(f"{max(drifts[name]):.0%} with {name}" for name in ("averaging", "DiLoCo"))
    report.say(f"largest distance of a rank from the mean of all, in {h} steps: {most}")
    return {name: drifts[name] for name in ("averaging", "DiLoCo")}


class _Watch:
    """Note how far the ranks are apart, after each inner step and just before the next one."""

    def __init__(self, model, optimizer) -> None:
        self.model = model
        self.before, self.after, self.drifts = [], [], []
        optimizer.register_step_pre_hook(lambda *_: self.before_step())
        optimizer.register_step_post_hook(lambda *_: self.after_step())

    def before_step(self) -> None:
        self.before.append(weight_sets(self.model))
        self.drifts.append(drift(self.model))

    def after_step(self) -> None:
        self.after.append(weight_sets(self.model))
        self.drifts.append(drift(self.model))


def check_lossless(report, task: Task, train, make) -> None:
    """Check the methods with their loss switched off: against DDP, and against each other.

    Prints how far AdamW inside is from DDP: there the mean of weights is no step along the mean
    gradient.
    """
    steps, h = 8, 4
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0}

    def end(setting, inner):
        model, optimizer = task.build(setting, inner)
        start = proofs.flat(model.parameters())
        train(setting, model, optimizer, task.batches(steps, setting), steps)
        return proofs.flat(model.parameters()), start

    ddp, start = end(make("DDP", "DDP"), "SGD")
    source = "PyTorch's DDP with SGD"
    every_step = [make("averaging", "averaging"), make("DiLoCo, outer step 1", "DiLoCo", **plain)]
    for setting in every_step:
        error = relative_error(end(setting, "SGD")[0], ddp, start)
        name = f"{setting.name}, H = 1, SGD: equals DDP, relative error"
        report.check(name, error, 0, TOLERANCE, source)

    averaged, start = end(make("averaging", "averaging", h), "SGD")
    ours, _ = end(make("DiLoCo", "DiLoCo", h, **plain), "SGD")
    name = f"DiLoCo, outer step 1, H = {h}: equals averaging, relative error"
    report.check(name, relative_error(ours, averaged, start), 0, TOLERANCE, "periodic averaging")

    ddp, start = end(make("DDP", "DDP"), "AdamW")
    for moments in ("kept", "averaged"):
        setting = make("averaging", "averaging", 1, moments)
        error = relative_error(end(setting, "AdamW")[0], ddp, start)
        report.metrics[f"AdamW differs from DDP, moments {moments}"] = error
    kept, shared = (
        report.metrics[f"AdamW differs from DDP, moments {m}"] for m in ("kept", "averaged")
    )
    line = "with AdamW, averaging each step (H = 1) differs from DDP: after"
    report.say(f"{line} {steps} steps by {kept:.0%} of the way, {shared:.0%} if moments "
               "are averaged too")  # fmt: skip


def numbers_sent(setting, weights: int, samples: int) -> int:
    """Return how many numbers a rank hands to all-reduce while it takes `samples` batches.

    DDP: each gradient in each step. A round: each weight once, and two moments where averaged.
    """
    if setting.method == "alone":
        return 0
    if setting.method == "DDP":
        return weights * (samples // setting.accumulate)
    return weights * (samples // setting.every) * (3 if setting.moments == "averaged" else 1)


def check_bytes(report, task: Task, settings, results) -> None:
    """Check the bytes handed to all-reduce in some whole rounds."""
    weights, steps = task.config.num_parameters(), task.args.whole_rounds
    for setting, (_, counter, _) in zip(settings, results, strict=True):
        most = max(runtime.gather(counter.bytes["allreduce_"]))
        expected = 4 * numbers_sent(setting, weights, steps)
        source = "a gradient a step, or the weights a round"
        report.check(f"{setting.name}: bytes in {steps} steps", most, expected, 0, source)


def print_losses(report, task: Task, settings, results) -> None:
    """Print the table of all settings: bytes, sending by formula, step time, held-out loss."""
    rows, ring = [], measure.RING_FACTOR["all_reduce"](task.ranks)
    for setting, (loss, counter, step_ms) in zip(settings, results, strict=True):
        per_step = counter.bytes["allreduce_"] / task.args.whole_rounds
        sending_ms = per_step * ring / task.args.link * 1e3
        rows.append((
            setting.name, f"{per_step / 1e3:,.1f} kB", f"{sending_ms:.2f} ms",
            f"{step_ms:.1f} ms", f"{loss:.3f}",
        ))  # fmt: skip
        report.metrics[f"{setting.name}: loss"] = loss
        report.metrics[f"{setting.name}: bytes per step"] = per_step
        report.metrics[f"{setting.name}: sending_ms"] = sending_ms
        report.metrics[f"{setting.name}: step_time_ms"] = step_ms
    batch = task.args.micro_batch_size
    report.say(f"after {task.args.max_steps * batch * task.ranks:,} samples; per step of {batch} "
               "sequences on each rank, mean over rounds:")  # fmt: skip
    headers = ("setting", "all-reduced", "sending", "step", "held-out loss")
    report.table(rows, headers)


def rounds_to_hide(parameters: int, bits_per_second: float) -> tuple[float, float, float, int]:
    """Return s to send the weights, s of a step, DDP's step in s, the H at which rounds add 5%.

    For many workers (ring factor 2), float32 weights, and 6 operations per weight and token, of
    which backward, two thirds, hides DDP's sending.
    """
    sending = 2 * 4 * parameters * 8 / bits_per_second
    step = 6 * parameters * TOKENS / (GPUS * FLOPS * BUSY)
    ddp = step / 3 + max(2 / 3 * step, sending)
    return sending, step, ddp, max(1, math.ceil(sending / (0.05 * step)))


def print_rounds_to_hide(report) -> None:
    """Print how many steps a round needs on some links. By formula; Source: H100 data sheet."""
    rows = []
    for link, speed in LINKS.items():
        sending, step, ddp, h = rounds_to_hide(models.PRESETS["llama3-8b"].num_parameters(), speed)
        ratio = f"{ddp / step:,.1f}x"
        rows.append((link, f"{sending:,.1f} s", f"{step:.1f} s", ratio, f"{h:,}"))
        report.metrics[f"{link}: H"] = h
        report.metrics[f"{link}: DDP slower by"] = ddp / step
    report.say(f"by formula: Llama 3 8B, workers of {GPUS} H100 at {BUSY:.0%} of their peak, "
               f"{TOKENS:,} tokens per worker and step:")  # fmt: skip
    headers = ("link between workers", "sending", "computing", "DDP's step", "H for 5% more time")
    report.table(rows, headers)


def draw_losses(folder, metrics, settings, drifts) -> None:
    """Draw bytes against loss, and how far the ranks drift apart between rounds."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    colours = {"DDP": "tab:blue", "averaging": "tab:orange", "DiLoCo": "tab:green"}
    sides = {"DDP": "center", "averaging": "bottom", "DiLoCo": "top"}  # so that no label covers one
    with figure(folder / "local_sgd_bytes.png", figsize=(8, 5)) as axes:
        losses = [metrics[f"{setting.name}: loss"] for setting in settings]
        for setting, loss in zip(settings, losses, strict=True):
            kilobytes = metrics[f"{setting.name}: bytes per step"] / 1e3
            if setting.method == "alone":
                axes.axhline(loss, color="grey", linestyle=":", label="alone: nothing sent")
                continue
            axes.scatter(kilobytes, loss, color=colours[setting.method], zorder=3)
            label = setting.name.removeprefix(setting.method).lstrip(", ") or "DDP"
            factor, align, side = 1.04, "left", sides[setting.method]
            if setting.moments != "kept":
                factor, align, side = 0.96, "right", "top"
            axes.text(kilobytes * factor, loss, label, fontsize=8, ha=align, va=side)
        for method, colour in colours.items():
            axes.scatter([], [], color=colour, label=method)
        axes.set_xscale("log")
        left, right = axes.get_xlim()
        axes.set_xlim(left / 2, right * 1.2)  # room for labels
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("kB that a rank hands to all-reduce, per step")
        axes.set_ylabel("held-out loss, nats per byte")
        axes.set_title("The same samples for all: what fewer bytes cost")
        axes.legend(loc="upper right")
    styles = {
        "averaging": {"color": "tab:orange", "linewidth": 4, "alpha": 0.6},
        "DiLoCo": {"color": "tab:green"},
    }
    with figure(folder / "local_sgd_drift.png", figsize=(8, 3)) as axes:
        for name, drift_of_steps in drifts.items():
            # After each step, and once more before the next: a round ends in between.
            steps = [(index + 1) // 2 for index in range(len(drift_of_steps))]
            percent = [100 * distance for distance in drift_of_steps]
            axes.plot(steps, percent, label=name, **styles[name])
        axes.set_xticks(range(0, ROUNDS * STEPS_PER_ROUND + 1, STEPS_PER_ROUND))
        axes.set_xlabel("inner step; a round ends at each number")
        axes.set_ylabel("distance of a rank\nfrom the mean, %")
        axes.legend(loc="upper left")
