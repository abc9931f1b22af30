"""dist_common: ranks and devices, data, model, checkpoints' parts, checks, results."""

import argparse
import hashlib
import os
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import results_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

from dist_common import check, cli, data, model, runtime, train
from dist_common.report import Check, Report

CPU = torch.device("cpu")

# Ranks and devices

LAUNCHES = [
    ({}, ("python", 0, 0, 1, 1)),
    (
        {
            "RANK": 5,
            "LOCAL_RANK": 1,
            "WORLD_SIZE": 8,
            "LOCAL_WORLD_SIZE": 4,
            "MASTER_ADDR": "node0",
            "TORCHELASTIC_RUN_ID": "x",
        },
        ("torchrun", 5, 1, 8, 4),
    ),
    (
        {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_SIZE": 2},
        ("deepspeed", 1, 1, 2, 2),
    ),
    (
        {
            "SLURM_PROCID": 3,
            "SLURM_LOCALID": 1,
            "SLURM_NTASKS": 4,
            "SLURM_STEP_ID": 0,
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            "SLURM_STEP_NODELIST": "gpu[07-08]",
            "SLURM_JOB_ID": 77,
        },
        ("srun", 3, 1, 4, 2),
    ),
    ({"SLURM_PROCID": 0, "SLURM_NTASKS": 4}, ("python", 0, 0, 1, 1)),
    (
        {
            "OMPI_COMM_WORLD_RANK": 1,
            "OMPI_COMM_WORLD_LOCAL_RANK": 1,
            "OMPI_COMM_WORLD_SIZE": 2,
            "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
        },
        ("mpirun", 1, 1, 2, 2),
    ),
]


@pytest.fixture
def environ(monkeypatch):
    """Set a launcher's variables, and remove what find_ranks exports."""
    names = (*runtime.TORCHRUN, "MASTER_ADDR", "MASTER_PORT")

    def set_all(variables):
        for name in names:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_all


@pytest.mark.parametrize(("variables", "place"), LAUNCHES)
def test_every_launcher_is_understood(environ, variables, place):
    environ(variables)
    assert runtime.find_ranks() == place
    expected = {"torchrun": "node0", "srun": "gpu07"}.get(place[0], "127.0.0.1")
    assert os.environ["MASTER_ADDR"] == expected
    assert os.environ["RANK"] == str(place[1])


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": 0}, "WORLD_SIZE='' is not a number: start with torchrun"),
        ({"RANK": 2, "WORLD_SIZE": 2}, "RANK=2 must be below WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": 2}, "RANK='x' is not a number"),
        (
            {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1},
            "MASTER_ADDR is not set",
        ),
        (
            {"RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": "tcp://10.0.0.1:80"},
            "MASTER_PORT='tcp://10.0.0.1:80' is not a number",
        ),
    ],
)
def test_a_wrong_environment_is_refused(environ, variables, says):
    environ(variables)
    with pytest.raises(cli.UsageError) as refused:
        runtime.find_ranks()
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("name", "gpus", "local", "expected"),
    [
        ("auto", 0, (0, 2), "cpu"),
        ("auto", 1, (0, 2), "cpu"),
        ("auto", 2, (1, 2), "cuda:1"),
        ("cpu", 2, (1, 2), "cpu"),
        ("cuda", 8, (7, 8), "cuda:7"),
    ],
)
def test_a_rank_gets_its_own_gpu(monkeypatch, name, gpus, local, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    device = runtime.choose_device(name, "torchrun", *local)
    assert device == torch.device(expected)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(cli.UsageError, match="2 ranks on this machine but 1 GPUs"):
        runtime.choose_device("cuda", "torchrun", 0, 2)


def test_data_parallel_ranks_draw_differently_and_resume_where_they_were():
    drawn = []
    for rank in (0, 0, 1):
        runtime.seed_everything(5, rank)
        state = runtime.rng_state()
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
        runtime.set_rng_state(state)
        again = (random.random(), np.random.rand(), torch.rand(()).item())
        assert again == drawn[-1]
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[0], drawn[2], strict=True))


def test_buffers_of_all_ranks_become_those_of_rank_0(on_ranks):
    def evaluate(rank, world_size):
        norm = torch.nn.BatchNorm1d(2)
        norm.running_mean += rank
        before = norm.running_mean.tolist()
        runtime.sync_buffers(norm)
        return before, norm.running_mean.tolist()

    assert on_ranks(evaluate, 2) == [([0, 0], [0, 0]), ([1, 1], [0, 0])]


@pytest.mark.parametrize(
    ("restarts", "says"),
    [
        ("0", "was each of them started"),
        ("2", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
    ],
)
def test_ranks_that_do_not_meet_are_told_what_to_do(monkeypatch, restarts, says):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    monkeypatch.setenv("WORLD_SIZE", "2")
    lost = cli.lost_rank(RuntimeError("Gloo connectFullMesh: Connection refused"))
    assert lost.startswith("not all 2 ranks met at ") and says in lost
    assert cli.lost_rank(RuntimeError("shape mismatch")) is None
    assert cli.lost_rank(KeyError("timeout")) is None


# Data


def test_the_text_is_fixed_and_has_its_licence():
    text = data.TEXT.read_bytes()
    assert len(text) <= 1_000_000
    digest = "f0629bfb"
    assert hashlib.sha256(text).hexdigest().startswith(digest)
    licence = data.TEXT.with_name("text.LICENSE.txt").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in licence


def test_targets_are_the_inputs_one_token_further():
    tokens = np.arange(20, dtype=np.uint8)
    sequences = data.Sequences(tokens, 6)
    assert len(sequences) == 3
    for index, (inputs, targets) in enumerate(sequences):
        assert inputs.tolist() == list(range(6 * index, 6 * index + 6))
        assert targets.tolist() == [token + 1 for token in inputs.tolist()]
        if index == 2:
            break


def batches(dataset, rank, ranks, *, seed=0, seen=0, batch=7, micro=2, workers=0):
    args = argparse.Namespace(
        seed=seed, global_batch_size=batch, micro_batch_size=micro, num_workers=workers
    )
    run = SimpleNamespace(
        rank=rank, world_size=ranks, device=CPU, print0=lambda line: None
    )
    train.settle_batch_size(args, run)
    return data.GlobalBatches(dataset, args, run, seen)


def samples_of(batch):
    """Return the first tokens of the samples; rows without targets are none."""
    pairs = [pair for micro in batch for pair in zip(*micro, strict=True)]
    return [int(inputs[0]) for inputs, targets in pairs if (targets >= 0).any()]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_global_batches_are_the_same_on_any_number_of_ranks(ranks):
    """Over three epochs of 17 samples; every rank has equally many micro-batches."""
    sequences = data.Sequences(np.arange(35), 2)
    alone = batches(sequences, 0, 1)
    together = [batches(sequences, rank, ranks) for rank in range(ranks)]
    epoch = []
    for _ in range(9):
        expected = samples_of(next(alone))
        parts = [next(each) for each in together]
        assert len({len(part) for part in parts}) == 1
        assert sorted(sum(map(samples_of, parts), [])) == sorted(expected)
        epoch += expected
    for start in (0, 17, 34):
        assert sorted(epoch[start : start + 17]) == list(range(0, 34, 2))
    assert epoch[:17] != epoch[17:34], "each epoch has its own order"
    assert alone.samples_seen == 51


def test_a_position_resumes_in_the_middle_of_an_epoch():
    sequences = data.Sequences(np.arange(35), 2)
    straight = batches(sequences, 0, 1)
    for _ in range(4):
        next(straight)
    resumed = batches(sequences, 0, 1, seen=straight.samples_seen, workers=1)
    for _ in range(4):
        assert samples_of(next(straight)) == samples_of(next(resumed))


def test_a_large_data_set_is_permuted_by_blocks(monkeypatch):
    monkeypatch.setattr(data, "ORDER_BLOCK", 10)
    order = list(data.global_order(47, 0, 0, 0))
    assert sorted(order) == list(range(47))
    assert {index // 10 for index in order[:10]} != set(range(5))
    assert list(data.global_order(47, 0, 0, 23)) == order[23:]
    assert list(data.global_order(47, 0, 1, 0)) != order


class Augmented(Dataset):
    """Samples with one random number of each generator."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
        return torch.tensor(drawn), torch.tensor(index)


def test_loader_processes_draw_other_numbers_for_each_rank_epoch_and_seed(in_a_fork):
    def draw():
        drawn = []
        for rank, seed, epochs in ((0, 0, 2), (1, 0, 1), (0, 1, 1)):
            run = batches(Augmented(), rank, 2, batch=8, micro=4, workers=1, seed=seed)
            drawn += [next(run)[0][0] for _ in range(epochs)]
        return drawn

    drawn = in_a_fork(draw)
    for generator in range(3):
        numbers = torch.cat([batch[:, generator] for batch in drawn])
        assert len(set(numbers.tolist())) == 16


@pytest.mark.parametrize(
    ("rank", "samples"), [(0, [[1, 0], [0, 0]]), (3, [[0, 0], [0, 0]])]
)
def test_missing_samples_are_rows_that_do_not_count(rank, samples):
    """2 samples for four ranks, each with two micro-batches of two rows."""
    sequences = data.Sequences(np.arange(1, 10), 4)
    given = batches(sequences, rank, 4, batch=13)
    parts = list(data.evaluation_batches(sequences, given.args, given.run))
    for (inputs, targets), rows in zip(parts, samples, strict=True):
        assert inputs.shape == targets.shape == (2, 4)
        assert (inputs > 0).sum(1).tolist() == [4 * row for row in rows]
        assert (targets != data.IGNORED).sum(1).tolist() == [4 * row for row in rows]


def test_a_micro_batch_is_not_larger_than_a_rank_s_share():
    settled = batches(data.Sequences(np.arange(99), 2), 0, 3, batch=5, micro=8).args
    assert (settled.micro_batch_size, settled.num_micro_batches) == (2, 1)


def test_digits_are_images_and_labels():
    train_set, test_set = data.load_digits()
    image, label = train_set[0]
    assert image.shape == (1, 8, 8) and image.min() >= 0 and image.max() <= 1
    assert label.dtype == torch.int64 and len(train_set) + len(test_set) == 1797


# The model


# The model

# Sources: the models' papers.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "1b": 1_235_814_400,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_weights(name):
    config = model.PRESETS[name]
    with torch.device("meta"):
        built = model.Transformer(config)
    assert config.num_parameters() == PUBLISHED[name]
    assert sum(weight.numel() for weight in built.parameters()) == PUBLISHED[name]


def test_flops_are_those_that_pytorch_counts(in_a_fork):
    config = model.Config(256, 64, 2, 4, 4, 96, 64)

    def count():
        built = model.Transformer(config)
        # The CPU's flash kernel is not counted.
        plain = sdpa_kernel(SDPBackend.MATH)
        with plain, FlopCounterMode(display=False) as counter:
            built(torch.zeros(1, 64, dtype=torch.int64)).sum().backward()
        return counter.get_total_flops()

    # The formula counts the norms' weights too.
    assert config.flops_per_token(64) == pytest.approx(in_a_fork(count) / 64, rel=5e-3)


def test_a_model_from_meta_is_the_one_that_is_built_at_once():
    config = model.Config(256, 64, 2, 4, 2, 96, 64, tied_embeddings=True)
    torch.manual_seed(3)
    at_once = model.Transformer(config)
    with torch.device("meta"):
        later = model.Transformer(config)
    later.to_empty(device="cpu")
    later.head.weight = later.embedding.weight
    model.init_weights(later, seed=3)
    for name, weight in at_once.named_parameters():
        assert torch.equal(weight, later.get_parameter(name)), name


@torch.no_grad()
def test_a_token_sees_the_past_only():
    torch.manual_seed(0)
    built = model.Transformer(model.Config(256, 64, 2, 4, 2, 96, 64))
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] += 1
    differ = (built(tokens) != built(changed)).any(-1)[0]
    assert differ.tolist() == [False] * 10 + [True] * 6


# Checks and results


def test_a_check_fails_when_it_should():
    assert Check("", 1.0, 1.1, 0.2).ok and not Check("", 1.0, 1.3, 0.2).ok
    assert not Check("", float("nan"), 1.0, 10.0).ok


def test_collectives_are_counted_with_their_bytes(on_ranks):
    def count(rank, world_size):
        with check.CollectiveCounter() as counter:
            dist.all_reduce(torch.zeros(30))
            parts = [torch.zeros(4) for _ in range(world_size)]
            dist.all_gather(parts, torch.zeros(4))
        return dict(counter.calls), dict(counter.bytes_sent)

    calls, sent = on_ranks(count, 3)[0]
    assert calls == {"all_reduce": 1, "all_gather": 1}
    # Rings of three: an all-reduce sends 4/3 of 120 bytes, an all-gather 2/3 of 48.
    assert sent["all_reduce"] == pytest.approx(160) and sent["all_gather"] == 32


@pytest.fixture
def report_of(on_ranks):
    """Return a function that makes a Report on one rank, and says what it raised."""

    def make(folder, resume=False, checks=()):
        def body(rank, world_size):
            device, group = CPU, dist.group.WORLD
            run = runtime.Run(0, 0, 1, 1, "python", device, group)
            args = argparse.Namespace(output_dir=folder, resume=resume)
            try:
                report = Report("a/script.py", args, run)
            except cli.UsageError as error:
                return str(error)
            for given in checks:
                report.check(*given)
            return report.finish("done")

        return on_ranks(body, 1)[0]

    return make


def test_results_have_the_documented_shape(report_of, tmp_path):
    checks = [("loss", 2.0, 2.1, 0.01), ("count", 3, 3, 0)]
    assert report_of(tmp_path / "run", checks=checks) == cli.FAILED
    content = results_of(tmp_path / "run")
    assert set(content) == set(
        ["script", "args", "argv", "started", "seconds", "world_size", "device"]
        + ["backend", "launcher", "versions", "machine", "metrics", "checks"]
    )
    assert [row["ok"] for row in content["checks"]] == [False, True]
    assert content["checks"][0]["tolerance"] == 0.01
    assert report_of(tmp_path / "other", checks=checks[1:]) == 0


def test_a_folder_that_is_used_is_refused(report_of, tmp_path, monkeypatch):
    from filelock import FileLock

    from dist_common import report

    monkeypatch.setattr(report, "LOCK_WAIT_S", 0.1)
    folder = tmp_path / "run"
    assert report_of(folder) == 0
    assert "is not empty" in report_of(folder)
    assert report_of(folder, resume=True) == 0
    with FileLock(folder / ".lock"):
        assert "is in use by another run" in report_of(folder, resume=True)
    (tmp_path / "file").write_text("")
    assert "cannot be written" in report_of(Path(tmp_path / "file" / "run"))
