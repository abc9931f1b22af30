"""Folders of tokens, as make_tokens.py writes them: read by slices, mixed by weights, resumed."""

import bisect
import copy
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from legacy_common.cli import UsageError
from legacy_common.data import IGNORED
from legacy_common.stores import Ranges, Remote, sizes_in

# A folder: all documents one after another, each ended by one token; the places right after these;
# and what they are. Little-endian.
TOKENS, ENDS, MANIFEST = "tokens.bin", "ends.bin", "manifest.json"
ENDS_TYPE = "<i8"
TYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
TEST_TOKENS = 2**18  # of a source, at most: an evaluation stays short


class Folder:
    """A folder of tokens, mapped into memory: a slice reads its own pages of the files, no more.

    Of an object store it asks for the slice's bytes. Shapes: `tokens` (N,). Raises: UsageError for
    a damaged one.
    """

    def __init__(self, path: str) -> None:
        remote = "://" in str(path)
        self.path = Remote(path, "--tokens") if remote else Path(path)
        try:
            sizes = sizes_in(self.path)
            with (self.path / MANIFEST).open() as file:
                about = json.load(file)
            self.kind = TYPES[about["dtype"]]
            self.size, self.documents = int(about["tokens"]), int(about["documents"])
            self.largest_id, self.end_id = int(about["largest_id"]), int(about["end_id"])
            self.tokenizer, self.checksum = str(about["tokenizer"]), str(about["sha256"])
        except OSError as error:
            file = error.filename or MANIFEST
            raise UsageError(f"--tokens {path}: {file}: {error.strerror or error}") from error
        except (KeyError, TypeError, ValueError) as error:
            what = f"{MANIFEST} is damaged ({type(error).__name__}: {error})"
            raise UsageError(f"--tokens {path}: {what}") from error
        expected = {TOKENS: self.size * self.kind.itemsize, ENDS: 8 * self.documents}
        for name, size in expected.items():
            if name not in sizes:
                raise UsageError(f"--tokens {path}: {name}: No such file")
            if sizes[name] != size or not size:
                what = f"{name} has {sizes[name]:,} bytes, its manifest says {size:,}"
                raise UsageError(f"--tokens {path}: {what}: write the folder again")
        self.array = Ranges if remote else np.memmap
        self.tokens = self.array(self.path / TOKENS, self.kind, "r")

    def __reduce__(self) -> tuple:
        return Folder, (str(self.path),)  # for a process that loads data: not the files' content

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Return the place after each document, (documents,); an object store's are read whole."""
        return self.array(self.path / ENDS, ENDS_TYPE, "r")[0 : self.documents]

    def ends_before(self, places: np.ndarray) -> np.ndarray:
        """Return how many documents end before each place, the ending token included."""
        return np.searchsorted(self.ends, places, side="right")


class TokenSequences(Dataset):
    """Cut a part of each of several folders into sequences of T tokens, numbered through.

    A tail shorter than a sequence is left out. With `by_document` the first token of a document is
    no target of the token before it. Shapes: an item is (inputs (T,), targets (T,)).
    """

    def __init__(self, folders: list[Folder], parts: list[range], seq_len: int, by_document: bool):
        self.folders, self.parts, self.seq_len = folders, parts, seq_len
        self.starts = np.cumsum([0, *map(len, parts)])  # of each folder's numbers
        self.vocab_size = 1 + max(folder.largest_id for folder in folders)
        self.document_end = folders[0].end_id if by_document else None
        self.token_kind = f"an id in --tokens is {self.vocab_size - 1}"
        self.lengths = Lengths(self)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        number = bisect.bisect_right(self.starts, index) - 1
        folder = self.folders[number]
        start = self.parts[number][index - self.starts[number]] * self.seq_len
        piece = torch.from_numpy(folder.tokens[start : start + self.seq_len + 1].astype(np.int64))
        if piece.max() > folder.largest_id:
            what = f"token {piece.max()} in {TOKENS}, after token {start:,}, is too large"
            raise UsageError(f"--tokens {folder.path}: {what}: write the folder again")
        inputs, targets = piece[:-1], piece[1:]
        if self.document_end is not None:
            targets = targets.masked_fill(inputs == self.document_end, IGNORED)
        return inputs, targets


class Lengths:
    """How many targets of each sequence a loss counts: looked up, as there may be a billion."""

    def __init__(self, sequences: TokenSequences) -> None:
        self.sequences = sequences

    def __getitem__(self, indices: torch.Tensor) -> torch.Tensor:
        data, size = self.sequences, self.sequences.seq_len
        counts = torch.full_like(indices, size)
        for number, folder in enumerate(data.folders if data.document_end is not None else ()):
            first, after = data.starts[number : number + 2].tolist()
            own = (indices >= first) & (indices < after)
            places = (indices[own].numpy() - first + data.parts[number].start) * size
            ended = folder.ends_before(places + size) - folder.ends_before(places)
            counts[own] -= torch.from_numpy(ended)
        return counts

    def sum(self) -> torch.Tensor:
        return self[torch.arange(len(self.sequences))].sum()


class Mixture(Sampler[int]):
    """Deal the samples of several sources to all ranks, in proportion to weights, without an end.

    Sample k of a source is due at (k + 1/2) / weight, and samples are taken as they fall due: so
    each batch has its share of each source, up to whole samples, and is the same on any number of
    ranks. Each source has an order of its own in each of its epochs, and a place in it.
    Memory: 8 bytes per sequence of the corpus, on each rank.
    """

    left = math.inf  # samples before this ends

    def __init__(
        self, sizes: dict[str, int], weights: list[float], rank: int, world_size: int, seed: int,
        names: list[str] | None = None,
    ) -> None:  # fmt: skip
        """`sizes` are the sources' numbers of samples, by checksum; `names` are for people."""
        if sum(sizes.values()) < world_size:
            few = f"the {sum(sizes.values())} sequences of --tokens are fewer than"
            raise UsageError(f"{few} {world_size} ranks: use more tokens or a smaller --seq-len")
        shares = np.array(weights) / sum(weights)
        self.sizes, self.weights = sizes, dict(zip(sizes, shares.tolist(), strict=True))
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.names = names or list(sizes)
        self.taken = dict.fromkeys(sizes, 0)  # of each source, in all epochs, by all ranks
        self.since = dict.fromkeys(sizes, 0)  # those of them that were taken by these weights
        self.orders: dict[int, tuple[int, torch.Tensor]] = {}  # (epoch, order) of a source

    def counts(self, of_each: dict[str, Any]) -> np.ndarray:
        """Return what a dictionary says of each source given. Shape: (sources,)"""
        return np.array([of_each[name] for name in self.sizes])

    def due(self, since: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the sources of the next samples, and how many of it each has before it in these.

        Shapes: (sources,) -> (size,) both.
        """
        times = (since[:, None] + np.arange(size) + 0.5) / self.counts(self.weights)[:, None]
        return np.divmod(np.argsort(times, axis=None, kind="stable")[:size], size)

    def order(self, source: int, epoch: int) -> torch.Tensor:
        """Return the order of a source's samples in an epoch, the same on every rank."""
        if self.orders.get(source, (None,))[0] != epoch:
            name, size = list(self.sizes.items())[source]
            own = int(name[:12], 16)  # of its content: no two sources share it
            generator = torch.Generator().manual_seed(self.seed + epoch + own)
            self.orders.pop(source, None)  # no two orders at a time
            self.orders[source] = epoch, torch.randperm(size, generator=generator)
        return self.orders[source][1]

    def ahead(self, size: int) -> Iterator[torch.Tensor]:
        """Yield the global batches from this place on: indices into TokenSequences, (size,)."""
        sizes = self.counts(self.sizes)
        starts = np.cumsum(sizes) - sizes
        taken, since = self.counts(self.taken), self.counts(self.since)
        while True:
            source, offset = self.due(since, size)
            epoch, place = np.divmod(taken[source] + offset, sizes[source])
            batch = torch.empty(size, dtype=torch.int64)
            for number, turn in sorted(set(zip(source.tolist(), epoch.tolist(), strict=True))):
                mine = torch.from_numpy((source == number) & (epoch == turn))
                places = torch.from_numpy(place)[mine]
                batch[mine] = int(starts[number]) + self.order(number, turn)[places]
            yield batch
            counts = np.bincount(source, minlength=len(sizes))
            taken, since = taken + counts, since + counts

    def at_start(self) -> "Mixture":
        """Return one that nothing was taken from."""
        other = copy.copy(self)
        other.taken, other.since = (dict.fromkeys(self.sizes, 0) for _ in range(2))
        return other

    def advance(self, global_samples: int) -> None:
        """Count samples as trained on, each with its source. For the loop to call."""
        source, _ = self.due(self.counts(self.since), global_samples)
        counts = np.bincount(source, minlength=len(self.sizes)).tolist()
        for name, count in zip(self.sizes, counts, strict=True):
            self.taken[name] += count
            self.since[name] += count

    def trained(self, lengths: Lengths) -> int:
        """Return how many tokens the samples up to this place hold."""
        start, total = 0, 0
        for number, (name, size) in enumerate(self.sizes.items()):
            epochs, rest = divmod(self.taken[name], size)
            if epochs:
                total += epochs * int(lengths[torch.arange(start, start + size)].sum())
            total += int(lengths[start + self.order(number, epochs)[:rest]].sum())
            start += size
        return total

    @property
    def place(self) -> str:
        """Say the place in each source."""
        each = (
            f"{name} at sample {self.taken[key] % size:,} of epoch {self.taken[key] // size + 1}"
            for name, (key, size) in zip(self.names, self.sizes.items(), strict=True)
        )
        return ", ".join(each)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs; the same on every rank."""
        copies = {"taken": dict(self.taken), "since": dict(self.since)}  # training goes on
        return {"weights": self.weights, **copies}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where `state` was taken, in each source, on any number of ranks.

        By other weights too, or with a new source; one that is not given now keeps its place.
        """
        self.taken |= state["taken"]
        if state["weights"] == self.weights:
            self.since = dict(state["since"])


def folder_and_weight(text: str) -> tuple[str, float | None]:
    """Split FOLDER=WEIGHT; without a weight it is None. Raises: UsageError."""
    path, _, weight = text.rpartition("=")
    if not path:
        return text, None
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1e9:
        raise UsageError(f"--tokens {text}: a weight is a number above 0, not {weight!r}")
    return path, number


def job_tokens(args, rank: int, ranks: int) -> tuple[TokenSequences, TokenSequences, Mixture]:
    """Open the folders of --tokens; return what to train on, what to test on, and a mixture.

    The test set is the end of each. Without weights each counts by its size. Raises: UsageError.
    """
    paths, weights = zip(*map(folder_and_weight, args.tokens), strict=True)
    folders = [Folder(path) for path in paths]
    if len({folder.checksum for folder in folders}) < len(folders):
        raise UsageError("--tokens names the same tokens twice: give them a larger weight instead")
    first = folders[0]
    for folder in folders:
        if (folder.tokenizer, folder.end_id) != (first.tokenizer, first.end_id):
            both = f"{folder.path} is of {folder.tokenizer}, {first.path} of {first.tokenizer}"
            raise UsageError(f"--tokens: {both}: an id would have two meanings")
    if None in weights and any(weights):
        raise UsageError("--tokens: give a weight to each folder, or to none")
    parts, size = [], args.seq_len
    for folder in folders:
        count = (folder.size - 1) // size
        if count < 2:
            few = f"{folder.size} tokens are fewer than two sequences of {size}"
            raise UsageError(f"--tokens {folder.path}: {few}: use more tokens")
        parts.append((count, max(1, min(count // 20, TEST_TOKENS // size))))
    train = [range(count - tested) for count, tested in parts]
    test = [range(count - tested, count) for count, tested in parts]
    sizes = {folder.checksum[:16]: len(part) for folder, part in zip(folders, train, strict=True)}
    shares = [len(part) for part in train] if None in weights else list(weights)
    names = [str(folder.path) for folder in folders]
    mixture = Mixture(sizes, shares, rank, ranks, args.seed, names)
    by_document = args.document_attention
    sets = (TokenSequences(folders, part, size, by_document) for part in (train, test))
    return *sets, mixture
