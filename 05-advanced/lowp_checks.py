"""What low_precision.py claims, measured: parity with one process, underflow, lost updates."""

import copy
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from dist_common import cli, data, models, proofs, runtime
from dist_common.report import Report
from lowp_formats import FORMATS, OTHER_SEED, draw_losses, draw_ranges

SHOWN_STEPS = 3  # compared with one process
MANY = 50  # steps in which lost updates would have added up
FLOAT32_SUM = 1e-5  # relative: float32 keeps 6e-8 of a number; other order of a sum of N ranks


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss per token, computed in float32. Shapes: (B, T) both."""
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


class Job:
    """The model and the batches that every precision trains on."""

    def __init__(self, args, world, device) -> None:
        self.args, self.device = args, device
        self.seed = args.seed  # of the weights
        self.rank, self.ranks = world.rank, world.world_size
        tiny = models.preset("tiny", args.seq_len)
        self.config = replace(tiny, num_layers=args.num_layers)
        steps = max(args.max_steps, SHOWN_STEPS)
        count = steps * self.ranks * args.micro_batch_size
        self.text = data.Sequences(data.load_text(), args.seq_len, count)

    def build(self) -> models.Transformer:
        """Return the model with the weights of `seed`, in float32."""
        runtime.seed_everything(self.seed)
        return models.Transformer(self.config).to(self.device)

    def batches(self, steps: int, rank: int) -> Iterator[list[torch.Tensor]]:
        """Yield a rank's micro-batch of each step. Shapes: inputs and targets (B, T)."""
        size = self.args.micro_batch_size
        return data.batches_of(
            self.text, steps, size * self.ranks, rank * size, size, self.device
        )  # fmt: skip


def refuse_scale(scale: float) -> None:
    """Raise UsageError unless a loss scale is a power of two."""
    if math.frexp(scale)[0] != 0.5:
        raise cli.UsageError(f"--loss-scale must be a power of two, not {scale:g}: others round")


def refuse_fp8(device: torch.device) -> None:
    """Raise UsageError where this device or installation cannot multiply in float8."""
    needs = "--precision fp8 needs a GPU of compute capability 8.9 or later (L40S, H100)"
    if device.type != "cuda":
        raise cli.UsageError(f"{needs}, not the CPU")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise cli.UsageError(f"{needs}: {name} has {capability[0]}.{capability[1]}")
    if not importlib.util.find_spec("torchao"):
        raise cli.UsageError("--precision fp8 needs torchao: pip install torchao")


def chosen(args, device: torch.device, report: Report, everywhere: tuple[str, ...]) -> list[str]:
    """Return the precisions to train in, float32 first; `everywhere` are those of any device."""
    if args.precision != "all":
        return list(dict.fromkeys(["32-true", args.precision]))
    try:
        refuse_fp8(device)
    except cli.UsageError as error:
        report.say(f"skipped: {error}")
        return list(everywhere)
    return [*everywhere, "fp8"]


# one process


class Rounded(torch.autograd.Function):
    """Forward: round as a format with a scale per tensor does. Backward: pass on."""

    @staticmethod
    def forward(ctx, x, name):
        return round_scaled(x, name)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class RoundedGradient(torch.autograd.Function):
    """Forward: pass on. Backward: round."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return round_scaled(grad, ctx.name), None


def round_scaled(x: torch.Tensor, name: str) -> torch.Tensor:
    """Round by the format's arithmetic, so that the largest number becomes the format's largest."""
    form = FORMATS[name]
    scale = form.largest / x.abs().max().clamp(min=1e-12)
    return form.round((x * scale).clamp(-form.largest, form.largest)) / scale


def simulate_float8(model: nn.Module) -> None:
    """Give the blocks' linear layers factors and gradients on float8's grid, in float32 only."""
    for layer in model.blocks.modules():
        if isinstance(layer, nn.Linear):

            def forward(x, weight=layer.weight):
                x, weight = Rounded.apply(x, "fp8 e4m3"), Rounded.apply(weight, "fp8 e4m3")
                return RoundedGradient.apply(F.linear(x, weight), "fp8 e5m2")

            layer.forward = forward


def round_to_a_neighbour(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round to bfloat16, away from 0 as often as x is far from the neighbour at 0's side."""
    form = FORMATS["bf16"]
    exponent = (torch.frexp(x)[1] - 1).clamp(min=1 - form.bias)
    spacing = torch.exp2((exponent - form.mantissa).double())
    places = x.double().abs() / spacing
    draw = torch.randint(2**16, x.shape, generator=generator, device=x.device, dtype=torch.int32)
    away = places % 1 + draw / 2**16 >= 1
    return (x.sign() * (places.floor() + away) * spacing).bfloat16()


class AdamWAlone:
    """AdamW on the weights themselves, or on float32 copies that they are rounded from."""

    def __init__(self, weights: list[torch.Tensor], name: str, args) -> None:
        self.weights, self.name = weights, name
        rounded = name in ("bf16-stochastic", "bf16-masters")
        self.copies = [weight.detach().float() for weight in weights] if rounded else weights
        self.adamw = torch.optim.AdamW(self.copies, lr=args.lr)
        self.generator = torch.Generator(weights[0].device).manual_seed(args.seed)

    @torch.no_grad()
    def step(self) -> None:
        """Take a step from the weights' gradients."""
        if self.copies is not self.weights:
            for exact, weight in zip(self.copies, self.weights, strict=True):
                exact.grad = weight.grad.float()
        self.adamw.step()
        for exact, weight in zip(self.copies, self.weights, strict=True):
            if self.name == "bf16-masters":
                weight.copy_(exact.bfloat16())
            elif self.name == "bf16-stochastic":
                weight.copy_(round_to_a_neighbour(exact, self.generator))
                exact.copy_(weight)


def train_alone(job: Job, name: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Train in one process: each rank's micro-batch in turn, averaged in the gradient's dtype.

    Nothing of the script runs here. Returns losses (SHOWN_STEPS, ranks), the first gradient
    without overflow, clipped to length 1, and its step.
    """
    model = job.build()
    if name.startswith("bf16-") and name != "bf16-mixed":
        model.bfloat16()
    if name == "fp8-emulated":
        simulate_float8(model)
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(name)
    scale = job.args.loss_scale if name == "16-mixed" else 1.0
    weights, losses, first = list(model.parameters()), [], None
    optimizer = AdamWAlone(weights, name, job.args)
    streams = (job.batches(SHOWN_STEPS, rank) for rank in range(job.ranks))
    for step, micro_batches in enumerate(zip(*streams, strict=True)):
        total = [torch.zeros_like(weight) for weight in weights]
        for batch in micro_batches:
            with torch.autocast(job.device.type, dtype, enabled=dtype is not None):
                loss = loss_of(model, *batch)
            losses.append(loss.detach())
            for sum_, part in zip(total, torch.autograd.grad(loss * scale, weights), strict=True):
                sum_ += part / job.ranks
        length = math.sqrt(sum((part.double() / scale).square().sum() for part in total))
        if not math.isfinite(length):  # float16 overflowed: skip the step, halve the scale
            scale /= 2
            continue
        for weight, part in zip(weights, total, strict=True):
            weight.grad = part / scale / max(length, 1.0)
        first = first or (proofs.flat(weight.grad for weight in weights), step)
        optimizer.step()
    if first is None:
        many = f"float16 overflows in the first {SHOWN_STEPS} steps: take a smaller one"
        raise cli.UsageError(f"--loss-scale {job.args.loss_scale:g}: {many}")
    return torch.stack(losses).view(SHOWN_STEPS, job.ranks), *first


def tolerances(name: str, ranks: int) -> tuple[float, float]:
    """Return what gradient and loss may differ by, relative, from one process.

    Gradients in bfloat16 are summed over the ranks in another order: an error of half a spacing
    for each addition. A later step starts from weights that differ by as much.
    """
    if name in ("bf16-true", "bf16-stochastic", "bf16-masters"):
        return ranks * FORMATS["bf16"].spacing, 1e-2
    return FLOAT32_SUM, FLOAT32_SUM if name == "32-true" else 1e-3


def check_parity(report: Report, job: Job, name: str, train: Callable) -> None:
    """Check the first step's gradient, and losses under DDP, against one process."""
    expected_losses, expected, step = train_alone(job, name)
    model = train(job, name, step + 1)[0]
    losses = train(job, name, SHOWN_STEPS)[2]
    gradient, loss = tolerances(name, job.ranks)
    source = "one process, each rank's micro-batch in turn, rounded alike"
    error = relative(proofs.flat(p.grad for p in model.parameters()), expected)
    worst = max(runtime.gather(error))
    report.check(f"{name}: gradient, relative error", worst, 0, gradient, source)
    error = ((losses - expected_losses[:, job.rank]).abs() / expected_losses[:, job.rank]).max()
    worst = max(runtime.gather(error.item()))
    report.check(f"{name}: losses, relative error", worst, 0, loss, source)


def relative(measured: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error, relative to the largest number."""
    return ((measured - expected).abs().max() / expected.abs().max()).float().item()


def gradient_of(job: Job, model: nn.Module, dtype=None, scale: float = 1.0, loss_factor=1.0):
    """Return a plain model's gradient of this rank's first batch, after unscaling."""
    with torch.autocast(job.device.type, dtype, enabled=dtype is not None):
        loss = loss_of(model, *next(job.batches(1, job.rank))) * loss_factor
    grads = torch.autograd.grad(loss * scale, list(model.parameters()))
    return proofs.flat(grad / scale for grad in grads)


def check_rounding_off(report: Report, job: Job, name: str, train: Callable) -> None:
    """Check that a precision without its rounding trains as float32 does, both under DDP."""
    if name == "32-true":
        return
    models_of_a_step = (train(job, kind, 1, rounds=False)[0] for kind in (name, "32-true"))
    gradients = [proofs.flat(p.grad for p in model.parameters()) for model in models_of_a_step]
    losses = [train(job, kind, SHOWN_STEPS, rounds=False)[2] for kind in (name, "32-true")]
    for what, pair in (("gradient", gradients), ("losses", losses)):
        worst = max(runtime.gather(relative(*pair)))
        check = f"{name}: {what} without rounding, relative error"
        report.check(check, worst, 0, FLOAT32_SUM, "32-true under DDP")


def check_scaling(report: Report, job: Job) -> None:
    """Check that loss scaling by a power of two changes no bit, unless numbers under- or overflow.

    float16 is where they do: the share of gradients that differ is its metric.
    """
    model, scale = job.build(), job.args.loss_scale
    kinds = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    for name, dtype in kinds.items():
        plain, scaled = (gradient_of(job, model, dtype, by) for by in (1.0, scale))
        differ = sum(runtime.gather((plain != scaled).sum().item()))
        if name == "16-mixed":
            report.metrics["16-mixed: gradients changed by scaling"] = (
                differ / job.ranks / len(plain)
            )
        else:
            report.check(f"{name}: gradients changed by loss scaling", differ, 0, 0,
                         "a power of two changes the exponent alone")  # fmt: skip


def check_skips(report: Report, job: Job, train: Callable) -> None:
    """Spoil one rank's loss in the second step: every rank must skip it, and the same others."""
    calls = []

    def spoiled(model, *batch):
        calls.append(0)
        spoil = len(calls) == 2 and job.rank == job.ranks - 1
        return loss_of(model, *batch) * (float("inf") if spoil else 1.0)

    model, _, _, skipped = train(job, "16-mixed", SHOWN_STEPS, spoiled)
    lists = runtime.gather(skipped)
    right = sum(1 in steps and steps == lists[0] for steps in lists)
    source = "the overflow is in the average that all ranks hold"
    report.check("16-mixed: ranks that skip the step one rank spoiled", right, job.ranks, 0, source)
    proofs.same_weights(report, model)


# what float16 loses, and bfloat16 weights


def tensors_of_a_step(job: Job, model: nn.Module, dtype=None, factor: float = 1.0):
    """Return weights, inputs of the blocks' linear layers, and gradients of their outputs.

    Each as one vector; in 16 bits under autocast. `factor` multiplies the loss.
    """
    inputs, outputs = [], []
    layers = [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]

    def note(layer, received, returned):
        inputs.append(received[0])
        outputs.append(returned)

    hooks = [layer.register_forward_hook(note) for layer in layers]
    with torch.autocast(job.device.type, dtype, enabled=dtype is not None):
        loss = loss_of(model, *next(job.batches(1, job.rank)))
    grads = torch.autograd.grad(loss * factor, outputs)
    for hook in hooks:
        hook.remove()
    return [proofs.flat(kind) for kind in ([layer.weight for layer in layers], inputs, grads)]


def check_underflow(report: Report, job: Job, model: nn.Module) -> None:
    """Print which share of activations' gradients float16 rounds to 0, with and without scaling.

    Check it against a cast of float64's gradients. A loss is a mean: a batch of 64 times the
    tokens has gradients of a 64th; the second half of the table multiplies the loss so.
    """
    rows, source, double = [], "float64's gradients, cast", copy.deepcopy(model).double()
    step = job.ranks * job.args.micro_batch_size * job.args.seq_len
    for tokens in (1, 64):
        for scale in (1.0, job.args.loss_scale):
            factor = scale / tokens
            exact = tensors_of_a_step(job, double, factor=factor)[2]
            nonzero = exact.abs() > 1e-12 * exact.abs().max()  # below: what rounding leaves of 0
            cast = (exact.half() == 0)[nonzero].float().mean().item()
            flushed = tensors_of_a_step(job, model, torch.float16, factor)[2]
            zero = (flushed == 0)[nonzero].float().mean().item()
            zero, cast = (sum(runtime.gather(share)) / job.ranks for share in (zero, cast))
            rows.append((f"{tokens * step:,}", f"{scale:g}", f"{zero:.2%}", f"{cast:.2%}"))
            name = f"tokens x {tokens}, scale {scale:g}: share that float16 rounds to 0"
            report.metrics[name] = zero
            report.check(name, zero, cast, 0.1 * cast + 0.002, source)
    headers = ("tokens per step", "loss scale", "float16 gradients of 0", "float64's, cast")
    report.table(rows, headers)


def check_lost_updates(report: Report, job: Job, rounded_adamw: Callable) -> None:
    """Print which share of bfloat16 weights AdamW leaves as they are, and what two cures do.

    Adam's first step changes every weight by the learning rate. A change below half the distance
    to the next bfloat16 is rounded away; stochastic rounding makes it a whole distance, seldom.
    Masters add up the changes of MANY steps: the weights are those of float32, rounded.
    """

    def rounded(weights, lr, keep_masters=False):
        return rounded_adamw(weights, lr, keep_masters, job.args.seed)

    rows = []
    for lr in (1e-3, 1e-4, 1e-5):
        before, after, gradient = updated(job, lr, torch.optim.AdamW)
        exponent = torch.frexp(before)[1] - 1
        half_spacing = torch.exp2((exponent - FORMATS["bf16"].mantissa - 1).float())
        same = (after == before).float().mean().item()
        expected = (lr < half_spacing).float().mean().item()
        report.metrics[f"updates lost at lr {lr:g}"] = same
        source = "weights of which half a spacing is above the learning rate"
        worst = max(runtime.gather(abs(same - expected)))
        report.check(f"lr {lr:g}: updates lost, error of the share", worst, 0, 0.01, source)

        before, after, gradient = updated(job, lr, rounded)
        arrives = ((before - after) * gradient.sign() / lr).mean().item()
        name, source = "stochastic rounding: updates that arrive", "right on average"
        report.check(f"lr {lr:g}, {name}", arrives, 1, 0.05, source)

        exact = updated(job, lr, torch.optim.AdamW, MANY, torch.float32)[1]
        lost = (updated(job, lr, torch.optim.AdamW, MANY)[1] == before).float().mean().item()
        after = updated(job, lr, partial(rounded, keep_masters=True), MANY)[1]
        wrong = sum(runtime.gather((after != exact.bfloat16()).sum().item()))
        name = f"lr {lr:g}, masters, {MANY} steps: weights unlike float32's, rounded"
        report.check(name, wrong, 0, 0, "AdamW on float32 weights")
        kept = (after == before).float().mean().item()
        report.metrics |= {
            f"lost in {MANY} steps at lr {lr:g}": lost,
            f"masters lose at lr {lr:g}": kept,
        }
        rows.append(
            (f"{lr:g}", *(f"{share:.1%}" for share in (same, expected, lost, kept, arrives)))
        )
    headers = ("learning rate", "weights unchanged", "half spacing > rate", f"after {MANY} steps",
               "with masters", "stochastic: mean update")  # fmt: skip
    report.table(rows, headers)


def updated(
    job: Job, lr: float, make: Callable, steps: int = 1, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """Return bfloat16's weights before and after steps with one gradient, and it, as float32.

    `dtype`: what the weights are held in during the steps.
    """
    model = job.build().bfloat16()
    loss_of(model, *next(job.batches(1, job.rank))).backward()
    weights = list(model.to(dtype).parameters())
    gradient, before = proofs.flat(w.grad for w in weights).float(), proofs.flat(weights).float()
    optimizer = make(weights, lr)
    for _ in range(steps):
        optimizer.step()
    moved = gradient.abs() > 1e-6  # below, Adam's eps of 1e-8 shortens the step
    return [numbers[moved] for numbers in (before, proofs.flat(weights).float(), gradient)]


def draw(report: Report, job: Job, trained: dict) -> None:
    """Draw ranges beside a trained step's numbers, and each precision's loss less float32's."""
    step = tensors_of_a_step(job, trained["32-true"][0])
    draw_ranges(report.output / "low_precision_ranges.png", step, job.args.loss_scale)
    losses = {name: torch.tensor(report.metrics[f"{name}: losses"])
              for name in (*trained, OTHER_SEED)}  # fmt: skip
    draw_losses(report.output / "low_precision_loss.png", losses)
