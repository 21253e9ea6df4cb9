"""The messages of jsonargparse, in our form."""

import re

from scanl.options import WORDS

IN_WORDS = {kind.__name__: words.lower() for kind, words in WORDS.items() if isinstance(kind, type)}


def in_a_line(text: str) -> str:
    """Shorten jsonargparse's message to one line. Rewrite its message about a value of a wrong type."""
    text = " ".join(text.split())
    wrong = re.match(r'Parser key "([\w.]+)"(?: element \d+)?:.*(?:Got|Given) value: (.*)$', text)
    if wrong is None:
        return text
    kinds = [IN_WORDS.get(str(kind), str(kind)) for kind in re.findall(r"Expected a <class '(\w+)'>", text)]
    return f"{wrong[1].rpartition('.')[2]} is {wrong[2]}, expected {' or '.join(kinds)}"
