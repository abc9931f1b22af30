"""Four axes at once: the gradient of one process, and the losses of module 01's template."""

import json
import shutil

import pytest
import torch
from conftest import GPUS, REPO, assert_one_line, results_of, run_command

HYBRID = "05-advanced/hybrid_parallelism.py"
DDP = "01-ddp-basics/ddp_training.py"
SMALL = ("--micro-batch-size", 2, "--seq-len", 32, "--max-steps", 2, "--warmup-steps", 0)
JOB = ("--seq-len", 32, "--global-batch-size", 8, "--max-steps", 6, "--warmup-steps", 2)
FULL = pytest.mark.full


def flags(text):
    return text.split()


def losses_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}
    return torch.tensor([found[step] for step in sorted(found)])


LAYOUTS = [
    (1, "--grad-accum-steps 2", ""),
    (2, "--cp 2", "cp"),
    (8, "--dp 2 --tp 2 --pp 2 --data-parallel grad-op", "tp pp dp"),
    pytest.param(2, "--tp 2", "tp", marks=FULL),
    pytest.param(4, "--tp 2 --pp 2", "tp pp", marks=FULL),
    pytest.param(3, "--dp 3", "dp", marks=FULL),
    pytest.param(4, "--tp 2 --dp 2 --data-parallel full --grad-accum-steps 2", "tp dp", marks=FULL),
    pytest.param(4, "--cp 2 --dp 2 --data-parallel grad-op", "cp dp", marks=FULL),
    pytest.param(4, "--pp 4 --schedule gpipe --grad-accum-steps 2", "pp", marks=FULL),
    pytest.param(4, "--pp 2 --tp 2 --schedule zero-bubble", "tp pp", marks=FULL),
    pytest.param(4, "--dp 2 --pp 2 --data-parallel full", "pp dp", marks=FULL),
    pytest.param(
        4, "--dp 2 --pp 2 --schedule zero-bubble --data-parallel grad-op", "pp dp", marks=FULL
    ),
    pytest.param(
        4, "--dp 2 --pp 2 --schedule interleaved --data-parallel full", "pp dp", marks=FULL
    ),
    pytest.param(8, "--tp 2 --cp 2 --pp 2 --schedule interleaved", "tp cp pp", marks=FULL),
    pytest.param(8, "--dp 2 --cp 2 --tp 2", "tp cp dp", marks=FULL),
]


@pytest.mark.parametrize(("world_size", "layout", "sends"), LAYOUTS)
def test_every_layout_gives_the_gradient_of_one_process(
    run_script, tmp_path, world_size, layout, sends
):
    folder = tmp_path / "run"
    arguments = (*SMALL, *flags(layout), "--output-dir", folder)
    ended = run_script(HYBRID, *arguments, world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    checks = results_of(folder)["checks"]
    assert all(check["ok"] for check in checks)
    names = " ".join(check["name"] for check in checks)
    assert "gradient: relative error" in names and "copies differ" in names
    compared = {axis for axis in ("tp", "cp", "pp", "dp") if f"along {axis}" in names}
    assert compared == set(sends.split())
    assert (folder / "layout.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (4, "--dp 2 --pp 2 --micro-batch-size 2"),
        pytest.param(8, "--dp 2 --tp 2 --cp 2 --micro-batch-size 4", marks=FULL),
        pytest.param(8, "--dp 2 --tp 2 --pp 2 --micro-batch-size 2", marks=FULL),
    ],
)
def test_the_job_has_the_losses_of_ddp_training(run_script, tmp_path, world_size, layout):
    """The same flags of the one job, in one process by module 01's template."""
    alone, cut = tmp_path / "alone", tmp_path / "cut"
    own = ("--micro-batch-size", 4, "--parity-steps", 0, "--eval-every", 6)
    ended = run_script(DDP, *JOB, *own, "--output-dir", alone)
    assert ended.codes == [0], ended.stderr
    arguments = (*JOB, *flags(layout), "--parity-steps", 0, "--output-dir", cut)
    ended = run_script(HYBRID, *arguments, world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    # AdamW divides by the square root of a moment: rounding grows over the first steps.
    torch.testing.assert_close(losses_of(cut), losses_of(alone), rtol=5e-5, atol=0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((4, "--tp 2 --dp 2 --data-parallel full"), (2, "--pp 2")),
        pytest.param((2, "--pp 2"), (4, "--tp 2 --cp 2"), marks=FULL),
        pytest.param((2, "--dp 2"), (1, ""), marks=FULL),
    ],
)
def test_another_layout_loads_the_checkpoint(run_script, tmp_path, first, second):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    arguments = (*SMALL, "--global-batch-size", 4, "--max-steps", 4, "--save-every", 2)
    own = (*arguments, *flags(first[1]), "--output-dir", straight, "--parity-steps", 0)
    assert run_script(HYBRID, *own, world_size=first[0]).codes == [0] * first[0]
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000004")
    own = (*arguments, *flags(second[1]), "--output-dir", resumed, "--resume")
    ended = run_script(HYBRID, *own, world_size=second[0])
    assert ended.codes == [0] * second[0], ended.stdout + ended.stderr
    assert "resuming from" in ended.stdout
    torch.testing.assert_close(losses_of(resumed), losses_of(straight), rtol=2e-5, atol=0)


@FULL
def test_a_checkpoint_of_other_data_is_refused(run_script, tmp_path):
    folder = tmp_path / "run"
    arguments = (*SMALL, "--save-every", 1, "--output-dir", folder, "--parity-steps", 0)
    assert run_script(HYBRID, *arguments).codes == [0]
    ended = run_script(HYBRID, *arguments, "--resume", "--max-steps", 3, "--seed", 1)
    assert_one_line(ended, "--seed is 1 here and 0 in the checkpoint", "hybrid_parallelism.py")
    state = next((folder / "checkpoints" / "step-00000002").glob("*.distcp"))
    state.write_bytes(state.read_bytes()[:-100] + bytes(100))
    ended = run_script(HYBRID, *arguments, "--resume", "--max-steps", 3)
    assert ended.codes == [0] and "skipped" in ended.stderr and "step-00000001" in ended.stdout


# what the checks must see


def forget_the_all_reduce(script):
    script.average_gradients = lambda run: None


def keep_own_part_of_the_gradient(script):
    import torch.distributed as dist

    def backward(ctx, gradient):
        parts = gradient.chunk(dist.get_world_size(ctx.group), dim=2)
        return parts[dist.get_rank(ctx.group)].contiguous(), None

    script.GatherSequence.backward = staticmethod(backward)


def reduce_each_matrix_apart(script):
    """The gradient stays right; q, k and v then all-reduce that of their input once each."""
    plan_of = script.parallelize_module

    def parallelize(module, mesh, plan):
        own = {name: style for name, style in plan.items() if "norm" not in name}
        return plan_of(module, mesh, own)

    script.parallelize_module = parallelize


def step_further_on_rank_1(script):
    import torch.distributed as dist

    rate = script.cli.lr_at
    script.cli.lr_at = lambda step, args: rate(step, args) * (1 + dist.get_rank())


def drop_a_micro_batch(script):
    take = script.accumulate_gradient

    def accumulate(run, micro_batches):
        inputs, targets = micro_batches[0]
        return take(run, [(inputs, torch.full_like(targets, -100)), *micro_batches[1:]])

    script.accumulate_gradient = accumulate


@pytest.mark.parametrize(
    ("sabotage", "layout", "failing"),
    [
        (forget_the_all_reduce, "--dp 2", "gradient: relative error"),
        (keep_own_part_of_the_gradient, "--cp 2", "gradient: relative error"),
        (reduce_each_matrix_apart, "--tp 2", "bytes sent by a rank along tp"),
        (step_further_on_rank_1, "--dp 2", "copies differ"),
        pytest.param(drop_a_micro_batch, "--pp 2", "loss", marks=FULL),
    ],
)
def test_a_broken_axis_is_seen(run_script, sabotage, layout, failing):
    ended = run_script(HYBRID, *SMALL, *flags(layout), world_size=2, before=sabotage)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    verdict = ended.stdout.splitlines()[-1]
    assert verdict.startswith("FAILED: ") and failing in verdict


def test_zero_bubble_over_fsdp_is_refused_and_still_wrong(run_script):
    layout = "--dp 2 --pp 2 --schedule zero-bubble --data-parallel full"
    ended = run_script(HYBRID, *SMALL, *flags(layout), world_size=4)
    assert_one_line(ended, "PyTorch loses gradients without an error", "hybrid_parallelism.py")

    def allow(script):
        script.hybrid_checks.refuse = lambda args: None

    ended = run_script(HYBRID, *SMALL, *flags(layout), world_size=4, before=allow)
    # A weight whose gradient is lost has none at all, or a wrong one.
    said = ended.stdout + ended.stderr
    assert 1 in ended.codes and ("no gradient for" in said or "FAILED: gradient" in said), said


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--dp 2 --tp 2", "--dp 2 x --tp 2 x --pp 1 x --cp 1 = 4 ranks, but 2 were started"),
        ("--tp 3", "--dp 1 x --tp 3 x --pp 1 x --cp 1 = 3 ranks, but 2 were started"),
        ("--schedule gpipe --pp 2 --cp 2", "= 4 ranks, but 2 were started"),
        ("--cp 2 --seq-len 33", "--cp 2 does not divide the 33 tokens of --seq-len"),
        ("--pp 2 --grad-accum-steps 1", "needs at least as many micro-batches as stages"),
        ("--pp 2 --schedule interleaved --grad-accum-steps 3", "is no multiple of it"),
        ("--dp 2 --global-batch-size 3", "--global-batch-size 3 must be --micro-batch-size 2"),
        ("--precision 16-mixed", "use bf16-mixed"),
        ("--seq-len 257", "--seq-len must be at most 256"),
    ],
)
def test_bad_input_gets_one_line(run_script, argv, says):
    ended = run_script(HYBRID, *SMALL, *flags(argv), world_size=2)
    assert_one_line(ended, says, "hybrid_parallelism.py")


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    [
        (8, "--tp 8", "--tp 8 does not divide the 4 attention heads of --preset tiny"),
        (4, "--tp 4", "--tp 4 does not divide the 2 key and value heads of --preset tiny"),
        (3, "--pp 3", "--pp 3 does not divide the 4 layers of --preset tiny"),
        (4, "--pp 4 --schedule interleaved", "--pp 4 (2 stages per rank) does not divide the 4"),
    ],
)
def test_an_axis_that_divides_nothing_is_refused(run_script, world_size, argv, says):
    ended = run_script(HYBRID, *SMALL, *flags(argv), world_size=world_size)
    assert_one_line(ended, says, "hybrid_parallelism.py")


@FULL
def test_bfloat16_stays_near_one_process(run_script):
    arguments = (*SMALL, *flags("--tp 2 --pp 2 --precision bf16-mixed"))
    ended = run_script(HYBRID, *arguments, world_size=4)
    assert ended.codes == [0] * 4, ended.stdout + ended.stderr


@FULL
def test_a_loss_that_is_no_number_ends_the_run(run_script):
    ended = run_script(HYBRID, *SMALL, *flags("--pp 2 --lr 1e9 --max-steps 6"), world_size=2)
    assert 1 in ended.codes and "stopped: in step" in ended.stderr


@FULL
@pytest.mark.skipif(GPUS.count(",") < 1, reason="needs two GPUs")
@pytest.mark.parametrize("layout", ["--tp 2", "--pp 2", "--cp 2", "--dp 2 --data-parallel full"])
def test_the_same_on_gpus(layout):
    command = ["torchrun", "--standalone", "--nproc-per-node=2", HYBRID, *map(str, SMALL)]
    ended = run_command([*command, *flags(layout)], REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
