"""Hosts on one machine: network namespaces on one bridge, with links as slow as asked for.

Takes Linux, root or user namespaces. A token bucket stands before each host's card and behind it.
Only open descriptors hold the namespaces: they vanish with their processes, killed or not. Imports
no torch, so that a tool starts at once.

Sources: network_namespaces(7), user_namespaces(7), tc-tbf(8).
"""

import contextlib
import ctypes
import functools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from legacy_common import cli

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # unshare(2)
CARD = "link0"  # what a host's network card is called
# What a bucket lets through at once: few KB, so that short messages are slowed too, but a
# millisecond's bytes, so that a timer that fires late costs no speed.
BURST_BYTES, BURST_S = 32_768, 1e-3
MOST_HOSTS = 250  # as many descriptors fit into one message (SCM_MAX_FD, unix(7))


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
            call("setns", self.user, CLONE_NEWUSER)
        call("setns", self.cards[host], CLONE_NEWNET)
        os.environ.update(MASTER_ADDR=address(0), MASTER_PORT="29500", GLOO_SOCKET_IFNAME=CARD)


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
        user = become_root()
        switch = _new_namespace()
        for host, rate in enumerate(rates):
            cards.append(_new_namespace())
            there = f"/proc/{os.getpid()}/fd/{switch}"
            run("ip", "link set lo up",
                 f"link add {CARD} type veth peer name port{host} netns {there}",
                 f"address add {address(host)}/24 dev {CARD}", f"link set {CARD} up")  # fmt: skip
            run("tc", bucket(CARD, rate))
        call("setns", switch, CLONE_NEWNET)
        run("ip", "link add bridge type bridge", "link set bridge up",
             *(f"link set port{host} master bridge up" for host in range(len(rates))))  # fmt: skip
        run("tc", *(bucket(f"port{host}", rate) for host, rate in enumerate(rates)))
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(getattr(error, "strerror", None) or error), []
    return "", [*cards, switch, user]


def become_root() -> int:
    """Enter a user namespace where this process may not make networks; return its descriptor."""
    try:
        call("unshare", CLONE_NEWNET)
    except PermissionError:
        uid, gid = os.getuid(), os.getgid()
        call("unshare", CLONE_NEWUSER)
        # Without root a process may map itself alone, and no groups.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    return os.open("/proc/self/ns/user", os.O_RDONLY)


def _new_namespace() -> int:
    call("unshare", CLONE_NEWNET)
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def address(host: int, card: int = 0) -> str:
    """Return the address of a host's card: hosts count from 0, addresses from 1."""
    return f"10.77.{card}.{host + 1}"


def bucket(card: str, rate: float) -> str:
    """Return tc's words for a token bucket: it limits what leaves through a card."""
    burst = max(BURST_BYTES, round(rate * BURST_S))
    return (
        f"qdisc replace dev {card} root tbf rate {round(rate * 8)}bit burst {burst}b latency 200ms"
    )


def run(program: str, *lines: str, inside: int | None = None) -> None:
    """Hand lines to ip or tc, in the network namespace of a descriptor if there is one.

    Raises: OSError with the program's first line of complaint.
    """
    if not lines:
        return
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # a user's may lack them
    found = shutil.which(program, path=path)
    if found is None:
        raise OSError(f"no program {program} (Debian's package iproute2 has it)")
    options = {"capture_output": True, "text": True, "timeout": 60}  # each takes milliseconds
    if inside is not None:
        options["preexec_fn"] = lambda: call("setns", inside, CLONE_NEWNET)
    ended = subprocess.run([found, "-batch", "-"], input="\n".join(lines) + "\n", **options)
    if ended.returncode:
        raise OSError(f"{program}: {ended.stderr.strip().partition(chr(10))[0]}")


def call(name: str, *arguments: int | bytes | None) -> None:
    """Call the C library's function: os.setns and os.unshare are Python 3.12's."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
