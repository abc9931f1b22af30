"""Predict the memory of a sharded training step by formula, and measure one step.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_memory.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_memory.py \
              --preset 124m --seq-len 1024
    any   python 02-fsdp/fsdp_memory.py --preset llama3-8b --world-size 8 --seq-len 4096

Look for: the largest number of the table. With --world-size the script only predicts.

Sources: Rajbhandari et al., ZeRO (SC 2020), section 3; Korthikanti et al., Reducing
Activation Recomputation (2022), section 4.
"""

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from dist_common import cli, runtime
from dist_common.model import PRESETS, load_config
from dist_common.report import Report
from fsdp_transformer import build_mesh, build_model, summed_loss

BYTES = {"32-true": 4, "bf16-mixed": 2}  # of gathered weights and of activations


def predict(config, args, ranks, norm_keeps=2):
    """Return bytes per rank by kind, at the start and at the end of backward.

    norm_keeps: tensors that a norm keeps, its input and output; on a CPU 3.
    """
    D, L, V = config.dim, config.num_layers, config.vocab_size
    kv_dim = config.num_kv_heads * D // config.num_heads
    tokens = args.micro_batch_size * args.seq_len
    width = BYTES[args.precision]
    P = config.num_parameters()
    table = V * D  # the weights of the embedding, and of the head
    block = (P - D - table * (1 if config.tied_embeddings else 2)) // L
    unit = max(block, table)
    # Two norms, q, and attention's output twice; k and v; four of the feed-forward.
    per_block = (2 * norm_keeps + 3) * D + 2 * kv_dim + 4 * config.ffn_dim
    kept = D if args.activation_checkpointing == "full" else per_block
    return {
        "weights and moments": (12 * P // ranks, 12 * P // ranks),
        "gradients": (0, 4 * P // ranks),
        "whole units": (width * (table + D), 2 * width * unit),
        "gradient of a unit": (0, (width + 4) * unit),  # and its copy in float32
        "activations": (
            width * tokens * (L * kept + norm_keeps * D),
            width * tokens * (D + per_block),
        ),
        "logits": (12 * tokens * V, 0),  # float32: log-softmax and two gradients
    }


def measure_kept_bytes(model, tokens):
    """Return the bytes of tensors that forward keeps for backward, without weights."""
    kept = {}

    def note(tensor):
        weights = [w for w in model.parameters() if not isinstance(w, DTensor)]
        pointers = {weight.untyped_storage().data_ptr() for weight in weights}
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in pointers:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss = summed_loss(model, tokens[:, :-1], tokens[:, 1:])
    loss.backward()  # until now the tensors exist
    return sum(kept.values())


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="tiny", help="the model's shape (tiny)")
    add("--world-size", type=cli.positive_int, help="only predict for so many ranks")
    add("--seq-len", type=cli.positive_int, default=64, help="tokens (64)")
    add("--micro-batch-size", type=cli.positive_int, default=2, help="sequences (2)")
    add("--precision", choices=BYTES, default="32-true", help="(32-true)")
    add("--activation-checkpointing", choices=("none", "full"), default="none")
    parser.set_defaults(sharding="full", compile=False)
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        on_cpu = run.device.type == "cpu" and not args.world_size
        if on_cpu and args.precision == "bf16-mixed":
            raise cli.UsageError(
                "--precision bf16-mixed: give --world-size too, or a GPU"
            )
        config = load_config(args.preset, args.seq_len, 256)
        report = Report("02-fsdp/fsdp_memory.py", args, run)
        ranks = args.world_size or run.world_size
        predicted = predict(config, args, ranks, norm_keeps=3 if on_cpu else 2)
        totals = [sum(column) for column in zip(*predicted.values(), strict=True)]
        peak = max(totals) / 2**30
        rows = []
        for name, sizes in [*predicted.items(), ("sum", totals)]:
            rows.append((name, *(f"{size / 2**20:,.1f}" for size in sizes)))
        report.table(rows, ("MiB per rank", "start of backward", "end of backward"))
        report.metrics["predicted_peak_gib"] = peak
        if not args.world_size:
            model = build_model(config, args, build_mesh(args, run), run.device)
            shape = (args.micro_batch_size, args.seq_len + 1)
            tokens = torch.randint(config.vocab_size, shape, device=run.device)
            measured = measure_kept_bytes(model, tokens)
            # Of the three tensors of logits, forward keeps the log-softmax.
            formula = predicted["activations"][0] + predicted["logits"][0] // 3
            # The formula leaves out small tensors, such as token numbers.
            report.check("bytes kept for backward", measured, formula, formula // 50)
        return report.finish(f"{peak:.2f} GiB at the peak of each of {ranks} ranks")


if __name__ == "__main__":
    cli.run(main)
