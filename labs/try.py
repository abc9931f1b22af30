"""Copy a lesson with what it imports, to change the copy: exercises leave the lesson as
it is.

    python labs/try.py 01-ddp-basics/ddp_from_scratch.py

Its folder goes to runs/try, without pictures and data. The command to run the copy is
printed.
"""

import argparse
import re
import shutil
from pathlib import Path

from dist_common import cli
from grade import LabParser
from lab_parts.holes import REPO


def copy_of(script: Path) -> Path:
    """Copy a lesson's folder to the first free runs/try/MODULE-N; return the copied
    script.
    """
    number = 1
    while (target := REPO / "runs/try" / f"{script.parent.name}-{number}").exists():
        number += 1
    ignored = shutil.ignore_patterns("images", "recorded", "__pycache__", "*.md")
    shutil.copytree(script.parent, target, ignore=ignored)
    return target / script.name


def command_of(script: Path) -> str:
    """Return the command for the CPU from a script's docstring; a plain one, if it has
    none.
    """
    name = str(script.relative_to(REPO))
    shown = re.search(r"^ *CPU +((?:.*\\\n)*.*)$", script.read_text(), re.M)
    plain = f"torchrun --standalone --nproc-per-node=2 {name}"
    return re.sub(r"\s*\\\n\s*", " ", shown[1]) if shown and name in shown[1] else plain


def parse_args():
    parser = LabParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "script", help="a lesson's path: 01-ddp-basics/ddp_from_scratch.py"
    )
    return parser.parse_args()


def main():
    args = parse_args()
    script = (REPO / args.script).resolve()
    if not (script.is_file() and script.suffix == ".py" and REPO in script.parents):
        raise cli.UsageError(f"{args.script}: no script of this repository")
    copy = copy_of(script).relative_to(REPO)
    print(f"change {copy}, then run")
    print(f"  {command_of(script).replace(str(script.relative_to(REPO)), str(copy))}")
    return 0


if __name__ == "__main__":
    cli.run(main)
