"""fsdp_transformer.py: the losses of module 01's template, checks that can fail, resuming."""

import dataclasses
import functools
import importlib.util
import json
import shutil
import signal

import pytest
import torch
from conftest import GPUS, REPO, assert_one_line, results_of, run_command
from helpers_01 import ask_to_stop_in, die_in, trace_without_a_compiler
from helpers_02 import quick
from torch.utils._python_dispatch import TorchDispatchMode

from dist_common import models, recompute

DDP = "01-ddp-basics/ddp_training.py"
FSDP = "02-fsdp/fsdp_transformer.py"
NARROW = models.TransformerConfig(256, 32, 2, 4, 2, 88, 256)
TIED = dataclasses.replace(NARROW, tied_embeddings=True)
SMALL = ("--seq-len", 32, "--micro-batch-size", 2, "--max-steps", 2, "--warmup-steps", 0)
GRADIENT = "gradient: relative error against one process"
full = pytest.mark.full


def small(*changes, config=NARROW):
    """Return `before` for run_script: make `tiny` small, then make the changes."""

    def before(script):
        models.PRESETS["tiny"] = config
        for change in changes:
            change(script)

    return before


def flags(text):
    return text.split()


def failed_in(folder):
    return {check["name"] for check in results_of(folder)["checks"] if not check["ok"]}


def losses_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}
    assert list(found) == list(range(1, len(found) + 1)), "a step is missing, or there twice"
    return torch.tensor(list(found.values()))


# the same answer


FUSED = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="needs torch 2.14"
)
WAYS = [
    (2, "--activation-checkpointing full --prefetch 2 --loss-chunks 3 --grad-accum-steps 2"),
    pytest.param(
        4, "--sharding hybrid --shard-group-size 2 --grad-accum-steps 3 --accumulate whole",
        marks=full,
    ),
    pytest.param(
        2, "--activation-checkpointing selective --precision bf16-mixed", marks=full
    ),
    pytest.param(
        2, "--cpu-offload --grad-accum-steps 2 --activation-checkpointing 2", marks=full
    ),
    pytest.param(3, "--grad-accum-steps 3 --accumulate gathered", marks=full),
    pytest.param(2, "--float8 emulated --activation-checkpointing selective", marks=full),
    pytest.param(3, "--loss-chunks 5 --sharding grad-op", marks=full),
    pytest.param(2, "--fused-loss --loss-chunks 3 --grad-accum-steps 2", marks=[full, FUSED]),
    pytest.param(2, "--fused-loss --precision bf16-mixed --loss-chunks 4", marks=[full, FUSED]),
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "way"), WAYS)
def test_whatever_saves_memory_gives_the_gradient_of_one_process(
    run_script, tmp_path, world_size, way
):
    """Of micro-batches with unequally many tokens; loss and norm too, and the collectives."""
    folder = tmp_path / "run"
    ended = run_script(
        FSDP, *SMALL, *flags(way), "--output-dir", folder, world_size=world_size, before=small()
    )
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    assert not ended.stderr
    names = {check["name"] for check in results_of(folder)["checks"]}
    assert names >= {GRADIENT, "loss", "gradient norm", "all-gathers per step"}


@pytest.mark.gpu_ready
@full
@pytest.mark.parametrize(
    ("kind", "graphs"),
    [("selective", 1), ("none", 1), ("full", 1), ("2", 2)],  # 2: with a checkpoint, and without
)
def test_a_block_is_compiled_whole_and_once(run_script, kind, graphs):
    """Under FSDP, whatever is recomputed; with the gradient of one process."""
    ended = run_script(
        FSDP, *SMALL, "--compile", "--activation-checkpointing", kind, "--eval-every", 0,
        world_size=2, before=small(trace_without_a_compiler),
    )  # fmt: skip
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert ended.stderr.count("graph with 7 products") == 2 * graphs, ended.stderr


class ScaledProducts(TorchDispatchMode):
    """Count products in float8."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._scaled_mm.default
        return func(*args, **(kwargs or {}))


class Float8Block(torch.nn.Module):
    def forward(self, x):
        product = x.detach().to(torch.float8_e4m3fn)
        one = torch.ones(())
        found = torch._scaled_mm(product, product.t(), one, one, out_dtype=torch.bfloat16)
        return x * found.float()  # whose backward needs the product


@pytest.mark.parametrize(
    ("kind", "products"), [("selective", 1), pytest.param("full", 2, marks=full)]
)
def test_selective_checkpoints_keep_products_in_float8_too(in_a_fork, kind, products):
    def count():
        block = Float8Block()
        recompute.checkpoint_activations([block], kind)
        with ScaledProducts() as counter:
            block(torch.ones(16, 16, requires_grad=True)).sum().backward()
        return counter.count

    assert in_a_fork(count) == products


@full
def test_tied_embeddings_stay_tied(run_script):
    """After the model got its memory: as one process, which ties them itself."""
    ended = run_script(FSDP, *SMALL, "--loss-chunks", 3, world_size=2, before=small(config=TIED))
    assert ended.codes == [0, 0], ended.stdout + ended.stderr


JOB = (
    "--seq-len", 32, "--global-batch-size", 16, "--micro-batch-size", 2, "--max-steps", 6,
    "--warmup-steps", 2, "--log-every", 6,
)  # fmt: skip


@full
@pytest.mark.parametrize(
    ("world_size", "way"),
    [
        (4, "--sharding hybrid --shard-group-size 2"),
        (3, "--global-batch-size 18 --accumulate whole"),
        (2, "--cpu-offload"),
    ],
)
def test_the_job_has_the_losses_of_ddp_training(run_script, tmp_path, world_size, way):
    """Step for step, over the end of an epoch with short and empty micro-batches."""
    (tmp_path / "text").write_bytes((REPO / DDP).read_bytes()[:2800])  # 84 sequences to train on
    alone, sharded = tmp_path / "alone", tmp_path / "sharded"
    common = (*JOB, "--parity-steps", 0, "--text-file", tmp_path / "text")
    batch = flags(way)[:2] if "global" in way else []
    own = (*common, "--eval-every", 6, *batch, "--output-dir", alone)
    ended = run_script(DDP, *own, before=small())
    assert ended.codes == [0], ended.stdout + ended.stderr
    own = (*common, *flags(way), "--output-dir", sharded)
    ended = run_script(FSDP, *own, world_size=world_size, before=small())
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    expected = losses_of(alone)
    assert expected[-1] < 0.97 * expected[0], "a loss that does not fall would prove little"
    torch.testing.assert_close(losses_of(sharded), expected, rtol=0, atol=1e-5)
    ours, theirs = (results_of(f)["metrics"]["final_loss"] for f in (sharded, alone))
    assert ours == pytest.approx(theirs, abs=1e-5)


# checks that can fail


def average_the_averages(script):
    """Do what most loops do: mean over each micro-batch, then over micro-batches and ranks."""
    summed = script.summed_loss

    def scaled(model, inputs, targets, args):
        counted = (targets != -100).sum()
        everywhere = counted.clone()
        script.dist.all_reduce(everywhere)
        ranks = script.dist.get_world_size()
        return summed(model, inputs, targets, args) / counted * everywhere / ranks

    script.summed_loss = scaled


def mean_over_ranks(script):
    script.FSDPModule.set_gradient_divide_factor = lambda self, factor: None


def reduce_every_micro_batch(script):
    script.synchronise = lambda *_: None


def drop_a_micro_batch(script):
    accumulate = script.accumulate_gradient
    script.accumulate_gradient = lambda run, micro_batches, tokens: accumulate(
        run, micro_batches[:1], tokens
    )


def keep_the_norm_of_a_part(script):
    """As a loop that clips by the norm of its own shards."""

    class Part:
        def __init__(self, weights, limit):
            norms = [weight.grad.to_local().norm() for weight in weights]
            self.norm = torch.stack(norms).norm()

        def full_tensor(self):
            return self.norm

    script.torch.nn.utils.clip_grad_norm_ = Part


def draw_apart(script):
    draw = models.draw_weights
    script.models.draw_weights = lambda model, config, seed: draw(
        model, config, seed + script.dist.get_rank()
    )


def one_unit_for_all(script):
    sharded = script.fully_shard
    script.fully_shard = lambda module, **options: (
        sharded(module, **options) if isinstance(module, script.Transformer) else module
    )


def skip_a_batch(script):
    deal = script.data.job_batches

    def short(sequences, sampler, args, *rest):
        for number, step in enumerate(deal(sequences, sampler, args, *rest)):
            if number == 1:
                step[-1] = script.data.collate(args.micro_batch_size, args.seq_len, [])
            yield step

    script.data.job_batches = short


@pytest.mark.parametrize(
    ("sabotage", "way", "failing"),
    [
        (average_the_averages, "--grad-accum-steps 2", {GRADIENT, "loss", "gradient norm",
                                                        "all-reduces per step"}),
        (reduce_every_micro_batch, "--grad-accum-steps 2 --accumulate whole",
         {"reduce-scatters per step"}),
        (keep_the_norm_of_a_part, "", {"gradient norm"}),
        (skip_a_batch, "--grad-accum-steps 2", {"tokens trained on, from step 1"}),
        pytest.param(
            reduce_every_micro_batch,
            "--grad-accum-steps 2 --sharding hybrid --shard-group-size 1",
            {"all-reduces per step"}, marks=full,
        ),
        pytest.param(
            drop_a_micro_batch, "--grad-accum-steps 2",
            {GRADIENT, "loss", "gradient norm", "all-gathers per step", "reduce-scatters per step"},
            marks=full,
        ),
        pytest.param(mean_over_ranks, "", {GRADIENT, "gradient norm"}, marks=full),
        pytest.param(draw_apart, "", {GRADIENT, "loss", "gradient norm"}, marks=full),
        pytest.param(
            one_unit_for_all, "", {"all-gathers per step", "reduce-scatters per step"}, marks=full
        ),
    ],
)  # fmt: skip
def test_sabotage_fails_a_check(run_script, tmp_path, sabotage, way, failing):
    folder = tmp_path / "run"
    ended = run_script(
        FSDP, *SMALL, *flags(way), "--output-dir", folder, world_size=2, before=small(sabotage)
    )
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    assert failed_in(folder) == failing


# a run that survives its end

RUN = (
    "--seq-len", 32, "--micro-batch-size", 2, "--global-batch-size", 12, "--max-steps", 8,
    "--warmup-steps", 2, "--save-every", 3, "--log-every", 3, "--parity-steps", 0,
)  # fmt: skip


@functools.cache
def text_of_one_epoch_and_a_half():
    return (REPO / DDP).read_bytes()[:2900]  # 86 sequences: 8 steps of 12 cross an epoch's end


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").write_bytes(text_of_one_epoch_and_a_half())
    return ("--text-file", tmp_path / "text")


@full
def test_a_killed_run_resumes_over_the_end_of_an_epoch(run_script, tmp_path, text):
    """Killed after the checkpoint of step 3; then asked to stop; then trained to the end."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    sharding = flags("--cpu-offload --precision bf16-mixed")
    arguments = (*RUN, *text, *sharding, "--resume", "--output-dir")

    def start(folder, *changes):
        return run_script(
            FSDP, *arguments, folder, world_size=2, before=small(*changes, config=TIED)
        )

    assert start(straight).codes == [0, 0]
    assert start(stopped, die_in(5)).codes == [-signal.SIGKILL] * 2
    ended = start(stopped, ask_to_stop_in(4))
    assert ended.codes == [0, 0] and "after step 6, asked to stop, saved" in ended.stdout
    ended = start(stopped)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert "resuming from" in ended.stdout and "changed since then: nothing" in ended.stdout
    assert torch.equal(losses_of(stopped), losses_of(straight))
    assert "nothing to do" in start(stopped).stdout


@full
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, ""), (3, "--activation-checkpointing full --sharding grad-op")),
        ((4, "--sharding hybrid --shard-group-size 2"), (1, "")),
    ],
)
def test_another_number_of_ranks_resumes(run_script, tmp_path, text, first, second):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    arguments = (*RUN, *text)
    own = (*arguments, *flags(first[1]), "--output-dir", straight)
    # Three numbers of ranks divide 12 sequences in micro-batches of 2: 1, 2, 3; 4 takes 1 each.
    size = ("--micro-batch-size", 1)
    assert run_script(FSDP, *own, *size, world_size=first[0], before=small()).codes[0] == 0
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000008")
    own = (*arguments, *flags(second[1]), "--output-dir", resumed, "--resume")
    ended = run_script(FSDP, *own, *size, world_size=second[0], before=small())
    assert ended.codes == [0] * second[0], ended.stdout + ended.stderr
    assert f"ranks {first[0]} -> {second[0]}" in ended.stdout
    torch.testing.assert_close(losses_of(resumed), losses_of(straight), rtol=0, atol=1e-5)


@full
def test_a_checkpoint_of_other_data_is_refused_and_a_damaged_one_passed_over(
    run_script, tmp_path, text
):
    folder = tmp_path / "run"
    arguments = (*RUN, *text, "--output-dir", folder)
    assert run_script(FSDP, *arguments, before=small()).codes == [0]
    ended = run_script(FSDP, *arguments, "--resume", "--seed", 1, before=small())
    assert_one_line(ended, "--seed is 1 here and 0 in the checkpoint", "fsdp_transformer.py")
    state = next((folder / "checkpoints" / "step-00000008").glob("*.distcp"))
    state.write_bytes(state.read_bytes()[:-100] + bytes(100))
    ended = run_script(FSDP, *arguments, "--resume", before=small())
    assert ended.codes == [0] and "skipped" in ended.stderr and "step-00000006" in ended.stdout


@full
def test_a_loss_that_is_no_number_ends_the_run(run_script):
    arguments = (*SMALL, "--lr", 1e6, "--max-grad-norm", 1e6, "--max-steps", 6)
    ended = run_script(FSDP, *arguments, world_size=2, before=small())
    assert 1 in ended.codes and "stopped: in step" in ended.stderr, ended.stdout + ended.stderr


# bad input


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    quick(
        2,
        [
            (2, "--sharding FULL", "--sharding: invalid choice: 'FULL'"),
            (3, "--sharding hybrid --shard-group-size 2", "2 does not divide 3 ranks"),
            (1, "--activation-checkpointing 1", "none, full, selective, or k of at least 2"),
            (1, "--seq-len 257", "--seq-len must be at most 256"),
            (2, "--preset llama3-70b", "--preset llama3-70b needs 1,051.3 GiB for weights, "),
            (1, "--precision 16-mixed", "use bf16-mixed"),
            (1, "--float8 --device cpu", "--float8 needs an NVIDIA GPU of Ada, Hopper or later"),
            (1, "--loss-chunks 2000", "--loss-chunks must be at most the 1024 tokens"),
            (2, "--global-batch-size 3", "--global-batch-size 3 must be --micro-batch-size 8"),
            (1, "--resume", "--resume needs --output-dir"),
        ],
    ),
)
def test_bad_input_gets_one_line(run_script, world_size, argv, says):
    ended = run_script(FSDP, *flags(argv), world_size=world_size)
    assert_one_line(ended, says, "fsdp_transformer.py")


def test_a_fused_loss_that_pytorch_lacks_is_refused(run_script):
    def as_an_older_one(script):
        vars(torch.nn.functional).pop("linear_cross_entropy", None)

    ended = run_script(FSDP, "--fused-loss", before=as_an_older_one)
    assert_one_line(ended, "--fused-loss needs F.linear_cross_entropy", "fsdp_transformer.py")


# on a GPU: one process, NCCL


FLOAT8 = pytest.mark.skipif(
    not importlib.util.find_spec("torchao"), reason="needs torchao and a GPU of Ada or later"
)


@full
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
@pytest.mark.parametrize(
    "way",
    [
        "--precision bf16-mixed --activation-checkpointing selective",
        "--preset 124m --max-steps 12 --loss-chunks 4",
        "--cpu-offload --grad-accum-steps 2 --accumulate whole",
        pytest.param("--float8 --precision bf16-mixed --parity-steps 0", marks=FLOAT8),
    ],
)
def test_the_same_on_a_gpu(way):
    command = ["python", FSDP, *flags(way), "--device", "cuda"]
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert " cuda with " in ended.stdout and "nccl," in ended.stdout
