"""Fine-tune small adapters (LoRA) beside a frozen model that FSDP shards.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_lora.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_lora.py --preset 124m

Look for: gradients, Adam moments and reduce-scatters of the adapters only; all-gathers no smaller
than before, since backward goes through the frozen weights too; the losses of one process.

FSDP2 shards each parameter by itself, so frozen and trained ones share a unit. The adapter is
written out because the lesson is what FSDP does with it; the files are peft's.
Source: Hu et al., LoRA (ICLR 2022), section 4.
"""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lora_checks
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

WAYS = ("full", "LoRA", "LoRA-bf16")  # what is trained; -bf16: how frozen weights are stored


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


def add_adapters(model, args):
    """Freeze the model and put an adapter beside each layer that --target-modules names."""
    model.requires_grad_(False)
    for path, layer in layers_of(model, args.target_modules):
        model.set_submodule(path, LoRA(layer, args.lora_rank, args.lora_alpha))


def shard(model, mesh, way):
    """Shard each block, and the rest: FSDP2 does not ask which parameters are trained."""
    compute = torch.bfloat16 if way.endswith("bf16") else None
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)

    return fully_shard(model, mesh=mesh, mp_policy=policy)


def build(config, way, args):
    """Return the model without memory for its weights: FSDP then allocates a rank's part only."""
    with torch.device("meta"):
        model = Transformer(config)
        if way.endswith("bf16"):
            model.to(torch.bfloat16)  # what nobody trains needs no float32 copy
        if way != "full":
            add_adapters(model, args)
    return model


def train(model, batches, lr, max_norm):
    """Take a step of AdamW on each batch; return losses, norms of gradients, and the optimizer."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    losses = []
    norms = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, max_norm)  # over all ranks' shards
        optimizer.step()
        losses.append(loss.detach())
        norms.append(gathered(norm))
    return torch.stack(losses), torch.stack(norms), optimizer


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    lora_checks.add_flags(parser, WAYS)
    return lora_checks.settle(parser.parse_args())


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("02-fsdp/fsdp_lora.py", args, world, device)
        config = models.preset(args.preset, args.seq_len)
        refuse_large_rank(args, config)
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

            trained = train(model, batches, lesson.lr(way), args.max_grad_norm)

            lesson.prove(way, model, trained, expected, sharded)
        loss = lesson.print_table()
        return report.finish(f"loss {loss:.4f} after step {args.max_steps}")


if __name__ == "__main__":
    cli.run(main)
