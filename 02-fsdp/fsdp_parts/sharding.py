"""What the lessons of this module share beside `fully_shard` itself: the mesh, weights, bytes."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from legacy_common.lab import proofs
from legacy_common.models import cut_like, local
from legacy_common.report import Report


def mesh_of(shards: int, device: torch.device) -> DeviceMesh:
    """Arrange all ranks: a row shards one replica of the model, a column holds the same shard.

    Shapes: (shards,) where one replica takes all ranks, otherwise (replicas, shards).
    """
    ranks = dist.get_world_size()
    if shards == ranks:
        return init_device_mesh(device.type, (shards,), mesh_dim_names=("shard",))
    shape = (ranks // shards, shards)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole on every rank. A collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def put(parameter: nn.Parameter, whole: torch.Tensor) -> None:
    """Copy a whole tensor into a parameter; a sharded one takes this rank's rows. No collective."""
    local(parameter).copy_(cut_like(whole, parameter))


def materialize(model: nn.Module, device: torch.device) -> nn.Module:
    """Give a model on `meta` memory for what this rank holds of it; a tied head stays tied."""
    model.to_empty(device=device)
    if model.config.tied_embeddings:
        model.head.weight = model.embedding.weight  # to_empty has made two of it
    return model


def draw_weights(model: nn.Module, device: torch.device, seed: int) -> None:
    """Draw each weight whole by `model.draw`, the same on all ranks, and keep this rank's part.

    So the model is the same on any number of ranks, and one weight at a time is in memory whole.
    """
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, device=device)
        model.draw(name, whole)
        put(parameter, whole)


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy, in float32. Shapes: batch is inputs and targets, (B, T)."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def same_gradient(
    report: Report, name: str, model: nn.Module, expected: torch.Tensor, tolerance: float
) -> None:
    """Check the gradient, gathered from all ranks, against a vector; relative to its largest."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = (torch.zeros_like(w) if w.grad is None else w.grad for w in trained)
    whole = proofs.flat(gathered(gradient) for gradient in gradients)
    error = (whole - expected).abs().max() / expected.abs().max()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)  # the worst rank counts
    report.check(name, error.item(), 0, tolerance, "one process")


def held_bytes(weights: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the bytes of weights, gradients and optimizer state on the rank that holds most."""
    weights = list(weights)
    kinds = (
        weights,
        [weight.grad for weight in weights if weight.grad is not None],
        [t for state in optimizer.state.values() for t in state.values() if t.dim()],
    )
    own = torch.tensor([sum(local(t).nbytes for t in tensors) for tensors in kinds])
    own = own.to(local(weights[0]).device)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return own.tolist()
