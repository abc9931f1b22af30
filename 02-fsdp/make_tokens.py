"""Write a folder of tokens, which the templates' --tokens reads, from your documents.

    CPU   python 02-fsdp/make_tokens.py 02-fsdp/*.md --to runs/tokens
    CPU   python 02-fsdp/make_tokens.py part-*.jsonl --tokenizer DIR --to runs/web

A text file is one document. A .jsonl file has one per line: {"text": "..."}. DIR holds
a tokenizer of Hugging Face; without it a byte is a token. One token ends each document:
the tokenizer's eos_token, byte 0 for bytes.

Source: Radford et al., Language Models are Unsupervised Multitask Learners (2019).
"""

import argparse
import hashlib
import json
import shutil
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from dist_common import cli

CHUNK = 1000  # documents in memory at a time


def read_documents(paths):
    """Yield (where it is, text) of each document. Raises: UsageError."""
    for path in paths:
        is_jsonl = path.suffix == ".jsonl"
        where = path
        try:
            with open(path, encoding="utf-8") as file:
                for number, text in enumerate(file if is_jsonl else [file.read()], 1):
                    if is_jsonl:
                        where = f"{path}, line {number}"
                        text = json.loads(text)["text"]
                    text.encode()  # JSON may hold numbers, or half a character
                    if text:
                        yield where, text
        except OSError as error:
            raise cli.UsageError(f"{path}: {error.strerror}") from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            form = '{"text": "..."} in UTF-8' if is_jsonl else "text in UTF-8"
            raise cli.UsageError(f"{where}: not {form} ({error!r})") from error


class ByteTokenizer:
    """A byte is a token. Byte 0, which text does not contain, ends a document."""

    vocab_size = 256
    document_end = 0

    def encode(self, texts):
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


class FolderTokenizer:
    """A tokenizer of Hugging Face. Its threads use all cores. Raises: UsageError."""

    def __init__(self, folder):
        try:
            if not folder.is_dir():  # transformers would ask its hub
                raise ValueError("no such folder")
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
            self.vocab_size = len(self.tokenizer)
            self.document_end = self.tokenizer.eos_token_id
            if self.document_end is None:
                raise ValueError("no eos_token in tokenizer_config.json")
        except (ImportError, KeyError, OSError, ValueError) as error:
            raise cli.UsageError(f"--tokenizer {folder}: {error}") from error

    def encode(self, texts):
        # A document about "</s>" gets these letters, not the token.
        encoded = self.tokenizer(
            texts, add_special_tokens=False, split_special_tokens=True, verbose=False
        )
        return [np.array(ids) for ids in encoded.input_ids]


def encode_documents(documents, tokenizer, dtype):
    """Yield the tokens of each document with its end. Raises: UsageError."""
    documents = iter(documents)
    while chunk := list(islice(documents, CHUNK)):
        encoded = tokenizer.encode([text for _, text in chunk])
        for (where, _), ids in zip(chunk, encoded, strict=True):
            if (ids == tokenizer.document_end).any():
                raise cli.UsageError(
                    f"{where}: token {tokenizer.document_end} ends a document, and "
                    "this one contains it: leave the document out, or cut it there"
                )
            yield np.append(ids, tokenizer.document_end).astype(dtype)


def write_tokens(folder, documents, tokenizer):
    """Write tokens.bin and manifest.json; return the manifest."""
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    digest = hashlib.sha256()
    num_tokens, num_documents, largest_id = 0, 0, 0
    with open(folder / "tokens.bin", "wb") as file:
        for ids in encode_documents(documents, tokenizer, dtype):
            file.write(ids)
            digest.update(ids)
            num_tokens += len(ids)
            num_documents += 1
            largest_id = max(largest_id, int(ids.max()))
    if num_documents == 0:
        raise cli.UsageError("the files hold no document")
    about = {
        "dtype": dtype,
        "tokens": num_tokens,
        "documents": num_documents,
        "vocab_size": tokenizer.vocab_size,
        "largest_id": largest_id,
        "document_end": tokenizer.document_end,
        "sha256": digest.hexdigest(),
    }
    (folder / "manifest.json").write_text(json.dumps(about, indent=1))
    return about


class TokensParser(argparse.ArgumentParser):
    """argparse with errors in one line."""

    def error(self, message):
        raise cli.UsageError(message)


def parse_args():
    parser = TokensParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="text, or lines of JSON")
    add("--to", type=Path, required=True, metavar="FOLDER", help="a new folder")
    add("--tokenizer", type=Path, metavar="DIR", help="of Hugging Face (bytes)")
    return parser.parse_args()


def main():
    args = parse_args()
    if args.to.exists():
        raise cli.UsageError(f"--to {args.to} exists: name another folder")
    tokenizer = ByteTokenizer()
    if args.tokenizer:
        tokenizer = FolderTokenizer(args.tokenizer)
    partial = args.to.with_name(f"{args.to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir(parents=True)
    about = write_tokens(partial, read_documents(args.files), tokenizer)
    partial.rename(args.to)  # it gets its name when it is complete
    print(
        f"{args.to}: {about['documents']:,} documents, {about['tokens']:,} tokens of "
        f"{about['dtype']}"
    )


if __name__ == "__main__":
    cli.run(main)
