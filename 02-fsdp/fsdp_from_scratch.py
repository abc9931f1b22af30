"""Build FSDP for any model from two collectives and four moves.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_from_scratch.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_from_scratch.py

Look for: the losses, collectives and bytes of PyTorch's `fully_shard`, in float32 and
in bf16-mixed; 1/N of the model on each rank between steps, and during a step the rest
and one unit whole.

Source: Zhao et al., PyTorch FSDP (VLDB 2023), sections 3.2 and 4.2: its FlatParameter
is our Unit.
"""

from collections import defaultdict
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from dist_common import check, cli, runtime
from dist_common.model import PRESETS, build_transformer
from dist_common.report import Report
from fsdp_basics import build_mesh, load_batches, relative_error, train

# The type of gathered weights (None: unchanged), and the tolerance of losses.
PRECISIONS = {"32-true": (None, 1e-5), "bf16-mixed": (torch.bfloat16, 0.01)}
# PyTorch 2.14 renamed both collectives.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def flatten(tensors):
    """Join tensors to one vector, with zeros until N ranks can share it equally."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return F.pad(flat, (0, -len(flat) % dist.get_world_size()))


def part_of(vector):
    """Return this rank's part of a vector. Shapes: (n,) -> (n / N,)."""
    return vector.chunk(dist.get_world_size())[dist.get_rank()]


class Unit:
    """Parameters that are sharded together: each rank keeps a part of one vector."""

    def __init__(self, parameters, dtype):
        self.parameters = parameters
        self.shapes = [parameter.shape for parameter in parameters]
        flat = flatten(parameters)  # and zeros, so that all parts are equally long

        self.shard = part_of(flat).clone()  # Move 1. All that this rank keeps.

        self.whole = flat.to(
            dtype if dtype and flat.is_floating_point() else flat.dtype
        )
        self.views = self.cut(self.whole)
        self.free()

    def cut(self, vector):
        """Return a vector's pieces in the shapes of the parameters."""
        sizes = [shape.numel() for shape in self.shapes]
        pieces = vector[: sum(sizes)].split(sizes)
        return [
            piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)
        ]

    def gather(self):
        """Move 2. Fill the vector with the parts of all ranks, unless it is full."""
        # lab: hole gather
        storage = self.whole.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.whole.nbytes)

            all_gather_single(self.whole, self.shard.to(self.whole.dtype))

            for parameter, view in zip(self.parameters, self.views, strict=True):
                parameter.data = view
        # lab: end

    def free(self):
        """Move 3. Free the memory, but keep the vector: autograd saved its views."""
        # lab: hole free
        self.whole.untyped_storage().resize_(0)
        for parameter in self.parameters:
            # An error instead of a crash, if it is used now.
            parameter.data = self.whole.new_empty(0)
        # lab: end

    def reduce(self):
        """Move 4. Average the gradients over ranks, keep this rank's part."""
        # lab: hole reduce
        if all(parameter.grad is None for parameter in self.parameters):
            return  # frozen, or not used
        gradients = [
            p.new_zeros(p.shape) if p.grad is None else p.grad for p in self.parameters
        ]
        whole = flatten(gradients)
        mean = torch.empty_like(self.shard)

        reduce_scatter_single(mean, whole.to(self.shard.dtype))

        mean /= dist.get_world_size()
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
        for parameter in self.parameters:
            parameter.grad = None
        # lab: end


class AfterBackward(torch.autograd.Function):
    """Pass a module's inputs on; call a function when all their gradients exist."""

    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function = function
        return inputs

    @staticmethod
    def backward(ctx, *gradients):
        ctx.function()
        return None, *gradients


def groups_of(model, modules):
    """Return the parameters of each unit by (module, trained or frozen, dtype).

    Parameters of no module, or of several, belong to the rest, the model's own unit.
    """
    owners = defaultdict(list)
    for module in modules:
        for parameter in module.parameters():
            owners[parameter].append(module)
    groups = defaultdict(list)
    for parameter in model.parameters():
        owner = owners[parameter][0] if len(owners[parameter]) == 1 else model
        groups[owner, parameter.requires_grad, parameter.dtype].append(parameter)
    return groups


class Sharded:
    """Shard a model in place: each of `modules` is a unit, the rest is one more.

    Give the optimizer `shards()`. `dtype` is the type of the gathered weights.
    """

    def __init__(self, model, modules, dtype=None):
        self.model = model
        self.dtype = dtype
        self.in_backward = False
        units_of = {module: [] for module in (*modules, model)}
        for (module, *_), parameters in groups_of(model, modules).items():
            units_of[module].append(Unit(parameters, dtype))
        for module, units in units_of.items():
            module.register_forward_pre_hook(
                partial(self.before_forward, units), with_kwargs=True
            )
            module.register_forward_hook(partial(self.after_forward, units))
        self.units = [unit for units in units_of.values() for unit in units]

    def shards(self):
        """Return the tensors for the optimizer: the shards that get a gradient."""
        return [unit.shard for unit in self.units if unit.parameters[0].requires_grad]

    def before_forward(self, units, module, args, kwargs):
        for unit in units:
            unit.gather()
        if module is self.model and self.dtype:
            args, kwargs = tree_map_only(torch.Tensor, self.cast, (args, kwargs))
        leaves, tree = tree_flatten((args, kwargs))
        inputs = {
            i: leaf
            for i, leaf in enumerate(leaves)
            if getattr(leaf, "requires_grad", False)
        }
        if inputs and torch.is_grad_enabled():
            outputs = AfterBackward.apply(
                partial(self.after_backward, units), *inputs.values()
            )
            for place, output in zip(inputs, outputs, strict=True):
                leaves[place] = output
        return tree_unflatten(leaves, tree)

    def cast(self, tensor):
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def after_forward(self, units, module, args, output):
        tensors = [
            leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)
        ]
        if not tensors:
            kind = type(output).__name__
            raise TypeError(
                f"{type(module).__name__} returns a {kind}, not tensors or a dict"
            )
        tensors = [tensor for tensor in tensors if tensor.requires_grad]
        for tensor in tensors:
            tensor.register_hook(partial(self.before_backward, units))
        # The rest stays, because backward begins with it. So does a unit that
        # activation checkpointing computes again in backward.
        if not self.in_backward and not (module is self.model and tensors):
            for unit in units:
                unit.free()

    def before_backward(self, units, gradient):
        if not self.in_backward:
            self.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        # lab: hole backward
        for unit in units:
            unit.gather()
        # lab: end

    def after_backward(self, units):
        # lab: hole backward
        for unit in units:
            unit.reduce()
            unit.free()
        # lab: end

    def finish(self):
        """At the end of backward, reduce the units that backward has left over."""
        self.after_backward(self.units)
        self.in_backward = False


def modules_of(model):
    """Choose the units of the lesson's model."""
    # lab: hole units
    return list(model.blocks)
    # lab: end


def shard_by_pytorch(model, modules, dtype, mesh):
    """Do the same with PyTorch's fully_shard."""
    reduce_dtype = torch.float32 if dtype else None
    policy = MixedPrecisionPolicy(dtype, reduce_dtype, cast_forward_inputs=False)
    for module in (*modules, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


# Measurement


def predict(model, modules, dtype, args, ranks):
    """Return by formula the most bytes whole at once, and the bytes sent in a step."""
    sizes = [sum(w.numel() for w in module.parameters()) for module in modules]
    sizes.append(model.config.num_parameters() - sum(sizes))
    *units, rest = [ranks * -(-size // ranks) for size in sizes]  # with the zeros
    width = 2 if dtype else 4  # bytes of a gathered weight; 4 of a gradient
    per_micro_batch = (2 * width + 4) * sum(units) + (width + 4) * rest
    sent = args.grad_accum_steps * per_micro_batch * (ranks - 1) / ranks
    return width * (rest + max(units)), round(sent)


def record_whole_bytes(model, sharded):
    """Return a list that gets the bytes of whole units, noted inside each block."""
    whole_bytes = []

    def note(*_):
        whole = [unit.whole.untyped_storage().nbytes() for unit in sharded.units]
        whole_bytes.append(sum(whole))

    for block in model.blocks:
        block.down.register_forward_pre_hook(note)
        block.down.register_full_backward_pre_hook(note)
    return whole_bytes


def take_steps(model, weights, steps):
    """Train with SGD; return the mean losses, and the count of the last step."""
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    losses = train(model, optimizer, steps[:-1])
    with check.CollectiveCounter() as counter:
        losses = torch.cat([losses, train(model, optimizer, steps[-1:])])
    losses /= dist.get_world_size()
    dist.all_reduce(losses)
    return losses, counter


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument(
        "--grad-accum-steps",
        type=cli.positive_int,
        default=2,
        help="micro-batches per step (2)",
    )
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        config = PRESETS["tiny"]
        report = Report("02-fsdp/fsdp_from_scratch.py", args, run)
        batches = load_batches(args, run)
        steps = batches.chunk(run.world_size, dim=2)[run.rank]

        def build():
            return build_transformer(config, args.seed, run.device)

        alone = build()
        expected, _ = take_steps(alone, alone.parameters(), batches)
        rows = []
        for precision, (dtype, tolerance) in PRECISIONS.items():
            model, twin = build(), build()
            modules = modules_of(model)
            whole, sent = predict(model, modules, dtype, args, run.world_size)
            sharded = Sharded(model, modules, dtype)
            whole_bytes = record_whole_bytes(model, sharded)
            ours = take_steps(model, sharded.shards(), steps)
            error = relative_error(ours[0], expected)
            measured = round(ours[1].bytes_sent.total())
            report.check(f"{precision}: error of the losses", error, 0, tolerance)
            report.check(f"{precision}: bytes sent", measured, sent, 0)
            report.check(f"{precision}: bytes whole", max(whole_bytes), whole, 0)
            mesh = build_mesh("full", run)
            shard_by_pytorch(twin, modules_of(twin), dtype, mesh)
            theirs = take_steps(twin, twin.parameters(), steps)
            ways = {"from scratch": ours, "fully_shard": theirs}
            for way, (losses, counter) in ways.items():
                calls = (counter.calls["all_gather"], counter.calls["reduce_scatter"])
                sent = f"{round(counter.bytes_sent.total()):,}"
                rows.append((f"{precision}, {way}", *calls, sent, f"{losses[-1]:.4f}"))
        headers = ("per step", "all-gathers", "reduce-scatters", "bytes sent", "loss")
        report.table(rows, headers)
        return report.finish(f"loss {expected[-1]:.4f} after step {len(steps)}")


if __name__ == "__main__":
    cli.run(main)
