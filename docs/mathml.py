"""Mathematics of the site as MathML, made when the site is built, so that no page loads a script for it."""

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def inline(page: HTML5Translator, node: nodes.math) -> None:
    page.body.append(convert(node.astext()))
    raise nodes.SkipNode


def display(page: HTML5Translator, node: nodes.math_block) -> None:
    """Write each line as an equation of its own, so that it can be moved on a narrow screen."""
    lines = "".join(f"<div>{convert(line, display='block')}</div>" for line in node.astext().splitlines() if line)
    page.body.append(f'<div class="math">{lines}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
