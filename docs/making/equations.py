"""Equations of layers, which are plain text, as LaTeX and as text for a drawing.

`h_t = a_t * h_{t-1} + sqrt(1 - a_t^2) * x_t,  a_t = sigmoid(W x_t)` has two equations, which a comma or a semicolon and
two spaces separate. `*` is the product of elements. Words that are no names of functions are words.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

LATIN = (
    "alpha beta gamma delta epsilon eps eta theta kappa lambda mu nu pi rho sigma tau phi omega Delta Theta Lambda Pi"
)
GREEK = dict(zip(LATIN.split(), "αβγδεεηθκλμνπρστφωΔΘΛΠ", strict=True))
NAMED = {"eps": "epsilon"}
SIGNS = {  # text -> LaTeX, text of a drawing
    "...": (r"\dots ", "…"),
    "..": (r"\dots ", "…"),
    "+=": ("\\mathrel{+}= ", " += "),
    "<=": (r"\le ", " ≤ "),
    ">=": (r"\ge ", " ≥ "),
    "<-": (r"\leftarrow ", " ← "),
    "(x)": (r"\otimes ", " ⊗ "),
    "*": (r"\odot ", " ⊙ "),
    "=": ("=", " = "),
    "+": ("+", " + "),
    "-": ("-", " − "),
    "<": ("<", " < "),
    ">": (">", " > "),
    ",": (",\\ ", ", "),
    ";": (";\\ ", "; "),
    ":": (":\\ ", ": "),
    ".": (r"\cdot ", "·"),
}
WORDS = {"sum": (r"\sum ", "Σ"), "prod": (r"\prod ", "Π"), "grad": (r"\nabla ", "∇"), "conv": (r"\ast ", " ∗ ")}
LOWERED = str.maketrans("0123456789hijklmnprst+−", "₀₁₂₃₄₅₆₇₈₉ₕᵢⱼₖₗₘₙₚᵣₛₜ₊₋")  # below what stands above
DIFFERENTIALS = {"dt", "dh", "dv", "dW", "dz", "ds"}
TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<quoted>`[^`]+`)|(?P<snake>[a-z]{2,}(?:_[a-z]{2,})+|fixed-point|mini-batch)|(?P<word>[A-Za-z]+)|(?P<number>\d+(?:\.\d+)?)"
    r"|(?P<sign>\.\.\.|\.\.|\+=|<=|>=|<-|(?<=\s)\(x\)(?=\s)|.)"
)


@dataclass
class Atom:
    """A symbol with what stands below and above it.

    latex and text: how it is written.   inner: symbols between `text` and `close`.   word: whether it is prose.
    """

    latex: str
    text: str
    inner: "list[Atom] | None" = None
    close: str = ""
    below: "list[Atom] | None" = None
    above: "list[Atom] | None" = None
    word: bool = False


def split(equation: str) -> list[str]:
    """Return the equations of a layer."""
    return [line.strip() for line in re.split(r"[,;]\s{2,}", " ".join(equation.split("\n"))) if line.strip()]


def latex(equation: str) -> str:
    """Return one equation as LaTeX."""
    return _latex(parse(equation))


def spans(equation: str) -> list[tuple[str, int]]:
    """Return one equation as pieces of text, each with its height: 0, -1 below the line or 1 above it."""
    return list(_spans(parse(equation), 0))


def parse(text: str, script: bool = False) -> list[Atom]:
    """Return the symbols of a text. script: whether it stands below or above another."""
    atoms: list[Atom] = []
    at, spaced = 0, True
    while at < len(text):
        sign = text[at]
        if sign in "_^" and atoms:
            inner, at = _script(text, at + 1)
            base, name = atoms[-1], "below" if sign == "_" else "above"
            if getattr(base, name) is not None:  # x^r_{t-1}^T: a second one is of the whole
                base = atoms[-1] = Atom(f"{{{_latex([base])}}}", "", [base])
            if sign == "_" and inner == "hat":
                base.latex, base.text = rf"\hat{{{base.latex}}}", base.text + "\u0302"
            else:
                setattr(base, name, [Atom(r"\top ", "T")] if inner == "T" and sign == "^" else parse(inner, True))
            continue
        if sign == "'" and atoms:
            atoms[-1].latex, atoms[-1].text = atoms[-1].latex.rstrip() + "'", atoms[-1].text + "′"
            at += 1
            continue
        match = TOKEN.match(text, at)
        assert match is not None
        token, after = match[0], text[match.end() :]
        before = text[at - 1] if at else " "
        at = match.end()
        if match["space"]:
            spaced = True
            continue
        if token == "sqrt" and after.startswith("("):
            inner, at = _group(text, at)
            opening, close = ("√", "") if inner.isalnum() else ("√(", ")")
            atoms.append(Atom(rf"\sqrt{{{latex(inner)}}}", opening, parse(inner), close))
        elif match["quoted"] or match["snake"]:
            name = token.strip("`")  # in \text an underscore is a letter
            atoms.append(Atom(rf"\text{{{name}}}", name, word=not after.startswith("(")))
        elif match["word"]:
            atoms.append(_word(token, after, script, bool(atoms) and atoms[-1].word))
        elif token == "<" and before in " (" and after[:1].isalpha():
            atoms.append(Atom(r"\langle ", "⟨"))
        elif token == ">" and before.isalnum() and after[:1] in " )":
            atoms.append(Atom(r"\rangle ", "⟩"))
        elif token == "*" and not spaced:
            atoms[-1].above = [Atom("*", "*")]
        elif token in SIGNS:
            shown = SIGNS[token]
            unary = token == "-" and (not atoms or atoms[-1].text.rstrip()[-1:] in "([=,;|≤<−+")
            atoms.append(Atom(shown[0], shown[1].strip() if unary or script else shown[1]))
        else:
            atoms.append(Atom({"{": r"\{", "}": r"\}", "|": "|", "%": r"\%"}.get(token, token), token))
        spaced = False
    return atoms


def _word(token: str, after: str, script: bool, in_prose: bool) -> Atom:
    """Return a name or a word as a symbol."""
    called = after[:1] in ("(", "_", "^", "'") and bool(after)
    if token in GREEK:
        return Atom(f"\\{NAMED.get(token, token)} ", GREEK[token])
    if script and token == "in" and after.strip():
        return Atom(r"\in ", " ∈ ")
    if token in WORDS and not (token == "conv" and called):
        return Atom(*WORDS[token])
    prose_article = token == "a" and (in_prose or re.match(r" [a-z]{3,}\b(?![_(])", after) is not None)
    letters = len(token) == 1 and not prose_article
    if letters or token in DIFFERENTIALS or (script and len(token) == 2 and token != "in"):
        return Atom(token if len(token) == 1 else f"{{{token}}}", token)
    if called or not token.islower() or (script and " " not in after):
        return Atom(rf"\operatorname{{{token}}}", token)
    return Atom(rf"\text{{{token}}}", token, word=True)


def _script(text: str, at: int) -> tuple[str, int]:
    """Return what stands below or above, and the place after it."""
    if text[at] in "{(":
        return _group(text, at)
    match = re.compile(r"-?(?:[A-Za-z]+|\d+)|.").match(text, at)
    assert match is not None
    end = match.end()
    if match[0] == "max" and text[end : end + 1] == "(":
        inner, end = _group(text, end)
        return f"max({inner})", end
    return match[0], end


def _group(text: str, at: int) -> tuple[str, int]:
    """Return what the brackets at a place hold, and the place after them."""
    opening, closing = text[at], {"{": "}", "(": ")"}[text[at]]
    depth = 0
    for end in range(at, len(text)):
        depth += (text[end] == opening) - (text[end] == closing)
        if depth == 0:
            return text[at + 1 : end], end + 1
    raise ValueError(f"{text!r}: {opening} at {at} is not closed")


def _latex(atoms: list[Atom]) -> str:
    pieces: list[str] = []
    for i, atom in enumerate(atoms):
        if atom.word:
            pieces.append(_apart(atoms, i) * "\\ " + atom.latex + _apart_after(atoms, i) * "\\ ")
            continue
        below = f"_{{{_latex(atom.below)}}}" if atom.below else ""
        above = f"^{{{_latex(atom.above)}}}" if atom.above else ""
        pieces.append(
            f"{atom.latex}{below}{above}" if not atom.latex.endswith("'") else f"{{{atom.latex}}}{below}{above}"
        )
        if i + 1 < len(atoms) and pieces[-1][-1:].isalpha():
            pieces.append(" ")
    return "".join(pieces)


def _spans(atoms: list[Atom], level: int) -> Iterator[tuple[str, int]]:
    for i, atom in enumerate(atoms):
        if atom.word:
            yield f"{' ' * _apart(atoms, i)}{atom.text}{' ' * _apart_after(atoms, i)}", level
            continue
        follows = i and _ends_open(atoms[i - 1]) and (atom.text[:1].isalpha() or atom.text[:1] in "√Σ⟨")
        yield (" " if follows and level == 0 else "") + atom.text, level
        yield from _spans(atom.inner or [], level)
        if atom.close:
            yield atom.close, level
        for inner, way in ((atom.below, -1), (atom.above, 1)):
            for text, _ in _spans(inner or [], level or way):
                yield (text.translate(LOWERED) if level and way < 0 else text), level or way


def _apart(atoms: list[Atom], i: int) -> bool:
    """Whether a space must stand before the word at i."""
    return i > 0 and not atoms[i - 1].text.endswith((" ", "(", "["))


def _apart_after(atoms: list[Atom], i: int) -> bool:
    return i + 1 < len(atoms) and not atoms[i + 1].word and atoms[i + 1].text[0] not in " ,;:)]"


def _ends_open(atom: Atom) -> bool:
    """Whether a space must stand between a symbol and a name after it."""
    if atom.text in ("Σ", "Π", "∇"):
        return atom.below is not None
    return not atom.word and (atom.text[-1:].isalnum() or atom.text[-1:] in ")]′")
