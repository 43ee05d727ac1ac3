#!/usr/bin/env bash
# Equal bits: the whole log but its times (loss, grad_norm, lr, val_loss, data_hash, and state_hash of every step) and
# the tensors of the last checkpoint do not depend on the number of threads, the instruction set, recompute, or on
# stopping after 10 of 20 steps and going on in another process with others of these.
#
# Every architecture x precision has one reference (automatic instruction set, 1 thread, nothing recomputed). Everyday
# runs are the rows of PAIRS below: every two values of two factors meet in one of them. LLMC_TEST_ALL=1 runs the whole
# product for the precisions of LONG, and the rows for the rest. In switch the forward pass goes over to BF16 after 12
# of the 20 steps, after the point where runs are resumed.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

# architecture, precision, threads, instruction set, recompute, first step (10: resumed)
PAIRS='
gpt2  bf16      2 portable block    10
gpt2  bf16      3 avx2     none     10
gpt2  bf16_fp32 2 avx512   none     0
gpt2  fp32      2 amx      operands 0
gpt2  masked    1 amx      none     0
llama bf16      1 avx512   block    0
llama bf16_fp32 3 amx      block    10
llama fp32      1 portable operands 10
llama fp32      2 avx2     none     0
llama masked    1 portable operands 10
qwen3 bf16      3 amx      operands 10
qwen3 bf16_fp32 1 avx2     operands 0
qwen3 bf16_fp32 3 portable none     0
qwen3 fp32      3 avx512   block    10
qwen3 masked    2 avx2     block    10
qwen3 masked    3 avx512   operands 10
gpt2  nvfp4     2 portable operands 10
gpt2  nvfp4     3 avx512   block    0
llama nvfp4     3 avx2     operands 0
llama nvfp4     2 amx      block    10
qwen3 nvfp4     1 portable block    0
qwen3 nvfp4     2 avx512   none     10
gpt2  switch    3 avx2     block    10
llama switch    1 portable none     10
llama switch    2 avx512   operands 10
qwen3 switch    3 amx      block    0
gpt2  all_pow2  1 amx      block    10
llama all_pow2  3 portable none     10
qwen3 all_pow2  2 avx2     operands 0
gpt2  four_six  2 avx512   none     10
llama four_six  1 avx2     block    0
qwen3 four_six  3 portable operands 10'
LONG='fp32 bf16 bf16_fp32 masked nvfp4'

declare -A MODEL=(
    [gpt2]='--arch gpt2 --hidden 32 --heads 2 --seq_len 32 --batch 2 --global_batch_tokens 128'
    [llama]='--arch llama --hidden 48 --heads 6 --kv_heads 2 --seq_len 40 --batch 2 --global_batch_tokens 160'
    [qwen3]='--arch qwen3 --hidden 32 --heads 4 --kv_heads 2 --head_dim 16 --tie_embeddings false --seq_len 80 --batch 1
        --global_batch_tokens 160'
)
declare -A PRECISION=(
    [fp32]='--precision fp32'
    [bf16]='--precision bf16'
    [bf16_fp32]='--precision bf16 --master fp32'
    [masked]='--precision bf16 --document_mask true'
    [nvfp4]='--precision nvfp4'
    [switch]='--precision nvfp4 --bf16_last_layers 0 --switch_to_bf16_at 0.6 --gradient_headroom 17/16'
    [all_pow2]='--precision nvfp4 --bf16_last_layers 0 --stochastic_rounding all --tensor_scale pow2 --switch_to_bf16_at 0.7
        --switch_scope all'
    [four_six]='--precision nvfp4 --master fp32 --weight_blocks 1x16 --four_over_six both --four_over_six_metric mse
        --quantize_projections qkv,up,down --rht off'
)

documents "$scratch/train.bin" 24 110
documents "$scratch/val.bin" 3 90

train() { # train RUN ARCH PRECISION ARGUMENT...
    # shellcheck disable=SC2086 # words
    gpt ${MODEL[$2]} ${PRECISION[$3]} --layers 2 --steps 20 --lr 4e-3 --warmup_steps 4 --grad_clip 0.8 --hash_every 1 \
        --train_data "$scratch/train.bin" --val_data "$scratch/val.bin" --val_every 10 --checkpoint_every 10 \
        --keep_checkpoints 0 --run_dir "$1" "${@:4}"
}

machine_isas=()
for isa in portable avx2 avx512 amx; do
    gpt plan --isa $isa --layers 1
    if [ "$code" = 0 ]; then machine_isas+=("$isa"); else echo "skipped $isa: $(cat "$scratch/err")"; fi
done
check "portable is there" same "${machine_isas[0]:-}" portable

reference() { # reference ARCH PRECISION: makes it where it is not there yet
    local run=$scratch/ref_$1_$2
    [ -d "$run" ] && return
    train "$run" "$1" "$2" --threads 1
    check "$1 $2: trains" exits 0
    check "$1 $2: 20 lines" same "$(log_lines "$run")" 20
    check "$1 $2: 20 hashes, all different" same "$(grep -o '"state_hash":"[0-9a-f]\{16\}"' "$run/log.jsonl" | sort -u | wc -l)" 20
}

variant() { # variant ARCH PRECISION THREADS ISA RECOMPUTE FIRST-STEP
    local run=$scratch/run ref=$scratch/ref_$1_$2 name="$1 $2, $3 threads, $4, recompute $5, from step $6" file
    case " ${machine_isas[*]} " in *" $4 "*) ;; *) skip "$name" "no $4 here" && return ;; esac
    reference "$1" "$2"
    rm -rf "$run"
    local arguments=(--threads "$3" --isa "$4" --recompute "$5")
    if [ "$6" = 10 ]; then
        mkdir -p "$run/checkpoints"
        cp "$ref/log.jsonl" "$run"
        cp -r "$(step_dir "$ref" 10)" "$run/checkpoints"
        arguments+=(--resume auto)
    fi
    train "$run" "$1" "$2" "${arguments[@]}"
    check "$name: exit code" exits 0
    check "$name: log" same_log "$run" "$ref"
    for file in model optimizer; do
        check "$name: $file.safetensors" cmp "$(step_dir "$run" 20)/$file.safetensors" "$(step_dir "$ref" 20)/$file.safetensors"
    done
}

while read -r row; do
    # shellcheck disable=SC2086 # words
    [ -n "$row" ] && variant $row
done <<<"$PAIRS"
if [ "$long" = 1 ]; then
    for arch in "${!MODEL[@]}"; do
        for precision in $LONG; do
            for threads in 1 2 3; do
                for isa in "${machine_isas[@]}"; do
                    for recompute in none operands block; do
                        for first in 0 10; do variant "$arch" "$precision" $threads "$isa" $recompute $first; done
                    done
                done
            done
        done
    done
fi

# The comparison can fail: other precisions, masks, masters and seeds do give other bits.
for arch in "${!MODEL[@]}"; do for precision in "${!PRECISION[@]}"; do reference "$arch" "$precision"; done; done
check "24 references differ" same "$(for run in "$scratch"/ref_*; do field "$(tail -n 1 "$run/log.jsonl")" state_hash; done | sort -u | wc -l)" 24
train "$scratch/seed" llama bf16 --threads 1 --seed 2
check "another seed differs" differ "$(bits "$scratch/seed")" "$(bits "$scratch/ref_llama_bf16")"
finish
