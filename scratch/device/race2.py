import sys, time, re
from concurrent.futures import ThreadPoolExecutor
from tests import sanitized, sanitized_attention
from tests.gpu import test_sanitizer as t
from tests.races import races, described
from tkq.testing import sass
def one(job):
    tool, cases, family = job
    begin = time.time()
    try:
        done = t.sanitized(tool, cases.__name__, family)
    except Exception as e:
        return f"{tool} {family}: {type(e).__name__} {str(e)[:200]}"
    raced = races(done.stdout)
    paths = re.findall(r"^kernels: (.*)", done.stdout, re.M) if raced and sass.nvdisasm() else []
    listings = [sass.by_address(path, tuple({race.kernel for race in raced})) for path in paths]
    new = [described(r, listings) for r in raced if not t.known(r, listings)]
    ok = f"ok  {family}" in done.stdout and "BAD" not in done.stdout and (done.returncode == 0 or (raced and done.returncode == t.FOUND))
    return f"{tool} {family}: rc {done.returncode} ok {bool(ok)} {len(raced)} races, not known {len(new)} {new[:3]} {time.time()-begin:.0f} s" + ("" if ok else done.stdout[-800:] + done.stderr[-400:])
jobs = [(tool, c, f) for c, f in ((sanitized_attention, "shared_heads"), (sanitized, "fp8"), (sanitized, "grouped"), (sanitized, "cross_entropy"), (sanitized, "gemm"), (sanitized, "linear")) for tool in ("racecheck", "memcheck")]
with ThreadPoolExecutor(14) as pool:
    for r in pool.map(one, jobs): print(r, flush=True)
