#!/usr/bin/env bash
# kill -9 at any instant loses at most the steps since the last complete checkpoint, and the run goes on with the same
# bits. 10 kills, 50 with LLMC_TEST_ALL=1: more than half inside a checkpoint, at the points that llmc/checkpoint.h
# names, the others at random instants. After each kill: every folder step_XXXXXXXX is complete (its hashes are checked
# by loading it), the newest is at most one interval behind the log, and the next start takes it. At the end the log is
# that of an undisturbed run and nothing is left over.
#
# Then SIGINT and SIGTERM: the step is finished and saved, exit code 0, the way on is said; a second one ends at once.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
steps=240 every=6
documents "$scratch/train.bin" 24 200
data=(--train_data "$scratch/train.bin")
model=(--arch llama --layers 2 --hidden 32 --heads 2 --seq_len 32 --batch 2)

arguments=("${model[@]}" "${data[@]}" --steps "$steps" --lr 3e-3 --warmup_steps 20 --hash_every 1 --checkpoint_every "$every"
    --keep_checkpoints 2)
gpt "${arguments[@]}" --run_dir "$scratch/undisturbed"
check "undisturbed run" exits 0
check "undisturbed run: keeps two" same "$(steps_of "$scratch/undisturbed" | tr '\n' ' ')" "$((steps - every)) $steps "

run=$scratch/run
trace=("${arguments[@]}" --run_dir "$run" --resume auto)
expected=0 # the step that the next start must go on from

after_kill() { # after_kill NAME
    local logged=0 step dir
    [ -s "$run/log.jsonl" ] && logged=$(grep -o '^{"step":[0-9]*,.*}$' "$run/log.jsonl" | tail -n 1 | grep -o '[0-9]*' | head -n 1)
    expected=$(newest_step "$run")
    for step in $(steps_of "$run"); do
        dir=$(step_dir "$run" "$step")
        gpt eval --checkpoint "$dir" --data "$scratch/train.bin" --threads 1
        check "$1: step $step is complete" exits 0
    done
    # The line of a step is written before its checkpoint, so that of `logged` itself may be missing.
    check "$1: at most $every steps lost of ${logged:-0}" [ "${expected:-0}" -ge $(((${logged:-0} - 1) / every * every)) ]
}

started_right() { # started_right NAME: the start after a kill took what was there
    [ "$code" = 137 ] && [ ! -s "$scratch/stdout" ] && return # killed again before its header, at an old checkpoint's deletion
    if [ -n "$expected" ] && [ "$expected" != 0 ]; then
        check "$1: goes on from the newest" grep -q "continued from $(step_dir "$run" "$expected")\$" "$scratch/stdout"
    else
        check "$1: starts from the first step" not grep -q 'continued from' "$scratch/stdout"
    fi
}

finished() { # finished NAME: the last start ran to the end
    check "$1: log of the undisturbed run" same_log "$run" "$scratch/undisturbed"
    check "$1: nothing left over" same "$(cd "$run" && find . | sort | grep -v '/[^/]*\.safetensors$')" \
        "$(cd "$scratch/undisturbed" && find . | sort | grep -v '/[^/]*\.safetensors$')"
    rm -rf "$run"
    expected=
}

start() { # start [NAME=VALUE]: in the background
    called="$* $program ${trace[*]}"
    env "$@" "$program" "${trace[@]}" >"$scratch/stdout" 2>"$scratch/err" </dev/null &
    child=$!
}

killed_at() { # killed_at POINT[:N]: one kill inside a checkpoint; a run that ends before is checked and begun anew
    local point=${1%:*} left
    while :; do
        start "LLMC_TEST_STOP=$1"
        wait "$child" 2>/dev/null
        code=$?
        child=
        started_right "kill at $1"
        [ "$code" = 0 ] || break
        finished "run that ended before $1"
    done
    check "kill at $1: killed" exits 137
    left=$(cd "$run/checkpoints" && find . -maxdepth 1 -name 'step_*.*' | sed 's/.*\.//' | sort -u | tr '\n' ' ')
    case $point in
    open | middle | sync | rename) check "kill at $1: left behind" same "$left" "tmp " ;;
    renamed) check "kill at $1: left behind" same "$left" "" ;;
    delete) check "kill at $1: left behind" same "$left" "old " ;;
    esac
    after_kill "kill at $1"
}

killed_after() { # killed_after SECONDS: one kill at that instant
    while :; do
        start
        sleep "$1"
        kill -9 "$child" 2>/dev/null
        wait "$child" 2>/dev/null
        code=$?
        child=
        [ "$code" = 0 ] || break
        started_right "kill after $1 s"
        finished "run that ended within $1 s"
    done
    check "kill after $1 s: killed" exits 137
    after_kill "kill after $1 s"
}

points='open:1 middle:5 sync:1 rename:2 renamed:1 delete:1'
random=4
if [ "$long" = 1 ]; then
    points="$points open:0 middle:0 sync:0 rename:0 renamed:0 delete:0 open:3 middle:1 sync:3 rename:1 renamed:3 delete:2"
    points="$points open:7 middle:9 sync:5 rename:4 renamed:2 delete:0 middle:14 sync:2 middle:2 rename:3 delete:3"
    random=21
fi
RANDOM=$$
for point in $points; do
    killed_at "$point"
    if [ $random -gt 0 ]; then
        killed_after "0.$(printf %03d $((RANDOM % 600)))"
        random=$((random - 1))
    fi
done
start
wait "$child"
code=$? child=
started_right "last start"
check "last start: runs to the end" exits 0
finished "after all kills"

# ---- signals ----

# shellcheck disable=SC2317 # called through check
wait_lines() { # wait_lines RUN COUNT: until the log has so many
    local i
    for ((i = 0; i < 600; i++)); do
        [ "$(log_lines "$1" 2>/dev/null || echo 0)" -ge "$2" ] && return
        sleep 0.02
    done
    return 1
}

background() { # background ARGUMENT...: the program itself is $child
    called="$program $*"
    # A shell starts it with SIGINT ignored. One that goes on all the same ends after a minute of work.
    (ulimit -t 60 && exec env --default-signal=INT "$program" "$@") >"$scratch/out" 2>"$scratch/err" </dev/null &
    child=$!
}

for signal in INT TERM; do
    run=$scratch/$signal
    background "${arguments[@]}" --run_dir "$run" --checkpoint_every 100
    check "SIG$signal: log" wait_lines "$run" 3
    kill -$signal "$child"
    wait "$child"
    code=$? child=
    check "SIG$signal: exit code" exits 0
    step=$(log_lines "$run")
    check "SIG$signal: before the end" [ "$step" -lt $steps ]
    check "SIG$signal: says how to go on" says out "stopped after step $step and saved; go on with the same command and --resume auto"
    check "SIG$signal: saved" same "$(newest_step "$run")" "$step"
    gpt "${arguments[@]}" --run_dir "$run" --resume auto
    check "SIG$signal: goes on" says out "continued from $(step_dir "$run" "$step")"
    check "SIG$signal: equals the undisturbed run" same_log "$run" "$scratch/undisturbed"
done

# Ignored from outside, as nohup and shells do it, a signal stays ignored.
"$program" "${arguments[@]}" --run_dir "$scratch/ignored" >"$scratch/out" 2>"$scratch/err" </dev/null &
child=$!
check "SIGINT ignored from outside: log" wait_lines "$scratch/ignored" 3
kill -INT "$child"
wait "$child"
code=$? child=
check "SIGINT ignored from outside: exit code" exits 0
check "SIGINT ignored from outside: runs to the end" same_log "$scratch/ignored" "$scratch/undisturbed"

# Steps of a second or so: the second signal comes within one.
for pair in 'INT INT 130' 'TERM TERM 143' 'INT TERM 143' 'TERM INT 130'; do
    read -r first second wanted <<<"$pair"
    run=$scratch/twice_${first}_$second
    background "${model[@]}" "${data[@]}" --steps 1000 --seq_len 256 --batch 16 --global_batch_tokens 81920 --threads 1 --run_dir "$run"
    check "two signals: log" wait_lines "$run" 1
    kill -"$first" "$child"
    sleep 0.05
    kill -"$second" "$child"
    started=$(date +%s%N)
    wait "$child" 2>/dev/null
    code=$? child=
    check "SIG$first, then SIG$second: exit code $wanted" exits "$wanted"
    check "SIG$first, then SIG$second: at once" [ $((($(date +%s%N) - started) / 1000000)) -lt 500 ]
    check "SIG$first, then SIG$second: nothing saved" not test -e "$run/checkpoints"
done
finish
