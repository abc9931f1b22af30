"""Train LoRA adapters next to a frozen model that FSDP shards, also in 4 bits.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_lora.py \
              --output-dir runs/lora
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_lora.py \
              --output-dir runs/lora

Look for: reduce-scatters of the adapters only, all-gathers of everything, the losses of
one process, and adapters that peft loads. `--quantize nf4` stores the frozen weights in
4 bits (QLoRA).

Sources: Hu et al., LoRA (ICLR 2022), section 4.1; Dettmers et al., QLoRA (NeurIPS
2023), section 3 and appendix E.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from dist_common import check, cli, runtime
from dist_common.model import PRESETS, build_transformer
from dist_common.report import Report
from fsdp_checkpoint import STEPS, train

LAYERS = ["wq", "wk", "wv", "wo", "gate", "up", "down"]  # they get adapters
RANK = 8  # r, the rows of A
ALPHA = 16  # the adapter's output is scaled by ALPHA / RANK


class LoRALinear(nn.Module):
    """A frozen layer W with two thin matrices: y = W x + alpha / r B A x.

    Shapes: W (out, in), A (r, in), B (out, r). peft uses the same names.
    """

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, base_layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)  # training starts at the frozen model

    def forward(self, x):
        return self.base_layer(x) + ALPHA / RANK * self.lora_B(self.lora_A(x))


# NF4: a weight is one of 16 values times the scale of its block of 64.
NF4 = torch.tensor(
    [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
    + [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]
)
BLOCK = 64


def encode(weight):
    """Return codes, two per byte, and scales. Shapes: (out x in / 2,), (blocks, 1)."""
    blocks = weight.view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    values = NF4.to(weight.device)
    borders = (values[1:] + values[:-1]) / 2
    codes = torch.bucketize(blocks / scales, borders).to(torch.uint8).flatten()
    return codes[::2] * 16 + codes[1::2], scales


def decode(codes, scales, out_features):
    """Return the weight that codes and scales stand for. Shape: (out, in)."""
    pairs = torch.stack([codes // 16, codes % 16], 1).long()
    values = NF4.to(codes.device)[pairs].view(-1, BLOCK) * scales
    return values.view(out_features, -1)


class NF4Linear(nn.Module):
    """A frozen layer with 4 bits per weight.

    Codes and scales are parameters, because FSDP shards and gathers no buffers.
    """

    def __init__(self, layer):
        super().__init__()
        self.out_features, self.in_features = layer.weight.shape
        codes, scales = encode(layer.weight)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def forward(self, x):
        # Backward decodes again: autograd does not keep the decoded weight.
        return checkpoint(self.multiply, x, use_reentrant=False)

    def multiply(self, x):
        return F.linear(x, decode(self.codes, self.scales, self.out_features))


def build(args, device):
    """Return the frozen model with new adapters, the same on every rank."""
    runtime.seed_everything(args.seed)
    model = build_transformer(PRESETS["tiny"], args.seed, device)
    model.requires_grad_(False)
    for path, layer in list(model.named_modules()):
        if path.split(".")[-1] in LAYERS:
            base_layer = NF4Linear(layer) if args.quantize else layer
            model.set_submodule(path, LoRALinear(base_layer))
    return model.to(device)


def save_adapters(model, folder):
    """Gather the adapters on rank 0, which writes them for peft. A collective."""
    options = StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=True
    )
    adapters = get_model_state_dict(model, options=options)  # on every rank
    if dist.get_rank() == 0:
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LAYERS)
        config.save_pretrained(folder)
        named = {f"base_model.model.{n}": weight for n, weight in adapters.items()}
        save_file(named, folder / "adapter_model.safetensors")
    dist.barrier()


def bytes_sent(weights, world_size):
    """Return what a rank sends to gather or scatter weights once in each step.

    In a ring; FSDP pads the rows of a weight to a multiple of the ranks.
    """
    shards = (-(-len(w) // world_size) * w[0].nbytes for w in weights)
    return STEPS * (world_size - 1) * sum(shards)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument(
        "--quantize", choices=["nf4"], help="store frozen weights in 4 bits"
    )
    args = parser.parse_args()
    if not args.output_dir:
        raise cli.UsageError("--output-dir must name a folder for the adapters")
    return args


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        report = Report("02-fsdp/fsdp_lora.py", args, run)
        alone = build(args, run.device)  # one process
        optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
        expected = train(alone, optimizer, range(STEPS))

        model = build(args, run.device)
        weights = list(model.parameters())
        world_size = run.world_size
        scattered = bytes_sent([w for w in weights if w.requires_grad], world_size)
        # A step gathers a block twice, in forward and in backward, the rest once.
        gathered = bytes_sent([*weights, *model.blocks.parameters()], world_size)
        mesh = init_device_mesh(run.device.type, (world_size,))
        for unit in (*model.blocks, model):
            fully_shard(unit, mesh=mesh)  # frozen and trained weights share a unit
        # Frozen weights get no gradients, so AdamW makes no moments.
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with check.CollectiveCounter() as counter:
            losses = train(model, optimizer, range(STEPS), run.rank, world_size)

        error = (losses - expected).abs().max().item()
        report.check("largest error of a loss", error, 0, 1e-5)
        sent = round(counter.bytes_sent["reduce_scatter"])
        report.check("bytes scattered", sent, scattered, 0)
        sent = round(counter.bytes_sent["all_gather"])
        report.check("bytes gathered", sent, gathered, 0)
        save_adapters(model, args.output_dir / "adapters")
        if not args.quantize:  # peft's base has 32 bits
            base = build_transformer(PRESETS["tiny"], args.seed, run.device)
            in_peft = PeftModel.from_pretrained(base, args.output_dir / "adapters")
            tokens = torch.arange(64, device=run.device)[None]  # (1, T)
            error = (model(tokens) - in_peft(tokens)).abs().max().item()
            report.check("largest error of a logit in peft", error, 0, 1e-4)
        return report.finish(f"loss {losses[-1]:.4f} after step {STEPS}")


if __name__ == "__main__":
    cli.run(main)
