"""The points of a sweep: which strategy, on how many ranks, with which batch, in which order."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_launch
from bench_settings import NO_LINK, Settings
from bench_strategies import REFERENCE, Strategy

# Templates check against one process themselves, save and evaluate: a sweep does none of it.
PATIENCE = 0.8  # of a point's seconds, for a collective: its script can say which one hangs
ALWAYS = ("--parity-steps", "0", "--log-every", "1", "--save-every", "0")


@dataclass(frozen=True)
class Point:
    """One run of one strategy. `reason` says why it cannot run, if so."""

    strategy: Strategy
    world_size: int
    preset: str
    precision: str
    link: str | None
    global_batch_size: int  # sequences
    micro_batch_size: int
    grad_accum_steps: int
    repeat: int  # from 1
    reason: str | None = None
    identity: str = ""

    def arguments(self, settings: Settings, folder: Path | str) -> list[str]:
        """Return the words after the script's name."""
        job = {
            "--preset": self.preset, "--precision": self.precision, "--seq-len": settings.seq_len,
            "--micro-batch-size": self.micro_batch_size,
            "--global-batch-size": self.global_batch_size, "--max-steps": settings.max_steps,
            "--lr": settings.lr, "--warmup-steps": settings.warmup_steps, "--seed": settings.seed,
            "--timeout": patience(settings.timeout), "--device": settings.device,
            "--output-dir": folder,
        }  # fmt: skip
        words = [str(word) for pair in job.items() for word in pair]
        return [*self.strategy.script_flags(self.world_size), *words, *ALWAYS]

    def described(self, settings: Settings) -> dict[str, Any]:
        """Return what a record of results.jsonl says of the point."""
        names = ("world_size", "preset", "precision", "link", "global_batch_size",
                 "micro_batch_size", "grad_accum_steps")  # fmt: skip
        own = {name: getattr(self, name) for name in names}
        job = {name: getattr(settings, name) for name in ("seq_len", "max_steps", "seed")}
        row = self.strategy
        which = {"kind": "train", "strategy": row.name, "exact": row.exact, "script": row.script}
        return which | own | job | {"flags": row.script_flags(self.world_size)}


def patience(timeout_s: float) -> str:
    """Return --timeout of a script that is ended after so many seconds."""
    return f"{PATIENCE * timeout_s:.3f}".rstrip("0").rstrip(".")


def plan(settings: Settings, strategies: list[Strategy], here: bool = True) -> list[Point]:
    """Return all points in the order in which they run; `here`: skip what needs more GPUs.

    Repeats are the outermost loop, and every second one runs backwards: noise that lasts for
    minutes, and a machine that slowly warms up, fall on all strategies alike.
    """
    once = _points_of_a_repeat(settings, strategies, here)
    names = _identities(once, settings)
    points = []
    for repeat in range(1, settings.repeats + 1):
        again = [
            Point(**{**vars(point), "repeat": repeat, "identity": f"{name}#{repeat}"})
            for point, name in zip(once, names, strict=True)
            if repeat == 1 or point.reason is None
        ]
        points += again if repeat % 2 else again[::-1]
    return points


def _points_of_a_repeat(settings: Settings, strategies: list[Strategy], here: bool) -> list[Point]:
    found: list[Point] = []
    for preset in settings.presets:
        for precision in settings.precisions:
            for link in settings.links:
                for world_size in settings.world_sizes:
                    for strategy in strategies:
                        job = preset, precision, link
                        batch = settings.global_batch_size
                        if settings.scaling == "weak":
                            if strategy.name == REFERENCE:  # of the efficiency: a rank's own batch
                                _add(found, _point(settings, strategy, 1, *job, batch, here))
                            batch *= world_size
                        _add(found, _point(settings, strategy, world_size, *job, batch, here))
    return found


def _add(found: list[Point], point: Point) -> None:
    """Add a point once: `single` is the same one for all world sizes and links."""
    found += [point] if point not in found else []


def _point(settings, strategy, world_size, preset, precision, link, batch, here) -> Point:
    link = None if link == NO_LINK else link
    if strategy.name == REFERENCE:
        world_size, link = 1, None
    reason = strategy.why_not(world_size, preset, precision)
    if reason is None and here:
        reason = bench_launch.why_not(settings.launcher, settings.device, world_size)
    micro, accumulation = 0, 0
    if reason is None:
        try:
            micro, accumulation = batch_sizes(
                strategy, world_size, batch, settings.micro_batch_size
            )
        except ValueError as error:
            reason = str(error)
    job = preset, precision, link, batch, micro, accumulation
    return Point(strategy, world_size, *job, 0, reason)


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


def _identities(points: list[Point], settings: Settings) -> list[str]:
    """Return names without the repeat: strategy and ranks, and whatever else differs."""
    names = []
    for point in points:
        parts = [point.strategy.name, f"w{point.world_size}"]
        parts += [point.preset] if len(settings.presets) > 1 else []
        parts += [point.precision] if len(settings.precisions) > 1 else []
        parts += [f"b{point.global_batch_size}"] if settings.scaling == "weak" else []
        parts += [point.link] if point.link else []
        names.append(".".join(parts))
    twice = [name for name, count in Counter(names).items() if count > 1]
    assert not twice, twice
    return names
