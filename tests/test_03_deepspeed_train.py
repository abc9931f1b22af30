"""deepspeed_train.py: one process's training, stop and resume, configs it refuses."""

import dataclasses
import json
import re
import signal

import helpers_templates as broken
import pytest
import torch.distributed as dist
from conftest import (
    GPUS,
    REPO,
    assert_one_line,
    free_port,
    results_of,
    run_command,
    timeouts_of_groups,
)
from helpers_03 import deepspeed_in_the_parent
from helpers_templates import (
    DDP,
    SMALL_JOB,
    checkpoints_in,
    in_step,
    kill_in,
    kill_in_save,
    loop_of,
    rows_of,
    small_model,
    stop_in,
    write_text,
)

from dist_common import model

SCRIPT = "03-deepspeed/deepspeed_train.py"
NAME = "deepspeed_train.py"
full = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def deepspeed_is_imported():
    """Each fork would import it otherwise, for seconds."""
    with deepspeed_in_the_parent("deepspeed.runtime.zero.muon.original_muon"):
        yield


@pytest.fixture
def train(run_script, tmp_path):
    """Return a function that trains the small job with a config, a dict or its text."""
    text = write_text(tmp_path)

    def run(config, *argv, ranks=2, changes=(), script=SCRIPT, **options):
        words = ("--text-file", text, *SMALL_JOB, *argv)
        if config is not None:
            path = tmp_path / f"config-{len(list(tmp_path.glob('config-*')))}.json"
            text_of = config if isinstance(config, str) else json.dumps(config)
            path.write_text(text_of)
            words += ("--deepspeed_config", path)
        options.setdefault("before", small_model(*changes))
        return run_script(script, *words, world_size=ranks, **options)

    return run


def stage(number, **keys):
    return {"zero_optimization": {"stage": number, **keys}}


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
OFFLOAD_ALL = OFFLOAD | {"offload_param": {"device": "cpu"}}


def assert_ok(ended):
    assert not any(ended.codes), ended.stdout + ended.stderr
    return ended


# The same training as one process


@pytest.mark.parametrize(
    ("config", "ranks", "flags"),
    [
        (stage(2), 3, "--global-batch-size 7 --seed 3"),
        pytest.param(stage(3), 3, "--global-batch-size 2", marks=full),
        pytest.param(
            stage(3),
            2,
            "--precision bf16-mixed --activation-checkpointing full",
            marks=full,
        ),
        pytest.param(stage(3, **OFFLOAD_ALL), 2, "--global-batch-size 8", marks=full),
    ],
)
def test_a_correct_run_passes(train, config, ranks, flags):
    """Also where ranks divide nothing evenly, and where a rank has no sample."""
    ended = assert_ok(train(config, "--max-steps", 3, *flags.split(), ranks=ranks))
    assert not ended.stderr
    assert re.search(r"^OK: 4 checks passed, loss ", ended.stdout, re.M)


@full
@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_losses_of_ddp_over_20_steps(train, tmp_path, number):
    words = ("--global-batch-size", 12, "--max-steps", 20, "--no-self-check")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert_ok(train(stage(number), *words, "--output-dir", ours))
    assert_ok(train(None, *words, "--output-dir", theirs, script=DDP))
    assert rows_of(ours) == pytest.approx(rows_of(theirs), abs=1e-5)
    assert rows_of(ours)[20] < 0.7 * rows_of(ours)[1]


def reduce_after_each_micro_batch(script):
    """Say in stage 1 that each micro-batch is the last one of its step."""
    from deepspeed import DeepSpeedEngine

    original = DeepSpeedEngine.set_gradient_accumulation_boundary
    DeepSpeedEngine.set_gradient_accumulation_boundary = lambda self, _: original(
        self, True
    )


def divide_by_the_micro_batches_again(script):
    from deepspeed import DeepSpeedEngine

    backward = DeepSpeedEngine.backward
    DeepSpeedEngine.backward = lambda self, loss, **more: backward(self, loss / 2)


def leave_out_clipping(script):
    read = script.read_config
    script.read_config = lambda *given: read(*given) | {"gradient_clipping": 0.0}


@pytest.mark.parametrize(
    ("number", "change", "flags", "error"),
    [
        (2, leave_out_clipping, "", "clipped gradient"),
        pytest.param(
            2, divide_by_the_micro_batches_again, "", "gradient norm", marks=full
        ),
        pytest.param(
            1,
            reduce_after_each_micro_batch,
            "--global-batch-size 8",
            "gradient norm",
            marks=full,
        ),
        pytest.param(
            2, broken.set_the_rate_after_the_step, "", "weight change", marks=full
        ),
        (2, broken.count_local_tokens, "", "loss"),
        pytest.param(
            3, broken.drop_a_micro_batch, "--global-batch-size 8", "loss", marks=full
        ),
    ],
)
def test_sabotage_fails_the_self_check(train, number, change, flags, error):
    ended = train(stage(number), "--max-steps", 2, *flags.split(), changes=[change])
    assert 1 in ended.codes, ended.stdout + ended.stderr
    assert ended.stderr.startswith(f"{NAME}: error: self-check failed"), ended.stderr
    match = re.search(rf"\b{error} ([\d.e+-]+)", ended.stderr)
    tolerances = {"loss": 1e-5, "gradient norm": 1e-4, "clipped gradient": 1e-3}
    assert float(match[1]) > 10 * tolerances.get(error, 0.01), ended.stderr


def test_its_loop_has_the_skeleton_of_ddp():
    """DeepSpeed's step also clips the gradient, updates the weights and clears it."""
    shared = {"range", "step", "next", "accumulate_gradient", "set_lr", "lr_at", "add"}
    shared |= {"first_two_steps", "every", "evaluate", "evaluation", "requested"}
    shared |= {"flush", "save"}
    ours, theirs = (
        [name for name in loop_of(path) if name in shared] for path in (SCRIPT, DDP)
    )
    assert ours == theirs and set(ours) == shared


# Stop, kill, resume


def straight_run(train, config, folder, *flags):
    words = ("--global-batch-size", 12, "--eval-every", 4, "--save-every", 2)
    return assert_ok(train(config, *words, *flags, "--output-dir", folder))


@full
@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (stage(2), ()),
        (stage(3), ("--precision", "bf16-mixed")),
    ],
)
def test_a_run_that_is_stopped_or_killed_resumes_bitwise(
    train, tmp_path, config, flags
):
    """Three signals to one rank; kills in a step, in a save, and twice in a row."""
    straight, stopped, killed = (tmp_path / name for name in ("a", "b", "c"))
    straight_run(train, config, straight, *flags)
    words = ("--global-batch-size", 12, "--eval-every", 4, "--resume", *flags)
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    for step, number in zip((1, 3, 6), signals, strict=True):
        change = stop_in(step, number)
        more = ("--log-every", 50, "--save-every", 5000, "--output-dir", stopped)
        ended = assert_ok(train(config, *words, *more, changes=[change]))
        assert f"after step {step}, stopped" in ended.stdout
    assert_ok(train(config, *words, "--output-dir", stopped))
    more = ("--save-every", 2, "--output-dir", killed)
    for change in (kill_in(1), kill_in(5), kill_in_save(6), kill_in_save(6)):
        ended = train(config, *words, *more, changes=[change])
        assert set(ended.codes) <= {-signal.SIGKILL, -signal.SIGTERM}, ended.stderr
    assert checkpoints_in(killed)[-1] == "step-00000004"
    ended = assert_ok(train(config, *words, *more))
    assert f"resuming from {killed}/checkpoints/step-00000004" in ended.stdout
    assert checkpoints_in(killed) == ["step-00000006", "step-00000008"]
    for folder in (stopped, killed):
        assert rows_of(folder) == rows_of(straight), "bitwise"
        assert rows_of(folder, "test_loss") == rows_of(straight, "test_loss")


@pytest.mark.parametrize(
    ("first", "later"),
    [
        pytest.param(
            stage(1), [(stage(1), 3), (stage(2), 1), (stage(2), 2)], marks=full
        ),
        pytest.param(
            stage(3),
            [(stage(3), 3), (stage(3), 1), (stage(2, **OFFLOAD), 2)],
            marks=full,
        ),
    ],
)
def test_other_ranks_and_stages_resume(train, tmp_path, first, later):
    """Also 3 ranks, which do not divide the weights."""
    straight, moved = tmp_path / "a", tmp_path / "b"
    straight_run(train, first, straight)
    words = ("--save-every", 2, "--resume", "--output-dir", moved)
    given = ("--global-batch-size", 12)
    assert_ok(train(first, *words, *given, changes=[stop_in(2)]))
    for number, (config, ranks) in enumerate(later, 2):
        changes = [stop_in(2 * number)] if number <= len(later) else []
        assert_ok(train(config, *words, ranks=ranks, changes=changes))
    for step, loss in rows_of(straight).items():
        assert rows_of(moved)[step] == pytest.approx(loss, rel=1e-5)


@full
@pytest.mark.parametrize("number", [2, 3])
def test_tied_embeddings_train_and_resume(train, tmp_path, number):
    def tie(script):
        tied = dataclasses.replace(broken.NARROW, tied_embeddings=True)
        model.PRESETS["tiny"] = tied

    straight, moved = tmp_path / "a", tmp_path / "b"
    words = ("--global-batch-size", 12, "--save-every", 2, "--resume")
    words += ("--output-dir",)
    ended = assert_ok(train(stage(number), *words, straight, changes=[tie]))
    assert "OK: 4 checks passed" in ended.stdout
    assert_ok(train(stage(number), *words, moved, changes=[tie, stop_in(4)]))
    assert_ok(train(stage(number), *words, moved, ranks=3, changes=[tie]))
    for step, loss in rows_of(straight).items():
        assert rows_of(moved)[step] == pytest.approx(loss, rel=1e-5)


@full
def test_it_continues_what_ddp_saved(train, tmp_path):
    straight, moved = tmp_path / "a", tmp_path / "b"
    straight_run(train, stage(3), straight)
    words = ("--global-batch-size", 12, "--save-every", 2, "--output-dir", moved)
    assert_ok(train(None, *words, script=DDP, changes=[stop_in(4)]))
    assert_ok(train(stage(3), *words, "--resume", ranks=3))
    for step, loss in rows_of(straight).items():
        assert rows_of(moved)[step] == pytest.approx(loss, rel=1e-5)


def forget_the_moments(script):
    set_whole = script.set_whole

    def set_weights_only(weight, value, moment=None):
        if not moment:
            set_whole(weight, value)

    script.set_whole = set_weights_only


def forget_the_step_count(script):
    load = script.EngineCheckpoints.load_state
    script.EngineCheckpoints.load_state = lambda self, folder, facts: load(
        self, folder, facts | {"step": 1}
    )


@full
@pytest.mark.parametrize("change", [forget_the_moments, forget_the_step_count])
def test_forgotten_state_changes_the_losses_of_a_resumed_run(train, tmp_path, change):
    straight, stopped = tmp_path / "a", tmp_path / "b"
    straight_run(train, stage(2), straight)
    words = ("--global-batch-size", 12, "--save-every", 2, "--resume")
    words += ("--output-dir", stopped)
    assert_ok(train(stage(2), *words, changes=[stop_in(4)]))
    assert_ok(train(stage(2), *words, changes=[change]))
    assert abs(rows_of(stopped)[8] - rows_of(straight)[8]) > 1e-3


def allow_round_robin(script):
    read = script.read_config

    def read_and_set(*given):
        config = read(*given)
        config["zero_optimization"]["round_robin_gradients"] = True
        return config

    script.read_config = read_and_set


@full
def test_weights_that_land_at_the_wrong_place_end_a_resumed_run(train, tmp_path):
    """Round robin orders a rank's weights differently than DeepSpeed's functions do."""
    words = ("--global-batch-size", 12, "--save-every", 2, "--resume", "--max-steps", 2)
    words += ("--output-dir", tmp_path / "run", "--no-self-check")
    assert_ok(train(stage(2), *words))
    ended = train(
        stage(2), *words, "--max-steps", 3, ranks=3, changes=[allow_round_robin]
    )
    assert 1 in ended.codes
    assert re.match(
        rf"{NAME}: error: \S+ differs from .*step-00000002 after", ended.stderr
    )
    assert len(ended.stderr.splitlines()) == 1, ended.stderr


@full
def test_a_full_disk_ends_the_run_in_one_line(train, tmp_path):
    """Rank 1 can write only 20 kB. Rank 0 does not wait for rank 1."""
    folder = tmp_path / "run"
    words = ("--save-every", 2, "--output-dir", folder)
    ended = train(stage(2), *words, changes=[broken.fill_the_disk])
    assert_one_line(ended, "checkpoints/step-00000004 (rank 1): File too large", NAME)
    assert checkpoints_in(folder) == ["step-00000002"]


# Config


@pytest.mark.skipif(not hasattr(dist, "set_timeout"), reason="needs torch 2.14")
@pytest.mark.parametrize("number", [2, pytest.param(3, marks=full)])
def test_the_timeout_reaches_all_groups(train, tmp_path, number):
    def note_timeouts(script):
        in_step(2, lambda: print("timeouts", timeouts_of_groups()))(script)

    words = ("--timeout", 77, "--output-dir", tmp_path / "run")
    ended = assert_ok(train(stage(number), *words, changes=[note_timeouts]))
    assert "timeouts {77.0}\n" in ended.stdout


@full
def test_each_stage_shards_what_it_should(train, tmp_path):
    """Count the numbers that a rank holds after step 1, with 4 ranks."""

    def note_sizes(script):
        start = script.start_engine

        def start_and_note(*given):
            engine = start(*given)

            def note():
                states = given[2].state.values()
                moments = sum(state["exp_avg"].numel() for state in states)
                held = sum(weight.numel() for weight in engine.module.parameters())
                print(f"moments {moments} weights {held}")

            in_step(1, note, rank=0)(script)
            return engine

        script.start_engine = start_and_note

    total = broken.NARROW.num_parameters()
    for number, expected in ((1, total), (2, total), (3, 0)):
        config = stage(number, stage3_param_persistence_threshold=0)
        ended = assert_ok(
            train(config, "--max-steps", 2, ranks=4, changes=[note_sizes])
        )
        moments, weights = map(
            int, re.search(r"moments (\d+) weights (\d+)", ended.stdout).groups()
        )
        assert weights == expected
        assert total / 4 <= moments <= total / 4 + 64, "padding"


STAGES = "trains in the stages 1, 2 and 3, with offload to cpu or none"
ROUND_ROBIN = "zero_optimization.round_robin_gradients must be False here"
REFUSED = [
    (None, "zero_none.json: [Errno 2] No such file"),
    (stage(2, round_robin_gradients=True), f'{ROUND_ROBIN}, or "auto", not True'),
    (stage(3, overlap_com=True), "DeepSpeed refuses the config: 1 validation error"),
    ('{"bf16" true}', "Expecting ':' delimiter: line 1 column 9"),
    ({}, STAGES),
    (stage(0), STAGES),
    (stage(3, offload_param={"device": "nvme", "nvme_path": "/tmp"}), STAGES),
    (
        stage(2) | {"train_micro_batch_size_per_gpu": 4},
        "train_micro_batch_size_per_gpu must be 2 here",
    ),
    (stage(2) | {"train_batch_size": 16}, "train_batch_size must be 2 here"),
    (
        stage(2) | {"gradient_accumulation_steps": 8},
        "gradient_accumulation_steps must be 1 here",
    ),
    (stage(2) | {"gradient_clipping": 0.5}, "gradient_clipping must be 1.0 here"),
    (stage(2) | {"bf16": {"enabled": True}}, "bf16.enabled must be False here"),
    (stage(2) | {"fp16": {"enabled": True}}, "fp16.enabled must be False here"),
    (
        stage(2) | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        "torch_autocast.enabled must be False here",
    ),
]


@pytest.mark.parametrize(
    ("config", "says"),
    [*REFUSED[:3], *(pytest.param(*row, marks=full) for row in REFUSED[3:])],
)
def test_a_config_that_it_cannot_follow_gets_one_line(train, config, says):
    flags = () if config is not None else ("--deepspeed_config", "zero_none.json")
    assert_one_line(train(config, *flags, ranks=1), says, NAME)


@full
def test_sections_that_it_does_not_use_are_named(train):
    config = stage(1) | {
        "optimizer": {"type": "Lion"},
        "scheduler": {"type": "OneCycle"},
    }
    ended = assert_ok(train(config, "--max-steps", 2))
    for section in ("optimizer", "scheduler"):
        line = f"the config's {section} is not used: the script has its own"
        assert line in ended.stdout


@full
def test_the_usual_deepspeed_command_trains_and_compiles_nothing(tmp_path):
    """DeepSpeed would compile an all-reduce: `import_deepspeed` tells it not to."""
    command = ["deepspeed", "--num_gpus=2", f"--master_port={free_port()}", SCRIPT]
    command += ["--deepspeed", "--deepspeed_config"]
    command += ["03-deepspeed/configs/zero2_config.json", "--max-steps", "2"]
    ended = run_command(
        command, REPO, 300, TORCH_EXTENSIONS_DIR=str(tmp_path), OMP_NUM_THREADS="1"
    )
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert "2 ranks started by deepspeed, cpu with gloo" in ended.stdout
    assert "OK: 4 checks passed" in ended.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not GPUS, reason="no GPU on this machine")
def test_it_runs_on_a_gpu(tmp_path):
    """One rank and NCCL: nothing to shard, and the same losses as one process."""
    command = ["deepspeed", "--num_gpus=1", f"--master_port={free_port()}", SCRIPT]
    command += ["--output-dir", str(tmp_path / "run")]
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS.split(",")[0])
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert results_of(tmp_path / "run")["device"] == "cuda"


# launch_deepspeed.sh


def launch(*argv):
    command = ["bash", str(REPO / "03-deepspeed" / "launch_deepspeed.sh"), *argv]
    return run_command(command, REPO, 90)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("local", "--nproc-per-node=3"), "deepspeed --num_gpus=3 "),
        (("local", "--bind-cores-to-rank"), " --bind_cores_to_rank "),
        (("hostfile", "--hostfile", "HOSTS"), "deepspeed --hostfile="),
        (
            (
                *("slurm", "--nnodes", "2", "--nproc-per-node", "8"),
                *("--output-dir", "run"),
            ),
            "--ntasks-per-node=8 --gpus-per-node",
        ),
    ],
)
def test_the_launcher_prints_what_it_would_run(tmp_path, argv, says):
    hosts = tmp_path / "hosts"
    hosts.write_text("# two machines\nnode0 slots=8\nnode1 slots=8\n")
    words = [str(hosts) if word == "HOSTS" else word for word in argv]
    ended = launch(*words, "--dry-run", "--max-steps", "9")
    assert ended.codes == [0] and says in ended.stdout
    assert "--max-steps 9" in ended.stdout


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("hostfile", "--hostfile", "/nowhere/hosts"), "/nowhere/hosts cannot be read"),
        (("hostfile", "--hostfile", "LICENSE"), "line 1: must be 'HOST slots=N'"),
        (
            (
                *("slurm", "--nnodes", "1", "--nproc-per-node", "1"),
                "--bind-cores-to-rank",
            ),
            "slurm binds cores by --cpus-per-task",
        ),
    ],
)
def test_the_launcher_refuses_bad_input(argv, says):
    ended = launch(*argv)
    assert ended.codes == [2] and says in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
