"""Workers that die and come back, the runs that are compared, and what the comparison says."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # the optimizer would import it in every new worker, for seconds
import torch.distributed as dist

from dist_common import cli, models, runtime
from dist_common.lab.traffic import TrafficCounter
from dist_common.report import Report
from dist_common.runtime import World

BATCH, SEQ_LEN = 2, 32  # of each rank and step
NUMBERS = 3  # of a weight in a rank's state: itself and Adam's two moments, float32
PR_SET_PDEATHSIG = 1  # prctl(2)
LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Job:
    """A run: which ranks it loses, and whether copies go to neighbours."""

    name: str
    lost: tuple[int, ...]
    copies: bool
    folder: Path  # of its checkpoints


# processes


@contextlib.contextmanager
def launched(args) -> Iterator[tuple[World, list[int], dist.TCPStore]]:
    """Yield this process's place, the ranks whose workers it looks after, and the job's store.

    Under a launcher each process has one rank; without, this one has all of them.
    """
    world = runtime.discover()
    if world.launcher == "python":
        world = World(0, 0, args.ranks, args.ranks, "python")
    if world.world_size < 2:
        raise cli.UsageError("1 rank has no neighbour: start at least 2 (--nproc-per-node)")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=args.timeout)
    if world.is_rank0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        port = hold_store(port if world.launcher != "python" else 0)
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    own = list(range(world.world_size)) if world.launcher == "python" else [world.rank]
    try:
        yield world, own, store
    except BaseException as error:
        cli.tell(error)
        raise
    finally:
        if world.is_rank0 and not args.output_dir and store.check(["folder"]):
            shutil.rmtree(store.get("folder").decode(), ignore_errors=True)


def hold_store(port: int) -> int:
    """Serve the store in a process of its own, as torchrun does; return its port.

    Its thread may hold a lock at any time, which a fork of the same process would find locked.
    """
    reader, writer = os.pipe()
    if os.fork() == 0:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        server = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
        os.write(writer, str(server.port).encode())
        while True:
            time.sleep(60)
    os.close(writer)
    found = os.read(reader, 8)
    os.close(reader)
    if not found:
        raise cli.UsageError(f"MASTER_PORT={port} is already taken on this machine: choose another")
    return int(found)


def supervise(ranks: list[int], store, args, report: Report, job: Job, train: Callable) -> None:
    """Fork a worker for each of these ranks, and another one for each that SIGKILL ends."""

    def start(rank: int, generation: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no worker outlives its supervisor
            if os.getppid() == parent:
                torch.set_num_threads(1)  # ranks share the cores
                report.world = replace(report.world, rank=rank)
                train(Worker(rank, generation, store, args, job), job, args, report)
                code = 0
        except BaseException as error:
            cli.tell(error)
        finally:
            os._exit(code)

    workers = {start(rank, 0): rank for rank in ranks}
    try:
        while workers:
            pid, status = os.wait()
            if pid not in workers:
                raise RuntimeError("the process that holds the store ended")
            rank = workers.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            if code == -signal.SIGKILL:
                generation = read(store, job, "generation") + 1
                workers[start(rank, generation)] = rank
            elif code:
                raise RuntimeError(f"the worker of rank {rank} ended with exit code {code}")
        store.add("ended", len(ranks))
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


class Worker:
    """One rank of a job, in the process that has it now; it leaves its notes in the store."""

    def __init__(self, rank: int, generation: int, store: dist.TCPStore, args, job: Job) -> None:
        self.rank, self.generation, self.args, self.job = rank, generation, args, job
        self.timeout = store.timeout
        # A connection of its own: a fork cannot share its parent's.
        again = dist.TCPStore(store.host, store.port, is_master=False, timeout=store.timeout)
        self.store = dist.PrefixStore(job.name, again)
        self.ranks = int(again.get("ranks"))
        os.environ["RANK"] = str(rank)  # whose name stands before an error

    def join(self) -> None:
        """Join the group of this generation: all ranks, the new ones among them."""
        group = dist.PrefixStore(f"group {self.generation}", self.store)
        dist.init_process_group(
            "gloo", store=group, rank=self.rank, world_size=self.ranks, timeout=self.timeout
        )
        dist.barrier()
        self.note(generation=self.generation)
        self.note(**{f"joined {self.generation}": time.time()})

    def note_loss(self, error: RuntimeError) -> None:
        """Note when this rank knew that another one is lost; raise any other error."""
        if not isinstance(cli.explain(error), cli.LostRank):
            raise error
        self.note(**{f"noticed {self.generation}": time.time()})

    def leave_broken_group(self) -> None:
        dist.group.WORLD.abort()  # closes connections: the others notice too
        dist.destroy_process_group()
        self.generation += 1

    def leave(self) -> None:
        dist.barrier()
        dist.destroy_process_group()

    def lose_power(self, step: int) -> None:
        """End this process as a power cut would, if its rank is to be lost in this step."""
        if step != self.args.fail_at or self.generation:
            return
        self.store.add("reduced", 1)
        if self.rank in self.job.lost:
            while self.store.add("reduced", 0) < self.ranks:  # all have the last copy by then
                time.sleep(0.001)
            self.note(killed=time.time())
            os.kill(os.getpid(), signal.SIGKILL)

    @contextlib.contextmanager
    def counted(self, step: int) -> Iterator[None]:
        """Count what rank 0 sends to one other rank in the step of the first copy."""
        if step != self.args.copy_every or self.rank or self.generation:
            yield
            return
        with TrafficCounter() as counter:
            yield
        self.note(sent_bytes=counter.by_kind().get("send", (0, 0))[1])

    def note(self, **values) -> None:
        for name, value in values.items():
            self.store.set(name, json.dumps(value))

    def note_step(self, step: int, loss: torch.Tensor) -> None:
        """Note the mean loss of all ranks; the first step after a loss ends the time lost."""
        loss = loss.detach() / self.ranks
        dist.all_reduce(loss)
        if self.rank == 0:
            self.note(**{f"loss {step}": loss.item(), f"reached {self.generation}": step})
            if self.store.add(f"steps {self.generation}", 1) == 1:
                self.note(**{f"trained {self.generation}": time.time()})

    def note_memory(self, copies, state: torch.Tensor) -> None:
        if self.rank == 0:
            held = sum(copy.nbytes for copy in (*copies.own.values(), *copies.held.values()))
            self.note(copies_bytes=held, state_bytes=state.nbytes)


# what they train


def config_of(args) -> models.TransformerConfig:
    return replace(models.PRESETS["tiny"], num_layers=args.num_layers)


def make_model(args) -> models.Transformer:
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = models.Transformer(config_of(args))
    model.reset_parameters()
    return model


def loss_of(model, args, step: int) -> torch.Tensor:
    """Return the loss of this rank's batch of a step: sequences that count in steps of 1 to 7."""
    model.zero_grad()
    draw = torch.Generator().manual_seed(args.seed + 1_000 * step + dist.get_rank())
    first = torch.randint(256, (BATCH, 1), generator=draw)
    stride = torch.randint(1, 8, (BATCH, 1), generator=draw)
    tokens = (first + stride * torch.arange(SEQ_LEN + 1)) % 256
    logits = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# runs, side by side


def jobs_of(args, world: World, store, report: Report) -> list[Job]:
    """Return the runs to compare; rank 0 makes the folder of their checkpoints."""
    if world.is_rank0:
        folder = report.output and report.output / "checkpoints"
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="recovery_in_memory-"))
        store.set("ranks", str(world.world_size))
        store.set("folder", str(folder))
    folder, ranks = Path(store.get("folder").decode()), world.world_size
    rows = [
        ("nothing lost", (), True),
        ("rank 1, copies", (1,), True),
        ("rank 1, no copies", (1,), False),
        ("ranks 1 and 3, copies", (1, 3), True),
        ("ranks 0 and 1, copies", (0, 1), True),
    ]
    jobs = [
        Job(name, lost, copies, folder / name.replace(" ", "-").replace(",", ""))
        for name, lost, copies in rows
        if not lost or max(lost) < ranks
    ]
    for job in jobs if world.is_rank0 else ():
        store.set(f"{job.name}/generation", "-1")  # the last that all ranks have met in
    return jobs


def describe(args, world: World) -> str:
    count = config_of(args).num_parameters()
    return f"{count:,} weights, cut over {world.world_size} ranks; ranks die in step {args.fail_at}"


def compare(report: Report, args, jobs: list[Job], store) -> None:
    """Print where each run's state came from and how long it took; check it. Rank 0 does."""
    if not report.world.is_rank0:
        return
    while store.add("ended", 0) < report.world.world_size * len(jobs):  # all other processes too
        time.sleep(0.01)
    steps = range(1, args.max_steps + 1)
    losses = {job.name: [read(store, job, f"loss {step}") for step in steps] for job in jobs}
    calm, *disturbed = jobs
    report.say(f"losses {losses[calm.name][0]:.4f} to {losses[calm.name][-1]:.4f}")
    rows = []
    for job in disturbed:
        rows.append(outcome(report, args, job, store))
        off = max(abs(a - b) for a, b in zip(losses[job.name], losses[calm.name], strict=True))
        report.check(f"{job.name}: losses differ by", off, 0.0, 0.0, "the run that lost nothing")
    report.table(rows, ("lost", "back from", "steps lost", "noticed", "joined", "state back",
                        "trains again"), names=2)  # fmt: skip
    report.say("seconds since the ranks were killed; state back: what that took by itself")

    length = -(-config_of(args).num_parameters() // report.world.world_size)
    sent, held = read(store, calm, "sent_bytes"), read(store, calm, "copies_bytes")
    source = "12 bytes per weight, over the ranks"
    report.check("bytes that a copy sends", sent, NUMBERS * 4 * length, 0, source)
    report.check("bytes of copies on a rank", held, 2 * 2 * NUMBERS * 4 * length, 0,
                 "own and held, two steps of each")  # fmt: skip
    report.metrics |= {"sent_bytes": sent, "copies_bytes": held, "losses": losses[calm.name]}


def outcome(report: Report, args, job: Job, store) -> tuple[str, ...]:
    """Return a run's row of the table, and check how many steps it lost and where it went back."""
    source, restored = read(store, job, "source"), read(store, job, "restored_step")
    lost = read(store, job, "reached 0") - restored
    ranks = report.world.world_size
    together = any((rank + 1) % ranks in job.lost for rank in job.lost)
    in_memory = job.copies and not together
    every = args.copy_every if in_memory else args.save_every
    report.check(f"{job.name}: steps lost", lost, (args.fail_at - 1) % every, 0,
                 "what was trained since the last copy, or save")  # fmt: skip
    report.check(f"{job.name}: back from memory", int(source == "memory"), int(in_memory), 0,
                 "unless a state and its copy are lost together")  # fmt: skip
    since = read(store, job, "killed")
    seconds = {
        name: read(store, job, key) - since
        for name, key in (
            ("noticed_s", "noticed 0"), ("joined_s", "joined 1"), ("trains_again_s", "trained 1")
        )
        if store.check([f"{job.name}/{key}"])  # nobody notices a loss that nobody survives
    }  # fmt: skip
    seconds["restore_s"] = read(store, job, "restore_s")
    report.metrics[job.name] = {"source": source, "steps_lost": lost, **seconds}
    names = ("noticed_s", "joined_s", "restore_s", "trains_again_s")
    cells = (f"{seconds[name]:.3f} s" if name in seconds else "by nobody" for name in names)
    return job.name, source, str(lost), *cells


def read(store, job: Job, name: str):
    return json.loads(store.get(f"{job.name}/{name}"))
