"""Tables with quick rows, for the tests of module 02."""

from __future__ import annotations

import pytest


def quick(count: int, rows: list) -> list:
    """Return a table whose first rows are quick; the other rows are full."""
    return [
        *rows[:count],
        *(pytest.param(*row, marks=pytest.mark.full) for row in rows[count:]),
    ]
