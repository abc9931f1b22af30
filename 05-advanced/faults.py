"""Break a training job on two nodes in every way that clusters break, and measure what it costs.

    CPU   python 05-advanced/faults.py --only worker-killed
    all   python 05-advanced/faults.py --nodes virtual --output-dir runs/faults

The job is 01-ddp-basics/ddp_training.py, elastic, unchanged, with a tiny model. Faults that need a
network, a clock or a power switch of their own need --nodes virtual (virtual_cluster.py). Look for:
who says what, and when; how many steps are lost; how soon the job trains again; and that nothing
that was saved is ever lost.

Sources: docs.pytorch.org, torchrun (Elastic Launch); Grattafiori et al., The Llama 3 Herd of Models
(2024), section 3.3.4; Wan et al., Robust LLM Training Infrastructure at ByteDance (2025).
"""

import argparse
import json
import math
import platform
import re
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import psutil
import torch
from tabulate import tabulate

from advanced_parts import faults as part
from dist_common import cli, runtime
from dist_common.report import Report

NODES = ["node0", "node1"]  # node0 is where the launchers meet
TIMEOUT_S = 4  # --timeout of the job: how long a rank waits for another; the default is 600
PATIENCE_S = 180  # for what a fault leads to
AFTER_S = 10  # until a launcher should have ended when its job has
SAVE_EVERY, STEPS = 5, 60
PACE_S = 0.1  # added to each step: time to break the job in it
HOLD_S = 0.5  # while a fault is made: so that no checkpoint comes before it
LATE = 3  # steps after a save, at which a fault comes: so many are lost if all goes well
RECORD = Path(__file__).parent / "recorded/faults.json"
WIDTH, NAMED_WIDTH = 110, 70  # of a line that a node printed, in characters
FEW = 3  # rows, of which all lines are shown
ROUNDING = 1e-4  # of a loss: other numbers of ranks add up in another order


@dataclass
class Fault:
    """One row: how it is made, what has to be done about it, whether the job stops for it."""

    name: str
    what: str
    act: Callable  # breaks a launch
    victim: str = "node1"
    cure: Callable = lambda launch, at: None  # what a person or a scheduler does afterwards
    stops: bool | None = True  # ranks are started again, and resume; None: on virtual nodes


@dataclass
class Job:
    """Faults that are made one after the other in one launch."""

    faults: list[Fault]
    nnodes: str = "2"  # of torchrun
    workers: int = 1  # ranks of a node
    flags: list[str] = field(default_factory=list)
    needs_virtual: bool = False
    environ: dict[str, str] = field(default_factory=dict)  # of node1
    same_ranks: bool = True  # from start to end: the losses are bitwise the same


# how each fault is made


def send(whom, number, *nodes):
    """Return what sends a signal to the launcher or the worker of nodes."""
    return lambda launch: [launch.nodes.signal(node, whom, number) for node in nodes]


def order(kind, rank):
    """Return what tells a rank to break by itself in its next step."""
    return lambda launch: launch.order(kind, rank)


def damage(how):
    """Return what damages the newest checkpoint, then kills a worker so that it is needed."""

    def act(launch):
        path, step = launch.newest_saved()
        state = path / "state.pt"
        content = bytearray(state.read_bytes())
        content[len(content) // 2] ^= 1
        state.write_bytes(content if how == "flip" else content[: len(content) // 2])
        launch.damaged.add(step)  # by us: not lost by the job
        launch.nodes.signal("node1", "worker", signal.SIGKILL)

    return act


def verb(name, node, *more):
    """Return what does something to a node: kill, cut, restore, slow, lose."""
    return lambda launch: launch.nodes.verb(name, node, *more)


def cut_for(seconds):
    def act(launch):
        launch.nodes.verb("cut", "node1")
        time.sleep(seconds)
        launch.nodes.verb("restore", "node1")

    return act


def back_with(**environ):
    """Return what boots the node that was killed, and starts its launcher again."""

    def act(launch):
        launch.slowly(1.0)  # the job trains on meanwhile, and is not to end
        launch.nodes.verb("start", "node1")
        launch.start("node1", **environ)

    return act


# what is done about it


def start_again(launch, at):
    """Start all launchers again when they have ended, as a scheduler does with a requeued job."""
    left = launch.wait_until_ended(PATIENCE_S)
    if left:
        raise TimeoutError(f"still running after {PATIENCE_S} s: {left}")
    for name in NODES:
        launch.start(name)


def boot_and_start_again(launch, at):
    launch.wait(r"\(ended with", at, PATIENCE_S)
    launch.nodes.verb("start", "node0")
    start_again(launch, at)


def take_out(launch, at):
    """Take the node out again once a line has refused it."""
    launch.wait("install the same on all", at, PATIENCE_S)
    launch.nodes.verb("kill", "node1")


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
TERM, USR1 = signal.SIGTERM, signal.SIGUSR1
JOBS = {
    "worker": Job([
        Fault("worker-killed", "SIGKILL of a worker", send("worker", KILL, "node1")),
        Fault("out-of-memory", "out of memory on rank 1", order("memory", 1)),
        Fault("nan", "NaN in a weight of rank 1", order("nan", 1)),
        Fault("disk-full", "disk full during a save", order("disk", 0), victim="node0"),
        Fault("checkpoint-flipped", "a bit flipped in the newest checkpoint", damage("flip")),
        Fault("checkpoint-cut", "the newest checkpoint cut in half", damage("cut")),
    ]),
    "hang": Job([
        Fault("worker-stopped", "SIGSTOP of a worker: it hangs", send("worker", STOP, "node1")),
    ]),
    "preempted": Job([
        Fault("sigterm", "SIGTERM to all launchers", send("agent", TERM, *NODES), cure=start_again),
        Fault("sigusr1", "SIGUSR1 to all launchers", send("agent", USR1, *NODES), cure=start_again),
    ]),
    "agent": Job([
        Fault("agent-killed", "SIGKILL of a launcher", send("agent", KILL, "node1"), stops=None),
    ], nnodes="1:2", same_ranks=False),
    "rendezvous": Job([
        Fault("rendezvous-killed", "power cut of the node where launchers meet",
              verb("kill", "node0"), victim="node0", cure=boot_and_start_again),
    ], nnodes="1:2"),
    "node": Job([
        Fault("node-killed", "power cut of another node", verb("kill", "node1")),
        Fault("other-version", "it comes back with another torch",
              back_with(**{part.VERSION: "2.9.0"}), cure=take_out),
        Fault("node-back", "it comes back as it was", back_with()),
    ], nnodes="1:4", same_ranks=False),
    "clock": Job([
        Fault("clock-wrong", "a clock an hour fast, then SIGKILL of a worker",
              send("worker", KILL, "node1")),
    ], environ={part.CLOCK: "3600"}),
    "replica": Job([
        Fault("weight-flipped", "a bit flipped in a weight of rank 3", order("flip", 3)),
    ], workers=2, flags=["--check-replicas-every", str(SAVE_EVERY)], same_ranks=False),
    "link": Job([
        Fault("link-flapped", "link cut for 2 s, less than --timeout", cut_for(2), stops=False),
        Fault("packets-lost", "2% of a node's packets lost", verb("lose", "node1", "2%"),
              stops=False),
        Fault("card-slow", "a node's card at 1 Mbit/s", verb("slow", "node1", "--rate", "1mbit"),
              stops=False),
    ], needs_virtual=True),
    "cut": Job([
        Fault("link-cut", "link of a node cut for good", verb("cut", "node1")),
    ], nnodes="1:2", needs_virtual=True, same_ranks=False),
}  # fmt: skip
UNREACHABLE = "unreachable"
NAMES = [*(fault.name for job in JOBS.values() for fault in job.faults), UNREACHABLE]


# what it leads to


@dataclass
class Row:
    """What a fault led to. `named` is the line that names the broken node, or its rank."""

    name: str
    what: str
    lines: list[tuple[str, float, str]]  # node, seconds after the fault, what it printed
    lost_steps: int  # that have to be taken again
    again_s: float | None  # to the first step that is not taken again, or a pause; None: never
    named: str
    saved_and_lost: int  # steps


def suffer(launch, fault):
    """Break a running job, wait until it trains again, and say what happened."""
    launch.slowly(PACE_S)
    launch.wait_for_step(launch.resumed_step + SAVE_EVERY + LATE, PATIENCE_S, launch.resumed_at)
    # Virtual nodes end what a dead launcher leaves, as SLURM does; elsewhere a rank trains on.
    stops = launch.nodes.virtual if fault.stops is None else fault.stops
    if stops:
        launch.slowly(HOLD_S)
    at = time.monotonic()
    fault.act(launch)
    fault.cure(launch, at)
    reached = launch.last_step(until=at)
    if stops:
        resumed, step = launch.wait_for_resume(at, PATIENCE_S)
        reached = launch.last_step(until=resumed.at)
        after, loss = resumed.at, max(0, launch.newest_step_saved(resumed.at) - step)
    else:
        step, after, loss = launch.last_step(until=time.monotonic()), at, 0
    first = launch.wait_for_step(step + 1, PATIENCE_S, since=after)
    again = first.at - at
    if not stops:  # it may have been slow: the longest pause is what it cost
        first = launch.wait_for_step(step + SAVE_EVERY, PATIENCE_S, since=after)
        again = launch.longest_pause(at, first.at)
    launch.resumed_step, launch.resumed_at = step, after
    lines = [
        (line.node, round(line.at - at, 2), line.text) for line in launch.telling(at, first.at)
    ]
    named = naming(lines, fault.victim, launch)
    lost = reached - step if stops else 0
    return Row(fault.name, fault.what, lines, lost, round(again, 2), named, loss)


def naming(lines, victim, launch):
    """Return the first line that names a node: by name, by address or by its launcher's own log."""
    address = re.escape(launch.nodes.address(victim))
    for node, _, text in lines:
        if f"({victim})" in text or f" on {victim}" in text or re.search(rf"\b{address}\b", text):
            return text
        if node == victim and text.startswith(("torchrun: failed", "torchrun: Received")):
            return f"{victim}: {text}"
    return ""


def run_job(name, nodes_class, folder, wanted=NAMES):
    """Run the wanted faults of a job, one after the other.

    Return their rows, the loss of each step, and whose launchers do not end when the job has.
    """
    job = JOBS[name]
    faults = [fault for fault in job.faults if fault.name in wanted]
    nodes = nodes_class(NODES, folder)
    launch = part.Launch(nodes, NODES, folder, flags_of_job(folder, job), job.nnodes, job.workers)
    try:
        launch.slowly(PACE_S)
        launch.start(NODES[0])
        launch.start(NODES[1], **job.environ)
        rows = [suffer(launch, fault) for fault in faults]
        launch.slowly(0)
        launch.wait(r"^(OK|FAILED): .* trained to the end", 0, PATIENCE_S)
        left = launch.wait_until_ended(AFTER_S)
        return rows, launch.losses(), left
    finally:
        launch.close()


def unreachable(nodes_class, folder):
    """Start a rank, and a launcher, whose master is not there; return the row of what they say."""
    nodes = nodes_class(NODES, folder)
    launch = part.Launch(nodes, NODES, folder, flags_of_job(folder), "2")
    try:
        at = time.monotonic()
        launch.start_alone("node1")
        launch.wait(r"ddp_training.py: .* ranks met", at, PATIENCE_S)
        launch.wait_until_ended(PATIENCE_S)
        lines = [(line.node, round(line.at - at, 2), line.text) for line in launch.telling(at)]
    finally:
        launch.close()
    named = naming(lines, NODES[0], launch)
    return Row(UNREACHABLE, "MASTER_ADDR does not answer", lines, 0, None, named, 0)


def undisturbed(folder):
    """Return the loss of each step when nothing breaks."""
    launch = part.Launch(part.Loopback(NODES, folder), NODES, folder, flags_of_job(folder), "1", 2)
    try:
        launch.start(NODES[0])
        launch.wait(r"^OK: ", 0, PATIENCE_S)
        return launch.losses()
    finally:
        launch.close()


def flags_of_job(folder, job=None):
    """Return arguments of ddp_training.py: a tiny model on 12 kB of text, each step logged."""
    shape = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
             "max_position_embeddings": 64}  # fmt: skip
    (folder / "shape.json").write_text(json.dumps(shape))
    (folder / "text").write_bytes(Path(argparse.__file__).read_bytes()[:12_000])
    files = ["--preset", folder / "shape.json", "--text-file", folder / "text"]
    batch = ["--seq-len", 32, "--global-batch-size", 12, "--micro-batch-size", 3]
    steps = ["--max-steps", STEPS, "--warmup-steps", 4, "--log-every", 1, "--eval-every", 0]
    waits = ["--save-every", SAVE_EVERY, "--timeout", TIMEOUT_S]
    return [str(word) for word in [*files, *batch, *steps, *waits, *(job.flags if job else [])]]


def difference(losses, others):
    """Return the largest difference of a step's loss; infinite where steps are missing."""
    if losses.keys() != others.keys():
        return math.inf
    return max(abs(losses[step] - others[step]) for step in losses)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME",
        help=f"faults to make: {', '.join(NAMES)} (all that the nodes can have)")  # fmt: skip
    add("--nodes", choices=("processes", "virtual"), default="processes",
        help="what the two nodes are (processes)")  # fmt: skip
    add("--record", action="store_true", help="write the page's table, recorded/faults.json")
    return parser.parse_args()


def main():
    args = parse_args()
    world = runtime.World(0, 0, 1, 1, "python")  # not discovered: the nodes inherit no variables
    report = Report("05-advanced/faults.py", args, world, torch.device("cpu"))
    nodes = part.Virtual if args.nodes == "virtual" else part.Loopback
    names = [name for name, job in JOBS.items() if {f.name for f in job.faults} & set(args.only)]
    left_out = [name for name in names if JOBS[name].needs_virtual and not nodes.virtual]
    if left_out and left_out == names and UNREACHABLE not in args.only:
        raise cli.UsageError(f"--only {' '.join(args.only)} needs --nodes virtual")
    report.start(f"{nodes.place}; --timeout {TIMEOUT_S} s, a checkpoint every {SAVE_EVERY} steps")
    rows = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        right = undisturbed(made(folder, "undisturbed"))
        for name in report.progress([name for name in names if name not in left_out], "breaking"):
            found, losses, left = run_job(name, nodes, made(folder, name), args.only)
            rows += found
            for node in left:
                report.say(f"{name}: {AFTER_S} s after the end the launcher of {node} still runs")
            limit = 0 if JOBS[name].same_ranks else ROUNDING
            report.check(
                f"{name}: losses", difference(losses, right), 0, limit, "an undisturbed run"
            )
        if UNREACHABLE in args.only:
            rows.append(unreachable(nodes, made(folder, UNREACHABLE)))
    for row in rows:
        report.check(f"{row.name}: saved steps lost", row.saved_and_lost, 0, 0, "sealed folders")
    show(report, rows)
    report.metrics["rows"] = [asdict(row) for row in rows]
    if args.record:
        record(rows)
    missing = [fault.name for name in left_out for fault in JOBS[name].faults]
    if missing:
        report.say(f"not made, for they need --nodes virtual: {', '.join(missing)}")
    many = "1 fault" if len(rows) == 1 else f"{len(rows)} faults"
    return report.finish(f"{many} made, nothing that was saved is lost")


def record(rows):
    """Keep what was measured beside the page, with the machine."""
    memory = psutil.virtual_memory().total / 2**30
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    content = {
        "machine": f"{psutil.cpu_count()} cores, {memory:.0f} GiB, {system}, other jobs beside it",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "output": table(rows),
        "rows": [asdict(row) for row in rows],
    }
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(content, indent=1) + "\n")


def made(folder, name):
    path = Path(folder, name)
    path.mkdir()
    return path


def show(report, rows):
    """Print the table; of few rows also what each node said."""
    if len(rows) <= FEW:
        for row in rows:
            report.say(f"\n{row.name}: {row.what}")
            for node, after, text in row.lines:
                report.say(f"  {node} {after:+5.1f} s  {text[:WIDTH]}")
        report.say()
    for line in table(rows):
        report.say(line)


def table(rows):
    headers = ("fault", "first line", "steps lost", "trains again", "names the node")
    text = tabulate(map(cells, rows), headers, "simple", disable_numparse=True)
    return [line.rstrip() for line in text.splitlines()]


def cells(row):
    """Return a row of the table, as texts."""
    first = "none"
    if row.lines:
        node, after, _ = row.lines[0]
        first = f"{node}, {after:.1f} s"
    again = "no" if row.again_s is None else f"{row.again_s:.1f} s"
    named = row.named.removeprefix("ddp_training.py: ") or "nothing"
    return row.name, first, str(row.lost_steps), again, named[:NAMED_WIDTH]


if __name__ == "__main__":
    cli.run(main)
