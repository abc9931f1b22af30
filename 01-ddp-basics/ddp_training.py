"""Train a transformer with DDP as a real job does: a template.

Copy this file and dist_common, then change both.

    CPU   torchrun --standalone --nproc-per-node=2 01-ddp-basics/ddp_training.py
    GPU   torchrun --standalone --nproc-per-node=gpu 01-ddp-basics/ddp_training.py \
              --preset 124m --seq-len 1024

With --output-dir and --resume the run can be killed at any moment and started again, on
any number of ranks. SIGTERM, SIGUSR1 and SIGINT save first. The losses do not depend on
the number of ranks while --global-batch-size stays the same; --self-check compares two
steps with one process.

Sources: Li et al., PyTorch Distributed (VLDB 2020).
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from dist_common import check, cli, data, runtime, train
from dist_common.checkpoint import Checkpoints
from dist_common.model import PRESETS, build_transformer, load_config
from dist_common.report import Report
from dist_common.train import build_optimizer, every, lr_at, set_lr

AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def build_model(config, seed, device):
    """Return the model with its first weights, the same ones on every rank."""
    return build_transformer(config, seed, device)


def summed_loss(model, inputs, targets, precision):
    """Return the cross-entropy summed over tokens. Shapes: inputs, targets (B, T)."""
    dtype = AUTOCAST[precision]
    with torch.autocast(inputs.device.type, dtype, enabled=dtype is not None):
        logits = model(inputs)  # (B, T, V)
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
    )


def accumulate_gradient(ddp_model, micro_batches, args, scaler):
    """Leave the mean gradient over all tokens of the global batch on every rank.

    Returns: this rank's sum of losses, and the number of tokens of all ranks.
    """
    device = next(ddp_model.parameters()).device
    counts = [(targets != data.IGNORED).sum() for _, targets in micro_batches]
    num_tokens = sum(counts).to(device, non_blocking=True)
    dist.all_reduce(num_tokens)
    loss_sum = torch.zeros((), device=device)
    for number, (inputs, targets) in enumerate(micro_batches, 1):
        inputs = inputs.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        # Gradients add up on each rank. Only the last backward all-reduces the sum.
        is_last = number == len(micro_batches)
        with contextlib.nullcontext() if is_last else ddp_model.no_sync():
            loss = summed_loss(ddp_model, inputs, targets, args.precision)
            # DDP averages over ranks, but we divide by the tokens of all ranks: undo
            # the average.
            mean_loss = loss * dist.get_world_size() / num_tokens
            scaler.scale(mean_loss).backward()
        loss_sum += loss.detach()
    return loss_sum, num_tokens


@torch.no_grad()
def evaluate(model, test_set, args, run):
    """Yield the tokens and the summed loss of each of this rank's test batches."""
    runtime.sync_buffers(model)
    model.eval()
    for inputs, targets in data.evaluation_batches(test_set, args, run):
        inputs = inputs.to(run.device)
        targets = targets.to(run.device)
        num_tokens = (targets != data.IGNORED).sum()
        yield num_tokens, summed_loss(model, inputs, targets, args.precision)
    model.train()


def count_distinct_replicas(model, group):
    """Return how many different sets of weights the ranks hold, bit by bit."""
    total = torch.zeros((), dtype=torch.int64)
    for number, weight in enumerate(model.parameters(), 1):
        bits = weight.detach().view(torch.int32)
        total += number * bits.sum(dtype=torch.int64).cpu()  # any flipped bit counts
    return len(set(runtime.gather(total.item(), group)))


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    without = ("--activation-checkpointing", "--async-save")
    cli.add_training_flags(parser, PRESETS, without=without)
    args = parser.parse_args()
    cli.validate_training_args(args)
    return args


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        args.precision = args.precision or runtime.default_precision(run.device)
        train_set, test_set, args.data, vocab_size = data.load_sequences(args)
        config = load_config(args.preset, args.seq_len, vocab_size)
        report = Report("01-ddp-basics/ddp_training.py", args, run)
        model = build_model(config, args.seed, run.device)
        run.print0(f"{args.preset}: {config.num_parameters():,} weights")
        optimizer = build_optimizer(model, args)
        # Small gradients would round to 0 in float16: scale the loss up.
        is_float16 = args.precision == "16-mixed"
        scaler = torch.amp.GradScaler(run.device.type, enabled=is_float16)
        runtime.seed_everything(args.seed, run.rank)

        checkpoints = Checkpoints(run, args, model, optimizer)
        saved = checkpoints.resume()
        if saved.get("scaler"):
            scaler.load_state_dict(saved["scaler"])
        first_step = saved["step"] + 1
        train.settle_batch_size(args, run)
        batches = data.GlobalBatches(train_set, args, run, saved["samples_seen"])

        device_ids = [run.device.index] if run.device.type == "cuda" else None
        ddp_model = DDP(model, device_ids=device_ids, gradient_as_bucket_view=True)
        if args.compile:
            ddp_model = torch.compile(ddp_model)
        counter = check.CollectiveCounter()
        flops = config.flops_per_token(args.seq_len)
        log = train.Log(run, args, first_step, flops, counter)
        stop = train.StopSignal(run.cpu_group)

        for step in range(first_step, args.max_steps + 1):
            with log.step(step):
                loss_sum, num_tokens = accumulate_gradient(
                    ddp_model, next(batches), args, scaler
                )
                scaler.unscale_(optimizer)  # clip the gradient, not the scaled one
                grad_norm = torch.nn.utils.clip_grad_norm_(
                    model.parameters(), args.max_grad_norm
                )
                set_lr(optimizer, lr_at(step, args))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            log.add(step, loss_sum, num_tokens, grad_norm)
            if args.self_check and step == 2 and first_step == 1:
                check.first_two_steps(
                    report,
                    log,
                    model,
                    optimizer,
                    train_set,
                    lambda: build_model(config, args.seed, run.device),
                )
            if every(step, args.eval_every, args.max_steps):
                log.evaluation(step, evaluate(model, test_set, args, run))
            stopping = stop.requested()
            if stopping or every(step, args.save_every, args.max_steps):
                log.flush()  # stops the run if the loss is not a number
                facts = {
                    "samples_seen": batches.samples_seen,
                    "scaler": scaler.state_dict(),
                }
                checkpoints.save(step, facts)
            if stopping:
                run.print0(f"stopped by a signal after step {step}")
                break

        report.metrics |= log.finish()
        replicas = count_distinct_replicas(model, run.cpu_group)
        report.check("distinct sets of weights over all ranks", replicas, 1, 0)
        return report.finish(log.summary())


if __name__ == "__main__":
    cli.run(main)
