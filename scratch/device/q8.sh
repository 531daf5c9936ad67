# Next session, lease 2: the trial mid; epilogues of float8; calls; few rows; the rest of cross entropy and gradient; racecheck of float8
BACK=$OUT; ALL=${ALL:-575}; [ -s /opt/env.a ] || exit 9; . .dev2/lib.sh; . .dev2/piece.sh; unpackcache; trees
export QUACK_COMPILE_WORKERS=8; mkdir -p /tmp/tkqc_mid; xz -dc .dev2/w_mid.tar.xz | tar xf - -C /tmp/tkqc_mid
step mid 90 bash .dev2/in_tree.sh mid python3 mid_time.py
step gap 50 python3 -m tkq bench gemm --shapes .dev2/shapes.txt --against cublas,torch --no-calls --no-pictures --at-most 48 --out $S/gap
step share 40 python3 -m bench.tune_fp8 --kinds row --sizes 2048x1024x16384,512x4096x4096,256x8192x8192 --variants "128x128,128x128 across,128x128 alone,128x128 pdl,128x128 across pdl,128x64,128x64 across,128x64 alone,128x256 spread pdl,tall spread pdl" --rounds 7 --seconds 0.01 --out $S/share/tune_one_round_fp8.json
step epi 60 python3 -m tkq bench fp8_gemm --sections epilogue,few --no-calls --no-pictures --at-most 58 --out $S/epi
step calls 100 python3 -m tkq bench --calls-only --out $S/calls --no-pictures
step ce 60 python3 -m tkq bench cross_entropy_and_gradient --no-calls --no-pictures --at-most 58 --out $S/ce
step nb 30 python3 -m tkq bench rmsnorm --sections backward --match "M8192 N4096" --rounds 15 --no-calls --no-pictures --at-most 28 --out $S/nb
step race 60 python3 .dev2/race2.py
cat $S/steps.txt; cat $S/mid.log | cut -c1-120; cat $S/race.log | cut -c1-300; pack
