"""Compare strategies of distributed training by measurement: speed, memory, bytes, the same loss.

    CPU   python benchmarks/distributed_benchmarks.py sweep --config benchmarks/quick.toml
    GPU   python benchmarks/distributed_benchmarks.py sweep --config benchmarks/one_node.toml

It starts the lessons' own scripts itself, as forks, with torchrun, or with srun inside a SLURM job.
Look for: the verdict of each strategy's loss first, then whether times differ beyond the noise.

    list     the strategies, and what each can run on
    train    one strategy on one number of ranks
    comm     the collectives by themselves
    sweep    strategies x world sizes x models x precisions x links, resumed where it was killed
    report   tables, CSV, figures and an HTML page of a sweep

Sources: nccl-tests (what is reported), torchtitan's benchmark reports (versions, flags, hardware in
the file); benchmark_method.md says what is timed.
"""

import argparse

from tabulate import tabulate

from bench import comm, report, runner, settings, strategies, train
from bench.points import plan
from legacy_common import cli


def list_strategies(args: argparse.Namespace) -> int:
    """Print the strategies and what each can run on."""
    rows = []
    for strategy in strategies.load(args.strategies_file).values():
        kind = "" if strategy.exact else " (lossy)"
        rows.append((strategy.name, strategy.does + kind, strategy.world_sizes, strategy.path.name))
    headers = ("strategy", "what it does", "world sizes", "script")
    print(tabulate(rows, headers, disable_numparse=True))
    return 0


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `list`."""
    parser.add_argument("--strategies-file", metavar="FILE", help="TOML file with your own as well")


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `sweep`."""
    parser.add_argument("--config", metavar="FILE", help="TOML file that says what flags do not")
    settings.add_arguments(parser)


def sweep(args: argparse.Namespace) -> int:
    """Run all points, one after the other, recording each; resume where a sweep was killed."""
    chosen = settings.settle(args)
    return runner.run(plan(args, chosen), args)


COMMANDS = {
    "list": (add_list_arguments, list_strategies, "the strategies, and what each can run on"),
    "train": (train.add_arguments, train.run, "one strategy on one number of ranks"),
    "comm": (comm.add_arguments, comm.run, "the collectives by themselves"),
    "sweep": (add_sweep_arguments, sweep, "many points, one after the other"),
    "report": (report.add_arguments, report.run, "what a sweep measured"),
}


def parse_args() -> argparse.Namespace:
    parser = settings.Parser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add_arguments, run, help_text) in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        add_arguments(command)
        command.set_defaults(run=run)
    args = parser.parse_args()
    if getattr(args, "config", None):
        commands.choices["sweep"].set_defaults(**settings.read_file(args.config))
        args = parser.parse_args()
    return args


def main() -> int:
    args = parse_args()
    return args.run(args)


if __name__ == "__main__":
    cli.run(main)
