"""A pipeline of ranks: every schedule gives the loss and gradient of one process."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining
from conftest import assert_one_line, load_script, results_of

from pipeline_schedules import Instruction

SCRIPT = "05-advanced/pipeline_parallel.py"
# --sleep-ms 0: no test reads a clock
SMALL = ("--micro-batch-size", 1, "--seq-len", 8, "--sleep-ms", 0)
FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("world_size", "layers", "m"),
    [
        (2, 4, 4),
        pytest.param(3, 6, 3, marks=FULL),
    ],
)
def test_each_schedule_gives_the_loss_and_gradient_of_one_process(
    run_script, tmp_path, world_size, layers, m
):
    folder = tmp_path / "run"
    sizes = ("--num-layers", layers, "-m", m)
    ended = run_script(SCRIPT, *SMALL, *sizes, "--output-dir", folder, world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    content = results_of(folder)
    # Five schedules with seven checks each; four of them done by PyTorch too, with two.
    assert len(content["checks"]) == 43 and all(check["ok"] for check in content["checks"])
    for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)):
        boundaries = world_size * v - 1 if world_size > 1 else 0
        message = 1 * 8 * 128 * 4  # B x T x D x 4 bytes
        assert content["metrics"][name]["bytes_sent"] == 2 * boundaries * m * message
    assert content["metrics"]["1f1b"]["kept"] == [min(m, world_size - r) for r in range(world_size)]
    assert (folder / "pipeline.png").exists()


@FULL
def test_fewer_micro_batches_than_stages(run_script):
    """It works; PyTorch's 1F1B is left out, since it refuses them."""
    arguments = (*SMALL, "--num-layers", 3, "-m", 2, "--schedule", "1f1b")
    ended = run_script(SCRIPT, *arguments, world_size=3)
    assert ended.codes == [0] * 3, ended.stdout + ended.stderr
    assert "OK: 7 checks passed" in ended.stdout


# sabotage


def forget_the_mean_over_micro_batches(script):
    one = script.loss_of
    original = script.run_ours

    def patched(*args):
        script.loss_of = lambda logits, targets: 4 * one(logits, targets)
        try:
            return original(*args)
        finally:
            script.loss_of = one

    script.run_ours = patched


def send_everything_twice(script):
    """One more message each way at the end of a step."""
    finish = script.Mail.finish

    def twice(self):
        finish(self)
        extra = torch.zeros(self.shape)
        work = dist.isend(extra, 1 - self.rank, self.channels[self.rank, 1 - self.rank])
        dist.irecv(
            torch.zeros(self.shape), 1 - self.rank, self.channels[1 - self.rank, self.rank]
        ).wait()
        work.wait()

    script.Mail.finish = twice


def send_with_the_graph(script):
    """As if F returned `out` instead of `out.detach()`."""
    forward = script.Stage.forward

    def undetached(stage, x):
        out = forward(stage, x)
        out.detach = lambda: out
        return out

    script.Stage.forward = undetached


def swap_backwards(script):
    """The last stage does F1 before B0: no rule is broken, nothing deadlocks."""
    build = script.build

    def swapped(*args):
        schedule = build(*args)
        last = schedule[-1]
        one = last.index(Instruction("B", len(schedule) - 1, 0))
        two = last.index(Instruction("F", len(schedule) - 1, 1))
        last[one], last[two] = last[two], last[one]
        return schedule

    script.build = swapped


@pytest.mark.parametrize(
    ("sabotage", "schedule", "failing"),
    [
        (forget_the_mean_over_micro_batches, "gpipe", {"loss error", "gradient error"}),
        (send_everything_twice, "1f1b", {"bytes sent"}),
        # Another order, but the same gradient: loss, gradient and bytes stay right.
        (swap_backwards, "1f1b", {"bubble of the recorded order", "stage inputs kept at most"}),
        pytest.param(send_with_the_graph, "1f1b", {"sent results that hold a graph"}, marks=FULL),
    ],
)  # fmt: skip
def test_sabotage_of_the_pipeline_fails_a_check(run_script, tmp_path, sabotage, schedule, failing):
    folder = tmp_path / "run"
    arguments = (*SMALL, "--num-layers", 4, "-m", 4, "--schedule", schedule)
    arguments = (*arguments, "--output-dir", folder)
    ended = run_script(SCRIPT, *arguments, world_size=2, before=sabotage)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    bad = {check["name"] for check in results_of(folder)["checks"] if not check["ok"]}
    assert bad == {f"{schedule}: {name}" for name in failing}  # PyTorch's are left alone


# what the page says


def both_directions(rank: int, world_size: int) -> list[float]:
    """Send ten large messages each way before receiving one."""
    channels = load_script(SCRIPT).open_channels(world_size)
    other = 1 - rank
    sends = [
        dist.isend(torch.full((300_000,), float(n)), other, channels[rank, other])
        for n in range(10)
    ]
    received = []
    for _ in range(10):
        buffer = torch.empty(300_000)
        dist.irecv(buffer, other, channels[other, rank]).wait()
        received.append(buffer[0].item())
    for work in sends:
        work.wait()
    return received


def test_a_channel_keeps_its_order_whatever_the_other_one_does(on_ranks):
    assert on_ranks(both_directions, 2) == [[float(n) for n in range(10)]] * 2


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    [
        (3, ("--num-layers", 8, "--schedule", "1f1b"), "--num-layers 8 is no multiple of 3 stages"),
        pytest.param(2, ("--num-layers", 6),
                     "is no multiple of 4 stages (2 ranks x 2 virtual stages)", marks=FULL),
        pytest.param(2, ("-m", 3), "interleaved: 3 micro-batches must be a multiple of 2 ranks",
                     marks=FULL),
        pytest.param(3, ("-m", 2, "--num-layers", 6, "--schedule", "zb-h1"),
                     "zb-h1: 2 micro-batches are fewer than 3 stages", marks=FULL),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(run_script, world_size, argv, says):
    ended = run_script(SCRIPT, *argv, world_size=world_size)
    assert_one_line(ended, says, "pipeline_parallel.py")
