"""What ddp_training.py trains on: text cut into sequences, in global batches of any factors."""

import argparse
import hashlib

import torch

from dist_common.cli import UsageError
from dist_common.data import Sequences, load_text


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


def job_text(args: argparse.Namespace, ranks: int) -> tuple[Sequences, Sequences, str]:
    """Return sequences to train on and to test on (the last twentieth), and the text's checksum."""
    text = load_text(args.text_file, max_bytes=1_000_000)
    cut = len(text) - len(text) // 20
    kind = LineSequences if args.whole_lines else Sequences
    train = kind(text[:cut], args.seq_len, ranks, "training text")
    test = kind(text[cut:], args.seq_len, ranks, "test text")
    return train, test, hashlib.sha256(text.numpy()).hexdigest()[:8]


def settle_batch_sizes(args: argparse.Namespace, dp_ranks: int) -> str:
    """Set --grad-accum-steps and --global-batch-size, of which one follows from the other.

    global = micro x accumulation x data-parallel ranks; returns that identity as a line to print.
    Raises: UsageError when the three do not multiply.
    """
    micro = args.micro_batch_size
    steps = args.grad_accum_steps
    total = args.global_batch_size or micro * dp_ranks * (steps or 1)
    wanted = total // (micro * dp_ranks)
    if total % (micro * dp_ranks) or steps not in (None, wanted):
        raise UsageError(
            f"--global-batch-size {total} must be --micro-batch-size {micro} x {dp_ranks} ranks x "
            f"--grad-accum-steps {steps or 'N'}, a multiple of {micro * dp_ranks}"
        )
    args.global_batch_size = total
    args.grad_accum_steps = wanted
    return f"global batch {total} = {micro} per rank x {wanted} micro-batches x {dp_ranks} ranks"
