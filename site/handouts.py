"""Print each module of the built site as a PDF, a handout for a class, without the answers.

    python site/handouts.py [--answers] [SITE]      in the environment that `make site` installs

It writes SITE/handouts/MODULE.pdf, and leaves folded answers folded; --answers opens them.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from build import HERE, OUT
from page_reader import PAGES, PARTS, lessons_in_order
from playwright.sync_api import sync_playwright

UNPACK = 'import("@sparticuz/chromium").then(c => c.default.executablePath()).then(console.log)'
# A page's article; its links to other pages would lead nowhere on paper.
ARTICLE = """answers => {
  const article = document.querySelector("article");
  article.querySelectorAll("details").forEach(each => { each.open = answers; });
  article.querySelectorAll(".on-this-page, .headerlink, button").forEach(each => each.remove());
  article.querySelectorAll("a:not([href^=http])").forEach(each => each.removeAttribute("href"));
  article.querySelectorAll("img").forEach(each => { each.src = each.src; });
  return article.outerHTML;
}"""
STYLE = """
  body { font-size: 10pt; }
  article { break-before: page; } article:first-of-type { break-before: auto; }
  pre, img, svg, table { break-inside: avoid; } pre { white-space: pre-wrap; font-size: 8pt; }
  img, svg { max-width: 100%; height: auto; } table { font-size: 9pt; max-width: 100%; }
  article .table-wrapper { overflow: visible; }
"""


def unpacked() -> str:
    """Return the path of the Chromium that npm installed."""
    node = Path(sys.executable).with_name("node")
    command = [node, "--input-type=module", "-e", UNPACK]
    return subprocess.check_output(command, cwd=HERE, text=True).strip()


def pages_of(module: str) -> list[str]:
    """Return a module's pages in the order in which they are read, without .md."""
    stems = ["README", *lessons_in_order(module)]
    return [f"{module}/{stem}" for stem in stems if f"{module}/{stem}.md" in PAGES]


def print_module(tab, site: Path, module: str, answers: bool) -> Path:
    """Print one module's pages as one PDF; return its path."""
    articles = []
    for page in pages_of(module):
        tab.goto((site / f"{page}.html").as_uri())
        tab.wait_for_function("!document.querySelector('pre.mermaid:not(:has(svg))')")
        articles.append(tab.evaluate(ARTICLE, answers))
    styles = [f'<link rel="stylesheet" href="{(site / "_static" / name).as_uri()}">'
              for name in ("pygments.css", "styles/furo.css", "guide.css")]  # fmt: skip
    folder = site / "handouts"
    folder.mkdir(exist_ok=True)
    whole = folder / f"{module}.html"
    head = f"<meta charset=utf-8><title>{module}</title>{''.join(styles)}<style>{STYLE}</style>"
    whole.write_text(f"<!doctype html>{head}<body>{''.join(articles)}")
    tab.goto(whole.as_uri())
    path = whole.with_suffix(".pdf")
    margins = {"top": "15mm", "bottom": "15mm", "left": "15mm", "right": "15mm"}
    tab.pdf(path=path, format="A4", margin=margins, print_background=True)
    whole.unlink()
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", nargs="?", type=Path, default=OUT)
    parser.add_argument("--answers", action="store_true", help="open the folded answers")
    args = parser.parse_args()
    if not (args.site / "index.html").exists():
        print(f"site/handouts.py: {args.site} has no site: make site", file=sys.stderr)
        return 2
    with sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = driver.chromium.launch(executable_path=unpacked(), args=flags)
        tab = browser.new_page(color_scheme="light")
        for module in PARTS:
            path = print_module(tab, args.site.resolve(), module, args.answers)
            print(f"{os.path.relpath(path)}: {path.stat().st_size / 1e6:.1f} MB")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
