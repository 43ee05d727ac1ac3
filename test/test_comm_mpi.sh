#!/usr/bin/env bash
# Ranks under mpirun: the collectives on 1 to 7 ranks, and that a job in which one rank exits, is killed, stops, dies or
# does something else than the rest ends soon, with a message that says which rank, step and operation, and leaves no
# process behind. Linux and OpenMPI; skipped without.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

ranks=${BUILD:-build}/test/ranks_comm
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
unset OMPI_COMM_WORLD_SIZE PMI_SIZE SLURM_STEP_NUM_TASKS
if ! command -v mpirun >/dev/null; then
    skip "ranks under mpirun" "mpirun not installed"
    finish
elif [ ! -x "$ranks" ]; then
    skip "ranks under mpirun" "$ranks not there: built without MPI"
    finish
fi

many() { # many RANKS ARGUMENT...: $code, $seconds, $scratch/out, $scratch/err
    local count=$1 start=${EPOCHREALTIME/./}
    shift
    called="mpirun -np $count $ranks $*"
    timeout --kill-after=5 "${limit:-60}" mpirun --oversubscribe -np "$count" "$ranks" "$@" \
        >"$scratch/out" 2>"$scratch/err" </dev/null
    code=$?
    seconds=$(((${EPOCHREALTIME/./} - start) / 1000000))
}
# shellcheck disable=SC2317 # called by check
left_over() { # left_over MARK: processes whose command line has it, after a moment to end in
    local tries
    for tries in 1 2 3 4 5 6 7 8 9 10; do
        grep -lsaF -- "$1" /proc/[0-9]*/cmdline >"$scratch/left" || return 1
        sleep 0.1
    done
    echo "        after $tries tries: $(cat "$scratch/left")"
}
# shellcheck disable=SC2317
each_says() { # each_says REGEX RANK...: each of these ranks has a line that matches
    local rank
    for rank in "${@:2}"; do grep -qE "^(error: )?rank $rank on [^ ]+: $1" "$scratch/err" || return 1; done
}

counts="1 2 3 4 5 7"
[ "$long" = 1 ] && counts="1 2 3 4 5 6 7 8 13" limit=600
for count in $counts; do
    many "$count" check
    check "collectives on $count ranks" exits 0
    check "collectives on $count ranks: all cases" says out "7 passed, 0 failed"
done
limit=60
many 2 large
check "shares of several messages" exits 0
check "shares of several messages: all" says out "1 passed, 0 failed"

# fault KIND MESSAGE: rank 2 of 4 has it; the three others say where they wait for it
fault() {
    local mark=${scratch##*/}.$1
    many 4 "$1" "$mark"
    check "$1: the job fails" differ "$code" 0
    check "$1: by itself" not exits 124
    check "$1: within hang_timeout_s and a few seconds ($seconds s)" holds "$seconds <= 10"
    check "$1: says why" matches err "$2"
    check "$1: no process is left" not left_over "$mark"
}
waits='step [34], reduce_scatter: (no answer from|told to stop while waiting for) rank ([0-9], )?2' # a rank that was stopped may go on for a moment before it is ended
for kind in exit kill stop die thread many; do
    case $kind in
    die | thread) reason='^error: rank 2 on [^ ]+: planted: disk full' ;;
    many) reason='^error: rank 2 on [^ ]+: all_reduce_max: 64 collectives in flight already' ;;
    stop) reason='^error: rank [013] on [^ ]+: step 3, reduce_scatter: no answer from rank 2 for 1.5 s' ;;
    *) reason=$waits ;;
    esac
    fault $kind "$reason"
    check "$kind: each of the others says whom it waits for" each_says "$waits" 0 1 3
done
fault differ '^error: rank 2 on [^ ]+: another config than rank 0'
fault order '^error: rank 2 on [^ ]+: step 3, broadcast with rank 0: MPI says: .*truncated'

called="a rank without its launcher"
PMI_SIZE=3 timeout 20 "$ranks" check >"$scratch/out" 2>"$scratch/err" </dev/null
code=$?
check "another MPI's launcher: refused" exits 1
check "another MPI's launcher: says so" says err "one of 3 ranks, but alone"

many 3 pause
check "paused as a whole, the job goes on" exits 0
check "paused as a whole, the job goes on: it was" says out "1 passed, 0 failed"

finish
