"""Cut a lab's starter out of the lessons, and run an answer with all holes but one filled rightly.

In a lesson, `# lab: hole NAME` and `# lab: end` stand around the lines that a student writes. A
hole may be in several functions, which are then one task. What else of a lesson the starter keeps,
the lab's tasks.py names.
"""

import ast
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dist_common.cli import UsageError

REPO = Path(__file__).parents[2]
HOLE = re.compile(r"^( *)# lab: hole (\w+)\n(.*?)^ *# lab: end\n", re.M | re.S)


def functions_of(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Return a file's functions and methods by name: `pack`, `Overlapped.note`."""
    found = {}
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        found |= {f"{prefix}{n.name}": n for n in members if isinstance(n, ast.FunctionDef)}
    return found


class Lesson:
    """A lesson as its labs see it: its source, and which function has which hole."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.source = (REPO / path).read_text()
        self.functions = functions_of(ast.parse(self.source))

    @cached_property
    def holes(self) -> dict[str, list[str]]:
        """Return the functions with a part of each hole, by the hole's name."""
        found: dict[str, list[str]] = {}
        for mark in HOLE.finditer(self.source):
            line = self.source.count("\n", 0, mark.start()) + 1
            inside = [name for name, node in self.functions.items()
                      if node.lineno < line <= node.end_lineno]  # fmt: skip
            found.setdefault(mark[2], []).extend(inside)
        return found

    def starter(self, keep: tuple[str, ...]) -> tuple[list[str], list[str]]:
        """Return the imports that the kept definitions use, and these with their holes empty."""
        kept, used, imports = [], set(), []
        source = HOLE.sub(_emptied, self.source)
        tree = ast.parse(source)
        for node in tree.body:
            names = {getattr(node, "name", "")}
            if isinstance(node, ast.Assign):
                names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if names & set(keep):
                first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
                kept.append("\n".join(source.splitlines()[first - 1 : node.end_lineno]))
        for node in ast.walk(ast.parse("\n".join(kept))):
            used |= {node.id} if isinstance(node, ast.Name) else set()
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                node.names = [n for n in node.names if (n.asname or n.name).split(".")[0] in used]
                imports += [ast.unparse(node)] if node.names else []
        return imports, kept


def _emptied(mark: re.Match) -> str:
    return f'{mark[1]}raise NotImplementedError("hole {mark[2]}")\n'


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
        """Run the file, with the lessons' own lines in all holes but this one (None: in none)."""
        for lesson in self.lessons:  # its parts
            sys.path.insert(0, str((REPO / lesson.path).parent))
        module = types.ModuleType("answer")
        module.__file__ = str(self.path)
        sys.modules["answer"] = module
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)
        for lesson in self.lessons:
            others = {name for other, names in lesson.holes.items() if other != hole
                      for name in names}  # fmt: skip
            for name in others - set(self.parts(hole)) if hole else others:
                _put(module, name, lesson.functions[name], lesson.path)
        return module


def _put(module: types.ModuleType, name: str, node: ast.FunctionDef, path: str) -> None:
    """Define a lesson's function in an answer, among the answer's own names."""
    owner, _, own = name.rpartition(".")
    place: dict = {}
    exec(compile(ast.Module([node], []), path, "exec"), module.__dict__, place)
    setattr(getattr(module, owner) if owner else module, own, place[own])


def starter_of(title: str, lessons: dict[str, tuple[str, ...]]) -> str:
    """Return a lab's starter.py: what its lessons give, with holes.

    `title` is the first line of its docstring; `lessons` names what to keep of each.
    """
    imports, bodies = [], []
    for path, keep in lessons.items():
        more, kept = Lesson(path).starter(keep)
        imports += [line for line in more if line not in imports]
        bodies += kept
    text = f'"""{title}"""\n' + "\n".join(["", *imports, "", *bodies])
    return _tidy(text)


def _tidy(text: str) -> str:
    """Sort imports and space definitions as everywhere here."""
    ruff, config = [sys.executable, "-m", "ruff"], ["--config", str(REPO / "pyproject.toml")]
    for command in (["check", "--select", "I,F401", "--fix", "--quiet"], ["format", "--quiet"]):
        command = [*ruff, *command, *config, "--stdin-filename", "starter.py", "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True).stdout
    return text


def holes_of(lessons: list[Lesson]) -> Iterator[str]:
    """Yield the names of all holes, in the order of the lessons' lines."""
    yield from dict.fromkeys(hole for lesson in lessons for hole in lesson.holes)
