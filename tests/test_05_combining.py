"""Combining the axes: formulas against counts, schedules that are stepped through, papers."""

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import REPO, load_script, results_of
from torch.utils.flop_counter import FlopCounterMode

from advanced_parts import combining as part
from advanced_parts import layout_memory, layout_traffic, ring_attention
from advanced_parts.kept_bytes import kept_for_backward
from advanced_parts.layout_memory import LLAMA3_405B, MODELS, Cluster, Job, Layout
from advanced_parts.layout_traffic import link_of, predict
from dist_common import models
from dist_common.lab import traffic

COMBINING = "05-advanced/combining.py"
FULL = pytest.mark.full
CLUSTER = Cluster(8, 600, 350, 45, 20, 80)
ON_16K = ("--model", "llama3-405b", "--gpus", 16_384, "--seq-len", 8192,
          "--global-batch-size", 2048)  # fmt: skip
AS_PUBLISHED = (*ON_16K, "--tp", 8, "--pp", 16, "--dp", 128, "--fsdp", "grad-op",
                "--recompute", "swiglu", "--schedule", "interleaved",
                "--virtual-stages", 8)  # fmt: skip


def job_of(name="llama3-8b", batch=64, **options) -> Job:
    return Job(MODELS[name], 4096, batch, 1, **options)


# the tool


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_best_layouts_are_listed(run_script, tmp_path, world_size):
    ended = run_script(COMBINING, "--output-dir", tmp_path / "run", world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    content = results_of(tmp_path / "run")
    assert content["metrics"]["fits"] and (tmp_path / "run/combining.png").exists()
    assert ended.stdout.count("OK: ") == 1, "rank 0 prints"
    times = [float(line.split()[15]) for line in ended.stdout.splitlines() if " GiB  " in line
             and line.startswith("tp ")]  # fmt: skip
    assert len(times) == 5 and times == sorted(times)


def test_the_published_layout_of_405b_fits_with_uneven_stages(run_script, tmp_path):
    ended = run_script(COMBINING, *AS_PUBLISHED, "--output-dir", tmp_path / "run")
    assert ended.codes == [0], ended.stdout + ended.stderr
    metrics = results_of(tmp_path / "run")["metrics"]
    assert metrics["layout"] == "tp 8 x cp 1 x dp 128 x pp 16" and metrics["fits"]


def test_micro_batches_of_two_hide_what_one_exposes():
    """combining.md: tp 8 x dp 8 of 70B, by micro-batch size: sent, exposed, a step."""
    found = []
    for size in (1, 2):
        job = Job(MODELS["llama3-70b"], 8192, 512, size)
        prediction = predict(job, part.H100, Layout(8, 1, 8, 1))
        dp = prediction.traffic["dp"]
        found += [round(dp.seconds, 1), round(dp.exposed_s, 1), round(prediction.step_s, 1)]
    assert found == [87.8, 38.2, 102.4, 43.9, 0, 63.7]


def test_a_layout_that_does_not_fit_is_said_to(run_script):
    ended = run_script(COMBINING, "--model", "llama3-70b", "--dp", 8)
    assert ended.codes == [0] and "DOES NOT FIT: " in ended.stdout
    ended = run_script(COMBINING, *AS_PUBLISHED, "--recompute", "none")
    assert ended.codes == [0] and "DOES NOT FIT: " in ended.stdout
    ended = run_script(COMBINING, "--model", "llama3-405b")
    assert ended.codes == [0] and ": 0 fit (the five smallest:)" in ended.stdout


def test_cheaper_steps_are_listed_for_a_layout(run_script, tmp_path):
    ended = run_script(COMBINING, *CHEAPER, "--network-gb-s", 1, "--output-dir", tmp_path / "run")
    assert ended.codes == [0], ended.stdout + ended.stderr
    steps = results_of(tmp_path / "run")["metrics"]["step_time_s_by_change"]
    assert len(steps) == 11
    lossy = {"bf16 gradients", "PowerSGD, rank 4", "top 1%", "DiLoCo, 50 steps"}
    for name in lossy:
        assert steps[name] < steps["as above"] < steps["without overlap"]
    assert steps["without no_sync"] == max(steps.values())


def test_predictions_lie_around_published_runs(run_script, tmp_path):
    ended = run_script(COMBINING, "--published", "--output-dir", tmp_path / "run")
    assert ended.codes == [0], ended.stdout + ended.stderr
    checks = results_of(tmp_path / "run")["checks"]
    assert len(checks) == 59 and all(check["ok"] for check in checks)


def test_a_file_is_a_model_too(run_script, tmp_path):
    path = REPO / "benchmarks/configs/my_model.json"
    flags = ("--model", path, "--seq-len", 2048, "--output-dir", tmp_path / "run")
    ended = run_script(COMBINING, *flags)
    assert ended.codes == [0], ended.stderr
    weights = 24 * (4 * 2048**2 + 3 * 2048 * 5632 + 2 * 2048) + 2 * 32_000 * 2048 + 2048
    assert f"{path}: {weights:,} weights" in ended.stdout


BAD_INPUT = [
    (("--tp", 2, "--dp", 2), "tp 2 x cp 1 x dp 2 x pp 1 is 4 GPUs, but --gpus is 8"),
    (("--gpus", 24, "--tp", 3, "--dp", 8), "--tp 3 must divide the model's 32 heads"),
    (("--model", "llama3-8b", "--gpus", 16, "--tp", 16), "the model's 8 key-value heads"),
    (("--pp", 8, "--model", "tiny", "--seq-len", 64), "--pp 8 must divide the model's 4 layers"),
    (("--gpus", 24, "--pp", 24), "--pp 24 must divide the model's 32 layers, or 34 where first"),
    (("--cp", 8, "--seq-len", 100), "--seq-len 100 must be divisible by --cp 8 (zig-zag"),
    (("--dp", 8, "--global-batch-size", 12), "--global-batch-size 12 must be divisible by --dp 8"),
    (("--pp", 8, "--schedule", "interleaved", "--global-batch-size", 4), "at least --pp 8 micro"),
    (("--gpus", 12), "--gpus 12 must be a multiple of --gpus-per-node 8"),
    (("--seq-len", 8192), "--seq-len must be at most 4096 for llama2-7b"),
    (("--virtual-stages", 4), "--virtual-stages above 1 and --schedule interleaved"),
    (("--order", "tp-dp"), "--order must name tp, cp, dp and pp once each"),
    (("--gpus", 48, "--global-batch-size", 1, "--seq-len", 7), "no layout of 48 GPUs divides"),
    (("--fsdp", "zero3"), "--fsdp: invalid choice"),
    (
        ("--model", "llama4"),
        "--model: must be tiny, 124m, 1b, llama2-7b, llama3-8b, llama3-70b, ll",
    ),
    (("--model", "gone.json"), "gone.json: No such file or directory"),
]


@pytest.mark.parametrize(("argv", "says"), BAD_INPUT)
def test_bad_input_gets_one_line(run_script, argv, says):
    ended = run_script(COMBINING, *argv)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("combining.py: error: ") and ended.codes == [2]
    assert says in line


# sabotage, one per kind of check


def leave_no_bubble(_):
    layout_traffic.bubble_of = lambda job, layout: 0


def recompute_for_nothing(_):
    parts = part.predict
    part.predict = lambda job, cluster, layout: parts(
        job, cluster, replace(layout, recompute="none")
    )


def compute_twice_as_fast(_):
    seconds = layout_memory.compute_seconds
    layout_traffic.compute_seconds = lambda *args: seconds(*args) / 2


def nvlink_everywhere(_):
    layout_traffic.link_of = lambda job, cluster, *_, **__: ("NVLink", cluster.nvlink_gb_s)


def hide_tensor_parallelism(_):
    right = layout_traffic.tensor_traffic
    layout_traffic.tensor_traffic = lambda *args: replace(right(*args), exposed_s=0)


def send_a_hundredth_of_keys(_):
    right = layout_traffic.context_traffic

    def less(*args):
        sent = right(*args)
        return replace(sent, layer_bytes=sent.layer_bytes / 100, step_bytes=sent.step_bytes / 100)

    layout_traffic.context_traffic = less


def gather_once_a_step(_):
    right = layout_traffic.weight_traffic

    def once(job, cluster, layout, forward_s):
        kind = "grad-op" if layout.sharding == "full" else layout.sharding
        return right(job, cluster, replace(layout, sharding=kind), forward_s)

    layout_traffic.weight_traffic = once


def hold_nothing_of(name):
    def sabotage(_):
        right = layout_memory.memory_of_stage
        layout_memory.memory_of_stage = lambda *args: right(*args) | {name: 0}

    return sabotage


CHEAPER = ("--model", "1b", "--gpus", 16, "--dp", 16, "--fsdp", "none", "--cheaper")


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (leave_no_bubble, "Llama 3: 32 over 16 micro-batches"),
        (recompute_for_nothing, "530B: recompute none over full"),
        (compute_twice_as_fast, "SC21 1.7B, 32 GPUs: predicted over published"),
        (nvlink_everywhere, "SC21 1008B, 3,072 GPUs: pp's links that are NVLink"),
        (hide_tensor_parallelism, "70B: tp 8: exposed"),
        (send_a_hundredth_of_keys, "70B: cp 4: bytes per layer"),
        (gather_once_a_step, "70B: dp 8, full: bytes"),
        (hold_nothing_of("activations"), "70B: recompute full: bytes kept"),
        (hold_nothing_of("logits"), "70B: logits: bytes"),
    ],
)
def test_a_broken_formula_fails_its_check(run_script, tmp_path, sabotage, failing):
    arguments = ("--published", "--output-dir", tmp_path / "run")
    ended = run_script(COMBINING, *arguments, before=sabotage)
    assert ended.codes == [1], ended.stdout + ended.stderr
    bad = [check["name"] for check in results_of(tmp_path / "run")["checks"] if not check["ok"]]
    assert any(name.startswith(failing) for name in bad), bad


# formulas, counted on the model's own tensors

SEQ_LEN = 64  # tokens that are counted; everything but attention's scores grows with them


def counted_bytes(config) -> tuple[int, int]:
    """Run one bfloat16 layer with a GPU's fused kernels; return two counts of bytes per token.

    What autograd keeps of its forward, without weights. What tp gathers and scatters in it: the
    inputs of the column-parallel matrices, once for those that share one, and the outputs of the
    row-parallel ones (Korthikanti, 2022, figure 5).
    """
    with torch.device("meta"):
        block = models.Block(config).to(torch.bfloat16)
        x = torch.empty(1, SEQ_LEN, config.dim, dtype=torch.bfloat16, requires_grad=True)
        head_dim = config.dim // config.num_heads
        tables = models.rotary_tables(torch.empty(SEQ_LEN), head_dim, config.rope_theta)
    layout_memory.as_on_a_gpu(block)
    attention, gathered, scattered = block.attention, {}, []
    for column in (attention.wq, attention.wk, attention.wv, block.gate, block.up):
        column.register_forward_hook(lambda _, i, o: gathered.update({id(i[0]): i[0]}))
    for row in (attention.wo, block.down):
        row.register_forward_hook(lambda _, i, o: scattered.append(o))
    with kept_for_backward(block, tables) as kept:
        block(x, *tables)
    # The reshape after attention copies its heads side by side: a GPU's kernel writes them so.
    own = sum(kept.values()) - x.nbytes
    handed_over = sum(tensor.nbytes for tensor in (*gathered.values(), *scattered))
    return own // SEQ_LEN, handed_over // SEQ_LEN


def counted_flops(config) -> int:
    """Count forward and backward of SEQ_LEN tokens in one layer and the head, all scores."""
    one = replace(config, num_layers=1, max_seq_len=SEQ_LEN)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        models.Transformer(one)(torch.empty(1, SEQ_LEN, dtype=torch.int64)).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_formulas_are_counts_on_the_real_size(in_a_fork, name):
    config = MODELS[name]
    kept, handed_over = counted_bytes(config)
    assert layout_memory.activation_bytes(config) == kept
    short = Job(config, SEQ_LEN, 1, 1, causal_share=1.0)
    flops = 3 * sum(layout_memory.forward_flops(short, Layout()).values())
    assert flops == in_a_fork(lambda: counted_flops(config))
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in models.Transformer(config).parameters())
    for pp in (1, 2):
        copies = config.vocab_size * config.dim * (config.tied_embeddings and pp > 1)
        stages = (layout_memory.weights_of_stage(config, Layout(pp=pp), s) for s in range(pp))
        assert sum(stages) == weights + copies
    # Forward hands over as much as backward, which gathers the two inputs again.
    for recompute, passes in (("none", 2.5), ("full", 3.5)):
        layout = Layout(2, pp=2, recompute=recompute)
        sent = predict(Job(config, 256, 8, 4), CLUSTER, layout).traffic
        assert sent["tp"].layer_bytes == passes / 2 * handed_over * 4 * 256
        assert (
            sent["pp"].layer_bytes == 2 * 2 * 4 * 256 * config.dim / 2
        )  # there and back, bfloat16


def test_each_rank_has_a_place_of_its_own():
    layout = Layout(2, 2, 3, 4)
    for order in itertools.permutations(("tp", "cp", "dp", "pp")):
        places = {tuple(layout_traffic.place(n, layout, order).values()) for n in range(48)}
        assert len(places) == layout.gpus == 48


# formulas, of papers


def test_operations_are_narayanans_closed_form():
    """96 B s l h^2 (1 + s / 6h + V / 16 l h), with recomputation (2021, equation 3)."""
    runs = [run for run in part.PUBLISHED["runs"] if run["counts_recompute"]]
    assert len(runs) == 6
    for run in runs:
        layers, h, _ = run["gpt"]
        config, layout = part.gpt(*run["gpt"]), Layout(*run["layout"])
        job = Job(config, *run["job"], causal_share=1.0)
        form = 1 + job.seq_len / (6 * h) + config.vocab_size / (16 * layers * h)
        form *= 96 * job.global_batch_size * job.seq_len * layers * h**2 / layout.gpus
        assert predict(job, part.A100, layout).executed_flops == pytest.approx(form, rel=1e-3)


def test_states_are_those_of_korthikantis_figure_1():
    """18 bytes per weight, without embeddings."""
    for run in part.PUBLISHED["states"]:
        job = Job(part.gpt(*run["gpt"], vocab_size=0), 2048, run["batch"], 1)
        parts = layout_memory.memory_of_stage(job, Layout(8, 1, 1, run["pp"], "none"), 0)
        held = sum(parts[name] for name in ("weights", "gradients", "optimizer"))
        assert held / 2**30 == pytest.approx(run["gib"], rel=0.005)


# formulas, derived once more


def step_through(stages: int, micro_batches: int, schedule: str) -> tuple[float, list[int]]:
    """Run a pipeline whose forward takes 1 and backward 2; return time and most in flight."""
    orders = []
    for stage in range(stages):
        warm_up = micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)
        order = [("F", i) for i in range(warm_up)]
        for i in range(micro_batches):
            order.append(("B", i))
            if warm_up + i < micro_batches:
                order.append(("F", warm_up + i))
        orders.append(order)
    done, clock, flying, most = {}, [0] * stages, [0] * stages, [0] * stages
    while any(orders):
        for stage, order in enumerate(orders):
            if not order:
                continue
            kind, i = order[0]
            before = ("F", stage - 1, i) if kind == "F" else ("B", stage + 1, i)
            if 0 <= before[1] < stages and before not in done:
                continue
            clock[stage] = max(clock[stage], done.get(before, 0)) + (1 if kind == "F" else 2)
            done[(kind, stage, i)] = clock[stage]
            flying[stage] += 1 if kind == "F" else -1
            most[stage] = max(most[stage], flying[stage])
            order.pop(0)
    return max(clock), most


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_bubble_and_activations_are_those_of_a_schedule_stepped_through(schedule):
    for stages in (1, 2, 4, 8):
        for micro_batches in (1, 2, 8, 16):
            layout = Layout(pp=stages)
            job = job_of(batch=micro_batches, schedule=schedule)
            took, flying = step_through(stages, micro_batches, schedule)
            busy = 3 * micro_batches
            assert took == pytest.approx(busy * (1 + layout_traffic.bubble_of(job, layout)))
            assert flying == [layout_memory.in_flight(job, layout, s) for s in range(stages)]


def test_interleaved_holds_what_korthikanti_derives():
    layout = Layout(pp=8)
    job = job_of(batch=64, schedule="interleaved", virtual_stages=4)
    assert layout_memory.in_flight(job, layout, 0) == pytest.approx(8 * (1 + 7 / (8 * 4)))
    assert layout_traffic.bubble_of(job, layout) == pytest.approx(7 / (4 * 64))


def test_weights_are_sent_as_rings_send_them():
    ring, job = traffic.RING_FACTOR, job_of(batch=16)
    for n in (2, 8):
        weights = layout_memory.weights_of_stage(job.config, Layout(dp=n), 0)
        sent = {}
        for kind in layout_memory.SHARDINGS:
            sent[kind] = predict(job, CLUSTER, Layout(dp=n, sharding=kind)).traffic["dp"].step_bytes
        gather = ring["all_gather"](n) * 2 * weights
        reduce = ring["reduce_scatter"](n) * 4 * weights
        assert sent["none"] == pytest.approx(ring["all_reduce"](n) * 4 * weights)
        assert sent["grad-op"] == pytest.approx(gather + reduce)
        assert sent["full"] == pytest.approx(16 / n * (2 * gather + reduce))


def test_changes_send_what_their_lessons_derive():
    """Each by its own formula: the all-reduce of DDP, n ranks, m micro-batches."""
    n, m = 16, 8
    job = job_of("1b", batch=n * m)
    layout = Layout(dp=n, sharding="none")
    predicted = {name: changed for name, changed, _ in part.changes(job, CLUSTER, layout)}
    found = {name: changed.traffic["dp"] for name, changed in predicted.items()}
    held = {name: sum(changed.memory.values()) for name, changed in predicted.items()}
    weights = job.config.num_parameters()
    ddp = 2 * (n - 1) / n * 4 * weights
    assert found["as above"].step_bytes == pytest.approx(ddp)
    assert found["without no_sync"].step_bytes == pytest.approx(m * ddp)
    assert found["bf16 gradients"].step_bytes == pytest.approx(ddp / 2)
    assert found["DiLoCo, 50 steps"].step_bytes == pytest.approx(ddp / 50)
    assert found["top 1%"].step_bytes == pytest.approx((n - 1) * weights / 100 * (4 + 4))
    # P and Q of width 4: of two D x D, two D x kv, three D x F, and of the table; norms are whole.
    D, kv_dim, F, V, L = 2048, 512, 8192, 128_256, 16
    layer = 4 * (2 * (D + D) + 2 * (D + kv_dim) + 3 * (D + F)) + 2 * D
    low_rank = 2 * (n - 1) / n * 4 * (L * layer + 4 * (V + D) + D)
    assert found["PowerSGD, rank 4"].step_bytes == pytest.approx(low_rank)
    for waits in ("PowerSGD, rank 4", "top 1%", "DiLoCo, 50 steps"):
        assert found[waits].exposed_s == found[waits].seconds > 0, "nothing computes meanwhile"
    whole = found["without overlap"]
    assert whole.exposed_s == whole.seconds == pytest.approx(found["as above"].seconds)
    kept = held["as above"]
    assert held["PowerSGD, rank 4"] - kept == pytest.approx(4 * weights)
    assert held["DiLoCo, 50 steps"] - kept == pytest.approx(8 * weights)
    assert part.changes(job_of("1b", batch=8), CLUSTER, Layout())[-1][0] == "fp8 matmuls"
    sharded = part.changes(job, CLUSTER, Layout(dp=n))
    assert not any("PowerSGD" in name for name, *_ in sharded), "hooks are DDP's"


@pytest.mark.parametrize("rank", [1, 4])
def test_powersgd_sends_what_its_hook_holds(rank):
    """Q by the hook of the lesson: (m, r) of each matrix; P is (n, r), vectors are whole."""
    script = load_script("05-advanced/gradient_compression.py")
    weights = list(models.Transformer(MODELS["tiny"]).parameters())
    hook = script.PowerSGD(weights, rank, None)
    sent = 0
    for weight in weights:
        q = hook.q.get(weight)
        sent += weight.numel() if q is None else (len(weight) + len(q)) * q.shape[1]
    assert layout_traffic.powersgd_numbers(weights, rank) == sent


def test_keys_and_values_are_sent_as_ring_attention_sends_them():
    job = job_of()
    sent = predict(job, CLUSTER, Layout(cp=4)).traffic["cp"].layer_bytes
    assert sent == sum(ring_attention.ring_bytes(job.config, job.seq_len, 4, width=2))


def test_a_group_has_the_link_that_its_ranks_need():
    job, layout = job_of(), Layout(tp=4, cp=2, dp=4, pp=2)
    assert link_of(job, CLUSTER, layout, ("tp",)) == ("NVLink", 350)
    assert link_of(job, CLUSTER, layout, ("cp",), hops=True) == ("NVLink", 350)
    assert link_of(job, CLUSTER, layout, ("cp", "dp")) == ("network x2", 90)
    assert link_of(job, CLUSTER, layout, ("pp",), hops=True) == ("network x1", 45)
    outer = job_of(order=("pp", "dp", "cp", "tp"))
    assert link_of(outer, CLUSTER, layout, ("pp",), hops=True) == ("NVLink", 350)
    assert link_of(outer, CLUSTER, layout, ("tp",)) == ("network x1", 45)
    # All ranks of a node in one group: NVLink is slower than their eight cards together.
    assert link_of(job, CLUSTER, Layout(dp=64), ("cp", "dp")) == ("network x8", 350)


def test_first_and_last_stage_of_405b_have_one_layer_less():
    assert layout_memory.layers_of_stages(126, 16) == [7, *[8] * 14, 7]
    assert layout_memory.layers_of_stages(80, 4) == [20] * 4


@pytest.mark.parametrize("name", ["llama2-7b", pytest.param("llama3-70b", marks=FULL)])
def test_every_layout_of_the_list_could_run(name):
    job = job_of(name, batch=128)
    found = list(part.layouts_of(job, 64))
    assert len(found) == len(set(found)) and {layout.gpus for layout in found} == {64}
    for layout in found:
        assert job.config.num_kv_heads % layout.tp == 0 and 128 % layout.dp == 0
        assert sum(layout_memory.layers_of_stages(job.config.num_layers, layout.pp)) == (
            job.config.num_layers
        )
    ranked = load_script(COMBINING).ranked(job, CLUSTER, 64)
    fitting = [prediction.step_s for prediction in ranked if prediction.fits]
    assert fitting == sorted(fitting) and len(ranked) == len(found)


def test_the_authors_layout_is_among_the_first_of_the_list():
    job = Job(LLAMA3_405B, 8192, 2048, 1, "interleaved", 8)
    ranked = load_script(COMBINING).ranked(job, part.H100, 16_384)
    theirs = next(p for p in ranked if str(p.layout) == "tp 8 x cp 1 x dp 128 x pp 16")
    faster = {str(p.layout) for p in ranked if p.fits and p.step_s < theirs.step_s}
    assert len(faster) < 10 and theirs.step_s < 1.2 * ranked[0].step_s
