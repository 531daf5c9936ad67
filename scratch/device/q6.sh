# Lease 4 of session 14: the suite on the final code, cross entropy's rest, calls of two files, first calls
BACK=$OUT; ALL=${ALL:-385}; [ -s /opt/env.a ] || exit 9; . .dev2/lib.sh; . .dev2/piece.sh; unpackcache
export QUACK_COMPILE_WORKERS=8
step suite 260 python3 -m pytest tests/gpu -v --maxfail=60 -n 14 --dist worksteal -p no:cacheprovider
grep -E "FAILED|ERROR|passed|failed" $S/suite.log | tail -20
step race 80 python3 .dev2/race2.py
step ce 48 python3 -m tkq bench cross_entropy_and_gradient --no-calls --no-pictures --at-most 46 --out $S/ce
step calls 32 python3 -m tkq bench rmsnorm rope --calls-only --out $S/calls --no-pictures
l=$(left); [ $l -gt 40 ] && step cold $l python3 -m bench.cold_start --rounds 1 --seconds $((l - 15)) --out $S/cold
cat $S/race.log | cut -c1-400
cat $S/steps.txt; tail -12 $S/cold.log | cut -c1-150; grep MISSED $S/calls.log | cut -c1-120; pack
