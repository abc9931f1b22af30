"""Run a script with the ranks' sockets slowed by the kernel: slow links to practise on.

    torchrun --standalone --nproc-per-node=4 04-nccl-operations/paced_links.py \\
        --link 100mbit --slow 3=20mbit 04-nccl-operations/pairwise_scan.py -b 256K

The script is not told. What a rank sends leaves at its rate to each peer, what it receives at the
sender's. Linux only; gloo, or NCCL over sockets. pairwise_scan.md uses it.

Source: socket(7), SO_MAX_PACING_RATE.
"""

import argparse
import contextlib
import os
import runpy
import socket
import sys
import threading
import time

from dist_common import cli

SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; Python has no name for it
LOOK_EVERY_S = 0.02  # for new sockets


def pace_sockets(bytes_per_second):
    """Limit every TCP socket of this process, also those that it opens later."""
    while True:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed by now
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    pace(int(name), bytes_per_second)
        time.sleep(LOOK_EVERY_S)


def pace(descriptor, bytes_per_second):
    """Limit what one TCP socket sends."""
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if copy.type == socket.SOCK_STREAM and copy.family != socket.AF_UNIX:
            copy.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_second)


def slow_rank(text):
    """Parse RANK=RATE, as 3=20mbit; return the rank and bytes/s."""
    rank, equals, rate = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be like 3=20mbit, not {text!r}")
    return cli.whole_number(rank), cli.link_rate(rate)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--link", type=cli.link_rate, help="what every rank sends to each peer: 100mbit (as it is)")
    add("--slow", type=slow_rank, action="append", default=[], metavar="RANK=RATE",
        help="a rank that sends slower: 3=20mbit; may be repeated (none)")  # fmt: skip
    add("script", help="what to run")
    add("arguments", nargs=argparse.REMAINDER, help="of the script")
    return parser.parse_args()


def main():
    args = parse_args()
    if not sys.platform.startswith("linux"):
        raise cli.UsageError("only Linux limits the rate of a socket: start the script itself")
    if not os.path.exists(args.script):
        raise cli.UsageError(f"there is no {args.script}")
    rate = dict(args.slow).get(int(os.environ.get("RANK", "0")), args.link)
    if rate:
        threading.Thread(target=pace_sockets, args=(int(rate),), daemon=True).start()
    sys.argv = [args.script, *args.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(args.script)))
    runpy.run_path(args.script, run_name="__main__")
    return 0


if __name__ == "__main__":
    cli.run(main)
