"""A job hangs: look at all of its processes from outside, and name the rank, its call and why.

    CPU   python cluster/triage.py
    GPU   srun --jobid=JOB --overlap --ntasks-per-node=1 \\
              python cluster/triage.py --save /shared/triage
          python cluster/triage.py --load /shared/triage

Nothing is put into the job, and it continues. --stacks SCRIPT prints the stacks alone. --record
FOLDER SCRIPT starts a job with a recorder of its collectives, --record FOLDER compares what its
ranks noted. --rehearse SEED starts a small job, in which a seed draws what breaks, and looks at
that. Look for: the verdict, which names no rank where it cannot tell; and what was not looked at,
and why.

Sources: those of cluster_parts/triage.py; torch 2.14.1, FlightRecorder.hpp.
"""

import argparse
import contextlib
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from cluster_parts import recorder, verdicts
from cluster_parts import triage as part
from cluster_parts.processes import IDLE, find_processes, show_stacks
from cluster_parts.verdicts import ranks_of
from cluster_parts.waits import judge_recorder
from legacy_common import cli, runtime
from legacy_common.report import Report

# The GPU or the node is lost: no program of its own does that. Source: NVIDIA, "Xid Errors".
FATAL_XIDS = {48, 64, 74, 79, 95, 119, 120, 140, 154}
QUIET = (IDLE, psutil.STATUS_SLEEPING)  # of a loader's worker, of a launcher
NEXT = {
    "gpu": "drain the node; hardware.md says what each Xid means",
    "stopped": "find who sent SIGSTOP (a debugger, the scheduler); kill -CONT PID lets it continue",
    "disk": "df and ls on the node's file systems: one of them does not answer; dmesg says which",
    "ended": "read its log: merge_logs.py names the first error; sacct and dmesg say who killed it",
    "node": "ping it, ip -s link and dmesg there; drain it, and start again without it",
    "loader": "read that file or sample by hand on that node; give each read a limit of its own",
    "send": "compare the two ranks' schedules: one sends less often than the other receives",
    "order": "make all ranks call the groups in one order",
    "calls": "read that rank's code at that call",
    "ras": "py-spy dump --pid on the node and the process that are named",
    "elsewhere": "read that line; if it is at work and not stuck, look again with --seconds 60",
}


@dataclass
class Finding:
    """The verdict: what kind of fault, on which ranks, in which call, and what says so."""

    kind: str
    ranks: frozenset[int]
    call: str
    reason: str


# Each judge looks at one kind of evidence, the surest first, and returns None where it says nothing


def judge_progress(job):
    """Nothing is wrong where a counter of steps or calls grows."""
    steps = [one.steps for one in job.ranks.values() if len(one.steps) > 1]
    for first, *_, last in [job.logged, *steps] if job.logged else steps:
        if last > first:
            return Finding("training", frozenset(), "", f"step {first} to {last}")
    if job.calls and job.calls[-1] > job.calls[0]:
        made = job.calls[-1] - job.calls[0]
        return Finding("training", frozenset(), "", f"{made} more collectives between two looks")
    return None


def judge_xids(job):
    """A fault that the GPU's driver reports, of a process of this job or of the whole GPU."""
    pids = {(one.node, one.pid): one for one in job.processes}
    for node, lines in job.xids.items():
        for line in lines:
            what, pid = re.search(r"(S?Xid) \(.*?\): (\d+)", line), re.search(r"pid='?(\d+)", line)
            one = pids.get((node, int(pid[1]))) if pid else None
            if what and (one or is_fatal(what[1], int(what[2]), line)):
                ranks = {one.rank} if one else {r for r, o in job.ranks.items() if o.node == node}
                return Finding("gpu", frozenset(ranks), " ".join(what.groups()), f"{node}: {line}")
    return None


def is_fatal(kind, number, line):
    """Say whether a GPU is lost (Xid), or a switch between them (SXid)."""
    if kind == "SXid":
        return ", Fatal," in line
    return number in FATAL_XIDS and not line.endswith("(None)")  # 154: it has recovered


def judge_states(job):
    """A process that is stopped, waits for a disk, or has ended."""
    words = {psutil.STATUS_STOPPED: "stopped", psutil.STATUS_DISK_SLEEP: "disk",
             psutil.STATUS_ZOMBIE: "ended"}  # fmt: skip
    for one in job.processes:
        if one.state in words and one.role in ("rank", "loader worker"):
            text = f"{one.title}, pid {one.pid} on {one.node}: the process is {one.state}"
            where = f", in the kernel's {one.waits_in}" if one.waits_in not in ("", "0") else ""
            return Finding(words[one.state], frozenset([one.rank]), "", text + where)
    for node in {one.node for one in job.ranks.values()}:
        ranks = {rank for rank, one in job.ranks.items() if one.node == node}
        size = job.ranks[min(ranks)].local_size or 0
        first = min(ranks) // size * size if size else 0
        if absent := set(range(first, first + size)) - job.ranks.keys():
            text = f"its launcher on {node} started {size} ranks, and {len(ranks)} are there"
            return Finding("ended", frozenset(absent), "", f"{ranks_of(absent)}: {text}")
    return None


def judge_network(job):
    """A node that answers nobody, or whom nobody answers: bytes are sent again and again."""
    homes = {place: one.node for one in job.processes for place in one.addresses}
    pairs = {(one.node, homes.get(peer, peer)) for one in job.processes for peer in one.stuck}
    pairs = {(here, peer) for here, peer in pairs if here != peer}
    if not pairs:
        return None
    links_of = Counter(node for pair in {frozenset(pair) for pair in pairs} for node in pair)
    (most, many), *others = links_of.most_common()
    cut = {most} if not others or many > others[0][1] else set().union(*pairs)
    ranks = frozenset(rank for rank, one in job.ranks.items() if one.node in cut)
    told = "; ".join(f"{here} gets no answer from {peer}" for here, peer in sorted(pairs))
    if len(cut) > 1:
        told += ": one of them, or the link between them"
    return Finding("node", ranks, calls_of(job, ranks), told)


def judge_loader(job):
    """A rank that waits for its data loader, whose worker is reading a sample."""
    found = {}
    for one in job.processes:
        main = job.ranks.get(one.rank)
        waits = main and any(f.endswith("utils/data/dataloader.py") for f, *_ in main.stack)
        reads = any(f.endswith("data/_utils/fetch.py") for f, *_ in one.stack)
        if one.role == "loader worker" and waits and reads:
            found[one.rank] = one
    if not found:
        return None
    told = "; ".join(f"rank {rank} waits for its loader's worker, pid {one.pid} on {one.node}, "
                     f"which is in {one.place}" for rank, one in found.items())  # fmt: skip
    call = "; ".join(one.place for one in found.values())
    return Finding("loader", frozenset(found), call, told)


def judge_ras(job):
    """What NCCL itself says: a process that it does not reach, or a rank that launched fewer."""
    for group in (group for told in job.ras for group in told.get("communicators", ())):
        for one in group.get("missing_ranks", ()):
            dead = "considered dead" if one.get("considered_dead") else "without an answer"
            text = f"RAS: rank {one['rank']} is {dead}: pid {one.get('pid')} on {one.get('host')}"
            return Finding("ras", frozenset([one["rank"]]), "", text)
        ranks = [one for one in group.get("ranks", ()) if one.get("collective_counts")]
        for call in ranks[0]["collective_counts"] if ranks else ():
            counts = {one["rank"]: one["collective_counts"][call] for one in ranks}
            low = frozenset(rank for rank, n in counts.items() if n < max(counts.values()))
            if low:
                text = f"RAS: {ranks_of(low)} launched {min(counts.values())} {call}, "
                return Finding("ras", low, call, f"{text}the others {max(counts.values())}")
    return None


def judge_calls(job):
    """What the recorder says: who closes a circle, is missing, differs or is behind."""
    verdict = judge_recorder(job.notes) if job.notes else verdicts.Verdict("")
    if not verdict.named or verdict.kind == "late":  # who is late comes in the end
        return None
    return Finding(verdict.kind, verdict.named, calls_of(job, verdict.named), verdict.text)


def judge_stacks(job):
    """On gloo: the ranks that are in no collective, while others wait in one."""
    stacks = {r: [f[:3] for f in one.stack] for r, one in job.ranks.items() if one.stack}
    away = {rank for rank, frames in stacks.items() if not verdicts.waits_in(frames)}
    if any(one.on_gpu for one in job.ranks.values()) or not 0 < len(away) < len(stacks):
        return None
    found = [(rank, job.ranks[rank]) for rank in sorted(away)]
    told = [f"rank {rank} is in {one.place}, at {one.cpu:.0%} of a core" for rank, one in found]
    told = f"{'; '.join(told)}; the others wait in a collective"
    return Finding("elsewhere", frozenset(away), calls_of(job, away), told)


JUDGES = [judge_progress, judge_xids, judge_states, judge_network, judge_loader, judge_ras,
          judge_calls, judge_stacks]  # fmt: skip


def judge(job):
    """Return the first finding, or one that says that nothing can be told."""
    found = next(filter(None, (one(job) for one in JUDGES)), None)
    return found or Finding("cannot tell", frozenset(), "", "; ".join(what_next(job)))


def what_next(job) -> Iterator[str]:
    """Say what would tell more."""
    size = max((one.world_size or 0 for one in job.ranks.values()), default=0)
    if missing := set(range(size)) - job.ranks.keys():
        yield f"{ranks_of(missing)} run elsewhere or have ended: --save on each node, then --load"
    if unread := [one for one in job.processes if one.unread]:
        yield f"{unread[0].title} has no stack ({unread[0].unread}): sudo, or pip install py-spy"
    if not job.notes and any(one.on_gpu for one in job.ranks.values()):
        yield "on NCCL a stack does not tell: write to the recorder's pipe (nccl_debugging.md)"
    elif not job.notes:
        yield "there are no notes of calls: start it again under triage.py --record FOLDER"
    if not job.logged and not any(one.steps for one in job.ranks.values()):
        yield "it may train: no counter of steps was found, name its --output-dir by --job"
    yield "look at the kernel's log and the network of all nodes; look again with --seconds 60"


def calls_of(job, ranks):
    """Return the collective that ranks are in, by their stacks, and where."""
    return "; ".join(job.ranks[rank].call for rank in sorted(ranks) if rank in job.ranks)


def show(report, job, nodes, found):
    """Print a line for each process, what was not looked at, and the verdict."""
    shown = [one for one in job.processes if one.role == "rank" or one.call not in QUIET]
    rows = [(one.title, one.node, one.pid, one.state, f"{one.cpu:.0%}", (one.steps or [""])[-1],
             one.call) for one in sorted(shown, key=lambda one: (one.rank is None, one.rank or 0))
            ]  # fmt: skip
    report.table(rows, ("process", "node", "pid", "state", "CPU", "step", "is in"), names=7)
    for node in nodes:
        for gpu in node["gpus"]:
            report.say(f"{node['node']}: GPU {' '.join(f'{k} {v}' for k, v in gpu.items())}")
        for name, why in node["skipped"].items():
            report.say(f"{node['node']}: not asked: {name}: {why}")
    report.say(f"\nverdict: {found.kind}" + (f": {ranks_of(found.ranks)}" * bool(found.ranks)))
    for name, text in (("call", found.call), ("why", found.reason), ("next", NEXT.get(found.kind))):
        if text:
            report.say(f"  {name}: {text}")


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--job", metavar="FOLDER", help="the --output-dir of the job, or another folder it uses")
    add("--pid", type=cli.positive_int, help="the job's launcher, or one of its ranks")
    add("--notes", metavar="FOLDER", help="of the flight recorder (where the job says)")
    add("--seconds", type=cli.positive_float, default=2.0, help="between the two looks (2)")
    add("--save", metavar="FOLDER", help="write what this node knows there, and judge nothing")
    add("--load", metavar="FOLDER", help="judge what all nodes have written there")
    add("--rehearse", type=cli.whole_number, metavar="SEED",
        help="start a small job in which this seed draws a fault, and look at it")  # fmt: skip
    add("--stacks", metavar="SCRIPT",
        help="print node, rank, role and stack of each process here that runs SCRIPT")  # fmt: skip
    add("--record", nargs=argparse.REMAINDER, metavar="FOLDER [SCRIPT ...]",
        help="run SCRIPT with its arguments and write notes of its collectives to FOLDER; without "
        "SCRIPT: compare the ranks' notes")  # fmt: skip
    return parser.parse_args()


def main():
    args = parse_args()
    if args.record is not None:
        return recorder.run_or_compare(args.record, judge_recorder)
    if args.stacks is not None:
        return show_stacks(args.stacks)
    with contextlib.ExitStack() as stack:
        drawn = None
        if args.rehearse is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            drawn = stack.enter_context(part.rehearsal(args.rehearse, folder))
            args.pid = os.getpid()
        nodes = part.load(Path(args.load)) if args.load else None
        if not nodes:
            nodes = [part.read_node(part.select(find_processes(), args), args)]
        if args.save:
            part.save(Path(args.save), nodes[0])
            return 0
        job = part.job_of(nodes)
    report = Report("cluster/triage.py", args, runtime.discover(), torch.device("cpu"))
    found = judge(job)
    seen = f"{len(job.processes)} processes, {len(job.ranks)} of them ranks"
    report.start(f"{seen}, looked at twice, {nodes[0]['seconds']:g} s apart")
    show(report, job, nodes, found)
    report.metrics["verdict"] = asdict(found) | {"ranks": sorted(found.ranks)}
    if drawn is None:
        report.check("faults found", int(found.kind != "training"), 0, 0, "the job's processes")
        return report.finish(found.reason)
    report.say(f"\ndrawn was: {drawn}")
    source = "drawn/train.py, fault.json"
    report.check("the fault's kind is named", int(found.kind == drawn["kind"]), 1, 0, source)
    report.check("ranks named rightly", int(drawn["rank"] in found.ranks), 1, 0, source)
    report.check("ranks named wrongly", len(found.ranks - {drawn["rank"]}), 0, 0, source)
    return report.finish("the fault that was drawn was found")


if __name__ == "__main__":
    cli.run(main)
