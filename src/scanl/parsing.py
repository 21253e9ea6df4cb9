"""The messages of jsonargparse, in our form."""

import re


def in_a_line(text: str) -> str:
    """Shorten jsonargparse's message to one line. Rewrite its message about a value of a wrong type."""
    text = " ".join(text.split())
    wrong = re.match(r'Parser key "([\w.]+)"(?: element \d+)?:.*(?:Got|Given) value: (.*)$', text)
    if wrong is None:
        return text
    kinds = [kind.replace("NoneType", "none") for kind in re.findall(r"Expected a <class '(\w+)'>", text)]
    return f"{wrong[1].rpartition('.')[2]} is {wrong[2]}, expected {' or '.join(kinds)}"
