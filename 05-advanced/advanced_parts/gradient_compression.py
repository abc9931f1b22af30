"""What gradient_compression.py trains, and compares its methods with: one process, and DDP."""

import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dist_common import cli, data, measure, runtime
from dist_common.lab import proofs, traffic
from dist_common.report import Report

CONTEXT = 16  # bytes that the model reads to predict the next one
TEST_SAMPLES = 2000
TIMED_STEPS = 20  # after two that do not count
RANKS = (2, 8, 64, 512)  # of the table by formula
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=1.0),
    "adamw": partial(torch.optim.AdamW, lr=2e-3),
}
NO_FEEDBACK = ", no feedback"
STEPS = 4  # of the proofs
LR = 1.0
# Of float32's 1.2e-7 a few hundred: sums in another order, four steps, weights larger than moves.
TOLERANCE = 1e-5
ONE_BUCKET, THREE_BUCKETS = 1000, 0.25  # MB of a bucket
Gradients = list[torch.Tensor]  # of all parameters, in their order


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
    largest = max((p.flatten(1) for p in parameters if p.dim() > 1), key=lambda p: min(p.shape))
    if rank > min(largest.shape):
        shape = " x ".join(map(str, largest.shape))
        has = f"the largest is {min(largest.shape)}, of a weight {shape}"
        raise cli.UsageError(f"--powersgd-rank {rank}: no weight has it: {has}")
    if fraction > 1:
        raise cli.UsageError(f"--top-k-fraction {fraction:g} must be at most 1, which is all")


def train(ddp: nn.Module, optimizer, batches: list) -> None:
    """Take a step on each batch."""
    for batch in batches:
        optimizer.zero_grad()
        loss_of(ddp, batch).backward()
        optimizer.step()


# one process: the means that all ranks get, of all parameters; `state` is kept between steps


def half_alone(per_rank: list[Gradients], state: dict, dtype: torch.dtype) -> Gradients:
    """Round each rank's share, and add them in the order of ranks."""
    shares = [[(g / len(per_rank)).to(dtype) for g in own] for own in per_rank]
    return [sum(parts[1:], parts[0]).float() for parts in zip(*shares, strict=True)]


def top_k_alone(per_rank, state: dict, fraction: float, feedback: bool = True) -> Gradients:
    """Keep a residual for each rank; mask by size, without indices."""
    means = [torch.zeros_like(g) for g in per_rank[0]]
    for rank, own in enumerate(per_rank):
        residual = state.get(rank, [0] * len(own))
        wanted = [g + r * feedback for g, r in zip(own, residual, strict=True)]
        sizes = proofs.flat(wanted).abs().sort(descending=True).values
        smallest = sizes[math.ceil(fraction * len(sizes)) - 1]
        sent = [torch.where(matrix.abs() >= smallest, matrix, 0) for matrix in wanted]
        state[rank] = [matrix - part for matrix, part in zip(wanted, sent, strict=True)]
        for mean, part in zip(means, sent, strict=True):
            mean += part / len(per_rank)
    return means


def power_sgd_alone(per_rank, state: dict, rank: int, feedback: bool = True) -> Gradients:
    """Find, in float64, the mean gradient's closest matrix with columns from those of M Q."""
    generator = torch.Generator().manual_seed(0)
    means = [sum(gradients) / len(per_rank) for gradients in zip(*per_rank, strict=True)]
    for i, g in enumerate(means):
        if g.dim() == 1:
            continue
        if i not in state:  # the same first Q as in the hook, and no residual of any rank
            shape = (g[0].numel(), min(rank, *g.flatten(1).shape))
            q = torch.randn(shape, generator=generator).to(g).double()
            state[i] = q, [0] * len(per_rank)
        q, residuals = state[i]
        wanted = [own[i].double().flatten(1) + residual * feedback
                  for own, residual in zip(per_rank, residuals, strict=True)]  # fmt: skip
        mean = sum(wanted) / len(wanted)
        columns = mean @ q
        close = columns @ torch.linalg.lstsq(columns, mean).solution
        q = torch.linalg.svd(mean.T @ columns, full_matrices=False).U
        state[i] = q, [matrix - close for matrix in wanted]
        means[i] = close.to(g.dtype).view_as(g)
    return means


ALONE = {"Half": half_alone, "TopK": top_k_alone, "PowerSGD": power_sgd_alone}


def handed_over(method: partial | None, parameters: list) -> int:
    """Return by formula the bytes that a rank hands to collectives in a step, of one bucket."""
    size = sum(p.numel() for p in parameters)
    kind, settings = (method.func.__name__, method.keywords) if method else ("", {})
    if kind == "TopK":  # a number and its place, 4 bytes each
        return 8 * math.ceil(settings["fraction"] * size)
    if kind == "PowerSGD":  # P and Q of a matrix; a vector's own
        shapes = [p.flatten(1).shape if p.dim() > 1 else (len(p), 0) for p in parameters]
        return 4 * sum(min(settings["rank"], n, m) * (n + m) if m else n for n, m in shapes)
    return settings.get("dtype", torch.float32).itemsize * size


class Proof:
    """Trains the model a few steps in each way, and compares the weights."""

    def __init__(self, report: Report, data_parallel) -> None:
        self.report, self.data_parallel = report, data_parallel
        world, generator = report.world, torch.Generator().manual_seed(report.args.seed)

        def draw() -> list[torch.Tensor]:
            # No byte twice in a context: equal bytes make equal gradients, and of equal sizes topk
            # may take any: two right answers.
            size, device = report.args.micro_batch_size, report.device
            shuffled = torch.rand(size, 256, generator=generator).argsort(1).to(device)
            return [shuffled[:, :CONTEXT], shuffled[:, CONTEXT]]

        self.batches = [[draw() for _ in range(world.world_size)] for _ in range(STEPS)]
        self.own = [step[world.rank] for step in self.batches]
        self.start = proofs.flat(self.build().parameters())

    def build(self) -> nn.Module:
        runtime.seed_everything(self.report.args.seed)
        return next_byte().to(self.report.device)

    def distributed(
        self, method: partial | None, bucket_mb: float
    ) -> tuple[nn.Module, traffic.TrafficCounter]:
        """Return the model after STEPS steps, and the last one's traffic."""
        model = self.build()
        ddp = self.data_parallel(model, method, bucket_cap_mb=bucket_mb)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        train(ddp, optimizer, self.own[:-1])
        with traffic.TrafficCounter() as counter:
            train(ddp, optimizer, self.own[-1:])
        return model, counter

    def alone(self, method: partial) -> torch.Tensor:
        """Return the weights that one process gets, which computes all ranks' gradients."""
        model = self.build()
        weights = list(model.parameters())
        twin, state = ALONE[method.func.__name__], {}
        for batches in self.batches:
            per_rank = [torch.autograd.grad(loss_of(model, b), weights) for b in batches]
            means = twin(per_rank, state, **method.keywords)
            with torch.no_grad():
                for weight, mean in zip(weights, means, strict=True):
                    weight -= LR * mean
        return proofs.flat(weights)

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
            ordered = dtype and ranks > 2
            tolerance = (ranks - 1) * torch.finfo(dtype).eps if ordered else TOLERANCE
            source = "one process compresses each rank's gradient"
            name_, alone = f"{name}: weights against one process", proof.alone(method)
            proof.compare(name_, model, alone, source, tolerance)
        report.metrics["methods"][name] = {
            "handed_over": expected,
            "collective": "all_gather" if counter.calls["all_gather"] else "all_reduce",
        }


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


# bytes, losses and times


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
        computing, on_link = (fastest_step_ms(report, *prepare(name, g), batches) for g in groups)
        ms = {"computing_ms": computing, "sending_ms": sent / bytes_per_second * 1e3,
              "step_time_ms": on_link}  # fmt: skip
        method |= {"sent": sent, "test_loss": test_loss, **ms}
        whole = methods["float32"]["sent"]
        share = f"{sent / whole:.4f}" if whole else "n/a"
        sizes = f"{method['handed_over']:,}", f"{sent:,.0f}", share
        times = (f"{value:.1f} ms" for value in ms.values())
        rows.append((name, *sizes, f"{test_loss:.3f}", *times))
    report.say("bytes per step, loss after the same samples:")
    headers = ("handed over", "sent", "of float32", "test loss", "computing", "sending", "on link")
    report.table(rows, ("method", *headers))


def print_bytes(report: Report) -> None:
    """Print by formula what a rank sends on other numbers of ranks, and where top-k loses."""
    methods = report.metrics["methods"]
    rows = [(name, *(f"{sent_by_rank(method, ranks):,.0f}" for ranks in RANKS))
            for name, method in methods.items() if NO_FEEDBACK not in name]  # fmt: skip
    report.say("bytes that a rank sends per step, by formula:")
    report.table(rows, ("method", *(f"{ranks} ranks" for ranks in RANKS)))
    top_k = methods["top-k"]
    for other in ("float32", "bfloat16"):
        whole = methods[other]
        ranks = next(n for n in range(2, 10**7) if sent_by_rank(top_k, n) >= sent_by_rank(whole, n))
        report.say(f"top-k sends as much as {other} on {ranks:,} ranks, and more beyond")
        report.metrics[f"ranks at which top-k sends as much as {other}"] = ranks
