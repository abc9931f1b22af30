"""Whether transformers computes from an exported folder what our model does."""

import argparse
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from legacy_common.report import Report
from legacy_common.runtime import from_rank0


def size_of(text: str) -> int:
    """Turn "5GB" into bytes, for argparse. Units: KB, MB, GB, decimal as transformers has them."""
    size = re.fullmatch(r"(\d*\.?\d+)([KMG])B", text)
    size_bytes = int(float(size[1]) * 1000 ** (1 + "KMG".index(size[2]))) if size else 0
    if not size_bytes:
        raise argparse.ArgumentTypeError(f"{text!r} must be a size like 500KB, 200MB or 5GB")
    return size_bytes


@torch.no_grad()
def check_logits(
    report: Report, model: nn.Module, folder: Path, tokens: torch.Tensor, group: dist.ProcessGroup
) -> None:
    """Check that transformers computes from a folder what our sharded model does. A collective.

    Rank 0 holds transformers' whole model in float32: for models that fit. Shapes: tokens (B, T),
    the same on every rank.
    """
    ours = model(tokens)
    seen = None
    if report.world.is_rank0:
        from transformers import LlamaForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        options = {"dtype": torch.float32, "local_files_only": True, "output_loading_info": True}
        theirs, loading = LlamaForCausalLM.from_pretrained(folder, **options)
        drift = (theirs.to(tokens.device)(tokens).logits - ours).abs().max().item()
        seen = drift, sum(len(names) for names in loading.values())
    drift, strange = from_rank0(seen, group)
    report.check("largest difference of a logit", drift, 0, 1e-5, "transformers")
    report.check("weights missing or not expected", strange, 0, 0, "transformers")
