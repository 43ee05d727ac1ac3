#!/usr/bin/env bash
# What the kernels that quantize cost: bytes of memory, counted on a CPU that plays the GPU (make bytes), and, with
# LLMC_TEST_ALL=1 where nvcc is installed, machine instructions an element on sm_100a (dev/sass_count.py). Skipped where the CUDA headers are missing.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

build=${BUILD:-build}
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
needs_cuda "bytes of CUDA kernels"
compiler=$(awk '{ print $1; exit }' "$build/flags") # the one that built the rest
called="make bytes"
timeout 900 make "CC=$compiler" "BUILD=$build" bytes >"$scratch/out" 2>"$scratch/err"
code=$?
check "no kernel moves more bytes than it may" exits 0
sed 's/^/measured   /' "$scratch/out"

if [ ! -x "$nvcc" ] || [ "$long" != 1 ]; then
    skip "instructions of CUDA kernels" "no nvcc, or not LLMC_TEST_ALL=1: a minute of compiling"
    finish
fi
instructions() { # instructions SOURCE (NAME LIMIT)...
    called="dev/sass_count.py, of llmc/cuda/$1.cu"
    "$nvcc" -std=c++17 -O3 -fmad=false -arch=sm_100a -Illmc -cubin -o "$scratch/cubin" "llmc/cuda/$1.cu" 2>"$scratch/err" &&
        dev/sass_count.py "$scratch/cubin" "${@:2}" >"$scratch/out"
    code=$?
    check "sm_100a, $1: no kernel has more instructions than it may" exits 0
    c++filt <"$scratch/out" | grep 'OVER\|bf16' | cut -c 1-110 | sed 's/^/measured   /'
}
tensor=quantize_tileI12TensorSourceI4bf16ELi8EL12QuantizeMode norm=L8NormKind1EELi8EL12QuantizeMode
instructions operand_tensor "${tensor}0ELb0" 20 "${tensor}1ELb0" 31 "${tensor}2ELb0" 23
instructions operand_norm "${norm}0ELb0" 21 "${norm}1ELb0" 33
finish
