"""shard_tools.py: a gradient clipped as in one process, whatever meshes its weights lie on."""

import pytest
import torch
import torch.nn.functional as F
from conftest import load_script
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import shard_tools
from dist_common import models

CONFIG = models.TransformerConfig(256, 32, 2, 4, 2, 64, 64)
MAX_NORM = 0.1


def gradient_of(model, tokens):
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()


def clipped(rank, world_size, frozen):
    """Return both norms, the largest error of a gradient, and what clip_grad_norm_ says."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (4, 17))
    plain, model = models.Transformer(CONFIG), models.Transformer(CONFIG)
    model.load_state_dict(plain.state_dict())
    for each in (plain, model):
        each.blocks[0].requires_grad_(not frozen)
    gradient_of(plain, tokens)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)

    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], load_script("02-fsdp/fsdp_reshard.py").PLAN)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"])
    gradient_of(model, tokens.chunk(world_size // 2)[mesh["dp"].get_local_rank()])
    said = ""
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    except RuntimeError as error:
        said = str(error)
    norm = shard_tools.clip_gradients(model, MAX_NORM)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    errors = [
        (one.grad.full_tensor() - other.grad).abs().max().item()
        for one, other in pairs
        if other.grad is not None
    ]
    return norm.item(), expected.item(), max(errors), said


@pytest.mark.parametrize(
    ("world_size", "frozen"), [(2, True), pytest.param(4, False, marks=pytest.mark.full)]
)
def test_a_gradient_over_two_meshes_is_clipped_as_in_one_process(on_ranks, world_size, frozen):
    for norm, expected, error, said in on_ranks(clipped, world_size, frozen):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert error < 1e-6  # gradients are at most 0.1 after clipping
        assert expected > MAX_NORM and "same mesh" in said, "the page names this error"
