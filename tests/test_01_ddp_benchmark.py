"""ddp_benchmark.py: the parts of a step add up, loops that are compared train alike."""

import argparse
import re

import pytest
import torch
from conftest import GPUS, REPO, assert_one_line, results_of, run_command
from helpers_01 import BENCHMARK, skip_all_reduce, with_a_small_model
from helpers_04 import first_is_quick
from torch.nn.parallel import DistributedDataParallel

from ddp_parts import ddp_benchmark as part
from legacy_common import models, runtime
from legacy_common.report import Report

full = pytest.mark.full


def metrics_of(times: dict, norm: float) -> dict:
    kinds = ("strong", "weak")
    found = {f"{kind}_{name}_ms": value for name, value in times.items() for kind in kinds}
    return found | {"gradient_norm": norm}


# scaling


def test_a_step_is_the_sum_of_ideal_and_what_is_lost(tmp_path, capsys):
    """Times in which every loss is known: of 100 ms on one rank, 50 are ideal on two."""
    one = {"full": 101, "slowest": 100, "mean": 100, "alone": 100, "ideal": 100}
    two = {"full": 80, "slowest": 70, "mean": 65, "alone": 52, "ideal": 50}
    args = argparse.Namespace(
        model="transformer", global_batch_size=8, output_dir=str(tmp_path), resume=None
    )
    report = Report(BENCHMARK, args, runtime.World(0, 0, 1, 1, "python"), torch.device("cpu"))
    part.show_scaling(report, args, {1: metrics_of(one, 1.0), 2: metrics_of(two, 1.1)})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    numbers = [words[::2] for words in lines if words[:2] == ["strong", "2"]]
    assert numbers == [["strong", "80.0", "50.0", "2.0", "13.0", "5.0", "10.0", "62%"]]
    assert report.metrics["strong_efficiency_2"] == 50 / 80
    assert report.metrics["noise_ms"] == 1, "of one rank, full - slowest"
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert [check.ok for check in report.checks] == [False], "another gradient on two ranks"


@pytest.mark.parametrize("model", ["transformer", pytest.param("resnet50", marks=full)])
def test_the_training_is_the_same_on_any_number_of_ranks(run_script, tmp_path, model):
    norms = []
    arguments = (BENCHMARK, "--model", model, "--global-batch-size", 2, "--rounds", 1)
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        ended = run_script(
            *arguments, "--output-dir", folder, world_size=ranks, before=with_a_small_model()
        )
        assert ended.codes == [0] * ranks, ended.stdout + ended.stderr
        metrics = results_of(folder)["metrics"]
        assert metrics["strong_slowest_ms"] >= metrics["strong_mean_ms"] > 0
        norms.append(metrics["gradient_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_a_step_that_does_not_send_the_gradient_fails_a_check(run_script):
    ended = run_script(
        BENCHMARK, "--global-batch-size", 2, "--rounds", 1, world_size=2,
        before=with_a_small_model(skip_all_reduce),
    )  # fmt: skip
    assert ended.stdout.splitlines()[-1] == "FAILED: step: bytes all-reduced"


@pytest.mark.parametrize(
    ("argv", "says"),
    first_is_quick([
        (["--max-ranks", 3], "--global-batch-size 8 cannot be dealt to 3 ranks"),
    ]),
)  # fmt: skip
def test_bad_input_gets_one_line_and_writes_nothing(run_script, tmp_path, argv, says):
    ended = run_script(BENCHMARK, *argv, "--output-dir", tmp_path / "new", environ={})
    assert_one_line(ended, says, "ddp_benchmark.py")
    assert not ended.stdout and not (tmp_path / "new").exists()


# buckets


@full
def test_bucket_sizes_change_the_number_of_all_reduces_only(run_script):
    ended = run_script(
        BENCHMARK, "--buckets", 0.1, 1, 25, "--global-batch-size", 2, "--rounds", 1, world_size=2
    )
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "OK: 4 checks passed, measured"
    rows = dict(re.findall(r"^(default|[\d.]+) +(\d+) +[\d.]+ ms$", ended.stdout, re.M))
    calls = {name: int(count) for name, count in rows.items()}
    assert calls["0.1"] > calls["1"] > calls["default"] > calls["25"] == 1


def test_only_the_default_has_a_small_first_bucket(on_ranks):
    """As the page says: of 1 MiB or the first gradient above it, so that sending starts early."""
    default, explicit = on_ranks(bytes_of_buckets, 2)[0]
    assert len(default) == 2 and 2**20 <= default[0] < default[1]
    assert explicit == [sum(default)]


def bytes_of_buckets(rank, world_size):
    found = []
    for options in ({}, {"bucket_cap_mb": 25}):
        model = DistributedDataParallel(models.Transformer(models.PRESETS["tiny"]), **options)
        sizes = []

        def note(sizes, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
            sizes.append(bucket.buffer().nbytes)
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model.register_comm_hook(sizes, note)
        for _ in range(2):  # DDP settles its buckets in the first step
            sizes.clear()
            model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
        found.append(sizes)
    return found


@full
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_it_runs_on_a_gpu():
    command = ["python", BENCHMARK, "--max-ranks", "1", "--device", "cuda"]
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
