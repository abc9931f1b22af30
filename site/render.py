"""Turn a page of the guide into HTML: headings, links, code, formulas, figures.

The parser is markdown-it, with the extensions that GitHub shows: tables, HTML, dollar
math. Each page also yields its sections, which the search and the code panel use.
"""

import re
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from textwrap import dedent

from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from mdit_py_plugins.deflist import deflist_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin
from page_reader import REPO, TRACKED, slug
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name, get_lexer_for_filename
from pygments.util import ClassNotFound

PLAIN = HtmlFormatter(nowrap=True)
ALIASES = {"": "text", "text": "text"}
LONG = 100_000  # characters
ON_TOP = "site/pages/"  # pages that only the site has, at its top


@dataclass
class Section:
    """A heading, the prose below it, and the code that this prose shows and names."""

    id: str
    title: str
    level: int
    text: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # words in code, in order
    snippets: list[str] = field(default_factory=list)  # Python


@dataclass
class Rendered:
    """A page: its path in the repository, its address on the site, its HTML."""

    path: str
    url: str
    title: str = ""
    minutes: int = 0
    kind: str = ""
    html: str = ""
    sections: list[Section] = field(default_factory=list)
    diagrams: list[str] = field(default_factory=list)
    num_snippets: int = 0
    linked_files: set[str] = field(default_factory=set)


def address(path: str) -> str:
    """Return where the site keeps a file of the repository, from the site's top."""
    if path.startswith(ON_TOP):
        path = path.removeprefix(ON_TOP)
    return re.sub(r"\.md$", "", path) + ".html" if is_text(path) else path


def is_text(path: str) -> bool:
    return not path.endswith((".png", ".svg"))


def root_of(url: str) -> str:
    """Return the way from a page to the site's top."""
    return "../" * url.count("/")


def title_of(path: str) -> str:
    """Return a page's title, as plain text."""
    heading = re.search(r"^# (.+)$", (REPO / path).read_text(), re.M)
    return re.sub(r"[`*]", "", heading[1]) if heading else path


def colored(code: str, language: str) -> str:
    """Return code as HTML, highlighted if Pygments knows the language."""
    try:
        lexer = get_lexer_by_name(ALIASES.get(language, language), stripnl=False)
    except ClassNotFound:
        return escape(code)
    return highlight(code, lexer, PLAIN)


def colored_file(path: str) -> list[str]:
    """Return the lines of a file as HTML; a long one without colors."""
    text = (REPO / path).read_text()
    if len(text) > LONG:
        return escape(text).splitlines()
    try:
        lexer = get_lexer_for_filename(path, stripnl=False)
    except ClassNotFound:
        return escape(text).splitlines()
    return highlight(text, lexer, PLAIN).splitlines()


def math(content: str, options: dict) -> str:
    if not options["display_mode"]:
        return convert(content, display="inline")
    # A wide formula scrolls, so the keyboard has to reach it.
    formula = convert(content, display="block")
    return f'<div class="formula" tabindex="0">{formula}</div>'


def make_parser() -> MarkdownIt:
    parser = MarkdownIt("gfm-like", {"html": True, "linkify": False})
    deflist_plugin(parser)
    dollarmath_plugin(
        parser, renderer=math, allow_digits=False, allow_space=False, allow_labels=False
    )
    return parser


PARSER = make_parser()


def render_page(path: str) -> Rendered:
    """Render one Markdown file of the repository."""
    page = Rendered(path, address(path), title_of(path))
    text = (REPO / path).read_text()
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.S)
    first = re.search(
        r"^\W*(Course|Elective|Reference)?\b.*?(\d+) minutes", text[:600], re.M
    )
    if first:
        page.kind, page.minutes = first[1] or "", int(first[2])
    tokens = PARSER.parse(text)
    used: dict[str, int] = {}
    section = Section("", page.title, 1)
    page.sections.append(section)
    for number, token in enumerate(tokens):
        if token.type == "heading_open":
            inline = tokens[number + 1]
            name = plain(inline)
            anchor = slug(name)
            count = used[anchor] = used.get(anchor, -1) + 1
            anchor += f"-{count}" if count else ""
            token.attrSet("id", anchor)
            section = Section(anchor, name, int(token.tag[1]))
            if section.level == 1:
                page.sections.clear()
            page.sections.append(section)
        elif token.type == "inline":
            walk_inline(page, section, token)
        elif token.type == "fence":
            fence(page, section, token)
        elif token.type == "html_block":
            section.text.append(re.sub(r"<[^>]+>", " ", token.content))
    page.html = PARSER.renderer.render(tokens, PARSER.options, {})
    page.html = page.html.replace("<table>", '<div class="wide"><table>')
    page.html = page.html.replace("</table>", "</table></div>")
    page.html = re.sub(
        r'<h([23]) id="([^"]+)">(.*?)</h\1>',
        r'<h\1 id="\2">\3 <a class="anchor" href="#\2" aria-label="Link">#</a></h\1>',
        page.html,
    )
    return page


def plain(inline) -> str:
    """Return the text of an inline token, without markup."""
    kinds = ("text", "code_inline", "math_inline")
    parts = [child.content for child in inline.children if child.type in kinds]
    return "".join(parts)


def walk_inline(page: Rendered, section: Section, inline) -> None:
    """Note the words of a paragraph; point its links and pictures at the site."""
    for number, child in enumerate(inline.children):
        if child.type == "code_inline":
            section.names.append(child.content)
        elif child.type == "link_open":
            link(page, child, inline.children[number + 1])
        elif child.type == "image":
            child.attrSet("loading", "lazy")
            source = resolved(page.path, child.attrGet("src"))
            child.attrSet("src", root_of(page.url) + address(source))
    if inline.content != section.title:
        section.text.append(
            "".join(
                " " if child.type == "softbreak" else child.content
                for child in inline.children
                if child.type != "html_inline"
            )
        )


def resolved(page: str, target: str) -> str:
    """Return a link's target as a path in the repository."""
    whole = (REPO / page).parent / target
    return str(whole.resolve().relative_to(REPO)) if whole.exists() else target


def link(page: Rendered, opening, text) -> None:
    """Point a link at the site; a page's file name as its text becomes its title."""
    href = opening.attrGet("href")
    target, _, anchor = href.partition("#")
    if "://" in href or not target:
        return
    path = resolved(page.path, target)
    if (REPO / path).is_dir():
        inside = f"{path}/README.md"
        path = inside if inside in TRACKED else path
    if path not in TRACKED and not (REPO / path).is_dir():
        return
    if path.endswith(".md"):
        if text.content.endswith(".md") or text.content == Path(path).stem:
            text.type, text.content, text.tag = "text", title_of(path), ""
    else:
        page.linked_files.add(path)
    anchor = f"#{anchor}" if anchor else ""
    opening.attrSet("href", root_of(page.url) + address(path) + anchor)


def fence(page: Rendered, section: Section, token) -> None:
    """Replace a block of code by its HTML; a diagram leaves a mark for its drawing."""
    language = token.info.strip()
    token.type = "html_block"
    code = token.content
    if language == "mermaid":
        page.diagrams.append(code)
        token.content = f"<!--diagram {len(page.diagrams) - 1}-->"
        return
    section.text.append(code)
    mark = ""
    if language == "python":
        mark = f' data-snippet="{page.num_snippets}"'
        page.num_snippets += 1
        section.snippets.append(code)
        code = dedent(code)
    label = {"text": "output", "": "output"}.get(language, language)
    token.content = (
        f'<div class="block {language or "text"}" data-label="{label}"{mark}>'
        f"<pre><code>{colored(code, language)}</code></pre></div>\n"
    )
