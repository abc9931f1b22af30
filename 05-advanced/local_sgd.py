"""Communicate once in H steps: average the weights, or take DiLoCo's outer step.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/local_sgd.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/local_sgd.py

Look for: the bytes per step, 1/H of DDP's; the test loss after the same samples; the
same weights as one process if H is 1.

Sources: Stich, Local SGD Converges Fast and Communicates Little (2018); Douillard et
al., DiLoCo (2023).
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from dist_common import check, cli, data, runtime
from dist_common.model import Config, build_transformer
from dist_common.report import Report

SEQ_LEN = 64  # T
CONFIG = Config(256, 32, 1, 2, 1, 88, SEQ_LEN)  # V 256, D 32, one block
MICRO_BATCH = 2  # sequences per rank and step
TEST_BATCH = 256  # sequences of the end of the text, which no rank trains on
METHODS = ("alone", "DDP", "averaging", "DiLoCo 0.9", "DiLoCo 0.5")
OUTER_LR = 0.7
INNER_LR = 0.1  # of SGD, in the comparison with one process
# One process's SGD, to compare with H = 1: a pseudo-gradient is INNER_LR x gradient.
ONE_PROCESS = {
    "averaging": {"lr": INNER_LR},
    "DiLoCo 0.9": {"lr": OUTER_LR * INNER_LR, "momentum": 0.9, "nesterov": True},
}


@torch.no_grad()
def average(tensors):
    """Replace each tensor by its mean over all ranks, in one all-reduce."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, mean in zip(tensors, parts, strict=True):
        tensor.copy_(mean.view_as(tensor))


def make_outer(model, momentum):
    """Return DiLoCo's outer optimizer, over a copy of the agreed weights."""
    agreed = [weight.detach().clone() for weight in model.parameters()]
    return torch.optim.SGD(agreed, OUTER_LR, momentum, nesterov=True)


@torch.no_grad()
def outer_step(model, outer):
    """Use the ranks' mean weight change as a pseudo-gradient (DiLoCo)."""
    agreed = outer.param_groups[0]["params"]
    for old, new in zip(agreed, model.parameters(), strict=True):
        old.grad = old - new  # a gradient points away from the step
    average([old.grad for old in agreed])
    outer.step()
    for old, new in zip(agreed, model.parameters(), strict=True):
        new.copy_(old)


def mean_loss(model, batch):
    inputs, targets = batch
    logits = model(inputs)  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(model, inner, batches, every=1, end_round=None):
    """Take a step of the inner optimizer per batch; end a round every H steps."""
    for step, batch in enumerate(batches, 1):
        mean_loss(model, batch).backward()
        inner.step()
        inner.zero_grad()
        if end_round and step % every == 0:
            end_round()


def make_end_round(name, model):
    """Return the function that ends a round of a method, or None."""
    if name == "averaging":
        return partial(average, list(model.parameters()))
    if name.startswith("DiLoCo"):
        outer = make_outer(model, momentum=float(name.split()[1]))
        return partial(outer_step, model, outer)
    return None


def train_method(name, model, batches, every):
    """Train on this rank's batches, with AdamW on each rank."""
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    end_round = make_end_round(name, model)
    train(DDP(model) if name == "DDP" else model, inner, batches, every, end_round)


# Measurement


def draw_batch(text, size, generator, device):
    """Return inputs and targets. Shapes: (B, T) each."""
    starts = torch.randint(len(text) - SEQ_LEN, (size, 1), generator=generator)
    windows = text[starts + torch.arange(SEQ_LEN + 1)].long().to(device)
    return windows[:, :-1], windows[:, 1:]


def flat_weights(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def error_of_short_rounds(name, build, shares, batches):
    """Compare a method with H = 1 and SGD with one process, which has whole batches.

    Returns: the largest distance of a rank's weights, relative to how far they moved.
    """
    model, alone = build(), build()
    start = flat_weights(model)
    inner = torch.optim.SGD(model.parameters(), INNER_LR)
    train(model, inner, shares, 1, make_end_round(name, model))
    train(alone, torch.optim.SGD(alone.parameters(), **ONE_PROCESS[name]), batches)
    expected = flat_weights(alone)
    error = (flat_weights(model) - expected).norm() / (expected - start).norm()
    return max(runtime.gather(error.item()))


def expected_bytes(name, num_weights, every):
    """Return the bytes that a rank sends per micro-batch: one all-reduce in H steps."""
    if name == "alone":
        return 0
    n = dist.get_world_size()
    return 2 * (n - 1) / n * 4 * num_weights / (1 if name == "DDP" else every)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--every", type=cli.positive_int, default=20, help="H, steps per round (20)")
    add("--max-steps", type=cli.positive_int, default=200, help="of training (200)")
    args = parser.parse_args()
    if args.max_steps % args.every:
        raise cli.UsageError(f"--max-steps must be a multiple of --every {args.every}")
    return args


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        report = Report("05-advanced/local_sgd.py", args, run)
        text = torch.from_numpy(data.load_text().copy())
        split = len(text) - len(text) // 20
        generator = torch.Generator().manual_seed(args.seed)
        draw = partial(draw_batch, generator=generator, device=run.device)
        test = draw(text[split:], TEST_BATCH)
        size = MICRO_BATCH * run.world_size
        batches = [draw(text[:split], size) for _ in range(args.max_steps)]
        shares = [
            [part.chunk(run.world_size)[run.rank] for part in batch]
            for batch in batches
        ]
        build = partial(build_transformer, CONFIG, args.seed, run.device)

        rows, losses, wrong = [], {}, 0
        for name in METHODS:
            with check.CollectiveCounter() as counter:
                train_method(name, build(), shares[: args.every], args.every)
            sent = counter.bytes_sent["all_reduce"] / args.every
            formula = expected_bytes(name, CONFIG.num_parameters(), args.every)
            wrong = max(wrong, abs(sent - formula))
            model = build()
            train_method(name, model, shares, args.every)
            with torch.no_grad():
                losses[name] = mean_loss(model, test).item()
            rows.append((name, f"{sent:,.0f}", f"{losses[name]:.3f}"))
        report.table(rows, ("method", "bytes per step", "test loss"))

        for name in ONE_PROCESS:
            error = error_of_short_rounds(name, build, shares[:10], batches[:10])
            report.check(f"{name}, H = 1: error against one process", error, 0, 1e-4)
        report.check("bytes per step: largest difference", wrong, 0, 0.01)
        report.metrics["test_loss"] = losses
        return report.finish("H = 1 equals one process")


if __name__ == "__main__":
    cli.run(main)
