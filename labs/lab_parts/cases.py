"""Cases of the failure gallery as the exam hands them out: which rank is at fault is nowhere said.

The script reads it from ODD_RANK, so that it runs with any rank at fault, and with none.
"""

import os
import re
from dataclasses import dataclass, field
from typing import Any

from lab_parts.holes import import_lesson
from lab_parts.running import LOOPBACK

gallery = import_lesson("04-nccl-operations/failure_gallery.py")
# The line of a broken script that names the rank at fault.
CULPRIT = re.compile(r"^([A-Z]+) = \d+(?=  # the rank )", re.M)
RANKS = 3  # of the job that is handed out: of two ranks that differ none can be named
NONE = -1  # the rank at fault, where none is


@dataclass
class Case:
    """A failure of the gallery as an exam asks for it: an entry of cases.toml."""

    failure: Any
    calls: dict[str, int]  # regular expressions of collectives: how often each rank has to call it
    right: str = ""  # what each rank prints last, where the gallery says something else
    healthy: str = ""  # and where no rank is at fault, if that differs
    stays: dict[str, str] = field(default_factory=dict)  # regular expressions of code, and why
    hides: dict[str, str] = field(default_factory=dict)  # of code that hides the fault, and how
    near: dict[str, str] = field(default_factory=dict)  # causes that look alike: what tells them

    def script(self, name: str = "broken.py") -> str:
        """Return a script of the gallery that does not say which rank is at fault."""
        constant = CULPRIT.search(self.failure.script("broken.py").read_text())[1]
        source = self.failure.script(name).read_text()
        text = CULPRIT.sub('ODD_RANK = int(os.environ["ODD_RANK"])', source)
        return re.sub(r"  # .*", "", re.sub(rf"\b{constant}\b", "ODD_RANK", text))

    def result(self, ranks: int, odd: int) -> str:
        """Return what each rank of a right cure prints last."""
        text = self.right or self.failure.right
        text = (self.healthy or text) if odd == NONE else text
        # The last one: four weights of 1, less a tenth of the sum of all ranks' gradients of 1.
        return text.format(n=ranks, others=ranks - 1, loss=4 - 0.4 * ranks)


def set_odd_rank(odd: int) -> None:
    """Let this rank's script read which rank is at fault."""
    os.environ.update(ODD_RANK=str(odd), GLOO_SOCKET_IFNAME=LOOPBACK)
