"""What a step sends and holds: one counter of collectives, and what each sends in a ring."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from legacy_common.measure import GIB, StepTimer, memory_in_use, peak_memory_gib
from legacy_common.models import local
from legacy_common.runtime import gather

# Bytes that a rank sends per byte of the whole tensor, by algorithms that send no more than a ring.
# Source: Patarasuk and Yuan, Bandwidth Optimal All-reduce (2009).
RING_FACTOR = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "send": lambda ranks: 1,
} | dict.fromkeys(
    ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "broadcast", "reduce"),
    lambda ranks: (ranks - 1) / ranks,
)


class Collective(NamedTuple):
    """A call that moves data between the ranks of a group."""

    kind: str  # one of RING_FACTOR
    nbytes: int  # of the whole tensor, all ranks' parts of it together
    ranks: int  # of its group
    group: str  # the group's name
    parts: tuple[int, ...] = ()  # bytes that this rank has for each, where they differ
    place: int = 0  # this rank's among them

    @property
    def sent(self) -> float:
        """Return the bytes that a rank sends for it in a ring."""
        if self.parts:
            return sum(self.parts) - self.parts[self.place]
        return RING_FACTOR[self.kind](self.ranks) * self.nbytes


class TrafficCounter(TorchDispatchMode):
    """List the `collectives` that this rank starts, DTensor's and DDP's too.

    What is compiled runs uncompiled meanwhile: torch 2.11 never translates again what it met under
    a dispatch mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self.stance = None

    def __enter__(self) -> "TrafficCounter":
        if "torch._dynamo" in sys.modules:  # to import it takes seconds
            self.stance = torch.compiler.set_stance("force_eager")
            self.stance.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self.stance:
            self.stance.__exit__(*error)
            self.stance = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):  # its import takes seconds
            return NotImplemented  # it calls what it is made of, which then comes here
        if func.namespace in ("c10d", "_c10d_functional"):
            self.note(func, args)
        return func(*args, **(kwargs or {}))

    def note(self, func, args: tuple) -> None:
        """List an operator that sends to other ranks: not one that only waits or receives."""
        name = func.overloadpacket.__name__.replace("_", "")
        kind = next((kind for kind in RING_FACTOR if name.startswith(kind.replace("_", ""))), None)
        if kind is None:
            return
        group = group_of(args)
        sizes = [bytes_of(value) for value in args]  # a collective has the whole, and a part of it
        if kind == "all_gather" and func.namespace == "_c10d_functional":  # the part alone
            sizes.append(group.size() * max(sizes))
        self.collectives.append(
            Collective(kind, max(sizes), group.size(), group.group_name, *parts_of(args, group))
        )

    @property
    def calls(self) -> Counter[str]:
        """Return how many collectives were started, by kind."""
        return Counter(call.kind for call in self.collectives)

    @property
    def nbytes(self) -> Counter[str]:
        """Return the bytes of the whole tensors, by kind."""
        sizes: Counter[str] = Counter()
        for call in self.collectives:
            sizes[call.kind] += call.nbytes
        return sizes

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Return calls and bytes sent, by kind; a group of one sends nothing."""
        sent: dict[str, list[float]] = {}
        for call in self.collectives:
            if call.ranks > 1:
                sent.setdefault(call.kind, []).append(call.sent)
        return {kind: (len(sizes), round(sum(sizes))) for kind, sizes in sent.items()}


def bytes_of(value: object) -> int:
    """Return the bytes of the tensors in a value, nested or not."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def parts_of(args: tuple, group: dist.ProcessGroup) -> tuple:
    """Return a rank's bytes for each rank, and its place, of an all-to-all that says how many."""
    *_, rows = [value for value in args if isinstance(value, list)] or [None]
    if not rows or not all(isinstance(number, int) for number in rows):
        return ()
    *_, tensor = [value for value in args if isinstance(value, torch.Tensor)]  # output, input
    row_bytes = tensor.nbytes // max(1, len(tensor))
    return tuple(number * row_bytes for number in rows), group.rank()


def group_of(args: tuple) -> dist.ProcessGroup:
    """Return the process group among a collective's arguments."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    name = next(value for value in reversed(args) if isinstance(value, str))
    return dist.distributed_c10d._resolve_process_group(name)


class StepProbe:
    """Look once at what a step sends and what a rank holds in it.

    `before` are the bytes in use before the model was made: those in use now, if it is made later.
    """

    def __init__(self, device: torch.device, before: int | None = None) -> None:
        self.device = device
        self.before = memory_in_use(device) if before is None else before
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
        own = map(local, tensors)
        return sum(t.nbytes for t in own if t.device.type == self.device.type)

    def watch(self, steps: Iterable) -> Iterator:
        """Yield steps and count what the second one sends: the first may set up more."""
        for place, step in enumerate(steps):
            if place > 1:
                yield step
            else:
                with TrafficCounter() as self.traffic:
                    yield step

    def metrics(self, timer: StepTimer) -> dict:
        """Return what results.json says of a step. A collective.

        Units: ms, GiB, bytes. Memory is resident on the CPU (libraries too), allocated on a GPU;
        `memory_gib` is that of the rank with the highest peak, `before` what the model found there.
        """
        if self.optimizer:
            states = self.optimizer.state.values()
            tensors = [t for state in states for t in state.values() if torch.is_tensor(t)]
            self.held["optimizer"] = self.size(tensors)
        own = {"before": self.before, **self.held}, peak_memory_gib(self.device), timer.cpu_ms()
        traffic = self.traffic.by_kind() if self.traffic else {}
        sent = sum(size for _, size in traffic.values())
        held, peaks, cpu_ms, sums, kinds = zip(*gather((*own, sent, traffic)), strict=True)
        parts = [{kind: size / GIB for kind, size in rank.items()} for rank in held]
        sender = sums.index(max(sums))
        return {
            "step_times_ms": [round(ms, 3) for ms in timer.steps_ms[-1000:]],
            "cpu_time_per_step_ms": sum(cpu_ms) / len(cpu_ms),
            "memory_gib": parts[peaks.index(max(peaks))],
            "memory_gib_per_rank": parts,
            "peak_memory_gib": max(peaks),
            "peak_memory_gib_per_rank": list(peaks),
            "collectives_per_step": {
                kind.replace("_", "-"): {"calls": calls, "bytes_sent": size}
                for kind, (calls, size) in kinds[sender].items()
            },
            "bytes_sent_per_step": sums[sender],
        }


def bytes_written() -> int | None:
    """Return the bytes written to files and gloo's sockets (Linux, proc(5)); elsewhere None."""
    if dist.get_backend() != "gloo" or not sys.platform.startswith("linux"):
        return None
    return psutil.Process().io_counters().write_chars
