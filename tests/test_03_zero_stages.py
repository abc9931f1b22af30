"""zero_stages.py: in each stage the losses of one process, and no more held or sent than said."""

import sys
from pathlib import Path

import pytest
from conftest import GPUS, REPO, free_port, results_of, run_command
from helpers_03 import SMALL, deepspeed_in_the_parent, on_small, small

STAGES = "03-deepspeed/zero_stages.py"
QUICK = (*SMALL, "--max-steps", 2)
WIDTHS = {"bf16-mixed": 2, "32-true": 4}


@pytest.fixture(scope="module", autouse=True)
def imported():
    with deepspeed_in_the_parent():
        yield


def failed_checks(folder: Path) -> list[str]:
    return [check["name"] for check in results_of(folder)["checks"] if not check["ok"]]


def test_every_stage_trains_as_one_process_and_holds_and_sends_what_the_paper_says(
    run_script, tmp_path
):
    world_size, accumulate = 2, 2
    ended = run_script(
        STAGES, *QUICK, "--grad-accum-steps", accumulate, "--output-dir", tmp_path / "run",
        world_size=world_size, before=small,
    )  # fmt: skip
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    assert ended.stderr == ""
    results = results_of(tmp_path / "run")
    assert len(results["checks"]) == 5 * (3 + 2 + 1)
    m, N, metrics = accumulate, world_size, results["metrics"]
    gradients = 2 if m > 1 else 2 / N  # of stage 1, in mid-step
    held = (16, 2 + gradients + 12 / N, 2 + 14 / N, 16 / N)
    for name, right in zip(("stage 0", "stage 1", "stage 2", "stage 3"), held, strict=True):
        assert metrics[f"bytes_per_weight_{name}"] == pytest.approx(right, rel=0.02), name
    assert metrics["bytes_per_weight_FSDP"] == pytest.approx(16 / N, rel=0.02)
    for precision, width in WIDTHS.items():
        sent = (2, 2, m + 1, 3 * m)
        for stage, models in enumerate(sent):
            measured = metrics[f"bytes_sent_per_weight_stage {stage}_{precision}"]
            assert measured == pytest.approx(models * width * (N - 1) / N, rel=0.02), stage
        # It gathers in the precision of the weights, and reduces in float32.
        right = m * (2 * width + 4) * (N - 1) / N
        measured = metrics[f"bytes_sent_per_weight_FSDP_{precision}"]
        assert measured == pytest.approx(right, rel=0.02)


@pytest.mark.full
def test_deepspeed_s_default_reduction_sends_twice_as_much(run_script, tmp_path):
    """On 3 ranks and for 2 micro-batches, the numbers in README.md and sharding_strategies.md."""
    ended = run_script(
        STAGES, *QUICK, "--all-reduce-buckets", "--stages", 1, 2, "--output-dir", tmp_path / "run",
        world_size=3, before=small,
    )  # fmt: skip
    metrics = results_of(tmp_path / "run")["metrics"]
    for stage, sent in ((1, 6), (2, 10)):
        for precision, width in WIDTHS.items():
            measured = metrics[f"bytes_sent_per_weight_stage {stage}_{precision}"]
            assert measured == pytest.approx(sent * width / 2 * 2 / 3, rel=0.02), ended.stdout


def only(name):
    """Return what leaves the other rows out: a sabotage is of one."""

    def before(script):
        ways_of = script.ways_of
        script.ways_of = lambda *args: {name: ways_of(*args)[name]}

    return before


def one_weight_off(script):
    start = script.start_engine

    def broken(model, config):
        model.blocks[1].up.weight.data[:8] += 0.01
        return start(model, config)

    script.start_engine = broken


def on_the_config(change):
    """Return a sabotage that changes what config_of returns."""

    def sabotage(script):
        made = script.config_of

        def broken(*args):
            config = made(*args)
            change(config)
            return config

        script.config_of = broken

    return sabotage


def one_stage_less(config):
    config["zero_optimization"]["stage"] -= 1


def leave_the_root_whole(script):
    """FSDP2's default: embedding, norm and head are gathered once instead of twice."""
    shard = sys.modules["deepspeed_parts.zero_stages"].fully_shard

    def broken(module, reshard_after_forward, **options):
        return shard(module, **options)

    sys.modules["deepspeed_parts.zero_stages"].fully_shard = broken


SENT = [f"{precision}: bytes sent" for precision in ("32-true", "bf16-mixed")]
LOSS = "largest error of a loss"


@pytest.mark.full
@pytest.mark.parametrize(
    ("sabotage", "name", "failing"),
    [
        (on_the_config(one_stage_less), "stage 2", ["gradients", *SENT]),
        (one_weight_off, "stage 2", [LOSS]),
    ]
    + [
        pytest.param(*case, marks=pytest.mark.full)
        for case in (
            (on_the_config(one_stage_less), "stage 1", ["optimizer state"]),
            (on_the_config(one_stage_less), "stage 3", ["weights", *SENT]),
            (leave_the_root_whole, "FSDP", SENT),
        )
    ],
)  # fmt: skip
def test_sabotage_of_a_stage_fails_a_check(run_script, tmp_path, sabotage, name, failing):
    """Among them DeepSpeed's defaults: without a key it sends more or less, or clips at 1."""

    def change(script):
        only(name)(script)
        sabotage(script)

    ended = run_script(
        STAGES, *SMALL, "--output-dir", tmp_path / "run", world_size=2, before=on_small(change),
        end_job_on_failure=False,
    )  # fmt: skip
    assert ended.codes == [1, 1], ended.stdout + ended.stderr
    right = [f"{name}, {what}" if "sent" in what else f"{name}: {what}" for what in failing]
    assert failed_checks(tmp_path / "run") == right


@pytest.mark.skipif(not GPUS, reason="no GPU on this machine")
def test_zero_stages_on_a_gpu(tmp_path):
    """One rank and NCCL: nothing to shard, and the same losses as one process."""
    ended = run_command(
        ["deepspeed", "--num_gpus=1", f"--master_port={free_port()}",
         str(REPO / STAGES), "--output-dir", "run"],
        tmp_path, 300, CUDA_VISIBLE_DEVICES=GPUS.split(",")[0],
    )  # fmt: skip
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert results_of(tmp_path / "run")["device"] == "cuda"
