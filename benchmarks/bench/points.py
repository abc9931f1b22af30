"""The points of a sweep: which strategy, on how many ranks, with which batch, in which order."""

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import launch
from bench.settings import NO_LINK
from bench.strategies import REFERENCE, Strategy

EARLY_STEPS = 5  # whose losses are compared, each with that of the same step
PATIENCE = 0.8  # of a point's seconds, for a collective: its script can say which one hangs
# Templates check against one process themselves, save and evaluate: a sweep does none of it.
ALWAYS = ("--parity-steps", "0", "--log-every", "1", "--save-every", "0", "--eval-every", "0")
Results = tuple[dict[str, Any], str | None]  # what a script left, and what is wrong with it


@dataclass(frozen=True)
class Point:
    """One run of one script. `reason` says why it cannot run, if so."""

    name: str  # without the repeat
    world_size: int
    link: str | None
    reason: str | None
    repeat: int  # from 1

    @property
    def identity(self) -> str:
        return f"{self.name}#{self.repeat}"


def in_turns(once: Sequence[Point], repeats: int) -> list[Point]:
    """Return all points in the order in which they run.

    Repeats are the outermost loop, and every second one runs backwards: noise that lasts for
    minutes, and a machine that slowly warms up, fall on all alike.
    """
    points = []
    for repeat in range(1, repeats + 1):
        again = [replace(point, repeat=repeat) for point in once if repeat == 1 or not point.reason]
        points += again if repeat % 2 else again[::-1]
    return points


@dataclass(frozen=True)
class Training(Point):
    """One run of one strategy."""

    strategy: Strategy
    preset: str
    precision: str
    global_batch_size: int  # sequences
    micro_batch_size: int
    grad_accum_steps: int

    @property
    def script(self) -> Path:
        return self.strategy.path

    def arguments(self, args: argparse.Namespace) -> list[Any]:
        """Return the words after the script's name, all but --output-dir."""
        job = {
            "--preset": self.preset, "--precision": self.precision, "--seq-len": args.seq_len,
            "--micro-batch-size": self.micro_batch_size,
            "--global-batch-size": self.global_batch_size, "--max-steps": args.max_steps,
            "--lr": args.lr, "--warmup-steps": args.warmup_steps, "--seed": args.seed,
            "--timeout": patience(args.timeout), "--device": args.device,
        }  # fmt: skip
        words = itertools.chain.from_iterable(job.items())
        return [*self.strategy.script_flags(self.world_size), *words, *ALWAYS]

    def described(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return what a record of results.jsonl says of the point."""
        names = ("world_size", "preset", "precision", "link", "global_batch_size",
                 "micro_batch_size", "grad_accum_steps")  # fmt: skip
        own = {name: getattr(self, name) for name in names}
        job = {name: getattr(args, name) for name in ("seq_len", "max_steps", "seed")}
        row = self.strategy
        which = {"kind": "train", "strategy": row.name, "exact": row.exact, "script": row.script}
        return which | own | job | {"flags": row.script_flags(self.world_size)}

    def read(self, folder: Path) -> Results:
        """Return results.json and the losses of the first steps, and what is wrong with them."""
        path = folder / "results.json"
        if not path.exists():
            return {}, "it wrote no results.json"
        try:
            results = json.loads(path.read_text())
            loss = results["metrics"]["final_loss"]
        except (ValueError, KeyError, TypeError) as error:
            return {}, f"its results.json has no metrics.final_loss ({type(error).__name__})"
        whole = isinstance(loss, float) and math.isfinite(loss)
        early = early_losses(folder / "metrics.jsonl")
        left = {"results": results} | ({"losses": early} if early else {})
        return left, None if whole else f"its final loss is {loss}"

    def summary(self, record: dict[str, Any]) -> str:
        """Return what came out of it, in a few words."""
        metrics = record["results"]["metrics"]
        ms = metrics.get("step_time_ms")
        step = f", step {ms:,.1f} ms" if isinstance(ms, (int, float)) else ""
        return f"loss {metrics['final_loss']:.4f}{step}"


def early_losses(path: Path) -> list[float]:
    """Return the losses of the first steps, as metrics.jsonl has them; none where it lacks one."""
    found: list[float] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            values = json.loads(line)
            if "loss" in values and values["step"] == len(found) + 1 <= EARLY_STEPS:
                found.append(values["loss"])
        except (ValueError, KeyError, TypeError):
            return []
    return found


def patience(timeout_s: float) -> str:
    """Return --timeout of a script that is ended after so many seconds."""
    return f"{PATIENCE * timeout_s:.3f}".rstrip("0").rstrip(".")


def plan(args: argparse.Namespace, strategies: list[Strategy]) -> list[Training]:
    """Return all points in order; where they run here, what needs more GPUs has a reason."""
    once: list[Training] = []
    jobs = args.presets, args.precisions, args.links, args.world_sizes
    for preset, precision, link, ranks, strategy in itertools.product(*jobs, strategies):
        alone, batch = strategy.name == REFERENCE, args.global_batch_size
        speed = None if alone or link == NO_LINK else link
        batches = [batch]
        if args.scaling == "weak":  # the reference of the efficiency has a rank's own batch
            batches = [*[batch] * alone, batch * ranks]
        for batch in batches:
            model = preset, precision
            point = _settled(args, strategy, 1 if alone else ranks, model, speed, batch)
            once += [point] if point not in once else []  # `single`, for all ranks and links
    return in_turns(once, args.repeats)


def _settled(args, strategy: Strategy, ranks: int, model: tuple[str, str], link, batch) -> Training:
    """Return the point with its batch sizes, or with the reason why it cannot run."""
    reason, sizes = strategy.why_not(ranks, *model), (0, 0)
    if reason is None and not getattr(args, "dry_run", False):
        reason = launch.why_not(args.launcher, args.device, ranks)
    try:
        if reason is None:
            sizes = batch_sizes(strategy, ranks, batch, args.micro_batch_size)
    except ValueError as error:
        reason = str(error)
    # Strategy and ranks, and whatever else differs.
    parts = [strategy.name, f"w{ranks}"]
    parts += [model[0]] if len(args.presets) > 1 else []
    parts += [model[1]] if len(args.precisions) > 1 else []
    parts += [f"b{batch}"] if args.scaling == "weak" else []
    name = ".".join(parts + ([link] if link else []))
    return Training(name, ranks, link, reason, 0, strategy, *model, batch, *sizes)


def batch_sizes(
    strategy: Strategy, world_size: int, global_batch: int, largest: int | None
) -> tuple[int, int]:
    """Return micro-batch size and accumulation steps: global = micro x steps x data ranks.

    A micro-batch is as large as the strategy's micro-batches and `largest` allow.
    Raises: ValueError saying what the global batch cannot be divided by.
    """
    ranks = strategy.data_parallel_ranks(world_size)
    least = strategy.micro_batches * strategy.ranks_of("pp", world_size)
    own, rest = divmod(global_batch, ranks)
    if rest or own % least:
        parts = f"{ranks} data-parallel ranks x {least} micro-batches"
        raise ValueError(f"a global batch of {global_batch} sequences cannot be dealt to {parts}")
    for steps in range(least, own + 1, least):
        if own % steps == 0 and (largest is None or own // steps <= largest):
            return own // steps, steps
    raise AssertionError("a micro-batch of one sequence is always small enough")
