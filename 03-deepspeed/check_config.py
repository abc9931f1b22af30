"""Check DeepSpeed configs before a job waits in a queue.

    CPU   python 03-deepspeed/check_config.py 03-deepspeed/configs/*.json
    GPU   python 03-deepspeed/check_config.py my_config.json --world-size 64

DeepSpeed itself reads each config and trains two layers for one step, in one process on
a CPU. Look for: the errors that DeepSpeed raises, the keys that it ignores, and values
that it accepts although they have no effect. Hints fail nothing.

Sources: deepspeed.ai, "DeepSpeed Configuration JSON"; transformers and accelerate,
which fill in "auto".
"""

import difflib
import io
import json
import logging
from collections import Counter
from pathlib import Path

import torch

from dist_common import cli, runtime
from dist_common.deepspeed import import_deepspeed
from dist_common.report import Report

KINDS = ("raised by DeepSpeed", "ignored by DeepSpeed", "accepted, but wrong")
SIZES = {  # of the step
    "train_batch_size": 1,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
}
# "auto" that Hugging Face's Trainer and accelerate fill in. Our scripts fill in fewer:
# deepspeed_train.md lists them.
FILLED = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
gradient_clipping bf16.enabled fp16.enabled
optimizer.params.lr optimizer.params.betas optimizer.params.eps
optimizer.params.weight_decay
scheduler.params.warmup_min_lr scheduler.params.warmup_max_lr
scheduler.params.warmup_num_steps scheduler.params.total_num_steps
zero_optimization.stage zero_optimization.reduce_bucket_size
zero_optimization.stage3_prefetch_bucket_size
zero_optimization.stage3_param_persistence_threshold
zero_optimization.stage3_gather_16bit_weights_on_model_save
zero_optimization.offload_optimizer.device zero_optimization.offload_param.device
zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_param.nvme_path
"""
# The step takes these sections. Others write files, or need several ranks or a GPU.
TRIED = ("optimizer", "scheduler", "zero_optimization", "bf16", "gradient_clipping")


class RecordedConfig(dict):
    """A config that records the keys that are looked up: DeepSpeed has no list."""

    def __init__(self, config):
        super().__init__(config)
        self.keys_read = set()

    def __contains__(self, key):
        self.keys_read.add(key)
        return super().__contains__(key)

    def get(self, key, default=None):
        self.keys_read.add(key)
        return super().get(key, default)

    def keys(self):
        return self  # so that `name in config.keys()` is recorded


def suggest(name, known):
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f": did you mean {near[0]}?" if near else ""


def values_in(section, above=""):
    """Yield (section, name, path, value) for all values of a config."""
    for name, value in list(section.items()):
        path = above + name
        if isinstance(value, dict):
            yield from values_in(value, f"{path}.")
        else:
            yield section, name, path, value


def explain(deepspeed, error):
    """Return what DeepSpeed raised, in one line."""
    if not hasattr(error, "errors"):
        return " ".join(f"{type(error).__name__}: {error}".split())
    first = error.errors()[0]  # pydantic's
    name = str(first["loc"][-1])
    known = set(deepspeed.runtime.zero.config.DeepSpeedZeroConfig.model_fields)
    return f"{name}: {first['msg']}{suggest(name, known - {name})}"


def take_step(deepspeed, config):
    """Train two layers for a step, on the CPU and without compiled operations."""
    config = SIZES | {name: config[name] for name in TRIED if name in config}
    for name in ("offload_optimizer", "offload_param"):
        config.get("zero_optimization", {}).pop(name, None)
    model = torch.nn.Sequential(torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8))
    optimizer = None
    if "optimizer" not in config:
        optimizer = torch.optim.AdamW(model.parameters())
    elif config["optimizer"].get("type") in ("Adam", "AdamW"):
        config["optimizer"].setdefault("params", {})["torch_adam"] = True
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    engine.backward(engine(torch.tensor([0])).float().sum())
    engine.step()


def try_config(deepspeed, config):
    """Have DeepSpeed judge a config; yield pairs of a kind and a line."""
    log = io.StringIO()
    deepspeed.logger.handlers = [logging.StreamHandler(log)]
    deepspeed.logger.setLevel("WARNING")
    recorded = RecordedConfig(config | SIZES)
    try:
        deepspeed.DeepSpeedConfig(recorded)
        for name in recorded:
            if name not in recorded.keys_read and name[0] != "_":  # a comment
                yield KINDS[1], name + suggest(name, recorded.keys_read)
        take_step(deepspeed, config)
    except Exception as error:
        yield KINDS[0], explain(deepspeed, error)
    for line in dict.fromkeys(log.getvalue().splitlines()):
        yield "warning", line


def fill_auto(config, reader):
    """Drop every "auto"; yield those that the reader does not fill in."""
    for section, name, path, value in values_in(config):
        if value == "auto":
            del section[name]
            if name.endswith("num_steps"):  # the scheduler needs a number
                section[name] = 2
            if reader == "own" or path not in FILLED.split():
                yield KINDS[2], f'{path} is "auto": nobody fills it in'


def check_values(config, world_size):
    """Yield values that DeepSpeed accepts although they have no effect."""
    zero = config.get("zero_optimization", {})
    for name, least in (("offload_optimizer", 1), ("offload_param", 3)):
        device = zero.get(name, {}).get("device", "none")
        least = 3 if device == "nvme" else least
        if device != "none" and zero.get("stage", 0) not in range(least, 4):
            yield KINDS[2], f"{name} to {device} needs stage {least}: it is ignored"
    total, micro, steps = (config.get(size) for size in SIZES)
    if total and micro and steps:
        ranks = world_size or total // (micro * steps)
        if total != micro * steps * ranks:
            yield KINDS[2], f"train_batch_size {total} is not {micro} x {steps} x ranks"


def hints(config):
    """Yield what a default costs."""
    zero = config.get("zero_optimization", {})
    if "gradient_clipping" not in config:
        yield "hint", "no gradient_clipping: DeepSpeed clips at 1; 0 turns it off"
    if config.get("bf16") == {"enabled": True} and zero.get("stage", 0) == 0:
        yield "hint", "bf16 in stage 0: weights decay once too often; take stage 1"
    if zero.get("round_robin_gradients"):
        yield "hint", "round_robin_gradients: wrong after a conversion to other ranks"


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="a ds_config.json")
    who = 'who fills in "auto": the Trainer, as our scripts do, or nobody (trainer)'
    add("--for", choices=("trainer", "own"), default="trainer", dest="reader", help=who)
    add("--world-size", type=cli.positive_int, help="ranks, to multiply batch sizes")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init("cpu", args.timeout) as run:
        report = Report("03-deepspeed/check_config.py", args, run)
        deepspeed = import_deepspeed(run, {"train_batch_size": run.world_size})
        counts = Counter()
        for path in args.files:
            try:
                config = json.loads(path.read_text())
            except (OSError, ValueError) as error:
                raise cli.UsageError(f"{path}: {error}") from error
            remarks = list(hints(config))
            remarks += fill_auto(config, args.reader)
            remarks += check_values(config, args.world_size)
            remarks += try_config(deepspeed, config)
            for kind, line in remarks:
                run.print0(f"{path}: {kind}: {line}")
                counts[kind] += 1
        for kind in KINDS:
            report.check(kind, counts[kind], 0, 0)
        return report.finish(f"{len(args.files)} files, for {args.reader}")


if __name__ == "__main__":
    cli.run(main)
