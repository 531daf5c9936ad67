"""The small calls that run under a sanitizer take a kernel of every kind that tkq ships: found out by a dry_run, as
there is no GPU here."""
import json

from tests.helpers.process import fresh

REHEARSED = """
import json
from tkq.runtime.compile import dry_run

dry_run.begin()
from tests.helpers.sanitizer import calls as sanitized, attention_calls as sanitized_attention, segment_calls

for family in (*sanitized.FAMILIES.values(), *sanitized_attention.FAMILIES.values(),
               *segment_calls.FAMILIES.values()):
    for case in family("meta"):
        pass
print(json.dumps(sorted({(r.builder, *(type(arg).__name__ for arg in r.args)) for r in dry_run.taken()})))
"""


def test_a_kernel_of_each_kind_is_run():
    """A kind: its builder, and from specs and configurations of which classes."""
    from tkq.warmup import catalog

    done = fresh.run(REHEARSED, imports="torch, cutlass.cute")
    assert done.returncode == 0, done.stderr[-2000:]
    taken = {tuple(kind) for kind in json.loads(done.stdout.splitlines()[-1])}
    kinds = {(k.recipe.builder, *(type(arg).__name__ for arg in k.recipe.args)) for k in catalog.shipped()}
    assert len(kinds) > 25 and not kinds - taken
