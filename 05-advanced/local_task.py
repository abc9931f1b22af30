"""What local_sgd.py trains: a small transformer, each rank on its own part of the text."""

import math
from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import Subset

from dist_common import data, measure, models, runtime
from dist_common.cli import UsageError

HELD_OUT = 20  # every 20th sequence of the text is for testing


class Task:
    """Predict the next byte of Python's library: each rank trains on other modules of it."""

    def __init__(self, args, world, device) -> None:
        self.args, self.device, self.ranks, self.rank = args, device, world.world_size, world.rank
        text = data.load_text(max_bytes=1_000_000)
        self.sequences = data.Sequences(text, args.seq_len)
        total, needed = len(self.sequences), HELD_OUT * self.ranks
        if total < needed:
            few = f"--seq-len {args.seq_len} cuts the text into {total} sequences"
            raise UsageError(f"{few}, {self.ranks} ranks need {needed}: take a smaller one")
        self.config = models.TransformerConfig(256, 32, 1, 2, 1, 88, args.seq_len)
        numbers = torch.arange(len(self.sequences))
        test = numbers % HELD_OUT == 0
        self.shards = numbers[~test].tensor_split(self.ranks)
        self.test = Subset(self.sequences, numbers[test][::6].tolist())
        most = min(len(shard) for shard in self.shards)
        if args.micro_batch_size > most:
            raise UsageError(f"--micro-batch-size must be at most {most}, the sequences of a rank")
        shard = f"{most:,} sequences of its own"
        self.says = f"{self.config.num_parameters():,} weights; each rank has {shard}"

    def build(self, setting, inner: str = "AdamW", eps: float = 1e-8):
        """Return the same model on every rank, and an inner optimizer for it."""
        runtime.seed_everything(self.args.seed)
        model = models.Transformer(self.config).to(self.device)
        if inner == "SGD":
            return model, torch.optim.SGD(model.parameters(), lr=0.5)
        # A k times larger batch has less noise: AdamW bears a learning rate sqrt(k) times larger.
        lr = self.args.lr * math.sqrt(setting.accumulate)
        return model, torch.optim.AdamW(model.parameters(), lr=lr, eps=eps)

    def batches(self, steps: int, setting, rank: int | None = None):
        """Yield a rank's batches, from its own part of the text. Shapes: (B, T) twice."""
        rank = self.rank if rank is None else rank
        draw = torch.Generator().manual_seed(1000 * self.args.seed + rank)
        shard = self.shards[rank]
        shuffled = Subset(self.sequences, shard[torch.randperm(len(shard), generator=draw)])
        size = self.args.micro_batch_size * setting.accumulate
        return data.batches_of(shuffled, steps, size, 0, size, self.device)

    @torch.no_grad()
    def held_out_loss(self, model) -> float:
        """Return the loss on text that no rank trained on, the mean over the ranks' models."""
        count = len(self.test)
        tokens, targets = next(data.batches_of(self.test, 1, count, 0, count, self.device))
        ignored = {"ignore_index": data.IGNORED}
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), **ignored)
        dist.all_reduce(loss)
        return loss.item() / self.ranks


def warmup_and_decay(optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Raise the learning rate over a tenth of the steps, then lower it along a cosine to 0."""
    warmup = max(1, steps // 10)

    def factor(step: int) -> float:
        rest = max(0, step - warmup) / max(1, steps - warmup)
        return min(1, (step + 1) / warmup) * (1 + math.cos(math.pi * rest)) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def time_rounds(batches: Iterator, steps: int, timer: measure.StepTimer) -> Iterator:
    """Pass batches on, and time each `steps` of them, until the next batch is asked for."""
    while taken := list(islice(batches, steps)):
        with timer:
            yield from taken
