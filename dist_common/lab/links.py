"""Slow links, and several hosts, on one machine: to see without a cluster what helps.

    group, line = links.slow_group(args.link)           # a script: the collectives of one group
    with links.hosts([rate] * ranks) as network: ...    # a program that forks ranks: all they send
        network.enter(rank)                             # first in each fork

A slow group is the same on every machine: its collectives are real, and complete when a link of
that speed would be done. Each host is a network namespace on one bridge (Linux, root or user
namespaces), with a token bucket before its card and behind it. Only open descriptors hold the
namespaces: they vanish with their processes, killed or not.

Sources: network_namespaces(7), user_namespaces(7), tc-tbf(8).
"""

import contextlib
import ctypes
import functools
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import record_function

from dist_common import cli
from dist_common.lab.traffic import RING_FACTOR, bytes_of

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # unshare(2)
CARD = "link0"  # what a host's network card is called
# What a bucket lets through at once: few KB, so that short messages are slowed too, but a
# millisecond's bytes, so that a timer that fires late costs no speed.
BURST_BYTES, BURST_S = 32_768, 1e-3
MOST_HOSTS = 250  # as many descriptors fit into one message (SCM_MAX_FD, unix(7))


# hosts: everything that a process sends


@dataclass(frozen=True)
class Network:
    """Descriptors of the open namespaces; a fork of the process that holds it can enter them."""

    cards: tuple[int, ...]  # by host
    switch: int  # the bridge's
    user: int | None  # of the user namespace that owns the others; None as root

    def enter(self, host: int) -> None:
        """Move this process to a host, with the address of rank 0 on host 0 in its environment.

        To be called first in a fork, while it has one thread: a socket that it opened before stays
        outside. Ranks on one host share its card. Without root the process is user 0 of its user
        namespace from now on, and writes files as who it was before.
        """
        if self.user is not None:
            _call("setns", self.user, CLONE_NEWUSER)
        _call("setns", self.cards[host], CLONE_NEWNET)
        os.environ.update(MASTER_ADDR=_address(0), MASTER_PORT="29500", GLOO_SOCKET_IFNAME=CARD)


@contextlib.contextmanager
def hosts(rates: Sequence[float]) -> Iterator[Network]:
    """Open a host per rate, whose card sends and receives so many bytes/s; close them at the end.

    Takes root, or a kernel that lets everybody make user namespaces. Raises: UsageError when this
    machine does not permit it, and why.
    """
    if not sys.platform.startswith("linux"):
        raise cli.UsageError("a slow link needs network namespaces, which Linux has")
    if len(rates) > MOST_HOSTS:
        raise cli.UsageError(f"a slow link takes {MOST_HOSTS} ranks at most, not {len(rates)}")
    ours, theirs = socket.socketpair()
    # In a fork, since a process that has entered a user namespace cannot come back.
    builder = os.fork()
    if builder == 0:
        try:
            ours.close()
            problem, descriptors = _build(rates)
            socket.send_fds(theirs, [problem.encode() or b"ready"], descriptors)
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        message, descriptors, *_ = socket.recv_fds(ours, 4096, len(rates) + 2)
        os.waitpid(builder, 0)
    try:
        if message != b"ready":
            raise cli.UsageError(f"a slow link: {message.decode() or 'its builder was killed'}")
        *cards, switch, user = descriptors
        as_root = os.fstat(user).st_ino == os.stat("/proc/self/ns/user").st_ino
        yield Network(tuple(cards), switch, None if as_root else user)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@functools.cache
def why_not() -> str | None:
    """Say in one line why this machine cannot have such hosts; None if it can. Tries it, once."""
    try:
        with hosts([1e9]):
            return None
    except cli.UsageError as error:
        return str(error)


def _build(rates: Sequence[float]) -> tuple[str, list[int]]:
    """Make the namespaces and what is in them; return a problem or "", and their descriptors."""
    cards = []
    try:
        user = _become_root()
        switch = _new_namespace()
        for host, rate in enumerate(rates):
            cards.append(_new_namespace())
            there = f"/proc/{os.getpid()}/fd/{switch}"
            _run("ip", "link set lo up",
                 f"link add {CARD} type veth peer name port{host} netns {there}",
                 f"address add {_address(host)}/24 dev {CARD}", f"link set {CARD} up")  # fmt: skip
            _run("tc", _bucket(CARD, rate))
        _call("setns", switch, CLONE_NEWNET)
        _run("ip", "link add bridge type bridge", "link set bridge up",
             *(f"link set port{host} master bridge up" for host in range(len(rates))))  # fmt: skip
        _run("tc", *(_bucket(f"port{host}", rate) for host, rate in enumerate(rates)))
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(getattr(error, "strerror", None) or error), []
    return "", [*cards, switch, user]


def _become_root() -> int:
    """Enter a user namespace where this process may not make networks; return its descriptor."""
    try:
        _call("unshare", CLONE_NEWNET)
    except PermissionError:
        uid, gid = os.getuid(), os.getgid()
        _call("unshare", CLONE_NEWUSER)
        # Without root a process may map itself alone, and no groups.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    return os.open("/proc/self/ns/user", os.O_RDONLY)


def _new_namespace() -> int:
    _call("unshare", CLONE_NEWNET)
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _bucket(card: str, rate: float) -> str:
    """Return tc's words for a token bucket: it limits what leaves through a card."""
    burst = max(BURST_BYTES, round(rate * BURST_S))
    return f"qdisc add dev {card} root tbf rate {round(rate * 8)}bit burst {burst}b latency 200ms"


def _run(program: str, *lines: str) -> None:
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # a user's may lack them
    found = shutil.which(program, path=path)
    if found is None:
        raise OSError(f"no program {program} (Debian's package iproute2 has it)")
    options = {"capture_output": True, "text": True, "timeout": 60}  # each takes milliseconds
    ended = subprocess.run([found, "-batch", "-"], input="\n".join(lines) + "\n", **options)
    if ended.returncode:
        raise OSError(f"{program}: {ended.stderr.strip().partition(chr(10))[0]}")


def _call(name: str, *arguments: int) -> None:
    """Call the C library's function: os.setns and os.unshare are Python 3.12's."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


# a group: the collectives that are called on it


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
