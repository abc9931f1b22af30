"""An exam: a case of the failure gallery, drawn by a seed, and graded by running the cure.

A cure runs with another rank at fault than the one that was handed out, and with none.
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

from dist_common.ranks import Rank
from lab_parts import evidence, recorder
from lab_parts.cases import NONE, RANKS, Case, gallery, set_odd_rank
from lab_parts.holes import Answer
from lab_parts.judging import tomllib
from lab_parts.running import abort_stuck, hang, line_of
from legacy_common.cli import UsageError

DEADLINE_S = 15.0  # of a cure, for a hang that nothing else shows: one takes a second
# A rank that says one of these waited for another one, or lost it. It is seldom the cause.
VICTIM = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Socket closed|[Tt]imed out waiting"
    r"|wait timeout after|Received data size doesn't match|waiting for clients"
    r"|failed to recv|recvValue failed",
    re.I,
)
STUCK_S = 4.0  # a job hangs when all its ranks sleep for as long: gloo's timeout is 2 s there
ROLES = {  # what the ranks that are not at fault do, by the case's group in the gallery
    "calls": "it does what most ranks do",
    "one": "it waits for another rank, has lost it, or has ended as it should",
    "silent": "it does what most ranks do",
}


@dataclass
class Ran:
    """How a cure ended: its ranks, what each of them called, and in what words it hangs."""

    ended: list[Rank]
    calls: list[list[str]]
    hangs: str

    @property
    def printed(self) -> str:
        return "".join(f"rank {n}: {line}\n" for n, rank in enumerate(self.ended)
                       for line in rank.out.splitlines())  # fmt: skip


class Exam:
    """The cases that can be drawn, and how an answer to one of them is graded."""

    def __init__(self, file: Path) -> None:
        told = tomllib.loads(file.read_text())
        self.cases = [Case(gallery.CASES[entry.pop("name")], **entry) for entry in told["case"]]
        self.left_out: dict[str, str] = told["left_out"]

    def draw(self, seed: int) -> tuple[Case, int]:
        """Return the case of a seed and the rank at fault: seeds in a row give all cases once."""
        return self.cases[seed % len(self.cases)], random.Random(f"exam {seed}").randrange(RANKS)

    def hand_out(self, folder: Path, seed: int) -> Path:
        """Put a seed's script, and what was seen of its job, into a folder; return that."""
        if not (folder / "case.txt").exists():
            print(f"the job of seed {seed} breaks twice, for {folder.name}/evidence: some seconds",
                  flush=True)  # fmt: skip
        evidence.hand_out(folder, *self.draw(seed), seed)
        return folder

    def grade(
        self, answer: Answer, said: Mapping[str, Any], chosen: str | None, seed: int,
        sizes: list[int], settle=lambda: None,
    ) -> Iterator[tuple[str, str | None, str]]:  # fmt: skip
        """Yield each task's name, what is wrong with it, and what the ranks printed.

        settle() ends what a cure has left running, before it is judged.
        """
        if min(sizes) < 2:
            raise UsageError(f"--ranks {min(sizes)}: the exam's jobs need 2 ranks or more")
        case, odd = self.draw(seed)
        if chosen in (None, "rank"):
            yield "rank", judge_rank(case, odd, said.get("rank", "")), ""
        if chosen in (None, "cause"):
            yield "cause", judge_cause(case, said.get("cause", "")), ""
        if chosen in (None, "cure"):
            yield "cure", *self.judge_cure(answer, seed, sizes, settle)

    def judge_cure(
        self, answer: Answer, seed: int, sizes: list[int], settle=lambda: None
    ) -> tuple[str | None, str]:
        """Run a cure with a rank at fault and with none, up to the first run that goes wrong."""
        case, shown = self.draw(seed)
        if wrong := self.judge_script(case, answer.tree):
            return wrong, ""
        printed = ""
        for ranks in sizes:
            others = [rank for rank in range(ranks) if rank != shown]
            for odd in (random.Random(seed).choice(others), NONE):
                try:
                    ran = run_cure(answer.path, case, ranks, odd)
                except ValueError:  # a rank's files are written by the grader's lines alone
                    return "the cure overwrote what the grader wrote", ""
                settle()
                printed = ran.printed
                if wrong := judge_run(case, ran, odd):
                    which = f"with rank {odd} at fault" if odd != NONE else "with no rank at fault"
                    excuse = self.excuse(case, answer.tree)
                    return f"on {ranks} ranks, {which}: {wrong}{excuse}", printed
        return None, printed

    def judge_script(self, case: Case, tree: ast.Module) -> str | None:
        """Say what can be seen before anything runs: no change, another case, a fault removed."""
        given, code = ast.parse(case.script()), ast.unparse(tree)
        if code == ast.unparse(given):
            return "nothing is changed yet"
        for other in self.cases:
            title = ast.get_docstring(ast.parse(other.script()))
            if other is not case and ast.get_docstring(tree) == title:
                return f'this is the script of another seed: yours is "{ast.get_docstring(given)}"'
        for pattern, why in case.stays.items():
            if not re.search(pattern, code):
                return f"the fault is removed, not cured: {why}"
        if asks(tree) > asks(given):
            return "the cure asks for ODD_RANK once more: in a real job nobody knows who that is"
        return next((why for pattern, why in case.hides.items() if re.search(pattern, code)), None)

    def excuse(self, case: Case, tree: ast.Module) -> str:
        """Say of a cure that does not work what in it only hides the symptom."""
        told, given = "", ast.parse(case.script())
        if timeout_of(tree) != timeout_of(given):
            told += ". The timeout is changed: a longer one waits longer for the same thing"
        if catches(tree) > catches(given):
            told += ". An except around a collective hides the error: the ranks stay out of step"
        return told


def run_cure(file: Path, case: Case, ranks: int, odd: int) -> Ran:
    """Run a student's script as a job. The one place where code of theirs runs: in forks.

    It needs a temporary folder, processes and loopback. Raises: ValueError for spoilt files.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        notes = [folder / f"calls-{rank}.json" for rank in range(ranks)]

        @contextlib.contextmanager
        def around(rank: int) -> Iterator[None]:
            set_odd_rank(odd)
            with note_calls(notes[rank]):
                yield

        stuck: list[int] = []
        ended = gallery.run_job(
            file.resolve(), ranks, folder, around,
            lambda pids: stuck.extend(abort_stuck(pids, STUCK_S, DEADLINE_S)),
            DEADLINE_S,
        )  # fmt: skip
        calls = [json.loads(note.read_text()) if note.exists() else [] for note in notes]
        path = str(file.resolve())
        stuck += [n for n, rank in enumerate(ended) if rank.code is None and n not in stuck]
        told = hang(ended, stuck, {}, path) if stuck else ""
        for rank in ended:
            rank.value = failed_at(rank, path)
        return Ran(ended, calls, told)


@contextlib.contextmanager
def note_calls(file: Path) -> Iterator[None]:
    """Have a rank write what it called to `file` at its end, and to its log where it hangs."""
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGTERM, sys.stderr, chain=True)  # one that the others' end ends
    before = recorder.noted()  # of the process that forked this one
    start = before[-1]["record_id"] + 1 if before else 0
    try:
        yield
    finally:
        names = [entry["profiling_name"].split(":")[-1] for entry in recorder.noted()
                 if entry["record_id"] >= start]  # fmt: skip
        file.write_text(json.dumps(names))


def failed_at(rank: Rank, path: str) -> str:
    """Return the line of a script at which a rank failed; "" where its log has none."""
    lines = re.findall(rf'File "{re.escape(path)}", line (\d+)', rank.err)
    inner = 0 if (rank.code or 0) < 0 else -1  # faulthandler begins with it, a traceback ends
    return f" ({line_of(path, int(lines[inner]))})" if lines else ""


def error_of(rank: Rank) -> str:
    """Return the line of a rank's log that says why it ended."""
    lines = gallery.log_lines(rank)[::-1]
    for wanted in (VICTIM, re.compile(r"^[\w.]*(Error|Exception|Exit)\b")):
        if found := next(filter(wanted.search, lines), ""):
            return found
    if (rank.code or 0) > 0 and rank.err.strip():  # queue.Empty, or the words of sys.exit
        return lines[0]
    return "no error in its log"


def judge_run(case: Case, ran: Ran, odd: int) -> str | None:
    """Say what is wrong with a run of a cure; None where nothing is."""
    if ran.hangs:
        return ran.hangs
    if failed := [n for n, rank in enumerate(ran.ended) if rank.code != 0]:
        told = {n: error_of(ran.ended[n]) for n in failed}
        own = [n for n in failed if not VICTIM.search(told[n])]
        number = (own or failed)[0]
        rank = ran.ended[number]
        return f"rank {number}, {gallery.describe_end(rank)}: {told[number][:120]}{rank.value}"
    for number, called in enumerate(ran.calls):
        for pattern, times in case.calls.items():
            made = sum(bool(re.fullmatch(pattern, name)) for name in called)
            if made < times:
                what = pattern.split("|")[0]
                left_out = "the work is left out, and the fault with it"
                return f"rank {number} calls {what} {made} times, {times} are needed: {left_out}"
    right = case.result(len(ran.ended), odd)
    for number, rank in enumerate(ran.ended):
        last = (rank.out.splitlines() or ["nothing"])[-1]
        if last != right:
            return f"rank {number} prints {last[:80]!r} last, {right!r} is right"
    return None


def judge_rank(case: Case, odd: int, said: Any) -> str | None:
    if said == "":
        return "not answered"
    if not isinstance(said, int) or isinstance(said, bool):
        return f"answers.toml has {said!r}: a number is needed"
    if not 0 <= said < RANKS:
        return f"there is no rank {said}: the job has ranks 0 to {RANKS - 1}"
    return None if said == odd else f"rank {said} is not at fault: {ROLES[case.failure.group]}"


def judge_cause(case: Case, said: Any) -> str | None:
    """Say by what a wrong cause would show, or what tells a near one from the right one."""
    if said == "":
        return "not answered"
    if not isinstance(said, str):
        return f"answers.toml has {said!r}: a name is needed"
    if said not in gallery.CASES:
        return f"there is no cause {said}: the names are those of the failure gallery"
    if said == case.failure.name:
        return None
    symptom = gallery.CASES[said].symptom
    return f"not {said}: {case.near.get(said, f'you would see {symptom}')}"


def timeout_of(tree: ast.Module) -> str:
    """Return how a script sets its timeout, wherever it does."""
    words = [node for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    calls = [
        ast.unparse(node.value) for node in words if node.arg in ("seconds", "minutes", "hours")
    ]
    return " ".join(calls)


def asks(tree: ast.Module) -> int:
    """Count how often a script asks which rank is at fault, besides where it reads that."""
    return sum(isinstance(node, ast.Name) and node.id == "ODD_RANK" and
               isinstance(node.ctx, ast.Load) for node in ast.walk(tree))  # fmt: skip


def catches(tree: ast.Module) -> int:
    """Count what catches the error of a collective, or of a backward pass that calls some."""
    tried = ("\n".join(map(ast.unparse, node.body)) for node in ast.walk(tree)
             if isinstance(node, ast.Try))  # fmt: skip
    return sum(bool(re.search(r"\bdist\.|backward\(|new_group|DDP\(", body)) for body in tried)
