"""Train one model in ZeRO's stages 0 to 3: what does each rank hold, and what does it send?

    CPU   torchrun --standalone --nproc-per-node=2 03-deepspeed/zero_stages.py
    GPU   torchrun --standalone --nproc-per-node=gpu 03-deepspeed/zero_stages.py

Look for: bytes per weight that fall from 16 to 16/N in bf16; stages 2 and 3 that send more with
every micro-batch, stages 0 and 1 that do not; in float32, the losses of one process in every stage.

Sources: Rajbhandari et al., ZeRO (SC 2020), sections 3, 5 and 7; Micikevicius et al., Mixed
Precision Training (ICLR 2018), section 3.1: the float32 copy of the weights.
"""

import argparse
import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from deepspeed_parts import setup
from deepspeed_parts import zero_stages as part
from deepspeed_parts.tensor_bytes import bytes_by_kind, live_bytes
from deepspeed_parts.zero_stages import OneProcess, shard_with_fsdp
from legacy_common import cli, data, models, runtime
from legacy_common.lab import traffic
from legacy_common.report import Report

LR = 2e-3
PRECISIONS = ("32-true", "bf16-mixed")


def config_of(stage, precision, args, dim):
    """Return a DeepSpeed config: this dict, or the same as a JSON file."""
    zero = {
        "stage": stage,  # 0, 1, 2 or 3: all that differs from row to row
        "reduce_bucket_size": dim * dim,  # elements
        "stage3_prefetch_bucket_size": int(0.9 * dim * dim),
        "stage3_param_persistence_threshold": 10 * dim,  # smaller weights stay whole
    }
    if stage in (1, 2):  # reduce a piece to its owner: the default all-reduces, twice the bytes
        zero["use_multi_rank_bucket_allreduce"] = args.all_reduce_buckets
    if stage == 3:  # gather for forward and again for backward, as the paper counts; see the page
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    adam = {"lr": LR, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.grad_accum_steps,
        "bf16": {"enabled": precision == "bf16-mixed"},
        "optimizer": {"type": "AdamW", "params": adam},
        "gradient_clipping": 0.0,  # without the key, DeepSpeed clips to a norm of 1
        "zero_optimization": zero,
    }


def start_engine(model, config):
    """Hand the model to DeepSpeed; nothing else in the training loop depends on the stage."""
    import deepspeed  # only after setup.prepare has said for which device

    engine, *_ = deepspeed.initialize(model=model, config=config)

    return engine


def train_step(engine, micro_batches, look=None):
    """Take one step; return the losses of its micro-batches.

    `look` is called in the middle: Adam's moments and the first micro-batch's gradient are there.
    """
    losses = []
    for batch in micro_batches:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        losses.append(loss.detach())
        del loss  # and with it what forward kept
        if look and len(losses) == 1:
            look()
        engine.step()  # updates after a step's last micro-batch: DeepSpeed counts them
    return losses


def loss_of(model, batch):
    """Return the mean cross-entropy. Shapes: batch is inputs and targets, (B, T) each."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


@dataclass
class Seen:
    """What a run did: losses of all micro-batches, bytes by kind, collectives of the last step."""

    losses: torch.Tensor
    held: dict[str, int]
    counter: traffic.TrafficCounter


def train(start, model, steps, before=None):
    """Train in `steps`; watch the last one. Bytes held are those beyond `before`, if given."""
    engine, held = start(model), {}
    losses = [loss for step in steps[:-1] for loss in train_step(engine, step)]

    def look():
        kinds = bytes_by_kind(model, engine.optimizer, live_bytes() - before)
        names = ("weights", "optimizer state", "gradients")
        held.update((name, own.total()) for name, own in zip(names, kinds, strict=True))

    with traffic.TrafficCounter() as counter:
        losses += train_step(engine, steps[-1], look if before is not None else None)
    return Seen(torch.stack(losses), held, counter)


def batches_of(args, first, size, global_size, device):
    """Return each step's micro-batches: sequences first to first + size of each global one."""
    m, count = args.grad_accum_steps, args.max_steps * args.grad_accum_steps
    text = data.Sequences(data.load_text(), args.seq_len, count * global_size)
    batches = list(data.batches_of(text, count, global_size, first, size, device))
    return [batches[start : start + m] for start in range(0, count, m)]


def ways_of(args, dim):
    """Return how the engine of each row starts: name -> {precision: function of a model}."""
    ways = {}
    for precision in PRECISIONS:
        for stage in args.stages:
            config = config_of(stage, precision, args, dim)
            start = functools.partial(start_engine, config=config)
            ways.setdefault(f"stage {stage}", {})[precision] = start
        options = {"lr": LR, "accumulate": args.grad_accum_steps, "bf16": precision != "32-true"}
        ways.setdefault("FSDP", {})[precision] = functools.partial(shard_with_fsdp, **options)
    return ways


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
    default = "in stages 1 and 2, as by DeepSpeed's default: use_multi_rank_bucket_allreduce true"
    add("--all-reduce-buckets", action="store_true", help=default)
    add("--seq-len", type=positive, default=64, help="tokens per sequence (64)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("03-deepspeed/zero_stages.py", args, world, device)
        accumulate = args.grad_accum_steps
        size = args.micro_batch_size
        together = size * world.world_size
        shape = models.preset("tiny", args.seq_len)
        setup.prepare(device)
        own = batches_of(args, world.rank * size, size, together, device)
        report.start(
            f"{shape.num_parameters():,} weights; global batch {together * accumulate} = {size} "
            f"per rank x {accumulate} micro-batches x {world.world_size} ranks",
        )

        def build():
            runtime.seed_everything(args.seed)
            return models.Transformer(shape).to(device)

        one_process = functools.partial(OneProcess, lr=LR, accumulate=accumulate)
        alone = train(one_process, build(), batches_of(args, 0, together, together, device)).losses
        rows = {}
        for name, starts in ways_of(args, shape.dim).items():
            runs = {"32-true": train(starts["32-true"], build(), own)}
            before = live_bytes()
            runs["bf16-mixed"] = train(starts["bf16-mixed"], build(), own, before)
            rows[name] = part.compare(report, name, runs, alone, accumulate, shape)
        part.print_table(report, rows)
        return report.finish(f"loss {alone[-1].item():.4f} at the end")


if __name__ == "__main__":
    cli.run(main)
