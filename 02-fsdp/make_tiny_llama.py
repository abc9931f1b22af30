"""Write a tiny Llama with random weights and chats to fine-tune it on: no download.

    python 02-fsdp/make_tiny_llama.py runs/tiny-llama

Its tokens are bytes, and one more that ends an answer. The chats ask what functions in
the guide's text do.
"""

import json
import re
import sys
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dist_common.data import TEXT
from dist_common.hf import PLAIN_TEMPLATE

NUM_CHATS = 40


def build_tokenizer():
    """Return a tokenizer of 257 tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    by_byte = Tokenizer(models.BPE(vocabulary, merges=[]))
    by_byte.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_byte.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=by_byte, eos_token="</s>", chat_template=PLAIN_TEMPLATE
    )


def as_messages(question, answer):
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]


def make_tiny_llama(folder):
    """Write a model of 0.1 million weights in two files, its tokenizer and chats."""
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        architectures=["LlamaForCausalLM"],
        initializer_range=0.1,  # 0.02 is for wide layers; this learns sooner
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    weights = dict(LlamaForCausalLM(config).named_parameters())
    # As save_pretrained does, which also imports DeepSpeed if it is installed.
    save_torch_state_dict(weights, folder, max_shard_size="300KB")
    functions = re.findall(r'def (\w+)\(.*\):\n +"""(.{10,60}?\.)\n', TEXT.read_text())
    chats = [
        json.dumps({"messages": as_messages(f"What does {name} do?", text)})
        for name, text in list(dict(functions).items())[:NUM_CHATS]
    ]
    Path(folder, "chats.jsonl").write_text("\n".join(chats) + "\n")


if __name__ == "__main__":
    make_tiny_llama(sys.argv[1])
