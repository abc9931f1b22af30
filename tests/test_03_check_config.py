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

from deepspeed_parts import config_judge, setup
from legacy_common import cli
from legacy_common.cli import UsageError

CHECK = "03-deepspeed/check_config.py"
WRONG, SCRIPT, MACHINE, HINT = (
    "wrong for DeepSpeed", "not in zero_offload.py", "machine", "hint"
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

        deadline_s = 60 + 20 * len(files)  # each has engines of its own
        ended = fork_ranks(body, 1, tmp_path / "rank", deadline_s, True)
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
        "this script": SCRIPT, "gradient_allreduce_op": SCRIPT, "autotp_size": SCRIPT,
        "sequence_parallel_size": SCRIPT, "has no type": SCRIPT, "a dtype": SCRIPT}  # fmt: skip


@pytest.mark.full
def test_what_a_run_refuses_is_a_finding(check, tmp_path):
    cases = [case for case in MISREAD if case[0] is not None and not case[1]]
    assert len(cases) > 10
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


ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def plain(stage=2, **keys):
    """Return a config without "auto", and keys of its own; None leaves one out."""
    whole = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAM,
             "zero_optimization": {"stage": stage}, **keys}  # fmt: skip
    return {key: value for key, value in whole.items() if value is not None}


def optimizer(kind, **params):
    return {"type": kind, "params": {"lr": 1e-3, **params}}


AUTOCAST = {"enabled": True, "dtype": "bfloat16"}
GATHERS = {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}
NO_PATH = {"stage": 3, "offload_param": {"device": "nvme"}}
# Who reads a config, the config, what it is to DeepSpeed 0.19.8 ("" for nothing), and what is said;
# of nothing: what must not be.
TRUTH = [
    ("own", plain(sequence_parallel_size=1), "", "unknown"),
    ("template", plain(torch_autocast=AUTOCAST, bf16={"enabled": True}), "", "autocast"),
    ("own", plain(zero_optimization=GATHERS), "", "writes nothing"),
    ("own", plain(scheduler={"params": {}}), HINT, "scheduler has no type"),
    ("own", plain(3, aio={"use_gds": True}), MACHINE, "GDS currently only supported for CUDA"),
    ("own", plain(tensor_parallel={"autotp_size": 4}), "", "autotp_size"),
    ("own", plain(3, optimizer=optimizer("Lion")), MACHINE, "had not been implemented on CPU"),
    ("own", plain(1, optimizer=optimizer("OneBitAdam")), WRONG, "OneBitAdam is not a supported"),
    ("own", plain(train_micro_batch_size_per_gpu=None), WRONG, "Either train_batch_size or"),
    ("trainer", plain(train_micro_batch_size_per_gpu=None), WRONG, "Either train_batch_size or"),
    ("template", plain(train_micro_batch_size_per_gpu=None), "", "train_batch_size"),
    ("own", plain(optimizer=optimizer("AdamW", torch_adam=True, bias_correction=True)), WRONG,
     "optimizer.params.bias_correction true: AdamW.__init__() got an unexpected"),
    ("own", plain(optimizer=optimizer("SGD")), WRONG, 'Please add <"zero_allow_untested_optimizer'),
    ("own", plain(optimizer=optimizer("SGD"), zero_allow_untested_optimizer=True), HINT, "caution"),
    ("own", plain(scheduler={"type": "WarmupCosineLR", "params": {}}), WRONG,
     "missing 1 required positional argument: 'total_num_steps'"),
    ("own", plain(zero_optimization=NO_PATH), WRONG, '"nvme_path" in DeepSpeed Config cannot be'),
    ("own", plain(gradient_clipping="auto"), WRONG, "which DeepSpeed cannot fill in"),
    ("trainer", plain(gradient_clipping="auto"), "", "fill in"),
    ("trainer", plain(log_level="auto"), WRONG, "which the Trainer cannot fill in"),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("reader", ["own", "trainer", "template"])
def test_the_verdict_is_deepspeed_s(check, tmp_path, reader):
    """False alarms and misses that configs of others brought to light, one row each."""
    rows = [row[1:] for row in TRUTH if row[0] == reader]
    files = [tmp_path / f"{number}.json" for number in range(len(rows))]
    for path, (config, _, _) in zip(files, rows, strict=True):
        write_config(path, config)
    code, lines, errors = check(files, "--for", reader, before=enough_compilers)
    assert (code, errors) == (int(any(row[1] == WRONG for row in rows)), [])
    for path, (config, kind, says) in zip(files, rows, strict=True):
        own = [line for line in lines if line.startswith(f"{path}: ")]
        found = [line for line in own if says in line]
        assert len(found) == (kind != ""), (config, own)
        assert all(f": {kind}: " in line for line in found), (config, own)
        assert any(": OK" in line for line in own) == (kind != WRONG), (config, own)


def misspell_every_key(rank, world_size, folder):
    """Return the keys that may be misspelt without the right one being named."""
    setup.prepare(torch.device("cpu"))
    unnoticed, tried = [], 0
    for path in CONFIGS:
        for *above, name in places(json.loads(path.read_text())):
            if "params" in above:  # DeepSpeed refuses these itself, once the engine is built: TRUTH
                continue
            config = json.loads(path.read_text())
            part = config
            for section in above:
                part = part[section]
            part[name[:-1] + "q" + name[-1]] = part.pop(name)
            (folder / "wrong.json").write_text(json.dumps(config))
            tried += 1
            try:
                config_judge.read_right(folder / "wrong.json")
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
        ({**changed(), "zero_optimization": {"stage": 1}}, "no use_multi_rank_bucket_allreduce"),
        ({k: v for k, v in changed().items() if k != "gradient_clipping"}, "at a norm of 1"),
        (changed(bf16={"enabled": True}, zero_optimization={"stage": 0}), "bf16 in stage 0"),
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
        config_judge.unknown_names = lambda config, refusal: iter(())

    config = changed(zero_optimisation={"stage": 3})
    assert check(config)[0] == 1
    assert check(config, before=know_everything)[0] == 0
