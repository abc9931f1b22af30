"""Tensor and sequence parallelism from a plan, with parallelize_module and DTensor.

    CPU  torchrun --standalone --nproc-per-node=2 05-advanced/tensor_parallel_dtensor.py
    GPU  torchrun --standalone --nproc-per-node=4 05-advanced/tensor_parallel_dtensor.py

The model does not change. A plan says how to divide each of its modules.

Look for: the losses of one process with both plans; as many bytes as by hand with the
first one, and more with the second.

Source: PyTorch's documentation, torch.distributed.tensor.parallel, and its tutorial
Large Scale Transformer model training with Tensor Parallel.
"""

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

import tensor_parallel as by_hand
from dist_common import cli, runtime
from dist_common.model import build_transformer
from dist_common.report import Report

WHOLE = Replicate()  # every rank has all of (B, T, D)
TOKENS = Shard(1)  # every rank has T/n tokens of (B, T, D)


def plan_tensor():
    """Divide each matrix by columns, or by rows if its input is divided already."""
    return {
        "embedding": RowwiseParallel(input_layouts=WHOLE),
        # One DTensor for the three matrices that read it.
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(WHOLE, None, None),
            desired_input_layouts=(WHOLE, None, None),
        ),
        "blocks.*.attention.wq": ColwiseParallel(),
        "blocks.*.attention.wk": ColwiseParallel(),
        "blocks.*.attention.wv": ColwiseParallel(),
        "blocks.*.attention.wo": RowwiseParallel(),
        # One DTensor for gate and up.
        "blocks.*.ffn_norm": PrepareModuleOutput(
            output_layouts=WHOLE, desired_output_layouts=WHOLE, use_local_output=False
        ),
        "blocks.*.gate": ColwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        # The logits stay divided, and a DTensor, for loss_parallel.
        "head": ColwiseParallel(use_local_output=False),
    }


def plan_sequence():
    """Divide the matrices in the same way, and the tokens between them."""
    return plan_tensor() | {
        "embedding": RowwiseParallel(input_layouts=WHOLE, output_layouts=TOKENS),
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(TOKENS, None, None),
            desired_input_layouts=(WHOLE, None, None),
        ),
        "blocks.*.attention.wo": RowwiseParallel(output_layouts=TOKENS),
        "blocks.*.ffn_norm": SequenceParallel(),
        "blocks.*.gate": ColwiseParallel(input_layouts=TOKENS),
        "blocks.*.up": ColwiseParallel(input_layouts=TOKENS),
        "blocks.*.down": RowwiseParallel(output_layouts=TOKENS),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=TOKENS, use_local_output=False),
    }


def compute_gradient(model, inputs, targets):
    """Run forward and backward; return the loss, which every rank has."""
    with loss_parallel():  # around backward as well
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
    place_gradients(model)
    return loss.full_tensor()


def place_gradients(model):
    """Give each gradient the placement of its weight: norms are summed over the ranks.

    The optimizer would do so as well, but again in each of its operations.
    """
    for weight in model.parameters():
        if isinstance(weight, DTensor):
            weight.grad = weight.grad.redistribute(placements=weight.placements)


# The plan; how often a block makes a DTensor of a module's whole input, which is an f;
# the norms whose gradients are summed.
PLANS = {
    "tensor parallel": (plan_tensor, 2, 0),
    # Attention once, gate and up once each.
    "sequence parallel": (plan_sequence, 3, by_hand.NUM_NORMS),
}


def main():
    args = cli.ArgumentParser(__doc__).parse_args()
    with runtime.init(args.device, args.timeout) as run:
        by_hand.validate_ranks(run)
        report = Report("05-advanced/tensor_parallel_dtensor.py", args, run)
        batches = by_hand.load_batches(run.device)
        model = build_transformer(by_hand.CONFIG, args.seed, run.device)
        alone = by_hand.train(model, by_hand.compute_gradient_alone, batches)
        mesh = init_device_mesh(run.device.type, (run.world_size,))
        rows = []
        for name, (plan, num_f, num_norms) in PLANS.items():
            model = build_transformer(by_hand.CONFIG, args.seed, run.device)

            parallelize_module(model, mesh, plan())

            num_bytes = by_hand.bytes_of_step(num_f, num_norms)
            row = by_hand.compare(
                report, name, model, compute_gradient, batches, alone, num_bytes
            )
            rows.append(row)
        report.table(rows, by_hand.HEADERS)
        return report.finish("losses and gradient are those of one process")


if __name__ == "__main__":
    cli.run(main)
