"""Keep every Markdown page true, also a new one. The rules for a page:

- A ```bash block holds commands, one a line (or continued by a backslash). They run in
  order, in a copy of the repository. A ```text block right after it is the output of
  the last one; outputs.py says how the two are compared. Where the last paragraph
  before the commands names an exit code other than 0, they must fail.
- `python tests/test_guides.py --record PAGE` runs the commands and writes such blocks
  and figures.
- Nothing may stand on stderr but lines of a script of ours, unless the command fails.
- A block that follows <!-- needs: OP --> is left out, with a warning, where DeepSpeed's
  OP has not been compiled, which takes minutes; after <!-- needs: frameworks -->,
  without their environment; after <!-- needs: nodes -->, where the machine permits no
  namespaces.
- <!-- recorded: FILE --> before a ```text block: another machine printed it, and it is
  "output" in that JSON file, next to machine, versions and date. The commands right
  before it do not run.
- An image is followed by <!-- drawn by the command above: PATH -->, the file it is a
  copy of; with ", times differ" before the colon, it may differ as much as measured
  times do. Or by <!-- drawn on PAGE -->, which has it with its command, or by <!--
  drawn by figures.py -->.
- A ```python, ```json or ```yaml block stands, word for word, in a file of the page's
  folder or dist_common.
- A ```tree block lists paths that exist, first word of each line.
- A ```diff block follows <!-- diff: FILE FUNCTION, FILE FUNCTION --> and is the
  difference between the two functions of the page's folder, without comments; without
  FUNCTION, between the files. `python tests/test_guides.py` writes it.
- "Change it" names the copy that its exercises are done on, and minutes for each:
  "(5 min)".
- "N minutes" in a page's head, its row in the README and the hours of a module follow
  the rule of minutes.py; the same command writes them.
"""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import minutes
import page_reader
import pages
import pytest
from conftest import REPO, run_command
from page_reader import PAGES, TRACKED, commands, read, slug, sources_of, unindented
from pages import all_of, steps
from recording import DIFF, diff_of, record, write_diffs

# Commands and their output


@pytest.fixture
def copy(tmp_path) -> Path:
    return pages.copy_repository(tmp_path / "repository")


@pytest.mark.full
@pytest.mark.parametrize("path", [page for page in PAGES if steps(read(page))])
def test_every_command_prints_and_draws_what_the_page_shows(path, copy, run_script):
    pages.follow(path, copy, run_script)


@pytest.mark.parametrize(
    "path", [path for path in minutes.RULED if minutes.stated(path)]
)
def test_minutes_of_a_page_are_those_of_the_rule(path):
    expected = minutes.by_rule(path)
    assert abs(minutes.stated(path) - expected) <= 4, (
        f"{path}: {expected:.0f} minutes by the rule: run python tests/test_guides.py"
    )


@pytest.mark.parametrize(
    "path", [path for path in minutes.RULED if "| minutes |" in read(path).prose]
)
def test_minutes_of_lessons_are_those_of_their_pages(path):
    lessons, folder = minutes.rows_of(read(path).prose), Path(path).parent
    assert lessons
    for _, page, number, _ in lessons:
        assert minutes.stated(str(folder / page)) == int(number), f"{path}: {page}"
    if path == "README.md":  # the afternoon track is not a module
        return
    hours = sum(int(number) for _, _, number, _ in lessons) / 60
    stated = re.search(
        rf"^\| \[{folder}\].*\| (\d+) \|$", read("README.md").prose, re.M
    )
    assert abs(int(stated[1]) - hours) <= 0.6, (
        f"README.md: {folder} takes {hours:.1f} hours"
    )


def test_every_choice_of_tests_finds_some():
    """Tests do not start tests: only the selection in a pytest command is checked."""
    shown = [
        (path, *numbered)
        for path in PAGES
        for step in steps(read(path))
        for numbered in commands(step.commands)
    ]
    for path, line, command in shown:
        if not re.search(r"\bpytest\b", command) or "install" in command:
            continue
        words = shlex.split(command)
        named = [word for word in words if word.startswith("tests/")] or ["tests/test_"]
        starts = tuple(name.split("::")[0] for name in named)
        files = [p for p in TRACKED if p.endswith(".py") and p.startswith(starts)]
        source = "".join((REPO / file).read_text() for file in files)
        tests = [*files, *re.findall(r"^def (test_\w+)", source, re.M)]
        wanted = [name.split("::")[1] for name in named if "::" in name]
        if "-k" in words:
            wanted += re.split(r" (?:or|and)(?: not)? ", words[words.index("-k") + 1])
        for name in wanted or ["test_"]:
            assert any(name in test for test in tests), (
                f"{path}:{line}: {command}: no {name}"
            )


def test_recorded_outputs_are_in_their_files():
    for path in PAGES:
        for block in read(path).blocks:
            for file in (
                pages.RECORDED.findall(block.lead) if block.language == "text" else ()
            ):
                fault = pages.fault_of_record(block.text, (REPO / path).parent / file)
                assert not fault, f"{path}:{block.line}: {fault}"


# code, flags, links, trees, figures


def test_blocks_have_a_language_that_is_checked():
    known = {"bash", "text", "python", "json", "yaml", "diff", "tree", "mermaid"}
    for page in PAGES:
        for block in read(page).blocks:
            assert block.language in known, f"{page}:{block.line}: {block.language}"


ENDINGS = {"python": ".py", "json": ".json", "yaml": ".yaml"}


@pytest.mark.parametrize(("path", "block"), sum(map(all_of, ENDINGS), []))
def test_code_on_a_page_is_the_code_that_runs(path, block):
    ending = ENDINGS[block.language]
    texts = [unindented((REPO / file).read_text()) for file in sources_of(path, ending)]
    folder = (REPO / path).parent.name
    where = f"{path}:{block.line}: no file of {folder}/ or dist_common has these lines"
    assert any(unindented(block.text) in text for text in texts), where


@pytest.mark.parametrize(("path", "block"), all_of("diff"))
def test_a_diff_on_a_page_is_the_difference(path, block):
    if block.text.startswith("--- a/"):  # a patch, which a test of its script applies
        return
    named = DIFF.search(block.lead)
    assert named, f"{path}:{block.line}: which functions?"
    fresh = diff_of((REPO / path).parent, *named.groups())
    assert block.text == fresh, f"{path}:{block.line}: run python tests/test_guides.py"


BY_TEST = re.compile(r"!\[[^\]]+\]\([^)]+\)\n<!-- drawn by (tests/\w+\.py): (\S+) -->")
BY_FIGURES = re.compile(r"!\[[^\]]+\]\(images/([^)]+)\)\n<!-- drawn by figures\.py -->")
ELSEWHERE = re.compile(r"!\[[^\]]+\]\(([^)]+)\)\n<!-- drawn on (\S+\.md) -->")


@pytest.mark.full
@pytest.mark.parametrize(
    "script", [path for path in TRACKED if re.fullmatch(r"0\d-.*/figures\.py", path)]
)
def test_figures_draws_the_pictures_of_its_module(script, tmp_path):
    """python figures.py --output-dir DIR draws what the module's images/ holds."""
    words = [sys.executable, script, "--output-dir", str(tmp_path)]
    ended = run_command(words, REPO, 120)
    assert ended.codes == [0], ended.stderr
    drawn = sorted(tmp_path.iterdir())
    assert drawn
    for path in drawn:
        fault = pages.fault_of_figure(
            REPO / Path(script).parent / "images" / path.name, path, False
        )
        assert not fault, fault


def test_every_image_says_what_drew_it():
    for page in PAGES:
        prose, folder = read(page).prose, (REPO / page).parent
        comment = (
            "each ![picture] needs, on the next line, "
            "<!-- drawn by the command above: FILE -->"
        )
        borrowed, tested = ELSEWHERE.findall(prose), BY_TEST.findall(prose)
        made = BY_FIGURES.findall(prose)
        known = (
            len(pages.FIGURE.findall(prose)) + len(borrowed) + len(tested) + len(made)
        )
        assert prose.count("![") == known, f"{page}: {comment}"
        for image in made:
            assert (folder / "images" / image).exists(), f"{page}: no {image}"
        for test, drawn in tested:
            assert Path(drawn).name in (REPO / test).read_text(), (
                f"{page}: {test} draws no {drawn}"
            )
        for image, other in borrowed:
            text = (folder / other).read_text()
            drawn = [figure for figure, *_ in pages.FIGURE.findall(text)]
            drawn += [f"images/{name}" for name in BY_FIGURES.findall(text)]
            figures = [(folder / other).parent / figure for figure in drawn]
            assert (folder / image).resolve() in [path.resolve() for path in figures], (
                f"{page}: {image}"
            )


EXERCISES = re.compile(r"^## Change it\n(.*?)(?=^<details>|^## |\Z)", re.M | re.S)


@pytest.mark.parametrize(
    "path", [path for path in PAGES if EXERCISES.search(read(path).prose)]
)
def test_exercises_are_done_on_a_copy_and_say_their_minutes(path):
    asked = EXERCISES.search(read(path).prose)[1]
    copied = re.findall(r"`python labs/try\.py (\S+)`", asked)
    has_script = str(Path(path).with_suffix(".py")) in TRACKED
    assert copied or not has_script, (
        f"{path}: say how to copy the lesson: `python labs/try.py SCRIPT`"
    )
    assert set(copied) <= set(TRACKED), f"{path}: {copied} are not there"
    for exercise in re.findall(r"^\d\. .*", asked, re.M) or [asked]:
        assert re.search(r"\(\d+ min\)", exercise), f"{path}: no minutes: {exercise}"


@cache
def flags_of(path: str) -> set[str]:
    """Return the flags that a script or launcher of the repository knows, without
    running it.
    """
    source = (REPO / path).read_text()
    if path.endswith((".sh", ".sbatch")):
        return set(re.findall(r"--[a-z][a-z0-9_-]+", source))
    known = {"--help"}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if re.fullmatch(r"--[a-z][a-z0-9_-]*", node.value):
            known.add(node.value)
    if "BooleanOptionalAction" in source:
        known |= {flag.replace("--", "--no-", 1) for flag in known}
    return known


def flags_for(script: str) -> set[str]:
    """Return the flags of a script and of the files that it imports."""
    return set().union(*map(flags_of, page_reader.opened_by(script)))


FLAGS_OF_OTHER_TOOLS = """
    Megatron: --optimizer
    pip: --upgrade --index-url --extra-index-url --requirement --no-deps --editable
    uv: --override
    wsl: --install --shutdown
    docker: --file --tag --build-arg --rm --interactive --tty --volume --shm-size
    ruff: --check --fix
    pytest: --dist --durations --numprocesses
    accelerate: --cpu --num_processes --mpirun_hostfile
    Megatron-LM: --data-path --eval-interval --mock-data
        --no-gradient-accumulation-fusion
    py-spy: --pid --native --locals
    torchfrtrace: --allow-incomplete-ranks
    srun: --no-kill
    torchrun of torch 2.14: --shutdown-timeout
    ibdiagnet: --get_phy_info
    deepspeed: --num_gpus --num_nodes --hostfile --master_addr --master_port --include
        --exclude --bind_cores_to_rank
"""


@cache
def all_flags() -> set[str]:
    ours = [
        p
        for p in TRACKED
        if p.endswith((".py", ".sh", ".sbatch")) and not p.startswith("tests/")
    ]
    known = set().union(*map(flags_of, [*ours, "tests/test_guides.py"]))
    from torch.distributed.run import get_args_parser

    for action in get_args_parser()._actions:
        known |= {text.replace("_", "-") for text in action.option_strings}
    return known | set(re.findall(r"--\S+", FLAGS_OF_OTHER_TOOLS))


@pytest.mark.parametrize("path", PAGES)
def test_every_flag_exists(path):
    page, flag = read(path), r"(?<![\w-])--[a-z][a-z0-9_-]*"
    code = re.findall(r"`([^`]+)`", page.prose)
    for step in steps(page):
        code += [command for _, command in commands(step.commands)]
    unknown = {name for text in code for name in re.findall(flag, text)} - all_flags()
    assert not unknown, f"{path}: {sorted(unknown)} of no script"
    for text in code:
        for script in re.findall(r"[\w./-]+\.py\b", text):
            if script in TRACKED:
                after = text.split(script, 1)[1].partition(" -- ")[
                    0
                ]  # a command has its own
                flags = set(re.findall(flag, after))
                assert flags <= flags_for(script), (
                    f"{path}: {text}: {flags - flags_for(script)}"
                )


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
            headings = re.findall(
                r"^#+ (.+)$", read(str(whole.relative_to(REPO))).prose, re.M
            )
            assert anchor in map(slug, headings), f"{path}: no heading for {target}"


def test_a_term_is_defined_on_one_page():
    """The site's glossary is made of these sentences; a later page may remind, without
    italics.
    """
    first = {}
    for term, page, sentence in page_reader.definitions():
        assert first.setdefault(term, (page, sentence)) == (page, sentence), (
            f"{page} defines {term} again, after {first[term][0]}"
        )
    assert len(first) > 40


def test_every_entry_of_a_file_tree_exists():
    for path in PAGES:
        for block in read(path).blocks:
            for line in block.text.splitlines() if block.language == "tree" else ():
                assert ((REPO / path).parent / line.split()[0]).exists(), (
                    f"{path}: {line}"
                )


def test_the_readme_shows_the_commands_that_make_runs(copy):
    """The front page shows the plain commands of its make targets."""

    def words(command: str) -> list[str]:
        return shlex.split(
            re.sub(r"runs/\S+", "runs/DIR", command.replace(".venv/bin/", ""))
        )

    shown = [
        words(command)
        for step in steps(read("README.md"))
        for _, command in commands(step.commands)
    ]
    for goal in ("quickstart", "test", "test-all"):
        planned = run_command(["make", "--dry-run", goal], copy, 60)
        lines = planned.stdout.replace("\\\n", " ").splitlines()
        named = r"torchrun|(python -m )?pytest|ruff|codespell|python benchmarks/"
        tools = rf"(\w+=\S+ )*(\.venv/bin/)?({named})"
        steps_of_make = [words(line) for line in lines if re.match(tools, line.strip())]
        assert steps_of_make, f"make {goal}: {planned.stdout}{planned.stderr}"
        missing = [" ".join(step) for step in steps_of_make if step not in shown]
        assert not missing, f"make {goal} runs what README.md does not show: {missing}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Write what is generated into the pages."
    )
    parser.add_argument(
        "--record", nargs="+", metavar="PAGE", help="outputs and figures of pages"
    )
    parser.add_argument(
        "--diffs", action="store_true", help="diffs and minutes (default)"
    )
    args = parser.parse_args()
    if args.diffs or not args.record:
        write_diffs()
        minutes.write()
    left = [note for page in args.record or () for note in record(Path(page).resolve())]
    print(*left, sep="\n", end="\n" if left else "")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
