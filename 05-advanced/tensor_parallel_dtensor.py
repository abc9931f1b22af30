"""Tensor and sequence parallelism by a plan: PyTorch's parallelize_module and DTensor.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/tensor_parallel_dtensor.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/tensor_parallel_dtensor.py

The model is not rewritten: a plan says of each module how it is cut. Look for: the losses of one
process with every plan; collectives that a plan costs beyond those of tensor_parallel.py. For 4
ranks add `--num-kv-heads 4`.

Source: docs.pytorch.org, torch.distributed.tensor.parallel, and its tutorial Large Scale
Transformer model training with Tensor Parallel.
"""

import functools

import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from advanced_parts import tensor_job
from legacy_common import cli, runtime
from legacy_common.report import Report

WHOLE, TOKENS = Replicate(), Shard(1)  # of (B, T, D): all of it on each rank, T/tp of it


def plan_by_matrix():
    """Cut each matrix: columns where a rank computes its own, rows where the ranks' sum is due."""
    return {
        "embedding": RowwiseParallel(input_layouts=WHOLE),
        "blocks.*.attention.wq": ColwiseParallel(),
        "blocks.*.attention.wk": ColwiseParallel(),
        "blocks.*.attention.wv": ColwiseParallel(),
        "blocks.*.attention.wo": RowwiseParallel(),
        "blocks.*.gate": ColwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(use_local_output=False),  # logits stay cut, for loss_parallel
    }


def plan_by_input():
    """Cut as before, and make one DTensor of the input that several matrices share."""
    return plan_by_matrix() | {
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(WHOLE, None, None), desired_input_layouts=(WHOLE, None, None)
        ),
        "blocks.*.ffn_norm": PrepareModuleOutput(
            output_layouts=WHOLE, desired_output_layouts=WHOLE, use_local_output=False
        ),
    }


def plan_of_sequence():
    """Cut as before, and between the matrices cut the tokens."""
    return plan_by_matrix() | {
        "embedding": RowwiseParallel(input_layouts=WHOLE, output_layouts=TOKENS),
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(TOKENS, None, None), desired_input_layouts=(WHOLE, None, None)
        ),
        "blocks.*.attention.wo": RowwiseParallel(output_layouts=TOKENS),
        "blocks.*.ffn_norm": SequenceParallel(),
        "blocks.*.gate": ColwiseParallel(input_layouts=TOKENS),
        "blocks.*.up": ColwiseParallel(input_layouts=TOKENS),
        "blocks.*.down": RowwiseParallel(output_layouts=TOKENS),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=TOKENS, use_local_output=False),
    }


# Name: the plan, whether it cuts tokens, how many f a block calls.
PLANS = {
    "by matrix": (plan_by_matrix, False, 5),  # wq, wk, wv, gate and up each make a DTensor
    "by input": (plan_by_input, False, 2),  # as by hand
    "of sequence": (plan_of_sequence, True, 3),  # attention once, gate and up each
}


def compute_gradient(model, batch):
    """Take forward and backward; return the loss, the same on every rank."""
    inputs, targets = batch
    with loss_parallel():  # both: backward needs it, too
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
    place_gradients(model)
    return loss.detach().full_tensor()


def place_gradients(model):
    """Sum the norms' gradients over the ranks; cut the embedding's, which each rank has whole.

    The optimizer would do so by itself, in each of its operations on a gradient again.
    """
    for weight in model.parameters():
        if isinstance(weight, DTensor):
            weight.grad = weight.grad.redistribute(placements=weight.placements)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    tensor_job.add_flags(parser)
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("05-advanced/tensor_parallel_dtensor.py", args, world, device)
        config = tensor_job.config_of(args, world.world_size)
        batches = tensor_job.batches_of(args, device)
        report.start(f"{config.num_parameters():,} weights, tp = {world.world_size}")
        mesh = init_device_mesh(device.type, (world.world_size,), mesh_dim_names=("tp",))
        whole = tensor_job.whole_model(args, config, device)
        alone = tensor_job.train_alone(args, whole, batches)
        tokens = args.batch_size * args.seq_len
        step_of = functools.partial(tensor_job.traffic_of_step, config, tokens)
        by_hand = {"by hand": step_of(False), "by hand, sequence": step_of(True)}
        rows = [tensor_job.row(*way) for way in by_hand.items()]
        for name, (plan, sequence_parallel, fs) in PLANS.items():
            model = tensor_job.whole_model(args, config, device)

            parallelize_module(model, mesh["tp"], plan())

            expected = step_of(sequence_parallel, fs, norms_apart=True)
            if world.world_size == 1:  # DTensor leaves out what a mesh of one does not need
                expected = tensor_job.loss(tokens)
            sent = tensor_job.check_model(
                report, name, model, compute_gradient, batches, alone, expected
            )
            rows.append(tensor_job.row(f"plan {name}", sent))
        report.table(rows, ("a step", *tensor_job.HEADERS))
        return report.finish(f"the losses of {args.max_steps} steps are those of one process")


if __name__ == "__main__":
    cli.run(main)
