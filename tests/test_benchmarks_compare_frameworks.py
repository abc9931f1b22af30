"""compare_frameworks.py: ports train the same job, and a wrong port is marked."""

import json
import re
import sys
from argparse import Namespace

import pytest
from conftest import REPO, load_script, results_of, run_command

TOOL = "benchmarks/compare_frameworks.py"
BARE = [5.0 - 0.1 * step for step in range(12)]
ASKED = Namespace(world_size=2, max_steps=12)


@pytest.fixture
def tool():
    return load_script(TOOL)


def ran(losses=BARE, ranks=2, cpu_ms=10.0):
    return {
        "world_size": ranks,
        "losses": losses,
        "cpu_ms_per_step": cpu_ms,
        "outside_s": 5.0,
    }


@pytest.mark.parametrize(
    ("results", "error", "verdict"),
    [
        (ran(), None, "right"),
        (ran([loss + 9e-6 for loss in BARE]), None, "right"),
        (ran([*BARE[:11], BARE[11] + 9e-4]), None, "right"),  # rounding has grown
        (ran([loss + 2e-5 for loss in BARE]), None, "WRONG: other losses"),
        (ran([*BARE[:11], BARE[11] + 2e-3]), None, "WRONG: other losses"),
        (ran([*BARE[:11], float("nan")]), None, "WRONG: other losses"),
        (ran(ranks=1), "FAILED: x", "WRONG: 1 ranks, not 2"),
        (ran(BARE * 2), None, "WRONG: 24 steps, not 12"),
        (ran(), "FAILED: exit code 1: x", "FAILED: exit code 1: x"),
        (None, "FAILED: no end after 9 s", "FAILED: no end after 9 s"),
    ],
)
def test_a_wrong_run_is_marked(tool, results, error, verdict):
    assert tool.judge(results, error, ran(), ASKED) == verdict


@pytest.mark.parametrize(
    ("cpu_ms", "cost"),
    [
        ((13.0, 13.1, 13.2), "more"),
        ((9.0, 9.1, 9.0), "less"),
        ((9.0, 12.0, 10.0), "same"),
        ((20.0,), "?"),
    ],
)
def test_a_cost_inside_the_noise_is_not_claimed(tool, cpu_ms, cost):
    runs = {
        "bare_ddp": [(ran(), None) for _ in cpu_ms],
        "fabric_ddp": [(ran(cpu_ms=ms), None) for ms in cpu_ms],
    }
    script = tool.FOLDER / "fabric_ddp.py"
    row = tool.make_row("fabric_ddp", script, runs, {"lightning": "2.6.6"}, ASKED)
    assert row[tool.HEADERS.index("cost")] == cost


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--frameworks", "fabric_dpp"), "did you mean fabric_ddp?"),
        (("--frameworks", "thunder_ddp"), "has no lightning-thunder"),
        (("--python", "/bin/false"), "--python /bin/false does not run"),
    ],
)
def test_wrong_usage_is_one_line(tool, monkeypatch, flags, says):
    monkeypatch.setattr(sys, "argv", [TOOL, "--python", sys.executable, *flags])
    with pytest.raises(tool.UsageError, match=re.escape(says)):
        tool.main()


def test_lines_of_code_leave_out_comments_docstrings_and_imports(tool):
    source = '"""Doc."""\n\nimport a\nfrom b import (\n    c,\n)\n\n# text\nx = 1\n'
    assert (
        tool.count_code_lines(source + "def f():\n    '''Doc.'''\n    return x\n") == 3
    )


def test_the_plain_loops_train_as_the_template_does(run_script, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(REPO / "benchmarks" / "frameworks")
    small = ("--max-steps", "12", "--seq-len", "32", "--micro-batch-size", "4")
    small += ("--device", "cpu")
    losses = []
    for name in ("bare_ddp", "bare_fsdp2"):
        folder = tmp_path / name
        path = f"benchmarks/frameworks/{name}.py"
        script = load_script(path)
        script.main = lambda job=script.job, train=script.train: train(
            job.parse_args("One job.")
        )
        ended = run_script(path, *small, "--output-dir", folder, world_size=2)
        assert ended.codes == [0, 0], ended.stderr
        losses.append(results_of(folder)["losses"])
    folder = tmp_path / "template"
    flags = (*small, "--log-every", "1", "--save-every", "0", "--eval-every", "0")
    ended = run_script(
        "01-ddp-basics/ddp_training.py",
        *(*flags, "--no-self-check", "--output-dir", folder),
        world_size=2,
    )
    assert ended.codes == [0, 0], ended.stderr
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    template = [json.loads(line)["loss"] for line in lines]
    assert losses[0] == pytest.approx(template, abs=1e-5)
    assert losses[1] == pytest.approx(template, abs=1e-5)


def test_a_run_that_fails_says_why(tool, tmp_path):
    port = tmp_path / "broken.py"
    port.write_text('"""A port.\n\n    CPU   python broken.py\n"""\n1 / 0\n')
    args = Namespace(**vars(ASKED), python=sys.executable, limit=60.0)
    vars(args).update(preset="tiny", seq_len=64, micro_batch_size=8, seed=0)
    args.device = "cpu"
    results, error = tool.run_port(port, args, tmp_path / "out")
    assert results is None
    assert error == "FAILED: exit code 1: ZeroDivisionError: division by zero"
    port.write_text(port.read_text().replace("1 / 0", "import time; time.sleep(99)"))
    args.limit = 1.0
    assert tool.run_port(port, args, tmp_path / "out")[1].startswith("FAILED: no end")


def test_frameworks_train_the_same_job():
    python = REPO / ".venv-frameworks/bin/python"
    if not python.exists():
        pytest.skip("make frameworks makes .venv-frameworks")
    ports = ("fabric_ddp", "accelerate_ddp", "deepspeed_engine", "lightning_fsdp2")
    words = ["python", TOOL, "--python", str(python), "--frameworks", *ports]
    words += ["--repeats", "1", "--max-steps", "3", "--seq-len", "16"]
    ended = run_command(words, REPO, 900)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert ended.stdout.count(" right") == 6


def test_megatron_knows_each_flag_of_the_page():
    page = (REPO / "benchmarks/frameworks.md").read_text()
    command = re.search(r"torchrun .*pretrain_gpt\.py((?:.*\\\n)*.*)", page)[1]
    recorded = json.loads(
        (REPO / "benchmarks/recorded/megatron_arguments.json").read_text()
    )
    known = set(re.findall(r"--[a-z0-9-]+", json.dumps(recorded)))
    flags = set(re.findall(r"--[a-z0-9-]+", command))
    assert len(flags) > 30 and flags <= known
