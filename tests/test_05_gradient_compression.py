"""Compressed gradients: each method equals one process that compresses, and sends its formula."""

import math

import pytest
import torch
import torch.distributed as dist
from conftest import REPO, assert_one_line, load_script, results_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from legacy_common.lab.proofs import flat

SCRIPT = "05-advanced/gradient_compression.py"
SMALL = ("--micro-batch-size", 8, "--max-steps", 4)
FULL = pytest.mark.full
ALONE, AS_DDP = "weights against one process", "weights against DDP"


def failed_checks(folder) -> set[str]:
    return {check["name"] for check in results_of(folder)["checks"] if not check["ok"]}


def send_at_once(script):
    script.slow_group = lambda rate: (None, "")


def leave_out_times(script):
    send_at_once(script)
    script.part.fastest_step_ms = lambda *_: 1.0


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=FULL)])
def test_methods_equal_one_process_and_send_their_formula(run_script, tmp_path, world_size):
    folder = tmp_path / "run"
    arguments = (*SMALL, "--output-dir", folder)
    ended = run_script(SCRIPT, *arguments, world_size=world_size, before=leave_out_times)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    assert not ended.stderr
    content = results_of(folder)
    assert len(content["checks"]) == 23 and all(check["ok"] for check in content["checks"])
    # An embedding 256 x 32, weights 256 x 512 and 256 x 256, two biases of 256.
    n = 256 * 32 + 256 * 512 + 256 * 256 + 2 * 256
    k = math.ceil(n / 100)
    low_rank = 2 * (256 + 32 + 256 + 512 + 256 + 256) + 2 * 256
    handed_over = {"float32": 4 * n, "float16": 2 * n, "bfloat16": 2 * n, "top-k": 8 * k,
                   "PowerSGD": 4 * low_rank}  # fmt: skip
    methods = content["metrics"]["methods"]
    assert {name: methods[name]["handed_over"] for name in handed_over} == handed_over
    assert methods["top-k"]["sent"] == (world_size - 1) * 8 * k
    ring = 2 * (world_size - 1) / world_size
    assert methods["PowerSGD"]["sent"] == pytest.approx(ring * 4 * low_rank)
    sent_by_rank = load_script(SCRIPT).part.sent_by_rank
    for other, ranks in (("float32", 100), ("bfloat16", 50)):  # as the page derives
        fewer, equal = (sent_by_rank(methods["top-k"], n) - sent_by_rank(methods[other], n)
                        for n in (ranks - 1, ranks))  # fmt: skip
        assert fewer < 0 <= equal
    page = (REPO / "05-advanced/gradient_compression.md").read_text()
    for name in ("float32", "bfloat16", "top-k", "PowerSGD"):
        sent = (f"{sent_by_rank(methods[name], ranks):,.0f}" for ranks in (2, 8, 64, 512))
        assert f"| {name} | {' | '.join(sent)} |" in page


# sabotage: one per kind of check


def drop_what_top_k_did_not_send(script):
    script.TopK.keep = lambda self, parameters, unsent: None


def forget_to_divide(script):
    average = script.average

    def add(tensors, group):
        average(tensors, group)
        for tensor in tensors:
            tensor *= dist.get_world_size(group)

    script.average = add


def send_indices_twice(script):
    gather = script.TopK.gather

    def twice(self, own):
        if not own.is_floating_point():
            gather(self, own)
        return gather(self, own)

    script.TopK.gather = twice


@pytest.mark.full
@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (drop_what_top_k_did_not_send, {f"top-k: {ALONE}"}),
        (forget_to_divide, {f"PowerSGD: {ALONE}", f"PowerSGD, no feedback: {ALONE}",
                            f"PowerSGD, full rank: {AS_DDP}"}),
        (send_indices_twice, {"top-k: bytes handed over", "top-k, no feedback: bytes handed over"}),
    ],
)  # fmt: skip
def test_sabotage_of_compression_fails_a_check(run_script, tmp_path, sabotage, failing):
    folder = tmp_path / "run"

    def before(script):
        leave_out_times(script)
        sabotage(script)

    arguments = (*SMALL, "--output-dir", folder)
    ended = run_script(SCRIPT, *arguments, world_size=2, before=before)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    assert failed_checks(folder) == failing


# bad input


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--powersgd-rank", 257), "--powersgd-rank 257: no weight has it: the largest is "
                                   "256, of a weight 256 x 512"),
        (("--link", "fast"), "--link: must be like 100mbit or 1gbit, not 'fast'"),
        (("--top-k-fraction", 1.5), "--top-k-fraction 1.5 must be at most 1"),
    ],
)  # fmt: skip
def test_compression_refuses_bad_input(run_script, argv, says):
    ended = run_script(SCRIPT, *argv, world_size=2)
    assert_one_line(ended, says, "gradient_compression.py")


# what the page says


class LastFirst(nn.Module):
    """Uses its layers in the reverse of the order in which it has them."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.early = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.late(self.early(x))


def rebuilt_buckets(rank: int, world_size: int, bucket_mb: float) -> tuple[list, float]:
    """Return each step's buckets of parameters; how far sent and unsent are from the gradients."""
    script = load_script(SCRIPT)
    torch.manual_seed(0)
    model = LastFirst()
    names = {p: name for name, p in model.named_parameters()}
    method = script.TopK(list(model.parameters()), 0.1, None)
    orders, received = [[]], {p: torch.zeros_like(p) for p in model.parameters()}

    def hook(state, bucket):
        orders[-1].append([names[p] for p in bucket.parameters()])
        orders.extend([[]] if bucket.is_last() else [])
        return method.hook(state, bucket)

    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    ddp.register_comm_hook(None, hook)
    for _ in range(3):
        model.zero_grad()
        ddp(torch.ones(1, 4)).sum().backward()
        for p in received:
            received[p] += p.grad
    model.zero_grad()
    model(torch.ones(1, 4)).sum().backward()  # all ranks have this gradient
    errors = [(received[p].flatten() + method.unsent[p] - 3 * p.grad.flatten()).abs().max()
              for p in received]  # fmt: skip
    return orders, max(errors).item()


@pytest.mark.parametrize("bucket_mb", [25, 1e-4])
def test_what_is_unsent_survives_that_ddp_deals_parameters_anew(on_ranks, bucket_mb):
    for orders, error in on_ranks(rebuilt_buckets, 2, bucket_mb):
        assert orders[0] != orders[1] == orders[2]
        assert (len(orders[1]) > 1) == (bucket_mb < 1)
        assert error < 1e-5, "what was sent and what is unsent are the sum of all gradients"


def beside_pytorch(rank: int, world_size: int) -> tuple[float, int, int]:
    """Train four steps with PyTorch's PowerSGD and with ours, with one bucket and the same first Q.

    Return the error of a weight, relative to the farthest that one has moved; bytes, and ours.
    """
    script = load_script(SCRIPT)
    part, models = script.part, []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(part.next_byte())
    own, model = models
    start = flat(model.parameters())
    generator = torch.Generator().manual_seed(rank)

    def draw(*shape):
        return torch.randint(256, shape, generator=generator)

    batches = [[draw(8, 16), draw(8)] for _ in range(4)]
    state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1)
    bucket_order = []

    def hook(state, bucket):
        bucket_order[:] = bucket.parameters()
        return powerSGD_hook.powerSGD_hook(state, bucket)

    ddp = DistributedDataParallel(model, bucket_cap_mb=1000)  # gloo aborts with several buckets
    ddp.register_comm_hook(state, hook)
    for _ in range(2):  # it compresses from the third backward on: DDP rebuilds buckets before
        part.loss_of(ddp, batches[0]).backward()
    hooked = script.PowerSGD(list(own.parameters()), 2, None)
    pairs = zip(model.parameters(), own.parameters(), strict=True)
    first_q = {p: hooked.q[q] for p, q in pairs if q in hooked.q}
    matrices = [p for p in bucket_order if p in first_q]  # no two have one shape: kept as they come
    state.q_memory_dict[0] = flat(first_q[p] for p in matrices)
    state.p_memory_dict[0] = torch.empty(sum(len(p) * first_q[p].shape[1] for p in matrices))
    part.train(ddp, torch.optim.SGD(model.parameters(), lr=1.0), batches)
    ours = script.data_parallel(own, lambda parameters, group: hooked)
    part.train(ours, torch.optim.SGD(own.parameters(), lr=1.0), batches)

    expected = flat(model.parameters())
    error = (flat(own.parameters()) - expected).abs().max() / (expected - start).abs().max()
    method = script.methods_of(0.01, 2)["PowerSGD"]
    handed_over = part.handed_over(method, list(own.parameters()))
    return error.item(), 4 * state.compression_stats()[2] // len(batches), handed_over


def test_power_sgd_is_the_one_of_pytorch(on_ranks):
    for error, sent, handed_over in on_ranks(beside_pytorch, 2):
        assert error < 1e-5 and sent == handed_over


def test_float16_of_a_sum_overflows_where_the_mean_does_not():
    share = torch.tensor([60_000.0])
    assert (share.half() + share.half()).isinf()
    assert ((share / 2).half() + (share / 2).half()).item() == 60_000
