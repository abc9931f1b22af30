"""Send fewer bytes than the gradient has: communication hooks for DDP.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/gradient_compression.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/gradient_compression.py

Look for: the bytes of each method, and its loss after the same steps; top-k with and
without error feedback.

Sources: Stich et al., Sparsified SGD with Memory (2018); Lin et al., Deep Gradient
Compression (ICLR 2018).
"""

import math
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from dist_common import check, cli, data, runtime
from dist_common.report import Report

CONTEXT = 16  # bytes of text that the model reads to predict the next one
MICRO_BATCH = 64  # samples per rank and step
TEST_BATCH = 2000  # samples of the end of the text, which no rank trains on
LR = 0.5  # of SGD
FRACTION = 0.01  # of the numbers of a gradient, which top-k sends
METHODS = ("float32", "bfloat16", "top-k", "top-k, no feedback")


def send_bfloat16(state, bucket):
    """All-reduce the gradient in 2 bytes per number instead of 4."""
    share = bucket.buffer() / dist.get_world_size()  # first: the sum could overflow
    small = share.bfloat16()
    work = dist.all_reduce(small, async_op=True)
    return work.get_future().then(lambda sums: bucket.buffer().copy_(sums.value()[0]))


@dataclass
class TopK:
    """State of `send_top_k`.

    unsent: this rank's residuals. By weight, because DDP moves weights to other buckets
    after its first step.
    """

    feedback: bool
    unsent: dict = field(default_factory=dict)


def send_top_k(state, bucket):
    """Send the largest numbers of each gradient; keep the others for the next step."""
    for weight, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        wanted = gradient.flatten()
        if state.feedback and weight in state.unsent:
            wanted = wanted + state.unsent[weight]
        places = wanted.abs().topk(count_sent(weight)).indices
        state.unsent[weight] = wanted.index_fill(0, places, 0)
        # Each rank chooses other places, so an all-reduce cannot add the values.
        values = gather(wanted[places])
        places = gather(places.int())
        total = torch.zeros_like(wanted).index_add_(0, places, values)
        gradient.copy_(total.view_as(gradient) / dist.get_world_size())
    return finished(bucket.buffer())


def count_sent(weight):
    return math.ceil(FRACTION * weight.numel())


def gather(tensor):
    """Return all ranks' vectors as one. Shapes: (k,) -> (n k,)."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def finished(tensor):
    """Return a future that has its value already: a hook must return a future."""
    devices = [tensor.device] if tensor.is_cuda else None
    future = torch.futures.Future(devices=devices)
    future.set_result(tensor)
    return future


# Measurement


def build_model(seed, device):
    """Return a model of the next byte. Shapes: (B, CONTEXT) int64 -> (B, 256)."""
    torch.manual_seed(seed)
    hidden = nn.Linear(CONTEXT * 32, 256)
    layers = nn.Embedding(256, 32), nn.Flatten(), hidden, nn.ReLU(), nn.Linear(256, 256)
    return nn.Sequential(*layers).to(device)


def draw_batch(text, size, generator, device):
    """Return contexts (B, CONTEXT) and the byte after each (B,)."""
    starts = torch.randint(len(text) - CONTEXT, (size, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)].long().to(device)
    return windows[:, :-1], windows[:, -1]


def mean_loss(model, batch):
    contexts, targets = batch
    return F.cross_entropy(model(contexts), targets)


def use_method(name, model):
    """Return the model in DDP, with the hook of a method, and the hook's state."""
    ddp_model = DDP(model)
    state = None
    if name == "bfloat16":
        ddp_model.register_comm_hook(state, send_bfloat16)
    elif name != "float32":
        state = TopK(feedback=name == "top-k")
        ddp_model.register_comm_hook(state, send_top_k)
    return ddp_model, state


def sum_gradients(model, batches):
    """Add up the batches' gradients at the same weights; return one vector."""
    total = 0
    for batch in batches:
        model.zero_grad()
        mean_loss(model, batch).backward()
        grads = [weight.grad.flatten() for weight in model.parameters()]
        total = total + torch.cat(grads)
    return total


def average_unsent(state, model):
    """Return the mean residual of all ranks as one vector. A collective."""
    unsent = torch.cat([state.unsent[weight] for weight in model.parameters()])
    dist.all_reduce(unsent)
    return unsent / dist.get_world_size()


def relative_error(gradient, expected):
    """Return the distance from a vector relative to its norm."""
    return ((gradient - expected).norm() / expected.norm()).item()


def train(model, batches):
    """Take a step of SGD for each of this rank's batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for batch in batches:
        optimizer.zero_grad()
        mean_loss(model, batch).backward()
        optimizer.step()


def expected_bytes(name, model):
    """Return the bytes that a rank sends in a step."""
    n = dist.get_world_size()
    weights = list(model.parameters())
    if name.startswith("top-k"):  # all-gathers of values and of places, 4 + 4 bytes
        return (n - 1) * 8 * sum(count_sent(weight) for weight in weights)
    num_bytes = 2 if name == "bfloat16" else 4
    return 2 * (n - 1) / n * num_bytes * sum(weight.numel() for weight in weights)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    steps = partial(cli.whole_number, low=3)
    parser.add_argument(
        "--max-steps", type=steps, default=150, help="of training, at least 3 (150)"
    )
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        report = Report("05-advanced/gradient_compression.py", args, run)
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
        build = partial(build_model, args.seed, run.device)
        alone = build()  # one process, three global batches
        expected = sum_gradients(alone, batches[:3])

        rows, errors, losses, wrong = [], {}, {}, 0
        for name in METHODS:
            model = build()
            ddp_model, state = use_method(name, model)
            received = sum_gradients(ddp_model, shares[:2])
            with check.CollectiveCounter() as counter:
                received += sum_gradients(ddp_model, shares[2:3])
            if name == "top-k":
                received += average_unsent(state, model)
            errors[name] = relative_error(received, expected)
            sent = round(counter.bytes_sent.total())
            formula = expected_bytes(name, model)
            wrong = max(wrong, abs(sent - round(formula)))

            ddp_model, _ = use_method(name, build())
            train(ddp_model, shares)
            with torch.no_grad():
                losses[name] = mean_loss(ddp_model.module, test).item()
            rows.append((name, f"{sent:,}", f"{losses[name]:.3f}"))
        report.table(rows, ("method", "bytes sent", "test loss"))

        report.check("bfloat16: gradient error", errors["bfloat16"], 0, 0.01)
        report.check("top-k: error of sent + unsent", errors["top-k"], 0, 1e-5)
        report.check("bytes sent: largest difference from the formula", wrong, 0, 0)
        report.check("bfloat16: test loss", losses["bfloat16"], losses["float32"], 0.05)
        report.metrics["test_loss"] = losses
        return report.finish(
            "with error feedback all of the gradient arrives, some of it late"
        )


if __name__ == "__main__":
    cli.run(main)
