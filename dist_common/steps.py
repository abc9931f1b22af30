"""What a training step costs: traffic, memory, CPU time, under the same names in each template."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_common.measure import GIB, StepTimer, peak_memory_gib
from dist_common.runtime import gather

# What a rank sends, in parts of the whole tensor, by algorithms that send no more than a ring.
# Source: Patarasuk and Yuan, Bandwidth Optimal All-reduce (2009).
SENT = {
    "all-reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all-gather": lambda ranks: (ranks - 1) / ranks,
    "reduce-scatter": lambda ranks: (ranks - 1) / ranks,
    "all-to-all": lambda ranks: (ranks - 1) / ranks,
    "gather": lambda ranks: (ranks - 1) / ranks,
    "scatter": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: (ranks - 1) / ranks,
    "reduce": lambda ranks: (ranks - 1) / ranks,
    "send": lambda ranks: 1,
}


class TrafficCounter(TorchDispatchMode):
    """Count `calls` and bytes `sent` by kind of collective, of this rank: DTensor's and DDP's too.

    Not seen is what an operator sends inside itself, as DTensor's vocabulary-parallel loss does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls what it is made of, which then comes here
        if func.namespace in ("c10d", "_c10d_functional"):
            self.count(func, args)
        return func(*args, **(kwargs or {}))

    def count(self, func, args: tuple) -> None:
        """Count an operator that sends to other ranks: not one that only waits or receives."""
        name = func.overloadpacket.__name__.replace("_", "")
        kind = next((kind for kind in SENT if name.startswith(kind.replace("-", ""))), None)
        ranks = ranks_of(args) if kind else 1
        if ranks == 1:
            return
        sizes = [bytes_of(value) for value in args]  # a collective has the whole, and a part of it
        if kind == "all-gather" and func.namespace == "_c10d_functional":  # the part alone
            sizes.append(ranks * max(sizes))
        self.calls[kind] += 1
        self.sent[kind] += round(SENT[kind](ranks) * max(sizes))


def bytes_of(value: object) -> int:
    """Return the bytes of the tensors in a value, nested or not."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def ranks_of(args: tuple) -> int:
    """Return the size of the process group among a collective's arguments."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value).size()
    name = next(value for value in reversed(args) if isinstance(value, str))
    return dist.distributed_c10d._resolve_process_group(name).size()


class StepProbe:
    """Look once at what a step sends and what a rank holds in it; make it before the model."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = memory_in_use(device)
        self.traffic: TrafficCounter | None = None
        self.held: dict[str, int] = {}  # bytes by what they are for
        self.optimizer: torch.optim.Optimizer | None = None

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer's first step look at weights and gradients."""
        self.optimizer = optimizer

        def look(*_: object) -> None:
            weights = list(model.parameters())
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            self.held = {"weights": self.size(weights), "gradients": self.size(gradients)}
            hook.remove()

        hook = optimizer.register_step_pre_hook(look)

    def size(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return the bytes that this rank's device holds of tensors, sharded or not."""
        own = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
        return sum(t.nbytes for t in own if t.device.type == self.device.type)

    def watch(self, steps: Collection[int]) -> Iterator[int]:
        """Yield steps and count what the second one sends: the first may set up more."""
        for place, step in enumerate(steps):
            if self.traffic is None and place == min(1, len(steps) - 1):
                with TrafficCounter() as self.traffic:
                    yield step
            else:
                yield step

    def metrics(self, timer: StepTimer) -> dict:
        """Return what results.json says of a step. A collective.

        Units: ms, GiB, bytes. Memory is that of the rank that holds most, resident on the CPU
        (libraries too) and allocated on a GPU; `before` is what there was before the model.
        """
        if self.optimizer:
            states = self.optimizer.state.values()
            tensors = [t for state in states for t in state.values() if torch.is_tensor(t)]
            self.held["optimizer"] = self.size(tensors)
        own = {"before": self.before, **self.held}, peak_memory_gib(self.device), timer.cpu_ms()
        traffic = self.traffic or TrafficCounter()
        ranks = gather((*own, dict(traffic.calls), dict(traffic.sent)))
        held, peaks, cpu_ms, calls, sent = zip(*ranks, strict=True)
        most = max(held, key=lambda parts: sum(parts.values()))
        sender = max(range(len(sent)), key=lambda rank: sum(sent[rank].values()))
        return {
            "step_times_ms": [round(ms, 3) for ms in timer.steps_ms[-1000:]],
            "cpu_time_per_step_ms": sum(cpu_ms) / len(cpu_ms),
            "memory_gib": {kind: size / GIB for kind, size in most.items()},
            "peak_memory_gib": max(peaks),
            "peak_memory_gib_per_rank": list(peaks),
            "collectives_per_step": {
                kind: {"calls": calls[sender][kind], "bytes_sent": size}
                for kind, size in sent[sender].items()
            },
            "bytes_sent_per_step": sum(sent[sender].values()),
        }


def memory_in_use(device: torch.device) -> int:
    """Return the bytes in use now: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss
