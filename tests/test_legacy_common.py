"""The shared module: what it promises, and what it does when things go wrong."""

import argparse
import atexit
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import fork_ranks, free_port, timeouts_of_groups
from torch.distributed.device_mesh import init_device_mesh

from dist_common import ranks
from legacy_common import cli, data, models, runtime
from legacy_common import output as folder
from legacy_common.report import Check, Report


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
        (
            "srun",
            {"SLURM_PROCID": 5, "SLURM_LOCALID": 1, "SLURM_NTASKS": 8, "SLURM_STEP_NUM_TASKS": 8,
             "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[03-04]"},
            (5, 1, 8, 4),
        ),
        # A batch script's own process has SLURM_PROCID too, but no other process to wait for.
        ("python", {"SLURM_PROCID": 0, "SLURM_NTASKS": 8, "ENVIRONMENT": "BATCH"}, (0, 0, 1, 1)),
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


def test_devices(environ, monkeypatch, capsys):
    def gpus(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    world = runtime.World(3, 3, 4, 4, "torchrun")
    gpus(4)
    torch.set_float32_matmul_precision("high")  # as an image of NVIDIA has it
    assert runtime.pick_device("auto", world) == torch.device("cuda", 3)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.allow_tf32
    assert runtime.pick_device("cpu", world) == torch.device("cpu")
    gpus(1)
    # All ranks of the machine decide alike, whatever their own number.
    for rank in range(4):
        this_rank = runtime.World(rank, rank, 4, 4, "torchrun")
        assert runtime.pick_device("auto", this_rank) == torch.device("cpu")
    (line,) = capsys.readouterr().err.splitlines()  # one of them says so
    assert "on the CPU: PyTorch can use 1 GPU(s) of this machine, for 4 ranks" in line
    with pytest.raises(cli.UsageError, match=r"4 ranks.*1 GPU.*--nproc-per-node=1"):
        runtime.pick_device("cuda", world)
    assert environ["CUDA_VISIBLE_DEVICES"] == ""  # so that no library takes one unasked
    environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    gpus(2)
    assert [runtime.pick_device("auto", runtime.World(rank, rank, 4, 4, "torchrun")).index
            for rank in range(4)] == [0, 1, 0, 1]  # fmt: skip
    gpus(1)
    del environ["NCCL_MULTI_RANK_GPU_ENABLE"]
    environ["SLURM_GPUS_PER_TASK"] = "1"
    bound = runtime.World(3, 3, 4, 4, "srun")
    assert runtime.pick_device("auto", bound) == torch.device("cuda", 0)
    gpus(0)
    with pytest.raises(cli.UsageError, match="no GPU"):
        runtime.pick_device("cuda", world)


# measure: what a run leaves of its steps


# runtime: how a script fails and ends


def _on_ranks_with_run(main, world_size, tmp_path, **options):
    def body(rank):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = port
        cli.GRACE_S = 1.0
        cli.run(main)

    port = str(free_port())
    return fork_ranks(body, world_size, tmp_path / "run", 300, **options)


def test_the_context_manager_ends_the_others_and_tells_once(tmp_path):
    def main():
        with runtime.init("cpu", timeout_s=600) as (world, _):  # the deadline is shorter
            if world.rank == 1:
                raise ValueError("shard 7 is\nempty")
            dist.all_reduce(torch.ones(1))  # waits for rank 1
        return 0

    ended = _on_ranks_with_run(main, 3, tmp_path, end_job_on_failure=False)
    assert ended.codes == [1, 1, 1]
    (line,) = ended.stderr.splitlines()
    assert "rank 1: ValueError: shard 7 is empty (test_legacy_common.py:" in line


@pytest.mark.gpu_ready
def test_every_group_takes_the_timeout(tmp_path):
    """PyTorch gives 30 minutes to a group that was not told, a mesh's groups among them."""

    def main():
        with runtime.init("cpu", timeout_s=20):
            dist.new_group()
            dist.new_subgroups(1)
            init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
            print(sorted(timeouts_of_groups()))
        return 0

    ended = _on_ranks_with_run(main, 2, tmp_path, end_job_on_failure=True)
    assert ended.codes == [0, 0], ended.stderr
    assert ended.stdout == "[20.0]\n" * 2


def test_a_usage_error_on_one_rank_after_init_ends_all_with_one_line(tmp_path):
    def main():
        with runtime.init("cpu", timeout_s=20) as (world, _):
            if world.rank == 0:
                raise cli.UsageError("--text-file nowhere.txt does not exist")
            dist.barrier()
        return 0

    ended = _on_ranks_with_run(main, 2, tmp_path, end_job_on_failure=False)
    assert ended.codes == [2, 1]
    assert ended.stderr.count("\n") == 1 and "--text-file nowhere.txt" in ended.stderr


def as_node(rank):
    """Have a rank believe that it is alone on a machine of its own."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    socket.gethostname = lambda: f"node{rank}"


def test_a_rank_with_another_version_than_rank_0_is_refused_with_its_machine(tmp_path):
    def main():
        as_node(os.environ["RANK"])
        if os.environ["RANK"] == "1":
            torch.__version__ = "2.9.0"
        with runtime.init("cpu", timeout_s=20):
            dist.barrier()
        return 0

    ended = _on_ranks_with_run(main, 2, tmp_path, end_job_on_failure=False)
    assert ended.codes[1] == 2
    (line,) = ended.stderr.splitlines()
    assert "error: torch 2.9.0, legacy_common " in line
    assert " on node1, but torch " in line and " on node0, rank 0's: install the same" in line


# data


@pytest.mark.parametrize("world_size", [1, 3])
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


# tokens: folders, mixed


WEIGHTS = [0.5, 0.3, 0.2]
SIZES = {"a" * 16: 40, "b" * 16: 7, "c" * 16: 90}


# models


# Published totals: the papers and model cards named beside PRESETS.
FIVE_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
         "intermediate_size": 96, "vocab_size": 300}  # fmt: skip


def described(folder, **fields):
    path = folder / "mine.json"
    path.write_text(json.dumps(FIVE_SIZES | fields))
    return str(path)


def test_a_file_describes_a_shape_by_five_sizes_or_as_a_config_json(tmp_path):
    five = models.TransformerConfig(300, 64, 2, 8, 8, 96, 2048, norm_eps=1e-6)
    assert models.preset(described(tmp_path), 2048) == five
    of_llama = {"model_type": "llama", "num_key_value_heads": 2, "max_position_embeddings": 512,
                "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
                "head_dim": 8, "attention_bias": False, "architectures": ["LlamaForCausalLM"],
                "torch_dtype": "bfloat16", "pretraining_tp": 1}  # fmt: skip
    before_5 = {"rope_scaling": None, "rope_theta": 5e5}
    since_5 = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    for rope in (before_5, since_5):
        shape = models.preset(described(tmp_path, **of_llama, **rope), 512)
        assert shape == models.TransformerConfig(300, 64, 2, 8, 2, 96, 512, 5e5, 1e-5, True)
    mistral = {"model_type": "mistral", "sliding_window": None}
    assert models.shape_of(described(tmp_path, **mistral)) == five


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1"),
        ({"hidden_size": 60}, "hidden_size is 60, no multiple of num_attention_heads, 8"),
        ({"hidden_size": 40}, "heads are 5 wide: rotary embeddings need an even number"),
        ({"head_dim": 16}, "head_dim is 16, not 8 as our model has it"),
        ({"model_type": "qwen2"}, "model_type is qwen2, not llama or mistral as our model has it"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters is {'rope_type': 'llama3'"),
        ({"num_key_value_head": 2}, "num_key_value_head: did you mean num_key_value_heads?"),
    ],
)
def test_a_file_that_our_model_cannot_be_is_refused(tmp_path, fields, says):
    path = described(tmp_path, **fields)
    with pytest.raises(cli.UsageError, match=f"^{re.escape(path)}: .*{re.escape(says)}"):
        models.shape_of(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "mine.json: No such file or directory"),
        ("{", "mine.json is no JSON: "),
        ("[]", "mine.json describes no Llama: it has to be an object, {...}"),
    ],
)
def test_a_file_that_is_no_shape_is_bad_input(tmp_path, content, says):
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(cli.UsageError, match=re.escape(says)):
        models.preset_or_file(models.PRESETS, str(path))
    with pytest.raises(cli.UsageError, match="--seq-len must be at most 2048"):
        models.preset(described(tmp_path), 2049)
    with pytest.raises(argparse.ArgumentTypeError, match="must be tiny, .*, not 'tinny'"):
        models.preset_or_file(models.PRESETS, "tinny")


def test_experts_compute_the_tokens_whose_router_chose_them(in_a_fork):
    """As a loop in which every expert computes every token, and all but the k best count 0."""
    config = models.MIXTURES["tiny-moe"]

    def outputs():
        torch.manual_seed(0)
        moe, x = models.MoE(config), torch.randn(2, 16, config.dim)
        for weight in moe.parameters():
            torch.nn.init.normal_(weight, std=0.1)
        scores = (x @ moe.router.weight.T).exp()
        least = scores.sort(dim=-1).values[..., -config.top_k, None]
        shares = torch.where(scores < least, 0.0, scores)
        shares = shares / shares.sum(-1, keepdim=True)
        expected = torch.zeros_like(x)
        weights = zip(moe.experts.gate, moe.experts.up, moe.experts.down, strict=True)
        for share, (gate, up, down) in zip(shares.unbind(-1), weights, strict=True):
            gated = x @ gate.T
            expected += share[..., None] * ((gated * gated.sigmoid() * (x @ up.T)) @ down.T)
        return (moe(x) - expected).abs().max().item(), expected.abs().max().item()

    error, largest = in_a_fork(outputs)
    assert error < 1e-5 * largest


def test_a_transformer_from_meta_is_the_one_built_at_once():
    torch.manual_seed(1)
    at_once = models.Transformer(models.PRESETS["tiny"])
    with torch.device("meta"):
        later = models.Transformer(models.PRESETS["tiny"])
    later.to_empty(device="cpu")
    later.load_state_dict(at_once.state_dict())
    tokens = torch.randint(0, 256, (2, 16))
    assert torch.equal(later(tokens), at_once(tokens))


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
    cos, sin = models.rotary_tables(torch.arange(32), 16, 10_000.0)
    q, k = torch.randn(16), torch.randn(16)
    products = [
        models.rotate(q, cos[i], sin[i]) @ models.rotate(k, cos[i - 3], sin[i - 3])
        for i in (3, 20, 31)
    ]
    assert torch.allclose(torch.stack(products), products[0].expand(3), atol=1e-5)


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
    for name, says in (("none.txt", "No such file"), ("empty.txt", "is empty")):
        with pytest.raises(cli.UsageError, match=says):
            data.load_text(str(tmp_path / name))
    with pytest.raises(cli.UsageError, match="18 bytes are fewer than one sequence of 8"):
        data.Sequences(data.load_text(str(tmp_path / "own.txt")), seq_len=8, world_size=3)


# checkpoint


WORLD = runtime.World(0, 0, 1, 1, "python")
CPU = torch.device("cpu")


# measure and console


def test_a_check_fails_when_it_should():
    ok = [Check("", *values, "").ok for values in ((1, 1, 0), (1.1, 1, 0.2))]
    bad = [Check("", *values, "").ok for values in ((2, 1, 0), (float("nan"), 1, 9))]
    assert ok == [True, True] and bad == [False, False]


def test_results_have_the_documented_shape(tmp_path, capsys):
    report = Report("x.py", Namespace(lr=0.1, output_dir=tmp_path / "run"), WORLD, CPU)
    report.start("a line of the script")
    report.metrics = {"final_loss": 1.5}
    report.check("loss equals single process", 2.3021, 2.3021, 1e-5, "somewhere")
    assert report.finish("fine") == 0
    content = json.loads((tmp_path / "run" / "results.json").read_text())
    assert list(content) == [
        "script", "args", "argv", "started", "seconds", "world_size", "device", "backend",
        "launcher", "versions", "machine", "metrics", "checks",
    ]  # fmt: skip
    assert content["checks"][0] == {
        "name": "loss equals single process", "measured": 2.3021, "expected": 2.3021,
        "tolerance": 1e-5, "source": "somewhere", "ok": True,
    }  # fmt: skip
    report.check("broken", 1, 2, 0, "nowhere")
    assert report.finish("fine") == 1
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "a line of the script"
    assert "OK: 1 check passed, fine" in said and said[-1] == "FAILED: broken"
    other = Report("x.py", Namespace(output_dir=None), runtime.World(1, 1, 2, 2, "python"), CPU)
    other.start("x")
    other.finish("fine")
    assert capsys.readouterr().out == "", "only rank 0 prints"


# the output folder


def test_output_folders_are_claimed_without_losing_anything(tmp_path):
    def claim(path, resume=None):
        """Claim a folder as a process of its own, which gives it back when it ends."""

        def body(_):
            folder.claim(path, resume)
            atexit._run_exitfuncs()

        return ranks.fork(body, 1, tmp_path / "log", 60)[0].err

    run, resumable = tmp_path / "a" / "b", tmp_path / "c"
    assert claim(run) == ""
    (run / "results.json").write_text("{}")
    for resume in (None, False, True):
        assert "is not empty: name another folder\n" in claim(run, resume)
    for _ in range(2):  # the second time as if the run had been killed before its first checkpoint
        assert claim(resumable, resume=True) == ""
    (run / "checkpoints").mkdir()
    assert "is not empty" in claim(run, False) and "--resume" in claim(run, False)
    assert claim(run, True) == ""
    assert "cannot be written: Not a directory" in claim(run / "results.json" / "x")
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "results.json"]


def hold(path, release):
    """Hold a folder in a process of its own until `release` is there."""

    def body(rank):
        folder.claim(path, True)
        (path / "held").touch()
        while not release.exists():
            time.sleep(0.02)
        return 0

    pid = os.fork()
    if pid == 0:
        body(0)
        os._exit(0)  # without giving it back, as when a process is killed
    while not (path / "held").exists():
        time.sleep(0.02)
    return pid


def test_a_folder_in_use_is_refused_with_its_holder_and_taken_over_when_that_is_dead(tmp_path):
    path = tmp_path / "run"
    pid = hold(path, tmp_path / "release")
    with pytest.raises(cli.UsageError, match=rf"in use by pid {pid} on .* since 20\d\d-.* UTC: "):
        folder.claim(path, True)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    took = ranks.fork(lambda _: folder.claim(path, True), 1, tmp_path / "log", 60)[0]
    assert (took.code, took.err) == (0, ""), "taken over at once"


# ranks


@pytest.mark.full
def test_every_way_a_rank_can_end_is_told(tmp_path):
    def body(rank):
        print("rank", rank)
        if rank == 1:
            raise ValueError("shard 7 is empty")
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 3:
            sys.exit(7)
        if rank == 4:
            time.sleep(600)
        return rank

    ended = ranks.fork(body, 5, tmp_path, deadline_s=10)
    words = ["exit code 0", "exit code 1", "SIGKILL", "exit code 7", "hangs"]
    assert [rank.ended for rank in ended] == words
    assert [rank.out for rank in ended] == [f"rank {number}\n" for number in range(5)]
    assert ended[0].value == 0 and "ValueError: shard 7 is empty" in ended[1].err
    assert "in body" in ended[4].err, "where it hangs"


def test_a_fork_leaves_its_parents_finalizers_alone(tmp_path):
    """A script's end runs what is to run at exit: of this process, not of the one before."""
    with tempfile.TemporaryDirectory() as of_parent:
        ended = ranks.fork(lambda _: cli.run(lambda: 0), 1, tmp_path, deadline_s=60)
        assert ended[0].code == 0 and Path(of_parent).exists()


# the one job


def test_batch_sizes_follow_from_one_another():
    for total, accum, settled in ((None, None, (16, 1)), (None, 3, (48, 3)), (32, None, (32, 2))):
        args = Namespace(micro_batch_size=8, grad_accum_steps=accum, global_batch_size=total)
        line = data.settle_batch_sizes(args, dp_ranks=2)
        assert (args.global_batch_size, args.grad_accum_steps) == settled
        assert line.startswith(f"global batch {settled[0]} = 8 per rank x {settled[1]} micro")
    for total, accum, says in (
        (24, None, "24 must be --"),
        (32, 3, "32 is not .* = 48: take that"),
    ):
        args = Namespace(micro_batch_size=8, grad_accum_steps=accum, global_batch_size=total)
        with pytest.raises(cli.UsageError, match=says):
            data.settle_batch_sizes(args, dp_ranks=2)
