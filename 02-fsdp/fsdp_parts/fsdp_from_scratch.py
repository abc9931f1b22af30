"""What fsdp_from_scratch.py does not teach: cutting vectors, choosing groups, whole weights."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp_basics import accumulate
from fsdp_parts.strategies import LOSS_TOLERANCE, Plan, check_step
from legacy_common.lab import proofs
from legacy_common.lab.traffic import TrafficCounter
from legacy_common.report import Report
from legacy_common.runtime import all_gather_single


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return tensors as one vector, with zeros at its end until N ranks can share it equally."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return F.pad(flat, (0, -len(flat) % dist.get_world_size()))


def part_of(vector: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a vector. Shapes: (n,) in, (n / N,) out."""
    return vector.chunk(dist.get_world_size())[dist.get_rank()]


def groups_of(model: nn.Module, modules: Collection[nn.Module]) -> dict[tuple, list[nn.Parameter]]:
    """Return the parameters of each unit by (module, trained or frozen, dtype).

    A parameter that several modules share belongs to the rest, as one in none of them does; the
    rest is the model's own. Raises: ValueError for units that lie in one another.
    """
    inside = set(model.modules())
    holders = Counter(part for module in modules for part in set(module.modules()))
    for module in modules:
        if module not in inside or holders[module] > 1:
            name = type(module).__name__
            raise ValueError(f"{name}: a unit must be in the model, once, and not in another unit")
    owners = defaultdict(list)
    for module in modules:
        for parameter in module.parameters():
            owners[parameter].append(module)
    groups = defaultdict(list)
    for parameter in model.parameters():
        owner = owners[parameter]
        place = owner[0] if len(owner) == 1 else model
        groups[place, parameter.requires_grad, parameter.dtype].append(parameter)
    return groups


def assemble(unit: Any, part: torch.Tensor) -> list[torch.Tensor]:
    """Return a unit's whole tensors, such as its gradients, of which each rank has a part."""
    whole = part.new_empty(unit.whole.shape)
    all_gather_single(whole, part)
    return unit.cut(whole)


def assembled(sharded: Any, parts: Iterable[torch.Tensor]) -> dict[nn.Parameter, torch.Tensor]:
    """Return the whole tensor of each parameter, of which each rank has a part, unit by unit."""
    whole = {}
    for unit, part in zip(sharded.units, parts, strict=True):
        whole |= zip(unit.parameters, assemble(unit, part), strict=True)
    return whole


def whole_state(sharded: Any) -> dict[str, torch.Tensor]:
    """Return the state dict of the plain model, in the precision of the shards.

    Every rank must call it, and gets it: save it on one.
    """
    whole = assembled(sharded, (unit.shard for unit in sharded.units))
    own = sharded.model.state_dict(keep_vars=True)
    return {name: whole.get(value, value) for name, value in own.items()}


def load_whole_state(sharded: Any, state: dict[str, torch.Tensor]) -> None:
    """Keep this rank's part of a plain model's state dict. Raises: ValueError for other names."""
    own = sharded.model.state_dict(keep_vars=True)
    if own.keys() != state.keys():
        raise ValueError(f"only one of the two has {', '.join(sorted(own.keys() ^ state.keys()))}")
    names = {value: name for name, value in own.items()}
    for unit in sharded.units:
        for parameter, shape in zip(unit.parameters, unit.shapes, strict=True):
            name = names[parameter]
            if state[name].shape != shape:
                raise ValueError(f"{name} is {tuple(state[name].shape)}, must be {tuple(shape)}")
        unit.shard.copy_(part_of(flatten(state[names[p]] for p in unit.parameters)))
    for name, buffer in sharded.model.named_buffers():
        buffer.copy_(state.get(name, buffer))


# Relative to a gradient's largest number, and of losses near 5: float32 sums of some 1,000 numbers
# in another order; bf16 keeps 8 bits. Both ways round alike in bf16; on 3 ranks one divides before
# it sums, and roundings differ.
TWIN_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 1e-3}
LR = 1e-3


@dataclass
class Run:
    """What a run left: mean losses, the first gradient, the last step's traffic."""

    losses: torch.Tensor  # (steps,)
    gradients: list[torch.Tensor]  # in the order of the optimizer's tensors
    counter: TrafficCounter
    optimizer: torch.optim.Optimizer


def train(model: nn.Module, weights: list[torch.Tensor], steps: list[list]) -> Run:
    """Train with AdamW on micro-batches; every rank must call it."""
    optimizer = torch.optim.AdamW(weights, lr=LR)
    losses = []
    for micro_batches in steps:
        optimizer.zero_grad()
        with TrafficCounter() as counter:
            losses.append(accumulate(model, micro_batches))
        if len(losses) == 1:
            gradients = [weight.grad.clone() for weight in weights]
        optimizer.step()
    losses = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(losses)
    return Run(losses, gradients, counter, optimizer)


class WholeBytes:
    """Note the most bytes that were whole on this rank at once."""

    def __init__(self, sharded: Any) -> None:
        self.units = sharded.units
        self.most = 0
        for unit in self.units:
            unit.gather = partial(self.note, unit.gather)

    def note(self, gather: Any) -> None:
        gather()
        whole = sum(unit.whole.untyped_storage().nbytes() for unit in self.units)
        self.most = max(self.most, whole)


def check_run(
    report: Report, plan: Plan, ours: tuple[Run, list], theirs: tuple[Run, list], whole: WholeBytes
) -> dict[str, list[float]]:
    """Check both runs against the formulas, and ours against PyTorch's own; return the numbers.

    With each run the numbers of weights in its units, the rest last; it may be empty.
    """
    name = plan.precision
    measured = {}
    for way, (run, units) in (("from scratch", ours), ("fully_shard", theirs)):
        weights = run.optimizer.param_groups[0]["params"]
        what = f"{name} {way}"
        if plan.ranks == 1:  # among whom `fully_shard` calls none, and nothing is sent
            run.counter.collectives.clear()
        measured[what] = check_step(report, what, plan, units, weights, run.optimizer, run.counter)
    *units, rest = ours[1]
    most = plan.gathered_bytes * (rest + max(units, default=0))
    report.check(f"{name}: most bytes whole at once", whole.most, most, 0, "rest and one unit")
    losses = (run.losses for run, _ in (ours, theirs))
    what = f"{name}, fully_shard: error of a loss"
    proofs.same_losses(report, *losses, TWIN_TOLERANCE[name], what, "fully_shard")
    return measured


def check_one_process(
    report: Report, precision: str, sharded: Any, ours: Run, alone: nn.Module, expected: Run
) -> None:
    """Check losses, first gradient and, in float32, the weights at the end against one process."""
    name = f"{precision}, one process: error of a loss"
    proofs.same_losses(report, ours.losses, expected.losses, LOSS_TOLERANCE[precision], name)
    parameters = list(sharded.model.parameters())
    right = proofs.flat(expected.gradients)
    whole = assembled(sharded, ours.gradients)
    error = (proofs.flat(map(whole.get, parameters)) - right).abs().max() / right.abs().max()
    name = f"{precision}: relative error of the gradient"
    report.check(name, error.item(), 0, proofs.TOLERANCE[precision], "one process")
    if precision == "32-true":
        whole = assembled(sharded, (unit.shard for unit in sharded.units))
        pairs = zip(parameters, alone.parameters(), strict=True)
        error = max((whole[own] - right).abs().max().item() for own, right in pairs)
        # AdamW divides by the gradient's size: where it is near 0, rounding shows.
        report.check(f"{precision}: error of a weight", error, 0, LR / 10, "one process")
    report.metrics["final_loss"] = ours.losses[-1].item()
