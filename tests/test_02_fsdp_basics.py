"""FSDP2: whatever is sharded, one process's gradient and losses, and no byte more than the formula.

Small models: a weight's bytes follow the same formulas at any size.
"""

import contextlib

import pytest
import torch
from conftest import GPUS, REPO, assert_one_line, load_script, results_of, run_command
from helpers_02 import quick
from torch.distributed.tensor import DTensor

from legacy_common import models

BASICS = "02-fsdp/fsdp_basics.py"
SMALL = ("--seq-len", 32, "--micro-batch-size", 4, "--max-steps", 3)
ALL = ("full", "grad-op", "hybrid", "hpz", "none")
TINY = models.PRESETS["tiny"]
NARROW = models.TransformerConfig(256, 32, 3, 4, 2, 88, 256)  # takes half of tiny's time
full = pytest.mark.full
FSDP_CHECKS = 11  # of each strategy; hpz has one more


def narrow(script):
    models.PRESETS["tiny"] = NARROW


def narrow_and(sabotage):
    def before(script):
        narrow(script)
        sabotage(script)

    return before


def measured_in(folder):
    return {check["name"]: check["measured"] for check in results_of(folder)["checks"]}


def failed_in(folder):
    return [check["name"] for check in results_of(folder)["checks"] if not check["ok"]]


@pytest.mark.parametrize(
    ("world_size", "m", "precision", "before"),
    [
        (2, 1, "32-true", narrow),
        *(
            pytest.param(*case, marks=full)
            for case in (
                (2, 3, "bf16-mixed", narrow),
            )
        ),
    ],
)  # fmt: skip
def test_every_sharding_trains_as_one_process_and_sends_what_the_formula_says(
    run_script, tmp_path, world_size, m, precision, before
):
    """The script's checks state the tolerances; here the formulas stand once more, by hand."""
    ended = run_script(
        BASICS, "--sharding", *ALL, "--grad-accum-steps", m, "--precision", precision, *SMALL,
        "--output-dir", tmp_path / "run", world_size=world_size, before=before,
    )  # fmt: skip
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    assert ended.stderr == "", "a warning"
    content = results_of(tmp_path / "run")
    assert len(content["checks"]) == FSDP_CHECKS * len(ALL) + 1

    config = NARROW if before else TINY
    weights = config.num_parameters()
    rest = (2 * 256 + 1) * config.dim / weights  # embedding, norm and head
    w = 4 if precision == "32-true" else 2
    sent = {name: content["metrics"][f"sent_per_weight_{name}"] for name in ALL}
    assert sent["none"] == pytest.approx(8, abs=0.01), "whatever m and the precision"
    assert sent["grad-op"] == pytest.approx(m * (w + 4))  # 8m, or 6m
    assert sent["full"] == pytest.approx(m * (2 * w + 4 - w * rest))  # 12m, or 8m, less the rest's
    if world_size == 2:  # one group of two is full sharding
        assert sent["hybrid"] == sent["hpz"] == sent["full"]
    else:  # in groups of two: (G-1)/G = 1/2 for what stays inside, of (N-1)/N = 3/4
        inside = m * (2 * w + 4 - w * rest) / 2
        assert sent["hybrid"] * 3 / 4 == pytest.approx(inside + 8 / 2 / 2)  # all-reduce: once
        assert sent["hpz"] * 3 / 4 == pytest.approx(m * ((w + 4) * 3 / 4 + w * (1 - rest) / 2))

    measured = measured_in(tmp_path / "run")
    shards = {"hybrid": 2, "none": 1}
    for name in ALL:
        for kind, copies in (("parameters", 1), ("gradients", 1), ("Adam moments", 2)):
            expected = 4 * copies * weights / shards.get(name, world_size)
            assert measured[f"{name}, {kind}: bytes held"] == expected
    losses = [content["metrics"][f"final_loss_{name}"] for name in ALL]
    least = 5.5 if before else 5.4
    assert max(losses) < least, "they start at ln 256 = 5.55, and would prove little there"


@full
def test_a_number_of_ranks_that_divides_no_dimension(run_script, tmp_path):
    """The rows that padding adds are sent too: bytes per weight are of the model's own weights."""
    ended = run_script(
        BASICS, "--sharding", "full", "grad-op", *SMALL, "--output-dir", tmp_path / "run",
        world_size=3, before=narrow,
    )  # fmt: skip
    assert ended.codes == [0] * 3, ended.stdout + ended.stderr
    sent = results_of(tmp_path / "run")["metrics"]["sent_per_weight_grad-op"]
    weights = models.Transformer(NARROW).parameters()
    padding = sum(-len(weight) % 3 * weight[0].numel() for weight in weights)
    assert sent == pytest.approx(8 * (1 + padding / NARROW.num_parameters()))


@full
def test_a_weight_is_a_shard_except_while_it_is_needed(run_script, tmp_path):
    """The one difference between full and grad-op: between forward and backward."""
    for sharding, after_forward in (("full", "DTensor, S(0)"), ("grad-op", "Parameter")):
        folder = tmp_path / sharding
        ended = run_script(
            BASICS, "--sharding", sharding, *SMALL, "--output-dir", folder, world_size=2,
            before=narrow,
        )  # fmt: skip
        kinds = {line[:25].strip(): line for line in ended.stdout.splitlines()}
        assert "Parameter" in kinds["as built"], ended.stdout
        assert "Parameter" in kinds["in the forward of block 0"], ended.stdout
        assert after_forward in kinds["after the forward"], ended.stdout
        assert "Parameter" in kinds["in its backward"], ended.stdout
        assert "DTensor, S(0)" in kinds["after the backward"], ended.stdout

        states = results_of(folder)["metrics"][f"states_{sharding}"]  # three blocks, the rest
        shard, gathering, whole = 0, 2, 3
        assert states["before"] == states["after"] == [shard] * 4
        kept = whole if sharding == "grad-op" else shard
        assert states["forward 0"] == [whole, shard, shard, whole]
        assert states["forward 1"] == [kept, whole, shard, whole]
        on_its_way = whole if sharding == "grad-op" else gathering
        assert states["backward 1"] == [on_its_way, whole, shard, whole], "gathered ahead"
        assert states["backward 0"] == [whole, shard, shard, whole]
        assert (folder / "timeline.png").stat().st_size > 5000


# sabotage: one for each kind of check


def shard_nothing(script):
    script.shard = lambda model, *_: model


def all_reduce_every_micro_batch(script):
    script.reducing = lambda model, last: contextlib.nullcontext()


def free_differently(free):
    def sabotage(script):
        sharded = script.fully_shard

        def broken(module, **options):
            return sharded(module, **{**options, "reshard_after_forward": free})

        script.fully_shard = broken

    return sabotage


def log_in_another_order(script):
    check = script.check_gathers

    def broken(report, plan, units, log):
        if script.dist.get_rank() == 1:
            log.history = log.history[::-1]
        check(report, plan, units, log)

    script.check_gathers = broken


WRONG = ["gradient, relative error", "largest error of a loss"]
HELD = [f"{kind}: bytes held" for kind in ("parameters", "gradients", "Adam moments")]
GATHERS = "all-gathers: collectives"
SCATTERS = "reduce-scatters: collectives"
AT_ONCE = "most bytes whole at once"


@pytest.mark.parametrize(
    ("sabotage", "options", "failing"),
    [
        (shard_nothing, ("full",), [*WRONG, *HELD, GATHERS, SCATTERS, "bytes sent", AT_ONCE]),
        *(
            pytest.param(*case, marks=full)
            for case in (
                (all_reduce_every_micro_batch, ("hybrid", "--grad-accum-steps", 2),
                 ["all-reduces: collectives", "bytes sent"]),
                (log_in_another_order, ("full",), ["ranks that gather and free in another order"]),
                (free_differently(True), ("hpz",),
                 [GATHERS, "bytes sent", "all-gathers within a group: collectives"]),
            )
        ),
    ],
)  # fmt: skip
def test_sabotage_of_fsdp_fails_a_check(run_script, tmp_path, sabotage, options, failing):
    ended = run_script(
        BASICS, "--sharding", *options, *SMALL, "--output-dir", tmp_path / "run",
        world_size=4 if options[0] in ("hybrid", "hpz") else 2, before=narrow_and(sabotage),
    )  # fmt: skip
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    name = options[0]
    assert [bad.removeprefix(name)[2:] for bad in failed_in(tmp_path / "run")] == failing


# who holds what


def rows_held(rank: int, world_size: int, sharding: str) -> list[float]:
    """Return which rows of a weight a rank holds; hybrid: in groups of 2."""
    script = load_script(BASICS)
    model = models.Transformer(models.PRESETS["tiny"])
    layer = model.blocks[0].down
    layer.weight.data[:] = torch.arange(128)[:, None]
    mesh = script.mesh_of(2 if sharding == "hybrid" else world_size, torch.device("cpu"))
    script.shard(model, sharding, mesh, 2)
    return layer.weight.to_local()[:, 0].tolist()


@pytest.mark.parametrize(
    ("sharding", "first"), [("full", (0, 32, 64, 96)), ("hybrid", (0, 64, 0, 64))]
)
def test_each_rank_holds_its_part_and_under_hybrid_each_group_all_parts(on_ranks, sharding, first):
    held = on_ranks(rows_held, 4, sharding)
    size = 32 if sharding == "full" else 64
    assert held == [list(range(start, start + size)) for start in first]


def test_what_each_of_four_ranks_holds_of_a_large_model(run_script, tmp_path):
    folder = tmp_path / "run"
    ended = run_script(BASICS, "--weigh", 4, "--output-dir", folder, environ={})
    assert ended.codes == [0], ended.stdout + ended.stderr
    gib = results_of(folder)["metrics"]
    weights = models.PRESETS["llama3-8b"].num_parameters() / 2**30
    assert gib["DDP_32-true_gib"] == pytest.approx(16 * weights)
    assert gib["ZeRO-1_bf16-mixed_gib"] == pytest.approx((2 + 2 + 12 / 4) * weights)
    assert gib["ZeRO-2_bf16-mixed_gib"] == pytest.approx((2 + (2 + 12) / 4) * weights)
    assert gib["FSDP grad-op_bf16-mixed_gib"] == pytest.approx((16 / 4 + 2) * weights)


# what goes wrong


def gather_on_one_rank_only(script):
    trained = script.train

    def broken(model, optimizer, steps):
        losses = trained(model, optimizer, steps)
        weight = optimizer.param_groups[0]["params"][0]
        if script.dist.get_rank() == 0 and isinstance(weight, DTensor):
            model.head.weight.full_tensor()
        return losses

    script.train = broken


@full
def test_gathering_on_one_rank_only_hangs_until_the_timeout(run_script):
    ended = run_script(
        BASICS, *SMALL, "--timeout", 5, world_size=2, before=narrow_and(gather_on_one_rank_only)
    )
    assert 1 in ended.codes and "lost contact with another rank" in ended.stderr, ended.stderr


def make_the_optimizer_first(script):
    """The parameters that it knows are not those that train, once the model is sharded."""
    sharded, made = script.shard, script.adam

    def broken(model, *rest):
        optimizer = made(model)
        script.adam = lambda _: optimizer
        return sharded(model, *rest)

    script.shard = broken
    script.watch = lambda model, layer, weight, optimizer, step: [] if step() is None else []


@full
def test_an_optimizer_made_before_sharding_trains_nothing(run_script, tmp_path):
    ended = run_script(
        BASICS, *SMALL, "--output-dir", tmp_path / "run",
        world_size=2, before=narrow_and(make_the_optimizer_first),
    )  # fmt: skip
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    bad = {"full, Adam moments: bytes held", "full: largest error of a loss"}
    assert set(failed_in(tmp_path / "run")) == bad


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    quick(
        2,
        [
            (
                2,
                ("--sharding", "ZERO3"),
                "must be one of full, grad-op, hybrid, none, hpz, FULL_SHARD,",
            ),
            (3, ("--sharding", "hybrid"), "--shard-group-size 2 does not divide 3 ranks"),
            (2, ("--weigh", "8"), "--weigh is one process: start it with python, not torchrun"),
        ],
    ),
)
def test_basics_refuses_bad_input(run_script, world_size, argv, says):
    ended = run_script(BASICS, *argv, world_size=world_size)
    assert_one_line(ended, says, "fsdp_basics.py")


def test_old_names_are_accepted():
    parse = load_script(BASICS).parse_sharding
    old = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
    assert [parse(name) for name in old] == ["full", "grad-op", "hybrid", "none"]


@full
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_basics_runs_on_a_gpu():
    command = ["python", BASICS, "--sharding", *ALL, "--device", "cuda"]
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert " cuda with nccl" in ended.stdout
