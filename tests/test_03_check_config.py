"""Module 03: check_config.py says in one line each what is wrong, for whom, and what it costs."""

import json
import os
import re
import shutil
import sys

import pytest
import torch
from conftest import REPO, fork_ranks, load_script
from helpers_03 import (
    CONFIGS,
    FROM_THE_TRAINER_S_PAGE,
    MISREAD,
    changed,
    deepspeed_in_the_parent,
    places,
    write_config,
)

from deepspeed_parts import config_rules, setup
from dist_common import cli
from dist_common.cli import UsageError

CHECK = "03-deepspeed/check_config.py"
WRONG, SCRIPT, MACHINE, HINT = (
    "wrong for DeepSpeed", "not in deepspeed_train.py", "machine", "hint"
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def imported():
    with deepspeed_in_the_parent():
        yield


@pytest.fixture
def check(tmp_path):
    """Run the tool in a fork, on files or on one config; return its code and lines."""

    def run(config, *argv, before=lambda: None):
        files = config
        if not isinstance(config, list):
            files = [tmp_path / "own.json"]
            write_config(files[0], config)
        script = load_script(CHECK)

        def body(rank):
            sys.argv = [CHECK, *map(str, files), *map(str, argv), "--device", "cpu"]
            before()
            cli.run(script.main)

        ended = fork_ranks(body, 1, tmp_path / "rank", 60, True)
        shutil.rmtree(tmp_path / "rank")
        return ended.codes[0], ended.stdout.splitlines(), ended.stderr.splitlines()

    return run


def enough_compilers():
    """Have every op look compilable, whatever this machine lacks."""
    setup.missing_for = lambda op: None


def test_the_shipped_configs_have_no_findings(check):
    code, lines, errors = check(CONFIGS, before=enough_compilers)
    assert (code, errors) == (0, [])
    assert sum(": OK" in line for line in lines) == len(CONFIGS)
    said = {line.split(": ", 2)[2].partition(". Cost")[0] for line in lines if ": hint: " in line}
    assert said == {"no communication_data_type and no data_types.grad_accum_dtype"}


@pytest.mark.parametrize("name", FROM_THE_TRAINER_S_PAGE)
def test_hugging_face_s_examples_have_no_findings(check, name):
    code, lines, _ = check(FROM_THE_TRAINER_S_PAGE[name], before=enough_compilers)
    assert code == 0, lines


# What a run refuses for the config alone, and who refuses it.
OURS = {"must be Adam or AdamW": SCRIPT, "no optimizer": SCRIPT, "cannot fill in": SCRIPT,
        "this script": SCRIPT, "gradient_allreduce_op": SCRIPT, "autotp_size": SCRIPT}  # fmt: skip


def test_what_a_run_refuses_is_a_finding(check, tmp_path):
    cases = [case for case in MISREAD if case[0] is not None and not case[1]]
    assert len(cases) > 20
    files = []
    for number, (config, _, _) in enumerate(cases):
        files.append(tmp_path / f"{number}.json")
        write_config(files[-1], config)
    code, lines, _ = check(files, before=enough_compilers)
    assert code == 1
    for path, (_, _, says) in zip(files, cases, strict=True):
        own = [line for line in lines if line.startswith(f"{path}: ")]
        kind = next((kind for part, kind in OURS.items() if part in says), WRONG)
        found = [line for line in own if f": {kind}: " in line and says in line]
        assert len(found) == 1 and "Cost: " in found[0], (says, own)


def misread_values(rank, world_size, folder):
    """Put values of other types at each place of a config; return what is said of them."""
    setup.prepare(torch.device("cpu"))
    script = load_script(CHECK)
    disk = {"device": "nvme", "nvme_path": str(folder), "buffer_size": 5}
    whole = changed(
        aio={"block_size": 1}, tensor_parallel={"autotp_size": 1}, torch_autocast={},
        data_types={"grad_accum_dtype": "fp32"}, communication_data_type="fp32",
        activation_checkpointing={"partition_activations": False}, fp16={"loss_scale": 0},
        checkpoint={"load_universal": False}, train_batch_size=4, gradient_allreduce_op="mean",
        scheduler=FROM_THE_TRAINER_S_PAGE["zero2"]["scheduler"],
        zero_optimization={"stage": 3, "offload_optimizer": disk, "offload_param": disk},
    )  # fmt: skip
    said = []
    for *above, name in places(whole):
        for value in (None, "x", "2", "auto", [1], {"a": 1}, True, -1, 2.5):
            config = json.loads(json.dumps(whole))
            part = config
            for section in above:
                part = part[section]
            part[name] = value
            (folder / "own.json").write_text(json.dumps(config))
            try:
                texts = [finding.text for finding in script.findings_of(folder / "own.json")]
            except Exception as error:
                texts = [f"error: {error!r}"]
            said.append([".".join((*above, name)), value, texts])
    return said


@pytest.mark.full
def test_no_value_of_another_type_is_an_error_of_the_tool(on_ranks, tmp_path):
    """Nor is a finding what Python says of a type, or there twice."""
    [said] = on_ranks(misread_values, 1, tmp_path)
    assert len(said) > 400
    for place, value, texts in said:
        for text in texts:
            assert not text.startswith("error: "), (place, value, text)
            assert "object has no attribute" not in text and "\n" not in text, (place, value, text)
        assert len(set(texts)) == len(texts), (place, value, texts)


def misspell_every_key(rank, world_size, folder):
    """Return the keys that may be misspelt without the right one being named."""
    setup.prepare(torch.device("cpu"))
    unnoticed, tried = [], 0
    for path in CONFIGS:
        for *above, name in places(json.loads(path.read_text())):
            config = json.loads(path.read_text())
            part = config
            for section in above:
                part = part[section]
            part[name[:-1] + "q" + name[-1]] = part.pop(name)
            (folder / "wrong.json").write_text(json.dumps(config))
            tried += 1
            try:
                config_rules.read_right(folder / "wrong.json")
                unnoticed.append((path.name, name))
            except UsageError as error:
                if f"did you mean {name}?" not in str(error):
                    unnoticed.append((path.name, name, str(error)))
    return tried, unnoticed


def test_every_key_of_every_config_is_known_and_a_misspelt_one_is_not(on_ranks, tmp_path):
    """Unknown sections DeepSpeed passes over, and unknown keys too where the value is "auto"."""
    [(tried, unnoticed)] = on_ranks(misspell_every_key, 1, tmp_path)
    assert tried > 100 and unnoticed == []


def test_the_guide_explains_every_key():
    guide = (REPO / "03-deepspeed/check_config.md").read_text()
    table = guide.split("## The config, key by key")[1].split("\n## ")[0]
    explained = set(re.findall(r"`(\w+)`", table))
    used = [json.loads(path.read_text()) for path in CONFIGS]
    for config in (*used, *FROM_THE_TRAINER_S_PAGE.values()):
        names = {place[-1] for place in places(config)}
        assert names <= explained, names - explained


def test_three_kinds_are_kept_apart_and_all_are_told(check):
    config = changed(
        zero_optimisation={}, train_batch_size=30, train_micro_batch_size_per_gpu=4,
        gradient_accumulation_steps=2, amp={"enabled": True},
        zero_optimization={"overlap_com": True, "reduce_bucket_size": -1},
        optimizer={"type": "Lion", "params": {"lr": "1e-3"}}, fp16={"enabled": True},
    )  # fmt: skip

    def no_float16():
        from deepspeed.accelerator import get_accelerator

        type(get_accelerator()).is_fp16_supported = lambda self: False

    code, lines, _ = check(config, before=no_float16)
    kinds = [line.split(": ")[1] for line in lines]
    assert code == 1 and kinds == sorted(kinds, key=[WRONG, SCRIPT, MACHINE, HINT].index)
    for kind, says in ((WRONG, "zero_optimisation"), (WRONG, "overlap_com:"), (WRONG, "Apex AMP"),
                       (WRONG, "reduce_bucket_size"), (WRONG, "on any number of ranks"),
                       (WRONG, '"1e-3"'), (SCRIPT, '"Lion"'), (MACHINE, "float16")):  # fmt: skip
        assert sum(f": {kind}: " in line and says in line for line in lines) == 1, (says, lines)


def test_batch_sizes_are_multiplied_with_the_world_size(check):
    config = changed(train_batch_size=32, train_micro_batch_size_per_gpu=4,
                     gradient_accumulation_steps=2)  # fmt: skip
    assert check(config, "--world-size", 4)[0] == 0
    assert check(config)[0] == 0, "4 ranks would do"
    code, lines, _ = check(config, "--world-size", 8)
    assert code == 1 and "x 8 ranks = 64" in lines[0]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (changed(zero_optimization={"stage": 3, "stage3_max_live_parameters": 0}), "no prefetch"),
        (changed(zero_optimization={"offload_optimizer": {"device": "cpu"}}), "torch_adam with"),
        (
            changed(
                zero_optimization={
                    "stage": 3,
                    "offload_param": {"device": "nvme", "nvme_path": "."},
                }
            ),
            "without stage3_max_reuse_distance 0",
        ),
        (changed(zero_optimization={"overlap_comm": False}), "no overlap_comm"),
        ({**changed(), "zero_optimization": {"stage": 2}}, "no reduce_bucket_size"),
        ({**changed(), "zero_optimization": {"stage": 1}}, "no use_multi_rank_bucket_allreduce"),
        ({**changed(), "zero_optimization": {"stage": 3}}, "no stage3_gather_16bit_weights"),
        ({k: v for k, v in changed().items() if k != "gradient_clipping"}, "at a norm of 1"),
        (changed(bf16={"enabled": True}, zero_optimization={"stage": 0}), "bf16 in stage 0"),
        (changed(scheduler={"type": "WarmupLR", "params": {}}), "no scheduler.params.warmup_type"),
    ],
)
def test_hints_fail_nothing(check, config, says):
    code, lines, _ = check(config, before=enough_compilers)
    assert code == 0 and sum(": hint: " in line and says in line for line in lines) == 1, lines


def test_the_machine_is_asked(check, tmp_path):
    def no_compiler():
        os.environ["CXX"] = "/nowhere/c++"

    config = json.loads((REPO / "03-deepspeed/configs/zero2_offload_cpu_config.json").read_text())
    code, lines, _ = check(config, before=no_compiler)
    assert code == 1 and "the compiler /nowhere/c++ is missing: install g++" in lines[0]
    assert 'or set "torch_adam": true' in lines[0] and f": {MACHINE}: " in lines[0]
    disk = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "none")}}
    code, lines, _ = check(changed(zero_optimization=disk), before=enough_compilers)
    assert code == 1 and "is not a folder: make it first" in lines[0]


def test_a_file_that_is_not_there_is_exit_code_2(check, tmp_path):
    code, lines, errors = check([tmp_path / "none.json", CONFIGS[0]])
    assert code == 2 and len(errors) == 1 and "No such file or directory" in errors[0]
    assert lines == [f"{CONFIGS[0]}: OK"], "the others are checked all the same"


def test_sabotage_a_key_that_deepspeed_does_not_know_is_noticed(check):
    """Without the list of what DeepSpeed looks up, a misspelt section would pass."""

    def know_everything():
        config_rules.unknown_names = lambda config: iter(())

    config = changed(zero_optimisation={"stage": 3})
    assert check(config)[0] == 1
    assert check(config, before=know_everything)[0] == 0
