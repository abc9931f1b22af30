"""Student machines: what is installed, what the doctor says, the Dockerfile."""

import fnmatch
import json
import os
import re
import shutil
import socket
import sys

import pages
import pytest
from conftest import REPO, load_script, run_command

sys.path.insert(0, str(REPO / "labs"))

full = pytest.mark.full
doctor = load_script("labs/doctor.py")


def pins(path: str) -> dict[str, str]:
    return dict(
        re.findall(r"^([\w-]+)==(\S+?)(?:;.*)?$", (REPO / path).read_text(), re.M)
    )


# what is installed


def test_the_requirements_agree():
    labs, whole = pins("labs/requirements.txt"), pins("requirements.txt")
    assert (
        "-r labs/requirements.txt"
        in (REPO / "requirements.txt").read_text().splitlines()
    )
    assert not set(labs) & set(whole), "pinned twice"
    assert not {"deepspeed", "transformers", "torchao"} & set(labs)
    text = (REPO / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)[1]
    assert set(re.findall(r'"([\w-]+)', needed)) - {"numpy"} <= set(labs)
    assert "-e ." in (REPO / "labs/requirements.txt").read_text().splitlines()


def test_make_labs_takes_the_cpu_build_where_nothing_else_was_asked_for(tmp_path):
    copy = pages.copy_repository(tmp_path / "repository")

    def plan(*words: str) -> str:
        return run_command(["make", "--dry-run", *words], copy, 60).stdout

    needed = "--requirement labs/requirements.txt"
    assert re.search(rf"--torch-backend=cpu +{needed}", plan("labs"))
    assert "--torch-backend" not in plan("labs", "TORCH_BACKEND=")
    assert "--torch-backend" not in plan("quickstart")
    (copy / ".venv").mkdir()
    (copy / ".venv/.torch_backend").write_text("\n")  # of make quickstart, with CUDA
    assert needed in plan("labs") and "--torch-backend" not in plan("labs")
    for stamp in (".installed", ".installed-labs"):
        (copy / ".venv" / stamp).write_text("")
    assert "pip install" not in plan("labs") + plan("quickstart")
    later = (copy / ".venv/.installed").stat().st_mtime + 10
    os.utime(copy / "labs/requirements.txt", (later, later))
    assert "pip install" in plan("labs") and "pip install" in plan("quickstart")


# the doctor


def examine(*command: str, **environ: str) -> tuple[int, dict[str, str], str]:
    """Run the doctor; return its exit code, what it says of each matter, and its last
    line.
    """
    ended = run_command(
        [*command, "labs/doctor.py"], REPO, 60, PYTHONPATH=str(REPO), **environ
    )
    assert not ended.stderr, ended.stderr
    *lines, last = ended.stdout.splitlines()
    assert [line[:14].strip() for line in lines] == [
        check.__name__.replace("_", " ") for check in doctor.CHECKS
    ]
    return ended.codes[0], {line[:14].strip(): line[15:] for line in lines}, last


def test_the_doctor_finds_nothing_missing_here():
    code, said, last = examine(sys.executable)
    assert all(text.startswith("ok: ") for text in said.values()), said
    assert (code, last) == (0, "Nothing is missing.")


def test_the_doctor_runs_on_a_python_with_nothing_installed():
    code, said, last = examine(sys.executable, "-S")
    assert code == 1
    assert (
        "no torch, no scikit-learn" in said["packages"]
        and "make labs" in said["packages"]
    )
    assert said["loopback"].startswith("not tried, No module named 'torch'")
    assert last == "3 of 9 need something"


@full
def test_the_doctor_names_a_loopback_that_is_down():
    alone = ["unshare", "--net"]
    if run_command([*alone, "true"], REPO, 60).codes != [0]:
        pytest.skip("this machine allows no network namespace")
    code, said, last = examine(*alone, sys.executable)
    assert (code, last) == (1, "2 of 9 need something")
    assert said["ports"].startswith("0 of 16 ports answer, then: [Errno 101]")
    assert "ip address show lo" in said["loopback"]


def pin_another(folder, monkeypatch):
    file = folder / "labs/requirements.txt"
    file.write_text(file.read_text() + "nothing-like-it==1.0\n")


def want_a_later_torch(folder, monkeypatch):
    file = folder / "pyproject.toml"
    file.write_text(file.read_text().replace("torch>=2.11", "torch>=99.1"))


def block_ports(folder, monkeypatch):
    def raise_permission_error(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", raise_permission_error)


def limit_the_container(folder, monkeypatch):
    (folder / "memory.max").write_text(f"{2**29}\n")
    monkeypatch.setattr(
        doctor, "limits_of_the_container", lambda: [folder / "memory.max"]
    )


def put_a_file_in_the_way(folder, monkeypatch):
    (folder / "runs").write_text("")


def fill_shared_memory(folder, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(doctor, "write_to", full)


def take_fork_away(folder, monkeypatch):
    monkeypatch.setattr(
        doctor.multiprocessing, "get_all_start_methods", lambda: ["spawn"]
    )


LACKS = [
    (pin_another, "packages", "no nothing-like-it: type make labs"),
    (want_a_later_torch, "packages", "is older than 99.1: type make labs"),
    (limit_the_container, "memory", "0.5 GiB, the container's limit: 1 GiB is needed"),
    (
        fill_shared_memory,
        "shared_memory",
        "No space left on device: start a container with",
    ),
    (put_a_file_in_the_way, "disk", "File exists"),
    (take_fork_away, "start_method", "cannot fork: on Windows use WSL"),
    (block_ports, "ports", "0 of 16 ports answer, then: [Errno 13] Permission denied"),
]


@pytest.mark.parametrize(
    ("breaks", "check", "says"), LACKS, ids=[row[0].__name__ for row in LACKS]
)
def test_the_doctor_names_what_is_missing(breaks, check, says, tmp_path, monkeypatch):
    for name in (
        "labs/requirements.txt",
        "pyproject.toml",
        "dist_common/__init__.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    monkeypatch.setattr(doctor, "REPO", tmp_path)
    spec = type("Spec", (), {"origin": str(tmp_path / "dist_common/__init__.py")})
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _: spec)
    getattr(doctor, check)()  # nothing is missing yet
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    breaks(tmp_path, monkeypatch)
    with pytest.raises(doctor.Lack, match=re.escape(says)):
        getattr(doctor, check)()


# the page and the container


def test_the_container_gets_what_its_file_copies():
    text = (REPO / "labs/Dockerfile").read_text().replace("\\\n", " ")
    left_out = (REPO / ".dockerignore").read_text().split()
    for path in pages.TRACKED:
        tops = {path, path.split("/")[0]}
        assert not any(fnmatch.fnmatch(top, one) for top in tops for one in left_out), (
            path
        )
    target = re.search(r"^RUN make (\S+) TORCH_BACKEND=", text, re.M)[1]
    assert "\nCOPY . .\n" in text.split("RUN make")[0]
    planned = run_command(["make", "--dry-run", "--always-make", target], REPO, 60)
    assert "--requirement labs/requirements.txt" in planned.stdout, planned.stderr
    assert json.loads(text.split("\nCMD ")[1])[-1].startswith("python labs/doctor.py")
