"""A script that does what its flags say, as a strategy of sweeps that take no time."""

import json
import signal
import sys
from pathlib import Path

import pytest
from conftest import load_script

from dist_common.cli import UsageError

TOOL = "benchmarks/distributed_benchmarks.py"
FAKE = """
import argparse, json, os, sys, time
from pathlib import Path
parser = argparse.ArgumentParser()
for name, default in (("loss", 3.0), ("first", 5.0), ("norm", 1.0), ("ms", 2.0)):
    parser.add_argument(f"--{name}", type=float, default=default)
parser.add_argument("--do", default="train")
parser.add_argument("--output-dir")
args, _ = parser.parse_known_args()
rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
here = Path(__file__).parent
with open(here / "runs", "a") as file:
    file.write(json.dumps([Path(args.output_dir).parent.name, os.getpid()]) + "\\n")
if args.do == "hang" and not (here / "go").exists():
    time.sleep(1000)
if args.do == "memory":
    time.sleep(1000 if rank == "1" else 0)  # in a collective
    sys.exit("fake.py: rank 0: OutOfMemoryError: CUDA out of memory")
if args.do == "fail":
    print("noise of a library", file=sys.stderr)
    sys.exit("fake.py: error: no such luck")
if args.do == "refuse":
    print("fake.py: error: --tp must divide 4 heads", file=sys.stderr)
    os._exit(2)
if args.do == "check":
    print("FAILED: equal weights on all ranks")
    sys.exit(1)
if rank == "0":
    metrics = {"final_loss": args.loss, "step_times_ms": [args.ms] * 20}
    metrics |= {"tokens_per_step": 64, "peak_memory_gib": 0.1}
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    text = json.dumps({"metrics": metrics, "world_size": ranks, "device": "cpu"})
    os.makedirs(args.output_dir)
    whole = 20 if args.do == "half" else len(text)
    Path(args.output_dir, "results.json").write_text(text[:whole])
    steps = [
        {"step": step, "loss": args.first - 0.1 * step, "grad_norm": args.norm}
        for step in range(1, 21)
    ]
    Path(args.output_dir, "metrics.jsonl").write_text(
        "\\n".join(map(json.dumps, steps))
    )
"""
FLAGS = {
    "train": "",
    "slow": "--ms 4",
    "lossy": "--loss 3.1",
    "hang": "--do hang",
    "memory": "--do memory",
    "fail": "--do fail",
    "refuse": "--do refuse",
    "check": "--do check",
    "half": "--do half",
}


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Replace all strategies by FLAGS; return their folder."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    (folder / "fake.py").write_text(FAKE)
    rows = ['[single]\ndoes = "one process"\nscript = "fake.py"\n']
    for name, flags in FLAGS.items():
        rows.append(f'[{name}]\ndoes = "{name}"\nscript = "fake.py"\nflags = "{flags}"')
        rows.append(f"exact = {str(name != 'lossy').lower()}\nleast_ranks = 2\n")
    (folder / "strategies.toml").write_text("\n".join(rows))
    tool = load_script(TOOL)
    monkeypatch.setattr(tool.strategies, "TABLE", folder / "strategies.toml")
    return folder


@pytest.fixture
def bench(monkeypatch):
    """Run a command of the tool in this process; return its exit code, or the error."""
    tool = load_script(TOOL)

    def run(*words):
        monkeypatch.setattr(sys, "argv", [TOOL, *map(str, words)])
        try:
            return tool.main()
        except UsageError as error:
            return str(error)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a sweep has its own handler

    return run


def runs_of(folder):
    """Return (point, pid) of each rank that has started, in order."""
    path = folder / "runs"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(json.loads(line)) for line in lines]


def make_record(strategy, repeat=1, **changes):
    """Return the record of a point that ran well, but for some changes."""
    ranks = 1 if strategy == "single" else 2
    record = {
        "id": f"{strategy}.w{ranks}#{repeat}",
        "strategy": strategy,
        "kind": "train",
        "exact": True,
        "repeat": repeat,
        "status": "ok",
        "reason": None,
        "world_size": ranks,
        "ranks_started": ranks,
        "preset": "tiny",
        "precision": "32-true",
        "global_batch_size": 16,
        "max_steps": 20,
        "losses": [5.0, 4.9, 4.8, 4.7, 4.6],
        "first_norm": 1.0,
        "final_loss": 3.0,
        "step_time_ms": 100.0,
        "tokens_per_step": 1024,
        "peak_memory_gib": 1.0,
        "bytes_sent_per_step": 2**20,
        "cores_of_others": 0.0,
        "command": f"python {strategy}.py",
        "where": {"cpu": "a CPU", "cores": 2, "torch": "2.14.1"},
    }
    return record | changes


def make_sweep(path: Path, records, **settings):
    """Write a sweep as one file, which `report` and `compare` read."""
    settings = {"points": len(records), "seq_len": 64, "seed": 0} | settings
    content = {"settings": settings, "started": "2026-11-29T01:00:00+00:00"}
    content |= {"command": "python sweep", "records": records}
    path.write_text(json.dumps(content))
    return path
