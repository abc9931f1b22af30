"""What a sweep was asked for: flags over a TOML file over defaults, checked before it starts."""

import argparse
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import bench_launch
import bench_link
import bench_strategies
import bench_toml
from bench_strategies import REFERENCE, Strategy
from dist_common import cli, models

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
NO_LINK = "none"
MOST = 1e9  # of any number, as the flags of the scripts have it
# Whether these differ or not, a point has the same results: a sweep may be continued with others.
NOT_COMPARED = ("timeout", "output_dir", "strategies_file")


@dataclass
class Settings:
    """What the flags of `sweep` say; a TOML file has the same names, with `_` for `-`."""

    strategies: list[str] = field(default_factory=lambda: ["ddp", "fsdp-full"])
    strategies_file: str | None = None
    world_sizes: list[int] = field(default_factory=lambda: [2])
    presets: list[str] = field(default_factory=lambda: ["tiny"])
    precisions: list[str] = field(default_factory=lambda: ["32-true"])
    links: list[str] = field(default_factory=lambda: [NO_LINK])
    reference: bool = True  # train with `single` too, the loss that others must have
    repeats: int = 3
    scaling: str = "strong"
    global_batch_size: int = 16  # sequences per step; with weak scaling per rank
    micro_batch_size: int | None = None  # the largest one, in sequences
    seq_len: int = 128  # tokens
    max_steps: int = 20
    untimed_steps: int = 3
    lr: float = 2e-3
    warmup_steps: int = 2
    seed: int = 0
    timeout: float = 600.0  # seconds
    launcher: str = "auto"
    device: str = "auto"
    output_dir: str = "runs/sweep"

    def compared(self, strategies: list[Strategy]) -> dict[str, Any]:
        """Return what sweep.json keeps: all that results depend on, each strategy's script too."""
        own = {name: value for name, value in asdict(self).items() if name not in NOT_COMPARED}
        commands = {row.name: f"{row.script} {row.flags}".strip() for row in strategies}
        return own | {"commands": commands}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `sweep`; a flag that is not given is None, so that a file may say it."""
    add, positive = parser.add_argument, cli.positive_int
    add("--config", metavar="FILE", help="TOML file that says what flags do not")
    add("--strategies", nargs="+", metavar="NAME", help="see `list` (ddp fsdp-full)")
    add("--world-sizes", nargs="+", type=positive, metavar="N", help="numbers of ranks (2)")
    add("--presets", nargs="+", metavar="NAME", help="models (tiny)")
    add("--precisions", nargs="+", metavar="NAME", help="32-true, bf16-mixed, 16-mixed (32-true)")
    add("--links", nargs="+", metavar="RATE",
        help="speed of each rank's link, such as 100mbit; none: as it is (none)")  # fmt: skip
    add("--repeats", type=positive, help="times that each point runs, in turn with the others (3)")
    add("--scaling", choices=("strong", "weak"),
        help="same global batch on all world sizes, or times the ranks (strong)")  # fmt: skip
    add_run_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how each point trains, which `train` has as well."""
    add, positive = parser.add_argument, cli.positive_int
    add("--strategies-file", metavar="FILE", help="TOML file with strategies of your own")
    add("--no-reference", action="store_false", default=None, dest="reference",
        help="leave out one process: the median of strategies is compared with")  # fmt: skip
    add("--global-batch-size", type=positive, metavar="N", help="sequences per step (16)")
    add("--micro-batch-size", type=positive, metavar="N",
        help="most sequences per rank at a time, by accumulating gradients (no limit)")  # fmt: skip
    add("--seq-len", type=positive, metavar="N", help="tokens per sequence (128)")
    add("--max-steps", type=positive, metavar="N", help="optimizer steps of a point (20)")
    add("--untimed-steps", type=cli.whole_number, metavar="N", help="first steps not timed (3)")
    add("--lr", type=cli.positive_float, help="peak learning rate of AdamW (0.002)")
    add("--warmup-steps", type=cli.whole_number, metavar="N", help="steps of linear warmup (2)")
    add("--seed", type=cli.whole_number, help="of weights and order of samples (0)")
    add("--timeout", type=cli.positive_float, metavar="SECONDS", help="of each point (600)")
    add("--launcher", choices=bench_launch.LAUNCHERS,
        help="auto: srun in a SLURM job, torchrun where GPUs are, else fork (auto)")  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), help="(auto)")
    add("--output-dir", metavar="DIR", help="the sweep's folder (runs/sweep)")


def settle(args: argparse.Namespace) -> tuple[Settings, list[Strategy]]:
    """Return the settings that hold, and their strategies, with the reference before them.

    Raises: UsageError naming the flag or the file's key.
    """
    path = getattr(args, "config", None)
    where = path or "the command line"
    table = bench_toml.load(path) if path else {}
    known = [field.name for field in fields(Settings)]
    given = {name: getattr(args, name, None) for name in known}
    flags = {name: value for name, value in given.items() if value is not None}
    settings = bench_toml.fill(Settings, table | flags, where)
    own = settings.strategies_file
    if own and "strategies_file" not in flags:  # a path in a file is relative to it
        settings.strategies_file = own = str(Path(path).parent / own)
    _check(settings, where)
    strategies = bench_strategies.load(own)
    names = [*[REFERENCE] * settings.reference, *settings.strategies]
    chosen = bench_strategies.choose(names, strategies)
    settings.strategies = [strategy.name for strategy in chosen]
    settings.launcher, settings.device = bench_launch.resolve(settings.launcher, settings.device)
    here = not getattr(args, "dry_run", False)
    if here:
        bench_launch.require(settings.launcher, settings.device)
    _check_links(settings, here)
    return settings, chosen


def _check(settings: Settings, where: str) -> None:
    """Check what argparse has not seen, as it may come from a file."""
    for name in ("repeats", "global_batch_size", "seq_len", "max_steps", "lr", "timeout"):
        if not 0 < getattr(settings, name) <= MOST:  # which NaN is not
            raise cli.UsageError(f"{where}: {name} must be above 0, at most {MOST:g}")
    for name in ("untimed_steps", "warmup_steps", "seed"):
        if getattr(settings, name) < 0:
            raise cli.UsageError(f"{where}: {name} must be at least 0")
    if settings.micro_batch_size is not None and settings.micro_batch_size < 1:
        raise cli.UsageError(f"{where}: micro_batch_size must be at least 1")
    allowed = {
        "presets": models.PRESETS, "precisions": PRECISIONS, "scaling": ("strong", "weak"),
        "launcher": bench_launch.LAUNCHERS, "device": ("auto", "cpu", "cuda"),
    }  # fmt: skip
    for name, values in allowed.items():
        chosen = getattr(settings, name)
        for value in [chosen] if isinstance(chosen, str) else chosen:
            if value not in values:
                hint = bench_toml.nearest(value, values)
                said = f"{where}: {name}: there is no {value}{hint}"
                raise cli.UsageError(f"{said} Allowed: {', '.join(values)}")
    for name in ("strategies", "world_sizes", "presets", "precisions", "links"):
        values = getattr(settings, name)
        if not values:
            raise cli.UsageError(f"{where}: {name} is empty")
        setattr(settings, name, list(dict.fromkeys(values)))  # one that is named twice counts once
    if min(settings.world_sizes) < 1:
        raise cli.UsageError(f"{where}: world_sizes must be at least 1")
    if settings.untimed_steps >= settings.max_steps:
        steps = f"untimed_steps {settings.untimed_steps} of max_steps {settings.max_steps}"
        raise cli.UsageError(f"{where}: {steps} leave none to time")
    for preset in settings.presets:
        models.preset(preset, settings.seq_len)  # refuses a sequence that is too long for it


def _check_links(settings: Settings, here: bool) -> None:
    links = [link for link in settings.links if link != NO_LINK]
    for link in links:
        try:
            cli.link_rate(link)
        except argparse.ArgumentTypeError as error:
            raise cli.UsageError(f"links {error}, or {NO_LINK}") from error
    if links and settings.launcher != bench_launch.FORK:
        raise cli.UsageError(f"links need --launcher {bench_launch.FORK}, and so the CPU")
    if links and here and (reason := bench_link.why_not()):
        raise cli.UsageError(f"links: {reason}")
