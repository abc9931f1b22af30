"""Hold the parallel mixture of experts against the dense loop on one process."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dist_common import proofs
from dist_common.cli import UsageError
from moe_bytes import EXACT, check_bytes

# float32 sums over tokens and experts in another order, through a few blocks and three steps.
TOLERANCE = 1e-5
MIN_STEPS = 40  # after so many, what balances must balance better than what does not
SHOWN_STEPS = 10  # at the end of a run, over which the table's loads are averaged


def refuse_bad_sizes(args, world_size):
    """Check the flags before any work. Raises: UsageError, naming the flag."""
    ep = args.ep or world_size
    if world_size % ep:
        raise UsageError(f"--ep {ep} must divide the {world_size} ranks")
    if args.experts % ep:
        raise UsageError(f"--experts {args.experts} must be a multiple of the {ep} ranks of --ep")
    if args.top_k > args.experts:
        raise UsageError(f"--top-k {args.top_k} must be at most --experts {args.experts}")


@dataclass
class Way:
    """A way to balance the load of experts."""

    name: str
    aux_weight: float = 0.0
    bias_rate: float = 0.0


def ways(args):
    """Return the three ways that the script compares, with the flags' factors."""
    auxiliary = Way("auxiliary loss", aux_weight=args.aux_weight)
    return [Way("none"), auxiliary, Way("bias", bias_rate=args.bias_rate)]


def check_step(report, model, alone, batches, mesh, loss_of, backward):
    """Take one step's gradient on all ranks and on one process; check all that it computed.

    `batches` are this rank's own and the global one, (inputs, targets) of (B, T) each. Experts have
    a bias and there is an auxiliary loss, so that both must be right too.
    """
    own, whole = batches
    for block in (*model.blocks, *alone.blocks):
        numbers = torch.arange(len(block.moe.bias), device=block.moe.bias.device)
        block.moe.bias.copy_(0.02 * torch.sin(numbers.float()))
    inputs, targets = whole
    logits = alone(inputs)  # (B * ranks, T, V)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    weight = report.args.aux_weight
    total = loss + weight * sum(block.moe.auxiliary_loss() for block in alone.blocks)
    total.backward()

    check_bytes(report, model, alone, own, mesh, loss_of)
    model.zero_grad()
    with torch.no_grad():
        ours = model(own[0])
    rows = slice(dist.get_rank() * len(ours), (dist.get_rank() + 1) * len(ours))
    error = (ours - logits[rows]).abs().max().detach()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    measured = backward(model, own, weight, mesh)
    report.check("outputs: largest error", error.item(), 0, TOLERANCE, "dense loop")
    report.check("loss: error", abs(measured - loss.item()), 0, TOLERANCE, "dense loop")
    check_gradients(report, model, alone, mesh)


def check_gradients(report, model, alone, mesh):
    """Check the gradients of routers, experts and the rest, each against the dense loop's."""
    kinds = {"routers": ([], []), "experts": ([], []), "the rest": ([], [])}
    expected = {name: p.grad for name, p in alone.named_parameters()}
    for name, parameter in model.named_parameters():
        gradient = expected[name.replace("router.weight", "router").replace(".experts.", ".")]
        kind = "the rest"
        if ".experts." in name:
            kind = "experts"
            gradient = gradient.chunk(mesh["ep"].size())[mesh.get_local_rank("ep")]
        elif ".router." in name:
            kind = "routers"
        kinds[kind][0].append(parameter)
        kinds[kind][1].append(gradient)
    for kind, (parameters, gradients) in kinds.items():
        name = f"{kind}: relative error of the gradient"
        part, vector = nn.ParameterList(parameters), proofs.flat(gradients)
        proofs.same_gradient(report, part, vector, TOLERANCE, name, "dense loop")


def record(model, steps):
    """Run the steps of a training; return each one's loss, load and dropped, the latter (L, E)."""
    rows = []
    for loss in steps:
        load = torch.stack([block.moe.counts.sum(0) for block in model.blocks]).tolist()
        dropped = torch.stack([block.moe.dropped() for block in model.blocks]).tolist()
        rows.append((loss, load, dropped))
    return rows


def train_alone(model, batches, way, lr):
    """Train the dense loop on the global batches; return what `record` returns."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    rows = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        auxiliary = sum(block.moe.auxiliary_loss() for block in model.blocks)
        (loss + way.aux_weight * auxiliary).backward()
        optimizer.step()
        load = [list(block.moe.load) for block in model.blocks]
        dropped = [list(block.moe.dropped) for block in model.blocks]
        rows.append((loss.item(), load, dropped))
        for block in model.blocks:
            block.moe.nudge_bias(way.bias_rate)
    return rows


def check_steps(report, steps, alone, batches, way):
    """Train the dense loop on the same global batches; check losses and dropped choices.

    `steps` is what `record` returned; `batches` are the global ones, of its first few steps.
    """
    name, expected = way.name, train_alone(alone, batches, way, report.args.lr)
    if not expected:
        return
    losses, _, dropped = zip(*steps[: len(expected)], strict=True)
    right, _, counted = zip(*expected, strict=True)
    proofs.same_losses(
        report, torch.tensor(losses), torch.tensor(right), TOLERANCE,
        f"{name}: largest error of a loss", "dense loop",
    )  # fmt: skip
    dropped, counted = torch.tensor(dropped), torch.tensor(counted)  # (steps, L, E)
    source = "the dense loop's queues"
    total = dropped.sum().item(), counted.sum().item()
    report.check(f"{name}: choices dropped", *total, EXACT, source)
    wrong = (dropped != counted).sum().item()
    report.check(f"{name}: experts with a wrong count of them", wrong, 0, 0, source)


def compare(report, history):
    """Print loss, imbalance and dropped choices of each way; check that balancing balances."""
    rows, last = [], {}
    for name, steps in history.items():
        losses, loads, dropped = (torch.tensor(part) for part in zip(*steps, strict=True))
        loads, dropped = loads.double(), dropped.double()  # (steps, L, E)
        worst = (loads.amax(2) / loads.mean(2)).mean(1)  # (steps,)
        end = slice(-SHOWN_STEPS, None)
        last[name] = worst[end].mean().item()
        share = dropped[end].sum().item() / loads[end].sum().item()
        loss = losses[end].mean().item()
        total = int(dropped.sum().item())
        rows.append([name, f"{loss:.4f}", f"{last[name]:.2f}x", f"{share:.0%}"])
        total = int(dropped.sum().item())
        key = name.replace(" ", "_")
        report.metrics |= {f"imbalance_{key}": last[name], f"dropped_{key}": total,
                           f"dropped_share_{key}": share, f"loss_{key}": loss}  # fmt: skip
    headers = ("balancing", "loss", "max/mean load", "dropped")
    report.say(f"mean of the last {min(SHOWN_STEPS, len(steps))} of {len(steps)} steps:")
    report.table(rows, headers)
    if len(steps) >= MIN_STEPS:
        better = sum(last[name] < last["none"] for name in last)
        report.check("ways with less max/mean load than none", better, len(last) - 1, 0, "measured")
