"""What pipeline_parallel.py proves of a schedule that ran, and what it draws of it."""

import torch
from torch import nn

from advanced_parts.pipeline_schedules import SOURCE, bubble_formula, draw, peak_formula
from legacy_common.lab import proofs
from legacy_common.report import Report
from legacy_common.runtime import gather
from pipeline_schedules import bubble, durations, simulate, violations

# float32 sums of some thousand terms, added micro-batch by micro-batch: relative, as seen 1e-6
TOLERANCE = 1e-5


def check_same(report: Report, name: str, stages, loss: float, alone, alone_loss: float) -> None:
    """Check the loss, summed over ranks, and every stage's gradient against one process.

    `stages` and `alone` are {index: stage}: those that ran, and one process's, each with gradients.
    """
    error = abs(sum(gather(loss)) - alone_loss)
    report.check(f"{name}: loss error", error, 0, TOLERANCE * alone_loss, "one process")
    own = nn.ModuleList(stages.values())
    gradient = proofs.flat(p.grad for index in stages for p in alone[index].parameters())
    proofs.same_gradient(report, own, gradient, TOLERANCE, f"{name}: gradient error")


def check_run(report: Report, name: str, pipeline, spans, counter) -> tuple[float, list, list]:
    """Check what one step of a schedule sent and kept, and in which order it ran.

    Return the formula's bubble, the recorded spans (s), and the same order in forwards.
    """
    p, m, v = report.world.world_size, len(pipeline.inputs), len(pipeline.stages)

    boundaries = p * v - 1 if p > 1 else 0
    message = torch.empty(pipeline.mail.shape, device="meta").nbytes  # or that of its gradient
    sent = sum(gather(counter.nbytes["send"]))
    source = "B x T x D x 4 bytes per boundary and micro-batch, forward and backward"
    report.check(f"{name}: bytes sent", sent, 2 * boundaries * m * message, 0, source)

    kept = gather(pipeline.most_kept)
    expected = sum(round(v * peak_formula(name, rank, p, m, v)) for rank in range(p))
    source = f"{SOURCE}, summed over ranks"
    report.check(f"{name}: stage inputs kept at most", sum(kept), expected, 0, source)

    # What is being sent stays in memory until the step ends; so would the graph that made it.
    graphs = sum(gather(sum(result.requires_grad for _, result in pipeline.mail.sending)))
    report.check(f"{name}: sent results that hold a graph", graphs, 0, 0, "F detaches them")

    recorded = gather(spans)
    order = [[span.instruction for span in rank] for rank in recorded]
    wrong, source = len(violations(order, m)), "what each instruction needs"
    report.check(f"{name}: broken rules in the recorded order", wrong, 0, 0, source)
    replayed = simulate(order, durations(name, v))
    idle, formula = bubble(replayed), bubble_formula(name, p, m, v)
    report.check(f"{name}: bubble of the recorded order", idle, formula, 1e-9, SOURCE)
    report.metrics[name] = {"bubble": bubble(recorded), "bytes_sent": sent, "kept": kept}
    return formula, recorded, replayed


def torch_refuses(name: str, p: int, m: int) -> bool:
    """Say whether torch's schedule does not take m micro-batches on p ranks, or p = 1."""
    return {"gpipe": False, "1f1b": m < p}.get(name, m % p != 0)


def finish(report: Report, runs: dict[str, tuple[float, list, list]]) -> None:
    """Print each schedule's bubble: measured, by its own formula, by GPipe's; draw the runs."""
    gpipe = bubble_formula("gpipe", report.world.world_size, report.args.micro_batches)
    rows, timelines = [], {}  # each schedule as it was recorded, above what the schedule says
    for name, (formula, recorded, replayed) in runs.items():
        rows.append((name, f"{bubble(recorded):.0%}", f"{formula:.3f}", f"{gpipe:.3f}"))
        timelines[f"{name}: recorded, time in s"] = recorded
        timelines[f"{name}: the schedule, in forwards"] = replayed
    report.table(rows, ("schedule", "bubble measured", "its formula", "(p-1)/(m+p-1)"))
    if report.output and report.world.is_rank0:
        draw(report.output / "pipeline.png", timelines)
