#!/usr/bin/env bash
# Runs in NVFP4 from outside: what plan, header, config.json and log say; recipes that cannot be; precision auto; a run
# is the same with telemetry and shadow steps, on other threads, and stopped and resumed before, at and behind the step
# at which it switches to BF16; a resume in another recipe is refused, or allowed and said.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

small=(--layers 3 --hidden 32 --heads 2 --seq_len 16 --batch 2 --threads 1)
token_file "$scratch/train.bin" 3000 1
token_file "$scratch/val.bin" 1000 2
base=("${small[@]}" --train_data "$scratch/train.bin" --steps 20 --lr 1e-2 --warmup_steps 2 --hash_every 1)
nvfp4=("${base[@]}" --precision nvfp4)

# shellcheck disable=SC2317 # called through check
text_of() { tr -d '\t\n' <"$1/config.json"; }                # config.json of a run in one line
# shellcheck disable=SC2317
config_says() { [[ $(text_of "$1") == *"$2"* ]]; }            # config_says RUN TEXT
hashes() { grep -o '"state_hash":"[0-9a-f]*"' "$1/log.jsonl"; }
without() { bits "$1" | sed -E 's/,"(telemetry|shadow)":.*\}$/}/'; } # the log without times and telemetry
keys() { grep -o "^{\"step\":[0-9]*,.*\"$2\":{" "$1/log.jsonl" | sed 's/^{"step":\([0-9]*\),.*/\1/' | xargs; } # steps that have it

# ---- plan ----

bytes() { awk -v name="$1" 'index($0, "  " name) == 1 { print $(NF - 3) }' "$scratch/out"; } # of one purpose of plan's table
shape=(--layers 12 --hidden 256 --heads 4 --seq_len 256 --batch 8)
gpt plan "${shape[@]}" --precision bf16
saved=$(bytes 'saved for backward') gradients=$(bytes gradients)
gpt plan "${shape[@]}" --precision nvfp4
check "plan: exit code" exits 0
# Of 10 blocks a, b (hidden 256) and u (ffn 704) are saved in 0.5625 bytes for 2, and o, which was att itself, beside it.
saving=$((10 * 2048 * (23 * (256 + 256 + 704) - 9 * 256) / 16))
check "plan: what is saved for backward shrinks by what 4.5 bits save" \
    holds "($saved - $(bytes 'saved for backward') - $saving)^2 < (0.001 * $saving)^2"
check "plan: the census" says out 'nvfp4 in blocks 0-9 of 12 (qkv o up down: fprop dgrad wgrad), 83% of the blocks'\'' FLOPs; bf16: blocks 10-11, embedding, head'
check "plan: what wgrad reads" says out 'wgrad  dY nvfp4 1x16 RHT stochastic, tensor scale amax | X nvfp4 1x16 RHT nearest, tensor scale amax'
check "plan: the same gradients" same "$(bytes gradients)" "$gradients"
gpt plan "${shape[@]}" --precision nvfp4 --shadow_every 10
check "plan: a shadow step's gradients" holds "$(bytes gradients) > 1.8 * $gradients"

# ---- recipes that cannot be ----

wrong() { # wrong TEXT ARGUMENT...: refused by plan and by train
    gpt plan "${small[@]}" --precision nvfp4 "${@:2}"
    check "plan ${*:2}: exit code" exits 2
    check "plan ${*:2}: says $1" says err "$1"
    gpt "${nvfp4[@]}" --run_dir "$scratch/never" "${@:2}"
    check "train ${*:2}: exit code" exits 2
    check "train ${*:2}: says $1" says err "$1"
    check "train ${*:2}: nothing on stdout, no run" silent out
}
wrong 'bf16_first_layers 2 and bf16_last_layers 1 leave none of the 3 blocks' --bf16_first_layers 2
wrong 'no product in nvfp4' --fprop bf16 --dgrad bf16 --wgrad bf16
wrong 'four_over_six with tensor_scale pow2' --four_over_six both --tensor_scale pow2
wrong 'four_over_six with stochastic_rounding all' --four_over_six weights --stochastic_rounding all
wrong 'four_over_six with fprop bf16' --four_over_six activations --fprop bf16
wrong 'batch 1 x seq_len 24 is no multiple of 16' --batch 1 --seq_len 24
check "wrong recipes leave nothing" not test -e "$scratch/never"
gpt plan "${small[@]}" --precision nvfp4 --batch 1 --seq_len 24 --wgrad bf16
check "24 tokens with wgrad in bf16" exits 0

# ---- precision auto ----

run=$scratch/auto
gpt "${base[@]}" --run_dir "$run" --checkpoint_every 10
check "auto: exit code" exits 0
check "auto: the header says why" says out 'precision   auto: bf16: this device only emulates NVFP4'
check "auto: config.json has what it became" config_says "$run" '"precision":"bf16","precision_reason":"bf16: this device only'
check "auto: so have its options" config_says "$run" '"precision":"bf16","master":"default"'
gpt "${base[@]}" --run_dir "$scratch/asked" --precision bf16
check "auto: the same run as bf16" same_log "$run" "$scratch/asked"
check "asked for: the header has no reason" not says out auto
check "asked for: config.json" config_says "$scratch/asked" '"precision_reason":"as asked"'
gpt plan "${small[@]}"
check "auto: plan" says out 'precision   auto: bf16: '
gpt --config "$run/config.json" --run_dir "$scratch/again"
check "auto: its config.json repeats it" same_log "$scratch/again" "$run"
gpt "${base[@]}" --run_dir "$scratch/fp32" --precision fp32 --steps 3 --checkpoint_every 3
gpt "${base[@]}" --run_dir "$scratch/fp32" --resume auto --steps 4
check "auto: a resume takes the checkpoint's precision" says out 'precision   auto: fp32: that of the checkpoint'
check "auto: and goes on" exits 0
gpt "${base[@]}" --run_dir "$run" --resume auto --rht off --bf16_last_layers 99 --steps 21
check "bf16: the options of nvfp4 mean nothing" exits 0
check "bf16: nothing is said of them" not matches err 'rht|bf16_last_layers'

# ---- a run ----

run=$scratch/run
train=("${nvfp4[@]}" --val_data "$scratch/val.bin" --val_every 10 --val_batches 1000 --checkpoint_every 5 --keep_checkpoints 0)
gpt "${train[@]}" --run_dir "$run"
check "nvfp4: exit code" exits 0
check "nvfp4: header" says out 'precision   nvfp4 in blocks 0-1 of 3 (qkv o up down: fprop dgrad wgrad)'
check "nvfp4: loss falls" holds "$(field "$(log_line "$run" 20)" loss) < $(field "$(log_line "$run" 1)" loss) - 0.5"
check "nvfp4: is another run than bf16" differ "$(hashes "$run")" "$(hashes "$scratch/asked")"
check "nvfp4: near bf16" holds "($(field "$(log_line "$run" 20)" loss) - $(field "$(log_line "$scratch/asked" 20)" loss))^2 < 0.04"
check "nvfp4: config.json has the share" config_says "$run" '"fp4_share":0.666666667,'
check "nvfp4: config.json has the census" config_says "$run" '"blocks":"0-1","projections":"qkv o up down","product":"fprop","first":"X nvfp4 1x16 nearest'
check "nvfp4: no telemetry unasked" not grep -qE 'telemetry|shadow' "$run/log.jsonl"
gpt eval --checkpoint "$(step_dir "$run" 20)" --data "$scratch/val.bin" --batch 2
check "nvfp4: eval is the last val_loss" says out "loss $(printf '%.6f' "$(field "$(log_line "$run" 20)" val_loss)")"
gpt generate --checkpoint "$(step_dir "$run" 20)" --prompt 'the of' --tokens 20
check "nvfp4: generate" matches out '^the of'

for arguments in '--threads 3' '--isa portable' '--recompute operands' '--recompute block'; do
    # shellcheck disable=SC2086 # words
    gpt "${train[@]}" --run_dir "$scratch/other" --overwrite $arguments
    check "nvfp4 $arguments: the same" same_log "$scratch/other" "$run"
done

# ---- telemetry ----

watched=$scratch/watched
gpt "${train[@]}" --run_dir "$watched" --telemetry_every 5 --shadow_every 4 --telemetry_table
check "telemetry: exit code" exits 0
check "telemetry: at 5, 10, 15, 20" same "$(keys "$watched" telemetry)" '5 10 15 20'
check "telemetry: shadow at 4, 8, 12, 16, 20" same "$(keys "$watched" shadow)" '4 8 12 16 20'
check "telemetry: the same run" same "$(without "$watched")" "$(bits "$run")"
check "telemetry: the same weights" cmp "$(step_dir "$watched" 20)/model.safetensors" "$(step_dir "$run" 20)/model.safetensors"
check "telemetry: and moments" cmp "$(step_dir "$watched" 20)/optimizer.safetensors" "$(step_dir "$run" 20)/optimizer.safetensors"
line=$(log_line "$watched" 20)
for role in qkv.x_row qkv.x_col o.dy_row up.dy_col down.w_row; do
    check "telemetry: $role in both blocks" same "$(grep -o "\"$role\":{\"layer\":\[0,1\]" <<<"$line" | wc -l)" 1
    error=$(grep -o "\"$role\":{\"layer\":\[0,1\],\"error\":\[[^,]*" <<<"$line" | sed 's/.*\[//')
    check "telemetry: $role errs by some percent" holds "${error:-0} > 0.02 && ${error:-0} < 0.3"
done
cosine=$(grep -o '"cosine":{"qkv":\[[^,]*' <<<"$line" | sed 's/.*\[//')
check "shadow: the gradients are near" holds "${cosine:-0} > 0.8 && ${cosine:-0} < 0.999999"
gap=$(field "$line" loss_gap)
check "shadow: the losses are near" holds "${gap:-9}^2 < 0.01"
check "shadow: they differ" holds "${gap:-0} != 0"
check "table: quantization" matches out '^  qkv\.x_row +[0-9.]+% +[0-9.]+% '
check "table: shadow" matches out '^shadow of step 20: loss [-+][0-9.]+ against BF16'
gpt "${train[@]}" --run_dir "$scratch/block" --recompute block --telemetry_every 20 --shadow_every 20
check "telemetry: also where blocks are recomputed" same "$(without "$scratch/block")" "$(bits "$run")"
check "telemetry: no table unasked" not matches out '^(quantization|shadow) of step'

# ---- the switch to BF16, and resumes through it ----

at=(--switch_to_bf16_at 0.4 --shadow_every 3)
for scope in forward all; do
    switched=$scratch/$scope
    gpt "${train[@]}" "${at[@]}" --switch_scope $scope --run_dir "$switched"
    check "switch $scope: exit code" exits 0
    check "switch $scope: the census" says out '; from step 9: '
    check "switch $scope: steps 1 to 8 are those of the run" same "$(hashes "$switched" | head -n 8)" "$(hashes "$run" | head -n 8)"
    check "switch $scope: step 9 is not" differ "$(hashes "$switched" | sed -n 9p)" "$(hashes "$run" | sed -n 9p)"
    for step in 5 10; do # before and behind it
        rm -rf "$scratch/half" && cp -r "$switched" "$scratch/half"
        for later in $(steps_of "$switched"); do [ "$later" -le $step ] || rm -r "$(step_dir "$scratch/half" "$later")"; done
        gpt "${train[@]}" "${at[@]}" --switch_scope $scope --run_dir "$scratch/half" --resume auto
        check "switch $scope: resumed at $step" same_log "$scratch/half" "$switched"
    done
done
check "switch: the two scopes differ" differ "$(hashes "$scratch/forward")" "$(hashes "$scratch/all")"
gpt "${train[@]}" "${at[@]}" --run_dir "$scratch/at" --steps 20 --checkpoint_every 8 --val_every 10
rm -r "$(step_dir "$scratch/at" 16)" "$(step_dir "$scratch/at" 20)"
gpt "${train[@]}" "${at[@]}" --run_dir "$scratch/at" --checkpoint_every 8 --resume auto
check "switch: resumed at the very step" same_log "$scratch/at" "$scratch/forward"
gpt "${train[@]}" --run_dir "$scratch/zero" --switch_to_bf16_at 0 --switch_scope all
check "switch at 0: a run in bf16" same "$(hashes "$scratch/zero")" "$(hashes "$scratch/asked")"

rm -rf "$scratch/half" && cp -r "$scratch/forward" "$scratch/half"
rm -r "$(step_dir "$scratch/half" 15)" "$(step_dir "$scratch/half" 20)"
gpt "${train[@]}" "${at[@]}" --run_dir "$scratch/half" --resume auto --steps 60
check "switch: more steps would take it back: exit code" exits 1
check "switch: more steps would take it back: says so" says err "with --steps 60 the switch to BF16 would be after step 24"
gpt "${train[@]}" "${at[@]}" --run_dir "$scratch/half" --resume auto --steps 21
check "switch: more steps that leave it behind may be" exits 0
gpt "${train[@]}" --switch_to_bf16_at 0.4 --run_dir "$scratch/half" --resume auto --steps 60 --allow_recipe_change --shadow_every 3
check "switch: taken back with the permission" exits 0

# ---- the demo ----

gpt plan --config scripts/configs/demo.json
check "demo: 83% of the blocks' FLOPs are FP4" says out "83% of the blocks' FLOPs"

# ---- resume in another recipe ----

half=$scratch/half
rm -rf "$half" && cp -r "$run" "$half"
for later in 15 20; do rm -r "$(step_dir "$half" $later)"; done
before=$(tree_sum "$half")
other() { # other KEY TEXT ARGUMENT...: refused, and nothing changed
    gpt "${train[@]}" --run_dir "$half" --resume auto "${@:3}"
    check "resume with another $1: exit code" exits 1
    check "resume with another $1: says so" says err "$1 is $2"
    check "resume with another $1: names the way" says err --allow_recipe_change
    check "resume with another $1: nothing changed" same "$(tree_sum "$half")" "$before"
}
other precision '"nvfp4"' --precision bf16
other bf16_first_layers 0 --bf16_first_layers 1
other bf16_last_layers 1 --bf16_last_layers 0
other quantize_projections '"qkv,o,up,down"' --quantize_projections qkv,o
other fprop '"nvfp4"' --fprop bf16
other dgrad '"nvfp4"' --dgrad bf16
other wgrad '"nvfp4"' --wgrad bf16
other weight_blocks '"16x16"' --weight_blocks 1x16
other rht '"wgrad"' --rht off
other stochastic_rounding '"gradients"' --stochastic_rounding off
other tensor_scale '"amax"' --tensor_scale pow2
other four_over_six '"off"' --four_over_six activations
other gradient_headroom '"1"' --gradient_headroom 17/16
other switch_to_bf16_at 1 --switch_to_bf16_at 0.9
gpt "${train[@]}" --run_dir "$half" --resume auto --master fp32 --allow_recipe_change
check "resume with other masters: never" says err 'master is "bf16"'
check "resume with other masters: nothing changed" same "$(tree_sum "$half")" "$before"
gpt "${train[@]}" --run_dir "$half" --resume auto --bf16_last_layers 1 --four_over_six_metric mse --switch_scope all
check "resume with what means the same: goes on" same_log "$half" "$run"

rm -rf "$half" && cp -r "$run" "$half"
for later in 15 20; do rm -r "$(step_dir "$half" $later)"; done
gpt "${train[@]}" --run_dir "$half" --resume auto --allow_recipe_change --rht off --bf16_last_layers 0
check "allowed: goes on" exits 0
check "allowed: says the one" says err 'note: rht is "wgrad" in'
check "allowed: says the other" says err 'note: bf16_last_layers is 1 in'
check "allowed: config.json has the new one" config_says "$half" '"rht":"off"'
check "allowed: the steps before are the old ones" same "$(hashes "$half" | head -n 10)" "$(hashes "$run" | head -n 10)"
check "allowed: those after are not" differ "$(hashes "$half" | sed -n 11p)" "$(hashes "$run" | sed -n 11p)"
gpt "${train[@]}" --run_dir "$half" --resume auto --steps 21
check "allowed once: the old recipe is now the other" says err 'bf16_last_layers is 0 in'

finish
