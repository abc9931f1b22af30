"""The guide as a site: its links, and ten of its pages in a real browser.

`make site` installs what this needs; the browser is a package too. One worker builds it once.
"""

import html
import importlib.util
import json
import re
import subprocess
import sys
from urllib.parse import quote, unquote

import page_reader
import pages
import pytest
from conftest import REPO
from site_browser import PHONE, WIDE

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("site")]
DIGITS = "0123456789"
# What stands in each place of the page, and the lines that a click there lights up.
LIT_BY = """places => [...document.querySelectorAll(places)].map(place => {
    place.click();
    const lit = [...document.querySelectorAll(".line.lit")].map(line => line.textContent);
    return [(place.querySelector("pre") ?? place).textContent, lit]; })"""
DRAWN = "!document.querySelector('pre.mermaid:not(:has(svg))')"  # all diagrams
TEXTS = "all => all.map(each => each.textContent)"
TEN = [
    "README.md", "labs/README.md", "01-ddp-basics/README.md", "01-ddp-basics/ddp_minimal.md",
    "01-ddp-basics/ddp_from_scratch.md", "02-fsdp/fsdp_basics.md", "03-deepspeed/zero_stages.md",
    "04-nccl-operations/collective_ops.md", "05-advanced/README.md",
    "05-advanced/pipeline_schedules.md",
]  # fmt: skip


def name_of(page: str) -> str:
    return page.removesuffix(".md")


def test_every_link_leads_somewhere(built):
    texts = {path: path.read_text() for path in built.rglob("*.html")}
    assert len(texts) > len(page_reader.PAGES)
    anchor_of = re.compile(r'<[a-z][^<>]*\bid="([^"<>]+)"')
    link_of = re.compile(r'<[a-z][^<>]*\b(?:href|src)="([^"<>]+)"')
    ids = {path: set(anchor_of.findall(text)) for path, text in texts.items()}
    faults = []
    for path, text in texts.items():
        for link in set(map(html.unescape, link_of.findall(text))):
            if re.match(r"(https?|mailto|data):", link):
                continue
            file, _, anchor = unquote(link.partition("?")[0]).partition("#")
            target = (path.parent / file).resolve() if file else path
            if not target.is_file():
                faults.append(f"{path.relative_to(built)}: {link} is not there")
            elif anchor and "=" not in anchor and anchor not in ids.get(target, {anchor}):
                faults.append(f"{path.relative_to(built)}: no anchor {link}")
    assert not faults, "\n".join(faults[:20])


def test_every_link_of_a_page_is_a_link_on_the_site(built):
    """Terms and names that become links may not undo those that a page has."""
    for page in page_reader.PAGES:
        text = (built / f"{name_of(page)}.html").read_text()
        prose = re.sub(r"<!--.*?-->|`[^`]*`", "", page_reader.read(page).prose, flags=re.S)
        for target in set(re.findall(r"\]\(([\w./-]+\.md)[)#]", prose)):
            target = target.replace("site/pages/", "")  # which stand at the site's top
            assert re.search(rf'href="{re.escape(target[:-3])}\.html[#"]', text), (
                f"{page}: {target}"
            )


def test_every_page_loads_whole_and_draws_its_diagrams(built, at):
    """No error, no request that leaves the folder, no page wider than its window, on both sizes."""
    diagrams = 0
    for page in TEN:
        opened = at(name_of(page))
        opened.wait_for_function(DRAWN)
        texts = opened.eval_on_selector_all("pre.mermaid svg", TEXTS)
        blocks = [b for b in page_reader.read(page).blocks if b.language == "mermaid"]
        assert len(texts) == len(blocks) and all(map(str.strip, texts)), page
        diagrams += len(texts)
        for size in (WIDE, PHONE):
            opened.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
            wide = opened.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{page}: {wide} px wider than {size[0]}"
        assert not opened.faults, f"{page}: {opened.faults}"
    assert diagrams > 5


@pytest.mark.parametrize(("words", "finds"), [
    ("bucket", "01-ddp-basics/ddp_from_scratch.html"),
    ("gradient_or_zeros", "01-ddp-basics/ddp_from_scratch.py.html"),  # code
])  # fmt: skip
def test_search_finds_prose_and_code_without_a_server(built, tab, words, finds):
    tab.faults.clear()
    tab.goto(f"{(built / 'search.html').as_uri()}?q={words}")
    tab.wait_for_selector("#search-results li")
    tab.wait_for_function(
        "document.querySelector('.search-summary')?.textContent.includes('found')"
    )
    links = tab.eval_on_selector_all("#search-results li a", "all => all.map(each => each.href)")
    assert any(finds in link for link in links), links
    assert not tab.faults


def test_each_name_and_snippet_of_a_lesson_lights_its_lines(at):
    """The lines that light up are those of the file, and hold what the page names."""
    names = snippets = 0
    for page in TEN:
        opened = at(name_of(page))
        if not opened.query_selector(".beside"):
            continue
        for name, lit in opened.evaluate(LIT_BY, "a.named-code"):
            word = re.compile(rf"\b{name.partition('(')[0]}\b")
            assert any(word.search(line.lstrip(DIGITS)) for line in lit[:4]), f"{page}: {name}"
            names += 1
        for shown, lit in opened.evaluate(LIT_BY, ".shown-code"):
            code = page_reader.unindented("\n".join(line.lstrip(DIGITS) for line in lit))
            assert code.strip() == page_reader.unindented(shown).strip(), f"{page}: {shown[:60]}"
            snippets += 1
        assert not opened.faults, f"{page}: {opened.faults}"
    assert names > 30 and snippets > 5


def test_a_lesson_by_keyboard(at):
    """Tab and Enter light a function."""
    opened = at("01-ddp-basics/ddp_from_scratch")
    for _ in range(120):
        opened.keyboard.press("Tab")
        if opened.evaluate("document.activeElement.matches('a.named-code')"):
            break
    name = opened.evaluate("document.activeElement.textContent")
    opened.keyboard.press("Enter")
    lit = "name => document.querySelector('.line.lit')?.textContent.includes(name)"
    opened.wait_for_function(lit, arg=name)  # a slow machine scrolls later


def test_the_front_pages_picture_is_a_lesson_as_it_opens(at):
    """Fonts are the machine's. To draw it again, copy runs/lesson.png over the picture."""
    opened = at("01-ddp-basics/ddp_from_scratch")
    opened.wait_for_function(DRAWN)
    link = opened.query_selector("a.named-code:has-text('buckets_of')")
    link.evaluate("e => scrollTo(0, e.getBoundingClientRect().top + scrollY - 345)")
    opened.wait_for_function("link => link.matches('.current')", arg=link)
    opened.wait_for_timeout(700)  # the script glides to its place
    drawn = REPO / "runs" / "lesson.png"
    opened.screenshot(path=drawn)
    fault = pages.fault_of_figure(REPO / "site/images/lesson.png", drawn, times_differ=True)
    assert not fault, fault


def test_a_term_leads_to_its_definition(at):
    opened = at("02-fsdp/fsdp_basics")
    link = opened.query_selector("a.term")
    told = link.get_attribute("title")
    link.click()
    shown = opened.text_content(":target dd")
    assert re.findall(r"\w+", told) == re.findall(r"\w+", shown)[: len(re.findall(r"\w+", told))]


def test_symptoms_of_all_pages_are_one_list(at):
    """Each row of each page's table is there; a word leaves those that have it."""
    opened = at("symptoms")
    rows = "document.querySelectorAll('article tbody tr:not([hidden])').length"
    tables = re.compile(r"^\| (?:symptom|what you see) \|.*\n\|.*\n((?:\|.*\n)+)", re.M)
    texts = [(REPO / page).read_text() for page in page_reader.PAGES]
    expected = sum(table.count("\n") for text in texts for table in tables.findall(text))
    assert opened.evaluate(rows) == expected > 150
    opened.fill("#symptom", "shm")
    kept = opened.eval_on_selector_all("article tbody tr:not([hidden])", TEXTS)
    assert 0 < len(kept) < 20 and all("shm" in text.lower() for text in kept)
    assert not opened.faults


@pytest.mark.parametrize(("page", "size", "theme"), [
    ("README", PHONE, "light"), ("01-ddp-basics/ddp_from_scratch", WIDE, "dark"),
    ("01-ddp-basics/ddp_minimal.py", PHONE, "dark"), ("plan_in_browser", WIDE, "light"),
])  # fmt: skip
def test_no_serious_fault_of_accessibility(at, page, size, theme):
    opened = at(page, size, theme)
    opened.add_script_tag(path=REPO / "site/node_modules/axe-core/axe.min.js")
    found = opened.evaluate("axe.run().then(found => found.violations)")
    serious = [
        f"{each['id']}: {json.dumps(each['nodes'][0]['html'])[:160]} ({len(each['nodes'])} times)"
        for each in found if each["impact"] in ("serious", "critical")
    ]  # fmt: skip
    assert not serious, "\n".join(serious)


# the planner, whose Python runs in the page

PLANNER = "planner/plan.py"


def module_in_browser():
    spec = importlib.util.spec_from_file_location("in_browser", REPO / "site/in_browser.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def from_shell(argv, folder) -> subprocess.CompletedProcess:
    command = [sys.executable, REPO / PLANNER, *argv]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("gpus", [8, 12])  # 12 are refused
def test_the_planner_needs_only_the_files_that_the_page_has(tmp_path, gpus):
    """Without any installed package, as in the browser."""
    module = module_in_browser()
    for name, text in module.guide().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    argv = ["plan", "--json", "--gpus", str(gpus)]
    program = f"""import json, sys; sys.path.insert(0, "."); import command
print(json.dumps(command.run({PLANNER!r}, {argv})))"""
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", program], cwd=tmp_path,
                           capture_output=True, text=True, timeout=60)  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    shell = from_shell(argv, tmp_path)
    assert json.loads(ended.stdout) == [shell.returncode, shell.stdout, shell.stderr]


def test_the_page_prints_what_the_command_line_does(built, tab, tmp_path):
    """A plan, and one that is refused, both by the address."""
    tab.faults.clear()
    address = (built / "plan_in_browser.html").as_uri()
    for command in ("plan --model llama3-8b --gpus 16", "predict --gpus 12"):
        ended = from_shell(command.split(), tmp_path)
        tab.goto(f"{address}#command={quote(command)}")
        says = f"#plan-status:text('{command}: exit code {ended.returncode}')"
        tab.wait_for_selector(says, timeout=120_000)
        assert tab.text_content("#plan-result") == (ended.stdout or ended.stderr)
    assert not tab.faults
