"""What ddp_mnist.py trains: images of handwritten digits, and a small network for them."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from legacy_common.cli import UsageError


class SmallCNN(nn.Module):
    """Two convolutions and two linear layers: 151,306 weights for images of any size.

    No batch norm and no dropout, so a sample's loss does not depend on the samples beside it; GELU
    and average pooling, so no last bit flips a gradient at a kink: any number of ranks computes the
    same gradient. Shapes: (B, 1, H, W) in, (B, 10) logits out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.hidden = nn.Linear(64 * 4 * 4, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.conv1(images))  # (B, 32, H, W)
        x = F.avg_pool2d(F.gelu(self.conv2(x)), 2)  # (B, 64, H/2, W/2)
        x = F.adaptive_avg_pool2d(x, 4).flatten(1)  # (B, 64 * 4 * 4)
        return self.head(F.gelu(self.hidden(x)))  # (B, 10)


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
    """Load MNIST, or without a folder the digits that need no file. Raises: UsageError."""
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
    train, test = (TensorDataset(images[part], labels[part]) for part in order.split(1437))
    return Images("digits", train, test)


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
        cure = "--download makes it and fetches MNIST"
        raise UsageError(f"--data-dir {folder} does not exist; {cure}")
    if download:
        _download_in_turn(folder)
    try:
        parts = [MNIST(folder, train=train) for train in (True, False)]
    except (RuntimeError, OSError, ValueError) as error:
        cure = f"add --download to fetch it ({error})"
        raise UsageError(f"--data-dir {folder} holds no MNIST: {cure}") from error
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
