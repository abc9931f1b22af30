"""The mixture of experts on one process, and what the parallel one is compared with it in.

The dense loop has a loop over experts and a queue for each of them. Every expert computes every
token, and what the router did not choose counts 0: wasteful, but nothing is sorted, sent or
gathered, so that nothing of it can hide a mistake of the parallel layer.
"""

import math
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from legacy_common import runtime
from legacy_common.cli import UsageError
from legacy_common.lab import proofs, traffic

# float32 sums over tokens and experts in another order, through a few blocks and three steps.
TOLERANCE = 1e-5
EXACT = 0.5  # no whole number is this close to another one; the counts depend on the text
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


class DenseLoop(nn.Module):
    """Stand in for a parallel layer that has all experts, on the tokens of all ranks.

    Shapes: x (B, T, D) in and out. After it `counts` (1, E) are choices by expert, and `decisions`
    (choices, 2) the token and the expert of every choice that was kept.
    """

    def __init__(self, moe):
        super().__init__()
        self.top_k, self.capacity_factor = moe.top_k, moe.capacity_factor
        self.router, self.experts = moe.router, moe.experts
        self.register_buffer("bias", moe.bias)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        logits = tokens @ self.router.weight.T
        self.probabilities = logits.exp() / logits.exp().sum(1, keepdim=True)  # (tokens, E)
        scores = (self.probabilities + self.bias).detach()
        chosen = scores >= scores.sort(descending=True).values[:, self.top_k - 1, None]
        weights = self.probabilities * chosen
        weights = weights / weights.sum(1, keepdim=True)
        # Tokens queue at their experts, in order.
        capacity = math.ceil(self.capacity_factor * self.top_k * len(tokens) / len(self.bias))
        stays = chosen & (chosen.cumsum(0) <= capacity)  # (tokens, E)
        self.counts, self.kept = chosen.sum(0, keepdim=True), stays.sum(0)
        self.decisions = stays.nonzero()
        out = torch.zeros_like(tokens)
        every = zip(self.experts.gate, self.experts.up, self.experts.down, strict=True)
        for expert, (gate, up, down) in enumerate(every):
            computed = (F.silu(tokens @ gate) * (tokens @ up)) @ down
            out = out + (weights * stays)[:, expert, None] * computed
        return out.view_as(x)

    def dropped(self):
        return self.counts[0] - self.kept

    def auxiliary_loss(self):
        """Return the loss of Switch Transformers' equations 4 to 6, from the queues."""
        load = self.counts[0].float()
        return len(load) * (load / load.sum()) @ self.probabilities.mean(0)

    def nudge_bias(self, rate):
        """Add the sign of the mean load less the expert's own, times a rate."""
        load, mean = self.counts[0], self.counts.sum() / self.counts.numel()
        self.bias += rate * ((load < mean).int() - (load > mean).int())


def backward_alone(alone, batch, aux_weight, mesh=None):
    """Compute the dense loop's gradient on the global batch; return its mean cross-entropy."""
    inputs, targets = batch
    loss = F.cross_entropy(alone(inputs).flatten(0, 1), targets.flatten())
    auxiliary = sum(block.moe.auxiliary_loss() for block in alone.blocks)
    (loss + aux_weight * auxiliary).backward()
    return loss.item()


def check_step(report, model, alone, batches, mesh, loss_of, backward):
    """Take one step's gradient on all ranks and on one process; check all that it computed.

    `batches` are this rank's own and the global one, (inputs, targets) of (B, T) each. Experts have
    a bias and there is an auxiliary loss, so that both must be right too.
    """
    own, whole = batches
    for block in (*model.blocks, *alone.blocks):
        block.moe.bias.copy_(0.02 * torch.arange(len(block.moe.bias)).sin())
    weight = report.args.aux_weight
    expected = backward_alone(alone, whole, weight)
    check_exchanges(report, model, alone, own, mesh, loss_of)
    model.zero_grad()
    with torch.no_grad():
        logits = alone(whole[0]).chunk(dist.get_world_size())[dist.get_rank()]
        error = (model(own[0]) - logits).abs().max()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    report.check("outputs: largest error", error.item(), 0, TOLERANCE, "dense loop")
    error = abs(backward(model, own, weight, mesh) - expected)
    report.check("loss: error", error, 0, TOLERANCE, "dense loop")
    check_gradients(report, model, alone, mesh)


def check_gradients(report, model, alone, mesh):
    """Check the gradients of routers, experts and the rest against those of the dense loop."""
    left = dict(model.named_parameters())
    for kind, part in (("routers", ".router."), ("experts", ".experts."), ("the rest", "")):
        own = {name: left.pop(name) for name in list(left) if part in name}
        expected = [alone.get_parameter(name).grad for name in own]
        if kind == "experts":
            place = mesh.get_local_rank("ep")
            expected = [whole.chunk(mesh["ep"].size())[place] for whole in expected]
        weights, claim = nn.ParameterList(own.values()), f"{kind}: relative error of the gradient"
        proofs.same_gradient(report, weights, proofs.flat(expected), TOLERANCE, claim, "dense loop")


def check_exchanges(report, model, alone, batch, mesh, loss_of):
    """Check each all-to-all's bytes and rows against the dense loop's decisions; print means."""
    ranks, ep, blocks = dist.get_world_size(), mesh["ep"].size(), len(model.blocks)
    spy = mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single)
    with traffic.TrafficCounter() as counter, spy as exchange:
        loss, auxiliary = loss_of(model, batch)
        (loss + auxiliary).backward()
    forward = [f"block {b}, {kind}" for b in range(blocks) for kind in ("dispatch", "return")]
    names = forward + [name.replace(", ", ", backward of ") for name in reversed(forward)]
    calls = [call.args for call in exchange.call_args_list]  # (_, rows, _, rows for each rank)
    report.check("all-to-alls per step", len(calls), len(names), 0, "4 for each block")
    others = len(counter.collectives) - len(calls)
    report.check("other collectives", others, blocks, 0, "a gather of counts each")
    place = mesh.get_local_rank("ep")
    sent = [rows.nbytes - rows[: sends[place]].nbytes for _, rows, _, sends in calls]
    sent = runtime.gather((sent + [0] * len(names))[: len(names)])  # [rank][call]
    tokens, row_bytes = batch[0].numel(), 4 * alone.config.dim  # float32
    expected = expected_bytes(alone, ranks, ep, tokens, row_bytes)
    for rank in range(ranks):
        for name, measured, right in zip(names, sent[rank], expected[rank], strict=True):
            claim = f"rank {rank}, {name}: bytes sent"
            report.check(claim, measured, right, EXACT, "the dense loop's decisions")
    for number, (block, reference) in enumerate(zip(model.blocks, alone.blocks, strict=True)):
        rows = sum(runtime.gather(len(calls[2 * number][1])))
        accounted, choices = rows + block.moe.dropped().sum(), reference.moe.counts.sum()
        name = f"block {number}: choices computed or counted as dropped"
        report.check(name, accounted.item(), choices.item(), 0, "tokens times k")
    # What leaves a rank arrives at another: on average all all-to-alls of a block send as much.
    mean = sum(map(sum, sent)) / ranks / len(names)
    formula = tokens * report.args.top_k * row_bytes * (ep - 1) / ep
    what = f"{mean / 1e3:,.1f} KB per rank, on average; k T D 4 (N-1)/N is {formula / 1e3:,.1f} KB"
    report.say(f"{len(names)} all-to-alls a step; each sends {what}")


def expected_bytes(alone, ranks, ep, tokens, row_bytes):
    """Return the bytes that each all-to-all of a step sends to other ranks: [rank][call].

    Results go where tokens came from, and gradients go the way back: so each all-to-all sends what
    a rank dispatches to others, or what others dispatch to it. `tokens` are those of a rank.
    """
    per_block = []
    for block in alone.blocks:
        token, expert = block.moe.decisions.T
        source = token // tokens
        target = source // ep * ep + expert // (len(block.moe.bias) // ep)  # in the source's group
        ends = torch.stack((source, target))[:, source != target]
        per_block.append([torch.bincount(end, minlength=ranks) * row_bytes for end in ends])
    calls = sum(per_block + per_block[::-1], [])  # forward, then backward from the last block
    return torch.stack(calls, 1).tolist()


def record(model, losses):
    """Go through a training; return its losses (steps,), load and dropped (steps, L, E)."""
    rows = []
    for loss in losses:
        load = torch.stack([block.moe.counts.sum(0) for block in model.blocks])
        dropped = torch.stack([block.moe.dropped() for block in model.blocks])
        rows.append((torch.tensor(loss), load.cpu(), dropped.cpu()))
    return [torch.stack(side) for side in zip(*rows, strict=True)]


def check_steps(report, name, steps, alone, losses_alone):
    """Train the dense loop on the same global batches; check losses and dropped choices.

    `steps` is what `record` returned; `losses_alone` go through its first few, if any.
    """
    if not report.args.parity_steps:
        return
    right, _, counted = record(alone, losses_alone)
    losses, _, dropped = (side[: len(right)] for side in steps)
    claim, source = f"{name}: largest error of a loss", "the dense loop's queues"
    proofs.same_losses(report, losses, right, TOLERANCE, claim, "dense loop")
    total = dropped.sum().item(), counted.sum().item()
    report.check(f"{name}: choices dropped", *total, EXACT, source)
    wrong = (dropped != counted).sum().item()
    report.check(f"{name}: experts with a wrong count of them", wrong, 0, 0, source)


def compare(report, history):
    """Print loss, imbalance and dropped choices of each way; check that balancing balances."""
    rows, imbalance = [], {}
    for name, steps in history.items():
        losses, load, dropped = (side[-SHOWN_STEPS:] for side in steps)
        imbalance[name] = (load.amax(2) / load.double().mean(2)).mean().item()
        share = dropped.sum() / load.sum()
        rows.append((name, f"{losses.mean():.4f}", f"{imbalance[name]:.2f}x", f"{share:.0%}"))
        report.metrics[f"{name}: dropped"] = steps[2].sum().item()
    count = len(steps[0])
    report.say(f"mean of the last {len(losses)} of {count} steps:")
    report.table(rows, ("balancing", "loss", "max/mean load", "dropped"))
    if count >= MIN_STEPS:
        better = sum(imbalance[name] < imbalance["none"] for name in imbalance)
        claim = "ways with less max/mean load than none"
        report.check(claim, better, len(imbalance) - 1, 0, "measured")
