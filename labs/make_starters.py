"""Cut each lab's starter.py out of its lessons, again after these have changed.

    python labs/make_starters.py

A test compares: a starter cannot differ from the lesson that solves it, nor the notebook from the
starters in it.
"""

from dist_common import cli
from grade import LABS, load
from lab_parts.holes import Lesson, starter_of
from lab_parts.notebook import notebook_of

NOTEBOOK, IN_NOTEBOOK = LABS / "labs-1-and-2.ipynb", ("1-same-model", "2-ddp")


def starters():
    """Yield each starter's path, and what is to stand there. An exam has no holes, and none."""
    for tasks in sorted(LABS.glob("*/tasks.py")):
        lab = load(tasks.parent.name)
        if lab.exam:
            continue
        yield (
            tasks.with_name("starter.py"),
            starter_of(lab.tasks.TITLE, lab.lessons, lab.tasks.LESSONS),
        )


def notebook(solved: bool = False) -> str:
    """Return what is to stand in the notebook; `solved`: with the lessons' lines in its holes."""
    labs = []
    for lab in map(load, IN_NOTEBOOK):
        lessons = [Lesson(one.path, ()) for one in lab.lessons] if solved else lab.lessons
        starter = starter_of(lab.tasks.TITLE, lessons, lab.tasks.LESSONS)
        tasks = {function: hole for lesson in lab.lessons
                 for hole, functions in lesson.holes.items() for function in functions}  # fmt: skip
        labs.append((lab.name, starter, tasks, (lab.folder / "answers.toml").read_text()))
    return notebook_of("Labs 1 and 2", labs)


def main():
    for path, text in [*starters(), (NOTEBOOK, notebook())]:
        path.write_text(text)
        print(path.relative_to(LABS.parent))
    return 0


if __name__ == "__main__":
    cli.run(main)
