"""The models and GPUs that published rows name, however they are spelled."""

from __future__ import annotations

import re
from dataclasses import replace

from planner import models
from planner.hardware import GPUS, Gpu, find_gpu
from planner.job import Model

# Shapes that rows name without giving them.
SHAPES = {
    "gpt3-20b": Model(44, 6144, 48, 48, 24576, 51200, gated=False),
    "nemotron-22b": Model(40, 6144, 48, 48, 24576, 256000, gated=False),
    "nemotron-340b": Model(96, 18432, 96, 8, 73728, 256000, gated=False),
    "nemotron-8b": Model(32, 4096, 32, 32, 16384, 256000, gated=False),
    "nemotron-15b": Model(32, 6144, 48, 8, 24576, 256000, gated=False),
    "gpt3-5b": Model(24, 4096, 32, 32, 16384, 51200, gated=False),
    "gpt3-175b": Model(96, 12288, 96, 96, 49152, 51200, gated=False),
    "gpt-neox-20b": Model(44, 6144, 64, 64, 24576, 50432, gated=False),
    "llama-65b": Model(80, 8192, 64, 64, 22016, 32000),
    "codellama-34b": Model(48, 8192, 64, 8, 22016, 32000),
    "qwen2.5-7b": Model(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-14b": Model(48, 5120, 40, 8, 13824, 152064),
    "qwen2.5-32b": Model(64, 5120, 40, 8, 27648, 152064),
    "qwen2.5-72b": Model(80, 8192, 64, 8, 29568, 152064),
    "qwen3-8b": Model(36, 4096, 32, 8, 12288, 151936),
    "qwen3-14b": Model(40, 5120, 40, 8, 17408, 151936),
    "qwen3-32b": Model(64, 5120, 64, 8, 25600, 151936, head_dim=128),
    "qwen3-30b": Model(48, 2048, 32, 4, 768, 151936, head_dim=128, experts=128, top_k=8),
    "qwen3-235b": Model(94, 4096, 64, 4, 1536, 151936, head_dim=128, experts=128, top_k=8),
    "gpt-oss-20b": Model(24, 2880, 64, 8, 2880, 201088, head_dim=64, experts=32, top_k=4),
    "gpt-oss-120b": Model(36, 2880, 64, 8, 2880, 201088, head_dim=64, experts=128, top_k=4),
    "grok-1": Model(64, 6144, 48, 8, 32768, 131072, experts=8, top_k=2),
    "kimi-k2": replace(
        models.MODELS["deepseek-v3"],
        heads=64, kv_heads=64, vocab=163840, experts=384, dense_layers=1,
    ),
}  # fmt: skip
# Other names of a shape: Llama 3.1 and 3.3 have those of 3, the first LLaMA those of 2.
RENAMED = (
    (r"llama3\.[13](?=\d)", "llama3"), (r"llama(?=(7|13)b)", "llama2"), (r"qwen3moe", "qwen3"),
    (r"nemotron4(?=(15|22|340)b)", "nemotron"), (r"deepseekr1", "deepseekv3"),
    (r"gpt(?=175b)", "gpt3"), (r"(mtnlg|megatron|megatronturingnlg)(?=530b)", "gpt"),
)  # fmt: skip
# GPUs that find_gpu does not know: as which one, and what their data sheets have otherwise.
OTHER_GPUS = (
    ("a800", "a100", {"link_gb_s": 200}),
    ("h800", "h100", {"link_gb_s": 200}),
    ("h20(?!0)", "h100", {"bf16": 148, "memory_gib": 96, "hbm_gb_s": 4000}),
    ("(?<!g)b300", "b200", {"memory_gib": 268, "network_gb_s": 100, "family": "blackwell-ultra"}),
    ("a6000", "a100-pcie", {"bf16": 154.8, "memory_gib": 48, "hbm_gb_s": 768}),
    ("a10g", "a100-pcie", {"bf16": 70, "memory_gib": 24, "hbm_gb_s": 600}),
    ("(^|nvidia)l4(?!0)", "l40s", {"bf16": 121, "memory_gib": 24, "hbm_gb_s": 300}),
    ("mi325", "mi300x", {"memory_gib": 256, "hbm_gb_s": 6000}),
    ("mi355", "mi300x", {"bf16": 2516, "memory_gib": 288, "hbm_gb_s": 8000}),
    ("tpuv?4", "tpu-v5p",
     {"bf16": 275, "memory_gib": 32, "hbm_gb_s": 1228, "link_gb_s": 150, "network_gb_s": 37.5}),
    ("v5(e|lite)", "tpu-v5p",
     {"bf16": 197, "memory_gib": 16, "hbm_gb_s": 819, "link_gb_s": 100, "network_gb_s": 25}),
    ("v6e|trillium", "tpu-v5p",
     {"bf16": 918, "memory_gib": 32, "hbm_gb_s": 1638, "link_gb_s": 200, "network_gb_s": 50}),
)  # fmt: skip


def known_model(name: str) -> Model | None:
    """Return the shape that a name means, however it is spelled: `Llama 3.1 8B`."""
    plain = re.sub(r"[^a-z0-9.]", "", name.lower())
    for pattern, known in RENAMED:
        plain = re.sub(pattern, known, plain)
    fitting = []
    for key, model in {**models.MODELS, **SHAPES}.items():
        spelled = re.escape(re.sub(r"[^a-z0-9.]", "", key))
        if re.search(rf"(?<![\d.]){spelled}", plain):  # 671B is no 1B
            fitting.append((len(spelled), model))
    return max(fitting, key=lambda found: found[0])[1] if fitting else None


def known_gpu(name: str, memory_gib: float | None = None) -> Gpu:
    """Return the GPU that a name means: of OTHER_GPUS, else as find_gpu does.

    Raises: ValueError with the known names.
    """
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for pattern, like, own in OTHER_GPUS:
        if re.search(pattern, plain):
            gpu = GPUS[like]
            more = 1.0 if "bf16" not in own else own["bf16"] / gpu.tflops["bf16"]
            tflops = {kind: rate * more for kind, rate in gpu.tflops.items()}
            sheet = {key: value for key, value in own.items() if key != "bf16"}
            return replace(gpu, name=pattern, tflops=tflops, **sheet)
    return find_gpu(name, memory_gib)
