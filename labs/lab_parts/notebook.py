"""Write a notebook that runs some labs: a cell for each part of a starter, and one that grades it.

Each part goes to a file of its own, so its cell can be run again; the grader gets all of them,
joined in the order of the starter.
"""

import ast
import json
from collections.abc import Iterable

from lab_parts.holes import functions_of

INTRODUCTION = """# {title}

You fill the holes of a starter, part by part. The cell below a part grades it on 2 and 3 ranks of
this machine: right, or which mistake gives what came. Fill a hole, run the part's cell, run the
grader's. `grade("2-ddp", "--task pack --hint")` gives the next hint for a task.

Work on a copy, such as `runs/mine.ipynb`: this file is written anew when a lesson changes.
[SETUP.md](SETUP.md) says what to install, and what to do in Colab.
"""

SETUP = """import os
import sys
from pathlib import Path

here = Path.cwd()
os.chdir(next(folder for folder in (here, *here.parents) if (folder / "labs/grade.py").exists()))
os.environ.update(OMP_NUM_THREADS="1")
FILES = Path("runs/notebook")
for lab in {labs}:
    (FILES / lab).mkdir(parents=True, exist_ok=True)


def grade(lab, words=""):
    mine = FILES / lab / "mine.py"
    parts = sorted((FILES / lab).glob("part-*.py"))
    mine.write_text("\\n\\n".join(part.read_text() for part in parts))
    !{{sys.executable}} labs/grade.py {{lab}} --file {{mine}} {{words}}


!{{sys.executable}} labs/doctor.py"""

LAB = """## {title}

[Its page]({lab}/README.md) says what to read first, and has the tasks with their minutes and hints.
"""

PREDICTIONS = """### Predict

Before you run the lab's last cell, write the numbers that the comments ask for: it grades the whole
lab with them.
"""


def parts_of(starter: str, tasks: dict[str, str]) -> list[tuple[str, list[str]]]:
    """Cut a starter after each definition with a hole; return each part with its tasks.

    `tasks` has the task of each function with a hole. Functions of one task stay in one part, and
    what follows the last of them does, too.
    """
    nodes = ast.parse(starter).body
    holes = [[tasks[name] for name in functions_of(ast.Module([node], [])) if name in tasks]
             for node in nodes]  # fmt: skip
    lines, parts, since, own = starter.splitlines(), [], 0, []
    for index, node in enumerate(nodes):
        own += [task for task in holes[index] if task not in own]
        later = sum(holes[index + 1 :], [])
        last = node is nodes[-1]
        if last or (own and later and not set(own) & set(later)):
            parts.append(("\n".join(lines[since : node.end_lineno]).strip() + "\n", own))
            since, own = node.end_lineno, []
    return parts


def cells_of_lab(name: str, starter: str, tasks: dict[str, str], answers: str) -> Iterable[tuple]:
    """Yield (kind, name, text) of a lab's cells."""
    title = ast.get_docstring(ast.parse(starter)).split(":")[0]
    yield "markdown", f"{name}-intro", LAB.format(title=title, lab=name)
    for number, (text, own) in enumerate(parts_of(starter, tasks), 1):
        written = f"%%writefile runs/notebook/{name}/part-{number}.py\n{text}"
        yield "code", f"{name}-part-{number}", written
        for task in own:
            yield "code", f"{name}-grade-{task}", f'grade("{name}", "--task {task}")'
    yield "markdown", f"{name}-predict", PREDICTIONS
    written = f"%%writefile runs/notebook/{name}/answers.toml\n{answers}"
    yield "code", f"{name}-answers", written
    yield "code", f"{name}-grade", f'grade("{name}")'


def notebook_of(title: str, labs: list[tuple[str, str, dict[str, str], str]]) -> str:
    """Return a notebook, as JSON, without outputs.

    Each lab comes as its name, its starter, the task of each function with a hole, answers.toml.
    """
    names = tuple(name for name, *_ in labs)
    cells = [
        ("markdown", "intro", INTRODUCTION.format(title=title)),
        ("code", "setup", SETUP.format(labs=json.dumps(names))),
    ]
    for lab in labs:
        cells += cells_of_lab(*lab)
    written = []
    for kind, name, text in cells:
        cell = {"cell_type": kind, "id": name, "metadata": {}}
        cell |= {"execution_count": None, "outputs": []} if kind == "code" else {}
        written.append(cell | {"source": text.strip("\n").splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": written, "metadata": {"kernelspec": kernel}}
    return json.dumps(whole | {"nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"
