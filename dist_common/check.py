"""Compare a distributed run with one process, and count what it sends."""

from collections import Counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode  # documented, not yet public
from torch.utils.data import DataLoader

from dist_common.cli import CheckError
from dist_common.data import IGNORED
from dist_common.runtime import from_rank0, gather, rng_state, set_rng_state
from dist_common.train import lr_at

# AdamW of all templates, written here again: the reference shares no optimizer code.
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
# Of losses, gradient norms, clipped gradients and weight changes. Float32 sums in
# another order differ in the last bits. Rounding to 16 bits flips the sign of small
# gradients, and Adam takes a full step for each.
IN_16_BITS = (0.01, 0.05, 0.1, 0.3)
TOLERANCES = {
    "32-true": (1e-5, 1e-4, 1e-3, 0.01),
    "bf16-mixed": IN_16_BITS,
    "16-mixed": IN_16_BITS,
}


def language_loss(model, inputs, targets):
    """Return the cross-entropy summed over tokens. Shapes: inputs, targets (B, T)."""
    logits = model(inputs)
    logits = getattr(logits, "logits", logits)  # of a Hugging Face model
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
    )


def first_two_steps(
    report,
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
    weights, moments = read_weights(model, optimizer)
    if stages:
        for more_weights, more_moments in gather((weights, moments), stages):
            weights |= more_weights
            moments |= more_moments
    errors = None
    if report.run.rank == 0:
        random_state = rng_state()
        reference = train_alone(
            report.args, dataset, make_model, loss, report.run.device
        )
        set_rng_state(random_state)
        losses, norms, first, (weights_alone, moments_alone) = reference
        errors = {
            "loss": relative_error(log.losses, losses),
            "gradient norm": relative_error(log.norms, norms),
            "clipped gradient": relative_error(moments, moments_alone),
            "weight change": relative_error(weights, weights_alone, first),
        }
    errors = from_rank0(errors, report.run.cpu_group)
    for name, tolerance in zip(errors, TOLERANCES[report.args.precision], strict=True):
        report.check(f"relative error of {name}", errors[name], 0, tolerance)
    if report.failed:
        report.write()
        error_list = ", ".join(f"{name} {error:.2g}" for name, error in errors.items())
        raise CheckError(
            "self-check failed: relative errors of two steps against one process: "
            f"{error_list} (skip the check with --no-self-check)"
        )


def train_alone(args, dataset, make_model, loss_function, device):
    """Train two steps on one process in float32, with its own order and its own AdamW.

    Returns: losses and gradient norms by step, first weights, and `read_weights`.
    """
    model = make_model().to(device)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    first, _ = read_weights(model, optimizer)
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.randperm(len(dataset), generator=generator)
    losses, norms = {}, {}
    for step, batch in enumerate(order.split(args.global_batch_size)[:2], 1):
        samples = [dataset[index] for index in batch]
        num_targets = sum(int((targets != IGNORED).sum()) for _, targets in samples)
        losses[step] = 0.0
        for inputs, targets in DataLoader(samples, args.micro_batch_size):
            loss_sum = loss_function(model, inputs.to(device), targets.to(device))
            (loss_sum / num_targets).backward()
            losses[step] += loss_sum.item() / num_targets
        norms[step] = clip_grad_norm_(trained, args.max_grad_norm).item()
        optimizer.param_groups[0]["lr"] = lr_at(step, args)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, first, read_weights(model, optimizer)


def read_weights(model, optimizer):
    """Return copies of weights and Adam's first moments by name. A collective."""
    weights, moments = {}, {}
    for name, weight in model.named_parameters():
        weights[name] = whole(weight).to("cpu", copy=True)
        state = optimizer.state.get(weight, {})
        moments[name] = whole(state.get("exp_avg", weight * 0)).cpu()
    return weights, moments


def whole(tensor):
    """Return a tensor with the parts of all ranks. A collective for sharded tensors."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def relative_error(ours, expected, start=None):
    """Return the distance of named numbers or tensors, relative to their size.

    With `start` it is relative to how far they are from there.
    """
    distance, length = 0.0, 0.0
    for name, value in expected.items():
        distance += square_sum(ours[name] - value)
        length += square_sum(value - start[name] if start else value)
    return (distance / length) ** 0.5


def square_sum(value):
    return torch.as_tensor(value).double().square().sum().item()


# The bytes that a rank sends per byte of the whole tensor, in a ring of n ranks.
# Source: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms (2009).
RING_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "send": lambda n: 1,
} | dict.fromkeys(
    ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"),
    lambda n: (n - 1) / n,
)


def classify_collective(operator):
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
        kind = classify_collective(operator)
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
