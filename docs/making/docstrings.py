"""Docstrings as pieces: prose, arguments with their meanings, mathematics, and examples.

A docstring of this library names its arguments in a section `Args:`, or in its text, at the beginning of a line or
after three spaces: `q, k: queries and keys, (B, T, G, K).   v: values.`
"""

import inspect
import re
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

MATH = ".. math::"
SECTION = "Args:"
NAMES = r"[*`\w]+(?:, [*`\w]+)*"
INLINE = re.compile(r":math:`([^`]*)`")


class Piece(NamedTuple):
    """A piece of a docstring. text: prose, LaTeX or a program; of arguments, each with its meaning after a colon."""

    kind: Literal["prose", "list", "math", "example", "code", "arguments"]
    text: str


def pieces(docstring: str | None, names: Collection[str] = ()) -> Iterator[Piece]:
    """Yield the pieces of a docstring. names: of the arguments that its text may explain."""
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring or "")):
        if not block.strip():
            continue
        if block.startswith(MATH):
            yield Piece("math", " ".join(block.removeprefix(MATH).split()))
        elif block.startswith(">>>"):
            yield Piece("example", block)
        elif block.startswith("    "):
            yield Piece("code", inspect.cleandoc(block))
        elif block.startswith("- "):
            yield Piece("list", "\n".join(" ".join(item.split()) for item in re.split(r"\n(?=- )", block)))
        elif block.startswith(SECTION):
            yield from _section(block)
        else:
            yield from _text(block, names)


def _section(block: str) -> Iterator[Piece]:
    """Yield the arguments of a section, and what stands below them at its margin."""
    first, *lines = block.split("\n")
    inside = [line for line in lines if line.startswith("    ")]
    if said := first.removeprefix(SECTION).strip():  # `Args: see Images`
        yield Piece("prose", f"Arguments: {' '.join([said, *map(str.strip, lines)])}")
        return
    starts = re.split(rf"\n(?=    {NAMES}: )", "\n".join(inside))
    entries = [entry for start in starts for entry in re.split(rf" {{3}}(?={NAMES}: )", start.strip())]
    yield Piece("arguments", "\n".join(" ".join(entry.split()) for entry in entries if entry.strip()))
    for line in lines[len(inside) :]:
        yield Piece("prose", line.strip())


def _text(block: str, names: Collection[str]) -> Iterator[Piece]:
    """Yield the prose of a block, then the arguments that it explains."""
    known = rf"(?:{'|'.join(map(re.escape, names))})" if names else "(?!)"
    start = rf"(?:(?<=\n)|(?<= {{3}})|^)(?={known}(?:, {known})*: )"
    prose, *entries = re.split(start, block)
    if prose.strip():
        yield Piece("prose", " ".join(prose.split()))
    if entries:
        yield Piece("arguments", "\n".join(" ".join(entry.split()) for entry in entries))


def markdown(found: Iterator[Piece]) -> list[str]:
    """Return pieces as paragraphs of Markdown."""
    paragraphs = []
    for kind, text in found:
        if kind == "math":
            lines = re.split(r",?\s*(?:\\q?quad|\\\\)\s*", text)
            paragraphs.append("\n".join([":::{math}", *filter(None, lines), ":::"]))
        elif kind == "example":
            paragraphs.append(f"```pycon\n{text}\n```")
        elif kind == "code":
            paragraphs.append(f"```text\n{text}\n```")
        elif kind == "arguments":
            paragraphs.append("\n".join(f"- {_entry(line)}" for line in text.splitlines()))
        elif kind == "list":
            paragraphs.append("\n".join(f"- {prose(line[2:])}" for line in text.splitlines()))
        else:
            paragraphs.append(prose(text))
    return paragraphs


def _entry(line: str) -> str:
    names, _, meaning = line.partition(": ")
    return ", ".join(f"`{name.strip('`*')}`" for name in names.split(", ")) + f": {prose(meaning)}"


def prose(text: str) -> str:
    """Return a text of a docstring as Markdown: what is not code or mathematics has no markup."""
    pieces = re.split(r"(`[^`]+`)", INLINE.sub(r"{math}`\1`", " ".join(text.split())))
    return "".join(
        piece if piece.startswith("`") else re.sub(r"([\\*_\[\]<>|$#~])", r"\\\1", piece) for piece in pieces
    )


def restructured(docstring: list[str], names: Collection[str] = ()) -> list[str]:
    """Return the lines of a docstring as reStructuredText, for Sphinx's autodoc. names: as in `pieces`."""
    lines: list[str] = []
    for kind, text in pieces("\n".join(docstring), names):
        if kind == "math":
            lines += [f"{MATH} {text}"]
        elif kind == "example":
            lines += text.splitlines()
        elif kind == "code":
            lines += ["::", "", *(f"    {line}" for line in text.splitlines())]
        elif kind in ("arguments", "list"):
            lines += [f"- {_plain(line.removeprefix('- '))}" for line in text.splitlines()]
        else:
            lines += [_plain(text)]
        lines.append("")
    return lines


def _plain(text: str) -> str:
    """Return prose as reStructuredText: what is not code or mathematics has no markup."""
    parts = re.split(r"(:math:`[^`]*`|`[^`]+`)", text)
    return "".join(
        part
        if part.startswith(":math:")
        else f"`{part}`"
        if part.startswith("`")
        else re.sub(r"([\\*_|`])", r"\\\1", part)
        for part in parts
    )
