"""Compare pipeline schedules as data: print, simulate and count them; nothing trains.

    CPU   python 05-advanced/pipeline_schedules.py --stages 4 --micro-batches 8
    GPU   the same: no tensor is computed

Look for: which schedules idle less (bubble), and which keep fewer micro-batches.
`--schedule 1f1b` also prints when each rank does what.

Sources: Huang et al., GPipe (2019); Narayanan et al., Megatron-LM on GPU Clusters (SC
2021), section 2.2; Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024), section 2.
"""

from typing import NamedTuple

from dist_common import cli, runtime
from dist_common.report import Report


class Instruction(NamedTuple):
    """F forward, B backward; or B in halves: I input gradient, W weight gradients."""

    kind: str  # F, B, I or W
    stage: int  # 0 .. p x v - 1
    micro_batch: int  # 0 .. m - 1

    def __str__(self):
        return f"{self.kind}{self.micro_batch} of stage {self.stage}"


# A schedule lists the instructions of each of p ranks for m micro-batches, in order.
# Rank r holds stage r; with v stages per rank it holds stages r, r + p, r + 2p, ...


def naive(rank, p, m):
    """Take a micro-batch through all stages and back before the next one starts."""
    for k in range(m):
        yield Instruction("F", rank, k)
        yield Instruction("B", rank, k)


def gpipe(rank, p, m):
    """Do all forwards, then all backwards in reverse (Huang et al., section 2.3)."""
    for k in range(m):
        yield Instruction("F", rank, k)
    for k in reversed(range(m)):
        yield Instruction("B", rank, k)


def one_f_one_b(rank, p, m):
    """Do each backward as soon as possible (Narayanan et al., section 2.2.1)."""
    # lab: hole one_f_one_b
    warmup = min(m, p - rank)  # forwards until the first gradient comes back
    for k in range(warmup):
        yield Instruction("F", rank, k)
    for k in range(m):
        yield Instruction("B", rank, k)
        if k + warmup < m:
            yield Instruction("F", rank, k + warmup)
    # lab: end


def interleaved(rank, p, m, v):
    """Do 1F1B over v stages per rank (Narayanan et al., section 2.2.2)."""

    def turn(number, kind):
        """Return the rank's forward or backward with this number, from 0 to m v - 1."""
        # p micro-batches pass the first stage, then the same p the second one, ...
        group, place = divmod(number, p * v)
        chunk, k = divmod(place, p)
        if kind == "B":
            chunk = v - 1 - chunk
        return Instruction(kind, rank + chunk * p, group * p + k)

    # lab: hole interleaved
    warmup = min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1)
    for number in range(warmup):
        yield turn(number, "F")
    for number in range(m * v):
        yield turn(number, "B")
        if number + warmup < m * v:
            yield turn(number + warmup, "F")
    # lab: end


def zb_h1(rank, p, m):
    """Do 1F1B, but put off `rank` weight gradients (Qi et al., section 2)."""
    for kind, stage, k in one_f_one_b(rank, p, m):
        if kind == "F":
            yield Instruction("F", stage, k)
        else:
            yield Instruction("I", stage, k)  # the rank before waits for this
            if k >= rank:
                yield Instruction("W", stage, k - rank)  # no rank waits for this
    for k in range(m - rank, m):
        yield Instruction("W", rank, k)


SCHEDULES = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
}
STAGES_PER_RANK = {"interleaved": 2}  # of the other schedules 1


def build(name, p, m, v=1):
    """Return the list of instructions of each rank. Only `interleaved` takes v.

    m is a multiple of p for `interleaved`, and at least p for `zb-h1`.
    """
    more = (v,) if name == "interleaved" else ()
    return [list(SCHEDULES[name](rank, p, m, *more)) for rank in range(p)]


# Costs of a schedule


class Span(NamedTuple):
    """An instruction and when a rank executes it, in forwards of one micro-batch."""

    instruction: Instruction
    start: float
    end: float


DURATIONS = {"F": 1, "B": 2, "I": 1, "W": 1}  # of all layers of a rank, in forwards


def needs(instruction, last_stage):
    """Yield the instructions that must end first, here or on a neighboring stage."""
    kind, stage, k = instruction
    if kind == "F" and stage > 0:
        yield Instruction("F", stage - 1, k)
    if kind in "BI":
        yield Instruction("F", stage, k)
        if stage < last_stage:
            yield Instruction(kind, stage + 1, k)
    if kind == "W":
        yield Instruction("I", stage, k)


def simulate(schedule):
    """Return each rank's spans. Sending takes no time; receiving waits for the sender.

    A rank that would wait forever has fewer spans than instructions.
    """
    last_stage = max(i.stage for instructions in schedule for i in instructions)
    stages_per_rank = (last_stage + 1) / len(schedule)
    spans = [[] for _ in schedule]
    ends = {}
    blocked = False
    while not blocked:
        blocked = True
        for instructions, done in zip(schedule, spans, strict=True):
            for instruction in instructions[len(done) :]:
                inputs = list(needs(instruction, last_stage))
                if any(i not in ends for i in inputs):
                    break  # another rank has to go on first
                free = done[-1].end if done else 0
                start = max([free, *(ends[i] for i in inputs)])
                end = start + DURATIONS[instruction.kind] / stages_per_rank
                done.append(Span(instruction, start, end))
                ends[instruction] = end
                blocked = False
    return spans


def duration(spans):
    """Return when the last rank ends, in forwards."""
    return max(span.end for row in spans for span in row)


def bubble(spans):
    """Return the idle fraction of all ranks' time."""
    busy = sum(span.end - span.start for row in spans for span in row)
    return 1 - busy / (len(spans) * duration(spans))


def bubble_formula(name, p, m, v):
    """Return the same from the papers, for a backward of two forwards."""
    if name == "naive":
        return (p - 1) / p
    if name == "zb-h1":  # idle for (p - 1) (F + I - W), busy for m (F + I + W)
        return (p - 1) / (3 * m + p - 1)
    return (p - 1) / (v * m + p - 1)


def peak_activations(instructions, v=1):
    """Return the most micro-batches whose activations a rank keeps at once.

    A forward of a rank with v stages keeps 1/v of a micro-batch's activations.
    """
    kept = most = 0
    for instruction in instructions:
        # After I, W still needs the activations.
        kept += {"F": 1, "B": -1, "I": 0, "W": -1}[instruction.kind]
        most = max(most, kept)
    return most / v


def peak_formula(name, rank, p, m, v):
    """Return the same from the papers; interleaved: Korthikanti et al., 4.2.3."""
    return {
        "naive": 1,
        "gpipe": m,
        "1f1b": p - rank,
        "interleaved": min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1) / v,
        "zb-h1": p,  # 1F1B's p - rank, and `rank` micro-batches whose W is put off
    }[name]


# The script


def print_timeline(run, schedule, spans, v):
    """Print a row per rank and a column per forward of a stage; a dot is idle time."""
    for rank, instructions in enumerate(schedule):
        cells = []
        for (kind, _, k), start, end in spans[rank]:
            cells += ["."] * (round(start * v) - len(cells))
            cells += [f"{kind}{k}"] * round((end - start) * v)
        if blocked := instructions[len(spans[rank]) :]:
            cells.append(f"waits forever before {blocked[0]}")
        run.print0(f"rank {rank}: " + " ".join(f"{cell:<2}" for cell in cells))


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--stages", type=cli.positive_int, default=4, help="number of ranks (4)")
    add("--micro-batches", type=cli.positive_int, default=8, help="per step (8)")
    add("--schedule", choices=SCHEDULES, nargs="+", help="one or more (all)")
    return parser.parse_args()


def main():
    args = parse_args()
    p, m = args.stages, args.micro_batches
    if m % p:
        raise cli.UsageError(f"--micro-batches {m} must be a multiple of {p} stages")
    with runtime.init(args.device, args.timeout) as run:
        report = Report("05-advanced/pipeline_schedules.py", args, run)
        run.print0(f"{p} stages, {m} micro-batches; a backward takes two forwards")
        rows = []
        executed = required = bubbles = expected_bubbles = kept = expected_kept = 0
        for name in args.schedule or SCHEDULES:
            v = STAGES_PER_RANK.get(name, 1)
            schedule = build(name, p, m, v)
            spans = simulate(schedule)
            if args.schedule:
                print_timeline(run, schedule, spans, v)
            executed += len({span.instruction for row in spans for span in row})
            required += p * v * m * (3 if name == "zb-h1" else 2)
            bubbles += bubble(spans)
            expected_bubbles += bubble_formula(name, p, m, v)
            peaks = [peak_activations(instructions, v) for instructions in schedule]
            kept += sum(peaks)
            expected_kept += sum(peak_formula(name, r, p, m, v) for r in range(p))
            costs = f"{duration(spans):g}", f"{bubble(spans):.3f}"
            rows.append((name, *costs, f"{peaks[0]:g}", f"{peaks[-1]:g}"))
        headers = ("schedule", "duration", "bubble", "kept, rank 0", "last rank")
        report.table(rows, headers)
        report.check("different instructions executed", executed, required, 0)
        report.check("sum of the bubbles", bubbles, expected_bubbles, 1e-9)
        report.check("sum of micro-batches kept", kept, expected_kept, 1e-9)
        return report.finish("every schedule idles and keeps as its paper says")


if __name__ == "__main__":
    cli.run(main)
