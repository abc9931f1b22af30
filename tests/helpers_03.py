"""A fixture for module 03: DeepSpeed is imported once, in the parent."""

import contextlib
import importlib
import os


@contextlib.contextmanager
def deepspeed_in_the_parent(*names):
    """Import DeepSpeed in the parent: it takes each fork seconds."""
    before = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = "cpu"  # read by the import
    for name in ("deepspeed", "deepspeed.runtime.zero.muon.original_muon", *names):
        importlib.import_module(name)
    yield
    if before is None:
        del os.environ["DS_ACCELERATOR"]
