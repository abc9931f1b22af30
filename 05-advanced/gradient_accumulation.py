"""Accumulate gradients: one step in many micro-batches, like one large batch.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/gradient_accumulation.py
    GPU   torchrun --standalone --nproc-per-node=4 05-advanced/gradient_accumulation.py

Look for: the gradient of one process, however the batch is divided; one all-reduce per
step with no_sync; how wrong a mean of means is when sequences have different lengths.

Sources: Li et al., PyTorch Distributed (VLDB 2020), section 3.2.4; Hugging Face, Fixing
Gradient Accumulation (October 2024).
"""

import contextlib
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import default_collate

from dist_common import check, cli, data, runtime
from dist_common.model import PRESETS, build_transformer
from dist_common.report import Report

CONFIG = replace(PRESETS["tiny"], num_layers=2)
SEQ_LEN = 32
GLOBAL_BATCH = 24  # sequences of a step, on all ranks
MICRO_BATCH = 2  # sequences of a rank at a time, in the second and third table
TOLERANCE = 1e-5  # float32 sums in another order differ in the last bits


def summed_loss(model, inputs, targets):
    """Return the cross-entropy summed over counted tokens. Shapes: (B, T) each."""
    logits = model(inputs)  # (B, T, V)
    return F.cross_entropy(
        logits.flatten(0, 1),
        targets.flatten(),
        ignore_index=data.IGNORED,
        reduction="sum",
    )


def accumulate(model, micro_batches, factors):
    """Add up the micro-batches' gradients; all-reduce the sum, in the last backward.

    Each micro-batch's summed loss is multiplied by its factor.
    """
    for number, (inputs, targets) in enumerate(micro_batches, 1):
        is_last = number == len(micro_batches)
        # Around forward as well: there DDP decides whether backward will all-reduce.
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = factors[number - 1] * summed_loss(model, inputs, targets)
            loss.backward()


# Other ways to send: the same factors, another place for no_sync.


def send_each(model, micro_batches, factors):
    """Without no_sync: right, but every backward all-reduces."""
    for (inputs, targets), factor in zip(micro_batches, factors, strict=True):
        loss = factor * summed_loss(model, inputs, targets)
        loss.backward()


def forward_outside(model, micro_batches, factors):
    """With no_sync around backward only: right, but no_sync has no effect."""
    for number, (inputs, targets) in enumerate(micro_batches, 1):
        loss = factors[number - 1] * summed_loss(model, inputs, targets)
        is_last = number == len(micro_batches)
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss.backward()


def forward_inside(model, micro_batches, factors):
    """With no_sync around every forward: wrong, each rank keeps its own gradient."""
    for (inputs, targets), factor in zip(micro_batches, factors, strict=True):
        with model.no_sync():
            loss = factor * summed_loss(model, inputs, targets)
        loss.backward()


# Divisors of a summed loss


def count_tokens(targets):
    """Return the number of tokens that the loss counts."""
    return (targets != data.IGNORED).sum()


def mean_of_tokens(micro_batches):
    """Divide by the tokens of all micro-batches and of all ranks."""
    num_tokens = sum(count_tokens(targets) for _, targets in micro_batches)
    dist.all_reduce(num_tokens)
    # DDP averages gradients over ranks, so multiply by the number of ranks.
    return [dist.get_world_size() / num_tokens] * len(micro_batches)


def mean_of_rank_means(micro_batches):
    """Wrong if ranks have different numbers of tokens: every rank weighs the same."""
    num_tokens = sum(count_tokens(targets) for _, targets in micro_batches)
    return [1 / num_tokens] * len(micro_batches)


def mean_of_micro_batch_means(micro_batches):
    """Wrong if micro-batches have different numbers of tokens."""
    counts = [count_tokens(targets) for _, targets in micro_batches]
    return [1 / count / len(counts) for count in counts]


# Measurement


def load_batch(args, device):
    """Return a global batch; 1 to T tokens of each sequence count. Shapes: (B, T)."""
    text = data.Sequences(data.load_text(), SEQ_LEN)
    generator = torch.Generator().manual_seed(args.seed)
    indices = torch.randint(len(text), (GLOBAL_BATCH,), generator=generator)
    inputs, targets = default_collate([text[index] for index in indices.tolist()])
    lengths = torch.randint(1, SEQ_LEN + 1, (GLOBAL_BATCH, 1), generator=generator)
    targets[torch.arange(SEQ_LEN) >= lengths] = data.IGNORED
    return inputs.to(device), targets.to(device)


def divide(batch, size, run):
    """Return this rank's share of a global batch, in micro-batches of `size`."""
    inputs, targets = (part[run.rank :: run.world_size] for part in batch)
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def measure(model, way, micro_batches, factors):
    """Return the gradient as one vector, and the counter of collectives."""
    model.zero_grad()
    with check.CollectiveCounter() as counter:
        way(model, micro_batches, factors)
    return flat_gradient(model), counter


def flat_gradient(model):
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def relative_error(gradient, expected):
    """Return the distance from the right gradient, relative to its norm.

    It is the largest distance of all ranks.
    """
    error = (gradient - expected).norm() / expected.norm()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    return error.item()


def kept_bytes(model, inputs, targets):
    """Return the bytes of the tensors that forward keeps for backward, but weights."""
    weights = {weight.data_ptr() for weight in model.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        summed_loss(model, inputs, targets)
    return sum(tensor.nbytes for tensor in kept.values())


def main():
    args = cli.ArgumentParser(__doc__).parse_args()
    with runtime.init(args.device, args.timeout) as run:
        share = GLOBAL_BATCH // run.world_size
        if share * run.world_size < GLOBAL_BATCH or share % MICRO_BATCH:
            raise cli.UsageError(f"{run.world_size} ranks: start 1, 2, 3, 4, 6 or 12")
        report = Report("05-advanced/gradient_accumulation.py", args, run)
        batch = load_batch(args, run.device)
        alone = build_transformer(CONFIG, args.seed, run.device)
        (summed_loss(alone, *batch) / count_tokens(batch[1])).backward()
        expected = flat_gradient(alone)
        model = build_transformer(CONFIG, args.seed, run.device)
        model = DDP(model, bucket_cap_mb=0.25)  # several buckets for a small model
        summed_loss(model, *batch).backward()  # DDP settles its buckets

        rows, errors, kept = [], [], []
        for size in (n for n in range(1, share + 1) if share % n == 0):
            micro_batches = divide(batch, size, run)
            factors = mean_of_tokens(micro_batches)
            gradient, _ = measure(model, accumulate, micro_batches, factors)
            errors.append(relative_error(gradient, expected))
            kept.append(kept_bytes(alone, *micro_batches[0]))
            layout = f"{size} x {len(micro_batches)} x {run.world_size}"
            rows.append((layout, f"{errors[-1]:.1e}", f"{kept[-1]:,}"))
        headers = ("micro-batch x accumulation x ranks", "gradient error", "bytes kept")
        report.table(rows, headers)

        micro_batches = divide(batch, MICRO_BATCH, run)
        factors = mean_of_tokens(micro_batches)
        ways = {
            "accumulate": accumulate,
            "send_each": send_each,
            "forward_outside": forward_outside,
            "forward_inside": forward_inside,
        }
        rows, counters = [], {}
        for name, way in ways.items():
            gradient, counters[name] = measure(model, way, micro_batches, factors)
            counter = counters[name]
            calls, sent = (sum(c.values()) for c in (counter.calls, counter.bytes_sent))
            error = relative_error(gradient, expected)
            rows.append((name, calls, f"{sent:,.0f}", f"{error:.1e}"))
        report.table(rows, ("way", "all-reduces", "bytes sent", "gradient error"))

        full = batch[0], batch[0].roll(-1, dims=1)  # every token counts
        alone.zero_grad()
        (summed_loss(alone, *full) / full[1].numel()).backward()
        rows = []
        for divide_by in (
            mean_of_tokens,
            mean_of_rank_means,
            mean_of_micro_batch_means,
        ):
            cells = []
            for tokens, reference in ((full, flat_gradient(alone)), (batch, expected)):
                parts = divide(tokens, MICRO_BATCH, run)
                gradient, _ = measure(model, accumulate, parts, divide_by(parts))
                cells.append(f"{relative_error(gradient, reference):.1%}")
            rows.append((divide_by.__name__, *cells))
        report.table(rows, ("the loss is a", "equal lengths", "1 to T tokens"))

        report.check(
            "gradient: relative error, every division",
            torch.tensor(errors).max().item(),
            0,
            TOLERANCE,
        )
        once, each = (
            counters[name].calls["all_reduce"] for name in ("accumulate", "send_each")
        )
        report.check("all-reduces without no_sync", each, once * len(micro_batches), 0)
        ring = 2 * (run.world_size - 1) / run.world_size  # an all-reduce sends so much
        sent = round(counters["accumulate"].bytes_sent["all_reduce"])
        expected_bytes = round(ring * 4 * CONFIG.num_parameters())
        report.check("bytes sent with no_sync", sent, expected_bytes, 0)
        report.check(
            "largest / smallest bytes kept", kept[-1] / kept[0], share, 0.02 * share
        )
        return report.finish(
            "every division of the batch gives the gradient of one process"
        )


if __name__ == "__main__":
    cli.run(main)
