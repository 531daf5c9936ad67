"""A contract type of import-linter: modules are named by what they do, so that a new file falls under it by itself.

    [[tool.importlinter.contracts]]
    type = "reach"
    sources = ["importers of cutlass", "modules *_plan"]    modules that import a package, or by the last part of a name
    forbidden = ["torch"]                                   what no chain of imports from a source may end at
    not_through = ["tkq.runtime"]                           packages that may: chains end there, and none begins there
    ignore_imports = ["a -> b"]                             as in import-linter's own contracts

A forbidden contract has the same meaning, but lists its sources by name.
"""
from fnmatch import fnmatchcase

from importlinter.application import contract_utils, output
from importlinter.application.contract_utils import AlertLevel
from importlinter.domain import fields
from importlinter.domain.contract import Contract, ContractCheck

_IMPORTERS, _MODULES = "importers of ", "modules "


class ReachContract(Contract):
    """No chain of imports leads from a source to a forbidden module."""

    type_name = "reach"
    sources = fields.ListField(subfield=fields.StringField())
    forbidden = fields.ListField(subfield=fields.StringField())
    not_through = fields.ListField(subfield=fields.StringField(), required=False, default=[])
    ignore_imports = fields.SetField(subfield=fields.ImportExpressionField(), required=False)
    unmatched_ignore_imports_alerting = fields.EnumField(AlertLevel, default=AlertLevel.ERROR)

    def check(self, graph, verbose):
        sources = sorted(set().union(*(matched(graph, source) for source in self.sources)))
        removal = contract_utils.remove_ignored_imports_and_report(
            graph=graph, ignore_imports=self.ignore_imports,
            unmatched_alerting=self.unmatched_ignore_imports_alerting)
        for package in self.not_through:
            for module in {package, *graph.find_descendants(package)}:
                graph.remove_module(module)
        chains = [chain for source in sources if source in graph.modules
                  for target in self.forbidden if target in graph.modules
                  if (chain := graph.find_shortest_chain(source, target))]
        return ContractCheck(kept=not chains, warnings=list(removal.warnings),
                             ignored_import_count=removal.ignored_import_count, metadata={"chains": chains})

    def render_broken_contract(self, check):
        for chain in check.metadata["chains"]:
            output.print_error(" -> ".join(chain))


def matched(graph, source):
    """The modules of ``graph`` that ``source`` means: ``"importers of P"`` or ``"modules PATTERN"``, at least one.

    ValueError: another form, or no such module: the rule would hold for nothing.
    """
    if source.startswith(_IMPORTERS):
        package = source.removeprefix(_IMPORTERS)
        modules = graph.find_modules_that_directly_import(package) if package in graph.modules else set()
    elif source.startswith(_MODULES):
        pattern = source.removeprefix(_MODULES)
        modules = {module for module in graph.modules if fnmatchcase(module.rpartition(".")[2], pattern)}
    else:
        raise ValueError(f"a source is {_IMPORTERS + 'P'!r} or {_MODULES + 'PATTERN'!r}, got {source!r}")
    if not modules:
        raise ValueError(f"no module is meant by {source!r}")
    return modules
