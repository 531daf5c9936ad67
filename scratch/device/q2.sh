# A second lease, when trials are decided: suite, then what issues lack. About 500 s.
BACK=$OUT; ALL=${ALL:-585}; [ -s /opt/env.a ] || exit 9; . .dev2/lib.sh; . .dev2/piece.sh; unpackcache
export QUACK_CACHE_AUTOTUNING=1 QUACK_COMPILE_WORKERS=8
( step warm 175 nice -n 15 python3 -m bench.llama --help ) &
step suite 240 python3 -m pytest tests/gpu -v --maxfail=60 -n 13 --dist worksteal -p no:cacheprovider
wait; grep -E "FAILED|ERROR|passed|failed" $S/suite.log | tail -20
step tensor 150 python3 -m tkq bench fp8_gemm --sections tensor,few --against cublas,quack,quack-tuned,torch --no-calls --no-pictures --at-most 148 --out $S/tensor
step cold 120 python3 -m bench.cold_start --out $S/cold
cat $S/steps.txt; pack
