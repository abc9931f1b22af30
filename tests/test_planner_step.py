"""GPUs, collectives and steps: formulas by hand, and what more of something adds."""

from dataclasses import replace
from itertools import permutations

import pytest

import pipeline_schedules
from planner import collectives, memory, models, rates, step
from planner.axes import axes_of
from planner.hardware import GPUS, Cluster, find_gpu
from planner.job import Job, Layout
from planner.models import MODELS
from planner.step import predict

H100 = Cluster(GPUS["h100"])
A100 = Cluster(GPUS["a100"], network_gb_s=25.0)
JOB = Job(MODELS["llama3-8b"], 8192, 64)
FSDP = Layout(dp=8, zero=3, recompute="full")


@pytest.mark.parametrize(
    ("spelled", "memory_gib", "name"),
    [
        ("H100-SXM-80GB", None, "h100"),
        ("NVIDIA H100 NVL", None, "h100-nvl"),
        ("H100 (NVLink, SXM5)", None, "h100"),
        ("B200 p6-b200", None, "b200"),
        ("A100-SXM (40/80 not stated)", None, "a100"),
        ("A100", 40, "a100-40gb"),
        ("V100-32GB", None, "v100"),
        ("AMD Instinct MI300X", None, "mi300x"),
        ("NVIDIA GeForce RTX 4090", None, "rtx4090"),
        ("TPU v5p", None, "tpu-v5p"),
    ],
)
def test_a_gpu_is_found_however_it_is_spelled(spelled, memory_gib, name):
    assert find_gpu(spelled, memory_gib).name == name


def test_an_unknown_gpu_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown GPU 'H900'.*did you mean h[12]00.*mi300x"):
        find_gpu("H900")
    with pytest.raises(ValueError, match="unknown GPU 'TPU v5e'"):  # no v5p: half its rate
        find_gpu("TPU v5e")
    assert all(gpu.source and gpu.tflops["bf16"] for gpu in GPUS.values())


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all_reduce", 1.75), ("all_gather", 0.875), ("all_to_all", 0.875), ("broadcast", 1.0)],
)
def test_a_large_collective_takes_its_bytes_over_the_ring(kind, factor):
    size = 64e9
    wire = size * factor / (300e9 * rates.RATES["link.ring"])
    assert collectives.seconds_of(kind, size, 8, A100) == pytest.approx(wire, rel=0.01)


def test_a_switch_that_adds_sends_a_tensor_once():
    size = 64e9
    once = size / (450e9 * rates.RATES["link.switch.hopper"])
    assert collectives.seconds_of("all_reduce", size, 8, H100) == pytest.approx(once, rel=0.01)


def test_between_nodes_the_cards_of_a_node_carry_a_ring():
    size = 64e9
    cards = 8 * 25e9 * rates.RATES["network.rate"]
    found = collectives.seconds_of("all_gather", size, 16, A100, 2)
    assert found == pytest.approx(size * 15 / 16 / cards, rel=0.01)
    alone = collectives.seconds_of("all_gather", size, 16, A100, 16)  # a rank on each node
    assert alone == pytest.approx(8 * found, rel=0.01)


def test_a_small_message_takes_its_start_and_one_rank_nothing():
    start = rates.RATES["link.start_us"] + 7 * rates.RATES["link.hop_us"]
    assert collectives.seconds_of("all_reduce", 8, 8, A100) * 1e6 == pytest.approx(start, rel=1e-3)
    assert collectives.seconds_of("all_reduce", 1e9, 1, A100) == 0


def parts(layout: Layout, job: Job = JOB, cluster: Cluster = H100) -> dict[str, float]:
    return predict(job, layout, cluster).step


MORE = {
    # What is changed: layout before, layout after, the part that grows.
    "full recomputation": (replace(FSDP, recompute="none"), FSDP, "compute"),
    "tensor parallel": (Layout(tp=2, dp=4), Layout(tp=8), "tp"),
    "stages": (Layout(pp=2, dp=4), Layout(pp=4, dp=2), "bubble"),
    "fewer chunks": (Layout(pp=4, dp=2, virtual_stages=4), Layout(pp=4, dp=2), "bubble"),
    "gathers in each micro-batch": (Layout(dp=8, zero=2), Layout(dp=8, zero=3), "dp"),
    "context parallel": (Layout(dp=8), Layout(cp=8, cp_kind="gather"), "cp"),
    "gradients after backward": (Layout(dp=8), Layout(dp=8, overlap_dp=False), "dp"),
    "tp without its overlap": (Layout(tp=8, overlap_tp=True), Layout(tp=8), "tp"),
    "optimizer of all weights": (Layout(dp=8, zero=1), Layout(dp=8), "optimizer"),
    "offload": (Layout(dp=8, zero=1), Layout(dp=8, zero=1, offload="optimizer"), "optimizer"),
}


@pytest.mark.parametrize("case", MORE)
def test_what_a_layout_adds_is_in_its_part(case):
    before, after, part = MORE[case]
    assert parts(after)[part] > parts(before)[part] * 1.05


def test_fsdp_with_a_pipeline_gathers_once_a_step():
    """As torchtitan's does; then ZeRO-2 sends the same. KempnerForge gathers each time."""
    layout, other = Layout(pp=2, dp=4, zero=3), replace(JOB, stack="kempnerforge")
    once = parts(layout)["dp"]
    assert once == parts(replace(layout, zero=2))["dp"] > 0
    assert parts(layout, other)["dp"] > 2 * once


def test_one_gpu_sends_nothing():
    found = parts(Layout(), replace(JOB, global_batch=4))
    assert all(found[part] == 0 for part in ("tp", "cp", "ep", "dp", "pp", "bubble"))


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize(("m", "v"), [(1, 1), (2, 1), (16, 1), (8, 2), (16, 4)])
def test_the_bubble_is_that_of_a_schedule_stepped_through(p, m, v):
    """Backward takes twice forward, and all stages are alike (Narayanan et al., 2021)."""
    name = "interleaved" if v > 1 else "1f1b"
    schedule = pipeline_schedules.build(name, p, m, v)
    spans = pipeline_schedules.simulate(schedule)
    took = max(span.end for rank in spans for span in rank)
    job = replace(JOB, model=replace(JOB.model, vocab=128), global_batch=m)
    found = parts(Layout(pp=p, virtual_stages=v), job)
    busy = found["compute"] + found["other"] - rates.RATES["step.fixed_ms"] / 1e3
    assert found["bubble"] / busy == pytest.approx(took / (3 * m) - 1, rel=0.005)


def test_keys_and_values_go_around_a_ring():
    """With their gradients in backward, over links that nothing hides (Liu et al., 2023)."""
    slow = Cluster(GPUS["h100"], network_gb_s=0.01)
    hop = 2 * 2 * 8192 / 16 * 1024  # bytes: keys and values of eight heads, in 16 bits
    hops = 15 * (1 + 2) * JOB.model.layers
    found = parts(Layout(cp=16), replace(JOB, global_batch=1), slow)["cp"]
    expected = hops * hop / (0.01e9 * rates.RATES["network.rate"])
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_and_precision_is_predicted(name):
    gpu = GPUS[name]
    cluster = Cluster(gpu, gpu.gpus_per_node, gpu.network_gb_s)
    layout = Layout(tp=2, dp=gpu.gpus_per_node, zero=1, recompute="full")
    for precision in ("bf16", "fp16", "fp8", "fp32", "tf32"):
        job = replace(JOB, precision=precision, global_batch=2 * gpu.gpus_per_node)
        found = predict(job, layout, cluster)
        assert 0 < found.model_tflops_per_gpu < max(gpu.tflops.values())


# axes: what predict shows of them

LLAMA = Job(MODELS["llama3-70b"], 8192, 512)
SPLIT = Layout(tp=8, pp=2, dp=4, zero=1, recompute="full")


def coordinates(rank: int, layout: Layout) -> dict[str, int]:
    """Return a rank's place on each axis, counted one rank after the other."""
    where = {}
    for axis in layout.order:
        rank, where[axis] = divmod(rank, getattr(layout, axis))
    return where


@pytest.mark.parametrize("order", [*permutations(("tp", "cp", "dp", "pp"))])
@pytest.mark.parametrize("axes", [("tp",), ("cp",), ("pp",), ("cp", "dp")])
def test_a_groups_nodes_are_those_of_its_ranks_in_any_order(order, axes):
    layout = Layout(tp=4, cp=2, dp=4, pp=2, order=order)
    places = [coordinates(rank, layout) for rank in range(layout.gpus)]
    assert len({tuple(place.values()) for place in places}) == layout.gpus
    others = set(order) - set(axes)
    group = [r for r, place in enumerate(places) if not any(place[axis] for axis in others)]
    nodes = len({rank // H100.gpus_per_node for rank in group})
    assert step.nodes_of(layout, axes, len(group), H100) == nodes


def test_hsdps_copies_are_a_shard_group_apart():
    layout = Layout(tp=2, cp=2, dp=8, zero=3, shard=4)
    assert step.nodes_of(layout, step.REPLICAS, 4, H100) == 1
    assert step.nodes_of(layout, step.REPLICAS, 4, H100, every=4) == 4
    dp_first = replace(layout, order=("dp", "tp", "cp", "pp"))
    assert step.nodes_of(dp_first, step.REPLICAS, 4, H100, every=4) == 2


def test_axes_add_up_to_the_step_and_send_what_the_papers_say():
    tokens, width = LLAMA.seq_len, LLAMA.model.hidden
    axes, parts = axes_of(LLAMA, SPLIT, H100), predict(LLAMA, SPLIT, H100).step
    assert {name: axis.exposed for name, axis in axes.items()} == {
        name: parts[name] for name in ("tp", "dp", "pp")
    }
    tp, dp, pp = axes.values()
    assert tp.layer_bytes == pytest.approx(12 * 7 / 8 * tokens * width * 2)
    assert tp.step_bytes == pytest.approx(tp.layer_bytes * 128 * (40 + 2 / 12))
    assert pp.step_bytes == pytest.approx(128 * tokens * width / 8 * 2)
    weights = max(memory.weights_of_stage(LLAMA, SPLIT, stage)[0] for stage in (0, 1))
    assert dp.step_bytes == pytest.approx(3 / 4 * 6 * weights)
    assert (tp.cards, dp.cards, pp.nodes) == (0, 1, 2)
    assert dp.exposed < dp.seconds and tp.exposed == tp.seconds
    fsdp = axes_of(LLAMA, Layout(cp=4, dp=16, zero=3), H100)
    keys = 2 * tokens / 4 * models.key_width(LLAMA.model)
    assert fsdp["cp"].layer_bytes == pytest.approx(3 * 2 * keys * (2 + 2 + 2) / 2)
    whole = models.parameters(LLAMA.model)
    assert fsdp["dp"].step_bytes == pytest.approx(32 * 63 / 64 * 8 * whole)
    assert fsdp["cp"].beside > fsdp["cp"].seconds > fsdp["cp"].exposed > 0
