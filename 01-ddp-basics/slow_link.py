"""An all-reduce that ends no sooner than on a slow serial link, to see overlap on a laptop."""

import time

import torch
import torch.distributed as dist

from dist_common.measure import RING_FACTOR


class SlowLink:
    """The real all-reduce; with a speed in bytes/s, it ends when such a link would be done."""

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.free_at = 0.0  # when the link has sent all that was handed to it, in seconds

    def seconds_for(self, tensor_bytes: int) -> float:
        """Return how long the link takes for a ring all-reduce; 0 without a speed."""
        if not self.bytes_per_second:
            return 0.0
        factor = RING_FACTOR["all_reduce"](dist.get_world_size())
        return factor * tensor_bytes / self.bytes_per_second

    def all_reduce(self, tensor: torch.Tensor) -> "Pending":
        """Start the sum of a tensor over all ranks, in place; `wait()` on what it returns."""
        work = dist.all_reduce(tensor, async_op=True)
        start = max(self.free_at, time.perf_counter())
        self.free_at = start + self.seconds_for(tensor.nbytes)
        return Pending(work, self.free_at if self.bytes_per_second else 0.0)

    def hook(self, _, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Do the same for DDP, which hands over a bucket and wants a Future of its mean."""
        pending = self.all_reduce(bucket.buffer().div_(dist.get_world_size()))
        return pending.work.get_future().then(lambda done: pending.late(done.value()[0]))


class Pending:
    """A started all-reduce."""

    def __init__(self, work: dist.Work, ends_at: float) -> None:
        self.work, self.ends_at = work, ends_at

    def wait(self) -> None:
        """Return when the sum is there and the link would be done."""
        self.work.wait()
        self.late()

    def late(self, result: torch.Tensor | None = None) -> torch.Tensor | None:
        """Wait for the link alone."""
        time.sleep(max(0.0, self.ends_at - time.perf_counter()))
        return result
