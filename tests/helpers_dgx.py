"""A healthy DGX H100, as its files under /proc and /sys say: a folder that tests make and break.

Eight adapters for the GPUs; two cards of two ports for storage and management, of which two ports
have no cable; three Ethernet ports of the board, and its controller's by USB. PCI addresses of the
eight: NVIDIA, DGX BasePOD deployment guide, "Validate IB/Compute interfaces". The rest is a usual
use of the other ports.
"""

from cluster_parts import host

COMPUTE = ["18", "40", "4f", "5e", "9a", "c0", "ce", "dc"]  # PCI buses
GPU_BUSES = ["1b", "43", "52", "61", "9d", "c3", "d1", "df"]
GOOD_HCA = "mlx5_0,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_9,mlx5_10,mlx5_11"
IB, ETHERNET = "InfiniBand", "Ethernet"
OTHER_PORTS = {  # PCI address: link, rate, state, name of its network card
    "0000:29:00.0": (IB, 200, "4: ACTIVE", "ibp41s0f0"),
    "0000:29:00.1": (ETHERNET, 100, "4: ACTIVE", "enp41s0f1np1"),
    "0000:aa:00.0": (IB, 10, "1: DOWN", "ibp170s0f0"),
    "0000:aa:00.1": (ETHERNET, 40, "1: DOWN", "enp170s0f1np1"),
}
BOARD_CARDS = {"eno3": ("up", 10_000), "ens6f0": ("up", 100_000), "ens6f1": ("down", -1)}


def plant(root, files):
    """Write files under a folder that stands for a host's root; return it."""
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{content}\n")
    return root


def plant_dgx(root):
    """Make the files under /proc and /sys of a healthy DGX H100; return their root."""
    ports = {f"0000:{bus}:00.0": (IB, 400, "4: ACTIVE", f"ibp{int(bus, 16)}s0") for bus in COMPUTE}
    net, files = "sys/class/net", {
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module  570.86.15  x",
        "sys/module/mlx5_core/version": "24.10-1.1.4",
    }  # fmt: skip
    files |= {f"proc/driver/nvidia/gpus/0000:{bus}:00.0/information": "" for bus in GPU_BUSES}
    for number, (pci, port) in enumerate(sorted((ports | OTHER_PORTS).items())):
        link, rate, state, card = port
        name, is_compute = f"mlx5_{number}", pci in ports
        adapter = f"sys/class/infiniband/{name}"
        files |= {
            f"{adapter}/board_id": "MT_0000000838" if is_compute else "MT_0000000834",
            f"{adapter}/fw_ver": "28.39.1002",
            f"{adapter}/ports/1/state": state, f"{adapter}/ports/1/rate": f"{rate} Gb/sec (4X)",
            f"{adapter}/ports/1/link_layer": link,
            f"{net}/{card}/operstate": "up" if "ACTIVE" in state else "down",
            f"{net}/{card}/mtu": 4092 if link == IB else 9000,
            f"{net}/{card}/speed": 1000 * rate if "ACTIVE" in state else -1,
            f"sys/devices/{pci}/infiniband/{name}/uevent": "",
        }  # fmt: skip
        for path in (adapter, f"{net}/{card}"):
            (root / path).mkdir(parents=True)
            (root / path / "device").symlink_to(root / "sys/devices" / pci)
    for card, (state, speed) in BOARD_CARDS.items():
        files |= {f"{net}/{card}/operstate": state, f"{net}/{card}/mtu": 1500,
                  f"{net}/{card}/speed": speed, f"{net}/{card}/device/uevent": ""}  # fmt: skip
    files |= {f"{net}/bmc_redfish0/operstate": "up", f"{net}/bmc_redfish0/mtu": 1500}
    (root / "sys/devices/pci0000:00/usb1/1-14").mkdir(parents=True)
    (root / net / "bmc_redfish0").mkdir(parents=True)
    (root / net / "bmc_redfish0/device").symlink_to(root / "sys/devices/pci0000:00/usb1/1-14")
    return plant(root, files)


def interfaces_of_dgx(root, number):
    """Return the interfaces with an address of node `number`: one network for all, one of its own.

    What the files say of them counts, so that a test can change it there.
    """
    addresses = {"lo": "127.0.0.1/8", "eno3": f"10.1.0.{number + 1}/16",
                 "ens6f0": f"10.9.{number}.0/31", "docker0": "172.17.0.1/16"}  # fmt: skip
    found = []
    for name, address in addresses.items():
        seen = root / "sys/class/net" / name
        is_up = not seen.exists() or (seen / "operstate").read_text() == "up\n"
        mtu = int((seen / "mtu").read_text()) if seen.exists() else 1500
        found.append({"name": name, "running": is_up, "loopback": name == "lo", "mtu": mtu,
                      "addresses": [address]})  # fmt: skip
    return found


def facts_of_dgx(root, number):
    """Return what a rank finds on node `number` whose files are under `root`."""
    interfaces = interfaces_of_dgx(root, number)
    return {
        "host": f"dgx{number}", "boot": f"boot{number}", "torchrun": str(number), "rank": number,
        "told": 1, "environ": [], "settings": {}, "cores": [*range(224)], "cpu_limit": None,
        "threads": 1, "gpus": [], "interfaces": interfaces, "processes": 4_000_000,
        "temporary": 900 * 2**30, "versions": {"Python": "3.12", "torch": "2.14", "NCCL": "2.30.7"},
        "listens": {"gloo": [f"10.1.0.{number + 1}"], "nccl": [f"10.1.0.{number + 1}"]},
        "limits": {"locked memory": None, "open files": 1_048_576, "shared memory": 1000 * 2**30,
                   "shared memory left": (900 - 50 * number) * 2**30},
        **host.read_hardware(interfaces, root),
    }  # fmt: skip
