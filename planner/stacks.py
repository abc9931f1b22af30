"""Tensors that a training library keeps although the mathematics needs none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stack:
    """Facts of one library, each read in its code: they decide what autograd keeps."""

    # Inner widths of a gated feed-forward: gate, SiLU, up, product. Fused: 3.
    swiglu: int = 4
    # Bytes of a norm's input: 16 bits, or float32 copies.
    norm_bytes: int = 2
    # Keys and values are copied for each query head (GQA).
    repeats_keys: bool = False
    # The inputs of tp's matrices stay whole for backward. Megatron gathers them again.
    keeps_gathered: bool = True
    # float32 log-probabilities, their gradient, and the gradient of the logits.
    logit_bytes: int = 12
    # Logits are gathered from tp before the loss.
    loss_whole: bool = False
    # Each rank of tp has the whole embedding table.
    embedding_whole: bool = False
    # Micro-batches add up whole gradients, under ZeRO too.
    no_sync: bool = False
    # FSDP frees the tables between forward and backward.
    reshards_root: bool = False
    # FSDP frees the weights of a pipeline's stage after each forward.
    reshards_stage: bool = False
    # ZeRO-3 reduces gradients in each micro-batch, in a pipeline too.
    reduces_each: bool = False
    # Context parallelism that gathers keys keeps attention's output twice.
    joins_chunks: bool = False
    # Expert layers keep the returned rows and a float32 input of the router.
    rows_twice: bool = False
    # DDP's buckets are copies (gradient_as_bucket_view=False).
    bucket_copy: bool = True
    # A kernel accumulates gradients, and autograd gets 16-bit stand-ins.
    dummy_gradients: bool = False
    # ZeRO-3 keeps 16-bit shards next to the float32 shards.
    sharded_copy: bool = False
    # Ulysses keeps attention's output before its all-to-all too.
    ulysses_copy: bool = False
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
