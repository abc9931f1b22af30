"""Divide a mixture of experts over ranks: tokens travel to their experts and back by all-to-all.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/expert_parallel.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/expert_parallel.py

Look for: the dense loop's loss, gradients and dropped tokens on any number of ranks; the bytes of
each all-to-all, counted from the router's decisions; and three ways to balance the experts.

Sources: Shazeer et al., Sparsely-Gated Mixture-of-Experts (2017); Lepikhin et al., GShard (2020);
Fedus et al., Switch Transformers (2021), equations 3 to 6; DeepSeek-V3 (2024), section 2.1.2.
"""

import dataclasses
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from advanced_parts import expert_parallel as part
from legacy_common import cli, data, models, runtime
from legacy_common.report import Report


class AllToAll(torch.autograd.Function):
    """Send rows to the ranks of a group; in backward their gradients travel the way back."""

    @staticmethod
    def forward(ctx, rows, sends, receives, group):
        ctx.way_back = receives, sends, group
        arrived = rows.new_empty(sum(receives), rows.shape[1])

        dist.all_to_all_single(arrived, rows.contiguous(), receives, sends, group=group)

        return arrived

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient, *ctx.way_back), None, None, None


class Experts(nn.Module):
    """Several SwiGLU feed-forwards (Shazeer, 2020), weights stacked: the experts of one rank."""

    def __init__(self, config, num_experts):
        super().__init__()
        E, D, hidden = num_experts, config.dim, config.ffn_dim
        self.gate = nn.Parameter(torch.empty(E, D, hidden))
        self.up = nn.Parameter(torch.empty(E, D, hidden))
        self.down = nn.Parameter(torch.empty(E, hidden, D))

    def forward(self, rows, counts):
        """Compute rows (R, D), sorted by source rank, then expert; counts are (ranks, E).

        An expert without a row takes part with none, so that its gradient is zeros and not None.
        """
        experts = torch.arange(counts.shape[1], device=rows.device).repeat(counts.shape[0])
        by_expert = experts.repeat_interleave(counts.flatten()).argsort(stable=True)
        parts = rows[by_expert].split(counts.sum(0).tolist())
        weights = zip(parts, self.gate, self.up, self.down, strict=True)
        done = [(F.silu(part @ gate) * (part @ up)) @ down for part, gate, up, down in weights]
        return torch.cat(done)[by_expert.argsort()]  # (R, D), in the order of arrival


class MoE(nn.Module):
    """A top-k mixture of experts; the ranks of mesh["ep"] hold E / ep of its experts each."""

    def __init__(self, config, num_experts, top_k, capacity_factor, mesh):
        super().__init__()
        self.top_k, self.capacity_factor, self.mesh = top_k, capacity_factor, mesh
        self.router = nn.Linear(config.dim, num_experts, bias=False)
        self.experts = Experts(config, num_experts)  # all of them, until keep_own_experts
        self.register_buffer("bias", torch.zeros(num_experts))

    def forward(self, x):
        tokens = x.flatten(0, 1)  # (T, D): this rank's tokens
        self.probabilities, experts, weights = self.choose(tokens)
        self.counts = count_choices(experts, len(self.bias))  # (ranks, E)
        capacity = math.ceil(self.capacity_factor * self.counts.sum().item() / len(self.bias))
        self.kept = keep(self.counts, capacity)  # (ranks, E)
        choices = sort_kept(experts, self.counts, self.kept)  # (R,), of T * k
        rows = choices // self.top_k  # the token that made the choice

        computed = self.exchange(tokens[rows])  # (R, D)

        weighted = computed * weights.flatten()[choices, None]
        return torch.zeros_like(tokens).index_add(0, rows, weighted).view_as(x)

    def choose(self, tokens):
        """Let the router choose k experts for each token: probabilities (T, E), the rest (T, k)."""
        probabilities = F.softmax(self.router(tokens), dim=-1)
        # The bias moves the choice alone: the weights, and so the gradients, do not see it.
        experts = (probabilities + self.bias).topk(self.top_k).indices
        weights = probabilities.gather(1, experts)
        return probabilities, experts, weights / weights.sum(1, keepdim=True)

    def exchange(self, rows):
        """Send rows to their experts' ranks, compute there, bring the results back in order."""
        mine, group = self.mesh.get_local_rank("ep"), self.mesh.get_group("ep")
        kept = self.kept[dist.get_process_group_ranks(group)]  # (ep, E)
        kept = kept.view(len(kept), len(kept), -1)  # [from rank, to rank, expert of that rank]
        sends = kept[mine].sum(1).tolist()
        receives = kept[:, mine].sum(1).tolist()

        arrived = AllToAll.apply(rows, sends, receives, group)
        computed = self.experts(arrived, kept[:, mine])
        return AllToAll.apply(computed, receives, sends, group)

    def dropped(self):
        """Return how many choices of each expert were over its capacity, on all ranks: (E,)."""
        return (self.counts - self.kept).sum(0)

    def auxiliary_loss(self):
        """Return E * sum(f * P), 1 where all is even (Switch Transformers, equations 4 to 6)."""
        load = self.counts.sum(0)
        fractions = load / load.sum()  # f, of all ranks' tokens: counts carry no gradient
        # P, of this rank's tokens: the mean of all ranks' losses holds the mean of all ranks' P.
        return len(load) * (fractions * self.probabilities.mean(0)).sum()

    def nudge_bias(self, rate):
        """After a step: make an overloaded expert less likely to be chosen, an idle one more."""
        load = self.counts.sum(0).float()
        self.bias += rate * (load.mean() - load).sign()


def count_choices(experts, num_experts):
    """Tell all ranks how often each rank chose each expert: (ranks, E)."""
    own = torch.bincount(experts.flatten(), minlength=num_experts)
    counts = own.new_empty(dist.get_world_size(), num_experts)
    runtime.all_gather_single(counts, own[None])
    return counts


def keep(counts, capacity):
    """Return how many choices each rank keeps of each expert; rank 0's tokens queue first."""
    before = counts.cumsum(0) - counts
    return torch.minimum(counts, (capacity - before).clamp(min=0))


def sort_kept(experts, counts, kept):
    """Return the choices (of T * k) that stay, by expert: the order in which they are sent."""
    counts, kept = counts[dist.get_rank()], kept[dist.get_rank()]
    chosen, order = experts.flatten().sort(stable=True)
    place = torch.arange(len(chosen), device=chosen.device) - (counts.cumsum(0) - counts)[chosen]
    return order[place < kept[chosen]]


class MoEBlock(models.Block):
    """A block whose feed-forward is a mixture of experts; a token that it drops stays as it is."""

    def __init__(self, config, moe):
        super().__init__(config)
        del self.gate, self.up, self.down
        self.moe = moe

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.moe(self.ffn_norm(x))  # (B, T, D)


def build_model(config, layer, seed, device):
    """Draw a transformer from a seed, the same on all ranks; layer() is a block's feed-forward."""
    runtime.seed_everything(seed)
    model = models.Transformer(config)
    for index in range(config.num_layers):
        model.blocks[index] = MoEBlock(config, layer())
    model.reset_parameters()
    return model.to(device)


def keep_own_experts(model, mesh):
    """Leave a rank E / ep of the experts; all ranks drew all of them from one seed."""
    for block in model.blocks:
        for name, weight in block.moe.experts.named_parameters():
            own = weight.detach().chunk(mesh["ep"].size())[mesh.get_local_rank("ep")]
            setattr(block.moe.experts, name, nn.Parameter(own.clone()))
    return model


def loss_of(model, batch):
    """Return this rank's mean cross-entropy, and the auxiliary losses of all blocks."""
    inputs, targets = batch
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    return loss, sum(block.moe.auxiliary_loss() for block in model.blocks)


def backward(model, batch, aux_weight, mesh):
    """Compute the gradient of the mean over all ranks' tokens; return the mean cross-entropy."""
    loss, auxiliary = loss_of(model, batch)

    # 1/N before backward: experts' gradients arrive summed over ranks, as the others are below.
    ((loss + aux_weight * auxiliary) / dist.get_world_size()).backward()

    for name, parameter in model.named_parameters():
        group = mesh.get_group("replica") if ".experts." in name else None
        dist.all_reduce(parameter.grad, group=group)
    loss = loss.detach() / dist.get_world_size()
    dist.all_reduce(loss)
    return loss.item()


def train(backward, model, batches, aux_weight, bias_rate, lr, mesh):
    """Train; yield each step's loss after it. `backward` is the one above, or the dense loop's."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for batch in batches:
        optimizer.zero_grad()
        loss = backward(model, batch, aux_weight, mesh)
        optimizer.step()
        for block in model.blocks:
            block.moe.nudge_bias(bias_rate)
        yield loss


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, positive = parser.add_argument, cli.positive_int
    add("--experts", type=positive, default=8, help="experts of each block (8)")
    add("--top-k", type=positive, default=2, help="experts that compute a token (2)")
    add("--ep", type=positive, help="ranks that divide the experts (all of them)")
    add("--capacity-factor", type=cli.positive_float, default=1.25,
        help="tokens that an expert takes, relative to an even load (1.25)")  # fmt: skip
    add("--micro-batch-size", type=positive, default=4, help="sequences per rank and step (4)")
    add("--seq-len", type=positive, default=64, help="tokens per sequence (64)")
    add("--layers", type=positive, default=2, help="transformer blocks (2)")
    add("--max-steps", type=positive, default=60, help="training steps of each way (60)")
    add("--parity-steps", type=cli.whole_number, default=3,
        help="of these, how many the dense loop takes too (3)")  # fmt: skip
    add("--lr", type=cli.positive_float, default=1e-3, help="learning rate of AdamW (0.001)")
    add("--aux-weight", type=cli.positive_float, default=0.05,
        help="factor of the auxiliary loss (0.05)")  # fmt: skip
    add("--bias-rate", type=cli.positive_float, default=0.01, help="of the bias, per step (0.01)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        part.refuse_bad_sizes(args, world.world_size)
        report = Report("05-advanced/expert_parallel.py", args, world, device)
        ep = args.ep or world.world_size
        sizes = (world.world_size // ep, ep)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replica", "ep"))
        tiny = models.preset("tiny", args.seq_len)
        config = dataclasses.replace(tiny, num_layers=args.layers, ffn_dim=tiny.dim)
        size = args.micro_batch_size
        whole = size * world.world_size
        text = data.Sequences(data.load_text(), args.seq_len, whole)
        held = f"{args.experts // ep} of {args.experts} experts on each rank"
        report.start(f"{held}, top {args.top_k}, {size * args.seq_len} tokens per rank and step")

        shape = (config, args.experts, args.top_k, args.capacity_factor, mesh)

        def build(layer=lambda moe: moe):
            return build_model(config, lambda: layer(MoE(*shape)), args.seed, device)

        def batches(steps, first=world.rank * size, count=size):
            return data.batches_of(text, steps, whole, first, count, device)

        model, alone = keep_own_experts(build(), mesh), build(part.DenseLoop)
        both = next(batches(1)), next(batches(1, 0, whole))
        part.check_step(report, model, alone, both, mesh, loss_of, backward)

        history = {}
        # Each way to balance: factor of the auxiliary loss, rate of the bias.
        ways = {"none": (0, 0), "auxiliary loss": (args.aux_weight, 0), "bias": (0, args.bias_rate)}
        for name in report.progress(ways, "balancing"):
            model, alone = keep_own_experts(build(), mesh), build(part.DenseLoop)
            steps = train(backward, model, batches(args.max_steps), *ways[name], args.lr, mesh)
            history[name] = part.record(model, steps)
            first = batches(min(args.parity_steps, args.max_steps), 0, whole)
            steps = train(part.backward_alone, alone, first, *ways[name], args.lr, mesh)
            part.check_steps(report, name, history[name], alone, steps)
        part.compare(report, history)
        return report.finish("the experts on all ranks are the dense loop's")


if __name__ == "__main__":
    cli.run(main)
