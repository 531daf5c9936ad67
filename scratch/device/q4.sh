BACK=$OUT; ALL=${ALL:-120}; . .dev2/lib.sh; unpackcache; trees
mkdir -p /tmp/tkqc_ce; xz -dc .dev2/w_ce.tar.xz | tar xf - -C /tmp/tkqc_ce
step ce2 100 bash .dev2/in_tree.sh ce python3 ce_time2.py
step few2 40 python3 -m bench.tune_fp8 --small --kinds tensor --sizes 128x4096x4096,64x6144x4096,16x128256x4096,16x6144x4096 --variants "tile,1 x 64,1 x 64 two,2 x 64,2 x 64 two,4 x 64,4 x 64 two,64x64 alone pdl" --rounds 9 --seconds 0.01 --out $S/few2/tune_few_rows_fp8.json
cat $S/steps.txt; cut -c1-110 $S/ce2.log; grep -v '^$' $S/few2.log | cut -c1-90; pack
