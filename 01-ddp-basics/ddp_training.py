"""Train a transformer on text with DDP as a real job does: a template to copy and cut down.

    CPU   torchrun --standalone --nproc-per-node=2 01-ddp-basics/ddp_training.py
    GPU   torchrun --standalone --nproc-per-node=gpu 01-ddp-basics/ddp_training.py --preset 124m

With --output-dir and --resume it can be killed at any moment and started again. Look for: the same
losses on any number of ranks while --global-batch-size stays the same, and the checks at the end.

To copy: take this file and legacy_common/ without lab/; delete the lines from "proofs" to "end of
proofs". Delete what you do not need (`evaluate`, `compile`, `gradient_compression`, `scaler`,
`whole_lines`), each with what uses it.

Sources: Li et al., PyTorch Distributed (VLDB 2020); Goyal et al., ImageNet in 1 Hour (2017);
Malladi et al., On the SDEs and Scaling Rules for Adaptive Gradient Algorithms (NeurIPS 2022).
"""

import contextlib
import functools
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from legacy_common import checkpoint, cli, data, job, measure, models, runtime
from legacy_common.report import Report

AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
LR_SCALING = {"none": lambda ratio: 1.0, "linear": lambda ratio: ratio, "sqrt": math.sqrt}


@dataclass
class Run:
    """What the functions of this script share."""

    job: job.Job  # flags, data, and the place in them
    ddp_model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None


def summed_loss(model, inputs, targets, precision):
    """Return the cross-entropy, summed over tokens. Shapes: inputs and targets (B, T)."""
    dtype = AUTOCAST[precision]
    with torch.autocast(inputs.device.type, dtype, enabled=dtype is not None):
        logits = model(inputs)  # (B, T, V)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def count_tokens(micro_batches, device):
    """Start to add up all ranks' tokens; return their number, and the handle to wait for first."""
    own = sum(int((targets != data.IGNORED).sum()) for _, targets in micro_batches)
    tokens = torch.full((), own, device=device)  # not .to(device), which would wait for the device
    return tokens, dist.all_reduce(tokens, async_op=True)  # 8 bytes, while forward computes


def accumulate_gradient(ddp_model, micro_batches, precision, scaler=None):
    """Leave the mean gradient over all tokens of the global batch in the model, on every rank.

    Return this rank's sum of losses, and all ranks' number of tokens, both still on the device.
    Shapes: a micro-batch is inputs and targets, (B, T) each.
    """
    device = next(ddp_model.parameters()).device
    tokens, counting = count_tokens(micro_batches, device)
    loss_sum = torch.zeros((), device=device)
    for number, (inputs, targets) in enumerate(micro_batches, 1):
        inputs = inputs.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        # Gradients add up on each rank; the backward of the last micro-batch all-reduces the sum.
        last = number == len(micro_batches)
        with contextlib.nullcontext() if last else ddp_model.no_sync():
            loss = summed_loss(ddp_model, inputs, targets, precision)
            counting.wait()
            # Divided by the tokens of all ranks: each token counts alike, whichever micro-batch it
            # is in. DDP takes the mean over ranks where a sum is meant, hence the factor.
            mean_loss = loss * dist.get_world_size() / tokens
            if scaler:  # small gradients would round to 0 in float16: enlarge them for backward
                mean_loss = scaler.scale(mean_loss)

            mean_loss.backward()
        loss_sum += loss.detach()
    return loss_sum, tokens


def train_step(run, step):
    """Take one step, and leave its results with the job: nothing here waits for the device."""
    args = run.job.args
    scaler = run.scaler
    run.optimizer.zero_grad()
    loss_sum, tokens = accumulate_gradient(
        run.ddp_model, step.micro_batches, args.precision, scaler
    )
    lr = scaled_lr(step.lr, args)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    if scaler:
        scaler.unscale_(run.optimizer)  # clip the gradient itself, not the enlarged one
    norm = torch.nn.utils.clip_grad_norm_(run.ddp_model.parameters(), args.max_grad_norm)
    if scaler:
        scaler.step(run.optimizer)  # leaves the step out where float16 overflowed
        scaler.update()  # and enlarges less from then on
    else:
        run.optimizer.step()
    step.record(loss_sum, tokens, norm, lr)


def scaled_lr(lr, args):
    """Return the schedule's learning rate, scaled with the global batch."""
    larger = args.global_batch_size / args.base_batch_size
    return LR_SCALING[args.lr_scaling](larger) * lr


def train(run):
    """Take the steps that are left. The job evaluates, saves and stops between them."""
    steps = run.job.steps(evaluate=evaluate(run))
    # proofs: a copy deletes these lines
    from ddp_parts import ddp_training as part

    steps = part.proven_steps(run, steps, accumulate_gradient, summed_loss)
    # end of proofs
    for step in steps:
        train_step(run, step)
        if job.due(step.number, run.job.args.check_replicas_every, last=False):
            compare_replicas(run.ddp_model, step.number)


def compare_replicas(model, step):
    """Stop, on all ranks, when a rank's weights are not bitwise those of the others; name it.

    DDP gives all ranks the same gradient, so only a device that computes or keeps wrong numbers can
    make them differ. The loss need not show it. One flipped bit always changes a sum of integers,
    also one that overflows.
    """
    weights = [weight.detach().view(torch.int32) for weight in model.parameters()]
    own = sum(weight.sum(dtype=torch.int32) for weight in weights)
    found = runtime.gather((int(own), cli.node()))
    sums = [number for number, _ in found]
    usual = max(set(sums), key=sums.count)
    odd = [f"{rank}{node}" for rank, (number, node) in enumerate(found) if number != usual]
    if not odd:
        return
    if 2 * sums.count(usual) <= len(sums):  # as with two ranks: no majority to believe
        odd = [f"{rank}{node}" for rank, (_, node) in enumerate(found)]
        said = f"ranks {', '.join(odd)} hold different weights, and no majority agrees"
    else:
        said = f"rank {', '.join(odd)} of {len(sums)} holds other weights than the rest"
    raise FloatingPointError(f"stopped: after step {step} {said}: take that node out, and resume")


def evaluate(run):
    """Return what measures the test loss."""
    # The plain model: DDP's forward may communicate, and need not here.
    model, precision = run.ddp_model.module, run.job.args.precision
    loss_of = functools.partial(summed_loss, model, precision=precision)
    return functools.partial(run.job.evaluate, model, loss_of)


class WholeLines(data.Sequences):
    """Sequences that end where a line of the text ends: they hold different numbers of tokens.

    Targets of IGNORED fill them up. A line longer than a sequence is cut.
    """

    def cut(self, text):
        content = text.numpy().tobytes()
        last = len(text) - 1
        bounds = [0]
        while bounds[-1] < last:
            start = bounds[-1]
            line_end = content.rfind(b"\n", start, start + self.seq_len) + 1
            bounds.append(min(line_end or start + self.seq_len, last))
        return torch.tensor(bounds)


def parse_args():
    parser = cli.ArgumentParser(__doc__, resumes=True)
    job.add_flags(parser, models.PRESETS)  # --preset, --micro-batch-size, --lr, --save-every, ...
    add = parser.add_argument
    add("--whole-lines", action="store_true", help="end sequences at line ends, and fill them up")
    add("--lr-scaling", choices=LR_SCALING, default="none", help="with the global batch (none)")
    add("--base-batch-size", type=cli.positive_int, default=32,
        help="for which --lr is meant (32)")  # fmt: skip
    add("--gradient-compression", choices=("none", "bf16"), default="none",
        help="all-reduce gradients in 2 bytes instead of 4 (none)")  # fmt: skip
    add("--check-replicas-every", type=cli.whole_number, default=0, metavar="STEPS",
        help="compare all ranks' weights; best a divisor of --save-every (0: never)")  # fmt: skip
    add("--compile", action="store_true", help="translate the model by torch.compile")
    return job.parse(parser)


def set_up(args, report):
    """Return the run: model, optimizer, data and its place in it, ready for the first step."""
    world, device = report.world, report.device
    runtime.seed_everything(args.seed)
    config = models.preset(args.preset, args.seq_len)
    kind = data.Sequences
    if args.whole_lines:
        kind = WholeLines
    the_job, identity = job.on_text(args, report, world.rank, world.world_size, kind)
    config = the_job.fitted(config)
    the_job.flops_per_token = measure.flops_per_token(config, args.seq_len)
    size = f"{args.preset}: {config.num_parameters():,} weights, {args.precision}"
    sequences = f"{len(the_job.train_set):,} sequences of text to train on"
    report.start(f"{size}; {sequences}, {len(the_job.test_set):,} to test on", identity)
    model = models.Transformer(config).to(device)
    torch.manual_seed(args.seed + world.rank)  # from here on ranks draw apart, as for dropout
    options = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}  # one kernel for all
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, **options)
    scaler = torch.amp.GradScaler(device.type) if args.precision == "16-mixed" else None
    the_job.store = checkpoint.Replicated(model, optimizer=optimizer)
    if scaler:
        the_job.store.parts["scaler"] = scaler
    the_job.resume()
    ddp_model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
    if args.gradient_compression == "bf16":
        ddp_model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    if args.compile:
        ddp_model = torch.compile(ddp_model)
    return Run(the_job, ddp_model, optimizer, scaler)


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("01-ddp-basics/ddp_training.py", args, world, device)
        run = set_up(args, report)
        if run.job.done:
            report.say(f"{report.output} has all {args.max_steps} steps: nothing to do")
            return 0
        train(run)
        return report.finish(run.job.summary)


if __name__ == "__main__":
    cli.run(main)
