"""Four axes at once: the gradient of one process, and the losses of module 01's template."""

import gc
import re
import shutil
from argparse import Namespace
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import GPUS, REPO, assert_one_line, load_script, results_of, run_command
from helpers_01 import largest_difference, steps_in, trace_without_a_compiler
from torch.distributed import pipelining
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from advanced_parts import hybrid_parallelism as part
from advanced_parts.kept_bytes import LiveBytes, as_on_a_gpu, storages
from dist_common import cli, float8, models
from dist_common.job import Step
from planner import memory
from planner.job import Job, Layout
from planner.models import of_config

HYBRID = "05-advanced/hybrid_parallelism.py"
DDP = "01-ddp-basics/ddp_training.py"
SMALL = ("--micro-batch-size", 2, "--seq-len", 32, "--max-steps", 2, "--warmup-steps", 0)
JOB = ("--seq-len", 32, "--global-batch-size", 8, "--max-steps", 6, "--warmup-steps", 2,
       "--eval-every", 3, "--parity-steps", 0)  # fmt: skip
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
    (2, "--pp 2 --schedule interleaved", "pp"),
    (4, "--dp 2 --tp 2 --data-parallel grad-op", "tp dp"),
    (2, "--pp 2 --precision bf16-mixed", "pp"),  # half the bytes
    (2, "--pp 2 --schedule zbv", "pp"),
    (2, f"{MOE} --ep 2", "dp ep"),
    (4, f"{MOE} --ep 2 --data-parallel full --activation-checkpointing full", "dp ep dp/ep"),
    *full(
        (2, "--tp 2 --activation-checkpointing full", "tp"),
        (2, "--tp 2 --float8 emulated", "tp"),
        (3, f"{MOE} --ep 3 --data-parallel grad-op --grad-accum-steps 2", "dp ep"),
        (4, f"{MOE} --ep 4 --activation-checkpointing full", "dp ep"),
        (4, f"{MOE} --ep 2 --seed 3", "dp ep dp/ep"),
        (4, f"{MOE} --ep 2 --pp 2 --schedule interleaved", "pp dp ep"),
        (4, f"{MOE} --ep 2 --cp 2 --data-parallel grad-op", "cp dp ep dp/ep"),
        (4, f"{MOE} --ep 2 --data-parallel grad-op --precision bf16-mixed", "dp ep dp/ep"),
        (8, f"{MOE} --ep 2 --pp 2 --data-parallel full --lr 1e-2", "pp dp ep dp/ep"),
        (2, f"{MOE}", "dp"),
        (1, f"{MOE} --grad-accum-steps 2", ""),
        (4, "--tp 2 --pp 2 --float8 emulated --activation-checkpointing selective", "tp pp"),
        (6, "--tp 2 --dp 3 --float8 emulated --data-parallel full --precision bf16-mixed", "tp dp"),
        (4, "--cp 2 --pp 2 --float8 emulated --schedule zbv --grad-accum-steps 3", "cp pp"),
        (2, "--pp 2 --schedule dualpipev", "pp"),
        (1, "--schedule zbv --grad-accum-steps 3", ""),
        (4, "--pp 2 --dp 2 --schedule zbv --data-parallel grad-op --precision bf16-mixed", "pp dp"),
        (6, "--pp 2 --dp 3 --schedule dualpipev --grad-accum-steps 5 --seed 3", "pp dp"),
        (4, "--pp 2 --tp 2 --schedule dualpipev", "tp pp"),
        (4, "--pp 2 --cp 2 --schedule zbv --grad-accum-steps 5", "cp pp"),
        (4, "--tp 2 --cp 2 --activation-checkpointing selective", "tp cp"),
        (4, "--cp 2 --pp 2 --schedule interleaved --activation-checkpointing full", "cp pp"),
        (4, "--tp 2 --pp 2 --precision bf16-mixed --activation-checkpointing full", "tp pp"),
        (6, "--tp 2 --dp 3 --data-parallel full --precision bf16-mixed", "tp dp"),
        (4, "--cp 2 --pp 2 --schedule interleaved --precision bf16-mixed --data-parallel grad-op",
            "cp pp"),
        (3, "--dp 3 --data-parallel full", "dp"),  # 3 divides no row count but that of ffn_dim
        (3, "--cp 3 --seq-len 36 --data-parallel grad-op --seed 5", "cp"),
        (6, "--tp 2 --dp 3 --data-parallel full --grad-accum-steps 2 --seed 2", "tp dp"),
        (6, "--pp 2 --dp 3 --data-parallel grad-op --lr 1e-2", "pp dp"),
        (1, "--grad-accum-steps 2", ""),
        (8, "--dp 2 --tp 2 --pp 2 --data-parallel grad-op", "tp pp dp"),
        (3, "--dp 3", "dp"),
        (4, "--tp 2 --dp 2 --data-parallel full --grad-accum-steps 2", "tp dp"),
        (4, "--cp 2 --dp 2 --data-parallel grad-op", "cp dp"),
        (4, "--pp 4 --schedule gpipe --grad-accum-steps 2", "pp"),
        (4, "--pp 2 --tp 2 --schedule zero-bubble", "tp pp"),
        (4, "--dp 2 --pp 2 --schedule zero-bubble --data-parallel grad-op", "pp dp"),
        (4, "--dp 2 --pp 2 --schedule interleaved --data-parallel full --precision bf16-mixed",
            "pp dp"),
        (8, "--tp 2 --cp 2 --pp 2 --schedule interleaved", "tp cp pp"),
        (8, "--dp 2 --cp 2 --tp 2", "tp cp dp"),
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


def choose_the_first_experts(_):
    torch.Tensor.topk = lambda scores, k: (
        scores[:, :k],
        torch.arange(k, device=scores.device).expand(len(scores), k),
    )


@pytest.mark.parametrize("kind", ["full", *full(("replicate",))])
def test_a_rank_to_which_no_token_comes_takes_part(train, kind):
    """All tokens choose two experts of the first rank; gradients are those of one process."""
    ended = train(
        f"{MOE} --ep 2 --data-parallel {kind} --grad-accum-steps 2", world_size=2,
        change=choose_the_first_experts,
    )  # fmt: skip
    assert ended.stdout.splitlines()[-1].startswith("OK: ")


@pytest.mark.parametrize(
    ("layers", "sizes"), [(8, [2, 2, 2, 2]), (6, [1, 2, 2, 1]), (2, [0, 1, 1, 0])]
)
def test_embedding_and_head_take_the_place_of_a_layer_each(layers, sizes):
    model = models.Transformer(replace(models.PRESETS["tiny"], num_layers=layers))
    stages = [load_script(HYBRID).Stage(model, number, 4, None) for number in range(4)]
    assert [len(stage.blocks) for stage in stages] == sizes
    assert [block for stage in stages for block in stage.blocks] == list(model.blocks)


@pytest.mark.parametrize(
    ("ranks", "layers", "flags"),
    [
        # Of eight stages, the first embeds only, and the last has the head only.
        (2, 6, "--pp 2 --schedule interleaved --virtual-stages 4 --precision bf16-mixed"),
        *full(
            (4, 6, "--pp 4"),  # two in the middle stages, one beside the embedding and the head
            (4, 4, "--pp 2 --dp 2 --schedule interleaved --virtual-stages 3 --data-parallel full"),
            (4, 4, "--pp 2 --tp 2 --schedule zero-bubble --virtual-stages 3"),
            (3, 9, "--pp 3 --schedule interleaved --virtual-stages 3 --precision bf16-mixed"),
            (3, 6, "--pp 3 --schedule zbv --grad-accum-steps 4"),
            (4, 8, "--pp 4 --schedule zbv --grad-accum-steps 4"),
            (3, 6, "--pp 3 --schedule dualpipev"),
            (4, 8, "--pp 4 --schedule dualpipev"),
        ),
    ],
)
def test_more_stages_give_the_gradient_of_one_process(train, tmp_path, ranks, layers, flags):
    def deepen(_):
        models.PRESETS["tiny"] = replace(models.PRESETS["tiny"], num_layers=layers)

    train(flags, "--output-dir", tmp_path / "run", world_size=ranks, change=deepen)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        *full(
            (4, "--dp 2 --pp 2 --micro-batch-size 2"),
            (8, "--dp 2 --tp 2 --cp 2 --micro-batch-size 4"),
            (8, "--dp 2 --tp 2 --pp 2 --micro-batch-size 2"),
            (4, "--dp 2 --pp 2 --schedule zero-bubble --data-parallel grad-op "
                "--micro-batch-size 2"),
            (4, "--dp 2 --pp 2 --schedule interleaved --data-parallel full --micro-batch-size 1"),
            (4, "--dp 2 --pp 2 --schedule zbv --data-parallel grad-op --micro-batch-size 2"),
            (2, "--pp 2 --schedule dualpipev --micro-batch-size 2"),
        ),
    ],
)  # fmt: skip
def test_the_job_has_the_losses_of_ddp_training(train, tmp_path, world_size, layout):
    """The same flags of the one job, in one process by module 01's template: test losses too."""
    alone, cut = tmp_path / "alone", tmp_path / "cut"
    train("--micro-batch-size 4", *JOB, "--output-dir", alone, script=DDP)
    train(layout, *JOB, "--output-dir", cut, world_size=world_size)
    # AdamW divides by the square root of a moment: rounding grows over the first steps.
    assert largest_difference(cut, alone) < 5e-5 * max(steps_in(alone).values())
    tested = steps_in(alone, "test_loss")
    assert sorted(tested) == [3, 6]
    assert steps_in(cut, "test_loss") == pytest.approx(tested, rel=5e-5)


@pytest.mark.parametrize(
    ("first", "second"),
    full(
        ((2, "--dp 2 --data-parallel grad-op"), (2, "--pp 2")),
        ((4, "--tp 2 --dp 2 --data-parallel full"), (2, "--pp 2")),
        ((2, "--pp 2"), (4, "--tp 2 --cp 2")),
        ((2, "--dp 2"), (1, "")),
        ((2, f"{MOE} --ep 2"), (4, f"{MOE} --ep 4 --micro-batch-size 1")),
        ((4, f"{MOE} --ep 2 --data-parallel full --micro-batch-size 1"), (2, f"{MOE} --pp 2")),
    ),
)
def test_another_layout_loads_the_checkpoint(train, tmp_path, first, second):
    """The gradient of one process is compared again: with the weights of the checkpoint."""
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


@FULL
def test_a_checkpoint_of_other_data_is_refused_and_a_damaged_one_skipped(train, tmp_path):
    folder = tmp_path / "run"
    arguments = ("--save-every", 1, "--output-dir", folder, "--parity-steps", 0)
    train("", *arguments)
    arguments = (*arguments, "--resume", "--max-steps", 3)
    ended = train("--seed 1", *arguments, codes=(2,))
    assert_one_line(ended, "--seed is 1 here and 0 in the checkpoint", "hybrid_parallelism.py")
    state = next((folder / "checkpoints" / "step-00000002").glob("*.distcp"))
    state.write_bytes(state.read_bytes()[:-100] + bytes(100))
    ended = train("", *arguments)
    assert "skipped" in ended.stderr and "step-00000001" in ended.stdout


# float8


@pytest.mark.parametrize("layout", ["--dp 2", *full(("--dp 2 --data-parallel full --seed 3",))])
def test_float8_rounds_alike_on_all_ranks(train, tmp_path, layout):
    """To float32's last digits, far below what float8 rounds off: the scale does not matter."""
    folder = tmp_path / "run"
    train(f"{layout} --float8 emulated", "--output-dir", folder, world_size=2)
    errors = [c["measured"] for c in results_of(folder)["checks"] if "relative error" in c["name"]]
    assert len(errors) >= 2 and max(errors) < 1e-5


def test_all_linear_layers_of_blocks_multiply_in_float8(in_a_fork):
    def changed():
        model = models.Transformer(models.PRESETS["tiny"])
        x = torch.randn(32, model.config.dim)
        before = model.blocks[0].gate(x)
        float8.convert(model, "emulated")
        error = (model.blocks[0].gate(x) - before).abs().max() / before.abs().max()
        kinds = {name: type(module).__name__ for name, module in model.named_modules()}
        return [name for name, kind in kinds.items() if kind == "Float8Linear"], error.item()

    names, error = in_a_fork(changed)
    layers = ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "gate", "up", "down")
    assert set(names) == {f"blocks.{n}.{layer}" for n in range(4) for layer in layers}
    assert 1e-3 < error < 0.1  # 3 bits of a fraction


@pytest.mark.parametrize(
    ("capability", "cuts", "torchao", "says"),
    [
        ((8, 0), {}, True, "capability 8.9; this has 8.0"),
        ((9, 0), {"tp": 4}, True, r"tiles of 16: no multiple is \[88\], columns"),
        ((9, 0), {"cp": 8}, True, r"tiles of 16: no multiple is \[8\], .* tokens"),
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


def recompute_nothing(script):
    script.recompute = Namespace(checkpoint_activations=lambda blocks, kind: None)


def gather_in_float32(script):
    script.MixedPrecisionPolicy = lambda *_, **__: MixedPrecisionPolicy()


def keep_own_part_of_the_gradient(script):
    script.Partial = script.Replicate


def gather_for_each_matrix_apart(script):
    """The gradient stays right; q, k and v then gather their input once each."""
    script.PrepareModuleOutput = Untouched
    columns = script.ColwiseParallel  # torch 2.11: whoever is not told of it gathers nothing
    script.ColwiseParallel = partial(columns, input_layouts=Shard(1))


def forget_the_norms_gradients(script):
    """Each rank of tp keeps that of its own tokens."""
    script.SequenceParallel = Untouched


class Untouched(ParallelStyle):
    def __init__(self, **options):
        pass

    def _apply(self, module, mesh):
        return module


def take_consecutive_tokens(script):
    """Each rank of cp has one part of the sequence, but attends as if it had two."""
    script.own_tokens = lambda rank, ranks, seq_len: torch.arange(seq_len).chunk(ranks)[rank]


def divide_once_more_by_the_ranks_of_ep(script):
    """As is right for a mean over ranks, and wrong for a sum over all ranks' tokens."""
    split = script.split_experts

    def split_and_divide(run):
        split(run)
        for stage in run.stages:
            for block in stage.blocks:
                block.moe.experts.set_gradient_divide_factor(float(run.job.args.ep))

    script.split_experts = split_and_divide


def keep_results_where_they_were_computed(script):
    send, ways = script.functional.all_to_all_single_autograd, []

    def one_way(rows, receives, sends, group):
        ways.append(sends)
        if len(ways) % 2:
            return send(rows, receives, sends, group)
        return F.pad(rows, (0, 0, 0, max(0, sum(receives) - len(rows))))[: sum(receives)]

    script.functional = Namespace(all_to_all_single_autograd=one_way)


def forget_that_gradients_travel_back(script):
    send = script.functional.all_to_all_single_autograd
    script.functional = Namespace(
        all_to_all_single_autograd=lambda rows, *rest: send(rows.detach(), *rest) + 0 * rows.sum()
    )


def exchange_twice(script):
    send = script.send_to_experts

    def twice(*args, **options):
        send(*args, **options)
        return send(*args, **options)

    script.send_to_experts = twice


def train_copies_of_experts_apart(script):
    shard = script.shard

    def apart(unit, mesh, run, **options):
        shard(unit, run.mesh["pp"] if options else mesh, run, **options)

    script.shard = apart


def count_experts_as_copies(script):
    script.copies_of = lambda weight, args: args.dp


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


def count_copies_as_parts(script):
    script.copies_of = lambda weight, args: 1


def before_each_step(change):
    """Return a sabotage that calls change(run, step) first."""

    def sabotage(script):
        take = script.train_step

        def train_step(run, step):
            change(run, step)
            take(run, step)

        script.train_step = train_step

    return sabotage


def keep_the_gradient(run, step):
    run.optimizer.zero_grad = lambda: None


def take_ten_times_the_rate(run, step):
    step.lr *= 10


def take_the_first_batch_again(run, step):
    run.first_batch = step.micro_batches = getattr(run, "first_batch", step.micro_batches)


FIRST, SECOND = (f"step {n}: relative error of loss and gradient norm" for n in (1, 2))


@pytest.mark.parametrize(
    ("sabotage", "layout", "failing"),
    [
        (keep_own_part_of_the_norm, "--pp 2", FIRST),
        (before_each_step(take_ten_times_the_rate), "--tp 2", SECOND),
        *full(
            (keep_own_part_of_the_norm, "--dp 2 --data-parallel full", FIRST),
            (count_copies_as_parts, "--tp 2", FIRST),
            (before_each_step(keep_the_gradient), "--dp 2", SECOND),
            (before_each_step(take_the_first_batch_again), "--cp 2", SECOND),
        ),
        (forget_the_all_reduce, "--dp 2", "gradient: relative error"),
        (gather_for_each_matrix_apart, "--tp 2", "bytes sent by a rank along tp"),
        (sum_after_backward, "--dp 2", "blocks whose sums have begun"),
        (take_consecutive_tokens, "--cp 2", "gradient: relative error"),
        (step_further_on_rank_1, "--dp 2 --parity-steps 0", "copies differ"),
        (divide_once_more_by_the_ranks_of_ep, f"{MOE} --ep 2", "gradient: relative error"),
        (keep_results_where_they_were_computed, f"{MOE} --ep 2", "gradient: relative error"),
        (train_copies_of_experts_apart, MOE, "gradient: relative error"),
        *full(
            (sum_after_backward, "--dp 2 --data-parallel full --grad-accum-steps 2",
             "bytes sent by a rank along dp"),
            (gather_in_float32, "--dp 2 --data-parallel grad-op --precision bf16-mixed",
             "bytes sent by a rank along dp"),
            (recompute_nothing, "--tp 2 --activation-checkpointing full",
             "bytes sent by a rank along tp"),
            (keep_own_part_of_the_gradient, "--cp 2", "gradient: relative error"),
            (forget_the_norms_gradients, "--tp 2", "gradient: relative error"),
            (forget_that_gradients_travel_back, f"{MOE} --ep 2", "gradient: relative error"),
            (exchange_twice, f"{MOE} --ep 2", "bytes sent by a rank along ep"),
            (count_experts_as_copies, f"{MOE} --ep 2", FIRST),
            (drop_a_micro_batch, "--pp 2", "loss"),
            (count_no_token, "--pp 2 --parity-steps 0", "tokens trained on"),
        ),
    ],
)  # fmt: skip
def test_a_broken_axis_is_seen(train, sabotage, layout, failing):
    ended = train(layout, world_size=2, change=sabotage, codes=(1,))
    verdict = ended.stdout.splitlines()[-1]
    assert verdict.startswith("FAILED: ") and failing in verdict


@pytest.mark.parametrize("schedule", ["zero-bubble", *full(("zbv",), ("dualpipev",))])
def test_zero_bubble_over_fsdp_is_refused_and_still_wrong(train, schedule):
    layout = f"--dp 2 --pp 2 --schedule {schedule} --data-parallel full"
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
            (2, "--tp 3", "--dp 1 x --tp 3 x --pp 1 x --cp 1 = 3 ranks, but 2 were started"),
            (2, "--schedule gpipe --pp 2 --cp 2", "= 4 ranks, but 2 were started"),
            (2, "--cp 2 --seq-len 33", "--tp 1 x --cp 2 x 2 parts does not divide the 33"),
            (2, "--tp 2 --seq-len 33", "--tp 2 x --cp 1 does not divide the 33 tokens of --seq-"),
            (2, "--pp 2 --schedule zero-bubble --activation-checkpointing full",
             "each of the two parts of backward would compute blocks again"),
            (2, "--pp 2 --schedule dualpipev --activation-checkpointing selective",
             "--schedule dualpipev with --activation-checkpointing selective: each of the two"),
            (2, "--pp 2 --schedule zbv --compile", "--schedule zbv with --compile"),
            (2, "--pp 2 --schedule dualpipev --grad-accum-steps 3",
             "at least as many micro-batches as stages: --grad-accum-steps 3 is less than 4"),
            (2, "--pp 2 --grad-accum-steps 1", "needs at least as many micro-batches as stages"),
            (2, "--pp 2 --schedule interleaved --grad-accum-steps 3", "is no multiple of it"),
            (2, "--dp 2 --global-batch-size 3", "--global-batch-size 3 must be --micro-batch-size"),
            (2, "--precision 16-mixed", "use bf16-mixed"),
            (2, "--seq-len 257", "--seq-len must be at most 256"),
            (2, "--logger wandb", "--logger needs --output-dir"),
            (8, "--tp 8", "--tp 8 does not divide the 2 key and value heads of --preset tiny"),
            (4, "--tp 4", "--tp 4 does not divide the 2 key and value heads of --preset tiny"),
            (5, "--pp 5", "--pp 5 does not divide the 4 layers of --preset tiny"),
            (2, "--pp 2 --virtual-stages 4", "--virtual-stages 4 is of --schedule interleaved or "
                "zero-bubble: 1f1b has 1 on each rank"),
            (2, "--pp 2 --schedule interleaved --virtual-stages 4",
             "--pp 2 (4 stages per rank) does not divide the 4 layers of --preset tiny"),
            (4, "--pp 4 --schedule interleaved", "--pp 4 (2 stages per rank) does not divide the"),
            (2, "--ep 2", "--ep 2 needs --preset tiny-moe or mixtral-8x7b"),
            (2, f"{MOE} --ep 2 --pp 2", "--ep 2 does not divide the 1 ranks of --dp"),
            (5, f"{MOE} --ep 5", "--ep 5 does not divide the 12 experts of --preset tiny-moe"),
            (3, f"{MOE} --data-parallel full",
             "--data-parallel full cannot cut their 32 and 48 rows over 3 ranks"),
            (2, f"{MOE} --tp 2", "--preset tiny-moe has experts: --tp 2 cuts no expert"),
            (2, f"{MOE} --pp 2 --schedule zbv", "has experts: --schedule zbv was not tried"),
            (2, f"{MOE} --float8 emulated", "has experts: --float8 emulated changes no expert"),
            (2, f"{MOE} --compile", "has experts: --compile has to know how many tokens come"),
            (2, f"{MOE} --export-to x", "has experts: --export-to x writes a Llama"),
            (2, f"{MOE} --activation-checkpointing selective", "fails in PyTorch where a block"),
        ),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(train, world_size, argv, says):
    ended = train(argv, world_size=world_size, codes=(2,))
    assert_one_line(ended, says, "hybrid_parallelism.py")


def bytes_alive():
    """Return the bytes of all tensors; FSDP empties the memory of weights that it frees."""
    gc.collect()
    plain = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    return sum(storage.nbytes() for storage in storages(plain).values())


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("full", "bf16-mixed"),
        *full(
            ("full", "32-true"),
            ("grad-op", "bf16-mixed"),
            ("replicate", "bf16-mixed"),
            ("replicate", "32-true"),
        ),
    ],
)
def test_gradients_are_added_up_whole_or_in_parts(train, kind, precision):
    """Between two micro-batches, on each of 2 ranks: `full` in parts, the others whole."""

    def change(script):
        before, sums, grown, backward = [], [], [], script.stage_backward
        accumulate = script.accumulate_gradient

        def start(run, micro_batches):
            before.append(bytes_alive())
            sums.clear()
            return accumulate(run, micro_batches)

        def look(**ends):
            result = backward(**ends)
            sums.append(bytes_alive())
            if len(before) > 1 and len(sums) == 1:  # the first step settles FSDP's buffers
                grown.append(sums[0] - before[-1])
            if len(grown) == 3:  # a step may begin while something of the one before is alive
                config = models.PRESETS["tiny"]
                weights = config.num_parameters()
                gradients = 4 * weights / (2 if kind == "full" else 1)
                if kind == "full":  # room for a block whole: here the last sums' buffers, if any
                    smaller = replace(config, num_layers=config.num_layers - 1)
                    block = 4 * (weights - smaller.num_parameters())
                    tables = 4 * (config.vocab_size + 1) * config.dim
                    expected, room = gradients + block / 2, (block + tables) / 2
                else:
                    copy = weights * (2 if precision == "bf16-mixed" else 4)
                    expected, room = gradients + copy, 0.02 * gradients
                assert pytest.approx(expected, abs=room) in grown
            return result

        script.accumulate_gradient, script.stage_backward = start, look

    options = f"--dp 2 --grad-accum-steps 2 --data-parallel {kind} --precision {precision}"
    train(options, "--max-steps", 4, "--parity-steps", 0, world_size=2, change=change)


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


class Live(LiveBytes):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:  # it calls what it is made of, which then comes here
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def kept_by_a_block(layout, tokens=2048):
    """Return the bytes per token that one rank of tp and cp keeps of the template's block, of 70B.

    `tokens` are those of a rank of cp.
    """
    dist.destroy_process_group()  # the fork's own, of one rank
    ranks = layout.tp * layout.cp
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (layout.cp, layout.tp), mesh_dim_names=("cp", "tp"))
    script, config = load_script(HYBRID), replace(models.PRESETS["llama3-70b"], num_layers=1)
    with torch.device("meta"):
        model = models.Transformer(config).to(torch.bfloat16)  # as FSDP hands its weights over
        own = (1, tokens // layout.tp, config.dim)
        x = torch.empty(own, dtype=torch.bfloat16, requires_grad=True)
        head_dim = config.dim // config.num_heads
        tables = models.rotary_tables(torch.empty(tokens), head_dim, config.rope_theta)
    as_on_a_gpu(model.blocks[0])
    kernel = model.blocks[0].attention.attend
    if layout.tp > 1:
        script.split_tensors(model, mesh)
    if layout.cp > 1:
        script.split_sequence(model, mesh, script.own_tokens(0, layout.cp, tokens * layout.cp))
    script.recompute.checkpoint_activations(model.blocks, layout.recompute)
    with (
        mock.patch.object(
            F, "scaled_dot_product_attention", lambda q, k, v, *_, **__: kernel(q, k, v)
        ),
        Live() as live,
    ):
        out = model.blocks[0](x, *tables)
    # The reshape after attention copies its heads side by side: a GPU's kernel writes them so,
    # where there are not parts of it to join.
    copied = x.nbytes if layout.recompute == "none" and layout.cp == 1 else 0
    return (live.alive - out.nbytes + x.nbytes - copied) / tokens


@pytest.mark.gpu_ready
@pytest.mark.parametrize(
    ("tp", "cp"), [(8, 1), pytest.param(1, 1, marks=FULL), pytest.param(4, 2, marks=FULL)]
)
def test_a_block_keeps_what_the_planner_says_of_this_template(in_a_fork, tp, cp):
    """At real size, on tensors without content."""
    shape, kept = of_config(models.PRESETS["llama3-70b"]), {}
    job = Job(shape, 2048, 1, stack="hybrid_parallelism")
    for kind in ("none", "full", "selective"):
        layout = Layout(tp=tp, cp=cp, cp_kind="gather", recompute=kind)
        kept[kind] = in_a_fork(lambda layout=layout: kept_by_a_block(layout))
        if kind != "selective":
            expected = memory.kept_bytes(job, layout, 0)
            assert kept[kind] == pytest.approx(expected, rel=1e-4), kind
    assert kept["full"] < kept["selective"] < kept["none"]


@pytest.mark.gpu_ready
@FULL
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, "--tp 2 --activation-checkpointing full"),
        (2, "--cp 2 --activation-checkpointing selective"),
        (4, "--tp 2 --pp 2 --precision bf16-mixed"),
        (4, "--tp 2 --dp 2 --data-parallel full"),
        (2, "--tp 2 --float8 emulated"),
    ],
)
def test_a_block_is_compiled_whole(train, world_size, layout):
    """Its collectives too; the first two steps are those of one process."""
    options = ("--compile", "--eval-every", 0)
    ended = train(layout, *options, world_size=world_size, change=trace_without_a_compiler)
    graphs = [line for line in ended.stderr.splitlines() if line.startswith("graph with")]
    products = 0 if "float8" in layout else 7  # 0: they are inside of torchao's function
    assert set(graphs) == {f"graph with {products} products"}, ended.stderr
    # The first block's input may need no gradient, or be waited for: then it has its own.
    assert len(graphs) <= 2 * world_size


@FULL
@pytest.mark.parametrize("change", [None, sum_after_backward])
def test_two_stages_of_two_blocks_sum_during_backward(train, change):
    def deepen(script):
        models.PRESETS["tiny"] = replace(models.PRESETS["tiny"], num_layers=8)
        if change:
            change(script)

    layout = "--pp 2 --dp 2 --schedule interleaved"
    ended = train(layout, world_size=4, change=deepen, codes=(1,) if change else (0,))
    row = re.search(r"blocks whose sums have begun.*", ended.stdout)[0]
    assert row.endswith("NO" if change else "yes"), row


@FULL
def test_a_loss_that_is_no_number_ends_the_run(train):
    ended = train("--pp 2 --lr 1e9 --max-steps 6", world_size=2, codes=(1,))
    assert "stopped: in step" in ended.stderr


@FULL
@pytest.mark.skipif(GPUS.count(",") < 1, reason="needs two GPUs")
@pytest.mark.parametrize("layout", ["--tp 2", "--pp 2", "--cp 2", "--dp 2 --data-parallel full"])
def test_the_same_on_gpus(layout):
    command = ["torchrun", "--standalone", "--nproc-per-node=2", HYBRID, *map(str, SMALL)]
    ended = run_command([*command, *layout.split()], REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
