"""Low precision: the same training in float32, bfloat16, float16 and float8, under DDP.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/low_precision.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/low_precision.py --precision fp8

`fp8` is torchao's float8 on a GPU of compute capability 8.9 or later; `fp8-emulated` rounds the
same numbers on any device, and multiplies them in float32. Look for: what each format can hold;
the gradients that float16 rounds to 0; the updates that bfloat16 weights lose; each precision's
loss, memory and bytes. Sources: Micikevicius et al., Mixed Precision Training (2018) and FP8
Formats for Deep Learning (2022); torchao.float8.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from advanced_parts import low_precision as part
from legacy_common import cli, runtime
from legacy_common.report import Report

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "fp8": torch.bfloat16}
BF16_WEIGHTS = ("bf16-true", "bf16-stochastic", "bf16-masters")
HERE = ("32-true", "bf16-mixed", "16-mixed", *BF16_WEIGHTS, "fp8-emulated")  # on every device


def train_step(model, optimizer, scaler, dtype, loss_of, batch):
    """Take one step; return its loss. Without float16 the scaler is disabled and does nothing."""
    optimizer.zero_grad()
    device = next(model.parameters()).device.type
    with torch.autocast(device, dtype, enabled=dtype is not None):
        loss = loss_of(model, *batch)

    scaler.scale(loss).backward()  # DDP averages the scaled gradients
    scaler.unscale_(optimizer)  # before anything reads them: clipping does
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)  # skips, on all ranks or on none: it looks at the average
    scaler.update()

    return loss.detach()


# bfloat16 weights


def round_stochastically(x, generator):
    """Round float32 to one of the two nearest bfloat16, the nearer the likelier: right on average.

    bfloat16 is the upper half of float32's bits: add a random lower half, and cut it off.
    """
    noise = torch.randint(2**16, x.shape, generator=generator, device=x.device, dtype=torch.int32)
    return ((x.view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()


class RoundedAdamW:
    """AdamW in float32 for bfloat16 weights: keep float32 masters, or round stochastically."""

    def __init__(self, weights, lr, keep_masters, seed):
        self.weights = list(weights)
        self.keep_masters = keep_masters
        self.masters = [weight.detach().to(torch.float32, copy=True) for weight in self.weights]
        self.adamw = torch.optim.AdamW(self.masters, lr=lr)
        # The same numbers on every rank, or the replicas diverge.
        self.generator = torch.Generator(self.weights[0].device).manual_seed(seed)

    @torch.no_grad()
    def step(self):
        pairs = list(zip(self.masters, self.weights, strict=True))
        for master, weight in pairs:
            if not self.keep_masters:
                master.data = weight.float()
            master.grad = weight.grad.float()
        self.adamw.step()
        for master, weight in pairs:
            stochastic = not self.keep_masters and weight.dtype == torch.bfloat16
            weight.copy_(round_stochastically(master, self.generator) if stochastic else master)
            master.grad = None
            if not self.keep_masters:
                master.data = master.new_empty(0)  # nothing but the bfloat16 survives a step

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None


# float8


def quantize(x, dtype):
    """Round to float8; one scale per tensor makes its largest number the format's largest."""
    largest = torch.finfo(dtype).max
    scale = largest / x.abs().max().clamp(min=1e-12)
    return (x * scale).clamp(-largest, largest).to(dtype), scale


def keep(x, dtype):
    """Round nothing."""
    return x, torch.ones((), device=x.device)


def dequantize(numbers, scale):
    return numbers.float() / scale


class Float8Product(torch.autograd.Function):
    """y = x W^T of rounded x and W; backward multiplies them with a rounded gradient."""

    @staticmethod
    def forward(ctx, x, weight, rounding):
        x, weight = rounding(x, E4M3), rounding(weight, E4M3)
        ctx.rounding = rounding
        ctx.save_for_backward(*x, *weight)  # float8: a byte per number
        return F.linear(dequantize(*x), dequantize(*weight))

    @staticmethod
    def backward(ctx, grad):
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        x, weight = dequantize(x, x_scale), dequantize(weight, weight_scale)
        grad = dequantize(*ctx.rounding(grad, E5M2))
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2), None


def in_a_block(module, name):
    """Choose the linear layers of the blocks: the head decides between near-equal logits."""
    return isinstance(module, nn.Linear) and name != "head"


def emulate_float8(model, rounding):
    for name, module in model.named_modules():
        if in_a_block(module, name):
            module.forward = lambda x, w=module.weight: Float8Product.apply(x, w, rounding)


def use_torchao(model):
    """Have a GPU multiply in float8: per-tensor scales, as above."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    convert_to_float8_training(model, config=config, module_filter_fn=in_a_block)


# training


def prepare(model, precision, args, rounds=True):
    """Turn a float32 model into one that trains in this precision; return optimizer and scaler.

    Without `rounds` all numbers stay float32, and everything else is the same: for a check.
    """
    if precision in BF16_WEIGHTS and rounds:
        model.bfloat16()
    elif precision == "fp8-emulated":
        emulate_float8(model, quantize if rounds else keep)
    elif precision == "fp8":
        use_torchao(model)
    weights = list(model.parameters())
    if precision in ("bf16-stochastic", "bf16-masters"):
        optimizer = RoundedAdamW(weights, args.lr, precision == "bf16-masters", args.seed)
    else:
        optimizer = torch.optim.AdamW(weights, lr=args.lr)
    device, enabled = weights[0].device.type, precision == "16-mixed"
    return optimizer, torch.amp.GradScaler(device, init_scale=args.loss_scale, enabled=enabled)


def train(job, precision, steps, loss_of=part.loss_of, rounds=True):
    """Train under DDP; return model, optimizer, this rank's losses, and the steps it skipped."""
    model = job.build()
    optimizer, scaler = prepare(model, precision, job.args, rounds)
    ddp = DDP(model)
    dtype = AUTOCAST.get(precision) if rounds else None
    losses, skipped = [], []
    for step, batch in enumerate(job.batches(steps, job.rank)):
        scale = scaler.get_scale()
        losses.append(train_step(ddp, optimizer, scaler, dtype, loss_of, batch))
        skipped += [step] * (scaler.get_scale() < scale)
    return model, optimizer, torch.stack(losses), skipped


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, positive = parser.add_argument, cli.positive_int
    add("--precision", choices=("all", *HERE, "fp8"), default="all",
        help="one of these, beside 32-true (all that this device has)")  # fmt: skip
    add("--micro-batch-size", type=positive, default=4, help="sequences per rank and step (4)")
    add("--seq-len", type=positive, default=64, help="tokens per sequence (64)")
    add("--num-layers", type=positive, default=2, help="blocks of the tiny preset (2)")
    add("--max-steps", type=positive, default=30, help="training steps of each precision (30)")
    add("--lr", type=cli.positive_float, default=2e-3, help="learning rate of AdamW (0.002)")
    add("--loss-scale", type=cli.positive_float, default=65536, help="first scale, float16 (65536)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("05-advanced/low_precision.py", args, world, device)
        job = part.Job(args, world, device)
        if args.precision == "fp8":
            part.refuse_fp8(device)
        report.start(f"{job.config.num_parameters():,} weights")

        part.list_formats(report)
        precisions = part.chosen(args, device, report, HERE)
        trained = {name: train(job, name, args.max_steps) for name in precisions}
        part.check_memory(report, job, trained, train, AUTOCAST)
        for name in precisions:
            if name != "fp8":  # its rounding is in torchao's kernels
                part.check_parity(report, job, name, train, round_stochastically)
        part.check_underflow(report, job, trained["32-true"][0])
        part.check_lost_updates(report, job, RoundedAdamW)
        if report.output and world.is_rank0:
            part.draw_ranges(report, job, trained["32-true"][0])
        return report.finish("each precision trains as one process does with the same rounding")


if __name__ == "__main__":
    cli.run(main)
