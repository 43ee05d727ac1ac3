#!/usr/bin/env bash
# The doubles of CUDA on a CPU: cuBLASLt (products of all types against loops, an NVFP4 fixture, each rule violated once,
# what each device has), mma, ldmatrix, cp.async and conversions by their documentation, and NCCL on ranks of an mpirun
# (collectives against direct sums; ranks that disagree, stay away or abort). Also that planted faults of a caller end a
# program with a message. Skipped where there are no CUDA headers (CUDA_INCLUDE names a folder with cublasLt.h), the part of
# NCCL without MPI too; no GPU needed. LLMC_TEST_ALL=1: more ranks, shuffled streams, clang, sanitizers.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
self=$PWD/test/${0##*/}
export LC_ALL=C OMP_WAIT_POLICY=passive
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
unset OMPI_COMM_WORLD_SIZE PMI_SIZE SLURM_STEP_NUM_TASKS
unset CUDA_ON_CPU_ORDER CUDA_ON_CPU_STREAMS CUDA_ON_CPU_STATS CUDA_ON_CPU_CAPABILITY CUDA_ON_CPU_MEMORY_MB
long=${LLMC_TEST_ALL:-0}
cxx=${CXX:-g++}
cuda=
for folder in "${CUDA_INCLUDE:-}" "${CUDA_HOME:-/usr/local/cuda}/include" /usr/local/cuda/include /usr/include; do
    if [ -z "$cuda" ] && [ -f "$folder/cublasLt.h" ]; then cuda=$folder; fi
done
give_up() { echo "skipped the doubles of CUDA: $1" && echo "0 passed, 0 failed, 1 skipped" && exit 0; }
[ -n "$cuda" ] || give_up "no cublasLt.h found (CUDA_INCLUDE=FOLDER)"
command -v "$cxx" >/dev/null || give_up "no C++ compiler"

scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' INT TERM HUP
out=${BUILD:-build}/cuda_on_cpu/doubles # objects are kept: the next run is shorter
mkdir -p "$out" || exit 1
passed=0 failed=0 skipped=0

bad() { # bad NAME: what the command said is in $scratch/log
    failed=$((failed + 1))
    echo "FAILED  $1"
    tail -n 12 "$scratch/log" | sed 's/^/        /'
}

# ---- building: objects that are older than their source or a header are made again ----

core="block device fiber launch memory settings shared stats stream"
cublaslt="cublaslt cublaslt_descriptors cublaslt_rules cublaslt_compute"
flags=(-std=c++17 -O2 -g -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -DCUDA_ON_CPU -Wall -Wextra -Werror -Wno-unknown-pragmas
    -Idev/cuda_on_cpu -isystem "$cuda")
read -ra more <<<"${DOUBLES_CXXFLAGS:-}" # e.g. sanitizers
flags+=("${more[@]}")

jobs=$(getconf _NPROCESSORS_ONLN)
build() { # build OBJECT COMMAND...: beside others; built waits for all
    local object=$1
    shift
    [ -f "$object" ] && [ -z "$(find dev/cuda_on_cpu llmc test/cuda_on_cpu test/test.h -newer "$object" -type f)" ] && return
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
    "$@" -o "$object" >"$object.log" 2>&1 || { rm -f "$object" && mv "$object.log" "$scratch/unbuilt"; } &
}
built() { # ends the test when something did not build
    wait
    [ -f "$scratch/unbuilt" ] || return
    mv "$scratch/unbuilt" "$scratch/log"
    bad "does not build" && echo "$passed passed, $failed failed" && exit 1
}

objects() { # objects NAME...: paths of them, built
    local name
    for name in "$@"; do
        optimize=()
        [ "$name" = cublaslt_compute ] && optimize=(-O3)
        build "$out/$name.o" "$cxx" "${flags[@]}" "${optimize[@]}" "${mpi_flags[@]}" -c "dev/cuda_on_cpu/$name.cpp"
    done
}
paths() { printf "$out/%s.o\n" "$@"; }
mpi_flags=()

# ---- running ----

run() { # run NAME COMMAND...: adds up its last line
    local name=$1 last
    shift
    timeout --kill-after=5 "${limit:-120}" "$@" >"$scratch/log" 2>&1 </dev/null
    code=$?
    last=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$scratch/log" | tail -n 1)
    if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+) ]]; then
        passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2]))
        [ "$code" -eq 0 ] && return
        [ "${BASH_REMATCH[2]}" -eq 0 ] && failed=$((failed + 1))
        failed=$((failed - 1))
    fi
    bad "$name: exit code $code"
}

dies() { # dies NAME MESSAGE COMMAND...: ends by itself, not with 0, and says so
    local name=$1 message=$2
    shift 2
    { timeout --kill-after=5 20 "$@"; } >"$scratch/log" 2>&1 </dev/null # the shell's own word about a signal goes there too
    code=$?
    if [ "$code" -ne 0 ] && [ "$code" -ne 124 ] && grep -qE -- "$message" "$scratch/log"; then
        passed=$((passed + 1))
    else
        bad "$name: exit code $code, expected: $message"
    fi
}

# shellcheck disable=SC2086 # a list of names
objects $core convert mma $cublaslt
built
# shellcheck disable=SC2046,SC2086
build "$out/test_cublaslt" "$cxx" "${flags[@]}" test/cuda_on_cpu/test_cublaslt.cpp \
    $(paths $core convert $cublaslt)
# shellcheck disable=SC2046,SC2086
build "$out/test_cublaslt_rules" "$cxx" "${flags[@]}" test/cuda_on_cpu/test_cublaslt_rules.cpp \
    $(paths $core convert $cublaslt)
# shellcheck disable=SC2046
build "$out/test_convert" "$cxx" "${flags[@]}" test/cuda_on_cpu/test_convert.cpp $(paths convert)
python3 dev/cuda_on_cpu/launch_filter.py test/cuda_on_cpu/test_mma.cu "$scratch/test_mma.cpp" >"$scratch/log" 2>&1 ||
    bad "test_mma.cu does not pass the filter"
# shellcheck disable=SC2046,SC2086
build "$out/test_mma" "$cxx" "${flags[@]}" -include cuda_on_cpu.h -Illmc -iquote test/cuda_on_cpu "$scratch/test_mma.cpp" \
    $(paths $core convert mma)
built

run "conversions" "$out/test_convert"
dies "cvt.rs" "cvt.rs: .* is not emulated" "$out/test_convert" rs
run "cuBLASLt: products" "$out/test_cublaslt" test/fixtures/nvfp4_matmul.bin
run "cuBLASLt: rules" "$out/test_cublaslt_rules"
for capability in 7.5 8.0 8.9 9.0 10.0 10.3 12.0; do
    CUDA_ON_CPU_CAPABILITY=$capability run "cuBLASLt on $capability" "$out/test_cublaslt_rules" capability "${capability/./}"
done
dies "cuBLASLt: device memory too small" "cublasLtMatmul: A of 8192 bytes out of bounds" "$out/test_cublaslt_rules" small
run "mma, ldmatrix, cp.async" "$out/test_mma"
for order in reverse random:5; do CUDA_ON_CPU_ORDER=$order run "mma in order $order" "$out/test_mma"; done
dies "ldmatrix: misaligned" "ldmatrix.x4: .* not a multiple of 16" "$out/test_mma" ldmatrix-misaligned
dies "ldmatrix: not shared memory" "ldmatrix.x4: .* not in a shared variable" "$out/test_mma" ldmatrix-not-shared
dies "ldmatrix: beyond the variable" "ldmatrix.x4: .* not in a shared variable" "$out/test_mma" ldmatrix-beyond
dies "cp.async: misaligned" "misaligned load of 16 bytes" "$out/test_mma" cp-async-misaligned
dies "cp.async: not to shared memory" "cp.async: .* not in a shared variable" "$out/test_mma" cp-async-not-shared
dies "cp.async: from host memory" "which is a host pointer" "$out/test_mma" cp-async-host
dies "mma: without a lane" "mma.m16n8k16: lane 31 has ended" "$out/test_mma" mma-divergent
[ "$long" = 1 ] && CUDA_ON_CPU_STREAMS=shuffle:3 run "cuBLASLt, shuffled" "$out/test_cublaslt" test/fixtures/nvfp4_matmul.bin

# ---- NCCL ----

if ! command -v mpirun >/dev/null || ! command -v mpicc >/dev/null || [ ! -f "$cuda/nccl.h" ]; then
    skipped=1
    echo "skipped the double of NCCL: no MPI, or no nccl.h in $cuda"
else
    read -ra mpi_flags <<<"$(mpicc --showme:compile)"
    read -ra mpi_libraries <<<"$(mpicc --showme:link)"
    objects nccl nccl_run
    built
    # shellcheck disable=SC2046,SC2086
    build "$out/ranks_nccl" "$cxx" "${flags[@]}" "${mpi_flags[@]}" test/cuda_on_cpu/ranks_nccl.cpp \
        $(paths $core convert nccl nccl_run) "${mpi_libraries[@]}"
    built
    ranks() { # ranks COUNT CASE
        limit=60 run "NCCL on $1 ranks: $2" mpirun --oversubscribe -np "$1" "$out/ranks_nccl" "$2"
    }
    export CUDA_ON_CPU_NCCL_TIMEOUT=20
    counts="2 4"
    [ "$long" = 1 ] && counts="1 2 3 4 5 7"
    for count in $counts; do ranks "$count" check; done
    [ "$long" = 1 ] && CUDA_ON_CPU_STREAMS=shuffle:3 ranks 3 check
    for case in count kind type message abort watchdog; do ranks 3 "$case"; done
    CUDA_ON_CPU_NCCL_TIMEOUT=1 ranks 3 absent
fi

if [ "$long" = 1 ]; then
    limit=900
    export LLMC_TEST_ALL=0
    ! command -v clang++ >/dev/null || CXX=clang++ BUILD=$scratch/clang run "with clang" "$self"
    export DOUBLES_CXXFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -O1"
    ASAN_OPTIONS=detect_leaks=0 BUILD=$scratch/sanitized run "with sanitizers" "$self"
fi

sum="$passed passed, $failed failed"
[ "$skipped" -gt 0 ] && sum="$sum, $skipped skipped"
echo "$sum"
[ "$failed" -eq 0 ]
