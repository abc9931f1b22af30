"""Build FSDP from two collectives and four moves: shard, gather, free, reduce.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_from_scratch.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_from_scratch.py

Look for: the losses and collectives of PyTorch's `fully_shard`; between steps 1/N of the model on
each rank, during a step never more than two units of it whole.

Source: Zhao et al., PyTorch FSDP (VLDB 2023), sections 3.2 and 4.2: its FlatParameter is `Unit`.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from dist_common import cli, data, measure, models, proofs, runtime
from dist_common.models import Transformer
from dist_common.report import Report, figure

# torch 2.13 gave them these names; until then they were all_gather_into_tensor and so on.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Unit:
    """Parameters that are sharded together: one flat vector, of which each rank keeps a part."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.sizes = [parameter.numel() for parameter in parameters]
        parts = dist.get_world_size()
        padding = -sum(self.sizes) % parts  # so that all parts are equally long
        flat = torch.cat([p.detach().flatten() for p in parameters])
        self.whole = F.pad(flat, (0, padding))
        self.missing = len(parameters)  # gradients that this step's backward still owes
        # The parameters become views of the vector: filled when it is, empty when it is.
        for parameter, view in zip(parameters, self.views(self.whole), strict=True):
            parameter.data = view
            parameter.register_post_accumulate_grad_hook(self.count)

        self.shard = self.whole.chunk(parts)[dist.get_rank()].clone()  # Move 1. This is kept.

        self.free()

    def views(self, vector):
        """Return a vector's pieces in the shapes of the parameters."""
        pieces = vector[: sum(self.sizes)].split(self.sizes)
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]

    def gather(self):
        """Move 2. Fill the vector with the parts of all ranks, unless it is full already."""
        storage = self.whole.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.whole.nbytes)

            all_gather(self.whole, self.shard)

    def free(self):
        """Move 3. Give the memory back, and keep the vector: autograd remembers its views."""
        self.whole.untyped_storage().resize_(0)

    def count(self, _):
        """Note that one more gradient is there; after the last one, reduce them."""
        self.missing -= 1
        if self.missing == 0:
            self.missing = len(self.parameters)
            self.reduce()

    def reduce(self):
        """Move 4. Add up all ranks' gradients, each rank its own part, and drop the whole."""
        flat = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        flat = F.pad(flat, (0, self.whole.numel() - flat.numel()))
        self.shard.grad = torch.empty_like(self.shard)

        reduce_scatter(self.shard.grad, flat)

        self.shard.grad /= dist.get_world_size()
        for parameter in self.parameters:
            parameter.grad = None
        self.free()


def shard_from_scratch(model):
    """Make a unit of each block and one of the rest, moved by hooks; return them, the rest last.

    The rest stays gathered from the start of forward to the end of backward: it holds the layer
    that forward begins with, and the one that backward begins with.
    """
    units = [Unit(list(block.parameters())) for block in model.blocks]
    inside = {parameter for unit in units for parameter in unit.parameters}
    rest = Unit([parameter for parameter in model.parameters() if parameter not in inside])
    model.register_forward_pre_hook(lambda *_: rest.gather())
    for block, unit in zip(model.blocks, units, strict=True):
        block.register_forward_pre_hook(lambda *_, unit=unit: unit.gather())
        block.register_forward_hook(lambda *_, unit=unit: unit.free())
        # Before backward enters the block; by `count` it is freed again.
        block.register_full_backward_pre_hook(lambda *_, unit=unit: unit.gather())
    return [*units, rest]


class Watch:
    """Write down the bytes that all units have gathered together, after each gather and free."""

    def __init__(self, units):
        self.log = []
        self.units = units
        for unit in units:
            unit.gather = functools.partial(self.note, unit.gather)
            unit.free = functools.partial(self.note, unit.free)

    def note(self, move):
        move()
        self.log.append(sum(unit.whole.untyped_storage().nbytes() for unit in self.units))


def loss_of(model, batch):
    """Return the mean cross-entropy. Shapes: batch is inputs and targets, (B, T) each."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train(model, weights, batches):
    """Take a step of AdamW on each batch; return this rank's losses and the last step's traffic."""
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        with measure.CollectiveCounter() as counter:
            loss = loss_of(model, batch)
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    held = sum(w.nbytes + w.grad.nbytes for w in weights)
    held += sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.dim())
    return torch.stack(losses), counter, held


def plot_levels(path, levels, title):
    """Draw how many bytes are held after each gather and free, a line for each kind, as PNG."""
    with figure(path, figsize=(9, 3)) as axes:
        for name, values in levels.items():
            axes.step(range(len(values)), [v / 2**20 for v in values], where="post", label=name)
        axes.set(title=title, xlabel="gathers and frees, in order", ylabel="MiB")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(bottom=0)
        axes.legend()
        axes.grid(alpha=0.3)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    positive = cli.positive_int
    add("--micro-batch-size", type=positive, default=8, help="per rank and step (8)")
    add("--seq-len", type=positive, default=64, help="tokens per sequence (64)")
    add("--max-steps", type=positive, default=8, help="training steps (8)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("02-fsdp/fsdp_from_scratch.py", args, world, device)
        config = models.preset("tiny", args.seq_len)
        global_batch = args.micro_batch_size * world.world_size
        text = data.Sequences(data.load_text(), args.seq_len, global_batch * args.max_steps)
        weights = config.num_parameters()
        report.start(f"{weights:,} weights, {config.num_layers} blocks and the rest")

        def build():
            runtime.seed_everything(args.seed)
            return Transformer(config).to(device)

        alone = build()
        together = args.max_steps, global_batch
        every = data.batches_of(text, *together, 0, global_batch, device)
        expected, _, whole = train(alone, list(alone.parameters()), every)
        own = world.rank * args.micro_batch_size, args.micro_batch_size
        mine = list(data.batches_of(text, *together, *own, device))

        model = build()
        units = shard_from_scratch(model)
        watch = Watch(units)
        losses, counter, held = train(model, [unit.shard for unit in units], mine)
        theirs = build()
        for module in (*theirs.blocks, theirs):
            fully_shard(module)
        their_losses, their_counter, _ = train(theirs, list(theirs.parameters()), mine)
        for measured in (losses, their_losses):
            measured /= world.world_size
            dist.all_reduce(measured)

        names = ("_allgather_base_", "_reduce_scatter_base_")
        rows = [["one process", *["0"] * 4, f"{expected[-1].item():.6f}"]]
        for way, seen, curve in (
            ("from scratch", counter, losses),
            ("fully_shard", their_counter, their_losses),
        ):
            numbers = [f"{kind[n]:,}" for n in names for kind in (seen.calls, seen.bytes)]
            rows.append([way, *numbers, f"{curve[-1].item():.6f}"])
        headers = ("way", "all-gathers", "bytes", "reduce-scatters", "bytes", "last loss")
        report.table(rows, headers)
        source = "FSDP paper, section 3.2"
        N = world.world_size
        flat = [unit.whole.nbytes for unit in units]
        # A call hands over a unit and a rank's part of it; the rest is gathered once only.
        for what, name, calls, moved in (
            ("all-gathers", names[0], 2 * len(units) - 1, 2 * sum(flat) - flat[-1]),
            ("reduce-scatters", names[1], len(units), sum(flat)),
        ):
            report.check(f"{what} per step", counter.calls[name], calls, 0, source)
            handed = moved + moved // N
            report.check(f"bytes handed to {what}", counter.bytes[name], handed, 0, source)
        report.check("bytes held between steps", held, whole // N, 0.01 * whole // N, source)
        most = flat[-1] + max(flat[:-1])
        held_most = max(watch.log)
        report.check("most bytes gathered at once", held_most, most, 0, "the rest and one block")
        for name, right in (("fully_shard", their_losses), ("one process", expected)):
            what = f"largest difference of a loss from {name}"
            proofs.same_losses(report, losses, right, 1e-5, what, name)
        report.metrics["final_loss"] = losses[-1].item()
        if report.output and world.is_rank0:
            last = watch.log[-len(watch.log) // args.max_steps :]
            levels = {"gathered by a rank": last, "the whole model": [sum(flat)] * len(last)}
            title = f"A step: {config.num_layers} blocks forward, {config.num_layers} backward"
            plot_levels(report.output / "gathered.png", levels, title)
        return report.finish(f"loss {losses[-1].item():.4f} after step {args.max_steps}")


if __name__ == "__main__":
    cli.run(main)
