"""What hybrid_parallelism.py sends: bytes along each axis, by formula and counted; and when."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from legacy_common import runtime
from legacy_common.lab.traffic import RING_FACTOR, TrafficCounter
from legacy_common.layout import SPLIT_BACKWARD
from legacy_common.models import local

SHOWN_AXES = ("pp", "dp", "cp", "tp")


def check_bytes(run, counter: TrafficCounter, chosen: list[torch.Tensor]) -> None:
    """Compare what each axis sent in one step with the formula, on the rank that differs most."""
    report, expected = run.job.report, expected_bytes(run, chosen)
    axes = {run.mesh[axis].get_group().group_name: axis for axis in SHOWN_AXES}
    for mesh in run.expert_meshes[1:]:
        axes[mesh.get_group().group_name] = experts_axis(run.job.args)
    axes[run.data_mesh.get_group().group_name] = data_axis(run.job.args)
    sent = Counter()  # bytes of this rank, in rings
    for call in counter.collectives:
        # Ranks of ep that are all of dp have one group with it.
        sent["ep" if call.kind == "all_to_all" else axes.get(call.group)] += call.sent
    every_rank = runtime.gather([(round(sent[axis]), round(expected[axis])) for axis in expected])
    report.metrics["bytes_per_axis"] = {}
    for axis, pairs in zip(expected, zip(*every_rank, strict=True), strict=True):
        measured, wanted = max(pairs, key=lambda pair: (abs(pair[0] - pair[1]), pair[0]))
        report.metrics["bytes_per_axis"][axis] = max(own for own, _ in pairs)
        if wanted:
            name, source = f"bytes sent by a rank along {axis}", "see combining.md"
            report.check(name, measured, wanted, round(0.001 * wanted), source)


def expected_bytes(run, chosen: list[torch.Tensor]):
    """Return what this rank sends along each axis in one step, by formula: {axis: bytes}.

    But for tokens on their way to experts, whose number is the router's: by what it has `chosen`.
    """
    args, config = run.job.args, run.model.config
    micro_batches = args.grad_accum_steps
    blocks = sum(len(stage.blocks) for stage in run.stages)
    first = run.stages[0].embedding is not None
    last = run.stages[-1].head is not None
    rows = args.micro_batch_size * len(run.positions)  # tokens of a micro-batch on this rank
    width = 2 if args.precision == "bf16-mixed" else 4  # bytes of a number, but of gradients' sums
    activations = width * rows * config.dim
    ring = RING_FACTOR["all_gather"]  # an all-reduce is two: a reduce-scatter and an all-gather
    # A block gathers twice in forward (what the norms return), scatters twice (after wo, down), and
    # does both again in backward; the embedding scatters and the head gathers, each way once. And
    # for each row the loss's maximum, sum of exponentials and target's logit, all-reduced.
    again = args.activation_checkpointing != "none"  # all but the scatter after down, the last one
    gathers = (8 + 3 * again) * blocks + 2 * first + 2 * last
    reduced = gathers / 2 * activations + last * 3 * 4 * rows
    # A scale of float8 is of a whole matrix: where ranks have parts, they all-reduce its largest
    # number, in 8 bytes. Of three products' six matrices in each layer, 28 are cut in a block.
    reduced += 8 * (28 + 9 * again) * blocks * bool(args.float8)
    # full frees weights after each forward and backward, and sums gradients in each micro-batch.
    full = args.data_parallel == "full"
    weight_gathers, sums = (2 * micro_batches, micro_batches) if full else (1, 1)
    # Norms' gradients, of T / tp tokens on each rank, all-reduced before each sum: in float32 if
    # FSDP has added up those of several micro-batches.
    norms = sums * (2 * blocks + last) * (width if sums == micro_batches else 4) * config.dim
    # k and v of (B, kv heads / tp, T, head_dim), gathered in forward, their gradients scattered.
    kv_dim = config.num_kv_heads * (config.dim // config.num_heads) // args.tp
    gathered = 2 * width * args.micro_batch_size * args.seq_len * kv_dim
    # Activations leave for the next stage, their gradients for the one before: unless it is here.
    own = {stage.number for stage in run.stages}
    ends = [(s.number + 1, s.head) for s in run.stages]
    ends += [(s.number - 1, s.embedding) for s in run.stages]
    crossings = sum(end is None and number not in own for number, end in ends)
    sent = Counter({
        "tp": 2 * ring(args.tp) * (micro_batches * reduced + norms),
        "cp": (2 + again) * ring(args.cp) * micro_batches * blocks * gathered,
        "pp": crossings * micro_batches * activations / args.tp,
    })  # fmt: skip
    for weight in run.model.parameters():
        axis, group = data_axis(args), args.dp * args.cp
        if run.expert_meshes and weight.device_mesh.mesh_dim_names[-1] == "ep":
            axis, group = experts_axis(args), group // args.ep
        if args.data_parallel == "replicate":
            sent[axis] += 2 * ring(group) * 4 * local(weight).numel()
        else:  # a rank has one of `group` parts of gradients, and of weights
            own = padded_numel(weight, group, args.tp)
            sent[axis] += (weight_gathers * width + sums * 4) * (group - 1) * own
    if chosen:
        # Rows go there and back, their gradients too: as often as forward's, but for what is
        # computed again. And before each exchange E counts.
        rows = rows_moved(run, chosen)
        sent["ep"] = (1 + 1 / (1 + again)) * rows * width * config.dim
        sent["ep"] += len(chosen) * RING_FACTOR["all_to_all"](args.ep) * 8 * config.num_experts
    return sent


def padded_numel(weight: DTensor, group: int, tp: int) -> int:
    """Return the numbers of a rank's part as FSDP sends it: all parts have as many rows."""
    if weight.placements[0].dim > 0:  # FSDP's is first; what it cuts otherwise, it cuts evenly
        return local(weight).numel()
    cuts_rows = any(placement.is_shard(0) for placement in weight.placements[1:])
    rows = len(weight) // (tp if cuts_rows else 1)
    return math.ceil(rows / group) * local(weight).shape[1:].numel()


def data_axis(args) -> str:
    """Name the axis along which gradients are summed: ranks that differ in samples or in tokens."""
    return "dp and cp" if args.dp > 1 and args.cp > 1 else "dp" if args.dp > 1 else "cp"


def experts_axis(args) -> str:
    """Name the axis along which gradients of experts are summed."""
    return data_axis(args) if args.ep == 1 else "dp/ep"


@contextlib.contextmanager
def choices(run) -> Iterator[list[torch.Tensor]]:
    """Collect how many tokens of this rank the router has each expert compute, call by call: (E,).

    Empty where no expert is on another rank.
    """
    chosen, layers = [], []
    if run.job.args.ep > 1:  # blocks of another model have no experts
        layers = [block.moe for stage in run.stages for block in stage.blocks]
    exchanges = [moe.exchange for moe in layers]

    def note(exchange: Callable, rows, counts: torch.Tensor, experts) -> torch.Tensor:
        chosen.append(counts)
        return exchange(rows, counts, experts)

    for moe, exchange in zip(layers, exchanges, strict=True):
        moe.exchange = partial(note, exchange)
    yield chosen
    for moe, exchange in zip(layers, exchanges, strict=True):
        moe.exchange = exchange


def rows_moved(run, chosen: list[torch.Tensor]) -> int:
    """Return how many rows go from this rank to other ones, or come from there. A collective."""
    ep = run.expert_meshes[0]
    to_each = sum(chosen).view(ep.size(), -1).sum(1).tolist()
    every_rank, own = runtime.gather(to_each), ep.get_local_rank()
    table = [every_rank[rank] for rank in ep.mesh.tolist()]
    return sum(table[own]) + sum(row[own] for row in table) - 2 * table[own][own]


@contextlib.contextmanager
def sums_begun(run, counter: TrafficCounter) -> Iterator[tuple[list[int], list[int]]]:
    """Collect how many sums over dp and cp have begun when backward reaches two blocks.

    The last one of a stage, and its first. Empty for cp alone, whose keys' and values' gradients
    have the same group, and where no hook sees backward: in a compiled block, and in the parts of a
    zero-bubble schedule.
    """
    args, blocks = run.job.args, run.stages[0].blocks
    group = run.data_mesh.get_group().group_name
    begun, hooks = ([], []), []
    seen = args.dp > 1 and not args.compile and args.schedule not in SPLIT_BACKWARD

    def watch(seen: list[int], _, __, out: torch.Tensor) -> None:
        def note(_) -> None:
            calls = (call for call in counter.collectives if call.group == group)
            seen.append(sum(call.kind in ("all_reduce", "reduce_scatter") for call in calls))

        out.register_hook(note)

    ends = (*blocks[-1:], *blocks[:1]) if seen else ()  # a stage may have none
    for block, place in zip(ends, begun, strict=False):
        hooks.append(block.register_forward_hook(partial(watch, place)))
    yield begun
    for hook in hooks:
        hook.remove()


def check_overlap(run, at_last: list[int], at_first: list[int]) -> None:
    """Check that the step's last backward sums a block's gradient while it computes others.

    By the order of events: the time that it saves shows on a network only.
    """
    below, own = len(run.stages[0].blocks) - 1, None
    groups = [mesh.get_group().group_name for mesh in (run.data_mesh, *run.expert_meshes[1:])]
    if at_first and below:
        # Where experts have the same group, a block has two sums.
        own = (at_first[-1] - at_last[-1]) / groups.count(groups[0]), below
    if found := [pair for pair in runtime.gather(own) if pair]:  # a first stage may be shorter
        begun, below = min(found, key=lambda pair: pair[0] - pair[1])
        name = "blocks whose sums have begun when the last backward reaches the first"
        run.job.report.check(name, begun, below, 0, "FSDP: one reduction per block")
