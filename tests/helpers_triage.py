"""Start drawn/train.py many times: a process that has imported torch forks each rank.

Run as a program it reads lines "SEED FOLDER" (SEED may be "none"), and forks for each one a
launcher, which forks four ranks; it prints the launcher's pid. Each rank writes RANK and so on over
its place in the environment that /proc shows, as a process that was started with it would have.
Ranks die with their launcher, and launchers with this process, which ends with its input.
"""

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
RANKS = 4
# What a rank overwrites: names and values as long as those that it needs.
BLANK = {"XANK": "0", "XORLD_SIZE": "4", "XOCAL_RANK": "0", "XOCAL_WORLD_SIZE": "4"}


def overwrite(old: str, new: str) -> None:
    """Replace a variable in the memory where the kernel put this process's environment."""
    fields = Path("/proc/self/stat").read_text().rsplit(") ", 1)[1].split()
    start, end = int(fields[47]), int(fields[48])  # env_start, env_end: proc_pid_stat(5)
    at = ctypes.string_at(start, end - start).index(f"\0{old}\0".encode())
    ctypes.memmove(start + at + 1, new.encode(), len(new))
    name, _, value = new.partition("=")
    os.environ[name] = value


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: prctl(2)


def be_rank(rank: int, seed: str, folder: Path, network, port: int) -> None:
    from cluster_parts import recorder

    die_with_parent()
    alone = network is not None
    local = {"LOCAL_RANK": 0 if alone else rank, "LOCAL_WORLD_SIZE": 1 if alone else RANKS}
    own = {"RANK": rank, "WORLD_SIZE": RANKS, **local}
    for (blank, value), (name, wanted) in zip(BLANK.items(), own.items(), strict=True):
        overwrite(f"{blank}={value}", f"{name}={wanted}")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if network:
        network.enter(rank)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    recorder.record(folder / "notes" / f"rank-{rank}.trace")
    script = REPO / "cluster/drawn/train.py"
    sys.argv = [str(script), *([] if seed == "none" else [seed])]
    runpy.run_path(str(script), run_name="__main__")


def be_launcher(seed: str, folder: Path, network) -> None:
    from cluster_parts.triage import free_port

    die_with_parent()
    port = free_port()
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            try:
                be_rank(rank, seed, folder, network, port)
            finally:
                os._exit(1)
    while True:
        signal.pause()


def main() -> None:
    sys.path[:0] = [str(REPO), str(REPO / "cluster")]
    import torch

    import cluster_parts.recorder  # noqa: F401  here once, not in each rank
    from legacy_common.lab import namespaces

    torch.set_num_threads(1)
    why_not = namespaces.why_not()
    print("ready", flush=True)
    for line in sys.stdin:
        seed, folder = line.split()
        apart = why_not is None and seed != "none" and int(seed) % 5 == 4
        network = namespaces.hosts([1e9] * RANKS) if apart else None
        nodes = network.__enter__() if network else None
        pid = os.fork()
        if pid == 0:
            be_launcher(seed, Path(folder), nodes)
        if network:
            network.__exit__(None, None, None)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
