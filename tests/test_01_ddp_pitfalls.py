"""Each pitfall has the symptom that its page names, and the cure cures it."""

import pytest
import torch
import torch.distributed as dist
from conftest import load_script

PITFALLS = "01-ddp-basics/ddp_pitfalls.py"
SYMPTOMS = {
    "hang-at-a-step": "rank 0: lost contact with another rank (Timed out)",
    "unused-parameters": "Expected to have finished reduction in the prior iteration",
    "bypassed-wrapper": "FAILED: distinct sets of weights over all ranks",
    "losses-differ": "FAILED: distinct losses",
    "forgotten-set-epoch": "FAILED: distinct orders in 3 epochs",
    "batch-norm": "FAILED: gradient: relative error against one process",
    "out-of-memory": "rank 1: RuntimeError: ",
    "slow-input": "FAILED: of 20 batches, begun only when they were asked for",
}


@pytest.mark.parametrize("pitfall", [
    pytest.param(name, marks=[pytest.mark.full] * (name == "hang-at-a-step")) for name in SYMPTOMS
])  # fmt: skip
def test_a_pitfall_has_its_symptom(run_script, pitfall):
    timeout_s = 3 if pitfall == "hang-at-a-step" else 60
    ended = run_script(PITFALLS, pitfall, "--timeout", timeout_s, world_size=2)
    assert 1 in ended.codes and SYMPTOMS[pitfall] in ended.stdout + ended.stderr


@pytest.mark.full
@pytest.mark.parametrize("pitfall", SYMPTOMS)
def test_the_cure_cures(run_script, pitfall):
    cured = run_script(PITFALLS, pitfall, "--cured", world_size=2)
    assert cured.codes == [0, 0], cured.stdout + cured.stderr


def test_one_rank_is_not_enough_and_it_says_so(run_script):
    ended = run_script(PITFALLS, "batch-norm", environ={})
    (line,) = ended.stderr.splitlines()
    assert ended.codes == [2]
    assert line == (
        "ddp_pitfalls.py: error: needs 2 ranks: start it with torchrun --nproc-per-node=2"
    )


# what the page says of other cures


def allocate_after_a_barrier(rank: int, world_size: int) -> str:
    """Return what a rank says that runs into a limit right after all have met."""
    script = load_script(PITFALLS)
    if rank == 1:
        script.leave_only(100 * script.MIB, torch.device("cpu"))
    dist.barrier()
    try:
        return f"{torch.empty(200 * script.MIB, dtype=torch.uint8).nbytes} bytes"
    except RuntimeError as error:
        return str(error)


def test_a_barrier_does_not_cure_an_out_of_memory(on_ranks):
    rich, poor = on_ranks(allocate_after_a_barrier, 2)
    assert rich.endswith("bytes") and "allocate memory" in poor
