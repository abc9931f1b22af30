"""legacy_common/lab/traffic.py: bytes sent by formula, what a rank holds, the same keys."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from legacy_common.lab.traffic import StepProbe, TrafficCounter
from legacy_common.measure import StepTimer

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


def test_bytes_sent_are_those_of_a_ring(on_ranks):
    ranks = 3
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


@pytest.mark.parametrize("autograd", [False, True])
def test_an_uneven_all_to_all_sends_what_leaves_the_rank(on_ranks, autograd):
    """Rank r has 2 + r rows of 4 bytes for rank 0 and 5 for rank 1."""

    def exchange(rank, ranks):
        sends, receives = [2 + rank, 5], [2, 3] if rank == 0 else [5, 5]
        rows, arrived = torch.ones(sum(sends), 1), torch.empty(sum(receives), 1)
        if autograd:
            send = functional.all_to_all_single_autograd
            return traffic_of(lambda: send(rows, receives, sends, dist.group.WORLD))
        return traffic_of(lambda: dist.all_to_all_single(arrived, rows, receives, sends))

    first, second = on_ranks(exchange, 2)
    assert first == {"all_to_all": (1, 4 * 5)} and second == {"all_to_all": (1, 4 * 3)}


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


def test_a_probe_says_what_a_step_sends_and_a_rank_holds(on_ranks):
    steps = 4
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
