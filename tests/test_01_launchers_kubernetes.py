"""Launch files for Kubernetes and SkyPilot: their names and numbers agree; no cluster is needed."""

from __future__ import annotations

import os
import re
import signal

import pytest
import yaml
from conftest import REPO, run_command
from helpers_01 import wait_for
from page_reader import TRACKED

FILES = REPO / "01-ddp-basics" / "launch_files"
PAGE = "01-ddp-basics/launchers_kubernetes.md"
STEPS = 24
full = pytest.mark.full


def documents(name: str) -> dict[str, dict]:
    """Return the documents of a file by their kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((FILES / name).read_text())}


# names and numbers that occur in several places


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
    texts = "".join(path.read_text() for path in FILES.glob("*.yaml"))
    started = re.findall(r"01-ddp-basics/\S+\.(?:sh|py)", re.sub("^#.*", "", texts, flags=re.M))
    assert started and set(started) <= set(TRACKED)


# until_trained.sh, with a stand-in for torchrun


@pytest.mark.parametrize(
    ("torchrun", "evicted", "code"),
    [
        ("save 24; exit 0", False, 0),
        ("save 20; exit 0", False, 75),  # another pod was evicted
        ("save 24; exit 3", False, 3),  # a check failed
        ("trap 'save 20; exit 1' TERM; wait_for_it", True, 75),
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
