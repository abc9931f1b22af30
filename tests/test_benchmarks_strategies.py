"""strategies.toml: every row can be started, deals the same batch, and trains to the same loss."""

import json
import re
import sys

import pytest
from conftest import REPO, compiled, load_script, run_command
from helpers_benchmarks import TOOL, bench  # noqa: F401

import bench_points
import bench_strategies
import bench_toml
from bench_settings import Settings
from bench_verdicts import FLOAT32, IN_16_BITS
from dist_common import cli

full = pytest.mark.full
STRATEGIES = bench_strategies.load()
LOSSY = {"ddp-bf16"}
# Of world size 2, but these:
SMALLEST = {"single": 1, "fsdp-hybrid": 4, "tp-pp-dp": 8}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_script_accepts_the_flags_of_its_rows(name, monkeypatch):
    settings = Settings(strategies=[name], device="cpu")
    sizes = [SMALLEST.get(name, 2)]
    settings.world_sizes, settings.global_batch_size = sizes, 16
    (point,) = bench_points.plan(settings, [STRATEGIES[name]])[:1]
    assert point.reason is None and point.world_size == sizes[0]
    words = point.arguments(settings, "unused")
    monkeypatch.setattr(sys, "argv", [STRATEGIES[name].script, *words])
    monkeypatch.chdir(REPO)
    parsed = load_script(STRATEGIES[name].script).parse_args()
    args = parsed[0] if isinstance(parsed, tuple) else parsed
    assert (args.parity_steps, args.log_every, args.save_every) == (0, 1, 0)
    assert getattr(args, "eval_every", 0) == 0, "the test set's time is no step's"


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("largest", [None, 1, 3])
def test_micro_batch_x_accumulation_x_data_ranks_is_the_global_batch(name, largest):
    strategy = STRATEGIES[name]
    found = 0
    for world_size in range(1, 17):
        if strategy.why_not(world_size, "tiny", "32-true"):
            continue
        ranks = strategy.data_parallel_ranks(world_size)
        batch = 16 * ranks
        micro, steps = bench_points.batch_sizes(strategy, world_size, batch, largest)
        assert micro * steps * ranks == batch
        assert micro <= (largest or batch)
        assert steps % (strategy.micro_batches * strategy.ranks_of("pp", world_size)) == 0
        found += 1
    assert found


def test_a_batch_that_cannot_be_dealt_is_said_so():
    with pytest.raises(ValueError, match="16 sequences cannot be dealt to 3 data-parallel ranks"):
        bench_points.batch_sizes(STRATEGIES["ddp"], 3, 16, None)
    with pytest.raises(ValueError, match="1 data-parallel ranks x 8 micro-batches"):
        bench_points.batch_sizes(STRATEGIES["pp-1f1b"], 4, 12, None)


@pytest.mark.parametrize(
    ("name", "world_size", "preset", "precision", "says"),
    [
        ("ddp", 1, "tiny", "32-true", "cannot use 1 rank, it needs 2 or more: one rank has no"),
        ("single", 2, "tiny", "32-true", "cannot use 2 ranks, it needs 1: it is one process"),
        ("fsdp-hybrid", 5, "tiny", "32-true", "it needs 4, 6, 8, ...: each half"),
        ("tp-pp-dp", 4, "tiny", "32-true", "it needs 8, 12, 16, ...: each of the three"),
        ("tp", 4, "tiny", "32-true", "cannot cut the 2 key and value heads of tiny into 4"),
        ("pp-interleaved", 4, "tiny", "32-true", "cannot cut the 4 layers of tiny into 8 parts"),
        ("tp", 2, "124m", "32-true", "cannot split 124m: its embedding is the output layer too"),
        ("fsdp-full", 2, "tiny", "16-mixed", "cannot train in 16-mixed, only in 32-true"),
    ],
)
def test_what_a_strategy_cannot_use_has_a_reason(name, world_size, preset, precision, says):
    assert says in STRATEGIES[name].why_not(world_size, preset, precision)


def test_the_exact_ones_are_all_but_those_that_compress():
    assert {name for name, row in STRATEGIES.items() if not row.exact} == LOSSY


def test_list_shows_every_strategy(bench, capsys):  # noqa: F811
    assert bench("list") == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^([a-z][\w-]*)  ", printed, re.M)[1:] == list(STRATEGIES)


# strategies of one's own

OWN = '[mine]\ndoes = "mine"\nscript = "mine.py"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (OWN + "flag = 1", r"own.toml \[mine\]: unknown key flag: did you mean flags\?"),
        (OWN + 'least_ranks = "two"', "least_ranks must be a whole number, not 'two'"),
        (OWN + "exact = 1", "exact must be true or false, not 1"),
        (OWN + "least_ranks = 0", "least_ranks must be at least 1"),
        (OWN + 'tp = "half"', "tp must be at least 1, or \"all\", not 'half'"),
        (OWN + 'flags = "--ranks {ranks}"', r"flags can have \{world_size\} and \{half\}"),
        (OWN.replace("mine.py", "gone.py"), "there is no script gone.py"),
        ('[mine]\nscript = "mine.py"\n', "does is missing"),
        ('mine = "mine.py"\n', "mine must be a table"),
        (OWN.replace("[mine]", "[ddp]"), "the name ddp is taken"),
        (OWN + "exact = yes", r"own.toml is not valid TOML: .*line 4"),
    ],
)
def test_a_wrong_file_of_strategies_is_refused(tmp_path, text, says):
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(cli.UsageError, match=says):
        bench_strategies.load(tmp_path / "own.toml")


def test_a_script_of_one_s_own_is_beside_its_file(tmp_path):
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "own.toml").write_text(OWN)
    found = bench_strategies.load(tmp_path / "own.toml")
    assert found["mine"].path == tmp_path / "mine.py"
    assert list(found) == [*STRATEGIES, "mine"]


def test_the_nearest_name_is_named():
    with pytest.raises(cli.UsageError, match=r"unknown strategy fsdp-ful: did you mean fsdp-full"):
        bench_strategies.choose(["ddp", "fsdp-ful"], STRATEGIES)
    assert bench_toml.nearest("qqq", STRATEGIES) == "."


# the same loss


def sweep(folder, *words, timeout_s=900):
    """Run a real sweep of small points; return its records, and how it ended."""
    command = ["python", TOOL, "sweep", "--output-dir", str(folder), "--repeats", "1"]
    command += ["--seq-len", "64", "--max-steps", "12", *map(str, words)]
    ended = run_command(command, REPO, timeout_s)
    lines = (folder / "results.jsonl").read_text().splitlines()
    return list(map(json.loads, lines)), ended


def loss_of(record):
    return record["results"]["metrics"]["final_loss"]


@full
@pytest.mark.parametrize("world_size", sorted({2, *SMALLEST.values()} - {1}))
def test_every_strategy_trains_to_the_loss_of_one_process(tmp_path, world_size):
    names = [name for name in STRATEGIES if SMALLEST.get(name, 2) == world_size]
    if "zero-offload" in names and not compiled("cpu_adam"):
        names.remove("zero-offload")  # compiling takes minutes; module 03's tests say so too
    records, ended = sweep(tmp_path / "out", "--strategies", *names, "--world-sizes", world_size)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert [record["point"]["strategy"] for record in records] == ["single", *names]
    expected = loss_of(records[0])
    for record in records:
        difference = abs(loss_of(record) - expected)
        assert difference < (0.02 if record["point"]["strategy"] in LOSSY else 1e-5), record["id"]
        assert len(record["losses"]) == 5, f"{record['id']} left no losses of its steps"


def unsynchronised(folder):
    """Write a copy of ddp_training.py that averages no gradients and checks nothing itself."""
    text = (REPO / "01-ddp-basics/ddp_training.py").read_text()
    for old, new in (
        ("with contextlib.nullcontext() if last else ddp_model.no_sync():",
         "with ddp_model.no_sync():"),
        ("if report.failed:  #", "if False:  #"),
        ("        return report.finish(f\"loss", "        report.checks.clear()\n"
         "        return report.finish(f\"loss"),
        ("import contextlib\n", f"import sys\nsys.path.append('{REPO / '01-ddp-basics'}')\n"
         "import contextlib\n"),
    ):  # fmt: skip
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "unsynchronised.py").write_text(text)
    row = '[unsynchronised]\ndoes = "no averaging"\nscript = "unsynchronised.py"\n'
    (folder / "own.toml").write_text(row + 'flags = "--eval-every 0"\n')
    return folder / "own.toml"


def furthest(record, reference):
    """Return the largest difference of losses in the first steps."""
    pairs = zip(record["losses"], reference["losses"], strict=True)
    return max(abs(own - one) for own, one in pairs)


@full
@pytest.mark.parametrize(("precision", "allowed", "margin"), [
    ("32-true", FLOAT32, 5), ("bf16-mixed", IN_16_BITS, 3),
])  # fmt: skip
def test_gradients_that_are_not_averaged_are_wrong_by_far(tmp_path, precision, allowed, margin):
    """Rounding and the sabotage are far from the tolerance, on both sides of it."""
    own = unsynchronised(tmp_path)
    names = ("ddp", "fsdp-full", "zero-2", "tp", "pp-1f1b", "unsynchronised")
    words = ("--strategies", *names, "--strategies-file", own, "--precisions", precision)
    records, ended = sweep(tmp_path / "out", *words)
    assert ended.codes == [1] and {record["status"] for record in records} == {"ok"}
    single, *exact, sabotaged = records
    assert all(furthest(record, single) < allowed.early / margin for record in exact)
    assert furthest(sabotaged, single) > margin * allowed.early
    for name in names[:-1]:
        assert re.search(rf"^{name} .* ok$", ended.stdout, re.M), ended.stdout
    assert re.search(r"^unsynchronised .* WRONG \S+$", ended.stdout, re.M), ended.stdout
