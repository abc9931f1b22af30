"""Four axes at once: the gradient of one process, and the losses of module 01's template."""

import shutil
from argparse import Namespace
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import assert_one_line, load_script, results_of
from helpers_01 import largest_difference, steps_in, trace_without_a_compiler
from torch.distributed import pipelining
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from advanced_parts import hybrid_parallelism as part
from legacy_common import cli, float8, models
from legacy_common.job import Step

HYBRID = "05-advanced/hybrid_parallelism.py"
SMALL = ("--micro-batch-size", 2, "--seq-len", 32, "--max-steps", 2, "--warmup-steps", 0)
FULL = pytest.mark.full


def full(*rows):
    return [pytest.param(*row, marks=FULL) for row in rows]


@pytest.fixture
def train(run_script, tmp_path):
    """Run the template, or module 01's, on a small model with four layers and a short text."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(97, 123)) * 120)

    def run(layout, *argv, world_size=1, change=None, script=HYBRID, codes=(0,)):
        def before(module):
            models.PRESETS["tiny"] = models.TransformerConfig(256, 32, 4, 4, 2, 96, 256)
            models.MIXTURES["tiny-moe"] = models.TransformerConfig(
                256, 32, 4, 4, 2, 48, 256, num_experts=12, top_k=2
            )
            if change:
                change(module)

        arguments = (*SMALL, "--text-file", text, *argv, *layout.split())
        ended = run_script(script, *arguments, world_size=world_size, before=before)
        assert set(ended.codes) & set(codes), ended.stdout + ended.stderr
        return ended

    return run


MOE = "--preset tiny-moe"
LAYOUTS = [
    (2, "--cp 2", "cp"),
    (2, "--pp 2 --schedule interleaved --precision bf16-mixed", "pp"),
    (4, "--dp 2 --tp 2 --data-parallel grad-op", "tp dp"),
    (2, f"{MOE} --ep 2", "dp ep"),
    *full(
        (2, "--tp 2 --activation-checkpointing full", "tp"),
        (3, "--dp 3 --data-parallel full", "dp"),  # 3 divides no row count but that of ffn_dim
        (3, "--cp 3 --seq-len 36 --data-parallel grad-op --seed 5", "cp"),
        (4, "--tp 2 --pp 2 --schedule zero-bubble", "tp pp"),
        (4, "--pp 4 --schedule gpipe", "pp"),
        (4, "--dp 2 --pp 2 --schedule interleaved --data-parallel full --precision bf16-mixed",
            "pp dp"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "layout", "sends"), LAYOUTS)
def test_every_layout_gives_the_gradient_of_one_process(train, tmp_path, world_size, layout, sends):
    folder = tmp_path / "run"
    train(layout, "--output-dir", folder, world_size=world_size)
    content = results_of(folder)
    assert all(check["ok"] for check in content["checks"])
    names = " , ".join(check["name"] for check in content["checks"])
    assert "gradient: relative error" in names and "copies differ" in names
    axes = ("tp", "cp", "pp", "dp", "ep", "dp/ep")
    compared = {axis for axis in axes if f"along {axis} " in names}
    assert compared == set(sends.split())


@pytest.mark.parametrize(
    ("layers", "sizes"), [(8, [2, 2, 2, 2]), (6, [1, 2, 2, 1]), (2, [0, 1, 1, 0])]
)
def test_embedding_and_head_take_the_place_of_a_layer_each(layers, sizes):
    model = models.Transformer(replace(models.PRESETS["tiny"], num_layers=layers))
    stages = [load_script(HYBRID).Stage(model, number, 4, None) for number in range(4)]
    assert [len(stage.blocks) for stage in stages] == sizes
    assert [block for stage in stages for block in stage.blocks] == list(model.blocks)


@FULL
def test_another_layout_loads_the_checkpoint(train, tmp_path):
    """The gradient of one process is compared again, with the weights of the checkpoint."""
    first, second = (2, "--pp 2"), (4, "--tp 2 --cp 2")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    arguments = ("--global-batch-size", 4, "--max-steps", 4, "--save-every", 2, "--eval-every", 2)
    train(first[1], *arguments, "--output-dir", straight, world_size=first[0])
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000004")
    own = ("--output-dir", resumed, "--resume")
    ended = train(second[1], *arguments, *own, world_size=second[0])
    assert "at step 2, sample 8 of epoch 1; changed since then: " in ended.stdout
    assert largest_difference(resumed, straight) < 2e-5 * max(steps_in(straight).values())
    names = {check["name"]: check["ok"] for check in results_of(resumed)["checks"]}
    assert names["gradient: relative error against one process"]
    assert names["tokens trained on, from step 1"]


@pytest.mark.parametrize(
    ("capability", "cuts", "torchao", "says"),
    [
        ((8, 0), {}, True, "capability 8.9; this has 8.0"),
        ((9, 0), {"tp": 4}, True, r"tiles of 16: no multiple is \[88\], columns"),
        ((9, 0), {}, False, "pip install torchao"),
    ],
)
def test_float8_is_refused_where_a_gpu_lacks_it(monkeypatch, capability, cuts, torchao, says):
    args = Namespace(float8="gpu", micro_batch_size=1, seq_len=64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda _: torchao or None)
    with pytest.raises(cli.UsageError, match=says):
        float8.refuse(args, models.PRESETS["tiny"], torch.device("cuda"), **cuts)


# what the checks must see


def forget_the_all_reduce(script):
    shard = script.fully_shard
    script.fully_shard = lambda unit, mesh, **options: shard(unit, mesh=mesh["whole"], **options)


def sum_after_backward(script):
    script.PipelineStage = pipelining.PipelineStage


def gather_for_each_matrix_apart(script):
    """The gradient stays right; q, k and v then gather their input once each."""
    script.PrepareModuleOutput = Untouched
    columns = script.ColwiseParallel  # torch 2.11: whoever is not told of it gathers nothing
    script.ColwiseParallel = partial(columns, input_layouts=Shard(1))


class Untouched(ParallelStyle):
    def __init__(self, **options):
        pass

    def _apply(self, module, mesh):
        return module


def step_further_on_rank_1(script):
    rate = script.job.lr_at
    script.job.lr_at = lambda step, args: rate(step, args) * (1 + dist.get_rank())
    part.one_process = None  # with --parity-steps 0 no rank makes the whole model


def drop_a_micro_batch(script):
    take = script.accumulate_gradient

    def accumulate(run, micro_batches):
        inputs, targets = micro_batches[0]
        return take(run, [(inputs, torch.full_like(targets, -100)), *micro_batches[1:]])

    script.accumulate_gradient = accumulate


def count_no_token(script):
    record = Step.record

    def short(step, loss_sum, tokens, norm):
        record(step, loss_sum, tokens - 1, norm)

    Step.record = short


def keep_own_part_of_the_norm(script):
    clip = script.clip_gradients

    def clip_alone(run):
        with mock.patch.object(script.dist, "all_reduce", lambda *_: None):
            return clip(run)

    script.clip_gradients = clip_alone


def take_ten_times_the_rate(script):
    take = script.train_step

    def train_step(run, step):
        step.lr *= 10
        take(run, step)

    script.train_step = train_step


FIRST, SECOND = (f"step {n}: relative error of loss and gradient norm" for n in (1, 2))


@pytest.mark.parametrize(
    ("sabotage", "layout", "failing"),
    [
        (forget_the_all_reduce, "--dp 2", "gradient: relative error"),
        (gather_for_each_matrix_apart, "--tp 2", "bytes sent by a rank along tp"),
        (step_further_on_rank_1, "--dp 2 --parity-steps 0", "copies differ"),
        *full(
            (keep_own_part_of_the_norm, "--pp 2", FIRST),
            (take_ten_times_the_rate, "--tp 2", SECOND),
            (sum_after_backward, "--dp 2", "blocks whose sums have begun"),
            (drop_a_micro_batch, "--pp 2", "loss"),
            (count_no_token, "--pp 2 --parity-steps 0", "tokens trained on"),
        ),
    ],
)  # fmt: skip
def test_a_broken_axis_is_seen(train, sabotage, layout, failing):
    ended = train(layout, world_size=2, change=sabotage, codes=(1,))
    verdict = ended.stdout.splitlines()[-1]
    assert verdict.startswith("FAILED: ") and failing in verdict


@FULL
def test_zero_bubble_over_fsdp_is_refused_and_still_wrong(train):
    layout = "--dp 2 --pp 2 --schedule zero-bubble --data-parallel full"
    ended = train(layout, world_size=4, codes=(2,))
    assert_one_line(ended, "PyTorch loses gradients without an error", "hybrid_parallelism.py")

    def allow(script):
        script.layout.refuse = lambda *_: None

    ended = train(layout, world_size=4, change=allow, codes=(1,))
    # A weight whose gradient is lost has none at all, or a wrong one.
    said = ended.stdout + ended.stderr
    assert "no gradient for" in said or "FAILED: gradient" in said, said


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    [
        (2, "--dp 2 --tp 2", "--dp 2 x --tp 2 x --pp 1 x --cp 1 = 4 ranks, but 2 were started"),
        *full(
            (2, "--cp 2 --seq-len 33", "--tp 1 x --cp 2 x 2 parts does not divide the 33"),
            (2, "--pp 2 --schedule zero-bubble --activation-checkpointing full",
             "each of the two parts of backward would compute blocks again"),
            (2, "--pp 2 --schedule zbv --compile", "--schedule zbv with --compile"),
            (2, "--pp 2 --grad-accum-steps 1", "needs at least as many micro-batches as stages"),
            (2, "--pp 2 --schedule interleaved --grad-accum-steps 3", "is no multiple of it"),
            (4, "--tp 4", "--tp 4 does not divide the 2 key and value heads of --preset tiny"),
            (5, "--pp 5", "--pp 5 does not divide the 4 layers of --preset tiny"),
            (2, "--pp 2 --virtual-stages 4", "--virtual-stages 4 is of --schedule interleaved or "
                "zero-bubble: 1f1b has 1 on each rank"),
            (2, "--ep 2", "--ep 2 needs --preset tiny-moe or mixtral-8x7b"),
            (2, f"{MOE} --ep 2 --pp 2", "--ep 2 does not divide the 1 ranks of --dp"),
            (2, f"{MOE} --tp 2", "--preset tiny-moe has experts: --tp 2 cuts no expert"),
        ),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(train, world_size, argv, says):
    ended = train(argv, world_size=world_size, codes=(2,))
    assert_one_line(ended, says, "hybrid_parallelism.py")


class Order(TorchDispatchMode):
    """List matrix products, sends and waits, in the order in which they are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types or AsyncCollectiveTensor in types:  # what they are made of comes here
            return NotImplemented
        name = func.overloadpacket.__name__
        self.names += [name] * (name in ("mm", "all_gather_into_tensor", "wait_tensor"))
        return func(*args, **(kwargs or {}))


def test_keys_are_on_their_way_while_queries_are_computed(in_a_fork):
    """Of context parallelism, in forward: products of keys and values, gather, of queries."""

    def order():
        dist.destroy_process_group()  # the fork's own, of one rank
        dist.init_process_group("fake", rank=0, world_size=3, store=FakeStore())
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
        script = load_script(HYBRID)
        model = models.Transformer(models.TransformerConfig(256, 32, 1, 4, 2, 96, 256))
        positions = script.own_tokens(0, 3, 48)
        script.split_sequence(model, mesh, positions)
        with Order() as called:
            tables = models.rotary_tables(positions, 8, 1e4)
            model.blocks[0].attention(torch.randn(2, 16, 32), *tables)
        return called.names

    names = in_a_fork(order)
    assert names[:5] == ["mm", "mm", "all_gather_into_tensor", "mm", "wait_tensor"], names
    assert names[-1] == "mm", names


@pytest.mark.gpu_ready
@FULL
def test_a_block_is_compiled_whole(train):
    """The compiled block includes its collectives; two steps equal the steps of one process."""
    layout, world_size = "--tp 2 --activation-checkpointing full", 2
    options = ("--compile", "--eval-every", 0)
    ended = train(layout, *options, world_size=world_size, change=trace_without_a_compiler)
    graphs = [line for line in ended.stderr.splitlines() if line.startswith("graph with")]
    assert set(graphs) == {"graph with 7 products"}, ended.stderr
    # The first block's input may need no gradient, or be waited for: then it has its own.
    assert len(graphs) <= 2 * world_size
