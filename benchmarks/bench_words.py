"""A report in words: numbers with their units, and what may be said about them."""

from collections.abc import Iterable, Sequence

from bench_analysis import Analysis, Row, leaders
from bench_baseline import Change, Comparison
from bench_records import LOSSY, UNCOMPARED, WRONG, Group
from bench_store import OK

DASH = "-"


# numbers with their units


def ms(value: float | None) -> str:
    if value is None:
        return DASH
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} ms"


def gib(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f} GiB"


def size(value: float | None) -> str:
    """Return bytes in the unit in which they read well."""
    if value is None:
        return DASH
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= factor:
            return f"{value / factor:,.2f} {unit}"
    return f"{value:.0f} B"


def speed(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f} tok/s"


def times(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}x"


def change(found: Change | None) -> str:
    """Return new / old, marked where that is beyond the noise."""
    return DASH if found is None else times(found.ratio) + " !" * bool(found.beyond)


def percent(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.0f}%"


def count(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}"


def loss(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else DASH


def verdict(row: Row) -> str:
    """Return a verdict in one or two words; those of more are under the table."""
    kind = row.verdict.kind
    shift = max((run.loss_difference or 0.0 for run in row.runs), key=abs)
    by = f" {shift:+.2g}" if shift else ""
    named = {LOSSY: f"lossy{by}", WRONG: f"WRONG{by}", UNCOMPARED: "not compared"}
    return named.get(kind, kind)


# sentences


def ranks(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


def title(group: Group) -> str:
    """Return what the strategies of a group have in common."""
    words = [f"{group.scope}: {group.preset}" if group.scope else group.preset, group.precision]
    words += [
        ranks(group.world_size),
        f"global batch {group.global_batch_size} x {group.seq_len} tokens",
    ]
    words += [f"{group.max_steps} steps", *([f"link {group.link}"] if group.link else [])]
    return ", ".join(map(str, words + ([f"seed {group.seed}"] if group.seed else [])))


def progress(analysis: Analysis) -> list[str]:
    """Say for each sweep how many of its points are there, and how they ended."""
    lines = []
    for sweep in analysis.sweeps:
        points = len(sweep.records)
        planned = sweep.settings.get("points")
        ended = [record["status"] for record in sweep.records]
        others = [f"{ended.count(s)} {s}" for s in sorted(set(ended) - {OK})]
        of = f" of {len(planned)}" if isinstance(planned, list) else ""
        lines.append(", ".join([f"{sweep.folder}: {points}{of} points", *others]))
        lines[-1] += f"; started {sweep.started[:16].replace('T', ' ')}"
    return lines


def environment(analysis: Analysis) -> str:
    """Return versions, machine and launcher in one line, as far as the results say them."""
    known = analysis.conditions
    names = ("torch", "python", "deepspeed")
    said = [f"{name} {known[name]}" for name in names if name in known]
    cores = f"{known['cores']} cores" if "cores" in known else None
    machine = (known.get("gpu"), cores, known.get("system"), known.get("processor"))
    said.append(" ".join(word for word in machine if word))
    if "device" in known:
        said.append(f"{known['device']} with {known.get('backend', 'no backend')}")
    said.append(f"ranks started by {known.get('launcher', 'nothing')}")
    return ", ".join(word for word in said if word)


def noise(analysis: Analysis) -> str:
    """Say how wide the noise is on each link, of which strategy, and what follows for ranks."""
    if analysis.noise.width is None:
        return "noise: unknown, since nothing ran twice; no ranks without it: use --repeats 3"
    lines = []
    for link, found in analysis.noise_of_link.items():
        head = f"noise over {link}" if link else "noise"
        if found.width is None:
            lines.append(f"{head}: unknown, since nothing ran twice there")
            continue
        repeats = f"{found.row.timed_repeats} repeats of {found.row.label}"
        ranks = found.row.group.world_size
        where = f" on {ranks} ranks" if ranks != 1 else ""
        lines.append(f"{head}: {percent(found.width)}, the spread of {repeats}{where}")
    return "\n".join(lines) + "; strategies that are closer share a rank"


def winners(rows: Sequence[Row], analysis: Analysis) -> str | None:
    """Say which strategies of a group are fastest, as far as the noise tells; None without."""
    ranked = [row for row in rows if row.rank]
    if not ranked:
        return None
    first = leaders(ranked, analysis.noise_of_link[rows[0].group.link].width)
    names = [row.label for row in first]
    if len(first) == len(ranked):
        return f"no difference beyond the noise: {listed(names)}"
    if len(first) == 1:
        return f"fastest beyond the noise: {names[0]}"
    return f"fastest, and not told apart: {listed(names)}"


def witnesses(rows: Iterable[Row]) -> str | None:
    """Say with what losses were compared, where that is not one process; None otherwise."""
    found = {row.verdict.words for row in rows if row.verdict.ranked} - {""}
    return f"losses compared with {listed(sorted(found))}: no single process" if found else None


def unfit(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that are neither right nor meant to be lossy."""
    return [row for row in rows if row.verdict.kind not in (OK, LOSSY)]


def trouble(row: Row) -> str:
    """Return in a line why a row is not ranked."""
    kind = {UNCOMPARED: "", WRONG: "WRONG: "}.get(row.verdict.kind, f"{row.verdict.kind}: ")
    words = row.verdict.words.removeprefix(f"{row.label} ")  # a reason may begin with the name
    return f"{row.label}: {kind}{words}"


def conclusion(analysis: Analysis) -> str:
    """Say what may be concluded from times that were measured on this machine."""
    known = analysis.conditions
    if "cuda" in known.get("device", ""):
        return "These times hold for this machine, model and batch: measure again for others."
    shared = f"CPU ranks share {known.get('cores', 'the')} cores"
    return (f"{shared}: times show overhead, not the speed of GPUs; bytes, calls and losses hold "
            "anywhere.")  # fmt: skip


def only_in_one(comparison: Comparison) -> list[tuple[str, str, list[str]]]:
    """Return ("new" or "old", title, strategies) of what only one of two sweeps has."""
    found: dict[tuple[str, str], list[str]] = {}
    for kind, rows in (("new", comparison.only_new), ("old", comparison.only_old)):
        for row in rows:
            found.setdefault((kind, title(row.group)), []).append(row.label)
    return [(*key, labels) for key, labels in found.items()]


def listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
