"""Write a folder of tokens, which the templates' --tokens reads, from text files or JSON lines.

    any   python 02-fsdp/make_tokens.py 02-fsdp/*.md --to runs/tokens
    any   python 02-fsdp/make_tokens.py part-*.jsonl --tokenizer DIR --num-workers 16 --to runs/web

A text file is one document; a .jsonl file has one in each line, {"text": "..."}. DIR is a folder
with a tokenizer of Hugging Face's; without it a byte is a token. Each document ends with the
tokenizer's token for that, byte 0 of bytes. Look for: as many ends as documents, the same checksum
when the folder is read again (--verify).

Sources: Radford et al., Language Models are Unsupervised Multitask Learners (2019), for a token
that ends each document; huggingface.co/docs, "Tokenizer"; numpy.org, numpy.memmap.
"""

import argparse
import collections
import hashlib
import json
import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from legacy_common import cli, output
from legacy_common.tokens import ENDS, ENDS_TYPE, MANIFEST, TOKENS, TYPES, Folder

CHUNK = 2**20  # characters of whole documents that a process encodes at a time
LARGEST = 2**28  # bytes of a document: it is in memory whole, a few times
READ = 2**20  # tokens that --verify has in memory at a time
BYTE_END = 0


def documents_of(paths):
    """Yield (where, text or line of JSON) of each document, one at a time in memory."""
    for path in paths:
        lines = path.suffix == ".jsonl"
        try:
            if not lines and path.stat().st_size > LARGEST:
                large = f"{path} is one document of more than {LARGEST >> 20} MiB"
                raise cli.UsageError(f"{large}: cut it into lines of a .jsonl file")
            with open(path, "rb") as file:
                for number, content in enumerate(file if lines else [file.read()], 1):
                    where = f"{path}, line {number}" if lines else str(path)
                    if text := content.strip() and text_of(where, content, lines):
                        yield where, text  # what is empty is no document
        except OSError as error:
            raise cli.UsageError(f"{path}: {error.strerror}") from error


def text_of(where, content, is_json):
    """Return a document's text. Raises: UsageError with the file and line that has none."""
    try:
        text = json.loads(content)["text"] if is_json else content.decode()
        if not isinstance(text, str):
            raise TypeError(f'"text" is {json.dumps(text)[:40]}')
        text.encode()  # JSON may hold half a character, which no tokenizer takes
    except (KeyError, TypeError, ValueError) as error:
        form = 'no {"text": "..."}' if is_json else "no text in UTF-8"
        raise cli.UsageError(f"{where}: {form} ({type(error).__name__}: {error})") from error
    return text


def chunks_of(documents):
    """Group documents to about CHUNK characters."""
    chunk, size = [], 0
    for document in documents:
        chunk.append(document)
        size += len(document[1])
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class Bytes:
    """A byte is a token, and byte 0, which text does not have, ends a document."""

    name, end_id, vocab_size = "bytes", BYTE_END, 256

    def __call__(self, texts):
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


class OfFolder:
    """A tokenizer of Hugging Face's, its own or the one beside a model. Raises: UsageError."""

    def __init__(self, folder):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would survive no fork
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise cli.UsageError(f"{error}: pip install transformers") from error
        if not folder.is_dir():  # else transformers would ask its hub
            raise cli.UsageError(f"--tokenizer {folder}: no such folder")
        try:
            self.inner = AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # of transformers' many kinds
            why = " ".join(str(error).split())[:200]
            raise cli.UsageError(f"--tokenizer {folder}: cannot be read ({why})") from error
        self.end_id, self.vocab_size = self.inner.eos_token_id, len(self.inner)
        if self.end_id is None:
            none = "it has no eos_token, which would end each document"
            raise cli.UsageError(f"--tokenizer {folder}: {none}: name one in tokenizer_config.json")
        words = json.dumps(sorted(self.inner.get_vocab().items()))
        self.name = f"a tokenizer with sha256 {hashlib.sha256(words.encode()).hexdigest()[:16]}"

    def __call__(self, texts):
        # A document about "</s>" is to hold these letters, not the token.
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return [np.array(ids) for ids in self.inner(texts, **options).input_ids]


def encode(tokenizer, chunk):
    """Return a chunk's tokens, ended documents one after another, and the length of each."""
    kind = TYPES[type_for(tokenizer.vocab_size)]
    end = np.array([tokenizer.end_id], kind)
    parts, lengths = [], []
    texts = [text for _, text in chunk]
    for (where, _), ids in zip(chunk, tokenizer(texts), strict=True):
        if (ids == tokenizer.end_id).any():
            what = f"it has token {tokenizer.end_id} inside, which ends a document"
            raise cli.UsageError(f"{where}: {what}: leave the document out, or cut it there")
        parts += [ids.astype(kind), end]
        lengths.append(len(ids) + 1)
    return np.concatenate(parts), np.array(lengths)


def type_for(vocab_size):
    """Return the smallest type that holds all ids."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def start_worker(tokenizer):
    global own_tokenizer  # of this process: sent with each chunk it would take longer
    own_tokenizer = tokenizer


def encode_in_worker(chunk):
    return encode(own_tokenizer, chunk)


def encoded(tokenizer, chunks, workers):
    """Yield what `encode` returns of each chunk, in their order; few chunks are in memory."""
    if not workers:
        yield from (encode(tokenizer, chunk) for chunk in chunks)
        return
    context = multiprocessing.get_context("fork")  # they have the tokenizer from the start
    waiting = collections.deque()
    with ProcessPoolExecutor(workers, context, start_worker, (tokenizer,)) as pool:
        try:
            for chunk in chunks:
                waiting.append(pool.submit(encode_in_worker, chunk))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise cli.UsageError("a process of --num-workers died: out of memory?") from error
        finally:
            pool.shutdown(cancel_futures=True)


def write(folder, tokenizer, pieces):
    """Write tokens, ends and manifest to an empty folder; return the manifest."""
    digest, size, documents, largest = hashlib.sha256(), 0, 0, 0
    with open(folder / TOKENS, "wb") as tokens, open(folder / ENDS, "wb") as ends:
        for ids, lengths in pieces:
            tokens.write(ids)
            digest.update(ids)
            ends.write((size + lengths.cumsum()).astype(ENDS_TYPE))
            size, documents = size + len(ids), documents + len(lengths)
            largest = max(largest, int(ids.max()))
        for file in (tokens, ends):
            file.flush()
            os.fsync(file.fileno())
    about = {
        "dtype": type_for(tokenizer.vocab_size), "tokens": size, "documents": documents,
        "vocab_size": tokenizer.vocab_size, "largest_id": largest, "end_id": tokenizer.end_id,
        "tokenizer": tokenizer.name, "sha256": digest.hexdigest(),
    }  # fmt: skip
    if not documents:
        raise cli.UsageError("the files hold no document")
    (folder / MANIFEST).write_text(json.dumps(about, indent=1))
    return about


def make(args):
    """Write --to under another name, and rename it when it is whole."""
    missing = [path for path in args.files if not path.is_file()]
    if missing:  # before hours of work
        raise cli.UsageError(f"{missing[0]}: no such file")
    output.claim_empty(args.to, "--to")
    tokenizer = OfFolder(args.tokenizer) if args.tokenizer else Bytes()
    to = Path(args.to)
    partial = to.with_name(f"{to.name}.partial")
    try:
        with FileLock(f"{partial}.lock", timeout=0):
            shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
            partial.mkdir()
            try:
                chunks = chunks_of(documents_of(args.files))
                pieces = encoded(tokenizer, chunks, args.num_workers)
                about = write(partial, tokenizer, pieces)
                partial.rename(to)  # takes the place of the empty one
            finally:
                shutil.rmtree(partial, ignore_errors=True)
                Path(f"{partial}.lock").unlink(missing_ok=True)
    except Timeout as error:
        raise cli.UsageError(f"--to {to} is being written by another process") from error
    except OSError as error:
        raise cli.UsageError(f"--to {to} cannot be written: {error.strerror}") from error
    say(to, about["documents"], about["tokens"], about["dtype"])


def say(folder, documents, tokens, kind):
    each = f"{documents:,} documents, {tokens:,} tokens of {kind}"
    print(f"{folder}: {each}, {tokens / documents:,.0f} a document")


def verify(folder):
    """Read a whole folder; hold what is there against its manifest and its table of ends."""
    found = Folder(folder)
    digest, ended, largest = hashlib.sha256(), 0, 0
    for start in range(0, found.size, READ):
        piece = np.asarray(found.tokens[start : start + READ])
        digest.update(piece)
        ends = start + 1 + np.flatnonzero(piece == found.end_id)
        if not np.array_equal(found.ends[ended : ended + len(ends)], ends):
            raise cli.UsageError(f"{folder}: {ENDS} and {TOKENS} differ after token {start:,}")
        ended, largest = ended + len(ends), max(largest, int(piece.max()))
    read = {"sha256": digest.hexdigest(), "documents": ended, "largest_id": largest}
    about = {"sha256": found.checksum, "documents": found.documents, "largest_id": found.largest_id}
    for name, value in read.items():
        if value != about[name]:
            raise cli.UsageError(f"{folder}: {name} is {value}, its manifest says {about[name]}")
    say(folder, ended, found.size, found.kind.name)
    print(f"OK: checksum, {ended:,} ends and the largest id, {largest}, are those of {MANIFEST}")


class Parser(argparse.ArgumentParser):
    """argparse, with its errors in one line."""

    def error(self, message):
        raise cli.UsageError(message)


def parse_args():
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help="text, or JSON lines in .jsonl")
    add("--to", metavar="FOLDER", help="write the tokens to this folder, which is new or empty")
    add("--tokenizer", type=Path, metavar="DIR", help="of Hugging Face's (without: bytes)")
    add("--num-workers", type=cli.whole_number, default=0,
        help="processes that encode; 0 encodes in this one (0)")  # fmt: skip
    add("--verify", metavar="FOLDER", help="read a folder, and compare it with its manifest")
    args = parser.parse_args()
    if bool(args.verify) == bool(args.files and args.to):
        parser.error("give files and --to FOLDER, or --verify FOLDER alone")
    return args


def main():
    args = parse_args()
    verify(args.verify) if args.verify else make(args)
    return 0


if __name__ == "__main__":
    cli.run(main)
