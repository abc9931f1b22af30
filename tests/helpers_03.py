"""What the tests of module 03 share: DeepSpeed imported once, in the parent."""

import contextlib
import importlib
import os


@contextlib.contextmanager
def deepspeed_in_the_parent(*names):
    """Import here what each fork would import otherwise, for seconds."""
    before = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = "cpu"  # read by the import
    for name in ("deepspeed", "deepspeed.runtime.zero.muon.original_muon", *names):
        importlib.import_module(name)
    yield
    if before is None:
        del os.environ["DS_ACCELERATOR"]
