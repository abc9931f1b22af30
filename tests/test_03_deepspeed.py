"""Module 03: in each stage the losses of one process, and no more held or sent than said."""

import json
import os
import re
import shutil
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from conftest import GPUS, REPO, assert_one_line, compiled, load_script, results_of, run_command
from helpers_03 import SMALL, deepspeed_in_the_parent, on_small, small

import zero
from dist_common import models, runtime
from dist_common.cli import UsageError

STAGES = "03-deepspeed/zero_stages.py"
TRAIN = "03-deepspeed/deepspeed_train.py"
SCRATCH = "03-deepspeed/zero_from_scratch.py"
CONFIGS = sorted((REPO / "03-deepspeed/configs").glob("*.json"))


@pytest.fixture(scope="module", autouse=True)
def imported():
    with deepspeed_in_the_parent("deepspeed.utils.zero_to_fp32"):
        yield


def config_of(stage: int) -> Path:
    return REPO / f"03-deepspeed/configs/zero{stage}_config.json"


def failed_checks(folder: Path) -> list[str]:
    return [check["name"] for check in results_of(folder)["checks"] if not check["ok"]]


# The configs, and the check of them


def ask(path: Path, ranks: int = 2, **flags) -> tuple[dict, Namespace]:
    """Load a config as a script does, in a fork: it changes the environment."""
    args = Namespace(deepspeed_config=path, micro_batch_size=None, grad_accum_steps=None, lr=None,
                     max_steps=None, precision=None, nvme_path=path.parent)  # fmt: skip
    vars(args).update(flags)
    world = runtime.World(0, 0, ranks, ranks, "python")
    return zero.load_config(args, world, models.PRESETS["tiny"]), args


def places(part: dict, above: tuple = ()) -> list[tuple]:
    found = []
    for name, value in part.items():
        found.append((*above, name))
        if isinstance(value, dict):
            found += places(value, (*above, name))
    return found


def misspell_every_key(rank, world_size, folder):
    """Return the keys that may be misspelt without the right one being named."""
    zero.prepare(torch.device("cpu"))
    unnoticed, tried = [], 0
    for path in CONFIGS:
        ask(path)
        for *above, name in places(json.loads(path.read_text())):
            config = json.loads(path.read_text())
            part = config
            for section in above:
                part = part[section]
            part[name[:-1] + "q" + name[-1]] = part.pop(name)
            (folder / "wrong.json").write_text(json.dumps(config))
            tried += 1
            try:
                ask(folder / "wrong.json", nvme_path=folder)
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
    zero.prepare(torch.device("cpu"))
    own = json.loads(config_of(2).read_text())
    told = []
    for sizes, flags in (
        ({}, {}),
        ({}, {"micro_batch_size": 3, "grad_accum_steps": 5}),
        ({"train_batch_size": 96}, {"micro_batch_size": 4}),
        ({"train_micro_batch_size_per_gpu": 6}, {"grad_accum_steps": 1}),
    ):
        (folder / "sizes.json").write_text(json.dumps(own | sizes))
        config, args = ask(folder / "sizes.json", ranks=4, **flags)
        told.append((args.micro_batch_size, args.grad_accum_steps, config["train_batch_size"]))
    config, args = ask(config_of(3), precision="32-true", lr=0.5, max_steps=7)
    told += [config["bf16"]["enabled"], config["optimizer"]["params"]["lr"]]
    told += [config["scheduler"]["params"]["total_num_steps"]]
    told += [config["zero_optimization"]["reduce_bucket_size"]]
    return told


def test_flags_and_config_settle_what_the_other_leaves_open(on_ranks, tmp_path):
    [told] = on_ranks(settle_sizes, 1, tmp_path)
    assert told == [(8, 2, 64), (3, 5, 60), (4, 6, 96), (6, 1, 24), False, 0.5, 7, 128 * 128]


def test_the_guide_explains_every_key():
    guide = (REPO / "03-deepspeed/README.md").read_text()
    table = guide.split("## The config, key by key")[1].split("\n## ")[0]
    explained = set(re.findall(r"`(\w+)`", table))
    for path in CONFIGS:
        names = {place[-1] for place in places(json.loads(path.read_text()))}
        assert names <= explained, (path.name, names - explained)


def let_hugging_face_fill_in(rank, world_size, folder):
    zero.prepare(torch.device("cpu"))
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    shape = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=1
    )  # fmt: skip
    told = []
    for stage in range(4):
        given = TrainingArguments(
            output_dir=folder, deepspeed=str(config_of(stage)), use_cpu=True, report_to=[],
            per_device_train_batch_size=4, gradient_accumulation_steps=3, learning_rate=1e-4,
            max_steps=50, warmup_steps=4, max_grad_norm=1.0, bf16=True, adam_beta2=0.95,
            weight_decay=0.1,
        )  # fmt: skip
        theirs = given.hf_deepspeed_config
        theirs.trainer_config_finalize(given, LlamaForCausalLM(shape), 50)
        ours, _ = ask(config_of(stage), ranks=1, micro_batch_size=4, grad_accum_steps=3, lr=1e-4,
                      max_steps=50, precision="bf16-mixed")  # fmt: skip
        theirs.config.pop("steps_per_print", None)
        ours.pop("train_batch_size")  # which they leave to DeepSpeed
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


def changed(**sections) -> dict:
    own = json.loads(config_of(2).read_text())
    for name, value in sections.items():
        merged = isinstance(value, dict) and name in own
        own[name] = own[name] | value if merged else value
    return own


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
    (changed(gradient_clipping="auto"), (), 'gradient_clipping is "auto", which this script'),
    (changed(optimizer={"params": {"lr": "1e-3"}}), (), 'must be a number above 0, not "1e-3"'),
    (changed(optimizer={"params": None}), (), "optimizer.params must be an object"),
    (changed(optimizer={"type": "AdamWw"}), (), "must be Adam or AdamW here, not 'AdamWw'"),
    (changed(scheduler={"type": "WarmupDecayLRR"}), (), "did you mean WarmupDecayLR?"),
    (changed(aio={"queue_dept": 8}), (), "key aio.queue_dept: did you mean queue_depth?"),
    (changed(checkpoint={"load_universall": True}), (), "did you mean load_universal?"),
    (changed(bf16={"enabled": "true"}), (), 'bf16.enabled must be true, false or "auto"'),
    ('{"gradient_clipping": NaN}', (), "NaN is no number that JSON has"),
    (changed(gradient_clipping="1.0"), (), "gradient_clipping must be a number of at least 0"),
    (changed(zero_optimization={"stage": 3, "offload_param": {"device": "nvme",
     "nvme_path": "/a"}}), ("--nvme-path", "/b"), "has offload_param.nvme_path /a: change one"),
    (changed(optimizer={"params": {"learning_rate": 1}}), (), "unknown key optimizer.params.l"),
    ({"zero_optimization": {"stage": 1}}, (), "no optimizer: add"),
    (changed(zero_optimization={"offload_param": {"device": "cpu"}}), (),
     "offload_param to cpu needs stage 3, not 2"),
    (changed(zero_optimization={"offload_optimizer": {"device": "disk"}}), (),
     "Input should be 'none', 'cpu' or 'nvme'"),
    (None, (), "No such file or directory"),
]  # fmt: skip


def write_config(path: Path, config: dict | str | None) -> None:
    path.unlink(missing_ok=True)
    if config is not None:
        path.write_text(config if isinstance(config, str) else json.dumps(config))


def read_what_deepspeed_would_misread(rank, world_size, path):
    """Return what is said about each of MISREAD; a second line would be a second element."""
    zero.prepare(torch.device("cpu"))
    script = load_script(TRAIN)
    said = []
    for config, argv, _ in MISREAD:
        write_config(path, config)
        sys.argv = [TRAIN, "--deepspeed_config", str(path), *map(str, argv)]
        try:
            world = runtime.World(0, 0, 1, 1, "python")
            zero.load_config(script.parse_args(), world, models.PRESETS["tiny"])
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


def no_float16(script):
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: False


@pytest.mark.parametrize(
    ("argv", "says", "before"),
    [
        (
            (
                "--deepspeed_config",
                REPO / "03-deepspeed/configs/zero3_offload_nvme_config.json",
                "--nvme-path",
                REPO,
                "--output-dir",
                "runs/never",
            ),
            "with an optimizer on nvme takes other losses than one that never stopped",
            None,
        ),
        (
            ("--precision", "16-mixed"),
            "DeepSpeed cannot train in float16 on this device",
            no_float16,
        ),
        (("--consolidate",), "--consolidate needs --output-dir", None),
        (("--seq-len", 257), "--seq-len must be at most 256", None),
        (("--micro-batch-size", "two"), "must be a whole number of at least 1", None),
        (("--text-file", "nowhere.txt"), "--text-file nowhere.txt: No such file", None),
        (
            ("--deepspeed_config", REPO / "03-deepspeed/configs/zero3_offload_nvme_config.json"),
            "offload_optimizer to nvme needs --nvme-path, a folder on the disk",
            None,
        ),
    ],
)
def test_train_refuses_bad_input(run_script, argv, says, before):
    assert_one_line(run_script(TRAIN, *argv, before=before), says, "deepspeed_train.py")


# zero_stages.py


@pytest.mark.parametrize(
    ("world_size", "before"),
    [
        (2, small),
        pytest.param(1, small, marks=pytest.mark.full),
        pytest.param(3, None, marks=pytest.mark.full),
        pytest.param(4, small, marks=pytest.mark.full),
    ],
)
def test_every_stage_trains_as_one_process_and_holds_what_the_paper_says(
    run_script, tmp_path, world_size, before
):
    ended = run_script(
        STAGES, *SMALL, "--output-dir", tmp_path / "run", world_size=world_size, before=before
    )
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    assert ended.stderr == "" and (tmp_path / "run" / "stages.png").exists()
    held = results_of(tmp_path / "run")["metrics"]
    for stage, formula in enumerate(
        (16, 4 + 12 / world_size, 2 + 14 / world_size, 16 / world_size)
    ):
        measured = held[f"bytes_per_weight_stage {stage}"]
        assert abs(measured / formula - 1) < 0.02, (stage, measured)


def no_reduction(script):
    started = script.start_engine

    def broken(model, config):
        engine = started(model, config)
        engine.allreduce_gradients = lambda *args, **kwargs: None
        return engine

    script.start_engine = broken


def one_stage_less(script):
    loaded = script.load_configs

    def broken(args, world, shape):
        configs = loaded(args, world, shape)
        for config in configs.values():
            config["zero_optimization"]["stage"] -= 1
        return configs

    script.load_configs = broken


def one_weight_off(script):
    started = script.start_engine

    def broken(model, config):
        model.blocks[1].up.weight.data[:8] += 0.01
        return started(model, config)

    script.start_engine = broken


def clip_as_by_default(script):
    loaded = script.load_configs

    def broken(*args):
        configs = loaded(*args)
        for config in configs.values():
            del config["gradient_clipping"]
        return configs

    script.load_configs = broken


def without_key(*names):
    def sabotage(script):
        loaded = script.load_configs

        def broken(*args):
            configs = loaded(*args)
            for config in configs.values():
                for name in names:
                    del config["zero_optimization"][name]
            return configs

        script.load_configs = broken

    return sabotage


@pytest.mark.parametrize(
    ("sabotage", "stage", "failing"),
    [
        (one_stage_less, 2, ["bytes per weight", "models sent per step"]),
        (one_weight_off, 2, ["largest error of a loss"]),
    ]
    + [
        pytest.param(*case, marks=pytest.mark.full)
        for case in (
            (no_reduction, 0, ["models sent per step", "largest error of a loss"]),
            (one_stage_less, 1, ["bytes per weight"]),
            (one_stage_less, 3, ["bytes per weight", "models sent per step"]),
            (without_key("use_multi_rank_bucket_allreduce"), 1, ["models sent per step"]),
            (
                without_key("stage3_max_live_parameters", "stage3_max_reuse_distance"),
                3,
                ["models sent per step"],
            ),
            (clip_as_by_default, 1, ["largest error of a loss"]),
        )
    ],
)
def test_sabotage_of_a_stage_fails_a_check(run_script, tmp_path, sabotage, stage, failing):
    """Among them DeepSpeed's defaults: without a key it sends more or less, or clips at 1."""
    ended = run_script(
        STAGES, "--stages", stage, *SMALL, "--output-dir", tmp_path / "run",
        world_size=2, before=on_small(sabotage), end_job_on_failure=False,
    )  # fmt: skip
    assert ended.codes == [1, 1], ended.stdout + ended.stderr
    assert failed_checks(tmp_path / "run") == [f"stage {stage}: {name}" for name in failing]


# deepspeed_train.py

QUICK = (*SMALL, "--max-steps", 6)


@pytest.mark.parametrize(
    "name", ["zero2_offload_cpu", pytest.param("zero3_offload_cpu", marks=pytest.mark.full)]
)
def test_train_with_offload_to_the_cpu_resumes_bitwise(run_script, tmp_path, name):
    config = REPO / f"03-deepspeed/configs/{name}_config.json"
    argv = ("--deepspeed_config", config, *QUICK, "--save-every", 3, "--output-dir", tmp_path / "r")
    assert run_script(TRAIN, *argv, world_size=2, before=small).codes == [0, 0]
    straight = losses_of(tmp_path / "r")
    shutil.rmtree(tmp_path / "r/checkpoints/step-00000006")
    ended = run_script(TRAIN, *argv, "--resume", world_size=2, before=small)
    assert ended.codes == [0, 0] and "resuming from" in ended.stdout, ended.stdout + ended.stderr
    assert losses_of(tmp_path / "r") == straight


@pytest.mark.parametrize(
    ("world_size", "stage", "precision"),
    [(2, stage, "32-true") for stage in range(4)]
    + [(3, 3, "bf16-mixed")]
    + [
        pytest.param(*case, marks=pytest.mark.full)
        for case in [(4, stage, "32-true") for stage in range(4)]
        + [(2, stage, "bf16-mixed") for stage in (1, 2, 3)]
        + [(1, 2, "32-true")]
    ],
)
def test_train_as_one_process_in_every_stage(run_script, tmp_path, world_size, stage, precision):
    """Losses with accumulation, clipping and schedule, bytes held, and the consolidated weights."""
    ended = run_script(
        TRAIN, "--deepspeed_config", config_of(stage), "--precision", precision, *QUICK,
        "--consolidate", "--output-dir", tmp_path / "run", world_size=world_size,
        before=None if world_size == 4 else small,
    )  # fmt: skip
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    results = results_of(tmp_path / "run")
    assert ended.stderr == "" and len(results["checks"]) == 4
    assert results["metrics"]["final_loss"] < 5.5, "it starts at ln 256 = 5.55"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    # DeepSpeed's warm-up stands still for two steps.
    rates = [json.loads(line)["lr"] for line in lines[:4]]
    assert rates == pytest.approx([0.0002, 0.0002, 0.00065, 0.0011])


def one_micro_batch_twice(script):
    step = script.train_step
    script.train_step = lambda engine, batches, look: step(engine, [batches[0]] * 2, look)


def altered_weights(script):
    consolidated = script.consolidate

    def broken(folder, path, module=None):
        consolidated(folder, path, module)
        weights = torch.load(path)
        weights["head.weight"] = weights["head.weight"].roll(1, 0)
        torch.save(weights, path)

    script.consolidate = broken


def other_weights_on_rank_1(script):
    spread = script.largest_spread

    def broken(model):
        next(model.parameters()).data += 0.001 * script.dist.get_rank()
        return spread(model)

    script.largest_spread = broken


def stage_one(script):
    initialized = script.zero.load_config

    def broken(*args):
        config = initialized(*args)
        config["zero_optimization"]["stage"] = 1
        return config

    script.zero.load_config = broken
    script.bytes_per_weight = lambda *_: 4 + 4 / 2 + 12 / 2  # of stage 2


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (altered_weights, "test loss of the consolidated weights, in a plain model"),
        (other_weights_on_rank_1, "difference of a weight between ranks"),
        pytest.param(
            one_micro_batch_twice, "largest error of the first 6 losses", marks=pytest.mark.full
        ),
        pytest.param(stage_one, "bytes per weight", marks=pytest.mark.full),
    ],
)
def test_sabotage_of_the_training_fails_a_check(run_script, tmp_path, sabotage, failing):
    ended = run_script(
        TRAIN, "--precision", "32-true", *QUICK, "--consolidate", "--output-dir", tmp_path / "run",
        world_size=2, before=on_small(sabotage), end_job_on_failure=False,
    )  # fmt: skip
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    assert failed_checks(tmp_path / "run") == [failing]


@pytest.mark.full
def test_stage_0_in_bf16_is_no_baseline(run_script, tmp_path):
    """To make Adam's moments, DeepSpeed takes a step on zero gradients: its decay and its count."""
    ended = run_script(
        TRAIN, "--deepspeed_config", config_of(0), "--precision", "bf16-mixed", *QUICK,
        "--output-dir", tmp_path / "run", world_size=2, before=small, end_job_on_failure=False,
    )  # fmt: skip
    assert ended.codes == [1, 1] and failed_checks(tmp_path / "run") == [
        "largest error of the first 6 losses"
    ]


def losses_of(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


LONG = ("--precision", "32-true", "--max-steps", 8, "--save-every", 3, "--parity-steps", 0)
LONG = (*LONG, "--seq-len", 32)


@pytest.mark.full
def test_a_config_of_deepspeed_s_own_defaults_trains(run_script, tmp_path):
    """Its buckets are a gigabyte, so what is held is told and not compared."""
    optimizer = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
    for stage in (2, 3):
        (tmp_path / "own.json").write_text(
            json.dumps({"optimizer": optimizer, "zero_optimization": {"stage": stage}})
        )
        ended = run_script(
            TRAIN, "--deepspeed_config", tmp_path / "own.json", *QUICK, "--max-steps", 3,
            world_size=2, before=small,
        )  # fmt: skip
        assert ended.codes == [0, 0], ended.stdout + ended.stderr
        assert (
            "bytes per weight, buffers and all" in ended.stdout and "OK: 2 checks" in ended.stdout
        )


@pytest.mark.full
def test_between_stages_1_and_2_and_in_stage_0_on_other_ranks(run_script, tmp_path):
    def train(folder, ranks, stage, *argv):
        return run_script(
            TRAIN, "--deepspeed_config", config_of(stage), *LONG, "--output-dir", folder,
            "--micro-batch-size", 8 // ranks, *argv, world_size=ranks, before=small,
        )  # fmt: skip

    for before, after in ((1, 2), (0, 0)):
        folder = tmp_path / f"{before}-{after}"
        assert train(folder, 2, before).codes == [0, 0]
        straight = losses_of(folder)
        shutil.rmtree(folder / "checkpoints/step-00000008")
        ended = train(folder, 4 if before == 0 else 2, after, "--resume", "--consolidate")
        assert not any(ended.codes) and "resuming from" in ended.stdout, ended.stdout + ended.stderr
        resumed = losses_of(folder)
        assert all(abs(resumed[step] - straight[step]) < 1e-4 for step in straight)


def stand_still_after_step_6(script):
    saved = script.save

    def broken(engine, folder, step, facts):
        saved(engine, folder, step, facts)
        time.sleep(600 if step == 6 else 0)

    script.save = broken


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_a_killed_run_goes_on_also_on_other_numbers_of_ranks(run_script, tmp_path, stage):
    # On 4 ranks, what stage 2 keeps of weights that two ranks share is too much of a small model.
    smaller = small if stage == 3 else lambda script: None

    def train(folder, ranks, *argv, stage=stage, before=smaller, **options):
        return run_script(
            TRAIN, "--deepspeed_config", config_of(stage), *LONG, "--output-dir", folder,
            "--micro-batch-size", 8 // ranks, *argv, world_size=ranks, before=before, **options,
        )  # fmt: skip

    def stand_still(script):
        smaller(script)
        stand_still_after_step_6(script)

    assert train(tmp_path / "straight", 2).codes == [0, 0]
    straight, folder = losses_of(tmp_path / "straight"), tmp_path / "killed"

    def kill(pids):
        deadline = time.monotonic() + 60
        while not (folder / "checkpoints/step-00000006").exists():
            assert time.monotonic() < deadline, "it never saved"
            time.sleep(0.005)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    killed = train(folder, 2, before=stand_still, during=kill, end_job_on_failure=False)
    assert killed.codes == [-signal.SIGKILL] * 2
    for ranks in (4, 1):
        shutil.copytree(folder, tmp_path / f"on-{ranks}")
    same = train(folder, 2, "--resume")
    assert same.codes == [0, 0] and "step-00000006, saved by 2 ranks" in same.stdout, same.stderr
    assert losses_of(folder) == straight, "bitwise"
    for ranks in (4, 1):
        other = train(tmp_path / f"on-{ranks}", ranks, "--resume", "--consolidate")
        assert other.codes == [0] * ranks and other.stderr == "", other.stdout + other.stderr
        losses = losses_of(tmp_path / f"on-{ranks}")
        assert losses.keys() == straight.keys()
        assert all(abs(losses[step] - straight[step]) < 1e-5 for step in straight)
        left = [path.name for path in (tmp_path / f"on-{ranks}/checkpoints").iterdir()]
        assert not any("universal" in name or "partial" in name for name in left)
    done = train(folder, 2, "--resume")
    assert done.codes == [0, 0] and "nothing to train" in done.stdout
    other = train(folder, 2, "--resume", "--max-steps", 9, "--seed", 1)
    assert_one_line(other, "was saved with another --seed: take that", "deepspeed_train.py")
    if stage == 3:
        refused = train(folder, 2, "--resume", "--max-steps", 9, stage=2)
        assert_one_line(refused, "saved by 2 ranks in stage 3: 2 ranks in stage 2 cannot go on",
                        "deepspeed_train.py")  # fmt: skip


@pytest.mark.full
def test_a_run_resumed_with_the_optimizer_on_a_disk_takes_other_losses(run_script, tmp_path):
    """What the template refuses, done all the same: should DeepSpeed mend it, this fails."""
    if not compiled("async_io"):
        pytest.skip("DeepSpeed's async_io is not compiled")
    config = REPO / "03-deepspeed/configs/zero3_offload_nvme_config.json"
    (tmp_path / "disk").mkdir()
    argv = ("--deepspeed_config", config, "--nvme-path", tmp_path / "disk", *LONG, "--max-steps", 6)

    def allow(script):
        script.zero.ops_needed = lambda *_: []

    def train(*more):
        ended = run_script(
            TRAIN, *argv, "--output-dir", tmp_path / "run", *more, world_size=2, before=allow
        )
        assert ended.codes == [0, 0], ended.stdout + ended.stderr
        return losses_of(tmp_path / "run")

    straight = train()
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000006")
    resumed = train("--resume")
    assert abs(resumed[6] - straight[6]) > 0.01


def one_batch_more_on_rank_0(script):
    evaluated = script.test_loss_of

    def broken(model, sequences, args, device, rank=0, ranks=1):
        if rank == 0:
            part = script.batches(sequences, torch.arange(args.micro_batch_size), args, device)
            script.loss_of(model, part[0])
        return evaluated(model, sequences, args, device, rank, ranks)

    script.test_loss_of = broken


@pytest.mark.full
def test_uneven_evaluation_hangs_in_stage_3_and_not_in_stage_2(run_script):
    for stage in (2, 3):
        ended = run_script(
            TRAIN, "--deepspeed_config", config_of(stage), *QUICK, "--parity-steps", 0,
            "--timeout", 10, world_size=2, before=on_small(one_batch_more_on_rank_0),
        )  # fmt: skip
        assert any(ended.codes) == (stage == 3), ended.stdout + ended.stderr
    assert "lost contact with another rank" in ended.stderr, ended.stderr


@pytest.mark.full
def test_a_damaged_checkpoint_is_passed_over_and_none_at_all_is_one_line(run_script, tmp_path):
    def train(*argv):
        return run_script(
            TRAIN, *LONG, "--output-dir", tmp_path / "run", *argv, world_size=2, before=small
        )

    assert train("--max-steps", 6).codes == [0, 0]
    for step in (6, 3):
        folder = tmp_path / f"run/checkpoints/step-0000000{step}"
        path = next(folder.glob("zero_pp_rank_1*"))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        if step == 6:
            ended = train("--resume")
            assert ended.codes == [0, 0] and "step-00000003, saved by" in ended.stdout
            assert f"altered ({path.name} does not match its checksum)" in ended.stderr
            shutil.rmtree(tmp_path / "run/checkpoints/step-00000008")
            shutil.copytree(folder, tmp_path / "run/checkpoints/step-00000003", dirs_exist_ok=True)
    for path in (tmp_path / "run/checkpoints").glob("step-*/zero_pp_rank_1*"):
        path.write_bytes(path.read_bytes()[:-1000])
    assert_one_line(train("--resume"), "no checkpoint can be used", "deepspeed_train.py")


def test_train_under_slurm_and_by_the_deepspeed_launcher(run_script, tmp_path):
    """Ranks as srun and as the launcher name them; a page starts the launcher itself."""

    def slurm(rank):
        return {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NTASKS": 2, "SLURM_STEP_ID": 0,
                "SLURM_STEP_TASKS_PER_NODE": 2, "SLURM_JOB_ID": tmp_path.stat().st_ino}  # fmt: skip

    ended = run_script(TRAIN, *QUICK, world_size=2, environ=slurm, before=small)
    assert ended.codes == [0, 0] and "2 ranks started by srun" in ended.stdout, ended.stderr


# zero_from_scratch.py


@pytest.mark.parametrize(
    "world_size", [2, 3, *(pytest.param(ranks, marks=pytest.mark.full) for ranks in (1, 4))]
)
def test_zero_from_scratch_is_deepspeed(run_script, tmp_path, world_size):
    ended = run_script(
        SCRATCH, *SMALL, "--output-dir", tmp_path / "run", world_size=world_size,
        before=None if world_size == 4 else small,
    )  # fmt: skip
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    assert ended.stderr == "" and len(results_of(tmp_path / "run")["checks"]) == 8


def keep_own_gradient(script):
    script.reduce_scatter = lambda part, whole: part.copy_(
        whole.chunk(script.dist.get_world_size())[script.dist.get_rank()]
    )


def never_gather(script):
    script.Bucket.gather = lambda self: None


def keep_the_whole_gradient(script):
    reduced = script.Bucket.reduce

    def broken(self):
        kept = [weight.grad.clone() for weight in self.weights]
        reduced(self)
        self.kept = kept

    script.Bucket.reduce = broken


def reduce_once_a_step(script):
    made = script.Zero.__init__
    script.Zero.__init__ = lambda self, model, stage, accumulate: made(self, model, 1, accumulate)


LOSS_AND_WEIGHT = ["largest difference of a loss", "largest difference of a weight"]


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (keep_own_gradient, {(n, what) for n in (1, 2) for what in LOSS_AND_WEIGHT}
         | {(n, "models sent per step") for n in (1, 2)}),
        pytest.param(never_gather, {(n, what) for n in (1, 2) for what in LOSS_AND_WEIGHT}
                     | {(n, "models sent per step") for n in (1, 2)}, marks=pytest.mark.full),
        pytest.param(keep_the_whole_gradient, {(1, "bytes per weight"), (2, "bytes per weight")},
                     marks=pytest.mark.full),
        pytest.param(reduce_once_a_step, {(2, "bytes per weight"), (2, "models sent per step")},
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_sabotage_of_zero_from_scratch_fails_a_check(run_script, tmp_path, sabotage, failing):
    ended = run_script(
        SCRATCH, *SMALL, "--output-dir", tmp_path / "run", world_size=2, before=on_small(sabotage),
        end_job_on_failure=False,
    )  # fmt: skip
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    assert set(failed_checks(tmp_path / "run")) == {f"stage {n}: {what}" for n, what in failing}


def test_scripts_refuse_sequences_longer_than_the_model_reads(run_script):
    for path in (STAGES, SCRATCH):
        ended = run_script(path, "--seq-len", 257)
        assert_one_line(ended, "--seq-len must be at most 256", Path(path).name)


# launch_deepspeed.sh


def launch(*argv: str, **environ: str):
    command = ["bash", str(REPO / "03-deepspeed/launch_deepspeed.sh"), *argv]
    return run_command(command, REPO, 90, **environ)


def test_the_launcher_prints_what_it_would_run(tmp_path):
    (tmp_path / "hosts").write_text("# two machines\nnode0 slots=8\nnode1 slots=8\n")
    for argv, says in (
        (("local", "--nproc-per-node=3"), "deepspeed --num_gpus=3 "),
        (("hostfile", "--hostfile", str(tmp_path / "hosts")), "deepspeed --hostfile="),
        (
            ("slurm", "--nnodes", "2", "--nproc-per-node", "8"),
            "--ntasks-per-node=8 --gpus-per-node",
        ),
    ):
        ended = launch(*argv, "--dry-run", "--max-steps", "9")
        assert ended.codes == [0] and says in ended.stdout and "--max-steps 9" in ended.stdout


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("here",), "must be local, hostfile or slurm, not 'here'"),
        (("local", "--nproc-per-node", "0"), "local needs --nproc-per-node, a whole number"),
        (("local", "--nnodes", "2"), "local is one machine"),
        (("hostfile",), "hostfile needs --hostfile FILE"),
        (("hostfile", "--hostfile", "/nowhere/hosts"), "/nowhere/hosts cannot be read"),
        (("hostfile", "--hostfile", "LICENSE"), "line 1: must be 'HOST slots=N'"),
        (("slurm", "--nproc-per-node", "8"), "slurm needs --nnodes"),
        (("slurm", "--nnodes"), "--nnodes needs a value"),
    ],
)
def test_the_launcher_refuses_bad_input(argv, says):
    ended = launch(*argv)
    assert ended.codes == [2] and says in ended.stderr and len(ended.stderr.splitlines()) == 1


@pytest.mark.skipif(not GPUS, reason="no GPU on this machine")
@pytest.mark.parametrize("script", [STAGES, SCRATCH, TRAIN])
def test_module_03_on_a_gpu(tmp_path, script):
    """One rank and NCCL: nothing to shard, and the same losses as one process."""
    more = ("--consolidate",) if script == TRAIN else ()
    ended = run_command(
        ["deepspeed", "--num_gpus=1", str(REPO / script), *more, "--output-dir", "run"],
        tmp_path, 300, CUDA_VISIBLE_DEVICES=GPUS.split(",")[0],
    )  # fmt: skip
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert results_of(tmp_path / "run")["device"] == "cuda"
