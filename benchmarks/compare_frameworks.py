"""Train the one job in each framework: is the result right, and what does the framework cost?

    CPU   python benchmarks/compare_frameworks.py
    GPU   the same

It starts each port of frameworks/ in the environment that `make frameworks` makes; they take
turns, --repeats times. Look for: equal losses and the world size that was asked for, then CPU time
per step as a ratio to bare PyTorch's, and whether the rounds can tell it from 1.

    --frameworks fabric_ddp my_port.py   some of them, and a file of your own
"""

import difflib
import signal
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from bench.analysis import CONFIDENCE, ratio_of
from bench.ports import ENVIRONMENT, PORTS, REPO, Port, Run, count_code_lines, run_port, versions_in
from dist_common.model import PRESETS
from legacy_common import cli, runtime
from legacy_common.report import Report

# A framework may add up gradients in another order: float32 rounding, which grows with the steps.
FIRST_STEPS = 10
FIRST_TOLERANCE, LATER_TOLERANCE = 1e-5, 1e-3
HEADERS = (
    "framework", "version", "ranks", "difference", "CPU time", "from", "to", "cost",
    "start, end", "lines", "verdict",
)  # fmt: skip


@dataclass
class Row:
    """A port in the table: what was found in all its runs, and what is wrong with them."""

    name: str
    version: str
    code_lines: int
    world_size: int = 0
    steps: int = 0
    first_difference: float | None = None  # of losses, the largest in the first steps
    loss_difference: float | None = None  # in all steps
    ratios: list[float] = field(default_factory=list)  # of CPU time, one for each repeat
    outside_s: float | None = None
    fault: str | None = None

    @property
    def cost(self) -> str:
        """Say whether CPU time differs from the bare loop's by more than noise does."""
        if len(self.ratios) < 2:
            return "?"
        found = ratio_of(self.ratios)
        return ("more" if found.log > 0 else "less") if found.differs else "same"


def compare(ports: list[Port], runs: dict[str, list[Run]], versions: dict, args) -> list[Row]:
    """Compare each port's runs with the bare loops'. Nothing is printed or started here."""
    rows = []
    for port in ports:
        lines = count_code_lines(port.path.read_text())
        row = Row(port.name, versions.get(port.package) or "-", lines)
        rows.append(row)
        own = runs.get(port.name)
        if own is None:
            row.fault = "not installed"
            continue
        failure = next((run.failure for run in own if run.failure), None)
        done = [run for run in own if run.losses]
        if not done:
            row.fault = failure
            continue
        row.world_size = min(run.world_size for run in done)
        lengths = [len(run.losses) for run in done]
        row.steps = max(lengths, key=lambda steps: abs(steps - args.max_steps))
        row.outside_s = statistics.median(run.outside_s for run in done)
        expected = next((run.losses for run in runs["bare_ddp"] if run.losses), [])
        apart = [differences(run.losses, expected) for run in done]
        row.first_difference = worst([worst(own[:FIRST_STEPS]) for own in apart])
        row.loss_difference = worst([worst(own) for own in apart])
        row.fault = fault_of(row, failure, args)
        pairs = zip(own, runs[port.base], strict=True)
        ratios = [run.cpu_ms / bare.cpu_ms for run, bare in pairs if run.losses and bare.losses]
        row.ratios = [ratio for ratio in ratios if ratio == ratio]  # not every script measures it
    return rows


def differences(losses: list[float], expected: list[float]) -> list[float]:
    """Return how far two runs' losses are apart, over the steps that both have."""
    pairs = zip(losses, expected, strict=False)
    return [abs(own - other) for own, other in pairs] or [float("nan")]


def worst(differences: list[float]) -> float:
    """Return the largest difference, or NaN if one is NaN, which max() may lose."""
    return next((value for value in differences if value != value), max(differences))


def fault_of(row: Row, failure: str | None, args) -> str | None:
    """Say what is wrong with runs that wrote results; None if nothing is.

    A port ends with an error itself after another world size or number of steps: the cause first.
    """
    if row.world_size != args.world_size:
        return f"WRONG: world size {row.world_size}, not {args.world_size}"
    if row.steps != args.max_steps:
        return f"WRONG: {row.steps} steps, not {args.max_steps}"
    if failure:
        return failure
    alike = row.first_difference <= FIRST_TOLERANCE and row.loss_difference <= LATER_TOLERANCE
    return None if alike else "WRONG: other losses"


def show(report: Report, rows: list[Row]) -> None:
    """Print the table, add a check for each thing that must be so in each port that ran."""
    table = []
    for row in rows:
        ran = row.world_size > 0
        ratios = [f"{ratio:.2f}x" for ratio in sorted(row.ratios)]
        middle = f"{statistics.median(row.ratios):.2f}x" if ratios else "-"
        table.append((
            row.name,
            row.version,
            str(row.world_size) if ran else "-",
            f"{row.loss_difference:.1e}" if ran else "-",
            middle,
            *((ratios[0], ratios[-1]) if len(ratios) > 1 else ("-", "-")),
            row.cost if ratios else "-",
            f"{row.outside_s:.1f} s" if ran else "-",
            str(row.code_lines),
            row.fault or "right",
        ))  # fmt: skip
    report.table(table, HEADERS)
    if all(len(row.ratios) < 2 for row in rows):
        report.say("one run of each: how wide the noise is cannot be known, so no cost is compared")
    else:
        interval = f"the {CONFIDENCE:.0%} interval of its rounds' ratios"
        report.say(
            f"noise: a cost is more or less if {interval} leaves 1 out; more rounds narrow it"
        )
    for row in rows:
        if row.fault == "not installed":
            continue
        report.check(f"{row.name}: runs that failed", int("FAILED" in (row.fault or "")), 0, 0, "")
        if row.world_size:
            asked = report.args.world_size
            report.check(f"{row.name}: world size", row.world_size, asked, 0, "--world-size")
            report.check(f"{row.name}: steps", row.steps, report.args.max_steps, 0, "--max-steps")
            for name, error, tolerance in (
                (f"loss difference, first {FIRST_STEPS}", row.first_difference, FIRST_TOLERANCE),
                ("loss difference, all steps", row.loss_difference, LATER_TOLERANCE),
            ):
                report.check(f"{row.name}: {name}", error, 0, tolerance, "bare_ddp")


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, positive = parser.add_argument, cli.positive_int
    add("--frameworks", nargs="+", metavar="NAME",
        help=f"of {', '.join(PORTS)}; or a file of your own (all)")  # fmt: skip
    add("--repeats", type=positive, default=3, help="runs of each, in turn (3)")
    add("--world-size", type=positive, default=2, help="ranks of each run (2)")
    add("--preset", choices=PRESETS, default="tiny", help="size of the model (tiny)")
    add("--seq-len", type=positive, default=64, help="tokens per sequence (64)")
    add("--micro-batch-size", type=positive, default=8, help="sequences per rank and step (8)")
    add("--max-steps", type=positive, default=40,
        help="steps of each run; the first 10 are not timed (40)")  # fmt: skip
    add("--limit", type=cli.positive_float, default=300, help="seconds that a run may take (300)")
    add("--python", type=Path, help=f"that runs the ports ({ENVIRONMENT}, if it is there)")
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.python is None:
        # Beside the environment that runs this, or in the repository.
        places = [folder / ENVIRONMENT for folder in (Path(sys.prefix).parent, REPO)]
        args.python = next((path for path in places if path.exists()), Path(sys.executable))
    return args


def choose(args, versions: dict[str, str | None]) -> list[Port]:
    """Return the ports that --frameworks names, with the bare loops they are compared with.

    Raises: UsageError for an unknown name, or for one that was named and is not installed.
    """
    chosen = []
    for name in args.frameworks or PORTS:
        port = PORTS.get(name)
        if port is None and Path(name).suffix == ".py" and Path(name).exists():
            port = Port(Path(name).stem, "torch", script=Path(name).absolute())
        if port is None:
            near = difflib.get_close_matches(name, PORTS, 1)
            meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(PORTS)}"
            raise cli.UsageError(f"--frameworks {name}: no such port or file; {meant}")
        if args.frameworks and versions.get(port.package) is None:
            raise cli.UsageError(
                f"--frameworks {name}: {port.package} is not installed for {args.python}; "
                f"{port.to_install}"
            )
        chosen.append(port)
    needed = {PORTS["bare_ddp"], *(PORTS[port.base] for port in chosen), *chosen}
    known = [port for port in PORTS.values() if port in needed]
    return known + [port for port in chosen if port not in known]


def turns_of(ports: list[Port], repeats: int) -> list[tuple[int, Port]]:
    """Return all runs in order; every second round goes backwards, so that none is always first."""
    return [
        (repeat, port)
        for repeat in range(repeats)
        for port in (ports[::-1] if repeat % 2 else ports)
    ]


def main():
    args = parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the port that runs, too
    versions = versions_in(args.python)
    ports = choose(args, versions)
    world = runtime.World(0, 0, 1, 1, "python")
    report = Report("benchmarks/compare_frameworks.py", args, world, torch.device(args.device))
    tokens = args.world_size * args.micro_batch_size * args.seq_len
    report.start(
        f"{args.preset}: {args.max_steps} steps of {tokens:,} tokens on {args.world_size} ranks; "
        f"runs of each framework: {args.repeats}"
    )
    able = [port for port in ports if versions.get(port.package)]
    runs = {port.name: [] for port in able}
    with tempfile.TemporaryDirectory(prefix="frameworks-") as scratch:
        turns = turns_of(able, args.repeats)
        for number, (repeat, port) in enumerate(report.progress(turns, "training"), 1):
            run = run_port(port, args, Path(scratch, f"{port.name}-{repeat}"))
            runs[port.name].append(run)
            if not sys.stderr.isatty():  # so there is no bar
                said = run.failure or f"{len(run.losses)} steps"
                report.say(f"[{number}/{len(turns)}] {port.name}: {said}")
    rows = compare(ports, runs, versions, args)
    show(report, rows)
    report.metrics |= {"rows": [asdict(row) for row in rows], "versions": versions}
    return report.finish("every framework that ran trained the same job")


if __name__ == "__main__":
    cli.run(main)
