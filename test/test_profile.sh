#!/usr/bin/env bash
# --profile: the table has every operation of the run, as often as the model calls it, with the work that the shapes
# give; shares add up; no bit of a run changes, whatever the recipe, recomputation or sharing.
# shellcheck source=test/lib.sh disable=SC2317 # functions that only `check` calls
source "$(dirname "$0")/lib.sh"

documents "$scratch/train.bin" 40 110
run=(--train_data "$scratch/train.bin" --batch 2 --hash_every 1 --warmup_steps 2 --threads 2)

table() { sed -n '/^operation /,$p' "$scratch/out" | tail -n +2; }
# Calls, and work in 1e9 a step (milliseconds x rate), of all formats: before the share stand calls and milliseconds,
# behind it the rate.
# shellcheck disable=SC2016 # awk's
row='$1 == op { i = 2; while ($i !~ /%$/) i++;'
calls() { table | awk -v op="$1" "$row"' sum += $(i - 2) } END { print sum + 0 }'; }
work() { table | awk -v op="$1" "$row"' sum += $(i - 1) * $(i + 1) / 1e3 } END { print sum + 0 }'; }
shares() { # of operations they are what `all` says, and with the rest 100%
    table | awk '{ i = 2; while ($i !~ /%$/) i++; if ($1 == "all") all = $i; else if ($1 == "rest:") rest = $i; else sum += $i }
        END { exit !(sum > 1 && all + 0 <= 100.001 && rest + 0 >= 0 && (sum - all)^2 < 0.04 && (all + rest - 100)^2 < 0.0005) }'
}
near() { holds "$1 > 0.97 * ($2) && $1 < 1.03 * ($2)"; } # near VALUE EXPECTED

# ---- one run, every number of it: L = 3, C = 128, F = 256, N = 256 tokens, Vp = 384, 2 micro-batches a step ----

sizes=(--arch llama --layers 3 --hidden 128 --heads 4 --ffn 256 --seq_len 128 --global_batch_tokens 512 --steps 3
    --precision fp32)
gpt "${run[@]}" "${sizes[@]}" --run_dir "$scratch/plain"
check "without --profile" exits 0
check "without --profile: no table" not says out profile
gpt "${run[@]}" "${sizes[@]}" --run_dir "$scratch/timed" --profile
check "--profile" exits 0
check "--profile: nothing on stderr" silent err
check "--profile: same bits" same_log "$scratch/timed" "$scratch/plain"
check "the head says steps and peaks" matches out \
    '^profile of 3 steps, [0-9.]+ s, on cpu .*peaks: [1-9][0-9]* GFLOP/s fp32, [1-9][0-9]* bf16, copy [0-9.]+ GB/s$'
check "shares add up" shares

expect() { check "$1: $2 calls" same "$(calls "$1")" "$2"; }
for op in embedding_forward embedding_backward begin_micro_step softmax_cross_entropy loss_sum; do expect $op 6; done
for op in begin_step finish_step result_post result_collect; do expect $op 3; done
for op in linear_forward linear_backward_input linear_backward_weight; do expect $op $((6 * (3 * 4 + 1))); done
for op in attention_forward attention_backward qk_norm_rope_forward qk_norm_rope_backward operand_from_activation_backward; do
    expect $op 18
done
expect residual_add 36
expect norm_backward 42
expect adamw 60 # parameters: 3 x (4 matrices + 2 gains) + embedding + gain
expect sum_squares 60

products="2 * 512 * (3 * (128 * 384 + 128 * 128 + 128 * 512 + 256 * 128) + 128 * 384) * 1e-9"
for op in linear_forward linear_backward_input linear_backward_weight; do
    check "$op: its FLOPs" near "$(work $op)" "$products"
done
check "attention_forward: its FLOPs" near "$(work attention_forward)" "3 * 4 * 4 * 32 * 4 * 128 * 129 / 2 * 1e-9"
check "attention_backward: its FLOPs" near "$(work attention_backward)" "3 * 4 * 10 * 32 * 4 * 128 * 129 / 2 * 1e-9"
check "adamw: its bytes" near "$(work adamw)" \
    "2 * 16 * (3 * (128 * 384 + 128 * 128 + 128 * 512 + 256 * 128 + 256) + 257 * 128 + 128) * 1e-9"
check "residual_add: its bytes" near "$(work residual_add)" "2 * 2 * 3 * 256 * (3 * 128 + 1) * 4 * 1e-9"

# ---- every recipe: the same bits, and the operations that it adds ----

pair() { # pair NAME ARGUMENT...
    gpt "${run[@]}" "${@:2}" --run_dir "$scratch/$1.plain"
    gpt "${run[@]}" "${@:2}" --run_dir "$scratch/$1.timed" --profile
    check "$1: runs" exits 0
    check "$1: same bits" same_log "$scratch/$1.timed" "$scratch/$1.plain"
    check "$1: shares add up" shares
}
small=(--layers 2 --hidden 64 --heads 4 --seq_len 32 --steps 4)
pair nvfp4 "${small[@]}" --arch qwen3 --precision nvfp4 --bf16_last_layers 1 --recompute block --telemetry_every 2
check "nvfp4: products of both formats" matches out '^linear_forward nvfp4 .* GFLOP/s'
check "nvfp4: products of both formats" matches out '^linear_forward bf16 .* GFLOP/s'
check "block: attention twice" same "$(calls attention_forward)" $((2 * $(calls attention_backward)))
bf16=("${small[@]}" --arch gpt2 --precision bf16 --recompute operands --document_mask --checkpoint_every 2)
pair bf16 "${bf16[@]}" --checkpoint_async --val_data "$scratch/train.bin" --val_every 2 --val_batches 2
check "bf16: validation's forward passes are in it" holds "$(calls attention_forward) > $(calls attention_backward)"
gpt "${run[@]}" "${bf16[@]}" --run_dir "$scratch/bf16.timed" --resume auto --profile
check "nothing left to do" says out "profile: no step was run"

if command -v mpirun >/dev/null && [[ $(ldd "$program") == *libmpi* ]]; then
    for profile in false true; do
        called="run_local.sh -np 2 $program"
        timeout 120 scripts/run_local.sh -np 2 "$program" "${run[@]}" "${small[@]}" --threads 1 --precision nvfp4 \
            --zero_stage 3 --run_dir "$scratch/ranks.$profile" --profile $profile >"$scratch/out" 2>"$scratch/err" </dev/null
        code=$?
        check "two ranks, profile $profile" exits 0
    done
    check "two ranks: same bits" same_log "$scratch/ranks.true" "$scratch/ranks.false"
    check "two ranks: one table" same "$(grep -c '^profile of' "$scratch/out")" 1
    check "two ranks: sharded weights are packed" matches out '^weight_pack '
    check "two ranks: shares add up" shares
else
    skip "two ranks" "no mpirun, or built without MPI"
fi

if [ -x "$cuda" ]; then # the host runs ahead: it waits after each operation
    program=$cuda
    pair cuda --layers 1 --hidden 32 --heads 2 --seq_len 32 --steps 2 --precision nvfp4 --bf16_last_layers 0
    check "cuda: all products" same "$(calls linear_forward)" 10
else
    skip "cuda" "no $cuda"
fi
finish
