"""Training utilities that the templates share: schedule, stop signal, log."""

import argparse
import contextlib
import json
import math
import resource
import signal
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.profiler import profile, tensorboard_trace_handler

from dist_common.cli import UsageError
from dist_common.runtime import gather

GIB = 2**30
# Peak TFLOP/s in 16 bits without sparsity. Source: data sheets.
PEAK_TFLOPS = {"H100": 989, "H200": 989, "B200": 2250, "A100": 312, "MI300X": 1307}
SAME_RUN = ("data", "seq_len", "seed", "preset")  # a resumed run may not change these
MAY_CHANGE = (
    "global_batch_size",
    "max_steps",
    "lr",
    "warmup_steps",
    "max_grad_norm",
    "precision",
)


def build_optimizer(model, args):
    """Return AdamW on the weights of a model, or on this rank's shards of them."""
    return torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )


def lr_at(step, args):
    """Return the rate of a step, counted from 1: warmup, then cosine to a tenth."""
    if step <= args.warmup_steps:
        return args.lr * step / args.warmup_steps
    progress = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, progress)))


def set_lr(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr


def every(step, interval, last_step):
    """Say whether something is due that happens every `interval` steps and at the end.

    An interval of 0 is never.
    """
    return interval > 0 and (step % interval == 0 or step == last_step)


def settle_batch_size(args, run, micro_batches=1):
    """Divide the global batch over ranks and micro-batches, and print how.

    Without --global-batch-size each rank gets `micro_batches`. It sets
    args.num_micro_batches of each rank, and reduces args.micro_batch_size to the
    sequences that a rank gets.
    """
    size = args.micro_batch_size
    if args.global_batch_size is None:
        args.global_batch_size = size * micro_batches * run.world_size
    share = -(-args.global_batch_size // run.world_size)
    size = args.micro_batch_size = min(size, share)
    args.num_micro_batches = -(-share // size)
    line = (
        f"global batch {args.global_batch_size} = {size} per micro-batch x "
        f"{args.num_micro_batches} micro-batches x {run.world_size} ranks"
    )
    if size * args.num_micro_batches * run.world_size > args.global_batch_size:
        line += ", some of them not full"
    run.print0(line)


def compare_settings(args, run, saved):
    """Print what differs from the checkpoint's run; keep its global batch size.

    Raises: UsageError when the data or the model are others.
    """
    old = saved["settings"]
    args.global_batch_size = args.global_batch_size or old["global_batch_size"]
    for name, value in settings_of(args).items():
        if value == old[name]:
            continue
        change = f"{name} {old[name]} -> {value}"
        if name in SAME_RUN:
            raise UsageError(
                f"{change}: the run cannot continue on other data or with another model"
            )
        run.print0(f"changed since the checkpoint: {change}")
    step = saved["step"] + 1
    old_lr = lr_at(step, argparse.Namespace(**old))
    new_lr = lr_at(step, args)
    if old_lr != new_lr:
        run.print0(
            f"warning: the learning rate of step {step} changes from {old_lr:.2g} "
            f"to {new_lr:.2g}"
        )


def settings_of(args):
    """Return the flags that the weights depend on, for a checkpoint."""
    return {name: getattr(args, name) for name in SAME_RUN + MAY_CHANGE}


class StopSignal:
    """Notices SIGTERM, SIGUSR1 and SIGINT, which schedulers send before they end a job.

    A rank must not stop alone: the others would hang in the next collective. So all
    ranks agree, every step, on a gloo group that no GPU work waits for.
    """

    def __init__(self, group):
        self.group = group
        self.received = False
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self.handle)

    def handle(self, number, frame):
        self.received = True

    def requested(self):
        """Return True on every rank if any rank was asked to stop. A collective."""
        flag = torch.tensor([int(self.received)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flag.item())


class Log:
    """Times steps, prints a line every few steps, appends all to metrics.jsonl.

    A resumed run repeats the steps since its checkpoint: a step's last line counts.
    Losses stay on the device until a line is due: reading them makes the host wait.
    """

    def __init__(
        self, run, args, first_step, flops_per_token=0.0, counter=None, unit="tok/s"
    ):
        """`counter` is a CollectiveCounter, or None; it counts the second step.

        `unit` is the unit of the speed: the targets that the loss counts, per second.
        """
        self.run = run
        self.args = args
        self.first_step = first_step
        self.flops_per_token = flops_per_token
        self.counter = counter
        self.unit = unit
        self.unread = []
        self.losses = {}  # by step
        self.norms = {}
        self.tests = {}
        self.num_tokens = 0.0  # of the last step
        self.times_ms = []  # of each step of this process, without what is in between
        self.window_s = 0.0  # of the unread steps
        self.file = None
        self.tensorboard = None
        if args.output_dir and run.rank == 0:
            self.file = (args.output_dir / "metrics.jsonl").open("a", buffering=1)
            if args.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                folder = args.output_dir / "tensorboard"
                self.tensorboard = SummaryWriter(folder, purge_step=first_step)

    @contextlib.contextmanager
    def step(self, step):
        """Time a step, without evaluation and saving; count its collectives once."""
        with contextlib.ExitStack() as stack:
            # Not the first step, which also sets things up.
            if self.counter and step == self.first_step + 1 and not self.args.compile:
                stack.enter_context(self.counter)
            if step == self.args.profile:  # writes a trace of this rank
                folder = str(self.args.output_dir / "profile")
                write = tensorboard_trace_handler(folder, f"rank{self.run.rank}")
                stack.enter_context(profile(on_trace_ready=write))
            started = time.perf_counter()
            yield
            self.window_s += time.perf_counter() - started

    def add(self, step, loss_sum, num_tokens, grad_norm):
        """Keep the results of a step; print when a line is due.

        loss_sum is this rank's; num_tokens and grad_norm cover all ranks.
        """
        self.unread.append((step, loss_sum.detach(), num_tokens, grad_norm))
        if step % self.args.log_every == 0 or step == self.args.max_steps:
            self.flush()

    def flush(self):
        """Read, print and write the steps since the last line. A collective.

        Raises: FloatingPointError on all ranks if a loss or a norm is not finite.
        """
        if not self.unread:
            return
        started = time.perf_counter()
        sums = torch.stack([loss_sum.double() for _, loss_sum, _, _ in self.unread])
        dist.all_reduce(sums)
        self.window_s += time.perf_counter() - started
        time_ms = self.window_s * 1e3 / len(self.unread)
        for (step, _, num_tokens, norm), total in zip(
            self.unread, sums.tolist(), strict=True
        ):
            self.num_tokens = float(num_tokens)
            loss = self.losses[step] = total / self.num_tokens
            norm = self.norms[step] = float(norm)
            # In float16 a norm may be infinite: the loss scaler skips such a step.
            may_overflow = self.args.precision == "16-mixed"
            if not math.isfinite(loss if may_overflow else loss + norm):
                raise FloatingPointError(
                    f"stopped: in step {step} the loss is {loss:.4g}, the gradient "
                    f"norm {norm:.4g}: try a lower --lr, or look at the data"
                )
            self.times_ms.append(time_ms)
            speed = self.num_tokens / time_ms * 1e3
            self.write(
                step,
                loss=loss,
                grad_norm=norm,
                lr=lr_at(step, self.args),
                tokens_per_second=speed,
            )
        line = (
            f"step {step} | loss {loss:.4f} | {time_ms:.1f} ms | {speed:,.0f} "
            f"{self.unit} | mem {peak_memory_gib(self.run.device):.2f} GiB"
        )
        if mfu := self.mfu(speed):
            line += f" | mfu {mfu:.1%}"
        self.run.print0(line)
        self.unread.clear()
        self.window_s = 0.0

    def write(self, step, **values):
        """Write numbers to metrics.jsonl and TensorBoard."""
        if self.file:
            self.file.write(json.dumps({"step": step, **values}) + "\n")
        if self.tensorboard:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)

    def evaluation(self, step, batches, names=("test_loss",)):
        """Print and write the means of an evaluation. A collective.

        `batches` yields this rank's number of targets and the named sums over them,
        such as the loss, for each batch.
        """
        self.flush()
        sums = sum(torch.stack(batch).double() for batch in batches)
        dist.all_reduce(sums)
        means = (sums[1:] / sums[0]).tolist()
        self.tests = dict(zip(names, means, strict=True))
        self.write(step, **self.tests)
        words = [f"{name.replace('_', ' ')} {v:.4f}" for name, v in self.tests.items()]
        self.run.print0(f"step {step} | {' | '.join(words)}")

    def summary(self):
        """Return in words how the run ended."""
        if not self.losses:
            done = f"the checkpoint has step {self.first_step - 1}"
            return f"nothing to do: {done}, --max-steps is {self.args.max_steps}"
        last = max(self.losses)
        end = "stopped" if last < self.args.max_steps else "trained to the end"
        return f"loss {self.losses[last]:.4f} after step {last}, {end}"

    def mfu(self, tokens_per_second):
        """Return the share of the GPU's peak in 16 bits; None if it is unknown."""
        if self.run.device.type == "cuda" and self.args.precision != "32-true":
            gpu = torch.cuda.get_device_name(self.run.device)
            for name, tflops in PEAK_TFLOPS.items():
                if name in gpu:
                    speed = tokens_per_second / self.run.world_size
                    return speed * self.flops_per_token / (tflops * 1e12) or None
        return None

    def finish(self):
        """Read the last steps and return the metrics of results.json. A collective."""
        self.flush()
        if self.tensorboard:
            self.tensorboard.close()
        if not self.losses:  # a resumed run had nothing left to do
            return {}
        peaks = gather(peak_memory_gib(self.run.device), self.run.cpu_group)
        step_time_ms = statistics.median(self.times_ms[5:] or self.times_ms)
        speed = self.num_tokens / step_time_ms * 1e3
        return {
            **self.tests,
            "final_loss": self.losses[max(self.losses)],
            "step_time_ms": step_time_ms,
            "step_times_ms": [round(ms, 3) for ms in self.times_ms[-1000:]],
            "tokens_per_second": speed,
            "tokens_per_step": self.num_tokens,
            "mfu": self.mfu(speed),
            "peak_memory_gib": max(peaks),
            "peak_memory_gib_per_rank": peaks,
            **(self.counter.metrics() if self.counter and self.counter.calls else {}),
        }


def peak_memory_gib(device):
    """Return the peak memory in GiB: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
