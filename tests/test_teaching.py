"""TEACHING.md: its statements about labs agree with the labs."""

import re
import sys

import pytest
from conftest import REPO

sys.path.insert(0, str(REPO / "labs"))
import grade

LABS = [path.parent.name for path in sorted((REPO / "labs").glob("*/tasks.py"))]
TEXT = (REPO / "TEACHING.md").read_text()
SECTIONS = dict(re.findall(r"^### (\S+)\n(.*?)(?=^##)", TEXT, re.M | re.S))


@pytest.mark.parametrize("name", LABS)
def test_a_lab_has_its_section_with_its_tasks(name):
    lab, text = grade.load(name), SECTIONS[name]
    exposed = {*re.findall(r"^\| .+ \| `(\w+)` \|$", text, re.M)}
    assert exposed == {*lab.tasks.TASKS, *lab.tasks.QUESTIONS}
    assert "**Objective.**" in text
    assert "**Demonstrate.**" in text


def test_no_section_is_of_a_lab_that_is_not_there():
    assert [*SECTIONS] == LABS


@pytest.mark.parametrize("weeks", ["Ten", "Six"])
def test_a_course_has_its_weeks_and_only_labs_that_are_there(weeks):
    table = TEXT.split(f"## {weeks} weeks")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", table, re.M)
    number = {"Ten": 10, "Six": 6}[weeks]
    assert [int(week) for week, _ in rows] == list(range(1, number + 1))
    assert "labs/8-exam/README.md" in rows[-1][1]
    for label, page in re.findall(r"\[(\d)\]\((labs/[^)]+)\)", table):
        assert page.startswith(f"labs/{label}-")
    pages = re.findall(r"\]\((?:labs/(\d)-|)([^)]+)\)", table)
    assert all((REPO / page.split("#")[0]).exists() for lab, page in pages if not lab)
