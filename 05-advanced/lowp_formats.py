"""Floating-point formats: formulas and what casts find; rounded sums; the pictures."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from dist_common.report import Report, figure

OTHER_SEED = "32-true, other weights"  # what the draw of the first weights alone changes


@dataclass(frozen=True)
class Format:
    """A floating-point format by its bits; one more is the sign."""

    dtype: torch.dtype
    exponent: int  # bits
    mantissa: int  # bits, without the leading 1 that is not stored
    has_infinity: bool = True  # e4m3fn gives all of the last binade to numbers, but one to NaN

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def spacing(self) -> float:
        """The distance from 1 to the next number."""
        return 2.0**-self.mantissa

    @property
    def normal(self) -> float:
        """The smallest number with a whole mantissa."""
        return 2.0 ** (1 - self.bias)

    @property
    def subnormal(self) -> float:
        """The smallest number above 0."""
        return self.normal * self.spacing

    @property
    def largest(self) -> float:
        last, unused = (self.bias, 1) if self.has_infinity else (self.bias + 1, 2)
        return 2.0**last * (2 - unused * self.spacing)

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """Round by arithmetic, half to even, without the dtype: for |x| up to `largest`."""
        exponent = torch.frexp(x.double())[1] - 1
        step = torch.exp2((exponent.clamp(min=1 - self.bias) - self.mantissa).double())
        return ((x / step).round() * step).to(x.dtype)  # torch.round rounds half to even


FORMATS = {
    "fp32": Format(torch.float32, 8, 23),
    "bf16": Format(torch.bfloat16, 8, 7),
    "fp16": Format(torch.float16, 5, 10),
    "fp8 e5m2": Format(torch.float8_e5m2, 5, 2),
    "fp8 e4m3": Format(torch.float8_e4m3fn, 4, 3, has_infinity=False),
}


def holds(dtype: torch.dtype, number: float) -> bool:
    """Say whether a cast to the dtype and back keeps the number."""
    exact = torch.tensor(number, dtype=torch.float64)
    return bool(exact.to(dtype).double() == exact)


def explore(dtype: torch.dtype) -> dict[str, float]:
    """Find a format's limits by casts alone: its spacing at 1, largest and smallest numbers."""
    spacing = 1.0
    while holds(dtype, 1 + spacing / 2):
        spacing /= 2
    largest = 1.0
    while holds(dtype, 2 * largest):
        largest *= 2
    step = largest / 2  # the binade of the largest power of two: add what still fits
    while step >= largest * spacing / 2:
        largest += step if holds(dtype, largest + step) else 0
        step /= 2
    subnormal = 1.0
    while holds(dtype, subnormal / 2):
        subnormal /= 2
    normal = 1.0
    while holds(dtype, normal / 2 * (1 + spacing)):
        normal /= 2
    return {"largest": largest, "normal": normal, "subnormal": subnormal, "spacing": spacing}


def check_formats(report: Report) -> None:
    """Print what each format can hold, and check it against the formula of its bits."""
    rows = []
    for name, form in FORMATS.items():
        found = explore(form.dtype)
        for kind, value in found.items():
            source = "formula of exponent and mantissa bits"
            report.check(f"{name}: {kind} / formula", value / getattr(form, kind), 1, 0, source)
        bits = f"{form.exponent} + {form.mantissa}"
        # Specifications leave open whether e4m3 gives NaN or its largest number.
        over = torch.tensor(2 * found["largest"], dtype=torch.float64).to(form.dtype).float()
        numbers = (*found.values(), over.item())
        rows.append((name, bits, *(f"{number:.3g}" for number in numbers)))
    headers = ("format", "exponent + mantissa", "largest", "smallest normal", "smallest",
               "spacing at 1", "2 x largest")  # fmt: skip
    report.table(rows, headers)


# sums


def error_of_sum(terms: int) -> tuple[float, float]:
    """Return the relative error of a bfloat16 sum, added one after the other, and its formula.

    A rounding errs by spacing / sqrt(12), 1 / m^2 of which is left of a mantissa m from 1 to 2:
    3 / (8 ln 2) in the mean. Partial sums of k random terms have length sqrt(k).
    """
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(terms, 5_000, generator=generator).bfloat16()
    total = numbers[0]
    for term in numbers[1:]:
        total = total + term
    exact = numbers.double().sum(dim=0)
    measured = ((total.double() - exact).norm() / exact.norm()).item()
    rounding = FORMATS["bf16"].spacing / math.sqrt(12) * math.sqrt(3 / (8 * math.log(2)))
    return measured, rounding * math.sqrt(sum(range(2, terms + 1)) / terms)


def check_sums(report: Report) -> None:
    """Print how the error of a bfloat16 reduction grows with the ranks whose gradients it adds."""
    rows = []
    for terms in (2, 8, 64, 512):
        measured, expected = error_of_sum(terms)
        source = "random walk of the rounding errors"
        report.check(f"{terms} ranks: bf16 sum, error / formula", measured / expected, 1, 0.2,
                     source)  # fmt: skip
        rows.append((terms, f"{measured:.2%}", f"{expected:.2%}"))
    report.metrics["error of bf16 sums"] = {row[0]: row[1] for row in rows}
    report.table(rows, ("gradients added in bf16", "relative error", "formula"))


def draw_ranges(path: Path, step: list[torch.Tensor], scale: float) -> None:
    """Draw the range of each format above the magnitudes of a training step's numbers.

    `step` is weights, activations and gradients as vectors; the gradients come scaled too.
    """
    low, high = -13, 6  # powers of ten that are shown
    with figure(path, 2, 1, figsize=(8, 5.5), sharex=True) as (top, bottom):
        for row, form in enumerate(reversed(FORMATS.values())):
            ends = (form.subnormal, form.normal, form.largest)
            left, middle, right = (min(max(math.log10(end), low), high) for end in ends)
            top.barh(row, middle - left, left=left, color="#9ecae1", height=0.6)
            top.barh(row, right - middle, left=middle, color="#3182bd", height=0.6)
            for x, arrow, beyond in ((left, "<", ends[0]), (right, ">", ends[2])):
                if not 10**low < beyond < 10**high:
                    top.plot(x, row, arrow, color="black", clip_on=False, markersize=7)
            digits = f"{form.mantissa + 1} bits of precision"
            top.text((middle + right) / 2, row, digits, ha="center", va="center", color="white",
                     fontsize=8)  # fmt: skip
        top.set_yticks(range(len(FORMATS)), list(reversed(FORMATS)))
        top.set_title("range of each format (light: subnormal, fewer bits)", fontsize=10)
        powers = range(low + 1, high + 1, 2)
        top.set_xticks(powers, [f"1e{power}" for power in powers])
        top.tick_params(labelbottom=True)
        weights, activations, gradients = (numbers.cpu() for numbers in step)
        shown = {
            "weights": weights, "activations": activations, "gradients of activations": gradients,
            f"the same x {scale:,.0f}": gradients * scale,
        }  # fmt: skip
        colors = ("#756bb1", "#31a354", "#e6550d", "#e6550d")
        for (name, numbers), color in zip(shown.items(), colors, strict=True):
            sizes = numbers[numbers != 0].abs().double().log10()
            counts = torch.histc(sizes, bins=(high - low) * 4, min=low, max=high) / len(numbers)
            places = torch.linspace(low, high, len(counts) + 1)[:-1] + 1 / 8
            dashed = "--" if "same" in name else "-"
            bottom.plot(places, 100 * counts, dashed, color=color, label=name)
        smallest = math.log10(FORMATS["fp16"].subnormal / 2)
        bottom.axvline(smallest, color="gray", linewidth=1, linestyle=":")
        bottom.text(smallest - 0.15, bottom.get_ylim()[1] * 0.9, "float16 rounds\nto 0", ha="right",
                    va="top", fontsize=8, color="gray")  # fmt: skip
        bottom.set_title("numbers of a training step", fontsize=10)
        bottom.set_ylabel("% per quarter of a decade")
        bottom.set_xlabel("magnitude")
        bottom.legend(fontsize=8)
        bottom.set_xlim(low, high)


def draw_losses(path: Path, losses: dict[str, torch.Tensor]) -> None:
    """Draw each precision's loss less float32's, by step; float32 with another seed is noise."""
    exact = losses["32-true"]
    with figure(path, figsize=(8, 3.6)) as axes:
        for name, values in losses.items():
            if name == OTHER_SEED:
                axes.plot(values - exact, color="lightgray", linewidth=4, label=name, zorder=0)
            elif name != "32-true":
                axes.plot(values - exact, label=name)
        axes.axhline(0, color="black", linewidth=1)
        axes.set_xlabel("step")
        axes.set_ylabel("loss minus that of 32-true")
        axes.legend(fontsize=8, ncol=2)
