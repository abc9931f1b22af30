"""A slow network under any unmodified script: every rank behind a network card of limited speed.

Each rank lives in a network namespace of its own, with a token bucket (tc-tbf(8)) before its card
and another one behind it, and all cards are plugged into one bridge. That takes root, or a kernel
that lets everybody make user namespaces. The namespaces have no names and no process waits in them:
open file descriptors hold them, and they vanish with the processes that have these, killed or not.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dist_common import cli

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # unshare(2)
CARD = "link0"  # what a rank's network card is called in its namespace
# What tbf lets through at once, whatever the rate: few KB, so that short messages are slowed too,
# but a millisecond's bytes, so that a timer that fires late costs no speed.
BURST_BYTES, BURST_S = 32_768, 1e-3
BUILD_S = 60  # the longest that one `ip` or `tc` may take: each takes milliseconds
MOST_RANKS = 250  # as many descriptors fit into one message (SCM_MAX_FD, unix(7))
READY = b"ready"


@dataclass(frozen=True)
class Network:
    """Descriptors of the open namespaces; a fork of the process that holds it can enter them."""

    user: int | None  # of the user namespace that owns the others; None as root
    switch: int  # the bridge's
    cards: tuple[int, ...]  # a rank's, by rank

    @property
    def environ(self) -> dict[str, str]:
        """Return what the ranks' environment needs; in namespaces of our own every port is free."""
        names = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
        return dict(zip(names, (address(0), "29500", CARD), strict=True))

    def enter(self, rank: int) -> None:
        """Move this process into a rank's namespace, and set the variables of `environ`.

        To be called first in a fork, while it has one thread: a socket that it opened before stays
        outside. A store in a process of its own enters with 0. Without root, the process is user 0
        of its user namespace from now on, and writes files as who it was before.
        """
        if self.user is not None:
            _call("setns", self.user, CLONE_NEWUSER)
        _call("setns", self.cards[rank], CLONE_NEWNET)
        os.environ.update(self.environ)


def address(rank: int) -> str:
    """Return the address of a rank's card."""
    return f"10.77.0.{rank + 1}"


@contextlib.contextmanager
def namespaces(world_size: int, bytes_per_second: float) -> Iterator[Network]:
    """Open a network whose cards send and receive so many bytes/s each; close it at the end.

    Everything between the ranks crosses it: collectives, sends, and the few KB of the store.
    Raises: UsageError when this machine does not permit it, and why.
    """
    if not sys.platform.startswith("linux"):
        raise cli.UsageError("a slow link needs network namespaces, which Linux has")
    if world_size > MOST_RANKS:
        raise cli.UsageError(f"a slow link takes {MOST_RANKS} ranks at most, not {world_size}")
    ours, theirs = socket.socketpair()
    # In a fork, since a process that has entered a user namespace cannot come back.
    builder = os.fork()
    if builder == 0:
        try:
            ours.close()
            message, descriptors = _built(world_size, bytes_per_second)
            socket.send_fds(theirs, [message], descriptors)
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        message, descriptors, *_ = socket.recv_fds(ours, 4096, world_size + 2)
        os.waitpid(builder, 0)
    try:
        if message != READY:
            raise cli.UsageError(f"a slow link: {message.decode() or 'its builder was killed'}")
        switch, *cards = descriptors[: world_size + 1]
        user = descriptors[world_size + 1] if len(descriptors) > world_size + 1 else None
        yield Network(user, switch, tuple(cards))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@functools.cache
def why_not() -> str | None:
    """Say in one line why this machine cannot have a slow link; None if it can. Tries it, once."""
    try:
        with namespaces(1, 1e9):
            return None
    except cli.UsageError as error:
        return str(error)


def _built(world_size: int, bytes_per_second: float) -> tuple[bytes, list[int]]:
    """Make the namespaces and what is in them; return READY or a reason, and the descriptors."""
    try:
        user = _become_root()
        switch = _new_namespace()
        cards = [_new_namespace() for _ in range(world_size)]
        for rank, card in enumerate(cards):
            _call("setns", card, CLONE_NEWNET)
            _plug_in(rank, switch)
            _limit([CARD], bytes_per_second)
        _call("setns", switch, CLONE_NEWNET)
        ports = [f"port{rank}" for rank in range(world_size)]
        _ip(["link add bridge type bridge", "link set bridge up"])
        _ip([f"link set {port} master bridge up" for port in ports])
        _limit(ports, bytes_per_second)
    except FileNotFoundError as error:
        return f"no program {error.filename} (Debian's package iproute2 has it)".encode(), []
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip() or str(error)
        return f"{Path(error.cmd[0]).name}: {said.splitlines()[0]}".encode(), []
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(getattr(error, "strerror", error)).encode(), []
    return READY, [switch, *cards, *([user] if user is not None else [])]


def _become_root() -> int | None:
    """Enter a user namespace where this process may not make networks; return its descriptor."""
    try:
        _call("unshare", CLONE_NEWNET)
        return None
    except PermissionError:
        uid, gid = os.getuid(), os.getgid()
        _call("unshare", CLONE_NEWUSER)
    # user_namespaces(7): without root a process may map itself alone, and no groups.
    for name, line in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    return os.open("/proc/self/ns/user", os.O_RDONLY)


def _new_namespace() -> int:
    _call("unshare", CLONE_NEWNET)
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _plug_in(rank: int, switch: int) -> None:
    """Give the namespace that this process is in a card, and a cable (veth(4)) to the switch."""
    there = f"/proc/{os.getpid()}/fd/{switch}"
    _ip([
        "link set lo up",
        f"link add {CARD} type veth peer name port{rank} netns {there}",
        f"address add {address(rank)}/24 dev {CARD}",
        f"link set {CARD} up",
    ])  # fmt: skip


def _limit(cards: list[str], bytes_per_second: float) -> None:
    """Put a token bucket before each card of this namespace: it limits what leaves through it."""
    burst = max(BURST_BYTES, round(bytes_per_second * BURST_S))
    rate = f"rate {round(bytes_per_second * 8)}bit burst {burst}b latency 100ms"
    _run("tc", [f"qdisc add dev {card} root tbf {rate}" for card in cards])


def _run(program: str, lines: list[str]) -> None:
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # a user's may lack them
    found = shutil.which(program, path=path)
    if found is None:
        raise FileNotFoundError(2, "no such program", program)
    options = {"check": True, "capture_output": True, "text": True, "timeout": BUILD_S}
    subprocess.run([found, "-batch", "-"], input="\n".join(lines) + "\n", **options)


_ip = functools.partial(_run, "ip")


def _call(name: str, *arguments: int) -> None:
    """Call the C library's function: os.setns and os.unshare are Python 3.12's."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
