"""The guide as a site: its links, its search, and ten of its pages in a real browser.

`make site` installs what this needs, with the browser. One worker builds the site.
"""

import html
import json
import re
import subprocess
import sys
from urllib.parse import unquote

import page_reader
import pages
import pytest
from conftest import REPO
from site_browser import PHONE, WIDE

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("site")]
TEN = [
    "index",
    "README",
    "SYMPTOMS",
    "glossary",
    "labs/README",
    "01-ddp-basics/ddp_minimal",
    "01-ddp-basics/ddp_from_scratch",
    "02-fsdp/fsdp_basics",
    "04-nccl-operations/collective_ops",
    "05-advanced/pipeline_schedules",
]
LESSON = "01-ddp-basics/ddp_from_scratch"
SCHEDULES = "05-advanced/pipeline_schedules"
LIT = "[...document.querySelectorAll('.lit')].map(line => line.textContent)"
# Scroll so that a heading stands near the top, as a reader does.
ARRIVE = "id => document.getElementById(id).scrollIntoView({behavior: 'instant'})"


def test_every_link_leads_somewhere(built):
    texts = {path: path.read_text() for path in built.rglob("*.html")}
    assert len(texts) > len(page_reader.PAGES)
    ids = {
        path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in texts.items()
    }
    faults = []
    for path, text in texts.items():
        for address in set(re.findall(r'<[a-z][^<>]*\b(?:href|src)="([^"<>]+)"', text)):
            link = html.unescape(address)
            if re.match(r"(https?|mailto|data):", link):
                continue
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file).resolve() if file else path
            if not target.is_file():
                faults.append(f"{path.relative_to(built)}: {link} is not there")
            elif (
                anchor and "=" not in anchor and anchor not in ids.get(target, {anchor})
            ):
                faults.append(f"{path.relative_to(built)}: no anchor {link}")
    assert not faults, "\n".join(faults[:20])


def test_pages_have_titles_drawn_diagrams_formulas_and_no_comments_of_labs(built):
    diagrams = 0
    for page in page_reader.PAGES:
        text = (built / page).with_suffix(".html").read_text()
        blocks = page_reader.read(page).blocks
        drawn = sum(block.language == "mermaid" for block in blocks)
        assert text.count('<figure class="diagram"><svg') == drawn, page
        assert not re.search(r">[\w./-]+\.md</a>", text), page
        source = (REPO / page).read_text()
        assert text.count('display="block"') == source.count("$$") // 2, page
        diagrams += drawn
    assert diagrams > 30
    grader = built / "labs" / "lab_parts"  # which reads such comments
    for path in set(built.rglob("*.html")) - set(grader.rglob("*.html")):
        assert "# lab:" not in re.sub("<[^>]+>", "", path.read_text()), path


def test_ten_pages_fit_two_windows_and_are_accessible(at):
    """No error, no request, no scrolling sideways; a menu or a sidebar; axe agrees."""
    for number, page in enumerate([*TEN, "plan_in_browser"]):
        for size, theme in ((WIDE, "light"), (PHONE, "dark")):
            opened = at(page, size, theme)
            wide = opened.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{page}: {wide} px wider than {size[0]}"
            visible = opened.is_visible("#pages"), opened.is_visible("#menu")
            assert visible == ((True, False) if size == WIDE else (False, True)), page
            assert opened.query_selector(".turn a"), f"{page}: no previous, no next"
            assert not opened.faults, f"{page}: {opened.faults}"
            if (size == WIDE) == (number % 2 == 0):
                assert_accessible(opened, page)


def assert_accessible(opened, page: str) -> None:
    opened.add_script_tag(path=REPO / "site/node_modules/axe-core/axe.min.js")
    violations = opened.evaluate("axe.run().then(results => results.violations)")
    serious = [
        f"{page}: {each['id']}: {json.dumps(each['nodes'][0]['html'])[:200]}"
        for each in violations
        if each["impact"] in ("serious", "critical")
    ]
    assert not serious, "\n".join(serious)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("OOM", "SYMPTOMS.html#out-of-memory"),
        ("NCCL timeout", "04-nccl-operations/nccl_debugging.html"),
        ("deadlock", "04-nccl-operations/nccl_debugging.html"),
        ("ZeRO-3", "03-deepspeed/zero_stages.html"),
        ("set_epoch", "01-ddp-basics/ddp_minimal.html"),
        ("gradient accumulation", "05-advanced/gradient_accumulation.html"),
    ],
)
def test_search_finds_the_page_among_the_first_three(at, asked, expected):
    opened = at(LESSON)
    opened.keyboard.press("/")
    opened.keyboard.type(asked)
    opened.wait_for_selector("#found a")
    hits = opened.eval_on_selector_all(
        "#found a", "all => all.map(a => [a.getAttribute('href'), a.innerText])"
    )
    links = [link.removeprefix("../") for link, _ in hits]
    assert any(link.startswith(expected) for link in links[:3]), links
    assert opened.query_selector("#found a p mark"), "an excerpt with the words"
    scripts = [".py.html" in link for link in links]
    assert scripts == sorted(scripts), "scripts come after pages"
    assert not [link for link in links if link.startswith("tests/")]
    opened.keyboard.press("Enter")
    opened.wait_for_url(f"**/{links[0]}")


@pytest.mark.parametrize(
    ("page", "heading", "expected"),
    [
        (LESSON, "step-1-all-reduce-each-gradient", "def average_each"),
        (LESSON, "references", None),
        (SCHEDULES, "run-it", None),
        (SCHEDULES, "the-costs", None),
        (SCHEDULES, "the-script-function-by-function", "def one_f_one_b"),
    ],
)
def test_a_section_lights_the_function_that_it_explains_or_none(
    at, page, heading, expected
):
    opened = at(page, (1440, 900))
    opened.evaluate(ARRIVE, heading)
    opened.wait_for_timeout(300)
    lit = opened.evaluate(LIT)
    assert (lit == []) if expected is None else any(expected in line for line in lit)


def test_snippets_and_names_light_their_lines_by_keyboard_too(at):
    opened = at(LESSON)
    for place in opened.query_selector_all("article .block[data-code]"):
        place.evaluate("place => place.click()")
        shown = page_reader.unindented(place.query_selector("code").inner_text())
        lit = [re.sub(r"^\d+", "", line) for line in opened.evaluate(LIT)]
        assert page_reader.unindented("".join(lit)).strip() == shown.strip()
    name = opened.query_selector("a.name")
    name.focus()
    opened.keyboard.press("Enter")
    assert any(name.inner_text().split("(")[0] in line for line in opened.evaluate(LIT))


def test_the_back_key_returns_from_the_code_to_the_page(at):
    opened = at(LESSON, PHONE)
    opened.query_selector("a.name").evaluate("link => link.click()")
    assert opened.is_visible("aside") and opened.evaluate(LIT)
    opened.go_back()
    assert not opened.is_visible("aside") and LESSON in opened.url


def test_code_of_100_columns_fits_at_1440_pixels_and_wraps_below(at):
    """The second line is empty; the first one gives the height of one line."""
    script = """() => {
        const [, line] = document.querySelectorAll("aside .line");
        const one = line.clientHeight;
        line.querySelector(".nr").after("x".repeat(100));
        return line.clientHeight / one; }"""
    assert at(LESSON, (1440, 900)).evaluate(script) == 1
    assert at(LESSON, WIDE).evaluate(script) > 1


def test_the_picture_of_the_readme_is_a_lesson_as_it_opens(at):
    """To draw it again, copy runs/lesson.png over the picture."""
    opened = at(LESSON)
    opened.evaluate(ARRIVE, "step-1-all-reduce-each-gradient")
    opened.wait_for_timeout(700)  # the script glides to its place
    drawn = REPO / "runs" / "lesson.png"
    opened.screenshot(path=drawn)
    picture = REPO / "site/images/lesson.png"
    assert not pages.fault_of_figure(picture, drawn, times_differ=True)


# The calculator, whose Python runs in the page


def test_the_planner_needs_only_the_files_that_the_page_has(built, tmp_path):
    """Without any installed package, as in the browser."""
    import calculator

    for name, text in calculator.guide().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    program = "import command; print(command.run('planner/plan.py', ['plan'])[0])"
    ended = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stdout.strip() == "0", ended.stderr


def test_every_choice_of_the_calculator_is_one_of_the_planner(at):
    form = at("plan_in_browser").inner_html("#plan")
    flags = set(re.findall(r'name="(--[\w-]+)"', form))
    shell = [sys.executable, REPO / "planner/plan.py", "plan"]
    usage = subprocess.check_output([*shell, "--help"], text=True)
    usage = re.sub(r"\s+", "", usage)  # it breaks lines after hyphens
    assert len(flags) > 12 and all(flag in usage for flag in flags)
    unknown = subprocess.run([*shell, "--model", "?"], capture_output=True, text=True)
    usage += unknown.stderr  # which lists the models
    names = re.findall(r'<option value="([a-z][\w.-]+)"', form)
    assert not [name for name in names if name not in usage]


def test_the_calculator_prints_what_the_command_line_does(at):
    opened = at("plan_in_browser#--model=llama3-8b&--gpus=16&--pp=4")
    opened.wait_for_selector("#plans .result", timeout=120_000)
    words = ["plan", "--model", "llama3-8b", "--gpus", "16", "--pp", "4"]
    shell = [sys.executable, REPO / "planner/plan.py", *words]
    printed = subprocess.run(shell, capture_output=True, text=True).stdout
    opened.wait_for_selector(".pipeline")  # of the fastest plan, which has four stages
    text = "document.getElementById('plan-text').textContent"
    opened.wait_for_function(text, timeout=120_000)
    assert printed.strip() in opened.evaluate(text)
    assert len(opened.query_selector_all(".pipeline .rank")) == 4
    opened.fill("[name='--gpus']", "12")
    opened.click("#plan button")
    opened.wait_for_function("document.querySelector('#plans p.result')")
    assert "--gpus 12" in opened.text_content("#plans")
    assert not opened.faults
