"""Module 05: each sabotage of a lesson fails the check that guards it."""

import tomllib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import REPO, assert_one_line, results_of, run_command

LESSONS = tomllib.loads((REPO / "tests" / "lessons.toml").read_text())
ACCUMULATION = "05-advanced/gradient_accumulation.py"
EXPERTS = "05-advanced/expert_parallel.py"
CHECKPOINTING = "05-advanced/activation_checkpointing.py"
GOODPUT = "05-advanced/goodput.py"
LOW_PRECISION = "05-advanced/low_precision.py"
OVERLAP = "05-advanced/communication_overlap.py"
COMPRESSION = "05-advanced/gradient_compression.py"
LOCAL_SGD = "05-advanced/local_sgd.py"
TENSOR = "05-advanced/tensor_parallel.py"
TENSOR_PLAN = "05-advanced/tensor_parallel_dtensor.py"
PIPELINE = "05-advanced/pipeline_parallel.py"
SCHEDULES = "05-advanced/pipeline_schedules.py"
RING = "05-advanced/ring_attention.py"
ULYSSES = "05-advanced/ulysses.py"
WEIGHT_SYNC = "05-advanced/weight_sync.py"


def ignore_other_ranks(script):
    script.mean_of_tokens = script.mean_of_rank_means


def send_every_micro_batch(script):
    script.accumulate = script.send_each


def keep_a_copy(script):
    """Keep a tensor for backward whose size does not depend on the micro-batch."""
    original = script.summed_loss

    def greedy(model, inputs, targets):
        more = torch.ones(10**6, requires_grad=True)
        return original(model, inputs, targets) + 0 * more.exp().sum()

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


def forget_the_random_state(script):
    """Drop other outputs in backward than in forward."""
    script.Checkpointed = partial(script.Checkpointed, preserve_rng_state=False)


def leave_a_block_out(script):
    checkpoint_all = script.checkpoint_all
    script.CHOICES["full"] = lambda blocks: [blocks[0], *checkpoint_all(blocks[1:])]


def repeat_all_of_forward(script):
    """Also the last product of a block, which backward does not need."""
    script.Checkpointed = partial(script.Checkpointed, early_stop=False)


def leave_out_f(script):
    """No all-reduce in backward."""
    script.f = script.identity


def keep_norms_apart(script):
    script.ParallelTransformer.sum_norm_gradients = lambda model: None


def gather_before_norms(script):
    """The right values, but norms keep all tokens for backward."""

    def forward(block, x, cos, sin):
        h = block.attention_norm(block.f(x))
        x = x + block.g(block.attention(h, cos, sin))
        h = block.ffn_norm(block.f(x))
        return x + block.g(block.down(F.silu(block.gate(h)) * block.up(h)))

    script.ParallelBlock.forward = forward


def forget_a_norm(script):
    plan, *rest = script.PLANS["sequence parallel"]
    styles = plan()
    del styles["blocks.*.ffn_norm"]
    script.PLANS["sequence parallel"] = (lambda: styles, *rest)


def share_no_input(script):
    """Let each matrix make a DTensor of its own."""
    plan, *rest = script.PLANS["tensor parallel"]
    styles = plan()
    del styles["blocks.*.attention"], styles["blocks.*.ffn_norm"]
    script.PLANS["tensor parallel"] = (lambda: styles, *rest)


def send_a_sum(script):
    """Forget to divide by the number of ranks."""
    hook = script.send_bfloat16
    ranks = script.dist.get_world_size
    script.send_bfloat16 = lambda state, bucket: hook(state, bucket).then(
        lambda mean: mean.value() * ranks()
    )


def forget_the_residual(script):
    script.TopK = lambda feedback: SimpleNamespace(feedback=False, unsent={})


def send_places_twice(script):
    gather = script.gather

    def gather_twice(tensor):
        if not tensor.is_floating_point():
            gather(tensor)
        return gather(tensor)

    script.gather = gather_twice


def clip_scaled_gradients(script):
    """Forget to unscale before clipping."""

    def train_step(model, optimizer, scaler, dtype, tokens):
        optimizer.zero_grad()
        loss = script.mean_loss(model, tokens, dtype)
        scaler.scale(loss).backward()
        script.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    script.train_step = train_step


def round_to_two_bits(script):
    """Round float8 inputs to e5m2 instead of e4m3."""
    from torchao import float8
    from torchao.float8.config import CastConfig

    cast = CastConfig(target_dtype=torch.float8_e5m2)
    float8.Float8LinearConfig = partial(
        float8.Float8LinearConfig,
        cast_config_input=cast,
        cast_config_input_for_grad_weight=cast,
    )


def autocast_to_bfloat16(script):
    original = script.mean_loss
    script.mean_loss = lambda model, tokens, dtype: original(
        model, tokens, dtype and torch.bfloat16
    )


def sum_instead_of_mean(script):
    average = script.average

    def add_up(tensors):
        average(tensors)
        with torch.no_grad():
            for tensor in tensors:
                tensor *= script.dist.get_world_size()

    script.average = add_up


def step_along_the_rank_alone(script):
    """Average copies, so that each rank keeps its own pseudo-gradient."""
    average = script.average
    script.average = lambda tensors: average([tensor.clone() for tensor in tensors])


def exchange_twice(script):
    average = script.average
    script.average = lambda tensors: average(tensors) or average(tensors)


def save_at_youngs_interval(script):
    script.daly_interval = script.young_interval


def restart_without_failures(script):
    """Forget that failures come during restarts, too."""
    exact = script.exact_goodput

    def forget(job, interval_s):
        M = job.between_s
        without = script.Job(M, job.save_s, 0)
        return exact(without, interval_s) * M / (M + job.restart_s)

    script.exact_goodput = forget


def skip_the_last_bucket(script):
    divide = script.divide_into_buckets
    script.divide_into_buckets = lambda model: divide(model)[:-1]


def never_wait(script):
    pending = script.Requests.pending
    script.Requests.pending = lambda self, oldest: pending(self, min(oldest, -1))


def reverse_the_last_rank(script):
    original = script.SCHEDULES["1f1b"]

    def reversed_on_one_rank(rank, p, m):
        return list(original(rank, p, m))[:: -1 if rank == p - 1 else 1]

    script.SCHEDULES["1f1b"] = reversed_on_one_rank


def never_run_ahead(script):
    script.SCHEDULES["1f1b"] = script.naive


def run_all_forwards_ahead(script):
    script.SCHEDULES["1f1b"] = script.gpipe


def sum_over_micro_batches(script):
    """Forget to divide the loss by the number of micro-batches."""
    original = script.loss_of

    def unscaled(logits, targets):
        is_micro_batch = len(targets) == script.MICRO_BATCH
        return original(logits, targets) * (4 if is_micro_batch else 1)

    script.loss_of = unscaled


def send_everything_twice(script):
    send, receive = script.Messages.send, script.Messages.receive

    def send_twice(self, instruction, result):
        send(self, instruction, result)
        send(self, instruction, result)

    def receive_twice(self, instruction):
        receive(self, instruction)
        return receive(self, instruction)

    script.Messages.send = send_twice
    script.Messages.receive = receive_twice


def keep_the_graphs(script):
    graphs = []

    def backward(self, stage, k, gradient):
        x, out = self.kept.pop((stage, k))
        out.backward(gradient, retain_graph=True)
        graphs.append(out)
        return x.grad

    script.Pipeline.backward = backward


def forget_the_mask(script):
    masked_scores = script.masked_scores
    script.masked_scores = lambda q, k, is_diagonal: masked_scores(q, k, False)


def attend_to_all_tokens(script):
    attend = torch.nn.functional.scaled_dot_product_attention
    script.attend_causally = partial(attend, enable_gqa=True)


def keep_chunks_in_order(script):
    """Give a rank neighbouring chunks in the zigzag layout too."""
    chunks = script.Ring.chunks

    def in_order(ring, step=0):
        first = 2 * chunks(ring, step)[0]
        return [first, first + 1] if ring.layout == "zigzag" else [first // 2]

    script.Ring.chunks = in_order


def leave_heads_where_they_are(script):
    script.AllToAll.apply = lambda parts: parts


def sum_gradients_of_experts_too(script):
    """Add up the gradients of different experts."""
    script.STEPS = 1

    def sum_gradients(model):
        for weight in model.parameters():
            script.dist.all_reduce(weight.grad)

    script.sum_gradients = sum_gradients


def mix_up_experts(script):
    """Multiply rows by the matrix of another expert in the grouped product."""
    script.STEPS = 1
    original = script.multiply
    script.multiply = lambda rows, weights, counts: original(
        rows, weights, counts.flip(0)
    )


def balance_with_the_wrong_sign(script):
    script.BIAS_RATE = -script.BIAS_RATE


GRADIENT = "gradient: relative error, every division"
ERROR = "error of losses and gradient"
SHORT = "--max-steps 10 --every 5"
H_IS_1 = "{}, H = 1: error against one process"
SENT_AND_UNSENT = "top-k: error of sent + unsent"
BYTES_SENT = "bytes sent: largest difference from the formula"
SABOTAGE = [
    (ACCUMULATION, 2, "", ignore_other_ranks, GRADIENT),
    (ACCUMULATION, 2, "", send_every_micro_batch, "bytes sent with no_sync"),
    (ACCUMULATION, 2, "", keep_a_copy, "largest / smallest bytes kept"),
    (OVERLAP, 2, "", leave_a_gradient_out, "gradient: largest relative error"),
    (OVERLAP, 2, "", put_all_in_one_bucket, "ddp-buckets: hidden collectives"),
    (OVERLAP, 2, "", never_prefetch, "fsdp-prefetch: hidden collectives"),
    (
        CHECKPOINTING,
        2,
        "",
        forget_the_random_state,
        "gradient with dropout: sum of errors",
    ),
    (CHECKPOINTING, 1, "", leave_a_block_out, "full: bytes kept"),
    (CHECKPOINTING, 1, "", repeat_all_of_forward, "full: FLOPs repeated"),
    (TENSOR, 2, "", leave_out_f, f"tensor parallel: {ERROR}"),
    (TENSOR, 2, "", keep_norms_apart, f"sequence parallel: {ERROR}"),
    (TENSOR, 2, "", gather_before_norms, "sequence parallel: bytes kept"),
    (TENSOR_PLAN, 2, "", forget_a_norm, f"sequence parallel: {ERROR}"),
    (TENSOR_PLAN, 2, "", share_no_input, "tensor parallel: bytes sent in a step"),
    (SCHEDULES, 1, "", reverse_the_last_rank, "different instructions executed"),
    (SCHEDULES, 1, "", never_run_ahead, "sum of the bubbles"),
    (SCHEDULES, 1, "", run_all_forwards_ahead, "sum of micro-batches kept"),
    (PIPELINE, 2, "", sum_over_micro_batches, "loss: largest relative error"),
    (PIPELINE, 2, "", send_everything_twice, "bytes sent, all schedules"),
    (PIPELINE, 2, "", keep_the_graphs, "forwards kept, all schedules"),
    (EXPERTS, 2, "", sum_gradients_of_experts_too, "gradient: relative error"),
    (EXPERTS, 2, "", mix_up_experts, "loss: relative error"),
    (EXPERTS, 1, "", balance_with_the_wrong_sign, "excess load with the bias"),
    (RING, 2, "", forget_the_mask, "zigzag: relative error of the gradient"),
    (RING, 2, "", keep_chunks_in_order, "zigzag: pairs of the busiest rank"),
    (ULYSSES, 2, "", attend_to_all_tokens, "ulysses: relative error of the gradient"),
    (ULYSSES, 2, "", leave_heads_where_they_are, "ulysses: bytes sent per layer"),
    (COMPRESSION, 2, "--max-steps 3", send_a_sum, "bfloat16: gradient error"),
    (COMPRESSION, 2, "--max-steps 3", forget_the_residual, SENT_AND_UNSENT),
    (COMPRESSION, 2, "--max-steps 3", send_places_twice, BYTES_SENT),
    (GOODPUT, 1, "", save_at_youngs_interval, "Daly's interval, share off the best"),
    (GOODPUT, 1, "", restart_without_failures, "simulated, standard errors off"),
    (LOW_PRECISION, 1, "", clip_scaled_gradients, "gradient: largest relative error"),
    (LOW_PRECISION, 1, "", round_to_two_bits, "float8: product error"),
    (LOW_PRECISION, 1, "", autocast_to_bfloat16, "float16: gradients of 0"),
    (LOCAL_SGD, 2, SHORT, sum_instead_of_mean, H_IS_1.format("averaging")),
    (LOCAL_SGD, 2, SHORT, step_along_the_rank_alone, H_IS_1.format("DiLoCo 0.9")),
    (LOCAL_SGD, 2, SHORT, exchange_twice, "bytes per step: largest difference"),
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
def test_the_loop_over_experts_computes_the_grouped_product(run_script):
    def multiply_in_a_loop(script):
        script.multiply = script.multiply_in_a_loop

    ended = run_script(EXPERTS, world_size=2, before=multiply_in_a_loop)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        (ACCUMULATION, 3),
        (OVERLAP, 3),
        (COMPRESSION, 3),
        (LOCAL_SGD, 3),
        (CHECKPOINTING, 3),
        (LOW_PRECISION, 3),
        (TENSOR, 1),
        (TENSOR_PLAN, 4),
        (PIPELINE, 3),
        (EXPERTS, 3),
        (RING, 3),
        (ULYSSES, 2),
        (WEIGHT_SYNC, 4),
    ],
)
def test_a_lesson_passes_on_other_ranks_and_seeds(run_script, script, ranks):
    flags = LESSONS[script]["flags"].split()
    ended = run_script(script, *flags, "--seed", 7, world_size=ranks)
    assert ended.codes == [0] * ranks, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("script", "ranks", "message"),
    [
        (ACCUMULATION, 5, "5 ranks: start 1, 2, 3, 4, 6 or 12"),
        (OVERLAP, 7, "--width must be a multiple of the 7 ranks"),
        (TENSOR, 3, "3 ranks: start 1, 2, 4 or 8"),
        (EXPERTS, 5, "5 ranks: start 1, 2, 3, 4, 6 or 12"),
        (RING, 7, "7 ranks: start 1, 2, 3, 4, 5, 6 or 8"),
        (ULYSSES, 3, "3 ranks: start 1, 2 or 4, to divide 4 heads"),
        (WEIGHT_SYNC, 1, "1 ranks: start 2, 3, 4, 5, 7 or 13; one samples"),
    ],
)
def test_a_wrong_number_of_ranks_is_refused(run_script, script, ranks, message):
    ended = run_script(script, world_size=ranks)
    assert_one_line(ended, message, script.split("/")[1])


def test_micro_batches_are_a_multiple_of_the_stages(run_script):
    ended = run_script(SCHEDULES, "--stages", 5)
    says = "--micro-batches 8 must be a multiple of 5 stages"
    assert_one_line(ended, says, "pipeline_schedules.py")


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
