"""Cases of the failure gallery as the exam hands them out: which rank is at fault is nowhere said.

The script reads it from ODD_RANK, so that it runs with any rank at fault, and with none.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from lab_parts.holes import import_lesson

gallery = import_lesson("04-nccl-operations/failure_gallery.py")

# Importing the lesson has put its folder on the path.
from nccl_parts import failure_gallery as part  # noqa: E402

RANKS = 3  # of the job that is handed out: of two ranks that differ none can be named
NONE = -1  # the rank at fault, where none is


@dataclass
class Case:
    """A failure of the gallery as an exam asks for it: an entry of cases.toml."""

    failure: Any
    calls: dict[str, int]  # regular expressions of collectives: how often each rank has to call it
    of_odd: dict[str, int] = field(default_factory=dict)  # the rank at fault, where it has fewer
    right: str = ""  # what each rank prints last, where the gallery says something else
    healthy: str = ""  # and where no rank is at fault, if that differs
    stays: dict[str, str] = field(default_factory=dict)  # regular expressions of code, and why
    hides: dict[str, str] = field(default_factory=dict)  # of code that hides the fault, and how
    near: dict[str, str] = field(default_factory=dict)  # causes that look alike: what tells them

    def script(self, name: str = "broken.py") -> str:
        """Return a script of the gallery that does not say which rank is at fault."""
        folder = part.FAILURES / self.failure.name
        constant = part.CULPRIT.search((folder / "broken.py").read_text())[1]
        text = part.CULPRIT.sub(
            'ODD_RANK = int(os.environ["ODD_RANK"])', (folder / name).read_text()
        )
        return re.sub(r"  # .*", "", re.sub(rf"\b{constant}\b", "ODD_RANK", text))

    def result(self, ranks: int, odd: int) -> str:
        """Return what each rank of a right cure prints last."""
        text = self.right or self.failure.right
        text = (self.healthy or text) if odd == NONE else text
        # The last one: four weights of 1, less a tenth of the sum of all ranks' gradients of 1.
        return text.format(n=ranks, others=ranks - 1, loss=4 - 0.4 * ranks)
