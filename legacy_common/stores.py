"""Folders in an object store, by URL: what this package asks of a pathlib.Path, through fsspec."""

import contextlib
import shutil
import warnings
from pathlib import Path
from typing import IO

import numpy as np
from fsspec.core import url_to_fs  # one driver per process: looked up anew, as none survives a fork

from legacy_common.cli import UsageError

warnings.filterwarnings("ignore", "fsync not supported")  # PyTorch's, of each file in a store


class Remote(str):
    """A folder or file of an object store. Raises: UsageError where no driver serves its URL."""

    def __new__(cls, url: str, flag: str = "") -> "Remote":
        self = super().__new__(cls, url.rstrip("/"))
        scheme, _, path = self.partition("://")
        self.name, self.flag = path.rpartition("/")[2], flag
        try:
            if not (scheme and path):
                raise ValueError("must be the URL of a folder, as s3://bucket/run")
            url_to_fs(self)
        except (ImportError, ValueError) as error:  # such as "Install s3fs to access S3"
            raise UsageError(f"{flag} {url}: {error}") from error
        return self

    def __truediv__(self, name: str) -> "Remote":
        return Remote(f"{self}/{name}", self.flag)

    def open(self, mode: str = "r") -> IO:
        files, path = url_to_fs(self)
        return files.open(path, mode)

    def mkdir(self, parents: bool = True) -> None:
        files, path = url_to_fs(self)
        files.makedirs(path, exist_ok=True)


AnyPath = Path | Remote


def sizes_in(folder: AnyPath) -> dict[str, int]:
    """Return the bytes of each file below a folder, by its name relative to it."""
    if isinstance(folder, Path):
        files = (path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.stat().st_size for path in files}
    files, top = url_to_fs(folder)
    files.invalidate_cache()  # other ranks write there
    try:
        found = files.find(top, detail=True)
    except Exception as error:  # drivers have errors of their own
        raise UsageError(f"{folder.flag} {folder}: {error}") from error
    return {name.removeprefix(top).lstrip("/"): found[name]["size"] for name in found}


def remove(folder: AnyPath, ignore_errors: bool = False) -> None:
    """Remove a folder with all that is in it."""
    if isinstance(folder, Path):
        return shutil.rmtree(folder, ignore_errors)
    files, path = url_to_fs(folder)
    with contextlib.suppress(OSError if ignore_errors else ()):
        files.rm(path, recursive=True)


class Ranges:
    """The numbers in a file of an object store: a slice of them is one request for its bytes.

    Raises: UsageError with what the driver said, or where fewer bytes came than were asked for.
    """

    def __init__(self, file: Remote, kind: np.dtype | str, mode: str = "r") -> None:
        self.file, self.kind = file, np.dtype(kind)
        self.size = self.ask("size")

    def ask(self, method: str, **kwargs):
        files, path = url_to_fs(self.file)
        try:
            return getattr(files, method)(path, **kwargs)
        except Exception as error:  # drivers have errors of their own
            raise UsageError(f"{self.file.flag} {self.file}: {error}") from error

    def __getitem__(self, part: slice) -> np.ndarray:
        start, end = (place * self.kind.itemsize for place in (part.start, part.stop))
        end = min(end, self.size)
        content = self.ask("cat_file", start=start, end=end)
        if len(content) != end - start:
            few = f"{len(content)} came of bytes {start} to {end}"
            raise UsageError(f"{self.file.flag} {self.file}: {few}")
        return np.frombuffer(content, self.kind)
