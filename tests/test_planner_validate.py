"""planner/validate.py: targets reached, a band for each term of the model, files in and out."""

import csv
import sys
from dataclasses import replace

import pytest

from planner import calibrate, cli, compute, errors, published, step, validate
from planner.rates import RANGES, RATES


@pytest.fixture(scope="module")
def rows():
    """All runs, and of vTrain's single node every sixteenth: 860 rows of one kind."""
    every = published.read_all_runs()
    single = [row for row in every if errors.is_single(row)]
    return [row for row in every if not errors.is_single(row)] + single[::16]


@pytest.fixture(scope="module")
def transfers():
    return validate.compare_collectives()


@pytest.fixture(scope="module", autouse=True)
def memory_is_judged_once():
    """The memory model has its own tests: what is broken here is time."""
    found = validate.validate_memory.verdicts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validate.validate_memory, "verdicts", lambda: found)
        yield


def outside(rows, transfers) -> set[str]:
    """Return the names of targets and bands that are not kept."""
    found = validate.verdicts(validate.compare_steps(rows), transfers)
    return {name.split(":")[0] for name, value, limit in found if not value <= limit}


def test_the_targets_are_reached_on_the_half_that_nothing_was_fitted_on(transfers):
    steps = validate.compare_steps()
    found = validate.judged(steps, transfers)
    everything, single, links = found.values()
    assert everything.count >= 160 and everything.median <= 0.07 and everything.p95 <= 0.25
    assert single.count == 430 and single.mean <= 0.15
    assert links.count >= 80 and links.median <= 0.08 and links.p95 <= 0.25
    ranked, right = errors.strategy_pairs([each for each in steps if not each.fitted], True)
    assert ranked > 200 and right / ranked >= 0.90
    assert not outside([each.row for each in steps], transfers)


def test_simpler_models_and_peers_are_worse(rows):
    steps = [each for each in validate.compare_steps(rows) if not errors.is_single(each.row)]
    half = {each.row.id for each in steps if each.fitted}
    naive = errors.naive_seconds([each.row for each in steps], half)
    shown = [each for each in steps if not each.fitted]
    own = errors.errors_of([each.error for each in shown])
    simple = errors.errors_of([naive[each.row.id] / each.measured - 1 for each in shown])
    assert 2 * own.median < simple.median and 2 * own.p95 < simple.p95
    for peer in ("calculon", "llm-analysis(fe=0.5)"):
        theirs = errors.peers()[peer]
        both = [each for each in shown if each.row.id in theirs]
        ours = errors.errors_of([each.error for each in both])
        assert ours.median < errors.errors_of([theirs[each.row.id] for each in both]).median


def halved(function):
    return lambda *args, **kwargs: function(*args, **kwargs) / 2


def nothing(function):
    return lambda *args, **kwargs: 0.0


SABOTAGE = {
    # What is broken: where, how, and a band that must notice.
    "links twice as fast": (step, "seconds_of", halved, "tensor parallel"),
    "one gather a step too few": (step, "fsdp_seconds", halved, "ZeRO-3, tensor by tensor"),
    "recomputation forgotten": (
        step,
        "layers_seconds",
        lambda old: lambda job, layout, *rest: old(job, replace(layout, recompute="none"), *rest),
        "pipeline",
    ),
    "products twice as fast": (compute, "product_seconds", halved, "FSDP"),
    "no experts' all-to-all": (step, "expert_seconds", nothing, "experts"),
    "attention a fifth faster": (
        compute,
        "attention_seconds",
        lambda old: lambda *args: tuple(0.8 * part for part in old(*args)),
        "sequences of 16k and longer",
    ),
}


@pytest.mark.parametrize("case", SABOTAGE)
def test_a_term_that_is_lost_leaves_a_band(case, rows, transfers, monkeypatch):
    module, name, broken, band = SABOTAGE[case]
    monkeypatch.setattr(module, name, broken(getattr(module, name)))
    assert band in outside(rows, transfers)


def test_a_bubble_that_is_forgotten_leaves_a_band(rows, transfers, monkeypatch):
    old = step.step_parts
    monkeypatch.setattr(step, "step_parts", lambda *args: {**old(*args), "bubble": 0.0})
    assert "pipeline" in outside(rows, transfers)


def test_links_that_are_slower_leave_a_band_of_collectives(rows, monkeypatch):
    monkeypatch.setitem(RATES, "link.ring", RATES["link.ring"] * 0.8)
    assert "vtrain-a100-8" in outside(rows, validate.compare_collectives())


def test_the_halves_are_of_each_source_and_no_row_is_in_both():
    every = published.read_all_runs()
    half = published.calibration_half(every)
    for own in errors.by([errors.Compared(r, 1, 1, r.id in half) for r in every],
                         lambda row: row.stratum).values():  # fmt: skip
        fitted = sum(each.fitted for each in own)
        assert abs(2 * fitted - len(own)) <= 1
    assert half == published.calibration_half(every[::-1])


@pytest.mark.full
def test_the_table_holds_what_the_fit_of_the_links_gives():
    """The fit of the steps takes a minute and is not repeated."""
    found = calibrate.fit_links(dict(calibrate.table.PRIORS))
    for name in RANGES:
        if name.startswith(calibrate.LINKS):
            assert RATES[name] == pytest.approx(found[name], rel=0.01), name


def predict_file(tmp_path, kind: str, text: str, monkeypatch) -> list[dict]:
    """Return what validate.py writes for a file of rows."""
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    rows.write_text(text)
    arguments = ["validate.py", f"--{kind}", str(rows), "--predictions", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert validate.main() == 0
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


RUN = "R1,llama3-8b,8192,NVIDIA H100 80GB HBM3,8,8,fsdp_zero3,1,bf16,full,8"
HEADER = (
    "id,model,seq,gpu,n_gpus,gpus_per_node,sharding,micro_batch,precision,act_ckpt,global_batch"
)


def test_rows_that_are_not_in_the_repository_are_predicted(tmp_path, monkeypatch):
    lines = [HEADER, RUN, RUN.replace("R1", "R2").replace("NVIDIA H100 80GB HBM3", "H900")]
    lines += [RUN.replace("R1", "R3").replace("llama3-8b", "secret-7b")]
    lines += [RUN.replace("R1", "R4").replace("llama3-8b", "mixtral-8x7b")]
    found = predict_file(tmp_path, "rows", "\n".join(lines) + "\n", monkeypatch)
    assert tuple(found[0]) == ("id", *validate.COLUMNS["rows"][1:])
    good, gpu, model, mixture = found
    assert float(good["step_time_s"]) > 1 and not good["error"]
    tokens = 8 * 8192 / 8 / float(good["step_time_s"])
    assert float(good["tokens_per_s_per_gpu"]) == pytest.approx(tokens, rel=1e-4)
    assert 20e9 < float(good["memory_bytes_total"]) < 80e9
    assert "unknown GPU" in gpu["error"] and not gpu["step_time_s"]
    assert "no shape" in model["error"] and float(mixture["step_time_s"]) > 0


def test_a_file_with_a_mark_and_a_short_line_is_read(tmp_path, monkeypatch):
    lines = [HEADER, RUN, RUN.rpartition(",")[0], "R3,llama3-8b"]
    one, short, shorter = predict_file(tmp_path, "rows", "\ufeff" + "\n".join(lines), monkeypatch)
    assert one["step_time_s"] == short["step_time_s"] and "unknown GPU ''" in shorter["error"]
    text = "id,model,method\nA\nB,llama2-7b,lora\n"
    nothing, little = predict_file(tmp_path, "finetune", text, monkeypatch)
    assert nothing["error"] and float(little["memory_bytes"]) > 13e9
    components = "id,group,sharding,params_b,dp,quantity,unit\nA,zero|x,ZeRO-1,1,1,states,GB\nB\n"
    full, none = predict_file(tmp_path, "components", components, monkeypatch)
    assert float(full["value"]) == 16 and none["error"]


SPELLED = {  # column, two ways to say one thing
    "yes": ("act_ckpt", "True", "full"),
    "operators": ("act_ckpt", "selective op", "selective_op"),
    "stage": ("sharding", "ZeRO stage 3", "zero3"),
    "bytes of cards": ("notes", "4 x 50 GB/s a node", "network_gb_s=25"),
    "PyTorch's names": ("sharding", "FULL_SHARD", "fsdp"),
    "stored scores": ("attn", "fused softmax", "eager"),
    "a thousand": ("seq", "8k", "8192"),
    "model": ("model", "Meta-Llama-3.1-8B", "llama3-8b"),
    "GPU": ("gpu", "NVIDIA H100 (NVLink)", "H100-SXM"),
    "V100 has 16 bits": ("precision", "", "fp16", "gpu", "V100-32GB"),
}


@pytest.mark.parametrize("case", SPELLED)
def test_a_row_may_be_spelled_otherwise(case, tmp_path, monkeypatch):
    column, said, plain, *others = SPELLED[case]
    lines = []
    for name, value in (("A", said), ("B", plain)):
        row = dict(zip(HEADER.split(","), RUN.split(","), strict=True)) | {"id": name}
        row |= {"n_gpus": "64", "global_batch": "64", "notes": "", "network_gb_s": ""}
        key, _, number = value.partition("=")
        row |= {key: number} if number else {column: value}
        row |= dict([others] if others else [])
        lines.append(",".join(row.values()))
    text = "\n".join([",".join(row), *lines]) + "\n"
    one, other = predict_file(tmp_path, "rows", text, monkeypatch)
    assert {**one, "id": ""} == {**other, "id": ""} and one["step_time_s"]


def test_rows_added_later_are_read_and_teach_nothing():
    added = validate.compare_added()
    assert len(added) == len(published.read_table(published.ANCHORS / "more_runs.csv")) >= 100
    known = {row.id for row in published.read_all_runs()}
    assert not known & {each.row.id for each in added}
    for mixtures, median, p95 in ((False, 0.09, 0.25), (True, 0.25, 0.6)):
        own = [each.error for each in added if bool(each.row.job.model.experts) == mixtures]
        found = errors.errors_of(own)
        assert len(own) >= 20 and found.median <= median and found.p95 <= p95


def test_collectives_that_are_not_in_the_repository_are_predicted(tmp_path, monkeypatch):
    text = "id,collective,gpu,n_nodes,n_gpus,link_spec_GBps_unidir,size_bytes\n"
    text += "C1,all_gather,H100-SXM,1,8,450,1073741824\nC2,all_reduce,,1,8,,1024\n"
    one, two = predict_file(tmp_path, "collectives", text, monkeypatch)
    busbw = 1073741824 * 7 / 8 / float(one["time_us"]) / 1e3
    assert float(one["busbw_gb_s"]) == pytest.approx(busbw, rel=1e-4) and 250 < busbw < 450
    assert "unknown GPU" in two["error"]


def test_a_collective_may_be_spelled_otherwise(tmp_path, monkeypatch):
    plain = "A,all_gather,H100-SXM,2,16,50,1073741824"
    lines = ["id,collective,gpu,n_nodes,n_gpus,link_spec_GBps_unidir,size_bytes", plain]
    for said, spelled in (("all_gather", "AllGather"), ("1073741824", "1G"), (",2,16", ",,16"),
                          ("H100-SXM", "H100 NVLink")):  # fmt: skip
        lines.append(plain.replace(said, spelled))
    lines += [plain.replace("all_gather", "hypercube"), plain.replace(",2,16", ",1,1")]
    *alike, other, one = predict_file(tmp_path, "collectives", "\n".join(lines), monkeypatch)
    assert len({line["time_us"] for line in alike}) == 1 and float(alike[0]["time_us"]) > 0
    assert other["error"] == "unknown collective 'hypercube'" and "n_gpus" in one["error"]


FINETUNE = "A,Llama 2 7 B,lora,bnb.nf4-dq,1,1,1304,"
FINETUNE_SPELLED = {
    "method": ("lora,bnb.nf4-dq", "QLoRA,"),
    "quantization": ("bnb.nf4-dq", "4-bit double quant"),
    "model": ("Llama 2 7 B", "meta-llama/Llama-2-7b-hf"),
    "replicas": ("1,1,1304,", "8,1,1304,ZeRO-2; no gradient checkpointing"),
}


@pytest.mark.parametrize("case", FINETUNE_SPELLED)
def test_a_row_of_fine_tuning_may_be_spelled_otherwise(case, tmp_path, monkeypatch):
    lines = ["id,model,method,quant,n_gpus,micro_batch,max_seq_tokens,notes", FINETUNE]
    lines += [FINETUNE.replace(*FINETUNE_SPELLED[case]), FINETUNE + "gradient checkpointing"]
    plain, spelled, less = predict_file(tmp_path, "finetune", "\n".join(lines), monkeypatch)
    assert float(spelled["memory_bytes"]) == float(plain["memory_bytes"]) > 10e9
    assert float(less["memory_bytes"]) < 0.8 * float(plain["memory_bytes"])


@pytest.mark.parametrize("kind", ["components", "finetune"])
def test_tables_of_memory_are_predicted(kind, tmp_path, monkeypatch):
    name = {"components": "memory_components", "finetune": "finetune_memory"}[kind]
    text = (published.ANCHORS / f"{name}.csv").read_text()
    found = predict_file(tmp_path, kind, text, monkeypatch)
    column = validate.COLUMNS[kind][1]
    told = [line for line in found if not line["error"]]
    assert len(told) > 0.8 * len(found) and all(float(line[column]) > 0 for line in told)


BAD = {
    "no file": (["--rows", "nowhere.csv"], "--rows nowhere.csv: "),
    "no rows": (["--rows", "empty.csv"], "no rows"),
    "no id": (["--collectives", "other.csv"], "no column `id`"),
    "two at once": (["--rows", "a.csv", "--finetune", "b.csv"], "at a time"),
    "predictions of nothing": (["--predictions", "out.csv"], "--predictions needs --rows"),
    "no such folder": (["--rows", "good.csv", "--predictions", "no/out.csv"], "--predictions no/"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_one_line(case, tmp_path, monkeypatch):
    arguments, says = BAD[case]
    (tmp_path / "empty.csv").write_text("id,source\n")
    (tmp_path / "other.csv").write_text("name\nx\n")
    (tmp_path / "good.csv").write_text(f"{HEADER}\n{RUN}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["validate.py", *arguments])
    with pytest.raises(cli.UsageError) as raised:
        validate.main()
    assert says in str(raised.value) and "\n" not in str(raised.value)
