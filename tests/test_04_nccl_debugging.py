"""nccl_debugging.md: the words and names that nobody here saw NCCL print are in its libraries."""

import mmap
import re
from pathlib import Path

import pytest
import torch
from conftest import REPO

FOLDER = REPO / "04-nccl-operations"
PAGE = (FOLDER / "nccl_debugging.md").read_text()
TORCH = Path(torch.__file__).parent


def libraries_of(name):
    if name == "libtorch":
        return [*TORCH.glob("lib/libtorch_c*.so"), *TORCH.glob("lib/libc10.so")]
    return [*TORCH.parent.glob("nvidia/nccl/lib/libnccl.so*")]


def missing_in(files, words):
    """Return the words that none of the files holds."""
    left = set(words)
    for file in files:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as data:
            left -= {word for word in left if data.find(word.encode()) >= 0}
    return left


def section(heading):
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("library", ["libtorch", "libnccl"])
def test_the_words_of_messages_are_in_the_library_that_the_page_names(library):
    if not libraries_of("libnccl"):
        pytest.skip("this PyTorch comes without NCCL")
    rows = re.findall(r"^\| `([^`]+)`[^|]*\| (\w+) \|", section("What NCCL says"), re.M)
    newer = {"Multiple Ranks are using the same GPU"} if torch.cuda.nccl.version() < (2, 30) else ()
    words = [word for word, named in rows if named == library and word not in newer]
    assert len(words) >= 3 and not missing_in(libraries_of(library), words)
    assert {named for _, named in rows} == {"libtorch", "libnccl", "documentation"}


def test_the_words_of_ras_are_in_nccl():
    files = libraries_of("libnccl")
    if not files:
        pytest.skip("this PyTorch comes without NCCL")
    words = ["different %s operation counts", "has launched up to operation",
             "Missing communicator data from", "considered dead (unreachable via the RAS network)",
             "localhost:28028", "verbose status", "NCCL_RAS_ENABLE", "NCCL_RAS_ADDR"]  # fmt: skip
    assert not missing_in(files, words)
    shown = section("It hangs")
    for word in words:
        assert all(piece.strip() in shown for piece in re.split(r"%s|:", word)), word


@pytest.mark.full
def test_every_variable_of_the_recorder_is_one_that_pytorch_reads():
    if not [*TORCH.glob("lib/libtorch_cuda.so")]:
        pytest.skip("this PyTorch comes without NCCL")
    names = set(re.findall(r"\bTORCH_[A-Z_]+\b", PAGE))
    assert len(names) >= 9 and not missing_in(libraries_of("libtorch"), names)


def test_every_case_on_the_page_is_in_the_gallery():
    """A word in backquotes with a hyphen and no capital is a case: `rank-hangs`."""
    cases = {folder.name for folder in (FOLDER / "failures").iterdir() if folder.is_dir()}
    named = set(re.findall(r"`([a-z]+(?:-[a-z0-9]+)+)`", PAGE))
    assert len(named) > 20 and named <= cases, named - cases
