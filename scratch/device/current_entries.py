import os, sys, pathlib, glob, pickle, base64, shutil
sys.path.insert(0, os.getcwd())
from tkq import catalog, models
from tkq.runtime import keys
store = pathlib.Path("/tmp/cache-tile"); out = pathlib.Path("/tmp/cache-b")
shutil.rmtree(out, ignore_errors=True); out.mkdir()
rs = {k.recipe for k in catalog.shipped()} | {k.recipe for k in models.kernels(["llama-1b"])}
bad = 0
for f in glob.glob("/tmp/plan/collect/[rs]_*.txt"):
    for l in open(f).read().split("\n"):
        if l:
            try: rs.add(pickle.loads(base64.b64decode(l)))
            except Exception: bad += 1
names = {}
for p in store.iterdir(): names.setdefault(p.name.rsplit(".",1)[0] if "." in p.name else p.name, []).append(p)
n = lack = 0
for r in rs:
    try: e = keys.entry_name(r)
    except Exception: bad += 1; continue
    hit = names.get(e) or names.get(e.rsplit(".",1)[0])
    if not hit: lack += 1; continue
    for p in hit:
        if not (out / p.name).exists(): os.link(p, out / p.name); n += 1
print(len(rs), "packed", n, "lack", lack, "bad", bad)
