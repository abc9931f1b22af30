"""Start small jobs for the tests of triage: a process with torch forks each rank.

As a program it reads lines "KIND RANKS FOLDER", and forks for each one a launcher,
which forks the ranks; it prints the pid of the launcher. Each rank writes RANK and so
on over its place in the environment that /proc shows. Ranks die with their launcher,
launchers with this process, which ends with its input.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
# A rank overwrites these: names and values have the lengths that it needs.
BLANK = {
    "XANK": "0",
    "XORLD_SIZE": "4",
    "XOCAL_RANK": "0",
    "XOCAL_WORLD_SIZE": "4",
    "XASTER_PORT": "10000",
}


def overwrite(old, new):
    """Replace a variable where the kernel put this process's environment."""
    fields = Path("/proc/self/stat").read_text().rsplit(") ", 1)[1].split()
    start, end = (
        int(fields[47]),
        int(fields[48]),
    )  # env_start, env_end: proc_pid_stat(5)
    at = ctypes.string_at(start, end - start).index(f"\0{old}\0".encode())
    ctypes.memmove(start + at + 1, new.encode(), len(new))
    name, _, value = new.partition("=")
    os.environ[name] = value


# Healthy jobs: each trains to the end of its time


def counts_iterations(rank, dist, torch):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    for iter_num in range(10**9):  # noqa: B007
        model(torch.ones(8, 64)).sum().backward()


def waits_for_a_slow_rank(rank, dist, torch):
    for batch_idx in range(10**9):  # noqa: B007
        time.sleep(0.3 if rank == 1 else 0)
        dist.all_reduce(torch.ones(1))


def counts_nothing(rank, dist, torch):
    def batches():
        while True:
            yield torch.ones(200, 200)

    for batch in batches():
        for matrix in [batch] * 20:
            batch @ matrix
        dist.all_reduce(torch.ones(1))


# Jobs that hang


def a_rank_sleeps(rank, dist, torch):
    if rank == 1:
        time.sleep(1e6)
    dist.barrier()


def a_rank_computes(rank, dist, torch):
    while rank == 1:
        "x" * 10**6
    dist.barrier()


def a_rank_skips_a_barrier(rank, dist, torch):
    if rank != 1:
        dist.barrier()
    dist.all_reduce(torch.ones(1))
    dist.barrier()


def groups_are_made_in_another_order(rank, dist, torch):
    sets = [[0, 1], [0, 1, 2]] if rank else [[0, 1, 2], [0, 1]]
    for ranks in sets:
        dist.new_group(ranks)
    dist.barrier()


def a_group_is_called_in_another_order(rank, dist, torch):
    pair = dist.new_group([0, 1])
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    if rank < 2:
        dist.all_reduce(torch.ones(1), group=pair)
    if rank != 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(1e6)


def a_message_is_missing(rank, dist, torch):
    if rank == 0:
        dist.recv(torch.ones(1), src=1)
    dist.barrier()


def a_worker_reads_for_ever(rank, dist, torch):
    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            time.sleep(1e6 if rank == 2 else 0)
            return torch.ones(1)

    for _ in torch.utils.data.DataLoader(Samples(), num_workers=1):
        dist.barrier()


def be_rank(kind, rank, ranks, folder, port):
    import torch
    import torch.distributed as dist

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: prctl(2)
    wanted = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": port,
    }
    for (blank, value), (name, new) in zip(BLANK.items(), wanted.items(), strict=True):
        overwrite(f"{blank}={value}", f"{name}={new}")
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    if (folder / "record").exists():
        from cluster_parts import recorder

        recorder.record(folder / "notes" / f"rank-{rank}.trace")
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    (folder / f"ready-{rank}").touch()
    globals()[kind](rank, dist, torch)


def be_launcher(kind, ranks, folder, port):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    for rank in range(ranks):
        if os.fork() == 0:
            try:
                be_rank(kind, rank, ranks, folder, port)
            finally:
                os._exit(1)
    while True:
        signal.pause()


def main():
    sys.path[:0] = [str(REPO), str(REPO / "cluster")]
    import torch

    import cluster_parts.recorder  # noqa: F401  here once, not in each rank

    torch.set_num_threads(1)
    print("ready", flush=True)
    for port, line in enumerate(sys.stdin, 10001):
        kind, ranks, folder = line.split()
        pid = os.fork()
        if pid == 0:
            be_launcher(kind, int(ranks), Path(folder), port)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
