"""Module 02: a checkpoint is whole or it is not there, and whoever loads it trains the same."""

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_one_line, load_script, results_of

from dist_common import models

CHECKPOINT = "02-fsdp/fsdp_checkpoint.py"
BATCH = ("--global-batch-size", 12)  # which 1, 2, 3 and 4 ranks can deal
SAVE = ("save", *BATCH, "--max-steps", 2, "--save-every", 1)
LOAD = ("load", "--max-steps", 2)
NEWEST = "step-00000002"
full = pytest.mark.full
with_transformers = pytest.mark.xdist_group("transformers")  # one worker imports it


@pytest.fixture
def run(run_script):
    """Run the script on a model and sequences of half the length, which is quicker."""

    def run(*argv, before=None, **options):
        def change(script):
            two_layers = replace(models.PRESETS["tiny"], num_layers=2)
            models.PRESETS["tiny"] = two_layers
            models.PRESETS["tied"] = replace(two_layers, tied_embeddings=True)
            script.SEQ_LEN = 32
            if before:
                before(script)

        return run_script(CHECKPOINT, *argv, before=change, **options)

    return run


@pytest.fixture(scope="module")
def once():
    return {}


@pytest.fixture
def saved(run, once, tmp_path, tmp_path_factory):
    """A copy of a folder with two checkpoints, which two ranks have saved as shards."""
    if not once:
        once["folder"] = tmp_path_factory.mktemp("once") / "saved"
        assert_ok(run(*SAVE, "--dir", once["folder"], world_size=2))
    return shutil.copytree(once["folder"], tmp_path / "saved")


def assert_ok(ended, says=""):
    assert set(ended.codes) == {0}, ended.stdout + ended.stderr
    assert says in ended.stdout, ended.stdout


def tensors_of(folder):
    names = [path.name for path in folder.iterdir()]
    return load_script(CHECKPOINT).tensors_of(SimpleNamespace(folder=folder, files=names))


# Going on: every change of ranks and of strategy


@pytest.mark.parametrize(
    ("world_size", "saved_by", "loads"),
    [
        (2, ("--kind", "full"), [(3, "fsdp")]),
        (2, ("--kind", "async"), [(2, "tp-fsdp"), (1, "ddp")]),
        *(
            pytest.param(*case, marks=full)
            for case in (
                (4, (), [(2, "fsdp"), (3, "fsdp"), (2, "ddp"), (4, "tp-fsdp")]),
                (4, ("--strategy", "tp-fsdp"), [(2, "fsdp")]),
                (2, ("--strategy", "ddp"), [(3, "fsdp")]),
                (2, ("--kind", "full"), [(1, "ddp"), (4, "tp-fsdp")]),
                (2, ("--kind", "async"), [(1, "fsdp")]),
            )
        ),
    ],
)
def test_other_ranks_and_strategies_go_on_as_one_process(
    run, tmp_path, world_size, saved_by, loads
):
    """The script compares with a process that ran from the first step; tolerance 1e-5."""
    assert_ok(run(*SAVE, "--dir", tmp_path / "run", *saved_by, world_size=world_size))
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["step-00000001", NEWEST]
    for ranks, strategy in loads:
        ended = run(*LOAD, "--dir", tmp_path / "run", "--strategy", strategy, world_size=ranks)
        assert_ok(ended, f"resuming from {tmp_path}/run/{NEWEST}")
        assert ended.stdout.splitlines()[-1].endswith("after step 4")


def test_shards_to_one_file_and_back(run, saved, tmp_path):
    """The script compares bitwise, with PyTorch's own converter; and both can be gone on from."""
    kinds = ("2 shard(s)", "one file", "3 shard(s)")
    for number, ranks in ((1, 2), (2, 3)):
        folders = ("--dir", tmp_path / f"{number}", "--to", tmp_path / f"{number + 1}")
        if number == 1:
            saved.rename(tmp_path / "1")
        ended = run("convert", *folders, world_size=ranks)
        for folder in (number, number + 1):
            line = f"{folder}/{NEWEST}\n{NEWEST} holds {kinds[folder - 1]}\n"
            assert_ok(ended, line)
        assert_ok(run(*LOAD, "--dir", tmp_path / f"{number + 1}"), "after step 4")


@full
def test_compare_runs_as_its_reader_would(torchrun, tmp_path):
    ended = torchrun(CHECKPOINT, "--output-dir", tmp_path / "run", timeout_s=180)
    assert_ok(ended, "OK: 10 checks passed")
    kinds, times = ("sharded", "full", "async"), ("stall", "on_disk", "load")
    metrics = results_of(tmp_path / "run")["metrics"]
    assert set(metrics) == {f"{kind}_{name}_ms" for kind in kinds for name in times}


@pytest.mark.parametrize(
    ("world_size", "preset"), [(3, "tied"), pytest.param(1, "tiny", marks=full)]
)
def test_compare_on_other_numbers_of_ranks(run, world_size, preset):
    options = ("--max-steps", 2, *BATCH, "--preset", preset)
    assert_ok(run("compare", *options, world_size=world_size))


# Killed in the middle of the second save


def end_process(*_):
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10)


def kill_in_a_shard(script, armed):
    from torch.distributed.checkpoint import filesystem

    write, calls = filesystem._write_item, []

    def killing(*args, **kwargs):
        calls.extend(armed)
        return end_process() if len(calls) == 20 else write(*args, **kwargs)

    filesystem._write_item = killing


def kill_in_the_file(script, armed):
    write = torch.save

    def killing(state, file):
        write(state, file)
        if armed:
            file.truncate(100_000)
            end_process()

    torch.save = killing


def kill_before_the_manifest(script, armed):
    gather = script.checkpoint.gather
    script.checkpoint.gather = lambda *args: end_process() if armed else gather(*args)


def kill_before_the_rename(script, armed):
    rename = Path.rename
    Path.rename = lambda *args: end_process() if armed else rename(*args)


def kill_after_the_rename(script, armed):
    flush = script.checkpoint.flush
    script.checkpoint.flush = lambda path: (
        end_process() if (path / NEWEST).exists() else flush(path)
    )


@pytest.mark.parametrize(
    ("kind", "kill", "ranks", "left"),
    [
        ("sharded", kill_before_the_rename, "0", 1),
        *(
            pytest.param(*case, marks=full)
            for case in (
                ("sharded", kill_in_a_shard, "01", 1),
                ("sharded", kill_in_a_shard, "1", 1),
                ("sharded", kill_before_the_manifest, "1", 1),
                ("sharded", kill_after_the_rename, "0", 2),
                ("full", kill_in_the_file, "0", 1),
                ("async", kill_in_a_shard, "01", 1),
                ("async", kill_before_the_rename, "0", 1),
            )
        ),
    ],
)
def test_a_save_that_is_killed_leaves_the_previous_checkpoint(
    run, tmp_path, kind, kill, ranks, left
):
    folder = tmp_path / "run"

    def before(script):
        armed = []
        sealed = script.checkpoint.sealed

        def arm(directory, step, *args):
            armed.extend([1] * (step == 2))
            return sealed(directory, step, *args)

        script.checkpoint.sealed = arm
        if os.environ["RANK"] in ranks:
            kill(script, armed)

    ended = run(*SAVE, "--kind", kind, "--dir", folder, world_size=2, before=before)
    assert -signal.SIGKILL in ended.codes and 0 not in ended.codes, ended.stdout + ended.stderr
    assert (folder / ".partial-00000002").exists() == (left == 1)
    ended = run(*LOAD, "--dir", folder)
    assert_ok(ended, f"resuming from {folder}/step-0000000{left}")
    assert ended.stderr == ""
    if kill == kill_before_the_rename:  # and the same command once more goes on
        assert_ok(run(*SAVE, "--dir", folder, world_size=2), "after step 3")
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["step-00000001", NEWEST, "step-00000003"]


@full
@pytest.mark.parametrize("kind", ["sharded", "async"])
def test_a_run_killed_at_any_moment_goes_on(run, tmp_path, kind):
    folder, delay = tmp_path / "run", random.uniform(0, 0.5)
    print(f"killed {delay:.3f} s after the first checkpoint")

    def kill(pids):
        deadline = time.monotonic() + 60
        while not (folder / "step-00000001").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(delay)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    ended = run(
        "save", *BATCH, "--kind", kind, "--dir", folder, "--max-steps", 500, "--save-every", 1,
        world_size=2, during=kill,
    )  # fmt: skip
    assert ended.codes == [-signal.SIGKILL] * 2, ended.stderr
    newest = max(path.name for path in folder.glob("step-*"))
    assert_ok(run(*LOAD, "--dir", folder), f"resuming from {folder}/{newest}")


@pytest.mark.parametrize("kind", ["full", "async", pytest.param("sharded", marks=full)])
def test_a_full_disk_is_one_line(run, tmp_path, kind):
    def before(script):
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))

    ended = run(*SAVE, "--kind", kind, "--dir", tmp_path / "run", world_size=2, before=before)
    says = "step-00000001: File too large" if kind == "full" else "cannot write a file: is the disk"
    assert_one_line(ended, says, "fsdp_checkpoint.py")
    assert not list((tmp_path / "run").glob("step-*"))


# Damaged

ALTERED = "truncated or altered"
INCOMPLETE = "incomplete or damaged"


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove_half(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("__1_0.distcp", flip_a_bit, f"{ALTERED} (__1_0.distcp does not match"),
        ("manifest.json", remove_half, f"{INCOMPLETE} (JSONDecodeError: "),
        *(
            pytest.param(*case, marks=full)
            for case in (
                ("__0_0.distcp", remove_half, f"{ALTERED} (__0_0.distcp does not match"),
                ("__1_0.distcp", Path.unlink, f"{INCOMPLETE} (FileNotFoundError: "),
                (".metadata", flip_a_bit, f"{ALTERED} (.metadata does not match"),
                ("manifest.json", Path.unlink, f"{INCOMPLETE} (FileNotFoundError: "),
            )
        ),
    ],
)
def test_a_damaged_file_is_named_and_the_previous_checkpoint_taken(run, saved, name, damage, says):
    damage(saved / NEWEST / name)
    ended = run(*LOAD, "--dir", saved, world_size=2)
    assert_ok(ended, f"resuming from {saved}/step-00000001")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"warning: skipped {saved}/{NEWEST}: {says}")
    assert name in line or "JSON" in line
    if damage == remove_half:  # saving goes on from there too, and puts a whole one in its place
        assert_ok(run(*SAVE, "--dir", saved, "--max-steps", 1), "after step 2")
        ended = run(*LOAD, "--dir", saved)
        assert_ok(ended, f"{NEWEST} holds 1 shard(s)")
        assert ended.stderr == ""


def test_when_all_are_damaged_each_is_named(run, saved):
    for step, damage in ((1, flip_a_bit), (2, Path.unlink)):
        damage(saved / f"step-0000000{step}" / "__1_0.distcp")
    for action in (LOAD, SAVE, ("convert", "--to", saved / "other")):
        ended = run(*action, "--dir", saved, world_size=2)
        assert_one_line(ended, "no checkpoint can be used: ", "fsdp_checkpoint.py")
        assert f"{NEWEST}: {INCOMPLETE} (FileNotFoundError: " in ended.stderr
        assert f"step-00000001: {ALTERED} (__1_0.distcp does not match" in ended.stderr


def test_dcp_itself_does_not_notice(run, saved):
    """What the checksums are for."""
    flip_a_bit(saved / NEWEST / "__1_0.distcp")

    def before(script):
        script.checkpoint._examine = lambda path, part: (
            json.loads((path / "manifest.json").read_text()),
            None,
        )

    ended = run(*LOAD, "--dir", saved, before=before)
    assert ended.stderr == "" and f"resuming from {saved}/{NEWEST}" in ended.stdout
    assert ended.codes in ([0], [1]), "as it happens: which bit it was decides"


# Hugging Face


@pytest.fixture
def transformers():
    module = pytest.importorskip("transformers")
    assert module.LlamaForCausalLM  # imported now, so that no fork has to
    return module


@with_transformers
@pytest.mark.parametrize(
    ("preset", "kind"), [("tied", "full"), pytest.param("tiny", "sharded", marks=full)]
)
def test_hugging_face_there_and_back(run, saved, tmp_path, transformers, preset, kind):
    """To the same logits, and back to the same bits and to a fresh Adam."""
    ours, theirs, back = saved, tmp_path / "theirs", tmp_path / "back"
    chosen = ("--preset", preset)
    if preset == "tied":
        ours = tmp_path / "ours"
        assert_ok(run(*SAVE, *chosen, "--kind", kind, "--dir", ours, world_size=2))
    assert_ok(run("export", *chosen, "--dir", ours, "--to", theirs, world_size=2))
    assert sorted(path.name for path in theirs.iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((theirs / "config.json").read_text())
    assert config["tie_word_embeddings"] == (preset == "tied")
    ended = run(
        "import", *chosen, *BATCH, "--strategy", "tp-fsdp", "--from", theirs, "--dir", back,
        world_size=2,
    )  # fmt: skip
    assert_ok(ended)
    before, after = tensors_of(ours / NEWEST), tensors_of(back / "step-00000000")
    weights = [name for name in before if isinstance(name, str)]
    assert len(weights) == 21 and all(torch.equal(before[name], after[name]) for name in weights)
    assert {tensor.item() for name, tensor in after.items() if name[1] == "step"} == {0.0}
    assert_ok(run(*LOAD, *chosen, "--dir", back, "--strategy", "ddp"), "after step 2")


# Sabotage


def forget_the_moments(script):
    restore = script.restore

    def forgetting(found, run, files):
        restore(found, run, files)
        for kept in run.optimizer.state.values():
            kept["exp_avg"].zero_()

    script.restore = forgetting


def read_a_shard_shifted(script):
    load = script.dcp.load

    def shifted(state, **options):
        load(state, **options)
        local = state["model"]["blocks.1.up.weight"].to_local()
        local.copy_(local.roll(1, 0))

    script.dcp.load = shifted


def forget_the_step(script):
    restore = script.restore

    def forgetting(found, run, files):
        restore(found, run, files)
        run.progress["step"] -= 1

    script.restore = forgetting


@pytest.mark.parametrize(
    "sabotage",
    [
        forget_the_moments,
        *(pytest.param(way, marks=full) for way in (read_a_shard_shifted, forget_the_step)),
    ],
)
def test_sabotage_of_going_on_fails_the_check(run, saved, sabotage):
    ended = run(*LOAD, "--dir", saved, before=sabotage)
    assert ended.codes == [1], ended.stderr
    assert ended.stdout.splitlines()[-1] == "FAILED: largest error of a loss"


def copy_nothing(script):
    def late(state, **options):
        def write():
            time.sleep(1.5)  # training goes on meanwhile
            script.dcp.save(state, **options)

        return SimpleNamespace(result=write)

    script.dcp.async_save = late


def write_the_weights_twice(script):
    save = script.dcp.save
    script.dcp.save = lambda state, **options: save(state | {"again": state["model"]}, **options)


def leave_it_all_to_rank_0(script):
    from torch.distributed.checkpoint import DefaultSavePlanner

    save, started = script.dcp.save, script.start
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    script.dcp.save = lambda state, **options: save(state, planner=planner, **options)
    script.start = lambda job, seed, strategy=None: started(job, seed, strategy and "ddp")


def let_ranks_train_apart(script):
    script.fully_shard = lambda module, mesh: module


@pytest.mark.parametrize(
    ("world_size", "sabotage", "failing"),
    [
        (1, write_the_weights_twice, ["sharded: MB in all", "sharded: MB by one rank"]),
        (2, let_ranks_train_apart, ["never stopped: largest error of a loss"]),
        pytest.param(1, copy_nothing, ["async: largest error of a loss"], marks=full),
        pytest.param(2, leave_it_all_to_rank_0, ["sharded: MB by one rank"], marks=full),
    ],
)
def test_sabotage_of_compare_fails_a_check(run, tmp_path, world_size, sabotage, failing):
    options = ("--max-steps", 2, *BATCH, "--output-dir", tmp_path / "run")
    ended = run("compare", *options, world_size=world_size, before=sabotage)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert failed[: len(failing)] == failing, ended.stdout


def permute_for_interleaved_rotation(script):
    """As the conversion of Meta's own files has to."""
    to_hf = script.to_hf

    def permuting(weights, config):
        named, heads = to_hf(weights, config), config.num_heads
        name = "model.layers.0.self_attn.q_proj.weight"
        rows = named[name].view(heads, -1, 2, named[name].shape[1])
        named[name] = rows.transpose(1, 2).reshape(named[name].shape).contiguous()
        return named

    script.to_hf = permuting


def swap_gate_and_up(script):
    script.HF_NAMES |= {"gate": "mlp.up_proj", "up": "mlp.gate_proj"}


def lose_a_weight(script):
    to_hf = script.to_hf
    script.to_hf = lambda *args: {k: v for k, v in to_hf(*args).items() if k != "lm_head.weight"}


@with_transformers
@pytest.mark.parametrize(
    ("action", "sabotage", "failing"),
    [
        ("export", permute_for_interleaved_rotation, ["largest difference of a logit"]),
        ("export", lose_a_weight, ["weights missing or not expected"]),
        ("convert", read_a_shard_shifted, ["tensors equal, bitwise"]),
        *(
            pytest.param(action, swap_gate_and_up, ["largest difference of a logit"], marks=full)
            for action in ("export", "import")
        ),
    ],
)
def test_sabotage_of_a_conversion_fails_a_check(
    run, saved, tmp_path, transformers, action, sabotage, failing
):
    flags = ("--dir", saved, "--to", tmp_path / "to")
    if action == "import":
        assert_ok(run("export", *flags))
        flags = ("--from", tmp_path / "to", "--dir", tmp_path / "back")
    ended = run(action, *flags, "--output-dir", tmp_path / "run", before=sabotage)
    assert ended.codes == [1], ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert set(failing) <= set(failed), ended.stdout


# Bad input


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    [
        (1, ("load",), "load needs --dir"),
        (1, ("export", "--dir", "x"), "export needs --to"),
        (1, ("import", "--dir", "x"), "import needs --from"),
        (2, ("load", "--dir", "nowhere"), "there is no checkpoint in nowhere"),
        (1, ("save", "--dir", "pyproject.toml"), "pyproject.toml/step-00000002: Not a directory"),
        (1, ("save", "--dir", "/proc/x"), "/proc/x/step-00000002: No such file or directory"),
        (2, ("compare", "--dir", "tests"), "--dir tests is not empty: name another folder"),
        (1, ("save", "--dir", "SAVED", "--strategy", "tp-fsdp"), "needs an even number of ranks"),
        (2, ("load", "--dir", "SAVED", "--preset", "124m"), "wk.weight is [64, 128] there, [768,"),
        (2, ("load", "--dir", "SAVED", "--preset", "four"), "(blocks.2.attention.wk.weight is mi"),
        (2, ("load", "--dir", "ODD"), "--global-batch-size 5 cannot be dealt evenly to 2 ranks"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(run, saved, monkeypatch, world_size, argv, says):
    monkeypatch.chdir(Path(__file__).parent.parent)

    def before(script):
        models.PRESETS["four"] = replace(models.PRESETS["tiny"], num_layers=4)

    if "ODD" in argv:
        odd = ("--global-batch-size", 5, "--max-steps", 1)
        assert_ok(run("save", "--dir", saved.with_name("odd"), *odd))
    folders = {"SAVED": saved, "ODD": saved.with_name("odd")}
    argv = [folders.get(word, word) for word in argv]
    ended = run(*argv, world_size=world_size, before=before)
    assert_one_line(ended, says, "fsdp_checkpoint.py")


@full
@with_transformers
def test_an_export_that_cannot_be_imported_says_why(run, saved, tmp_path, transformers):
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    assert_ok(run("export", "--dir", saved, "--to", theirs))
    flags = ("import", "--from", theirs, "--dir", back)

    def says(text, *more, **options):
        ended = run(*flags, *more, world_size=2, **options)
        assert_one_line(ended, text, "fsdp_checkpoint.py")

    says("config.json: vocab_size is 256, not 50257 as --preset has it", "--preset", "124m")
    config, weights = theirs / "config.json", theirs / "model.safetensors"
    content = config.read_text()
    config.write_text(content.replace('"default"', '"linear", "factor": 2.0'))
    says("'factor': 2.0}, not {'rope_type': 'default', 'rope_theta': 10000.0} as --preset has")
    config.write_text(content.replace('"llama"', '"mistral"'))
    says("config.json: model_type is mistral, not llama as --preset has it")
    remove_half(config)
    says("config.json describes no Llama: ")
    config.write_text(content.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    says("config.json: num_hidden_layers is 3, not 2 as --preset has it")
    config.write_text(content)
    remove_half(weights)
    says(f"import, {theirs}: rank ")
    weights.unlink()
    says("lm_head.weight")
    config.unlink()
    says("No such file or directory: '")

    def without_transformers(script):
        sys.modules["transformers"] = None

    says("pip install transformers", before=without_transformers)
