"""What is the same in every port: flags, weights, batches, optimizer, loss, and what is recorded.

The framework's own spelling stands in the port.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, Subset

from legacy_common import cli, data, job, measure, models, runtime
from legacy_common.report import Report

MAX_NORM = 1.0  # longer gradients are clipped, as the template does
LOOK_EVERY = 10  # steps between two looks at the losses, as the template does


def parse_args(doc: str) -> argparse.Namespace:
    """Read the flags of the one job; --device is then cpu or cuda, --output-dir absolute."""
    parser = cli.ArgumentParser(doc)
    job.add_task_flags(parser, models.PRESETS)
    parser.add_argument("--world-size", type=cli.positive_int, default=2,
        help="ranks that there must be, started by the framework or by torchrun (2)")  # fmt: skip
    args = parser.parse_args()
    if args.precision not in (None, "32-true"):
        parser.error("--precision must be 32-true: the losses of all ports are compared")
    args.precision = "32-true"
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.output_dir:  # some frameworks change the working directory
        args.output_dir = str(Path(args.output_dir).absolute())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return args


def pick_device(args: argparse.Namespace, local_rank: int) -> torch.device:
    """Return this rank's device, and make its GPU the current one."""
    if args.device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def build_model(args: argparse.Namespace) -> models.Transformer:
    """Return the model, on every rank with the weights that ddp_training.py starts from."""
    runtime.seed_everything(args.seed)
    return models.Transformer(models.preset(args.preset, args.seq_len))


def build_optimizer(model: torch.nn.Module, args: argparse.Namespace) -> tuple:
    """Return AdamW, and its schedule, which takes one step after each of the optimizer's."""
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.95), weight_decay=0.1)
    schedule = LambdaLR(optimizer, lambda done: job.lr_at(done + 1, args) / args.lr)
    return optimizer, schedule


def build_dataset(args: argparse.Namespace) -> Dataset:
    """Return the job's sequences, shuffled: dealt in turn to --world-size ranks, its batches.

    Shapes: an item is (inputs (T,), targets (T,)). Raises: UsageError for more than an epoch, or
    more than one micro-batch per step.
    """
    train_set, _, _ = data.job_text(args, args.world_size)
    data.settle_batch_sizes(args, args.world_size)
    if args.grad_accum_steps > 1:
        raise cli.UsageError("the ports take one micro-batch per step: no --grad-accum-steps")
    order = data.ShardedSampler(len(train_set), 0, 1, args.seed).global_order()
    needed = args.max_steps * args.global_batch_size
    if needed > len(order):
        raise cli.UsageError(
            f"--max-steps {args.max_steps} needs {needed} sequences, more than the {len(order)} of "
            "one epoch: use fewer steps"
        )
    return Subset(train_set, order[:needed].tolist())


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of a micro-batch. Shapes: inputs and targets (B, T)."""
    logits = model(inputs)  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the mean over all ranks, for frameworks whose ranks form PyTorch's process group."""
    dist.all_reduce(values)
    return values / dist.get_world_size()


class Record:
    """What a port's run leaves: losses and times, in results.json of --output-dir if there is one.

    `rank` and `world_size` are what the framework says; `framework` is the name of the port's file.
    """

    def __init__(self, framework: str, args: argparse.Namespace, rank: int, world_size: int):
        device = torch.device(args.device)
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else framework
        world = runtime.World(rank, rank, world_size, world_size, launcher)
        self.args = args
        self.report = Report(f"benchmarks/frameworks/{framework}.py", args, world, device)
        self.report.start()
        self.unread: list[torch.Tensor] = []
        self.losses: list[float] = []
        self.timer = measure.StepTimer(device, warmup=LOOK_EVERY).start()

    def step(self, loss: torch.Tensor) -> None:
        """Count a step and keep this rank's loss; read them now and then, as a log would."""
        self.unread.append(loss.detach())
        if len(self.unread) == LOOK_EVERY:
            self.read()

    def read(self) -> None:
        """Wait for the losses; the time since the last look is that of their steps."""
        self.losses += torch.stack(self.unread).tolist()
        self.timer.lap(len(self.unread))
        self.unread = []

    def finish(self, mean: Callable[[torch.Tensor], torch.Tensor]) -> int:
        """Write results.json; return the port's exit code: 1 for another world size than asked for.

        `mean` takes a tensor's mean over all ranks, as the framework does it.
        """
        if self.unread:
            self.read()
        times = self.timer.steps_ms
        own = torch.tensor([*self.losses, *times, self.timer.cpu_ms()], device=self.report.device)
        whole = mean(own).tolist()
        steps = len(self.losses)
        self.report.metrics |= {
            "final_loss": whole[steps - 1],
            "losses": whole[:steps],
            "step_times_ms": whole[steps:-1],
            "step_time_ms": self.timer.median_ms(),
            "cpu_time_per_step_ms": whole[-1],  # mean over ranks
            "peak_memory_gib": measure.peak_memory_gib(self.report.device),
        }
        found, asked = self.report.world.world_size, self.args.world_size
        self.report.check("world size", found, asked, 0, "--world-size")
        self.report.check("steps", steps, self.args.max_steps, 0, "--max-steps")
        return self.report.finish(f"loss {whole[steps - 1]:.4f} after step {steps}")
