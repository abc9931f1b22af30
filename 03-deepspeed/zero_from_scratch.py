"""Build ZeRO stages 1 and 2 for any parameters from two collectives, without DeepSpeed.

    CPU   torchrun --standalone --nproc-per-node=2 03-deepspeed/zero_from_scratch.py
    GPU   torchrun --standalone --nproc-per-node=gpu 03-deepspeed/zero_from_scratch.py

Look for: the losses of one process; on each rank moments for 1/N of the weights, and in stage 2 as
little of the gradient, for a reduction in every micro-batch instead of one per step.

`Zero` does it to any nn.Module: the page shows how, in a script of your own.
Source: Rajbhandari et al., ZeRO (SC 2020), sections 5.1, 5.2 and 7.2.
"""

from functools import partial

import torch
import torch.distributed as dist

from deepspeed_parts import zero_from_scratch as part
from deepspeed_parts.zero_from_scratch import assemble, buckets_of, flatten, part_of, views_of
from legacy_common import cli, models, runtime
from legacy_common.report import Report
from legacy_common.runtime import all_gather_single, reduce_scatter_single

MIB = 2**20  # bytes
PRECISIONS = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}  # of weights and gradients


class Bucket:
    """Parameters that are reduced together: one flat vector, of which each rank updates a part."""

    def __init__(self, parameters, dtype, reduce_dtype):
        self.parameters = parameters
        self.reduce_dtype = reduce_dtype
        original = flatten(parameters)  # and zeros, so that all parts are equally long

        self.part = part_of(original)  # The optimizer gets this only: moments for 1/N of it.

        self.flat = original.to(dtype)
        if dtype != original.dtype:
            self.part = self.part.clone()  # float32 weights: without it all would stay in memory
        for parameter, view in zip(parameters, views_of(self.flat, parameters), strict=True):
            parameter.data = view
        self.gradient = None

    def reduce(self):
        """Add up all ranks' gradients, each rank its own part, and drop the whole ones."""
        # lab: hole reduce
        weights = self.parameters  # without a gradient: in a branch that this rank did not take
        whole = flatten(torch.zeros_like(w) if w.grad is None else w.grad for w in weights)
        mean = torch.empty_like(self.part, dtype=self.reduce_dtype)

        reduce_scatter_single(mean, whole.to(self.reduce_dtype))

        mean /= dist.get_world_size()
        self.gradient = mean if self.gradient is None else self.gradient + mean
        for parameter in self.parameters:
            parameter.grad = None
        # lab: end

    def gather(self):
        """Give every rank the parts that the others have updated."""
        # lab: hole gather
        all_gather_single(self.flat, self.part.to(self.flat.dtype, copy=True))
        # lab: end


class Zero:
    """ZeRO stage 1 or 2: call `step()` after a step's backward passes, instead of the optimizer's.

    Weights and gradients are in `dtype`; gradients are summed over ranks, in stage 2 over micro-
    batches too, in `reduce_dtype` (default: `dtype`). What the optimizer updates stays as built.
    """

    def __init__(
        self, parameters, make_optimizer, stage, dtype, reduce_dtype=None, bucket_bytes=25 * MIB
    ):
        self.stage = stage
        parameters = list(dict.fromkeys(parameters))  # one that two layers share comes once
        for parameter in parameters:
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.buckets = [
            Bucket(bucket, dtype, reduce_dtype or dtype)
            for bucket in buckets_of(trained, bucket_bytes)
        ]
        # lab: hole optimizer
        self.optimizer = make_optimizer([bucket.part for bucket in self.buckets])
        # lab: end
        self.queue = []  # the buckets that this backward has not yet reduced
        if stage == 2:
            for bucket in self.buckets:
                for parameter in bucket.parameters:
                    parameter.register_post_accumulate_grad_hook(partial(self.note, bucket))

    def note(self, bucket, parameter):
        """Stage 2: a gradient is there. Reduce the buckets that are complete, in order."""
        if not self.queue:  # backward has just begun
            self.queue = list(self.buckets)
            for waiting in self.queue:
                waiting.missing = set(waiting.parameters)
            torch.autograd.Variable._execution_engine.queue_callback(self.reduce_rest)
        bucket.missing.remove(parameter)
        while self.queue and not self.queue[0].missing:
            self.queue.pop(0).reduce()

    def reduce_rest(self):
        """At the end of backward: buckets with a parameter that this rank's loss did not use."""
        while self.queue:
            self.queue.pop(0).reduce()

    def step(self, max_grad_norm=None):
        """Update this rank's part, then share it. Stage 1 has whole gradients until here."""
        # lab: hole step
        for bucket in self.buckets:
            if self.stage == 1:
                bucket.reduce()
            bucket.part.grad = bucket.gradient.to(bucket.part.dtype)
            bucket.gradient = None
        if max_grad_norm:
            self.clip(max_grad_norm)

        self.optimizer.step()

        self.optimizer.zero_grad()
        for bucket in self.buckets:
            bucket.gather()
        # lab: end

    def clip(self, max_grad_norm):
        """Scale gradients to a norm of at most max_grad_norm; return the whole gradient's norm."""
        # lab: hole clip
        gradients = [bucket.part.grad for bucket in self.buckets]
        square = sum(gradient.float().square().sum() for gradient in gradients)

        dist.all_reduce(square)  # of a norm, squares add up: each rank has those of its part

        norm = square.sqrt()
        for gradient in gradients:
            gradient *= (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm
        # lab: end


def whole_state(zero, model):
    """Return the model's state dict with the weights that the optimizer updates, in float32.

    `model.state_dict()` has them in the precision of the model. Every rank must call it.
    """
    whole = assemble(zero, [bucket.part for bucket in zero.buckets])
    by_id = {id(parameter): tensor for parameter, tensor in whole.items()}
    own = model.state_dict(keep_vars=True)
    return {name: by_id.get(id(value), value) for name, value in own.items()}


def load_whole_state(zero, model, state):
    """Load a state dict; every rank must call it. Raises: RuntimeError for other names or sizes."""
    names = {id(value): name for name, value in model.state_dict(keep_vars=True).items()}
    model.load_state_dict(state)
    for bucket in zero.buckets:
        bucket.part.copy_(part_of(flatten(state[names[id(p)]] for p in bucket.parameters)))


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    positive = cli.positive_int
    add("--micro-batch-size", type=positive, default=4, help="sequences per rank at a time (4)")
    add("--grad-accum-steps", type=positive, default=2, help="micro-batches per step (2)")
    at_least_2 = partial(cli.whole_number, low=2)  # moments come with the first
    add("--max-steps", type=at_least_2, default=4, help="training steps (4)")
    add("--seq-len", type=positive, default=64, help="tokens per sequence (64)")
    add("--bucket-cap-mb", type=cli.positive_float, default=0.5, help="MiB per bucket (0.5)")
    choices = ("weights", "float32")
    add("--reduce-dtype", choices=choices, default="weights", help="sum gradients in (weights)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("03-deepspeed/zero_from_scratch.py", args, world, device)
        config = models.preset("tiny", args.seq_len)
        whole, own, sizes = part.batches_of(args, world, device)
        report.start(f"{config.num_parameters():,} weights; {sizes}")

        def build():
            runtime.seed_everything(args.seed)
            return models.Transformer(config).to(device)

        alone = part.train_alone(build(), whole)
        reduce_dtype = torch.float32 if args.reduce_dtype == "float32" else None
        size = int(args.bucket_cap_mb * MIB)
        rows = [["one process", *["-"] * 4, f"{alone.losses[-1]:.6f}"]]
        for precision, dtype in PRECISIONS.items():
            for stage in (1, 2):
                kinds = {"stage": stage, "dtype": dtype, "reduce_dtype": reduce_dtype}
                run = part.train(build, partial(Zero, bucket_bytes=size, **kinds), own)
                rows.append(part.check(report, f"stage {stage}, {precision}", run, alone, **kinds))
        report.say("held and sent in bytes per weight")
        report.table(rows, ("", "reduce-scatters", "all-gathers", "held", "sent", "last loss"))
        return report.finish(f"loss {run.losses[-1]:.4f} after step {args.max_steps}")


if __name__ == "__main__":
    cli.run(main)
