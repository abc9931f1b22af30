"""Text without a download, and how it is dealt to ranks: the batches of the one job."""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import signal
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

from dist_common.cli import UsageError

IGNORED = -100  # a target that no loss counts: the default ignore_index of cross_entropy


def load_text(text_file: str | None = None, max_bytes: int = 4_000_000) -> torch.Tensor:
    """Load text as bytes: a file, or the sources of Python's standard library, in order of name.

    Shape: (N,) uint8; a byte is a token, so the vocabulary is 256. A file is read whole, of the
    sources the first max_bytes.

    Raises: UsageError when the file is missing, empty or unreadable.
    """
    if text_file is None:
        folder = Path(sysconfig.get_path("stdlib"))
        sources = sorted(folder.glob("*.py"))  # the modules themselves: 170 files, on every machine
        content = b"".join(path.read_bytes() for path in sources)[:max_bytes]
    else:
        try:
            content = Path(text_file).read_bytes()
        except OSError as error:
            raise UsageError(f"--text-file {text_file}: {error.strerror}") from error
        if not content:
            raise UsageError(f"--text-file {text_file} is empty")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class Sequences(Dataset):
    """Cut text into sequences of at most T tokens to read and, one further, as many to predict.

    Every sequence is full, unless `whole_lines` ends each one where a line of the text ends. Then
    they hold different numbers of tokens (`lengths`) and are filled up with targets of IGNORED.

    Shapes: an item is (inputs (T,), targets (T,)), int64; lengths is (number of sequences,).
    Raises: UsageError, which says `name`, when the text is shorter than one sequence for each of
    `world_size` ranks.
    """

    def __init__(
        self,
        text: torch.Tensor,
        seq_len: int,
        world_size: int = 1,
        whole_lines: bool = False,
        name: str = "text",
    ) -> None:
        self.text, self.seq_len = text, seq_len
        last = len(text) - 1  # a token to predict, with none behind it
        if whole_lines:
            content, bounds = text.numpy().tobytes(), [0]
            while bounds[-1] < last:
                start = bounds[-1]
                line_end = content.rfind(b"\n", start, start + seq_len) + 1
                bounds.append(min(line_end or start + seq_len, last))
            self.bounds = torch.tensor(bounds)
        else:
            self.bounds = torch.arange(0, last + 1, seq_len)
        self.lengths = self.bounds.diff()
        if len(self) < world_size:
            raise UsageError(
                f"the {name}'s {len(text)} bytes are fewer than one sequence of {seq_len} tokens "
                f"for each of {world_size} ranks: use a longer text or a smaller --seq-len"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = self.bounds[index], self.bounds[index + 1]
        piece = self.text[start : end + 1].long()
        missing = (0, self.seq_len - len(piece) + 1)
        return F.pad(piece[:-1], missing), F.pad(piece[1:], missing, value=IGNORED)


def batches_of(
    sequences: Dataset, steps: int, global_batch: int, first: int, count: int, device
) -> Iterator[list[torch.Tensor]]:
    """Yield a part of each step's global batch: `count` sequences from its `first` on, in order.

    What a rank trains on is (rank * count, count), what one process would is (0, global_batch).
    After the last sequence comes the first again.

    Shapes: inputs and targets, (count, T) each.
    """
    for start in range(first, first + steps * global_batch, global_batch):
        items = [sequences[place % len(sequences)] for place in range(start, start + count)]
        yield [torch.stack(part).to(device) for part in zip(*items, strict=True)]


class ShardedSampler(Sampler[int]):
    """Deal one seeded shuffle of a dataset to all ranks, and remember how far it got.

    Like torch's DistributedSampler, rank r gets every world_size-th index of an order that all
    ranks agree on, so step k sees the same global batch on any number of ranks. Unlike it, it
    resumes in the middle of an epoch, also on another number of ranks: `position` counts the
    samples of this epoch that all ranks together have trained on.

    A tail that does not fill all ranks is left out, so that every rank takes as many steps.

    Raises: UsageError when there are fewer samples than ranks.
    """

    def __init__(self, num_samples: int, rank: int, world_size: int, seed: int = 0) -> None:
        if num_samples < world_size:
            raise UsageError(
                f"{num_samples} samples cannot be dealt to {world_size} ranks: start fewer ranks"
            )
        self.num_samples, self.rank, self.world_size = num_samples, rank, world_size
        self.seed, self.epoch, self.position = seed, 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; each epoch has its own order. Keeps a resumed position."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def advance(self, global_samples: int) -> None:
        """Count samples as trained on. The loop calls this, since a loader reads ahead of it."""
        self.position += global_samples

    def global_order(self) -> torch.Tensor:
        """Return this epoch's order of all samples, the same on every rank. Shape: (N,)."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.num_samples, generator=generator)

    def __len__(self) -> int:
        return (self.num_samples - self.position) // self.world_size

    def __iter__(self) -> Iterator[int]:
        rest = self.global_order()[self.position :]
        return iter(rest[self.rank :: self.world_size][: len(self)].tolist())

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint needs; the same on every rank."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken, on this sampler's own number of ranks."""
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]


def job_text(
    args: argparse.Namespace, ranks: int, whole_lines: bool = False
) -> tuple[Sequences, Sequences, str]:
    """Return the one job's training sequences, its test sequences and the text's checksum.

    The last twentieth of the text is held out to test on.
    Raises: UsageError as `load_text` and `Sequences` do.
    """
    text = load_text(args.text_file, max_bytes=1_000_000)
    cut = len(text) - len(text) // 20
    train, test = (
        Sequences(part, args.seq_len, ranks, whole_lines, name)
        for name, part in (("training text", text[:cut]), ("test text", text[cut:]))
    )
    return train, test, hashlib.sha256(text.numpy()).hexdigest()[:8]


def job_batches(
    sequences: Dataset, sampler: ShardedSampler, args: argparse.Namespace,
    num_workers: int = 0, pin_memory: bool = False,
) -> Iterator[list[Sequence[torch.Tensor]]]:  # fmt: skip
    """Yield each step's micro-batches on this rank, epoch after epoch.

    Any number of ranks sees the same global batches. The last one of an epoch may be smaller: then
    some micro-batches are short or empty, but every rank yields equally many, so no collective
    waits. The loop calls `sampler.advance`, since a loader reads ahead of it.

    Shapes: a micro-batch is inputs and targets, (micro_batch_size, T) each; rows that are not there
    have targets of IGNORED.
    """
    loader = DataLoader(
        sequences,
        batch_sampler=_MicroBatches(sampler, args),
        collate_fn=functools.partial(collate, args.micro_batch_size, args.seq_len),
        num_workers=num_workers,
        worker_init_fn=_ignore_sigterm,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # else each epoch would draw from the model's numbers
    )
    while True:
        batches = iter(loader)
        while step := list(itertools.islice(batches, args.grad_accum_steps)):
            yield step
        sampler.set_epoch(sampler.epoch + 1)


class _MicroBatches:
    """The indices of this rank's micro-batches, for one epoch from the sampler's position on."""

    def __init__(self, sampler: ShardedSampler, args: argparse.Namespace) -> None:
        self.sampler, self.args = sampler, args

    def __iter__(self) -> Iterator[list[int]]:
        rank, ranks, size = self.sampler.rank, self.sampler.world_size, self.args.micro_batch_size
        order = self.sampler.global_order()
        for start in range(self.sampler.position, len(order), self.args.global_batch_size):
            mine = order[start : start + self.args.global_batch_size][rank::ranks].tolist()
            for number in range(self.args.grad_accum_steps):
                yield mine[number * size : (number + 1) * size]


def collate(rows: int, seq_len: int, items: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack at most `rows` sequences, and fill up with rows that no loss counts. Shapes: (B, T)."""
    inputs = torch.zeros(rows, seq_len, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED)
    for row, item in enumerate(items):
        inputs[row], targets[row] = item
    return inputs, targets


def _ignore_sigterm(worker: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # launchers send it to data workers too
