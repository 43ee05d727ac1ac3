#!/usr/bin/env bash
# Installs what the build needs, builds, and runs the everyday tests. The last line is "N passed, N failed".
#
#     scripts/test.sh [MAKE ARGUMENTS]        scripts/test.sh BUILD=build/clang CC=clang
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh build
mkdir -p build
log=$(mktemp build/test.XXXXXX)
trap 'rm -f "$log"' EXIT
status=0
make -s -j "$(getconf _NPROCESSORS_ONLN)" test-programs "$@" || status=$?
if [ "$status" -ne 0 ]; then # the build failed: no test ran
    echo "0 passed, 1 failed"
    exit "$status"
fi
make test "$@" 2>&1 | tee "$log" || status=$?
if [ "$status" -ne 0 ]; then # make's own last line came after the sum
    sum=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -n 1) || sum="0 passed, 1 failed"
    echo "$sum"
fi
exit "$status"
