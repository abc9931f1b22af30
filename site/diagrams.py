"""Draw Mermaid's diagrams as SVG when the site is built, so readers load no script.

A headless browser runs Mermaid once for all diagrams. `runs/site-diagrams` keeps each
drawing, so a second build draws what has changed. Colors are variables of guide.css.
"""

import hashlib
import re
from html import escape
from pathlib import Path

from browser import FLAGS, SITE_DIR, find_browser

MERMAID = SITE_DIR / "node_modules" / "mermaid" / "dist" / "mermaid.min.js"
# Mermaid computes with colors, so it gets unusual ones; the SVG gets variables instead.
COLORS = {
    "#0a0b0c": "var(--diagram-text)",
    "#0d0e0f": "var(--diagram-line)",
    "#e1e2e3": "var(--diagram-box)",
    "#e4e5e6": "var(--diagram-group)",
    "#e7e8e9": "var(--diagram-note)",
}
TEXT, LINE, BOX, GROUP, NOTE = COLORS
SETTINGS = {
    "startOnLoad": False,
    "securityLevel": "strict",
    "theme": "base",
    "look": "classic",
    "fontFamily": "Inter, sans-serif",
    "flowchart": {
        "padding": 12,
        "nodeSpacing": 32,
        "rankSpacing": 44,
        "wrappingWidth": 260,
    },
    "sequence": {"actorMargin": 36, "boxMargin": 6, "messageMargin": 32},
    "themeVariables": {
        "fontSize": "15px",
        "primaryColor": BOX,
        "primaryTextColor": TEXT,
        "primaryBorderColor": LINE,
        "mainBkg": BOX,
        "nodeBorder": LINE,
        "nodeTextColor": TEXT,
        "textColor": TEXT,
        "titleColor": TEXT,
        "lineColor": LINE,
        "secondaryColor": GROUP,
        "tertiaryColor": GROUP,
        "tertiaryBorderColor": LINE,
        "tertiaryTextColor": TEXT,
        "clusterBkg": GROUP,
        "clusterBorder": LINE,
        "edgeLabelBackground": NOTE,
        "actorBkg": BOX,
        "actorBorder": LINE,
        "actorTextColor": TEXT,
        "actorLineColor": LINE,
        "signalColor": LINE,
        "signalTextColor": TEXT,
        "labelBoxBkgColor": NOTE,
        "labelBoxBorderColor": LINE,
        "labelTextColor": TEXT,
        "loopTextColor": TEXT,
        "noteBkgColor": NOTE,
        "noteTextColor": TEXT,
        "noteBorderColor": LINE,
    },
}
DRAW = """async ([settings, sources]) => {
    await document.fonts.ready;
    await document.fonts.load("15px Inter");
    mermaid.initialize(settings);
    const drawn = [];
    for (const [id, source] of sources)
        drawn.push((await mermaid.render(id, source)).svg);
    return drawn; }"""


def draw_diagrams(sources: list[str], folder: Path, style: str) -> dict[str, str]:
    """Return the SVG of each diagram; `style` defines the font that measures its text.

    Without a browser the diagrams stay text, and the build says so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    salt = f"{SETTINGS}{MERMAID.stat().st_size}"
    files = {
        source: folder
        / f"d{hashlib.sha256((salt + source).encode()).hexdigest()[:12]}.svg"
        for source in sources
    }
    missing = [source for source, file in files.items() if not file.exists()]
    if missing:
        jobs = [[files[source].stem, source] for source in missing]
        try:
            drawn = run_mermaid(jobs, style)
        except Exception as error:  # no browser here, or it cannot start
            print(f"No browser draws the diagrams, they stay text: {error}")
            return {
                source: f'<pre class="undrawn">{escape(source)}</pre>'
                for source in sources
            }
        for source, svg in zip(missing, drawn, strict=True):
            files[source].write_text(in_page_colors(svg))
    return {source: file.read_text() for source, file in files.items()}


def run_mermaid(jobs: list[list[str]], style: str) -> list[str]:
    """Return the SVG that Mermaid draws for each (id, source)."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        path = find_browser()
        tab = driver.chromium.launch(executable_path=path, args=FLAGS).new_page()
        tab.set_content(f"<style>{style}</style>")
        tab.add_script_tag(path=MERMAID)
        return tab.evaluate(DRAW, [SETTINGS, jobs])


def in_page_colors(svg: str) -> str:
    """Replace the unusual colors by variables; keep the drawing at its own size."""
    for color, variable in COLORS.items():
        red, green, blue = (int(color[n : n + 2], 16) for n in (1, 3, 5))
        svg = svg.replace(color, variable)
        svg = svg.replace(f"rgb({red}, {green}, {blue})", variable)
    box = re.search(r'viewBox="[-\d.]+ [-\d.]+ ([\d.]+) ', svg)
    svg = re.sub(r"max-width: [\d.]+px;", "", svg, count=1)
    return re.sub(r'width="100%"', f'width="{float(box[1]):.0f}"', svg, count=1)
