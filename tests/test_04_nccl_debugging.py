"""nccl_debugging.md: the words and names that it quotes are in PyTorch and NCCL."""

import mmap
import re
from pathlib import Path

import pytest
import torch
from conftest import REPO

FOLDER = REPO / "04-nccl-operations"
PAGE = (FOLDER / "nccl_debugging.md").read_text()
TORCH = Path(torch.__file__).parent
RAS = (
    "different %s operation counts",
    "has launched up to operation",
    "Missing communicator data from",
    "considered dead (unreachable via the RAS network)",
    "localhost:28028",
    "verbose status",
)


def libraries_of(name):
    if name == "libtorch":
        return [*TORCH.glob("lib/libtorch_c*.so"), *TORCH.glob("lib/libc10.so")]
    return [*TORCH.parent.glob("nvidia/nccl/lib/libnccl.so*")]


def missing_in(files, words):
    """Return the words that none of the files holds."""
    left = set(words)
    for file in files:
        with (
            file.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as data,
        ):
            left -= {word for word in left if data.find(word.encode()) >= 0}
    return left


def words_of(library):
    """Return the words of the page's last table that are from a library."""
    if library == "RAS":
        return RAS
    section = PAGE.split("\n## What NCCL says\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)`[^|]*\| (\w+) \|", section, re.M)
    old = torch.cuda.nccl.version() < (2, 30)
    newer = {"Multiple Ranks are using the same GPU"} if old else ()
    return [word for word, named in rows if named == library and word not in newer]


@pytest.mark.parametrize("library", ["libtorch", "libnccl", "RAS"])
def test_the_words_of_messages_are_in_the_libraries(library):
    if not libraries_of("libnccl"):
        pytest.skip("this PyTorch comes without NCCL")
    words = words_of(library)
    assert len(words) >= 3 and not missing_in(libraries_of(library), words)


@pytest.mark.full
def test_every_variable_on_the_pages_is_one_that_a_library_reads():
    if not [*TORCH.glob("lib/libtorch_cuda.so")]:
        pytest.skip("this PyTorch comes without NCCL")
    pages = PAGE + (FOLDER / "variables.md").read_text()
    names = set(re.findall(r"\b(?:TORCH_[A-Z_]+|NCCL_[A-Z0-9_]+)\b", pages))
    files = [*libraries_of("libtorch"), *libraries_of("libnccl")]
    # NCCL names its parameters without the prefix.
    left = missing_in(files, names - {"NCCL_TIMEOUT"})
    short = {name.removeprefix("NCCL_") for name in left if name.startswith("NCCL_")}
    assert len(names) >= 20 and not missing_in(files, short)
    assert not [name for name in left if name.startswith("TORCH_")]


def test_every_case_on_the_page_is_in_the_gallery():
    """A word in backquotes with a hyphen and no capital is a case: `rank-hangs`."""
    cases = {path.parent.name for path in (FOLDER / "failures").glob("*/broken.py")}
    named = set(re.findall(r"`([a-z]+(?:-[a-z0-9]+)+)`", PAGE))
    assert len(named) > 10 and named <= cases, named - cases
