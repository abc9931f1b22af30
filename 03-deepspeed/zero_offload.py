"""Move optimizer state and weights to CPU memory or to a disk: what goes where, and what it costs.

    CPU   torchrun --standalone --nproc-per-node=2 03-deepspeed/zero_offload.py
    GPU   torchrun --standalone --nproc-per-node=gpu 03-deepspeed/zero_offload.py --dim 4096

DeepSpeedCPUAdam takes the CPU's steps; it is compiled once, with g++. `--torch-adam` takes
PyTorch's Adam instead. `--offload optimizer-nvme all-nvme --nvme-path DIR` needs libaio as well.
Look for: the losses of a run that offloads nothing; the optimizer's 12 bytes per weight, which
leave memory for files; all of them read and written again in each step; buffers, which stay.

Sources: Ren et al., ZeRO-Offload (USENIX ATC 2021), sections 3 and 4; Rajbhandari et al.,
ZeRO-Infinity (SC 2021), sections 3 and 5.
"""

import argparse
import functools
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from deepspeed_parts import setup
from deepspeed_parts import zero_offload as part
from deepspeed_parts.tensor_bytes import bytes_by_kind, live_bytes
from deepspeed_parts.zero_offload import DTYPES, KINDS, disk_traffic, target
from legacy_common import cli, data, measure, runtime
from legacy_common.models import Transformer, TransformerConfig
from legacy_common.report import Report

CONFIGS = {
    "none-2": (2, "zero2_config.json"),
    "optimizer-cpu": (2, "zero2_offload_cpu_config.json"),
    "none-3": (3, "zero3_config.json"),
    "all-cpu": (3, "zero3_offload_cpu_config.json"),
    "optimizer-nvme": (3, "zero3_offload_nvme_config.json"),  # but for its offload_param
    "all-nvme": (3, "zero3_offload_nvme_config.json"),
}
WARMUP = 2  # steps: Adam's moments come with the first, memory is looked at in the second


def start_engine(config, build):
    """Hand a new model to DeepSpeed; where its parts lie is in config["zero_optimization"]."""
    import deepspeed  # only after setup.prepare has said for which device

    model = build()
    if target(config["zero_optimization"], "offload_param") == "nvme":
        # Left to itself, DeepSpeed on a CPU makes these files bfloat16, whatever is configured.
        deepspeed.zero.Init(module=model, config_dict_or_path=config)

    engine, *_ = deepspeed.initialize(model=model, config=config)

    return engine


def train_step(engine, batch, look=None):
    """Take one step and return its loss; `look` is called when the gradient is there."""
    loss = loss_of(engine, batch)
    engine.backward(loss)
    loss = loss.detach()  # without what forward kept
    if look:
        look()

    engine.step()  # under offload, on the CPU

    return loss


def loss_of(model, batch):
    """Return the mean cross-entropy. Shapes: batch is inputs and targets, (B, T) each."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


class Run:
    """A model in training, and what was seen of it: losses, times, bytes and where they are."""

    def __init__(self, name, config, build, device):
        self.name, self.zero = name, config["zero_optimization"]
        self.losses, self.traffic = [], []  # of each step
        self.timer = measure.StepTimer(device, WARMUP)
        self.before = live_bytes()
        self.engine = start_engine(config, build)

    def step(self, batch):
        """Take one step; in the last one of the warm-up, look at what is where."""
        dist.barrier()
        before = disk_traffic()
        look = self.look if len(self.losses) + 1 == WARMUP else None
        with self.timer:
            self.losses.append(train_step(self.engine, batch, look))
        if len(self.losses) > WARMUP:
            now = disk_traffic()
            self.traffic.append([now - then for now, then in zip(now, before, strict=True)])

    def look(self):
        self.held = bytes_by_kind(self.engine, self.engine.optimizer, live_bytes() - self.before)


def load_configs(args, world, shape, shards, torch_adam):
    """Return the config of each run by name; those of a stage follow the one without offload."""
    configs, stages = {}, {CONFIGS[name][0] for name in args.offload}
    for name, (stage, file) in CONFIGS.items():
        if name not in args.offload and not (name.startswith("none") and stage in stages):
            continue
        path = Path(__file__).parent / "configs" / file
        config = configs[name] = part.settled(path, args, shape, world.world_size)
        if torch_adam:
            config["optimizer"]["params"]["torch_adam"] = True
        if "nvme" in name:  # buffers as large as it takes, and no larger
            config["zero_optimization"]["sub_group_size"] = max(shards)
            config["zero_optimization"]["stage3_max_live_parameters"] = 0  # each weight read twice
            config["zero_optimization"]["offload_param"]["buffer_size"] = max(shards)
        if name == "optimizer-nvme":
            del config["zero_optimization"]["offload_param"]
    return configs


def train(configs, build, batches, report):
    """Train every config in turn, step by step: what else the machine does meets all alike."""
    runs = []
    for name, config in configs.items():
        runs.append(Run(name, config, build, report.device))
        for batch in batches[:WARMUP]:
            runs[-1].step(batch)
    for batch in report.progress(batches[WARMUP:], "steps"):
        for run in runs:
            run.step(batch)
    return runs


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    positive = cli.positive_int
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    names, default = f"one or several of {', '.join(CONFIGS)}", ["optimizer-cpu", "all-cpu"]
    add("--offload", nargs="+", choices=CONFIGS, metavar="WHAT", default=default,
        help=f"{names}; none of the same stage goes with each ({' '.join(default)})")  # fmt: skip
    add("--nvme-path", metavar="DIR", help="a folder on a fast disk, for the last two")
    add("--torch-adam", action="store_true", help="take PyTorch's Adam, which is not compiled")
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


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("03-deepspeed/zero_offload.py", args, world, device)
        count, ranks, dim = args.micro_batch_size, world.world_size, args.dim
        shape = TransformerConfig(256, dim, 2, dim // 64, dim // 64, 2 * dim, args.seq_len)
        with torch.device("meta"):
            shapes = [weight.numel() for weight in Transformer(shape).parameters()]
        shards = [-(-numel // ranks) for numel in shapes]
        setup.prepare(device)
        lack = None if args.torch_adam else setup.missing_for("cpu_adam")
        configs = load_configs(args, world, shape, shards, args.torch_adam or lack is not None)
        if any("nvme" in name for name in configs):
            part.require_disk(args, world, shards)
        text = data.Sequences(data.load_text(), args.seq_len, count * ranks)
        own = args.max_steps, count * ranks, world.rank * count, count, device
        batches = list(data.batches_of(text, *own))

        def build():
            runtime.seed_everything(args.seed)
            return Transformer(shape).to(device, DTYPES[args.precision])

        report.start(
            f"{sum(shapes):,} weights, {args.precision}; global batch {count * ranks} = {count} "
            f"per rank x {ranks} ranks",
        )
        if lack:
            report.say(f"{lack}; until then PyTorch's Adam takes the steps")
        ops = {op for config in configs.values() for op in setup.ops_needed(config)}
        setup.build_ops(sorted(ops), report)
        if device.type == "cpu":
            report.say("no GPU: the device's memory is the CPU's, so offloading frees nothing here")
        runs = train(configs, build, batches, report)
        baselines = {run.zero["stage"]: run for run in reversed(runs)}  # each stage's first
        rows = [part.compare(run, baselines, shapes, report) for run in runs]
        report.say("bytes per weight on a rank: in memory, in files, to and from disk per step")
        report.table(rows, ("offload", *KINDS, "files", "read", "written", "step", "of none's"))
        return report.finish(f"loss {runs[0].losses[-1].item():.4f} at the end")


if __name__ == "__main__":
    cli.run(main)
