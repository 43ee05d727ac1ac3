#!/usr/bin/env bash
# What `make check` does: everything that can be said about the sources without running the program. Builds into
# build/check, so it never disturbs a build. One line for each check, the findings of a failed one above it; tools that
# are not installed are skipped and named. Exit code 1 when a check failed.
#
#     scripts/check.sh
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES # of the make that called
PATH=$PWD/build/deps/bin:$PATH # what scripts/setup.sh brought
jobs=$(getconf _NPROCESSORS_ONLN)
failures=()
mkdir -p build/check
log=$(mktemp build/check/log.XXXXXX) || exit 1
trap 'rm -f "$log"' EXIT

check() { # check NAME COMMAND...
    local start=$SECONDS
    if "${@:2}" >"$log" 2>&1; then
        grep '^skipped' "$log"
        echo "ok       $1 ($((SECONDS - start)) s)"
    else
        cat "$log"
        echo "FAILED   $1"
        failures+=("$1")
    fi
}
skip() { echo "skipped  $1: $2"; }

sources=$(find llmc test -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' | LC_ALL=C sort; ls train_gpt*.c train_gpt*.cu 2>/dev/null)
c_files=$(grep '\.c$' <<<"$sources")
formatted="$sources $(find dev -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' | LC_ALL=C sort | tr '\n' ' ')"
scripts=$(grep -lE '^#!.*\b(ba)?sh\b' scripts/* data/*.sh test/*.sh dev/*.sh .ci/run 2>/dev/null)

build() { # everything but the link of train_gpt, which would replace the one in the repository
    make -k -j "$jobs" "BUILD=build/check/$1" "CC=$1" EXTRA_CFLAGS=-Werror "build/check/$1/train_gpt.o" tests
}
for compiler in gcc clang; do
    if command -v $compiler >/dev/null; then check "build with $compiler -Werror" build $compiler; else skip "$compiler" "not installed"; fi
done

build_cuda() { # the CUDA program and its tests for a CPU, linked into build/check
    make -k -j "$jobs" "BUILD=build/check/$1" "CC=$1" EXTRA_CFLAGS=-Werror OPTIMIZE=-O0 "build/check/$1/cuda_on_cpu/cuda_ops" \
        "build/check/$1/cuda_on_cpu/bench_cuda"
}
cuda_home=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")")}
for compiler in gcc clang; do
    if [ ! -f "$cuda_home/include/cublasLt.h" ]; then
        skip "CUDA with $compiler" "no CUDA headers"
    elif command -v $compiler >/dev/null; then
        check "CUDA with $compiler -Werror" build_cuda $compiler
    fi
done

check "floors" scripts/check_floors

# Suppressed everywhere: invalidPointerCast (memory of the arena is handed out as bytes) and a remark that is no finding.
# Anything else that is wrong is suppressed where it stands. cppcheck 2.10 does not know _Noreturn.
if command -v cppcheck >/dev/null; then
    mkdir -p build/check/cppcheck
    # shellcheck disable=SC2086 # lists of files
    check "cppcheck" cppcheck --enable=warning,performance,portability --error-exitcode=1 --inline-suppr --quiet --std=c11 \
        --suppress=invalidPointerCast --suppress=normalCheckLevelMaxBranches --cppcheck-build-dir=build/check/cppcheck \
        -j "$jobs" -Illmc -Itest -D_GNU_SOURCE -DISA=portable '-D_Noreturn=__attribute__((noreturn))' $c_files
else
    skip cppcheck "not installed"
fi

format=
for candidate in clang-format-14 clang-format; do
    [ -z "$format" ] && [[ $($candidate --version 2>/dev/null) == *'version 14.'* ]] && format=$candidate
done
if [ -n "$format" ]; then
    # shellcheck disable=SC2086
    check "clang-format 14" "$format" --dry-run -Werror $formatted
else
    skip clang-format "version 14 not installed"
fi

if command -v shellcheck >/dev/null; then
    # shellcheck disable=SC2086
    check "shellcheck" shellcheck -x $scripts
else
    skip shellcheck "not installed"
fi

open_ends() { ! grep -rnwE 'TO''DO|FIX''ME|XX''X' Makefile llmc test scripts dev data .ci train_gpt* --include='*.[ch]' \
    --include='*.cu*' --include='*.sh' --include='*.py' --include=Makefile --include=run --include=check_floors; }
check "no open ends" open_ends

# Lines of code: what is left without comments and blank lines, so that explaining costs nothing.
code_lines() { tr '\n' '\0' | xargs -0 cat | awk '
    { gsub(/\/\*[^*]*\*+([^\/*][^*]*\*+)*\//, "") }
    inside { if (!sub(/^.*\*\//, "")) next; inside = 0 }
    sub(/\/\*.*$/, "") { inside = 1 }
    { sub(/\/\/.*$/, "") }
    /[^ \t]/ { count++ }
    END { print count }'; }
on_cpu=$(grep -vE '^test/|^llmc/cuda/|\.cu$' <<<"$sources" | code_lines) on_gpu=$(grep -vE '^test/|^llmc/cpu/|^train_gpt\.c$' <<<"$sources" | code_lines)
check "lines of code: train_gpt $on_cpu of at most 15000, train_gpt_nvfp4 $on_gpu of 16500" [ "$on_cpu" -le 15000 -a "$on_gpu" -le 16500 ]

if [ ${#failures[@]} -gt 0 ]; then
    printf 'check: failed:'
    printf ' %s;' "${failures[@]}"
    echo
    exit 1
fi
echo "check: all passed"
