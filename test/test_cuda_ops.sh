#!/usr/bin/env bash
# The CUDA backend's operations on a CPU: cuda_ops.c over dev/cuda_on_cpu, with the threads of a block in one order; with
# LLMC_TEST_ALL=1 in three, and everything again under AddressSanitizer. Skipped where the CUDA toolkit's headers are not
# installed; no GPU, no nvcc needed.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

build=${BUILD:-build}
needs_cuda "CUDA operations"
compiler=$(awk '{ print $1; exit }' "$build/flags") # the one that built the rest

make_ops() { # make_ops NAME BUILD ARGUMENT...
    called="make $2/cuda_on_cpu/cuda_ops"
    timeout 1200 make -j "$(getconf _NPROCESSORS_ONLN)" "CC=$compiler" "BUILD=$2" "$2/cuda_on_cpu/cuda_ops" "${@:3}" >"$scratch/out" 2>"$scratch/err"
    code=$?
    check "$1: builds" exits 0
}

run() { # run NAME BUILD ORDER: adds what cuda_ops counted
    local last
    called="CUDA_ON_CPU_ORDER=$3 $2/cuda_on_cpu/cuda_ops"
    CUDA_ON_CPU_ORDER=$3 LLMC_TEST_ALL=0 timeout --kill-after=5 600 "$2/cuda_on_cpu/cuda_ops" >"$scratch/out" 2>"$scratch/err"
    code=$?
    grep -v '^measured' "$scratch/out" | head -n 40
    bits=$(grep '^measured bits' "$scratch/out")
    check "$1: the same bits" same "$bits" "${first_bits:=$bits}"
    last=$(tail -n 1 "$scratch/out")
    if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed ]]; then
        passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2]))
    else
        fail "$1: ran to its end"
    fi
}

make_ops "cuda_ops" "$build"
[ "$code" -eq 0 ] && run "threads in reverse order" "$build" reverse
if [ "$long" = 1 ] && [ "$code" -eq 0 ]; then
    run "threads in order" "$build" forward
    run "threads in random order" "$build" random:1
    make_ops "under AddressSanitizer" build/asan OPTIMIZE=-O1 EXTRA_CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
    [ "$code" -eq 0 ] && run "under AddressSanitizer" build/asan forward
fi
finish
