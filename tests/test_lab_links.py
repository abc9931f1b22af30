"""Emulated links and hosts: right results, no sooner than the link allows, nothing left behind."""

import contextlib
import ctypes
import functools
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import fork_ranks, free_port, load_script, results_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from dist_common import cli, runtime
from dist_common.lab import links, namespaces

full = pytest.mark.full
why_not = links.why_not()
needs_hosts = pytest.mark.skipif(why_not is not None, reason=str(why_not))
RATE = 12.5e6  # bytes/s: 100 Mbit/s
COUNT = 250_000  # numbers: 1 MB, so that what a bucket lets through at once is a small part
LATE = "by collectives that complete late"
NOBODY = 65534
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4  # prctl(2)
prctl = getattr(ctypes.CDLL(None), "prctl", None)

# a group


def collectives(rank, world_size):
    """Return the line, and for each collective whether it is right, and its seconds over minimum.

    The minimum is what the link's speed allows at least; a busy machine only takes longer.
    """
    group, line = links.slow_group(RATE)
    found = {}
    n = world_size
    own = torch.full((COUNT,), float(rank + 1))
    mean, whole = own.clone(), torch.empty(n * COUNT)
    wide, narrow = torch.ones(n * COUNT), torch.empty(COUNT)
    ranks = torch.arange(1.0, n + 1)

    def timed(name, call, result, expected, factor):
        dist.barrier()
        started = time.perf_counter()
        call()
        seconds = time.perf_counter() - started
        least = factor * own.nbytes / RATE
        found[name] = torch.equal(result, expected), seconds - least

    timed("all_reduce", lambda: dist.all_reduce(mean, group=group), mean,
          ranks.sum().expand(COUNT), 2 * (n - 1) / n)  # fmt: skip
    timed("all_gather", lambda: runtime.all_gather_single(whole, own, group=group), whole,
          ranks.repeat_interleave(COUNT), n - 1)  # fmt: skip
    timed("reduce_scatter", lambda: runtime.reduce_scatter_single(narrow, wide, group=group),
          narrow, torch.full((COUNT,), float(n)), n - 1)  # fmt: skip
    handle = dist.all_reduce(own.clone(), group=group, async_op=True)
    handle.wait()
    found["async"] = handle.is_completed(), 0.0
    return line, found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=full)])
def test_collectives_are_right_and_take_what_their_bytes_need(on_ranks, world_size):
    for line, found in on_ranks(collectives, world_size):
        assert LATE in line and "100 Mbit/s" in line
        for name, (right, over) in found.items():
            assert right, name
            assert over >= 0, f"{name} was {-over:.3f} s faster than the link"


def seconds_of_small_sums(rank, world_size):
    """Return how long ten small all-reduces take over what the speed allows."""
    group, _ = links.slow_group(RATE)
    numbers = torch.ones(COUNT // 50)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(10):
        dist.all_reduce(numbers, group=group)
    assert numbers[0] == world_size**10
    least = 10 * 2 * (world_size - 1) / world_size * numbers.nbytes / RATE
    return time.perf_counter() - started - least


def test_small_messages_are_delayed_too(on_ranks):
    assert all(over >= 0 for over in on_ranks(seconds_of_small_sums, 2))


def no_link(rank, world_size):
    group, line = links.slow_group(0)
    return group is dist.group.WORLD, line


def test_without_a_speed_it_is_the_default_group(on_ranks):
    assert on_ranks(no_link, 2) == [(True, "link: none emulated")] * 2


def gradients(rank, world_size):
    """Return the gradients of a model under DDP and fully_shard, on a late group and without."""
    group, _ = links.slow_group(1e9)
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


def test_ddp_and_fsdp_train_over_a_late_group(on_ranks):
    for found in on_ranks(gradients, 2):
        for other in found[1:]:
            assert other == pytest.approx(found[0], rel=1e-5)


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


def on_hosts(body, world_size, folder, rate=RATE):
    """Call body(rank, world_size) on gloo ranks, on a host each or, without a rate, on none."""
    port = str(free_port())

    def one(rank, network):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        if network:
            network.enter(rank)
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        value = body(rank, world_size)
        dist.barrier()
        dist.destroy_process_group()
        return value

    with links.hosts([rate] * world_size) if rate else contextlib.nullcontext() as network:
        ended = fork_ranks(lambda rank: one(rank, network), world_size, folder, 60, True)
    assert not any(ended.codes), ended.stderr
    return ended.returned


def seconds_of_all_reduce(rank, world_size):
    """Return the shortest of three all-reduces, what the card sent for one, and the result."""
    seconds = []
    for _ in range(3):
        tensor = torch.full((2 * COUNT,), float(rank + 1))
        dist.barrier()
        before = psutil.net_io_counters(pernic=True)
        started = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - started)
    after, card = psutil.net_io_counters(pernic=True), links.CARD
    sent = after[card].bytes_sent - before[card].bytes_sent if card in after else None
    return min(seconds), sent, bool((tensor == sum(range(1, world_size + 1))).all())


@needs_hosts
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=full)])
def test_an_all_reduce_takes_what_its_bytes_need(world_size, tmp_path):
    sent_by_a_rank = 2 * (world_size - 1) / world_size * 2 * COUNT * 4
    least = (sent_by_a_rank - links.BURST_BYTES) / RATE
    for seconds, sent, right in on_hosts(seconds_of_all_reduce, world_size, tmp_path / "slow"):
        assert right
        assert sent == pytest.approx(sent_by_a_rank, rel=0.1), "headers are 5 percent"
        assert seconds > least


@needs_hosts
def test_what_a_card_receives_is_limited_too(tmp_path):
    """Two ranks send to a third at once: twice as long as one of them would take."""

    def send(rank, world_size):
        tensor, other = torch.ones(COUNT), torch.empty(COUNT)
        dist.barrier()
        started = time.perf_counter()
        works = [dist.isend(tensor, 0)] if rank else [dist.irecv(t, s) for t, s in
                                                      ((tensor, 1), (other, 2))]  # fmt: skip
        for work in works:
            work.wait()
        return time.perf_counter() - started

    seconds = on_hosts(send, 3, tmp_path)[0]
    assert seconds > 2 * (COUNT * 4 - links.BURST_BYTES) / RATE


JOB = ("--seq-len 64 --global-batch-size 4 --max-steps 3 --log-every 1 --save-every 0 "
       "--eval-every 0 --parity-steps 0 --micro-batch-size 2 --timeout 60")  # fmt: skip
TEMPLATES = [
    ("01-ddp-basics/ddp_training.py", "", 2.5e6),
    ("02-fsdp/fsdp_transformer.py", "", 2.5e6),
    ("05-advanced/hybrid_parallelism.py", "--pp 2", 0.125e6),  # sends activations: fewer bytes
]


@full
@needs_hosts
@pytest.mark.parametrize(("path", "flags", "rate"), TEMPLATES)
def test_every_strategy_is_slowed_alike(path, flags, rate, tmp_path):
    """A template knows nothing of the link: its steps take what their bytes need, none is lost."""
    script, port = load_script(path), str(free_port())
    metrics = {}

    def train(rank, network, folder):
        names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")
        os.environ.update(zip(names, map(str, (2, 2, rank, rank)), strict=True))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        if network:
            network.enter(rank)
        sys.argv = [path, *JOB.split(), *flags.split(), "--output-dir", str(folder)]
        cli.run(script.main)

    for name in ("slow", "quick"):
        slow = name == "slow"
        with links.hosts([rate] * 2) if slow else contextlib.nullcontext() as network:
            body = functools.partial(train, network=network, folder=tmp_path / name)
            ended = fork_ranks(body, 2, tmp_path / f"{name}-ranks", 120, True)
        assert ended.codes == [0, 0], ended.stderr
        metrics[name] = results_of(tmp_path / name)["metrics"]
    assert metrics["slow"]["final_loss"] == metrics["quick"]["final_loss"]
    least_ms = 1e3 * (metrics["quick"]["bytes_sent_per_step"] - links.BURST_BYTES) / rate
    assert min(metrics["slow"]["step_times_ms"]) > least_ms


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
        links.why_not.cache_clear()
        if links.why_not():
            return links.why_not()
        with links.hosts([RATE] * 2) as network:
            network.enter(1)
            return f"user {os.geteuid()}, {sorted(psutil.net_if_addrs())}"

    said = as_nobody(enter_and_look)
    if "not permitted" in said or "No space" in said:
        pytest.skip(f"user namespaces: {said}")
    assert said == f"user 0, {[links.CARD, 'lo']}"


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
    with contextlib.suppress(KeyError), links.hosts([RATE] * 2) as network:
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
        with links.hosts([RATE] * 2) as network:
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
        pytest.param((namespaces.shutil, "which"), lambda *_, **__: None, "no program ip",
                     marks=needs_hosts),
        pytest.param((namespaces, "CARD"), "a name that is too long", "link: ip: ",
                     marks=needs_hosts),
        pytest.param((namespaces, "_build"), lambda *_: os.kill(os.getpid(), 9), "was killed",
                     marks=needs_hosts),
    ],
)  # fmt: skip
def test_it_says_in_one_line_why_it_cannot(monkeypatch, name, value, says):
    monkeypatch.setattr(*name, value)
    links.why_not.cache_clear()
    try:
        reason = links.why_not()
    finally:
        links.why_not.cache_clear()
    assert says in reason and "\n" not in reason


def test_more_hosts_than_it_can_connect_are_refused():
    with pytest.raises(cli.UsageError, match="250 ranks at most, not 251"):
        links.hosts([RATE] * 251).__enter__()
