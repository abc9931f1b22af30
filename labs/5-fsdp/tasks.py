"""Lab 5, FSDP: what the grader runs, and which mistakes it names."""

import torch
from torch import nn

from dist_common.check import CollectiveCounter
from lab_parts.judging import Question, judge_each_rank, named, numbers, same
from lab_parts.running import Setting, Task
from lab_parts.shards import judge_reduce, kept, padded, set_gradients, tensors

LESSONS = {
    "02-fsdp/fsdp_from_scratch.py": (
        "all_gather_single",
        "reduce_scatter_single",
        "flatten",
        "part_of",
        "Unit",
        "AfterBackward",
        "groups_of",
        "Sharded",
        "modules_of",
    ),
}


REPLACED = (
    "the vector was replaced by another one: autograd has saved views of the old one "
    "for backward, "
    "which no gather fills again"
)


def unit_of(answer, setting, dtype=None):
    """Return a unit of the same parameters on all ranks, and these."""
    parameters = [nn.Parameter(tensor) for tensor in tensors(setting, 0)]
    return answer.Unit(parameters, dtype), parameters


def by_number(values) -> dict:
    return numbers({f"parameter {n}": value for n, value in enumerate(values)})


def held(unit) -> int:
    """Return the bytes that a unit's whole vector takes now."""
    return unit.whole.untyped_storage().nbytes()


# gather: the vector is filled with the parts of all ranks, once


def see_gather(answer, setting):
    unit, parameters = unit_of(answer, setting)
    vector = id(unit.whole)
    with CollectiveCounter() as counter:
        unit.gather()
        once = sum(counter.calls.values())
        got, shapes = by_number(parameters), [list(p.shape) for p in parameters]
        pairs = zip(parameters, unit.views, strict=True)
        shares = [parameter.data_ptr() == view.data_ptr() for parameter, view in pairs]
        stays = id(unit.whole) == vector
        unit.gather()
    low, _ = unit_of(answer, setting, torch.bfloat16)
    with CollectiveCounter() as low_counter:
        low.gather()
    return {
        "got": got,
        "stays": stays,
        "shapes": shapes,
        "shares": shares,
        "calls": [once, sum(counter.calls.values())],
        "low": sum(low_counter.bytes_sent.values()),
    }


@judge_each_rank
def judge_gather(got, rank, setting):
    start, ranks = tensors(setting, 0), setting.world_size
    whole, shapes = padded(start, ranks), [list(t.shape) for t in start]
    expected, parts = by_number(start), whole.chunk(ranks)

    def cut(vector):
        pieces = vector[: sum(t.numel() for t in start)].split(
            [t.numel() for t in start]
        )
        return by_number(pieces)

    mistakes = {
        "the parts of the ranks stand in another order": cut(torch.cat(parts[::-1]))
    }
    for r in range(ranks):
        mistakes[f"rank {r}'s part everywhere: no other rank's came"] = cut(
            parts[r].repeat(ranks)
        )
    if got["calls"][0] == 0:
        yield ("nothing is gathered: the parts of the others are on the other ranks")
        return
    if got["shapes"] != shapes:
        n = next(n for n, shape in enumerate(got["shapes"]) if shape != shapes[n])
        yield (
            f"a parameter of shape {shapes[n]} has shape {got['shapes'][n]} after "
            "gather: give each one its view of the vector back"
        )
    elif not same(got["got"], expected):
        yield named(got["got"], expected, mistakes)
    elif not got["stays"]:
        yield REPLACED
    elif got["shares"] != [True] * len(start):
        yield "parameters are copies of the vector: as views they take no memory twice"
    if got["calls"][1] > got["calls"][0]:
        yield "gathered again while it was full: forward and backward would send twice"
    if got["low"] > 2 * len(whole) * (ranks - 1) / ranks:  # bytes
        yield "a bfloat16 unit sends float32: cast the shard first"


# free: the memory is given back, the vector stays


def see_free(answer, setting):
    unit, parameters = unit_of(answer, setting)
    if unit.whole is None:  # it has been freed once
        return {"none": True}
    unit.gather()
    full, vector = held(unit), id(unit.whole)
    kept = parameters[0] * parameters[0].sum()  # autograd keeps views of the vector
    unit.free()
    freed, same_vector = held(unit), id(unit.whole) == vector
    left = [parameter.numel() for parameter in parameters]
    unit.gather()
    try:
        kept.sum().backward()
        gradient = parameters[0].grad.tolist()
    except RuntimeError as error:
        gradient = str(error).splitlines()[0]
    return {
        "full": full,
        "freed": freed,
        "same": same_vector,
        "left": left,
        "gradient": gradient,
    }


@judge_each_rank
def judge_free(got, rank, setting):
    weight = tensors(setting, 0)[0].requires_grad_()
    (weight * weight.sum()).sum().backward()
    if "none" in got:
        yield "self.whole is None after free: its views and autograd keep the memory"
        return
    if not got["same"]:
        yield REPLACED
        return
    if got["freed"]:
        yield (
            f"{got['freed']} of {got['full']} bytes are still there after free: a view "
            "or a name less frees nothing, the storage has to be resized"
        )
    if got["left"] != [0] * len(tensors(setting, 0)):
        yield (
            "parameters still point to the memory that was given back: a crash, later"
        )
    elif not got["freed"] and not same(got["gradient"], weight.grad.tolist()):
        yield (
            f"backward after gather gives {got['gradient']}, not the weight's gradient"
        )


# reduce: each rank its own part of the mean gradient, added up over micro-batches


def see_reduce(answer, setting):
    unit, parameters = unit_of(answer, setting)
    unit.gather()
    with CollectiveCounter() as counter:
        unit.reduce()  # of frozen parameters: none has a gradient
    unit.free()
    ends = []
    for micro in (0, 1):
        unit.gather()
        set_gradients(parameters, setting, micro)
        unit.reduce()
        ends.append(kept(parameters, unit.shard.grad))
        unit.free()
    low, parameters = unit_of(answer, setting, torch.bfloat16)
    low.gather()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    low.reduce()  # an error if the gradients do not get the shard's type
    return {"unused": sum(counter.calls.values()), "ends": ends}


@judge_each_rank
def judge_reductions(got, rank, setting):
    if got["unused"]:
        yield "parameters without any gradient are reduced: frozen ones have none"
    yield from judge_reduce(got["ends"], rank, setting, "shard.grad")


# backward and units: a model of two blocks


class BlockModel(nn.Module):
    def __init__(self, width: int, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def model_of(setting: Setting) -> BlockModel:
    torch.manual_seed(setting.seed)
    return BlockModel(8 + setting.draw(5)[0])


def loss_of(model: nn.Module, setting: Setting, rank: int) -> torch.Tensor:
    torch.manual_seed(setting.seed + 100 + rank)
    return model(torch.randn(6, 4)).square().mean()


def see_backward(answer, setting):
    model = model_of(setting)
    sharded = answer.Sharded(model, list(model.blocks))
    most, gather = [0], answer.Unit.gather

    def watched(unit):
        gather(unit)
        most.append(sum(map(held, sharded.units)))

    answer.Unit.gather = watched
    loss = loss_of(model, setting, setting.rank)
    before = len(most)
    try:
        loss.backward()
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0], "gathers": len(most) - before}
    parts = [unit.shard.grad for unit in sharded.units]
    return {
        "parts": by_number(parts),
        "most": max(most[before:] or [0]),
        "left": sum(map(held, sharded.units)),
        "whole": sum(u.whole.nbytes for u in sharded.units),
        "largest": max(u.whole.nbytes for u in sharded.units[:-1]),
        "rest": sharded.units[-1].whole.nbytes,
        "gathers": len(most) - before,
    }


@judge_each_rank
def judge_backward(got, rank, setting):
    ranks, model = setting.world_size, model_of(setting)
    sum(loss_of(model, setting, r) / ranks for r in range(ranks)).backward()
    groups = [list(block.parameters()) for block in model.blocks]
    groups.append([*model.embedding.parameters(), *model.head.parameters()])
    if "error" in got:
        gathered = ": no unit is gathered again before its backward"
        if got["gathers"]:
            gathered = ""
        yield f"backward fails{gathered} ({got['error']})"
        return
    expected = by_number(
        padded([p.grad for p in group], ranks).chunk(ranks)[rank] for group in groups
    )
    if None in got["parts"].values():
        yield "a unit's shard has no gradient after backward: reduce it"
    elif not same(got["parts"], expected):
        yield named(got["parts"], expected, {})
    if got["left"]:
        yield (
            f"{got['left']} of {got['whole']} bytes are whole after backward: free them"
        )
    elif got["most"] > got["rest"] + 2 * got["largest"]:
        yield f"{got['most']} bytes are whole at once in backward: only the unit's own"


def see_units(answer, setting):
    model = model_of(setting)
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in answer.modules_of(model)]


def judge_units(seen, setting):
    model = model_of(setting)
    blocks = [f"blocks.{n}" for n in range(len(model.blocks))]
    got = seen[0]  # embedding and head may be units of their own
    inner = [name for name in got if name.count(".") > 1]
    missing = [name for name in blocks if name not in got]
    if not got or got == [""]:
        yield "one unit: every rank holds all weights whole at once: a unit per block"
        return
    if "" in got:
        yield "the model itself is the rest already, which Sharded takes care of"
    if "blocks" in got:
        yield "nobody calls the list `blocks` itself, so its hooks would never run"
    if inner:
        yield f"{inner[0]} is a part of a block: small units send many small messages"
    elif missing:
        yield (
            f"{missing[0]} has no unit: it stays whole from the first layer to the last"
        )
    if len(set(got)) < len(got):
        yield "a module is in the list twice"


TASKS = {
    "gather": Task(see_gather, judge_gather),
    "free": Task(see_free, judge_free),
    "reduce": Task(see_reduce, judge_reductions),
    "units": Task(see_units, judge_units),
    "backward": Task(see_backward, judge_backward),
}
WHOLE = TASKS["backward"]


# Predictions: 8 blocks of 1,000 weights and a rest of 2,000, float32, on 4
# ranks.

BLOCKS, WEIGHTS, REST, RANKS = 8, 1000, 2000, 4


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Linear(WEIGHTS, 1, bias=False) for _ in range(BLOCKS)
        )
        self.rest = nn.Parameter(torch.ones(REST))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.rest.sum()
        for block in self.blocks:
            x = x + block(x)
        return x.sum()


def measure(answer, setting):
    """Return the bytes of weights: at rest, at the peak, and gathered in a step."""
    model = Wide()
    sharded = answer.Sharded(model, answer.modules_of(model))
    gather, most = answer.Unit.gather, []

    def watched(unit):
        gather(unit)
        most.append(sum(map(held, sharded.units)) + rest)

    rest = sum(unit.shard.nbytes for unit in sharded.units)
    answer.Unit.gather = watched
    with CollectiveCounter() as counter:
        model(torch.ones(1, WEIGHTS)).backward()
    gathered = counter.bytes_sent["all_gather"] * RANKS / (RANKS - 1)
    return {"rest": rest, "most": max(most), "gathered": gathered}


def question(kind, mistakes):
    return Question(
        "bytes", lambda answer, setting: measure(answer, setting)[kind], mistakes, RANKS
    )


ALL = 4 * (BLOCKS * WEIGHTS + REST)
QUESTIONS = {
    "rest": question(
        "rest",
        lambda measured: {
            "the whole model, as DDP holds it": ALL,
            "weights, not bytes: a float32 has 4": measured / 4,
        },
    ),
    "most": question(
        "most",
        lambda measured: {
            "the whole model beside the shards: one block at a time is whole": ALL
            + ALL / RANKS,
            "two blocks whole, as in fully_shard: the starter gathers none early": (
                measured + 4 * WEIGHTS
            ),
            "without the shards, which stay": measured - ALL / RANKS,
            "without the rest, which is whole all the time": measured - 4 * REST,
        },
    ),
    "gathered": question(
        "gathered",
        lambda measured: {
            "each weight once: backward gathers blocks again, the rest stays": ALL,
            "each weight twice: the rest is gathered once": 2 * ALL,
        },
    ),
}
