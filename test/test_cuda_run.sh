#!/usr/bin/env bash
# The whole CUDA program on a CPU (train_gpt_nvfp4_cpu) beside train_gpt: every architecture's losses step by step, resume,
# recompute, generate, eval, a checkpoint that goes from one to the other and back, streams in a shuffled order; and that it
# is the CUDA program: no object of llmc/cpu is in it. LLMC_TEST_ALL=1: every architecture in FP32 too, and
# other orders of threads. Skipped where the CUDA toolkit's headers are not installed.
# shellcheck source=test/lib.sh disable=SC2317 # functions that only `check` calls
source "$(dirname "$0")/lib.sh"

needs_cuda "the CUDA program on a CPU"

declare -A MODEL=(
    [gpt2]='--arch gpt2 --hidden 48 --heads 3'
    [llama]='--arch llama --hidden 64 --heads 4 --kv_heads 2 --tie_embeddings false'
    [qwen3]='--arch qwen3 --hidden 64 --heads 4 --kv_heads 2 --head_dim 32 --document_mask true'
)
documents "$scratch/train.bin" 60 150
documents "$scratch/val.bin" 5 90
options() { # options ARCH PRECISION
    echo "${MODEL[$1]} --precision $2 --layers 2 --seq_len 48 --batch 2 --global_batch_tokens 192 --steps 20 --lr 4e-3 --warmup_steps 4
        --train_data $scratch/train.bin --val_data $scratch/val.bin --val_every 10 --val_batches 2 --checkpoint_every 10"
}
beyond() { relative "$@" | awk -v limit="$4" '$1 > limit { n++ } END { print NR ? n + 0 : 99 }'; } # beyond RUN REFERENCE KEY LIMIT
near() { # near RUN REFERENCE: losses and validation within 1e-3 at every step; norms within 2% at all but two, where they jump
    local loss val norm
    loss=$(worst "$1" "$2" loss) val=$(worst "$1" "$2" val_loss) norm=$(beyond "$1" "$2" grad_norm 0.02)
    echo "measured ${1##*/}: loss $loss, validation $val, norm at $norm steps"
    holds "$loss < 1e-3 && $val < 1e-3 && $norm <= 2"
}
same_losses() { same "$(bits "$1" | sed 's/"state_hash":"[^"]*"//')" "$(bits "$2" | sed 's/"state_hash":"[^"]*"//')"; }

# ---- beside the CPU's program

for arch in gpt2 llama qwen3; do
    for precision in bf16 fp32; do
        [ "$long$arch" = 0gpt2 ] || [ "$long$precision" != 0fp32 ] || continue
        # shellcheck disable=SC2046 # words
        gpt $(options $arch "$precision") --run_dir "$scratch/cpu_${arch}_$precision"
        check "$arch $precision on the CPU" exits 0
        # shellcheck disable=SC2046 # words
        on_cuda $(options $arch "$precision") --run_dir "$scratch/cuda_${arch}_$precision" --sample_every 20 --sample_tokens 5
        check "$arch $precision on CUDA" exits 0
        check "$arch $precision: 20 steps" same "$(log_lines "$scratch/cuda_${arch}_$precision")" 20
        check "$arch $precision: losses" near "$scratch/cuda_${arch}_$precision" "$scratch/cpu_${arch}_$precision"
    done
done

# ---- one run in other ways: the same bits

reference=$scratch/cuda_llama_bf16
again() { # again NAME ARGUMENT...
    rm -rf "$scratch/again"
    # shellcheck disable=SC2046 # words
    on_cuda $(options llama bf16) --run_dir "$scratch/again" "${@:2}"
    check "$1" exits 0
    check "$1: same losses" same_losses "$scratch/again" "$reference"
}
again "recompute block" --recompute block
again "recompute operands" --recompute operands
CUDA_ON_CPU_STREAMS=shuffle:3 again "streams in a shuffled order"
OMP_NUM_THREADS=1 again "one thread"
[ "$long" = 1 ] && CUDA_ON_CPU_ORDER=reverse again "blocks and threads in reverse order"
[ "$long" = 1 ] && CUDA_ON_CPU_ORDER=random:5 again "blocks and threads in random order"
rm -rf "$scratch/again/checkpoints/step_00000020"
# shellcheck disable=SC2046 # words
on_cuda $(options llama bf16) --run_dir "$scratch/again" --resume auto
check "resume" exits 0
check "resume: same losses" same_losses "$scratch/again" "$reference"
check "resume: same tensors" same "$(cd "$scratch/again/checkpoints/step_00000020" && cat ./*.safetensors | sha256sum)" \
    "$(cd "$reference/checkpoints/step_00000020" && cat ./*.safetensors | sha256sum)"

# ---- from the CPU to CUDA and back

run=$scratch/exchange
# shellcheck disable=SC2046 # words
gpt $(options llama bf16) --run_dir "$run"
rm -r "$(step_dir "$run" 20)"
# shellcheck disable=SC2046 # words
on_cuda $(options llama bf16) --run_dir "$run" --resume auto --checkpoint_every 5
check "the CPU's checkpoint on CUDA" exits 0
check "the CPU's checkpoint on CUDA: losses" near "$run" "$scratch/cpu_llama_bf16"
rm -r "$(step_dir "$run" 20)"
# shellcheck disable=SC2046 # words
gpt $(options llama bf16) --run_dir "$run" --resume auto
check "CUDA's checkpoint on the CPU" exits 0
check "CUDA's checkpoint on the CPU: losses" near "$run" "$scratch/cpu_llama_bf16"
for each in gpt on_cuda; do
    $each eval --checkpoint "$(step_dir "$run" 20)" --data "$scratch/val.bin" --batch 2
    check "eval by $each" exits 0
    declare "loss_$each=$(sed -n 's/^loss \([0-9.]*\).*/\1/p' "$scratch/out")"
    $each generate --checkpoint "$(step_dir "$run" 20)" --prompt "he was" --temperature 0 --tokens 12
    check "generate by $each" exits 0
    cp "$scratch/out" "$scratch/text_$each"
done
# shellcheck disable=SC2154 # declared in the loop
check "eval: the same loss" holds "($loss_gpt / $loss_on_cuda - 1)^2 < 1e-6"
check "generate: the same text" cmp "$scratch/text_gpt" "$scratch/text_on_cuda"

# ---- it is the CUDA program

check "no object of llmc/cpu in it" not grep -qE '/cpu/[a-z_]+\.(portable|avx2|avx512|amx)\.o|/cpu/backend\.o' "${BUILD:-build}/cuda_on_cpu/link.map"

# ---- what is refused

on_cuda plan --isa avx2
check "isa: refused" exits 2
check "isa: says so" says err "isa avx2: is of train_gpt"
CUDA_VISIBLE_DEVICES='' on_cuda plan
check "no GPU: exit code" exits 1
check "no GPU: one line" matches err '^error: no GPU: '
finish
