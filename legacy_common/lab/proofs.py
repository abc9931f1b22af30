"""The claims that many lessons make, a call each: it measures, and adds a check to the report."""

import hashlib
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state

from legacy_common import float8, hf
from legacy_common.data import collate
from legacy_common.job import Job, Step
from legacy_common.lab.traffic import StepProbe, TrafficCounter
from legacy_common.models import Transformer, cut_like, local
from legacy_common.report import Report
from legacy_common.runtime import gather, seed_everything

# Relative. fp32 sums in another order differ in the last bits; bfloat16 keeps 8 bits.
TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 5e-2}
# What lies below float8's smallest number is lost, and where that is depends on a rank's scale.
FLOAT8 = 0.1


def tolerance_of(args) -> float:
    """Return the relative tolerance of a loss and a gradient in the run's precision."""
    return max(TOLERANCE[args.precision], FLOAT8 if getattr(args, "float8", None) else 0.0)


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


def same_as_one_process(
    job: Job, model: nn.Module, alone: nn.Module, items: list, loss_sum: torch.Tensor, tokens
) -> torch.Tensor:
    """Check the loss and each rank's part of the gradient against a whole model, on its own.

    `items` are the global batch's samples, `tokens` those that its mean loss counts, `loss_sum` is
    this rank's part of the summed one. Return the gradient of `alone` as a vector.
    """
    args, report, device = job.args, job.report, job.device
    dtype = torch.bfloat16 if args.precision == "bf16-mixed" else None
    losses = []

    def losses_alone() -> Iterator[torch.Tensor]:
        for start in range(0, len(items), args.micro_batch_size):
            part = items[start : start + args.micro_batch_size]
            inputs, targets = (x.to(device) for x in collate(len(part), args.seq_len, part))
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                logits = alone(inputs).float().flatten(0, 1)
            losses.append(F.cross_entropy(logits, targets.flatten(), reduction="sum") / tokens)
            yield losses[-1]

    gradient = gradient_of_one_process(alone, losses_alone())
    parts = gradient.split([weight.numel() for weight in alone.parameters()])
    whole = dict(zip(dict(alone.named_parameters()), parts, strict=True))
    error = torch.zeros((), device=device)
    for name, weight in [each for each in model.named_parameters() if each[1].requires_grad]:
        assert weight.grad is not None, f"no gradient for {name}"
        right = cut_like(whole[name].view(weight.shape), weight).to(device)
        if right.numel():  # a rank may have no row of a short one
            error = torch.maximum(error, (local(weight.grad).to(device) - right).abs().max())
    dist.all_reduce(error, op=dist.ReduceOp.MAX)  # the worst rank counts
    error /= gradient.abs().max()
    tolerance, source = tolerance_of(args), "one process on the same global batch"
    name = "gradient: relative error against one process"
    report.check(name, error.item(), 0, tolerance, source)
    total = loss_sum.detach().clone()
    dist.all_reduce(total)
    expected = sum(losses).item()
    report.check("loss", (total / tokens).item(), expected, tolerance * expected, source)
    return gradient


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
    if how := getattr(job.args, "float8", None):
        float8.convert(model, how)
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


def proven_steps(
    job: Job, steps: Iterable[Step], model: nn.Module, optimizer: torch.optim.Optimizer,
    before: Callable[[], None], after: Callable[[], None],
) -> Iterator[Step]:  # fmt: skip
    """Yield a template's steps between two proofs, none if the first fails; fill the metrics."""
    before()
    if job.report.failed:
        job.report.say("not trained: mend what fails, or compare no gradient (--parity-steps 0)")
        return
    probe = StepProbe(job.device, job.memory_before)
    probe.attach(model, optimizer)
    yield from probe.watch(steps)
    if not job.losses:  # ended by a proof before any was read
        return
    after()
    every_token_once(job)
    job.report.metrics |= probe.metrics(job.timer)


class SharedSum:
    """Lengths of a hundred million sequences, of which each rank looks up and adds up its part.

    Indexing gives their sum alone, and is a collective. Shapes: (n,) -> ().
    """

    PIECE = 2**20  # sequences looked up at a time

    def __init__(self, lengths, device: torch.device) -> None:
        self.lengths, self.device, self.sum = lengths, device, lengths.sum

    def __getitem__(self, indices: torch.Tensor) -> torch.Tensor:
        own = indices.tensor_split(dist.get_world_size())[dist.get_rank()]
        sums = [int(self.lengths[piece].sum()) for piece in own.split(self.PIECE)]
        total = torch.tensor(sum(sums), device=self.device)
        dist.all_reduce(total)
        return total


def every_token_once(job: Job) -> None:
    """Check that each token up to the sampler's place was trained on, and the test set tested.

    A collective.
    """
    expected = job.sampler.trained(SharedSum(job.train_set.lengths, job.device))
    job.report.check("tokens trained on, from step 1", job.trained_tokens, expected, 0, "each once")
    if job.test_loss is not None:
        tested = int(job.test_set.lengths.sum())
        job.report.check("test tokens counted", job.test_tokens, tested, 0, "each once")
