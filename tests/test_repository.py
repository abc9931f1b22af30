"""The layout as one table of rules: four files a lesson, imports downward, every page listed."""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from functools import cache
from pathlib import Path

import pytest
import tomllib
from conftest import REPO, run_command
from page_reader import PAGES, PARTS, TRACKED, commands, lessons_in_order, read

# Folders beside the lessons.
DATA = {"images", "configs", "failures", "frameworks", "launch_files", "recorded"}
# The ladder, in plain PyTorch: test_ladder.py holds it. The first two have no page of their name.
FIRST_STEPS = {
    "hello_ranks", "single_process", "hello_collectives", "ddp_minimal", "fsdp_minimal",
    "deepspeed_minimal", "tensor_minimal", "pipeline_minimal", "context_minimal", "expert_minimal",
    "hf_minimal",
}  # fmt: skip
TEMPLATES = {
    "ddp_training", "fsdp_transformer", "fsdp_finetune", "deepspeed_train", "hybrid_parallelism"
}  # fmt: skip
# Scripts without a page: they write a model or pictures for the pages of other scripts.
MAKERS = {"make_tiny_llama", "make_tokens", "figures"}
LESSONS = tomllib.loads((REPO / "tests" / "lessons.toml").read_text())


@cache
def scripts(folder: str) -> list[str]:
    """Return the stems of a module's scripts: what stands beside its pages."""
    return [Path(p).stem for p in TRACKED if re.fullmatch(rf"{folder}/\w+\.py", p)]


@cache
def parts(folder: str) -> list[str]:
    found = (re.fullmatch(rf"{folder}/{PARTS[folder]}/(\w+)\.py", path) for path in TRACKED)
    return [match[1] for match in found if match and match[1] != "__init__"]


@cache
def imports(path: str) -> set[str]:
    """Return the modules that a file imports, with the names taken from a package of ours."""
    found = set()
    for node in ast.walk(ast.parse((REPO / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            ours = node.module in {*PARTS.values(), "legacy_common", "legacy_common.lab"}
            found |= {f"{node.module}.{a.name}" for a in node.names} if ours else {node.module}
    return found


def strays(folder: str):
    """In a module's folder stand lessons with their pages, launchers, data, and one package."""
    for path in TRACKED:
        name, _, rest = path.removeprefix(f"{folder}/").partition("/")
        stem, _, ending = name.rpartition(".")
        known = name in {*DATA, PARTS[folder]} if rest else ending in {"md", "sh", "sbatch", "toml"}
        lesson = ending == "py" and (
            stem in FIRST_STEPS | MAKERS or f"{folder}/{stem}.md" in TRACKED
        )
        if path.startswith(f"{folder}/") and not (known or lesson):
            yield f"{path}: a script needs a page of its name"


def unstarted(folder: str):
    """A lesson with a main ends by running it: its page's commands are run on forks."""
    for stem in set(scripts(folder)) - MAKERS:
        source = (REPO / folder / f"{stem}.py").read_text()
        starts = source.endswith('if __name__ == "__main__":\n    cli.run(main)\n')
        if "\ndef main(" in source and not starts:
            yield f"{folder}/{stem}.py does not end with cli.run(main)"


def untested(folder: str):
    """A lesson has a row in lessons.toml, or tests in a file named after it."""
    number = folder[:2] if folder[0] == "0" else "benchmarks"
    for lesson in set(scripts(folder)) - FIRST_STEPS - MAKERS:
        has_row = f"{folder}/{lesson}.py" in LESSONS
        if not has_row and f"tests/test_{number}_{lesson}.py" not in TRACKED:
            yield f"{folder}/{lesson}.py has neither a row nor tests/test_{number}_{lesson}.py"


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
    """Templates, and all scripts of a module without parts, import no legacy_common."""
    finished = set(scripts(folder)) if not PARTS[folder] else TEMPLATES & set(scripts(folder))
    for stem in finished:
        path = f"{folder}/{stem}.py"
        for name in imports(path):
            if name.split(".")[0] in {"legacy_common", *PARTS.values()}:
                yield f"{path} imports {name}: dist_common has what scripts share"


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
            if module in modules and modules.index(module) > modules.index(folder):
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
# Without runtime.init: their groups are fake.
PLAIN = FIRST_STEPS | {"launchers", "fsdp_memory", "check_config"}


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
        assert not tops & {"dist_common", "legacy_common", *PARTS.values()}, path
        assert not tops & {stem for folder in PARTS for stem in scripts(folder)}, path


def test_legacy_common_imports_downward():
    """Nothing there knows a lesson, and nothing but lab knows lab: a copy goes without it."""
    scripts_and_parts = {name for folder in PARTS for name in [*scripts(folder), *PARTS.values()]}
    for path in TRACKED:
        if re.fullmatch(r"legacy_common/.*\.py", path):
            tops = {name.split(".")[0] for name in imports(path)}
            assert not tops & scripts_and_parts, path
            if not path.startswith("legacy_common/lab/"):
                assert not any(name.startswith("legacy_common.lab") for name in imports(path)), path


def test_moved_files_have_88_columns():
    """In folders whose other files have 100 columns, ruff leaves them to this test."""
    settings = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["ruff"]
    moved = [path for path in settings["extend-exclude"] if path.endswith(".py")]
    for command in (["check"], ["format", "--check"]):
        words = [*command, "--config", "dist_common/ruff.toml", *moved]
        ended = run_command([sys.executable, "-m", "ruff", *words], REPO, 60)
        assert ended.codes == [0], ended.stdout


def test_launchers_take_their_lessons_from_the_folder():
    for path in TRACKED:
        if re.fullmatch(r".*/launch_\w+\.sh", path):
            assert "known=" not in (REPO / path).read_text(), f"{path} has a list of its own"


# Budgets

# The size of a folder is the number of its Python tokens divided by 8: about one line of code at
# 88 columns, whatever the formatting. The limit is today's size: a change may lower it, never
# raise it. The budget is the size that the folder has to reach.
LIMITS_AND_BUDGETS = {
    "dist_common": (1_600, 1_600),
    "legacy_common": (1_771, 0),
    "01-ddp-basics": (1_500, 1_500),
    "02-fsdp": (2_300, 2_300),
    "03-deepspeed": (1_600, 1_600),
    "04-nccl-operations": (2_300, 2_300),
    "05-advanced": (4_000, 4_000),
    "benchmarks": (4_698, 3_000),
    "cluster": (2_900, 2_900),
    "planner": (5_480, 4_600),
    "labs": (4_586, 4_400),
    "site": (1_500, 1_500),  # with its lines of JavaScript and CSS
    "tests": (18_000, 18_000),
}
# What a reader of a template has to open, with everything that it imports from here.
FILES_AND_SIZES = {
    "01-ddp-basics/ddp_training.py": (9, 1_452),
    "02-fsdp/fsdp_transformer.py": (9, 1_466),
    "02-fsdp/fsdp_finetune.py": (9, 1_521),
    "03-deepspeed/deepspeed_train.py": (10, 1_584),
    "05-advanced/hybrid_parallelism.py": (9, 1_655),
}
BUDGET_OF_FILES, BUDGET_OF_SIZE = 10, 1_700
# Pages of modules, programs and benchmarks; words and commands of all pages.
PAGES_LIMIT, PAGES_BUDGET = 78, 75
WORDS_LIMIT, WORDS_BUDGET = 126_500, 100_000
COMMANDS_LIMIT, COMMANDS_BUDGET = 254, 200
TRAINING_COMMANDS_OF_A_PAGE = 4

LAYOUT_TOKENS = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


@cache
def size(path: str) -> int:
    """Return the tokens of a Python file without comments and docstrings, divided by 8."""
    with tokenize.open(REPO / path) as file:
        tokens = list(tokenize.generate_tokens(file.readline))
    docstrings = ('"""', "'''")
    counted = [
        token
        for token in tokens
        if token.type not in LAYOUT_TOKENS
        and not (token.type == tokenize.STRING and token.string.startswith(docstrings))
    ]
    return len(counted) // 8


def size_of_folder(folder: str) -> int:
    """Return the size of a folder's Python; the site counts JavaScript and CSS by the line."""
    files = [path for path in TRACKED if path.startswith(f"{folder}/")]
    total = sum(size(path) for path in files if path.endswith(".py"))
    if folder == "site":
        scripts_and_styles = [path for path in files if path.endswith((".js", ".css"))]
        total += sum(len((REPO / path).read_text().splitlines()) for path in scripts_and_styles)
    return total


def opened_by(script: str) -> set[str]:
    """Return the files of the repository that a script imports, directly or not, and itself."""
    opened, left = set(), {script}
    while left:
        path = left.pop()
        opened.add(path)
        for node in ast.walk(ast.parse((REPO / path).read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            else:
                continue
            stems = {name.replace(".", "/") for name in names}
            stems |= {f"{Path(script).parent}/{stem}" for stem in stems}
            candidates = {f"{stem}.py" for stem in stems} | {
                f"{stem}/__init__.py" for stem in stems
            }
            left |= candidates & set(TRACKED) - opened
    return {path for path in opened if size(path) or not path.endswith("__init__.py")}


def training_commands(page: str) -> list[str]:
    """Return a page's commands that train: they start ranks, and do more than send messages."""
    starts = r"(?:^|\s)(?:torchrun|deepspeed|srun|mpirun|accelerate)\s|launch_\w+\.sh local"
    found = [command for block in read(page).blocks if block.language == "bash"
             for _, command in commands(block)]  # fmt: skip
    started = [command for command in found if re.search(starts, command)]
    other = r"--dry-run|04-nccl-operations/|/hello_\w+\.py"
    return [command for command in started if not re.search(other, command)]


def measured() -> dict[str, tuple[int, int, int]]:
    """Return (measured, limit, budget) for everything that has a budget."""
    rows = {
        folder: (size_of_folder(folder), limit, budget)
        for folder, (limit, budget) in LIMITS_AND_BUDGETS.items()
    }
    for template, (files, total) in FILES_AND_SIZES.items():
        opened = opened_by(template)
        rows[f"{template}: files opened"] = (len(opened), files, BUDGET_OF_FILES)
        rows[f"{template}: their size"] = (sum(map(size, opened)), total, BUDGET_OF_SIZE)
    apart = ("labs/", "site/", "benchmarks/results/")
    pages = [path for path in TRACKED if path.endswith(".md")]
    counted = [path for path in pages if "/" in path and not path.startswith(apart)]
    words = sum(len((REPO / path).read_text().split()) for path in pages)
    shown = sum(len(commands(block)) for page in PAGES
                for block in read(page).blocks if block.language == "bash")  # fmt: skip
    rows["pages"] = (len(counted), PAGES_LIMIT, PAGES_BUDGET)
    rows["words"] = (words, WORDS_LIMIT, WORDS_BUDGET)
    rows["commands"] = (shown, COMMANDS_LIMIT, COMMANDS_BUDGET)
    return rows


needs_python_3_11 = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="Python 3.12 and later split f-strings into more tokens"
)


@needs_python_3_11
@pytest.mark.xdist_group("budgets")
def test_nothing_grows():
    grown = [f"{name}: {now:,}, the limit is {limit:,}"
             for name, (now, limit, _) in measured().items() if now > limit]  # fmt: skip
    assert not grown, "\n".join(["make room, or drop something:", *grown])


@needs_python_3_11
@pytest.mark.xdist_group("budgets")
def test_limits_are_lowered_with_the_size():
    """Keep the ratchet tight: a limit far above the size would allow growth."""
    loose = [f"{name}: {now:,}, the limit is {limit:,}"
             for name, (now, limit, budget) in measured().items()
             if now < 0.98 * limit and limit > budget]  # fmt: skip
    assert not loose, "\n".join(["lower these limits to today's numbers:", *loose])


def test_the_guide_imports_no_program():
    """No lesson and nothing of legacy_common imports the planner or the cluster programs."""
    for path in TRACKED:
        if re.fullmatch(r"(0[1-5]-|legacy_common/).*\.py", path):
            tops = {name.split(".")[0] for name in imports(path)}
            assert not tops & {"planner", "cluster"}, path


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_few_commands_that_train(page):
    found = training_commands(page)
    assert len(found) <= TRAINING_COMMANDS_OF_A_PAGE, "\n".join([f"{page}:", *found])


@pytest.mark.xdist_group("seen")
def test_groups_of_tests_stay_on_one_worker(request):
    """Or clocks run beside clocks: pytest 9.2 takes no notice of pytest-xdist 3.8's groups."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("not run with -n 2 --dist loadgroup, as make test does")
    assert request.node.nodeid.endswith("@seen")


def main() -> None:
    """Print every number that has a limit, with its budget."""
    for name, (now, limit, budget) in measured().items():
        print(f"{name:50}{now:9,}   limit {limit:7,}   budget {budget:7,}")


if __name__ == "__main__":
    main()
