"""How many bytes of tensors are alive, counted: the same on every run, on a CPU or a GPU."""

import contextlib
import weakref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from legacy_common.models import Block, norms_of_a_gpu


def storages(values) -> dict[int, torch.UntypedStorage]:
    """Return the memory behind all tensors in `values`, by address; views share theirs."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return {storage._cdata: storage for storage in (x.untyped_storage() for x in tensors)}


class LiveBytes(TorchDispatchMode):
    """Count the bytes of tensors made in the block: `alive` now, `peak` at most, all in `history`.

    What a kernel allocates for itself and frees before it returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.history: list[int] = []  # alive after each operation
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        before = storages((args, kwargs))
        result = func(*args, **kwargs)
        for address, storage in storages(result).items():
            if address not in before and address not in self.known:
                self.known.add(address)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self.release, address, storage.nbytes())
        self.peak = max(self.peak, self.alive)
        self.history.append(self.alive)
        return result

    def release(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.alive -= size


@contextlib.contextmanager
def kept_for_backward(model, others=(), counts=lambda: True):
    """Collect in a dict the bytes that autograd keeps, by address.

    Weights do not count, nor `others`, nor what is kept while `counts()` is false.
    """
    weights = storages([*model.parameters(), *others])
    kept: dict[int, int] = {}

    def pack(tensor):
        for address, storage in storages(tensor).items():
            if address not in weights and counts():
                kept[address] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def as_on_a_gpu(block: Block) -> None:
    """Have a block on `meta` call a GPU's attention, and keep of its norms what a GPU would."""
    # By its name: on `meta` a GPU's kernel has shapes, `scaled_dot_product_attention` no choice.
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    block.attention.attend = lambda q, k, v: kernel(q, k, v, 0.0, True)[0]
    norms_of_a_gpu(block)
