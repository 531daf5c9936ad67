BACK=$OUT; ALL=${ALL:-585}; [ -s /opt/env.a ] || exit 9; . .dev2/lib.sh; . .dev2/piece.sh; unpackcache; trees
mkdir -p /tmp/tkqc_win; xz -dc .dev2/w_win.tar.xz | tar xf - -C /tmp/tkqc_win
export QUACK_CACHE_AUTOTUNING=1 QUACK_COMPILE_WORKERS=8
( step quack_warm 182 nice -n 15 python3 -m bench.sustained --kinds tensor --shapes 1024x1024x1024 --rounds 0 --seconds 0.2 --out $S/never ) &
( step warm 170 nice -n 15 python3 -m tkq bench rmsnorm layernorm --sections forward --match "M32768 N" --warm-only 2 --no-calls --at-most 165 --out $S/never ) &
( step warm4 170 nice -n 15 python3 -m tkq bench flash_attn --sections gqa --match attention_forward --warm-only 1 --no-calls --at-most 165 --out $S/never ) &
step suite 240 python3 -m pytest tests/gpu -v --maxfail=60 -n 13 --dist worksteal -p no:cacheprovider
pkill -f warm-only; pkill -f bench.sustained; wait
grep -E "FAILED|ERROR|passed|failed" $S/suite.log | tail -20; tail -1 $S/suite.log
for n in 1024 2048; do step short$n 25 python3 -m tkq bench rmsnorm layernorm --sections forward --match "M32768 N$n" --no-calls --no-pictures --rounds 15 --at-most 24 --out $S/short; done
step gqa 40 python3 -m tkq bench flash_attn --sections gqa --match "attention_forward" --no-calls --no-pictures --at-most 39 --out $S/gqa
step mha 60 python3 -m tkq bench flash_attn --sections mha --rounds 25 --no-calls --no-pictures --at-most 59 --out $S/mha
step back 60 python3 -m bench.attention_backward_gqa --rounds 25 --seconds 58 --out $S/back
step calls 75 python3 .dev2/calls_only.py $S/calls attention_forward,cross_entropy,fp8_gemm,gemm,grouped_gemm,norms,pointwise,quantize,softmax
long() { step long $1 bash -c 'cd /tmp/t/win && PYTHONPATH=/tmp/t/win:'$envpath' TKQ_CACHE_DIR=/tmp/tkqc_win exec python3 win_forms.py long'; }
long 75
cat $S/steps.txt; pack
