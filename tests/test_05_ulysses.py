"""Ulysses gives what full attention in one process gives; what it sends beside ring attention."""

import math

import pytest
import torch
import torch.distributed as dist
from conftest import REPO, assert_one_line, load_script, results_of

from advanced_parts import ring_attention
from advanced_parts import ulysses as part
from legacy_common import models

RING, SCRIPT = "05-advanced/ring_attention.py", "05-advanced/ulysses.py"
SMALL = ("--seq-len", 48, "--batch-size", 1)
FULL = pytest.mark.full


@pytest.mark.parametrize("world_size", [4, pytest.param(2, marks=FULL)])
def test_ulysses_is_full_attention(run_script, tmp_path, world_size):
    """On 4 ranks the 2 key and value heads are repeated. Tolerance as in ring_attention."""
    folder = tmp_path / "run"
    ended = run_script(SCRIPT, *SMALL, "--output-dir", folder, world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    content = results_of(folder)
    assert all(check["ok"] for check in content["checks"])
    # q and out have 4 heads, k and v as many as ranks, 2 at least; a rank's own part stays.
    heads = 2 * 4 + 2 * max(world_size, 2)
    expected = 48 // world_size * heads * 32 * 4 * (world_size - 1) // world_size
    for way in ("forward", "backward"):
        assert content["metrics"][f"ulysses {way} bytes per layer"] == expected


def leave_out_the_second_all_to_all(script):
    """The shape is right, but most of it belongs to other tokens."""
    script.to_tokens = lambda x, group: x.reshape(
        x.shape[0], x.shape[1] * dist.get_world_size(), -1, x.shape[3]
    )


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (leave_out_the_second_all_to_all,
         {"ulysses: gradient, relative error", "forward: all-to-alls per layer",
          "ulysses, forward: bytes sent per layer"}),
    ],
)  # fmt: skip
def test_sabotage_of_ulysses_fails_a_check(run_script, tmp_path, sabotage, failing):
    folder = tmp_path / "run"
    arguments = (*SMALL, "--output-dir", folder)
    ended = run_script(SCRIPT, *arguments, world_size=4, before=sabotage)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    bad = {check["name"] for check in results_of(folder)["checks"] if not check["ok"]}
    assert failing <= bad


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    [
        (3, ("--seq-len", 48), "4 heads cannot be dealt to 3 ranks alike: start 1, 2, 4"),
        pytest.param(2, ("--seq-len", 49), "--seq-len 49 is not divisible by 2 (tokens on 2 ranks)",
                     marks=FULL),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(run_script, world_size, argv, says):
    assert_one_line(run_script(SCRIPT, *argv, world_size=world_size), says, "ulysses.py")


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
        "ulysses": (load_script(SCRIPT).ulysses_attention,
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
    ],
)
def test_other_shapes_and_bfloat16(on_ranks, world_size, dtype, heads, kv_heads, tolerance):
    for errors in on_ranks(other_shapes, world_size, dtype, heads, kv_heads):
        assert max(errors.values()) < tolerance, errors


def test_costs_by_hand():
    """Llama 3 8B: 32 heads, 8 for keys and values, 128 wide; 8,192 tokens on 8 ranks, bfloat16."""
    config = models.PRESETS["llama3-8b"]
    block = 2 * 1024 * 8 * 128  # numbers in a rank's k and v
    assert ring_attention.ring_bytes(config, 8192, 8, 2) == (7 * block * 2, 7 * block * (2 + 4))
    assert part.all_gather_bytes(config, 8192, 8, 2) == (7 * block * 2, 7 * block * 4)
    own = 1024 * (2 * 32 + 2 * 8) * 128 * 2
    assert part.ulysses_bytes(config, 8192, 8, 2) == (own * 7 // 8, own * 7 // 8)
    repeated = 512 * (2 * 32 + 2 * 16) * 128 * 2  # 16 ranks: each key and value head twice
    assert part.ulysses_bytes(config, 8192, 16, 2)[0] == repeated * 15 // 16


def test_the_page_says_from_how_many_tokens_the_ring_hides_its_sends():
    """c tokens per rank send 4 c kv_dim bytes while 2 c c D operations are computed."""
    page = (REPO / "05-advanced/ulysses.md").read_text()
    for name in part.COMPARED:
        config = models.PRESETS[name]
        kv_dim = config.dim // config.num_heads * config.num_kv_heads
        least = (math.ceil(2 * kv_dim / config.dim * 989.4e12 / link) for link in (450e9, 50e9))
        assert f"| {name} | {' | '.join(f'{tokens:,}' for tokens in least)} |" in page
