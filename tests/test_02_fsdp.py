"""Module 02: however it is sharded, the same losses, and no more held or sent than said."""

import dataclasses
from pathlib import Path

import pytest
import torch
from conftest import GPUS, REPO, assert_one_line, results_of, run_command
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from dist_common import models

BASICS = "02-fsdp/fsdp_basics.py"
SCRATCH = "02-fsdp/fsdp_from_scratch.py"
SMALL = ("--seq-len", 32, "--micro-batch-size", 4, "--max-steps", 3)
ALL = ("full", "grad-op", "hybrid", "none")
TINY = models.PRESETS["tiny"]
NARROW = models.TransformerConfig(256, 32, 2, 4, 2, 88, 256)  # takes half of tiny's time
full = pytest.mark.full
dry_runs = pytest.mark.xdist_group("dry-runs")  # one worker imports what they take


def narrow(script):
    models.PRESETS["tiny"] = NARROW


def narrow_and(sabotage):
    def before(script):
        narrow(script)
        sabotage(script)

    return before


def measured_in(folder: Path) -> dict[str, float]:
    return {check["name"]: check["measured"] for check in results_of(folder)["checks"]}


# fsdp_basics.py


@pytest.mark.parametrize(
    ("world_size", "options", "before"),
    [
        (4, (), narrow),
        (2, ("--precision", "bf16-mixed"), narrow),
        pytest.param(2, (), None, marks=full),
        pytest.param(4, ("--precision", "bf16-mixed"), None, marks=full),
        pytest.param(
            2, ("--api", "fsdp1", "--auto-wrap", "size", "--precision", "bf16-mixed"), None,
            marks=full,
        ),
        pytest.param(4, ("--api", "fsdp1"), None, marks=full),
    ],
)  # fmt: skip
def test_every_sharding_mode_trains_as_one_process(
    run_script, tmp_path, world_size, options, before
):
    """Losses, bytes held, collectives and bytes sent; the script's checks state the tolerances."""
    ended = run_script(
        BASICS, "--sharding", *ALL, *options, *SMALL, "--output-dir", tmp_path / "run",
        world_size=world_size, before=before,
    )  # fmt: skip
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    checks = results_of(tmp_path / "run")["checks"]
    assert len(checks) == 8 * len(ALL)
    if world_size == 4 and not options:
        weights = 4 * (NARROW if before else TINY).num_parameters()
        measured = measured_in(tmp_path / "run")
        for sharding, parts in zip(ALL, (4, 4, 2, 1), strict=True):
            for kind, copies in (("parameters", 1), ("gradients", 1), ("Adam moments", 2)):
                held = measured[f"fsdp2 {sharding}: bytes of {kind}"]
                assert abs(held / (copies * weights / parts) - 1) < 0.01, (sharding, kind)
    losses = results_of(tmp_path / "run")["metrics"].values()
    least = 5.5 if before else 5.4
    assert max(losses) < least, "they start at ln 256 = 5.55, and would prove little there"


@pytest.mark.parametrize(
    ("world_size", "sharding", "api", "before"),
    [
        (3, ALL[:2], "fsdp2", narrow),
        pytest.param(1, ALL, "fsdp2", None, marks=full),
        pytest.param(1, ALL, "fsdp1", None, marks=full),
    ],
)
def test_one_process_and_a_number_of_ranks_that_divides_no_dimension(
    run_script, world_size, sharding, api, before
):
    ended = run_script(
        BASICS, "--sharding", *sharding, "--api", api, *SMALL, world_size=world_size, before=before
    )
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr


def test_a_weight_is_a_shard_but_for_the_time_it_is_needed(run_script):
    """The one difference between full and grad-op: between forward and backward."""
    for sharding, after_forward in (("full", "DTensor, S(0)"), ("grad-op", "Parameter")):
        ended = run_script(BASICS, "--sharding", sharding, *SMALL, world_size=2)
        lines = [line for line in ended.stdout.splitlines() if "  x " not in line]
        kinds = {line[:31].strip(): line for line in lines if "128 x" in line or "64 x" in line}
        assert "Parameter" in kinds["in the forward of block 0"], ended.stdout
        assert after_forward in kinds["after the forward"], ended.stdout
        assert "DTensor, S(0)" in kinds["after the backward"], ended.stdout


def one_unit_for_all(script):
    sharded = script.fully_shard
    script.fully_shard = lambda module, **options: (
        sharded(module, **options) if isinstance(module, script.Transformer) else module
    )


def keep_replicas_apart(script):
    arranged = script.mesh_of
    script.mesh_of = lambda *arguments: arranged(*arguments)["shard"]


def shift_a_shard(script):
    sharded = script.shard

    def broken(*args):
        model = sharded(*args)
        local = model.blocks[1].up.weight.to_local().detach()
        local.copy_(local.roll(1, 0))
        return model

    script.shard = broken


def keep_what_was_gathered(script):
    sharded = script.fully_shard

    def broken(module, **options):
        return sharded(module, **{**options, "reshard_after_forward": False})

    script.fully_shard = broken


def shard_nothing(script):
    script.shard = lambda model, *_: model


HELD = [f"bytes of {kind}" for kind in ("parameters", "gradients", "Adam moments")]


@pytest.mark.parametrize(
    ("sabotage", "sharding", "failing"),
    [
        (
            shard_nothing,
            "full",
            [*HELD, "all-gathers", "reduce-scatters", "bytes sent", "largest error of a loss"],
        ),
        (keep_replicas_apart, "hybrid", ["all-reduces", "bytes sent", "largest error of a loss"]),
        pytest.param(
            one_unit_for_all, "full", ["all-gathers", "reduce-scatters", "bytes sent"], marks=full
        ),
        pytest.param(shift_a_shard, "full", ["largest error of a loss"], marks=full),
        pytest.param(keep_what_was_gathered, "full", ["all-gathers", "bytes sent"], marks=full),
    ],
)
def test_sabotage_of_fsdp_fails_a_check(run_script, tmp_path, sabotage, sharding, failing):
    ended = run_script(
        BASICS, "--sharding", sharding, *SMALL, "--output-dir", tmp_path / "run",
        world_size=4 if sharding == "hybrid" else 2, before=narrow_and(sabotage),
    )  # fmt: skip
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    checks = results_of(tmp_path / "run")["checks"]
    assert [c["name"].split(": ")[1] for c in checks if not c["ok"]] == failing


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    [
        (2, ("--sharding", "ZERO3"), "must be one of full, grad-op, hybrid, none, FULL_SHARD, "),
        (3, ("--sharding", "hybrid"), "--shard-group-size 2 does not divide 3 ranks"),
        (4, ("--sharding", "HYBRID_SHARD", "--shard-group-size", "3"), "3 does not divide 4 ranks"),
        (1, ("--seq-len", "257"), "--seq-len must be at most 256"),
    ],
)
def test_basics_refuses_bad_input(run_script, world_size, argv, says):
    ended = run_script(BASICS, *argv, world_size=world_size)
    assert_one_line(ended, says, "fsdp_basics.py")


# fsdp_from_scratch.py


@pytest.mark.parametrize(
    ("world_size", "before"),
    [
        (2, narrow),
        (3, narrow),
        *(pytest.param(world_size, None, marks=full) for world_size in (1, 4)),
    ],
)
def test_fsdp_from_scratch_is_fully_shard(run_script, tmp_path, world_size, before):
    ended = run_script(
        SCRATCH, "--seq-len", 32, "--output-dir", tmp_path / "run", world_size=world_size,
        before=before,
    )  # fmt: skip
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    if world_size in (2, 4):  # which divide every dimension: no padding, the same traffic
        ours, theirs = (
            [line.split()[-6:-1] for line in ended.stdout.splitlines() if line.startswith(way)]
            for way in ("from scratch", "fully_shard")
        )
        gathers = 2 * (NARROW if before else TINY).num_layers + 1
        assert ours[0][1:] == theirs[0][1:] and ours[0][1] == str(gathers), ended.stdout


def keep_own_gradient(script):
    script.reduce_scatter = lambda part, whole: part.copy_(
        whole.chunk(script.dist.get_world_size())[script.dist.get_rank()]
    )


def take_the_next_shard(script):
    made = script.Unit.__init__

    def broken(self, parameters):
        made(self, parameters)
        if len(parameters) > 3:  # not the rest
            self.shard.copy_(self.shard.roll(1))

    script.Unit.__init__ = broken


def keep_a_third_moment(script):
    made = torch.optim.AdamW

    def with_maximum(weights, **options):
        units = NARROW.num_layers + 1  # one weight each: its shard
        return made(weights, amsgrad=len(weights) == units, **options)

    torch.optim.AdamW = with_maximum


def never_free(script):
    script.Unit.free = lambda self: None


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (keep_own_gradient, {"reduce-scatters", "bytes handed to reduce", "largest difference"}),
        pytest.param(take_the_next_shard, {"largest difference"}, marks=full),
        (keep_a_third_moment, {"bytes held"}),
        (never_free, {"all-gathers", "bytes handed", "most bytes", "largest difference"}),
    ],
)
def test_sabotage_of_fsdp_from_scratch_fails_a_check(run_script, tmp_path, sabotage, failing):
    ended = run_script(
        SCRATCH, "--seq-len", 32, "--output-dir", tmp_path / "run", world_size=2,
        before=narrow_and(sabotage),
    )  # fmt: skip
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert {next((f for f in failing if name.startswith(f)), name) for name in failed} == failing


# fsdp_transformer.py

TRANSFORMER = "02-fsdp/fsdp_transformer.py"
FEW = ("--seq-len", 32, "--micro-batch-size", 2, "--max-steps", 4, "--lr", 0.003)


def translate_without_a_compiler(script):
    """Trace as torch.compile does and run the trace, instead of waiting for C++ to be built."""
    plain = torch.nn.Module.compile
    torch.nn.Module.compile = lambda module: plain(module, backend="aot_eager")


@pytest.mark.parametrize(
    ("world_size", "options", "before"),
    [
        (2, ("--activation-checkpointing", "full", "--prefetch", 2), narrow),
        (2, ("--activation-checkpointing", 2, "--sharding", "grad-op"), narrow),
        (2, ("--activation-checkpointing", "selective", "--precision", "bf16-mixed"), narrow),
        (2, ("--cpu-offload", "--grad-accum-steps", 2, "--max-grad-norm", 0.1), narrow),
        (2, ("--grad-accum-steps", 3, "--accumulate", "whole"), narrow),
        (3, ("--grad-accum-steps", 3, "--accumulate", "gathered"), narrow),
        *(
            pytest.param(world_size, options, before, marks=full)
            for world_size, options, before in (
                (1, (), None),
                (2, ("--grad-accum-steps", 2, "--accumulate", "gathered", "--sharding", "grad-op"),
                 narrow),
                (4, ("--sharding", "hybrid", "--shard-group-size", 2, "--grad-accum-steps", 2),
                 None),
                (2, ("--compile", "--activation-checkpointing", "full"),
                 narrow_and(translate_without_a_compiler)),
            )
        ),
    ],
)  # fmt: skip
def test_whatever_saves_memory_trains_as_one_process(
    run_script, tmp_path, world_size, options, before
):
    ended = run_script(
        TRANSFORMER, *FEW, *options, "--output-dir", tmp_path / "run",
        world_size=world_size, before=before,
    )  # fmt: skip
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    assert "largest error of a loss" in measured_in(tmp_path / "run")


@pytest.fixture
def dry_run_imports():
    """What a dry run imports, and takes seconds: here, so that no fork has to."""
    import torch.distributed._tools.fsdp2_mem_tracker  # noqa: F401


def drop_a_micro_batch(script):
    step = script.train_step
    script.train_step = lambda model, optimizer, micro_batches, args: step(
        model, optimizer, micro_batches[:1] if hasattr(model, "unshard") else micro_batches, args
    )


def clip_to_the_norm_of_a_part(script):
    script.dist.all_reduce, real = (
        lambda tensor, *args, group=None, **options: (
            None if group is not None else real(tensor, *args, **options)
        ),
        script.dist.all_reduce,
    )


def reduce_every_micro_batch(script):
    script.FSDPModule = type(None)


def draw_apart(script):
    draw = script.draw_weights
    script.draw_weights = lambda model, device, seed: draw(
        model, device, seed + script.dist.get_rank() * hasattr(model, "unshard")
    )


def forget_activation_checkpointing_in_the_dry_run(script):
    predict = script.predict

    def broken(args, *rest):
        args.activation_checkpointing = "none"
        return predict(args, *rest)

    script.predict = broken


@pytest.mark.parametrize(
    ("sabotage", "options", "failing"),
    [
        (drop_a_micro_batch, ("--grad-accum-steps", 2), {"all-gathers", "reduce-scatters", "loss"}),
        (clip_to_the_norm_of_a_part, ("--max-grad-norm", 0.1), {"all-reduces", "loss"}),
        pytest.param(
            reduce_every_micro_batch,
            ("--grad-accum-steps", 2, "--accumulate", "whole"),
            {"reduce-scatters"},
            marks=full,
        ),
        pytest.param(draw_apart, (), {"loss"}, marks=full),
        pytest.param(
            forget_activation_checkpointing_in_the_dry_run,
            ("--activation-checkpointing", "full", "--check-dry-run", "--seq-len", 128),
            {"peak"},
            marks=dry_runs,
        ),
    ],
)
def test_sabotage_of_the_transformer_fails_a_check(
    run_script, tmp_path, request, sabotage, options, failing
):
    dry = "--check-dry-run" in options
    if dry:
        request.getfixturevalue("dry_run_imports")
    ended = run_script(
        TRANSFORMER, *FEW, *options, "--output-dir", tmp_path / "run", world_size=2,
        before=sabotage if dry else narrow_and(sabotage),
    )  # fmt: skip
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    failed = {c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]}
    assert all(any(word in name for name in failed) for word in failing), failed
    assert len(failed) == len(failing), failed


@dry_runs
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, ()),
        *(
            pytest.param(*case, marks=full)
            for case in (
                (4, ("--sharding", "hybrid", "--shard-group-size", 2)),
                (2, ("--activation-checkpointing", "selective")),
                (2, ("--precision", "bf16-mixed", "--grad-accum-steps", 2, "--accumulate",
                     "gathered")),
            )
        ),
    ],
)  # fmt: skip
def test_a_dry_run_predicts_the_peak_of_a_real_run(
    run_script, tmp_path, dry_run_imports, world_size, options
):
    """To 5 percent, on a batch whose activations are larger than what gloo's threads free late."""
    large = ("--seq-len", 128, "--micro-batch-size", 8, "--max-steps", 2, "--check-dry-run")
    ended = run_script(
        TRANSFORMER, *large, *options, "--output-dir", tmp_path / "run", world_size=world_size
    )
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    if options:
        return
    real = 1e6 * measured_in(tmp_path / "run")["peak of MB allocated"]
    dry = run_script(
        TRANSFORMER, *large[:4], "--dry-run", "--world-size", world_size,
        "--output-dir", tmp_path / "dry", environ={},
    )  # fmt: skip
    assert dry.codes == [0], dry.stderr
    predicted = results_of(tmp_path / "dry")["metrics"]["Total_gib"] * 2**30
    assert abs(predicted / real - 1) < 0.05


@full
@dry_runs
def test_a_dry_run_knows_what_each_saving_saves(run_script, tmp_path, dry_run_imports):
    def classes(name, *options):
        ended = run_script(
            TRANSFORMER, "--dry-run", "--seq-len", 256, *options,
            "--output-dir", tmp_path / name, environ={}, before=narrow,
        )  # fmt: skip
        assert ended.codes == [0], ended.stdout + ended.stderr
        return results_of(tmp_path / name)["metrics"]

    eight_ranks = {
        kind: classes(kind, "--activation-checkpointing", kind)
        for kind in ("none", "selective", "2", "full")
    }
    total = {kind: held["Total_gib"] for kind, held in eight_ranks.items()}
    assert total["none"] > total["2"] > total["full"]
    assert total["none"] > total["selective"] > total["full"]
    four_ranks = classes("four-ranks", "--world-size", 4)["Sharded Param_gib"]
    assert four_ranks == pytest.approx(2 * eight_ranks["none"]["Sharded Param_gib"], rel=0.01)


@dry_runs
def test_a_dry_run_that_shards_over_too_few_ranks_fails(run_script, tmp_path, dry_run_imports):
    def two_of_eight(script):
        arrange = script.init_device_mesh
        script.mesh_of = lambda *_: arrange("cpu", (4, 2), mesh_dim_names=("replicate", "shard"))

    ended = run_script(
        TRANSFORMER, "--dry-run", "--output-dir", tmp_path / "run", environ={},
        before=narrow_and(two_of_eight),
    )  # fmt: skip
    assert ended.codes == [1], ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert failed == ["bytes of Sharded Param", "bytes of OptState"]


def test_tied_embeddings_stay_tied(run_script, tmp_path):
    """After the model got its memory: as one process, which ties them itself."""

    def tie(script):
        models.PRESETS["tiny"] = dataclasses.replace(NARROW, tied_embeddings=True)

    ended = run_script(TRANSFORMER, *FEW, world_size=2, before=tie)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    [
        (2, ("--sharding", "FULL"), "--sharding: invalid choice: 'FULL'"),
        (3, ("--sharding", "hybrid", "--shard-group-size", 2), "2 does not divide 3 ranks"),
        (1, ("--activation-checkpointing", "1"), "none, full, selective, or k of at least 2"),
        (1, ("--seq-len", "257"), "--seq-len must be at most 256"),
        (2, ("--preset", "llama3-70b"), "--preset llama3-70b needs 1,051.3 GiB for weights, "),
        (1, ("--dry-run", "--cpu-offload"), "leave out --cpu-offload"),
        (2, ("--dry-run",), "--dry-run is one process: start it with python"),
        (1, ("--check-dry-run", "--max-steps", "1"), "--max-steps of at least 2"),
    ],
)
def test_transformer_refuses_bad_input(run_script, world_size, argv, says):
    ended = run_script(TRANSFORMER, *argv, world_size=world_size)
    assert_one_line(ended, says, "fsdp_transformer.py")


# what goes wrong (the guide's last part)


def gather_on_one_rank_only(script):
    trained = script.train

    def broken(model, optimizer, batches):
        losses = trained(model, optimizer, batches)
        if script.dist.get_rank() == 0 and isinstance(
            optimizer.param_groups[0]["params"][0], DTensor
        ):
            model.head.weight.full_tensor()
        return losses

    script.train = broken


@full
def test_gathering_on_one_rank_only_hangs_until_the_timeout(run_script):
    ended = run_script(BASICS, *SMALL, "--timeout", 5, world_size=2, before=gather_on_one_rank_only)
    assert 1 in ended.codes and "lost contact with another rank" in ended.stderr, ended.stderr


def make_the_optimizer_first(script):
    """The parameters that it knows are not those that train, once the model is sharded."""
    sharded, made = script.shard, script.adam

    def broken(model, *rest):
        optimizer = made(model)
        script.adam = lambda _: optimizer
        return sharded(model, *rest)

    script.shard = broken
    script.watch = lambda model, api, _, batch: script.loss_of(model, batch).backward() or []


def test_an_optimizer_made_before_sharding_trains_nothing(run_script, tmp_path):
    ended = run_script(
        BASICS, *SMALL, "--output-dir", tmp_path / "run", world_size=2,
        before=narrow_and(make_the_optimizer_first),
    )  # fmt: skip
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert failed == ["fsdp2 full: bytes of Adam moments", "fsdp2 full: largest error of a loss"]


def mix_frozen_and_trained(rank, world_size):
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    layers[0].requires_grad_(False)
    with pytest.raises(ValueError, match="uniform `requires_grad`"):
        FullyShardedDataParallel(layers, device_id=torch.device("cpu"))
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    FullyShardedDataParallel(layers, **options)


def test_fsdp1_takes_no_frozen_weights_among_trained_ones(on_ranks):
    on_ranks(mix_frozen_and_trained, 2)


# on a GPU: one process, NCCL


@full
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
@pytest.mark.parametrize(
    "command",
    [
        (BASICS, "--sharding", *ALL),
        (BASICS, "--precision", "bf16-mixed", "--api", "fsdp1"),
        (SCRATCH,),
        (TRANSFORMER, "--precision", "bf16-mixed", "--activation-checkpointing", "selective"),
        (TRANSFORMER, "--preset", "124m", "--max-steps", "12"),
        (TRANSFORMER, "--cpu-offload", "--grad-accum-steps", "2", "--accumulate", "whole"),
        ("02-fsdp/fsdp_lora.py",),
        ("02-fsdp/fsdp_checkpoint.py",),
    ],
)
def test_scripts_run_on_a_gpu(command):
    ended = run_command(
        ["python", *command, "--device", "cuda"], REPO, 300, CUDA_VISIBLE_DEVICES=GPUS
    )
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert " cuda with nccl" in ended.stdout


# launch_fsdp.sh

LAUNCH = ["bash", "02-fsdp/launch_fsdp.sh"]


@pytest.mark.parametrize(
    ("argv", "prints"),
    [
        (
            "multi-node --nnodes=2 --nproc-per-node 8 --rdzv-endpoint node0:29500",
            "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=fsdp --rdzv-backend=c10d "
            "--rdzv-endpoint=node0:29500 02-fsdp/fsdp_transformer.py",
        ),
        (
            "slurm --nnodes 2 --nproc-per-node 4 --preset 1b",
            "sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --job-name=fsdp --wrap='srun "
            "--nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --kill-on-bad-exit=1 python "
            "02-fsdp/fsdp_transformer.py --preset 1b'",
        ),
        (
            "predict --nnodes 2 --nproc-per-node 8 --preset 1b",
            "python 02-fsdp/fsdp_transformer.py --dry-run --world-size=16 --preset 1b",
        ),
    ],
)
def test_launcher_prints_its_command(argv, prints):
    ended = run_command([*LAUNCH, *argv.split(), "--dry-run"], REPO, 20)
    assert (ended.codes, ended.stdout) == ([0], f"OMP_NUM_THREADS=1 {prints}\n"), ended.stderr


def test_launcher_starts_what_it_prints(tmp_path):
    """In the other modes too, with tools that only say how they were called."""
    for tool in ("torchrun", "python", "sbatch"):
        (tmp_path / tool).write_text(f'#!/bin/sh\necho "{tool} called with $#: $*"\n')
        (tmp_path / tool).chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    for argv, tool, count in (
        ("local --max-steps 3", "torchrun", 5),
        ("predict --nnodes 1 --nproc-per-node 2", "python", 3),
        ("slurm --nnodes 1 --nproc-per-node 1", "sbatch", 5),
    ):
        ended = run_command(["env", f"PATH={path}", *LAUNCH, *argv.split()], REPO, 20)
        assert f"{tool} called with {count}: " in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("", "the first argument must be local, multi-node, slurm or predict, not ''"),
        ("local --nnodes 2", "local is one machine"),
        ("local --nproc-per-node", "--nproc-per-node needs a value"),
        ("local --nproc-per-node two", "needs --nproc-per-node, a whole number"),
        ("multi-node --nnodes 2", "multi-node needs --rdzv-endpoint HOST:PORT"),
        ("slurm --nnodes 2", "slurm needs --nproc-per-node"),
        ("predict --nproc-per-node 2", "predict needs --nnodes"),
    ],
)
def test_launcher_refuses_what_it_cannot_start(argv, says):
    ended = run_command([*LAUNCH, *argv.split()], REPO, 20)
    assert ended.codes == [2] and ended.stderr.startswith("launch_fsdp.sh: error: "), ended.stderr
    assert says in ended.stderr and len(ended.stderr.splitlines()) == 1
