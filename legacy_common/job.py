"""The one job of every template, as one loop: its flags, data, schedule, and place in them.

A generator of steps, no Trainer: forward, backward, clipping and the optimizer stay in the script.
"""

import argparse
import contextlib
import functools
import json
import math
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from legacy_common import checkpoint, data, measure, models, tokens
from legacy_common.cli import (
    ArgumentParser,
    UsageError,
    node,
    positive_float,
    positive_int,
    whole_number,
)
from legacy_common.models import TransformerConfig
from legacy_common.report import Report
from legacy_common.runtime import gather
from legacy_common.stores import AnyPath, Remote, sizes_in


def add_flags(parser: ArgumentParser, presets: Collection[str], folders: bool = False) -> None:
    """Add the flags of the one job, those of its loop, and of `folders` of Hugging Face's."""
    add_task_flags(parser, presets, folders)
    add_loop_flags(parser, sharded=folders)  # whoever reads folders into shards saves shards
    add = parser.add_argument
    add("--tokens", nargs="+", metavar="FOLDER[=WEIGHT]",
        help="train on folders of make_tokens.py (weights: as large as each is)")  # fmt: skip
    add("--document-attention", action="store_true",
        help="with --tokens: no token attends to another document's")  # fmt: skip
    if folders:
        add("--export-to", metavar="FOLDER",
            help="write the trained weights for transformers, to an empty folder")  # fmt: skip


def add_task_flags(
    parser: ArgumentParser, presets: Collection[str], init_from: bool = False
) -> None:
    """Add the flags that say what is trained: model, data, order, schedule."""
    add, positive = parser.add_argument, positive_int
    model = parser.add_mutually_exclusive_group()
    if init_from:
        model.add_argument("--init-from", metavar="FOLDER",
            help="take shape and weights of a Hugging Face folder")  # fmt: skip
    model.add_argument("--preset", type=functools.partial(models.preset_or_file, presets),
        action=Shape, default="tiny", metavar="NAME",
        help=f"{', '.join(presets)}, or a config.json of a Llama (tiny)")  # fmt: skip
    add("--text-file", help="train on its bytes (dist_common/text.txt)")
    add("--seq-len", type=positive, default=128, help="tokens per sequence (128)")
    add("--micro-batch-size", type=positive, default=8, help="sequences per rank at a time (8)")
    add("--grad-accum-steps", type=positive, help="micro-batches per rank and step (1)")
    add("--global-batch-size", type=positive, help="sequences per step: sets --grad-accum-steps")
    add("--max-steps", type=positive, default=60, help="optimizer steps of the whole run (60)")
    add("--lr", type=positive_float, default=2e-3, help="peak learning rate of AdamW (0.002)")
    add("--warmup-steps", type=whole_number, default=10, help="steps of linear warmup (10)")
    add_precision(parser, ("32-true", "bf16-mixed", "16-mixed"))


class Shape(argparse.Action):
    """Keep --preset, and in `args.shape` what a file says: a file that changes is another job."""

    def __call__(self, parser, args, value, option_string=None):
        args.preset = value
        vars(args).pop("shape", None)
        if Path(value).suffix == ".json":
            args.shape = models.facts_of(models.shape_of(value))


def add_precision(parser: ArgumentParser, choices: Collection[str]) -> None:
    """Add --precision. Where it is not given, `Report` takes what the device computes best in."""
    parser.add_argument("--precision", choices=choices,
        help="32-true: no TF32 either (bf16-mixed on a GPU that has it, else 32-true)")  # fmt: skip


def add_loop_flags(parser: ArgumentParser, sharded: bool = False) -> None:
    """Add the flags that say how often the loop looks, evaluates and saves; of `sharded` saves."""
    add, whole = parser.add_argument, whole_number
    add("--max-grad-norm", type=positive_float, default=1.0, help="clip longer gradients (1)")
    add("--log-every", type=positive_int, default=10,
        help="most steps between two looks at losses and stop signals (10)")  # fmt: skip
    add("--eval-every", type=whole, default=30, help="steps, or 0 for never (30)")
    add("--save-every", type=whole, default=20,
        help="steps, with --output-dir; 0 for never (20)")  # fmt: skip
    add("--checkpoints", type=functools.partial(Remote, flag="--checkpoints"), metavar="URL",
        help="save to an object store, as s3://BUCKET/RUN (a folder of --output-dir)")  # fmt: skip
    if sharded:
        add("--async-save", action="store_true",
            help="train on while shards are written, from a copy in host memory")  # fmt: skip
    add("--num-workers", type=whole, default=0, help="processes per rank that load data (0)")
    add("--logger", choices=measure.LOGGERS, help="shows what --output-dir's metrics.jsonl has")
    add("--profile", type=step_range, metavar="FIRST-LAST",
        help="trace these steps to --output-dir; a GPU's memory too")  # fmt: skip
    add("--parity-steps", type=whole,
        help="steps to compare with one process (0 for presets other than tiny)")  # fmt: skip


def parse(parser: ArgumentParser, parity_steps: int = 1) -> argparse.Namespace:
    """Parse, and set what depends on other flags. Raises: UsageError for a contradiction."""
    args = parser.parse_args()
    if args.parity_steps is None and "preset" in args:  # without one the script's proofs settle it
        small = args.preset in ("tiny", "tiny-moe") and not getattr(args, "init_from", None)
        args.parity_steps = parity_steps if small else 0
    for flag in ("logger", "profile", "checkpoints"):
        if getattr(args, flag) and not args.output_dir:
            parser.error(f"--{flag} needs --output-dir, the folder to write to")
    return args


def step_range(text: str) -> tuple[int, int]:
    """Parse 5-7, or 5 for one step."""
    first, dash, last = text.partition("-")
    with contextlib.suppress(argparse.ArgumentTypeError):
        steps = positive_int(first), positive_int(last if dash else first)
        if steps[0] <= steps[1]:
            return steps
    raise argparse.ArgumentTypeError(f"must be steps like 5-7 or 5, not {text!r}")


def lr_at(step: int, args: argparse.Namespace) -> float:
    """Return the job's learning rate in a step, counted from 1: warmup, then cosine to a tenth."""
    if step <= args.warmup_steps:
        return args.lr * step / args.warmup_steps
    done = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@dataclass
class Step:
    """One step of the job: what the script gets, and what it leaves with `record`."""

    number: int  # from 1
    lr: float  # by the schedule
    micro_batches: list[Sequence[torch.Tensor]]  # of this rank: (inputs, targets), (B, T) each
    loss_sum: torch.Tensor | None = None  # this rank's; those of all ranks add up to the batch's
    tokens: torch.Tensor | None = None  # of the global batch: all ranks have the same number
    norm: torch.Tensor | float | None = None  # of the whole gradient; None where it is not known

    def record(self, loss_sum, tokens, norm, lr: float | None = None) -> None:
        """Keep a step's results, still on the device: the loop reads them when it must."""
        self.loss_sum, self.tokens, self.norm = loss_sum, tokens, norm
        self.lr = self.lr if lr is None else lr


@dataclass
class Job:
    """What a run is, and where it is. `store` says how its state is written and read."""

    args: argparse.Namespace
    report: Report
    train_set: data.Sequences
    test_set: data.Sequences | None
    checksum: str | None  # of the text
    dp_rank: int = 0  # which samples are this rank's: among the ranks that differ in samples
    dp_ranks: int = 1
    flops_per_token: float = math.nan  # without it there is no MFU
    store: checkpoint.Store | None = None
    sampler: data.ShardedSampler | tokens.Mixture | None = None  # of the text, unless it is given

    step: int = 0  # the one that is being taken, or the last one
    trained_tokens: int = 0  # from step 1
    losses: list[float] = field(default_factory=list)  # of this start
    norms: list[float] = field(default_factory=list)
    test_loss: float | None = None
    test_tokens: int = 0  # that it was measured on
    step_tokens: float = math.nan
    stopped: bool = False  # by a signal
    found: tuple[AnyPath, dict[str, Any]] | None = None  # the checkpoint to resume from
    rng: dict[str, Any] | None = None  # this rank's random state in it

    def __post_init__(self) -> None:
        args, ranks = self.args, dist.get_world_size()
        url = getattr(args, "checkpoints", None)
        if url and not args.resume and self.report.world.is_rank0 and sizes_in(url):
            full = f"--checkpoints {url} is not empty: name another folder"
            raise UsageError(f"{full}, or add --resume to continue the run in it")
        self.checkpoints = url or (self.report.output or Path()) / "checkpoints"
        self.device = self.report.device
        settings = checkpoint.settings_of(args, ranks, self.checksum)
        if self.sampler:  # a mixture, which knows its sources by their checksums
            shares = dict(zip(self.sampler.names, self.sampler.weights.values(), strict=True))
            settings |= {"text_file": None, "tokens": shares}
            settings["document_attention"] = args.document_attention
        self.sampler = self.sampler or data.ShardedSampler(
            len(self.train_set), self.dp_rank, self.dp_ranks, args.seed
        )
        self.settings = json.loads(json.dumps(settings, default=str))  # as a manifest has them
        pinned = self.device.type == "cuda"  # a GPU fetches from such memory while it computes
        self.batches = data.job_batches(
            self.train_set, self.sampler, args, args.num_workers, pinned
        )
        self.timer = measure.StepTimer(self.device, warmup=max(3, args.log_every))
        self.memory_before = measure.memory_in_use(self.device)  # of the model, if it is made later
        self.log: measure.StepLog | None = None
        self.signals: list[int] = []
        self.saving: Future | None = None  # in the background

    @property
    def done(self) -> bool:
        """Say whether there is nothing left to train, as after a resume."""
        return self.step >= self.args.max_steps

    @property
    def summary(self) -> str:
        """Say how the run ended."""
        saved = "saved" if self.report.output and self.args.save_every else "not saved"
        end = "trained to the end" if self.done else f"asked to stop, {saved}"
        loss = self.losses[-1] if self.losses else math.nan
        return f"loss {loss:.4f} after step {self.step}, {end}"

    def fitted(self, config: TransformerConfig) -> TransformerConfig:
        """Return a model's shape as the data needs it: with the token that ends a document.

        Raises: UsageError for tokens that its vocabulary does not have.
        """
        args, train_set = self.args, self.train_set
        if config.vocab_size < train_set.vocab_size:
            flag = f"--preset {args.preset}" if args.preset else f"--init-from {args.init_from}"
            few = f"{flag}: vocab_size is {config.vocab_size}: {train_set.token_kind}"
            raise UsageError(f"{few}, which takes {train_set.vocab_size}")
        return replace(config, document_end=train_set.document_end)

    def find(self) -> bool:
        """Choose the newest checkpoint and take its step; say what has changed. A collective."""
        self.found = checkpoint.find(self.checkpoints, self.report, self.store)
        if self.found is None:
            return False
        path, facts = self.found
        if "trained_tokens" not in facts:
            raise UsageError(f"{path} was written by an older version of this guide: start anew")
        then, now = (each.get("document_attention") for each in (facts["settings"], self.settings))
        if then != now:
            other = "its steps had other masks and targets, and of those is its count of tokens"
            raise UsageError(f"--document-attention is {now} here, {then} in {path}: {other}")
        changes = checkpoint.changed_settings(facts["settings"], self.settings)
        self.step = facts["step"]
        self.sampler.load_state_dict(facts["sampler"])
        self.trained_tokens = facts["trained_tokens"]
        self.report.say(f"at step {self.step}, {self.sampler.place}; {changes}")
        return True

    def load(self) -> None:
        """Read the state that `find` chose into the model and the rest. A collective."""
        self.rng = checkpoint.load(self.found[0], self.store)

    def resume(self) -> bool:
        """Continue from the newest checkpoint if --resume is given and there is one."""
        found = self.args.resume and self.find()
        if found:
            self.load()
        return found

    def save(self) -> None:
        """Write a checkpoint of all that the next step depends on, or begin to. A collective."""
        self.await_save()
        facts = {
            "settings": self.settings,
            "sampler": self.sampler.state_dict(),
            "trained_tokens": self.trained_tokens,
        }
        background = getattr(self.args, "async_save", False)
        self.saving = checkpoint.save(
            self.checkpoints, self.step, self.store, facts, background=background
        )

    def await_save(self) -> None:
        """Wait until a checkpoint that is being written is whole. Raises: what ended the write."""
        if self.saving:
            self.saving.result()
            self.saving = None

    def steps(self, evaluate: Callable[[], float] | None = None, until: int = 0) -> Iterator[Step]:
        """Yield each step that is left, up to `until`; read, evaluate and save when it is due.

        Results are read every --log-every steps at most: to read a number the host has to wait
        until the device has computed it. `evaluate` returns the test loss.
        Raises: FloatingPointError when a loss or a norm is infinite or no number.
        """
        args, report = self.args, self.report
        last_step = until or args.max_steps
        if self.log is None:
            folder = report.output if report.world.is_rank0 else None
            logger = measure.LOGGERS.get(args.logger)
            self.log = measure.StepLog(folder, self.step + 1, logger, vars(args))
            self.catch_preemption()
            checkpoint.set_rng_state(self.rng)
        steps = args.profile or (0, -1)
        profile = measure.Profile(Path(args.output_dir or "", "profile"), steps, self.device)
        unread: list[Step] = []
        left = range(self.step + 1, last_step + 1)
        self.timer.start()
        for number in report.progress([] if self.stopped else left, "training"):
            self.step = number
            step = Step(number, lr_at(number, args), next(self.batches))
            unread.append(step)
            with profile.step(number):
                yield step

            step.micro_batches = []
            self.sampler.advance(min(args.global_batch_size, self.sampler.left))
            last = self.step == args.max_steps
            save_due = report.output and self.store and due(self.step, args.save_every, last)
            eval_due = evaluate and due(self.step, args.eval_every, last)
            look = save_due or eval_due or last or self.step in (last_step, profile.last)
            if not (look or self.step % args.log_every == 0):
                continue  # the next step is queued while the device still computes this one

            self.stopped = self.read(unread)
            unread.clear()
            if self.step >= profile.last:
                profile.stop()
            if eval_due and (last or not self.stopped):
                self.test_loss = evaluate()
                self.log.write(self.step, test_loss=self.test_loss)
                report.say(f"step {self.step} | test loss {self.test_loss:.4f}")
            if save_due or (self.stopped and report.output and self.store and args.save_every):
                self.save()
            if self.stopped:
                break
            self.timer.start()  # the time of what is done between steps belongs to none
        self.await_save()
        profile.stop()
        if self.losses:
            report.metrics |= self.metrics()
        if self.done or self.stopped:
            self.batches.close()  # ends the processes that load data
            self.log.close()
            peaks = gather(measure.peak_memory(self.device))
            for name in peaks[0]:
                by_rank = [peak[name] for peak in peaks]
                report.metrics |= {name: max(by_rank), f"{name}_per_rank": by_rank}

    def read(self, unread: list[Step]) -> bool:
        """Log steps that nobody has read yet; return whether any rank was asked to stop."""
        numbers = [(step.loss_sum, step.tokens, _number(step.norm)) for step in unread]
        rows = [[torch.as_tensor(n).to(self.device).double() for n in row] for row in numbers]
        own, tokens, norms = torch.stack([torch.stack(row) for row in rows]).unbind(1)
        if self.saving and self.saving.done():
            self.await_save()  # a full disk ends the run soon after
        sums = torch.cat([own, own.new_tensor([len(self.signals)])])
        dist.all_reduce(sums)
        table = torch.stack([sums[:-1] / tokens, own, tokens, norms], dim=1).tolist()
        time_ms = self.timer.lap(len(unread))
        for step, (loss, own_sum, count, norm) in zip(unread, table, strict=True):
            self.stop_unless_finite(step, loss, own_sum, norm)
            self.losses.append(loss)
            self.norms.append(norm)
            self.trained_tokens += int(count)
            speed = count / time_ms * 1e3
            self.log.write(
                step.number, loss=loss, lr=step.lr, grad_norm=norm, tokens_per_second=speed
            )
        self.step_tokens = tokens.mean().item()
        self.report.step(self.step, self.losses[-1], time_ms, *self.speed(time_ms))
        return sums[-1].item() > 0

    def stop_unless_finite(self, step: Step, loss: float, own_sum: float, norm: float) -> None:
        """End the run, on all ranks together, when its numbers are none; say where it began.

        In float16 a norm may be infinite: the loss scaler leaves out such a step.
        """
        unknown = step.norm is None or self.args.precision == "16-mixed"
        if math.isfinite(loss) and (unknown or math.isfinite(norm)):
            return
        self.await_save()  # all ranks end here, and a checkpoint of before is worth its time
        sums = enumerate(gather((own_sum, node())))
        bad = [f"{rank}{where}" for rank, (own, where) in sums if not math.isfinite(own)]
        which = f"on rank {', '.join(bad)} of {dist.get_world_size()}" if bad else "over all ranks"
        raise FloatingPointError(
            f"stopped: in step {step.number} the loss is {loss:.4g} {which}, gradient norm "
            f"{norm:.4g}: try a lower --lr, or look at that data; the newest checkpoint may "
            "already be diverging: try the one before"
        )

    def speed(self, step_time_ms: float) -> tuple[float, float | None]:
        """Return tokens/s of all ranks, and the MFU of a device; None where it is not known."""
        speed = self.step_tokens / step_time_ms * 1e3
        flops = speed / dist.get_world_size() * self.flops_per_token
        mfu = measure.mfu(flops, self.device, self.args.precision)
        return speed, None if mfu is None or math.isnan(mfu) else mfu

    def test_batches(self, rows: int = 0) -> Iterator[list[torch.Tensor]]:
        """Yield this rank's (inputs, targets) of the test set, (rows, T) each.

        All ranks take as many turns, as their collectives need: one whose samples have run out
        goes through batches that no loss counts.
        """
        rows, ranks = rows or self.args.micro_batch_size, self.dp_ranks
        for start in range(0, len(self.test_set), rows * ranks):
            turn = range(start, min(start + rows * ranks, len(self.test_set)))
            items = [self.test_set[index] for index in turn[self.dp_rank :: ranks]]
            batch = data.collate(rows, self.args.seq_len, items)
            yield [tensor.to(self.device) for tensor in batch]

    @torch.no_grad()
    def evaluate(self, model: torch.nn.Module, summed_loss: Callable, rows: int = 0) -> float:
        """Return the mean loss over all tokens of the test set. A collective.

        `summed_loss(inputs, targets)` is this rank's part of a batch's: all ranks' add up to it.
        """
        model.eval()  # no dropout here, if there is any
        sums = torch.zeros(2, device=self.device, dtype=torch.float64)  # losses, tokens
        for inputs, targets in self.test_batches(rows):
            sums[0] += summed_loss(inputs, targets)
            sums[1] += (targets != data.IGNORED).sum() * self.dp_ranks / dist.get_world_size()
        model.train()
        dist.all_reduce(sums)
        loss, tokens = sums.tolist()
        self.test_tokens = round(tokens)
        return loss / tokens

    def catch_preemption(self) -> None:
        """Note SIGTERM and SIGUSR1 in `signals`, instead of dying from them in mid-step."""
        note = self.signals.append
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _: note(number))

    def metrics(self) -> dict[str, Any]:
        """Return what results.json says of the run."""
        step_time_ms = self.timer.median_ms()
        speed, mfu = self.speed(step_time_ms)
        tested = {} if self.test_loss is None else {"test_loss": self.test_loss}
        return tested | {
            "final_loss": self.losses[-1],
            "step_time_ms": step_time_ms,
            "tokens_per_second": speed,
            "tokens_per_step": self.step_tokens,
            "mfu": mfu,
        }


def _number(norm: torch.Tensor | float | None) -> torch.Tensor | float:
    return math.nan if norm is None else norm


def due(step: int, every: int, last: bool) -> bool:
    """Say whether what is done every so many steps, and after the last one, is due; 0 is never."""
    return every > 0 and (last or step % every == 0)


def on_text(
    args: argparse.Namespace, report: Report, dp_rank: int, dp_ranks: int
) -> tuple[Job, str]:
    """Return the job of the flags' text or tokens, and its batch sizes in words.

    Raises: UsageError unless global batch = micro-batch x accumulation x data-parallel ranks.
    """
    identity = data.settle_batch_sizes(args, dp_ranks)
    if args.tokens:
        if args.text_file:
            raise UsageError("--tokens: not allowed with --text-file")
        train_set, test_set, mixture = tokens.job_tokens(args, dp_rank, dp_ranks)
        job = Job(args, report, train_set, test_set, None, dp_rank, dp_ranks, sampler=mixture)
        return job, identity
    if args.document_attention:
        raise UsageError("--document-attention needs --tokens, which say where a document ends")
    train_set, test_set, checksum = data.job_text(args, dp_ranks)
    return Job(args, report, train_set, test_set, checksum, dp_rank, dp_ranks), identity
