"""fsdp_finetune.py: one process's training, answers only, families, stops and kills."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import helpers_templates as broken
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import GPUS, REPO, assert_one_line, load_script, results_of, run_command
from helpers_templates import (
    FSDP,
    checkpoints_in,
    kill_in,
    kill_in_save,
    loop_of,
    rows_of,
    stop_in,
)

transformers = pytest.importorskip("transformers")
assert transformers.LlamaForCausalLM  # imported now, so that no fork has to

from huggingface_hub import save_torch_state_dict  # noqa: E402
from tokenizers.processors import TemplateProcessing  # noqa: E402

from dist_common import cli, data, hf  # noqa: E402
from make_tiny_llama import build_tokenizer, make_tiny_llama  # noqa: E402

SCRIPT = "02-fsdp/fsdp_finetune.py"
script = load_script(SCRIPT)
full = pytest.mark.full
pytestmark = pytest.mark.xdist_group("transformers")  # one worker imports it
SMALL_JOB = (
    *("--micro-batch-size", 2, "--global-batch-size", 12, "--max-steps", 8),
    *("--warmup-steps", 3, "--lr", 1e-2, "--log-every", 1, "--eval-every", 0),
    *("--save-every", 0),
)
LORA = ("--lora-rank", 4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_llama(folder)
    return folder


@pytest.fixture
def finetune(run_script, tiny, tmp_path, monkeypatch):
    """Run the script on the tiny model, or on another; return how it ended."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run(*argv, model=tiny, ranks=2, changes=(), **options):
        def before(script):
            for change in changes:
                change(script)

        words = ("--init-from", model, "--data", tiny / "chats.jsonl", *SMALL_JOB)
        return run_script(
            SCRIPT, *words, *argv, world_size=ranks, before=before, **options
        )

    return run


def assert_ok(ended):
    assert not any(ended.codes), ended.stdout + ended.stderr
    return ended


def edit_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# The same training as one process


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (3, "--global-batch-size 7 --seed 3"),
        pytest.param(2, "--lora-rank 4 --activation-checkpointing full", marks=full),
        pytest.param(2, "--precision bf16-mixed --lora-rank 4", marks=full),
        pytest.param(4, "--global-batch-size 3", marks=full),
    ],
)
def test_a_correct_run_passes(finetune, ranks, flags):
    """Also where ranks divide nothing evenly, and where a rank has no chat."""
    words = ("--self-check", "--max-steps", 3, *flags.split())
    ended = assert_ok(finetune(*words, ranks=ranks))
    assert re.search(r"^OK: 4 checks passed, loss ", ended.stdout, re.M)
    trained = "9,344" if "lora" in flags else "125,376"
    assert f"llama: {trained} weights are trained" in ended.stdout


def train_on_questions(script):
    """Count every token, not only the tokens of answers."""
    loss = script.summed_loss

    def count_all(model, inputs, targets):
        following = F.pad(inputs[:, 1:], (0, 1), value=data.IGNORED)
        targets = torch.where(targets == data.IGNORED, following, targets)
        return loss(model, inputs, targets)

    script.summed_loss = count_all


def count_local_tokens(script):
    script.dist = SimpleNamespace(
        all_reduce=lambda tensor: None,
        get_world_size=dist.get_world_size,
        barrier=dist.barrier,
    )


def leave_b_out(script):
    """Train only one of an adapter's two matrices."""
    build = script.build_optimizer

    def build_without(model, args):
        kept = [w for name, w in model.named_parameters() if "lora_B" not in name]
        return build(SimpleNamespace(parameters=lambda: kept), args)

    script.build_optimizer = build_without


def lose_the_buffers(script):
    """Leave the frequencies of the rotary embeddings at 0."""
    build = script.build_model

    def build_and_lose(config, args, run):
        model = build(config, args, run)
        for buffer in model.buffers():
            buffer.zero_()
        return model

    script.build_model = build_and_lose


@pytest.mark.parametrize(
    ("change", "flags", "error"),
    [
        (train_on_questions, (), "loss"),
        pytest.param(leave_b_out, LORA, "weight change", marks=full),
        pytest.param(broken.shift_no_targets, (), "loss", marks=full),
        pytest.param(count_local_tokens, (), "loss", marks=full),
        pytest.param(broken.optimize_a_copy, (), "weight change", marks=full),
        pytest.param(broken.clip_by_the_local_norm, (), "clipped gradient", marks=full),
        pytest.param(lose_the_buffers, (), "loss", marks=full),
    ],
)
def test_sabotage_fails_the_self_check(finetune, tmp_path, change, flags, error):
    words = ("--self-check", "--max-steps", 2, *flags)
    ended = finetune(*words, "--output-dir", tmp_path / "run", changes=[change])
    assert 1 in ended.codes, ended.stdout + ended.stderr
    line = ended.stderr.splitlines()[-1]
    assert line.startswith("fsdp_finetune.py: error: self-check failed"), ended.stderr
    match = re.search(rf"\b{error} ([\d.e+-]+)", line)
    tolerances = {"loss": 1e-5, "gradient norm": 1e-4, "clipped gradient": 1e-3}
    assert float(match[1]) > 10 * tolerances.get(error, 0.01), line


def test_the_loop_has_the_skeleton_of_the_other_templates():
    ours, theirs = loop_of(SCRIPT), loop_of(FSDP)
    other_models = {"build_reference", "build_transformer"}
    assert [name for name in ours if name not in other_models] == [
        name for name in theirs if name not in other_models
    ]


# Which tokens are trained

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = f"{{% for m in messages %}}{TURN}{{% endfor %}}{ASKED}"
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{%- generation -%}{{ m.content }}<|im_end|>{%- endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}" + ASKED
)
# Like the template of Qwen 3: the question changes once its answer follows.
FORGETFUL = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ loop.length }}")
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Grüß Gott"},
    {"role": "assistant", "content": "Servus, größter"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Ciao"},
]


@pytest.fixture
def chatty():
    """A tokenizer with the special tokens of ChatML."""
    tokenizer = build_tokenizer()
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens({"extra_special_tokens": special, "bos_token": "<s>"})
    return tokenizer


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (MARKED, "Servus, größter<|im_end|>Ciao<|im_end|>"),
        (CHATML, "Ciao<|im_end|>\n"),
        (hf.PLAIN_TEMPLATE, "Servus, größter</s>Ciao</s>"),
    ],
)
def test_only_answers_are_trained(chatty, template, answers):
    """All marked answers, or the last one, each with the token that ends it."""
    chatty.chat_template = template
    inputs, targets = script.render(chatty, TALK)
    assert inputs[1:][targets[:-1] != data.IGNORED].tolist() == (
        targets[:-1][targets[:-1] != data.IGNORED].tolist()
    ), "each target is the next input"
    assert chatty.decode(targets[targets != data.IGNORED].tolist()) == answers


@pytest.mark.parametrize(
    ("around", "start"), [("$A </s>", ""), ("<s> $A </s>", "<s>"), ("<s> $A", "<s>")]
)
def test_a_tokenizer_that_ends_every_text_ends_the_answer_alone(
    chatty, tmp_path, tiny, around, start
):
    """Without a chat template; a first token stays."""
    shutil.copytree(tiny, tmp_path / "model")
    special = [(text, chatty.convert_tokens_to_ids(text)) for text in ("<s>", "</s>")]
    chatty.backend_tokenizer.post_processor = TemplateProcessing(
        single=around, special_tokens=special
    )
    chatty.chat_template = None
    (tmp_path / "model" / "chat_template.jinja").unlink()
    chatty.save_pretrained(tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", vocab_size=300)
    _, tokenizer = hf.load_config(tmp_path / "model", seq_len=8)
    messages = script.parse_line('{"prompt": "Who?", "answer": "Me."}')
    inputs, targets = script.render(tokenizer, messages)
    assert tokenizer.decode(inputs.tolist()) == f"{start}Who?\nMe."
    trained = targets[targets != data.IGNORED]
    assert tokenizer.decode(trained.tolist()) == "Me.</s>"


@pytest.mark.parametrize(
    ("template", "line", "says"),
    [
        (MARKED, '{"prompt": "a", "answer": "x</s>y"}', "special token </s>"),
        (MARKED, '{"prompt": "<|im_end|>", "answer": "x"}', "special token <|im_end|>"),
        (FORGETFUL, '{"prompt": "a", "answer": "x"}', "changes the question when"),
        (MARKED, '{"messages": [{"role": "user", "content": "a"}]}', "has no answer"),
        ("{{ raise_exception('odd') }}", '{"prompt": "a", "answer": "b"}', "odd"),
        (MARKED, "{'prompt': 1}", "Expecting property name"),
        (MARKED, '{"prompt": "a"}', "KeyError('answer')"),
        (MARKED, '{"prompt": 1, "answer": "b"}', "not iterable"),
        (MARKED, "[]", "list indices"),
    ],
)
def test_a_line_that_cannot_be_trained_is_refused_by_its_number(
    chatty, tmp_path, template, line, says
):
    chatty.chat_template = template
    path = tmp_path / "chats.jsonl"
    good = ['{"prompt": "a", "answer": "b"}'] if template == MARKED else []
    path.write_text("\n".join([*good, line]))
    with pytest.raises(cli.UsageError) as refused:
        script.render_file(path, chatty, tmp_path / "chats.pt")
    where = f"--data {path}, line {len(good) + 1}: "
    assert str(refused.value).startswith(where)
    assert says in str(refused.value)


def test_padding_and_missing_chats_add_nothing_to_the_loss(tiny):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    chats = [torch.tensor([[1, 2, 3], [-100, 3, 4]], dtype=torch.int32)]
    inputs, targets = script.Chats(chats, 9)[0]
    assert inputs.shape == targets.shape == (9,)
    with torch.no_grad():
        padded = script.summed_loss(model, inputs[None], targets[None])
        trimmed = script.trim(inputs[None], targets[None], "cpu")
        assert trimmed[0].shape == (1, 3)
        assert padded.item() == pytest.approx(
            script.summed_loss(model, *trimmed).item(), rel=1e-5
        )
        missing = torch.full_like(targets[None], data.IGNORED)
        missing = script.trim(torch.zeros_like(inputs[None]), missing, "cpu")
        assert missing[0].shape == (1, 1)
        assert script.summed_loss(model, *missing).item() == 0


# Stop, kill, resume


def straight_run(finetune, folder, *flags):
    words = ("--eval-every", 4, "--save-every", 2, "--output-dir", folder)
    return assert_ok(finetune(*words, *flags))


def render_nothing(script):
    script.render_file = None  # the file of an earlier start is there


@full
def test_a_run_that_is_stopped_or_killed_resumes_bitwise(finetune, tmp_path):
    """Three signals to one rank; kills in a step, in a save, and twice in a row."""
    straight, stopped, killed = (tmp_path / name for name in ("a", "b", "c"))
    straight_run(finetune, straight, "--num-workers", 1)
    words = ("--eval-every", 4, "--resume")
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    for step, number in zip((1, 3, 6), signals, strict=True):
        late = ("--async-save", "--log-every", 50, "--output-dir", stopped)
        ended = assert_ok(finetune(*words, *late, changes=[stop_in(step, number)]))
        assert f"after step {step}, stopped" in ended.stdout
    assert_ok(finetune(*words, "--output-dir", stopped, changes=[render_nothing]))
    words += ("--save-every", 2, "--async-save", "--output-dir", killed)
    for change in (kill_in(1), kill_in(5), kill_in_save(6), kill_in_save(6)):
        ended = finetune(*words, changes=[change])
        assert set(ended.codes) <= {-signal.SIGKILL, -signal.SIGTERM}, ended.stderr
    assert checkpoints_in(killed)[-1] == "step-00000004"
    assert_ok(finetune(*words, changes=[render_nothing]))
    for folder in (stopped, killed):
        assert rows_of(folder) == rows_of(straight), "bitwise"
        assert rows_of(folder, "test_loss") == rows_of(straight, "test_loss")


@full
def test_another_number_of_ranks_resumes_with_the_same_batch(finetune, tmp_path):
    straight, moved = tmp_path / "a", tmp_path / "b"
    straight_run(finetune, straight, *LORA)
    words = ("--resume", "--output-dir", moved, *LORA)
    for ranks, step in ((2, 2), (1, 5)):
        assert_ok(finetune(*words, ranks=ranks, changes=[stop_in(step)]))
    assert_ok(finetune(*words, ranks=3))
    assert list(rows_of(moved)) == list(range(1, 9))
    assert list(rows_of(moved).values()) == pytest.approx(
        list(rows_of(straight).values()), rel=1e-5
    )


@full
def test_forgotten_moments_change_the_losses_of_a_resumed_run(finetune, tmp_path):
    straight, stopped = tmp_path / "a", tmp_path / "b"
    straight_run(finetune, straight)
    words = ("--resume", "--output-dir", stopped)
    assert_ok(finetune(*words, changes=[stop_in(4)]))
    assert_ok(finetune(*words, changes=[broken.forget_the_moments]))
    assert rows_of(stopped)[8] != rows_of(straight)[8]


def kill_before_the_export(script):
    script.hf.write = lambda *given: os.kill(os.getpid(), signal.SIGKILL)


@full
def test_a_run_killed_before_its_export_exports_when_it_resumes(finetune, tmp_path):
    folder, tuned = tmp_path / "run", tmp_path / "tuned"
    words = ("--max-steps", 2, "--save-every", 2, "--export", tuned)
    words += ("--output-dir", folder, "--resume")
    (tmp_path / "tuned.partial").mkdir()  # of an earlier kill
    ended = finetune(*words, changes=[kill_before_the_export])
    assert set(ended.codes) <= {-signal.SIGKILL, -signal.SIGTERM}, ended.stderr
    assert not tuned.exists() and not (folder / "results.json").exists()
    ended = assert_ok(finetune(*words))
    assert "nothing to do: the checkpoint has step 2" in ended.stdout
    assert f"exported to {tuned}" in ended.stdout and results_of(folder)
    assert transformers.AutoModelForCausalLM.from_pretrained(tuned)
    assert not (tmp_path / "tuned.partial").exists()
    ended = assert_ok(finetune(*words))
    assert "exported" not in ended.stdout, "it is there"
    ended = finetune(*words, "--max-steps", 3)
    assert_one_line(ended, f"--export {tuned} exists", "fsdp_finetune.py")


@full
@pytest.mark.parametrize(
    ("file", "flags", "says"),
    [
        ("chats.jsonl", (), "the run cannot continue on other data or with another"),
        ("config.json", (), "the run cannot continue on other data or with another"),
        (None, LORA, "is of another model"),
    ],
)
def test_a_run_on_other_data_or_another_model_is_refused(
    run_script, tiny, tmp_path, file, flags, says
):
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    words = ("--init-from", model, "--data", model / "chats.jsonl", *SMALL_JOB)
    words += ("--save-every", 2, "--output-dir", tmp_path / "run")
    assert_ok(run_script(SCRIPT, *words, "--max-steps", 2))
    if file:
        (model / file).write_text((model / file).read_text() + "\n ")
        if file == "chats.jsonl":
            lines = (tiny / file).read_text().splitlines()
            (model / file).write_text("\n".join(lines[1:]))
    ended = run_script(SCRIPT, *words, "--resume", *flags)
    assert_one_line(ended, says, "fsdp_finetune.py")


# Families and exports

SHAPE = {
    "vocab_size": 263,  # odd: the ranks' shards are of different sizes
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "eos_token_id": 256,
    "bos_token_id": None,
    "pad_token_id": 256,
}
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {},
    "gemma3_text": {"head_dim": 16},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "smollm3": {},
    "starcoder2": {},
    "glm4": {},
}
LATENT = {
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
CONVERTED = {
    "mixtral": {"num_local_experts": 3},
    "gpt_neox": {"num_key_value_heads": 2},
    "deepseek_v3": LATENT,
}


def make_family(kind: str, tiny: Path, folder: Path, dtype=torch.float32):
    """Write a tiny model of a family with the tokenizer of the tiny Llama."""
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("model*", "config*"))
    shape = SHAPE | (FAMILIES | CONVERTED)[kind]
    config = transformers.AutoConfig.for_model(kind, **shape)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if not tensor.any():  # a zero could be lost unseen
                tensor.normal_(std=0.02)
    if kind in FAMILIES:
        config.save_pretrained(folder)
        tied = model.all_tied_weights_keys
        weights = {n: w for n, w in model.state_dict().items() if n not in tied}
        save_torch_state_dict(weights, folder, max_shard_size="20KB")
    return model


def assert_export_is_what_was_trained(tuned: Path, tiny: Path, run: Path):
    """transformers finds the script's test loss again, from files with known names."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tuned)
    model = model.float()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tuned)
    lines = (tiny / "chats.jsonl").read_text().splitlines()[::20]
    loss_sum, num_tokens = 0.0, 0
    with torch.no_grad():
        for line in lines:
            prompt, answer = (m["content"] for m in json.loads(line)["messages"])
            prompt = tokenizer(f"{prompt}\n").input_ids
            answer = tokenizer(f"{answer}</s>").input_ids
            labels = torch.tensor([[-100] * len(prompt) + answer])
            ids = torch.tensor([prompt + answer])
            loss_sum += len(answer) * model(ids, labels=labels).loss.item()
            num_tokens += len(answer)
    expected = results_of(run)["metrics"]["test_loss"]
    return loss_sum / num_tokens, expected


@full
@pytest.mark.parametrize(
    ("kind", "flags"), [("llama", LORA), *((kind, ()) for kind in FAMILIES)]
)
def test_a_family_trains_and_exports(finetune, tiny, tmp_path, kind, flags):
    """As one process trains it; transformers loads names and weights of the export."""
    folder, tuned, run = (tmp_path / name for name in ("model", "tuned", "run"))
    make_family(kind, tiny, folder)
    words = ("--self-check", "--max-steps", 3, "--eval-every", 3, "--lr", 1e-3, *flags)
    words += ("--output-dir", run, "--export", tuned)
    assert_ok(finetune(*words, model=folder))
    loss, expected = assert_export_is_what_was_trained(tuned, tiny, run)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert hf.find_weights(tuned) == hf.find_weights(folder)
    assert (tuned / "config.json").read_text() == (folder / "config.json").read_text()


@full
@pytest.mark.parametrize("kind", CONVERTED)
def test_a_family_whose_files_have_other_names_trains_once_converted(
    finetune, tiny, tmp_path, kind
):
    folder, converted, tuned, run = (tmp_path / n for n in ("a", "b", "tuned", "run"))
    make_family(kind, tiny, folder).save_pretrained(folder)
    ended = finetune(model=folder)
    assert_one_line(ended, "cannot read ", FILE)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(converted, save_original_format=False)
    build_tokenizer().save_pretrained(converted)
    words = ("--self-check", "--max-steps", 3, "--eval-every", 3, "--lr", 1e-3)
    words += ("--output-dir", run, "--export", tuned)
    assert_ok(finetune(*words, model=converted))
    loss, expected = assert_export_is_what_was_trained(tuned, tiny, run)
    assert loss == pytest.approx(expected, rel=1e-5)


FILE = "fsdp_finetune.py"


@full
def test_a_model_in_bfloat16_comes_out_in_bfloat16(finetune, tiny, tmp_path):
    folder, tuned = tmp_path / "model", tmp_path / "tuned"
    make_family("mistral", tiny, folder, torch.bfloat16)
    assert_ok(finetune("--max-steps", 2, "--export", tuned, model=folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(tuned, dtype="auto")
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def swap_two_weights(script):
    save = script.hf.dcp.save
    one, two = "gate_proj", "up_proj"

    def swapped(weights, **options):
        if any(one in name for name in weights):  # of the export
            names = [n.replace(one, "x").replace(two, one) for n in weights]
            names = [name.replace(".x.", f".{two}.") for name in names]
            weights = dict(zip(names, weights.values(), strict=True))
        save(weights, **options)

    script.hf.dcp.save = swapped


@full
def test_an_export_with_swapped_weights_is_seen(finetune, tiny, tmp_path):
    """The test loss of transformers, which the rows of families compare, differs."""
    tuned, run = tmp_path / "tuned", tmp_path / "run"
    words = ("--max-steps", 3, "--eval-every", 3, "--output-dir", run)
    words += ("--export", tuned)
    assert_ok(finetune(*words, changes=[swap_two_weights]))
    loss, expected = assert_export_is_what_was_trained(tuned, tiny, run)
    assert abs(loss / expected - 1) > 1e-3


@full
def test_lora_leaves_everything_but_the_linear_layers(finetune, tiny, tmp_path):
    assert_ok(finetune("--max-steps", 3, *LORA, "--export", tmp_path / "tuned"))
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (tiny, tmp_path / "tuned")
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "_proj" in name}


# The files that transformers takes


def add_consolidated(folder, weights):
    """Add what Mistral's folders have: all weights again, by other names."""
    renamed = {name.removeprefix("model."): w for name, w in weights.items()}
    save_torch_state_dict(
        renamed, folder, filename_pattern="consolidated{suffix}.safetensors"
    )


def add_stray_shard(folder, weights):
    zeros = {name: torch.zeros_like(w) for name, w in weights.items()}
    save_torch_state_dict(zeros, folder, filename_pattern="old{suffix}.safetensors")


@full
@pytest.mark.parametrize("add", [add_consolidated, add_stray_shard])
def test_files_that_the_index_does_not_list_are_named_and_ignored(
    finetune, tiny, tmp_path, add
):
    folder, tuned, run = (tmp_path / name for name in ("model", "tuned", "run"))
    model = make_family("mistral", tiny, folder)
    index = (folder / hf.INDEX).read_text()
    add(folder, dict(model.named_parameters()))
    (folder / hf.INDEX).write_text(index)
    words = ("--self-check", "--max-steps", 2, "--eval-every", 2)
    words += ("--output-dir", run, "--export", tuned)
    ended = assert_ok(finetune(*words, model=folder))
    name = {add_consolidated: "consolidated", add_stray_shard: "old"}[add]
    assert f"as transformers does: ['{name}.safetensors']" in ended.stdout
    assert json.loads((tuned / hf.INDEX).read_text())["weight_map"].keys() == (
        json.loads(index)["weight_map"].keys()
    )
    loss, expected = assert_export_is_what_was_trained(tuned, tiny, run)
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("change", [0.0, pytest.param(1.0, marks=full)])
def test_a_head_that_the_configuration_ties_has_to_equal_the_embedding(
    finetune, tiny, tmp_path, change
):
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("model*"))
    edit_json(folder / "config.json", tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    weights = dict(model.named_parameters())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + change
    save_torch_state_dict(weights, folder)
    ended = finetune("--max-steps", 1, model=folder)
    if change:
        says = "ties lm_head.weight to model.embed_tokens.weight, but the files hold"
        assert_one_line(ended, says, FILE)
    else:
        assert_ok(ended)


# Clear errors


def break_folder(folder, damage):
    files = sorted(folder.glob("*.safetensors"))
    if damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "not a model":
        edit_json(folder / "config.json", model_type="nonsense")
    elif damage == "no end":
        edit_json(folder / "tokenizer_config.json", eos_token=None)
        (folder / "chat_template.jinja").unlink()
    elif damage == "vocabulary":
        edit_json(folder / "config.json", vocab_size=250)
    elif damage == "shape":
        edit_json(folder / "config.json", intermediate_size=99)
    elif damage == "layers":
        edit_json(folder / "config.json", num_hidden_layers=3)
    elif damage == "no weights":
        for path in [*files, folder / hf.INDEX]:
            path.unlink()
    elif damage == "half a file":
        files[0].write_bytes(files[0].read_bytes()[:100])
    elif damage == "no file":
        files[0].unlink()
    elif damage == "index":
        (folder / hf.INDEX).write_text("{}")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("vocabulary", "has 257 tokens, but vocab_size in config.json is 250"),
        ("no end", "the tokenizer has no token that ends an answer: set eos_token"),
        ("no config", "has no config.json"),
        ("not a model", "nonsense"),
    ],
)
def test_a_folder_that_transformers_could_not_use_is_refused(
    tiny, tmp_path, damage, says
):
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    break_folder(folder, damage)
    with pytest.raises(cli.UsageError, match=re.escape(says)):
        hf.load_config(folder, seq_len=8)


@full
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("shape", "Size mismatch between saved torch.Size([64, 176])"),
        ("layers", "Missing key in checkpoint state_dict: model.layers.2."),
        ("no weights", "has neither model.safetensors nor model.safetensors.index"),
        ("half a file", "cannot read"),
        ("no file", "No such file or directory"),
        ("index", "KeyError: 'weight_map'"),
    ],
)
def test_weights_that_do_not_fit_are_refused(finetune, tiny, tmp_path, damage, says):
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    break_folder(folder, damage)
    assert_one_line(finetune(model=folder), says, FILE)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--seq-len", 9], "0 of 40 chats fit into --seq-len 9: raise it, or add"),
        pytest.param(["--seq-len", 512], "--seq-len must be at most 256", marks=full),
        pytest.param(["--data", "none"], "cannot read --data", marks=full),
        pytest.param(["--export", REPO], f"--export {REPO} exists", marks=full),
    ],
)
def test_a_job_that_cannot_run_is_refused(finetune, argv, says):
    assert_one_line(finetune(*argv), says, FILE)


def test_missing_flags_are_named(run_script):
    ended = run_script(SCRIPT, world_size=1)
    assert_one_line(ended, "are required: --init-from, --data", FILE)


@full
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
@pytest.mark.parametrize("flags", [[], ["--lora-rank", "4"]])
def test_it_runs_on_a_gpu(tiny, flags):
    command = [sys.executable, SCRIPT, "--init-from", str(tiny), "--self-check"]
    command += ["--data", str(tiny / "chats.jsonl"), "--device", "cuda", *flags]
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
