"""What the tests of module 03 share: DeepSpeed imported once, and a model that trains quickly."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from types import ModuleType

from dist_common import models

# Two layers, so that two ranks' parts meet between them: in stage 2 DeepSpeed keeps the whole
# gradient of a weight that lies in both parts, which a model as small as this would show.
SMALL_MODEL = models.TransformerConfig(256, 32, 2, 2, 1, 88, 256)
SMALL = ("--micro-batch-size", 2, "--seq-len", 32)


@contextlib.contextmanager
def deepspeed_in_the_parent(*names: str) -> Iterator[None]:
    """Import here what each fork would import otherwise: seconds. Nothing of it computes here."""
    before = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = "cpu"  # read by the import
    for name in ("deepspeed", "deepspeed.module_inject.auto_ep_layer", *names):
        importlib.import_module(name)
    yield
    if before is None:
        del os.environ["DS_ACCELERATOR"]


def small(script: ModuleType) -> None:
    """Make the preset tiny a smaller one still."""
    models.PRESETS["tiny"] = SMALL_MODEL


def on_small(change: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Return what makes the model small and the change too."""

    def before(script: ModuleType) -> None:
        small(script)
        change(script)

    return before
