"""Tensor parallelism by a plan: equal to one process and to the same by hand; what DTensor does."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_one_line, load_script
from helpers_05 import L, counted, failing, run_small
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    loss_parallel,
    parallelize_module,
)

from advanced_parts import tensor_job
from legacy_common.lab.traffic import TrafficCounter

SCRIPT = "05-advanced/tensor_parallel_dtensor.py"
FULL = pytest.mark.full
run = partial(run_small, SCRIPT)


def test_each_plan_has_the_losses_and_gradients_of_one_process(run_script, tmp_path):
    content = run(run_script, tmp_path, 2)
    assert not failing(content) and len(content["checks"]) == 14
    assert counted(content, "by matrix")[0] == {"all-reduces": 7 * L + 2 + 3}
    assert counted(content, "by input")[0] == {"all-reduces": 4 * L + 2 + 3}
    calls = {"all-gathers": 5 * L + 2, "reduce-scatters": 5 * L + 2, "all-reduces": 3 + 2 * L + 1}
    assert counted(content, "of sequence")[0] == calls


def forget_one_norm(script):
    whole_plan = script.plan_of_sequence

    def plan():
        styles = whole_plan()
        del styles["blocks.*.ffn_norm"]
        return styles

    _, *rest = script.PLANS["of sequence"]
    script.PLANS["of sequence"] = (plan, *rest)


def take_the_dearer_plan(script):
    _, *rest = script.PLANS["by input"]
    script.PLANS["by input"] = (script.plan_by_matrix, *rest)


@pytest.mark.full
@pytest.mark.parametrize(
    ("sabotage", "red"),
    [
        (forget_one_norm, {"of sequence: gradient error"}),
        pytest.param(take_the_dearer_plan, {"by input, a step: all-reduces",
                                            "by input, a step: bytes sent"}, marks=FULL),
    ],
)  # fmt: skip
def test_sabotage_of_a_plan_fails_a_check(run_script, tmp_path, sabotage, red):
    content = run(run_script, tmp_path, 2, before=sabotage, codes=(1,))
    assert red <= failing(content), failing(content)
    assert not any(name.startswith("by matrix") for name in failing(content))


class Args:
    """SMALL, as main has it."""

    num_layers, num_kv_heads, seq_len, batch_size, max_steps = L, 4, 32, 2, 2
    lr, seed = 1e-3, 0


def build(rank, world_size, plan, more=None):
    """Return the plan's script, its model, and the batches."""
    script = load_script(SCRIPT)
    device = torch.device("cpu")
    model = tensor_job.whole_model(Args, tensor_job.config_of(Args, world_size), device)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))["tp"]
    for styles in (getattr(script, plan)(), more):
        if styles:
            parallelize_module(model, mesh, styles)
    return script, model, tensor_job.batches_of(Args, device)


# what the page says of DTensor


def gather_once(script):
    """The exercise: one gather for gate and up."""
    tokens, whole = script.TOKENS, script.WHOLE
    styles = PrepareModuleOutput(
        output_layouts=tokens, desired_output_layouts=whole, use_local_output=False
    )
    return {"blocks.*.ffn_norm": styles}


def count_the_exercise(rank, world_size):
    script = load_script(SCRIPT)
    plan = script.plan_of_sequence
    script.plan_of_sequence = lambda: plan() | {
        "blocks.*.gate": ColwiseParallel(), "blocks.*.up": ColwiseParallel(),
    }  # fmt: skip
    script, model, batches = build(rank, world_size, "plan_of_sequence", gather_once(script))
    with TrafficCounter() as counter:
        script.compute_gradient(model, batches[0])
    return counter.calls["all_gather"], counter.calls["reduce_scatter"]


@FULL
def test_a_second_plan_gathers_the_input_of_gate_and_up_once(on_ranks):
    assert on_ranks(count_the_exercise, 2) == [(4 * L + 2, 4 * L + 2)] * 2


def step_without_placing(rank, world_size):
    """Return placements of two gradients after backward, and the all-reduces of AdamW's step."""
    script, model, batches = build(rank, world_size, "plan_of_sequence")
    script.place_gradients = lambda model: None
    script.compute_gradient(model, batches[0])
    embedding, norm = model.embedding.weight.grad, model.norm.weight.grad
    optimizer = torch.optim.AdamW(model.parameters())
    with TrafficCounter() as counter:
        optimizer.step()
    whole = embedding.placements == (Replicate(),) and len(embedding.to_local()) == 256
    return whole, norm.placements[0].is_partial(), dict(counter.calls)


@FULL
def test_the_optimizer_sums_what_was_not_placed_three_times(on_ranks):
    ended = on_ranks(step_without_placing, 2)
    assert ended == [(True, True, {"all_reduce": 3 * (2 * L + 1)})] * 2


def refusals(rank, world_size):
    """Return what PyTorch says to three mistakes."""
    script, model, (batch, *_) = build(rank, world_size, "plan_by_matrix")
    inputs, targets = batch
    said = []

    def attempt(action):
        try:
            action()
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))

    def loss():
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    attempt(loss)
    with loss_parallel():
        outside = loss()
    attempt(outside.backward)
    script.compute_gradient(model, batch)
    attempt(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert any(isinstance(p, DTensor) for p in model.parameters())
    return said


@FULL
def test_plain_tensors_and_dtensors_do_not_mix(on_ranks):
    for said in on_ranks(refusals, 2):
        assert all("got mixed torch.Tensor and DTensor" in line for line in said), said
        names = ("nll_loss_forward", "nll_loss_backward", "_foreach_norm")
        assert all(name in line for name, line in zip(names, said, strict=True))


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    [
        (2, ("--num-kv-heads", 1), "1 key and value heads (--num-kv-heads) cannot be cut into 2"),
        pytest.param(3, (), "4 heads cannot be cut into 3 equal parts", marks=FULL),
    ],
)
def test_bad_input_gets_one_line(run_script, world_size, argv, says):
    ended = run_script(SCRIPT, *argv, world_size=world_size)
    assert_one_line(ended, says, "tensor_parallel_dtensor.py")
