#!/usr/bin/env bash
# The command line from outside: every verb does its job, with checked output; wrong options, shapes and data end with a
# message that names them, exit code 2 (command line, config file) or 1 (files), and nothing on stdout. Damaged
# checkpoints, refused resumes and full disks are in test_damage.sh.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

small=(--layers 1 --hidden 32 --heads 2 --seq_len 16 --batch 2 --threads 1)
token_file "$scratch/train.bin" 3000 1
token_file "$scratch/val.bin" 1000 2
data=(--train_data "$scratch/train.bin")
validated=(--val_data "$scratch/val.bin")

refused() { # refused NAME CODE TEXT...: exit code, nothing on stdout, an error that says each text
    local name=$1 wanted=$2 text
    check "$name: exit code $wanted" exits "$wanted"
    check "$name: nothing on stdout" silent out
    check "$name: one line that begins with error" same "$(grep -c '^error: ' "$scratch/err")" 1
    for text in "${@:3}"; do check "$name: says $text" says err "$text"; done
}

# ---- help ----

for verb in train eval generate tokenize plan compare; do
    gpt $verb --help
    check "$verb --help: exit code" exits 0
    check "$verb --help: a screen" matches out '^  --[a-z_]+ '
    check "$verb --help: no error" silent err
    gpt help $verb
    check "help $verb: exit code" exits 0
done
gpt --help
check "--help: exit code" exits 0
for verb in train eval generate tokenize plan compare; do check "--help: lists $verb" matches out "^  $verb"; done

# ---- options that cannot be ----

wrong() { # wrong NAME TEXT ARGUMENT...
    gpt "${@:3}"
    refused "$1" 2 "$2"
}
run=$scratch/never
base=("${small[@]}" "${data[@]}" --run_dir "$run")
wrong "unknown option" precision --precison bf16
wrong "unknown option, train" 'the nearest is precision' train "${base[@]}" --precison bf16
wrong "unknown verb" 'the nearest is train' trian
wrong "no value" 'layers needs a value' "${base[@]}" --layers
wrong "not a number" 'layers abc' "${base[@]}" --layers abc
wrong "out of range" 'seq_len 0' "${base[@]}" --seq_len 0
wrong "nan" 'lr nan' "${base[@]}" --lr nan
wrong "unknown arch" 'gpt2|llama|qwen3' "${base[@]}" --arch mamba
wrong "unknown isa" 'isa' "${base[@]}" --isa sse9
wrong "option of another verb" 'belongs to' plan --lr 3
wrong "stray argument" 'unexpected argument' train here
wrong "no data" 'needs --train_data' train --run_dir "$run"
wrong "heads do not divide hidden" 'heads 5 does not divide hidden 32' "${base[@]}" --heads 5
wrong "kv_heads do not divide heads" 'kv_heads 3 does not divide heads 4' "${base[@]}" --heads 4 --kv_heads 3
wrong "odd head_dim" 'head_dim 7 is odd' "${base[@]}" --head_dim 7
wrong "grouped queries in gpt2" 'gpt2 has no grouped queries' "${base[@]}" --arch gpt2 --kv_heads 1
wrong "untied gpt2" 'tie_embeddings' "${base[@]}" --arch gpt2 --tie_embeddings false
wrong "batch does not divide" 'global_batch_tokens 100 is not a multiple' "${base[@]}" --global_batch_tokens 100
wrong "too many parameters" 'parameters: at most' "${base[@]}" --layers 16384 --hidden 1048576 --heads 16384
wrong "bf16 masters in fp32" 'master bf16 under precision fp32' "${base[@]}" --precision fp32 --master bf16
wrong "end-of-text beyond the vocabulary" 'eot_token 300 is not below vocab 257' "${base[@]}" --eot_token 300
wrong "compare with one run" 'compare needs two runs' compare "$run"
wrong "no such config" nowhere.json --config "$scratch/nowhere.json"
echo '{"layers": 2, "hiden": 32}' >"$scratch/bad.json"
wrong "unknown key in a config" 'the nearest is hidden' plan --config "$scratch/bad.json"
echo '{"layers": "two"}' >"$scratch/bad.json"
wrong "wrong type in a config" 'layers must be a number' plan --config "$scratch/bad.json"
echo '{"layers": 2,' >"$scratch/bad.json"
wrong "broken config" bad.json plan --config "$scratch/bad.json"
check "wrong options leave nothing" not test -e "$run"

# ---- data that cannot be ----

broken() { # broken NAME FILE TEXT...: as training and as validation data, and for eval later
    gpt "${small[@]}" --train_data "$2" --run_dir "$run"
    refused "$1" 1 "$(basename "$2")" "${@:3}"
    gpt "${base[@]}" --val_data "$scratch/train.bin,$2"
    refused "$1, validation" 1 val_data "$(basename "$2")" "${@:3}"
    check "$1: leaves nothing" not test -e "$run"
}
: >"$scratch/empty.bin"
head -c 2000 "$scratch/train.bin" >"$scratch/cut.bin"
head -c 600 "$scratch/train.bin" >"$scratch/header.bin"
head -c 2001 "$scratch/train.bin.txt" >"$scratch/odd.bin"
{ head -c 4 "$scratch/train.bin" && printf '\x09' && tail -c +6 "$scratch/train.bin"; } >"$scratch/version.bin"
broken "missing file" "$scratch/missing.bin"
broken "empty file" "$scratch/empty.bin" empty
broken "truncated file" "$scratch/cut.bin" 'the header says 3001 tokens'
broken "truncated header" "$scratch/header.bin" truncated
broken "odd size" "$scratch/odd.bin" 'odd size'
broken "unknown version" "$scratch/version.bin" 'version 9'
mkdir "$scratch/folder.bin"
broken "a folder" "$scratch/folder.bin" 'not a regular file'

# Token 300 at position 77 of a file without header.
for ((i = 0; i < 200; i++)); do if [ $i = 77 ]; then printf '\x2c\x01'; else printf 'a\0'; fi; done >"$scratch/beyond.bin"
gpt "${small[@]}" --train_data "$scratch/beyond.bin" --steps 20 --run_dir "$run"
check "token beyond the vocabulary: exit code" exits 1
check "token beyond the vocabulary: file" says err "$scratch/beyond.bin"
check "token beyond the vocabulary: where" says err 'token 300 at position 77'
rm -rf "$run"
gpt "${base[@]}" --val_data "$scratch/beyond.bin" --steps 2 --val_every 1
check "token beyond the vocabulary, validation: exit code" exits 1
check "token beyond the vocabulary, validation: where" says err 'token 300 at position 77'
rm -rf "$run"

# ---- run folders that cannot be ----

gpt "${small[@]}" "${data[@]}" --run_dir "$scratch/train.bin/run"
refused "run folder below a file" 1 run_dir "$scratch/train.bin/run"
cp "$scratch/train.bin" "$scratch/copy.bin"
gpt "${small[@]}" "${data[@]}" --run_dir "$scratch/copy.bin"
refused "run folder is a file" 1 "$scratch/copy.bin"
check "run folder is a file: unchanged" cmp "$scratch/copy.bin" "$scratch/train.bin"
if [ "$(id -u)" != 0 ]; then
    mkdir -m 500 "$scratch/closed"
    gpt "${small[@]}" "${data[@]}" --run_dir "$scratch/closed"
    refused "run folder without permission" 1 "$scratch/closed" 'cannot write'
    gpt "${small[@]}" "${data[@]}" --run_dir "$scratch/closed/run"
    refused "run folder in one without permission" 1 "$scratch/closed/run" 'cannot create'
else
    skip "run folder without permission" "root may write everywhere"
fi

# ---- a run: never means never, keep_checkpoints, overwrite, config ----

run=$scratch/a
train=("${small[@]}" "${data[@]}" "${validated[@]}" --steps 20 --lr 1e-2 --warmup_steps 2 --run_dir)
gpt "${train[@]}" "$run" --val_every 5 --val_batches 1000 --checkpoint_every 4 --keep_checkpoints 3 --hash_every 10
check "run: exit code" exits 0
check "run: header" matches out '^model +llama, 1 layers, hidden 32, 2 heads, [0-9]+ parameters, context 16$'
check "run: a line a step" same "$(grep -c '^step ' "$scratch/out")" 20
check "run: validation at 5, 10, 15, 20" same "$(grep -c '^validation after step' "$scratch/out")" 4
check "run: log" same "$(log_lines "$run")" 20
check "run: hashes at 10 and 20" same "$(grep state_hash "$run/log.jsonl" | grep -o '^{"step":[0-9]*' | tr -dc '0-9\n' | tr '\n' ' ')" '10 20 '
check "run: val_loss at 5, 10, 15, 20" same "$(grep val_loss "$run/log.jsonl" | grep -o '^{"step":[0-9]*' | tr -dc '0-9\n' | tr '\n' ' ')" '5 10 15 20 '
check "run: three checkpoints stay" same "$(steps_of "$run" | tr '\n' ' ')" '12 16 20 '
for file in model.safetensors optimizer.safetensors config.json state.json; do
    check "run: checkpoint has $file" test -s "$(step_dir "$run" 20)/$file"
done
check "run: the checkpoint's config is the run's" cmp "$(step_dir "$run" 20)/config.json" "$run/config.json"
check "run: loss falls" holds "$(field "$(log_line "$run" 20)" loss) < $(field "$(log_line "$run" 1)" loss) - 0.5"

gpt "${train[@]}" "$scratch/b" --val_every 0 --checkpoint_every 0 --hash_every 0 --sample_every 0
check "every 0: exit code" exits 0
check "every 0: no validation, no hash" not grep -qE 'val_loss|state_hash' "$scratch/b/log.jsonl"
check "every 0: no validation, no sample printed" not matches out '^(validation|--- sample)'
check "every 0: no checkpoint" not test -e "$scratch/b/checkpoints"
check "every 0: the same training" same "$(bits "$scratch/b")" "$(bits "$run" | sed -E 's/"(val_loss|val_bpb)":[^,}]*,//g; s/,"state_hash":"[^"]*"//')"
gpt "${train[@]}" "$scratch/c" --val_every 0 --sample_every 10 --sample_tokens 30 --checkpoint_every 8 --keep_checkpoints 0
check "sample_every 10: two samples" same "$(grep -c '^--- sample after step [12]0 ---$' "$scratch/out")" 2
check "sample_every 10: the same training" same_log "$scratch/c" "$scratch/b"
check "keep_checkpoints 0: all stay, and the last step's" same "$(steps_of "$scratch/c" | tr '\n' ' ')" '8 16 20 '

before=$(tree_sum "$run")
gpt "${train[@]}" "$run"
refused "folder that holds a run" 2 "$run" '--resume auto' '--overwrite'
gpt "${train[@]}" "$run" --resume auto --overwrite
refused "resume and overwrite" 2 '--overwrite and --resume exclude each other'
check "folder that holds a run: unchanged" same "$(tree_sum "$run")" "$before"
gpt "${train[@]}" "$scratch/c" --overwrite --steps 3 --val_every 0
check "overwrite: exit code" exits 0
check "overwrite: a new log" same "$(log_lines "$scratch/c")" 3
check "overwrite: no old checkpoint" same "$(steps_of "$scratch/c")" ''

gpt "${train[@]}" "$scratch/d/deep/run" --val_every 0 --resume auto
check "resume auto in a folder that is not there: exit code" exits 0
check "resume auto in a folder that is not there: from the start" same_log "$scratch/d/deep/run" "$scratch/b"
mkdir "$scratch/e"
gpt "${train[@]}" "$scratch/e" --val_every 0 --resume auto
check "resume auto in an empty folder: from the start" same_log "$scratch/e" "$scratch/b"

# The log is cut back to the step that the run goes on from, a broken last line included.
rm -rf "$(step_dir "$run" 16)" "$(step_dir "$run" 20)"
cp -r "$run" "$scratch/cut"
printf '{"step":21,"loss":' >>"$scratch/cut/log.jsonl"
gpt "${train[@]}" "$scratch/cut" --val_every 5 --val_batches 1000 --checkpoint_every 4 --keep_checkpoints 3 --hash_every 10 --resume auto
check "log cut back: goes on from 12" says out "continued from $(step_dir "$scratch/cut" 12)"
check "log cut back: equal log" same_log "$scratch/cut" "$run"
rm -rf "$run" && mv "$scratch/cut" "$run"
gpt "${train[@]}" "$run" --val_every 5 --val_batches 1000 --checkpoint_every 4 --keep_checkpoints 3 --hash_every 10 --resume auto
check "resume of a complete run: exit code" exits 0
check "resume of a complete run: same log" same "$(log_lines "$run")" 20
gpt "${train[@]}" "$scratch/f" --resume "$(step_dir "$run" 16)" --val_every 0
check "resume by path into a new folder: exit code" exits 0
check "resume by path into a new folder: steps 17 to 20" same "$(bits "$scratch/f")" "$(bits "$scratch/b" | tail -n 4)"

# data_hash is chained: one other token in one window, read in step k, gives another hash from step k on.
head -c $((1024 + 1600)) "$scratch/train.bin" | tail -c +1025 >"$scratch/one.bin" # 49 windows, 40 of them read
gpt "${small[@]}" --train_data "$scratch/one.bin" --steps 20 --run_dir "$scratch/chain"
hashes() { grep -o '"data_hash":"[0-9a-f]*"' "$1/log.jsonl"; }
for ((window = 0; window < 49; window++)); do
    cp "$scratch/one.bin" "$scratch/two.bin"
    printf 'Q' | dd of="$scratch/two.bin" bs=1 seek=$((2 * (16 * window + 5))) conv=notrunc status=none
    gpt "${small[@]}" --train_data "$scratch/two.bin" --steps 20 --run_dir "$scratch/chain2" --overwrite
    first=$(paste -d ' ' <(hashes "$scratch/chain") <(hashes "$scratch/chain2") | awk '$1 != $2 { print NR; exit }')
    [ "${first:-20}" -le 10 ] && break
done
check "data_hash: the change is seen when it is read" holds "${first:-20} <= 10"
check "data_hash: and in every step after" same \
    "$(paste -d ' ' <(hashes "$scratch/chain") <(hashes "$scratch/chain2") | awk '$1 != $2' | wc -l)" $((21 - ${first:-20}))

echo '{"layers": 1, "hidden": 32, "heads": 2, "seq_len": 16, "batch": 2, "threads": 1, "seed": 5, "steps": 2}' >"$scratch/one.json"
echo '{"layers": 2, "hidden": 48, "heads": 2, "seq_len": 16, "batch": 2, "seed": 6}' >"$scratch/two.json"
gpt --seed 7 --config "$scratch/one.json" "${data[@]}" --run_dir "$scratch/g" --steps=4 --steps 3
check "config: exit code" exits 0
check "config: the command line wins, before or after it; the last wins" \
    same "$(grep -oE '"(seed|steps|layers)":.[0-9]+' "$scratch/g/config.json" | tr -d '\t\n')" '"layers":1"steps":3"seed":7'
gpt plan --config "$scratch/one.json" --config "$scratch/two.json" --seq_len 32
check "config: the last file counts" matches out '1 micro-batches of 2 x 32$'
gpt --config "$run/config.json" --run_dir "$scratch/h"
check "config: a run's own config.json repeats it" same_log "$scratch/h" "$run"

# ---- eval ----

last=$(step_dir "$run" 20)
line=$(log_line "$run" 20)
gpt eval --checkpoint "$last" --data "$scratch/val.bin" --batch 2 --threads 1
check "eval: exit code" exits 0
check "eval: says what it measured" matches out '^loss [0-9.]+ nats per token, [0-9.]+ bits per byte, over 992 tokens of '
read -r loss bpb < <(sed -E 's/^loss ([0-9.]+) nats per token, ([0-9.]+) .*/\1 \2/' "$scratch/out")
check "eval: is the last val_loss" holds "($loss - $(field "$line" val_loss))^2 < 1e-12"
check "eval: is the last val_bpb" holds "($bpb - $(field "$line" val_bpb))^2 < 1e-12"
check "eval: bits per byte are loss / ln 2" holds "($bpb - $loss / log(2))^2 < 4e-12"
printed=$(cat "$scratch/out")
for arguments in '--batch 1' '--batch 5' '--batch 64' '--threads 3' '--isa portable'; do
    # shellcheck disable=SC2086 # words
    gpt eval --checkpoint "$last" --data "$scratch/val.bin" $arguments
    check "eval $arguments: the same" same "$(cat "$scratch/out")" "$printed"
done
gpt eval --checkpoint "$last" --data "$scratch/cut.bin"
refused "eval of a truncated file" 1 cut.bin
gpt eval --checkpoint "$scratch/nowhere" --data "$scratch/val.bin"
refused "eval of no checkpoint" 1 "$scratch/nowhere"

# HellaSwag: two questions of bytes; the second is longer than the context. write16 WORD...: as uint16.
write16() { local word; for word; do printf '%b' "\\x$(printf %02x $((word % 256)))\\x$(printf %02x $((word / 256)))"; done; }
question() { # question LABEL CONTEXT-TOKENS: four completions, of 2, 1, 1, 1 bytes
    local tokens=()
    for ((i = 0; i < $2; i++)); do tokens+=(97); done
    write16 65535 $((2 * (15 + $2))) 0 "$1" 4 "$2" "${tokens[@]}" 2 104 101 1 98 1 99 1 100
}
{
    write16 55434 308 1 0 2 0 # 20240522, 1, 2
    head -c 1012 /dev/zero
    question 0 3
    question 3 17
} >"$scratch/questions.bin"
gpt eval --checkpoint "$last" --hellaswag "$scratch/questions.bin"
check "eval of questions: exit code" exits 0
check "eval of questions: both shares, and what was left out" matches out \
    '^hellaswag [0-9.]+% \([01]/1\) by mean loss \(acc_norm, as llm.c\), [0-9.]+% \([01]/1\) by sum \(acc\), 1 skipped: longer than the context of 16$'
answers=$(cat "$scratch/out")
gpt eval --checkpoint "$last" --hellaswag "$scratch/questions.bin" --data "$scratch/val.bin" --batch 1
check "eval of both: two lines" same "$(tail -n 1 "$scratch/out")" "$answers"
check "eval of both: the loss too" same "$(head -n 1 "$scratch/out")" "$printed"
head -c 1060 "$scratch/questions.bin" >"$scratch/half.bin"
gpt eval --checkpoint "$last" --hellaswag "$scratch/half.bin"
refused "eval of a truncated file of questions" 1 hellaswag half.bin
gpt eval --checkpoint "$last"
refused "eval of nothing" 2 'needs --data' --hellaswag

# ---- generate ----

generate() { gpt generate --checkpoint "$last" --threads 1 "$@"; }
generate --prompt 'the of' --tokens 40
check "generate: exit code" exits 0
check "generate: begins with the prompt" matches out '^the of'
sample=$(cat "$scratch/out")
check "generate: 40 tokens" holds "$(wc -c <"$scratch/out") > 6 + 30 && $(wc -c <"$scratch/out") <= 6 + 40 + 1"
generate --prompt 'the of' --tokens 40 --isa portable
check "generate: the same again, on any instruction set" same "$(cat "$scratch/out")" "$sample"
generate --prompt 'the of' --tokens 40 --seed 2
check "generate: another seed, another text" differ "$(cat "$scratch/out")" "$sample"
generate --prompt 'the of' --tokens 40 --temperature 0
sample=$(cat "$scratch/out")
generate --prompt 'the of' --tokens 40 --temperature 0 --seed 2
check "generate: greedy has no seed" same "$(cat "$scratch/out")" "$sample"
generate --prompt 'the of' --tokens 40 --top_k 1 --seed 3
check "generate: top_k 1 is greedy" same "$(cat "$scratch/out")" "$sample"
generate --prompt '' --tokens 20
check "generate: empty prompt" exits 0
check "generate: empty prompt, some text" holds "$(wc -c <"$scratch/out") > 10"
prompt='that it was he for on with as his they be at one have this'
generate --prompt "$prompt" --tokens 20 --temperature 0
check "generate: a prompt longer than the context" says out "$prompt"
sample=$(cat "$scratch/out")
generate --prompt "${prompt: -16}" --tokens 20 --temperature 0
check "generate: only the context of it counts" same "$(cat "$scratch/out")" "${sample:$((${#prompt} - 16))}"
generate --prompt 'the' --tokens 200
check "generate: beyond the context" holds "$(wc -c <"$scratch/out") > 3 + 150"
generate --tokens 0
refused "generate: no tokens" 2 tokens

gpt "${small[@]}" --vocab 300 "${data[@]}" --steps 1 --checkpoint_every 1 --run_dir "$scratch/ids"
last=$(step_dir "$scratch/ids" 1)
generate --prompt 5,299 --tokens 6
check "generate: token ids" matches out '^5,299( [0-9]+){6}$'
generate --prompt the --tokens 6
refused "generate: text where ids are due" 2 'token ids'
generate --prompt 5,300 --tokens 6
refused "generate: id beyond the vocabulary" 2 'vocabulary (300)'

# ---- plan ----

# shellcheck disable=SC2317 # called through check
adds_up() {
    awk '/^memory by purpose/ { table = 1; next }
        !NF { table = 0 }
        table && $1 == "total" { total = $2 }
        table && $1 != "total" { for (i = 1; i <= NF; i++) if ($i ~ /^[0-9]+$/) { sum += $i; break }; share += $NF }
        END { exit !(total > 0 && sum == total && share > 99.4 && share < 100.6) }' "$scratch/out"
}
for arguments in '' '--arch gpt2 --precision fp32 --recompute block' '--config scripts/configs/gpt2_124m.json'; do
    # shellcheck disable=SC2086 # words
    gpt plan $arguments
    check "plan $arguments: exit code" exits 0
    check "plan $arguments: the purposes add up to the total" adds_up
done
gpt plan "${small[@]}" && total=$(awk '$1 == "total" { print $3, $4 }' "$scratch/out")
gpt "${small[@]}" "${data[@]}" --steps 1 --run_dir "$scratch/i"
check "plan: is what a run's header says" says out "memory      $total:"
for preset in gpt2_124m:124439808 gpt2_1558m:1557611200 llama3_8b:8030261248 qwen3_0.6b:596049920; do
    gpt plan --config "scripts/configs/${preset%:*}.json"
    check "plan: parameters of ${preset%:*}" matches out "^parameters +${preset#*:}\$"
done

# ---- tokenize ----

printf 'ab\n' >"$scratch/1.txt"
printf '\xff\x00z' >"$scratch/2.txt"
gpt tokenize --input "$scratch/[12].txt" --output "$scratch/tokens.bin"
check "tokenize: exit code" exits 0
check "tokenize: says what it made" says out "$scratch/tokens.bin: 8 tokens from 2 files"
check "tokenize: header" same "$(od -An -t d4 -N 12 "$scratch/tokens.bin" | xargs)" '20240520 1 8'
check "tokenize: tokens" same "$(od -An -t u2 -j 1024 "$scratch/tokens.bin" | xargs)" '256 97 98 10 256 255 0 122'
gpt tokenize --input "$scratch/nowhere*.txt" --output "$scratch/none.bin"
refused "tokenize: no input" 1 nowhere
gpt tokenize --input "$scratch/1.txt" --output "$scratch/nowhere/none.bin"
refused "tokenize: no folder for the output" 1 nowhere/none.bin
gpt tokenize --input "$scratch/1.txt,$scratch/folder.bin" --output "$scratch/none.bin"
refused "tokenize: unreadable input" 1 folder.bin
check "tokenize: leaves nothing" same "$(find "$scratch" -name 'none.bin*')" ''

# ---- compare ----

a=$scratch/b b=$scratch/seed
gpt "${train[@]}" "$b" --val_every 0 --seed 2
gpt compare "$a" "$b" --block_steps 5
check "compare: exit code" exits 0
wanted=$(paste <(grep -o '"loss":[^,]*' "$a/log.jsonl" | cut -c 8-) <(grep -o '"loss":[^,]*' "$b/log.jsonl" | cut -c 8-) | awk '
    { block[int((NR - 1) / 5)] += ($2 - $1) / 5; sum += ($2 - $1) / 20 }
    END { for (k = 0; k < 4; k++) squares += (block[k] - sum)^2; printf "%+.6f +- %.6f", sum, sqrt(squares / 3 / 4) }')
check "compare: mean gap and standard error" says out "mean gap     $wanted nats per token"
check "compare: bits per byte" matches out 'bits per byte$'
gpt compare "$a" "$a" --max_gap 0
check "compare: a run with itself is within 0" exits 0
check "compare: says within" matches out '^within max_gap 0$'
gpt "${train[@]}" "$scratch/slow" --val_every 0 --lr 1e-5
gpt compare "$a" "$scratch/slow" --max_gap 0.1
check "compare: beyond max_gap" exits 3
check "compare: says beyond" matches out '^BEYOND max_gap 0.1$'
gpt compare "$a" "$scratch/slow" --max_gap 100
check "compare: within max_gap" exits 0
gpt compare "$scratch/slow" "$a" --max_gap 0
check "compare: better is no failure" exits 0
gpt compare "$a,$b" "$scratch/slow,$scratch/slow"
check "compare: groups" exits 0
gpt compare "$a" "$scratch/nowhere"
refused "compare: no such run" 1 nowhere
finish
