"""What the two lessons on AutoTP check: bytes held and sent, answers and gradients."""

import torch
import torch.distributed as dist
from torch import nn

from dist_common.measure import CollectiveCounter
from dist_common.report import Report

# Of the largest logit. A sum over N parts is added in another order; in bf16, which keeps 8 bits,
# parts are also rounded, by up to 1/512, before they are added: in two places of every layer.
LOGIT_TOLERANCE = {"32-true": 1e-5, "bf16-true": 5e-2}
CUT_BY_INPUTS = ("o_proj", "down_proj", "lm_head")


def expected_of(
    skeleton: nn.Module, config, ranks: int, prompt: torch.Tensor, new_tokens: int, size: int
) -> dict[str, int]:
    """Return by formula what the fullest rank holds, and what a generation sums.

    Shapes: prompt (B, T). `size` is the bytes of a number.

    Attention is cut by the heads that share keys and values, another layer by its width.
    Source: Megatron-LM, section 3; only that the last layer is cut by inputs here.
    """

    def part_of(units):
        return -(-units // ranks)

    weights, kv_heads = 0, config.num_key_value_heads
    for name, module in skeleton.named_modules():
        by_inputs = name.endswith(CUT_BY_INPUTS)
        for kind, weight in module.named_parameters(recurse=False):
            units = 1  # which each rank has
            if isinstance(module, nn.Linear) and not (by_inputs and kind == "bias"):
                width = module.in_features if by_inputs else module.out_features
                units = kv_heads if ".self_attn." in name else width
            weights += weight.numel() // units * part_of(units)
    L, D, V = config.num_hidden_layers, config.hidden_size, config.vocab_size
    B, T = prompt.shape
    read = T + new_tokens - 1  # the last token is not read any more
    kv_dim = skeleton.get_decoder().layers[0].self_attn.k_proj.out_features
    kv_dim = kv_dim // kv_heads * part_of(kv_heads)
    several = ranks > 1
    return {
        "bytes of weights": weights * size,
        "bytes of KV cache": 2 * L * B * read * kv_dim * size,
        "collectives": several * (2 * L + 1) * new_tokens,
        "bytes all-reduced": several * B * (2 * L * read * D + new_tokens * V) * size,
    }


def measured_of(engine, cache, counter: CollectiveCounter) -> list[int]:
    """Return the same from the tensors that are there and the collectives of a generation."""
    kept = [part for layer in cache.layers for part in (layer.keys, layer.values)]
    held = [sum(t.nbytes for t in tensors) for tensors in (engine.module.parameters(), kept)]
    most = torch.tensor(held, device=kept[0].device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return [*most.tolist(), sum(counter.calls.values()), counter.bytes["allreduce_"]]


def largest_difference(engine, plain: nn.Module | None, tokens: torch.Tensor) -> list[float]:
    """Return the largest difference of a logit from the whole model's, and the largest of those.

    `plain` is the whole model, on rank 0; None elsewhere. Shapes: tokens (B, T).
    """
    ours, found = engine(tokens).logits.float(), torch.zeros(2, device=tokens.device)  # (B, T, V)
    if plain:
        theirs = plain(tokens).logits.float()
        found = torch.stack([(ours - theirs).abs().max(), theirs.abs().max()])
    dist.broadcast(found, 0)
    return found.tolist()


def check_parts(report: Report, expected: dict[str, int], measured: list[int]) -> None:
    """Check bytes held and sent, number by number."""
    for (name, formula), value in zip(expected.items(), measured, strict=True):
        report.check(name, value, formula, 0, "Megatron-LM, section 3")


def check_answers(report: Report, engine, plain: nn.Module | None, tokens, right) -> None:
    """Check logits and tokens against the whole model's. Shapes: tokens, right (B, T)."""
    drift, largest = largest_difference(engine, plain, right)
    tolerance = LOGIT_TOLERANCE[report.args.precision] * largest
    report.check("largest difference of a logit", drift, 0, tolerance, "plain model")
    differ = (tokens != right).sum()
    dist.all_reduce(differ, op=dist.ReduceOp.MAX)
    report.metrics["tokens_that_differ"] = differ.item()
    if report.args.precision == "32-true":  # rounded to bf16, two logits may be equal
        report.check("tokens that differ", differ.item(), 0, 0, "plain model")


def print_speeds(report: Report, pairs, batch_size: int, new_tokens: int) -> None:
    """Print times and speeds, from the medians, and note them as metrics."""
    rows, units = [], ("time_to_first_token_ms", "time_per_token_ms", "tokens_per_second")
    ranks = report.world.world_size
    names = {"plain_": "plain model on rank 0 alone", "": f"DeepSpeed on {ranks} rank(s)"}
    for (prefix, name), pair in zip(names.items(), pairs, strict=True):
        if pair[0].steps_ms:  # the plain one's are on rank 0
            first, further = (timer.median_ms() for timer in pair)
            speed = 1e3 * batch_size * new_tokens / (first + (new_tokens - 1) * further)
            rows.append((name, f"{first:.1f} ms", f"{further:.1f} ms", f"{speed:,.1f} tok/s"))
            values = zip(units, (first, further, speed), strict=True)
            report.metrics |= {f"{prefix}{unit}": value for unit, value in values}
    report.table(rows, ("median", "first token", "each further one", "speed"))


# autotp_training.py


def part_of(whole: torch.Tensor, shape: torch.Size, rank: int) -> torch.Tensor:
    """Return a rank's part of a weight or gradient that is cut evenly, by outputs or by inputs."""
    for dim, size in enumerate(shape):
        if size != whole.shape[dim]:
            return whole.narrow(dim, rank * size, size)
    return whole


def gradient_error(ours: dict, theirs: dict, rank: int) -> float:
    """Return the largest error of a gradient on any rank, relative to the largest gradient.

    Both are by name; `ours` are this tensor-parallel rank's parts.
    """
    errors = [(part - part_of(theirs[name], part.shape, rank)).abs().max()
              for name, part in ours.items()]  # fmt: skip
    worst = torch.stack(errors).max() / max(whole.abs().max() for whole in theirs.values())
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def bytes_of_part(model: nn.Module, parts: int) -> int:
    """Return by formula the bytes of weights that a rank holds: of each linear layer a part."""
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    return sum(p.nbytes // (parts if id(p) in linear else 1) for p in model.parameters())


def expected_calls(config, parts: int) -> dict[str, int]:
    """Return by formula the collectives of one forward and one backward.

    Forward sums the output of each layer that is cut by inputs, and gathers the logits; backward
    sums the gradient of the input of each that is cut by outputs: q, k, v, gate, up, and the head.
    """
    several, L = parts > 1, config.num_hidden_layers
    return {
        "all-reduces in forward": several * 2 * L,
        "all-gathers in forward": several * 1,
        "all-reduces in backward": several * (5 * L + 1),
    }


def calls_of(forward: CollectiveCounter, backward: CollectiveCounter) -> list[int]:
    """Return the same as they were counted."""
    gathered = forward.calls["_allgather_base_"]
    return [forward.calls["allreduce_"], gathered, sum(backward.calls.values())]
