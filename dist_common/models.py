"""The models that the scripts train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class SmallCNN(nn.Module):
    """Two convolutions and two linear layers: 151,306 parameters for images of any size.

    It has no batch norm and no dropout on purpose: the loss of a sample then does not depend on
    which other samples share its rank, so any number of ranks computes the same gradient.

    Shapes: (B, 1, H, W) float in, (B, num_classes) logits out; H and W at least 8.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.hidden = nn.Linear(64 * 4 * 4, 128)
        self.head = nn.Linear(128, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.conv1(images))  # (B, 32, H, W)
        x = F.avg_pool2d(F.gelu(self.conv2(x)), 2)  # (B, 64, H/2, W/2)
        x = F.adaptive_avg_pool2d(x, 4).flatten(1)  # (B, 64 * 4 * 4)
        return self.head(F.gelu(self.hidden(x)))  # (B, num_classes)
