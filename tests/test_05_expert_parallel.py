"""Expert parallelism: the dense loop's loss, gradients, dropped tokens on any number of ranks."""

import pytest
import torch
import torch.distributed as dist
from conftest import GPUS, REPO, assert_one_line, load_script, results_of, run_command

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
        pytest.param(4, ("--ep", 1), marks=FULL),  # data parallelism alone
        pytest.param(3, ("--experts", 6, "--top-k", 3), marks=FULL),
        pytest.param(2, ("--top-k", 1), marks=FULL),
        pytest.param(2, ("--top-k", 4), marks=FULL),  # all experts: nothing is left to choose
        pytest.param(2, ("--capacity-factor", 0.01), marks=FULL),  # a token for each expert
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


@FULL
def test_the_same_tokens_are_dropped_on_any_number_of_ranks(run_script, tmp_path):
    metrics = []
    for world_size, size in ((1, 4), (2, 2), (4, 1)):  # one global batch of 4 sequences
        folder = tmp_path / f"run-{world_size}"
        argv = (*SMALL, "--micro-batch-size", size, "--output-dir", folder)
        ended = run_script(SCRIPT, *argv, world_size=world_size)
        assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
        found = results_of(folder)["metrics"]
        metrics.append({name: found[name] for name in found if "dropped" in name})
    assert metrics[0] == metrics[1] == metrics[2]
    assert metrics[0]["none: dropped"] > 0


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


def count_only_ones_own_drops(script):
    script.MoE.dropped = lambda self: (self.counts - self.kept)[0]


def drop_without_counting(script):
    """Take one choice more of an expert off the queue than it counts."""
    dropped = script.MoE.dropped
    script.MoE.dropped = lambda self: (dropped(self) - 1).clamp(min=0)


def let_every_rank_fill_its_own_queue(script):
    def keep(counts, capacity):
        return counts.clamp(max=capacity // len(counts))

    script.keep = keep


def send_no_gradient_back(script):
    script.AllToAll.backward = staticmethod(
        lambda ctx, gradient: (
            (gradient.new_zeros(sum(ctx.way_back[1]), gradient.shape[1]),) + (None,) * 3
        )
    )


def add_up_different_experts(script):
    """DDP around the whole model would: rank 0's first expert is not rank 1's."""
    original = script.backward

    def backward(model, *rest):
        loss = original(model, *rest)
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                dist.all_reduce(parameter.grad)
        return loss

    script.backward = backward


def forget_the_number_of_ranks(script):
    """Average the rest, as DDP does, but leave experts with the sum over all ranks."""
    original = script.backward

    def backward(model, *rest):
        loss = original(model, *rest)
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.grad *= dist.get_world_size()
        return loss

    script.backward = backward


def forget_to_sum_the_rest(script):
    original = script.backward

    def backward(model, *rest):
        all_reduce, dist.all_reduce = dist.all_reduce, lambda *args, **kwargs: None
        loss = original(model, *rest)
        dist.all_reduce = all_reduce
        return loss

    script.backward = backward


def take_own_fractions(script):
    """Let each rank balance its own tokens: the mean of products is not the product of means."""

    def auxiliary_loss(self):
        load = self.counts[dist.get_rank()]
        return len(load) * ((load / load.sum()) * self.probabilities.mean(0)).sum()

    script.MoE.auxiliary_loss = auxiliary_loss


def weigh_by_biased_scores(script):
    def choose(self, tokens):
        probabilities = torch.softmax(self.router(tokens), dim=-1)
        weights, experts = (probabilities + self.bias).topk(self.top_k)
        return probabilities, experts, weights / weights.sum(1, keepdim=True)

    script.MoE.choose = choose


def nudge_the_wrong_way(script):
    nudge = script.MoE.nudge_bias
    script.MoE.nudge_bias = lambda self, rate: nudge(self, -5 * rate)


def send_in_double_precision(script):
    apply = script.AllToAll.apply
    script.AllToAll.apply = lambda rows, *rest: apply(rows.double(), *rest).float()


def send_twice(script):
    apply = script.AllToAll.apply

    def twice(rows, *rest):
        apply(rows.detach(), *rest)
        return apply(rows, *rest)

    script.AllToAll.apply = twice


def send_by_all_gather(script):
    """Send a row of each rank to all others, beside the exchange."""
    exchange = script.MoE.exchange

    def gather_too(self, rows):
        whole = rows.new_empty(dist.get_world_size(), rows.shape[1])
        dist.all_gather_into_tensor(whole, rows.detach()[:1].contiguous())
        return exchange(self, rows)

    script.MoE.exchange = gather_too


ROUTERS, OWN_EXPERTS, REST = (f"{kind}: {GRADIENT}" for kind in ("routers", "experts", "the rest"))
ACCOUNT = "block 0: choices computed or counted as dropped"
SENT = "rank 0, block 0, dispatch: bytes sent"


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (drop_without_counting, {ACCOUNT, "none: choices dropped"}),
        (take_own_fractions, {ROUTERS}),
        (send_in_double_precision, {SENT}),
        pytest.param(send_by_all_gather, {"other collectives"}, marks=FULL),
        (nudge_the_wrong_way, {"bias: experts with a wrong count of them"}),
        pytest.param(count_only_ones_own_drops, {ACCOUNT, "none: choices dropped"}, marks=FULL),
        pytest.param(let_every_rank_fill_its_own_queue,
                     {"outputs: largest error", OWN_EXPERTS, "none: choices dropped"}, marks=FULL),
        pytest.param(send_no_gradient_back, {OWN_EXPERTS, REST}, marks=FULL),
        pytest.param(add_up_different_experts, {OWN_EXPERTS}, marks=FULL),
        pytest.param(forget_the_number_of_ranks, {OWN_EXPERTS}, marks=FULL),
        pytest.param(forget_to_sum_the_rest, {ROUTERS, REST, "loss: error"}, marks=FULL),
        pytest.param(weigh_by_biased_scores, {"outputs: largest error", "loss: error"}, marks=FULL),
        pytest.param(send_twice, {"all-to-alls per step"}, marks=FULL),
    ],
)  # fmt: skip
def test_sabotage_of_the_experts_fails_a_check(run_script, tmp_path, sabotage, failing):
    folder = tmp_path / "run"
    argv = (*SMALL, "--output-dir", folder)
    ended = run_script(SCRIPT, *argv, world_size=2, before=sabotage)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    bad = {name for name, check in checks_of(folder).items() if not check["ok"]}
    assert failing <= bad, bad
    if sabotage in (add_up_different_experts, forget_the_number_of_ranks):
        assert REST not in bad and "loss: error" not in bad
    if sabotage is take_own_fractions:
        assert OWN_EXPERTS not in bad and "outputs: largest error" not in bad


@FULL
def test_balancing_that_does_nothing_is_no_balancing(run_script, tmp_path):
    def leave_the_bias(script):
        script.MoE.nudge_bias = lambda self, rate: None

    folder = tmp_path / "run"
    argv = (*SMALL, "--parity-steps", 0, "--max-steps", 40, "--output-dir", folder)
    ended = run_script(SCRIPT, *argv, world_size=2, before=leave_the_bias)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    bad = {name: check for name, check in checks_of(folder).items() if not check["ok"]}
    (name,) = bad
    assert name == "ways with less max/mean load than none" and bad[name]["measured"] <= 1


# bad input


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--experts", 7), "--experts 7 must be a multiple of the 2 ranks of --ep"),
        *(pytest.param(*row, marks=FULL) for row in (
            (("--top-k", 9), "--top-k 9 must be at most --experts 8"),
            (("--ep", 3), "--ep 3 must divide the 2 ranks"),
            (("--seq-len", 257), "--seq-len must be at most 256"),
            (("--capacity-factor", 0), "--capacity-factor: must be a number above 0"),
        )),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(run_script, argv, says):
    assert_one_line(run_script(SCRIPT, *argv, world_size=2), says, "expert_parallel.py")


@FULL
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_experts_run_on_a_gpu():
    command = ["python", SCRIPT, "--device", "cuda", "--max-steps", "3"]
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert " cuda with nccl" in ended.stdout
