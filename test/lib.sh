# shellcheck shell=bash
# What the shell tests share: sourced by them, not run. Goes to the root of the repository, makes a folder $scratch that
# is removed at the end, counts checks, and prints of a failed one what was expected and what the program said.
#
#     source "$(dirname "$0")/lib.sh"
#     gpt plan --layers 2                    # runs the program ($TRAIN_GPT, or ./train_gpt) under a timeout:
#                                            # $code, $scratch/out, $scratch/err
#     check "plan: layers" says out layers   # the command after the name must succeed
#     finish                                 # last line "N passed, N failed[, N skipped]", exit code
#
# LLMC_TEST_ALL=1 in the environment asks for the long versions.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
program=${TRAIN_GPT:-./train_gpt}
[ -x "$program" ] || { echo "$program: not there; build it first" && echo "0 passed, 1 failed" && exit 1; }
export long=${LLMC_TEST_ALL:-0}
export LC_ALL=C OMP_WAIT_POLICY=passive # three threads on two busy cores: those that wait must give way
unset LLMC_TEST_STOP

scratch=$(mktemp -d) || exit 1
child= # a program in the background
cleanup() {
    if [ -n "$child" ]; then kill -9 "$child" && wait "$child"; fi 2>/dev/null
    rm -rf "$scratch"
}
trap cleanup EXIT
trap 'exit 1' INT TERM HUP

passed=0 failed=0 skipped=0 code=0 called=
touch "$scratch/out" "$scratch/err"

fail() { # fail NAME LINE...
    failed=$((failed + 1))
    printf 'FAILED  %s\n' "$1"
    [ $# -gt 1 ] && printf '        %s\n' "${@:2}"
    printf '        after: %s\n        exit code %s\n' "$called" "$code"
    tail -n 3 "$scratch/out" | sed 's/^/        stdout: /'
    tail -n 5 "$scratch/err" | sed 's/^/        stderr: /'
}

check() { # check NAME COMMAND...: one check, passed when the command succeeds
    local name=$1
    shift
    if "$@"; then passed=$((passed + 1)); else fail "$name" "expected: $*"; fi
}

skip() { # skip NAME WHY
    skipped=$((skipped + 1))
    echo "skipped $1: $2"
}

gpt() { # gpt ARGUMENT...
    called="$program $*"
    timeout --kill-after=5 "${limit:-120}" "$program" "$@" >"$scratch/out" 2>"$scratch/err" </dev/null
    code=$?
}

# The CUDA program on a CPU.
cuda=${TRAIN_GPT_CUDA:-./train_gpt_nvfp4_cpu}
on_cuda() { program=$cuda gpt "$@"; }
needs_cuda() { # needs_cuda WHAT: ends the test where the program is not there
    [ -x "$cuda" ] && return
    skip "$1" "no $cuda (make train_gpt_nvfp4_cpu needs the CUDA headers)"
    finish
}

exits() { [ "$code" -eq "$1" ]; }                              # exits CODE
says() { grep -qF -- "$2" "$scratch/$1"; }                     # says out|err TEXT
matches() { grep -qE -- "$2" "$scratch/$1"; }                  # matches out|err REGEX
silent() { [ ! -s "$scratch/$1" ]; }                           # silent out|err
same() { [ "$1" = "$2" ]; }                                    # same TEXT TEXT
differ() { [ "$1" != "$2" ]; }                                 # differ TEXT TEXT
not() { ! "$@"; }                                              # not COMMAND...
holds() { awk "BEGIN { exit !($1) }"; }                        # holds 'NUMERIC EXPRESSION'
field() { sed -n "s/.*\"$2\":\"\\{0,1\\}\\([^,\"}]*\\).*/\\1/p" <<<"$1"; } # field LINE KEY: from one line of a log

log_lines() { wc -l <"$1/log.jsonl"; }                         # log_lines RUN
log_line() { grep "^{\"step\":$2," "$1/log.jsonl"; }           # log_line RUN STEP
bits() { sed -E 's/"(step_ms|tokens_per_s|mfu|data_wait_ms|wire_bytes)":[^,}]*,//g' "$1/log.jsonl"; } # the log without times

same_log() { # same_log RUN REFERENCE: equal but for times; says where not
    local difference
    difference=$(diff <(bits "$1") <(bits "$2") | head -n 4)
    [ -z "$difference" ] && return
    printf '%s\n' "$difference" | cut -c 1-300 | sed 's/^/        /'
    return 1
}

relative() { # relative RUN REFERENCE KEY: differences of the logs' lines, of all that have the key in both
    paste <(sed -n "s/.*\"$3\":\([^,}]*\).*/\1/p" "$1/log.jsonl") <(sed -n "s/.*\"$3\":\([^,}]*\).*/\1/p" "$2/log.jsonl") |
        awk 'NF != 2 { print 1; exit } { d = ($1 - $2) / $2; print d < 0 ? -d : d }'
}
worst() { relative "$@" | awk '{ if ($1 > w) w = $1 } END { print NR ? w + 0 : 1 }'; } # worst RUN REFERENCE KEY

steps_of() { find "$1/checkpoints" -name 'step_*' 2>/dev/null | sed -nE 's/.*step_([0-9]{8})$/\1/p' | sort | sed 's/^0*//; s/^$/0/'; }
newest_step() { steps_of "$1" | tail -n 1; }
step_dir() { printf '%s/checkpoints/step_%08d' "$1" "$2"; }    # step_dir RUN STEP
tree_sum() { (cd "$1" && find . | sort && find . -type f | sort | xargs -r sha256sum) | sha256sum; } # of all names and bytes

# Text that is the same everywhere: words of a small vocabulary, from a multiplicative generator.
corpus() { # corpus FILE BYTES SEED
    awk -v bytes="$2" -v x="$3" 'BEGIN {
        n = split("the of and to in a that it was he for on with as his they be at one have this from or had by", word, " ")
        while (length(text) < bytes) {
            for (i = 0; i < 9; i++) { x = (x * 16807 + 11) % 2147483647; text = text word[x % n + 1] (i < 8 ? " " : ".\n") }
        }
        printf "%s", substr(text, 1, bytes)
    }' >"$1"
}

token_file() { # token_file FILE.bin BYTES SEED: one document
    corpus "$1.txt" "$2" "$3"
    "$program" tokenize --input "$1.txt" --output "$1" >/dev/null || { echo "cannot make $1" && exit 1; }
}

documents() { # documents FILE.bin COUNT BYTES: so many documents, an end-of-text before each
    local i
    mkdir -p "$1.d"
    for ((i = 0; i < $2; i++)); do corpus "$1.d/$((100 + i)).txt" $(($3 + i % 5)) $((i + 1)); done
    "$program" tokenize --input "$1.d/*.txt" --output "$1" >/dev/null || { echo "cannot make $1" && exit 1; }
}

finish() {
    local sum="$passed passed, $failed failed"
    [ "$skipped" -gt 0 ] && sum="$sum, $skipped skipped"
    echo "$sum"
    [ "$failed" -eq 0 ]
    exit
}
