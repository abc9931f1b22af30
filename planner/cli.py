"""The programs' command line: wrong usage is one line on stderr and exit code 2."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


class CommandLineError(Exception):
    """Wrong usage. The message names the flag and the allowed values."""


class PlannerParser(argparse.ArgumentParser):
    """argparse that raises CommandLineError instead of printing its usage."""

    def error(self, message: str) -> None:
        raise CommandLineError(message)


def positive_int(text: str) -> int:
    """Parse a whole number from 1 to 2**31 - 1."""
    if not (text.isdecimal() and 1 <= int(text) < 2**31):
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least 1, not {text!r}"
        )
    return int(text)


def positive_float(text: str) -> float:
    """Parse a number above 0, at most 1e9."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1e9:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def run(main: Callable[[], int]) -> None:
    """Run a program and exit with its code: 2 after a CommandLineError."""
    try:
        code = main()
    except CommandLineError as error:
        message = " ".join(str(error).split())
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
        code = 2
    sys.exit(code)
