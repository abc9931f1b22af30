"""Run a command that may do little harm: in bubblewrap, in Docker, or just in a
process.

Sources: bwrap(1), prlimit(1); docs.docker.com, "docker container run".
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

from lab_parts.holes import REPO

SECONDS = 300  # of an answer; a right one takes about 20
IMAGE = "labs"  # as labs/SETUP.md names it
# Bubblewrap has no limits of its own. These hold for the box; --data for each process.
LIMITS = ["prlimit", f"--data={4 * 2**30}", f"--fsize={2**28}", "--nproc=256"]


def works(command: list[str]) -> bool:
    """Say whether a command is installed and ends with exit code 0."""
    if not shutil.which(command[0]):
        return False
    ended = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
    return ended.returncode == 0


def choose() -> str:
    """Return the best isolation of this machine: bubblewrap, docker or none."""
    # Old kernels count all processes of the user: then the box could not fork.
    fork = [*LIMITS, "sh", "-c", "true | true"]
    if works(["bwrap", "--ro-bind", "/", "/", "--unshare-all", *fork]):
        return "bubblewrap"
    if works(["docker", "image", "inspect", IMAGE]):
        return "docker"
    return "none"


def wrap(kind: str, folder: Path, hidden: Path, arguments: list[str]) -> list[str]:
    """Return a command that runs grade.py with an answer's folder as its only disk.

    `hidden` is the folder with all answers of the class.
    """
    command = [sys.executable, str(REPO / "labs/grade.py"), *arguments]
    if kind == "docker":
        command = ["docker", "run", "--rm", "--network=none", "--memory=4g"]
        command += ["--pids-limit=128", "--cap-drop=ALL", "--read-only"]
        command += ["--tmpfs=/tmp", "--user", f"{os.getuid()}:{os.getgid()}"]
        command += ["--volume", f"{folder}:{folder}", "--workdir", str(folder), IMAGE]
        command += ["python", "/guide/labs/grade.py", *arguments]
    if kind == "bubblewrap":
        command = [*bubblewrap_options(folder, hidden), *command]
    return command


def bubblewrap_options(folder: Path, hidden: Path) -> list[str]:
    """Return the options: the disk is read-only, home and the class are not visible."""
    options = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session"]
    options += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    for place in (Path.home(), Path("/tmp")):
        if place != Path("/"):
            options += ["--tmpfs", str(place)]
    # The programs may be in one of these two folders, also behind a link.
    for place in (REPO, Path(sys.prefix), Path(sys.base_prefix)):
        options += ["--ro-bind", str(place.resolve()), str(place.resolve())]
    for place in (hidden, REPO / "runs"):
        if place.is_dir():
            options += ["--tmpfs", str(place.resolve())]
    options += ["--bind", str(folder), str(folder), "--chdir", str(folder)]
    options += ["--clearenv", "--setenv", "PATH", os.environ["PATH"], "--"]
    return [*options, *LIMITS]


class Runner:
    """Runs commands, several at a time; ends them and their processes at a deadline."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: set[subprocess.Popen] = set()

    def run(self, command: list[str]) -> tuple[int | None, str, str]:
        """Return exit code, stdout and stderr; the code is None after the deadline."""
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            with self.lock:
                self.running.add(process)
            try:
                out, err = process.communicate(timeout=SECONDS)
                return process.returncode, out, err
            except subprocess.TimeoutExpired:
                return None, "", ""
            finally:
                self.end(process)

    def end(self, process: subprocess.Popen) -> None:
        """Kill a command's processes, also those that it left behind."""
        with self.lock:
            self.running.discard(process)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def end_all(self) -> None:
        for process in list(self.running):
            self.end(process)
