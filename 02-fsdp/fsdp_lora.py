"""Fine-tune small adapters (LoRA) beside a frozen model that FSDP shards.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_lora.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_lora.py --preset 124m

Look for: gradients, Adam moments and reduce-scatters of the adapters only; all-gathers no smaller
than before, since backward goes through the frozen weights too; the losses of one process.

FSDP2 shards each parameter by itself, so frozen and trained ones share a unit. The adapter is
written out because the lesson is what FSDP does with it; the files are peft's.
Source: Hu et al., LoRA (ICLR 2022), section 4.
"""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_parts import lora_checks
from fsdp_parts.lora_layers import layers_of
from fsdp_parts.sharding import gathered, loss_of
from legacy_common import cli, models, runtime
from legacy_common.models import Transformer, local
from legacy_common.report import Report

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
        norm = nn.utils.clip_grad_norm_(trained, max_norm)  # over all ranks' shards
        optimizer.step()
        losses.append(loss.detach())
        norms.append(gathered(norm))
    return torch.stack(losses), torch.stack(norms), optimizer


@torch.no_grad()
def merged(model, rows_of=lambda base: local(base.weight)):
    """Yield (name in a plain model, this rank's rows of W + alpha/r B A), one layer at a time.

    W and B are sharded by the same rows, so A alone is gathered. A linear layer without an adapter
    comes too: one in 4 bits is what its codes stand for. Shape: (out/N, in), float32.
    """
    for path, layer in layers_of(model):
        name = f"{path}.weight"
        if not hasattr(layer, "lora_A"):
            yield name, rows_of(layer)
            continue
        update = layer.scale * (local(layer.lora_B.weight) @ gathered(layer.lora_A.weight))

        yield name, rows_of(layer.base_layer) + update


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    lora_checks.add_flags(parser, WAYS)
    return lora_checks.settle(parser.parse_args())


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("02-fsdp/fsdp_lora.py", args, world, device)
        config = models.preset(args.preset, args.seq_len)
        lesson = lora_checks.Lesson(report, config, build, shard, train, merged)
        report.start(*lesson.header())

        lesson.make_base()
        for way in args.ways:
            model = lesson.sharded(way, args.seed)
            expected = lesson.alone(way)  # one process; None without --parity-steps
            batches = lesson.batches(world.rank)

            trained = train(model, batches, lesson.lr(way), args.max_grad_norm)

            lesson.prove(way, model, trained, expected)
        loss = lesson.print_table()
        return report.finish(f"loss {loss:.4f} after step {args.max_steps}")


if __name__ == "__main__":
    cli.run(main)
