"""An exam: a seed draws a case of the failure gallery, and the grader runs the cure.

The cure runs with another rank at fault than the student saw, and with none.
"""

import ast
import contextlib
import faulthandler
import json
import random
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dist_common.cli import UsageError
from dist_common.ranks import Rank
from lab_parts import evidence, recorder
from lab_parts.cases import NONE, RANKS, Case, gallery, set_odd_rank
from lab_parts.holes import Answer
from lab_parts.judging import tomllib, without_numbers
from lab_parts.running import abort_stuck, describe_hang, line_of, times

DEADLINE_S = 15.0  # of a cure; a right one takes a second
STUCK_S = 4.0  # a job hangs if all ranks sleep this long: gloo's timeout is 2 s there
# A rank that says this waited for another rank or lost it, and is seldom the cause.
VICTIM = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Socket closed|[Tt]imed out waiting"
    r"|wait timeout after|Received data size doesn't match|waiting for clients"
    r"|failed to recv|recvValue failed",
    re.I,
)
ROLES = {  # what the other ranks do, by the case's group in the gallery
    "calls": "it does what most ranks do",
    "one": "it waits for another rank, has lost it, or has ended as it should",
    "silent": "it does what most ranks do",
}


@dataclass
class CureRun:
    """How a cure ended: its ranks, their calls, and where it hangs if it does."""

    ended: list[Rank]
    calls: list[list[str]]
    hang: str

    @property
    def printed(self) -> str:
        lines = [(n, s) for n, r in enumerate(self.ended) for s in r.out.splitlines()]
        return "".join(f"rank {number}: {line}\n" for number, line in lines)


class Exam:
    """The cases that can be drawn, and how answers to them are graded."""

    def __init__(self, file: Path) -> None:
        table = tomllib.loads(file.read_text())
        self.left_out: dict[str, str] = table.pop("left_out")
        self.cases = [Case(gallery.CASES[name], **table[name]) for name in table]

    def draw(self, seed: int) -> tuple[Case, int]:
        """Return a seed's case and the rank at fault. Seeds in a row give all cases."""
        odd = random.Random(f"exam {seed}").randrange(RANKS)
        return self.cases[seed % len(self.cases)], odd

    def hand_out(self, folder: Path, seed: int) -> Path:
        """Write a seed's script and the evidence of its job into a folder."""
        if not (folder / "case.txt").exists():
            print(f"the job of seed {seed} breaks twice: some seconds", flush=True)
        evidence.hand_out(folder, *self.draw(seed), seed)
        return folder

    def grade(
        self,
        answer: Answer,
        said: Mapping[str, Any],
        chosen: str | None,
        seed: int,
        sizes: list[int],
    ) -> Iterator[tuple[str, list[str], str]]:
        """Yield each task's name, its faults, and the ranks' output."""
        if min(sizes) < 2:
            raise UsageError(f"--ranks {min(sizes)}: the exam's jobs need 2 or more")
        case, odd = self.draw(seed)
        if chosen in (None, "rank"):
            yield "rank", [*judge_rank(case, odd, said.get("rank", ""))], ""
        if chosen in (None, "cause"):
            yield "cause", [*judge_cause(case, said.get("cause", ""))], ""
        if chosen in (None, "cure"):
            yield "cure", *self.judge_cure(answer, seed, sizes)

    def judge_cure(
        self, answer: Answer, seed: int, sizes: list[int]
    ) -> tuple[list[str], str]:
        """Run a cure with a rank at fault and with none, up to an error or a hang.

        Return its distinct faults, and the ranks' output from the first wrong run.
        """
        case, shown = self.draw(seed)
        given = ast.parse(case.script())
        if ast.unparse(answer.tree) == ast.unparse(given):
            return ["nothing is changed yet"], ""
        if count_uses(answer.tree) > count_uses(given):
            return [
                "the cure asks for ODD_RANK in one more place: in a real job nobody "
                "knows which rank that is"
            ], ""
        faults: dict[str, str] = {}
        printed = ""
        for ranks in sizes:
            others = [rank for rank in range(ranks) if rank != shown]
            for odd in (random.Random(seed).choice(others), NONE):
                try:
                    ran = run_cure(answer.path, ranks, odd)
                except ValueError:  # only the grader's lines write these files
                    return ["the cure overwrote a file of the grader"], ""
                printed = printed if faults else ran.printed
                which = "no rank" if odd == NONE else f"rank {odd}"
                where = f"on {ranks} ranks, with {which} at fault: "
                if end := explain_end(ran):
                    faults[end] = f"{where}{end}; the other runs are left out"
                    return [*faults.values()], printed
                for fault in judge_run(case, ran, odd):
                    kind = without_numbers(fault).split("'")[0]  # whatever it prints
                    faults.setdefault(kind, where + fault)
        return [*faults.values()], printed


def count_uses(tree: ast.Module) -> int:
    """Count how often a script reads the variable ODD_RANK."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return sum(n.id == "ODD_RANK" and isinstance(n.ctx, ast.Load) for n in names)


def run_cure(file: Path, ranks: int, odd: int) -> CureRun:
    """Run a student's script as a job. Raises: ValueError for spoilt files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        notes = [folder / f"calls-{rank}.json" for rank in range(ranks)]
        stuck: list[int] = []

        @contextlib.contextmanager
        def around(rank: int) -> Iterator[None]:
            set_odd_rank(odd)
            with note_calls(notes[rank]):
                yield

        def note_stuck(pids: list[int]) -> None:
            stuck.extend(abort_stuck(pids, STUCK_S, DEADLINE_S))

        path = file.resolve()
        ended = gallery.run_job(path, ranks, folder, around, note_stuck, DEADLINE_S)
        calls = [json.loads(n.read_text()) if n.exists() else [] for n in notes]
    killed = [number for number, rank in enumerate(ended) if rank.code is None]
    hanging = sorted({*stuck, *killed})
    hang = describe_hang(ended, hanging, str(path)) if hanging else ""
    for rank in ended:
        rank.value = find_failed_line(rank, str(path))
    return CureRun(ended, calls, hang)


@contextlib.contextmanager
def note_calls(file: Path) -> Iterator[None]:
    """Write a rank's collectives and saves to `file`, and its stack to its log."""
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGTERM, sys.stderr, chain=True)
    names, save = [], torch.save
    before = recorder.noted()  # by the process that forked this one
    start = before[-1]["record_id"] + 1 if before else 0

    def noted_save(*args, **kwargs):
        names.append("save")
        return save(*args, **kwargs)

    torch.save = noted_save
    try:
        yield
    finally:
        for entry in recorder.noted():
            if entry["record_id"] >= start:
                names.append(entry["profiling_name"].split(":")[-1])
        file.write_text(json.dumps(names))


def find_failed_line(rank: Rank, path: str) -> str:
    """Return the line of a script at which a rank failed, or ""."""
    lines = re.findall(rf'File "{re.escape(path)}", line (\d+)', rank.err)
    # faulthandler lists the innermost frame first, a traceback last.
    inner = 0 if (rank.code or 0) < 0 else -1
    return f" ({line_of(path, int(lines[inner]))})" if lines else ""


def find_error(rank: Rank) -> str:
    """Return the line of a rank's log that says why it ended."""
    lines = gallery.log_lines(rank)[::-1]
    for wanted in (VICTIM, re.compile(r"^[\w.]*(Error|Exception|Exit)\b")):
        if line := next(filter(wanted.search, lines), ""):
            return line
    if (rank.code or 0) > 0 and rank.err.strip():  # queue.Empty, or words of sys.exit
        return lines[0]
    return "no error in its log"


def explain_end(ran: CureRun) -> str:
    """Say why a run of a cure hung or failed, or return ""."""
    if ran.hang:
        return ran.hang
    failed = [number for number, rank in enumerate(ran.ended) if rank.code != 0]
    if failed:
        causes = [n for n in failed if not VICTIM.search(find_error(ran.ended[n]))]
        number = (causes or failed)[0]
        rank = ran.ended[number]
        end = gallery.describe_end(rank)
        return f"rank {number}, {end}: {find_error(rank)[:120]}{rank.value}"
    return ""


def judge_run(case: Case, ran: CureRun, odd: int) -> Iterator[str]:
    """Yield the faults of a run of a cure that ended."""
    skipped = False
    for number, called in enumerate(ran.calls):
        for pattern, needed in case.calls.items():
            made = sum(bool(re.fullmatch(pattern, name)) for name in called)
            if made < needed:
                name = pattern.split("|")[0]
                skipped = True
                yield (
                    f"rank {number} calls {name} {times(made)}, {needed} needed: the "
                    "work is left out, and the fault with it"
                )
    saved = any("save" in called for called in ran.calls)
    if case.saves and odd != NONE and not saved:
        yield "no rank writes the checkpoint: the work is left out"
    expected = case.result(len(ran.ended), odd)
    for number, rank in enumerate(ran.ended):
        last = (rank.out.splitlines() or ["nothing"])[-1]
        if last != expected and not skipped:
            yield f"rank {number} prints {last[:80]!r} last, {expected!r} is right"


def judge_rank(case: Case, odd: int, said: Any) -> Iterator[str]:
    """Yield the fault of a wrong rank."""
    if said == "":
        yield "not answered"
    elif not isinstance(said, int) or isinstance(said, bool):
        yield f"answers.toml has {said!r}: write a number"
    elif not 0 <= said < RANKS:
        yield f"there is no rank {said}: the job has ranks 0 to {RANKS - 1}"
    elif said != odd:
        yield f"rank {said} is not at fault: {ROLES[case.failure.group]}"


def judge_cause(case: Case, said: Any) -> Iterator[str]:
    """Yield what a wrong cause would show, or how to tell a similar one apart."""
    if said == "":
        yield "not answered"
    elif not isinstance(said, str):
        yield f"answers.toml has {said!r}: write a name"
    elif said not in gallery.CASES:
        yield f"there is no cause {said}: take a name of the failure gallery"
    elif said != case.failure.name:
        symptom = gallery.CASES[said].symptom
        yield f"not {said}: {case.near.get(said, f'you would see {symptom}')}"
