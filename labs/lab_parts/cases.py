"""Cases of the failure gallery as the exam hands them out: nobody says who is at fault.

The script reads the rank at fault from ODD_RANK, so it runs with any rank, or none.
"""

import os
import re
from dataclasses import dataclass, field
from typing import Any

from lab_parts.holes import import_lesson
from lab_parts.running import LOOPBACK

gallery = import_lesson("04-nccl-operations/failure_gallery.py")
# The line of a gallery script that names the rank at fault.
CULPRIT = re.compile(r"^([A-Z]+) = \d+(?=  # the rank )", re.M)
LAST_LINE = re.compile(r"^print\(.*\n", re.M)
RANKS = 3  # with two ranks that differ, nobody could say which is at fault
NONE = -1  # ODD_RANK if no rank is at fault


@dataclass
class Case:
    """An entry of cases.toml, which explains the fields."""

    failure: Any
    calls: dict[str, int]
    last_line: str = ""
    healthy: str = ""
    prints: str = ""
    saves: bool = False
    near: dict[str, str] = field(default_factory=dict)

    def script(self, name: str = "broken.py") -> str:
        """Return a script of the gallery that does not say who is at fault."""
        constant = CULPRIT.search(self.failure.script("broken.py").read_text())[1]
        source = self.failure.script(name).read_text()
        text = CULPRIT.sub('ODD_RANK = int(os.environ["ODD_RANK"])', source)
        text = re.sub(rf"\b{constant}\b", "ODD_RANK", text)
        if self.prints:
            text = LAST_LINE.sub(f"{self.prints}\n", text)
        return re.sub(r"  # .*", "", text)

    def result(self, ranks: int, odd: int) -> str:
        """Return the last line of each rank of a cured job."""
        text = self.last_line or self.failure.last_line
        if odd == NONE:
            text = self.healthy or text
        numbers = {
            # Four weights of 1, less a tenth of n gradients of 1 each.
            "loss": 4 - 0.4 * ranks,
            # Two steps with a gradient of 2, averaged with one rank that has none.
            "share": 4 * (ranks - 1) / ranks,
        }
        return text.format(n=ranks, others=ranks - 1, **numbers)


def set_odd_rank(odd: int) -> None:
    """Tell this rank's script which rank is at fault."""
    os.environ.update(ODD_RANK=str(odd), GLOO_SOCKET_IFNAME=LOOPBACK)
