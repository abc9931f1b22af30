"""Build FSDP for any model from two collectives and four moves: shard, gather, free, reduce.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_from_scratch.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_from_scratch.py

Look for: the losses, collectives and bytes of PyTorch's `fully_shard`, in float32 and bf16-mixed;
between steps 1/N of the model on each rank, during a step the rest and one unit whole.

`Sharded` does it to any nn.Module: the page shows how, in a script of your own.
Source: Zhao et al., PyTorch FSDP (VLDB 2023), sections 3.2 and 4.2: its FlatParameter is `Unit`.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from fsdp_parts.fsdp_from_scratch import (
    WholeBytes,
    check_one_process,
    check_run,
    flatten,
    groups_of,
    part_of,
    train,
)
from fsdp_parts.strategies import Plan, print_strategies, steps_of, unit_weights
from legacy_common import cli, models, runtime
from legacy_common.report import Report
from legacy_common.runtime import all_gather_single, reduce_scatter_single

PRECISIONS = {"32-true": None, "bf16-mixed": torch.bfloat16}  # what weights are gathered in


class Unit:
    """Parameters that are sharded together: one flat vector, of which each rank keeps a part."""

    def __init__(self, parameters, dtype):
        self.parameters = parameters
        self.shapes = [parameter.shape for parameter in parameters]
        flat = flatten(parameters)  # and zeros, so that all parts are equally long

        self.shard = part_of(flat).clone()  # Move 1. All that this rank keeps.

        self.whole = flat.to(dtype if dtype and flat.is_floating_point() else flat.dtype)
        self.views = self.cut(self.whole)
        self.free()

    def cut(self, vector):
        """Return a vector's pieces in the shapes of the parameters."""
        sizes = [shape.numel() for shape in self.shapes]
        pieces = vector[: sum(sizes)].split(sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def gather(self):
        """Move 2. Fill the vector with the parts of all ranks, unless it is full already."""
        # lab: hole gather
        storage = self.whole.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.whole.nbytes)

            all_gather_single(self.whole, self.shard.to(self.whole.dtype))

            for parameter, view in zip(self.parameters, self.views, strict=True):
                parameter.data = view
        # lab: end

    def free(self):
        """Move 3. Give the memory back, but keep the vector: autograd has saved views of it."""
        # lab: hole free
        self.whole.untyped_storage().resize_(0)
        for parameter in self.parameters:
            parameter.data = self.whole.new_empty(0)  # an error instead of a crash, if used now
        # lab: end

    def reduce(self):
        """Move 4. Add up all ranks' gradients, each rank its own part, and drop the whole ones."""
        # lab: hole reduce
        if all(parameter.grad is None for parameter in self.parameters):
            return  # frozen, or not used
        whole = flatten(p.new_zeros(p.shape) if p.grad is None else p.grad for p in self.parameters)
        mean = torch.empty_like(self.shard)

        reduce_scatter_single(mean, whole.to(self.shard.dtype))

        mean /= dist.get_world_size()
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
        for parameter in self.parameters:
            parameter.grad = None
        # lab: end


class AfterBackward(torch.autograd.Function):
    """Pass a module's inputs on; call a function when the gradients of all of them are there."""

    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function = function
        return inputs

    @staticmethod
    def backward(ctx, *gradients):
        ctx.function()
        return None, *gradients


class Sharded:
    """Shard a model in place: each of `modules` is gathered by itself, the rest once a step.

    Give the optimizer `shards()`. `dtype` is what weights are gathered and computed in.
    """

    def __init__(self, model, modules, dtype=None):
        self.model = model
        self.dtype = dtype
        self.in_backward = False
        units_of = {module: [] for module in (*modules, model)}
        for (module, *_), parameters in groups_of(model, modules).items():
            units_of[module].append(Unit(parameters, dtype))
        for module, units in units_of.items():
            module.register_forward_pre_hook(partial(self.before_forward, units), with_kwargs=True)
            module.register_forward_hook(partial(self.after_forward, units))
        self.units = [unit for units in units_of.values() for unit in units]

    def shards(self):
        """Return what the optimizer steps on: the shards that get a gradient."""
        return [unit.shard for unit in self.units if unit.parameters[0].requires_grad]

    def before_forward(self, units, module, args, kwargs):
        for unit in units:
            unit.gather()
        if module is self.model and self.dtype:
            args, kwargs = tree_map_only(torch.Tensor, self.cast, (args, kwargs))
        leaves, tree = tree_flatten((args, kwargs))
        inputs = {i: leaf for i, leaf in enumerate(leaves) if getattr(leaf, "requires_grad", False)}
        if inputs and torch.is_grad_enabled():
            outputs = AfterBackward.apply(partial(self.after_backward, units), *inputs.values())
            for place, output in zip(inputs, outputs, strict=True):
                leaves[place] = output
        return tree_unflatten(leaves, tree)

    def cast(self, tensor):
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def after_forward(self, units, module, args, output):
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            kind = type(output).__name__
            raise TypeError(f"{type(module).__name__} returns a {kind}, not tensors or a dict")
        tensors = [tensor for tensor in tensors if tensor.requires_grad]
        for tensor in tensors:
            tensor.register_hook(partial(self.before_backward, units))
        # The rest stays: backward begins with it. So does what activation checkpointing computes
        # again in backward.
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
        """At the end of backward: the rest, and units none of whose inputs has a gradient."""
        self.after_backward(self.units)
        self.in_backward = False


def modules_of(model):
    """Choose the units of the lesson's model."""
    # lab: hole units
    return list(model.blocks)
    # lab: end


def shard_by_pytorch(model, modules, dtype):
    """Do the same with PyTorch's own; return the parameters for the optimizer."""
    reduce_dtype = torch.float32 if dtype else None
    policy = MixedPrecisionPolicy(dtype, reduce_dtype, cast_forward_inputs=False)
    for module in (*modules, model):
        fully_shard(module, mp_policy=policy)
    return list(model.parameters())


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    positive = cli.positive_int
    add("--micro-batch-size", type=positive, default=4, help="sequences per rank at a time (4)")
    add("--grad-accum-steps", type=positive, default=2, help="micro-batches per step (2)")
    add("--seq-len", type=positive, default=64, help="tokens per sequence (64)")
    add("--max-steps", type=positive, default=4, help="training steps (4)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("02-fsdp/fsdp_from_scratch.py", args, world, device)
        config = models.preset("tiny", args.seq_len)
        weights = config.num_parameters()
        own, together = steps_of(args, world, device)
        size, m = args.micro_batch_size, args.grad_accum_steps
        report.start(
            f"{weights:,} weights; global batch {size * m * world.world_size} = "
            f"{size} per rank x {m} micro-batches x {world.world_size} ranks"
        )

        def build():
            runtime.seed_everything(args.seed)
            return models.Transformer(config).to(device)

        alone = build()
        expected = train(alone, list(alone.parameters()), together)
        measured = {}
        for precision, dtype in PRECISIONS.items():
            plan = Plan("full", weights, precision, m, world.world_size, world.world_size)
            model = build()
            modules = modules_of(model)
            units = unit_weights([*modules, model], world.world_size, flat=True)
            sharded = Sharded(model, modules, dtype)
            whole = WholeBytes(sharded)
            ours = train(model, sharded.shards(), own)
            twin = build()
            modules = modules_of(twin)
            units_of_twin = unit_weights([*modules, twin], world.world_size)
            theirs = train(twin, shard_by_pytorch(twin, modules, dtype), own)
            measured |= check_run(report, plan, (ours, units), (theirs, units_of_twin), whole)
            check_one_process(report, precision, sharded, ours, alone, expected)
        print_strategies(report, measured)
        return report.finish(f"loss {ours.losses[-1]:.4f} after step {args.max_steps}")


if __name__ == "__main__":
    cli.run(main)
