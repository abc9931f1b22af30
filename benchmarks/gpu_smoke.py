"""Run the GPU line of every lesson on this machine, and write down how each ended.

    CPU   python benchmarks/gpu_smoke.py --device cpu --only minimal
    GPU   python benchmarks/gpu_smoke.py

The docstring of a lesson says how to start it on GPUs. These lines run as they are,
with fewer steps where the whole job would take long. Look for: FAILED, and the lesson's
last words; then the file in recorded/, which names machine and versions.
"""

import argparse
import ast
import glob
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import guard, launch
from bench.runner import describe_machine
from bench.store import now
from dist_common import cli
from dist_common.cli import UsageError

REPO = Path(__file__).resolve().parents[1]
OK, FAILED, REFUSED, LATE = "OK", "FAILED", "refused", "too late"
LEFT_OUT = "left out"
# Flags that shorten a job or make it fit on one GPU. argparse uses the last value of a
# flag, so they override the line's flags. On a CPU the presets stay as they are.
ADDED = {
    "01-ddp-basics/ddp_training.py": "--max-steps 10",
    "02-fsdp/fsdp_finetune.py": "--max-steps 10",
    "02-fsdp/fsdp_transformer.py": "--preset 124m --seq-len 1024 --max-steps 10",
    "03-deepspeed/deepspeed_train.py": "--preset 124m --seq-len 1024 --max-steps 10",
    "04-nccl-operations/bandwidth_test.py": "-e 256M",
    "05-advanced/hybrid_parallelism.py": "--max-steps 3",
}
# Lesson -> the command that makes the folder that its line reads.
BEFORE = {
    "02-fsdp/fsdp_finetune.py": "python 02-fsdp/make_tiny_llama.py runs/tiny-llama",
    "02-fsdp/hf_minimal.py": "python 02-fsdp/make_tiny_llama.py runs/tiny-llama",
}
# Placeholders for the reader's own files.
IN_PLACE_OF = {
    "--init-from DIR": "--init-from runs/tiny-llama",
    "--data chats.jsonl": "--data runs/tiny-llama/chats.jsonl",
    "DIR chats.jsonl": "runs/tiny-llama runs/tiny-llama/chats.jsonl",
}


def read_commands(device):
    """Return lesson -> the command in its docstring for "GPU" or "CPU"."""
    lines = {}
    for path in sorted(REPO.glob("0*/*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        match = re.search(rf"^ *{device}   ((?:.*\\\n)*.*)", text, re.M)
        line = match[1].replace("\\\n", "") if match else ""
        line = re.sub(r"  +\(.*", "", line)  # a remark in brackets
        lines[str(path.relative_to(REPO))] = re.sub(r"  +", " ", line)
    return lines


def reason_to_leave_out(line, gpus):
    """Say why a line cannot run here; None if it can. On a CPU, gpus is None."""
    if not line.startswith(("torchrun ", "deepspeed ", "python ")):
        return "started by srun" if line.startswith("srun") else "it has no such line"
    needed = re.search(r"--nproc-per-node=(\d+)", line)
    if gpus is not None and needed and int(needed[1]) > gpus:
        return f"needs {needed[1]} GPUs"
    if "/failures/" in line:
        return "fails on purpose"
    return "reads a file of yours" if "my_config.json" in line else None


def build_commands(lesson, line, folder, gpus, ranks=None):
    """Return the commands to run, in order; `folder` replaces runs/."""
    if gpus:
        count = f"--num_gpus={min(gpus, 8)}"
        line = re.sub(r"--num_gpus=\d+", count, line)
    for theirs, ours in IN_PLACE_OF.items():
        line = line.replace(theirs, ours)
    if "Report(" in (REPO / lesson).read_text() and "--output-dir" not in line:
        line += " --output-dir runs/results"
    added = ADDED.get(lesson, "")
    if gpus is not None or "--preset" not in added:
        line = f"{line} {added}".strip()
    line = line.replace("node=gpu", f"node={ranks or 'gpu'}")
    commands = [BEFORE[lesson], line] if lesson in BEFORE else [line]
    return [command.replace("runs/", f"{folder}/") for command in commands]


def run(command, deadline_s, environ):
    """Run a line; return its result, its exit code, and its last output line."""
    words = []
    for word in shlex.split(command):  # a shell would expand a *
        words += sorted(glob.glob(word, root_dir=REPO)) if "*" in word else [word]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        options = {"cwd": REPO, "env": environ, "stdout": out, "stderr": err}
        code = guard.run(words, deadline_s, **options)
        out.seek(0)
        err.seek(0)
        printed = [line.strip() for line in out if line.strip()]
        errors = [line.strip() for line in err if line.strip()]
    if not code:
        return LATE if code is None else OK, code, (printed or [""])[-1]
    # A launcher's own exit code is 1, whatever its ranks' codes are.
    for line in errors:
        if re.match(r"\w+\.py: error: ", line):
            return REFUSED, code, line
    last = [line for line in printed if line.startswith("FAILED: ")]
    last += [line for line in errors if re.search(r"\w(Error|Exception)\b: ", line)]
    return FAILED, code, [*last, *errors[-1:], f"exit code {code}"][0]


def visit(lesson, line, folder, gpus, args, environ):
    """Run a lesson's line; return its record."""
    folder.mkdir()
    started = time.monotonic()
    for command in build_commands(lesson, line, folder, gpus, args.ranks):
        result, code, last = run(command, args.deadline, environ)
        if result != OK:
            break
    record = {
        "lesson": lesson,
        "command": command.replace(f"{folder}/", "runs/"),
        "result": result,
        "code": code,
        "said": last.replace(str(folder), "runs"),
        "seconds": round(time.monotonic() - started, 1),
    }
    for path in folder.rglob("results.json"):
        results = json.loads(path.read_text())
        record["metrics"] = results["metrics"]
        record["failed_checks"] = [one for one in results["checks"] if not one["ok"]]
    return record


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="whose lines (cuda)")
    add("--only", default="", metavar="TEXT", help="lessons with this in their path")
    add(
        "--ranks",
        type=cli.positive_int,
        metavar="N",
        help="for each node; more than GPUs share them, slowly (one per GPU)",
    )
    add("--jobs", type=cli.positive_int, default=1, help="lessons at once (1)")
    add(
        "--minutes",
        type=cli.positive_float,
        default=10,
        help="start no line after these (10)",
    )
    add("--deadline", type=cli.positive_float, default=120, help="s of a line (120)")
    default = REPO / "benchmarks/recorded/gpu_smoke.json"
    add("--output", type=Path, default=default, help="(benchmarks/recorded)")
    return parser.parse_args()


def main():
    args = parse_args()
    launch.resolve(launch.TORCHRUN, args.device)
    gpus = launch.visible_gpus() if args.device == "cuda" else None
    machine = describe_machine()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    chosen = read_commands("GPU" if args.device == "cuda" else "CPU")
    lines = [item for item in chosen.items() if args.only in item[0]]
    if not lines:
        raise UsageError(f"--only {args.only}: no lesson's path contains it")
    environ = launch.build_environment(launch.TORCHRUN, gpus or 2)
    # torchrun and deepspeed of this environment.
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    if args.ranks and gpus and args.ranks > gpus:
        environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    started = time.monotonic()

    def visit_unless_left_out(number, lesson, line):
        reason = reason_to_leave_out(line, gpus and max(gpus, args.ranks or 0))
        if not reason and time.monotonic() - started > 60 * args.minutes:
            reason = f"not started: {args.minutes:g} minutes were over"
        record = {"lesson": lesson, "result": LEFT_OUT, "said": reason, "seconds": 0}
        if not reason:
            record = visit(lesson, line, Path(folder, str(number)), gpus, args, environ)
        last = record["said"].removeprefix("OK: ")
        print(
            f"[{number}/{len(lines)}] {record['result']}: {lesson}: {last}", flush=True
        )
        return record

    with (
        tempfile.TemporaryDirectory(prefix="gpu-smoke-") as folder,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        waiting = [
            pool.submit(visit_unless_left_out, n, *item)
            for n, item in enumerate(lines, 1)
        ]
        records = [job.result() for job in waiting]
    return conclude(records, machine, args.output)


def conclude(records, machine, path):
    """Write the file and print the counts; return 1 if a line failed or was late."""
    content = {"machine": machine, "date": now(), "lessons": records}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")
    for record in records:
        if record["result"] in (FAILED, LATE):
            print(f"\n{record['result']}: {record['command']}\n  {record['said']}")
    counts = Counter(record["result"] for record in records)
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    print(f"written: {path}")
    return cli.FAILED if counts[FAILED] + counts[LATE] else 0


if __name__ == "__main__":
    cli.run(main)
