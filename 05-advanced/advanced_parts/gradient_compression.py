"""What gradient_compression.py trains, and compares its methods with: one process, and DDP."""

import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from legacy_common import cli, data, measure, runtime
from legacy_common.lab import proofs, traffic
from legacy_common.report import Report

CONTEXT = 16  # bytes that the model reads to predict the next one
TEST_SAMPLES = 2000
TIMED_STEPS = 20  # after two that do not count
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=1.0),
    "adamw": partial(torch.optim.AdamW, lr=2e-3),
}
STEPS = 4  # of the proofs
LR = 1.0
# Of float32's 1.2e-7 a few hundred: sums in another order, four steps, weights larger than moves.
TOLERANCE = 1e-5
ONE_BUCKET, THREE_BUCKETS = 1000, 0.25  # MB of a bucket


def next_byte() -> nn.Module:
    """Return a model of a byte after those before it (Bengio et al., 2003): (B, 16) to (B, 256)."""
    embedding = nn.Embedding(256, 32)
    nn.init.normal_(embedding.weight, std=0.1)
    hidden = nn.Linear(CONTEXT * 32, 256)
    return nn.Sequential(embedding, nn.Flatten(), hidden, nn.ReLU(), nn.Linear(256, 256))


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy. Shapes: batch is contexts (B, 16) and next bytes (B,)."""
    context, target = batch
    return F.cross_entropy(model(context), target)


def draw_batches(args, world, device) -> tuple[list, list]:
    """Return this rank's batch of each step, of those drawn for all ranks, and one to test on."""
    text = data.load_text(max_bytes=1_000_000).long()
    cut = len(text) - len(text) // 20
    generator = torch.Generator().manual_seed(args.seed)

    def draw(first: int, end: int, count: int) -> list[torch.Tensor]:
        starts = torch.randint(first, end - CONTEXT, (count,), generator=generator)
        contexts = text[starts[:, None] + torch.arange(CONTEXT)]
        return [contexts.to(device), text[starts + CONTEXT].to(device)]

    test = draw(cut, len(text), TEST_SAMPLES)
    size, ranks = args.micro_batch_size, range(world.world_size)
    return [[draw(0, cut, size) for _ in ranks][world.rank] for _ in range(args.max_steps)], test


def refuse_settings(rank: int, fraction: float, parameters: list) -> None:
    """Raise UsageError for a rank of PowerSGD that no weight has, and for more than all numbers."""
    n, m = max((p.flatten(1).shape for p in parameters if p.dim() > 1), key=min)
    if rank > min(n, m):
        has = f"the largest is {min(n, m)}, of a weight {n} x {m}"
        raise cli.UsageError(f"--powersgd-rank {rank}: no weight has it: {has}")
    if fraction > 1:
        raise cli.UsageError(f"--top-k-fraction {fraction:g} must be at most 1, which is all")


def train(ddp: nn.Module, optimizer, batches: list) -> None:
    """Take a step on each batch."""
    for batch in batches:
        optimizer.zero_grad()
        loss_of(ddp, batch).backward()
        optimizer.step()


# One process: of all ranks' gradients, (N, *shape) for each parameter, the mean that all ranks get,
# as one vector; `state` is kept between steps.


def half_alone(gradients: list, state: dict, dtype: torch.dtype) -> torch.Tensor:
    """Round each rank's share, and add them in the order of ranks."""
    return proofs.flat(sum((g / len(g)).to(dtype)).float() for g in gradients)


def top_k_alone(gradients: list, state: dict, fraction: float, feedback=True) -> torch.Tensor:
    """Keep a residual for each rank; mask by size, without indices."""
    wanted = torch.cat([g.flatten(1) for g in gradients], 1)  # (N, all numbers)
    wanted += state.get("unsent", 0) * feedback
    sizes = wanted.abs().sort(descending=True).values
    smallest = sizes[:, math.ceil(fraction * sizes.shape[1]) - 1, None]
    sent = torch.where(wanted.abs() >= smallest, wanted, 0)
    state["unsent"] = wanted - sent
    return sent.mean(0)


def power_sgd_alone(gradients: list, state: dict, rank: int, feedback=True) -> torch.Tensor:
    """Find, in float64, the mean gradient's closest matrix with columns from those of M Q."""
    generator = torch.Generator().manual_seed(0)
    means = [g.mean(0) for g in gradients]
    for i, g in enumerate(gradients):
        if means[i].dim() == 1:
            continue
        wanted = g.double().flatten(2)  # (N, n, m)
        n, m = wanted[0].shape
        if i not in state:  # the same first Q as in the hook, and no residual of any rank
            state[i] = torch.randn(m, min(rank, n, m), generator=generator).to(wanted), 0
        q, unsent = state[i]
        wanted += unsent * feedback
        mean = wanted.mean(0)
        columns = mean @ q
        close = columns @ torch.linalg.lstsq(columns, mean).solution
        state[i] = torch.linalg.svd(mean.T @ columns, full_matrices=False).U, wanted - close
        means[i] = close.float()
    return proofs.flat(means)


ALONE = {"Half": half_alone, "TopK": top_k_alone, "PowerSGD": power_sgd_alone}


def handed_over(method: partial | None, parameters: list) -> int:
    """Return by formula the bytes that a rank hands to collectives in a step, of one bucket."""
    size = sum(p.numel() for p in parameters)
    kind, settings = (method.func.__name__, method.keywords) if method else ("", {})
    if kind == "TopK":  # a number and its place, 4 bytes each
        return 8 * math.ceil(settings["fraction"] * size)
    if kind == "PowerSGD":
        # Of a matrix P (n, r) and Q (m, r) (Vogels et al., 2019, algorithm 1); vectors are whole.
        matrices = [p.flatten(1).shape for p in parameters if p.dim() > 1]
        vectors = sum(p.numel() for p in parameters if p.dim() <= 1)
        low_rank = sum(min(settings["rank"], n, m) * (n + m) for n, m in matrices)
        return 4 * (vectors + low_rank)
    return settings.get("dtype", torch.float32).itemsize * size


class Proof:
    """Trains the model a few steps in each way, and compares the weights."""

    def __init__(self, report: Report, data_parallel) -> None:
        self.report, self.data_parallel = report, data_parallel
        generator = torch.Generator().manual_seed(report.args.seed)
        # No byte twice in a context: equal bytes make equal gradients, and of equal sizes topk may
        # take any: two right answers.
        shape = STEPS, report.world.world_size, report.args.micro_batch_size, 256
        shuffled = torch.rand(shape, generator=generator).argsort().to(report.device)
        self.contexts, self.targets = shuffled[..., :CONTEXT], shuffled[..., CONTEXT]
        self.start = proofs.flat(self.build().parameters())

    def build(self) -> nn.Module:
        runtime.seed_everything(self.report.args.seed)
        return next_byte().to(self.report.device)

    def distributed(self, method: partial | None, bucket_mb: float) -> tuple:
        """Return the model after STEPS steps, and the last one's traffic."""
        model, rank = self.build(), self.report.world.rank
        ddp = self.data_parallel(model, method, bucket_cap_mb=bucket_mb)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        batches = list(zip(self.contexts[:, rank], self.targets[:, rank], strict=True))
        train(ddp, optimizer, batches[:-1])
        with traffic.TrafficCounter() as counter:
            train(ddp, optimizer, batches[-1:])
        return model, counter

    def alone(self, method: partial) -> torch.Tensor:
        """Return the weights that one process gets, which computes all ranks' gradients."""
        model, weights, state = self.build(), self.start.clone(), {}
        for step in zip(self.contexts, self.targets, strict=True):
            nn.utils.vector_to_parameters(weights, model.parameters())
            losses = [loss_of(model, batch) for batch in zip(*step, strict=True)]
            per_rank = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
            gradients = [torch.stack(parts) for parts in zip(*per_rank, strict=True)]
            change = ALONE[method.func.__name__](gradients, state, **method.keywords)
            weights = weights - LR * change
        return weights

    def compare(self, name, model, expected: torch.Tensor, source, tolerance=TOLERANCE) -> None:
        """Check weights; the error is relative to the farthest that a weight has moved."""
        error = (proofs.flat(model.parameters()) - expected).abs().max()
        error /= (expected - self.start).abs().max()
        dist.all_reduce(error, op=dist.ReduceOp.MAX)  # the worst rank counts
        self.report.check(name, error.item(), 0, tolerance, source)


def check_methods(proof: Proof, methods: dict[str, partial | None]) -> None:
    """Check each method's weights against one process, and its bytes; keep the bytes in metrics."""
    report, ranks = proof.report, proof.report.world.world_size
    report.metrics["methods"] = {}
    for name, method in methods.items():
        model, counter = proof.distributed(method, ONE_BUCKET)
        # Of an all-gather the counter sees all ranks' parts.
        counted = counter.nbytes["all_reduce"] + counter.nbytes["all_gather"] // ranks
        expected = handed_over(method, list(model.parameters()))
        report.check(f"{name}: bytes handed over", counted, expected, 0, "formula")
        proofs.same_weights(report, model)
        if method:
            dtype = method.keywords.get("dtype")
            # Three halves have several sums, by the order: each of ranks - 1 additions rounds.
            tolerance = (ranks - 1) * torch.finfo(dtype).eps if dtype and ranks > 2 else TOLERANCE
            source = "one process compresses each rank's gradient"
            name_, alone = f"{name}: weights against one process", proof.alone(method)
            proof.compare(name_, model, alone, source, tolerance)
        collective = "all_gather" if counter.calls["all_gather"] else "all_reduce"
        report.metrics["methods"][name] = {"handed_over": expected, "collective": collective}


def check_without_loss(proof: Proof, methods: dict[str, partial]) -> None:
    """Check that methods train as DDP does where they are set to lose nothing, bucket by bucket."""
    plain, _ = proof.distributed(None, THREE_BUCKETS)
    full_rank = max(min(p.flatten(1).shape) for p in plain.parameters() if p.dim() > 1)
    exact = {
        "float32 as half": partial(methods["float16"].func, dtype=torch.float32),
        "top-k of all": partial(methods["top-k"].func, fraction=1.0),
        "PowerSGD, full rank": partial(methods["PowerSGD"].func, rank=full_rank),
    }
    for name, method in exact.items():
        model, _ = proof.distributed(method, THREE_BUCKETS)
        proof.compare(f"{name}: weights against DDP", model, proofs.flat(plain.parameters()), "DDP")


def sent_by_rank(method: dict, ranks: int) -> float:
    """Return the bytes that a rank sends in a ring for those it hands over."""
    parts = ranks if method["collective"] == "all_gather" else 1  # of the whole, all ranks' parts
    return traffic.RING_FACTOR[method["collective"]](ranks) * method["handed_over"] * parts


def fastest_step_ms(report: Report, ddp, optimizer, batches: list) -> float:
    """Return the fastest of TIMED_STEPS: whatever else a machine does only adds to a step."""
    timer = measure.StepTimer(report.device, warmup=2)
    for number in range(timer.warmup + TIMED_STEPS):
        with timer:
            train(ddp, optimizer, [batches[number % len(batches)]])
    return min(timer.steps_ms[timer.warmup :])


def compare_methods(report: Report, prepare, batches, test, groups, bytes_per_second) -> None:
    """Train and time each method; print a row for each, and keep its numbers in report.metrics.

    `prepare(name, group)` gives the DDP model with that method's hook, and its optimizer. Steps are
    timed in two groups: this rank alone, and all ranks on the emulated link.
    """
    methods, rows, ranks = report.metrics["methods"], [], report.world.world_size
    for name in report.progress(methods, "methods"):
        method, (ddp, optimizer) = methods[name], prepare(name)
        train(ddp, optimizer, batches)
        with torch.no_grad():
            test_loss = loss_of(ddp.module, test).item()
        sent = sent_by_rank(method, ranks)
        method |= {"sent": sent, "test_loss": test_loss}
        computing, on_link = (fastest_step_ms(report, *prepare(name, g), batches) for g in groups)
        sending = sent / bytes_per_second * 1e3
        ms = {"computing": computing, "sending": sending, "step_time": on_link}
        method |= {f"{what}_ms": value for what, value in ms.items()}
        whole = methods["float32"]["sent"]
        share = f"{sent / whole:.4f}" if whole else "n/a"
        sizes = f"{method['handed_over']:,}", f"{sent:,.0f}", share
        times = (f"{value:.1f} ms" for value in ms.values())
        rows.append((name, *sizes, f"{test_loss:.3f}", *times))
    report.say("bytes per step, loss after the same samples:")
    headers = ("handed over", "sent", "of float32", "test loss", "computing", "sending", "on link")
    report.table(rows, ("method", *headers))
