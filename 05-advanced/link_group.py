"""A process group whose collectives cross an emulated slow link, to see on one machine what helps.

As root on Linux every rank gets a network namespace of its own, with a token bucket (tc-tbf(8)) in
front of its network card. Elsewhere the collectives are real, and complete when such a link would
have carried them; send and receive are not slowed there. Nothing is left behind: the namespaces go
with the processes.
"""

import ctypes
import functools
import os
import queue
import subprocess
import threading
import time

import torch
import torch.distributed as dist
from torch.profiler import record_function

from dist_common.runtime import gather

CLONE_NEWNET = 0x40000000  # unshare(2)
BURST_BYTES = 65_536  # what tbf lets through at once, at least; smaller messages are not slowed
CARD = "slow0"  # what a rank's network card is called in its namespace
# Bytes that a rank sends for (output, input) of a collective over n ranks, by algorithms that send
# no more than a ring does. gloo's own reduce-scatter sends as much as its all-reduce.
SENT = {
    "all_reduce": lambda n, out, given: 2 * (n - 1) / n * out,
    "broadcast": lambda n, out, given: out,
    "all_gather": lambda n, out, given: (n - 1) * given,
    "reduce_scatter": lambda n, out, given: (n - 1) * out,
    "all_to_all": lambda n, out, given: (n - 1) / n * given,
}
# ProcessGroup's methods, in the words of torch 2.14 and of those before. Functional collectives,
# as DTensor.full_tensor calls, come as the coalesced ones. One that is missing here would not be
# slowed, and could hang: C++ holds Python's lock then, while gloo needs it to free a tensor.
METHODS = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "all_gather_single": "all_gather",
    "_allgather_base": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_base": "all_to_all",
    "allreduce_coalesced": "all_reduce",
    "all_gather_single_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
}


def slow_group(bytes_per_second: float, late: bool = False) -> tuple[dist.ProcessGroup, str]:
    """Return a group of all ranks over an emulated link, and one line that says how. A collective.

    Units: bytes/s in each direction of each rank; 0 is no emulation, and the default group. `late`
    does without namespaces: also messages below BURST_BYTES take as long as they should. The line
    differs from machine to machine: pages leave it out.
    """
    whole = dist.group.WORLD
    if not bytes_per_second or dist.get_world_size() == 1:
        return whole, "link: none emulated"
    if dist.get_backend() != "gloo":
        return whole, "link: the GPUs' own (--link emulates one between CPU ranks)"
    speed = f"link: {bytes_per_second * 8 / 1e6:g} Mbit/s per rank"
    group, problem = None, "small messages too"
    if not late:
        group, problem = _group_in_namespaces(bytes_per_second)
    if group is not None:
        return group, f"{speed}, by network namespaces"
    return _late_group(bytes_per_second), f"{speed}, by collectives that complete late ({problem})"


def _group_in_namespaces(bytes_per_second: float) -> tuple[dist.ProcessGroup | None, str]:
    """Make a namespace for each rank, connect them to a bridge in rank 0's; return a group there.

    A socket stays in the namespace in which it was opened. So each rank visits its own only until
    the group is connected, and whatever it opens later is outside again.
    """
    if len(set(gather(os.uname().nodename))) > 1:
        return None, "ranks on several machines"
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        unshare, setns = libc.unshare, libc.setns
        outside = os.open("/proc/self/ns/net", os.O_RDONLY)
    except (OSError, AttributeError):
        unshare, outside = None, None
    inside = unshare is not None and unshare(CLONE_NEWNET) == 0
    problem = None if inside else "no network namespaces without root"
    steps = (_make_bridge, _address, functools.partial(_limit, bytes_per_second))
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    try:
        pids = gather(os.getpid())
        for step in steps:
            problem = _first(problem)
            problem = problem or _tried(step, dist.get_rank(), pids)
        problem = _first(problem)
        if problem:
            return None, problem
        os.environ["GLOO_SOCKET_IFNAME"] = CARD
        return dist.new_group(), ""
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name
        if inside and setns(outside, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns: this process is left without a network")
        if outside is not None:
            os.close(outside)


def _first(problem: str | None) -> str | None:
    """Return the same problem on all ranks: that of the first one that has any."""
    return next(filter(None, gather(problem)), None)


def _tried(step, rank: int, pids: list[int]) -> str | None:
    try:
        for command in step(rank, pids):
            subprocess.run(command.split(), check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"no command {error.filename}"
    except subprocess.CalledProcessError as error:
        return f"{command.split()[0]}: {error.stderr.strip().splitlines()[0]}"
    return None


def _make_bridge(rank: int, pids: list[int]) -> list[str]:
    """Have rank 0 hold the bridge, and a cable (veth(4)) from it to every other rank."""
    if rank:
        return []
    commands = [f"ip link add {CARD} type bridge"]
    for other in range(1, len(pids)):
        commands.append(f"ip link add port{other} type veth peer name {CARD} netns {pids[other]}")
        commands.append(f"ip link set port{other} master {CARD} up")
    return commands


def _address(rank: int, pids: list[int]) -> list[str]:
    address = f"10.77.{rank // 250}.{rank % 250 + 1}/16"
    return [f"ip address add {address} dev {CARD}", f"ip link set {CARD} up"]


def _limit(bytes_per_second: float, rank: int, pids: list[int]) -> list[str]:
    burst = max(BURST_BYTES, round(bytes_per_second / 1000))
    rate = f"rate {round(bytes_per_second * 8)}bit burst {burst}b latency 100ms"
    return [f"tc qdisc replace dev {CARD} root tbf {rate}"]


def _late_group(bytes_per_second: float) -> dist.ProcessGroup:
    real = dist.new_group()
    make = functools.partial(_late, real, bytes_per_second)
    name = f"late{id(real)}"  # a backend's name is taken once
    dist.Backend.register_backend(name, make, devices=["cpu"])
    return dist.new_group(backend=name)


def _late(real, bytes_per_second, store, rank, world_size, timeout):
    return LateGroup(real, bytes_per_second)


class LateGroup(dist.ProcessGroup):
    """Hands each collective to a real group; completes it once a serial link would be done."""

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

    def start(self, method: str, output, *rest) -> "LateWork":
        """Start a collective of the real group; return a handle that completes late."""
        started = time.perf_counter()
        work = getattr(self.real, method)(output, *rest)
        tensors = [part for part in rest if isinstance(part, (torch.Tensor, list))]
        given = tensors[0] if tensors and _nbytes(tensors[0]) else output
        name = METHODS[method]
        sent = SENT[name](self.size(), _nbytes(output), _nbytes(given))
        done: torch.futures.Future = torch.futures.Future()
        # In the profiler's trace, from the moment it is handed over until it completes.
        span = record_function(f"link:{name}")
        span.__enter__()
        # What is waited for completes after the span has ended: the profiler may stop then.
        ended = span._call_end_callbacks_on_future(done).then(lambda _: done.wait())
        result = output if isinstance(output, list) else [output]
        self.handed_over.put((work, result, sent / self.bytes_per_second, started, done))
        return LateWork(ended)

    def barrier(self, *options):
        return self.real.barrier(*options)

    def getBackendName(self) -> str:
        return "late"


def _nbytes(tensors) -> int:
    """Return the bytes of a tensor, or of all in (lists of) lists; split sizes have none."""
    if isinstance(tensors, list):
        return sum(map(_nbytes, tensors))
    return tensors.nbytes if isinstance(tensors, torch.Tensor) else 0


def _starter(method: str):
    return lambda self, output, *rest: self.start(method, output, *rest)


for _method in METHODS:
    setattr(LateGroup, _method, _starter(_method))


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
