"""The layout of a job of several axes: how many ranks each gets, and what cannot be combined.

Of hybrid_parallelism's flags; refused in one line, before anything is allocated.
"""

import math
from argparse import Namespace
from collections.abc import Iterator

from legacy_common import hf, models
from legacy_common.cli import UsageError
from legacy_common.models import TransformerConfig
from legacy_common.runtime import World

STAGES = {  # of each rank of --pp, by --schedule, where --virtual-stages does not say
    "gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2, "zbv": 2, "dualpipev": 2
}  # fmt: skip
ANY_NUMBER = ("interleaved", "zero-bubble")  # of stages, by --virtual-stages
SPLIT_BACKWARD = ("zero-bubble", "zbv", "dualpipev")  # into gradients of inputs, then of weights


def settle(args: Namespace, world: World, config: TransformerConfig) -> None:
    """Set --dp to what the other axes leave; check that all of them divide what they cut.

    Raises: UsageError naming the flag, with the numbers.
    """
    if args.virtual_stages and args.schedule not in ANY_NUMBER:
        of = f"--virtual-stages {args.virtual_stages} is of --schedule {' or '.join(ANY_NUMBER)}"
        raise UsageError(f"{of}: {args.schedule} has {STAGES[args.schedule]} on each rank")
    args.virtual_stages = args.virtual_stages or STAGES[args.schedule]
    args.ranks_per_node = args.ranks_per_node or world.local_world_size
    others = args.tp * args.pp * args.cp
    args.dp = args.dp or max(1, world.world_size // others)
    product = args.dp * others
    if product != world.world_size:
        axes = f"--dp {args.dp} x --tp {args.tp} x --pp {args.pp} x --cp {args.cp}"
        raise UsageError(f"{axes} = {product} ranks, but {world.world_size} were started")
    for axis, parts, whole, what in cuts(args, config):
        if whole % parts:
            raise UsageError(f"{axis} does not divide the {whole} {what}")
    if not (args.grad_accum_steps or args.global_batch_size):
        # A pipeline of fewer micro-batches has idle stages.
        args.grad_accum_steps = args.pp * (2 if args.schedule == "dualpipev" else 1)


def cuts(args: Namespace, config: TransformerConfig) -> list[tuple[str, int, int, str]]:
    """Return what each axis cuts: the axis, into how many parts, how many there are, of what."""
    per_rank = args.virtual_stages
    layers = config.num_layers  # embedding and head may take the place of a layer each
    layers += 2 if (layers + 2) % (args.pp * per_rank) == 0 else 0
    several = f" ({per_rank} stages per rank)" if per_rank > 1 else ""
    of_model = f"of {hf.flag_of(args)}"
    parts = 2 if args.cp > 1 else 1  # of a rank of cp: one from the front, one from the end
    tokens = f"--tp {args.tp} x --cp {args.cp}" + " x 2 parts" * (args.cp > 1)
    return [  # what --tp cuts besides, heads and embedding, are multiples of the first
        (f"--tp {args.tp}", args.tp, config.num_kv_heads, f"key and value heads {of_model}"),
        (f"--tp {args.tp}", args.tp, config.ffn_dim, f"columns of the feed-forward {of_model}"),
        (f"--tp {args.tp}", args.tp, config.vocab_size, f"words of the vocabulary {of_model}"),
        (f"--pp {args.pp}{several}", args.pp * per_rank, layers, f"layers {of_model}"),
        (tokens, parts * args.cp * args.tp, args.seq_len, "tokens of --seq-len"),
        (f"--ep {args.ep}", args.ep, args.dp, "ranks of --dp"),
        (f"--ep {args.ep}", args.ep, config.num_experts, f"experts {of_model}"),
    ]


def refuse(args: Namespace, config: TransformerConfig) -> None:
    """Refuse what PyTorch gets wrong without an error, and what has no stages to fill.

    Raises: UsageError.
    """
    for wrong, why in (*of_experts(args, config), *of_stages(args, config)):
        if wrong:
            raise UsageError(why)


def of_experts(args: Namespace, config: TransformerConfig) -> Iterator[tuple[bool, str]]:
    """Yield what hybrid_parallelism's experts do not do, and --ep without experts."""
    if not config.num_experts:
        yield args.ep > 1, f"--ep {args.ep} needs --preset {' or '.join(models.MIXTURES)}"
        return
    sharing = 1 if args.data_parallel == "replicate" else args.dp // args.ep * args.cp
    for given, flag, why in (
        (math.gcd(config.dim, config.ffn_dim) % sharing, f"--data-parallel {args.data_parallel}",
         f"cannot cut their {config.dim} and {config.ffn_dim} rows over {sharing} ranks"),
        (args.tp > 1, f"--tp {args.tp}", "cuts no expert: use --ep"),
        (args.activation_checkpointing == "selective", "--activation-checkpointing selective",
         "fails in PyTorch where a block has an FSDP unit inside: use full"),
        (args.schedule in SPLIT_BACKWARD, f"--schedule {args.schedule}", "was not tried with them"),
        (args.float8, f"--float8 {args.float8}", "changes no expert"),
        (args.compile, "--compile", "has to know how many tokens come"),
        (args.export_to, f"--export-to {args.export_to}", "writes a Llama, which has none"),
    ):  # fmt: skip
        yield bool(given), f"--preset {args.preset} has experts: {flag} {why}"


def of_stages(args: Namespace, config: TransformerConfig) -> Iterator[tuple[bool, str]]:
    """Yield what stages of a pipeline cannot be given, or do not do under the schedule."""
    apart = "its embedding is the output layer too, and these stand on different stages"
    yield config.tied_embeddings, f"{hf.flag_of(args)}: {apart}"
    scaler = "--precision 16-mixed needs a loss scaler over all stages: use bf16-mixed"
    yield args.precision == "16-mixed", scaler
    steps, schedule = f"--grad-accum-steps {args.grad_accum_steps}", f"--schedule {args.schedule}"
    kept = args.activation_checkpointing
    for given, flag, why in (
        (args.data_parallel == "full", "--data-parallel full",
         "PyTorch loses gradients without an error where FSDP frees weights between forward and a "
         "backward in two parts: use --data-parallel grad-op or replicate, or"),
        (kept != "none", f"--activation-checkpointing {kept}",
         "each of the two parts of backward would compute blocks again: use none, or"),
        (args.compile, "--compile", "PyTorch cuts no compiled backward in two: use"),
    ):  # fmt: skip
        wrong = given and args.schedule in SPLIT_BACKWARD
        yield wrong, f"{schedule} with {flag}: {why} --schedule 1f1b or interleaved"
    needed = args.pp * {"gpipe": 0, "dualpipev": 2}.get(args.schedule, 1)
    few = f"at least as many micro-batches as stages: {steps} is less than {needed}"
    yield args.grad_accum_steps < needed, f"{schedule} needs {few}"
    uneven = args.schedule in ("interleaved", "zero-bubble") and args.grad_accum_steps % args.pp
    groups = f"micro-batches in groups of --pp {args.pp}: {steps} is no multiple of it"
    yield bool(uneven), f"{schedule} needs {groups}"
