#!/usr/bin/env bash
# NVFP4 in whole runs of the CUDA program on a CPU, beside train_gpt: losses of every architecture step by step, on a
# device with FP4 tensor cores and on one that emulates them; recipes that change one thing; the switch to BF16; recompute,
# resume and exchange of checkpoints in the middle; telemetry. LLMC_TEST_ALL=1: every recipe on every architecture.
# Skipped where the CUDA toolkit's headers are not installed.
# shellcheck source=test/lib.sh disable=SC2317 # functions that only `check` calls
source "$(dirname "$0")/lib.sh"

needs_cuda "NVFP4 in the CUDA program on a CPU"

declare -A MODEL=(
    [gpt2]='--arch gpt2 --hidden 48 --heads 3'
    [llama]='--arch llama --hidden 64 --heads 4 --kv_heads 2 --ffn 80 --tie_embeddings false'
    [qwen3]='--arch qwen3 --hidden 64 --heads 4 --kv_heads 2 --head_dim 32'
)
documents "$scratch/train.bin" 60 150
documents "$scratch/val.bin" 5 90
options() { # options ARCH
    echo "${MODEL[$1]} --precision nvfp4 --layers 3 --seq_len 32 --batch 1 --global_batch_tokens 64 --steps ${steps:-20} --lr 5e-4 --warmup_steps 4
        --train_data $scratch/train.bin --val_data $scratch/val.bin --val_every 5 --val_batches 2 --checkpoint_every 5 --hash_every 0"
}
near() { # near NAME RUN REFERENCE: losses and validation within LIMIT (1e-3) at every step
    local loss val
    loss=$(worst "$2" "$3" loss) val=$(worst "$2" "$3" val_loss)
    echo "measured $1: loss $loss, validation $val"
    holds "$loss < ${limit_loss:-1e-3} && $val < ${limit_loss:-1e-3}"
}
same_losses() { same "$(bits "$1")" "$(bits "$2")"; }
matches_log() { grep -qE -- "$2" "$1/log.jsonl"; }
both() { # both NAME ARCH ARGUMENT...: on the CPU and on CUDA
    rm -rf "$scratch/cpu" "$scratch/cuda"
    # shellcheck disable=SC2046 # words
    gpt $(options "$2") --run_dir "$scratch/cpu" "${@:3}"
    check "$1 on the CPU" exits 0
    # shellcheck disable=SC2046 # words
    on_cuda $(options "$2") --run_dir "$scratch/cuda" "${@:3}"
    check "$1 on CUDA" exits 0
    check "$1: losses" near "$1" "$scratch/cuda" "$scratch/cpu"
}

# ---- the default recipe

[ "$long" = 1 ] || steps=10
for arch in gpt2 llama qwen3; do
    both "$arch" $arch
    cp -r "$scratch/cuda" "$scratch/cuda_$arch"
    cp -r "$scratch/cpu" "$scratch/cpu_$arch"
    # shellcheck disable=SC2046 # words
    CUDA_ON_CPU_CAPABILITY=9.0 on_cuda $(options $arch) --run_dir "$scratch/emulated_$arch"
    check "$arch emulated" exits 0
    check "$arch emulated: says so" says out 'NVFP4 emulated'
    check "$arch emulated: losses" near "$arch emulated" "$scratch/emulated_$arch" "$scratch/cpu_$arch"
done

# ---- every kernel of the backend was launched, in one of these and of three short runs

short=(--steps 2 --checkpoint_every 0 --val_every 0 --overwrite)
launched() { # launched CAPABILITY ARCH ARGUMENT...: adds the kernels of a short run
    # shellcheck disable=SC2046 # words
    CUDA_ON_CPU_STATS=1 CUDA_ON_CPU_CAPABILITY=$1 on_cuda $(options "$2") "${@:3}" "${short[@]}" --run_dir "$scratch/kernels"
    check "$2 ${*:3} on compute capability $1" exits 0
    cat "$scratch/out" "$scratch/err" >>"$scratch/stats"
}
launched 9.0 gpt2 --precision fp32
launched 9.0 gpt2 --precision bf16 --sample_every 2 --sample_tokens 3
launched 9.0 gpt2 --tensor_scale pow2
launched 12.0 gpt2 # its bias is added by a kernel
launched 10.0 qwen3 --telemetry_every 1
leave='dense_lse_kernel' # with cuDNN only
if command -v mpirun >/dev/null && [[ $(ldd "$cuda") == *libmpi* ]]; then
    for blocks in 16x16 1x16; do
        # shellcheck disable=SC2046 # words
        CUDA_ON_CPU_STATS=1 timeout --kill-after=5 120 scripts/run_local.sh -np 2 "$cuda" $(options llama) "${short[@]}" --zero_stage 1 \
            --run_dir "$scratch/kernels" --deterministic_reduction true --weight_blocks $blocks >"$scratch/out" 2>&1
        cat "$scratch/out" >>"$scratch/stats"
    done
else
    skip "kernels of several ranks" "no MPI"
    leave="$leave scales_from_amax quantize_part unpack_part"
fi
for kernel in $(cat llmc/cuda/*.cu llmc/cuda/*.cuh | tr '\n' ' ' | grep -oE '__global__ void( +__launch_bounds__\([^)]*\))? +[a-z_0-9]+\(' |
    grep -oE '[a-z_0-9]+\($' | tr -d '(' | sort -u); do
    [[ " $leave " == *" $kernel "* ]] || check "kernel $kernel was launched" grep -qw "$kernel" "$scratch/stats"
done

# ---- recipes that change one thing

recipes='--tensor_scale pow2
--four_over_six both
--gradient_headroom 17/16
--weight_blocks 1x16
--stochastic_rounding all
--rht off
--dgrad bf16
--wgrad bf16
--fprop bf16
--switch_to_bf16_at 0.5
--quantize_projections o,down
--recompute block
--recompute operands'
archs=llama
[ "$long" = 1 ] || steps=4
[ "$long" = 1 ] && archs='gpt2 llama qwen3'
for arch in $archs; do
    while read -r recipe; do
        # shellcheck disable=SC2086 # words
        both "$arch $recipe" $arch $recipe
    done <<<"$recipes"
done

# ---- one run in other ways: the same bits

steps=20
[ "$long" = 1 ] || steps=10
last=$(printf step_%08d "$steps")

reference=$scratch/cuda_llama
again() { # again NAME ARGUMENT...
    rm -rf "$scratch/again"
    # shellcheck disable=SC2046 # words
    on_cuda $(options llama) --run_dir "$scratch/again" "${@:2}"
    check "$1" exits 0
    check "$1: same losses" same_losses "$scratch/again" "$reference"
}
again "recompute block" --recompute block
CUDA_ON_CPU_STREAMS=shuffle:3 again "streams in a shuffled order"
rm -rf "$scratch/again/checkpoints/$last"
# shellcheck disable=SC2046 # words
on_cuda $(options llama) --run_dir "$scratch/again" --resume auto
check "resume: same losses" same_losses "$scratch/again" "$reference"
# shellcheck disable=SC2046 # words
on_cuda $(options llama) --run_dir "$scratch/watched" --telemetry_every 5 --shadow_every 5
check "telemetry and shadow steps" exits 0
check "telemetry and shadow steps: in the log" matches_log "$scratch/watched" '"telemetry":.*"shadow":'
check "telemetry and shadow steps: of their steps only" same "$(grep -c '"telemetry"' "$scratch/watched/log.jsonl")" $((steps / 5))

# shellcheck disable=SC2046 # words
on_cuda $(options llama) --run_dir "$scratch/tuned" --tune_gemm true
check "tune_gemm" exits 0
check "tune_gemm: losses" near "tune_gemm" "$scratch/tuned" "$scratch/cpu_llama"
cp "$scratch/tuned/log.jsonl" "$scratch/tuned.before"
rm -r "$scratch/tuned/checkpoints/$last"
# shellcheck disable=SC2046 # words
on_cuda $(options llama) --run_dir "$scratch/tuned" --resume auto
check "tune_gemm: a resume has the same losses" same "$(grep -o '"loss":[^,]*' "$scratch/tuned.before")" "$(grep -o '"loss":[^,]*' "$scratch/tuned/log.jsonl")"
# shellcheck disable=SC2046 # words
on_cuda $(options llama) --run_dir "$scratch/tuned" --overwrite --steps 2
check "tune_gemm: forgotten with the run" not test -e "$scratch/tuned/algorithms.json"

# ---- from the CPU to CUDA and back

run=$scratch/exchange
cp -r "$scratch/cpu_llama" "$run"
rm -r "$run/checkpoints/$last"
# shellcheck disable=SC2046 # words
on_cuda $(options llama) --run_dir "$run" --resume auto
check "the CPU's checkpoint on CUDA" exits 0
check "the CPU's checkpoint on CUDA: losses" near "CPU to CUDA" "$run" "$scratch/cpu_llama"
rm -r "$run/checkpoints/$last"
# shellcheck disable=SC2046 # words
gpt $(options llama) --run_dir "$run" --resume auto
check "CUDA's checkpoint on the CPU" exits 0
check "CUDA's checkpoint on the CPU: losses" near "and back" "$run" "$scratch/cpu_llama"

# ---- a loss that is not finite: found a step later, told and logged as by the CPU, which knows it at once

said() { # said RUN FILE: keeps what a program said of its end, and what its log has, without numbers that are near only
    sed -nE 's/^(error: step [0-9]+: the (loss|gradient norm) is).*(; weights and moments are those of step [0-9]+).*/\1\3/p
        s/^(  [a-z0-9_.]+ +gradient norm) -?(nan|inf)$/\1/p; /^  [0-9]+ of [0-9]+ parameters/p' "$scratch/err" >"$2"
    sed -E 's/:[^,}]*//g' "$1/log.jsonl" >>"$2"
}
for recipe in '--precision bf16' '--tensor_scale amax' '--tensor_scale pow2'; do
    # heads of 8, which tensor cores do not take: their attention overflows at scores of 1e9, and the CPU's a few steps later
    # shellcheck disable=SC2206 # words
    wild=(--heads 6 --steps 60 --lr 1000 --weight_decay 100 --grad_clip 0 --warmup_steps 0 --val_every 0 --checkpoint_every 0 --hash_every 0 $recipe)
    rm -rf "$scratch/wild" "$scratch/wild_cuda"
    # shellcheck disable=SC2046 # words
    gpt $(options gpt2) "${wild[@]}" --run_dir "$scratch/wild"
    said "$scratch/wild" "$scratch/said"
    check "not finite, $recipe, on the CPU" exits 1
    # shellcheck disable=SC2046 # words
    on_cuda $(options gpt2) "${wild[@]}" --run_dir "$scratch/wild_cuda"
    said "$scratch/wild_cuda" "$scratch/said_cuda"
    check "not finite, $recipe, on CUDA" exits 1
    check "not finite, $recipe: names step and parameters" grep -q '^  .* gradient norm' "$scratch/said_cuda"
    check "not finite, $recipe: not at once" holds "$(log_lines "$scratch/wild_cuda") >= 3"
    check "not finite, $recipe: step, parameters and log are the CPU's" cmp "$scratch/said" "$scratch/said_cuda"
done

# ---- memory for the backward pass: what plan says for each token and block, by hand, and what a run takes

plan_saved() { # plan_saved BLOCKS: from `plan`: all bytes, and those of operands, of a token in these blocks
    sed -nE "s/^  in blocks $1 +([0-9.]+): ([0-9.]+) of operands.*/\1 \2/p" "$scratch/out"
}
# N = 256 tokens; hidden 256, 4 heads (2 of keys) of 64, ffn 384: an operand of 256 columns takes 144 bytes a token, of 384 216; one
# float beside each operand, the tensor's scale, takes 256 bytes.
saved=(--arch llama --hidden 256 --heads 4 --kv_heads 2 --ffn 384 --layers 3 --bf16_last_layers 1 --seq_len 128 --batch 2 --precision nvfp4
    --global_batch_tokens 256 --steps 1 --train_data "$scratch/train.bin")
on_cuda plan "${saved[@]:0:20}"
text=$(awk '/^  saved for backward/ { print $5, $6 }' "$scratch/out")
check "plan: NVFP4 blocks, by hand" same "$(plan_saved 0-1)" \
    "$(awk 'BEGIN { operands = 3 * 144 + 216 + 4 * 256 / 256; print 2 * 512 + 512 + 4 * 4 + 512 + 4 + 2 * 768 + operands, operands }')"
check "plan: the BF16 block, by hand" same "$(plan_saved 2-2)" \
    "$(awk 'BEGIN { operands = 2 * 512 + 2 * 384; print 2 * 512 + 512 + 4 * 4 + 512 + 4 + 2 * 768 + operands, operands }')"
check "plan: blocks add up to what is saved" same "$(awk '/^  saved for backward/ { print $4 }' "$scratch/out")" \
    "$(awk -v a="$(plan_saved 0-1)" -v b="$(plan_saved 2-2)" 'BEGIN { print 256 * (2 * a + b) }')"
on_cuda "${saved[@]}" --run_dir "$scratch/saved"
check "plan: a run takes the same" says out "saved for backward $text,"

# ---- what is refused

# shellcheck disable=SC2046 # words
on_cuda $(options llama) --run_dir "$scratch/no" --native_rounding true
check "native_rounding where there is none: refused" exits 2
check "native_rounding where there is none: says so" says err 'native_rounding: '
finish
