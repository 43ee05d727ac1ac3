#!/usr/bin/env bash
# Runs test programs, each under a timeout, two or more side by side where there are cores, and adds up their last lines. A
# program that crashes, hangs or prints no last line counts as one failure.
#   test/run.sh PROGRAM...        LLMC_TEST_ALL=1: the long versions        LLMC_TEST_JOBS=1: one after the other
set -u
cd "$(dirname "$0")/.." || exit 1
export OMP_WAIT_POLICY=passive # spinning threads starve each other where other programs share the cores
limit=600
[ "${LLMC_TEST_ALL:-0}" = 1 ] && limit=3000
cores=$(getconf _NPROCESSORS_ONLN)
jobs=${LLMC_TEST_JOBS:-$((cores > 4 ? 4 : cores))}
passed=0 failed=0 skipped=0 running=0
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
trap 'kill $(jobs -rp); exit 1' INT TERM HUP

run() { # run NUMBER PROGRAM: in the background; NUMBER.ended appears when it has ended
    local start=$SECONDS
    timeout --kill-after=10 "$limit" "$2" >"$scratch/$1.log" 2>&1 </dev/null
    echo "$? $((SECONDS - start)) $2" >"$scratch/$1.ends"
    mv "$scratch/$1.ends" "$scratch/$1.ended"
}
report() { # report NUMBER
    local log=$scratch/$1.log code seconds program last
    read -r code seconds program <"$scratch/$1.ended"
    last=$(tail -n 1 "$log")
    if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed(,\ ([0-9]+)\ skipped)?$ ]]; then
        passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2])) skipped=$((skipped + ${BASH_REMATCH[4]:-0}))
        [ "$code" -ne 0 ] && [ "${BASH_REMATCH[2]}" -eq 0 ] && failed=$((failed + 1)) && echo "$program: exit code $code"
    else
        failed=$((failed + 1))
        echo "$program: no last line, exit code $code (124 is a hang of $limit s)"
    fi
    if [ "$code" -ne 0 ]; then tail -n 40 "$log"; else grep -E '^(skipped|measured) ' "$log"; fi
    printf '%-36s %s   (%d s)\n' "$(basename "$program")" "$last" "$seconds"
}
await() { # await COUNT: until no more than COUNT run; reports those that ended
    local ended
    while [ "$running" -gt "$1" ]; do
        wait -n
        for ended in "$scratch"/*.ended; do
            [ -e "$ended" ] || continue
            report "$(basename "$ended" .ended)"
            rm "$ended"
            running=$((running - 1))
        done
    done
}
number=0
for program in "$@"; do
    await $((jobs - 1))
    number=$((number + 1))
    run "$number" "$program" &
    running=$((running + 1))
done
await 0
echo
summary="$passed passed, $failed failed"
[ "$skipped" -gt 0 ] && summary="$summary, $skipped skipped"
echo "$summary"
[ "$failed" -eq 0 ]
