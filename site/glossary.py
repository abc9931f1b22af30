"""A Sphinx extension: terms, from the sentences of the pages that define them.

A page of all terms; and on each page the first time that a term stands there, a link whose title is
the definition.
"""

import re
from functools import cache
from itertools import pairwise

from docutils import nodes
from page_reader import PAGES, definitions
from sphinx.addnodes import pending_xref

# Words of every day too: in the list, but not marked where they stand.
COMMON = {"link", "pair", "plan", "point", "round", "signal", "storage", "way", "worker", "hop",
          "schedule", "interface", "capacity", "checkpoint", "efficiency", "alpha"}  # fmt: skip
SKIPPED = (nodes.reference, pending_xref, nodes.literal, nodes.literal_block, nodes.title,
           nodes.emphasis, nodes.strong, nodes.raw, nodes.table)  # fmt: skip


def page() -> str:
    """Return the glossary as a page: each term, its sentence, where it stands."""
    lines = ["# Glossary", "", "Each sentence stands on the page behind it.", ""]
    found = sorted(definitions())
    for (term, path, _), (other, again, _) in pairwise(found):
        if term == other:
            raise SystemExit(f"{path} and {again} both define {term}")
    for term, path, sentence in found:
        text = re.sub(r"\]\([^)]*\)", "]", sentence).replace("[", "").replace("]", "")
        lines += [f"({label(term)})=", f"**{term}**", f": {text} [{path}]({path})", ""]
    return "\n".join(lines)


def label(term: str) -> str:
    return "term-" + re.sub(r"\W", "-", term)


def mark_terms(app, doctree: nodes.document) -> None:
    """Link the first place of each term on a page that does not define it."""
    path = f"{app.env.docname}.md"
    if path not in PAGES:
        return
    left = {term: sentence for term, where, sentence in definitions_once()
            if where != path and term not in COMMON}  # fmt: skip
    depth = "../" * app.env.docname.count("/")
    for text in list(doctree.findall(nodes.Text)):
        if not left:
            return
        up, inside = text.parent, False
        while up is not None and not inside:
            inside, up = isinstance(up, SKIPPED), up.parent
        if inside:
            continue
        words = "|".join(map(re.escape, sorted(left, key=len, reverse=True)))
        found = re.search(rf"\b({words})(?:s|es)?\b", text, re.IGNORECASE)
        if not found:
            continue
        term = found[1].lower()
        plain = re.sub(r"[*`]|\]\([^)]*\)|\[", "", left.pop(term))
        link = nodes.reference(
            "", found[0], internal=True, refuri=f"{depth}glossary.html#{label(term)}",
            reftitle=plain, classes=["term"],
        )  # fmt: skip
        before, after = text[: found.start()], text[found.end() :]
        text.parent.replace(text, [nodes.Text(before), link, nodes.Text(after)])


@cache
def definitions_once() -> list[tuple[str, str, str]]:
    return definitions()


def setup(app):
    app.connect("doctree-read", mark_terms, priority=600)  # after names of code are links
    return {"parallel_read_safe": True, "parallel_write_safe": True, "version": "1"}
