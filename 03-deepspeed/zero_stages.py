"""Train one model in ZeRO's stages 0 to 3: what does each rank hold, and send?

    CPU   torchrun --standalone --nproc-per-node=2 03-deepspeed/zero_stages.py
    GPU   torchrun --standalone --nproc-per-node=gpu 03-deepspeed/zero_stages.py

Look for: bytes per weight that fall from 16 to 16/N in bf16; stages 2 and 3 that send
more with every micro-batch; in float32, the losses of one process in every stage.

Sources: Rajbhandari et al., ZeRO (SC 2020), sections 3, 5 and 7; Micikevicius et al.,
Mixed Precision Training (ICLR 2018), section 3.1: the float32 copy of the weights.
"""

from collections import Counter
from itertools import product

import torch
import torch.distributed as dist

from dist_common import cli, runtime
from dist_common.check import CollectiveCounter
from dist_common.deepspeed import import_deepspeed, start_engine
from dist_common.model import PRESETS, build_transformer
from dist_common.report import Report
from zero_from_scratch import (
    MAX_GRAD_NORM,
    add_batch_flags,
    bytes_of,
    live_tensors,
    load_batches,
    loss_of,
    make_adamw,
    micro_batches_of,
    train_alone,
)

WIDTHS = {"float32": 4, "bfloat16": 2}  # bytes of a weight and of its gradient
KINDS = ("weights", "optimizer state", "gradients")
# Of losses near 5, then of bytes per weight. Gradients include DeepSpeed's buffers, and
# in stage 2 whole gradients of weights that two ranks share.
TOLERANCES = {
    "loss": 2e-5,
    "weights": 0.05,
    "optimizer state": 0.05,
    "gradients": 0.5,
    "bytes sent": 0.1,
}


def make_config(stage, precision, args, dim):
    """Return a DeepSpeed config. A JSON file with the same content works too."""
    zero = {
        "stage": stage,
        "reduce_bucket_size": dim * dim // 4,  # elements: a small buffer
        "stage3_prefetch_bucket_size": dim * dim,
        "stage3_param_persistence_threshold": 10 * dim,  # smaller weights stay whole
    }
    if stage in (1, 2):  # reduce each gradient to its owner, instead of all-reducing
        zero["use_multi_rank_bucket_allreduce"] = False
    if stage == 3:  # gather in forward and again in backward; see the page
        zero["stage3_max_live_parameters"] = 0
        zero["stage3_max_reuse_distance"] = 0
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.grad_accum_steps,
        "gradient_clipping": MAX_GRAD_NORM,
        "bf16": {"enabled": precision == "bfloat16"},
        "zero_optimization": zero,
    }


def train_step(engine, micro_batches):
    """Take one step; return this rank's mean loss."""
    losses = []
    for batch in micro_batches:
        loss = loss_of(engine, batch)
        engine.backward(loss)  # divides by the number of micro-batches
        engine.step()  # updates the weights after the last micro-batch of a step
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def measure(config, engine_config, deepspeed, batches, args, run):
    """Train with an engine; return losses, and bytes per weight.

    Returns: mean losses of all ranks, (steps,); bytes of each of KINDS in the middle of
    a step, and bytes sent in a step, (4,).
    """
    before = bytes_by_device(live_tensors())
    model = build_transformer(config, args.seed, run.device)
    optimizer = make_adamw(model.parameters())
    engine = start_engine(deepspeed, model, optimizer, engine_config, args.timeout)
    losses = []
    for batch in batches:
        with CollectiveCounter() as counter:
            losses.append(train_step(engine, micro_batches_of(batch, args, run)))
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    first, *_ = micro_batches_of(batches[0], args, run)
    engine.backward(loss_of(engine, first))  # one more gradient
    held = [kind.total() for kind in bytes_by_kind(engine, before)]
    sizes = torch.tensor([*held, sum(counter.bytes_sent.values())])
    return losses.cpu() / run.world_size, sizes / config.num_parameters()


def bytes_by_device(tensors):
    """Return the bytes of tensors by type of device."""
    tensors = list(tensors)
    held = Counter()
    for device in {tensor.device.type for tensor in tensors}:
        held[device] = bytes_of(t for t in tensors if t.device.type == device)
    return held


def bytes_by_kind(engine, before):
    """Return the bytes of weights, of optimizer state and of the rest, by device.

    The rest is gradients and buffers. `before`: the bytes before the model was built.
    """
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):  # PyTorch's, inside DeepSpeed's
        optimizer = optimizer.optimizer
    # In stage 3, a weight's `ds_tensor` is this rank's part.
    weights = [getattr(weight, "ds_tensor", weight) for weight in engine.parameters()]
    state = list(optimizer.state)  # the float32 weights that Adam updates
    for moments in optimizer.state.values():
        state += moments.values()
    weight_bytes = bytes_by_device(weights)
    both = bytes_by_device(weights + state)
    live = bytes_by_device(live_tensors())
    return weight_bytes, both - weight_bytes, live - before - both


def expected_bytes(stage, width, ranks, micro_batches):
    """Return bytes per weight: of each of KINDS in the middle of a step, and sent.

    Source: ZeRO, sections 5 and 7 (there with one micro-batch).
    """
    weights = width / ranks if stage == 3 else width
    # Stage 1 reduces its gradients in the last micro-batch of a step.
    keeps_whole = stage == 0 or (stage == 1 and micro_batches > 1)
    gradients = width if keeps_whole else width / ranks
    copies = 2 if stage == 0 and width == 4 else 3  # moments, and a float32 weight
    state = 4 * copies / (1 if stage == 0 else ranks)
    passes = (2, 2, micro_batches + 1, 3 * micro_batches)[stage]  # over all weights
    sent = passes * width * (ranks - 1) / ranks
    return weights, state, gradients, sent


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add_batch_flags(parser)
    parser.add_argument("--local_rank", help="no effect: DeepSpeed's launcher sets it")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        report = Report("03-deepspeed/zero_stages.py", args, run)
        config = PRESETS["tiny"]
        deepspeed = import_deepspeed(run, make_config(0, "float32", args, config.dim))
        batches = load_batches(args, run)
        model = build_transformer(config, args.seed, run.device)
        losses_alone, _ = train_alone(model, batches)
        del model
        rows = []
        errors = {name: [] for name in TOLERANCES}
        for precision, stage in product(WIDTHS, range(4)):
            engine_config = make_config(stage, precision, args, config.dim)
            losses, measured = measure(
                config, engine_config, deepspeed, batches, args, run
            )
            if precision == "float32":
                errors["loss"].append((losses - losses_alone).abs().max())
            expected = torch.tensor(
                expected_bytes(
                    stage, WIDTHS[precision], run.world_size, args.grad_accum_steps
                )
            )
            for name, error in zip(
                (*KINDS, "bytes sent"), (measured - expected).abs(), strict=True
            ):
                errors[name].append(error)
            numbers = (*measured[:3], measured[:3].sum(), expected[:3].sum())
            numbers += (measured[3], expected[3])
            cells = [f"{number:.2f}" for number in numbers]
            rows.append((f"stage {stage}, {precision}", *cells))
        run.print0("held in the middle of a step, and sent in a step: bytes per weight")
        report.table(rows, ("", *KINDS, "held", "formula", "sent", "formula"))
        for name, tolerance in TOLERANCES.items():
            largest = torch.stack(errors[name]).max().item()
            report.check(f"largest error: {name}", largest, 0, tolerance)
        return report.finish(f"loss {losses_alone[-1]:.4f} in one process, at the end")


if __name__ == "__main__":
    cli.run(main)
