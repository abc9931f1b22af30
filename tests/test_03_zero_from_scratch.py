"""ZeRO from scratch: one process's losses for any model, and no more held or sent than said."""

import importlib.util
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import GPUS, REPO, load_script, results_of, run_command
from helpers_03 import deepspeed_in_the_parent
from torch import nn

from deepspeed_parts import zero_from_scratch as part
from legacy_common import models
from legacy_common.lab import traffic

SCRATCH = "03-deepspeed/zero_from_scratch.py"
NARROW = models.TransformerConfig(256, 32, 2, 2, 1, 88, 256)
SMALL = ("--micro-batch-size", 2, "--seq-len", 32, "--max-steps", 3, "--bucket-cap-mb", 0.02)
FULL = pytest.mark.full
STAGES = (1, 2)


def narrow(script):
    models.PRESETS["tiny"] = NARROW


# the script


def test_zero_from_scratch_is_one_process(run_script, tmp_path):
    folder = tmp_path / "run"
    ended = run_script(SCRATCH, *SMALL, "--output-dir", folder, world_size=2, before=narrow)
    assert ended.codes == [0, 0] and not ended.stderr, ended.stdout + ended.stderr
    assert len(results_of(folder)["checks"]) == 26


@FULL
@pytest.mark.parametrize("reduce_dtype", ["weights", "float32"])
def test_bytes_sent_per_weight(run_script, tmp_path, reduce_dtype):
    """ZeRO-1 4 and ZeRO-2 2m + 2 bytes in bf16, 8 and 4m + 4 in float32; 6 and 4m + 2 in bf16
    with the gradients summed in float32.
    """
    folder, accumulated = tmp_path / "run", 3
    arguments = (*SMALL, "--grad-accum-steps", accumulated, "--reduce-dtype", reduce_dtype)
    ended = run_script(SCRATCH, *arguments, "--output-dir", folder, world_size=2, before=narrow)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    metrics = results_of(folder)["metrics"]
    in_bf16 = (4, 2 * accumulated + 2) if reduce_dtype == "weights" else (6, 4 * accumulated + 2)
    for precision, sizes in (("32-true", (8, 4 * accumulated + 4)), ("bf16-mixed", in_bf16)):
        sent = [metrics[f"sent_stage {stage}_{precision}"] for stage in STAGES]
        assert sent == pytest.approx([size / 2 for size in sizes], rel=1e-3)


def keep_own_gradient(script):
    script.reduce_scatter_single = lambda own, whole: own.copy_(part.part_of(whole))


def keep_the_whole_gradient(script):
    reduced = script.Bucket.reduce

    def broken(self):
        kept = [weight.grad.clone() for weight in self.parameters]
        reduced(self)
        self.kept = kept

    script.Bucket.reduce = broken


def reduce_once_a_step(script):
    made = script.Zero.__init__
    script.Zero.__init__ = lambda self, *args, stage, **kinds: made(self, *args, stage=1, **kinds)


WRONG = {"error of a loss", "error of a weight", "calls per step", "bytes sent per weight"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (keep_own_gradient, WRONG | {"relative error of the gradient"}),
        pytest.param(keep_the_whole_gradient, {"bytes held per weight"}, marks=FULL),
        pytest.param(reduce_once_a_step,
                     {"bytes held per weight", "bytes sent per weight", "calls per step"},
                     marks=FULL),
    ],
)  # fmt: skip
def test_sabotage_of_zero_from_scratch_fails_a_check(run_script, tmp_path, sabotage, failing):
    def before(script):
        narrow(script)
        sabotage(script)

    folder = tmp_path / "run"
    ended = run_script(SCRATCH, *SMALL, "--output-dir", folder, world_size=2, before=before,
                       end_job_on_failure=False)  # fmt: skip
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    bad = [check["name"] for check in results_of(folder)["checks"] if not check["ok"]]
    assert {name.rpartition(": ")[2] for name in bad} == failing
    stages = {2} if sabotage is reduce_once_a_step else {1, 2}
    assert {int(name.split(",")[0].split()[1]) for name in bad} == stages


@FULL
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_zero_from_scratch_runs_on_a_gpu():
    command = ["python", SCRATCH, "--device", "cuda"]
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert " cuda with nccl" in ended.stdout


# DeepSpeed's own


def small_batches(rank: int, world_size: int) -> list[list]:
    """Return three steps of two micro-batches of two sequences."""
    draw = torch.Generator().manual_seed(rank)
    return [[torch.randint(256, (2, 2, 32), generator=draw).unbind() for _ in range(2)]
            for _ in range(3)]  # fmt: skip


def beside_deepspeed(rank: int, world_size: int, stage: int, dtype: torch.dtype) -> tuple:
    """Train three steps by both; return both last losses and the largest error of a weight."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                   "LOCAL_WORLD_SIZE": str(world_size)}  # fmt: skip
    from deepspeed_parts import setup

    setup.prepare(torch.device("cpu"))
    import deepspeed

    steps = small_batches(rank, world_size)
    torch.manual_seed(0)
    model = models.Transformer(NARROW)
    names = [name for name, _ in model.named_parameters()]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,  # without the key, DeepSpeed clips to a norm of 1
        "bf16": {"enabled": dtype == torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": {"lr": part.LR, "betas": [0.9, 0.95],
                                                  "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, config=config)
    theirs = []
    for micro_batches in steps:
        for batch in micro_batches:
            loss = part.loss_of(engine, batch)
            engine.backward(loss)
            theirs.append(loss.item())
            engine.step()
    right = {name: weight.detach().float() for name, weight in model.named_parameters()}

    script = load_script(SCRATCH)
    torch.manual_seed(0)
    model = models.Transformer(NARROW)
    zero = script.Zero(model.parameters(), part.adamw, stage, dtype, bucket_bytes=20_000)
    ours = []
    for micro_batches in steps:
        for batch in micro_batches:
            loss = part.loss_of(model, batch)
            (loss / 2).backward()
            ours.append(loss.item())
        zero.step()
    error = max((model.get_parameter(n).float() - right[n]).abs().max().item() for n in names)
    return ours, theirs, error


@FULL
@pytest.mark.parametrize(
    ("world_size", "stage", "dtype"), [(2, 1, torch.float32), (3, 2, torch.bfloat16)]
)
@pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs DeepSpeed")
def test_zero_from_scratch_is_deepspeed(on_ranks, world_size, stage, dtype):
    """Tolerance: sums in another order; AdamW divides by gradients, some of them nearly 0.

    In bf16 both sum gradients in bf16, in an order of their own, and a step moves a weight by LR.
    """

    in_loss, in_weight = (1e-5, 1e-4) if dtype == torch.float32 else (2e-2, 4 * part.LR)
    with deepspeed_in_the_parent():
        returned = on_ranks(beside_deepspeed, world_size, stage, dtype, timeout_s=120)
    for ours, theirs, error in returned:
        assert ours == pytest.approx(theirs, abs=in_loss)
        assert error < in_weight


# a model of one's own


class Awkward(nn.Module):
    """Frozen and tied weights, odd sizes, a scalar, channels last, a branch of the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.rare = nn.Linear(7, 7)
        self.conv = nn.Conv2d(7, 7, 1).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.rand(7))
        self.head = nn.Linear(7, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, rare: bool) -> torch.Tensor:
        x = self.frozen(self.embedding(tokens)) * self.scale  # (B, 7)
        x = x + self.shift.to(x.dtype)
        if rare:
            x = x + self.rare(x)
        return self.head(torch.tanh(self.conv(x[:, :, None, None]).flatten(1)))


def loss_of(model: nn.Module, rank: int, step: int, micro: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    tokens, targets = torch.randint(5, (2, 8), generator=draw)
    rare = rank == dist.get_world_size() - 1 and (micro + step) % 2 == 0
    return F.cross_entropy(model(tokens, rare).float(), targets)


def own_model(rank: int, world_size: int, stage: int, dtype, accumulated: int) -> tuple:
    """Train three steps beside one process; return the errors of gradients and weights."""
    script = load_script(SCRATCH)
    torch.manual_seed(0)
    alone = Awkward()
    torch.manual_seed(0)
    model = Awkward()
    names = {parameter: name for name, parameter in model.named_parameters()}
    sgd = partial(torch.optim.SGD, lr=0.3)
    zero = script.Zero(model.parameters(), sgd, stage, dtype, bucket_bytes=120)
    optimizer = sgd(alone.parameters())
    errors = []

    def compare(*_):
        expected = dict(alone.named_parameters())
        whole = part.assemble(zero, [bucket.part.grad for bucket in zero.buckets])
        for parameter, gradient in whole.items():
            right = expected[names[parameter]].grad
            right = torch.zeros_like(gradient) if right is None else right
            errors.append((gradient - right).abs().max().item())

    zero.optimizer.register_step_pre_hook(compare)
    for step in range(3):
        optimizer.zero_grad()
        for number in range(world_size):
            for micro in range(accumulated):
                (loss_of(alone, number, step, micro) / accumulated / world_size).backward()
        with traffic.TrafficCounter() as counter:
            for micro in range(accumulated):
                (loss_of(model, rank, step, micro) / accumulated).backward()
        zero.step()
        optimizer.step()
    assert model.frozen.weight.grad is None and len(zero.buckets) == 4
    state = script.whole_state(zero, model)
    plain = Awkward()
    assert state.keys() == plain.state_dict().keys()
    plain.load_state_dict(state)
    weights = [torch.cat([w.flatten() for w in m.state_dict().values()]) for m in (plain, alone)]
    errors.append((weights[0] - weights[1]).abs().max().item())
    return errors, dict(counter.calls)


def own_models(rank: int, world_size: int, dtypes: tuple) -> dict:
    return {(stage, dtype, accumulated): own_model(rank, world_size, stage, dtype, accumulated)
            for stage in STAGES for dtype in dtypes for accumulated in (1, 3)}  # fmt: skip


def test_a_model_of_ones_own_gets_the_gradient_of_one_process(on_ranks):
    """Tolerance: float32 sums of some 100 terms near 1 in another order; bf16 keeps 8 bits."""
    for ended in on_ranks(own_models, 2, (torch.float32, torch.bfloat16)):
        for (stage, dtype, accumulated), (errors, calls) in ended.items():
            name = (stage, dtype, accumulated)
            assert max(errors) < (1e-5 if dtype == torch.float32 else 0.1), (name, errors)
            # In backward, stage 2 alone reduces: 4 buckets in each micro-batch.
            expected = {"reduce_scatter": 4 * accumulated} if stage == 2 else {}
            assert calls == expected, name


def reload(rank: int, world_size: int, dtype: torch.dtype) -> list:
    """Save after a step, load into a model drawn otherwise, take a step with both; compare."""
    script = load_script(SCRATCH)
    sgd = partial(torch.optim.SGD, lr=0.3)
    pair = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = Awkward()
        pair.append((model, script.Zero(model.parameters(), sgd, 2, dtype)))
    saved = script.whole_state(pair[0][1], pair[0][0])
    assert saved["conv.weight"].dtype == torch.float32
    script.load_whole_state(pair[1][1], pair[1][0], saved)
    losses = []
    for step in range(2):
        for model, zero in pair:
            loss = loss_of(model, rank, step, 0)
            loss.backward()
            zero.step()
            losses.append(loss.item())
    try:
        script.load_whole_state(pair[1][1], pair[1][0], {"head.weight": torch.ones(5, 7)})
    except RuntimeError as error:
        assert "Missing key(s)" in str(error)
    else:
        raise AssertionError("a state dict without weights was loaded")
    return losses


def test_whole_weights_load_into_another_model_in_float32(on_ranks):
    for losses in on_ranks(reload, 2, torch.bfloat16):
        assert losses[0] == losses[1] and losses[2] == losses[3]


def test_buckets_hold_one_dtype_and_the_last_layer_first():
    layers = [nn.Parameter(torch.empty(64)) for _ in range(4)]
    assert [len(b) for b in part.buckets_of(layers, 256)] == [1, 1, 1, 1]
    assert [len(b) for b in part.buckets_of(layers, 257)] == [2, 2]
    layers[3].data = layers[3].data.bfloat16()
    assert [len(b) for b in part.buckets_of(layers, 10**6)] == [1, 3]
    assert part.buckets_of(layers, 257)[0][0] is layers[3]
    assert part.buckets_of([], 256) == []
