# After r1.sh on the same machine: trials n8 (fp8 few rows), fin (dQ finished under the products), mask (float8 groups along K), then calls. About 330 s.
BACK=$OUT; ALL=${ALL:-560}; [ -s /opt/env.a ] || exit 9; . .dev2/lib.sh; . .dev2/piece.sh; unpackcache; trees
for n in n8 fin mask; do mkdir -p /tmp/tkqc_$n; [ -e .dev2/w_$n.tar.xz ] && xz -dc .dev2/w_$n.tar.xz | tar xf - -C /tmp/tkqc_$n; done
T="bash .dev2/in_tree.sh"
step n8test 100 $T n8 python3 -m pytest tests/gpu/test_fp8_narrow.py -q -n 5 -p no:cacheprovider &
step fintest 100 $T fin python3 -m pytest tests/gpu/test_attention_backward_grouped.py -q -n 4 -p no:cacheprovider &
step masktest 100 $T mask python3 -m pytest tests/gpu/test_grouped.py -q -n 5 -p no:cacheprovider &
wait; tail -3 $S/*test.log
step calls 75 python3 -m tkq bench --calls-only --out $S/calls --no-pictures
step n8 110 $T n8 python3 n8_time.py
step fin 60 $T fin python3 fin_time.py
step mask 40 $T mask python3 -m bench.grouped_gemm --sections gradient_row,gradient_line --out $S/mask
step mask0 40 python3 -m bench.grouped_gemm --sections gradient_row,gradient_line --out $S/mask0
for k in forward softmax; do step rp_$k 30 python3 -m bench.tune_row_passes --kind $k --shapes 32768x1024,32768x2048 --out $S/rp; done
step llama 130 python3 -m bench.llama --sections compiled,eager --linear none --attention cudnn --rounds 4 --out $S/llama
cat $S/steps.txt; cat $S/n8.log $S/fin.log | tail -150; pack
