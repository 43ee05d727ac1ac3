#!/usr/bin/env bash
# The CUDA backend's operations on a CPU: builds llmc/cuda/*.cu for dev/cuda_on_cpu into $BUILD/cuda_on_cpu and runs
# cuda_ops.c on them, blocks and threads in reverse order: that of their numbers is the one that hides mistakes.
# LLMC_TEST_ALL=1: other orders too, and everything again under AddressSanitizer. Skipped where the CUDA toolkit's headers
# are not installed; no GPU, no nvcc needed.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

build=${BUILD:-build}
cuda=${CUDA_HOME:-/usr/local/cuda}
nvcc=$(command -v nvcc) && cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
if [ ! -f "$cuda/include/cuda_runtime.h" ]; then
    skip "CUDA operations" "no $cuda/include/cuda_runtime.h"
    finish
fi

cc=gcc cxx=g++
grep -q '^[^ ]*clang' "$build/flags" && cc=clang cxx=clang++ # the OpenMP of the objects that are linked in
flags=(-g -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -DCUDA_ON_CPU -Illmc)
device=(-std=c++17 -include cuda_on_cpu.h -Idev/cuda_on_cpu -isystem "$cuda/include")

objects() { # objects FOLDER FLAG...: $object_files, those compiled again that are older than any source; two at once
    local source object
    mkdir -p "$1" || return
    object_files=()
    for source in dev/cuda_on_cpu/*.cpp llmc/cuda/*.cu "${more[@]}" test/cuda_ops.c; do
        object=$1/$(basename "$source").o
        object_files+=("$object")
        [ -f "$object" ] && [ -z "$(find dev/cuda_on_cpu llmc test -newer "$object" -name '*.[chp]*')" ] && continue
        printf '%s\n' "$source"
    done >"$scratch/stale"
    xargs -r -P 2 -I SOURCE "$0" --compile SOURCE "$@" <"$scratch/stale"
}

compile() { # compile SOURCE FOLDER FLAG...
    local object
    object=$2/$(basename "$1").o
    case $1 in
    *.cu) python3 dev/cuda_on_cpu/launch_filter.py "$1" "$object.cpp" &&
        "$cxx" "${flags[@]}" "${device[@]}" -iquote "$(dirname "$1")" "${@:3}" -c "$object.cpp" -o "$object" ;;
    *.cpp) "$cxx" "${flags[@]}" -std=c++17 -Idev/cuda_on_cpu -isystem "$cuda/include" "${@:3}" -c "$1" -o "$object" ;;
    *) "$cc" -std=c11 -D_GNU_SOURCE -Itest "${flags[@]}" "${@:3}" -c "$1" -o "$object" ;;
    esac
}

if [ "${1:-}" = --compile ]; then
    compile "${@:2}"
    exit
fi

more=()
cases=()
if [ ! -f llmc/cuda/backend.cu ]; then # the operations alone
    more=(test/cuda_ops_open.cu)
    cases=(operand embedding residual norm_backward softmax loss copy sum_squares adamw sums finish qk_norm attention documents)
fi

cuda_ops() { # cuda_ops NAME FOLDER FLAG...: builds it
    local trainer
    called="building $1"
    mapfile -t trainer < <(find "$build" "$build/cpu" -maxdepth 1 -name '*.o' ! -name train_gpt.o)
    objects "${@:2}" >"$scratch/out" 2>"$scratch/err" && ar rcs "$2/trainer.a" "${trainer[@]}" 2>>"$scratch/err" &&
        "$cxx" "${flags[@]}" "${@:3}" "${object_files[@]}" "$2/trainer.a" -lm -lpthread -o "$2/cuda_ops" 2>>"$scratch/err"
    code=$?
    check "$1: builds" exits 0
}

run() { # run NAME FOLDER ORDER
    called="CUDA_ON_CPU_ORDER=$3 $2/cuda_ops"
    CUDA_ON_CPU_ORDER=$3 LLMC_TEST_ALL=0 timeout --kill-after=5 280 "$2/cuda_ops" "${cases[@]}" >"$scratch/out" 2>"$scratch/err"
    code=$?
    grep -v '^measured' "$scratch/out" | head -n 40
    bits=$(grep '^measured bits' "$scratch/out")
    check "$1: the same bits" same "$bits" "${first_bits:=$bits}"
    local last
    last=$(tail -n 1 "$scratch/out")
    if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed ]]; then
        passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2]))
    else
        fail "$1: ran to its end"
    fi
}

cuda_ops "cuda_on_cpu" "$build/cuda_on_cpu" -O2
[ "$code" -eq 0 ] && run "threads in reverse order" "$build/cuda_on_cpu" reverse
if [ "$long" = 1 ] && [ "$code" -eq 0 ]; then
    run "threads in order" "$build/cuda_on_cpu" forward
    run "threads in random order" "$build/cuda_on_cpu" random:1
    cuda_ops "cuda_on_cpu under AddressSanitizer" "$build/cuda_on_cpu/asan" -O1 -fsanitize=address -fno-omit-frame-pointer
    [ "$code" -eq 0 ] && run "under AddressSanitizer" "$build/cuda_on_cpu/asan" forward
fi
finish
