"""Folders of tokens: what make_tokens.py writes; templates train on it, stop and resume."""

import errno
import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import filelock
import numpy as np
import pytest
from conftest import load_script, results_of
from helpers_02 import quick
from helpers_03 import SMALL_MODEL
from helpers_tokens import MAKE, words, write_folder

transformers = pytest.importorskip("transformers")
assert transformers.LlamaForCausalLM  # imported now, so that no fork has to

from fsdp_parts import fsdp_finetune  # noqa: E402
from legacy_common import cli, models, tokens  # noqa: E402

DDP = "01-ddp-basics/ddp_training.py"
FSDP = "02-fsdp/fsdp_transformer.py"


script = load_script(MAKE)
full = pytest.mark.full
pytestmark = pytest.mark.xdist_group("transformers")  # one worker imports it


def make(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", [MAKE, *map(str, argv)])
    return script.main()


def documents_in(folder):
    """Return each document's ids, by the table of ends, without its last token."""
    found = tokens.Folder(folder)
    starts = [0, *found.ends.tolist()]
    return [found.tokens[a : b - 1].tolist() for a, b in itertools.pairwise(starts)]


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A text file and one of JSON lines; the test runs in their folder."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("to be\nor not to be\n\nthat is")
    lines = [{"text": "the question"}, {"text": "é", "url": "ignored"}, {"text": ""}]
    Path("b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return ["to be\nor not to be\n\nthat is", "the question", "é"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    folder.mkdir()
    fsdp_finetune.make_tiny(str(folder), seed=0)
    return folder


def test_bytes_of_text_and_of_json_lines(texts, monkeypatch, capsys):
    assert make(monkeypatch, "a.txt", "b.jsonl", "--to", "out") == 0
    assert [bytes(ids).decode() for ids in documents_in("out")] == texts
    about = json.loads(Path("out/manifest.json").read_text())
    size = sum(len(text.encode()) + 1 for text in texts)
    named = ("dtype", "tokens", "documents", "vocab_size", "end_id", "tokenizer")
    assert [about[name] for name in named] == ["uint16", size, 3, 256, 0, "bytes"]
    assert "3 documents, 44 tokens of uint16" in capsys.readouterr().out
    assert make(monkeypatch, "--verify", "out") == 0
    assert "OK: checksum, 3 ends" in capsys.readouterr().out
    assert sorted(path.name for path in Path().iterdir()) == ["a.txt", "b.jsonl", "out"]


def test_ids_of_a_tokenizer_of_hugging_face(texts, tiny, monkeypatch):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    special = f"it ends with {tokenizer.eos_token} here"
    Path("c.jsonl").write_text(json.dumps({"text": special}))
    make(monkeypatch, "a.txt", "b.jsonl", "c.jsonl", "--tokenizer", tiny, "--to", "out")
    found = documents_in("out")
    assert found[:3] == [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    assert tokenizer.decode(found[3]) == special and tokenizer.eos_token_id not in found[3]
    about = json.loads(Path("out/manifest.json").read_text())
    assert about["end_id"] == tokenizer.eos_token_id and about["vocab_size"] == len(tokenizer)
    assert about["tokenizer"] == script.OfFolder(tiny).name != "bytes"


def test_ids_above_65535_take_four_bytes(tmp_path):
    assert [script.type_for(size) for size in (65_536, 65_537)] == ["uint16", "uint32"]
    ids = [[7, 128_000], [65_535, 65_536]]
    write_folder(tmp_path / "out", ids, end=128_001, vocab_size=128_256)
    assert documents_in(tmp_path / "out") == ids
    assert (tmp_path / "out" / "tokens.bin").stat().st_size == 6 * 4


def test_few_documents_are_in_memory(tmp_path, monkeypatch):
    lines = tmp_path / "many.jsonl"
    lines.write_text(f"{json.dumps({'text': 'x' * 100})}\n" * 5000)
    monkeypatch.setattr(script, "CHUNK", 1000)
    read = []

    def counted():
        for document in script.documents_of([lines]):
            read.append(1)
            yield document

    pieces = script.encoded(script.Bytes(), script.chunks_of(counted()), 0)
    for number in (1, 2, 3):
        ids, lengths = next(pieces)
        assert len(lengths) == 10 and len(ids) == 1010
        assert len(read) == 10 * number, "read when it is needed"


def test_several_processes_write_the_same_folder(texts, tiny, in_a_fork, monkeypatch):
    """A chunk for each line: more than the processes may hold at a time."""
    monkeypatch.setattr(script, "CHUNK", 100)
    lines = [json.dumps({"text": f"{number} " * number}) for number in range(60)]
    Path("many.jsonl").write_text("\n".join(lines))
    argv = ("many.jsonl", "b.jsonl", "--tokenizer", tiny, "--num-workers")
    in_a_fork(lambda: [make(monkeypatch, *argv, n, "--to", f"out-{n}") for n in (0, 2)])
    for name in ("tokens.bin", "ends.bin", "manifest.json"):
        assert Path("out-0", name).read_bytes() == Path("out-2", name).read_bytes()
    Path("many.jsonl").write_text("\n".join([*lines, "{"]))

    def refused():
        with pytest.raises(cli.UsageError, match="many.jsonl, line 61: no"):
            make(monkeypatch, *argv, 2, "--to", "out")

    in_a_fork(refused)
    assert not any(Path("out").iterdir())


@pytest.mark.parametrize(
    ("content", "argv", "says"),
    [
        ({}, "none.txt --to out", "none.txt: no such file"),
        ({"x.jsonl": '{"text": "a"}\n{"text": 5}'}, "x.jsonl --to out",
         'x.jsonl, line 2: no {"text": "..."} (TypeError: "text" is 5)'),
        ({"x.txt": b"\xff"}, "x.txt --to out", "x.txt: no text in UTF-8"),
        ({"x.txt": "a\0b"}, "x.txt --to out", "x.txt: it has token 0 inside, which ends a"),
        ({"x.txt": "a", "out/y": "b"}, "x.txt --to out", "--to out is not empty"),
        ({"x.txt": "a"}, "x.txt --to out --tokenizer none", "--tokenizer none: no such folder"),
        ({"x.txt": "a"}, "x.txt", "give files and --to FOLDER, or --verify FOLDER alone"),
    ],
)  # fmt: skip
def test_bad_input_is_named_and_leaves_nothing(tmp_path, monkeypatch, content, argv, says):
    monkeypatch.chdir(tmp_path)
    for name, text in content.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(cli.UsageError) as refused:
        make(monkeypatch, *argv.split())
    assert says in str(refused.value)
    left = {str(path) for path in Path().rglob("*") if path.is_file()}
    assert left == set(content), "nothing is half written"


def test_what_was_killed_is_written_anew(texts, monkeypatch):
    Path("out.partial").mkdir()
    Path("out.partial/tokens.bin").write_text("of a run that was killed")
    assert make(monkeypatch, "a.txt", "--to", "out") == 0
    assert not Path("out.partial").exists() and len(documents_in("out")) == 1


def test_what_another_process_writes_and_a_full_disk_are_named(texts, monkeypatch):
    with (
        filelock.FileLock("out.partial.lock"),
        pytest.raises(cli.UsageError, match="--to out is being written by another process"),
    ):
        make(monkeypatch, "a.txt", "--to", "out")
    monkeypatch.setattr(script.os, "fsync", full_disk)
    with pytest.raises(cli.UsageError, match="--to out cannot be written: No space left"):
        make(monkeypatch, "a.txt", "--to", "out")
    assert {path.name for path in Path().iterdir()} == {"a.txt", "b.jsonl", "out"}


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def flip(name, place):
    def damage(folder):
        content = bytearray((folder / name).read_bytes())
        content[place] ^= 1
        (folder / name).write_bytes(content)

    return damage


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (flip("tokens.bin", 2), "sha256 is"),
        (flip("ends.bin", 8), "ends.bin and tokens.bin differ after token 0"),
    ],
)
def test_verify_finds_what_is_not_as_it_was_written(tmp_path, monkeypatch, damage, says):
    folder = write_folder(tmp_path / "one", words(0, 30))
    make(monkeypatch, "--verify", folder)
    damage(folder)
    with pytest.raises(cli.UsageError, match=says):
        make(monkeypatch, "--verify", folder)


# trained on


@pytest.fixture
def train(run_script, tmp_path):
    """Train a template on two folders of short documents, by weights."""
    folders = [f"{write_folder(tmp_path / name, words(seed, 300))}={weight}"
               for seed, (name, weight) in enumerate((("one", 3), ("two", 1)))]  # fmt: skip

    def run(template, *argv, ranks=2, before=lambda script: None, sources=folders):
        def change(module):
            models.PRESETS["tiny"] = SMALL_MODEL
            before(module)

        arguments = ["--tokens", *sources, "--document-attention", "--global-batch-size", 12,
                     "--micro-batch-size", 2, "--seq-len", 32, "--max-steps", 12, "--lr", 1e-2,
                     "--warmup-steps", 2, "--log-every", 1]  # fmt: skip
        return run_script(template, *arguments, *argv, world_size=ranks, before=change)

    run.folders = folders
    return run


@full
def test_from_a_folder_of_transformers_with_its_tokens(train, tmp_path, tiny):
    """Compared with transformers' own model, which reads each document alone."""
    documents = [[ids % 200 for ids in document] for document in words(5, 200)]
    folder = write_folder(tmp_path / "ids", documents, end=256, vocab_size=257)
    argv = ("--init-from", tiny, "--max-steps", 2, "--parity-steps", 1)
    output = tmp_path / "run"
    ended = train(FSDP, *argv, "--output-dir", output, sources=[str(folder)])
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert GRADIENT in {check["name"] for check in results_of(output)["checks"]}


GRADIENT = "gradient: relative error against one process"
COUNTED = "tokens trained on, from step 1"


def forget_the_mask(module):
    models.document_mask = lambda documents, positions: models.torch.ones(
        len(documents), 1, len(positions), documents.shape[1], dtype=models.torch.bool
    ).tril(int(positions[0]))


def count_targets_across_documents(module):
    plain = tokens.TokenSequences.__getitem__

    def across(self, index):
        end, self.document_end = self.document_end, None
        item = plain(self, index)
        self.document_end = end
        return item

    tokens.TokenSequences.__getitem__ = across


@pytest.mark.parametrize(
    ("template", "sabotage", "failing"),
    quick(2, [
        (FSDP, forget_the_mask, {GRADIENT, "loss", "gradient norm"}),
        (DDP, count_targets_across_documents, {COUNTED, "test tokens counted"}),
    ]),
)  # fmt: skip
def test_sabotage_fails_its_check(train, tmp_path, template, sabotage, failing):
    parity = 1 if GRADIENT in failing else 0  # it would end before the others are looked at
    argv = ("--max-steps", 2, "--output-dir", tmp_path / "run", "--parity-steps", parity)
    ended = train(template, *argv, before=sabotage)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    failed = {check["name"] for check in results_of(tmp_path / "run")["checks"] if not check["ok"]}
    assert failed == failing, ended.stdout


@pytest.mark.parametrize(
    ("template", "argv", "says"),
    quick(2, [
        (DDP, "--text-file a", "--tokens: not allowed with --text-file or --whole-lines"),
        (FSDP, "--preset tiny", "--preset tiny: vocab_size is 100: an id in --tokens is 122"),
    ]),
)  # fmt: skip
def test_what_cannot_be_trained_on_is_refused(train, template, argv, says):
    def narrow(module):
        models.PRESETS["tiny"] = replace(SMALL_MODEL, vocab_size=100)

    ended = train(
        template, *argv.split(), ranks=1, before=narrow if "--preset" in argv else lambda _: None
    )
    assert 2 in ended.codes and says in ended.stderr, ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_document_attention_needs_tokens(run_script):
    ended = run_script(DDP, "--document-attention")
    assert 2 in ended.codes and "--document-attention needs --tokens" in ended.stderr


def test_a_wrong_token_ends_the_run_in_one_line(train, tmp_path):
    """Not as a GPU would: by an assertion in a kernel, some steps later."""
    path = Path(train.folders[0].split("=")[0]) / "tokens.bin"
    content = np.fromfile(path, "<u2")
    content[:] = 300
    content.tofile(path)
    ended = train(DDP, "--parity-steps", 0)
    assert 2 in ended.codes and "token 300 in tokens.bin" in ended.stderr, ended.stderr
    assert len(ended.stderr.splitlines()) == 1
