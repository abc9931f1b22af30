"""What ddp_benchmark.py times, compares and draws."""

import torch
import torch.nn.functional as F

from legacy_common import models, runtime
from legacy_common.lab.figure import figure

TIMES = ("full", "slowest", "mean", "alone", "ideal")
PARTS = ("ideal", "small batch", "shared cores", "stragglers", "communication")
SEQ_LEN, IMAGE_SIZE = 128, 64  # tokens, pixels


def build(name, device):
    """Return a model, the same on every rank, and a function that makes up a batch of a size."""
    runtime.seed_everything(0)
    if name == "resnet50":
        from torchvision.models import resnet50  # two seconds that the transformer saves

        def batch(size):  # images (B, 3, H, W), labels (B,)
            return torch.randn(size, 3, IMAGE_SIZE, IMAGE_SIZE), torch.randint(1000, (size,))

        return resnet50().to(device), batch

    def batch(size):  # tokens to read and to predict, (B, T) each
        return tuple(torch.randint(256, (size, SEQ_LEN)) for _ in range(2))

    return models.Transformer(models.PRESETS["tiny"]).to(device), batch


def gradient_norm(model, batch):
    """Return the norm of the gradient of the global batch, the same on any number of ranks."""
    model.eval()  # else batch norm would compute with the mean of a rank's samples
    inputs, targets = batch
    F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    model.zero_grad(set_to_none=False)
    model.train()
    return norm.item()


def show_scaling(report, args, found):
    """Print and draw what a step takes on each number of ranks, and where it goes."""
    rows = []
    strong = []
    noise = 0.0
    efficiency = {"strong": [], "weak": []}
    for kind in efficiency:
        for ranks, metrics in found.items():
            full, slowest, mean, alone, ideal = (metrics[f"{kind}_{name}_ms"] for name in TIMES)
            parts = (ideal, alone - ideal, mean - alone, slowest - mean, full - slowest)
            efficiency[kind].append(100 * ideal / full)
            numbers = [f"{value:.1f} ms" for value in (full, *parts)]
            rows.append((kind, str(ranks), *numbers, f"{100 * ideal / full:.0f}%"))
            report.metrics[f"{kind}_step_time_ms_{ranks}"] = full
            report.metrics[f"{kind}_efficiency_{ranks}"] = ideal / full
            strong += [parts] if kind == "strong" else []
            if ranks == 1:
                noise = max(noise, *map(abs, parts[1:]))
    report.metrics["noise_ms"] = noise
    report.say("a step is the sum of ideal and four losses:")
    report.table(rows, ("scaling", "ranks", "step", *PARTS, "efficiency"))
    report.say(f"noise {noise:.1f} ms: one rank loses nothing, and its rows show up to that")
    if report.output:
        title = f"{args.model}, global batch {args.global_batch_size}"
        columns = dict(zip(PARTS, zip(*strong, strict=True), strict=True))
        draw(report.output / "scaling.png", list(found), columns, efficiency, title)
    expected = found[1]["gradient_norm"]
    for ranks, metrics in list(found.items())[1:]:
        # A ReLU at its kink may turn a last bit into a different gradient: resnet50 has those.
        tolerance = expected * (1e-4 if args.model == "resnet50" else 1e-5)
        name = f"{ranks} ranks: norm of the gradient"
        report.check(name, metrics["gradient_norm"], expected, tolerance, "one process")


def draw(path, ranks, parts, efficiency, title):
    """Draw a step's milliseconds, stacked, and the efficiencies. Shapes: lists as long as ranks."""
    with figure(path, 1, 2, figsize=(9, 3.6)) as (left, right):
        names = [str(number) for number in ranks]
        floor = [0.0] * len(ranks)
        for name, values in parts.items():
            heights = [max(value, 0.0) for value in values]  # noise may make a part negative
            left.bar(names, heights, 0.6, bottom=floor, label=name)
            floor = [below + height for below, height in zip(floor, heights, strict=True)]
        steps = [sum(values) for values in zip(*parts.values(), strict=True)]
        places = range(len(names))
        ends = [place - 0.35 for place in places], [place + 0.35 for place in places]
        left.hlines(steps, *ends, colors="black", label="the step")
        left.set(title=f"A step of strong scaling\n({title})", xlabel="ranks", ylabel="ms")
        left.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)  # beside the bars
        right.axhline(100, color="grey", linestyle="--", linewidth=1)
        for name, percents in efficiency.items():
            right.plot(names, percents, marker="o", label=name)
        right.set(title="Efficiency against ideal", xlabel="ranks", ylabel="percent")
        right.set_ylim(0, 110)
        right.legend()
        right.grid(alpha=0.3)
