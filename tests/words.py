"""Counts of words that hide what a value is, and of inverted grammar, each held to a budget of `words.toml`.

python tests/words.py            fails for a count over its budget, or under it
python tests/words.py --lower    writes lower budgets where the counts are lower
"""

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "scanl"
BUDGETS = Path(__file__).with_suffix(".toml")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

Words = dict[str, list[str]]  # kind -> words
Places = dict[tuple[str, str], list[int]]  # kind, word -> lines


def identifiers(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Yield what the module defines: "value" or "definition", the name without leading underscores, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield "value", node.id.lstrip("_"), node.lineno
        elif isinstance(node, ast.arg):
            yield "value", node.arg.lstrip("_"), node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield "definition", node.attr.lstrip("_"), node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield "definition", node.name.lstrip("_"), node.lineno


def prose(text: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the docstrings and the blocks of comments, without line breaks, with their first lines."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)) is not None:
            yield " ".join(docstring.split()), node.body[0].lineno
    block, start, previous = [], 0, -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if line != previous + 1:
                yield " ".join(block), start
                block, start = [], line
            block.append(token.string.lstrip("# "))
            previous = line
    yield " ".join(block), start


def occurrences(text: str, words: Words, stem: str = "") -> Places:
    """Return the lines of a module's text where each word of each kind occurs."""
    tree = ast.parse(text)
    lines: Places = defaultdict(list)
    british = re.compile("|".join(words["british"]), re.IGNORECASE)
    for kind, name, line in [("definition", stem, 1), *identifiers(tree)]:
        if kind == "value" and name in words["names"]:
            lines["names", name].append(line)
        for root in british.findall(name):
            lines["british", root.lower()].append(line)
    phrases = re.compile(rf"\b(?:{'|'.join(words['phrases'])})\b", re.IGNORECASE)
    if phrases.search(re.sub(r"[\s#]+", " ", text)):  # the tokens of a file take long
        for paragraph, line in prose(text, tree):
            for phrase in phrases.findall(paragraph):
                lines["phrases", phrase.lower()].append(line)
    return lines


def complaints(places: dict[tuple[str, str], list[str]], budgets: dict[str, dict[str, int]]) -> list[str]:
    """Return a line for each count that is not its budget."""
    messages = []
    for kind, budget in budgets.items():
        for word, number in budget.items():
            where = places.get((kind, word), [])
            count = f"{kind}: {word!r} occurs {len(where)} times in src/scanl, its budget is {number}"
            if len(where) > number:
                messages.append(f"{count}; say it with a noun or in plain words: {', '.join(sorted(where))}")
            elif len(where) < number:
                messages.append(f"{count}; lower the budget: python tests/words.py --lower")
    return messages


def everywhere(budgets: dict[str, dict[str, int]]) -> dict[tuple[str, str], list[str]]:
    """Return where each word of the budgets occurs, as FILE:LINE."""
    words = {kind: list(budget) for kind, budget in budgets.items()}
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for key, lines in occurrences(path.read_text("utf-8"), words, path.stem).items():
            places[key] += [f"{path.relative_to(SOURCE.parents[1])}:{line}" for line in lines]
    return places


def lower(places: dict[tuple[str, str], list[str]], budgets: dict[str, dict[str, int]]) -> None:
    """Write the counts that are under their budgets as the new budgets."""
    text = BUDGETS.read_text("utf-8")
    for kind, budget in budgets.items():
        head, mark, body = text.partition(f"[{kind}]")
        for word, number in budget.items():
            fewer = min(number, len(places.get((kind, word), [])))
            body = re.sub(rf'^("?{re.escape(word)}"?) = \d+$', rf"\1 = {fewer}", body, count=1, flags=re.MULTILINE)
        text = head + mark + body
    BUDGETS.write_text(text, "utf-8")


if __name__ == "__main__":
    budgets = tomllib.loads(BUDGETS.read_text("utf-8"))
    places = everywhere(budgets)
    if sys.argv[1:] == ["--lower"]:
        lower(places, budgets)
        budgets = tomllib.loads(BUDGETS.read_text("utf-8"))
    messages = complaints(places, budgets)
    print("\n".join(messages), file=sys.stderr)
    raise SystemExit(bool(messages))
