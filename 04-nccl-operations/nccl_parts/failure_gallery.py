"""How failure_gallery.py starts a failure's ranks, as a launcher would, and what they say."""

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import json
import os
import random
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil
import torch.distributed as dist

from dist_common import ranks
from legacy_common.lab import namespaces

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

FAILURES = Path(__file__).parents[1] / "failures"
GRACE_S = 3.0  # after the first failure, until the ranks that still run are ended
PR_SET_PTRACER, ANY = 0x59616D61, ctypes.c_ulong(-1)  # prctl(2)
LIBC = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_NAME = 0x20000, 0x4000000  # of unshare(2)
# The line of a broken script that says which rank is broken, where one rank is.
CULPRIT = re.compile(r"^([A-Z]+) = (\d+)(?=  # the rank )", re.M)


@dataclass
class Failure:
    """What case.toml says of a failure."""

    name: str
    group: str  # "calls", "one", "silent" or "start": the table of the page it stands in
    symptom: str
    cause: str
    message: str  # a regular expression: what a rank of the broken job says; "" for silence
    ends: dict[str, str]  # regular expressions: how `culprit` and `others` of the broken job end
    tool: str  # what tells most of it: "logs", "lines", "epochs" or "detail"
    says: str  # a regular expression: what it says
    # "the rank", "the odd one" (of 3 or more), "the others" (and perhaps that rank), "all", "none"
    names: str
    cure: str
    nccl: str  # what is seen there instead, and the letters of the page's sources
    right: str  # what each rank of the cured job prints last; {n}: ranks, {others}: one less
    look: str = ""  # where to look, if the ranks do not say who it is
    page: str = ""  # what the page adds
    deadline_s: float = 15.0  # of a job, after which its ranks are ended
    ranks: int = 2  # that are started, unless --ranks says otherwise
    missing: int = 0  # ranks that WORLD_SIZE promises and nobody starts
    restarts: int = 0  # of the cured job, after a failure
    limits: dict[str, int] = field(default_factory=dict)  # of each rank's process
    linux: bool = False  # whether it needs what only Linux does
    lowest: int = 0  # the first rank that it can be moved to
    fixed: int | None = None  # the broken rank, where no other one can be
    grace_s: float = GRACE_S  # where a rank ends by itself, but later

    def culprit(self) -> int | None:
        """Return the rank that broken.py breaks; None where it breaks all of them."""
        if self.fixed is not None:
            return self.fixed
        named = CULPRIT.search((FAILURES / self.name / "broken.py").read_text())
        return int(named[2]) if named else None


def load(name: str) -> Failure:
    """Read failures/NAME/case.toml."""
    return Failure(name, **tomllib.loads((FAILURES / name / "case.toml").read_text()))


NAMES = sorted(folder.parent.name for folder in FAILURES.glob("*/case.toml"))


@dataclass
class Job:
    """A script of a failure, as it is started: on how many ranks, broken on which, in a folder."""

    failure: Failure
    world_size: int
    culprit: int | None
    folder: Path
    deadline_s: float

    def run(self, script: str | Path, put_in=lambda rank: None, during=lambda pids: None,
        **environ) -> list[ranks.Rank]:  # fmt: skip
        """Run a script, in each rank `put_in` first, as the recorder is; return how they ended.

        A path is of another script than the failure's two, as a student's cure is: of a copy.
        """
        broken, n = script == "broken.py", self.world_size
        file = self.folder / Path(script).name
        source = (FAILURES / self.failure.name / script).read_text()
        file.write_text(CULPRIT.sub(rf"\g<1> = {self.culprit}", source))
        if re.search("DistributedDataParallel|fully_shard", source):
            importlib.import_module("torch._dynamo")  # here once, not in each rank: it is slow
        apart = "host" in self.failure.limits
        with namespaces.hosts([1e9] * n) if apart else contextlib.nullcontext() as network:
            for attempt in range(1 if broken else 1 + self.failure.restarts):
                launched = {
                    "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "OMP_NUM_THREADS": 1,
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
                    "TORCHELASTIC_RUN_ID": f"gallery-{os.getpid()}",
                    "TORCHELASTIC_RESTART_COUNT": attempt, "CUDA_VISIBLE_DEVICES": "",
                    "TORCH_DISTRIBUTED_DEBUG": "OFF", **environ,
                }  # fmt: skip
                body = functools.partial(self._be, file, launched, put_in, network)
                logs, started = self.logs(script, attempt), n - self.failure.missing * broken
                grace_s = self.failure.grace_s
                ended = ranks.fork(
                    body, started, logs, self.deadline_s, grace_s, during, values=json
                )
                if all(rank.code == 0 for rank in ended):
                    break
        return ended

    def logs(self, script: str | Path, attempt: int = 0) -> Path:
        return self.folder / f"logs-{Path(script).name}-{attempt}"

    def _be(self, file: Path, launched: dict, put_in, network, rank: int) -> None:
        faulthandler.disable()  # a rank that is ended would tell of that, and not of what it did
        launched |= {"RANK": rank, "LOCAL_RANK": rank}
        os.environ.update({name: str(value) for name, value in launched.items()})
        os.chdir(self.folder)
        dist.set_debug_level_from_env()
        if sys.platform == "linux":  # Ubuntu lets py-spy read none but its own children otherwise
            LIBC.prctl(PR_SET_PTRACER, ANY)
        if network is not None:
            be_a_host(network, rank)
        limit(self.failure.limits)
        at_end = put_in(rank)
        sys.argv = [str(file)]
        try:
            runpy.run_path(str(file), run_name="__main__")
        finally:
            if at_end:
                at_end()


def free_port() -> int:
    """Return a port that nobody listens on, and the next one neither."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)  # below those that Linux hands out
        with contextlib.suppress(OSError):
            for number in (port, port + 1):
                socket.create_server(("", number)).close()
            return port


def limit(limits: dict[str, int]) -> None:
    """Give this rank less than the machine has, as `ulimit -n`, `ulimit -v` or docker would."""
    if "shm_mib" in limits:
        enter(NEW_MOUNTS, f"-t tmpfs -o size={limits['shm_mib']}m none /dev/shm")
    if "open_files" in limits:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits["open_files"],) * 2)
    if "memory_mib" in limits:
        most = psutil.Process().memory_info().vms + limits["memory_mib"] * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def enter(namespaces: int, mounts: str) -> None:
    """Enter namespaces of Linux that no other process sees, and mount there as mount(8) does."""
    if LIBC.unshare(namespaces):
        raise OSError(ctypes.get_errno(), "unshare")
    for words in ("--make-rprivate /", mounts):
        subprocess.run(["mount", *words.split()], check=True)


def may_enter() -> bool:
    """Say whether this process may make namespaces; tried in a process that ends at once."""
    tool = shutil.which("unshare")
    command = [tool, "--mount", "--uts", "--net", "true"]
    return bool(tool) and subprocess.run(command, capture_output=True).returncode == 0


def be_a_host(network: namespaces.Network, rank: int, address: str = "127.0.1.1") -> None:
    """Make this process a machine of its own; in /etc/hosts its name has the address of Debian."""
    network.enter(rank)
    del os.environ["GLOO_SOCKET_IFNAME"]  # a machine has none
    for command in (
        f"set {namespaces.CARD} down",
        f"set {namespaces.CARD} name eth0",
        "set eth0 up",
    ):
        subprocess.run(["ip", "link", *command.split()], check=True)
    Path(f"hosts-{rank}").write_text(f"127.0.0.1 localhost\n{address} node-{rank}\n")
    enter(NEW_MOUNTS | NEW_NAME, f"--bind hosts-{rank} /etc/hosts")
    socket.sethostname(f"node-{rank}")


# Judging what all ranks say, without knowing which one is broken.

# A rank that says one of these waited for another one, or lost it. It is seldom the cause.
VICTIM = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Socket closed|[Tt]imed out waiting"
    r"|wait timeout after|Received data size doesn't match|waiting for clients"
    r"|failed to recv|recvValue failed",
    re.I,
)
# Raised by other libraries in the same words, of a connection of their own: to storage, say.
ELSEWHERE = re.compile(
    r"(?!(torch\.distributed\.)?(RuntimeError|Dist\w+Error|SystemExit))[\w.]*(Error|Exception|Timeout)\b"
)
# Said before the last error, and closer to the cause.
ROOT = re.compile(r"network addresses of .* cannot be retrieved|Unable to find address|EADDRINUSE")
QUOTED = 110  # characters of an error in a verdict


class Verdict(NamedTuple):
    """What a tool says of a job, and the ranks that it names: none where it cannot tell."""

    text: str
    named: frozenset[int] = frozenset()


def ranks_of(numbers) -> str:
    """Return "rank 1" or "ranks 0, 2"."""
    numbers = sorted(numbers)
    return f"rank{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def alike(values: Mapping[int, object]) -> dict[str, list[int]]:
    """Return the ranks of each value."""
    found: dict[str, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(str(value), []).append(rank)
    return found


def odd_ones_out(values: Mapping[int, object]) -> frozenset[int]:
    """Return the ranks whose value differs from what most ranks have; none without a majority."""
    most = max(alike(values).values(), key=len)
    return frozenset(values) - frozenset(most) if 2 * len(most) > len(values) else frozenset()


def compare(values: Mapping[int, object], what: str) -> Verdict:
    """Say which rank has another value than most; of two that differ none can be named."""
    if not values:
        return Verdict(f"{what}: there is nothing to compare")
    parts = alike(values)
    if len(parts) == 1:
        return Verdict(f"{what} is the same on all ranks: {next(iter(parts))}")
    told = "; ".join(f"{ranks_of(ranks)}: {value}" for value, ranks in parts.items())
    named = odd_ones_out(values)
    advice = f"look at {ranks_of(named)}" if named else "compare them"
    return Verdict(f"{what} differs: {told}: {advice}", named)


def shortened(line: str) -> str:
    """Leave out of a line where PyTorch's source says it, and to which address."""
    line = re.sub(r"^(\[rank\d\]:)?\[[EWI]\d+ [^]]+\] (\[c10d\] )?|what\(\): ", "", line.strip())
    line = re.sub(r"\[(enforce fail at )?/[^]]+\] ", "", line)
    line = re.sub(r"remote=\[([\d.]+)\]:\d+(\$\d)?", r"remote=\1", line)
    line = re.sub(r"\[[\da-f.:]+\]:\d+", "PEER", line)
    line = re.sub(r"\. This is typically caused by .*", "", line)  # from torch 2.14 on
    line = re.sub(r'File ".*/(\w+\.py)", line \d+', r'File "\1"', line)
    return " ".join(re.sub(r"\b\d{5,}\b", "NUMBER", line).split())


def lines_of(rank: ranks.Rank) -> list[str]:
    """Return the lines of a rank's log, shortened, without the empty ones."""
    return [*filter(None, map(shortened, f"{rank.out}\n{rank.err}".splitlines()))]


def last_line(rank: ranks.Rank, pattern: str | re.Pattern = "") -> str:
    """Return the last line that matches, else the last error, else the last line, else ""."""
    lines = lines_of(rank)[::-1]
    for wanted in filter(None, (pattern, r"^[\w.]*(Error|Exception|Exit)\b:?", ".")):
        if found := next((line for line in lines if re.search(wanted, line)), ""):
            return found
    return ""


def ending(rank: ranks.Rank) -> str:
    """Say how a rank ended; it hangs where it still ran when it was ended from outside."""
    return "hangs" if rank.code in (None, -signal.SIGTERM) else rank.ended


def judge_logs(ended: list[ranks.Rank]) -> Verdict:
    """Tell the ended that have an error of their own from those that only lost another rank."""
    own, silent, left, kinds = set(), set(), set(), {}
    for number, rank in enumerate(ended):
        error = last_line(rank, ROOT)
        if rank.code == 0:
            left.add(number)
            kinds[number] = "ended well"
        elif ending(rank) == "hangs":
            silent.add(number)
            kinds[number] = "says nothing, still runs"
        elif VICTIM.search(error) and not ELSEWHERE.match(error):
            kinds[number] = "only lost another rank"
        else:
            own.add(number)
            error = re.sub(r"^[\w.]+(Error|Exception): ", "", error)[:QUOTED]
            killed = f"{ending(rank)}, no error in its log"
            kinds[number] = killed if rank.code < 0 else f"its own error, {error}"
    if "remote=127." in " ".join(kinds.values()):
        return Verdict("a rank was told to connect to 127.*, which each machine is for itself")
    lines = "\n".join(text for rank in ended for text in lines_of(rank))
    for match in re.finditer(r"\d+/(\d+) clients joined", lines):
        if missing := set(range(len(ended), int(match[1]))):
            text = f"{match[1]} ranks are expected, there are {len(ended)} logs"
            return Verdict(f"{text}: {ranks_of(missing)} never started", frozenset(missing))
    for named in (own, silent, left if 2 * len(left) < len(ended) else ()):
        if 0 < len(named) < len(ended):
            told = "; ".join(f"{ranks_of([number])}: {kinds[number]}" for number in sorted(named))
            rest = {kinds[number] for number in kinds.keys() - named}
            return Verdict(f"{told}; the others: {', '.join(sorted(rest))}", frozenset(named))
    return compare(kinds, "the end of the log")


def calls_in_detail(ended: list[ranks.Rank]) -> dict[int, str]:
    """Return what each rank was about to call, as TORCH_DISTRIBUTED_DEBUG=DETAIL writes it.

    A rank names itself first, by its number in the group; its log has its number in the job.
    """
    pattern = r"Rank \d+ is running collective: CollectiveFingerPrint\((.*?)\)(?=[.,])"
    calls = {}
    for number, rank in enumerate(ended):
        if found := re.search(pattern, rank.err):
            words = re.findall(r"OpType=(\w+)|TensorShape=(\[.*?\])|TensorDtypes=(\w+)", found[1])
            calls[number] = " ".join("".join(word) for word in words)
    return calls
