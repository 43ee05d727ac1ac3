#!/usr/bin/env bash
# Runs test programs one after the other, each under a timeout, and adds up their last lines. A program that crashes,
# hangs or prints no last line counts as one failure.
#   test/run.sh PROGRAM...        LLMC_TEST_ALL=1: the long versions
set -u
cd "$(dirname "$0")/.." || exit 1
export OMP_WAIT_POLICY=passive # spinning threads starve each other where other programs share the cores
limit=600
[ "${LLMC_TEST_ALL:-0}" = 1 ] && limit=2400
passed=0 failed=0 skipped=0
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
for program in "$@"; do
    start=$(date +%s)
    timeout --kill-after=10 "$limit" "$program" >"$log" 2>&1
    code=$?
    last=$(tail -n 1 "$log")
    if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed(,\ ([0-9]+)\ skipped)?$ ]]; then
        passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2])) skipped=$((skipped + ${BASH_REMATCH[4]:-0}))
        [ "$code" -ne 0 ] && [ "${BASH_REMATCH[2]}" -eq 0 ] && failed=$((failed + 1)) && echo "$program: exit code $code"
    else
        failed=$((failed + 1))
        echo "$program: no last line, exit code $code (124 is a hang of $limit s)"
    fi
    if [ "$code" -ne 0 ]; then tail -n 40 "$log"; else grep -E '^(skipped|measured) ' "$log"; fi
    printf '%-36s %s   (%d s)\n' "$(basename "$program")" "$last" $(($(date +%s) - start))
done
echo
summary="$passed passed, $failed failed"
[ "$skipped" -gt 0 ] && summary="$summary, $skipped skipped"
echo "$summary"
[ "$failed" -eq 0 ]
