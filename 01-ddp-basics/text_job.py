"""What ddp_training.py trains on with --whole-lines: sequences of different lengths."""

import torch

from dist_common.data import Sequences


class LineSequences(Sequences):
    """Sequences that end where a line of the text ends: they hold different numbers of tokens.

    Targets of IGNORED fill them up. A line longer than a sequence is cut.
    """

    def cut(self, text: torch.Tensor) -> torch.Tensor:
        content = text.numpy().tobytes()
        last = len(text) - 1
        bounds = [0]
        while bounds[-1] < last:
            start = bounds[-1]
            line_end = content.rfind(b"\n", start, start + self.seq_len) + 1
            bounds.append(min(line_end or start + self.seq_len, last))
        return torch.tensor(bounds)
