"""Module 03: the template trains the one job in each stage, resumes anywhere, exports weights."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import (
    GPUS,
    REPO,
    assert_one_line,
    compiled,
    free_port,
    results_of,
    run_command,
)
from helpers_03 import (
    FROM_THE_TRAINER_S_PAGE,
    MISREAD,
    SMALL,
    TRAIN,
    changed,
    config_of,
    deepspeed_in_the_parent,
    failed_checks,
    losses_of,
    on_small,
    settled,
    small,
    write_config,
)

from deepspeed_parts import deepspeed_train as part
from legacy_common import models
from legacy_common.cli import UsageError

QUICK = (*SMALL, "--max-steps", 4, "--grad-accum-steps", 2, "--eval-every", 100)
full = pytest.mark.full
FIRST = "largest error of the first 2 losses"
NORMS = "relative error of the first 2 gradient norms"
WEIGHTS = "distinct sets of weights over all ranks"
EXPORTED = "test loss of weights-fp32, in a plain model"


@pytest.fixture(scope="module", autouse=True)
def imported():
    with deepspeed_in_the_parent("deepspeed.utils.zero_to_fp32", "safetensors.torch"):
        yield


@pytest.fixture
def train(run_script, tmp_path):
    """Run the template on a small model and a short text; `config` is a dict, or a path."""
    text = tmp_path / "text"
    text.write_bytes((Path(os.__file__).parent / "argparse.py").read_bytes()[:12_000])

    def run(config, *argv, ranks=2, before=small, **options):
        path = config
        if isinstance(config, dict):
            path = tmp_path / "own.json"
            path.write_text(json.dumps(config))
        flags = ("--deepspeed_config", path, "--text-file", text, *argv)
        return run_script(TRAIN, *flags, world_size=ranks, before=before, **options)

    return run


def with_torch_adam(config: dict) -> dict:
    """Return a config that needs no compiled op."""
    params = {**config["optimizer"]["params"], "torch_adam": True}
    return {**config, "optimizer": {**config["optimizer"], "params": params}}


@pytest.mark.parametrize(
    ("ranks", "stage", "precision"),
    [(3, 3, "bf16-mixed")]
    + [
        pytest.param(*case, marks=full)
        for case in [(2, 0, "32-true"), (2, 1, "32-true"), (2, 2, "bf16-mixed")]
    ],
)
def test_train_as_one_process_in_every_stage(train, tmp_path, ranks, stage, precision):
    """Losses and norms with accumulation, clipping and schedule, bytes held, exported weights."""
    ended = train(
        config_of(stage), "--precision", precision, *QUICK, "--consolidate",
        "--output-dir", tmp_path / "run", ranks=ranks,
    )  # fmt: skip
    assert ended.codes == [0] * ranks, ended.stdout + ended.stderr
    results = results_of(tmp_path / "run")
    # Stage 0 in float32 keeps no gradient norm.
    assert ended.stderr == "" and len(results["checks"]) == (7 if stage else 6)
    assert results["metrics"]["final_loss"] < 5.6, "it starts at ln 256 = 5.55"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line)["lr"] for line in lines[:4]]
    assert rates == pytest.approx([0.0002, 0.0004, 0.0006, 0.0008])  # as ddp_training.py's


@full
@pytest.mark.parametrize("name", FROM_THE_TRAINER_S_PAGE)
def test_a_config_from_hugging_face_s_page_trains(train, tmp_path, name):
    """Without the op that DeepSpeed would compile for it; test_..._as_it_stands has it."""
    config = with_torch_adam(FROM_THE_TRAINER_S_PAGE[name])
    ended = train(config, *QUICK, "--output-dir", tmp_path / "run")
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert "bytes per weight, buffers and all" in ended.stdout and "OK: 5 checks" in ended.stdout


@full
def test_train_with_offload_to_the_cpu_resumes_bitwise(train, tmp_path):
    config = json.loads((REPO / "03-deepspeed/configs/zero2_offload_cpu_config.json").read_text())
    config = with_torch_adam(config)
    argv = (*QUICK, "--save-every", 2, "--output-dir", tmp_path / "r")
    ended = train(config, *argv)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    straight = losses_of(tmp_path / "r")
    shutil.rmtree(tmp_path / "r/checkpoints/step-00000004")
    ended = train(config, *argv, "--resume")
    assert ended.codes == [0, 0] and "resuming from" in ended.stdout, ended.stdout + ended.stderr
    assert losses_of(tmp_path / "r") == straight


@full
def test_without_a_compiler_pytorch_s_adam_takes_the_steps(train):
    """On all ranks, if one lacks it."""

    def lacking(script):
        small(script)
        if os.environ["RANK"] == "1":
            part.setup.missing_for = lambda op: f"no compiler for {op}"

    config = REPO / "03-deepspeed/configs/zero2_offload_cpu_config.json"
    ended = train(config, *QUICK, "--parity-steps", 0, before=lacking)
    assert ended.codes == [0, 0] and not ended.stderr, ended.stdout + ended.stderr
    assert "no compiler for cpu_adam; until then PyTorch's Adam takes the steps" in ended.stdout


CHECKPOINTING = {"activation_checkpointing": {"partition_activations": False}}


@full
def test_recomputed_activations_change_no_loss(train):
    config = json.loads(config_of(2).read_text()) | CHECKPOINTING
    ended = train(config, *QUICK, "--activation-checkpointing")
    assert ended.codes == [0, 0], ended.stdout + ended.stderr


@full
def test_tied_embeddings_stay_tied(train, tmp_path):
    def tied(script):
        models.PRESETS["tiny"] = models.TransformerConfig(
            256, 32, 2, 2, 1, 88, 256, tied_embeddings=True
        )

    ended = train(config_of(3), *QUICK, "--consolidate", "--output-dir", tmp_path / "run",
                  before=tied)  # fmt: skip
    assert ended.codes == [0, 0], ended.stdout + ended.stderr


PRECISE = {
    "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32"},
}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


@full
@pytest.mark.parametrize("keys", [PRECISE, AUTOCAST])
def test_other_types_of_gradients_train_too(train, keys):
    precision = () if "torch_autocast" in keys else ("--precision", "bf16-mixed")
    config = json.loads(config_of(2).read_text()) | keys
    ended = train(config, *QUICK, *precision)
    assert ended.codes == [0, 0] and "bf16-mixed" in ended.stdout, ended.stdout + ended.stderr


# Sabotage


def one_micro_batch_twice(script):
    take = script.train_step

    def broken(run, step):
        step.micro_batches = [step.micro_batches[0]] * 2
        take(run, step)

    script.train_step = broken


def half_a_loss(script):
    started = script.start_engine

    def broken(run):
        engine = started(run)
        backward = engine.backward
        engine.backward = lambda loss, **keywords: backward(loss / 2, **keywords)
        return engine

    script.start_engine = broken


def never_draw(script):
    def refuse(*_):
        raise AssertionError("weights were drawn that a checkpoint has")

    script.draw_weights = refuse


def altered_weights(script):
    exported = script.load_weights

    def broken(folder):
        weights = exported(folder)
        weights["head.weight"] = weights["head.weight"].roll(1, 0)
        return weights

    script.load_weights = broken


def other_weights_on_rank_1(script):
    check = part.check_weights

    def broken(run):
        next(run.engine.module.parameters()).data += 0.001 * script.dist.get_rank()
        check(run)

    part.check_weights = broken


def stage_one(script):
    examined = part.examined

    def broken(run):
        config = examined(run)
        config["zero_optimization"]["stage"] = 1
        return config

    part.examined = broken
    part.bytes_per_weight = lambda run: 4 + 4 / 2 + 12 / 2  # of stage 2


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (altered_weights, [EXPORTED]),
        pytest.param(other_weights_on_rank_1, [WEIGHTS], marks=full),
        (half_a_loss, [NORMS]),
        pytest.param(one_micro_batch_twice, [FIRST, NORMS], marks=full),
        pytest.param(stage_one, ["bytes per weight"], marks=full),
    ],
)
def test_sabotage_of_the_training_fails_a_check(train, tmp_path, sabotage, failing):
    ended = train(
        config_of(2), *QUICK, "--consolidate", "--output-dir", tmp_path / "run",
        before=on_small(sabotage), end_job_on_failure=False,
    )  # fmt: skip
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    assert failed_checks(tmp_path / "run") == failing


@full
def test_stage_0_in_bf16_is_no_baseline(train, tmp_path):
    """To make Adam's moments, DeepSpeed takes a step on zero gradients: its decay and its count."""
    ended = train(
        config_of(0), "--precision", "bf16-mixed", *QUICK, "--lr", 0.01, "--warmup-steps", 1,
        "--output-dir", tmp_path / "run", end_job_on_failure=False,
    )  # fmt: skip
    assert ended.codes == [1, 1] and FIRST in failed_checks(tmp_path / "run")


LONG = ("--seq-len", 32, "--max-steps", 8, "--save-every", 3, "--parity-steps", 0,
        "--eval-every", 100)  # fmt: skip


@full
def test_a_run_resumes_on_other_numbers_of_ranks(train, tmp_path):
    """On the same number bitwise, also when it was killed: test_templates.py."""
    folder = tmp_path / "run"

    def run(folder, ranks, *argv, stage=3, before=small):
        sizes = ("--micro-batch-size", 8 // ranks, "--output-dir", folder)
        return train(config_of(stage), *LONG, *sizes, *argv, ranks=ranks, before=before)

    assert run(folder, 2).codes == [0, 0]
    straight = losses_of(folder)
    done = run(folder, 2, "--resume")
    assert done.codes == [0, 0] and "nothing to do" in done.stdout
    shutil.rmtree(folder / "checkpoints/step-00000008")
    for ranks in (4, 1):
        shutil.copytree(folder, tmp_path / f"on-{ranks}")

    def resumed(script):  # with two processes that convert
        small(script)
        never_draw(script)
        script.workers_for = lambda sizes: 2

    for ranks in (4, 1):
        argv = ("--resume", "--consolidate")
        other = run(tmp_path / f"on-{ranks}", ranks, *argv, before=resumed)
        assert other.codes == [0] * ranks and other.stderr == "", other.stdout + other.stderr
        losses = losses_of(tmp_path / f"on-{ranks}")
        assert losses.keys() == straight.keys()
        assert all(abs(losses[step] - straight[step]) < 1e-5 for step in straight)
        left = [path.name for path in (tmp_path / f"on-{ranks}/checkpoints").iterdir()]
        assert not any("universal" in name or "partial" in name for name in left)
        assert (tmp_path / f"on-{ranks}/checkpoints/latest").read_text() == "step-00000008"
    refused = [
        (("--precision", "bf16-mixed"), 3, "saved with --precision 32-true: take that"),
        ((), 2, "saved by 2 ranks in stage 3: 2 ranks in stage 2 cannot resume from it"),
    ]
    for argv, other, says in refused:
        assert_one_line(run(folder, 2, "--resume", *argv, stage=other), says, "deepspeed_train.py")


@full
def test_the_config_for_a_disk_trains_as_it_stands(train, tmp_path):
    """With parts of weights that are above 2**21 elements, on 2 ranks."""
    if not compiled("async_io"):
        pytest.skip("DeepSpeed's async_io is not compiled")
    if not compiled("cpu_adam"):
        pytest.skip("DeepSpeed's cpu_adam is not compiled")

    def wide(script):
        models.PRESETS["tiny"] = models.TransformerConfig(256, 1024, 1, 16, 16, 4224, 256)

    (tmp_path / "disk").mkdir()
    ended = train(NVME, "--nvme-path", tmp_path / "disk", *QUICK, "--precision", "bf16-mixed",
                  before=wide, timeout_s=200)  # fmt: skip
    assert ended.codes == [0, 0], ended.stdout + ended.stderr


@full
def test_a_damaged_checkpoint_is_passed_over_and_none_at_all_is_one_line(train, tmp_path):
    def run(*argv):
        return train(config_of(2), *LONG, "--output-dir", tmp_path / "run", *argv)

    assert run("--max-steps", 6).codes == [0, 0]
    path = next((tmp_path / "run/checkpoints/step-00000006").glob("zero_pp_rank_1*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    ended = run("--resume")
    assert ended.codes == [0, 0] and "/step-00000003" in ended.stdout
    assert f"altered ({path.name} does not match its checksum)" in ended.stderr
    for path in (tmp_path / "run/checkpoints").glob("step-*/zero_pp_rank_1*"):
        path.write_bytes(path.read_bytes()[:-1000])
    assert_one_line(run("--resume"), "no checkpoint can be used", "deepspeed_train.py")


@full
def test_train_under_slurm(run_script, tmp_path):
    """Ranks as srun names them; a page starts the deepspeed launcher itself."""

    def slurm(rank):
        return {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NTASKS": 2, "SLURM_STEP_ID": 0,
                "SLURM_STEP_TASKS_PER_NODE": 2, "SLURM_JOB_ID": tmp_path.stat().st_ino}  # fmt: skip

    ended = run_script(TRAIN, *QUICK, world_size=2, environ=slurm, before=small)
    assert ended.codes == [0, 0] and "2 ranks started by srun" in ended.stdout, ended.stderr


# Config and flags


def settle_sizes(rank, world_size, folder):
    told = []
    for sizes, flags in (
        ({}, ()),
        ({}, ("--micro-batch-size", 3, "--grad-accum-steps", 5)),
        ({"train_batch_size": 96}, ("--micro-batch-size", 4)),
        ({"train_micro_batch_size_per_gpu": 6}, ("--grad-accum-steps", 1)),
    ):
        (folder / "sizes.json").write_text(json.dumps(changed(**sizes)))
        config, args = settled(folder / "sizes.json", *flags, ranks=4)
        told.append((args.micro_batch_size, args.grad_accum_steps, config["train_batch_size"]))
    config, args = settled(config_of(3), "--lr", 0.5, "--max-steps", 7)
    told += [config["bf16"]["enabled"], config["optimizer"]["params"]["lr"], args.max_steps]
    told += [config["zero_optimization"]["reduce_bucket_size"], config["gradient_clipping"]]
    return told


def test_flags_and_config_settle_what_the_other_leaves_open(on_ranks, tmp_path):
    [told] = on_ranks(settle_sizes, 1, tmp_path)
    assert told == [(8, 1, 32), (3, 5, 60), (4, 6, 96), (6, 1, 24), False, 0.5, 7, 128 * 128, 1.0]


def settle_with_defaults(rank, world_size, folder):
    """Flags have defaults: those that were not given yield to the config."""
    own = changed(train_batch_size=16, gradient_clipping=0.3, bf16={"enabled": True},
                  optimizer={"params": {"lr": 0.1, "betas": "auto"}})  # fmt: skip
    (folder / "own.json").write_text(json.dumps(own))
    told = []
    for words in ((), ("--micro-batch-size", "4"), ("--lr", "0.1"), ("--lr", "0.2"),
                  ("--max-grad-norm", "1"), ("--global-batch-size", "32"),
                  ("--precision", "32-true"), ("--grad-accum-steps", "2")):  # fmt: skip
        try:
            config, args = settled(folder / "own.json", *words)
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
    assert "--global-batch-size 16 is not" in told[7]


def let_hugging_face_fill_in(rank, world_size, folder):
    part.setup.prepare(torch.device("cpu"))
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
            path, "--micro-batch-size", 4, "--grad-accum-steps", 3, "--lr", 1e-4, "--max-steps", 50,
            "--warmup-steps", 4, "--max-grad-norm", 0.5, *["--precision", "bf16-mixed"] * bf16,
            ranks=1,
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


def read_misread(rank, world_size, path, cases):
    """Return what is said about each case; a second line would be a second element."""
    said = []
    for config, argv, _ in cases:
        write_config(path, config)
        try:
            settled(path, *argv, ranks=1)
            said.append(["accepted"])
        except UsageError as error:
            said.append(str(error).splitlines())
    return said


def test_a_config_that_deepspeed_would_misread_is_refused(on_ranks, tmp_path):
    disk = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_size": 4095}
    config = changed(zero_optimization={"stage": 3, "offload_param": disk})
    too_small = (config, (), "buffer_size 4,095 is below 45,056 elements, a rank's part of")
    cases = [*MISREAD, too_small]
    [said] = on_ranks(read_misread, 1, tmp_path / "own.json", cases)
    for (config, argv, says), lines in zip(cases, said, strict=True):
        assert len(lines) == 1 and says in lines[0], (config, argv, lines)


@full
def test_what_deepspeed_refuses_when_the_engine_is_built_is_one_line(train):
    """PyTorch's Adam has no such argument: a TypeError, which no rule here knows of."""
    config = with_torch_adam(json.loads(config_of(2).read_text()))
    config["optimizer"]["params"]["bias_correction"] = True
    assert_one_line(train(config, *QUICK), "argument 'bias_correction'", "deepspeed_train.py")


# Bad input


def no_float16(script):
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: False


NVME = REPO / "03-deepspeed/configs/zero3_offload_nvme_config.json"


BAD = [
    (
        ("--deepspeed_config", NVME, "--nvme-path", REPO, "--output-dir", "runs/never"),
        "with an optimizer on nvme takes other losses than one that never stopped",
        None,
    ),
    (
        ("--precision", "16-mixed"),
        "DeepSpeed cannot train in float16 on this device",
        no_float16,
    ),
    (
        ("--deepspeed_config", NVME),
        "offload_optimizer to nvme needs --nvme-path, a folder on the disk",
        None,
    ),
]


@pytest.mark.parametrize(
    ("argv", "says", "before"), [BAD[0], *(pytest.param(*case, marks=full) for case in BAD[1:])]
)
def test_train_refuses_bad_input(run_script, argv, says, before):
    assert_one_line(run_script(TRAIN, *argv, before=before), says, "deepspeed_train.py")


# launch_deepspeed.sh


def launch(*argv: str, **environ: str):
    command = ["bash", str(REPO / "03-deepspeed/launch_deepspeed.sh"), *argv]
    return run_command(command, REPO, 90, **environ)


def test_the_launcher_prints_what_it_would_run(tmp_path):
    (tmp_path / "hosts").write_text("# two machines\nnode0 slots=8\nnode1 slots=8\n")
    for argv, says in (
        (("local", "--nproc-per-node=3"), "deepspeed --num_gpus=3 "),
        (("local", "--bind-cores-to-rank"), " --bind_cores_to_rank "),
        (("hostfile", "--hostfile", str(tmp_path / "hosts")), "deepspeed --hostfile="),
        (
            ("slurm", "--nnodes", "2", "--nproc-per-node", "8", "--output-dir", "run"),
            "--ntasks-per-node=8 --gpus-per-node",
        ),
    ):
        ended = launch(*argv, "--dry-run", "--max-steps", "9")
        assert ended.codes == [0] and says in ended.stdout and "--max-steps 9" in ended.stdout


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("hostfile", "--hostfile", "/nowhere/hosts"), "/nowhere/hosts cannot be read"),
        (("hostfile", "--hostfile", "LICENSE"), "line 1: must be 'HOST slots=N'"),
        (
            ("slurm", "--nnodes", "1", "--nproc-per-node", "1", "--bind-cores-to-rank"),
            "slurm binds cores by --cpus-per-task",
        ),
    ],
)
def test_the_launcher_refuses_bad_input(argv, says):
    ended = launch(*argv)
    assert ended.codes == [2] and says in ended.stderr and len(ended.stderr.splitlines()) == 1


@pytest.mark.skipif(not GPUS, reason="no GPU on this machine")
def test_train_on_a_gpu(tmp_path):
    """One rank and NCCL: nothing to shard, and the same losses as one process."""
    ended = run_command(
        ["deepspeed", "--num_gpus=1", f"--master_port={free_port()}",
         str(REPO / TRAIN), "--consolidate", "--output-dir", "run"],
        tmp_path, 300, CUDA_VISIBLE_DEVICES=GPUS.split(",")[0],
    )  # fmt: skip
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert results_of(tmp_path / "run")["device"] == "cuda"
