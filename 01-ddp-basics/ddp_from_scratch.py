"""Build DistributedDataParallel in four steps, each one equal to a single process.

    CPU   torchrun --standalone --nproc-per-node=2 01-ddp-basics/ddp_from_scratch.py
    GPU   torchrun --standalone --nproc-per-node=gpu 01-ddp-basics/ddp_from_scratch.py

Add `--link 100mbit` to see on a laptop what overlap is for. Look for: the same gradient and the
same bytes in every step, fewer collectives from the second on, and from the third on a step time
that approaches max(compute, communication) instead of their sum.

Source: Li et al., PyTorch Distributed (VLDB 2020), sections 3.2.1 to 3.2.3 for the first three.
"""

import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from dist_common import data, measure, runtime
from dist_common.console import Console
from dist_common.models import PRESETS, Transformer

MIB = 2**20  # bytes


def average_each(model, link):
    """Step 1. After backward: one all-reduce for each parameter."""
    for parameter in model.parameters():
        link.all_reduce(parameter.grad).wait()
        parameter.grad /= dist.get_world_size()


def buckets_of(model, bucket_bytes):
    """Cut the parameters into groups of about bucket_bytes, the last layer's first.

    Backward computes gradients from the last layer to the first: so the first bucket is the first
    to be complete.
    """
    buckets = [[]]
    for parameter in reversed(list(model.parameters())):
        if sum(p.nbytes for p in buckets[-1]) >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def unpack(flat, bucket):
    """Copy the averaged gradients from their bucket back to where the optimizer looks for them."""
    parts = flat.split([parameter.numel() for parameter in bucket])
    for parameter, part in zip(bucket, parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter) / dist.get_world_size())


def average_in_buckets(model, bucket_bytes, link):
    """Step 2. After backward: one all-reduce for each bucket of gradients."""
    for bucket in buckets_of(model, bucket_bytes):
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])

        link.all_reduce(flat).wait()

        unpack(flat, bucket)


class Overlapped:
    """Step 3. During backward: start a bucket's all-reduce when its last gradient is there."""

    def __init__(self, model, bucket_bytes, link):
        self.link, self.pending = link, []
        self.buckets = buckets_of(model, bucket_bytes)
        self.missing = [len(bucket) for bucket in self.buckets]
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, i=index: self.count(i))

    def count(self, index):
        self.missing[index] -= 1
        if self.missing[index] == 0:
            bucket = self.buckets[index]
            flat = torch.cat([parameter.grad.flatten() for parameter in bucket])

            self.pending.append((self.link.all_reduce(flat), flat, bucket))  # backward goes on

    def wait(self):
        self.started_in_backward = len(self.pending)
        for handle, flat, bucket in self.pending:
            handle.wait()
            unpack(flat, bucket)
        self.pending.clear()
        self.missing = [len(bucket) for bucket in self.buckets]


class Link:
    """The real all-reduce; with a speed, it ends no sooner than on a serial link of that speed."""

    def __init__(self, bytes_per_second):
        self.bytes_per_second, self.free_at = bytes_per_second, 0.0

    def all_reduce(self, tensor):
        work = dist.all_reduce(tensor, async_op=True)
        if self.bytes_per_second:
            seconds = wire_bytes(tensor.nbytes) / self.bytes_per_second
            self.free_at = max(self.free_at, time.perf_counter()) + seconds
        return Pending(work, self.free_at)

    def hook(self, _, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Do the same for DDP, which hands over a bucket and wants a Future of its mean."""
        handle = self.all_reduce(bucket.buffer().div_(dist.get_world_size()))
        return handle.work.get_future().then(lambda done: handle.late(done.value()[0]))


class Pending:
    """A started all-reduce."""

    def __init__(self, work, ends_at):
        self.work, self.ends_at = work, ends_at

    def wait(self):
        self.work.wait()
        self.late()

    def late(self, result=None):
        time.sleep(max(0.0, self.ends_at - time.perf_counter()))
        return result


def wire_bytes(tensor_bytes):
    """Bytes that a rank sends in a ring all-reduce (Patarasuk and Yuan, 2009)."""
    return 2 * (dist.get_world_size() - 1) / dist.get_world_size() * tensor_bytes


def loss_of(model, batch):
    """Return the mean cross-entropy. Shapes: batch is inputs and targets, (B, T) each."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def variants_of(build, bucket_bytes, link):
    """Return each way to a step's averaged gradient as name: (model, what follows backward)."""
    each, buckets, overlapped, plain = (build() for _ in range(4))
    overlap = Overlapped(overlapped, bucket_bytes, link)
    ddp = DDP(build(), bucket_cap_mb=bucket_bytes / MIB)
    if link.bytes_per_second:
        ddp.register_comm_hook(None, link.hook)
    return {
        "no communication": (plain, lambda: None),
        "1 each gradient": (each, lambda: average_each(each, link)),
        "2 buckets": (buckets, lambda: average_in_buckets(buckets, bucket_bytes, link)),
        "3 buckets, overlapped": (overlapped, overlap.wait),
        "4 PyTorch's DDP": (ddp, lambda: None),
    }


def step(model, after_backward, batch):
    """Compute one averaged gradient; return the milliseconds of forward, and of the whole step."""
    model.zero_grad(set_to_none=False)
    started = now(batch)
    loss = loss_of(model, batch)
    forward = now(batch)
    loss.backward()
    after_backward()
    return (forward - started) * 1e3, (now(batch) - started) * 1e3


def now(batch):
    if batch[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def gradient_of(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def parse_args():
    parser = runtime.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--micro-batch-size", type=runtime.positive_int, default=16, help="per rank and step (16)")
    add("--seq-len", type=runtime.positive_int, default=128, help="tokens per sequence (128)")
    add("--bucket-cap-mb", type=runtime.positive_float, default=0.5, help="MiB per bucket (0.5)")
    add("--link", type=runtime.link_rate, default=0, help="emulate a link: 100mbit, 1gbit (none)")
    add("--max-steps", type=runtime.positive_int, default=6, help="timed steps of each way (6)")
    return parser.parse_args()


def check_each(variants, batch, expected, results):
    """Take one counted step of each way; return rows of what it sent, and add the checks."""
    rows, total = [], expected.nbytes
    for name, (model, after_backward) in list(variants.items())[1:]:
        dist.barrier()
        before = measure.bytes_written()
        with measure.CollectiveCounter() as counter:
            step(model, after_backward, batch)
        sent = measure.bytes_written() - before if before is not None else None
        calls = counter.calls["allreduce_"]
        error = (gradient_of(model) - expected).abs().max() / expected.abs().max()
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        source = f"DDP paper, section 3.2.{name[0]}" if name[0] != "4" else "one process"
        results.check(f"{name}: gradient error", error.item(), 0, 1e-5, source)
        handed = counter.bytes["allreduce_"]
        results.check(f"{name}: bytes handed over", handed, total, 0, "one gradient per weight")
        if sent is not None:
            ring, source = round(wire_bytes(total)), "2(N-1)/N of them, and gloo's headers"
            headers = 1000 * (dist.get_world_size() - 1) * calls  # up to 1,000 bytes for each step
            results.check(f"{name}: bytes sent", sent, ring, headers, source)
        rows.append([name, str(calls), f"{handed:,}"])
        results.metrics[f"collectives_{name[0]}"] = calls
    return rows


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        console, link = Console(world.is_rank0), Link(args.link)
        results = measure.Results("01-ddp-basics/ddp_from_scratch.py", args, world, device)
        config, bucket_bytes = PRESETS["tiny"], int(args.bucket_cap_mb * MIB)
        if args.seq_len > config.max_seq_len:
            raise runtime.UsageError(f"--seq-len must be at most {config.max_seq_len}")
        global_batch = args.micro_batch_size * world.world_size
        text = data.Sequences(data.load_text(), args.seq_len, global_batch)
        output = measure.claim_output_dir(args, world)

        def build():
            runtime.seed_everything(args.seed)
            return Transformer(config).to(device)

        def batch_of(rank):
            first = rank * args.micro_batch_size
            items = [text[first + i] for i in range(args.micro_batch_size)]
            return [torch.stack(part).to(device) for part in zip(*items, strict=True)]

        alone = build()  # one process: the mean over all ranks' micro-batches
        for rank in range(world.world_size):
            (loss_of(alone, batch_of(rank)) / world.world_size).backward()
        expected, batch = gradient_of(alone), batch_of(world.rank)
        variants = variants_of(build, bucket_bytes, link)
        names, timings = list(variants), {name: [] for name in variants}
        console.header(results, f"{config.num_parameters():,} weights, {expected.nbytes:,} bytes")
        for name in names:  # DDP settles its buckets in its first step
            step(*variants[name], batch)
        rows = check_each(variants, batch, expected, results)

        for _ in console.progress(range(args.max_steps), "timing"):
            for name in names:  # in turn: a noisy moment meets all of them
                dist.barrier()
                timings[name].append(step(*variants[name], batch))
        forward, compute = (statistics.median(ms) for ms in zip(*timings[names[0]], strict=True))
        sending = wire_bytes(expected.nbytes) / args.link * 1e3 if args.link else 0.0
        for row in rows:
            median = statistics.median(whole for _, whole in timings[row[0]])
            one_after_another, overlapped = compute + sending, max(compute - forward, sending)
            ideal = one_after_another if row[0][0] in "12" else forward + overlapped
            row += [f"{median:.1f} ms", f"{ideal:.1f} ms" if sending else "-"]
            results.metrics[f"step_time_ms_{row[0][0]}"] = median
        results.metrics |= {"forward_ms": forward, "compute_ms": compute, "sending_ms": sending}
        console.table(rows, ("way", "all-reduces", "bytes handed over", "step", "ideal"))
        console.say(f"computing takes {compute:.1f} ms, of it {forward:.1f} ms forward")
        if sending:
            console.say(
                f"sending takes {sending:.1f} ms: the sum is {compute + sending:.1f} ms, "
                f"max(computing, sending) {max(compute, sending):.1f} ms"
            )
        started = variants[names[3]][1].__self__.started_in_backward
        buckets = len(buckets_of(alone, bucket_bytes))
        name = "3 buckets, overlapped: all-reduces started during backward"
        results.check(name, started, buckets, 0, "DDP paper, section 3.2.3")
        if output and world.is_rank0:
            results.write(output)
        return console.verdict(results, "every step gives the gradient of one process")


if __name__ == "__main__":
    runtime.run(main)
