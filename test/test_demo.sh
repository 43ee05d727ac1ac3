#!/usr/bin/env bash
# The first command of the README, in a clean copy of the files that are under version control: scripts/demo.sh ends
# with exit code 0, prints a sample, and reaches the bits per byte that it is known for; and with --compare, that it
# trains in NVFP4 within 0.04 bits per byte of its BF16 twin (0.03 in the training loss of the last 20% of the steps). Minutes: LLMC_TEST_ALL=1 only.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
BOUND=2.08 # validation bits per byte after the last step: measured 2.0254, the same bits everywhere, and 0.05

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

called="scripts/demo.sh --compare in a clean copy"
started=$SECONDS
timeout --kill-after=10 1200 bash "$copy/scripts/demo.sh" --compare >"$scratch/out" 2>"$scratch/err" </dev/null
code=$?
took=$((SECONDS - started))
check "demo: exit code" exits 0
run=$copy/runs/demo
check "demo: its run is runs/demo" test -f "$run/log.jsonl"
last=$(tail -n 1 "$run/log.jsonl")
bpb=$(field "$last" val_bpb)
echo "measured demo: ${bpb:-unknown} bits per byte on the validation text (bound $BOUND), $took s with build and set-up"
check "demo: ${bpb:-unknown} bits per byte, at most $BOUND" holds "${bpb:-9} <= $BOUND"
gaps=$(grep -A 1 -E '^(mean|last) gap' "$scratch/out" | awk '/bits per byte/ { print $1 }' | tr '\n' ' ')
echo "measured demo: gaps to BF16 in bits per byte, training then validation: $gaps"
check "demo: two gaps" holds "$(wc -w <<<"$gaps") == 2"
check "demo: training gap at most 0.03" holds "$(cut -d ' ' -f 1 <<<"$gaps") <= 0.03"
check "demo: validation gap at most 0.04" holds "$(cut -d ' ' -f 2 <<<"$gaps") <= 0.04"
check "demo: at least 80% of the blocks' FLOPs are FP4" holds "$(sed -nE 's/.*"fp4_share":[[:space:]]*([0-9.]+).*/\1/p' "$run/config.json") >= 0.8"
check "demo: the loss falls" holds "$(field "$last" loss) < $(field "$(log_line "$run" 1)" loss) - 2"
check "demo: prints a sample" matches out '^== sample: "'
sample=$(sed '1,/^== sample: /d' "$scratch/out")
check "demo: the sample goes on from the prompt" holds "length(\"$(tr -dc 'A-Za-z ' <<<"$sample")\") > 200"
check "demo: a checkpoint of the last step" test -d "$(step_dir "$run" "$(log_lines "$run")")"
finish
