"""Write what the calculators are built and held by: presets.js and golden.json.

    python site/golden.py runs/calc

presets.js has what the page offers: flags, models, GPUs, defaults and words, read from the scripts,
so that no number is typed twice. Of the planner the page runs the Python (in_browser.py); for the
rest the JavaScript in site/static/calc is a port. golden.json has random cases with Python's
results: tests/test_site_calculators.py demands the same from it, and from the page in a browser.
"""

import argparse
import functools
import json
import queue
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from matplotlib import colormaps
from matplotlib.colors import to_hex

REPOSITORY = Path(__file__).resolve().parent.parent
# A script finds the helper files of its folder there.
for module in ("02-fsdp", "03-deepspeed", "04-nccl-operations", "05-advanced"):
    if str(REPOSITORY / module) not in sys.path:
        sys.path.append(str(REPOSITORY / module))

import bandwidth_test  # noqa: E402
import collective_ops  # noqa: E402
import pipeline_schedules  # noqa: E402
import point_to_point  # noqa: E402
from advanced_parts import pipeline_schedules as papers  # noqa: E402
from advanced_parts import plan_args  # noqa: E402
from deepspeed_parts import zero_stages  # noqa: E402
from dist_common import cli, models  # noqa: E402
from dist_common.costs import hardware  # noqa: E402
from dist_common.costs import models as shapes  # noqa: E402
from dist_common.costs.memory import memory_limit  # noqa: E402
from dist_common.costs.rates import RATES  # noqa: E402
from dist_common.measure import GIB  # noqa: E402
from fsdp_parts import fsdp_basics, strategies  # noqa: E402
from nccl_parts import collective_ops as drawn_by  # noqa: E402
from nccl_parts import measurement  # noqa: E402
from nccl_parts import point_to_point as costs  # noqa: E402

SEED = 28
SCHEDULES, RINGS, STRATEGIES = 400, 400, 300  # cases
LARGEST_RING = 16  # ranks whose messages are noted
VERBS = ("plan", "predict")  # of combining.py, which the page runs itself (in_browser.py)
UNASKED = ("help", "hf_config", "explain", "json", "output_dir")


# Of the 70B model's 80 layers once, not for each case that asks for its shapes.
model_of = functools.lru_cache(models.Transformer)


def flags_of(script, *flags: str) -> dict:
    """Return what a script's parse_args makes of these flags."""
    with mock.patch.object(sys, "argv", ["script", *flags]):
        return vars(script.parse_args())


def outcome(work: Callable) -> dict:
    """Return a result, or the refusal in its place."""
    try:
        return {"result": work()}
    except cli.UsageError as error:
        return {"refused": str(error)}


# the planner's flags


def parser_of(verb: str) -> argparse.ArgumentParser:
    """Return the parser of a verb of combining.py."""
    whole = plan_args.make_parser()
    (verbs,) = [each for each in whole._actions if isinstance(each.choices, dict)]
    return verbs.choices[verb]


def flags_of_verb(verb: str) -> dict[str, dict]:
    """Return by argparse's names what the page needs, to ask for each flag of a verb."""
    listed = {"model": ("a preset", list(shapes.MODELS)), "gpu": ("a data sheet", [*hardware.GPUS])}
    kinds = {cli.positive_int: "count", cli.positive_float: "rate"}
    flags = {}
    for action in parser_of(verb)._actions:
        if action.dest in UNASKED:
            continue
        text, usual = re.fullmatch(r"(.*?)(?: \(([^()]*)\))?", action.help % {}).groups()
        text, choices = listed.get(action.dest, (text, action.choices))
        flags[action.dest] = {
            "flags": action.option_strings,
            "help": text,
            "usual": usual or "",
            "kind": "switch" if action.nargs == 0 else kinds.get(action.type, "text"),
            "choices": choices and list(map(str, choices)),
            "default": action.default,
        }
    return flags


def data_sheets() -> dict[str, dict]:
    """Return each GPU's values by the names of the flags that change them, and what may be used."""
    return {
        name: {
            "gpus_per_node": gpu.gpus_per_node,
            "gpu_memory_gib": gpu.memory_gib,
            "gpu_tflops": gpu.tflops,
            "hbm_gb_s": gpu.hbm_gb_s,
            "link_gb_s": gpu.link_gb_s,
            "network_gb_s": gpu.network_gb_s,
            "limit_gib": memory_limit(gpu) / GIB,
        }
        for name, gpu in hardware.GPUS.items()
    }


def links() -> dict[str, dict]:
    """Return links of a ring: what a further rank waits, and what is reached of the data sheet."""
    found = {}
    for name in ("h100", "a100"):
        gpu = hardware.GPUS[name]
        inside = round(RATES["link.ring"] * gpu.link_gb_s)
        between = round(RATES["network.rate"] * gpu.network_gb_s)
        found[f"{name}, NVLink"] = {"alpha_us": RATES["link.hop_us"], "rate_gb_s": inside}
        found[f"{name}, network"] = {"alpha_us": RATES["network.node_us"], "rate_gb_s": between}
    return found


# schedules


def schedule_of(name: str, p: int, m: int, v: int, backward: float) -> dict:
    schedule = pipeline_schedules.build(name, p, m, v)
    spans = pipeline_schedules.simulate(schedule, pipeline_schedules.durations(name, v, backward))
    return {
        "orders": [" ".join(pipeline_schedules.name_of(i, p) for i in rank) for rank in schedule],
        "spans": [[(*span.instruction, span.start, span.end) for span in rank] for rank in spans],
        "duration": papers.span_of(spans)[1],
        "bubble": pipeline_schedules.bubble(spans),
        "held": [pipeline_schedules.peak_activations(rank, v) for rank in schedule],
        "bubble_formula": papers.bubble_formula(name, p, m, v, backward),
        "peak_formula": [papers.peak_formula(name, rank, p, m, v) for rank in range(p)],
    }


def schedule_cases(draw: random.Random, count: int) -> Iterator[dict]:
    for _ in range(count):
        name = draw.choice(list(pipeline_schedules.SCHEDULES))
        p, m = draw.randint(1, 8), draw.randint(1, 24)
        m = p * max(1, m // p) if draw.random() < 0.8 else m
        v = draw.choice((1, 2, 3, 4)) if name == "interleaved" else 1
        case = name, p, m, v, draw.choice((1.0, 1.5, 2.0))
        yield {"case": case, **outcome(lambda case=case: schedule_of(*case))}


# rings


class Message(NamedTuple):
    """In place of dist.P2POp, which wants a process group."""

    operation: Callable
    tensor: torch.Tensor
    peer: int


class Done:
    def wait(self) -> None:
        pass


class Camera(costs.Watcher):
    """A Watcher that also notes what its rank holds, and when."""

    def __init__(self, held: torch.Tensor) -> None:
        super().__init__(torch.device("cpu"))
        self.held = held
        self.seen: list[tuple[int, list[int]]] = []

    def note(self) -> None:
        self.seen.append((int(self.clock), self.held.tolist()))

    def __call__(self, *args, **kwargs) -> None:
        self.note()
        super().__call__(*args, **kwargs)


def film(algorithm: Callable, begun: list[torch.Tensor]) -> dict:
    """Run the lesson's own function on threads as ranks; return messages, and what ranks held."""
    ranks = len(begun)
    own = threading.local()
    wires = {(a, b): queue.Queue() for a in range(ranks) for b in range(ranks)}
    cameras = [Camera(x) for x in begun]

    def exchange(messages: list[Message]) -> list[Done]:
        for operation, tensor, peer in messages:
            if operation is dist.isend:
                wires[own.rank, peer].put(tensor.clone())
        for operation, tensor, peer in messages:
            if operation is dist.irecv:
                tensor.copy_(wires[peer, own.rank].get(timeout=60))
        return [Done()]

    def be(rank: int) -> None:
        own.rank = rank
        algorithm(begun[rank], cameras[rank])
        cameras[rank].note()

    patches = {
        "get_rank": lambda: own.rank,
        "get_world_size": lambda: ranks,
        "P2POp": Message,
        "batch_isend_irecv": exchange,
    }
    with mock.patch.multiple(dist, **patches):
        threads = [threading.Thread(target=be, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    size = begun[0].nbytes
    messages = sorted((at, source, to, sent / size) for camera in cameras
                      for at, source, to, sent in camera.messages)  # fmt: skip
    return {"messages": messages, "seen": [camera.seen for camera in cameras]}


def in_parts(of_parts: Callable) -> Callable:
    return lambda x, move: of_parts(x.tensor_split(len(x)), move)


def ring_of(collective: str, name: str, ranks: int) -> dict:
    """Film one collective; a number has the bit r where rank r is in the sum."""
    halves = {"reduce_scatter": point_to_point.ring_reduce_scatter,
              "all_gather": point_to_point.ring_all_gather}  # fmt: skip
    algorithm = point_to_point.ALGORITHMS[name]
    if collective in halves:
        algorithm = in_parts(halves[collective])
    begun = []
    for rank in range(ranks):
        x = torch.full((ranks if name == "ring" else 1,), 2**rank)
        if collective == "all_gather":  # the part that this rank has
            x *= torch.arange(len(x)) == (rank + 1) % ranks
        begun.append(x)
    return film(algorithm, begun)


def kinds() -> list[tuple[str, str]]:
    """Return the collectives that the lesson builds, and by what."""
    every = [("all_reduce", name) for name in point_to_point.ALGORITHMS]
    return [*every, ("reduce_scatter", "ring"), ("all_gather", "ring")]


def buffers_of(name: str) -> dict:
    """Return what a collective is for, and by ranks the buffers of all before and after it."""
    purpose, rule = drawn_by.DEFINITIONS[name]
    by_ranks = {}
    for ranks in range(2, drawn_by.LARGEST_DRAWN + 1):
        before = [
            collective_ops.buffer_of(rank, ranks, torch.int64, "cpu") for rank in range(ranks)
        ]
        after = [None if own is None else own.tolist() for own in rule(before)]
        by_ranks[ranks] = [[own.tolist() for own in before], after]
    return {"for": purpose, "buffers": by_ranks}


def time_of(collective: str, name: str, ranks: int, size: int, alpha: float, rate: float) -> dict:
    """Return a collective's steps and time by the lesson's table; half of the ring's for a half."""
    steps, sent, in_a_step = costs.theory(name, ranks)
    if collective != "all_reduce":
        steps, sent = steps / 2, sent / 2
    seconds = costs.Cost(alpha, rate).predict(steps, in_a_step * size)
    factor = bandwidth_test.COLLECTIVES[collective].bus_factor(ranks)
    busbw = factor * measurement.gb_per_s(size, seconds)
    return {"steps": steps, "sent": sent, "in_a_step": in_a_step, "seconds": seconds,
            "busbw_gb_s": busbw}  # fmt: skip


def ring_cases(largest: int) -> Iterator[dict]:
    for collective, name in kinds():
        for ranks in range(2, largest + 1):
            case = collective, name, ranks
            yield {"case": case, "result": ring_of(*case)}


def time_cases(draw: random.Random, count: int) -> Iterator[dict]:
    for _ in range(count):
        ranks = draw.choice((draw.randint(2, 64), 2 ** draw.randint(1, 12)))
        size = draw.choice((256, 2**20, draw.randint(1, 2**33)))
        link = draw.uniform(1e-6, 1e-2), draw.uniform(1e7, 1e12)
        case = *draw.choice(kinds()), ranks, size, *link
        yield {"case": case, "result": time_of(*case)}


# strategies


def strategy_cases(draw: random.Random, count: int) -> Iterator[dict]:
    """Yield what a strategy of a preset holds, gathers and sends."""
    units = {}
    for name in models.PRESETS:
        with torch.device("meta"):
            model = model_of(models.PRESETS[name])
        units[name] = {shards: strategies.unit_weights([*model.blocks, model], shards)
                       for shards in (1, 3, 8, 64)}  # fmt: skip
    for _ in range(count):
        preset, ranks = draw.choice(list(units)), draw.choice((2, 4, 6, 8, 64, 512))
        group = draw.choice([size for size in (2, 3, 4, 8) if ranks % size == 0])
        sharding = draw.choice(list(strategies.NAMES))
        precision = draw.choice(list(zero_stages.WIDTHS))
        own = units[preset][draw.choice((1, 3, 8, 64))]
        weights, m = sum(own), draw.randint(1, 16)
        plan = strategies.Plan(sharding, weights, precision, m, ranks, group)
        stage = f"stage {draw.randint(0, 3)}"
        zero = stage, zero_stages.WIDTHS[precision], m, ranks, draw.random() < 0.5
        way = draw.choice(("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP full", "FSDP grad-op"))
        yield {
            "preset": preset, "plan": asdict(plan), "zero": zero,
            "own": own, "way": way,
            "result": {
                "units": units[preset],
                "sent": strategies.sent_per_weight(plan, own[-1] / weights),
                "held": strategies.held_per_weight(way, precision, ranks),
                "whole": strategies.whole_at_once(plan, own),
                "zero": zero_stages.sent_per_weight(*zero),
            },
        }  # fmt: skip


def weigh_cases() -> Iterator[dict]:
    """Yield the numbers of `fsdp_basics.py --weigh`: the script's own, not yet rounded."""
    for preset in models.PRESETS:
        for ranks in (2, 8, 64):
            with (
                mock.patch.object(fsdp_basics, "Report") as report,
                mock.patch.object(models, "Transformer", model_of),
                mock.patch.dict("os.environ"),  # which it tells that it is one rank
            ):
                fsdp_basics.weigh("", argparse.Namespace(weigh=ranks, preset=preset))
            stored = report.return_value.metrics.__setitem__.call_args_list
            yield {"preset": preset, "ranks": ranks, "result": dict(call.args for call in stored)}


# files


def golden(share: float = 1.0, only: str | None = None) -> dict:
    """Return the cases of all kinds, or of one; `share`: how many of them."""

    def drawn(cases: Callable, count: int) -> list[dict]:
        return list(cases(random.Random(SEED), max(1, round(share * count))))

    every = {
        "schedules": lambda: drawn(schedule_cases, SCHEDULES),
        "rings": lambda: list(ring_cases(round(2 + share * (LARGEST_RING - 2)))),
        "times": lambda: drawn(time_cases, RINGS),
        "strategies": lambda: drawn(strategy_cases, STRATEGIES),
        "weigh": lambda: list(weigh_cases()),
    }
    return {kind: cases() for kind, cases in every.items() if only in (None, kind)}


def presets() -> dict:
    """Return what the page offers and says: from the scripts that it is of."""
    piped = flags_of(pipeline_schedules)
    return {
        "tool": {verb: flags_of_verb(verb) for verb in VERBS},
        "verbs": {verb: parser_of(verb).description for verb in VERBS},
        "model": plan_args.model_of(plan_args.parse_args(["plan"])).name,
        "gpus": data_sheets(),
        "links": links(),
        "models": {name: asdict(config) for name, config in models.PRESETS.items()},
        "precisions": list(zero_stages.WIDTHS),
        "weighed": flags_of(fsdp_script(), "--weigh", "8")["preset"],
        "pipeline": {name: piped[name] for name in ("stages", "micro_batches", "virtual_stages",
                                                    "backward")},
        "schedule_colors": papers.COLOURS,
        "schedule_legend": papers.LEGEND,
        "ring": {"mib": flags_of(point_to_point)["mib"], "largest": LARGEST_RING},
        "kinds": kinds(),
        "collectives": {name: buffers_of(name) for name in drawn_by.DRAWN},
        "owner_colors": [to_hex(colormaps["Set3"](rank)) for rank in range(drawn_by.LARGEST_DRAWN)],
        "gib": GIB,
    }  # fmt: skip


def fsdp_script():
    import fsdp_basics as script

    return script


def write(folder: Path, **sizes) -> None:
    """Write both files into a folder; `sizes` as golden has them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "golden.json").write_text(json.dumps(golden(**sizes)))
    lines = (
        "// Written by site/golden.py.",
        f"const presets = {json.dumps(presets(), indent=1)};",
        'if (typeof module !== "undefined") module.exports = presets;',
    )
    (folder / "presets.js").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    import in_browser  # its folder is this script's

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write these, and python.js")
    folder = parser.parse_args().folder
    write(folder)
    in_browser.write(folder)
