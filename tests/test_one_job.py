"""The one job: with the same flags every template trains to the same losses, up to rounding."""

import json

import pytest
from helpers_03 import SMALL_MODEL, deepspeed_in_the_parent

from dist_common import models

REFERENCE = "01-ddp-basics/ddp_training.py"
# In float32; 18 sequences of the text are left over at the end of an epoch.
JOB = ("--global-batch-size", 24, "--seq-len", 32, "--max-steps", 8, "--warmup-steps", 2,
       "--lr", 2e-3, "--precision", "32-true", "--parity-steps", 0)  # fmt: skip
DEEPSPEED = "03-deepspeed/deepspeed_train.py"
TOLERANCE = 1e-5  # of losses near 5, whose terms are added in another order
full = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def deepspeed_is_imported():
    with deepspeed_in_the_parent():
        yield


@pytest.fixture
def losses(run_script, tmp_path):
    """Train with a template; return the loss of each step."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(97, 123)) * 120)

    def small(script):
        models.PRESETS["tiny"] = SMALL_MODEL

    def train(script, ranks, *argv, before=small):
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        arguments = (*JOB, "--text-file", text, "--output-dir", folder, *argv)
        ended = run_script(script, *arguments, world_size=ranks, before=before)
        assert ended.codes == [0] * ranks, ended.stdout + ended.stderr
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        found = {line["step"]: line["loss"] for line in lines if "loss" in line}
        assert sorted(found) == list(range(1, 9))
        return [found[step] for step in sorted(found)]

    return train


@pytest.mark.parametrize(
    ("script", "argv"),
    [
        ("02-fsdp/fsdp_transformer.py", ()),
        ("05-advanced/hybrid_parallelism.py", ("--data-parallel", "full")),
        (DEEPSPEED, ("--deepspeed_config", "03-deepspeed/configs/zero2_config.json")),
        pytest.param(
            DEEPSPEED, ("--deepspeed_config", "03-deepspeed/configs/zero3_config.json"), marks=full
        ),
    ],
)
@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 4), pytest.param(4, 3, marks=full)])
def test_every_template_trains_the_one_job(losses, script, argv, ranks, micro_batch):
    # On 4 ranks the small model is too small for DeepSpeed's bytes per weight: the preset itself.
    model = {} if ranks == 2 else {"before": None}
    expected = losses(REFERENCE, 1, "--micro-batch-size", 24, **model)
    measured = losses(script, ranks, "--micro-batch-size", micro_batch, *argv, **model)
    assert measured == pytest.approx(expected, abs=TOLERANCE)
    assert abs(expected[-1] - expected[0]) > 0.5  # it learns: equal losses say something
