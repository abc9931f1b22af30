"""What merge_logs.py reads: whose log it is, when a line was written, what in it is an error."""

import itertools
import json
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cluster_parts.verdicts import VICTIM, shortened

ENDINGS = {".log", ".out", ".err", ".txt"}
ERROR_FILE = "error.json"  # what TORCHELASTIC_ERROR_FILE names under torchrun
OWN, LOST, NOTICED = "its own", "only lost another rank", "noticed by the launcher"
CHAINED = re.compile(r"(During handling of|The above exception was)")
FRAME = re.compile(r'\s*File "(.+)", line (\d+), in (.+)')
EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt|LostRank)\b")
# A line that is an error by itself.
ERROR = re.compile(
    r"^\[?[EF]\d{4} |\b(ERROR|CRITICAL|FATAL)\b|^[\w-]+\.py: (error:|rank \d+:)"
    r"|^(\w+\.)*\w*(Error|Exception): |NCCL WARN|Fatal Python error|Segmentation fault|Bus error"
    r"|[Oo]ut of memory|oom.kill|NVRM: Xid|\b(slurmstepd|srun): error"
)
# Beside VICTIM: what NCCL and PyTorch's store say of a peer that has gone.
GONE = re.compile(
    r"remote process exited or there was a network error|Watchdog caught collective operation"
    r"|Connection was likely closed|NCCL WARN .*(closed by|reset by|remote peer)|lost contact with"
    r"|NCCL operations have failed or timed out"
)
LAUNCHER = re.compile(
    r"torch/distributed/(elastic|run|launcher)|ChildFailedError|STEP .* CANCELLED"
)
SRUN = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.*)")
MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
CLOCK = r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)(?:[.,](?P<f>\d+))?"
STAMPS = [re.compile(pattern) for pattern in (
    # Python's logging, NCCL, loguru, ISO 8601
    rf"(?P<year>\d{{4}})-(?P<month>\d\d)-(?P<day>\d\d)[T _]{CLOCK}(?P<zone>Z|[+-]\d\d:?\d\d)?",
    rf"\b[IWEF](?P<month>\d\d)(?P<day>\d\d) {CLOCK}",  # PyTorch, C++ and Python
    rf"(?P<name>{'|'.join(MONTHS)}) +(?P<day>\d\d?) {CLOCK}(?: (?P<year>\d{{4}})\b)?",  # dmesg -T
    rf"^\[?{CLOCK}\b",
)]  # fmt: skip
STAMP_BY = 40  # characters: further on a time is what a line speaks of


@dataclass
class Source:
    """A rank, or a launcher: by global rank where its lines tell it, else by its place."""

    node: str
    place: str  # "local rank 0", "torchrun.err"
    rank: int | None = None

    @property
    def name(self) -> str:
        if self.rank is not None:
            return f"rank {self.rank}" + f" ({self.node})" * bool(self.node)
        return " ".join(filter(None, (self.node, self.place)))


@dataclass
class Line:
    """A line of a log; its time is its predecessor's where it has none of its own."""

    time: float  # seconds since 1970
    source: Source
    file: str
    number: int
    text: str
    has_time: bool = True

    @property
    def place(self) -> tuple[str, int]:
        return self.file, self.number


@dataclass
class Error:
    """What went wrong in a source, told once."""

    time: float
    source: Source
    message: str
    kind: str
    where: str  # file and line of the log
    code: str = ""  # file, line and function of the program
    lines: list[str] = field(default_factory=list)
    exact: str = ""  # or that it came "by" that time, or "after" it
    span: tuple[str, int, int] | None = None  # file, first and last line of a traceback


def time_of(text: str, written: float) -> float | None:
    """Return the time that a line begins with, in s; what it leaves out is as of `written`."""
    then = datetime.fromtimestamp(written)
    for pattern in STAMPS:
        found = pattern.search(text[:STAMP_BY])
        if not found:
            continue
        part = {"year": None, "month": None, "day": None, "name": None, "zone": None}
        part |= found.groupdict()
        month = MONTHS.index(part["name"]) + 1 if part["name"] else int(part["month"] or then.month)
        try:
            time = datetime(
                int(part["year"] or then.year), month, int(part["day"] or then.day),
                int(part["h"]), int(part["m"]), int(part["s"]),
            )  # fmt: skip
        except ValueError:  # it only looks like a time
            continue
        if part["zone"]:
            zone = part["zone"].replace("Z", "+0000").replace(":", "")
            minutes = int(zone[0] + "1") * (60 * int(zone[1:3]) + int(zone[3:5]))
            time = time.replace(tzinfo=timezone(timedelta(minutes=minutes)))
        seconds = time.timestamp() + float(f"0.{part['f'] or 0}")
        # A log without years that was begun in December and ended in January.
        return (
            seconds - 365 * 86_400 if seconds > written + 86_400 and not part["year"] else seconds
        )
    return None


TORCHRUN = re.compile(r"(?:(.*)/)?([^/]+)/attempt_(\d+)/(\d+)/[^/]+")
SLURM = re.compile(r".*?\d+(?:_\d+)?-(?:([a-zA-Z][\w.-]*?)-)?(\d+)\.(?:out|err)")


def place_of(told: str, runs: Counter) -> tuple[str, str, int | None]:
    """Return node, place on it and rank, as far as a path tells them.

    Known are torchrun's RUN/attempt_N/LOCAL_RANK/stderr.log, below a folder per node where such
    folders were copied together; and SLURM's slurm-%j-%N-%t.out, slurm-%j-%t.out.
    """
    if found := TORCHRUN.fullmatch(told):
        node, again = found[1] or "", f", attempt {found[3]}" * (found[3] != "0")
        if runs[node] > 1:  # several agents wrote to one folder
            node = f"{node}/{found[2]}".lstrip("/")
        return node, f"local rank {found[4]}{again}", None
    folder, _, name = told.rpartition("/")
    if found := SLURM.fullmatch(name):
        return found[1] or folder, name, int(found[2])
    return folder, name, None


def read_logs(root: Path) -> tuple[list[list[Line]], list[Error]]:
    """Return the lines of each source below a folder, in order, and torchrun's error files."""
    files = [root] if root.is_file() else sorted(root.rglob("*"))
    files = [f for f in files if f.is_file() and (f.suffix in ENDINGS or f.name == ERROR_FILE)]
    told = {f: f.name if f == root else str(f.relative_to(root)) for f in files}
    found = {m.group(1, 2) for text in told.values() if (m := TORCHRUN.fullmatch(text))}
    runs = Counter(node or "" for node, _ in found)
    sources: dict[tuple, Source] = {}
    logs, errors = [], []
    for path, text in told.items():
        node, place, rank = place_of(text, runs)

        def source_of(own: str, rank=rank, node=node) -> Source:
            # stdout.log and stderr.log are one rank's
            return sources.setdefault((node, own), Source(node, own, rank))

        if path.name == ERROR_FILE:
            errors += read_error_file(path, source_of(place))
        else:
            logs += split(path, place, source_of)
    for line in itertools.chain(*logs):  # torchrun's report says whose place which rank has
        if found := re.match(r"\s+rank +: (\d+) \(local_rank: (\d+)\)", line.text):
            known = sources.get((line.source.node, f"local rank {found[2]}"))
            if known and known.rank is None:
                known.rank = int(found[1])
    return logs, errors


def split(path: Path, place: str, source_of) -> Iterator[list[Line]]:
    """Yield the lines of each rank in a file: of several where a launcher has marked each line."""
    written = path.stat().st_mtime
    texts = path.read_text(errors="replace").splitlines()
    labelled = texts and 2 * sum(bool(re.match(r"\d+: ", t)) for t in texts) > len(texts)
    of: dict[str, list[Line]] = {}
    for number, text in enumerate(texts, 1):
        own, rank = place, None
        if labelled and (found := re.match(r"(\d+): ", text)):  # srun --label
            own, rank, text = f"task {found[1]}", int(found[1]), text[found.end() :]
        elif found := re.match(r"\[(?!rank\d)[a-zA-Z_]+?(\d+)\]:", text):  # torchrun --tee
            own, text = f"local rank {found[1]}", text[found.end() :].removeprefix(" ")
        if found := re.match(r"\[rank(\d+)\]:\s?", text):  # PyTorch, once it has a process group
            rank, text = int(found[1]), text[found.end() :]
        lines = of.setdefault(own, [])
        source = source_of(own)
        if source.rank is None and rank is not None:
            source.rank = rank
        time = time_of(text, written)
        before = lines[-1].time if lines else None
        lines.append(Line(time or before or 0.0, source, str(path), number, text, bool(time)))
    for lines in of.values():
        first = next((line.time for line in lines if line.has_time), written)
        for line in lines:  # those before the first one that has a time
            line.time = line.time or first
        yield lines


def read_error_file(path: Path, source: Source) -> Iterator[Error]:
    """Read what a script whose main has torchelastic's @record leaves of its exception."""
    try:
        message = json.loads(path.read_text())["message"]
    except (ValueError, KeyError, TypeError):
        return
    extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    text = message["message"] if isinstance(message, dict) else str(message)
    lines = extra.get("py_callstack", "").splitlines()
    time, code = float(extra.get("timestamp") or path.stat().st_mtime), code_of(lines)
    yield Error(time, source, text, kind_of(text, lines), str(path), code, lines)


def code_of(lines: list[str]) -> str:
    """Return the innermost frame of a traceback that is no library's."""
    frames = [found for line in lines if (found := FRAME.match(line))]
    own = [f for f in frames if not re.search(r"site-packages|/lib/python\d|<frozen", f[1])]
    last = (own or frames or [None])[-1]
    return f"{Path(last[1]).name}:{last[2]} in {last[3]}" if last else ""


def kind_of(message: str, lines: list[str]) -> str:
    """Say whether an error is a rank's own, or comes from another rank's.

    A connection of the program's own, to a server of files say, is its own error: a lost rank is
    told by PyTorch or NCCL.
    """
    if LAUNCHER.search(message):
        return NOTICED
    frames = [found[1] for line in lines if (found := FRAME.match(line))]
    by_torch = (
        not frames or "/torch/" in frames[-1] or message.startswith(("RuntimeError", "torch"))
    )
    lost = VICTIM.search(message) or GONE.search(message)
    return LOST if lost and by_torch else OWN


def errors_in(lines: list[Line], written: float | None) -> Iterator[Error]:
    """Yield the errors of one source: a traceback, with those that it came from, is one.

    `written` is when the file was written to last; None if that is not known.
    """
    place, unknown = 0, "after" if any(line.has_time for line in lines) else "by"
    while place < len(lines):
        line = lines[place]
        if "Traceback (most recent call last)" in line.text:
            end, last = end_of_traceback(lines, place)
            texts = [one.text for one in lines[place:end]]
            own = texts[: last - place + 1]
            message = texts[last - place].strip()
            time, exact = line.time, "" if line.has_time else unknown
            behind = next((one.time for one in lines[end:] if one.has_time), written)
            if exact and behind and behind >= time:
                time, exact = behind, "by"
            where = f"{line.file}:{line.number}"
            yield Error(
                time, line.source, message, kind_of(message, own), where, code_of(own), texts,
                exact, (line.file, line.number, lines[end - 1].number),
            )  # fmt: skip
            place = end
            continue
        yield from error_of(line)
        place += 1


def end_of_traceback(lines: list[Line], start: int) -> tuple[int, int]:
    """Return where a traceback ends, and where its first exception stands: what it came from."""
    first, place = None, start + 1
    while place < len(lines):
        text = lines[place].text
        if text.startswith((" ", "\t")) or not text or CHAINED.match(text) or "Traceback" in text:
            place += 1
        elif EXCEPTION.match(text):
            first = place if first is None else first
            place += 1
            following = [one.text for one in lines[place : place + 3] if one.text]
            if not any(CHAINED.match(text) for text in following[:1]):
                break
        else:
            break
    return place, place - 1 if first is None else first


def error_of(line: Line) -> Iterator[Error]:
    """Yield what a single line tells: an error, or a rank that the launcher saw die."""
    where = f"{line.file}:{line.number}"
    if found := SRUN.search(line.text):
        killed = re.search(r"Killed|Segmentation|Bus error|Aborted", found[3])
        kind = OWN if killed and "Aborted" not in killed[0] else NOTICED
        rank = int(found[2]) if found[2].isdecimal() else None
        source = Source(found[1], f"task {found[2]}", rank) if kind == OWN else line.source
        yield Error(line.time, source, f"{found[3]} (says srun)", kind, where)
    elif found := re.search(r"failed \(exitcode: (-\d+)\) local_rank: (\d+)", line.text):
        number = -int(found[1])
        if number not in (signal.SIGTERM, signal.SIGABRT):  # its own doing, or an exception in C++
            source = Source(line.source.node, f"local rank {found[2]}")
            name = signal.Signals(number).name
            yield Error(line.time, source, f"killed by {name} (says torchrun)", OWN, where)
    elif ERROR.search(line.text):
        yield Error(line.time, line.source, line.text, kind_of(line.text, []), where)


def message_of(error: Error) -> str:
    """Return a message without what differs from rank to rank: what alike messages share."""
    text = error.message
    for pattern in STAMPS:
        found = pattern.search(text[:STAMP_BY])
        if found:
            text = text[found.end() :].lstrip(" ]|-,")
    return re.sub(r"\brank ?\d+\b", "rank N", shortened(text))
