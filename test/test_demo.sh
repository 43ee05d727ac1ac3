#!/usr/bin/env bash
# The first command of the README, in a clean copy of the files that are under version control: scripts/demo.sh ends
# with exit code 0, prints a sample, and reaches the bits per byte that it is known for. Minutes: LLMC_TEST_ALL=1 only.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
BOUND=2.06 # validation bits per byte after the last step: measured 2.0094, the same bits everywhere, and 0.05

if [ "$long" != 1 ]; then
    skip "the demo" "minutes long; LLMC_TEST_ALL=1 runs it"
    finish
fi
copy=$scratch/copy
if ! git ls-files -z >"$scratch/files" 2>/dev/null || [ ! -s "$scratch/files" ]; then
    skip "the demo" "not a git repository: no list of its files"
    finish
fi
mkdir "$copy"
tar -c --null --ignore-failed-read -T "$scratch/files" | tar -x -C "$copy"
[ -d build/deps ] && mkdir -p "$copy/build" && cp -r build/deps "$copy/build" # what scripts/setup.sh had to bring

called="scripts/demo.sh in a clean copy"
started=$SECONDS
timeout --kill-after=10 900 bash "$copy/scripts/demo.sh" >"$scratch/out" 2>"$scratch/err" </dev/null
code=$?
took=$((SECONDS - started))
check "demo: exit code" exits 0
run=$(find "$copy/runs" -maxdepth 2 -name log.jsonl -exec dirname {} \; 2>/dev/null)
check "demo: one run below runs/" test -f "$run/log.jsonl"
last=$(tail -n 1 "$run/log.jsonl")
bpb=$(field "$last" val_bpb)
echo "measured demo: ${bpb:-unknown} bits per byte on the validation text (bound $BOUND), $took s with build and set-up"
check "demo: ${bpb:-unknown} bits per byte, at most $BOUND" holds "${bpb:-9} <= $BOUND"
check "demo: the loss falls" holds "$(field "$last" loss) < $(field "$(log_line "$run" 1)" loss) - 2"
check "demo: prints a sample" matches out '^== sample: "'
sample=$(sed '1,/^== sample: /d' "$scratch/out")
check "demo: the sample goes on from the prompt" holds "length(\"$(tr -dc 'A-Za-z ' <<<"$sample")\") > 200"
check "demo: a checkpoint of the last step" test -d "$(step_dir "$run" "$(log_lines "$run")")"
finish
