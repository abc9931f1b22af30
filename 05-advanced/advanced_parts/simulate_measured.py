"""What simulate.py simulates, run: hybrid_parallelism.py on two virtual nodes, on a shaped link.

Each layout runs on a fast link first: that is its compute. The slow link is two numbers, measured
by an all-reduce; the simulation of the slow step knows those and the template's bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

from advanced_parts.across_nodes import Link, measure_link
from dist_common import cli, models, runtime
from dist_common.costs.timeline import Stage, makespan, run, tasks_of
from dist_common.lab import links, ranks
from dist_common.report import Report
from pipeline_schedules import build

RANKS, FAST = 2, 1.25e9  # bytes/s of the link on which only computing takes time
SEQ_LEN, MICRO, MICRO_BATCHES, STEPS = 128, 2, 4, 6  # of pp; the global batch is the same for all
BATCH = MICRO * MICRO_BATCHES
FLAGS = (f"--preset tiny --seq-len {SEQ_LEN} --micro-batch-size {MICRO} --parity-steps 0"
         f" --global-batch-size {BATCH} --max-steps {STEPS}")  # fmt: skip
ROUNDS = 2  # the faster one counts: another program can only make a step longer
WIDTH = 4  # bytes of a float32
DEADLINE_S = 300


@dataclass(frozen=True)
class Way:
    """An axis of two ranks: what a step took on each link, and what was simulated, in s."""

    axis: str
    fast_s: float
    slow_s: float
    simulated_s: float


@dataclass(frozen=True)
class Measured:
    link: Link
    ways: list[Way]


def measure(rate: float) -> Measured:
    """Run each layout on a fast and on a slow link; simulate the latter. Units: bytes/s.

    Raises: UsageError where this machine has no network namespaces.
    """
    import hybrid_parallelism as template  # once: in each of 32 ranks it would take 7 s

    folder = Path(tempfile.mkdtemp())  # not a with-block: the forks would remove it at their exit
    try:
        # Its last twentieth is tested: 8 sequences here, of its own text 390, over the slow link.
        (folder / "text").write_bytes(bytes(range(256)) * (BATCH * SEQ_LEN * 20 // 256))
        slow = link_of(rate, folder / "link")
        fast = link_of(FAST, folder / "fast")
        ways = []
        for axis in ("dp", "tp", "cp", "pp"):
            times = [step_s(template.main, axis, each, folder) for each in (FAST, rate)]
            compute_s = compute_of(axis, times[0], fast)
            ways.append(Way(axis, *times, simulated_s(axis, compute_s, slow)))
        return Measured(slow, ways)
    finally:
        shutil.rmtree(folder)


def on_nodes(body, rate: float, folder: Path) -> list[ranks.Rank]:
    """Run body() on a rank of each node. Raises: UsageError with the end of what a rank said."""
    with links.hosts([rate] * RANKS) as network:

        def enter_and_run(rank: int):
            network.enter(rank)
            for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
                del os.environ[name]  # no agent of a launcher here has the store
            own = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            os.environ.update({name: str(value) for name, value in own.items()})
            return body()

        ended = ranks.fork(enter_and_run, RANKS, folder, DEADLINE_S)
    for rank in ended:
        if rank.code:
            raise cli.UsageError(f"--measure: a rank ended with {rank.ended}: {rank.err[-300:]}")
    return ended


def link_of(rate: float, folder: Path) -> Link:
    """Return a link's two numbers, as across_nodes.py measures them."""

    def body():
        with runtime.init("cpu", DEADLINE_S) as (_, device):
            return measure_link(SimpleNamespace(device=device), dist.group.WORLD, RANKS, True)

    return on_nodes(body, rate, folder)[0].value


def step_s(main: Callable[[], int], axis: str, rate: float, folder: Path) -> float:
    """Return the median step of the template with two ranks on one axis, of the faster round."""

    def body(output: Path):
        sys.argv = ["hybrid_parallelism.py", *FLAGS.split(), f"--{axis}", str(RANKS)]
        sys.argv += ["--text-file", str(folder / "text"), "--output-dir", str(output)]
        cli.run(main)

    seconds = []
    for number in range(ROUNDS):
        of_round = folder / f"{axis}-{rate:g}-{number}"
        output = of_round / "output"
        on_nodes(partial(body, output), rate, of_round)
        results = json.loads((output / "results.json").read_text())
        seconds.append(results["metrics"]["step_time_ms"] / 1e3)
    return min(seconds)


# the simulation


def stages(axis: str, compute_s: float, link: Link) -> list[Stage]:
    """Return the template's stages: `compute_s` of a micro-batch on a rank, and what it sends.

    Source: expected_bytes in hybrid_sends.py; gloo reduces and scatters by an
    all-reduce (across_nodes.py).
    """
    config = models.PRESETS["tiny"]
    blocks, p = config.num_layers, RANKS if axis == "pp" else 1
    hidden = WIDTH * MICRO * SEQ_LEN * config.dim  # of a micro-batch
    inside, reduce, send = {}, 0.0, 0.0
    if axis == "tp":
        both = link.pass_on_s(hidden, RANKS) + link.all_reduce_s(hidden, RANKS)
        one_way = (2 * blocks + 1) * both  # the embedding scatters, the head gathers
        inside["tp"] = one_way, one_way
    if axis == "cp":
        keys = WIDTH * 2 * MICRO * SEQ_LEN * config.num_kv_heads * config.dim // config.num_heads
        inside["cp"] = (
            blocks * link.pass_on_s(keys, RANKS),
            blocks * link.all_reduce_s(keys, RANKS),
        )
    if axis in ("dp", "cp"):  # a unit for each block, and for both tables
        units, weights = blocks + 1, WIDTH * config.num_parameters()
        reduce = units * link.all_reduce_s(weights / units, RANKS)
    if axis == "pp":
        send = link.alpha + hidden / link.rate
    forward, backward = compute_s / 3 / p, 2 * compute_s / 3 / p
    stage = Stage(forward, backward, inside, send, reduce=reduce, layers=blocks + 1)
    return [stage] * p


def simulated_s(axis: str, compute_s: float, link: Link) -> float:
    """Return a step's seconds: of two stages, or of one of two equal ranks."""
    p = RANKS if axis == "pp" else 1
    micro_batches = MICRO_BATCHES // (RANKS if axis == "dp" else 1)
    return makespan(run(tasks_of(build("1f1b", p, micro_batches), stages(axis, compute_s, link))))


def compute_of(axis: str, step_s: float, link: Link) -> float:
    """Return the compute of a micro-batch with which a step takes `step_s` on this link."""
    low, high = 0.0, step_s
    for _ in range(40):
        middle = (low + high) / 2
        if simulated_s(axis, middle, link) > step_s:
            high = middle
        else:
            low = middle
    return low


def compare(report: Report, measured: Measured) -> None:
    """Print ratio and ranking."""
    link, ways = measured.link, measured.ways
    report.say(f"link: {link.rate * 8 / 1e6:,.0f} Mbit/s, {link.alpha * 1e3:.2f} ms; {FLAGS}")
    rows = []
    for way in ways:
        times = (
            f"{seconds * 1e3:,.0f} ms" for seconds in (way.fast_s, way.slow_s, way.simulated_s)
        )
        rows.append((f"{way.axis} {RANKS}", *times, f"{way.simulated_s / way.slow_s:.2f}x"))
    report.table(rows, ("layout", "fast link", "measured", "simulated", "ratio"))
    orders = [sorted(ways, key=lambda way: getattr(way, of)) for of in ("slow_s", "simulated_s")]
    names = [" < ".join(way.axis for way in order) for order in orders]
    agrees = "as simulated" if names[0] == names[1] else f"simulated: {names[1]}"
    report.say(f"by step: {names[0]} ({agrees})")
    report.metrics |= {f"ratio: {way.axis}": way.simulated_s / way.slow_s for way in ways}
