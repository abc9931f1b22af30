"""ResNet-50 v1.5 (He et al., 2016, table 1): weights, FLOPs, bytes kept, what an image takes.

Version 1.5 strides in a block's 3x3 convolution, as torchvision does. Under AMP activations have
16 bits; weights, their gradients and SGD's momentum have 32.
"""

from __future__ import annotations

from typing import NamedTuple

from dist_common.costs.collectives import seconds_of
from dist_common.costs.compute import memory_seconds
from dist_common.costs.hardware import Cluster
from dist_common.costs.job import Layout, Prediction
from dist_common.costs.memory import FP32, memory_limit
from dist_common.costs.rates import RATES, rate_of
from dist_common.costs.step import exposed

NAME, CLASSES, FEATURES = "resnet50", 1000, 2048
STAGES = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))  # blocks, width, first stride
BLOCKS = sum(blocks for blocks, _, _ in STAGES)
SIDE = 224  # pixels
WIDTH, INDEX = 2, 8  # bytes of an activation, and of max-pooling's index
# Times that a tensor of a layer's output passes through HBM, counted kernel by kernel.
NORM = 3 + 5  # forward: mean and variance, then normalise; backward: x, dy twice, dx written
RELU = 2 + 3
ADD = 3 + 3  # the shortcut forward; where two gradients meet backward


class Conv(NamedTuple):
    """A convolution and its batch norm: channels, kernel, sides of input and output in pixels."""

    inputs: int
    outputs: int
    kernel: int
    before: int
    after: int
    shortcut: bool = False  # projects a stage's input: no ReLU follows
    ends: bool = False  # a block: the shortcut is added to its output

    @property
    def macs(self) -> int:
        return self.inputs * self.outputs * self.kernel**2 * self.after**2

    @property
    def read(self) -> int:
        return self.inputs * self.before**2

    @property
    def written(self) -> int:
        return self.outputs * self.after**2


def convolutions() -> list[Conv]:
    """Return all 53 convolutions, for one image of 224 x 224 pixels."""
    convs = [Conv(3, 64, 7, SIDE, SIDE // 2)]
    channels, side = 64, SIDE // 4
    for blocks, width, first in STAGES:
        for block in range(blocks):
            after = side if block else side // first
            convs.append(Conv(channels, width, 1, side, side))
            convs.append(Conv(width, width, 3, side, after))
            convs.append(Conv(width, 4 * width, 1, after, after, ends=True))
            if not block:
                convs.append(Conv(channels, 4 * width, 1, side, after, shortcut=True))
            channels, side = 4 * width, after
    return convs


def parameters() -> int:
    """Return the weights: convolutions, two vectors of each batch norm, the classifier."""
    kernels = sum(c.inputs * c.outputs * c.kernel**2 + 2 * c.outputs for c in convolutions())
    return kernels + (FEATURES + 1) * CLASSES


def forward_flops() -> int:
    """Return FLOPs of an image forward; a multiply-add counts as two."""
    return 2 * (sum(c.macs for c in convolutions()) + FEATURES * CLASSES)


def kept_bytes(wide: int = WIDTH) -> int:
    """Return bytes of an image that backward needs: inputs of convolutions and of batch norms.

    ReLU works in place: what it returns is the next convolution's input. Max-pooling keeps the
    index of each maximum as well. wide: bytes of an activation.
    """
    convs = convolutions()
    norms = sum(c.written for c in convs)
    relus = sum(c.written for c in convs if not c.shortcut)
    pooled, image = convs[1].read, convs[0].read
    return wide * (norms + relus + pooled + FEATURES + image) + INDEX * pooled


def number_bytes(precision: str) -> int:
    """Return the bytes of an activation."""
    return FP32 if precision in ("fp32", "tf32") else WIDTH


def kernel_passes() -> int:
    """Return the numbers of an image that batch norms, ReLUs, shortcuts and the pool move."""
    convs = convolutions()
    norms = sum(c.written * (NORM if c.shortcut else NORM + RELU) for c in convs)
    added = ADD * sum(c.written for c in convs if c.ends)
    pool = 2 * (convs[0].written + (1 + INDEX // WIDTH) * convs[1].read)
    return norms + added + pool


def compute_seconds(images: int, precision: str, cluster: Cluster) -> tuple[float, float]:
    """Return seconds of a micro-batch forward and backward: convolutions, and all that moves bytes.

    A roofline (Williams et al., 2009): each of a convolution's three products takes its FLOPs over
    the matrix rate, or its input and output over HBM's, whichever is longer. No kernel is fused
    with another. Products with few channels stay below it, so a step usually takes longer.
    """
    gpu = cluster.gpu
    rate = gpu.tflops[precision] * 1e12 * rate_of(RATES, "matrix", gpu.family)
    wide = number_bytes(precision) / WIDTH * images
    seconds = 0.0
    for number, conv in enumerate(convolutions()):
        flops = 2 * conv.macs * images / (rate * cluster.matrix_scale)
        moved = memory_seconds(wide * (conv.read + conv.written), cluster, RATES)
        seconds += max(flops, moved) * (3 if number else 2)  # an image needs no gradient
    return seconds, memory_seconds(wide * kernel_passes(), cluster, RATES)


def memory_of(layout: Layout, precision: str) -> dict[str, float]:
    """Return bytes by part on a GPU. Autocast keeps a 16-bit copy of the weights for a step."""
    weights = parameters()
    wide = number_bytes(precision)
    image = FP32 * SIDE * SIDE * 3 * (wide == WIDTH)  # as it was loaded, beside the 16-bit copy
    return {
        "parameters": FP32 * weights + WIDTH * weights * (wide == WIDTH),
        "gradients": FP32 * weights,
        "optimizer": FP32 * weights / (layout.dp if layout.zero else 1),
        "activations": layout.micro_batch * (kept_bytes(wide) + image),
    }


def predict(batch: int, layout: Layout, cluster: Cluster, precision: str = "bf16") -> Prediction:
    """Return what DDP or ZeRO-1 holds and takes; `tokens` of the result are images."""
    weights, n, count = parameters(), layout.dp, batch // layout.dp // layout.micro_batch
    convs, norms = compute_seconds(layout.micro_batch, precision, cluster)
    one = convs + norms
    # A block launches about as many kernels as a transformer's layer; backward 1.5 times as many.
    launch = 2.5 * BLOCKS * RATES["launch.eager_us"] / 1e6
    if layout.zero:
        sent = seconds_of("reduce_scatter", FP32 * weights, n, cluster)
        sent += seconds_of("all_gather", FP32 * weights, n, cluster)
    else:
        sent = seconds_of("all_reduce", FP32 * weights, n, cluster)
    stepped = weights / (n if layout.zero else 1)
    step = {
        "convolutions": count * convs,
        "norms": count * norms,  # and ReLUs, shortcuts, pool
        "dp": exposed(sent, one * 2 / 3, RATES),
        # SGD reads weight, gradient and momentum, and writes two of them.
        "optimizer": memory_seconds(5 * FP32 / WIDTH * stepped, cluster, RATES),
        "other": count * (max(0.0, launch - one) + RATES["step.micro_ms"] / 1e3)
        + RATES["step.fixed_ms"] / 1e3,
    }
    held, limit = memory_of(layout, precision), memory_limit(cluster.gpu)
    return Prediction(layout, held, step, 3 * forward_flops() * batch, batch, limit)
