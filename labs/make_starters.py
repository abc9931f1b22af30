"""Cut each lab's starter.py out of its lessons, again after these have changed.

    python labs/make_starters.py

A test compares: a starter cannot differ from the lesson that solves it.
"""

from grade import LABS, load
from lab_parts.holes import starter_of
from legacy_common import cli


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


def main():
    for path, text in starters():
        path.write_text(text)
        print(path)
    return 0


if __name__ == "__main__":
    cli.run(main)
