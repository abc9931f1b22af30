"""Run all tests, then each failed one once more, alone; record the seconds per file.

    python tests/run_all.py [PYTEST ARGUMENTS]

A test that fails on a busy machine and passes alone does not fail the run, but its name
is printed at the end: it has to be mended or removed. A complete run without arguments
writes tests/durations.json.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
PARALLEL = ["-n", "2", "--dist", "loadgroup"]


class Recorder:
    """Collect the seconds of each test file and the names of the failed tests."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.split("::")[0]] += report.duration
        name = re.sub(r"@[\w-]+$", "", report.nodeid)  # without the group of loadgroup
        if report.failed and name not in self.failed:
            self.failed.append(name)


def write_durations(recorder: Recorder, whole_s: float) -> None:
    """Write the wall seconds of the run and the seconds of each file, longest first."""
    longest_first = sorted(recorder.seconds.items(), key=lambda item: -item[1])
    record = {
        "wall_seconds": round(whole_s),
        "seconds_per_file": {
            file: round(seconds, 1) for file, seconds in longest_first
        },
    }
    DURATIONS.write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    arguments = sys.argv[1:]
    recorder, started = Recorder(), time.monotonic()
    code = pytest.main([*PARALLEL, *arguments], plugins=[recorder])
    if not arguments and code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        write_durations(recorder, time.monotonic() - started)
    if code != pytest.ExitCode.TESTS_FAILED or not recorder.failed:
        return int(code)
    again = [sys.executable, "-m", "pytest", "-n", "0", *recorder.failed]
    code = subprocess.run(again, check=False).returncode
    count = len(recorder.failed)
    print(f"\n{count} tests failed in the parallel run and ran once more, alone:")
    print(*recorder.failed, sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
