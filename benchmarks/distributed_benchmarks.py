"""Compare strategies of distributed training: the same loss, then speed and memory.

    CPU   python benchmarks/distributed_benchmarks.py sweep \\
              --config benchmarks/quick.toml
    GPU   python benchmarks/distributed_benchmarks.py sweep \\
              --config benchmarks/one_node.toml

It starts the scripts of the modules as processes and reads their results.json.
Look for: the first line, which is the answer, and the second, which is its condition.

    list      the strategies
    sweep     strategies x ranks x models x precisions; continues where it was killed
    report    the answer, the tables and an HTML page of a sweep
    compare   two sweeps: which differences are beyond the noise?
    comm      collectives without training

Sources: nccl-tests, torchtitan's benchmark reports; method.md says what is timed.
"""

import argparse
import shlex
import signal
import sys
from pathlib import Path

from tabulate import tabulate

from bench import comm, compare, gallery, launch, report, runner, store, strategies
from bench.analysis import analyse
from bench.points import EARLY_STEPS, plan
from bench.strategies import REFERENCE
from dist_common import cli
from dist_common.cli import PRECISIONS, UsageError, positive_float, positive_int
from dist_common.model import PRESETS

# A sweep can be resumed with different values of these flags.
FREE = ("command", "config", "dry_run", "output_dir", "retry_failed", "timeout", "run")
FREE += ("submit", "note")


class BenchmarkParser(argparse.ArgumentParser):
    """argparse whose errors are UsageErrors: one line, exit code 2."""

    def error(self, message):
        raise UsageError(message)


def add_launch_flags(parser, folder):
    add = parser.add_argument
    add("--world-sizes", nargs="+", type=positive_int, default=[2], help="ranks (2)")
    add("--repeats", type=positive_int, default=3, help="rounds (3)")
    add("--launcher", default="auto", help="fork, torchrun, srun, or a line (auto)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(auto)")
    add(
        "--timeout",
        type=positive_float,
        default=600,
        metavar="SECONDS",
        help="of each point (600)",
    )
    add("--output-dir", type=Path, default=folder, metavar="DIR", help=f"({folder})")


def add_submit_flags(parser):
    add = parser.add_argument
    add("--submit", metavar="NAME", help="write benchmarks/results/NAME.md and .json")
    add("--note", default="", help="who measured, interconnect, power limits")


def add_sweep_flags(parser):
    add = parser.add_argument
    add("--config", metavar="FILE", help="TOML file with any of these flags")
    add("--strategies", nargs="+", default=["ddp", "fsdp-full"], help="see `list`")
    add("--strategies-file", metavar="FILE", help="TOML file with your strategies")
    add("--presets", nargs="+", choices=PRESETS, default=["tiny"], help="(tiny)")
    add("--precisions", nargs="+", choices=PRECISIONS, default=["32-true"])
    add("--scaling", choices=("strong", "weak"), default="strong")
    add("--no-reference", action="store_true", help="do not run one process")
    add("--global-batch-size", type=positive_int, default=16, help="sequences (16)")
    add("--micro-batch-size", type=positive_int, help="sequences, at most (no limit)")
    add("--seq-len", type=positive_int, default=128, help="tokens (128)")
    add("--max-steps", type=positive_int, default=20, help="of each point (20)")
    add("--untimed-steps", type=cli.whole_number, default=3, help="first steps (3)")
    add("--lr", type=positive_float, help="peak learning rate (by model)")
    add("--warmup-steps", type=cli.whole_number, default=2, help="(2)")
    add("--seed", type=cli.whole_number, default=0, help="(0)")
    add("--dry-run", action="store_true", help="print the commands, start nothing")
    add("--retry-failed", action="store_true", help="run failed points once more")
    add_launch_flags(parser, Path("runs/sweep"))
    add_submit_flags(parser)


def add_report_flags(parser):
    add = parser.add_argument
    add("path", metavar="PATH", help="a sweep's folder, or a file of results/")
    add("--predict", action="store_true", help="add the planner's column (bf16-mixed)")
    add(
        "--output-dir", type=Path, metavar="DIR", help="for the HTML page (the sweep's)"
    )
    add_submit_flags(parser)


def add_compare_flags(parser):
    for name in ("first", "second"):
        parser.add_argument(
            name, metavar="PATH", help="a folder, or a file of results/"
        )


def add_comm_flags(parser):
    add = parser.add_argument
    add("--collectives", nargs="+", default=["all_reduce"], help="(all_reduce), or all")
    add("-b", "--minbytes", help="first size, such as 8 or 64K (8)")
    add("-e", "--maxbytes", help="last size (16M)")
    add("-f", "--stepfactor", help="from one size to the next (2)")
    add("-n", "--iters", help="timed calls of each size (20)")
    add_launch_flags(parser, Path("runs/comm"))


def add_list_flags(parser):
    parser.add_argument(
        "--strategies-file", metavar="FILE", help="with your strategies"
    )


def list_strategies(args):
    rows = [
        (row.name, row.does, row.script.name)
        for row in strategies.load(args.strategies_file).values()
    ]
    print(tabulate(rows, ("strategy", "what it does", "script")))


def run_sweep(args):
    """Run all points that have not ended yet, then print the report."""
    if args.untimed_steps >= args.max_steps:
        raise UsageError("--untimed-steps must be below --max-steps")
    if args.max_steps <= EARLY_STEPS:
        raise UsageError(f"--max-steps must be above {EARLY_STEPS}")
    names = [] if args.no_reference else [REFERENCE]
    table = strategies.load(args.strategies_file)
    chosen = strategies.choose([*names, *args.strategies], table)
    if not args.dry_run:
        args.launcher, args.device = launch.resolve(args.launcher, args.device)
    points = plan(args, chosen)
    if args.dry_run:
        for point in points:
            line = runner.build_command_line(
                point, args, f"{args.output_dir}/points/ID/run"
            )
            print(f"{point.identity}: {point.reason or line}")
        return 0
    settings = {name: value for name, value in vars(args).items() if name not in FREE}
    settings["points"] = len(points)
    again = f"python {shlex.join(sys.argv)}"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = store.Store(args.output_dir, settings, again)
    print(
        f"{len(points)} points, started by {args.launcher}; results in {folder.folder}"
    )
    try:
        runner.run_points(points, args, folder)
    except runner.Interrupted as stopped:
        print(f"\ninterrupted: {stopped} of {len(points)} points have ended; resume:")
        print(f"  {again}")
        return cli.INTERRUPTED
    print()
    args.path, args.predict = folder.folder, False
    return show(args)


def show(args):
    """Print and write the report of a sweep; return 1 if a strategy is wrong."""
    analysis = analyse(store.load(args.path))
    predictions = report.predict(analysis) if args.predict else None
    print(report.render_text(analysis, predictions))
    folder = args.output_dir or Path(args.path)
    if folder.suffix != ".json":
        print(f"\nwrote {report.write(analysis, folder, predictions)} to {folder}")
    ended = len(analysis.sweep.records)
    if ended < analysis.sweep.settings["points"]:
        print(f"not complete; resume: {analysis.sweep.command}")
    if args.submit:
        print(f"wrote {gallery.submit(analysis, args.submit, args.note)} and its page")
    return cli.FAILED if report.is_wrong(analysis) else 0


def show_comparison(args):
    print(compare.compare(store.load(args.first), store.load(args.second)))


def run_comm(args):
    comm.check_flags(args)
    return comm.run(args)


COMMANDS = {
    "list": (add_list_flags, list_strategies, "the strategies"),
    "sweep": (add_sweep_flags, run_sweep, "measure many strategies in turns"),
    "report": (add_report_flags, show, "the answer and the tables of a sweep"),
    "compare": (add_compare_flags, show_comparison, "two sweeps next to each other"),
    "comm": (add_comm_flags, run_comm, "collectives without training"),
}


def read_config(path):
    """Return the flags in a TOML file; flags on the command line override them."""
    words = []
    for key, value in strategies.load_toml(path).items():
        flag = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            words += [flag] if value else []
        else:
            values = value if isinstance(value, list) else [value]
            words += [flag, *map(str, values)]
    return words


def parse_args():
    parser = BenchmarkParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add_flags, run, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        add_flags(command)
        command.set_defaults(run=run)
    args = parser.parse_args()
    if getattr(args, "config", None):
        flags = sys.argv[2:]
        args = parser.parse_args(["sweep", *read_config(args.config), *flags])
    return args


def main():
    args = parse_args()
    return args.run(args)


if __name__ == "__main__":
    cli.run(main)
