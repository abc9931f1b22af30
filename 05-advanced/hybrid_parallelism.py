"""Train one transformer with data, tensor, pipeline and context parallelism at once: a template.

    CPU   torchrun --standalone --nproc-per-node=8 05-advanced/hybrid_parallelism.py --tp 2 --pp 2
    GPU   torchrun --standalone --nproc-per-node=8 05-advanced/hybrid_parallelism.py --tp 2 --pp 2 \
              --preset llama3-8b --seq-len 4096 --precision bf16-mixed --data-parallel grad-op

It does the same job as ddp_training.py of module 01. Look for: the same losses as there, whatever
--dp, --tp, --pp and --cp are, and the bytes that each axis sends, which say what link it needs.

To copy: delete the axes that you do not need; each is one function (`split_tensors`,
`split_sequence`, `split_layers`, `split_batch`) and the lines that call it.

Sources: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM (SC 2021); Liang et al., TorchTitan (2024); Grattafiori et al., The Llama 3 Herd of
Models (2024), section 3.3.2, for the all-gather of keys and values.
"""

import contextlib
import functools
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import hybrid_checkpoint
import hybrid_checks
import hybrid_results
from dist_common import cli, data, measure, models, runtime
from dist_common.report import Report
from dist_common.steps import StepProbe
from hybrid_gather import GatherSequence
from hybrid_layout import (
    copies_of,
    draw_weights,
    drop_other_stages,
    local,
    resolve_axes,
    say_layout,
)

SCHEDULES = {  # and how many stages each rank has
    "gpipe": (pipelining.ScheduleGPipe, 1),
    "1f1b": (pipelining.Schedule1F1B, 1),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2),
    "zero-bubble": (pipelining.ScheduleInterleavedZeroBubble, 2),
}


def split_tensors(model, mesh):
    """Tensor parallelism: cut each block's matrices, and the vocabulary, over the ranks of `tp`."""
    # One tensor in, and a gradient that is summed once, for all matrices that read the norm.
    shared = functools.partial(PrepareModuleOutput, use_local_output=False)
    plan = {
        "attention_norm": shared(output_layouts=Replicate(), desired_output_layouts=Replicate()),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(),
        "ffn_norm": shared(output_layouts=Replicate(), desired_output_layouts=Replicate()),
        "gate": ColwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
    ends = {
        "embedding": ColwiseParallel(output_layouts=Replicate()),  # each rank has D / tp columns
        "head": ColwiseParallel(use_local_output=False),  # each rank has V / tp of the logits
    }
    parallelize_module(model, mesh["tp"], ends)


def split_sequence(model, mesh, positions, seq_len):
    """Context parallelism: own queries attend to all ranks' keys and values, which are gathered."""
    group = mesh["cp"].get_group()
    past = positions[:, None] >= torch.arange(seq_len, device=positions.device)  # (T / cp, T)

    def attend(q, k, v):
        shared_by = q.shape[1] // k.shape[1]  # GPU kernels that take a mask want equal heads
        k = GatherSequence.apply(k, group).repeat_interleave(shared_by, dim=1)
        v = GatherSequence.apply(v, group).repeat_interleave(shared_by, dim=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=past)

    for block in model.blocks:
        block.attention.attend = attend


class Stage(nn.Module):
    """Some consecutive blocks; the first stage embeds the tokens, the last returns the loss."""

    def __init__(self, model, number, stages, positions, precision):
        super().__init__()
        size = len(model.blocks) // stages
        self.number, self.config, self.positions = number, model.config, positions
        self.blocks = nn.ModuleList(model.blocks[number * size : (number + 1) * size])
        self.embedding = model.embedding if number == 0 else None
        self.norm, self.head = (model.norm, model.head) if number == stages - 1 else (None, None)
        self.dtype = {"32-true": None, "bf16-mixed": torch.bfloat16}[precision]

    def forward(self, x, targets=None):
        """Shapes: tokens (B, T / cp) or x (B, T / cp, D); returns such an x, or the loss (1,)."""
        config = self.config
        head_dim = config.dim // config.num_heads
        cos, sin = models.rotary_tables(self.positions, head_dim, config.rope_theta)
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype is not None):
            x = self.embedding(x) if self.embedding else x
            for block in self.blocks:
                x = block(x, cos, sin)
            if self.head is None:
                return x
            logits = self.head(self.norm(x)).flatten(0, 1)  # (B T / cp, V)
        loss = F.cross_entropy(logits.float(), targets.flatten(), reduction="sum")
        return torch.stack([local(loss)])


def split_layers(model, run):
    """Pipeline parallelism: return this rank's stages and the schedule that drives them."""
    args, mesh = run.args, run.mesh
    schedule, per_rank = SCHEDULES[args.schedule]
    numbers = range(mesh["pp"].get_local_rank(), per_rank * args.pp, args.pp)
    stages = [
        Stage(model, number, per_rank * args.pp, run.positions, args.precision)
        for number in numbers
    ]
    tokens = torch.empty(args.micro_batch_size, len(run.positions), dtype=torch.long, device="meta")
    between = torch.empty(*tokens.shape, model.config.dim, device="meta", requires_grad=True)

    def piped(number, stage):
        last = torch.empty(1, device="meta", requires_grad=True) if stage.head else between
        return pipelining.PipelineStage(
            stage, number, per_rank * args.pp, run.report.device,
            input_args=between if number else tokens, output_args=last,
            group=mesh["pp"].get_group(),
        )  # fmt: skip

    def mean_loss(loss, _):  # over the tokens of the global batch: each token counts alike
        return loss / run.tokens * run.mean_over

    piped_stages = [piped(*pair) for pair in zip(numbers, stages, strict=True)]
    takes = piped_stages[0] if per_rank == 1 else piped_stages
    return stages, schedule(takes, args.grad_accum_steps, loss_fn=mean_loss, scale_grads=False)


def split_batch(stages, run):
    """Data parallelism that shards: FSDP over the ranks that differ in samples or in tokens."""
    for stage in stages:
        for module in [*stage.blocks, stage]:
            # grad-op gathers weights once per step; full once per micro-batch, and once more.
            full = run.args.data_parallel == "full"
            fully_shard(module, mesh=run.data_mesh, reshard_after_forward=full)


def average_gradients(run):
    """Data parallelism that replicates: sum what backward has left, over the same ranks."""
    group = run.data_mesh.get_group()
    sums = [
        dist.all_reduce(local(parameter.grad), group=group, async_op=True)
        for parameter in run.model.parameters()
    ]
    for handle in sums:
        handle.wait()


def accumulate_gradient(run, micro_batches):
    """Leave the gradient of the global batch's mean loss; return this rank's share of that loss."""
    inputs, targets = (torch.cat(part) for part in zip(*micro_batches, strict=True))  # (m B, T)
    run.tokens = (targets != data.IGNORED).sum().to(run.report.device)
    dist.all_reduce(run.tokens, group=run.mesh["dp"].get_group())
    inputs = inputs[:, run.own_tokens].to(run.report.device)
    targets = targets[:, run.own_tokens].contiguous().to(run.report.device)
    losses = []
    with loss_parallel() if run.args.tp > 1 else contextlib.nullcontext():
        tokens = (inputs,) if run.stages[0].embedding else ()
        ends = {"target": targets, "targets": targets} if run.stages[-1].head else {}

        run.schedule.step(*tokens, losses=losses, return_outputs=False, **ends)

    if run.args.data_parallel == "replicate":
        average_gradients(run)
    # Of the last stage alone, and once for all ranks of tp, which computed the same loss.
    counts = losses and run.mesh["tp"].get_local_rank() == 0
    return sum(losses).detach().squeeze() / run.mean_over if counts else 0.0 * run.tokens


def clip_gradients(run):
    """Scale gradients to a norm of at most --max-grad-norm; return the norm of the whole model."""
    weights = list(run.model.parameters())
    square = sum(local(w.grad).square().sum() / copies_of(w, run.args) for w in weights)
    dist.all_reduce(square)  # over all ranks: what several hold, each counts in part
    norm = square.sqrt()
    for weight in weights:
        local(weight.grad).mul_((run.args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def train(run, steps):
    """Take steps; read losses every --log-every of them, and save when it is due."""
    args, unread = run.args, []
    run.timer.start()
    for run.step in steps:
        run.optimizer.zero_grad()
        loss = accumulate_gradient(run, next(run.batches))
        norm = clip_gradients(run)
        for group in run.optimizer.param_groups:
            group["lr"] = cli.lr_at(run.step, args)
        run.optimizer.step()
        run.sampler.advance(min(args.global_batch_size, len(run.train_set) - run.sampler.position))
        unread.append((run.step, loss, norm))
        last = run.step == args.max_steps
        save_due = run.report.output and cli.due(run.step, args.save_every, last)
        if last or save_due or run.step % args.log_every == 0:
            hybrid_results.read(run, unread)
            unread.clear()
            if save_due:
                hybrid_checkpoint.save(run)
            run.timer.start()


def build(run, config):
    """Cut the model along every axis before any weight exists; then draw this rank's weights."""
    args, device = run.args, run.report.device
    with torch.device("meta"):
        run.model = models.Transformer(config)
    if args.tp > 1:
        split_tensors(run.model, run.mesh)
    if args.cp > 1:
        split_sequence(run.model, run.mesh, run.positions, args.seq_len)
    run.stages, run.schedule = split_layers(run.model, run)
    if args.data_parallel != "replicate":
        split_batch(run.stages, run)
    drop_other_stages(run.model, run.stages)
    run.model.to_empty(device=device)
    draw_weights(run.model, config, args.seed)
    by_mesh = {}  # an optimizer's kernel takes tensors of one mesh at a time
    for weight in run.model.parameters():
        by_mesh.setdefault(getattr(weight, "device_mesh", None), []).append(weight)
    groups = [{"params": weights} for weights in by_mesh.values()]
    run.optimizer = torch.optim.AdamW(groups, args.lr, (0.9, 0.95), weight_decay=0.1)


def parse_args():
    parser = cli.ArgumentParser(__doc__, resumes=True)
    # The others tie the embedding to the output layer, which stand on different stages.
    untied = [name for name, config in models.PRESETS.items() if not config.tied_embeddings]
    cli.add_job_flags(parser, untied)  # --preset, --micro-batch-size, --lr, ...
    add, positive = parser.add_argument, cli.positive_int
    add("--dp", type=positive, help="ranks of data parallelism (what the other axes leave)")
    add("--tp", type=positive, default=1, help="ranks of tensor parallelism (1)")
    add("--pp", type=positive, default=1, help="ranks of pipeline parallelism (1)")
    add("--cp", type=positive, default=1, help="ranks of context parallelism (1)")
    add("--data-parallel", choices=("replicate", "grad-op", "full"), default="replicate",
        help="all-reduce gradients, or FSDP over dp and cp (replicate)")  # fmt: skip
    add("--schedule", choices=SCHEDULES, default="1f1b", help="of the pipeline (1f1b)")
    add("--ranks-per-node", type=positive, help="in table and picture (as started)")
    add("--max-grad-norm", type=cli.positive_float, default=1.0, help="clip longer gradients (1)")
    add("--log-every", type=positive, default=10, help="most steps between two looks (10)")
    add("--save-every", type=cli.whole_number, default=20,
        help="steps, with --output-dir; 0 for never (20)")  # fmt: skip
    add("--num-workers", type=cli.whole_number, default=0, help="processes that load data (0)")
    parity = "gradients to compare with one process (1; 0 for presets other than tiny)"
    add("--parity-steps", type=cli.whole_number, help=parity)
    args = parser.parse_args()
    if args.parity_steps is None:
        args.parity_steps = int(args.preset == "tiny")
    return args


def set_up(args, report):
    """Return the run: mesh, stages, schedule, optimizer and data, ready for the first step."""
    world, device = report.world, report.device
    run = SimpleNamespace(args=args, report=report, step=0, losses=[])
    config = models.preset(args.preset, args.seq_len)
    args.ranks_per_node = args.ranks_per_node or world.local_world_size
    resolve_axes(args, world.world_size, config, SCHEDULES[args.schedule][1])
    identity = data.settle_batch_sizes(args, args.dp)
    hybrid_checks.refuse(args)
    # The last axis has neighbouring ranks: tp sends most, so it gets the fastest links.
    run.mesh = init_device_mesh(
        device.type, (args.pp, args.dp, args.cp, args.tp), mesh_dim_names=("pp", "dp", "cp", "tp")
    )
    run.data_mesh = run.mesh["dp", "cp"]._flatten("dp_cp")
    # FSDP takes the mean over its ranks where a sum is meant, hence the factor.
    run.mean_over = 1 if args.data_parallel == "replicate" else run.data_mesh.size()
    cp_rank, part = run.mesh["cp"].get_local_rank(), args.seq_len // args.cp
    run.own_tokens = slice(cp_rank * part, (cp_rank + 1) * part)  # of each sequence
    run.positions = torch.arange(args.seq_len, device=device)[run.own_tokens]
    run.train_set, _, run.checksum = data.job_text(args, args.dp)
    dp_rank = run.mesh["dp"].get_local_rank()
    run.sampler = data.ShardedSampler(len(run.train_set), dp_rank, args.dp, args.seed)
    report.start(f"{args.preset}: {config.num_parameters():,} weights", identity)
    say_layout(report, args)
    run.probe = StepProbe(device)
    build(run, config)
    run.probe.attach(run.model, run.optimizer)
    run.files = hybrid_checkpoint.file_group()
    hybrid_checks.check_gradient(run, accumulate_gradient)
    if args.resume:
        hybrid_checkpoint.resume(run)
    run.batches = data.job_batches(run.train_set, run.sampler, args, args.num_workers)
    run.flops_per_token = measure.flops_per_token(config, args.seq_len)
    run.timer = measure.StepTimer(device, warmup=max(3, args.log_every))
    return run


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("05-advanced/hybrid_parallelism.py", args, world, device)
        run = set_up(args, report)
        if run.step >= args.max_steps:
            report.say(f"{report.output} has all {args.max_steps} steps: nothing to do")
            return 0
        if report.failed:  # now, and not after days
            return report.finish("")
        run.log = measure.StepLog(report.output if world.is_rank0 else None, run.step + 1)

        steps = report.progress(range(run.step + 1, args.max_steps + 1), "training")
        train(run, run.probe.watch(steps))

        hybrid_checks.check_replicas(run)
        hybrid_results.leave(run)
        return report.finish(f"loss {run.losses[-1]:.4f} after {run.step} steps")


if __name__ == "__main__":
    cli.run(main)
