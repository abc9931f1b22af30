"""Train a transformer on text with DDP as a real job does: a template to copy and cut down.

    CPU   torchrun --standalone --nproc-per-node=2 01-ddp-basics/ddp_training.py
    GPU   torchrun --standalone --nproc-per-node=gpu 01-ddp-basics/ddp_training.py --preset 124m

With --output-dir and --resume it can be killed at any moment and started again. Look for: the same
losses on any number of ranks while --global-batch-size stays the same, and the checks at the end.

To copy: delete what you do not need (`evaluate`, `compile`, `gradient_compression`, `scaler`,
`catch_preemption`, `log`, `probe`, `replica_checkpoint`, `check_gradient`, `check_trained_tokens`,
`same_weights`, `stop_unless_finite`), each with what uses it. A test deletes each and all, and
runs the rest.

Sources: Li et al., PyTorch Distributed (VLDB 2020); Goyal et al., ImageNet in 1 Hour (2017);
Malladi et al., On the SDEs and Scaling Rules for Adaptive Gradient Algorithms (NeurIPS 2022).
"""

import contextlib
import math
import signal
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

import replica_checkpoint
from dist_common import checkpoint, cli, data, measure, models, proofs, runtime
from dist_common.report import Report
from dist_common.steps import StepProbe
from tensorboard_log import TensorBoardLog
from text_job import LineSequences
from training_checks import (
    check_gradient,
    check_test_tokens,
    check_trained_tokens,
    stop_unless_finite,
)

AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
LR_SCALING = {"none": lambda ratio: 1.0, "linear": lambda ratio: ratio, "sqrt": math.sqrt}


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


def train_step(run, micro_batches, lr):
    """Take one step; return what accumulate_gradient does, and the gradient's norm."""
    scaler = run.scaler
    run.optimizer.zero_grad()
    sums = accumulate_gradient(run.ddp_model, micro_batches, run.args.precision, scaler)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    if scaler:
        scaler.unscale_(run.optimizer)  # clip the gradient itself, not the enlarged one
    norm = torch.nn.utils.clip_grad_norm_(run.ddp_model.parameters(), run.args.max_grad_norm)
    if scaler:
        scaler.step(run.optimizer)  # leaves the step out where float16 overflowed
        scaler.update()  # and enlarges less from then on
    else:
        run.optimizer.step()
    return *sums, norm


def lr_at(step, args):
    """Return the learning rate of a step: the job's schedule, scaled with the global batch."""
    larger = args.global_batch_size / args.base_batch_size
    return LR_SCALING[args.lr_scaling](larger) * cli.lr_at(step, args)


def train(run, steps):
    """Take steps; at least every --log-every of them read results, evaluate and save when due."""
    args, report = run.args, run.report
    unread = []
    signals = catch_preemption()
    run.timer.start()
    for run.step in steps:
        lr = lr_at(run.step, args)
        unread.append((run.step, lr, *train_step(run, next(run.batches), lr)))
        run.sampler.advance(min(args.global_batch_size, len(run.train_set) - run.sampler.position))
        last = run.step == args.max_steps
        save_due = report.output and cli.due(run.step, args.save_every, last)
        eval_due = cli.due(run.step, args.eval_every, last)
        if not (save_due or eval_due or last or run.step % args.log_every == 0):
            continue  # the next step is queued while the device still computes this one

        run.stopped = read_results(run, unread, signals)
        unread.clear()
        if eval_due and (last or not run.stopped):
            run.test_loss, run.test_tokens = evaluate(run)
            run.log.write(run.step, test_loss=run.test_loss)
            report.say(f"step {run.step} | test loss {run.test_loss:.4f}")
        if save_due or (report.output and args.save_every and run.stopped):
            save(run)
        if run.stopped:
            break
        run.timer.start()  # the time of evaluating and saving belongs to no step


def read_results(run, unread, signals=()):
    """Log the steps since the last time; return whether any rank was asked to stop.

    To read a number the host has to wait until the device has computed it: so it is done seldom.
    """
    steps, rates, *columns = zip(*unread, strict=True)
    own_sums, tokens, norms = (torch.stack(column).double() for column in columns)
    sums = torch.zeros(len(steps) + 1, dtype=torch.float64, device=own_sums.device)
    sums[:-1] = own_sums
    sums[-1] = len(signals)
    dist.all_reduce(sums)
    rows = torch.stack([sums[:-1] / tokens, own_sums, tokens, norms], dim=1).tolist()
    time_ms = run.timer.lap(len(steps))
    for step, lr, (run.loss, own_sum, count, norm) in zip(steps, rates, rows, strict=True):
        stop_unless_finite(run.args, step, run.loss, own_sum, norm)
        run.trained_tokens += int(count)
        speed = count / time_ms * 1e3
        run.log.write(step, loss=run.loss, lr=lr, grad_norm=norm, tokens_per_second=speed)
    run.step_tokens = tokens.mean().item()
    run.report.step(run.step, run.loss, time_ms, *speed_of(run, time_ms))
    return sums[-1].item() > 0


def speed_of(run, step_time_ms):
    """Return tokens/s of all ranks, and the MFU of a device; None where its peak is unknown."""
    speed = run.step_tokens / step_time_ms * 1e3
    flops = speed / dist.get_world_size() * run.flops_per_token
    return speed, measure.mfu(flops, run.report.device, run.args.precision)


@torch.no_grad()
def evaluate(run):
    """Return the mean loss over all tokens of the test set, and how many tokens were counted."""
    # The plain model: DDP's forward may communicate, and ranks may differ in the number of batches.
    model, rank, ranks = run.ddp_model.module, dist.get_rank(), dist.get_world_size()
    model.eval()  # no dropout here, if there is any
    sums = torch.zeros(2, device=run.report.device, dtype=torch.float64)  # losses, tokens
    for chunk in torch.arange(len(run.test_set))[rank::ranks].split(run.args.micro_batch_size):
        items = [run.test_set[index] for index in chunk]
        inputs, targets = data.collate(run.args.micro_batch_size, run.args.seq_len, items)
        targets = targets.to(sums.device)
        sums[0] += summed_loss(model, inputs.to(sums.device), targets, run.args.precision)
        sums[1] += (targets != data.IGNORED).sum()
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item(), int(sums[1])


def catch_preemption():
    """Note SIGTERM and SIGUSR1 in the list returned, instead of dying from them in mid-step."""
    signals = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: signals.append(number))
    return signals


def save(run):
    """Write a checkpoint of all that the next step depends on; all ranks call it."""
    state = {
        "step": run.step,
        "trained_tokens": run.trained_tokens,
        "settings": run.settings,
        "sampler": run.sampler.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict() if run.scaler else None,
    }
    folder = run.report.output / "checkpoints"
    replica_checkpoint.save(folder, run.step, run.ddp_model.module, state)


def resume(run, model):
    """Load the newest checkpoint if there is one: same order of data, on any number of ranks."""
    state = replica_checkpoint.load(run.report.output / "checkpoints", model, run.report)
    if state is None:
        return
    changes = checkpoint.changed_settings(state["settings"], run.settings)
    model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    if run.scaler and state["scaler"]:
        run.scaler.load_state_dict(state["scaler"])
    run.sampler.load_state_dict(state["sampler"])
    run.step, run.trained_tokens = state["step"], state["trained_tokens"]
    run.rng = state["rng"]
    place = f"sample {run.sampler.position:,} of epoch {run.sampler.epoch + 1}"
    run.report.say(f"at step {run.step}, {place}; {changes}")


def parse_args():
    parser = cli.ArgumentParser(__doc__, resumes=True)
    cli.add_job_flags(parser, models.PRESETS)  # --preset, --micro-batch-size, --lr, ...
    add, positive = parser.add_argument, cli.positive_int
    add("--whole-lines", action="store_true", help="end sequences at line ends, and fill them up")
    add("--lr-scaling", choices=LR_SCALING, default="none", help="with the global batch (none)")
    add("--base-batch-size", type=positive, default=32, help="for which --lr is meant (32)")
    add("--max-grad-norm", type=cli.positive_float, default=1.0, help="clip longer gradients (1)")
    add("--log-every", type=positive, default=10,
        help="most steps between two looks at losses and stop signals (10)")  # fmt: skip
    add("--eval-every", type=cli.whole_number, default=30, help="steps, or 0 for never (30)")
    add("--save-every", type=cli.whole_number, default=20,
        help="steps, with --output-dir; 0 for never (20)")  # fmt: skip
    add("--num-workers", type=cli.whole_number, default=0,
        help="processes per rank that load data (0)")  # fmt: skip
    parity = "gradients to compare with one process (1; 0 for presets other than tiny)"
    add("--parity-steps", type=cli.whole_number, help=parity)
    add("--gradient-compression", choices=("none", "bf16"), default="none",
        help="all-reduce gradients in 2 bytes instead of 4 (none)")  # fmt: skip
    add("--compile", action="store_true", help="translate the model by torch.compile")
    add("--tensorboard", action="store_true", help="write for TensorBoard to --output-dir too")
    args = parser.parse_args()
    if args.parity_steps is None:
        args.parity_steps = int(args.preset == "tiny")
    if args.tensorboard and not args.output_dir:
        parser.error("--tensorboard needs --output-dir, the folder to write to")
    return args


def set_up(args, report):
    """Return the run: model, optimizer, data and its place in it, ready for the first step."""
    world, device = report.world, report.device
    run = SimpleNamespace(args=args, report=report, step=0, trained_tokens=0)
    runtime.seed_everything(args.seed)
    identity = data.settle_batch_sizes(args, world.world_size)
    config = models.preset(args.preset, args.seq_len)
    kind = LineSequences if args.whole_lines else data.Sequences
    run.train_set, run.test_set, checksum = data.job_text(args, world.world_size, kind)
    run.sampler = data.ShardedSampler(len(run.train_set), world.rank, world.world_size, args.seed)
    report.start(
        f"{args.preset}: {config.num_parameters():,} weights; {len(run.train_set):,} sequences of "
        f"text to train on, {len(run.test_set):,} to test on",
        identity,
    )
    run.probe = StepProbe(device)
    model = models.Transformer(config).to(device)
    torch.manual_seed(args.seed + world.rank)  # from here on ranks draw apart, as for dropout
    pinned = device.type == "cuda"  # a GPU fetches from such memory while it computes
    run.batches = data.job_batches(run.train_set, run.sampler, args, args.num_workers, pinned)
    run.optimizer = torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.95), weight_decay=0.1)
    run.scaler = torch.amp.GradScaler(device.type) if args.precision == "16-mixed" else None
    run.settings = checkpoint.settings_of(args, world.world_size, checksum)
    run.flops_per_token = measure.flops_per_token(config, args.seq_len)
    run.timer = measure.StepTimer(device, warmup=max(3, args.log_every))
    run.rng = None
    if args.resume:
        resume(run, model)
    run.ddp_model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
    run.probe.attach(model, run.optimizer)
    if args.gradient_compression == "bf16":
        run.ddp_model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    if args.compile:
        run.ddp_model = torch.compile(run.ddp_model)
    return run


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("01-ddp-basics/ddp_training.py", args, world, device)
        run = set_up(args, report)
        if run.step >= args.max_steps:
            report.say(f"{report.output} has all {args.max_steps} steps: nothing to do")
            return 0
        check_gradient(run, accumulate_gradient, summed_loss)
        if report.failed:  # now, and not after days
            return report.finish("")
        if run.rng:
            replica_checkpoint.restore_rng_state(run.rng, world.rank)
        log = TensorBoardLog if args.tensorboard else measure.StepLog
        run.log = log(report.output if world.is_rank0 else None, run.step + 1)

        steps = report.progress(range(run.step + 1, args.max_steps + 1), "training")
        train(run, run.probe.watch(steps))

        proofs.same_weights(report, run.ddp_model.module)
        check_trained_tokens(run)
        finished = run.step == args.max_steps
        if finished and args.eval_every:
            check_test_tokens(report, run.test_set, run.test_tokens)
            report.metrics["test_loss"] = run.test_loss
        step_time_ms = run.timer.median_ms()
        speed, mfu = speed_of(run, step_time_ms)
        report.metrics |= {
            "final_loss": run.loss,
            "step_time_ms": step_time_ms,
            "tokens_per_second": speed,
            "tokens_per_step": run.step_tokens,
            "mfu": mfu,
            **run.probe.metrics(run.timer),
        }
        saved = "saved" if report.output and args.save_every else "not saved"
        end = "trained to the end" if finished else f"asked to stop, {saved}"
        return report.finish(f"loss {run.loss:.4f} after step {run.step}, {end}")


if __name__ == "__main__":
    cli.run(main)
