"""Several hosts on one machine, with networks of their own: launch on them, break them.

    CPU   python cluster/virtual_cluster.py up --nodes 2 --link 1gbit
          python cluster/virtual_cluster.py run -- hostname
          python cluster/virtual_cluster.py down

A node is a first process in its own namespaces. The switch is a first process too, with
a bridge for each network card; all nodes end with the switch. Needs Linux, and root or
a kernel that lets every user make namespaces. Imports no torch: a verb starts at once.

Sources: namespaces(7), pid_namespaces(7), unshare(1), nsenter(1), tc-tbf(8).
"""

import argparse
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from cluster_parts import virtual_cluster as linux
from cluster_parts.virtual_cluster import ClusterError, Node

MOST_NODES, MOST_CARDS = 32, 4
GRACE_S = 40.0  # torchrun gives its workers 30 s to save after SIGTERM
END_S = 60.0
# nsenter begins at the root of the node's file systems.
ENTER = 'cd "$0" && exec "$@"'


# Verbs


def start_cluster(args):
    """Start the switch and the nodes; return the status."""
    linux.check_machine()
    args.at.mkdir(parents=True, exist_ok=True)
    if linux.find(args.at):
        raise ClusterError(f"a cluster is up already at {args.at}: `down` ends it")
    cluster = linux.start_switch(args)
    try:
        for number in range(args.nodes):
            cluster.nodes.append(Node(number))
        linux.write_hosts(cluster)
        for node in cluster.nodes:
            linux.boot(cluster, node)
        linux.save(cluster)
    except BaseException:
        os.kill(cluster.pid, signal.SIGKILL)
        raise
    return describe(cluster)


def describe(cluster):
    """Return a line for the cluster and one for each node."""
    link = f"{linux.show_rate(cluster.rate)} by token buckets"
    delay = f", {cluster.delay_s * 1e3:g} ms by netem" if cluster.delay_s else ""
    lines = [
        f"nodes: {len(cluster.nodes)}, cards of each: {cluster.cards}, {link}{delay}"
    ]
    for node in cluster.nodes:
        state = "up" if node.is_up else "off"
        if node.is_up and node.is_cut:
            state = "cut"
        rates = [
            f"link{card} {linux.show_rate(node.rates[card])}"
            for card in range(cluster.cards)
        ]
        lines.append(
            f"{node.name}  {linux.address(node.number)}  {state}  {', '.join(rates)}"
        )
    return "\n".join(lines)


def change(args):
    """Do what a verb says to a node; return what to print."""
    cluster = linux.load(args.at)
    node = find_node(cluster, args.node)
    if node.is_up == (args.verb == "start"):
        state = "is up already" if node.is_up else "is off: `start` boots it"
        raise ClusterError(f"{node.name} {state}")
    outcome = ""
    match args.verb:
        case "cut":
            linux.set_cables(cluster, node, "down")
            outcome = "cables unplugged"
        case "restore":
            linux.set_cables(cluster, node, "up")
            linux.limit_rate(cluster, node, cluster.rate)
            outcome = "as new"
        case "slow":
            linux.limit_rate(cluster, node, args.rate, args.card)
            outcome = linux.show_rate(args.rate)
        case "kill":
            linux.remove_cables(cluster, node)  # first: a power cut sends nothing
            end_process(node.pid)
            outcome = "killed"
        case "start":
            linux.boot(cluster, node)
            outcome = "booted"
    linux.save(cluster)
    return f"{node.name}: {outcome}"


def find_node(cluster, name):
    for node in cluster.nodes:
        if name in (node.name, str(node.number)):
            return node
    last = cluster.nodes[-1].name
    raise ClusterError(f"no node {name!r}: the nodes are node0 to {last}")


def end_process(pid):
    """Kill a first process, and wait until the kernel has ended its namespace."""
    with contextlib.suppress(ProcessLookupError):
        ending = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        select.select([ending], [], [], END_S)
        os.close(ending)


def end_cluster(args):
    """End the switch, and with it all nodes."""
    end_process(linux.load(args.at).pid)
    for name in linux.FILES:
        (args.at / name).unlink()
    return "down"


# Running commands on nodes


def run_on_nodes(args, command):
    """Run a command on nodes at once; return the first code that is not 0, or 0."""
    cluster = linux.load(args.at)
    nodes = [node for node in cluster.nodes if node.is_up]
    if args.on:
        nodes = [find_node(cluster, name) for name in args.on.split(",")]
    off = [node.name for node in nodes if not node.is_up]
    if off or not nodes:
        raise ClusterError(f"{(off or ['each node'])[0]} is off: `start` boots it")
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    guard, stop_guard = start_guard(mark)
    started = []
    deadline = float("inf")

    def hand_on(number, frame):
        """Pass SIGTERM or SIGINT on, so that jobs save; after a second one, end."""
        nonlocal deadline
        first = deadline == float("inf")
        deadline = time.monotonic() + (GRACE_S if first else 0.0)
        for process in started:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(process.pid).children():
                    child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    lock, printers = threading.Lock(), []
    for place, node in enumerate(nodes):
        process = start_command(cluster, nodes, place, command, mark)
        started.append(process)
        for source, target in (
            (process.stdout, sys.stdout),
            (process.stderr, sys.stderr),
        ):
            words = (node.name, source, target, lock)
            printers.append(threading.Thread(target=copy_lines, args=words))
            printers[-1].start()
    code = wait_for(started, lambda: time.monotonic() > deadline)
    os.close(stop_guard)  # the guard kills what is left
    os.waitpid(guard, 0)
    for printer in printers:
        printer.join()
    return code


def start_command(cluster, nodes, place, command, mark):
    """Start the command on one of these nodes, with its placeholders filled in."""
    node = nodes[place]
    words = {
        "node": place,
        "nodes": len(nodes),
        "name": node.name,
        "master": linux.address(nodes[0].number),
    }
    path = os.environ.get("PATH", os.defpath)
    environ = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "GLOO_SOCKET_IFNAME": "link0",
        "NCCL_SOCKET_IFNAME": "link0",
        "VIRTUAL_RUN": mark,
        "PATH": f"{os.path.dirname(sys.executable)}:{path}",
    }
    inside = linux.enter(cluster, node.pid, *linux.NAMESPACES)
    filled = [fill_in(word, words) for word in command]
    return subprocess.Popen(
        [*inside, "sh", "-c", ENTER, os.getcwd(), *filled],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | environ,
        start_new_session=True,
    )


def fill_in(word, values):
    """Fill in {node} and so on; other text in braces stays."""
    pattern = r"\{(" + "|".join(values) + r")\}"
    return re.sub(pattern, lambda match: str(values[match[1]]), word)


def wait_for(processes, is_late):
    """Wait until all have ended or is_late(); return the first code that is not 0."""
    code, running = 0, list(processes)
    while running and not is_late():
        for process in [one for one in running if one.poll() is not None]:
            running.remove(process)
            ended = process.returncode
            code = code or (ended if ended >= 0 else 128 - ended)
        time.sleep(0.02)
    return code or (137 if running else 0)


def copy_lines(name, source, target, lock):
    """Print a command's lines with the name of its node before them."""
    for line in source:
        with lock:
            target.write(f"[{name}] {line.decode(errors='replace').rstrip(chr(10))}\n")
            target.flush()


def start_guard(mark):
    """Fork a process that waits for the end of this one, then kills what it has left.

    Returns its pid, and the descriptor whose closing it waits for.
    """
    ended, stop = os.pipe()
    guard = os.fork()
    if guard == 0:
        os.setsid()
        os.close(stop)
        os.read(ended, 1)
        while kill_marked(mark):
            time.sleep(0.02)
        os._exit(0)
    os.close(ended)
    return guard, stop


def kill_marked(mark):
    """Kill the processes with this mark in their environment; return their number."""
    killed = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = process.environ().get("VIRTUAL_RUN") == mark
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                killed += 1
    return killed


# Command line


def parse_args(argv):
    """Parse the command line; the words after `--` are the command to run."""
    options, command = argv, []
    if "--" in argv:
        options, command = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add_verb(name, text, of_node=False):
        added = verbs.add_parser(name, help=text, description=text)
        add = added.add_argument
        folder = Path("runs/virtual_cluster")
        add("--at", default=folder, metavar="FOLDER", type=Path, help=f"({folder})")
        if of_node:
            add("node", metavar="NODE")
        return add

    up = add_verb("up", "start a cluster")
    up("--nodes", type=number_to(MOST_NODES), default=2, help="(2)")
    up("--cards", type=number_to(MOST_CARDS), default=1, help="cards of a node (1)")
    up(
        "--link",
        type=linux.parse_link,
        default=(0.0, 0.0),
        metavar="RATE[,DELAY]",
        help="such as 1gbit or 100mbit,1ms (as fast as this machine)",
    )
    up("--shm", type=linux.parse_size, default="1g", help="size of /dev/shm (1g)")
    run = add_verb("run", "run a command on each node: run -- COMMAND")
    run("--on", metavar="NODES", help="on these nodes only, such as node0,node2")
    add_verb("status", "print the state of each node")
    add_verb("cut", "unplug a node's cables", of_node=True)
    add_verb("restore", "undo cut and slow", of_node=True)
    slow = add_verb("slow", "slow a node's cards", of_node=True)
    slow("--card", type=int, help="this card only (all)")
    slow("--rate", type=linux.parse_rate, required=True, help="such as 50mbit")
    add_verb("kill", "end a node at once, as a power cut does", of_node=True)
    add_verb("start", "boot a node that was killed", of_node=True)
    add_verb("down", "end the cluster and everything that runs on it")
    args = parser.parse_args(options)
    if (args.verb == "run") != bool(command):
        parser.error("run takes a command after --, such as: run -- hostname")
    args.at = args.at.absolute()
    return args, command


def number_to(most):
    """Return a parser of whole numbers from 1 to `most`."""

    def parse(text):
        if not (text.isdecimal() and 1 <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"must be 1 to {most}, not {text!r}")
        return int(text)

    return parse


def main():
    args, command = parse_args(sys.argv[1:])
    try:
        match args.verb:
            case "up":
                print(start_cluster(args))
            case "run":
                return run_on_nodes(args, command)
            case "status":
                print(describe(linux.load(args.at)))
            case "down":
                print(end_cluster(args))
            case _:
                print(change(args))
    except (ClusterError, OSError) as error:
        print(f"virtual_cluster.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
