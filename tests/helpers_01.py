"""A small job of ddp_training.py, and readers of its files."""

import json
import os
import sys
import time
from pathlib import Path

import torch

TRAINING = "01-ddp-basics/ddp_training.py"


def small_job(folder: Path) -> tuple:
    """Return arguments of ddp_training.py: 24 short steps on 12 kB of text.

    Every step writes its line to metrics.jsonl at once, so a test can wait for a step.
    """
    text = (Path(os.__file__).parent / "argparse.py").read_bytes()[:12_000]
    (folder / "text").write_bytes(text)
    fixed = ("--text-file", folder / "text", "--seq-len", 32, "--log-every", 1)
    return (
        *fixed,
        "--max-steps",
        24,
        "--warmup-steps",
        4,
        "--save-every",
        5,
        "--lr",
        1e-2,
    )


# Files of a run


def steps_in(folder: Path, name: str = "loss") -> dict[int, float]:
    lines = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    values = [(line["step"], line[name]) for line in lines if name in line]
    assert len(values) == len(dict(values)), "a step is there twice"
    return dict(values)


def largest_difference(one: Path, other: Path) -> float:
    a, b = steps_in(one), steps_in(other)
    assert list(a) == list(b) == list(range(1, len(a) + 1)), "a step is missing"
    return max(abs(a[step] - b[step]) for step in a)


# while it runs


def wait_for(condition, timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def trace_without_a_compiler(script):
    """Trace as torch.compile does, name each graph's products, and run it: no C++ is
    built.
    """
    from torch._dynamo.backends.debugging import aot_eager

    def backend(graph, inputs):
        parts = [part.graph for part in graph.modules() if hasattr(part, "graph")]
        calls = [str(node.target) for part in parts for node in part.nodes]
        print(
            f"graph with {sum('linear' in call for call in calls)} products",
            file=sys.stderr,
        )
        return aot_eager(graph, inputs)

    plain = torch.nn.Module.compile
    torch.nn.Module.compile = lambda module: plain(module, backend=backend)
