"""Print, draw, check and count pipeline schedules for any number of stages, without running them.

    CPU   python 05-advanced/pipeline_schedules.py --stages 4 --micro-batches 8
    GPU   the same: no tensor is computed

Look for: which schedules idle less (bubble), and which keep fewer micro-batches (activations).
`--schedule 1f1b` prints what each rank does, in order; `--output-dir DIR` draws schedules.png.

Sources: Huang et al., GPipe (2019); Narayanan et al., Efficient Large-Scale Language Model Training
on GPU Clusters Using Megatron-LM (SC 2021), section 2.2; Qi et al., Zero Bubble Pipeline
Parallelism (ICLR 2024), section 2.
"""

import pp_schedules
from dist_common import cli, runtime
from dist_common.report import Report, figure
from pp_formulas import bubble_formula, draw, durations, legend, peak_formula, span_of
from pp_schedules import bubble, peak_activations, simulate, violations

SOURCE = "the paper's formula"


def name_of(instruction, p):
    """Return F3 for the forward of micro-batch 3; F3.1 on the rank's second stage."""
    chunk = instruction.stage // p
    return f"{instruction.kind}{instruction.micro_batch}" + f".{chunk}" * bool(chunk)


def print_orders(report, schedule):
    for rank, instructions in enumerate(schedule):
        names = " ".join(name_of(instruction, len(schedule)) for instruction in instructions)
        report.say(f"rank {rank}: {names}")


def count(report, name, schedule, args):
    """Check one schedule; return when each instruction runs, and its row of the table."""
    p = args.stages
    m = args.micro_batches
    v = args.virtual_stages if name == "interleaved" else 1
    wrong = violations(schedule, m)
    for line in wrong[:3]:
        report.say(f"{name}: {line}")
    report.check(f"{name}: broken rules", len(wrong), 0, 0, "what each instruction needs")

    spans = simulate(schedule, durations(name, v, args.backward))

    idle = bubble(spans)
    expected_idle = bubble_formula(name, p, m, v, args.backward)
    report.check(f"{name}: bubble", idle, expected_idle, 1e-9, SOURCE)
    held = [peak_activations(instructions, v) for instructions in schedule]
    expected_held = [peak_formula(name, rank, p, m, v) for rank in range(p)]
    errors = sum(abs(one - two) for one, two in zip(held, expected_held, strict=True))
    report.check(f"{name}: error of micro-batches kept", errors, 0, 1e-9, SOURCE)
    report.metrics[name] = {"bubble": idle, "held": held}
    return spans, (name, f"{span_of(spans)[1]:g}", f"{idle:.3f}", f"{held[0]:g}", f"{held[-1]:g}")


def draw_all(report, timelines):
    p = len(next(iter(timelines.values())))
    width = max(span_of(spans)[1] for spans in timelines.values())
    size = (10, 0.6 + len(timelines) * (0.65 + 0.22 * p))
    path = report.output / "schedules.png"
    with figure(path, len(timelines), 1, figsize=size, squeeze=False, sharex=True) as axes:
        for (name, spans), row in zip(timelines.items(), axes[:, 0], strict=True):
            draw(row, spans, name, width)
        row.set_xlabel("time in forwards of one micro-batch", fontsize=9)
        legend(row.figure)
    report.say(f"schedules.png is in {report.output}")


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    names = list(pp_schedules.SCHEDULES)
    add("-p", "--stages", type=cli.positive_int, default=4, help="ranks, with a stage each (4)")
    add("-m", "--micro-batches", type=cli.positive_int, default=8, help="per step (8)")
    add("-v", "--virtual-stages", type=cli.positive_int, default=2,
        help="stages per rank of `interleaved` (2)")  # fmt: skip
    add("--schedule", choices=names, nargs="+", help="one or more: " + ", ".join(names) + " (all)")
    add("--backward", type=cli.positive_float, default=2, help="its time, in forwards (2)")
    args = parser.parse_args()
    if args.backward > 2 and "zb-h1" in (args.schedule or names):
        parser.error("zb-h1 fits --backward of at most 2: its halves must not outlast a forward")
    return args


def main():
    args = parse_args()
    v = args.virtual_stages
    names = args.schedule or list(pp_schedules.SCHEDULES)
    schedules = {n: pp_schedules.build(n, args.stages, args.micro_batches, v) for n in names}
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("05-advanced/pipeline_schedules.py", args, world, device)
        times = f"a forward takes 1, a backward {args.backward:g}"
        report.start(f"{args.stages} stages, {args.micro_batches} micro-batches, {times}")
        if len(names) == 1:
            print_orders(report, schedules[names[0]])
        timelines = {}
        rows = []
        for name, schedule in schedules.items():
            timelines[name], row = count(report, name, schedule, args)
            rows.append(row)
        kept = ("kept by first rank", "by last rank")
        report.table(rows, ("schedule", "duration", "bubble", *kept))
        if report.output and world.is_rank0:
            draw_all(report, timelines)
        return report.finish(
            "every schedule is complete, never blocks, and idles as its paper says"
        )


if __name__ == "__main__":
    cli.run(main)
