"""What zero_offload.py checks: which bytes lie where, by the papers and as they were measured."""

import argparse
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

import check_config
from deepspeed_parts import config_judge, config_rules, deepspeed_train, setup
from legacy_common import cli, measure, runtime
from legacy_common.lab.proofs import same_losses
from legacy_common.models import TransformerConfig
from legacy_common.report import Report
from legacy_common.runtime import World

KINDS = ("weights", "optimizer state", "gradients and buffers")
DISK = ("files", "read per step", "written per step")
DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}  # of weights and gradients
FP32 = 4  # bytes
K = 3 * FP32  # bytes per weight: a float32 copy and Adam's two moments
SMALLEST = 2**20  # bytes: smaller tensors are never swapped to disk, and DeepSpeed does not say so
# Of losses near 5. bf16 keeps 8 bits, and Adam on the CPU is another kernel than on a GPU.
LOSS_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 2e-2}


def settled(path: Path, args, shape: TransformerConfig, ranks: int) -> dict[str, Any]:
    """Read a shipped config, with values of the flags in place of "auto", and a folder on the disk.

    Raises: UsageError, also when the disk cannot be written.
    """
    flags = argparse.Namespace(
        **vars(args), deepspeed_config=path, lr=3e-4, grad_accum_steps=1, warmup_steps=0,
        max_grad_norm=1.0, global_batch_size=args.micro_batch_size * ranks,
    )  # fmt: skip
    config = config_judge.read_right(path)
    config_rules.fill_disk(config, flags, {"nvme_path"})
    config_rules.refuse(path, check_config.of_machine(config))
    deepspeed_train.settle_precision(config, flags)
    deepspeed_train.fill(config, flags, shape.dim)
    setup.make_swap_folders([part for _, part in config_rules.offloads(config)])
    return config


def target(zero: dict, part: str) -> str:
    """Return where a config's section moves offload_param or offload_optimizer: cpu, nvme, none."""
    return zero.get(part, {}).get("device", "none")


def expected_bytes(zero: dict, shapes: Sequence[int], width: int, ranks: int) -> list[float]:
    """Return by formula a rank's bytes of each of KINDS in memory, then of each of DISK.

    `zero` is a config's section, `shapes` a number of elements for each weight, `width` the bytes
    of one. Beside its 12 bytes, an offloaded optimizer has a float32 gradient of its own
    (ZeRO-Infinity, section 3: 20 bytes in all, where ZeRO-Offload, section 3, counts 16). The
    buffers are DeepSpeed's.
    """
    shards = [-(-numel // ranks) for numel in shapes]
    own, files, read, written = sum(shards), 0, 0, 0
    weights, state = width * (own if zero["stage"] == 3 else sum(shapes)), K * own
    rest = width * own
    if zero["stage"] == 3:
        rest += width * zero["reduce_bucket_size"]
    if target(zero, "offload_optimizer") == "cpu":
        rest += FP32 * own
        if zero["stage"] == 2:  # and room for one whole gradient on each side of the copy
            rest += 2 * width * max(shapes)
    if target(zero, "offload_optimizer") == "nvme":
        groups = groups_of(shards, zero["sub_group_size"])
        moved, gradients = K * swapped(groups, FP32), FP32 * swapped(shards, FP32)
        state, files = state - moved, moved + gradients
        read, written = files, files
        rest += FP32 * zero["offload_optimizer"]["buffer_count"] * max(groups)
        rest += FP32 * own - gradients
    if target(zero, "offload_param") == "nvme":
        moved, buffers = width * swapped(shards, width), zero["offload_param"]
        # Read for forward and for backward; written once, by the optimizer.
        weights, files = weights - moved, files + moved
        read, written = read + 2 * moved, written + moved
        rest += width * buffers["buffer_count"] * buffers["buffer_size"]
        rest += width * ranks * max(groups)  # the group's shards, in room for whole weights
    return [weights, state, rest, files, read, written]


def groups_of(shards: Iterable[int], size: int) -> list[int]:
    """Gather shards to groups of at least `size` elements: DeepSpeed updates a group at a time."""
    groups = [0]
    for shard in shards:
        groups = [*groups, shard] if groups[-1] >= size else [*groups[:-1], groups[-1] + shard]
    return groups


def swapped(sizes: Iterable[int], width: int) -> int:
    """Return how many elements, of tensors of these sizes, are large enough to go to disk."""
    return sum(size for size in sizes if size * width >= SMALLEST)


def disk_traffic() -> list[int]:
    """Return the bytes that this process has had read from disks and written to them so far."""
    if not sys.platform.startswith("linux"):  # which alone has libaio, and counts
        return [0, 0]
    counters = psutil.Process().io_counters()
    return [counters.read_bytes, counters.write_bytes]


def measured_bytes(run, device: torch.device) -> list[float]:
    """Return what `expected_bytes` does; weights and state count only where they should lie.

    Of the rank that has most: shards of odd sizes differ by a few weights.
    """
    own = []
    for held, part in zip(run.held, ("offload_param", "offload_optimizer"), strict=False):
        own.append(held[device.type if target(run.zero, part) == "none" else "cpu"])
    folder = run.zero.get("offload_optimizer", {}).get("nvme_path")
    files = Path(folder).rglob("*.swp") if folder else []
    own += [run.held[2].total(), sum(path.stat().st_size for path in files)]
    own += [statistics.median(step) for step in zip(*run.traffic, strict=True)]
    return list(map(max, zip(*runtime.gather(own), strict=True)))


def require_disk(args, world: World, shards: Sequence[int]) -> None:
    """Raise UsageError for a folder in memory, a full disk, a model that is never swapped."""
    find = ["stat", "-f", "-c", "%T", args.nvme_path]
    kind = subprocess.run(find, capture_output=True, text=True).stdout.strip()
    where = f"--nvme-path {args.nvme_path}"
    if kind in ("tmpfs", "ramfs"):
        raise cli.UsageError(f"{where} is a {kind}, which is memory: name a folder on a disk")
    width = DTYPES[args.precision].itemsize
    runs = world.local_world_size * sum("nvme" in name for name in args.offload)
    # DeepSpeed does not notice that a write failed, and aborts at the next read.
    needed, free = runs * (K + FP32 + width) * sum(shards), shutil.disk_usage(args.nvme_path).free
    if needed > free:
        gib = f"{needed / measure.GIB:.1f} GiB, and {free / measure.GIB:.1f} are free"
        raise cli.UsageError(f"{where}: the files take {gib}")
    size = max(shards) * width
    if size < SMALLEST:
        small = f"a rank's part of the largest weight has {size:,} bytes"
        least = f"DeepSpeed swaps nothing below {SMALLEST:,}: take more, or fewer ranks"
        raise cli.UsageError(f"--dim {args.dim}: {small}, and {least}")


def compare(run, baselines: dict, shapes: Sequence[int], report: Report) -> tuple[str, ...]:
    """Check a run against the formulas and the run without offload; return its row of the table."""
    weights, baseline = sum(shapes), baselines[run.zero["stage"]]
    precision = report.args.precision
    swaps = target(run.zero, "offload_optimizer") == "nvme"
    measured = [number / weights for number in measured_bytes(run, report.device)]
    milliseconds = run.timer.median_ms()
    report.metrics[f"step_time_ms_{run.name}"] = milliseconds
    report.metrics[f"bytes_per_weight_{run.name}"] = sum(measured[:3])
    if run is not baseline:
        width, ranks = DTYPES[precision].itemsize, report.world.world_size
        expected = expected_bytes(run.zero, shapes, width, ranks)
        for name, value, right in zip((*KINDS, *DISK * swaps), measured, expected, strict=False):
            name, right = f"{run.name}: {name}, bytes per weight", right / weights
            report.check(name, value, right, 0.02 * max(right, 1), "ZeRO-Infinity, section 3")
        own = [torch.stack(one.losses).tolist() for one in (run, baseline)]
        ours, theirs = torch.tensor(runtime.gather(own)).transpose(0, 1)  # (ranks, steps) each
        name = f"{run.name}: largest error of a loss"
        same_losses(report, ours, theirs, LOSS_TOLERANCE[precision], name, baseline.name)
    cells = [
        " + ".join(f"{size / weights:.2f} {place}" for place, size in sorted(kind.items()) if size)
        for kind in run.held
    ]
    disk = [f"{number:.2f}" if swaps else "-" for number in measured[3:]]
    slower = milliseconds / baseline.timer.median_ms()
    return run.name, *cells, *disk, f"{milliseconds:.0f} ms", f"{slower:.2f}x"
