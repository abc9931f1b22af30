"""Module 01, what the template trains on: whole lines, and batch sizes that multiply."""

from argparse import Namespace

import pytest
import torch
from conftest import load_script

from dist_common import cli, data


def test_whole_lines_fill_sequences_unequally_and_lose_nothing():
    text_job = load_script("01-ddp-basics/text_job.py")
    content = b"one\ntwo\n\na line of more than 12 bytes\nthe end"
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    sequences = text_job.LineSequences(text, seq_len=12)
    predicted, lengths = b"", []
    for inputs, targets in sequences:
        counted = targets != data.IGNORED
        lengths.append(int(counted.sum()))
        assert counted[: lengths[-1]].all(), "filled up at the end"
        assert torch.equal(inputs[1 : lengths[-1]], targets[: lengths[-1] - 1])
        predicted += bytes(targets[counted].tolist())
    assert predicted == content[1:], "every byte but the first is predicted exactly once"
    assert sequences.lengths.tolist() == lengths == [9, 12, 12, 5, 6]


def test_batch_sizes_follow_from_one_another():
    for total, accum, settled in ((None, None, (16, 1)), (None, 3, (48, 3)), (32, None, (32, 2))):
        args = Namespace(micro_batch_size=8, grad_accum_steps=accum, global_batch_size=total)
        line = data.settle_batch_sizes(args, dp_ranks=2)
        assert (args.global_batch_size, args.grad_accum_steps) == settled
        assert line.startswith(f"global batch {settled[0]} = 8 per rank x {settled[1]} micro")
    for total, accum, says in (
        (24, None, "24 must be --"),
        (32, 3, "32 is not .* = 48: take that"),
    ):
        args = Namespace(micro_batch_size=8, grad_accum_steps=accum, global_batch_size=total)
        with pytest.raises(cli.UsageError, match=says):
            data.settle_batch_sizes(args, dp_ranks=2)
