"""Train a transformer on text with DDP as a real job does: a template to copy and cut down.

    CPU   torchrun --standalone --nproc-per-node=2 01-ddp-basics/ddp_training.py
    GPU   torchrun --standalone --nproc-per-node=gpu 01-ddp-basics/ddp_training.py --preset 124m

With --output-dir and --resume it can be killed at any moment and started again. Look for: the same
losses on any number of ranks while --global-batch-size is the same, and the checks at the end.

To copy: delete what you do not need (`evaluate`, `compile`, `scaler`, `catch_preemption`,
`checkpoint`, `log`, the checks), each with what uses it. The rest still runs, as a test sees to.

Sources: Li et al., PyTorch Distributed (VLDB 2020); Goyal et al., ImageNet in 1 Hour (2017).
"""

import contextlib
import functools
import hashlib
import itertools
import math
import signal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from dist_common import checkpoint, data, measure, runtime
from dist_common.console import Console
from dist_common.models import PRESETS, Transformer

AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
# Relative. fp32 sums in another order differ in the last bits; the others keep 8 and 11 bits.
GRADIENT_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 5e-2, "16-mixed": 1e-2}
LR_SCALING = {"none": lambda ratio: 1.0, "linear": lambda ratio: ratio, "sqrt": math.sqrt}
SAME_DATA = ("text_file", "seq_len", "whole_lines", "seed")  # what the order of the data depends on
FREE = ("device", "timeout", "output_dir", "resume", "num_workers", "tensorboard")  # not the result


class MicroBatches:
    """Deal the indices of each global batch to the ranks, this rank's micro-batches one by one.

    Any number of ranks sees the same global batches. The last one of an epoch may be smaller: some
    micro-batches are then short or empty, but each rank takes as many, so that none is waited for.
    """

    def __init__(self, sampler, args):
        self.sampler, self.args = sampler, args

    def __iter__(self):
        rank, ranks, size = self.sampler.rank, self.sampler.world_size, self.args.micro_batch_size
        order = self.sampler.global_order()
        for start in range(self.sampler.position, len(order), self.args.global_batch_size):
            mine = order[start : start + self.args.global_batch_size][rank::ranks].tolist()
            for number in range(self.args.grad_accum_steps):
                yield mine[number * size : (number + 1) * size]


def collate(args, items):
    """Stack up to B sequences, and fill up with rows that no loss counts. Shapes: (B, T) each."""
    inputs = torch.zeros(args.micro_batch_size, args.seq_len, dtype=torch.int64)
    targets = torch.full_like(inputs, data.IGNORED)
    for row, item in enumerate(items):
        inputs[row], targets[row] = item
    return inputs, targets


def steps_of(loader, sampler, args):
    """Yield each step's micro-batches on this rank, epoch after epoch."""
    while True:
        batches = iter(loader)
        while step := list(itertools.islice(batches, args.grad_accum_steps)):
            yield step
        sampler.set_epoch(sampler.epoch + 1)


def summed_loss(model, inputs, targets, precision):
    """Return the cross-entropy, summed over tokens. Shapes: inputs and targets (B, T)."""
    dtype = AUTOCAST[precision]
    with torch.autocast(inputs.device.type, dtype, enabled=dtype is not None):
        logits = model(inputs)  # (B, T, V)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def accumulate_gradient(ddp_model, micro_batches, precision, scaler=None, signals=()):
    """Leave the mean gradient over all tokens of the global batch in the model, on every rank.

    Return this rank's sum of losses, and all ranks' sums: of losses, of tokens, of stop signals.
    """
    device = next(ddp_model.parameters()).device
    batches = [[t.to(device, non_blocking=True) for t in batch] for batch in micro_batches]
    full = dist.get_world_size() * sum(targets.numel() for _, targets in batches)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for number, (inputs, targets) in enumerate(batches, 1):
        # Gradients add up on each rank; the backward of the last micro-batch all-reduces the sum.
        with contextlib.nullcontext() if number == len(batches) else ddp_model.no_sync():
            loss = summed_loss(ddp_model, inputs, targets, precision)
            # DDP divides by the ranks, so this is the mean over the tokens of a full batch.
            mean_loss = loss * dist.get_world_size() / full
            if scaler:  # float16 loses small gradients: this makes them larger, for a while
                mean_loss = scaler.scale(mean_loss)
            mean_loss.backward()
        sums[0] += loss.detach()
        sums[1] += (targets != data.IGNORED).sum()
    own = sums[0].item()
    sums[2] = len(signals)
    dist.all_reduce(sums)  # 24 bytes: what every rank has to know of the others
    tokens = sums[1].item()
    if tokens < full:
        for parameter in ddp_model.parameters():
            # The mean is over the tokens that there are, in whatever micro-batch: so each counts
            # alike, which in a mean of micro-batches' means it would not.
            parameter.grad *= full / tokens
    return own, sums.tolist()


def train_step(ddp_model, optimizer, micro_batches, lr, args, scaler=None, signals=()):
    """Take one step. Return what accumulate_gradient does, and the gradient's norm."""
    optimizer.zero_grad()
    own, sums = accumulate_gradient(ddp_model, micro_batches, args.precision, scaler, signals)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if scaler:
        scaler.unscale_(optimizer)  # clip the gradient itself, not its enlargement
    norm = torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), args.max_grad_norm)
    if scaler:
        scaler.step(optimizer)  # takes no step where float16 overflowed, and scales less after it
        scaler.update()
    else:
        optimizer.step()
    return own, sums, norm.item()


def lr_at(step, args):
    """Return the learning rate of a step, counted from 1: linear warmup, then cosine to a tenth."""
    peak = args.lr * LR_SCALING[args.lr_scaling](args.global_batch_size / args.base_batch_size)
    if step <= args.warmup_steps:
        return peak * step / args.warmup_steps
    done = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def evaluate(model, sequences, device, args):
    """Return the mean loss over all tokens of `sequences`, and how many tokens were counted."""
    mine = data.evaluation_indices(len(sequences), dist.get_rank(), dist.get_world_size())
    sums = torch.zeros(2, device=device, dtype=torch.float64)  # losses, tokens
    for chunk in mine.split(args.micro_batch_size):
        inputs, targets = (t.to(device) for t in collate(args, [sequences[i] for i in chunk]))
        sums[0] += summed_loss(model, inputs, targets, args.precision)
        sums[1] += (targets != data.IGNORED).sum()
    dist.all_reduce(sums)  # after the loop: ranks may have taken different numbers of turns in it
    return (sums[0] / sums[1]).item(), int(sums[1])


def ignore_sigterm(worker):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which launchers send to data workers too


def catch_preemption():
    """Note SIGTERM and SIGUSR1 in the list returned, instead of dying from them in mid-step."""
    signals = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: signals.append(number))
    return signals


def stop_unless_finite(step, loss, own_sum, norm, scaler=None):
    """End the run when loss or gradient is infinite or no number; say on which ranks it was so."""
    if not math.isfinite(loss) or not (scaler or math.isfinite(norm)):  # a scaler looks itself
        sums = [None] * dist.get_world_size()
        dist.all_gather_object(sums, own_sum)
        ranks = [str(rank) for rank, own in enumerate(sums) if not math.isfinite(own)]
        where = f"on rank {', '.join(ranks)} of {len(sums)}" if ranks else "over all ranks"
        raise FloatingPointError(
            f"stopped: in step {step} the loss is {loss:.4g} {where}, gradient norm {norm:.4g}: "
            "try a lower --lr, or look at that data; the newest checkpoint may be on the way there"
        )


def resume(state, settings, sampler, model, optimizer, scaler, console):
    """Go on where `state` was saved: the same order of data, also on another number of ranks."""
    old = state["settings"]
    for name in SAME_DATA:
        if old[name] != settings[name]:
            raise runtime.UsageError(
                f"--{name.replace('_', '-')} is {settings[name]} here and {old[name]} in the "
                "checkpoint: its place in the data would mean nothing"
            )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if scaler and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    sampler.load_state_dict(state["sampler"])
    checkpoint.restore_rng_state(state["rng"], sampler.rank)
    changes = [f"{n} {old.get(n)} -> {new}" for n, new in settings.items() if old.get(n) != new]
    console.say(
        f"at step {state['step']}, sample {sampler.position:,} of epoch {sampler.epoch + 1}; "
        f"changed since then: {', '.join(changes) or 'nothing'}"
    )


def check_gradient(results, ddp_model, train_set, sampler, device, args):
    """Hold a gradient against the one that one process computes, on two sequences for each rank."""
    order, plain = sampler.global_order()[: 2 * dist.get_world_size()], ddp_model.module
    sequences = [train_set[index] for index in order]
    mine = sequences[sampler.rank :: sampler.world_size]
    with measure.CollectiveCounter() as counter:
        micro_batches = [collate(args, mine[:1]), collate(args, mine[1:])]
        accumulate_gradient(ddp_model, micro_batches, args.precision)
    alone = [torch.zeros_like(parameter) for parameter in plain.parameters()]
    for start in range(0, len(sequences), args.micro_batch_size):  # as many as fit at a time
        part = sequences[start : start + args.micro_batch_size]
        inputs, targets = (tensor.to(device) for tensor in collate(args, part))
        loss = summed_loss(plain, inputs, targets, args.precision) / train_set.lengths[order].sum()
        gradients = torch.autograd.grad(loss, list(plain.parameters()))
        alone = [total + gradient for total, gradient in zip(alone, gradients, strict=True)]
    errors = [(p.grad - g).abs().max() for p, g in zip(plain.parameters(), alone, strict=True)]
    error = torch.stack(errors).max() / max(gradient.abs().max() for gradient in alone)
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    name, source = "gradient: relative error against one process", "DDP paper, section 3.2"
    results.check(name, error.item(), 0, GRADIENT_TOLERANCE[args.precision], source)
    sent, gradient = counter.bytes["allreduce_"], sum(p.nbytes for p in plain.parameters())
    results.check("bytes all-reduced per step", sent, gradient + 24, 0, "a gradient, three sums")


def check_equal_weights(results, model):
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy())
    fingerprints = [None] * dist.get_world_size()
    dist.all_gather_object(fingerprints, digest.hexdigest())
    name, source = "distinct sets of weights over all ranks", "DDP paper, section 3.1"
    results.check(name, len(set(fingerprints)), 1, 0, source)


def parse_args():
    parser = runtime.ArgumentParser(__doc__, resumes=True)
    add, positive, real = parser.add_argument, runtime.positive_int, runtime.positive_float
    add("--preset", choices=PRESETS, default="tiny", help="size of the model (tiny)")
    add("--text-file", help="train on its bytes (without: the sources of Python's own library)")
    add("--seq-len", type=positive, default=128, help="tokens per sequence (128)")
    add("--whole-lines", action="store_true", help="end sequences at line ends, and fill them up")
    add("--micro-batch-size", type=positive, default=8, help="sequences per rank at a time (8)")
    add("--grad-accum-steps", type=positive, help="micro-batches per step (1)")
    add("--global-batch-size", type=positive, help="sequences per step: sets --grad-accum-steps")
    add("--max-steps", type=positive, default=60, help="steps of the whole run (60)")
    add("--lr", type=real, default=2e-3, help="peak learning rate of AdamW (0.002)")
    add("--lr-scaling", choices=LR_SCALING, default="none", help="with the global batch (none)")
    add("--base-batch-size", type=positive, default=32, help="for which --lr is meant (32)")
    add("--warmup-steps", type=runtime.whole_number, default=10, help="(10)")
    add("--max-grad-norm", type=real, default=1.0, help="clip gradients longer than this (1)")
    add("--precision", choices=AUTOCAST, default="32-true", help="(32-true)")
    add("--eval-every", type=positive, default=30, help="steps (30)")
    add("--save-every", type=positive, default=20, help="steps, with --output-dir (20)")
    add(
        "--num-workers",
        type=runtime.whole_number,
        default=0,
        help="processes per rank that load data (0)",
    )
    add("--compile", action="store_true", help="translate the model by torch.compile")
    add("--tensorboard", action="store_true", help="write for TensorBoard to --output-dir too")
    return parser.parse_args()


def plan_batches(args, world):
    """Settle --grad-accum-steps and --global-batch-size, of which one follows from the other."""
    together = args.micro_batch_size * world.world_size
    if args.global_batch_size is None:
        args.grad_accum_steps = args.grad_accum_steps or 1
        args.global_batch_size = together * args.grad_accum_steps
    wanted = args.global_batch_size // together
    if args.global_batch_size % together or args.grad_accum_steps not in (None, wanted):
        raise runtime.UsageError(
            f"--global-batch-size {args.global_batch_size} must be --micro-batch-size "
            f"{args.micro_batch_size} x {world.world_size} ranks x --grad-accum-steps "
            f"{args.grad_accum_steps or 'N'}, a multiple of {together}"
        )
    args.grad_accum_steps = wanted


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        console = Console(world.is_rank0)
        results = measure.Results("01-ddp-basics/ddp_training.py", args, world, device)
        runtime.seed_everything(args.seed)
        plan_batches(args, world)
        config = PRESETS[args.preset]
        if args.seq_len > config.max_seq_len:
            raise runtime.UsageError(f"--seq-len must be at most {config.max_seq_len}")
        text = data.load_text(args.text_file, max_bytes=1_000_000)
        cut = len(text) - len(text) // 20  # the last twentieth is held out to test on
        train_set, test_set = (
            data.Sequences(part, args.seq_len, world.world_size, args.whole_lines, name)
            for name, part in (("training text", text[:cut]), ("test text", text[cut:]))
        )
        sampler = data.ShardedSampler(len(train_set), world.rank, world.world_size, args.seed)
        loader = DataLoader(
            train_set,
            batch_sampler=MicroBatches(sampler, args),
            collate_fn=functools.partial(collate, args),
            num_workers=args.num_workers,
            worker_init_fn=ignore_sigterm,
            pin_memory=device.type == "cuda",  # a GPU fetches from such memory while it computes
            generator=torch.Generator(),  # else each epoch would draw from the model's numbers
        )
        output = measure.claim_output_dir(args, world)
        model = Transformer(config).to(device)
        torch.manual_seed(args.seed + world.rank)  # from here on ranks draw apart, as for dropout
        optimizer = torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.95), weight_decay=0.1)
        scaler = torch.amp.GradScaler(device.type) if args.precision == "16-mixed" else None
        settings = {name: value for name, value in vars(args).items() if name not in FREE}
        checksum = hashlib.sha256(text.numpy()).hexdigest()[:8]
        settings |= {"ranks": world.world_size, "text_file": f"sha256 {checksum}"}
        first_step, trained_tokens, state = 1, 0, None
        if args.resume:
            state = checkpoint.load_newest(output / "checkpoints", model, console)
        if state:
            resume(state, settings, sampler, model, optimizer, scaler, console)
            first_step, trained_tokens = state["step"] + 1, state["trained_tokens"]
        if first_step > args.max_steps:
            console.say(f"{output} has all {args.max_steps} steps: nothing to do")
            return 0
        log = measure.StepLog(output if world.is_rank0 else None, first_step, args.tensorboard)
        ddp_model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)

        console.header(
            results,
            f"{args.preset}: {config.num_parameters():,} weights; {len(text):,} bytes of text: "
            f"{len(train_set):,} sequences to train on, {len(test_set):,} to test on",
            f"global batch {args.global_batch_size} = {args.micro_batch_size} per rank x "
            f"{args.grad_accum_steps} micro-batches x {world.world_size} ranks",
        )
        if args.compile:
            ddp_model = torch.compile(ddp_model)
        check_gradient(results, ddp_model, train_set, sampler, device, args)
        if results.failed:  # now, and not after days
            return console.verdict(results, "")
        flops, timer = measure.flops_per_token(config, args.seq_len), measure.StepTimer(device)
        batches = steps_of(loader, sampler, args)
        signals = catch_preemption()
        for step in console.progress(range(first_step, args.max_steps + 1), "training"):
            with timer:
                lr, batch = lr_at(step, args), next(batches)
                own, sums, norm = train_step(ddp_model, optimizer, batch, lr, args, scaler, signals)
            loss, tokens, stop = sums[0] / sums[1], int(sums[1]), sums[2] > 0
            stop_unless_finite(step, loss, own, norm, scaler)
            sampler.advance(min(args.global_batch_size, len(train_set) - sampler.position))
            trained_tokens += tokens
            last, time_ms = step == args.max_steps, timer.steps_ms[-1]
            speed = tokens / time_ms * 1e3
            usage = measure.mfu(speed / world.world_size * flops, device, args.precision)
            log.write(step, loss=loss, lr=lr, grad_norm=norm, tokens_per_second=speed)
            if step % 10 == 0 or last or stop:
                console.step(step, loss, time_ms, speed, measure.peak_memory_gib(device), usage)
            if (step % args.eval_every == 0 and not stop) or last:
                test_loss, test_tokens = evaluate(model, test_set, device, args)
                log.write(step, test_loss=test_loss)
                console.say(f"step {step} | test loss {test_loss:.4f}")
            if output and (step % args.save_every == 0 or last or stop):
                state = {
                    "step": step,
                    "trained_tokens": trained_tokens,
                    "settings": settings,
                    "sampler": sampler.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scaler": scaler.state_dict() if scaler else None,
                    "rng": checkpoint.gather_rng_states(),  # a collective: not under the next `if`
                }
                if world.is_rank0:
                    checkpoint.save(output / "checkpoints", step, model, state)
            if stop:
                break

        check_equal_weights(results, model)
        lengths, part = train_set.lengths, sampler.global_order()[: sampler.position]
        expected = int(sampler.epoch * lengths.sum() + lengths[part].sum())
        results.check("tokens trained on, from step 1", trained_tokens, expected, 0, "each once")
        if last:
            expected = int(test_set.lengths.sum())
            results.check("test tokens counted", test_tokens, expected, 0, "each once")
            results.metrics["test_loss"] = test_loss
        results.metrics |= {
            "final_loss": loss,
            "step_time_ms": timer.median_ms(),
            "tokens_per_second": speed * time_ms / timer.median_ms(),
            "mfu": usage and usage * time_ms / timer.median_ms(),
            "peak_memory_gib": measure.peak_memory_gib(device),
        }
        if output and world.is_rank0:
            results.write(output)
        end = "trained to the end" if last else f"asked to stop, {'' if output else 'not '}saved"
        return console.verdict(results, f"loss {loss:.4f} after step {step}, {end}")


if __name__ == "__main__":
    runtime.run(main)
