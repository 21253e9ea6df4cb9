"""Write what comes from the code into the pages of docs/: `make docs`.

docs/layers.md as a whole, and the table of each page in TABLES.
"""

import re
from collections.abc import Callable
from pathlib import Path

from scanl.cli import accelerate, data, layers, ops

DOCS = Path(__file__).parent
TABLES: dict[str, Callable[[], str]] = {"data.md": data.table, "hub.md": accelerate.table, "ops.md": ops.table}


def pages() -> dict[Path, str]:
    """Each page that has something from the code, as it should read."""
    written = {DOCS / "layers.md": layers.page()}
    for name, table in TABLES.items():
        text = (DOCS / name).read_text(encoding="utf-8")
        written[DOCS / name] = with_table(text, table())
    return written


def with_table(text: str, table: str) -> str:
    """The text with its table of the same header replaced."""
    header = table.splitlines()[0]
    text, count = re.subn(rf"^{re.escape(header)}\n(?:\|.*\n)*", lambda _: f"{table}\n", text, flags=re.MULTILINE)
    assert count == 1, f"{count} tables begin with {header}"
    return text


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
