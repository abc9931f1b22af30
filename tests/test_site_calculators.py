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
from conftest import REPO

from advanced_parts import layout_memory
from advanced_parts import pipeline_schedules as papers
from dist_common.lab import traffic
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
