"""The command line of a script: its flags, its errors in one line, its exit code."""

import argparse
import atexit
import contextlib
import functools
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # exit codes
# A launcher ends the job when its first process exits: a rank that leaves the error message to
# another rank waits this long, so as not to cut the message short.
GRACE_S = 3.0
SILENT_S = 1.0  # from the first rank that lost contact to the last one


def imported():
    """Return torch.distributed if the script uses it: a tool that does not starts at once."""
    return sys.modules.get("torch.distributed")


class UsageError(Exception):
    """Bad input, or a machine that lacks what the script needs: one line, exit code 2."""


class LostRank(Exception):
    """Another rank died or stopped answering."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse with the flags of every script, and --resume if it `resumes`; `doc` describes it."""

    def __init__(self, doc: str, resumes: bool = False) -> None:
        super().__init__(description=doc.splitlines()[0])
        add = self.add_argument
        add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(auto)")
        add("--seed", type=whole_number, default=0, help="of weights and order of samples (0)")
        add("--timeout", type=positive_float, default=600, metavar="SECONDS",
            help="how long a collective waits for the other ranks (600)")  # fmt: skip
        add("--output-dir", metavar="DIR", help="write results.json and the like to this folder")
        if resumes:
            add("--resume", action="store_true", help="continue from --output-dir's checkpoint")

    def error(self, message: str) -> None:
        raise UsageError(message)

    def parse_args(self, *args, **kwargs) -> argparse.Namespace:
        parsed = super().parse_args(*args, **kwargs)
        if "://" in (parsed.output_dir or ""):
            self.error(f"--output-dir {parsed.output_dir}: must be a local folder")
        if getattr(parsed, "resume", False) and not parsed.output_dir:
            self.error("--resume needs --output-dir, the folder of the run to continue")
        return parsed


def whole_number(text: str, low: int = 0) -> int:
    """Parse a whole number from `low` to 2**31 - 1."""
    if not (text.isdecimal() and low <= int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {low}, not {text!r}")
    return int(text)


positive_int = functools.partial(whole_number, low=1)


def positive_float(text: str) -> float:
    """Parse a number above 0, at most 1e9."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= 1e9:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")


def link_rate(text: str) -> float:
    """Parse the speed of a link, such as 100mbit; return bytes/s."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(m|g)bit", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"must be like 100mbit or 1gbit, not {text!r}")
    return float(match[1]) * {"m": 1e6, "g": 1e9}[match[2]] / 8


def byte_size(text: str) -> int:
    """Parse 8, 4K, 128M or 1G: powers of 1024, as nccl-tests does."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text, re.IGNORECASE)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"must be a size like 8, 4K, 128M or 1G, not {text!r}")
    return int(match[1]) * 1024 ** " KMG".index(match[2].upper() or " ")


def run(main: Callable[[], int]) -> None:
    """Run a script's main and exit with its code: 2 for bad input, 1 for any other error."""
    try:
        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        kept = error  # noqa: F841  and what its frames hold, as runtime.init keeps the group
        code = BAD_INPUT if isinstance(explain(error), UsageError) else FAILED
        tell(error)
        tear_down()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # nobody reads any more, as under `| head`
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: a DDP object keeps gloo's threads alive, and if one of them releases its last
    # tensor while the interpreter shuts down, the process aborts although the run went well.
    os._exit(code)


def tell(error: BaseException) -> None:
    """Print in one line, from one rank, what ended the run; safe to call more than once.

    The first rank to claim the word in the group's store prints: the others mostly failed because
    it did. Without a group every rank met the same error, and rank 0 prints.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit)) or hasattr(error, "told"):
        return
    error.told = True
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
    rank = next((int(os.environ[n]) for n in names if os.environ.get(n, "").isdecimal()), 0)
    cause = explain(error)
    dist = imported()
    if dist and dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # the store died with its rank: this rank prints
            store = dist.group.WORLD.get_group_store()
            store.set(f"legacy_common/ended/{rank}", "")
            if store.add("legacy_common/told", 1) > 1:
                time.sleep(GRACE_S)
                return
            if isinstance(cause, LostRank) and node():
                cause = LostRank(f"{_silent_ranks(store)}{cause}")
    elif rank:  # still running after this: rank 0 did not meet the error, so another rank prints
        time.sleep(GRACE_S + 0.5 * (rank % 64))
    if os.environ.get("DIST_COMMON_TRACEBACK"):
        traceback.print_exception(error)
    # All ranks find a FloatingPointError together: it names its rank itself.
    own = f"rank {rank}{node()}: "
    line = {UsageError: "error: ", FloatingPointError: ""}.get(type(cause), own)
    line += str(cause)
    if not isinstance(cause, (UsageError, LostRank, FloatingPointError)):
        frames = traceback.extract_tb(error.__traceback__)
        frame = [f for f in frames if "site-packages" not in f.filename][-1]
        where = f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
        line = f"{own}{type(error).__name__}: {error} ({where}; DIST_COMMON_TRACEBACK=1 "
        line += "shows the traceback)"
    print(f"{Path(sys.argv[0]).name}: {' '.join(line.split())}", file=sys.stderr, flush=True)


def _silent_ranks(store: Any) -> str:
    """Name the ranks that have met no error, and their machine, if they are all of one.

    Who is dead, hangs, or is cut off is among them. So may be others, after a closed connection:
    they still wait for a rank that has lost contact. A timeout comes to all of them at once.
    """
    time.sleep(SILENT_S)
    ranks = map(str, range(int(os.environ["WORLD_SIZE"])))
    silent = [rank for rank in ranks if not store.check([f"legacy_common/ended/{rank}"])]
    machines = {store.get(f"legacy_common/node/{rank}").decode() for rank in silent}
    if len(machines) != 1:
        return ""
    return f"no word from rank {', '.join(silent[:8])} ({machines.pop()}); "


def tear_down() -> None:
    """Leave the group after an error, without waiting for collectives that never complete."""
    dist = imported()
    if not dist or not dist.is_initialized():
        return
    store = dist.group.WORLD.get_group_store()  # noqa: F841  lives until this function returns
    dist.group.WORLD.abort() if "nccl" in dist.get_backend() else dist.destroy_process_group()
    if os.environ["RANK"] == "0" and "TORCHELASTIC_RUN_ID" not in os.environ:
        time.sleep(1.0)  # the store in which the others look who printed lives in this process


def explain(error: BaseException) -> BaseException:
    """Return a communication library's error in words that say what to do about it."""
    text, env = str(error), os.environ.get
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        port = f"MASTER_PORT={env('MASTER_PORT')} is already taken on this machine: choose another"
        return UsageError(f"{port}, or let torchrun --standalone pick a free one")
    dist = imported()
    if not dist:
        return error
    lost = re.search(
        r"Connection (closed|reset) by peer|Broken pipe|[Tt]imed out|[Tt]imeout|No route to host"
        r"|Network is unreachable", text)  # fmt: skip
    ours = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in text)
    if not (ours and lost):
        return error
    if not dist.is_initialized():
        met = f"not all {env('WORLD_SIZE')} ranks met at {env('MASTER_ADDR')}:{env('MASTER_PORT')}"
        waited = re.search(r"after (\d+) ?(ms|seconds)", text)
        if waited:
            met += f" within {int(waited[1]) / (1000 if waited[2] == 'ms' else 1):g} s"
        elif hasattr(error, "after_s"):  # runtime.init's
            met += f" within {error.after_s:.0f} s"
        met += _tried_from(env("MASTER_ADDR", ""))
        return LostRank(f"{met}: was each of them started, and does it reach that address?")
    why = "Look for the rank that failed first: killed, out of memory, or an error of its own"
    peer = re.search(r"\[((?!127\.)[\d.]+)\]:\d+", text)  # on another machine, as gloo names it
    who = f"another rank at {peer[1]}" if peer else "another rank"
    return LostRank(f"lost contact with {who} ({lost[0]}): it died or stopped answering. {why}")


def node() -> str:
    """Name this machine for a message, as " (node1)", where the job has several."""
    one = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return "" if one else f" ({socket.gethostname()})"


def _tried_from(address: str) -> str:
    """Say from which address and interface another machine's address is tried."""
    import psutil  # which a browser lacks: the planner runs there as well

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # which sends nothing, but chooses
        own = probe.getsockname()[0]
        if not own.startswith("127."):
            cards = psutil.net_if_addrs().items()
            names = [name for name, given in cards if own in [each.address for each in given]]
            return f", tried from {own} ({', '.join(names)})"
    return ""
