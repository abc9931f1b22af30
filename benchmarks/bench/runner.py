"""Run points in separate processes, and record their results."""

import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

from bench import launch
from bench.points import EARLY_STEPS
from bench.store import FAILED, OK, OUT_OF_MEMORY, REFUSED, TIMEOUT, now
from bench.strategies import REPO

NO_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|can't allocate memory|\bMemoryError\b"
    r"|needs [\d.,]+ GiB for weights"
)
# faulthandler prints where a rank was when it was killed, not why.
STACK = re.compile(r'(Current thread|Thread) 0x|File "|Extension modules: ')


class Interrupted(Exception):
    """Ctrl-C or SIGTERM; its argument is the number of points that have ended."""


def run_points(points, args, store):
    """Run the points that have no record yet; print a line for each as it ends.

    Raises: Interrupted.
    """
    left = []
    for point in points:
        record = store.read(point.identity)
        failed = record is not None and record["status"] in (FAILED, TIMEOUT)
        if record is None or (failed and args.retry_failed):
            left.append(point)
    if len(left) < len(points):
        print(
            f"{len(points) - len(left)} points have ended before, {len(left)} are left"
        )
    launch.preload(args.launcher)
    where = describe_machine()
    started = time.monotonic()
    bar = tqdm(left, "points", disable=not sys.stderr.isatty(), leave=False)
    number = 1
    try:
        for number, point in enumerate(bar, 1):
            record = run_point(point, args, store, where)
            store.write(record)
            seconds_left = (time.monotonic() - started) / number * (len(left) - number)
            tqdm.write(
                f"[{number}/{len(left)}] {point.identity}: {summarize(record)}; "
                f"{seconds_left:.0f} s left",
                file=sys.stdout,
            )
            sys.stdout.flush()
    except KeyboardInterrupt:
        raise Interrupted(len(points) - len(left) + number - 1) from None


def summarize(record):
    """Summarize the end of a point in a few words."""
    if record["status"] != OK:
        return f"{record['status']}: {record['reason']}"
    return f"loss {record['final_loss']:.4f}, step {record['step_time_ms']:.1f} ms"


def run_point(point, args, store, where):
    """Run a point's script; return its record: status and measurements."""
    ranks = point.described["world_size"]
    record = {"id": point.identity, "repeat": point.repeat, "started": now()}
    record |= point.described | {"launcher": args.launcher, "where": where}
    record["command"] = build_command_line(point, args, "DIR")
    if point.reason:
        return record | {"status": REFUSED, "reason": point.reason}
    folder = store.point_folder(point.identity)
    shutil.rmtree(folder, ignore_errors=True)  # left by a sweep that was killed
    output = folder / "run"
    words = [*point.flags, "--output-dir", output.resolve()]
    idle_before = sample_cpu()
    outcome = launch.start(
        args.launcher, point.script, words, ranks, folder / "log", args.timeout
    )
    seconds, others = cpu_of_others(idle_before)
    measured = {}
    status, reason = judge(outcome, point.script.name, args.timeout)
    if status == OK:
        try:
            measured = read_results(output, args.untimed_steps)
        except (OSError, ValueError, KeyError, TypeError) as error:
            status, reason = FAILED, f"its results cannot be read: {error!r}"
    record["where"] = where | measured.pop("where", {})
    record |= {"status": status, "reason": reason, "seconds": round(seconds, 2)}
    if args.launcher in (launch.FORK, launch.TORCHRUN):  # all ranks ran on this machine
        record["cores_of_others"] = others
    return record | measured


def build_command_line(point, args, output):
    """Return the line that a reader would type at the top of the repository."""
    script = point.script
    if script.is_relative_to(REPO):
        script = script.relative_to(REPO)
    words = [*point.flags, "--output-dir", output]
    ranks = point.described["world_size"]
    threads = launch.build_environment(args.launcher, ranks)["OMP_NUM_THREADS"]
    started = launch.build_command(args.launcher, script, words, ranks)
    return f"OMP_NUM_THREADS={threads} {shlex.join(started)}"


def sample_cpu():
    """Start to measure the machine's load."""
    psutil.cpu_percent()  # the next call returns the mean since this one
    return time.monotonic(), measure_cpu_s()


def measure_cpu_s():
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def cpu_of_others(before):
    """Return the seconds since `before`, and the cores that other processes used."""
    started, cpu_s = before
    seconds = time.monotonic() - started
    busy = psutil.cpu_percent() / 100 * psutil.cpu_count()
    return seconds, round(max(0.0, busy - (measure_cpu_s() - cpu_s) / seconds), 2)


def judge(outcome, script, timeout_s):
    """Return a point's status, and the reason in one line unless it is ok."""
    errors = [line.strip() for line in outcome.err.splitlines() if line.strip()]
    errors = [line for line in errors if not STACK.match(line)]
    full = [line for line in errors if NO_MEMORY.search(line)]
    if outcome.code != 0 and full:  # other ranks may have hung because of it
        return OUT_OF_MEMORY, full[-1][:200]
    if outcome.code is None:
        return TIMEOUT, f"did not end within {timeout_s:g} s"
    if outcome.code == 0:
        return OK, None
    failed = [line for line in outcome.out.splitlines() if line.startswith("FAILED: ")]
    named = [line for line in errors if line.startswith(f"{script}: ")]
    lines = failed[-1:] + named[-1:] + errors[-1:]
    reason = lines[0] if lines else f"exit code {outcome.code}"
    for prefix in (f"{script}: ", "error: ", "FAILED: "):
        reason = reason.removeprefix(prefix)
    reason = reason[:200]
    if re.search(r"\btimed? ?out\b", reason, re.IGNORECASE):
        return TIMEOUT, reason
    # torchrun reports its ranks' codes in a table; 2 is wrong usage.
    if outcome.code == 2 or re.search(r"exitcode +: 2 ", outcome.err):
        return REFUSED, reason
    return FAILED, reason


def read_results(folder, untimed_steps):
    """Return a script's measurements, from results.json and metrics.jsonl."""
    results = json.loads((folder / "results.json").read_text())
    metrics = results["metrics"]
    if not math.isfinite(metrics["final_loss"]):
        raise ValueError(f"the final loss is {metrics['final_loss']}")
    times = metrics.get("step_times_ms") or [metrics["step_time_ms"]]
    step_time_ms = statistics.median(times[untimed_steps:] or times)
    losses, norms = [], []
    log = folder / "metrics.jsonl"
    for line in log.read_text().splitlines() if log.exists() else []:
        values = json.loads(line)
        if "loss" in values and len(losses) < EARLY_STEPS:
            losses.append(values["loss"])
            norms.append(values.get("grad_norm"))
    collectives = metrics.get("collectives_per_step") or {}
    machine = results.get("machine", {})
    return {
        "final_loss": metrics["final_loss"],
        "losses": losses,
        "first_norm": norms[0] if norms else None,
        "ranks_started": results["world_size"],
        "step_time_ms": step_time_ms,
        "tokens_per_step": metrics["tokens_per_step"],
        "mfu": metrics.get("mfu"),
        "peak_memory_gib": metrics.get("peak_memory_gib"),
        "gpu_memory_gib": machine.get("gpu_memory_gib"),
        "bytes_sent_per_step": metrics.get("bytes_sent_per_step"),
        "calls_per_step": sum(kind["calls"] for kind in collectives.values()),
        "where": {
            name: value
            for name, value in (
                ("device", results.get("device")),
                ("gpu", machine.get("gpu")),
            )
            if value
        },
    }


def describe_machine():
    """Return the machine, the versions and the commit, without starting CUDA."""
    info = Path("/proc/cpuinfo")
    model = re.search(
        r"^model name\s*: (.+)", info.read_text() if info.exists() else "", re.M
    )
    machine = {
        "cpu": model[1] if model else platform.machine(),
        "cores": psutil.cpu_count(),
        "nodes": os.environ.get("SLURM_JOB_NUM_NODES"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "deepspeed": version_of("deepspeed"),
        "driver": output_of(
            *("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        ).partition("\n")[0],
        "nccl": nccl_version(),
        "commit": output_of(
            *("git", "-C", str(REPO), "describe", "--always", "--exclude=*"),
            "--dirty= with changes",
        ),
    }
    return {name: value for name, value in machine.items() if value}


def version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def nccl_version():
    if not torch.version.cuda or not launch.visible_gpus():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def output_of(*words):
    """Return the output of a program, empty if it is missing or failed."""
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""
