# . .dev2/lib.sh  in the project's root on the GPU machine. ALL: seconds that this call may last.
export PYTHONUNBUFFERED=1 ROOTDIR=$PWD
if [ ! -e /opt/tkq-env/.done ]; then mkdir -p /opt/tkq-env; cat /opt/env.a .dev2/env.b > /opt/env.tar.xz; python3 - <<'P' && touch /opt/tkq-env/.done
import lzma, tarfile
with lzma.open("/opt/env.tar.xz") as packed, tarfile.open(fileobj=packed, mode="r|") as tar:
    tar.extractall("/opt/tkq-env")
P
cp -n .dev2/libcuda_dialect_runtime_static.a /opt/tkq-env/nvidia_cutlass_dsl/cu13/lib/ ; fi
envpath=/opt/tkq-env:/opt/tkq-env/nvidia_cutlass_dsl/dsl_packages
export PYTHONPATH=$PWD:$envpath TKQ_CACHE_DIR=/tmp/tkqc
T0=$(date +%s); S=/tmp/res; rm -rf $S; mkdir -p $S; : > $S/steps.txt
left() { echo $((ALL - ($(date +%s) - T0))); }
step() { # NAME LIMIT command...
  local name=$1 limit=$2 t=$(date +%s); shift 2
  local l=$(left); [ "$limit" -gt "$l" ] && limit=$l
  if [ "$limit" -lt 4 ]; then echo "$name skipped" | tee -a $S/steps.txt; return 1; fi
  OUT=$S/$name; mkdir -p $OUT; OUT=$OUT timeout -k 2 $limit "$@" > $S/$name.log 2>&1; local rc=$?
  echo "$name rc=$rc $(( $(date +%s) - t )) s" | tee -a $S/steps.txt; return $rc
}
pack() { # leaves what counts under $BACK
  tar cf - -C /tmp res | xz -T8 -1 > $BACK/all.tar.xz; ls -la $BACK/all.tar.xz; tail -n 4 $S/*.log | cut -c1-300; }
unpackcache() { for f in .dev2/k*.tar.xz; do [ -e $f ] && { mkdir -p /tmp/tkqc; xz -dc -T8 $f | tar xf - -C /tmp/tkqc; }; done; ls /tmp/tkqc 2>/dev/null | wc -l; }
trees() { mkdir -p /tmp/t; for f in .dev2/t_*.tar.xz; do [ -e $f ] || continue; n=$(basename $f .tar.xz); n=${n#t_}; rm -rf /tmp/t/$n; mkdir -p /tmp/t/$n; tar xJf $f -C /tmp/t/$n; done; ls /tmp/t; }
intree() { # TREE command...  runs there with its own package and cache
  local n=$1; shift; ( cd /tmp/t/$n && PYTHONPATH=/tmp/t/$n:$envpath TKQ_CACHE_DIR=${CACHE:-/tmp/tkqc_$n} "$@" ); }
export -f intree 2>/dev/null; export envpath
