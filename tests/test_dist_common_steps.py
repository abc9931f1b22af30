"""dist_common/steps.py: bytes sent by formula, what a rank holds, the same keys everywhere."""

import contextlib
import json
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from helpers_03 import SMALL_MODEL, deepspeed_in_the_parent
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dist_common import cli, models
from dist_common.measure import StepTimer
from dist_common.steps import StepProbe, TrafficCounter

SIZE = 24  # numbers of 4 bytes, which 2, 3 and 4 ranks can share
WHOLE = 4 * SIZE
full = pytest.mark.full


def traffic_of(action):
    with TrafficCounter() as counter:
        action()
    return counter.by_kind()


def count_everything(rank, ranks):
    """Call each collective once; return what was counted, by its name."""
    whole, part = torch.ones(SIZE), torch.ones(SIZE // ranks)
    parts = list(torch.ones(ranks, SIZE // ranks))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    mesh = init_device_mesh("cpu", (ranks,))
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    alone = [dist.new_group([other]) for other in range(ranks)]  # all ranks make all groups
    peer = (rank + 1) % ranks, (rank - 1) % ranks

    def pass_on():
        works = [
            dist.P2POp(dist.isend, whole, peer[0]),
            dist.P2POp(dist.irecv, part.new_ones(SIZE), peer[1]),
        ]
        for work in dist.batch_isend_irecv(works):
            work.wait()

    return {
        "all_reduce": traffic_of(lambda: dist.all_reduce(whole)),
        "all_gather": traffic_of(lambda: gather(whole, part)),
        "all_gather, a list": traffic_of(lambda: dist.all_gather(parts, part)),
        "reduce_scatter": traffic_of(lambda: scatter(part, whole)),
        "broadcast": traffic_of(lambda: dist.broadcast(whole, 0)),
        "send": traffic_of(pass_on),
        "DTensor": traffic_of(lambda: sharded.redistribute(mesh, [Replicate()])),
        "alone": traffic_of(lambda: dist.all_reduce(whole, group=alone[rank])),
        "barrier": traffic_of(dist.barrier),
    }


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=full)])
def test_bytes_sent_are_those_of_a_ring(on_ranks, ranks):
    for counted in on_ranks(count_everything, ranks):
        share = round(WHOLE * (ranks - 1) / ranks)
        assert counted == {
            "all_reduce": {"all_reduce": (1, 2 * share)},
            "all_gather": {"all_gather": (1, share)},
            "all_gather, a list": {"all_gather": (1, share)},
            "reduce_scatter": {"reduce_scatter": (1, share)},
            "broadcast": {"broadcast": (1, share)},
            "send": {"send": (1, WHOLE)},
            "DTensor": {"all_gather": (1, share)},
            "alone": {},
            "barrier": {},
        }


def steps_of_ddp(rank, ranks, steps):
    """Train with plain DDP under a probe; return its metrics and the bytes of the weights."""
    device = torch.device("cpu")
    probe, timer = StepProbe(device), StepTimer(device, warmup=1)
    model = torch.nn.Linear(SIZE, 10)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    probe.attach(model, optimizer)
    timer.start()
    for _ in probe.watch(range(steps)):
        optimizer.zero_grad()
        ddp(torch.ones(2, SIZE)).sum().backward()
        optimizer.step()
        timer.lap(1)
    return probe.metrics(timer), sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("steps", [1, 4])
def test_a_probe_says_what_a_step_sends_and_a_rank_holds(on_ranks, steps):
    for metrics, weights in on_ranks(steps_of_ddp, 2, steps):
        assert metrics["bytes_sent_per_step"] >= weights  # 2 (N - 1) / N of the gradients
        assert metrics["collectives_per_step"]["all-reduce"]["bytes_sent"] == weights
        held = {kind: gib * 2**30 for kind, gib in metrics["memory_gib"].items()}
        assert held["weights"] == held["gradients"] == weights
        assert held["optimizer"] == pytest.approx(2 * weights, abs=16)  # and the steps' counters
        assert held["before"] > 0
        assert len(metrics["step_times_ms"]) == steps
        peaks, parts = metrics["peak_memory_gib_per_rank"], metrics["memory_gib_per_rank"]
        assert len(peaks) == len(parts) == 2 and metrics["peak_memory_gib"] == max(peaks)
        assert metrics["memory_gib"] == parts[peaks.index(max(peaks))]


def test_a_loop_that_stops_early_leaves_no_counter_behind(on_ranks):
    def stop(rank, ranks):
        probe = StepProbe(torch.device("cpu"))
        for step in probe.watch(range(5)):
            if step == 1:
                break
        dist.all_reduce(torch.ones(1))
        return len(probe.traffic.collectives)

    assert on_ranks(stop, 2) == [0, 0]


def test_due():
    assert [step for step in range(1, 8) if cli.due(step, 3, last=step == 7)] == [3, 6, 7]
    assert not any(cli.due(step, 0, last=step == 7) for step in range(1, 8))


TEMPLATES = [
    ("01-ddp-basics/ddp_training.py", ("--eval-every", 0)),
    ("02-fsdp/fsdp_transformer.py", ()),
    ("05-advanced/hybrid_parallelism.py", ()),
    pytest.param(
        "03-deepspeed/deepspeed_train.py",
        ("--eval-every", 0),
        marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed"),
    ),
]
KEYS = {
    "final_loss", "step_time_ms", "step_times_ms", "tokens_per_second", "tokens_per_step", "mfu",
    "cpu_time_per_step_ms", "memory_gib", "memory_gib_per_rank", "peak_memory_gib",
    "peak_memory_gib_per_rank", "collectives_per_step", "bytes_sent_per_step",
}  # fmt: skip


@pytest.mark.parametrize(("script", "argv"), TEMPLATES)
def test_every_template_leaves_the_same_metrics_and_no_checkpoint(
    run_script, tmp_path, script, argv
):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(97, 123)) * 120)
    folder = tmp_path / "out"

    def small(script):
        models.PRESETS["tiny"] = SMALL_MODEL

    with deepspeed_in_the_parent() if script.startswith("03") else contextlib.nullcontext():
        ended = run_script(
            script, "--seq-len", 32, "--micro-batch-size", 4, "--max-steps", 4, "--log-every", 1,
            "--save-every", 0, "--parity-steps", 0, "--text-file", text, "--output-dir", folder,
            *argv, world_size=2, before=small,
        )  # fmt: skip
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    metrics = json.loads((folder / "results.json").read_text())["metrics"]
    assert set(metrics) >= KEYS, KEYS - set(metrics)
    assert len(metrics["step_times_ms"]) == 4 and metrics["tokens_per_step"] == 2 * 4 * 32
    assert set(metrics["memory_gib"]) == {"before", "weights", "gradients", "optimizer"}
    gradient = 4 * SMALL_MODEL.num_parameters()  # float32
    # 2 (N - 1) / N of it, and half as much again where weights are gathered twice (module 02).
    expected = 1.5 * gradient if script.startswith("02") else gradient
    assert metrics["bytes_sent_per_step"] == pytest.approx(expected, rel=0.1)
    assert not (folder / "checkpoints").exists() or not any((folder / "checkpoints").iterdir())


def test_gradients_in_two_bytes_halve_what_is_sent(run_script, tmp_path):
    sent = {}
    for kind in ("none", "bf16"):
        folder = tmp_path / kind
        ended = run_script(
            TEMPLATES[0][0], "--gradient-compression", kind, "--seq-len", 32, "--max-steps", 3,
            "--save-every", 0, "--eval-every", 0, "--micro-batch-size", 2, "--output-dir", folder,
            world_size=2, before=lambda _: models.PRESETS.update(tiny=SMALL_MODEL),
        )  # fmt: skip
        assert ended.codes == [0, 0], ended.stdout + ended.stderr  # its gradient check passed
        sent[kind] = json.loads((folder / "results.json").read_text())["metrics"]
    ratio = sent["bf16"]["bytes_sent_per_step"] / sent["none"]["bytes_sent_per_step"]
    assert ratio == pytest.approx(0.5, abs=0.01)
    assert sent["bf16"]["final_loss"] == pytest.approx(sent["none"]["final_loss"], abs=2e-2)
    assert sent["bf16"]["final_loss"] != sent["none"]["final_loss"]
