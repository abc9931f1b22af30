"""Nodes with network cards of given speeds, on one machine: network namespaces and tc-tbf(8).

Takes root, or a kernel that lets everybody make user namespaces. The namespaces have no names: open
file descriptors hold them, and they vanish with the processes that have these.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import socket
import subprocess
import sys

NEW_USER, NEW_NET = 0x10000000, 0x40000000  # unshare(2)
BURST_BYTES = 16_384  # let through at once, whatever the rate


def enter(name, *numbers):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*numbers):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


class Cluster:
    """`join(rank)` moves a fork of this process to the card of its rank; see `cluster_of`."""

    def __init__(self, descriptors, card_of_rank):
        *self.cards, self.switch, self.user = descriptors
        self.card_of_rank = card_of_rank

    def environ(self, rank, node):
        """Return what a launcher would set: `node` is told as torchrun tells it."""
        ranks = len(self.card_of_rank)
        return {
            "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": address(self.card_of_rank[0]), "MASTER_PORT": 29500,
            "GLOO_SOCKET_IFNAME": "card", "GROUP_RANK": node,
        }  # fmt: skip

    def join(self, rank):
        if os.fstat(self.user).st_ino != os.stat("/proc/self/ns/user").st_ino:
            enter("setns", self.user, NEW_USER)
        enter("setns", self.cards[self.card_of_rank[rank]], NEW_NET)


def address(card):
    return f"10.78.0.{card + 1}"


@contextlib.contextmanager
def cluster_of(mbit, card_of_rank):
    """Open a cluster whose cards send and receive at so many Mbit/s each, plugged into one switch.

    Ranks with one card are one machine. Raises: OSError where this machine does not permit it.
    """
    ours, theirs = socket.socketpair()
    builder = os.fork()  # a process that has entered a user namespace cannot come back
    if builder == 0:
        try:
            said, descriptors = build(mbit)
            socket.send_fds(theirs, [said.encode()], descriptors)
        finally:
            os._exit(0)
    theirs.close()
    said, descriptors, *_ = socket.recv_fds(ours, 4096, len(mbit) + 2)
    os.waitpid(builder, 0)
    ours.close()
    try:
        if said != b"ready":
            raise OSError(said.decode() or "its builder was killed")
        yield Cluster(descriptors, card_of_rank)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@functools.cache
def why_not():
    """Say why this machine cannot have an emulated cluster; None if it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    try:
        with cluster_of([100], [0]):
            return None
    except OSError as error:
        return f"an emulated cluster: {error}"


def build(mbit):
    try:
        become_root()
        user = os.open("/proc/self/ns/user", os.O_RDONLY)
        switch = new_namespace()
        cards = []
        for card, rate in enumerate(mbit):
            cards.append(new_namespace())
            there = f"/proc/{os.getpid()}/fd/{switch}"
            run("ip", [
                "link set lo up",
                f"link add card type veth peer name port{card} netns {there}",
                f"address add {address(card)}/24 dev card",
                "link set card up",
            ])  # fmt: skip
            limit("card", rate)
        enter("setns", switch, NEW_NET)
        run("ip", ["link add bridge type bridge", "link set bridge up"])
        for card, rate in enumerate(mbit):
            run("ip", [f"link set port{card} master bridge up"])
            limit(f"port{card}", rate)
    except subprocess.CalledProcessError as error:
        return f"{error.cmd[0]}: {error.stderr.strip()}", []
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error), []
    return "ready", [*cards, switch, user]


def become_root():
    try:
        enter("unshare", NEW_NET)
    except PermissionError:
        uid, gid = os.getuid(), os.getgid()
        enter("unshare", NEW_USER)
        for name, line in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"),
                           ("gid_map", f"0 {gid} 1")):  # fmt: skip
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)


def new_namespace():
    enter("unshare", NEW_NET)
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def limit(card, mbit):
    rate = f"rate {mbit}mbit burst {BURST_BYTES} latency 200ms"
    run("tc", [f"qdisc add dev {card} root tbf {rate}"])


def run(program, lines):
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # a user's may lack them
    found = shutil.which(program, path=path)
    if found is None:
        raise FileNotFoundError(2, "no such program (Debian's package iproute2 has it)", program)
    subprocess.run([found, "-batch", "-"], input="\n".join(lines) + "\n", check=True,
                   capture_output=True, text=True, timeout=60)  # fmt: skip
