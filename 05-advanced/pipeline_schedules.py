"""Print, draw, check and count pipeline schedules for any number of stages, without running them.

    CPU   python 05-advanced/pipeline_schedules.py --stages 4 --micro-batches 8
    GPU   the same: no tensor is computed

Look for: which schedules idle less (bubble), and which keep fewer micro-batches (activations).
`--schedule 1f1b` prints what each rank does, in order; `--output-dir DIR` draws schedules.png.

Sources: Huang et al., GPipe (2019); Narayanan et al., Efficient Large-Scale Language Model Training
on GPU Clusters Using Megatron-LM (SC 2021), section 2.2; Qi et al., Zero Bubble Pipeline
Parallelism (ICLR 2024), section 2.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from advanced_parts import pipeline_schedules as part
from legacy_common import cli, runtime
from legacy_common.report import Report


class Instruction(NamedTuple):
    """F forward, B backward; or B in two halves: I for the input's gradient, W for the weights'."""

    kind: str  # F, B, I or W
    stage: int  # 0 .. p x v - 1
    micro_batch: int  # 0 .. m - 1

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch} of stage {self.stage}"


class Span(NamedTuple):
    """An instruction and when a rank carried it out, in any unit of time."""

    instruction: Instruction
    start: float
    end: float


Schedule = list[list[Instruction]]  # by rank, in order


def naive(rank: int, p: int, m: int) -> Iterator[Instruction]:
    """A micro-batch passes all stages, there and back, before the next one starts."""
    for k in range(m):
        yield Instruction("F", rank, k)
        yield Instruction("B", rank, k)


def gpipe(rank: int, p: int, m: int) -> Iterator[Instruction]:
    """All forwards, then all backwards in reverse (Huang et al., 2019, section 2.3)."""
    for k in range(m):
        yield Instruction("F", rank, k)
    for k in reversed(range(m)):
        yield Instruction("B", rank, k)


def one_f_one_b(rank: int, p: int, m: int) -> Iterator[Instruction]:
    """Each backward as soon as it can be (PipeDream-Flush; Narayanan et al., 2021, 2.2.1)."""
    # lab: hole one_f_one_b
    warmup = min(m, p - rank)  # forwards until the first gradient comes back
    for k in range(warmup):
        yield Instruction("F", rank, k)
    for k in range(m):
        yield Instruction("B", rank, k)
        if k + warmup < m:
            yield Instruction("F", rank, k + warmup)
    # lab: end


def interleaved(rank: int, p: int, m: int, v: int) -> Iterator[Instruction]:
    """1F1B over v stages per rank (Narayanan et al., 2021, 2.2.2)."""

    def turn(number: int, kind: str) -> Instruction:
        group, place = divmod(number, p * v)  # p micro-batches take turns through v stages
        chunk, k = divmod(place, p)
        chunk = chunk if kind == "F" else v - 1 - chunk
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


def zb_h1(rank: int, p: int, m: int) -> Iterator[Instruction]:
    """1F1B in which `rank` weight gradients wait for idle time (Qi et al., 2024, section 2)."""
    warmup = min(m, p - rank)
    for k in range(warmup):
        yield Instruction("F", rank, k)
    for k in range(m):
        yield Instruction("I", rank, k)  # the rank before waits for this
        if k >= rank:
            yield Instruction("W", rank, k - rank)  # no rank waits for this
        if k + warmup < m:
            yield Instruction("F", rank, k + warmup)
    for k in range(m - rank, m):
        yield Instruction("W", rank, k)


SCHEDULES = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
}


def build(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """Return the instructions of each of p ranks; only `interleaved` has more than one stage each.

    Raises: UsageError for numbers of micro-batches with which a schedule does not work.
    """
    if name == "interleaved":
        if m % p:
            multiple = f"{m} micro-batches must be a multiple of {p} ranks"
            turns = "they take turns in groups of that size"
            raise cli.UsageError(f"interleaved: {multiple}: {turns}")
        return [list(interleaved(rank, p, m, v)) for rank in range(p)]
    if name == "zb-h1" and m < p:
        late = f"the last stage has no {p - 1} weight gradients to put off"
        raise cli.UsageError(f"zb-h1: {m} micro-batches are fewer than {p} stages: {late}")
    return [list(SCHEDULES[name](rank, p, m)) for rank in range(p)]


def needs(instruction: Instruction, last_stage: int) -> Iterator[Instruction]:
    """Yield what has to be done before, on this stage or on the stage that sends to it."""
    kind, stage, k = instruction.kind, instruction.stage, instruction.micro_batch
    if kind == "F" and stage > 0:
        yield Instruction("F", stage - 1, k)
    if kind in "BI":
        yield Instruction("F", stage, k)
        if stage < last_stage:
            yield Instruction(kind, stage + 1, k)
    if kind == "W":
        yield Instruction("I", stage, k)


def durations(name: str, v: int, backward: float = 2.0) -> dict[str, float]:
    """Return how long each kind takes; a stage of v on a rank takes 1/v, I and W half of B each."""
    share = v if name == "interleaved" else 1
    return {"F": 1 / share, "B": backward / share, "I": backward / 2, "W": backward / 2}


def simulate(schedule: Schedule, times: dict[str, float]) -> list[list[Span]]:
    """Time each rank's instructions in order: a receive blocks, a send takes no time.

    A rank that would wait for ever stops there, with fewer spans than instructions.
    """
    last_stage = max(i.stage for rank in schedule for i in rank)
    spans: list[list[Span]] = [[] for _ in schedule]
    ends: dict[Instruction, float] = {}
    moved = True
    while moved:
        moved = False
        for todo, done in zip(schedule, spans, strict=True):
            while len(done) < len(todo):
                instruction = todo[len(done)]
                before = list(needs(instruction, last_stage))
                if not all(other in ends for other in before):
                    break  # another rank's turn
                idle_from = done[-1].end if done else 0.0
                start = max([idle_from, *(ends[other] for other in before)])
                ends[instruction] = start + times[instruction.kind]
                done.append(Span(instruction, start, ends[instruction]))
                moved = True
    return spans


def violations(schedule: Schedule, m: int) -> list[str]:
    """Say what is wrong: work that is missing, done twice or on another rank, a deadlock."""
    last_stage = max(i.stage for rank in schedule for i in rank)
    kinds = "FIW" if any(i.kind == "I" for rank in schedule for i in rank) else "FB"
    times = Counter(i for rank in schedule for i in rank)
    for stage in range(last_stage + 1):
        for k in range(m):
            times.subtract(Instruction(kind, stage, k) for kind in kinds)
    found = [f"{i} occurs {n:+} times too often" for i, n in times.items() if n]
    for rank, todo in enumerate(schedule):
        strange = [i for i in todo if i.stage % len(schedule) != rank]
        found += [f"rank {rank} does not hold the stage of {i}" for i in strange]
    spans = simulate(schedule, dict.fromkeys("FBIW", 1.0))
    for rank, (todo, ended) in enumerate(zip(schedule, spans, strict=True)):
        if len(ended) < len(todo):
            found.append(f"rank {rank} waits for ever before {todo[len(ended)]}")
    return found


def bubble(spans: list[list[Span]]) -> float:
    """Return the idle fraction of all ranks' time, from the first start to the last end."""
    every = [span for rank in spans for span in rank]
    whole = max(span.end for span in every) - min(span.start for span in every)
    return 1 - sum(span.end - span.start for span in every) / (whole * len(spans))


def peak_activations(instructions: list[Instruction], v: int = 1) -> float:
    """Return the most micro-batches whose activations a rank keeps; one of v stages keeps 1/v."""
    held = most = 0
    for instruction in instructions:
        # With the backward in two halves, the second still needs them.
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[instruction.kind]
        most = max(most, held)
    return most / v


def name_of(instruction, p):
    """Return F3 for the forward of micro-batch 3; F3.1 on the rank's second stage."""
    chunk = instruction.stage // p
    return f"{instruction.kind}{instruction.micro_batch}" + f".{chunk}" * bool(chunk)


def print_orders(report, schedule):
    for rank, instructions in enumerate(schedule):
        names = " ".join(name_of(instruction, len(schedule)) for instruction in instructions)
        report.say(f"rank {rank}: {names}")


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    names = list(SCHEDULES)
    add("-p", "--stages", type=cli.positive_int, default=4, help="ranks, with a stage each (4)")
    add("-m", "--micro-batches", type=cli.positive_int, default=8, help="per step (8)")
    add("-v", "--virtual-stages", type=cli.positive_int, default=2,
        help="stages per rank of `interleaved` (2)")  # fmt: skip
    add("--schedule", choices=names, nargs="+", help="one or more: " + ", ".join(names) + " (all)")
    add("--backward", type=cli.positive_float, default=2, help="its time, in forwards (2)")
    return parser.parse_args()


def main():
    args = parse_args()
    names = args.schedule or list(SCHEDULES)
    schedules, left_out = {}, []
    for name in names:
        try:
            if name == "zb-h1" and args.backward > 2:
                why = "its halves must not outlast a forward"
                raise cli.UsageError(f"zb-h1 fits --backward of at most 2: {why}")
            schedules[name] = build(name, args.stages, args.micro_batches, args.virtual_stages)
        except cli.UsageError as error:
            if args.schedule:  # it was asked for
                raise
            left_out.append(f"left out: {error}")
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("05-advanced/pipeline_schedules.py", args, world, device)
        times = f"a forward takes 1, a backward {args.backward:g}"
        sizes = f"{args.stages} stages, {args.micro_batches} micro-batches"
        report.start(f"{sizes}, {times}", *left_out)
        if len(names) == 1:
            print_orders(report, schedules[names[0]])
        timelines = {}
        rows = []
        for name, schedule in schedules.items():
            v = args.virtual_stages if name == "interleaved" else 1
            spans = simulate(schedule, durations(name, v, args.backward))
            idle = bubble(spans)
            held = [peak_activations(instructions, v) for instructions in schedule]
            wrong = violations(schedule, args.micro_batches)
            part.check(report, name, v, wrong, idle, held)
            timelines[name] = spans
            ends = f"{held[0]:g}", f"{held[-1]:g}"
            rows.append((name, f"{part.span_of(spans)[1]:g}", f"{idle:.3f}", *ends))
        kept = ("kept by first rank", "by last rank")
        report.table(rows, ("schedule", "duration", "bubble", *kept))
        if report.output and world.is_rank0:
            label = "time in forwards of one micro-batch"
            part.draw(report.output / "schedules.png", timelines, label)
        return report.finish(
            "every schedule is complete, never blocks, and idles as its paper says"
        )


if __name__ == "__main__":
    cli.run(main)
