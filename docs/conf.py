"""The site, as Sphinx builds it: `make docs`."""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

from making.docstrings import restructured
from making.filling import RESULTS, filled

project = "scanl"
html_title = "scanl"
extensions = ["myst_parser", "mathml", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other libraries have no page here
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autosummary_generate = False
html_math_renderer = "mathml"
# not what a program prints
copybutton_selector = "div.highlight-python pre, div.highlight-pycon pre, div.highlight-console pre"
copybutton_prompt_text = ">>> "
copybutton_line_continuation_character = "\\"
html_theme = "furo"
pygments_dark_style = "a11y-high-contrast-dark"  # that of the theme underlines the names of modules
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False

MADE = {  # of a file or a folder beside docs/, the page in the site
    r"CONTRIBUTING\.md": "contributing.md",
    r"examples/(\w+)\.ipynb": r"notebooks/\1.md",
    r"src/scanl": "api.md",
    r"src/scanl/cli": "commands.md",
    r"src/scanl/data/published/catalogue": "sources.md",
    r"src/scanl/data/questions\.py": "questions.md",
    r"src/scanl/inspect": "inspectors.md",
    r"src/scanl/layers": "gallery.md",
    r"src/scanl/layers/\w+/(\w+)\.py": r"layers/\1.md",
    r"src/scanl/learning/algorithms": "algorithms.md",
    r"src/scanl/learning/algorithms/(\w+)\.py": r"algorithms/\1.md",
    r"src/scanl/ops": "ops.md",
    r"src/scanl/ops/(\w+)\.py": r"ops/\1.md",
    r"src/scanl/tasks": "tasks.md",
    r"src/scanl/tasks/(\w+)\.py": r"tasks/\1.md",
}


def complete(app: Sphinx, page: str, text: list[str]) -> None:
    """Fill a page. Its links to files beside docs/ lead to their pages in the site: to that of a layer for its file."""
    if not page.startswith("made/"):
        template, text[0] = text[0], filled(text[0])
        for file in RESULTS.glob("*.csv") if text[0] != template else ():
            app.env.note_dependency(str(file))
    up = "../" * page.count("/")
    for path, target in MADE.items():
        text[0] = re.sub(rf"\]\({up}\.\./{path}(?=[)#])", f"]({up}made/{target}", text[0])


def as_restructured(_app: Sphinx, _what: str, _name: str, value: Any, _options: object, lines: list[str]) -> None:
    """Docstrings are plain text: what Sphinx would take for markup is escaped, and arguments become lists."""
    names = inspect.signature(value).parameters if inspect.isfunction(value) else ()
    lines[:] = restructured(lines, names)


def without_requests(_app: Sphinx, _what: str, _name: str, value: Any, _skip: bool, _options: object) -> bool | None:
    """Leave out the methods that scikit-learn puts into its estimators, such as `set_fit_request`."""
    return True if str(getattr(value, "__module__", "")).startswith("sklearn.") else None


def setup(app: Sphinx) -> None:
    app.connect("source-read", complete)
    app.connect("autodoc-skip-member", without_requests)
    app.connect("autodoc-process-docstring", as_restructured)
