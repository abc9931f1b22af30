"""DDP from scratch: each step gives the gradient of one process, for any model."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import GPUS, REPO, load_script, results_of, run_command
from helpers_04 import first_is_quick
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SCRATCH = "01-ddp-basics/ddp_from_scratch.py"
SMALL = ("--micro-batch-size", 2, "--seq-len", 32, "--max-steps", 1)
full = pytest.mark.full
EARLY = "3 buckets, overlapped: all-reduces begun before the last gradient"

# the script


def test_each_step_towards_ddp_gives_the_gradient_of_one_process(run_script, tmp_path):
    ended = run_script(SCRATCH, *SMALL, "--output-dir", tmp_path / "run", world_size=2)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    content = results_of(tmp_path / "run")
    assert len(content["checks"]) == 13 and all(check["ok"] for check in content["checks"])
    # 39 weights: an embedding, 9 in each of 4 blocks, a norm and a head.
    assert content["metrics"]["collectives_1"] == 39
    assert content["metrics"]["collectives_2"] == content["metrics"]["collectives_3"] < 10


def skip_start_equal(script):
    script.start_equal = lambda model: None


def start_after_backward(script):
    """Give the right gradient, but by all-reduces that no longer overlap with backward."""
    script.Overlapped.note = lambda self, parameter, index: None


def send_twice(script):
    once = script.start_sum

    def twice(tensor, group):
        once(tensor.clone(), group).wait()
        return once(tensor, group)

    script.start_sum = twice


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (skip_start_equal, {f"{way}: gradient error" for way in
                            ("1 each gradient", "2 buckets", "3 buckets, overlapped")}),
        (send_twice, {"1 each gradient: bytes handed over", "2 buckets: bytes sent"}),
        (start_after_backward, {EARLY}),
    ],
)  # fmt: skip
def test_sabotage_of_a_step_towards_ddp_fails_a_check(run_script, tmp_path, sabotage, failing):
    folder = tmp_path / "run"
    ended = run_script(SCRATCH, *SMALL, "--output-dir", folder, world_size=2, before=sabotage)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    bad = {check["name"] for check in results_of(folder)["checks"] if not check["ok"]}
    assert failing <= bad and not any(name.startswith("4 ") for name in bad)
    if failing == {EARLY}:
        assert bad == failing, "its gradient and its bytes are right"


@full
def test_an_emulated_link_changes_no_result(run_script, tmp_path):
    folder = tmp_path / "run"
    ended = run_script(SCRATCH, *SMALL, "--link", "200mbit", "--output-dir", folder, world_size=2)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    metrics = results_of(folder)["metrics"]
    assert metrics["sending_ms"] == pytest.approx(803_968 * 4 * 8 / 200e6 * 1e3)


@pytest.mark.parametrize(
    ("argv", "says"),
    first_is_quick([
        (("--link", "fast"), "--link: must be like 100mbit or 1gbit, not 'fast'"),
        (("--micro-batch-size", 10**6), "fewer than one sequence"),
    ]),
)  # fmt: skip
def test_from_scratch_refuses_bad_input(run_script, argv, says):
    ended = run_script(SCRATCH, *argv, world_size=2)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("ddp_from_scratch.py: error: ") and says in line and 2 in ended.codes


@full
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_from_scratch_runs_on_a_gpu():
    command = ["python", SCRATCH, "--device", "cuda"]
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert " cuda with nccl" in ended.stdout


# a model of one's own


class Awkward(nn.Module):
    """Frozen and shared weights, buffers, channels last, a branch for some ranks, one for none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.rare = nn.Linear(16, 16)
        self.unused = nn.Linear(16, 16)
        self.conv = nn.Conv2d(16, 16, 1).to(memory_format=torch.channels_last)
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(16))
        self.register_buffer("shift", torch.randint(100, ()))  # of another type, and no dimension

    def forward(self, tokens: torch.Tensor, rare: bool) -> torch.Tensor:
        x = self.frozen(self.embedding(tokens)) * self.scale + 0.01 * self.shift  # (B, D)
        if rare:
            x = x + self.rare(x)
        x = torch.tanh(self.conv(x[:, :, None, None]).flatten(1))
        return self.head(x)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The loss of a rank in a step; the last rank alone uses the rare branch, from step 1 on."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    tokens, targets = torch.randint(10, (2, 8), generator=draw)
    rare = step > 0 and rank == dist.get_world_size() - 1
    return F.cross_entropy(model(tokens, rare), targets)


def train(script, rank: int, world_size: int, way: str, sabotage=lambda script: None):
    """Take three steps; return gradients and weights beside one process's, and what was sent."""
    sabotage(script)
    sent = []

    def noted(tensor):
        sent.append(tensor.numel())
        return script.start_sum(tensor)

    torch.manual_seed(0)
    alone = Awkward()
    torch.manual_seed(rank)  # other weights and buffers on each rank
    model = Awkward()
    average = {
        "each": lambda: script.average_each(model, noted),
        "buckets": lambda: script.average_in_buckets(model, 1500, noted),
    }
    if way == "overlapped":
        after_backward = script.wrap(model, 1500, noted).wait
    else:
        script.start_equal(model)
        after_backward = average[way]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, alone)]
    pairs = []
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        after_backward()
        for number in range(world_size):
            (loss_of(alone, number, step) / world_size).backward()
        gradients = [
            torch.cat([
                (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                for p in m.parameters() if p.requires_grad
            ])
            for m in (model, alone)
        ]  # fmt: skip
        pairs.append(gradients)
        for optimizer in optimizers:
            optimizer.step()
    assert model.frozen.weight.grad is None
    weights = [torch.cat([w.float().flatten() for w in m.state_dict().values()])
               for m in (model, alone)]  # fmt: skip
    return pairs, weights, sent


def own_model(rank: int, world_size: int, way: str, sabotage=lambda script: None):
    return train(load_script(SCRATCH), rank, world_size, way, sabotage)


@pytest.mark.parametrize(
    ("way", "world_size"), [("each", 2), ("buckets", 2), pytest.param("overlapped", 3, marks=full)]
)
def test_a_model_of_ones_own_gets_the_gradient_of_one_process(on_ranks, way, world_size):
    """Frozen and tied weights, buffers, a branch of one rank, other weights at the start.

    Tolerance: float32 sums of at most 3 x 8 terms near 1, in another order.
    """
    ended = on_ranks(own_model, world_size, way)
    for pairs, weights, sent in ended:
        for averaged, expected in pairs:
            assert torch.allclose(averaged, expected, rtol=0, atol=1e-6)
        assert torch.allclose(*weights, rtol=0, atol=1e-5)
        assert sent == ended[0][2], "all ranks call the same collectives, in the same order"
        # Shared weights once, frozen ones never: 160, 2 x (256 + 16), 256 + 16; in three steps.
        assert sum(sent) == 3 * (160 + 2 * 272 + 272)
    assert pairs[1][1].abs().sum() > 0


def backward_twice(rank: int, world_size: int) -> str:
    script = load_script(SCRATCH)
    model = nn.Linear(4, 4)
    overlap = script.wrap(model)
    model(torch.ones(1, 4)).sum().backward()
    try:
        model(torch.ones(1, 4)).sum().backward()
    except RuntimeError as error:
        overlap.wait()
        return str(error)
    return "no error"


def test_a_second_backward_without_wait_is_refused(on_ranks):
    """It would send the first gradient and lose the second one."""
    assert on_ranks(backward_twice, 2) == ["a second backward: call wait() after each one"] * 2


def test_buckets_of_any_size():
    script = load_script(SCRATCH)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))  # 256 bytes each
    sizes = {cap: [len(bucket) for bucket in script.buckets_of(model, cap)]
             for cap in (0, 256, 257, 10**6)}  # fmt: skip
    assert sizes == {0: [1] * 5, 256: [1] * 5, 257: [2, 2, 1], 10**6: [5]}
    assert script.buckets_of(model, 256)[0] == [model[-1].weight]
    assert script.buckets_of(nn.Module(), 256) == []


# what the page says of PyTorch's DDP


def buffers_after_forward(rank: int, world_size: int) -> tuple[float, float]:
    """Return a buffer after DDP's construction, and after a forward that found it changed."""
    model = nn.Linear(2, 2)
    model.register_buffer("seen", torch.tensor(float(rank)))
    ddp = DistributedDataParallel(model)
    constructed = model.seen.item()
    model.seen += rank
    ddp(torch.ones(1, 2))
    return constructed, model.seen.item()


def test_ddp_sends_rank_0s_buffers_at_the_start_and_in_each_forward(on_ranks):
    assert on_ranks(buffers_after_forward, 2) == [(0.0, 0.0)] * 2
