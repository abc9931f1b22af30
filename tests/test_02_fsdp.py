"""Module 02: however it is sharded, the same losses, and no more held or sent than said."""

from pathlib import Path

import pytest
from conftest import assert_one_line, results_of

BASICS = "02-fsdp/fsdp_basics.py"
SMALL = ("--seq-len", 32, "--micro-batch-size", 4, "--max-steps", 3)
ALL = ("full", "grad-op", "hybrid", "none")


def measured_in(folder: Path) -> dict[str, float]:
    return {check["name"]: check["measured"] for check in results_of(folder)["checks"]}


# fsdp_basics.py


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, ()),
        (4, ()),
        (2, ("--precision", "bf16-mixed")),
        (4, ("--precision", "bf16-mixed")),
        (2, ("--api", "fsdp1", "--auto-wrap", "size", "--precision", "bf16-mixed")),
        (4, ("--api", "fsdp1")),
    ],
)
def test_every_sharding_mode_trains_as_one_process(run_script, tmp_path, world_size, options):
    """Losses, bytes held, collectives and bytes sent; the script's checks state the tolerances."""
    ended = run_script(
        BASICS, "--sharding", *ALL, *options, *SMALL, "--output-dir", tmp_path / "run",
        world_size=world_size,
    )  # fmt: skip
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    checks = results_of(tmp_path / "run")["checks"]
    assert len(checks) == 8 * len(ALL)
    if world_size == 4 and not options:
        weights, measured = 803_968 * 4, measured_in(tmp_path / "run")  # of the preset tiny
        for sharding, parts in zip(ALL, (4, 4, 2, 1), strict=True):
            for kind, copies in (("parameters", 1), ("gradients", 1), ("Adam moments", 2)):
                held = measured[f"fsdp2 {sharding}: bytes of {kind}"]
                assert abs(held / (copies * weights / parts) - 1) < 0.01, (sharding, kind)
    losses = results_of(tmp_path / "run")["metrics"].values()
    assert max(losses) < 5.4, "they start at ln 256 = 5.55, and would prove little there"


def test_one_process_and_a_number_of_ranks_that_divides_no_dimension(run_script):
    for world_size, sharding, api in ((1, ALL, "fsdp2"), (1, ALL, "fsdp1"), (3, ALL[:2], "fsdp2")):
        ended = run_script(
            BASICS, "--sharding", *sharding, "--api", api, *SMALL, world_size=world_size
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


@pytest.mark.parametrize(
    ("sabotage", "sharding", "failing"),
    [
        (one_unit_for_all, "full", ["all-gathers", "reduce-scatters", "bytes sent"]),
        (keep_replicas_apart, "hybrid", ["all-reduces", "bytes sent", "largest error of a loss"]),
        (shift_a_shard, "full", ["largest error of a loss"]),
        (keep_what_was_gathered, "full", ["all-gathers", "bytes sent"]),
    ],
)
def test_sabotage_of_fsdp_fails_a_check(run_script, tmp_path, sabotage, sharding, failing):
    ended = run_script(
        BASICS, "--sharding", sharding, *SMALL, "--output-dir", tmp_path / "run",
        world_size=4 if sharding == "hybrid" else 2, before=sabotage,
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
