"""Accumulate gradients: one step in many micro-batches, with the result of one large batch.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/gradient_accumulation.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/gradient_accumulation.py

Look for: the same losses and weights in every row of the first table; one all-reduce of each bucket
per step under no_sync; how wrong a gradient is when means are averaged instead of tokens; what an
epoch's last, smaller step must be divided by.

Sources: Li et al., PyTorch Distributed (VLDB 2020), section 3.2.4; Hugging Face, Fixing Gradient
Accumulation (October 2024).
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F

from advanced_parts import gradient_accumulation as part
from legacy_common import cli, data, runtime
from legacy_common.report import Report


def summed_loss(model, inputs, targets):
    """Return the cross-entropy, summed over the tokens that count. Shapes: (B, T) both."""
    logits = model(inputs)  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def accumulate(model, micro_batches, factors):
    """Add up micro-batches' gradients in `.grad`; the last backward all-reduces the sum.

    A summed loss is multiplied by its factor. Return this rank's sum of these products.
    """
    total = 0.0
    for number, (inputs, targets) in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        # Around forward too: there DDP decides whether the backward that follows all-reduces.
        with contextlib.nullcontext() if last else model.no_sync():
            loss = factors[number] * summed_loss(model, inputs, targets)
            loss.backward()
        total += loss.detach()
    return total


def train(model, optimizer, steps):
    """Take one optimizer step for each list of micro-batches; return the losses. Shape: (steps,)"""
    losses = []
    for micro_batches in steps:
        losses.append(accumulate(model, micro_batches, by_tokens(micro_batches)))
        optimizer.step()
        optimizer.zero_grad()
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return losses / dist.get_world_size()


# Factors: what each micro-batch's summed loss is multiplied by.


def counted(targets):
    """Return how many tokens of a micro-batch the loss counts."""
    return (targets != data.IGNORED).sum()


def by_tokens(micro_batches):
    """Divide by all tokens of the step: of every micro-batch and of every rank."""
    tokens = sum(counted(targets) for _, targets in micro_batches)

    dist.all_reduce(tokens)

    # DDP divides the sum over ranks by their number, and this factor undoes that.
    return [dist.get_world_size() / tokens] * len(micro_batches)


def mean_of_means(micro_batches):
    """Wrong for micro-batches of different lengths: each counts alike, whatever it holds."""
    return [1 / counted(targets) / len(micro_batches) for _, targets in micro_batches]


def mean_of_ranks(micro_batches):
    """Wrong for ranks with different numbers of tokens: each rank counts alike."""
    tokens = sum(counted(targets) for _, targets in micro_batches)
    return [1 / tokens] * len(micro_batches)


def sum_of_means(micro_batches):
    """Wrong: the division by the number of micro-batches is forgotten."""
    return [1 / counted(targets) for _, targets in micro_batches]


# The ways to send: the same factors, other calls of no_sync.


def send_each(model, micro_batches, factors):
    """Without no_sync: right, but every backward all-reduces."""
    for number, (inputs, targets) in enumerate(micro_batches):
        loss = factors[number] * summed_loss(model, inputs, targets)
        loss.backward()


def forward_outside(model, micro_batches, factors):
    """With no_sync around backward alone: right, and no_sync does nothing."""
    for number, (inputs, targets) in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        loss = factors[number] * summed_loss(model, inputs, targets)
        with contextlib.nullcontext() if last else model.no_sync():
            loss.backward()


def forward_inside(model, micro_batches, factors):
    """With no_sync around every forward: wrong, each rank keeps its own gradient."""
    for number, (inputs, targets) in enumerate(micro_batches):
        with model.no_sync():
            loss = factors[number] * summed_loss(model, inputs, targets)
        loss.backward()


# The end of an epoch.


def carry_over(model, optimizer, epochs, steps):
    """Wrong: micro-batches that fill no step stay in `.grad`, and join the next epoch's first."""
    for micro_batches in epochs:
        for number, (inputs, targets) in enumerate(micro_batches, 1):
            full = number % steps == 0
            with contextlib.nullcontext() if full else model.no_sync():
                (summed_loss(model, inputs, targets) / counted(targets) / steps).backward()
            if full:
                optimizer.step()
                optimizer.zero_grad()


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, positive = parser.add_argument, cli.positive_int
    add("--global-batch-size", type=positive, default=24, help="sequences per step (24)")
    add("--micro-batch-size", type=positive, help="sequences per rank at a time, in the counted "
        "steps (what makes up to 4 micro-batches)")  # fmt: skip
    add("--grad-accum-steps", type=positive, help="micro-batches per rank, in the counted steps "
        "(global batch / micro-batch size / ranks)")  # fmt: skip
    add("--link", type=cli.link_rate, default=0, help="emulate a link for the timed steps: "
        "100mbit, 1gbit (none)")  # fmt: skip
    add("--seq-len", type=positive, default=32, help="tokens per sequence at most (32)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("05-advanced/gradient_accumulation.py", args, world, device)
        job = part.Job(report, summed_loss)
        sizes = f"{job.gradient_bytes // 4:,} weights, {job.gradient_bytes:,} bytes of gradient"
        report.start(f"{sizes}; SGD", f"counted steps: {job.identity}")

        gradients = part.check_factorizations(job, train)

        ways = {
            "send each": send_each,
            "no_sync": accumulate,
            "forward outside": forward_outside,
            "forward inside": forward_inside,
        }
        part.check_sending(job, ways, by_tokens)

        weighings = {
            "mean over all tokens": by_tokens,
            "mean of micro-batch means": mean_of_means,
            "mean of rank means": mean_of_ranks,
            "sum of micro-batch means": sum_of_means,
        }
        part.check_weighings(job, accumulate, weighings)
        part.check_optimizers(job, gradients)

        part.check_remainder(job, accumulate, by_tokens, carry_over)

        return report.finish("every factorization takes the same steps as one process")


if __name__ == "__main__":
    cli.run(main)
