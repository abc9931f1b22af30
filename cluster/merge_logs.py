"""Show the logs of many ranks as one, by time, with the first error first.

    CPU   python cluster/merge_logs.py LOGS    (a folder that torchrun --log-dir wrote)
    GPU   the same, also on SLURM's slurm-JOB-TASK.out files and NCCL_DEBUG_FILE's

Look for: FIRST ERROR, the rank with an error of its own that came first, and not the ranks that
lost it afterwards. Folders of several nodes are copied into one, a folder for each node.

Sources: torch 2.14, torch/distributed/elastic/multiprocessing (folders, error.json), c10's logging;
NCCL user guide, NCCL_DEBUG_TIMESTAMP_FORMAT.
"""

import itertools
import re
from datetime import datetime
from pathlib import Path

import torch

from cluster_parts import merge_logs as part
from cluster_parts.verdicts import ranks_of
from legacy_common import cli, runtime
from legacy_common.report import Report

COPIED_S = 60.0  # a file written so long after all that the logs tell of is a copy
ORDER = {part.OWN: 0, part.LOST: 1, part.NOTICED: 2}


def merge(logs):
    """Return the lines of all logs by time; those without a time stay behind their predecessor."""
    return sorted(itertools.chain(*logs), key=lambda line: line.time)  # stable within a log


def all_errors(logs, told):
    """Return the errors of all logs and of torchrun's error files: the likeliest cause first.

    An error of a rank's own comes before those of ranks that lost another one, whatever the clocks
    say: a rank that fails takes a second to leave, in which others may notice and end first.
    """
    latest = max((line.time for lines in logs for line in lines if line.has_time), default=None)
    found = []
    for lines in filter(None, logs):
        written = Path(lines[0].file).stat().st_mtime
        is_copy = latest is not None and written > latest + COPIED_S
        found += part.errors_in(lines, None if is_copy else written)
    known = {(line.source.node, line.source.place): line.source for log in logs for line in log[:1]}
    for error in found:  # what a launcher says of a rank
        error.source = known.get((error.source.node, error.source.place), error.source)
    return sorted(told_once(found, told), key=lambda error: (ORDER[error.kind], error.time))


def told_once(found, told):
    """Join an error file with the traceback of the same rank: it knows the second."""
    for other in told:
        same = [one for one in found if one.source is other.source and one.message in other.message]
        for one in same:
            if one.exact:
                one.time, one.exact = other.time, ""
        if not same:
            found.append(other)
    return found


def fold(errors):
    """Return [first error, sources] for each message: many ranks say the same."""
    groups = {}
    for error in errors:
        first, sources = groups.setdefault((error.kind, part.message_of(error)), (error, []))
        if error.source.name not in sources:
            sources.append(error.source.name)
    return list(groups.values())


def silent(logs, errors):
    """Return the last line of each rank that reports no error: it was killed, or hangs."""
    failed = {error.source.name for error in errors}
    last = {}
    for line in merge(logs):
        if "rank" in line.source.name:
            last[line.source.name] = line
    return {name: line for name, line in last.items() if name not in failed}


def clock(seconds):
    return datetime.fromtimestamp(seconds).strftime("%H:%M:%S.%f")[:-3]


def show_errors(report, folded, still, full):
    """Print the first error with its code, then the others, each message once."""
    for place, (error, sources) in enumerate(folded):
        who = together(sources)
        about = error.exact + " " * bool(error.exact)
        is_first = place == 0 and error.kind == part.OWN
        head = "FIRST ERROR" if is_first else f"then, {error.kind}"
        report.say(f"{head}: {who}, {about}{clock(error.time)}: {part.message_of(error)}")
        if is_first or full:
            report.say("".join(f"    {line}\n" for line in error.lines) * full
                       + f"    {error.code or 'no traceback'}   {error.where}")  # fmt: skip
    if folded and folded[0][0].kind != part.OWN:
        report.say("NO RANK HAS AN ERROR OF ITS OWN: one was killed, hangs, or has no log here")
        for name, line in still.items():
            report.say(f"    no error from {name}; its last line, {clock(line.time)}: {line.text}")
    if not folded:
        report.say("no error in any log")


def show_lines(report, lines, errors, most, full):
    """Print merged lines, those that several ranks say one after the other once.

    All of them, or `most` before and behind the first error. Tracebacks are a line each.
    """
    hidden, instead = set(), {}
    for file, first, last in [error.span for error in errors if error.span and not full]:
        hidden |= {(file, number) for number in range(first, last + 1)}
    for error in errors:
        if error.span and not full:
            instead[error.span[:2]] = f"traceback: {part.message_of(error)} ({error.code})"
    shown = [line for line in lines if line.place in instead or line.place not in hidden]
    rows = []
    for text, same in itertools.groupby(shown, lambda own: instead.get(own.place) or text_of(own)):
        same = list(same)
        places = {"{}:{}".format(*line.place) for line in same}
        rows.append((same[0].time, sorted({line.source.name for line in same}), text, places))
    if errors and most is not None:
        at = next((n for n, row in enumerate(rows) if errors[0].where in row[3]), len(rows))
        rows = rows[max(0, at - most) : at + most + 1]
    for time, names, text, _ in rows:
        report.say(f"{clock(time)} {together(names)} | {text}")


def text_of(line):
    """Return a line without its time: what ranks say alike is folded."""
    for pattern in part.STAMPS:
        found = pattern.search(line.text[: part.STAMP_BY])
        if found:
            return (line.text[: found.start()] + line.text[found.end() :]).strip(" []|-:")
    return line.text.rstrip()


def together(names):
    """Return "ranks 0, 2" for the names of several ranks."""
    if len(names) == 1:
        return names[0]
    known = [found for name in names if (found := re.match(r"rank (\d+)", name))]
    ranks = [ranks_of(int(found[1]) for found in known)] if known else []
    return " and ".join(ranks + sorted(name for name in names if not name.startswith("rank ")))


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("logs", nargs="+", type=Path, metavar="LOGS", help="folders, or files")
    add("--lines", type=cli.whole_number, default=10,
        help="merged lines before and behind the first error (10)")  # fmt: skip
    add("--all", action="store_true", help="all merged lines")
    add("--full", action="store_true", help="whole tracebacks")
    return parser.parse_args()


def main():
    args = parse_args()
    for root in args.logs:
        if not root.exists():
            raise cli.UsageError(f"there is no {root}")
    logs, told = [], []
    for root in args.logs:
        for found, into in zip(part.read_logs(root), (logs, told), strict=True):
            into += found
    if not any(logs) and not told:
        raise cli.UsageError(f"no line in a *.log, *.out, *.err or error.json of {args.logs[0]}")
    report = Report("cluster/merge_logs.py", args, runtime.discover(), torch.device("cpu"))
    lines, errors = merge(logs), all_errors(logs, told)
    names = {line.source.name for line in lines}
    report.start(f"{len(lines):,} lines of {len(names)} sources")
    folded = fold(errors)
    show_errors(report, folded, silent(logs, errors), args.full)
    report.say()
    show_lines(report, lines, errors, None if args.all else args.lines, args.full)
    report.metrics["errors"] = [
        {"who": sources, "message": error.message, "kind": error.kind, "time": error.time,
         "code": error.code, "where": error.where} for error, sources in folded
    ]  # fmt: skip
    report.save()
    return 0


if __name__ == "__main__":
    cli.run(main)
