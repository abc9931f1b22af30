"""The templates on legacy_common: each stops, saves and resumes alike."""

import argparse
import errno
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import REPO, assert_one_line, fork_ranks, load_script, results_of
from helpers_01 import ask_to_stop_in, die_in, largest_difference, steps_in, wait_for
from helpers_03 import SMALL_MODEL, config_of, deepspeed_in_the_parent
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from legacy_common import checkpoint, cli, data, job, models, report

FINETUNE = "02-fsdp/fsdp_finetune.py"
DEEPSPEED = "03-deepspeed/deepspeed_train.py"
HYBRID = "05-advanced/hybrid_parallelism.py"
SHARDED = [FINETUNE, HYBRID]
KEYS = {
    "final_loss", "step_time_ms", "step_times_ms", "tokens_per_second", "tokens_per_step", "mfu",
    "cpu_time_per_step_ms", "memory_gib", "memory_gib_per_rank", "peak_memory_gib",
    "peak_memory_gib_per_rank", "collectives_per_step", "bytes_sent_per_step",
}  # fmt: skip
full, gpu_ready = pytest.mark.full, pytest.mark.gpu_ready
NARROW = models.TransformerConfig(256, 32, 2, 4, 2, 88, 64)


@pytest.fixture(scope="module", autouse=True)
def deepspeed_is_imported():
    with deepspeed_in_the_parent():
        yield


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny model in Hugging Face's files, which fsdp_finetune.py starts from."""
    import transformers

    assert transformers.LlamaForCausalLM  # imported now, so that no fork has to
    folder = tmp_path_factory.mktemp("model") / "tiny"
    script = load_script(FINETUNE)

    def make(rank):
        sys.argv = [FINETUNE, "--make-tiny", str(folder)]
        cli.run(script.main)

    made = fork_ranks(make, 1, folder.with_name("fork"), 120, True)
    assert made.codes == [0], made.stderr
    pairs = [{"prompt": f"{n}?", "answer": "abcdefghij"[: 2 + n % 9]} for n in range(60)]
    folder.with_name("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return folder


def model_and_pairs(request) -> list[str]:
    folder = request.getfixturevalue("model_folder")
    return ["--model", str(folder), "--data", str(folder.with_name("pairs.jsonl"))]


@pytest.fixture
def train(run_script, tmp_path, request):
    """Train a template, or a file cut down from it, on a small model: 12 steps by default."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(97, 123)) * 120)

    def run(template, *argv, script=None, changes=(), ranks=2, **options):
        def before(module):
            models.PRESETS["tiny"] = SMALL_MODEL
            for change in changes:
                change(module)

        arguments = ["--micro-batch-size", 2, "--seq-len", 32, "--max-steps", 12, "--lr", 1e-2,
                     "--warmup-steps", 2, "--log-every", 1]  # fmt: skip
        if template == FINETUNE:
            arguments += model_and_pairs(request)
        elif "--tokens" not in argv:
            arguments += ["--text-file", text]
        if template == DEEPSPEED:  # a file that was cut down stands elsewhere
            arguments += ["--deepspeed_config", config_of(2)]
        path = str(script or template)
        return run_script(path, *arguments, *argv, world_size=ranks, before=before, **options)

    return run


# a step, as a GPU would see it


class HostReads(TorchDispatchMode):
    """Count what makes the host wait for a device: numbers and sizes that leave a tensor."""

    KINDS = (
        torch.ops.aten._local_scalar_dense.default,  # item(), float(), `if tensor`
        torch.ops.aten.nonzero.default,  # and so masks in brackets
        torch.ops.aten.equal.default,
    )
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.KINDS:
            callers = {frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)}
            # A mesh's table of ranks lies on the host.
            self.count += not any(name.endswith("/device_mesh.py") for name in callers)
        return func(*args, **(kwargs or {}))


class OnHost(torch.Tensor):
    """A batch in the host's pinned memory: it moves as it is, without a wait, or the test fails.

    Of what an operation makes of it no GPU could copy in the background: the memory is another, or
    not in one piece. And no operation takes it together with what is on the device.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        to = [*args[1:], kwargs.get("device")]
        if func is torch.Tensor.cuda or (
            func is torch.Tensor.to and any(isinstance(x, torch.device | str) for x in to)
        ):
            assert hasattr(args[0], "pinned"), "not as the loader has pinned it"
            assert kwargs.get("non_blocking"), "the host waits for this copy"
            return args[0].as_subclass(torch.Tensor)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        assert all(isinstance(x, cls) for x in given), f"{func} of host and device"
        return super().__torch_function__(func, types, args, kwargs)


def pinned(tensor):
    on_host = tensor.as_subclass(OnHost)
    on_host.pinned = True
    return on_host


def read_no_more_than(per_micro_batch):
    """Return what fails a run whose steps read more, the optimizer's part included.

    Or that copy a batch with a wait. None: the reads are not this script's own.
    """

    def watch(script):
        steps = job.Job.steps

        def watched(self, *args, **options):
            for step in steps(self, *args, **options):
                step.micro_batches = [[*map(pinned, batch)] for batch in step.micro_batches]
                with HostReads() as reads:
                    yield step
                counted = len(step.micro_batches) * (per_micro_batch or 0)
                assert per_micro_batch is None or reads.count == counted

        job.Job.steps = watched

    return watch


@gpu_ready
@pytest.mark.parametrize(
    ("template", "per_micro_batch"),
    # On the host, before a micro-batch leaves it: its tokens are counted, and where pairs differ in
    # length it is cut to the longest. DeepSpeed's engine reads more, by itself.
    [(HYBRID, 0), (FINETUNE, 4), (DEEPSPEED, None)],
)  # fmt: skip
def test_a_step_waits_for_nothing_that_the_device_does(train, template, per_micro_batch):
    change = read_no_more_than(per_micro_batch)
    flags = ("--grad-accum-steps", 3, "--max-steps", 2, "--parity-steps", 0)
    ended = train(template, *flags, changes=[change])
    assert ended.codes == [0, 0], ended.stderr


@gpu_ready
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_batches_are_pinned_where_a_gpu_fetches_them(monkeypatch, kind):
    monkeypatch.setattr(job.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(job, "measure", mock.Mock())
    monkeypatch.setattr(data, "job_batches", lambda *given: given[-1])
    args = argparse.Namespace(seed=0, log_every=10, num_workers=0, checkpoints=None, resume=False)
    report = SimpleNamespace(device=torch.device(kind), output=None)
    made = job.Job(args, report, range(4), None, None)
    assert made.batches == (kind == "cuda")


# what a GPU computes in


def on_a_gpu_that_has_bf16(script):
    """Have the device be one where bf16-mixed is taken; bfloat16 computes on a CPU too."""
    script.runtime.default_precision = report.default_precision = lambda device: "bf16-mixed"


@pytest.mark.parametrize(
    ("template", "argv", "taken"),
    [
        (HYBRID, (), "bf16-mixed"),
        (DEEPSPEED, (), "bf16-mixed"),
        (DEEPSPEED, ("--deepspeed_config", {"bf16": {"enabled": False}}), "32-true"),
    ],
)
def test_the_device_chooses_the_precision_that_nobody_did(
    train, tmp_path, template, argv, taken
):  # fmt: skip
    """Once, before anything is made: said, proven and written as if it had been given."""
    *flags, own = argv or [None]
    if isinstance(own, dict):
        config = json.loads(Path(config_of(2)).read_text()) | own
        own = tmp_path / "config.json"
        own.write_text(json.dumps(config))
    argv = ("--max-steps", 2, "--eval-every", 0, *flags, *([own] if own else []))
    ended = train(
        template, *argv, "--output-dir", tmp_path / "run", changes=[on_a_gpu_that_has_bf16]
    )
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert taken in ended.stdout.splitlines()[1]
    assert results_of(tmp_path / "run")["args"]["precision"] == taken
    manifest = tmp_path / "run" / "checkpoints" / "step-00000002" / "manifest.json"
    assert json.loads(manifest.read_text())["settings"]["precision"] == taken


# stopped, and resumed: one job's loop is everybody's, so two of the five are quick


@pytest.mark.parametrize(
    "template", [DEEPSPEED, *(pytest.param(t, marks=full) for t in (FINETUNE, HYBRID))]
)
def test_a_run_that_is_stopped_or_killed_resumes_bitwise(train, tmp_path, template):
    """SIGTERM and SIGUSR1 to one rank alone, no checkpoint due; then SIGKILL to all ranks."""
    straight, stopped, killed = (tmp_path / name for name in ("straight", "stopped", "killed"))
    arguments = ("--max-steps", 8, "--eval-every", 4, "--num-workers", 1, "--resume",
                 "--output-dir")  # fmt: skip
    seldom = ("--save-every", 5000)
    looks = ("--logger", "tensorboard", "--profile", "3-4")
    whole = train(template, *seldom, *looks, *arguments, straight)
    assert whole.codes == [0, 0], whole.stdout + whole.stderr
    assert "no checkpoint in" in whole.stdout, "--resume in a new folder starts at the start"
    slow = [("--async-save",), [write_slowly]] if template in SHARDED else [(), []]
    for step, stop in ((3, signal.SIGTERM), (6, signal.SIGUSR1)):
        changes = [on_rank(1, ask_to_stop_in(step, stop)), *slow[1]]
        asked = train(template, *seldom, *slow[0], *arguments, stopped, changes=changes)
        assert asked.codes == [0, 0], asked.stdout + asked.stderr
        assert asked.stdout.splitlines()[-1].endswith(f"after step {step}, asked to stop, saved")
    again = train(template, *seldom, *arguments, stopped)
    assert again.codes == [0, 0], again.stdout + again.stderr
    often = ("--save-every", 3)
    ended = train(template, *often, *arguments, killed, changes=[die_in(5)])
    assert ended.codes == [-signal.SIGKILL] * 2, ended.stdout + ended.stderr
    again = train(template, *often, *arguments, killed)
    assert again.codes == [0, 0] and "at step 3," in again.stdout, again.stdout + again.stderr
    for run in (stopped, killed):
        assert largest_difference(straight, run) == 0.0, "bitwise"
        assert steps_in(straight, "test_loss") == steps_in(run, "test_loss")
    assert sorted(steps_in(straight, "test_loss")) == [4, 8]
    finished = train(template, *often, *arguments, killed)
    assert finished.codes == [0, 0] and "has all 8 steps: nothing to do" in finished.stdout
    assert any((straight / "tensorboard").iterdir())
    for rank in range(2):
        trace = json.loads((straight / "profile" / f"trace-rank{rank}.json").read_text())
        traced = {event["name"] for event in trace["traceEvents"]}
        assert {name for name in traced if name.startswith("step ")} == {"step 3", "step 4"}
        assert "gloo:all_reduce" in traced or "c10d::allreduce_" in traced, "what a step calls"
    metrics = results_of(straight)["metrics"]
    assert set(metrics) >= KEYS, KEYS - set(metrics)
    assert set(metrics["memory_gib"]) == {"before", "weights", "gradients", "optimizer"}


def write_slowly(script):
    """In the background, what a run that ends has to wait for."""
    write = checkpoint.Sharded.write

    def slow(self, folder, state=None):
        time.sleep(1)
        write(self, folder, state)

    checkpoint.Sharded.write = slow


def write_between_steps(script):
    """Write in the step after the copy, and let go of it for the seal in the step after that."""
    write, record, taken, written = checkpoint.Sharded.write, job.Step.record, [], []

    def noted(self, *results):
        record(self, *results)
        taken.append(self.number)
        if self.number in (4, 7, 10) and taken[0] < self.number:
            wait_for(lambda: self.number - 1 in written)

    def held(self, folder, state=None):
        saved = int(folder.name.removeprefix(".partial-"))
        if saved < 12:  # after the last step training waits
            wait_for(lambda: taken[-1] > saved)
        write(self, folder, state)
        written.append(saved)
        if saved < 12:
            wait_for(lambda: taken[-1] > saved + 1)

    job.Step.record, checkpoint.Sharded.write = noted, held


def seal_before_the_write_has_ended(script):
    write = checkpoint.Sharded.write

    def handed_on(self, *args, **state):
        threading.Thread(target=write, args=(self, *args), kwargs=state, daemon=True).start()

    checkpoint.Sharded.write = handed_on


def kill_while_it_writes_and_resume(train, tmp_path, template, *sabotage):
    """SIGKILL to all when step 6 is written and not sealed, in step 8; step 3 is whole."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    argv = ("--save-every", 3, "--eval-every", 0, "--resume", "--output-dir")
    assert train(template, *argv, straight).codes == [0, 0]
    changes = [die_in(8), write_between_steps, *sabotage]
    ended = train(template, *argv, killed, "--async-save", changes=changes)
    assert ended.codes == [-signal.SIGKILL] * 2, ended.stdout + ended.stderr
    assert 7 in steps_in(killed), "trained on"
    names = {path.name for path in (killed / "checkpoints").iterdir()}
    assert names == {"step-00000003", ".partial-00000006"}
    assert list((killed / "checkpoints" / ".partial-00000006").glob("*.distcp"))
    again = train(template, *argv, killed, "--async-save", changes=[write_between_steps])
    assert again.codes == [0, 0], again.stdout + again.stderr
    assert "resuming from" in again.stdout and "at step 3," in again.stdout
    assert largest_difference(straight, killed) == 0.0, "bitwise"
    names = {path.name for path in (killed / "checkpoints").iterdir()}
    assert names == {"step-00000009", "step-00000012"}


@full
def test_training_goes_on_while_shards_are_written_and_a_kill_loses_no_checkpoint(train, tmp_path):
    kill_while_it_writes_and_resume(train, tmp_path, HYBRID)


@full
def test_sabotage_of_a_save_in_the_background_is_found(train, tmp_path):
    with pytest.raises(AssertionError):
        kill_while_it_writes_and_resume(train, tmp_path, HYBRID, seal_before_the_write_has_ended)


def fill_the_disk(script):
    def full_disk(self, plan, planner):
        raise OSError(errno.ENOSPC, "No space left on device")

    dcp.FileSystemWriter.write_data = full_disk


@full
def test_a_disk_that_is_full_ends_a_run_that_saves_shards(train, tmp_path):
    folder = tmp_path / "run"
    argv = ("--save-every", 3, "--async-save", "--output-dir", folder)
    ended = train(HYBRID, *argv, changes=[on_rank(1, fill_the_disk)])
    says = f"cannot write the checkpoint {folder}/checkpoints/step-00000003: No space left on"
    assert_one_line(ended, says, "hybrid_parallelism.py")
    assert not checkpoint.found(folder / "checkpoints")


def on_rank(number, change):
    """Make a change on one rank alone."""
    return lambda script: change(script) if os.environ["RANK"] == str(number) else None


# from a folder of transformers to a folder of transformers


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder that transformers wrote: bfloat16, several files, nothing as our presets have it."""
    import transformers

    shape = transformers_shape(NARROW)
    rotary = {"rope_type": "default", "rope_theta": 5e5}
    config = transformers.LlamaConfig(**shape, rope_parameters=rotary, rms_norm_eps=1e-3)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = transformers.LlamaForCausalLM(config)
        for weight in model.parameters():  # large enough for a loss to show what is mixed up
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.2)
            else:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
    folder = tmp_path_factory.mktemp("llama")
    model.bfloat16().save_pretrained(folder, max_shard_size="20KB")
    (folder / "tokenizer_config.json").write_text("{}")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@torch.no_grad()
def shift(weights):
    """Move the rows of shards by one, on rank 1 alone."""
    for weight in weights.values() if os.environ["RANK"] == "1" else []:
        shard = models.local(weight)
        shard.copy_(shard.roll(1, 0))


def shift_what_is_loaded(script):
    load = script.hf.load

    def shifted(model, *args):
        load(model, *args)
        shift(dict(model.named_parameters()))

    script.hf.load = shifted


def shift_what_is_exported(script):
    plain = script.hf.dcp.save

    def shifted(named, storage_writer, **options):
        named = {name: weight.clone() for name, weight in named.items()}
        shift(named)
        plain(named, storage_writer=storage_writer, **options)

    script.hf.dcp.save = shifted


def mix_up_two_names(script):
    """A round trip would not see it, nor files that are read again."""
    script.hf.HF_NAMES |= {"gate": "mlp.up_proj", "up": "mlp.gate_proj"}


GRADIENT = "gradient: relative error against one process"


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (shift_what_is_loaded, {"weights equal in the files", GRADIENT, "loss"}),
        pytest.param(mix_up_two_names, {GRADIENT, "loss"}, marks=full),
        pytest.param(shift_what_is_exported, {"exported weights equal in the files"}, marks=full),
    ],
)
def test_sabotage_of_a_folder_fails_a_check(train, tmp_path, llama, sabotage, failing):
    argv = ("--init-from", llama, "--export-to", tmp_path / "there", "--max-steps", 1,
            "--parity-steps", 1, "--save-every", 0, "--output-dir", tmp_path / "run")  # fmt: skip
    ended = train(HYBRID, *argv, changes=[sabotage])
    assert 1 in ended.codes, ended.stdout + ended.stderr
    failed = {check["name"] for check in results_of(tmp_path / "run")["checks"] if not check["ok"]}
    assert failed - {"gradient norm"} == failing, ended.stdout


def config_with(**fields):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return change


def damaged(folder):
    path = min(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("change", "argv", "says"),
    [
        (config_with(head_dim=16), "", "head_dim is 16, not 8 as our model has it"),
        *(
            pytest.param(*row, marks=full)
            for row in (
                (config_with(quantization_config={"bits": 4}), "", "quantization_config is"),
                (config_with(vocab_size=255), "", "vocab_size is 255: a token here is a"),
                (config_with(num_hidden_layers=3), "", "Missing key in checkpoint"),
                (config_with(intermediate_size=96), "", "Size mismatch between saved"),
                (damaged, "", "/folder: rank 0: "),
                (config_with(), "--export-to tests", "--export-to tests is not empty"),
            )
        ),
    ],
)
def test_a_folder_that_cannot_be_taken_is_refused(
    train, tmp_path, llama, monkeypatch, change, argv, says
):  # fmt: skip
    monkeypatch.chdir(REPO)
    shutil.copytree(llama, tmp_path / "folder")
    change(tmp_path / "folder")
    ended = train(HYBRID, "--init-from", tmp_path / "folder", *argv.split(), ranks=1)
    assert_one_line(ended, says, "hybrid_parallelism.py")


@full
def test_a_resumed_run_keeps_its_shape(train, tmp_path, llama):
    """Rotations and the norms' epsilon have no tensor that a checkpoint would refuse."""
    argv = (HYBRID, "--max-steps", 1, "--output-dir", tmp_path / "run")
    assert train(*argv, "--init-from", llama, ranks=1).codes == [0]
    ended = train(*argv, "--resume", ranks=1)
    says = f"--preset is tiny here and {llama} in the checkpoint, and their shapes differ"
    assert_one_line(ended, says, "hybrid_parallelism.py")


def transformers_shape(config):
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_seq_len, "attn_implementation": "sdpa",
    }  # fmt: skip


@full
@pytest.mark.parametrize(
    ("template", "ranks", "seed", "lr", "layout"),
    [
        (FINETUNE, 3, 9, 1e-3, ""),
        (DEEPSPEED, 3, 5, 1e-3, ""),
        (HYBRID, 6, 7, 1e-3, "--dp 3 --pp 2 --data-parallel full"),
    ],
)
def test_a_right_run_passes(train, template, ranks, seed, lr, layout):
    """Where ranks divide no size evenly, from other weights, at other learning rates."""
    argv = ["--max-steps", 2, "--seq-len", 16, "--seed", seed, "--lr", lr, *layout.split()]
    ended = train(template, *argv, ranks=ranks)
    assert ended.codes == [0] * ranks, ended.stdout + ended.stderr


# a copy


# main of a module that stands for a copy: the copy is to find its own legacy_common, and no other
