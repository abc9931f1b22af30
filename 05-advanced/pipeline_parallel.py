"""Train one step through a pipeline of ranks, by five schedules, each equal to one process.

    CPU   torchrun --standalone --nproc-per-node=4 05-advanced/pipeline_parallel.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/pipeline_parallel.py

A rank holds some layers, sends activations to the next rank and gradients back, and carries out its
instructions (pipeline_schedules.py) in order. Each is stretched to a known time, --sleep-ms, since
ranks may outnumber cores. Look for: the same loss and gradient in each schedule; the bubble.

Sources: as pipeline_schedules.py; docs.pytorch.org, torch.distributed.pipelining.
"""

import copy
import dataclasses
import time
from collections import deque

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from advanced_parts import pipeline_parallel as part
from legacy_common import cli, data, models, runtime
from legacy_common.lab.traffic import TrafficCounter
from legacy_common.report import Report
from pipeline_schedules import SCHEDULES, Span, build, durations, needs


class Stage(nn.Module):
    """Some blocks of a Transformer; the first stage has the embedding too, the last the head."""

    def __init__(self, model, index, num_stages):
        super().__init__()
        self.config = model.config
        per_stage = self.config.num_layers // num_stages
        self.embedding = model.embedding if index == 0 else None
        self.blocks = model.blocks[index * per_stage : (index + 1) * per_stage]
        self.norm = model.norm if index == num_stages - 1 else None
        self.head = model.head if index == num_stages - 1 else None

    def forward(self, x):
        """Shapes: tokens (B, T) or activations (B, T, D) in, (B, T, D) or logits (B, T, V) out."""
        config = self.config
        places = torch.arange(x.shape[1], device=x.device)
        cos, sin = models.rotary_tables(places, config.dim // config.num_heads, config.rope_theta)
        x = self.embedding(x) if self.embedding is not None else x
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x)) if self.head is not None else x


def stages_of(model, rank, p, v):
    """Return the stages of this rank, by index, with weights of their own."""
    model = copy.deepcopy(model)  # a real job builds only its own stages: hybrid_parallelism.py
    return {index: Stage(model, index, p * v) for index in range(rank, p * v, p)}


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def open_channels(p):
    """Return a process group for each (source, destination) of a ring of p ranks.

    A group per direction: NCCL carries out the sends and receives of a group one after the other.
    In one group for both directions two ranks that send to each other would both wait.
    """
    pairs = {pair for r in range(p) for pair in ((r, (r + 1) % p), ((r + 1) % p, r))}
    return {pair: dist.new_group(list(pair)) for pair in sorted(pairs) if pair[0] != pair[1]}


class Mail:
    """Send results without waiting; receive them in the order in which each rank sends them."""

    def __init__(self, schedule, channels, shape, device):
        self.rank = dist.get_rank()
        self.p = len(schedule)
        self.channels = channels
        self.shape = shape
        self.device = device
        self.last_stage = max(i.stage for rank in schedule for i in rank)
        self.expected = [
            deque(i for i in rank if self.goes_to(i) == self.rank) for rank in schedule
        ]
        self.arriving = {}
        self.sending = []

    def goes_to(self, instruction):
        """Return the rank whose stage needs the result; None if it stays on this stage."""
        step = {"F": 1, "B": -1, "I": -1, "W": 0}[instruction.kind]
        stage = instruction.stage + step
        return stage % self.p if step and 0 <= stage <= self.last_stage else None

    def send(self, instruction, result):
        to = self.goes_to(instruction)
        if to == self.rank:  # one rank that holds both stages
            self.arriving[instruction] = (result, None)
        elif to is not None:
            work = dist.isend(result, to, self.channels[self.rank, to])
            self.sending.append((work, result))  # kept until it is sent

    def wait_for(self, instruction):
        """Return what a neighbouring stage has to send before this instruction can start."""
        for other in needs(instruction, self.last_stage):
            if other.stage != instruction.stage:
                return self.receive(other)

    def receive(self, instruction):
        """Wait for the result of an instruction of another stage. Shape: (B, T, D)."""
        source = instruction.stage % self.p
        while instruction not in self.arriving:
            # A message has no name: the first one received is the first one that was sent.
            first = self.expected[source].popleft()
            buffer = torch.empty(self.shape, device=self.device)
            work = dist.irecv(buffer, source, self.channels[source, self.rank])
            self.arriving[first] = (buffer, work)
        buffer, work = self.arriving.pop(instruction)
        if work:
            work.wait()
        return buffer

    def finish(self):
        for work, _ in self.sending:
            work.wait()


class Pipeline:
    """One rank: its stages, a step's micro-batches, and what their forwards left behind."""

    def __init__(self, stages, mail, inputs, targets):
        self.stages = stages  # {index: Stage}
        self.mail = mail  # mail.last_stage is the model's last stage, on whichever rank
        self.inputs = inputs  # a tensor (B, T) for each micro-batch
        self.targets = targets
        self.kept = {}
        self.most_kept = 0  # the largest length that kept has had
        self.losses = []  # numbers, whose sum is the loss of the step

    def F(self, stage, k, activations):
        """Forward of a micro-batch: keep what backward needs, return what the next stage needs.

        Of stage 0 activations is None: its input is in self.inputs.
        """
        # lab: hole step
        first, last = stage == 0, stage == self.mail.last_stage
        x = self.inputs[k] if first else activations.requires_grad_()
        out = self.stages[stage](x)
        if last:  # the step's loss is the mean over micro-batches
            out = loss_of(out, self.targets[k]) / len(self.targets)
            self.losses.append(out.item())
        self.kept[stage, k] = (x, out)
        self.most_kept = max(self.most_kept, len(self.kept))
        return out.detach()
        # lab: end

    def B(self, stage, k, gradient):
        """Backward of a micro-batch: return the gradient that the stage before needs.

        Of the last stage gradient is None: its output is a loss.
        """
        # lab: hole step
        x, out = self.kept.pop((stage, k))
        out.backward(gradient)
        return x.grad
        # lab: end

    def I(self, stage, k, gradient):  # noqa: E743  PyTorch's letter
        x, out = self.kept[stage, k]
        self.kept[stage, k] = (x, out, gradient)
        if stage > 0:  # tokens have no gradient
            return torch.autograd.grad(out, x, gradient, retain_graph=True)[0]

    def W(self, stage, k, _):
        x, out, gradient = self.kept.pop((stage, k))
        weights = list(self.stages[stage].parameters())
        for weight, more in zip(weights, torch.autograd.grad(out, weights, gradient), strict=True):
            weight.grad = more if weight.grad is None else weight.grad + more

    def run(self, instructions, seconds):
        """Carry out the instructions in order; return when each one ran, in s."""
        spans = []
        dist.barrier()
        zero = time.perf_counter()
        for instruction in instructions:
            arrived = self.mail.wait_for(instruction)  # activations, or their gradient
            start = time.perf_counter()

            work = getattr(self, instruction.kind)
            result = work(instruction.stage, instruction.micro_batch, arrived)

            stretch(start + seconds[instruction.kind], self.mail.device)
            end = time.perf_counter()
            self.mail.send(instruction, result)
            spans.append(Span(instruction, start - zero, end - zero))
        self.mail.finish()
        return spans


def stretch(end, device):
    """Wait until a moment, so that an instruction takes a known time on a busy machine."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    time.sleep(max(0.0, end - time.perf_counter()))


def run_ours(name, schedule, model, batches, channels, args):
    """Carry out one step of a schedule; return the pipeline and when each instruction ran."""
    rank = dist.get_rank()
    p = len(schedule)
    v = args.virtual_stages if name == "interleaved" else 1
    shape = (args.micro_batch_size, args.seq_len, model.config.dim)
    mail = Mail(schedule, channels, shape, batches[0].device)
    inputs, targets = (batch.chunk(args.micro_batches) for batch in batches)
    pipeline = Pipeline(stages_of(model, rank, p, v), mail, inputs, targets)
    seconds = {kind: args.sleep_ms / 1e3 * t for kind, t in durations(name, v).items()}
    return pipeline, pipeline.run(schedule[rank], seconds)


TORCH = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb-h1": pipelining.ScheduleInterleavedZeroBubble,
}


def run_torch(name, model, batches, world_size, args):
    """Do the same step by torch.distributed.pipelining; return this rank's stages and the loss."""
    several = name in ("interleaved", "zb-h1")  # its zero-bubble schedule is interleaved too
    v = args.virtual_stages if several else 1
    stages = stages_of(model, dist.get_rank(), world_size, v)
    last = world_size * v - 1
    inputs, targets = batches

    wrapped = [PipelineStage(s, i, last + 1, inputs.device) for i, s in stages.items()]
    schedule = TORCH[name](
        wrapped if several else wrapped[0], args.micro_batches, loss_fn=loss_of, scale_grads=True
    )  # divides each gradient by the number of micro-batches
    losses = []
    first_rank = (inputs,) if 0 in stages else ()
    schedule.step(*first_rank, target=targets if last in stages else None, losses=losses)
    return stages, sum(loss.item() for loss in losses) / args.micro_batches


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    names = list(SCHEDULES)
    add("-m", "--micro-batches", type=cli.positive_int, default=8, help="per step (8)")
    add("--micro-batch-size", type=cli.positive_int, default=2, help="sequences in each (2)")
    add("--seq-len", type=cli.positive_int, default=32, help="tokens per sequence (32)")
    add("--num-layers", type=cli.positive_int, default=8, help="of the tiny model (8)")
    add("-v", "--virtual-stages", type=cli.positive_int, default=2,
        help="stages per rank of `interleaved` (2)")  # fmt: skip
    add("--schedule", choices=names, nargs="+", help="one or more: " + ", ".join(names) + " (all)")
    add("--sleep-ms", type=cli.whole_number, default=20,
        help="time that a forward takes at least, in ms; a backward twice that (20)")  # fmt: skip
    return parser.parse_args()


def build_schedules(args, p):
    """Return the schedules asked for. Raises: UsageError for numbers that do not fit p ranks."""
    names = args.schedule or list(SCHEDULES)
    v = args.virtual_stages
    needed = p * v if {"interleaved", "zb-h1"} & set(names) else p
    if args.num_layers % needed:
        stages = f"{needed} stages" + f" ({p} ranks x {v} virtual stages)" * (needed > p)
        raise cli.UsageError(f"--num-layers {args.num_layers} is no multiple of {stages}")
    return {name: build(name, p, args.micro_batches, v) for name in names}


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        p = world.world_size
        schedules = build_schedules(args, p)
        config = models.preset("tiny", args.seq_len)
        config = dataclasses.replace(config, num_layers=args.num_layers)
        rows = args.micro_batches * args.micro_batch_size
        text = data.Sequences(data.load_text(), args.seq_len, rows)
        report = Report("05-advanced/pipeline_parallel.py", args, world, device)
        report.start(f"{config.num_parameters():,} weights in {args.num_layers} layers, "
                     f"{args.micro_batches} micro-batches")  # fmt: skip
        runtime.seed_everything(args.seed)
        model = models.Transformer(config).to(device)
        batches = next(data.batches_of(text, 1, rows, 0, rows, device))
        alone = copy.deepcopy(model)  # one process, which takes the whole batch at once
        alone_loss = loss_of(alone(batches[0]), batches[1])
        alone_loss.backward()

        def check_same(title, stages, loss):
            expected = {index: Stage(alone, index, p * len(stages)) for index in stages}
            part.check_same(report, title, stages, loss, expected, alone_loss.item())

        channels = open_channels(p)
        runs = {}
        for name, schedule in schedules.items():
            with TrafficCounter() as counter:
                pipeline, spans = run_ours(name, schedule, model, batches, channels, args)
            check_same(name, pipeline.stages, sum(pipeline.losses))
            runs[name] = part.check_run(report, name, pipeline, spans, counter)
            if name in TORCH and not part.torch_refuses(name, p, args.micro_batches):
                stages, loss = run_torch(name, model, batches, p, args)
                check_same(f"{name} by {TORCH[name].__name__}", stages, loss)
        part.finish(report, runs)
        return report.finish("each schedule gives the loss and gradient of one process")


if __name__ == "__main__":
    cli.run(main)
