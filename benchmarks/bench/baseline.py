"""What has changed since another sweep, beyond the noise of both. Nothing is printed."""

from dataclasses import dataclass

from bench.analysis import Analysis, Row, ratio_of
from bench.records import Group, finite, median, number

# The numbers of Run that are compared.
COMPARED = {"step_time_ms": "step time", "peak_memory_gib": "memory", "bytes_sent_per_step": "sent"}


@dataclass
class Change:
    """One number of a strategy, new over old; `beyond` only where its noise is known."""

    name: str
    ratio: float
    beyond: bool


# A row that both sweeps have; COMPARED and the loss, None for what one of both lacks; (old, new) by
# "flags" and "verdict" where they changed.
Pair = tuple[Row, list[Change | None], dict[str, tuple[str, str]]]


@dataclass
class Comparison:
    folder: str  # of the older sweep
    pairs: list[Pair]
    only: list[tuple[str, Group, list[str]]]  # strategies of the "new" or of the "old" one alone
    conditions: list[tuple[str, str, str]]  # name, old, new, of those that both have

    @property
    def beyond_noise(self) -> list[tuple[str, str]]:
        """Return what changed beyond the noise, a strategy and the name of a number each."""
        return [(row.label, change.name) for row, changes, _ in self.pairs for change in changes
                if change and change.beyond]  # fmt: skip


def compare(new: Analysis, old: Analysis) -> Comparison:
    """Set each strategy beside itself in an older sweep: same job, ranks and link."""
    after, before = ({(row.group, row.label): row for row in found.rows} for found in (new, old))
    pairs = [pair_of(after[key], before[key]) for key in after if key in before]
    only = [(kind, rows[0].group, labels)
            for kind, found, other in (("new", new, before), ("old", old, after))
            for rows in found.groups
            if (labels := [row.label for row in rows if (row.group, row.label) not in other])
            ]  # fmt: skip
    differ = [(name, value, new.conditions[name]) for name, value in old.conditions.items()
              if new.conditions.get(name, value) != value]  # fmt: skip
    return Comparison(str(old.sweep.folder), pairs, only, differ)


def pair_of(new: Row, old: Row) -> Pair:
    """Compare two rows in each of COMPARED."""
    changes: list[Change | None] = []
    for name, words in COMPARED.items():
        was, now = old.median(name), new.median(name)
        if None in (was, now):
            changes.append(None)
        else:  # bytes are counted: whatever differs has changed
            beyond = was != now if words == "sent" else apart(new, old, name)
            changes.append(Change(words, ratio(now, was), beyond))
    changes.append(change_of_loss(new, old))
    both = {"flags": (flags_of(old), flags_of(new)),
            "verdict": (old.verdict.kind, new.verdict.kind)}  # fmt: skip
    return new, changes, {name: said for name, said in both.items() if len(set(said)) > 1}


def apart(new: Row, old: Row, name: str) -> bool:
    """Say whether the intervals of two sweeps' repeats, which no round pairs, have a gap."""
    now, was = (ratio_of(row.by_round(name).values()) for row in (new, old))
    return bool(now and was) and abs(now.log - was.log) > now.half + was.half


def change_of_loss(new: Row, old: Row) -> Change | None:
    """Compare the losses after the last step, and those of the first ones; None without."""
    was, now = (median(number(run.final_loss) for run in row.runs) for row in (old, new))
    if None in (was, now):
        return None
    allowed = new.runs[0].allowed
    apart = [abs(a - b) for a, b in zip(new.runs[0].losses, old.runs[0].losses, strict=False)]
    early = max(filter(finite, apart), default=0.0)
    return Change("loss", ratio(now, was), abs(now - was) > allowed.final or early > allowed.early)


def ratio(new: float, old: float) -> float:
    return new / old if old else (1.0 if new == old else float("inf"))


def flags_of(row: Row) -> str:
    """Return the script and its flags, as the sweep started it."""
    point = row.runs[0].record["point"]
    return " ".join(map(str, (point.get("script", ""), *(point.get("flags") or ()))))
