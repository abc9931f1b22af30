"""A job has died, or it hangs: name the first cause, and who only suffers from it.

    CPU   python cluster/triage.py LOGS ...     it died: files and folders, dmesg's too
          python cluster/triage.py              it hangs: the job that runs here
    GPU   srun --jobid=JOB --overlap --ntasks-per-node=1 \\
              python cluster/triage.py --save /shared/triage
          python cluster/triage.py --load /shared/triage

Nothing is put into the job, and it continues. --record FOLDER SCRIPT starts a job with
notes of its collectives, --notes FOLDER compares them. A rank is named with evidence
only. Exit code: 0 if the job trains or the logs have no error, 1 if something is
wrong.
"""

import argparse
import contextlib
import json
import re
import socket
import subprocess
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from tabulate import tabulate

from cluster_parts import cause, live, notes, recorder
from cluster_parts.cause import ranks_of
from cluster_parts.logs import IS_HARDWARE, read_logs
from dist_common import cli

BUSY = 0.03  # of a core: a rank that waits on gloo uses less
NEXT = {
    "training": "it is slow, or fine: 04-nccl-operations/nccl_debugging.md, It is slow",
    "port": "give all nodes the same MASTER_ADDR and MASTER_PORT",
    "hardware": "drain the node; 04-nccl-operations/hardware.md explains its log",
    "stopped": "find who sent SIGSTOP: a debugger, the scheduler; kill -CONT PID",
    "disk": "df on that node: a file system does not answer; dmesg says which",
    "ended": "read its log: triage.py LOGS; sacct and dmesg say who killed it",
    "network": "ping it, ip -s link and dmesg there; drain it, start without it",
    "loader": "read that sample by hand on that node; give each read a time limit",
    "calls": "read the code of that rank at its call",
    "elsewhere": "read that line",
}


@dataclass
class ObservedJob:
    """The processes, kernel logs and notes of a job, read on all of its nodes."""

    processes: list
    seconds: float  # between the two looks
    kernel: dict = field(
        default_factory=dict
    )  # node -> lines of its log about hardware
    notes: list = field(default_factory=list)  # by rank; none if one is missing
    calls: list = field(default_factory=list)  # in all notes, at each look

    @property
    def ranks(self):
        ranks = [one for one in self.processes if one.role == "rank"]
        return {one.rank: one for one in sorted(ranks, key=lambda one: one.rank)}


@dataclass
class Diagnosis:
    """The kind of fault, the reason, and the ranks to blame, if they are known."""

    kind: str
    reason: str
    ranks: set = field(default_factory=set)


# Each judge looks at one kind of evidence, and returns None where it says nothing.


def judge_progress(job):
    """Nothing is wrong if something grows, or if ranks that wait did other work."""
    if job.calls and job.calls[-1] > job.calls[0]:
        made = job.calls[-1] - job.calls[0]
        return Diagnosis("training", f"{made} more collectives between two looks")
    for one in job.processes:
        first, last = one.snapshots
        for name, value in last.values.items():
            if value > first.values.get(name, value):
                growth = f"{name} grew from {first.values[name]} to {value}"
                return Diagnosis("training", f"{one.title}: {growth}")
        for path, size in last.written.items():
            if size > first.written.get(path, size) and not path.endswith(".trace"):
                return Diagnosis("training", f"{one.title}: {path} grew")
    ranks = job.ranks.values()
    changed = [one for one in ranks if one.snapshots[0].stack != one.last.stack]
    if 2 * len(changed) > len(job.ranks):
        return Diagnosis(
            "training", f"{len(changed)} of {len(job.ranks)} ranks have moved"
        )
    for one in ranks:
        uses_cpu = one.cpu(job.seconds) > BUSY and not (job.notes or one.on_gpu)
        if one.last.call and (uses_cpu or one in changed):
            return Diagnosis("training", f"{one.title} has worked between two waits")
    return None


def judge_port(job):
    """Nodes that were given another address or port wait for different stores."""
    places = Counter(one.rendezvous for one in job.ranks.values())
    if len(places) == 1:
        return None
    (most, many), (_, fewer), *_ = places.most_common()
    differences = notes.tell_apart(
        {rank: one.rendezvous for rank, one in job.ranks.items()}
    )
    odd = {rank for rank, one in job.ranks.items() if one.rendezvous != most}
    reason = f"MASTER_ADDR:MASTER_PORT differ: {differences}"
    return Diagnosis("port", reason, odd if many > fewer else set())


def judge_kernel(job):
    for node, lines in job.kernel.items():
        if lines:
            ranks = {rank for rank, one in job.ranks.items() if one.node == node}
            return Diagnosis("hardware", f"{node}: {lines[0]}", ranks)
    return None


def judge_states(job):
    """A process that is stopped, waits for a disk, or has ended."""
    words = {
        psutil.STATUS_STOPPED: "stopped",
        psutil.STATUS_DISK_SLEEP: "disk",
        psutil.STATUS_ZOMBIE: "ended",
    }
    for one in job.processes:
        state = one.last.state
        if state in words and one.snapshots[0].state == state and one.role != "child":
            reason = f"{one.title}, pid {one.pid} on {one.node}: the process is {state}"
            return Diagnosis(words[state], reason, {one.rank})
    for node in {one.node for one in job.ranks.values()}:
        ranks = {rank for rank, one in job.ranks.items() if one.node == node}
        size = job.ranks[min(ranks)].local_size or len(ranks)
        first = min(ranks) // size * size
        if absent := {*range(first, first + size)} - job.ranks.keys():
            reason = (
                f"the launcher on {node} started {size} ranks, {len(ranks)} are there"
            )
            return Diagnosis("ended", reason, absent)
    return None


def judge_network(job):
    """A node that does not acknowledge what others send to it."""
    homes = {place: one.node for one in job.processes for place in one.addresses}
    links = set()
    for one in job.processes:
        first, last = one.snapshots
        for peer, size in last.unsent.items():
            node = homes.get(peer, peer)
            if 0 < first.unsent.get(peer, 0) <= size and node != one.node:
                links.add(frozenset((one.node, node)))
    if not links:
        return None
    count = Counter(node for link in links for node in link)
    (most, many), *others = count.most_common()
    reason = "no answer between " + ", ".join(
        " and ".join(sorted(link)) for link in links
    )
    if many == max((number for _, number in others), default=0):
        return Diagnosis("network", f"{reason}: one of them, or the link between them")
    ranks = {rank for rank, one in job.ranks.items() if one.node == most}
    return Diagnosis("network", f"{reason}: {most} is in all of them", ranks)


def judge_loader(job):
    """A rank that waits for its data loader, whose worker reads one sample."""
    for one in job.processes:
        first, last = one.snapshots
        main = job.ranks.get(one.rank)
        waits = main and any(
            "utils/data/dataloader.py" in f for f, *_ in main.last.stack
        )
        reads = any("data/_utils/fetch.py" in file for file, *_ in last.stack)
        if (
            one.role == "loader worker"
            and waits
            and reads
            and first.stack == last.stack
        ):
            reason = f"rank {one.rank} waits for its loader's worker, pid {one.pid} on "
            return Diagnosis(
                "loader", f"{reason}{one.node}, in {last.place}", {one.rank}
            )
    return None


def judge_notes(job):
    verdict = notes.judge(job.notes) if job.notes else None
    return Diagnosis("calls", verdict.reason, verdict.ranks) if verdict else None


def judge_stacks(job):
    """The ranks that are in no collective while others wait; then, who differs."""
    if any(one.on_gpu or not one.last.stack for one in job.ranks.values()):
        return None  # on NCCL a rank that waits is not in the collective
    away = {rank: one for rank, one in job.ranks.items() if not one.last.call}
    if len(away) == len(job.ranks):
        return None
    if away:
        elsewhere = "; ".join(
            f"rank {rank} is in {one.last.place}" for rank, one in away.items()
        )
        if any(is_at_work(one, job.seconds) for one in away.values()):
            return Diagnosis(
                "cannot tell", f"{elsewhere}, and works; the others wait for it"
            )
        return Diagnosis(
            "elsewhere", f"{elsewhere}; the others wait in a collective", {*away}
        )
    calls = {rank: f"{o.last.call} in {o.last.place}" for rank, o in job.ranks.items()}
    if len({*calls.values()}) == 1:
        return None
    reason = f"the ranks wait in different calls: {notes.tell_apart(calls)}"
    if odd := notes.find_minority(calls):  # ranks of other groups are rightly elsewhere
        reason += f"; if all are in one group, {ranks_of(odd)} skipped a call"
    return Diagnosis("calls", reason)


def is_at_work(process, seconds):
    first, last = process.snapshots
    return first.stack != last.stack or process.cpu(seconds) > BUSY


JUDGES = (
    judge_progress,
    judge_port,
    judge_kernel,
    judge_states,
    judge_network,
    judge_loader,
    judge_notes,
    judge_stacks,
)


def judge(job):
    """Return the first finding, the surest kind first; or what would tell more."""
    diagnosis = next(filter(None, (one(job) for one in JUDGES)), None)
    return diagnosis or Diagnosis("cannot tell", "; ".join(suggest_next_steps(job)))


def suggest_next_steps(job):
    size = max(one.world_size or 0 for one in job.ranks.values())
    if missing := {*range(size)} - job.ranks.keys():
        yield f"{ranks_of(missing)} run elsewhere: --save on each node, then --load"
    if unread := [one for one in job.ranks.values() if one.last.unread]:
        one = unread[0]
        yield f"no stack of {one.title} ({one.last.unread}): sudo, or install py-spy"
    if any(one.on_gpu for one in job.ranks.values()):
        yield "on NCCL stacks do not tell: nccl_debugging.md, the flight recorder"
    elif not job.notes:
        yield "start it again under triage.py --record FOLDER, for notes of its calls"
    yield "look again with --seconds 60"


# One node writes what it knows, another one reads it.


def read_node(args):
    """Return what this node knows of a job, as values for JSON."""
    processes = live.select(live.find_processes(), args.pid)
    folder = args.notes or notes_folder(processes)
    before = notes.count_calls(folder)
    live.take_snapshots(processes, args.seconds)
    since = min(
        psutil.Process(one.pid).create_time() for one in processes if is_alive(one)
    )
    return {
        "node": socket.gethostname(),
        "seconds": args.seconds,
        "notes": folder,
        "calls": [before, notes.count_calls(folder)],
        "kernel": read_kernel_log(since - psutil.boot_time()),
        "processes": [asdict(one) for one in processes],
    }


def is_alive(process):
    return psutil.pid_exists(process.pid)


def notes_folder(processes):
    """Return the folder of --record in a job's command line."""
    for one in processes:
        with contextlib.suppress(psutil.Error):
            program = psutil.Process(one.pid)
            command = program.cmdline()
            if "--record" in command[:-1]:
                folder = command[command.index("--record") + 1]
                return str(Path(program.cwd()) / folder)
    return None


def read_kernel_log(since):
    """Return the kernel's lines on hardware; `since` is in seconds after its start."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=30)
        lines = [line for line in log.stdout.splitlines() if IS_HARDWARE.search(line)]
        stamps = [re.match(r"\[ *(\d+\.\d+)\]", line) for line in lines]
        return [
            line
            for line, stamp in zip(lines, stamps, strict=True)
            if stamp and float(stamp[1]) >= since
        ]
    return []


def save(folder, facts):
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{facts['node']}.partial"
    partial.write_text(json.dumps(facts))
    partial.rename(partial.with_suffix(".json"))  # whole or not at all


def load(folder):
    facts = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    if not facts:
        raise cli.UsageError(f"--load: no node has written to {folder}: --save there")
    return facts


def job_of(nodes):
    """Put together what all nodes know."""
    processes = []
    for known in (one for node in nodes for one in node["processes"]):
        snapshots = [live.Snapshot(**values) for values in known.pop("snapshots")]
        processes.append(live.Process(**known, snapshots=snapshots))
    job = ObservedJob(processes, nodes[0]["seconds"])
    job.kernel = {node["node"]: node["kernel"] for node in nodes}
    by_rank = notes.read_folder(nodes[0]["notes"])
    if {*by_rank} >= {*range(max(one.world_size or 1 for one in processes))}:
        job.notes = [by_rank[rank] for rank in sorted(by_rank)]
        job.calls = nodes[0]["calls"]
    return job


def show(job, diagnosis, args):
    rows = [
        (one.title, one.node, one.pid, one.last.state, one.last.call, one.last.place)
        for one in sorted(job.processes, key=lambda one: (one.rank, one.role != "rank"))
    ]
    print(tabulate(rows, ("process", "node", "pid", "state", "waits in", "at")))
    if args.stacks:
        for one in job.processes:
            print(f"\n{one.title}, pid {one.pid} on {one.node}: {one.last.unread}")
            for file, function, line in one.last.stack:
                print(f"  {function}, {Path(file).name}:{line}")
    named = f": {ranks_of(diagnosis.ranks)}" if diagnosis.ranks else ""
    print(f"\nverdict: {diagnosis.kind}{named}\n  why: {diagnosis.reason}")
    if diagnosis.kind in NEXT:
        print(f"  next: {NEXT[diagnosis.kind]}")


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "logs",
        nargs="*",
        type=Path,
        metavar="LOGS",
        help="files and folders of a dead job",
    )
    add("--pid", type=cli.positive_int, help="a job's launcher, or one of its ranks")
    add("--seconds", type=cli.positive_float, default=5.0, help="between two looks (5)")
    add("--stacks", action="store_true", help="print the whole stack of each process")
    add("--save", type=Path, metavar="DIR", help="write what this node knows there")
    add(
        "--load",
        type=Path,
        metavar="DIR",
        help="judge what all nodes have written there",
    )
    add("--notes", metavar="DIR", help="notes of --record, or dumps of the recorder")
    add(
        "--record",
        nargs=argparse.REMAINDER,
        metavar="DIR SCRIPT ...",
        help="run SCRIPT, and write notes of its collectives to DIR",
    )
    return parser.parse_args()


def main():
    args = parse_args()
    if args.record is not None:
        return recorder.run_recorded(args.record)
    if args.logs:
        for path in args.logs:
            if not path.exists():
                raise cli.UsageError(f"there is no {path}")
        logs = read_logs(args.logs)
        if not logs.lines and not logs.events:
            raise cli.UsageError(f"no lines in the logs of {args.logs[0]}")
        first_cause = cause.name_cause(logs)
        cause.show(first_cause, logs)
        return int(first_cause is not None)
    if args.notes and not args.pid:
        return notes.compare(Path(args.notes))
    nodes = load(args.load) if args.load else [read_node(args)]
    if args.save:
        save(args.save, nodes[0])
        return 0
    job = job_of(nodes)
    diagnosis = judge(job)
    show(job, diagnosis, args)
    return int(diagnosis.kind != "training")


if __name__ == "__main__":
    cli.run(main)
