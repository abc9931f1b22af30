"""Read the logs of a failed job: whose line it is, when it was written, what it says.

Logs of one rank each, or of many ranks together: as torchrun, SLURM, mpirun and Ray
write them, and the kernel's. Sources: torch 2.14, c10/util/Logging.cpp,
torch/distributed/elastic/multiprocessing, ProcessGroupNCCL.cpp; NCCL user guide,
NCCL_DEBUG_FILE; srun(1), --label; mpirun(1), --tag-output; NVIDIA, "Xid Errors".
"""

import calendar
import json
import re
import signal
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

ENDINGS = {".log", ".out", ".err", ".txt", ".dmesg"}
ERROR_FILE = "error.json"  # torchrun's TORCHELASTIC_ERROR_FILE

# The kinds of events, the surest cause first. A rank that LOST another one suffers from
# that rank's failure. One that WAITED stood in a collective until its time was up.
HARDWARE, ERROR, KILLED, LOST, WAITED = "hardware", "error", "killed", "lost", "waited"
CAUSES = (HARDWARE, ERROR, KILLED)

IS_WAITING = re.compile(
    r"Watchdog caught collective operation timeout|detected by watchdog|dump signal"
    r"|Heartbeat monitor|operations have failed or timed out|Timed out waiting"
    r"|wait timeout after",
    re.I,
)
IS_LOST = re.compile(
    r"ncclRemoteError|Socket recv failed|(closed|reset) by (remote )?peer"
    r"|Broken pipe|Socket closed|store->get|failed to recv|recvValue failed"
    r"|Received data size doesn't match|waiting for clients|lost contact with"
    r"|remote process exited|Connection was likely closed|Connection refused",
    re.I,
)
IS_HARDWARE = re.compile(
    r"NVRM: Xid|SXid|fallen off the bus|uncorrectable|hardware error|row remap"
    r"|oom.kill|Out of memory: Killed|tasks? [\d,-]+: Out Of Memory|I/O error, dev",
    re.I,
)
IS_ERROR = re.compile(
    r"^(\w+\.)*\w*(Error|Exception|Interrupt): |^[\w-]+\.py: (error|rank \d+): "
    r"|CUDA error|Cuda failure|out of memory|unhandled cuda|Fatal Python error"
    r"|Segmentation fault|Bus error|Call to \w+ failed|No space left"
    r"|\b(FATAL|CRITICAL)\b",
)
FRAME = re.compile(r'\s*File "(.+)", line (\d+), in (.+)')
CHAINED = re.compile(r"During handling of|The above exception was")
LIBRARY = re.compile(r"site-packages|/lib/python\d|<frozen|^<")
SRUN = re.compile(r"(?:srun|slurmstepd): error: (\S+): tasks? ([\d,-]+): (.*)")
DIED = re.compile(r"failed \(exitcode: (-\d+)\) local_rank: (\d+)")
ENQUEUED = re.compile(
    r"last enqueued (?:NCCL )?work: (\d+), last completed (?:NCCL )?work: (\d+)", re.I
)
GROUP = re.compile(r"PG (?:ID \d+ PG )?GUID (\d+)(?:\((\w+)\))?|PG ID (\d+)")

CLOCK = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<part>\d+))?"
DATE = r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)"
# Prefixes of a line's text. All of them are taken away, in any order.
PREFIXES = [
    re.compile(rf"\[?{DATE}[T _]{CLOCK}(?P<zone>Z|[+-]\d\d:?\d\d)?[\]|,:]* +"),
    re.compile(
        rf"\[\w{{3}} (?P<name>\w{{3}}) +(?P<day>\d+) {CLOCK} (?P<year>\d{{4}})\] "
    ),
    re.compile(rf"\[?{CLOCK}\]? +"),
    re.compile(r"\[ *\d+\.\d+\] "),  # dmesg: seconds since the node started
    re.compile(r"\[\d+,(?P<rank>\d+)\]<std\w+>:\s?"),  # mpirun --tag-output
    re.compile(r"\(\w+ pid=(?P<pid>\d+)(, ip=(?P<node>[\w.:-]+))?\) "),  # Ray
    re.compile(r"\[rank(?P<rank>\d+)\]:\s?"),  # PyTorch, once it has a process group
    re.compile(r"\[[a-zA-Z_]+(?P<local>\d+)\]:\s?"),  # torchrun --tee
    # C++ and Python of PyTorch. It prints no zero before the month: E304 is 4 March.
    re.compile(
        rf"\[?[IWEF](?P<month>\d\d?)(?P<day>\d\d) {CLOCK} (\d+ )?[\w/.]+:\d+\] "
    ),
    re.compile(r"\[[IWEF] [\w/.]+:\d+\] "),  # PyTorch before 2.2
    re.compile(r"\[(PG [^\]]*)?Rank (?P<rank>\d+)\] +"),
    re.compile(r"(?P<node>[\w.-]+):\d+:\d+ \[(?P<gpu>\d+)\] "),  # NCCL
    re.compile(r"(?P<node>[\w.-]*[a-z][\w.-]*):? (?=\[(rank\d|[IWEF]\d|default\d))"),
]
LABEL = re.compile(r"(?P<rank>\d+): ?")  # srun --label
TORCHRUN = re.compile(r"(?:(.*)/)?([^/]+)/attempt_(\d+)/(\d+)/[^/]+")
SLURM = re.compile(r".*?\d+(?:_\d+)?-(?:([a-zA-Z][\w.-]*?)-)?(\d+)\.(?:out|err)")


@dataclass
class LogSource:
    """A rank, a GPU, a node's kernel or a launcher: whoever writes lines."""

    label: str = ""  # where no rank is known: "local rank 0", "job.log"
    node: str = ""
    rank: int | None = None

    @property
    def name(self):
        if self.rank is None:
            return f"{self.label} on {self.node}" if self.node else self.label
        return f"rank {self.rank}" + (f" on {self.node}" if self.node else "")


@dataclass
class LogLine:
    """A line without the prefixes of its text."""

    source: LogSource
    text: str
    raw: str
    place: str  # file:number
    time: float  # seconds since 1970
    about: str  # "at" that time; "after" the line before; "by" the file's last change


@dataclass
class Event:
    """An error of a source, once."""

    kind: str
    source: LogSource
    message: str
    line: LogLine
    code: str = ""  # of a traceback: file, line and function of the program


@dataclass
class Position:
    """How far a rank had come in a process group, by its own count of collectives."""

    source: LogSource
    group: str
    enqueued: int
    completed: int


@dataclass
class Logs:
    lines: list[LogLine] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)


def read_logs(paths):
    """Read files and folders: a Logs. Lines of a source stay in their order."""
    logs, sources = Logs(), {}
    for root in paths:
        files = [root] if root.is_file() else sorted(root.rglob("*"))
        for file in files:
            if file.name == ERROR_FILE:
                read_error_file(file, root, sources, logs)
            elif file.is_file() and (file == root or file.suffix in ENDINGS):
                logs.lines += read_lines(file, root, sources)
    number_local_ranks(logs.lines, sources)
    by_source = {}
    for line in logs.lines:
        by_source.setdefault(id(line.source), []).append(line)
    for lines in by_source.values():
        logs.events += find_events(lines)
    # A launcher reports ranks that also have lines of their own.
    for event in logs.events:
        if event.source.rank is None and event.source.label.startswith("local rank"):
            key = event.source.node, event.source.label
            event.source = sources.get(key, event.source)
    logs.positions = find_positions(logs.lines)
    return logs


def read_lines(file, root, sources):
    """Yield a file's lines, each with its source and time."""
    changed = file.stat().st_mtime
    texts = file.read_text(errors="replace").splitlines()
    is_labelled = 2 * sum(bool(LABEL.match(text)) for text in texts) > len(texts)
    prefixes = [LABEL, *PREFIXES] if is_labelled else PREFIXES
    times = {}  # of each source's line before
    for number, raw in enumerate(texts, 1):
        text, fields = take_prefixes(raw, prefixes)
        source = find_source(file, root, fields, sources)
        time = time_of(fields, changed)
        about = "at"
        if time is None:
            time, about = times.get(id(source), changed), "after"
            if id(source) not in times:
                about = "by"
        else:
            times[id(source)] = time
        yield LogLine(source, text, raw, f"{file}:{number}", time, about)


def take_prefixes(text, prefixes):
    """Return a line without its prefixes, and the prefixes' fields."""
    fields = {}
    while True:
        match = next(filter(None, (prefix.match(text) for prefix in prefixes)), None)
        if not match:
            return text, fields
        fields |= {name: value for name, value in match.groupdict().items() if value}
        text = text[match.end() :]


def find_source(file, root, fields, sources):
    """Return who wrote a line, by its prefixes and by its file's path."""
    path = str(file.relative_to(root)) if file != root else file.name
    label, node, rank = place_of(path)
    node = fields.get("node", node)
    rank = int(fields["rank"]) if "rank" in fields else rank
    if "pid" in fields:
        label = f"pid {fields['pid']}"
    elif "gpu" in fields:
        label, node = f"GPU {fields['gpu']} of {node}", ""
    elif "local" in fields:
        label = f"local rank {fields['local']}"
    # A process that has told its rank once is this rank in all of its lines.
    is_process = label.startswith(("pid", "local rank"))
    key = (node, label) if is_process or rank is None else rank
    source = sources.setdefault(key, LogSource(label, node))
    source.rank = rank if rank is not None else source.rank
    return source


def place_of(path):
    """Return label, node and rank, as far as a path tells them.

    Known are torchrun's RUN/attempt_N/LOCAL_RANK/stderr.log, below a folder per node if
    they were copied together; SLURM's slurm-%j-%N-%t.out; and NODE.dmesg.
    """
    if match := TORCHRUN.fullmatch(path):
        again = f", attempt {match[3]}" if match[3] != "0" else ""
        return f"local rank {match[4]}{again}", match[1] or "", None
    folder, _, name = path.rpartition("/")
    if match := SLURM.fullmatch(name):
        return name, match[1] or folder, int(match[2])
    if name.endswith(".dmesg") or name.startswith("dmesg"):
        return f"kernel of {folder or name.split('.')[0]}", "", None
    return name, folder, None


def time_of(fields, changed):
    """Return seconds since 1970. A date takes what it leaves out from `changed`."""
    if "hour" not in fields:
        return None
    then = datetime.fromtimestamp(changed)
    month = fields.get("month", then.month)
    if "name" in fields:
        month = list(calendar.month_abbr).index(fields["name"])
    try:
        time = datetime(
            int(fields.get("year", then.year)),
            int(month),
            int(fields.get("day", then.day)),
            *(int(fields[part]) for part in ("hour", "minute", "second")),
        )
    except ValueError:  # it only looks like a date
        return None
    if zone := fields.get("zone", "").replace("Z", "+0000").replace(":", ""):
        minutes = int(zone[0] + "1") * (60 * int(zone[1:3]) + int(zone[3:5]))
        time = time.replace(tzinfo=timezone(timedelta(minutes=minutes)))
    seconds = time.timestamp() + float(f"0.{fields.get('part', 0)}")
    if "year" not in fields and seconds > changed + 86_400:  # from December to January
        seconds = time.replace(year=time.year - 1).timestamp()
    return seconds


def number_local_ranks(lines, sources):
    """torchrun's report says which rank each of its processes was."""
    for line in lines:
        if match := re.match(r"\s+rank +: (\d+) \(local_rank: (\d+)\)", line.raw):
            known = sources.get((line.source.node, f"local rank {match[2]}"))
            if known and known.rank is None:
                known.rank = int(match[1])


def read_error_file(file, root, sources, logs):
    """Read what torchelastic's @record leaves of a script's exception."""
    try:
        message = json.loads(file.read_text())["message"]
    except (ValueError, KeyError, TypeError):
        return
    if not isinstance(message, dict):
        message = {"message": str(message)}
    extra = message.get("extraInfo", {})
    time = float(extra.get("timestamp") or file.stat().st_mtime)
    source = find_source(file, root, {}, sources)
    text = message["message"]
    line = LogLine(source, text, text, str(file), time, "at")
    stack = extra.get("py_callstack", "").splitlines()
    logs.events.append(Event(classify(text), source, text, line, code_of(stack)))


def find_events(lines):
    """Yield the events of one source: a traceback with its causes is one."""
    place = 0
    while place < len(lines):
        line = lines[place]
        if "Traceback (most recent call last)" in line.text:
            end, message = read_traceback(lines, place)
            if message is not None:
                text = lines[message].text.strip()
                stack = [entry.text for entry in lines[place:message]]
                kind = classify_exception(text, stack)
                yield Event(kind, line.source, text, lines[message], code_of(stack))
            place = end
            continue
        yield from event_of(line)
        place += 1


def read_traceback(lines, start):
    """Return where a traceback ends, and which line has its first exception."""
    first, place, is_open = None, start + 1, True
    while place < len(lines):
        text = lines[place].text
        if CHAINED.match(text) or "Traceback (most recent" in text:
            is_open = True
        elif text and not text[0].isspace():
            if not is_open:
                break
            first, is_open = place if first is None else first, False
        place += 1
    return place, first


def classify_exception(message, stack):
    """PyTorch tells a lost peer. A connection of the program's own is its error."""
    frames = [match[1] for line in stack if (match := FRAME.match(line))]
    by_torch = message.startswith(("RuntimeError", "torch"))
    if by_torch or (frames and "/torch/" in frames[-1]):
        return classify(message)
    return ERROR


def classify(text):
    for pattern, kind in (
        (IS_WAITING, WAITED),
        (IS_LOST, LOST),
        (IS_HARDWARE, HARDWARE),
    ):
        if pattern.search(text):
            return kind
    return ERROR


def code_of(stack):
    """Return the innermost frame of a traceback that is not in a library."""
    frames = [match for line in stack if (match := FRAME.match(line))]
    program_frames = [frame for frame in frames if not LIBRARY.search(frame[1])]
    last = (program_frames or frames or [None])[-1]
    return f"{Path(last[1]).name}:{last[2]} in {last[3]}" if last else ""


def event_of(line):
    """Yield what a single line tells: an error, or a rank that a launcher saw die."""
    text, source = line.text, line.source
    if match := SRUN.search(text):
        who = LogSource(f"task {match[2]}", match[1])
        if "Out Of Memory" in match[3]:
            yield Event(HARDWARE, who, f"{match[3]} (says srun)", line)
        elif re.search(r"Killed|Segmentation|Bus error", match[3]):
            yield Event(KILLED, who, f"{match[3]} (says srun)", line)
    elif match := DIED.search(text):
        number = -int(match[1])
        # SIGTERM comes from the launcher, SIGABRT from the watchdog.
        if number not in (signal.SIGTERM, signal.SIGABRT):
            who = LogSource(f"local rank {match[2]}", source.node)
            name = signal.Signals(number).name
            yield Event(KILLED, who, f"killed by {name} (says torchrun)", line)
    elif IS_WAITING.search(text):
        yield Event(WAITED, source, text, line)
    elif "torch/distributed/elastic" in line.raw or "ChildFailedError" in text:
        return  # the launcher repeats a rank's report
    elif IS_HARDWARE.search(text):
        yield Event(HARDWARE, source, text, line)
    elif IS_LOST.search(text) and re.search(r"NCCL|\[[EF]\d|[Ee]rror", line.raw):
        yield Event(LOST, source, text, line)
    elif IS_ERROR.search(text):
        yield Event(ERROR, source, text, line)


def find_positions(lines):
    """Return the last position that each rank told of each process group."""
    positions = {}
    for line in lines:
        if match := ENQUEUED.search(line.raw):
            group = GROUP.search(line.raw)
            name = (group[1] or group[3]) if group else "0"
            position = Position(line.source, name, int(match[1]), int(match[2]))
            positions[line.source.name, name] = position
    return list(positions.values())
