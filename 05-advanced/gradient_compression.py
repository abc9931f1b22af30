"""Three ways to send fewer bytes than the gradient has, as communication hooks of DDP.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/gradient_compression.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/gradient_compression.py

Look for: how many bytes each method sends, and what its loss is after the same number of samples;
top-k with and without error feedback; how a rank's bytes grow with the number of ranks.
Sources: Stich et al., Sparsified SGD with Memory (2018); Lin et al., Deep Gradient Compression
(2018); Vogels et al., PowerSGD (2019), algorithms 1 and 2.
"""

import math
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from advanced_parts import gradient_compression as part
from dist_common.links import slow_group
from legacy_common import cli, runtime
from legacy_common.report import Report


class Half:
    """Send each number in 2 bytes instead of 4: `dtype` is torch.float16 or torch.bfloat16."""

    def __init__(self, parameters, dtype, group):
        self.dtype, self.group = dtype, group

    def hook(self, _, bucket):
        share = bucket.buffer() / dist.get_world_size(self.group)  # now: the sum may overflow
        small = share.to(self.dtype)

        work = dist.all_reduce(small, group=self.group, async_op=True)

        return work.get_future().then(lambda sum_: bucket.buffer().copy_(sum_.value()[0]))


class TopK:
    """Send the k largest numbers of a bucket and where they are; keep the others for later."""

    def __init__(self, parameters, fraction, group, feedback=True):
        self.fraction, self.group, self.feedback = fraction, group, feedback
        # By parameter, not by bucket: DDP deals parameters to buckets anew after the first step.
        self.unsent = {p: torch.zeros_like(p).flatten() for p in parameters}

    def hook(self, _, bucket):
        wanted = bucket.buffer()
        if self.feedback:
            wanted += torch.cat([self.unsent[p] for p in bucket.parameters()])
        indices = wanted.abs().topk(math.ceil(self.fraction * len(wanted))).indices
        self.keep(bucket.parameters(), wanted.index_fill(0, indices, 0))

        # Other ranks chose other places: sparse vectors cannot be added while they are sent.
        values, indices = self.gather(wanted[indices]), self.gather(indices.int())

        mean = torch.zeros_like(wanted).index_add_(0, indices, values)
        return done(mean / dist.get_world_size(self.group))

    def keep(self, parameters, unsent):
        sizes = [p.numel() for p in parameters]
        self.unsent.update(zip(parameters, unsent.split(sizes), strict=True))

    def gather(self, own):
        """Return all ranks' vectors, one after the other. Shapes: (k,) -> (N k,)."""
        whole = own.new_empty(dist.get_world_size(self.group) * len(own))
        runtime.all_gather_single(whole, own, group=self.group)
        return whole


class PowerSGD:
    """Send a matrix (n, m) as P (n, r) and Q (m, r) with P Q^T close to it; vectors as they are."""

    def __init__(self, parameters, rank, group, feedback=True):
        self.group, self.feedback, self.unsent, self.q = group, feedback, {}, {}
        generator = torch.Generator().manual_seed(0)  # all ranks start with the same Q
        for p in (p for p in parameters if p.dim() > 1):
            n, m = p.flatten(1).shape
            self.unsent[p] = torch.zeros_like(p).flatten(1)
            self.q[p] = torch.randn(m, min(rank, n, m), generator=generator).to(p)

    def hook(self, _, bucket):
        gradients = dict(zip(bucket.parameters(), bucket.gradients(), strict=True))
        vectors = [g for p, g in gradients.items() if p not in self.q]
        wanted = {p: g.flatten(1) for p, g in gradients.items() if p in self.q}
        if self.feedback:
            wanted = {p: matrix + self.unsent[p] for p, matrix in wanted.items()}

        P = {p: matrix @ torch.linalg.qr(self.q[p]).Q for p, matrix in wanted.items()}  # (n, r)
        average([*P.values(), *vectors], self.group)
        P = {p: torch.linalg.qr(columns).Q for p, columns in P.items()}
        Q = {p: matrix.T @ P[p] for p, matrix in wanted.items()}  # (m, r)
        average(list(Q.values()), self.group)

        for p, matrix in wanted.items():
            close = P[p] @ Q[p].T
            self.unsent[p], self.q[p] = matrix - close, Q[p]  # warm start: the next step's first Q
            gradients[p].copy_(close.view_as(gradients[p]))
        return done(bucket.buffer())


def done(tensor):
    """Return a Future that has its value already: a hook that has waited owes DDP one."""
    future = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
    future.set_result(tensor)
    return future


def average(tensors, group):
    """Replace tensors by their mean over all ranks, in one all-reduce."""
    if tensors:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=group)
        means = (flat / dist.get_world_size(group)).split([t.numel() for t in tensors])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean.view_as(tensor))


def methods_of(fraction, rank):
    """Return each method as name: what makes its hook, of the parameters and the group."""
    return {
        "float32": None,  # no hook: DDP's own all-reduce
        "float16": partial(Half, dtype=torch.float16),
        "bfloat16": partial(Half, dtype=torch.bfloat16),
        "top-k": partial(TopK, fraction=fraction),
        "top-k, no feedback": partial(TopK, fraction=fraction, feedback=False),
        "PowerSGD": partial(PowerSGD, rank=rank),
        "PowerSGD, no feedback": partial(PowerSGD, rank=rank, feedback=False),
    }


def data_parallel(model, method, group=None, **options):
    """Wrap a model in DDP with a method's hook."""
    ddp = DDP(model, process_group=group, **options)
    if method:
        ddp.register_comm_hook(None, method(list(model.parameters()), group=group).hook)
    return ddp


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, positive = parser.add_argument, cli.positive_int
    add("--micro-batch-size", type=positive, default=64, help="samples per rank and step (64)")
    add("--max-steps", type=positive, default=150, help="of each method (150)")
    add("--optimizer", choices=part.OPTIMIZERS, default="sgd", help="of the compared runs (sgd)")
    add("--top-k-fraction", type=cli.positive_float, default=0.01,
        help="of a bucket's numbers, which top-k sends (0.01)")  # fmt: skip
    add("--powersgd-rank", type=positive, default=2, help="columns of P and of Q (2)")
    add("--link", type=cli.link_rate, default=cli.link_rate("100mbit"),
        help="emulated link of the timed steps: 100mbit, 1gbit (100mbit)")  # fmt: skip
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("05-advanced/gradient_compression.py", args, world, device)
        weights = list(part.next_byte().parameters())
        part.refuse_settings(args.powersgd_rank, args.top_k_fraction, weights)
        methods = methods_of(args.top_k_fraction, args.powersgd_rank)
        own, test = part.draw_batches(args, world, device)
        samples = f"{args.max_steps} steps x {world.world_size} ranks x {args.micro_batch_size}"
        count = sum(weight.numel() for weight in weights)
        report.start(f"{count:,} weights, {samples} samples, {args.optimizer}")

        proof = part.Proof(report, data_parallel)
        part.check_methods(proof, methods)
        part.check_without_loss(proof, methods)

        def prepare(name, group=None):
            model = proof.build()
            optimizer = part.OPTIMIZERS[args.optimizer](model.parameters())
            return data_parallel(model, methods[name], group), optimizer

        alone, _ = dist.new_subgroups_by_enumeration([[rank] for rank in range(world.world_size)])
        link, _ = slow_group(args.link)
        part.compare_methods(report, prepare, own, test, (alone, link), args.link)
        return report.finish("each method does what one process computes, and sends what it should")


if __name__ == "__main__":
    cli.run(main)
