"""The one job: with the same flags every template trains to the same losses, up to rounding."""

import json

import pytest
from conftest import assert_one_line
from helpers_03 import SMALL_MODEL, deepspeed_in_the_parent

from dist_common.model import PRESETS, Config
from legacy_common import models

REFERENCE = "01-ddp-basics/ddp_training.py"
# In float32; 18 sequences of the text are left over at the end of an epoch.
JOB = ("--global-batch-size", 24, "--seq-len", 32, "--max-steps", 8, "--warmup-steps", 2,
       "--lr", 2e-3, "--precision", "32-true")  # fmt: skip
NEW = (REFERENCE, "02-fsdp/fsdp_transformer.py")
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
        names = Config.__dataclass_fields__
        PRESETS["tiny"] = Config(**{name: getattr(SMALL_MODEL, name) for name in names})

    def train(script, ranks, *argv, before=small):
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        alone = ("--no-self-check",) if script in NEW else ("--parity-steps", 0)
        arguments = (*JOB, *alone, "--output-dir", folder, *argv)
        if "--tokens" not in argv:
            arguments += ("--text-file", text)
        ended = run_script(script, *arguments, world_size=ranks, before=before)
        assert ended.codes == [0] * ranks, ended.stdout + ended.stderr
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        found = {line["step"]: line["loss"] for line in lines if "loss" in line}
        assert sorted(found) == list(range(1, 9))
        return [found[step] for step in sorted(found)]

    return train


@pytest.fixture(scope="module")
def known() -> dict:
    """The losses of one process, by the test that compares with them: the same for all its rows."""
    return {}


@pytest.mark.parametrize(
    ("script", "argv"),
    [
        ("02-fsdp/fsdp_transformer.py", ()),
        pytest.param("05-advanced/hybrid_parallelism.py", ("--data-parallel", "full"), marks=full),
        (DEEPSPEED, ("--deepspeed_config", "03-deepspeed/configs/zero2_config.json")),
        pytest.param(
            DEEPSPEED, ("--deepspeed_config", "03-deepspeed/configs/zero3_config.json"), marks=full
        ),
    ],
)
def test_every_template_trains_the_one_job(losses, known, script, argv):
    if "job" not in known:
        known["job"] = losses(REFERENCE, 1, "--micro-batch-size", 24)
    expected = known["job"]
    measured = losses(script, 2, "--micro-batch-size", 4, *argv)
    assert measured == pytest.approx(expected, abs=TOLERANCE)
    assert abs(expected[-1] - expected[0]) > 0.5  # it learns: equal losses say something


FIVE_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 88, "vocab_size": 256}  # fmt: skip


@pytest.mark.full
def test_every_template_trains_the_shape_of_a_file(losses, run_script, tmp_path):
    """The same losses in each, which are no preset's; and who resumes looks at the file again."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(FIVE_SIZES))
    model = ("--preset", path, "--micro-batch-size", 12)
    expected = losses(REFERENCE, 1, *model)
    assert abs(expected[0] - losses(REFERENCE, 1, "--micro-batch-size", 12)[0]) > 1e-3
    assert losses(DEEPSPEED, 1, *model) == pytest.approx(expected, abs=TOLERANCE)
    first = min(tmp_path.glob("run-*/results.json"), key=lambda path: path.stat().st_mtime)
    path.write_text(json.dumps(FIVE_SIZES | {"rope_theta": 5e5}))
    ended = run_script(REFERENCE, *JOB, *model, "--text-file", tmp_path / "text", "--resume",
                       "--output-dir", first.parent, world_size=1)  # fmt: skip
    assert_one_line(ended, "--preset is {", "ddp_training.py")
