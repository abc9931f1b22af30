"""Data without a download, and global batches that any number of ranks can share."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    TensorDataset,
    default_collate,
)

from dist_common.cli import UsageError

TEXT = Path(__file__).with_name("text.txt")  # 1 MB of Python sources, PSF licence
IGNORED = -100  # a target that cross_entropy does not count
ORDER_BLOCK = 2**22  # samples whose order a rank holds at a time: 32 MB
TEST_TOKENS = 2**18  # at most, of a folder of tokens: an evaluation stays short


class Sequences(Dataset):
    """Tokens cut into sequences of T; the targets are the inputs, one token further.

    `tokens` is an array of any integer type, memory-mapped or not. A tail shorter than
    a sequence is left out. Shapes: item -> inputs (T,), targets (T,), int64.
    """

    def __init__(self, tokens, seq_len):
        self.tokens = tokens
        self.seq_len = seq_len

    def __len__(self):
        return len(self.tokens[1:]) // self.seq_len

    def __getitem__(self, index):
        start = index * self.seq_len
        piece = self.tokens[start : start + self.seq_len + 1]
        piece = torch.from_numpy(piece.astype(np.int64))
        return piece[:-1], piece[1:]


def load_sequences(args):
    """Return the training set, the test set, a checksum and the vocabulary's size.

    Without --tokens a token is a byte of --text-file. The test set is the end of the
    data. Raises: UsageError for files that are missing or too short.
    """
    if args.tokens:
        tokens, checksum, vocab_size = load_tokens(Path(args.tokens))
        num_sequences = (len(tokens) - 1) // args.seq_len
        tested = min(num_sequences // 20, TEST_TOKENS // args.seq_len)
        split = (num_sequences - max(1, tested)) * args.seq_len
    else:
        tokens = load_text(args.text_file)
        checksum = hashlib.sha256(tokens).hexdigest()
        vocab_size = 256
        split = len(tokens) - len(tokens) // 20
    train_set = Sequences(tokens[: split + 1], args.seq_len)
    test_set = Sequences(tokens[split:], args.seq_len)
    if not len(train_set) or not len(test_set):
        raise UsageError(
            f"{len(tokens)} tokens are too few to train and test on sequences of "
            f"{args.seq_len}: use more data or a smaller --seq-len"
        )
    return train_set, test_set, checksum[:16], vocab_size


def load_text(path=None):
    """Return the bytes of a file, or of the guide's own text. Shape: (N,) uint8."""
    try:
        return np.frombuffer(Path(path or TEXT).read_bytes(), dtype=np.uint8)
    except OSError as error:
        raise UsageError(f"--text-file {path}: {error.strerror}") from error


def load_tokens(folder):
    """Open a folder of make_tokens.py; return mapped tokens, checksum, vocabulary."""
    try:
        about = json.loads((folder / "manifest.json").read_text())
        kind = np.dtype(about["dtype"]).newbyteorder("<")
        # A shorter file is an error.
        tokens = np.memmap(folder / "tokens.bin", kind, "r", shape=about["tokens"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"--tokens {folder}: cannot be used ({error})") from error
    return tokens, about["sha256"], about["largest_id"] + 1


def load_digits():
    """Return scikit-learn's handwritten digits as a training set and a test set.

    Shapes: item -> image (1, 8, 8) from 0 to 1, label () int64.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(labels)
    split = len(labels) * 4 // 5
    train_set = TensorDataset(images[:split], labels[:split])
    return train_set, TensorDataset(images[split:], labels[split:])


def global_order(num_samples, seed, epoch, start):
    """Yield the samples of an epoch in their random order, from position `start` on.

    The order is the same on every rank. Large data sets are permuted by blocks, so that
    a rank never holds the order of all samples.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    num_blocks = -(-num_samples // ORDER_BLOCK)
    position = 0
    for block in torch.randperm(num_blocks, generator=generator).tolist():
        first = block * ORDER_BLOCK
        size = min(ORDER_BLOCK, num_samples - first)
        if position + size > start:
            generator.manual_seed(seed + epoch + 1_000_003 * block)
            order = first + torch.randperm(size, generator=generator)
            yield from order[max(0, start - position) :].tolist()
        position += size


class GlobalBatches:
    """Iterate over global batches; every rank gets its share in micro-batches.

    Rank r takes every world_size-th sample. All ranks get the same number of
    micro-batches, because every rank has to take part in the collectives, and all
    micro-batches have the same shape. Where samples are missing, there are rows of
    zeros whose targets are IGNORED. The last batch of an epoch may have fewer samples.
    The only state is `samples_seen`, so a run resumes on any number of ranks.
    """

    def __init__(self, dataset, args, run, samples_seen=0):
        self.dataset = dataset
        self.args = args
        self.run = run
        self.samples_seen = samples_seen
        self.loader = None

    def __next__(self):
        """Return this rank's micro-batches of the next global batch."""
        left = len(self.dataset) - self.samples_seen % len(self.dataset)
        if self.loader is None or left == len(self.dataset):
            self.loader = iter(self.make_loader())
        self.samples_seen += min(self.args.global_batch_size, left)
        return next(self.loader)

    def make_loader(self):
        """Return a loader of this rank's global batches to the end of the epoch."""
        epoch, start = divmod(self.samples_seen, len(self.dataset))
        order = global_order(len(self.dataset), self.args.seed, epoch, start)
        batches = BatchSampler(order, self.args.global_batch_size, drop_last=False)
        # The workers seed Python, NumPy and PyTorch from this generator: augmentation
        # differs between ranks and epochs.
        generator = torch.Generator()
        generator.manual_seed(hash((self.args.seed, self.samples_seen, self.run.rank)))
        return DataLoader(
            self.dataset,
            batch_sampler=(b[self.run.rank :: self.run.world_size] for b in batches),
            collate_fn=self.make_micro_batches,
            num_workers=self.args.num_workers,
            pin_memory=self.run.device.type == "cuda",
            generator=generator,
        )

    def make_micro_batches(self, samples):
        """Divide this rank's samples of a global batch into micro-batches."""
        size = self.args.micro_batch_size
        num_rows = self.args.num_micro_batches * size
        while len(samples) < num_rows:
            inputs, targets = self.dataset[0]
            filler = torch.zeros_like(inputs), torch.full_like(targets, IGNORED)
            samples.append(filler)
        return [
            default_collate(samples[i : i + size]) for i in range(0, num_rows, size)
        ]


def evaluation_batches(dataset, args, run):
    """Yield this rank's batches of a test set; every rank yields equally many."""
    batches = GlobalBatches(dataset, args, run)
    while batches.samples_seen < len(dataset):
        yield from next(batches)
