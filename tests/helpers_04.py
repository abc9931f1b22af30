"""For the tests of cluster/: tables of which the quick tests take the first row."""

import pytest

full = pytest.mark.full


def first_is_quick(rows):
    """Return a table's rows as parameters: all but the first one are marked `full`."""
    return [rows[0], *(pytest.param(*row, marks=full) for row in rows[1:])]


def launched(**extra):
    """Return the environment of a launch by hand of one rank, and more."""
    return {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"} | extra
