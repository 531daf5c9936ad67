# Lease 2 of session 14: new kernels' tests, cross entropy's trials, few rows of float8, shared heads, calls
BACK=$OUT; ALL=${ALL:-560}; [ -s /opt/env.a ] || exit 9; . .dev2/lib.sh; . .dev2/piece.sh; unpackcache; trees
mkdir -p /tmp/tkqc_ce; xz -dc .dev2/w_ce.tar.xz | tar xf - -C /tmp/tkqc_ce
step tests 150 python3 -m pytest tests/gpu/test_fp8_narrow.py tests/gpu/test_fp8_gemm.py tests/gpu/test_grouped.py tests/gpu/test_attention_backward_grouped.py --slow -q -n 13 --dist worksteal -p no:cacheprovider --maxfail=40
tail -12 $S/tests.log | cut -c1-200
step ce 60 bash .dev2/in_tree.sh ce python3 ce_time.py
step few 100 python3 -m bench.tune_fp8 --small --kinds tensor,block --sizes 1x8192x8192,16x8192x8192,64x8192x8192,128x8192x8192,16x1024x8192,128x1024x8192,64x4096x4096,128x256x16384,16x28672x8192,1x28672x8192,32x28672x8192,16x14336x4096,32x4096x14336,16x128256x4096,16x6144x4096,128x4096x4096,64x6144x4096 --variants "tile,1 x 64,1 x 64 two,2 x 64,2 x 64 two,4 x 64,4 x 64 two,8 x 64,8 x 64 two,64x64 alone pdl" --rounds 9 --seconds 0.01 --out $S/few/tune_few_rows_fp8.json
step back 75 python3 -m bench.attention_backward_gqa --rounds 25 --seconds 72 --out $S/back
step calls 75 python3 -m tkq bench --calls-only --out $S/calls --no-pictures
cat $S/steps.txt; cat $S/ce.log | cut -c1-160 | tail -75; tail -30 $S/back.log; pack
