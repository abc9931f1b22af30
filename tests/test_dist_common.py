"""The shared module: what it promises, and what it does when things go wrong."""

import json
import os
import re
import resource
import signal
from argparse import Namespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import fork_ranks, free_port
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DistributedSampler
from torch.utils.flop_counter import FlopCounterMode

from dist_common import checkpoint, data, measure, models, runtime
from dist_common.console import Console, plot_training


@pytest.fixture
def environ():
    with mock.patch.dict(os.environ):
        yield os.environ


# runtime: who am I


@pytest.mark.parametrize(
    ("launcher", "variables", "place"),
    [
        ("python", {}, (0, 0, 1, 1)),
        (
            "torchrun",
            {"RANK": 5, "LOCAL_RANK": 1, "WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4,
             "MASTER_ADDR": "a", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "x"},
            (5, 1, 8, 4),
        ),
        ("environment", {"RANK": 1, "WORLD_SIZE": 2}, (1, 1, 2, 2)),
        (
            "srun",
            {"SLURM_PROCID": 5, "SLURM_LOCALID": 1, "SLURM_NTASKS": 8, "SLURM_STEP_NUM_TASKS": 8,
             "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[03-04]"},
            (5, 1, 8, 4),
        ),
        ("srun", {"SLURM_PROCID": 1, "SLURM_LOCALID": 1, "SLURM_NTASKS": 2}, (1, 1, 2, 2)),
        # A batch script's own process has SLURM_PROCID too, but no other process to wait for.
        ("python", {"SLURM_PROCID": 0, "SLURM_NTASKS": 8, "ENVIRONMENT": "BATCH"}, (0, 0, 1, 1)),
        (
            "mpirun",
            {"OMPI_COMM_WORLD_RANK": 1, "OMPI_COMM_WORLD_LOCAL_RANK": 1,
             "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_SIZE": 2},
            (1, 1, 2, 2),
        ),
        # mpirun under SLURM: its processes inherit what srun told mpirun's own daemon.
        (
            "mpirun",
            {"OMPI_COMM_WORLD_RANK": 1, "OMPI_COMM_WORLD_SIZE": 2, "SLURM_PROCID": 0,
             "SLURM_STEP_NUM_TASKS": 1},
            (1, 1, 2, 2),
        ),
    ],
)  # fmt: skip
def test_every_launcher_is_understood(environ, launcher, variables, place):
    environ.update({name: str(value) for name, value in variables.items()})
    world = runtime.discover()
    assert world.launcher == launcher
    assert (world.rank, world.local_rank, world.world_size, world.local_world_size) == place
    exported = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert tuple(int(environ[name]) for name in exported) == place
    assert environ["MASTER_ADDR"] == {"torchrun": "a"}.get(
        launcher, "gpu03" if "SLURM_STEP_NODELIST" in variables else "127.0.0.1"
    )


def test_slurm_ranks_agree_on_a_port_of_their_own(environ):
    ports = set()
    for job in range(100, 110):
        for rank in (0, 1):
            with mock.patch.dict(os.environ):
                environ.update(SLURM_JOB_ID=str(job), SLURM_PROCID=str(rank), SLURM_NTASKS="2")
                runtime.discover()
                ports.add((job, environ["MASTER_PORT"]))
    assert len(ports) == 10, "both ranks of a job must compute the same port"
    assert len({port for _, port in ports}) == 10, "jobs on one machine must not collide"


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' is not a number"),
        ({"RANK": "1(x2)", "WORLD_SIZE": "2"}, r"RANK='1\(x2\)' is not a number"),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
             "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            "MASTER_ADDR is not set",
        ),
    ],
)  # fmt: skip
def test_a_half_set_environment_is_refused(environ, variables, says):
    environ.update(variables)
    with pytest.raises(runtime.UsageError, match=says):
        runtime.discover()


def test_devices(environ, monkeypatch):
    def gpus(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    world = runtime.World(3, 3, 4, 4, "torchrun")
    gpus(4)
    assert runtime.pick_device("auto", world) == torch.device("cuda", 3)
    assert runtime.pick_device("cpu", world) == torch.device("cpu")
    gpus(1)
    # All ranks of the machine decide alike, whatever their own number.
    for rank in range(4):
        own = runtime.World(rank, rank, 4, 4, "torchrun")
        assert runtime.pick_device("auto", own) == torch.device("cpu")
    with pytest.raises(runtime.UsageError, match=r"4 ranks.*1 GPU.*--nproc-per-node=1"):
        runtime.pick_device("cuda", world)
    environ["SLURM_GPUS_PER_TASK"] = "1"
    bound = runtime.World(3, 3, 4, 4, "srun")
    assert runtime.pick_device("auto", bound) == torch.device("cuda", 0)
    gpus(0)
    with pytest.raises(runtime.UsageError, match="no GPU"):
        runtime.pick_device("cuda", world)


# runtime: how a script fails and ends


def _on_ranks_with_run(main, world_size, tmp_path, **options):
    def body(rank):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = port
        runtime.GRACE_S = 1.0
        runtime.run(main)

    port = str(free_port())
    return fork_ranks(body, world_size, tmp_path / "run", 30, **options)


def test_the_context_manager_ends_the_others_and_tells_once(tmp_path):
    def main():
        with runtime.init("cpu", timeout_s=20) as (world, _):
            if world.rank == 1:
                raise ValueError("shard 7 is\nempty")
            dist.all_reduce(torch.ones(1))  # waits for rank 1
        return 0

    ended = _on_ranks_with_run(main, 3, tmp_path, end_job_on_failure=False)
    assert ended.codes == [1, 1, 1]
    assert ended.seconds < 15, "the others waited for the timeout"
    (line,) = ended.stderr.splitlines()
    assert "rank 1: ValueError: shard 7 is empty (test_dist_common.py:" in line


def test_a_usage_error_on_one_rank_after_init_ends_all_with_one_line(tmp_path):
    def main():
        with runtime.init("cpu", timeout_s=20) as (world, _):
            if world.rank == 0:
                raise runtime.UsageError("--text-file nowhere.txt does not exist")
            dist.barrier()
        return 0

    ended = _on_ranks_with_run(main, 2, tmp_path, end_job_on_failure=False)
    assert ended.codes == [2, 1]
    assert ended.stderr.count("\n") == 1 and "--text-file nowhere.txt" in ended.stderr


def test_a_clean_run_says_nothing_and_returns_its_code(tmp_path):
    def main():
        with runtime.init("cpu") as (world, device):
            total = torch.tensor([float(world.rank)], device=device)
            dist.all_reduce(total)
            return 0 if total.item() == 1 else 7

    ended = _on_ranks_with_run(main, 2, tmp_path, end_job_on_failure=False)
    assert (ended.codes, ended.stderr) == ([0, 0], "")


# data


def test_digits_split_is_fixed_and_disjoint():
    images = data.load_digits()
    assert (len(images.train), len(images.test)) == (1437, 360)
    assert images.train.tensors[0].shape == (1437, 1, 8, 8)
    pixels = images.train.tensors[0]
    assert abs(pixels.mean()) < 0.02 and abs(pixels.std() - 1) < 0.02
    before = torch.get_rng_state()
    again = data.load_digits()
    assert torch.equal(images.test.tensors[0], again.test.tensors[0])
    assert torch.equal(before, torch.get_rng_state()), "loading data must not use up randomness"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_global_batch_holds_the_same_samples_on_any_number_of_ranks(world_size):
    samplers = [data.ShardedSampler(100, rank, world_size, seed=3) for rank in range(world_size)]
    per_rank = 12 // world_size
    for epoch in (0, 1):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        dealt = [list(sampler) for sampler in samplers]
        order = samplers[0].global_order().tolist()
        for step in range(8):
            start = step * per_rank
            batch = [i for indices in dealt for i in indices[start : start + per_rank]]
            assert sorted(batch) == sorted(order[step * 12 : step * 12 + 12])
        assert len({len(indices) for indices in dealt}) == 1
    samplers[0].set_epoch(0)
    assert samplers[0].global_order().tolist() != order, "an epoch must have an order of its own"


def test_a_sampler_resumes_mid_epoch_on_another_number_of_ranks():
    straight = data.ShardedSampler(100, 0, 1)
    straight.set_epoch(4)
    expected = list(straight)

    first = [data.ShardedSampler(100, rank, 2) for rank in range(2)]
    seen = []
    for sampler in first:
        sampler.set_epoch(4)
    for pair in list(zip(*first, strict=True))[:15]:
        seen += pair
        for sampler in first:
            sampler.advance(2)
    second = [data.ShardedSampler(100, rank, 5) for rank in range(5)]
    for sampler in second:
        sampler.load_state_dict(json.loads(json.dumps(first[0].state_dict())))
        sampler.set_epoch(4)
    for five in zip(*second, strict=True):
        seen += five
    assert seen == expected
    second[0].set_epoch(5)
    assert len(second[0]) == 20, "the next epoch starts from its beginning"


def test_more_ranks_than_samples_is_refused():
    with pytest.raises(runtime.UsageError, match="3 samples cannot be dealt to 4 ranks"):
        data.ShardedSampler(3, 0, 4)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_evaluation_counts_every_sample_once_where_distributed_sampler_does_not(world_size):
    parts = [data.evaluation_indices(10, rank, world_size) for rank in range(world_size)]
    assert sorted(torch.cat(parts).tolist()) == list(range(10))
    assert len(data.evaluation_indices(3, 6, 7)) == 0
    padded = [
        i
        for rank in range(world_size)
        for i in DistributedSampler(range(10), world_size, rank, shuffle=False)
    ]
    assert len(padded) == -(-10 // world_size) * world_size
    assert (sorted(padded) == list(range(10))) == (10 % world_size == 0)


# models


def test_small_cnn_has_the_documented_size_and_takes_both_image_sizes():
    model = models.SmallCNN()
    assert sum(p.numel() for p in model.parameters()) == 151_306
    for size in (8, 28):
        assert model(torch.zeros(2, 1, size, size)).shape == (2, 10)


# Published totals: the papers and model cards named beside PRESETS.
@pytest.mark.parametrize(
    ("preset", "total"),
    [
        ("1b", 1_235_814_400),
        ("llama2-7b", 6_738_415_616),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset, total):
    config = models.PRESETS[preset]
    assert config.num_parameters() == total
    with torch.device("meta"):
        model = models.Transformer(config)
    assert sum(p.numel() for p in model.parameters()) == total
    assert not list(model.buffers())


@pytest.mark.parametrize(("preset", "millions"), [("tiny", 0.8), ("124m", 123.6)])
def test_small_presets_have_the_size_of_their_name(preset, millions):
    config = models.PRESETS[preset]
    with torch.device("meta"):
        total = sum(p.numel() for p in models.Transformer(config).parameters())
    assert total == config.num_parameters() and abs(total / 1e6 - millions) < 0.05


def test_a_transformer_from_meta_is_the_one_built_at_once():
    torch.manual_seed(1)
    at_once = models.Transformer(models.PRESETS["tiny"])
    with torch.device("meta"):
        later = models.Transformer(models.PRESETS["tiny"])
    later.to_empty(device="cpu")
    later.load_state_dict(at_once.state_dict())
    tokens = torch.randint(0, 256, (2, 16))
    assert torch.equal(later(tokens), at_once(tokens))
    later.reset_parameters()
    assert abs(later.blocks[0].gate.weight.std().item() - 0.02) < 1e-3
    assert abs(later.blocks[0].down.weight.std().item() - 0.02 / 8**0.5) < 1e-3
    assert (later.norm.weight == 1).all()


def test_a_transformer_sees_the_past_and_its_distance_only():
    torch.manual_seed(0)
    config = models.PRESETS["tiny"]
    model = models.Transformer(config).eval()
    tokens = torch.randint(0, 256, (1, 12))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :8], after[0, :8]) and not torch.equal(before[0, 8:], after[0, 8:])
    # Rotary positions: only the distance between query and key enters their product.
    cos, sin = models.rotary_tables(32, 16, 10_000.0, "cpu")
    q, k = torch.randn(16), torch.randn(16)
    products = [
        models.rotate(q, cos[i], sin[i]) @ models.rotate(k, cos[i - 3], sin[i - 3])
        for i in (3, 20, 31)
    ]
    assert torch.allclose(torch.stack(products), products[0].expand(3), atol=1e-5)
    with pytest.raises(ValueError, match="257 tokens are more than the model's 256"):
        model(torch.zeros(1, 257, dtype=torch.int64))


def test_text_is_on_every_machine_and_cut_without_loss(tmp_path):
    text = data.load_text(max_bytes=100_000)
    assert text.shape == (100_000,) and b"import" in bytes(text.tolist())
    sequences = data.Sequences(text, seq_len=64)
    assert len(sequences) == 99_999 // 64
    inputs, targets = sequences[5]
    assert torch.equal(inputs[1:], targets[:-1]) and targets[-1] == sequences[6][0][0]

    (tmp_path / "own.txt").write_bytes(b"to be or not to be")
    assert bytes(data.load_text(str(tmp_path / "own.txt")).tolist()) == b"to be or not to be"
    (tmp_path / "empty.txt").touch()
    for name, says in (("none.txt", "No such file"), ("empty.txt", "is empty"), ("", "directory")):
        with pytest.raises(runtime.UsageError, match=says):
            data.load_text(str(tmp_path / name))
    with pytest.raises(runtime.UsageError, match="18 bytes are fewer than one sequence of 8"):
        data.Sequences(data.load_text(str(tmp_path / "own.txt")), seq_len=8, world_size=3)


def test_whole_lines_fill_sequences_unequally_and_lose_nothing():
    content = b"one\ntwo\n\na line of more than 12 bytes\nthe end"
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    sequences = data.Sequences(text, seq_len=12, whole_lines=True)
    predicted, lengths = b"", []
    for inputs, targets in sequences:
        counted = targets != data.IGNORED
        lengths.append(int(counted.sum()))
        assert counted[: lengths[-1]].all(), "filled up at the end"
        assert torch.equal(inputs[1 : lengths[-1]], targets[: lengths[-1] - 1])
        predicted += bytes(targets[counted].tolist())
    assert predicted == content[1:], "every byte but the first is predicted exactly once"
    assert sequences.lengths.tolist() == lengths == [9, 12, 12, 5, 6]


# checkpoint


class Recorder(Console):
    """A console that keeps its lines instead of printing them."""

    def __init__(self):
        super().__init__(True)
        self.said, self.warned = [], []

    def say(self, line=""):
        self.said.append(line)

    def warn(self, line):
        self.warned.append(line)


@pytest.fixture
def single(tmp_path):
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.fixture
def saved(tmp_path, single):
    """Three checkpoints of one model; its bias holds the step."""
    model = nn.Linear(3, 2)
    for step in (1, 2, 3):
        nn.init.constant_(model.bias, step)
        checkpoint.save(tmp_path / "ck", step, model, {"step": step}, keep=3)
    return tmp_path / "ck", model


def test_the_newest_checkpoint_is_loaded_and_old_ones_are_dropped(saved):
    folder, model = saved
    assert checkpoint.load_newest(folder, model, Recorder())["model"]["bias"].tolist() == [3, 3]
    checkpoint.save(folder, 4, model, {}, keep=2)
    assert [path.name for path in sorted(folder.iterdir())] == ["step-00000003", "step-00000004"]
    checkpoint.save(folder, 4, model, {"again": True}, keep=2)
    assert checkpoint.load_newest(folder, model, Recorder())["again"]
    # What is newer than the checkpoint just written, or not ours, is not counted and not removed.
    for other in ("step-00000009", "step-00000010", "step-00000001-copy"):
        (folder / other).mkdir()
    checkpoint.save(folder, 5, model, {}, keep=2)
    left = ["step-00000001-copy", *(f"step-000000{step:02d}" for step in (4, 5, 9, 10))]
    assert [path.name for path in sorted(folder.iterdir())] == left
    assert checkpoint.load_newest(folder / "none", model, Recorder()) is None


def _flip_a_bit(path):
    content = bytearray((path / "state.pt").read_bytes())
    weights = content.index(torch.full((2,), 3.0).numpy().tobytes())
    content[weights + 3] ^= 1
    (path / "state.pt").write_bytes(content)
    # PyTorch itself does not notice, which is why there is a checksum:
    loaded = torch.load(path / "state.pt", weights_only=True)
    assert loaded["model"]["bias"].tolist() != [3, 3]


def _truncate(path):
    content = (path / "state.pt").read_bytes()
    (path / "state.pt").write_bytes(content[: len(content) // 2])


def _other_model(path):
    checkpoint.save(path.parent, 3, nn.Linear(3, 4), {}, keep=3)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_flip_a_bit, "truncated or altered"),
        (_truncate, "truncated or altered"),
        (lambda path: (path / "state.pt").unlink(), "incomplete or damaged"),
        (lambda path: (path / "manifest.json").write_text("{"), "incomplete or damaged"),
        (
            lambda path: (path / "manifest.json").write_text('{"sha256": "", "tensors": null}'),
            "incomplete or damaged",
        ),
        (_other_model, r"of another model \(bias is \[4\] there, \[2\] here\)"),
    ],
)
def test_a_bad_checkpoint_is_named_and_the_one_before_is_used(saved, damage, says):
    folder, model = saved
    damage(folder / "step-00000003")
    recorder = Recorder()
    assert checkpoint.load_newest(folder, model, recorder)["step"] == 2
    (line,) = recorder.warned
    assert "step-00000003" in line and re.search(says, line)

    for step in (1, 2):
        (folder / f"step-0000000{step}" / "manifest.json").unlink()
    before = sorted(folder.rglob("*"))
    with pytest.raises(runtime.UsageError, match=says) as refused:
        checkpoint.load_newest(folder, model, Recorder())
    assert all(f"step-0000000{step}" in str(refused.value) for step in (1, 2, 3))
    assert sorted(folder.rglob("*")) == before, "nothing may be removed"


def test_a_save_killed_at_any_moment_leaves_the_checkpoint_before(tmp_path, single):
    """Kill the writer at each file operation of a save in turn."""
    model = nn.Linear(3, 2)
    checkpoint.save(tmp_path / "ck", 1, model, {"step": 1})
    operations = 0
    while True:
        pid = os.fork()
        if pid == 0:
            _save_and_die(tmp_path / "ck", model, operations)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            break  # it got through: there were no more moments to die at
        state = checkpoint.load_newest(tmp_path / "ck", model, Recorder())
        assert state["step"] in (1, 2)
        operations += 1
    assert operations >= 6
    assert checkpoint.load_newest(tmp_path / "ck", model, Recorder())["step"] == 2


def _save_and_die(folder, model, after):
    left = [after]

    def counted(function):
        def wrapper(*args, **kwargs):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return function(*args, **kwargs)

        return wrapper

    checkpoint.torch.save = counted(torch.save)
    checkpoint.flush = counted(checkpoint.flush)
    checkpoint.Path.rename = counted(checkpoint.Path.rename)
    checkpoint.shutil.rmtree = counted(checkpoint.shutil.rmtree)
    checkpoint.save(folder, 2, model, {"step": 2})
    os._exit(0)


def test_a_checkpoint_that_cannot_be_written_says_why(tmp_path, single):
    (tmp_path / "file").write_text("")
    with pytest.raises(runtime.UsageError, match="Not a directory"):
        checkpoint.save(tmp_path / "file" / "ck", 1, nn.Linear(1, 1), {})


def test_a_full_disk_is_named_and_the_last_good_checkpoint_stays(tmp_path, single):
    """A limit on the size of files stops torch.save in the middle, as a full disk does."""
    model = nn.Linear(300, 300)
    checkpoint.save(tmp_path / "ck", 1, model, {"step": 1})
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited[1]))
    try:
        with pytest.raises(runtime.UsageError, match="step-00000002: File too large$"):
            checkpoint.save(tmp_path / "ck", 2, model, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert [path.name for path in (tmp_path / "ck").iterdir()] == ["step-00000001"]
    assert checkpoint.load_newest(tmp_path / "ck", model, Recorder())["step"] == 1


def test_random_state_of_every_rank_comes_back(on_ranks, tmp_path):
    def draw():
        return torch.rand(1).item(), float(runtime.np.random.rand()), runtime.random.random()

    def body(rank, world_size):
        runtime.seed_everything(rank)
        draw()
        states = checkpoint.gather_rng_states()
        torch.save(states, tmp_path / f"rng-{rank}")
        expected = draw()
        runtime.seed_everything(99)
        loaded = torch.load(tmp_path / f"rng-{rank}", weights_only=True)
        assert checkpoint.restore_rng_state(loaded, rank)
        assert draw() == expected
        assert not checkpoint.restore_rng_state(loaded, world_size)
        return expected

    first, second = on_ranks(body, 2)
    assert first != second


# measure and console


def test_collectives_that_ddp_starts_are_counted(on_ranks):
    def body(rank, world_size):
        model = nn.parallel.DistributedDataParallel(nn.Linear(10, 10))
        with measure.CollectiveCounter() as counter:
            model(torch.ones(1, 10)).sum().backward()
        with measure.CollectiveCounter() as silent, model.no_sync():
            model(torch.ones(1, 10)).sum().backward()
        return counter.calls["allreduce_"], counter.bytes["allreduce_"], silent.calls["allreduce_"]

    assert on_ranks(body, 2) == [(1, 110 * 4, 0)] * 2


def test_flops_are_those_that_pytorch_counts(monkeypatch):
    config = models.PRESETS["tiny"]
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        models.Transformer(config)(tokens).sum().backward()
    # 1-D weights (norms) are in the formula, but multiply no matrix.
    expected = measure.flops_per_token(config, 64) - 6 * (2 * config.num_layers + 1) * config.dim
    assert counter.get_total_flops() == tokens.numel() * expected

    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert measure.mfu(1e12, cpu, "32-true") is None
    for name, expected in (("NVIDIA H200", 0.5), ("Some GPU", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert measure.mfu(494.7e12, gpu, "bf16-mixed") == expected


def test_a_check_fails_when_it_should():
    ok = [measure.Check("", *values, "").ok for values in ((1, 1, 0), (1.1, 1, 0.2))]
    bad = [measure.Check("", *values, "").ok for values in ((2, 1, 0), (float("nan"), 1, 9))]
    assert ok == [True, True] and bad == [False, False]


def test_results_have_the_documented_shape(tmp_path, single, capsys):
    world, device = runtime.World(0, 0, 1, 1, "python"), torch.device("cpu")
    results = measure.Results("x.py", Namespace(lr=0.1, output_dir=None), world, device)
    results.metrics = {"final_loss": 1.5}
    results.check("loss equals single process", 2.3021, 2.3021, 1e-5, "somewhere")
    content = json.loads(results.write(tmp_path).read_text())
    assert list(content) == [
        "script", "args", "started", "seconds", "world_size", "device", "backend", "launcher",
        "versions", "machine", "metrics", "checks",
    ]  # fmt: skip
    assert content["checks"][0] == {
        "name": "loss equals single process", "measured": 2.3021, "expected": 2.3021,
        "tolerance": 1e-5, "ok": True, "source": "somewhere",
    }  # fmt: skip
    assert Console(True).verdict(results, "fine") == 0
    results.check("broken", 1, 2, 0, "nowhere")
    assert Console(True).verdict(results, "fine") == 1
    said = capsys.readouterr().out.splitlines()
    assert "OK: 1 checks passed, fine" in said and said[-1] == "FAILED: broken"
    Console(False).verdict(results, "fine")
    assert capsys.readouterr().out == "", "only rank 0 speaks"


def test_output_folders_are_claimed_without_losing_anything(tmp_path):
    world = runtime.World(0, 0, 1, 1, "python")
    claim = measure.claim_output_dir
    assert claim(Namespace(output_dir=None), world) is None
    folder = str(tmp_path / "a" / "b")
    assert claim(Namespace(output_dir=folder), world).is_dir()
    (tmp_path / "a" / "b" / "results.json").write_text("{}")
    for own in ({}, {"resume": False}, {"resume": True}):
        with pytest.raises(runtime.UsageError, match="is not empty: name another folder$"):
            claim(Namespace(output_dir=folder, **own), world)
    resumable = str(tmp_path / "c")
    for _ in range(2):  # the second time as if the run had been killed before its first checkpoint
        assert claim(Namespace(output_dir=resumable, resume=True), world).is_dir()
    (tmp_path / "a" / "b" / "checkpoints").mkdir()
    with pytest.raises(runtime.UsageError, match="is not empty.*--resume"):
        claim(Namespace(output_dir=folder, resume=False), world)
    assert claim(Namespace(output_dir=folder, resume=True), world).is_dir()
    with pytest.raises(runtime.UsageError, match="cannot be written: Not a directory"):
        claim(Namespace(output_dir=folder + "/results.json/x", resume=False), world)


def test_plots_are_the_same_when_drawn_again(tmp_path):
    for name in ("a.png", "b.png"):
        plot_training(tmp_path / name, [2.0, 1.0, 0.5], [0.3, 0.9])
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
