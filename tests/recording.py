"""Write the generated parts of pages: outputs of commands, figures, diffs."""

from __future__ import annotations

import ast
import difflib
import re
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from conftest import REPO
from outputs import difference, shown_like
from page_reader import PAGES, commands, read
from pages import FIGURE, Printed, Step, copy_repository, launch, runnable
from pages import steps as steps_of


def record(file: Path) -> list[str]:
    """Run a page's commands in a fresh copy, write their output into the page; return
    the problems.

    Every command is launched. A block stays unchanged if its command does not end as
    the page says.
    """
    left, written = [], []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copy = copy_repository(Path(folder) / "repository")
        for step in steps_of(read(file)):
            where = f"{file}:{step.commands.line}"
            if lacks := step.lacks():
                left.append(f"{where}: not run: {lacks}")
                continue
            try:
                printed = launch_all(step, file, copy)
            except RuntimeError as error:
                left.append(str(error))
                continue
            if step.output and printed:
                lines, whole = as_shown(step.output.text, printed)
                written.append((step.output, lines))
                if not whole:
                    left.append(
                        f"{file}:{step.output.line}: elide by hand what `...` stood for"
                    )
            for figure, _, drawn in FIGURE.findall(step.after):
                if (copy / drawn).exists():
                    shutil.copyfile(copy / drawn, file.parent / figure)
                else:
                    left.append(f"{where}: nothing drew {drawn}")
    lines = file.read_text().splitlines()
    for block, new in reversed(
        written
    ):  # from the end, so that the lines above keep their numbers
        lines[block.line : block.line + len(block.text.splitlines())] = new
    file.write_text("\n".join(lines) + "\n")
    read.cache_clear()
    return left


def launch_all(step: Step, file: Path, copy: Path) -> Printed | None:
    """Launch a step's commands; return what the last one printed."""
    printed = None
    for line, command in commands(step.commands):
        run = runnable(command)
        if run is None:
            continue
        started = time.monotonic()
        try:
            printed = launch(run, copy)
        except pytest.fail.Exception as error:  # it ran until the deadline
            raise RuntimeError(f"{file}:{line}: {error}") from error
        print(
            f"{file}:{line}: {time.monotonic() - started:.0f} s: {command}", flush=True
        )
        if printed.failed != step.fails():
            outcome = "failed" if printed.failed else "did not fail"
            raise RuntimeError(
                f"{file}:{line}: {command}\n{outcome}:\n{printed.everything}"
            )
    return printed


def as_shown(text: str, printed: Printed) -> tuple[list[str], bool]:
    """Return a block's new lines, in the order of streams that the old ones show."""
    candidates = [
        (difference(text, order) is None, *shown_like(text, order))
        for order in printed.orders()
    ]
    _, lines, whole = max(
        candidates, key=lambda candidate: (candidate[0], candidate[2])
    )
    return lines, whole


DIFF = re.compile(r"<!-- diff: (\S+?)(?: (\w+))?, (\S+?)(?: (\w+))? -->$")


def diff_of(
    folder: Path, file: str, name: str | None, other: str, other_name: str | None
) -> str:
    """Return how a function, or a whole file, turns into another, without comments."""
    sides = (code_of(folder / file, name), code_of(folder / other, other_name))
    lines = difflib.ndiff(*sides)
    return "".join(f"{line[0]}{line[2:]}\n" for line in lines if line[0] != "?")


def code_of(file: Path, name: str | None) -> list[str]:
    """Return the code of a file, or of one of its functions, without comments and
    docstring.
    """
    code = ast.parse(file.read_text())
    if name:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        named = [
            node
            for node in ast.walk(code)
            if isinstance(node, kinds) and node.name == name
        ]
        assert len(named) == 1, f"{file} has {len(named)} functions {name}"
        code = named[0]
    if ast.get_docstring(code):
        del code.body[0]
    return ast.unparse(code).splitlines()


def write_diffs() -> None:
    """Write every diff block of every page again."""
    block = re.compile(DIFF.pattern[:-1] + r"\n```diff\n(.*?)```", re.S)
    for path in PAGES:
        file = REPO / path

        def fresh(match: re.Match, folder: Path = file.parent) -> str:
            before = match[0][: match.start(5) - match.start()]
            return before + diff_of(folder, *match.groups()[:4]) + "```"

        file.write_text(block.sub(fresh, file.read_text()))
