"""Checkpoints by the names and shapes of the whole model, so that any layout can load them."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state

from dist_common import checkpoint, models

# By name of the weight, not by its place in the optimizer: that differs from layout to layout.
BY_NAME = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)


def save(run):
    """Write what this rank holds of weights and moments, and where the run is. A collective."""
    weights = whole_shapes(run)
    facts = {
        "tensors": checkpoint.shapes_of(weights),
        "sampler": run.sampler.state_dict(),
        "settings": checkpoint.settings_of(run.args, dist.get_world_size(), run.checksum),
    }
    folder = run.report.output / "checkpoints"
    with checkpoint.sealed(folder, run.step, facts, group=run.files) as partial:
        dcp.save(state_of(run), checkpoint_id=partial, process_group=run.files)


def resume(run):
    """Load the newest checkpoint, whatever layout wrote it. A collective."""
    own = whole_shapes(run)
    folder = run.report.output / "checkpoints"
    refuse = lambda facts: checkpoint.other_model(facts, own)  # noqa: E731
    chosen = checkpoint.newest(folder, run.report, refuse, run.files)
    if chosen is None:
        return
    path, facts = chosen
    settings = checkpoint.settings_of(run.args, dist.get_world_size(), run.checksum)
    run.report.say(checkpoint.changed_settings(facts["settings"], settings))
    state = state_of(run)

    dcp.load(state, checkpoint_id=path, process_group=run.files)

    dcp_state.set_model_state_dict(run.model, state["model"])
    dcp_state.set_optimizer_state_dict(
        run.model, run.optimizer, state["optimizer"], options=BY_NAME
    )
    run.sampler.load_state_dict(facts["sampler"])
    run.step = facts["step"]


def state_of(run):
    """Return weights and moments by the names of the whole model. A collective."""
    weights = dcp_state.get_model_state_dict(run.model)
    moments = dcp_state.get_optimizer_state_dict(run.model, run.optimizer, options=BY_NAME)
    return {"model": weights, "optimizer": moments}


def whole_shapes(run):
    """Return the weights of the whole model, without memory behind them, by name."""
    with torch.device("meta"):
        return models.Transformer(run.model.config).state_dict()


def file_group():
    """Return a group on the CPU for what goes to files: names and checksums are no GPU tensors."""
    return dist.new_group(backend="gloo")
