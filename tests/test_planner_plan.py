"""planner/plan.py: names, searches, words, launch lines, refusals."""

import json
import math
import re
import shlex
from dataclasses import replace

import pytest
from conftest import REPO, load_script, run_command

from dist_common import model as template_model
from planner import cli, memory, models, plan, plan_explain, plan_launch, plan_search
from planner.hardware import GPUS, Cluster, find_gpu
from planner.job import RECOMPUTE, Layout, ModelShape, TrainingJob
from planner.models import find_model
from planner.plan_search import search
from planner.step import predict

H100 = Cluster(GPUS["h100"])
PLAN = "planner/plan.py"
LLAMA = models.MODELS["llama2-7b"]
SMALL = ModelShape(4, 1024, 16, 8, 2816, 32_000, name="small")


@pytest.fixture
def ask(capsys, monkeypatch):
    """Return a function that runs plan.py with flags and returns its output."""

    def run(*argv):
        monkeypatch.setattr("sys.argv", [PLAN, *shlex.split(" ".join(map(str, argv)))])
        assert plan.main() == 0
        return capsys.readouterr().out

    return run


@pytest.mark.full
def test_the_programs_need_neither_torch_nor_the_guide():
    others = "{'torch', 'numpy', 'dist_common', 'bench'}"
    code = "import sys, planner.plan, planner.validate"
    code += f"; print({others} & {{*sys.modules}})"
    ended = run_command(["python", "-c", code], REPO, 60, PYTHONPATH=str(REPO))
    assert ended.stdout.strip() == "set()", ended.stderr


# Names

MODEL_NAMES = {
    "qwen3-32b": "qwen3-32b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "llama3.1-8b": "llama3-8b",
    "meta-llama/Llama-3.1-8B": "llama3-8b",
    "Meta-Llama-3.1-8B-Instruct": "llama3-8b",
    "Llama-3.1-70B": "llama3-70b",
    "LLAMA3-70B": "llama3-70b",
    "DeepSeek-V3": "deepseek-v3",
    "gpt-oss-20b": "gpt-oss-20b",
    "kimi-k2": "kimi-k2",
    "deepseek-ai/DeepSeek-R1-0528": "deepseek-v3",
    "Mixtral-8x7B-v0.1": "mixtral-8x7b",
}
GPU_NAMES = {
    "h800": "h800",
    "a6000": "a6000",
    "h20": "h20",
    "b300": "b300",
    "mi325x": "mi325x",
    "a800": "a800",
    "l4": "l4",
    "3090": "rtx3090",
    "H100-SXM-80GB": "h100",
    "NVIDIA H100 NVL": "h100-nvl",
    "H100 (NVLink, SXM5)": "h100",
    "A100-SXM4-40GB": "a100-40gb",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "TPU v5p": "tpu-v5p",
}


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_model_is_found_however_it_is_spelled(name):
    assert find_model(name).name == MODEL_NAMES[name]


@pytest.mark.parametrize("name", GPU_NAMES)
def test_a_gpu_is_found_however_it_is_spelled(name):
    assert find_gpu(name).name == GPU_NAMES[name]


@pytest.mark.parametrize(
    ("name", "weights"), [("7b", 7e9), ("32B", 32e9), ("1T", 1e12)]
)
def test_a_number_of_weights_is_a_model(name, weights):
    assert models.parameters(find_model(name)) == pytest.approx(weights, rel=0.05)


def test_a_name_with_a_number_has_so_many_weights():
    for name, model in models.MODELS.items():
        number = re.search(r"(?<!x)(?<![\d.])([\d.]+)([bm])$", name)
        if number and "gemma" not in name:  # its names leave the tables out
            weights = float(number[1]) * {"b": 1e9, "m": 1e6}[number[2]]
            assert models.parameters(model) == pytest.approx(weights, rel=0.5), name


CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
    "tie_word_embeddings": False,
}


def test_a_config_is_the_model_of_its_sizes(tmp_path, ask):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    flags = "predict --dp 8 --zero 3 --json"
    expected = ask(flags, "--model llama3-8b")
    assert ask(flags, "--model", path) == ask(flags, "--hf-config", path) == expected
    sizes = "--layers 32 --hidden 4096 --heads 32 --kv-heads 8 --ffn 14336"
    assert ask(flags, sizes, "--vocab 128256") == expected
    mixtral = {"model_type": "mixtral", "num_local_experts": 8, "vocab_size": 32_000}
    result = models.from_hf_config(CONFIG | mixtral | {"num_experts_per_tok": 2})
    assert replace(result, name="mixtral-8x7b") == models.MODELS["mixtral-8x7b"]


# Searches

SEARCHED = [
    "--gpus 512 --shard 128 --global-batch 1024",
    "--gpus 8 --micro-batch 3 --global-batch 96",
    "--pp 2 --interleave 9",
    "--gpus 64 --zero 3 --shard 16",
    "--gpus 1 --zero 3 --offload all",
    "--gpus 8 --cp 2 --cp-kind gather --recompute selective",
]
DEEPSEEK = "--model DeepSeek-V3 --gpus 256 --global-batch 512"


@pytest.mark.full
@pytest.mark.parametrize(
    "flags", [*SEARCHED, f"{DEEPSEEK} --pp 4 --ep 64 --interleave 8"]
)
def test_given_values_are_searched(flags, ask):
    result = json.loads(ask("plan --json", flags))
    names = {
        "shard": "shard",
        "interleave": "virtual_stages",
        "zero": "zero",
        "pp": "pp",
    }
    names |= {"micro-batch": "micro_batch", "cp-kind": "cp_kind", "ep": "ep"}
    for flag, value in re.findall(r"--([a-z-]+) (\S+)", flags):
        if flag in names:
            assert str(result["plans"][0]["layout"][names[flag]]) == value


def every_layout(job, cluster, gpus):
    """Yield all layouts, by other loops than the search's."""
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0]
    shapes = [
        (tp, cp, pp, gpus // (tp * cp * pp))
        for tp in sizes
        for cp in sizes
        for pp in sizes
        if gpus % (tp * cp * pp) == 0
    ]
    sharded = [(0, 0), (1, 0), (2, 0), (3, 0), (3, 2), (3, 4)]
    for tp, cp, pp, dp in shapes:
        experts = job.model.experts
        ways = [n for n in sizes if experts and n <= dp * cp] or [1]
        for micro in (1, 2, 4, 8, 16):
            for v in range(1, 5):
                for kind in ("ring", "ulysses") if cp > 1 else ("ring",):
                    for ep in ways:
                        for zero, shard in sharded:
                            if shard >= dp * cp or (zero and dp * cp == 1):
                                continue
                            yield Layout(
                                tp,
                                cp,
                                pp,
                                dp,
                                ep,
                                zero,
                                shard,
                                micro,
                                virtual_stages=v,
                                cp_kind=kind,
                            )


@pytest.mark.full
@pytest.mark.parametrize("experts", [0, 4])
def test_the_search_finds_the_fastest_of_all_layouts(experts):
    model = replace(SMALL, experts=experts, top_k=2)
    job, gpus = TrainingJob(model, 4096, 16), 4
    cluster = Cluster(replace(GPUS["h100"], memory_gib=9), gpus)
    limit = memory.memory_limit(cluster.gpu)
    times, tried = [], 0
    for layout in every_layout(job, cluster, gpus):
        chunks = layout.pp * layout.virtual_stages
        if plan_search.layout_error(job, cluster, layout) or model.layers % chunks:
            continue
        for recompute in RECOMPUTE:
            one = replace(layout, recompute=recompute)
            tried += 1
            if sum(memory.memory_of(job, one).values()) <= limit:
                times.append(predict(job, one, cluster).step_time_s)
    best = search(job, cluster, gpus).best()
    assert 0 < len(times) < tried, "the limit excludes some"
    assert best[0].step_time_s == pytest.approx(min(times), rel=1e-9)


def test_offload_is_searched_only_where_memory_is_short():
    job = TrainingJob(LLAMA, 4096, 64)
    for memory_gib, expected in ((80, {"none"}), (30, {"optimizer", "all"})):
        cluster = Cluster(replace(GPUS["h100"], memory_gib=memory_gib))
        result = {p.layout.offload for p in search(job, cluster, 2).fitting}
        assert result and result <= expected


# Advice


@pytest.mark.full
def test_on_a_tie_the_simpler_layout_is_first(ask):
    result = json.loads(ask("plan --model llama2-7b --gpus 8 --json"))
    assert result["plans"][0]["name"].startswith("dp 8, ")
    assert "1 is simpler than 2, which is" in result["reasons"][0]


@pytest.mark.full
def test_of_equally_fast_layouts_the_one_with_fewer_logits_is_taken(ask):
    flags = (
        "plan --model Qwen/Qwen3-32B --finetune full --gpus 16 --seq-len 8192 --json"
    )
    first = json.loads(ask(flags))["plans"][0]
    assert first["name"].startswith("dp 16, FSDP, ")
    assert first["layout"]["micro_batch"] == 1
    assert first["memory_bytes"]["logits"] < 20 * 2**30


def test_the_usual_batch_grows_with_the_model(ask):
    flags = "predict --json --gpus 8 --recompute full --zero 3 --model"
    batches = [json.loads(ask(flags, m))["global_batch"] for m in ("1b", "3b", "70b")]
    assert [batch * 4096 for batch in batches] == [2**19, 2**20, 2**22]


@pytest.mark.full
def test_certainty_is_that_of_similar_published_runs(ask):
    known = json.loads(ask("predict --model llama3-8b --dp 8 --zero 3 --json"))
    certainty = known["certainty"]
    assert certainty["runs"] >= 3 and certainty["like"][:2] == ["h100", "dense"]
    experts = json.loads(ask("predict --model gpt-oss-20b --gpu b200 --dp 8 --json"))
    assert experts["certainty"] is None or experts["certainty"]["like"][1] == "experts"
    text = ask("predict --model llama3-8b --gpu h20 --dp 8")
    assert "certainty: no published run like this (h20, dense" in text


@pytest.mark.full
def test_a_job_that_does_not_fit_names_what_would(ask):
    flags = "plan --model llama3-70b --finetune lora --gpus 1 --gpu a100"
    with pytest.raises(cli.CommandLineError, match="it fits with .*--finetune qlora"):
        ask(flags)
    with pytest.raises(cli.CommandLineError, match="it fits with --loss chunked"):
        ask("plan --model llama3-8b --finetune lora --gpus 1 --gpu rtx4090")
    ask("plan --model llama3-8b --finetune lora --gpus 1 --gpu rtx4090 --loss chunked")


@pytest.mark.full
def test_a_plan_prints_what_its_json_holds(ask):
    flags = "plan --model llama2-7b --gpus 8 --tokens 1T --dollars-per-gpu-hour 2"
    lines, result = ask(flags).splitlines(), json.loads(ask(flags, "--json"))
    first = lines.index(result["reasons"][0])
    assert lines[first : first + len(result["reasons"])] == result["reasons"]
    one = result["plans"][0]
    held = dict(one["memory_bytes"])
    total, limit = held.pop("total"), held.pop("limit")
    assert total == pytest.approx(sum(held.values())) and total <= limit
    assert one["step_time_s"] == pytest.approx(sum(one["step_s"].values()))
    rate = one["global_batch"] * 4096 / one["step_time_s"] / 8
    assert one["tokens_per_s_per_gpu"] == pytest.approx(rate)
    assert one["dollars"] == pytest.approx(1e12 / rate / 8 / 3600 * 8 * 2)


CHANGED = [
    ("--gpu-tflops 500", "compute", 1.2),
    ("--link-gb-s 100", "tp", 2),
    ("--hbm-gb-s 500", "optimizer", 2),
    ("--gpus-per-node 4 --tp 4 --dp 2 --network-gb-s 100Gbit", "dp", 2),
    ("--gpus-per-node 4 --tp 4 --dp 2 --network-gb-s 3.125", "dp", 2),
]


@pytest.mark.parametrize(("flags", "part", "factor"), CHANGED)
def test_given_hardware_replaces_the_data_sheet(flags, part, factor, ask):
    usual = "predict --global-batch 8 --json"
    axes = "--tp 4 --dp 2" if "--tp" in flags else "--tp 8"
    before = json.loads(ask(usual, axes))["step_s"][part]
    more = flags if "--tp" in flags else f"{axes} {flags}"
    assert json.loads(ask(usual, more))["step_s"][part] > factor * before


def test_ethernet_takes_longer_to_start(ask):
    flags = "predict --gpus 16 --pp 2 --dp 8 --global-batch 64 --json --network"
    fast, slow = (
        json.loads(ask(flags, n))["step_s"]["pp"] for n in ("rdma", "ethernet")
    )
    assert slow > fast


# Memory of fine-tuning

LESS_MEMORY = [
    ("--finetune lora", "--finetune lora --loss chunked"),
    ("--finetune lora", "--finetune qlora"),
    ("--finetune lora --dp 4", "--finetune lora --dp 4 --zero 2"),
    ("--finetune lora --dp 4", "--finetune lora --dp 2 --tp 2"),
    ("--finetune full --zero 3 --dp 8", "--finetune full --zero 3 --dp 8 --loss fused"),
    ("--finetune full", "--finetune full --optimizer adamw-bf16"),
    ("--optimizer adamw-bf16", "--optimizer adamw-8bit"),
    ("--optimizer adamw-8bit", "--optimizer adamw-8bit --optimizer-in-backward"),
]


@pytest.mark.parametrize(("before", "after"), LESS_MEMORY)
def test_a_flag_of_fine_tuning_saves_memory(before, after, ask):
    flags = "predict --model llama3-8b --recompute full --global-batch 8 --json"
    held = [json.loads(ask(flags, f))["memory_bytes"]["total"] for f in (before, after)]
    assert held[1] < 0.99 * held[0]


# Words


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama2-7b", Layout(dp=8, zero=3, recompute="full")),
        ("llama3-70b", Layout(tp=8, pp=4, dp=2, zero=1, virtual_stages=2)),
        ("mixtral-8x7b", Layout(dp=16, ep=8, zero=1)),
    ],
)
def test_what_is_explained_multiplies_to_what_is_predicted(name, layout):
    job = TrainingJob(models.MODELS[name], 2048, 64)
    result = predict(job, layout, H100)
    rows = plan_explain.memory_formulas(job, result)
    for part in ("parameters", "gradients", "optimizer", "activations", "logits"):
        value = sum(row.value for row in rows if row.name.startswith(part))
        assert value == pytest.approx(result.memory[part], rel=1e-9), part
    for row in plan_explain.step_formulas(job, H100, result)[1:]:
        part = row.name.split(",")[0]
        assert row.value == pytest.approx(result.step[part], rel=0.02), part
    for row in rows:  # the printed numbers are those that are multiplied
        product, _, value = str(row).partition(": ")[2].partition(" = ")
        numbers = re.findall(r"(?:^|(?<=x ))([\d.e]+)(?= )", product)
        over = re.search(r" / ([\d.e]+)$", product)
        expected = math.prod(map(float, numbers)) / (float(over[1]) if over else 1)
        assert expected / 2**30 == pytest.approx(float(value.split()[0]), rel=2e-3)


def test_predict_shows_what_axes_send(ask):
    job = "predict --model llama3-70b --seq-len 8192 --global-batch 512"
    axes = "--recompute full --tp 8 --pp 2 --dp 4 --zero 1"
    text = ask(job, axes)
    assert re.search(r"^tp 8 +matrices.* node, 450 GB/s +1,409\.3 MB", text, re.M)
    assert "tp: 6 all-gather of 134.2 MB and 6 reduce-scatter of 134.2 MB" in text
    moved = ask(job, axes, "--order dp-tp-cp-pp")
    assert re.search(r"^tp 8 +matrices.* network x2, 100 GB/s ", moved, re.M)
    result = json.loads(ask(job, axes, "--json"))
    for name, axis in result["axes"].items():
        assert axis["exposed"] == result["step_s"][name]


# Launch lines


LAUNCHES = [
    (LLAMA, Layout(dp=8), "none", "ddp_training"),
    (LLAMA, Layout(dp=8, zero=1), "none", "deepspeed_train"),
    (LLAMA, Layout(dp=8, zero=2, recompute="full"), "none", "fsdp_transformer"),
    (LLAMA, Layout(dp=16, zero=3, shard=8), "none", "fsdp_transformer"),
    (models.MODELS["llama2-70b"], Layout(dp=16, zero=3), "none", "fsdp_transformer"),
    (find_model("7b"), Layout(dp=8, zero=3), "none", "fsdp_transformer"),
    (LLAMA, Layout(tp=2, pp=2, cp=2, dp=2, zero=3), "none", "hybrid_parallelism"),
    (LLAMA, Layout(pp=4, dp=2, virtual_stages=2), "none", "hybrid_parallelism"),
    (LLAMA, Layout(dp=8, zero=3), "lora", "fsdp_finetune"),
]


@pytest.mark.full
@pytest.mark.parametrize(("model", "layout", "finetune", "script"), LAUNCHES)
def test_a_template_takes_its_launch_line(
    model, layout, finetune, script, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    job = TrainingJob(model, 4096, 64)
    launch = plan_launch.launch_of(job, layout, 8, finetune)
    assert f"/{script}.py" in launch.script, launch
    for command in launch.commands[:-1]:  # "# first add "NAME": Config(...) to PRESETS"
        name, numbers, tied = re.search(
            r'"([^"]+)": Config\(([\d, ]+)(.*)\)', command
        ).groups()
        config = template_model.Config(
            *map(int, numbers.strip(", ").split(",")), tied_embeddings=bool(tied)
        )
        monkeypatch.setitem(template_model.PRESETS, name, config)
    line = shlex.split(launch.commands[-1])
    after = line.index(launch.script) + 1
    monkeypatch.setattr("sys.argv", [launch.script, *line[after:]])
    args = load_script(launch.script).parse_args()
    assert (args.micro_batch_size, args.global_batch_size, args.seq_len) == (
        1,
        64,
        4096,
    )
    ranks = re.search(r"--nproc-per-node=(\d+)", launch.commands[-1])[1]
    nodes = re.search(r"--nnodes=(\d+)", launch.commands[-1])
    assert int(ranks) * (int(nodes[1]) if nodes else 1) == layout.gpus
    if script == "hybrid_parallelism":
        sizes = (layout.tp, layout.pp, layout.cp)
        assert (args.tp, args.pp, args.cp) == sizes


FP8 = TrainingJob(LLAMA, 4096, 64, precision="fp8")
EXPERTS = TrainingJob(models.MODELS["mixtral-8x7b"], 4096, 64)
PLAIN = TrainingJob(LLAMA, 4096, 64)


@pytest.mark.parametrize(
    ("job", "layout", "finetune", "says"),
    [
        (FP8, Layout(dp=8, zero=1), "none", "float8"),
        (EXPERTS, Layout(dp=8, ep=8, zero=2), "none", "experts"),
        (PLAIN, Layout(dp=8, zero=3, offload="all"), "none", "has --offload all"),
        (PLAIN, Layout(dp=4, zero=3), "qlora", "fsdp_lora.py has the layer"),
        (PLAIN, Layout(tp=2, dp=4, zero=3), "lora", "has FSDP alone"),
    ],
)
def test_a_layout_that_no_template_runs_says_so(job, layout, finetune, says):
    launch = plan_launch.launch_of(job, layout, 8, finetune)
    assert not launch.commands and says in " ".join(launch.remarks)


@pytest.mark.full
def test_a_template_that_holds_more_than_the_plan_is_left_out(ask):
    flags = "plan --model llama3-70b --finetune lora --gpus 4 --loss chunked --json"
    launch = json.loads(ask(flags))["launch"]
    assert not launch["commands"] and "it lacks" in launch["before"][0]


# Refusals

ODD = "--layers 4 --hidden 96 --heads 3 --ffn 384 --vocab 256 --gpus 5 --global-batch 1"
BAD_INPUT = [
    ("plan --gpu voodoo", "unknown GPU 'voodoo'; known are a100"),
    ("plan --gpu H900", "did you mean h"),
    ("plan --model llama9", "llama9 is unknown; did you mean "),
    ("plan --layers 4 --hidden 64", "a model of sizes lacks --heads, --ffn, --vocab"),
    ("plan --model llama2-7b --heads 33", "--heads 33 do not divide --hidden 4096"),
    ("plan --gpus 12", "--gpus 12 must be a multiple of --gpus-per-node 8"),
    (
        f"plan {ODD}",
        "no layout of 5 GPUs divides the job: tp may be 1 3 (heads 3, key-",
    ),
    ("plan --gpus 6 --tp 3", "tp 3 does not divide the 32 heads"),
    ("plan --model 405b --gpus 1 --gpu rtx4090 --seq-len 512 --offload none", "no lay"),
    ("plan --precision fp8 --gpu a100", "--precision fp8: a100 has fp32, tf32, "),
    ("plan --tokens many", "--tokens: must be a number like 300B or 15T, not 'many'"),
    ("plan --model 7b --hf-config x", "not allowed with argument --model"),
    ("plan --order tp-dp", "--order: must name tp, cp, dp, pp once each, not 'tp-dp'"),
    ("plan --network-gb-s fast", "--network-gb-s: must be a number above 0"),
    (
        "predict --gpus 8 --tp 2 --dp 2",
        "tp 2 x cp 1 x pp 1 x dp 2 = 4 GPUs, but --gpus",
    ),
    ("predict --pp 64", "pp 64 leaves a stage without a layer: the model has 32"),
    ("predict --pp 8 --interleave 5", "pp 8 x 5 virtual stages leaves a stage"),
    ("predict --interleave 2", "2 virtual stages need a pipeline"),
    ("predict --cp 3", "cp 3 leaves less than 512 of 4096 tokens, or unequal parts"),
    ("predict --dp 8 --global-batch 12", "dp 8 x micro-batch 1 = 8 does not divide"),
    ("predict --dp 8 --ep 2", "ep 2 must divide the model's 0 experts and dp x cp"),
    ("predict --pp 4 --interleave 2 --global-batch 6", "a multiple of 4 micro-batches"),
    ("predict --finetune lora --pp 2", "pp 2: adapters are planned with tp and dp"),
    ("predict --finetune lora --offload all", "adapters are planned without offload"),
    ("plan --finetune qlora --optimizer adamw-8bit", "--optimizer changes little"),
    ("predict --finetune lora --lora-rank 9000", "--lora-rank 9000: an adapter is"),
    ("plan --lora-rank 8", "--lora-rank needs --finetune lora or qlora"),
    ("predict --dp 8 --zero 3 --shard 3", "3 GPUs of a shard group do not divide"),
]


@pytest.mark.parametrize(("flags", "says"), BAD_INPUT)
def test_bad_input_gives_one_line(flags, says, ask):
    with pytest.raises(cli.CommandLineError) as raised:
        ask(flags)
    assert says in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.full
def test_a_command_that_fails_says_one_line_and_exits_with_2():
    command = ["python", PLAN, "plan", "--gpu", "voodoo"]
    ended = run_command(command, REPO, 60, PYTHONPATH=str(REPO))
    assert ended.codes == [2] and ended.stdout == ""
    assert ended.stderr.startswith("plan.py: error: ") and ended.stderr.count("\n") == 1
