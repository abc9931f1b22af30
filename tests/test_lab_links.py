"""Emulated links and hosts: right results, the bytes that a formula says, nothing left behind."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import fork_ranks, free_port

from dist_common import links
from legacy_common import cli, runtime
from legacy_common.lab import namespaces

why_not = namespaces.why_not()
needs_hosts = pytest.mark.skipif(why_not is not None, reason=str(why_not))
RATE = 12.5e6  # bytes/s: 100 Mbit/s
COUNT = 250_000  # numbers: 1 MB, so that what a bucket lets through at once is a small part
LATE = "by collectives that end late"
NOBODY = 65534
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4  # prctl(2)
prctl = getattr(ctypes.CDLL(None), "prctl", None)

# a group


def collectives(rank, world_size):
    """Return the line of the group, and for each collective whether its result is right."""
    group, line = links.slow_group(RATE)
    found = {}
    n = world_size
    own = torch.full((COUNT,), float(rank + 1))
    total, whole = own.clone(), torch.empty(n * COUNT)
    wide, narrow = torch.ones(n * COUNT), torch.empty(COUNT)
    ranks = torch.arange(1.0, n + 1)
    dist.all_reduce(total, group=group)
    found["all_reduce"] = torch.equal(total, ranks.sum().expand(COUNT))
    runtime.all_gather_single(whole, own, group=group)
    found["all_gather"] = torch.equal(whole, ranks.repeat_interleave(COUNT))
    runtime.reduce_scatter_single(narrow, wide, group=group)
    found["reduce_scatter"] = torch.equal(narrow, torch.full((COUNT,), float(n)))
    handle = dist.all_reduce(own.clone(), group=group, async_op=True)
    handle.wait()
    found["async"] = handle.is_completed()
    return line, found


def test_collectives_over_a_late_group_are_right(on_ranks):
    for line, found in on_ranks(collectives, 2):
        assert LATE in line and "100 Mbit/s" in line
        assert all(found.values()), found


def no_link(rank, world_size):
    group, line = links.slow_group(0)
    return group is dist.group.WORLD, line


def test_without_a_speed_it_is_the_default_group(on_ranks):
    assert on_ranks(no_link, 2) == [(True, "link: none emulated")] * 2


def lost_peer(rank, world_size):
    group, _ = links.slow_group(1e9)
    if rank == 1:
        return "left"
    with pytest.raises(RuntimeError, match="closed by peer|reset by peer|Timed out|timed out"):
        dist.all_reduce(torch.ones(10), group=group)
    return "told"


def test_a_lost_rank_is_told_on_a_late_group(on_ranks):
    assert on_ranks(lost_peer, 2) == ["told", "left"]


# hosts


def on_hosts(body, world_size, folder):
    """Call body(rank, world_size) on gloo ranks, each on a host of its own."""
    port = str(free_port())

    def one(rank, network):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        network.enter(rank)
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        value = body(rank, world_size)
        dist.barrier()
        dist.destroy_process_group()
        return value

    with namespaces.hosts([RATE] * world_size) as network:
        ended = fork_ranks(lambda rank: one(rank, network), world_size, folder, 60, True)
    assert not any(ended.codes), ended.stderr
    return ended.returned


def sent_for_an_all_reduce(rank, world_size):
    """Return what the card sent for one all-reduce, and whether the result is right."""
    tensor = torch.full((2 * COUNT,), float(rank + 1))
    dist.barrier()
    before = psutil.net_io_counters(pernic=True)[namespaces.CARD].bytes_sent
    dist.all_reduce(tensor)
    dist.barrier()  # all of it has left the card
    sent = psutil.net_io_counters(pernic=True)[namespaces.CARD].bytes_sent - before
    return sent, bool((tensor == sum(range(1, world_size + 1))).all())


@needs_hosts
def test_an_all_reduce_sends_its_bytes_over_the_card(tmp_path):
    expected = 2 * COUNT * 4  # 2 (N - 1) / N of the tensor
    for sent, right in on_hosts(sent_for_an_all_reduce, 2, tmp_path):
        assert right
        assert sent == pytest.approx(expected, rel=0.1), "headers are 5 percent"


def as_nobody(body):
    """Return body() of a fork without privileges, or None where it ended in an error."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # /proc/self belongs to root after setuid
            os.write(writer, str(body()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return said


@needs_hosts
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run without root already")
def test_hosts_need_no_root():
    def enter_and_look():
        namespaces.why_not.cache_clear()
        if namespaces.why_not():
            return namespaces.why_not()
        with namespaces.hosts([RATE] * 2) as network:
            network.enter(1)
            return f"user {os.geteuid()}, {sorted(psutil.net_if_addrs())}"

    said = as_nobody(enter_and_look)
    if "not permitted" in said or "No space" in said:
        pytest.skip(f"user namespaces: {said}")
    assert said == f"user 0, {[namespaces.CARD, 'lo']}"


# nothing is left


def held(inodes):
    """Return what still refers to one of the namespaces: processes, descriptors, mounts."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            names = [os.readlink(link) for link in (*process.glob("fd/*"), process / "ns/net")
                     if os.path.islink(link)]  # fmt: skip
            found += [f"{process}: {name}" for name in names for i in inodes if f"[{i}]" in name]
            found += [f"{process}: mounted" for i in inodes
                      if f"net:[{i}]" in (process / "mountinfo").read_text()]  # fmt: skip
    return found


def inodes_of(network):
    return [os.fstat(descriptor).st_ino for descriptor in (network.switch, *network.cards)]


@needs_hosts
def test_nothing_is_left_of_it():
    """Neither at the end of the context, nor when an error ends it, nor names for anybody."""
    cards, names = set(psutil.net_if_addrs()), sorted(Path("/run").glob("netns/*"))
    with contextlib.suppress(KeyError), namespaces.hosts([RATE] * 2) as network:
        inodes = inodes_of(network)
        assert held(inodes), "the scan below finds what is there"
        assert (set(psutil.net_if_addrs()), sorted(Path("/run").glob("netns/*"))) == (cards, names)
        raise KeyError
    assert held(inodes) == []


@needs_hosts
def test_nothing_is_left_when_the_program_is_killed(tmp_path):
    """SIGKILL lets nobody tidy up: ranks end with their parent, and the namespaces with them."""
    reader, writer = os.pipe()
    program = os.fork()
    if program == 0:
        with namespaces.hosts([RATE] * 2) as network:
            if os.fork() == 0:
                network.enter(0)
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                os.write(writer, " ".join(map(str, inodes_of(network))).encode())
                time.sleep(60)
                os._exit(0)
            time.sleep(60)
        os._exit(0)
    inodes = os.read(reader, 4096).decode().split()
    assert len({line.partition(":")[0] for line in held(inodes)}) == 2, "program and rank"
    os.kill(program, signal.SIGKILL)
    os.waitpid(program, 0)
    give_up = time.monotonic() + 20
    while held(inodes) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert held(inodes) == []


# where it cannot be had


def refuse(name, *arguments):
    raise PermissionError(1, f"{name}: Operation not permitted")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ((sys, "platform"), "darwin", "needs network namespaces, which Linux has"),
        ((namespaces, "call"), refuse, "a slow link: unshare: Operation not permitted"),
        pytest.param((namespaces, "_build"), lambda *_: os.kill(os.getpid(), 9), "was killed",
                     marks=needs_hosts),
    ],
)  # fmt: skip
def test_it_says_in_one_line_why_it_cannot(monkeypatch, name, value, says):
    monkeypatch.setattr(*name, value)
    namespaces.why_not.cache_clear()
    try:
        reason = namespaces.why_not()
    finally:
        namespaces.why_not.cache_clear()
    assert says in reason and "\n" not in reason


def test_more_hosts_than_it_can_connect_are_refused():
    with pytest.raises(cli.UsageError, match="250 ranks at most, not 251"):
        namespaces.hosts([RATE] * 251).__enter__()
