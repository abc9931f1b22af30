"""Check DeepSpeed configs before a job waits in a queue for them: every finding in one line.

    CPU   python 03-deepspeed/check_config.py 03-deepspeed/configs/*.json
    GPU   python 03-deepspeed/check_config.py my_config.json --world-size 64 --device cuda

Any ds_config.json will do, for any script. Look for: who refuses what (DeepSpeed, our template,
this machine), what each finding costs, and the hints, which fail nothing. Exit code 1: there are
findings that concern the reader of the config, --for; 2: there is no such file.

Sources: deepspeed.ai, "DeepSpeed Configuration JSON"; the installed DeepSpeed, which takes a step
with each config, on one CPU.
"""

import argparse
import gc
import importlib
import logging
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from deepspeed_parts import config_judge, config_rules, setup
from legacy_common import cli

# Which findings are a failure, by who reads the config.
FAILS = {
    "template": {config_rules.WRONG, config_rules.SCRIPT, config_rules.MACHINE},
    "trainer": {config_rules.WRONG},
    "own": {config_rules.WRONG},
}
MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")  # they would write files, or need a key
SLOW = ("torch._dynamo", "cpuinfo", "deepspeed.module_inject.auto_ep_layer")  # once, not per fork
WARNED: list[str] = []  # what DeepSpeed's log says in this process


def judged(config: dict[str, Any], ranks: int | None, reader: str) -> list:
    """Find what DeepSpeed refuses, passes over or warns of. Call `prepare` first."""
    on_cpu = os.environ["DS_ACCELERATOR"] == "cpu"  # a fork of a process that uses a GPU cannot
    for name in SLOW if on_cpu else ():
        importlib.import_module(name)
    context = get_context("fork" if on_cpu else "spawn")
    with ProcessPoolExecutor(1, context, initializer=_start) as pool:
        try:
            found, warned = pool.submit(_judge, config, ranks, reader).result()
        except BrokenProcessPool:
            text = "DeepSpeed's own process dies with it"
            return [config_rules.Finding(config_rules.WRONG, text, config_rules.STOPS)]
    if not on_cpu:  # the judge has no GPU: what it lacks says nothing
        found = [finding for finding in found if finding.kind != config_rules.MACHINE]
    cost = "DeepSpeed warns, and trains"
    return found + [config_rules.Finding(config_rules.HINT, text, cost) for text in warned]


def _start() -> None:
    """Make this process a gloo group of one, on a CPU, whose compiled ops compute nothing."""
    # A fork inherits PyTorch's pool of threads without the threads. The first call here makes a new
    # one; left to autograd, its threads would do so side by side, and now and then abort.
    torch.set_num_threads(1)
    setup.prepare(torch.device("cpu"))
    import cpuinfo
    import deepspeed
    from deepspeed.ops.op_builder.builder import OpBuilder

    cpuinfo.get_cpu_info = dict  # which DeepSpeed's Adam on a CPU asks for seconds
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (the process ends with it)
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    OpBuilder.load = lambda self, verbose=True: mock.MagicMock()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: WARNED.append(" ".join(record.getMessage().split()))
    deepspeed.logger.handlers = [handler]
    deepspeed.logger.setLevel(logging.WARNING)
    gc.freeze()  # stage 3 collects garbage at its start, from all that imports have left


def _judge(config: dict, ranks: int | None, reader: str) -> tuple[list, list[str]]:
    found = list(config_judge.of_deepspeed(config, ranks, reader, refusal_of_engine))
    always = config_rules.RULES["always_warned"]
    return list(dict.fromkeys(found)), [
        text for text in dict.fromkeys(WARNED) if text not in always
    ]


def refusal_of_engine(config: dict[str, Any]) -> Exception | None:
    """Train two layers for a step; return what DeepSpeed raises."""
    import deepspeed

    for name in MONITORS:
        config.pop(name, None)
    config_rules.part_of(config, "flops_profiler").pop("output_file", None)
    for _, part in config_rules.offloads(config):  # a disk is no matter of the config
        if part.get("device") == "nvme" and part.get("nvme_path"):
            part["device"] = "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = None
    if config_rules.value_of(config, "optimizer.type") is None:  # a script brings its own
        optimizer = torch.optim.AdamW(model.parameters())
        config["zero_force_ds_cpu_optimizer"] = False
    try:
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
        loss = engine(torch.ones(1, 8, dtype=next(model.parameters()).dtype)).float().sum()
        engine.backward(loss)
        engine.step()
    except (Exception, SystemExit) as error:  # DeepSpeed's profiler exits
        return error
    return None


class Parser(argparse.ArgumentParser):
    """argparse, with its errors in one line."""

    def error(self, message):
        raise cli.UsageError(message)


def findings_of(path, ranks=None, reader="template"):
    """Return all findings for one file. Raises: UsageError when it cannot be opened."""
    try:
        config, findings = config_rules.read(path)
    except OSError as error:
        raise cli.UsageError(f"{path}: {error.strerror}") from error
    if config is None:  # no JSON: nothing else can be said
        return findings

    if shapes := list(config_rules.wrong_shapes(config)):  # the other rules could not read it
        return findings + shapes
    findings += judged(config, ranks, reader)
    findings += config_judge.of_reader(config, reader)
    findings += of_machine(config, setup.ops_needed(config))
    told = {finding.text for finding in findings}
    hints = config_rules.by_the_table(config, config_rules.HINT)
    findings += [hint for hint in hints if hint.text not in told]

    return findings


def of_machine(config, ops=()):
    """Find what this machine lacks for a config: float16, a disk, a compiler for `ops`."""
    from deepspeed.accelerator import get_accelerator

    finding = partial(config_rules.Finding, config_rules.MACHINE)
    fp16 = config_rules.value_of(config, "fp16.enabled") is True
    if fp16 and not get_accelerator().is_fp16_supported():
        text = "DeepSpeed cannot train in float16 on this device: use a GPU or bf16-mixed"
        yield finding(text, config_rules.STOPS)
    for name, part in config_rules.offloads(config):
        folder = part.get("nvme_path")
        if part.get("device") != "nvme" or folder == "auto" or not isinstance(folder, str):
            continue
        what = f"{name}: nvme_path {folder}"
        if not Path(folder).is_dir():
            yield finding(f"{what} is not a folder: make it first", config_rules.STOPS)
            continue
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            yield finding(f"{what} cannot be written: {error.strerror}", config_rules.STOPS)
    for op in ops:
        if lack := setup.missing_for(op):
            other = ' or set "torch_adam": true, PyTorch\'s own' if op.endswith("_adam") else ""
            yield finding(f"{lack}{other}", "the run ends when DeepSpeed loads the op")


def show(path, findings, reader="template"):
    """Print a line for each finding, by kind, the worst first; return how many fail the reader."""
    for kind in (config_rules.WRONG, config_rules.SCRIPT, config_rules.MACHINE, config_rules.HINT):
        for finding in findings:
            if finding.kind == kind:
                stop = "" if finding.text.endswith(("?", ".")) else "."
                print(f"{path}: {kind}: {finding.text}{stop} Cost: {finding.cost}")
    failing = sum(finding.kind in FAILS[reader] for finding in findings)
    hints = sum(finding.kind == config_rules.HINT for finding in findings)
    if not failing:
        print(f"{path}: OK" + f", {hints} hint{'s' * (hints != 1)}" * bool(hints))
    return failing


def parse_args():
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="a ds_config.json")
    reader = "who reads it: zero_offload.py, Hugging Face's Trainer or a script of your own"
    add("--for", choices=FAILS, default="template", dest="reader", help=f"{reader} (template)")
    add("--world-size", type=cli.positive_int, help="ranks, to multiply the batch sizes (unknown)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="for which device to ask what it can (auto: cuda where there is one)")  # fmt: skip
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here: use --device cpu")
    return args


def main():
    args = parse_args()
    setup.prepare(torch.device(args.device))
    failing = 0
    missing = []
    for path in args.files:
        try:
            failing += show(path, findings_of(path, args.world_size, args.reader), args.reader)
        except cli.UsageError as error:
            missing.append(str(error))
    sys.stdout.flush()
    if missing:
        raise cli.UsageError("; ".join(missing))
    return cli.FAILED if failing else 0


if __name__ == "__main__":
    cli.run(main)
