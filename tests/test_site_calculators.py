"""The site's calculators are the guide's own: its planner in the browser, its formulas as a port.

Of the planner the page shows what the command line prints. Of the rest site/golden.py draws cases
and has Python's results; site_calculators.js computes them again, and agrees to the last bit.
"""

import importlib.util
import json
import math
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPO
from site_browser import PHONE, WIDE

from advanced_parts import pipeline_schedules as papers
from dist_common.lab import traffic
from nccl_parts import collective_ops
from nccl_parts import point_to_point as costs

CALC = REPO / "site/static/calc"
NODE = shutil.which(REPO / ".venv-site/bin/node") or shutil.which("node")
KINDS = ("schedules", "rings", "times", "strategies", "weigh")
# Since 3.12 Python's sum() carries along what rounding loses. JavaScript adds as 3.11 did.
TOLERANCE = 0 if sys.version_info < (3, 12) else 1e-13

needs_node = pytest.mark.skipif(not NODE, reason="no node: neither .venv-site has one nor PATH")


def module_of_site(name: str):
    spec = importlib.util.spec_from_file_location(f"site_{name}", REPO / f"site/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def golden():
    return module_of_site("golden")


@pytest.fixture(scope="module")
def in_browser():
    return module_of_site("in_browser")


@pytest.fixture(scope="module")
def few(golden, tmp_path_factory) -> Path:
    """A folder with a tenth of the cases."""
    folder = tmp_path_factory.mktemp("golden")
    golden.write(folder, share=0.1)
    return folder


def cases_of(folder: Path) -> dict:
    # JavaScript has one kind of number, and prints some floats without a point.
    return json.loads((folder / "golden.json").read_text(), parse_int=float)


def computed(calc: Path, folder: Path) -> dict:
    command = [NODE, REPO / "tests/site_calculators.js", calc, folder]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout, parse_int=float)


def differences(python, javascript, where="", tolerance=TOLERANCE):
    """Yield where two results differ: in what, and by what."""
    if isinstance(python, dict) and isinstance(javascript, dict):
        for name, value in python.items():
            yield from differences(
                value, javascript.get(name, "missing"), f"{where} {name}", tolerance
            )
    elif isinstance(python, list) and isinstance(javascript, list):
        if len(python) != len(javascript):
            yield f"{where}: {len(python)} and {len(javascript)} of them"
        for number, pair in enumerate(zip(python, javascript, strict=False)):
            yield from differences(*pair, f"{where} {number}", tolerance)
    elif isinstance(python, float) and isinstance(javascript, float):
        if not math.isclose(python, javascript, rel_tol=tolerance, abs_tol=0):
            yield f"{where}: {python!r} and {javascript!r}"
    elif python != javascript:
        yield f"{where}: {python!r} and {javascript!r}"


def wrong(expected: dict, found: dict) -> dict[str, list[str]]:
    """Return by kind what differs, a line for each case."""
    lines = {kind: [] for kind in expected}
    for kind, cases in expected.items():
        for number, (case, other) in enumerate(zip(cases, found[kind], strict=True)):
            own = {name: case[name] for name in ("result", "refused") if name in case}
            lines[kind] += list(differences(own, other, f"{kind} {number}"))[:1]
    return lines


def agree(calc: Path, folder: Path) -> None:
    found = wrong(cases_of(folder), computed(calc, folder))
    assert not any(found.values()), [line for lines in found.values() for line in lines[:3]]


@needs_node
def test_javascript_computes_what_python_does(few):
    agree(CALC, few)


@pytest.mark.full
@needs_node
def test_javascript_computes_what_python_does_in_all_cases(golden, tmp_path):
    golden.write(tmp_path)
    assert tuple(cases_of(tmp_path)) == KINDS
    agree(CALC, tmp_path)


# One change of each model, in either language: only the comparison can see it.
IN_JAVASCRIPT = {
    "schedules.js": ("const warmup = Math.min(m, p - rank);", "const warmup = m;", "schedules"),
    "rings.js": ("parts[target] += arrived[0];", "parts[target] = arrived[0];", "rings"),
    "strategies.js": ("4 + 8] : [4, 4, 8]", "4 + 4] : [4, 4, 8]", "weigh"),
}


@needs_node
@pytest.mark.parametrize("file", IN_JAVASCRIPT)
def test_a_change_of_the_javascript_is_seen(few, tmp_path, file):
    shutil.copytree(CALC, tmp_path / "calc")
    before, after, kind = IN_JAVASCRIPT[file]
    text = (tmp_path / "calc" / file).read_text()
    assert before in text
    (tmp_path / "calc" / file).write_text(text.replace(before, after))
    shutil.copy(few / "presets.js", tmp_path)
    own = {kind: json.loads((few / "golden.json").read_text())[kind]}
    (tmp_path / "golden.json").write_text(json.dumps(own))
    assert wrong(cases_of(tmp_path), computed(tmp_path / "calc", tmp_path))[kind]


IN_PYTHON = {
    "schedules": (papers, "peak_formula", lambda *case: 1),
    "times": (costs, "theory", lambda name, ranks: (ranks, 2.0, 1 / ranks)),
}


@needs_node
@pytest.mark.parametrize("kind", IN_PYTHON)
def test_a_change_of_the_python_is_seen(golden, few, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(*IN_PYTHON[kind])
    golden.write(tmp_path, share=0.1, only=kind)
    assert wrong(cases_of(tmp_path), computed(CALC, tmp_path))[kind]


@pytest.mark.parametrize("half", ["reduce_scatter", "all_gather"])
def test_each_half_of_the_ring_takes_half_of_its_steps(golden, half):
    messages = golden.ring_of(half, "ring", 5)["messages"]
    last = max(leaves + 1 for leaves, *_ in messages)
    sent = sum(share for _, source, _, share in messages if source == 0)
    expected = golden.time_of(half, "ring", 5, 1, 1.0, 1.0)
    assert last == expected["steps"] == 4 and sent == pytest.approx(expected["sent"])


def test_bus_factors_are_those_of_the_counter(golden):
    for name in {collective for collective, _ in golden.kinds()}:
        factor = golden.bandwidth_test.COLLECTIVES[name].bus_factor
        assert factor(6) == pytest.approx(traffic.RING_FACTOR[name](6))


# The page in a browser: `at` of test_site.py opens a page of the site that it has built.

in_page = pytest.mark.xdist_group("site")  # one worker builds the site once
# The numbers of a result, row by row, not rounded: {first cell: numbers of its row}.
ROWS = """node => Object.fromEntries([...node.querySelectorAll("tbody tr")].map(row => [
    row.cells[0].textContent, [...row.querySelectorAll("[data-value]")].map(
        cell => Number(cell.dataset.value))]))"""
KEYED = """node => Object.fromEntries([...node.querySelectorAll("[data-key]")].map(
    each => [each.dataset.key, Number(each.dataset.value)]))"""


@pytest.fixture
def calculators(built, tab, at):
    """Open the page at a state of its inputs: {"plan.gpus": 8}; its faults fail the test.

    A page that is open already stays, so that Python starts once.
    """
    stays = tab.url.startswith((built / "calculators.html").as_uri())
    page = tab if stays else at("calculators")
    page.set_viewport_size(dict(zip(("width", "height"), WIDE, strict=True)))
    page.faults.clear()

    def opened(state: dict):
        entries = {name: str(value) for name, value in state.items() if value is not None}
        page.evaluate("""entries => { location.hash = ""; entries["strategy.gpus"] ??= "8";
            location.hash = new URLSearchParams(entries).toString() }""", entries)  # fmt: skip
        page.wait_for_function("""entries => Object.entries(entries).every(([name, value]) => {
            const [form, input] = name.split(".");
            return document.getElementById(form + "-form").elements[input].value === value })
            """, arg=entries)  # fmt: skip
        return page

    yield opened
    assert not page.faults, page.faults


def shown(page, result: str, script: str = ROWS):
    return page.eval_on_selector(f"#{result}-result", script)


# The planner: its Python runs in the page.

PLANNER = "planner/plan.py"
CONFIG = {"model_type": "llama", "vocab_size": 32_000, "hidden_size": 4096, "head_dim": 128,
          "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32,
          "num_key_value_heads": 8}  # fmt: skip
PLANS = {
    "search": {"model": "llama2-7b"},
    "nodes": {"model": "llama3-70b", "gpus": 64, "gpu": "a100", "seq_len": 8192, "tp": 8},
    "layout": {"verb": "predict", "model": "llama3-70b", "gpus": 64, "tp": 8, "pp": 2, "zero": 1,
               "recompute": "full", "sequence_parallel": "other"},
    "too large": {"verb": "predict", "model": "llama3-70b", "compiled": "other"},
    "order": {"verb": "predict", "model": "llama3-8b", "gpus": 16, "tp": 4, "cp": 2,
              "order": "dp-cp-tp-pp"},
    "experts": {"model": "mixtral-8x7b", "gpus": 32, "ep": 8, "gpu_memory_gib": 141},
    "cheaper": {"verb": "predict", "model": "llama3.2-1b", "gpus": 16, "cheaper": "other"},
    "adapters": {"model": "llama2-70b", "gpus": 4, "gpu": "rtx4090", "finetune": "qlora",
                 "seq_len": 1024, "tokens": "10B", "dollars_per_gpu_hour": 0.5},
    "pasted": {"model": "config.json", "config": json.dumps(CONFIG)},
    "of sizes": {"verb": "predict", "model": "sizes", "layers": 8, "hidden": 1024, "heads": 8,
                 "ffn": 4096, "vocab": 50_000},
}  # fmt: skip
REFUSED = {
    "gpus": {"gpus": 12},
    "model": {"model": "gpt-1t", "gpu": "l40s", "offload": "none"},  # fits in no layout of 8
    "order": {"order": "tp-tp-dp-pp"},
    "layout": {"verb": "predict", "tp": 3, "gpus": 3},
    "config": {"model": "config.json", "config": json.dumps(CONFIG | {"vocab_size": None})},
    "no config": {"model": "config.json", "config": "{"},
    "sizes": {"model": "sizes", "layers": 8},
    "number": {"tokens": "-1"},
}


def from_shell(argv: list[str], folder: Path, config: str | None) -> subprocess.CompletedProcess:
    (folder / "config.json").write_text(config or "")
    command = [sys.executable, REPO / PLANNER, *argv]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def planned(page):
    """Wait for the planner's answer; return the arguments that the page says it is of."""
    answered = "#layouts-result[aria-busy=false]"
    page.wait_for_selector(answered, state="attached", timeout=120_000)
    line = page.text_content("#plan-result .calc-command:last-child code")
    python, script, *argv = shlex.split(line)
    assert (python, script) == ("python", PLANNER)
    return argv


NOT_HELD = ("total", "limit")
CHANGED = ("dp_bytes", "dp_takes_s", "dp_exposed_s", "memory_bytes", "step_time_s")
SENT = ("layer_bytes", "step_bytes", "seconds", "beside", "exposed")


def apart(expected, found) -> list[str]:
    """Return what differs by more than how newer Pythons add: floats to the twelfth digit."""
    as_floats = [json.loads(json.dumps(each), parse_int=float) for each in (expected, found)]
    return list(differences(*as_floats, tolerance=1e-12))


@pytest.mark.parametrize("gpus", [8, 12])  # 12 are refused
def test_the_planner_needs_only_the_files_that_the_page_has(in_browser, tmp_path, gpus):
    """Without any installed package, as in the browser."""
    for name, text in in_browser.guide().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    argv = ["plan", "--json", "--gpus", str(gpus)]
    program = f"""import json, sys; sys.path.insert(0, "."); import command
print(json.dumps(command.run({PLANNER!r}, {argv})))"""
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", program], cwd=tmp_path,
                           capture_output=True, text=True, timeout=60)  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    shell = from_shell(argv, tmp_path, None)
    assert json.loads(ended.stdout) == [shell.returncode, shell.stdout, shell.stderr]


@pytest.mark.full
@in_page
@pytest.mark.parametrize("plan", PLANS)
def test_the_page_shows_what_the_command_line_prints(calculators, tmp_path, plan):
    state = PLANS[plan]
    page = calculators({f"plan.{name}": value for name, value in state.items()})
    argv = planned(page)
    ended = from_shell([*argv, "--json"], tmp_path, state.get("config"))
    assert ended.returncode == 0, ended.stderr
    expected = json.loads(ended.stdout)
    answer = page.evaluate(
        "([argv, config]) => tool.run(argv, config, () => {})",
        [[*argv, "--json"], state.get("config")],
    )
    assert apart(expected, json.loads(answer["out"])) == []

    one = expected.get("plans", [expected])[0]
    tables = "tables => tables.map(node => (" + ROWS + ")(node))"
    held, step, *axes = page.eval_on_selector_all("#plan-result table", tables)
    for rows, parts in ((held, one["memory_bytes"]), (step, one["step_s"])):
        named = {name: size for name, size in parts.items() if size > 0 and name not in NOT_HELD}
        whole = sum(named.values())
        wanted = {name: [size, size / whole] for name, size in named.items()}
        assert apart(wanted | {"sum": [whole, 1]}, rows) == []
    sent = {f"{name} {axis['ranks']}": [axis[key] for key in SENT]
            for name, axis in one.get("axes", {}).items()}  # fmt: skip
    assert apart([sent] if sent else [], axes) == []
    keyed = ("step_time_s", "model_tflops_per_gpu", "mfu")
    wanted = {name: one[name] for name in keyed} | {"total": one["memory_bytes"]["total"]}
    assert apart(wanted, shown(page, "plan", KEYED)) == []
    verdict = page.text_content("#plan-result .calc-verdict")
    assert verdict.startswith("fits: " if one["fits"] else "DOES NOT FIT: ")
    assert ("dollars" in verdict) == ("dollars" in one)
    if "plans" in expected:
        rows = {f"{number} {each['name']}": [each["memory_bytes"]["total"], each["step_time_s"],
                               each["tokens_per_s_per_gpu"], each["mfu"]]
                for number, each in enumerate(expected["plans"], 1)}  # fmt: skip
        assert apart(rows, shown(page, "layouts")) == []
        lines = page.locator("#layouts-result li, #layouts-result code").all_text_contents()
        assert {*expected["reasons"], *expected["launch"]["commands"]} <= set(lines)
    if "cheaper" in expected:
        rows = {each["change"]: [value for name, value in each.items() if name in CHANGED]
                for each in expected["cheaper"]}  # fmt: skip
        assert apart(rows, shown(page, "layouts")) == [] and len(rows) > 5


@pytest.mark.full
@in_page
@pytest.mark.parametrize("plan", REFUSED)
def test_the_page_refuses_in_the_tools_own_line(calculators, tmp_path, plan):
    state = REFUSED[plan]
    page = calculators({f"plan.{name}": value for name, value in state.items()})
    ended = from_shell([*planned(page), "--json"], tmp_path, state.get("config"))
    assert ended.returncode == 2 and ended.stderr.startswith("plan.py: error: ")
    assert page.text_content("#plan-result .calc-error") == ended.stderr.strip()
    assert page.text_content("#layouts-result") == ""


@pytest.mark.full
@in_page
def test_another_python_in_the_page_is_seen(built, in_browser, tab, tmp_path, monkeypatch):
    """A copy of the page with one byte fewer for each weight's state."""
    changed = in_browser.guide()
    before, after = "optimizer_bytes: int = 12", "optimizer_bytes: int = 11"
    assert before in changed["planner/job.py"]
    changed["planner/job.py"] = changed["planner/job.py"].replace(before, after)
    monkeypatch.setattr(in_browser, "guide", lambda: changed)
    shutil.copytree(built / "_static", tmp_path / "_static")
    shutil.copy(built / "calculators.html", tmp_path)
    in_browser.write(tmp_path / "_static/calc")
    tab.goto(f"{(tmp_path / 'calculators.html').as_uri()}#plan.verb=predict&plan.dp=8")
    argv = planned(tab)
    expected = json.loads(from_shell([*argv, "--json"], tmp_path, None).stdout)
    assert apart(expected["memory_bytes"]["total"], shown(tab, "plan", KEYED)["total"])


@pytest.mark.full
@in_page
def test_where_python_does_not_start_the_page_says_so(built, tab):
    tab.route("**/python.js", lambda route: route.abort())
    try:
        tab.goto(f"{(built / 'calculators.html').as_uri()}#ring.ranks=5")
        tab.wait_for_selector("#plan-result .calc-error:text('python.js is not there')")
        assert planned(tab)[0] == "plan" and tab.input_value("#ring-form [name=ranks]") == "5"
    finally:
        tab.unroute("**/python.js")
        tab.goto("about:blank")  # the next test's page starts Python


@pytest.mark.full
@in_page
def test_a_row_of_the_list_shows_its_layout_and_the_newest_question_is_answered(calculators):
    page = calculators({"plan.model": "mixtral-8x22b", "plan.gpus": 16})
    planned(page)
    page.fill("#plan-form [name=gpus]", "1024")
    page.wait_for_selector("#plan-status:text('Computing')")
    page.fill("#pipeline-form [data-for=stages]", "5")  # answered meanwhile
    assert page.locator("#pipeline-result li").count() > 5
    assert page.get_attribute("#plan-result", "aria-busy") == "true"
    page.fill("#plan-form [name=gpus]", "8")
    assert planned(page)[-1] == "8" and page.is_hidden("#plan-status")

    third = list(shown(page, "layouts").items())[2]
    page.click("#layouts-result button >> nth=2")
    assert planned(page)[0] == "predict" and "plan.verb=predict" in address_of(page)
    assert f"3 {page.text_content('#plan-result strong')}" == third[0]
    assert shown(page, "plan", KEYED)["step_time_s"] == third[1][1]


@pytest.mark.full
@in_page
def test_strategies_are_weighed_as_the_script_does(golden, calculators):
    page = calculators({"strategy.model": "llama3-8b", "strategy.precision": "32-true"})
    page.wait_for_selector("#strategy-result :text('32-true on 8 GPUs, 16 micro-batches')")
    weighed = next(case["result"] for case in golden.weigh_cases()
                   if (case["preset"], case["ranks"]) == ("llama3-8b", 8))  # fmt: skip
    sums = {way: row[4] for way, row in shown(page, "strategy").items()}
    assert {f"{way}_32-true_gib": value for way, value in sums.items()} == {
        name: value for name, value in weighed.items() if "32-true" in name
    }


@pytest.mark.full
@in_page
def test_the_page_draws_the_golden_schedules(golden, calculators):
    drawn = 0
    for case in golden.schedule_cases(golden.random.Random(golden.SEED), 40):
        name, p, m, v, backward = case["case"]
        sizes = {"stages": p, "micro_batches": m, "virtual_stages": v, "backward": f"{backward:g}"}
        page = calculators(
            {"pipeline.schedule": name} | {f"pipeline.{k}": x for k, x in sizes.items()}
        )
        if "refused" in case:
            assert page.text_content("#pipeline-result .calc-error") == case["refused"]
            continue
        one, row = case["result"], shown(page, "pipeline")[name]
        assert row == [one["duration"], one["bubble"], one["held"][0], one["held"][-1]]
        boxes = page.locator("#pipeline-result svg rect")
        assert boxes.count() == sum(map(len, one["spans"]))
        orders = page.locator("#pipeline-result details li").all_text_contents()
        assert [order.partition(": ")[2] for order in orders] == one["orders"]
        drawn += 1
    assert drawn > 20


@pytest.mark.full
@in_page
def test_the_page_steps_through_the_golden_rings(golden, calculators):
    for (collective, name), ranks in zip(golden.kinds(), (4, 6, 8, 5, 3), strict=True):
        kind, alpha_us, rate = f"{collective} by {name}", 10, 50
        link = {"ring.alpha_us": alpha_us, "ring.rate_gb_s": rate, "ring.size": "1M"}
        page = calculators({"ring.kind": kind, "ring.ranks": ranks} | link)
        time = golden.time_of(collective, name, ranks, 2**20, alpha_us / 1e6, rate * 1e9)
        expected = [time["steps"], time["sent"], time["seconds"], time["busbw_gb_s"]]
        assert shown(page, "ring")[kind] == expected

        film = golden.ring_of(collective, name, ranks)
        for step in range(max(leaves + 1 for leaves, *_ in film["messages"]) + 1):
            now = [[held for at, held in of_rank if at <= step][-1] for of_rank in film["seen"]]
            rows = page.eval_on_selector("#ring-held", ROWS)
            assert [rows[str(rank)] for rank in range(ranks)] == now, f"{kind}, step {step}"
            sent = [message for message in film["messages"] if message[0] == step - 1]
            assert page.locator("#ring-picture path[marker-end]").count() == len(sent)
            if page.is_enabled("#ring-step"):
                page.click("#ring-step")
        assert page.is_disabled("#ring-step")


def address_of(page):
    """Ask the page itself: what Playwright knows of its address comes by an event, later."""
    return page.evaluate("location.href")


@pytest.mark.full
@in_page
def test_inputs_are_in_the_address_and_a_config_can_be_pasted(built, calculators):
    page = calculators({"plan.verb": "predict"})
    planned(page)
    first = shown(page, "plan", KEYED)
    page.focus("#plan-form [name=gpus]")
    page.keyboard.press("ArrowUp")  # by keyboard alone
    assert "plan.gpus=9" in address_of(page)
    planned(page)
    assert page.is_visible("#plan-result .calc-error")
    page.fill("#plan-form [name=gpus]", "16")
    planned(page)
    wider = shown(page, "plan", KEYED)
    assert wider["step_time_s"] < first["step_time_s"]

    assert page.is_hidden("#plan-form [name=config]")
    page.select_option("#plan-form [name=model]", "config.json")
    page.fill("#plan-form [name=config]", json.dumps(CONFIG | {"num_key_value_heads": 32}))
    planned(page)
    assert shown(page, "plan", KEYED) == wider  # the preset's own shape
    address = address_of(page)
    page.reload()
    planned(page)
    assert address_of(page) == address and shown(page, "plan", KEYED) == wider
    page.click("#plan-form button[type=reset]")
    page.select_option("#plan-form [name=verb]", "predict")
    planned(page)
    assert shown(page, "plan", KEYED) == first


@pytest.mark.full
@in_page
def test_each_number_of_the_page_links_to_where_it_is_derived(calculators):
    page = calculators({"plan.model": "llama3-8b", "plan.gpus": 16})
    planned(page)
    links = page.eval_on_selector_all(
        ".calc-result a", "all => [...new Set(all.map(a => a.getAttribute('href')))]"
    )
    assert len(links) >= 8 and None not in links
    listed = page.eval_on_selector_all(
        "#where-the-numbers-come-from a.reference", "all => all.map(a => a.getAttribute('href'))"
    )
    assert set(links) <= set(listed)  # and those are links of a page, which test_site.py follows
    numbers = "tr:has([data-value]):not(.total)"
    bare = page.eval_on_selector_all(
        f".calc-result {numbers}",
        "rows => rows.filter(row => !row.closest('table').querySelector('a')).length",
    )
    assert bare == 0


@pytest.mark.full
@in_page
def test_the_page_says_how_large_python_is(built, calculators):
    size = (built / "_static/calc/python.js").stat().st_size
    assert f"(Pyodide, {size / 1e6:.0f} MB, once)" in calculators({}).text_content("article")


@pytest.mark.full
@in_page
def test_nothing_moves_for_whom_asks_for_less_motion(calculators):
    page = calculators({"ring.ranks": 4})
    assert page.is_visible("#ring-play")
    page.emulate_media(reduced_motion="reduce")
    try:
        page.reload()
        assert page.is_visible("#ring-step") and not page.is_visible("#ring-play")
    finally:
        page.emulate_media(reduced_motion="no-preference")


@pytest.mark.full
@in_page
def test_collectives_are_drawn_as_the_lesson_defines_them(calculators):
    """Each number of each buffer, for a number of ranks that no picture of the pages has."""
    page = calculators({"collectives.ranks": 5})
    for name in collective_ops.DRAWN:
        before = [torch.arange(1, 6) + 10 * rank for rank in range(5)]
        after = collective_ops.DEFINITIONS[name][1](before)
        expected = [own.tolist() for own in (*before, *after) if own is not None]
        drawn = page.eval_on_selector(
            f"#collectives-result [aria-label='{name}'] svg",
            "svg => [...svg.querySelectorAll('text[class]')].map(each => Number(each.textContent))",
        )
        assert drawn == sum(expected, []), name


@pytest.mark.full
@in_page
def test_a_picture_leads_to_where_it_moves(at):
    page = at("05-advanced/pipeline_schedules")
    page.click("text=Move this picture")
    rows = "document.querySelectorAll('#pipeline-result svg text:not([class])').length"
    page.wait_for_selector("#layouts-result table", timeout=120_000)  # above it, filled in later
    assert page.input_value("#pipeline-form [name=stages]") == "4" and page.evaluate(rows) == 4
    page.wait_for_function(
        "document.getElementById('pipeline-form').getBoundingClientRect().top ** 2 < 9"
    )
    page.fill("#pipeline-form [data-for=stages]", "7")
    assert page.evaluate(rows) == 7 and "pipeline.stages=7" in address_of(page)
    assert not page.faults


@pytest.mark.full
@in_page
@pytest.mark.parametrize(("size", "theme"), [(WIDE, "dark"), (PHONE, "light")])
def test_the_page_fits_its_window_and_has_no_serious_fault(at, size, theme):
    page = at("calculators", size, theme)
    page.wait_for_selector("#strategy-result table")
    planned(page)
    page.click("#plan-form summary")
    page.click("#ring-step")
    # Tables scroll by themselves; Furo would clip what is wider than its column.
    wide = page.eval_on_selector_all(
        ".calc, .calc-result",
        "all => all.filter(n => n.scrollWidth > n.clientWidth).map(n => n.id)",
    )
    assert not wide
    assert not page.faults  # before axe reads the style sheets, which file:// does not allow
    page.add_script_tag(path=REPO / "site/node_modules/axe-core/axe.min.js")
    found = page.evaluate("axe.run(document.querySelector('article'))")["violations"]
    assert [fault["id"] for fault in found if fault["impact"] in ("serious", "critical")] == []
