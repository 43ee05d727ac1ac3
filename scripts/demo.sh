#!/usr/bin/env bash
# From nothing to a trained model and its samples: set-up, build, text, tokens, training, generation.
#
#     scripts/demo.sh [--compare] [TEXT] [-- OPTIONS]
#
# Trains in NVFP4; with --compare also the same model in BF16 (runs/demo_bf16 ...), and prints the gap between the two.
# TEXT: a plain text file, at least 10 kB; without one the King James Bible (from the Debian package bible-kjv).
# OPTIONS go to `train_gpt train`, after those of scripts/configs/demo.json: scripts/demo.sh -- --steps 50
# Makes data/NAME/{train,val}.txt (last 5% of the bytes are val) with their .bin, and runs/demo_NAME (runs/demo for the Bible).
set -euo pipefail
stop() { echo "demo: $*" >&2 && exit 1; }
say() { printf '\n== %s\n' "$*"; }

text='' twin=''
if [ "${1:-}" = --compare ]; then twin=1 && shift; fi
case ${1:-} in
'' | --) ;;
-h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit 0 ;;
-*) stop "$1: options for train come after --, as in: scripts/demo.sh -- --steps 50" ;;
*)
    text=$1
    shift
    [ -f "$text" ] || stop "$text: no such file"
    [ -r "$text" ] || stop "$text: cannot be read"
    [ "$(wc -c <"$text")" -ge 10000 ] || stop "$text: $(wc -c <"$text") bytes are too few to learn from; at least 10000"
    text=$(cd "$(dirname "$text")" && pwd)/$(basename "$text")
    ;;
esac
if [ $# -gt 0 ]; then
    case " $* " in *" --run_dir"*) stop "--run_dir: the demo trains in runs/demo or runs/demo_NAME" ;; esac
    [ "$1" = -- ] || stop "$1: one text only; options for train come after --"
    shift
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=kjv run=runs/demo prompt='In the beginning'
if [ -n "$text" ]; then
    name=$(basename "$text") && name=${name%.*}
    name=$(LC_ALL=C tr -c 'A-Za-z0-9_\n' _ <<<"${name:-text}") run=runs/demo_$name
    prompt=$(LC_ALL=C awk 'NF >= 3 { print $1, $2, $3; exit }' "$text" | LC_ALL=C cut -c 1-100)
else
    data/kjv.sh # brings what is missing, for the build too
    text=data/kjv/kjv.txt
fi
source scripts/setup.sh build

say "build"
make -s -j "$(getconf _NPROCESSORS_ONLN)"

say "text: data/$name"
mkdir -p "data/$name"
# The last 5% of the bytes, from a line's start, are validation; a text of very long lines is cut within one.
bytes=$(wc -c <"$text")
cut=$((bytes * 95 / 100))
line=$(head -n 1 < <(tail -c "+$((cut + 1))" "$text") | wc -c)
if [ $((bytes - cut - line)) -ge $((bytes / 50)) ]; then cut=$((cut + line)); fi
head -c "$cut" "$text" >"data/$name/train.txt"
tail -c "+$((cut + 1))" "$text" >"data/$name/val.txt"
for part in train val; do
    ./train_gpt tokenize --input "data/$name/$part.txt" --output "data/$name/$part.txt.bin"
done

train() { # train RUN OPTION...
    say "train: $1"
    ./train_gpt train --config scripts/configs/demo.json --train_data "data/$name/train.txt.bin" \
        --val_data "data/$name/val.txt.bin" --run_dir "$1" --overwrite "${@:2}"
}
train "$run" "$@"
if [ -n "$twin" ]; then
    train "${run}_bf16" "$@" --precision bf16
    say "gap of ${run}, B, to its BF16 twin, A, in the last 20% of the steps"
    ./train_gpt compare "${run}_bf16" "$run" --last_fraction 0.2
fi

say "sample: \"$prompt\""
checkpoint=$(find "$run/checkpoints" -maxdepth 1 -name 'step_[0-9]*[0-9]' | LC_ALL=C sort | tail -n 1)
[ -n "$checkpoint" ] || stop "no checkpoint in $run/checkpoints"
./train_gpt generate --checkpoint "$checkpoint" --prompt "$prompt" --tokens 400 --temperature 0.8 --top_k 40
