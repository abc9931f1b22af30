"""Train a transformer that fits on no single device, under FSDP2: a template to copy and cut down.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_transformer.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_transformer.py \
              --preset llama3-8b --seq-len 4096 --micro-batch-size 1 --precision bf16-mixed \
              --activation-checkpointing full --loss-chunks 8

It does the same job as ddp_training.py of module 01: look for the same losses. With --output-dir
and --resume it can be killed at any moment and resumed on another number of ranks.

To copy: delete what you do not need (`checkpoint_activations`, `prefetch`, ways of `summed_loss`
and `synchronise`, `fsdp_checks`), each with what calls it.

Sources: Zhao et al., PyTorch FSDP (VLDB 2023); Liang et al., TorchTitan (2024), for the units;
Chen et al., Training Deep Nets with Sublinear Memory Cost (2016); Korthikanti et al., Reducing
Activation Recomputation (2022), section 5.
"""

import functools
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fsdp_checks
import fsdp_job
import sharded_checkpoint
from dist_common import checkpoint as checkpoints
from dist_common import cli, data, measure, models, runtime
from dist_common.models import Transformer
from dist_common.report import Report
from dist_common.steps import StepProbe
from shard_tools import mesh_of, shards_of

# What selective activation checkpointing keeps: matrix products and attention, which take the time.
# It computes norms and activation functions again, which take memory only.
KEPT = [torch.ops.aten.mm.default] + [
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{where}").default
    for kind, where in (("flash", ""), ("efficient", ""), ("cudnn", ""), ("flash", "_for_cpu"))
]


def build(args, config, mesh, device):
    """Build the model on no device, shard it there, and only then give each rank its memory."""
    with torch.device("meta"):
        model = Transformer(config)
    # The loss multiplies by the head's weight itself: then it may do so slice by slice.
    model.head.forward = lambda hidden: hidden
    if args.float8:  # matrix products read float8; weights stay as they are
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model.blocks)
    checkpoint_activations(model.blocks, args.activation_checkpointing)
    if args.compile:
        for block in model.blocks:
            block.compile()  # one block is translated, and serves for all
    shard(model, mesh, args)
    prefetch(model.blocks, args.prefetch)

    model.to_empty(device="cpu" if args.cpu_offload else device)

    if config.tied_embeddings:
        model.head.weight = model.embedding.weight  # to_empty has made two of it
    return model


def shard(model, mesh, args):
    """Make a unit of FSDP of the embedding, of each block, and of norm and head together."""
    options = {"mesh": mesh}
    if args.precision == "bf16-mixed":
        # Gathered and computed with in bfloat16, added up over ranks in float32. The rotary tables
        # stay float32: inputs are not cast.
        options["mp_policy"] = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, cast_forward_inputs=False
        )
    if args.cpu_offload:  # to pinned memory, which a GPU reads by itself, where there is a GPU
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    free_after_forward = args.sharding != "grad-op"
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=free_after_forward, **options)

    last = [model.norm, model.head]
    if model.config.tied_embeddings:  # one weight is in one unit
        last.append(model.embedding)
    else:
        fully_shard(model.embedding, reshard_after_forward=free_after_forward, **options)
    # Backward begins with these: freed after forward they would be gathered again at once.
    fully_shard(last, reshard_after_forward=False, **options)
    fully_shard(model, **options)  # the root, which has no weights left
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # Add up gradients over ranks instead of their mean: the loss is divided already, by
            # the tokens of all ranks. As a plain sum, which every backend has.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


def checkpoint_activations(blocks, kind):
    """Have backward compute activations again: of each block, of each k-th, or some in each.

    Inside the unit, not around it: when backward gets there, it has gathered the unit's weights.
    """
    every = int(kind) if kind.isdecimal() else 1
    keep = functools.partial(create_selective_checkpoint_contexts, KEPT)
    options = {"context_fn": keep} if kind == "selective" else {}
    for block in [] if kind == "none" else blocks[::every]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)


def prefetch(blocks, ahead):
    """Have each block start the all-gathers of the next ones, in forward and in backward."""
    for index, block in enumerate(blocks if ahead else []):
        block.set_modules_to_forward_prefetch(list(blocks[index + 1 : index + 1 + ahead]))
        earlier = list(blocks[max(0, index - ahead) : index])
        block.set_modules_to_backward_prefetch(earlier[::-1])


def make_optimizer(model, args):
    """Return the job's AdamW, made of the shards. Fused, it needs no memory beside its state."""
    return torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.95), weight_decay=0.1, fused=True)


def cross_entropy(hidden, weight, targets):
    """Return the loss, summed over tokens. Shapes: (tokens, D), (V, D), (tokens,)."""
    logits = F.linear(hidden, weight).float()  # (tokens, V)
    return F.cross_entropy(logits, targets, reduction="sum")


def summed_loss(model, inputs, targets, args):
    """Return a micro-batch's cross-entropy, summed over tokens. Shapes: (B, T) both."""
    hidden, targets = model(inputs).flatten(0, 1), targets.flatten()  # (B T, D), (B T,)
    weight = model.head.weight  # (V, D): FSDP has gathered it, and keeps it until backward
    if args.fused_loss:
        rows = -(-len(hidden) // args.loss_chunks)
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        return F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)
    if args.loss_chunks == 1:
        return cross_entropy(hidden, weight, targets)
    # Backward computes the logits of a slice again: no more than one slice of them is ever there.
    slices = zip(hidden.chunk(args.loss_chunks), targets.chunk(args.loss_chunks), strict=True)
    return sum(
        checkpoint(cross_entropy, part, weight, of_part, use_reentrant=False)
        for part, of_part in slices
    )


def synchronise(model, accumulate, last):
    """Say what FSDP does with gradients and weights after the backward of a micro-batch."""
    if accumulate == "sharded":
        model.set_requires_all_reduce(last)  # of hybrid: between the groups once per step
        return

    model.set_requires_gradient_sync(last)  # until then this rank keeps a whole gradient

    if accumulate == "gathered":
        model.set_reshard_after_backward(last)


def accumulate_gradient(run, micro_batches, tokens):
    """Leave the shards of the mean gradient over the global batch's `tokens` in the model.

    Return this rank's sum of losses, still on the device.
    Shapes: a micro-batch is inputs and targets, (B, T) each.
    """
    device = run.device
    loss_sum = torch.zeros((), device=device)
    for number, (inputs, targets) in enumerate(micro_batches, 1):
        synchronise(run.model, run.args.accumulate, number == len(micro_batches))
        inputs = inputs.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        loss = summed_loss(run.model, inputs, targets, run.args)

        (loss / tokens).backward()  # by the tokens of all ranks: each counts alike

        loss_sum += loss.detach()
    return loss_sum


def update(run, lr):
    """Clip the gradient, step the optimizer on the shards; return the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), run.args.max_grad_norm)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.step()
    run.optimizer.zero_grad()
    return norm.full_tensor()  # a DTensor: each rank has the norm of its own part


def count_tokens(micro_batches, device):
    """Return how many tokens of all ranks the loss counts, still on the device."""
    own = sum(int((targets != data.IGNORED).sum()) for _, targets in micro_batches)
    tokens = torch.full((), own, device=device)
    dist.all_reduce(tokens)
    return tokens


def train(run, steps):
    """Take steps; at least every --log-every of them read results, and save when due."""
    args, report = run.args, run.report
    unread = []
    signals = sharded_checkpoint.catch_preemption()
    run.timer.start()
    for run.step in steps:
        lr = cli.lr_at(run.step, args)
        micro_batches = next(run.batches)
        tokens = count_tokens(micro_batches, run.device)
        loss_sum = accumulate_gradient(run, micro_batches, tokens)
        unread.append((run.step, lr, loss_sum, tokens, update(run, lr)))
        run.sampler.advance(min(args.global_batch_size, len(run.train_set) - run.sampler.position))
        last = run.step == args.max_steps
        save_due = report.output and cli.due(run.step, args.save_every, last)
        if not (save_due or last or run.step % args.log_every == 0):
            continue  # the next step is queued while the device still computes this one

        run.stopped = fsdp_job.read_results(run, unread, signals)
        unread.clear()
        if save_due or (report.output and args.save_every and run.stopped):
            sharded_checkpoint.save(run)
        if run.stopped:
            break
        run.timer.start()  # the time of saving belongs to no step


def parse_args():
    parser = cli.ArgumentParser(__doc__, resumes=True)
    cli.add_job_flags(parser, models.PRESETS)  # --preset, --micro-batch-size, --lr, ...
    fsdp_job.add_flags(parser)  # --sharding, --activation-checkpointing, --loss-chunks, ...
    add, positive = parser.add_argument, cli.positive_int
    add("--log-every", type=positive, default=10,
        help="most steps between two looks at losses and stop signals (10)")  # fmt: skip
    add("--save-every", type=cli.whole_number, default=20,
        help="steps, with --output-dir; 0 for never (20)")  # fmt: skip
    add("--num-workers", type=cli.whole_number, default=0,
        help="processes per rank that load data (0)")  # fmt: skip
    parity = "gradients to compare with one process (1; 0 for presets other than tiny)"
    add("--parity-steps", type=cli.whole_number, help=parity)
    args = parser.parse_args()
    if args.parity_steps is None:
        args.parity_steps = int(args.preset == "tiny")
    return args


def set_up(args, report):
    """Return the run: model, optimizer, data and its place in it, ready for the first step."""
    world, device = report.world, report.device
    run = SimpleNamespace(args=args, report=report, device=device, step=0, trained_tokens=0)
    identity = data.settle_batch_sizes(args, world.world_size)
    run.config = models.preset(args.preset, args.seq_len)
    run.shards = shards_of(args.sharding, args.shard_group_size, world)
    fsdp_job.refuse(args, run.config, run.shards, world, device)
    run.train_set, _, checksum = data.job_text(args, world.world_size)
    run.sampler = data.ShardedSampler(len(run.train_set), world.rank, world.world_size, args.seed)
    report.start(fsdp_job.describe(args, run.config), identity)
    run.probe = StepProbe(device)
    run.model = build(args, run.config, mesh_of(run.shards, device), device)
    run.optimizer = make_optimizer(run.model, args)
    run.probe.attach(run.model, run.optimizer)
    run.files = sharded_checkpoint.file_group()
    run.shapes = fsdp_job.shapes_of(run.config)
    run.settings = checkpoints.settings_of(args, world.world_size, checksum)
    run.resumed = args.resume and sharded_checkpoint.resume(run)
    if not run.resumed:
        fsdp_job.draw_weights(run.model, run.config, device, args.seed)
    pinned = device.type == "cuda"  # a GPU fetches from such memory while it computes
    run.batches = data.job_batches(run.train_set, run.sampler, args, args.num_workers, pinned)
    run.flops_per_token = measure.flops_per_token(run.config, args.seq_len)
    run.timer = measure.StepTimer(device, warmup=max(3, args.log_every))
    return run


def main():
    args = parse_args()
    # With offload the norm of the gradients is added up in host memory.
    with runtime.init(args.device, args.timeout, cpu_tensors=args.cpu_offload) as (world, device):
        report = Report("02-fsdp/fsdp_transformer.py", args, world, device)
        run = set_up(args, report)
        if run.step >= args.max_steps:
            report.say(f"{report.output} has all {args.max_steps} steps: nothing to do")
            return 0
        fsdp_checks.check_gradient(run, accumulate_gradient)
        if report.failed:  # now, and not after days
            return report.finish("")
        run.log = measure.StepLog(report.output if world.is_rank0 else None, run.step + 1)
        run.first_sample = run.sampler.epoch, run.sampler.position

        steps = report.progress(range(run.step + 1, args.max_steps + 1), "training")
        train(run, run.probe.watch(steps))

        fsdp_checks.check_trained_tokens(run)
        fsdp_job.leave_metrics(run)
        saved = "saved" if report.output and args.save_every else "not saved"
        end = f"asked to stop, {saved}" if run.step < args.max_steps else "trained to the end"
        return report.finish(f"loss {run.loss:.4f} after step {run.step}, {end}")


if __name__ == "__main__":
    cli.run(main)
