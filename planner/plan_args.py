"""The flags of `plan.py`, and the job, cluster and layout that they mean.

A flag that contradicts another one raises a CommandLineError: one line, exit code 2.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

from planner import cli, models
from planner.finetune import QUANT, with_adapters
from planner.hardware import GPUS, LATENCY_US, Cluster, cluster_of, find_gpu
from planner.job import (
    ATTENTION,
    AXES,
    CP_KINDS,
    LOSSES,
    RECOMPUTE,
    Layout,
    ModelShape,
    TrainingJob,
)
from planner.stacks import STACKS

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "top_k")
NEEDED = ("layers", "hidden", "heads", "ffn", "vocab")
LAYOUT = ("tp", "pp", "dp", "cp", "ep", "zero", "shard", "micro_batch", "recompute")
LAYOUT += ("virtual_stages", "cp_kind", "offload", "order")
LORA_RANK = 16
# Tokens of a step by the number of weights (Brown et al., 2020, table 2.1).
USUAL_TOKENS = ((2e9, 2**19), (5e9, 2**20), (20e9, 2**21), (float("inf"), 2**22))
TUNING_TOKENS = 2**18
# Bytes per weight of parameter, gradient and optimizer state.
OPTIMIZERS = {
    "adamw": (2, 4, 12),  # float32 master weight and two moments
    "adamw-bf16": (2, 2, 4),  # all in 16 bits, without a master weight
    "adamw-8bit": (2, 2, 2),  # moments of 8 bits (Dettmers et al., 2022)
}


def amount(text: str) -> float:
    """Parse 300B, 15T or 1.5e12."""
    scale = {"M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1)
    try:
        value = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        value = 0
    if not 0 < value < 1e18:
        raise argparse.ArgumentTypeError(
            f"must be a number like 300B or 15T, not {text!r}"
        )
    return value


def order(text: str) -> tuple[str, ...]:
    """Parse the order of ranks: each axis once, innermost first."""
    axes = tuple(text.split("-"))
    if sorted(axes) != sorted(AXES):
        raise argparse.ArgumentTypeError(
            f"must name {', '.join(AXES)} once each, not {text!r}"
        )
    return axes


def network_rate(text: str) -> tuple[float, str]:
    """Parse 50 (GB/s of a GPU's card) or 400Gbit (Gbit/s of a node)."""
    number = re.sub(r"gbit(/s)?$", "", text.lower())
    unit = "Gbit" if number != text.lower() else "GB"
    return cli.positive_float(number), unit


def make_parser() -> cli.PlannerParser:
    """Return the parser of the verbs plan and predict."""
    parser = cli.PlannerParser(prog="plan.py", description="Plan a training job.")
    verbs = parser.add_subparsers(dest="verb", metavar="{plan,predict}", required=True)
    for verb, text in (
        ("plan", "search all layouts; print the best five and how to start the first"),
        ("predict", "print the memory and the step time of one layout"),
    ):
        sub = verbs.add_parser(verb, help=text, description=text, allow_abbrev=False)
        add_job_flags(sub)
        add_tuning_flags(sub)
        add_hardware_flags(sub)
        add_layout_flags(sub, verb)
        add = sub.add_argument
        add("--tokens", type=amount, help="to train on, as 300B or 15T: days")
        add(
            "--dollars-per-gpu-hour",
            type=cli.positive_float,
            metavar="PRICE",
            help="with --tokens: dollars",
        )
        add("--explain", action="store_true", help="print formulas with their numbers")
        add("--json", action="store_true", help="print one JSON object, bytes, seconds")
    return parser


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse what follows the script's name: a verb and its flags."""
    args = make_parser().parse_args(argv)
    args.adapters = args.finetune in QUANT
    if args.lora_rank and not args.adapters:
        raise cli.CommandLineError("--lora-rank needs --finetune lora or qlora")
    if args.adapters and (args.optimizer != "adamw" or args.optimizer_in_backward):
        raise cli.CommandLineError(
            f"--optimizer changes little for {args.finetune}: omit it"
        )
    args.lora_rank = args.lora_rank or LORA_RANK
    return args


def add_job_flags(parser: cli.PlannerParser) -> None:
    add, count = parser.add_argument, cli.positive_int
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--model",
        metavar="NAME",
        help="a name (Qwen/Qwen3-32B), a number of weights (7b), or a config.json",
    )
    source.add_argument("--hf-config", metavar="FILE", help="a config.json")
    size = partial(add, type=count, metavar="N")
    size("--layers", help="with the next four: a model, or a change of --model")
    size("--hidden", help="width between blocks")
    size("--heads", help="of queries")
    size("--ffn", help="inner width of the feed-forward")
    size("--vocab", help="words of the vocabulary")
    size("--kv-heads", help="of keys and values (--heads)")
    size("--experts", help="of each layer (0: dense)")
    size("--top-k", help="experts that compute a token (2)")
    add("--mlp", choices=("gated", "plain"), help="SwiGLU, or GPT's two matrices")
    add("--seq-len", type=count, default=4096, help="tokens of a sequence (4096)")
    add(
        "--global-batch",
        "--global-batch-size",
        type=count,
        metavar="N",
        help="sequences of a step (0.5M to 4M tokens by size; 262,144 to fine-tune)",
    )
    kinds = ("bf16", "fp16", "fp8", "fp32", "tf32")
    add("--precision", choices=kinds, default="bf16", help="of products (bf16)")
    add("--attention", choices=ATTENTION, help="kernel (flash2; Megatron: flash3)")
    add("--no-flash", action="store_true", help="the same as --attention stored")
    add("--compiled", "--compile", action="store_true", help="torch.compile of blocks")
    add("--stack", choices=STACKS, default="torch", help="whose code runs (torch)")


def add_tuning_flags(parser: cli.PlannerParser) -> None:
    add = parser.add_argument
    add(
        "--finetune",
        choices=("none", "full", *QUANT),
        default="none",
        help="all weights, or adapters next to frozen weights of 16 or 4 bits (none)",
    )
    add(
        "--lora-rank",
        type=cli.positive_int,
        metavar="N",
        help="of adapters on all matrices; with experts on attention's alone (16)",
    )
    add("--loss", choices=LOSSES, default="whole", help="logits at once (whole)")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="states (adamw)")
    add(
        "--optimizer-in-backward",
        action="store_true",
        help="free each gradient at once; needs one micro-batch",
    )
    add("--gradient-bytes", type=int, choices=(2, 4), help="of a gradient (4)")


def add_hardware_flags(parser: cli.PlannerParser) -> None:
    add, count, rate = parser.add_argument, cli.positive_int, cli.positive_float
    add("--gpu", default="h100", metavar="NAME", help=f"{', '.join(GPUS)} (h100)")
    add("--gpus", type=count, help="GPUs of the job (8, or those of the axes)")
    add("--gpus-per-node", type=count, help="that fast links join (the GPU's usual)")
    add("--gpu-memory-gib", type=rate, metavar="GIB", help="not the data sheet's")
    add("--gpu-tflops", type=rate, metavar="TFLOPS", help="peak of --precision, dense")
    add("--hbm-gb-s", type=rate, metavar="GB_S", help="of the GPU's memory")
    add("--link-gb-s", type=rate, metavar="GB_S", help="in a node, each way")
    add(
        "--network-gb-s",
        type=network_rate,
        metavar="RATE",
        help="each way: GB/s of a GPU's card (50), or a node's Gbit/s (400Gbit)",
    )
    add(
        "--network",
        choices=LATENCY_US,
        help="start of a message: 20 or 100 us (rdma; ethernet for consumer GPUs)",
    )


def add_layout_flags(parser: cli.PlannerParser, verb: str) -> None:
    add, count = parser.add_argument, cli.positive_int
    rest = "searched" if verb == "plan" else "1"
    axis = partial(add, type=count, metavar="N")
    axis("--tp", help=f"ranks of tensor parallelism ({rest})")
    axis("--pp", help=f"ranks of the pipeline ({rest})")
    axis("--cp", help=f"ranks of context parallelism ({rest})")
    axis("--ep", help=f"of dp x cp, ranks with different experts ({rest})")
    axis("--dp", help="ranks of data parallelism (what the others leave)")
    zero = "searched" if verb == "plan" else "0"
    add("--zero", type=int, choices=range(4), help=f"0: DDP, 3: FSDP ({zero})")
    axis("--shard", help="HSDP: GPUs that share the states (all)")
    axis("--micro-batch", "--micro-batch-size", help=f"sequences ({rest})")
    add("--recompute", choices=RECOMPUTE, help="in backward (none, or searched)")
    add(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="divide tokens between matrices over tp (yes)",
    )
    add(
        "--interleave",
        "--virtual-stages",
        dest="virtual_stages",
        type=count,
        metavar="V",
        help=f"stages of each rank of pp ({rest})",
    )
    add("--cp-kind", choices=CP_KINDS, help="of context parallelism (ring)")
    kinds = ("none", "optimizer", "all")
    add("--offload", choices=kinds, help="to the host (none if that fits)")
    add("--order", type=order, help=f"of ranks, innermost first ({'-'.join(AXES)})")


# Meaning of the flags


def model_of(args) -> ModelShape:
    """Return the shape for a name, a file, or sizes. Raises: CommandLineError."""
    sizes = {name: getattr(args, name) for name in SIZES if getattr(args, name)}
    if args.mlp:
        sizes["gated"] = args.mlp == "gated"
    file = args.hf_config
    if args.model and Path(args.model).exists():
        file = args.model
    if file:
        try:
            model = models.from_hf_config(file)
        except (OSError, ValueError) as error:
            raise cli.CommandLineError(f"{file}: {error}") from error
    elif args.model or not sizes:
        try:
            model = models.find_model(args.model or "llama2-7b")
        except ValueError as error:
            raise cli.CommandLineError(f"--model {error}; or a config.json") from error
    else:
        missing = [f"--{name}" for name in NEEDED if name not in sizes]
        if missing:
            raise cli.CommandLineError(
                f"a model of sizes lacks {', '.join(missing)}, or give --model"
            )
        usual = {"kv_heads": sizes["heads"], "top_k": 2 if "experts" in sizes else 0}
        model = ModelShape(**usual | sizes)
    model = replace(model, **sizes)
    if not model.head_dim and model.hidden % model.heads:
        raise cli.CommandLineError(
            f"--heads {model.heads} do not divide --hidden {model.hidden}"
        )
    if model.heads % model.kv_heads:
        raise cli.CommandLineError(
            f"--kv-heads {model.kv_heads} do not divide --heads {model.heads}"
        )
    if model.experts and not 0 < model.top_k <= model.experts:
        raise cli.CommandLineError(
            f"--top-k {model.top_k} must be 1 to --experts {model.experts}"
        )
    return model


def cluster_from(args, gpus: int) -> Cluster:
    """Return the named hardware with the given values. Raises: CommandLineError."""
    try:
        gpu = find_gpu(args.gpu)
    except ValueError as error:
        raise cli.CommandLineError(f"--gpu: {error}") from error
    if args.precision not in gpu.tflops and not args.gpu_tflops:
        raise cli.CommandLineError(
            f"--precision {args.precision}: {gpu.name} has {', '.join(gpu.tflops)}"
        )
    given = {
        "memory_gib": args.gpu_memory_gib,
        "hbm_gb_s": args.hbm_gb_s,
        "link_gb_s": args.link_gb_s,
    }
    if args.gpu_tflops:
        given["tflops"] = gpu.tflops | {args.precision: args.gpu_tflops}
    gpu = replace(gpu, **{name: value for name, value in given.items() if value})
    node = args.gpus_per_node or gpu.gpus_per_node
    if gpus > node and gpus % node:
        raise cli.CommandLineError(
            f"--gpus {gpus} must be a multiple of --gpus-per-node {node}"
        )
    rate = None
    if args.network_gb_s:
        rate, unit = args.network_gb_s
        rate = rate / 8 / min(gpus, node) if unit == "Gbit" else rate
    return cluster_of(gpu, gpus_per_node=node, network_gb_s=rate, network=args.network)


def job_of(args, cluster: Cluster, gpus: int) -> TrainingJob:
    """Return the job. The default batch depends on the model's size."""
    model = model_of(args)
    batch = args.global_batch or usual_batch(args, model, gpus)
    parameter, gradient, optimizer = OPTIMIZERS[args.optimizer]
    if args.precision in ("fp32", "tf32"):
        parameter, optimizer = 4, 8
    gradient = args.gradient_bytes or gradient
    attention = args.attention or usual_attention(args.stack, cluster)
    job = TrainingJob(
        model,
        args.seq_len,
        batch,
        args.precision,
        gradient_bytes=gradient,
        parameter_bytes=parameter,
        optimizer_bytes=optimizer,
        attention="stored" if args.no_flash else attention,
        compiled=args.compiled,
        updates_in_backward=args.optimizer_in_backward,
        loss=args.loss,
        stack=args.stack,
        reduce_bytes=gradient,
    )
    if args.adapters:
        return with_adapters(job, args.finetune, args.lora_rank)
    return job


def usual_batch(args, model: ModelShape, gpus: int) -> int:
    """Return the usual number of sequences of a step for a model of this size."""
    weights = models.parameters(model)
    tokens = next(tokens for most, tokens in USUAL_TOKENS if weights < most)
    if args.finetune != "none":
        tokens = TUNING_TOKENS
    batch = max(1, round(tokens / args.seq_len))
    if batch > gpus:
        return batch // gpus * gpus
    return gpus if args.adapters else 2 ** (batch.bit_length() - 1)


def usual_attention(stack: str, cluster: Cluster) -> str:
    """Return a library's kernel: cuDNN in Megatron, else FlashAttention 2."""
    newer = cluster.gpu.family.startswith(("hopper", "blackwell"))
    return "flash3" if stack == "megatron" and newer else "flash2"


def given_layout(args) -> dict:
    """Return the given fields of a Layout."""
    given = {
        name: getattr(args, name) for name in LAYOUT if getattr(args, name) is not None
    }
    if not args.sequence_parallel:
        given["sequence_parallel"] = False
    if args.shard and args.zero is None:
        given["zero"] = 3
    return given


def one_layout(args) -> Layout:
    """Return the layout of `predict`. Axes default to 1, and dp to the other GPUs."""
    given = given_layout(args)
    others = given.get("tp", 1) * given.get("pp", 1) * given.get("cp", 1)
    gpus = args.gpus or others * given.get("dp", 1)
    given.setdefault("dp", max(1, gpus // others))
    layout = Layout(**given)
    if layout.gpus != gpus:
        axes = ("tp", "cp", "pp", "dp")
        product = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in axes)
        raise cli.CommandLineError(
            f"{product} = {layout.gpus} GPUs, but --gpus is {gpus}"
        )
    return layout
