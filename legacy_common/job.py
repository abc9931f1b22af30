"""Flags and learning rates of the job that the framework ports train."""

import argparse
import functools
import math
from collections.abc import Collection
from pathlib import Path

from legacy_common import models
from legacy_common.cli import (
    ArgumentParser,
    positive_float,
    positive_int,
    whole_number,
)


def add_task_flags(parser: ArgumentParser, presets: Collection[str]) -> None:
    """Add the flags that say what is trained: model, data, order, schedule."""
    add, positive = parser.add_argument, positive_int
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--preset", type=functools.partial(models.preset_or_file, presets),
        action=Shape, default="tiny", metavar="NAME",
        help=f"{', '.join(presets)}, or a config.json of a Llama (tiny)")  # fmt: skip
    add("--text-file", help="train on its bytes (dist_common/text.txt)")
    add("--seq-len", type=positive, default=128, help="tokens per sequence (128)")
    add("--micro-batch-size", type=positive, default=8, help="sequences per rank at a time (8)")
    add("--grad-accum-steps", type=positive, help="micro-batches per rank and step (1)")
    add("--global-batch-size", type=positive, help="sequences per step: sets --grad-accum-steps")
    add("--max-steps", type=positive, default=60, help="optimizer steps of the whole run (60)")
    add("--lr", type=positive_float, default=2e-3, help="peak learning rate of AdamW (0.002)")
    add("--warmup-steps", type=whole_number, default=10, help="steps of linear warmup (10)")
    add_precision(parser, ("32-true", "bf16-mixed", "16-mixed"))


class Shape(argparse.Action):
    """Keep --preset, and in `args.shape` what a file says: a file that changes is another job."""

    def __call__(self, parser, args, value, option_string=None):
        args.preset = value
        vars(args).pop("shape", None)
        if Path(value).suffix == ".json":
            args.shape = models.facts_of(models.shape_of(value))


def add_precision(parser: ArgumentParser, choices: Collection[str]) -> None:
    """Add --precision. Where it is not given, `Report` takes what the device computes best in."""
    parser.add_argument("--precision", choices=choices,
        help="32-true: no TF32 either (bf16-mixed on a GPU that has it, else 32-true)")  # fmt: skip


def lr_at(step: int, args: argparse.Namespace) -> float:
    """Return the job's learning rate in a step, counted from 1: warmup, then cosine to a tenth."""
    if step <= args.warmup_steps:
        return args.lr * step / args.warmup_steps
    done = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
