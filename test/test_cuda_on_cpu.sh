#!/usr/bin/env bash
# dev/cuda_on_cpu: kernels of test/cuda_on_cpu/ give the right results in every order of threads and streams, and each
# planted fault is reported, or shows as a wrong result in the orders that are there to show it. The same under
# AddressSanitizer and UndefinedBehaviorSanitizer. LLMC_TEST_ALL=1: also with the other compiler and with ucontext.
# Skipped where there are no CUDA headers (CUDA_INCLUDE names a folder with cuda_runtime.h); no GPU needed. Where nvcc is
# installed it compiles the same sources.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
export LC_ALL=C OMP_WAIT_POLICY=passive
unset CUDA_ON_CPU_ORDER CUDA_ON_CPU_STREAMS CUDA_ON_CPU_STATS CUDA_ON_CPU_CAPABILITY CUDA_ON_CPU_MEMORY_MB

cuda=
for folder in "${CUDA_INCLUDE:-}" "${CUDA_HOME:-/usr/local/cuda}/include" /usr/local/cuda/include /usr/include; do
    if [ -z "$cuda" ] && [ -f "$folder/cuda_runtime.h" ]; then cuda=$folder; fi
done
if [ -z "$cuda" ]; then
    echo "skipped cuda_on_cpu: no cuda_runtime.h found (CUDA_INCLUDE=FOLDER)"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi

for tool in g++ python3; do
    command -v $tool >/dev/null && continue
    echo "skipped cuda_on_cpu: no $tool"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
done

out=$(mktemp -d) || exit 1
trap 'rm -rf "$out"' EXIT
passed=0 failed=0 skipped=0
check() { # check NAME COMMAND...: passed when it succeeds; else the last output is shown
    local name=$1
    shift
    if "$@"; then passed=$((passed + 1)) && return; fi
    failed=$((failed + 1))
    echo "FAILED  $name"
    head -n 12 "$out/log" | sed 's/^/        /'
}
says() { grep -qF -- "$1" "$out/log"; }
not() { ! "$@"; }

# ---- building ----

core=(block device fiber launch memory settings shared stats stream)
flags=(-std=c++17 -g -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra -Werror
    -Idev/cuda_on_cpu -Illmc -isystem "$cuda")
filter=dev/cuda_on_cpu/launch_filter.py

program() { # program SOURCE.cu TARGET COMPILER FLAG...: with the library's objects in TARGET's folder
    python3 "$filter" "$1" "$2.cpp" >"$2.log" 2>&1 &&
        "$3" "${flags[@]}" -include cuda_on_cpu.h "${@:4}" "$2.cpp" "$(dirname "$2")"/*.o -o "$2" >>"$2.log" 2>&1
}
build() { # build NAME COMPILER FLAG...: the library and the programs, in the folder $out/NAME
    local folder=$out/$1 file jobs=()
    mkdir -p "$folder"
    for file in "${core[@]}"; do
        "$2" "${flags[@]}" "${@:3}" -c "dev/cuda_on_cpu/$file.cpp" -o "$folder/$file.o" >"$folder/$file.log" 2>&1 &
        jobs+=($!)
        if [ ${#jobs[@]} -ge 2 ]; then wait "${jobs[0]}" && jobs=("${jobs[@]:1}"); fi
    done
    wait
    for file in kernels runtime faults; do program "test/cuda_on_cpu/$file.cu" "$folder/$file" "${@:2}"; done
    cat "$folder"/*.log >"$out/log"
    check "$1: builds without a warning" test ! -s "$out/log"
}

run() { # run PROGRAM [ARGUMENT]: under a timeout, into the log; a subshell, whose own word on an abort is not wanted
    (timeout --kill-after=5 60 "$@" >"$out/log" 2>&1 </dev/null; exit $?) 2>/dev/null
    code=$?
}
results() { # results FOLDER ORDER STREAMS: the checks that the programs make themselves
    local file
    for file in kernels runtime; do
        CUDA_ON_CPU_ORDER=$2 CUDA_ON_CPU_STREAMS=$3 run "$out/$1/$file"
        if [[ $(tail -n 1 "$out/log") =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed$ ]] && [ "$code" -eq "$((BASH_REMATCH[2] > 0))" ]; then
            passed=$((passed + BASH_REMATCH[1]))
            [ "${BASH_REMATCH[2]}" -eq 0 ] && continue
        fi
        check "$1 $file in the order $2, $3" false
    done
}

# ---- faults ----

ends_with() { # ends_with FAULT TEXT...: the program ends, and says so
    run "$out/plain/faults" "$1"
    check "$1: the program ends" test "$code" -ge 128
    local text
    for text in "${@:2}"; do check "$1: says $text" says "$text"; done
}
faults_that_end() {
    ends_with "thread ends before a barrier" "divergent barrier: this thread has ended" "threads 0 to 62 wait at __syncthreads" \
        "faults.cu:" "kernel some_at_barrier, block (" "thread (63, 0, 0)"
    ends_with "two barriers" "divergent barrier: this thread comes to __syncthreads" "threads 0 to 31 wait"
    ends_with "barrier and shuffle" "threads 0 to 4 wait at __shfl_xor_sync" "for the lanes ffffffff"
    ends_with "barrier without end" "deadlock: no thread of the block can go on" "threads 1 to 31 wait at __syncthreads" \
        "threads 0 to 0 wait at __syncwarp"
    ends_with "two collectives" "this lane comes to __ballot_sync, others of the lanes ffffffff wait at __shfl_xor_sync"
    ends_with "lane not in mask" "lane 0 is not in its mask fffffffe"
    ends_with "shared overrun" "shared memory written outside of rows: at byte 528 of its 528" "kernel overrun_static, block (0, "
    ends_with "shared underrun" "shared memory written outside of rows: at byte -4 of its 528"
    ends_with "dynamic shared overrun" "written outside of (dynamic): at byte -4 of its 64"
    ends_with "no dynamic shared memory" "dynamic shared memory in a launch that asked for none"
    ends_with "static shared memory too large" "with large, shared memory of 102400 bytes static (at most 49152)"
    ends_with "shared memory too large in all" "with some, shared memory of 40960 bytes static" "10240 dynamic (at most 49152 in all)"
    ends_with "store out of bounds" "store of 4 bytes out of bounds: at byte 100 of an allocation of 100" "thread (0, 0, 0)"
    ends_with "load out of bounds" "load of 4 bytes out of bounds: at byte -4"
    ends_with "pack out of bounds" "load of 16 bytes out of bounds: at byte 96"
    ends_with "misaligned pack" "misaligned load of 16 bytes: at byte 8"
    ends_with "null pointer" "load of 4 bytes at a null pointer"
    ends_with "host pointer as device pointer" "which is a host pointer" "kernel store"
    ends_with "stack overflow" "a thread needs more stack than it has" "kernel deep"
    ends_with "truncated grid" "a dimension that is not in 0 to 2^32 - 1"
    ends_with "error not asked for" "blocks of 2000 x 1 x 1 threads" "the program ends without cudaGetLastError"
    ends_with "access after free" "that has been freed"
    ends_with "device pointer followed by the host" "a device pointer was followed as if it were the host's"
    ends_with "device access by host code" "host code stores to device memory"
    ends_with "copy to the device from the device" "source" "is a device pointer, a host pointer is asked for"
    ends_with "copy to a host pointer" "destination" "is a host pointer, a device pointer is asked for"
    ends_with "copy out of bounds" "cudaMemcpy of 100 bytes out of bounds: at byte 4"
    ends_with "memset out of bounds" "cudaMemset of 101 bytes out of bounds"
    ends_with "free of a host pointer" "which is not device memory"
    ends_with "free twice" "a second time"
    ends_with "stream that was destroyed" "a stream that does not exist"
    ends_with "event that was destroyed" "an event that does not exist"
}

answer() { # answer FAULT ORDER STREAMS
    CUDA_ON_CPU_ORDER=$2 CUDA_ON_CPU_STREAMS=$3 OMP_NUM_THREADS=1 run "$out/plain/faults" "$1"
    cat "$out/log"
}
shows() { # shows FAULT SETTING right|wrong: `wrong`: with one of five seeds at least; `right`: with all
    local seed answers=
    for seed in 1 2 3 4 5; do
        case $2 in
        random) answers+=" $(answer "$1" random:$seed in-order)" ;;
        shuffle) answers+=" $(answer "$1" forward shuffle:$seed)" ;;
        *) answers+=" $(answer "$1" "$2" in-order)" ;;
        esac
    done
    echo "$answers" >"$out/log"
    if [ "$3" = wrong ]; then
        [[ $answers =~ ^(\ (right|wrong)){5}$ && $answers = *wrong* ]]
    else
        [ "$answers" = " right right right right right" ]
    fi
}
faults_that_show() {
    local name
    for name in "missing barrier" "missing order of blocks"; do
        check "$name: not seen going forward" shows "$name" forward right
        check "$name: seen in reverse" shows "$name" reverse wrong
        check "$name: seen in random order" shows "$name" random wrong
    done
    for name in "missing event" "pinned read" "pinned write"; do
        check "$name: not seen in order" shows "$name" forward right
        check "$name: seen with shuffled streams" shows "$name" shuffle wrong
    done
    for name in "event" "pinned read in time" "pinned write in time"; do
        check "$name: right with shuffled streams" shows "$name" shuffle right
    done
}

# ---- settings, counters, the filter ----

bad_setting() { # bad_setting NAME VALUE
    run env "$1=$2" "$out/plain/runtime"
    check "$1=$2 is refused" says "$1=$2: expected"
}
settings() {
    bad_setting CUDA_ON_CPU_ORDER sideways
    bad_setting CUDA_ON_CPU_ORDER random:
    bad_setting CUDA_ON_CPU_STREAMS shuffle:x
    bad_setting CUDA_ON_CPU_STATS yes
    bad_setting CUDA_ON_CPU_CAPABILITY ten
    bad_setting CUDA_ON_CPU_MEMORY_MB -1
    CUDA_ON_CPU_STATS=1 run "$out/plain/runtime"
    check "a table at the end" says "kernel                                    launches      threads     bytes read"
    check "counters of a kernel" grep -qE '^copy +10 +320 +1280 +1280 +40 +40$' "$out/log"
    CUDA_ON_CPU_MEMORY_MB=0 run "$out/plain/kernels"
    check "a small device is full" test "$code" -ne 0
}

filters() { # filters NAME MESSAGE: of the source on standard input
    cat >"$out/x.cu"
    python3 "$filter" "$out/x.cu" "$out/x.cpp" >"$out/log" 2>&1
    check "filter: $1" says "$2"
}
filter_checks() {
    filters "two variables in one declaration" "x.cu:2: one variable" <<<$'void f() {\n__shared__ float a[3], b; }'
    filters "an initial value" "x.cu:1: one variable" <<<'void f() { __shared__ float a = 1; }'
    filters "no name" "x.cu:2: no kernel before <<<" <<<$'\n; <<<1, 1>>>();'
    filters "no end" "x.cu:1: no >>> after <<<" <<<'k<<<1, 1();'
    echo '__device__ inline void g() { __shared__ int x; x = 1; }' >"$out/y.cuh"
    printf '#include "y.cuh"\n__global__ void k() { g(); }\nint wrong = "";\n' >"$out/x.cu"
    python3 "$filter" "$out/x.cu" "$out/x.cpp" "$out/x.d"
    check "filter: what it read" grep -qF "x.cpp: $out/x.cu $out/y.cuh" "$out/x.d"
    g++ "${flags[@]}" -include cuda_on_cpu.h -fsyntax-only "$out/x.cpp" >"$out/log" 2>&1
    check "filter: messages of the compiler name the source" says "x.cu:3:"
    check "filter: a file that is included is rewritten too" not says "y.cuh"
    g++ "${flags[@]}" -include cuda_on_cpu.h -fsyntax-only -x c++ "$out/y.cuh" >"$out/log" 2>&1
    check "a shared variable that was not rewritten does not compile" says "launch_filter.py did not rewrite"
}

# ---- all of it ----

build plain g++ -O2
if [ "$failed" -gt 0 ]; then echo "$passed passed, $failed failed" && exit 1; fi
for streams in in-order shuffle:1 shuffle:2; do
    for order in forward reverse random:1 random:2; do results plain "$order" "$streams"; done
done
faults_that_end
faults_that_show
settings
filter_checks

nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
if command -v "$nvcc" >/dev/null; then
    for file in kernels runtime; do
        "$nvcc" -std=c++17 -arch=sm_80 -Werror all-warnings -Illmc -c test/cuda_on_cpu/$file.cu -o "$out/$file.o" >"$out/log" 2>&1
        check "$file.cu is CUDA to nvcc" test $? -eq 0
    done
else
    skipped=$((skipped + 1))
    echo "skipped cuda_on_cpu: the tests' sources through nvcc, which is not installed"
fi

sanitize=(-O1 '-fsanitize=address,undefined' -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
build sanitized g++ "${sanitize[@]}"
results sanitized forward in-order
results sanitized random:3 shuffle:3
run "$out/sanitized/faults" "shared overrun"
check "AddressSanitizer sees the shared overrun" says "use-after-poison"
check "AddressSanitizer's report names the kernel" says "cuda_on_cpu: in kernel overrun_static, block ("

if [ "${LLMC_TEST_ALL:-0}" = 1 ]; then
    build ucontext g++ -O2 -DCUDA_ON_CPU_UCONTEXT
    results ucontext random:4 shuffle:4
    if command -v clang++ >/dev/null && echo 'int main(){}' | clang++ -fopenmp -x c++ - -o "$out/probe" 2>/dev/null; then
        build clang clang++ -O2
        results clang reverse shuffle:5
    else
        skipped=$((skipped + 1))
        echo "skipped cuda_on_cpu with clang++: not installed, or without OpenMP"
    fi
fi

sum="$passed passed, $failed failed"
[ "$skipped" -gt 0 ] && sum="$sum, $skipped skipped"
echo "$sum"
[ "$failed" -eq 0 ]
