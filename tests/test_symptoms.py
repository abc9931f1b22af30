"""SYMPTOMS.md and variables.md are generated; pages have the words that lead to them.

`python tests/test_symptoms.py` writes both.
"""

import re
import tomllib
from pathlib import Path

import pytest
from conftest import REPO
from page_reader import slug

FOLDER = REPO / "04-nccl-operations"
PAGE = REPO / "SYMPTOMS.md"
VARIABLES = FOLDER / "variables.md"
HEAD = """# Error messages, and the page that explains each

Search this page for the words of your error. The last column leads to the page that has
them, with the cure. If a job hangs without a word, start
[here](04-nccl-operations/nccl_debugging.md#first-when-a-job-hangs-right-now).
"""
MARKS = "<!-- generated from variables.toml -->\n", "<!-- end of the list -->"


def read_toml(name):
    return tomllib.loads((FOLDER / name).read_text())


def symptoms():
    """Return SYMPTOMS.md."""
    lines = [HEAD]
    for group in read_toml("symptoms.toml")["group"]:
        lines.append(f"## {group['title']}\n")
        lines.append("| the words | the cause | the page |\n|---|---|---|")
        for words, cause, page in group["rows"]:
            name = page.split("#")[0].split("/", 1)[1]
            lines.append(f"| `{words}` | {cause} | [{name}]({page}) |")
        lines.append("")
    return "\n".join(lines)


def variables():
    """Return variables.md with the tables of variables.toml."""
    lines, title = [], None
    for row in read_toml("variables.toml")["variable"]:
        if row["group"] != title:
            title = row["group"]
            lines.append(f"\n## {title}\n")
            lines.append("| variable | default | set it to | why |\n|---|---|---|---|")
        cells = (f"`{row['name']}`", row["default"], row["value"], row["use"])
        lines.append(f"| {' | '.join(cells)} |")
    head, rest = VARIABLES.read_text().split(MARKS[0])
    tail = rest.split(MARKS[1])[1]
    return f"{head}{MARKS[0]}" + "\n".join(lines) + f"\n\n{MARKS[1]}{tail}"


@pytest.mark.parametrize(("page", "fresh"), [(PAGE, symptoms), (VARIABLES, variables)])
def test_a_page_is_generated(page, fresh):
    assert page.read_text() == fresh(), f"run python tests/{Path(__file__).name}"


def plain(text):
    """Return text in lower case, on one line, without backquotes."""
    return " ".join(text.replace("`", "").lower().split())


ROWS = [row for group in read_toml("symptoms.toml")["group"] for row in group["rows"]]


@pytest.mark.parametrize(("words", "cause", "page"), ROWS, ids=[row[0] for row in ROWS])
def test_the_page_of_a_symptom_has_its_words(words, cause, page):
    path, _, anchor = page.partition("#")
    text = (REPO / path).read_text()
    assert plain(words) in plain(text)
    if anchor:
        assert anchor in map(slug, re.findall(r"^#+ (.+)$", text, re.M))


def test_there_are_enough_rows_and_no_row_twice():
    words = [row[0] for row in ROWS]
    assert len(words) == len(set(words)) >= 60
    assert len(read_toml("variables.toml")["variable"]) == 25


if __name__ == "__main__":
    PAGE.write_text(symptoms())
    VARIABLES.write_text(variables())
