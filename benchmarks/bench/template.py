"""A launcher of one's own: a line with placeholders, as of mpirun."""

import argparse
import itertools
import math
import shlex
import string
from collections.abc import Sequence

PLACEHOLDERS = ("ranks", "nodes", "ranks_per_node", "python", "command")


class Template(str):
    """A line that starts ranks, with PLACEHOLDERS."""

    ranks_per_node: int | None = None  # at most; without it all are on one node

    def nodes(self, world_size: int) -> int:
        """Return how few nodes hold so many ranks."""
        return math.ceil(world_size / (self.ranks_per_node or world_size))

    def words(self, command: Sequence[str], world_size: int, python: str) -> list[str]:
        """Return the words to start, for no shell.

        {command} by itself becomes several words. Within a word that has more, as in
        "ssh node 'cd guide && {command}'", it is quoted for the shell that reads this word.
        """
        nodes = self.nodes(world_size)
        values = {"ranks": world_size, "nodes": nodes, "ranks_per_node": world_size // nodes,
                  "python": python, "command": shlex.join(command)}  # fmt: skip
        found = ([*command] if word == "{command}" else [word.format(**values)]
                 for word in shlex.split(self))  # fmt: skip
        return [*itertools.chain.from_iterable(found)]


def checked(text: str, names: Sequence[str]) -> Template:
    """Parse a line that is none of the launchers' names. Raises: ArgumentTypeError."""
    try:
        shlex.split(text)
        found = [how for _, *how in string.Formatter().parse(text) if how[0] is not None]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} in {text!r}") from error
    for name, *how in found:
        if name not in PLACEHOLDERS or any(how):
            known = ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)
            braces = "other braces are doubled, as in ${{HOME}}"
            raise argparse.ArgumentTypeError(f"unknown {{{name}}}: there are {known}; {braces}")
    if "command" not in [name for name, *_ in found]:
        listed = ", ".join(names)
        raise argparse.ArgumentTypeError(f"must be {listed}, or a line with {{command}}: {text!r}")
    return Template(text)
