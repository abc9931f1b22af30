"""What tests of token folders share: folders whose tokens say where they stand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from conftest import load_script

from legacy_common import tokens

MAKE = "02-fsdp/make_tokens.py"


def write_folder(folder: Path, documents: list[list[int]], end: int = 0, **about) -> Path:
    """Write documents of ids as make_tokens.py does; `about` changes what the manifest says."""
    script = load_script(MAKE)

    class Ids(script.Bytes):
        end_id, vocab_size = end, about.pop("vocab_size", 256)

        def __call__(self, texts):
            return [np.array(ids) for ids in texts]

    folder.mkdir(parents=True)
    chunk = [(f"document {number}", ids) for number, ids in enumerate(documents)]
    found = script.write(folder, Ids(), [script.encode(Ids(), chunk)])
    (folder / tokens.MANIFEST).write_text(json.dumps(found | about))
    return folder


def words(seed: int, count: int, longest: int = 40, alphabet: int = 26) -> list[list[int]]:
    """Return documents of unequal lengths, which a model can learn from."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, longest, count)
    starts = draw.integers(0, alphabet, count)
    return [[97 + (first + k) % alphabet for k in range(size)]
            for first, size in zip(starts.tolist(), lengths.tolist(), strict=True)]  # fmt: skip
