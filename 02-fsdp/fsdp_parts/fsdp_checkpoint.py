"""What fsdp_checkpoint.py measures of a save: when training stood still, who wrote how much."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace

import torch
import torch.distributed as dist

from fsdp_parts.checkpoint_job import train
from legacy_common.report import Report

HEADERS = ("kind", "training stood still", "until on disk", "to load", "MB in all", "by one rank")


class SavedRun:
    """When training stood still and files were whole, in s since the save began."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.losses = torch.empty(0)
        self.load_s = 0.0

    def train_and_save(
        self, job: SimpleNamespace, run: SimpleNamespace, save: Callable[[], Future]
    ) -> None:
        """Take a step, save, and take --max-steps steps while files may still be written."""
        dist.barrier(job.files)
        before = train(job, run, 1)  # its loss is on the CPU: a GPU is done with the step
        self.begun = time.perf_counter()
        done = save()
        self.released = time.perf_counter()
        after = train(job, run, job.args.max_steps)
        self.whole = max(done.result(), self.released)
        self.losses = torch.cat((before, after))

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
