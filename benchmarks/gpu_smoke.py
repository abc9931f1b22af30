"""Run the GPU line of every lesson on this machine, and write down what came of each.

    CPU   python benchmarks/gpu_smoke.py --device cpu --only minimal
    GPU   python benchmarks/gpu_smoke.py

The first comment of a lesson says how to start it on GPUs. Those lines are run as they stand, with
fewer steps where a whole job would take long. Look for: FAILED, and what that lesson said; then the
file in recorded/, which names machine and versions.
"""

import ast
import glob
import json
import os
import re
import shlex
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import torch
from tabulate import tabulate

from bench import guard, launch, settings
from bench.machine import describe_machine
from legacy_common import cli

REPO = Path(__file__).resolve().parents[1]
OK, FAILED, REFUSED, LATE, LEFT_OUT = "OK", "FAILED", "refused", "too late", "left out"
# Added to lines whose job is longer than this tour, or larger than one GPU: the last one of two
# equal flags counts. On a CPU nothing is made as large as the presets here.
ADDED = {
    "01-ddp-basics/ddp_training.py": "--max-steps 10",
    "02-fsdp/fsdp_finetune.py": "--max-steps 10",
    "02-fsdp/fsdp_transformer.py": "--preset 124m --seq-len 1024 --max-steps 10",
    "03-deepspeed/deepspeed_train.py": "--preset 124m --seq-len 1024 --max-steps 10",
    "04-nccl-operations/bandwidth_test.py": "-e 256M",
    "05-advanced/hybrid_parallelism.py": "--max-steps 3",
}
# What makes the folder that a line reads.
BEFORE = {
    "02-fsdp/fsdp_finetune.py": "python 02-fsdp/make_tiny_llama.py runs/tiny-llama",
    "02-fsdp/hf_minimal.py": "python 02-fsdp/make_tiny_llama.py runs/tiny-llama",
}
# What stands for something of the reader's.
IN_PLACE_OF = {
    "--init-from DIR": "--init-from runs/tiny-llama",
    "--data chats.jsonl": "--data runs/tiny-llama/chats.jsonl",
    "DIR chats.jsonl": "runs/tiny-llama runs/tiny-llama/chats.jsonl",
}


def lines_of(kind):
    """Return {lesson: the line by which its first comment says to start it}; kind: "GPU", "CPU"."""
    lines = {}
    for path in sorted(REPO.glob("0*/*.py")):
        comment = ast.get_docstring(ast.parse(path.read_text())) or ""
        found = re.search(rf"^ *{kind}   ((?:.*\\\n)*.*)", comment, re.M)
        line = found[1].replace("\\\n", "") if found else ""
        line = re.sub(r"  +\(.*", "", line)  # a remark in brackets
        lines[str(path.relative_to(REPO))] = re.sub(r"  +", " ", line)
    return lines


def why_not(line, gpus):
    """Say why a line is left out; None if it can be run here. On a CPU, gpus is None."""
    if not line.startswith(("torchrun ", "deepspeed ", "python ")):
        return "it has no line of its own" if not line.startswith("srun") else "started by srun"
    needed = re.search(r"--(?:nproc-per-node|num_gpus)=(\d+)", line)
    if gpus is not None and needed and int(needed[1]) > gpus and "deepspeed " not in line:
        return f"needs {needed[1]} GPUs"
    if "/failures/" in line:
        return "fails on purpose"
    if "my_config.json" in line:
        return "reads a file of yours"
    return None


def commands_of(lesson, line, folder, gpus, ranks=None):
    """Return what to run, one after the other, with `folder` in the place of runs/."""
    if gpus:
        line = re.sub(r"--num_gpus=\d+", lambda found: f"--num_gpus={min(gpus, 8)}", line)
    for theirs, ours in IN_PLACE_OF.items():
        line = line.replace(theirs, ours)
    if "Report(" in (REPO / lesson).read_text() and "--output-dir" not in line:
        line += " --output-dir runs/results"
    added = ADDED.get(lesson, "")
    if gpus is None and "--preset" in added:
        added = ""
    line = f"{line} {added}".strip()
    before = BEFORE.get(lesson, "")
    commands = [text.replace("runs/", f"{folder}/") for text in (before, line) if text]
    return [text.replace("node=gpu", f"node={ranks or 'gpu'}") for text in commands]


def expanded(word):
    """Return the files that a word with a * stands for, as a shell would; else the word."""
    return sorted(glob.glob(word, root_dir=REPO)) if "*" in word else [word]


def run(command, deadline_s, environ):
    """Run a line; return what came of it, its exit code (None at the deadline), and its words."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        how = {"cwd": REPO, "env": environ, "stdout": out, "stderr": err}
        words = [found for word in shlex.split(command) for found in expanded(word)]
        code = guard.run(words, deadline_s, **how)
        out.seek(0)
        err.seek(0)
        said = [line.strip() for line in out if line.strip()]
        wrong = [line.strip() for line in err if line.strip()]
    # A launcher's own exit code is 1, whatever its ranks' are; and it has the last word.
    refusal = next((line for line in wrong if re.match(r"\w+\.py: error: ", line)), None)
    if code is None or code == 0:
        return LATE if code is None else OK, code, said[-1] if said else ""
    if refusal:
        return REFUSED, code, refusal
    words = [line for line in said if line.startswith("FAILED: ")]
    words += [line for line in wrong if re.search(r"\w(Error|Exception)\b: ", line)]
    return FAILED, code, next(iter([*words, *wrong[-1:], f"exit code {code}"]))


def visit(lesson, line, folder, gpus, deadline_s, environ, ranks=None):
    """Run a lesson's line; return its record."""
    folder.mkdir()
    begun = time.monotonic()
    for command in commands_of(lesson, line, folder, gpus, ranks):
        result, code, said = run(command, deadline_s, environ)
        if result != OK:
            break
    record = {"lesson": lesson, "command": command.replace(f"{folder}/", "runs/")}
    record |= {"result": result, "code": code, "said": said.replace(str(folder), "runs")}
    record["seconds"] = round(time.monotonic() - begun, 1)
    written = next(folder.rglob("results.json"), None)
    if written:
        results = json.loads(written.read_text())
        record["metrics"] = results["metrics"]
        record["failed_checks"] = [check for check in results["checks"] if not check["ok"]]
    return record


def parse_args():
    parser = settings.Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu runs the CPU lines (cuda)")
    add("--only", default="", metavar="TEXT", help="lessons whose path has this text in it (all)")
    add(
        "--ranks",
        type=cli.positive_int,
        metavar="N",
        help="how many to start for each node; more than GPUs share them, slowly (one per GPU)",
    )
    add("--jobs", type=cli.positive_int, default=1, help="lessons that run at once (1)")
    add("--minutes", type=cli.positive_float, default=10, help="begin no line after these (10)")
    add(
        "--deadline",
        type=cli.positive_float,
        default=120,
        help="seconds that a line may take (120)",
    )
    add("--output", type=Path, default=REPO / "benchmarks/recorded/gpu_smoke.json", metavar="FILE",
        help="where to write what was found (benchmarks/recorded/gpu_smoke.json)")  # fmt: skip
    return parser.parse_args()


def main():
    args = parse_args()
    launch.require(launch.TORCHRUN, args.device)
    gpus = launch.visible_gpus() if args.device == "cuda" else None
    machine = describe_machine(launch.TORCHRUN)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    environ = launch.clean_environ(launch.TORCHRUN, gpus or 2)
    # torchrun, deepspeed and python of the environment that runs this.
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    chosen = {"cuda": "GPU", "cpu": "CPU"}[args.device]
    lines = {k: line for k, line in lines_of(chosen).items() if args.only in k}
    if not lines:
        raise cli.UsageError(f"--only {args.only}: no lesson's path has that in it")
    if args.ranks and gpus and args.ranks > gpus:
        environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    begun = time.monotonic()

    def one(number, lesson, line, folder):
        reason = why_not(line, gpus and max(gpus, args.ranks or 0))
        if not reason and time.monotonic() - begun > 60 * args.minutes:
            reason = f"not begun: {args.minutes:g} minutes were over"
        if reason:
            record = {"lesson": lesson, "result": LEFT_OUT, "said": reason, "seconds": 0}
        else:
            place = Path(folder, str(number))
            record = visit(lesson, line, place, gpus, args.deadline, environ, args.ranks)
        said = record["said"].removeprefix("OK: ")
        print(f"[{number}/{len(lines)}] {record['result']}: {lesson}: {said}", flush=True)
        return record

    with (
        tempfile.TemporaryDirectory(prefix="gpu-smoke-") as folder,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        waiting = [pool.submit(one, *job, folder) for job in
                   ((number, *item) for number, item in enumerate(lines.items(), 1))]  # fmt: skip
        records = [job.result() for job in waiting]
    return conclude(records, machine, args.output)


def conclude(records, machine, path):
    """Write the file, print the table; return 1 if a line failed or was late."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    content = {"machine": machine, "versions": versions, "date": now, "lessons": records}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")
    counts = {kind: sum(r["result"] == kind for r in records) for kind in
              (OK, FAILED, LATE, REFUSED, LEFT_OUT)}  # fmt: skip
    bad = [r for r in records if r["result"] in (FAILED, LATE)]
    rows = [(r["lesson"], r["result"], r["seconds"], r["command"]) for r in bad]
    print(f"\n{tabulate(rows, ('lesson', 'result', 'seconds', 'command'))}\n" if bad else "")
    print(", ".join(f"{count} {kind}" for kind, count in counts.items() if count))
    print(f"written: {path}")
    return cli.FAILED if bad else 0


if __name__ == "__main__":
    cli.run(main)
