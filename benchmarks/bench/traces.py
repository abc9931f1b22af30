"""Where the time of a step goes: computing, communicating with nothing beside it, or neither.

Read from the traces that templates write with --profile, one per rank.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STEP = 6  # that is traced
# By category and name. On the CPU an operation of PyTorch computes and a span of gloo communicates,
# from its call until all ranks have the result; on a GPU kernels do both.
CPU_COMPUTES, CPU_SENDS = re.compile("cpu_op (aten|fsdp)::"), re.compile("user_annotation gloo:")
GPU_WORKS, GPU_SENDS = re.compile("kernel |gpu_mem"), re.compile("kernel nccl")
RANKS_READ = 8  # of a large job
Span = tuple[float, float]  # start and end in us


def split_of(folder: Path) -> dict[str, float]:
    """Return the mean over some ranks of a step's ms: "step", of it "compute" and "exposed".

    Raises: ValueError where there is no trace.
    """
    paths = sorted(folder.glob("rank*.json"))[:RANKS_READ]
    found = [split(json.loads(path.read_text())["traceEvents"]) for path in paths]
    if not found:
        raise ValueError(f"no trace in {folder}")
    return {name: sum(each[name] for each in found) / len(found) for name in found[0]}


def split(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Split a traced step, from the start of its first event to the end of its last."""
    spans, kinds = [], {"cpu": ([], []), "gpu": ([], [])}
    for event in events:
        if "dur" not in event:
            continue
        name = f"{event.get('cat')} {event['name']}"
        span = event["ts"], event["ts"] + event["dur"]
        if GPU_WORKS.match(name):
            kinds["gpu"][bool(GPU_SENDS.match(name))].append(span)
        elif CPU_COMPUTES.match(name) or CPU_SENDS.match(name):
            kinds["cpu"][bool(CPU_SENDS.match(name))].append(span)
        elif event.get("cat") != "cpu_op":
            continue  # the whole trace is an event, too
        spans.append(span)
    computes, sends = kinds["gpu"] if any(kinds["gpu"]) else kinds["cpu"]
    ends = [end for _, end in spans]
    whole = max(ends) - min(spans)[0]
    computing, either = length(computes), length(computes + sends)
    return {"step": whole / 1e3, "compute": computing / 1e3, "exposed": (either - computing) / 1e3}


def length(spans: Iterable[Span]) -> float:
    """Return how much time spans cover together, overlaps counted once."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
