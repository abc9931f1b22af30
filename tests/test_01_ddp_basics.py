"""Module 01: sabotage fails a check, other world sizes and seeds, your own model."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import GPUS, REPO, load_script, results_of, run_command
from matplotlib import image
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dist_common import model

MNIST = "01-ddp-basics/ddp_mnist.py"
SCRATCH = "01-ddp-basics/ddp_from_scratch.py"
BENCHMARK = "01-ddp-basics/ddp_benchmark.py"
FIGURES = "01-ddp-basics/figures.py"
full = pytest.mark.full
# Small flags of each script.
SMALL = {
    MNIST: "--epochs 1",
    SCRATCH: "--max-steps 1 --micro-batch-size 1",
    BENCHMARK: "--rounds 1 --global-batch-size 12",
}


# Sabotage


def leave_bucket(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def skip_all_reduce(script):
    """Let DDP keep each rank's own gradients."""

    class Unreduced(DistributedDataParallel):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.register_comm_hook(None, leave_bucket)

    script.DDP = Unreduced


def deal_the_same_samples_to_all(script):
    sampler = script.DistributedSampler
    script.DistributedSampler = lambda *args, **kwargs: sampler(
        *args, num_replicas=1, rank=0, **kwargs
    )


def let_weights_drift(script):
    """Change the last bits of rank 1's weights, which no loss shows."""
    train = script.train_one_epoch

    def train_and_drift(ddp_model, *args):
        losses = train(ddp_model, *args)
        with torch.no_grad():
            next(ddp_model.parameters()).add_(1e-7 * dist.get_rank())
        return losses

    script.train_one_epoch = train_and_drift


def repeat_test_samples(script):
    """Deal the test set as DistributedSampler does, which repeats samples."""
    evaluate = script.evaluate

    def evaluate_repeated(model, test_set, device):
        arange = torch.arange
        # The place after the last one is rank 0's; rank 1 has sample 1 too.
        torch.arange = lambda size: torch.cat((arange(size), torch.tensor([1])))
        try:
            return evaluate(model, test_set, device)
        finally:
            torch.arange = arange

    script.evaluate = evaluate_repeated


def start_with_different_weights(script):
    script.start_equal = lambda model: None


def send_twice(script):
    start = script.start_sum

    def start_two_sums(tensor, group=None):
        start(tensor.clone(), group).wait()
        return start(tensor, group)

    script.start_sum = start_two_sums


def start_after_backward(script):
    script.Overlapped.note = lambda self, parameter, index: None


FIRST = "relative error of the first gradient"
EARLY = "3-overlapped: all-reduces before the last gradient"
GRADIENT = "gradient: largest relative error"
BYTES = "bytes sent: largest difference from a ring"
REPLICAS = "distinct sets of weights over all ranks"
COUNTED = "test samples counted exactly once"
SABOTAGE = [
    (MNIST, skip_all_reduce, {FIRST, REPLICAS}),
    (MNIST, deal_the_same_samples_to_all, {FIRST}),
    pytest.param(MNIST, let_weights_drift, {REPLICAS}, marks=full),
    pytest.param(MNIST, repeat_test_samples, {COUNTED}, marks=full),
    pytest.param(SCRATCH, start_with_different_weights, {GRADIENT}, marks=full),
    pytest.param(SCRATCH, send_twice, {BYTES}, marks=full),
    pytest.param(SCRATCH, start_after_backward, {EARLY}, marks=full),
    (BENCHMARK, skip_all_reduce, {"world size 2: relative error of the gradient"}),
]


@pytest.mark.parametrize(("script", "change", "failing"), SABOTAGE)
def test_sabotage_fails_a_check(run_script, tmp_path, script, change, failing):
    words = (*SMALL[script].split(), "--output-dir", tmp_path / "run")
    ended = run_script(script, *words, world_size=2, before=change)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    checks = results_of(tmp_path / "run")["checks"]
    assert {check["name"] for check in checks if not check["ok"]} == failing


# Other world sizes, seeds and flags


RUNS = [
    (MNIST, 3, "--micro-batch-size 7 --seed 3"),
    pytest.param(SCRATCH, 3, "--bucket-cap-mb 0.1", marks=full),
    pytest.param(BENCHMARK, 3, "--seed 3", marks=full),
    pytest.param(
        BENCHMARK, 2, "--model resnet50 --global-batch-size 2 --seed 3", marks=full
    ),
    pytest.param(BENCHMARK, 1, "--max-ranks 2", marks=full),
]


@pytest.mark.parametrize(("script", "ranks", "flags"), RUNS)
def test_a_run_passes(run_script, script, ranks, flags):
    # One rank of the benchmark is a plain python process, which starts the others.
    environ = {} if script == BENCHMARK and ranks == 1 else None
    words = (*SMALL[script].split(), *flags.split())
    ended = run_script(script, *words, world_size=ranks, environ=environ)
    assert not any(ended.codes), ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("OK: ")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=full)])
def test_losses_are_those_of_one_process(run_script, tmp_path, ranks):
    """Float32 sums in another order differ near 1e-7; 22 steps enlarge that."""
    losses = []
    for world_size in (1, ranks):
        folder = tmp_path / str(world_size)
        words = ("--epochs", 1, "--micro-batch-size", 64 // world_size)
        words += ("--output-dir", folder)
        ended = run_script(MNIST, *words, world_size=world_size)
        assert not any(ended.codes), ended.stderr
        losses.append(results_of(folder)["metrics"]["losses"])
        assert image.imread(folder / "training.png").std() > 0.1
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[0][-1] < 0.9 * losses[0][0]


@pytest.mark.parametrize(
    ("script", "flags", "says"),
    [
        (MNIST, "--micro-batch-size 1000", "2 ranks is more than the 1437 training"),
        (SCRATCH, "--link-mbit fast", "must be a number above 0, not 'fast'"),
        (BENCHMARK, "--global-batch-size 3", "is not a multiple of 2 ranks"),
        (FIGURES, "--run runs/nothing", "there is no results.json"),
    ],
)
def test_wrong_usage_gets_one_line(run_script, script, flags, says):
    ended = run_script(script, *flags.split(), world_size=2)
    (line,) = ended.stderr.splitlines()
    assert says in line and 2 in ended.codes, ended.stderr


# Pictures


@full
def test_a_timeline_shows_every_all_reduce(run_script, tmp_path):
    folder = tmp_path / "run"
    words = (*SMALL[SCRATCH].split(), "--link-mbit", 2000, "--output-dir", folder)
    ended = run_script(SCRATCH, *words, world_size=2)
    assert ended.codes == [0, 0], ended.stderr
    timeline = results_of(folder)["metrics"]["timeline"]
    for way, expected in (("1-each", 39), ("3-overlapped", 6), ("4-DDP", 6)):
        names = [name for name, _, _ in timeline[way]]
        assert names.count("link:all_reduce") == expected, way
    events = json.loads((folder / "4-DDP-rank1.json").read_text())["traceEvents"]
    assert any(event["name"] == "gloo:all_reduce" for event in events)
    assert run_script(FIGURES, "--run", folder, environ={}).codes == [0]
    assert image.imread(folder / "timeline.png").std() > 0.1


def test_a_step_is_the_sum_of_ideal_and_losses():
    split_step = load_script(BENCHMARK).split_step
    alone = {"step": 101.0, "slowest": 100.0, "mean": 100.0}
    measured = {"step": 80.0, "slowest": 70.0, "mean": 65.0}
    parts = split_step("strong", 2, measured, alone)
    assert list(parts.values()) == [50.0, 15.0, 5.0, 10.0]
    assert split_step("weak", 2, measured, alone)["ideal"] == 100.0


# A model of your own


class Awkward(nn.Module):
    """Frozen and shared weights, buffers, channels last, weights that a rank skips."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.rare = nn.Linear(16, 16)
        self.conv = nn.Conv2d(16, 16, 1).to(memory_format=torch.channels_last)
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(16))
        self.register_buffer("shift", torch.randint(100, ()))

    def forward(self, tokens, rare):
        x = self.frozen(self.embedding(tokens)) * self.scale + 0.01 * self.shift
        if rare:
            x = x + self.rare(x)
        x = torch.tanh(self.conv(x[:, :, None, None]).flatten(1))  # (B, D)
        return self.head(x)


def loss_of(model, rank, step):
    """Return a rank's loss; only the last rank uses the rare weights, from step 1."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens, targets = torch.randint(10, (2, 8), generator=generator)
    rare = step > 0 and rank == dist.get_world_size() - 1
    return F.cross_entropy(model(tokens, rare), targets)


def train_awkward(rank, world_size, way):
    """Take three steps; return the distance of the weights from one process's."""
    script = load_script(SCRATCH)
    torch.manual_seed(0)
    alone = Awkward()
    torch.manual_seed(rank)  # different weights and buffers on each rank
    model = Awkward()
    if way == "overlapped":
        average = script.wrap(model, 1500).wait
    else:
        script.start_equal(model)

        def average():
            if way == "each":
                script.average_each(model, script.start_sum)
            else:
                script.average_in_buckets(model, 1500, script.start_sum)

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, alone)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        average()
        for number in range(world_size):
            (loss_of(alone, number, step) / world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
    pairs = zip(model.state_dict().values(), alone.state_dict().values(), strict=True)
    return max((ours - expected).abs().max().item() for ours, expected in pairs)


@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        ("overlapped", 3),
        pytest.param("each", 2, marks=full),
        pytest.param("buckets", 2, marks=full),
    ],
)
def test_any_model_trains_as_one_process(on_ranks, way, ranks):
    """Tolerance: float32 sums of at most 3 x 8 terms near 1, in another order."""
    assert max(on_ranks(train_awkward, ranks, way)) < 1e-5


def backward_twice(rank, world_size):
    model = nn.Linear(4, 4)
    overlap = load_script(SCRATCH).wrap(model)
    model(torch.ones(1, 4)).sum().backward()
    try:
        model(torch.ones(1, 4)).sum().backward()
    except RuntimeError as error:
        overlap.wait()
        return str(error)
    return "no error"


def test_a_second_backward_without_wait_is_refused(on_ranks):
    """It would send the first gradient and lose the second one."""
    said = on_ranks(backward_twice, 2)
    assert said == ["a second backward: call wait() after each one"] * 2


# Statements of ddp_from_scratch.md about PyTorch's DDP


def bytes_of_buckets(rank, world_size):
    sizes_by_option = []
    for options in ({}, {"bucket_cap_mb": 25}):
        transformer = model.build_transformer(model.PRESETS["tiny"], 0, "cpu")
        ddp_model = DistributedDataParallel(transformer, **options)
        sizes = []

        def note_size(
            sizes, bucket: dist.GradBucket
        ) -> torch.futures.Future[torch.Tensor]:
            sizes.append(bucket.buffer().nbytes)
            return leave_bucket(None, bucket)

        ddp_model.register_comm_hook(sizes, note_size)
        for _ in range(2):  # DDP settles its buckets in the first step
            sizes.clear()
            ddp_model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
        sizes_by_option.append(sizes)
    return sizes_by_option


@full
def test_only_the_default_has_a_small_first_bucket(on_ranks):
    default, explicit = on_ranks(bytes_of_buckets, 2)[0]
    assert len(default) == 2 and 2**20 <= default[0] < default[1]
    assert explicit == [sum(default)]


@full
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
@pytest.mark.parametrize("script", SMALL)
def test_a_lesson_runs_on_a_gpu(script):
    command = ["python", script, *SMALL[script].split(), "--device", "cuda"]
    command += ["--max-ranks", "1"] if script == BENCHMARK else []
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert " cuda with " in ended.stdout
