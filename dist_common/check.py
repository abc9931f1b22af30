"""Compare a distributed run with one process, and count what it sends."""

from collections import Counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode  # documented, not yet public
from torch.utils.data import default_collate

from dist_common.cli import CheckError
from dist_common.data import IGNORED
from dist_common.runtime import from_rank0, gather
from dist_common.train import lr_at

# AdamW of all templates, written here again: the reference shares no optimizer code.
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
# Of losses, gradient norms, clipped gradients and weight changes. Float32 sums in
# another order differ in the last bits. Rounding to 16 bits flips the sign of small
# gradients, and Adam takes a full step for each.
TOLERANCES = {
    "32-true": (1e-5, 1e-4, 1e-3, 0.01),
    "bf16-mixed": (0.01, 0.05, 0.1, 0.3),
    "16-mixed": (0.01, 0.05, 0.1, 0.3),
}
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def language_loss(model, inputs, targets):
    """Return the cross-entropy summed over tokens. Shapes: inputs, targets (B, T)."""
    logits = model(inputs)
    logits = getattr(logits, "logits", logits)  # of a Hugging Face model
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
    )


def first_two_steps(
    report,
    args,
    log,
    model,
    optimizer,
    dataset,
    make_model,
    loss=language_loss,
    stages=None,
):
    """Compare two steps of training with one process on rank 0. A collective.

    It compares losses, gradient norms, Adam's first moments (they show the gradient
    after clipping) and how far the weights moved, so that a small learning rate hides
    nothing. `make_model()` returns the model with its first weights. `stages` is the
    group of a pipeline, whose ranks have different weights. The random state is
    restored. Raises: CheckError on all ranks, which says what differs.
    """
    log.flush()
    weights, moments = {}, {}
    for name, weight in model.named_parameters():
        weights[name] = whole(weight)
        state = optimizer.state.get(weight, {})
        moments[name] = whole(state.get("exp_avg", weight * 0))
    if stages:
        weights, moments = (gather_names(named, stages) for named in (weights, moments))
    errors = None
    if report.run.rank == 0:
        devices = [report.run.device] if report.run.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            reference = train_alone(args, dataset, make_model, loss, report.run.device)
        first, losses, norms, weights_alone, moments_alone = reference
        errors = {
            "loss": relative_error(list(log.losses.values())[:2], losses),
            "gradient norm": relative_error(list(log.norms.values())[:2], norms),
            "clipped gradient": relative_distance(moments, moments_alone),
            "weight change": relative_distance(weights, weights_alone, first),
        }
    errors = from_rank0(errors, report.run.cpu_group)
    for name, tolerance in zip(errors, TOLERANCES[args.precision], strict=True):
        report.check(f"relative error of {name}", errors[name], 0, tolerance)
    if report.failed:
        report.write()
        found = ", ".join(f"{name} {error:.2g}" for name, error in errors.items())
        raise CheckError(
            "self-check failed: relative errors of two steps against one process: "
            f"{found} (skip the check with --no-self-check)"
        )


def train_alone(args, dataset, make_model, loss_function, device):
    """Train two steps on one process, with its own order of data and its own AdamW.

    Returns: first weights, losses, gradient norms, weights, Adam's first moments.
    """
    model = make_model().to(device)
    weights = dict(model.named_parameters())
    trained = [weight for weight in weights.values() if weight.requires_grad]
    first = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.randperm(len(dataset), generator=generator)
    dtype = AUTOCAST.get(args.precision)
    scale = 2.0**16 if dtype == torch.float16 else 1.0  # small gradients round to 0
    losses, norms = [], []
    for step, batch in enumerate(order.split(args.global_batch_size)[:2], 1):
        targets = [dataset[index][1] for index in batch]
        num_targets = int(sum((part != IGNORED).sum() for part in targets))
        loss_sum = 0.0
        for chunk in batch.split(args.micro_batch_size):
            inputs, targets = default_collate([dataset[index] for index in chunk])
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                loss = loss_function(model, inputs.to(device), targets.to(device))
            (loss * scale / num_targets).backward()
            loss_sum += loss.item()
        losses.append(loss_sum / num_targets)
        for weight in trained:
            weight.grad /= scale
        norm = clip_grad_norm_(trained, args.max_grad_norm)
        norms.append(norm.item())
        optimizer.param_groups[0]["lr"] = lr_at(step, args)
        optimizer.step()
        optimizer.zero_grad()
    moments = {
        name: optimizer.state[weight]["exp_avg"]
        for name, weight in weights.items()
        if weight.requires_grad
    }
    return first, losses, norms, weights, moments


def whole(tensor):
    """Return a tensor with the parts of all ranks. A collective for sharded tensors."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_names(named, group):
    """Return the named tensors of all ranks of a group. A collective."""
    device = next(iter(named.values())).device
    parts = gather({name: tensor.cpu() for name, tensor in named.items()}, group)
    return {name: tensor.to(device) for part in parts for name, tensor in part.items()}


def relative_error(ours, expected):
    """Return the largest relative error of two lists of numbers."""
    pairs = zip(ours, expected, strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


@torch.no_grad()
def relative_distance(ours, expected, start=None):
    """Return the distance of named tensors, relative to how far they are from `start`.

    Without `start` it is the distance from 0.
    """
    distance, length = 0.0, 0.0
    for name, tensor in expected.items():
        distance += (ours[name] - tensor).double().square().sum().item()
        way = tensor - start[name] if start else tensor
        length += way.double().square().sum().item()
    return (distance / length) ** 0.5


# The bytes that a rank sends per byte of the whole tensor, in a ring of n ranks.
# Source: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms (2009).
RING_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "send": lambda n: 1,
} | dict.fromkeys(
    ("all_gather", "reduce_scatter", "all_to_all", "broadcast"), lambda n: (n - 1) / n
)


def kind_of(operator):
    """Return the kind of collective of an operator, such as all_reduce, or None."""
    plain = operator.replace("_", "")
    for kind in RING_FACTORS:
        if plain.startswith(kind.replace("_", "")):
            return kind
    return None


class CollectiveCounter(TorchDispatchMode):
    """Count the collectives that this rank starts, also inside DDP and FSDP.

    calls and bytes_sent (by this rank, in a ring) are counted by kind.
    """

    def __init__(self):
        super().__init__()
        self.calls = Counter()
        self.bytes_sent = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls collectives on plain tensors, counted then
        if func.namespace in ("c10d", "_c10d_functional"):
            self.count(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def count(self, operator, args):
        kind = kind_of(operator)
        ranks = group_size(args) if kind else 1
        if ranks == 1:
            return  # it waits or receives, or sends to no one
        sizes = [num_bytes(value) for value in args]  # the whole and this rank's part
        if operator == "all_gather_into_tensor":  # of functional collectives: the part
            sizes.append(max(sizes) * ranks)
        self.calls[kind] += 1
        self.bytes_sent[kind] += RING_FACTORS[kind](ranks) * max(sizes)

    def metrics(self):
        """Return calls and bytes by kind, and all bytes that this rank sends."""
        return {
            "collectives_per_step": {
                kind: {"calls": calls, "bytes_sent": round(self.bytes_sent[kind])}
                for kind, calls in self.calls.items()
            },
            "bytes_sent_per_step": round(sum(self.bytes_sent.values())),
        }


def num_bytes(value):
    """Return the bytes of a tensor, or of all tensors of nested lists."""
    if torch.is_tensor(value):
        return value.nbytes
    return sum(map(num_bytes, value)) if isinstance(value, list | tuple) else 0


def group_size(args):
    """Return the number of ranks of a collective's group, from its arguments."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value):
            return dist.ProcessGroup.unbox(value).size()
    names = [value for value in args if isinstance(value, str)]
    return dist.distributed_c10d._resolve_process_group(names[-1]).size()
