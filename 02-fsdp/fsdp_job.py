"""What fsdp_transformer.py shares with fsdp_memory.py, or does beside FSDP: flags, weights, log."""

from __future__ import annotations

import argparse
import importlib.util
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import shard_tools
from dist_common import cli, measure
from dist_common.models import Transformer, TransformerConfig
from dist_common.runtime import World
from memory_tools import require_memory

KEEPING = ("sharded", "whole", "gathered")
FLOAT8_CAPABILITY = (8, 9)  # of a GPU: Ada, Hopper and later
# Drawing as one process does is a job of the CPU: beyond this, of more than ten minutes.
DRAWN_AS_ONE_PROCESS = 10e9  # weights


def add_flags(parser: cli.ArgumentParser) -> None:
    """Add the flags that say how the model is sharded and what saves memory."""
    add, positive = parser.add_argument, cli.positive_int
    add("--max-grad-norm", type=cli.positive_float, default=1.0, help="clip longer gradients (1)")
    add("--sharding", choices=("full", "grad-op", "hybrid"), default="full", help="(full)")
    add("--shard-group-size", type=positive, help="of hybrid (the ranks of one machine)")
    kinds = "none, full, selective, or k for each k-th block (none)"
    add("--activation-checkpointing", type=parse_kind, default="none", metavar="KIND", help=kinds)
    between = "keep gradients sharded, whole, or whole and weights gathered too (sharded)"
    add("--accumulate", choices=KEEPING, default="sharded", help=f"between micro-batches {between}")
    add("--loss-chunks", type=positive, default=1,
        help="slices of tokens whose logits are computed one after the other (1)")  # fmt: skip
    add("--fused-loss", action="store_true", help="take PyTorch's linear_cross_entropy for it")
    add("--prefetch", type=cli.whole_number, default=0, help="blocks gathered ahead (0)")
    add("--cpu-offload", action="store_true", help="keep shards and optimizer in host memory")
    add("--compile", action="store_true", help="translate each block by torch.compile")
    add("--float8", action="store_true", help="multiply in float8 by torchao, on a GPU")


def parse_kind(text: str) -> str:
    """Parse --activation-checkpointing."""
    if text in ("none", "full", "selective") or (text.isdecimal() and int(text) > 1):
        return text
    allowed = "none, full, selective, or k of at least 2 for each k-th block"
    raise argparse.ArgumentTypeError(f"must be {allowed}, not {text!r}")


def describe(args: argparse.Namespace, config: TransformerConfig) -> str:
    """Return in one line what is trained, and how."""
    return (
        f"{args.preset}: {config.num_parameters():,} weights; {args.sharding} sharding, "
        f"{args.precision}, activation checkpointing {args.activation_checkpointing}"
    )


def describe_size(args: argparse.Namespace) -> str:
    """Return in one line what a prediction is for."""
    batch = f"{args.micro_batch_size} x {args.seq_len:,} tokens, {args.precision}"
    return f"{args.preset} on {args.world_size} ranks, micro-batch {batch}"


def refuse(args, config: TransformerConfig, shards: int, world: World, device) -> None:
    """Stop before anything is allocated when this cannot work. A collective.

    Raises: UsageError with what is missing.
    """
    if args.precision == "16-mixed":
        raise cli.UsageError("--precision 16-mixed needs a loss scaler over shards: use bf16-mixed")
    tokens = args.micro_batch_size * args.seq_len
    if args.loss_chunks > tokens:
        raise cli.UsageError(f"--loss-chunks must be at most the {tokens} tokens of a micro-batch")
    if args.fused_loss and not hasattr(F, "linear_cross_entropy"):
        raise cli.UsageError(
            f"--fused-loss needs F.linear_cross_entropy, of PyTorch 2.14; this is "
            f"{torch.__version__}: use --loss-chunks N"
        )
    if args.float8:
        refuse_float8(device)
    where = torch.device("cpu") if args.cpu_offload else device
    # 4 + 4 + 8 bytes: float32 weight, gradient and Adam's two moments
    needed = 16 * config.num_parameters()
    require_memory(f"--preset {args.preset}", needed, shards, where, world)


def refuse_float8(device: torch.device) -> None:
    """Stop where nothing can multiply in float8. Raises: UsageError with what is missing."""
    if device.type != "cuda":
        raise cli.UsageError("--float8 needs an NVIDIA GPU of Ada, Hopper or later; this is a CPU")
    capability = torch.cuda.get_device_capability(device)
    if capability < FLOAT8_CAPABILITY:
        number = ".".join(map(str, capability))
        raise cli.UsageError(f"--float8 needs a GPU of compute capability 8.9; this has {number}")
    if importlib.util.find_spec("torchao") is None:
        raise cli.UsageError("--float8 needs torchao: pip install torchao")


def shapes_of(config: TransformerConfig) -> dict[str, torch.Tensor]:
    """Return the weights of the whole model by name, without memory behind them."""
    with torch.device("meta"):
        return Transformer(config).state_dict()


@torch.no_grad()
def draw_weights(model: nn.Module, config: TransformerConfig, device, seed: int) -> None:
    """Draw the weights that ddp_training.py draws; each rank keeps its own part of each.

    One weight at a time is in memory whole. A very large model is drawn on the device, with other
    numbers: the same on any number of ranks, too.
    """
    if config.num_parameters() > DRAWN_AS_ONE_PROCESS:
        shard_tools.draw_weights(model, device, seed)
        return
    with torch.device("meta"):
        whole = Transformer(config)
    torch.manual_seed(seed)
    for layer in whole.modules():  # PyTorch draws when it makes a layer, before the model does
        if isinstance(layer, (nn.Embedding, nn.Linear)):
            layer.to_empty(device="cpu").reset_parameters()
            layer.to("meta")
    for name, weight in model.named_parameters():
        drawn = torch.empty(weight.shape)
        whole.draw(name, drawn)
        shard_tools.local(weight).copy_(cut_like(drawn, weight))


def cut_like(whole: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is sharded as `weight` is."""
    if not isinstance(weight, DTensor):
        return whole
    mesh, placements = weight.device_mesh, weight.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


def read_results(run: SimpleNamespace, unread: list[tuple], signals: list[int]) -> bool:
    """Log the steps since the last time; return whether any rank was asked to stop. A collective.

    `unread` has (step, learning rate, sum of losses, tokens, norm) of each. To read a number the
    host waits until the device has computed it, so it is done seldom.
    """
    steps, rates, *columns = zip(*unread, strict=True)
    columns = [[value.to(run.device) for value in column] for column in columns]
    own_sums, tokens, norms = (torch.stack(column).double() for column in columns)
    sums = torch.zeros(len(steps) + 1, dtype=torch.float64, device=run.device)
    sums[:-1] = own_sums
    sums[-1] = len(signals)
    dist.all_reduce(sums)
    rows = torch.stack([sums[:-1] / tokens, tokens, norms], dim=1).tolist()
    time_ms = run.timer.lap(len(steps))
    for step, lr, (run.loss, count, norm) in zip(steps, rates, rows, strict=True):
        cli.stop_unless_finite(step, run.loss, norm)
        run.trained_tokens += int(count)
        speed = count / time_ms * 1e3
        run.log.write(step, loss=run.loss, lr=lr, grad_norm=norm, tokens_per_second=speed)
    run.step_tokens = tokens.mean().item()
    run.report.step(run.step, run.loss, time_ms, *speed_of(run, time_ms))
    return sums[-1].item() > 0


def speed_of(run: SimpleNamespace, step_time_ms: float) -> tuple[float, float | None]:
    """Return tokens/s of all ranks, and the MFU of a device; None where its peak is unknown."""
    speed = run.step_tokens / step_time_ms * 1e3
    flops = speed / dist.get_world_size() * run.flops_per_token
    return speed, measure.mfu(flops, run.device, run.args.precision)


def leave_metrics(run: SimpleNamespace) -> None:
    """Set what results.json says of the run."""
    step_time_ms = run.timer.median_ms()
    speed, mfu = speed_of(run, step_time_ms)
    run.report.metrics |= {
        "final_loss": run.loss,
        "step_time_ms": step_time_ms,
        "tokens_per_second": speed,
        "tokens_per_step": run.step_tokens,
        "mfu": mfu,
        **run.probe.metrics(run.timer),
    }
