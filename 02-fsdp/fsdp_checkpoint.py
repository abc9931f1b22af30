"""Save a sharded model in three ways, and go on from it on other ranks and in another strategy.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_checkpoint.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_checkpoint.py --preset 124m

This compares the ways. `save` trains and saves, `load` goes on from it, `convert` makes one file of
shards or shards of one file, `export` and `import` exchange weights with Hugging Face. Look for:
how long the training stands still; the losses of a run that never stopped, whoever goes on; the
checkpoint before, where a save was killed or a file is damaged.

Sources: docs.pytorch.org, "Getting Started with Distributed Checkpoint (DCP)" and "Asynchronous
Saving with Distributed Checkpoint (DCP)"; huggingface.co/docs, "Llama" and "Safetensors".
"""

import contextlib
import json
import re
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
import torch.nn.functional as F
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from dist_common import checkpoint, cli, data, models, proofs, runtime
from dist_common.cli import UsageError
from dist_common.models import PRESETS, Transformer
from dist_common.report import Report
from dist_common.runtime import from_rank0

KINDS = ("sharded", "full", "async")
FULL = "full.pt"
KEPT = sys.maxsize  # checkpoints in a folder: all
TP = {"fsdp": 1, "ddp": 1, "tp-fsdp": 2}  # strategy: ranks that share a layer's rows and columns
SEQ_LEN = 64  # tokens
LOSS_TOLERANCE = 1e-5  # of losses near 5, whose terms are added in another order
TO_RANK0 = {"full_state_dict": True, "cpu_offload": True}
FROM_RANK0 = {"full_state_dict": True, "broadcast_from_rank0": True}
HF_NAMES = {
    "embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
HF_SHAPE = {
    "vocab_size": "vocab_size", "hidden_size": "dim", "intermediate_size": "ffn_dim",
    "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads", "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps", "tie_word_embeddings": "tied_embeddings",
}  # fmt: skip


def save(kind, directory, run, files):
    """Write a checkpoint; return a future, done when it is whole. A collective.

    All goes to a folder under another name, which `sealed` hashes and renames when it is left.
    """
    # To gather a state on rank 0 takes all ranks: under `if rank == 0` it would wait for ever.
    state = state_of(run, **(TO_RANK0 if kind == "full" else {}))
    facts = {"tensors": checkpoint.shapes_of(state["model"])}
    step = run.progress["step"]
    upload = None
    with contextlib.ExitStack() as stack:
        sealed = checkpoint.sealed(Path(directory), step, facts, KEPT, files)
        partial = stack.enter_context(sealed)
        if kind == "sharded":
            dcp.save(state, checkpoint_id=partial, process_group=files)

        elif kind == "async":
            upload = dcp.async_save(state, checkpoint_id=partial, process_group=files)

        elif dist.get_rank() == 0:
            with open(partial / FULL, "wb") as file:  # a path would lose the reason of a failure
                torch.save(state, file)
        rest = stack.pop_all()  # to leave the folder, in a thread

    def finish():
        with rest:
            if upload:
                upload.result()
        return time.perf_counter()

    thread = ThreadPoolExecutor(1)
    done = thread.submit(finish)
    thread.shutdown(wait=False)
    if kind != "async":  # that one has copied the state: training may go on and change it
        done.result()
    return done


def state_of(run, **options):
    """Return all that a run needs to go on, by the names of the whole model. A collective.

    Without options each tensor stays a DTensor: this rank's part, and its place in the whole.
    """
    options = StateDictOptions(**options)
    weights, moments = dcp_state.get_state_dict(run.model, run.optimizer, options=options)
    return {"model": weights, "optimizer": moments, "progress": run.progress.copy()}


def restore(found, run, files):
    """Load a checkpoint into a run that may be cut up in another way. A collective."""
    if FULL in found.files:
        state = {"model": {}, "optimizer": {}, "progress": None}
        options = FROM_RANK0
        if dist.get_rank() == 0:
            state = torch.load(found.folder / FULL, "cpu", weights_only=True, mmap=True)
        state["progress"] = from_rank0(state["progress"], files)
    else:
        state = state_of(run)  # what this rank holds, it reads, whoever wrote it
        options = {}

        dcp.load(state, checkpoint_id=found.folder, process_group=files)

    # Not both by set_state_dict: a rank that brings {} would skip the weights, and rank 0 wait.
    options = StateDictOptions(**options)
    dcp_state.set_model_state_dict(run.model, state["model"], options=options)
    dcp_state.set_optimizer_state_dict(
        run.model, run.optimizer, state["optimizer"], options=options
    )
    run.progress = state["progress"]


def newest(job, directory, may_be_none=False):
    """Return the newest checkpoint that is whole and of our model; name those passed over.

    A collective. Raises: UsageError when there is none that can be used.
    """
    with torch.device("meta"):
        ours = Transformer(job.config).state_dict()

    def problem(facts):
        return checkpoint.other_model(facts, ours)

    chosen = checkpoint.newest(Path(directory), job.report, problem, job.files)
    if chosen:
        folder, facts = chosen
        shards = sum(name.endswith(".distcp") for name in facts["files"])
        job.report.say(f"{folder.name} holds {f'{shards} shard(s)' if shards else 'one file'}")
        return SimpleNamespace(folder=folder, **facts)
    if not may_be_none:
        raise UsageError(f"there is no checkpoint in {directory}")


def distribute(model, strategy, device):
    """Cut a model up: by rows for FSDP, before that by tensor parallelism, or not at all."""
    if strategy == "ddp":
        return DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
    tp = TP[strategy]
    if dist.get_world_size() % tp:
        raise UsageError(f"--strategy {strategy} needs an even number of ranks")
    shape = (dist.get_world_size() // tp, tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
    columns = ("attention.wq", "attention.wk", "attention.wv", "gate", "up")
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {"attention.wo": RowwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks if tp > 1 else ():
        parallelize_module(block, mesh["tp"], plan)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"])
    return model


def start(job, seed, strategy=None):
    """Return a run before its first step; without a strategy, that of one process."""
    runtime.seed_everything(seed)
    model = Transformer(job.config).to(job.device)
    model = distribute(model, strategy, job.device) if strategy else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    progress = {"step": 0, "seed": seed, "global_batch_size": job.args.global_batch_size}
    return SimpleNamespace(model=model, optimizer=optimizer, strategy=strategy, progress=progress)


def train(job, run, steps):
    """Take steps; return the losses of the global batches. A batch follows from its step."""
    tp = TP.get(run.strategy)
    ranks = job.world.world_size
    losses = []
    part, parts = (job.world.rank // tp, ranks // tp) if tp else (0, 1)
    batch = run.progress["global_batch_size"]
    size = batch // parts
    if batch % parts:
        raise UsageError(f"--global-batch-size {batch} cannot be dealt evenly to {parts} ranks")
    for _ in range(steps):
        first = run.progress["step"] * batch + part * size
        inputs, targets = next(data.batches_of(job.text, 1, batch, first, size, job.device))
        run.optimizer.zero_grad()
        loss = F.cross_entropy(run.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        run.optimizer.step()
        run.progress["step"] += 1
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if run.strategy:
        dist.all_reduce(losses)
        losses /= ranks
    return losses.cpu()


def losses_alone(job, begin, steps, found=None):
    """Return the losses of one process that never stopped, in the steps after `begin`."""
    run = start(job, begin["seed"] or 0)
    run.progress = begin | {"step": 0}
    if begin["seed"] is None:  # imported: how its weights came about, nobody knows
        restore(found, run, job.files)
    todo = begin["step"] + steps - run.progress["step"]
    losses = train(job, run, todo)[-steps:] if job.world.is_rank0 else None
    return from_rank0(losses, job.files)


def compare(job):
    """Save in each way; go on from each, and without having stopped."""
    steps = job.args.max_steps
    seconds = {}
    own = job.args.dir
    if not own and job.world.is_rank0:
        own = tempfile.mkdtemp()
    folder = Path(from_rank0(own, job.files))
    run = start(job, job.args.seed, "fsdp")
    before = train(job, run, steps)
    save("sharded", folder / "warm-up", run, job.files)
    for kind in KINDS:  # async comes last: the training goes on while it is written
        dist.barrier(job.files)
        begun = time.perf_counter()
        saved = save(kind, folder / kind, run, job.files)
        seconds[kind] = [time.perf_counter() - begun]
        if kind == "async":
            straight = train(job, run, steps)
        seconds[kind].append(max(seconds[kind][0], saved.result() - begun))
    alone = losses_alone(job, start(job, job.args.seed).progress, 2 * steps)
    name = "never stopped: largest error of a loss"
    proofs.same_losses(job.report, torch.cat([before, straight]), alone, LOSS_TOLERANCE, name)
    rows = [row_of(job, kind, folder / kind, seconds[kind], straight) for kind in KINDS]
    names = ("training stood still", "until on disk", "to load", "MB in all", "by one rank")
    job.report.table(rows, ("kind", *names))
    if not job.args.dir and job.world.is_rank0:
        shutil.rmtree(folder)
    return f"loss {straight[-1]:.4f} after step {2 * steps}, stopped or not"


def row_of(job, kind, folder, seconds, straight):
    """Go on from a checkpoint, check losses and bytes, and return its row of the table."""
    found = newest(job, folder)
    run = start(job, job.args.seed + 1, "fsdp")  # another seed, so that nothing is right by itself
    dist.barrier(job.files)
    begun = time.perf_counter()
    restore(found, run, job.files)
    seconds.append(time.perf_counter() - begun)
    losses = train(job, run, len(straight))
    tolerance = 0 if job.device.type == "cpu" else LOSS_TOLERANCE  # GPUs add in any order
    name = f"{kind}: largest error of a loss"
    proofs.same_losses(job.report, losses, straight, tolerance, name, "never stopped")
    # one file for each rank that wrote
    sizes = [(found.folder / name).stat().st_size for name in found.files]
    whole = 12 * job.config.num_parameters()  # 4 bytes for a weight, 8 for Adam's two moments
    if job.config.tied_embeddings:  # one weight of two names is written under each
        whole += 4 * job.config.vocab_size * job.config.dim
    parts = 1 if kind == "full" else job.world.world_size
    around = 4 * 2048 * len(found.tensors)  # bytes that a rank adds: names and shapes of its pieces
    for who, size, right, slack in (
        ("in all", sum(sizes), whole, parts * around),
        ("by one rank", max(sizes), whole // parts, around),
    ):
        size, right, slack = size / 1e6, right / 1e6, (right / 50 + slack) / 1e6
        job.report.check(f"{kind}: MB {who}", size, right, slack, "12 bytes for a weight")
    for name, value in zip(("stall_ms", "on_disk_ms", "load_ms"), seconds, strict=True):
        job.report.metrics[f"{kind}_{name}"] = 1e3 * value
    times = [f"{1e3 * value:,.0f} ms" for value in seconds]
    return [kind, *times, f"{sum(sizes) / 1e6:.2f}", f"{max(sizes) / 1e6:.2f}"]


def go_on(job):
    """Train on from the newest whole checkpoint, `save` saving; compare with one process."""
    args = job.args
    losses = []
    saved = None
    saving = args.action == "save"
    found = newest(job, args.dir, may_be_none=saving)
    run = start(job, args.seed + bool(found), args.strategy)
    if found:
        restore(found, run, job.files)
    begin = run.progress.copy()
    for number in range(1, args.max_steps + 1):
        losses.append(train(job, run, 1))
        if saving and (number % args.save_every == 0 or number == args.max_steps):
            if saved:
                saved.result()  # one at a time
            saved = save(args.kind, args.dir, run, job.files)
    if saved:
        saved.result()  # a process that ends earlier has saved nothing
    losses = torch.cat(losses)
    alone = losses_alone(job, begin, args.max_steps, found)
    rows = [
        (str(begin["step"] + number), f"{own:.6f}", f"{right:.6f}")
        for number, (own, right) in enumerate(zip(losses, alone, strict=True), 1)
    ]
    here = f"loss, {args.strategy} on {job.world.world_size} rank(s)"
    job.report.table(rows, ("step", here, "one process that never stopped"))
    proofs.same_losses(job.report, losses, alone, LOSS_TOLERANCE)
    return f"loss {losses[-1]:.4f} after step {run.progress['step']}"


def convert(job):
    """Make one file of shards, or shards of one file, by loading it and saving it."""
    found = newest(job, job.args.dir)
    run = start(job, job.args.seed, "fsdp")
    restore(found, run, job.files)
    save("sharded" if FULL in found.files else "full", job.args.to, run, job.files).result()
    made = newest(job, job.args.to)
    equal = None
    if job.world.is_rank0:
        theirs = tensors_of(found)
        equal = sum(torch.equal(own, theirs[name]) for name, own in tensors_of(made).items())
    equal = from_rank0(equal, job.files)
    expected = len(found.tensors) + 3 * len(list(run.model.parameters()))
    job.report.check("tensors equal, bitwise", equal, expected, 0, "weights, and 3 of Adam each")
    return f"written to {job.args.to}"


def tensors_of(found):
    """Return all weights and moments by name, read by one process in PyTorch's own way."""
    with tempfile.TemporaryDirectory() as folder:
        path = found.folder / FULL
        if FULL not in found.files:
            path = Path(folder) / FULL
            dcp_to_torch_save(found.folder, path)
        state = torch.load(path, weights_only=True)
    named = state["model"].items()
    moments = state["optimizer"]["state"].items()
    return dict(named) | {
        (name, kind): moment for name, kept in moments for kind, moment in kept.items()
    }


def export(job):
    """Write the weights in Hugging Face's format."""
    found = newest(job, job.args.dir)
    to = Path(job.args.to)
    weights = whole_weights(job, found)
    if job.world.is_rank0:
        from safetensors.torch import save_file

        named = to_hf(weights, job.config)
        save_file(named, to / "model.safetensors", metadata={"format": "pt"})
        hf_config(job.config).save_pretrained(to)
    check_logits(job, to, weights)
    return f"written to {to}"


def import_(job):
    """Make a checkpoint to go on from, of weights in Hugging Face's format."""
    source = Path(vars(job.args)["from"])
    config = job.config
    if job.world.is_rank0:
        ours = hf_config(config)
        path = source / "config.json"
        content = path.read_text()
        try:
            theirs = type(ours)(**json.loads(content))
        except Exception as error:  # of transformers' own kinds too
            raise UsageError(f"{path} describes no Llama: {error}") from error
        variants = ("model_type", "hidden_act", "rope_parameters", "attention_bias", "mlp_bias")
        for name in (*variants, *HF_SHAPE, "head_dim"):
            here, there = getattr(ours, name), getattr(theirs, name)
            if here != there:
                raise UsageError(f"{path}: {name} is {there}, not {here} as --preset has it")
    run = start(job, job.args.seed, job.args.strategy)
    run.progress["seed"] = None
    state = to_hf(dcp_state.get_model_state_dict(run.model), config)

    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(source), process_group=job.files)

    # This makes room for moments by a step with gradients 0 and rate 0. Adam has counted it, and
    # would correct the first real step as if it were the second.
    dcp_state.get_optimizer_state_dict(run.model, run.optimizer)
    for kept in run.optimizer.state.values():
        kept["step"].zero_()
    save(job.args.kind, job.args.dir, run, job.files).result()
    check_logits(job, source, whole_weights(job, newest(job, job.args.dir)))
    return f"written to {job.args.dir}"


def to_hf(weights, config):
    """Return weights under Hugging Face's names; a tied head is the embedding, and left out.

    No row moves: both turn dim i of a head with dim i + head_dim / 2.
    """
    named = {}
    for name, tensor in weights.items():
        _, layer, part = re.fullmatch(r"(blocks\.(\d+)\.)?(.+)\.weight", name).groups()
        prefix = f"model.layers.{layer}." if layer else ""
        if not (config.tied_embeddings and part == "head"):
            named[f"{prefix}{HF_NAMES[part]}.weight"] = tensor
    return named


def hf_config(config):
    from transformers import LlamaConfig

    return LlamaConfig(
        **{theirs: getattr(config, ours) for theirs, ours in HF_SHAPE.items()},
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


def whole_weights(job, found):
    """Return a checkpoint's weights, on rank 0 whole and elsewhere nothing. A collective."""
    run = start(job, job.args.seed + 1, "fsdp")
    restore(found, run, job.files)
    return dcp_state.get_model_state_dict(run.model, options=StateDictOptions(**TO_RANK0))


def check_logits(job, folder, weights):
    """Check that transformers computes from its folder what our model does with the weights."""
    seen = None
    if job.world.is_rank0:
        from transformers import LlamaForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        options = {"dtype": torch.float32, "local_files_only": True, "output_loading_info": True}
        theirs, said = LlamaForCausalLM.from_pretrained(folder, **options)
        ours = Transformer(job.config)
        ours.load_state_dict(weights)
        tokens = torch.stack([job.text[index][0] for index in range(4)])
        with torch.no_grad():
            drift = (theirs(tokens).logits - ours(tokens)).abs().max().item()
        seen = drift, sum(len(names) for names in said.values())
    drift, strange = from_rank0(seen, job.files)
    job.report.check("largest difference of a logit", drift, 0, 1e-5, "transformers")
    job.report.check("weights missing or not expected", strange, 0, 0, "transformers")


# What an action does, the folders it needs, and the one that must not have anything in it.
ACTIONS = {
    "compare": (compare, (), "dir"),
    "save": (go_on, ("dir",), None),
    "load": (go_on, ("dir",), None),
    "convert": (convert, ("dir", "to"), "to"),
    "export": (export, ("dir", "to"), "to"),
    "import": (import_, ("from", "dir"), "dir"),
}


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    positive = cli.positive_int
    add("action", nargs="?", choices=ACTIONS, default="compare", help="(compare)")
    add("--dir", help="folder of checkpoints, which all machines see")
    add("--to", metavar="DIR", help="folder that convert and export write")
    add("--from", metavar="DIR", help="folder that import reads, from Hugging Face")
    add("--kind", choices=KINDS, default="sharded", help="how to save (sharded)")
    add("--strategy", choices=TP, default="fsdp", help="of save, load and import (fsdp)")
    add("--preset", choices=PRESETS, default="tiny", help="shape of the model (tiny)")
    add("--global-batch-size", type=positive, default=16, help="of a new run, over all ranks (16)")
    add("--max-steps", type=positive, default=4, help="training steps, from where it starts (4)")
    add("--save-every", type=positive, default=2, help="steps from save to save (2)")
    args = parser.parse_args()
    for flag in ACTIONS[args.action][1]:
        if vars(args)[flag] is None:
            parser.error(f"{args.action} needs --{flag}")
    return args


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("02-fsdp/fsdp_checkpoint.py", args, world, device)
        job = SimpleNamespace(args=args, world=world, device=device, report=report)
        job.config = models.preset(args.preset, SEQ_LEN)
        job.text = data.Sequences(data.load_text(), SEQ_LEN)
        # For files a group of its own: async_save calls collectives from a thread, which on the
        # training's group would get between the training's. And NCCL's cannot be used for it.
        job.files = dist.new_group(backend="gloo")
        action, _, empty = ACTIONS[args.action]
        to_fill = vars(args)[empty] if empty and world.is_rank0 else None
        try:
            if to_fill and Path(to_fill).exists() and any(Path(to_fill).iterdir()):
                raise UsageError(f"--{empty} {to_fill} is not empty: name another folder")
            report.start(f"{args.preset}: {job.config.num_parameters():,} weights")
            if to_fill:
                Path(to_fill).mkdir(parents=True, exist_ok=True)
            summary = action(job)
        except ImportError as error:
            raise UsageError(f"{args.action}: {error}: pip install transformers") from error
        except (CheckpointException, OSError, RuntimeError) as error:
            # The first is a BaseException: `except Exception` lets it through.
            rank, (cause, *_) = getattr(error, "failures", {world.rank: [error]}).popitem()
            if re.search("unexpected pos|write failed", str(cause)):  # all that torch.save says
                cause = "cannot write a file: is the disk full?"
            elif isinstance(error, RuntimeError):
                raise
            where = vars(args)["from"] or args.dir
            raise UsageError(f"{args.action}, {where}: rank {rank}: {cause}") from error
        return report.finish(summary)


if __name__ == "__main__":
    cli.run(main)
