"""Train one job in each framework: is the result right, and what does it cost?

    CPU   python benchmarks/compare_frameworks.py
    GPU   the same

It runs each port of frameworks/ in the environment that `make frameworks` makes, and
alternates between the ports for --repeats rounds. Look for: equal losses, the ratio of
CPU time per step to plain PyTorch, and whether it differs from 1 beyond the noise.

    --frameworks fabric_ddp my_port.py   only this framework, and your own file
"""

import ast
import difflib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tabulate import tabulate

from bench import guard
from bench.analysis import compute_interval
from bench.strategies import REPO
from dist_common import cli
from dist_common.cli import UsageError
from dist_common.model import PRESETS

FOLDER = REPO / "benchmarks" / "frameworks"
ENVIRONMENT = Path(".venv-frameworks", "bin", "python")
# Port -> the package whose version its row shows.
PORTS = {
    "bare_ddp": "torch",
    "fabric_ddp": "lightning",
    "lightning_ddp": "lightning",
    "accelerate_ddp": "accelerate",
    "deepspeed_engine": "deepspeed",
    "ray_train": "ray",
    "litgpt_fabric": "litgpt",
    "thunder_ddp": "lightning-thunder",
    "bare_fsdp2": "torch",
    "lightning_fsdp2": "lightning",
}
NOT_RUN = {
    "horovod": "does not build: its CMake files ask for C++14, PyTorch needs C++17",
    "megatron": "needs a GPU: frameworks.md has the exact command",
}
# Sums in another order round differently, and training amplifies the difference.
FIRST_STEPS, FIRST_TOLERANCE, LATER_TOLERANCE = 10, 1e-5, 1e-3
HEADERS = (
    *("framework", "version", "ranks", "difference", "CPU time", "cost"),
    *("start, end", "lines", "verdict"),
)
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--frameworks", nargs="+", metavar="NAME", help=f"{', '.join(PORTS)} (all)")
    add("--repeats", type=cli.positive_int, default=3, help="rounds (3)")
    add("--world-size", type=cli.positive_int, default=2, help="ranks (2)")
    add("--preset", choices=PRESETS, default="tiny", help="the model's shape (tiny)")
    add("--seq-len", type=cli.positive_int, default=64, help="tokens (64)")
    add("--micro-batch-size", type=cli.positive_int, default=8, help="per rank (8)")
    add(
        "--max-steps",
        type=cli.positive_int,
        default=40,
        help="steps, 10 not timed (40)",
    )
    add("--limit", type=cli.positive_float, default=300, help="seconds of a run (300)")
    add("--python", type=Path, help=f"interpreter ({ENVIRONMENT})")
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.python is None:
        places = [folder / ENVIRONMENT for folder in (Path(sys.prefix).parent, REPO)]
        existing = [path for path in places if path.exists()]
        args.python = existing[0] if existing else Path(sys.executable)
    return args


def read_versions(python):
    """Return the packages of an environment with their versions. Raises: UsageError."""
    code = (
        "import importlib.metadata as m, json\n"
        "print(json.dumps({d.metadata['Name'].lower(): d.version "
        "for d in m.distributions()}))"
    )
    try:
        answer = subprocess.check_output(
            [python, "-c", code], stderr=subprocess.PIPE, text=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"--python {python} does not run: {error}") from error
    versions = json.loads(answer)
    if "torch" not in versions:
        raise UsageError(f"--python {python} has no PyTorch: run make frameworks")
    return versions


def choose_ports(args, versions):
    """Return name -> script: the chosen ports, and the plain loops to compare with.

    Raises: UsageError for an unknown name, or one that is not installed.
    """
    scripts = {name: FOLDER / f"{name}.py" for name in PORTS}
    chosen = {"bare_ddp": scripts["bare_ddp"]}
    for name in args.frameworks or PORTS:
        path = scripts.get(name, Path(name).absolute())
        if name not in PORTS and not path.is_file():
            near = difflib.get_close_matches(name, PORTS, 1)
            hint = f"did you mean {near[0]}?" if near else f"use {', '.join(PORTS)}"
            raise UsageError(f"--frameworks: there is no port or file {name}: {hint}")
        package = PORTS.get(name, "torch")
        if package not in versions:
            if args.frameworks:
                raise UsageError(
                    f"--frameworks {name}: {args.python} has no {package}; "
                    "frameworks.md says what installs it"
                )
            continue
        if base_of(path.stem) == "bare_fsdp2":
            chosen["bare_fsdp2"] = scripts["bare_fsdp2"]
        chosen[path.stem] = path
    return chosen


def base_of(name):
    """Return the plain loop whose CPU time a port is compared with."""
    return "bare_fsdp2" if "fsdp2" in name else "bare_ddp"


def run_port(script, args, folder):
    """Train once in separate processes; return (results or None, error or None)."""
    words = [args.python]
    if not re.search(r"^ +CPU +python ", script.read_text(), re.M):
        words += ["-m", "torch.distributed.run", "--standalone"]
        words += [f"--nproc-per-node={args.world_size}"]
    words += [script, "--output-dir", folder]
    for name in (
        *("preset", "seq_len", "micro_batch_size", "max_steps"),
        *("seed", "device", "world_size"),
    ):
        words += [f"--{name.replace('_', '-')}", getattr(args, name)]
    paths = [str(REPO), str(FOLDER), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, **QUIET, "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        code = guard.run(
            [*map(str, words)], args.limit, env=variables, stdout=log, stderr=log
        )
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    results, path = None, folder / "results.json"
    if path.exists():
        results = json.loads(path.read_text())
        seconds = time.monotonic() - started
        results["outside_s"] = seconds - results["seconds_of_steps"]
    if code == 0 and results:
        return results, None
    end = f"exit code {code}" if code is not None else f"no end after {args.limit:g} s"
    return results, f"FAILED: {end}: {(lines or ['no output'])[-1]}"[:150]


def judge(results, error, expected, args):
    """Return the verdict of a run: its ranks, steps and losses, then its exit code."""
    if results is None:
        return error
    if results["world_size"] != args.world_size:
        return f"WRONG: {results['world_size']} ranks, not {args.world_size}"
    if len(results["losses"]) != args.max_steps:
        return f"WRONG: {len(results['losses'])} steps, not {args.max_steps}"
    errors = loss_differences(results, expected)
    early = all(value <= FIRST_TOLERANCE for value in errors[:FIRST_STEPS])
    if not (errors and early and all(value <= LATER_TOLERANCE for value in errors)):
        return "WRONG: other losses"
    return error or "right"


def loss_differences(results, expected):
    """Return the absolute differences of the losses of two runs, by step."""
    theirs = expected["losses"] if expected else []
    pairs = zip(results["losses"], theirs, strict=False)
    return [abs(loss - expected_loss) for loss, expected_loss in pairs]


def count_code_lines(source):
    """Count the lines with code: no comments, docstrings, imports or blank lines."""
    left_out = set()
    for node in ast.walk(ast.parse(source)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if text or isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(
        number not in left_out
        and not line.strip().startswith("#")
        and bool(line.strip())
        for number, line in lines
    )


def make_row(name, script, runs, versions, args):
    """Return a port's row: its worst verdict, and its cost over all rounds."""
    expected = next((results for results, _ in runs["bare_ddp"] if results), None)
    verdicts = [judge(results, error, expected, args) for results, error in runs[name]]
    verdict = next((one for one in verdicts if one != "right"), "right")
    done = [results for results, _ in runs[name] if results]
    row = [name, versions[PORTS.get(name, "torch")].partition("+")[0]]
    lines = count_code_lines(script.read_text())
    if not done:
        return [*row, *["-"] * 5, lines, verdict]
    largest = max(max(loss_differences(one, expected), default=0.0) for one in done)
    pairs = zip(runs[name], runs[base_of(name)], strict=True)
    ratios = [
        results["cpu_ms_per_step"] / base["cpu_ms_per_step"]
        for (results, _), (base, _) in pairs
        if results and base
    ]
    ratio = compute_interval(ratios or [1.0])
    cost = "same"
    if len(ratios) < 2:
        cost = "?"
    elif ratio.differs:
        cost = "more" if ratio.log > 0 else "less"
    outside = sorted(one["outside_s"] for one in done)[len(done) // 2]
    ranks = min(one["world_size"] for one in done)
    row += [ranks, f"{largest:.1e}", str(ratio), cost, f"{outside:.1f} s"]
    return [*row, lines, verdict]


def main():
    args = parse_args()
    versions = read_versions(args.python)
    chosen = choose_ports(args, versions)
    tokens = args.world_size * args.micro_batch_size * args.seq_len
    print(
        f"{args.preset}: {args.max_steps} steps of {tokens:,} tokens on "
        f"{args.world_size} ranks, {args.repeats} rounds, torch {versions['torch']}"
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the port, too
    runs = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory(prefix="frameworks-") as scratch:
        for repeat in range(args.repeats):
            ports = list(chosen.items())
            if repeat % 2:  # noise that grows or falls affects all ports equally
                ports.reverse()
            for name, script in ports:
                run = run_port(script, args, Path(scratch, f"{name}-{repeat}"))
                runs[name].append(run)
                print(f"round {repeat + 1}: {name}: {run[1] or 'ended'}", flush=True)
    rows = [
        make_row(name, script, runs, versions, args) for name, script in chosen.items()
    ]
    if not args.frameworks:
        missing = PORTS.keys() - runs.keys()
        reasons = dict.fromkeys(sorted(missing), "not installed") | NOT_RUN
        rows += [[name, *["-"] * 7, reason] for name, reason in reasons.items()]
    print(tabulate(rows, HEADERS, disable_numparse=True))
    if args.output_dir:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        content = {"headers": HEADERS, "rows": rows, "runs": runs, "versions": versions}
        path = args.output_dir / "results.json"
        path.write_text(json.dumps(content, indent=2) + "\n")
    wrong = [row[0] for row in rows if row[0] in runs and row[-1] != "right"]
    if wrong:
        print(f"FAILED: {', '.join(wrong)}")
        return cli.FAILED
    print("OK: every framework that ran trained the same job")
    return 0


if __name__ == "__main__":
    cli.run(main)
