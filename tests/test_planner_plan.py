"""planner/plan.py: bad input, predictions, the search, words, launch lines."""

import argparse
import json
import math
import re
import shlex
from dataclasses import replace

import pytest
from conftest import REPO, load_script, run_command

from dist_common import model as template_model
from planner import (
    cli,
    memory,
    models,
    plan,
    plan_explain,
    plan_finetune,
    plan_launch,
    plan_rules,
    plan_text,
)
from planner.hardware import GPUS, Cluster
from planner.job import RECOMPUTE, Job, Layout, Model, Prediction
from planner.plan_search import Found, search
from planner.step import predict

H100 = Cluster(GPUS["h100"])
PLAN = "planner/plan.py"
SMALL = Model(4, 1024, 16, 8, 2816, 32_000, name="small")


@pytest.fixture
def say(capsys, monkeypatch):
    """Return a function that runs plan.py with some arguments and returns what it prints."""

    def run(*argv) -> str:
        monkeypatch.setattr("sys.argv", [PLAN, *map(str, argv)])
        assert plan.main() == 0
        return capsys.readouterr().out

    return run


def test_the_programs_need_neither_torch_nor_the_guide():
    others = "{'torch', 'numpy', 'legacy_common', 'bench'}"
    code = f"import sys, planner.plan, planner.validate; print({others} & set(sys.modules))"
    ended = run_command(["python", "-c", code], REPO, 60, PYTHONPATH=str(REPO))
    assert ended.stdout.strip() == "set()", ended.stderr


# flags


ODD = ("--layers", 4, "--hidden", 96, "--heads", 3, "--ffn", 384, "--vocab", 256, "--gpus", 5,
       "--global-batch", 1)  # fmt: skip
BAD_INPUT = [
    ("plan", ("--gpu", "voodoo"), "unknown GPU 'voodoo'"),
    ("plan", ("--model", "llama9"), "--model llama9 is unknown; did you mean "),
    ("plan", ("--layers", 4, "--hidden", 64), "a model of sizes lacks --heads, --ffn, --vocab"),
    ("plan", ("--model", "llama2-7b", "--heads", 33), "--heads 33 do not divide --hidden 4096"),
    ("plan", ("--gpus", 12), "--gpus 12 must be a multiple of --gpus-per-node 8"),
    ("plan", ODD, "no layout of 5 GPUs divides the job: tp may be 1 3 (heads 3, key-value heads 3"),
    ("plan", ("--model", "llama3-405b", "--gpus", 1, "--gpu", "rtx4090"), "no layout fits: the cl"),
    ("plan", ("--precision", "fp8", "--gpu", "a100"), "--precision fp8: a100 has fp32, tf32, "),
    ("plan", ("--tokens", "many"), "--tokens: must be a number like 300B or 15T, not 'many'"),
    ("plan", ("--model", "llama2-7b", "--hf-config", "x"), "not allowed with argument --model"),
    ("plan", ("--order", "tp-dp"), "--order: must name tp, cp, dp, pp once each, not 'tp-dp'"),
    ("predict", ("--gpus", 8, "--tp", 2, "--dp", 2), "tp 2 x cp 1 x pp 1 x dp 2 = 4 GPUs, but"),
    ("predict", ("--tp", 3), "tp 3 does not divide the 32 heads"),
    ("predict", ("--pp", 8, "--interleave", 3), "32 layers do not make 8 x 3 equal stages"),
    ("predict", ("--pp", 64), "pp 64 leaves a stage without a layer: the model has 32"),
    ("predict", ("--cp", 3), "cp 3 leaves less than 512 of 4096 tokens, or unequal parts"),
    ("predict", ("--dp", 8, "--global-batch", 12), "dp 8 x micro-batch 1 = 8 does not"),
    ("predict", ("--dp", 8, "--ep", 2), "ep 2 must divide the model's 0 experts and dp x cp"),
    ("predict", ("--pp", 4, "--interleave", 2, "--global-batch", 6), "a multiple of 4 micro"),
    ("predict", ("--finetune", "lora", "--tp", 2), "tp 2: --finetune lora is planned with repl"),
    ("predict", ("--finetune", "lora", "--zero", 2, "--dp", 2), "--zero 2: --finetune lora is pla"),
    ("plan", ("--finetune", "qlora", "--precision", "fp8"), "fp8: --finetune qlora computes in"),
    ("plan", ("--finetune", "lora", "--lora-rank", 9000), "--lora-rank 9000: an adapter is"),
    ("plan", ("--finetune", "lora", "--gpus", 3, "--global-batch", 8), "3 GPUs do not divide the"),
    ("plan", ("--lora-rank", 8), "--lora-rank needs --finetune lora or qlora"),
    ("predict", ("--dp", 8, "--zero", 3, "--shard", 3), "3 GPUs of a shard group do not"),
]  # fmt: skip


@pytest.mark.parametrize(("verb", "flags", "says"), BAD_INPUT)
def test_bad_input_is_told_in_one_line(verb, flags, says, monkeypatch):
    monkeypatch.setattr("sys.argv", [PLAN, verb, *map(str, flags)])
    with pytest.raises(cli.UsageError) as told:
        plan.main()
    assert says in str(told.value) and "\n" not in str(told.value)


def test_a_command_that_fails_says_one_line_and_exits_with_2():
    ended = run_command(["python", PLAN, "plan", "--gpu", "voodoo"], REPO, 60,
                        PYTHONPATH=str(REPO))  # fmt: skip
    assert ended.codes == [2] and ended.stdout == ""
    assert ended.stderr.startswith("plan.py: error: ") and ended.stderr.count("\n") == 1
    assert all(name in ended.stderr for name in GPUS)


def test_a_config_file_is_the_preset_of_its_sizes(tmp_path, say):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32_000,
        "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11_008,
    }))  # fmt: skip
    flags = ("--dp", 8, "--zero", 3, "--json")
    mine = json.loads(say("predict", "--hf-config", path, *flags))
    assert mine == json.loads(say("predict", "--model", "llama2-7b", *flags))
    sizes = ("--layers", 32, "--hidden", 4096, "--heads", 32, "--ffn", 11_008, "--vocab", 32_000)
    assert mine == json.loads(say("predict", *sizes, *flags))


# predict


def test_the_json_of_a_layout_has_its_fields_and_they_agree(say):
    flags = "--model llama3-70b --tp 8 --pp 4 --dp 2 --zero 1 --recompute full --interleave 2"
    more = "--micro-batch 1 --global-batch 64 --sequence-parallel --tokens 1T"
    found = json.loads(say("predict", *f"{flags} {more} --dollars-per-gpu-hour 2 --json".split()))
    assert found["layout"]["gpus"] == 64 and found["micro_batches"] == 32
    held = dict(found["memory_bytes"])
    total, limit = held.pop("total"), held.pop("limit")
    assert {"parameters", "gradients", "optimizer", "activations"} <= set(held)
    assert total == pytest.approx(sum(held.values())) and found["fits"] == (total <= limit)
    assert found["step_time_s"] == pytest.approx(sum(found["step_s"].values()))
    rate = 64 * 4096 / found["step_time_s"] / 64
    assert found["tokens_per_s_per_gpu"] == pytest.approx(rate)
    assert found["mfu"] == pytest.approx(found["model_tflops_per_gpu"] / 989.4)
    assert found["days"] == pytest.approx(1e12 / rate / 64 / 86_400)
    assert found["dollars"] == pytest.approx(2 * 64 * 24 * found["days"])


def test_own_hardware_replaces_the_data_sheet(say):
    flags = ("predict", "--tp", 8, "--global-batch", 8, "--json")
    usual = json.loads(say(*flags))
    slow = {"--gpu-tflops": (500, "compute"), "--link-gb-s": (100, "tp")}
    for own, (value, part) in (slow | {"--hbm-gb-s": (500, "optimizer")}).items():
        changed = json.loads(say(*flags, own, value))
        assert changed["step_s"][part] > 1.2 * usual["step_s"][part], own
    smaller = json.loads(say(*flags, "--gpu-memory-gib", 40))
    assert smaller["memory_bytes"]["limit"] < 0.6 * usual["memory_bytes"]["limit"]


EXPLAINED = [
    ("llama2-7b", Layout(dp=8, zero=3, recompute="full")),
    ("llama3-70b", Layout(tp=8, pp=4, dp=2, zero=1, virtual_stages=2)),
    ("mixtral-8x7b", Layout(dp=16, ep=8, zero=1)),
]


@pytest.mark.parametrize(("name", "layout"), EXPLAINED)
def test_what_is_explained_multiplies_to_what_is_predicted(name, layout):
    job = Job(models.MODELS[name], 2048, 64)
    plan = predict(job, layout, H100)
    stage = plan_explain.fullest_stage(job, layout)
    rows = {row.name: row for row in plan_explain.state_rows(job, plan, stage)}
    for part in ("parameters", "gradients", "optimizer"):
        assert rows[part].value == pytest.approx(plan.memory[part], rel=1e-9), part
        assert source_says(rows[part], "ZeRO")
    kept = plan_explain.activation_rows(job, layout, stage)
    for part in ("activations", "logits", "gathered"):
        found = sum(row.value for row in kept if row.name.startswith(part))
        assert found == pytest.approx(plan.memory[part], rel=1e-9), part
    seconds = {row.name.split(",")[0]: row.value for row in plan_explain.step_rows(job, H100, plan)}
    assert seconds.pop("model FLOPs") == pytest.approx(plan.model_flops)
    for part, value in seconds.items():
        assert value == pytest.approx(plan.step[part], rel=0.02), part
    layers = [n for row in kept for n, name in row.factors if name == "layers"]
    assert layers == [job.model.layers // layout.pp]
    for row in kept:  # the numbers that are printed are those that are multiplied
        text = str(row).partition(": ")[2]
        product, _, value = text.partition(" = ")
        numbers = [float(n) for n in re.findall(r"(?:^|(?<=x ))([\d.e]+)(?= )", product)]
        over = re.search(r" / ([\d.e]+)$", product)
        expected = math.prod(numbers) / (float(over[1]) if over else 1) / 2**30
        assert expected == pytest.approx(float(value.split()[0]), rel=2e-3), text


def source_says(row, name: str) -> bool:
    return name in plan_explain.source_of(row.function)


# the search


def every_layout(job: Job, cluster: Cluster, gpus: int):
    """Yield all layouts, by other loops than the search's."""
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0]
    for tp in sizes:
        for cp in sizes:
            for pp in sizes:
                for micro in (1, 2, 4, 8, 16, 32, 64, 128):
                    for v in range(1, 17):
                        for kind in ("ring", "ulysses") if cp > 1 else ("ring",):
                            yield from shared(job, cluster, gpus, tp, cp, pp, micro, v, kind)


def shared(job, cluster, gpus, tp, cp, pp, micro, v, kind):
    dp = gpus // (tp * cp * pp)
    if tp * cp * pp * dp != gpus:
        return
    replicas = dp * cp
    ways = [ep for ep in range(1, replicas + 1) if replicas % ep == 0]
    for ep in ways if job.model.experts else [1]:
        for zero, shard in [(0, 0), (1, 0), (2, 0), (3, 0), (3, 2), (3, 4)]:
            if (zero and replicas == 1) or shard >= replicas or (shard and shard % ep):
                continue
            for recompute in RECOMPUTE:
                layout = Layout(tp, cp, pp, dp, ep, zero, shard, micro, recompute,
                                virtual_stages=v, cp_kind=kind)  # fmt: skip
                if not plan_rules.why_not(job, cluster, layout):
                    yield layout


@pytest.mark.parametrize(
    ("model", "gpus", "memory_gib", "node"),
    [
        (SMALL, 8, 6, 8),
        (replace(SMALL, experts=4, top_k=2), 4, 9, 4),
    ],
)
def test_the_search_finds_the_fastest_of_all_layouts(model, gpus, memory_gib, node):
    job = Job(model, 4096, 16)
    cluster = Cluster(replace(GPUS["h100"], memory_gib=memory_gib), node)
    limit = memory.memory_limit(cluster.gpu)
    held = {layout: sum(memory.memory_of(job, layout, node).values())
            for layout in every_layout(job, cluster, gpus)}  # fmt: skip
    fits = [layout for layout, size in held.items() if size <= limit]
    times = [predict(job, layout, cluster).step_time_s for layout in fits]
    best = search(job, cluster, gpus).best
    assert 0 < len(times) < len(held) or memory_gib == 80, "the limit cuts"
    assert best[0].step_time_s == pytest.approx(min(times), rel=1e-9)


def test_given_flags_are_kept_by_the_search():
    job = Job(models.MODELS["llama3-8b"], 4096, 64)
    for only in ({"tp": 4}, {"zero": 1, "recompute": "full"}, {"pp": 2, "micro_batch": 2}):
        found = search(job, H100, 16, only)
        assert found.fitting
        for each in found.fitting:
            assert all(getattr(each.layout, name) == value for name, value in only.items())


def test_nothing_but_offload_fits_where_memory_is_short():
    job = Job(models.MODELS["llama2-7b"], 4096, 64)
    offloads = {}
    for memory_gib in (80, 30):
        cluster = Cluster(replace(GPUS["h100"], memory_gib=memory_gib))
        offloads[memory_gib] = {p.layout.offload for p in search(job, cluster, 2).fitting}
    assert offloads[80] == {"none"} and offloads[30] and "none" not in offloads[30]


# words


def test_a_plan_that_a_slower_network_overturns_says_at_which_rate():
    """Two layouts of 1.5 and 1.55 s, of which the first waits 0.5 s for the network."""

    def timed(job, layout, cluster):
        waits = 0.5 / cluster.network_scale if layout.tp > 1 else 0.55
        return Prediction(layout, {"parameters": 1.0}, {"compute": 1.0, "tp": waits}, 1e15, 1, 2.0)

    job, layouts = Job(SMALL, 4096, 8), (Layout(tp=2, dp=4), Layout(dp=8))
    found = Found([timed(job, layout, H100) for layout in layouts], timed=timed)
    each = plan_text.survival(job, H100, found)
    assert each["network"]["until"] == 0.91, "0.5 / 0.55 = 0.909"
    assert each["network"]["behind"] == pytest.approx(1.625 / 1.55 - 1)
    assert each["matrix"]["stays_first"]
    text = " ".join(plan_text.survival_lines(found, each))
    assert "dp 8, DDP" in text and "is then 4.8% faster; 1 is first down to -9%" in text


def test_the_json_of_a_plan_says_what_the_text_says(say):
    flags = ("plan", "--model", "llama2-7b", "--gpus", 8)
    lines, found = say(*flags).splitlines(), json.loads(say(*flags, "--json"))
    first = lines.index(found["reasons"][0])
    assert lines[first : first + len(found["reasons"])] == found["reasons"]
    assert f"{found['tried']:,} layouts looked at, {found['fitting']:,} fit in " in lines[2]
    assert found["plans"][0]["name"].startswith("pp 2 x dp 4, ZeRO-1, recompute none")


# adapters


def test_four_bits_let_a_model_of_70_billion_fit_on_four_small_gpus(say):
    flags = ("plan", "--model", "llama2-70b", "--gpus", 4, "--gpu", "rtx4090", "--seq-len", 1024)
    plan = json.loads(say(*flags, "--finetune", "qlora", "--json"))["plans"][0]
    assert plan["fits"] and plan["layout"]["zero"] == 3
    frozen = models.parameters(models.MODELS["llama2-70b"]) / 4 * 0.516  # NF4, double quantization
    assert plan["memory_bytes"]["parameters"] == pytest.approx(frozen, rel=0.08)
    with pytest.raises(cli.UsageError, match="no layout fits"):
        say(*flags, "--finetune", "lora")


def test_adapters_and_unpacking_have_seconds_of_their_own(say):
    flags = ("predict", "--model", "llama3-8b", "--recompute", "full")
    lora, qlora = (
        json.loads(say(*flags, "--finetune", kind, "--json"))["step_s"]
        for kind in ("lora", "qlora")
    )
    assert lora["adapters"] == pytest.approx(qlora["adapters"]) and lora["unpacking"] == 0
    assert 0.05 < lora["adapters"] / lora["compute"] < 0.25
    assert qlora["unpacking"] > 0 and qlora["compute"] == pytest.approx(lora["compute"])
    text = say(*flags, "--finetune", "qlora", "--explain")
    shown = {line.split(":")[0]: line for line in text.splitlines() if " = " in line}
    for part in ("adapters", "unpacking"):
        assert float(shown[part].split()[-2]) == pytest.approx(qlora[part], rel=1e-3), part
    for source in ("Hu et al., 2021, equation 3", "Dettmers et al., 2023, equation 6"):
        assert source in text


def test_a_launch_line_of_adapters_fits_the_template_or_is_left_out(say):
    """fsdp_finetune.py keeps frozen weights in float32: a smaller micro-batch, or no line."""
    flags = ("plan", "--model", "llama3-70b", "--finetune", "lora", "--lora-rank", 8)
    launch = json.loads(say(*flags, "--gpus", 8, "--json"))["launch"]
    assert "--micro-batch-size 2 " in launch["commands"][0]
    assert launch["commands"][0].endswith("--lora-rank 8")
    assert launch["remarks"][-1].endswith("micro-batch 2, not 4")
    job, layout = Job(models.MODELS["llama3-70b"], 4096, 64), Layout(dp=8, zero=3, micro_batch=2)
    held = plan_finetune.template_bytes(job, layout, 8) / 2**30
    frozen = 4 * models.parameters(job.model) / 8 / 2**30
    assert frozen < held < frozen + 45
    launch = json.loads(say(*flags, "--gpus", 4, "--json"))["launch"]
    assert not launch["commands"] and "it lacks 8.5 GiB on each GPU" in launch["before"][0]


# ResNet-50


# launch lines


def parse_with(script: str, argv: list[str], monkeypatch) -> argparse.Namespace:
    monkeypatch.setattr("sys.argv", [script, *argv])
    parsed = load_script(script).parse_args()
    return parsed[0] if isinstance(parsed, tuple) else parsed


LLAMA = models.MODELS["llama2-7b"]
LAUNCHES = [
    (LLAMA, Layout(dp=8), "none", "ddp_training"),
    (LLAMA, Layout(dp=8, zero=1), "none", "deepspeed_train"),
    (LLAMA, Layout(dp=8, zero=2, recompute="full", micro_batch=2), "none", "fsdp_transformer"),
    (LLAMA, Layout(dp=16, zero=3, shard=8), "none", "fsdp_transformer"),
    (models.MODELS["llama2-70b"], Layout(dp=16, zero=3), "none", "fsdp_transformer"),
    (LLAMA, Layout(tp=2, pp=2, cp=2, dp=2, zero=3, recompute="full"), "none", "hybrid_parallelism"),
    (LLAMA, Layout(pp=4, dp=2, zero=1, virtual_stages=2), "none", "hybrid_parallelism"),
    (models.MODELS["llama3-405b"], Layout(tp=8, pp=2, dp=2), "none", "hybrid_parallelism"),
    (LLAMA, Layout(dp=8, zero=3), "lora", "fsdp_finetune"),
]


def test_no_template_has_float8_or_experts_on_several_axes():
    job = Job(LLAMA, 4096, 64, precision="fp8")
    assert "float8" in plan_launch.launch_of(job, Layout(dp=8, zero=1), 8).remarks[0]
    experts = Job(models.MODELS["mixtral-8x7b"], 4096, 64)
    layout = Layout(dp=8, ep=8, zero=2)
    assert "experts" in plan_launch.launch_of(experts, layout, 8).remarks[0]


@pytest.mark.parametrize(("model", "layout", "finetune", "script"), LAUNCHES)
def test_a_template_takes_its_launch_line(model, layout, finetune, script, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    job = Job(model, 4096, 64)
    launch = plan_launch.launch_of(job, layout, 8, finetune)
    assert f"/{script}.py" in launch.script, launch
    for command in launch.commands[:-1]:  # "# first add "NAME": Config(...) to PRESETS ..."
        row = re.search(r'"[^"]+": Config\(.*\)', command)[0]
        rows = eval(f"{{{row}}}", {"Config": template_model.Config})
        for name, config in rows.items():
            monkeypatch.setitem(template_model.PRESETS, name, config)
    line = shlex.split(launch.commands[-1])
    after = line.index(launch.script) + 1
    args = parse_with(launch.script, line[after:], monkeypatch)
    assert args.micro_batch_size == layout.micro_batch and args.global_batch_size == 64
    assert args.seq_len == 4096
    ranks = re.search(r"--nproc-per-node=(\d+)", launch.commands[-1])[1]
    nodes = re.search(r"--nnodes=(\d+)", launch.commands[-1])
    assert int(ranks) * (int(nodes[1]) if nodes else 1) == layout.gpus
    if script == "hybrid_parallelism":
        for axis in ("tp", "pp", "cp"):
            assert getattr(args, axis) == getattr(layout, axis)
        gathers_each = layout.zero == 3 and layout.pp == 1
        assert (args.sharding == "full") == gathers_each
    if script == "fsdp_finetune":
        assert bool(args.lora_rank) == (finetune == "lora")


@pytest.mark.parametrize(
    ("layout", "finetune", "says"),
    [
        (Layout(tp=2, dp=8, zero=3, offload="all"), "none", "has --offload all with these axes"),
        (Layout(dp=8, zero=3, offload="all"), "none", "has --offload all with these axes"),
        (Layout(dp=4, zero=3), "qlora", "fsdp_lora.py has the layer"),
        (Layout(tp=2, dp=4, zero=3), "lora", "has FSDP alone"),
    ],
)
def test_a_layout_that_no_template_runs_is_said_to(layout, finetune, says):
    launch = plan_launch.launch_of(Job(LLAMA, 4096, 64), layout, 8, finetune)
    assert not launch.commands and says in " ".join(launch.remarks)


def test_predict_shows_what_axes_send(say):
    job = ("--model", "llama3-70b", "--seq-len", 8192, "--global-batch", 512, "--recompute", "full")
    axes = ("--tp", 8, "--pp", 2, "--dp", 4, "--zero", 1)
    text = say("predict", *job, *axes)
    assert re.search(r"^tp 8 +matrices.* node, 450 GB/s +1,409\.3 MB", text, re.M)
    assert "tp: 12 all-gathers" in text and "dp: (n-1)/n x 6 bytes per weight" in text
    moved = say("predict", *job, *axes, "--order", "dp-tp-cp-pp")
    assert re.search(r"^tp 8 +matrices.* network x2, 100 GB/s ", moved, re.M)
    found = json.loads(say("predict", *job, *axes, "--json"))
    for name, axis in found["axes"].items():
        assert axis["exposed"] == found["step_s"][name]
