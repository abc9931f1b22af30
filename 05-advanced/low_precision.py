"""Low precision: the same training in float32, bfloat16, float16 and float8.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/low_precision.py
    GPU   the same, with one GPU per rank

Look for: how exact a product is in bfloat16 and float8; the gradients that float16
rounds to 0, and the loss scale that keeps them; the updates that bfloat16 weights lose.
float8 is torchao's. Devices without float8 units (CPUs, GPUs before capability 8.9)
round the same numbers, and multiply them in float32.

Sources: Micikevicius et al., Mixed Precision Training (ICLR 2018) and FP8 Formats for
Deep Learning (2022); torchao.float8.
"""

import copy
import logging
import math
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from dist_common import cli, data, runtime
from dist_common.model import PRESETS, build_transformer
from dist_common.report import Report

CONFIG = replace(PRESETS["tiny"], num_layers=2)
BATCH = 2  # B, sequences of each rank and step
SEQ_LEN = 32  # T, tokens
MAX_STEPS = 20
LOSS_SCALE = 2.0**16  # of the first step; a power of two changes only exponents
AUTOCAST = {
    "32-true": None,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "fp8": None,
}


def train_step(model, optimizer, scaler, dtype, tokens):
    """Take one step; return its loss. The scaler does nothing but in float16."""
    optimizer.zero_grad()
    loss = mean_loss(model, tokens, dtype)
    scaler.scale(loss).backward()  # DDP averages scaled gradients
    scaler.unscale_(optimizer)  # before anything reads them, such as clipping
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)  # skips the step if the mean gradient is not finite
    scaler.update()
    return loss.detach()


def mean_loss(model, tokens, dtype=None):
    """Return the mean cross-entropy; autocast to dtype. Shape: tokens (B, T + 1)."""
    with torch.autocast(tokens.device.type, dtype, enabled=dtype is not None):
        logits = model(tokens[:, :-1])  # (B, T, V)
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def use_float8(model):
    """Have the blocks' linear layers round inputs, weights and gradients to float8."""
    # torchao 0.18 calls a function that torch 2.14 deprecates.
    logging.getLogger("torch.utils._pytree").setLevel("ERROR")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    weight = next(model.parameters())
    emulate = not weight.is_cuda or torch.cuda.get_device_capability() < (8, 9)
    config = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: name != "head"
    )


def build_model(precision, args, device):
    model = build_transformer(CONFIG, args.seed, device)
    if precision == "fp8":
        use_float8(model)
    return model


def train(precision, args, batches, run):
    """Train with DDP. Shape: batches (steps, ranks, B, T + 1).

    Returns: the first gradient, and the mean loss of the last ten steps.
    """
    model = build_model(precision, args, run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    is_float16 = precision == "16-mixed"
    scaler = torch.amp.GradScaler(run.device.type, LOSS_SCALE, enabled=is_float16)
    ddp = DDP(model)
    losses = []
    for step, tokens in enumerate(batches[:, run.rank]):
        loss = train_step(ddp, optimizer, scaler, AUTOCAST[precision], tokens)
        losses.append(loss)
        if step == 0:
            gradient = flat_gradient(model)
    loss = torch.stack(losses[-10:]).mean()
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return gradient, loss.item()


def flat_gradient(model):
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def gradient_of_one_process(precision, args, batches):
    """Return the mean gradient of all ranks' batches, clipped.

    Without DDP, scaler and PyTorch's clipping. Shape: batches (ranks, B, T + 1).
    """
    model = build_model(precision, args, batches.device)
    scale = LOSS_SCALE if precision == "16-mixed" else 1.0
    for tokens in batches:
        loss = mean_loss(model, tokens, AUTOCAST[precision])
        (loss * scale).backward()
    gradient = flat_gradient(model).double() / scale / len(batches)
    return gradient / max(1.0, gradient.norm().item())


def relative_error(ours, expected):
    return ((ours - expected).double().norm() / expected.double().norm()).item()


# Losses of a format, measured and predicted


def expected_product_error(dtype):
    """Return the relative error of a product of two rounded random matrices.

    Rounding is off by spacing / sqrt(12). Relative to mantissas from 1 to 2, that is
    sqrt(3 / (8 ln 2)) times as much. Two factors are rounded: sqrt(2).
    """
    return torch.finfo(dtype).eps * math.sqrt(2 * 3 / (8 * math.log(2)) / 12)


def product_errors(device):
    """Return the relative errors of a product in bfloat16 and in torchao's float8."""
    x, weight = torch.randn(2, 256, 256, device=device)
    exact = x @ weight.T
    in_bfloat16 = x.bfloat16().float() @ weight.bfloat16().float().T
    layer = nn.Sequential(nn.Linear(256, 256, bias=False, device=device))
    layer[0].weight.data = weight
    use_float8(layer)
    return relative_error(in_bfloat16, exact), relative_error(layer(x), exact)


def activation_gradient(model, tokens, dtype, factor):
    """Return the gradient of a linear layer's output; the loss is times `factor`."""
    outputs = []
    layer = model.blocks[0].up
    hook = layer.register_forward_hook(lambda *call: outputs.append(call[-1]))
    loss = mean_loss(model, tokens, dtype) * factor
    hook.remove()
    return torch.autograd.grad(loss, outputs)[0]


def shares_of_zeros(model, tokens, factor):
    """Return the share of float16 gradients that are 0, and of float64's, cast."""
    exact_model = copy.deepcopy(model).double()
    ours = activation_gradient(model, tokens, torch.float16, factor)
    exact = activation_gradient(exact_model, tokens, None, factor)
    return [(gradient == 0).double().mean().item() for gradient in (ours, exact.half())]


def shares_of_lost_updates(lr):
    """Return the share of bfloat16 weights that AdamW does not move, and a prediction.

    Its first step changes each weight by lr. A change of less than half the spacing to
    the next bfloat16 is rounded away.
    """
    weights = 0.02 * torch.randn(100_000)  # as in a new model
    held = weights.bfloat16()
    held.grad = torch.randn_like(held)
    torch.optim.AdamW([held], lr=lr).step()
    spacing = 2.0 ** weights.abs().log2().floor() * torch.finfo(torch.bfloat16).eps
    lost = (held == weights.bfloat16(), lr < spacing / 2)
    return [share.double().mean().item() for share in lost]


def load_batches(args, run):
    """Return the tokens of all ranks. Shape: (steps, ranks, B, T + 1)."""
    sequences = torch.tensor(data.load_text()).unfold(0, SEQ_LEN + 1, 1)
    torch.manual_seed(args.seed)
    starts = torch.randint(len(sequences), (MAX_STEPS, run.world_size, BATCH))
    return sequences[starts].long().to(run.device)


def main():
    args = cli.ArgumentParser(__doc__).parse_args()
    with runtime.init(args.device, args.timeout) as run:
        report = Report("05-advanced/low_precision.py", args, run)
        batches = load_batches(args, run)
        rows, errors = [], []
        for precision in AUTOCAST:
            gradient, loss = train(precision, args, batches, run)
            expected = gradient_of_one_process(precision, args, batches[0])
            errors.append(relative_error(gradient, expected))
            rows.append((precision, f"{loss:.3f}", f"{errors[-1]:.1e}"))
        report.table(rows, ("precision", "loss of the last 10 steps", "gradient error"))
        worst = torch.tensor(errors).max().item()  # NaN if any is
        report.check("gradient: largest relative error", worst, 0, 1e-5)

        runtime.seed_everything(args.seed)
        in_bfloat16, in_float8 = product_errors(run.device)
        formula = expected_product_error(torch.bfloat16)
        report.check("bfloat16: product error", in_bfloat16, formula, 0.05 * formula)
        formula = expected_product_error(torch.float8_e4m3fn)
        report.check("float8: product error", in_float8, formula, 0.05 * formula)
        model = build_model("32-true", args, run.device)
        # A loss is a mean: for 512 times the tokens, each gradient is a 512th.
        for name, factor in (("", 1 / 512), (", scaled", LOSS_SCALE / 512)):
            zeros, cast = shares_of_zeros(model, batches[0, 0], factor)
            report.check(f"float16: gradients of 0{name}", zeros, cast, 0.01)
        lost, predicted = shares_of_lost_updates(1e-5)
        report.check("bfloat16: weights that AdamW loses", lost, predicted, 0.01)
        return report.finish("each precision trains as one process does")


if __name__ == "__main__":
    cli.run(main)
