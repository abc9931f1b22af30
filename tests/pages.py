"""Run the commands that the Markdown pages show; page_reader.py reads them.

test_guides.py says what a page must look like.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import REPO, Ended, compiled, run_command
from helpers_nodes import why_no_nodes
from matplotlib import image as png
from outputs import difference
from page_reader import FRAMEWORKS, PAGES, TRACKED, CodeBlock, GuidePage, commands, read

DEADLINE_S = 600  # of one command: five times the slowest on a quiet machine


@dataclass
class Step:
    """A block of commands, the output that is shown right after it, the prose after
    both.
    """

    commands: CodeBlock
    output: CodeBlock | None
    after: str
    recorded: bool  # on a machine that the tests do not have

    def needs(self) -> str | None:
        """Return a requirement: an operation of DeepSpeed, `frameworks` or `nodes`."""
        named = re.search(r"<!-- needs: (\w+) -->", self.commands.lead)
        return named[1] if named else None

    def lacks(self) -> str | None:
        """Say why this machine cannot run these commands; None where it can."""
        if self.recorded:
            return "recorded on another machine"
        needed = self.needs()
        if needed == "nodes":
            return why_no_nodes()
        if needed == "frameworks":
            there = any(
                (folder / FRAMEWORKS).exists()
                for folder in (Path(sys.prefix).parent, REPO)
            )
            return None if there else f"{FRAMEWORKS} is not there: make frameworks"
        return (
            None if needed is None or compiled(needed) else f"{needed} is not compiled"
        )

    def fails(self) -> bool:
        """Say whether the paragraph before the commands names an exit code other than
        0.
        """
        prose = re.sub(r"<!--.*?-->", "", self.commands.lead, flags=re.S).strip()
        paragraph = " ".join(prose.split("\n\n")[-1].split())
        return bool(re.search(r"exit codes?\b(?!\W{1,3}0\b)", paragraph))


RECORDED = re.compile(r"<!-- recorded: (\S+) -->")


def steps(page: GuidePage) -> list[Step]:
    result = []
    for position, block in enumerate(page.blocks):
        if block.language != "bash":
            continue
        after = [*page.blocks[position + 1 :], CodeBlock("end", "", 0, page.rest)]
        output = after[0] if after[0].language == "text" and not after[0].lead else None
        recorded = after[0].language == "text" and RECORDED.fullmatch(after[0].lead)
        result.append(
            Step(block, output, after[1 if output else 0].lead, bool(recorded))
        )
    return result


def all_of(language: str) -> list:
    """Return (page, block) for each block of a language, as parameters of a test."""
    return [
        pytest.param(page, block, id=f"{page}:{block.line}")
        for page in PAGES
        for block in read(page).blocks
        if block.language == language
    ]


# running

# Tests do not install their own environment, and do not start themselves.
NOT_RUN = re.compile(
    r"git clone|cd |source |python3? -m venv|(python3? -m )?pip install|uv "
)
TESTS = re.compile(r"\bpytest\b|python tests/")
PLAIN = re.compile(
    r"(?:OMP_NUM_THREADS=1 )?(?:torchrun --standalone --nproc-per-node=(\d+)|python) "
    r"(\S+\.py)(.*)"
)
# Lines of our scripts on stderr, not torchrun's report or PyTorch's logging.
SCRIPT_LINE = re.compile(r"\w+\.(py|sh): |warning: ")
# A machine whose own name has no address, and a launcher whose last barrier, heartbeat
# or closing of the rendezvous finds that the store's node has ended: PyTorch reports
# these, not a script.
OF_THE_MACHINE = re.compile(
    r"(\[node\d+\] )?(\[W.*socket\.cpp.*(hostname|IPv6)|.*\d+(%\||it/s)|\s*$"
    r"|\[W.*TCPStore\.cpp.* failed on SocketImpl\("
    r"|Exception raised from (recv|send)Bytes"
    r"|frame #\d+: |<omitting python frames>|E\d{4} .*elastic/agent/server/api\.py"
    r"|(\[rank\d+\]:)?W\d{4} .*_pytree\.py:\d+\] <enum "  # import of torchao
    r"|W\d{4} .*dynamic_rendezvous\.py:\d+\] The node .* has failed to "
    r"(send a keep-alive|shutdown)"
    r")"
)
LAUNCHED_ELSEWHERE = re.compile(r"launch_\w+\.sh (multi-node|hostfile|slurm|elastic)")


def runnable(command: str) -> str | None:
    """Return the command that a test runs instead, or None.

    Two ranks replace one per GPU, and the plan of a cluster job replaces the job.
    """
    command = command.replace(".venv/bin/", "").replace("-per-node=gpu", "-per-node=2")
    if NOT_RUN.match(command) or TESTS.search(command):
        return None
    elsewhere = "virtual_cluster.py run" not in command
    on_a_cluster = elsewhere and LAUNCHED_ELSEWHERE.search(command)
    return (
        f"{command} --dry-run"
        if on_a_cluster or command.startswith("make ")
        else command
    )


def plain(command: str) -> tuple[int | None, str, list[str]] | None:
    """Take apart a command that only starts a script: ranks (None: python), script,
    arguments.
    """
    match = PLAIN.fullmatch(command)
    # Labs write to runs/ of their checkout, the planner starts at once without torch,
    # and virtual_cluster.py leaves processes, which their environment identifies.
    apart = ("labs/", "planner/", "cluster/virtual_cluster.py")
    if match and match[2].startswith(apart):
        return None
    if not match or match[2] not in TRACKED or re.search(r"[|&;<>$`*~]", match[3]):
        return None
    return int(match[1]) if match[1] else None, match[2], shlex.split(match[3])


STAND_IN = (
    "01-ddp-basics/ddp_mnist.py"  # a module that gets a first step's code as main
)


# A process that writes imports this page's script again.
FRESH = "02-fsdp/fsdp_checkpoint.md"


def has_main(script: str) -> bool:
    """Say whether a script has a main to call; first steps are plain code from top to
    bottom.
    """
    return bool(re.search(r"^def main\(", (REPO / script).read_text(), re.M))


def folders(command: str) -> set[str]:
    """Return the paths below runs/ that a command names, to write or to read."""
    return set(re.findall(r"\bruns/[^/\s\"']+", command))


def copy_repository(folder: Path) -> Path:
    """Copy the repository for one page's commands, without other pages' files."""
    folder.mkdir(parents=True)
    for path in TRACKED:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPO / path, folder / path)
    return folder


@dataclass
class Printed:
    """The output of a command: a terminal mixes both streams, a page shows one after
    the other.
    """

    failed: bool
    out: str
    err: str  # stderr lines of our scripts
    noise: str  # other stderr lines of a successful run
    everything: str

    def orders(self) -> tuple[str, str]:
        """Return both orders, the likelier one first: an error ends a run, a warning
        does not.
        """
        orders = (self.err + self.out, self.out + self.err)
        return orders[::-1] if self.failed else orders


def printed_by(ended: Ended, copy: Path) -> Printed:
    out, err = (text.replace(f"{copy}/", "") for text in (ended.stdout, ended.stderr))
    script_lines = "".join(
        line for line in err.splitlines(True) if SCRIPT_LINE.match(line)
    )
    failed = any(ended.codes)  # then a launcher reports, too
    rest = [line for line in err.splitlines(True) if not SCRIPT_LINE.match(line)]
    noise = "".join(line for line in rest if not OF_THE_MACHINE.match(line))
    return Printed(failed, out, script_lines, "" if failed else noise, err + out)


def launch(command: str, copy: Path) -> Printed:
    """Run a command as a reader would."""
    environ = {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    return printed_by(
        run_command(["bash", "-c", command], copy, DEADLINE_S, **environ), copy
    )


def fork(command: str, copy: Path, run_script: Callable[..., Ended]) -> Printed:
    """Run a plain command's script on forks of this process, which start at once."""
    ranks, script, arguments = plain(command)

    def enter(module) -> None:
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)  # for processes that the script starts
        if not has_main(script):
            module.main = lambda: runpy.run_path(script, run_name="__main__") and 0

    ended = run_script(
        script if has_main(script) else STAND_IN,
        *arguments,
        world_size=ranks or 1,
        environ=None if ranks else {},
        before=enter,
        timeout_s=DEADLINE_S,
    )
    return printed_by(ended, copy)


# figures and recorded outputs

FIGURE = re.compile(
    r"!\[[^\]]+\]\(([^)]+)\)\n"
    r"<!-- drawn by the command above(, times differ)?: (\S+) -->"
)


def fault_of_figure(figure: Path, drawn: Path, times_differ: bool) -> str | None:
    """Say why a page's figure is not what its command drew; None where it is."""
    if not drawn.exists():
        return f"no command drew {drawn} for {figure}"
    if (
        figure.suffix == ".svg"
    ):  # coordinates are measured or rounded; the shapes and words are not
        one, two = (
            re.sub(r"[\d.]+", "N", file.read_text()) for file in (figure, drawn)
        )
        same = one == two or (times_differ and one.count("<") == two.count("<"))
    else:
        one, two = png.imread(figure), png.imread(drawn)
        # Another picture of the same kind differs in a few hundredths, a blank one in
        # more.
        limit = 0.15 if times_differ else 0.01
        same = one.shape == two.shape and (
            abs(one - two).mean() < limit and two.std() > 0.5 * one.std()
        )
    return None if same else f"{figure} is not what {drawn} shows: draw it again"


def fault_of_record(text: str, file: Path) -> str | None:
    """Say why a block is not what a recorded file holds; None where it is."""
    if not file.exists():
        return f"{file} is not there"
    record = json.loads(file.read_text())
    missing = {"machine", "versions", "date", "output"} - set(record)
    if missing:
        return f"{file} has no {sorted(missing)}"
    if record["output"] != text.splitlines():
        return (
            difference(text, "\n".join(record["output"])) or f"{file} has other digits"
        )
    return None


def follow(path: str, copy: Path, run_script) -> None:
    """Run a page's commands; compare their output and figures with the page.

    The commands of the front page are launched as a reader would; scripts on other
    pages run on forks, for a third of the time.
    """
    __tracebackhide__ = True  # the message says it all
    launched, missing = (
        set(),
        set(),
    )  # scripts; folders that commands left out would have filled
    for step in steps(read(path)):
        lacks = step.lacks()
        if lacks and not step.recorded:
            warnings.warn(
                f"{path}:{step.commands.line} was not run: {lacks}", stacklevel=1
            )
        printed, left_out = None, False
        for line, command in commands(step.commands):
            run = runnable(command)
            if run is None:
                continue
            left_out = bool(lacks or missing & folders(run))
            if left_out:
                missing |= folders(run)
                continue
            where = f"{path}:{line}: {command}\n"
            script = plain(run) and plain(run)[1]
            fresh = path in ("README.md", FRESH)
            # Ranks of hello_*.py print in turns.
            forked = (
                script and (script in launched or not fresh) and "/hello_" not in script
            )
            launched.add(script)
            try:
                printed = fork(run, copy, run_script) if forked else launch(run, copy)
            except (Exception, pytest.fail.Exception) as error:
                raise AssertionError(f"{where}{error}") from error
            fault = "did not fail" if step.fails() else "failed"
            assert printed.failed == step.fails(), (
                f"{where}{fault}:\n{printed.everything}"
            )
            assert not printed.noise, (
                f"{where}stderr says what no page shows:\n{printed.noise}"
            )
        if left_out:
            continue
        if step.output:
            assert printed, f"{path}:{step.output.line}: output without a command"
            wrong = difference(
                step.output.text, *printed.orders(), first_line=step.output.line + 1
            )
            assert not wrong, (
                f"{where}{path}: {wrong}\nprinted was:\n{printed.everything}"
            )
        for figure, times_differ, drawn in FIGURE.findall(step.after):
            fault = fault_of_figure(
                (REPO / path).parent / figure, copy / drawn, bool(times_differ)
            )
            assert not fault, f"{where}{fault}"
