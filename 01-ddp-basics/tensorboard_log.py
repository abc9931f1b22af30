"""metrics.jsonl, and the same numbers in TensorBoard's format."""

import math
from pathlib import Path

from dist_common.cli import UsageError
from dist_common.measure import StepLog


class TensorBoardLog(StepLog):
    """A StepLog that writes to `folder`/tensorboard too.

    Raises: UsageError when TensorBoard is not installed.
    """

    def __init__(self, folder: Path | None, first_step: int) -> None:
        super().__init__(folder, first_step)
        self.writer = None
        if folder is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError("--tensorboard: pip install tensorboard first") from error
        self.writer = SummaryWriter(folder / "tensorboard", purge_step=first_step)

    def write(self, step: int, **values: float) -> None:
        """Write the values of a step by name, at once: a run that is killed has them."""
        super().write(step, **values)
        if self.writer:
            for name, value in values.items():
                if math.isfinite(value):
                    self.writer.add_scalar(name, value, step)
            self.writer.flush()
