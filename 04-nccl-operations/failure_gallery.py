"""Break a distributed job on purpose; find what broke it, from outside; run it cured.

    CPU   python 04-nccl-operations/failure_gallery.py shapes-differ
    GPU   torchrun --standalone --nproc-per-node=2 \\
            04-nccl-operations/failures/shapes-differ/broken.py

Each failure is a folder in failures/: broken.py, cured.py, and case.toml, which says what to
expect. This runner starts the ranks of both scripts on the CPU, with the variables that torchrun
sets, and finds the cause by a tool that looks from outside, or is put in before the script starts.
Without a name it lists the failures. --record puts its recorder of collectives into your own job.
Look for: what the ranks say, which is seldom what is wrong, and what the tool can and cannot say.

Sources: docs.pytorch.org, "Distributed communication package", section "Debugging
torch.distributed applications"; py-spy; torch 2.14.1, FlightRecorder.hpp.
"""

import argparse
import contextlib
import functools
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from dist_common import cli, runtime
from dist_common.lab.ranks import Rank
from dist_common.report import Report
from nccl_parts import failure_gallery as part
from nccl_parts import recorder, verdicts
from nccl_parts.failure_gallery import NAMES, Failure, Job, load, may_enter
from nccl_parts.processes import find_processes
from nccl_parts.verdicts import Verdict, compare, ending, odd_ones_out, ranks_of
from nccl_parts.waits import judge_waits

DEADLINE_S = 15.0  # of a job, after which its ranks are ended; --timeout makes it shorter
CASE_S = 100.0  # of all jobs of a failure: ten times what they take on two quiet cores
WIDTH = 100  # of what a rank says, in characters

# Each tool runs the broken job and judges it: it does not know which rank is broken.


def by_logs(job):
    ended = job.run("broken.py")
    return ended, verdicts.judge_logs(ended)


def by_lines(job):
    """Compare what the ranks print, line by line, without their rank numbers."""
    ended = job.run("broken.py")
    printed = [re.sub(r"\brank \d+", "rank R", rank.out).splitlines() for rank in ended]
    for position, lines in enumerate(zip(*printed, strict=False), 1):
        if len(set(lines)) > 1:
            return ended, compare(dict(enumerate(lines)), f"line {position}")
    return ended, compare(dict(enumerate(map(len, printed))), "number of lines")


def by_epochs(job):
    """Compare what each rank prints in one epoch with what it prints in the next."""
    ended = job.run("broken.py")
    same = set()
    for number, rank in enumerate(ended):
        epochs = re.findall(r"epoch \d+: (.+)", rank.out)
        if len(epochs) > 1 and len(set(epochs)) == 1:
            same.add(number)
    text = f"{ranks_of(same)}: every epoch has the same samples in order"
    return ended, Verdict(text if same else "the epochs differ", frozenset(same))


def by_stacks(job):
    stacks = []
    ended = job.run("broken.py", during=lambda pids: look_at(pids, stacks))
    return ended, judge_what_was_seen(stacks)


def look_at(pids, stacks):
    """Read the stack of each rank, once all have reached the script and joined the group."""
    for _ in range(5):  # on a busy machine a rank may not have reached it yet
        time.sleep(part.STUCK_S)
        seen = list(map(part.stack_of, pids))
        if stacks and all(map(reached, stacks)) and None in seen:
            break  # they were in the group's making for as long as they lived
        stacks[:] = seen
        if all(map(reached, seen)) and not any(map(joins, seen)):
            break


def joins(own):
    return "init_process_group" in {frame[1] for frame in own or ()}


def reached(own):
    return not own or "broken.py" in {Path(frame[0]).name for frame in own}


def judge_what_was_seen(stacks):
    if late := [rank for rank, own in enumerate(stacks) if not reached(own)]:
        return Verdict(f"{ranks_of(late)}: the script has not begun there: look again")
    return verdicts.judge_stacks(stacks, "broken.py")


def by_heartbeat(job):
    """Watch who stands still: none is to blame more than another if all do."""
    stuck = []
    logs = [job.logs("broken.py") / f"rank-{rank}.out" for rank in range(job.world_size)]
    ended = job.run(
        "broken.py", during=lambda pids: stuck.extend(part.wait_until_stuck(pids, logs))
    )
    text = f"{ranks_of(stuck)}: no new line and no CPU time"
    if not stuck:
        return ended, Verdict("every rank ended by itself")
    if len(stuck) == len(ended):
        return ended, Verdict(f"{text}: compare their stacks")
    return ended, Verdict(f"{text}; all others have ended", frozenset(stuck))


def by_detail(job):
    """Read what TORCH_DISTRIBUTED_DEBUG=DETAIL says each rank is about to call."""
    ended = job.run("broken.py")
    calls = verdicts.calls_in_detail(job.run("broken.py", TORCH_DISTRIBUTED_DEBUG="DETAIL"))
    if calls:
        return ended, compare(calls, "the collective")
    # It compares what the members of one group call, and sees no ranks that wait in several.
    return ended, Verdict("DETAIL says nothing: ask the recorder (--tool recorder)")


def judge_recorder(notes: list[recorder.Notes], ranks: Sequence[Rank] = ()) -> Verdict:
    """Compare the ranks' collectives: what they called, how many, and who came last."""
    for position, groups in enumerate(zip(*(n.groups for n in notes), strict=False), 1):
        if len(set(groups)) > 1:
            return compare(dict(enumerate(groups)), f"new_group {position}")
    if found := judge_waits(notes):
        return found
    for group, members in {name: who for n in notes for name, who in n.members.items()}.items():
        if any(n.first for n in notes):  # calls of any group
            return Verdict("the oldest notes are gone: nobody waits for a call that another left")
        made = [notes[rank].within.get(group, []) for rank in members]
        for position, alike in enumerate(zip(*made, strict=False), 1):
            if len(set(alike)) > 1:
                what = f"call {position} of group {members}"
                return compare(dict(zip(members, alike, strict=True)), what)
    start = max(n.first for n in notes)  # from here on every rank's notes are there
    calls = [n.calls[start - n.first :] for n in notes]
    for position, alike in enumerate(zip(*calls, strict=False), start + 1):
        if len({call for call, _ in alike}) > 1:
            return compare({rank: call for rank, (call, _) in enumerate(alike)}, f"call {position}")
    counts = [n.count for n in notes]
    behind = {rank for rank, count in enumerate(counts) if count < max(counts)}
    if killed := [n for n in behind if ranks and ending(ranks[n]).startswith("SIG")]:
        return Verdict(f"the last notes of {ranks_of(killed)} may be missing: it ended by a signal")
    if behind:
        odd = odd_ones_out(dict(enumerate(counts)))
        advice = f"look at {ranks_of(odd)}" if odd else "one calls too often, or one too seldom"
        ahead = f"{ranks_of({*range(len(calls))} - behind)} made call {max(counts)}"
        return Verdict(f"{ahead}; {ranks_of(behind)} ended with call {min(counts)}: {advice}", odd)
    at = torch.tensor([[at for _, at in own] for own in calls], dtype=torch.float64)
    if late := verdicts.latest(at):
        return late
    if not any(n.count or n.sends or n.within for n in notes):
        return Verdict("no rank called torch.distributed, or none was recorded: look at the stacks")
    text = f"{counts[0]} calls, the same on all ranks, and no rank is late"
    text = f"{text}; if it hangs nevertheless, look at the stacks"
    return Verdict(f"{text}; where all wait in one call, {verdicts.NETWORK}")


def by_recorder(job):
    files = [job.folder / f"rank-{rank}.trace" for rank in range(job.world_size)]
    ended = job.run("broken.py", lambda rank: recorder.record(files[rank]))
    notes = [recorder.notes_of(file) for file in files[: len(ended)]]
    return ended, judge_recorder(notes, ended)


def by_all(job):
    """Try what needs no idea of the failure, the surest first, until one tool names a rank.

    One run serves three of them; each of the others runs the job again.
    """
    stacks = []
    files = [job.folder / f"all-{rank}.trace" for rank in range(job.world_size)]

    def look(pids):
        with contextlib.suppress(cli.UsageError):  # no py-spy: the others may tell
            look_at(pids, stacks)

    ended = job.run("broken.py", lambda rank: recorder.record(files[rank]), look)
    notes = [recorder.notes_of(file) for file in files[: len(ended)]]
    said = {"logs": verdicts.judge_logs(ended), "recorder": judge_recorder(notes, ended)}
    said["stacks"] = judge_what_was_seen(stacks)
    for name, tool in (("lines", by_lines), ("epochs", by_epochs), ("detail", by_detail),
                       ("inputs", by_inputs), ("waits", by_waits)):  # fmt: skip
        if any(verdict.named for verdict in said.values()):
            break
        said[name] = tool(job)[1]
    text = "\n  ".join(f"{name}: {verdict.text}" for name, verdict in said.items())
    named = next((verdict.named for verdict in said.values() if verdict.named), frozenset())
    return ended, Verdict(text, named)


def by_inputs(job):
    """Find who is first to hand a number that is not finite to a collective."""

    def check(call, tensor):  # on NCCL TORCH_NCCL_NAN_CHECK=1 does this, for every collective
        (job.folder / "inputs").touch()
        if not tensor.isfinite().all():
            print(f"inputs: call {call} is not finite", file=sys.stderr, flush=True)

    ended = job.run("broken.py", lambda rank: recorder.around_all_reduce(before=check))
    said = [re.search(r"inputs: call (\d+) is not finite", rank.err) for rank in ended]
    first = {number: int(match[1]) for number, match in enumerate(said) if match}
    if not (job.folder / "inputs").exists():
        do = "check the gradients themselves, before the collective"
        return ended, Verdict(
            f"no all_reduce and no gradient of DDP was seen, none was checked: {do}"
        )
    if not first:
        return ended, Verdict("every input of all_reduce and every gradient of DDP is finite")
    call = min(first.values())
    named = frozenset(number for number in first if first[number] == call)
    return ended, Verdict(f"{ranks_of(named)}: the input of call {call} is not finite", named)


def by_waits(job):
    """Find the ranks that print something else once every collective is waited for."""
    before = job.run("broken.py")
    wait = functools.partial(recorder.around_all_reduce, after=lambda work: work and work.wait())
    after = job.run("broken.py", lambda rank: wait())
    differ = [n for n in range(len(before)) if before[n].out != after[n].out]
    if not differ:
        return before, Verdict("waiting for every collective changes nothing")
    pair = [repr(verdicts.last_line(ranks[differ[0]])) for ranks in (before, after)]
    text = f"{ranks_of(differ)} read a result before it is there: {' becomes '.join(pair)}"
    return before, Verdict(text, frozenset(differ))


def show_stacks(script):
    """Print node, rank, role and stack of each process of a job that runs here, ranks first."""
    found = [one for one in find_processes() if one.role != "launcher" and one.pid != os.getpid()]
    found = [one for one in found if script in " ".join(one.command)]
    if not found:
        raise cli.UsageError(f"--stacks: no rank on this node runs {script}")
    for one in sorted(found, key=lambda one: (one.role != "rank", one.rank, one.pid)):
        role = "rank" if one.role == "rank" else "worker of its loader"
        print(f"node {one.node}, rank {one.rank}, {role}, pid {one.pid}")
        try:
            frames = part.stack_of(one.pid)
        except cli.UsageError as error:  # this process's; the others may be readable
            print(f"  {error}")
            continue
        stopped = "  is stopped (SIGSTOP)" if frames == [] else "  has ended"
        for file, name, line in frames or ():
            print(f"  {name}, {Path(file).name}:{line}")
        if not frames:
            print(stopped)
    return 0


TOOLS = {
    "logs": (by_logs, "logs and exit codes of all ranks, compared"),
    "lines": (by_lines, "what the ranks print, compared line by line"),
    "epochs": (by_epochs, "what each rank prints, one epoch against the next"),
    "stacks": (by_stacks, "py-spy on each rank, after 1 s"),
    "heartbeat": (by_heartbeat, "the log size and CPU time of each rank, watched"),
    "detail": (by_detail, "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    "recorder": (by_recorder, "the flight recorder of each rank"),
    "inputs": (by_inputs, "a check of the input of every all_reduce"),
    "waits": (by_waits, "the job again, with a wait after every all_reduce"),
    "all": (by_all, "one tool after the other, until one names a rank"),
}


def show(report, title, ended, pattern):
    """Print how each rank ended, and the line of its log that tells most."""
    report.say(f"\n{title}")
    for number, rank in enumerate(ended):
        line = verdicts.last_line(rank, pattern) or "says nothing"
        found = re.search(pattern, line)
        if found and found.end() > WIDTH:
            line = f"... {line[found.start() :]}"
        line = line if len(line) <= WIDTH else f"{line[:WIDTH].rsplit(' ', 1)[0]} ..."
        report.say(f"  rank {number}, {verdicts.ending(rank)}: {line}")


def result_of(job: Job) -> str:
    """Return the line that each rank of the cured job prints last."""
    return job.failure.right.format(n=job.world_size, others=job.world_size - 1)


def to_be_named(job: Job) -> frozenset[int]:
    """Return the ranks that the tool has to name: only the checks ask for this."""
    failure, n = job.failure, job.world_size
    if failure.missing:
        return frozenset(range(n - failure.missing, n))
    if failure.names == "none" or (failure.names == "the odd one" and n < 3):
        return frozenset()
    everybody = frozenset(range(n))
    if failure.names == "the others":
        return everybody - {job.culprit}
    return everybody if failure.names == "all" else frozenset([job.culprit])


def check(report, job, broken, verdict, cured, seconds):
    """Hold what was seen against case.toml, and the named ranks against the broken script."""
    failure, source = job.failure, f"failures/{job.failure.name}/case.toml"
    right = result_of(job)
    heard = [
        any(re.search(failure.message, line) for rank in ended for line in verdicts.lines_of(rank))
        for ended in (broken, cured)
    ]
    ends = [
        re.fullmatch(failure.ends.get("culprit" if n == job.culprit else "others", ""), end)
        for n, end in enumerate(map(verdicts.ending, broken))
    ]
    sure = to_be_named(job)
    maybe = {job.culprit} if failure.names == "the others" else set()
    named = [n in sure and n in verdict.named for n in range(job.world_size)]
    rows = [
        ("broken: ranks that end as described", sum(map(bool, ends)), len(broken)),
        ("found: ranks named rightly", sum(named), len(sure)),
        ("found: ranks named wrongly", len(verdict.named - sure - maybe), 0),
        ("cured: ranks that end by exit code 0", sum(r.code == 0 for r in cured), job.world_size),
        ("cured: ranks with the right result",
         sum(r.out.splitlines()[-1:] == [right] for r in cured), job.world_size),
        ("all jobs end within the deadline of a case", int(seconds < CASE_S), 1),
    ]  # fmt: skip
    if report.args.tool in (None, failure.tool):  # the others have words of their own
        said = len(re.findall(failure.says, verdict.text)[:1])
        rows.insert(1, ("found: the tool says what it should", said, 1))
    if failure.message:  # some failures are silent
        rows.insert(0, ("broken: the message is there", int(heard[0]), 1))
        rows.insert(-3, ("cured: the message is there", int(heard[1]), 0))
    for name, measured, expected in rows:
        report.check(name, measured, expected, 0, source)


def refuse(failure: Failure, args, world):
    """Raise UsageError for what cannot run here."""
    if world.launcher != "python":
        script = f"failures/{failure.name}/broken.py"
        raise cli.UsageError(f"start this with python; torchrun can start {script}")
    if args.device == "cuda":
        raise cli.UsageError("--device cuda: start broken.py with torchrun; this starts CPU ranks")
    size = args.ranks or failure.ranks
    if size < 2:
        raise cli.UsageError(f"--ranks must be at least 2, not {size}")
    if args.culprit is not None:
        if failure.culprit() is None or failure.fixed is not None:
            raise cli.UsageError(f"--culprit: {failure.name} cannot be moved to another rank")
        if not failure.lowest <= args.culprit < size:
            raise cli.UsageError(f"--culprit must be from {failure.lowest} to {size - 1}")
    if {"shm_mib", "host"} & set(failure.limits) and not may_enter():
        raise cli.UsageError(f"{failure.name} needs Linux and root, for a namespace of its own")
    if failure.linux and sys.platform != "linux":
        raise cli.UsageError(f"{failure.name} needs Linux")


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("name", nargs="?", choices=NAMES, metavar="NAME", help="a failure (without: list them)")
    add("--tool", choices=TOOLS, help="look with this tool instead of the failure's own")
    add("--ranks", type=cli.positive_int, help="how many ranks to start (2, or what it needs)")
    add("--culprit", type=cli.whole_number, help="break this rank instead (what broken.py says)")
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
    world = runtime.discover()
    report = Report("04-nccl-operations/failure_gallery.py", args, world, torch.device("cpu"))
    if args.name is None:
        rows = [(f.name, f.cause, f.tool) for f in map(load, NAMES)]
        report.table(rows, ("failure", "what is wrong", "tool"), names=3)
        return 0
    failure = load(args.name)
    refuse(failure, args, world)
    report.start(f"{failure.name}: {failure.cause}")
    with tempfile.TemporaryDirectory() as folder:
        size = args.ranks or failure.ranks
        culprit = failure.culprit() if args.culprit is None else args.culprit
        job = Job(failure, size, culprit, Path(folder), min(DEADLINE_S, args.timeout))
        look, title = TOOLS[args.tool or failure.tool]
        started = time.monotonic()
        broken, verdict = look(job)
        show(report, "broken:", broken, failure.message)
        report.say(f"\nfound: {title}\n  {verdict.text}")
        cured = job.run("cured.py")
        seconds = time.monotonic() - started
        show(report, f"cured: {failure.cure}", cured, re.escape(result_of(job)))
        report.say()
    check(report, job, broken, verdict, cured, seconds)
    return report.finish(f"{failure.name} was broken, found and cured")


if __name__ == "__main__":
    cli.run(main)
