"""The command line of the scripts: shared flags, one-line errors, exit codes."""

import argparse
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path

import torch.distributed as dist

FAILED, BAD_USAGE, INTERRUPTED = 1, 2, 130  # exit codes
GRACE_S = 3.0  # a rank that prints nothing waits, so that another rank's line gets out
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


class UsageError(Exception):
    """Wrong usage, or a machine that lacks what the script needs: one line, exit 2."""


class CheckError(Exception):
    """A check of the strategy failed on all ranks: one line, exit 1."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse that raises UsageError, with the flags that every script has.

    `doc` is the script's docstring; its first line describes the script.
    """

    def __init__(self, doc):
        super().__init__(description=doc.splitlines()[0])
        add = self.add_argument
        add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(auto)")
        add(
            "--seed", type=whole_number, default=0, help="of weights and data order (0)"
        )
        add(
            "--timeout",
            type=positive_float,
            default=600,
            metavar="SECONDS",
            help="how long a collective waits for the other ranks (600)",
        )
        add("--output-dir", type=Path, metavar="DIR", help="write results here")

    def error(self, message):
        raise UsageError(message)


def whole_number(text, low=0):
    """Parse a whole number from `low` to 2**31 - 1."""
    if not (text.isdecimal() and low <= int(text) < 2**31):
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least {low}, not {text!r}"
        )
    return int(text)


def positive_int(text):
    return whole_number(text, low=1)


def positive_float(text):
    """Parse a number above 0, at most 1e9."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1e9:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return number


def add_training_flags(parser, presets, precisions=PRECISIONS, without=()):
    """Add the flags that the templates share: one job, whatever the strategy.

    `without` names flags that a template leaves out: they keep their defaults.
    """

    def add(flag, **options):
        if flag in without:
            name = flag.removeprefix("--").replace("-", "_")
            parser.set_defaults(**{name: options.get("default")})
        else:
            parser.add_argument(flag, **options)

    add("--preset", choices=presets, default="tiny", help="the model's shape (tiny)")
    add("--text-file", help="train on its bytes (dist_common/text.txt)")
    add("--tokens", metavar="FOLDER", help="train on a folder of make_tokens.py")
    add("--seq-len", type=positive_int, default=128, help="tokens per sequence (128)")
    add(
        "--micro-batch-size",
        type=positive_int,
        default=8,
        help="sequences per rank at a time (8)",
    )
    add(
        "--global-batch-size",
        type=positive_int,
        help="sequences per step on all ranks (micro-batch x ranks)",
    )
    add("--max-steps", type=positive_int, default=60, help="of the whole run (60)")
    add("--lr", type=positive_float, default=2e-3, help="peak learning rate (0.002)")
    add("--warmup-steps", type=whole_number, default=10, help="linear warmup (10)")
    add("--max-grad-norm", type=positive_float, default=1.0, help="clip above (1)")
    add(
        "--precision",
        choices=precisions,
        help="of matrix products (bf16-mixed on a GPU that has it, else 32-true)",
    )
    add("--num-workers", type=whole_number, default=0, help="loader processes (0)")
    add("--compile", action="store_true", help="use torch.compile")
    add(
        "--activation-checkpointing",
        choices=("none", "full"),
        default="none",
        help="what backward computes again (none)",
    )
    add("--log-every", type=positive_int, default=10, help="steps between lines (10)")
    add("--eval-every", type=whole_number, default=30, help="steps, 0 is never (30)")
    add(
        "--save-every",
        type=whole_number,
        default=20,
        help="steps, 0 is only when stopped (20)",
    )
    add("--keep", type=positive_int, default=2, help="checkpoints to keep (2)")
    add("--async-save", action="store_true", help="train on while a save is written")
    add("--resume", action="store_true", help="continue from --output-dir")
    add("--resume-step", type=positive_int, metavar="N", help="from this checkpoint")
    add("--tensorboard", action="store_true", help="write the metrics for TensorBoard")
    add("--profile", type=positive_int, metavar="STEP", help="trace this step")
    add(
        "--self-check",
        action=argparse.BooleanOptionalAction,
        help="compare two steps with one process (on for the preset tiny)",
    )


def validate_training_args(args):
    """Set the default of --self-check. Raises: UsageError for flags that contradict."""
    if args.self_check is None:
        args.self_check = args.preset == "tiny"
    args.resume = args.resume or bool(args.resume_step)
    for flag in ("resume", "tensorboard", "profile"):
        if getattr(args, flag) and not args.output_dir:
            raise UsageError(f"--{flag} needs --output-dir")


def run(main):
    """Run a script's `main` and exit: 0 or its code, 2 for wrong usage, 1 for bugs."""
    try:
        code = main() or 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        code = BAD_USAGE if isinstance(error, UsageError) else FAILED
        print_error(error)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: gloo's threads may abort while the interpreter shuts down.
    os._exit(code)


def print_error(error):
    """Print what ended the run, from one rank: UsageErrors in a line, bugs in full.

    Safe to call twice for the same error.
    """
    if hasattr(error, "printed") or isinstance(error, KeyboardInterrupt):
        return
    error.printed = True
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's ends this rank now
    if not is_first_to_fail():
        time.sleep(GRACE_S)
        return
    rank = os.environ.get("RANK", "0")
    if isinstance(error, UsageError | CheckError | FloatingPointError):
        line = f"error: {' '.join(str(error).split())}"
    elif lost := lost_rank(error):
        line = f"rank {rank}: {lost}"
    else:
        traceback.print_exception(error)
        line = f"rank {rank}: {type(error).__name__}: {error}"
    print(f"{Path(sys.argv[0]).name}: {line}", file=sys.stderr, flush=True)


def is_first_to_fail():
    """Say whether this rank should print its error: the first one to claim it does.

    Before the ranks have met, the first rank of each machine prints.
    """
    if not dist.is_initialized():
        names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
        return all(os.environ.get(name, "0") == "0" for name in names)
    try:
        store = dist.distributed_c10d._get_default_store()  # public in no release
        return store.add("dist_common/failed", 1) == 1
    except (RuntimeError, dist.DistError):  # the store has ended with its rank
        return True


def lost_rank(error):
    """Return what a communication error means, or None for any other error."""
    text = str(error)
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return (
            f"{where} is already in use on this machine: choose another MASTER_PORT, "
            "or let torchrun --standalone pick a free one"
        )
    patterns = (
        r"Connection (closed|reset|refused)|Broken pipe|[Tt]imed out|[Tt]imeout"
        r"|No route to host|Network is unreachable"
    )
    match = re.search(patterns, text)
    if not match or not isinstance(error, (dist.DistError, RuntimeError)):
        return None
    if dist.is_initialized():
        return (
            f"lost contact with another rank ({match[0]}): it died or stopped "
            "answering. Look for the rank that failed first"
        )
    line = f"not all {os.environ.get('WORLD_SIZE')} ranks met at {where} ({match[0]}): "
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        # The restarted ranks may read the old ranks' addresses from torchrun's store.
        return line + (
            "after a restart of torchrun, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
    return line + "was each of them started, and does it reach that address?"
