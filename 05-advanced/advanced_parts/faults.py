"""The nodes of faults.py, and the job on them: ddp_training.py, whose ranks break when told to.

As a program this file is that job: `torchrun ... faults.py ARGUMENTS OF ddp_training.py`.
"""

import contextlib
import json
import os
import re
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from dist_common import cli

REPO = Path(cli.__file__).resolve().parents[1]
TEMPLATE = "01-ddp-basics/ddp_training.py"
CLUSTER = "cluster/virtual_cluster.py"
# Variables of a node: the folder of orders to its ranks; the version and the name it claims;
ORDERS, VERSION, HOST = "FAULTS_ORDERS", "FAULTS_VERSION", "FAULTS_HOST"
CLOCK = "FAULTS_CLOCK_S"  # by how much its launcher's clock is fast


# the job, which is the template itself


def run_template():
    """Run ddp_training.py in this process, with what breaks a rank put in."""
    import torch

    from dist_common import checkpoint, job

    if HOST in os.environ:  # nodes that share a kernel's name get one of their own
        socket.gethostname = lambda: os.environ[HOST]
    if VERSION in os.environ:
        torch.__version__ = type(torch.__version__)(os.environ[VERSION])
    made, write = checkpoint.Replicated.__init__, checkpoint.Replicated.write
    record = job.Step.record
    models = []

    def remember(self, model, **parts):
        made(self, model, **parts)
        models.append(model)

    def step(self, *results, **options):
        record(self, *results, **options)
        time.sleep(float(Path(os.environ[ORDERS], "slowly").read_text() or 0))
        for kind, break_rank in BREAKS.items():
            if ordered(kind):
                break_rank(models[-1])

    def fill_up(self, folder):
        if ordered("disk"):  # every write to this device fails as on a full disk
            (folder / "state.pt").symlink_to("/dev/full")
        write(self, folder)

    checkpoint.Replicated.__init__, checkpoint.Replicated.write = remember, fill_up
    job.Step.record = step
    sys.argv[0] = str(REPO / TEMPLATE)
    sys.path[0] = str(REPO / TEMPLATE).rpartition("/")[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


def ordered(kind):
    """Say whether this rank was told to break so, and has not done it yet."""
    try:
        Path(os.environ[ORDERS], f"{kind}-{os.environ['RANK']}").unlink()
    except FileNotFoundError:
        return False
    return True


def run_out_of_memory(model):
    import torch

    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
    torch.zeros(2**32, dtype=torch.uint8)  # 4 GiB, where 256 MiB are left


def make_nan(model):
    list(model.parameters())[-1].data.view(-1)[0] = float("nan")


def flip_a_bit(model):
    import torch

    list(model.parameters())[-1].data.view(-1).view(torch.int32)[0] ^= 1 << 20  # of its mantissa


BREAKS = {"memory": run_out_of_memory, "nan": make_nan, "flip": flip_a_bit}


# a launcher whose clock is wrong


def launch_by_wrong_clock(offset_s):
    """Be torchrun on a node whose clock is fast: its rendezvous compares times of two machines."""
    from datetime import datetime, timedelta

    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    class Fast(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(seconds=offset_s)  # which can be pickled

    dynamic_rendezvous.datetime = Fast
    run.main()


# nodes


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Loopback:
    """Nodes that are groups of processes of this machine: they share its network and its clock."""

    place = "nodes are groups of processes of one machine: no links to cut, no clocks to set"
    virtual = False

    def __init__(self, names, folder):
        self.folder, self.agents = folder, {}

    def address(self, name):
        return "127.0.0.1"

    def start(self, name, command, environ):
        """Start a command on a node; return its process, which prints the node's lines."""
        self.agents[name] = subprocess.Popen(
            command, env={**os.environ, HOST: name, **environ}, cwd=REPO, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        return self.agents[name]

    def signal(self, name, whom, number):
        """Send a signal to the launcher of a node, or to its worker."""
        agent = psutil.Process(self.agents[name].pid)
        (agent if whom == "agent" else agent.children()[0]).send_signal(number)

    def verb(self, verb, name, *_):
        """End a node's processes at once (kill); a node of processes needs no boot (start)."""
        if verb == "kill":
            agent = psutil.Process(self.agents[name].pid)
            agent.suspend()
            for process in [*agent.children(recursive=True), agent]:
                process.kill()

    def close(self):
        """End what is left, ranks without a launcher too."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(ORDERS, "").startswith(str(self.folder)):
                    process.kill()
        for agent in self.agents.values():
            agent.wait()


class Virtual:
    """Nodes of virtual_cluster.py: each with its own network, name, processes and clock."""

    place = "nodes of virtual_cluster.py"
    virtual = True

    def __init__(self, names, folder, *options):
        self.at = ["--at", str(folder / "cluster")]
        self._call("up", "--nodes", str(len(names)), *options)

    def _call(self, *words):
        command = [sys.executable, str(REPO / CLUSTER), *words, *self.at]
        done = subprocess.run(command, cwd=REPO, text=True, capture_output=True)
        if done.returncode:
            raise cli.UsageError(f"{CLUSTER} {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def address(self, name):
        return f"10.77.0.{int(name.removeprefix('node')) + 1}"

    def start(self, name, command, environ):
        variables = [f"{key}={value}" for key, value in environ.items()]
        run = ["run", "--on", name, *self.at, "--", "env", *variables, *command]
        return subprocess.Popen(
            [sys.executable, str(REPO / CLUSTER), *run], cwd=REPO, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def signal(self, name, whom, number):
        self._call("signal", name, whom, signal.Signals(number).name)

    def verb(self, verb, name, *more):
        self._call(verb, name, *more)

    def close(self):
        self._call("down")


STEP = re.compile(r"step (\d+) \| loss")
GLOG = re.compile(r"^[EW]\d{4} \S+ +\d+ \S*torch/distributed/\S+\] (?:\[\S+\] )?")
TELLING = re.compile(r"ddp_training\.py: |warning: |torchrun: |torch\S*Error|\(ended")


@dataclass
class Line:
    """What a node printed, and when."""

    at: float  # s, monotonic
    node: str
    text: str


class Launch:
    """The job on its nodes: started, listened to, and its saves noted as they are sealed."""

    def __init__(self, nodes, names, folder, job, nnodes, workers=1):
        self.nodes, self.names, self.folder, self.job = nodes, names, folder, job
        self.nnodes, self.workers = nnodes, workers
        self.port, self.lines, self.running, self.saved = free_port(), [], {}, []
        self.damaged = set()  # steps whose checkpoint was damaged on purpose
        self.resumed_step, self.resumed_at = 0, 0.0  # where the last start began, and when
        self.orders = folder / "orders"
        self.orders.mkdir(parents=True)
        self.output = folder / "run"
        self.slowly(0)
        self.closed = threading.Event()
        threading.Thread(target=self._watch_saves, daemon=True).start()

    def start(self, name, **environ):
        """Start a node's launcher, by the line of launch_ddp.sh elastic with shorter patience."""
        first = self.names[0]
        patience = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
        by_hand = [sys.executable, str(Path(__file__).resolve())]  # it sets the clock
        command = [
            *(by_hand if CLOCK in environ else [sys.executable, "-m", "torch.distributed.run"]),
            f"--nnodes={self.nnodes}", f"--nproc-per-node={self.workers}",
            "--max-restarts=50", "--monitor-interval=0.1", "--signals-to-handle=SIGTERM,SIGUSR1",
            "--rdzv-backend=c10d", "--rdzv-id=faults",
            f"--rdzv-endpoint={self.nodes.address(first)}:{self.port}",
            f"--rdzv-conf={patience},is_host={int(name == first)},read_timeout=10",
            f"--local-addr={self.nodes.address(name)}", str(Path(__file__).resolve()),
            *self.job, "--output-dir", str(self.output), "--resume",
        ]  # fmt: skip
        self._start(name, command, environ)

    def start_alone(self, name):
        """Start rank 1 of 2 on a node without a launcher, as srun does; nobody starts rank 0."""
        meet = {"MASTER_ADDR": self.nodes.address(self.names[0]), "MASTER_PORT": str(self.port)}
        ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        command = [sys.executable, str(REPO / TEMPLATE), *self.job]
        self._start(name, command, meet | ranks)

    def _start(self, name, command, environ):
        variables = {
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            ORDERS: str(self.orders),
        }
        process = self.nodes.start(name, command, variables | environ)
        self.running[name] = process
        threading.Thread(target=self._listen, args=(name, process), daemon=True).start()

    def _listen(self, name, process):
        for text in process.stdout:
            text = text.rstrip().removeprefix(f"[{name}] ")
            self.lines.append(Line(time.monotonic(), name, text))
        process.wait()
        self.lines.append(Line(time.monotonic(), name, f"(ended with {process.returncode})"))

    def _watch_saves(self):
        """Note each checkpoint once it has its name: from then on it counts as saved."""
        while not self.closed.wait(0.02):
            for path in (self.output / "checkpoints").glob("step-*"):
                step = int(path.name.removeprefix("step-"))
                if step not in [number for _, number in self.saved]:
                    self.saved.append((time.monotonic(), step))

    def newest_step_saved(self, until):
        """Return the newest step that was saved by then, 0 for none; not those damaged since."""
        found = [step for at, step in self.saved if at < until and step not in self.damaged]
        return max(found, default=0)

    def newest_saved(self):
        """Return folder and step of the newest checkpoint."""
        path = max((self.output / "checkpoints").glob("step-*"))
        return path, int(path.name.removeprefix("step-"))

    def order(self, kind, rank):
        (self.orders / f"{kind}-{rank}").write_text("")

    def slowly(self, seconds):
        """Have all ranks sleep so long in each step."""
        (self.orders / "new").write_text(str(seconds))
        (self.orders / "new").rename(self.orders / "slowly")  # never half written

    def between(self, start, end=float("inf")):
        return [line for line in list(self.lines) if start <= line.at <= end]

    def last_step(self, until):
        """Return the number of the last step that was logged by then."""
        found = [STEP.match(line.text) for line in self.between(0, until)]
        return [int(match[1]) for match in found if match][-1]

    def longest_pause(self, start, end):
        """Return the longest time between two steps in a row."""
        times = [start, *(line.at for line in self.between(start, end) if STEP.match(line.text))]
        return max(after - before for before, after in zip(times, times[1:], strict=False))

    def wait_for_step(self, number, seconds, since=0.0):
        """Return the line of the first step that is logged since then and is not below `number`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in self.between(since):
                match = STEP.match(line.text)
                if match and int(match[1]) >= number:
                    return line
            time.sleep(0.02)
        raise TimeoutError(f"no step {number} within {seconds:.0f} s:\n{self.tail()}")

    def wait_for_resume(self, since, seconds):
        """Return the line that says where the job resumes, and the step."""
        line, match = self.wait(r"^at step (\d+),|^no checkpoint in", since, seconds)
        return line, int(match[1] or 0)

    def telling(self, start, end=float("inf")):
        """Return the lines that say what is wrong, without what changes with every run."""
        found = []
        for line in self.between(start, end):
            text = GLOG.sub(r"torchrun: ", line.text)
            text = re.sub(
                r"\(pid: \d+\) of binary: .*|process \d+ |DIST_COMMON_TRACEBACK.*", "", text
            )
            if TELLING.match(text):
                found.append(Line(line.at, line.node, text.replace(f"{self.folder}/", "").strip()))
        return found

    def tail(self):
        return "\n".join(f"[{line.node}] {line.text}" for line in self.lines[-40:])

    def wait(self, pattern, since, seconds):
        """Return the first line since then that matches, and the match. Raises: TimeoutError."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in self.between(since):
                if match := re.search(pattern, line.text):
                    return line, match
            time.sleep(0.02)
        raise TimeoutError(f"no line {pattern!r} within {seconds:.0f} s:\n{self.tail()}")

    def wait_until_ended(self, seconds):
        """Wait until the launchers have ended; return the nodes whose launcher has not."""
        deadline = time.monotonic() + seconds
        while True:
            left = [name for name, process in self.running.items() if process.poll() is None]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)

    def losses(self):
        """Return the loss of each step; each is there once."""
        lines = (self.output / "metrics.jsonl").read_text().splitlines()
        found = [(row["step"], row["loss"]) for row in map(json.loads, lines) if "loss" in row]
        assert len(found) == len(dict(found)), "a step is there twice"
        return dict(found)

    def close(self):
        self.closed.set()
        self.nodes.close()


if __name__ == "__main__":
    if CLOCK in os.environ and "RANK" not in os.environ:
        launch_by_wrong_clock(float(os.environ[CLOCK]))
    else:
        run_template()
