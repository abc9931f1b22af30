"""Train one model in ZeRO's stages 0 to 3 and in FSDP: who holds what, who sends what.

    CPU   torchrun --standalone --nproc-per-node=2 03-deepspeed/zero_stages.py
    GPU   torchrun --standalone --nproc-per-node=gpu 03-deepspeed/zero_stages.py

Look for: bytes per weight that fall from 16 to 16/N in bf16, as the paper's formulas say; what is
sent, which stages 2 and 3 repeat for each micro-batch; in float32, the losses of one process.

Sources: Rajbhandari et al., ZeRO (SC 2020), sections 3, 5 and 7; Micikevicius et al., Mixed
Precision Training (ICLR 2018), section 3.1: the float32 copy of the weights.
"""

import argparse
import functools
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zero
from dist_common import cli, data, measure, models, runtime
from dist_common.models import Transformer
from dist_common.proofs import RING_FACTOR, same_losses
from dist_common.report import Report, figure
from tensor_bytes import bytes_by_place, live_bytes

CONFIGS = Path(__file__).parent / "configs"
K = 12  # bytes per weight: a float32 copy of it and Adam's two moments
LR = 2e-3


def start_engine(model, config):
    """Hand the model to DeepSpeed: from here on its engine has forward, backward and step."""
    import deepspeed  # not before zero.prepare has said for which device

    engine, *_ = deepspeed.initialize(model=model, config=config)

    return engine


def train(engine, steps):
    """Take steps; return the losses, the bytes held within the last one, and what it sent.

    Shapes: steps is a list of steps, each a list of micro-batches.
    """
    losses = []
    for number, micro_batches in enumerate(steps, 1):
        with measure.CollectiveCounter() as counter:
            for place, batch in enumerate(micro_batches):
                loss = loss_of(engine, batch)
                engine.backward(loss)
                losses.append(loss.detach())
                del loss  # and with it what forward kept
                if number == len(steps) and place == 0:  # moments and a gradient are there
                    held = live_bytes().total()

                engine.step()  # acts after a step's last micro-batch: DeepSpeed counts them

    return torch.stack(losses), held, counter


class Alone:
    """Plain PyTorch behind an engine's three calls: one process, which sees all data."""

    def __init__(self, model, accumulate):
        self.model, self.accumulate, self.calls = model, accumulate, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), LR, (0.9, 0.95), weight_decay=0.1)

    def __call__(self, tokens):
        return self.model(tokens)

    def backward(self, loss):
        (loss / self.accumulate).backward()

    def step(self):
        self.calls += 1
        if self.calls % self.accumulate == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


def fsdp(model, accumulate, precision):
    """Shard with FSDP2, the same calls: its weights are float32, and cast where they are used."""
    policy = MixedPrecisionPolicy()
    if precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)
    return Alone(model, accumulate)


def loss_of(model, batch):
    """Return the mean cross-entropy. Shapes: batch is inputs and targets, (B, T) each."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def expected_bytes(stage, accumulate, ranks):
    """Return what a rank holds for each weight in bf16, in bytes: 2 + 2 + K, or 1/N of its parts.

    Source: ZeRO paper, section 5 and figure 1. With a single micro-batch, stage 1 too has reduced
    its gradient by the time that we look.
    """
    weight, gradient, optimizer = 2, 2, K
    if stage >= 1:
        optimizer /= ranks
    if stage >= 2 or (stage == 1 and accumulate == 1):
        gradient /= ranks
    if stage >= 3:
        weight /= ranks
    return weight + gradient + optimizer


def expected_sent(stage, accumulate, ranks):
    """Return what a rank sends per step, in models: all weights, 2 bytes each.

    A reduction costs one model in a ring, and so does a gathering. Stage 1 reduces once a step,
    stages 2 and 3 once a micro-batch; stage 3 gathers for forward and again for backward.
    Source: ZeRO paper, section 7, which has one micro-batch: 2, 2, 2 and 3.
    """
    times = {0: 2, 1: 1 + 1, 2: accumulate + 1, 3: 3 * accumulate}[stage]
    return times * RING_FACTOR["all_gather"](ranks)


def models_sent(counter, model_bytes, ranks):
    """Return the same from the collectives that were counted, as if sent in rings."""
    handed = counter.bytes
    # These are handed the whole and a part of it, 1 + 1/N wholes.
    whole = (handed["_allgather_base_"] + handed["_reduce_scatter_base_"]) * ranks / (ranks + 1)
    whole += handed["reduce_"]  # to one owner: each rank sends on what it has summed, but the owner
    sent = whole * RING_FACTOR["all_gather"](ranks)
    return (sent + handed["allreduce_"] * RING_FACTOR["all_reduce"](ranks)) / model_bytes


def weight_bytes(model):
    """Return the bytes of weights that this rank holds; stage 3 keeps its part in `ds_tensor`."""
    weights = [getattr(weight, "ds_tensor", weight) for weight in model.parameters()]
    weights = [getattr(weight, "to_local", lambda own=weight: own)() for weight in weights]
    return bytes_by_place(weights).total()


def plot_bars(path, names, parts, expected, title):
    """Draw a bar of stacked parts for each name, and a line where its height should be, as PNG.

    Shapes: each part and `expected` are as long as `names`.
    """
    with figure(path, figsize=(9, 3.4)) as axes:
        floor = [0.0] * len(names)
        for part, heights in parts.items():
            axes.bar(names, heights, 0.6, bottom=floor, label=part)
            floor = [below + height for below, height in zip(floor, heights, strict=True)]
        places = range(len(names))
        axes.hlines(
            expected, [p - 0.4 for p in places], [p + 0.4 for p in places],
            colors="black", linestyles="dashed", label="expected",
        )  # fmt: skip
        for place, height in zip(places, floor, strict=True):
            axes.text(place, height, f"{height:.2f}", ha="center", va="bottom", fontsize=9)
        axes.set(title=title, ylabel="bytes per weight")
        axes.set_ylim(0, 1.15 * max(*floor, *expected))
        axes.legend()
        axes.grid(axis="y", alpha=0.3)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    positive = cli.positive_int
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    add("--stages", type=int, nargs="+", choices=range(4), default=[0, 1, 2, 3], help="(all)")
    add("--micro-batch-size", type=positive, default=4, help="sequences per rank at a time (4)")
    add("--grad-accum-steps", type=positive, default=2, help="micro-batches per step (2)")
    at_least_2 = functools.partial(cli.whole_number, low=2)  # moments come with the first
    add("--max-steps", type=at_least_2, default=3, help="training steps (3)")
    add("--seq-len", type=positive, default=64, help="tokens per sequence (64)")
    return parser.parse_args()


def load_configs(args, world, shape):
    """Return the config of each stage, in bf16 and in float32."""
    configs = {}
    for stage in args.stages:
        for precision in ("bf16-mixed", "32-true"):
            asked = argparse.Namespace(**vars(args), lr=LR, precision=precision)
            asked.deepspeed_config = CONFIGS / f"zero{stage}_config.json"
            config = configs[stage, precision] = zero.load_config(asked, world, shape)
            # What is compared is the stages: a constant rate, and gradients as they are. Without
            # the key, DeepSpeed would clip them to a norm of 1.
            del config["scheduler"]
            config["gradient_clipping"] = 0.0
    return configs


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("03-deepspeed/zero_stages.py", args, world, device)
        ranks = world.world_size
        accumulate = args.grad_accum_steps
        shape = models.preset("tiny", args.seq_len)
        zero.prepare(device)
        configs = load_configs(args, world, shape)
        together = args.micro_batch_size * ranks
        count = args.max_steps * accumulate, together
        text = data.Sequences(data.load_text(), args.seq_len, count[0] * together)

        def steps(first, size):
            batches = list(data.batches_of(text, *count, first, size, device))
            return [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]

        def build():
            runtime.seed_everything(args.seed)
            return Transformer(shape).to(device)

        weights = shape.num_parameters()
        report.start(
            f"{weights:,} weights; global batch {together * accumulate} = {args.micro_batch_size} "
            f"per rank x {accumulate} micro-batches x {ranks} ranks",
        )
        alone, *_ = train(Alone(build(), accumulate), steps(0, together))
        mine = steps(world.rank * args.micro_batch_size, args.micro_batch_size)
        rows, bars = [], []
        for stage in (*args.stages, "FSDP"):
            for precision in ("32-true", "bf16-mixed"):
                before = live_bytes().total()
                model = build()
                if stage == "FSDP":
                    engine = fsdp(model, accumulate, precision)
                else:
                    engine = start_engine(model, configs[stage, precision])
                losses, held, counter = train(engine, mine)
                if precision == "32-true":
                    dist.all_reduce(losses)
                    del engine, model
                    means = losses / ranks
            # Of the rank that holds most: shards of odd sizes differ by a few weights.
            own = torch.tensor([held - before, weight_bytes(model)], device=device)
            dist.all_reduce(own, op=dist.ReduceOp.MAX)
            held, in_weights = (own / weights).tolist()
            sent = models_sent(counter, 2 * weights, ranks)
            name, right = str(stage), 16 / ranks
            if stage != "FSDP":
                name, right = f"stage {stage}", expected_bytes(stage, accumulate, ranks)
            source = "ZeRO paper, section 5"
            report.check(f"{name}: bytes per weight", held, right, 0.02 * right, source)
            if stage != "FSDP":
                formula = expected_sent(stage, accumulate, ranks)
                what = f"{name}: models sent per step"
                report.check(what, sent, formula, 0.02 * formula, "ZeRO paper, section 7")
            same_losses(report, means, alone, 1e-5, f"{name}: largest error of a loss")
            rows.append((name, f"{in_weights:.2f}", f"{held - in_weights:.2f}", f"{held:.2f}",
                         f"{right:.2f}", f"{sent:.2f}"))  # fmt: skip
            bars.append((in_weights, held - in_weights, right))
            report.metrics[f"bytes_per_weight_{name}"] = held
            del engine, model
        headers = ("", "weights", "the rest", "bytes per weight", "by formula", "models sent")
        report.table(rows, headers)
        if report.output and world.is_rank0:
            *parts, expected = zip(*bars, strict=True)
            kinds = dict(zip(("weights", "gradients and optimizer state"), parts, strict=True))
            names = [row[0] for row in rows]
            title = f"Held by each of {ranks} ranks in bf16"
            plot_bars(report.output / "stages.png", names, kinds, expected, title)
        return report.finish(f"loss {alone[-1].item():.4f} at the end")


if __name__ == "__main__":
    cli.run(main)
