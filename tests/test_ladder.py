"""The ladder: first steps in plain PyTorch, the same five losses by every strategy.

They have no main: forks run their source, which a test may change in one place.
"""

import os
import re

import pytest
import torch
from conftest import REPO

full = pytest.mark.full
DDP = "01-ddp-basics/ddp_minimal.py"
FSDP = "02-fsdp/fsdp_minimal.py"
DEEPSPEED = "03-deepspeed/deepspeed_minimal.py"
TENSOR = "05-advanced/tensor_minimal.py"
PIPELINE = "05-advanced/pipeline_minimal.py"
SAVED = {DDP: "digits.pt", FSDP: "digits_fsdp/.metadata", DEEPSPEED: "digits_deepspeed/latest"}
EARLY = "model.parameters = list(model.parameters()).copy  # as if the optimizer came first\n"


def first_step(run_script, path, ranks, tmp_path, change=("", "")):
    """Run a script without a main on forked ranks, with one text in it changed."""

    def before(script):
        os.chdir(tmp_path)
        source = (REPO / path).read_text()
        assert change[0] in source
        source = source.replace(*change) if change[0] else source
        script.main = lambda: exec(compile(source, path, "exec"), {"__name__": "__main__"}) or 0

    ended = run_script("01-ddp-basics/ddp_mnist.py", world_size=ranks, before=before)
    assert not any(ended.codes), ended.stderr
    return ended.stdout


def losses_of(*run) -> torch.Tensor:
    losses = torch.tensor(list(map(float, re.findall(r"loss (\S+)", first_step(*run)))))
    assert len(losses) == 5
    return losses


@pytest.fixture(scope="module")
def known() -> dict:
    """What ddp_minimal.py's losses are on so many processes, for the tests after the first."""
    return {}


@pytest.fixture
def of_ddp(run_script, tmp_path, known):
    def losses(ranks: int) -> torch.Tensor:
        if ranks not in known:
            known[ranks] = losses_of(run_script, DDP, ranks, tmp_path)
        return known[ranks]

    return losses


@pytest.mark.parametrize(
    ("path", "ranks"),
    [
        *((path, 2) for path in (DDP, FSDP, TENSOR)),
        pytest.param(PIPELINE, 2, marks=full),
        pytest.param(DEEPSPEED, 2, marks=full),
        pytest.param(FSDP, 3, marks=full),
    ],
)
def test_the_losses_are_those_of_ddp_minimal_on_one_process(
    run_script, tmp_path, of_ddp, path, ranks
):
    """To the four digits that it prints; three processes take 63 samples, as DDP's three do."""
    alone = of_ddp(3 if ranks == 3 else 1)
    together = losses_of(run_script, path, ranks, tmp_path)
    assert alone[-1] < 0.2 * alone[0]
    assert (together - alone).abs().max() < 2e-4
    assert (tmp_path / SAVED.get(path, "")).exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("path", "change"),
    [
        (DDP, ("model = DDP(model)", "model.__dict__['module'] = model")),
        (FSDP, ("fully_shard(model[0],", EARLY + "fully_shard(model[0],")),
        (TENSOR, ("dataset, num_replicas=1, rank=0,", "dataset,")),
        (PIPELINE, ("    sampler.set_epoch", "    if rank == 1:\n        sampler.set_epoch")),
    ],
)
def test_what_an_exercise_breaks_changes_the_losses(run_script, tmp_path, of_ddp, path, change):
    alone = of_ddp(1)
    apart = losses_of(run_script, path, 2, tmp_path, change)
    assert (apart - alone).abs().max() > 1e-3


def test_the_front_page_counts_lines_and_shows_the_losses():
    front, ddp = (REPO / "README.md").read_text(), (REPO / DDP).with_suffix(".md").read_text()
    rows = re.findall(r"^\| \[\w+\.py\]\((\S+)\.md\) \| (\d+) \|", front, re.M)
    assert len(rows) == 7
    for path, lines in rows:
        assert len((REPO / f"{path}.py").read_text().splitlines()) == int(lines), path
    assert " ".join(re.findall(r"^epoch .: loss (\S+)$", ddp, re.M)[-5:]) in front


def test_hello_ranks_adds_up_the_ranks(run_script, tmp_path):
    printed = first_step(run_script, "01-ddp-basics/hello_ranks.py", 3, tmp_path)
    assert sorted(printed.splitlines()) == [
        f"rank {rank} of 3 (local rank {rank}): the sum is 3" for rank in range(3)
    ]


def test_hello_collectives_leaves_what_their_definitions_say(run_script, tmp_path):
    ranks = 2
    printed = first_step(run_script, "01-ddp-basics/hello_collectives.py", ranks, tmp_path)
    found = re.findall(r"rank (\d): \[.*\] -> (\[.*\])", printed)
    every = 10 * torch.arange(ranks)[:, None] + torch.arange(1, ranks + 1)  # [rank, place]
    total = every.sum(0).tolist()
    for rank in range(ranks):
        afters = [after for number, after in found if int(number) == rank]
        collectives = [every[0], every.flatten(), every[:, rank]]
        expected = [c.tolist() for c in collectives] + [total, [total[rank]]]
        assert sorted(afters) == sorted(map(str, expected))


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("05-advanced/context_minimal.py", ("dist.all_reduce(gradient)", "pass")),
        ("05-advanced/expert_minimal.py", ("output[order] = exchange", "output = exchange")),
    ],
)
def test_a_cut_sequence_and_experts_equal_one_process(run_script, tmp_path, path, change):
    def largest_error(*change):
        printed = first_step(run_script, path, 2, tmp_path, *change)
        return max(map(float, re.findall(r"(?:error|gradient) (\d\S*e\S\d+)", printed)))

    assert largest_error() < 1e-5
    assert largest_error(change) > 1e-2
