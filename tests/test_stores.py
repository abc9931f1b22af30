"""Tokens and checkpoints by URL: read by ranges, killed, damaged, resumed, as in a local folder.

Fsspec's memory and file drivers stand for a store, and one that behaves as S3's does. No real one.
"""

import errno
import hashlib
import importlib.util
import json
import os
import resource
import signal
import sys

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import assert_one_line, fork_ranks, load_script
from fsspec.implementations.local import LocalFileSystem
from helpers_01 import ask_to_stop_in, largest_difference, steps_in
from helpers_03 import SMALL_MODEL
from helpers_tokens import MAKE, words, write_folder
from test_dist_common import Recorder, group_of_one

from dist_common import checkpoint, cli, job, models
from dist_common.stores import Ranges, Remote, remove, sizes_in

DDP = "01-ddp-basics/ddp_training.py"
FSDP = "02-fsdp/fsdp_transformer.py"
DEEPSPEED = "03-deepspeed/deepspeed_train.py"
HYBRID = "05-advanced/hybrid_parallelism.py"
FLAG = "--checkpoints"
full = pytest.mark.full


class Store(LocalFileSystem):
    """As drivers of object stores do, it keeps listings, renames no folder, reads a range at once.

    It writes down each range, and dies by SIGKILL before its operation number `dies_in`.
    """

    protocol, dies_in, log = "store", -1, None
    listings: dict = {}

    def operation(self):
        Store.dies_in -= 1
        if Store.dies_in == -1:
            os.kill(os.getpid(), signal.SIGKILL)

    def find(self, path, **options):
        if path not in self.listings:
            self.listings[path] = super().find(path, **options)
        return self.listings[path]

    def invalidate_cache(self, path=None):
        self.listings.clear()

    def cat_file(self, path, start=None, end=None, **_):
        self.note(path, start, end)
        with open(self._strip_protocol(path), "rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(end - (start or 0))

    def note(self, path, start, end):
        if self.log:
            with open(f"{self.log}-{os.environ['RANK']}", "a") as file:
                file.write(f"{os.path.basename(path)} {start} {end}\n")

    def _open(self, path, mode="rb", **options):
        self.operation()
        self.note(path, "opened", mode)
        return super()._open(path, mode, **options)

    def pipe_file(self, path, value, **options):
        self.operation()
        whole = f"{self._strip_protocol(path)}.sent"
        with open(whole, "wb") as file:
            file.write(value)
        os.rename(whole, self._strip_protocol(path))

    def makedirs(self, path, exist_ok=False):
        self.operation()
        super().makedirs(path, exist_ok)

    def rm(self, path, **options):
        self.operation()
        super().rm(path, **options)

    def mv(self, path1, path2, **options):
        self.operation()
        assert self.isfile(path1), "a store has no folders to rename"
        super().mv(path1, path2, **options)


fsspec.register_implementation("store", Store, clobber=True)
fsspec.register_implementation(
    "undriven", "no_such_package.Driver", clobber=True, errtxt="Install no_such_package"
)


@pytest.fixture
def train(run_script, tmp_path):
    """Train a template on two folders of documents, by URLs or by paths: 12 steps by default."""
    folders = [write_folder(tmp_path / name, words(seed, 3000))
               for seed, name in enumerate(("one", "two"))]  # fmt: skip

    def run(template, *argv, ranks=2, scheme="", before=lambda script: None):
        def change(module):
            models.PRESETS["tiny"] = SMALL_MODEL
            before(module)

        prefix = f"{scheme}://" if scheme else ""
        sources = [f"{prefix}{folders[0]}=3", f"{prefix}{folders[1]}=1"]
        arguments = ["--tokens", *sources, "--global-batch-size", 12, "--micro-batch-size", 2,
                     "--seq-len", 32, "--max-steps", 12, "--lr", 1e-2, "--warmup-steps", 2,
                     "--log-every", 1, "--parity-steps", 0]  # fmt: skip
        return run_script(template, *arguments, *argv, world_size=ranks, before=change)

    return run


# tokens


def note_batches(folder):
    """Write down a checksum of each micro-batch that a rank trains on."""

    def before(script):
        steps = job.Job.steps

        def noted(self, *args, **options):
            for step in steps(self, *args, **options):
                for batch in step.micro_batches:
                    content = b"".join(tensor.numpy().tobytes() for tensor in batch)
                    with open(folder / f"batches-{os.environ['RANK']}", "a") as file:
                        file.write(hashlib.sha256(content).hexdigest() + "\n")
                yield step

        job.Job.steps = noted

    return before


@pytest.mark.parametrize(
    ("scheme", "argv"),
    [
        ("store", ()),
        ("store", ("--document-attention", "--num-workers", 1)),
        pytest.param("file", (), marks=full),
    ],
)
def test_ranks_read_ranges_of_tokens_and_train_on_the_same_batches(
    train, tmp_path, monkeypatch, scheme, argv
):  # fmt: skip
    argv = (*argv, "--eval-every", 0)
    monkeypatch.setattr(Store, "log", tmp_path / "log")
    noted = {}
    for name, kind in (("local", ""), ("remote", scheme)):
        (tmp_path / name).mkdir()
        ended = train(
            DDP, *argv, "--output-dir", tmp_path / f"run-{name}", scheme=kind,
            before=note_batches(tmp_path / name),
        )  # fmt: skip
        assert ended.codes == [0, 0], ended.stdout + ended.stderr
        noted[name] = [(tmp_path / name / f"batches-{rank}").read_text() for rank in range(2)]
    assert noted["local"] == noted["remote"] and len(set(noted["local"])) == 2
    assert largest_difference(tmp_path / "run-local", tmp_path / "run-remote") == 0.0
    if scheme == "file":
        return
    for rank in range(2):
        reads = [line.split() for line in (tmp_path / f"log-{rank}").read_text().splitlines()]
        ranges = [(int(a), int(b)) for name, a, b in reads if name == "tokens.bin"]
        assert {b - a for a, b in ranges} == {33 * 2}, "a sequence, and its last target"
        read, size = sum(b - a for a, b in ranges), (tmp_path / "one/tokens.bin").stat().st_size
        assert 12 * 6 * 66 <= read < 100 * 66 < size / 10, "its own, some for proofs, some ahead"
        # Which documents end in a batch of all ranks: 8 bytes each, in memory.
        ends = [places for name, *places in reads if name == "ends.bin"]
        assert ends == ([["0", "24000"]] * 2 if "--document-attention" in argv else [])


def test_a_folder_by_url_is_verified(tmp_path, monkeypatch, capsys):
    folder = write_folder(tmp_path / "one", words(0, 300))
    script = load_script(MAKE)
    monkeypatch.setattr(sys, "argv", [MAKE, "--verify", f"store://{folder}"])
    assert script.main() == 0 and "OK: checksum, 300 ends" in capsys.readouterr().out
    content = bytearray((folder / "tokens.bin").read_bytes())
    content[0] ^= 1
    (folder / "tokens.bin").write_bytes(content)
    with pytest.raises(cli.UsageError, match=f"store://{folder}: sha256 is"):
        script.main()


# checkpoints, of templates


def die_when_it_has_written(step):
    """End all ranks by SIGKILL between the files of a checkpoint and its manifest."""

    def before(script):
        for kind in (checkpoint.Replicated, checkpoint.Sharded):

            def killed(self, folder, *state, write=kind.write, **options):
                write(self, folder, *state, **options)
                if folder.name == f"step-{step:08d}":
                    torch.distributed.barrier(self.group)
                    os.kill(os.getpid(), signal.SIGKILL)

            kind.write = killed

    return before


@pytest.mark.parametrize(
    ("template", "scheme", "argv"),
    [
        (FSDP, "file", ()),
        pytest.param(DDP, "store", (), marks=full),
        pytest.param(FSDP, "store", ("--async-save",), marks=full),
        pytest.param(HYBRID, "file", ("--async-save",), marks=full),
    ],
)
@pytest.mark.full
def test_a_run_killed_in_a_save_resumes_on_three_ranks(train, tmp_path, template, scheme, argv):
    straight, saved = tmp_path / "straight", tmp_path / "saved"
    ended = train(template, "--save-every", 3, "--output-dir", straight)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    flags = ("--save-every", 3, "--resume", FLAG, f"{scheme}://{saved}", *argv, "--output-dir")
    killed = train(
        template, *flags, tmp_path / "run", scheme=scheme, before=die_when_it_has_written(6)
    )
    assert killed.codes == [-signal.SIGKILL] * 2, killed.stdout + killed.stderr
    assert {path.name for path in saved.iterdir()} == {"step-00000003", "step-00000006"}
    assert not (saved / "step-00000006" / "manifest.json").exists()
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    again = train(template, *flags, tmp_path / "run", ranks=3, scheme=scheme)
    assert again.codes == [0] * 3, again.stdout + again.stderr
    assert f"resuming from {scheme}://{saved}/step-00000003" in again.stdout
    assert not again.stderr, "what was not sealed is none"
    assert largest_difference(straight, tmp_path / "run") < 1e-5
    assert {path.name for path in saved.iterdir()} == {"step-00000009", "step-00000012"}
    files = json.loads((saved / "step-00000012" / "manifest.json").read_text())["files"]
    written = {path.name for path in (saved / "step-00000012").iterdir()}
    assert set(files) == written - {"manifest.json"}


def name_of(template):
    return template.rpartition("/")[2]


@full
def test_a_run_in_a_new_folder_of_a_new_machine_resumes_bitwise(train, tmp_path):
    """Nothing is left of the first machine but what is in the store."""
    straight, flags = tmp_path / "straight", ("--resume", FLAG, f"file://{tmp_path / 'saved'}")
    assert train(DDP, "--output-dir", straight).codes == [0, 0]
    first = train(DDP, *flags, "--output-dir", tmp_path / "1", before=ask_to_stop_in(5))
    assert first.stdout.splitlines()[-1].endswith("after step 5, asked to stop, saved")
    assert train(DDP, *flags, "--output-dir", tmp_path / "2").codes == [0, 0]
    begun, rest = steps_in(tmp_path / "1"), steps_in(tmp_path / "2")
    assert steps_in(straight) == begun | rest and list(begun) == [1, 2, 3, 4, 5] and 5 not in rest


@full
def test_a_full_store_ends_a_run_that_saves_shards(train, tmp_path):
    def fill(script):
        def full_disk(self, plan, planner):
            raise OSError(errno.ENOSPC, "No space left on device")

        if os.environ["RANK"] == "1":
            dcp.FileSystemWriter.write_data = full_disk

    url = f"file://{tmp_path / 'saved'}"
    ended = train(FSDP, FLAG, url, "--save-every", 3, "--output-dir", tmp_path / "r", before=fill)
    says = f"cannot write the checkpoint {url}/step-00000003: No space left on device"
    assert_one_line(ended, says, name_of(FSDP))
    assert not list((tmp_path / "saved").iterdir())


# checkpoints, of one process


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


def test_shards_are_saved_and_read(directory, single):
    def store(value):
        model = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(model.weight, value)
        optimizer = torch.optim.AdamW(model.parameters())
        return checkpoint.Sharded(model, optimizer, model.state_dict(), 60)

    checkpoint.save(directory, 1, store(1.0), {})
    checkpoint.save(directory, 2, store(2.0), {}, background=True).result()
    other = store(0.0)
    path, facts = checkpoint.find(directory, Recorder(), other)
    checkpoint.load(path, other)
    assert facts["step"] == 2 and other.model.weight.eq(2).all()
    assert sorted(facts["files"]) == [".metadata", "__0_0.distcp", "rng.pt"]
    with (path / ".metadata").open("rb") as file:
        assert b"dist_common" not in file.read(), "PyTorch alone reads it"


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("state.pt", lambda content: bytes([content[0] ^ 1]) + content[1:], "truncated or altered"),
        ("state.pt", lambda content: content[: len(content) // 2], "truncated or altered"),
        ("manifest.json", lambda content: content[:-9], "incomplete or damaged"),
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_is_used(directory, single, name, damage, says):
    save(directory, 1, 2)
    path, recorder = directory / "step-00000002", Recorder()
    with (path / name).open("rb") as file:
        content = damage(file.read())
    with (path / name).open("wb") as file:
        file.write(content)
    assert newest(directory, recorder) == (1, 1.0)
    (line,) = recorder.warned
    assert f"{path}: {says}" in line
    save(directory, 2)
    assert newest(directory) == (2, 2.0), "it is written anew"


def test_a_save_killed_at_any_moment_leaves_the_checkpoint_before(tmp_path):
    directory = Remote(f"store://{tmp_path / 'saved'}", FLAG)
    with group_of_one():
        save(directory, 1, 2)
    operations, died = 0, -signal.SIGKILL
    while died:

        def write(_, operations=operations):
            Store.dies_in = operations
            with group_of_one():
                save(directory, 3)

        (died,) = fork_ranks(write, 1, tmp_path / f"fork-{operations}", 60, True).codes
        assert died in (0, -signal.SIGKILL)
        with group_of_one():
            assert newest(directory)[0] in ((2, 3) if died else (3,))
        operations += 1
    assert operations > 6


def test_a_full_disk_is_named_and_the_last_good_checkpoint_stays(tmp_path, single):
    directory = Remote(f"file://{tmp_path / 'saved'}", FLAG)
    save(directory, 1)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, unlimited[1]))
    try:
        with pytest.raises(cli.UsageError, match=f"{directory}/step-00000002: File too large$"):
            save(directory, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-00000001"]
    assert newest(directory) == (1, 1.0)


# refused


@pytest.mark.parametrize(
    ("path", "argv", "says"),
    [
        (DDP, "--tokens undriven://b/t", "--tokens undriven://b/t: Install no_such_package"),
        (DDP, "--tokens memory://t", "--tokens memory://t: "),
        (FSDP, "--checkpoints undriven://b/r --output-dir r",
         "--checkpoints undriven://b/r: Install no_such_package"),
        (FSDP, "--checkpoints nothing://b/r --output-dir r", "Protocol not known: nothing"),
        (FSDP, "--checkpoints file:/// --output-dir r", "file:///: must be the URL of"),
        (FSDP, "--checkpoints r --output-dir r", "--checkpoints r: must be the URL"),
        (FSDP, "--checkpoints memory://r", "--checkpoints needs --output-dir"),
        (FSDP, "--output-dir memory://r", "--output-dir memory://r: must be a local folder"),
        (MAKE, f"{__file__} --to memory://r", "--to memory://r: must be a local folder"),
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
    assert_one_line(ended, says, name_of(path))
    assert not (tmp_path / "r").exists()


def test_a_store_that_is_not_empty_is_refused_without_resume(run_script, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "of somebody else").write_text("")
    ended = run_script(DDP, FLAG, f"file://{tmp_path / 'saved'}", "--output-dir", tmp_path / "run")
    assert_one_line(ended, "is not empty: name another folder, or add --resume", name_of(DDP))


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed")
def test_the_package_for_s3_is_named(run_script):
    ended = run_script(DDP, "--tokens", "s3://bucket/tokens")
    assert_one_line(ended, "--tokens s3://bucket/tokens: Install s3fs", name_of(DDP))


def test_a_store_that_sends_too_little_is_told(tmp_path, monkeypatch):
    (tmp_path / "tokens.bin").write_bytes(bytes(20))
    numbers = Ranges(Remote(f"file://{tmp_path}/tokens.bin", "--tokens"), "<u2")
    assert len(numbers[8:12]) == 2  # as a memory-mapped file: up to its end
    kind = LocalFileSystem
    monkeypatch.setattr(kind, "cat_file", lambda self, path, start, end: bytes(3))
    with pytest.raises(cli.UsageError, match="--tokens file://.*3 came of bytes 4 to 12"):
        numbers[2:6]


def test_what_a_driver_raises_of_its_own_is_one_line():
    class NoSuchBucket(Exception):  # no OSError: botocore's are none
        pass

    directory = Remote("memory://raises/checkpoints", "--checkpoints")
    said = pytest.raises(cli.UsageError, match="cannot write the checkpoint memory://.*: not there")
    with group_of_one(), said, checkpoint.sealed(directory, 1, {}):
        raise NoSuchBucket("not there")
