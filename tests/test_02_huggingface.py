"""Module 02: checkpoints, Hugging Face models of many families, adapters, tokens."""

import json
import os
import re
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import REPO, assert_one_line, load_script, results_of

transformers = pytest.importorskip("transformers")
assert transformers.LlamaForCausalLM  # imported now, so that no fork has to

from dist_common import cli, data  # noqa: E402
from make_tiny_llama import build_tokenizer, make_tiny_llama  # noqa: E402

HF = "02-fsdp/hf_minimal.py"
CHECKPOINT = "02-fsdp/fsdp_checkpoint.py"
LORA = "02-fsdp/fsdp_lora.py"
TOKENS = "02-fsdp/make_tokens.py"
full = pytest.mark.full
pytestmark = pytest.mark.xdist_group("transformers")  # one worker imports it


# hf_minimal.py


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_llama(folder)
    return folder


@pytest.fixture
def fine_tune(run_script, tiny, tmp_path):
    """Run hf_minimal.py with texts in it changed; return what it printed."""

    def run(model=tiny, ranks=2, changes=(), steps=3):
        source = (REPO / HF).read_text()
        changes = [
            ("STEPS = 20", f"STEPS = {steps}"),
            ("step % 5 == 0", "True"),
            *changes,
        ]
        for old, new in changes:
            assert old in source, old
            source = source.replace(old, new)

        def before(script):
            # A save asks whether the model is DeepSpeed's, whose import takes seconds.
            sys.modules["deepspeed"] = None
            code = compile(source, HF, "exec")
            script.main = lambda: exec(code, {"__name__": "__main__"})

        words = (model, tiny / "chats.jsonl", tmp_path / f"tuned-{ranks}")
        stand_in = "01-ddp-basics/ddp_training.py"  # a module that gets this main
        return run_script(stand_in, *words, world_size=ranks, before=before)

    return run


def losses_of(ended):
    assert not any(ended.codes), ended.stderr
    return [
        float(text)
        for text in re.findall(r"(?:loss|training|again) ([\d.]+)", ended.stdout)
    ]


@torch.no_grad()
def loss_of(folder, chats, steps=0):
    """Return the loss of a step's batch by transformers alone, on one process."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    )
    tokenizer = build_tokenizer()
    generator = torch.Generator().manual_seed(steps)
    lines = chats.read_text().splitlines()
    loss, count = 0.0, 0
    for index in torch.randperm(len(lines), generator=generator)[:16].tolist():
        question, answer = json.loads(lines[index])["messages"]
        asked = tokenizer(question["content"] + "\n").input_ids
        answered = tokenizer(answer["content"]).input_ids + [tokenizer.eos_token_id]
        logits = model(torch.tensor([asked + answered])).logits[0, len(asked) - 1 : -1]
        loss += F.cross_entropy(logits, torch.tensor(answered), reduction="sum").item()
        count += len(answered)
    return loss / count


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=full)])
def test_losses_equal_one_rank(fine_tune, ranks):
    alone = losses_of(fine_tune(ranks=1))
    assert losses_of(fine_tune(ranks=ranks)) == pytest.approx(alone, abs=2e-4)
    assert alone[2] < 0.95 * alone[0]


WIDTHS = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
}
GPT2 = {
    "vocab_size": 257,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "attn_pdrop": 0,
    "embd_pdrop": 0,
    "resid_pdrop": 0,
}
# Model type: its differences from WIDTHS.
FAMILIES = {
    "llama": {},
    "gpt2": GPT2,
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3_text": {},
    "phi3": {},
    "olmo2": {},
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4},
}
QUICK = ("gpt2",)


@pytest.mark.parametrize(
    "family",
    [name if name in QUICK else pytest.param(name, marks=full) for name in FAMILIES],
)
def test_a_family_loads_trains_and_exports(
    fine_tune, tiny, tmp_path, monkeypatch, family
):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    shape = GPT2 if family == "gpt2" else WIDTHS | FAMILIES[family]
    ends = {"eos_token_id": 256, "bos_token_id": None}
    config = transformers.AutoConfig.for_model(family, **shape, **ends)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    folder = tmp_path / family
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    losses = losses_of(fine_tune(folder))
    assert losses[0] == pytest.approx(loss_of(folder, tiny / "chats.jsonl"), abs=2e-4)
    assert losses[-1] == losses[-2] < losses[0]
    exported = loss_of(tmp_path / "tuned-2" / "model", tiny / "chats.jsonl", 3)
    assert exported == pytest.approx(losses[-1], abs=2e-4)


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("        dist.broadcast(buffer, src=0)", "        buffer.zero_()", 0),
        ("world_size / totals[1]", "world_size / (targets != -100).sum()", 2),
        ("dcp.load(state, checkpoint_id=checkpoint)", "read_weights(model)", 4),
    ],
)
@full
def test_sabotage_changes_a_loss(fine_tune, old, new, place):
    """In the first step, after an update, and after loading."""
    good = losses_of(fine_tune())
    bad = losses_of(fine_tune(changes=[(old, new)]))
    assert bad[:1] == good[:1] or place == 0
    assert bad[place] != pytest.approx(good[place], abs=2e-4)


# fsdp_checkpoint.py


def check_that_fails(ended, name):
    assert set(ended.codes) == {1}, ended.stdout + ended.stderr
    assert name in ended.stdout.splitlines()[-1], ended.stdout


def lose_the_moments(script):
    script.set_optimizer_state_dict = lambda *args, **kwargs: None


def swap_gate_and_up(script):
    names = script.HF_NAMES
    names["gate."], names["up."] = names["up."], names["gate."]


def shift_a_row(script):
    load = script.dcp.load

    def load_shifted(state, **kwargs):
        load(state, **kwargs)
        if "model" in state:
            weight = state["model"]["blocks.1.up.weight"].to_local()
            weight.copy_(weight.roll(1, 0))

    script.dcp.load = load_shifted


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lose_the_moments, "a loss, one-file"),
        (swap_gate_and_up, "loss in transformers"),
        (shift_a_row, "a loss, shards"),
    ],
)
@full
def test_sabotage_of_a_checkpoint(run_script, tmp_path, change, name):
    words = ("--output-dir", tmp_path / "saved")
    ended = run_script(CHECKPOINT, *words, world_size=2, before=change)
    check_that_fails(ended, name)


@full
def test_any_ranks_load(run_script, tmp_path):
    for ranks, flag in ((2, "--output-dir"), (3, "--load")):
        words = (flag, tmp_path / "saved", "--seed", 3)
        ended = run_script(CHECKPOINT, *words, world_size=ranks)
        assert not any(ended.codes), ended.stdout + ended.stderr
        assert "OK: 6 checks passed" in ended.stdout


@pytest.mark.parametrize(
    ("script", "words", "says"),
    [
        (CHECKPOINT, "", "name a folder: --output-dir to save, --load to load"),
        (CHECKPOINT, "--load nowhere", "--load nowhere: no such folder"),
        (LORA, "", "--output-dir must name a folder"),
        (LORA, "--quantize int8", "invalid choice: 'int8'"),
        (TOKENS, "", "the following arguments are required: FILE, --to"),
        (TOKENS, "nowhere.txt --to {new}", "nowhere.txt: No such file or directory"),
        (TOKENS, "{bad} --to {new}", "bad.jsonl, line 2: not"),
        (TOKENS, "{zero} --to {new}", "zero.txt: token 0 ends a document"),
        (TOKENS, "{empty} --to {new}", "the files hold no document"),
        (TOKENS, "{bad} --to {old}", "exists: name another folder"),
        (TOKENS, "{bad} --to {new} --tokenizer nowhere", "no such folder"),
    ],
)
def test_wrong_usage(run_script, tmp_path, script, words, says):
    (tmp_path / "old").mkdir()
    texts = {
        "bad.jsonl": '{"text": "a"}\n{"prompt": "b"}\n',
        "zero.txt": "a\0b",
        "empty.txt": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    names = {name.split(".")[0]: tmp_path / name for name in (*texts, "old", "new")}
    ended = run_script(script, *words.format(**names).split(), environ={})
    assert_one_line(ended, says, Path(script).name)


# fsdp_lora.py


def scale_by_alpha(script):
    script.ALPHA = 8
    saved = script.save_adapters

    def save(*args):
        script.ALPHA = 16
        saved(*args)
        script.ALPHA = 8

    script.save_adapters = save


def shard_as_one_unit(script):
    shard = script.fully_shard
    script.fully_shard = lambda unit, mesh: (
        hasattr(unit, "blocks") and shard(unit, mesh=mesh)
    )


def repeat_samples(script):
    train = script.train

    def train_on_rank_0_s(model, optimizer, steps, rank=0, world_size=1):
        return train(model, optimizer, steps, 0, world_size)

    script.train = train_on_rank_0_s


@pytest.mark.parametrize(
    ("change", "flags", "name"),
    [
        (shard_as_one_unit, "", "bytes gathered"),
        (scale_by_alpha, "", "a logit in peft"),
        (repeat_samples, "--quantize nf4", "a loss"),
    ],
)
@full
def test_sabotage_of_adapters(run_script, tmp_path, change, flags, name):
    words = (*flags.split(), "--output-dir", tmp_path / "lora")
    ended = run_script(LORA, *words, world_size=2, before=change)
    check_that_fails(ended, name)


@pytest.mark.parametrize(
    ("ranks", "flags", "checks"),
    [
        (2, "--quantize nf4", 3),
        (3, "--seed 3", 4),
    ],
)
@full
def test_adapters_on_other_ranks(run_script, tmp_path, ranks, flags, checks):
    words = (*flags.split(), "--output-dir", tmp_path / "lora")
    ended = run_script(LORA, *words, world_size=ranks)
    assert not any(ended.codes), ended.stdout + ended.stderr
    assert len(results_of(tmp_path / "lora")["checks"]) == checks


def test_nf4_rounds_to_the_nearest_value():
    """Half of the widest gap, from -1 to -0.6962, is the largest error (appendix E)."""
    script = load_script(LORA)
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    codes, scales = script.encode(weight)
    assert codes.nbytes == weight.numel() / 2
    errors = (script.decode(codes, scales, 96) - weight).abs().view(-1, script.BLOCK)
    assert 0.14 < (errors / scales).max() < 0.1520
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs, state = functional.quantize_4bit(weight.view(1, -1), quant_type="nf4")
    rounded = functional.dequantize_4bit(theirs, state).view(96, 128)
    ours = script.decode(codes, scales, 96)
    differ = (ours - rounded).abs() > 1e-3  # next to a border, by the last digits
    assert differ.float().mean() < 1e-3


# make_tokens.py


@pytest.mark.parametrize("tokenized", [False, pytest.param(True, marks=full)])
def test_templates_read_the_tokens(run_script, tmp_path, tiny, tokenized):
    documents = [f"{number} squared is {number**2} </s>" for number in range(2500)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.txt").write_text("the last one")
    words = [tmp_path / "a.jsonl", tmp_path / "b.txt", "--to", tmp_path / "tokens"]
    words += ["--tokenizer", tiny] if tokenized else []
    ended = run_script(TOKENS, *words, environ={})
    assert ended.codes == [0], ended.stderr
    assert "2,501 documents" in ended.stdout
    about = json.loads((tmp_path / "tokens" / "manifest.json").read_text())
    end = about["document_end"]
    assert (end, about["vocab_size"]) == ((256, 257) if tokenized else (0, 256))
    tokens, checksum, _ = data.load_tokens(tmp_path / "tokens")
    assert checksum == about["sha256"]
    assert (tokens == end).sum() == 2501
    expected = b"\0".join(text.encode() for text in [*documents, "the last one"])
    if not tokenized:
        assert bytes(tokens.astype(np.uint8)) == expected + b"\0"
    args = Namespace(tokens=tmp_path / "tokens", text_file=None, seq_len=16)
    train_set, test_set, _, _ = data.load_sequences(args)
    assert len(train_set) + len(test_set) == (len(tokens) - 1) // 16
    os.truncate(tmp_path / "tokens" / "tokens.bin", 100)
    with pytest.raises(cli.UsageError):
        data.load_tokens(tmp_path / "tokens")
