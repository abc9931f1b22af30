"""The rules of the layout and the budgets of the repository."""

import ast
import re
import sys
import tokenize
import tomllib
from functools import cache
from pathlib import Path

import pytest
from conftest import REPO
from page_reader import (
    MODULES,
    PAGES,
    TRACKED,
    commands,
    imports,
    lessons_in_order,
    opened_by,
    read,
)

# Folders next to the lessons.
DATA = {"images", "configs", "failures", "launch_files"}
# First steps, in plain PyTorch: test_ladder.py tests them.
FIRST_STEPS = {
    "hello_ranks",
    "single_process",
    "hello_collectives",
    "ddp_minimal",
    "fsdp_minimal",
    "deepspeed_minimal",
    "tensor_minimal",
    "pipeline_minimal",
    "context_minimal",
    "expert_minimal",
    "hf_minimal",
}
TEMPLATES = (
    "01-ddp-basics/ddp_training.py",
    "02-fsdp/fsdp_transformer.py",
    "02-fsdp/fsdp_finetune.py",
    "03-deepspeed/deepspeed_train.py",
    "05-advanced/hybrid_parallelism.py",
)
# Scripts without a page: they write a model or pictures for the pages of other scripts.
MAKERS = {"make_tiny_llama", "make_tokens", "figures"}
LESSONS = tomllib.loads((REPO / "tests" / "lessons.toml").read_text())


@cache
def scripts(folder):
    """Return the stems of a module's scripts."""
    return [Path(p).stem for p in TRACKED if re.fullmatch(rf"{folder}/\w+\.py", p)]


def packages(path):
    return {name.split(".")[0] for name in imports(path)}


# Rules for a module's folder: each yields what breaks it.


def strays(folder):
    """A module's folder holds lessons with their pages, launchers and data."""
    for path in TRACKED:
        if not path.startswith(f"{folder}/"):
            continue
        name, _, rest = path.removeprefix(f"{folder}/").partition("/")
        stem, _, ending = name.rpartition(".")
        if rest:
            known = name in DATA
        elif ending == "py":
            known = stem in FIRST_STEPS | MAKERS or f"{folder}/{stem}.md" in TRACKED
        else:
            known = ending in {"md", "sh", "sbatch", "toml"}
        if not known:
            yield f"{path}: a script needs a page of its name"


def unstarted(folder):
    """A lesson with a main ends by running it."""
    for stem in set(scripts(folder)) - MAKERS:
        source = (REPO / folder / f"{stem}.py").read_text()
        starts = source.endswith('if __name__ == "__main__":\n    cli.run(main)\n')
        if "\ndef main(" in source and not starts:
            yield f"{folder}/{stem}.py does not end with cli.run(main)"


def untested(folder):
    """A lesson has a row in lessons.toml, or tests in a file named after it."""
    for stem in set(scripts(folder)) - FIRST_STEPS - MAKERS:
        test_file = f"tests/test_{folder[:2]}_{stem}.py"
        if f"{folder}/{stem}.py" not in LESSONS and test_file not in TRACKED:
            yield f"{folder}/{stem}.py has neither a row nor {test_file}"


def unlisted(folder):
    """A module's README lists each of its pages."""
    text = (REPO / folder / "README.md").read_text()
    for path in TRACKED:
        match = re.fullmatch(rf"{folder}/(\w+\.md)", path)
        if match and match[1] != "README.md" and f"({match[1]}" not in text:
            yield f"{path} is not in {folder}/README.md"


def sideways(folder):
    """A lesson imports dist_common and earlier lessons of its module, nothing else."""
    order, stems = lessons_in_order(folder), set(scripts(folder))
    others = {name for other in MODULES if other != folder for name in scripts(other)}
    for stem in stems:
        path = f"{folder}/{stem}.py"
        for name in packages(path):
            if name in {"planner", "cluster", "cluster_parts", *others - stems}:
                yield f"{path} imports {name}, of another folder"
            if (
                name in order
                and stem in order
                and order.index(name) >= order.index(stem)
            ):
                yield f"{path} imports {name}, a later lesson"


def too_early(folder):
    """Pages that a page wants read first stand before it."""
    order = lessons_in_order(folder)
    for path in (path for path in TRACKED if re.fullmatch(rf"{folder}/\w+\.md", path)):
        stem, text = Path(path).stem, (REPO / path).read_text()
        asked = re.findall(r"Read (?:first|before):(\s.*?)\.(?:\s|$)", text, re.S)
        wanted = " ".join(asked)
        for before in re.findall(r"\]\((\w+)\.md", wanted):
            known = before in order and stem in order
            if known and order.index(before) >= order.index(stem):
                yield f"{path} wants {before}.md read first, which comes later"
        for module in re.findall(r"\]\(\.\./([\w-]+)/", wanted):
            if module in MODULES and MODULES.index(module) > MODULES.index(folder):
                yield f"{path} wants a page of {module} read first, which comes later"


def wrong_next(folder):
    """The link after "Next:" leads to the lesson that follows in the module's order."""
    order = lessons_in_order(folder)
    for stem, following in zip(order, [*order[1:], ""], strict=True):
        page = REPO / folder / f"{stem}.md"
        text = page.read_text() if page.exists() else ""
        for named in re.findall(r"Next:[^\[]*\[[^\]]*\]\((\w+)\.md", text):
            if named != following:
                yield f"{folder}/{stem}.md: next is {following}.md, not {named}.md"


# A group may have a timeout of its own only where rank 0 works alone for long, or where
# a lesson wants its deadlock to end soon.
GROUP_TIMEOUTS = {
    "FILES_TIMEOUT",
    "PATIENCE",
    "timedelta(seconds=DEADLOCK_S)",
    "timedelta(seconds=timeout_s)",
}
# These make no group, or a fake one.
WITHOUT_INIT = FIRST_STEPS | {"launchers", "fsdp_memory", "check_config"}


def groups(folder):
    """runtime.init makes the first group, so that --timeout reaches every group."""
    for stem in set(scripts(folder)) - WITHOUT_INIT:
        path = f"{folder}/{stem}.py"
        for call in ast.walk(ast.parse((REPO / path).read_text())):
            if not isinstance(call, ast.Call):
                continue
            name = ast.unparse(call.func).rpartition(".")[2]
            timeouts = {
                ast.unparse(word.value)
                for word in call.keywords
                if word.arg == "timeout"
            }
            first = name == "init_process_group" and "HashStore" not in ast.unparse(
                call
            )
            later = name.startswith(("new_group", "split_group", "new_subgroups"))
            if first or (later and timeouts - GROUP_TIMEOUTS):
                yield f"{path}: {ast.unparse(call)}"


RULES = [
    strays,
    unstarted,
    untested,
    unlisted,
    sideways,
    too_early,
    wrong_next,
    groups,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("folder", MODULES)
def test_the_layout(folder, rule):
    broken = "\n".join(sorted(rule(folder)))
    assert not broken, f"{rule.__doc__}\n{broken}"


def test_first_steps_import_nothing_of_ours():
    paths = [p for p in TRACKED if Path(p).stem in FIRST_STEPS and p.endswith(".py")]
    assert len(paths) == len(FIRST_STEPS)
    ours = {"dist_common", *(stem for folder in MODULES for stem in scripts(folder))}
    for path in paths:
        assert not packages(path) & ours, path


def test_dist_common_and_the_programs_import_no_lesson():
    lessons = {stem for folder in MODULES for stem in scripts(folder)}
    for path in TRACKED:
        if re.fullmatch(r"(dist_common|planner|cluster)/.*\.py", path):
            assert not packages(path) & lessons, path
        if re.fullmatch(r"dist_common/.*\.py", path):
            assert not packages(path) & {"planner", "cluster", "cluster_parts"}, path


def test_launchers_take_their_lessons_from_the_folder():
    for path in TRACKED:
        if re.fullmatch(r".*/launch_\w+\.sh", path):
            assert "known=" not in (REPO / path).read_text(), f"{path} has its own list"


# Names

FORBIDDEN_NAMES = {
    *("own", "told", "here", "how", "kind_of", "look", "watch", "right", "found"),
    *("refuse", "go_on", "prove"),
}


def bound_names(tree):
    """Yield the names that a file binds: functions, parameters, variables and so on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            yield node.name or ""


def forbidden_names(sources):
    """Names use the field's terms."""
    for path, source in sources.items():
        for name in sorted(set(bound_names(ast.parse(source)))):
            if name.strip("_").lower() in FORBIDDEN_NAMES:
                yield f"{path} binds the name {name}"


def shared_class_names(sources):
    """Class names are unique; broken.py and cured.py are two versions of one script."""
    defined = {}
    for path, source in sources.items():
        script = path.replace("/cured.py", "/broken.py")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, set()).add(script)
    for name, files in defined.items():
        if len(files) > 1:
            yield f"class {name} is in {', '.join(sorted(files))}"


NAMING_RULES = [forbidden_names, shared_class_names]


@pytest.mark.parametrize("rule", NAMING_RULES, ids=lambda rule: rule.__name__)
def test_names(rule):
    paths = [path for path in TRACKED if path.endswith(".py")]
    broken = "\n".join(rule({path: (REPO / path).read_text() for path in paths}))
    assert not broken, f"{rule.__doc__}\n{broken}"


@pytest.mark.parametrize(
    "source",
    [
        "own = 1",
        "HERE = 1",
        "x.found = 1",
        "def prove(): pass",
        "def f(_right): pass",
        "lambda *, how: 1",
        "for told in x: pass",
        "import x as look",
        "with x as watch: pass",
        "class Found: pass",
        "if (found := 1): pass",
    ],
)
def test_a_forbidden_name_is_reported(source):
    assert list(forbidden_names({"a.py": source}))


def test_a_class_name_of_two_files_is_reported():
    source = "class Job: pass"
    assert list(shared_class_names({"a.py": source, "b.py": source}))
    versions = {"a/broken.py": source, "a/cured.py": source}
    assert not list(shared_class_names(versions))
    assert list(shared_class_names(versions | {"b/cured.py": source}))


# Budgets

# The size of a folder is the number of its Python tokens divided by 8: about one line
# of code at 88 columns, whatever the formatting. The site also counts the lines of its
# JavaScript and CSS.
SIZES = {
    "dist_common": 1_600,
    "01-ddp-basics": 1_500,
    "02-fsdp": 2_300,
    "03-deepspeed": 1_600,
    "04-nccl-operations": 2_300,
    "05-advanced": 4_000,
    "benchmarks": 3_000,
    "cluster": 2_900,
    "planner": 4_600,
    "labs": 4_400,
    "site": 1_500,
    "tests": 18_000,
}
SIZE_OF_A_TEMPLATE = 330
# A reader of a template has to open the template and all of our files that it imports.
FILES_OPENED, SIZE_OPENED = 10, 1_700
# Pages of modules, programs and benchmarks; words and commands of all pages.
PAGES_IN_ALL, WORDS_IN_ALL, COMMANDS_IN_ALL = 75, 100_000, 200
TRAINING_COMMANDS_OF_A_PAGE = 4

LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@cache
def size(path):
    """Return the tokens of a file without comments and docstrings, divided by 8."""
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


def size_of_folder(folder):
    files = [path for path in TRACKED if path.startswith(f"{folder}/")]
    total = sum(size(path) for path in files if path.endswith(".py"))
    if folder == "site":
        lines = [path for path in files if path.endswith((".js", ".css"))]
        total += sum(len((REPO / path).read_text().splitlines()) for path in lines)
    return total


def training_commands(page):
    """Return a page's commands that train: they start ranks, and do more than send."""
    starts = (
        r"(?:^|\s)(?:torchrun|deepspeed|srun|mpirun|accelerate)\s|launch_\w+\.sh local"
    )
    shown = [
        command
        for block in read(page).blocks
        if block.language == "bash"
        for _, command in commands(block)
    ]
    started = [command for command in shown if re.search(starts, command)]
    other = r"--dry-run|04-nccl-operations/|/hello_\w+\.py"
    return [command for command in started if not re.search(other, command)]


def measure():
    """Return (measured, budget) for everything that has a budget."""
    rows = {
        f"size of {name}": (size_of_folder(name), most) for name, most in SIZES.items()
    }
    for template in TEMPLATES:
        opened = [path for path in opened_by(template) if size(path)]
        rows[f"size of {template}"] = size(template), SIZE_OF_A_TEMPLATE
        rows[f"files that {template} opens"] = len(opened), FILES_OPENED
        rows[f"size that {template} opens"] = sum(map(size, opened)), SIZE_OPENED
    apart = ("labs/", "site/", "benchmarks/results/")
    pages = [path for path in TRACKED if path.endswith(".md")]
    counted = [path for path in pages if "/" in path and not path.startswith(apart)]
    blocks = [block for page in PAGES for block in read(page).blocks]
    shown = sum(len(commands(block)) for block in blocks if block.language == "bash")
    words = sum(len((REPO / path).read_text().split()) for path in pages)
    rows["pages"] = len(counted), PAGES_IN_ALL
    rows["words"] = words, WORDS_IN_ALL
    rows["commands"] = shown, COMMANDS_IN_ALL
    return rows


@pytest.mark.skipif(
    sys.version_info >= (3, 12),
    reason="Python 3.12 and later split f-strings into more tokens",
)
def test_budgets():
    over = [
        f"{name}: {now:,}, at most {most:,}"
        for name, (now, most) in measure().items()
        if now > most
    ]
    assert not over, "\n".join(["make room, or drop something:", *over])


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_few_commands_that_train(page):
    trained = training_commands(page)
    assert len(trained) <= TRAINING_COMMANDS_OF_A_PAGE, "\n".join(
        [f"{page}:", *trained]
    )


@pytest.mark.xdist_group("seen")
def test_groups_of_tests_stay_on_one_worker(request):
    """pytest 9.2 ignores the groups of pytest-xdist 3.8 without --dist loadgroup."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("not run with -n 2 --dist loadgroup, as make test does")
    assert request.node.nodeid.endswith("@seen")


def main():
    """Print every number that has a budget."""
    for name, (now, most) in measure().items():
        print(f"{name:50}{now:9,}   budget {most:7,}")


if __name__ == "__main__":
    main()
