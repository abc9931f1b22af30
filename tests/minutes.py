"""How long a page takes: words, lines of its script's lesson, commands, exercises."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from conftest import REPO
from page_reader import PAGES, TRACKED, commands, read
from pages import runnable, steps

WORDS_A_MINUTE, LINES_A_MINUTE = 150, 10
COMMAND, SLOW_COMMAND = (
    0.25,
    1.0,
)  # minutes: most take some seconds, those marked slow a minute
EXERCISE = re.compile(r"^\d+\. \((\d+) min\)", re.M)
ROW = re.compile(r"^(\| .*?\]\(([\w/-]+\.md)\).*\| )(\d+)( \|)$", re.M)
RULED = [
    path for path in PAGES if not path.startswith("labs/")
]  # a lab's minutes are for doing the lab
TABLE = re.compile(r"^\|.*\| minutes \|\n(?:\|.*\n)+", re.M)
STATED = re.compile(r"(\d+)(\s+minutes)")


def lines_of_lesson(script: str) -> int:
    """Return the lines of a script's lesson, which are between its imports and
    parse_args.
    """
    source = (REPO / script).read_text()
    body = ast.parse(source).body
    start = max(
        n.end_lineno for n in body if isinstance(n, (ast.Import, ast.ImportFrom))
    )
    lines = source.splitlines()
    ends = [n.lineno for n in body if getattr(n, "name", "") == "parse_args"]
    return sum(
        bool(line.strip())
        for line in lines[start : min(ends, default=len(lines) + 1) - 1]
    )


def by_rule(path: str) -> float:
    """Return the minutes that a page takes."""
    page = read(path)
    script = str(Path(path).with_suffix(".py"))
    words = len(
        re.findall(r"\w[\w'-]*", re.sub(r"<!--.*?-->|\]\([^)]*\)", "", page.prose))
    )
    lines = lines_of_lesson(script) if script in TRACKED else 0
    waiting = 0.0
    for step in steps(page):
        each = SLOW_COMMAND if "<!-- slow -->" in step.commands.lead else COMMAND
        waiting += each * sum(
            bool(runnable(command)) for _, command in commands(step.commands)
        )
    exercises = sum(map(int, EXERCISE.findall(page.prose)))
    return words / WORDS_A_MINUTE + lines / LINES_A_MINUTE + waiting + exercises


def rows_of(text: str) -> list[tuple[str, ...]]:
    """Return the rows of tables whose last column is minutes: start, page, minutes,
    end.
    """
    return ROW.findall("".join(TABLE.findall(text)))


def stated(path: str) -> int | None:
    """Return the minutes that a page's head states, before its first section."""
    match = STATED.search(read(path).prose.split("\n##")[0])
    return int(match[1]) if match else None


def write() -> None:
    """Write the minutes of all pages, of their rows, and the hours of the modules,
    rounded to 5 minutes.
    """
    taken = {
        path: max(5, 5 * round(by_rule(path) / 5)) for path in RULED if stated(path)
    }
    for path, number in taken.items():
        file = REPO / path
        file.write_text(STATED.sub(rf"{number}\g<2>", file.read_text(), count=1))
    front = (REPO / "README.md").read_text()
    for path in RULED:
        folder = Path(path).parent
        text = front if path == "README.md" else (REPO / path).read_text()
        if "| minutes |" not in text:
            continue
        for start, page, old, end in rows_of(text):
            number = taken.get(
                str(folder / page), old
            )  # a page that is gone: a dead link
            text = text.replace(f"{start}{old}{end}", f"{start}{number}{end}")
        if path == "README.md":  # of the afternoon track
            front = text
            continue
        (REPO / path).write_text(text)
        hours = round(sum(int(number) for _, _, number, _ in rows_of(text)) / 60)
        front = re.sub(
            rf"^(\| \[{folder}\].*\| )\d+( \|)$", rf"\g<1>{hours}\2", front, flags=re.M
        )
    (REPO / "README.md").write_text(front)
    read.cache_clear()
