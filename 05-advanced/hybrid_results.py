"""What hybrid_parallelism.py says of its steps and leaves behind."""

import torch
import torch.distributed as dist

from dist_common import cli, measure
from hybrid_layout import draw_layout


def read(run, unread):
    """Sum the losses of all ranks; log the steps since the last time: (step, loss, norm) each."""
    steps, losses, norms = zip(*unread, strict=True)
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    time_ms = run.timer.lap(len(steps))
    speed = run.tokens.item() / time_ms * 1e3
    for step, loss, norm in zip(steps, losses.tolist(), torch.stack(norms).tolist(), strict=True):
        cli.stop_unless_finite(step, loss, norm)
        run.log.write(step, loss=loss, grad_norm=norm, tokens_per_second=speed)
        run.losses.append(loss)
    flops = speed / dist.get_world_size() * run.flops_per_token
    mfu = measure.mfu(flops, run.report.device, run.args.precision)
    run.report.step(steps[-1], losses[-1].item(), time_ms, speed, mfu)


def leave(run):
    """Set the run's metrics, and draw which rank sat where."""
    report, time_ms = run.report, run.timer.median_ms()
    report.metrics |= {
        "final_loss": run.losses[-1],
        "step_time_ms": round(time_ms, 2),
        "tokens_per_second": round(run.tokens.item() / time_ms * 1e3, 1),
        "peak_memory_gib": round(measure.peak_memory_gib(report.device), 3),
        "bytes_per_axis": run.bytes_per_axis,
    }
    if report.output and report.world.is_rank0:
        draw_layout(report.output / "layout.png", run.args, run.bytes_per_axis)
