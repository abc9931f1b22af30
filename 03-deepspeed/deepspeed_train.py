"""Train a transformer on text with DeepSpeed as a real job does: a template to copy and cut down.

    CPU   deepspeed --num_gpus=2 03-deepspeed/deepspeed_train.py
    GPU   deepspeed --num_gpus=8 03-deepspeed/deepspeed_train.py --preset llama3-8b --seq-len 4096 \
              --deepspeed_config 03-deepspeed/configs/zero3_config.json --precision bf16-mixed \
              --activation-checkpointing --micro-batch-size 1

It does the same job as ddp_training.py of module 01; torchrun and srun start it as well. The config
names stage, optimizer and what it does not leave "auto". Look for: the losses of one process, and
the bytes per weight of the ZeRO paper.

To copy: take this file, configs/ and legacy_common/ without lab/; delete the lines from "proofs"
to "end of proofs". Delete what you do not need (`checkpoint_activations`, `evaluate`, `export`),
each with what uses it.

Sources: Rajbhandari et al., ZeRO (SC 2020), sections 5 and 7; Lian et al., Universal Checkpointing
(2024); deepspeed.ai, "DeepSpeed Configuration JSON".
"""

import argparse
import contextlib
import functools
import io
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from legacy_common import checkpoint, cli, data, job, measure, models, runtime
from legacy_common.report import Report

CONFIG = Path(__file__).parent / "configs" / "zero2_config.json"
AUTO = "auto"  # in a config: "the script shall say", by a flag, as in Hugging Face's Trainer
FLAG_OF = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "grad_accum_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "lr",
    "scheduler.params.warmup_max_lr": "lr",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
}
HALVES = {"bf16-mixed": "bf16", "16-mixed": "fp16"}  # sections of a config
CONVERTS = ({1}, {2}, {1, 2}, {3})  # stages between which universal checkpoints go
PARALLEL_FROM = 2**30  # bytes: a smaller checkpoint is converted before processes have started
PATIENCE = timedelta(days=7)  # for what rank 0 does alone: no --timeout of a collective ends it


@dataclass
class Run:
    """What the functions of this script share. Those without a value here come from `set_up`."""

    args: argparse.Namespace
    given: set[str]  # the names of the flags on the command line
    report: Report
    config: dict | None = None  # what --deepspeed_config says
    proven: Callable = lambda run, steps: steps  # the proofs look on at the steps
    shape: models.TransformerConfig | None = None
    stage: int = 0
    dtype: torch.dtype = torch.float32  # of the weights
    autocast: torch.dtype | None = None
    job: "job.Job | None" = None
    engine: object = None


def build(run):
    """Return the model, its weights drawn; in stage 3 no rank ever holds it whole."""
    import deepspeed  # not before `prepare` has said for which device

    if run.stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=run.config):
            model = models.Transformer(run.shape)  # each layer is cut into shards once it is made
    else:
        with torch.device("meta"):  # shapes only: room is taken once, on the device
            model = models.Transformer(run.shape).to(run.dtype)
        model.to_empty(device=run.report.device)
        if run.shape.tied_embeddings:
            model.head.weight = model.embedding.weight
    if not run.job.found:  # a resumed run loads instead
        draw_weights(model, run.args.seed, run.report.device)
    if run.args.activation_checkpointing:
        checkpoint_activations(model, run.config)
    return model


@torch.no_grad()
def draw_weights(model, seed, device):
    """Draw each weight whole, as one process would, and keep this rank's part: all, or a shard."""
    import deepspeed

    own = dict(model.named_parameters())
    for name, drawn in models.drawn_weights(model.config, seed, device):
        sharded = hasattr(own[name], "ds_id")
        with deepspeed.zero.GatheredParameters(own[name], modifier_rank=0, enabled=sharded):
            own[name].copy_(drawn)


def checkpoint_activations(model, config):
    """Keep each block's input only; backward computes the rest again. DeepSpeed's, or PyTorch's."""
    import deepspeed

    recompute = functools.partial(torch_checkpoint, use_reentrant=False)
    if "activation_checkpointing" in config:  # it can also shard what is kept, or move it
        deepspeed.checkpointing.configure(None, deepspeed_config=config)
        recompute = deepspeed.checkpointing.checkpoint
    for block in model.blocks:
        block.forward = functools.partial(recompute, block.forward)


def start_engine(run):
    """Return DeepSpeed's engine: model, optimizer, gradients and communication in one."""
    import deepspeed

    model = build(run)

    try:
        engine, *_ = deepspeed.initialize(model=model, config=run.config)
    except (AssertionError, TypeError, ValueError) as error:  # so DeepSpeed refuses a config
        why = " ".join(str(error).split()) or type(error).__name__
        raise cli.UsageError(f"{run.args.deepspeed_config}: DeepSpeed says: {why}") from error

    return engine


def summed_loss(run, model, inputs, targets):
    """Return the cross-entropy, summed over tokens. Shapes: inputs and targets (B, T)."""
    with torch.autocast(inputs.device.type, run.autocast, enabled=run.autocast is not None):
        logits = model(inputs)  # (B, T, V)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def train_step(run, step):
    """Take one step, and leave its results with the job."""
    engine, device = run.engine, run.report.device
    if "scheduler" not in run.config:  # the job's schedule, then, not the config's
        for group in engine.basic_optimizer.param_groups:
            group["lr"] = step.lr
    lr = engine.get_lr()[0]
    own = sum(int((targets != data.IGNORED).sum()) for _, targets in step.micro_batches)
    tokens = torch.full((), own, device=device)
    counting = dist.all_reduce(tokens, async_op=True)  # while forward computes
    loss_sum = torch.zeros((), device=device)
    for batch in step.micro_batches:
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in batch)
        loss = summed_loss(run, engine, inputs, targets)
        counting.wait()
        # Divided by the tokens of all ranks: each token counts alike, whichever micro-batch it is
        # in. DeepSpeed takes the mean over ranks where a sum is meant, hence the factor.
        mean_loss = loss * dist.get_world_size() / tokens

        engine.backward(mean_loss, scale_wrt_gas=False)  # adds up and reduces, as the stage says
        engine.step()  # acts after the last micro-batch only: clips and updates

        loss_sum += loss.detach()
    # Stage 0 in float32 keeps no norm: None.
    step.record(loss_sum, tokens, engine.get_global_grad_norm(), lr)


def train(run):
    """Take the steps that are left. The job evaluates, saves and stops between them."""
    steps = run.job.steps(evaluate=evaluate(run))
    for step in run.proven(run, steps):
        train_step(run, step)


def evaluate(run):
    """Return what measures the test loss: in stage 3 each forward gathers, so all take part."""
    loss_of = functools.partial(summed_loss, run, run.engine)
    return functools.partial(run.job.evaluate, run.engine, loss_of)


def export(run):
    """Write float32 weights for a plain model to weights-fp32/; check that it computes with them.

    In files of 5 GB at most, one of them in memory at a time; in stage 0 in one file.
    """
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    output, args = run.report.output, run.args
    folder, partial = output / "weights-fp32", output / "weights-fp32.partial"

    def write():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        if run.stage == 0:
            weights = run.engine.module.state_dict()
            whole = {name: tensor.float().cpu() for name, tensor in weights.items()}
            torch.save(whole, partial / "pytorch_model.bin")
        else:
            tag = f"step-{run.job.step:08d}"
            # safetensors holds no tied weights.
            options = {"max_shard_size": "5GB", "safe_serialization": not run.shape.tied_embeddings}
            said = io.StringIO()  # what it says of each file
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                convert_zero_checkpoint_to_fp32_state_dict(
                    str(output / "checkpoints"), str(partial), tag=tag, **options
                )
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)

    run.job.store.on_rank0("the weights cannot be written", write)
    if not args.parity_steps or run.job.test_loss is None:  # no rank may have room for all of it
        run.report.say(f"{folder} not loaded into a plain model")
        return
    plain = models.Transformer(run.shape)
    plain.load_state_dict(load_weights(folder))
    plain.to(run.report.device)
    loss = run.job.evaluate(plain, functools.partial(summed_loss, run, plain))
    tolerance = 1e-5 if args.precision == "32-true" else 2e-3  # the engine's weights are rounded
    name = f"test loss of {folder.name}, in a plain model"
    run.report.check(name, loss, run.job.test_loss, tolerance, "the engine's")


def load_weights(folder):
    """Read the weights that `export` wrote, by name."""
    from safetensors.torch import load_file

    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    for path in sorted(folder.glob("*.bin")):
        weights |= torch.load(path, map_location="cpu", weights_only=True)
    return weights


def parse_args():
    parser = cli.ArgumentParser(__doc__, resumes=True)
    job.add_flags(parser, models.PRESETS)  # --preset, --micro-batch-size, --lr, --save-every, ...
    add = parser.add_argument
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    add("--deepspeed_config", "--deepspeed-config", type=Path, default=CONFIG, metavar="FILE",
        help=f"({CONFIG.name})")  # fmt: skip
    add("--nvme-path", type=Path, metavar="DIR", help="a folder on a fast disk, to offload to")
    add("--activation-checkpointing", action="store_true", help="keep blocks' inputs only")
    add("--consolidate", action="store_true", help="write float32 weights to --output-dir at last")
    args = job.parse(parser, parity_steps=2)
    if args.checkpoints:
        parser.error("--checkpoints: DeepSpeed's engine saves to --output-dir alone: leave it out")
    if args.consolidate and not (args.output_dir and args.save_every):
        parser.error("--consolidate needs --output-dir, and the checkpoint that is saved there")
    for action in parser._actions:  # without defaults only what is on the command line is left
        action.default = argparse.SUPPRESS
    given = set(vars(argparse.ArgumentParser.parse_args(parser)))
    del args.local_rank
    return args, given


# the config and the flags: one value of each


def take_values(config, args, given):
    """Have the flags take what a config states. Raises: UsageError where one given says another."""
    params = config["optimizer"].setdefault("params", {})
    params.setdefault("lr", AUTO if "lr" in given else 1e-3)  # DeepSpeed's own default
    for key, flag in FLAG_OF.items():
        section, name = section_of(config, key)
        stated = section.get(name, AUTO)
        if stated != AUTO:
            if flag in given and getattr(args, flag) != stated:
                raise contradiction(args, flag, f"{key} {stated}")
            setattr(args, flag, stated)


def settle_precision(config, args, given):
    """Bring flag and config to one precision; return the types of weights and of autocast."""
    enabled = {name: config.get(part, {}).get("enabled", False) for name, part in HALVES.items()}
    on = {name: f"{HALVES[name]}.enabled true" for name, value in enabled.items() if value is True}
    autocast = config.get("torch_autocast", {})
    if autocast.get("enabled"):
        kind = str(autocast["dtype"])
        on = {"bf16-mixed" if "b" in kind else "16-mixed": f"torch_autocast.dtype {kind}"}
    for name, stated in on.items():
        if "precision" in given and args.precision != name:
            raise contradiction(args, "precision", stated)
        args.precision = name
    if not on and "precision" not in given and enabled.get(args.precision) is False:
        args.precision = "32-true"  # the device's best, but the config leaves it out
    for name, part in HALVES.items():
        want = name == args.precision
        if enabled[name] is True and not want:  # beside autocast to another type
            raise contradiction(args, "precision", f"{part}.enabled true")
        if autocast.get("enabled"):  # of float32 weights, unless the config halves them too
            want = want and enabled[name] is True
        if want and enabled[name] is False:
            raise contradiction(args, "precision", f"{part}.enabled false")
        if part in config:
            config[part]["enabled"] = want
    half = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(args.precision)
    halved = config.get(HALVES.get(args.precision), {}).get("enabled")
    weights = half if halved or not autocast.get("enabled") else None
    return weights or torch.float32, half if autocast.get("enabled") else None


def fill(config, args, dim):
    """Put values in place of each "auto": the flags', or those of the other templates."""
    for key in FLAG_OF:
        if "." not in key:
            config.setdefault(key, AUTO)
    values = {key: getattr(args, flag) for key, flag in FLAG_OF.items()} | {
        "optimizer.params.betas": [0.9, 0.95],
        "optimizer.params.eps": 1e-8,
        "optimizer.params.weight_decay": 0.1,
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_num_steps": max(1, args.warmup_steps),  # DeepSpeed takes no 0
        "zero_optimization.reduce_bucket_size": dim * dim,  # elements
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * dim * dim),
        "zero_optimization.stage3_param_persistence_threshold": 10 * dim,
        "zero_optimization.offload_optimizer.nvme_path": str(args.nvme_path),
        "zero_optimization.offload_param.nvme_path": str(args.nvme_path),
    }
    for key, value in values.items():
        section, name = section_of(config, key)
        if section.get(name) == AUTO:
            section[name] = value


def section_of(config, key):
    """Return the section that a key such as optimizer.params.lr is in, and its name there."""
    *sections, name = key.split(".")
    for section in sections:
        config = config.get(section) or {}
    return config, name


def contradiction(args, flag, stated):
    """Return the error of a flag that was given and a config that says another."""
    return cli.UsageError(
        f"--{flag.replace('_', '-')} {getattr(args, flag)}, but {args.deepspeed_config} has "
        f'{stated}: change one, or write "{AUTO}" there'
    )


# the engine's files, and how other numbers of ranks read them


class EngineFiles(checkpoint.Store):
    """The engine's own checkpoint: each rank writes what it holds. Other ranks have it converted.

    DeepSpeed's universal format holds whole tensors, which any number of ranks cuts up anew.
    """

    def __init__(self, run):
        self.run = run
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE)
        with torch.device("meta"):
            self.whole = models.Transformer(run.shape).state_dict()

    def tensors(self):
        return self.whole

    def facts(self):
        return {"stage": self.run.stage}

    def problem(self, facts):
        if why := super().problem(facts):
            return why
        args, stage, ranks = self.run.args, self.run.stage, dist.get_world_size()
        precision = facts["settings"]["precision"]
        if precision != args.precision:
            return f"saved with --precision {precision}: take that"
        if not self.fits(facts) and {stage, facts["stage"]} not in CONVERTS:
            return (
                f"saved by {facts['settings']['ranks']} ranks in stage {facts['stage']}: {ranks} "
                f"ranks in stage {stage} cannot resume from it. DeepSpeed converts between numbers "
                "of ranks in stages 1 to 3, and between stages 1 and 2"
            )
        return None

    def fits(self, facts):
        """Say whether these ranks can load a checkpoint as it stands."""
        if self.run.stage == facts["stage"] == 0 and self.run.args.precision == "32-true":
            return True  # the whole state, in one file
        same_ranks = facts["settings"]["ranks"] == dist.get_world_size()
        return same_ranks and facts["stage"] == self.run.stage

    def write(self, folder):
        self.run.engine.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)
        if dist.get_rank() == 0:  # where DeepSpeed's own tools look; soon its name
            (folder.parent / "latest").write_text(folder.name.replace(".partial", "step"))

    def prepare(self, path, facts):
        """Convert a checkpoint that does not fit, before the engine is made. A collective."""
        self.tag = path.name
        if self.fits(facts):
            return
        universal = path.with_name(f".universal-{path.name}")
        self.on_rank0(f"{path} cannot be converted", lambda: convert(path, universal))
        section = self.run.config.setdefault("checkpoint", {})
        section["load_universal"] = True
        self.tag = universal.name

    def read(self, path):
        # The job's schedule follows the flags of this run; a config's has a state.
        schedule = "scheduler" in self.run.config
        self.run.engine.load_checkpoint(
            str(path.parent), tag=self.tag, load_lr_scheduler_states=schedule
        )
        dist.barrier(self.group)  # all have read it
        if dist.get_rank() == 0:
            path.with_name("latest").write_text(path.name)  # not one that a kill left half-written
            if self.tag != path.name:
                shutil.rmtree(path.with_name(self.tag))
                path.with_name("latest_universal").unlink()

    def on_rank0(self, what, work):
        """Have rank 0 work while the others wait. Raises: UsageError on all ranks if it fails."""
        failure = None
        if dist.get_rank() == 0:
            try:
                work()
            except Exception as error:
                failure = str(error) or type(error).__name__
        if failure := runtime.from_rank0(failure, self.group):
            raise cli.UsageError(f"{what}: {failure}")


def convert(path, universal):
    """Write a checkpoint anew as whole tensors. Raises: RuntimeError with the tool's last line."""
    workers = workers_for([file.stat().st_size for file in path.glob("*optim_states.pt")])
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += [f"--num_extract_workers={workers}", f"--num_merge_workers={workers}"]
    command += ["--inject_missing_state", f"--input_folder={path}", f"--output_folder={universal}"]
    for stale in path.parent.glob(".universal-*"):  # of a run that was killed
        shutil.rmtree(stale)
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError((ended.stderr.strip().splitlines() or ["it was killed"])[-1])


def workers_for(sizes):
    """Return how many processes convert files of these sizes: each has one, twice, in memory."""
    if sum(sizes) < PARALLEL_FROM:
        return 1
    fitting = psutil.virtual_memory().available // (2 * max(sizes))
    return max(1, min(fitting, os.cpu_count() // 2))


# the run


def prepare(device):
    """Make `import deepspeed` fit the device, and be quiet; call it before that import."""
    os.environ["DS_ACCELERATOR"] = device.type  # it would take GPUs where it finds any
    if device.index is not None:  # it sets the device by this; srun may show each rank one GPU
        os.environ["LOCAL_RANK"] = str(device.index)
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))

    import deepspeed

    deepspeed.logger.setLevel(logging.ERROR)
    vars(deepspeed.ops)["__compatible_ops__"] = {}  # else it compiles what training never calls
    deepspeed.init_distributed()


def set_up(run):
    """Settle config and flags, find the place in the data, and start the engine there."""
    args, report = run.args, run.report
    prepare(report.device)
    if run.config is None:
        run.config = json.loads(args.deepspeed_config.read_text())
    config = run.config
    run.shape = models.preset(args.preset, args.seq_len)
    run.stage = int(config.setdefault("zero_optimization", {}).get("stage", 0))
    take_values(config, args, run.given)
    run.dtype, run.autocast = settle_precision(config, args, run.given)
    checkpoint.FREE.update({"deepspeed_config", "nvme_path", "consolidate"})
    run.job, identity = job.on_text(args, report, report.world.rank, report.world.world_size)
    run.shape = run.job.fitted(run.shape)
    run.job.flops_per_token = measure.flops_per_token(run.shape, args.seq_len)
    fill(config, args, run.shape.dim)
    report.start(
        f"{args.deepspeed_config.name}: stage {run.stage}, {args.precision}; {args.preset}: "
        f"{run.shape.num_parameters():,} weights",
        identity,
    )
    run.job.store = EngineFiles(run)
    if args.resume and run.job.find() and not run.job.done:
        run.job.store.prepare(*run.job.found)
    if not run.job.done:
        run.engine = start_engine(run)
        if run.job.found:
            run.job.load()


def main():
    args, given = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("03-deepspeed/deepspeed_train.py", args, world, device)
        run = Run(args, given, report)
        # proofs: a copy deletes these lines
        from deepspeed_parts import deepspeed_train as part

        run.config = part.examined(run)  # refuses what DeepSpeed would misread; compiles its ops
        run.proven = part.proven_steps
        # end of proofs
        set_up(run)
        if run.job.done:
            report.say(f"{report.output} has all {args.max_steps} steps: nothing to do")
            return 0
        train(run)
        if args.consolidate and run.job.done and not report.failed:
            export(run)
        return report.finish(run.job.summary)


if __name__ == "__main__":
    cli.run(main)
