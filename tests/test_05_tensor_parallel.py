"""Tensor parallelism, by hand and by a plan: equal to one process, and bytes by formula."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import GPUS, REPO, load_script, results_of, run_command
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    loss_parallel,
    parallelize_module,
)

from dist_common.steps import TrafficCounter

BY_HAND = "05-advanced/tensor_parallel.py"
BY_PLAN = "05-advanced/tensor_parallel_dtensor.py"
SMALL = ("--num-layers", 1, "--seq-len", 32, "--batch-size", 2, "--max-steps", 2)
KV_HEADS = {1: 2, 2: 2, 4: 4}
FULL = pytest.mark.full
L, D, TOKENS = 1, 128, 64  # of SMALL


def run(run_script, tmp_path, script, world_size, before=None, codes=(0,)):
    folder = tmp_path / "run"
    flags = (*SMALL, "--num-kv-heads", KV_HEADS[world_size], "--output-dir", folder)
    ended = run_script(script, *flags, world_size=world_size, before=before)
    assert set(ended.codes) & set(codes), ended.stdout + ended.stderr
    assert "Warning" not in ended.stderr
    return results_of(folder)


def failing(content):
    return {check["name"] for check in content["checks"] if not check["ok"]}


# by hand


@pytest.mark.parametrize("world_size", [2, 4, pytest.param(1, marks=FULL)])
def test_tensor_parallelism_has_the_losses_and_gradients_of_one_process(
    run_script, tmp_path, world_size
):
    """Tolerance 1e-5: float32 sums of some hundred terms, in another order (measured: 1e-6)."""
    content = run(run_script, tmp_path, BY_HAND, world_size)
    assert not failing(content) and len(content["checks"]) == 19
    metrics = content["metrics"]
    assert metrics["calls of a step, tensor parallel"] == {"all_reduce": 4 * L + 2 + 3}
    calls = {"all_gather": 4 * L + 2, "reduce_scatter": 4 * L + 2, "all_reduce": 3 + 1}
    assert metrics["calls of a step, sequence parallel"] == calls
    # A ring sends 2(n-1)/n of a tensor for an all-reduce, half of it for each of the other two.
    share = 2 * (world_size - 1) / world_size
    of_all = (4 * L + 2) * TOKENS * D * 4 + 3 * TOKENS * 4
    assert metrics["bytes sent in a step, tensor parallel"] == share * of_all
    norms = (2 * L + 1) * D * 4
    assert metrics["bytes sent in a step, sequence parallel"] == share * (of_all + norms)
    kept = [metrics[f"bytes kept by a block, {way}"]
            for way in ("sequence parallel", "tensor parallel", "one process")]  # fmt: skip
    assert kept == sorted(kept) and (len(set(kept)) == 3 or world_size == 1)
    assert metrics["losses, tensor parallel"][0] > metrics["losses, tensor parallel"][-1]
    for picture in ("cuts", "tensors"):
        assert (tmp_path / "run" / f"tensor_parallel_{picture}.png").stat().st_size > 10_000


def forget_g(script):
    script.g = script.same


def forget_f(script):
    script.f = script.same


def forget_the_norms(script):
    script.ParallelTransformer.sum_norm_gradients = lambda self: None


def scatter_without_the_sum(script):
    def own_tokens(x):
        return x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()

    script.f_tokens = script.conjugate(script.gather_tokens, own_tokens)


def gather_twice(script):
    once = script.gather_tokens
    again = script.conjugate(
        lambda x: once(x + 0 * once(x)[:, : x.shape[1]]), script.scatter_tokens
    )
    script.f_tokens = again


def keep_the_norms_whole(script):
    """Gather before the norm instead of after it: right values, but the norm keeps all tokens."""

    def forward(self, x, cos, sin):
        h = self.attention_norm(self.f(x))
        x = x + self.g(self.attention(h, cos, sin))
        h = self.ffn_norm(self.f(x))
        return x + self.g(self.down(F.silu(self.gate(h)) * self.up(h)))

    script.ParallelBlock.forward = forward


def lose_a_step(script):
    train = script.tp_job.train

    def with_another_rate(model, compute_gradient, batches, lr):
        own = isinstance(model, script.ParallelTransformer)
        return train(model, compute_gradient, batches, 2 * lr if own else lr)

    script.tp_job.train = with_another_rate


OWN = "own columns put back, and f: weights with a wrong gradient"


@pytest.mark.parametrize(
    ("sabotage", "red"),
    [
        (forget_g, {"tensor parallel: gradient error", "tensor parallel, a step: all-reduces",
                    "tensor parallel: largest error of a loss"}),
        (forget_f, {OWN, "tensor parallel: gradient error",
                    "tensor parallel, a block: bytes sent"}),
        (keep_the_norms_whole, {"sequence parallel, a block: bytes kept for backward"}),
        pytest.param(forget_the_norms, {"sequence parallel: gradient error",
                                        "sequence parallel, a step: all-reduces"}, marks=FULL),
        pytest.param(scatter_without_the_sum, {"sequence parallel: gradient error"}, marks=FULL),
        pytest.param(gather_twice, {"sequence parallel, a block: all-gathers",
                                    "sequence parallel, a step: bytes sent"}, marks=FULL),
        pytest.param(lose_a_step, {"tensor parallel: largest error of a loss",
                                   "sequence parallel: largest error of a loss"}, marks=FULL),
    ],
)  # fmt: skip
def test_sabotage_of_tensor_parallelism_fails_a_check(run_script, tmp_path, sabotage, red):
    content = run(run_script, tmp_path, BY_HAND, 2, before=sabotage, codes=(1,))
    assert red <= failing(content), failing(content)


BAD_INPUT = [
    (2, ("--num-kv-heads", 1), "1 key and value heads (--num-kv-heads) cannot be cut into 2"),
    (4, (), "2 key and value heads (--num-kv-heads) cannot be cut into 4 equal parts"),
    (3, (), "4 heads cannot be cut into 3 equal parts"),
    (2, ("--seq-len", 33), "33 tokens of a sequence (--seq-len)"),
    (2, ("--num-kv-heads", 3), "--num-kv-heads 3 does not divide the model's 4 heads"),
    (2, ("--seq-len", 258), "--seq-len must be at most 256"),
    (2, ("--batch-size", 10**6), "--max-steps times --batch-size must be less"),
]


@pytest.mark.parametrize(("world_size", "argv", "says"), BAD_INPUT)
@pytest.mark.parametrize("script", [BY_HAND, pytest.param(BY_PLAN, marks=FULL)])
def test_tensor_parallelism_refuses_bad_input(run_script, script, world_size, argv, says):
    ended = run_script(script, *argv, world_size=world_size)
    (line,) = ended.stderr.splitlines()
    name = script.rpartition("/")[2]
    assert line.startswith(f"{name}: error: ") and says in line and 2 in ended.codes


def test_sizes_that_no_flag_changes_are_refused_too():
    job = load_script("05-advanced/tp_job.py")
    sizes = {"num_heads": 8, "num_kv_heads": 8, "ffn_dim": 352, "vocab_size": 256}
    for name, value in (("ffn_dim", 354), ("vocab_size", 257), ("num_heads", 6)):
        config = type("Config", (), sizes | {name: value})
        with pytest.raises(job.cli.UsageError, match=f"{value} .* cannot be cut into 4"):
            job.check_sizes(config, 64, 4)
    job.check_sizes(type("Config", (), sizes), 64, 4)


def loss_of_large_logits(rank, world_size):
    """Return own and expected loss, and the error of the gradient, of logits up to 1e4."""
    script = load_script(BY_HAND)
    torch.manual_seed(0)
    whole = (5000 * torch.randn(2, 6, 4 * world_size)).requires_grad_()
    targets = torch.randint(4 * world_size, (2, 6))
    expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten())
    expected.backward()
    own = whole.detach().chunk(world_size, dim=-1)[rank].clone().requires_grad_()
    loss = script.vocabulary_parallel_loss(own, targets)
    loss.backward()
    error = (own.grad - whole.grad.chunk(world_size, dim=-1)[rank]).abs().max()
    return loss.item(), expected.item(), error.item()


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_vocabulary_parallel_loss_does_not_overflow(on_ranks, world_size):
    for loss, expected, error in on_ranks(loss_of_large_logits, world_size):
        assert loss == pytest.approx(expected, rel=1e-6) and error < 1e-6


def gradient_through_torchs_own_all_gather(rank, world_size):
    from torch.distributed import _functional_collectives as functional

    name = "all_gather_single_autograd"
    gather = getattr(functional, name, None) or functional.all_gather_tensor_autograd
    x = torch.ones(3, requires_grad=True)
    whole = gather(x * 1.0, 0, dist.group.WORLD)
    (whole * torch.ones_like(whole)).sum().backward()  # torch 2.11 wants a contiguous gradient
    return x.grad.tolist()


@pytest.mark.parametrize("world_size", [2, 3])
def test_torchs_all_gather_for_autograd_adds_up_equal_losses(on_ranks, world_size):
    """Its backward sums over the ranks: right where each has a loss of its own, n times here."""
    ended = on_ranks(gradient_through_torchs_own_all_gather, world_size)
    assert ended == [[float(world_size)] * 3] * world_size


# by a plan


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=FULL) for n in (1, 4))])
def test_each_plan_has_the_losses_and_gradients_of_one_process(run_script, tmp_path, world_size):
    content = run(run_script, tmp_path, BY_PLAN, world_size)
    assert not failing(content) and len(content["checks"]) == (14 if world_size > 1 else 12)
    metrics = content["metrics"]
    if world_size == 1:
        return  # DTensor calls no collective but the loss's, which a check holds
    assert metrics["calls of a step, by matrix"] == {"all_reduce": 7 * L + 2 + 3}
    assert metrics["calls of a step, by input"] == {"all_reduce": 4 * L + 2 + 3}
    calls = {"all_gather": 5 * L + 2, "reduce_scatter": 5 * L + 2, "all_reduce": 3 + 2 * L + 1}
    assert metrics["calls of a step, of sequence"] == calls


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


@pytest.mark.parametrize(
    ("sabotage", "red"),
    [
        (forget_one_norm, {"of sequence: gradient error"}),
        pytest.param(take_the_dearer_plan, {"by input, a step: all-reduces",
                                            "by input, a step: bytes sent"}, marks=FULL),
    ],
)  # fmt: skip
def test_sabotage_of_a_plan_fails_a_check(run_script, tmp_path, sabotage, red):
    content = run(run_script, tmp_path, BY_PLAN, 2, before=sabotage, codes=(1,))
    assert red <= failing(content), failing(content)
    assert not any(name.startswith("by matrix") for name in failing(content))


class Args:
    """SMALL, as main has it."""

    num_layers, num_kv_heads, seq_len, batch_size, max_steps = L, 4, 32, 2, 2
    lr, seed = 1e-3, 0


def build(rank, world_size, plan, more=None):
    """Return the plan's script, its model, and the batches."""
    script = load_script(BY_PLAN)
    device = torch.device("cpu")
    job = script.tp_job
    model = job.whole_model(Args, job.config_of(Args, world_size), device)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))["tp"]
    for styles in (getattr(script, plan)(), more):
        if styles:
            parallelize_module(model, mesh, styles)
    return script, model, job.batches_of(Args, device)


def by_hand_and_by_plan(rank, world_size, plan, sequence_parallel):
    """Return the largest difference of a gradient and of a loss, of both ways."""
    script, model, batches = build(rank, world_size, plan)
    hand = load_script(BY_HAND)
    whole = script.tp_job.whole_model(Args, model.config, torch.device("cpu"))
    other = hand.ParallelTransformer(whole, sequence_parallel)
    hand.compute_gradient(other, batches[0])
    script.compute_gradient(model, batches[0])
    gradients = [[p.grad for p in script.tp_job.on_this_rank(m).parameters()]
                 for m in (model, other)]  # fmt: skip
    error = max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True))
    largest = max(gradient.abs().max().item() for gradient in gradients[1])
    losses = [s.tp_job.train(m, s.compute_gradient, batches, Args.lr)
              for s, m in ((script, model), (hand, other))]  # fmt: skip
    return error / largest, (losses[0] - losses[1]).abs().max().item()


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=FULL)])
@pytest.mark.parametrize(("plan", "sequence_parallel"), [
    ("plan_by_input", False), ("plan_of_sequence", True),
])  # fmt: skip
def test_a_plan_does_what_is_written_out_by_hand(on_ranks, plan, sequence_parallel, world_size):
    for gradient, loss in on_ranks(by_hand_and_by_plan, world_size, plan, sequence_parallel):
        assert gradient < 1e-5 and loss < 1e-5


# what the page says of DTensor


def gather_once(script):
    """The exercise: one gather for gate and up."""
    tokens, whole = script.TOKENS, script.WHOLE
    styles = PrepareModuleOutput(
        output_layouts=tokens, desired_output_layouts=whole, use_local_output=False
    )
    return {"blocks.*.ffn_norm": styles}


def count_the_exercise(rank, world_size):
    script = load_script(BY_PLAN)
    plan = script.plan_of_sequence
    script.plan_of_sequence = lambda: plan() | {
        "blocks.*.gate": ColwiseParallel(), "blocks.*.up": ColwiseParallel(),
    }  # fmt: skip
    script, model, batches = build(rank, world_size, "plan_of_sequence", gather_once(script))
    with TrafficCounter() as counter:
        script.compute_gradient(model, batches[0])
    calls = script.tp_costs.traffic_of(counter).calls
    return calls["all_gather"], calls["reduce_scatter"]


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
    return whole, norm.placements[0].is_partial(), dict(script.tp_costs.traffic_of(counter).calls)


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


def test_plain_tensors_and_dtensors_do_not_mix(on_ranks):
    for said in on_ranks(refusals, 2):
        assert all("got mixed torch.Tensor and DTensor" in line for line in said), said
        names = ("nll_loss_forward", "nll_loss_backward", "_foreach_norm")
        assert all(name in line for name, line in zip(names, said, strict=True))


@FULL
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
@pytest.mark.parametrize("script", [BY_HAND, BY_PLAN])
def test_tensor_parallelism_runs_on_a_gpu(script):
    command = ["python", script, "--device", "cuda"]
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert " cuda with nccl" in ended.stdout
