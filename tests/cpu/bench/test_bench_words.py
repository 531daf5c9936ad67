"""`python -m tkq bench`: operations are known wherever they stand among the options."""
from bench import __main__ as front


def test_operations_may_stand_anywhere():
    given = front.parse(["--quick", "rmsnorm", "--against", "torch.compile", "swiglu", "--sections", "forward"])
    assert given.ops == ["rmsnorm", "swiglu"] and given.against == ("torch.compile",)
    assert given.sections == ("forward",) and given.quick
