"""A folder of results.json files that templates wrote, without a sweep, read as if one had."""

import json
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import strategies
from bench.points import early_steps
from bench.search import options
from bench.store import FAILED, OK, Sweep
from bench.strategies import Strategy
from legacy_common import cli

RESULTS = "results.json"
# Of its `args`: what strategies must have in common to be compared, and the rest of the one job.
JOB = ("precision", "seq_len", "global_batch_size", "max_steps", "seed", "lr", "warmup_steps")
# Which data, and what else decides a loss; they stand beside the model's name.
DATA = ("text_file", "tokens", "document_attention", "max_grad_norm")
# Neither a strategy nor a job: how a run is divided, logged, saved, checked, started. Legacy are
# init_from, grad_accum_steps, parity_steps, checkpoints, logger, export_to.
LOOP = ("preset", "init_from", "micro_batch_size", "grad_accum_steps", "parity_steps", "self_check",
        "log_every", "save_every", "eval_every", "timeout", "device", "output_dir", "resume",
        "resume_step", "keep", "checkpoints", "async_save", "num_workers", "logger", "tensorboard",
        "profile", "export_to", "consolidate", "local_rank")  # fmt: skip
Given = dict[str, list[str]]  # by flag the words after it


def gather(folder: str | Path) -> Sweep:
    """Read all results.json below a folder; those of no training are named in `warnings`.

    Raises: UsageError where there is none that can be compared.
    """
    folder = Path(folder)
    paths = sorted(folder.rglob(RESULTS))
    sweep = Sweep(folder, {}, "")
    table = strategies.load()
    for path in paths:
        try:
            results = json.loads(path.read_text())
            record = record_of(path, results, table)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            missing = f" ({error})" * isinstance(error, KeyError)
            said = f"{path} is damaged, or of no training{missing}: left out"
            sweep.warnings.append(said)
        else:
            sweep.records.append(record)
    if not sweep.records:
        of = f"none of its {len(paths)} {RESULTS} is of a training" if paths else f"no {RESULTS}"
        raise cli.UsageError(f"{folder} holds no sweep: there is no {folder}/sweep.json, and {of}")
    sweep.started = min(record["started"] for record in sweep.records)
    name_micro_batches(sweep.records)
    number_repeats(sweep.records)
    return sweep


def record_of(path: Path, results: dict[str, Any], table: dict[str, Strategy]) -> dict[str, Any]:
    """Return what a sweep would have recorded. Raises: KeyError for what a training has."""
    args, ranks = results["args"], results["world_size"]
    results["metrics"]["final_loss"]
    given = flags_given(results.get("argv") or [], args)
    named = named_by(table, results, given)
    name, exact = named or (re.sub(r"[-_.# ]*\d+$", "", path.resolve().parent.name), True)
    failed = [check["name"] for check in results.get("checks") or [] if not check["ok"]]
    reason = f"its own check failed: {'; '.join(failed)}" if failed else None
    point = {"kind": "train", "strategy": name, "exact": exact, "script": results["script"],
             "world_size": ranks, "preset": model_of(args, given), "link": None,
             "flags": results.get("argv") or []}  # fmt: skip
    point |= {key: args[key] for key in (*JOB, "micro_batch_size")}
    return {
        "id": str(path.parent), "point": point, "repeat": 1, "started": results["started"],
        "launcher": results["launcher"], "status": FAILED if failed else OK, "reason": reason,
        "seconds": results["seconds"], "command": None, "results": results,
        **early_steps(path.with_name("metrics.jsonl")),
    }  # fmt: skip


def model_of(args: dict[str, Any], given: Given) -> str:
    """Return the name of a model, and of data other than the default."""
    name = str(args["preset"] or Path(args["init_from"]).name)
    return ", ".join([name, *(said(flag, args) for flag in DATA if flag in given)])


def said(flag: str, args: dict[str, Any]) -> str:
    """Return a flag and its value, as a person would type them."""
    value = args[flag]
    words = value if isinstance(value, list) else [value] * (value is not True)
    return " ".join(map(str, [f"--{flag.replace('_', '-')}", *words]))


def flags_given(words: Sequence[str], args: dict[str, Any] | None = None) -> Given:
    """Return what was given by name; of `args` a name can be the beginning, as argparse allows."""
    found: Given = {}
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            known = [key for key in args or () if key.startswith(name)]
            name = known[0] if len(known) == 1 else name
            found[name] = [value] if equals else []
        elif found:
            found[next(reversed(found))].append(word)
    return found


def named_by(
    table: dict[str, Strategy], results: dict[str, Any], given: Given
) -> tuple[str, bool] | None:
    """Return the strategy of a script and its flags, and whether it is exact; None for no other.

    Flags that the strategy does not have are in its name: it would be another one without them.
    """
    args, ranks = results["args"], results["world_size"]
    if "argv" not in results:  # of an older version: defaults and choices look alike
        return None
    fitting = []
    for strategy in table.values():
        own = flags_given(strategy.script_flags(ranks))
        fits = all(name in args and fit(args[name], words) for name, words in own.items())
        if strategy.script == results["script"] and strategy.takes(ranks) and fits:
            fitting.append((len(given.keys() & own.keys()), strategy, own))
    if not fitting:
        return None
    _, strategy, own = max(fitting, key=lambda row: row[0])  # the first of equals
    words = [strategy.name]
    for word, flags in options(strategy).items():  # as a search names them
        added = flags_given(shlex.split(flags))
        if all(name in given and fit(args[name], values) for name, values in added.items()):
            words.append(word)
            own |= added
    more = [said(flag, args) for flag in given
            if flag in args and flag not in (*own, *JOB, *DATA, *LOOP)]  # fmt: skip
    return " ".join([*words, *more]), strategy.exact


def fit(value: Any, words: list[str]) -> bool:
    """Say whether an argument has the value that words give it; a file by its name."""
    if not words:
        return value is True
    values = value if isinstance(value, list) else [value]
    return [Path(str(each)).name for each in values] == [Path(word).name for word in words]


def name_micro_batches(records: list[dict[str, Any]]) -> None:
    """Tell runs that differ in their micro-batch alone apart."""
    sizes = defaultdict(set)
    for record in records:
        sizes[same(record)].add(record["point"]["micro_batch_size"])
    several = {key for key, found in sizes.items() if len(found) > 1}
    for record in records:
        if same(record) in several:
            point = record["point"]
            first, *rest = point["strategy"].split()
            point["strategy"] = " ".join([first, f"mb{point['micro_batch_size']}", *rest])


def number_repeats(records: list[dict[str, Any]]) -> None:
    """Number the runs of one thing by the numbers that end their folders' names, else by time."""
    alike = defaultdict(list)
    for record in sorted(records, key=lambda record: record["started"]):
        alike[same(record)].append(record)
    for runs in alike.values():
        ends = [re.search(r"\d+$", Path(record["id"]).resolve().name) for record in runs]
        numbers = [int(end[0]) for end in ends if end]
        if max(Counter(numbers).values(), default=0) != 1 or len(numbers) < len(runs):
            numbers = range(1, len(runs) + 1)
        for record, number in zip(runs, numbers, strict=True):
            record["repeat"] = number


def same(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return what runs of one thing share."""
    point = record["point"]
    return tuple(point[key] for key in ("strategy", "world_size", "preset", *JOB))
