"""Folders of tokens: what make_tokens.py writes; templates train on it, stop and resume."""

import errno
import itertools
import json
import os
import sys
from pathlib import Path

import filelock
import pytest
from conftest import assert_one_line, load_script
from helpers_templates import DDP, FSDP, rows_of, small_model
from helpers_tokens import MAKE, words, write_folder

transformers = pytest.importorskip("transformers")
assert transformers.LlamaForCausalLM  # imported now, so that no fork has to

from legacy_common import cli, tokens  # noqa: E402
from make_tiny_llama import make_tiny_llama  # noqa: E402

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
    make_tiny_llama(str(folder))
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


# Training on a folder


@pytest.fixture
def train(run_script, tmp_path):
    """Train a template on a folder of short documents."""
    folder = write_folder(tmp_path / "one", words(0, 300))

    def run(template, *argv, ranks=2):
        job = ["--global-batch-size", 12, "--micro-batch-size", 2, "--seq-len", 32, "--max-steps",
               4, "--warmup-steps", 2, "--log-every", 1, "--tokens", folder]  # fmt: skip
        return run_script(template, *job, *argv, world_size=ranks, before=small_model())

    run.folder = folder
    return run


@pytest.mark.parametrize("template", [DDP, pytest.param(FSDP, marks=full)])
def test_a_template_trains_on_a_folder_and_resumes_on_other_ranks(train, tmp_path, template):
    straight, moved = tmp_path / "a", tmp_path / "b"
    ended = train(template, "--output-dir", straight)
    assert ended.codes == [0, 0] and "checks passed" in ended.stdout, ended.stderr
    words = ("--resume", "--save-every", 2, "--output-dir", moved)
    assert train(template, *words, "--max-steps", 2).codes == [0, 0]
    ended = train(template, *words, "--max-steps", 4, ranks=3)
    assert ended.codes == [0] * 3, ended.stderr
    assert rows_of(moved)[3] == pytest.approx(rows_of(straight)[3], abs=2e-2)
    train(template, "--output-dir", tmp_path / "c", "--seed", 1)
    assert rows_of(tmp_path / "c")[3] != pytest.approx(rows_of(straight)[3], abs=1e-4)


def cut_short(folder):
    path = folder / "tokens.bin"
    path.write_bytes(path.read_bytes()[:-2])


def name_a_larger_id(folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"largest_id": 300}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut_short, "tokens, its manifest says"),
        (name_a_larger_id, "--preset tiny has 256 tokens, the data 301"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "one: damaged ('dtype')"),
    ],
)
def test_a_folder_that_cannot_be_trained_on_is_refused(train, damage, says):
    damage(train.folder)
    assert_one_line(train(DDP), says, "ddp_training.py")
