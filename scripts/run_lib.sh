# shellcheck shell=bash disable=SC2154 # what the run scripts set
# What the run scripts share: sourced by them, at the root of the repository. A run script sets what its run is, then
# calls run_main "$@":
#
#     run_name      gpt2_124m: of the script, the config and the run's folder
#     run_data      the folder of its token files, *_train_*.bin and *_val_*.bin (DATA in the environment wins)
#     run_get_data  how to get them, for the message when they are not there
#     run_options   an array: options of train beside those of the config
#     run_shared    an array: those for more than one GPU
#
# run_main looks for what is missing and names all of it, chooses the batch, prints plan and command, and starts it.
run_stop() { echo "$run_name: $*" >&2 && exit 1; }

# The GPUs that a program would see, one line of MiB each; none where nvidia-smi finds none.
run_gpus() {
    local all
    all=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null) || return 0
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then # as many as are named there; all of a machine are of one kind
        all=$(head -n "$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)" <<<"$all")
    fi
    grep . <<<"$all" || true
}

# What is missing, a line each, with what to do about it.
run_missing() {
    if [[ $run_program == *nvfp4 ]] && [ -z "$run_found" ]; then
        echo "no GPU: nvidia-smi finds none. PROGRAM=./train_gpt trains on the CPU, slowly"
    fi
    if [ ! -x "$run_program" ]; then
        echo "$run_program is not built: make $(basename "$run_program")"
    fi
    if ! compgen -G "$run_data/*_train_*.bin" >/dev/null || ! compgen -G "$run_data/*_val_*.bin" >/dev/null; then
        echo "no token files $run_data/*_train_*.bin and *_val_*.bin: $run_get_data, or DATA=FOLDER"
    fi
    local launcher=${LAUNCH:-mpirun}
    if [ "$run_ranks" -gt 1 ] && ! command -v "${launcher%% *}" >/dev/null; then
        echo "no ${launcher%% *} to start $run_ranks processes: apt-get install libopenmpi-dev openmpi-bin, and build again; or -np 1"
    fi
}

# Of options of train those that plan has too: batch, precision, recompute, ...
run_plan_options() {
    local keys
    keys=$("$run_program" plan --help | sed -nE 's/^  --([a-z0-9_]+) .*/\1/p')
    run_for_plan=(--ranks "$run_ranks")
    while [ $# -gt 0 ]; do
        local words=("$1") key=${1#--}
        if [[ $1 != *=* && $# -gt 1 && $2 != --* ]]; then words+=("$2") && shift; fi
        shift
        if grep -qx "${key%%=*}" <<<"$keys"; then run_for_plan+=("${words[@]}"); fi
    done
}

# One rank's memory in bytes by `plan`, the screen in $run_screen; fails with plan's message there.
run_plan() { # run_plan BATCH
    local batch=()
    [ -z "$1" ] || batch=(--batch "$1")
    run_screen=$("$run_program" plan --config "$run_config" "${batch[@]}" "${run_for_plan[@]}" 2>&1) || return 1
    run_bytes=$(awk '$1 == "total" { print $2 }' <<<"$run_screen")
}

# Sets run_batch: BATCH, or the largest that fits into the smallest GPU, 10% left for CUDA, NCCL and cuBLAS. 64 sequences
# of 1024 tokens keep any GPU busy; more would only change the micro-batches. Without a known size: that of the config.
run_choose_batch() {
    local room=$((${run_memory:-0} * 1048576 * 9 / 10))
    run_batch=${BATCH:-}
    case " ${run_given[*]} " in *" --batch"[\ =]*) run_batch='' room=0 ;; esac
    if [ -z "$run_batch" ] && [ "$room" -gt 0 ]; then
        for run_batch in 64 32 16 8 4 2 1; do
            if run_plan "$run_batch" && [ "$run_bytes" -le "$room" ]; then return; fi
        done
        if run_plan 1; then
            run_stop "one sequence a GPU takes $((run_bytes >> 20)) MiB, a GPU here has $run_memory (90% of it is used): more GPUs with" \
                "--zero_stage 3, or --recompute block"
        fi
    fi
    run_plan "$run_batch" || run_stop "plan says: $run_screen"
}

run_main() {
    run_config=scripts/configs/$run_name.json run_ranks=${RANKS:-}
    case ${1:-} in
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit 0 ;;
    -np)
        [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || run_stop "-np ${2:-}: give a number of GPUs"
        run_ranks=$2
        shift 2
        ;;
    esac
    run_data=${DATA:-$run_data} run_program=${PROGRAM:-./train_gpt_nvfp4}
    case $run_program in */*) ;; *) run_program=./$run_program ;; esac
    local missing launch command
    run_found='' run_memory=''
    if [[ $run_program == *nvfp4 ]]; then
        run_found=$(run_gpus)
        run_memory=$(sort -n <<<"$run_found" | head -n 1 | grep -xE '[0-9]+' || true)
        run_ranks=${run_ranks:-$(grep -c . <<<"$run_found" || true)}
    fi
    if [ "${run_ranks:-0}" = 0 ]; then run_ranks=1; fi
    if [ -n "$run_found" ] && [ -z "${LAUNCH:-}" ] && [ "$run_ranks" -gt "$(wc -l <<<"$run_found")" ]; then
        run_stop "-np $run_ranks, but $(wc -l <<<"$run_found") GPUs are here; of several machines: LAUNCH= and RANKS=, see --help"
    fi

    missing=$(run_missing)
    if [ -n "$missing" ]; then
        echo "$run_name: ${missing//$'\n'/$'\n'$run_name: }" >&2
        if [ "${DRY_RUN:-0}" != 1 ] || [ ! -x "$run_program" ]; then exit 1; fi
    fi
    if [ "$run_ranks" -gt 1 ]; then run_options+=("${run_shared[@]}"); fi
    run_given=("$@")
    run_plan_options "${run_options[@]}" "$@"
    run_choose_batch

    command=("$run_program" train --config "$run_config" --train_data "$run_data/*_train_*.bin" --val_data "$run_data/*_val_*.bin"
        --run_dir "${RUN_DIR:-runs/$run_name}" --resume auto "${run_options[@]}")
    if [ -n "$run_batch" ]; then command+=(--batch "$run_batch"); fi
    command+=("$@")
    if [ -n "${LAUNCH:-}" ]; then
        read -ra launch <<<"$LAUNCH"
        command=("${launch[@]}" "${command[@]}")
    elif [ "$run_ranks" -gt 1 ]; then
        command=(scripts/run_local.sh -np "$run_ranks" "${command[@]}")
    fi
    printf '%s\n\n' "$run_screen"
    echo "$run_name on $run_ranks process(es), each with the memory above${run_memory:+ of $run_memory MiB}:"
    printf '\n   '
    printf ' %q' "${command[@]}"
    printf '\n\n'
    if [ "${DRY_RUN:-0}" = 1 ]; then exit 0; fi
    exec "${command[@]}"
}
