"""What pipeline_parallel.py proves of a schedule that ran, and what it draws of it."""

from dataclasses import dataclass

import torch
from torch import nn

from dist_common import proofs
from dist_common.report import Report, figure
from dist_common.runtime import gather
from pp_formulas import bubble_formula, draw, durations, legend, peak_formula, span_of
from pp_schedules import Span, bubble, simulate, violations

# float32 sums of some thousand terms, added micro-batch by micro-batch: relative, as seen 1e-6
TOLERANCE = 1e-5
BYTES = 4  # per float32 number


@dataclass
class Run:
    """A schedule that ran on all ranks."""

    p: int
    m: int
    v: int
    spans: list[list[Span]]  # recorded, in s
    replayed: list[list[Span]]  # the recorded order, in forwards


@dataclass
class Reference:
    """One process's loss and gradient of the same global batch, by name of the weight."""

    loss: float
    gradients: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module, loss_of, batches) -> "Reference":
        """Compute both from the whole model and the whole batch at once."""
        inputs, targets = batches
        loss = loss_of(model(inputs), targets)
        names = [name for name, _ in model.named_parameters()]
        vector = proofs.gradient_of_one_process(model, [loss])
        parts = vector.split([weight.numel() for weight in model.parameters()])
        return cls(loss.item(), dict(zip(names, parts, strict=True)))

    def of_stages(self, stages: dict[int, nn.Module]) -> torch.Tensor:
        """Return the part of the gradient that belongs to some stages, as one vector."""
        parts = []
        for index, stage in stages.items():
            first = index * len(stage.blocks)
            for name, _ in stage.named_parameters():
                kind, *rest = name.split(".")
                if kind == "blocks":
                    rest[0] = str(first + int(rest[0]))
                parts.append(self.gradients[".".join([kind, *rest])])
        return torch.cat(parts)


def check_same(report: Report, name: str, stages, loss: float, reference: Reference) -> None:
    """Check the loss, summed over ranks, and every stage's gradient against one process."""
    found = torch.tensor([sum(gather(loss))])
    expected = torch.tensor([reference.loss])
    proofs.same_losses(report, found, expected, TOLERANCE * reference.loss, f"{name}: loss error")
    proofs.same_gradient(
        report, nn.ModuleList(stages.values()), reference.of_stages(stages), TOLERANCE,
        f"{name}: gradient error",
    )  # fmt: skip


def check_run(report: Report, name: str, pipeline, spans, counter, reference: Reference) -> Run:
    """Check what one step of a schedule computed, sent, kept, and in which order it ran."""
    check_same(report, name, pipeline.stages, sum(pipeline.losses), reference)
    p = report.world.world_size
    m = len(pipeline.inputs)
    v = len(pipeline.stages)

    boundaries = p * v - 1 if p > 1 else 0
    message = torch.Size(pipeline.mail.shape).numel() * BYTES  # an activation, or its gradient
    sent = sum(gather(counter.bytes["send"]))
    source = "B x T x D x 4 bytes per boundary and micro-batch, forward and backward"
    report.check(f"{name}: bytes sent", sent, 2 * boundaries * m * message, 0, source)

    kept = gather(pipeline.most_kept)
    expected = [round(v * peak_formula(name, rank, p, m, v)) for rank in range(p)]
    report.check(f"{name}: stage inputs kept at most", sum(kept), sum(expected), 0,
                 "the paper's formula, summed over ranks")  # fmt: skip

    recorded = gather(spans)
    order = [[span.instruction for span in rank] for rank in recorded]
    report.check(f"{name}: broken rules in the recorded order", len(violations(order, m)), 0, 0,
                 "what each instruction needs")  # fmt: skip
    replayed = simulate(order, durations(name, v))
    report.check(f"{name}: bubble of the recorded order", bubble(replayed),
                 bubble_formula(name, p, m, v), 1e-9, "the paper's formula")  # fmt: skip
    report.metrics[name] = {"bubble": bubble(recorded), "bytes_sent": sent, "kept": kept}
    return Run(p, m, v, recorded, replayed)


def torch_refuses(name: str, p: int, m: int) -> bool:
    """Say whether torch's schedule does not take m micro-batches on p ranks, or p = 1."""
    return {"gpipe": False, "1f1b": m < p}.get(name, m % p != 0)


def table_of_bubbles(report: Report, runs: dict[str, Run]) -> None:
    """Print each schedule's bubble: measured, by its own formula, by GPipe's."""
    rows = []
    for name, run in runs.items():
        formulas = (bubble_formula(n, run.p, run.m, run.v) for n in (name, "gpipe"))
        rows.append((name, f"{bubble(run.spans):.0%}", *(f"{value:.3f}" for value in formulas)))
    headers = ("schedule", "bubble measured", "its formula", "(p-1)/(m+p-1)")
    report.table(rows, headers)


def draw_runs(report: Report, runs: dict[str, Run]) -> None:
    """Draw each schedule as it was recorded, above what the schedule says."""
    if not (report.output and report.world.is_rank0):
        return
    count, size = 2 * len(runs), (10, 0.6 + len(runs) * 2 * (0.6 + 0.2 * report.world.world_size))
    with figure(report.output / "pipeline.png", count, 1, figsize=size, squeeze=False) as axes:
        for index, (name, run) in enumerate(runs.items()):
            rows = ((run.spans, "recorded, time in s"), (run.replayed, "the schedule, in forwards"))
            for row, (spans, what) in enumerate(rows):
                first, last = span_of(spans)
                draw(axes[2 * index + row, 0], spans, f"{name}: {what}", last - first)
        legend(axes[0, 0].figure)
    report.say(f"pipeline.png is in {report.output}")
