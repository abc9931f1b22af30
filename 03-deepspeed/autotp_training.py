"""Train a Hugging Face Llama whose layers DeepSpeed cuts between ranks: AutoTP, beside ZeRO.

    CPU   torchrun --standalone --nproc-per-node=2 03-deepspeed/autotp_training.py
    GPU   torchrun --standalone --nproc-per-node=gpu 03-deepspeed/autotp_training.py --preset 1b

Try 4 ranks: 2 parts of the model, 2 replicas. Look for: the gradient and the losses of one process;
half of each linear layer on a rank; 2 all-reduces per layer in forward, 5 in backward.

Sources: Shoeybi et al., Megatron-LM (2019), section 3; deepspeed.ai, "Automatic Tensor Parallelism
(Training)".
"""

import argparse
import contextlib
import copy
import functools
import io

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from deepspeed_parts import autotp, setup
from deepspeed_parts.plain_engines import OneProcess
from dist_common import cli, data, runtime
from dist_common.cli import UsageError
from dist_common.lab import proofs
from dist_common.lab.traffic import TrafficCounter
from dist_common.models import PRESETS
from dist_common.report import Report

LR = 1e-3


def start_engine(model, args):
    """Hand the model to DeepSpeed, which cuts its layers where they stand."""
    import deepspeed  # only after setup.prepare has said for which device

    config = {
        "tensor_parallel": {"autotp_size": args.tp},
        "zero_optimization": {"stage": args.zero_stage},
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {
            "lr": LR, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True,
        }},
    }  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):  # it would print its plan
        engine, *_ = deepspeed.initialize(model=model, config=config)

    return engine


def loss_of(model, batch):
    """Return the mean cross-entropy. Shapes: batch is inputs and targets, (B, T) each."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).logits.float().flatten(0, 1), targets.flatten())


def train(engine, batches):
    """Train a step on each batch; return the losses. Shape: (steps,)."""
    losses = []
    for batch in batches:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def gradient_of(model, batch):
    """Return the gradient by name, and the collectives of forward and of backward.

    By torch.autograd.grad: nothing is reduced over replicas, so what is counted is AutoTP's.
    """
    weights = dict(model.named_parameters())
    with TrafficCounter() as forward:
        loss = loss_of(model, batch)
    with TrafficCounter() as backward:
        gradient = torch.autograd.grad(loss, list(weights.values()))
    return dict(zip(weights, gradient, strict=True)), forward, backward


def bytes_of_part(model, parts):
    """Return by formula the bytes of weights that a rank holds: of each linear layer a part."""
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    return sum(p.nbytes // (parts if id(p) in linear else 1) for p in model.parameters())


def check_calls(report, config, parts, forward, backward):
    """Check the collectives of one forward and one backward.

    Forward sums the output of each layer that is cut by inputs, and gathers the logits; backward
    sums the gradient of the input of each that is cut by outputs: q, k, v, gate, up, and the head.
    """
    several, L = parts > 1, config.num_hidden_layers
    source = "Megatron-LM, section 3"
    sums, gathers = forward.calls["all_reduce"], forward.calls["all_gather"]
    report.check("all-reduces in forward", sums, several * 2 * L, 0, source)
    report.check("all-gathers in forward", gathers, several * 1, 0, source)
    sums = sum(backward.calls.values())
    report.check("all-reduces in backward", sums, several * (5 * L + 1), 0, source)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    positive = cli.positive_int
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    add("--tp", type=positive, default=2, help="ranks that a layer is cut between (2)")
    add("--zero-stage", type=int, choices=range(3), default=1, help="between replicas (1)")
    add("--preset", choices=PRESETS, default="tiny", help="shape of the Llama (tiny)")
    add("--micro-batch-size", type=positive, default=4, help="sequences per replica and step (4)")
    add("--seq-len", type=positive, default=64, help="tokens per sequence (64)")
    add("--max-steps", type=positive, default=4, help="training steps (4)")
    parser.set_defaults(model=None, precision="32-true")
    return parser.parse_args()


def settle(args, world):
    """Return the model's name, its config and the number of replicas. Raises: UsageError."""
    what, config, _ = autotp.examine(args, world, args.tp)
    # AutoTP cuts a tied head and leaves the embedding: two weights, each with half the gradient.
    config.tie_word_embeddings = False
    replicas, rest = divmod(world.world_size, args.tp)
    if rest:
        raise UsageError(f"--tp {args.tp} does not divide {world.world_size} ranks")
    sizes = config.num_key_value_heads, config.intermediate_size, config.vocab_size
    if any(size % args.tp for size in sizes):
        raise UsageError(
            f"--tp {args.tp} must divide {what}'s key-value heads, width and vocabulary: "
            f"{', '.join(map(str, sizes))}"
        )
    if args.seq_len > config.max_position_embeddings:
        raise UsageError(f"--seq-len must be at most {config.max_position_embeddings}")
    return what, config, replicas


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("03-deepspeed/autotp_training.py", args, world, device)
        setup.prepare(device)
        autotp.import_transformers()
        what, config, replicas = settle(args, world)
        replica, part = divmod(world.rank, args.tp)  # ranks of a replica are neighbours
        size = args.micro_batch_size
        text = data.Sequences(data.load_text(), args.seq_len, size * replicas)
        take = functools.partial(data.batches_of, text, args.max_steps, size * replicas)
        own = list(take(replica * size, size, device))  # the same on all ranks of a replica
        model = autotp.load(args, config, torch.float32).to(device)
        report.start(
            f"{what}: {model.num_parameters():,} weights, float32, ZeRO stage {args.zero_stage}",
            f"{world.world_size} ranks = {args.tp} parts x {replicas} replica(s)",
        )
        plain = copy.deepcopy(model)
        whole, *_ = gradient_of(plain, own[0])
        weights = bytes_of_part(plain, args.tp)
        alone = train(OneProcess(plain, LR, 1), take(0, size * replicas, device))

        engine = start_engine(model, args)
        loss_of(engine, own[0])  # the first time, DeepSpeed also compares the ranks' inputs
        parts, forward, backward = gradient_of(engine.module, own[0])
        losses = train(engine, own)

        held = sum(weight.nbytes for weight in engine.module.parameters())
        autotp.check_gradient(report, parts, whole, part)
        dist.all_reduce(losses)
        proofs.same_losses(report, losses / world.world_size, alone, 1e-5)
        report.check("bytes of weights", held, weights, 0, "Megatron-LM, section 3")
        check_calls(report, config, args.tp, forward, backward)
        return report.finish(f"loss {alone[-1].item():.4f} after step {args.max_steps}")


if __name__ == "__main__":
    cli.run(main)
