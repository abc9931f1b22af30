"""Tensors that a training library keeps although the mathematics needs none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stack:
    """Facts of one library's code, each read there: they decide what autograd keeps."""

    swiglu: int = (
        4  # inner widths kept: gate, SiLU of it, up, product; a fused kernel: 3
    )
    norm_bytes: int = 2  # of a norm's input: its own 16 bits, or float32 copies
    repeats_keys: bool = False  # keys and values are copied for each query head (GQA)
    keeps_gathered: bool = (
        True  # tp's inputs stay whole for backward; Megatron gathers them again
    )
    logit_bytes: int = (
        12  # float32 log-probabilities, their gradient, the logits' gradient
    )
    loss_whole: bool = False  # logits are gathered from tp before the loss
    embedding_whole: bool = False  # each rank of tp has the whole first table
    no_sync: bool = False  # micro-batches' gradients are added up whole, under ZeRO too
    reshards_root: bool = False  # FSDP frees the tables between forward and backward
    reshards_stage: bool = (
        False  # with a pipeline FSDP frees weights after each forward too
    )
    reduces_each: bool = False  # ZeRO-3 reduces in each micro-batch, in a pipeline too
    joins_chunks: bool = (
        False  # cp that gathers keys: attention's output by chunk, and joined
    )
    rows_twice: bool = (
        False  # experts: rows that come back are kept too, and a float32 input
    )
    bucket_copy: bool = True  # DDP's buckets are copies (gradient_as_bucket_view=False)
    dummy_gradients: bool = (
        False  # 16-bit stand-ins for gradients that a kernel accumulates
    )
    sharded_copy: bool = False  # ZeRO-3 keeps 16-bit shards beside the float32 ones
    ulysses_copy: bool = False  # attention's output is kept before its all-to-all too
    source: str = ""


STACKS: dict[str, Stack] = {
    "torch": Stack(
        joins_chunks=True,
        source="PyTorch 2.11: fully_shard, parallelize_module, F.cross_entropy",
    ),
    "hybrid_parallelism": Stack(
        no_sync=True,
        reshards_stage=True,
        reduces_each=True,
        joins_chunks=True,
        rows_twice=True,
        bucket_copy=False,
        source="05-advanced/hybrid_parallelism.py: shard, PipelineStage",
    ),
    "megatron": Stack(
        swiglu=3,
        keeps_gathered=False,
        logit_bytes=6,
        bucket_copy=False,
        dummy_gradients=True,
        ulysses_copy=True,
        source="Megatron-LM core: bias_swiglu, "
        "LinearWithGradAccumulationAndAsyncCommunication, "
        "vocab_parallel_cross_entropy; Transformer Engine: get_dummy_wgrad",
    ),
    "torchtitan": Stack(
        norm_bytes=2,
        repeats_keys=True,
        source="torchtitan models/llama: nn.RMSNorm, repeat_kv; loss_parallel",
    ),
    "torchtune": Stack(
        reshards_root=True,
        source="torchtune recipes: custom_sharded_layers, tok_embeddings and output",
    ),
    "kempnerforge": Stack(
        norm_bytes=8,
        repeats_keys=True,
        logit_bytes=8,
        loss_whole=True,
        embedding_whole=True,
        no_sync=True,
        reshards_root=True,
        reshards_stage=True,
        source="KempnerForge distributed/parallel.py, tensor_parallel.py, "
        "training/grad.py; "
        "docs/distributed/pipeline-parallelism.md, FSDP2 interaction",
    ),
    "litgpt": Stack(
        norm_bytes=8,
        repeats_keys=True,
        logit_bytes=8,
        source="litgpt model.py: RMSNorm, CausalSelfAttention; "
        "utils.py: chunked_cross_entropy",
    ),
    "thunder": Stack(
        norm_bytes=8,
        repeats_keys=True,
        logit_bytes=8,
        bucket_copy=False,
        source="lightning-thunder: its ddp reduces gradients in place; litgpt's model",
    ),
    "deepspeed": Stack(
        sharded_copy=True,
        bucket_copy=False,
        source="DeepSpeed runtime/zero/stage3.py: fp16 and fp32 partitions",
    ),
}
