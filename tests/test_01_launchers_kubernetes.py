"""Launch files for Kubernetes, Ray and SkyPilot: they are valid, and what they start resumes.

No cluster is here. A test takes commands and variables out of the files, starts each pod or machine
as processes of this machine, and plays the controller that starts them again.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from conftest import MARK, REPO, free_port, run_command
from helpers_01 import TRAINING, largest_difference, small_job, steps_in, wait_for
from page_reader import TRACKED, read

from bench.strategies import tomllib

FILES = REPO / "01-ddp-basics" / "launch_files"
PAGE = "01-ddp-basics/launchers_kubernetes.md"
STEPS = 24
full = pytest.mark.full


def environment(name: str) -> Path | None:
    """Return the Python of an environment that `make` made beside that of the tests."""
    places = [folder / name / "bin" / "python" for folder in (Path(sys.prefix).parent, REPO)]
    return next((place for place in places if place.exists()), None)


LAUNCH, FRAMEWORKS = environment(".venv-launch"), environment(".venv-frameworks")
with_schemas = pytest.mark.skipif(LAUNCH is None, reason="no .venv-launch: make launch-files")
with_ray = pytest.mark.skipif(FRAMEWORKS is None, reason="no .venv-frameworks: make frameworks")


def documents(name: str) -> dict[str, dict]:
    """Return the documents of a file by their kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((FILES / name).read_text())}


# the files fit the schemas of what reads them, and a typo does not

TYPOS = {
    "job.yaml": [
        ("backoffLimitPerIndex", "backoffLimitPerIndx", "'backoffLimitPerIndx' was unexpected"),
        ("completions: 2", "completions: two", "/spec/completions 'two' is not of type"),
        ("mountPath: /dev", "mountpath: /dev", "'mountPath' is a required property"),
        ("clusterIP", "clusterIp", "'clusterIp' was unexpected"),
    ],
    "trainjob.yaml": [
        ("numNodes: 2", "numNode: 2", "/spec/trainer/numNode: 2 was read as None"),
        ("torch: {}", "torch: {numProcPerNode: auto}", "/mlPolicy/torch/numProcPerNode: 'auto'"),
        ("runtimeRef", "runtimeref", "runtimeRef"),
        ("podFailurePolicy", "podFailurPolicy", "/podFailurPolicy: "),
    ],
    "skypilot.yaml": [
        ("num_nodes", "num_node", "Instead of 'num_node', did you mean 'num_nodes'?"),
        ("use_spot", "use_sport", "Instead of 'use_sport', did you mean 'use_spot'?"),
        ("errors: 3", "errors: -3", "-3 is less than the minimum of 0"),
    ],
}  # fmt: skip


@full
@with_schemas
def test_the_files_fit_their_schemas_and_a_typo_does_not(tmp_path):
    expected = {}
    for name, typos in TYPOS.items():
        text = (FILES / name).read_text()
        expected[name] = None
        for number, (right, wrong, says) in enumerate(typos):
            assert text.count(right) >= 1
            path = tmp_path / f"{number}-{name}"
            path.write_text(text.replace(right, wrong))
            expected[path.name] = says
    paths = [FILES / name if says is None else tmp_path / name for name, says in expected.items()]
    command = [LAUNCH, FILES / "validate.py", *paths]
    quiet = {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    ended = run_command(list(map(str, command)), REPO, 300, **quiet)
    assert ended.codes == [1], ended.stderr
    for name, says in expected.items():
        lines = [line for line in ended.stdout.splitlines() if line.startswith(f"{name}: ")]
        faults = [line for line in lines if "FAULT" in line]
        assert lines and len(faults) == (says is not None), lines
        assert says is None or says in faults[0], faults
    good = [line for line in ended.stdout.splitlines() if line.startswith(tuple(TYPOS))]
    shown = [block.text.splitlines() for block in read(PAGE).blocks if block.language == "text"]
    assert sorted(good) in [sorted(lines) for lines in shown], "the page shows other lines"


def test_names_of_the_job_agree():
    """What no schema says: a pod that is called otherwise is never found."""
    claim, service, job = documents("job.yaml").values()
    pod = job["spec"]["template"]["spec"]
    name, (container,) = job["metadata"]["name"], pod["containers"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"] == service_of(container["args"])
    assert f"--nnodes={job['spec']['completions']}" in container["args"]
    assert job["spec"]["parallelism"] == job["spec"]["completions"], "all, or they wait for ever"
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--nproc-per-node={gpus}" in container["args"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    named = mounts["/checkpoints"]["persistentVolumeClaim"]["claimName"]
    assert named == claim["metadata"]["name"]
    patience = int(re.search(r"--shutdown-timeout=(\d+)", " ".join(container["args"]))[1])
    assert patience < pod["terminationGracePeriodSeconds"], "torchrun is killed before the ranks"


def service_of(args: list[str]) -> str:
    """Return the Service in --master-addr=JOB-0.SERVICE."""
    return re.search(r"--master-addr=ddp-0\.(\S+)", " ".join(args))[1]


def test_the_trainjob_starts_the_job_s_pods():
    """Whoever changes one file has to change the other."""
    job, train_job = documents("job.yaml")["Job"]["spec"], documents("trainjob.yaml")
    (node,) = train_job["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    runtime, trainer = node["template"]["spec"], train_job["TrainJob"]["spec"]["trainer"]
    for key in ("podReplacementPolicy", "backoffLimitPerIndex", "maxFailedIndexes",
                "podFailurePolicy"):  # fmt: skip
        assert runtime[key] == job[key]
    pod, own = job["template"]["spec"], runtime["template"]["spec"]
    assert {key: own[key] for key in own if key != "containers"} == {
        key: pod[key] for key in pod if key not in ("containers", "subdomain")
    }
    (container,), (own,) = pod["containers"], own["containers"]
    set_by_kubeflow = ("--nnodes", "--nproc-per-node", "--node-rank", "--master")
    assert trainer["args"] == [a for a in container["args"] if not a.startswith(set_by_kubeflow)]
    for key in ("command", "env"):
        assert trainer[key] == container[key]
    for key in ("image", "securityContext", "volumeMounts"):
        assert own[key] == container[key]
    assert trainer["resourcesPerNode"] == container["resources"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)


def test_the_image_has_what_its_file_copies_and_what_the_files_start():
    text = (FILES / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines[0] == "FROM debian:12-slim" and lines[-2] == "USER $RUN_AS"
    left_out = (REPO / ".dockerignore").read_text().split()
    copied = sum((line.split()[1:-1] for line in lines if line.startswith("COPY ")), [])
    for name in copied:
        assert (REPO / name).exists() and name not in left_out, name
    # What the environment is made of is there before it is made, and nothing that often changes.
    target = re.search(r"make (\S+) TORCH_BACKEND=", text)[1]
    planned = run_command(["make", "--dry-run", "--always-make", target], REPO, 60).stdout
    before = sum((line.split()[1:-1] for line in text.split("RUN UV_")[0].splitlines()
                  if line.startswith("COPY ")), [])  # fmt: skip
    assert re.search(r"--requirement (\S+)", planned)[1] in before and "." not in before
    ray = next(each for each in tomllib.loads((REPO / "pyproject.toml").read_text())["project"][
        "optional-dependencies"]["frameworks"] if each.startswith("ray"))  # fmt: skip
    for place in (text, (REPO / PAGE).read_text()):
        assert f"RAY={ray.split('==')[1]}" in place, "the version that is tested here"
    texts = "".join(path.read_text() for path in FILES.glob("*.yaml"))
    started = re.findall(r"01-ddp-basics/\S+\.(?:sh|py)", re.sub("^#.*", "", texts, flags=re.M))
    assert started and set(started) <= set(TRACKED)


# until_trained.sh, with a stand-in for torchrun


@pytest.mark.parametrize(
    ("torchrun", "evicted", "code"),
    [
        ("save 24; exit 0", False, 0),
        ("save 20; exit 0", False, 75),  # another pod was evicted
        ("save 20; exit 3", False, 3),
        ("save 24; exit 3", False, 3),  # a check failed
        ("trap 'save 20; exit 1' TERM; wait_for_it", True, 75),
        ("trap 'save 24; exit 1' TERM; wait_for_it", True, 0),
    ],
)  # fmt: skip
def test_the_exit_code_of_a_pod_says_whether_to_start_it_again(tmp_path, torchrun, evicted, code):
    (tmp_path / "torchrun").write_text(f"""#!/bin/bash
save() {{ mkdir -p "{tmp_path}/out/checkpoints/step-000000$1"; }}
wait_for_it() {{ touch "{tmp_path}/ready"; while true; do sleep 0.05; done; }}
{torchrun}
""")
    (tmp_path / "torchrun").chmod(0o755)

    def evict(pid: int) -> None:
        if evicted:
            wait_for((tmp_path / "ready").exists)
            os.kill(pid, signal.SIGTERM)

    script = FILES / "until_trained.sh"
    command = ["bash", "-c", f'PATH="{tmp_path}:$PATH" exec bash {script} x.py']
    variables = {"OUTPUT_DIR": str(tmp_path / "out"), "MAX_STEPS": "24"}
    ended = run_command(command, REPO, 60, evict, **variables)
    assert ended.codes == [code], ended.stderr
    if code == 0:  # started again, as after a node that was lost at the very end: nobody to meet
        (tmp_path / "torchrun").write_text("#!/bin/bash\nexit 9\n")
        assert run_command(command, REPO, 60, **variables).codes == [0]


# pods and machines as processes


class Node:
    """A pod or a machine: a command and its variables. Many starts, one after another."""

    def __init__(self, command: list[str], environ: dict[str, str], log: Path) -> None:
        self.command, self.environ, self.log = command, environ, log

    def start(self) -> None:
        tools = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
        environ = os.environ | {"PATH": tools, "PYTHONPATH": str(REPO)} | self.environ
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command, cwd=REPO, env=environ, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def lose(self) -> None:
        """End all its processes at once, as a machine that loses power does."""
        own = psutil.Process(self.process.pid)
        for process in [own, *own.children(recursive=True)]:
            process.kill()

    def evict(self) -> None:
        self.process.terminate()


def replaced(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


def local(folder: Path) -> dict[str, str]:
    """Return what stands here for what the cluster has: names, GPUs, volumes, a long run."""
    return {
        "ddp-0.ddp": "127.0.0.1", "ddp-node-0-0.ddp": "127.0.0.1", "29500": str(free_port()),
        "nproc-per-node=8": "nproc-per-node=1", "device=cuda": "device=cpu",
        "device cuda": "device cpu", "/checkpoints": str(folder), "100000": str(STEPS),
    }  # fmt: skip


def pods_of(name: str, folder: Path) -> tuple[list[Node], dict]:
    """Return the pods that a file starts, and the spec of the Job that looks after them."""
    kinds, changes = documents(name), local(folder)
    if name == "job.yaml":
        job = kinds["Job"]["spec"]
        (container,), count = job["template"]["spec"]["containers"], job["completions"]
        of_pod = [{"JOB_COMPLETION_INDEX": str(index)} for index in range(count)]
    else:
        (node,) = kinds["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
        job, container = node["template"]["spec"], kinds["TrainJob"]["spec"]["trainer"]
        job_name, count = kinds["TrainJob"]["metadata"]["name"], container["numNodes"]
        of_pod = [  # by Kubeflow Trainer's plugin for torch: source on the page
            {"PET_NNODES": str(count), "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(index),
             "PET_MASTER_ADDR": f"{job_name}-node-0-0.{job_name}", "PET_MASTER_PORT": "29500"}
            for index in range(count)
        ]  # fmt: skip
    pods = []
    for index, variables in enumerate(of_pod):
        environ = {each["name"]: each["value"] for each in container["env"]} | variables
        environ = {key: replaced(value, changes) for key, value in environ.items()}
        words = [*container["command"], *container["args"]]
        # As the kubelet does, before any shell: $(NAME), and only of variables that are set.
        words = [re.sub(r"\$\((\w+)\)", lambda m: environ.get(m[1], m[0]), w) for w in words]  # noqa: B023
        words = [replaced(word, changes) for word in words]
        pods.append(Node([*words, *small_words(folder)], environ, folder / f"pod-{index}.log"))
    return pods, job


def small_words(folder: Path) -> list[str]:
    """Return the flags of a small job, without the number of its steps."""
    words = [str(word) for word in small_job(folder)]
    at = words.index("--max-steps")
    assert words[at + 1] == str(STEPS)
    return words[:at] + words[at + 2 :]


def run_job(pods: list[Node], job: dict, disturb) -> tuple[list[tuple[int, int]], list[int]]:
    """Play the Job's controller; return (index, exit code) of each pod that ended, and failures.

    A failure is the index of a pod that ended so that the Job counts it.

    `disturb(pods)` returns the pods that it took away, once there is something to disturb. A node
    that is lost is missed after 40 s: its pod comes back when the others have noticed by
    themselves. One that came at once would meet them in the store that they are about to leave,
    and wait there.
    """
    rules = [rule for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "Ignore"]
    ignored = {code for rule in rules for code in rule.get("onExitCodes", {}).get("values", ())}
    disrupted_is_ignored = any("onPodConditions" in rule for rule in rules)
    ended, failures, taken, lost = [], [], None, []
    running = set(pods)
    for pod in pods:
        pod.start()
    deadline = time.monotonic() + 200
    while running:
        assert time.monotonic() < deadline, said(pods)
        time.sleep(0.05)
        taken = disturb(pods) if taken is None else taken
        for pod in [pod for pod in running if pod.process.poll() is not None and pod not in lost]:
            code = pod.process.returncode
            ended.append((pods.index(pod), code))
            if code == 0:
                running.remove(pod)
                continue
            if not (code in ignored or (disrupted_is_ignored and pod in (taken or ()))):
                failures.append(pods.index(pod))
            assert len(failures) <= job["backoffLimitPerIndex"], said(pods)
            if code == -signal.SIGKILL:
                lost.append(pod)
                continue
            for each in [*lost, pod]:
                each.start()
            lost.clear()
    return ended, failures


def said(nodes: list[Node]) -> str:
    return "\n".join(f"{node.log.name}: {node.log.read_text()}" for node in nodes)


STRAIGHT: list[Path] = []  # of this process of pytest


@pytest.fixture
def straight(run_script, tmp_path) -> Path:
    """Return the folder of a run that nothing disturbs."""
    if not STRAIGHT:
        folder = tmp_path / "straight"
        ended = run_script(
            TRAINING, *small_job(tmp_path), "--output-dir", folder, world_size=2, timeout_s=300
        )
        assert ended.codes == [0, 0], ended.stdout + ended.stderr
        STRAIGHT.append(folder)
    return STRAIGHT[0]


def after(folder: Path, steps: int, act):
    """Return a disturbance: act(pods) once a run has taken that many steps."""
    metrics = folder / "metrics.jsonl"

    def disturb(pods):
        there = metrics.exists() and len(metrics.read_text().splitlines()) >= steps
        return act(pods) if there else None

    return disturb


def evict_the_first(pods):
    pods[0].evict()
    return [pods[0]]


def lose_the_last(pods):
    pods[-1].lose()
    return [pods[-1]]


@full
def test_pods_of_the_job_resume_after_an_eviction(tmp_path, straight):
    """The pod that was told, and the other one: both have saved, neither counts as done."""
    pods, job = pods_of("job.yaml", tmp_path)
    ended, failures = run_job(pods, job, after(tmp_path / "ddp", 7, evict_the_first))
    assert not failures, said(pods)
    assert sorted(ended[:2]) == [(0, 75), (1, 75)], said(pods)
    assert sorted(ended[2:]) == [(0, 0), (1, 0)], said(pods)
    text = pods[0].log.read_text()
    assert "asked to stop, saved" in text and "resuming from" in text
    assert largest_difference(straight, tmp_path / "ddp") == 0.0


@full
def test_pods_of_the_trainjob_resume_after_a_node_is_lost(tmp_path, straight):
    pods, job = pods_of("trainjob.yaml", tmp_path)
    ended, failures = run_job(pods, job, after(tmp_path / "ddp", 7, lose_the_last))
    assert failures == [0], "of the pod that lost contact, not of the one that was lost"
    assert sorted(ended[:2]) == [(0, 1), (1, -signal.SIGKILL)], said(pods)
    assert sorted(ended[2:]) == [(0, 0), (1, 0)], said(pods)
    text = pods[0].log.read_text()
    assert "lost contact with another rank" in text and "resuming from" in text
    assert largest_difference(straight, tmp_path / "ddp") == 0.0


@full
def test_machines_of_skypilot_resume_from_the_bucket(tmp_path, straight):
    """All machines are taken away; others start, with empty disks, and run the same command."""
    task, changes = yaml.safe_load((FILES / "skypilot.yaml").read_text()), local(tmp_path)
    enter = "cd /guide\nsource .venv/bin/activate\n"
    assert task["run"].startswith(enter)
    run = replaced(task["run"].removeprefix(enter), changes).rstrip()
    bucket = tmp_path / "bucket"
    envs = task["envs"] | {"CHECKPOINTS": f"file://{bucket}", "MAX_STEPS": str(STEPS)}
    assert envs.keys() == task["envs"].keys()
    command = ["bash", "-c", " ".join([run, *small_words(tmp_path)])]
    for attempt in ("first", "second"):
        home = tmp_path / attempt
        home.mkdir()
        machines = [
            Node(command, envs | {
                "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
                "SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NUM_GPUS_PER_NODE": "1",
                "HOME": str(home),
            }, home / f"machine-{rank}.log")
            for rank in range(task["num_nodes"])
        ]  # fmt: skip
        for machine in machines:
            machine.start()
        if attempt == "first":
            wait_for((bucket / "step-00000010" / "manifest.json").exists, 120)
            for machine in machines:
                machine.lose()
        codes = [machine.process.wait(120) for machine in machines]
    assert codes == [0, 0], said(machines)
    assert re.search(rf"resuming from file://{bucket}/step-0000001", said(machines))
    losses, expected = steps_in(home / "ddp"), steps_in(straight)
    assert 11 <= min(losses) <= STEPS // 2 + 10 and max(losses) == STEPS
    assert losses == {step: expected[step] for step in losses}


POD = """
import os, socket, sys
from pathlib import Path
from dist_common import output
socket.gethostname = lambda: "ddp-0"
output.HEARTBEAT_S, output.LEASE_S = 0.2, 6.0  # longer than a start on a busy machine
output.claim(Path(sys.argv[1]), True)
print(f"pid {os.getpid()} has it", flush=True)
os.kill(os.getpid(), 9)
"""


@full
def test_a_pod_that_was_killed_does_not_keep_its_successor_out(tmp_path):
    """Both have the name ddp-0, and processes are numbered from 1 in each."""
    namespace = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if run_command([*namespace, "true"], REPO, 60).codes != [0]:
        pytest.skip("a user may not make PID namespaces here")
    code = [sys.executable, "-c", POD, str(tmp_path / "run")]
    pod = [*namespace, "sh", "-c", '"$@"; true', "sh", *code]
    first, second = (run_command(pod, REPO, 120, PYTHONPATH=str(REPO)) for _ in range(2))
    assert first.stdout == second.stdout == "pid 2 has it\n", first.stderr + second.stderr
    assert "waiting 6 s for a sign of pid 2 on ddp-0" in second.stderr


# Ray


def processes_of_ray(named: str, **variables: str) -> list[psutil.Process]:
    """Return what this test's Ray has started, by words of its command and by its environment."""
    found, variables = [], variables | {MARK: os.environ[MARK]}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environ = process.environ()
            own = all(environ.get(name) == value for name, value in variables.items())
            if own and named in " ".join(process.cmdline()):
                found.append(process)
    return found


@full
@with_ray
def test_a_script_does_not_outlive_its_worker():
    """Or it would train on, and hold the folder, while its successor starts."""
    code = f"""
import os, subprocess, sys
sys.path.insert(0, {str(FILES)!r})
import ray_job
print(subprocess.Popen(["sleep", "1000"], preexec_fn=ray_job.die_with_the_worker).pid, flush=True)
os.kill(os.getpid(), 9)
"""
    ended = run_command([str(FRAMEWORKS), "-c", code], REPO, 120)
    script = int(ended.stdout)

    def is_gone() -> bool:
        return not psutil.pid_exists(script) or psutil.Process(script).status() == "zombie"

    wait_for(is_gone)


def is_below_ray(process: psutil.Process) -> bool:
    return "RayTrainWorker" in " ".join(process.parent().cmdline())


@full
@with_ray
@pytest.mark.xdist_group("ray")  # its files are looked for on the whole machine
def test_workers_of_ray_resume_after_one_is_killed(tmp_path, straight):
    before = set(Path("/tmp").glob("ray-*"))
    folder = tmp_path / "run"

    def kill_a_worker(driver: int) -> None:
        metrics = folder / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 7, 200)
        (script,) = (each for each in processes_of_ray(TRAINING, RANK="0") if is_below_ray(each))
        script.parent().kill()

    command = [FRAMEWORKS, FILES / "ray_job.py", "--workers", 2, REPO / TRAINING]
    command += [*small_job(tmp_path), "--resume", "--output-dir", folder]
    command = list(map(str, command))
    ended = run_command(command, tmp_path, 400, kill_a_worker, PYTHONPATH=str(REPO))
    told = ended.stdout + ended.stderr
    assert ended.codes == [0], told
    assert "resuming from" in told
    assert largest_difference(straight, folder) == 0.0
    assert set(Path("/tmp").glob("ray-*")) == before, "files that Ray left"
    assert not processes_of_ray("ray::") and not processes_of_ray(TRAINING)
