"""Train one transformer with data, tensor, pipeline and context parallelism at once: a template.

    CPU   torchrun --standalone --nproc-per-node=8 05-advanced/hybrid_parallelism.py --tp 2 --pp 2
    GPU   torchrun --standalone --nproc-per-node=8 05-advanced/hybrid_parallelism.py --tp 2 --pp 2 \
              --preset llama3-8b --seq-len 4096 --micro-batch-size 1 --precision bf16-mixed \
              --data-parallel grad-op --activation-checkpointing full

It does the same job as ddp_training.py of module 01, and stops, saves and resumes as that does.
Look for: the same losses as there, whatever --dp, --tp, --pp and --cp are, and the bytes that each
axis sends (hybrid_sends.py in advanced_parts), which say what link it needs. --init-from
reads a Hugging Face folder, and --export-to writes one. --preset tiny-moe has experts; with --ep N
each of N data-parallel ranks holds its own share of them.

To copy: take this file and legacy_common/ without lab/; delete the lines from "proofs" to
"end of proofs". Delete what you do not need (`split_tensors`, `split_sequence`, `split_experts`,
`recompute`, `float8`, `evaluate`), each with what uses it.

Sources: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM (SC 2021); Liang et al., TorchTitan (2024); Grattafiori et al., The Llama 3 Herd of
Models (2024), section 3.3.2, for the all-gather of keys and values.
"""

import contextlib
import functools
import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention.bias import causal_lower_right

from legacy_common import checkpoint as checkpoints
from legacy_common import cli, data, float8, hf, job, layout, measure, models, recompute, runtime
from legacy_common.models import local
from legacy_common.report import Report

# In the order of ranks: the last one's are neighbours. `whole` has one rank: what replicas, which
# keep their weights whole, shard them over.
AXES = ("pp", "dp", "cp", "whole", "tp")
SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}
V_SHAPED = ("zbv", "dualpipev")  # down the ranks and up again: the first rank has both ends
COMPUTED_IN = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}


@dataclass
class Run:
    """What the functions of this script share."""

    job: job.Job  # flags, data, and the place in them
    mesh: DeviceMesh  # of AXES
    data_mesh: DeviceMesh  # dp and cp: the ranks that differ in samples or in tokens
    model: nn.Module  # on meta, until `build` has cut it
    positions: torch.Tensor  # (T / cp,): this rank's tokens of each sequence
    stages: list[nn.Module] = field(default_factory=list)  # this rank's
    expert_meshes: tuple = ()  # ep, and the ranks that have the same experts
    schedule: object = None
    optimizer: torch.optim.Optimizer | None = None
    tokens: torch.Tensor | None = None  # of the step's global batch


def split_tensors(model, mesh):
    """Tensor parallelism: cut each block's matrices, and the vocabulary, over the ranks of `tp`.

    And between matrices the tokens, as sequence parallelism does: norms and residuals take a part
    of them, which is gathered before a matrix and reduce-scattered after the next.
    """
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    plan = dict.fromkeys(("attention.wq", "attention.wk", "attention.wv", "gate", "up"), columns)
    plan |= dict.fromkeys(("attention.wo", "down"), rows)
    for block in model.blocks:
        split_norms(block, ("attention_norm", "ffn_norm"), mesh)
        parallelize_module(block, mesh["tp"], plan)
    split_norms(model, ("norm",), mesh)
    ends = {  # each rank has V / tp words, and of the logits V / tp
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(use_local_output=False),
    }
    parallelize_module(model, mesh["tp"], ends)


def split_norms(module, names, mesh):
    """Have norms take T / tp tokens each, and gather what they return once, for all its readers."""
    gathered = PrepareModuleOutput(
        output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False
    )
    for style in (SequenceParallel(), gathered):
        parallelize_module(module, mesh["tp"], dict.fromkeys(names, style))


def own_tokens(rank, ranks, seq_len):
    """Return a rank's tokens of a sequence: a part from the front, and as far from its end another.

    Late tokens look back at more than early ones: so all ranks have equal work. Shape: (T / ranks,)
    """
    if ranks == 1:
        return torch.arange(seq_len)
    parts = torch.arange(seq_len).chunk(2 * ranks)
    return torch.cat((parts[rank], parts[-1 - rank]))


def start_gather(part, mesh):
    """Begin to all-gather the parts of a sequence; who reads the result waits for it.

    In backward each rank gets the sum for its own part: each rank's queries give a part of it.
    Shapes: (T / cp, ...) -> (T, ...), in the order of own_tokens.
    """
    cut = DTensor.from_local(part, mesh["cp"], [Shard(0)])
    whole = cut.redistribute(placements=[Replicate()], async_op=True)
    return whole.to_local(grad_placements=[Partial()])


def split_sequence(model, mesh, positions):
    """Context parallelism: own queries attend to all ranks' keys and values, which are gathered."""
    # Aligned at their ends, so that a GPU's flash kernel needs no table of who sees whom.
    pasts = [causal_lower_right(len(part), int(part[-1]) + 1) for part in positions.chunk(2)]

    def share(k, v):
        return start_gather(torch.stack((k, v)).movedim(-2, 0), mesh), None

    def attend(q, gathered, _, mask=None):
        parts = gathered.chunk(2 * mesh["cp"].size())
        # In the tokens' own order: the front parts, then the others.
        k, v = torch.cat(parts[::2] + parts[::-2]).movedim(0, -2)
        if mask is not None:  # of --document-attention
            return models.causal_attention(q, k, v, mask)
        out = []
        for part, past in zip(q.chunk(2, dim=2), pasts, strict=True):
            seen = k[:, :, : past.seq_len_kv], v[:, :, : past.seq_len_kv]
            out.append(F.scaled_dot_product_attention(part, *seen, past, enable_gqa=True))
        return torch.cat(out, dim=2)

    for block in model.blocks:
        block.attention.share, block.attention.attend = share, attend


def split_experts(run):
    """Expert parallelism: each rank of `ep` has E / ep experts, to which all ranks' tokens travel.

    What dp has besides (and cp) shares these experts, in FSDP's units of their own.
    """
    args = run.job.args
    halves = run.mesh["dp"]._unflatten(0, (args.dp // args.ep, args.ep), ("rest", "ep"))
    rest = DeviceMesh._concatenate([halves["rest"], run.mesh["cp"]])._flatten("rest_cp")
    run.expert_meshes = halves["ep"], rest
    exchange = functools.partial(send_to_experts, group=halves["ep"].get_group())
    for moe in [block.moe for stage in run.stages for block in stage.blocks]:
        if args.ep > 1:
            moe.exchange = exchange
        for name, weight in list(moe.experts.named_parameters()):
            own = distribute_tensor(weight, halves["ep"], [Shard(0)], src_data_rank=None)
            setattr(moe.experts, name, nn.Parameter(own))
        # By rows of each matrix: a rank may have fewer experts than there are ranks to share them.
        shard(moe.experts, rest, run, shard_placement_fn=lambda _: Shard(1))


def send_to_experts(rows, counts, experts, group):
    """Have the ranks of a group compute each other's rows; return what they computed of own ones.

    Shapes: rows (R, D), sorted by expert, of which counts (E,) says the number; (R, D) out.
    """
    ranks = dist.get_world_size(group)
    arriving = torch.empty_like(counts)  # from each rank, for each expert of this one
    dist.all_to_all_single(arriving, counts, group=group)
    arriving = arriving.view(ranks, -1)
    # The host waits for the device: it has to know how much memory arrives.
    sends, receives = torch.stack((counts.view(ranks, -1).sum(1), arriving.sum(1))).tolist()

    arrived = functional.all_to_all_single_autograd(rows, receives, sends, group)
    experts_of = torch.arange(arriving.numel(), device=rows.device) % arriving.shape[1]
    by_expert = experts_of.repeat_interleave(arriving.flatten()).argsort(stable=True)
    computed = experts(arrived[by_expert], arriving.sum(0))[by_expert.argsort()]
    return functional.all_to_all_single_autograd(computed, sends, receives, group)


class Stage(nn.Module):
    """Consecutive blocks, if any; the first stage embeds the tokens, the last returns the loss."""

    def __init__(self, model, number, stages, positions):
        super().__init__()
        # Where stages do not divide the blocks, the embedding and the head are counted as two more.
        early = len(model.blocks) % stages > 0
        size = (len(model.blocks) + 2 * early) // stages
        first = number * size - early
        self.number, self.config, self.positions = number, model.config, positions
        self.blocks = nn.ModuleList(model.blocks[max(0, first) : first + size])
        self.embedding = model.embedding if number == 0 else None
        self.norm, self.head = (model.norm, model.head) if number == stages - 1 else (None, None)

    def forward(self, x, targets=None, documents=None):
        """Return the loss (1,), or x for the next stage: (B, T / cp / tp, D), as `x` itself.

        Shapes: the first stage's `x` are tokens, (B, T / cp), as targets are; `documents` (B, T)
        numbers those of whole sequences, under --document-attention.
        """
        config = self.config
        head_dim = config.dim // config.num_heads
        tables = models.rotary_tables(self.positions, head_dim, config.rope_theta)
        if documents is not None:
            tables += (models.document_mask(documents, self.positions),)
        if self.embedding:
            # Under tp its sum is still on its way, and a compiled block sends no gradient into
            # such a tensor, without a word (torch 2.14): a copy waits for it.
            x = self.embedding(x).clone()
        for block in self.blocks:
            x = block(x, *tables)
        if self.head is None:
            return x
        logits = self.head(self.norm(x)).flatten(0, 1)  # (B T / cp, V)
        loss = F.cross_entropy(logits.float(), targets.flatten(), reduction="sum")
        return torch.stack([local(loss)])


class OnArrival(dict):
    """What a stage receives, by micro-batch: a buffer has memory from its receive to its use.

    PyTorch's have it all the time, one for each micro-batch of the step.
    """

    def __setitem__(self, micro_batch, infos):
        super().__setitem__(micro_batch, infos)
        self.place(micro_batch, "meta")

    def place(self, micro_batch, device):
        for info in self.get(micro_batch, ()):
            if getattr(info, "buffer", None) is not None:
                kept = info.buffer.requires_grad
                info.buffer = torch.empty_like(info.buffer, device=device, requires_grad=kept)


class PipelineStage(pipelining.PipelineStage):
    """PyTorch's sums gradients over ranks after the last backward; this one, while it goes on.

    With --data-parallel full in each micro-batch, which leaves a rank its part of the gradient.
    """

    def __init__(self, *stage, **shapes):
        super().__init__(*stage, **shapes)
        self.args_recv_info, self.grad_recv_info = OnArrival(), OnArrival()

    def get_fwd_recv_ops(self, micro_batch):
        self.args_recv_info.place(micro_batch, self.device)
        return super().get_fwd_recv_ops(micro_batch)

    def get_bwd_recv_ops(self, micro_batch):
        self.grad_recv_info.place(micro_batch, self.device)
        return super().get_bwd_recv_ops(micro_batch)

    def _retrieve_recv_activations(self, micro_batch):
        arrived = super()._retrieve_recv_activations(micro_batch)
        self.args_recv_info.place(micro_batch, "meta")
        return arrived

    def _retrieve_recv_grads(self, micro_batch):
        arrived = super()._retrieve_recv_grads(micro_batch)
        self.grad_recv_info.place(micro_batch, "meta")
        return arrived

    def backward_maybe_with_nosync(self, kind, ends, last_backward=False):
        if kind != "full":  # of a zero-bubble schedule: FSDP's hooks see no part of a backward
            return super().backward_maybe_with_nosync(kind, ends, last_backward)
        leave = last_backward or self.submod.frees_weights
        self.submod.set_requires_gradient_sync(leave)
        self.submod.set_reshard_after_backward(leave)
        self.submod.set_is_last_backward(last_backward)
        return stage_backward(**ends), None

    # Between two stages of one rank, which a V has; PyTorch's fail where `eval` has no backward.
    def get_local_bwd_output(self, micro_batch):
        return super().get_local_bwd_output(micro_batch) if self.has_backward else ()

    def set_local_bwd_input(self, gradients, micro_batch):
        if self.has_backward:
            super().set_local_bwd_input(gradients, micro_batch)

    def _get_init_p2p_neighbors_ops(self):  # torch 2.11's also sends to its own rank: gloo cannot
        ops = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]


def split_layers(run):
    """Pipeline parallelism: make this rank's stages, and the schedule that drives them."""
    args, device = run.job.args, run.job.device
    pp = run.mesh["pp"]
    total = args.virtual_stages * args.pp
    tokens = torch.empty(args.micro_batch_size, len(run.positions), dtype=torch.long, device="meta")
    # Sent in the type that blocks compute in; of the tokens, those between tp's matrices.
    hidden = (args.micro_batch_size, len(run.positions) // args.tp, run.model.config.dim)
    kind = COMPUTED_IN[args.precision]
    between = torch.empty(hidden, dtype=kind, device="meta", requires_grad=True)
    loss = torch.empty(1, device="meta", requires_grad=True)
    rank, piped = pp.get_local_rank(), []
    down_and_up = (rank, total - 1 - rank)
    for number in down_and_up if args.schedule in V_SHAPED else range(rank, total, args.pp):
        stage = Stage(run.model, number, total, run.positions)
        run.stages.append(stage)
        shapes = {"input_args": between if number else tokens}
        shapes["output_args"] = between if stage.head is None else loss
        piped.append(PipelineStage(stage, number, total, device, group=pp.get_group(), **shapes))

    def mean_loss(loss, _):  # over the tokens of the global batch: each token counts alike
        return loss / run.tokens

    takes = piped[0] if args.virtual_stages == 1 else piped
    schedule = SCHEDULES[args.schedule]
    run.schedule = schedule(takes, args.grad_accum_steps, loss_fn=mean_loss, scale_grads=False)


def split_batch(run):
    """Data parallelism over the ranks that differ in samples or in tokens, in FSDP's units."""
    for stage in run.stages:
        # grad-op gathers weights once per step; full for each forward and each backward.
        stage.frees_weights = run.job.args.data_parallel == "full"
        for unit in filter(None, (*stage.blocks, stage.head, stage)):
            shard(unit, run.data_mesh, run)


def shard(unit, mesh, run, **options):
    """Make a module an FSDP unit, whose gradients are summed over a mesh.

    `replicate` leaves weights whole, and all-reduces gradients; the others shard.
    """
    args, compute = run.job.args, COMPUTED_IN[run.job.args.precision]
    # Gathered and computed with in `compute`, added up over ranks in float32. The rotary tables
    # stay float32: inputs are not cast.
    policy = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    if args.data_parallel == "replicate":
        mesh = DeviceMesh._concatenate([mesh, run.mesh["whole"]])
    frees = args.data_parallel == "full"
    fully_shard(unit, mesh=mesh, reshard_after_forward=frees, mp_policy=policy, **options)
    # Gradients are summed, as a plain sum: the loss is divided by all ranks' tokens. Those of an
    # expert are of all ep ranks' tokens already, which came to it.
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)


def summed_loss(run, drive, inputs, targets):
    """Drive a schedule's `step` or `eval`; return this rank's part of the summed loss.

    Shapes: micro-batches joined, (m B, T) each.
    """
    end = run.model.config.document_end
    documents = {} if end is None else {"documents": models.document_of_each(inputs, end)}
    inputs, targets = (x[:, run.positions].contiguous() for x in (inputs, targets))
    tokens = (inputs,) if run.stages[0].embedding else ()
    ends = {"target": targets, "targets": targets} if run.stages[-1].head else {}
    with loss_parallel() if run.mesh["tp"].size() > 1 else contextlib.nullcontext():
        sums = drive(*tokens, **ends, **documents)  # of the micro-batches, on the last stage
    # Once for all ranks of tp, which computed the same loss.
    counts = sums is not None and run.mesh["tp"].get_local_rank() == 0
    return sums.detach().sum() if counts else torch.zeros((), device=run.job.device)


def accumulate_gradient(run, micro_batches):
    """Leave the gradient of the global batch's mean loss; return this rank's part of its sum."""
    # Each as it is, from pinned memory without a wait; joined on the device.
    moved = [[x.to(run.job.device, non_blocking=True) for x in batch] for batch in micro_batches]
    inputs, targets = (torch.cat(side) for side in zip(*moved, strict=True))
    run.tokens = (targets != data.IGNORED).sum()
    dist.all_reduce(run.tokens, group=run.mesh["dp"].get_group())

    return summed_loss(run, run.schedule.step, inputs, targets)


def clip_gradients(run):
    """Scale gradients to a norm of at most --max-grad-norm; return the norm of the whole model."""
    args, weights = run.job.args, list(run.model.parameters())
    square = sum(local(w.grad).square().sum() / copies_of(w, args) for w in weights)
    dist.all_reduce(square)  # over all ranks: what several hold, each counts in part
    norm = square.sqrt()
    for weight in weights:
        local(weight.grad).mul_((args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def copies_of(weight, args):
    """Return how many ranks hold the same part of a weight as this one."""
    sizes = getattr(weight, "device_mesh", None)
    cuts = () if sizes is None else zip(sizes.shape, weight.placements, strict=True)
    parts = math.prod(ranks for ranks, placement in cuts if not placement.is_replicate())
    return args.dp * args.cp * args.tp // parts


def train_step(run, step):
    """Take one step, and leave its results with the job."""
    run.optimizer.zero_grad()
    loss_sum = accumulate_gradient(run, step.micro_batches)
    norm = clip_gradients(run)
    for group in run.optimizer.param_groups:
        group["lr"] = step.lr
    run.optimizer.step()
    step.record(loss_sum, run.tokens, norm)


def train(run):
    """Take the steps that are left. The job evaluates, saves and stops between them."""
    steps = run.job.steps(evaluate=evaluate(run))
    if part := proofs():
        steps = part.proven_steps(run, steps, accumulate_gradient)
    for step in steps:
        train_step(run, step)


def evaluate(run):
    """Return what measures the test loss: forwards of the stages, as many rows as in a step."""
    loss_of = functools.partial(summed_loss, run, run.schedule.eval)
    rows = run.job.args.micro_batch_size * run.job.args.grad_accum_steps
    return functools.partial(run.job.evaluate, run.model, loss_of, rows)


def export(run):
    """Write the weights to --export-to, in files that transformers loads."""
    args, group = run.job.args, run.job.store.group
    hf.export(run.model, run.model.config, args.export_to, group, like=args.init_from)
    if part := proofs():
        part.check_files(run, args.export_to, "exported ")
    run.job.report.say(f"exported to {args.export_to}")


def proofs():
    """Return what proves this script, or None."""
    # proofs: a copy deletes these lines
    from advanced_parts import hybrid_parallelism as part

    return part
    # end of proofs


def build(run):
    """Cut the model along every axis, and only then give this rank memory for its part."""
    args = run.job.args
    if args.float8:  # matrix products read float8; weights stay as they are
        float8.convert(run.model.blocks, args.float8)
    if args.tp > 1:
        split_tensors(run.model, run.mesh)
    if args.cp > 1:
        split_sequence(run.model, run.mesh, run.positions)
    recompute.checkpoint_activations(run.model.blocks, args.activation_checkpointing)
    if args.compile:
        for block in run.model.blocks:
            block.compile()  # one block is translated, and serves for all
    split_layers(run)
    if run.model.config.num_experts:
        split_experts(run)
    split_batch(run)
    drop_other_stages(run.model, run.stages)
    run.model.to_empty(device=run.job.device)
    by_mesh = {}  # an optimizer's kernel takes tensors of one mesh at a time
    for weight in run.model.parameters():
        by_mesh.setdefault(getattr(weight, "device_mesh", None), []).append(weight)
    groups = [{"params": weights} for weights in by_mesh.values()]
    run.optimizer = torch.optim.AdamW(groups, args.lr, (0.9, 0.95), weight_decay=0.1, fused=True)


def drop_other_stages(model, stages):
    """Leave only this rank's blocks in the model, under the names that they have in the whole."""
    own = {module for stage in stages for module in stage.modules()} | {model.blocks}
    for parent in (model, model.blocks):
        for name, child in parent.named_children():
            if child not in own:
                setattr(parent, name, nn.Identity())


def parse_args():
    parser = cli.ArgumentParser(__doc__, resumes=True)
    # The others tie the embedding to the output layer, which stand on different stages.
    untied = [name for name, config in models.PRESETS.items() if not config.tied_embeddings]
    untied += models.MIXTURES
    # --init-from, --export-to, --preset, --micro-batch-size, --lr, --save-every, ...
    job.add_flags(parser, untied, folders=True)
    add, positive = parser.add_argument, cli.positive_int
    add("--dp", type=positive, help="ranks of data parallelism (what the other axes leave)")
    add("--tp", type=positive, default=1, help="ranks of tensor parallelism (1)")
    add("--pp", type=positive, default=1, help="ranks of pipeline parallelism (1)")
    add("--cp", type=positive, default=1, help="ranks of context parallelism (1)")
    add("--ep", type=positive, default=1, help="of --dp, ranks with different experts (1)")
    add("--data-parallel", choices=("replicate", "grad-op", "full"), default="replicate",
        help="all-reduce gradients, or FSDP over dp and cp (replicate)")  # fmt: skip
    add("--schedule", choices=SCHEDULES, default="1f1b", help="of the pipeline (1f1b)")
    add("--virtual-stages", type=functools.partial(cli.whole_number, low=2), metavar="V",
        help="stages per rank of interleaved and zero-bubble (2)")  # fmt: skip
    add("--activation-checkpointing", choices=("none", "full", "selective"), default="none",
        help="what backward computes again of a block (none)")  # fmt: skip
    add("--compile", action="store_true", help="translate each block by torch.compile")
    float8.add_flag(parser)
    add("--ranks-per-node", type=positive, help="in the table of axes (as started)")
    return job.parse(parser, parity_steps=2)  # the second starts from what the first has left


def set_up(args, report):
    """Return the run: mesh, stages, schedule, optimizer and data, ready for the first step."""
    world, device = report.world, report.device
    config = hf.settle_shape(args)
    layout.settle(args, world, config)
    # The last axis has neighbouring ranks: tp sends most, so it gets the fastest links.
    sizes = (args.pp, args.dp, args.cp, 1, args.tp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    the_job, identity = job.on_text(args, report, mesh["dp"].get_local_rank(), args.dp)
    config = the_job.fitted(config)
    layout.refuse(args, config)
    float8.refuse(args, config, device, args.tp, args.cp)
    the_job.flops_per_token = measure.flops_per_token(config, args.seq_len)
    size = f"{args.init_from or args.preset}: {config.num_parameters():,} weights"
    precision = args.precision
    if args.float8:
        precision += f" and float8 ({args.float8})"
    report.start(f"{size}, {precision}", identity)
    with torch.device("meta"):
        model, whole = models.Transformer(config), models.Transformer(config).state_dict()
    own = own_tokens(mesh["cp"].get_local_rank(), args.cp, args.seq_len).to(device)
    run = Run(the_job, mesh, mesh["dp", "cp"]._flatten("dp_cp"), model, own)
    build(run)
    the_job.store = checkpoints.Sharded(run.model, run.optimizer, whole, args.timeout)
    hf.first_weights(the_job, run.model, config)
    return run


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("05-advanced/hybrid_parallelism.py", args, world, device)
        run = set_up(args, report)
        if run.job.done and hf.exported(args.export_to):
            report.say(hf.nothing_to_do(run.job, args.export_to))
            return 0
        train(run)
        if args.export_to and run.job.done and not report.failed:
            export(run)
        return report.finish(run.job.summary)


if __name__ == "__main__":
    cli.run(main)
