"""Save, stop and resume a sharded run: each rank writes its shards, any number reads them."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state

from dist_common import checkpoint

# By name of the weight, not by its place in the optimizer.
BY_NAME = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)


def file_group() -> dist.ProcessGroup:
    """Return a group on the CPU for what goes to files: names and checksums are no GPU tensors."""
    return dist.new_group(backend="gloo")


def catch_preemption() -> list[int]:
    """Note SIGTERM and SIGUSR1 in the list returned, instead of dying from them in mid-step."""
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: signals.append(number))
    return signals


def save(run: SimpleNamespace) -> None:
    """Write weights, moments, the place in the data and the settings of a run. A collective.

    `run` has model, optimizer, step, sampler, settings, report, files (a `file_group`) and
    shapes (the state dict of the whole model, on meta).
    """
    facts = {
        "tensors": checkpoint.shapes_of(run.shapes),
        "sampler": run.sampler.state_dict(),
        "settings": run.settings,
    }
    folder = run.report.output / "checkpoints"
    with checkpoint.sealed(folder, run.step, facts, group=run.files) as partial:
        dcp.save(state_of(run), checkpoint_id=partial, process_group=run.files)


def resume(run: SimpleNamespace) -> bool:
    """Load the newest checkpoint into a run, whatever number of ranks wrote it. A collective.

    Return False when there is none yet. Raises: UsageError when none can be used.
    """

    refuse = lambda facts: checkpoint.other_model(facts, run.shapes)  # noqa: E731
    chosen = checkpoint.newest(run.report.output / "checkpoints", run.report, refuse, run.files)
    if chosen is None:
        return False
    folder, facts = chosen
    run.report.say(checkpoint.changed_settings(facts["settings"], run.settings))
    state = state_of(run)

    dcp.load(state, checkpoint_id=folder, process_group=run.files)

    dcp_state.set_model_state_dict(run.model, state["model"])
    dcp_state.set_optimizer_state_dict(
        run.model, run.optimizer, state["optimizer"], options=BY_NAME
    )
    run.sampler.load_state_dict(facts["sampler"])
    run.step = facts["step"]
    return True


def state_of(run: SimpleNamespace) -> dict[str, dict]:
    """Return weights and moments by the names of the whole model. A collective."""
    return {
        "model": dcp_state.get_model_state_dict(run.model),
        "optimizer": dcp_state.get_optimizer_state_dict(run.model, run.optimizer, options=BY_NAME),
    }
