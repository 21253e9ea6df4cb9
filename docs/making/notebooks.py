"""The notebooks of examples/: run them, and make a page of each with what it printed and drew.

    python docs/making/notebooks.py [NAME ...]

runs notebooks from their first cell to the last and keeps the outputs in their files. The pages have the outputs that
the files have.
"""

import base64
import contextlib
import hashlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
FIGURE = {"dpi": 80, "bbox_inches": "tight"}
Cell = dict[str, Any]


def names() -> list[str]:
    return sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))


def pages(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the text of the page of each notebook."""
    for name in names():
        yield folder / "notebooks" / f"{name}.md", page(name)


def page(name: str) -> str:
    """Return a notebook as Markdown."""
    return "\n\n".join(filter(None, map(_shown, _read(name)["cells"]))) + "\n"


def _shown(cell: Cell) -> str:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        text = re.sub(r"\$\$(.*?)\$\$", r":::{math}\n\1\n:::", text)
        return re.sub(r"\$(.*?)\$", r"{math}`\1`", text)
    return "\n\n".join([f"```python\n{text}\n```", *map(_output, cell["outputs"])])


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    image = f"data:image/png;base64,{output['data']['image/png']}"
    return f'<img class="drawn" alt="The figure that this cell draws" src="{image}">'


def digest(notebook: dict[str, Any]) -> str:
    """Return the digest of a notebook's programs. Its file has that of the programs whose outputs it has."""
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()


def _read(name: str) -> dict[str, Any]:
    return json.loads((EXAMPLES / f"{name}.ipynb").read_text("utf-8"))


def run(name: str) -> None:
    """Run a notebook in a folder of its own, and write its outputs into its file."""
    import matplotlib

    matplotlib.use("agg")
    notebook = _read(name)
    namespace: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for count, cell in enumerate(code, 1):
            cell["execution_count"], cell["outputs"] = count, _outputs(cell, namespace)
    notebook["metadata"]["ran"] = digest(notebook)
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    (EXAMPLES / f"{name}.ipynb").write_text(text, "utf-8")


def _outputs(cell: Cell, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell, and return what it printed and drew."""
    from matplotlib import pyplot as plt

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("".join(cell["source"]), "cell", "exec"), namespace)
    lines = printed.getvalue().splitlines(keepends=True)
    outputs: list[dict[str, Any]] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    for number in plt.get_fignums():
        drawn = io.BytesIO()
        plt.figure(number).savefig(drawn, format="png", **FIGURE)
        data = {"image/png": base64.b64encode(drawn.getvalue()).decode(), "text/plain": ["<Figure>"]}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    plt.close("all")
    return outputs


if __name__ == "__main__":
    for chosen in sys.argv[1:] or names():
        run(chosen)
