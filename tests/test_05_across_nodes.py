"""Ways across nodes: one gradient, the bytes that leave a node, and which way is fastest."""

import functools

import pytest
import torch.distributed as dist
from conftest import assert_one_line, results_of

ACROSS = "05-advanced/across_nodes.py"
FULL = pytest.mark.full
SMALL = ("--blocks", 2, "--width", 12, "--block-ms", 0.1, "--repeat", 1)
WAYS = {"flat", "hierarchical", "buckets", "buckets, accumulating", "buckets, bfloat16",
        "PowerSGD", "DiLoCo"}  # fmt: skip


def failing(folder) -> set[str]:
    return {check["name"] for check in results_of(folder)["checks"] if not check["ok"]}


@pytest.mark.parametrize(("world_size", "inside"), [(4, 2), pytest.param(3, 1, marks=FULL)])
def test_each_way_leaves_one_gradient_on_all_ranks(run_script, tmp_path, world_size, inside):
    argv = (*SMALL, "--ranks-per-node", inside, "--output-dir", tmp_path / "run")
    ended = run_script(ACROSS, *argv, world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    content = results_of(tmp_path / "run")
    assert {check["name"].partition(":")[0] for check in content["checks"]} == WAYS
    assert all(content["metrics"][f"predicted_ms: {way}"] > 0 for way in WAYS)
    assert "fastest: " in ended.stdout


def forget_the_other_nodes(script):
    """A hierarchical sum that each node keeps to itself."""
    script.hierarchical_all_reduce = script.flat_all_reduce = lambda gradient, groups: (
        dist.all_reduce(gradient, group=groups["inside"])
    )
    for name in ("flat", "hierarchical"):
        way = functools.partial(script.after_backward, script.flat_all_reduce)
        script.WAYS[name] = way, 1


def test_a_way_that_sums_something_else_is_named(run_script, tmp_path):
    argv = (*SMALL, "--ranks-per-node", 2, "--output-dir", tmp_path / "run")
    ended = run_script(ACROSS, *argv, world_size=4, before=forget_the_other_nodes)
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    failed = {name.partition(":")[0] for name in failing(tmp_path / "run")}
    assert failed == {"flat", "hierarchical"}


def test_ranks_that_fill_no_node_are_refused(run_script):
    ended = run_script(ACROSS, "--ranks-per-node", 2, world_size=3)
    assert set(ended.codes) <= {2, -15}  # the launcher ends the others
    says = "3 ranks are no whole number of nodes of 2 (--ranks-per-node)"
    assert_one_line(ended, says, "across_nodes.py")
