"""Execute pipeline schedules on real ranks: each gives the gradient of one process.

    CPU   torchrun --standalone --nproc-per-node=4 05-advanced/pipeline_parallel.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/pipeline_parallel.py

A rank holds some blocks of the model. It executes its instructions of a schedule
(pipeline_schedules.py) in order, sends activations to the next rank and gradients back.
Look for: the same gradient from every schedule; the forwards that each rank keeps.

Sources: Narayanan et al., Megatron-LM on GPU Clusters (SC 2021), section 2.2; PyTorch's
documentation of torch.distributed, Point-to-point communication.
"""

import weakref
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import default_collate

from dist_common import cli, data, runtime
from dist_common.check import CollectiveCounter
from dist_common.model import PRESETS, Transformer, build_transformer
from dist_common.report import Report
from pipeline_schedules import SCHEDULES, STAGES_PER_RANK, build, peak_activations

SEQ_LEN = 32  # T
MICRO_BATCH = 2  # B, sequences
DIM = 128  # D, of the preset tiny
TOLERANCE = 1e-5  # relative: float32 sums in another order differ in the last bits
DIRECTIONS = {"F": 1, "B": -1, "I": -1, "W": 0}  # of the stage that needs the result


class TransformerStage(nn.Module):
    """Consecutive blocks; the first stage also has the embedding, the last the head.

    Shapes: tokens (B, T) or activations (B, T, D) -> activations or logits (B, T, V).
    """

    forward = Transformer.forward  # nn.Identity stands for a missing embedding or head
    positions = None

    def __init__(self, model, index, num_stages):
        super().__init__()
        self.config = model.config
        size = len(model.blocks) // num_stages
        is_last = index == num_stages - 1
        self.embedding = model.embedding if index == 0 else nn.Identity()
        self.blocks = model.blocks[index * size : (index + 1) * size]
        self.norm = model.norm if is_last else nn.Identity()
        self.head = model.head if is_last else nn.Identity()


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Pipeline:
    """A rank's stages, and the activations that their forwards keep for backward."""

    def __init__(self, stages, last_stage, inputs, targets):
        self.stages = stages  # of this rank: {index: stage}
        self.last_stage = last_stage  # of the model, on whichever rank
        self.inputs = inputs  # a tensor (B, T) for each micro-batch
        self.targets = targets
        self.kept = {}  # by stage and micro-batch
        self.losses = []  # numbers; their sum is the loss of the step

    def forward(self, stage, k, activations):
        """Return the activations that the next stage needs; keep input and output.

        Stage 0 gets None and reads micro-batch k of the inputs.
        """
        # lab: hole step
        x = self.inputs[k] if stage == 0 else activations.requires_grad_()
        out = self.stages[stage](x)
        if stage == self.last_stage:  # the step's loss is the mean over micro-batches
            out = loss_of(out, self.targets[k]) / len(self.targets)
            self.losses.append(out.item())
        self.kept[stage, k] = (x, out)
        return out.detach()
        # lab: end

    def backward(self, stage, k, gradient):
        """Return the gradient that the stage before needs.

        The last stage gets None: its output is a loss.
        """
        # lab: hole step
        x, out = self.kept.pop((stage, k))
        out.backward(gradient)
        return x.grad
        # lab: end

    def backward_input(self, stage, k, gradient):
        """Return the gradient that the stage before needs, and compute no other."""
        x, out = self.kept[stage, k]
        self.kept[stage, k] = (x, out, gradient)
        if stage > 0:  # tokens have no gradient
            return torch.autograd.grad(out, x, gradient, retain_graph=True)[0]

    def backward_weights(self, stage, k, _):
        """Add up the gradients of the weights."""
        _, out, gradient = self.kept.pop((stage, k))
        out.backward(gradient, inputs=list(self.stages[stage].parameters()))

    def execute(self, instruction, received):
        method = {
            "F": self.forward,
            "B": self.backward,
            "I": self.backward_input,
            "W": self.backward_weights,
        }[instruction.kind]
        return method(instruction.stage, instruction.micro_batch, received)


# Messages


def open_channels(p):
    """Return a process group per sender and direction.

    NCCL executes a group's messages one after the other. Two ranks that send to each
    other in one group would wait for each other.
    """
    return {
        (rank, direction): dist.new_group([rank, (rank + direction) % p])
        for rank in range(p)
        for direction in (1, -1)
        if p > 1
    }


class Messages:
    """Send results to neighboring stages and receive from them.

    A message has no name. Neighbours have to agree about the order of their messages.
    """

    def __init__(self, channels, last_stage, run):
        self.channels = channels
        self.last_stage = last_stage
        self.run = run
        self.sending = []

    def send(self, instruction, result):
        """Start to send a result to the stage that needs it, if there is one."""
        direction = DIRECTIONS[instruction.kind]
        if direction and 0 <= instruction.stage + direction <= self.last_stage:
            peer = (self.run.rank + direction) % self.run.world_size
            work = dist.isend(result, peer, self.channels[self.run.rank, direction])
            self.sending.append((work, result))  # keep it until it is sent

    def receive(self, instruction):
        """Wait for the result that an instruction needs. Shape: (B, T, D), or None."""
        direction = DIRECTIONS[instruction.kind]
        if direction and 0 <= instruction.stage - direction <= self.last_stage:
            peer = (self.run.rank - direction) % self.run.world_size
            buffer = torch.empty(MICRO_BATCH, SEQ_LEN, DIM, device=self.run.device)
            dist.recv(buffer, peer, self.channels[peer, direction])
            return buffer


# Measurement


class Activations:
    """Stands for the activations of a forward: all that autograd saves refers to it."""


def track_activations(alive):
    """Add an object to a weak set. It lives as long as autograd keeps this forward."""
    activations = Activations()
    alive.add(activations)
    return saved_tensors_hooks(
        lambda tensor: (activations, tensor.detach()), lambda pair: pair[1]
    )


def run_step(pipeline, instructions, messages):
    """Execute a rank's instructions in order; return the most forwards kept at once."""
    alive = weakref.WeakSet()
    most_alive = 0
    for instruction in instructions:
        received = messages.receive(instruction)
        with track_activations(alive):
            result = pipeline.execute(instruction, received)
        most_alive = max(most_alive, len(alive))
        messages.send(instruction, result)
    for work, _ in messages.sending:
        work.wait()
    return most_alive


def flat_gradient(model):
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def main():
    args = cli.ArgumentParser(__doc__).parse_args()
    with runtime.init(args.device, args.timeout) as run:
        report = Report("05-advanced/pipeline_parallel.py", args, run)
        p = run.world_size
        m = 2 * p
        text = data.Sequences(data.load_text(), SEQ_LEN)
        batch = default_collate([text[i] for i in range(m * MICRO_BATCH)])
        inputs, targets = (tokens.to(run.device) for tokens in batch)  # (m B, T)
        config = replace(PRESETS["tiny"], num_layers=2 * p)
        # A real job would build only the blocks of this rank.
        model = build_transformer(config, args.seed, run.device)
        loss_alone = loss_of(model(inputs), targets)  # one process, the whole batch
        loss_alone.backward()
        expected = flat_gradient(model)
        channels = open_channels(p)
        rows, loss_errors, errors = [], [], []
        total_sent = expected_sent = total_kept = expected_kept = 0
        for name in SCHEDULES:
            v = STAGES_PER_RANK.get(name, 1) if p > 1 else 1
            schedule = build(name, p, m, v)
            stages = {
                index: TransformerStage(model, index, p * v)
                for index in range(run.rank, p * v, p)
            }
            last_stage = p * v - 1
            model.zero_grad(set_to_none=False)
            pipeline = Pipeline(stages, last_stage, inputs.chunk(m), targets.chunk(m))
            messages = Messages(channels, last_stage, run)
            with CollectiveCounter() as counter:
                kept = run_step(pipeline, schedule[run.rank], messages)

            gradient = flat_gradient(model)  # 0 for the stages of other ranks
            dist.all_reduce(gradient)
            errors.append(((gradient - expected).norm() / expected.norm()).item())
            result = sum(pipeline.losses), kept, counter.bytes_sent["send"]
            loss, kept, sent = zip(*runtime.gather(result, run.cpu_group), strict=True)
            loss_errors.append(abs(sum(loss) / loss_alone.item() - 1))
            total_sent += sum(sent)
            expected_sent += 2 * last_stage * m * 4 * MICRO_BATCH * SEQ_LEN * DIM
            total_kept += sum(kept)
            expected_kept += sum(map(peak_activations, schedule))
            cells = f"{errors[-1]:.1e}", f"{sum(sent):,}", " ".join(map(str, kept))
            rows.append((name, *cells))
        headers = ("schedule", "gradient error", "bytes sent", "forwards kept")
        report.table(rows, headers)
        report.check("loss: largest relative error", max(loss_errors), 0, TOLERANCE)
        report.check(
            "gradient: largest relative error",
            torch.tensor(errors).max().item(),
            0,
            TOLERANCE,
        )
        report.check("bytes sent, all schedules", total_sent, expected_sent, 0)
        report.check("forwards kept, all schedules", total_kept, expected_kept, 0)
        return report.finish("each schedule gives the loss and gradient of one process")


if __name__ == "__main__":
    cli.run(main)
