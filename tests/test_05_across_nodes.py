"""Ways across nodes: one gradient, the bytes that leave a node, and which way is fastest."""

import functools

import pytest
import torch.distributed as dist
from conftest import assert_one_line, results_of

from dist_common.lab import links

ACROSS = "05-advanced/across_nodes.py"
FULL = pytest.mark.full
SMALL = ("--blocks", 2, "--width", 12, "--block-ms", 0.1, "--repeat", 1)
WAYS = {"flat", "hierarchical", "buckets", "buckets, accumulating", "buckets, bfloat16",
        "PowerSGD", "DiLoCo"}  # fmt: skip
why_not = links.why_not()


def failing(folder) -> set[str]:
    return {check["name"] for check in results_of(folder)["checks"] if not check["ok"]}


@pytest.mark.parametrize(("world_size", "inside"), [
    (4, 2), pytest.param(3, 1, marks=FULL), pytest.param(6, 3, marks=FULL),
    pytest.param(2, 2, marks=FULL), pytest.param(1, 1, marks=FULL)])  # fmt: skip
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


def drop_a_micro_batch(script):
    def way(model, groups):
        step = script.in_buckets(model, groups)
        return lambda batches: step(batches[1:])

    script.WAYS["buckets, accumulating"] = way, 4


def keep_the_round(script):
    script.outer_step = lambda *_: None


@pytest.mark.parametrize(("sabotage", "red"), [
    (forget_the_other_nodes, {"flat", "hierarchical"}),
    pytest.param(drop_a_micro_batch, {"buckets, accumulating"}, marks=FULL),
    pytest.param(keep_the_round, {"DiLoCo"}, marks=FULL)])  # fmt: skip
def test_a_way_that_sums_something_else_is_named(run_script, tmp_path, sabotage, red):
    argv = (*SMALL, "--ranks-per-node", 2, "--output-dir", tmp_path / "run")
    ended = run_script(ACROSS, *argv, world_size=4, before=sabotage)
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    assert {name.partition(":")[0] for name in failing(tmp_path / "run")} == red


def test_ranks_that_fill_no_node_are_refused(run_script):
    ended = run_script(ACROSS, "--ranks-per-node", 2, world_size=3)
    assert set(ended.codes) <= {2, -15}  # the launcher ends the others
    says = "3 ranks are no whole number of nodes of 2 (--ranks-per-node)"
    assert_one_line(ended, says, "across_nodes.py")


def send_all_of_it_twice(script):
    """A hierarchical sum that sends as much as a flat one; right, and no gain."""
    script.WAYS["hierarchical"] = script.WAYS["flat"]


@FULL
@pytest.mark.skipif(why_not is not None, reason=str(why_not))
@pytest.mark.parametrize("mbit", [100, 1000])
def test_the_fastest_way_is_the_predicted_one(run_script, tmp_path, mbit):
    """On two hosts with two ranks each, where the prediction sees more than 20% between two ways.

    What the wire carries is counted by the card. A prediction is within half, on a busy machine.
    """
    sabotage = send_all_of_it_twice if mbit == 1000 else None
    with links.hosts([mbit * 1e6 / 8] * 2) as network:

        def on_host(rank):
            network.enter(rank // 2)
            return {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}

        argv = ("--repeat", 2, "--output-dir", tmp_path / "run")
        ended = run_script(ACROSS, *argv, world_size=4, environ=on_host, before=sabotage,
                           timeout_s=180)  # fmt: skip
    red = {"hierarchical: bytes that leave a node in a step"} if sabotage else set()
    assert failing(tmp_path / "run") == red, ended.stdout + ended.stderr
    metrics = results_of(tmp_path / "run")["metrics"]
    measured, predicted = (
        {
            way: metrics[f"{kind}_ms: {way}"]
            for way in WAYS - {name.partition(":")[0] for name in red}
        }
        for kind in ("measured", "predicted")
    )
    fastest = min(measured, key=measured.get)
    assert predicted[fastest] <= 1.2 * min(predicted.values()), ended.stdout
    if mbit == 100:  # here the wire decides, and the wire is not busy
        for way, ms in measured.items():
            assert 0.67 < ms / predicted[way] < 1.5, f"{way}: {ended.stdout}"
