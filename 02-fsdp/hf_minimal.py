"""Fine-tune your own Hugging Face model with FSDP2: load, train, save, load, export.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/hf_minimal.py \
              runs/tiny-llama runs/tiny-llama/chats.jsonl runs/tuned
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/hf_minimal.py \
              DIR chats.jsonl runs/tuned --lr 1e-5

make_tiny_llama.py writes runs/tiny-llama. Look for: the same losses on any number of
ranks, and the same loss when the checkpoint is loaded.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

STEPS = 20
BATCH_SIZE = 16  # chats per step on all ranks together, at least one per rank
parser = argparse.ArgumentParser()
parser.add_argument("model")  # folder of a Hugging Face model
parser.add_argument("data")  # chats, one JSON object per line
parser.add_argument("output")  # folder on a disk that all ranks share
parser.add_argument("--lr", type=float, default=0.01)  # for a tiny model
args = parser.parse_args()

gpu = torch.cuda.is_available()
device = "cuda" if gpu else "cpu"
if gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if gpu else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(device, (world_size,))
logging.disable_progress_bar()
config = AutoConfig.from_pretrained(args.model)
tokenizer = AutoTokenizer.from_pretrained(args.model)
if rank == 0:  # one copy for all ranks, in host memory
    whole = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")


def encode(line):
    """Return the inputs and targets of a chat: only the last answer counts."""
    messages = json.loads(line)["messages"]
    question = tokenizer.apply_chat_template(
        messages[:-1], add_generation_prompt=True, return_dict=False
    )
    tokens = tokenizer.apply_chat_template(messages, return_dict=False)
    assert tokens[: len(question)] == question, "the template rewrites the question"
    targets = [-100] * len(question) + tokens[len(question) :]
    return torch.tensor(tokens[:-1]), torch.tensor(targets[1:])


def batch_at(step):
    """Return this rank's share of a random batch, padded. Shapes: (B, T), (B, T)."""
    order = torch.randperm(len(chats), generator=torch.Generator().manual_seed(step))
    inputs, targets = zip(
        *[chats[i] for i in order[rank:BATCH_SIZE:world_size]], strict=True
    )
    inputs = pad_sequence(inputs, True)
    targets = pad_sequence(targets, True, -100)
    return inputs.to(device), targets.to(device)


def build():
    """Return a sharded model, without values yet, and its optimizer."""
    with torch.device("meta"):  # shapes without memory
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.activation_checkpointing_enable()  # keep the input of each layer
    policy = MixedPrecisionPolicy(torch.bfloat16 if gpu else None, torch.float32)
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    for unit in (*layers, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)  # memory for this rank's shards
    model.tie_weights()  # to_empty made two tensors of a shared one
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr)


def read_weights(model):
    """Send rank 0's model tensor by tensor; each rank keeps its shards."""
    weights = whole.state_dict() if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    for name, buffer in model.named_buffers():  # some are in no file
        if rank == 0:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, src=0)


def compute_loss(model, step):
    """Return the mean over all ranks' answer tokens: to print, to differentiate."""
    inputs, targets = batch_at(step)
    logits = model(input_ids=inputs, use_cache=False).logits.float()  # (B, T, V)
    loss = F.cross_entropy(logits.transpose(1, 2), targets, reduction="sum")
    totals = torch.stack([loss.detach(), (targets != -100).sum()])
    dist.all_reduce(totals)
    # FSDP averages over ranks, but the tokens of all ranks divide: undo the average.
    return totals[0] / totals[1], loss * world_size / totals[1]


def state_of(model, optimizer):
    """Return this rank's shards by name, and the buffers."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {"model": tensors, "optimizer": get_optimizer_state_dict(model, optimizer)}


def export(model):
    """Gather the weights on rank 0, which writes a folder for `from_pretrained`."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # on all ranks
    if rank == 0:
        folder = f"{args.output}/model"
        whole.load_state_dict(weights)
        whole.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


with open(args.data) as file:
    chats = [encode(line) for line in file]
model, optimizer = build()
read_weights(model)
for step in range(STEPS):
    mean, loss = compute_loss(model, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 5 == 0:
        print(f"step {step} | loss {mean:.4f}")

checkpoint = f"{args.output}/checkpoint"
dcp.save(state_of(model, optimizer), checkpoint_id=checkpoint)
trained, _ = compute_loss(model, STEPS)

model, optimizer = build()  # another one, without values
state = state_of(model, optimizer)
dcp.load(state, checkpoint_id=checkpoint)  # fills the shards
set_optimizer_state_dict(model, optimizer, state["optimizer"])
export(model)
loaded, _ = compute_loss(model, STEPS)
if rank == 0:
    print(f"loss after training {trained:.4f}, loaded again {loaded:.4f}")
dist.destroy_process_group()
