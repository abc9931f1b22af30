"""Build ZeRO stages 1 and 2 from two collectives, and hold them against DeepSpeed's.

    CPU   torchrun --standalone --nproc-per-node=2 03-deepspeed/zero_from_scratch.py
    GPU   torchrun --standalone --nproc-per-node=gpu 03-deepspeed/zero_from_scratch.py

Look for: the losses and weights of DeepSpeed; on each rank moments for 1/N of the weights, and in
stage 2 as little of the gradient, for a reduce-scatter a micro-batch instead of one a step.

Source: Rajbhandari et al., ZeRO (SC 2020), sections 5.1, 5.2 and 7.2.
"""

import argparse
import functools
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import zero
from dist_common import cli, data, measure, models, runtime
from dist_common.models import Transformer
from dist_common.proofs import RING_FACTOR, flat, same_losses
from dist_common.report import Report
from tensor_bytes import live_bytes

CONFIGS = Path(__file__).parent / "configs"
LR = 2e-3

# torch 2.13 gave them these names; until then they were all_gather_into_tensor and so on.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Bucket:
    """Weights that are reduced together: one flat vector, of which each rank updates a part."""

    def __init__(self, weights):
        self.weights, self.missing = weights, len(weights)
        flat = torch.cat([weight.detach().flatten() for weight in weights])
        self.flat = F.pad(flat, (0, -len(flat) % dist.get_world_size()))  # to equal parts
        start = 0
        for weight in weights:  # which become views, and are new when the vector is
            weight.data = self.flat[start : start + weight.numel()].view(weight.shape)
            start += weight.numel()

        # The optimizer is given this part only: so it keeps moments of 1/N of the weights.
        self.part = self.flat.chunk(dist.get_world_size())[dist.get_rank()]

    def reduce(self):
        """Add up all ranks' gradients, each rank its own part, and drop the whole."""
        whole = torch.cat([weight.grad.flatten() for weight in self.weights])
        whole = F.pad(whole, (0, len(self.flat) - len(whole)))
        mean = torch.empty_like(self.part)

        reduce_scatter(mean, whole)

        mean /= dist.get_world_size()
        self.part.grad = mean if self.part.grad is None else self.part.grad + mean
        for weight in self.weights:
            weight.grad = None

    def gather(self):
        """Give every rank the parts that the others have updated."""
        all_gather(self.flat, self.part.clone())

    def count(self, _):
        """Note that one more gradient is there; after the last one, reduce them."""
        self.missing -= 1
        if self.missing == 0:
            self.missing = len(self.weights)
            self.reduce()


class Zero:
    """ZeRO stage 1 or 2 behind the three calls of a DeepSpeed engine."""

    def __init__(self, model, stage, accumulate):
        self.model, self.stage, self.accumulate, self.calls = model, stage, accumulate, 0
        groups = [list(block.parameters()) for block in model.blocks]
        inside = {weight for group in groups for weight in group}
        groups.append([weight for weight in model.parameters() if weight not in inside])
        self.buckets = [Bucket(group) for group in groups]
        if stage == 2:  # in every backward: no rank keeps a gradient that is not its own
            for bucket in self.buckets:
                for weight in bucket.weights:
                    weight.register_post_accumulate_grad_hook(bucket.count)
        parts = [bucket.part for bucket in self.buckets]
        self.optimizer = torch.optim.AdamW(parts, LR, (0.9, 0.95), weight_decay=0.1)

    def __call__(self, tokens):
        return self.model(tokens)

    def backward(self, loss):
        (loss / self.accumulate).backward()

    def step(self):
        self.calls += 1
        if self.calls % self.accumulate:
            return
        if self.stage == 1:  # whole gradients have been added up until here
            for bucket in self.buckets:
                bucket.reduce()

        self.optimizer.step()

        self.optimizer.zero_grad()
        for bucket in self.buckets:
            bucket.gather()


def start_engine(model, config):
    """Hand the model to DeepSpeed."""
    import deepspeed  # not before zero.prepare has said for which device

    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def train(engine, steps):
    """Take steps; return the losses, the bytes held within the last one, and its traffic."""
    losses = []
    for number, micro_batches in enumerate(steps, 1):
        with measure.CollectiveCounter() as counter:
            for place, batch in enumerate(micro_batches):
                loss = loss_of(engine, batch)
                engine.backward(loss)
                losses.append(loss.detach())
                del loss
                if number == len(steps) and place == 0:  # moments and a gradient are there
                    held = live_bytes().total()
                engine.step()
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return losses / dist.get_world_size(), held, counter


def loss_of(model, batch):
    """Return the mean cross-entropy. Shapes: batch is inputs and targets, (B, T) each."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    positive = cli.positive_int
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    add("--micro-batch-size", type=positive, default=4, help="sequences per rank at a time (4)")
    add("--grad-accum-steps", type=positive, default=2, help="micro-batches per step (2)")
    at_least_2 = functools.partial(cli.whole_number, low=2)  # moments come with the first
    add("--max-steps", type=at_least_2, default=5, help="training steps (5)")
    add("--seq-len", type=positive, default=64, help="tokens per sequence (64)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("03-deepspeed/zero_from_scratch.py", args, world, device)
        ranks = world.world_size
        accumulate = args.grad_accum_steps
        size = args.micro_batch_size
        shape = models.preset("tiny", args.seq_len)
        zero.prepare(device)
        count = args.max_steps * accumulate, size * ranks
        text = data.Sequences(data.load_text(), args.seq_len, count[0] * count[1])
        mine = list(data.batches_of(text, *count, world.rank * size, size, device))
        steps = [mine[i : i + accumulate] for i in range(0, len(mine), accumulate)]
        weights = shape.num_parameters()
        report.start(f"{weights:,} weights in float32, {accumulate} micro-batches a step")

        def run(start):
            runtime.seed_everything(args.seed)
            before = live_bytes().total()
            model = Transformer(shape).to(device)
            losses, held, counter = train(start(model), steps)
            return losses, (held - before) / weights, counter, flat(model.parameters())

        rows = []
        for stage in (1, 2):
            asked = argparse.Namespace(**vars(args), lr=LR, precision="32-true")
            asked.deepspeed_config = CONFIGS / f"zero{stage}_config.json"
            config = zero.load_config(asked, world, shape)
            del config["scheduler"]
            config["gradient_clipping"] = 0.0  # without the key, DeepSpeed clips to a norm of 1

            ours = run(lambda model, stage=stage: Zero(model, stage, accumulate))
            theirs = run(lambda model, config=config: start_engine(model, config))

            for way, (losses, held, counter, _) in (("from scratch", ours), ("DeepSpeed", theirs)):
                names = ("_reduce_scatter_base_", "reduce_", "_allgather_base_")
                calls = [str(counter.calls[name]) for name in names]
                rows.append((f"stage {stage} {way}", *calls, f"{held:.2f}", f"{losses[-1]:.6f}"))
            # Bytes of a weight, its gradient and its two moments, in float32.
            right = 4 + 4 / (ranks if stage == 2 else 1) + 8 / ranks
            source = "ZeRO paper, section 5"
            report.check(f"stage {stage}: bytes per weight", ours[1], right, 0.01 * right, source)
            # A call is handed the whole and a part of it; a ring sends all of it but that part.
            handed = sum(ours[2].bytes[n] for n in ("_reduce_scatter_base_", "_allgather_base_"))
            times = (accumulate if stage == 2 else 1) + 1
            right = times * RING_FACTOR["all_gather"](ranks)
            sent = handed * ranks / (ranks + 1) * RING_FACTOR["all_gather"](ranks) / (4 * weights)
            what = f"stage {stage}: models sent per step"
            report.check(what, sent, right, 0.01 * right, "ZeRO paper, section 7.2")
            what = f"stage {stage}: largest difference of a"
            same_losses(report, ours[0], theirs[0], 1e-5, f"{what} loss", "DeepSpeed")
            same_losses(report, ours[3], theirs[3], 1e-4, f"{what} weight", "DeepSpeed")
        headers = ("", "reduce-scatters", "reduces", "all-gathers", "bytes per weight", "last loss")
        report.table(rows, headers)
        report.metrics["final_loss"] = ours[0][-1].item()
        return report.finish(f"loss {ours[0][-1]:.4f} after step {args.max_steps}")


if __name__ == "__main__":
    cli.run(main)
