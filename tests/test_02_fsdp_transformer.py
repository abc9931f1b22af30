"""fsdp_transformer.py: the losses of module 01's template, checks that can fail, resuming."""

import dataclasses
import functools
import json
import shutil

import pytest
import torch
from conftest import GPUS, REPO, assert_one_line, results_of, run_command
from helpers_01 import trace_without_a_compiler
from helpers_02 import quick

from legacy_common import models

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
        2, "--cpu-offload --grad-accum-steps 2 --activation-checkpointing 2", marks=full
    ),
    pytest.param(
        3, "--grad-accum-steps 2 --accumulate gathered --activation-checkpointing selective "
        "--precision bf16-mixed", marks=full
    ),
    pytest.param(3, "--loss-chunks 5 --sharding grad-op", marks=full),
    pytest.param(2, "--fused-loss --loss-chunks 3 --grad-accum-steps 2", marks=[full, FUSED]),
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
def test_a_block_is_compiled_whole_and_once(run_script):
    """Under FSDP, whatever is recomputed; with the gradient of one process."""
    ended = run_script(
        FSDP, *SMALL, "--compile", "--activation-checkpointing", "selective", "--eval-every", 0,
        world_size=2, before=small(trace_without_a_compiler),
    )  # fmt: skip
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert ended.stderr.count("graph with 7 products") == 2, ended.stderr


@full
def test_tied_embeddings_stay_tied(run_script):
    """After the model got its memory: as one process, which ties them itself."""
    ended = run_script(FSDP, *SMALL, "--loss-chunks", 3, world_size=2, before=small(config=TIED))
    assert ended.codes == [0, 0], ended.stdout + ended.stderr


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


def reduce_every_micro_batch(script):
    script.synchronise = lambda *_: None


def keep_the_norm_of_a_part(script):
    """As a loop that clips by the norm of its own shards."""

    class Part:
        def __init__(self, weights, limit):
            norms = [weight.grad.to_local().norm() for weight in weights]
            self.norm = torch.stack(norms).norm()

        def full_tensor(self):
            return self.norm

    script.torch.nn.utils.clip_grad_norm_ = Part


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
def test_another_number_of_ranks_resumes(run_script, tmp_path, text):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    arguments = (*RUN, *text)
    own = (*arguments, "--output-dir", straight)
    assert run_script(FSDP, *own, world_size=2, before=small()).codes == [0, 0]
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000008")
    other = flags("--activation-checkpointing full --sharding grad-op --resume")
    own = (*arguments, *other, "--output-dir", resumed)
    ended = run_script(FSDP, *own, world_size=3, before=small())
    assert ended.codes == [0] * 3, ended.stdout + ended.stderr
    assert "ranks 2 -> 3" in ended.stdout
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


# bad input


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    quick(
        2,
        [
            (3, "--sharding hybrid --shard-group-size 2", "2 does not divide 3 ranks"),
            (1, "--activation-checkpointing 1", "none, full, selective, or k of at least 2"),
            (2, "--preset llama3-70b", "--preset llama3-70b needs 1,051.3 GiB for weights, "),
            (1, "--precision 16-mixed", "use bf16-mixed"),
            (1, "--loss-chunks 2000", "--loss-chunks must be at most the 1024 tokens"),
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


@full
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
@pytest.mark.parametrize(
    "way",
    [
        "--precision bf16-mixed --activation-checkpointing selective",
        "--cpu-offload --grad-accum-steps 2 --accumulate whole",
    ],
)
def test_the_same_on_a_gpu(way):
    command = ["python", FSDP, *flags(way), "--device", "cuda"]
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert " cuda with " in ended.stdout and "nccl," in ended.stdout
