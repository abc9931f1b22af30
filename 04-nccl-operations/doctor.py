"""Find settings and limits that are wrong, stale or misspelt, and say what each one costs.

    CPU   python 04-nccl-operations/doctor.py
          torchrun --standalone --nproc-per-node=2 04-nccl-operations/doctor.py
    GPU   srun python 04-nccl-operations/doctor.py    (or torchrun, on each machine of the job)

Start it as the job is started, on all its machines: it also compares the ranks. `--list` prints
variables.toml, the variables that it knows. Look for: what each finding costs, and what to do.

Sources: those of variables.toml; NCCL user guide, "Troubleshooting"; ProcessGroupGloo.cpp.
"""

import ipaddress
import os
from collections import defaultdict

from dist_common import cli, runtime
from dist_common.report import Report
from interfaces import addresses_of, nccl_version, refuse_unknown
from nccl_parts import doctor as part
from nccl_parts import host

OWN_OF_A_RANK = {"CUDA_VISIBLE_DEVICES", "NCCL_DEBUG_FILE"}
HEADER = "| variable | since | default | values | what it does | set it for | source |"


def examine(hosts, ranks):
    """Return (where, finding) for all that the rules find in what the ranks read."""
    found = [("between ranks", finding) for finding in differences(ranks)]
    for here in hosts:
        one = here[0]
        rules = (
            part.wrong_names(one, host.names_in),
            part.wrong_values(one),
            part.wrong_network(one, several_hosts=len(hosts) > 1),
            part.wrong_limits(one, world_size=len(ranks)),
            part.wrong_machine(here),
        )
        found += [(f"on host {one['host']}", finding) for rule in rules for finding in rule]
    return found


def differences(ranks):
    """Find what differs between ranks that should be alike."""
    seen = defaultdict(dict)
    for one in ranks:
        who = f"rank {one['rank']} on {one['host']}"
        for name in set().union(*(other["settings"] for other in ranks)) - OWN_OF_A_RANK:
            seen[name][who] = one["settings"].get(name, ["unset"])[0]
        for library, version in one["versions"].items():
            seen[f"version of {library}"][who] = version
        for library, network, mtu in networks(one):
            seen[f"network of {library}"][who] = network
            seen[f"MTU of {library}"][who] = mtu
    for what, values in sorted(seen.items()):
        if len(set(values.values())) > 1:
            first = {value: who for who, value in reversed(values.items())}
            told = ", ".join(f"{who} has {value}" for value, who in reversed(first.items()))
            yield part.finding("differs", what=what, told=told)


def networks(one):
    """Yield library, network and MTU of each interface at which a library listens."""
    for library, addresses in one["listens"].items():
        for own in one["interfaces"]:
            for place in map(ipaddress.ip_interface, own["addresses"]):
                if str(place.ip) in (addresses or ()):
                    yield library, str(place.network), own["mtu"]


def by_host(ranks):
    """Return the ranks of each host: containers on one machine have names of their own."""
    hosts = defaultdict(list)
    for one in ranks:
        hosts[one["host"], one["boot"]].append(one)
    return list(hosts.values())


def look_around():
    """Return this process's place and MASTER_ADDR, and leave the environment as it was."""
    before = set(os.environ)
    world = runtime.discover()
    master = os.environ["MASTER_ADDR"]
    for name in set(os.environ) - before:
        del os.environ[name]
    return world, master


def refuse_what_cannot_start(world, master):
    """Raises: UsageError for what would keep the ranks from meeting, so that none can report it."""
    refuse_unknown(os.environ.get("GLOO_SOCKET_IFNAME"))
    addresses = addresses_of(master)
    if not addresses:
        do = "give the address of rank 0's machine, or add the name to DNS or /etc/hosts"
        raise cli.UsageError(f"MASTER_ADDR={master} does not resolve here: no rank can join; {do}")
    here = all(ipaddress.ip_address(own.split("%")[0]).is_loopback for own in addresses)
    if here and world.rank >= world.local_world_size:  # rank 0 is on another machine
        do = "give an address that all machines reach, and correct /etc/hosts"
        what = f"MASTER_ADDR={master} is {addresses[0]}, this machine itself"
        raise cli.UsageError(f"{what}, but rank 0 runs on another one: no rank can join; {do}")


def show_host(report, here):
    """Print a host's ranks, limits and settings."""
    one = here[0]
    report.say(f"\nhost {one['host']}: ranks {' '.join(str(rank['rank']) for rank in here)}")
    report.say(f"cores: {len(one['cores'])}; " + "; ".join(map(told_limit, one["limits"].items())))
    rows = []
    for name, (value, where) in sorted(one["settings"].items()):
        does = part.VARIABLES[name]["does"] if name in part.VARIABLES else "not in variables.toml"
        rows.append((f"{name}={value}", where, does))
    if rows:
        report.table(rows, ("setting", "set by", "what it does"), names=3)


def told_limit(limit):
    """Return a limit in words; memory is in GiB."""
    name, most = limit
    if most is None:
        return f"{name}: unlimited"
    return f"{name}: {most:,}" if name == "open files" else f"{name}: {most / host.GIB:.2f} GiB"


def show_findings(report, findings):
    """Print each finding with its cost and its cure."""
    for number, (where, finding) in enumerate(findings, 1):
        report.say(f"\n{number}. {finding.kind} {where}: {finding.what}")
        report.say(f"   costs: {finding.costs}")
        report.say(f"   do:    {finding.do}")
    report.say()


def check_launcher(report, hosts):
    """Check LOCAL_WORLD_SIZE against the ranks that gave the same host."""
    wrong = sum(
        one["told"] != sum(other["torchrun"] == one["torchrun"] for other in here)
        for here in hosts for one in here
    )  # fmt: skip
    report.check("ranks that miscount those of their host", wrong, 0, 0, "LOCAL_WORLD_SIZE")


def wrong_rows():
    """Return the variables whose version in variables.toml is not as in the NCCL that is loaded."""
    names = host.names_in("libnccl", "NCCL_")
    if names is None:
        return None
    version = version_of(nccl_version())
    rows = [row for row in part.TABLE["variable"] if row["library"] == "NCCL"]
    expected = {row["name"] for row in rows if version_of(row["since"]) <= version}
    return sorted(expected ^ (names & {row["name"] for row in rows}))


def check_table(report, wrong):
    """Check that variables.toml says of each of NCCL's variables whether this NCCL has it."""
    if wrong:
        report.say(f"variables.toml and the library differ in {', '.join(wrong)}")
    if wrong is not None:
        name = "variables of NCCL that the library has otherwise"
        report.check(name, len(wrong), 0, 0, "variables.toml, since")


def version_of(text):
    """Return a version as numbers; "-" is older than all."""
    return tuple(int(part) for part in text.split(".")) if text != "-" else ()


def list_variables():
    """Print variables.toml as tables in Markdown."""
    group = None
    for row in part.TABLE["variable"]:
        if row["group"] != group:
            group = row["group"]
            print(f"\n**{group}**\n\n{HEADER}\n{'|---' * HEADER.count(' | ')}|---|")
        since = row["since"] if row["library"] in ("NCCL", "PyTorch") else row["library"]
        cells = (since, row["default"], row["values"], row["does"], row["when"], row["source"])
        print(f"| `{row['name']}` | " + " | ".join(cell.replace("*", "\\*") for cell in cells), "|")
    print("\nSources:\n")
    for key, source in part.TABLE["sources"].items():
        print(f"- {key}: {source}")


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--list", action="store_true", help="print the variables, in Markdown, and stop")
    add("--strict", action="store_true", help="exit code 1 if there is a finding, as for a prolog")
    return parser.parse_args()


def main():
    args = parse_args()
    world, master = look_around()
    if args.list:
        if world.is_rank0:
            list_variables()
        return 0
    refuse_what_cannot_start(world, master)
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("04-nccl-operations/doctor.py", args, world, device)
        ranks = runtime.gather(host.read_host(world, part.VARIABLES))
        hosts = by_host(ranks)
        report.start(f"hosts: {len(hosts)}")
        for here in hosts:
            show_host(report, here)
        # Rank 0 reads the libraries' strings, which takes a second, and all ranks end alike.
        found = (examine(hosts, ranks), wrong_rows()) if world.is_rank0 else None
        findings, wrong = runtime.from_rank0(found)
        show_findings(report, findings)
        check_table(report, wrong)
        check_launcher(report, hosts)
        if args.strict:
            report.check("findings", len(findings), 0, 0, "--strict")
        report.metrics["findings"] = [{"where": w, **finding._asdict()} for w, finding in findings]
        report.metrics["ranks"] = ranks
        return report.finish(f"findings: {len(findings)}")


if __name__ == "__main__":
    cli.run(main)
