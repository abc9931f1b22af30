"""Build ZeRO stages 1 and 2 for any model from two collectives, without DeepSpeed.

    CPU   torchrun --standalone --nproc-per-node=2 03-deepspeed/zero_from_scratch.py
    GPU   torchrun --standalone --nproc-per-node=gpu 03-deepspeed/zero_from_scratch.py

Look for: the losses of one process; on each rank 1/N of the optimizer state, and in
stage 2 1/N of the gradients, for one more reduction with every further micro-batch.

Source: Rajbhandari et al., ZeRO (SC 2020), sections 5.1, 5.2 and 7.2.
"""

import gc
import time
from functools import partial
from itertools import islice, product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_, vector_to_parameters
from torch.utils.data import DataLoader

from dist_common import cli, data, runtime
from dist_common.check import CollectiveCounter
from dist_common.model import PRESETS, build_transformer
from dist_common.report import Report

MIB = 2**20  # bytes
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Relative, of losses and gradient norms (bfloat16 keeps 8 bits); of bytes per weight.
TOLERANCES = {"float32": 2e-5, "bfloat16": 5e-2, "bytes": 0.02}
MAX_GRAD_NORM = 1.0
COLLECTIVES = ("reduce_scatter", "all_gather")

# PyTorch 2.13 renamed these two.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def flatten(tensors):
    """Return tensors as one vector, padded with zeros so that N ranks can share it."""
    vector = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return F.pad(vector, (0, -len(vector) % dist.get_world_size()))


def part_of(vector):
    """Return this rank's part of a vector. Shapes: (n,) -> (n / N,)."""
    return vector.chunk(dist.get_world_size())[dist.get_rank()]


def group_parameters(parameters, bucket_bytes):
    """Group parameters, the last layer's first, into at least bucket_bytes each."""
    groups = []
    for parameter in reversed(parameters):
        if not groups or sum(p.nbytes for p in groups[-1]) >= bucket_bytes:
            groups.append([])
        groups[-1].append(parameter)
    return groups


class Bucket:
    """Parameters in one flat vector; each rank updates its own part of the vector."""

    def __init__(self, parameters, dtype, reduce_dtype):
        self.parameters = parameters
        self.reduce_dtype = reduce_dtype
        original = flatten(parameters)

        self.part = part_of(original)  # all that the optimizer gets

        self.flat = original.to(dtype)
        if dtype != original.dtype:
            self.part = self.part.clone()  # master weights: lets `original` be freed
        vector_to_parameters(self.flat, parameters)  # they are views of it now
        self.gradient = None

    def reduce(self):
        """Sum the gradients over ranks; keep the mean of this rank's part only."""
        # lab: hole reduce
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self.parameters
        ]
        whole = flatten(gradients).to(self.reduce_dtype)
        mean = torch.empty_like(self.part, dtype=self.reduce_dtype)

        reduce_scatter_single(mean, whole)

        mean /= dist.get_world_size()
        self.gradient = mean if self.gradient is None else self.gradient + mean
        for parameter in self.parameters:
            parameter.grad = None
        # lab: end

    def gather(self):
        """Give every rank the parts that the other ranks have updated."""
        # lab: hole gather
        all_gather_single(self.flat, self.part.to(self.flat.dtype, copy=True))
        # lab: end


class Zero:
    """ZeRO stage 1 or 2. Call `step` after a step's backward passes.

    Weights and gradients are in `dtype`. Gradients are summed over ranks in
    `reduce_dtype` (default: `dtype`). The optimizer updates float32 weights.
    """

    def __init__(
        self,
        parameters,
        make_optimizer,
        stage,
        dtype,
        reduce_dtype=None,
        bucket_bytes=MIB // 2,
    ):
        self.stage = stage
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.buckets = [
            Bucket(group, dtype, reduce_dtype or dtype)
            for group in group_parameters(trained, bucket_bytes)
        ]
        # lab: hole optimizer
        self.optimizer = make_optimizer([bucket.part for bucket in self.buckets])
        # lab: end
        self.queue = []  # buckets that this backward has not yet reduced
        if stage == 2:
            for bucket in self.buckets:
                for parameter in bucket.parameters:
                    hook = partial(self.reduce_ready, bucket)
                    parameter.register_post_accumulate_grad_hook(hook)

    def reduce_ready(self, bucket, parameter):
        """Stage 2: a gradient is complete. Reduce the complete buckets, in order."""
        if not self.queue:  # backward has just begun
            self.queue = list(self.buckets)
            for waiting in self.queue:
                waiting.missing = set(waiting.parameters)
            # DDP and FSDP use it too: no public hook runs at the end of backward.
            torch.autograd.Variable._execution_engine.queue_callback(self.reduce_rest)
        bucket.missing.remove(parameter)
        while self.queue and not self.queue[0].missing:
            self.queue.pop(0).reduce()

    def reduce_rest(self):
        """Reduce the buckets with a parameter that this rank's loss did not use."""
        for bucket in self.queue:
            bucket.reduce()
        self.queue = []

    def step(self, max_grad_norm=None):
        """Update this rank's part, then share it; return the norm if it clips."""
        # lab: hole step
        norm = None
        for bucket in self.buckets:
            if self.stage == 1:
                bucket.reduce()
            bucket.part.grad = bucket.gradient.to(bucket.part.dtype)
            bucket.gradient = None
        if max_grad_norm:
            norm = self.clip(max_grad_norm)

        self.optimizer.step()

        self.optimizer.zero_grad()
        for bucket in self.buckets:
            bucket.gather()
        return norm
        # lab: end

    def clip(self, max_grad_norm):
        """Scale the gradient to a norm of at most max_grad_norm; return its norm."""
        # lab: hole clip
        gradients = [bucket.part.grad for bucket in self.buckets]
        square = sum(gradient.float().square().sum() for gradient in gradients)

        dist.all_reduce(square)  # each rank has the squares of its own part

        norm = square.sqrt()
        for gradient in gradients:
            gradient *= (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm
        # lab: end


# Training


def make_adamw(weights):
    return torch.optim.AdamW(weights, 2e-3, (0.9, 0.95), weight_decay=0.1)


def loss_of(model, batch):
    """Return the mean cross-entropy. Shapes: inputs, targets (B, T)."""
    inputs, targets = batch
    logits = model(inputs)  # (B, T, V)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def load_batches(args, run):
    """Return each step's global batch: inputs and targets, (global batch, T) each."""
    global_batch = args.micro_batch_size * args.grad_accum_steps * run.world_size
    run.print0(
        f"global batch {global_batch} = {args.micro_batch_size} per micro-batch x "
        f"{args.grad_accum_steps} micro-batches x {run.world_size} ranks"
    )
    sequences = data.Sequences(data.load_text(), args.seq_len)
    order = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(sequences, global_batch, shuffle=True, generator=order)
    return [
        [tensor.to(run.device) for tensor in batch]
        for batch in islice(loader, args.max_steps)
    ]


def micro_batches_of(batch, args, run):
    """Return this rank's micro-batches of a global batch, (B, T) each."""
    shape = (-1, run.world_size, args.micro_batch_size)
    inputs, targets = (tensor.unflatten(0, shape)[:, run.rank] for tensor in batch)
    return zip(inputs, targets, strict=True)


def train_alone(model, batches):
    """Train in one process and float32. Returns: losses, gradient norms, (2, steps)."""
    optimizer = make_adamw(model.parameters())
    losses, norms = [], []
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor([losses, norms])


def train(build_model, stage, dtype, batches, args, run):
    """Train with ZeRO, and measure.

    Returns: losses and gradient norms, (2, steps); bytes that this rank holds in the
    middle of a step; the counter of the last step's collectives.
    """
    before = bytes_of(live_tensors())
    model = build_model()
    zero = Zero(model.parameters(), make_adamw, stage, dtype)
    losses, norms = [], []
    for batch in batches:
        loss_sum = torch.zeros((), device=run.device)
        with CollectiveCounter() as counter:
            for micro_batch in micro_batches_of(batch, args, run):
                loss = loss_of(model, micro_batch) / args.grad_accum_steps
                loss.backward()
                loss_sum += loss.detach()
            norms.append(zero.step(MAX_GRAD_NORM).item())
        dist.all_reduce(loss_sum)
        losses.append(loss_sum.item() / run.world_size)
    loss_of(model, micro_batch).backward()  # one more gradient
    held = bytes_of(live_tensors()) - before
    return torch.tensor([losses, norms]), held, counter


def live_tensors():
    """Return all floating-point tensors that this process holds."""
    time.sleep(0.2)  # gloo's threads free their buffers a moment later
    gc.collect()
    # `isinstance` would wake lazy objects of libraries.
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    # A gradient that nobody has read yet is not a Python object.
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def bytes_of(tensors):
    """Return the bytes behind tensors; memory that several share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({memory.data_ptr(): memory.nbytes() for memory in storages}.values())


def expected_bytes(stage, width, ranks, micro_batches):
    """Return bytes per weight that a rank holds, and that it sends in a step.

    `width`: bytes of a weight and of a gradient. Source: ZeRO, sections 5 and 7.
    """
    state = 8 if width == 4 else 12  # two moments; bf16 weights need a float32 copy
    gradients = width if stage == 1 else width / ranks
    reductions = 1 if stage == 1 else micro_batches
    sent = (reductions + 1) * width * (ranks - 1) / ranks
    return width + gradients + state / ranks, sent


def add_batch_flags(parser):
    """Add the flags that set the batches of a short run."""
    for flag, default, meaning in (
        ("--micro-batch-size", 4, "sequences per rank at a time"),
        ("--grad-accum-steps", 2, "micro-batches per step"),
        ("--seq-len", 64, "tokens per sequence"),
        ("--max-steps", 4, "training steps"),
    ):
        parser.add_argument(
            flag, type=cli.positive_int, default=default, help=f"{meaning} ({default})"
        )


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add_batch_flags(parser)
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        report = Report("03-deepspeed/zero_from_scratch.py", args, run)
        batches = load_batches(args, run)
        build_model = partial(build_transformer, PRESETS["tiny"], args.seed, run.device)
        alone = train_alone(build_model(), batches)
        rows = [("one process", *["-"] * 4, f"{alone[0, -1]:.6f}")]
        errors = {"float32": [], "bfloat16": [], "bytes": []}
        for (name, dtype), stage in product(DTYPES.items(), (1, 2)):
            curves, held, counter = train(build_model, stage, dtype, batches, args, run)
            sent = sum(counter.bytes_sent[kind] for kind in COLLECTIVES)
            measured = torch.tensor([held, sent]) / PRESETS["tiny"].num_parameters()
            expected = expected_bytes(
                stage, dtype.itemsize, run.world_size, args.grad_accum_steps
            )
            errors[name].append((curves / alone - 1).abs().max())
            errors["bytes"].append((measured - torch.tensor(expected)).abs().max())
            calls = [counter.calls[kind] for kind in COLLECTIVES]
            numbers = [f"{number:.2f}" for number in measured]
            last_loss = f"{curves[0, -1]:.6f}"
            rows.append((f"stage {stage}, {name}", *calls, *numbers, last_loss))
        headers = ("", *COLLECTIVES, "held, B/weight", "sent, B/weight", "last loss")
        report.table(rows, headers)
        for name, tolerance in TOLERANCES.items():
            largest = torch.stack(errors[name]).max().item()
            report.check(f"largest error: {name}", largest, 0, tolerance)
        return report.finish(f"loss {last_loss} after step {args.max_steps}")


if __name__ == "__main__":
    cli.run(main)
