"""Find settings and limits that are wrong, stale or misspelt, and say what each one costs.

    CPU   python cluster/doctor.py
          torchrun --standalone --nproc-per-node=2 cluster/doctor.py
    GPU   srun python cluster/doctor.py    (or torchrun, on each machine of the job)

Start it as the job is started, on all its machines: it also compares ranks and hosts, through the
launcher's store, so that it ends with a result where no process group could be made. `--list`
prints variables.toml, the variables that it knows. Look for: what each finding costs, and what to
do.

Sources: those of variables.toml; NCCL user guide, "Troubleshooting"; ProcessGroupGloo.cpp.
"""

import contextlib
import ipaddress
import json
import os
import random
import socket
import sys
import time
from collections import Counter, defaultdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from cluster_parts import compare, host
from cluster_parts import doctor as part
from legacy_common import cli, runtime
from legacy_common.report import Report

OWN_OF_A_RANK = {"CUDA_VISIBLE_DEVICES", "NCCL_DEBUG_FILE"}
ALONE = {"slower-ports": "port-slow"}  # is said of the host itself, with the port's name
WAIT_S = 60.0  # for the facts of all ranks; --timeout makes it shorter
LEAVE_S = 10.0  # rank 0 stays so long: for those who read the store, and those who cannot reach it
HEADER = "| variable | since | default | values | what it does | set it for | source |"


def examine(hosts, ranks):
    """Return (where, finding) for all that the rules find in what the ranks read."""
    told = [one for one in ranks if "settings" in one]
    found = [("between ranks", finding) for finding in differences(told)]
    usual = part.usual_ports([here[0]["infiniband"] for here in hosts])
    found += [at for here in hosts for at in examine_host(here, len(hosts), len(ranks), usual)]
    known = {(where, finding.key) for where, finding in found}
    for one in compare.by_hosts(compare.nodes_by_name(told)):
        where = f"on host {one.names}"
        if not {(where, one.key), (where, ALONE.get(one.key))} & known:
            found.append((where, part.compared(one)))
    return found


def examine_host(here, hosts, world_size, usual):
    """Return (where, finding) for what the rules find in what a host's ranks read."""
    one = here[0]
    rules = (
        part.wrong_names(one, host.names_in),
        part.wrong_values(one),
        part.wrong_network(one, several_hosts=hosts > 1),
        part.wrong_ports(one, usual),
        part.wrong_limits(one, world_size),
        part.wrong_machine(here),
    )
    return [(f"on host {one['host']}", finding) for rule in rules for finding in rule]


def differences(ranks):
    """Find settings that differ between ranks."""
    seen = defaultdict(dict)
    names = set().union(*(one["settings"] for one in ranks)) - OWN_OF_A_RANK
    for one in ranks:
        who = f"rank {one['rank']} on {one['host']}"
        for name in names:
            seen[name][who] = one["settings"].get(name, ["unset"])[0]
    for what, values in sorted(seen.items()):
        if len(set(values.values())) > 1:
            first = {value: who for who, value in reversed(values.items())}
            told = ", ".join(f"{who} has {value}" for value, who in reversed(first.items()))
            yield part.finding("differs", what=what, told=told)


def by_host(ranks):
    """Return the ranks of each host: containers on one machine have names of their own."""
    hosts = defaultdict(list)
    for one in ranks:
        hosts[one["host"], one["boot"]].append(one)
    return list(hosts.values())


def look_around():
    """Return this process's place and the store's, and leave the environment as it was."""
    before = set(os.environ)
    world = runtime.discover()
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    for name in set(os.environ) - before:
        del os.environ[name]
    return world, master, port


def read_facts(world, device):
    """Return what this rank finds on its host, or the problem that keeps it from starting there."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        device = runtime.pick_device(device, world)
        if visible is None:  # it hides GPUs from a rank that takes the CPU; the user did not
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        host.refuse_unknown(os.environ.get("GLOO_SOCKET_IFNAME"))
        # Alone: it makes gloo listen where it would in the job, and needs nobody's answer.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return host.read_host(world, part.VARIABLES) | {"device": str(device)}
    except Exception as error:  # whatever it is, the others are to hear of it
        return {"host": socket.gethostname(), "rank": world.rank, "problem": str(error)}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def exchange(world, master, port, facts, wait_s):
    """Return the facts of all ranks that gave them in time, and the store, on rank 0.

    Others return after theirs are in the store. Raises: UsageError where it cannot be reached.
    """
    on_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    deadline = time.monotonic() + wait_s
    holds_store = world.is_rank0 and not on_agent
    try:
        if not holds_store:
            wait_until_it_answers((master, port), deadline)
        store = dist.TCPStore(
            master, port, world.world_size, holds_store,
            timedelta(seconds=max(1.0, deadline - time.monotonic())), wait_for_workers=False,
            multi_tenant=True,  # a process group that is made later may hold its own at this port
        )  # fmt: skip
        store.set_timeout(timedelta(seconds=wait_s))
    except (OSError, RuntimeError) as error:
        if "EADDRINUSE" in str(error):  # cli.run says what to do
            raise
        do = "see that it is the address of rank 0's machine, and that no firewall is between"
        what = f"MASTER_ADDR={master} ({', '.join(host.addresses_of(master))}), port {port}"
        why = getattr(error, "strerror", None) or "no answer in time"
        raise cli.UsageError(f"{what} does not answer here ({why}): {do}") from error
    store = dist.PrefixStore(f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    store.set(f"facts/{world.rank}", json.dumps(facts))

    return collect(store, "facts", world, deadline) if world.is_rank0 else [], store


def collect(store, name, world, deadline):
    """Return what the ranks put under a name into the store, of those that did so in time."""
    found = []
    for rank in range(world.world_size):
        left, key = deadline - time.monotonic(), f"{name}/{rank}"
        if left <= 0.1 and not store.check([key]):  # no time is left to wait for it
            continue
        with contextlib.suppress(RuntimeError):  # it never came
            store.wait([key], timedelta(seconds=max(0.1, left)))
            found.append(json.loads(store.get(key)))
    return found


def wait_until_it_answers(place, deadline):
    """Connect once: PyTorch's store would try for up to three times as long as its timeout."""
    while True:
        left = deadline - time.monotonic()
        try:
            # Not all that is left: a name may have several addresses, tried one after the other.
            return socket.create_connection(place, min(3.0, max(0.1, left))).close()
        except OSError:
            if left <= 0:
                raise
        time.sleep(random.uniform(0.2, 0.5))  # many ranks may ask


def cannot_start(ranks, world, master, wait_s):
    """Return (where, finding) for ranks that did not report, and for those that cannot start."""
    absent = sorted({*range(world.world_size)} - {one["rank"] for one in ranks})
    found = []
    if absent:
        values = {"ranks": absent, "seconds": wait_s, "master": master}
        found.append(("between ranks", part.finding("absent", **values)))
    for one in ranks:
        if "problem" in one:
            told = part.finding("problem", rank=one["rank"], problem=one["problem"])
            found.append((f"on host {one['host']}", told))
    return found


def refuse_what_cannot_start(world, master):
    """Raises: UsageError for what keeps a rank from the store, so that it cannot report there."""
    addresses = host.addresses_of(master)
    if not addresses:
        do = "give the address of rank 0's machine, or add the name to DNS or /etc/hosts"
        raise cli.UsageError(f"MASTER_ADDR={master} does not resolve here: no rank can join; {do}")
    here = all(ipaddress.ip_address(own.split("%")[0]).is_loopback for own in addresses)
    if here and world.rank >= world.local_world_size:  # rank 0 is on another machine
        do = "give an address that all machines reach, and correct /etc/hosts"
        what = f"MASTER_ADDR={master} is {addresses[0]}, this machine itself"
        raise cli.UsageError(f"{what}, but rank 0 runs on another one: no rank can join; {do}")


def give_up(world, error, rank0_has_ended):
    """Say which rank cannot join and why, before a launcher ends it; return the exit code."""
    if not world.is_rank0:  # what keeps all ranks out is told by rank 0 alone
        time.sleep(cli.GRACE_S)
    where = f"rank {world.rank} on host {socket.gethostname()}"
    print(f"{Path(sys.argv[0]).name}: error: {where}: {error}", file=sys.stderr, flush=True)
    if not world.is_rank0:  # a launcher ends all ranks when one fails: let rank 0 report first
        time.sleep(max(0.0, rank0_has_ended - time.monotonic()))
    return cli.BAD_INPUT


def show_host(report, here):
    """Print a host's ranks, limits and settings."""
    one = here[0]
    report.say(f"\nhost {one['host']}: ranks {' '.join(str(rank['rank']) for rank in here)}")
    report.say(f"cores: {len(one['cores'])}; " + "; ".join(map(told_limit, one["limits"].items())))
    if one["infiniband"]:
        report.say(f"RDMA ports: {told_ports(one['infiniband'])}")
    rows = []
    for name, (value, where) in sorted(one["settings"].items()):
        does = part.VARIABLES[name]["does"] if name in part.VARIABLES else "not in variables.toml"
        rows.append((f"{name}={value}", where, does))
    if rows:
        report.table(rows, ("setting", "set by", "what it does"), names=3)


def told_ports(ports):
    """Return how many ports of a host have which rate, and which are down."""
    rates = Counter(port["gbit_s"] for port in ports if port["state"] == "ACTIVE")
    told = [f"{number} x {rate or 0:g} Gbit/s" for rate, number in rates.most_common()]
    down = [port["name"] for port in ports if port["state"] != "ACTIVE"]
    return "; ".join([*told, *[f"not active: {' '.join(down)}"] * bool(down)])


def told_limit(limit):
    """Return a limit in words; memory is in GiB."""
    name, most = limit
    if most is None:
        return f"{name}: unlimited"
    return f"{name}: {most:,}" if name == "open files" else f"{name}: {most / host.GIB:.2f} GiB"


def fold(findings):
    """Return (where, finding) with the hosts that have the same one in one place."""
    places = defaultdict(list)
    for where, finding in findings:
        places[finding].append(where)
    folded = []
    for finding, (first, *others) in places.items():
        names = [first, *(where.removeprefix("on host ") for where in others)]
        more = f" and {len(names) - compare.ROWS} more" * (len(names) > compare.ROWS)
        folded.append((", ".join(names[: compare.ROWS]) + more, finding))
    return folded


def show_findings(report, findings):
    """Print each finding with its cost and its cure."""
    for number, (where, finding) in enumerate(findings, 1):
        report.say(f"\n{number}. {finding.kind} {where}: {finding.what}")
        report.say(f"   costs: {finding.costs}")
        report.say(f"   do:    {finding.do}")
    report.say()


def check_launcher(report, hosts):
    """Check LOCAL_WORLD_SIZE against the ranks that gave the same host."""
    wrong = 0
    for here in hosts:
        for one in here:
            started = sum(other["torchrun"] == one["torchrun"] for other in here)
            if one["told"] != started:
                wrong += 1
                where = f"rank {one['rank']} on host {one['host']}"
                report.say(f"{where} has LOCAL_WORLD_SIZE={one['told']}, ranks there: {started}")
    report.check("ranks with a wrong LOCAL_WORLD_SIZE", wrong, 0, 0, "the ranks that reported")


def wrong_rows():
    """Return the variables whose version in variables.toml is not as in the NCCL that is loaded."""
    names = host.names_in("libnccl", "NCCL_")
    if names is None:
        return None
    version = version_of(host.nccl_version())
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
    world, master, port = look_around()
    if args.list:
        if world.is_rank0:
            list_variables()
        return 0
    wait_s = min(WAIT_S, args.timeout)
    facts = read_facts(world, args.device)
    if "problem" in facts and world.world_size == 1:
        raise cli.UsageError(facts["problem"])
    if world.world_size == 1:  # nobody to meet, but it may be asked for a MASTER_ADDR that is wrong
        refuse_what_cannot_start(world, master)
        return judge(args, world, [facts], [])
    rank0_has_ended = time.monotonic() + wait_s + 2 * LEAVE_S
    try:
        refuse_what_cannot_start(world, master)
        ranks, store = exchange(world, master, port, facts, wait_s)
    except cli.UsageError as error:
        return give_up(world, error, rank0_has_ended)
    if world.is_rank0:
        code = judge(args, world, ranks, cannot_start(ranks, world, master, wait_s))
        if len(ranks) < world.world_size:  # time for missing ranks to say why
            time.sleep(LEAVE_S)
        return end_together(store, code, others=len(ranks) - 1)
    return end_with_rank0(store, 2 * (wait_s + LEAVE_S))


def end_together(store, code, others):
    """Tell the others rank 0's exit code, and give them time to read it; return it."""
    store.set("exit code", str(code))
    left_by = time.monotonic() + LEAVE_S
    while store.add("left", 0) < others and time.monotonic() < left_by:
        time.sleep(0.05)
    return code


def end_with_rank0(store, wait_s):
    """Return rank 0's exit code. Raises: UsageError where it gives none in time."""
    code = int(word_of_rank0(store, "exit code", wait_s))
    store.add("left", 1)
    return code


def word_of_rank0(store, key, wait_s):
    """Return what rank 0 puts under a key. Raises: UsageError where it does not in time."""
    try:
        store.wait([key], timedelta(seconds=wait_s))
    except RuntimeError as error:
        raise cli.UsageError("no word from rank 0: read what it printed last") from error
    return store.get(key).decode()


def judge(args, world, ranks, findings):
    """Print and write what was found, on rank 0; return the exit code."""
    device = torch.device(ranks[0].get("device", "cpu"))  # rank 0's
    report = Report("cluster/doctor.py", args, world, device)
    hosts = by_host([one for one in ranks if "settings" in one])
    report.start(f"hosts: {len(hosts)}")
    for here in hosts:
        show_host(report, here)
    missing = world.world_size - sum(map(len, hosts))
    findings, wrong = findings + examine(hosts, ranks), wrong_rows()
    shown = fold(findings)
    show_findings(report, shown)
    report.check("ranks that cannot start", missing, 0, 0, "WORLD_SIZE")
    check_table(report, wrong)
    if not missing:
        check_launcher(report, hosts)
    if args.strict:
        report.check("findings", len(shown), 0, 0, "--strict")
    report.metrics["findings"] = [{"where": w, **finding._asdict()} for w, finding in findings]
    report.metrics["ranks"] = ranks
    return report.finish(f"findings: {len(shown)}")


if __name__ == "__main__":
    cli.run(main)
