"""Expert parallelism: tokens travel to the ranks that have their experts, and back.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/expert_parallel.py
    GPU   the same, with one GPU per rank

Look for: the losses and the gradient of one process that has all experts; the bytes of
each all-to-all; the load of the busiest expert, with and without balancing.

Sources: Shazeer et al., Sparsely-Gated Mixture-of-Experts (2017); Lepikhin et al.,
GShard (2020); DeepSeek-V3 (2024), section 2.1.2, for the bias.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dist_common import check, cli, data, runtime
from dist_common.model import PRESETS, Block, Transformer, init_weight
from dist_common.report import Report

CONFIG = replace(PRESETS["tiny"], num_layers=2)
NUM_EXPERTS = 12  # E, of each layer
TOP_K = 2  # k, experts that compute a token
HIDDEN = 96  # width of an expert
SEQ_LEN = 32  # T, tokens
GLOBAL_BATCH = 12  # sequences of all ranks
STEPS = 40  # of training
BIAS_RATE = 0.01  # change of the bias per step
TOLERANCE = 1e-5  # float32 sums in another order differ in the last bits


class AllToAllV(torch.autograd.Function):
    """Send rows to all ranks; in backward their gradients travel back.

    sends[r] rows go to rank r, receives[r] rows come from rank r. The bytes for other
    ranks are added to the list `sent`. Shapes: rows (R, D).
    """

    @staticmethod
    def forward(ctx, rows, sends, receives, sent):
        ctx.way_back = receives, sends, sent
        received = rows.new_empty(sum(receives), rows.shape[1])
        dist.all_to_all_single(received, rows, receives, sends)
        to_others = sum(sends) - sends[dist.get_rank()]
        sent.append(to_others * rows.shape[1] * rows.element_size())
        return received

    @staticmethod
    def backward(ctx, gradient):
        return AllToAllV.apply(gradient.contiguous(), *ctx.way_back), None, None, None


# Experts


def multiply_in_a_loop(rows, weights, counts):
    """Multiply counts[0] rows by the first expert's matrix, the next by the second's.

    Shapes: rows (R, K), weights (E/n, K, N), counts (E/n,) -> (R, N).
    """
    parts = rows.split(counts.tolist())
    return torch.cat([part @ w for part, w in zip(parts, weights, strict=True)])


def multiply_in_a_group(rows, weights, counts):
    """Do the same in one call: on a GPU with bfloat16, one kernel."""
    return F.grouped_mm(rows, weights, offs=counts.cumsum(0, dtype=torch.int32))


multiply = multiply_in_a_group if hasattr(F, "grouped_mm") else multiply_in_a_loop


class Experts(nn.Module):
    """Stacked SwiGLU feed-forwards: first all E, later the experts of one rank."""

    def __init__(self):
        super().__init__()
        shape = (NUM_EXPERTS, CONFIG.dim, HIDDEN)
        self.gate = nn.Parameter(torch.empty(shape))
        self.up = nn.Parameter(torch.empty(shape))
        self.down = nn.Parameter(torch.empty(NUM_EXPERTS, HIDDEN, CONFIG.dim))

    def forward(self, rows, counts):
        """Shapes: rows (R, D) in the order of experts, counts (E/n,) -> (R, D)."""
        hidden = F.silu(multiply(rows, self.gate, counts))
        hidden = hidden * multiply(rows, self.up, counts)
        return multiply(hidden, self.down, counts)


class MoE(nn.Module):
    """A mixture of experts: each token is computed by k of E experts, on any rank."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(CONFIG.dim, NUM_EXPERTS, bias=False)
        self.experts = Experts()
        self.register_buffer("bias", torch.zeros(NUM_EXPERTS))

    def forward(self, x):
        """Shapes: x (B, T, D) -> (B, T, D), of this rank's sequences."""
        tokens = x.flatten(0, 1)
        weights = self.route(tokens)  # (B T, k)
        order = self.choice.flatten().argsort()  # by expert, so by rank
        token_of_row = order // TOP_K
        computed = self.compute(tokens[token_of_row])
        weighted = computed * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, token_of_row, weighted).view_as(x)

    def route(self, tokens):
        """Choose k experts for each token; return their weights. Shape: (B T, k)."""
        scores = self.router(tokens).sigmoid()  # (B T, E)
        # The bias changes the choice only; weights and gradients do not contain it.
        self.choice = (scores + self.bias).topk(TOP_K).indices  # (B T, k)
        self.load = self.choice.flatten().bincount(minlength=NUM_EXPERTS)  # (E,)
        weights = scores.gather(1, self.choice)
        return weights / weights.sum(1, keepdim=True)

    def compute(self, rows):
        """Send rows to their experts and bring the results back, in the same order."""
        n = dist.get_world_size()
        given = self.load.view(n, -1)  # [to rank, expert of that rank]
        taken = torch.empty_like(given)  # [from rank, expert of this rank]
        dist.all_to_all_single(taken, given)
        sends, receives = given.sum(1).tolist(), taken.sum(1).tolist()
        self.sent = []  # bytes of each all-to-all of rows

        arrived = AllToAllV.apply(rows, sends, receives, self.sent)
        # Rows arrive sorted by rank, then by expert. An expert wants its rows together.
        experts = torch.arange(taken.shape[1], device=rows.device).repeat(n)
        order = experts.repeat_interleave(taken.flatten()).argsort()
        computed = self.experts(arrived[order], taken.sum(0))
        computed = computed[order.argsort()]  # in the order of arrival
        return AllToAllV.apply(computed, receives, sends, self.sent)


class DenseMoE(MoE):
    """The reference: one process, where every expert computes every token."""

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights = self.route(tokens)
        matrices = zip(*self.experts.parameters(), strict=True)
        out = torch.zeros_like(tokens)
        for expert, (gate, up, down) in enumerate(matrices):
            computed = (F.silu(tokens @ gate) * (tokens @ up)) @ down
            is_chosen = self.choice == expert  # (B T, k)
            out += (weights * is_chosen).sum(1, keepdim=True) * computed
        return out.view_as(x)


# The transformer


class MoEBlock(Block):
    """A block that has a mixture of experts as its feed-forward."""

    def __init__(self, config, moe):
        super().__init__(config)
        del self.gate, self.up, self.down
        self.moe = moe

    def compute(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.moe(self.ffn_norm(x))


def build_model(kind, run, seed):
    """Return a transformer with layers of a kind; a rank keeps its share of experts."""
    torch.manual_seed(seed)  # the same weights on every rank
    model = Transformer(CONFIG)
    for index in range(CONFIG.num_layers):
        model.blocks[index] = MoEBlock(CONFIG, kind())
    for name, weight in model.named_parameters():
        init_weight(name, weight, CONFIG.num_layers)
        if kind is MoE and ".experts." in name:
            weight.data = share_of(weight.data, run).clone()
    return model.to(run.device)


def load_batch(step, device):
    """Return the tokens of a step, of all ranks. Shape: (B, T + 1)."""
    text = torch.tensor(data.load_text()[:960_000], device=device)
    start = step * SEQ_LEN  # each sequence continues in the next step
    return text.view(GLOBAL_BATCH, -1)[:, start : start + SEQ_LEN + 1].long()


def share_of(tensor, run):
    """Return this rank's part of a tensor, divided along its first dimension."""
    return tensor.chunk(run.world_size)[run.rank]


def share_of_loss(model, tokens):
    """Return the loss of a rank's tokens, divided by the tokens of all ranks."""
    logits = model(tokens[:, :-1]).flatten(0, 1)
    loss = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
    return loss / (GLOBAL_BATCH * SEQ_LEN)


def sum_gradients(model):
    """Sum over ranks. Experts need no sum: they met the tokens of all ranks."""
    for name, weight in model.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(weight.grad)


def train(run, seed, bias_rate):
    """Train a new model; return the last loss and the imbalance.

    Imbalance is the load of the busiest expert over the mean, in the last ten steps.
    """
    model = build_model(MoE, run, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    moes = [block.moe for block in model.blocks]
    imbalance = []
    for step in range(STEPS):
        loss = share_of_loss(model, share_of(load_batch(step, run.device), run))
        loss.backward()
        sum_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

        load = torch.stack([moe.load for moe in moes])  # (L, E)
        dist.all_reduce(load)
        mean = load.float().mean(1, keepdim=True)
        for moe, excess in zip(moes, load - mean, strict=True):
            moe.bias -= bias_rate * excess.sign()  # busy experts become less likely
        imbalance.append((load / mean).amax(1).mean().item())
    return sum(runtime.gather(loss.item())), sum(imbalance[-10:]) / 10


# Checks


def check_step(report):
    """Compare a step with one process, where each expert multiplies separately."""
    run, seed = report.run, report.args.seed
    tokens = load_batch(0, run.device)
    alone, model = build_model(DenseMoE, run, seed), build_model(MoE, run, seed)
    expected = share_of_loss(alone, tokens)
    expected.backward()
    loss = share_of_loss(model, share_of(tokens, run))
    loss.backward()
    sum_gradients(model)
    error = abs(sum(runtime.gather(loss.item())) / expected.item() - 1)
    report.check("loss: relative error", error, 0, TOLERANCE)
    grads, expected_grads = {}, {}
    for name, weight in alone.named_parameters():
        grads[name] = model.get_parameter(name).grad
        is_expert = ".experts." in name
        expected_grads[name] = share_of(weight.grad, run) if is_expert else weight.grad
    errors = runtime.gather(check.relative_error(grads, expected_grads))
    report.check("gradient: relative error", sum(errors), 0, TOLERANCE)  # of all ranks
    check_bytes(report, model, alone)


def check_bytes(report, model, alone):
    """Compare the bytes that all ranks sent with the choices of one process."""
    n = report.run.world_size
    rows = 0  # that leave their rank
    for block in alone.blocks:
        target = block.moe.choice.view(n, -1).cpu() // (NUM_EXPERTS // n)
        rows += (target != torch.arange(n).unsqueeze(1)).sum().item()
    sent = sum(sum(block.moe.sent) for block in model.blocks)
    # Dispatch, return, and backward of both: rows of float32.
    expected = 4 * rows * CONFIG.dim * 4
    report.check("bytes that all ranks sent", sum(runtime.gather(sent)), expected, 0)


def main():
    args = cli.ArgumentParser(__doc__).parse_args()
    with runtime.init(args.device, args.timeout) as run:
        if GLOBAL_BATCH % run.world_size:
            raise cli.UsageError(f"{run.world_size} ranks: start 1, 2, 3, 4, 6 or 12")
        report = Report("05-advanced/expert_parallel.py", args, run)
        check_step(report)
        excess = []
        for rate in (0, BIAS_RATE):
            loss, busiest = train(run, args.seed, rate)
            line = f"bias rate {rate}: loss {loss:.4f}, busiest {busiest:.2f} x mean"
            run.print0(line)
            excess.append(busiest - 1)
        report.check("excess load with the bias", excess[1], 0, excess[0] / 2)
        return report.finish("tokens on all ranks met the experts of one process")


if __name__ == "__main__":
    cli.run(main)
