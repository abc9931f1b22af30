"""A slow link on one machine: see without a cluster what helps when sending is slow.

    group, line = links.slow_group(bytes_per_second)

The collectives of such a group are real, and complete when a link of that speed would
be done. So the times are the same on every machine.
"""

import functools
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.profiler import record_function

from dist_common.check import RING_FACTORS, classify_collective, num_bytes


def slow_group(bytes_per_second):
    """Return a group of all ranks over a slow link, and a line with its speed.

    The link sends so many bytes per second from each rank; 0 means no slow link, and
    the default group. A collective.
    """
    real = dist.group.WORLD
    if not bytes_per_second or dist.get_world_size() == 1:
        return real, "link: none emulated"
    if dist.get_backend() != "gloo":
        return real, "link: the GPUs' own (only CPU ranks can have a slow one)"
    real = dist.new_group()
    name = f"slow{id(real)}"  # the name of a backend can be used once
    dist.Backend.register_backend(
        name, lambda *_: SlowGroup(real, bytes_per_second), devices=["cpu"]
    )
    return (
        dist.new_group(backend=name),
        f"link: {bytes_per_second * 8 / 1e6:g} Mbit/s per rank, emulated",
    )


class SlowGroup(dist.ProcessGroup):
    """Hands collectives to a real group; completes them when a serial link is done.

    The link carries the bytes of a ring, whatever the real group does. Send and receive
    are not slowed.
    """

    def __init__(self, real, bytes_per_second):
        super().__init__(real.rank(), real.size())
        cpu = torch.device("cpu")  # a group has a name only if it has a backend
        kind = dist.ProcessGroup.BackendType.GLOO
        # No public function returns a group's backend.
        self._register_backend(cpu, kind, real._get_backend(cpu))
        self._set_default_backend(kind)
        self.real = real
        self.bytes_per_second = bytes_per_second
        self.free_at = 0.0  # when the link has sent everything so far
        self.thread = ThreadPoolExecutor(1)  # completes one after the other

    def complete(self, work, output, started_at, seconds, future):
        """Complete a collective when the link has sent it."""
        try:
            work.wait()
        except RuntimeError as error:  # a rank was lost: tell the one who waits
            future.set_exception(error)
            return
        self.free_at = max(self.free_at, started_at) + seconds
        time.sleep(max(0.0, self.free_at - time.perf_counter()))
        future.set_result(output if isinstance(output, list) else [output])

    def start(self, method, output, *rest):
        """Start a collective of the real group; return a handle that completes late."""
        started_at = time.perf_counter()
        work = getattr(self.real, method)(output, *rest)
        kind = classify_collective(method)
        whole = max(map(num_bytes, (output, *rest)))  # the other is a rank's part of it
        seconds = RING_FACTORS[kind](self.size()) * whole / self.bytes_per_second
        future = torch.futures.Future()
        span = record_function(f"link:{kind}")  # in the profiler's trace, until it ends
        span.__enter__()
        ended = span._call_end_callbacks_on_future(future).then(lambda _: future.wait())
        self.thread.submit(self.complete, work, output, started_at, seconds, future)
        return SlowWork(ended)

    def barrier(self, *options):
        return self.real.barrier(*options)

    def getBackendName(self):
        return "slow"


# ProcessGroup's names differ between versions of PyTorch: allreduce, _allgather_base,
# reduce_scatter_single. One that is not replaced would hang: C++ holds Python's lock
# then, and gloo needs it to free a tensor.
for name in dir(dist.ProcessGroup):
    if classify_collective(name) not in (None, "send"):
        setattr(SlowGroup, name, functools.partialmethod(SlowGroup.start, name))


class SlowWork(dist.Work):
    """The handle of a collective on a SlowGroup."""

    def __init__(self, future):
        super().__init__()
        self.future = future

    def wait(self, timeout=None):
        self.future.wait()
        return True

    def get_future(self):
        return self.future
