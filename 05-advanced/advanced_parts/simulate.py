"""`combining.py simulate`: one step of a layout as events; what-ifs; scaling; and real runs beside.

The events are dist_common/costs/timeline.py's, their seconds stages.py's, the order in which a
stage computes pipeline_schedules.py's: the generator that pipeline_parallel.py carries out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from advanced_parts import plan_args, simulate_measured, simulate_picture
from advanced_parts.plan_rules import why_not
from dist_common import cli, runtime
from dist_common.costs import compute
from dist_common.costs.hardware import Cluster
from dist_common.costs.job import Job, Layout
from dist_common.costs.stages import stages_of
from dist_common.costs.step import predict
from dist_common.costs.timeline import Place, chrome_trace, makespan, run, tasks_of, waits
from dist_common.report import Report
from pipeline_schedules import SCHEDULES, build

SHOWN = 8  # stages in the table
STEADY = 2  # micro-batches per stage after which each further one takes the same time


@dataclass(frozen=True)
class Case:
    """What is simulated: a layout on a cluster, and who is slow (factors of compute)."""

    name: str
    job: Job
    layout: Layout
    cluster: Cluster
    schedule: str
    slow_rank: tuple[int, float] | None = None
    slow_stage: tuple[int, float] | None = None

    @property
    def replicas(self) -> list[int]:
        """Return one replica for all that are alike, and that of the slow rank."""
        if not self.slow_rank or self.layout.dp == 1:
            return [0]
        own = place_of(self.slow_rank[0], self.layout).replica
        return sorted({0 if own else 1, own})

    @property
    def slow(self) -> dict[Place, float]:
        slow = {}
        if self.slow_stage:
            stage, factor = self.slow_stage
            slow = {Place(replica, stage): factor for replica in self.replicas}
        if self.slow_rank:
            place = place_of(self.slow_rank[0], self.layout)
            slow[place] = slow.get(place, 1.0) * self.slow_rank[1]
        return slow

    def events(self, micro_batches: int | None = None):
        layout, m = self.layout, micro_batches or self.layout.micro_batches(self.job)
        orders = build(self.schedule, layout.pp, m, layout.virtual_stages)
        stages = stages_of(self.job, layout, self.cluster)
        return run(tasks_of(orders, stages, self.slow, self.replicas))

    def step_s(self) -> float:
        """Return the seconds of a step; of many micro-batches the steady state is prolonged."""
        m, few = self.layout.micro_batches(self.job), STEADY * self.layout.pp
        if m <= 2 * few:
            return makespan(self.events())
        short, long = (makespan(self.events(times * few)) for times in (1, 2))
        return long + (m / few - 2) * (long - short)

    def speeds(self, seconds: float) -> tuple[float, float]:
        """Return tokens/s per GPU, and MFU."""
        tokens = self.job.global_batch * self.job.seq_len / seconds / self.layout.gpus
        flops = compute.model_flops(self.job) / seconds / self.layout.gpus
        return tokens, flops / 1e12 / self.cluster.gpu.tflops[self.job.precision]

    def names(self) -> dict[Place, str]:
        """Return for each place its stage and the ranks that it stands for."""
        layout, inside = self.layout, self.layout.tp * self.layout.cp
        named = {}
        for replica in self.replicas:
            for stage in range(layout.pp):
                first = (stage * layout.dp + replica) * inside
                ranks = f"rank {first}" if inside == 1 else f"ranks {first}-{first + inside - 1}"
                named[Place(replica, stage)] = f"stage {stage}, replica {replica} ({ranks})"
        return named


def place_of(rank: int, layout: Layout) -> Place:
    """Return where a rank stands: tp is innermost, then cp, dp and pp (costs/step.py)."""
    stage, inside = divmod(rank, layout.tp * layout.cp * layout.dp)
    return Place(inside // (layout.tp * layout.cp), stage)


def slower(text: str) -> tuple[int, float]:
    """Parse 3:1.3, a number and the factor by which it computes longer."""
    number, _, factor = text.partition(":")
    return cli.whole_number(number), cli.positive_float(factor or "nothing")


def sizes(text: str) -> list[int]:
    return [cli.positive_int(each) for each in text.split(",")]


def parse_args(argv: list[str]):
    parser = cli.ArgumentParser(__doc__)
    plan_args.add_job_flags(parser)
    plan_args.add_hardware_flags(parser)
    plan_args.add_layout_flags(parser, "predict")
    add = parser.add_argument
    add("--schedule", choices=list(SCHEDULES), help="of the pipeline (1f1b, or interleaved)")
    add("--slow-rank", type=slower, metavar="R:FACTOR", help="this rank computes longer: 5:1.3")
    add("--slow-stage", type=slower, metavar="S:FACTOR", help="all ranks of a stage do: 2:1.3")
    add("--scale", type=sizes, metavar="GPUS,...", help="more replicas: 8,64,512,100000")
    add("--measure", action="store_true",
        help="run hybrid_parallelism.py on two virtual nodes, beside the simulation")  # fmt: skip
    add("--link", type=cli.link_rate, default="100mbit", help="of --measure (100mbit)")
    return parser.parse_args(argv)


def cases_of(args) -> list[Case]:
    """Return the layout as planned, each what-if alone, and all of them. Raises: UsageError."""
    layout = plan_args.one_layout(args)
    job, cluster = plan_args.job_of(args, layout.gpus), plan_args.cluster_of(args, layout.gpus)
    reason = why_not(job, cluster, layout)
    if reason:
        raise cli.UsageError(reason)
    usual = "interleaved" if layout.virtual_stages > 1 else "1f1b"
    schedule = args.schedule or usual
    if (schedule == "interleaved") != (layout.virtual_stages > 1):
        raise cli.UsageError("--schedule interleaved and --interleave above 1 go together")
    changes = {}
    if args.network_gb_s:
        changes[f"{args.network_gb_s:g} GB/s"] = {"cluster": cluster}
    for flag, given, most in (("slow-rank", args.slow_rank, layout.gpus),
                              ("slow-stage", args.slow_stage, layout.pp)):  # fmt: skip
        if given and given[0] >= most:
            raise cli.UsageError(f"--{flag} {given[0]} must be at most {most - 1}")
        if given:
            name = f"{flag.replace('slow-', '')} {given[0]} x{given[1]:g}"
            changes[name] = {flag.replace("-", "_"): given}
    usual_cluster = replace(cluster, network_gb_s=cluster.gpu.network_gb_s)
    planned = Case(f"as planned ({usual_cluster.network_gb_s:g} GB/s)", job, layout, usual_cluster,
                   schedule)  # fmt: skip
    cases = [planned, *(replace(planned, name=name, **own) for name, own in changes.items())]
    if len(changes) > 1:
        every = {key: value for own in changes.values() for key, value in own.items()}
        cases.append(replace(planned, name="all of these", **every))
    return cases


def describe(report: Report, cases: list[Case], found: list) -> None:
    """Print the step of each case, and of the last one what each stage waits for."""
    steps = [makespan(events) for events in found]
    formula = predict(cases[0].job, cases[0].layout, cases[0].cluster).step_time_s
    rows = [("predict's sum of parts", f"{formula:.3f} s", f"{formula / steps[0] - 1:+.1%}")]
    for case, seconds in zip(cases, steps, strict=True):
        tokens, mfu = case.speeds(seconds)
        change = f"{seconds / steps[0] - 1:+.1%}" if case is not cases[0] else ""
        rows.insert(-1, (case.name, f"{seconds:.3f} s", change, f"{tokens:,.0f}", f"{mfu:.1%}"))
    report.table(rows, ("step", "seconds", "change", "tokens/s/GPU", "MFU"))
    report.metrics |= {"predicted_s": formula, "step_time_s": dict(
        zip([case.name for case in cases], steps, strict=True))}  # fmt: skip
    report.say()
    parts = waits(found[-1])
    names = cases[-1].names()
    used = [part for part in parts[min(parts)] if any(own[part] > 0 for own in parts.values())]
    shown = sorted(parts)
    if len(shown) > SHOWN:
        shown = [*shown[: SHOWN // 2], *shown[-SHOWN // 2 :]]
    rows = [(names[place], *(f"{parts[place][part]:.3f}" for part in used)) for place in shown]
    report.table(rows, (f"{cases[-1].name}: seconds", *used))
    gap = max(abs(sum(own.values()) - steps[-1]) for own in parts.values())
    name = "the stages' seconds against the step, largest gap"
    report.check(name, gap, 0, 1e-6 * steps[-1], "parts add up")
    report.check(
        "tasks too early, or two at once", too_early(found[-1]), 0, 0, "one thing at a time"
    )


def too_early(events) -> int:
    """Count the tasks that start before what they need has ended, or before the one before it."""
    ends: dict[tuple, float] = {}
    wrong = 0
    for task, start, end in sorted(events.values(), key=lambda event: event.start):
        stream = task.place, task.stream
        needed = max((events[key].end for key in task.needs), default=0.0)
        wrong += start < max(needed, ends.get(stream, 0.0)) - 1e-9
        ends[stream] = end
    return wrong


def describe_scale(report: Report, args, base: Case) -> list[tuple[int, float, float | None]]:
    """Print speed by number of GPUs, with sequences per GPU kept, and with those of a step kept."""
    layout, rows, points = base.layout, [], []
    others = layout.tp * layout.cp * layout.pp
    for wanted in report.progress(args.scale, "scale"):
        dp = wanted // others
        if not dp:
            axes = f"tp {layout.tp} x cp {layout.cp} x pp {layout.pp}"
            raise cli.UsageError(f"--scale {wanted} is less than {axes} = {others} GPUs")
        cut = replace(layout, dp=dp, shard=layout.shard if layout.shard <= dp * layout.cp else 0)
        row, mfus = [f"{cut.gpus:,}", f"{dp:,}"], []
        for batch in (base.job.global_batch * dp // layout.dp, base.job.global_batch):
            case = replace(base, job=replace(base.job, global_batch=batch), layout=cut)
            whole, left = divmod(batch, dp * cut.micro_batch)
            turns = cut.pp if base.schedule == "interleaved" else 1
            if not whole or left or whole % turns:
                row += [f"{batch:,}", "-", "-", "-"]
                mfus.append(None)
                continue
            seconds = case.step_s()
            tokens, mfu = case.speeds(seconds)
            row += [f"{batch:,}", f"{seconds:.2f} s", f"{tokens:,.0f}", f"{mfu:.1%}"]
            mfus.append(mfu)
        rows.append(row)
        points.append((cut.gpus, *mfus))
    columns = ("batch", "step", "tok/s/GPU", "MFU")
    report.table(rows, ("GPUs", "dp", *columns, *columns))
    report.say("left: sequences per GPU kept; right: sequences per step kept (-: not divisible)")
    report.metrics["mfu_by_gpus"] = points
    return points


def simulate(argv: list[str]) -> int:
    """Answer `combining.py simulate`; return the exit code."""
    args = parse_args(argv)
    measured = simulate_measured.measure(args.link) if args.measure else None
    cases = [] if measured else cases_of(args)
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("05-advanced/combining.py", args, world, device)
        if measured:
            report.start()
            simulate_measured.compare(report, measured)
            return report.finish("each layout ran on the link that was simulated")
        base, last = cases[0], cases[-1]
        layout, job = base.layout, base.job
        axes = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in ("tp", "cp", "dp", "pp"))
        count = f"{layout.micro_batches(job)} micro-batches of {layout.micro_batch}"
        gpu = base.cluster.gpu.name
        report.start(f"{job.model.name}: {axes} on {layout.gpus:,} {gpu}, {base.schedule}, {count}")
        found = []
        if args.scale:
            points = describe_scale(report, args, last)
        else:
            found = [case.events() for case in cases]
            describe(report, cases, found)
        if report.output and world.is_rank0 and args.scale:
            simulate_picture.draw_scale(report.output / "scale.png", points)
        elif report.output and world.is_rank0:
            trace = chrome_trace(found[-1], last.names())
            (report.output / "trace.json").write_text(json.dumps(trace))
            pair = {0: (base, found[0]), len(cases) - 1: (last, found[-1])}.values()
            simulate_picture.draw(
                report.output / "timeline.png", *map(list, zip(*pair, strict=True))
            )
        return report.finish(f"{makespan(found[-1]):.3f} s a step {last.name}"
                             if found else f"up to {max(args.scale):,} GPUs simulated")  # fmt: skip
