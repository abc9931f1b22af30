"""Slow links, and several hosts, on one machine: to see without a cluster what helps.

    group, line = links.slow_group(args.link)           # a script: the collectives of one group
    with links.hosts([rate] * ranks) as network: ...    # a program that forks ranks: all they send
        network.enter(rank)                             # first in each fork

A slow group is the same on every machine: its collectives are real, and complete when a link of
that speed would be done. namespaces.py has the hosts.
"""

import functools
import queue
import threading
import time

import torch
import torch.distributed as dist
from torch.profiler import record_function

from legacy_common.lab.namespaces import BURST_BYTES, CARD, Network, hosts, why_not  # noqa: F401
from legacy_common.lab.traffic import RING_FACTOR, bytes_of


def slow_group(bytes_per_second: float) -> tuple[dist.ProcessGroup, str]:
    """Return a group of all ranks over an emulated link, and one line that says how. A collective.

    Units: bytes/s in each direction of each rank; 0 is no emulation, and the default group.
    """
    real = dist.group.WORLD
    if not bytes_per_second or dist.get_world_size() == 1:
        return real, "link: none emulated"
    if dist.get_backend() != "gloo":
        return real, "link: the GPUs' own (--link emulates one between CPU ranks)"
    real = dist.new_group()
    name = f"late{id(real)}"  # a backend's name is taken once
    dist.Backend.register_backend(
        name, lambda *_: LateGroup(real, bytes_per_second), devices=["cpu"]
    )
    speed = f"{bytes_per_second * 8 / 1e6:g} Mbit/s per rank"
    return dist.new_group(backend=name), f"link: {speed}, by collectives that complete late"


# ProcessGroup's methods, in the words of torch 2.14 and of those before. Functional collectives,
# as DTensor.full_tensor calls, come as the coalesced ones. One that is missing here would not be
# slowed, and could hang: C++ holds Python's lock then, while gloo needs it to free a tensor.
METHODS = {
    "all_reduce": "allreduce allreduce_coalesced",
    "broadcast": "broadcast",
    "all_gather": "allgather all_gather_single _allgather_base all_gather_single_coalesced "
                  "allgather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter_single _reduce_scatter_base reduce_scatter_single_coalesced "
                      "reduce_scatter_tensor_coalesced",
    "all_to_all": "all_to_all_single alltoall_base",
}  # fmt: skip


class LateGroup(dist.ProcessGroup):
    """Hands each collective to a real group; completes it once a serial link would be done.

    The link carries what a ring algorithm sends, whatever the real group does. Send and receive are
    not slowed.
    """

    def __init__(self, real: dist.ProcessGroup, bytes_per_second: float) -> None:
        super().__init__(real.rank(), real.size())
        cpu = torch.device("cpu")  # a group has a name only if it has a backend
        self._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, real._get_backend(cpu))
        self.real, self.bytes_per_second = real, bytes_per_second
        self.handed_over: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._carry, daemon=True).start()

    def _carry(self) -> None:
        free_at = 0.0
        while True:
            work, result, seconds, started, done = self.handed_over.get()
            try:
                work.wait()
            except RuntimeError as error:  # a lost rank: tell the one who waits
                done.set_exception(error)
                continue
            free_at = max(free_at, started) + seconds
            time.sleep(max(0.0, free_at - time.perf_counter()))
            done.set_result(result)

    def start(self, kind: str, method: str, output, *rest) -> "LateWork":
        """Start a collective of the real group; return a handle that completes late."""
        started = time.perf_counter()
        work = getattr(self.real, method)(output, *rest)
        whole = max(map(bytes_of, (output, *rest)))  # the other one is a rank's part of it
        seconds = RING_FACTOR[kind](self.size()) * whole / self.bytes_per_second
        done: torch.futures.Future = torch.futures.Future()
        # In the profiler's trace, from the moment it is handed over until it completes.
        span = record_function(f"link:{kind}")
        span.__enter__()
        # What is waited for completes after the span has ended: the profiler may stop then.
        ended = span._call_end_callbacks_on_future(done).then(lambda _: done.wait())
        result = output if isinstance(output, list) else [output]
        self.handed_over.put((work, result, seconds, started, done))
        return LateWork(ended)

    def barrier(self, *options):
        return self.real.barrier(*options)

    def getBackendName(self) -> str:
        return "late"


for _kind, _methods in METHODS.items():
    for _method in _methods.split():
        setattr(LateGroup, _method, functools.partialmethod(LateGroup.start, _kind, _method))


class LateWork(dist.Work):
    """The handle of a collective on a LateGroup."""

    def __init__(self, done: torch.futures.Future) -> None:
        super().__init__()
        self.done = done

    def wait(self, timeout=None) -> bool:
        self.done.wait()
        return True

    def is_completed(self) -> bool:
        return self.done.done()

    def get_future(self) -> torch.futures.Future:
        return self.done
