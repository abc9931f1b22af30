"""Check all nodes of a job before it starts, and name the node that is wrong.

    CPU   torchrun --standalone --nproc-per-node=2 cluster/preflight.py
    GPU   srun --ntasks-per-node=8 python cluster/preflight.py --pairs

Each rank puts facts of its node into the launcher's store, so that a result comes even
if no process group can be made. Rank 0 compares the nodes. If no finding prevents it,
all ranks then run a small all-reduce and, with --pairs, measure each pair of nodes.
One line per finding. Exit code: 0 if nothing is wrong, 1 with a finding, 2 for wrong
usage.
"""

import argparse
import contextlib
import ipaddress
import json
import os
import random
import socket
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from tabulate import tabulate

from cluster_parts import host
from cluster_parts import preflight as judge
from cluster_parts.preflight import show_gib, show_rate
from dist_common import cli, runtime

GRACE_S = 5.0  # rank 0 stays longer than the others try, because it has the report
POLL_S = 0.2  # between two looks into the store
NUMBERS = 65_536  # in the all-reduce
MESSAGE_BYTES = {"cpu": 2**20, "cuda": 2**26}
MESSAGES, REPEATS = 4, 3  # between two nodes; the fastest repeat counts


@dataclass
class Place:
    """This rank's place in the job, and where the ranks meet."""

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master: str
    port: int


def find_place():
    """Return this rank's place, and restore the environment."""
    before = dict(os.environ)
    numbers = runtime.find_ranks()
    place = Place(*numbers, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    for name in set(os.environ) - set(before):
        del os.environ[name]
    return place


# The launcher's store


def problem_with_master(place):
    """Say why MASTER_ADDR cannot be right on this node; nothing if it can."""
    try:
        addresses = socket.getaddrinfo(place.master, None, type=socket.SOCK_STREAM)
    except OSError:
        return f"MASTER_ADDR={place.master} does not resolve here"
    address = addresses[0][4][0]
    is_loopback = ipaddress.ip_address(address.split("%")[0]).is_loopback
    if is_loopback and place.rank >= place.local_world_size:
        return f"MASTER_ADDR={place.master} is {address}, but rank 0 is on another node"
    return ""


def open_store(place, deadline):
    """Connect to the launcher's store, or make it on rank 0 if there is no launcher's.

    Raises: OSError or RuntimeError if it does not answer until `deadline`.
    """
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    makes_it = place.rank == 0 and not of_agent
    if not makes_it:
        wait_for_port(place, deadline)
    store = dist.TCPStore(
        place.master,
        place.port,
        place.world_size,
        makes_it,
        timedelta(seconds=max(1.0, deadline - time.monotonic())),
        wait_for_workers=False,
        multi_tenant=True,  # the process group's own store may be at this port too
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"preflight/{attempt}", store)


def wait_for_port(place, deadline):
    """Connect once. PyTorch's store would try for longer than its timeout."""
    while True:
        left = deadline - time.monotonic()
        try:
            # A name may have several addresses, which are tried one after the other.
            address = (place.master, place.port)
            socket.create_connection(address, min(3.0, max(0.1, left))).close()
            return
        except OSError:
            if left <= 0:
                raise
        time.sleep(random.uniform(0.2, 0.5))  # many ranks may ask


def collect(store, key, ranks, deadline):
    """Return {rank: value} of the ranks that set `key/rank` until the deadline."""
    keys = {rank: f"{key}/{rank}" for rank in ranks}
    while not store.check(list(keys.values())) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    came = {rank: name for rank, name in keys.items() if store.check([name])}
    return {rank: json.loads(store.get(name)) for rank, name in came.items()}


def read(store, key):
    """Wait for rank 0 to set a key; return its value."""
    while not store.check([key]):
        time.sleep(POLL_S)
    return json.loads(store.get(key))


# Measurements


def measure(args, nodes):
    """All-reduce on all ranks, then measure pairs of nodes; return what came out.

    nodes: the ranks of each node.
    """
    # NCCL's watchdog would end the process, and with it the report.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    result = {"step": "making the process group"}
    try:
        with runtime.init(args.device, args.timeout) as run:
            try:
                result["step"] = "the all-reduce"
                result["wrong"] = count_wrong_sums(run.device)
                if args.pairs:
                    result["step"] = "sending between nodes"
                    result["rates"] = measure_pairs(nodes, run.device)
            except Exception as error:
                error.printed = True  # rank 0 reports it
                raise
    except (RuntimeError, OSError) as error:
        result["error"] = str(error)
    return result


def count_wrong_sums(device):
    """All-reduce whole numbers; return how many of the sums are wrong."""
    places = torch.arange(NUMBERS, device=device)
    sums = places + dist.get_rank()
    dist.all_reduce(sums)
    world_size = dist.get_world_size()
    expected = places * world_size + sum(range(world_size))
    return int((sums != expected).sum())


def measure_pairs(nodes, device):
    """Return {peer: bytes/s}: this rank and its counterpart on each other node send.

    A pair sends in both directions at once; in a round, each node is in one pair.
    """
    rank, best = dist.get_rank(), {}
    message = torch.ones(MESSAGE_BYTES[device.type], dtype=torch.uint8, device=device)
    arrived = torch.empty_like(message)
    for _ in range(REPEATS):
        for pairs in rounds_of(len(nodes)):
            peer = find_counterpart(rank, nodes, pairs)
            dist.barrier()
            if peer is None:
                continue
            started = time.perf_counter()
            for _ in range(MESSAGES):
                sends = dist.P2POp(dist.isend, message, peer)
                receives = dist.P2POp(dist.irecv, arrived, peer)
                for work in dist.batch_isend_irecv([sends, receives]):
                    work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            rate = MESSAGES * message.nbytes / seconds
            best[peer] = max(best.get(peer, 0.0), rate)
    return best


def rounds_of(count):
    """Yield rounds of disjoint pairs, in which each of `count` nodes meets each other.

    The circle method of tournaments: node 0 stays, the others move by one place.
    """
    circle = list(range(count + count % 2))
    for _ in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        yield [pair for pair in pairs if max(pair) < count]
        circle.insert(1, circle.pop())


def find_counterpart(rank, nodes, pairs):
    """Return the rank on the other node of this round's pair; None if there is none."""
    for pair in pairs:
        for node, other in (pair, reversed(pair)):
            if rank in nodes[node]:
                place = nodes[node].index(rank)
                return nodes[other][place] if place < len(nodes[other]) else None
    return None


# Report


def show(nodes, results, findings):
    """Print the nodes, the rates of pairs, the findings and the verdict."""
    rows = []
    for name, members in list(nodes.items())[: judge.SHOWN]:
        one = members[0]
        listens = one.get("listens", {})
        row = [name, len(members), f"torch {one['alike']['torch']}"]
        row += [", ".join(listens.get(library, ())) for library in ("gloo", "NCCL")]
        free = one["amounts"].get("free in /dev/shm")
        rows.append([*row, show_gib(free) if free else ""])
    heads = ("node", "ranks", "library", "gloo at", "NCCL at", "/dev/shm")
    print(tabulate(rows, heads, disable_numparse=True))
    if len(nodes) > judge.SHOWN:
        print(f"... and {len(nodes) - judge.SHOWN} more nodes")
    show_pairs(nodes, results)
    for finding in findings:
        print(finding.line)
    ranks = sum(map(len, nodes.values()))
    totals = f"nodes: {len(nodes)}, ranks: {ranks}"
    if findings:
        print(f"FAILED: findings: {len(findings)}, {totals}")
    else:
        done = "compared, all-reduce right" if results else "compared"
        print(f"OK: {totals}, {done}")


def show_pairs(nodes, results):
    """Print the rate of each pair of nodes; of many nodes, the slowest pairs."""
    pairs = {}
    name_of = {one["rank"]: name for name, members in nodes.items() for one in members}
    for rank, one in results.items():
        for peer, rate in one.get("rates", {}).items():
            if rank < int(peer):
                pair = f"{name_of[rank]} - {name_of[int(peer)]}"
                pairs[pair] = pairs.get(pair, 0.0) + rate
    if pairs:
        slowest = sorted(pairs, key=pairs.get)[: judge.SHOWN]
        middle = show_rate(median(pairs.values()))
        print(f"\npairs of nodes: {len(pairs)}, median {middle}; the slowest:")
        for pair in sorted(slowest):
            print(f"  {pair}: {show_rate(pairs[pair])}")


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(auto)")
    add(
        "--wait",
        type=cli.positive_float,
        default=30.0,
        metavar="SECONDS",
        help="how long to wait for the facts of all ranks (30)",
    )
    add(
        "--timeout",
        type=cli.positive_float,
        default=60.0,
        metavar="SECONDS",
        help="how long a collective waits for the other ranks (60)",
    )
    add(
        "--expect-nodes",
        type=judge.expand,
        metavar="NAMES",
        help="who has to come, such as node[0-3],gpu7 (the nodes of SLURM's job)",
    )
    add("--pairs", action="store_true", help="measure each pair of nodes")
    add(
        "--settings-only",
        action="store_true",
        help="compare facts only: no process group, no messages",
    )
    return parser.parse_args()


def main():
    args = parse_args()
    started = time.monotonic()
    place = find_place()
    problem = problem_with_master(place)
    try:
        if not problem:
            store = open_store(place, started + args.wait)
            facts = host.read_facts(place, args.device)
            store.set(f"facts/{place.rank}", json.dumps(facts))
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or str(error).splitlines()[0][:100]
        problem = f"MASTER_ADDR={place.master}, MASTER_PORT={place.port}: {why}"
    if problem:
        return give_up(args, place, problem, started)
    if place.rank == 0:
        return lead(args, place, store, started)
    return follow(args, place, store)


def give_up(args, place, problem, started):
    """Say why this rank cannot report to rank 0, and leave after rank 0."""
    if place.local_rank == 0:
        do = "Give all nodes the address and port of rank 0's node."
        say(place, f"{problem}. {do}")
    if place.rank > 0:  # many launchers end all ranks when one ends
        rank0_ends = started + args.wait + 2 * GRACE_S
        time.sleep(max(0.0, rank0_ends - time.monotonic()))
    return cli.FAILED


def say(place, what):
    """Print what only this rank knows."""
    print(f"{socket.gethostname()}: rank {place.rank}: {what}", flush=True)


def lead(args, place, store, started):
    """Collect, compare, have all ranks measure if nothing prevents it; report."""
    deadline = started + args.wait + GRACE_S
    facts = collect(store, "facts", range(place.world_size), deadline)
    ranks = list(facts.values())
    nodes = judge.group_by_node(ranks)
    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    listed = os.environ.get("SLURM_STEP_NODELIST", listed)
    expected = args.expect_nodes or judge.expand(listed)
    findings = judge.find_absent(ranks, place, expected, args.wait)
    findings += judge.compare_nodes(nodes)
    goes_on = not args.settings_only and not any(one.stops for one in findings)
    groups = [judge.numbers(members) for members in nodes.values()] if goes_on else []
    store.set("measure", json.dumps(groups))
    results = {}
    if goes_on:
        store.set("result/0", json.dumps(measure(args, groups)))
        deadline = time.monotonic() + GRACE_S
        results = collect(store, "result", facts, deadline)
        findings += judge.compare_results(nodes, results, args.timeout)
    show(nodes, results, findings)
    sys.stdout.flush()
    code = cli.FAILED if findings else 0
    store.set("code", str(code))
    # The store ends with this rank: let the others read the code.
    others = [rank for rank in facts if rank > 0]
    collect(store, "left", others, time.monotonic() + GRACE_S)
    return code


def follow(args, place, store):
    """Measure if rank 0 says so; return rank 0's exit code."""
    with ended_after(args.wait + 2 * GRACE_S, place):
        nodes = read(store, "measure")
    if nodes:
        result = json.dumps(measure(args, nodes))
    with ended_after(args.timeout + 2 * GRACE_S, place):
        if nodes:
            store.set(f"result/{place.rank}", result)
        code = read(store, "code")
        store.set(f"left/{place.rank}", "1")
    return code


@contextlib.contextmanager
def ended_after(seconds, place):
    """End this process if the block takes longer.

    Without a network PyTorch's store waits forever: it tells its server that it waits
    no longer, and waits for the answer.
    """

    def end():
        say(place, f"no word from rank 0 at {place.master} in {seconds:g} s.")
        os._exit(cli.FAILED)

    timer = threading.Timer(seconds + 1.0, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


if __name__ == "__main__":
    cli.run(main)
