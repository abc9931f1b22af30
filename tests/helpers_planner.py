"""What tests of the planner share: a template's model as the planner sees it, and counts of it."""

import contextlib

import torch
from torch.autograd.graph import saved_tensors_hooks

from legacy_common.models import Block, TransformerConfig, norms_of_a_gpu
from planner.job import Model


def model_of(config: TransformerConfig) -> Model:
    """Return the planner's shape of a template's model."""
    return Model(
        layers=config.num_layers,
        hidden=config.dim,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        ffn=config.ffn_dim,
        vocab=config.vocab_size,
        tied_embeddings=config.tied_embeddings,
        experts=config.num_experts,
        top_k=config.top_k if config.num_experts else 0,
    )


@contextlib.contextmanager
def kept_for_backward(model, others):
    """Collect the bytes that autograd keeps, by address; weights and `others` do not count."""
    ignored = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *others)}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in ignored:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def as_on_a_gpu(block: Block) -> None:
    """Have a block on `meta` call a GPU's attention, and keep of its norms what a GPU keeps."""
    # By its name: on `meta` a GPU's kernel has shapes, `scaled_dot_product_attention` no choice.
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    block.attention.attend = lambda q, k, v: kernel(q, k, v, 0.0, True)[0]
    norms_of_a_gpu(block)
