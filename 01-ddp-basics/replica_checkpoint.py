"""Checkpoints of a replicated model: rank 0 writes and reads them, so no shared disk is needed."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dist_common import checkpoint, runtime
from dist_common.report import Report


def save(directory: Path, step: int, model: nn.Module, state: dict, keep: int = 2) -> None:
    """Write `state`, the model's weights and every rank's random state. All ranks call it."""
    rng = runtime.gather(rng_state())  # a collective, so not under the `if` below
    if dist.get_rank() != 0:
        return
    weights = model.state_dict()
    facts = {"tensors": checkpoint.shapes_of(weights)}
    with (
        checkpoint.sealed(directory, step, facts, keep, alone=True) as folder,
        open(folder / "state.pt", "wb") as file,  # a path would lose the reason of a failure
    ):
        torch.save({"model": weights, "rng": rng, **state}, file)


def load(directory: Path, model: nn.Module, report: Report) -> dict[str, Any] | None:
    """Return the newest checkpoint that fits `model`, on every rank; None when there is none yet.

    The model is not changed: load `state["model"]` into it. Tensors come back on the CPU.
    Raises: UsageError when there are checkpoints and none can be used.
    """
    own = model.state_dict()
    refuse = lambda facts: checkpoint.other_model(facts, own)  # noqa: E731
    chosen = checkpoint.newest(directory, report, refuse, alone=True)
    state = None
    if chosen and dist.get_rank() == 0:
        state = torch.load(chosen[0] / "state.pt", map_location="cpu", weights_only=True)
    return runtime.from_rank0(state)


def rng_state() -> dict[str, Any]:
    """Return this rank's random state, in a form that torch.load takes with weights_only."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_rng_state(states: list[dict[str, Any]], rank: int) -> bool:
    """Set this rank's random state; False when the run had fewer ranks, and nothing is set."""
    if rank >= len(states):
        return False
    own = states[rank]
    random.setstate(own["python"])
    kind, keys, *rest = own["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(own["torch"])
    if own["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])
    return True
