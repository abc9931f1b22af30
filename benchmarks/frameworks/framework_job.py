"""The parts that all ports share: flags, weights, batches, optimizer, loss, record.

A port contains only the lines of its framework.
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Subset

from dist_common import cli
from dist_common.data import global_order, load_sequences
from dist_common.model import PRESETS, build_transformer, load_config
from dist_common.train import lr_at

MAX_NORM = 1.0  # gradients are clipped above it, as in ddp_training.py
READ_EVERY = 10  # steps: reading a loss makes the host wait for the device


def run(train, doc):
    """Run a port's train(args) and exit with its code."""
    cli.run(lambda: train(parse_args(doc)))


def parse_args(doc):
    """Read the flags of the one job; --device is then cpu or cuda."""
    parser = cli.ArgumentParser(doc)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="tiny", help="the model's shape (tiny)")
    add("--seq-len", type=cli.positive_int, default=128, help="tokens (128)")
    add("--micro-batch-size", type=cli.positive_int, default=8, help="per rank (8)")
    add("--max-steps", type=cli.positive_int, default=60, help="optimizer steps (60)")
    add("--lr", type=cli.positive_float, default=2e-3, help="peak rate (0.002)")
    add("--warmup-steps", type=cli.whole_number, default=10, help="linear (10)")
    add("--world-size", type=cli.positive_int, default=2, help="ranks (2)")
    parser.set_defaults(tokens=None, text_file=None)
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.output_dir:  # some frameworks change the working directory
        args.output_dir = str(Path(args.output_dir).absolute())
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    return args


def pick_device(args, local_rank):
    """Return this rank's device, and make its GPU the current one."""
    if args.device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def build_model(args):
    """Return the model with the first weights of ddp_training.py, on the CPU."""
    config = load_config(args.preset, args.seq_len, PRESETS[args.preset].vocab_size)
    return build_transformer(config, args.seed, "cpu")


def build_optimizer(model, args):
    """Return AdamW and its schedule, which steps once after each optimizer step."""
    optimizer = torch.optim.AdamW(
        model.parameters(), args.lr, (0.9, 0.95), weight_decay=0.1
    )
    schedule = LambdaLR(optimizer, lambda done: lr_at(done + 1, args) / args.lr)
    return optimizer, schedule


def build_dataset(args):
    """Return the job's sequences in ddp_training.py's order, for all ranks together.

    Shapes: item -> inputs (T,), targets (T,). Raises: UsageError beyond one epoch.
    """
    train_set, *_ = load_sequences(args)
    needed = args.max_steps * args.micro_batch_size * args.world_size
    if needed > len(train_set):
        raise cli.UsageError(
            f"--max-steps {args.max_steps} needs {needed} sequences, one epoch has "
            f"{len(train_set)}: use fewer steps"
        )
    order = list(global_order(len(train_set), args.seed, epoch=0, start=0))
    return Subset(train_set, order[:needed])


def loss_of(model, inputs, targets):
    """Return the mean cross-entropy. Shapes: inputs and targets (B, T)."""
    logits = model(inputs)  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def mean_over_ranks(values):
    """Return the mean over the ranks of PyTorch's process group."""
    dist.all_reduce(values)
    return values / dist.get_world_size()


class Record:
    """Losses and times of a port's run, for results.json.

    `rank` and `world_size` come from the framework.
    """

    def __init__(self, args, rank, world_size):
        self.args = args
        self.rank = rank
        self.world_size = world_size
        self.unread = []
        self.losses = []
        self.timed_from = None  # wall clock and CPU time after the first reading
        self.seconds = 0.0  # of all steps
        self.started = time.perf_counter()

    def step(self, loss):
        """Count a step; read the losses every few steps, as a log would."""
        self.unread.append(loss.detach())
        if len(self.unread) == READ_EVERY:
            self.read()

    def read(self):
        if self.unread:
            self.losses += torch.stack(self.unread).tolist()
            self.unread = []
        self.seconds = time.perf_counter() - self.started
        if self.timed_from is None:
            self.timed_from = (len(self.losses), self.seconds, time.process_time())

    def finish(self, mean):
        """Write results.json on rank 0; return the exit code.

        `mean` is the framework's mean of a tensor over all ranks. Returns: 1 if the
        number of ranks or steps differs from the flags, else 0.
        """
        self.read()
        steps, seconds, cpu_s = self.timed_from
        timed = max(1, len(self.losses) - steps)
        cpu_ms = 1e3 * (time.process_time() - cpu_s) / timed
        measured = torch.tensor([*self.losses, cpu_ms], device=self.args.device)
        *losses, cpu_ms = mean(measured).tolist()
        if self.rank == 0:
            content = {
                "world_size": self.world_size,
                "losses": losses,
                "cpu_ms_per_step": cpu_ms,
                "step_time_ms": 1e3 * (self.seconds - seconds) / timed,
                "seconds_of_steps": self.seconds,
            }
            print(
                f"{self.world_size} ranks, {len(losses)} steps, loss {losses[-1]:.4f}"
            )
            if self.args.output_dir:
                folder = Path(self.args.output_dir)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "results.json").write_text(json.dumps(content) + "\n")
        asked = (self.args.world_size, self.args.max_steps)
        return int((self.world_size, len(self.losses)) != asked)
