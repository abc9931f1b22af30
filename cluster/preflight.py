"""Check all nodes of a job before it starts, and name the node to drain.

    CPU   torchrun --standalone --nproc-per-node=2 cluster/preflight.py
    GPU   srun python cluster/preflight.py    (or torchrun, on each node of the job)

Exit code, for a prolog: 0 healthy, 1 a node to drain, 2 the job cannot run for another reason
(torchrun turns 2 into 1). Look for: lines that begin with DRAIN, and the table of the nodes: one
that differs from the others is visible before it is bad enough to be named.

Sources: F. Cristian, Probabilistic clock synchronization, 1989 (clocks); K.-H. Huang and
J. Abraham, Algorithm-based fault tolerance for matrix operations, 1984 (sums of columns).
"""

import contextlib
import hashlib
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist

import doctor
import legacy_common
from cluster_parts import host
from cluster_parts import preflight as part
from cluster_parts.host import nodes_of
from cluster_parts.pairwise_scan import numbers_of
from legacy_common import cli, runtime
from legacy_common.report import Report
from pairwise_scan import meet, rounds_of

ROUND_TRIPS = 10  # of which the fastest tells most of a clock
MOST = 127  # of a matrix's numbers: 1024 products of two stay below 2**24, what float32 counts to
DEPTH = 1024  # numbers in each of the sums that a product is made of
SIDE = {"cpu": 512, "cuda": 8192}
FORMATS = {"cpu": [torch.float32], "cuda": [torch.float32, torch.bfloat16]}
NUMBERS = 65_536  # in an all-reduce
REPEATS, ENOUGH_S = 3, 10.0  # of the scan of the links, and after how long there is no other one
BURST_S = 0.03  # what a switch or a card buffers goes through at once: a burst is longer
SEEN_S = 5.0  # network file systems may show a new file late
GRACE_S = 15.0  # after the timeout, for what ranks say of it
LAST_S = 5.0  # rank 0 speaks first: a launcher ends all ranks when one fails


def clock_ahead(leaders):
    """Return how far this rank's clock is ahead of rank 0's, and how wrong that may be, in s.

    Rank 0's time was read between sending and receiving: half of the fastest round trip is the
    most that it can be off. Called by the first rank of each node.
    """
    own, box = dist.get_rank(), torch.zeros(1, dtype=torch.float64)
    tries = []
    for leader in leaders[1:]:
        for _ in range(ROUND_TRIPS if own in (0, leader) else 0):
            if own == 0:
                dist.recv(box, leader)
                box[0] = time.time()
                dist.send(box, leader)
                continue
            sent = time.time()
            dist.send(box, 0)
            dist.recv(box, 0)
            back = time.time()

            tries.append(((back - sent) / 2, (sent + back) / 2 - box.item()))

    off, ahead = min(tries, default=(0.0, 0.0))
    return ahead, off


def multiply(device):
    """Multiply two matrices of whole numbers; return checksums, wrong columns and TFLOP/s.

    Every sum is below 2**24, so that float32 holds it exactly: the product is the same in any order
    of additions, on any device. The sums of its columns are known without it: (1 A) B = 1 (A B).
    """
    side, seeded = SIDE[device.type], torch.Generator().manual_seed(0)
    left, right = (torch.randint(-MOST, MOST + 1, shape, generator=seeded).float()
                   for shape in ((side, DEPTH), (DEPTH, side)))  # fmt: skip
    sums = left.double().sum(0) @ right.double()
    found = {"checksums": [], "wrong_columns": 0, "tflop_s": 0.0}
    for dtype in FORMATS[device.type]:
        a, b = left.to(device, dtype), right.to(device, dtype)
        for _ in range(2):  # a fault may come and go
            product = torch.mm(a, b).float().cpu()
            found["checksums"].append(hashlib.sha256(product.numpy().tobytes()).hexdigest()[:12])
            if dtype == torch.float32:  # bfloat16 rounds
                found["wrong_columns"] += int((product.double().sum(0) != sums).sum())
        found["tflop_s"] = rate_of(a, b, device)
    return found


def rate_of(a, b, device):
    """Return TFLOP/s of the fastest of five tries."""
    calls, seconds = 20 if device.type == "cuda" else 1, []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(calls):
            torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - started) / calls)
    return 2 * a.shape[0] * a.shape[1] * b.shape[1] / min(seconds) / 1e12


def add_up(ranks, device):
    """All-reduce in a group of these ranks; return how many numbers of the sum are wrong."""
    everybody = len(ranks) == dist.get_world_size()
    # With local synchronization only members make a group: there may be a thousand nodes.
    group = None if everybody else dist.new_group(ranks, use_local_synchronization=True)
    places = torch.arange(NUMBERS, device=device)
    numbers = places + dist.get_rank()

    dist.all_reduce(numbers, group=group)

    return int((numbers != places * len(ranks) + sum(ranks)).sum())


def scan_links(nodes, device, nbytes, iters):
    """Have each node meet each other one; return [sender, receiver, GB/s] and wrong numbers.

    All ranks of two nodes send at once, each to its counterpart, in as many rounds as there are
    nodes. Of a way's repeats the best counts: what disturbs a machine makes it slower only.
    """
    own, size = dist.get_rank(), min(map(len, nodes))
    message = numbers_of(own, torch.empty(max(1, nbytes // 4), device=device))
    arrived, best, wrong = torch.empty_like(message), defaultdict(float), 0
    rounds, started = rounds_of([node[:size] for node in nodes], nodes_only=True), time.monotonic()
    iters = iters or enough_messages(rounds[0], message, arrived)
    for repeat in range(REPEATS):
        for pairs in rounds:
            pair = next((pair for pair in pairs if own in pair), None)

            gb_s, differ = meet(pair, message, arrived, iters, repeat)

            wrong += differ
            if pair:
                way = own, sum(pair) - own
                best[way] = max(best[way], gb_s)
        if runtime.from_rank0(time.monotonic() - started > ENOUGH_S):
            break
    return [[*way, gb_s] for way, gb_s in best.items()], wrong


def enough_messages(pairs, message, arrived):
    """Return how many messages last BURST_S on most links: the same on all ranks."""
    pair = next((pair for pair in pairs if dist.get_rank() in pair), None)
    gb_s, _ = meet(pair, message, arrived, 1, 0)
    known = [speed for speed in runtime.gather(gb_s) if speed]
    return max(1, round(BURST_S * 1e9 * statistics.median(known) / message.nbytes))


def share_a_file(folder, token, is_leader):
    """Have rank 0 write a token that the first rank of each node reads; return what keeps it from.

    All ranks call it. Each of those ranks also writes a file of its own.
    """
    own, path, problem = dist.get_rank(), Path(folder, f".preflight-{token}"), None
    try:
        try:
            if own == 0:
                write_through(path, token)
        except OSError as error:
            problem = f"cannot write: {error.strerror}"
        dist.barrier()
        if is_leader and own:
            problem = problem_with(path, token)
        dist.barrier()
        return problem
    finally:
        if own == 0:
            path.unlink(missing_ok=True)


def problem_with(path, token):
    """Return what keeps a node from a file that another one has written; None if nothing does."""
    if not path.parent.is_dir():
        return "there is no such folder"
    deadline = time.monotonic() + SEEN_S
    while not (path.exists() and path.read_text() == token):
        if time.monotonic() > deadline:
            return part.UNSEEN
        time.sleep(0.1)
    try:
        with tempfile.TemporaryFile(dir=path.parent) as own:
            own.write(b"0" * 4096)
    except OSError as error:
        return f"cannot write: {error.strerror}"
    return None


def write_through(path, text):
    """Write a file and have the operating system send it to the disk, or to the file server."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def own_facts(world, args):
    """Return what doctor.py does not read: who was told what, code, the checkpoint's disk."""
    return {
        "world_size": world.world_size, "code": part.code_of(Path(legacy_common.__file__).parent),
        "legacy_common": legacy_common.__version__,
        "room": host.free_in(args.checkpoint_dir) if args.checkpoint_dir else None,
    }  # fmt: skip


def measure_together(args, world, token):
    """Do what needs all ranks; return what was found, and where it ended if it failed."""
    found = {"rank": world.rank, "step": "making the process group"}
    try:
        with runtime.init(args.device, args.timeout, cpu_tensors=True) as (_, device):
            try:
                take_steps(args, device, token, found)
            except Exception as error:
                error.told = True  # by rank 0, which hears of all such errors by the store
                raise
    except (RuntimeError, OSError) as error:
        found["error"] = str(error)
    return found


def take_steps(args, device, token, found):
    """Measure clock, product, sums, folder and links; put them and the place into `found`."""
    nodes, rank = nodes_of(), dist.get_rank()
    own = next(node for node in nodes if rank in node)
    is_leader = own[0] == rank
    found["step"] = "comparing the clocks"
    if is_leader:
        found["clock"] = clock_ahead([node[0] for node in nodes])
    found["step"] = "multiplying matrices"
    found |= multiply(device)
    found["step"] = "the all-reduce within each node"
    several = 1 < len(own) < dist.get_world_size()
    found["wrong_within"] = add_up(own, device) if several else 0
    found["step"] = "the all-reduce of all ranks"
    found["wrong_in_all"] = add_up([*range(dist.get_world_size())], device)
    if args.checkpoint_dir:
        found["step"] = f"writing to {args.checkpoint_dir}"
        found["folder"] = share_a_file(args.checkpoint_dir, token, is_leader)
    found["step"] = "scanning the links"
    for _ in range(2 if len(nodes) > 1 else 0):  # a node is named if it is slow twice
        nbytes = args.bytes or part.MESSAGE[device.type]
        ways, wrong = scan_links(nodes, device, nbytes, args.iters)
        found.setdefault("ways", []).append(ways)
        found["wrong_numbers"] = found.get("wrong_numbers", 0) + wrong
        all_ways = sum(runtime.gather(ways), [])
        if not part.slow_ranks(all_ways, nodes, args.link, args.slow_below):
            break
    found["step"] = "leaving"


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--wait", type=cli.positive_float, default=30.0, metavar="SECONDS",
        help="how long to wait for nodes that do not come (30)")  # fmt: skip
    add("--expect-nodes", type=part.expected_nodes, metavar="N|NAMES",
        help="how many nodes, or their names: node[0-3],gpu7 (those of SLURM's job)")  # fmt: skip
    add("--checkpoint-dir", metavar="DIR", help="all nodes must read and write there (not tried)")
    add("--free", type=cli.byte_size, default="1G", metavar="SIZE",
        help="what must be free in --checkpoint-dir (1G)")  # fmt: skip
    add("--max-skew", type=cli.positive_float, default=1.0, metavar="SECONDS",
        help="how far a node's clock may be from most others (1)")  # fmt: skip
    add("--link", type=cli.link_rate, help="what a node's network promises: 100gbit (not told)")
    add("--slow-below", type=cli.positive_float, default=0.7, metavar="PART",
        help="slow is below this part of the others' rate, or of --link's (0.7)")  # fmt: skip
    add("-b", "--bytes", type=cli.byte_size, metavar="SIZE",
        help="size of a message between nodes (256K, on GPUs 64M)")  # fmt: skip
    add("-n", "--iters", type=cli.positive_int, help="messages in a burst (enough for 30 ms)")
    parser.set_defaults(timeout=60.0)
    return parser.parse_args()


def main():
    args = parse_args()
    world, master, port = doctor.look_around()
    facts = doctor.read_facts(world, args.device)
    if "problem" not in facts:
        facts |= own_facts(world, args)
    report = Report("cluster/preflight.py", args, world, torch.device("cpu"))
    met = f"{world.world_size} ranks meet at {master}:{port}, within {args.wait:g} s"
    report.start(met if world.world_size > 1 else "one rank: there is nobody to compare with")
    started = time.monotonic()
    try:
        doctor.refuse_what_cannot_start(world, master)
        ranks, store = doctor.exchange(world, master, port, facts, args.wait)
    except cli.UsageError as error:
        after = f" (tried for {time.monotonic() - started:.0f} s from {part.way_to(master)})"
        return doctor.give_up(world, f"{error}{after}", started + args.wait + LAST_S)
    if world.is_rank0:
        return lead(args, world, report, store, ranks)
    with ended_after(args.wait + GRACE_S, world, master):
        token = doctor.word_of_rank0(store, "together", args.wait + GRACE_S)
    found = measure_together(args, world, token) if token else None
    with ended_after(args.timeout + 2 * GRACE_S, world, master):
        if found:
            store.set(f"measured/{world.rank}", json.dumps(found))
        return doctor.end_with_rank0(store, args.timeout + 2 * GRACE_S)


@contextlib.contextmanager
def ended_after(seconds, world, master):
    """End this process if what is in the `with` block takes longer.

    Where the network is cut, PyTorch's store waits for ever: it tells its server that it waits no
    longer, and waits for the answer.
    """

    def end():
        who = f"rank {world.rank} on host {socket.gethostname()}"
        what = f"no word from rank 0 at {master} after {seconds:g} s, from {part.way_to(master)}"
        print(f"preflight.py: error: {who}: {what}", file=sys.stderr, flush=True)
        os._exit(cli.BAD_INPUT)

    timer = threading.Timer(seconds + 1.0, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def lead(args, world, report, store, ranks):
    """Have the ranks measure together if all of them came; print the verdict, on rank 0."""
    expected = args.expect_nodes or part.expected_of_slurm()
    absent = part.absent(ranks, world, expected, args.wait)
    alone = absent or part.cannot_meet(ranks)
    token = "" if alone else f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
    store.set("together", token)
    measured = []
    if token:
        own = measure_together(args, world, token)
        store.set(f"measured/{world.rank}", json.dumps(own))
        measured = doctor.collect(store, "measured", world, time.monotonic() + GRACE_S)
    code = part.conclude(report, args, world, ranks, measured, absent)
    return doctor.end_together(store, code, others=len(ranks) - 1)


if __name__ == "__main__":
    cli.run(main)
