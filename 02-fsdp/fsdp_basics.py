"""Shard a model with FSDP2: see a weight at each point of a step, count what is sent.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_basics.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_basics.py

Look for: a rank that holds 1/N of everything between steps; a block that is whole only
while it computes; the gradient and the losses of one process. --sharding full grad-op
hybrid none compares FSDP's strategies with DDP (none).

Sources: Zhao et al., PyTorch FSDP (VLDB 2023), sections 3.2 and 4; Rajbhandari et al.,
ZeRO (SC 2020), sections 5 and 7.
"""

import contextlib
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from dist_common import check, cli, data, runtime
from dist_common.model import PRESETS, build_transformer
from dist_common.report import Report

STRATEGIES = ("full", "grad-op", "hybrid", "none")
MAX_STEPS = 3
BATCH_SIZE = 2  # B, sequences of a micro-batch on each rank
SEQ_LEN = 16  # tokens; the bytes of a step do not depend on them
GROUP_SIZE = 2  # ranks that share a replica; in a job all ranks of a machine
COLUMNS = ("held", "whole", "all_gather", "reduce_scatter", "all_reduce", "sent")
TOLERANCE = 1e-5  # float32 sums in another order differ in the last bits


def count_shards(strategy, ranks):
    """Return over how many ranks a strategy shards the model."""
    return {"hybrid": min(GROUP_SIZE, ranks), "none": 1}.get(strategy, ranks)


def build_mesh(strategy, run):
    """Arrange the ranks: each row of the mesh shards one replica of the model."""
    shards = count_shards(strategy, run.world_size)
    if run.world_size % shards:
        raise cli.UsageError("--sharding hybrid: take 1 or an even number of ranks")
    if shards == run.world_size:
        return init_device_mesh(run.device.type, (shards,))
    shape = (run.world_size // shards, shards)
    return init_device_mesh(
        run.device.type, shape, mesh_dim_names=("replicate", "shard")
    )


def shard(model, strategy, mesh):
    """Shard in place: each block is a unit, and the rest of the model is one more."""
    reshard = strategy != "grad-op"
    for block in model.blocks:
        # From here on a rank holds its shard of the block, except while it computes.
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh)  # the rest: embedding, last norm and head


# Training


def load_batches(args, run):
    """Return the tokens of all ranks: N x B sequences for each micro-batch.

    Shape: (steps, micro-batches, N * B, T + 1).
    """
    text = torch.tensor(data.load_text())
    sequences = text.unfold(0, SEQ_LEN + 1, 1)  # one begins at each byte
    rows = run.world_size * BATCH_SIZE
    shape = (MAX_STEPS, args.grad_accum_steps, rows)
    generator = torch.Generator().manual_seed(args.seed)
    begins = torch.randint(len(sequences), shape, generator=generator)
    return sequences[begins].long().to(run.device)


def mean_loss(model, tokens):
    """Return the mean cross-entropy of predicting the next token. Shape: (B, T + 1)."""
    logits = model(tokens[:, :-1])  # (B, T, V)
    targets = tokens[:, 1:].flatten()
    return F.cross_entropy(logits.float().flatten(0, 1), targets)


def accumulate_gradient(model, micro_batches):
    """Leave the mean gradient of a step's micro-batches; return their mean loss."""
    total = 0.0
    for number, tokens in enumerate(micro_batches, 1):
        is_last = number == len(micro_batches)
        context = contextlib.nullcontext()
        if isinstance(model, FSDPModule):
            # The replicas of hybrid sharding all-reduce only the sum.
            model.set_requires_all_reduce(is_last)
        elif isinstance(model, DDP) and not is_last:
            context = model.no_sync()
        with context:
            loss = mean_loss(model, tokens) / len(micro_batches)
            loss.backward()
        total += loss.detach()
    return total


def train(model, optimizer, steps):
    """Take all steps; return the losses of this rank's samples. Shape: (steps,)."""
    losses = []
    for micro_batches in steps:
        optimizer.zero_grad()
        losses.append(accumulate_gradient(model, micro_batches))
        optimizer.step()  # on this rank's shards: nothing is sent
    return torch.stack(losses)


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


# Measurement


def whole_gradient(model):
    """Return the gradients of all weights, gathered, as one vector. A collective."""
    return torch.cat([check.whole(w.grad).flatten() for w in model.parameters()])


def relative_error(ours, expected):
    return ((ours - expected).norm() / expected.norm()).item()


def local(tensor):
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def describe(tensor):
    """Return a tensor's kind, the shape that this rank holds, and its bytes."""
    kind = type(tensor).__name__
    if isinstance(tensor, DTensor):
        kind += f", {', '.join(map(str, tensor.placements))}"
    held = local(tensor)
    return kind, " x ".join(map(str, held.shape)), f"{held.nbytes:,}"


def record_step(model, take_step):
    """Take a step; return what a weight is at each point, and the most whole bytes."""
    layer = model.blocks[0].down
    points, whole_bytes = {}, []

    def note(when, *_):
        weights = model.parameters()
        whole = sum(w.nbytes for w in weights if not isinstance(w, DTensor))
        whole_bytes.append(whole)
        points[when] = (*describe(layer.weight), f"{whole:,}")

    hooks = [
        layer.register_forward_pre_hook(partial(note, "in its forward")),
        model.register_forward_hook(partial(note, "after the forward")),
        layer.register_full_backward_pre_hook(partial(note, "in its backward")),
    ]
    note("before the step")
    take_step()
    note("after the step")
    points["its gradient"] = (*describe(layer.weight.grad), "")
    for hook in hooks:
        hook.remove()
    return points, max(whole_bytes)


def count_held_bytes(model, optimizer):
    """Return the bytes of weights, gradients and moments on this rank between steps."""
    total = 0
    for weight in model.parameters():
        tensors = (weight, weight.grad, *optimizer.state[weight].values())
        total += sum(local(tensor).nbytes for tensor in tensors if tensor.dim())
    return total  # the step count, a single number, is left out


# Prediction


def count_padded(weights, shards):
    """Return the numbers in weights, with the rows that make all shards equal."""
    return sum(shards * -(-len(w) // shards) * w[0].numel() for w in weights)


def predict(strategy, model, args, ranks):
    """Return bytes per rank: held, whole at once, sent in a step (ZeRO, section 7)."""
    shards = count_shards(strategy, ranks)
    replicas = ranks // shards
    ring, replica_ring = (shards - 1) / shards, (replicas - 1) / replicas
    P = count_padded(model.parameters(), shards)
    gathered = P
    whole = model.config.num_parameters()
    if strategy in ("full", "hybrid"):  # a block is freed, and gathered twice
        gathered += count_padded(model.blocks.parameters(), shards)
        whole -= sum(weight.numel() for weight in model.blocks[1:].parameters())
    # A number has 4 bytes; "held" counts weight, gradient and two moments.
    sent = 4 * args.grad_accum_steps * (gathered + P) * ring
    sent += 8 * P / shards * replica_ring
    return {"held": 16 * P // shards, "whole": 4 * whole, "sent": round(sent)}


def compare_strategy(report, strategy, args, batches, model, alone):
    """Train with a strategy; compare it with one process and with the prediction.

    Returns: the bytes and calls of a step, by name.
    """
    run = report.run
    predicted = predict(strategy, model, args, run.world_size)
    if strategy == "none":
        trained = DDP(model, bucket_cap_mb=25, gradient_as_bucket_view=True)
    else:
        trained = shard(model, strategy, build_mesh(strategy, run))
    optimizer = build_optimizer(trained)  # after sharding: it gets the shards
    steps = batches.chunk(run.world_size, dim=2)[run.rank]

    accumulate_gradient(trained, steps[0])
    error = relative_error(whole_gradient(model), alone["gradient"])
    report.check(f"{strategy}: error of the gradient", error, 0, TOLERANCE)
    losses = train(trained, optimizer, steps) / run.world_size
    dist.all_reduce(losses)
    error = relative_error(losses, alone["losses"])
    report.check(f"{strategy}: error of the losses", error, 0, TOLERANCE)

    with check.CollectiveCounter() as counter:
        take_step = partial(train, trained, optimizer, steps[:1])
        points, whole = record_step(model, take_step)
    if len(args.sharding) == 1:
        headers = ("block 0's down.weight", "is a", "shape", "bytes", "whole in all")
        report.table([(when, *values) for when, values in points.items()], headers)
    held = max(runtime.gather(count_held_bytes(model, optimizer), run.cpu_group))
    measured = {"held": held, "whole": whole, "sent": round(counter.bytes_sent.total())}
    for name, value in predicted.items():
        report.check(f"{strategy}: bytes {name}", measured[name], value, 0)
    return measured | counter.calls


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--sharding", choices=STRATEGIES, nargs="+", default=["full"], help="(full)")
    add(
        "--grad-accum-steps",
        type=cli.positive_int,
        default=1,
        help="micro-batches per step (1)",
    )
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        config = PRESETS["tiny"]
        report = Report("02-fsdp/fsdp_basics.py", args, run)
        run.print0(f"{config.num_parameters():,} weights in {config.num_layers} blocks")
        batches = load_batches(args, run)
        model = build_transformer(config, args.seed, run.device)
        accumulate_gradient(model, batches[0])
        alone = {"gradient": whole_gradient(model)}
        alone["losses"] = train(model, build_optimizer(model), batches)

        rows = []
        for strategy in args.sharding:
            model = build_transformer(config, args.seed, run.device)
            measured = compare_strategy(report, strategy, args, batches, model, alone)
            rows.append((strategy, *(f"{measured.get(key, 0):,}" for key in COLUMNS)))
        report.table(rows, ("per rank and step", *COLUMNS))
        return report.finish(f"loss {alone['losses'][-1]:.4f} after step {MAX_STEPS}")


if __name__ == "__main__":
    cli.run(main)
