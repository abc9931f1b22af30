"""What across_nodes.py measures of the links, proves of each way, and predicts from both."""

import os
import time
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import nn

from legacy_common import cli
from legacy_common.lab import proofs
from legacy_common.report import Report
from legacy_common.runtime import gather, seed_everything

MIB = 2**20  # bytes
RANK = 2  # of PowerSGD's matrices
SAMPLES = 4  # in a micro-batch
# Of a way's gradient, relative: float32 in another order; bfloat16 keeps 8 bits.
TOLERANCES = {"buckets, bfloat16": 2e-2}
LOSSY = ("PowerSGD", "DiLoCo")  # their own lessons say what they do to a loss
# Beside the payload: headers of 1,500-byte packets and acknowledgements; messages of a collective.
HEADERS, BYTES_A_MESSAGE = 0.1, 1024
SMALL, LARGE = 4, 2**20  # bytes of the messages that measure a link


def refuse_nodes(world, ranks_per_node: int) -> None:
    """Raises: UsageError where the ranks do not fill nodes alike."""
    if world.world_size % ranks_per_node:
        raise cli.UsageError(
            f"{world.world_size} ranks are no whole number of nodes of {ranks_per_node} "
            "(--ranks-per-node)"
        )


class Pause(torch.autograd.Function):
    """Wait in forward, twice as long in backward: a wait leaves the processor to the others."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Blocks(nn.Module):
    """Square matrices, one after the other, each of which takes a while."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))
        self.seconds = 0.0

    def forward(self, x):
        for block in self.blocks:
            x = Pause.apply(block(x), self.seconds)
        return x


class Setting:
    """What all ways share: the model, this rank's batches, the groups, and the sizes of nodes."""

    def __init__(self, args, world, device, groups) -> None:
        self.args, self.world, self.device, self.groups = args, world, device, groups
        self.ranks, self.inside = world.world_size, args.ranks_per_node
        self.nodes = self.ranks // self.inside
        own, _ = dist.new_subgroups_by_enumeration([[rank] for rank in range(self.ranks)])
        self.alone = dict.fromkeys(groups, own)
        self.nbytes = 4 * args.blocks * args.width**2
        self.card = os.environ.get("GLOO_SOCKET_IFNAME") if self.nodes > 1 else None

    @property
    def says(self) -> str:
        size = f"{self.nbytes / MIB:.1f} MiB of gradients in {self.args.blocks} blocks"
        return f"{size}; nodes: {self.nodes}, with {self.inside} ranks each"

    def build(self, block_ms: float = 0.0) -> Blocks:
        seed_everything(self.args.seed)
        model = Blocks(self.args.blocks, self.args.width).to(self.device)
        model.seconds = block_ms / 1e3
        return model

    def batches(self, rank: int, count: int) -> list[torch.Tensor]:
        """Return micro-batches that only this rank has."""
        generator = torch.Generator().manual_seed(1000 * self.args.seed + rank)
        size = (count, SAMPLES, self.args.width)
        return list(torch.randn(size, generator=generator).to(self.device))


# the links


class Link(NamedTuple):
    """A link in two numbers: seconds of an empty message, and bytes/s."""

    alpha: float
    rate: float

    def all_reduce_s(self, nbytes: float, ranks: int) -> float:
        """Return the seconds of a ring all-reduce (Patarasuk and Yuan, 2009, section 3)."""
        return 2 * self.pass_on_s(nbytes, ranks)

    def pass_on_s(self, nbytes: float, ranks: int) -> float:
        """Return the seconds in which each of the ranks passes its share to all others, in turn."""
        return (ranks - 1) * (self.alpha + nbytes / ranks / self.rate)


class Links(NamedTuple):
    across: Link
    inside: Link

    @property
    def says(self) -> str:
        def told(link):
            return f"{link.rate * 8 / 1e6:,.0f} Mbit/s, {link.alpha * 1e3:.2f} ms"

        return f"links: {told(self.across)} between nodes; {told(self.inside)} inside"


def measure_links(setting: Setting) -> Links:
    """All-reduce between one rank of each node, then inside every node. A collective.

    Where there is one node, or one rank in each, both are the one link that is left.
    """
    leads = setting.world.rank % setting.inside == 0
    across = measure_link(setting, setting.groups["across"], setting.nodes, leads)
    inside = measure_link(setting, setting.groups["inside"], setting.inside, True)
    return Links(across or inside or NO_LINK, inside or across or NO_LINK)


NO_LINK = Link(0.0, float("inf"))  # of one rank


def measure_link(setting: Setting, group, ranks: int, taking_part: bool) -> Link | None:
    """Return the two numbers of a ring all-reduce of `ranks` ranks; None of one rank."""
    small, large = (
        max(gather(all_reduce_s(setting, group, taking_part, nbytes))) for nbytes in (SMALL, LARGE)
    )
    if ranks == 1:
        return None
    # A busy machine may take longer for the small message: then the rate is that of the large.
    rate = 2 * (ranks - 1) / ranks * LARGE / max(large - small, large / 2)
    return Link(small / (2 * (ranks - 1)), rate)


def all_reduce_s(setting: Setting, group, taking_part: bool, nbytes: int) -> float:
    """Return the least seconds of an all-reduce; 0 on a rank that does not take part."""
    tensor, seconds = torch.zeros(nbytes // 4, device=setting.device), []
    for _ in range(25 if nbytes == SMALL else 7):  # a busy machine delays small ones most
        dist.barrier()
        if taking_part:
            started = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            tensor[0].item()  # on a GPU: until it is there
            seconds.append(time.perf_counter() - started)
    return min(seconds, default=0.0)


# the proof


def check_gradient(report: Report, setting: Setting, name: str, way, micro_batches: int) -> None:
    """Compare a way's gradient with that of one process; of a lossy way, the ranks' results."""
    model = setting.build()
    way(model, setting.groups)(setting.batches(setting.world.rank, micro_batches))
    if name in LOSSY:
        kept = model.parameters() if name == "DiLoCo" else (p.grad for p in model.parameters())
        distinct = len(set(gather(proofs.flat(kept).cpu().numpy().tobytes())))
        report.check(f"{name}: distinct results over all ranks", distinct, 1, 0, "equal replicas")
        return
    alone, ranks = setting.build(), range(setting.ranks)
    every = (batch for rank in ranks for batch in setting.batches(rank, micro_batches))
    losses = (alone(batch).square().mean() / setting.ranks for batch in every)
    proofs.same_gradient(
        report, model, proofs.gradient_of_one_process(alone, losses), TOLERANCES.get(name, 1e-5),
        f"{name}: gradient, relative error against one process",
    )  # fmt: skip


# the prediction


def leaves_node(setting: Setting, name: str) -> float:
    """Return the bytes that leave a node in a step, if ranks stand in a ring node by node."""
    whole = sent_bytes(setting, name)
    if setting.nodes == 1:
        return 0.0
    around = setting.nodes if name == "hierarchical" else setting.ranks
    return 2 * (around - 1) / around * whole


def sent_bytes(setting: Setting, name: str) -> float:
    """Return the bytes that a way all-reduces in a step."""
    if name == "PowerSGD":
        return 2 * 4 * RANK * setting.args.width * setting.args.blocks  # P and Q of each block
    return setting.nbytes / 2 if name == "buckets, bfloat16" else setting.nbytes


def predicted_s(
    setting: Setting, name: str, alone_s: float, micro_batches: int, links: Links
) -> float:
    """Return how long a step takes, from what it takes without a network and from the links."""
    ranks, inside, nodes, blocks = setting.ranks, setting.inside, setting.nodes, setting.args.blocks
    sent, slowest = sent_bytes(setting, name), links.across
    if name == "hierarchical":
        # gloo's reduce-scatter sends what its all-reduce sends.
        twice = 2 if dist.get_backend() == "gloo" else 1
        near = (1 + twice) * links.inside.pass_on_s(sent, inside)
        own = Link(slowest.alpha, slowest.rate / inside)  # a node's ranks share its card
        return alone_s + near + (own.all_reduce_s(sent / inside, nodes) if nodes > 1 else 0.0)
    if name in ("flat", "DiLoCo"):
        return alone_s + slowest.all_reduce_s(sent, ranks)
    if name == "PowerSGD":  # P of all blocks, then Q
        return alone_s + 2 * slowest.all_reduce_s(sent / 2, ranks)
    one_s, last_s = slowest.all_reduce_s(sent / blocks, ranks), alone_s / micro_batches
    done = 0.0
    for block in range(1, blocks + 1):
        ready = alone_s - last_s + last_s / 3 + block / blocks * 2 / 3 * last_s
        done = max(ready, done) + one_s
    return done


class Row(NamedTuple):
    """A way, per micro-batch of a rank in ms, and what a step lets out of a node in bytes."""

    name: str
    measured_ms: float
    predicted_ms: float
    left: float | None
    formula: float


def time_way(setting: Setting, name: str, way, micro_batches: int, links: Links) -> Row:
    """Time a way's steps, alone and with all ranks, and predict the latter. A collective."""
    batches = setting.batches(setting.world.rank, micro_batches)
    alone_s, _ = step_s(setting, way, setting.alone, batches)
    measured_s, left = step_s(setting, way, setting.groups, batches)
    predicted = predicted_s(setting, name, alone_s, micro_batches, links)
    each = 1e3 / micro_batches
    return Row(name, measured_s * each, predicted * each, left, leaves_node(setting, name))


def step_s(setting: Setting, way, groups, batches) -> tuple[float, float | None]:
    """Return the least seconds of a step, and the bytes that the node's card sent in each.

    The least, since another program can only make a step longer, and the prediction knows of none.
    """
    step = way(setting.build(setting.args.block_ms), groups)
    for _ in range(2):  # DDP deals its buckets anew after the first
        step(batches)
    dist.barrier()
    before, seconds = sent_by(setting.card), []
    for _ in range(setting.args.repeat):
        dist.barrier()
        started = time.perf_counter()
        step(batches)
        if setting.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(max(gather(time.perf_counter() - started)))
    dist.barrier()
    after = sent_by(setting.card)
    left = None if before is None else (after - before) / setting.args.repeat
    return min(seconds), left


def sent_by(card: str | None) -> int | None:
    """Return the bytes that a network card has sent so far."""
    counters = psutil.net_io_counters(pernic=True)
    return counters[card].bytes_sent if card in counters else None


def compare(report: Report, setting: Setting, rows: list[Row]) -> None:
    """Print the table, check the bytes, say which way is fastest."""
    shown = []
    for row in rows:
        left = "" if row.left is None else f"{row.left / 1e3:,.0f} KB"
        ratio = f"{row.measured_ms / row.predicted_ms:.2f}x"
        shown.append((row.name, f"{row.measured_ms:.0f} ms", f"{row.predicted_ms:.0f} ms",
                      ratio, left, f"{row.formula / 1e3:,.0f} KB"))  # fmt: skip
        report.metrics |= {f"measured_ms: {row.name}": row.measured_ms,
                           f"predicted_ms: {row.name}": row.predicted_ms}  # fmt: skip
        if row.left is not None:
            messages = 2 * (setting.ranks - 1) * setting.args.blocks
            within = HEADERS * row.formula + BYTES_A_MESSAGE * messages
            name = f"{row.name}: bytes that leave a node in a step"
            report.check(name, row.left, row.formula, within, "ring of nodes")
    report.say()
    report.table(shown, ("way", "measured", "predicted", "ratio", "leaves a node", "formula"))
    fastest = min(rows, key=lambda row: row.measured_ms).name
    expected = min(rows, key=lambda row: row.predicted_ms).name
    agrees = "as predicted" if fastest == expected else f"predicted: {expected}"
    report.say(f"times: of a micro-batch; bytes: of a step. fastest: {fastest} ({agrees})")
    report.say()
