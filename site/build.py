"""Build the guide as a site of static files, from its own Markdown pages and scripts.

    python site/build.py [OUT]      in the environment that `make site` installs

OUT (runs/site) works from a folder over file://, without a server and a network.
"""

import argparse
import base64
import json
import re
import shutil
import sys
import time
from html import escape
from pathlib import Path

SITE_DIR = Path(__file__).resolve().parent
sys.path[:0] = [str(SITE_DIR), str(SITE_DIR.parent / "tests")]
import calculator  # noqa: E402
from beside import functions_of, numbered, panel_of, put_beside  # noqa: E402
from diagrams import draw_diagrams  # noqa: E402
from jinja2 import Environment, FileSystemLoader  # noqa: E402
from page_reader import MODULES, PAGES, REPO, TRACKED, lessons_in_order  # noqa: E402
from pygments.formatters import HtmlFormatter  # noqa: E402
from render import Rendered, address, render_page, root_of  # noqa: E402

SITE = "Distributed Training Guide"
MODULES_DIR = SITE_DIR / "node_modules"
FONTS = {
    ("Inter", "100 900"): "@fontsource-variable/inter/files/inter-latin-wght-normal",
    ("Code", "400"): "@fontsource/jetbrains-mono/files/jetbrains-mono-latin-400-normal",
    ("Code", "700"): "@fontsource/jetbrains-mono/files/jetbrains-mono-latin-700-normal",
}
LIBRARIES = ("minisearch/dist/umd/index.js",)
STYLES = {
    "light": "a11y-high-contrast-light",
    "dark": "a11y-high-contrast-dark",
}
PROGRAMS = ("benchmarks", "planner", "cluster", "labs")
LOOKUP_PAGES = (
    "SYMPTOMS.md",
    "site/pages/glossary.md",
    "README.md",
    "TEACHING.md",
    "CONTRIBUTING.md",
)
START = ("site/pages/index.md", "site/pages/plan_in_browser.md")
NAMES = {START[0]: "Front page", "README.md": "Installing, and all lessons"}


def pages_in_order() -> dict[str, list[str]]:
    """Return the chapters of the sidebar, each with its pages in the course's order."""
    chapters = {"Start": list(START)}
    for folder in (*MODULES, *PROGRAMS):
        inside = [page for page in PAGES if page.startswith(f"{folder}/")]
        listed = [f"{folder}/{stem}.md" for stem in lessons_in_order(folder)]
        order = [f"{folder}/README.md", *listed, *inside]
        chapters[folder] = [page for page in dict.fromkeys(order) if page in inside]
    chapters["Look up"] = list(LOOKUP_PAGES)
    return chapters


def name_of_chapter(folder: str, pages: dict[str, Rendered]) -> str:
    """Return a chapter's name: the title of its first page, for a module shortened."""
    if folder not in MODULES:
        return folder[0].upper() + folder[1:]
    title = pages[f"{folder}/README.md"].title.removeprefix("Module ")
    number, name = title.split(": ", 1)
    return f"{number} · {name[0].upper()}{name[1:]}"


def navigation(pages: dict[str, Rendered], chapters: dict, current: Rendered) -> str:
    """Return the sidebar: chapters, their pages, the sections of the current page."""
    root = root_of(current.url)
    parts = []
    for folder, inside in chapters.items():
        is_open = current.path in inside or folder == "Start"
        name = escape(name_of_chapter(folder, pages))
        parts.append(
            f"<details{' open' if is_open else ''}><summary>{name}</summary><ul>"
        )
        for path in inside:
            page = pages[path]
            current_mark = ' aria-current="page"' if page is current else ""
            title = NAMES.get(path, page.title)
            if path.endswith("/README.md") and folder in (*MODULES, *PROGRAMS):
                title = "Overview" if path.count("/") == 1 else title
            minutes = f"<small>{page.minutes} min</small>" if page.minutes else ""
            link = (
                f'<a href="{root}{page.url}"{current_mark}>{escape(title)}{minutes}</a>'
            )
            parts.append(f"<li>{link}{sections_of(page) if current_mark else ''}</li>")
        parts.append("</ul></details>")
    return "".join(parts)


def sections_of(page: Rendered) -> str:
    """Return the list of a page's sections, for the sidebar."""
    links = [
        f'<li><a href="#{section.id}">{escape(section.title)}</a></li>'
        for section in page.sections
        if section.level == 2
    ]
    return f'<ul class="sections">{"".join(links)}</ul>' if links else ""


def code_page(path: str) -> Rendered:
    """Return the page of a file: its lines with numbers."""
    html = f"<h1><code>{escape(path)}</code></h1>"
    if (REPO / path).is_dir():
        inside = [each for each in TRACKED if each.startswith(f"{path}/")]
        root = root_of(address(path))
        links = [f'<li><a href="{root}{address(p)}">{p}</a></li>' for p in inside]
        html += f"<ul>{''.join(links)}</ul>"
    else:
        html += f'<pre class="whole"><code>{numbered(path)}</code></pre>'
    return Rendered(path, address(path), path, html=html)


def files_with_pages(pages: list[Rendered]) -> list[str]:
    """Return the scripts and all other files that a page links to."""
    files = {path for path in TRACKED if path.endswith(".py")}
    files = {path for path in files if not path.startswith(("tests/", "site/"))}
    for page in pages:
        files |= page.linked_files
    for folder in [path for path in files if (REPO / path).is_dir()]:
        files |= {path for path in TRACKED if path.startswith(f"{folder}/")}
    pictures = (".png", ".svg")
    return sorted(path for path in files if not path.endswith((".md", *pictures)))


def search_index(pages: list[Rendered], scripts: list[str]) -> str:
    """Return a script with what the search looks through: sections, then scripts."""
    entries = []
    for page in pages:
        for section in page.sections:
            text = re.sub(r"\s+", " ", " ".join(section.text)).strip()
            anchor = f"#{section.id}" if section.level > 1 else ""
            heading = section.title if section.level > 1 else ""
            entries.append([page.url + anchor, page.title, heading, text, page.path])
    for path in scripts:
        if path.endswith(".py"):
            names = " ".join(functions_of(path))
            text = re.sub(r"\s+", " ", (REPO / path).read_text().partition('"""')[2])
            text = text.partition('"""')[0][:400]
            entries.append([address(path), path, names, text, ""])
    return f"const guideEntries = {json.dumps(entries, ensure_ascii=False)};\n"


def font_style() -> str:
    """Return a style sheet with the fonts inside: file:// allows no other files."""
    faces = []
    for (family, weight), name in FONTS.items():
        data = base64.b64encode((MODULES_DIR / f"{name}.woff2").read_bytes()).decode()
        source = f"url(data:font/woff2;base64,{data})"
        faces.append(
            f"@font-face {{ font-family: {family}; font-weight: {weight}; "
            f"font-display: swap; src: {source} format('woff2'); }}\n"
        )
    return "".join(faces)


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def write_static(out: Path, fonts: str) -> None:
    """Write style sheets, scripts, fonts, pictures and the planner."""
    static = out / "_static"
    shutil.copytree(SITE_DIR / "static", static)
    for library in LIBRARIES:
        shutil.copy2(MODULES_DIR / library, static / "minisearch.js")
    colors = [
        HtmlFormatter(style=style, nobackground=True).get_style_defs(
            f'[data-theme="{theme}"] code'
        )
        for theme, style in STYLES.items()
    ]
    with (static / "guide.css").open("a") as sheet:
        sheet.write("\n".join(colors))
    write(static / "fonts.css", fonts)
    calculator.write(static)
    for path in TRACKED:
        if path.endswith((".png", ".svg")):
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / path, out / path)


def build(out: Path) -> int:
    """Write the whole site into a folder; return the number of pages."""
    shutil.rmtree(out, ignore_errors=True)
    chapters = pages_in_order()
    order = [path for inside in chapters.values() for path in inside]
    pages = {path: render_page(path) for path in order}
    missed = set(PAGES) - set(order)
    pages |= {path: render_page(path) for path in sorted(missed)}
    fonts = font_style()
    sources = [source for page in pages.values() for source in page.diagrams]
    drawings = draw_diagrams(sources, REPO / "runs" / "site-diagrams", fonts)
    files = files_with_pages(list(pages.values()))
    template = Environment(loader=FileSystemLoader(SITE_DIR / "theme")).get_template(
        "page.html"
    )
    panels: dict[str, dict[str, str]] = {}
    codes = [code_page(path) for path in files]
    for page in [*pages.values(), *codes]:
        for number, source in enumerate(page.diagrams):
            figure = f'<figure class="diagram">{drawings[source]}</figure>'
            page.html = page.html.replace(f"<!--diagram {number}-->", figure)
        beside = put_beside(page) if page.path in PAGES else []
        for path in beside:
            panels.setdefault(path, panel_of(path))
        place = order.index(page.path) if page.path in order else None
        near = [None, None]
        if place is not None:
            near[0] = pages[order[place - 1]] if place else None
            near[1] = pages[order[place + 1]] if place + 1 < len(order) else None
        text = template.render(
            site=SITE,
            title=page.title,
            root=root_of(page.url),
            html=page.html,
            navigation=navigation(pages, chapters, page),
            files=[panels[path] for path in beside],
            before=near[0],
            after=near[1],
            front=page.path == START[0],
        )
        write(out / page.url, text)
    write_static(out, fonts)
    write(out / "_static" / "search-data.js", search_index(list(pages.values()), files))
    return len(pages) + len(codes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=REPO / "runs" / "site")
    args = parser.parse_args()
    if not MODULES_DIR.exists():
        print(f"site/build.py: {MODULES_DIR} is not there: make site", file=sys.stderr)
        return 2
    started = time.monotonic()
    pages = build(args.out)
    seconds = time.monotonic() - started
    print(f"{pages} pages in {seconds:.0f} s: open {args.out}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
