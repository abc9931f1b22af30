"""A SLURM for tests, from Debian's packages, on the nodes of a virtual cluster.

The packages are unpacked below runs/ once. The daemons see them laid over /usr, in
namespaces of their own: nothing is installed, or left when pytest ends, however it
ends.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import MARK, REPO

UNPACKED = REPO / "runs" / "slurm"
INIT = REPO / "tests" / "helpers_slurm.sh"
CLUSTER = REPO / "cluster" / "virtual_cluster.py"
DEADLINE_S = 300  # takes seconds on a quiet machine
ENDED = "JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)"
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")

# No cgroups: many containers have none that one may write. All timers are short.
CONF = """\
ClusterName=guide
SlurmctldHost=node0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=5
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
{nodes}
PartitionName=usual Nodes=ALL Default=YES
"""


def need(words: list[str], **options) -> str:
    """Return what a command prints, or skip the test with its error message."""
    try:
        ended = subprocess.run(
            words, capture_output=True, text=True, timeout=DEADLINE_S, **options
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"no SLURM here: {error}")
    if ended.returncode:
        said = (ended.stderr.strip() or "no word").splitlines()[-1]
        pytest.skip(f"no SLURM here: {Path(words[0]).name}: {said}")
    return ended.stdout


def packages() -> Path:
    """Return the folder that has SLURM in usr: / where it is installed."""
    if shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin"):
        return Path("/")
    if not UNPACKED.exists():
        new = UNPACKED.with_name(f"slurm-{os.getpid()}")
        new.mkdir(parents=True)
        try:
            install = [
                "apt-get",
                "install",
                "--simulate",
                "--no-install-recommends",
                *PACKAGES,
            ]
            names = re.findall(r"^Inst (\S+)", need(install), re.M)
            need(["apt-get", "download", *names], cwd=new)
            for package in new.glob("*.deb"):
                need(["dpkg-deb", "--extract", str(package), str(new)])
                package.unlink()
            for name in (
                "slurmctld",
                "slurmd",
                "slurmstepd",
            ):  # as an installation links them
                (new / "usr" / "sbin" / name).symlink_to(f"{name}-wlm")
            new.rename(UNPACKED)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return UNPACKED


class Slurm:
    """The daemons, on all nodes of a virtual cluster; the first one is the head too."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.packages, self.cluster = (
            folder,
            packages(),
            folder / "cluster",
        )
        self.head: int | None = None
        self.environ = {name: text for name, text in os.environ.items() if name != MARK}
        names = [f"node{number}" for number in range(count)]
        for name in ("state", *names):
            (folder / name).mkdir()
        nodes = [
            f"NodeName={name} NodeAddr=10.77.0.{number + 1} CPUs=8 RealMemory=4000"
            for number, name in enumerate(names)
        ]
        conf = CONF.format(folder=folder, nodes="\n".join(nodes))
        (folder / "slurm.conf").write_text(conf)
        # /sys/fs/cgroup differs between machines, and no test needs it.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        need(self.verb("up", "--nodes", str(count)), env=self.environ, cwd=REPO)
        # The cluster lives until its guard's input is closed: by stop, or because
        # pytest ended.
        down = f"read; exec {shlex.join(self.verb('down'))}"
        self.guard = subprocess.Popen(
            ["bash", "-c", down],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=self.environ,
            cwd=REPO,
            start_new_session=True,
        )
        try:
            daemons = self.boot(*names)
            while self.run("sinfo -h -o '%D %t'") != f"{count} idle":
                if daemons.poll() is not None:
                    pytest.skip(f"no SLURM here: {self.log()}")
                time.sleep(0.2)
        except BaseException:
            self.stop()
            raise

    def verb(self, verb: str, *words: str) -> list[str]:
        return [sys.executable, str(CLUSTER), verb, "--at", str(self.cluster), *words]

    def boot(self, *names: str) -> subprocess.Popen:
        """Start the daemons of nodes; return a process that ends with the last one."""
        words = [
            "unshare",
            "--mount",
            "bash",
            str(INIT),
            str(self.packages),
            str(self.folder),
        ]
        command = self.verb("run", "--on", ",".join(names), "--", *words, "{name}")
        with (self.folder / "daemons.log").open("a") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, env=self.environ, cwd=REPO
            )

    def log(self) -> str:
        return (self.folder / "daemons.log").read_text()[-2000:]

    def stop(self) -> None:
        self.guard.stdin.close()
        self.guard.wait(60)

    def run(self, line: str) -> str:
        """Run a line of bash where the head's daemon runs; return its output."""
        conf = str(self.folder / "slurm.conf")
        for process in psutil.process_iter() if self.head is None else ():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[:4] == ["slurmctld", "-D", "-f", conf]:
                    self.head = process.pid
        if self.head is None:
            return ""
        environ = self.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_CONF": conf,
            "GLOO_SOCKET_IFNAME": "link0",
        }
        words = [
            "nsenter",
            "--all",
            f"--target={self.head}",
            f"--wd={REPO}",
            "bash",
            "-c",
            line,
        ]
        ended = subprocess.run(
            words,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
        )
        return ended.stdout.strip()

    def wait_for(self, line: str, expected: str) -> str:
        """Run a line again and again until a regular expression is found in what it
        prints.
        """
        deadline = time.monotonic() + DEADLINE_S
        while not re.search(expected, said := self.run(line), re.M):
            assert time.monotonic() < deadline, (
                f"no {expected!r}: {line}: {said}\n{self.log()}"
            )
            time.sleep(0.2)
        return said

    # jobs

    def submit(self, line: str, *argv) -> str:
        """Submit a job script with its arguments; return the job's number."""
        out = f"--output={self.folder}/job-%j.out"
        said = self.run(f"sbatch --parsable {out} {line} {shlex.join(map(str, argv))}")
        assert said.isdecimal(), said
        return said

    def fact(self, job: str, name: str) -> str:
        match = re.search(rf"\b{name}=(\S+)", self.run(f"scontrol show job {job}"))
        return match[1] if match else ""

    def output(self, job: str) -> str:
        """Return what a job has printed, over all its starts."""
        path = self.folder / f"job-{job}.out"
        return path.read_text() if path.exists() else ""

    def end_of(self, job: str) -> str:
        """Wait until a job has ended for good; return its state."""
        self.wait_for(f"scontrol show job {job}", ENDED)
        return self.fact(job, "JobState")

    def start_again(self, job: str) -> None:
        """Wait until a job is queued again; have it start soon, and not only after two
        minutes.

        SLURM waits that long since it does not let a job start while the end of the
        last start is still on its way to the nodes: "Job credential revoked".
        """
        waits = r"JobState=PENDING Reason=BeginTime"
        again = rf"{waits}|JobState=RUNNING(.*\n)*?.*Restarts=[1-9]"
        self.wait_for(f"scontrol show job {job}", f"{again}|{ENDED}")
        time.sleep(3)
        self.run(f"scontrol update job={job} StartTime=now")
