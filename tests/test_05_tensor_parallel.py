"""Tensor parallelism by hand: equal to one process, and bytes by formula."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import assert_one_line, load_script
from helpers_05 import TOKENS, D, L, counted, failing, run_small

SCRIPT = "05-advanced/tensor_parallel.py"
FULL = pytest.mark.full
run = partial(run_small, SCRIPT)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=FULL)])
def test_tensor_parallelism_has_the_losses_and_gradients_of_one_process(
    run_script, tmp_path, world_size
):
    """Tolerance 1e-5: float32 sums of some hundred terms, in another order (measured: 1e-6)."""
    content = run(run_script, tmp_path, world_size)
    assert not failing(content) and len(content["checks"]) == 19
    metrics = content["metrics"]
    # A ring sends 2(n-1)/n of a tensor for an all-reduce, half of it for each of the other two.
    share = 2 * (world_size - 1) / world_size
    of_all = (4 * L + 2) * TOKENS * D * 4 + 3 * TOKENS * 4
    calls = {"all-reduces": 4 * L + 2 + 3}
    assert counted(content, "tensor parallel") == (calls, share * of_all)
    norms = (2 * L + 1) * D * 4
    calls = {"all-gathers": 4 * L + 2, "reduce-scatters": 4 * L + 2, "all-reduces": 3 + 1}
    assert counted(content, "sequence parallel") == (calls, share * (of_all + norms))
    kept = [metrics[f"bytes kept by a block, {way}"]
            for way in ("sequence parallel", "tensor parallel", "one process")]  # fmt: skip
    assert kept == sorted(kept) and len(set(kept)) == 3
    assert metrics["losses, tensor parallel"][0] > metrics["losses, tensor parallel"][-1]
    assert (tmp_path / "run" / "tensor_parallel_cuts.png").stat().st_size > 10_000


def forget_g(script):
    script.g = script.same


def forget_f(script):
    script.f = script.same


def keep_the_norms_whole(script):
    """Gather before the norm instead of after it: right values, but the norm keeps all tokens."""

    def forward(self, x, cos, sin):
        h = self.attention_norm(self.f(x))
        x = x + self.g(self.attention(h, cos, sin))
        h = self.ffn_norm(self.f(x))
        return x + self.g(self.down(F.silu(self.gate(h)) * self.up(h)))

    script.ParallelBlock.forward = forward


OWN = "own columns put back, and f: weights with a wrong gradient"


@pytest.mark.parametrize(
    ("sabotage", "red"),
    [
        (forget_g, {"tensor parallel: gradient error", "tensor parallel, a step: all-reduces",
                    "tensor parallel: largest error of a loss"}),
        (forget_f, {OWN, "tensor parallel: gradient error",
                    "tensor parallel, a block: bytes sent"}),
        pytest.param(keep_the_norms_whole, {"sequence parallel, a block: bytes kept for backward"},
                     marks=FULL),
    ],
)  # fmt: skip
def test_sabotage_of_tensor_parallelism_fails_a_check(run_script, tmp_path, sabotage, red):
    content = run(run_script, tmp_path, 2, before=sabotage, codes=(1,))
    assert red <= failing(content), failing(content)


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    [
        (2, ("--num-kv-heads", 1), "1 key and value heads (--num-kv-heads) cannot be cut into 2"),
        *(pytest.param(*row, marks=FULL) for row in (
            (3, (), "4 heads cannot be cut into 3 equal parts"),
            (2, ("--seq-len", 33), "33 tokens of a sequence (--seq-len)"),
            (2, ("--num-kv-heads", 3), "--num-kv-heads 3 does not divide the model's 4 heads"),
            (2, ("--batch-size", 10**6), "--max-steps times --batch-size must be less"),
        )),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(run_script, world_size, argv, says):
    assert_one_line(run_script(SCRIPT, *argv, world_size=world_size), says, "tensor_parallel.py")


def loss_of_large_logits(rank, world_size):
    """Return own and expected loss, and the error of the gradient, of logits up to 1e4."""
    script = load_script(SCRIPT)
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


@pytest.mark.parametrize("world_size", [3])
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


@pytest.mark.parametrize("world_size", [3])
def test_torchs_all_gather_for_autograd_adds_up_equal_losses(on_ranks, world_size):
    """Its backward sums over the ranks: right where each has a loss of its own, n times here."""
    ended = on_ranks(gradient_through_torchs_own_all_gather, world_size)
    assert ended == [[float(world_size)] * 3] * world_size
