"""Text without a download, and how it is dealt to ranks: the batches of the one job."""

import copy
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, Sampler

from legacy_common.cli import UsageError

TEXT = Path(__file__).parent.parent / "dist_common" / "text.txt"
IGNORED = -100  # a target that no loss counts: the default ignore_index of cross_entropy


def load_text(text_file: str | None = None, max_bytes: int = 4_000_000) -> torch.Tensor:
    """Load a file as bytes, (N,) uint8, or max_bytes of the sources of Python's standard library.

    A byte is a token. Raises: UsageError when the file is missing, empty or unreadable.
    """
    try:
        if text_file:
            content = Path(text_file).read_bytes()
        else:  # the modules themselves: 170 files, on every machine
            sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
            content = b"".join(path.read_bytes() for path in sources)[:max_bytes]
    except OSError as error:
        raise UsageError(f"--text-file {text_file}: {error.strerror}") from error
    if not content:
        raise UsageError(f"--text-file {text_file} is empty")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class Sequences(Dataset):
    """Cut text into sequences of T tokens to read and, one further, as many to predict.

    Shapes: an item is (inputs (T,), targets (T,)), int64; `lengths` are their numbers of tokens.
    Raises: UsageError, naming `name`, for less text than a sequence for each of `world_size` ranks.
    """

    vocab_size, token_kind = 256, "a token here is a byte"
    document_end = None  # no token ends a document

    def __init__(self, text: torch.Tensor, seq_len: int, world_size: int = 1, name="text") -> None:
        self.text, self.seq_len = text, seq_len
        self.bounds = self.cut(text)
        self.lengths = self.bounds.diff()
        if len(self) < world_size:
            few = f"the {name}'s {len(text)} bytes are fewer than one sequence of {seq_len} tokens"
            need = f"for each of {world_size} ranks: use a longer text or a smaller --seq-len"
            raise UsageError(f"{few} {need}")

    def cut(self, text: torch.Tensor) -> torch.Tensor:
        """Return where sequences begin, and the end of the last one: (number + 1,)."""
        return torch.arange(0, len(text), self.seq_len)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = self.bounds[index], self.bounds[index + 1]
        piece = self.text[start : end + 1].long()
        missing = (0, self.seq_len - len(piece) + 1)
        return F.pad(piece[:-1], missing), F.pad(piece[1:], missing, value=IGNORED)


class ShardedSampler(Sampler[int]):
    """Deal one seeded shuffle to all ranks as DistributedSampler does; resume it in mid-epoch.

    Rank r gets every world_size-th index, so a global batch is the same on any number of ranks.
    `position` counts the samples of this epoch that all ranks have trained on. A tail that does not
    fill all ranks is left out. Raises: UsageError for fewer samples than ranks.
    """

    def __init__(self, num_samples: int, rank: int, world_size: int, seed: int = 0) -> None:
        if num_samples < world_size:
            few = f"{num_samples} samples cannot be dealt to {world_size} ranks"
            raise UsageError(f"{few}: start fewer ranks")
        self.num_samples, self.rank, self.world_size = num_samples, rank, world_size
        self.seed, self.epoch, self.position = seed, 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; each epoch has its own order. Keeps a resumed position."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def advance(self, global_samples: int) -> None:
        """Count samples as trained on. For the loop to call: a loader reads ahead of it."""
        self.position += global_samples

    def global_order(self) -> torch.Tensor:
        """Return this epoch's order of all samples, the same on every rank. Shape: (N,)."""
        # lab: hole epoch
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.num_samples, generator=generator)
        # lab: end

    @property
    def left(self) -> int:
        """Return how many samples of this epoch are left to all ranks."""
        return self.num_samples - self.position

    @property
    def place(self) -> str:
        """Say the place in the data."""
        return f"sample {self.position:,} of epoch {self.epoch + 1}"

    def at_start(self) -> "ShardedSampler":
        """Return one at the start of this epoch."""
        other = copy.copy(self)
        other.position = 0
        return other

    def ahead(self, size: int) -> Iterator[torch.Tensor]:
        """Yield the global batches that are left of this epoch, (size,) or less each."""
        yield from self.global_order()[self.position :].split(size) if self.left else ()

    def trained(self, lengths: torch.Tensor) -> int:
        """Return how many tokens the samples up to this place hold. Shape: (N,), of all samples."""
        part = self.global_order()[: self.position]
        return int(self.epoch * lengths.sum() + lengths[part].sum())

    def __len__(self) -> int:
        return self.left // self.world_size

    def __iter__(self) -> Iterator[int]:
        # lab: hole sampler
        rest = self.global_order()[self.position :]
        return iter(rest[self.rank :: self.world_size][: len(self)].tolist())
        # lab: end

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint needs; the same on every rank."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume where `state` was taken, on this sampler's own number of ranks."""
        vars(self).update(state)


def job_text(args, ranks: int) -> tuple[Sequences, Sequences, str]:
    """Return sequences to train on and to test on (the last twentieth), and the text's checksum."""
    text = load_text(args.text_file or str(TEXT))
    cut = len(text) - len(text) // 20
    train = Sequences(text[:cut], args.seq_len, ranks, "training text")
    test = Sequences(text[cut:], args.seq_len, ranks, "test text")
    return train, test, hashlib.sha256(text.numpy()).hexdigest()[:8]


def settle_batch_sizes(args, dp_ranks: int) -> str:
    """Set --grad-accum-steps and --global-batch-size from each other; return how they multiply.

    Raises: UsageError unless global = micro x accumulation x data-parallel ranks.
    """
    one, steps = args.micro_batch_size * dp_ranks, args.grad_accum_steps
    total = args.global_batch_size or one * (steps or 1)
    product = f"--micro-batch-size {args.micro_batch_size} x {dp_ranks} ranks"
    if total % one:
        whole = f"{product} x --grad-accum-steps {steps or 'N'}, a multiple of {one}"
        raise UsageError(f"--global-batch-size {total} must be {whole}")
    if steps not in (None, total // one):
        raise UsageError(
            f"--global-batch-size {total} is not {product} x --grad-accum-steps {steps} = "
            f"{one * steps}: take that, or {total // one} steps"
        )
    args.global_batch_size, args.grad_accum_steps = total, total // one
    micro = f"{args.micro_batch_size} per rank x {args.grad_accum_steps} micro-batches"
    return f"global batch {total} = {micro} x {dp_ranks} ranks"


def collate(rows: int, seq_len: int, items: Sequence) -> tuple[torch.Tensor, ...]:
    """Stack at most `rows` sequences, and fill up with rows that no loss counts. Shapes: (B, T).

    What items have beside inputs and targets, such as positions, is filled up with zeros.
    """
    inputs = torch.zeros(rows, seq_len, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED)
    batch = inputs, targets, *(torch.zeros_like(inputs) for item in items[:1] for _ in item[2:])
    for row, item in enumerate(items):
        for tensor, part in zip(batch, item, strict=True):
            tensor[row] = part
    return batch
