"""Train a transformer on text with DeepSpeed as a real job does: a template to copy and cut down.

    CPU   deepspeed --num_gpus=2 03-deepspeed/deepspeed_train.py
    GPU   deepspeed --num_gpus=8 03-deepspeed/deepspeed_train.py --preset llama3-8b --seq-len 4096 \
              --deepspeed_config 03-deepspeed/configs/zero3_config.json --precision bf16-mixed \
              --activation-checkpointing --micro-batch-size 1

It does the same job as ddp_training.py of module 01; torchrun and srun start it as well. The config
names stage, optimizer and what it does not leave "auto". Look for: the losses of one process, and
the bytes per weight of the ZeRO paper.

To copy: delete what you do not need (`checkpoint_activations`, `evaluate`, `export`, `log`,
`ds_checkpoint`, `ds_checks`), each with what uses it.

Sources: Rajbhandari et al., ZeRO (SC 2020), sections 5 and 7; Lian et al., Universal Checkpointing
(2024); deepspeed.ai, "DeepSpeed Configuration JSON".
"""

import functools
import math
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ds_checkpoint
import ds_checks
import ds_config
import ds_setup
from dist_common import cli, data, measure, models, runtime
from dist_common.report import Report
from dist_common.steps import StepProbe
from tensor_bytes import live_bytes

CONFIG = Path(__file__).parent / "configs" / "zero2_config.json"


def build(run):
    """Return the model, its weights drawn; in stage 3 no rank ever holds it whole."""
    import deepspeed  # not before ds_setup.prepare has said for which device

    if run.stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=run.config):
            model = models.Transformer(run.shape)  # each layer is cut into shards once it is made
    else:
        with torch.device("meta"):  # shapes only: room is taken once, on the device
            model = models.Transformer(run.shape).to(run.dtype)
        model.to_empty(device=run.report.device)
        if run.shape.tied_embeddings:
            model.head.weight = model.embedding.weight
    if not run.found:  # a resumed run loads instead
        ds_setup.draw_weights(model, run.args.seed, run.report.device)
    if run.args.activation_checkpointing:
        checkpoint_activations(model, run.config)
    return model


def checkpoint_activations(model, config):
    """Keep each block's input only; backward computes the rest again. DeepSpeed's, or PyTorch's."""
    import deepspeed

    recompute = functools.partial(torch_checkpoint, use_reentrant=False)
    if "activation_checkpointing" in config:  # it can also shard what is kept, or move it
        deepspeed.checkpointing.configure(None, deepspeed_config=config)
        recompute = deepspeed.checkpointing.checkpoint
    for block in model.blocks:
        block.forward = functools.partial(recompute, block.forward)


def start_engine(run):
    """Return DeepSpeed's engine: model, optimizer, schedule, gradients and communication in one."""
    import deepspeed

    def schedule(optimizer):  # counts steps by itself, but run.step is right after a resume too
        factor = lambda _: cli.lr_at(run.step + 1, run.args) / run.args.lr  # noqa: E731
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    own = None if "scheduler" in run.config else schedule
    model = build(run)

    engine, *_ = deepspeed.initialize(model=model, config=run.config, lr_scheduler=own)

    return engine


def summed_loss(run, model, inputs, targets):
    """Return the cross-entropy, summed over tokens. Shapes: inputs and targets (B, T)."""
    device = run.report.device
    inputs = inputs.to(device, non_blocking=True)
    targets = targets.to(device, non_blocking=True)
    with torch.autocast(device.type, run.autocast, enabled=run.autocast is not None):
        logits = model(inputs)  # (B, T, V)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def train_step(run, micro_batches):
    """Take one step; return this rank's sum of losses and all ranks' number of tokens."""
    engine, device = run.engine, run.report.device
    own = sum(int((targets != data.IGNORED).sum()) for _, targets in micro_batches)
    tokens = torch.full((), own, device=device)
    counting = dist.all_reduce(tokens, async_op=True)  # while forward computes
    loss_sum = torch.zeros((), device=device)
    for inputs, targets in micro_batches:
        loss = summed_loss(run, engine, inputs, targets)
        counting.wait()
        # Divided by the tokens of all ranks: each token counts alike, whichever micro-batch it is
        # in. DeepSpeed takes the mean over ranks where a sum is meant, hence the factor.
        mean_loss = loss * dist.get_world_size() / tokens

        engine.backward(mean_loss, scale_wrt_gas=False)  # adds up and reduces, as the stage says
        engine.step()  # acts after the last micro-batch only: clips, updates, sets the rate

        loss_sum += loss.detach()
    return loss_sum, tokens


def train(run, steps):
    """Take steps; at least every --log-every of them read losses, evaluate and save when due."""
    args, report, probe = run.args, run.report, run.probe
    unread = []
    run.timer.start()
    for run.step in probe.watch(report.progress(steps, "training")):
        lr = run.engine.get_lr()[0]
        sums = train_step(run, next(run.batches))
        unread.append((run.step, lr, run.engine.get_global_grad_norm(), *sums))
        run.sampler.advance(min(args.global_batch_size, len(run.train_set) - run.sampler.position))
        last = run.step == args.max_steps
        save_due = report.output and cli.due(run.step, args.save_every, last)
        eval_due = cli.due(run.step, args.eval_every, last)
        if not (save_due or eval_due or run.step % args.log_every == 0 or run.step == steps[-1]):
            continue  # the next step is queued while the device still computes this one

        read_results(run, unread)
        unread.clear()
        if eval_due:
            run.test_loss, tokens = evaluate(run, run.engine)
            run.log.write(run.step, test_loss=run.test_loss)
            report.say(f"step {run.step} | test loss {run.test_loss:.4f} over {tokens:,} tokens")
        if save_due:
            ds_checkpoint.save(run)
        run.timer.start()  # the time of evaluating and saving belongs to no step


def read_results(run, unread):
    """Log the steps since the last time. To read a number the host waits for the device."""
    steps, rates, norms, sums, tokens = zip(*unread, strict=True)
    sums, tokens = torch.stack(sums).double(), torch.stack(tokens)
    dist.all_reduce(sums)
    time_ms = run.timer.lap(len(steps))
    rows = zip(steps, rates, norms, (sums / tokens).tolist(), tokens.tolist(), strict=True)
    for step, lr, norm, loss, count in rows:
        norm = math.nan if norm is None else float(norm)  # stage 0 in float32 keeps none
        # In float16 DeepSpeed leaves out a step that overflowed.
        known = not math.isnan(norm) and run.args.precision != "16-mixed"
        cli.stop_unless_finite(step, loss, norm if known else 0.0)
        run.losses.append(loss)
        run.norms.append(norm)
        speed = count / time_ms * 1e3
        run.log.write(step, loss=loss, lr=lr, grad_norm=norm, tokens_per_second=speed)
    run.step_tokens = tokens.double().mean().item()
    run.report.step(run.step, run.losses[-1], time_ms, *speed_of(run, time_ms))


def speed_of(run, step_time_ms):
    """Return tokens/s of all ranks, and the MFU of a device; None where its peak is unknown."""
    speed = run.step_tokens / step_time_ms * 1e3
    flops = speed / dist.get_world_size() * run.flops_per_token
    return speed, measure.mfu(flops, run.report.device, run.args.precision)


@torch.no_grad()
def evaluate(run, model):
    """Return the mean loss over all tokens of the test set, and how many tokens were counted.

    In stage 3 each forward gathers weights from all ranks: all take as many turns, or they hang.
    Hence a rank whose samples have run out goes through batches that no loss counts.
    """
    size, device = run.args.micro_batch_size, run.report.device
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model.eval()
    sums = torch.zeros(2, device=device, dtype=torch.float64)  # losses, tokens
    for turn in range(math.ceil(len(run.test_set) / (size * ranks))):
        mine = range(turn * size * ranks + rank, len(run.test_set), ranks)[:size]
        inputs, targets = data.collate(size, run.args.seq_len, [run.test_set[i] for i in mine])
        sums[0] += summed_loss(run, model, inputs, targets)
        sums[1] += (targets != data.IGNORED).sum()
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item(), int(sums[1])


def export(run):
    """Write plain weights as the flags say, and check that a plain model computes with them."""
    if run.args.consolidate:
        ds_checkpoint.consolidate(run)
        ds_checks.check_exported(run, run.report.output / "weights-fp32", evaluate)
    if run.args.save_16bit_model:
        ds_checkpoint.save_16bit_model(run)
        ds_checks.check_exported(run, run.report.output / "weights-16bit", evaluate)


def parse_args():
    parser = cli.ArgumentParser(__doc__, resumes=True)
    cli.add_job_flags(parser, models.PRESETS)  # --preset, --micro-batch-size, --lr, ...
    ds_setup.add_arguments(parser, CONFIG)  # --deepspeed_config, --nvme-path
    add, positive = parser.add_argument, cli.positive_int
    add("--max-grad-norm", type=cli.positive_float, default=1.0, help="clip longer gradients (1)")
    add("--activation-checkpointing", action="store_true", help="keep blocks' inputs only")
    add("--log-every", type=positive, default=10, help="most steps between two looks (10)")
    add("--eval-every", type=cli.whole_number, default=30, help="steps, or 0 for never (30)")
    add("--save-every", type=cli.whole_number, default=20,
        help="steps, with --output-dir; 0 for never (20)")  # fmt: skip
    add("--num-workers", type=cli.whole_number, default=0, help="processes that load data (0)")
    parity = "steps to compare with one process (2; 0 for presets other than tiny)"
    add("--parity-steps", type=cli.whole_number, help=parity)
    add("--consolidate", action="store_true", help="write float32 weights to --output-dir at last")
    add("--save-16bit-model", action="store_true", help="and those that the ranks compute with")
    args = parser.parse_args()
    for name in ("consolidate", "save_16bit_model"):
        if getattr(args, name) and not args.output_dir:
            parser.error(f"--{name.replace('_', '-')} needs --output-dir, the folder to write to")
        if getattr(args, name) and not args.eval_every:
            parser.error(f"--{name.replace('_', '-')} compares test losses: not --eval-every 0")
    if args.parity_steps is None:
        args.parity_steps = 2 if args.preset == "tiny" else 0
    return args, ds_setup.given_flags(parser)


def set_up(args, given, report):
    """Return the run: config, data and its place in it, ready for the engine."""
    world, device = report.world, report.device
    run = SimpleNamespace(
        args=args, report=report, step=0, losses=[], norms=[], found=None, held=None, test_loss=None
    )
    run.shape = models.preset(args.preset, args.seq_len)
    ds_setup.prepare(device)
    run.config = ds_config.load_config(args, world, run.shape, given)
    ds_config.require_buffers(run.config, args.deepspeed_config, run.shape, world.world_size)
    run.stage = run.config["zero_optimization"].get("stage", 0)
    run.dtype, run.autocast = ds_config.types_of(run.config)
    ds_checkpoint.refuse(run)
    identity = data.settle_batch_sizes(args, world.world_size)
    run.train_set, run.test_set, checksum = data.job_text(args, world.world_size)
    run.sampler = data.ShardedSampler(len(run.train_set), world.rank, world.world_size, args.seed)
    run.settings = ds_checkpoint.settings_of(args, world.world_size, checksum)
    report.start(
        f"{args.deepspeed_config.name}: stage {run.stage}, {args.precision}; {args.preset}: "
        f"{run.shape.num_parameters():,} weights",
        identity,
    )
    if args.resume:
        ds_checkpoint.find(run)
    ds_setup.fall_back(run.config, report)
    ds_setup.build_ops(ds_setup.ops_needed(run.config), report)
    run.batches = data.job_batches(run.train_set, run.sampler, args, args.num_workers)
    run.flops_per_token = measure.flops_per_token(run.shape, args.seq_len)
    run.timer = measure.StepTimer(device, warmup=max(3, args.log_every))
    return run


def main():
    args, given = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("03-deepspeed/deepspeed_train.py", args, world, device)
        run = set_up(args, given, report)
        if run.step >= args.max_steps:
            report.say(f"{report.output} has all {args.max_steps} steps: nothing to train")
            return 0
        alone = ds_checks.run_alone(run, summed_loss)
        run.probe = StepProbe(device)
        run.bytes_before = live_bytes()
        run.engine = start_engine(run)
        ds_checks.count_bytes(run)
        if run.found:
            ds_checkpoint.load(run)
        run.log = measure.StepLog(report.output if world.is_rank0 else None, run.step + 1)

        if alone:
            train(run, range(1, len(alone) + 1))
            ds_checks.check_first_steps(run, alone)
            if report.failed:  # now, and not after days
                return report.finish("")
        train(run, range(run.step + 1, args.max_steps + 1))

        ds_checks.check_weights(run)
        ds_checks.check_bytes(run)
        export(run)
        speed, mfu = speed_of(run, run.timer.median_ms())
        report.metrics |= {
            "final_loss": run.losses[-1],
            "test_loss": run.test_loss,
            "step_time_ms": run.timer.median_ms(),
            "tokens_per_second": speed,
            "tokens_per_step": run.step_tokens,
            "mfu": mfu,
            **run.probe.metrics(run.timer),
        }
        tested = f"test loss {run.test_loss:.4f}" if args.eval_every else "not evaluated"
        return report.finish(f"{tested} after step {run.step}")


if __name__ == "__main__":
    cli.run(main)
