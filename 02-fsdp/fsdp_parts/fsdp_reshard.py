"""Compare checkpoints tensor by tensor, whole, with PyTorch's own readers and no group."""

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp

from fsdp_parts.checkpoint_job import FULL, load_alone
from legacy_common.runtime import gather


def names_of(found: SimpleNamespace) -> list[str]:
    """Return the names of all tensors: "model.WEIGHT", "optimizer.state.WEIGHT.MOMENT"."""
    if FULL in found.files:
        return sorted(_of_file(found.folder))
    kept = dcp.FileSystemReader(found.folder).read_metadata().state_dict_metadata
    return sorted(name for name, facts in kept.items() if hasattr(facts, "size"))


def tensors_of(found: SimpleNamespace, names: list[str]) -> dict[str, torch.Tensor]:
    """Return some tensors, whole, read by this process alone."""
    if FULL in found.files:
        whole = _of_file(found.folder)
        return {name: whole[name] for name in names}
    kept = dcp.FileSystemReader(found.folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(kept[name].size, dtype=kept[name].properties.dtype) for name in names
    }
    load_alone(tensors, found.folder)
    return tensors


def count_equal(job: SimpleNamespace, one: SimpleNamespace, other: SimpleNamespace) -> int:
    """Return how many tensors are bitwise equal in two checkpoints; the ranks share them out."""
    names = names_of(one)
    own = names[job.world.rank :: job.world.world_size]
    there = set(names_of(other))
    equal = 0
    for name in own:  # one at a time in memory
        if name in there:
            equal += torch.equal(*(tensors_of(found, [name])[name] for found in (one, other)))
    return sum(gather(equal, job.files))


def _of_file(folder: Path) -> dict[str, torch.Tensor]:
    state = torch.load(folder / FULL, "cpu", weights_only=True, mmap=True)
    named = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for name, kept in state["optimizer"]["state"].items():
        named |= {f"optimizer.state.{name}.{kind}": moment for kind, moment in kept.items()}
    return named
