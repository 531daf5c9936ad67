"""What to compile, written down: needs neither torch nor the DSL."""
from __future__ import annotations

from dataclasses import dataclass, field

from .expectation import Expectation


@dataclass(frozen=True)
class Recipe:
    """A kernel to be built: its builder and the builder's arguments. ``repr(args)`` and the options are its compile
    key, beside sources; of tkq's own dataclasses the fields that differ from their defaults.

    builder: ``"package.module:Kernel"``. The module is imported only when a compile is needed. ``Kernel(*args)`` is a
        jit callable, whose method ``fake_arguments()`` returns the tuple of what it is compiled for. One tensor
        at least is an argument by itself, not in a tuple: the kernel runs on the GPU of the first such. In a class's
        place a function may stand that returns both. A callable that takes one argument more gets torch's current
        stream there; a host function that takes none gets none.
    args: frozen dataclasses, strings, numbers, None, or tuples of them: their ``repr`` must be complete.
    options: more words for the DSL's compiler, as in ``cute.compile(options=)``.
    sources: more modules, by name, whose files decide the machine code: a new one means a new compile. Those of the
        builder and of the classes in args count always, with what they import from tkq and from their own packages.
    """

    builder: str
    args: tuple = ()
    options: str = ""
    sources: tuple = ()

    def __post_init__(self):
        module, colon, name = self.builder.partition(":")
        if not (module and colon and name.isidentifier()):
            raise ValueError(f"Recipe: builder is {self.builder!r}, allowed is 'package.module:Kernel'")
        if not isinstance(self.args, tuple) or not isinstance(self.sources, tuple):
            raise TypeError(f"Recipe: args and sources must be tuples, got {self.args!r} and {self.sources!r}")
        if " at 0x" in repr(self.args):
            raise TypeError(f"Recipe: repr(args) is the compile key, and has an address: {self.args!r}")

    @property
    def module(self) -> str:
        """The builder's module."""
        return self.builder.partition(":")[0]


@dataclass(frozen=True)
class Shipped:
    """A kernel that tkq itself can choose, and what its machine code must show.

    quick: in the subset that the tests compile by default."""

    name: str
    recipe: Recipe
    expectation: Expectation = field(default_factory=Expectation)
    quick: bool = False
