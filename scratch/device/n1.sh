# After r1.sh on the same machine (env.a lies in /opt): suite, then what issues 3, 4, 5 and 7 lack. About 560 s.
BACK=$OUT; ALL=${ALL:-588}; [ -s /opt/env.a ] || exit 9; . .dev2/lib.sh; . .dev2/piece.sh; unpackcache
export QUACK_CACHE_AUTOTUNING=1 QUACK_COMPILE_WORKERS=10
( step quack_warm 120 nice -n 15 python3 -m bench.sustained --kinds bf16 --shapes 1024x1024x1024 --rounds 0 --seconds 0.2 --out $S/never ) &
( step warm 170 nice -n 15 python3 -m tkq bench flash_attn cross_entropy linear_cross_entropy gemm fp8_gemm grouped_gemm --sections gqa,window,mean,linear,large,tensor,few,bf16,row,block --warm-only 3 --no-calls --at-most 165 --out $S/never ) &
step suite 240 python3 -m pytest tests/gpu -v --maxfail=60 -n 13 --dist worksteal -p no:cacheprovider
pkill -f warm-only; wait
grep -E "FAILED|ERROR|passed|failed" $S/suite.log | tail -20; tail -1 $S/suite.log
step rows2 70 python3 -u -m bench.tune_short_norms --processes 14 --out $S/rows2
piece at flash_attn --sections gqa,window --rounds 9 & sleep 0.3
piece lc linear_cross_entropy --rounds 7 --round-seconds 0.08 & sleep 0.3
piece ce cross_entropy --sections mean --rounds 7 --round-seconds 0.02 & sleep 0.3
piece few gemm fp8_gemm grouped_gemm --sections few,bf16 --rounds 9 &
wait
step large 90 python3 -m tkq bench gemm fp8_gemm --sections large,tensor --against cublas,quack,quack-tuned,torch --no-calls --no-pictures --at-most 88 --out $S/large
step fp8 $(left) python3 -m bench.sustained --kinds tensor,row,block --shapes 4096x4096x4096,8192x28672x8192,8192x8192x28672,16384x16384x16384 --rounds 0 --without "QuACK,QuACK tuned" --out $S/fp8
cat $S/steps.txt; pack
