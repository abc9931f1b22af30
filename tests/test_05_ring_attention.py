"""Ring attention gives what full attention in one process gives, with work and memory balanced."""

import dataclasses

import pytest
import torch
from conftest import assert_one_line, load_script, results_of
from torch._subclasses.fake_tensor import FakeTensorMode

from advanced_parts import ring_attention as part
from legacy_common import models

SCRIPT = "05-advanced/ring_attention.py"
SMALL = ("--seq-len", 48, "--batch-size", 1, "--memory-tokens", 16)
FULL = pytest.mark.full
lesson = load_script(SCRIPT)


def one_layer(script):
    models.PRESETS["tiny"] = dataclasses.replace(models.PRESETS["tiny"], num_layers=1)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=FULL)])
def test_ring_attention_is_full_attention(run_script, tmp_path, world_size):
    """Tolerance 1e-5: float32 keeps 1.2e-7 of a number, sums of a few hundred in another order."""
    folder = tmp_path / "run"
    arguments = (*SMALL, "--memory-tokens", 128, "--output-dir", folder)
    ended = run_script(SCRIPT, *arguments, world_size=world_size, before=one_layer)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    content = results_of(folder)
    assert all(check["ok"] for check in content["checks"])
    names = {check["name"] for check in content["checks"]}
    for layout in ("contiguous", "zig-zag"):
        assert {f"{layout}: loss, relative error", f"{layout}: gradient, relative error"} <= names
        # Preset tiny: k and v of 48 tokens, 2 heads of 32, 4 bytes; backward dk and dv too.
        hop = 2 * 48 // world_size * 2 * 32 * 4
        metrics = content["metrics"]
        assert metrics[f"{layout} forward bytes per layer"] == (world_size - 1) * hop
        assert metrics[f"{layout} backward bytes per layer"] == 2 * (world_size - 1) * hop
    assert len(set(metrics["zig-zag pairs"])) == 1
    assert metrics["zig-zag busy"] == 1
    assert metrics["contiguous busy"] < 0.85
    assert (folder / "ring_attention_blocks.png").exists()
    # Full attention in one process needs as many times the memory as there are tokens; a rank of
    # a ring does not, but for the keys and values that are under way.
    rows = metrics["memory"]
    _, ranks, full, peak, _ = rows[-1]
    assert ranks == world_size
    assert full == pytest.approx(ranks * rows[0][2], rel=0.1)
    assert peak == pytest.approx(rows[0][3], rel=0.1)


def send_to_the_previous_rank(script):
    """On 2 ranks both neighbours are the same one: the mistake shows from 3 ranks on."""
    right = script.Ring.neighbours
    script.Ring.neighbours = lambda ring: right(ring)[::-1]


class EarlyKey(int):
    """The number of a chunk that no chunk of queries is earlier than."""

    def __le__(self, other):
        return True


def compute_the_future_too(script):
    right = script.Ring.chunks_of
    script.Ring.chunks_of = lambda ring, rank: [EarlyKey(n) for n in right(ring, rank)]


def wait_at_once(script):
    right = script.Ring.pass_on

    def pass_on(ring, tensor):
        received = right(ring, tensor)()
        return lambda: received

    script.Ring.pass_on = pass_on


def keep_all_keys(script):
    """Keep for backward as much as the keys of all ranks are."""
    right = script.ring_attention

    def greedy(q, k, v, ring):
        return right(q, k, v, ring) + 0 * torch.cat([k] * ring.size, dim=2).exp().mean()

    script.ring_attention = greedy


@pytest.mark.parametrize(
    ("sabotage", "world_size", "failing"),
    [
        (wait_at_once, 2, {"hops that nothing hides"}),
        *(pytest.param(*row, marks=FULL) for row in (
            (keep_all_keys, 2, {"2 ranks: bytes kept for backward"}),
            (compute_the_future_too, 2, {"pairs, all ranks", "pairs, busiest rank"}),
            (send_to_the_previous_rank, 3, {"gradient, relative error"}),
        )),
    ],
)  # fmt: skip
def test_sabotage_of_the_ring_fails_a_check(run_script, tmp_path, sabotage, world_size, failing):
    folder = tmp_path / "run"
    arguments = (*SMALL, "--layout", "zig-zag", "--output-dir", folder)

    def before(script):
        one_layer(script)
        sabotage(script)

    ended = run_script(SCRIPT, *arguments, world_size=world_size, before=before)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    bad = {check["name"] for check in results_of(folder)["checks"] if not check["ok"]}
    for name in failing:
        assert any(check.endswith(name) for check in bad), bad
    if sabotage in (keep_all_keys, wait_at_once):
        kind = next(iter(failing)).rpartition(": ")[2]
        assert all(name.endswith(kind) for name in bad), "nothing else is wrong"


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    [
        (2, ("--seq-len", 50), "--seq-len 50 is not divisible by 4 (zig-zag on 2 ranks): "
                               "take 48 or 52"),
        *(pytest.param(*row, marks=FULL) for row in (
            (2, ("--layout", "contiguous", "--seq-len", 51), "is not divisible by 2 (contiguous"),
            (2, ("--memory-tokens", 3), "--memory-tokens 3 is not divisible by 2"),
            (1, ("--seq-len", 8_000_000), "are more than the text's 4,000,000"),
        )),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(run_script, world_size, argv, says):
    assert_one_line(run_script(SCRIPT, *argv, world_size=world_size), says, "ring_attention.py")


@pytest.mark.parametrize("layout", ["contiguous", "zig-zag"])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_layouts_compute_every_block_once_and_follow_the_formula(layout, ranks):
    chunk = 2
    seq_len = chunk * ranks * lesson.LAYOUTS[layout]
    records, held = [], []
    for rank in range(ranks):
        ring = object.__new__(lesson.Ring)  # without a group
        ring.layout, ring.rank, ring.size = layout, rank, ranks
        held += ring.positions(seq_len).tolist()
        blocks = [(step, block) for step in range(ranks)
                  for block in ring.blocks(step, seq_len // ranks)]  # fmt: skip
        records.append([(step, block.query, block.key) for step, block in blocks])
        assert {block.causal for step, block in blocks if step == 0} >= {True}
    assert sorted(held) == list(range(seq_len))
    computed = sorted((query, key) for record in records for _, query, key in record)
    chunks = seq_len // chunk
    assert computed == [(q, k) for q in range(chunks) for k in range(q + 1)]
    totals = [sum(steps) for steps in part.pairs_per_step(records, seq_len)]
    assert max(totals) == part.busiest_by_formula(layout, seq_len, ranks)
    if layout == "zig-zag":
        assert len(set(totals)) == 1


def test_merge_gives_the_softmax_over_all_keys_in_any_order():
    torch.manual_seed(0)
    q = torch.randn(1, 2, 5, 8)
    k, v = 4 * torch.randn(2, 1, 2, 9, 8)  # scores far apart: naive sums of exp would lose digits
    whole, whole_lse = lesson.attend_block(q, k, v, False)
    for order in ([0, 1, 2], [2, 0, 1]):
        out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf)
        for piece in order:
            own = slice(3 * piece, 3 * piece + 3)
            lesson.merge(out, lse, *lesson.attend_block(q, k[:, :, own], v[:, :, own], False))
        assert torch.allclose(out, whole, atol=1e-6) and torch.allclose(lse, whole_lse, atol=1e-5)


def test_the_cuda_kernels_get_shapes_that_they_accept():
    """PyTorch checks the arguments of its CUDA kernels without a GPU; 20 tokens are no multiple."""
    with FakeTensorMode():
        q = torch.empty(2, 4, 20, 8, device="cuda")
        k, v = torch.empty(2, 2, 2, 24, 8, device="cuda")
        out, lse = lesson.attend_block(q, k, v, causal=False)
        assert out.shape == q.shape and lse.shape == (2, 4, 20)
        gradients = lesson.attend_block_backward(out, q, out, lse, k, v, causal=False)
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
