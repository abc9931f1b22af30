"""Several nodes on one machine: own network, host name, processes and memory; they can break.

    CPU   python cluster/virtual_cluster.py up --nodes 2 --link 1gbit
          python cluster/virtual_cluster.py run -- hostname
          python cluster/virtual_cluster.py down

A node is a first process in namespaces of its own, made by unshare. A switch is one more network
namespace, with a bridge for each card. Look for: what a job does when you cut, slow or kill a node
under it. Linux; root, or a kernel that lets everybody make user namespaces.

Sources: namespaces(7), pid_namespaces(7), unshare(1), nsenter(1), tc-tbf(8), tc-netem(8).
"""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from cluster_parts import virtual_cluster as part
from legacy_common import cli

MOST_NODES, MOST_CARDS = 32, 4


@dataclass
class Node:
    """A node, as the supervisor sees it."""

    number: int
    process: subprocess.Popen | None = None  # unshare, which started it; None: it is off
    host_pid: int | None = None  # of its first process, as this machine counts
    cut: bool = False
    loss: float = 0.0
    rates: dict = field(default_factory=dict)  # bytes/s by card, where it is not the link's

    @property
    def pid(self):
        """Return the number of the process that ends with the node; None: it is off."""
        return self.process.pid if self.process else None

    @property
    def name(self):
        return f"node{self.number}"

    def port(self, card):
        """Return the name of the switch's end of the cable to one of the node's cards."""
        return f"port{self.number}-{card}"


class Cluster:
    """The nodes and what can happen to them. It lives in the supervisor, on the switch."""

    def __init__(self, args, folder):
        self.args = args
        self.folder = folder
        self.nodes = [Node(number) for number in range(args.nodes)]
        self.cards = range(args.cards)
        if args.link.delay:
            part.need_netem()
        for card in self.cards:
            part.run("ip", f"link add bridge{card} type bridge", f"link set bridge{card} up")
        lines = ["127.0.0.1 localhost"]
        for card in self.cards:
            for node in self.nodes:
                name = f"{node.name}-link{card}" if card else node.name
                lines.append(f"{part.address(node.number, card)} {name}")
                # torch's store looks up an IPv4 peer in this form, and warns of one without a name.
                lines.append(f"::ffff:{part.address(node.number, card)} {name}-peer")
        (folder / "hosts").write_text("\n".join([*lines, ""]))
        for node in self.nodes:
            self.boot(node)

    # a node

    def boot(self, node):
        """Start a node's first process, and connect its cards to the switch."""
        node.cut, node.loss, node.rates = False, 0.0, {}
        node.process, node.host_pid = part.boot(
            node.name, self.folder, self.args.shm, self.args.disk
        )
        for card in self.cards:
            port = node.port(card)
            mac = f"02:00:00:00:{card:02x}:{node.number + 1:02x}"
            inside = f"/proc/{node.host_pid}/ns/net"
            part.run(
                "ip",
                f"link add {port} type veth peer name link{card} address {mac} netns {inside}",
                f"link set {port} master bridge{card} up",
            )
            place = f"{part.address(node.number, card)}/24"
            lines = [f"address add {place} dev link{card}", f"link set link{card} up"]
            part.run("ip", *lines, "link set lo up", pid=node.host_pid)
            self.shape(node, card)
        if any(other.loss for other in self.nodes):
            self.send_packets(node)

    def shape(self, node, card):
        """Let a card send and receive so many bytes/s, late, and lose packets: at both ends."""
        link = self.args.link
        rate = node.rates.get(card, link.rate)
        sends = part.queues(f"link{card}", rate, link.delay, node.loss)
        part.run("tc", *sends, pid=node.host_pid)
        part.run("tc", *part.queues(node.port(card), rate, 0, node.loss))

    # verbs

    def cut(self, node):
        """Unplug a node's cables at the switch: nobody there is told."""
        part.run("ip", *(f"link set {node.port(card)} down" for card in self.cards))
        node.cut = True
        return f"{node.name}: cables unplugged"

    def restore(self, node):
        """Undo cut, slow and lose."""
        node.cut, node.loss, node.rates = False, 0.0, {}
        for card in self.cards:
            part.run("ip", f"link set {node.port(card)} up")
            self.shape(node, card)
        return f"{node.name}: as new"

    def slow(self, node, card, rate):
        """Give one of a node's cards, or all of them, another rate."""
        for one in self.cards if card is None else [card]:
            node.rates[one] = rate
            self.shape(node, one)
        return f"{node.name}: {part.mbit(rate)}"

    def send_packets(self, node):
        """Let a node's cards send single packets, not up to 64 KiB that are cut later."""
        cards = (f"link set link{card} gso_max_segs 1" for card in self.cards)
        part.run("ip", *cards, pid=node.host_pid)

    def lose(self, node, share):
        """Lose a share of the packets that a node sends, and of those sent to it."""
        part.need_netem()
        for other in self.nodes:
            if other.pid:
                self.send_packets(other)
        node.loss = share
        for card in self.cards:
            self.shape(node, card)
        return f"{node.name}: {100 * share:g}% of its packets are lost"

    def kill(self, node):
        """Cut the power: the kernel ends all processes of a PID namespace with its first one."""
        self.unplug(node)
        os.kill(part.pid_in(node.host_pid), signal.SIGKILL)
        return f"{node.name}: killed"

    def start(self, node):
        """Boot a node that was killed: memory and disk are empty."""
        self.boot(node)
        return f"{node.name}: booted"

    def unplug(self, node):
        """Remove a node's cables, unless they have gone with it."""
        for card in self.cards:
            with contextlib.suppress(OSError):
                part.run("ip", f"link delete {node.port(card)}")

    def says(self):
        """Describe the cluster in one line."""
        link = self.args.link
        how = [f"{len(self.nodes)} nodes, network cards of each: {len(self.cards)}"]
        how += [f"{part.mbit(link.rate)} by token buckets"] if link.rate else []
        how += [f"{1e3 * link.delay:g} ms by netem"] if link.delay else []
        how += [f"clock of {name} {offset:+g} s, for Python's time()"
                for name, offset in self.args.clock]  # fmt: skip
        return "; ".join(how)


def parse_args(argv):
    """Parse the command line; what follows `--` is the command to run."""
    own, command = argv, []
    if "--" in argv:
        own, command = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = part.Parser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name, text, *positional):
        added = verbs.add_parser(name, help=text, description=text)
        added.add_argument("--at", default="runs/virtual_cluster", metavar="FOLDER", type=Path,
                           help="the cluster's folder (runs/virtual_cluster)")  # fmt: skip
        for one in positional:
            added.add_argument(one, metavar=one.upper())
        return added

    up = verb("up", "start a cluster").add_argument
    up("--nodes", type=cli.positive_int, default=2, help="(2)")
    up("--cards", type=cli.positive_int, default=1, help="network cards of a node (1)")
    up("--link", type=part.link, default=part.Link(), metavar="RATE[,DELAY]",
       help="such as 1gbit or 100mbit,1ms (as fast as this machine)")  # fmt: skip
    up("--clock", type=part.clock, action="append", default=[], metavar="NODE=OFFSET",
       help="a node's clock is wrong, such as node1=+1h; may be repeated")  # fmt: skip
    up("--shm", type=cli.byte_size, default="64M", metavar="SIZE", help="of /dev/shm (64M)")
    up("--disk", type=cli.byte_size, default="64M", metavar="SIZE", help="of its disk (64M)")
    add = verb("run", "run a command on each node: run -- COMMAND").add_argument
    add("--on", metavar="NODES", help="on these only, such as node0,node2")
    verb("status", "print what each node is and does")
    verb("cut", "unplug a node's cables", "node")
    verb("restore", "undo cut, slow and lose", "node")
    slow = verb("slow", "slow a node's cards", "node").add_argument
    slow("--card", type=cli.whole_number, help="this one only (all)")
    slow("--rate", type=cli.link_rate, required=True, help="such as 50mbit")
    lose = verb("lose", "lose a share of a node's packets", "node").add_argument
    lose("share", type=part.share, metavar="SHARE", help="such as 2%%")
    verb("kill", "end a node at once, as by a power cut", "node")
    verb("start", "boot a node that was killed", "node")
    send = verb("signal", "send a signal to agent, worker or worker:LOCAL_RANK", "node", "target")
    send.add_argument("signal", metavar="SIGNAL", type=part.signal_of)
    verb("down", "end the cluster and all that runs on it")
    args = parser.parse_args(own)
    if (args.verb == "run") != bool(command):
        parser.error("run takes a command behind --, such as: run -- hostname")
    return args, command


def main():
    args, command = parse_args(sys.argv[1:])
    part.refuse_other_systems()
    args.at = args.at.absolute()
    match args.verb:
        case "up":
            if args.nodes > MOST_NODES or args.cards > MOST_CARDS:
                raise cli.UsageError(f"at most {MOST_NODES} nodes with {MOST_CARDS} cards each")
            known = {f"node{number}" for number in range(args.nodes)}
            if unknown := {name for name, _ in args.clock} - known:
                raise cli.UsageError(f"--clock: there is no {min(unknown)} of {args.nodes} nodes")
            if part.READY in os.environ:  # this is the process that `up` has started
                part.supervise(args.at, lambda: Cluster(args, args.at))
            else:
                print(part.up(args.at))
        case "run":
            return part.run_on_nodes(args.at, args.on, command)
        case "down":
            print(part.down(args.at))
        case verb:
            rest = {k: v for k, v in vars(args).items() if k not in ("verb", "at")}
            print(part.ask(args.at, verb, **rest))
    return 0


if __name__ == "__main__":
    cli.run(main)
