#!/usr/bin/env bash
# Many ranks: any number of ranks at any ZeRO stage gives the log (losses, norms, data and state hashes) and the final
# tensors of one rank on the same micro-batches, also through checkpoints that other numbers of ranks go on from; a rank
# that is killed or stopped ends the job with a message, and a new start resumes. LLMC_TEST_ALL=1 runs the whole grid.
# shellcheck source=test/lib.sh disable=SC2317 # functions that only `check` calls
source "$(dirname "$0")/lib.sh"

if ! command -v mpirun >/dev/null || ! "$program" plan --ranks 2 --layers 1 >/dev/null 2>&1 || ! ldd "$program" | grep -q libmpi; then
    skip "many ranks" "no mpirun, or built without MPI"
    finish
fi

# ranks, ZeRO stage, architecture, precision
PAIRS='
2 0 gpt2  fp32
3 0 llama bf16
7 0 qwen3 nvfp4
2 1 llama nvfp4
4 1 qwen3 fp32
7 1 gpt2  bf16
2 2 qwen3 bf16
3 2 gpt2  nvfp4
4 2 llama mixed
7 2 llama fp32
2 3 gpt2  mixed
3 3 llama fp32
4 3 llama nvfp4
7 3 qwen3 bf16'
declare -A MODEL=(
    [gpt2]='--arch gpt2 --hidden 40 --heads 5 --ffn 72'
    [llama]='--arch llama --hidden 48 --heads 6 --kv_heads 2 --tie_embeddings false'
    [qwen3]='--arch qwen3 --hidden 32 --heads 4 --kv_heads 2 --head_dim 16'
)
declare -A PRECISION=(
    [fp32]='--precision fp32'
    [bf16]='--precision bf16'
    [nvfp4]='--precision nvfp4'
    [mixed]='--precision nvfp4 --master fp32 --weight_blocks 1x16 --stochastic_rounding all --bf16_last_layers 0 --dgrad bf16
        --switch_to_bf16_at 0.7'
)
documents "$scratch/train.bin" 40 110
documents "$scratch/val.bin" 3 90

options() { # options ARCH PRECISION: 84 micro-batches of 32 tokens a step, for 1, 2, 3, 4 and 7 ranks
    echo "${MODEL[$1]} ${PRECISION[$2]} --layers 3 --seq_len 32 --batch 1 --global_batch_tokens 2688 --steps 6 --lr 4e-3
        --warmup_steps 2 --hash_every 1 --train_data $scratch/train.bin --val_data $scratch/val.bin --val_every 3 --val_batches 3
        --checkpoint_every 2 --keep_checkpoints 0 --threads 1"
}
ranks() { # ranks NUMBER RUN ARCH PRECISION ARGUMENT...: like gpt, on several ranks
    called="run_local.sh -np $1 $program ${*:2}"
    # shellcheck disable=SC2046 # words
    timeout --kill-after=5 "${limit:-120}" scripts/run_local.sh -np "$1" "$program" $(options "$3" "$4") --run_dir "$2" "${@:5}" \
        >"$scratch/out" 2>"$scratch/err" </dev/null
    code=$?
}
reference() { # reference ARCH PRECISION
    [ -d "$scratch/ref_$1_$2" ] && return
    # shellcheck disable=SC2046 # words
    gpt $(options "$1" "$2") --run_dir "$scratch/ref_$1_$2"
    check "$1 $2: one rank trains" exits 0
}
same_tensors() { # same_tensors RUN REFERENCE
    cmp "$(step_dir "$1" 6)/model.safetensors" "$(step_dir "$2" 6)/model.safetensors" &&
        cmp "$(step_dir "$1" 6)/optimizer.safetensors" "$(step_dir "$2" 6)/optimizer.safetensors"
}
variant() { # variant RANKS STAGE ARCH PRECISION
    local run=$scratch/run name="$3 $4, $1 ranks, stage $2"
    reference "$3" "$4"
    ranks "$1" "$run" "$3" "$4" --zero_stage "$2" --overwrite
    check "$name: exit code" exits 0
    check "$name: log" same_log "$run" "$scratch/ref_$3_$4"
    check "$name: tensors" same_tensors "$run" "$scratch/ref_$3_$4"
    check "$name: config.json has ranks" matches_file "$run/config.json" "\"ranks\":[[:space:]]*$1,"
    check "$name: config.json has the stage" matches_file "$run/config.json" "\"zero_stage\":[[:space:]]*$2,"
    check "$name: one console" same "$(grep -c '^step ' "$scratch/out")" 6
}
matches_file() { grep -qE -- "$2" "$1"; }

while read -r row; do
    # shellcheck disable=SC2086 # words
    [ -n "$row" ] && variant $row
done <<<"$PAIRS"
if [ "$long" = 1 ]; then
    for arch in "${!MODEL[@]}"; do for precision in "${!PRECISION[@]}"; do for n in 2 3 4 7; do for stage in 0 1 2 3; do
        variant $n $stage "$arch" "$precision"
    done; done; done; done
fi

# ---- from 4 ranks to 3, to 1, to 2, through checkpoints

run=$scratch/resharded reference=$scratch/ref_llama_nvfp4
cut() { # cut STEP: as if the job had ended after it
    local later
    for later in $(steps_of "$run"); do [ "$later" -le "$1" ] || rm -r "$(step_dir "$run" "$later")"; done
}
ranks 4 "$run" llama nvfp4 --zero_stage 3
cut 2
ranks 3 "$run" llama nvfp4 --zero_stage 1 --resume auto
check "resharded 4 to 3" exits 0
check "resharded 4 to 3: log" same_log "$run" "$reference"
cut 4
# shellcheck disable=SC2046 # words
gpt $(options llama nvfp4) --run_dir "$run" --resume auto
check "resharded 3 to 1: log" same_log "$run" "$reference"
cut 4
ranks 2 "$run" llama nvfp4 --zero_stage 2 --resume auto
check "resharded 1 to 2: log" same_log "$run" "$reference"
check "resharded: tensors" same_tensors "$run" "$reference"

# ---- fast order: near, not equal; bytes on the wire as planned; the slowest rank is named

shape='--arch llama --layers 4 --hidden 48 --heads 3 --seq_len 32 --batch 2 --global_batch_tokens 768'
for precision in bf16 nvfp4; do
    for stage in 0 1 2 3; do
        for ordered in true false; do
            name="$precision, 3 ranks, stage $stage, deterministic $ordered"
            run=$scratch/wire
            called="$name"
            # shellcheck disable=SC2086 # words
            timeout --kill-after=5 60 scripts/run_local.sh -np 3 "$program" $shape --precision $precision --steps 4 --warmup_steps 0 --threads 1 \
                --train_data "$scratch/train.bin" --straggler_every 2 --run_dir "$run" --overwrite --zero_stage $stage \
                --deterministic_reduction $ordered >"$scratch/out" 2>"$scratch/err" </dev/null
            code=$?
            check "$name: exit code" exits 0
            check "$name: the slowest rank" matches out '^slowest of 3 ranks in the last 2 steps: rank [0-2], [0-9.]+% more work'
            loss=$(field "$(log_line "$run" 4)" loss)
            [ $stage$ordered = 0true ] && expected=$loss
            check "$name: loss near that of stage 0" holds "($loss - $expected)^2 < 1e-6"
            [ $ordered = true ] && check "$name: loss that of stage 0" same "$loss" "$expected"
            sent=$(field "$(log_line "$run" 4)" wire_bytes)
            # shellcheck disable=SC2086 # words
            gpt plan $shape --precision $precision --ranks 3 --zero_stage $stage --deterministic_reduction $ordered
            check "$name: bytes on the wire as planned" says out "on the wire, per step   $sent bytes"
        done
    done
done

# ---- SIGTERM to one rank: all save and end

run=$scratch/term
# shellcheck disable=SC2046 # words
timeout --kill-after=5 60 scripts/run_local.sh -np 3 "$program" $(options llama bf16) --steps 100000 --run_dir "$run" \
    --zero_stage 3 >"$scratch/out" 2>"$scratch/err" </dev/null &
child=$!
trainers() { pgrep -f -- "--run_dir $run" | while read -r pid; do [ "$(basename "$(readlink "/proc/$pid/exe")")" = train_gpt ] && echo "$pid"; done; }
for _ in {1..200}; do [ "$(grep -c '^step ' "$scratch/out")" -ge 5 ] && break; sleep 0.1; done
kill -TERM "$(trainers | tail -n 1)"
wait $child
code=$?
child=
called="one of three ranks gets SIGTERM"
check "SIGTERM: exit code" exits 0
check "SIGTERM: says so" matches out '^stopped after step [0-9]+ and saved'
check "SIGTERM: saved the last step" same "$(newest_step "$run")" "$(log_lines "$run")"

# ---- what is refused

ranks 5 "$scratch/no" llama bf16
check "5 ranks do not divide 84: exit code" exits 2
check "5 ranks do not divide 84: says so" says err "global_batch_tokens 2688 is not a multiple of batch x seq_len x ranks = 160"
check "5 ranks do not divide 84: no run folder" not test -e "$scratch/no"
ranks 2 "$scratch/no" llama nvfp4 --telemetry_every 1
check "telemetry: refused" says err "they need one rank"
called="plan under mpirun"
timeout --kill-after=5 60 scripts/run_local.sh -np 2 "$program" plan --layers 1 >"$scratch/out" 2>"$scratch/err" </dev/null
code=$?
check "plan on two ranks: refused" says err "plan is one process"

# ---- a rank that dies or stops, at some instant; then a new start resumes

hurt() { # hurt SIGNAL SECONDS-AFTER-STEP-3 RUN
    local signal=$1 victim started last
    run=$3
    # shellcheck disable=SC2046 # words
    timeout --kill-after=5 60 scripts/run_local.sh -np 4 "$program" $(options llama bf16) --steps 100000 --run_dir "$run" \
        --zero_stage 2 --hang_timeout_s 3 --resume auto >"$scratch/out" 2>"$scratch/err" </dev/null &
    child=$!
    for _ in {1..200}; do [ "$(grep -c '^step ' "$scratch/out")" -ge 3 ] && break; sleep 0.1; done
    sleep "$2"
    victim=$(trainers | sed -n "$((1 + RANDOM % 4))p")
    kill -"$signal" "$victim"
    started=$SECONDS
    wait $child
    code=$?
    child=
    called="a rank gets SIG$signal $2 s after its third step"
    check "SIG$signal: the job fails" not exits 0
    check "SIG$signal: within 10 s" holds "$((SECONDS - started)) <= 10"
    kill -KILL "$victim" 2>/dev/null
    check "SIG$signal: no orphan" same "$(pgrep -cf -- "--run_dir $run")" 0
    [ "$signal" = STOP ] && check "SIG$signal: a message names rank, step and operation" matches err 'error: rank [0-9]+ on .*step [0-9]+'
    last=$(newest_step "$run")
    ranks 4 "$run" llama bf16 --steps $((last + 2)) --resume auto
    check "SIG$signal: a new start resumes" exits 0
    check "SIG$signal: and goes on" same "$(log_lines "$run")" $((last + 2))
}
RANDOM=7
for ((i = 0; i < (long == 1 ? 20 : 5); i++)); do hurt KILL "0.$((RANDOM % 90 + 10))" "$scratch/killed"; done
hurt STOP 0.2 "$scratch/stopped"

# ---- rank 0 cannot write, and a damaged checkpoint

run=$scratch/blocked
mkdir "$run" && touch "$run/checkpoints" # a file where the folder should be
ranks 3 "$run" llama bf16 --zero_stage 1
check "blocked: exit code" not exits 0
check "blocked: says where" matches err 'error: rank 0 on .*checkpoint of step 2: .*checkpoints'
run=$scratch/damaged
ranks 3 "$run" llama bf16
printf 'x' | dd of="$(step_dir "$run" 6)/optimizer.safetensors" bs=1 seek=4000 conv=notrunc 2>/dev/null
ranks 2 "$run" llama bf16 --steps 7 --resume auto --zero_stage 3
check "damaged: resumes from the one before" exits 0
check "damaged: and says so" says err "skipped $run/checkpoints/step_00000006"
check "damaged: says it once" same "$(grep -c skipped "$scratch/err")" 1
finish
