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
mode=ELi8EL12QuantizeMode
tensor=quantize_tileI12TensorSourceI4bf16$mode rmsnorm=NormKind1E$mode layernorm=NormKind0E$mode
cubin() { "$nvcc" -std=c++17 -O3 -fmad=false -arch=sm_100a -Illmc -Illmc/cuda -cubin -Xptxas -v -o "$scratch/$1.cubin" "$2" 2>"$scratch/err"; }
instructions() { # instructions SOURCE NAME...: nearest, stochastic, stochastic by cvt.rs; with sums over rows and without
    local limits=() name spilling
    called="dev/sass_count.py, of llmc/cuda/$1.cu"
    for name in "${@:2}"; do limits+=("${name}0E" 20 "${name}1E" 31 "${name}2E" 23); done
    cubin "$1" "llmc/cuda/$1.cu" && dev/sass_count.py "$scratch/$1.cubin" "${limits[@]}" >"$scratch/out"
    code=$?
    check "sm_100a, $1: no kernel has more instructions than it may" exits 0
    c++filt <"$scratch/out" | grep 'OVER\|bf16' | cut -c 1-110 | sed 's/^/measured   /'
    spilling=$(grep -A1 'quantize_tile.*QuantizeMode[012]E' "$scratch/err" | grep -c '[1-9][0-9]* bytes spill')
    check "sm_100a, $1: the kernels of one mode spill nothing" same "$spilling" 0
}
instructions operand_tensor "$tensor"
instructions operand_norm "$rmsnorm" "$layernorm"

# QUANTIZE_ANY serves pow2: with all but the rounding and 4/6 to choose at run time (false), and compiled for pow2 alone (true).
cat >"$scratch/pow2.cu" <<'END'
#include "quantize_tile.cuh"
template <bool alone> __global__ void __launch_bounds__(BLOCK, TILE_BLOCKS) quantize_tile_pow2(TensorSource<bf16> from, QuantizeJob job)
{
    __shared__ TileShared shared;
    for (Nvfp4Form *f : {&job.copy[0].form, &job.copy[1].form}) {
        f->rounding = ROUND_NEAREST, f->four_over_six = FOUR_OVER_SIX_OFF;
        if (alone) f->headroom = 1;
    }
    if (alone) job.pow2 = true, job.plain = {}, job.partial = {};
    make_tile<TensorSource<bf16>, 8, QUANTIZE_ANY, false>(&shared, from, job);
}
template __global__ void quantize_tile_pow2<false>(TensorSource<bf16>, QuantizeJob);
template __global__ void quantize_tile_pow2<true>(TensorSource<bf16>, QuantizeJob);
END
cubin pow2 "$scratch/pow2.cu" && dev/sass_count.py "$scratch/pow2.cubin" >"$scratch/out" &&
    awk '/Lb0E/ { any = $2 } /Lb1E/ { alone = $2 } END { printf "measured   pow2: any mode / its own: %d / %d = %.2f\n", any, alone, any / alone; exit any > 1.5 * alone }' "$scratch/out"
code=$?
check "sm_100a: a kernel for pow2 alone would not save a third" exits 0
finish
