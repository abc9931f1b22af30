"""The claims that many lessons make, a call each: it measures, and adds a check to the report."""

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state

from legacy_common import hf
from legacy_common.job import Job
from legacy_common.lab.traffic import TrafficCounter
from legacy_common.models import Transformer, local
from legacy_common.report import Report
from legacy_common.runtime import gather, seed_everything

# Relative. fp32 sums in another order differ in the last bits; bfloat16 keeps 8 bits.
TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 5e-2}


def tolerance_of(args) -> float:
    """Return the relative tolerance of a loss and a gradient in the run's precision."""
    return TOLERANCE[args.precision]


def gradient_of_one_process(model: nn.Module, losses: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a plain model's gradient of the sum of `losses`, graph by graph, as one vector."""
    weights = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(weight) for weight in weights]
    for loss in losses:
        for sum_, part in zip(total, torch.autograd.grad(loss, weights), strict=True):
            sum_ += part
    return flat(total)


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return tensors as one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def same_gradient(
    report: Report, model: nn.Module, expected: torch.Tensor, tolerance: float,
    name: str = "gradient: relative error against one process", source: str = "one process",
) -> None:  # fmt: skip
    """Check every rank's `.grad` against a vector; the error is relative to the largest number."""
    own = flat(local(p.grad) for p in model.parameters() if p.requires_grad)
    error = (own - expected).abs().max() / expected.abs().max()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)  # the worst rank counts
    report.check(name, error.item(), 0, tolerance, source)


def same_losses(
    report: Report, losses: torch.Tensor, expected: torch.Tensor, tolerance: float,
    name: str = "largest error of a loss", source: str = "one process",
) -> None:  # fmt: skip
    """Check the losses of some steps against those of a reference. Shapes: (steps,) both."""
    report.check(name, (losses - expected).abs().max().item(), 0, tolerance, source)


@torch.no_grad()
def count_equal_in_files(weights: dict[str, torch.Tensor], folder, group) -> int:
    """Return how many weights, sharded or not, have these values in safetensors files.

    A collective: each rank reads again what it holds, and needs memory for that.
    """
    read = {name: torch.full_like(weight, torch.nan) for name, weight in weights.items()}

    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), process_group=group)

    own = {name: torch.equal(local(read[name]), local(weights[name])) for name in weights}
    ranks = gather(own, group)
    return sum(all(rank.get(name, True) for rank in ranks) for name in set().union(*ranks))


def same_as_files(report, model: nn.Module, config, folder, group, kind="") -> None:
    """Check that each rank's shards have the values of a folder's files, weight by weight."""
    named = hf.to_hf(dcp_state.get_model_state_dict(model), config)
    equal = count_equal_in_files(named, folder, group)
    with torch.device("meta"):
        weights = len(list(Transformer(config).parameters()))  # tied ones once
    report.check(f"{kind}weights equal in the files", equal, weights, 0, "the sharded model")


def whole_model(job: Job, config) -> nn.Module:
    """Return the whole model as a run begins: drawn, or as transformers has it of --init-from."""
    model = first_model(job, config)
    return documents_alone(model, config)


def first_model(job: Job, config) -> nn.Module:
    args = job.args
    seed_everything(args.seed)
    if not getattr(args, "init_from", None) or job.found:
        return Transformer(config).to(job.device)
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    theirs = LlamaForCausalLM.from_pretrained(args.init_from, dtype=torch.float32).to(job.device)
    forward = theirs.forward
    theirs.forward = lambda tokens: forward(input_ids=tokens).logits
    named = hf.from_hf(dict(theirs.named_parameters()), config)
    if config.tied_embeddings:
        del named["head.weight"]  # as in ours, it is there once
    theirs.named_parameters = lambda **_: named.items()
    return theirs


def documents_alone(model: nn.Module, config) -> nn.Module:
    """Have a whole model read each document of --document-attention by itself: it needs no mask."""
    end, forward = config.document_end, model.forward

    def each_alone(tokens: torch.Tensor) -> torch.Tensor:
        rows = []
        for row in tokens:
            after = (row == end).nonzero().flatten().cpu() + 1
            parts = [part for part in row.tensor_split(after) if len(part)]
            rows.append(torch.cat([forward(part[None]) for part in parts], dim=1))
        return torch.cat(rows)

    if end is not None:
        model.forward = each_alone
    return model


def same_weights(report: Report, model: nn.Module) -> None:
    """Check that all ranks hold the same weights, bit by bit, by a fingerprint."""
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.detach().cpu().flatten().view(torch.uint8).numpy())
    fingerprints = len(set(gather(digest.hexdigest())))
    report.check("distinct sets of weights over all ranks", fingerprints, 1, 0, "equal replicas")


def one_gradient_sent(
    report: Report, model: nn.Module, counter: TrafficCounter, other: int = 0,
    name: str = "bytes all-reduced per step", share: float = 1.0,
) -> None:  # fmt: skip
    """Check that a step all-reduced each gradient once, a `share` of its bytes, and `other`."""
    gradient = int(share * sum(p.nbytes for p in model.parameters() if p.requires_grad))
    source = "one gradient per weight" + " and what the loop sums" * bool(other)
    report.check(name, counter.nbytes["all_reduce"], gradient + other, 0, source)
