"""Nodes of a virtual cluster for ranks that a test forks: each rank enters one."""

import contextlib
import ctypes
import os
import subprocess
from argparse import Namespace

from cluster_parts import virtual_cluster as linux

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # setns(2)


def why_no_nodes():
    """Say in one line why this machine permits no nodes; None if it does."""
    try:
        linux.check_machine()
    except linux.ClusterError as error:
        return str(error)
    for words in (["--net"], ["--user", "--map-root-user", "--net"]):
        tried = subprocess.run(["unshare", *words, "true"], capture_output=True)
        if tried.returncode == 0:
            return None
    return f"this machine permits no nodes: {tried.stderr.decode().strip()}"


@contextlib.contextmanager
def open_nodes(folder, rates):
    """Start a node for each rate in bytes/s; end them afterwards."""
    args = Namespace(at=folder, link=(0.0, 0.0), cards=1, shm="64m")
    folder.mkdir()
    cluster = linux.start_switch(args)
    try:
        cluster.nodes = [linux.Node(number) for number in range(len(rates))]
        linux.write_hosts(cluster)
        for node, rate in zip(cluster.nodes, rates, strict=True):
            linux.boot(cluster, node)
            if rate:
                linux.limit_rate(cluster, node, rate)
        yield cluster
    finally:
        os.kill(cluster.pid, 9)


def enter(cluster, number):
    """Move this process to the network of a node, and name rank 0's node to it."""
    spaces = [("net", CLONE_NEWNET)]
    if cluster.in_user_namespace:
        spaces.insert(0, ("user", CLONE_NEWUSER))
    libc = ctypes.CDLL(None, use_errno=True)
    for name, kind in spaces:
        with open(f"/proc/{cluster.nodes[number].pid}/ns/{name}") as space:
            if libc.setns(space.fileno(), kind):
                raise OSError(ctypes.get_errno(), f"setns {name}")
    os.environ.update(
        MASTER_ADDR=linux.address(0), MASTER_PORT="29500", GLOO_SOCKET_IFNAME="link0"
    )
