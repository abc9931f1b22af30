"""What ulysses.py counts and prints beside its answer, and its picture."""

import torch

from cp_costs import LINKS_GB_S, comparison, tokens_to_hide
from dist_common import runtime
from dist_common.cli import UsageError
from dist_common.models import PRESETS
from dist_common.report import figure

COMPARED = ("llama2-7b", "llama3-8b", "llama3-70b")  # presets
RANKS = (2, 8, 32, 64)
TOKENS_DRAWN = 4  # per rank


def refuse_heads(heads: int, ranks: int) -> None:
    """Raise UsageError when the ranks cannot have as many query heads each."""
    if heads % ranks:
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        some = f"{heads} heads cannot be dealt to {ranks} ranks alike"
        raise UsageError(f"{some}: start {', '.join(map(str, fits))}, or take ring_attention.py")


def bytes_sent(counter, ranks: int) -> int:
    """Return the bytes that left this rank: an all-to-all is handed its output and its input.

    One of `ranks` equal parts of the input is this rank's own and stays.
    """
    handed_over = counter.bytes["alltoall_base_"] // 2
    return handed_over * (ranks - 1) // ranks


def check_calls(report, counted, layers: int) -> None:
    """Check the all-to-alls of a layer, in forward and in backward."""
    for way, counter in zip(("forward", "backward"), counted, strict=True):
        calls = counter.calls["alltoall_base_"] / layers
        report.check(f"{way}: all-to-alls per layer", calls, 4, 0, "q, k, v and out")


def print_comparison(report, tokens: int) -> None:
    """Print what each way sends, and from how many tokens on the ring hides it."""
    tokens_text = f"one sequence of {tokens:,} tokens"
    report.say(f"MiB that a rank sends per layer, forward and backward, bf16, {tokens_text}:")
    rows = comparison(COMPARED, RANKS, tokens)
    headers = ("model", "heads / kv", "ranks", "ring", "all-gather", "Ulysses")
    report.table(rows, headers)
    report.say("tokens per rank from which the ring's forward hides its sends, H100, bf16:")
    rows = [
        (name, *(f"{tokens_to_hide(PRESETS[name], rate):,}" for rate in LINKS_GB_S.values()))
        for name in COMPARED
    ]
    links = [f"{name}, {rate:.0f} GB/s" for name, rate in LINKS_GB_S.items()]
    report.table(rows, ("model", *links))


def layouts_of(to_heads, heads: int, report) -> list[torch.Tensor]:
    """Return which rank holds which head of which token, before and after an all-to-all.

    Found by sending numbered cells through `to_heads(x, group)`. Shapes: (heads, tokens) twice.
    """
    ranks, tokens = report.world.world_size, TOKENS_DRAWN * report.world.world_size
    cells = torch.arange(float(heads * tokens), device=report.device).view(1, heads, tokens, 1)
    own = cells.chunk(ranks, dim=2)[report.world.rank]
    layouts = []
    for held in (own, to_heads(own, None)):
        holders = torch.full((heads * tokens,), -1)
        for rank, numbers in enumerate(runtime.gather(held.flatten().long().tolist())):
            holders[numbers] = rank
        layouts.append(holders.view(heads, tokens))
    return layouts


def draw_layouts(path, before: torch.Tensor, after: torch.Tensor) -> None:
    """Draw the ranks that hold each (head, token), before and after the all-to-all."""
    heads, tokens = before.shape
    titles = ("before: some tokens, all heads", "during attention: all tokens, some heads")
    with figure(path, 1, 2, figsize=(11, 1.2 + 0.5 * heads), sharey=True) as axes:
        for ax, holders, title in zip(axes, (before, after), titles, strict=True):
            ax.imshow(holders, cmap="Set3", vmin=0, vmax=11, aspect="auto")
            if tokens <= 32:
                for head, token in torch.cartesian_prod(torch.arange(heads), torch.arange(tokens)):
                    rank = holders[head, token].item()
                    ax.text(token, head, f"{rank}", ha="center", va="center", size=9)
            ax.set_xticks(range(0, tokens, TOKENS_DRAWN))
            ax.set_yticks(range(heads))
            ax.set_title(title, loc="left")
            ax.set_xlabel("token (in a cell: the rank that holds it)")
        axes[0].set_ylabel("head")
