"""What layers are based on, as BibTeX, from the text of their source.

A source is a list, separated by semicolons, of `Authors, "Title", where it appeared, arXiv:0000.00000, eq. (1)`. An
entry without a title in quotes says more about another one, or names no paper at all.
"""

import re
from dataclasses import dataclass

# What says where in a paper, or what else was read, and is no part of the reference.
PLACES = re.compile(
    r"(?:eq\.|sec\.|sections?|algorithms?|appendix|lemma|prop\.|theorems?|figure|listing|Methods|its |and |as |with |"
    r"where |the |\(|\d+(?:\.\d+)*(?: |$)|neurons |in |for |chapter |task )"
)
BEFORE = re.compile(r"^(?:[a-z].*\b(?:in|of|after)|after) (?=[A-Z])")  # `protocol of Zeng et al.`, `as in Goel et al.`
ARXIV = re.compile(r"arXiv:\d{4}\.\d{4,5}(?:v\d+)?")
BLOCK = "Linear RNN base block"  # what this library itself is the source of
LIBRARY = "@software{scanl,\n  title = {{scanl: recurrent sequence models for PyTorch}},\n}"


@dataclass(frozen=True)
class Reference:
    """A paper or a book. authors: as the source has them.   where: what remains: a journal, a publisher."""

    authors: str
    title: str
    where: str
    year: str
    arxiv: str
    url: str

    @property
    def key(self) -> str:
        first = re.split(r",| and | et al\.| [Tt]eam$", self.authors)[0].split()
        words = [word for word in re.findall(r"\w+", self.title) if len(word) > 3] or [self.title]
        return re.sub(r"\W", "", f"{(first or ['anonymous'])[-1]}{self.year}{words[0]}".lower())

    def bibtex(self) -> str:
        fields = {
            "author": self._authors(),
            "title": f"{{{self.title}}}",
            "year": self.year,
            "howpublished": self.where,
            "eprint": self.arxiv,
            "archivePrefix": "arXiv" if self.arxiv else "",
            "url": self.url or (f"https://arxiv.org/abs/{self.arxiv}" if self.arxiv else ""),
        }
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
        return "\n".join([f"@misc{{{self.key},", *lines, "}"])

    def _authors(self) -> str:
        names = re.sub(r",? et al\.", ", others", self.authors)
        if re.search(r"\b[Tt]eam$", names):
            return f"{{{names}}}"  # one name, not a first and a last name
        return " and ".join(name for name in re.split(r", and |, | and ", names) if name)


def bibtex(source: str) -> str:
    """Return the BibTeX entries of a source; "" where it names no paper."""
    if source.startswith(BLOCK):
        return LIBRARY
    return "\n\n".join(reference.bibtex() for reference in references(source))


def references(source: str) -> list[Reference]:
    """Return the papers and books of a source whose title it says."""
    return [reference for entry in _entries(source) if (reference := _read(entry))]


def _entries(source: str) -> list[str]:
    """Return the entries: semicolons in titles separate nothing."""
    return re.split(r"; (?=(?:[^\"]*\"[^\"]*\")*[^\"]*$)", source)


def _read(entry: str) -> Reference | None:
    match = re.fullmatch(r'(?:(?P<authors>[^"]*?),? )?"(?P<title>[^"]+)"(?:, )?(?P<rest>.*)', entry)
    if match is None:
        return None
    before = match["authors"] or ""
    authors = BEFORE.sub("", before.rpartition(": ")[2])  # `wiring: Lechner et al.`
    authors, arxiv_before = _cut(authors, ARXIV)
    rest, arxiv = _cut(match["rest"], ARXIV)
    arxiv = arxiv or arxiv_before
    rest, url = _cut(rest, re.compile(r"https?://\S+"))
    pieces = rest.split(", ")
    years = [piece for piece in pieces if re.fullmatch(r"\d{4}", piece)]
    left_out = {"", *years, *(piece for piece in pieces if PLACES.match(piece) or ARXIV.match(piece))}
    where = ", ".join(piece for piece in pieces if piece not in left_out)
    named = re.search(r"\b(?:19|20)\d{2}$", where)  # `ICML 2023`
    year = years[0] if years else named[0] if named else f"20{arxiv[:2]}" if arxiv and not where else ""
    return Reference(authors.strip(", "), match["title"], where, year, arxiv, url)


def _cut(text: str, pattern: re.Pattern[str]) -> tuple[str, str]:
    """Return a text without what fits the pattern, and that."""
    match = pattern.search(text)
    if match is None:
        return text, ""
    cut = (text[: match.start()] + text[match.end() :]).strip(", ")
    return cut, match[0].removeprefix("arXiv:")
