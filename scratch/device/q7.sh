# Next session, lease 1 (about 560 s): suite; chapters and other plans for the row kernel's; slow tests; first calls, three of each
BACK=$OUT; ALL=${ALL:-575}; [ -s /opt/env.a ] || exit 9; . .dev2/lib.sh; . .dev2/piece.sh; unpackcache
export QUACK_COMPILE_WORKERS=8
step suite 260 python3 -m pytest tests/gpu -v --maxfail=60 -n 14 --dist worksteal -p no:cacheprovider
grep -E "FAILED|ERROR|passed|failed" $S/suite.log | tail -20
step chap 30 python3 .dev2/chap_time.py
step chapters 60 python3 -m bench.chapters --rounds 7 --round-seconds 0.02 --out $S/chapters
step slow 120 python3 -m pytest tests/gpu/test_fp8_narrow.py tests/gpu/test_fp8_gemm.py tests/gpu/test_grouped.py tests/gpu/test_quantize.py tests/gpu/test_fp8_linear.py tests/gpu/test_rows_huge.py tests/gpu/test_attention_repeats.py --slow -m slow -q -n 8 --dist worksteal -p no:cacheprovider
step cold $(left) python3 -m bench.cold_start --rounds 3 --seconds $(( $(left) - 15 )) --out $S/cold
cat $S/steps.txt; cat $S/chap.log; tail -5 $S/slow.log; pack
