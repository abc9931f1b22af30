"""A Sphinx extension: the script beside its page, and Mermaid's diagrams.

Of each page it finds the scripts that its snippets and words are about. A snippet knows the lines
that it shows, a word in code that is a function's name the function; a function knows where the
page speaks of it. Nothing is marked in the page: a function that moves breaks none.
"""

import ast
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from docutils import nodes
from markupsafe import escape
from page_reader import PARTS, REPO, TRACKED, sources_of, unindented
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer
from sphinx.addnodes import pending_xref

MOST = 4  # scripts beside a page
FORMAT = HtmlFormatter(nowrap=True)
NAME = re.compile(r"(\w+)(?:\(.*\))?")


@dataclass(frozen=True)
class Function:
    """A function, class or constant at a file's top, or a method: its lines, from 1."""

    name: str
    first: int
    last: int


@dataclass
class Beside:
    """What stands beside a page: files, and for each (file, name) where the page speaks of it."""

    files: list[str] = field(default_factory=list)
    said: dict[tuple[str, str], str] = field(default_factory=dict)
    difference: str = ""  # to the lesson before, as the page shows it


@cache
def functions_of(path: str) -> tuple[Function, ...]:
    """Return what a reader may look for in a file, in its order."""
    found = []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

    def walk(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, kinds):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                found.append(Function(node.name, first, node.end_lineno))
                if isinstance(node, ast.ClassDef):
                    walk(node.body)
            elif isinstance(node, ast.Assign) and body is tree.body:
                names = [each.id for each in node.targets if isinstance(each, ast.Name)]
                found.extend(Function(name, node.lineno, node.end_lineno) for name in names)

    tree = ast.parse((REPO / path).read_text())
    walk(tree.body)
    return tuple(found)


@cache
def plain_lines(path: str) -> tuple[list[str], list[int]]:
    """Return a file's lines as a page shows them, and the number of each in the file."""
    lines = (REPO / path).read_text().splitlines()
    kept = [(unindented(line), number) for number, line in enumerate(lines, 1)
            if not line.lstrip().startswith("# lab: ")]  # fmt: skip
    return [line for line, _ in kept], [number for _, number in kept]


def lines_shown(path: str, snippet: str) -> tuple[int, int] | None:
    """Return the first and last line of a snippet in a file; None where it is not from there."""
    wanted = unindented(snippet).strip("\n").splitlines()
    lines, numbers = plain_lines(path)
    for start in range(len(lines) - len(wanted) + 1):
        if lines[start : start + len(wanted)] == wanted:
            return numbers[start], numbers[start + len(wanted) - 1]
    return None


def candidates(page: str) -> list[str]:
    """Return the files that can stand beside a page: its own script first, then its part."""
    folder, _, name = page.rpartition("/")
    stem = name.removesuffix(".md")
    own = [f"{folder}/{stem}.py", f"{folder}/{PARTS.get(folder, '')}/{stem}.py"]
    others = [path for path in sources_of(page, ".py") if path.count("/") == 1 and path not in own]
    return [path for path in own if path in TRACKED] + others


def note_code(app, doctree: nodes.document) -> None:
    """Find the code that a page shows and names; leave marks for the reader's browser."""
    page = f"{app.env.docname}.md"
    draw_diagrams(doctree)
    if "/" not in page or page.endswith(".py.md") or page not in TRACKED:
        return
    files = candidates(page)
    own = [path for path in files if Path(path).stem == Path(page).stem]
    shown: Counter[str] = Counter()
    snippets = []
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") == "python":
            places = ((path, lines_shown(path, block.astext())) for path in files)
            path, lines = next(((p, at) for p, at in places if at), (None, None))
            if path:
                shown[path] += 1
                snippets.append((block, path, lines))
    run = Counter(path for text in doctree.findall(nodes.literal_block)
                  if text.get("language") == "bash"
                  for path in re.findall(r"[\w./-]+\.py\b", text.astext()))  # fmt: skip
    folder = page.rpartition("/")[0]
    started = [path for path in run if path in files and path.startswith(f"{folder}/")]
    chosen = list(dict.fromkeys([*own, *(path for path, _ in shown.most_common()), *started]))
    beside = Beside(chosen[:MOST])
    if not beside.files:
        return
    for block, path, lines in snippets:
        if path in beside.files:
            block["classes"] += ["shown-code", target_class(path, *lines)]
    for text in list(doctree.findall(nodes.literal)):
        link_name(text, beside)
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") == "diff":
            beside.difference = beside.difference or block.astext()
    if not hasattr(app.env, "beside"):
        app.env.beside = {}
    app.env.beside[app.env.docname] = beside


def target_class(path: str, first: int, last: int) -> str:
    return f"code--{file_id(path)}--{first}--{last}"


def file_id(path: str) -> str:
    return re.sub(r"\W", "-", path)


def link_name(text: nodes.literal, beside: Beside) -> None:
    """Make a link of a word in code that names a function of a file beside the page."""
    match = NAME.fullmatch(text.astext())
    if not match or isinstance(text.parent, (nodes.reference, pending_xref)):
        return
    for path in beside.files:
        for function in functions_of(path):
            if function.name == match[1]:
                link = nodes.reference(
                    "", "", refuri=f"#{file_id(path)}-{function.first}", internal=True,
                    classes=["named-code", target_class(path, function.first, function.last)],
                )  # fmt: skip
                place = f"says-{file_id(path)}-{function.name}"
                if (path, function.name) not in beside.said:  # the first one is led to
                    beside.said[path, function.name] = place
                    link["ids"].append(place)
                text.replace_self(link)
                link += text
                return


def draw_diagrams(doctree: nodes.document) -> None:
    """Hand Mermaid's source to the browser, which draws it."""
    for block in list(doctree.findall(nodes.literal_block)):
        if block.get("language") == "mermaid":
            source = f'<pre class="mermaid">{escape(block.astext())}</pre>'
            block.replace_self(nodes.raw("", source, format="html"))


def numbered(path: str, beside: Beside) -> str:
    """Return a file as HTML: each line has an id, a function's number leads to the page."""
    starts = {function.first: function.name for function in functions_of(path)
              if (path, function.name) in beside.said}  # fmt: skip
    lines = []
    source = highlight((REPO / path).read_text(), PythonLexer(stripnl=False), FORMAT)
    for number, line in enumerate(source.splitlines(), 1):
        left = f'<span class="nr">{number}</span>'
        if name := starts.get(number):
            said = f"{number}: {name}, to where the page speaks of it"
            place = f"#{beside.said[path, name]}"
            left = f'<a class="nr" href="{place}" aria-label="{said}">{number}</a>'
        lines.append(f'<span class="line" id="{file_id(path)}-{number}">{left}{line}</span>')
    return "".join(lines)


def list_modules(app, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Give pages of code the modules alone to navigate: all pages cost half of the build."""
    if pagename.rpartition("/")[2].count("."):
        pages = ["README", *(f"{module}/README" for module in PARTS)]
        titles = {page: app.env.titles[page].astext() for page in pages}
        links = [
            f'<a href="{context["pathto"](page)}">{escape(titles[page])}</a>' for page in pages
        ]
        items = "".join(f'<li class="toctree-l1">{link}</li>' for link in links)
        context["toctree"] = lambda **_: f"<ul>{items}</ul>"


def show_code(app, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Give the page's template its files, as HTML."""
    context["guide_page"] = f"{pagename}.md" in TRACKED
    context["mermaid"] = doctree is not None and any(
        'class="mermaid"' in node.astext() for node in doctree.findall(nodes.raw)
    )
    beside = getattr(app.env, "beside", {}).get(pagename)
    if not beside:
        return
    panels = []
    for path in beside.files:
        name = path.partition("/")[2]  # of a part with its package
        names = {"id": file_id(path), "name": name, "path": path}
        panels.append(names | {"code": numbered(path, beside)})
    if beside.difference:
        code = highlight(beside.difference, DiffLexer(), FORMAT)
        panels.append({"id": "difference", "name": "what changes", "path": "", "code": code})
    context["beside"] = panels


def forget(app, env, docname: str) -> None:
    getattr(env, "beside", {}).pop(docname, None)


def merge(app, env, docnames: set[str], other) -> None:
    """Take over what another process has read."""
    if not hasattr(env, "beside"):
        env.beside = {}
    env.beside |= {name: found for name, found in getattr(other, "beside", {}).items()
                   if name in docnames}  # fmt: skip


def setup(app):
    app.connect("doctree-read", note_code)
    app.connect("html-page-context", show_code)
    app.connect("html-page-context", list_modules, priority=100)  # before Furo asks
    app.connect("env-purge-doc", forget)
    app.connect("env-merge-info", merge)
    return {"parallel_read_safe": True, "parallel_write_safe": True, "version": "1"}
