"""Fine-tune small adapters (LoRA) beside a frozen model that FSDP shards, in 4 bits if you like.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_lora.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_lora.py --preset 124m

Try `--quantize nf4` (QLoRA; needs bitsandbytes), and `--target-modules wq wv`. Look for: gradients,
Adam moments and reduce-scatters of the adapters only; all-gathers no smaller than before, since
backward goes through the frozen weights too; the losses of one process.

The adapter is written out: it is ten lines, and the lesson is what FSDP does with frozen weights,
which peft would stand in front of. The files are peft's, for peft and others to load. FSDP2 shards
each parameter by itself, so frozen and trained ones share a unit; in FSDP1's flat parameter they
cannot, without use_orig_params.

Sources: Hu et al., LoRA (ICLR 2022), section 4; Dettmers et al., QLoRA (NeurIPS 2023), section 3.
"""

import functools
import json
import logging
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dist_common import cli, data, measure, models, proofs, runtime
from dist_common.models import PRESETS, Transformer
from dist_common.proofs import RING_FACTOR
from dist_common.report import Report

WEIGHTS_FILE = "adapter_model.safetensors"  # as peft names it
LAYERS = ("wq", "wk", "wv", "wo", "gate", "up", "down")  # the linear layers of a block
PREFIX = "base_model.model."  # of every name in peft's file
HELD_OUT = 8  # sequences
FULL_LR = 1e-3  # of the base and of full fine-tuning: a faster one blows up rounding errors
NF4_BLOCK = 64  # weights that share a scale
NF4_HALF_GAP = 0.152  # of a block's largest weight: the widest gap is from -1 to -0.696


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


def shard(model, mesh):
    """Shard each block, and the rest: FSDP2 does not ask which parameters are trained."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)

    return fully_shard(model, mesh=mesh)


def save_adapters(folder, model, args):
    """Write the adapters, and nothing else, as peft does. All ranks call it: it gathers."""
    adapters = {PREFIX + name: w for name, w in whole(model).items() if "lora_" in name}
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(adapters, folder / WEIGHTS_FILE)
        config = {
            "peft_type": "LORA", "base_model_name_or_path": args.preset, "r": args.lora_rank,
            "lora_alpha": args.lora_alpha, "target_modules": args.target_modules,
        }  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def load_adapters(folder, model, args):
    """Put a folder's adapters into a model that has such. Rank 0 reads, and sends to the others.

    Raises: UsageError when they cannot be read, or fit neither this model nor these flags.
    """
    adapters = None
    if dist.get_rank() == 0:
        try:
            config = json.loads((folder / "adapter_config.json").read_text())
            stored = load_file(folder / WEIGHTS_FILE).items()
            adapters = {name.removeprefix(PREFIX): weight for name, weight in stored}
            there = {name: config[name] for name in ("r", "lora_alpha")}
        except Exception as error:  # each library has its own for a file that is damaged
            raise cli.UsageError(f"--adapter {folder} cannot be read: {error}") from error
        there["use_rslora"] = config.get("use_rslora", False)  # divides by the root of r
        there |= {name: list(weight.shape) for name, weight in adapters.items()}
        here = {"r": args.lora_rank, "lora_alpha": args.lora_alpha, "use_rslora": False}
        here |= {n: list(w.shape) for n, w in model.named_parameters() if "lora_" in n}
        for name in (*here, *there):
            found, needed = (side.get(name, "missing") for side in (there, here))
            if found != needed:
                raise cli.UsageError(
                    f"--adapter {folder} does not fit --preset, --lora-* and --target-modules: "
                    f"{name} is {found} there, {needed} here"
                )
    model.load_state_dict(runtime.from_rank0(adapters), strict=False)


def merge(model):
    """Fold each adapter into its layer, W + alpha/r B A in float32: a plain model, as fast as one.

    Of a 4-bit layer, W is what its bits stand for: that is what the adapter was trained beside.
    """
    for path, layer in layers_of(model, LAYERS, LoRA):
        merged = nn.Linear(layer.base_layer.in_features, layer.base_layer.out_features, bias=False)

        update = layer.scale * (layer.lora_B.weight @ layer.lora_A.weight)
        merged.weight = nn.Parameter(weight_of(layer.base_layer) + update)

        model.set_submodule(path, merged)


def quantize(model):
    """Keep the blocks' linear layers in 4 bits a weight; embedding, norms and head in float32."""
    for path, layer in layers_of(model, LAYERS):
        model.set_submodule(path, NF4Linear(layer))


class NF4Linear(nn.Module):
    """A frozen linear layer in 4 bits a weight, and a scale for each block of 64 of them.

    Both are parameters, though nobody trains them: FSDP shards and gathers no buffers.
    """

    def __init__(self, layer):
        super().__init__()
        self.out_features, self.in_features = layer.weight.shape
        weight = layer.weight.detach()
        packed, state = bitsandbytes().quantize_4bit(weight, blocksize=NF4_BLOCK, quant_type="nf4")
        self.packed = nn.Parameter(packed, requires_grad=False)  # (out * in / 2, 1) uint8
        self.absmax = nn.Parameter(state.absmax, requires_grad=False)  # (out * in / 64,)

    def forward(self, x):
        return MultiplyNF4.apply(x, self.packed, self.absmax, self.out_features)


class MultiplyNF4(torch.autograd.Function):
    """Multiply by a 4-bit weight; F.linear would keep the float32 copy of it until backward."""

    @staticmethod
    def forward(ctx, x, packed, absmax, rows):
        ctx.rows = rows
        ctx.save_for_backward(packed, absmax)  # FSDP frees them too, and gathers them for backward
        return F.linear(x, dequantize(packed, absmax, rows))

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ dequantize(*ctx.saved_tensors, ctx.rows), None, None, None


def dequantize(packed, absmax, rows):
    """Return the float32 weight that 4-bit codes and scales stand for. Shape: (rows, in)."""
    # On the CPU, bitsandbytes 0.50 mixes up the scales of a weight whose rows are no multiple of a
    # block, and says nothing. So it is asked for a single row.
    state = bitsandbytes().QuantState(
        absmax, torch.Size([2 * packed.numel()]),
        blocksize=NF4_BLOCK, quant_type="nf4", dtype=torch.float32,
    )  # fmt: skip
    return bitsandbytes().dequantize_4bit(packed, state).view(rows, -1)


@functools.cache
def bitsandbytes():
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it recommends a faster kernel
    import bitsandbytes.functional  # takes seconds, which only --quantize has to wait

    return bitsandbytes.functional


def weight_of(layer):
    """Return a frozen layer's weight in float32. Shape: (out, in)."""
    if isinstance(layer, NF4Linear):
        return dequantize(layer.packed, layer.absmax, layer.out_features)
    return layer.weight


def layers_of(model, names, kind=nn.Module):
    """List the modules of these names, with their paths in the model."""
    named = model.named_modules()
    return [(path, m) for path, m in named if path.split(".")[-1] in names and isinstance(m, kind)]


def whole(model):
    """Return every tensor in one piece, on the CPU of every rank. A collective."""
    state = model.state_dict().items()
    state = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state}
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def loss_of(model, batch):
    """Return the mean cross-entropy. Shapes: batch is inputs and targets, (B, T) each."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train(model, batches, lr):
    """Take a step of AdamW on each batch; return this rank's losses, and the optimizer."""
    # Frozen weights cost nothing here: there is state only where there was a gradient.
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), optimizer


def expected_of(config, way, args, shards):
    """Return by formula what is trained, what a rank holds and what a ring has it send."""

    def part(shapes, size=4):  # FSDP2 cuts each tensor by rows; parts are filled up to be equal
        return size * sum(-(-rows // shards) * columns for rows, columns in shapes)

    V = config.vocab_size
    D = config.dim
    wide = config.ffn_dim
    L = config.num_layers
    kv = D // config.num_heads * config.num_kv_heads
    r = args.lora_rank
    sides = [(D, D), (kv, D), (kv, D), (D, D), (wide, D), (wide, D), (D, wide)]  # (out, in)
    shapes = dict(zip(LAYERS, sides, strict=True))
    targets = [shape for name, shape in shapes.items() if name in args.target_modules]
    adapters = [shape for rows, columns in targets for shape in ((r, columns), (rows, r))]
    block = part([(D, 1)] * 2)
    rest = part([(V, D)] * (2 - config.tied_embeddings) + [(D, 1)])
    if way == "QLoRA":
        block += part([(a * b // 2, 1) for a, b in sides], size=1)
        block += part([(-(-a * b // NF4_BLOCK), 1) for a, b in sides])
    else:
        block += part(sides)
    weights = config.num_parameters()
    trained = L * block + rest
    if way != "full":
        weights = L * sum(a * b for a, b in adapters)
        trained = L * part(adapters)
        block += part(adapters)
    # Blocks are gathered for forward and again for backward; the rest stays in between.
    gathered = shards * (2 * L * block + rest)
    scattered = shards * trained
    return {
        "trained weights": weights,
        "bytes of parameters": L * block + rest,
        "bytes of gradients": trained,
        "bytes of Adam moments": 2 * trained,
        "bytes sent in reduce-scatters": round(scattered * RING_FACTOR["reduce_scatter"](shards)),
        "bytes sent in all-gathers": round(gathered * RING_FACTOR["all_gather"](shards)),
    }


def measured_of(model, optimizer, batch, shards):
    """Return the same from the tensors that are there and the collectives that a step starts."""
    optimizer.zero_grad()
    with measure.CollectiveCounter() as counter:
        loss_of(model, batch).backward()
    kinds = (
        list(model.parameters()),
        [parameter.grad for parameter in model.parameters() if parameter.grad is not None],
        [state[n] for state in optimizer.state.values() for n in ("exp_avg", "exp_avg_sq")],
    )
    own = torch.tensor([sum(t.to_local().nbytes for t in tensors) for tensors in kinds])
    own = own.to(kinds[0][0].device)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    # Handed over were a whole and a rank's part of it: shards + 1 parts.
    scattered = counter.bytes["_reduce_scatter_base_"] * shards / (shards + 1)
    gathered = counter.bytes["_allgather_base_"] + counter.bytes["allgather_"]
    gathered *= shards / (shards + 1)
    sent = [
        round(scattered * RING_FACTOR["reduce_scatter"](shards)),
        round(gathered * RING_FACTOR["all_gather"](shards)),
    ]
    return [sum(parameter.numel() for parameter in optimizer.state), *own.tolist(), *sent]


def check_adapters(check, model, fresh, folder, args, batch):
    """Save what was trained, load it into the `fresh` base, merge it there; all must agree."""
    after, before, source = whole(model), whole(fresh), "LoRA, section 4.1"
    changed = sum((after[n] != before[n]).sum().item() for n in before if "lora_" not in n)
    check("frozen weights that changed", changed, 0, 0, source)
    save_adapters(folder, model, args)
    sizes = [tensor.nbytes for name, tensor in after.items() if "lora_" in name]
    size = (folder / WEIGHTS_FILE).stat().st_size if dist.get_rank() == 0 else sum(sizes)
    check("bytes of the adapters' file", size, sum(sizes), 512 * len(sizes), "names and shapes")
    load_adapters(folder, fresh, args)
    with torch.no_grad():
        logits, layers = model(batch[0]), layers_of(fresh, LAYERS, LoRA)
        error = (fresh(batch[0]) - logits).abs().max().item()
        check("error of logits, loaded into a fresh base", error, 0, 1e-5, "as trained")
        bases = {path: weight_of(layer.base_layer).clone() for path, layer in layers}
        merge(fresh)
        error = (fresh(batch[0]) - logits).abs().max().item()
        check("error of logits, merged", error, 0, 1e-4, "as trained")
    wrong = undone = bound = 0
    for path, W in bases.items():
        merged = fresh.get_submodule(path).weight.detach()
        A, B = (after[f"{path}.lora_{name}.weight"].to(W.device) for name in "AB")
        update = args.lora_alpha / args.lora_rank * (B @ A)
        wrong += (merged != W + update).sum().item()
        undone = max(undone, (merged - update - W).abs().max().item())
        bound = max(bound, 2**-23 * (W.abs() + update.abs()).max().item())
    check("merged weights unlike W + alpha/r B A", wrong, 0, 0, source)
    check("error of W, unmerged", undone, 0, bound, "two roundings of 2^-24")


def rounding_of(model, base):
    """Return the largest error of a weight in 4 bits, as a part of the largest of its block."""
    worst = 0.0
    for path, layer in layers_of(model, (*LAYERS, "base_layer"), NF4Linear):
        weight = base[path.removesuffix(".base_layer") + ".weight"].to(layer.absmax.device)
        error = (weight_of(layer) - weight).abs().flatten()
        scales = layer.absmax.repeat_interleave(NF4_BLOCK)[: len(error)]
        worst = max(worst, (error / scales).max().item())
    return worst


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    positive = cli.positive_int
    add("--preset", choices=PRESETS, default="tiny", help="(tiny)")
    add("--lora-rank", type=positive, default=8, help="rows of A, columns of B (8)")
    add("--lora-alpha", type=positive, default=16, help="B A counts alpha / rank times (16)")
    names = f"layers that get an adapter, of {', '.join(LAYERS)} (all)"
    add("--target-modules", nargs="+", choices=LAYERS, default=LAYERS, metavar="NAME", help=names)
    add("--quantize", choices=("nf4",), help="run QLoRA too, with the frozen layers in 4 bits")
    add("--adapter", metavar="DIR", help="go on from the adapters in this folder")
    add("--micro-batch-size", type=positive, default=8, help="per rank and step (8)")
    add("--seq-len", type=positive, default=64, help="tokens per sequence (64)")
    add("--pretrain-steps", type=positive, default=20, help="steps that make the base (20)")
    add("--max-steps", type=positive, default=8, help="steps of fine-tuning (8)")
    rate = "of the adapters (0.003); where losses jump, rounding errors grow with them"
    add("--lr", type=cli.positive_float, default=3e-3, help=rate)
    return parser.parse_args()


def check_flags(args, config, device):
    """Refuse what cannot work before anything is trained."""
    kv = config.dim // config.num_heads * config.num_kv_heads
    smallest = kv if {"wk", "wv"} & set(args.target_modules) else min(config.dim, config.ffn_dim)
    if args.lora_rank > smallest:
        raise cli.UsageError(
            f"--lora-rank must be at most {smallest}, the smallest side of a layer to adapt"
        )
    try:
        if args.quantize:
            NF4Linear(nn.Linear(64, 64).to(device))(torch.ones(1, 64, device=device))
    except Exception as error:  # not there, or not for this machine: each fails in its own way
        raise cli.UsageError(
            f"--quantize nf4 needs bitsandbytes, which does not run on {device.type} here: "
            f"pip install bitsandbytes ({type(error).__name__}: {error})"
        ) from error


def main():
    args = parse_args()
    with (
        runtime.init(args.device, args.timeout) as (world, device),
        tempfile.TemporaryDirectory() as scratch,
    ):
        report = Report("02-fsdp/fsdp_lora.py", args, world, device)
        config = models.preset(args.preset, args.seq_len)
        check_flags(args, config, device)
        N = world.world_size
        mesh = init_device_mesh(device.type, (N,))
        global_batch = args.micro_batch_size * N
        steps = max(args.pretrain_steps, args.max_steps)
        text = data.load_text()
        swapped = torch.frombuffer(bytearray(text.numpy().tobytes().swapcase()), dtype=torch.uint8)
        texts = [data.Sequences(t, args.seq_len, global_batch * steps + HELD_OUT)
                 for t in (text, swapped)]  # fmt: skip
        base = None

        def build(way):
            runtime.seed_everything(args.seed)
            model = Transformer(config)
            if base:
                model.load_state_dict(base)
            model.to(device)
            if way == "QLoRA":
                quantize(model)
            if way != "full":
                add_adapters(model, args)
                if args.adapter:
                    load_adapters(Path(args.adapter), model, args)
            return model

        if args.adapter:
            build("LoRA")  # a folder that does not fit is refused before anything is trained
        report.start(
            f"{args.preset}: {config.num_parameters():,} weights; global batch {global_batch} = "
            f"{args.micro_batch_size} per rank x {N} ranks"
        )
        model = shard(build("full"), mesh)
        micro = global_batch, world.rank * args.micro_batch_size, args.micro_batch_size, device
        train(model, data.batches_of(texts[0], args.pretrain_steps, *micro), FULL_LR)
        base = whole(model)
        held_out = next(data.batches_of(texts[1], 1, 1, global_batch * steps, HELD_OUT, device))
        before = loss_of(build("full"), held_out).item()
        report.say(f"fine-tuned to swapped capitals; loss before: {before:.4f}")
        rows = []
        for way in ("full", "LoRA", "QLoRA")[: 3 if args.quantize else 2]:

            def check(name, *numbers, way=way):
                report.check(f"{way}: {name}", *numbers)

            every = global_batch, 0, global_batch, device
            alone = data.batches_of(texts[1], args.max_steps, *every)
            lr = FULL_LR if way == "full" else args.lr
            expected_losses = train(build(way), alone, lr)[0]
            model = shard(build(way), mesh)
            mine = list(data.batches_of(texts[1], args.max_steps, *micro))

            losses, optimizer = train(model, mine, lr)

            losses /= N
            dist.all_reduce(losses)
            expected = expected_of(config, way, args, N)
            measured = measured_of(model, optimizer, mine[0], N)
            for (name, right), value in zip(expected.items(), measured, strict=True):
                check(name, value, right, 0, "ZeRO, section 5; LoRA, section 4")
            name = f"{way}: largest error of a loss"
            proofs.same_losses(report, losses, expected_losses, 1e-5, name)
            with torch.no_grad():
                loss = loss_of(model, held_out).item()
            report.metrics[f"loss_{way}"] = loss
            rows.append([way, *(f"{value:,}" for value in measured), f"{loss:.4f}"])
            if way == "QLoRA":
                worst = rounding_of(build(way), base)
                source = "QLoRA, appendix E"
                check("error of a weight, of its block's largest", worst, 0, NF4_HALF_GAP, source)
                check("loss after", loss, report.metrics["loss_LoRA"], 0.1, "that of LoRA")
            if way != "full":
                folder = (report.output or Path(scratch)) / way.lower()
                check_adapters(check, model, build(way), folder, args, held_out)
        headers = ("way", "trained", "parameters", "gradients", "moments", "scattered", "gathered",
                   "loss after")  # fmt: skip
        report.table(rows, headers)
        return report.finish(f"loss {loss:.4f} after step {args.max_steps}")


if __name__ == "__main__":
    cli.run(main)
