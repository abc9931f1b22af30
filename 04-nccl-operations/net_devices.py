"""The network interfaces of this machine, and the addresses at which this process listens."""

import contextlib
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch


@dataclass
class Interface:
    """A network interface as the kernel shows it."""

    name: str
    running: bool  # switched on, and its cable has a signal
    loopback: bool
    mtu: int  # bytes of the largest packet
    addresses: list[str]  # with the length of the network's prefix, IPv4 first: 10.0.0.5/24

    def ips(self) -> list[str]:
        """Return the addresses without the length of their prefix."""
        return [address.split("/")[0] for address in self.addresses]


def read_interfaces() -> list[Interface]:
    """Return the interfaces that have an address, in the kernel's order."""
    stats = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        addresses = [with_prefix(entry.address, entry.netmask) for entry in entries
                     if entry.family in (socket.AF_INET, socket.AF_INET6)]  # fmt: skip
        state = stats.get(name.split(":")[0])  # eth0:1 is a second address of eth0
        if addresses and state:
            loopback = "loopback" in state.flags.split(",")
            found.append(Interface(name, state.isup, loopback, state.mtu, addresses))
    return sorted(found, key=lambda interface: socket.if_nametoindex(interface.name))


def with_prefix(address: str, netmask: str | None) -> str:
    """Return an address with the length of its prefix: 255.255.255.0 is /24."""
    own = ipaddress.ip_address(address.split("%")[0])  # fe80::1%eth0 names its interface
    mask = ipaddress.ip_address(netmask) if netmask else None
    return f"{own}/{int(mask).bit_count() if mask else own.max_prefixlen}"


def resolve_here(hostname: str) -> str | None:
    """Return the first address of a name at which this machine can listen, or None."""
    with contextlib.suppress(OSError):
        for place in socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(*place[:3]) as probe:
                probe.bind(place[4])
                return place[4][0]
    return None


def listening() -> set[tuple[str, int]]:
    """Return address and port of each socket at which this process listens."""
    sockets = psutil.Process().net_connections("tcp")
    return {(own.laddr.ip, own.laddr.port) for own in sockets if own.status == psutil.CONN_LISTEN}


def listens_at(start: Callable[[], object]) -> list[str]:
    """Call start(); return the addresses at which it made this process listen."""
    before = listening()
    with contextlib.suppress(RuntimeError):  # NCCL found no interface
        start()
    return sorted({address for address, _ in listening() - before})


def nccl_version() -> str | None:
    """Return NCCL's version, as 2.30.7; None for a PyTorch without NCCL."""
    with contextlib.suppress(AttributeError, ImportError):
        return ".".join(map(str, torch.cuda.nccl.version()))
    return None
