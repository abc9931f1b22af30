"""What low_precision.py claims, measured: formats, parity, memory, underflow, lost updates."""

import copy
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from advanced_parts.kept_bytes import kept_for_backward, storages
from legacy_common import cli, data, models, runtime
from legacy_common.lab import proofs
from legacy_common.lab.figure import figure
from legacy_common.lab.traffic import TrafficCounter
from legacy_common.report import Report

SHOWN_STEPS = 3  # compared with one process
MANY = 50  # steps in which lost updates would have added up
FLOAT32_SUM = 1e-5  # relative: float32 keeps 6e-8 of a number; other order of a sum of N ranks

# Bytes per weight of weights, gradients and optimizer state, between two steps: bf16-masters keeps
# float32 weights beside Adam's two float32 moments.
BF16_WEIGHTS = {"bf16-true": (2, 2, 4), "bf16-stochastic": (2, 2, 8), "bf16-masters": (2, 2, 12)}
FLOAT32_WEIGHTS = (4, 4, 8)  # of all other precisions

# dtype, bits of exponent and of mantissa; one more is the sign.
FORMATS = {
    "fp32": (torch.float32, 8, 23),
    "bf16": (torch.bfloat16, 8, 7),
    "fp16": (torch.float16, 5, 10),
    "fp8 e5m2": (torch.float8_e5m2, 5, 2),
    "fp8 e4m3": (torch.float8_e4m3fn, 4, 3),
}


def smallest(dtype: torch.dtype) -> float:
    """Return the smallest power of two that a cast keeps."""
    powers = torch.exp2(-torch.arange(150, dtype=torch.float64))
    return powers[powers.to(dtype).double() == powers].min().item()


def list_formats(report: Report) -> None:
    """Print what each format can hold."""
    rows = []
    for name, (dtype, exponent, mantissa) in FORMATS.items():
        info = torch.finfo(dtype)
        # Specifications leave open whether e4m3 gives NaN or its largest number.
        over = torch.tensor(2 * info.max, dtype=torch.float64).to(dtype).item()
        numbers = info.max, info.tiny, smallest(dtype), info.eps, over
        rows.append((name, f"{exponent} + {mantissa}", *(f"{number:.3g}" for number in numbers)))
    held = "largest", "smallest normal", "smallest", "spacing at 1", "2 x largest"
    report.table(rows, ("format", "exponent + mantissa", *held))


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss per token, computed in float32. Shapes: (B, T) both."""
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


class Job:
    """The model and the batches that every precision trains on.

    Raises: UsageError for a loss scale that would round, and a sequence that is too long.
    """

    def __init__(self, args, world, device) -> None:
        if math.frexp(args.loss_scale)[0] != 0.5:
            problem = f"must be a power of two, not {args.loss_scale:g}: others round"
            raise cli.UsageError(f"--loss-scale {problem}")
        self.args = args
        self.device = device
        self.seed = args.seed  # of the weights
        self.rank = world.rank
        self.ranks = world.world_size
        self.config = replace(models.preset("tiny", args.seq_len), num_layers=args.num_layers)
        count = max(args.max_steps, SHOWN_STEPS) * self.ranks * args.micro_batch_size
        self.text = data.Sequences(data.load_text(), args.seq_len, count)

    def build(self) -> models.Transformer:
        """Return the model with the weights of `seed`, in float32."""
        runtime.seed_everything(self.seed)
        return models.Transformer(self.config).to(self.device)

    def batches(self, steps: int, rank: int) -> Iterator[list[torch.Tensor]]:
        """Yield a rank's micro-batch of each step. Shapes: inputs and targets (B, T)."""
        size = self.args.micro_batch_size
        return data.batches_of(self.text, steps, size * self.ranks, rank * size, size, self.device)

    def loss(self, model: nn.Module, dtype=None, batch=None) -> torch.Tensor:
        """Return the loss of a batch, this rank's first one if none is given; autocast to dtype."""
        batch = batch or next(self.batches(1, self.rank))
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            return loss_of(model, *batch)


def refuse_fp8(device: torch.device) -> None:
    """Raise UsageError where this device or installation cannot multiply in float8."""
    needs = "--precision fp8 needs a GPU of compute capability 8.9 or later (L40S, H100)"
    if device.type != "cuda":
        raise cli.UsageError(f"{needs}, not the CPU")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise cli.UsageError(f"{needs}: {torch.cuda.get_device_name(device)} has {major}.{minor}")
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


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers of the blocks."""
    return [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]


def round_scaled(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round so that the largest number becomes the format's largest."""
    scale = torch.finfo(dtype).max / x.abs().max().clamp(min=1e-12)
    return (x * scale).to(dtype).float() / scale


def simulate_float8(model: nn.Module) -> None:
    """Give the blocks' linear layers factors and gradients on float8's grid, in float32 only."""

    def forward(weight, x):
        factors = [x.clone(), weight.clone()]  # whose gradients are those of x and weight
        for factor in factors:
            factor.data = round_scaled(factor.detach(), torch.float8_e4m3fn)
        out = F.linear(*factors)
        out.register_hook(lambda grad: round_scaled(grad, torch.float8_e5m2))
        return out

    for layer in linear_layers(model):
        layer.forward = partial(forward, layer.weight)


def train_alone(job: Job, name: str, rounder: Callable) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Train in one process: each rank's micro-batch in turn, averaged in the gradient's dtype.

    Returns losses (SHOWN_STEPS, ranks), the first gradient without overflow, clipped to length 1,
    and its step. Raises: UsageError if float16 overflows in each step.
    """
    model = job.build()
    if name in BF16_WEIGHTS:
        model.bfloat16()
    if name == "fp8-emulated":
        simulate_float8(model)
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(name)
    scale = job.args.loss_scale if name == "16-mixed" else 1.0
    weights = list(model.parameters())
    held = torch.bfloat16 if name == "bf16-true" else torch.float32  # what AdamW updates
    exact = proofs.flat(weights).to(held)
    adamw = torch.optim.AdamW([exact], lr=job.args.lr)
    generator = torch.Generator(job.device).manual_seed(job.args.seed)
    losses, first = [], None
    streams = (job.batches(SHOWN_STEPS, rank) for rank in range(job.ranks))
    for step, micro_batches in enumerate(zip(*streams, strict=True)):
        found = [job.loss(model, dtype, batch) for batch in micro_batches]
        losses.append(torch.stack(found).detach())
        scaled = (loss * scale for loss in found)
        gradient = proofs.gradient_of_one_process(model, scaled) / job.ranks
        length = (gradient.double() / scale).norm().item()
        if not math.isfinite(length):  # float16 overflowed: skip the step, halve the scale
            scale /= 2
            continue
        gradient = gradient / scale / max(length, 1.0)
        first = first or (gradient, step)
        exact.grad = gradient.to(held)
        adamw.step()
        if name == "bf16-stochastic":
            parts = exact.split([weight.numel() for weight in weights])
            exact.copy_(torch.cat([rounder(part, generator) for part in parts]))
        nn.utils.vector_to_parameters(exact.to(weights[0].dtype), weights)
    if first is None:
        many = f"float16 overflows in the first {SHOWN_STEPS} steps: take a smaller one"
        raise cli.UsageError(f"--loss-scale {job.args.loss_scale:g}: {many}")
    return torch.stack(losses), *first


def check_parity(report: Report, job: Job, name: str, train: Callable, rounder: Callable) -> None:
    """Check the first gradient and losses under DDP against one process that rounds alike.

    Without its rounding a precision must train as float32 does, both under DDP.
    """

    def check(kind, model, losses, gradient, expected, tolerances, source):
        check = f"{name}: gradient{kind}, relative error"
        proofs.same_gradient(report, model, gradient, tolerances[0], check, source)
        error = max(runtime.gather(((losses - expected).abs() / expected).max().item()))
        report.check(f"{name}: losses{kind}, relative error", error, 0, tolerances[1], source)

    tolerances = FLOAT32_SUM, FLOAT32_SUM if name == "32-true" else 1e-3
    if name in BF16_WEIGHTS:
        # Sums over the ranks in another order: half a spacing for each addition. A later step
        # starts from weights that differ by as much.
        tolerances = job.ranks * torch.finfo(torch.bfloat16).eps, 1e-2
    expected, gradient, step = train_alone(job, name, rounder)
    model = train(job, name, step + 1)[0]
    losses = train(job, name, SHOWN_STEPS)[2]
    source = "one process, each rank's micro-batch in turn, rounded alike"
    check("", model, losses, gradient, expected[:, job.rank], tolerances, source)
    if name != "32-true":
        pair = name, "32-true"
        model, exact = (train(job, kind, 1, rounds=False)[0] for kind in pair)
        losses, expected = (train(job, kind, SHOWN_STEPS, rounds=False)[2] for kind in pair)
        gradient = proofs.flat(weight.grad for weight in exact.parameters())
        tolerances, source = (FLOAT32_SUM, FLOAT32_SUM), "32-true under DDP"
        check(" without rounding", model, losses, gradient, expected, tolerances, source)


def tensors_of_a_step(job: Job, model: nn.Module, dtype=None, factor: float = 1.0):
    """Return weights, inputs of the blocks' linear layers, and gradients of their outputs.

    Each as one vector; in 16 bits under autocast. `factor` multiplies the loss.
    """
    found = []
    hooks = [
        layer.register_forward_hook(lambda layer, x, out: found.append((layer.weight, *x, out)))
        for layer in linear_layers(model)
    ]
    loss = job.loss(model, dtype) * factor
    for hook in hooks:
        hook.remove()
    weights, inputs, outputs = zip(*found, strict=True)
    return [proofs.flat(x) for x in (weights, inputs, torch.autograd.grad(loss, outputs))]


def check_underflow(report: Report, job: Job, model: nn.Module) -> None:
    """Print which share of activations' gradients float16 rounds to 0, with and without scaling.

    Check it against a cast of float64's gradients. A loss is a mean: a batch of 64 times the
    tokens has gradients of a 64th; the second half of the table multiplies the loss so.
    """
    double, rows = copy.deepcopy(model).double(), []
    step = job.ranks * job.args.micro_batch_size * job.args.seq_len
    for times, scale in ((n, by) for n in (1, 64) for by in (1.0, job.args.loss_scale)):
        exact = tensors_of_a_step(job, double, None, scale / times)[2]
        flushed = tensors_of_a_step(job, model, torch.float16, scale / times)[2]
        nonzero = exact.abs() > 1e-12 * exact.abs().max()  # below: what rounding leaves of 0
        own = ((kind == 0)[nonzero].float().mean().item() for kind in (flushed, exact.half()))
        zero, cast = (sum(runtime.gather(share)) / job.ranks for share in own)
        rows.append((f"{times * step:,}", f"{scale:g}", f"{zero:.2%}", f"{cast:.2%}"))
        name = f"tokens x {times}, scale {scale:g}: share that float16 rounds to 0"
        report.check(name, zero, cast, 0.1 * cast + 0.002, "float64's gradients, cast")
    headers = ("tokens per step", "loss scale", "float16 gradients of 0", "float64's, cast")
    report.table(rows, headers)


def check_lost_updates(report: Report, job: Job, rounded_adamw: Callable) -> None:
    """Print which share of bfloat16 weights AdamW leaves as they are, and what two cures do.

    Adam's first step changes every weight by the learning rate. A change below half the distance
    to the next bfloat16 is rounded away; stochastic rounding makes it a whole distance, seldom.
    Masters add up the changes of MANY steps: the weights are those of float32, rounded.
    """
    model = job.build().bfloat16()
    weights = proofs.flat(model.parameters())
    gradient = proofs.gradient_of_one_process(model, [job.loss(model)])
    moved = gradient.float().abs() > 1e-6  # below, Adam's eps of 1e-8 shortens the step
    before = weights[moved].float()
    spacing = torch.exp2(torch.frexp(before)[1].float() - 1) * torch.finfo(torch.bfloat16).eps
    adamw = torch.optim.AdamW
    masters = partial(rounded_adamw, keep_masters=True, seed=job.args.seed)
    stochastic = partial(masters, keep_masters=False)

    def updated(make: Callable, steps: int, dtype=torch.bfloat16) -> torch.Tensor:
        """Return the weights, which dtype holds, after steps with the same gradient."""
        held = weights.to(dtype, copy=True)
        held.grad = gradient.to(dtype)
        optimizer = make([held], lr)
        for _ in range(steps):
            optimizer.step()
        return held[moved].float()

    rows = []
    for lr in (1e-3, 1e-4, 1e-5):
        after = updated(masters, MANY)
        found = updated(adamw, 1) == before, lr < spacing / 2
        found += updated(adamw, MANY) == before, after == before
        shares = [chosen.float().mean().item() for chosen in found]
        worst = max(runtime.gather(abs(shares[0] - shares[1])))
        source = "weights of which half a spacing is above the learning rate"
        report.check(f"lr {lr:g}: updates lost, error of the share", worst, 0, 0.01, source)

        change = (before - updated(stochastic, 1)) * gradient[moved].float().sign()
        arrives = (change / lr).mean().item()
        name, source = "stochastic rounding: updates that arrive", "right on average"
        report.check(f"lr {lr:g}, {name}", arrives, 1, 0.05, source)

        exact = updated(adamw, MANY, torch.float32).bfloat16()
        wrong = sum(runtime.gather((after != exact).sum().item()))
        name = f"lr {lr:g}, masters, {MANY} steps: weights unlike float32's, rounded"
        report.check(name, wrong, 0, 0, "AdamW on float32 weights")
        report.metrics[f"weights unchanged at lr {lr:g}"] = shares
        rows.append((f"{lr:g}", *(f"{part:.1%}" for part in (*shares, arrives))))
    unchanged = "weights unchanged", "half spacing > rate", f"after {MANY} steps", "with masters"
    report.table(rows, ("learning rate", *unchanged, "stochastic: mean update"))


def kept_bytes(job: Job, model: nn.Module, dtype, times: int) -> int:
    """Count what autograd keeps of the blocks' linear layers for a batch, `times` over."""
    inside, hooks = [], []
    for layer in linear_layers(model):
        hooks.append(layer.register_forward_pre_hook(lambda *_: inside.append(0)))
        hooks.append(layer.register_forward_hook(lambda *_: inside.clear()))
    with kept_for_backward(model, counts=lambda: inside) as kept:
        job.loss(model, dtype, [part.repeat(times, 1) for part in next(job.batches(1, job.rank))])
    for hook in hooks:
        hook.remove()
    return sum(kept.values())


def state_bytes(model: nn.Module, optimizer) -> tuple[int, int, int]:
    """Sum the bytes of weights, their gradients, and all that the optimizer holds."""
    weights = list(model.parameters())
    adam = getattr(optimizer, "adamw", optimizer)
    state = [t for s in adam.state.values() for name, t in s.items() if name != "step"]
    masters = getattr(optimizer, "masters", [])
    kinds = weights, [w.grad for w in weights], [state, masters, [m.grad for m in masters]]
    return tuple(sum(s.nbytes() for s in storages(kind).values()) for kind in kinds)


def check_memory(report: Report, job: Job, trained: dict, train: Callable, autocast: dict) -> None:
    """Print each precision's loss, bytes per weight, kept bytes per token, DDP's; compare ranks."""
    N, tokens = job.config.num_parameters(), job.args.micro_batch_size * job.args.seq_len
    other, rows = copy.copy(job), []
    other.seed += 1
    noise = "32-true, other weights"  # what the draw of the first weights alone changes
    runs = trained | {noise: train(other, "32-true", job.args.max_steps)}
    for name, (model, optimizer, losses, _) in runs.items():
        # The last ten steps, over all ranks.
        loss = sum(runtime.gather(losses[-10:].float().mean().item())) / job.ranks
        report.metrics[f"{name}: loss"] = loss
        if name == noise:
            rows.append((name, f"{loss:.3f}", *[""] * 4))
            continue
        first, *others = runtime.gather(proofs.flat(model.parameters()).cpu())
        unlike = sum(not torch.equal(first, other) for other in others)
        report.check(f"{name}: ranks with weights unlike rank 0's", unlike, 0, 0, "bit by bit")
        held, state = state_bytes(model, optimizer), BF16_WEIGHTS.get(name, FLOAT32_WEIGHTS)
        kinds = zip(("weights", "gradients", "optimizer"), held, state, strict=True)
        for kind, measured, each in kinds:
            check = f"{name}, {kind}: bytes held"
            report.check(check, measured, each * N, 0, "bytes of each number")
        once, twice = (kept_bytes(job, model, autocast.get(name), times) for times in (1, 2))
        linears = (twice - once) // tokens
        copies = 2 * once - twice  # what does not grow with the batch
        report.metrics[f"{name}: bytes kept per token, and of weights cast"] = linears, copies
        with TrafficCounter() as counter:
            train(job, name, 1)
        sent, check = counter.nbytes["all_reduce"], f"{name}: bytes all-reduced by DDP"
        report.check(check, sent, state[1] * N, 0, "dtype of weights")
        per_weight = f"{' + '.join(str(size // N) for size in held)} = {sum(held) // N}"
        rows.append((name, f"{loss:.3f}", per_weight, sent // N, f"{linears:,}", f"{copies:,}"))
    report.say("bytes per weight, held and all-reduced by DDP; bytes kept for backward:")
    headers = "loss", "weights + grads + Adam", "DDP", "linears/token", "weights cast"
    report.table(rows, ("precision", *headers))


def draw_ranges(report: Report, job: Job, model: nn.Module) -> None:
    """Draw the range of each format above the magnitudes of a training step's numbers."""
    weights, activations, gradients = (x.cpu() for x in tensors_of_a_step(job, model))
    scale, bins = job.args.loss_scale, torch.logspace(-13, 6, 77).tolist()  # quarters of a decade
    path = report.output / "low_precision_ranges.png"
    with figure(path, 2, 1, figsize=(8, 5.5), sharex=True) as (top, bottom):
        for row, (dtype, _, mantissa) in enumerate(FORMATS.values()):
            info, least = torch.finfo(dtype), smallest(dtype)
            top.barh(row, info.max, left=least, color="C0", height=0.6)
            top.barh(row, info.tiny - least, left=least, color="#9ecae1", height=0.6)
            words = f"{mantissa + 1} bits of precision"
            top.text(2, row, words, ha="center", va="center", color="white", fontsize=8)
        top.set_yticks(range(len(FORMATS)), FORMATS)
        top.invert_yaxis()
        top.set_title("range of each format (light: subnormal, fewer bits)", fontsize=10)
        shown = {
            "weights": (weights, "-", "C4"),
            "activations": (activations, "-", "C2"),
            "gradients of activations": (gradients, "-", "C1"),
            f"the same x {scale:,.0f}": (gradients * scale, "--", "C1"),
        }
        for name, (numbers, line, color) in shown.items():
            style = {"histtype": "step", "linestyle": line, "color": color, "label": name}
            share = torch.full((len(numbers),), 100 / len(numbers))
            bottom.hist(numbers.abs(), bins, weights=share, **style)
        flushed = smallest(torch.float16) / 2
        bottom.axvline(flushed, color="gray", linestyle=":", label="below: 0 in float16")
        bottom.set_title("numbers of a training step", fontsize=10)
        bottom.set(xscale="log", xlim=(bins[0], bins[-1]), xlabel="magnitude")
        bottom.set_ylabel("% per quarter of a decade")
        bottom.legend(fontsize=8)
