"""Read the Markdown pages: blocks, commands, order; and find a snippet in the code.

Plain Python: site/ imports it in an environment without PyTorch.
"""

from __future__ import annotations

import ast
import re
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
FRAMEWORKS = ".venv-frameworks"  # what `make frameworks` installs
SITE = ".venv-site"  # and `make site`
# The modules in their order.
MODULES = [
    "01-ddp-basics",
    "02-fsdp",
    "03-deepspeed",
    "04-nccl-operations",
    "05-advanced",
]


def files_of_the_repository() -> list[str]:
    asked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode == 0:
        return [path for path in asked.stdout.splitlines() if (REPO / path).exists()]
    # a copy without git, from an archive
    made = {"node_modules", "runs", "data", "__pycache__"}
    files = (path.relative_to(REPO) for path in REPO.rglob("*") if path.is_file())
    return [
        str(path)
        for path in files
        if not made & set(path.parts) and not path.parts[0].startswith(".venv")
    ]


TRACKED = files_of_the_repository()
# Without the pages that only the site has.
PAGES = [
    path
    for path in TRACKED
    if path.endswith(".md") and not path.startswith("site/pages/")
]


@dataclass
class CodeBlock:
    """A fenced block: its language, its lines, its first line, the prose before it."""

    language: str
    text: str
    line: int
    lead: str = ""


@dataclass
class GuidePage:
    path: str
    prose: str = ""
    blocks: list[CodeBlock] = field(default_factory=list)
    rest: str = ""  # the prose after the last block


@cache
def read(path: str | Path) -> GuidePage:
    """Read a page, by its path in the repository."""
    page, block, between = GuidePage(str(path)), None, []
    for number, line in enumerate((REPO / path).read_text().splitlines(), 1):
        fence = re.match(r"```(\w*)$", line)
        if block is None and fence:
            block = CodeBlock(fence[1], "", number, "\n".join(between).strip())
        elif block is not None and line == "```":
            page.blocks.append(block)
            block, between = None, []
        elif block is not None:
            block.text += line + "\n"
        else:
            between.append(line)
            page.prose += line + "\n"
    if block is not None:
        page.blocks.append(CodeBlock("never closed", block.text, block.line))
    page.rest = "\n".join(between)
    return page


def commands(block: CodeBlock) -> list[tuple[int, str]]:
    """Return the commands of a block, each with its first line on the page."""
    numbered, pieces, start = [], [], 0
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        if not pieces:
            start = number
            if not line.strip() or line.startswith("#"):
                continue
        pieces.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            numbered.append((start, " ".join(pieces)))
            pieces = []
    return numbered


def unindented(text: str) -> str:
    """Return code without indentation and the comments of labs, because a page may show
    a part of a function.
    """
    return re.sub(r"^ *# lab: .*\n|^[ \t]+", "", text, flags=re.M)


def sources_of(page: str, ending: str) -> list[str]:
    """Return the files that a page may quote: in its folder and the shared packages."""
    near = Path(page).parent, Path("dist_common")
    return [
        path
        for path in TRACKED
        if path.endswith(ending)
        and any(Path(path).is_relative_to(folder) for folder in near)
    ]


def lessons_in_order(folder: str) -> list[str]:
    """Return the pages that a module's README lists in its table of lessons, in their
    order.

    Rows of that table end in minutes; scripts without minutes follow, from the other
    tables.
    """
    rows = re.findall(r"^\|.*", (REPO / folder / "README.md").read_text(), re.M)
    rows.sort(key=lambda row: not re.search(r"\| \d+ \|$", row))
    return list(dict.fromkeys(re.findall(r"\]\((\w+)\.(?:md|py)\)", "\n".join(rows))))


@cache
def imports(path):
    """Return the modules that a file imports, with the names taken from packages."""
    names = set()
    for node in ast.walk(ast.parse((REPO / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def opened_by(script):
    """Return a script and all files of the repository that it imports."""
    opened, left = set(), {script}
    while left:
        path = left.pop()
        opened.add(path)
        stems = {name.replace(".", "/") for name in imports(path)}
        stems |= {f"{Path(script).parent}/{stem}" for stem in stems}
        candidates = {f"{stem}.py" for stem in stems}
        candidates |= {f"{stem}/__init__.py" for stem in stems}
        left |= candidates & set(TRACKED) - opened
    return opened


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


DEFINES = re.compile(
    r"(?:^|(?<=[.:)] ))(?:(?:An?|The|Each) )?"
    r"(\*\*?)((?!The )[A-Za-z][\w/ -]+?)\1(?: \([^)]*\))? "
    r"(?:is|are|means|has|have|keeps?|gives|adds|holds|sends|says|counts) "
    r".*?(?:\.(?=\s|$)|$)"
)


def definitions() -> list[tuple[str, str, str]]:
    """Return (term, page, sentence) for each sentence of prose that begins with a term
    in italics or bold and says what it is.
    """
    terms = []
    for page in PAGES:
        prose = re.sub(r"<!--.*?-->", "", read(page).prose, flags=re.S)
        for paragraph in re.split(r"\n\s*\n", prose):
            if not re.match(r"\s*([-|#>]|\d+\. )", paragraph):
                text = " ".join(paragraph.split())
                terms += [
                    (match[2].lower(), page, match[0])
                    for match in DEFINES.finditer(text)
                ]
    return terms
