"""Sphinx's settings: MyST reads the pages as GitHub shows them, Furo dresses them."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "tests")]

project = "Distributed Training Guide"
extensions = ["myst_parser", "sphinx_copybutton", "beside", "glossary"]
myst_enable_extensions = ["deflist"]
root_doc = "README"
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4  # as GitHub numbers them
html_theme = "furo"
html_title = project
html_static_path = ["static"]
templates_path = ["theme"]
html_css_files = ["guide.css"]
html_js_files = [("guide.js", {"defer": "defer"})]
html_copy_source = False
html_show_search_summary = False  # fetched, which file:// does not allow
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"top_of_page_buttons": []}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
# Commands and code, not what they print.
copybutton_selector = ".highlight-bash pre, .highlight-python pre"
