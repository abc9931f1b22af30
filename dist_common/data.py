"""Real data without a download, and the two ways to deal it to ranks."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import Dataset, Sampler, TensorDataset

from dist_common.runtime import UsageError

IGNORED = -100  # a target that no loss counts: the default ignore_index of cross_entropy


@dataclass(frozen=True)
class Images:
    """Standardised, labelled images. Shapes: images (N, 1, H, W) float32, labels (N,) int64."""

    name: str
    train: TensorDataset
    test: TensorDataset

    def describe(self) -> str:
        """Say in a few words what this is."""
        return f"{self.name}: {len(self.train):,} to train on, {len(self.test):,} to test on"


def load_images(data_dir: str | None = None, download: bool = False) -> Images:
    """Load MNIST from `data_dir`, or without one the digits that need no file.

    Raises: UsageError as `load_mnist` does, and for a download without a folder.
    """
    if data_dir:
        return load_mnist(data_dir, download)
    if download:
        raise UsageError("--download needs --data-dir, the folder to fetch MNIST into")
    return load_digits()


def load_digits() -> Images:
    """Load the 1,797 handwritten digits (8 x 8 pixels) that scikit-learn carries: 1,437 + 360.

    Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.
    """
    from sklearn.datasets import load_digits as from_sklearn  # half a second that MNIST users save

    pixels, labels = from_sklearn(return_X_y=True)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8)  # from (N, 64), 0 to 16
    images = (images - 4.88) / 6.02  # mean and standard deviation of all pixels
    labels = torch.from_numpy(labels).long()
    # The same split whatever --seed is: a test set that moves cannot be compared.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return Images(
        "digits",
        TensorDataset(images[train], labels[train]),
        TensorDataset(images[test], labels[test]),
    )


def load_mnist(data_dir: str | Path, download: bool = False) -> Images:
    """Load MNIST (60,000 + 10,000, 28 x 28 pixels) from the folder that torchvision keeps it in.

    With `download`, one rank of each machine fetches what is missing there while the others wait;
    without it, nothing is ever fetched. Call it on every rank, after the process group exists.

    Raises: UsageError when the folder is none, holds no MNIST, or the download fails.
    """
    from torchvision.datasets import MNIST

    folder = Path(data_dir)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--data-dir {folder} is not a folder")
    if not folder.exists() and not download:
        raise UsageError(
            f"--data-dir {folder} does not exist; --download makes it and fetches MNIST"
        )
    if download:
        _download_in_turn(folder)
    try:
        parts = [MNIST(folder, train=train) for train in (True, False)]
    except (RuntimeError, OSError, ValueError) as error:
        raise UsageError(
            f"--data-dir {folder} holds no MNIST: add --download to fetch it ({error})"
        ) from error
    train, test = (
        TensorDataset((part.data.float().unsqueeze(1) - 33.3) / 78.6, part.targets)
        for part in parts  # mean and standard deviation of all training pixels
    )
    return Images("MNIST", train, test)


def _download_in_turn(folder: Path) -> None:
    from torchvision.datasets import MNIST

    rank, local_rank = dist.get_rank(), dist.get_node_local_rank(fallback_rank=0)
    # First rank 0, then the other machines: on a disk they share, these find it all there.
    for turn in (rank == 0, rank != 0 and local_rank == 0):
        if turn:
            try:
                MNIST(folder, download=True)
            except (RuntimeError, OSError) as error:
                raise UsageError(f"--download: MNIST cannot be fetched ({error})") from error
        dist.barrier()  # nobody reads while another rank writes


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


def evaluation_indices(num_samples: int, rank: int, world_size: int) -> torch.Tensor:
    """Give each rank its part of an evaluation set: over all ranks, every sample exactly once.

    Parts differ by at most one sample. DistributedSampler pads them to equal length by repeating
    samples instead, which counts those twice. So: no collective inside the evaluation loop, one
    sum over ranks after it.

    Shape: (num_samples / world_size,), rounded up or down.
    """
    return torch.arange(num_samples)[rank::world_size]
