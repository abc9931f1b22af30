"""collective_ops.py: each collective does what its definition says, and the picture shows it."""

import pytest
import torch
import torch.distributed as dist
from conftest import assert_one_line, load_script, results_of
from helpers_04 import first_is_quick, full

from nccl_parts import collective_ops as part

OPS = "04-nccl-operations/collective_ops.py"


@pytest.mark.parametrize("world_size", [3, *(pytest.param(n, marks=full) for n in (2, 4))])
def test_every_collective_is_as_defined(run_script, tmp_path, world_size):
    ended = run_script(OPS, "--output-dir", tmp_path / "run", world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    has_all = hasattr(dist, "all_gather_single")  # torch 2.11: gloo has no all_to_all
    assert ended.stderr == "" and len(results_of(tmp_path / "run")["checks"]) == 24 + has_all
    assert (tmp_path / "run/collectives.png").exists()


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
    first_is_quick([
        (skip("all_reduce"), "all_reduce SUM"),
        (skip("barrier"), "barrier"),
        (skip("broadcast"), "broadcast"),
        (skip("reduce"), "reduce"),
        (skip("all_reduce"), "all_reduce BXOR"),
        (skip("all_reduce"), "all_reduce AVG"),
        (into_another_order, "all_gather_into_tensor"),
        (keep_own_part, "reduce_scatter_tensor"),
        (one_group_of_all, "all_reduce_of_a_group"),
        (skip("scatter_object_list"), "scatter_object_list"),
    ]),
)  # fmt: skip
def test_sabotage_of_a_collective_fails_its_check(run_script, tmp_path, sabotage, op):
    ended = run_script(
        OPS, "--op", op, "--output-dir", tmp_path / "run", world_size=3, before=sabotage
    )
    assert any(ended.codes), ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert failed == [f"{op}: elements not as defined"]


@pytest.mark.parametrize(
    ("result", "wrong"),
    [
        ([33.0, 36.0], 0),
        ([33.0, 36.0001], 0),  # the order of the operations is the backend's
        ([33.0, 37.0], 1),
        ([33.0], 2),
        ([float("nan"), 36.0], 1),
    ],
)
def test_elements_that_differ_are_counted(result, wrong):
    count = load_script(OPS).wrong_elements
    assert count(torch.tensor(result), torch.tensor([33.0, 36.0]), 1e-5) == wrong
    assert count(torch.tensor(result), None, 0.0) == 0


def test_only_a_mean_and_a_product_may_round():
    assert list(part.ROUNDING) == ["all_reduce AVG", "all_reduce PRODUCT"]


def test_the_picture_shows_what_the_ranks_held(tmp_path):
    """Other buffers make another picture, and more ranks than it can tell apart none."""
    pictures = {}

    def save(name, ranks, spoil=0):
        before = [load_script(OPS).buffer_of(r, ranks, torch.float32, "cpu") for r in range(ranks)]
        after = part.DEFINITIONS["broadcast"][1](before)
        after[-1] = after[-1] + spoil
        part.draw(tmp_path / name, {"broadcast": (before, after), "barrier": (before, [2, 2])})
        path = tmp_path / name
        pictures[name] = path.read_bytes() if path.exists() else None

    save("right.png", 3)
    save("again.png", 3)
    save("wrong.png", 3, spoil=10)
    save("large.png", 9)
    assert pictures["right.png"] == pictures["again.png"] != pictures["wrong.png"]
    assert pictures["large.png"] is None


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    first_is_quick([
        (1, (), "one rank has nobody to talk to: start 2 or more"),
        (2, ("--op", "all_reduce PREMUL_SUM"), "gloo has it not; nccl has"),
        (2, ("--op", "allreduce"), "argument --op: invalid choice: 'allreduce'"),
    ]),
)  # fmt: skip
def test_collective_ops_refuses_bad_input(run_script, world_size, argv, says):
    assert_one_line(run_script(OPS, *argv, world_size=world_size), says, "collective_ops.py")
