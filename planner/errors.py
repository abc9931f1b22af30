"""Errors of predictions against published figures, and the runs most like a job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from planner import published
from planner.hardware import Cluster
from planner.job import Layout, TrainingJob
from planner.published import PublishedRun
from planner.step import step_seconds

NOISE = 0.01  # measurements that are closer than this are not ranked
FEWEST = 3  # rows that give an error


@dataclass(frozen=True)
class Compared:
    """A published run with its predicted figure, in the same unit."""

    run: PublishedRun
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Signed, as a share of the measured value."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Errors:
    """Median and 95th percentile of the errors' sizes, and the median signed error."""

    count: int
    median: float
    p95: float
    bias: float


def errors_of(errors: Iterable[float]) -> Errors:
    """Return the statistics of signed errors. Raises: ValueError without errors."""
    errors = list(errors)
    if not errors:
        raise ValueError("no errors")
    sizes = sorted(map(abs, errors))
    place = 0.95 * (len(sizes) - 1)
    low = int(place)
    high = min(low + 1, len(sizes) - 1)
    p95 = sizes[low] + (place - low) * (sizes[high] - sizes[low])
    return Errors(len(sizes), median(sizes), p95, median(errors))


def compare_steps(runs: Iterable[PublishedRun]) -> list[Compared]:
    """Return the runs with a step time, in seconds."""
    return [
        Compared(run, run.step_time_s, step_seconds(run.job, run.layout, run.cluster))
        for run in runs
        if run.step_time_s
    ]


def group_by(compared: Iterable[Compared], key: Callable[[PublishedRun], str]):
    """Return the rows of each key, in the order of the keys' first rows."""
    groups = defaultdict(list)
    for each in compared:
        groups[key(each.run)].append(each)
    return dict(groups)


# The published runs that are most like a job


def traits_of(job: TrainingJob, layout: Layout, cluster: Cluster) -> tuple[str, ...]:
    """Return the traits that errors depend on: GPU, model, bits, method, stack."""
    axes = layout.tp * layout.pp > 1
    method = "tensor or pipeline parallelism" if axes else "data parallelism"
    if job.adapter_rank:
        method = "adapters"
    narrow = job.precision.startswith(("fp8", "fp4"))
    return (
        cluster.gpu.name,
        "experts" if job.model.experts else "dense",
        "8 or 4 bits" if narrow else "16 bits",
        method,
        "Megatron-LM" if job.stack == "megatron" else "PyTorch",
    )


def closest(
    job: TrainingJob, layout: Layout, cluster: Cluster
) -> tuple[list[str], Errors]:
    """Return the traits that published runs share with a job, and their errors.

    The runs share all traits if there are three such runs; otherwise all but the stack;
    otherwise all but stack and method. Fitted runs count only if there are too few
    others. Without such runs the traits are empty and the errors are None.
    """
    traits = traits_of(job, layout, cluster)
    runs = [
        run
        for run in published.read_runs(single_node=False)
        if run.step_time_s
        and run.cluster.gpu.name == cluster.gpu.name
        and traits_of(run.job, run.layout, run.cluster)[:3] == traits[:3]
    ]
    for length in (5, 4, 3):
        if length == 3 and job.adapter_rank:
            break  # training all weights says nothing about adapters
        similar = [
            run
            for run in runs
            if traits_of(run.job, run.layout, run.cluster)[:length] == traits[:length]
        ]
        unseen = [run for run in similar if run.set != "fit"]
        if len(similar) >= FEWEST:
            rows = unseen if len(unseen) >= FEWEST else similar
            errors = errors_of(each.error for each in compare_steps(rows))
            return list(traits[:length]), errors
    return [], None


# Statistics that validate.py prints


def features_of(run: PublishedRun) -> list[str]:
    """Return the features of a run: each has a term in the model."""
    job, layout = run.job, run.layout
    has = {
        "FSDP": layout.zero == 3,
        "full recomputation": layout.recompute == "full",
        "tensor parallel": layout.tp > 1,
        "pipeline": layout.pp > 1,
        "context parallel": layout.cp > 1,
        "experts": job.model.experts > 0,
        "adapters": job.adapter_rank > 0,
        "sequences of 16k and longer": job.seq_len >= 16_384,
        "8 or 4 bits": job.precision.startswith(("fp8", "fp4")),
    }
    return [name for name, is_so in has.items() if is_so]


def by_feature(compared: Iterable[Compared]) -> dict[str, Errors]:
    """Return the errors of all rows that have a feature."""
    groups = defaultdict(list)
    for each in compared:
        for feature in features_of(each.run):
            groups[feature].append(each.error)
    return {feature: errors_of(values) for feature, values in groups.items()}


def strategy_pairs(compared: Iterable[Compared]) -> tuple[int, int]:
    """Return the ranked pairs of layouts, and how many are ranked correctly.

    A pair has the same model, sequence, batch, GPUs, precision and source. Pairs with
    step times within 1% are left out.
    """
    groups = defaultdict(list)
    for each in compared:
        job, layout = each.run.job, each.run.layout
        shape = (job.model.layers, job.model.hidden, job.seq_len, job.global_batch)
        size = (layout.gpus, job.precision, each.run.cluster.gpu.name)
        groups[each.run.source_name, shape, size].append(each)
    ranked = correct = 0
    for members in groups.values():
        for index, one in enumerate(members):
            for two in members[index + 1 :]:
                same = (one.run.job, one.run.layout) == (two.run.job, two.run.layout)
                measured = one.measured / two.measured
                if same or abs(measured - 1) <= NOISE:
                    continue
                ranked += 1
                correct += (measured > 1) == (one.predicted > two.predicted)
    return ranked, correct
