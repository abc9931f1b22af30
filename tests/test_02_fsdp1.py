"""FSDP1 beside FSDP2: the same losses, bytes held, collectives and bytes sent, by formula."""

import pytest
import torch
from conftest import GPUS, REPO, assert_one_line, results_of, run_command
from helpers_02 import quick
from torch.distributed.fsdp import FullyShardedDataParallel

from dist_common import models

FSDP1 = "02-fsdp/fsdp1.py"
SMALL = ("--seq-len", 32, "--micro-batch-size", 4, "--max-steps", 3)
ALL = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
TINY = models.PRESETS["tiny"]
NARROW = models.TransformerConfig(256, 32, 2, 4, 2, 88, 256)
full = pytest.mark.full
DEPRECATED = "PyTorch says: The `NO_SHARD` sharding strategy is deprecated."


def narrow(script):
    models.PRESETS["tiny"] = NARROW


def narrow_and(sabotage):
    def before(script):
        narrow(script)
        sabotage(script)

    return before


@pytest.mark.parametrize(
    ("world_size", "options", "before"),
    [
        (2, (), narrow),
        *(
            pytest.param(*case, marks=full)
            for case in (
                (2, ("--auto-wrap", "size", "--precision", "bf16-mixed"), None),
                (4, (), narrow),
                (3, ("--shard-group-size", 3), narrow),
                (1, (), narrow),
            )
        ),
    ],
)
def test_fsdp1_trains_as_fsdp2_and_one_process(run_script, tmp_path, world_size, options, before):
    ended = run_script(
        FSDP1, "--sharding", *ALL, *options, *SMALL, "--output-dir", tmp_path / "run",
        world_size=world_size, before=before,
    )  # fmt: skip
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    assert ended.stderr == "" and (DEPRECATED in ended.stdout or world_size == 1)
    content = results_of(tmp_path / "run")
    assert len(content["checks"]) == 8 * 2 * len(ALL)
    losses = [loss for name, loss in content["metrics"].items() if name.startswith("final_loss")]
    assert len(losses) == 2 * len(ALL) and max(losses) < (5.52 if before else 5.4)
    if world_size == 4 and not options:
        weights = 4 * (NARROW if before else TINY).num_parameters()
        measured = {check["name"]: check["measured"] for check in content["checks"]}
        for name, parts in zip(ALL, (4, 4, 2, 1), strict=True):
            for api in ("FSDP1", "FSDP2"):
                for kind, copies in (("parameters", 1), ("gradients", 1), ("Adam moments", 2)):
                    held = measured[f"{name} {api}, {kind}: bytes held"]
                    assert held == copies * weights / parts


@full
def test_one_strategy_is_shown_moment_by_moment(run_script):
    """A weight has its name and shape under FSDP2, and is part of a vector under FSDP1."""
    ended = run_script(FSDP1, *SMALL, world_size=2, before=narrow)
    kinds = {line[:25].strip(): line for line in ended.stdout.splitlines()}
    row = kinds["before the step"]
    assert "DTensor, S(0)" in row and "16 x 88" in row and "FlatParameter" in row, ended.stdout
    inside = kinds["in the forward of block 0"]
    block = (32 + 16) * 32 * 2 + 3 * 32 * 88 + 2 * 32
    assert "32 x 88" in inside and f" {block} " in inside, ended.stdout


def wrap_nothing(script):
    script.wrap_with_fsdp1 = lambda model, *_: model


def one_flat_parameter(script):
    wrapped = script.FSDP1
    script.FSDP1 = type("FSDP1", (wrapped,), {
        "__init__": lambda self, model, **options: wrapped.__init__(
            self, model, **{**options, "auto_wrap_policy": None}
        )
    })  # fmt: skip


def shift_a_shard(script):
    wrap = script.wrap_with_fsdp1

    def broken(*arguments):
        model = wrap(*arguments)
        with torch.no_grad():
            flat = next(model.blocks[1].parameters())
            flat.copy_(flat.roll(1))
        return model

    script.wrap_with_fsdp1 = broken


def hybrid_groups_of_one(script):
    """As a device mesh of (ranks, 1) would give them."""
    script.group_size_of = lambda *_: 1


@full
def test_hybrid_groups_of_one_average_no_gradient_under_fsdp1(run_script, tmp_path):
    ended = run_script(
        FSDP1, "--sharding", "HYBRID_SHARD", *SMALL, "--output-dir", tmp_path / "run",
        world_size=2, before=narrow_and(hybrid_groups_of_one),
    )  # fmt: skip
    assert ended.codes[0] == 1 and "switching to use `NO_SHARD`" in ended.stdout, ended.stderr
    checks = {check["name"]: check for check in results_of(tmp_path / "run")["checks"]}
    assert checks["HYBRID_SHARD FSDP2: largest error of a loss"]["ok"]
    assert not checks["HYBRID_SHARD FSDP1: largest error of a loss"]["ok"]
    assert checks["HYBRID_SHARD FSDP1: bytes sent"]["measured"] == 0


COLLECTIVES = ["all-gathers: collectives", "reduce-scatters: collectives"]


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (shift_a_shard, ["largest error of a loss"]),
        pytest.param(
            wrap_nothing,
            ["largest error of a loss", "parameters: bytes held", "gradients: bytes held",
             "Adam moments: bytes held", *COLLECTIVES, "bytes sent"],
            marks=full,
        ),
        pytest.param(one_flat_parameter, [*COLLECTIVES, "bytes sent"], marks=full),
    ],
)  # fmt: skip
def test_sabotage_of_fsdp1_fails_a_check(run_script, tmp_path, sabotage, failing):
    ended = run_script(
        FSDP1, *SMALL, "--output-dir", tmp_path / "run", world_size=2, before=narrow_and(sabotage)
    )
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    bad = [check["name"] for check in results_of(tmp_path / "run")["checks"] if not check["ok"]]
    assert [name.removeprefix("FULL_SHARD FSDP1")[2:] for name in bad] == failing


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    quick(
        2,
        [
            (2, ("--sharding", "ZERO3"), "must be one of full, grad-op, hybrid, none, "),
            (2, ("--sharding", "hpz"), "FSDP1 has no hpz"),
            (
                4,
                ("--sharding", "HYBRID_SHARD", "--shard-group-size", "3"),
                "3 does not divide 4 ranks",
            ),
            (1, ("--auto-wrap", "layer"), "--auto-wrap: invalid choice: 'layer'"),
            (1, ("--seq-len", "257"), "--seq-len must be at most 256"),
        ],
    ),
)
def test_fsdp1_refuses_bad_input(run_script, world_size, argv, says):
    ended = run_script(FSDP1, *argv, world_size=world_size)
    assert_one_line(ended, says, "fsdp1.py")


def mix_frozen_and_trained(rank, world_size):
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    layers[0].requires_grad_(False)
    with pytest.raises(ValueError, match="uniform `requires_grad`"):
        FullyShardedDataParallel(layers, device_id=torch.device("cpu"))
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    FullyShardedDataParallel(layers, **options)


@full
def test_fsdp1_takes_no_frozen_weights_among_trained_ones(on_ranks):
    on_ranks(mix_frozen_and_trained, 2)


@full
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_fsdp1_runs_on_a_gpu():
    command = ["python", FSDP1, "--precision", "bf16-mixed", "--device", "cuda"]
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert " cuda with nccl" in ended.stdout
