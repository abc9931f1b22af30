"""Run a script of the guide as a command line does, in a process that goes on: in a browser."""

import contextlib
import io
import runpy
import sys

sys.path[:0] = ["."]


def run(script: str, argv: list[str]) -> tuple[int, str, str]:
    """Return a script's exit code, and what it printed to stdout and to stderr."""
    sys.argv = [script, *argv]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()
