"""Axes that draw the same PNG from the same run."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def figure(path: str | Path, *shape: int, **options) -> Iterator[Any]:
    """Open axes in `shape` rows and columns, and save them: the same run draws the same PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no display on a cluster
    from matplotlib import pyplot as plt

    canvas, axes = plt.subplots(*shape, layout="constrained", **options)
    yield axes
    canvas.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(canvas)
