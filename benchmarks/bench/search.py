"""Search over micro-batches, recomputation and compile: each strategy as its script allows."""

import argparse
import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.store import OUT_OF_MEMORY, SKIPPED
from bench.strategies import REFERENCE, Strategy
from legacy_common import cli

NONE, OFF, ON = "none", "off", "on"
RECOMPUTE = (NONE, FULL := "full")
COMPILED = "compile"  # in a name
# What points share that differ in their micro-batch alone, beside the strategy.
ALIKE = ("kind", "world_size", "preset", "precision", "link", "global_batch_size", "seq_len")
# What an allocator says, or a template that asks for the memory before it builds the model.
NO_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|can't allocate memory|\bMemoryError\b"
    r"|needs [\d.,]+ GiB for weights"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the search."""
    add = parser.add_argument
    add("--micro-batch-sizes", nargs="+", type=cli.positive_int, metavar="N",
        help="try each strategy with each (as large as --micro-batch-size)")  # fmt: skip
    add("--recompute", nargs="+", choices=RECOMPUTE,
        help="activations that backward computes again: try each")  # fmt: skip
    add("--compile", nargs="+", choices=(OFF, ON),
        help="torch.compile: try each")  # fmt: skip


def options(strategy: Strategy) -> dict[str, str]:
    """Return what can be added to a strategy, by the word for it in names: its script's flags."""
    flags = strategy.recompute_flags
    kinds = RECOMPUTE[1:] if "{recompute}" in flags else (FULL,) * bool(flags)
    found = {kind: flags.format(recompute=kind) for kind in kinds}
    return found | ({COMPILED: strategy.compile_flags} if strategy.compile_flags else {})


def variants(chosen: Sequence[Strategy], args: argparse.Namespace) -> list[Strategy]:
    """Return each strategy in each combination that was asked for and that its script supports.

    Those that lack a choice are run without it, and named. The reference is never changed.
    """
    asked = vars(args)
    sizes = asked.get("micro_batch_sizes") or [0]
    if sizes != [0]:
        if args.micro_batch_size:
            raise cli.UsageError("--micro-batch-size is not allowed with --micro-batch-sizes")
        args.micro_batch_size = min(sizes)  # of the reference
    recompute = [value.replace(NONE, "") for value in asked.get("recompute") or [NONE]]
    compiled = [COMPILED * (value == ON) for value in asked.get("compile") or [OFF]]
    found, lacking = [], defaultdict(list)
    for strategy in chosen:
        if strategy.name == REFERENCE:
            found.append(strategy)
            continue
        known = {"": ""} | options(strategy)
        for value in (*recompute, *compiled):
            if value not in known:
                lacking[value].append(strategy.name)
        ways = ([value for value in values if value in known] or [""]
                for values in (recompute, compiled))  # fmt: skip
        for size, *words in itertools.product(sorted(set(sizes)), *map(dict.fromkeys, ways)):
            name = [strategy.name, f"mb{size}" * bool(size), *words]
            flags = [strategy.flags, *map(known.get, words)]
            name, flags = (" ".join(filter(None, each)) for each in (name, flags))
            found.append(replace(strategy, name=name, flags=flags, micro_batch_size=size))
    for value, names in lacking.items():
        flag = "--compile on" if value == COMPILED else f"--recompute {value}"
        print(f"{', '.join(names)}: no {flag}, run without")
    return found


def known_end(point: dict[str, Any], records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return how a point ends that need not run: it, or a smaller one, ran out of memory."""
    for record in records:
        other = record["point"]
        if record["status"] != OUT_OF_MEMORY or family(other) != family(point):
            continue
        own, smaller = (each.get("micro_batch_size") for each in (point, other))
        if own == smaller:
            return {"status": OUT_OF_MEMORY, "reason": record["reason"]}
        if own > smaller:
            return {"status": SKIPPED, "reason": f"a micro-batch of {smaller} ran out of memory"}
    return None


def family(point: dict[str, Any]) -> tuple[Any, ...]:
    """Return what points share that differ in their micro-batch alone."""
    name = re.sub(r" mb\d+", "", point.get("strategy") or repr(point))
    return name, *map(point.get, ALIKE)
