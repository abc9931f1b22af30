"""fsdp_memory.py: what it predicts is what a real run allocates, and what each saving saves."""

from functools import partial

import pytest
from conftest import GPUS, REPO, assert_one_line, results_of, run_command
from helpers_02 import quick

from fsdp_parts.memory import peak_in
from legacy_common import models

MEMORY = "02-fsdp/fsdp_memory.py"
NARROW = models.TransformerConfig(256, 32, 2, 4, 2, 88, 256)
full = pytest.mark.full
# One worker imports what predictions take.
pytestmark = pytest.mark.xdist_group("dry-runs")


@pytest.fixture(autouse=True)
def imports():
    """What a prediction imports, and takes seconds: here, so that no fork has to."""
    import torch.distributed._tools.fsdp2_mem_tracker
    import torch.testing._internal.distributed.fake_pg  # noqa: F401


def small(*changes):
    def before(script):
        models.PRESETS["tiny"] = NARROW
        for change in changes:
            change(script)

    return before


def with_norms_of_a_cpu(script):
    script.predict = partial(script.predict, on_gpu=False)


@pytest.fixture
def predict(run_script, tmp_path):
    """Predict for a small model; return the metrics of results.json."""

    def run(name, *argv, change=lambda script: None):
        folder = tmp_path / name
        options = {"environ": {}, "before": small(change)}
        ended = run_script(MEMORY, *argv, "--output-dir", folder, **options)
        assert ended.codes == [0] and not ended.stderr, ended.stdout + ended.stderr
        return results_of(folder)["metrics"]

    return run


LARGE = ("--seq-len", 128, "--micro-batch-size", 8)
SMALL = ("--seq-len", 40, "--micro-batch-size", 1)  # weights outweigh activations


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, LARGE),
        *(
            pytest.param(*case, marks=full)
            for case in (
                (4, (*SMALL, "--sharding", "hybrid", "--shard-group-size", 2)),
                (3, (*LARGE, "--loss-chunks", 4, "--activation-checkpointing", "full",
                     "--precision", "bf16-mixed")),
            )
        ),
    ],
)  # fmt: skip
def test_the_peak_of_a_real_run_is_the_predicted_one(
    run_script, predict, tmp_path, world_size, options
):
    """On every rank; and the prediction of one process is that of the ranks."""
    ended = run_script(
        MEMORY, "--check", *options, "--output-dir", tmp_path / "run",
        world_size=world_size, before=small(),
    )  # fmt: skip
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    if options != LARGE:
        return
    real = results_of(tmp_path / "run")["metrics"]["peak_mb"] * 1e6
    flags = (*LARGE, "--world-size", world_size, "--precision", "32-true")
    predicted = predict("alone", *flags, change=with_norms_of_a_cpu)["Total_gib"] * 2**30
    assert abs(predicted / real - 1) < 0.01


@pytest.mark.full
def test_a_gpus_norms_keep_their_input_and_no_copies(predict):
    """The CPU keeps two copies too, in float32 and in bfloat16: 6 bytes per number."""
    on_gpu, on_cpu = (
        predict(name, *LARGE, change=change)["Activation_gib"] * 2**30
        for name, change in (("gpu", lambda script: None), ("cpu", with_norms_of_a_cpu))
    )
    tokens = 8 * 128
    of_block, of_final = 6 * 2 * NARROW.dim, 6 * NARROW.dim  # per token; a block has two norms
    assert on_cpu - on_gpu == pytest.approx(tokens * (NARROW.num_layers * of_block + of_final))


def span(name, begins, ends):
    return {"name": name, "tid": 1, "ts": begins, "dur": ends - begins}


def block(when, address, size, thread=1):
    args = {"Addr": address, "Bytes": size}
    return {"name": "[memory]", "tid": thread, "ts": when, "args": args}


@pytest.mark.parametrize(
    ("released", "peak"),
    [
        ([], 100),  # by gloo's thread, unseen: when FSDP has copied it out
        ([block(22, 1, -100)], 140),
    ],
)
def test_the_log_of_a_busy_machine(released, peak):
    """A gathered buffer, which gloo copies twice; then another tensor."""
    gathered = [span("FSDP::all_gather (x)", 0, 9), span("c10d::_allgather_base_", 2, 4)]
    copies = [block(3, 2, 90), block(5, 3, 110, thread=2)]
    events = [*gathered, block(1, 1, 100), *copies, span("FSDP::all_gather_copy_out (x)", 10, 15)]
    assert peak_in([*events, block(20, 4, 40), *released]) == (peak, 110)


@full
def test_each_saving_saves(run_script, tmp_path):
    """A vocabulary that outweighs the blocks, as that of a small model does."""

    def before(script):
        models.PRESETS["tiny"] = models.TransformerConfig(2048, 32, 2, 4, 2, 88, 256)

    folder = tmp_path / "run"
    arguments = ("--world-size", 16, "--compare", *LARGE, "--output-dir", folder)
    ended = run_script(MEMORY, *arguments, environ={}, before=before)
    assert ended.codes == [0] and not ended.stderr, ended.stdout + ended.stderr
    metrics = results_of(folder)["metrics"]
    total = {name: metrics[name]["Total"] for name in metrics}
    assert total["grad-op"] > total["full"] > total["+ checkpoints"] > total["+ loss slices"]
    assert total["hybrid"] > total["full"]
    assert metrics["grad-op"]["Sharded Param"] == metrics["full"]["Sharded Param"]
    shards = [metrics[name]["Sharded Param"] for name in ("hybrid", "full")]
    assert shards[0] == pytest.approx(2 * shards[1], rel=0.01)
    logits = 4 * 8 * 128 * 2048 / 2**30  # GiB: float32, (B T, V)
    assert total["+ checkpoints"] - total["+ loss slices"] > 1.5 * logits


@full
def test_a_changed_copy_of_the_template_is_predicted(run_script, tmp_path):
    """One that keeps all that was gathered holds more."""
    source = (REPO / "02-fsdp" / "fsdp_parts" / "fsdp_memory.py").read_text()
    line = 'free_after_forward = args.sharding != "grad-op"'
    assert line in source
    (tmp_path / "job.py").write_text(source.replace(line, "free_after_forward = False"))
    peaks = []
    for name, own in (("as-it-is", ()), ("changed", ("--template", tmp_path / "job.py"))):
        ended = run_script(
            MEMORY, "--seq-len", 32, *own, "--output-dir", tmp_path / name, environ={},
            before=small(),
        )  # fmt: skip
        assert ended.codes == [0], ended.stdout + ended.stderr
        peaks.append(results_of(tmp_path / name)["metrics"]["Unsharded Param_gib"])
    assert peaks[1] > peaks[0]


# checks that can fail


def forget_activation_checkpointing(script):
    predict = script.predict

    def broken(template, args, *rest):
        args.activation_checkpointing = "none"
        return predict(template, args, *rest)

    script.predict = broken


@pytest.mark.full
def test_a_prediction_that_forgets_something_fails(run_script, tmp_path):
    ended = run_script(
        MEMORY, "--check", *LARGE, "--activation-checkpointing", "full",
        "--output-dir", tmp_path / "run", world_size=2,
        before=small(forget_activation_checkpointing),
    )  # fmt: skip
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert failed == ["peak of MB allocated"]


@full
def test_a_model_sharded_over_too_few_ranks_fails(run_script, tmp_path):
    def two_of_eight(script):
        arrange = script.mesh_of
        script.mesh_of = lambda _, device: arrange(2, device)

    ended = run_script(
        MEMORY, "--output-dir", tmp_path / "run", environ={}, before=small(two_of_eight)
    )
    assert ended.codes == [1], ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert failed == ["bytes of Sharded Param", "bytes of OptState"]


# bad input


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    quick(
        2,
        [
            (1, "--cpu-offload", "leave out --cpu-offload"),
            (2, "", "a prediction is one process: start it with python"),
            (
                2,
                "--check --preset llama3-70b",
                "--preset llama3-70b needs 1,051.3 GiB for weights, ",
            ),
            (1, "--template tests/conftest.py", "has no attribute 'build'"),
        ],
    ),
)
def test_bad_input_gets_one_line(run_script, world_size, argv, says):
    ended = run_script(MEMORY, *argv.split(), world_size=world_size)
    assert_one_line(ended, says, "fsdp_memory.py")


@full
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_the_peak_on_a_gpu():
    command = ["python", MEMORY, "--check", "--preset", "124m", "--seq-len", "1024"]
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
