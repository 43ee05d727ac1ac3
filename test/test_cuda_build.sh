#!/usr/bin/env bash
# The CUDA program as nvcc builds it: for sm_100a and, of sm_80, attention and norms; LLMC_TEST_ALL=1:
# all of it for all five targets. No warning, no kernel that spills registers (a table of all of them is printed), and
# without a GPU the program says so. Then what is compiled otherwise with cuDNN, for sm_90, where its headers and
# cudnn-frontend's are found. Skipped without nvcc.
# shellcheck source=test/lib.sh disable=SC2317 # functions that only `check` calls
source "$(dirname "$0")/lib.sh"

build=${BUILD:-build}
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
if [ ! -x "$nvcc" ]; then
    skip "nvcc builds" "no nvcc"
    finish
fi
compiler=$(awk '{ print $1; exit }' "$build/flags") # the one that built the rest
archs='sm_100 sm_80'
[ "$long" = 1 ] && archs='sm_100 sm_80 sm_90 sm_103 sm_120'

nvcc_make() { # nvcc_make ARCH TARGET...
    called="make BUILD=$build/$1 GPU_ARCH=$1 ${*:2}"
    timeout --kill-after=5 900 make -j "$(getconf _NPROCESSORS_ONLN)" "CC=$compiler" "BUILD=$build/$1" "GPU_ARCH=$1" USE_CUDNN=0 "${@:2}" >"$scratch/out" 2>"$scratch/err"
    code=$?
}
table() { # table ARCH: kernel, registers, spilled bytes
    cat "$build/$1"/nvcc/*.log | c++filt | awk '
        /Compiling entry function/ { kernel = $0; sub(/^[^\047]*\047(void )?/, "", kernel); sub(/\(.*$/, "", kernel) }
        /spill stores/ { spill = $0; sub(/^.*frame, /, "", spill); sub(/ bytes spill stores.*$/, "", spill) }
        /Used [0-9]+ registers/ { match($0, /Used [0-9]+/); printf "%-70s %4d %4d\n", kernel, substr($0, RSTART + 5, RLENGTH - 5), spill }' | sort -u
}
no_spills() { awk '$NF > 0 { bad = 1; print "        spills: " $0 } END { exit bad }' "$scratch/table"; }

objects=$(for source in llmc/cuda/*.cu; do basename "$source" .cu; done | grep -v attention_cudnn)
for arch in $archs; do
    files=$objects
    [ "$long$arch" = 0sm_80 ] && files='attention_forward attention_backward norm' # registers are scarce
    # shellcheck disable=SC2046,SC2086 # words
    nvcc_make $arch $(printf "$build/$arch/nvcc/%s.o " $files)
    check "$arch: compiles" exits 0
    check "$arch: no warning" not grep -h 'warning' "$build/$arch"/nvcc/*.log
    table "$arch" >"$scratch/table"
    check "$arch: kernels are listed" holds "$(wc -l <"$scratch/table") > 20"
    echo "measured $arch: $(wc -l <"$scratch/table") kernels, at most $(awk '{ print $(NF - 1) }' "$scratch/table" | sort -n | tail -n 1) registers"
    [ "$long" = 1 ] && sed 's/^/measured   /' "$scratch/table"
    check "$arch: no kernel spills" no_spills
done

nvcc_make '' train_gpt_nvfp4
if ! nvidia-smi >/dev/null 2>&1; then
    check "no GPU to build for: exit code" not exits 0
    check "no GPU to build for: what to do" says out 'give GPU_ARCH=sm_90'
fi
mine=0
[ -e train_gpt_nvfp4 ] || mine=1 # one that is there stays
[ $mine = 1 ] && nvcc_make sm_100 train_gpt_nvfp4
check "train_gpt_nvfp4: links" exits 0
if ! nvidia-smi >/dev/null 2>&1; then
    program=./train_gpt_nvfp4 gpt plan
    check "without a GPU: exit code" exits 1
    check "without a GPU: one line" same "$(grep -c . "$scratch/err")" 1
    check "without a GPU: says so" matches err '^error: no GPU: '
fi
[ $mine = 1 ] && rm -f train_gpt_nvfp4

# shellcheck disable=SC2016 # make's dollar
if [ -z "$(make -s --eval 'cudnn:; @echo $(CUDNN)' cudnn)" ]; then
    skip "attention by cuDNN" "no cudnn.h or no cudnn_frontend.h (CUDNN_FRONTEND_DIR=)"
    finish
fi
objects=$(cd llmc/cuda && grep -l 'LLMC_CUDNN' ./*.cu | sed 's,^./,,; s,cu$,o,')
# shellcheck disable=SC2046,SC2086 # words
nvcc_make sm_90 USE_CUDNN=1 BUILD=$build/sm_90_cudnn $(printf "$build/sm_90_cudnn/nvcc/%s " attention_cudnn.o $objects)
check "attention by cuDNN: compiles" exits 0
check "attention by cuDNN: no warning" not grep -h 'warning' "$build/sm_90_cudnn"/nvcc/*.log
finish
