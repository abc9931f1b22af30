"""DeepSpeed as the judge of a config: it takes a training step with it, in a process of its own."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from deepspeed_parts import config_rules, setup
from deepspeed_parts.config_rules import Finding, offloads, part_of, value_of

MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")  # they would write files, or need a key
SLOW = ("torch._dynamo", "cpuinfo", "deepspeed.module_inject.auto_ep_layer")  # once, not per fork
WARNED: list[str] = []  # what DeepSpeed's log says in this process


def judged(config: dict[str, Any], ranks: int | None, reader: str) -> list[Finding]:
    """Find what DeepSpeed refuses, passes over or warns of. Call `prepare` first."""
    on_cpu = os.environ["DS_ACCELERATOR"] == "cpu"  # a fork of a process that uses a GPU cannot
    for name in SLOW if on_cpu else ():
        importlib.import_module(name)
    context = get_context("fork" if on_cpu else "spawn")
    with ProcessPoolExecutor(1, context, initializer=_start) as pool:
        found, warned = pool.submit(_judge, config, ranks, reader).result()
    if not on_cpu:  # the judge has no GPU: what it lacks says nothing
        found = [finding for finding in found if finding.kind != config_rules.MACHINE]
    cost = "DeepSpeed warns, and trains"
    return found + [Finding(config_rules.HINT, text, cost) for text in warned]


def _start() -> None:
    """Make this process a gloo group of one, on a CPU, whose compiled ops compute nothing."""
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


def _judge(config: dict, ranks: int | None, reader: str) -> tuple[list[Finding], list[str]]:
    found = list(config_rules.of_deepspeed(config, ranks, reader, refusal_of_engine))
    always = config_rules.RULES["always_warned"]
    return list(dict.fromkeys(found)), [
        text for text in dict.fromkeys(WARNED) if text not in always
    ]


def refusal_of_engine(config: dict[str, Any]) -> Exception | None:
    """Train two layers for a step; return what DeepSpeed raises."""
    import deepspeed

    for name in MONITORS:
        config.pop(name, None)
    part_of(config, "flops_profiler").pop("output_file", None)
    for _, part in offloads(config):  # whether there is a disk is no matter of the config
        if part.get("device") == "nvme" and part.get("nvme_path"):
            part["device"] = "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = None
    if value_of(config, "optimizer.type") is None:  # a script brings its own, under offload too
        optimizer = torch.optim.AdamW(model.parameters())
        config["zero_force_ds_cpu_optimizer"] = False
    try:
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
        loss = engine(torch.ones(1, 8, dtype=next(model.parameters()).dtype)).float().sum()
        engine.backward(loss)
        engine.step()
    except Exception as error:
        return error
    return None
