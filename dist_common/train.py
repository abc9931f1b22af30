"""What the training loops of the templates share: schedule, stop signal, log."""

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
from torch.distributed.tensor import DTensor

from dist_common.cli import UsageError
from dist_common.runtime import gather

GIB = 2**30
# Peak TFLOP/s without sparsity, in 16 bits and in float32. Source: data sheets.
PEAK_TFLOPS = {
    "H100": (989.4, 67.0),
    "H200": (989.4, 67.0),
    "B200": (2250.0, 75.0),
    "A100": (312.0, 19.5),
    "MI300X": (1307.4, 163.4),
}
SAME_RUN = ("data", "seq_len", "seed", "preset")  # a resumed run may not change these


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


def settle_batch_size(args, run, saved=None):
    """Set --global-batch-size if it is not given; print how it is divided.

    A resumed run keeps the batch of its checkpoint on any number of ranks.
    """
    if args.global_batch_size is None and saved:
        args.global_batch_size = saved["settings"]["global_batch_size"]
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * run.world_size
    share = -(-args.global_batch_size // run.world_size)
    micro_batches = -(-share // args.micro_batch_size)
    rows = min(share, args.micro_batch_size)
    line = (
        f"global batch {args.global_batch_size} = {rows} per micro-batch x "
        f"{micro_batches} micro-batches x {run.world_size} ranks"
    )
    if rows * micro_batches * run.world_size > args.global_batch_size:
        line += ", some of them smaller"
    run.print0(line)


def compare_settings(args, run, saved, next_step):
    """Print what differs from the checkpoint's run.

    Raises: UsageError when the data or the model are others.
    """
    now = settings_of(args)
    for name in SAME_RUN:
        if now[name] != saved[name]:
            own_text = name == "data" and hasattr(args, "text_file")
            flag = "text-file" if own_text else name.replace("_", "-")
            raise UsageError(
                f"--{flag} is {now[name]}, the checkpoint's run had {saved[name]}: "
                "the run cannot continue on other data or with another model"
            )
    changed = [name for name in now if now[name] != saved.get(name)]
    for name in changed:
        run.print0(f"changed since the checkpoint: {name} {saved[name]} -> {now[name]}")
    old_lr = lr_at(next_step, type(args)(**saved))
    new_lr = lr_at(next_step, args)
    if old_lr != new_lr:
        run.print0(
            f"warning: the learning rate of step {next_step} changes from {old_lr:.2g} "
            f"to {new_lr:.2g}"
        )


def settings_of(args):
    """Return the flags that the weights depend on, for a checkpoint."""
    names = (*SAME_RUN, "global_batch_size", "max_steps", "lr", "warmup_steps")
    names += ("max_grad_norm", "precision")
    return {name: getattr(args, name) for name in names}


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
    """Times steps, prints a line every few steps, writes all to metrics.jsonl.

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
        self.cpu_times_ms = []
        self.window_s = 0.0  # of the unread steps
        self.window_cpu_s = 0.0
        self.profiler = None
        self.file = None
        self.tensorboard = None
        if args.output_dir and run.rank == 0:
            self.open(args.output_dir)

    def open(self, folder):
        """Open metrics.jsonl; drop what an earlier run wrote after its checkpoint."""
        path = folder / "metrics.jsonl"
        kept = []
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError):  # the last line of a killed run
                if json.loads(line)["step"] < self.first_step:
                    kept.append(f"{line}\n")
        path.write_text("".join(kept))
        self.file = path.open("a", buffering=1)
        if self.args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            folder = folder / "tensorboard"
            self.tensorboard = SummaryWriter(folder, purge_step=self.first_step)

    @contextlib.contextmanager
    def step(self, step):
        """Time a step, without evaluation and saving; count its collectives once."""
        first, last = self.args.profile or (0, 0)
        if first <= step <= last and self.profiler is None:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        counted = step == self.first_step + 1  # the first step sets things up
        count = self.counter and counted and not self.args.compile
        started = time.perf_counter()
        cpu_started = time.process_time()
        span = torch.profiler.record_function(f"step {step}")
        with self.counter if count else contextlib.nullcontext(), span:
            yield
        self.window_s += time.perf_counter() - started
        self.window_cpu_s += time.process_time() - cpu_started
        if step == last:
            self.write_profile()

    def write_profile(self):
        """Write the trace of this rank, for perfetto.dev."""
        if self.profiler:
            self.profiler.stop()
            folder = self.args.output_dir / "profile"
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"trace-rank{self.run.rank}.json"
            self.profiler.export_chrome_trace(str(path))
            self.profiler = None

    def add(self, step, loss_sum, num_tokens, grad_norm):
        """Keep the results of a step; print when a line is due.

        loss_sum is this rank's, num_tokens and grad_norm are those of all ranks.
        """
        norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
        self.unread.append((step, loss_sum.detach(), num_tokens, norm))
        if step % self.args.log_every == 0 or step == self.args.max_steps:
            self.flush()

    def flush(self):
        """Read, print and write the steps since the last line. A collective.

        Raises: FloatingPointError on all ranks if a loss or a norm is not finite.
        """
        if not self.unread:
            return
        started = time.perf_counter()
        own = torch.stack([loss_sum.double() for _, loss_sum, _, _ in self.unread])
        sums = own.clone()
        dist.all_reduce(sums)
        window_s = self.window_s + time.perf_counter() - started
        time_ms = window_s * 1e3 / len(self.unread)
        cpu_time_ms = self.window_cpu_s * 1e3 / len(self.unread)
        for (step, own_sum, num_tokens, norm), total in zip(
            self.unread, sums.tolist(), strict=True
        ):
            self.num_tokens = float(num_tokens)
            self.losses[step] = total / self.num_tokens
            self.norms[step] = float(norm)
            self.require_finite(step, own_sum)
            self.times_ms.append(time_ms)
            self.cpu_times_ms.append(cpu_time_ms)
            speed = self.num_tokens / time_ms * 1e3
            self.write(
                step,
                loss=self.losses[step],
                grad_norm=self.norms[step],
                lr=lr_at(step, self.args),
                tokens_per_second=speed,
            )
        line = f"step {step} | loss {self.losses[step]:.4f} | {time_ms:.1f} ms"
        line += f" | {speed:,.0f} {self.unit}"
        line += f" | mem {peak_memory_gib(self.run.device):.2f} GiB"
        if mfu := self.mfu(speed):
            line += f" | mfu {mfu:.1%}"
        self.run.print0(line)
        self.unread.clear()
        self.window_s = self.window_cpu_s = 0.0

    def require_finite(self, step, own_sum):
        """Stop all ranks if a number is not finite, and name the rank where it began.

        In float16 a norm may be infinite: the loss scaler skips such a step.
        """
        loss, norm = self.losses[step], self.norms[step]
        may_overflow = self.args.precision == "16-mixed"
        if math.isfinite(loss) and (may_overflow or math.isfinite(norm)):
            return
        finite = gather(math.isfinite(own_sum), self.run.cpu_group)
        where = f" on rank {finite.index(False)}" if False in finite else ""
        raise FloatingPointError(
            f"stopped: in step {step} the loss is {loss:.4g}{where}, gradient norm "
            f"{norm:.4g}: try a lower --lr, or look at that rank's data"
        )

    def write(self, step, **values):
        """Write numbers to metrics.jsonl and TensorBoard."""
        if self.file:
            self.file.write(json.dumps({"step": step, **values}) + "\n")
        if self.tensorboard:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)

    def evaluation(self, step, numbers):
        """Print and write what an evaluation measured, by name."""
        self.flush()
        self.tests = numbers
        self.write(step, **numbers)
        words = [f"{name.replace('_', ' ')} {v:.4f}" for name, v in numbers.items()]
        self.run.print0(f"step {step} | {' | '.join(words)}")

    def summary(self):
        """Return in words how the run ended."""
        if not self.losses:
            done = f"the checkpoint has step {self.first_step - 1}"
            return f"nothing to do: {done}, --max-steps is {self.args.max_steps}"
        last = max(self.losses)
        stopped = last < self.args.max_steps  # a stopped run saves, whatever is due
        end = "stopped" if stopped else "trained to the end"
        saves = self.args.output_dir and (stopped or self.args.save_every)
        saved = "" if saves else ", not saved"
        return f"loss {self.losses[last]:.4f} after step {last}, {end}{saved}"

    def mfu(self, tokens_per_second):
        """Return the share of the GPU's peak that the model uses; None if unknown."""
        if self.run.device.type != "cuda":
            return None
        gpu = torch.cuda.get_device_name(self.run.device)
        for name, (peak_16_bit, peak_float32) in PEAK_TFLOPS.items():
            if name in gpu:
                is_float32 = self.args.precision == "32-true"
                peak = (peak_float32 if is_float32 else peak_16_bit) * 1e12
                flops = tokens_per_second * self.flops_per_token
                return flops / self.run.world_size / peak or None
        return None

    def finish(self):
        """Read the last steps and return the metrics of results.json. A collective."""
        self.flush()
        self.write_profile()  # of a run that was stopped earlier
        if self.file:
            self.file.close()
        if self.tensorboard:
            self.tensorboard.close()
        if not self.losses:  # a resumed run had nothing left to do
            return {}
        peaks = gather(peak_memory_gib(self.run.device), self.run.cpu_group)
        warmup = min(5, len(self.times_ms) - 1)
        step_time_ms = statistics.median(self.times_ms[warmup:])
        speed = self.num_tokens / step_time_ms * 1e3
        return {
            **self.tests,
            "final_loss": self.losses[max(self.losses)],
            "step_time_ms": step_time_ms,
            "step_times_ms": [round(ms, 3) for ms in self.times_ms[-1000:]],
            "cpu_time_per_step_ms": statistics.fmean(self.cpu_times_ms[warmup:]),
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
