"""What a sweep is asked for: flags over a TOML file over defaults, checked before it starts."""

import argparse
from pathlib import Path
from typing import Any

from bench import launch, search, strategies
from bench.strategies import PRECISIONS, REFERENCE, Strategy
from bench.template import Template
from dist_common.model import PRESETS
from legacy_common import cli
from legacy_common.lab import namespaces

NO_LINK = "none"
WARMUP_STEPS = 2  # unless asked for
# Peak learning rates, unless asked for. With 2e-3, rounding to bfloat16 moves the first losses of
# 124m by 0.04, with 6e-4 by 0.015. Sources: GPT-3, table 2.1; Llama 2, 2.2; Llama 3, table 3.
LR = {
    "tiny": 2e-3, "124m": 6e-4, "1b": 2e-4, "llama2-7b": 3e-4, "llama3-8b": 3e-4,
    "llama3-70b": 1.5e-4,
}  # fmt: skip
# What has no default in the flags, as what it would be.
EXAMPLES = {"micro_batch_size": 1, "strategies_file": "", "lr": 1.0, "ranks_per_node": 1,
            "micro_batch_sizes": [1], "recompute": [""], "compile": [""]}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, with exit code 2."""

    def error(self, message: str) -> None:
        raise cli.UsageError(message)


def link(text: str) -> str:
    """Check the speed of a link, such as 100mbit."""
    if text != NO_LINK:
        cli.link_rate(text)
    return text


def add_launch_arguments(parser: argparse.ArgumentParser, output_dir: str | None) -> None:
    """Add the flags that say how points are started."""
    add = parser.add_argument
    add("--timeout", type=cli.positive_float, default=600.0, metavar="SECONDS",
        help="of each point (600)")  # fmt: skip
    add("--launcher", type=launch.parse, default=launch.AUTO, metavar="NAME|LINE",
        help="fork, torchrun, srun, or a line such as 'mpirun -np {ranks} {python} {command}' "
        "(auto: srun in a SLURM job, torchrun with GPUs, else fork)")  # fmt: skip
    add("--ranks-per-node", type=cli.positive_int, metavar="N",
        help="with a line: for {nodes} and {ranks_per_node} (all ranks on one)")  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(auto)")
    add("--output-dir", default=output_dir, metavar="DIR",
        help=f"folder of results; what it has does not run again ({output_dir})")  # fmt: skip


def add_point_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of commands that run many points."""
    add, positive = parser.add_argument, cli.positive_int
    add("--world-sizes", nargs="+", type=positive, default=[2], metavar="N",
        help="numbers of ranks (2)")  # fmt: skip
    add("--links", nargs="+", type=link, default=[NO_LINK], metavar="RATE",
        help="speed of every rank's link, such as 100mbit, or none: as it is (none)")  # fmt: skip
    add("--repeats", type=positive, default=3, help="times that each point runs, in turn (3)")
    add("--retry-failed", action="store_true", help="run points that failed before once more")
    add("--dry-run", action="store_true", help="print the commands of all points, start nothing")


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the one job."""
    add, positive = parser.add_argument, cli.positive_int
    add("--strategies-file", metavar="FILE", help="TOML file with your own as well")
    add("--no-reference", action="store_false", dest="reference",
        help="leave out one process: the median of strategies is compared with")  # fmt: skip
    add("--global-batch-size", type=positive, default=16, help="sequences per step (16)")
    add("--micro-batch-size", type=positive, help="most sequences per rank at a time (no limit)")
    add("--seq-len", type=positive, default=128, help="tokens per sequence (128)")
    add("--max-steps", type=positive, default=20, help="optimizer steps of a point (20)")
    add("--untimed-steps", type=cli.whole_number, default=3, help="first steps not timed (3)")
    add("--lr", type=cli.positive_float,
        help=f"peak learning rate of AdamW (by model: {LR['tiny']} for tiny)")  # fmt: skip
    add("--warmup-steps", type=cli.whole_number, default=WARMUP_STEPS,
        help="steps of linear warmup (2)")  # fmt: skip
    add("--seed", type=cli.whole_number, default=0, help="of weights and order of samples (0)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `sweep` that a file can have too."""
    add = parser.add_argument
    add("--strategies", nargs="+", default=["ddp", "fsdp-full"], metavar="NAME",
        help="see `list` (ddp fsdp-full)")  # fmt: skip
    add("--presets", nargs="+", choices=PRESETS, default=["tiny"], help="(tiny)")
    add("--precisions", nargs="+", choices=PRECISIONS, default=["32-true"], help="(32-true)")
    add("--scaling", choices=("strong", "weak"), default="strong",
        help="same global batch on all world sizes, or weak: times ranks (strong)")  # fmt: skip
    add_point_arguments(parser)
    add("--trace", action="store_true",
        help="also run a few steps of each with the profiler: where does the time go?")  # fmt: skip
    add("--until-decided", action="store_true",
        help="end after a round, from the third on, that leaves no order open")  # fmt: skip
    add_job_arguments(parser)
    search.add_arguments(parser)
    add_launch_arguments(parser, "runs/sweep")


def read_file(path: str) -> dict[str, Any]:
    """Return what a TOML file asks for, in place of flags. Raises: UsageError naming the file."""
    parser = Parser()
    add_arguments(parser)
    known = vars(parser.parse_args([])) | EXAMPLES
    table = strategies.load_toml(path)
    words = []
    for key, value in table.items():
        strategies.check_kind(path, key, value, known)
        if key == "reference":
            words += ["--no-reference"] * (not value)
        elif isinstance(value, bool):
            words += [f"--{key.replace('_', '-')}"] * value
        else:
            values = value if isinstance(value, list) else [value]
            words += [f"--{key.replace('_', '-')}", *map(str, values)]
    try:
        given = vars(parser.parse_args(words))
    except cli.UsageError as error:
        raise cli.UsageError(f"{path}: {error}") from error
    found = {key: given[key] for key in table}
    if "strategies_file" in found:  # relative to the file
        found["strategies_file"] = str(Path(path).parent / found["strategies_file"])
    return found


def settle(args: argparse.Namespace) -> list[Strategy]:
    """Check and complete flags; return the strategies, the reference first. Raises: UsageError."""
    if args.untimed_steps >= args.max_steps:
        steps = f"--untimed-steps {args.untimed_steps} of --max-steps {args.max_steps}"
        raise cli.UsageError(f"{steps} leave none to time")
    settle_models(args)
    names = [*[REFERENCE] * args.reference, *args.strategies]
    chosen = strategies.choose(names, strategies.load(args.strategies_file))
    chosen = search.variants(chosen, args)
    args.strategies = [strategy.name for strategy in chosen]
    args.commands = {row.name: f"{row.script} {row.flags}".strip() for row in chosen}
    settle_launch(args)
    return chosen


def settle_models(args: argparse.Namespace) -> None:
    """Check that the models can read --seq-len tokens. Raises: UsageError."""
    args.presets = list(dict.fromkeys(args.presets))
    for name in args.presets:
        longest = PRESETS[name].max_seq_len
        if args.seq_len > longest:
            raise cli.UsageError(f"--seq-len must be at most {longest}, which {name} can read")


def settle_launch(args: argparse.Namespace) -> None:
    """Decide launcher and device; check them and the links, unless nothing will be started here."""
    for name, value in vars(args).items():
        if isinstance(value, list):  # what is named twice counts once
            setattr(args, name, list(dict.fromkeys(value)))
    if isinstance(args.launcher, Template):
        args.launcher.ranks_per_node = args.ranks_per_node
    elif args.ranks_per_node:
        raise cli.UsageError("--ranks-per-node needs a line as the --launcher")
    args.launcher, args.device = launch.resolve(args.launcher, args.device)
    slow = set(args.links) - {NO_LINK}
    if slow and args.launcher != launch.FORK:
        raise cli.UsageError(f"--links need --launcher {launch.FORK}, and so the CPU")
    if args.dry_run:
        return
    launch.require(args.launcher, args.device)
    if slow and (reason := namespaces.why_not()):
        raise cli.UsageError(f"--links: {reason}")
