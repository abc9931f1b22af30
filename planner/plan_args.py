"""The flags of `plan.py`, and the job, cluster and layout that they mean.

A flag that contradicts another one, or divides nothing, is a UsageError: one line, exit code 2.
"""

from __future__ import annotations

import argparse
import difflib
from dataclasses import replace
from functools import partial

from planner import cli, models
from planner.hardware import GPUS, Cluster, find_gpu
from planner.job import AXES, CP_KINDS, RECOMPUTE, Job, Layout, Model
from planner.stacks import STACKS

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "top_k")
NEEDED = ("layers", "hidden", "heads", "ffn", "vocab")
LAYOUT = ("tp", "pp", "dp", "cp", "ep", "zero", "shard", "micro_batch", "recompute",
          "virtual_stages", "cp_kind", "offload", "order")  # fmt: skip
USUAL_TOKENS = 4 * 2**20  # of a step, where --global-batch is not given
LORA_RANK = 16
TUNING_TOKENS = 2**18


def amount(text: str) -> float:
    """Parse 300B, 15T or 1.5e12."""
    scale = {"M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1)
    try:
        value = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        value = 0
    if not 0 < value < 1e18:
        raise argparse.ArgumentTypeError(f"must be a number like 300B or 15T, not {text!r}")
    return value


def order(text: str) -> tuple[str, ...]:
    """Parse the order of ranks: each axis once, innermost first."""
    axes = tuple(text.split("-"))
    if sorted(axes) != sorted(AXES):
        raise argparse.ArgumentTypeError(f"must name {', '.join(AXES)} once each, not {text!r}")
    return axes


def make_parser() -> cli.Parser:
    """Return the parser of the verbs plan and predict."""
    parser = cli.Parser(prog="plan.py", description="Plan a training job.")
    verbs = parser.add_subparsers(dest="verb", metavar="{plan,predict}", required=True)
    for verb, text in (
        ("plan", "search all layouts; print the best five and how to start the first"),
        ("predict", "what one layout holds and takes"),
    ):
        sub = verbs.add_parser(verb, help=text, description=text, allow_abbrev=False)
        add_job_flags(sub)
        add_hardware_flags(sub)
        add_layout_flags(sub, verb)
        add, rate = sub.add_argument, cli.positive_float
        add("--tokens", type=amount, help="to train on, as 300B or 15T: days")
        add("--dollars-per-gpu-hour", type=rate, metavar="PRICE", help="with --tokens: dollars")
        add("--explain", action="store_true", help="put numbers into each formula, with its source")
        add("--json", action="store_true", help="print one JSON object, bytes and seconds")
    return parser


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse what follows the script's name: a verb and its flags."""
    args = make_parser().parse_args(argv)
    if args.lora_rank and args.finetune not in ("lora", "qlora"):
        raise cli.UsageError("--lora-rank needs --finetune lora or qlora")
    args.lora_rank = args.lora_rank or LORA_RANK
    return args


def add_job_flags(parser: cli.Parser) -> None:
    add, count = parser.add_argument, cli.positive_int
    source = parser.add_mutually_exclusive_group()
    known = ", ".join(models.MODELS)
    source.add_argument("--model", metavar="PRESET", help=f"one of {known}")
    source.add_argument("--hf-config", metavar="FILE", help="a Hugging Face config.json")
    size = partial(add, type=count, metavar="N")
    size("--layers", help="with the next four: a model, or a preset's changed")
    size("--hidden", help="width between blocks")
    size("--heads", help="of queries")
    size("--ffn", help="inner width of the feed-forward")
    size("--vocab", help="words of the vocabulary")
    size("--kv-heads", help="of keys and values (--heads)")
    size("--experts", help="of each layer (0: dense)")
    size("--top-k", help="experts that compute a token (2)")
    add("--mlp", choices=("gated", "plain"), help="SwiGLU's three matrices, or GPT's two (gated)")
    add("--seq-len", type=count, default=4096, help="tokens of a sequence (4096)")
    add("--global-batch", "--global-batch-size", type=count, metavar="N",
        help="sequences of a step on all GPUs (4M tokens; 262,144 to fine-tune)")  # fmt: skip
    add("--precision", choices=("bf16", "fp16", "fp8", "fp32", "tf32"), default="bf16",
        help="of matrix products (bf16)")  # fmt: skip
    add("--gradient-bytes", type=int, choices=(2, 4), default=4, help="of a gradient (4)")
    add("--no-flash", action="store_true", help="attention that stores its scores")
    add("--compiled", action="store_true", help="blocks under torch.compile")
    add("--stack", choices=STACKS, default="torch", help="whose code runs: what it keeps (torch)")
    add("--finetune", choices=("none", "full", "lora", "qlora"), default="none",
        help="all weights, or adapters beside frozen ones of 16 or 4 bits (none)")  # fmt: skip
    add("--lora-rank", type=count, metavar="N",
        help="of adapters on all matrices, with experts on attention's alone (16)")  # fmt: skip


def add_hardware_flags(parser: cli.Parser) -> None:
    add, count, rate = parser.add_argument, cli.positive_int, cli.positive_float
    add("--gpu", default="h100", metavar="NAME", help=f"{', '.join(GPUS)} (h100)")
    add("--gpus", type=count, help="GPUs of the job (8, or those of the axes)")
    add("--gpus-per-node", type=count, help="that fast links join (the GPU's usual: 8)")
    add("--gpu-memory-gib", type=rate, metavar="GIB", help="instead of the data sheet's")
    add("--gpu-tflops", type=rate, metavar="TFLOPS", help="peak of --precision, dense")
    add("--hbm-gb-s", type=rate, metavar="GB_S", help="of the GPU's memory")
    add("--link-gb-s", type=rate, metavar="GB_S", help="of a GPU to its node, each way")
    add("--network-gb-s", type=rate, metavar="GB_S", help="of a GPU's network card, each way")


def add_layout_flags(parser: cli.Parser, verb: str) -> None:
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
    add("--shard", type=count, metavar="GPUS", help="HSDP: GPUs that share the states (all)")
    add("--micro-batch", "--micro-batch-size", type=count, metavar="N", help=f"sequences ({rest})")
    add("--recompute", choices=RECOMPUTE, help="in backward (none, or searched)")
    add("--sequence-parallel", action=argparse.BooleanOptionalAction, default=True,
        help="tokens between matrices cut over tp (yes)")  # fmt: skip
    add("--interleave", "--virtual-stages", dest="virtual_stages", type=count, metavar="V",
        help=f"stages of each rank of pp ({rest})")  # fmt: skip
    add("--cp-kind", choices=CP_KINDS, help="of context parallelism (ring, or searched)")
    add("--offload", choices=("none", "optimizer", "all"), help="to the host (none if that fits)")
    add("--order", type=order, help=f"of ranks, innermost first ({'-'.join(AXES)})")


# what is asked


def model_of(args) -> Model:
    """Return the model of a preset, a file, or sizes. Raises: UsageError."""
    own = {name: getattr(args, name) for name in SIZES if getattr(args, name)}
    if args.mlp:
        own["gated"] = args.mlp == "gated"
    if args.hf_config:
        try:
            model = models.from_hf_config(args.hf_config)
        except (OSError, ValueError) as error:
            raise cli.UsageError(f"--hf-config {args.hf_config}: {error}") from error
    elif args.model or not own:
        name = args.model or "llama2-7b"
        if name not in models.MODELS:
            near = [known for known in models.MODELS if name.lower() in known]
            near = near or difflib.get_close_matches(name.lower(), models.MODELS, 1)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            known = f"{hint}known are {', '.join(models.MODELS)}; or --hf-config FILE"
            raise cli.UsageError(f"--model {name} is unknown; {known}")
        model = models.MODELS[name]
    else:
        missing = [f"--{name}" for name in NEEDED if name not in own]
        if missing:
            raise cli.UsageError(f"a model of sizes lacks {', '.join(missing)}, or give --model")
        return checked(Model(**({"kv_heads": own["heads"], "top_k": 2 * ("experts" in own)} | own)))
    return checked(replace(model, **own) if own else model)


def checked(model: Model) -> Model:
    """Return a model whose heads make its width. Raises: UsageError."""
    if not model.head_dim and model.hidden % model.heads:
        raise cli.UsageError(f"--heads {model.heads} do not divide --hidden {model.hidden}")
    if model.heads % model.kv_heads:
        raise cli.UsageError(f"--kv-heads {model.kv_heads} do not divide --heads {model.heads}")
    if model.experts and not 0 < model.top_k <= model.experts:
        raise cli.UsageError(f"--top-k {model.top_k} must be 1 to --experts {model.experts}")
    return model


def cluster_of(args, gpus: int) -> Cluster:
    """Return the hardware of a preset with own values. Raises: UsageError."""
    try:
        gpu = find_gpu(args.gpu)
    except ValueError as error:
        raise cli.UsageError(f"--gpu: {error}") from error
    if args.precision not in gpu.tflops and not args.gpu_tflops:
        has = ", ".join(gpu.tflops)
        raise cli.UsageError(f"--precision {args.precision}: {gpu.name} has {has}")
    own = {
        "memory_gib": args.gpu_memory_gib,
        "hbm_gb_s": args.hbm_gb_s,
        "link_gb_s": args.link_gb_s,
    }
    if args.gpu_tflops:
        own["tflops"] = {**gpu.tflops, args.precision: args.gpu_tflops}
    gpu = replace(gpu, **{name: value for name, value in own.items() if value})
    node = args.gpus_per_node or gpu.gpus_per_node
    if gpus > node and gpus % node:
        raise cli.UsageError(f"--gpus {gpus} must be a multiple of --gpus-per-node {node}")
    return Cluster(gpu, node, args.network_gb_s or gpu.network_gb_s)


def job_of(args, gpus: int) -> Job:
    """Return the job; a batch that is not given has about four million tokens."""
    batch = args.global_batch
    if not batch:
        usual = TUNING_TOKENS if args.finetune != "none" else USUAL_TOKENS
        batch = max(1, round(usual / args.seq_len))
        batch = max(1, batch // gpus) * gpus if batch > gpus else 2 ** (batch.bit_length() - 1)
        if args.finetune in ("lora", "qlora"):
            batch = max(batch, gpus)  # replicas alone: each takes a sequence
    more = {"flash": not args.no_flash, "compiled": args.compiled, "stack": args.stack}
    more["reduce_bytes"] = args.gradient_bytes
    bytes_of = 4 if args.precision in ("fp32", "tf32") else 2
    if bytes_of == 4:
        more |= {"parameter_bytes": 4, "optimizer_bytes": 8}
    return Job(model_of(args), args.seq_len, batch, args.precision, args.gradient_bytes, **more)


def given_layout(args) -> dict:
    """Return the fields of a Layout that were given."""
    found = {name: getattr(args, name) for name in LAYOUT if getattr(args, name) is not None}
    if not args.sequence_parallel:
        found["sequence_parallel"] = False
    return found


def one_layout(args) -> Layout:
    """Return the layout of `predict`: what is not given is 1; dp takes the other GPUs."""
    given = given_layout(args)
    axes = [given.get(axis, 1) for axis in ("tp", "pp", "cp")]
    others = axes[0] * axes[1] * axes[2]
    gpus = args.gpus or others * given.get("dp", 1)
    given.setdefault("dp", max(1, gpus // others))
    layout = Layout(**given)
    if layout.gpus != gpus:
        product = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in ("tp", "cp", "pp", "dp"))
        raise cli.UsageError(f"{product} = {layout.gpus} GPUs, but --gpus is {gpus}")
    return layout
