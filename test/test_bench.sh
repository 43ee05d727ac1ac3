#!/usr/bin/env bash
# The CPU benchmarks of dev/bench run: --quick of each gives its CSV, with the rows that are expected and positive
# figures. What the figures are is no test's business. Peers that are not installed are said to be skipped.
# shellcheck source=test/lib.sh disable=SC2317 # functions that only `check` calls
source "$(dirname "$0")/lib.sh"
if ! command -v make >/dev/null || ! command -v python3 >/dev/null; then
    skip "benchmarks" "no make or no python3"
    finish
fi

csv=$scratch/table.csv
bench() { # bench NAME COMMAND...: --quick --csv is added
    called="${*:2} --quick --csv"
    timeout --kill-after=5 60 "${@:2}" --quick --csv "$csv" >"$scratch/out" 2>"$scratch/err" </dev/null
    code=$?
    check "$1: runs" exits 0
    check "$1: the table is in the file alone" silent out
}
header() { [ "$(head -n 1 "$csv")" = "$1" ]; }
rows() { tail -n +2 "$csv" | grep -c "$1"; }
# From column FROM on, every cell of every row is a number above 0, or empty in the last column.
positive() { # positive FROM
    awk -F , -v from="$1" 'NR == 1 { n = NF; next }
        NF != n { bad = 1 }
        { for (i = from; i <= n; i++) if (!($i > 0) && !($i == "" && i == n)) bad = 1 }
        END { exit bad || NR < 2 }' "$csv"
}

folder=${BUILD:-build}
called="make $folder/bench/bench_gemm"
timeout 300 make "CC=$(awk '{ print $1; exit }' "$folder/flags")" "BUILD=$folder" "$folder/bench/bench_gemm" >"$scratch/out" 2>"$scratch/err"
code=$?
check "bench_gemm: builds" exits 0
check "bench_gemm: without a warning" silent err
bench bench_gemm "$folder/bench/bench_gemm" --repetitions 5
check "bench_gemm: header" header \
    library,input,output,M,K,N,median_gflops,best_gflops,share_of_fp32_peak,ours_over_this
if grep -q '^flags.* avx2' /proc/cpuinfo 2>/dev/null; then # two shapes, three pairs of dtypes
    check "bench_gemm: ours" same "$(rows '^ours avx2,')" 6
    check "bench_gemm: figures" positive 4
fi
for peer in onednn openblas; do
    check "bench_gemm: $peer, or its skip" holds "$(rows "^$peer,") > 0 || $(grep -c "^skipped $peer" "$scratch/err") > 0"
done
called="bench_gemm --repetitions 1"
"$folder/bench/bench_gemm" --repetitions 1 >"$scratch/out" 2>"$scratch/err"
code=$?
check "bench_gemm: fewer than 5 repetitions are refused" exits 2

bench bench_steps python3 dev/bench/bench_steps.py --program "$program"
check "bench_steps: header" header \
    side,precision,batch,seq_len,threads,steps,median_ms,best_ms,tokens_per_s,times_as_long_as_ours
for precision in fp32 bf16 nvfp4; do check "bench_steps: ours, $precision" same "$(rows "^ours,$precision,")" 1; done
check "bench_steps: figures" positive 3
check "bench_steps: llm.c is said to be skipped" matches err '^skipped llm.c'
check "bench_steps: torch, or its skip" holds "$(rows '^torch,') == 2 || $(grep -c '^skipped torch' "$scratch/err") == 1"
called="bench_steps.py --sides 'ours fp8'"
python3 dev/bench/bench_steps.py --program "$program" --quick --sides 'ours fp8' \
    >"$scratch/out" 2>"$scratch/err"
code=$?
check "bench_steps: a side that is not there" exits 1
check "bench_steps: says which are" says err 'there are ours fp32, ours bf16, ours nvfp4'

bench bench_growth python3 dev/bench/bench_growth.py --program "$program" --threads 2
check "bench_growth: header" header \
    axis,value,precision,batch,seq_len,threads,steps,median_ms,best_ms,tokens_per_s,times_as_long_as_first
check "bench_growth: sequence lengths" same "$(rows '^seq_len,')" 3
check "bench_growth: batches" same "$(rows '^batch,')" 2
check "bench_growth: threads" same "$(rows '^threads,')" 2
check "bench_growth: figures" positive 4
finish
