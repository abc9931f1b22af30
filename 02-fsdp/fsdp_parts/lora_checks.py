"""What the two adapter lessons prove: bytes by formula, steps of one process, files, merges."""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_parts import lora_layers, sharding
from fsdp_parts.fsdp_qlora import NF4_BLOCK, NF4_HALF_GAP, fill_4bit, rounding_of, rows_of
from fsdp_parts.lora_layers import LAYERS, fill, layers_of, load_adapters, save_adapters
from fsdp_parts.sharding import gathered, held_bytes, loss_of, put
from legacy_common import cli, data, measure, models
from legacy_common.lab import proofs, traffic
from legacy_common.lab.traffic import RING_FACTOR
from legacy_common.models import local
from legacy_common.report import Report
from legacy_common.runtime import gather

STATE_BLOCK = 256  # numbers of 8-bit optimizer state that share a scale
NF4 = 0.5 + 4 / NF4_BLOCK  # half a byte, and a float32 scale for a block
FROZEN_BYTES = {"LoRA": 4.0, "LoRA-bf16": 2.0, "QLoRA": NF4, "QLoRA-bf16": NF4}


def frozen_cost(model: nn.Module) -> float:
    """Return the bytes that all ranks hold for a frozen weight of the blocks' linear layers."""
    layers = [getattr(layer, "base_layer", layer) for _, layer in layers_of(model)]
    own = sum(local(weight).nbytes for layer in layers for weight in layer.parameters())
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    return sum(gather(own)) / weights


def expected_of(
    config: models.TransformerConfig, way: str, args: argparse.Namespace, ranks: int
) -> dict[str, int]:
    """Return by formula what is trained, what a rank holds, and what a ring has it send.

    From the shapes of the plain model alone: it has neither adapters nor codes nor shards.
    """

    def part(*shapes) -> int:  # FSDP2 cuts each tensor by rows; parts are filled up to be equal
        return sum(-(-rows // ranks) * columns for rows, columns in shapes)

    with torch.device("meta"):
        plain = models.Transformer(config)
    trained = []
    held = {}  # bytes of each weight
    size = 2 if way.endswith("bf16") else 4  # bytes of a frozen number, and of any gathered one
    for name, weight in plain.named_parameters():
        rows, columns = (*weight.shape, 1)[:2]  # a norm is a column
        layer = name.split(".")[-2]
        held[name] = size * part((rows, columns))
        if way.startswith("QLoRA") and layer in LAYERS:  # codes of half a byte, and scales
            blocks = -(-weight.numel() // NF4_BLOCK)
            held[name] = part((weight.numel() // 2, 1), (blocks, 4))
        if way == "full":
            trained.append((rows, columns))
        elif layer in args.target_modules:
            trained += [(args.lora_rank, columns), (rows, args.lora_rank)]  # A and B
    gradients = 4 * part(*trained)  # float32, whatever the frozen weights are
    moments = 2 * gradients
    if args.optimizer == "adamw8bit":
        moments = bytes_of_8bit_state(trained, ranks, args.min_shard_size)
    frozen = sum(held.values())
    rest = sum(held[name] for name in held if not name.startswith("blocks."))
    in_blocks = frozen - rest + (size * part(*trained) if way != "full" else 0)
    # Blocks are gathered for forward and again for backward; the rest stays in between.
    gathered_bytes = ranks * (2 * in_blocks + rest)
    reduce_scatter = RING_FACTOR["reduce_scatter"](ranks) * ranks
    return {
        "trained weights": sum(rows * columns for rows, columns in trained),
        "bytes of parameters": gradients + (frozen if way != "full" else 0),
        "bytes of gradients": gradients,
        "bytes of Adam moments": moments,
        "bytes sent in reduce-scatters": round(gradients * reduce_scatter),
        "bytes sent in all-gathers": round(gathered_bytes * RING_FACTOR["all_gather"](ranks)),
    }


def bytes_of_8bit_state(shapes: list[tuple[int, int]], ranks: int, min_8bit_size: int) -> int:
    """Return by formula the bytes of AdamW8bit's state on the rank that holds most.

    Two moments: a byte each and a float32 scale for 256, or 4 bytes each for smaller shards.
    """
    held = [0] * ranks
    for rows, columns in shapes:
        part = -(-rows // ranks)
        for rank in range(ranks):  # the last ones may get fewer rows
            size = max(0, min(part, rows - rank * part)) * columns
            in_8_bits = 2 * size + 8 * -(-size // STATE_BLOCK)
            held[rank] += 8 * size if size < min_8bit_size else in_8_bits
    return max(held)


def print_large(report: Report, args: argparse.Namespace, ways: tuple[str, ...]) -> None:
    """Print what a rank of 8 holds of large models, by the formulas that were just checked."""
    rows = []
    for name in ("llama3-8b", "llama3-70b"):
        for way in ways:
            expected = expected_of(models.PRESETS[name], way, args, 8)
            _, parameters, gradients, moments, _, sent = expected.values()
            held = (parameters - gradients, gradients, gradients, moments)  # 4 bytes each: trained
            sizes = (*held, sum(held), sent)
            rows.append([name, way, *(f"{size / measure.GIB:.2f}" for size in sizes)])
    what = "GiB that a rank of 8 holds, and sends in a step's all-gathers"
    report.say(f"by the same formulas, {what}:")
    headers = ("model", "way", "frozen", "trained", "gradients", "moments", "all", "all-gathers")
    report.table(rows, headers, names=2)


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
    add, positive = parser.add_argument, cli.positive_int
    parser.set_defaults(optimizer="adamw")  # fsdp_qlora.py has a flag for it
    add("--preset", choices=models.PRESETS, default="tiny", help="(tiny)")
    add("--ways", nargs="+", choices=ways, default=ways, metavar="WAY",
        help=f"what to train, of {', '.join(ways)} (all)")  # fmt: skip
    add("--lora-rank", type=positive, default=8, help="rows of A, columns of B (8)")
    add("--lora-alpha", type=positive, default=16, help="B A counts alpha / rank times (16)")
    add("--target-modules", nargs="+", choices=LAYERS, default=LAYERS, metavar="NAME",
        help=f"layers that get an adapter, of {', '.join(LAYERS)} (all)")  # fmt: skip
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


class Lesson:
    """One job for every way to fine-tune: text with swapped capitals, from one base."""

    def __init__(self, report: Report, config, *functions: Callable) -> None:
        """`functions` are build, shard, train and merged. Raises: UsageError for unfit flags."""
        args = report.args
        self.args = args
        self.config = config
        self.report = report
        self.build, self.shard, self.train, self.merged = functions
        lora_layers.refuse_large_rank(args, config)
        if args.adapter:
            lora_layers.refuse_unfit(Path(args.adapter), self.build(config, "LoRA", args), args)
        self.scratch = tempfile.TemporaryDirectory()  # where adapters go without --output-dir
        self.folder = report.output or Path(self.scratch.name)
        self.device = report.device
        self.ranks = report.world.world_size
        self.mesh = init_device_mesh(self.device.type, (self.ranks,))
        self.base: dict[str, torch.Tensor] = {}
        self.losses_of_one: dict[str, tuple] = {}
        self.rows: list[list[str]] = []
        self.global_batch = args.micro_batch_size * self.ranks
        needed = self.global_batch * max(args.pretrain_steps, args.max_steps) + HELD_OUT
        text = data.load_text()
        swapped = bytearray(text.numpy().tobytes().swapcase())
        swapped = torch.frombuffer(swapped, dtype=torch.uint8)
        self.plain = data.Sequences(text, args.seq_len, needed)
        self.swapped = data.Sequences(swapped, args.seq_len, needed)
        self.held_out = next(self._batches(self.swapped, 1, needed - HELD_OUT, HELD_OUT))

    def header(self) -> list[str]:
        """Return what is trained, and the batch as a product."""
        identity = (
            f"{self.args.preset}: {self.config.num_parameters():,} weights; global batch "
            f"{self.global_batch} = {self.args.micro_batch_size} per rank x {self.ranks} ranks"
        )
        not_compared = "not compared with one process (--parity-steps 0)"
        return [identity] if self.args.parity_steps else [identity, not_compared]

    def _batches(self, text, steps: int, first: int, count: int) -> Iterator[list[torch.Tensor]]:
        return data.batches_of(text, steps, self.global_batch, first, count, self.device)

    def batches(self, rank: int) -> list[list[torch.Tensor]]:
        """Return a rank's micro-batch of each step of fine-tuning. Shapes: (B, T) twice."""
        size = self.args.micro_batch_size
        return list(self._batches(self.swapped, self.args.max_steps, rank * size, size))

    def lr(self, way: str) -> float:
        """Return the learning rate of a way."""
        return FULL_LR if way == "full" else self.args.lr

    def make_base(self) -> None:
        """Train the whole model for some steps; its shards stand for a checkpoint on disk."""
        args = self.args
        size = args.micro_batch_size
        model = self.sharded("full", args.seed)
        sharding.draw_weights(model, self.device, args.seed)
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
        logits = self.logits(model).flatten(0, 1)
        return F.cross_entropy(logits, self.held_out[1].flatten()).item()

    @torch.no_grad()
    def logits(self, model: nn.Module) -> torch.Tensor:
        """Return the logits of the held-out sequences. Shape: (B, T, V)."""
        logits = model(self.held_out[0]).float()
        model.reshard()  # without a backward, the outermost unit would stay gathered
        return logits

    def sharded(self, way: str, seed: int) -> nn.Module:
        """Return the model of a way before fine-tuning, this rank's part; `seed` draws adapters."""
        model = self.shard(self.build(self.config, way, self.args), self.mesh, way)
        return self.filled(model, way, seed)

    def one_process(self, way: str) -> nn.Module:
        """Return the whole model of a way, unsharded, as it is before fine-tuning. A collective."""
        return self.filled(self.build(self.config, way, self.args), way, self.args.seed)

    def filled(self, model: nn.Module, way: str, seed: int) -> nn.Module:
        """Put the base, and adapters, into a model; a base that is yet to be made stays empty."""
        sharding.materialize(model, self.device)
        if self.base:
            fill_4bit(model, self.base)
            fill(model, self.base, seed)
            if self.args.adapter and way != "full":
                load_adapters(Path(self.args.adapter), model)
        return model

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

    def prove(self, way: str, model, trained: tuple, expected) -> None:
        """Compare what `train` returned with one process and the formulas; save, load, merge it."""
        losses, norms, optimizer = trained
        formulas = expected_of(self.config, way, self.args, self.ranks)
        if expected is not None:
            self.compare_steps(way, losses, norms, *expected)
        self.measure(way, model, optimizer, formulas)
        if expected is not None and not way.endswith("bf16"):
            self.compare_gradient(way, model)
        if way.startswith("QLoRA"):
            self.check_4bit(way, model)
        if way != "full":
            sent = formulas["bytes sent in reduce-scatters"]
            self.check_adapters(way, model, self.folder / way.lower(), sent)

    def check(self, way: str, name: str, *numbers) -> None:
        """Add a check of a way: measured, expected, tolerance, source."""
        self.report.check(f"{way}: {name}", *numbers)

    def compare_steps(self, way: str, losses, norms, right_losses, right_norms) -> None:
        """Compare each step's loss, and the norm that clipping found, with one process."""
        losses = losses / self.ranks
        dist.all_reduce(losses)
        steps = self.args.parity_steps
        name, tolerance = f"{way}: largest error of a loss", 1e-5
        if way.endswith("bf16"):
            name, tolerance = f"{name}, against float32", BF16_LOSS
        elif self.args.optimizer == "adamw8bit":
            name, tolerance = f"{name}, against 32-bit moments", EIGHT_BIT_LOSS
        else:
            error = (norms[:steps] / right_norms - 1).abs().max().item()
            self.check(way, "relative error of a norm", error, 0, 1e-4, "one process")
        proofs.same_losses(self.report, losses[:steps], right_losses, tolerance, name)

    def compare_gradient(self, way: str, model: nn.Module) -> None:
        """Compare the gradient at the trained weights, and its clipping, with one process."""
        alone = self.one_process(way)
        for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
            put(whole, gathered(mine.detach()))
        batch = next(self._batches(self.swapped, 1, 0, self.global_batch))
        expected = proofs.gradient_of_one_process(alone, [loss_of(alone, batch)])
        model.zero_grad()
        loss_of(model, self.batches(self.report.world.rank)[0]).backward()
        name = f"{way}: relative error of a gradient"
        sharding.same_gradient(self.report, name, model, expected, 1e-5)

    def measure(self, way: str, model: nn.Module, optimizer, formulas: dict[str, int]) -> None:
        """Compare what is trained, held and sent with the formulas; add a row to the table."""
        model.zero_grad()
        with traffic.TrafficCounter() as counter:
            loss_of(model, self.batches(self.report.world.rank)[0]).backward()
        sent = counter.by_kind()
        measured = [
            sum(weight.numel() for weight in optimizer.state),
            *held_bytes(model.parameters(), optimizer),
            *(sent.get(kind, (0, 0))[1] for kind in ("reduce_scatter", "all_gather")),
        ]
        for (name, right), value in zip(formulas.items(), measured, strict=True):
            self.check(way, name, value, right, 0, SOURCE)
        if way != "full":
            cost = frozen_cost(model), FROZEN_BYTES[way]
            self.check(way, "bytes of a frozen weight", *cost, 0, "size of its type")
        loss = self.held_out_loss(model)
        self.report.metrics[f"loss_{way}"] = loss
        self.rows.append([way, *(f"{value:,}" for value in measured), f"{loss:.4f}"])

    def check_4bit(self, way: str, model: nn.Module) -> None:
        """Check the error of a 4-bit weight, and that the loss is about that of LoRA."""
        metrics = self.report.metrics
        error = rounding_of(model, self.base), 0, NF4_HALF_GAP
        self.check(way, "error of a weight, of its block's largest", *error, "QLoRA, appendix E")
        if "loss_LoRA" in metrics:
            losses = metrics[f"loss_{way}"], metrics["loss_LoRA"]
            self.check(way, "loss after", *losses, 0.1, "that of LoRA")

    def print_table(self) -> float:
        """Print a row for each way; return the last loss."""
        self.report.table(self.rows, HEADERS)
        return float(self.rows[-1][-1])

    def check_adapters(self, way: str, model: nn.Module, folder: Path, expected_sent: int) -> None:
        """Save what was trained, load it into a fresh base, merge it: all must agree."""
        fresh = self.sharded(way, self.args.seed + 1)
        weights = zip(model.named_parameters(), fresh.parameters(), strict=True)
        changed = sum(
            (local(mine) != local(other)).sum().item()
            for (name, mine), other in weights
            if "lora_" not in name
        )
        changed = sum(gather(changed))
        self.check(way, "frozen weights that changed", changed, 0, 0, "LoRA, section 4.1")

        with traffic.TrafficCounter() as counter:
            save_adapters(folder, model, self.args)
        sent = sum(size for _, size in counter.by_kind().values())
        source = "names and shapes"
        self.check(way, "bytes sent to save adapters", sent, expected_sent, 0, source)
        sizes = [w.nbytes for name, w in model.named_parameters() if "lora_" in name]
        file = folder / lora_layers.WEIGHTS_FILE
        written = file.stat().st_size if dist.get_rank() == 0 else sum(sizes)
        room = 512 * len(sizes)  # for the file's header
        self.check(way, "bytes of the adapters' file", written, sum(sizes), room, source)

        with traffic.TrafficCounter() as counter:
            load_adapters(folder, fresh)
        sent = sum(size for kind, size in counter.nbytes.items() if kind != "broadcast")
        self.check(way, "bytes gathered to load adapters", sent, 0, 0, "each rank keeps its rows")
        logits = self.logits(model)
        error = (self.logits(fresh) - logits).abs().max().item()
        name = "error of logits, loaded into a fresh base"
        self.check(way, name, error, 0, 1e-5, "as trained")
        self.check_merged(way, model, fresh, logits)

    @torch.no_grad()
    def check_merged(self, way: str, model, fresh, logits) -> None:
        """Merge into a plain model; compare its logits, and each weight with float64."""
        plain = self.sharded("full", self.args.seed)
        layers = dict(layers_of(fresh))
        unlike = 0
        scale = self.args.lora_alpha / self.args.lora_rank
        for name, rows in self.merged(model, rows_of):
            local(plain.get_parameter(name)).copy_(rows)
            layer = layers[name.removesuffix(".weight")]
            if not hasattr(layer, "lora_A"):
                continue
            A = gathered(layer.lora_A.weight).double()
            B = local(layer.lora_B.weight).double()
            right = rows_of(layer.base_layer).double() + scale * (B @ A)
            # r products and sums, two more roundings of the update, one of the sum.
            terms = (self.args.lora_rank + 3) * scale * (B.abs() @ A.abs())
            allowed = 2.0**-24 * (terms + right.abs()) + 1e-12
            unlike += ((rows - right).abs() > allowed).sum().item()
        error = (self.logits(plain) - logits).abs().max().item()
        # bfloat16 rounds each layer's output to 2^-9 of it; the merged model computes in float32.
        tolerance = 0.1 if way.endswith("bf16") else 1e-4
        self.check(way, "error of logits, merged", error, 0, tolerance, "as trained")
        name = "merged weights unlike W + alpha/r B A"
        self.check(way, name, sum(gather(unlike)), 0, 0, "LoRA, section 4.1")
