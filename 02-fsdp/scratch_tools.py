"""What fsdp_from_scratch.py does not teach: cutting vectors, choosing groups, whole weights."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# torch 2.13 gave them these names; until then they were all_gather_into_tensor and so on.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return tensors as one vector, with zeros at its end until N ranks can share it equally."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return F.pad(flat, (0, -len(flat) % dist.get_world_size()))


def part_of(vector: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a vector. Shapes: (n,) in, (n / N,) out."""
    return vector.chunk(dist.get_world_size())[dist.get_rank()]


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient, or zeros where it has none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def groups_of(model: nn.Module, modules: Collection[nn.Module]) -> dict[tuple, list[nn.Parameter]]:
    """Return the parameters of each unit by (module, trained or frozen, dtype).

    A parameter that several modules share belongs to the rest, as one in none of them does; the
    rest is the model's own. Raises: ValueError for units that lie in one another.
    """
    inside = set(model.modules())
    holders = Counter(part for module in modules for part in set(module.modules()))
    for module in modules:
        if module not in inside or holders[module] > 1:
            name = type(module).__name__
            raise ValueError(f"{name}: a unit must be in the model, once, and not in another unit")
    owners = defaultdict(list)
    for module in modules:
        for parameter in module.parameters():
            owners[parameter].append(module)
    groups = defaultdict(list)
    for parameter in model.parameters():
        owner = owners[parameter]
        place = owner[0] if len(owner) == 1 else model
        groups[place, parameter.requires_grad, parameter.dtype].append(parameter)
    return groups


def assemble(unit: Any, part: torch.Tensor) -> list[torch.Tensor]:
    """Return a unit's whole tensors, such as its gradients, of which each rank has a part."""
    whole = part.new_empty(unit.whole.shape)
    all_gather(whole, part)
    return unit.cut(whole)


def whole_state(sharded: Any) -> dict[str, torch.Tensor]:
    """Return the state dict of the plain model, in the precision of the shards.

    Every rank must call it, and gets it: save it on one.
    """
    whole: dict[int, torch.Tensor] = {}
    for unit in sharded.units:
        tensors = assemble(unit, unit.shard)
        whole |= {id(p): tensor for p, tensor in zip(unit.parameters, tensors, strict=True)}
    own = sharded.model.state_dict(keep_vars=True)
    return {name: whole.get(id(value), value) for name, value in own.items()}


def load_whole_state(sharded: Any, state: dict[str, torch.Tensor]) -> None:
    """Keep this rank's part of a plain model's state dict. Raises: ValueError for other names."""
    own = sharded.model.state_dict(keep_vars=True)
    if own.keys() != state.keys():
        raise ValueError(f"only one of the two has {', '.join(sorted(own.keys() ^ state.keys()))}")
    names = {id(value): name for name, value in own.items()}
    for unit in sharded.units:
        tensors: Sequence[torch.Tensor] = [state[names[id(p)]] for p in unit.parameters]
        for parameter, shape, tensor in zip(unit.parameters, unit.shapes, tensors, strict=True):
            if tensor.shape != shape:
                name = names[id(parameter)]
                raise ValueError(f"{name} is {tuple(tensor.shape)}, must be {tuple(shape)}")
        unit.shard.copy_(part_of(flatten(tensors)))
    for name, buffer in sharded.model.named_buffers():
        buffer.copy_(state.get(name, buffer))
