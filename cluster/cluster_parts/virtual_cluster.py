"""The Linux side of virtual_cluster.py: namespaces, cables, token buckets, state file.

The switch's first process is the first one of a PID namespace that holds all nodes. If
that process ends, the kernel ends all nodes, and the networks vanish.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

# A bucket lets some KB through at once, so that short messages are slowed too, but a
# millisecond's bytes, so that a timer that fires late costs no speed.
BURST_BYTES, BURST_S = 32_768, 1e-3
PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
FILES = ("cluster.json", "hosts")  # in the cluster's folder while it is up
NAMESPACES = ("pid", "mount", "net", "uts", "ipc")  # namespaces of a node
INSTEAD = (
    "Without namespaces, start two torchruns on one machine: --nnodes 2 --node-rank 0 "
    "and 1, --master-addr 127.0.0.1"
)
# Parts of the kernel, and how to see whether it has them.
FEATURES = {
    "bridge": ("ip", ["link add try type bridge", "link delete try"]),
    "veth": ("ip", ["link add try type veth peer name try1", "link delete try"]),
    "tbf": ("tc", ["qdisc replace dev lo root tbf rate 1gbit burst 32k latency 1ms"]),
    "netem": ("tc", ["qdisc replace dev lo root netem delay 1us"]),
}
# First processes print their pid as this machine counts, and then only reap orphans.
SWITCH = """
read -r pid _ </proc/self/stat
echo "$pid"
exec env --ignore-signal=CHLD tail -f /dev/null >/dev/null 2>&1
"""
NODE = """
set -e
hostname "$1"
read -r pid _ </proc/self/stat
[ ! -d /sys/fs/cgroup ] || exec 3</sys/fs/cgroup
mount -t tmpfs -o "size=$3,mode=1777" tmpfs /dev/shm
mount --bind "$2" /etc/hosts
mount -t proc proc /proc      # its own processes
mount -t sysfs sysfs /sys     # its own cards
[ ! -d /sys/fs/cgroup ] || mount --rbind /proc/self/fd/3 /sys/fs/cgroup
echo "$pid"
exec env --ignore-signal=CHLD tail -f /dev/null >/dev/null 2>&1 3>&-
"""


class ClusterError(Exception):
    """Wrong usage, or a machine that lacks something: one line, exit code 2."""


@dataclass
class Node:
    """A node. pid and started tell its first process, as this machine counts."""

    number: int
    pid: int = 0
    started: str = ""
    is_cut: bool = False
    rates: list = field(default_factory=list)  # bytes/s by card; 0: no limit

    @property
    def name(self):
        return f"node{self.number}"

    @property
    def is_up(self):
        return is_running(self.pid, self.started)

    def port(self, card):
        """Return the switch's end of the cable to one of the node's cards."""
        return f"port{self.number}-{card}"


@dataclass
class VirtualCluster:
    """All that the verbs need to know, as the state file holds it."""

    folder: str
    pid: int  # the switch's first process
    started: str
    in_user_namespace: bool
    cards: int
    rate: float  # of each card, bytes/s; 0: no limit
    delay_s: float
    shm: str
    nodes: list = field(default_factory=list)


def start_time(pid):
    """Return what tells a process from a later one with its number; "" if it ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def is_running(pid, started):
    return bool(pid) and start_time(pid) == started != ""


def save(cluster):
    new = Path(cluster.folder, "cluster.new")
    new.write_text(json.dumps(asdict(cluster), indent=1))
    new.replace(new.with_suffix(".json"))


def find(folder):
    """Return the cluster that runs at this folder; None if there is none."""
    try:
        state = json.loads((folder / "cluster.json").read_text())
    except OSError:
        return None
    if not is_running(state["pid"], state["started"]):
        return None
    cluster = VirtualCluster(**state)
    cluster.nodes = [Node(**node) for node in state["nodes"]]
    return cluster


def load(folder):
    """Return the cluster that runs at this folder. Raises: ClusterError."""
    cluster = find(folder)
    if cluster is None:
        raise ClusterError(f"no cluster is up at {folder}: `up` starts one")
    return cluster


# Command line values


def parse_rate(text):
    """Parse 100mbit or 1gbit; return bytes/s."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(m|g)bit", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"must be like 100mbit or 1gbit, not {text!r}")
    return float(match[1]) * {"m": 1e6, "g": 1e9}[match[2]] / 8


def parse_link(text):
    """Parse 1gbit or 1gbit,1ms; return bytes/s and seconds."""
    rate, comma, delay = text.partition(",")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)ms", delay)
    if comma and not match:
        raise argparse.ArgumentTypeError(f"must be like 100mbit,1ms, not {text!r}")
    return parse_rate(rate), float(match[1]) / 1e3 if match else 0.0


def parse_size(text):
    """Check a size as mount takes it: 64m or 2g."""
    if not re.fullmatch(r"[1-9]\d*[mg]", text.lower()):
        raise argparse.ArgumentTypeError(f"must be like 64m or 2g, not {text!r}")
    return text.lower()


def show_rate(rate):
    return f"{rate * 8 / 1e6:g} Mbit/s" if rate else "no limit"


def address(node, card=0):
    """Return the address of a node's card: nodes count from 0, addresses from 1."""
    return f"10.77.{card}.{node + 1}"


# Commands of Linux


def find_program(name):
    """Return a program's path. Raises: ClusterError with the package that has it."""
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    executable = shutil.which(name, path=path)
    if executable is None:
        raise ClusterError(f"no program {name}: install the package {PACKAGES[name]}")
    return executable


def check_machine():
    if not sys.platform.startswith("linux"):
        raise ClusterError(f"only Linux has namespaces. {INSTEAD}")
    for name in PACKAGES:
        find_program(name)


def enter(cluster, pid, *spaces):
    """Return the words that run a command in these namespaces of a process."""
    words = [
        find_program("nsenter"),
        f"--target={pid}",
        *(f"--{space}" for space in spaces),
    ]
    if cluster.in_user_namespace:
        words += ["--user", "--preserve-credentials"]
    return words


def run(cluster, pid, name, *lines):
    """Hand lines to ip or tc in the network of a process.

    Raises: ClusterError with the program's first line of complaint.
    """
    command = [*enter(cluster, pid, "net"), find_program(name), "-batch", "-"]
    text = "\n".join([*lines, ""])
    ended = subprocess.run(command, input=text, capture_output=True, text=True)
    if ended.returncode:
        raise ClusterError(f"{name}: {ended.stderr.strip().partition(chr(10))[0]}")


def start_first(words):
    """Start a first process; return its pid. Raises: ClusterError if it fails."""
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    said = process.stdout.readline().strip()
    if not said.isdecimal():
        why = process.communicate()[1].strip().partition("\n")[0]
        raise ClusterError(f"this machine permits no nodes: {why}. {INSTEAD}")
    return int(said)


def start_switch(args):
    """Start the switch, with a bridge for each card, and return a cluster of no nodes.

    Without the right to make networks it is root in a user namespace.
    """
    unshare = [find_program("unshare")]
    tried = subprocess.run([*unshare, "--net", "true"], capture_output=True)
    in_user_namespace = tried.returncode != 0
    if in_user_namespace:
        unshare += ["--user", "--map-root-user"]
    unshare += ["--pid", "--mount", "--net", "--fork", "--kill-child"]
    pid = start_first([*unshare, "bash", "-c", SWITCH])
    rate, delay_s = args.link
    cluster = VirtualCluster(
        str(args.at),
        pid,
        start_time(pid),
        in_user_namespace,
        args.cards,
        rate,
        delay_s,
        args.shm,
    )
    needed = {"bridge": True, "veth": True, "tbf": rate > 0, "netem": delay_s > 0}
    for feature, (name, lines) in FEATURES.items():
        if not needed[feature]:
            continue
        try:
            run(cluster, pid, name, *lines)
        except ClusterError as error:
            os.kill(pid, 9)
            raise ClusterError(f"this kernel has no {feature} ({error})") from None
    for card in range(args.cards):
        lines = [f"link add bridge{card} type bridge", f"link set bridge{card} up"]
        run(cluster, pid, "ip", *lines)
    return cluster


def write_hosts(cluster):
    """Write the nodes' /etc/hosts."""
    lines = ["127.0.0.1 localhost"]
    for node in cluster.nodes:
        for card in range(cluster.cards):
            name = f"{node.name}-link{card}" if card else node.name
            place = address(node.number, card)
            lines.append(f"{place} {name}")
            # PyTorch's store looks up an IPv4 peer in this form, and warns without it.
            lines.append(f"::ffff:{place} {name}-peer")
    Path(cluster.folder, "hosts").write_text("\n".join([*lines, ""]))


def boot(cluster, node):
    """Start a node's first process, and connect its cards to the switch."""
    inside = enter(cluster, cluster.pid, "pid", "mount", "net")
    unshare = [find_program("unshare"), *(f"--{space}" for space in NAMESPACES)]
    unshare += ["--fork", "--kill-child", "bash", "-c", NODE, "bash", node.name]
    hosts = str(Path(cluster.folder, "hosts"))
    node.pid = start_first([*inside, *unshare, hosts, cluster.shm])
    node.started, node.is_cut = start_time(node.pid), False
    run(cluster, node.pid, "ip", "link set lo up")
    for card in range(cluster.cards):
        port, mac = node.port(card), f"02:00:00:00:{card:02x}:{node.number + 1:02x}"
        peer = f"peer name link{card} address {mac} netns /proc/{node.pid}/ns/net"
        cable = f"link add {port} type veth {peer}"
        run(
            cluster, cluster.pid, "ip", cable, f"link set {port} master bridge{card} up"
        )
        place = f"address add {address(node.number, card)}/24 dev link{card}"
        run(cluster, node.pid, "ip", place, f"link set link{card} up")
    node.rates = [0.0] * cluster.cards
    limit_rate(cluster, node, cluster.rate)


def limit_rate(cluster, node, rate, card=None):
    """Give one card or all cards of a node a rate: at the card and at the switch.

    Without the switch's end, a card would receive faster than it sends.
    """
    if card is not None and card not in range(cluster.cards):
        raise ClusterError(f"--card {card}: the cards are 0 to {cluster.cards - 1}")
    for one in range(cluster.cards) if card is None else [card]:
        node.rates[one] = rate
        run(cluster, node.pid, "tc", *build_queues(f"link{one}", rate, cluster.delay_s))
        run(cluster, cluster.pid, "tc", *build_queues(node.port(one), rate, 0.0))


def build_queues(device, rate, delay_s):
    """Return tc's lines for a card: a delay, then a token bucket."""
    place, lines = "root", []
    if delay_s:
        netem = f"netem delay {round(delay_s * 1e6)}us limit 100000"
        lines.append(f"qdisc replace dev {device} root handle 1: {netem}")
        place = "parent 1:1"
    if rate:
        burst = max(BURST_BYTES, round(rate * BURST_S))
        bucket = f"tbf rate {round(rate * 8)}bit burst {burst}b latency 200ms"
        lines.append(f"qdisc replace dev {device} {place} {bucket}")
    return lines or [f"qdisc replace dev {device} root pfifo"]


def set_cables(cluster, node, state):
    """Unplug a node's cables at the switch, or plug them in."""
    lines = [f"link set {node.port(card)} {state}" for card in range(cluster.cards)]
    run(cluster, cluster.pid, "ip", *lines)
    node.is_cut = state == "down"


def remove_cables(cluster, node):
    lines = [f"link delete {node.port(card)}" for card in range(cluster.cards)]
    run(cluster, cluster.pid, "ip", *lines)
