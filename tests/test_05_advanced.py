"""Module 05: what breaks a lesson has to fail the check that guards it."""

from functools import partial

import pytest
import torch
from conftest import REPO, assert_one_line, results_of, run_command

ACCUMULATION = "05-advanced/gradient_accumulation.py"
CHECKPOINTING = "05-advanced/activation_checkpointing.py"
OVERLAP = "05-advanced/communication_overlap.py"
RING = "05-advanced/ring_attention.py"
ULYSSES = "05-advanced/ulysses.py"
WEIGHT_SYNC = "05-advanced/weight_sync.py"


def ignore_other_ranks(script):
    script.mean_of_tokens = script.mean_of_rank_means


def drop_a_micro_batch(script):
    divide = script.divide
    script.divide = lambda *args: divide(*args)[:-1] or divide(*args)


def send_every_micro_batch(script):
    script.accumulate = script.send_each


def keep_a_copy(script):
    """Keep for backward what does not grow with the micro-batch."""
    right = script.summed_loss

    def greedy(model, inputs, targets):
        more = torch.ones(10**6, requires_grad=True)
        return right(model, inputs, targets) + 0 * more.exp().sum()

    script.summed_loss = greedy


def leave_a_gradient_out(script):
    """All-reduce every gradient in backward but the last layer's."""
    ddp = script.DDP

    def wrap(model, **options):
        ddp._set_params_and_buffers_to_ignore_for_model(model, ["3.weight"])
        return ddp(model, **options)

    script.DDP = wrap


def put_all_in_one_bucket(script):
    use_ddp = script.use_ddp
    script.use_ddp = lambda model, group, layers_per_bucket: use_ddp(model, group, 4)


def never_prefetch(script):
    use_fsdp = script.use_fsdp
    script.use_fsdp = lambda model, group, prefetch: use_fsdp(model, group, False)


def wait_before_computing(script):
    script.wait_late = script.wait_at_once


def forget_the_random_state(script):
    """Drop other outputs in backward than in forward."""
    script.Checkpointed = partial(script.Checkpointed, preserve_rng_state=False)


def leave_a_block_out(script):
    checkpoint_all = script.checkpoint_all
    script.CHOICES["full"] = lambda blocks: [blocks[0], *checkpoint_all(blocks[1:])]


def keep_attention_only(script):
    script.PRODUCT = None


def repeat_all_of_forward(script):
    """Also the last product of a block, which backward does not need."""
    script.Checkpointed = partial(script.Checkpointed, early_stop=False)


def skip_the_last_bucket(script):
    divide = script.divide_into_buckets
    script.divide_into_buckets = lambda model: divide(model)[:-1]


def never_wait(script):
    pending = script.Requests.pending
    script.Requests.pending = lambda self, oldest: pending(self, min(oldest, -1))


def forget_the_mask(script):
    masked_scores = script.masked_scores
    script.masked_scores = lambda q, k, is_diagonal: masked_scores(q, k, False)


def attend_to_all_tokens(script):
    attend = torch.nn.functional.scaled_dot_product_attention
    script.attend_causally = partial(attend, enable_gqa=True)


def shift_the_tokens(script):
    """Give each rank its neighbour's tokens."""
    positions = script.Ring.positions

    def shifted(ring, device):
        return positions(script.Ring(ring.layout, ring.rank + 1, ring.size), device)

    script.Ring.positions = shifted


def forget_to_sum_gradients(script):
    script.sum_gradients = lambda model: None


def keep_chunks_in_order(script):
    """Give a rank neighbouring chunks in the zigzag layout too."""
    chunks = script.Ring.chunks

    def in_order(ring, step=0):
        first = 2 * chunks(ring, step)[0]
        return [first, first + 1] if ring.layout == "zigzag" else [first // 2]

    script.Ring.chunks = in_order


def leave_heads_where_they_are(script):
    script.AllToAll.apply = lambda parts: parts


GRADIENT = "gradient: relative error, every division"
SABOTAGE = [
    (ACCUMULATION, 2, "", ignore_other_ranks, GRADIENT),
    (ACCUMULATION, 2, "", drop_a_micro_batch, GRADIENT),
    (ACCUMULATION, 2, "", send_every_micro_batch, "bytes sent with no_sync"),
    (ACCUMULATION, 2, "", keep_a_copy, "largest / smallest bytes kept"),
    (OVERLAP, 2, "", leave_a_gradient_out, "gradient: largest relative error"),
    (OVERLAP, 2, "", put_all_in_one_bucket, "ddp-buckets: hidden collectives"),
    (OVERLAP, 2, "", never_prefetch, "fsdp-prefetch: hidden collectives"),
    (OVERLAP, 2, "", wait_before_computing, "wait-late: hidden collectives"),
    (CHECKPOINTING, 2, "", forget_the_random_state, "gradient with dropout: error"),
    (CHECKPOINTING, 1, "", leave_a_block_out, "full: bytes kept"),
    (CHECKPOINTING, 1, "", keep_attention_only, "selective: bytes kept"),
    (CHECKPOINTING, 1, "", repeat_all_of_forward, "full: FLOPs repeated"),
    (RING, 2, "", forget_the_mask, "zigzag: relative error of the gradient"),
    (RING, 3, "", shift_the_tokens, "zigzag: relative error of the gradient"),
    (RING, 2, "", forget_to_sum_gradients, "zigzag: relative error of the gradient"),
    (RING, 2, "", keep_chunks_in_order, "zigzag: pairs of the busiest rank"),
    (ULYSSES, 2, "", attend_to_all_tokens, "ulysses: relative error of the gradient"),
    (ULYSSES, 2, "", leave_heads_where_they_are, "ulysses: bytes sent per layer"),
    (WEIGHT_SYNC, 3, "", skip_the_last_bucket, "largest difference of logits"),
    (WEIGHT_SYNC, 2, "--rollout-ms 2000", never_wait, "steps beyond --max-staleness"),
]


@pytest.mark.full
@pytest.mark.parametrize(("script", "ranks", "flags", "before", "check"), SABOTAGE)
def test_sabotage_fails_its_check(
    run_script, tmp_path, script, ranks, flags, before, check
):
    words = (*flags.split(), "--output-dir", tmp_path / "run")
    ended = run_script(script, *words, world_size=ranks, before=before)
    assert ended.codes == [1] * ranks, ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert check in failed


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        *((ACCUMULATION, ranks) for ranks in (1, 3, 4)),
        *((OVERLAP, ranks) for ranks in (1, 3, 4)),
        *((CHECKPOINTING, ranks) for ranks in (1, 3, 4)),
        *((RING, ranks) for ranks in (1, 2, 3)),
        *((ULYSSES, ranks) for ranks in (1, 2)),
        (WEIGHT_SYNC, 4),
    ],
)
def test_a_lesson_passes_on_other_ranks_and_seeds(run_script, script, ranks):
    ended = run_script(script, "--seed", 7, world_size=ranks)
    assert ended.codes == [0] * ranks, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("script", "ranks", "message"),
    [
        (ACCUMULATION, 5, "5 ranks: start 1, 2, 3, 4, 6 or 12"),
        (OVERLAP, 7, "--width must be a multiple of the 7 ranks"),
        (RING, 7, "7 ranks: start 1, 2, 3, 4, 5, 6 or 8"),
        (ULYSSES, 3, "3 ranks: start 1, 2 or 4, to divide 4 heads"),
        (WEIGHT_SYNC, 1, "1 ranks: start 2, 3, 4, 5, 7 or 13; one samples"),
    ],
)
def test_a_wrong_number_of_ranks_is_refused(run_script, script, ranks, message):
    ended = run_script(script, world_size=ranks)
    assert_one_line(ended, message, script.split("/")[1])


# launch_advanced.sh


@pytest.mark.full
@pytest.mark.parametrize(
    ("argv", "code", "line"),
    [
        (
            "local --nproc-per-node 8 --tp 2 --dry-run",
            0,
            "torchrun --standalone --nproc-per-node=8 "
            "05-advanced/hybrid_parallelism.py --tp 2\n",
        ),
        ("local other.py", 2, "error: other.py is none of activation_checkpointing.py"),
    ],
)
def test_the_launcher_prints_a_command_or_an_error(argv, code, line):
    command = ["bash", "05-advanced/launch_advanced.sh", *argv.split()]
    ended = run_command(command, REPO, 60)
    assert ended.codes == [code]
    assert line in (ended.stderr if code else ended.stdout)
