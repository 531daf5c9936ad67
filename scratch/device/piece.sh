# piece NAME ARGS...: one piece of the whole bench, taking turns on the GPU with the others
piece() { local n=$1; shift; mkdir -p $S/w_$n; timeout -k 2 $(left) python3 -m tkq bench "$@" --no-calls --no-pictures --turn /tmp/turn --at-most $(( $(left) - 3 )) --resume --out $S/w_$n > $S/w_$n.log 2>&1; echo "w_$n rc=$? at $(( $(date +%s) - T0 ))" >> $S/steps.txt; }
