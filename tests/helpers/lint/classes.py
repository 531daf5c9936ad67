"""How deep the classes of a package inherit, read from its source: nothing is imported."""
import ast
from pathlib import Path


def chains(root, package="tkq"):
    """``{"module.Class": (that, its base, the base's base, ...)}`` of the classes below ``root / package``.

    Of several chains, the longest. Classes of other packages are not in it. Names are followed through imports, also
    through modules that only pass a class on.
    """
    return _Package(Path(root), package).chains()


def statements(tree):
    """All of a syntax tree, at any depth: a class is one of them, and so is an import."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting.extend(getattr(node, part, ()))


class _Package:
    def __init__(self, root, package):
        self.package = package
        self.modules = {}
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            self.modules[name] = _Module(name, is_package, ast.parse(path.read_text()))

    def chains(self):
        found = {}
        for module in self.modules.values():
            for name in module.classes:
                self._chain((module.name, name), found)
        return {chain[0]: chain for chain in found.values()}

    def _chain(self, key, found):
        if key not in found:
            module = self.modules[key[0]]
            bases = (self._resolve(module, base) for base in module.classes[key[1]])
            above = max((self._chain(base, found) for base in bases if base), key=len, default=())
            found[key] = (".".join(key), *above)
        return found[key]

    def _resolve(self, module, base):
        """(module, class) of a base as written, None of another package's. LookupError: ours, but not found."""
        base = base.value if isinstance(base, ast.Subscript) else base
        first, *rest = ast.unparse(base).split(".")
        if not rest and first in module.classes:
            return module.name, first
        dotted = ".".join([module.imports.get(first, first), *rest])
        if dotted.partition(".")[0] != self.package:
            return None
        owner, _, name = dotted.rpartition(".")
        if owner not in self.modules:
            raise LookupError(f"{module.name}: the base {ast.unparse(base)} is {dotted}, whose module is not found")
        if name not in self.modules[owner].classes:
            return self._resolve(self.modules[owner], ast.Name(name))
        return owner, name


class _Module:
    def __init__(self, name, is_package, tree):
        self.name = name
        self.classes = {node.name: node.bases for node in statements(tree) if isinstance(node, ast.ClassDef)}
        self.imports = {}  # the name here: the dotted name that it stands for
        parents = name.split(".") if is_package else name.split(".")[:-1]
        for node in statements(tree):
            if isinstance(node, ast.ImportFrom):
                start = parents[:len(parents) - node.level + 1] if node.level else []
                origin = ".".join([*start, *([node.module] if node.module else [])])
                self.imports.update({alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names})
            elif isinstance(node, ast.Import):
                self.imports.update({alias.asname: alias.name for alias in node.names if alias.asname})
