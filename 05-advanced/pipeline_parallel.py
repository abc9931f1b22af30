"""Train one step through a pipeline of ranks, by five schedules, each equal to one process.

    CPU   torchrun --standalone --nproc-per-node=4 05-advanced/pipeline_parallel.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/pipeline_parallel.py

A rank holds some layers, sends activations to the next rank and gradients back, and carries out its
instructions (pp_schedules.py) in order. Each instruction is stretched to a known time, --sleep-ms,
since ranks may outnumber cores. Look for: the same loss and gradient in each schedule; the bubble.

Sources: as pipeline_schedules.py; docs.pytorch.org, torch.distributed.pipelining.
"""

import dataclasses
import time

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

import pp_schedules
from dist_common import cli, data, models, runtime
from dist_common.measure import CollectiveCounter
from dist_common.report import Report
from pp_formulas import durations
from pp_mail import Mail, open_channels
from pp_proofs import Reference, check_run, check_same, draw_runs, table_of_bubbles, torch_refuses
from pp_schedules import Span
from pp_stages import loss_of, stages_of


class Pipeline:
    """One rank: its stages, a step's micro-batches, and what their forwards left behind."""

    def __init__(self, stages, mail, inputs, targets):
        self.stages = stages  # {index: Stage}
        self.mail = mail
        self.inputs = inputs  # a tensor (B, T) for each micro-batch
        self.targets = targets
        self.kept = {}
        self.most_kept = 0
        self.losses = []

    def F(self, stage, k, activations):
        first, last = stage == 0, stage == self.mail.last_stage
        x = self.inputs[k] if first else activations.requires_grad_()
        out = self.stages[stage](x)
        if last:  # the step's loss is the mean over micro-batches
            out = loss_of(out, self.targets[k]) / len(self.targets)
            self.losses.append(out.item())
        self.kept[stage, k] = (x, out)
        self.most_kept = max(self.most_kept, len(self.kept))
        return out.detach()

    def B(self, stage, k, gradient):
        x, out = self.kept.pop((stage, k))
        out.backward(gradient)
        return x.grad

    def I(self, stage, k, gradient):  # noqa: E743  PyTorch's letter
        x, out = self.kept[stage, k]
        self.kept[stage, k] = (x, out, gradient)
        if stage > 0:  # tokens have no gradient
            return torch.autograd.grad(out, x, gradient, retain_graph=True)[0]

    def W(self, stage, k, _):
        x, out, gradient = self.kept.pop((stage, k))
        weights = list(self.stages[stage].parameters())
        for weight, part in zip(weights, torch.autograd.grad(out, weights, gradient), strict=True):
            weight.grad = part if weight.grad is None else weight.grad + part

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


TORCH = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B,
         "interleaved": pipelining.ScheduleInterleaved1F1B,
         "zb-h1": pipelining.ScheduleInterleavedZeroBubble}  # fmt: skip


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
    names = list(pp_schedules.SCHEDULES)
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
    names = args.schedule or list(pp_schedules.SCHEDULES)
    v = args.virtual_stages
    needed = p * v if {"interleaved", "zb-h1"} & set(names) else p
    if args.num_layers % needed:
        stages = f"{needed} stages" + f" ({p} ranks x {v} virtual stages)" * (needed > p)
        raise cli.UsageError(f"--num-layers {args.num_layers} is no multiple of {stages}")
    return {name: pp_schedules.build(name, p, args.micro_batches, v) for name in names}


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
        reference = Reference.of(model, loss_of, batches)
        channels = open_channels(p)
        runs = {}
        for name, schedule in schedules.items():
            with CollectiveCounter() as counter:
                pipeline, spans = run_ours(name, schedule, model, batches, channels, args)
            runs[name] = check_run(report, name, pipeline, spans, counter, reference)
            if name in TORCH and not torch_refuses(name, p, args.micro_batches):
                stages, loss = run_torch(name, model, batches, p, args)
                title = f"{name} by {TORCH[name].__name__}"
                check_same(report, title, stages, loss, reference)
        table_of_bubbles(report, runs)
        draw_runs(report, runs)
        return report.finish("each schedule gives the loss and gradient of one process")


if __name__ == "__main__":
    cli.run(main)
