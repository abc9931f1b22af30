"""Fine-tune adapters beside frozen weights of 4 bits (QLoRA) that FSDP shards and gathers as such.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_qlora.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_qlora.py --preset 124m

Needs bitsandbytes. Look for: the parameters and the all-gathers, which are what LoRA left over;
the losses of one process; how far a 4-bit weight is from the one it was made of. Try
`--optimizer adamw8bit`. fsdp_lora.py comes first; LoRA below is its class.
Source: Dettmers et al., QLoRA (NeurIPS 2023), section 3.
"""

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lora_bytes
import lora_checks
import nf4
from dist_common import cli, models, runtime
from dist_common.models import Transformer
from dist_common.report import Report
from lora_layers import (
    gathered,
    layers_of,
    loss_of,
    materialize,
    refuse_large_rank,
    refuse_unfit,
)
from nf4 import NF4_BLOCK, AdamW8bit, decode

WAYS = ("full", "LoRA", "QLoRA", "QLoRA-bf16")  # -bf16: what 4-bit weights are unpacked to


class NF4Linear(nn.Module):
    """A frozen linear layer in 4 bits a weight, and a scale for each block of 64 of them.

    Both are parameters, though nobody trains them: FSDP shards and gathers no buffers.
    """

    def __init__(self, layer):
        super().__init__()
        self.out_features, self.in_features = layer.weight.shape
        device = layer.weight.device
        weights = layer.weight.numel()
        codes = torch.empty(weights // 2, 1, dtype=torch.uint8, device=device)
        scales = torch.empty(-(-weights // NF4_BLOCK), 4, dtype=torch.uint8, device=device)
        self.codes = nn.Parameter(codes, requires_grad=False)  # two weights in each byte
        self.scales = nn.Parameter(scales, requires_grad=False)  # a float32 in each row

    def forward(self, x):
        return MultiplyNF4.apply(x, self.codes, self.scales, self.out_features)


class MultiplyNF4(torch.autograd.Function):
    """Multiply by a 4-bit weight; F.linear would keep the unpacked copy of it until backward."""

    @staticmethod
    def forward(ctx, x, codes, scales, rows):
        ctx.rows = rows
        ctx.save_for_backward(codes, scales)  # FSDP frees them too, and gathers them for backward

        return F.linear(x, decode(codes, scales, rows).to(x.dtype))

    @staticmethod
    def backward(ctx, gradient):
        weight = decode(*ctx.saved_tensors, ctx.rows)
        return gradient @ weight.to(gradient.dtype), None, None, None


class LoRA(nn.Module):
    """A frozen layer W, and beside it the thin A and B that are trained: W x + alpha/r B A x.

    Shapes: W (out, in), A (r, in), B (out, r). Names as in peft. Source: LoRA, section 4.1.
    """

    def __init__(self, base_layer, lora_rank, lora_alpha):
        super().__init__()
        inputs = base_layer.in_features
        outputs = base_layer.out_features
        device = next(base_layer.parameters()).device
        self.base_layer = base_layer
        self.scale = lora_alpha / lora_rank
        self.lora_A = nn.Linear(inputs, lora_rank, bias=False, device=device)
        self.lora_B = nn.Linear(lora_rank, outputs, bias=False, device=device)
        nn.init.zeros_(self.lora_B.weight)  # so that training begins at the base's answers

    def forward(self, x):

        return self.base_layer(x) + self.scale * self.lora_B(self.lora_A(x))


def build(config, way, args):
    """Return the model without memory for its weights: 4-bit layers first, then adapters."""
    with torch.device("meta"):
        model = Transformer(config)
        if way.endswith("bf16"):
            model.to(torch.bfloat16)  # embedding, norms and head; codes and scales are bytes
        if way.startswith("QLoRA"):
            for path, layer in layers_of(model):
                model.set_submodule(path, NF4Linear(layer))
        if way != "full":
            model.requires_grad_(False)
            for path, layer in layers_of(model, args.target_modules):
                model.set_submodule(path, LoRA(layer, args.lora_rank, args.lora_alpha))
    return model


def shard(model, mesh, way):
    """Shard each block, and the rest, as for LoRA: FSDP2 does not ask what the bytes mean."""
    compute = torch.bfloat16 if way.endswith("bf16") else None
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)

    return fully_shard(model, mesh=mesh, mp_policy=policy)


def optimizer_of(args):
    """Return what makes the optimizer that --optimizer names, from parameters and lr."""
    if args.optimizer == "adamw":
        return torch.optim.AdamW
    return functools.partial(AdamW8bit, min_8bit_size=args.min_shard_size)


def train(model, batches, lr, max_norm, make_optimizer=torch.optim.AdamW):
    """Take a step on each batch; return losses, norms of gradients, and the optimizer."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = make_optimizer(trained, lr=lr)
    losses = []
    norms = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, max_norm)
        optimizer.step()
        losses.append(loss.detach())
        norms.append(gathered(norm))
    return torch.stack(losses), torch.stack(norms), optimizer


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    lora_checks.add_flags(parser, WAYS)
    add = parser.add_argument
    add("--optimizer", choices=("adamw", "adamw8bit"), default="adamw",
        help="adamw8bit: moments in 8 bits, by bitsandbytes (adamw)")  # fmt: skip
    add("--min-shard-size", type=cli.positive_int, default=4096,
        help="weights of a shard below which its moments stay in 32 bits (4096)")  # fmt: skip
    return lora_checks.settle(parser.parse_args())


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("02-fsdp/fsdp_qlora.py", args, world, device)
        config = models.preset(args.preset, args.seq_len)
        refuse_large_rank(args, config)
        nf4.refuse_without_nf4(device)
        if args.adapter:
            refuse_unfit(Path(args.adapter), build(config, "LoRA", args), args)
        mesh = init_device_mesh(device.type, (world.world_size,))
        lesson = lora_checks.Lesson(report, config, build, train)
        report.start(*lesson.header())

        def sharded(way, seed=args.seed):
            model = materialize(shard(build(config, way, args), mesh, way), device)
            return lesson.fill(model, way, seed)

        lesson.make_base(sharded("full"))
        for way in args.ways:
            model = sharded(way)
            expected = lesson.alone(way)  # one process; None without --parity-steps
            batches = lesson.batches(world.rank)

            trained = train(model, batches, lesson.lr(way), args.max_grad_norm, optimizer_of(args))

            lesson.prove(way, model, trained, expected, sharded)
        loss = lesson.print_table()
        lora_bytes.print_large(report, args, WAYS)
        if report.output and world.is_rank0:
            lora_bytes.draw(report.output / "bytes_per_weight.png", report, config)
        return report.finish(f"loss {loss:.4f} after step {args.max_steps}")


if __name__ == "__main__":
    cli.run(main)
