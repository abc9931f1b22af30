"""A student's material in the exam: the script, and the evidence of its broken job.

The job runs twice: first py-spy reads the stacks, then the flight recorder notes the
calls.
"""

import contextlib
import ctypes
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dist_common.cli import UsageError
from dist_common.ranks import Rank
from lab_parts import recorder
from lab_parts.cases import NONE, RANKS, Case, gallery, set_odd_rank
from lab_parts.holes import REPO

PR_SET_PTRACER = 0x59616D61  # prctl(2)
STUCK_S = 1.0  # from the start of a job until its stacks are read
DEADLINE_S = 6.0  # of each run; gloo's timeout ends some after 2 s
ANSWERS = """\
# Seed {seed}. Read case.txt, then evidence/.

rank = ""   # the rank at fault in the job that evidence/ shows: a number
cause = ""  # what is wrong: a name of 04-nccl-operations/failure_gallery.md
"""


def hand_out(folder: Path, case: Case, odd: int, seed: int) -> None:
    """Put a case into a folder; existing files stay."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"mine.py": case.script(), "answers.toml": ANSWERS.format(seed=seed)}
    if not (folder / "case.txt").exists():
        (folder / "evidence").mkdir(exist_ok=True)
        for name, text in gather(case, odd).items():
            (folder / "evidence" / name).write_text(text)
        texts["case.txt"] = described(case)
    for name, text in texts.items():
        if not (folder / name).exists():
            (folder / name).write_text(text)


TASK = """\
mine.py was started on 3 ranks:  ODD_RANK=? torchrun --nproc-per-node=3 mine.py

ODD_RANK is the rank at fault. You have to find it. The grader runs your cure with
another rank at fault, and once with {none}, which means none. Each rank has to end with
exit code 0, and its last line has to be

{results}

The cure has to do all of the job's work. If ODD_RANK stands for damaged or uneven data,
the cure has to live with it. The timeout is long enough.
"""


def described(case: Case) -> str:
    """Say what a cured job prints."""
    lines = []
    for ranks in (2, 3):
        ill, well = case.result(ranks, 0), case.result(ranks, NONE)
        lines.append(f"  on {ranks} ranks, one at fault:   {ill}")
        lines.append(f"  on {ranks} ranks, none at fault:  {well}")
    return TASK.format(none=NONE, results="\n".join(lines))


def gather(case: Case, odd: int) -> dict[str, str]:
    """Run the broken job, and return its evidence by file name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        script, stacks = folder / "mine.py", []
        script.write_text(case.script())

        @contextlib.contextmanager
        def readable(rank: int) -> Iterator[None]:
            set_odd_rank(odd)
            # Ubuntu lets py-spy read its own children only.
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1))
            yield

        def dump_stacks(pids: list[int]) -> None:
            time.sleep(STUCK_S)
            stacks.extend(map(stack_of, pids))

        ended = gallery.run_job(
            script, RANKS, folder, readable, dump_stacks, DEADLINE_S
        )
        notes = [folder / f"rank-{rank}.trace" for rank in range(RANKS)]
        inputs = [folder / f"rank-{rank}.inputs" for rank in range(RANKS)]

        @contextlib.contextmanager
        def recorded(rank: int) -> Iterator[None]:
            def note(tensor: Any) -> None:
                with inputs[rank].open("a") as file:
                    file.write(f"{int((~tensor.isfinite()).sum())}\n")

            set_odd_rank(odd)
            recorder.before_each_sum(note)
            finish = recorder.record(notes[rank])
            try:
                yield
            finally:
                finish()

        gallery.run_job(script, RANKS, folder, recorded, None, DEADLINE_S)
        logs = {f"rank-{n}.log": log_of(rank, folder) for n, rank in enumerate(ended)}
        ends = [
            f"rank {n}: {gallery.describe_end(rank)}" for n, rank in enumerate(ended)
        ]
        files = zip(notes, inputs, strict=True)
        calls = [calls_of(rank, *pair) for rank, pair in enumerate(files)]
    texts = {
        "job.txt": ends,
        "stacks.txt": [f"rank {n}:\n{stack}" for n, stack in enumerate(stacks)],
    }
    texts["calls.txt"] = calls
    return logs | {name: "\n".join(parts) + "\n" for name, parts in texts.items()}


def log_of(rank: Rank, folder: Path) -> str:
    """Return a rank's output, without the stack frames outside of the script."""
    text = f"{rank.out}{rank.err}".replace(f"{folder}/", "").replace(f"{REPO}/", "")
    return re.sub(
        r'(?<=Traceback \(most recent call last\):\n).*?(?=  File "mine.py")',
        "",
        text,
        flags=re.S,
    )


def stack_of(pid: int) -> str:
    """Return a rank's stack a second after the start, innermost first, down to the
    script.
    """
    try:
        frames = recorder.stack_of(pid)
    except UsageError as error:
        return f"  {error}"
    rows = [f"  {name}, {Path(file).name}:{line}" for file, name, line in frames]
    last = next(
        (n for n, row in enumerate(rows) if "<module>, mine.py" in row), len(rows)
    )
    return "\n".join(rows[: last + 1]) or "  has ended"


def calls_of(rank: int, notes: Path, inputs: Path) -> str:
    """Return what the flight recorder has of a rank, and whether what it sums up is
    finite.
    """
    calls = json.loads(notes.read_text()) if notes.exists() else []
    lines = [f"rank {rank}: {len(calls)} calls in the group of all ranks"]
    lines += [f"  {number} {call}" for number, call in enumerate(calls, 1)]
    if inputs.exists():
        counts = enumerate(inputs.read_text().split(), 1)
        bad = [(call, count) for call, count in counts if count != "0"]
        for call, count in bad:
            lines.append(f"  summand {call} has {count} numbers that are not finite")
        if not bad:
            lines.append("  every summand is finite")
    return "\n".join(lines)
