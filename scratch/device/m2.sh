BACK=$OUT; ALL=285; [ -e /opt/tkq-env/.done ] || exit 9; . .dev2/lib.sh
for n in 1024 2048; do step short$n 50 python3 -u -m tkq bench rmsnorm layernorm --sections forward --match "M32768 N$n" --no-calls --no-pictures --rounds 15 --at-most 49 --out $S/short; done
step nqm 50 python3 -m pytest tests/gpu/test_norm_quant_memory.py --slow -q -n 10 -p no:cacheprovider
step race 130 python3 .dev2/race.py
cat $S/steps.txt; cat $S/race.log; tail -5 $S/short1024.log; pack
