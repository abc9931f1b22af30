"""Module 04: each collective does what its definition says, on each rank."""

import pytest
from conftest import assert_one_line, results_of

OPS = "04-nccl-operations/collective_ops.py"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_collective_is_as_defined(run_script, tmp_path, world_size):
    ended = run_script(OPS, "--output-dir", tmp_path / "run", world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    assert ended.stderr == "" and len(results_of(tmp_path / "run")["checks"]) == 25


def skip(name):
    """Return a sabotage in which a collective of torch.distributed is not called at all."""

    def sabotage(script):
        setattr(script.dist, name, lambda *args, **kwargs: None)

    return sabotage


def into_another_order(script):
    gathered = script.all_gather_single

    def broken(whole, part):
        gathered(whole, part)
        whole.copy_(whole.roll(len(part)))

    script.all_gather_single = broken


def keep_own_part(script):
    script.reduce_scatter_single = lambda own, mine: own.copy_(mine[script.dist.get_rank()])


def one_group_of_all(script):
    script.dist.new_group = lambda ranks: script.dist.group.WORLD


@pytest.mark.parametrize(
    ("sabotage", "op"),
    [
        (skip("broadcast"), "broadcast"),
        (skip("reduce"), "reduce"),
        (skip("all_reduce"), "all_reduce SUM"),
        (skip("all_reduce"), "all_reduce BXOR"),
        (skip("barrier"), "barrier"),
        (into_another_order, "all_gather_into_tensor"),
        (keep_own_part, "reduce_scatter_tensor"),
        (one_group_of_all, "all_reduce_of_a_group"),
        (skip("scatter_object_list"), "scatter_object_list"),
    ],
)
def test_sabotage_of_a_collective_fails_its_check(run_script, tmp_path, sabotage, op):
    ended = run_script(
        OPS, "--op", op, "--output-dir", tmp_path / "run", world_size=3, before=sabotage
    )
    assert any(ended.codes), ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert failed == [f"{op}: elements not as defined"]


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    [
        (1, (), "one rank has nobody to talk to: start 2 or more"),
        (2, ("--op", "all_reduce PREMUL_SUM"), "gloo has it not; nccl has"),
        (2, ("--op", "allreduce"), "argument --op: invalid choice: 'allreduce'"),
    ],
)
def test_collective_ops_refuses_bad_input(run_script, world_size, argv, says):
    assert_one_line(run_script(OPS, *argv, world_size=world_size), says, "collective_ops.py")
