"""Overlap: one gradient in five ways, each of which hands over when it says it does."""

import pytest
import torch
import torch.distributed as dist
from conftest import assert_one_line, load_script, results_of

OVERLAP = "05-advanced/communication_overlap.py"
FULL = pytest.mark.full
SMALL = ("--seq-len", 16, "--micro-batch-size", 1, "--layer-ms", 1, "--link", "1gbit",
         "--bucket-cap-mb", 0.02)  # fmt: skip
LAYERS, DIM, FFN, VOCABULARY, KV = 2, 32, 88, 256, 16
BLOCK = DIM * (2 * DIM + 2 * KV) + 3 * DIM * FFN + 2 * DIM  # weights
REST = 2 * VOCABULARY * DIM + DIM


def shrink(script):
    """Make the model small."""
    tiny = script.models.TransformerConfig(VOCABULARY, DIM, LAYERS, 4, 2, FFN, 256)
    script.models.PRESETS["tiny"] = tiny


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=FULL)])
def test_each_way_gives_the_gradient_of_one_process(run_script, tmp_path, world_size):
    """Loss and gradient within 1e-5: float32 sums of the same numbers, in another order."""
    folder = tmp_path / "run"
    argv = (*SMALL, "--output-dir", folder)
    ended = run_script(OVERLAP, *argv, world_size=world_size, before=shrink)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    assert not ended.stderr, "the profiler's library logs no GPU as an error"
    content = results_of(folder)
    checks = {check["name"]: check["measured"] for check in content["checks"]}
    assert all(check["ok"] for check in content["checks"])
    assert len(checks) == 35
    assert checks["1 no overlap, all_reduce: calls"] == 1
    assert checks["2 start early, all_reduce: calls"] == 9 * LAYERS + 3
    assert 3 <= checks["3 DDP buckets, all_reduce: calls"] < 9 * LAYERS + 3
    for way in ("1 no overlap", "2 start early", "3 DDP buckets"):
        handed = checks[f"{way}, all_reduce: bytes handed over"]
        assert handed == 4 * (LAYERS * BLOCK + REST)
    assert checks["3 DDP buckets: handed over before the last gradient"] >= 2
    for way in ("4 FSDP", "5 FSDP, prefetch"):
        assert checks[f"{way}, all_gather: calls"] == 2 * LAYERS + 1
        assert checks[f"{way}, reduce_scatter: calls"] == LAYERS + 1
    if world_size == 2:  # nothing to fill up
        handed = checks["5 FSDP, prefetch, all_gather: bytes handed over"]
        assert handed == 4 * (2 * LAYERS * BLOCK + REST)
    assert (folder / "communication_overlap.png").exists()
    assert (folder / "trace-5.json").exists()


def test_predictions_follow_a_timeline_drawn_by_hand(monkeypatch):
    """Two blocks that compute 10 and 20 ms, beside collectives of 8 and of 100 ms each."""
    script = load_script(OVERLAP)
    predicted = script.part.predicted_ms
    model = script.models.Transformer(script.models.TransformerConfig(256, 32, 2, 4, 2, 88, 256))
    job = script.part.Job(model, None, 2, 1.0, 1, forward_ms=10, backward_ms=20, rest_ms=0)
    monkeypatch.setattr(script.part.Job, "ms", lambda job, kind, size: 8)
    # The rest's gather, the first block's, both blocks beside gathers; a gather, then each block
    # and its reduce-scatter, and the rest's.
    assert predicted(job, "5 FSDP, prefetch") == 8 + 8 + 20 + 8 + 28 + 28 + 8
    monkeypatch.setattr(script.part.Job, "ms", lambda job, kind, size: 100)
    # Slower than computing: the link is busy from the first gradient on, the head's.
    assert predicted(job, "2 start early") == 20 + 100 * len(job.arrived)
    # As fast as nothing: what is left is computing.
    monkeypatch.setattr(script.part.Job, "ms", lambda job, kind, size: 0)
    assert predicted(job, "3 DDP buckets") == 60


# sabotage: one per kind of check


def wait_at_once(script):
    def start_early_wait_late(model, group):
        def start(parameter):
            dist.all_reduce(parameter.grad, group=group, async_op=True).wait()
            parameter.grad /= dist.get_world_size()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(start)
        return lambda batch: script.forward_and_backward(model, batch)

    script.start_early_wait_late = start_early_wait_late
    script.part.PATIENCE_S = 3.0  # for sums that nobody else will complete


def remove_prefetch(script):
    right = script.sharded
    script.sharded = lambda model, group, prefetch: right(model, group, prefetch=False)


def leave_a_gradient_out(script):
    right = script.DDP

    def ddp(model, **options):
        right._set_params_and_buffers_to_ignore_for_model(model, ["head.weight"])
        return right(model, **options)

    script.DDP = ddp


def all_in_one_bucket(script):
    right = script.DDP
    script.DDP = lambda model, process_group, bucket_cap_mb: right(model, bucket_cap_mb=100)


def read_after_wait(script):
    script.read_before_wait = lambda group, device: (3.0, 3.0)


WAITS = {"2 start early: backward ends while a rank is missing"}
LACKS = {
    "3 DDP buckets: gradient, relative error",
    "3 DDP buckets, all_reduce: bytes handed over",
}
EARLY = {"5 FSDP, prefetch: gathers begun before the block before computes"}
LATE = {"5 FSDP, prefetch: gathers begun after the block before has ended"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("sabotages", "failing"),
    [
        # Each spoils another way.
        ((wait_at_once, leave_a_gradient_out, remove_prefetch), WAITS | LACKS | EARLY | LATE),
        pytest.param(
            (all_in_one_bucket, read_after_wait),
            {"3 DDP buckets: handed over before the last gradient", "sum is there before wait()"},
            marks=FULL,
        ),
    ],
)
def test_sabotage_of_overlap_fails_a_check(run_script, tmp_path, sabotages, failing):
    def before(script):
        shrink(script)
        for sabotage in sabotages:
            sabotage(script)

    folder = tmp_path / "run"
    ended = run_script(OVERLAP, *SMALL, "--output-dir", folder, world_size=2, before=before)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    bad = {check["name"] for check in results_of(folder)["checks"] if not check["ok"]}
    assert failing <= bad
    # The other ways are as they were.
    assert {name[0] for name in bad} == {name[0] for name in failing}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--link", "fast"), "--link: must be like 100mbit or 1gbit, not 'fast'"),
    ],
)
def test_overlap_refuses_bad_input(run_script, argv, says):
    assert_one_line(run_script(OVERLAP, *argv), says, "communication_overlap.py")


def test_gpus_get_no_emulation():
    script = load_script(OVERLAP)
    gpu = torch.device("cuda", 0)
    assert script.part.emulation_of(None, None, gpu) == (0, 0)
    with pytest.raises(script.cli.UsageError, match="leave them out"):
        script.part.emulation_of(12.5e6, None, gpu)
