"""The emulated link: real results, no sooner than the link allows, and nothing left behind."""

import os
import shutil
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import link_group

RATE = 12.5e6  # bytes/s: 100 Mbit/s
COUNT = 250_000  # numbers: 1 MB, so that what tbf lets through at once is a small part
LATE, NAMESPACES = "by collectives that complete late", "by network namespaces"


def machine_allows_namespaces() -> bool:
    """Try it: root in a container may not, and a kernel may lack bridges or tbf."""
    if not all(map(shutil.which, ("unshare", "ip", "tc"))):
        return False
    bridge = "ip link add x type bridge && ip link set x up"
    limit = "tc qdisc add dev x root tbf rate 1mbit burst 9000 latency 1s"
    command = ["unshare", "--net", "sh", "-c", f"{bridge} && {limit}"]
    return subprocess.run(command, capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(
    not machine_allows_namespaces(), reason="needs network namespaces: root on Linux, ip and tc"
)


def refuse_namespaces(monkeypatch, why="told to"):
    monkeypatch.setattr(link_group, "_group_in_namespaces", lambda rate: (None, why))


def collectives(rank, world_size, rate=RATE):
    """Return the line, and for each collective whether it is right, and its seconds over minimum.

    The minimum is what the link's speed allows at least; a busy machine only takes longer.
    """
    before = os.readlink("/proc/self/ns/net") if os.path.exists("/proc/self/ns/net") else None
    group, line = link_group.slow_group(rate)
    found = {}
    own = torch.full((COUNT,), float(rank + 1))
    total = sum(range(1, world_size + 1))

    def timed(name, call, result, expected, sent):
        dist.barrier()
        started = time.perf_counter()
        call()
        seconds = time.perf_counter() - started
        least = (sent - link_group.BURST_BYTES) / rate
        found[name] = bool((result == expected).all()), seconds - least

    n, size = world_size, own.nbytes
    mean = own.clone()
    timed("all_reduce", lambda: dist.all_reduce(mean, group=group), mean, total,
          2 * (n - 1) / n * size)  # fmt: skip
    parts = [torch.empty(COUNT) for _ in range(n)]
    expected = torch.arange(1, n + 1).float()[:, None].expand(n, COUNT)
    gather = dist.all_gather
    timed("all_gather", lambda: gather(parts, own, group=group), torch.zeros(1), 0, (n - 1) * size)
    found["all_gather"] = torch.equal(torch.stack(parts), expected), found["all_gather"][1]
    wide, narrow = torch.ones(n * COUNT), torch.empty(COUNT)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    timed("reduce_scatter", lambda: scatter(narrow, wide, group=group), narrow, n, (n - 1) * size)

    handle = dist.all_reduce(own.clone(), group=group, async_op=True)
    handle.wait()
    found["async"] = handle.is_completed(), 0.0
    same_place = before is None or os.readlink("/proc/self/ns/net") == before
    return line, found, same_place


def judge(returned, how):
    for line, found, same_place in returned:
        assert how in line and "100 Mbit/s" in line
        assert same_place
        for name, (right, over) in found.items():
            assert right, name
            assert over >= 0, f"{name} was {-over:.3f} s faster than the link"


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_collectives_complete_late(on_ranks, monkeypatch, world_size):
    refuse_namespaces(monkeypatch)
    judge(on_ranks(collectives, world_size), LATE)


@needs_namespaces
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_namespaces(on_ranks, world_size):
    """Each namespace goes with its process: this one has no bridge afterwards."""
    judge(on_ranks(collectives, world_size), NAMESPACES)
    assert not os.path.exists(f"/sys/class/net/{link_group.CARD}")


def small_messages(rank, world_size):
    """Return the line, and how long ten messages take over what the link's speed allows at least.

    Each is below BURST_BYTES; together they are not.
    """
    group, line = link_group.slow_group(RATE, late=True)
    numbers = torch.ones(COUNT // 20)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(10):
        dist.all_reduce(numbers, group=group)
    sent = 10 * 2 * (world_size - 1) / world_size * numbers.nbytes
    assert numbers.nbytes < link_group.BURST_BYTES
    return line, time.perf_counter() - started - sent / RATE


def test_a_late_group_delays_small_messages_too(on_ranks):
    for line, over in on_ranks(small_messages, 2):
        assert LATE in line and over >= 0


def lines_and_sums(rank, world_size):
    group, line = link_group.slow_group(RATE)
    sum_ = torch.ones(10)
    dist.all_reduce(sum_, group=group)
    return line, sum_[0].item()


@needs_namespaces
def test_one_rank_without_namespaces_has_all_complete_late(on_ranks, monkeypatch):
    limit = link_group._limit

    def refused(rate, rank, pids):
        return ["ip link set no-such-card up"] if rank == 1 else limit(rate, rank, pids)

    monkeypatch.setattr(link_group, "_limit", refused)
    for line, total in on_ranks(lines_and_sums, 2):
        assert LATE in line and "no-such-card" in line
        assert total == 2


def test_without_tools_collectives_complete_late(on_ranks, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    for line, total in on_ranks(lines_and_sums, 2):
        assert LATE in line
        assert total == 2


class NoWayBack:
    """A C library that enters a namespace, as it says, and cannot leave it."""

    unshare = staticmethod(lambda flags: 0)
    setns = staticmethod(lambda namespace, flags: -1)


def test_a_process_that_cannot_leave_its_namespace_says_so(on_ranks, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(link_group.ctypes, "CDLL", lambda *_, **__: NoWayBack)
    for told in on_ranks(told_by_setns, 2):
        assert "left without a network" in told


def told_by_setns(rank, world_size):
    with pytest.raises(OSError) as told:
        link_group.slow_group(RATE)
    return str(told.value)


def no_link(rank, world_size):
    group, line = link_group.slow_group(0)
    return group is dist.group.WORLD, line


def test_without_a_speed_it_is_the_default_group(on_ranks):
    assert on_ranks(no_link, 2) == [(True, "link: none emulated")] * 2


def gradients(rank, world_size):
    """Return the gradients of a model under DDP and fully_shard, on a late group and without."""
    group, _ = link_group.slow_group(1e9)
    found = []
    for over in (group, dist.group.WORLD):
        for kind in ("ddp", "fsdp"):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
            if kind == "ddp":
                model = DDP(model, process_group=over)
            else:
                fully_shard(model, mesh=DeviceMesh.from_group(over, "cpu", mesh_dim_names=("dp",)))
            model(torch.full((2, 8), float(rank + 1))).square().sum().backward()
            grads = [p.grad for p in model.parameters()]
            if kind == "fsdp":
                for _ in range(30):  # functional collectives: one in ten or so once hung
                    whole = [grad.full_tensor() for grad in grads]
                grads = whole
            found.append(torch.cat([grad.flatten() for grad in grads]).tolist())
    return found


def test_ddp_and_fsdp_train_over_a_late_group(on_ranks, monkeypatch):
    refuse_namespaces(monkeypatch)
    for found in on_ranks(gradients, 2):
        for other in found[1:]:
            assert other == pytest.approx(found[0], rel=1e-5)


def killed_peer(rank, world_size):
    group, _ = link_group.slow_group(1e9)
    if rank == 1:
        return "left"
    with pytest.raises(RuntimeError, match="closed by peer|reset by peer|Timed out|timed out"):
        dist.all_reduce(torch.ones(10), group=group)
    return "told"


def test_a_lost_rank_is_told_on_a_late_group(on_ranks, monkeypatch):
    refuse_namespaces(monkeypatch)
    assert on_ranks(killed_peer, 2) == ["told", "left"]
