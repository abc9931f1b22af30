"""Tokens and checkpoints by URL: read by ranges, killed, damaged, resumed, as in a local folder.

Fsspec's memory and file drivers stand for a store, and one that behaves as S3's does. No real one.
"""

import fsspec
import pytest
import torch
from conftest import assert_one_line
from fsspec.implementations.local import LocalFileSystem
from helpers_01 import largest_difference
from helpers_03 import SMALL_MODEL
from helpers_tokens import words, write_folder
from test_legacy_common import Recorder, group_of_one

from legacy_common import checkpoint, models
from legacy_common.stores import Remote, remove, sizes_in

DDP = "01-ddp-basics/ddp_training.py"
FSDP = "02-fsdp/fsdp_transformer.py"
DEEPSPEED = "03-deepspeed/deepspeed_train.py"

FLAG = "--checkpoints"
full = pytest.mark.full


class Store(LocalFileSystem):
    """As drivers of object stores do, it keeps listings and renames no folder."""

    protocol = "store"
    listings: dict = {}

    def find(self, path, **options):
        if path not in self.listings:
            self.listings[path] = super().find(path, **options)
        return self.listings[path]

    def invalidate_cache(self, path=None):
        self.listings.clear()

    def mv(self, path1, path2, **options):
        assert self.isfile(path1), "a store has no folders to rename"
        super().mv(path1, path2, **options)


fsspec.register_implementation("store", Store, clobber=True)
fsspec.register_implementation(
    "undriven", "no_such_package.Driver", clobber=True, errtxt="Install no_such_package"
)


# tokens


@pytest.mark.parametrize("scheme", ["store", "file"])
def test_ranks_train_on_tokens_by_url_as_from_a_folder(run_script, tmp_path, scheme):
    folder = write_folder(tmp_path / "one", words(0, 300))

    def small(script):
        models.PRESETS["tiny"] = SMALL_MODEL

    for name, prefix in (("local", ""), ("remote", f"{scheme}://")):
        argv = ("--tokens", f"{prefix}{folder}", "--micro-batch-size", 2, "--seq-len", 32,
                "--max-steps", 3, "--log-every", 1, "--parity-steps", 0, "--eval-every", 0,
                "--output-dir", tmp_path / name)  # fmt: skip
        ended = run_script(DDP, *argv, world_size=2, before=small)
        assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert largest_difference(tmp_path / "local", tmp_path / "remote") == 0.0


# checkpoints


@pytest.fixture
def single():
    with group_of_one():
        yield


@pytest.fixture(params=["memory://{}", "file://{}", "store://{}"])
def directory(request, tmp_path):
    place = Remote(request.param.format(tmp_path / "saved"), FLAG)
    yield place
    if sizes_in(place):
        remove(place)


def a_store(value=0.0):
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, value)
    return checkpoint.Replicated(model)


def save(directory, *steps):
    for step in steps:
        checkpoint.save(directory, step, a_store(step), {})


def newest(directory, recorder=None):
    """Return the step of the newest usable checkpoint and a weight in it; what was said of it."""
    store, recorder = a_store(), recorder or Recorder()
    found = checkpoint.find(directory, recorder, store)
    if found:
        checkpoint.load(found[0], store)
        return found[1]["step"], store.model.weight[0, 0].item()


def test_old_ones_go_and_what_is_not_ours_stays(directory, single):
    assert newest(directory) is None
    (directory / "step-00000009").mkdir()
    (directory / "notes-00000001").mkdir()
    for name in ("step-00000009/state.pt", "notes-00000001/a", "step-1"):
        (directory / name).open("wb").close()
    assert newest(directory) is None, "not sealed"
    save(directory, 1, 2, 3)
    assert newest(directory) == (3, 3.0)
    names = {name.partition("/")[0] for name in sizes_in(directory)}
    assert names == {"step-00000002", "step-00000003", "notes-00000001", "step-1"}
    save(directory, 3)
    assert newest(directory) == (3, 3.0)


# refused


@pytest.mark.parametrize(
    ("path", "argv", "says"),
    [
        (DDP, "--tokens undriven://b/t", "--tokens undriven://b/t: Install no_such_package"),
        (FSDP, "--checkpoints undriven://b/r --output-dir r",
         "--checkpoints undriven://b/r: Install no_such_package"),
        (FSDP, "--output-dir memory://r", "--output-dir memory://r: must be a local folder"),
        (DEEPSPEED, "--checkpoints memory://r --output-dir r",
         "--checkpoints: DeepSpeed's engine saves to --output-dir alone"),
    ],
)  # fmt: skip
def test_what_no_driver_or_template_takes_is_refused(
    run_script, tmp_path, monkeypatch, path, argv, says
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    argv = argv.replace("--output-dir r", f"--output-dir {tmp_path / 'r'}").split()
    ended = run_script(path, *argv)
    assert_one_line(ended, says, path.rpartition("/")[2])
    assert not (tmp_path / "r").exists()
