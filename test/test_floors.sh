#!/usr/bin/env bash
# scripts/check_floors on a small tree: clean as it is, and with each violation planted in turn.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
tree=$(mktemp -d) || exit 1
trap 'rm -rf "$tree"' EXIT
passed=0 failed=0

write() { # write FILE LINE...
    mkdir -p "$(dirname "$tree/$1")"
    printf '%s\n' "${@:2}" >"$tree/$1"
}

plant() { # the small tree, clean
    rm -rf "$tree/llmc"
    write train_gpt.c '#include "program.h"' '#include <stdio.h>'
    write llmc/common.h '#pragma once' '#include <stdint.h>' 'typedef int64_t Common;'
    write llmc/common.c '#include "common.h"' '#include <stdlib.h>'
    write llmc/json.h '#pragma once' '#include "common.h"'
    write llmc/json.c '#include "json.h"' '#include <cjson/cJSON.h>'
    write llmc/tensor.h '#pragma once' '#include "common.h"'
    write llmc/token_file.h '#pragma once' '#include "common.h"'
    write llmc/ops.h '#pragma once' '#include "tensor.h"'
    write llmc/cpu/simd.h '#pragma once' '#include "common.h"' 'static inline void simd(int *restrict x) { *x = 0; }'
    write llmc/cpu/norm.c '#include "ops.h"' '#include "simd.h"' '#include "cpu/simd.h"' '#include <string.h>'
    write llmc/cuda/norm.cu '#include "ops.h"' '#include <cuda_runtime.h>'
    write llmc/comm.h '#pragma once' '#include "common.h"'
    write llmc/comm_mpi.c '#include "comm.h"' '#include <mpi.h>'
    write llmc/comm_nccl.cu '#include "comm.h"' '#include <cuda_runtime.h>' '#include <nccl.h>'
    write llmc/gpt.h '#pragma once' '#include "ops.h"'
    write llmc/zero.h '#pragma once' '#include "gpt.h"'
    write llmc/program.h '#pragma once' '#include "gpt.h"'
}

expect() { # expect WHAT WANTED-LINE: the only finding is that line
    local what=$1 wanted=$2 found
    found=$(scripts/check_floors "$tree" 2>&1 | grep -v '^skipped')
    if [ "$found" = "$wanted" ] || { [[ $wanted == *'*' ]] && [[ $found == "${wanted%\*}"* ]]; }; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        printf 'FAILED  %s\n  wanted: %s\n  found:  %s\n' "$what" "$wanted" "$found"
    fi
    plant
}

plant
expect "clean tree" "floors: 17 files, no finding"

write llmc/tensor.h '#pragma once' '#include "common.h"' '#include "gpt.h"'
expect "higher floor" 'llmc/tensor.h:3: floor 0 includes "gpt.h" of floor 3*'
write llmc/comm.h '#pragma once' '#include "token_file.h"' '  #  include "program.h"'
expect "higher floor, spaced" 'llmc/comm.h:3: floor 2 includes "program.h" of floor 4*'
write llmc/gpt.c '#include "gpt.h"' '#include "zero.h"'
expect "same floor, later in the table" 'llmc/gpt.c:2: "zero.h" stands after gpt on floor 3'
write llmc/ops.c '#include "ops.h"' '#include "cpu/simd.h"'
expect "into a later directory" 'llmc/ops.c:2: "cpu/simd.h" stands after ops on floor 2'
write llmc/cuda/norm.cu '#include "cpu/simd.h"'
expect "cuda includes cpu" 'llmc/cuda/norm.cu:1: cuda/ and cpu/ do not include each other'
write llmc/gpt.c '#include "common.h"' '#include "gpt.h"'
expect "own header not first" 'llmc/gpt.c:1: its own header "gpt.h" comes first'
write llmc/gpt.c 'int x;'
expect "no include" 'llmc/gpt.c:1: includes nothing, not even its own header'
write llmc/gpt.c '#include "gpt.h"' '#include <math.h>' '#include "common.h"'
expect "project header after system header" \
    'llmc/gpt.c:3: "common.h" after a system header: project headers come first'
write llmc/gpt.c '#include "gpt.h"' '#include "nowhere.h"'
expect "unknown header" 'llmc/gpt.c:2: no llmc/nowhere.h'
write llmc/novel.c '#include "common.h"'
expect "unknown file" 'llmc/novel.c:1: not in the table of scripts/check_floors: give it a floor'
write llmc/gpt.c '#include "gpt.h"' '#include <mpi.h>'
expect "mpi.h" 'llmc/gpt.c:2: mpi.h only in llmc/comm_mpi.c'
write llmc/comm_self.c '#include "comm.h"' '#include "nccl.h"'
expect "nccl.h in quotes" 'llmc/comm_self.c:2: nccl.h only in llmc/comm_nccl.cu'
write llmc/gpt.c '#include "gpt.h"' '#include <cJSON.h>'
expect "cJSON.h" 'llmc/gpt.c:2: cJSON.h only in llmc/json.c'
write train_gpt.c '#include "program.h"' '#include <cuda_bf16.h>'
expect "CUDA header" \
    'train_gpt.c:2: cuda_bf16.h only in llmc/cuda/, llmc/comm_nccl.cu and train_gpt_nvfp4.cu'
write llmc/comm.h '#pragma once' 'size_t bytes(void);'
expect "header needs another in C" 'llmc/comm.h:2: llmc/comm.h does not compile alone as C11: *'
write llmc/comm.h '#pragma once' 'static inline int *f(void *p) { return p; }'
if command -v g++ >/dev/null || command -v clang++ >/dev/null; then
    expect "header is not C++" 'llmc/comm.h:2: llmc/comm.h does not compile alone as C++17: *'
else
    echo "skipped header is not C++: no g++ or clang++"
fi

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
