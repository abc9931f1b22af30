"""Which rank sits where: axes that fit model and ranks, each rank's place, the picture of it."""

import itertools
import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dist_common.cli import UsageError
from dist_common.models import Transformer
from dist_common.report import figure

AXES = ("pp", "dp", "cp", "tp")  # in the order of ranks: the last one's are neighbours


def resolve_axes(args, world_size, config, stages_per_rank):
    """Set --dp to what the other axes leave; check that all of them divide what they cut.

    Raises: UsageError naming the flag, with the numbers.
    """
    others = args.tp * args.pp * args.cp
    args.dp = args.dp or max(1, world_size // others)
    product = args.dp * others
    if product != world_size:
        axes = f"--dp {args.dp} x --tp {args.tp} x --pp {args.pp} x --cp {args.cp}"
        raise UsageError(f"{axes} = {product} ranks, but {world_size} were started")
    stages = args.pp * stages_per_rank
    several = f" ({stages_per_rank} stages per rank)" if stages_per_rank > 1 else ""
    of_model = f"of --preset {args.preset}"
    tp, pp, cp = f"--tp {args.tp}", f"--pp {args.pp}{several}", f"--cp {args.cp}"
    cuts = [
        (tp, args.tp, config.num_heads, f"{config.num_heads} attention heads {of_model}"),
        (tp, args.tp, config.num_kv_heads, f"{config.num_kv_heads} key and value heads {of_model}"),
        (tp, args.tp, config.ffn_dim, f"{config.ffn_dim} columns of the feed-forward {of_model}"),
        (tp, args.tp, config.dim, f"{config.dim} columns of the embedding {of_model}"),
        (tp, args.tp, config.vocab_size, f"vocabulary of {config.vocab_size} {of_model}"),
        (pp, stages, config.num_layers, f"{config.num_layers} layers {of_model}"),
        (cp, args.cp, args.seq_len, f"{args.seq_len} tokens of --seq-len"),
    ]
    for axis, parts, whole, what in cuts:
        if whole % parts:
            raise UsageError(f"{axis} does not divide the {what}")
    if not (args.grad_accum_steps or args.global_batch_size):
        args.grad_accum_steps = args.pp  # a pipeline of fewer micro-batches has idle stages


def drop_other_stages(model, stages):
    """Leave only this rank's blocks in the model, under the names that they have in the whole."""
    own = {id(block) for stage in stages for block in stage.blocks}
    for index, block in enumerate(model.blocks):
        if id(block) not in own:
            model.blocks[index] = nn.Identity()
    if stages[0].embedding is None:
        model.embedding = nn.Identity()
    if stages[-1].head is None:
        model.norm, model.head = nn.Identity(), nn.Identity()


@torch.no_grad()
def draw_weights(model, config, seed):
    """Draw every weight of the whole model, one at a time, as one process would; keep our part.

    So the weights are those of ddp_training.py with the same seed, whatever the layout is.
    """
    with torch.device("meta"):
        whole = Transformer(config)
    own = dict(model.named_parameters())
    torch.manual_seed(seed)
    for layer in whole.modules():  # PyTorch draws when it makes a layer, before the model does
        if isinstance(layer, (nn.Embedding, nn.Linear)):
            layer.to_empty(device="cpu").reset_parameters()
            layer.to("meta")
    for name, weight in whole.named_parameters():
        drawn = torch.empty(weight.shape)
        whole.draw(name, drawn)
        if name in own:
            part = local(own[name])
            part.copy_(cut_like(drawn.to(part.device), own[name]))


def cut_like(whole, weight):
    """Return this rank's part of a tensor that is cut as `weight` is."""
    if not isinstance(weight, DTensor):
        return whole
    mesh, placements = weight.device_mesh, weight.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


def local(tensor):
    """Return what this rank holds of a tensor, cut up or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copies_of(weight, args):
    """Return how many ranks hold the same part of a weight as this one."""
    parts = 1
    if isinstance(weight, DTensor):
        sizes = zip(weight.device_mesh.shape, weight.placements, strict=True)
        parts = math.prod(ranks for ranks, placement in sizes if not placement.is_replicate())
    return args.dp * args.cp * args.tp // parts


def places(args):
    """Return each rank's coordinates as {axis: number}, indexed by rank."""
    sizes = [getattr(args, axis) for axis in AXES]
    return [dict(zip(AXES, place, strict=True)) for place in itertools.product(*map(range, sizes))]


def peers(args, rank, axis):
    """Return the ranks that differ from `rank` in `axis` alone, itself included."""
    all_places = places(args)
    same = {name: number for name, number in all_places[rank].items() if name != axis}
    return [r for r, place in enumerate(all_places) if {**place, **same} == place]


def say_layout(report, args):
    """Print for each axis its size, the group of rank 0, and whether that group leaves a node."""
    rows = []
    for axis in AXES:
        group = peers(args, 0, axis)
        nodes = {rank // args.ranks_per_node for rank in group}
        link = "-" if len(group) == 1 else "within a node" if len(nodes) == 1 else "between nodes"
        shown = " ".join(map(str, group[:8])) + " ..." * (len(group) > 8)
        rows.append((axis, str(len(group)), shown, link))
    report.table(rows, ("axis", "ranks", "group of rank 0", "its link"), names=1)


STAGES = ("#cfe8f3", "#ffe8b3", "#d9ead3", "#f8d7d6", "#e6dcf2", "#f5e6c8", "#d5eeee", "#ecdcc8")
LINES = {"tp": "#c1121f", "cp": "#6a4c93", "dp": "#2a6f97", "pp": "#bc6c25"}
BOX = (0.9, 0.6)  # width and height of a rank, 1 and 1.1 apart


def draw_layout(path, args, bytes_per_axis):
    """Draw nodes as rows of ranks, coloured by stage, and rank 0's group along each axis."""
    ranks = places(args)
    per_node = min(args.ranks_per_node, len(ranks))
    rows = -(-len(ranks) // per_node)
    corners = [(rank % per_node, -1.1 * (rank // per_node)) for rank in range(len(ranks))]
    with figure(path, figsize=(1.35 * per_node + 2.5, 1.5 * rows + 1)) as axes:
        for rank, (place, (x, y)) in enumerate(zip(ranks, corners, strict=True)):
            axes.add_patch(_box(x, y, STAGES[place["pp"] % len(STAGES)]))
            axes.text(x + 0.45, y + 0.43, f"rank {rank}", ha="center", weight="bold", size=10)
            words = "  ".join(f"{axis} {place[axis]}" for axis in AXES if getattr(args, axis) > 1)
            axes.text(x + 0.45, y + 0.14, words, ha="center", size=9 if len(words) < 20 else 7)
            if rank % per_node == 0:
                axes.text(-0.1, y + 0.3, f"node {rank // per_node}", ha="right", size=10)
        for axis, size in bytes_per_axis.items():
            name = axis.split()[0]
            for number, peer in enumerate(peers(args, 0, name)[1:] if size else []):
                label = f"{axis}: {size / 1e6:,.1f} MB" if number == 0 else None
                axes.add_patch(_line(corners[0], corners[peer], LINES[name], label))
        axes.legend(
            title="rank 0's groups,\nsent per rank and step",
            loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9,
        )  # fmt: skip
        axes.set_xlim(-0.9, per_node)
        axes.set_ylim(-1.1 * (rows - 1) - 0.1, 1.15)
        axes.axis("off")


def _box(x, y, colour):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), *BOX, facecolor=colour, edgecolor="#555555")


def _line(start, end, colour, label):
    from matplotlib.patches import FancyArrowPatch

    same_row = start[1] == end[1]
    down = 0.0 if same_row else BOX[1]
    begin = (start[0] + 0.45, start[1] + BOX[1] - down)
    finish = (end[0] + 0.45, end[1] + BOX[1])
    bend = -0.5 / max(1, end[0] - start[0]) if same_row else 0.15
    style = {"arrowstyle": "-", "linewidth": 2.5, "color": colour, "label": label}
    return FancyArrowPatch(begin, finish, connectionstyle=f"arc3,rad={bend}", **style)
