"""The table of the functions of flash-linear-attention, made from their headers."""

from importlib import import_module

from scanl.compat.calls import FUNCTIONS, KERNEL, FlaFunction


def table() -> str:
    """Return a row for each recurrence: its functions, our op, and which arguments are ignored and refused."""
    import_module("scanl.compat.fla")  # which registers them
    groups: dict[str, list[FlaFunction]] = {}
    for function in FUNCTIONS.values():
        groups.setdefault(function.body.__name__.removeprefix("parallel_"), []).append(function)
    rows = ["| functions | op | ignored | refused |", "| --- | --- | --- | --- |"]
    for functions in groups.values():
        ignored = {name for function in functions for name in (*function.ignored, *function.more) if name in KERNEL}
        refused = {name for function in functions for name in function.refused}
        names = [function.name for function in functions], [functions[0].op], sorted(ignored), sorted(refused)
        rows.append(f"| {' | '.join(map(_code, names))} |")
    return "\n".join(rows)


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
