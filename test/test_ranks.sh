#!/usr/bin/env bash
# Many ranks: any number of ranks at any ZeRO stage gives the log (losses, norms, data and state hashes) and the final
# tensors of one rank on the same micro-batches, also through checkpoints that other numbers of ranks go on from; a rank
# that is killed or stopped ends the job with a message, and a new start resumes. LLMC_TEST_ALL=1 runs the whole grid.
# shellcheck source=test/lib.sh disable=SC2317 # functions that only `check` calls
source "$(dirname "$0")/lib.sh"

if ! command -v mpirun >/dev/null || ! "$program" plan --ranks 2 --layers 1 >/dev/null 2>&1 || [[ $(ldd "$program") != *libmpi* ]]; then
    skip "many ranks" "no mpirun, or built without MPI"
    finish
fi

# ranks, ZeRO stage, architecture, precision
PAIRS='
2 0 gpt2  fp32
7 0 qwen3 nvfp4
2 1 llama nvfp4
7 1 gpt2  bf16
3 2 gpt2  nvfp4
4 2 llama mixed
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
    cmp "$(step_dir "$1" 6)/model.safetensors" "$(step_dir "$2" 6)/model.safetensors" # m and v: by state_hash in the log
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
check "4 ranks: 4 files of the optimizer" same "$(cd "$(step_dir "$run" 6)" && echo optimizer*)" \
    "$(printf 'optimizer-%05d-of-00004.safetensors ' 1 2 3 4 | sed 's/ $//')"
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

# ---- in the background: the same files; killed while one is written, the one before is there

contents() { for file in "$(step_dir "$1" "$2")"/*.safetensors; do echo "${file##*/} $(sha256sum <"$file")"; done; }
for n in 1 3; do
    for stage in 1 3; do
        [ "$long$n$stage" = 011 ] && continue # one rank holds all, whatever the stage
        name="background, $n ranks, stage $stage"
        ranks $n "$scratch/sync" llama nvfp4 --zero_stage $stage --overwrite
        ranks $n "$scratch/async" llama nvfp4 --zero_stage $stage --overwrite --checkpoint_async true --checkpoint_every 1
        check "$name: exit code" exits 0
        check "$name: log" same_log "$scratch/async" "$reference"
        check "$name: every step" same "$(steps_of "$scratch/async" | tr '\n' ' ')" "1 2 3 4 5 6 "
        for step in 2 4 6; do
            check "$name: files of step $step" same "$(contents "$scratch/async" $step)" "$(contents "$scratch/sync" $step)"
        done
    done
done
points='middle:2 renamed:1'
[ "$long" = 1 ] && points='open:2 middle:2 sync:1 rename:2 renamed:1 delete:0'
for point in $points; do
    run=$scratch/async_killed
    LLMC_TEST_STOP=$point ranks 2 "$run" llama nvfp4 --overwrite --checkpoint_async true --checkpoint_every 1 --keep_checkpoints 2
    check "background, killed at $point" not exits 0
    ranks 3 "$run" llama nvfp4 --resume auto --zero_stage 2
    check "background, killed at $point: a new start ends" exits 0
    check "background, killed at $point: log" same_log "$run" "$reference"
done

# ---- fast order: near, not equal; bytes on the wire as planned; the slowest rank is named

shape='--arch llama --layers 4 --hidden 48 --heads 3 --seq_len 32 --batch 2 --global_batch_tokens 768'
precisions=nvfp4
[ "$long" = 1 ] && precisions='bf16 nvfp4'
for precision in $precisions; do
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
    [ "$signal" = KILL ] && check "SIG$signal: survivors say whom they wait for" matches err '^rank [0-3] on .*: step [0-9]+, [a-z_]+: told to stop while waiting for rank'
    [ "$signal" = STOP ] && check "SIG$signal: a message names rank, step and operation" matches err 'error: rank [0-9]+ on .*step [0-9]+'
    last=$(newest_step "$run")
    ranks 4 "$run" llama bf16 --steps $((last + 2)) --resume auto
    check "SIG$signal: a new start resumes" exits 0
    check "SIG$signal: and goes on" same "$(log_lines "$run")" $((last + 2))
}
RANDOM=7
for ((i = 0; i < (long == 1 ? 20 : 2); i++)); do hurt KILL "0.$((RANDOM % 90 + 10))" "$scratch/killed"; done
hurt STOP 0.2 "$scratch/stopped"

# ---- rank 0 cannot write, and a damaged checkpoint

run=$scratch/blocked
mkdir "$run" && touch "$run/checkpoints" # a file where the folder should be
ranks 3 "$run" llama bf16 --zero_stage 1
check "blocked: exit code" not exits 0
check "blocked: says where" matches err 'error: rank 0 on .*checkpoint of step 2: .*checkpoints'
run=$scratch/damaged
ranks 3 "$run" llama bf16
printf 'x' | dd of="$(step_dir "$run" 6)/optimizer-00002-of-00003.safetensors" bs=1 seek=4000 conv=notrunc 2>/dev/null
ranks 2 "$run" llama bf16 --steps 7 --resume auto --zero_stage 3
check "damaged: resumes from the one before" exits 0
check "damaged: and says so" matches err "skipped $run/checkpoints/step_00000006: .*optimizer-00002-of-00003.safetensors: tensor .* is damaged"
check "damaged: says it once" same "$(grep -c skipped "$scratch/err")" 1
rm -r "$(step_dir "$run" 6)" "$(step_dir "$run" 7)" "$(step_dir "$run" 4)/optimizer-00003-of-00003.safetensors"
ranks 2 "$run" llama bf16 --resume auto
check "a file of the optimizer is missing: says so" matches err "skipped .*step_00000004: cannot open .*optimizer-00003-of-00003"
check "a file of the optimizer is missing: resumes from the one before" exits 0

# A file system in a mount namespace of its own that has no room for the second checkpoint.
cat >"$scratch/small.sh" <<'END'
mount -t tmpfs -o "size=$2k" tmpfs "$1" || exit 99
timeout --kill-after=5 60 "${@:4}"
code=$?
cp -r "$1"/. "$3"
exit $code
END
checkpoint_kib=$(du -sk "$(step_dir "$scratch/damaged" 2)" | awk '{ print $1 }')
for background in false true; do
    run=$scratch/small_$background kib=$((checkpoint_kib * 3 / 2))
    mkdir "$run" "$run.after"
    called="3 ranks in a full file system, background $background"
    # shellcheck disable=SC2046 # words
    unshare -m bash "$scratch/small.sh" "$run" $kib "$run.after" scripts/run_local.sh -np 3 "$program" $(options llama bf16) \
        --zero_stage 2 --checkpoint_async $background --run_dir "$run" >"$scratch/out" 2>"$scratch/err" </dev/null
    code=$?
    if [ ! -d "$run.after/checkpoints" ]; then
        skip "a full file system" "no mount namespace here"
        continue
    fi
    check "full disk, background $background: exit code" not exits 0
    check "full disk, background $background: says what, where and what to do" matches err \
        'error: rank [0-2] on .*checkpoint of step 4: cannot write .*free some space'
    ranks 3 "$run.after" llama bf16 --resume auto --zero_stage 2
    check "full disk, background $background: a new start ends" exits 0
    check "full disk, background $background: nothing is lost" same_log "$run.after" "$scratch/damaged"
done

# ---- a loss that is not finite: every rank says so, once

run=$scratch/wild
ranks 4 "$run" llama bf16 --steps 200 --lr 1000 --weight_decay 100 --grad_clip 0 --warmup_steps 0 --val_every 0 --zero_stage 3
check "not finite: exit code" not exits 0
check "not finite: rank 0 names the step and what" matches err '^error: rank 0 on .*: step [0-9]+: the (loss|gradient norm) is -?(nan|inf)'
check "not finite: and the others" same "$(grep -cE '^rank [1-3] on .*: step [0-9]+, forward and backward: the (loss|gradient norm) is not finite' "$scratch/err")" 3

# ---- the demo: 4 ranks, a kill, 2 ranks; as one rank without

if [ "$long" = 1 ]; then
    demo=(--config scripts/configs/demo.json --train_data "$scratch/train.bin" --val_data "$scratch/val.bin" --val_batches 1 --hash_every 1
        --sample_every 0 --steps 20 --checkpoint_every 8)
    gpt "${demo[@]}" --run_dir "$scratch/demo_one"
    demo_ranks() {
        called="demo on $1 ranks"
        LLMC_TEST_STOP=$2 timeout --kill-after=5 300 scripts/run_local.sh -np "$1" "$program" "${demo[@]}" --run_dir "$scratch/demo_many" \
            "${@:3}" >"$scratch/out" 2>"$scratch/err" </dev/null
        code=$?
    }
    demo_ranks 4 sync:2 --zero_stage 3 # while step 16 is written
    check "demo: killed" not exits 0
    check "demo: step 8 is saved" same "$(steps_of "$scratch/demo_many")" 8
    demo_ranks 2 none --zero_stage 2 --resume auto
    check "demo: goes on" exits 0
    check "demo: log" same_log "$scratch/demo_many" "$scratch/demo_one"
fi
finish
