#!/usr/bin/env bash
# What goes wrong with a run, and what must survive it: a resume under other options or data is refused and changes
# nothing; a full disk (limits, and a small file system of its own where that can be made), a flipped, missing or cut
# file of a checkpoint, and a loss that is not finite each end with one clear message, exit code 1, and the checkpoints
# before are whole: the run goes on from them with the bits of an undisturbed one.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

token_file "$scratch/train.bin" 3000 1
token_file "$scratch/other.bin" 3000 2
train=(--arch llama --layers 2 --hidden 32 --heads 4 --seq_len 16 --batch 2 --global_batch_tokens 64 --threads 1 --lr 4e-3
    --warmup_steps 5 --hash_every 1 --steps 20 --checkpoint_every 10 --train_data "$scratch/train.bin")

whole=$scratch/whole # the undisturbed run, with checkpoints 10 and 20
gpt "${train[@]}" --run_dir "$whole"
check "undisturbed run" exits 0
check "undisturbed run: checkpoints 10 and 20" same "$(steps_of "$whole" | tr '\n' ' ')" '10 20 '
half=$scratch/half # the same run, stopped after step 10
cp -r "$whole" "$half"
rm -r "$(step_dir "$half" 20)"
head -n 10 "$whole/log.jsonl" >"$half/log.jsonl"
run=$scratch/run
fresh() { rm -rf "$run" && cp -r "$1" "$run"; } # fresh FROM: $run as that one

goes_on() { # goes_on NAME: $run can be resumed from step 10 and ends like the undisturbed run
    gpt "${train[@]}" --run_dir "$run" --resume auto
    check "$1: goes on" says out "continued from $(step_dir "$run" 10)"
    check "$1: equal log" same_log "$run" "$whole"
    check "$1: equal weights" cmp "$(step_dir "$run" 20)/model.safetensors" "$(step_dir "$whole" 20)/model.safetensors"
    check "$1: nothing left over" same "$(cd "$run" && find . | sort)" "$(cd "$whole" && find . | sort)"
}

# ---- resume as another run ----

before=$(tree_sum "$half")
other() { # other NAME TEXT ARGUMENT...: refused, and nothing changed
    gpt "${train[@]}" --run_dir "$half" --resume auto "${@:3}"
    check "resume with $1: refused" not exits 0
    check "resume with $1: nothing on stdout" silent out
    check "resume with $1: says $2" says err "$2"
    check "resume with $1: nothing changed" same "$(tree_sum "$half")" "$before"
}
other "another seed" 'was trained with --seed 1' --seed 2
other "other data" 'the training files are not those' --train_data "$scratch/other.bin"
other "more data" 'the training files are not those' --train_data "$scratch/train.bin,$scratch/other.bin"
other "another arch" 'arch is "llama"' --arch qwen3
other "gpt2" 'arch is "llama"' --arch gpt2
other "fewer layers" 'layers is 2' --layers 1
other "more layers" 'layers is 2' --layers 3
other "another width" 'hidden is 32' --hidden 48
other "other heads of the same width" 'heads is 4' --heads 2
other "fewer key heads" 'kv_heads is 4' --kv_heads 2
other "another ffn" 'ffn is' --ffn 64
other "another vocabulary" 'vocab is 257' --vocab 300
other "another context" 'seq_len is 16' --seq_len 32
other "an untied head" 'tie_embeddings is true' --tie_embeddings false
other "another RoPE" 'rope_theta is' --rope_theta 500000
other "a document mask" 'document_mask is false' --document_mask true
other "another precision" 'precision is "bf16"' --precision fp32
other "other masters" 'master is "bf16"' --master fp32
other "no data" 'no file matches' --train_data "$scratch/nowhere.bin"
other "no such checkpoint" nowhere --resume "$scratch/nowhere"
other "a run of another folder" 'holds another run' --resume "$(step_dir "$whole" 20)"

# The same name, length, first and last token, but other tokens between: the receipt of the last batch tells.
mkdir "$scratch/changed"
{ head -c 1026 "$scratch/train.bin"; head -c 7024 "$scratch/other.bin" | tail -c +1027; tail -c 2 "$scratch/train.bin"; } >"$scratch/changed/train.bin"
check "changed data: as long" same "$(wc -c <"$scratch/changed/train.bin")" "$(wc -c <"$scratch/train.bin")"
other "changed data" 'is not the one that' --train_data "$scratch/changed/train.bin"
mkdir "$scratch/moved"
cp "$scratch/train.bin" "$scratch/moved"
fresh "$half"
gpt "${train[@]}" --run_dir "$run" --resume auto --train_data "$scratch/moved/train.bin"
check "resume with moved data: goes on" same_log "$run" "$whole"
fresh "$half"
gpt "${train[@]}" --run_dir "$run" --resume auto --lr 1e-3 --steps 12
check "resume with another lr: goes on" exits 0
check "resume with another lr: says so" says err 'note: lr is 0.004 in'
check "resume with other steps: says so" says err 'note: steps is 20 in'

# ---- disk full ----

limited() { # limited KIB ARGUMENT...: no file may grow beyond that; only stderr is kept
    called="$program ${*:2} (no file above $1 KiB)"
    (
        trap '' XFSZ
        ulimit -f "$1"
        exec timeout --kill-after=5 60 "$program" "${@:2}" </dev/null >/dev/null 2>"$scratch/err"
    )
    code=$?
}
full() { # full NAME TEXT: it ended as on a full disk, saying so
    check "$1: exit code" exits 1
    check "$1: says $2" says err "$2"
    check "$1: says why" matches err 'File too large|No space left'
    check "$1: no leftovers" same "$(find "$run" -name '*.tmp' -o -name '*.new')" ''
}
for kib in 8 40 100 300; do # in the model or the optimizer, early or late
    fresh "$half"
    limited $kib "${train[@]}" --run_dir "$run" --resume auto
    full "disk full at $kib KiB" 'checkpoint of step 20'
    check "disk full at $kib KiB: says what stays" says err 'the checkpoints before are as they were'
    check "disk full at $kib KiB: checkpoint 10 is as it was" same "$(tree_sum "$(step_dir "$run" 10)")" "$(tree_sum "$(step_dir "$half" 10)")"
    goes_on "after a disk full at $kib KiB"
done

fresh "$half"
limited 3 "${train[@]}" --run_dir "$run" --resume auto --checkpoint_every 0
full "log on a full disk" "$run/log.jsonl"
check "log on a full disk: whole lines only" same "$(grep -c '^{"step":.*}$' "$run/log.jsonl")" "$(grep -c '' "$run/log.jsonl")"
check "log on a full disk: up to there" holds "$(log_lines "$run") > 10 && $(log_lines "$run") < 20"
goes_on "after a log on a full disk"

fresh "$half"
limited 1 "${train[@]}" --run_dir "$run" --resume auto
full "log being cut on a full disk" "$run/log.jsonl"
check "log being cut on a full disk: nothing changed" same "$(tree_sum "$run")" "$(tree_sum "$half")"

fresh "$half"
printf '%s\n' "$(head -n 1 "$half/log.jsonl")" >"$run/log.jsonl"
config=$(cat "$run/config.json")
limited 1 "${train[@]}" --run_dir "$run" --resume auto
full "config.json on a full disk" "$run/config.json"
check "config.json on a full disk: the one before stays" same "$(cat "$run/config.json")" "$config"

rm -rf "$run" && mkdir "$run"
limited 4 tokenize --input "$scratch/train.bin.txt" --output "$run/tokens.bin"
full "tokenize on a full disk" "$run/tokens.bin"
check "tokenize on a full disk: no half file" not test -e "$run/tokens.bin"

# A file system in a mount namespace of its own, with room for one checkpoint and a half.
cat >"$scratch/small.sh" <<'END'
mount -t tmpfs -o "size=$4k" tmpfs "$1" && cp -r "$2"/. "$1" || exit 99
"${@:5}"
code=$?
mkdir "$3" && cp -r "$1"/. "$3"
exit $code
END
rm -rf "$run" && mkdir "$run"
called="$program in a full file system"
kib=$(($(du -sk "$half" | cut -f 1) * 3 / 2))
unshare -m bash "$scratch/small.sh" "$run" "$half" "$scratch/after" $kib \
    timeout 60 "$program" "${train[@]}" --run_dir "$run" --resume auto >"$scratch/out" 2>"$scratch/err" </dev/null
code=$?
if [ ! -d "$scratch/after" ]; then
    skip "a full file system" "no mount namespace here"
else
    rm -rf "$run" && mv "$scratch/after" "$run"
    full "a full file system" 'checkpoint of step 20'
    goes_on "after a full file system"
fi

# ---- damaged checkpoints ----

flip() { # flip FILE OFFSET: one bit of that byte; negative: from the end
    local at=$2 byte
    [ "$at" -lt 0 ] && at=$(($(wc -c <"$1") + at))
    byte=$(od -An -t u1 -j "$at" -N 1 "$1")
    # shellcheck disable=SC2059 # the format is the byte
    printf "\\x$(printf %02x $((byte ^ 1 << at % 8)))" | dd of="$1" bs=1 seek="$at" conv=notrunc status=none
}

damaged() { # damaged NAME FILE: of $run's checkpoint 20; skipped with the reason, refused by path
    gpt "${train[@]}" --run_dir "$scratch/new" --resume "$(step_dir "$run" 20)"
    check "$1: refused by path" exits 1
    check "$1: refused by path, says why" says err "$(step_dir "$run" 20)/$2"
    check "$1: refused by path, no new run" not test -e "$scratch/new"
    gpt eval --checkpoint "$(step_dir "$run" 20)" --data "$scratch/train.bin"
    if [[ $1 == *optimizer.safetensors* ]]; then
        check "$1: eval does not need it" exits 0
    else
        check "$1: refused by eval" exits 1
    fi
    gpt "${train[@]}" --run_dir "$run" --resume auto
    check "$1: exit code" exits 0
    check "$1: skipped" says err "skipped $(step_dir "$run" 20): "
    check "$1: says why" matches err "skipped .*step_00000020/$2"
    check "$1: takes the older" says out "continued from $(step_dir "$run" 10)"
    check "$1: equal log" same_log "$run" "$whole"
}

header=$(od -An -t u8 -N 8 "$(step_dir "$whole" 20)/model.safetensors" | xargs)
many=$(od -An -t u8 -N 8 "$(step_dir "$whole" 20)/optimizer.safetensors" | xargs)
middle=$(($(wc -c <"$(step_dir "$whole" 20)/optimizer.safetensors") / 2))
for spot in "model.safetensors 0" "model.safetensors 7" "model.safetensors 8" "model.safetensors 100" \
    "model.safetensors $((header + 7))" "model.safetensors $((header + 8))" "model.safetensors 30000" "model.safetensors -1" \
    "optimizer.safetensors 3" "optimizer.safetensors 200" "optimizer.safetensors $((many + 8))" \
    "optimizer.safetensors $middle" "optimizer.safetensors -1" "config.json 0" "config.json 700" "config.json -1" \
    "state.json 0" "state.json 50" "state.json 2000" "state.json -12" "state.json -1"; do
    read -r file offset <<<"$spot"
    fresh "$whole"
    flip "$(step_dir "$run" 20)/$file" "$offset"
    damaged "flipped bit in $file at $offset" "$file"
done

for file in model.safetensors optimizer.safetensors config.json state.json; do
    fresh "$whole"
    rm "$(step_dir "$run" 20)/$file"
    damaged "no $file" "$file"
    fresh "$whole"
    : >"$(step_dir "$run" 20)/$file"
    damaged "empty $file" "$file"
    fresh "$whole"
    truncate -s -1 "$(step_dir "$run" 20)/$file"
    damaged "$file cut by a byte" "$file"
    fresh "$whole"
    cp "$(step_dir "$run" 10)/$file" "$(step_dir "$run" 20)/$file.other"
    mv "$(step_dir "$run" 20)/$file.other" "$(step_dir "$run" 20)/$file"
    # config.json is that of the run, equal in every checkpoint
    [ $file = config.json ] || damaged "$file of another checkpoint" ""
done

fresh "$whole"
printf '\0\0\0\0\0\0\0\x10' | dd of="$(step_dir "$run" 20)/model.safetensors" bs=1 conv=notrunc status=none
damaged "a header that claims 2^60 bytes" model.safetensors

fresh "$whole"
for step in 10 20; do flip "$(step_dir "$run" $step)/state.json" 30; done
before=$(tree_sum "$run")
gpt "${train[@]}" --run_dir "$run" --resume auto
check "no whole checkpoint: exit code" exits 1
check "no whole checkpoint: says so" says err "no checkpoint in $run is complete"
check "no whole checkpoint: names both" same "$(grep -c '^skipped .*step_000000[12]0: ' "$scratch/err")" 2
check "no whole checkpoint: nothing changed" same "$(tree_sum "$run")" "$before"

# Leftovers of a killed run, and what is no checkpoint at all, are never taken for one.
fresh "$half"
cp -r "$(step_dir "$whole" 20)" "$run/checkpoints/step_00000020.tmp"
cp -r "$(step_dir "$whole" 20)" "$run/checkpoints/step_00000015.old"
goes_on "leftovers"

# ---- a loss that is not finite ----

wild=(--resume auto --checkpoint_every 1 --keep_checkpoints 0 --lr 1000 --weight_decay 100 --grad_clip 0 --warmup_steps 0)
fresh "$half"
gpt "${train[@]}" --run_dir "$run" "${wild[@]}"
check "not finite: exit code" exits 1
check "not finite: names the step and what" matches err '^error: step [0-9]+: the (loss|gradient norm) is (-?nan|-?inf);'
step=$(sed -n 's/^error: step \([0-9]*\):.*/\1/p' "$scratch/err")
check "not finite: layer statistics" matches err '^  (block\.[01]\.[a-z0-9_]+|wte|final_gain) +gradient norm [0-9a-z.+-]+$'
check "not finite: the embedding is no block" not matches err '^  block\.2'
check "not finite: how to replay" says err '--resume auto'
check "not finite: weights are those of the step before" says err "weights and moments are those of step $((step - 1))"
check "not finite: the step before is in the log, it is not" same "$(log_lines "$run")" $((step - 1))
check "not finite: the step before is saved" same "$(newest_step "$run")" $((step - 1))
gpt eval --checkpoint "$(step_dir "$run" $((step - 1)))" --data "$scratch/train.bin"
check "not finite: that checkpoint is whole" exits 0
gpt "${train[@]}" --run_dir "$run" "${wild[@]}"
check "not finite: the replay stops there too" matches err "^error: step $step: "
for step in $(steps_of "$run"); do [ "$step" = 10 ] || rm -r "$(step_dir "$run" "$step")"; done
goes_on "not finite: checkpoint 10 is as it was"
finish
