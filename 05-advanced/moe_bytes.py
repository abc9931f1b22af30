"""Count the bytes of each all-to-all, and hold them against the decisions of the dense loop."""

import math

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dist_common import measure, runtime

EXACT = 0.5  # no whole number is this close to another one; the counts depend on the text


class AllToAllRecorder(TorchDispatchMode):
    """Record each all_to_all_single of floats: the rows of it that went to each rank of the group.

    `calls` holds (rows to each rank, bytes of one row).
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and "alltoall" in func.overloadpacket.__name__:
            sent = args[1]
            row_bytes = math.prod(sent.shape[1:]) * sent.element_size()
            self.calls.append(([int(rows) for rows in args[4]], row_bytes))
        return func(*args, **(kwargs or {}))


def check_bytes(report, model, alone, batch, mesh, loss_of):
    """Check each all-to-all's bytes against the dense loop's decisions, and print their sums."""
    world_size, ep = dist.get_world_size(), mesh["ep"].size()
    dist.barrier()
    before = measure.bytes_written()
    with AllToAllRecorder() as recorder:
        loss, auxiliary = loss_of(model, batch)
        (loss + auxiliary).backward()
    written = None if before is None else measure.bytes_written() - before
    place, row_bytes = mesh.get_local_rank("ep"), 4 * alone.config.dim  # float32
    sent = [(sum(rows) - rows[place]) * size for rows, size in recorder.calls]
    expected = [expected_bytes(alone, rank, world_size, ep, batch, row_bytes)
                for rank in range(world_size)]  # fmt: skip
    names = call_names(len(model.blocks))
    by_rank = runtime.gather((sent + [0] * len(names))[: len(names)])  # [rank][call]
    report.check("all-to-alls per step", len(recorder.calls), len(names), 0, "4 for each block")
    for rank in range(world_size):
        for name, sent, right in zip(names, by_rank[rank], expected[rank], strict=True):
            what = f"rank {rank}, {name}: bytes sent"
            report.check(what, sent, right, EXACT, "the dense loop's decisions")
    if written is not None:
        counts = len(model.blocks) * (world_size - 1) * len(model.blocks[0].moe.bias) * 8
        messages = (len(names) + len(model.blocks) + 1) * (world_size - 1)
        payload = sum(expected[dist.get_rank()]) + counts
        source = "those and the counts; gloo's headers"
        report.check("bytes written to sockets", written, payload, 1000 * messages, source)
    check_rows(report, model, alone, recorder)
    tokens = batch[0].numel()
    formula = tokens * report.args.top_k * row_bytes * (ep - 1) / ep * len(model.blocks)
    rows = []
    for kind in ("dispatch", "return", "backward of return", "backward of dispatch"):
        places = [i for i, name in enumerate(names) if name.partition(", ")[2] == kind]
        sums = [sum(rank[i] for rank in table for i in places) / world_size
                for table in (by_rank, expected)]  # fmt: skip
        rows.append(
            [kind, str(len(places)), *(f"{value / 1e3:,.1f} KB" for value in (*sums, formula))]
        )
    headers = ("all-to-all", "calls", "sent per rank", "by decisions", "k T D 4 (N-1)/N")
    report.table(rows, headers)
    report.metrics["all_to_all_bytes"] = sum(map(sum, by_rank))
    report.metrics["all_to_all_bytes_formula"] = 4 * formula * world_size


def call_names(blocks):
    """Return the names of a step's all-to-alls in the order of calls."""
    forward = [f"block {b}, {kind}" for b in range(blocks) for kind in ("dispatch", "return")]
    return forward + [name.replace(", ", ", backward of ") for name in reversed(forward)]


def expected_bytes(alone, rank, world_size, ep, batch, row_bytes):
    """Return the bytes that each all-to-all of a step sends from a rank to others, in order.

    Results go where tokens came from, and gradients go the way back: so each all-to-all sends what
    this rank dispatches to others, or what others dispatch to it.
    """
    tokens = batch[0].numel()
    per_block = []
    for block in alone.blocks:
        leaves = arrives = 0
        per_rank = len(block.moe.load) // ep
        for token, expert in block.moe.decisions:
            source = token // tokens
            target = source // ep * ep + expert // per_rank  # in the source's group
            leaves += source == rank and target != rank
            arrives += target == rank and source != rank
        per_block.append([leaves * row_bytes, arrives * row_bytes])
    return sum(per_block + per_block[::-1], [])  # forward, then backward from the last block


def check_rows(report, model, alone, recorder):
    """Check that every choice was either computed or counted as dropped, block by block."""
    for number, (block, reference) in enumerate(zip(model.blocks, alone.blocks, strict=True)):
        rows = torch.tensor(sum(recorder.calls[2 * number][0]), device=block.moe.bias.device)
        dist.all_reduce(rows)
        accounted = rows.item() + block.moe.dropped().sum().item()
        name = f"block {number}: choices computed or counted as dropped"
        report.check(name, accounted, sum(reference.moe.load), 0, "tokens times k")
