"""What tests of module 02 share: tables with quick rows."""

from __future__ import annotations

import pytest


def quick(count: int, rows: list) -> list:
    """Return a table of which the first rows are quick, and the others only in the
    whole set.
    """
    return [
        *rows[:count],
        *(pytest.param(*row, marks=pytest.mark.full) for row in rows[count:]),
    ]
