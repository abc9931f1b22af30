"""What triage.py reads of a machine and of a job's notes, and the job of its rehearsal.

What a node knows is plain values, which it writes to a shared folder, and another one reads there.

Sources: NCCL user guide, "RAS", and NCCL source, ras/client.cc; nvidia-smi(1); NVIDIA, "Xid
Errors".
"""

import contextlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from cluster_parts import recorder
from cluster_parts.processes import Process, file_of, look_twice, paths_of
from legacy_common import cli
from legacy_common.lab import namespaces

RAS = "localhost:28028"  # unless NCCL_RAS_ADDR says otherwise
RAS_S, TOOL_S = 15.0, 30.0  # the longest wait for an answer: RAS itself waits 5 s and more
DRAWN = Path(__file__).parents[1] / "drawn/train.py"
TRIAGE = Path(__file__).parents[1] / "triage.py"
# Of a rehearsal: how long until its fault happens, and without a call until all wait; which of five
# seeds unplugs.
RANKS, START_S, SETTLE_S, UNPLUGGED = 4, 60.0, 1.5, 4


@dataclass
class Job:
    """All that was read of a job, of all nodes."""

    processes: list[Process]
    notes: list[recorder.Notes] = field(default_factory=list)  # by rank; none if one is missing
    calls: list[int] = field(default_factory=list)  # noted by all, at the first look, the second
    xids: dict[str, list[str]] = field(default_factory=dict)  # by node
    ras: list[dict] = field(default_factory=list)
    logged: list[int] = field(default_factory=list)  # the step in --job's metrics.jsonl

    @property
    def ranks(self) -> dict[int, Process]:
        found = {one.rank: one for one in self.processes if one.role == "rank"}
        return dict(sorted(found.items()))


# The job: which one, and what is read of it.


def select(processes: list[Process], args) -> list[Process]:
    """Return the processes of one job. Raises: UsageError where there is none, or several."""
    if args.pid:
        pid = next((one.parent for one in processes if one.pid == args.pid and one.role == "rank"),
                   args.pid)  # fmt: skip
        tree = {pid}
        with contextlib.suppress(psutil.Error):
            tree |= {one.pid for one in psutil.Process(pid).children(recursive=True)}
        processes = [one for one in processes if one.pid in tree]
    elif args.job:
        folder = str(Path(args.job).resolve())
        uses = [one for one in processes if f"{folder}/" in "/\n".join([*paths_of(one.pid), ""])]
        processes = [one for one in processes if one.job in [user.job for user in uses]]
    ranks = [one for one in processes if one.role == "rank"]
    if not ranks:
        raise cli.UsageError("no rank of such a job runs here: no process has RANK set for it")
    if len({tuple(one.job) for one in ranks}) > 1:
        pids = ", ".join(str(one.parent) for one in ranks)
        raise cli.UsageError(f"several jobs run here: name one by --pid, of {pids}")
    return processes


# What the machine says: each returns what it read, and why it read nothing.


def read_gpus() -> tuple[list[dict], str]:
    """Return index, PCI address, utilisation in % and power in W of each GPU, by nvidia-smi."""
    fields = ("index", "pci.bus_id", "utilization.gpu", "power.draw")
    if not shutil.which("nvidia-smi"):
        return [], "no nvidia-smi"
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:  # a GPU that is lost makes it hang, too
        told = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S)
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi gives no answer in {TOOL_S:.0f} s: itself a sign of a lost GPU"
    rows = [dict(zip(fields, re.split(r",\s*", line), strict=False))
            for line in told.stdout.splitlines()]  # fmt: skip
    return (rows, "") if not told.returncode else ([], told.stdout.strip() or told.stderr.strip())


def read_xids(since: float = 0.0) -> tuple[list[str], str]:
    """Return the lines of the kernel's log in which the driver reports a fault.

    `since` is in seconds after the start of the node: what is older is no fault of this job.
    """
    try:
        told = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=TOOL_S)
    except (OSError, subprocess.TimeoutExpired):
        return [], "no dmesg"
    if told.returncode:
        return [], "the kernel's log is closed to this user: sudo dmesg"
    found = [line.strip() for line in told.stdout.splitlines() if re.search("NVRM: Xid|SXid", line)]
    at = [re.match(r"\[ *(\d+\.\d+)\]", line) for line in found]
    return [line for line, seen in zip(found, at, strict=True)
            if not seen or float(seen[1]) >= since], ""  # fmt: skip


def start_of(pids: list[int]) -> float:
    """Return when the first of these processes began, in seconds after the start of the node."""
    began = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            began.append(psutil.Process(pid).create_time() - psutil.boot_time())
    return min(began, default=0.0)


def ask_ras(where: str = "") -> tuple[dict, str]:
    """Return the answer of NCCL's RAS as JSON: 2.30.7 has it, the first ones had text alone."""
    host, _, port = (where or RAS).rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 1.0) as peer:
            peer.settimeout(RAS_S)
            stream = peer.makefile("rw", encoding="utf-8")
            for words in ("set format json", "verbose status"):
                stream.write(f"{words}\n")
                stream.flush()
                answer = stream.readline() if "set" in words else stream.read()
                if "set" in words and answer != "OK\n":
                    return {}, f"RAS at {host}:{port} knows no JSON: {answer.strip()}"
            return json.loads(answer), ""
    except (OSError, ValueError) as error:
        return {}, f"no RAS of NCCL at {host}:{port} ({error})"


def read_node(processes: list[Process], args) -> dict:
    """Return all that this node knows of a job, as values for JSON."""
    ranks = [one.pid for one in processes if one.role == "rank"]
    environs = "\0".join(file_of(pid, "environ") for pid in ranks)
    folder = args.job or named_in(processes, "--output-dir")
    notes = args.notes or notes_folder(processes, environs) or folder
    before = calls_in(notes), step_in(folder)
    look_twice(processes, args.seconds)
    after = calls_in(notes), step_in(folder)
    ras = re.search(r"\0NCCL_RAS_ADDR=([^\0]+)", environs)
    tools = {
        "gpus": read_gpus(),
        "xids": read_xids(start_of(ranks)),
        "ras": ask_ras(ras[1] if ras else ""),
    }
    return {
        "node": socket.gethostname(), "seconds": args.seconds, "notes": notes,
        "calls": [before[0], after[0]], "logged": [before[1], after[1]],
        "skipped": {name: why for name, (_, why) in tools.items() if why},
        "processes": [asdict(one) for one in processes],
    } | {name: told for name, (told, _) in tools.items()}  # fmt: skip


def notes_folder(processes: list[Process], environs: str) -> str | None:
    """Return where a job's flight recorder writes, by its command line or its environment."""
    if folder := named_in(processes, "--record"):
        return folder
    dumps = re.search(r"\0TORCH_(?:FR_DUMP_TEMP|NCCL_DEBUG_INFO_TEMP)_FILE=([^\0]+)", environs)
    return str(Path(dumps[1]).parent) if dumps else None


def named_in(processes: list[Process], flag: str) -> str | None:
    """Return the folder that a job's command line gives for a flag."""
    for one in processes:
        words = [word for given in one.command for word in given.split("=", 1)]
        if flag in words[:-1]:
            return str(Path(paths_of(one.pid)[0]) / words[words.index(flag) + 1])
    return None


def calls_in(notes: str | None) -> int:
    """Return how many calls and messages the ranks have noted, all together."""
    found = recorder.notes_in(Path(notes)).values() if notes else ()
    return sum(len(own.order) + own.first + sum(own.sends.values()) for own in found)


def step_in(folder: str | None) -> int | None:
    """Return the last step in the metrics.jsonl of a job's folder."""
    with contextlib.suppress(OSError, IndexError, ValueError, KeyError):
        return json.loads((Path(folder or "") / "metrics.jsonl").read_text().splitlines()[-1])[
            "step"
        ]
    return None


def save(folder: Path, facts: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{facts['node']}.partial"
    partial.write_text(json.dumps(facts))
    partial.rename(partial.with_suffix(".json"))  # whole or not at all


def load(folder: Path) -> list[dict]:
    """Return the facts of all nodes. Raises: UsageError where there are none."""
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    if not found:
        raise cli.UsageError(f"--load: no node has written to {folder}: run with --save there")
    return found


def job_of(nodes: list[dict]) -> Job:
    """Put together what all nodes know."""
    job = Job([Process(**one) for node in nodes for one in node["processes"]])
    folder, size = nodes[0]["notes"], max(one.world_size or 0 for one in job.processes)
    found = recorder.notes_in(Path(folder)) if folder else {}
    if size and {*range(size)} <= found.keys():
        job.notes = [found[rank] for rank in range(size)]
        job.calls = nodes[0]["calls"]
    job.logged = [step for step in nodes[0]["logged"] if step is not None]
    job.xids = {node["node"]: node["xids"] for node in nodes}
    job.ras = [node["ras"] for node in nodes if node["ras"]]
    return job


# A job to practise on.


@contextlib.contextmanager
def rehearsal(seed: int, folder: Path) -> Iterator[dict]:
    """Run drawn/train.py until its fault has spread; yield the fault. End it afterwards.

    Each rank is a node of its own where this machine allows it. Raises: UsageError.
    """
    why_not = namespaces.why_not()
    if why_not and seed % 5 == UNPLUGGED:
        raise cli.UsageError(f"--rehearse {seed} unplugs a node: {why_not}")
    network = contextlib.nullcontext() if why_not else namespaces.hosts([1e9] * RANKS)
    ranks: list[subprocess.Popen] = []
    with network as nodes, open(folder / "log", "w") as log:
        try:
            port = free_port()
            ranks += [start(rank, seed, folder, nodes, port, log) for rank in range(RANKS)]
            yield wait_for_fault(folder, ranks)
        finally:
            for one in ranks:
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself
                    for child in psutil.Process(one.pid).children(recursive=True):
                        child.kill()
                one.kill()
                one.wait()


def free_port() -> int:
    """Return a port that nobody listens on, and the next one neither."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)  # below those that Linux hands out
        with contextlib.suppress(OSError):
            for number in (port, port + 1):
                socket.create_server(("", number)).close()
            return port


def start(rank: int, seed: int, folder: Path, nodes, port: int, log) -> subprocess.Popen:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if nodes:
        place["MASTER_ADDR"], place["GLOO_SOCKET_IFNAME"] = namespaces.address(0), namespaces.CARD
    local = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    if not nodes:
        local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS}
    environ = {"RANK": rank, "WORLD_SIZE": RANKS, "OMP_NUM_THREADS": 1, **place, **local}
    return subprocess.Popen(
        [sys.executable, str(TRIAGE), "--record", "notes", str(DRAWN), str(seed)], cwd=folder,
        env=os.environ | {name: str(value) for name, value in environ.items()},
        stdout=log, stderr=log, preexec_fn=(lambda: nodes.enter(rank)) if nodes else None,
    )  # fmt: skip


def wait_until_all_wait(notes: Path) -> None:
    """Return once no rank has made a call for a while: on a busy machine a fault spreads late."""
    before, made = -1, calls_in(str(notes))
    while made != before:
        time.sleep(SETTLE_S)
        before, made = made, calls_in(str(notes))


def wait_for_fault(folder: Path, ranks: list[subprocess.Popen]) -> dict:
    deadline = time.monotonic() + START_S
    while not (folder / "fault.json").exists():
        if time.monotonic() > deadline or any(one.poll() is not None for one in ranks):
            said = (folder / "log").read_text().splitlines()
            raise cli.UsageError(f"the rehearsal's job did not start: {' '.join(said[-1:])}")
        time.sleep(0.1)
    wait_until_all_wait(folder / "notes")
    return json.loads((folder / "fault.json").read_text())
