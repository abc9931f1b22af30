"""How many bytes of tensors this process holds, and in the memory of which device."""

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from legacy_common.models import local


def live_bytes() -> Counter[str]:
    """Return the bytes of all floating-point tensors that this process holds, by type of device.

    That is weights, gradients, optimizer state and buffers of them; tokens and indices are left
    out. Memory that several tensors share counts once; what autograd alone holds is not seen.
    """
    time.sleep(0.2)  # gloo's threads let go of what they reduced a moment after it is done
    gc.collect()
    # By type: isinstance would wake lazy objects of libraries, which warn.
    things = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    # A gradient that nobody has looked at yet is no Python object.
    things += [thing.grad for thing in things if thing.is_leaf and thing.grad is not None]
    return bytes_by_place(t for t in things if t.is_floating_point() and not t.is_meta)


def bytes_by_place(tensors: Iterable[torch.Tensor]) -> Counter[str]:
    """Return the bytes behind tensors by type of device; memory that several share counts once."""
    storages = {}
    for tensor in tensors:
        with contextlib.suppress(NotImplementedError, RuntimeError):  # no storage of its own
            storage = tensor.untyped_storage()
            storages[storage.device.type, storage.data_ptr()] = storage.nbytes()
    held: Counter[str] = Counter()
    for (device, _), size in storages.items():
        held[device] += size
    return held


def bytes_by_kind(model: nn.Module, optimizer, held: Counter[str]) -> tuple[Counter[str], ...]:
    """Return the bytes of weights, of optimizer state and of all else in `held`, each by place.

    The rest is gradients and buffers. Stage 3 keeps a rank's part of a weight in `ds_tensor`.
    """
    weights = [local(getattr(weight, "ds_tensor", weight)) for weight in model.parameters()]
    while hasattr(optimizer, "optimizer"):  # PyTorch's, inside DeepSpeed's
        optimizer = optimizer.optimizer
    state = [t for owner, own in optimizer.state.items() for t in (owner, *own.values())]
    state = [local(tensor) for tensor in state if isinstance(tensor, torch.Tensor)]
    own = bytes_by_place(weights)
    both = bytes_by_place([*weights, *state])
    return own, both - own, held - both
