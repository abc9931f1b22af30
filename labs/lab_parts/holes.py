"""Cut a lab's starter out of the lessons, and run an answer with all holes but one filled rightly.

In a lesson, `# lab: hole NAME` and `# lab: end` stand around the lines that a student writes. A
hole may be in several functions, which are then one task. What else of a lesson the starter keeps,
the lab's tasks.py names.
"""

import __future__

import ast
import importlib
import re
import subprocess
import sys
import types
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from legacy_common.cli import UsageError

REPO = Path(__file__).parents[2]
TOGETHER = "together"
HOLE = re.compile(r"^( *)# lab: hole (\w+)\n(.*?)^ *# lab: end\n", re.M | re.S)


def functions_of(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Return a file's functions and methods by name: `pack`, `Overlapped.note`."""
    found = {}
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        found |= {f"{prefix}{n.name}": n for n in members if isinstance(n, ast.FunctionDef)}
    return found


def import_lesson(path: str) -> types.ModuleType:
    """Import a lesson by its path in the repository, and the parts beside it."""
    folder = str((REPO / path).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(Path(path).stem)


def names_of(node: ast.stmt) -> set[str]:
    """Return what a statement of a file defines."""
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {getattr(node, "name", "")}


def first_line(node: ast.stmt) -> int:
    """Return the line at which a definition begins, with its decorators."""
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])


class Lesson:
    """A lesson as a lab sees it: its source, and which function has which of the lab's holes."""

    def __init__(self, path: str, tasks: Collection[str]) -> None:
        self.path, self.tasks = path, tasks
        self.source = (REPO / path).read_text()
        self.functions = functions_of(ast.parse(self.source))

    @cached_property
    def holes(self) -> dict[str, list[str]]:
        """Return the functions with a part of each hole, by the hole's name."""
        found: dict[str, list[str]] = {}
        for mark in (one for one in HOLE.finditer(self.source) if one[2] in self.tasks):
            line = self.source.count("\n", 0, mark.start()) + 1
            inside = [name for name, node in self.functions.items()
                      if node.lineno < line <= node.end_lineno]  # fmt: skip
            found.setdefault(mark[2], []).extend(inside)
        return found

    def starter(self, keep: tuple[str, ...]) -> tuple[list[str], list[str]]:
        """Return the imports that the kept definitions use, and these with their holes empty.

        Of a class, `-Class.method` leaves a method out.
        """
        kept, used, imports = [], set(), []
        source = HOLE.sub(self._emptied, self.source)
        tree = ast.parse(source)
        for node in tree.body:
            if names_of(node) & set(keep):
                left_out = {
                    number
                    for member in getattr(node, "body", ())
                    if f"-{node.name}.{getattr(member, 'name', '')}" in keep
                    for number in range(first_line(member), member.end_lineno + 2)
                }
                lines = enumerate(source.splitlines(), 1)
                span = range(first_line(node), node.end_lineno + 1)
                kept.append("\n".join(text for n, text in lines if n in span and n not in left_out))
        for node in ast.parse(self.source).body:  # with what the holes use
            if names_of(node) & set(keep):
                used |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                node.names = [n for n in node.names if (n.asname or n.name).split(".")[0] in used]
                imports += [ast.unparse(node)] if node.names else []
        return imports, kept

    def _emptied(self, mark: re.Match) -> str:
        empty = f'{mark[1]}raise NotImplementedError("hole {mark[2]}")\n'
        return empty if mark[2] in self.tasks else mark[3]


@dataclass
class Answer:
    """A student's file, and the lessons that its holes were cut from."""

    path: Path
    lessons: list[Lesson]

    @cached_property
    def tree(self) -> ast.Module:
        """Parse the file. Raises: UsageError with the line where it is no Python."""
        try:
            return ast.parse(self.path.read_text(), str(self.path))
        except OSError as error:
            raise UsageError(f"--file {self.path}: {error.strerror}") from error
        except (SyntaxError, ValueError) as error:  # the second: a byte that is no text
            line, text = getattr(error, "lineno", None), getattr(error, "msg", error)
            where = f", line {line}" if line else ""
            raise UsageError(f"--file {self.path}{where}: {text}") from error

    def missing(self, hole: str) -> str | None:
        """Say what of a hole is not there, or still empty; None if a student has filled it."""
        functions = functions_of(self.tree)
        for name in self.parts(hole):
            if name not in functions:
                return f"there is no {name} in {self.path.name}"
            if f"NotImplementedError('hole {hole}')" in ast.unparse(functions[name]):
                return f"{name} is still empty (line {functions[name].lineno})"
        return None

    def parts(self, hole: str) -> list[str]:
        return [name for lesson in self.lessons for name in lesson.holes.get(hole, ())]

    def module(self, hole: str | None) -> types.ModuleType:
        """Run the file, with the lessons' own lines in all holes but this one.

        None: in all holes. TOGETHER: in none, the answer stands alone.
        """
        for lesson in self.lessons:  # its parts
            sys.path.insert(0, str((REPO / lesson.path).parent))
        module = types.ModuleType("answer")
        module.__file__ = str(self.path)
        sys.modules["answer"] = module
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)
        for lesson in self.lessons if hole != TOGETHER else ():
            others = {name for other, names in lesson.holes.items() if other != hole
                      for name in names}  # fmt: skip
            for name in others - set(self.parts(hole)) if hole else others:
                _put(module, name, lesson.functions[name], lesson.path)
        return module


def _put(module: types.ModuleType, name: str, node: ast.FunctionDef, path: str) -> None:
    """Define a lesson's function in an answer, among the answer's own names."""
    owner, _, own = name.rpartition(".")
    if owner and not hasattr(module, owner):
        return  # a lesson of another file of the lab
    place: dict = {}
    # An answer may lack what the lesson imports for its annotations: they stay text.
    code = compile(ast.Module([node], []), path, "exec", __future__.annotations.compiler_flag)
    exec(code, module.__dict__, place)
    setattr(getattr(module, owner) if owner else module, own, place[own])


def starter_of(title: str, lessons: list[Lesson], keep: dict[str, tuple[str, ...]]) -> str:
    """Return a lab's starter.py: what its lessons give, with holes.

    `title` is the first line of its docstring; `keep` names what to keep of each lesson.
    """
    imports, bodies = [], []
    for lesson in lessons:
        more, kept = lesson.starter(keep[lesson.path])
        imports += [line for line in more if line not in imports]
        bodies += kept
    text = f'"""{title}"""\n' + "\n".join(["", *imports, "", *bodies])
    return _tidy(text)


def _tidy(text: str) -> str:
    """Sort imports and space definitions as everywhere here."""
    ruff, config = [sys.executable, "-m", "ruff"], ["--config", str(REPO / "pyproject.toml")]
    for command in (["check", "--select", "I", "--fix", "--quiet"], ["format", "--quiet"]):
        command = [*ruff, *command, *config, "--stdin-filename", "starter.py", "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True).stdout
    return text
