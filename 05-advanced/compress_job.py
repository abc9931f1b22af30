"""What gradient_compression.py trains, and what it prints, times and draws of it."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dist_common import cli, data, measure
from dist_common.report import Report, figure

CONTEXT = 16  # bytes that the model reads to predict the next one
TEST_SAMPLES = 2000
TIMED_STEPS = 20  # after two that do not count
RANKS = (2, 8, 64, 512)  # of the table by formula
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=1.0),
    "adamw": partial(torch.optim.AdamW, lr=2e-3),
}
NO_FEEDBACK = ", no feedback"


def done(tensor: torch.Tensor) -> torch.futures.Future:
    """Return a Future that has its value already: a hook that has waited owes DDP one."""
    future = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
    future.set_result(tensor)
    return future


class NextByte(nn.Module):
    """Predict a byte from those before it (Bengio et al., 2003). Shapes: (B, 16) to (B, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.hidden = nn.Linear(CONTEXT * 32, 256)
        self.head = nn.Linear(256, 256)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(self.embedding(context).flatten(1))))


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy. Shapes: batch is contexts (B, 16) and next bytes (B,)."""
    context, target = batch
    return F.cross_entropy(model(context), target)


def describe(args, ranks: int, weights: list) -> str:
    """Return what is trained, in one line."""
    samples = f"{args.max_steps} steps x {ranks} ranks x {args.micro_batch_size} samples"
    return f"{sum(p.numel() for p in weights):,} weights, {samples}, {args.optimizer}"


def draw_batches(args, steps: int, ranks: int, device) -> tuple[list, list]:
    """Return every rank's batch of each step, [step][rank], and one to test on; same everywhere."""
    text = data.load_text(max_bytes=1_000_000).long()
    cut = len(text) - len(text) // 20
    generator = torch.Generator().manual_seed(args.seed)

    def draw(first: int, end: int, count: int) -> list[torch.Tensor]:
        starts = torch.randint(first, end - CONTEXT, (count,), generator=generator)
        return [text[starts[:, None] + torch.arange(CONTEXT)].to(device),
                text[starts + CONTEXT].to(device)]  # fmt: skip

    test = draw(cut, len(text), TEST_SAMPLES)
    size = args.micro_batch_size
    return [[draw(0, cut, size) for _ in range(ranks)] for _ in range(steps)], test


def refuse_settings(rank: int, fraction: float, parameters: list) -> None:
    """Raise UsageError for a rank of PowerSGD that no weight has, and for more than all numbers."""
    largest = max((p.flatten(1) for p in parameters if p.dim() > 1), key=lambda p: min(p.shape))
    if rank > min(largest.shape):
        shape = " x ".join(map(str, largest.shape))
        has = f"the largest is {min(largest.shape)}, of a weight {shape}"
        raise cli.UsageError(f"--powersgd-rank {rank}: no weight has it: {has}")
    if fraction > 1:
        raise cli.UsageError(f"--top-k-fraction {fraction:g} must be at most 1, which is all")


def sent_by_rank(collective: str, handed_over: float, ranks: int) -> float:
    """Return the bytes that a rank sends in a ring for those it hands over."""
    if collective == "all_gather":  # a rank's part is its own: it passes on all parts but one
        return (ranks - 1) * handed_over
    return measure.RING_FACTOR[collective](ranks) * handed_over


def train(ddp: nn.Module, optimizer, batches: list) -> torch.Tensor:
    """Take a step on each batch; return this rank's losses. Shapes: (steps,)."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(ddp, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def train_methods(report: Report, prepare, batches: list, test: list) -> dict[str, tuple]:
    """Return the mean losses of all steps, and the one on `test`, by each method's name.

    `prepare(name, group)` gives the DDP model with that method's hook, and its optimizer.
    """
    losses = {}
    for name in report.progress(report.metrics["methods"], "methods"):
        ddp, optimizer = prepare(name)
        curve = train(ddp, optimizer, batches)
        dist.all_reduce(curve)
        with torch.no_grad():
            losses[name] = curve / dist.get_world_size(), loss_of(ddp.module, test).item()
    return losses


def time_methods(report: Report, prepare, batches: list, group) -> dict[str, float]:
    """Return each method's fastest step in ms; `prepare` as for train_methods.

    The fastest: whatever else a machine does only adds to a step.
    """
    times = {}
    for name in report.metrics["methods"]:
        ddp, optimizer = prepare(name, group)
        timer = measure.StepTimer(report.device, warmup=2)
        for number in range(timer.warmup + TIMED_STEPS):
            with timer:
                train(ddp, optimizer, [batches[number % len(batches)]])
        times[name] = min(timer.steps_ms[timer.warmup :])
    return times


def print_methods(report: Report, losses: dict, steps_ms: list[dict], bytes_per_second) -> None:
    """Print a row for each method; keep its numbers in report.metrics."""
    methods, ranks, rows = report.metrics["methods"], report.world.world_size, []
    for name, method in methods.items():
        sent = sent_by_rank(method["collective"], method["handed_over"], ranks)
        link_ms = sent / bytes_per_second * 1e3 if bytes_per_second else 0.0
        train, test = losses[name]
        method |= {"sent": sent, "test_loss": test, "losses": train.tolist()}
        computing_ms, step_ms = (times[name] for times in steps_ms)
        method |= {"computing_ms": computing_ms, "sending_ms": link_ms, "step_time_ms": step_ms}
        whole = methods["float32"]["sent"]
        rows.append((
            name, f"{method['handed_over']:,}", f"{sent:,.0f}",
            f"{sent / whole:.4f}" if whole else "n/a", f"{test:.3f}",
            *(f"{ms:.1f} ms" for ms in (computing_ms, link_ms, step_ms)),
        ))  # fmt: skip
    headers = ("method", "handed over", "sent", "of float32", "test loss",
               "computing", "sending", "on link")  # fmt: skip
    report.say("bytes per step, loss after the same samples:")
    report.table(rows, headers)


def print_bytes(report: Report) -> None:
    """Print by formula what a rank sends on other numbers of ranks, and where top-k loses."""
    methods = report.metrics["methods"]
    kept = [name for name in methods if NO_FEEDBACK not in name]

    def sent(name: str, ranks: int) -> float:
        return sent_by_rank(methods[name]["collective"], methods[name]["handed_over"], ranks)

    report.say("bytes that a rank sends per step, by formula:")
    rows = [(name, *(f"{sent(name, ranks):,.0f}" for ranks in RANKS)) for name in kept]
    report.table(rows, ("method", *(f"{ranks} ranks" for ranks in RANKS)))
    for other in ("float32", "bfloat16"):
        ranks = next(n for n in range(2, 10**7) if sent("top-k", n) >= sent(other, n))
        report.say(f"top-k sends as much as {other} on {ranks:,} ranks, and more beyond")
        report.metrics[f"ranks at which top-k sends as much as {other}"] = ranks


def draw(report: Report) -> None:
    """Draw bytes against loss, and how each method's loss fell, where a folder was named."""
    if not (report.output and report.world.is_rank0):
        return
    methods = report.metrics["methods"]
    colors = {}
    with figure(report.output / "gradient_compression.png", 1, 2, figsize=(11, 4.4)) as axes:
        for name, method in methods.items():
            family = name.removesuffix(NO_FEEDBACK)
            plain = name == family
            color = colors.setdefault(family, f"C{len(colors)}")
            x, y = method["sent"] / 1000, method["test_loss"]
            axes[0].plot(x, y, "o" if plain else "x", color=color, markersize=9)
            place = (8, 6 if list(colors).index(family) % 2 == 0 else -13)
            axes[0].annotate(name, (x, y), place, textcoords="offset points", fontsize=9)
            curve = torch.tensor(method["losses"])
            curve = curve[: len(curve) // 10 * 10].view(-1, 10).mean(1)
            steps = [10 * number + 5 for number in range(len(curve))]
            axes[1].plot(steps, curve, "-" if plain else ":", color=color, label=name)
        axes[0].set(xscale="log", xlabel="kB that a rank sends per step", ylabel="test loss")
        axes[0].margins(0.25, 0.12)
        axes[0].set_title("bytes against loss after the same samples", fontsize=10)
        axes[1].set(xlabel="step", ylabel="training loss, mean of 10 steps")
        axes[1].set_title("how the loss fell", fontsize=10)
        axes[1].legend(fontsize=8)
