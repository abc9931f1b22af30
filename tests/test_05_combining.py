"""combining.py: what cheaper steps change of a layout, and the picture of the best layouts."""

import json
import re

import pytest
from helpers_05 import ask

from advanced_parts import plan_picture
from dist_common import cli
from dist_common.costs import models


@pytest.fixture
def say(capsys, monkeypatch):
    return lambda *argv: ask(capsys, monkeypatch, *argv)


def test_cheaper_steps_send_what_their_lessons_derive(say):
    """Each by its own formula: the all-reduce of DDP, n ranks, m micro-batches."""
    n, m = 16, 8
    flags = ("predict", "--model", "llama3.2-1b", "--global-batch", n * m, "--network-gb-s", 1,
             "--cheaper")  # fmt: skip
    answer = json.loads(say(*flags, "--dp", n, "--json"))
    found = {row.pop("change"): row for row in answer["cheaper"]}
    assert len(found) == 11 and found["as above"]["step_time_s"] == answer["step_time_s"]
    sent = {name: row["dp_bytes"] for name, row in found.items()}
    weights = models.parameters(models.MODELS["llama3.2-1b"])
    ddp = 2 * (n - 1) / n * 4 * weights
    assert sent["as above"] == pytest.approx(ddp)
    assert sent["without no_sync"] == pytest.approx(m * ddp)
    assert sent["bf16 gradients"] == pytest.approx(ddp / 2)
    assert sent["DiLoCo, 50 steps"] == pytest.approx(ddp / 50)
    assert sent["top 1%"] == pytest.approx((n - 1) * weights / 100 * (4 + 4))
    # P and Q of width 4: of two D x D, two D x kv, three D x F, and of the table; norms are whole.
    D, kv_dim, F, V, L = 2048, 512, 8192, 128_256, 16
    layer = 4 * (2 * (D + D) + 2 * (D + kv_dim) + 3 * (D + F)) + 2 * D
    low_rank = 2 * (n - 1) / n * 4 * (L * layer + 4 * (V + D) + D)
    assert sent["PowerSGD, rank 4"] == pytest.approx(low_rank)
    lossy = ("PowerSGD, rank 4", "top 1%", "DiLoCo, 50 steps")
    for waits in (*lossy, "without overlap"):
        each = found[waits]
        assert each["dp_exposed_s"] == pytest.approx(each["dp_takes_s"]) != 0, waits
    kept = found["as above"]["memory_bytes"]
    copies = [(found[name]["memory_bytes"] - kept) / 4 / weights for name in lossy]
    assert copies == pytest.approx([1, 1, 2])
    steps = {name: row["step_time_s"] for name, row in found.items()}
    for name in (*lossy, "bf16 gradients", "fp8 products", "4 micro-batches of 2"):
        assert steps[name] < steps["as above"] < steps["without overlap"], name
    assert steps["without no_sync"] == max(steps.values())
    full = found["recompute full"]
    assert full["memory_bytes"] < kept and full["price"].endswith("% compute")
    table = say(*flags, "--dp", n).splitlines()[-len(found) :]
    assert [line.split("  ")[0] for line in table] == list(found)
    held = f"{full['memory_bytes'] / 2**30:.1f} GiB  {full['step_time_s']:.3f} s"
    assert re.search(rf"9.27 GB .* {full['dp_exposed_s']:.3f} s +{held}", table[2])


def test_cheaper_steps_are_those_that_a_layout_allows(say):
    def names(*more) -> str:
        flags = ("predict", "--model", "llama3.2-1b", "--cheaper", "--json", *more)
        return " ".join(row["change"] for row in json.loads(say(*flags))["cheaper"])

    assert names().endswith("fp8 products"), "one GPU sends nothing"
    assert "fp8" not in names("--gpu", "a100")
    sharded = names("--dp", 16, "--zero", 3)
    assert "bf16 gradients" in sharded and "without overlap" not in sharded
    assert "PowerSGD" not in sharded, "hooks are DDP's"
    assert "PowerSGD" not in names("--dp", 8, "--tp", 2)
    assert "micro" not in names("--pp", 4, "--interleave", 2, "--global-batch", 4)


def test_the_best_are_drawn_part_by_part(say, tmp_path, monkeypatch):
    drawn = []
    parts = plan_picture.draw_parts
    monkeypatch.setattr(plan_picture, "draw_parts",
                        lambda axes, *rest: parts(axes, *rest) or drawn.append(axes))  # fmt: skip
    flags = ("plan", "--model", "llama3-8b", "--gpus", 16, "--global-batch", 64, "--json")
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        plans = json.loads(say(*flags, "--output-dir", folder))["plans"]
    one, two = [(folder / plan_picture.PICTURE).read_bytes() for folder in folders]
    assert one == two
    with pytest.raises(cli.UsageError, match="one is not empty"):
        say(*flags, "--output-dir", folders[0])
    times, sizes = [ends_of(axes) for axes in drawn[:2]]
    assert times == pytest.approx([plan["step_time_s"] for plan in plans])
    held = [plan["memory_bytes"]["total"] / 2**30 for plan in plans]
    assert sizes == pytest.approx(held)
    (limit,) = drawn[1].lines
    assert limit.get_xdata()[0] * 2**30 == pytest.approx(plans[0]["memory_bytes"]["limit"])


def ends_of(axes) -> list[float]:
    """Return where each row of bars ends."""
    return [bar.get_x() + bar.get_width() for bar in axes.containers[-1]]
