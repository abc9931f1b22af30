"""FSDP from scratch: fully_shard's losses and traffic, and one process's gradient for any model."""

import pytest
import torch
import torch.nn.functional as F
from conftest import GPUS, REPO, assert_one_line, load_script, results_of, run_command
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_parts import fsdp_from_scratch as part
from legacy_common import models
from legacy_common.lab import traffic

SCRATCH = "02-fsdp/fsdp_from_scratch.py"


NARROW = models.TransformerConfig(256, 32, 2, 4, 2, 88, 256)
SMALL = ("--seq-len", 32, "--micro-batch-size", 2, "--max-steps", 3)
FULL = pytest.mark.full
DTYPES = (None, torch.bfloat16)


def narrow(script):
    models.PRESETS["tiny"] = NARROW


# the script


@pytest.mark.full
def test_fsdp_from_scratch_is_fully_shard(run_script, tmp_path):
    folder = tmp_path / "run"
    ended = run_script(SCRATCH, *SMALL, "--output-dir", folder, world_size=2, before=narrow)
    assert ended.codes == [0, 0] and not ended.stderr, ended.stdout + ended.stderr
    assert len(results_of(folder)["checks"]) == 37
    gathers = 2 * (2 * NARROW.num_layers + 1)  # in two micro-batches
    for precision in ("32-true", "bf16-mixed"):
        ours, theirs = (
            line.removeprefix(f"{precision} {way}").split()
            for way in ("from scratch", "fully_shard")
            for line in ended.stdout.splitlines()
            if line.startswith(f"{precision} {way}  ")
        )
        assert ours[3] == str(gathers)
        assert ours == theirs, ended.stdout


def every_layer_is_a_unit(script):
    narrow(script)
    script.modules_of = lambda model: [model.embedding, *model.blocks, model.norm, model.head]


@pytest.mark.gpu_ready
@FULL
def test_a_unit_sends_12_bytes_per_weight_in_float32_and_8_in_bf16(run_script, tmp_path):
    """Two all-gathers and a reduce-scatter per micro-batch: 4 + 4 + 4 and 2 + 2 + 4 bytes."""
    folder = tmp_path / "run"
    arguments = (*SMALL, "--max-steps", 1, "--grad-accum-steps", 3)
    ended = run_script(SCRATCH, *arguments, "--output-dir", folder,
                       world_size=2, before=every_layer_is_a_unit)  # fmt: skip
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    metrics = results_of(folder)["metrics"]
    for precision, sent in (("32-true", 12), ("bf16-mixed", 8)):  # in units of (N-1)/N
        measured = metrics[f"sent_per_weight_{precision} from scratch"]
        assert measured == pytest.approx(sent * 3)


def keep_own_gradient(script):
    script.reduce_scatter_single = lambda own, whole: own.copy_(part.part_of(whole))


def keep_a_third_moment(script):
    made = torch.optim.AdamW

    def with_maximum(weights, **options):
        units = NARROW.num_layers + 1  # one weight each: its shard
        return made(weights, amsgrad=len(weights) == units, **options)

    torch.optim.AdamW = with_maximum


def never_free(script):
    script.Unit.free = lambda self: None


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (keep_own_gradient,
         {"collectives", "bytes sent", "error of a loss", "error of a weight",
          "relative error of the gradient"}),
        pytest.param(never_free,
         {"collectives", "bytes sent", "most bytes whole at once", "error of a loss",
          "error of a weight"}, marks=FULL),
        pytest.param(keep_a_third_moment, {"bytes held"}, marks=FULL),
    ],
)  # fmt: skip
def test_sabotage_of_fsdp_from_scratch_fails_a_check(run_script, tmp_path, sabotage, failing):
    def before(script):
        narrow(script)
        sabotage(script)

    folder = tmp_path / "run"
    ended = run_script(SCRATCH, *SMALL, "--output-dir", folder, world_size=2, before=before)
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    failed = {c["name"].rpartition(": ")[2] for c in results_of(folder)["checks"] if not c["ok"]}
    assert failed == failing


def test_fsdp_from_scratch_refuses_a_text_that_is_too_short(run_script):
    ended = run_script(SCRATCH, "--micro-batch-size", 10**6, world_size=2)
    assert_one_line(ended, "fewer than one sequence", "fsdp_from_scratch.py")


@FULL
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_fsdp_from_scratch_runs_on_a_gpu():
    command = ["python", SCRATCH, "--device", "cuda"]
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert " cuda with nccl" in ended.stdout


# models of one's own


class FrozenMLP(nn.Module):
    """A frozen layer in the middle, frozen weights beside trained ones, a scalar, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.adapted = nn.Sequential(nn.Linear(13, 13).requires_grad_(False), nn.Linear(13, 11))
        self.last = nn.Linear(11, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.rand(13))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) + self.shift.type_as(x)
        return self.last(self.adapted(torch.tanh(self.frozen(x))) * self.scale)

    def units(self) -> list[nn.Module]:
        return [self.first, self.frozen, self.adapted, self.last]


class Tied(nn.Module):
    """Units that share a weight, a unit that is used twice, one that some steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 7)
        self.twice = nn.Linear(7, 7)
        self.rare = nn.Linear(7, 7)
        self.never = nn.Linear(7, 7)
        self.head = nn.Linear(7, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with_rare = bool(x[0, 0] > 0)
        x = self.embedding((x[:, 0].abs() * 5).long().clamp(max=4)).type_as(x)  # (B, 7)
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        if with_rare:
            x = x + self.rare(x)
        return self.head(x)

    def units(self) -> list[nn.Module]:
        return [self.embedding, self.twice, self.rare, self.never, self.head]


class Conv(nn.Module):
    """Channels last, kernels that no number of ranks divides, a unit that is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.body = nn.Sequential(nn.GroupNorm(1, 5), nn.Conv2d(5, 3, 3), nn.ReLU(inplace=True))
        self.head = nn.Linear(3 * 5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x[:, None, :, None].expand(-1, -1, -1, 7))  # (B, 5, 7, 7)
        x = checkpoint(self.body, x, use_reentrant=False)  # (B, 3, 5, 5)
        return self.head(x.sum(dim=3).flatten(1))

    def units(self) -> list[nn.Module]:
        return [self.conv, self.body, self.head]


class Structured(nn.Module):
    """Units that take keywords and return dicts of tuples; not all that they return is used."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(7, 7))

        def forward(self, *, pair: tuple) -> dict:
            a, b = pair
            return {
                "next": (torch.tanh(a @ self.weight), b + a),
                "size": self.weight.square().sum(),
            }

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Part() for _ in range(3))
        self.head = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pair = (x, x)
        size = 0
        for layer in self.parts:
            out = layer(pair=pair)
            pair = out["next"]
            size = size + out["size"]
        return self.head(pair[0] + pair[1]) + 0.01 * size

    def units(self) -> list[nn.Module]:
        return list(self.parts)


KINDS = (FrozenMLP, Tied, Conv, Structured)


def loss_of(model: nn.Module, rank: int, step: int, micro: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    x = torch.randn(6, 7, generator=draw)
    x[0, 0] = 1.0 if step else -1.0  # Tied leaves `rare` out in the first step, on all ranks
    targets = torch.randint(5, (6,), generator=draw)
    return F.cross_entropy(model(x).float(), targets)


def built(kind: type) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def own_model(rank: int, world_size: int, kind: type, dtype, accumulated: int) -> tuple:
    """Train three steps beside one process; return the errors, what was sent and what is due."""
    script = load_script(SCRATCH)
    alone, model = built(kind), built(kind)
    names = {p: n for n, p in model.named_parameters()}
    sharded = script.Sharded(model, model.units(), dtype)
    optimizers = [torch.optim.SGD(weights, lr=0.3) for weights in (sharded.shards(),
                                                                   alone.parameters())]  # fmt: skip
    errors = []
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with traffic.TrafficCounter() as counter:
            for micro in range(accumulated):
                (loss_of(model, rank, step, micro) / accumulated).backward()
        for number in range(world_size):
            for micro in range(accumulated):
                (loss_of(alone, number, step, micro) / accumulated / world_size).backward()
        expected = dict(alone.named_parameters())
        for unit in sharded.units:
            grad = unit.shard.grad
            if grad is None:
                assert all(expected[names[p]].grad is None for p in unit.parameters)
                continue
            for p, whole in zip(unit.parameters, part.assemble(unit, grad), strict=True):
                right = expected[names[p]].grad
                error = (whole - right).abs().max() / right.abs().max().clamp(min=1)
                errors.append(error.item())
            assert all(p.grad is None and p.numel() == 0 for p in unit.parameters)
        for optimizer in optimizers:
            optimizer.step()
    state = part.whole_state(sharded)
    plain = built(kind)
    assert state.keys() == plain.state_dict().keys()
    assert all(value.dtype == plain.state_dict()[name].dtype for name, value in state.items())
    plain.load_state_dict(state)
    weights = [torch.cat([w.flatten() for w in m.state_dict().values()]) for m in (plain, alone)]
    errors.append((weights[0] - weights[1]).abs().max().item())
    return errors, counter.nbytes, [(u.parameters[0].requires_grad, u.shard.numel())
                                   for u in sharded.units]  # fmt: skip


def own_models(rank: int, world_size: int, accumulated: int, dtypes: tuple) -> dict:
    return {(kind.__name__, dtype): own_model(rank, world_size, kind, dtype, accumulated)
            for kind in KINDS for dtype in dtypes}  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "accumulated", "dtypes"),
    [(2, 1, DTYPES), pytest.param(3, 2, DTYPES, marks=FULL)],
)
def test_a_model_of_ones_own_gets_the_gradient_of_one_process(
    on_ranks, world_size, accumulated, dtypes
):
    """Tolerance: float32 sums of some 300 terms in another order; bf16 keeps 8 bits."""
    for ended in on_ranks(own_models, world_size, accumulated, dtypes):
        for (name, dtype), (errors, *_) in ended.items():
            assert max(errors) < (0.1 if dtype else 1e-5), (name, dtype, errors)


@FULL
def test_frozen_weights_are_gathered_but_not_reduced(on_ranks):
    """An MLP with trained, frozen and mixed units: a group of weights for each kind in a unit."""
    for _, sent, groups in on_ranks(own_model, 2, FrozenMLP, None, 1):
        trained = sum(size for is_trained, size in groups if is_trained)
        # first, adapted[1], last and the scalar; frozen and adapted[0]; each rounded up to 2.
        assert 2 * trained == 104 + 154 + 60 + 2
        frozen = sum(size for is_trained, size in groups if not is_trained)
        assert 2 * frozen == 2 * 182
        width = 4
        scale = 1
        # Of the whole tensors: two ranks' parts.
        assert sent["all_gather"] == 2 * width * (2 * (trained + frozen) - scale)
        assert sent["reduce_scatter"] == 2 * 4 * trained


def shards_of(rank: int, world_size: int) -> list:
    """Return which rank holds how much of a tied model, and of what its optimizer is given."""
    script = load_script(SCRATCH)
    model = built(Tied)
    sharded = script.Sharded(model, model.units())
    return [unit.shard.numel() for unit in sharded.units], len(sharded.shards())


def test_a_weight_that_units_share_is_sharded_once(on_ranks):
    # twice, rare, never: 56 each; the embedding is the rest, and no unit is left of the head.
    assert on_ranks(shards_of, 2) == [([28, 28, 28, 18], 4)] * 2


def evaluate(rank: int, world_size: int) -> tuple:
    script = load_script(SCRATCH)
    plain, model, other = built(FrozenMLP), built(FrozenMLP), FrozenMLP()
    sharded = script.Sharded(model, model.units())
    x = torch.randn(4, 7)
    with torch.no_grad():
        right = plain(x)
        differences = [(model(x) - right).abs().max().item()]
        held = sum(unit.whole.untyped_storage().nbytes() for unit in sharded.units)
        # Loaded into weights drawn otherwise, and trained with two forwards before a backward.
        other = script.Sharded(other, other.units())
        part.load_whole_state(other, part.whole_state(sharded))
        differences.append((other.model(x) - right).abs().max().item())
    (model(x).sum() + model(2 * x).sum()).backward()
    (plain(x).sum() + plain(2 * x).sum()).backward()
    whole = part.assemble(sharded.units[0], sharded.units[0].shard.grad)
    differences.append((whole[0] - plain.first.weight.grad).abs().max().item())
    return differences, held


@FULL
def test_evaluation_frees_all_units_and_whole_weights_load(on_ranks):
    for rank, (differences, held) in enumerate(on_ranks(evaluate, 2)):
        assert held == 0
        assert max(differences[:2]) == 0
        assert differences[2] < 1e-5 or rank  # both ranks draw the same x: the mean is its own
