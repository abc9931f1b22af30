"""A report in words: numbers with their units, and what may be said about them."""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from bench.analysis import Analysis, Ratio, Row
from bench.answer import Answer, is_on_gpu, memory_of
from bench.baseline import Change
from bench.predict import FAR, Prediction
from bench.records import LOSSY, UNCOMPARED, WRONG, Group, median
from bench.settings import LR, WARMUP_STEPS
from bench.store import OK, Sweep
from bench.strategies import FLOAT
from legacy_common.measure import GIB

DASH = "-"
# Of what there are predictions.
WHAT = {
    "state": "weights, gradients, optimizer", "peak": "peak of tensors", "sent": "sent",
    "step": "step",
}  # fmt: skip


def shown(form: str, value: float | None) -> str:
    return DASH if value is None else form.format(value)


gib = functools.partial(shown, "{:.2f} GiB")
speed = functools.partial(shown, "{:,.0f} tok/s")
times = functools.partial(shown, "{:.2f}x")
percent = functools.partial(shown, "{:.0%}")
count = functools.partial(shown, "{:,.0f}")
loss = functools.partial(shown, "{:.4f}")
us = functools.partial(shown, "{:,.1f} us")


def ms(value: float | None) -> str:
    digits = 0 if value is None or value >= 100 else 1 if value >= 10 else 2
    return shown(f"{{:,.{digits}f}} ms", value)


def ratio(found: Ratio | None) -> str:
    """Return a ratio and by how much it may be off: not known of one round, nothing to itself."""
    if found is None or found.half in (0, math.inf):
        return times(found and math.exp(found.log))
    return f"{math.exp(found.log):.2f}x ±{math.expm1(found.half):.0%}"


def size(value: float | None) -> str:
    """Return bytes in the unit in which they read well."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value is not None and value >= factor:
            return f"{value / factor:,.2f} {unit}"
    return shown("{:.0f} B", value)


def change(found: Change | None) -> str:
    """Return new / old, marked where that is beyond the noise."""
    return DASH if found is None else times(found.ratio) + " !" * bool(found.beyond)


def verdict(row: Row) -> str:
    """Return a verdict in one or two words; those of more are under the table."""
    kind = row.verdict.kind
    by = f" {row.verdict.difference:+.2g}" if row.verdict.difference else ""
    return {LOSSY: f"lossy{by}", WRONG: f"WRONG{by}", UNCOMPARED: "not compared"}.get(kind, kind)


def ranks(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


def title(group: Group) -> str:
    """Return what the strategies of a group have in common."""
    batch = f"global batch {group.global_batch_size} x {group.seq_len} tokens"
    words = [str(group.preset), str(group.precision), ranks(group.world_size), batch]
    words.append(f"{group.max_steps} steps")
    words += [f"{name} {value}" for name in ("link", "seed") if (value := getattr(group, name))]
    if group.lr not in (None, LR.get(group.preset)):
        words.append(f"lr {group.lr:g}")
    if group.warmup_steps not in (None, WARMUP_STEPS):
        words.append(f"{group.warmup_steps} steps of warmup")
    return ", ".join(words)


def progress(sweep: Sweep) -> str:
    """Say how many of a sweep's points are there, and how they ended."""
    planned = sweep.settings.get("points")
    most = max(len(planned or ()), len(sweep.records))  # with --trace later there are more
    of = f" of {most}" if isinstance(planned, list) else ""
    ended = Counter(record["status"] for record in sweep.records)
    others = [f"{ended[status]} {status}" for status in sorted(set(ended) - {OK})]
    said = ", ".join([f"{sweep.folder}: {len(sweep.records)}{of} points", *others])
    return f"{said}; started {sweep.started[:16].replace('T', ' ')}"


def environment(analysis: Analysis) -> str:
    """Return versions in one line, machine and launcher in another, as far as they are known."""
    known = analysis.conditions
    names = ("torch", "CUDA", "NCCL", "driver", "python", "deepspeed", "commit")
    versions = [f"{name} {known[name]}" for name in names if name in known]
    cores = f"{known['cores']} cores" if "cores" in known else None
    gpus = known.get("GPUs", known.get("gpu"))
    machine = [gpus, cores, known.get("CPU"), known.get("system"), known.get("processor")]
    said = [
        " ".join(filter(None, machine)),
        f"{known['nodes']} nodes" if "nodes" in known else "",
        f"{known['device']} with {known.get('backend', 'no backend')}" if "device" in known else "",
        f"ranks started by {known.get('launcher', 'nothing')}",
    ]
    lines = (", ".join(filter(None, words)) for words in (versions, said))
    return "\n".join(filter(None, lines))


def noise(analysis: Analysis) -> str:
    """Say what the intervals are; or that there are none, and what follows for places."""
    if all(row.timed_repeats < 2 for row in analysis.rows):
        return "noise: unknown, since nothing ran twice; no places without it: use --repeats 3"
    what = f"noise: ± is the {analysis.confidence:.0%} interval of a ratio, taken round by round"
    return f"{what}; more rounds narrow it"


def outcome(rows: Sequence[Row]) -> list[str]:
    """Say which strategies of a group are fastest, as far as the noise tells; and with what losses
    were compared, where that is not one process.
    """
    placed = [row.label for row in rows if row.place]
    first = [row.label for row in rows if row.place.partition("-")[0] == "1"]
    said = []
    if placed:
        one = "fastest beyond the noise" if len(first) == 1 else "fastest, and not told apart"
        how = "no difference beyond the noise" if first == placed else one
        said.append(f"{how}: {listed(first)}")
        halves = median(row.behind and row.behind.half for row in rows)
        rounds = max(row.timed_repeats for row in rows if row.place)
        if halves is not None:
            tell = f"{rounds} rounds tell neighbours apart from {math.expm1(halves):.0%} on"
            said.append(f"{tell} (median)")
    if rows[0].group.precision != FLOAT:
        allowed = f"{rows[0].runs[0].allowed.early:.2g}"
        said.append(
            f"losses of the first steps may be {allowed} apart in {rows[0].group.precision}"
        )
    found = {row.verdict.words for row in rows if row.verdict.ranked} - {""}
    if found:
        said.append(f"losses compared with {listed(sorted(found))}: no single process")
    return said


def answer(found: Answer, analysis: Analysis) -> str:
    """Return in a line which strategy to take and why, or what is missing to say so."""
    row, tied, lean = found.row, found.tied, found.lean
    if row is None:
        return f"no answer yet: {found.missing}"
    on_gpu = "cuda" in analysis.conditions.get("device", "")
    room = fits(row)
    parts = [f"take {row.label}" + " on these CPUs" * (not on_gpu) + ": "]
    if len(tied) > 1:
        why = f"the simplest of {listed([each.label for each in tied])}, of which none is faster"
        why += " beyond the noise"
    elif sum(other.verdict.ranked for other in found.group) == 1:
        why = "the only exact one with the right loss"
    else:
        why = "the fastest beyond the noise"
    parts[0] += f"{room}, {why}" if room else why
    memory = memory_of(row)
    if lean:
        less, more = tensors(memory(lean)), tensors(memory(row))
        state = f"{less} instead of {more} of weights, gradients and optimizer state"
        by = f"{less} at the peak instead of {more}" if is_on_gpu(row) else state
        parts.append(f"{lean.label} if memory is short ({by})")
    elif memory(row) is not None:
        parts.append("none needs clearly less memory")
    return "; ".join([*parts, time_of(row)])


def time_of(row: Row) -> str:
    """Say where the time of a traced step goes, the largest part first."""
    if not row.trace:
        return "sweep --trace says where the time goes"
    compute, exposed = row.share("compute"), row.share("exposed")
    parts = [(compute, "computing"), (exposed, "communication that nothing hides"),
             (1 - compute - exposed, "the rest: Python, launches, waiting")]  # fmt: skip
    said = ", ".join(f"{what} ({part:.0%})" for part, what in sorted(parts, reverse=True))
    return f"time goes to {said}"


def fits(row: Row) -> str:
    """Say how much of the GPU's memory the rank with most allocated, if it is known."""
    known = [run for run in row.runs if run.peak_memory_gib and run.gpu_memory_gib]
    if not known:
        return ""
    most = max(known, key=lambda run: run.peak_memory_gib)
    where = "" if most.fullest_rank is None else f", rank {most.fullest_rank}"
    return f"fits ({most.peak_memory_gib:.1f} of {most.gpu_memory_gib:.1f} GiB{where})"


def predictions(found: Sequence[Prediction]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of what was measured beside what was predicted."""
    shown = {"state": tensors, "peak": gib, "sent": size, "step": ms}
    body = [[each.row.label, WHAT[each.name], shown[each.name](each.measured),
             shown[each.name](each.predicted), times(each.ratio) + " !" * each.far]
            for each in found]  # fmt: skip
    return ["strategy", "what", "measured", "predicted", "ratio"], body


def remarks(found: Sequence[Prediction], rows: Sequence[Row]) -> list[str]:
    """Say which measurements are far from their predictions, and what has none."""
    said = []
    for each in found:
        if each.far:
            usual = f"where {FAR[each.name]:.0%} more or less is usual"
            what = f"{each.row.label}: {WHAT[each.name]}"
            said.append(f"{what} is {times(each.ratio)} of the prediction, {usual}")
    known = {each.row.label for each in found}
    others = [row.label for row in rows if row.verdict.kind == OK and row.label not in known]
    return said + [f"not predicted: {listed(others)}"] * bool(others)


def tensors(value: float | None) -> str:
    """Return GiB of tensors, which are counted to the byte."""
    return size(None if value is None else value * GIB)


def unfit(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that are neither right nor meant to be lossy."""
    return [row for row in rows if row.verdict.kind not in (OK, LOSSY)]


def trouble(row: Row) -> str:
    """Return in a line why a row has no place."""
    kind = {UNCOMPARED: "", WRONG: "WRONG: "}.get(row.verdict.kind, f"{row.verdict.kind}: ")
    words = row.verdict.words.removeprefix(f"{row.label} ")  # a reason may begin with the name
    return f"{row.label}: {kind}{words}"


def conclusion(analysis: Analysis) -> str:
    """Say what may be concluded from times that were measured on this machine."""
    known = analysis.conditions
    if "cuda" in known.get("device", ""):
        return "These times hold for this machine, model and batch: measure again for others."
    shared = f"CPU ranks share {known.get('cores', 'the')} cores"
    holds = "bytes, calls and losses hold anywhere."
    return f"{shared}: times show overhead, not the speed of GPUs; {holds}"


def listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
