"""What tests of sweeps share: the command in this process, and strategies that take no time."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import load_script

from bench import settings as bench_settings
from bench import strategies as bench_strategies
from legacy_common import cli

TOOL = "benchmarks/distributed_benchmarks.py"
# Each run adds a line to the file `runs` beside the script; rank 0 writes the results.
FAKE = """
import argparse, json, os, sys, time
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--do", default="train")
parser.add_argument("--loss", type=float, default=3.0)
parser.add_argument("--first", type=float, default=5.0)
parser.add_argument("--ms", type=float, default=2.0)
parser.add_argument("--most", type=int, default=999)
parser.add_argument("--micro-batch-size", type=int)
parser.add_argument("--recompute", action="store_true")
parser.add_argument("--output-dir")
args, _ = parser.parse_known_args()
rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
with open(Path(__file__).with_name("runs"), "a") as file:
    file.write(json.dumps([args.output_dir, rank, os.getpid()]) + "\\n")
if args.do == "hang" or (args.do == "hang once" and not Path(__file__).with_name("go").exists()):
    time.sleep(1000)
if (args.micro_batch_size or 0) > args.most * (1 + args.recompute):
    time.sleep(1000 * (rank != "0"))  # in a collective
    sys.exit("fake.py: rank 0: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
if args.do == "fail":
    print("noise of a library", file=sys.stderr)
    sys.exit("fake.py: error: no such luck")
if args.do == "times out":
    sys.exit("fake.py: rank 0: lost contact with another rank (Timed out): it stopped answering")
if args.do == "die":
    os.kill(os.getpid(), 9)
if args.do == "one dies" and rank == "1":
    sys.exit("fake.py: rank 1: broken")
if args.do == "one dies":
    time.sleep(1000)
if args.do == "check":
    print("FAILED: equal weights on all ranks")
    sys.exit(1)
metrics = {"final_loss": args.loss, "step_times_ms": [args.ms] * 20, "step_time_ms": args.ms}
metrics |= {"tokens_per_step": 64, "peak_memory_gib": 0.1}
text = json.dumps({"metrics": metrics, "world_size": int(os.environ.get("WORLD_SIZE", 1))})
if args.do == "half":
    text = text[:20]
if rank == "0" and args.do != "nothing":
    os.makedirs(args.output_dir)
    Path(args.output_dir, "results.json").write_text(text)
    steps = [{"step": step, "loss": args.first - 0.1 * step} for step in range(1, 21)]
    Path(args.output_dir, "metrics.jsonl").write_text("\\n".join(map(json.dumps, steps)))
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the strategies by one for each thing that fake.py does; return their folder."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    (folder / "fake.py").write_text(FAKE)
    what = {
        "single": "",
        "wrong": "--loss 3.5",
        "lossy": "--loss 3.1",
        "early": "--first 5.01",
        "slow": "--ms 4",
        "large": "--most 2",
    }
    for name in (
        "train",
        "hang",
        "hang once",
        "times out",
        "fail",
        "die",
        "one dies",
        "check",
        "half",
        "nothing",
    ):
        what[name.replace(" ", "-")] = f"--do '{name}'"
    rows = [f'[{name}]\ndoes = "{name}"\nscript = "fake.py"\nflags = "{flags}"\n'
            for name, flags in what.items()]  # fmt: skip
    table = "".join(rows).replace('"lossy"\n', '"lossy"\nexact = false\n')
    table = table.replace('"large"\n', '"large"\nrecompute_flags = "--recompute"\n')
    (folder / "strategies.toml").write_text(table)
    monkeypatch.setattr(bench_strategies, "TABLE", folder / "strategies.toml")
    return folder


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run a command of the benchmark in this process; return its exit code, 2 with the error."""
    tool = load_script(TOOL)

    def run(*words: object) -> int | str:
        monkeypatch.setattr(sys, "argv", [TOOL, *map(str, words)])
        try:
            return tool.main()
        except cli.UsageError as error:
            return str(error)

    return run


def asked_for(**changes: object) -> argparse.Namespace:
    """Return what `sweep` is asked for without flags, on forks, but for some changes."""
    parser = bench_settings.Parser()
    bench_settings.add_arguments(parser)
    asked = parser.parse_args(["--launcher", "fork", "--device", "cpu"])
    vars(asked).update(changes)
    return asked


def runs_of(folder: Path) -> list[tuple[str, str, int]]:
    """Return (point, rank, pid) of each rank that started, in order."""
    path = folder / "runs"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(Path(output).name, rank, pid) for output, rank, pid in map(json.loads, lines)]


def gone(pids: list[int]) -> bool:
    """Wait until no process runs; an orphan that ended stays a zombie where nobody waits for it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        with contextlib.suppress(psutil.NoSuchProcess):
            if all(process.status() == psutil.STATUS_ZOMBIE for process in left):
                return True
        time.sleep(0.05)
    return False
