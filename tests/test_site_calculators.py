"""The site's calculators are the guide's own formulas: JavaScript and Python agree to the last bit.

site/golden.py draws the cases and has Python's results; site_calculators.js computes them again.
"""

import importlib.util
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPO
from site_browser import PHONE, WIDE

from advanced_parts import layout_memory
from advanced_parts import pipeline_schedules as papers
from dist_common.lab import traffic
from nccl_parts import collective_ops
from nccl_parts import point_to_point as costs

CALC = REPO / "site/static/calc"
NODE = shutil.which(REPO / ".venv-site/bin/node") or shutil.which("node")
KINDS = ("layouts", "ranked", "changes", "schedules", "rings", "times", "strategies", "weigh",
         "configs")  # fmt: skip
# Since 3.12 Python's sum() carries along what rounding loses. JavaScript adds as 3.11 did.
TOLERANCE = 0 if sys.version_info < (3, 12) else 1e-13

TENTH = {"layouts": 200, "others": 0.1}

needs_node = pytest.mark.skipif(not NODE, reason="no node: neither .venv-site has one nor PATH")


@pytest.fixture(scope="module")
def golden():
    """site/golden.py, as a module."""
    spec = importlib.util.spec_from_file_location("site_golden", REPO / "site/golden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def few(golden, tmp_path_factory) -> Path:
    """A folder with a tenth of the cases."""
    folder = tmp_path_factory.mktemp("golden")
    golden.write(folder, **TENTH)
    return folder


def cases_of(folder: Path) -> dict:
    # JavaScript has one kind of number, and prints some floats without a point.
    return json.loads((folder / "golden.json").read_text(), parse_int=float)


def computed(calc: Path, folder: Path) -> dict:
    command = [NODE, REPO / "tests/site_calculators.js", calc, folder]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout, parse_int=float)


def differences(python, javascript, where=""):
    """Yield where two results differ: in what, and by what."""
    if isinstance(python, dict) and isinstance(javascript, dict):
        for name, value in python.items():
            yield from differences(value, javascript.get(name, "missing"), f"{where} {name}")
    elif isinstance(python, list) and isinstance(javascript, list):
        if len(python) != len(javascript):
            yield f"{where}: {len(python)} and {len(javascript)} of them"
        for number, pair in enumerate(zip(python, javascript, strict=False)):
            yield from differences(*pair, f"{where} {number}")
    elif isinstance(python, float) and isinstance(javascript, float):
        if not math.isclose(python, javascript, rel_tol=TOLERANCE, abs_tol=0):
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
def test_javascript_computes_what_python_does_on_2000_layouts(golden, tmp_path):
    golden.write(tmp_path)
    cases = cases_of(tmp_path)
    assert tuple(cases) == KINDS and len(cases["layouts"]) == 2000
    works = [case["result"] for case in cases["layouts"] if "result" in case]
    models = {case["flags"]["model"] for case in cases["layouts"] if "result" in case}
    assert len(works) > 700 and 100 < sum(one["fits"] for one in works) < len(works) - 100
    assert models == set(layout_memory.MODELS)
    refused = {case["refused"].split()[0] for case in cases["layouts"] if "refused" in case}
    flags = {"--tp", "--pp", "--seq-len", "--global-batch-size", "--gpus", "--schedule", "tp"}
    assert flags <= refused  # each reason of refusal() and read_job()
    agree(CALC, tmp_path)


# One change of each model, in either language: only the comparison can see it.
IN_JAVASCRIPT = {
    "layout.js": ("OPTIMIZER = 12", "OPTIMIZER = 8", "layouts"),
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
    "layouts": (layout_memory, "LOGITS", 12),
    "ranked": (layout_memory, "OPTIMIZER", 16),
    "schedules": (papers, "peak_formula", lambda *case: 1),
    "times": (costs, "theory", lambda name, ranks: (ranks, 2.0, 1 / ranks)),
}


@needs_node
@pytest.mark.parametrize("kind", IN_PYTHON)
def test_a_change_of_the_python_is_seen(golden, few, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(*IN_PYTHON[kind])
    golden.write(tmp_path, **TENTH, only=kind)
    assert wrong(cases_of(tmp_path), computed(CALC, tmp_path))[kind]


REFUSED = {
    "{": "config.json: ",
    "null": "config.json: no object",
    "{}": "config.json: vocab_size is missing",
    '{"num_local_experts": 8}': "8 experts: these formulas know dense models only",
}
SHAPE = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip


@needs_node
def test_a_config_of_another_shape_is_refused_by_name(few, tmp_path):
    texts = {
        **REFUSED,
        json.dumps(SHAPE | {"hidden_size": 6.5}): "hidden_size is 6.5",
        json.dumps(SHAPE | {"head_dim": 32}): "heads are 32 wide",
        json.dumps(SHAPE | {"num_attention_heads": 5}): "heads are 12.8 wide",
    }
    cases = [{"text": text} for text in (*texts, json.dumps(SHAPE))]
    shutil.copy(few / "presets.js", tmp_path)
    (tmp_path / "golden.json").write_text(json.dumps({"configs": cases}))
    *found, right = computed(CALC, tmp_path)["configs"]
    for said, expected in zip(found, texts.values(), strict=True):
        assert expected in said["refused"]
    assert right["result"]["num_kv_heads"] == 4 and right["result"]["tied_embeddings"] is False


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

in_browser = pytest.mark.xdist_group("site")  # one worker builds the site once
# The numbers of a result, row by row, not rounded: {first cell: numbers of its row}.
ROWS = """node => Object.fromEntries([...node.querySelectorAll("tbody tr")].map(row => [
    row.cells[0].textContent, [...row.querySelectorAll("[data-value]")].map(
        cell => Number(cell.dataset.value))]))"""
KEYED = """node => Object.fromEntries([...node.querySelectorAll("[data-key]")].map(
    each => [each.dataset.key, Number(each.dataset.value)]))"""


@pytest.fixture
def calculators(at):
    """Open the page at a state of its inputs: {"plan.gpus": 8}; its faults fail the test."""
    page = at("calculators")

    def opened(state: dict):
        entries = {name: str(value) for name, value in state.items() if value is not None}
        page.evaluate("""entries => { location.hash = ""; location.hash =
            new URLSearchParams(entries).toString() }""", entries)  # fmt: skip
        page.wait_for_function("""entries => Object.entries(entries).every(([name, value]) => {
            const [form, input] = name.split(".");
            return document.getElementById(form + "-form").elements[input].value === value })
            """, arg=entries)  # fmt: skip
        return page

    yield opened
    assert not page.faults, page.faults


def shown(page, result: str, script: str = ROWS):
    return page.eval_on_selector(f"#{result}-result", script)


def state_of(golden, flags: dict) -> dict:
    """Return the inputs of the page for flags of combining.py."""
    names = {size: name for name, size in golden.presets()["reduce_bytes"].items()}
    own = {f"plan.{name}": flags[name] for name in golden.FLAGS}
    return own | {"plan.reduce_bytes": names[flags["reduce_bytes"]]}


@pytest.mark.full
@in_browser
def test_the_page_shows_the_golden_layouts(golden, calculators):
    compared = refused = 0
    for case in golden.layout_cases(golden.random.Random(golden.SEED), 60):
        page = calculators(state_of(golden, case["flags"]))
        if "refused" in case:
            assert page.text_content("#plan-result .calc-error") == case["refused"]
            refused += 1
            continue
        one, rows, named = case["result"], shown(page, "plan"), shown(page, "plan", KEYED)
        expected = {part: [size] for part, size in one["memory"].items() if size}
        expected |= {part: [s, s / one["step_s"]] for part, s in one["seconds"].items() if s}
        for axis, sent in one["traffic"].items():
            if sent["size"] > 1:
                names = ("layer_bytes", "step_bytes", "seconds", "behind_s", "exposed_s")
                expected[f"{axis} {sent['size']}"] = [sent[name] for name in names]
        expected["sum"] = [one["memory_gib"]]
        assert list(differences(expected, {row: rows[row] for row in expected})) == []
        assert named["weights"] == one["weights"] and named["step_s"] == one["step_s"]
        assert named["template_gib"] == sum(one["template"].values()) / golden.GIB
        verdict = page.text_content("#plan-result .calc-verdict")
        assert verdict.startswith("fits: " if one["fits"] else "DOES NOT FIT: ")
        limit = one["memory_limit"] / golden.GIB
        assert f": {one['memory_gib']:,.1f} of {limit:,.1f} GiB (" in verdict
        assert f"; {one['step_s']:,.2f} s a step, {one['tflops']:,.0f} TFLOP/s" in verdict
        compared += 1
    assert compared > 20 and refused > 10


@pytest.mark.full
@in_browser
def test_the_page_orders_layouts_and_strategies_as_the_scripts_do(golden, calculators):
    flags = {"model": "llama3-70b", "gpus": 64, "seq_len": 8192, "global_batch_size": 512}
    job, cluster = golden.read_job(golden.DEFAULTS | flags)
    best = {}
    for one in golden.combining.ranked(job, cluster, 64):
        best.setdefault(str(one.layout), [one.memory_gib, one.step_s])
    page = calculators({f"plan.{name}": value for name, value in flags.items()})
    page.wait_for_selector("#layouts-result button:has-text('cp 4 x dp 16')")
    listed = page.eval_on_selector("#layouts-result .calc-scroll", ROWS)
    assert [(name, row[:2]) for name, row in listed.items()] == list(best.items())[:5]

    page.click("#layouts-result button >> nth=2")
    assert list(best)[2] in page.text_content("#plan-result strong")
    assert shown(page, "plan", KEYED)["step_s"] == list(best.values())[2][1]

    flags = {"plan.model": "llama3-8b", "plan.gpus": 8, "strategy.precision": "32-true"}
    page = calculators(flags)
    page.wait_for_selector("#strategy-result :text('32-true on 8 GPUs, 16 micro-batches')")
    weighed = next(case["result"] for case in golden.weigh_cases()
                   if (case["preset"], case["ranks"]) == ("llama3-8b", 8))  # fmt: skip
    sums = {way: row[4] for way, row in shown(page, "strategy").items()}
    assert {f"{way}_32-true_gib": value for way, value in sums.items()} == {
        name: value for name, value in weighed.items() if "32-true" in name
    }


@pytest.mark.full
@in_browser
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
@in_browser
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
@in_browser
def test_inputs_are_in_the_address_and_a_config_can_be_pasted(golden, calculators):
    page = calculators({})
    first = shown(page, "plan", KEYED)
    page.focus("#plan-form [name=gpus]")
    page.keyboard.press("ArrowUp")  # by keyboard alone
    assert "plan.gpus=9" in address_of(page) and page.is_visible("#plan-result .calc-error")
    page.fill("#plan-form [name=gpus]", "16")
    assert address_of(page).endswith("#plan.gpus=16")
    wider = shown(page, "plan", KEYED)
    assert wider["step_s"] < first["step_s"]

    assert page.is_hidden("#plan-form [name=config]")
    page.select_option("#plan-form [name=model]", "config.json")
    text = next(
        case["text"] for case in golden.config_cases() if '"hidden_size": 4096' in case["text"]
    )
    page.fill("#plan-form [name=config]", text)
    assert shown(page, "plan", KEYED) == wider  # the preset's own shape
    address = address_of(page)
    page.reload()
    assert address_of(page) == address and shown(page, "plan", KEYED) == wider
    page.click("#plan-form button[type=reset]")
    assert shown(page, "plan", KEYED) == first and "#" not in address_of(page)

    page.fill("#plan-form [name=latency_us]", "-1")
    assert "above 0" in page.text_content("#plan-result .calc-error")


@pytest.mark.full
@in_browser
def test_each_number_of_the_page_links_to_where_it_is_derived(calculators):
    page = calculators({"plan.model": "1b", "plan.gpus": 16, "plan.dp": 16, "plan.fsdp": "none"})
    page.wait_for_selector("#layouts-result :text('PowerSGD, rank 4')")
    links = page.eval_on_selector_all(
        ".calc-result a", "all => [...new Set(all.map(a => a.getAttribute('href')))]"
    )
    assert len(links) >= 9 and None not in links
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
@in_browser
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
@in_browser
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
@in_browser
def test_a_picture_leads_to_where_it_moves(at):
    page = at("05-advanced/pipeline_schedules")
    page.click("text=Move this picture")
    rows = "document.querySelectorAll('#pipeline-result svg text:not([class])').length"
    page.wait_for_selector("#layouts-result table")  # above it, and filled in later
    assert page.input_value("#pipeline-form [name=stages]") == "4" and page.evaluate(rows) == 4
    page.wait_for_function(
        "document.getElementById('pipeline-form').getBoundingClientRect().top ** 2 < 9"
    )
    page.fill("#pipeline-form [data-for=stages]", "7")
    assert page.evaluate(rows) == 7 and "pipeline.stages=7" in address_of(page)
    assert not page.faults


@pytest.mark.full
@in_browser
@pytest.mark.parametrize(("size", "theme"), [(WIDE, "dark"), (PHONE, "light")])
def test_the_page_fits_its_window_and_has_no_serious_fault(at, size, theme):
    page = at("calculators", size, theme)
    page.wait_for_selector("#strategy-result table")
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
