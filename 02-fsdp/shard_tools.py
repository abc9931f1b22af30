"""What the lessons of this module share beside `fully_shard` itself: the mesh, weights, bytes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from dist_common.cli import UsageError
from dist_common.runtime import World


def shards_of(sharding: str, group_size: int | None, world: World) -> int:
    """Return over how many ranks the model is sharded; hybrid: those of a machine by default.

    Raises: UsageError when `group_size` does not divide the ranks.
    """
    size = min(group_size or world.local_world_size, world.world_size)
    if sharding == "hybrid" and world.world_size % size:
        raise UsageError(
            f"--sharding hybrid: --shard-group-size {size} does not divide {world.world_size} ranks"
        )
    return {"hybrid": size, "none": 1}.get(sharding, world.world_size)


def mesh_of(shards: int, device: torch.device) -> DeviceMesh:
    """Arrange all ranks: a row shards one replica of the model, a column holds the same shard.

    Shapes: (shards,) where one replica takes all ranks, otherwise (replicas, shards).
    """
    ranks = dist.get_world_size()
    if shards == ranks:
        return init_device_mesh(device.type, (shards,), mesh_dim_names=("shard",))
    shape = (ranks // shards, shards)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, sharded or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def draw_weights(model: nn.Module, device: torch.device, seed: int) -> None:
    """Draw each weight whole by `model.draw`, the same on all ranks, and keep this rank's part.

    So the model is the same on any number of ranks, and one weight at a time is in memory whole.
    """
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, device=device)
        model.draw(name, whole)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            whole = local(distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None))
        local(parameter).copy_(whole)


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the bytes of weights, gradients and optimizer state on the rank that holds most."""
    weights = list(model.parameters())
    kinds = (
        weights,
        [weight.grad for weight in weights if weight.grad is not None],
        [t for state in optimizer.state.values() for t in state.values() if t.dim()],
    )
    own = torch.tensor([sum(local(t).nbytes for t in tensors) for tensors in kinds])
    own = own.to(local(weights[0]).device)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return own.tolist()
