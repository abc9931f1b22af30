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
    speed, mfu = speed_of(run, time_ms)
    for step, loss, norm in zip(steps, losses.tolist(), torch.stack(norms).tolist(), strict=True):
        cli.stop_unless_finite(step, loss, norm)
        run.log.write(step, loss=loss, grad_norm=norm, tokens_per_second=speed)
        run.losses.append(loss)
    run.report.step(steps[-1], losses[-1].item(), time_ms, speed, mfu)


def speed_of(run, step_time_ms):
    """Return tokens/s of all ranks, and the MFU of a device; None where its peak is unknown."""
    speed = run.tokens.item() / step_time_ms * 1e3
    flops = speed / dist.get_world_size() * run.flops_per_token
    return speed, measure.mfu(flops, run.report.device, run.args.precision)


def leave(run):
    """Set the run's metrics, and draw which rank sat where."""
    report, time_ms = run.report, run.timer.median_ms()
    speed, mfu = speed_of(run, time_ms)
    report.metrics |= {
        "final_loss": run.losses[-1],
        "step_time_ms": time_ms,
        "tokens_per_second": speed,
        "tokens_per_step": run.tokens.item(),
        "mfu": mfu,
        "bytes_per_axis": run.bytes_per_axis,
        **run.probe.metrics(run.timer),
    }
    if report.output and report.world.is_rank0:
        draw_layout(report.output / "layout.png", run.args, run.bytes_per_axis)
