"""The slow network of a sweep: all traffic crosses it, both ways, and nothing of it is left."""

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

import bench_link
from dist_common import cli

full = pytest.mark.full
why_not = bench_link.why_not()
needs_a_link = pytest.mark.skipif(why_not is not None, reason=str(why_not))

RATE = 12.5e6  # bytes/s: 100 Mbit/s
COUNT = 500_000  # numbers: 2 MB, 160 ms of the link
NOBODY = 65534
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4  # prctl(2)
prctl = getattr(ctypes.CDLL(None), "prctl", None)


def on_a_network(body, world_size, folder, rate=RATE):
    """Call body(rank, world_size) on gloo ranks, behind cards of a rate or, for None, without."""
    port = str(free_port())

    def one(rank, network):
        if network:
            network.enter(rank)
        else:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        value = body(rank, world_size)
        dist.barrier()
        dist.destroy_process_group()
        return value

    with bench_link.namespaces(world_size, rate) if rate else contextlib.nullcontext() as network:
        ended = fork_ranks(lambda rank: one(rank, network), world_size, folder, 60, True)
    assert not any(ended.codes), ended.stderr
    return ended.returned


def seconds_of_all_reduce(rank, world_size):
    """Return the shortest of three all-reduces, what the card sent for one, and the result."""
    before, seconds = None, []
    for _ in range(3):
        tensor = torch.full((COUNT,), float(rank + 1))
        dist.barrier()
        before = psutil.net_io_counters(pernic=True)
        started = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - started)
    after = psutil.net_io_counters(pernic=True)
    card = bench_link.CARD
    sent = after[card].bytes_sent - before[card].bytes_sent if card in after else None
    return min(seconds), sent, bool((tensor == sum(range(1, world_size + 1))).all())


# as fast as asked for


@needs_a_link
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=full)])
def test_an_all_reduce_takes_what_its_bytes_need(world_size, tmp_path):
    """The link is 20 times slower than what a machine's own memory does."""
    sent_by_a_rank = 2 * (world_size - 1) / world_size * COUNT * 4
    least = (sent_by_a_rank - bench_link.BURST_BYTES) / RATE
    slow = on_a_network(seconds_of_all_reduce, world_size, tmp_path / "slow")
    quick = on_a_network(seconds_of_all_reduce, world_size, tmp_path / "quick", rate=None)
    for seconds, sent, right in slow:
        assert right
        assert sent == pytest.approx(sent_by_a_rank, rel=0.1), "headers are 5 percent"
        assert least < seconds < 3 * least
    assert all(right for _, _, right in quick)
    assert min(seconds for seconds, *_ in quick) < least / 3


@needs_a_link
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

    seconds = on_a_network(send, 3, tmp_path)[0]
    assert seconds > 2 * (COUNT * 4 - bench_link.BURST_BYTES) / RATE


JOB = ("--seq-len 64 --global-batch-size 4 --max-steps 3 --log-every 1 --save-every 0 "
       "--parity-steps 0 --micro-batch-size 2 --timeout 60")  # fmt: skip
TEMPLATES = [
    ("01-ddp-basics/ddp_training.py", "--eval-every 0", 2.5e6),
    ("02-fsdp/fsdp_transformer.py", "", 2.5e6),
    ("05-advanced/hybrid_parallelism.py", "--pp 2", 0.125e6),  # sends activations: fewer bytes
]


@full
@needs_a_link
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
        with bench_link.namespaces(2, rate) if slow else contextlib.nullcontext() as network:
            body = functools.partial(train, network=network, folder=tmp_path / name)
            ended = fork_ranks(body, 2, tmp_path / f"{name}-ranks", 120, True)
        assert ended.codes == [0, 0], ended.stderr
        metrics[name] = results_of(tmp_path / name)["metrics"]
    assert metrics["slow"]["final_loss"] == metrics["quick"]["final_loss"]
    least_ms = 1e3 * (metrics["quick"]["bytes_sent_per_step"] - bench_link.BURST_BYTES) / rate
    assert min(metrics["slow"]["step_times_ms"]) > least_ms
    assert min(metrics["quick"]["step_times_ms"]) < least_ms / 3


# without privileges


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


@needs_a_link
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run without root already")
def test_it_needs_no_root():
    def enter_and_look():
        bench_link.why_not.cache_clear()
        if bench_link.why_not():
            return bench_link.why_not()
        with bench_link.namespaces(2, RATE) as network:
            network.enter(1)
            return f"user {os.geteuid()}, {sorted(psutil.net_if_addrs())}"

    said = as_nobody(enter_and_look)
    if "not permitted" in said or "No space" in said:
        pytest.skip(f"user namespaces: {said}")
    assert said == f"user 0, {[bench_link.CARD, 'lo']}"


# nothing is left


def held(inodes):
    """Return what still refers to one of the namespaces: processes, descriptors, mounts."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            links = [*process.glob("fd/*"), process / "ns/net"]
            names = [os.readlink(link) for link in links if os.path.islink(link)]
            found += [f"{process}: {name}" for name in names for i in inodes if f"[{i}]" in name]
            found += [f"{process}: mounted" for i in inodes
                      if f"net:[{i}]" in (process / "mountinfo").read_text()]  # fmt: skip
    return found


def inodes_of(network):
    return [os.fstat(descriptor).st_ino for descriptor in (network.switch, *network.cards)]


@needs_a_link
def test_nothing_is_left_of_it():
    """Neither at the end of the context, nor when an error ends it, nor names for anybody."""
    cards, names = set(psutil.net_if_addrs()), sorted(Path("/run").glob("netns/*"))
    with contextlib.suppress(KeyError), bench_link.namespaces(2, RATE) as network:
        inodes = inodes_of(network)
        assert held(inodes), "the scan below finds what is there"
        assert (set(psutil.net_if_addrs()), sorted(Path("/run").glob("netns/*"))) == (cards, names)
        raise KeyError
    assert held(inodes) == []


@needs_a_link
def test_nothing_is_left_when_the_sweep_is_killed(tmp_path):
    """SIGKILL lets nobody tidy up: ranks end with their parent, and the namespaces with them."""
    reader, writer = os.pipe()
    sweep = os.fork()
    if sweep == 0:
        with bench_link.namespaces(2, RATE) as network:
            if os.fork() == 0:
                network.enter(0)
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                os.write(writer, " ".join(map(str, inodes_of(network))).encode())
                time.sleep(60)
                os._exit(0)
            time.sleep(60)
        os._exit(0)
    inodes = os.read(reader, 4096).decode().split()
    assert len({line.partition(":")[0] for line in held(inodes)}) == 2, "sweep and rank"
    os.kill(sweep, signal.SIGKILL)
    os.waitpid(sweep, 0)
    give_up = time.monotonic() + 20
    while held(inodes) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert held(inodes) == []


# where it cannot be had


def reason_when(monkeypatch, name, value):
    monkeypatch.setattr(*name, value)
    bench_link.why_not.cache_clear()
    try:
        return bench_link.why_not()
    finally:
        monkeypatch.undo()
        bench_link.why_not.cache_clear()


def refuse(name, *arguments):
    raise PermissionError(1, f"{name}: Operation not permitted")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ((sys, "platform"), "darwin", "needs network namespaces, which Linux has"),
        ((bench_link, "_call"), refuse, "a slow link: unshare: Operation not permitted"),
        pytest.param((bench_link.shutil, "which"), lambda *_, **__: None, "no program ip",
                     marks=needs_a_link),
        pytest.param((bench_link, "CARD"), "a name that is too long", "link: ip: ",
                     marks=needs_a_link),
        pytest.param((bench_link, "_built"), lambda *_: os.kill(os.getpid(), 9), "was killed",
                     marks=needs_a_link),
    ],
)  # fmt: skip
def test_it_says_in_one_line_why_it_cannot(monkeypatch, name, value, says):
    reason = reason_when(monkeypatch, name, value)
    assert says in reason and "\n" not in reason


def test_more_ranks_than_it_can_connect_are_refused():
    with pytest.raises(cli.UsageError, match="250 ranks at most, not 251"):
        bench_link.namespaces(251, RATE).__enter__()
