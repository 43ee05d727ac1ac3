#!/usr/bin/env bash
# The portable form of the CPU backend on another architecture: matrix products and element functions compiled for
# aarch64, where the same sources use the hardware's fma with flush-to-zero, run under qemu-user. Only in the long suite,
# and only where the cross compiler and qemu are installed (gcc-aarch64-linux-gnu, qemu-user).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
compiler=aarch64-linux-gnu-gcc
skip() { echo "skipped aarch64: $1"; echo "0 passed, 0 failed, 1 skipped"; exit 0; }
[ "${LLMC_TEST_ALL:-0}" = 1 ] || skip "only in make test-all"
command -v $compiler >/dev/null || skip "$compiler is not installed"
command -v qemu-aarch64 >/dev/null || skip "qemu-aarch64 is not installed"

out=$(mktemp -d) || exit 1
trap 'rm -rf "$out"' EXIT
flags=(-std=c11 -O2 -ffp-contract=off -fno-math-errno -fno-trapping-math -fopenmp -static -D_GNU_SOURCE -Illmc -Itest)
passed=0 failed=0
for test in test_gemm test_numerics test_mathfn test_philox test_nvfp4 test_nvfp4_layout; do
    objects=()
    for source in llmc/common.c llmc/tensor.c llmc/cpu/*.c; do
        [ "$source" = llmc/cpu/gemm_amx.c ] && continue
        object=$out/$(basename "$source" .c).o
        [ -f "$object" ] || $compiler "${flags[@]}" -DISA=portable -c "$source" -o "$object" || exit 1
        objects+=("$object")
    done
    if $compiler "${flags[@]}" "test/$test.c" "${objects[@]}" -lm -o "$out/$test" &&
        LLMC_TEST_ALL=0 timeout 900 qemu-aarch64 "$out/$test" >"$out/log"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "$test on aarch64:"
        tail -n 15 "$out/log"
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
