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
    by = f" {row.verdict.difference:+.2g}" if row.verdict.difference else ""
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
    """Return versions in one line, machine and launcher in another, as far as they are known."""
    known = analysis.conditions
    names = ("torch", "CUDA", "NCCL", "driver", "python", "deepspeed", "commit")
    versions = [f"{name} {known[name]}" for name in names if name in known]
    cores = f"{known['cores']} cores" if "cores" in known else None
    gpus = known.get("GPUs", known.get("gpu"))
    machine = [gpus, cores, known.get("CPU"), known.get("system"), known.get("processor")]
    said = [" ".join(word for word in machine if word)]
    said += [f"{known['nodes']} nodes"] if "nodes" in known else []
    if "device" in known:
        said.append(f"{known['device']} with {known.get('backend', 'no backend')}")
    said.append(f"ranks started by {known.get('launcher', 'nothing')}")
    lines = (", ".join(word for word in words if word) for words in (versions, said))
    return "\n".join(line for line in lines if line)


def noise(analysis: Analysis) -> str:
    """Say how wide the noise is, of which strategy, and what follows for places."""
    if analysis.noise.width is None:
        return "noise: unknown, since nothing ran twice; no places without it: use --repeats 3"
    lines = []
    for key, found in analysis.noises.items():
        head = f"noise{where_noisy(key, analysis)}"
        if found.width is None:
            lines.append(f"{head}: unknown, since nothing ran twice there")
            continue
        repeats = f"{found.row.timed_repeats} repeats of {found.row.label}"
        world_size = found.row.group.world_size
        where = f" on {ranks(world_size)}" if world_size != 1 else ""
        lines.append(f"{head}: {percent(found.width)}, the spread of {repeats}{where}")
    return "\n".join(lines) + "; a smaller difference decides nothing"


def where_noisy(key: tuple, analysis: Analysis) -> str:
    """Return of which points a noise is, as far as there are others."""
    scope, preset, precision, link = key
    scopes, presets, precisions, _ = map(set, zip(*analysis.noises, strict=True))
    names = [str(preset)] * (len(presets) > 1) + [str(precision)] * (len(precisions) > 1)
    of = f" of {', '.join(names)}" if names else ""
    return of + (f" over {link}" if link else "") + (f" in {scope}" if len(scopes) > 1 else "")


def winners(rows: Sequence[Row]) -> str | None:
    """Say which strategies of a group are fastest, as far as the noise tells; None without."""
    placed = [row for row in rows if row.place]
    if not placed:
        return None
    first = leaders(placed)
    names = [row.label for row in first]
    if len(first) == len(placed):
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
