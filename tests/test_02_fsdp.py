"""Module 02: sabotage fails the core lessons' checks, other world sizes, own models."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_one_line, load_script, results_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from dist_common import model

BASICS = "02-fsdp/fsdp_basics.py"
SCRATCH = "02-fsdp/fsdp_from_scratch.py"
MEMORY = "02-fsdp/fsdp_memory.py"
COMPILE = "02-fsdp/compile_blocks.py"
full = pytest.mark.full


def narrow(script):
    """Train a smaller model: bytes follow the same formulas at any size."""
    model.PRESETS["tiny"] = model.Config(256, 32, 3, 4, 2, 88, 256)


# Sabotage


def shard_nothing(script):
    script.shard = lambda model, *_: model


def shard_the_whole_model_only(script):
    script.shard = lambda model, strategy, mesh: script.fully_shard(model, mesh=mesh)


def keep_blocks_whole(script):
    fully_shard = script.fully_shard

    def shard_and_keep(module, mesh, reshard_after_forward=False):
        return fully_shard(module, mesh=mesh, reshard_after_forward=False)

    script.fully_shard = shard_and_keep


def all_reduce_every_micro_batch(script):
    script.FSDPModule = ()  # no model is one


def build_the_optimizer_first(script):
    """Give the optimizer the weights that sharding replaces."""
    shard, build = script.shard, script.build_optimizer

    def shard_late(model, *rest):
        optimizer = build(model)
        script.build_optimizer = lambda _: optimizer
        return shard(model, *rest)

    script.shard = shard_late
    script.count_held_bytes = lambda *_: 0


def keep_local_gradient(script):
    def copy_local_part(part, whole):
        part.copy_(script.part_of(whole))

    script.reduce_scatter_single = copy_local_part


def never_free(script):
    script.Unit.free = lambda unit: None


def gather_in_float32(script):
    build = script.Unit.__init__
    script.Unit.__init__ = lambda unit, parameters, dtype: build(unit, parameters, None)


def forget_checkpointing(script):
    model.Block.activation_checkpointing = property(
        lambda block: "none", lambda block, value: None
    )


def compile_each_length(script):
    """Make one graph per length, not one for all lengths after the first."""
    torch._dynamo.config.automatic_dynamic_shapes = False


def forget_fullgraph(script):
    whole, hooks = script.compile_whole_model, script.read_in_hooks
    script.compile_whole_model = lambda *args, fullgraph=False: whole(*args)
    script.read_in_hooks = lambda *args, fullgraph=False: hooks(*args)


def compile_other_blocks(script):
    """Give each block code of its own, which dynamo captures separately."""
    compile_blocks = script.compile_blocks

    def compile_changed(model, *args, **options):
        for number, block in enumerate(model.blocks):
            block.attention_norm.eps = 1e-5 * (number + 1)
        return compile_blocks(model, *args, **options)

    script.compile_blocks = compile_changed


HYBRID = "--sharding hybrid --grad-accum-steps 2"
SABOTAGE = [
    (BASICS, 2, "", shard_nothing, "full: error of the gradient"),
    (BASICS, 2, "", build_the_optimizer_first, "full: error of the losses"),
    (BASICS, 2, "", shard_the_whole_model_only, "full: bytes whole"),
    (BASICS, 2, "", keep_blocks_whole, "full: bytes sent"),
    (BASICS, 2, "", shard_nothing, "full: bytes held"),
    (BASICS, 4, HYBRID, all_reduce_every_micro_batch, "hybrid: bytes sent"),
    (SCRATCH, 2, "", keep_local_gradient, "32-true: error of the losses"),
    (SCRATCH, 2, "", never_free, "32-true: bytes whole"),
    (SCRATCH, 2, "", gather_in_float32, "bf16-mixed: bytes sent"),
    (
        MEMORY,
        1,
        "--activation-checkpointing full",
        forget_checkpointing,
        "bytes kept for backward",
    ),
    (COMPILE, 1, "", compile_other_blocks, "graphs of all blocks"),
    (COMPILE, 1, "", compile_each_length, "graphs of three lengths"),
    (COMPILE, 1, "", forget_fullgraph, "mistakes that fullgraph=True refuses"),
]
QUICK = (BASICS, 2, "", shard_nothing, "full: error of the gradient")


@pytest.mark.parametrize(
    ("script", "ranks", "flags", "sabotage", "check"),
    [row if row == QUICK else pytest.param(*row, marks=full) for row in SABOTAGE],
)
def test_sabotage_fails_its_check(
    run_script, tmp_path, script, ranks, flags, sabotage, check
):
    def before(module):
        narrow(module)
        sabotage(module)

    words = (*flags.split(), "--output-dir", tmp_path / "run")
    ended = run_script(script, *words, world_size=ranks, before=before)
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert check in failed, ended.stdout


# Other numbers of ranks, other flags

WAYS = [
    (BASICS, 3, "--sharding full grad-op none --seed 3"),
    (BASICS, 4, "--sharding full grad-op hybrid none --grad-accum-steps 2"),
    (SCRATCH, 3, "--seed 3"),
    (MEMORY, 1, "--world-size 64 --preset llama3-70b --precision bf16-mixed"),
    (COMPILE, 3, "--seed 3"),
]


@full
@pytest.mark.parametrize(("script", "ranks", "flags"), WAYS)
def test_a_correct_run_passes(run_script, script, ranks, flags):
    before = None if script == MEMORY else narrow
    ended = run_script(script, *flags.split(), world_size=ranks, before=before)
    assert ended.codes == [0] * ranks, ended.stdout + ended.stderr
    assert not ended.stderr


@pytest.mark.parametrize(
    ("script", "ranks", "flags", "says"),
    [
        (BASICS, 3, "--sharding hybrid", "take 1 or an even number of ranks"),
        (MEMORY, 1, "--precision bf16-mixed", "give --world-size too, or a GPU"),
        (COMPILE, 1, "--seq-len 1000", "--seq-len must be at most 256"),
    ],
)
def test_wrong_usage_gets_one_line(run_script, script, ranks, flags, says):
    ended = run_script(script, *flags.split(), world_size=ranks, before=narrow)
    assert_one_line(ended, says, script.removeprefix("02-fsdp/"))


# Peak bytes of tensors on one H200, from benchmarks/recorded/h200.txt, without the
# 64 MiB that cuBLAS keeps.
H200 = [
    ("1b", 2048, 4, "full", 28_567.9e6),
    ("124m", 1024, 8, "none", 9_513.6e6),
    ("tiny", 128, 8, "none", 33.47e6),
]


@pytest.mark.parametrize(("preset", "seq_len", "rows", "kind", "measured"), H200)
def test_the_formula_predicts_what_a_gpu_held(
    run_script, tmp_path, preset, seq_len, rows, kind, measured
):
    words = f"--preset {preset} --seq-len {seq_len} --micro-batch-size {rows}"
    words += f" --activation-checkpointing {kind} --precision bf16-mixed --world-size 1"
    folder = tmp_path / "run"
    ended = run_script(MEMORY, *words.split(), "--output-dir", folder, environ={})
    assert ended.codes == [0], ended.stderr
    predicted = results_of(folder)["metrics"]["predicted_peak_gib"] * 2**30
    assert predicted == pytest.approx(measured, rel=0.01)


# Models of your own, sharded by fsdp_from_scratch.py


class FrozenMLP(nn.Module):
    """A frozen layer, frozen weights next to trained ones, a scalar."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.adapted = nn.Sequential(
            nn.Linear(13, 13).requires_grad_(False), nn.Linear(13, 11)
        )
        self.last = nn.Linear(11, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        x = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        return self.last(self.adapted(x) * self.scale)


class Tied(nn.Module):
    """Units that share a weight, a unit used twice, one that no rank uses."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 7)
        self.twice = nn.Linear(7, 7)
        self.never = nn.Linear(7, 7)
        self.head = nn.Linear(7, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        tokens = (x[:, 0].abs() * 5).long().clamp(max=4)
        x = self.embedding(tokens).type_as(x)  # (B, 7)
        return self.head(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


class Nested(nn.Module):
    """A unit in a unit, one that is computed again, dictionaries and keywords."""

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(7, 7)
            self.outer = nn.Linear(7, 7)

        def forward(self, *, pair):
            first, second = pair
            return {"sum": (self.outer(torch.tanh(self.inner(first))), second)}

    def __init__(self):
        super().__init__()
        self.wrapped = self.Wrapped()
        self.inner = self.wrapped.inner
        self.again = nn.Sequential(nn.Linear(7, 7), nn.Tanh())
        self.head = nn.Linear(7, 5)

    def forward(self, x):
        first, second = self.wrapped(pair=(x, x))["sum"]
        x = checkpoint(self.again, first, use_reentrant=False)
        return self.head(x + second)


def shard_user_model(rank, world_size, kind, dtype):
    """Train two micro-batches sharded and on one process; return the worst error."""
    script = load_script(SCRATCH)
    torch.manual_seed(0)
    alone = kind()
    torch.manual_seed(0)
    sharded = script.Sharded(user_model := kind(), list(user_model.children()), dtype)
    names = {weight: name for name, weight in user_model.named_parameters()}
    groups = [[names[weight] for weight in unit.parameters] for unit in sharded.units]
    inputs = torch.randn(2, world_size, 6, 7)
    targets = torch.randint(5, (2, world_size, 6))
    for micro in range(2):
        for number in range(world_size):
            logits = alone(inputs[micro, number])
            loss = F.cross_entropy(logits, targets[micro, number])
            (loss / world_size).backward()
        logits = user_model(inputs[micro, rank])
        F.cross_entropy(logits.float(), targets[micro, rank]).backward()
    expected = dict(alone.named_parameters())
    errors = [0.0]
    for unit, group in zip(sharded.units, groups, strict=True):
        gradients = [expected[name].grad for name in group]
        assert unit.whole.untyped_storage().nbytes() == 0
        if unit.shard.grad is None:
            assert all(gradient is None for gradient in gradients)
        else:
            error = unit.shard.grad - script.part_of(script.flatten(gradients))
            errors.append(error.abs().max().item())
    return max(errors), len(errors)


@full
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", [FrozenMLP, Tied, Nested])
@pytest.mark.parametrize(("dtype", "most"), [(None, 1e-6), (torch.bfloat16, 0.02)])
def test_a_user_model_gets_the_gradient_of_one_process(
    on_ranks, world_size, kind, dtype, most
):
    for error, groups in on_ranks(shard_user_model, world_size, kind, dtype):
        assert error < most and groups > 2
