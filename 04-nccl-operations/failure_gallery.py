"""Break a distributed job on purpose; name what broke it by what its ranks say; run it cured.

    CPU   python 04-nccl-operations/failure_gallery.py shapes-differ
    GPU   torchrun --standalone --nproc-per-node=2 \\
            04-nccl-operations/failures/shapes-differ/broken.py

Each failure is a folder in failures/: broken.py, cured.py, and case.toml, which says what to
expect. This runner starts the ranks of both scripts on the CPU, with the variables that torchrun
sets, and compares what the ranks say and how they end. Without a name it lists the failures.
Look for: what the ranks say, which is seldom what is wrong, and where it does not tell who is.

Sources: docs.pytorch.org, "Distributed communication package", section "Debugging
torch.distributed applications".
"""

import re
import sys
import tempfile
import time
from pathlib import Path

import torch

from legacy_common import cli, runtime
from legacy_common.report import Report
from nccl_parts import failure_gallery as part
from nccl_parts.failure_gallery import (
    NAMES,
    Failure,
    Job,
    Verdict,
    compare,
    load,
    may_enter,
    ranks_of,
)

CASE_S = 100.0  # of all jobs of a failure: ten times what they take on two quiet cores
WIDTH = 100  # of what a rank says, in characters

# Each tool runs the broken job and judges it: it does not know which rank is broken.


def by_logs(job):
    ended = job.run("broken.py")
    return ended, part.judge_logs(ended)


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


def by_detail(job):
    """Read what TORCH_DISTRIBUTED_DEBUG=DETAIL says each rank is about to call."""
    ended = job.run("broken.py")
    calls = part.calls_in_detail(job.run("broken.py", TORCH_DISTRIBUTED_DEBUG="DETAIL"))
    if calls:
        return ended, compare(calls, "the collective")
    # It compares what the members of one group call, and sees no ranks that wait in several.
    return ended, Verdict("DETAIL says nothing: record the job's calls (cluster/triage.py)")


TOOLS = {
    "logs": (by_logs, "logs and exit codes of all ranks, compared"),
    "lines": (by_lines, "what the ranks print, compared line by line"),
    "epochs": (by_epochs, "what each rank prints, one epoch against the next"),
    "detail": (by_detail, "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
}


def show(report, title, ended, pattern):
    """Print how each rank ended, and the line of its log that tells most."""
    report.say(f"\n{title}")
    for number, rank in enumerate(ended):
        line = part.last_line(rank, pattern) or "says nothing"
        found = re.search(pattern, line)
        if found and found.end() > WIDTH:
            line = f"... {line[found.start() :]}"
        line = line if len(line) <= WIDTH else f"{line[:WIDTH].rsplit(' ', 1)[0]} ..."
        report.say(f"  rank {number}, {part.ending(rank)}: {line}")


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
        any(re.search(failure.message, line) for rank in ended for line in part.lines_of(rank))
        for ended in (broken, cured)
    ]
    ends = [
        re.fullmatch(failure.ends.get("culprit" if n == job.culprit else "others", ""), end)
        for n, end in enumerate(map(part.ending, broken))
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
    add("--tool", choices=TOOLS, help="judge by this instead of the failure's own")
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
        job = Job(failure, size, culprit, Path(folder), min(failure.deadline_s, args.timeout))
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
