"""Train a transformer on text with DeepSpeed as a real job does: a template to copy and cut down.

    CPU   deepspeed --num_gpus=2 03-deepspeed/deepspeed_train.py
    GPU   the same line, or torchrun --nproc-per-node=gpu 03-deepspeed/deepspeed_train.py

--deepspeed_config names the stage, precision, optimizer and schedule (configs/zero2_config.json);
with --output-dir and --resume it goes on after a kill, also on another number of ranks. Look for:
the losses of one process, and the bytes per weight of the ZeRO paper.

Sources: Rajbhandari et al., ZeRO (SC 2020), sections 5 and 7; Lian et al., Universal Checkpointing
(2024); deepspeed.ai, "DeepSpeed Configuration JSON".
"""

import contextlib
import hashlib
import io
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import zero
from dist_common import checkpoint, cli, data, measure, models, runtime
from dist_common.models import PRESETS, Transformer
from dist_common.proofs import same_losses
from dist_common.report import Report
from tensor_bytes import live_bytes

CONFIG = Path(__file__).parent / "configs" / "zero2_config.json"
# Of losses near 5. float32 sums in another order; bf16 rounds sums of gradients to 8 bits.
LOSS_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 2e-3, "16-mixed": 2e-3}
SAME = {  # what a run may not change when it is resumed, and the flag that says it
    "preset": "--preset",
    "precision": "--precision",
    "seed": "--seed",
    "seq_len": "--seq-len",
    "text": "--text-file (or, without it, by another version of Python)",
}


def build(shape, config, seed, device):
    """Return the model with its weights drawn; in stage 3 no rank ever holds it whole."""
    import deepspeed  # not before zero.prepare has said for which device

    sharded = config["zero_optimization"].get("stage") == 3
    with deepspeed.zero.Init(config_dict_or_path=config if sharded else None, enabled=sharded):
        model = Transformer(shape)  # each layer is cut into shards as soon as it is made
    runtime.seed_everything(seed)
    for name, weight in model.named_parameters():
        # One weight at a time is whole here; drawn in float32, so that each stage begins alike.
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0, enabled=sharded):
            drawn = torch.empty(weight.shape)
            model.draw(name, drawn)
            weight.data.copy_(drawn)
    return model.to(device)


def train_step(engine, micro_batches, look=None):
    """Take one step; return the mean loss of this rank's samples. `look` is called in mid-step."""
    losses = []
    for number, batch in enumerate(micro_batches):
        loss = loss_of(engine, batch)

        engine.backward(loss)  # divides by the number of micro-batches, adds up, reduces
        losses.append(loss.detach())
        del loss
        if look and number == 0:
            look()
        engine.step()  # acts after the last micro-batch only: clips, updates, sets the rate

    return torch.stack(losses).mean()


def loss_of(model, batch):
    """Return the mean cross-entropy. Shapes: batch is inputs and targets, (B, T) each."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def steps_of(sampler, sequences, args, device):
    """Yield each step's micro-batches on this rank, epoch after epoch; the loop advances `sampler`.

    A tail of an epoch that fills no global batch is left out.
    """
    size = args.micro_batch_size * args.grad_accum_steps * sampler.world_size
    while True:
        order = sampler.global_order()
        while sampler.position + size <= len(order):
            part = order[sampler.position : sampler.position + size]
            yield batches(sequences, part[sampler.rank :: sampler.world_size], args, device)
        sampler.set_epoch(sampler.epoch + 1)


def batches(sequences, indices, args, device):
    """Return micro-batches of the sequences with these indices."""
    chunks = [[sequences[i] for i in chunk] for chunk in indices.split(args.micro_batch_size)]
    return [[torch.stack(t).to(device) for t in zip(*chunk, strict=True)] for chunk in chunks]


@torch.no_grad()
def test_loss_of(model, sequences, args, device, rank=0, ranks=1):
    """Return the mean loss over (part of) the test set.

    In stage 3 each forward gathers weights from all ranks: all take as many turns, or they hang.
    Hence a tail that does not fill every rank's micro-batch is left out.
    """
    size = args.micro_batch_size * dist.get_world_size()
    full = torch.arange(min(len(sequences) // size, 4) * size)
    parts = batches(sequences, full[rank::ranks], args, device)
    mean = torch.stack([loss_of(model, batch) for batch in parts]).mean()
    if ranks > 1:
        dist.all_reduce(mean)
    return mean.item() / ranks


def losses_alone(shape, config, args, steps, device):
    """Return the losses of one process that has each step's whole batch, in plain PyTorch.

    In DeepSpeed's arithmetic: with bf16 weights, the optimizer steps on a float32 copy of them.
    """
    from deepspeed.runtime import lr_schedules

    model = build(shape, {"zero_optimization": {}}, args.seed, device)
    model.bfloat16() if args.precision == "bf16-mixed" else model
    weights = list(model.parameters())
    copies = [weight.detach().float().clone() for weight in weights]
    params = config["optimizer"].get("params", {})
    kept = {name: value for name, value in params.items() if name not in zero.ADAM_EXTRAS}
    optimizer = torch.optim.AdamW(copies, **kept)
    schedule, losses = config.get("scheduler"), []
    if schedule:
        schedule = getattr(lr_schedules, schedule["type"])(optimizer, **schedule["params"])
    for micro_batches in steps:
        means = []
        for batch in micro_batches:
            loss = loss_of(model, batch)
            for copy, gradient in zip(copies, torch.autograd.grad(loss, weights), strict=True):
                part = gradient.float() / len(micro_batches)
                copy.grad = part if copy.grad is None else copy.grad + part
            means.append(loss.detach())
        losses.append(torch.stack(means).mean().item())
        if config.get("gradient_clipping", 1.0):  # 1 is what DeepSpeed takes without the key
            torch.nn.utils.clip_grad_norm_(copies, config.get("gradient_clipping", 1.0))
        optimizer.step()
        optimizer.zero_grad()
        if schedule:
            schedule.step()
        for copy, weight in zip(copies, weights, strict=True):
            weight.data.copy_(copy)
    return losses


def bytes_per_weight(config, args, ranks):
    """Return what a rank holds for each weight after a micro-batch, by formula: (2 + 2 + K) / N.

    K is 12: Adam's two moments and a float32 copy of the weight, which stages 1 to 3 keep of
    float32 weights too. None where offload, large buckets or weights that stay whole, as by
    DeepSpeed's own defaults, make another sum. Source: ZeRO paper, section 5.
    """
    zero_part, shape = config["zero_optimization"], PRESETS[args.preset]
    stage, size = zero_part.get("stage", 0), 4 if args.precision == "32-true" else 2
    optimizer = 8 if stage == 0 and size == 4 else 12
    early = 1 if args.grad_accum_steps == 1 else 2  # a single micro-batch is reduced at once
    parts = (optimizer, 1), (size, early), (size, 3)  # bytes, and the first stage that shares them
    total = sum(part / (ranks if stage >= first else 1) for part, first in parts)
    offload = [zero_part.get(part) or {} for part in ("offload_optimizer", "offload_param")]
    elsewhere = any(part.get("device", "none") != "none" for part in offload)
    bucket = size * zero_part.get("reduce_bucket_size", 5e8) if stage else 0
    whole = zero_part.get("stage3_param_persistence_threshold", 1e5) if stage == 3 else 0
    if elsewhere or whole > 10 * shape.dim or bucket > 0.02 * total * shape.num_parameters():
        return None
    return total


def save(engine, folder, step, facts):
    """Write a checkpoint. All ranks call it, and see the same folder."""
    with checkpoint.sealed(folder, step, facts) as partial:  # killed within, it leaves none
        engine.save_checkpoint(str(folder), tag=partial.name, client_state=facts, save_latest=False)

    if dist.get_rank() == 0:
        (folder / "latest").write_text(f"step-{step:08d}")  # where DeepSpeed's own tools look


def fit(path, facts, own, config, world):
    """Return the name of a checkpoint that this number of ranks can load: converted, if need be.

    Refuse one of other data. DeepSpeed's files hold what each rank had; its universal format holds
    whole tensors, which any number of ranks cuts up anew, in stages 1 and 2 or in stage 3.
    """
    for what, flag in SAME.items():
        if facts[what] != own[what]:
            raise cli.UsageError(f"{path} was saved with another {flag}: take that")
    stage, saved = own["stage"], facts["stage"]
    if stage == saved == 0 and own["precision"] == "32-true":
        return path.name  # the whole state, in one file
    if (stage, world.world_size) == (saved, facts["ranks"]):
        return path.name
    if {stage, saved} not in ({1}, {2}, {1, 2}, {3}):
        raise cli.UsageError(
            f"{path} was saved by {facts['ranks']} ranks in stage {saved}: "
            f"{world.world_size} ranks in stage {stage} cannot go on from it. DeepSpeed converts "
            "between numbers of ranks in stages 1 to 3, and between stages 1 and 2"
        )
    universal = path.with_name(f".universal-{path.name}")
    failure = None
    if world.is_rank0:
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        command += ["--inject_missing_state", "--num_extract_workers=1", "--num_merge_workers=1"]
        command += [f"--input_folder={path}", f"--output_folder={universal}"]
        for stale in path.parent.glob(".universal-*"):  # of a run that was killed
            shutil.rmtree(stale)
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            failure = (ended.stderr.strip().splitlines() or ["it was killed"])[-1]
    failure = runtime.from_rank0(failure)
    if failure:
        raise cli.UsageError(f"{path} cannot be converted: {failure}")
    config["checkpoint"] = {"load_universal": True}
    return universal.name


def consolidate(folder, path, module=None):
    """Write one file of float32 weights that a plain model loads. Call it on rank 0.

    They are the float32 copies in the latest checkpoint; in stage 0, the weights of `module`.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if module:
        weights = {name: tensor.float().cpu() for name, tensor in module.state_dict().items()}
    else:
        told = io.StringIO()  # what it says of each file
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            weights = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    partial = path.with_suffix(".partial")
    torch.save({name: tensor.clone() for name, tensor in weights.items()}, partial)
    partial.replace(path)


def largest_spread(model):
    """Return by how much the first weight, put together, differs between ranks at most."""
    import deepspeed

    weight = next(model.parameters())
    with deepspeed.zero.GatheredParameters(weight, enabled=hasattr(weight, "ds_id")):
        most, least = weight.detach().float().clone(), weight.detach().float().clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return (most - least).max().item()


def parse_args():
    parser = cli.ArgumentParser(__doc__, resumes=True)
    zero.add_arguments(parser, CONFIG)
    add = parser.add_argument
    positive = cli.positive_int
    add("--preset", choices=PRESETS, default="tiny", help="size of the model (tiny)")
    add("--text-file", help="train on its bytes (without: the sources of Python's own library)")
    add("--seq-len", type=positive, default=64, help="tokens per sequence (64)")
    add("--save-every", type=positive, default=10, help="steps, with --output-dir (10)")
    add("--parity-steps", type=cli.whole_number, default=6,
        help="steps to compare with one process, which must hold the whole model (6)")  # fmt: skip
    add("--consolidate", action="store_true", help="write float32 weights to --output-dir at last")
    args = parser.parse_args()
    if args.consolidate and not args.output_dir:
        parser.error("--consolidate needs --output-dir")
    return args


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("03-deepspeed/deepspeed_train.py", args, world, device)
        ranks = world.world_size
        shape = models.preset(args.preset, args.seq_len)
        weights = shape.num_parameters()
        zero.prepare(device)
        config = zero.load_config(args, world, shape)
        stage = config["zero_optimization"].get("stage", 0)
        if "async_io" in zero.ops_needed(config) and args.output_dir:
            raise cli.UsageError(
                f"{args.deepspeed_config}: a run that DeepSpeed resumes with an optimizer on nvme "
                "takes other losses than one that never stopped, so none is saved here: offload "
                "to cpu, or leave out --output-dir"
            )
        global_batch = config["train_batch_size"]
        text = data.load_text(args.text_file, max_bytes=1_000_000)
        cut = len(text) - len(text) // 20  # the last twentieth is held out to test on
        train_set, test_set = (
            data.Sequences(part, args.seq_len, size, name=name)
            for part, size, name in (
                (text[:cut], global_batch, "training text"),
                (text[cut:], args.micro_batch_size * ranks, "test text"),
            )
        )
        sampler = data.ShardedSampler(len(train_set), world.rank, ranks, args.seed)
        report.start(
            f"{args.deepspeed_config.name}: stage {stage}, {args.precision}; {args.preset}: "
            f"{weights:,} weights",
            f"global batch {global_batch} = {args.micro_batch_size} per rank x "
            f"{args.grad_accum_steps} micro-batches x {ranks} ranks",
        )
        output = report.output
        folder = output / "checkpoints" if output else None
        found = checkpoint.newest(folder, report) if args.resume else None
        facts = {"ranks": ranks, "stage": stage, "global_batch": global_batch}
        facts |= {name: getattr(args, name) for name in ("preset", "precision", "seed", "seq_len")}
        facts["text"] = hashlib.sha256(text.numpy()).hexdigest()
        if found and found[1]["global_batch"] != global_batch:
            report.warn(f"the global batch was {found[1]['global_batch']} until here")
        if found and found[1]["step"] >= args.max_steps:
            if args.consolidate and found[1]["stage"] and world.is_rank0:
                consolidate(folder, output / "weights-fp32.pt")
            report.say(f"{output} has all {args.max_steps} steps: nothing to train")
            return 0
        tag = fit(*found, facts, config, world) if found else None
        zero.build_ops(zero.ops_needed(config), report)
        alone = []
        first_step = 1
        # In float16 the loss is scaled, and steps that overflow are left out: nothing to compare.
        if args.parity_steps and not found and args.precision != "16-mixed":
            whole = data.ShardedSampler(len(train_set), 0, 1, args.seed)
            count = min(args.parity_steps, args.max_steps, len(train_set) // global_batch)
            order = whole.global_order()[: count * global_batch].split(global_batch)
            steps = (batches(train_set, part, args, device) for part in order)
            alone = losses_alone(shape, config, args, steps, device)

        import deepspeed

        if device.type == "cuda":  # the peak shall be training's
            torch.cuda.reset_peak_memory_stats(device)
        before = live_bytes()
        model = build(shape, config, args.seed, device)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        if found:
            engine.load_checkpoint(str(folder), tag=tag)
            first_step = found[1]["step"] + 1
            sampler.load_state_dict(found[1]["sampler"])
            dist.barrier()  # all have read it
            if tag != found[0].name and world.is_rank0:
                shutil.rmtree(folder / tag)
                (folder / "latest_universal").unlink()
            report.say(f"loaded {found[0].name}, saved by {found[1]['ranks']} ranks in stage "
                       f"{found[1]['stage']}")  # fmt: skip
        held = []
        losses = []
        timer = measure.StepTimer(device)
        log = measure.StepLog(output if world.is_rank0 else None, first_step)
        flops = measure.flops_per_token(shape, args.seq_len)
        steps = steps_of(sampler, train_set, args, device)
        for step in report.progress(range(first_step, args.max_steps + 1), "training"):
            # In the second step: Adam's moments are made in the first.
            look = (lambda: held.append(live_bytes())) if step == first_step + 1 else None
            lr = engine.get_lr()[0]
            with timer:
                loss = train_step(engine, next(steps), look) / ranks
            dist.all_reduce(loss)
            losses.append(loss.item())
            sampler.advance(global_batch)
            speed = global_batch * args.seq_len / timer.steps_ms[-1] * 1e3
            usage = measure.mfu(speed / ranks * flops, device, args.precision)
            norm = engine.get_global_grad_norm()
            log.write(step, loss=losses[-1], lr=lr, grad_norm=float(norm or 0))
            last = step == args.max_steps
            if step % 5 == 0 or last:
                report.step(step, losses[-1], timer.steps_ms[-1], speed, usage)
            if output and (step % args.save_every == 0 or last):
                facts["sampler"] = sampler.state_dict()
                save(engine, folder, step, facts)

        engine.eval()
        test_loss = test_loss_of(engine, test_set, args, device, world.rank, ranks)
        tolerance = LOSS_TOLERANCE[args.precision]
        if alone:
            first = torch.tensor(losses[: len(alone)])
            what = f"largest error of the first {len(alone)} losses"
            same_losses(report, first, torch.tensor(alone), tolerance, what)
        name = "difference of a weight between ranks"
        source = "ZeRO paper, section 5"
        report.check(name, largest_spread(engine.module), 0, 0, source)
        if held:
            own = torch.tensor((held[0] - before).total() / weights, device=device)
            dist.all_reduce(own, op=dist.ReduceOp.MAX)
            right = bytes_per_weight(config, args, ranks)
            if right:
                report.check("bytes per weight", own.item(), right, 0.02 * right, source)
            else:
                report.say(f"{own.item():.2f} bytes per weight, buffers and all")
        if args.consolidate and world.is_rank0:
            consolidate(folder, output / "weights-fp32.pt", None if stage else engine.module)
            plain = Transformer(shape)
            plain.load_state_dict(torch.load(output / "weights-fp32.pt"))
            again = test_loss_of(plain.to(device), test_set, args, device)
            what = "test loss of the consolidated weights, in a plain model"
            report.check(what, again, test_loss, tolerance, "the engine's")
        report.metrics |= {
            "final_loss": losses[-1],
            "test_loss": test_loss,
            "step_time_ms": timer.median_ms(),
            "tokens_per_second": global_batch * args.seq_len / timer.median_ms() * 1e3,
            "peak_memory_gib": measure.peak_memory_gib(device),
        }
        return report.finish(f"test loss {test_loss:.4f} after step {args.max_steps}")


if __name__ == "__main__":
    cli.run(main)
