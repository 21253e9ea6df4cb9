"""The site, as Sphinx builds it: `make docs`."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

project = "scanl"
html_title = "scanl"
extensions = ["myst_parser", "mathml"]
exclude_patterns = ["_build", "templates"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
html_math_renderer = "mathml"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False


def lead_inside(_app: Sphinx, _page: str, text: list[str]) -> None:
    """Links to files beside docs/ lead to their pages in the site: to that of the layer for a layer's file."""
    text[0] = text[0].replace("](../CONTRIBUTING.md", "](made/contributing.md")
    text[0] = text[0].replace("](../src/scanl/layers)", "](made/gallery.md)")
    text[0] = re.sub(r"\]\(\.\./src/scanl/layers/\w+/(\w+)\.py", r"](made/layers/\1.md", text[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", lead_inside)
