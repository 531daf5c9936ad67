# On the same machine: calls, first calls, decoding on a quiet host, then slow tests. About 420 s.
BACK=$OUT; ALL=${ALL:-450}; . .dev2/lib.sh
step calls 60 python3 -m tkq bench --sections calls --no-pictures --out $S/calls
step cold 130 python3 -m bench.cold_start --out $S/cold
step generate 60 python3 -m bench.llama --sections generate --attention cudnn --out $S/generate
step repeats 80 python3 -m pytest tests/gpu/test_attention_repeats.py tests/gpu/test_norm_quant_memory.py --slow -q -p no:cacheprovider
step race 110 python3 -m pytest tests/gpu/test_sanitizer.py --slow -q -n 6 -k "race and attention" -p no:cacheprovider
cat $S/steps.txt; pack
