"""Keep every Markdown page true. Works on any page that is added; what a page must look like:

- A ```bash block holds commands, one a line (or continued by a backslash). They are run in order,
  in a copy of the repository. A ```text block right after it is what the last one printed.
- Words that only measure time, or name a machine or version, are masked before output is compared;
  other numbers with a decimal point may differ by 3 percent, losses on text by 15, on a little of
  it by 30; a line `...` stands for any lines.
- A ```python block stands, word for word, in a file of the page's folder or in dist_common.
- A ```tree block lists paths that exist, first word of each line.
- A block that follows <!-- needs: OP --> is left out, with a warning, where DeepSpeed's OP has not
  been compiled, which takes minutes.
- An image is followed by <!-- drawn by the command above: PATH -->, the file it is a copy of; with
  ", times differ" before the colon, it may differ as much as measured times do.
- A ```diff block follows <!-- diff: FILE FUNCTION, FILE FUNCTION --> and is the difference between
  the two functions of the page's folder, without comments. `python tests/test_guides.py` writes it.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
import shlex
import shutil
import subprocess
import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from conftest import REPO, Ended, compiled, run_command
from matplotlib import image as png


def files_of_the_repository() -> list[str]:
    asked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPO, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if asked.returncode == 0:
        return [path for path in asked.stdout.splitlines() if (REPO / path).exists()]
    made = {".venv", "runs", "data", "__pycache__"}  # a copy without git, from an archive
    files = (path.relative_to(REPO) for path in REPO.rglob("*") if path.is_file())
    return [str(path) for path in files if not made & set(path.parts)]


TRACKED = files_of_the_repository()
PAGES = [path for path in TRACKED if path.endswith(".md")]
# What makes the environment that this test runs in is not done again inside it.
SET_UP = re.compile(r"git clone|cd |python3 -m venv|source |\S*python -m pip install")


@dataclass
class Block:
    """A fenced block: its language, its lines, the line it starts at, the prose leading to it."""

    language: str
    text: str
    line: int
    lead: str = ""


@dataclass
class Page:
    path: str
    prose: str = ""
    blocks: list[Block] = field(default_factory=list)
    rest: str = ""  # the prose after the last block


@cache
def read(path: str) -> Page:
    page, block, between = Page(path), None, []
    for number, line in enumerate((REPO / path).read_text().splitlines(), 1):
        fence = re.match(r"```(\w*)$", line)
        if block is None and fence:
            block = Block(fence[1], "", number, "\n".join(between).strip())
        elif block is not None and line == "```":
            page.blocks.append(block)
            block, between = None, []
        elif block is not None:
            block.text += line + "\n"
        else:
            between.append(line)
            page.prose += line + "\n"
    assert block is None, f"{path}: a block is never closed"
    page.rest = "\n".join(between)
    return page


def commands(block: Block) -> list[str]:
    joined = block.text.replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip() and line[0] != "#"]


def all_of(language: str) -> list[tuple[str, Block]]:
    return [(page, block) for page in PAGES for block in read(page).blocks
            if block.language == language]  # fmt: skip


def test_blocks_have_a_language_that_is_checked():
    known = {"bash", "text", "python", "diff", "tree", "mermaid"}
    for page in PAGES:
        for block in read(page).blocks:
            assert block.language in known, f"{page}:{block.line}"


# commands and what they print


def runnable(command: str) -> list[str] | None:
    """Return what a test may run in place of a command, or None for setting up the environment.

    Of make and cluster jobs only the plan is made, and of pytest only the choice of tests is looked
    at, so that tests do not start themselves.
    """
    if SET_UP.match(command):
        return None
    command = command.replace(".venv/bin/", "")
    if command.startswith("make "):
        command += " --dry-run"
    elif "pytest" in command:
        words = shlex.split(command)
        paths = [word for word in words if word.startswith("tests/")] or ["tests"]
        files = [path for path in TRACKED if path.endswith(".py") and path.startswith(tuple(paths))]
        source = "".join((REPO / path).read_text() for path in files)
        tests = re.findall(r"^def (test_\w+)", source, re.M)
        wanted = words[words.index("-k") + 1].split(" or ") if "-k" in words else ["test_"]
        assert all(any(word in test for test in tests) for word in wanted), command
        return None
    elif re.search(r"launch_\w+\.sh (multi-node|hostfile|slurm|elastic)", command):
        command += " --dry-run"
    return ["bash", "-c", command]


MASKS = [
    (r"torch \d+\.\d+\.\d+\S*", "torch VERSION"),
    (r"-?\d+(\.\d+)? ms\b", "TIME"),
    (r"[+-]\d+(\.\d+)?%|\b\d+%", "RATIO"),  # one time by another: others have a decimal, no sign
    (r"\d+(\.\d+)? u?s\b", "TIME"),
    (r"[\d,]+(\.\d+)? (KB|MB/s|GB/s)( |$)", "RATE "),
    (r"(Avg bus bandwidth +: ).*", r"\1RATE"),
    # nccl-tests' line: time and bandwidths, out of place and in place; sizes and #wrong stay
    (r"^( +\d+ +\d+ +\w+ +\w+ +-?\d+)( +[\d.e+]+){3} +(\d+)( +[\d.e+]+){3} +(\d+)$", r"\1 \3 \5"),
    (r"[\d,]+(\.\d+)? (samples|tok(ens)?)/s", "RATE"),
    (r"\d+\.\d+ GiB\b", "MEMORY"),
    (r"\b\d+\.\d+x( |$)", "RATIO "),
    (r"\b\d+ cores", "CORES"),
    (r"more than [\d,]+ such ranks", "RANKS"),  # of this machine's memory
    (r"quickstart-\d{8}-\d{6}", "quickstart-DATE"),
    (r"\b\d\.?\d*e-\d+\b", "ROUNDING"),  # a rounding error: the check beside it bounds it
    (r" {2,}|-{3,}", " "),  # column widths follow the numbers in them
]


def words_of(line: str) -> list[str]:
    for pattern, mask in MASKS:
        line = re.sub(pattern, mask, line)
    return line.split()


# Losses of another processor differ a little; those on text more, since the sources of Python's
# library are another text in each of its versions, patches too.
TOLERANCE, ON_TEXT, ON_A_LITTLE_TEXT = 0.03, 0.15, 0.3
TRAINED_ON_TEXT = re.compile(
    r"step \d+ \| |OK: .* after step \d+|ddp_training.py: stopped|\d+ +\d\.\d{6} |fine-tuned to"
    r"|(one process|from scratch|fully_shard|full|Q?LoRA)  |QLoRA: loss"
    r"|stage \d (from scratch|DeepSpeed) |(test loss of|largest error of the first) "
    r"|OK: .* at the end"
)


def same_word(expected: str, printed: str, tolerance: float) -> bool:
    if expected == printed or {expected, printed} == {"0", "ROUNDING"}:
        return True
    numbers = [re.fullmatch(r"(-?[\d,]+\.\d+)(\D*)", word) for word in (expected, printed)]
    if None in numbers or numbers[0][2] != numbers[1][2]:
        return False
    a, b = (float(number[1].replace(",", "")) for number in numbers)
    return abs(a - b) <= tolerance * max(abs(a), abs(b)) + 0.002


def same_line(expected: str, printed: str) -> bool:
    tolerance = ON_TEXT if TRAINED_ON_TEXT.match(expected) else TOLERANCE
    if (
        "test loss" in expected
    ):  # a few sequences at the end of the text: of another version, others
        tolerance = ON_A_LITTLE_TEXT
    a, b = words_of(expected), words_of(printed)
    return len(a) == len(b) and all(
        same_word(*words, tolerance) for words in zip(a, b, strict=True)
    )


def shows(expected: list[str], printed: list[str]) -> bool:
    """Say whether `printed` is `expected`, in which a line `...` stands for any lines."""
    if not expected:
        return not printed
    if expected[0] == "...":
        return any(shows(expected[1:], printed[skip:]) for skip in range(len(printed) + 1))
    return bool(printed) and same_line(expected[0], printed[0]) and shows(expected[1:], printed[1:])


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the repository for one page's commands: none finds what another page's wrote."""
    folder = tmp_path / "repository"
    for path in TRACKED:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPO / path, folder / path)
    return folder


FIGURE = re.compile(
    r"!\[[^\]]+\]\(([^)]+)\)\n<!-- drawn by the command above(, times differ)?: (\S+) -->"
)


PLAIN = re.compile(r"(?:torchrun --standalone --nproc-per-node=(\d+)|python) (\d\d-\S+\.py)(.*)")


def run_again(command: str, copy: Path, run_script) -> Ended:
    """Run a script as the command would, but on forks of this process, which start at once."""
    ranks, script, arguments = PLAIN.fullmatch(command).groups()
    return run_script(
        script, *shlex.split(arguments), world_size=int(ranks or 1), timeout_s=120,
        environ=None if ranks else {}, before=lambda _: os.chdir(copy),
    )  # fmt: skip


@pytest.mark.parametrize("path", [page for page in PAGES if read(page).blocks])
def test_commands_run_and_print_and_draw_what_the_page_shows(path, copy, run_script):
    """A page's first launch of a script is done as it stands, the next ones are forked."""
    page, launched = read(path), False
    blocks = [*page.blocks, Block("end", "", 0, page.rest)]
    for position, block in enumerate(blocks):
        if block.language != "bash":
            continue
        ended, needs = None, re.search(r"<!-- needs: (\w+) -->", block.lead)
        if needs and not compiled(needs[1]):
            warnings.warn(
                f"{path}:{block.line} was not run: {needs[1]} is not compiled", stacklevel=1
            )
            continue
        for command in commands(block):
            run = runnable(command)
            if run is None:
                continue
            plain = PLAIN.fullmatch(command)
            if plain and launched:
                ended = run_again(command, copy, run_script)
            else:
                ended = run_command(run, copy, 120, PYTHONPATH=str(copy), OMP_NUM_THREADS="1")
                launched |= bool(plain)
            fails = "exit code" in " ".join(block.lead.split("\n\n")[-1].split())
            where = f"{path}:{block.line}: {command}\n{ended.stdout}{ended.stderr}"
            assert any(ended.codes) == fails, where
        following = blocks[position + 1]
        if following.language == "text" and not following.lead:
            assert ended is not None, f"{path}:{following.line}: output without a command"
            out, err, shown = ended.stdout, own_lines(ended.stderr), following.text.splitlines()
            # A terminal mixes the two streams; a page shows one after the other.
            assert any(shows(shown, both.splitlines()) for both in (out + err, err + out)), (
                f"{path}:{following.line} shows\n{following.text}\nbut was printed\n{err}{out}"
            )
            following = blocks[position + 2]
        for figure, times_differ, drawn in FIGURE.findall(following.lead):
            check_figure(REPO / Path(path).parent / figure, copy / drawn, bool(times_differ))


def check_figure(figure: Path, drawn: Path, times_differ: bool) -> None:
    assert drawn.exists(), f"no command drew {drawn} for {figure}"
    one, two = png.imread(figure), png.imread(drawn)
    assert one.shape == two.shape
    # Another picture of the same kind differs in a few hundredths, a blank one in more.
    limit = 0.15 if times_differ else 0.01
    assert abs(one - two).mean() < limit and two.std() > 0.5 * one.std(), (
        f"{figure} is not what {drawn} shows: draw it again"
    )


def test_every_image_says_what_drew_it():
    for page in PAGES:
        prose = read(page).prose
        assert prose.count("![") == len(FIGURE.findall(prose)), page


def own_lines(stderr: str) -> str:
    """Keep what a script of ours said, without torchrun's report and PyTorch's own logging."""
    return "".join(
        line for line in stderr.splitlines(True) if re.match(r"\w+\.(py|sh): |warning: ", line)
    )


def test_output_comparison_can_fail():
    line = "epoch  1 | loss 1.2345 | test accuracy 90.3% | 8.1 ms/step"
    assert same_line(line, "epoch 1 | loss 1.2344 | test accuracy 90.6% | 11.7 ms/step")
    assert not same_line(line, line.replace("epoch  1", "epoch  2"))
    assert not same_line(line, line.replace("90.3%", "80.3%"))
    assert not same_line(line, line.replace("loss", "Loss"))
    on_text = "step 10 | loss 3.7535 | 251.2 ms | 16,304 tok/s | mem 0.76 GiB"
    assert same_line(on_text, "step 10 | loss 3.9 | 11.2 ms | 99 tok/s | mem 1.76 GiB")
    assert not same_line(on_text, on_text.replace("3.7535", "4.7535"))
    assert same_line("bytes  605,224  605,224   0  yes", "bytes 605,224 605,224 0 yes")
    assert not same_line("bytes  605,224  605,224   0  yes", "bytes 605,225 605,224 0 yes")
    row = (
        "    8    2    float     sum      -1   3.82   0.1   0.1       0   5.0   0.1   2e+05       0"
    )
    assert same_line(row, row.replace("3.82", "12.1")) and not same_line(row, row[:-1] + "1")
    assert not same_line(row, row.replace("sum", "max"))
    assert shows(["a", "...", "c"], ["a", "b", "b", "c"])
    assert not shows(["a", "...", "c"], ["a", "b"])
    assert not shows(["a"], ["a", "b"])


# code, flags, links, trees, figures


@pytest.mark.parametrize(("path", "block"), all_of("python"))
def test_code_on_a_page_is_the_code_that_runs(path, block):
    folder = (REPO / path).parent
    sources = [*folder.glob("*.py"), *(REPO / "dist_common").glob("*.py")]
    texts = [re.sub(r"^[ \t]+", "", file.read_text(), flags=re.M) for file in sources]
    wanted = re.sub(r"^[ \t]+", "", block.text, flags=re.M)
    assert any(wanted in text for text in texts), f"{path}:{block.line} is in none of {folder}"


DIFF = re.compile(r"<!-- diff: (\S+) (\S+), (\S+) (\S+) -->$")


def diff_of(folder: Path, names: tuple[str, ...]) -> str:
    """Return how one function turns into another, without comments and docstrings."""
    sides = []
    for file, name in (names[:2], names[2:]):
        tree = ast.parse((folder / file).read_text())
        (function,) = (n for n in ast.walk(tree) if getattr(n, "name", None) == name)
        if ast.get_docstring(function):
            del function.body[0]
        sides.append(ast.unparse(function).splitlines())
    lines = difflib.ndiff(*sides)
    return "".join(f"{line[0]}{line[2:]}\n" for line in lines if line[0] != "?")


@pytest.mark.parametrize(("path", "block"), all_of("diff"))
def test_a_diff_on_a_page_is_the_difference(path, block):
    named = DIFF.search(block.lead)
    assert named, f"{path}:{block.line}: which functions?"
    fresh = diff_of((REPO / path).parent, named.groups())
    assert block.text == fresh, f"{path}:{block.line}: run python tests/test_guides.py"


def write_diffs() -> None:
    block = re.compile(DIFF.pattern[:-1] + r"\n```diff\n(.*?)```", re.S)
    for path in PAGES:
        file = REPO / path

        def fresh(match, folder=file.parent):
            before = match[0][: match.start(5) - match.start()]
            return before + diff_of(folder, match.groups()[:4]) + "```"

        file.write_text(block.sub(fresh, file.read_text()))


@cache
def flags_of(path: str) -> set[str]:
    """Return the flags that a script or launcher of the repository knows, without running it."""
    source = (REPO / path).read_text()
    if path.endswith(".sh"):
        return set(re.findall(r"--[a-z][a-z_-]+", source))
    known = {"--help"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            flag = node.args[0].value
            if isinstance(flag, str) and flag.startswith("--"):
                known.add(flag)
    return known


def all_flags() -> set[str]:
    ours = [p for p in TRACKED if p.endswith((".py", ".sh")) and not p.startswith("tests/")]
    known = set().union(*map(flags_of, ours))
    from torch.distributed.run import get_args_parser

    for action in get_args_parser()._actions:
        known |= {text.replace("_", "-") for text in action.option_strings}
    other = "--upgrade --index-url --requirement --check --pid"  # of pip, ruff and py-spy
    other += " --num_gpus --num_nodes --hostfile --master_addr"  # of the deepspeed launcher
    return known | set(other.split())


@pytest.mark.parametrize("path", PAGES)
def test_every_flag_exists(path):
    page = read(path)
    code = re.findall(r"`([^`]+)`", page.prose) + [
        command for block in page.blocks if block.language == "bash" for command in commands(block)
    ]
    named = {flag for text in code for flag in re.findall(r"(?<![\w-])--[a-z][a-z_-]*", text)}
    assert named <= all_flags(), f"{path}: {sorted(named - all_flags())} of no script"
    for text in code:
        for script in re.findall(r"[\w./-]+\.py\b", text):
            if script in TRACKED:
                own = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]*", text.split(script, 1)[1]))
                shared = flags_of("dist_common/runtime.py") | flags_of("dist_common/zero.py")
                assert own <= flags_of(script) | shared, f"{path}: {text}"


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("path", PAGES)
def test_every_link_resolves(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", read(path).prose):
        if re.match(r"https://", target):
            continue
        file, _, anchor = target.partition("#")
        whole = ((REPO / path).parent / file).resolve() if file else REPO / path
        assert whole.exists(), f"{path}: {target} is not there"
        assert whole.is_relative_to(REPO), f"{path}: {target} leaves the repository"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", read(str(whole.relative_to(REPO))).prose, re.M)
            assert anchor in map(slug, headings), f"{path}: no heading for {target}"


def test_every_entry_of_a_file_tree_exists():
    for path, block in all_of("tree"):
        for line in block.text.splitlines():
            assert ((REPO / path).parent / line.split()[0]).exists(), f"{path}: {line}"


def test_the_readme_shows_the_commands_that_make_runs(copy):
    """The plain commands beneath `make quickstart` and `make test`, in the order make runs them."""
    plain = [
        " ".join(command.split())
        for block in read("README.md").blocks
        if block.language == "bash"
        for command in commands(block)
        if not command.startswith(("make", "git clone", "cd "))
    ]
    for goal in ("quickstart", "test"):
        run_command(["rm", "-rf", ".venv"], copy, 10)
        planned = run_command(["make", "--dry-run", goal], copy, 30).stdout
        planned = planned.replace("test -x .venv/bin/python || ", "").replace("\\\n", " ")
        steps = [" ".join(line.split()) for line in planned.splitlines()]
        shown = [
            re.sub(r"quickstart-\d+-\d+", "first", step)
            for step in steps
            if re.match(r"(OMP_NUM_THREADS=1 )?(python3|\.venv/bin/\w+) ", step)
            and "-c" not in step
        ]
        assert shown, planned
        missing = [step for step in shown if step not in plain]
        assert not missing, f"make {goal} runs what README.md does not show: {missing}"


if __name__ == "__main__":
    write_diffs()
