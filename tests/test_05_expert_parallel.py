"""Expert parallelism: the dense loop's loss, gradients, dropped tokens on any number of ranks."""

import pytest
import torch
import torch.distributed as dist
from conftest import assert_one_line, load_script, results_of

SCRIPT = "05-advanced/expert_parallel.py"
SMALL = ("--experts", 4, "--micro-batch-size", 2, "--seq-len", 16, "--layers", 1,
         "--max-steps", 2, "--parity-steps", 2)  # fmt: skip
FULL = pytest.mark.full
GRADIENT = "relative error of the gradient"


def checks_of(folder):
    return {check["name"]: check for check in results_of(folder)["checks"]}


# parity


@pytest.mark.parametrize(
    ("world_size", "argv"),
    [
        (2, ()),
        pytest.param(4, ("--ep", 2, "--layers", 2), marks=FULL),  # two replicas of each expert
        pytest.param(3, ("--experts", 6, "--top-k", 3), marks=FULL),
    ],
)
def test_experts_on_ranks_are_the_dense_loop(run_script, tmp_path, world_size, argv):
    """Tolerance 1e-5: float32 sums of at most 256 terms near 1, in another order."""
    folder = tmp_path / "run"
    ended = run_script(SCRIPT, *SMALL, *argv, "--output-dir", folder, world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    checks = checks_of(folder)
    assert all(check["ok"] for check in checks.values())
    for name in (*(f"{kind}: {GRADIENT}" for kind in ("routers", "experts", "the rest")),
                 "outputs: largest error", "loss: error", "none: choices dropped",
                 f"rank {world_size - 1}, block 0, backward of dispatch: bytes sent"):  # fmt: skip
        assert name in checks


def exchange_twice(rank: int, world_size: int):
    """Send rows to other ranks and back; return them, what they are after, and a gradient."""
    script = load_script(SCRIPT)
    sends = [1, 3] if rank == 0 else [2, 0]
    receives = [1, 2] if rank == 0 else [3, 0]
    rows = torch.arange(sum(sends) * 2.0).view(-1, 2) + 100 * rank
    rows.requires_grad_()
    arrived = script.AllToAll.apply(rows, sends, receives, dist.group.WORLD)
    (arrived * (rank + 1)).sum().backward()  # rank r weighs what it received by r + 1
    back = script.AllToAll.apply(arrived, receives, sends, dist.group.WORLD)
    return rows.tolist(), arrived.tolist(), back.tolist(), rows.grad[:, 0].tolist()


def test_rows_and_gradients_travel_to_the_right_rank(on_ranks):
    (sent0, arrived0, back0, gradient0), (sent1, arrived1, back1, gradient1) = on_ranks(
        exchange_twice, 2
    )
    assert arrived0 == sent0[:1] + sent1 and arrived1 == sent0[1:]
    assert back0 == sent0 and back1 == sent1
    assert gradient0 == [1, 2, 2, 2] and gradient1 == [1, 1]


def test_a_queue_is_cut_at_its_capacity_whoever_fills_it():
    script = load_script(SCRIPT)
    counts = torch.tensor([[3, 0, 9, 1], [2, 4, 9, 0], [5, 4, 9, 0]])  # (ranks, experts)
    kept = script.keep(counts, 6)
    assert kept.tolist() == [[3, 0, 6, 1], [2, 4, 0, 0], [1, 2, 0, 0]]


# sabotage


def drop_without_counting(script):
    """Take one choice more of an expert off the queue than it counts."""
    dropped = script.MoE.dropped
    script.MoE.dropped = lambda self: (dropped(self) - 1).clamp(min=0)


def take_own_fractions(script):
    """Let each rank balance its own tokens: the mean of products is not the product of means."""

    def auxiliary_loss(self):
        load = self.counts[dist.get_rank()]
        return len(load) * ((load / load.sum()) * self.probabilities.mean(0)).sum()

    script.MoE.auxiliary_loss = auxiliary_loss


def nudge_the_wrong_way(script):
    nudge = script.MoE.nudge_bias
    script.MoE.nudge_bias = lambda self, rate: nudge(self, -5 * rate)


def send_in_double_precision(script):
    apply = script.AllToAll.apply
    script.AllToAll.apply = lambda rows, *rest: apply(rows.double(), *rest).float()


ACCOUNT = "block 0: choices computed or counted as dropped"
SENT = "rank 0, block 0, dispatch: bytes sent"


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (drop_without_counting, {ACCOUNT, "none: choices dropped"}),
        (take_own_fractions, {f"routers: {GRADIENT}"}),
        pytest.param(send_in_double_precision, {SENT}, marks=FULL),
        pytest.param(nudge_the_wrong_way, {"bias: experts with a wrong count of them"}, marks=FULL),
    ],
)  # fmt: skip
def test_sabotage_of_the_experts_fails_a_check(run_script, tmp_path, sabotage, failing):
    folder = tmp_path / "run"
    argv = (*SMALL, "--output-dir", folder)
    ended = run_script(SCRIPT, *argv, world_size=2, before=sabotage)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    bad = {name for name, check in checks_of(folder).items() if not check["ok"]}
    assert failing <= bad, bad


# bad input


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--experts", 7), "--experts 7 must be a multiple of the 2 ranks of --ep"),
        *(pytest.param(*row, marks=FULL) for row in (
            (("--top-k", 9), "--top-k 9 must be at most --experts 8"),
            (("--ep", 3), "--ep 3 must divide the 2 ranks"),
        )),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(run_script, argv, says):
    assert_one_line(run_script(SCRIPT, *argv, world_size=2), says, "expert_parallel.py")
