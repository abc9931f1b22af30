"""Find the scripts next to a page, and which of their functions each section explains.

Pages carry no marks for this. A section explains the function that its heading names,
else the code that it shows, else the one function that its prose names; else none.
"""

import ast
import re
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

from page_reader import REPO, sources_of, unindented
from render import Rendered, Section, colored_file

MOST_FILES = 3
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Links and headings stay as they are; a word in code may name a function.
CODE_WORD = re.compile(
    r"(<a [^>]*>.*?</a>|<h\d.*?</h\d>|<summary>.*?</summary>)"
    r"|<code>(\w+)(\([^<]*\))?</code>",
    re.S,
)
SNIPPET = re.compile(r'data-snippet="(\d+)"')


@dataclass(frozen=True)
class Lines:
    """Lines of a file, from 1, both included."""

    path: str
    first: int
    last: int

    def attribute(self) -> str:
        return f'data-code="{file_id(self.path)}:{self.first}:{self.last}"'


def file_id(path: str) -> str:
    return re.sub(r"\W", "-", path)


@cache
def functions_of(path: str) -> dict[str, Lines]:
    """Return a file's functions, classes and methods by name; the first of a name."""
    functions: dict[str, Lines] = {}
    for node in ast.walk(ast.parse((REPO / path).read_text())):
        if isinstance(node, FUNCTIONS):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            functions.setdefault(node.name, Lines(path, first, node.end_lineno))
    return functions


@cache
def shown_lines(path: str) -> list[tuple[int, str]]:
    """Return a file's lines with their numbers, without the comments for the labs."""
    lines = (REPO / path).read_text().splitlines()
    return [
        (number, line)
        for number, line in enumerate(lines, 1)
        if not line.lstrip().startswith("# lab:")
    ]


@cache
def bare_lines(path: str) -> list[str]:
    """Return the shown lines without their indentation."""
    return [line.lstrip(" \t") for _, line in shown_lines(path)]


@cache
def find_snippet(path: str, snippet: str) -> Lines | None:
    """Return where a file has the lines of a snippet, whatever their indentation."""
    wanted = unindented(snippet).strip("\n").splitlines()
    numbers = [number for number, _ in shown_lines(path)]
    lines = bare_lines(path)
    for start in range(len(lines) - len(wanted) + 1):
        if lines[start : start + len(wanted)] == wanted:
            return Lines(path, numbers[start], numbers[start + len(wanted) - 1])
    return None


def files_beside(page: Rendered) -> list[str]:
    """Return the scripts of a page: its own, those it shows, those it starts."""
    folder, _, name = page.path.rpartition("/")
    same_name = f"{folder}/{name.removesuffix('.md')}.py"
    near = [path for path in sources_of(page.path, ".py") if path.count("/") == 1]
    shown = [
        path
        for section in page.sections
        for snippet in section.snippets
        for path in near
        if find_snippet(path, snippet)
    ]
    text = " ".join(text for section in page.sections for text in section.text)
    started = re.findall(rf"{re.escape(folder)}/\w+\.py\b", text)
    chosen = dict.fromkeys([same_name, *shown, *started])
    drawing = f"{folder}/figures.py"
    return [path for path in chosen if path in near and path != drawing][:MOST_FILES]


def explained_by(section: Section, files: list[str]) -> Lines | None:
    """Return the code that a section explains, or None."""
    known: dict[str, Lines] = {}
    for path in reversed(files):
        known |= functions_of(path)
    words = re.findall(r"\w+", section.title)
    for name in words:
        if name in known and ("_" in name or len(words) == 1):
            return known[name]
    for snippet in section.snippets:
        for path in files:
            if lines := find_snippet(path, snippet):
                return enclosing(lines)
    # A plain word such as `bubble` may be a column; `zb_h1` and `wrap()` are not.
    named = {
        name.partition("(")[0] for name in section.names if re.search(r"[_(]", name)
    }
    named = [name for name in known if name in named and known[name].path == files[0]]
    return known[named[0]] if len(named) == 1 else None


def enclosing(lines: Lines) -> Lines:
    """Return the smallest function around some lines, or the lines themselves."""
    around = [
        each
        for each in functions_of(lines.path).values()
        if each.first <= lines.first and lines.last <= each.last
    ]
    return min(around, key=lambda each: each.last - each.first, default=lines)


def put_beside(page: Rendered) -> list[str]:
    """Mark a page's headings, snippets and names with their lines; return its files."""
    files = files_beside(page)
    if not files:
        return []
    for section in page.sections:
        lines = explained_by(section, files)
        if lines and section.level > 1:
            heading = f'id="{section.id}"'
            page.html = page.html.replace(heading, f"{heading} {lines.attribute()}", 1)
    snippets = [snippet for section in page.sections for snippet in section.snippets]

    def mark_snippet(match: re.Match) -> str:
        matches = (find_snippet(path, snippets[int(match[1])]) for path in files)
        lines = next(filter(None, matches), None)
        return lines.attribute() if lines else ""

    def link_name(match: re.Match) -> str:
        for path in files:
            if lines := functions_of(path).get(match[2] or ""):
                href = f'href="#{file_id(path)}-{lines.first}"'
                link = f'<a class="name" {href} {lines.attribute()}>'
                return f"{link}{match[0]}</a>"
        return match[0]

    page.html = SNIPPET.sub(mark_snippet, page.html)
    page.html = CODE_WORD.sub(link_name, page.html)
    return files


@cache
def numbered(path: str) -> str:
    """Return a file as HTML: each line has an id and its number in the file."""
    colored = colored_file(path)
    name = file_id(path)
    lines = []
    for number, plain in shown_lines(path):
        indent = len(plain) - len(plain.lstrip())
        lines.append(
            f'<span class="line" id="{name}-{number}" style="--in:{indent}">'
            f'<span class="nr">{number}</span>{colored[number - 1]}\n</span>'
        )
    return "".join(lines)


def panel_of(path: str) -> dict[str, str]:
    """Return what the template shows of a file."""
    return {
        "id": file_id(path),
        "name": Path(path).name,
        "path": escape(path),
        "code": numbered(path),
    }
