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
EARLY = "model.parameters = list(model.parameters()).copy  # the optimizer came first\n"


@pytest.fixture
def first_step(run_script, tmp_path):
    """Run a script without a main on forked ranks, with one text in it changed."""

    def run(path, ranks, change=("import os", "import os"), codes=(0,)):
        def before(script):
            os.chdir(tmp_path)
            source = (REPO / path).read_text()
            assert change[0] in source
            code = compile(source.replace(*change), path, "exec")
            script.main = lambda: exec(code, {"__name__": "__main__"}) or 0

        ended = run_script(
            "01-ddp-basics/ddp_training.py", world_size=ranks, before=before
        )
        assert set(ended.codes) == set(codes), ended.stderr
        return ended.stdout + ended.stderr

    return run


@pytest.fixture
def losses_of(first_step):
    def run(*arguments):
        printed = first_step(*arguments)
        losses = torch.tensor([float(n) for n in re.findall(r"loss (\S+)", printed)])
        assert len(losses) == 5, printed
        return losses

    return run


def losses_on_the_page():
    """Return the losses that ddp_minimal.md shows for ddp_minimal.py."""
    text = (REPO / DDP).with_suffix(".md").read_text()
    return re.findall(r"^epoch .: loss (\S+)$", text, re.M)[-5:]


@pytest.mark.parametrize(
    ("path", "ranks"),
    [
        *((path, 2) for path in (DDP, FSDP, TENSOR)),
        *(pytest.param(DDP, ranks, marks=full) for ranks in (1, 4)),
        *(pytest.param(FSDP, ranks, marks=full) for ranks in (1, 4)),
        *(pytest.param(TENSOR, ranks, marks=full) for ranks in (1, 4)),
        pytest.param(PIPELINE, 2, marks=full),
        *(pytest.param(DEEPSPEED, ranks, marks=full) for ranks in (1, 2, 4)),
    ],
)
def test_the_losses_are_those_of_ddp_minimal(losses_of, path, ranks):
    """To the four digits that they print."""
    expected = torch.tensor(list(map(float, losses_on_the_page())))
    assert (losses_of(path, ranks) - expected).abs().max() < 2e-4


@pytest.mark.parametrize("path", [DDP, FSDP, pytest.param(DEEPSPEED, marks=full)])
def test_three_processes_are_refused(first_step, path):
    printed = first_step(path, 3, codes=(1,))
    assert "3 ranks cannot share 64 samples: start 1, 2, 4 or 8" in printed


def test_the_sharded_network_loads_its_checkpoint(first_step):
    """A fresh network that loads nothing has another loss."""
    line = r"trained network (\S+), loaded network (\S+)"
    trained, loaded = re.search(line, first_step(FSDP, 2)).groups()
    assert trained == loaded
    lost = re.search(
        line, first_step(FSDP, 2, ("dcp.load(state,", "(lambda *_, **__: 0)(state,"))
    )
    assert lost[1] == trained and float(lost[2]) > 2


@full
@pytest.mark.parametrize(
    ("path", "change"),
    [
        (DDP, ("model = DDP(model)", "model.__dict__['module'] = model")),
        (FSDP, ("fully_shard(model[0],", EARLY + "fully_shard(model[0],")),
        (TENSOR, ("dataset, num_replicas=1, rank=0,", "dataset,")),
        (
            PIPELINE,
            ("    sampler.set_epoch", "    if rank == 1:\n        sampler.set_epoch"),
        ),
    ],
)
def test_a_mistake_of_an_exercise_changes_the_losses(losses_of, path, change):
    expected = torch.tensor(list(map(float, losses_on_the_page())))
    assert (losses_of(path, 2, change) - expected).abs().max() > 1e-3


def test_the_front_page_counts_lines_and_shows_the_losses():
    front = (REPO / "README.md").read_text()
    rows = re.findall(r"^\| \[\w+\.py\]\((\S+)\.md\) \| (\d+) \|", front, re.M)
    assert len(rows) == 7
    for path, lines in rows:
        assert len((REPO / f"{path}.py").read_text().splitlines()) == int(lines), path
    assert " ".join(losses_on_the_page()) in front


def test_hello_ranks_adds_up_the_ranks(first_step):
    printed = first_step("01-ddp-basics/hello_ranks.py", 3)
    assert sorted(printed.splitlines()) == [
        f"rank {rank} of 3 (local rank {rank}): the sum is 3" for rank in range(3)
    ]


def test_hello_collectives_prints_the_results_of_their_definitions(first_step):
    printed = first_step("01-ddp-basics/hello_collectives.py", 2)
    results = re.findall(r"rank (\d): \[.*\] -> (\[.*\])", printed)
    for rank in range(2):
        afters = [after for number, after in results if int(number) == rank]
        transposed = [[1, 11], [2, 12]][rank]
        part = [[12], [14]][rank]
        expected = [[1, 2], [12, 14], [1, 2, 11, 12], part, transposed]
        assert sorted(afters) == sorted(map(str, expected))


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("05-advanced/context_minimal.py", ("dist.all_reduce(gradient)", "pass")),
        (
            "05-advanced/expert_minimal.py",
            ("output[order] = exchange", "output = exchange"),
        ),
    ],
)
def test_a_divided_sequence_and_experts_equal_one_process(first_step, path, change):
    def largest_error(*change):
        printed = first_step(path, 2, *change)
        return max(map(float, re.findall(r"(?:error|gradient) (\d\S*e\S\d+)", printed)))

    assert largest_error() < 1e-5
    assert largest_error(change) > 1e-2
