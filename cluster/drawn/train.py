"""Train a small model on four ranks until a fault stops it: which one, a seed draws.

    python cluster/triage.py --rehearse 3

Seeds 0 to 4 draw one kind each, 5 to 9 again with another rank, step and layer, and so on; without
a seed nothing breaks. What was drawn is written to fault.json when it happens. Run in the folder
that all ranks share. Each layer's gradients are summed over a pair of ranks, then over all.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

KINDS = ["loader", "order", "send", "stopped", "node"]
LAYERS, WIDTH, STEP_S = 4, 64, 0.02
PAIRS = [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]  # by turns: even layers, odd layers


def draw(seed):
    """Return the fault of a seed: kind, rank, step and layer."""
    chance = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    last = 2 if kind == "send" else 3  # the last rank sends to nobody
    return {"kind": kind, "rank": chance.randint(0, last), "step": chance.randint(3, 8),
            "layer": chance.randrange(LAYERS)}  # fmt: skip


class Samples(torch.utils.data.IterableDataset):
    """Random batches; the one of the fault never comes."""

    def __iter__(self):
        for step in range(100_000):
            yield self.read(step)

    def read(self, step):
        if strikes("loader", step):
            wait_for_storage()
        return torch.randn(8, WIDTH)


def wait_for_storage():
    """Read a file that never has anything in it, as on a file server that is gone."""
    os.mkfifo(f"sample-{rank}")
    with open(f"sample-{rank}") as file:
        file.read()


def strikes(kind, step, layer=None):
    """Say whether this is the place of the fault, and write down that it happens."""
    place = (fault["kind"], fault["rank"], fault["step"])
    if place != (kind, rank, step) or layer not in (None, fault["layer"]):
        return False
    with open("fault.json", "w") as file:
        json.dump(fault, file)
    return True


def pass_on(activations, step):
    """Get activations from the rank before, and send to the one after, as a pipeline does."""
    if rank > 0:
        dist.recv(activations, rank - 1)
    if rank < 3 and not strikes("send", step):
        dist.send(activations, rank + 1)


def reduce_layer(gradient, pair, step, layer):
    """Sum a gradient over the pair, then over all ranks."""
    groups = [pair, dist.group.WORLD]
    if strikes("order", step, layer):
        groups.reverse()
    if strikes("stopped", step, layer):
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(gradient, group=groups[0])
    if strikes("node", step, layer):  # each rank is a node of its own there
        subprocess.run(["ip", "link", "set", "link0", "down"], check=True)
    dist.all_reduce(gradient, group=groups[1])


def train():
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    pairs = [dist.new_subgroups_by_enumeration(halves)[0] for halves in PAIRS]
    for step, batch in enumerate(torch.utils.data.DataLoader(Samples(), None, num_workers=1)):
        pass_on(batch, step)
        model(batch).square().mean().backward()
        for layer, weights in enumerate(layers):
            reduce_layer(weights.weight.grad, pairs[layer % 2], step, layer)
        model.zero_grad()
        time.sleep(STEP_S)


torch.set_num_threads(1)
fault = draw(int(sys.argv[1])) if len(sys.argv) > 1 else dict.fromkeys(("kind", "rank", "step"))
dist.init_process_group("gloo", timeout=timedelta(minutes=5))
rank = dist.get_rank()
train()
