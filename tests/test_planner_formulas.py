"""The planner's formulas against counts: layers on `meta`, schedules, papers."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import pipeline_schedules
from dist_common import model as templates
from planner import (
    activations,
    adapters,
    communication,
    compute,
    finetune,
    memory,
    models,
    step,
)
from planner.communication import RING, START_US, Call
from planner.hardware import GPUS, Cluster, cluster_of
from planner.job import Layout, ModelShape, TrainingJob
from planner.models import MODELS
from planner.rates import RATES

SEQ_LEN = 64  # tokens that are counted; all but attention's scores grows with them
H100, A100 = Cluster(GPUS["h100"]), cluster_of(GPUS["a100"])
JOB = TrainingJob(MODELS["llama3-8b"], 8192, 64)
LARGE = templates.Config(128_256, 16_384, 126, 128, 8, 53_248, 8192)
CONFIGS = templates.PRESETS | {"llama3-405b": LARGE}


def model_of(config) -> ModelShape:
    """Return the planner's shape of a template's model."""
    heads = (config.num_heads, config.num_kv_heads)
    widths = (config.ffn_dim, config.vocab_size)
    shape = ModelShape(config.num_layers, config.dim, *heads, *widths)
    return replace(shape, tied_embeddings=config.tied_embeddings)


# Counts of the templates' tensors


class FusedNorm(torch.autograd.Function):
    """An RMSNorm on `meta` that keeps what a GPU's kernel keeps."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)


def counted_bytes(config) -> int:
    """Return the bytes per token that autograd keeps of a layer on a GPU."""
    with torch.device("meta"):
        block = templates.Block(config).to(torch.bfloat16)
        x = torch.empty(1, SEQ_LEN, config.dim, dtype=torch.bfloat16)
        x.requires_grad_()
        width = config.dim // config.num_heads
        tables = templates.rotary_tables(torch.empty(SEQ_LEN), width, 1e4)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    block.attention.attend = lambda q, k, v: kernel(q, k, v, 0.0, True)[0]
    for norm in (block.attention_norm, block.ffn_norm):
        norm.forward = lambda x, norm=norm: FusedNorm.apply(x, norm.weight)
    ignored = {t.untyped_storage()._cdata for t in (*block.parameters(), *tables)}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in ignored:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, *tables)
    # The copy after attention is the kernel's own output on a GPU.
    return (sum(kept.values()) - x.nbytes) // SEQ_LEN


def counted_flops(config) -> int:
    """Count forward and backward of SEQ_LEN tokens in one layer and the head."""
    one = replace(config, num_layers=1, max_seq_len=SEQ_LEN)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = templates.Transformer(one)
        model(torch.empty(1, SEQ_LEN, dtype=torch.int64)).sum().backward()
    return counter.get_total_flops()


class MovedBytes(TorchDispatchMode):
    """Count the bytes that kernels read and write; views move none."""

    moved = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
        if result.untyped_storage()._cdata not in {
            t.untyped_storage()._cdata for t in tensors[:-1]
        }:
            self.moved += sum(t.nbytes for t in tensors)
        return result


def test_eager_norm_and_rotary_move_the_bytes_of_their_kernels():
    """Llama's model.py: RMSNorm and apply_rotary_emb, in 16-bit numbers."""
    x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")
    turns = torch.empty(64, 2048, dtype=torch.complex64, device="meta")
    with MovedBytes() as norm:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        y.type_as(x) * torch.empty_like(x[0])
    layer_norm = 2
    numbers = compute.RMS_NORM_PASSES + layer_norm
    assert norm.moved / x.nbytes == pytest.approx(numbers, rel=0.02)
    with MovedBytes() as rotary:
        pairs = torch.view_as_complex(x.float().reshape(64, 2048, 2))
        torch.view_as_real(pairs * turns).flatten(1).type_as(x)
    table = turns.nbytes / x.nbytes  # one row for all heads, so it does not count
    assert rotary.moved / x.nbytes - table == pytest.approx(compute.ROTARY_PASSES)


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_and_operations_are_those_of_the_template(in_a_fork, name):
    config = CONFIGS[name]
    model = model_of(config)
    assert replace(model, name=name) == MODELS[name]
    weights = config.num_parameters()
    assert models.parameters(model) == weights
    job = TrainingJob(replace(model, layers=1), SEQ_LEN, 1)
    flops = in_a_fork(lambda: counted_flops(config))
    assert compute.model_flops(job) == pytest.approx(flops, rel=2e-3)
    for pp in (1, 2, 4):
        layout = Layout(pp=pp)
        stages = [
            sum(memory.weights_of_stage(TrainingJob(model, 1, 1), layout, s))
            for s in range(pp)
        ]
        copies = model.vocab * model.hidden * (model.tied_embeddings and pp > 1)
        assert sum(stages) == weights + copies


@pytest.mark.parametrize("name", ["llama2-7b", "llama3-70b"])
def test_a_layer_keeps_what_autograd_keeps(name):
    job = TrainingJob(MODELS[name], SEQ_LEN, 1)
    assert activations.layer_bytes(job, Layout()) == counted_bytes(CONFIGS[name])


def bytes_held(config, ranks):
    """Shard a model as rank 0 of many, take a step; return bytes of its states."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    with torch.device("meta"):
        model = templates.Transformer(config)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    states = optimizer.state.values()
    moments = [t for state in states for t in state.values() if t.dim()]
    weights = list(model.parameters())
    kinds = (weights, [weight.grad for weight in weights], moments)
    return [sum(tensor.to_local().nbytes for tensor in kind) for kind in kinds]


TINY = templates.PRESETS["tiny"]
ODD = replace(TINY, vocab_size=251, ffn_dim=350, num_layers=3)


@pytest.mark.parametrize(("config", "ranks"), [(TINY, 4), (ODD, 7)])
def test_states_are_those_of_fsdp2_to_the_byte(in_a_fork, config, ranks):
    held = in_a_fork(lambda: bytes_held(config, ranks))
    predicted = memory.memory_of(
        TrainingJob(model_of(config), 64, ranks), Layout(dp=ranks, zero=3)
    )
    parts = ("parameters", "gradients", "optimizer")
    assert [predicted[part] for part in parts] == held


# Schedules

CASES = [(1, 1), (2, 1), (16, 1), (8, 2), (64, 4)]


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize(("m", "v"), CASES)
def test_bubbles_and_micro_batches_in_flight_are_the_schedules(p, m, v):
    schedule = pipeline_schedules.build("interleaved" if v > 1 else "1f1b", p, m, v)
    for stage, order in enumerate(schedule):
        expected = pipeline_schedules.peak_activations(order, v)
        assert activations.in_flight(p, stage, m, v) == expected
    spans = pipeline_schedules.simulate(schedule)
    took = max(span.end for rank in spans for span in rank)
    job = replace(JOB, model=replace(JOB.model, vocab=128), global_batch=m)
    result = parts(Layout(pp=p, virtual_stages=v), job)
    busy = result["compute"] + result["other"] - step.FIXED_S
    assert result["bubble"] / busy == pytest.approx(took / (3 * m) - 1, rel=0.005)


# Closed forms of papers

ZERO = [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)]  # GB a GPU, 7.5e9 weights, 64 GPUs


@pytest.mark.parametrize(("zero", "gigabytes"), ZERO)
def test_states_are_those_of_zeros_table(zero, gigabytes):
    """Rajbhandari et al. (2020), figure 1 and table 1: 2 + 2 + 12 bytes."""
    job = TrainingJob(JOB.model, 1, 1, gradient_bytes=2, stack="deepspeed")
    held = memory.states(job, Layout(dp=64, zero=zero), (7.5e9, 0.0))
    assert sum(held.values()) / 1e9 == pytest.approx(gigabytes, rel=0.03)


def test_a_layer_keeps_what_korthikanti_says():
    """s b h (10 + 24 / t + 5 a s / h t), and 34 s b h / t (2022, equations 2 and 4)."""
    model, s = MODELS["gpt-22b"], 2048
    h, a, t = model.hidden, model.heads, 8
    job = TrainingJob(model, s, 1, attention="stored", dropout=True, stack="megatron")
    plain = activations.layer_bytes(job, Layout(tp=t, sequence_parallel=False))
    expected = h * (10 + 24 / t) + 5 * a * s / t
    assert plain == pytest.approx(expected, rel=0.01)
    less = activations.layer_bytes(job, Layout(tp=t, recompute="selective"))
    assert less == pytest.approx(34 * h / t, rel=0.01)


def test_operations_are_narayanans_closed_form():
    """72 B s l h^2 (1 + s / 6h + V / 12 l h) (SC 2021, without recomputation)."""
    shape = replace(MODELS["gpt3-175b"], layers=96, hidden=16_384, ffn=65_536)
    shape = replace(shape, heads=128, kv_heads=128)
    s, h, V = 2048, shape.hidden, shape.vocab
    form = 72 * 2160 * s * 96 * h**2 * (1 + s / (6 * h) + V / (12 * 96 * h))
    assert compute.model_flops(TrainingJob(shape, s, 2160)) == pytest.approx(
        form, rel=2e-3
    )


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("gpt2-1.5b", 1_557_611_200),
        ("llama3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("gemma-2-2b", 2_614_341_888),
        ("falcon-7b", 6_921_720_704),
        ("deepseek-v3", 671_026_404_352),
    ],
)
def test_weights_are_those_of_the_checkpoints(name, weights):
    assert models.parameters(MODELS[name]) == pytest.approx(weights, rel=2e-6)


# Communication


@pytest.mark.parametrize(
    ("kind", "factor"), [("all_reduce", 1.75), ("all_gather", 0.875), ("send", 1.0)]
)
def test_a_collective_takes_its_start_and_its_bytes_over_the_ring(kind, factor):
    wire = 64e9 * factor / (300e9 * RING)
    result = Call(kind, 64e9, 8, 1).seconds(A100)
    assert result == pytest.approx(START_US * 1e-6 + wire)


def test_between_nodes_the_cards_of_a_node_carry_a_ring():
    cards = 8 * 25e9 * communication.NETWORK
    result = Call("all_gather", 64e9, 16, 2).seconds(A100)
    assert result == pytest.approx(64e9 * 15 / 16 / cards, rel=0.01)
    alone = Call("all_gather", 64e9, 16, 16).seconds(A100)  # a rank on each node
    assert alone == pytest.approx(8 * result, rel=0.01)


def test_axes_send_what_the_papers_say():
    job = TrainingJob(MODELS["llama3-70b"], 8192, 512)
    layout = Layout(tp=8, pp=2, dp=4, zero=1, recompute="full")
    tokens, width = job.seq_len, job.model.hidden
    axes = step.axes_of(job, layout, H100)
    tp, dp, pp = axes.values()
    assert tp.layer_bytes == pytest.approx(12 * 7 / 8 * tokens * width * 2)
    assert tp.step_bytes == pytest.approx(tp.layer_bytes * 128 * (40 + 2 / 12))
    assert pp.step_bytes == pytest.approx(128 * tokens * width / 8 * 2)
    weights = max(memory.weights_of_stage(job, layout, stage)[0] for stage in (0, 1))
    assert dp.step_bytes == pytest.approx(3 / 4 * 6 * weights)
    assert (tp.cards, dp.cards, pp.nodes) == (0, 1, 2)
    fsdp = step.axes_of(job, Layout(cp=4, dp=16, zero=3), H100)
    keys = 2 * tokens / 4 * models.key_width(job.model)
    assert fsdp["cp"].layer_bytes == pytest.approx(3 * 2 * keys * (2 + 2 + 2) / 2)
    whole = models.parameters(job.model)
    assert fsdp["dp"].step_bytes == pytest.approx(32 * 63 / 64 * 8 * whole)
    assert fsdp["cp"].compute > fsdp["cp"].seconds > fsdp["cp"].exposed > 0


@pytest.mark.parametrize("order", [*permutations(("tp", "cp", "dp", "pp"))])
@pytest.mark.parametrize("axes", [("tp",), ("cp",), ("pp",), ("cp", "dp")])
def test_a_groups_nodes_are_those_of_its_ranks_in_any_order(order, axes):
    layout = Layout(tp=4, cp=2, dp=4, pp=2, order=order)
    places = []
    for rank in range(layout.gpus):
        place, rest = {}, rank
        for axis in order:
            rest, place[axis] = divmod(rest, getattr(layout, axis))
        places.append(place)
    others = set(order) - set(axes)
    group = [r for r, place in enumerate(places) if not any(place[a] for a in others)]
    nodes = len({rank // H100.gpus_per_node for rank in group})
    assert communication.nodes_of(layout, axes, len(group), H100) == nodes


# What a layout adds


def parts(layout, job=JOB, cluster=H100):
    return step.predict(job, layout, cluster).step


FSDP = Layout(dp=8, zero=3, recompute="full")
MORE = {
    "full recomputation": (replace(FSDP, recompute="none"), FSDP, "compute"),
    "tensor parallel": (Layout(tp=2, dp=4), Layout(tp=8), "tp"),
    "stages": (Layout(pp=2, dp=4), Layout(pp=4, dp=2), "bubble"),
    "gathers in each micro-batch": (Layout(dp=8, zero=1), Layout(dp=8, zero=3), "dp"),
    "context parallel": (Layout(dp=8), Layout(cp=8, cp_kind="gather"), "cp"),
    "no overlap": (Layout(dp=8), Layout(dp=8, overlap_dp=False), "dp"),
    "optimizer": (Layout(dp=8, zero=1), Layout(dp=8), "optimizer"),
}


@pytest.mark.parametrize("case", MORE)
def test_what_a_layout_adds_is_in_its_part(case):
    before, after, part = MORE[case]
    assert parts(after)[part] > parts(before)[part] * 1.05


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_and_precision_is_predicted(name):
    cluster = cluster_of(GPUS[name])
    layout = Layout(tp=2, dp=cluster.gpus_per_node, zero=1, recompute="full")
    for precision in ("bf16", "fp16", "fp8", "fp32", "tf32"):
        job = replace(JOB, precision=precision, global_batch=layout.dp)
        result = step.predict(job, layout, cluster)
        assert 0 < result.model_tflops_per_gpu < max(cluster.gpu.tflops.values())


def test_adapters_and_unpacking_are_counted_by_hand():
    job = finetune.with_adapters(TrainingJob(MODELS["llama2-7b"], 2048, 8), "qlora", 16)
    layout = Layout(dp=2, micro_batch=4, recompute="full")
    result = step.step_parts(job, layout, A100, RATES)
    weights = models.matrix_parameters(job.model, 0)
    moved = weights * (0.5 + (1 + 4 / 256) / 64 + 2)
    once = moved / (2039e9 * compute.HBM)
    assert adapters.unpack_seconds(job, A100) == pytest.approx(once)
    assert result["unpacking"] == pytest.approx(3 * 32 * once)
    queries = replace(job, adapter_targets=("query",))
    m, h, r = 4 * 2048, 4096, 16
    product = m * h + m * r + h * r  # two forward, four backward; then scale and add
    forward, backward = adapters.adapter_seconds(queries, layout, A100, RATES)
    rate = 2039e9 * compute.HBM / 2
    assert forward * rate == pytest.approx(2 * product + 5 * m * h)
    assert backward * rate == pytest.approx(4 * product + 5 * m * h)
    assert (
        result["dp"] < parts(layout, TrainingJob(job.model, 2048, 8), A100)["dp"] / 20
    )
