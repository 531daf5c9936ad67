"""The sentences of a docstring's "Raises" that a table decides."""
from __future__ import annotations

from .kinds import END, plain
from .tables import TABLES


def raises(op: str) -> dict[str, str]:
    """{error: clauses that the docstring has for it, one behind the other}: TypeError, and ValueError where an argument
    has values that are not allowed. What may be None is said by the signature."""
    arguments = TABLES[op]
    types = _clauses((a.name, _type(a)) for a in arguments if a.kind != "other")
    values = _clauses((a.name, words) for a in arguments for words in [_range(a)] if words)
    if any(a.kind == "number" for a in arguments):
        values.append("a number that is not finite" + " in float32" * all(
            a.end <= END for a in arguments if a.kind == "number"))
    found = {"TypeError": "; ".join(types)}
    return found | ({"ValueError": "; ".join(values)} if values else {})


def _clauses(pairs) -> list[str]:
    """Names of which the same is to be said, together."""
    groups: dict[str, list] = {}
    for name, words in pairs:
        groups.setdefault(words, []).append(name)
    return [f"{_listed(names)} {words}" for words, names in groups.items()]


def _type(a) -> str:
    if a.kind == "tensor":
        return f"is no dense tensor of {_listed(a.dtypes)}"
    if a.kind == "dtype":
        return f"is not {_listed(a.dtypes)}"
    if a.kind == "integer" and a.dtypes:
        return f"is no int or tensor of {_listed(a.dtypes)}"
    if a.scales:
        return "is no word or ScalingType"
    return {"flag": "is no bool", "number": "is no number", "integer": "is no int", "choice": "is no word",
            "function": "is no word or function", "window": "is no pair of ints and None",
            "limits": "is no pair of numbers", "device": "is no device"}[a.kind]


def _range(a) -> str:
    if a.error is not ValueError:
        return ""
    if a.kind == "choice":
        return "is another word"
    if a.kind == "window":
        return f"has a number outside {plain(a.low)} to {plain(a.high)}"
    if a.kind == "limits":
        return "has NaN, descends or is finite and infinite in float32"
    if a.kind == "device":
        return "is one that is not there"
    if a.high is not None:
        return f"is outside {plain(a.low)} to {plain(a.high)}"
    if a.low is None:
        return ""
    return f"is not above {plain(a.low)}" if a.above else f"is below {plain(a.low)}"


def _listed(names) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
