"""Module 03: sabotage fails a check; other ranks and seeds; configs of all kinds."""

import json
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import REPO, assert_one_line, compiled, load_script, results_of
from helpers_03 import deepspeed_in_the_parent
from torch import nn

SCRATCH = "03-deepspeed/zero_from_scratch.py"
STAGES = "03-deepspeed/zero_stages.py"
OFFLOAD = "03-deepspeed/zero_offload.py"
INFERENCE = "03-deepspeed/deepspeed_inference.py"
CHECK = "03-deepspeed/check_config.py"
CONFIGS = sorted((REPO / "03-deepspeed/configs").glob("*.json"))
SHORT = ("--micro-batch-size", 1, "--seq-len", 16, "--max-steps", 2)
FLAGS = {
    SCRATCH: SHORT,
    STAGES: SHORT,
    OFFLOAD: (*SHORT, "--dim", 256),
    INFERENCE: ("--max-new-tokens", 4),
}
full = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def deepspeed_is_imported():
    with deepspeed_in_the_parent("transformers.models.llama.modeling_llama"):
        yield


# Sabotage


def keep_local_gradient(script):
    script.reduce_scatter_single = lambda mean, whole: mean.copy_(script.part_of(whole))


def reduce_once_a_step(script):
    init = script.Zero.__init__
    script.Zero.__init__ = lambda self, weights, make, stage, dtype: init(
        self, weights, make, 1, dtype
    )


def change_config(change):
    """Return a sabotage that changes the section zero_optimization."""

    def sabotage(script):
        make_config = script.make_config

        def broken(*args):
            config = make_config(*args)
            change(config["zero_optimization"])
            return config

        script.make_config = broken

    return sabotage


def take_a_lower_stage(zero):
    zero["stage"] = max(0, zero["stage"] - 1)


def start_with_other_weights(script):
    start = script.start_engine

    def broken(deepspeed, network, *args):
        network.blocks[1].up.weight.data[:8] += 0.01
        return start(deepspeed, network, *args)

    script.start_engine = broken


def change_offload(change):
    """Return a sabotage of the engine's config only: the checks expect the true one."""

    def sabotage(script):
        start = script.start_engine

        def broken(deepspeed, network, optimizer, config, timeout_s):
            config = json.loads(json.dumps(config))
            zero = config["zero_optimization"]
            if "offload_optimizer" in zero:
                change(zero, optimizer)
            return start(deepspeed, network, optimizer, config, timeout_s)

        script.start_engine = broken

    return sabotage


def leave_weights_whole(zero, optimizer):
    if zero["stage"] == 3:
        del zero["offload_param"]
        zero["stage"] = 2


def take_larger_steps(zero, optimizer):
    optimizer.param_groups[0]["lr"] *= 30


def keep_a_third_moment(zero, optimizer):
    optimizer.param_groups[0]["amsgrad"] = True


def change_model(change):
    """Return a sabotage of the model whose layers are divided."""

    def sabotage(script):
        divide_layers = script.divide_layers

        def broken(*args):
            divided = divide_layers(*args)
            change(divided)
            return divided

        script.divide_layers = broken

    return sabotage


def shift_a_shard(divided):
    if os.environ["RANK"] == "1":
        weight = divided.model.layers[1].self_attn.o_proj.weight
        weight.copy_(weight.roll(1, 1))


def leave_the_head_whole(script):
    from deepspeed.module_inject.auto_tp import AutoTP

    AutoTP._replace_last_linear_module = lambda self, module: module


def forget_the_cache(script):
    generate = script.generate

    def broken(*args):
        tokens, cache = generate(*args)
        cache.layers[0].values = cache.layers[0].values[:, :, :1]
        return tokens, cache

    script.generate = broken


SABOTAGE = [
    (SCRATCH, keep_local_gradient, "largest error: float32"),
    (SCRATCH, reduce_once_a_step, "largest error: bytes"),
    (STAGES, change_config(take_a_lower_stage), "largest error: gradients"),
    (STAGES, start_with_other_weights, "largest error: loss"),
    (OFFLOAD, change_offload(leave_weights_whole), "largest error: weights"),
    (OFFLOAD, change_offload(take_larger_steps), "largest error: loss"),
    (OFFLOAD, change_offload(keep_a_third_moment), "largest error: optimizer state"),
    (INFERENCE, change_model(shift_a_shard), "relative error of a logit"),
    (INFERENCE, leave_the_head_whole, "bytes of weights"),
    (INFERENCE, forget_the_cache, "bytes of KV cache"),
]


@full
@pytest.mark.parametrize(("script", "sabotage", "check"), SABOTAGE)
def test_sabotage_fails_its_check(run_script, tmp_path, script, sabotage, check):
    words = (*FLAGS[script], "--output-dir", tmp_path / "run")
    ended = run_script(
        script, *words, world_size=2, before=sabotage, end_job_on_failure=False
    )
    assert 1 in ended.codes, ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert check in failed


# Other ranks, seeds and flags


@full
@pytest.mark.parametrize(
    ("script", "ranks", "flags"),
    [
        (SCRATCH, 3, ()),
        (STAGES, 3, ()),
        (OFFLOAD, 1, ("--precision", "32-true")),
        (INFERENCE, 1, ()),
    ],
)
def test_a_lesson_passes_on_other_ranks(run_script, script, ranks, flags):
    ended = run_script(script, *FLAGS[script], *flags, "--seed", 7, world_size=ranks)
    assert ended.codes == [0] * ranks, ended.stdout + ended.stderr
    assert not ended.stderr


@full
def test_offload_to_a_disk(run_script, tmp_path):
    if not compiled("async_io"):
        pytest.skip("async_io is not compiled: run the command of zero_offload.md")
    words = (*SHORT, "--dim", 768, "--nvme-path", tmp_path)
    ended = run_script(OFFLOAD, *words, world_size=2)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert not list(tmp_path.glob("zero-*"))


@pytest.mark.parametrize(
    ("script", "ranks", "flags", "message"),
    [
        (OFFLOAD, 1, ("--dim", 100), "--dim must be a multiple of 64, not 100"),
        (OFFLOAD, 1, ("--nvme-path", "/nowhere"), "/nowhere is not a folder"),
        (OFFLOAD, 2, ("--nvme-path", "/tmp", "--dim", 448), "below 1 MiB"),
        (INFERENCE, 3, (), "3 ranks cannot share 2 key-value heads: start 1 or 2"),
        (CHECK, 1, ("/nowhere.json",), "No such file or directory"),
    ],
)
def test_wrong_usage_is_one_line(run_script, script, ranks, flags, message):
    ended = run_script(script, *flags, world_size=ranks)
    assert_one_line(ended, message, script.split("/")[1])


# zero_from_scratch.py with a model that is not as regular as the lesson's


class AwkwardModel(nn.Module):
    """Frozen and tied weights, odd sizes, a scalar, a branch of the last rank only."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.rare = nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(7, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, rare):
        x = self.frozen(self.embedding(tokens)) * self.scale
        if rare:
            x = x + self.rare(x)
        return self.head(torch.tanh(x))


def awkward_loss(network, rank, world_size, micro_batch):
    draw = torch.Generator().manual_seed(10 * micro_batch + rank)
    tokens, targets = torch.randint(5, (2, 8), generator=draw)
    rare = rank == world_size - 1 and micro_batch == 0
    return F.cross_entropy(network(tokens, rare), targets)


def train_awkward_model(rank, world_size, stage):
    """Take a step next to one process; return the largest difference of a weight."""
    script = load_script(SCRATCH)
    torch.manual_seed(0)
    alone = AwkwardModel()
    torch.manual_seed(0)
    network = AwkwardModel()
    sgd = partial(torch.optim.SGD, lr=0.3)
    zero = script.Zero(
        network.parameters(), sgd, stage, torch.float32, bucket_bytes=120
    )
    optimizer = sgd(alone.parameters())
    for micro_batch in (0, 1):
        for number in range(world_size):
            loss = awkward_loss(alone, number, world_size, micro_batch)
            (loss / 2 / world_size).backward()
        (awkward_loss(network, rank, world_size, micro_batch) / 2).backward()
    zero.step()
    optimizer.step()
    pairs = zip(network.parameters(), alone.parameters(), strict=True)
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_trains_any_model_as_one_process(on_ranks, stage):
    assert max(on_ranks(train_awkward_model, 3, stage)) < 1e-6


# check_config.py


def config_with(stage=2, **changes):
    """Return zero2_config.json with other keys."""
    config = json.loads((REPO / "03-deepspeed/configs/zero2_config.json").read_text())
    config["zero_optimization"]["stage"] = stage
    for name, value in changes.items():
        if isinstance(value, dict):
            config[name] = config.get(name, {}) | value
        else:
            config[name] = value
    return config


RAISED, IGNORED, WRONG = "raised by DeepSpeed", "ignored by DeepSpeed", "accepted, but"
TRAINER_AUTO = {
    "stage": "auto",
    "stage3_gather_16bit_weights_on_model_save": "auto",
    "offload_optimizer": {"device": "auto", "nvme_path": "auto"},
}
SCHEDULER = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
# A config, flags, and the error; None if there are only hints and warnings.
JUDGED = [
    (config_with(zero_optimisation={}), (), f"{IGNORED}: zero_optimisation: did you"),
    (config_with(zero_optimization={"overlap_com": True}), (), "mean overlap_comm?"),
    (config_with(5), (), f"{RAISED}: stage: Input should be 0, 1, 2, 3"),
    (config_with(bf16={"enabled": True}, fp16={"enabled": True}), (), "simultaneously"),
    (config_with(optimizer={"type": "AdamWw"}), (), "AdamWw is not a supported"),
    (config_with(optimizer={"params": {"lr": "1e-3"}}), (), f"{RAISED}: TypeError"),
    (config_with(amp={"enabled": True}), (), "Apex AMP integration has been removed"),
    (
        config_with(zero_optimization={"offload_param": {"device": "cpu"}}),
        (),
        f"{WRONG} wrong: offload_param to cpu needs stage 3",
    ),
    (
        config_with(zero_optimization={"offload_optimizer": {"device": "nvme"}}),
        (),
        "offload_optimizer to nvme needs stage 3",
    ),
    (
        config_with(
            train_batch_size=30,
            train_micro_batch_size_per_gpu=4,
            gradient_accumulation_steps=2,
        ),
        (),
        "30 is not 4 x 2",
    ),
    (
        config_with(
            train_batch_size=32,
            train_micro_batch_size_per_gpu=4,
            gradient_accumulation_steps=2,
        ),
        ("--world-size", 8),
        "is not 4 x 2",
    ),
    (
        config_with(zero_optimization={"contiguous_gradients": "auto"}),
        (),
        'contiguous_gradients is "auto"',
    ),
    (config_with(), ("--for", "own"), 'gradient_clipping is "auto"'),
    (config_with(zero_optimization=TRAINER_AUTO, scheduler=SCHEDULER), (), None),
    (config_with(_comment="ours"), (), None),
    (config_with(bf16={"enabled": True}, torch_autocast={"enabled": False}), (), None),
]


@pytest.mark.parametrize(("config", "flags", "line"), JUDGED)
def test_a_config_is_judged(run_script, tmp_path, config, flags, line):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    ended = run_script(CHECK, path, *flags)
    said = [text for text in ended.stdout.splitlines() if text.startswith(str(path))]
    if line is None:
        assert ended.codes == [0], ended.stdout + ended.stderr
    else:
        assert ended.codes == [1]
        assert sum(line in text for text in said) == 1, ended.stdout


def test_every_misspelt_key_is_noticed(run_script, tmp_path):
    path = CONFIGS[-1]
    config = json.loads(path.read_text())
    files = []
    for name in config:
        changed = {
            f"{key}q" if key == name else key: value for key, value in config.items()
        }
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(changed))
    for name in config["zero_optimization"]:
        zero = dict(config["zero_optimization"])
        zero[name + "q"] = zero.pop(name)
        files.append(tmp_path / f"zero-{name}.json")
        files[-1].write_text(json.dumps(config | {"zero_optimization": zero}))
    ended = run_script(CHECK, *files)
    for file in files:
        name = file.stem.removeprefix("zero-")
        lines = [t for t in ended.stdout.splitlines() if t.startswith(f"{file}: ")]
        assert any(f"{name}q" in line for line in lines), (file, lines)


def test_the_page_explains_every_key():
    page = (REPO / "03-deepspeed/check_config.md").read_text()

    def names(section):
        for name, value in section.items():
            yield name
            if isinstance(value, dict):
                yield from names(value)

    for path in CONFIGS:
        for name in names(json.loads(path.read_text())):
            assert f"`{name}`" in page, name
