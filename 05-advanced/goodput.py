"""Say how often to save, and which share of a month a cluster that keeps failing really trains.

    CPU   python 05-advanced/goodput.py
    also  python 05-advanced/goodput.py --gpus 100000 --save-s 10 --detect-s 600

No GPU is needed, now or later: formulas, and a simulation of months on 1,000 to 100,000 GPUs.
`--published` sets predictions beside what the authors of large runs reported.

Look for: where the formulas agree with the simulation, and the three cases in which they do not.
Sources: Young (CACM 1974), a first order approximation to the optimum checkpoint interval; Daly
(FGCS 2006), a higher order estimate of it. The default failure rate is that of Llama 3 (2024).
"""

import math
import random
from collections import Counter
from dataclasses import dataclass, replace

from advanced_parts import goodput as part
from legacy_common import cli, runtime
from legacy_common.report import Report

DAY_S = 24 * 3600
GPUS_PER_NODE = 8
SIZES = (1_000, 4_000, 16_384, 100_000)  # GPUs
REPAIR_S = DAY_S  # of a node
WAYS = ("disk", "background", "memory")  # where a save goes; background: to disk, beside training


@dataclass(frozen=True)
class Job:
    """A training run: how often it fails, and what a save and a failure cost, in seconds."""

    nodes: int
    failures_per_node_day: float
    stall_s: float  # training stands still for each save
    down_s: float  # from a failure until it trains again: detected, restarted, state loaded
    write_s: float = 0.0  # after the stall, beside training, until what was saved is safe

    @property
    def between_s(self) -> float:
        """Return the mean time between failures: any node's failure stops the whole job."""
        return DAY_S / (self.nodes * self.failures_per_node_day)


# how often to save


def young(job: Job) -> float:
    """Return the seconds to train between two saves. Source: Young (1974)."""
    return math.sqrt(2 * job.stall_s * job.between_s)


def daly(job: Job) -> float:
    """Return the same, also right where a save takes long. Source: Daly (2006), equation 37."""
    if job.stall_s >= 2 * job.between_s:
        return job.between_s
    x = math.sqrt(job.stall_s / (2 * job.between_s))
    return young(job) * (1 + x / 3 + x * x / 9) - job.stall_s


def interval_of(job: Job) -> float:
    """Return Daly's interval, but no save begins before the last one is written."""
    return max(daly(job), job.write_s - job.stall_s)


# what is left


def first_order(job: Job, interval_s: float) -> float:
    """Return goodput as one sum on a napkin: saves, half an interval lost per failure, the rest."""
    saving = job.stall_s / interval_s
    per_failure = interval_s / 2 + job.write_s + job.down_s
    return 1 - saving - per_failure / job.between_s


def goodput(job: Job, interval_s: float) -> float:
    """Return the share of all time whose training is kept, if failures come at random.

    A cycle: M e^(down / M) seconds, since failures interrupt restarts too, of which training takes
    M on average; the k-th save of a cycle is reached with a probability of e^(-(write + kT) / M).
    """
    M = job.between_s
    T = interval_s + job.stall_s
    saves_per_cycle = math.exp(-job.write_s / M) / math.expm1(T / M)
    return saves_per_cycle * interval_s / (M * math.exp(job.down_s / M))


# the same, event by event


class Clock:
    """Time that failures interrupt; `spent` adds up what it went to."""

    def __init__(self, job: Job, end_s: float, seed: int) -> None:
        self.mean_s = job.between_s
        self.end_s = end_s
        self.now = 0.0
        self.spent = Counter()
        self.failures = 0
        self.random = random.Random(seed)
        self.wait_for_failure()

    def wait_for_failure(self) -> None:
        self.failure_at = self.now + self.random.expovariate(1 / self.mean_s)

    def spend(self, what: str, seconds: float) -> bool:
        """Let time pass; return False if a failure or the end of the month came first."""
        until = min(self.now + seconds, self.failure_at, self.end_s)
        whole = until == self.now + seconds
        self.spent[what] += until - self.now
        self.now = until
        return whole

    def idle(self, what: str, until: float) -> None:
        """Let time pass in which no node of the job can fail."""
        until = max(self.now, min(until, self.end_s))
        self.spent[what] += until - self.now
        self.now = until


def simulate(
    job: Job, interval_s: float, days=30.0, seed=0, spares: int | None = None, repair_s=0.0
) -> Clock:
    """Run a job for a month; its clock says where the time went, `kept` being the goodput.

    With a number of `spares` a failed node is replaced by one of them while it is repaired; when
    all are out, the job waits for the next one to come back.
    """
    clock = Clock(job, days * DAY_S, seed)
    repaired_at = []
    while clock.now < clock.end_s:
        done = safe = 0.0  # seconds of training since this start
        being_written = (0.0, 0.0)  # how much, and when it is safe
        while True:
            before = clock.spent["kept"]
            whole = clock.spend("kept", interval_s)
            done += clock.spent["kept"] - before
            if not (whole and clock.spend("saving", job.stall_s)):
                break
            safe = being_written[0]  # no save begins before the last one is written
            being_written = (done, clock.now + job.write_s)
        if clock.now == clock.end_s:
            break
        if clock.now >= being_written[1]:
            safe = being_written[0]
        clock.spent["kept"] -= done - safe
        clock.spent["lost"] += done - safe

        started = False
        while not started and clock.now < clock.end_s:
            clock.failures += 1
            repaired_at = [time for time in repaired_at if time > clock.now]
            repaired_at.append(clock.now + repair_s)
            if spares is not None and len(repaired_at) > spares:
                clock.idle("waiting for a spare", sorted(repaired_at)[-1 - spares])
            clock.wait_for_failure()
            started = clock.spend("down", job.down_s)
    return clock


def share_waiting(job: Job, spares: int, repair_s: float) -> float:
    """Return the share of time in which all spares are out: calls lost at a telephone exchange.

    Its lines are the spares and one node more, a call lasts as long as a repair. Source: Erlang
    (1917), formula B; how repair times spread does not matter, only their mean.
    """
    offered = repair_s / job.between_s  # nodes in repair, on average
    lost = 1.0
    for lines in range(1, spares + 2):
        lost = offered * lost / (lines + offered * lost)
    return lost


@dataclass
class Prediction:
    """A job that saves at an interval: goodput by formulas, and simulated months."""

    job: Job
    interval_s: float
    first_order: float
    exact: float
    months: list[Clock]


def predict(job: Job, args, interval_s: float | None = None, **spares) -> Prediction:
    """Return what formulas and `--months` simulated months say; at Daly's interval by default."""
    interval_s = interval_s or interval_of(job)
    months = [
        simulate(job, interval_s, args.days, args.seed * args.months + month, **spares)
        for month in range(args.months)
    ]
    formulas = first_order(job, interval_s), goodput(job, interval_s)
    return Prediction(job, interval_s, *formulas, months)


# the command


def ways_of(args, nodes: int) -> dict[str, Job]:
    """Return the same job with three ways to save."""
    down_s = args.detect_s + args.restart_s
    disk = Job(nodes, args.failures_per_node_day, args.save_s, down_s + args.load_s)
    background = replace(disk, stall_s=args.copy_s, write_s=args.save_s)
    memory = replace(disk, stall_s=args.send_s, down_s=down_s + args.send_s)
    return dict(zip(WAYS, (disk, background, memory), strict=True))


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, count, seconds = parser.add_argument, cli.positive_int, cli.positive_float
    add("--published", action="store_true", help="compare predictions with published runs")
    add("--gpus", type=count, default=16_384, help="GPUs of the job, 8 a node (16384)")
    add("--failures-per-node-day", type=seconds, default=part.LLAMA3_RATE, metavar="RATE",
        help="that stop the job (0.00379: 419 in 54 days of Llama 3 on 2,048 nodes)")  # fmt: skip
    add("--save-s", type=seconds, default=60, help="seconds to write a checkpoint to disk (60)")
    add("--copy-s", type=seconds, default=5,
        help="seconds training stands still for a save in the background (5)")  # fmt: skip
    add("--send-s", type=seconds, default=1,
        help="seconds to send the state to a neighbour's memory, or back (1)")  # fmt: skip
    add("--load-s", type=seconds, default=60, help="seconds to read a checkpoint (60)")
    add("--detect-s", type=seconds, help="seconds until a failure is noticed (60)")
    add("--restart-s", type=seconds, help="seconds from there until processes can load (240)")
    add("--way", choices=WAYS, default="disk",
        help="to save, in the table of sizes: to disk, to disk in the background, or to the memory"
        " of a neighbour (disk)")  # fmt: skip
    add("--measured", metavar="FILE", help="a JSON file, such as a results.json, with detect_s and"
        " restart_s")  # fmt: skip
    add("--days", type=seconds, default=30, help="of a simulated run (30)")
    add("--months", type=cli.whole_number, default=24, help="simulated runs per row (24)")
    args = parser.parse_args()
    if args.months < 2:
        raise cli.UsageError(f"--months {args.months}: two at least, or nothing says how they vary")
    measured = part.read_measured(args.measured) if args.measured else {}
    if args.detect_s is None:
        args.detect_s = measured.get("detect_s", 60)
    if args.restart_s is None:
        args.restart_s = measured.get("restart_s", 240)
    return args


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("05-advanced/goodput.py", args, world, device)
        if args.published:
            report.start()
            part.list_published(report, Job, interval_of, goodput)
            return report.finish("predictions lie within the stated bounds of what was published")

        nodes = max(1, round(args.gpus / GPUS_PER_NODE))
        ways = {name: predict(job, args) for name, job in ways_of(args, nodes).items()}
        disk = ways["disk"].job
        hours = disk.between_s / 3600
        report.start(f"{args.gpus:,} GPUs on {nodes:,} nodes: a failure every {hours:.2f} hours")
        part.list_ways(report, ways)

        sizes = {
            gpus: predict(ways_of(args, gpus // GPUS_PER_NODE)[args.way], args) for gpus in SIZES
        }
        part.list_sizes(report, args.way, sizes, young, daly, goodput)

        spares = max(1, round(REPAIR_S / disk.between_s))  # as many as are in repair on average
        cases = {
            "an interval as long as M": predict(disk, args, disk.between_s),
            "down for as long as M": predict(replace(disk, down_s=disk.between_s), args),
            f"{spares} spares, a day to repair": predict(
                disk, args, spares=spares, repair_s=REPAIR_S
            ),
        }
        part.list_limits(report, cases, share_waiting(disk, spares, REPAIR_S))
        if report.output and world.is_rank0:
            curves = {gpus: ways_of(args, gpus // GPUS_PER_NODE) for gpus in part.SIZES_OF_CURVES}
            part.draw(report.output / "goodput.png", sizes, curves, interval_of, goodput)
        best = max(report.metrics["goodput"].values())
        return report.finish(f"goodput is {best:.1%} at best on {args.gpus:,} GPUs")


if __name__ == "__main__":
    cli.run(main)
