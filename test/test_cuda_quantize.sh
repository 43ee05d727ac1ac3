#!/usr/bin/env bash
# The device functions under quantization, bit by bit (quantize_block.cu). Skipped where the CUDA headers are missing.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

build=${BUILD:-build}
needs_cuda "CUDA quantization"
compiler=$(awk '{ print $1; exit }' "$build/flags") # the one that built the rest
called="make $build/cuda_on_cpu/quantize_block"
timeout 600 make "CC=$compiler" "BUILD=$build" "$build/cuda_on_cpu/quantize_block" >"$scratch/out" 2>"$scratch/err"
code=$?
check "builds" exits 0
called="$build/cuda_on_cpu/quantize_block"
timeout 600 "$build/cuda_on_cpu/quantize_block" >"$scratch/out" 2>"$scratch/err"
code=$?
check "quantize_block: the law's bits" exits 0
grep -v passed "$scratch/out" | head -n 20
finish
