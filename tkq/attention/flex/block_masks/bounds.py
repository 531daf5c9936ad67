"""What a mask is over a whole block, from bounds of its parts: the elements of most blocks need not be looked at.

What depends on a query alone, or on a key alone, has bounds that are found by looking: a block has few of either. What
depends on both has those of interval arithmetic (Moore, 1966), of the operations that masks are mostly made of; of
others it may be anything. Bounds hold always; they need not be tight. Python's numbers are taken as well as a
kernel's."""
from typing import Any, NamedTuple

from tkq.attention.flex.emit import select

BOTH = frozenset(("q", "kv"))
WIDE = 1 << 61  # sums and differences of int64 up to it are no longer than 64 bits
LIMITS = {"i32": 1 << 31, "i64": 1 << 63, "f32": 1 << 31}  # a float by its place in their order, int32: see ``parts``


class Bounds(NamedTuple):
    """low, high: no value is below, none above. Of a bool: is it true everywhere, may it be true somewhere?"""

    low: Any
    high: Any


class Kinds(NamedTuple):
    """Of what bounds are made: a 64-bit integer and a bool. place: of an integer as a float in the floats' order, see
    ``LIMITS``."""

    whole: Any
    truth: Any
    place: Any


def parts(graph) -> dict:
    """{node: what it depends on of "q" and "kv"}: of the nodes that depend on at most one of both, and are taken by one
    that depends on both or are the result. In order."""
    depends = [BOTH & of for of in graph.inputs_of()]
    found = {a for i, of in enumerate(depends) if of == BOTH for a in graph.operands(i) if depends[a] != BOTH}
    last = len(graph.nodes) - 1
    if depends[last] != BOTH:
        found.add(last)
    return {i: "".join(depends[i]) for i in sorted(found)}


def over_block(graph, known: dict, kinds: Kinds) -> Bounds:
    """The result's, a bool. known: the bounds of ``parts``."""
    found, depends = dict(known), graph.inputs_of()
    for i, node in enumerate(graph.nodes):
        if i not in found and depends[i] >= BOTH:
            of = graph.operands(i)
            found[i] = _bounds(node, [found[a] for a in of], [graph.nodes[a].type for a in of], kinds)
    return found[len(graph.nodes) - 1]


def _bounds(node, args, types, kinds) -> Bounds:
    op, numbers = node.op, types[0] != "bool"
    if op == "where":
        return _chosen(node.type == "bool", *args)
    known = _KNOWN.get((node.type, numbers), {})
    # an int64 may wrap around as int32; a float's bounds are places, not numbers
    if op not in known or (op, node.type, types[0]) in _OPEN_CASTS:
        return anything(node.type, kinds)
    found = known[op](*args, kinds)
    return _within(node.type, found, args, kinds) if op in _SUMS else found


def anything(type: str, kinds: Kinds) -> Bounds:
    """Of a node of which nothing is known."""
    if type == "bool":
        return Bounds(kinds.truth(False), kinds.truth(True))
    return Bounds(kinds.whole(-LIMITS[type]), kinds.whole(LIMITS[type] - 1))


def _within(type, found, args, kinds):
    """Bounds of a sum, or those of its type where it may wrap around."""
    whole, top = kinds.whole, anything(type, kinds)
    checked, limit = ([found], LIMITS[type]) if type == "i32" else (args, WIDE)
    fits = None
    for low, high in checked:
        one = (low >= whole(-limit)) & (high < whole(limit))
        fits = one if fits is None else fits & one
    return Bounds(select(fits, found.low, top.low), select(fits, found.high, top.high))


def _least(a, b):
    return select(a < b, a, b)


def _most(a, b):
    return select(a > b, a, b)


def _chosen(truths, condition, a, b):
    """Of one of two, or of either. truths: are they bools?"""
    if truths:
        low, high = a.low & b.low, a.high | b.high
    else:
        low, high = _least(a.low, b.low), _most(a.high, b.high)
    of = lambda first, second, both: select(condition.low, first, select(condition.high, both, second))
    return Bounds(of(a.low, b.low, low), of(a.high, b.high, high))


def _not(a, kinds):
    return Bounds(a.high ^ kinds.truth(True), a.low ^ kinds.truth(True))


def _xor(a, b, kinds):
    not_a, not_b = _not(a, kinds), _not(b, kinds)
    return Bounds((a.low & not_b.low) | (b.low & not_a.low), (a.high & not_b.high) | (b.high & not_a.high))


def _equal(a, b, kinds):
    return Bounds((a.low == b.high) & (a.high == b.low), (a.low <= b.high) & (b.low <= a.high))


def _abs(a, kinds):
    return Bounds(_most(_most(a.low, -a.high), kinds.whole(0)), _most(-a.low, a.high))


_COMPARED = {
    "lt": lambda a, b, kinds: Bounds(a.high < b.low, a.low < b.high),
    "le": lambda a, b, kinds: Bounds(a.high <= b.low, a.low <= b.high),
    "gt": lambda a, b, kinds: Bounds(a.low > b.high, a.high > b.low),
    "ge": lambda a, b, kinds: Bounds(a.low >= b.high, a.high >= b.low),
    "eq": _equal, "ne": lambda a, b, kinds: _not(_equal(a, b, kinds), kinds)}
_LOGICAL = {
    "and": lambda a, b, kinds: Bounds(a.low & b.low, a.high & b.high),
    "or": lambda a, b, kinds: Bounds(a.low | b.low, a.high | b.high),
    "xor": _xor, "ne": _xor, "eq": lambda a, b, kinds: _not(_xor(a, b, kinds), kinds), "not": _not}
_SUMS = {
    "add": lambda a, b, kinds: Bounds(a.low + b.low, a.high + b.high),
    "sub": lambda a, b, kinds: Bounds(a.low - b.high, a.high - b.low),
    "neg": lambda a, kinds: Bounds(-a.high, -a.low), "abs": _abs}
_WHOLE = {
    **_SUMS, "cast": lambda a, kinds: a,
    "min": lambda a, b, kinds: Bounds(_least(a.low, b.low), _least(a.high, b.high)),
    "max": lambda a, b, kinds: Bounds(_most(a.low, b.low), _most(a.high, b.high))}
_FLOATS = {"cast": lambda a, kinds: Bounds(*map(kinds.place, a))}  # rounding keeps the order
_OPEN_CASTS = ("cast", "i32", "i64"), ("cast", "i32", "f32"), ("cast", "i64", "f32")  # to and from
# (type, are the operands numbers?) -> what is known of operations
_KNOWN = {("bool", True): _COMPARED, ("bool", False): _LOGICAL, ("f32", True): _FLOATS, ("i32", True): _WHOLE,
          ("i64", True): _WHOLE}
