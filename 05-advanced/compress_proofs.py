"""Check gradient_compression.py: each method against one process, DDP, PyTorch and a formula."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as pytorch
from torch.nn.parallel import DistributedDataParallel as DDP

from compress_job import CONTEXT, NextByte, loss_of, train
from dist_common import measure, proofs, runtime
from dist_common.report import Report

STEPS = 4
LR = 1.0
# Of float32's 1.2e-7 a few hundred: sums in another order, four steps, weights larger than moves.
TOLERANCE = 1e-5
BUCKET_MB = 0.25  # three buckets
Gradients = list[torch.Tensor]  # of all parameters, in their order


class HalfAlone:
    """One process that rounds each rank's share, and adds them in the order of ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def mean(self, per_rank: list[Gradients], buckets: list[list[int]]) -> Gradients:
        shares = [[(g / len(per_rank)).to(self.dtype) for g in own] for own in per_rank]
        return [sum(parts[1:], parts[0]).float() for parts in zip(*shares, strict=True)]


class TopKAlone:
    """One process that keeps a residual for each rank; it masks by size and knows no indices."""

    def __init__(self, fraction: float, feedback: bool = True) -> None:
        self.fraction, self.feedback = fraction, feedback
        self.residuals = {}

    def mean(self, per_rank: list[Gradients], buckets: list[list[int]]) -> Gradients:
        means = [torch.zeros_like(g) for g in per_rank[0]]
        for rank, own in enumerate(per_rank):
            residual = self.residuals.get(rank, [torch.zeros_like(g) for g in own])
            wanted = [g + r * self.feedback for g, r in zip(own, residual, strict=True)]
            for bucket in buckets:
                sizes = proofs.flat(wanted[i] for i in bucket).abs().sort(descending=True).values
                smallest = sizes[math.ceil(self.fraction * len(sizes)) - 1]
                for i in bucket:
                    sent = torch.where(wanted[i].abs() >= smallest, wanted[i], 0)
                    wanted[i] = wanted[i] - sent
                    means[i] += sent / len(per_rank)
            self.residuals[rank] = wanted
        return means


class PowerSGDAlone:
    """One process, float64: the mean gradient's closest matrix with columns from those of M Q."""

    def __init__(self, rank: int, feedback: bool = True) -> None:
        self.rank, self.feedback = rank, feedback
        self.residuals, self.q = {}, {}

    def mean(self, per_rank: list[Gradients], buckets: list[list[int]]) -> Gradients:
        if not self.q:
            generator = torch.Generator().manual_seed(0)
            for i, g in enumerate(per_rank[0]):
                if g.dim() > 1:
                    shape = (g[0].numel(), min(self.rank, *g.flatten(1).shape))
                    self.q[i] = torch.randn(shape, generator=generator).to(g).double()
        return [self.matrix(i, [own[i] for own in per_rank]) if i in self.q
                else sum(own[i] for own in per_rank) / len(per_rank)
                for i in range(len(per_rank[0]))]  # fmt: skip

    def matrix(self, i: int, per_rank: Gradients) -> torch.Tensor:
        """Return what replaces the mean of one weight's gradients."""
        residuals = self.residuals.get(i, [0] * len(per_rank))
        wanted = [(g.double().flatten(1) + r * self.feedback)
                  for g, r in zip(per_rank, residuals, strict=True)]  # fmt: skip
        mean = sum(wanted) / len(wanted)
        columns = mean @ self.q[i]
        close = columns @ torch.linalg.lstsq(columns, mean).solution
        self.residuals[i] = [matrix - close for matrix in wanted]
        self.q[i] = torch.linalg.svd(mean.T @ columns, full_matrices=False).U
        return close.to(per_rank[0].dtype).view_as(per_rank[0])


ALONE = {"Half": HalfAlone, "TopK": TopKAlone, "PowerSGD": PowerSGDAlone}


def handed_over(method: partial | None, parameters: list, buckets: list[list[int]]) -> int:
    """Return by formula the bytes that a rank hands to collectives in a step."""
    sizes = [sum(parameters[i].numel() for i in bucket) for bucket in buckets]
    kind, settings = (method.func.__name__, method.keywords) if method else ("", {})
    if kind == "Half":
        return settings["dtype"].itemsize * sum(sizes)
    if kind == "TopK":  # a number and its place, 4 bytes each
        return 8 * sum(math.ceil(settings["fraction"] * size) for size in sizes)
    if kind == "PowerSGD":
        return 4 * sum(numbers_of(p, settings["rank"]) for p in parameters)
    return 4 * sum(sizes)


def numbers_of(parameter: torch.Tensor, rank: int) -> int:
    """Return the numbers in P and Q of a matrix; a vector's own."""
    if parameter.dim() == 1:
        return parameter.numel()
    n, m = parameter.flatten(1).shape
    return min(rank, n, m) * (n + m)


def noting(method: partial, steps: list) -> Callable:
    """Return the method, which then also notes each step's buckets, as places of parameters."""

    def make(parameters: list, group):
        hooked = method(parameters, group=group)
        places = {p: i for i, p in enumerate(parameters)}
        hook, steps[:] = hooked.hook, [[]]

        def note(state, bucket):
            steps[-1].append([places[p] for p in bucket.parameters()])
            steps.extend([[]] if bucket.is_last() else [])
            return hook(state, bucket)

        hooked.hook = note
        return hooked

    return make


def batches_without_ties(report: Report) -> list[list[list[torch.Tensor]]]:
    """Return random batches, [step][rank], in which no context has a byte twice.

    Equal bytes make equal gradients, and of equal sizes topk may take any: two right answers.
    """
    args, generator = report.args, torch.Generator().manual_seed(report.args.seed)

    def draw() -> list[torch.Tensor]:
        shuffled = torch.rand(args.micro_batch_size, 256, generator=generator).argsort(1)
        return [part.to(report.device) for part in (shuffled[:, :CONTEXT], shuffled[:, CONTEXT])]

    return [[draw() for _ in range(report.world.world_size)] for _ in range(STEPS)]


class Proof:
    """Trains NextByte a few steps in each way, and compares the weights."""

    def __init__(self, report: Report, data_parallel) -> None:
        self.report, self.data_parallel = report, data_parallel
        self.batches, self.world = batches_without_ties(report), report.world
        self.start = proofs.flat(self.build().parameters())

    def build(self) -> nn.Module:
        runtime.seed_everything(self.report.args.seed)
        return NextByte().to(self.report.device)

    def distributed(self, method: partial | None) -> tuple[nn.Module, list, measure.Counter]:
        """Return the model after STEPS steps, each step's buckets, the last one's traffic."""
        model, steps = self.build(), []
        noted = noting(method, steps) if method else None
        ddp = self.data_parallel(model, noted, bucket_cap_mb=BUCKET_MB)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        own = [step[self.world.rank] for step in self.batches]
        train(ddp, optimizer, own[:-1])
        with measure.CollectiveCounter() as counter:
            train(ddp, optimizer, own[-1:])
        return model, steps, counter

    def alone(self, method: partial, steps: list) -> torch.Tensor:
        """Return the weights that one process gets, which computes all ranks' gradients."""
        model = self.build()
        weights = list(model.parameters())
        twin = ALONE[method.func.__name__](**method.keywords)
        for batches, buckets in zip(self.batches, steps, strict=False):
            per_rank = [torch.autograd.grad(loss_of(model, b), weights) for b in batches]
            means = twin.mean([list(own) for own in per_rank], buckets)
            with torch.no_grad():
                for weight, mean in zip(weights, means, strict=True):
                    weight -= LR * mean
        return proofs.flat(weights)

    def compare(self, name: str, found: torch.Tensor, expected: torch.Tensor, tolerance, source):
        """Check weights; the error is relative to the farthest that a weight has moved."""
        error = (found - expected).abs().max() / (expected - self.start).abs().max()
        dist.all_reduce(error, op=dist.ReduceOp.MAX)  # the worst rank counts
        self.report.check(name, error.item(), 0, tolerance, source)


def check_methods(proof: Proof, methods: dict[str, partial | None]) -> None:
    """Check each method's weights against one process, and its bytes; keep the bytes in metrics."""
    report, ranks = proof.report, proof.world.world_size
    report.metrics["methods"] = {}
    for name, method in methods.items():
        model, steps, counter = proof.distributed(method)
        parameters = list(model.parameters())
        buckets = steps[STEPS - 1] if method else [list(range(len(parameters)))]
        gathered = sum(size for call, size in counter.bytes.items() if "gather" in call)
        # The counter sees all tensors of a call: a rank's own, and the room for everybody's.
        counted = counter.bytes["allreduce_"] + gathered // (ranks + 1)
        expected = handed_over(method, parameters, buckets)
        report.check(f"{name}: bytes handed over", counted, expected, 0, "formula")
        proofs.same_weights(report, model)
        if method:
            found, expected = proof.alone(method, steps), proofs.flat(parameters)
            dtype = method.keywords.get("dtype")
            # Three halves have several sums, by the order: each of ranks - 1 additions rounds.
            ordered = dtype and ranks > 2
            tolerance = (ranks - 1) * torch.finfo(dtype).eps if ordered else TOLERANCE
            proof.compare(f"{name}: weights against one process", expected, found, tolerance,
                          "one process compresses each rank's gradient")  # fmt: skip
        whole = handed_over(method, parameters, [list(range(len(parameters)))])
        collective = "all_gather" if gathered else "all_reduce"
        report.metrics["methods"][name] = {"handed_over": whole, "collective": collective}


def check_without_loss(proof: Proof, methods: dict[str, partial]) -> None:
    """Check that methods train as DDP does where they are set to lose nothing."""
    plain, _, _ = proof.distributed(None)
    full_rank = max(min(p.flatten(1).shape) for p in plain.parameters() if p.dim() > 1)
    exact = {
        "float32 as half": partial(methods["float16"].func, dtype=torch.float32),
        "top-k of all": partial(methods["top-k"].func, fraction=1.0),
        "PowerSGD, full rank": partial(methods["PowerSGD"].func, rank=full_rank),
    }
    for name, method in exact.items():
        model, _, _ = proof.distributed(method)
        found, expected = (proofs.flat(m.parameters()) for m in (model, plain))
        proof.compare(f"{name}: weights against DDP", found, expected, TOLERANCE, "DDP")


def check_pytorch(proof: Proof, method: partial) -> None:
    """Check PowerSGD against PyTorch's hook, both with one bucket and the same first Q."""
    report, device, rank = proof.report, proof.report.device, method.keywords["rank"]
    own, model = proof.build(), proof.build()
    if any(numbers_of(p, rank) >= p.numel() for p in model.parameters() if p.dim() > 1):
        report.say("powerSGD_hook sends a weight whole if P and Q are not smaller: not compared")
        return
    state = pytorch.PowerSGDState(None, rank, start_powerSGD_iter=2, min_compression_rate=1)
    bucket_order = []

    def hook(state, bucket):
        bucket_order[:] = bucket.parameters()
        return pytorch.powerSGD_hook(state, bucket)

    ddp = DDP(model, bucket_cap_mb=1000)  # gloo aborts with several buckets
    ddp.register_comm_hook(state, hook)
    batches = [step[proof.world.rank] for step in proof.batches]
    for _ in range(2):  # it compresses from the third backward on: DDP rebuilds buckets before
        loss_of(ddp, batches[0]).backward()
    hooked = method(list(own.parameters()), group=None)
    first_q = {
        p: hooked.q.get(q) for p, q in zip(model.parameters(), own.parameters(), strict=True)
    }
    by_shape = {}
    for p in bucket_order:
        if p.dim() > 1:
            by_shape.setdefault(p.shape, []).append(p)
    matrices = [p for alike in by_shape.values() for p in alike]
    state.q_memory_dict[0] = proofs.flat(first_q[p] for p in matrices)
    columns = [len(p) * min(rank, *p.flatten(1).shape) for p in matrices]
    state.p_memory_dict[0] = torch.empty(sum(columns), device=device)
    train(ddp, torch.optim.SGD(model.parameters(), lr=LR), batches)

    ours = proof.data_parallel(own, lambda parameters, group: hooked)
    train(ours, torch.optim.SGD(own.parameters(), lr=LR), batches)
    found, expected = (proofs.flat(m.parameters()) for m in (own, model))
    proof.compare("PowerSGD: weights against powerSGD_hook", found, expected, TOLERANCE,
                  "torch.distributed.algorithms.ddp_comm_hooks")  # fmt: skip
    _, _, numbers = state.compression_stats()
    expected = handed_over(method, list(own.parameters()), [])
    report.check("powerSGD_hook: bytes handed over", 4 * numbers // STEPS, expected, 0, "formula")
