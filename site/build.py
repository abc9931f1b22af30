"""Build the guide as a site of static files, from its own Markdown pages and scripts.

    python site/build.py [OUT]      in the environment that `make site` installs

It stages the pages with the code that they link to (nothing of it is kept in the repository), and
lets Sphinx build OUT (runs/site), which works from a folder over file:// and without a network.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
import glossary  # noqa: E402
import in_browser  # noqa: E402
from page_reader import PAGES, PARTS, REPO, TRACKED, lessons_in_order  # noqa: E402

STAGE, OUT = REPO / "runs" / "site-source", REPO / "runs" / "site"
MERMAID = HERE / "node_modules" / "mermaid" / "dist" / "mermaid.min.js"
PYODIDE = HERE / "node_modules" / "pyodide" / "pyodide.asm.wasm"
LANGUAGES = {"py": "python", "sh": "bash", "sbatch": "bash", "toml": "toml", "json": "json"}
IMAGES = (".png", ".svg")
LINK = re.compile(r"\]\(([^)\s#]+)((?:#[^)\s]*)?)\)")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


SYMPTOMS = """# Symptoms

**It hangs, fails, or the numbers are wrong: which page knows it?**

All tables of all pages that begin with a symptom. Type a word of the message.

<input type="search" id="symptom" aria-label="A word of the message">
"""


def stage() -> None:
    """Write what Sphinx reads: the pages, their pictures, and a page for each file of code."""
    shutil.rmtree(STAGE, ignore_errors=True)
    code = {path for path in TRACKED if path.endswith(".py") and not path.startswith("tests/")}
    for page in (HERE / "pages").glob("*.md"):
        write(page.name, page.read_text())
    write("glossary.md", glossary.page())
    write("symptoms.md", with_links_to_code("symptoms.md", symptoms(), code))
    for page in PAGES:
        text = with_links_to_code(page, (REPO / page).read_text(), code)
        write(page, text + contents_of(page))
    for path in code:
        write(f"{path}.md", code_page(path))
    for path in TRACKED:
        if path.endswith(IMAGES):
            write(path, (REPO / path).read_bytes())


def write(path: str, content: str | bytes) -> None:
    target = STAGE / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content if isinstance(content, bytes) else content.encode())


def with_links_to_code(page: str, text: str, code: set[str]) -> str:
    """Point a page's links at what the site has: files are pages there; adds them to `code`."""

    def site_link(match: re.Match) -> str:
        target, anchor = match.groups()
        whole = (REPO / page).parent / target
        if "://" in target or not whole.exists():
            return match[0]
        path = whole.resolve().relative_to(REPO)
        if path.is_relative_to("site/pages"):  # which stand at the site's top
            return f"]({'../' * page.count('/')}{path.name}{anchor})"
        if path.suffix == ".md" or path.suffix in IMAGES:
            return match[0]
        if whole.is_dir():
            if not (whole / "README.md").exists():
                write(f"{path}/README.md", folder_page(str(path), code))
            return f"]({target.rstrip('/')}/README.md)"
        code.add(str(path))
        return f"]({target}.md)"

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(site_link, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(site_link, text[end:])])


def symptoms() -> str:
    """Return a page of everything that the pages say of what breaks, by page, in one list."""
    lines = [SYMPTOMS]
    for page in PAGES:
        folder = page.rpartition("/")[0]
        text = (REPO / page).read_text()
        tables = re.findall(r"^\| (?:symptom|what you see) \|.*\n(?:\|.*\n)+", text, re.M)
        if tables:
            title = re.search(r"^# (.+)$", text, re.M)[1]
            lines += ["", f"## [{title}]({page})", ""]
            link = re.compile(r"\]\(([^)\s#]*)(#?[^)\s]*)\)")
            lines += [link.sub(partial(from_the_top, folder, page), table) for table in tables]
    return "\n".join(lines) + "\n"


def from_the_top(folder: str, page: str, link: re.Match) -> str:
    """Return a page's link as it is from the top of the repository."""
    target, anchor = link.groups()
    if "://" in target:
        return link[0]
    whole = os.path.normpath(os.path.join(folder, target)) if target else page
    return f"]({whole}{anchor})"


def folder_page(folder: str, code: set[str]) -> str:
    """Return a page that lists a folder's files, which are pages."""
    inside = [path for path in TRACKED if path.startswith(f"{folder}/")]
    code |= set(inside)
    lines = [f"- [{path.removeprefix(f'{folder}/')}]({path.removeprefix(f'{folder}/')}.md)"
             for path in inside]  # fmt: skip
    return f"---\norphan: true\n---\n# {folder}\n\n" + "\n".join(lines) + "\n"


def code_page(path: str) -> str:
    """Return the page of a file: its lines with numbers, found by the search as well."""
    language = LANGUAGES.get(path.rpartition(".")[2], "text")
    name = path.rpartition("/")[2]
    source = (REPO / path).read_text()
    ticks = "`" * 5
    return (
        f"---\norphan: true\n---\n# {name}\n\n`{path}`\n\n"
        f"{ticks}{{code-block}} {language}\n:linenos:\n\n{source}\n{ticks}\n"
    )


def contents_of(page: str) -> str:
    """Return the hidden table of contents that gives the pages below this one their order."""
    folder, _, name = page.rpartition("/")
    if name != "README.md":
        return ""
    if not folder:
        below = [f"{module}/README.md" for module in PARTS]
        below += [
            "planner/README.md",
            "cluster/README.md",
            "labs/README.md",
            "SYMPTOMS.md",
            "TEACHING.md",
            "CONTRIBUTING.md",
        ]
        below += [
            "symptoms.md",
            "glossary.md",
            *sorted(page.name for page in (HERE / "pages").glob("*.md")),
        ]
    else:
        inside = [p for p in PAGES if p.startswith(f"{folder}/") and p != page]
        order = [f"{folder}/{stem}.md" for stem in lessons_in_order(folder)]
        below = [p for p in order if p in inside] + [p for p in inside if p not in order]
        below = [p.removeprefix(f"{folder}/") for p in below]
    entries = [titled(below_it, Path(folder) / below_it) for below_it in below]
    return "\n\n```{toctree}\n:hidden:\n\n" + "\n".join(entries) + "\n```\n"


def titled(name: str, page: Path) -> str:
    """Return a page's entry in the contents: its title, and its minutes if it says them."""
    file = REPO / page if (REPO / page).exists() else STAGE / page
    text = file.read_text()
    title = re.search(r"^# (.+)$", text, re.M)[1].replace("`", "")
    minutes = re.search(r"^(\d+) minutes[.;,]", text, re.M)
    return f"{title} ({minutes[1]} min) <{name}>" if minutes else name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=OUT)
    args = parser.parse_args()
    for needed in (MERMAID, PYODIDE):
        if not needed.exists():
            print(f"site/build.py: {needed} is not there: make site", file=sys.stderr)
            return 2
    started = time.monotonic()
    stage()
    shutil.rmtree(args.out, ignore_errors=True)
    words = ["-m", "sphinx", "-q", "-W", "--keep-going", "-j", "auto", "-c", str(HERE)]
    words += ["-d", str(STAGE.with_name("site-doctrees")), str(STAGE), str(args.out)]
    ended = subprocess.run([sys.executable, *words], check=False).returncode
    if ended:
        return ended
    shutil.copy2(MERMAID, args.out / "_static")
    in_browser.write(args.out / "_static")
    front = '<!doctype html><meta http-equiv="refresh" content="0; url=README.html">\n'
    (args.out / "index.html").write_text(front)
    pages = len(list(args.out.rglob("*.html")))
    print(f"{pages} pages in {time.monotonic() - started:.0f} s: open {args.out}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
