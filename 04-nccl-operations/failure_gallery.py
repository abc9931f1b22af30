"""Break a distributed job on purpose; find what broke it, from outside; run it cured.

    CPU   python 04-nccl-operations/failure_gallery.py shapes-differ
    GPU   torchrun --standalone --nproc-per-node=2 \\
            04-nccl-operations/failures/shapes-differ/broken.py

Each failure is a folder in failures/: broken.py, cured.py, and case.toml, which says what to
expect. This runner starts the ranks of both scripts on the CPU, with the variables that torchrun
sets, and finds the cause by a tool that looks from outside, or is put in before the script starts.
Without a name it lists the failures.
Look for: what the ranks say, which is seldom what is wrong, and what the tool can and cannot say.

Sources: docs.pytorch.org, "Distributed communication package", section "Debugging
torch.distributed applications"; py-spy; torch 2.14.1, FlightRecorder.hpp.
"""

import re
import sys
import tempfile
import time
from pathlib import Path

import torch

import gallery_lab
import gallery_tools as tools
import recorder
from dist_common import cli, runtime
from dist_common.report import Report
from gallery_lab import NAMES, Failure, Job, load, may_enter

DEADLINE_S = 15.0  # of a job, after which its ranks are ended; --timeout makes it shorter
CASE_S = 100.0  # of all jobs of a failure: ten times what they take on two quiet cores
WIDTH = 100  # of what a rank says, in characters

# Each tool runs the broken job and judges it: it does not know which rank is broken.


def by_logs(job):
    ended = job.run("broken.py")
    return ended, tools.judge_logs(ended)


def by_lines(job):
    ended = job.run("broken.py")
    return ended, tools.judge_lines(ended)


def by_epochs(job):
    ended = job.run("broken.py")
    return ended, tools.judge_epochs(ended)


def by_stacks(job):
    stacks = []

    def look(pids):
        time.sleep(gallery_lab.STUCK_S)
        stacks.extend(gallery_lab.stack_of(pid) for pid in pids)

    ended = job.run("broken.py", during=look)
    return ended, tools.judge_stacks(stacks, "broken.py")


def by_heartbeat(job):
    stuck = []
    logs = [job.logs("broken.py") / f"rank-{rank}.out" for rank in range(job.world_size)]
    ended = job.run(
        "broken.py", during=lambda pids: stuck.extend(gallery_lab.wait_until_stuck(pids, logs))
    )
    return ended, tools.judge_heartbeat(stuck, ended)


def by_detail(job):
    return job.run("broken.py"), tools.judge_detail(
        job.run("broken.py", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    )


def by_recorder(job):
    def put_in(rank):
        file = job.folder / f"rank-{rank}.trace"
        return recorder.record(file)

    ended = job.run("broken.py", put_in)
    files = [job.folder / f"rank-{rank}.trace" for rank in range(len(ended))]
    return ended, recorder.judge_recorder([recorder.notes_of(file) for file in files], ended)


def by_inputs(job):
    ended = job.run("broken.py", lambda rank: recorder.check_inputs())
    return ended, tools.judge_inputs(ended)


def by_waits(job):
    ended = job.run("broken.py")
    waited = job.run("broken.py", lambda rank: recorder.wait_for_each())
    return ended, tools.judge_waits(ended, waited)


TOOLS = {
    "logs": (by_logs, "logs and exit codes of all ranks, compared"),
    "lines": (by_lines, "what the ranks print, compared line by line"),
    "epochs": (by_epochs, "what each rank prints, one epoch against the next"),
    "stacks": (by_stacks, "py-spy on each rank, after 1 s"),
    "heartbeat": (by_heartbeat, "the log size and CPU time of each rank, watched"),
    "detail": (by_detail, "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    "recorder": (by_recorder, "the flight recorder of each rank, by recorder.py"),
    "inputs": (by_inputs, "a check of the input of every all_reduce, by recorder.py"),
    "waits": (by_waits, "the job again, with a wait after every all_reduce, by recorder.py"),
}


def show(report, title, ended, pattern):
    """Print how each rank ended, and the line of its log that tells most."""
    report.say(f"\n{title}")
    for number, rank in enumerate(ended):
        line = tools.last_line(rank, pattern) or "says nothing"
        found = re.search(pattern, line)
        if found and found.end() > WIDTH:
            line = f"... {line[found.start() :]}"
        line = line if len(line) <= WIDTH else f"{line[:WIDTH].rsplit(' ', 1)[0]} ..."
        report.say(f"  rank {number}, {tools.ending(rank)}: {line}")


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
        any(re.search(failure.message, line) for rank in ended for line in tools.lines_of(rank))
        for ended in (broken, cured)
    ]
    ends = [
        re.fullmatch(failure.ends.get("culprit" if n == job.culprit else "others", ""), end)
        for n, end in enumerate(map(tools.ending, broken))
    ]
    sure = to_be_named(job)
    maybe = {job.culprit} if failure.names == "the others" else set()
    named = [n in sure and n in verdict.named for n in range(job.world_size)]
    rows = [
        ("broken: ranks that end as described", sum(map(bool, ends)), len(broken)),
        ("found: the tool says what it should", len(re.findall(failure.says, verdict.text)[:1]), 1),
        ("found: ranks named rightly", sum(named), len(sure)),
        ("found: ranks named wrongly", len(verdict.named - sure - maybe), 0),
        ("cured: ranks that end by exit code 0", sum(r.code == 0 for r in cured), job.world_size),
        ("cured: ranks with the right result",
         sum(r.out.splitlines()[-1:] == [right] for r in cured), job.world_size),
        ("all jobs end within the deadline of a case", int(seconds < CASE_S), 1),
    ]  # fmt: skip
    if failure.message:  # some failures are silent
        rows.insert(0, ("broken: the message is there", int(heard[0]), 1))
        rows.insert(5, ("cured: the message is there", int(heard[1]), 0))
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
    return parser.parse_args()


def main():
    args = parse_args()
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
