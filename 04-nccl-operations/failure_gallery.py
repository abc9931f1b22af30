"""Break a distributed job on purpose, in one of 18 ways; find what broke it; run it cured.

    CPU   python 04-nccl-operations/failure_gallery.py --case shapes-differ
    GPU   torchrun --standalone --nproc-per-node=2 04-nccl-operations/failure_gallery.py \\
            --case shapes-differ

As `python ...` it forks two ranks on the CPU, three times: broken, with a tool that finds the rank
to look at, and cured. Under torchrun it breaks the ranks that torchrun started, once, as it would
look in a job of your own. Without --case it lists the cases. Look for: what the ranks say, which
is seldom what is wrong. What they say is shortened: source files, addresses and ports are left out.

Sources: docs.pytorch.org, "Distributed communication package", section "Debugging
torch.distributed applications"; torchrun (Elastic Launch); py-spy; tcp(7) and listen(2) of Linux.
"""

import contextlib
import faulthandler
import os
import pickle
import queue
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from dist_common import cli, runtime
from dist_common.ranks import Rank, fork
from dist_common.report import Report

RANKS = 2
TIMEOUT_S = 2.0  # of every collective, so that a case takes seconds; PyTorch's own is 10 or 30 min
DEADLINE_S = 15.0  # of a job, after which its ranks are ended; --timeout makes it shorter
GRACE_S = 1.0  # after one rank failed, the other one still runs for so long where it would wait
WIDTH = 100  # of what a rank says, in characters

CASES = {}  # name: Case


@dataclass
class Case:
    """One way to break. `job` runs on each rank, and gets its rank and broken, found or cured."""

    job: Callable
    wrong: str  # what is wrong with the job
    says: str  # what a rank of the broken job says: a regular expression
    ends: tuple[str, str]  # how the two ranks of the broken job end
    tool: str  # what finds it
    clue: str  # what the tool says; its group is a rank, else the rank that says it is meant
    culprit: int  # the rank that the clue has to name
    cure: str
    right: object  # what each rank of the cured job returns
    launch: bool = False  # the job breaks before its ranks have met
    restarts: int = 0  # of the cured job, after a failure


def case(**facts):
    """Put a job into the gallery, under its name."""

    def add(job):
        CASES[job.__name__.replace("_", "-")] = Case(job, **facts)
        return job

    return add


def join(timeout_s=TIMEOUT_S):
    backend = "nccl" if torch.get_default_device().type == "cuda" else "gloo"
    if backend == "nccl":
        timeout_s *= 10  # its first collective connects the GPUs, which takes seconds
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def say(line):
    sys.stdout.write(f"{line}\n")  # in one piece, as ranks share the terminal
    sys.stdout.flush()  # a rank that is killed takes its buffer with it


DETAIL = "TORCH_DISTRIBUTED_DEBUG=DETAIL"  # compares what all ranks call, before they do


# The ranks do not call the same thing.


@case(wrong="a branch on the rank: one calls all_reduce, the other broadcast",
      says="Timed out waiting", ends=("exit code 1", "exit code 1"),
      tool=DETAIL, clue="Collectives differ in .* Op type: BROADCASTvs ALLREDUCE", culprit=1,
      cure="the same collective on every rank", right=2.0)  # fmt: skip
def different_collectives(rank, how):
    join()
    loss = torch.ones(1)
    if rank == 0 or how == "cured":
        dist.all_reduce(loss)
    else:
        dist.broadcast(loss, src=0)  # broken: rank 0 is in another collective
    return loss.item()


@case(wrong="two tensors of one shape, all-reduced in another order on rank 1",
      says="weight 11, bias 11", ends=("exit code 0", "exit code 0"),
      tool="names of the tensors, gathered before each all-reduce",
      clue=r"rank (1) reduces bias while rank 0 reduces weight", culprit=1,
      cure="an order that is the same on each rank: sorted by name", right="2 and 20")  # fmt: skip
def different_order(rank, how):
    join()
    gradients = {"weight": torch.ones(1), "bias": torch.full((1,), 10.0)}
    names = list(gradients) if rank == 0 else list(gradients)[::-1]  # as from a set of names
    if how == "cured":
        names = sorted(names)
    for name in names:
        if how == "found":
            met = [None] * RANKS
            dist.all_gather_object(met, name)
            if met[0] != met[1]:
                say(f"rank 1 reduces {met[1]} while rank 0 reduces {met[0]}")
        dist.all_reduce(gradients[name])  # broken: weight meets bias, and the shapes agree
    weight, bias = (gradients[name].item() for name in ("weight", "bias"))
    say(f"weight {weight:g}, bias {bias:g}")
    return f"{weight:g} and {bias:g}"


@case(wrong="the tensor of rank 1 is longer, as from a last batch that is not full",
      says="Received data size doesn't match expected size", ends=("SIGABRT", "exit code 1"),
      tool=DETAIL, clue="Collectives differ in .* shapes: 5vs 4", culprit=1,
      cure="pad to the longest, which all ranks agree on first", right=9.0)  # fmt: skip
def shapes_differ(rank, how):
    join()
    rows = torch.ones(4 + rank)
    if how == "cured":
        longest = torch.tensor(len(rows))
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        rows = torch.nn.functional.pad(rows, (0, int(longest) - len(rows)))
    dist.all_reduce(rows)  # broken: 4 numbers meet 5
    return rows.sum().item()


@case(wrong="the tensor of rank 1 has another dtype, as from a weight that was never cast",
      says="Received data size doesn't match expected size", ends=("SIGABRT", "exit code 1"),
      tool=DETAIL, clue="Collectives differ in .* dtypes: Doublevs Float", culprit=1,
      cure="cast before the collective", right=8.0)  # fmt: skip
def dtypes_differ(rank, how):
    join()
    gradient = torch.ones(4, dtype=(torch.float32, torch.float64)[rank])
    if how == "cured":
        gradient = gradient.float()
    dist.all_reduce(gradient)  # broken: 4 bytes a number meet 8
    return gradient.sum().item()


def gathered_weights(rank):
    parts = [torch.empty(1) for _ in range(RANKS)]
    dist.all_gather(parts, torch.tensor([float(rank)]))
    return torch.cat(parts).sum().item()


@case(wrong="weights are gathered inside `if rank == 0`, as for a checkpoint",
      says="Timed out waiting", ends=("exit code 1", "exit code 1"),
      tool="the stack of each rank, after 1 s: faulthandler, or py-spy from outside",
      clue='"failure_gallery.py" in gathered_weights', culprit=0,
      cure="all ranks gather, rank 0 alone writes", right=1.0)  # fmt: skip
def gather_on_rank_0(rank, how):
    join()
    if how == "found":
        faulthandler.dump_traceback_later(1.0)
    if rank == 0 or how == "cured":
        weights = gathered_weights(rank)  # broken: rank 1 is in the barrier already
    dist.barrier()
    return weights


# One rank fails, or keeps the others waiting.


@case(wrong="rank 1 is killed in its second step, as for memory by the kernel",
      says="Connection (closed|reset) by peer", ends=("exit code 1", "SIGKILL"),
      tool="monitored_barrier before each step",
      clue=r"Rank (1) failed to pass monitoredBarrier", culprit=1,
      cure="a checkpoint after each step, and a launcher that starts the ranks again",
      right="3 steps, 2 of them after the restart", restarts=1)  # fmt: skip
def rank_dies(rank, how):
    join()
    first, checkpoint = 0, Path("checkpoint")
    if how == "cured" and checkpoint.exists():
        first = int(checkpoint.read_text())
    for step in range(first, 3):
        if rank == 1 and step == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "found":
            dist.monitored_barrier(timeout=timedelta(seconds=TIMEOUT_S))  # without: 30 minutes
        dist.all_reduce(torch.ones(1))  # broken: rank 0 loses the connection here
        if how == "cured" and rank == 0:
            checkpoint.write_text(str(step + 1))
    return f"3 steps, {3 - first} of them after the restart"


def next_batch(batches, how):
    if how == "cured":
        with contextlib.suppress(queue.Empty):
            return batches.get(timeout=0.2)
        return torch.ones(1)  # read by this rank itself, or the error told
    return batches.get()  # broken: the thread that fills the queue has died


@case(wrong="rank 1 waits for a batch that never comes",
      says="Timed out waiting", ends=("exit code 1", "waits"),
      tool="the stack of each rank, after 1 s: faulthandler, or py-spy from outside",
      clue='"failure_gallery.py" in next_batch', culprit=1,
      cure="no wait without a limit of its own", right=2.0)  # fmt: skip
def rank_hangs(rank, how):
    join()
    if how == "found":
        faulthandler.dump_traceback_later(1.0)
    batches = queue.SimpleQueue()
    if rank == 0:
        batches.put(torch.ones(1))
    batch = next_batch(batches, how)
    dist.all_reduce(batch)
    return batch.item()


@case(wrong="rank 1 needs 300 ms for a step, and rank 0 needs 10 ms",
      says=r"3 steps took (9\d\d|\d{4,}) ms", ends=("exit code 0", "exit code 0"),
      tool="how long each rank waits in the all-reduce",
      clue=r"rank (1) waits least", culprit=1,
      cure="a rank 1 as fast as the other: another machine, an equal share", right=2.0)  # fmt: skip
def rank_slow(rank, how):
    join()
    step_s = 0.3 if rank == 1 and how != "cured" else 0.01
    waited, started = 0.0, time.perf_counter()
    for _ in range(3):
        time.sleep(step_s)  # forward and backward
        arrived, gradient = time.perf_counter(), torch.ones(1)
        dist.all_reduce(gradient)
        total = gradient.item()  # on a GPU it is here that a rank waits
        waited += time.perf_counter() - arrived
    say(f"3 steps took {1e3 * (time.perf_counter() - started):.0f} ms")
    if how == "found":
        waits = [None] * RANKS
        dist.all_gather_object(waits, waited)
        least = waits.index(min(waits))
        say(f"rank {least} waits least, {1e3 * waits[least]:.0f} ms of {1e3 * max(waits):.0f} ms")
    return total


@case(wrong="rank 1 meets an exception before the collective",
      says="Connection (closed|reset) by peer", ends=("exit code 1", "exit code 1"),
      tool="a word in the store, which the first rank to fail claims",
      clue=r"rank (1) failed first", culprit=1,
      cure="all ranks agree before the collective whether each has a batch",
      right="skipped the batch together")  # fmt: skip
def exception_on_one_rank(rank, how):
    join()
    usable = torch.ones(1)
    try:
        if rank == 1:
            raise ValueError("sample 7 cannot be decoded")
    except ValueError as error:
        if how == "found" and dist.group.WORLD.get_group_store().add("failed", 1) == 1:
            say(f"rank {rank} failed first: {error}")
        if how != "cured":
            raise
        usable.zero_()
    if how == "cured":
        dist.all_reduce(usable, op=dist.ReduceOp.MIN)
        if not usable:
            return "skipped the batch together"
    gradient = torch.ones(1)
    dist.all_reduce(gradient)  # broken: rank 1 never comes
    return gradient.item()


@case(wrong="rank 1 has 3 batches, rank 0 has 4",
      says="Connection (closed|reset) by peer", ends=("exit code 1", "exit code 0"),
      tool="the flight recorder: the number of each rank's last collective",
      clue=r"rank (1) left after collective 3, rank 0 waits in collective 4", culprit=1,
      cure="as many steps as the rank with the fewest has batches", right=6.0)  # fmt: skip
def leaves_early(rank, how):
    join()
    batches, total = 4 - rank, 0.0
    if how == "cured":
        fewest = torch.tensor(batches)
        dist.all_reduce(fewest, op=dist.ReduceOp.MIN)
        batches = int(fewest)
    try:
        for _ in range(batches):
            gradient = torch.ones(1)
            dist.all_reduce(gradient)  # broken: rank 0 is alone in the fourth
            total += gradient.item()
    finally:
        if how == "found":
            store, last = dist.group.WORLD.get_group_store(), last_collective()
            store.set(f"last/{rank}", str(last))
            if rank == 0:
                other = int(store.get("last/1"))
                say(f"rank 1 left after collective {other}, rank 0 waits in collective {last}")
    return total


def last_collective():
    """Ask the flight recorder, where PyTorch notes each collective, for the last one's number."""
    # With the stacks it takes seconds, since PyTorch loads its compiler to read them.
    trace = torch._C._distributed_c10d._dump_fr_trace(includeStackTraces=False)
    return pickle.loads(trace)["pg_status"]["0"]["last_enqueued_collective"]


@case(wrong="rank 0 writes a checkpoint for 2 s, and a collective may take 1 s",
      says="Timed out waiting 1000ms", ends=("exit code 1", "exit code 1"),
      tool="how long each rank takes to the collective",
      clue=r"rank (0) arrives after \S+ s, the timeout is 1 s", culprit=0,
      cure="a timeout above the longest work that one rank does alone", right=2.0)  # fmt: skip
def timeout_too_short(rank, how):
    timeout_s = 60 if how == "cured" else 1
    join(timeout_s)
    started = time.perf_counter()
    if rank == 0:
        time.sleep(2.0 if torch.get_default_device().type == "cpu" else 20.0)
    took = time.perf_counter() - started
    if how == "found" and took > timeout_s:
        say(f"rank {rank} arrives after {took:.1f} s, the timeout is {timeout_s} s")
    gradient = torch.ones(1)
    dist.all_reduce(gradient)  # broken: nothing is wrong with rank 0, but rank 1 has given up
    return gradient.item()


# No rank fails, and the numbers are wrong.


@case(wrong="a sampler is never told the epoch",
      says=r"losses (.+), then \1$", ends=("exit code 0", "exit code 0"),
      tool="the sampler's own epoch, in the second epoch",
      clue=r"rank (0): epoch 1, but the sampler shuffles for epoch 0", culprit=0,
      cure="sampler.set_epoch(epoch) before each epoch", right=True)  # fmt: skip
def set_epoch_forgotten(rank, how):
    join()
    sampler = DistributedSampler(range(8), num_replicas=RANKS, rank=rank)
    losses = []
    for epoch in range(2):
        if how == "cured":
            sampler.set_epoch(epoch)
        if how == "found" and sampler.epoch != epoch and rank == 0:
            say(f"rank 0: epoch {epoch}, but the sampler shuffles for epoch {sampler.epoch}")
        with torch.device("cpu"):
            losses.append(" ".join(str(sample) for sample in sampler))  # a loss is its number here
    say(f"losses {losses[0]}, then {losses[1]}")  # broken: the curve of each epoch is the same
    return losses[0] != losses[1]


@case(wrong="one number in the gradients of rank 1 is NaN",
      says="loss nan", ends=("exit code 0", "exit code 0"),
      tool="isfinite of each rank's gradients, gathered before the all-reduce",
      clue=r"rank (1) has gradients that are not finite", culprit=1,
      cure="all ranks skip the step when one rank has to", right=4.0)  # fmt: skip
def nan_on_one_rank(rank, how):
    join()
    weights, gradient = torch.ones(4), torch.ones(4)
    if rank == 1:
        gradient[2] = float("nan")
    finite = gradient.isfinite().all()
    if how == "found":
        everywhere = [None] * RANKS
        dist.all_gather_object(everywhere, bool(finite))
        say(f"rank {everywhere.index(False)} has gradients that are not finite")
    if how == "cured":
        usable = finite.float()
        dist.all_reduce(usable, op=dist.ReduceOp.MIN)
        if not usable:
            gradient.zero_()
    dist.all_reduce(gradient)  # broken: NaN on all ranks, and who had it first is gone
    loss = (weights - 0.1 * gradient).sum().item()
    say(f"loss {loss:g}")
    return loss


# The ranks never meet.


@case(wrong="rank 1 has a MASTER_ADDR that is no machine",
      says=r"network addresses of \(gpu-node-01.invalid, \w+\) cannot be retrieved",
      ends=("exit code 1", "exit code 1"),
      tool="getaddrinfo on each rank", clue=r"rank (1) cannot resolve", culprit=1,
      cure="the name or address of rank 0's machine, as this rank knows it", right=2.0,
      launch=True)  # fmt: skip
def wrong_master_addr(rank, how):
    if rank == 1 and how != "cured":
        os.environ["MASTER_ADDR"] = "gpu-node-01.invalid"  # a name that never exists (RFC 6761)
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # where no name server answers
    if how == "found":
        try:
            socket.getaddrinfo(os.environ["MASTER_ADDR"], None)
        except OSError as error:
            say(f"rank {rank} cannot resolve {os.environ['MASTER_ADDR']}: {error.strerror}")
    return joined_sum()


@case(wrong="another program has MASTER_PORT on rank 0's machine",
      says="EADDRINUSE", ends=("exit code 1", "waits"),
      tool="bind on rank 0, as init_process_group does; `ss -ltnp` names the program",
      clue=r"rank (0): port \w+ is taken", culprit=0,
      cure="another port; torchrun --standalone finds a free one", right=2.0,
      launch=True)  # fmt: skip
def port_in_use(rank, how):
    address = ("", int(os.environ["MASTER_PORT"]))
    if rank == 0:
        other_program = socket.create_server(address)  # noqa: F841  it keeps the port until it ends
        if how == "found":
            try:
                socket.create_server(address)
            except OSError as error:
                say(f"rank 0: port {address[1]} is taken: {error.strerror}")
    if how == "cured":
        os.environ["MASTER_PORT"] = os.environ["SPARE_PORT"]
    return joined_sum(timeout_s=60)  # rank 1 waits for so long, or until it is ended


@case(wrong="GLOO_SOCKET_IFNAME names an interface that is not there",
      says="Unable to find address for: eth99", ends=("exit code 1", "exit code 1"),
      tool="the interfaces of the machine: `ip address`, or if_nameindex",
      clue=r"rank (0): eth99 is none of", culprit=0,
      cure="an interface that is there, or none: then gloo takes the host name's", right=2.0,
      launch=True)  # fmt: skip
def no_such_interface(rank, how):
    there = [name for _, name in socket.if_nameindex()]
    os.environ["GLOO_SOCKET_IFNAME"] = there[0] if how == "cured" else "eth99"
    if how == "found" and rank == 0:
        say(f"rank 0: {os.environ['GLOO_SOCKET_IFNAME']} is none of {' '.join(there)}")
    return joined_sum()


def port_that_drops():
    """Listen on a port that answers no more, as behind a firewall: Linux drops what asks for it."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    queued = [socket.socket() for _ in range(3)]  # more than the queue holds; none is accepted
    for connection in queued:
        connection.setblocking(False)
        connection.connect_ex(listener.getsockname())
    return listener, queued


@case(wrong="a firewall drops what rank 1 sends to MASTER_PORT",
      says=r"The client socket has timed out after \d+ms while trying to connect",
      ends=("exit code 1", "exit code 1"),
      tool="a connection of each rank to MASTER_PORT: `nc -vz -w 2 HOST PORT`",
      clue=r"rank (1) gets no answer", culprit=1,
      cure="open the port between the machines, and all others: ranks connect to each other",
      right=2.0, launch=True)  # fmt: skip
def firewall_drops(rank, how):
    if rank == 1 and how != "cured":
        wall = port_that_drops()
        os.environ["MASTER_PORT"] = str(wall[0].getsockname()[1])
    if rank == 1 and how == "found":
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            socket.create_connection(address, timeout=0.5).close()
        except TimeoutError:
            say("rank 1 gets no answer: dropped on the way")  # without a listener: refused at once
    return joined_sum()


@case(wrong="WORLD_SIZE is 3, and 2 ranks were started",
      says="2/3 clients joined", ends=("exit code 1", "exit code 1"),
      tool="a store without a group, in which each rank signs",
      clue=r"rank (2) of 3 never came", culprit=2,
      cure="a WORLD_SIZE of the ranks that there are: --nnodes times --nproc-per-node", right=2.0,
      launch=True)  # fmt: skip
def world_size_mismatch(rank, how):
    world_size = 2 if how == "cured" else 3
    os.environ["WORLD_SIZE"] = str(world_size)
    if how == "found":
        address = os.environ["MASTER_ADDR"], int(os.environ["SPARE_PORT"])
        store = dist.TCPStore(*address, is_master=rank == 0, wait_for_workers=False)
        store.set(f"here/{rank}", "")
        time.sleep(0.5)
        for other in range(world_size):
            if rank == 0 and not store.check([f"here/{other}"]):
                say(f"rank {other} of {world_size} never came")
    return joined_sum()


def joined_sum(timeout_s=TIMEOUT_S):
    join(timeout_s)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


# The machinery: run the two ranks of a job, see how they end, hold it against the case.


def run(case, how, deadline_s):
    """Run a case's job in a folder of its own; return how its ranks ended."""
    waits = "waits" in case.ends and how != "cured"
    with tempfile.TemporaryDirectory() as folder:
        for attempt in range(1 + (case.restarts if how == "cured" else 0)):
            with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as other:
                ports = one.getsockname()[1], other.getsockname()[1]  # free ones

            def body(rank, attempt=attempt, ports=ports):
                return be_rank(case, how, rank, attempt, ports, folder)

            logs = Path(folder, f"attempt-{attempt}")
            ranks = fork(body, RANKS, logs, deadline_s, grace_s=GRACE_S if waits else None)
            if all(rank.code == 0 for rank in ranks):
                break
    return ranks


def be_rank(case, how, rank, attempt, ports, folder):
    """Run a case's job as a rank that a launcher started; return what the job returns."""
    faulthandler.disable()  # a rank that is ended would tell of that, and not of what it did
    os.chdir(folder)
    debug = "DETAIL" if how == "found" and case.tool == DETAIL else "OFF"
    environment = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": ports[0], "SPARE_PORT": ports[1], "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCH_DISTRIBUTED_DEBUG": debug,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in environment.items()})
    dist.set_debug_level_from_env()
    result = case.job(rank, how)
    if dist.is_initialized():
        dist.destroy_process_group()
    say(f"result: {result}")
    return result


def ending(rank: Rank) -> str:
    """Say how a rank ended; it waits where it still ran when it was ended from outside."""
    return "waits" if rank.code in (None, -signal.SIGTERM) else rank.ended


def shortened(line):
    """Leave out of a line where PyTorch's source says it, and to which address."""
    line = re.sub(r"^(\[rank\d\]:)?\[[EW]\d+ [^]]+\] (\[c10d\] )?|what\(\): ", "", line.strip())
    line = re.sub(r"\[(enforce fail at )?/[^]]+\] ", "", line)
    line = re.sub(r"\[[\d.:]+\]:\d+", "PEER", line)
    line = re.sub(r"\. This is typically caused by .*", "", line)  # from torch 2.14 on
    line = re.sub(r'File ".*/(\w+\.py)", line \d+', r'File "\1"', line)
    return " ".join(re.sub(r"\b\d{4,5}\b(?! ms)", "PORT", line).split())


def said(rank: Rank, pattern):
    """Return the last match of a pattern in a line of what a rank said, or None."""
    lines = filter(None, map(shortened, rank.out.splitlines() + rank.err.splitlines()))
    matches = [match for line in lines if (match := re.search(pattern, line))]
    return matches[-1] if matches else None


def telling(rank: Rank, pattern):
    """Return the line that tells most: the one wanted, else the error, else the last one."""
    match = said(rank, pattern) or said(rank, r"^[\w.]*(Error|Exception)\b") or said(rank, "$")
    if match is None:
        return "says nothing"
    line = match.string
    if len(line) > WIDTH and match.end() > WIDTH:
        line = f"... {line[match.start() :]}"
    return line if len(line) <= WIDTH else f"{line[:WIDTH].rsplit(' ', 1)[0]} ..."


def named(ranks, clue):
    """Return the rank that a clue names, or else the one that says it; -1 without a clue."""
    for number, rank in enumerate(ranks):
        if match := said(rank, clue):
            return int(match[1]) if match.groups() else number
    return -1


def show(report, title, ranks, pattern):
    report.say(f"\n{title}")
    for number, rank in enumerate(ranks):
        how = "still waiting" if ending(rank) == "waits" else ending(rank)
        report.say(f"  rank {number}, {how} after {rank.seconds:.1f} s: {telling(rank, pattern)}")


def break_and_cure(case, report, deadline_s):
    """Run a case broken, found and cured, and check what each run has to show."""
    broken = run(case, "broken", deadline_s)
    show(report, "broken:", broken, case.says)
    found = run(case, "found", deadline_s)
    show(report, f"found: {case.tool}", found, case.clue)
    cured = run(case, "cured", deadline_s)
    show(report, f"cured: {case.cure}", cured, "^result: ")
    report.say()

    heard = [any(said(rank, case.says) for rank in ranks) for ranks in (broken, cured)]
    as_told = sum(ending(rank) == end for rank, end in zip(broken, case.ends, strict=True))
    right = sum(rank.code == 0 and rank.value == case.right for rank in cured)
    well = sum(rank.code == 0 for rank in cured)
    source = "the case's own description"
    for name, measured, expected in (
        ("broken: the message is there", int(heard[0]), 1),
        (f"broken: ranks that end by {' and '.join(case.ends)}", as_told, RANKS),
        ("found: the rank that the clue names", named(found, case.clue), case.culprit),
        ("cured: the message is there", int(heard[1]), 0),
        ("cured: ranks that end by exit code 0", well, RANKS),
        ("cured: ranks with the right result", right, RANKS),
    ):
        report.check(name, measured, expected, 0, source)


def break_the_ranks_started(name, args, world):
    """Break the ranks that a launcher started, once, as in a job of one's own."""
    if world.world_size != RANKS:
        raise cli.UsageError(
            f"--case {name} needs {RANKS} ranks, and there are {world.world_size}: start it with "
            "torchrun --standalone --nproc-per-node=2, or with python alone"
        )
    if CASES[name].launch:
        raise cli.UsageError(f"--case {name} breaks the launch itself: start it with python")
    os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")
    torch.set_default_device(runtime.pick_device(args.device, world))
    try:
        result = CASES[name].job(world.rank, "broken")
    except Exception:
        traceback.print_exc()  # the whole of it, as Python would
        return cli.FAILED
    say(f"rank {world.rank}: result: {result}")
    return 0


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument(
        "--case", choices=CASES, metavar="NAME", help=f"one of {', '.join(CASES)} (list them)"
    )
    return parser.parse_args()


def main():
    args = parse_args()
    world = runtime.discover()
    report = Report("04-nccl-operations/failure_gallery.py", args, world, torch.device("cpu"))
    if args.case is None:
        rows = [(name, case.wrong, case.tool) for name, case in CASES.items()]
        report.table(rows, ("case", "what is wrong", "what finds it"), names=3)
        return 0
    if args.case == "firewall-drops" and sys.platform != "linux":
        raise cli.UsageError("--case firewall-drops needs Linux, whose full queues drop")
    if world.launcher != "python":
        return break_the_ranks_started(args.case, args, world)
    if args.device == "cuda":
        raise cli.UsageError("--device cuda: start it with torchrun; python forks CPU ranks")
    case = CASES[args.case]
    report.start(f"{args.case}: {case.wrong}")
    break_and_cure(case, report, min(DEADLINE_S, args.timeout))
    return report.finish(f"{args.case} was broken, found and cured")


if __name__ == "__main__":
    cli.run(main)
