# Lease 3 of session 14: the suite; cross entropy, few rows of float8, groups along K, calls
BACK=$OUT; ALL=${ALL:-560}; [ -s /opt/env.a ] || exit 9; . .dev2/lib.sh; . .dev2/piece.sh; unpackcache
export QUACK_COMPILE_WORKERS=8
( step warm 200 nice -n 15 python3 -m tkq bench cross_entropy cross_entropy_and_gradient fp8_gemm grouped_gemm --sections forward,fused,both,backward,mean,few,gradient,gradient_row,gradient_line --warm-only 3 --no-calls --at-most 195 --out $S/never ) &
step suite 300 python3 -m pytest tests/gpu -v --maxfail=60 -n 13 --dist worksteal -p no:cacheprovider
pkill -f warm-only; wait; grep -E "FAILED|ERROR|passed|failed" $S/suite.log | tail -20
step walks 45 python3 -m bench.tune_row_passes --kind forward --shapes 16384x32768,16384x65536,8192x131072,4096x262144 --match "walk4 r,256/256 c2 reg,512/512 c2 reg,=512/512 c1 reg=,512/512 c4 reg,1024/1024" --out $S/walks
step few 40 python3 -m tkq bench fp8_gemm --sections few --no-calls --no-pictures --at-most 38 --out $S/few
step ce 100 python3 -m tkq bench cross_entropy cross_entropy_and_gradient --no-calls --no-pictures --at-most 98 --out $S/ce
step grouped 60 python3 -m tkq bench grouped_gemm --sections gradient,gradient_row,gradient_line --no-calls --no-pictures --at-most 58 --out $S/grouped
step calls 90 python3 -m tkq bench --calls-only --out $S/calls --no-pictures
cat $S/steps.txt; grep -v "first round" $S/walks.log | cut -c1-100; tail -45 $S/ce.log | cut -c1-120; pack
