"""How far predictions are from published figures: by source, by feature, beside others' models."""

from __future__ import annotations

import csv
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from planner import models
from planner.compute import model_flops
from planner.published import ANCHORS, SINGLE_NODE, Row

ALIKE = 0.01  # two measurements closer than this are not ranked: runs differ by as much


@dataclass(frozen=True)
class Compared:
    """A row with what was measured and predicted, in one unit."""

    row: object
    measured: float
    predicted: float
    fitted: bool  # the constants were fitted on this row among others

    @property
    def error(self) -> float:
        """Signed, as a share of the measured value."""
        return self.predicted / self.measured - 1


def percentile(values: Iterable[float], share: float) -> float:
    """Return a percentile, between the two nearest values if it falls between them."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class Errors:
    """Errors of some rows: of their sizes the median, mean and 95th percentile; the median sign."""

    count: int
    median: float
    mean: float
    p95: float
    bias: float


def errors_of(errors: Sequence[float]) -> Errors:
    """Return the statistics of signed errors.

    Raises: ValueError without errors.
    """
    if not errors:
        raise ValueError("no errors")
    sizes = [abs(error) for error in errors]
    return Errors(len(errors), median(sizes), fmean(sizes), percentile(sizes, 0.95), median(errors))


def by(compared: Iterable[Compared], key: Callable) -> dict[str, list[Compared]]:
    """Return rows by a key, in order of their first."""
    groups = defaultdict(list)
    for each in compared:
        groups[key(each.row)].append(each)
    return dict(groups)


@functools.cache
def table_share(model) -> float:
    """Return the share of a model's active weights that one table of its vocabulary has."""
    return models.table_parameters(model) / models.active_parameters(model)


def features_of(row: Row) -> list[str]:
    """Return what a run has that a term of the model is for."""
    job, layout, model = row.job, row.layout, row.job.model
    nodes = layout.gpus > row.cluster.gpus_per_node
    table = table_share(model)
    has = {
        "tensor parallel": layout.tp > 1,
        "tensor parallel across nodes": layout.tp > row.cluster.gpus_per_node,
        "pipeline": layout.pp > 1,
        "pipeline, interleaved": layout.virtual_stages > 1,
        "context parallel": layout.cp > 1,
        "experts": model.experts > 0,
        "FSDP": layout.zero == 3 and job.stack != "deepspeed",
        "FSDP across nodes": layout.zero == 3 and job.stack != "deepspeed" and nodes,
        "ZeRO-3, tensor by tensor": layout.zero == 3 and job.stack == "deepspeed",
        "full recomputation": layout.recompute == "full",
        "sequences of 16k and longer": job.seq_len >= 16_384,
        "large vocabulary": table > 0.15,
        "8 or 4 bits": job.precision.startswith(("fp8", "fp4")),
    }
    return [name for name, is_so in has.items() if is_so]


def feature_biases(compared: list[Compared]) -> dict[str, Errors]:
    """Return errors of all rows that have a feature, fitted or not, without the single node's."""
    found: dict[str, list[float]] = {}
    for each in compared:
        if not is_single(each.row):
            for feature in features_of(each.row):
                found.setdefault(feature, []).append(each.error)
    return {feature: errors_of(own) for feature, own in found.items()}


def naive_seconds(rows: Sequence[Row], half: set[str]) -> dict[str, float]:
    """Return each row's step time if every GPU type had one MFU: its median on the fitted half.

    vTrain's single node has an MFU of its own: its small models would move all of A100's.
    """

    def kind(row: Row) -> tuple[str, bool]:
        return row.cluster.gpu.name, is_single(row)

    def mfu(row: Row) -> float:
        return model_flops(row.job) / row.step_time_s / row.layout.gpus / peak(row)

    found = defaultdict(list)
    for row in rows:
        if row.id in half:
            found[kind(row)].append(mfu(row))
    usual = median(value for values in found.values() for value in values)
    return {
        row.id: model_flops(row.job)
        / row.layout.gpus
        / peak(row)
        / (median(found[kind(row)]) if found[kind(row)] else usual)
        for row in rows
    }


def peak(row: Row) -> float:
    tflops = row.cluster.gpu.tflops
    return (tflops.get(row.job.precision.split("-")[0]) or tflops["bf16"]) * 1e12


def peers(quantity: str = "step_time_s") -> dict[str, dict[str, float]]:
    """Return signed errors of other models by peer and id (planner/data)."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    with (ANCHORS / "peer_predictions.csv").open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if line["quantity"] == quantity and line["signed_err_pct"]:
                found[line["peer"]][line["id"]] = float(line["signed_err_pct"]) / 100
    return dict(found)


def strategy_pairs(compared: Iterable[Compared], within_group: bool) -> tuple[int, int]:
    """Return how many pairs that differ in strategy only are ranked, and how many rightly.

    The same model, sequence, batch, GPUs and precision of one source; with `within_group`, one
    group of the published table as well (as a rule one layout, with other micro-batches,
    recomputation, schedules or kernels). Pairs measured within 1% of each other are left out.
    """
    groups = defaultdict(list)
    for each in compared:
        row = each.row
        shape = (row.job.model.layers, row.job.model.hidden, row.job.seq_len)
        size = (row.job.global_batch, row.layout.gpus, row.job.precision, row.cluster.gpu.name)
        groups[row.source.split(" line ")[0], shape, size, row.group * within_group].append(each)
    ranked = right = 0
    for members in groups.values():
        for index, one in enumerate(members):
            for two in members[index + 1 :]:
                if (one.row.job, one.row.layout) == (two.row.job, two.row.layout):
                    continue
                measured = one.measured / two.measured
                if abs(measured - 1) <= ALIKE:
                    continue
                ranked += 1
                right += (measured > 1) == (one.predicted > two.predicted)
    return ranked, right


def is_single(row: Row) -> bool:
    return row.short_source == SINGLE_NODE
