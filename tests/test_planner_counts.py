"""The costs' formulas against counts: layers of the real size on `meta`, papers' closed forms."""

from dataclasses import replace

import pytest
import torch
from helpers_planner import as_on_a_gpu, kept_for_backward, model_of
from torch.utils.flop_counter import FlopCounterMode

from legacy_common import models as torch_models
from planner import compute, memory, models
from planner.axes import axes_of
from planner.hardware import GPUS, Cluster
from planner.job import Job, Layout

SEQ_LEN = 64  # tokens that are counted; everything but attention's scores grows with them
LLAMA3_405B = torch_models.TransformerConfig(128_256, 16_384, 126, 128, 8, 53_248, 8192)
CONFIGS = torch_models.PRESETS | {"llama3-405b": LLAMA3_405B}
SHAPES = [*CONFIGS.items(), ("mixtral-8x7b", torch_models.MIXTURES["mixtral-8x7b"])]


@pytest.mark.parametrize(("name", "config"), SHAPES, ids=[name for name, _ in SHAPES])
def test_what_trains_has_the_shape_that_is_planned(name, config):
    assert replace(model_of(config), name=name) == models.MODELS[name]


# counts of the model's own tensors


def counted_bytes(config) -> tuple[int, int]:
    """Run one bfloat16 layer with a GPU's fused kernels; return two counts of bytes per token.

    What autograd keeps of its forward, without weights. What tp gathers and scatters in it: the
    inputs of the column-parallel matrices, once for those that share one, and the outputs of the
    row-parallel ones (Korthikanti, 2022, figure 5).
    """
    with torch.device("meta"):
        block = torch_models.Block(config).to(torch.bfloat16)
        x = torch.empty(1, SEQ_LEN, config.dim, dtype=torch.bfloat16, requires_grad=True)
        head_dim = config.dim // config.num_heads
        tables = torch_models.rotary_tables(torch.empty(SEQ_LEN), head_dim, config.rope_theta)
    as_on_a_gpu(block)
    attention, gathered, scattered = block.attention, {}, []
    for column in (attention.wq, attention.wk, attention.wv, block.gate, block.up):
        column.register_forward_hook(lambda _, i, o: gathered.update({id(i[0]): i[0]}))
    for row in (attention.wo, block.down):
        row.register_forward_hook(lambda _, i, o: scattered.append(o))
    with kept_for_backward(block, tables) as kept:
        block(x, *tables)
    # The reshape after attention copies its heads side by side: a GPU's kernel writes them so.
    own = sum(kept.values()) - x.nbytes
    handed_over = sum(tensor.nbytes for tensor in (*gathered.values(), *scattered))
    return own // SEQ_LEN, handed_over // SEQ_LEN


def counted_flops(config) -> int:
    """Count forward and backward of SEQ_LEN tokens in one layer and the head, all scores."""
    one = replace(config, num_layers=1, max_seq_len=SEQ_LEN)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        torch_models.Transformer(one)(torch.empty(1, SEQ_LEN, dtype=torch.int64)).sum().backward()
    return counter.get_total_flops()


def layer_flops(job: Job, layout: Layout) -> float:
    """Return forward's FLOPs of a micro-batch in a layer on one GPU, of the products timed."""
    products = sum(2 * m * n * k for m, n, k in compute.layer_matrices(job, layout, True))
    pairs = layout.micro_batch * job.seq_len**2 / layout.cp / layout.tp
    return products + compute.attention_flops(job.model, pairs)


@pytest.mark.parametrize("name", CONFIGS)
def test_formulas_are_counts_on_the_real_size(in_a_fork, name):
    config = CONFIGS[name]
    model = model_of(config)
    job = Job(model, SEQ_LEN, 1)
    kept, handed_over = counted_bytes(config)
    assert memory.layer_bytes(job, Layout()) == kept
    head = 2 * SEQ_LEN * model.vocab * model.hidden
    flops = in_a_fork(lambda: counted_flops(config))
    assert 3 * (layer_flops(job, Layout()) + head) == flops
    one = replace(job, model=replace(model, layers=1))
    assert compute.model_flops(one) == pytest.approx(flops, rel=2e-3)  # it counts norms' weights
    with torch.device("meta"):
        weights = sum(w.numel() for w in torch_models.Transformer(config).parameters())
    assert models.parameters(model) == weights
    for pp in (1, 2, 4):
        copies = model.vocab * model.hidden * (model.tied_embeddings and pp > 1)
        stages = [sum(memory.weights_of_stage(job, Layout(pp=pp), s)) for s in range(pp)]
        assert sum(stages) == weights + copies
    # Backward hands over as much as forward, which full recomputation repeats.
    for recompute, passes in (("none", 2), ("full", 3)):
        layout = Layout(2, pp=4, micro_batch=4, recompute=recompute)
        sent = axes_of(Job(model, 256, 8), layout, Cluster(GPUS["h100"]))
        assert sent["tp"].layer_bytes == pytest.approx(passes / 2 * handed_over * 4 * 256)
        there_and_back = 2 * 2 * 4 * 256 * model.hidden / 2  # bfloat16, halves by tp
        assert sent["pp"].layer_bytes == pytest.approx(there_and_back)


# closed forms of papers

# Layers, hidden, tp, pp, dp, micro-batch, global batch of table 1 (Narayanan et al., SC 2021).
SC21 = [(24, 2304, 1, 1, 32, 16, 512), (96, 16_384, 8, 16, 15, 1, 2160)]


@pytest.mark.parametrize(("layers", "h", "tp", "pp", "dp", "micro", "batch"), SC21)
def test_operations_are_narayanans_closed_form(layers, h, tp, pp, dp, micro, batch):
    """96 B s l h^2 (1 + s / 6h + V / 16 l h), with recomputation (2021, equation 3).

    72 B s l h^2 (1 + s / 6h + V / 12 l h) without (Korthikanti et al., 2022, appendix A).
    """
    own = {"layers": layers, "hidden": h, "ffn": 4 * h, "heads": h // 128, "kv_heads": h // 128}
    shape = replace(models.MODELS["gpt3-175b"], **own)
    job, layout = Job(shape, 2048, batch), Layout(tp, 1, pp, dp, micro_batch=micro)
    s, V = job.seq_len, shape.vocab
    form = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + V / (16 * layers * h))
    head = 3 * 2 * batch * s * h * V
    executed = 4 * layer_flops(job, layout) * tp * layers * dp * layout.micro_batches(job)
    assert executed + head == pytest.approx(form, rel=1e-9)
    model = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + V / (12 * layers * h))
    assert compute.model_flops(job) == pytest.approx(model, rel=2e-3)
