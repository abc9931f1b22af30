"""The layout as one table of rules: four files a lesson, imports downward, every page listed."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from conftest import REPO
from page_reader import PARTS, TRACKED, lessons_in_order

# Folders beside the lessons.
DATA = {"images", "configs", "failures", "frameworks", "launch_files", "recorded"}
# The ladder, in plain PyTorch: test_ladder.py holds it. The first two have no page of their name.
FIRST_STEPS = {
    "hello_ranks", "single_process", "hello_collectives", "ddp_minimal", "fsdp_minimal",
    "deepspeed_minimal", "tensor_minimal", "pipeline_minimal", "context_minimal", "expert_minimal",
}  # fmt: skip
TEMPLATES = {
    "ddp_training", "fsdp_transformer", "fsdp_finetune", "deepspeed_train", "hybrid_parallelism"
}  # fmt: skip
LAB = re.compile(r"# proofs: a copy deletes these lines$.*?# end of proofs$", re.M | re.S)
LESSON_LINES, TOOL_LINES, PART_LINES = 150, 250, 260
SHARED_LINES, LAB_LINES = 1300, 700


@cache
def scripts(folder: str) -> list[str]:
    """Return the stems of a module's scripts: what stands beside its pages."""
    return [Path(p).stem for p in TRACKED if re.fullmatch(rf"{folder}/\w+\.py", p)]


@cache
def parts(folder: str) -> list[str]:
    found = (re.fullmatch(rf"{folder}/{PARTS[folder]}/(\w+)\.py", path) for path in TRACKED)
    return [match[1] for match in found if match and match[1] != "__init__"]


@cache
def imports(path: str, source: str | None = None) -> set[str]:
    """Return the modules that a file imports, with the names taken from a package of ours."""
    found = set()
    for node in ast.walk(ast.parse(source or (REPO / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            ours = node.module in {*PARTS.values(), "dist_common", "dist_common.lab"}
            found |= {f"{node.module}.{a.name}" for a in node.names} if ours else {node.module}
    return found


def strays(folder: str):
    """In a module's folder stand lessons with their pages, launchers, data, and one package."""
    for path in TRACKED:
        name, _, rest = path.removeprefix(f"{folder}/").partition("/")
        stem, _, ending = name.rpartition(".")
        known = name in {*DATA, PARTS[folder]} if rest else ending in {"md", "sh", "sbatch", "toml"}
        known |= name.endswith(".html.j2")
        lesson = ending == "py" and (stem in FIRST_STEPS or f"{folder}/{stem}.md" in TRACKED)
        if path.startswith(f"{folder}/") and not (known or lesson):
            yield f"{path}: write its page, or move it to {PARTS[folder]}/"


def unstarted(folder: str):
    """A lesson with a main ends by running it: its page's commands are run on forks."""
    for stem in scripts(folder):
        source = (REPO / folder / f"{stem}.py").read_text()
        starts = source.endswith('if __name__ == "__main__":\n    cli.run(main)\n')
        if "\ndef main(" in source and not starts:
            yield f"{folder}/{stem}.py does not end with cli.run(main)"


def untested(folder: str):
    """A lesson's tests stand in a file named after it."""
    number = folder[:2] if folder[0] == "0" else "benchmarks"
    for lesson in set(scripts(folder)) - FIRST_STEPS:
        if f"tests/test_{number}_{lesson}.py" not in TRACKED:
            yield f"{folder}/{lesson}.py: no tests/test_{number}_{lesson}.py"


def unlisted(folder: str):
    """A module's README lists each of its pages, and each script has a place in the order."""
    text = (REPO / folder / "README.md").read_text()
    for path in TRACKED:
        match = re.fullmatch(rf"{folder}/(\w+\.md)", path)
        if match and match[1] != "README.md" and f"({match[1]}" not in text:
            yield f"{path} is not in {folder}/README.md"


def sideways(folder: str):
    """Lessons import their own part, parts by topic and earlier lessons; parts no later lesson."""
    order, own_parts, package = lessons_in_order(folder), parts(folder), PARTS[folder]
    others = {other for name, other in PARTS.items() if name != folder}
    elsewhere = {script for name in PARTS if name != folder for script in scripts(name)}
    for stem in [*scripts(folder), *own_parts]:
        is_part = stem in own_parts and stem not in scripts(folder)
        for kind in ("script", "part"):
            path = f"{folder}/{stem}.py" if kind == "script" else f"{folder}/{package}/{stem}.py"
            if path not in TRACKED:
                continue
            for name in imports(path):
                top, _, rest = name.partition(".")
                if top in others or top in elsewhere - set(scripts(folder)):
                    yield f"{path} imports {name}, of another module"
                if top in scripts(folder) and kind == "part" and top == stem:
                    yield f"{path} imports the lesson that it serves"
                if top in scripts(folder) and kind == "script" and not is_part:
                    known = top in order and stem in order
                    if known and order.index(top) >= order.index(stem):
                        yield f"{path} imports {top}, a later lesson"
                if top == package and kind == "script":
                    part = rest.split(".")[0]
                    if part in scripts(folder) and part != stem:
                        yield f"{path} imports {name}, the part of another lesson"


def armour(folder: str):
    """A template imports parts and lab between its two comments alone."""
    for stem in TEMPLATES & set(scripts(folder)):
        path = f"{folder}/{stem}.py"
        for name in imports(path, LAB.sub("pass", (REPO / path).read_text())):
            if name.startswith(("dist_common.lab", PARTS[folder])):
                yield f"{path} imports {name} outside of its proofs"


def lone_parts(folder: str):
    """A part serves the lesson of its name, or several files."""
    package = PARTS[folder]
    users = [p for p in TRACKED if p.startswith(f"{folder}/") and p.endswith(".py")]
    for part in set(parts(folder)) - set(scripts(folder)):
        named = re.compile(rf"\b{part}\b")
        found = [p for p in users if Path(p).stem != part and named.search((REPO / p).read_text())]
        if len(found) < 2 and folder != "benchmarks":
            yield f"{folder}/{package}/{part}.py: named after no lesson, and used in {found}"


def too_early(folder: str):
    """What a page wants read before stands earlier, in its module or in one before it."""
    modules = list(PARTS)
    order = lessons_in_order(folder)
    for path in (path for path in TRACKED if re.fullmatch(rf"{folder}/\w+\.md", path)):
        stem, text = Path(path).stem, (REPO / path).read_text()
        wanted = " ".join(re.findall(r"Read (?:first|before):(\s.*?)\.(?:\s|$)", text, re.S))
        for before in re.findall(r"\]\((\w+)\.md", wanted):
            known = before in order and stem in order
            if known and order.index(before) >= order.index(stem):
                yield f"{path} wants {before}.md read first, which comes later"
        for module in re.findall(r"\]\(\.\./([\w-]+)/", wanted):
            if modules.index(module) > modules.index(folder):
                yield f"{path} wants a page of {module} read first, which comes later"


def wrong_next(folder: str):
    """The link after "Next:" leads to the lesson that follows in the module's order."""
    order = lessons_in_order(folder)
    for stem, following in zip(order, [*order[1:], ""], strict=True):
        page = REPO / folder / f"{stem}.md"
        text = page.read_text() if page.exists() else ""
        for named in re.findall(r"Next:[^\[]*\[[^\]]*\]\((\w+)\.md", text):
            if named != following:
                yield f"{folder}/{stem}.md: next is {following}.md, not {named}.md"


# What rank 0 does alone may take long, and the deadlock of a lesson is to end soon.
OWN_TIMEOUTS = {"FILES_TIMEOUT", "PATIENCE", "timedelta(seconds=DEADLOCK_S)",
                "timedelta(seconds=timeout_s)"}  # fmt: skip
# Without runtime.init: its groups are fake, or made anew after each loss.
PLAIN = FIRST_STEPS | {"launchers", "fsdp_memory", "recovery_in_memory"}


def groups(folder: str):
    """--timeout reaches every group: runtime.init makes the first one, and the others' default."""
    for stem in {*scripts(folder), *parts(folder)} - PLAIN:
        for path in (f"{folder}/{stem}.py", f"{folder}/{PARTS[folder]}/{stem}.py"):
            source = (REPO / path).read_text() if path in TRACKED else ""
            for call in (
                node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)
            ):
                name = ast.unparse(call.func).rpartition(".")[2]
                own = {ast.unparse(key.value) for key in call.keywords if key.arg == "timeout"}
                made = name in ("new_group", "split_group") or name.startswith("new_subgroups")
                alone = "HashStore" in ast.unparse(call)  # a group of one waits for nobody
                if (name == "init_process_group" and not alone) or (made and own - OWN_TIMEOUTS):
                    yield f"{path}: {ast.unparse(call)}"


RULES = [
    strays,
    unstarted,
    untested,
    unlisted,
    sideways,
    armour,
    lone_parts,
    too_early,
    wrong_next,
    groups,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("folder", PARTS)
def test_the_layout(folder, rule):
    broken = "\n".join(sorted(rule(folder)))
    assert not broken, f"{rule.__doc__}\n{broken}"


def test_first_steps_import_nothing_of_ours():
    paths = [path for path in TRACKED if Path(path).stem in FIRST_STEPS and path.endswith(".py")]
    assert len(paths) == len(FIRST_STEPS)
    for path in paths:
        tops = {name.split(".")[0] for name in imports(path)}
        assert tops <= {"os", "torch", "sklearn", "warnings", "deepspeed"}, path


def test_dist_common_imports_downward():
    """Nothing there knows a lesson, and nothing but lab knows lab: a copy goes without it."""
    scripts_and_parts = {name for folder in PARTS for name in [*scripts(folder), *PARTS.values()]}
    for path in TRACKED:
        if re.fullmatch(r"dist_common/.*\.py", path):
            tops = {name.split(".")[0] for name in imports(path)}
            assert not tops & scripts_and_parts, path
            if not path.startswith("dist_common/lab/"):
                assert not any(name.startswith("dist_common.lab") for name in imports(path)), path


def test_launchers_take_their_lessons_from_the_folder():
    for path in TRACKED:
        if re.fullmatch(r".*/launch_\w+\.sh", path):
            assert "known=" not in (REPO / path).read_text(), f"{path} has a list of its own"


def size(path: str) -> int:
    """Return a script's lines without docstring, imports and parse_args."""
    source = (REPO / path).read_text()
    body = ast.parse(source).body
    skipped = [n for n in body if isinstance(n, (ast.Import, ast.ImportFrom))]
    skipped += [n for n in body if isinstance(n, ast.FunctionDef) and n.name == "parse_args"]
    skipped += body[:1]
    return len(source.splitlines()) - sum(n.end_lineno - n.lineno + 1 for n in skipped)


def test_sizes_that_are_over_are_said(capsys):
    """No verdict: a reason to go over belongs in the message of the commit."""
    over = []
    for folder, package in PARTS.items():
        for stem in scripts(folder):
            tool = stem in TEMPLATES or folder in ("benchmarks", "04-nccl-operations")
            limit = TOOL_LINES if tool else LESSON_LINES
            over += [(f"{folder}/{stem}.py", size(f"{folder}/{stem}.py"), limit)]
        for part in parts(folder):
            path = f"{folder}/{package}/{part}.py"
            over += [(path, len((REPO / path).read_text().splitlines()), PART_LINES)]
    shared = [p for p in TRACKED if re.fullmatch(r"dist_common/.*\.py", p)]
    lab = [p for p in shared if p.startswith("dist_common/lab/")]
    lines = {p: len((REPO / p).read_text().splitlines()) for p in shared}
    over += [("dist_common", sum(lines.values()) - sum(map(lines.get, lab)), SHARED_LINES)]
    over += [("dist_common/lab", sum(map(lines.get, lab)), LAB_LINES)]
    with capsys.disabled():
        for name, count, limit in over:
            if count > limit:
                print(f"{name}: {count} lines, {limit} are meant", file=sys.stderr)


@pytest.mark.xdist_group("seen")
def test_groups_of_tests_stay_on_one_worker(request):
    """Or clocks run beside clocks: pytest 9.2 takes no notice of pytest-xdist 3.8's groups."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("not run with -n 2 --dist loadgroup, as make test does")
    assert request.node.nodeid.endswith("@seen")
