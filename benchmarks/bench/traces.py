"""Where the time of a step goes: computing, communicating with nothing beside it, or neither.

Read from the traces that templates write with --profile, one per rank.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STEPS = (3, 6)  # that are traced; the first one has set-up in it, the last one has no end
STEP = re.compile(r"step (\d+)$")
# By category and name. On the CPU an operation of PyTorch computes and a span of gloo communicates,
# from its call until all ranks have the result; on a GPU kernels do both.
CPU_COMPUTES, CPU_SENDS = re.compile("cpu_op (aten|fsdp)::"), re.compile("user_annotation gloo:")
GPU_WORKS, GPU_SENDS = re.compile("kernel |gpu_mem"), re.compile("kernel nccl")
RANKS_READ = 8  # of a large job
Span = tuple[float, float]  # start and end in us


def split_of(folder: Path) -> dict[str, float]:
    """Return the mean step of some ranks, in ms: "step", of it "compute" and "exposed".

    Raises: ValueError where there is no trace, or none with a whole step.
    """
    paths = [folder / f"trace-rank{rank}.json" for rank in range(RANKS_READ)]
    found = [split for path in paths if path.exists()
             for split in splits_of(json.loads(path.read_text())["traceEvents"])]  # fmt: skip
    if not found:
        raise ValueError(f"no trace in {folder} has a whole step")
    return {name: sum(each[name] for each in found) / len(found) for name in found[0]}


def splits_of(events: Iterable[dict[str, Any]]) -> list[dict[str, float]]:
    """Split each traced step but the first and the last; it ends where the next one starts.

    Between steps a template reads losses, for which the host waits until the GPU has ended.
    """
    starts, kinds = [], {"cpu": ([], []), "gpu": ([], [])}
    for event in events:
        if "dur" not in event:
            continue
        name = f"{event.get('cat')} {event['name']}"
        span = event["ts"], event["ts"] + event["dur"]
        if event.get("cat") == "user_annotation" and STEP.match(event["name"]):
            starts.append(event["ts"])
        elif GPU_WORKS.match(name):
            kinds["gpu"][bool(GPU_SENDS.match(name))].append(span)
        elif CPU_COMPUTES.match(name) or CPU_SENDS.match(name):
            kinds["cpu"][bool(CPU_SENDS.match(name))].append(span)
    computes, sends = kinds["gpu"] if any(kinds["gpu"]) else kinds["cpu"]
    starts.sort()
    found = []
    for window in zip(starts[1:], starts[2:], strict=False):
        computing = length(within(computes, window))
        either = length(within(computes + sends, window))
        times = window[1] - window[0], computing, either - computing
        found.append(dict(zip(("step", "compute", "exposed"), (us / 1e3 for us in times),
                              strict=True)))  # fmt: skip
    return found


def within(spans: Iterable[Span], window: Span) -> list[Span]:
    """Return the parts of spans that lie in a window."""
    cut = [(max(start, window[0]), min(end, window[1])) for start, end in spans]
    return [(start, end) for start, end in cut if start < end]


def length(spans: Iterable[Span]) -> float:
    """Return how much time spans cover together, overlaps counted once."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
