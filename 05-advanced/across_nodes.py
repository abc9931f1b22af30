"""Data parallelism over nodes that a thin wire joins: one gradient in seven ways, each predicted.

    CPU   torchrun --standalone --nproc-per-node=4 05-advanced/across_nodes.py --ranks-per-node 2
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/across_nodes.py

Look for: the bytes that leave a node; where a step waits for the wire, and which way ends that; how
far the prediction is off, which knows the link's two numbers and what computing takes. In place of
a GPU's work each block waits --block-ms, so that ranks that share a core do not disturb each other.

Sources: Patarasuk and Yuan, Bandwidth Optimal All-reduce (2009); Li et al., PyTorch Distributed
(VLDB 2020); Vogels et al., PowerSGD (2019); Douillard et al., DiLoCo (2023).
"""

import os
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from advanced_parts import across_nodes as part
from gradient_compression import Half, PowerSGD
from legacy_common import cli, runtime
from legacy_common.report import Report
from local_sgd import make_outer, outer_step


def flat_all_reduce(gradient, groups):
    """Add up in one ring of all ranks. Of n, each sends 2 (n-1)/n of the gradient to the next."""
    dist.all_reduce(gradient, group=groups["all"])


def hierarchical_all_reduce(gradient, groups):
    """Add up inside each node, then across nodes, a part per rank: the wire carries it once."""
    own = gradient.new_empty(len(gradient) // dist.get_world_size(groups["inside"]))

    runtime.reduce_scatter_single(own, gradient, group=groups["inside"])
    dist.all_reduce(own, group=groups["across"])
    runtime.all_gather_single(gradient, own, group=groups["inside"])


def after_backward(all_reduce, model, groups):
    """Compute all gradients; then send them, while nothing computes."""
    weights = list(model.parameters())
    ranks, inside = (dist.get_world_size(groups[name]) for name in ("all", "inside"))

    def step(batches):
        backward(model, batches[0])
        flat = torch.cat([p.grad.flatten() for p in weights])
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % inside))  # into equal parts

        all_reduce(padded, groups)

        means = (padded[: len(flat)] / ranks).split([p.numel() for p in weights])
        for p, mean in zip(weights, means, strict=True):
            p.grad.copy_(mean.view_as(p))

    return step


def in_buckets(model, groups, compress=None, bucket_blocks=1):
    """Have DDP send each block's gradient while the next one is computed."""
    block_mb = next(model.parameters()).nbytes / part.MIB
    ddp = DDP(model, process_group=groups["all"], bucket_cap_mb=bucket_blocks * block_mb)
    if compress:
        ddp.register_comm_hook(None, compress(list(model.parameters()), group=groups["all"]).hook)

    def step(batches):
        with ddp.no_sync():
            for batch in batches[:-1]:  # accumulation: what these find stays on the rank
                backward(ddp, batch)
        backward(ddp, batches[-1])

    return step


def local_steps(model, groups):
    """Take a step for each batch on the rank alone; then one of DiLoCo's, on the way they went."""
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    outer = make_outer(model, lr=0.7, momentum=0.9)

    def step(batches):
        for batch in batches:
            inner.zero_grad()
            backward(model, batch)
            inner.step()
        outer_step(model, outer, groups["all"])

    return step


def backward(model, batch):
    """Leave in the model the gradient of the mean of its squares. Shapes: batch is (B, D)."""
    model(batch).square().mean().backward()


bfloat16, powersgd = partial(Half, dtype=torch.bfloat16), partial(PowerSGD, rank=part.RANK)
# Each way as name: (what makes its step, micro-batches in a step).
WAYS = {
    "flat": (partial(after_backward, flat_all_reduce), 1),
    "hierarchical": (partial(after_backward, hierarchical_all_reduce), 1),
    "buckets": (in_buckets, 1),
    "buckets, accumulating": (in_buckets, 4),
    "buckets, bfloat16": (partial(in_buckets, compress=bfloat16), 1),
    # In one bucket: its hook waits for two all-reduces, each of all ranks.
    "PowerSGD": (partial(in_buckets, compress=powersgd, bucket_blocks=10**6), 1),
    "DiLoCo": (local_steps, 8),
}


def groups_of(ranks_per_node, device):
    """Return the groups of this rank: its node's ranks, its like on each node, and all ranks."""
    nodes = dist.get_world_size() // ranks_per_node
    names = ("across", "inside")
    mesh = init_device_mesh(device.type, (nodes, ranks_per_node), mesh_dim_names=names)
    return {"all": dist.group.WORLD, **{name: mesh[name].get_group() for name in names}}


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, positive = parser.add_argument, cli.positive_int
    add("--ranks-per-node", type=positive, metavar="N",
        help="treat N ranks as a node (those that the launcher started on one)")  # fmt: skip
    add("--blocks", type=positive, default=4, help="matrices of the model (4)")
    add("--width", type=positive, default=256, help="rows and columns of each (256)")
    add("--block-ms", type=cli.positive_float, default=4.0, metavar="MS",
        help="how long a block's forward waits; its backward takes twice that (4)")  # fmt: skip
    add("--repeat", type=positive, default=3, help="timed steps of each way (3)")
    args = parser.parse_args()
    args.ranks_per_node = args.ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return args


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("05-advanced/across_nodes.py", args, world, device)
        part.refuse_nodes(world, args.ranks_per_node)
        groups = groups_of(args.ranks_per_node, device)
        setting = part.Setting(args, world, device, groups)
        report.start(setting.says)
        links = part.measure_links(setting)
        report.say(links.says)

        rows = []
        for name, (way, micro_batches) in report.progress(WAYS.items(), "ways"):
            part.check_gradient(report, setting, name, way, micro_batches)
            rows.append(part.time_way(setting, name, way, micro_batches, links))
        part.compare(report, setting, rows)
        return report.finish(
            "each way leaves all ranks with one gradient, and sends what it should"
        )


if __name__ == "__main__":
    cli.run(main)
