"""Module 03: what a config says and flags leave open come to one value, or to one line."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPO, assert_one_line, load_script
from helpers_03 import (
    CONFIGS,
    FROM_THE_TRAINER_S_PAGE,
    changed,
    config_of,
    deepspeed_in_the_parent,
    places,
    settled,
)

import ds_config
import ds_setup
from dist_common import models, runtime
from dist_common.cli import UsageError

TRAIN = "03-deepspeed/deepspeed_train.py"


@pytest.fixture(scope="module", autouse=True)
def imported():
    with deepspeed_in_the_parent():
        yield


def misspell_every_key(rank, world_size, folder):
    """Return the keys that may be misspelt without the right one being named."""
    ds_setup.prepare(torch.device("cpu"))
    unnoticed, tried = [], 0
    for path in CONFIGS:
        settled(path)
        for *above, name in places(json.loads(path.read_text())):
            config = json.loads(path.read_text())
            part = config
            for section in above:
                part = part[section]
            part[name[:-1] + "q" + name[-1]] = part.pop(name)
            (folder / "wrong.json").write_text(json.dumps(config))
            tried += 1
            try:
                settled(folder / "wrong.json", nvme_path=folder)
                unnoticed.append((path.name, name))
            except UsageError as error:
                if f"did you mean {name}?" not in str(error):
                    unnoticed.append((path.name, name, str(error)))
    return tried, unnoticed


def test_every_key_of_every_config_is_known_and_a_misspelt_one_is_not(on_ranks, tmp_path):
    """Unknown sections DeepSpeed passes over, and unknown keys too where the value is "auto"."""
    [(tried, unnoticed)] = on_ranks(misspell_every_key, 1, tmp_path)
    assert tried > 100 and unnoticed == []


def settle_sizes(rank, world_size, folder):
    ds_setup.prepare(torch.device("cpu"))
    own = json.loads(config_of(2).read_text())
    told = []
    for sizes, flags in (
        ({}, {}),
        ({}, {"micro_batch_size": 3, "grad_accum_steps": 5}),
        ({"train_batch_size": 96}, {"micro_batch_size": 4}),
        ({"train_micro_batch_size_per_gpu": 6}, {"grad_accum_steps": 1}),
    ):
        (folder / "sizes.json").write_text(json.dumps(own | sizes))
        config, args = settled(folder / "sizes.json", ranks=4, **flags)
        told.append((args.micro_batch_size, args.grad_accum_steps, config["train_batch_size"]))
    config, args = settled(config_of(3), precision="32-true", lr=0.5, max_steps=7)
    told += [config["bf16"]["enabled"], config["optimizer"]["params"]["lr"], args.max_steps]
    told += [config["zero_optimization"]["reduce_bucket_size"], config["gradient_clipping"]]
    return told


def test_flags_and_config_settle_what_the_other_leaves_open(on_ranks, tmp_path):
    [told] = on_ranks(settle_sizes, 1, tmp_path)
    assert told == [(8, 2, 64), (3, 5, 60), (4, 6, 96), (6, 1, 24), False, 0.5, 7, 128 * 128, 1.0]


def settle_with_defaults(rank, world_size, folder):
    """Flags of a template have defaults: those that were not given yield to the config."""
    ds_setup.prepare(torch.device("cpu"))
    script = load_script(TRAIN)
    world = runtime.World(0, 0, 2, 2, "python")
    own = changed(train_batch_size=16, gradient_clipping=0.3, bf16={"enabled": True},
                  optimizer={"params": {"lr": 0.1, "betas": "auto"}})  # fmt: skip
    (folder / "own.json").write_text(json.dumps(own))
    told = []
    for words in ((), ("--micro-batch-size", "4"), ("--lr", "0.1"), ("--lr", "0.2"),
                  ("--max-grad-norm", "1"), ("--global-batch-size", "32"),
                  ("--precision", "32-true"), ("--grad-accum-steps", "2")):  # fmt: skip
        sys.argv = [TRAIN, "--deepspeed_config", str(folder / "own.json"), *words]
        args, given = script.parse_args()
        assert given == {"deepspeed_config", *(w[2:].replace("-", "_") for w in words[::2])}
        try:
            config = ds_config.load_config(args, world, models.PRESETS["tiny"], given)
            told.append((args.micro_batch_size, args.grad_accum_steps, args.global_batch_size,
                         args.lr, args.max_grad_norm, args.precision,
                         config["optimizer"]["params"]["betas"]))  # fmt: skip
        except UsageError as error:
            told.append(str(error))
    return told


def test_a_flag_that_was_not_given_yields_to_the_config(on_ranks, tmp_path):
    [told] = on_ranks(settle_with_defaults, 1, tmp_path)
    rest = (16, 0.1, 0.3, "bf16-mixed", [0.9, 0.95])
    assert told[:3] == [(8, 1, *rest), (4, 2, *rest), (8, 1, *rest)]
    flags = ("--lr 0.2", "--max-grad-norm 1.0", "--global-batch-size 32", "--precision 32-true")
    for flag, line in zip(flags, told[3:7], strict=True):
        assert line.startswith(f"{flag}, but ") and 'or write "auto" there' in line
    assert "train_batch_size 16 is not" in told[7]


def test_the_guide_explains_every_key():
    guide = (REPO / "03-deepspeed/check_config.md").read_text()
    table = guide.split("## The config, key by key")[1].split("\n## ")[0]
    explained = set(re.findall(r"`(\w+)`", table))
    used = [json.loads(path.read_text()) for path in CONFIGS]
    for config in (*used, *FROM_THE_TRAINER_S_PAGE.values()):
        names = {place[-1] for place in places(config)}
        assert names <= explained, names - explained


def let_hugging_face_fill_in(rank, world_size, folder):
    ds_setup.prepare(torch.device("cpu"))
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    shape = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=1
    )  # fmt: skip
    paths = [config_of(stage) for stage in range(4)]
    for name, config in FROM_THE_TRAINER_S_PAGE.items():
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps(config))
    told = []
    for path in paths:
        bf16 = "bf16" in json.loads(path.read_text())
        given = TrainingArguments(
            output_dir=folder, deepspeed=str(path), use_cpu=True, report_to=[],
            per_device_train_batch_size=4, gradient_accumulation_steps=3, learning_rate=1e-4,
            max_steps=50, warmup_steps=4, max_grad_norm=0.5, bf16=bf16, adam_beta2=0.95,
            weight_decay=0.1,
        )  # fmt: skip
        theirs = given.hf_deepspeed_config
        theirs.trainer_config_finalize(given, LlamaForCausalLM(shape), 50)
        ours, _ = settled(
            path, ranks=1, micro_batch_size=4, grad_accum_steps=3, lr=1e-4, max_steps=50,
            warmup_steps=4, max_grad_norm=0.5, precision="bf16-mixed" if bf16 else "32-true",
        )  # fmt: skip
        theirs.config.pop("steps_per_print", None)
        ours.pop("steps_per_print", None)
        ours.pop("train_batch_size")  # which they may leave to DeepSpeed
        theirs.config.pop("train_batch_size", None)
        told.append((ours, theirs.config))
    return told


@pytest.mark.full
@pytest.mark.xdist_group("transformers")  # which takes seconds to import
def test_hugging_face_fills_in_the_same_values(on_ranks, tmp_path):
    """Their Trainer refuses numbers that contradict its arguments, and sets what is "auto"."""
    pytest.importorskip("transformers")
    [told] = on_ranks(let_hugging_face_fill_in, 1, tmp_path)
    for ours, theirs in told:
        assert ours == theirs


# A config, flags, and what is said about them.
MISREAD = [
    ('{\n  "bf16": {"enabled": true},\n  "zero_optimization": {"stage" 2}\n}', (),
     "is not JSON: line 3, column 33: Expecting ':' delimiter"),
    ('{"bf16": {}, "bf16": {}}', (), "bf16 is there twice"),
    ("[1]", (), "must hold an object"),
    (changed(zero_optimisation={"stage": 3}), (),
     "unknown key zero_optimisation: did you mean zero_optimization?"),
    (changed(zero_optimization={"overlap_com": True}), (),
     "unknown key zero_optimization.overlap_com: did you mean overlap_comm?"),
    (changed(xyzzy=1), (), "unknown key xyzzy: DeepSpeed knows no such key"),
    (changed(zero_optimization={"stage": 5}), (), "stage must be 0, 1, 2 or 3, not 5"),
    (changed(zero_optimization={"stage": "2"}), (), "stage must be 0, 1, 2 or 3, not '2'"),
    (changed(train_batch_size=30, train_micro_batch_size_per_gpu=4), ("--grad-accum-steps", 2),
     "train_batch_size 30 is not train_micro_batch_size_per_gpu 4 x "
     "gradient_accumulation_steps 2 x 1 ranks = 8"),
    (changed(train_micro_batch_size_per_gpu=4), ("--micro-batch-size", 2),
     "--micro-batch-size 2, but"),
    (changed(train_micro_batch_size_per_gpu=0), (), "whole number of at least 1, not 0"),
    (changed(bf16={"enabled": True}), ("--precision", "32-true"),
     "has bf16.enabled true: change one, or write \"auto\" there"),
    (changed(bf16={"enabled": True}, fp16={"enabled": True}), (), "both enabled"),
    (changed(zero_optimization={"contiguous_gradients": "auto"}), (),
     'contiguous_gradients is "auto", which this script'),
    (changed(optimizer={"params": {"lr": "1e-3"}}), (), 'must be a number above 0, not "1e-3"'),
    (changed(optimizer={"params": {"betas": [0.9]}}), (), "betas must be two numbers below 1"),
    (changed(optimizer={"params": None}), (), "optimizer.params must be an object"),
    (changed(optimizer={"type": "AdamWw"}), (), "must be Adam or AdamW here, not 'AdamWw'"),
    (changed(scheduler={"type": "WarmupDecayLRR"}), (), "did you mean WarmupDecayLR?"),
    (changed(aio={"queue_dept": 8}), (), "key aio.queue_dept: did you mean queue_depth?"),
    (changed(checkpoint={"load_universall": True}), (), "did you mean load_universal?"),
    (changed(bf16={"enabled": "true"}), (), 'bf16.enabled must be true, false or "auto"'),
    (changed(torch_autocast={"enabled": True, "dtype": "bfloat16"}, bf16={"enabled": True}), (),
     "torch_autocast beside bf16 or fp16"),
    (changed(torch_autocast={"enabled": True, "dtype": "bfloat16"}), ("--precision", "32-true"),
     "has torch_autocast.dtype bfloat16: change one"),
    (changed(torch_autocast={"enabled": True}), (), "torch_autocast needs a dtype"),
    ('{"gradient_clipping": NaN}', (), "NaN is no number that JSON has"),
    (changed(gradient_clipping="1.0"), (), "gradient_clipping must be a number of at least 0"),
    (changed(zero_optimization={"stage": 3, "offload_param": {"device": "nvme",
     "nvme_path": "/a"}}), ("--nvme-path", "/b"), "has offload_param.nvme_path /a: change one"),
    (changed(optimizer={"params": {"learning_rate": 1}}), (), "unknown key optimizer.params.l"),
    (changed(gradient_allreduce_op="sum"), (), "gradient_allreduce_op must be mean"),
    (changed(tensor_parallel={"autotp_size": 2}), (), "autotp_size must be 0 or 1"),
    (changed(amp={"enabled": True}), (), "Apex AMP integration has been removed"),
    ({"zero_optimization": {"stage": 1}}, (), "no optimizer: add"),
    (changed(zero_optimization={"offload_param": {"device": "cpu"}}), (),
     "offload_param to cpu needs stage 3, not 2"),
    (changed(zero_optimization={"offload_optimizer": {"device": "disk"}}), (),
     "Input should be 'none', 'cpu' or 'nvme'"),
    (changed(zero_optimization={"offload_optimizer": "cpu"}), (),
     "zero_optimization.offload_optimizer must be an object"),
    (changed(zero_optimization={"offload_optimizer": {"device": ["cpu"]}}), (),
     "offload_optimizer.device: Input should be 'none', 'cpu' or 'nvme'"),
    (changed(tensor_parallel={"autotp_size": "auto"}), (),
     'tensor_parallel.autotp_size is "auto", which this script'),
    (changed(tensor_parallel={"autotp_size": "2"}), (), 'must be a whole number, not "2"'),
    (changed(data_types={"grad_accum_dtype": "fp33"}), (),
     'data_types.grad_accum_dtype must be fp32, bf16 or fp16, not "fp33"'),
    (changed(communication_data_type=[1]), (),
     "communication_data_type must be fp32, bf16 or fp16, not [1]"),
    (changed(aio=[1]), (), "aio must be an object"),
    (None, (), "No such file or directory"),
]  # fmt: skip


def write_config(path: Path, config: dict | str | None) -> None:
    path.unlink(missing_ok=True)
    if config is not None:
        path.write_text(config if isinstance(config, str) else json.dumps(config))


def read_what_deepspeed_would_misread(rank, world_size, path):
    """Return what is said about each of MISREAD; a second line would be a second element."""
    ds_setup.prepare(torch.device("cpu"))
    script = load_script(TRAIN)
    said = []
    for config, argv, _ in MISREAD:
        write_config(path, config)
        sys.argv = [TRAIN, "--deepspeed_config", str(path), *map(str, argv)]
        try:
            world = runtime.World(0, 0, 1, 1, "python")
            args, given = script.parse_args()
            ds_config.load_config(args, world, models.PRESETS["tiny"], given)
            said.append(["accepted"])
        except UsageError as error:
            said.append(str(error).splitlines())
    return said


def test_a_config_that_deepspeed_would_misread_is_refused(on_ranks, tmp_path):
    [said] = on_ranks(read_what_deepspeed_would_misread, 1, tmp_path / "own.json")
    for (config, argv, says), lines in zip(MISREAD, said, strict=True):
        assert len(lines) == 1 and says in lines[0], (config, argv, lines)


@pytest.mark.parametrize(
    ("config", "argv", "says"),
    [MISREAD[0], *(pytest.param(*case, marks=pytest.mark.full) for case in MISREAD[1:])],
)
def test_a_config_that_deepspeed_would_misread_is_one_line(
    run_script, tmp_path, config, argv, says
):
    write_config(tmp_path / "own.json", config)
    ended = run_script(TRAIN, "--deepspeed_config", tmp_path / "own.json", *argv)
    assert_one_line(ended, says, "deepspeed_train.py")
