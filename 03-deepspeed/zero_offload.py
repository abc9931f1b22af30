"""Move optimizer state and weights to host memory or a disk: where are the bytes?

    CPU   torchrun --standalone --nproc-per-node=2 03-deepspeed/zero_offload.py
    GPU   torchrun --standalone --nproc-per-node=gpu 03-deepspeed/zero_offload.py \
              --dim 4096

With --nvme-path DIR it offloads to a disk too; DeepSpeed compiles its disk access once,
with g++ and libaio. Look for: the losses of a run without offload, and the 12 bytes of
optimizer state per weight, which leave the device.

Sources: Ren et al., ZeRO-Offload (USENIX ATC 2021), sections 3 and 4; Rajbhandari et
al., ZeRO-Infinity (SC 2021), sections 3 and 5.
"""

import json
import logging
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from dist_common import cli, runtime
from dist_common.deepspeed import import_deepspeed, start_engine
from dist_common.model import Config, Transformer, build_transformer
from dist_common.report import Report
from zero_stages import (
    MAX_GRAD_NORM,
    add_batch_flags,
    bytes_by_device,
    bytes_by_kind,
    live_tensors,
    load_batches,
    loss_of,
    make_adamw,
    micro_batches_of,
    train_step,
)

CONFIGS = Path(__file__).parent / "configs"
IN_MEMORY = {
    "none, stage 2": "zero2_config.json",
    "optimizer to CPU, stage 2": "zero2_offload_cpu_config.json",
    "none, stage 3": "zero3_config.json",
    "all to CPU, stage 3": "zero3_offload_cpu_config.json",
}
ON_DISK = {
    "none, stage 3": "zero3_config.json",
    "all to disk, stage 3": "zero3_offload_nvme_config.json",
}
DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}
BYTES = ("weights", "optimizer state", "gradients and buffers", "files")
# DeepSpeed keeps smaller tensors (bytes) in memory, and does not say so.
SMALLEST = 2**20
# Of losses near 5; then of bytes per weight, because of buffers.
TOLERANCES = {"loss": 2e-2} | dict(zip(BYTES, (0.1, 0.2, 0.75, 0.25), strict=True))


def load_engine_config(file, args, shards, folder):
    """Return a config of the folder configs/, with this run's values for "auto"."""
    config = json.loads((CONFIGS / file).read_text())
    del config["optimizer"]  # the script has its own
    config |= {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.grad_accum_steps,
        "gradient_clipping": MAX_GRAD_NORM,
        "bf16": {"enabled": args.precision == "bf16-mixed"},
        "fp16": {"enabled": False},
        "zero_force_ds_cpu_optimizer": False,  # PyTorch's AdamW updates on the CPU too
    }
    zero = config["zero_optimization"]
    zero["reduce_bucket_size"] = args.dim**2  # elements
    if zero["stage"] == 3:
        zero["stage3_prefetch_bucket_size"] = args.dim**2
        zero["stage3_param_persistence_threshold"] = 10 * args.dim
    if offload_device(zero, "optimizer") == "nvme":
        zero["offload_optimizer"]["nvme_path"] = folder
        zero["offload_param"]["nvme_path"] = folder
        zero["offload_param"]["buffer_size"] = max(shards)
        zero["sub_group_size"] = max(shards)  # elements that are updated at a time
    return config


def offload_device(zero, part):
    """Return where a config moves "param" or "optimizer": none, cpu or nvme."""
    return zero.get(f"offload_{part}", {}).get("device", "none")


def measure(deepspeed, config, engine_config, batches, args, run):
    """Train; return the mean losses of all ranks, and bytes by kind.

    The bytes are {device: bytes} of each kind, in the middle of a step.
    """
    before = bytes_by_device(live_tensors())
    model = build_transformer(config, args.seed, run.device).to(DTYPES[args.precision])
    if offload_device(engine_config["zero_optimization"], "param") == "nvme":
        # Otherwise DeepSpeed on a CPU writes bfloat16 files, whatever the precision.
        deepspeed.zero.Init(module=model, config_dict_or_path=engine_config)
    optimizer = make_adamw(model.parameters())
    engine = start_engine(deepspeed, model, optimizer, engine_config, args.timeout)
    losses = []
    for batch in batches:
        losses.append(train_step(engine, micro_batches_of(batch, args, run)))
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    first, *_ = micro_batches_of(batches[0], args, run)
    engine.backward(loss_of(engine, first))  # one more gradient
    held = bytes_by_kind(engine, before)
    return losses.cpu() / run.world_size, held


def show_bytes(held, num_weights):
    """Return bytes per weight with their place, such as "2.00 cuda + 1.00 cpu"."""
    numbers = {device: f"{size / num_weights:.2f}" for device, size in held.items()}
    return " + ".join(f"{text} {device}" for device, text in numbers.items())


def expected_bytes(engine_config, shards, num_weights, width, ranks):
    """Return a rank's bytes of each of BYTES, in the middle of a step.

    `shards`: elements of this rank's part of each weight. `width`: bytes of a weight
    and of its gradient. Sources: ZeRO-Offload, section 3; ZeRO-Infinity, section 3.
    """
    zero = engine_config["zero_optimization"]
    shard = sum(shards)
    weights = width * (shard if zero["stage"] == 3 else num_weights)
    state, gradients, files = 12 * shard, width * shard, 0
    if offload_device(zero, "optimizer") == "cpu":
        gradients += 4 * shard  # a float32 copy, for the update
        if zero["stage"] == 2:  # buffers for the largest gradient, on each side
            gradients += 2 * width * max(shards) * ranks
        if zero["stage"] == 2 and engine_config["gradient_accumulation_steps"] > 1:
            gradients += width * shard  # the sum of the micro-batches
    if offload_device(zero, "optimizer") == "nvme":
        weights_moved = width * sum(s for s in shards if s * width >= SMALLEST)
        gradients_moved = 4 * sum(s for s in shards if s * 4 >= SMALLEST)
        files = weights_moved + gradients_moved + state
        weights -= weights_moved
        state = 0
        buffers = zero["offload_param"]["buffer_count"] * width
        buffers += zero["offload_optimizer"]["buffer_count"] * 4
        gradients += buffers * max(shards)
    return weights, state, gradients, files


def prepare_disk(deepspeed, run):
    """Compile DeepSpeed's disk access, once. Raises: UsageError without the tools."""
    logging.getLogger("torch.utils.cpp_extension").setLevel("ERROR")
    builder = deepspeed.ops.op_builder.AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise cli.UsageError("--nvme-path needs g++ and libaio: apt install libaio-dev")
    if run.local_rank == 0:
        builder.load(verbose=False)
    dist.barrier()


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add_batch_flags(parser)
    add = parser.add_argument
    add(
        "--nvme-path", type=Path, metavar="DIR", help="offload to this folder on a disk"
    )
    add("--dim", type=cli.positive_int, help="model width (256; with a disk 1024)")
    add("--precision", choices=DTYPES, default="bf16-mixed", help="(bf16-mixed)")
    args = parser.parse_args()
    args.dim = args.dim or (1024 if args.nvme_path else 256)
    if args.dim % 64:
        parser.error(f"--dim must be a multiple of 64, not {args.dim}")
    if args.nvme_path and not args.nvme_path.is_dir():
        parser.error(f"--nvme-path {args.nvme_path} is not a folder")
    return args


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run, ExitStack() as at_end:
        report = Report("03-deepspeed/zero_offload.py", args, run)
        heads = args.dim // 64
        config = Config(256, args.dim, 2, heads, heads, 2 * args.dim, args.seq_len)
        num_weights = config.num_parameters()
        width = DTYPES[args.precision].itemsize
        with torch.device("meta"):
            weights = list(Transformer(config).parameters())
        shards = [-(-weight.numel() // run.world_size) for weight in weights]
        files, folder = IN_MEMORY, None
        if args.nvme_path:
            if max(shards) * width < SMALLEST:
                raise cli.UsageError(
                    f"--dim {args.dim}: a rank's part of the largest weight is below "
                    "1 MiB, and stays in memory: take more, or fewer ranks"
                )
            temporary = tempfile.TemporaryDirectory(prefix="zero-", dir=args.nvme_path)
            files, folder = ON_DISK, at_end.enter_context(temporary)
        configs = {
            name: load_engine_config(file, args, shards, folder)
            for name, file in files.items()
        }
        deepspeed = import_deepspeed(run, configs["none, stage 3"])
        if folder:
            prepare_disk(deepspeed, run)
        batches = load_batches(args, run)
        rows = []
        errors = {name: [] for name in TOLERANCES}
        for name, engine_config in configs.items():
            zero = engine_config["zero_optimization"]
            losses, held = measure(deepspeed, config, engine_config, batches, args, run)
            if offload_device(zero, "optimizer") == "none":
                losses_without = losses
            errors["loss"].append((losses - losses_without).abs().max().item())
            weight_device, state_device = (
                run.device.type if offload_device(zero, part) == "none" else "cpu"
                for part in ("param", "optimizer")
            )
            weights, state, rest = held
            measured = [weights[weight_device], state[state_device], rest.total(), 0]
            if folder:
                swapped = Path(folder).rglob("*.swp")
                measured[3] = sum(path.stat().st_size for path in swapped)
            expected = expected_bytes(
                engine_config, shards, num_weights, width, run.world_size
            )
            for kind, actual, predicted in zip(BYTES, measured, expected, strict=True):
                errors[kind].append(abs(actual - predicted) / num_weights)
            cells = [show_bytes(kind, num_weights) for kind in held]
            rows.append((name, *cells, f"{measured[3] / num_weights:.2f}"))
        run.print0(
            f"{num_weights:,} weights, {args.precision}; bytes per weight on a rank"
        )
        report.table(rows, ("offload", *BYTES))
        for name, tolerance in TOLERANCES.items():
            largest = torch.tensor(errors[name]).max().item()
            report.check(f"largest error: {name}", largest, 0, tolerance)
        return report.finish(f"loss {losses[-1]:.4f} at the end")


if __name__ == "__main__":
    cli.run(main)
