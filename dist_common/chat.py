"""Prompts and answers to fine-tune on, padded to one length.

Only the answer's tokens count in the loss: IGNORED is the target of prompt and padding.
"""

import hashlib
import inspect
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from dist_common.cli import UsageError
from dist_common.data import IGNORED

PADDING = 0  # any token will do: no loss counts it, and no token before it attends to it


def load_pairs(path: str | None) -> list[tuple[str, str]]:
    """Read (prompt, answer) from each line of JSON; without a file, ask about Python's own strings.

    Raises: UsageError naming the first line that is no such pair, or when there is none.
    """
    if path is None:
        return pairs_of_python()
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UsageError(f"--data {path}: {cause}") from error
    pairs = [_pair(line, f"--data {path}, line {number}")
             for number, line in enumerate(lines, 1) if line.strip()]  # fmt: skip
    if not pairs:
        raise UsageError(f"--data {path} has no pair of a prompt and an answer")
    return pairs


def _pair(line: str, where: str) -> tuple[str, str]:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UsageError(f'{where}: not an object like {{"prompt": "...", "answer": "..."}}')
    for name in ("prompt", "answer"):
        if not (isinstance(content.get(name), str) and content[name].strip()):
            raise UsageError(f'{where}: "{name}" is missing, empty or not text')
    return content["prompt"], content["answer"]


def pairs_of_python() -> list[tuple[str, str]]:
    """Return a question about each method of `str`, and the first line of its documentation."""
    methods = [name for name in dir(str) if not name.startswith("_")]
    documented = ((name, inspect.getdoc(getattr(str, name))) for name in methods)
    return [
        (f"What does str.{name} do?", text.splitlines()[0]) for name, text in documented if text
    ]


def prompt_ids(tokenizer, prompt: str) -> list[int]:
    """Return the tokens up to where an answer begins: in the model's own chat format if it has one.

    Training and generating call this same function: a model that is asked in another format than
    it was tuned in answers worse, and nothing says why.
    """
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    return tokenizer(f"{prompt}\n").input_ids


class Answers(Dataset):
    """Padded sequences of a prompt, its answer and the end-of-text token.

    Shapes: an item is (inputs (T,), targets (T,)), int64. `lengths` are the tokens that count.
    Pairs of more than T + 1 tokens are left out: an answer without its end would teach to go on.
    """

    def __init__(self, pairs, tokenizer, seq_len: int, world_size: int = 1) -> None:
        self.seq_len, self.tokens, starts = seq_len, [], []
        for prompt, answer in pairs:
            before = prompt_ids(tokenizer, prompt)
            after = tokenizer(answer, add_special_tokens=False).input_ids
            tokens = [*before, *after, tokenizer.eos_token_id]
            if len(tokens) <= seq_len + 1:
                self.tokens.append(tokens)
                starts.append(len(before))
        self.left_out = len(pairs) - len(self.tokens)
        if len(self.tokens) < world_size:
            fit = f"{len(self.tokens)} of {len(pairs)} pairs fit into --seq-len {seq_len}"
            raise UsageError(f"{fit}, fewer than the {world_size} ranks: raise it, or add data")
        self.lengths = torch.tensor([len(t) for t in self.tokens]) - torch.tensor(starts)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.tensor(self.tokens[index])
        inputs = tokens[:-1]
        targets = tokens[1:].clone()
        targets[: -self.lengths[index]] = IGNORED  # the prompt's
        missing = (0, self.seq_len - len(inputs))
        return F.pad(inputs, missing, value=PADDING), F.pad(targets, missing, value=IGNORED)

    @property
    def longest(self) -> int:
        """Return how many tokens the longest sequence has to read."""
        return max(len(tokens) for tokens in self.tokens) - 1

    def checksum(self) -> str:
        """Return a fingerprint of all tokens, for a checkpoint's manifest."""
        return hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()[:8]


def trim(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut off the columns that are padding in every row. Shapes: (B, T) -> (B, at most T)."""
    counted = (targets != IGNORED).any(dim=0).nonzero()
    end = int(counted[-1]) + 1 if len(counted) else 1
    return inputs[:, :end], targets[:, :end]
