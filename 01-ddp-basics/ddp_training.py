"""Train a transformer on text with DDP as a real job does: a template to copy and cut down.

    CPU   torchrun --standalone --nproc-per-node=2 01-ddp-basics/ddp_training.py
    GPU   torchrun --standalone --nproc-per-node=gpu 01-ddp-basics/ddp_training.py --preset 124m

With --output-dir and --resume it can be killed at any moment and started again. Look for: the same
losses on any number of ranks while --global-batch-size is the same, and the checks at the end.

To copy: delete what you do not need (`evaluate`, `compile`, `scaler`, `catch_preemption`,
`checkpoint`, `log`, the checks), each with what uses it. A test deletes each and runs the rest.

Sources: Li et al., PyTorch Distributed (VLDB 2020); Goyal et al., ImageNet in 1 Hour (2017).
"""

import contextlib
import math
import signal
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from dist_common import checkpoint, cli, data, measure, models, proofs, runtime
from dist_common.report import Report
from training_checks import check_gradient, check_tokens

AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
LR_SCALING = {"none": lambda ratio: 1.0, "linear": lambda ratio: ratio, "sqrt": math.sqrt}
SAME_DATA = ("text_file", "seq_len", "whole_lines", "seed")  # what the order of the data depends on
# Flags that do not change the result, so a resumed run may change them without a word.
FREE = ("device", "timeout", "output_dir", "resume", "num_workers", "tensorboard", "log_every")


def summed_loss(model, inputs, targets, precision):
    """Return the cross-entropy, summed over tokens. Shapes: inputs and targets (B, T)."""
    dtype = AUTOCAST[precision]
    with torch.autocast(inputs.device.type, dtype, enabled=dtype is not None):
        logits = model(inputs)  # (B, T, V)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def accumulate_gradient(ddp_model, micro_batches, precision, scaler=None):
    """Leave the mean gradient over all tokens of the global batch in the model, on every rank.

    Return this rank's sum of losses, and all ranks' number of tokens. Both stay on the device:
    nothing here waits for it. Shapes: a micro-batch is inputs and targets, (B, T) each.
    """
    device = next(ddp_model.parameters()).device
    tokens = sum((targets != data.IGNORED).sum() for _, targets in micro_batches).to(device)
    counting = dist.all_reduce(tokens, async_op=True)  # 8 bytes, while forward computes
    loss_sum = torch.zeros((), device=device)
    for number, (inputs, targets) in enumerate(micro_batches, 1):
        inputs = inputs.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        # Gradients add up on each rank; the backward of the last micro-batch all-reduces the sum.
        last = number == len(micro_batches)
        with contextlib.nullcontext() if last else ddp_model.no_sync():
            loss = summed_loss(ddp_model, inputs, targets, precision)
            counting.wait()
            # Divided by all tokens, each counts alike, in whatever micro-batch; in a mean of
            # micro-batches' means it would not. DDP divides by the ranks, hence the factor.
            mean_loss = loss * dist.get_world_size() / tokens
            if scaler:  # float16 loses small gradients: this makes them larger, for a while
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
        scaler.unscale_(run.optimizer)  # clip the gradient itself, not its enlargement
    norm = torch.nn.utils.clip_grad_norm_(run.ddp_model.parameters(), run.args.max_grad_norm)
    if scaler:
        scaler.step(run.optimizer)  # takes no step where float16 overflowed, and scales less then
        scaler.update()
    else:
        run.optimizer.step()
    return *sums, norm


def lr_at(step, args):
    """Return the learning rate of a step, counted from 1: linear warmup, then cosine to a tenth."""
    peak = args.lr * LR_SCALING[args.lr_scaling](args.global_batch_size / args.base_batch_size)
    if step <= args.warmup_steps:
        return peak * step / args.warmup_steps
    done = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(run, steps):
    """Take steps; every --log-every of them read their results, evaluate and save when due."""
    args, waiting = run.args, []
    signals = catch_preemption()
    run.timer.start()
    for run.step in steps:
        lr = lr_at(run.step, args)
        waiting.append((run.step, lr, *train_step(run, next(run.batches), lr)))
        run.sampler.advance(min(args.global_batch_size, len(run.train_set) - run.sampler.position))
        last = run.step == args.max_steps
        save_due = run.report.output and (run.step % args.save_every == 0 or last)
        eval_due = run.step % args.eval_every == 0 or last
        if run.step % args.log_every and not save_due and not eval_due:
            continue  # the device computes on; nobody waits for it

        run.stopped = read_results(run, waiting, len(signals))
        waiting.clear()
        if eval_due and not run.stopped:
            run.test_loss, run.test_tokens = evaluate(run)
            run.log.write(run.step, test_loss=run.test_loss)
            run.report.say(f"step {run.step} | test loss {run.test_loss:.4f}")
        if save_due or (run.report.output and run.stopped):
            save(run)
        if run.stopped:
            break
        run.timer.start()  # what evaluating and saving took is no part of a step


def read_results(run, waiting, signals):
    """Wait for the device, log the steps since the last time, and say whether any rank must stop.

    Reading a number makes the host wait until the device has computed it, so it is done seldom.
    """
    steps, rates, own_sums, tokens, norms = zip(*waiting, strict=True)
    own_sums = torch.stack(own_sums)
    sums = torch.cat([own_sums.double(), own_sums.new_full((1,), signals)])
    dist.all_reduce(sums)
    tokens = torch.stack(tokens).tolist()
    norms = torch.stack(norms).tolist()
    time_ms = run.timer.lap(len(steps))
    losses = [total / count for total, count in zip(sums.tolist()[:-1], tokens, strict=True)]
    for number, step in enumerate(steps):
        stop_unless_finite(run, step, losses[number], own_sums[number].item(), norms[number])
        speed = tokens[number] / time_ms * 1e3
        run.log.write(step, loss=losses[number], lr=rates[number], grad_norm=norms[number],
                      tokens_per_second=speed)  # fmt: skip
    run.trained_tokens += sum(tokens)
    run.loss, run.speed = losses[-1], sum(tokens) / len(tokens) / time_ms * 1e3
    flops = run.speed / dist.get_world_size() * run.flops_per_token
    run.mfu = measure.mfu(flops, run.report.device, run.args.precision)
    run.report.step(step, run.loss, time_ms, run.speed, run.mfu)
    return sums[-1].item() > 0


def stop_unless_finite(run, step, loss, own_sum, norm):
    """End the run when loss or gradient is infinite or no number; say on which ranks it was so."""
    if math.isfinite(loss) and (run.scaler or math.isfinite(norm)):  # a scaler looks at the norm
        return
    ranks = [str(r) for r, own in enumerate(runtime.gather(own_sum)) if not math.isfinite(own)]
    where = f"on rank {', '.join(ranks)} of {dist.get_world_size()}" if ranks else "over all ranks"
    raise FloatingPointError(
        f"stopped: in step {step} the loss is {loss:.4g} {where}, gradient norm {norm:.4g}: try a "
        "lower --lr, or look at that data; the newest checkpoint may already be diverging: try the "
        "one before"
    )


@torch.no_grad()
def evaluate(run):
    """Return the mean loss over all tokens of the test set, and how many tokens were counted."""
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
    dist.all_reduce(sums)  # after the loop: ranks may have taken different numbers of turns in it
    return (sums[0] / sums[1]).item(), int(sums[1])


def catch_preemption():
    """Note SIGTERM and SIGUSR1 in the list returned, instead of dying from them in mid-step."""
    signals = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: signals.append(number))
    return signals


def save(run):
    """Write a checkpoint of all that the next step depends on."""
    state = {
        "step": run.step,
        "trained_tokens": run.trained_tokens,
        "settings": run.settings,
        "sampler": run.sampler.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict() if run.scaler else None,
        "rng": runtime.gather(checkpoint.rng_state()),  # a collective: not under the next `if`
    }
    if dist.get_rank() == 0:
        checkpoint.save(run.report.output / "checkpoints", run.step, run.ddp_model.module, state)


def resume(run, model):
    """Load the newest checkpoint if there is one: same order of data, on any number of ranks."""
    state = checkpoint.load(run.report.output / "checkpoints", model, run.report)
    if state is None:
        return
    old = state["settings"]
    for name in SAME_DATA:
        if old[name] != run.settings[name]:
            raise cli.UsageError(
                f"--{name.replace('_', '-')} is {run.settings[name]} here and {old[name]} in the "
                "checkpoint: its place in the data would mean nothing"
            )
    model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    if run.scaler and state["scaler"]:
        run.scaler.load_state_dict(state["scaler"])
    run.sampler.load_state_dict(state["sampler"])
    run.step, run.trained_tokens = state["step"], state["trained_tokens"]
    run.rng = state["rng"]
    changes = [f"{n} {old.get(n)} -> {new}" for n, new in run.settings.items() if old.get(n) != new]
    run.report.say(
        f"at step {run.step}, sample {run.sampler.position:,} of epoch {run.sampler.epoch + 1}; "
        f"changed since then: {', '.join(changes) or 'nothing'}"
    )


def parse_args():
    parser = cli.ArgumentParser(__doc__, resumes=True)
    cli.add_job_flags(parser, models.PRESETS)  # --preset, --micro-batch-size, --lr, ...
    add, positive = parser.add_argument, cli.positive_int
    add("--whole-lines", action="store_true", help="end sequences at line ends, and fill them up")
    add("--lr-scaling", choices=LR_SCALING, default="none", help="with the global batch (none)")
    add("--base-batch-size", type=positive, default=32, help="for which --lr is meant (32)")
    add("--max-grad-norm", type=cli.positive_float, default=1.0, help="clip longer gradients (1)")
    add("--log-every", type=positive, default=10, help="steps between two looks at the loss (10)")
    add("--eval-every", type=positive, default=30, help="steps (30)")
    add("--save-every", type=positive, default=20, help="steps, with --output-dir (20)")
    add("--num-workers", type=cli.whole_number, default=0,
        help="processes per rank that load data (0)")  # fmt: skip
    parity = "gradients to compare with one process (1; 0 for presets other than tiny)"
    add("--parity-steps", type=cli.whole_number, help=parity)
    add("--compile", action="store_true", help="translate the model by torch.compile")
    add("--tensorboard", action="store_true", help="write for TensorBoard to --output-dir too")
    args = parser.parse_args()
    if args.parity_steps is None:
        args.parity_steps = int(args.preset == "tiny")
    return args


def set_up(args, report):
    """Return the run: model, optimizer, data and its place in it, ready for the first step."""
    world, device = report.world, report.device
    runtime.seed_everything(args.seed)
    identity = cli.settle_batch_sizes(args, world.world_size)
    config = models.preset(args.preset, args.seq_len)
    train_set, test_set, checksum = data.job_text(args, world.world_size, args.whole_lines)
    sampler = data.ShardedSampler(len(train_set), world.rank, world.world_size, args.seed)
    report.start(
        f"{args.preset}: {config.num_parameters():,} weights; {len(train_set):,} sequences of text "
        f"to train on, {len(test_set):,} to test on",
        identity,
    )
    model = models.Transformer(config).to(device)
    torch.manual_seed(args.seed + world.rank)  # from here on ranks draw apart, as for dropout
    run = SimpleNamespace(args=args, report=report, train_set=train_set, test_set=test_set)
    run.sampler = sampler
    pinned = device.type == "cuda"  # a GPU fetches from such memory while it computes
    run.batches = data.job_batches(train_set, sampler, args, args.num_workers, pinned)
    run.optimizer = torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.95), weight_decay=0.1)
    run.scaler = torch.amp.GradScaler(device.type) if args.precision == "16-mixed" else None
    run.settings = {name: value for name, value in vars(args).items() if name not in FREE}
    run.settings |= {"ranks": world.world_size, "text_file": f"sha256 {checksum}"}
    run.step, run.trained_tokens, run.stopped, run.rng = 0, 0, False, None
    run.flops_per_token = measure.flops_per_token(config, args.seq_len)
    run.timer = measure.StepTimer(device, warmup=args.log_every)
    if args.resume:
        resume(run, model)
    run.ddp_model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
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
        if not args.parity_steps:
            report.say("not compared with one process (--parity-steps 0)")
        check_gradient(run, accumulate_gradient, summed_loss)
        if report.failed:  # now, and not after days
            return report.finish("")
        if run.rng:
            checkpoint.restore_rng_state(run.rng, world.rank)
        output = report.output if world.is_rank0 else None
        run.log = measure.StepLog(output, run.step + 1, args.tensorboard)

        train(run, report.progress(range(run.step + 1, args.max_steps + 1), "training"))

        proofs.same_weights(report, run.ddp_model.module)
        check_tokens(run)
        report.metrics |= {
            "final_loss": run.loss,
            "step_time_ms": run.timer.median_ms(),
            "tokens_per_second": run.speed,
            "mfu": run.mfu,
            "peak_memory_gib": measure.peak_memory_gib(device),
        }
        end = "trained to the end"
        if run.stopped and run.step < args.max_steps:
            end = f"asked to stop, {'' if report.output else 'not '}saved"
        return report.finish(f"loss {run.loss:.4f} after step {run.step}, {end}")


if __name__ == "__main__":
    cli.run(main)
