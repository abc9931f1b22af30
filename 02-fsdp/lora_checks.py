"""The job of the two adapter lessons and its proofs: one process, formulas, files, merging."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dist_common import cli, data, measure, models, proofs
from dist_common.measure import RING_FACTOR
from dist_common.report import Report
from lora_bytes import FROZEN_BYTES, eight_bit, expected_of, frozen_cost, over_ranks
from lora_layers import (
    LAYERS,
    WEIGHTS_FILE,
    fill,
    gathered,
    layers_of,
    load_adapters,
    loss_of,
    materialize,
    merged,
    put,
    save_adapters,
)
from nf4 import NF4_HALF_GAP, fill_4bit, rounding_of, rows_of
from shard_tools import draw_weights, held_bytes, local

HELD_OUT = 8  # sequences
FULL_LR = 1e-3  # of the base and of full fine-tuning: a faster one blows up rounding errors
SOURCE = "ZeRO, section 5; LoRA, section 4"
HEADERS = ("way", "trained", "parameters", "gradients", "moments", "scattered", "gathered",
           "loss after")  # fmt: skip
# The largest error of a loss. bfloat16 rounds to 2^-9 of a value; on tiny 0.006 was measured.
BF16_LOSS = 0.03  # against float32
EIGHT_BIT_LOSS = 0.01  # against moments in 32 bits; on tiny 0.0003 was measured


def add_flags(parser: cli.ArgumentParser, ways: tuple[str, ...]) -> None:
    """Add the flags that both lessons have."""
    add = parser.add_argument
    positive = cli.positive_int
    add("--preset", choices=models.PRESETS, default="tiny", help="(tiny)")
    add("--ways", nargs="+", choices=ways, default=ways, metavar="WAY",
        help=f"what to train, of {', '.join(ways)} (all)")  # fmt: skip
    add("--lora-rank", type=positive, default=8, help="rows of A, columns of B (8)")
    add("--lora-alpha", type=positive, default=16, help="B A counts alpha / rank times (16)")
    names = f"layers that get an adapter, of {', '.join(LAYERS)} (all)"
    add("--target-modules", nargs="+", choices=LAYERS, default=LAYERS, metavar="NAME", help=names)
    add("--adapter", metavar="DIR", help="start from the adapters in this folder")
    add("--micro-batch-size", type=positive, default=8, help="sequences per rank and step (8)")
    add("--seq-len", type=positive, default=64, help="tokens per sequence (64)")
    add("--pretrain-steps", type=cli.whole_number, default=20, help="that make the base (20)")
    add("--max-steps", type=positive, default=8, help="steps of fine-tuning (8)")
    rate = "of the adapters (0.003); where losses jump, rounding errors grow with them"
    add("--lr", type=cli.positive_float, default=3e-3, help=rate)
    add("--max-grad-norm", type=cli.positive_float, default=1.0, help="clip longer gradients (1)")
    parity = "steps to compare with one process (all; 0 for presets other than tiny)"
    add("--parity-steps", type=cli.whole_number, help=parity)


def settle(args: argparse.Namespace) -> argparse.Namespace:
    """Set --parity-steps where it was not given: the reference holds the whole model."""
    if args.parity_steps is None:
        args.parity_steps = args.max_steps if args.preset == "tiny" else 0
    args.parity_steps = min(args.parity_steps, args.max_steps)
    return args


class AllGatherCounter(measure.CollectiveCounter):
    """Count the bytes that DTensor's own all-gathers take from this rank, too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "all_gather" in func.overloadpacket.__name__:
            self.bytes["full_tensor"] += args[0].nbytes
        return super().__torch_dispatch__(func, types, args, kwargs)


class Lesson:
    """One job for every way to fine-tune: text with swapped capitals, from one base."""

    def __init__(self, report: Report, config, build: Callable, train: Callable) -> None:
        """`build` and `train` are the script's."""
        args = report.args
        self.args, self.config, self.report = args, config, report
        self.build, self.train = build, train
        self.scratch = tempfile.TemporaryDirectory()  # where adapters go without --output-dir
        self.folder = report.output or Path(self.scratch.name)
        self.device, self.ranks = report.device, report.world.world_size
        self.base: dict[str, torch.Tensor] = {}
        self.losses_of_one: dict[str, tuple] = {}
        self.rows: list[list[str]] = []
        self.global_batch = args.micro_batch_size * self.ranks
        needed = self.global_batch * max(args.pretrain_steps, args.max_steps) + HELD_OUT
        text = data.load_text()
        swapped = bytearray(text.numpy().tobytes().swapcase())
        self.plain = data.Sequences(text, args.seq_len, needed)
        self.swapped = data.Sequences(
            torch.frombuffer(swapped, dtype=torch.uint8), args.seq_len, needed
        )
        self.held_out = next(self._batches(self.swapped, 1, needed - HELD_OUT, HELD_OUT))

    def header(self) -> list[str]:
        """Return what is trained, and the batch as a product."""
        lines = [
            f"{self.args.preset}: {self.config.num_parameters():,} weights; global batch "
            f"{self.global_batch} = {self.args.micro_batch_size} per rank x {self.ranks} ranks"
        ]
        if not self.args.parity_steps:
            lines.append("not compared with one process (--parity-steps 0)")
        return lines

    def _batches(self, text, steps: int, first: int, count: int) -> Iterator[list[torch.Tensor]]:
        return data.batches_of(text, steps, self.global_batch, first, count, self.device)

    def batches(self, rank: int) -> list[list[torch.Tensor]]:
        """Return a rank's micro-batch of each step of fine-tuning. Shapes: (B, T) twice."""
        size = self.args.micro_batch_size
        return list(self._batches(self.swapped, self.args.max_steps, rank * size, size))

    def lr(self, way: str) -> float:
        """Return the learning rate of a way."""
        return FULL_LR if way == "full" else self.args.lr

    def make_base(self, model: nn.Module) -> None:
        """Train a sharded model for some steps; its shards stand for a checkpoint on disk."""
        args, size = self.args, self.args.micro_batch_size
        draw_weights(model, self.device, args.seed)
        if args.pretrain_steps:
            first = self.report.world.rank * size
            batches = self._batches(self.plain, args.pretrain_steps, first, size)
            self.train(model, batches, FULL_LR, args.max_grad_norm)
            model.zero_grad()
        before = self.held_out_loss(model)
        self.base = {name: weight.detach() for name, weight in model.named_parameters()}
        self.report.say(f"fine-tuned to swapped capitals; loss before: {before:.4f}")

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module) -> float:
        """Return the loss on sequences that nobody trains on."""
        loss = loss_of(model, self.held_out).item()
        model.reshard()  # without a backward, the outermost unit would stay gathered
        return loss

    @torch.no_grad()
    def logits(self, model: nn.Module) -> torch.Tensor:
        """Return the logits of the held-out sequences. Shape: (B, T, V)."""
        logits = model(self.held_out[0]).float()
        model.reshard()
        return logits

    def fill(self, model: nn.Module, way: str, seed: int | None = None) -> nn.Module:
        """Put the base, and adapters, into a model; a base that is yet to be made stays empty."""
        if self.base:
            fill_4bit(model, self.base)
            fill(model, self.base, self.args.seed if seed is None else seed)
            if self.args.adapter and way != "full":
                load_adapters(Path(self.args.adapter), model)
        return model

    def one_process(self, way: str) -> nn.Module:
        """Return the whole model of a way, unsharded, as it is before fine-tuning. A collective."""
        return self.fill(materialize(self.build(self.config, way, self.args), self.device), way)

    def alone(self, way: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return losses and gradient norms of one process on the global batches, in float32."""
        way = way.removesuffix("-bf16")
        steps = self.args.parity_steps
        if steps and way not in self.losses_of_one:
            model = self.one_process(way)
            batches = self._batches(self.swapped, steps, 0, self.global_batch)
            lr, norm = self.lr(way), self.args.max_grad_norm
            self.losses_of_one[way] = self.train(model, batches, lr, norm)[:2]
        return self.losses_of_one.get(way)

    def prove(self, way: str, model, trained: tuple, expected, sharded: Callable) -> None:
        """Compare what was trained with one process and with the formulas; save, load, merge it.

        `trained` is what the script's `train` returned, `sharded(way, seed)` builds another model.
        """
        losses, norms, optimizer = trained
        self.compare_steps(way, losses, norms, expected)
        self.measure(way, model, optimizer)
        self.compare_gradient(way, model)
        if way.startswith("QLoRA"):
            self.check_4bit(way, model)
        if way != "full":
            fresh = sharded(way, self.args.seed + 1)
            self.check_adapters(way, model, fresh, sharded, self.folder / way.lower())

    def compare_steps(self, way: str, losses, norms, expected) -> None:
        """Compare each step's loss, and the norm that clipping found, with one process."""
        losses = losses / self.ranks
        dist.all_reduce(losses)
        if expected is None:
            return
        steps = self.args.parity_steps
        name = f"{way}: largest error of a loss"
        if way.endswith("bf16"):
            name += ", against float32"
            proofs.same_losses(self.report, losses[:steps], expected[0], BF16_LOSS, name)
        elif eight_bit(self.args):
            name += ", against 32-bit moments"
            proofs.same_losses(self.report, losses[:steps], expected[0], EIGHT_BIT_LOSS, name)
        else:
            proofs.same_losses(self.report, losses[:steps], expected[0], 1e-5, name)
            error = ((norms[:steps] - expected[1]) / expected[1]).abs().max().item()
            self.report.check(f"{way}: relative error of a norm", error, 0, 1e-4, "one process")

    def compare_gradient(self, way: str, model: nn.Module) -> None:
        """Compare the gradient at the trained weights, and its clipping, with one process."""
        if way.endswith("bf16") or not self.args.parity_steps:
            return
        alone = self.one_process(way)
        for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
            put(whole, gathered(mine.detach()))
        batch = next(self._batches(self.swapped, 1, 0, self.global_batch))
        expected = proofs.gradient_of_one_process(alone, [loss_of(alone, batch)])
        model.zero_grad()
        loss_of(model, self.batches(self.report.world.rank)[0]).backward()
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        gradients = [w.grad if w.grad is not None else torch.zeros_like(w) for w in trained]
        own = torch.cat([gathered(gradient).flatten() for gradient in gradients])
        error = ((own - expected).abs().max() / expected.abs().max()).item()
        self.report.check(f"{way}: relative error of a gradient", error, 0, 1e-5, "one process")

    def measure(self, way: str, model: nn.Module, optimizer) -> None:
        """Compare what is trained, held and sent with the formulas; add a row to the table."""
        model.zero_grad()
        with measure.CollectiveCounter() as counter:
            loss_of(model, self.batches(self.report.world.rank)[0]).backward()
        # Handed over were a whole and a rank's part of it: ranks + 1 parts.
        part = self.ranks / (self.ranks + 1)
        scattered = counter.bytes["_reduce_scatter_base_"] * part
        all_gathered = (counter.bytes["_allgather_base_"] + counter.bytes["allgather_"]) * part
        measured = [
            sum(weight.numel() for weight in optimizer.state),
            *held_bytes(model, optimizer),
            round(scattered * RING_FACTOR["reduce_scatter"](self.ranks)),
            round(all_gathered * RING_FACTOR["all_gather"](self.ranks)),
        ]
        expected = expected_of(self.config, way, self.args, self.ranks)
        for (name, right), value in zip(expected.items(), measured, strict=True):
            self.report.check(f"{way}: {name}", value, right, 0, SOURCE)
        if way != "full":
            cost = frozen_cost(model, self.device)
            name = f"{way}: bytes of a frozen weight"
            self.report.check(name, cost, FROZEN_BYTES[way], 0, "size of its type")
        loss = self.held_out_loss(model)
        self.report.metrics[f"loss_{way}"] = loss
        self.report.metrics[f"bytes_{way}"] = dict(zip(expected, measured, strict=True))
        self.rows.append([way, *(f"{value:,}" for value in measured), f"{loss:.4f}"])

    def check_4bit(self, way: str, model: nn.Module) -> None:
        """Check the error of a 4-bit weight, and that the loss is about that of LoRA."""
        name = f"{way}: error of a weight, of its block's largest"
        rounding = rounding_of(model, self.base)
        self.report.check(name, rounding, 0, NF4_HALF_GAP, "QLoRA, appendix E")
        metrics = self.report.metrics
        if "loss_LoRA" in metrics:
            loss = metrics[f"loss_{way}"]
            self.report.check(f"{way}: loss after", loss, metrics["loss_LoRA"], 0.1, "that of LoRA")

    def print_table(self) -> float:
        """Print a row for each way; return the last loss."""
        self.report.table(self.rows, HEADERS)
        return float(self.rows[-1][-1])

    def check_adapters(
        self, way: str, model: nn.Module, fresh: nn.Module, sharded: Callable, folder: Path
    ) -> None:
        """Save what was trained, load it into the `fresh` base, merge it: all must agree."""

        def check(name, *numbers):
            self.report.check(f"{way}: {name}", *numbers)

        changed = 0
        for (name, mine), other in zip(model.named_parameters(), fresh.parameters(), strict=True):
            if "lora_" not in name:
                changed += (local(mine) != local(other)).sum().item()
        changed = int(over_ranks(changed, self.device, dist.ReduceOp.SUM))
        check("frozen weights that changed", changed, 0, 0, "LoRA, section 4.1")

        factor = RING_FACTOR["all_gather"](self.ranks) * self.ranks
        with AllGatherCounter() as counter:
            save_adapters(folder, model, self.args)
        sent = round(sum(counter.bytes.values()) * factor)
        expected = expected_of(self.config, way, self.args, self.ranks)["bytes of gradients"]
        check("bytes sent to save adapters", sent, round(expected * factor), 0, "names and shapes")
        weights = [w.nbytes for name, w in model.named_parameters() if "lora_" in name]
        written = sum(weights)
        if dist.get_rank() == 0:
            written = (folder / WEIGHTS_FILE).stat().st_size
        room = 512 * len(weights)  # for the file's header
        check("bytes of the adapters' file", written, sum(weights), room, "names and shapes")

        with AllGatherCounter() as counter:
            load_adapters(folder, fresh)
        sent = sum(counter.bytes[name] for name in counter.bytes if "broadcast" not in name)
        check("bytes gathered to load adapters", sent, 0, 0, "each rank keeps its rows")
        logits = self.logits(model)
        error = (self.logits(fresh) - logits).abs().max().item()
        check("error of logits, loaded into a fresh base", error, 0, 1e-5, "as trained")
        self.check_merged(check, way, model, fresh, sharded, logits)

    def check_merged(self, check, way: str, model, fresh, sharded: Callable, logits) -> None:
        """Merge into a plain model; compare its logits, and each weight with float64."""
        plain = sharded("full")
        weights = dict(plain.named_parameters())
        layers = dict(layers_of(fresh))
        unlike, undone, bound = 0, 0.0, 0.0
        for name, rows in merged(model, rows_of):
            with torch.no_grad():
                local(weights[name]).copy_(rows)
                layer = layers[name.removesuffix(".weight")]
                if not hasattr(layer, "lora_A"):
                    continue
                W = rows_of(layer.base_layer).double()
                A = gathered(layer.lora_A.weight).double()
                B = local(layer.lora_B.weight).double()
                scale = self.args.lora_alpha / self.args.lora_rank
                right = W + scale * (B @ A)
                # r products and sums, two more roundings of the update, one of the sum.
                r = self.args.lora_rank
                terms = scale * (B.abs() @ A.abs())
                allowed = 2.0**-24 * ((r + 3) * terms + right.abs()) + 1e-12
                unlike += ((rows - right).abs() > allowed).sum().item()
                update = (scale * (B @ A)).float()
                if rows.numel():
                    undone = max(undone, (rows - update - W.float()).abs().max().item())
                    top = (W.abs().max() + terms.max()).item()
                    bound = max(bound, 2.0**-24 * (r + 4) * top)
        unlike = int(over_ranks(unlike, self.device, dist.ReduceOp.SUM))
        undone, bound = (over_ranks(value, self.device) for value in (undone, bound))
        error = (self.logits(plain) - logits).abs().max().item()
        # bfloat16 rounds each layer's output to 2^-9 of it; the merged model computes in float32.
        tolerance = 0.1 if way.endswith("bf16") else 1e-4
        check("error of logits, merged", error, 0, tolerance, "as trained")
        check("merged weights unlike W + alpha/r B A", unlike, 0, 0, "LoRA, section 4.1")
        check("error of W, unmerged", undone, 0, bound, "roundings of 2^-24")
