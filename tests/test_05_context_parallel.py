"""Context parallelism: ring attention and Ulysses give what full attention in one process gives."""

import sys

import pytest
import torch
import torch.distributed as dist
from conftest import GPUS, REPO, load_script, results_of, run_command
from torch._subclasses.fake_tensor import FakeTensorMode

import cp_costs
import cp_kernels
import cp_ring
from dist_common import models

RING, ULYSSES = "05-advanced/ring_attention.py", "05-advanced/ulysses.py"
SMALL = ("--seq-len", 48, "--batch-size", 1)
SMALL_RING = (*SMALL, "--memory-tokens", 16)
FULL = pytest.mark.full


def sizes(quick, full):
    return [*quick, *(pytest.param(n, marks=FULL) for n in full)]


def failed_checks(folder) -> set[str]:
    return {check["name"] for check in results_of(folder)["checks"] if not check["ok"]}


# the scripts


@pytest.mark.parametrize("world_size", sizes([2, 3], [1, 4]))
def test_ring_attention_is_full_attention(run_script, tmp_path, world_size):
    """Tolerance 1e-5: float32 keeps 1.2e-7 of a number, sums of a few hundred in another order."""
    folder = tmp_path / "run"
    arguments = (*SMALL, "--memory-tokens", 128, "--output-dir", folder)
    ended = run_script(RING, *arguments, world_size=world_size)
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
    if world_size > 1:
        assert metrics["contiguous busy"] < 0.85
    for name in ("steps", "blocks", "memory"):
        assert (folder / f"ring_attention_{name}.png").exists()
    # Full attention in one process needs as many times the memory as there are tokens; a rank of
    # a ring does not, but for the keys and values that are under way.
    rows = metrics["memory"]
    _, ranks, full, peak, _ = rows[-1]
    assert ranks == world_size
    assert full == pytest.approx(ranks * rows[0][2], rel=0.1)
    assert peak == pytest.approx(rows[0][3], rel=0.1)


@pytest.mark.parametrize("world_size", sizes([2, 4], [1]))
def test_ulysses_is_full_attention(run_script, tmp_path, world_size):
    """On 4 ranks the 2 key and value heads are repeated. Tolerance as above."""
    folder = tmp_path / "run"
    ended = run_script(ULYSSES, *SMALL, "--output-dir", folder, world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    content = results_of(folder)
    assert all(check["ok"] for check in content["checks"])
    # q and out have 4 heads, k and v as many as ranks, 2 at least; a rank's own part stays.
    heads = 2 * 4 + 2 * max(world_size, 2)
    expected = 48 // world_size * heads * 32 * 4 * (world_size - 1) // world_size
    for way in ("forward", "backward"):
        assert content["metrics"][f"ulysses {way} bytes per layer"] == expected
    assert (folder / "ulysses_layouts.png").exists()


# sabotage: one per kind of check


def send_to_the_previous_rank(script):
    """On 2 ranks both neighbours are the same one: the mistake shows from 3 ranks on."""
    right = script.Ring.neighbours
    script.Ring.neighbours = lambda ring: right(ring)[::-1]


def merge_without_rescaling(script):
    def merge(out, lse, part, part_lse):
        total = torch.logaddexp(lse, part_lse)
        out.add_((part_lse - total).exp()[..., None] * part)
        lse.copy_(total)

    script.merge = merge


class EarlyKey(int):
    """The number of a chunk that no chunk of queries is earlier than."""

    def __le__(self, other):
        return True


def compute_the_future_too(script):
    right = script.Ring.chunks_of
    script.Ring.chunks_of = lambda ring, rank: [EarlyKey(n) for n in right(ring, rank)]


def leave_gradients_unsummed(script):
    sys.modules["cp_checks"].sum_gradients = lambda model: None


def count_the_mean_of_each_rank(script):
    """Each rank divides by its own number of tokens, as the loop of a single process does."""
    right = sys.modules["cp_checks"].sharded_loss
    sys.modules["cp_checks"].sharded_loss = lambda *args: right(*args) * dist.get_world_size()


def send_everything_twice(script):
    right = script.Ring.pass_on

    def twice(ring, tensor):
        right(ring, tensor)()
        return right(ring, tensor)

    script.Ring.pass_on = twice


def keep_all_keys(script):
    """Keep for backward as much as the keys of all ranks are."""
    right = script.ring_attention

    def greedy(q, k, v, ring):
        return right(q, k, v, ring) + 0 * torch.cat([k] * ring.size, dim=2).exp().mean()

    script.ring_attention = greedy


def forget_the_positions(script):
    """Rotate each rank's queries and keys as if its tokens were the first ones."""
    forward = models.Transformer.forward
    models.Transformer.forward = lambda model, tokens, positions=None: forward(model, tokens)


RING_SABOTAGES = [
    (send_to_the_previous_rank, 3, {"out: attention, relative error"}, ()),
    (merge_without_rescaling, 2, {"out: attention, relative error"}, ()),
    (leave_gradients_unsummed, 2, {"gradient, relative error"}, ()),
    (keep_all_keys, 2, {"2 ranks: bytes kept for backward"}, ()),
    (send_everything_twice, 2, {"forward: bytes sent per layer"}, ()),
    (compute_the_future_too, 2, {"pairs, all ranks", "pairs, busiest rank"}, ()),
    (count_the_mean_of_each_rank, 2, {"loss, relative error"}, ()),
    (forget_the_positions, 2, {"gradient, relative error"}, FULL),
]


@pytest.mark.parametrize(
    ("sabotage", "world_size", "failing"),
    [pytest.param(*case[:3], marks=case[3]) for case in RING_SABOTAGES],
)
def test_sabotage_of_the_ring_fails_a_check(run_script, tmp_path, sabotage, world_size, failing):
    folder = tmp_path / "run"
    arguments = (*SMALL_RING, "--layout", "zig-zag", "--output-dir", folder)
    ended = run_script(RING, *arguments, world_size=world_size, before=sabotage)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    bad = failed_checks(folder)
    for name in failing:
        assert any(check.endswith(name) for check in bad), bad
    if sabotage in (leave_gradients_unsummed, keep_all_keys, send_everything_twice):
        kind = next(iter(failing)).rpartition(": ")[2]
        assert all(name.endswith(kind) for name in bad), "nothing else is wrong"


def leave_out_the_second_all_to_all(script):
    """The shape is right, but most of it belongs to other tokens."""
    script.to_tokens = lambda x, group: x.reshape(
        x.shape[0], x.shape[1] * dist.get_world_size(), -1, x.shape[3]
    )


def repeat_heads_in_another_order(script):
    script.repeat_heads = lambda x, ranks: x.repeat(1, max(1, ranks // x.shape[1]), 1, 1)


ULYSSES_SABOTAGES = [
    (
        leave_out_the_second_all_to_all,
        {"ulysses, out: attention, relative error", "forward: all-to-alls per layer",
         "ulysses, forward: bytes sent per layer"},
        (),
    ),
    (leave_gradients_unsummed, {"ulysses: gradient, relative error"}, FULL),
    (repeat_heads_in_another_order, {"ulysses, out: attention, relative error"}, FULL),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [pytest.param(*case[:2], marks=case[2]) for case in ULYSSES_SABOTAGES],
)
def test_sabotage_of_ulysses_fails_a_check(run_script, tmp_path, sabotage, failing):
    folder = tmp_path / "run"
    arguments = (*SMALL, "--output-dir", folder)
    ended = run_script(ULYSSES, *arguments, world_size=4, before=sabotage)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    assert failing <= failed_checks(folder)


# bad input


@pytest.mark.parametrize(
    ("script", "world_size", "argv", "says"),
    [
        (RING, 2, ("--seq-len", 50), "--seq-len 50 is not divisible by 4 (zig-zag on 2 ranks): "
                                     "take 48 or 52"),
        (RING, 2, ("--layout", "contiguous", "--seq-len", 51), "is not divisible by 2 (contiguous"),
        (RING, 2, ("--memory-tokens", 3), "--memory-tokens 3 is not divisible by 2"),
        (RING, 2, ("--layout", "striped"), "--layout: invalid choice: 'striped'"),
        (RING, 1, ("--seq-len", 8_000_000), "are more than the text's 4,000,000"),
        (ULYSSES, 2, ("--seq-len", 49), "--seq-len 49 is not divisible by 2 (tokens on 2 ranks)"),
        (ULYSSES, 3, ("--seq-len", 48), "4 heads cannot be dealt to 3 ranks alike: start 1, 2, 4"),
    ],
)  # fmt: skip
def test_context_parallelism_refuses_bad_input(run_script, script, world_size, argv, says):
    ended = run_script(script, *argv, world_size=world_size)
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"{script.split('/')[1]}: error: ") and says in line and 2 in ended.codes


def test_contiguous_needs_no_even_chunks(run_script, tmp_path):
    arguments = ("--layout", "contiguous", "--seq-len", 34, "--batch-size", 1)
    ended = run_script(RING, *arguments, "--memory-tokens", 7, world_size=2)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr


# their parts


@pytest.mark.parametrize("layout", ["contiguous", "zig-zag"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_layouts_compute_every_block_once_and_follow_the_formula(layout, ranks):
    script = load_script(RING)
    chunk = 2
    seq_len = chunk * ranks * script.LAYOUTS[layout]
    records, held = [], []
    for rank in range(ranks):
        ring = object.__new__(script.Ring)  # without a group
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
    totals = [sum(steps) for steps in cp_ring.pairs_per_step(records, seq_len)]
    assert max(totals) == cp_ring.busiest_by_formula(layout, seq_len, ranks)
    if layout == "zig-zag":
        assert len(set(totals)) == 1


def test_merge_gives_the_softmax_over_all_keys_in_any_order():
    script = load_script(RING)
    torch.manual_seed(0)
    q = torch.randn(1, 2, 5, 8)
    k, v = 4 * torch.randn(2, 1, 2, 9, 8)  # scores far apart: naive sums of exp would lose digits
    whole, whole_lse = cp_kernels.attend_block(q, k, v, False)
    for order in ([0, 1, 2], [2, 0, 1]):
        out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf)
        for piece in order:
            part = slice(3 * piece, 3 * piece + 3)
            script.merge(out, lse, *cp_kernels.attend_block(q, k[:, :, part], v[:, :, part], False))
        assert torch.allclose(out, whole, atol=1e-6) and torch.allclose(lse, whole_lse, atol=1e-5)


def other_shapes(rank, world_size, dtype, heads, kv_heads):
    """Return the largest errors of both ways against full attention in float32."""
    torch.manual_seed(0)
    shapes = [(2, h, 24, 16) for h in (heads, kv_heads, kv_heads, heads)]
    *whole, grad_out = (torch.randn(shape) for shape in shapes)
    expected = models.causal_attention(*[x.requires_grad_() for x in whole])
    expected = [expected, *torch.autograd.grad(expected, whole, grad_out)]
    ring = load_script(RING).Ring("zig-zag")
    ways = {
        "ring": (lambda q, k, v: load_script(RING).ring_attention(q, k, v, ring),
                 ring.positions(24)),
        "ulysses": (load_script(ULYSSES).ulysses_attention,
                    torch.arange(24).chunk(world_size)[rank]),
    }  # fmt: skip
    errors = {}
    for name, (attend, places) in ways.items():
        own = [x.detach()[:, :, places].to(dtype).requires_grad_() for x in whole]
        out = attend(*own)
        found = [out, *torch.autograd.grad(out, own, grad_out[:, :, places].to(dtype))]
        assert all(x.dtype == dtype for x in found)
        pairs = zip(found, expected, strict=True)
        errors[name] = max((x.float() - y[:, :, places]).abs().max().item() for x, y in pairs)
    return errors


@pytest.mark.parametrize(
    ("world_size", "dtype", "heads", "kv_heads", "tolerance"),
    [
        (2, torch.float32, 6, 3, 1e-5),  # 3 kv heads on 2 ranks: Ulysses repeats them to 6
        # bfloat16 keeps 8 bits, 0.4% of numbers up to about 5.
        (2, torch.bfloat16, 4, 4, 0.06),
        pytest.param(3, torch.float32, 6, 1, 1e-5, marks=FULL),
        pytest.param(4, torch.float32, 8, 2, 1e-5, marks=FULL),
    ],
)
def test_other_shapes_and_bfloat16(on_ranks, world_size, dtype, heads, kv_heads, tolerance):
    for errors in on_ranks(other_shapes, world_size, dtype, heads, kv_heads):
        assert max(errors.values()) < tolerance, errors


def test_the_cuda_kernels_get_shapes_that_they_accept():
    """PyTorch checks the arguments of its CUDA kernels without a GPU; 20 tokens are no multiple."""
    with FakeTensorMode():
        q = torch.empty(2, 4, 20, 8, device="cuda")
        k, v = torch.empty(2, 2, 2, 24, 8, device="cuda")
        out, lse = cp_kernels.attend_block(q, k, v, causal=False)
        assert out.shape == q.shape and lse.shape == (2, 4, 20)
        gradients = cp_kernels.attend_block_backward(out, q, out, lse, k, v, causal=False)
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


def test_costs_by_hand():
    """Llama 3 8B: 32 heads, 8 for keys and values, 128 wide; 8,192 tokens on 8 ranks, bfloat16."""
    config = models.PRESETS["llama3-8b"]
    block = 2 * 1024 * 8 * 128  # numbers in a rank's k and v
    assert cp_costs.ring_bytes(config, 8192, 8, 2) == (7 * block * 2, 7 * block * (2 + 4))
    assert cp_costs.all_gather_bytes(config, 8192, 8, 2) == (7 * block * 2, 7 * block * 4)
    own = 1024 * (2 * 32 + 2 * 8) * 128 * 2
    assert cp_costs.ulysses_bytes(config, 8192, 8, 2) == (own * 7 // 8, own * 7 // 8)
    repeated = 512 * (2 * 32 + 2 * 16) * 128 * 2  # 16 ranks: each key and value head twice
    assert cp_costs.ulysses_bytes(config, 8192, 16, 2)[0] == repeated * 15 // 16
    # Without the causal half and with as many kv heads: F / B, as the paper has it.
    multi_head = models.PRESETS["llama2-7b"]
    assert cp_costs.tokens_to_hide(multi_head, 450) == pytest.approx(2 * 989.4e12 / 450e9, abs=1)


@FULL
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
@pytest.mark.parametrize("script", [RING, ULYSSES])
def test_context_parallelism_runs_on_gpus(script):
    ranks = min(len(GPUS.split(",")), 4)
    ranks = 2 if ranks == 3 else ranks
    command = ["torchrun", "--standalone", f"--nproc-per-node={ranks}", script]
    ended = run_command([*command, "--device", "cuda"], REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert " cuda with nccl" in ended.stdout
