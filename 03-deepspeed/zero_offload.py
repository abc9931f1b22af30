"""Move optimizer state and weights to CPU memory or to a disk: what goes where, and what it costs.

    CPU   torchrun --standalone --nproc-per-node=2 03-deepspeed/zero_offload.py
    GPU   torchrun --standalone --nproc-per-node=gpu 03-deepspeed/zero_offload.py --dim 4096

Try `--offload optimizer-nvme all-nvme --nvme-path DIR`, which compiles an op first, once. Look for:
the losses of a run that offloads nothing; the optimizer's 12 bytes per weight, which leave memory
for files; all of them read and written again in each step; buffers and gradients, which stay.

Sources: Ren et al., ZeRO-Offload (USENIX ATC 2021), sections 3 and 4; Rajbhandari et al.,
ZeRO-Infinity (SC 2021), sections 3 and 5.
"""

import argparse
import functools
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

import zero
from dist_common import cli, data, measure, runtime
from dist_common.models import Transformer, TransformerConfig
from dist_common.proofs import same_losses
from dist_common.report import Report
from tensor_bytes import bytes_by_place, live_bytes

CONFIGS = {
    "none-2": (2, "zero2_config.json"),
    "optimizer-cpu": (2, "zero2_offload_cpu_config.json"),
    "none-3": (3, "zero3_config.json"),
    "all-cpu": (3, "zero3_offload_cpu_config.json"),
    "optimizer-nvme": (3, "zero3_offload_nvme_config.json"),  # but for its offload_param
    "all-nvme": (3, "zero3_offload_nvme_config.json"),
}
KINDS = ("weights", "optimizer state", "gradients and buffers")
DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}  # of weights and gradients
FP32, K = 4, 12  # bytes per weight: a float32 gradient; a float32 copy and Adam's two moments
SMALLEST = 2**20  # bytes: smaller tensors are never swapped to disk, and DeepSpeed does not say so
LOSS_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 1e-2}  # of losses near 5; bf16 keeps 8 bits
WARMUP = 2  # steps: Adam's moments come with the first, memory is looked at in the second


class Run:
    """A model in training, and what was seen of it: losses, times, bytes and where they are."""

    def __init__(self, name, config, build, device):
        import deepspeed  # not before zero.prepare has said for which device

        self.name, self.zero, self.device = name, config["zero_optimization"], device
        self.losses, self.traffic, self.timer = [], [], measure.StepTimer(device, WARMUP)
        self.before = live_bytes()
        model = build()
        if self.target("offload_param") == "nvme":
            # Left to itself, DeepSpeed on a CPU makes these files bfloat16, whatever is configured.
            deepspeed.zero.Init(module=model, config_dict_or_path=config)

        self.engine, *_ = deepspeed.initialize(model=model, config=config)

    def step(self, batch):
        """Take one step; in the last one of the warm-up, look at what is where."""
        dist.barrier()
        disk = disk_traffic()
        with self.timer:
            loss = loss_of(self.engine, batch)
            self.engine.backward(loss)
            self.losses.append(loss.detach())
            del loss  # and with it what forward kept
            if len(self.losses) == WARMUP:
                self.held = self.look()
            self.engine.step()
        self.traffic.append([now - then for now, then in zip(disk_traffic(), disk, strict=True)])

    def look(self):
        """Return the bytes of each of KINDS by place; the last is all that is not the others."""
        weights = [getattr(weight, "ds_tensor", weight) for weight in self.engine.parameters()]
        adam = self.engine.optimizer.optimizer  # PyTorch's, inside DeepSpeed's
        state = [t for master, own in adam.state.items() for t in (master, *own.values())]
        kinds = bytes_by_place(weights), bytes_by_place(state)
        return *kinds, live_bytes() - self.before - kinds[0] - kinds[1]

    def losses_of_all_ranks(self):
        """Return each rank's own losses. Shape: (ranks, steps)."""
        return torch.tensor(runtime.gather(torch.stack(self.losses).tolist()))

    def target(self, part):
        """Return where the config moves offload_param or offload_optimizer: cpu, nvme or none."""
        return self.zero.get(part, {}).get("device", "none")

    def measured(self):
        """Return what `expected` does: only what lies where it should counts as weights and state.

        Of the rank that has most, as shards of odd sizes differ by a few weights.
        """
        own = []
        for held, part in zip(self.held, ("offload_param", "offload_optimizer"), strict=False):
            own.append(held[self.device.type if self.target(part) == "none" else "cpu"])
        folder = self.zero.get("offload_optimizer", {}).get("nvme_path")
        files = Path(folder).rglob("*.swp") if folder else []
        own += [self.held[2].total(), sum(path.stat().st_size for path in files)]
        own += [statistics.median(step) for step in zip(*self.traffic[WARMUP:], strict=True)]
        most = torch.tensor(own, device=self.device, dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return most.tolist()

    def expected(self, shapes, width):
        """Return by formula the bytes of each kind in memory, of files, read and written per step.

        `shapes` are numbers of elements, one for each weight. Beside its 12 bytes, an offloaded
        optimizer has a gradient of its own in float32 (ZeRO-Infinity, section 3: 20 bytes in all,
        where ZeRO-Offload, section 3, counts 16). The buffers are DeepSpeed's.
        """
        stage, ranks, config = self.zero["stage"], dist.get_world_size(), self.zero
        shards = [-(-numel // ranks) for numel in shapes]
        own, files, read, written = sum(shards), 0, 0, 0
        weights, state, rest = width * (own if stage == 3 else sum(shapes)), K * own, width * own
        if stage == 3:
            rest += width * config["reduce_bucket_size"]
        if self.target("offload_optimizer") == "cpu":
            rest += FP32 * own
            if stage == 2:  # and room for one whole gradient on each side of the copy
                rest += 2 * width * max(shapes)
        if self.target("offload_optimizer") == "nvme":
            groups = groups_of(shards, config["sub_group_size"])
            moved, gradients = K * swapped(groups, FP32), FP32 * swapped(shards, FP32)
            state, files, read, written = state - moved, *[moved + gradients] * 3
            rest += FP32 * config["offload_optimizer"]["buffer_count"] * max(groups)
            rest += FP32 * own - gradients
        if self.target("offload_param") == "nvme":
            moved, buffers = width * swapped(shards, width), config["offload_param"]
            # Read for forward and for backward; written once, by the optimizer.
            weights, files = weights - moved, files + moved
            read, written = read + 2 * moved, written + moved
            rest += width * buffers["buffer_count"] * buffers["buffer_size"]
            rest += width * ranks * max(groups)  # the group's shards, in room for whole weights
        return weights, state, rest, files, read, written


def loss_of(model, batch):
    """Return the mean cross-entropy. Shapes: batch is inputs and targets, (B, T) each."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def disk_traffic():
    """Return the bytes that this process has had read from disks and written to them so far."""
    if not sys.platform.startswith("linux"):  # which alone has libaio, and counts
        return [0, 0]
    counters = psutil.Process().io_counters()
    return [counters.read_bytes, counters.write_bytes]


def groups_of(shards, size):
    """Gather shards to groups of at least `size` elements: DeepSpeed updates a group at a time."""
    groups = [0]
    for shard in shards:
        groups = [*groups, shard] if groups[-1] >= size else [*groups[:-1], groups[-1] + shard]
    return groups


def swapped(sizes, width):
    """Return how many elements, of tensors of these sizes, are large enough to go to disk."""
    return sum(size for size in sizes if size * width >= SMALLEST)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    positive = cli.positive_int
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    names, default = f"one or several of {', '.join(CONFIGS)}", ["optimizer-cpu", "all-cpu"]
    add("--offload", nargs="+", choices=CONFIGS, metavar="WHAT", default=default,
        help=f"{names}; none of the same stage goes with each ({' '.join(default)})")  # fmt: skip
    add("--nvme-path", metavar="DIR", help="a folder on a fast disk, for the last two")
    add("--dim", type=positive, help="width of the model (512, and with a disk 1024)")
    add("--precision", choices=DTYPES, default="bf16-mixed", help="(bf16-mixed)")
    add("--micro-batch-size", type=positive, default=4, help="sequences per rank and step (4)")
    add("--seq-len", type=positive, default=64, help="tokens per sequence (64)")
    more = functools.partial(cli.whole_number, low=WARMUP + 1)
    add("--max-steps", type=more, default=6, help=f"training steps, {WARMUP} of warm-up (6)")
    args = parser.parse_args()
    args.dim = args.dim or (1024 if any("nvme" in name for name in args.offload) else 512)
    if args.dim % 64:
        parser.error(f"--dim must be a multiple of 64, not {args.dim}")
    return args


def load_configs(args, world, shape, shards):
    """Return the config of each run by name; those of a stage follow the one without offload."""
    configs, stages = {}, {CONFIGS[name][0] for name in args.offload}
    for name, (stage, file) in CONFIGS.items():
        if name in args.offload or (stage in stages and name.startswith("none")):
            asked = argparse.Namespace(**vars(args), lr=3e-4, grad_accum_steps=1)
            asked.deepspeed_config = Path(__file__).parent / "configs" / file
            config = configs[name] = zero.load_config(asked, world, shape)
            del config["scheduler"]  # a constant rate: warm-up would leave the first steps none
            if "nvme" in name:  # buffers as large as it takes, and no larger
                config["zero_optimization"]["sub_group_size"] = max(shards)
                config["zero_optimization"]["offload_param"]["buffer_size"] = max(shards)
            if name == "optimizer-nvme":
                del config["zero_optimization"]["offload_param"]
    return configs


def require_disk(args, world, shards):
    """Refuse a folder in memory, a full disk, and a model that DeepSpeed would never swap.

    Raises: UsageError.
    """
    find = ["stat", "-f", "-c", "%T", args.nvme_path]
    kind = subprocess.run(find, capture_output=True, text=True).stdout.strip()
    if kind in ("tmpfs", "ramfs"):
        why = f"--nvme-path {args.nvme_path} is a {kind}, which is memory: name a folder on a disk"
        raise cli.UsageError(why)
    width = DTYPES[args.precision].itemsize
    runs = world.local_world_size * sum("nvme" in name for name in args.offload)
    # DeepSpeed does not notice that a write failed, and aborts at the next read.
    needed, free = runs * (K + FP32 + width) * sum(shards), shutil.disk_usage(args.nvme_path).free
    if needed > free:
        gib = f"{needed / measure.GIB:.1f} GiB, and {free / measure.GIB:.1f} are free"
        raise cli.UsageError(f"--nvme-path {args.nvme_path}: the files take {gib}")
    size = max(shards) * width
    if size < SMALLEST:
        raise cli.UsageError(
            f"--dim {args.dim}: a rank's part of the largest weight has {size:,} bytes, and "
            f"DeepSpeed swaps nothing below {SMALLEST:,}: take more, or fewer ranks"
        )


def compare(run, baselines, shapes, args, report):
    """Check a run against the formulas and the run without offload; return its row of the table."""
    weights = sum(shapes)
    baseline = baselines[run.zero["stage"]]
    swaps = run.target("offload_optimizer") == "nvme"
    measured = [number / weights for number in run.measured()]
    milliseconds = run.timer.median_ms()
    report.metrics[f"step_time_ms_{run.name}"] = milliseconds
    report.metrics[f"bytes_per_weight_{run.name}"] = sum(measured[:3])
    if run is not baseline:
        expected = run.expected(shapes, DTYPES[args.precision].itemsize)
        expected = [number / weights for number in expected]
        names = (*KINDS, "files", "read per step", "written per step")[: 6 if swaps else 3]
        for name, value, right in zip(names, measured, expected, strict=False):
            name, tolerance = f"{run.name}: {name}, bytes per weight", 0.02 * max(right, 1)
            report.check(name, value, right, tolerance, "ZeRO-Infinity, section 3")
        name = f"{run.name}: largest error of a loss"
        tolerance = LOSS_TOLERANCE[args.precision]
        losses = run.losses_of_all_ranks()
        same_losses(report, losses, baseline.losses_of_all_ranks(), tolerance, name, baseline.name)
    cells = [
        " + ".join(f"{n / weights:.2f} {place}" for place, n in sorted(kind.items()) if n)
        for kind in run.held
    ]
    disk = [f"{number:.2f}" if swaps else "-" for number in measured[3:]]
    slower = milliseconds / baseline.timer.median_ms()
    return run.name, *cells, *disk, f"{milliseconds:.0f} ms", f"{slower:.2f}x"


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("03-deepspeed/zero_offload.py", args, world, device)
        ranks = world.world_size
        dim = args.dim
        shape = TransformerConfig(256, dim, 2, dim // 64, dim // 64, 2 * dim, args.seq_len)
        with torch.device("meta"):
            shapes = [weight.numel() for weight in Transformer(shape).parameters()]
        shards = [-(-numel // ranks) for numel in shapes]
        zero.prepare(device)
        configs = load_configs(args, world, shape, shards)
        swaps = any("nvme" in name for name in configs)
        if swaps:
            require_disk(args, world, shards)
        count = args.micro_batch_size
        text = data.Sequences(data.load_text(), args.seq_len, count * ranks)
        own = args.max_steps, count * ranks, world.rank * count, count
        batches = list(data.batches_of(text, *own, device))

        def build():
            runtime.seed_everything(args.seed)
            return Transformer(shape).to(device, DTYPES[args.precision])

        report.start(
            f"{sum(shapes):,} weights, {args.precision}; global batch {count * ranks} = {count} "
            f"per rank x {ranks} ranks",
        )
        ops = {op for config in configs.values() for op in zero.ops_needed(config)}
        zero.build_ops(sorted(ops), report)
        if device.type == "cpu":
            report.say(
                "without a GPU, the device's memory is the CPU's: what moves to the CPU changes "
                "owner, not place; only a GPU shows its own memory freed, and the copies' time"
            )
        runs = []
        for name, config in configs.items():
            runs.append(Run(name, config, build, device))
            for batch in batches[:WARMUP]:
                runs[-1].step(batch)
        # Step by step in turn, so that what else the machine does meets all of them alike.
        for batch in report.progress(batches[WARMUP:], "steps"):
            for run in runs:
                run.step(batch)
        baselines = {run.zero["stage"]: run for run in reversed(runs)}  # each stage's first
        rows = [compare(run, baselines, shapes, args, report) for run in runs]
        report.say("bytes per weight on a rank: in memory, in files, to and from disk per step")
        headers = ("offload", *KINDS, "files", "read", "written", "step", "of none's")
        report.table(rows, headers)
        return report.finish(f"loss {runs[0].losses[-1].item():.4f} at the end")


if __name__ == "__main__":
    cli.run(main)
