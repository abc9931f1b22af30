"""planner/validate.py: errors within their limits, each term needed, own tables."""

import csv
import sys

import pytest

from planner import (
    activations,
    cli,
    compute,
    errors,
    finetune,
    memory,
    published,
    step,
    validate,
)
from planner.finetune import memory_of_finetune
from planner.hardware import DATA, GPUS
from planner.published import SINGLE_NODE, read_table

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def runs():
    return published.read_runs()


def exceeded(runs):
    return {name for name, value, limit in validate.verdicts(runs) if value > limit}


def test_errors_are_within_their_limits(runs):
    assert not exceeded(runs)


def test_simpler_models_and_peers_are_worse(runs):
    steps = errors.compare_steps(run for run in runs if run.set == "shown")
    ours = errors.errors_of(row.error for row in validate.dense_steps(steps))
    for row in validate.peer_rows():
        if row["id"] == "all but vTrain single":
            for peer in ("one_mfu", "calculon", "llm_analysis"):
                median, p95 = (float(x.strip("%")) / 100 for x in row[peer].split("/"))
                assert 2 * ours.median < median and 2 * ours.p95 < p95, peer


def scaled(function, factor):
    def changed(*args, **kwargs):
        value = function(*args, **kwargs)
        if isinstance(value, tuple):
            return tuple(factor * each for each in value)
        return factor * value

    return changed


STEP = "step time, training of all weights: median"
ADAPTERS = "step time, adapters: median"
BROKEN = [
    (compute, "product_seconds", 0.7, STEP),
    (compute, "attention_seconds", 0.0, STEP),
    (compute, "memory_seconds", 0.3, STEP),
    (step, "seconds_of", 5.0, STEP),
    (activations, "logit_bytes", 0.0, "memory: p95"),
    (activations, "mlp_bytes", 0.0, "memory: median"),
    (memory, "gathered", 0.0, "memory: p95"),
    (memory, "kept_by_stage", 0.0, "memory: median"),
    (finetune, "frozen_bytes", 0.0, "memory: p95"),
]


@pytest.mark.parametrize(
    ("module", "term", "factor", "limit"), BROKEN, ids=[row[1] for row in BROKEN]
)
def test_a_term_that_is_wrong_exceeds_a_limit(
    module, term, factor, limit, runs, monkeypatch
):
    memory.weights_of_stage.cache_clear()
    monkeypatch.setattr(module, term, scaled(getattr(module, term), factor))
    dense = [run for run in runs if run.source_name != SINGLE_NODE]
    assert limit in exceeded([*dense, *runs[-3:]])


def test_a_run_out_of_memory_does_not_fit():
    for row in read_table(DATA / "finetune_memory.csv"):
        if row["memory_gib"] == "OOM":
            held = memory_of_finetune(**validate.finetune_arguments(row))
            limit = memory.memory_limit(GPUS["a100-40gb"])
            assert sum(held.values()) > limit, row["id"]


# Tables of your own

HEADER = "id,model,seq,gpu,n_gpus,sharding,micro_batch,precision,act_ckpt,global_batch"
RUN = "R1,llama3-8b,8192,NVIDIA H100 80GB HBM3,8,fsdp_zero3,1,bf16,full,8"


def predict_file(tmp_path, lines, monkeypatch):
    """Return what validate.py writes for a file of rows."""
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    rows.write_text("\ufeff" + "\n".join(lines) + "\n")
    arguments = ["validate.py", "--rows", str(rows), "--predictions", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert validate.main() == 0
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_predicted_or_say_why_not(tmp_path, monkeypatch):
    changes = {
        "same": ("llama3-8b", "meta-llama/Llama-3.1-8B"),
        "spelled": ("fsdp_zero3", "FULL_SHARD"),
        "gpu": ("NVIDIA H100 80GB HBM3", "H900"),
        "model": ("llama3-8b", "secret-model"),
        "number": ("8192", "8k"),
    }
    lines = [HEADER, RUN, *(RUN.replace(*change) for change in changes.values())]
    good, same, spelled, *bad = predict_file(tmp_path, lines, monkeypatch)
    assert tuple(good) == validate.COLUMNS and same == spelled == good
    tokens = 8192 / float(good["step_time_s"])
    assert float(good["tokens_per_s_per_gpu"]) == pytest.approx(tokens, rel=1e-4)
    assert 20e9 < float(good["memory_bytes_total"]) < 80e9 and not good["error"]
    for row, says in zip(bad, ("unknown GPU", "is unknown", "not '8k'"), strict=True):
        assert says in row["error"] and not row["step_time_s"]


BAD = {
    "no file": (["--rows", "nowhere.csv"], "--rows nowhere.csv: "),
    "no rows": (["--rows", "empty.csv"], "no rows"),
    "no id": (["--rows", "other.csv"], "no column `id`"),
    "nothing": (["--predictions", "out.csv"], "--predictions needs --rows"),
    "no folder": (
        ["--rows", "good.csv", "--predictions", "no/o.csv"],
        "--predictions no",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_one_line(case, tmp_path, monkeypatch):
    arguments, says = BAD[case]
    (tmp_path / "empty.csv").write_text("id,source\n")
    (tmp_path / "other.csv").write_text("name\nx\n")
    (tmp_path / "good.csv").write_text(f"{HEADER}\n{RUN}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["validate.py", *arguments])
    with pytest.raises(cli.CommandLineError) as raised:
        validate.main()
    assert says in str(raised.value) and "\n" not in str(raised.value)
