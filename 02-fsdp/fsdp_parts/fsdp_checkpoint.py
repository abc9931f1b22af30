"""What fsdp_checkpoint.py measures of a save: when training stood still, who wrote how much."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace

import torch
import torch.distributed as dist

from dist_common.lab.figure import figure
from dist_common.report import Report
from fsdp_parts.checkpoint_job import train

HEADERS = ("kind", "training stood still", "until on disk", "to load", "MB in all", "by one rank")
LABELS = {"async": "async, by thread", "async-process": "async, by process"}
TRAINS = "#4c78a8"
STILL = "#d62728"
WRITES = "#b8b8b8"


class SavedRun:
    """When steps ran, training stood still and files were whole, in s since the save began."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.steps: list[tuple[float, float]] = []  # (begin, end) on the clock
        self.losses = torch.empty(0)
        self.load_s = 0.0

    def train_and_save(
        self, job: SimpleNamespace, run: SimpleNamespace, save: Callable[[], Future]
    ) -> None:
        """Take a step, save, and take --max-steps steps while files may still be written."""
        dist.barrier(job.files)
        losses = [self._step(job, run)]
        self.begun = time.perf_counter()
        done = save()
        self.released = time.perf_counter()
        losses += [self._step(job, run) for _ in range(job.args.max_steps)]
        self.whole = max(done.result(), self.released)
        self.losses = torch.cat(losses)

    def _step(self, job: SimpleNamespace, run: SimpleNamespace) -> torch.Tensor:
        begun = time.perf_counter()
        loss = train(job, run, 1)  # its value is on the CPU: a GPU is done with the step
        self.steps.append((begun, time.perf_counter()))
        return loss

    def columns(self, report: Report) -> list[str]:
        """Return how long training stood still, until all was on disk, and loading took."""
        still = self.released - self.begun
        seconds = {"stall": still, "on_disk": self.whole - self.begun, "load": self.load_s}
        for name, value in seconds.items():
            report.metrics[f"{self.kind}_{name}_ms"] = 1e3 * value
        return [f"{1e3 * value:,.0f} ms" for value in seconds.values()]


def check_bytes(job: SimpleNamespace, kind: str, found: SimpleNamespace) -> list[int]:
    """Check the bytes of a checkpoint's files against 12 per weight; return each file's."""
    sizes = [(found.folder / name).stat().st_size for name in found.files]
    whole = 12 * job.config.num_parameters()  # 4 bytes for a weight, 8 for Adam's two moments
    if job.config.tied_embeddings:  # one weight of two names is written under each
        whole += 4 * job.config.vocab_size * job.config.dim
    parts = 1 if kind == "full" else job.world.world_size
    # Bytes that a rank adds: names and shapes of its pieces, and AdamW's settings for each weight.
    around = 24 * 1024 * len(found.tensors)
    for who, size, right, slack in (
        ("in all", sum(sizes), whole, parts * around),
        ("by one rank", max(sizes), whole // parts, around),
    ):
        size, right, slack = size / 1e6, right / 1e6, (right / 50 + slack) / 1e6
        job.report.check(f"{kind}: MB {who}", size, right, slack, "12 bytes for a weight")
    return sizes


def draw_times(report: Report, saved: Mapping[str, SavedRun]) -> None:
    """Draw a stripe for each kind, as rank 0 saw its training, standing still and writing."""
    if not (report.output and report.world.is_rank0):
        return
    from matplotlib.patches import Patch

    with figure(report.output / "checkpoint_times.png", figsize=(9, 3.4)) as axes:
        for row, times in enumerate(saved.values()):
            ms = lambda at, zero=times.begun: 1e3 * (at - zero)  # noqa: E731
            for begun, ended in times.steps:
                axes.barh(row, ms(ended) - ms(begun), 0.4, ms(begun), color=TRAINS, ec="white")
            axes.barh(row, ms(times.released), 0.4, color=STILL)
            length = ms(times.whole) - ms(times.released)
            axes.barh(row + 0.32, length, 0.14, ms(times.released), color=WRITES)
        axes.set_yticks(range(len(saved)), [LABELS.get(kind, kind) for kind in saved])
        axes.invert_yaxis()
        axes.set_xlabel("ms since the save began, rank 0")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
        colors = {"training, a bar for each step": TRAINS, "training stands still": STILL,
                  "writing in the background": WRITES}  # fmt: skip
        handles = [Patch(color=color, label=label) for label, color in colors.items()]
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.45, 1.2), ncols=3,
                    frameon=False)  # fmt: skip
