"""report of folders that templates wrote by themselves, on a cluster where no sweep ran."""

import json

import pytest
from helpers_benchmarks import bench  # noqa: F401
from helpers_templates import small_model

from bench import bare
from bench.analysis import analyse

# pytest passes fixtures by name.
# ruff: noqa: F811
DDP, FSDP = "01-ddp-basics/ddp_training.py", "02-fsdp/fsdp_transformer.py"
DEEPSPEED = "03-deepspeed/deepspeed_train.py"
ARGS = {
    "preset": "tiny", "precision": "32-true", "seq_len": 32, "global_batch_size": 16,
    "max_steps": 8, "seed": 0, "lr": 2e-3, "warmup_steps": 2, "micro_batch_size": 8,
    "text_file": None, "output_dir": "x", "log_every": 1,
}  # fmt: skip
OF_SCRIPT = {
    DDP: {"self_check": False, "compile": False},
    FSDP: {"sharding": "full", "shard_group_size": None, "activation_checkpointing": "none",
           "self_check": False, "keep": 2, "compile": False},
    DEEPSPEED: {"deepspeed_config": "03-deepspeed/configs/zero1_config.json", "parity_steps": 0,
                "grad_accum_steps": 1},
}  # fmt: skip


def results_of(script, ranks=2, argv=(), loss=3.0, ms=2.0, **args):
    """Return what a template would have written, which was given `argv`."""
    metrics = {"final_loss": loss, "step_time_ms": ms, "step_times_ms": [ms] * 8}
    metrics |= {"tokens_per_step": 512, "peak_memory_gib": 0.1}
    return {
        "script": script, "args": ARGS | OF_SCRIPT[script] | args, "argv": list(argv),
        "started": "2026-11-26T10:00:00+00:00", "seconds": 3.0, "world_size": ranks,
        "device": "cpu", "backend": "gloo", "launcher": "torchrun", "versions": {"torch": "2.14"},
        "machine": {"cores": 2}, "metrics": metrics, "checks": [],
    }  # fmt: skip


@pytest.fixture
def cluster(tmp_path):
    """Return what adds a folder to those copied together, and the folder of all."""

    def add(name, *words, **options):
        path = tmp_path / name
        path.mkdir(parents=True)
        (path / "results.json").write_text(json.dumps(results_of(*words, **options)))
        steps = [{"step": step, "loss": 5.0, "grad_norm": 7.0} for step in range(1, 6)]
        (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))

    return add, tmp_path


def named(folder):
    return {record["id"][len(str(folder)) + 1 :]: record["point"]["strategy"]
            for record in bare.gather(folder).records}  # fmt: skip


def test_runs_of_templates_are_compared_as_a_sweep_s_points_are(cluster, bench, capsys):
    add, folder = cluster
    for number, ms in ((1, 2.0), (2, 2.1), (3, 1.9)):
        add(f"node1/one-{number}", DDP, ranks=1, ms=2 * ms)
        add(f"ddp-{number}", DDP, ms=ms)
        add(f"sharded-{number}", FSDP, ms=1.5 * ms)
    add("groups-1", FSDP, argv=("--shard-group-size", "4"), shard_group_size=4, loss=3.1)
    assert bench("report", folder) == 1
    printed = capsys.readouterr().out
    assert "10 points; started 2026-11-26 10:00" in printed
    assert "tiny, 32-true, 2 ranks, global batch 16 x 32 tokens, 8 steps" in printed
    assert "fastest beyond the noise: ddp" in printed and "±0%" in printed, "paired by number"
    assert "fsdp-full --shard-group-size 4: WRONG: loss +0.1 from one process, 0.00" in printed
    assert (folder / "report.html").exists() and bench("report", folder) == 1


def test_a_run_is_named_by_its_script_and_flags(cluster):
    add, folder = cluster
    zero2 = "/other/03-deepspeed/configs/zero2_config.json"
    add("a", DDP, ranks=1)
    add("b", DDP, argv=("--lr", "2e-3", "--seq-len=32", "--no-self-check"))
    add("c", FSDP, argv=("--self-check", "--keep", "3"), self_check=True, keep=3)
    add("d", FSDP, argv=("--sharding", "grad-op", "--compile"), sharding="grad-op", compile=True)
    add("e", FSDP, argv=("--activation-checkpointing", "full"), activation_checkpointing="full")
    accumulated = ("--deepspeed_config", zero2, "--grad-accum-steps", "2", "--parity-steps", "0")
    add("f", DEEPSPEED, argv=accumulated, deepspeed_config=zero2, grad_accum_steps=2)
    add("eight-11", FSDP, argv=("--sharding", "hybrid"), sharding="hybrid", shard_group_size=8)
    names = ("single", "ddp", "fsdp-full", "fsdp-grad-op compile", "fsdp-checkpointing", "zero-2")
    assert named(folder) == dict(zip("abcdef", names, strict=True)) | {"eight-11": "eight"}


def test_jobs_that_differ_are_not_compared(cluster):
    add, folder = cluster
    add("a", FSDP)
    add("b", FSDP, lr=1e-3)
    add("e", FSDP, argv=("--text-file", "corpus"), text_file="corpus")
    models = [group[0].group.preset for group in analyse(bare.gather(folder)).groups]
    assert sorted(models) == ["tiny", "tiny", "tiny, --text-file corpus"]


def test_what_is_damaged_or_no_training_is_named_and_left_out(cluster, bench, capsys):
    add, folder = cluster
    assert f"holds no sweep: there is no {folder}/sweep.json, and no results" in bench(
        "report", folder
    )
    add("whole", DDP)
    other = {"args": {}, "world_size": 2}
    damaged = {"half": '{"script"', "other": json.dumps(other)}
    for name, text in damaged.items():
        (folder / name).mkdir()
        (folder / name / "results.json").write_text(text)
    failed = results_of(DDP) | {"checks": [{"name": "equal weights", "ok": False}]}
    (folder / "failed").mkdir()
    (folder / "failed" / "results.json").write_text(json.dumps(failed))
    assert bench("report", folder) == 0
    printed = capsys.readouterr().out
    assert f"warning: {folder}/half/results.json is damaged, or of no training: left" in printed
    assert f"{folder}/other/results.json is damaged, or of no training ('metrics'): l" in printed
    assert "its own check failed: equal weights (1 of 2 repeats)" in printed
    (folder / "whole" / "results.json").unlink()
    (folder / "failed" / "results.json").unlink()
    assert "none of its 2 results.json is of a training" in bench("report", folder)


def test_what_was_given_is_in_results_json(run_script, tmp_path):
    flags = ("--max-steps", 2, "--seq-len", 16, "--save-every", 0, "--output-dir", tmp_path / "out")
    ended = run_script(DDP, *flags, "--no-self-check", world_size=1, before=small_model())
    assert ended.codes == [0], ended.stderr
    (record,) = bare.gather(tmp_path).records
    assert record["point"]["strategy"] == "single" and record["losses"]
    assert record["results"]["argv"][:2] == ["--max-steps", "2"]
