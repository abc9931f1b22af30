"""What adapters and 4-bit weights take: by hand, by published runs, and each term's absence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner import adapters, compute, finetune, finetune_times, models, step
from planner.hardware import GPUS, Cluster
from planner.job import Job, Layout
from planner.rates import RATES

A100 = Cluster(GPUS["a100"])
LLAMA = models.MODELS["llama2-7b"]
LINEAR = ("query", "key", "value", "projection", "mlp")
LORA = Job(LLAMA, 2048, 8, frozen=True, adapter_rank=16, adapter_targets=LINEAR)
QLORA = replace(LORA, quant="nf4")
LAYOUT = Layout(dp=2, micro_batch=4, recompute="full")


def parts_of(job: Job, layout: Layout = LAYOUT, cluster: Cluster = A100) -> dict[str, float]:
    return step.step_of_adapters(job, layout, cluster, RATES)


def test_one_adapter_moves_its_operands_and_adds_its_output():
    """By hand for queries alone, m tokens and h inputs and outputs: numbers read and written."""
    job = replace(LORA, adapter_targets=("query",))
    m, h, r = 4 * 2048, LLAMA.hidden, 16
    product = m * h + m * r + h * r  # each of two forward and four backward
    forward = 2 * product + (2 + 3) * m * h  # scaled: read, write; added: two read, one written
    backward = 4 * product + (2 + 3) * m * h
    rate = A100.gpu.hbm_gb_s * 1e9 * RATES["hbm"]
    found = adapters.adapter_seconds(job, LAYOUT, A100, RATES)
    assert found == pytest.approx((2 * forward / rate, 2 * backward / rate))


def test_four_bits_are_read_and_sixteen_written_once_for_each_product():
    weights = models.matrix_parameters(LLAMA, 0)
    once = weights * (0.5 + 4 / 64 + 2) / (2039e9 * RATES["hbm"])
    assert adapters.unpack_seconds(QLORA, A100, RATES) == pytest.approx(once)
    assert adapters.unpack_seconds(LORA, A100, RATES) == 0
    slow = adapters.unpack_seconds(replace(QLORA, unpacks_slowly=True), A100, RATES)
    assert slow == pytest.approx(once * RATES["hbm"] / finetune.NF4_RATE)
    for recompute, times in (("none", 2), ("full", 3)):
        parts = parts_of(QLORA, replace(LAYOUT, recompute=recompute))
        assert parts["unpacking"] == pytest.approx(times * LLAMA.layers * once), recompute


def test_frozen_weights_lose_a_product_of_three_and_their_update():
    whole = step.step_parts(replace(LORA, frozen=False, adapter_rank=0), LAYOUT, A100, RATES)
    parts = parts_of(LORA)
    forward, back = compute.three_products(8192, 4096, 4096, LORA, A100, RATES)
    assert forward == pytest.approx(back), "one product back: the gradient of the input"
    assert 3 / 4 < parts["compute"] / whole["compute"] < 0.85, "recomputed: 3 products of 4"
    share = finetune.trained_parameters(LLAMA, "lora", 16, LINEAR) / models.parameters(LLAMA)
    assert parts["optimizer"] == pytest.approx(share * whole["optimizer"])
    assert 0 < parts["dp"] < whole["dp"] / 20, "adapters' gradients are averaged, once a step"


def test_sharded_four_bit_weights_are_gathered_as_four_bits():
    cluster = replace(A100, network_scale=1e-3)  # nothing else hides or starts a gather
    layout = replace(LAYOUT, zero=3)
    wide, narrow = (parts_of(job, layout, cluster)["dp"] for job in (LORA, QLORA))
    assert narrow / wide == pytest.approx((0.5 + 4 / 64) / 2, rel=0.05)


# published runs


def test_published_runs_are_predicted_within_their_bands():
    for name, found, limit in finetune_times.verdicts():
        assert found <= limit, name
    worst = max(abs(row["error"]) for row in finetune_times.time_rows())
    assert worst < 0.45


def test_unpacking_takes_what_a_profile_of_bitsandbytes_0_50_shows():
    """Two profilers: 2,872 and 2,870 ms of kDequantizeBlockwise in 48 micro-batches on an L40S.

    Llama 3 8B, everything recomputed (sairameshpv/lightserve, profiling/report.md, section A).
    """
    job = Job(models.MODELS["llama3-8b"], 1024, 1, frozen=True, quant="nf4-dq")
    one = adapters.unpack_seconds(job, Cluster(GPUS["l40s"]), RATES)
    assert 3 * 32 * one == pytest.approx(2.872 / 48, rel=0.1)


LOST = {
    "unpacking": (adapters, "unpack_seconds", lambda *_: 0.0),
    "adapters": (adapters, "adapter_seconds", lambda *_: (0.0, 0.0)),
}


@pytest.mark.parametrize("term", LOST)
def test_a_term_that_is_lost_makes_published_runs_too_fast(term, monkeypatch):
    before = {row["id"]: row["error"] for row in finetune_times.time_rows()}
    module, name, nothing = LOST[term]
    monkeypatch.setattr(module, name, nothing)
    after = {row["id"]: row["error"] for row in finetune_times.time_rows()}
    assert after["A06"] < before["A06"] - (0.2 if term == "unpacking" else 0.05)
