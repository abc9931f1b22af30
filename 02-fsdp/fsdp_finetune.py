"""Fine-tune a Hugging Face model under FSDP2, from its files back into such files: a template.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_finetune.py --model runs/tiny-llama
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_finetune.py --model DIR \
              --data pairs.jsonl --precision bf16-mixed --output-dir runs/7b --export runs/7b-tuned

`--make-tiny DIR` writes a tiny model to start from. The DIR of a real one holds config.json, the
tokenizer and *.safetensors of a Llama, Mistral, Qwen or the like; no rank ever holds it whole.
Look for: losses and weights of one plain process, on any number of ranks; the same logits from the
exported files as from the shards; 16 bytes per weight, divided by the ranks.

Sources: PyTorch documentation, fully_shard and torch.distributed.checkpoint; Taori et al., Stanford
Alpaca (2023), for learning rate and global batch of a 7B model.
"""

import contextlib
import functools
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import finetune_checks
import sharded_checkpoint
from chat_data import Answers, load_pairs, trim
from dist_common import cli, data, measure, runtime
from dist_common.report import Report

with contextlib.suppress(ImportError):  # parse_args says what to install
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def build(args, mesh, device):
    """Return the model sharded over a mesh, with memory for this rank's shards, still unfilled."""
    config = finetune_checks.load(args, AutoConfig, "config.json")
    with torch.device("meta"):  # shapes without memory
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    finetune_checks.refuse(args, model, device)
    for layer in model.get_decoder().layers:
        # Backward computes a layer again instead of keeping its activations. Inside the unit:
        # when backward gets there, its weights have been gathered.
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    shard(model, mesh, args.precision)
    model.to_empty(device=device)
    model.tie_weights()  # to_empty has made two of a shared weight
    fill_buffers(model)
    return model


def shard(model, mesh, precision):
    """Make units of the embedding, each layer, and the last norm with the output layer."""
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh} | ({"mp_policy": bf16} if precision == "bf16-mixed" else {})
    decoder = model.get_decoder()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for layer in decoder.layers:
        fully_shard(layer, **options)
    if head.weight is embedding.weight:  # tied weights have to be in one unit
        fully_shard([embedding, decoder.norm, head], **options)
    else:
        fully_shard(embedding, **options)
        fully_shard([decoder.norm, head], reshard_after_forward=False, **options)
    fully_shard(model, **options)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # Add up gradients over ranks instead of their mean: the loss is divided already, by
            # the tokens of all ranks. As a plain sum, which every backend has.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def fill_buffers(model):
    """Compute what no file holds, such as the frequencies of rotary embeddings."""
    for name, module in model.named_modules():
        own = dict(module.named_buffers(recurse=False))
        if not own:
            continue
        try:
            fresh = dict(type(module)(module.config).named_buffers(recurse=False))
        except (AttributeError, TypeError) as error:
            raise cli.UsageError(f"no rule to fill {', '.join(own)} of {name}: add one") from error
        for key, buffer in own.items():
            buffer.copy_(fresh[key])


@torch.no_grad()
def read_weights(model, folder, group):
    """Fill the shards from a folder's safetensors files: each rank reads its own rows only."""
    weights = dict(model.named_parameters())  # tied ones once, as in the files

    dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(folder), process_group=group)


def summed_loss(model, inputs, targets):
    """Return the cross-entropy, summed over the answers' tokens. Shapes: (B, T) both."""
    # Padding is on the right, and attention looks to the left: it needs no mask.
    logits = model(input_ids=inputs, use_cache=False).logits  # (B, T, V)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def accumulate_gradient(model, micro_batches, device):
    """Leave the mean gradient over all answer tokens of the global batch in the shards.

    Return this rank's sum of losses, and all ranks' number of tokens, both still on the device.
    """
    own = sum(int((targets != data.IGNORED).sum()) for _, targets in micro_batches)
    tokens = torch.full((), own, device=device)
    dist.all_reduce(tokens)
    loss_sum = torch.zeros((), device=device)
    for inputs, targets in micro_batches:
        inputs, targets = trim(inputs, targets)
        loss = summed_loss(model, inputs.to(device), targets.to(device))

        (loss / tokens).backward()  # by the tokens of all ranks: each counts alike

        loss_sum += loss.detach()
    return loss_sum, tokens


def train_step(run, micro_batches):
    """Take one step; return what accumulate_gradient does, and the gradient's norm."""
    run.optimizer.zero_grad()
    sums = accumulate_gradient(run.model, micro_batches, run.report.device)
    for group in run.optimizer.param_groups:
        group["lr"] = cli.lr_at(run.step, run.args)
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), run.args.max_grad_norm)
    run.optimizer.step()
    return *sums, norm.full_tensor()


def train(run, steps, signals=()):
    """Take steps; read results every --log-every of them, and save when due or asked to stop."""
    args, report, unread = run.args, run.report, []
    run.timer.start()
    for run.step in report.progress(steps, "training"):
        unread.append((run.step, *train_step(run, next(run.batches))))
        run.sampler.advance(min(args.global_batch_size, len(run.train_set) - run.sampler.position))
        due = run.step == args.max_steps or run.step % args.save_every == 0
        if due or run.step == steps[-1] or run.step % args.log_every == 0:
            stopped = read_results(run, unread, signals)
            unread.clear()
            if (due or stopped) and report.output:
                sharded_checkpoint.save(run)
            if stopped:
                break
            run.timer.start()
        if run.step == args.kill_at_step:
            os.kill(os.getpid(), signal.SIGKILL)  # as when a machine fails: nothing is tidied up


def read_results(run, unread, signals):
    """Log the steps since the last time; return whether any rank was asked to stop.

    To read a number the host waits until the device has computed it, so it is done seldom.
    """
    steps, *columns = zip(*unread, strict=True)
    loss_sums, tokens, norms = (torch.stack(column).double() for column in columns)
    sums = torch.cat([loss_sums, loss_sums.new_tensor([len(signals)])])
    dist.all_reduce(sums)
    rows = torch.stack([sums[:-1] / tokens, tokens, norms], dim=1).tolist()
    time_ms = run.timer.lap(len(steps))
    for step, (run.loss, count, norm) in zip(steps, rows, strict=True):
        cli.stop_unless_finite(step, run.loss, norm)
        run.history.append((run.loss, norm))
        run.trained_tokens += int(count)
        run.log.write(step, loss=run.loss, lr=cli.lr_at(step, run.args), grad_norm=norm)
    run.report.step(run.step, run.loss, time_ms, tokens.mean().item() / time_ms * 1e3)
    return sums[-1].item() > 0


@torch.no_grad()
def export(run, folder):
    """Write the weights as safetensors, named, cut into files and typed as those of --model."""
    partial = Path(f"{folder}.partial")
    if run.report.world.is_rank0:
        shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
        partial.mkdir(parents=True)
    dist.barrier(run.files)
    file_of = {name: tensor.file for name, tensor in run.source.items()}
    weights = {
        name: weight.detach().to(run.source[name].dtype)
        for name, weight in run.model.named_parameters()
    }
    writer = dcp.HuggingFaceStorageWriter(
        partial / "shards", fqn_to_index_mapping=file_of, save_distributed=True
    )

    dcp.save(weights, storage_writer=writer, process_group=run.files)  # each rank its own rows
    consolidate_safetensors_files_on_every_rank(  # each rank some of the files
        partial / "shards", partial, file_of, process_group=run.files
    )

    if run.report.world.is_rank0:
        shutil.rmtree(partial / "shards")
        finetune_checks.copy_other_files(Path(run.args.model), partial)
        partial.rename(folder)
    dist.barrier(run.files)


def parse_args():
    parser = cli.ArgumentParser(__doc__, resumes=True)
    add, positive = parser.add_argument, cli.positive_int
    add("--model", metavar="DIR", help="folder of a Hugging Face model with its tokenizer")
    add("--data", "--text-file", dest="text_file", metavar="FILE",
        help='lines of {"prompt": "...", "answer": "..."} (about Python\'s strings)')  # fmt: skip
    add("--seq-len", type=positive, default=128, help="most tokens of prompt and answer (128)")
    add("--micro-batch-size", type=positive, default=4, help="pairs per rank at a time (4)")
    add("--grad-accum-steps", type=positive, help="micro-batches per rank and step (1)")
    add("--global-batch-size", type=positive, help="pairs per step: sets --grad-accum-steps")
    add("--max-steps", type=positive, default=100, help="optimizer steps of the whole run (100)")
    add("--lr", type=cli.positive_float, default=2e-5, help="peak learning rate of AdamW (2e-5)")
    add("--warmup-steps", type=cli.whole_number, default=5, help="steps of linear warmup (5)")
    add("--max-grad-norm", type=cli.positive_float, default=1.0, help="clip longer gradients (1)")
    add("--precision", choices=("32-true", "bf16-mixed"), default="32-true", help="(32-true)")
    add("--log-every", type=positive, default=10, help="most steps between two looks (10)")
    add("--save-every", type=positive, default=20, help="steps, with --output-dir (20)")
    add("--export", metavar="DIR", help="write the tuned model for transformers to this folder")
    add("--parity-steps", type=cli.whole_number,
        help="compared with one process (2; 0 for a model above 50 million weights)")  # fmt: skip
    add("--kill-at-step", type=positive, help="end all ranks by SIGKILL: rehearse a failure")
    add("--make-tiny", metavar="DIR", help="write a tiny model with random weights, and end")
    add("--ask", metavar="PROMPT", help="answer from --model by transformers alone, and end")
    add("--max-new-tokens", type=positive, default=64, help="most tokens of an answer (64)")
    add("--dry-run", action="store_true", help="say what --world-size GPUs would need, and end")
    add("--world-size", type=positive, default=8, help="ranks of a dry run (8)")
    args = parser.parse_args()
    finetune_checks.need_transformers()
    if not (args.model or args.make_tiny):
        parser.error("--model is missing: a Hugging Face folder; --make-tiny DIR writes a tiny one")
    return args


def adamw(model, args):
    """Return the optimizer of this rank's shards. Fused, it needs no memory beside its state."""
    return torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.95), weight_decay=0.0, fused=True)


def set_up(args, report):
    """Return the run: model, optimizer, data and its place in it, ready for the first step."""
    world, device = report.world, report.device
    run = SimpleNamespace(args=args, report=report, step=0, history=[], trained_tokens=0)
    runtime.seed_everything(args.seed)
    identity = data.settle_batch_sizes(args, world.world_size)
    finetune_checks.claim_folder(args.export, "--export")
    run.pairs = load_pairs(args.text_file)
    tokenizer = finetune_checks.load(args, AutoTokenizer, "tokenizer")
    run.train_set = Answers(run.pairs, tokenizer, args.seq_len, world.world_size)
    run.sampler = data.ShardedSampler(len(run.train_set), world.rank, world.world_size, args.seed)
    run.model = build(args, init_device_mesh(device.type, (world.world_size,)), device)
    run.shapes = dict(run.model.named_parameters())
    run.source = finetune_checks.tensors_of(run.model, args.model)
    finetune_checks.start(run, identity)

    run.files = sharded_checkpoint.file_group()
    run.optimizer = adamw(run.model, args)
    run.settings = finetune_checks.settings_of(run)
    if not (args.resume and sharded_checkpoint.resume(run)):
        read_weights(run.model, args.model, run.files)
    run.batches = data.job_batches(run.train_set, run.sampler, args)
    run.timer = measure.StepTimer(device, warmup=args.log_every)
    run.log = measure.StepLog(report.output if world.is_rank0 else None, run.step + 1)
    return run


def main():
    args = parse_args()
    if args.make_tiny or args.ask or args.dry_run:
        return finetune_checks.alone(args)
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("02-fsdp/fsdp_finetune.py", args, world, device)
        run = set_up(args, report)
        place = run.sampler.state_dict()
        finetune_checks.check_padding(run, trim, summed_loss)
        if run.step == 0:
            finetune_checks.draw_batch(run)
            expected = finetune_checks.one_process(run, adamw)
            train(run, range(1, args.parity_steps + 1))
            finetune_checks.check_parity(run, expected)
        if report.failed:  # now, and not after days
            return report.finish("")

        signals = sharded_checkpoint.catch_preemption()
        train(run, range(run.step + 1, args.max_steps + 1), signals)

        if run.history:
            finetune_checks.check_tokens(run, place)
            finetune_checks.check_bytes(run)
            report.metrics |= {"final_loss": run.loss, "step_time_ms": run.timer.median_ms()}
        report.metrics["peak_memory_gib"] = measure.peak_memory_gib(device)
        if run.step < args.max_steps:
            end = f"asked to stop, {'saved' if report.output else 'not saved'}"
        elif args.export:
            export(run, args.export)
            finetune_checks.check_export(run)
            end = f"exported to {args.export}"
        else:
            end = "trained to the end"
        return report.finish(f"at step {run.step} of {args.max_steps}, {end}")


if __name__ == "__main__":
    cli.run(main)
