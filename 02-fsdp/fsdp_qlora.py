"""Fine-tune adapters beside frozen weights of 4 bits (QLoRA) that FSDP shards and gathers as such.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_qlora.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_qlora.py --preset 124m

Needs bitsandbytes. Look for: the parameters and the all-gathers, which are what LoRA left over;
the losses of one process; how far a 4-bit weight is from the one it was made of. Try
`--optimizer adamw8bit`. Adapters, `shard` and `train` are those of fsdp_lora.py.
Source: Dettmers et al., QLoRA (NeurIPS 2023), section 3.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_lora import add_adapters, merged, shard, train
from fsdp_parts import fsdp_qlora as part
from fsdp_parts import lora_checks
from fsdp_parts.fsdp_qlora import NF4_BLOCK, bitsandbytes, decode
from fsdp_parts.lora_layers import layers_of
from legacy_common import cli, models, runtime
from legacy_common.models import Transformer, local
from legacy_common.report import Report

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
            add_adapters(model, args)
    return model


class AdamW8bit:
    """bitsandbytes' AdamW on this rank's shards: it knows plain tensors, FSDP has DTensors."""

    def __init__(self, parameters, lr, min_8bit_size):
        self.parameters = parameters
        self.shards = [nn.Parameter(local(p).detach().view(-1)) for p in parameters]
        adamw = bitsandbytes().optim.AdamW8bit
        self.adamw = adamw(self.shards, lr=lr, min_8bit_size=min_8bit_size)

    def step(self):
        for parameter, piece in zip(self.parameters, self.shards, strict=True):
            piece.data = local(parameter).detach().view(-1)  # the same memory, not a copy
            piece.grad = local(parameter.grad).view(-1) if piece.numel() else None
        self.adamw.step()

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def state(self):
        """Moments and their scales, by parameter; the code tables are shared by all of them."""
        kept = ("state1", "state2", "absmax1", "absmax2")
        states = (self.adamw.state[shard] for shard in self.shards)
        states = [{name: state[name] for name in kept if name in state} for state in states]
        return dict(zip(self.parameters, states, strict=True))


def optimizer_of(args):
    """Return what makes the optimizer that --optimizer names, from parameters and lr."""
    if args.optimizer == "adamw":
        return torch.optim.AdamW
    return functools.partial(AdamW8bit, min_8bit_size=args.min_shard_size)


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
        lesson = lora_checks.Lesson(report, config, build, shard, train, merged)
        part.refuse_without_nf4(device)
        report.start(*lesson.header())

        lesson.make_base()
        for way in args.ways:
            model = lesson.sharded(way, args.seed)
            expected = lesson.alone(way)  # one process; None without --parity-steps
            batches = lesson.batches(world.rank)

            trained = train(model, batches, lesson.lr(way), args.max_grad_norm, optimizer_of(args))

            lesson.prove(way, model, trained, expected)
        loss = lesson.print_table()
        lora_checks.print_large(report, args, WAYS)
        return report.finish(f"loss {loss:.4f} after step {args.max_steps}")


if __name__ == "__main__":
    cli.run(main)
