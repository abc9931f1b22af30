"""What the tests of several lessons of module 01 share: a small job, what it wrote, sabotage."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from legacy_common import job, models

MNIST = "01-ddp-basics/ddp_mnist.py"
TRAINING = "01-ddp-basics/ddp_training.py"
BENCHMARK = "01-ddp-basics/ddp_benchmark.py"


def small_job(folder: Path) -> tuple:
    """Return arguments of ddp_training.py: 24 short steps on 12 kB of text.

    Every step writes its line to metrics.jsonl at once, so a test can wait for a step.
    """
    text = (Path(os.__file__).parent / "argparse.py").read_bytes()[:12_000]
    (folder / "text").write_bytes(text)
    fixed = ("--text-file", folder / "text", "--seq-len", 32, "--log-every", 1)
    return (*fixed, "--max-steps", 24, "--warmup-steps", 4, "--save-every", 5, "--lr", 1e-2)


def with_a_small_model(*changes):
    """Return `before` for run_script: make `tiny` one layer, then make the changes."""

    def before(script) -> None:
        models.PRESETS["tiny"] = models.TransformerConfig(256, 32, 1, 4, 2, 64, 256)
        for change in changes:
            change(script)

    return before


# what a run wrote


def newest_state(folder: Path) -> dict:
    """Return what the newest checkpoint's manifest and its files hold."""
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    facts = json.loads((newest / "manifest.json").read_text())
    rng = torch.load(newest / "rng.pt", weights_only=True)
    return facts | torch.load(newest / "state.pt", weights_only=True) | {"rng": rng}


def steps_in(folder: Path, name: str = "loss") -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line[name]) for line in lines if name in line]
    assert len(found) == len(dict(found)), "a step is there twice"
    return dict(found)


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


def die_in(step):
    """End all ranks at once in that step, as a kill -9 or a power cut does."""

    def before(script):
        record = job.Step.record

        def killed(self, *results):
            if self.number == step:
                os.kill(os.getpid(), signal.SIGKILL)
            record(self, *results)

        job.Step.record = killed

    return before


def ask_to_stop_in(step: int, how: signal.Signals = signal.SIGTERM):
    """Send a signal from within that step: to test what follows, not when it comes."""

    def before(script) -> None:
        record = job.Step.record

        def asked(self, *results, **options):
            if self.number == step:
                os.kill(os.getpid(), how)
            record(self, *results, **options)

        job.Step.record = asked

    return before


# sabotage


def skip_all_reduce(script) -> None:
    class Unreduced(DistributedDataParallel):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.register_comm_hook(None, _leave_bucket_alone)

    script.DDP = Unreduced


def _leave_bucket_alone(
    state, bucket: torch.distributed.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def trace_without_a_compiler(script):
    """Trace as torch.compile does, name each graph's products, and run it: no C++ is built."""
    from torch._dynamo.backends.debugging import aot_eager

    def backend(graph, inputs):
        parts = [part.graph for part in graph.modules() if hasattr(part, "graph")]
        calls = [str(node.target) for part in parts for node in part.nodes]
        print(f"graph with {sum('linear' in call for call in calls)} products", file=sys.stderr)
        return aot_eager(graph, inputs)

    plain = torch.nn.Module.compile
    torch.nn.Module.compile = lambda module: plain(module, backend=backend)
