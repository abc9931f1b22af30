"""What tests of the planner share: the shape of a model that the templates train."""

from legacy_common.models import TransformerConfig
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
