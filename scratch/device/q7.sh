# Next session, lease 1 (about 570 s): suite; first calls, five of each; the rest of cross entropy and gradient; slow repeats of attention
BACK=$OUT; ALL=${ALL:-575}; [ -s /opt/env.a ] || exit 9; . .dev2/lib.sh; . .dev2/piece.sh; unpackcache
export QUACK_COMPILE_WORKERS=8
step suite 260 python3 -m pytest tests/gpu -v --maxfail=60 -n 14 --dist worksteal -p no:cacheprovider
grep -E "FAILED|ERROR|passed|failed" $S/suite.log | tail -20
step cold 170 python3 -m bench.cold_start --rounds 3 --seconds 160 --out $S/cold
step ce 48 python3 -m tkq bench cross_entropy_and_gradient --no-calls --no-pictures --at-most 46 --out $S/ce
step rep 60 python3 -m pytest tests/gpu/test_attention_repeats.py --slow -q -n 6 -k "8" -p no:cacheprovider
cat $S/steps.txt; pack
