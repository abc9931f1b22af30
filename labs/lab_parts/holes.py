"""Cut a lab's starter out of the lessons; run an answer with one hole of its own.

In a lesson, `# lab: hole NAME` and `# lab: end` enclose the lines that a student
writes. A hole may be in several functions, which are then one task. The lab's tasks.py
names the definitions of each lesson that the starter keeps.
"""

import __future__

import ast
import importlib
import re
import sys
import types
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dist_common.cli import UsageError

REPO = Path(__file__).parents[2]
TOGETHER = "together"
HOLE = re.compile(r"^( *)# lab: hole (\w+)\n(.*?)^ *# lab: end\n", re.M | re.S)


def functions_of(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Return a file's functions and methods by name: `pack`, `Overlapped.note`."""
    functions = {}
    for node in tree.body:
        is_class = isinstance(node, ast.ClassDef)
        prefix = f"{node.name}." if is_class else ""
        for member in node.body if is_class else [node]:
            if isinstance(member, ast.FunctionDef):
                functions[f"{prefix}{member.name}"] = member
    return functions


def import_lesson(path: str) -> types.ModuleType:
    """Import a lesson by its path in the repository."""
    folder = str((REPO / path).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(Path(path).stem)


def names_of(node: ast.stmt) -> set[str]:
    """Return the names that a statement of a file defines."""
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {getattr(node, "name", "")}


def lines_of(node: ast.stmt) -> range:
    """Return the numbers of a definition's lines, with its decorators."""
    decorators = getattr(node, "decorator_list", ())
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return range(first, node.end_lineno + 1)


class Lesson:
    """A lesson as a lab sees it: its source, and the functions with each hole."""

    def __init__(self, path: str, tasks: Collection[str]) -> None:
        self.path = path
        self.tasks = tasks
        self.source = (REPO / path).read_text()
        self.functions = functions_of(ast.parse(self.source))

    @cached_property
    def holes(self) -> dict[str, list[str]]:
        """Return the functions with a part of each hole, by the hole's name."""
        holes: dict[str, list[str]] = {}
        for mark in HOLE.finditer(self.source):
            line = self.source.count("\n", 0, mark.start()) + 1
            for name, node in self.functions.items():
                if mark[2] in self.tasks and node.lineno < line <= node.end_lineno:
                    holes.setdefault(mark[2], []).append(name)
        return holes

    def cut(self, keep: tuple[str, ...], solved: bool) -> tuple[list, list]:
        """Return the kept definitions, and the imports that they use.

        Their holes are empty, unless `solved`. `-Class.method` leaves a method out.
        """
        source = HOLE.sub(r"\3" if solved else self.empty_hole, self.source)
        nodes = [n for n in ast.parse(source).body if names_of(n) & set(keep)]
        lines = source.splitlines()
        kept = []
        for node in nodes:
            left_out = set()
            for member in getattr(node, "body", ()):
                if f"-{node.name}.{getattr(member, 'name', '')}" in keep:
                    span = lines_of(member)
                    left_out |= {*span, span.stop}  # and the blank line
            numbers = [n for n in lines_of(node) if n not in left_out]
            text = "\n".join(lines[n - 1] for n in numbers).rstrip()
            kept.append((isinstance(node, ast.Assign), text))
        # The holes may use names that the rest does not use.
        used, tree = set(), ast.parse(self.source)
        for node in tree.body:
            if names_of(node) & set(keep):
                used |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        imports = []
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [(n.asname or n.name).split(".")[0] for n in node.names]
                pairs = zip(node.names, names, strict=True)
                node.names = [alias for alias, name in pairs if name in used]
                imports += [node] if node.names else []
        return kept, imports

    def empty_hole(self, mark: re.Match) -> str:
        if mark[2] not in self.tasks:
            return mark[3]
        return f'{mark[1]}raise NotImplementedError("hole {mark[2]}")\n'


def make_starter(
    title: str,
    lessons: list[Lesson],
    keep: dict[str, tuple[str, ...]],
    solved: bool = False,
) -> str:
    """Return a lab's starter: definitions of its lessons, with or without holes.

    `title` is the first line of its docstring; `keep` names the definitions.
    """
    groups: list[set[str]] = [set(), set(), set()]  # standard library, packages, ours
    body, after_assignment = "", True
    for lesson in lessons:
        kept, imports = lesson.cut(keep[lesson.path], solved)
        for node in imports:
            module = getattr(node, "module", None) or node.names[0].name
            top = module.split(".")[0]
            group = 0 if top in sys.stdlib_module_names else 1
            groups[2 if top == "dist_common" else group].add(ast.unparse(node))
        for is_assignment, text in kept:
            together = is_assignment and after_assignment
            body += f"\n{text}" if together else f"\n\n\n{text}"
            after_assignment = is_assignment
    head = "\n\n".join("\n".join(sorted(group, key=place)) for group in groups if group)
    return f'"""{title}"""\n\n{head}\n{body}\n'


def place(line: str) -> tuple[bool, str]:
    """Sort `import x` before `from x import y`."""
    return line.startswith("from"), line


@dataclass
class Answer:
    """A student's file, and the lessons that its holes were cut from."""

    path: Path
    lessons: list[Lesson]

    @cached_property
    def tree(self) -> ast.Module:
        """Parse the file. Raises: UsageError with the line that is not Python."""
        try:
            return ast.parse(self.path.read_text(), str(self.path))
        except OSError as error:
            raise UsageError(f"--file {self.path}: {error.strerror}") from error
        except (SyntaxError, ValueError) as error:  # ValueError: not text
            line = getattr(error, "lineno", None)
            text = getattr(error, "msg", error)
            where = f", line {line}" if line else ""
            raise UsageError(f"--file {self.path}{where}: {text}") from error

    def missing(self, hole: str) -> str | None:
        """Say what of a hole is missing or still empty; None if it is filled."""
        functions = functions_of(self.tree)
        for name in self.parts(hole):
            if name not in functions:
                return f"there is no {name} in {self.path.name}"
            if f"NotImplementedError('hole {hole}')" in ast.unparse(functions[name]):
                return f"{name} is still empty (line {functions[name].lineno})"
        return None

    def parts(self, hole: str) -> list[str]:
        return [name for lesson in self.lessons for name in lesson.holes.get(hole, ())]

    def module(self, hole: str) -> types.ModuleType:
        """Run the file, with the lessons' own lines in all holes but this one.

        TOGETHER leaves all holes as they are.
        """
        for lesson in self.lessons:
            sys.path.insert(0, str((REPO / lesson.path).parent))
        module = types.ModuleType("answer")
        module.__file__ = str(self.path)
        sys.modules["answer"] = module
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)
        if hole == TOGETHER:
            return module
        for lesson in self.lessons:
            for other, names in lesson.holes.items():
                for name in names:
                    if other != hole and name not in self.parts(hole):
                        define(module, name, lesson.functions[name], lesson.path)
        return module


def define(module: types.ModuleType, name: str, node: ast.FunctionDef, path: str):
    """Define a lesson's function in an answer, among the answer's names."""
    owner, _, function = name.rpartition(".")
    if owner and not hasattr(module, owner):
        return  # the answer is one lesson of a lab with several
    # An answer may not import the names of annotations: they stay text.
    flag = __future__.annotations.compiler_flag
    scope: dict = {}
    exec(compile(ast.Module([node], []), path, "exec", flag), module.__dict__, scope)
    setattr(getattr(module, owner) if owner else module, function, scope[function])
