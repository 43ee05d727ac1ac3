#!/usr/bin/env bash
# The CUDA program on many ranks, each with a device of its own, on a CPU (train_gpt_nvfp4_cpu over the double of NCCL): any
# number of ranks at any ZeRO stage gives the log (losses, norms, data and state hashes) of one rank, also when streams run
# in a shuffled order and through checkpoints of other numbers of ranks; bytes on the wire as planned; a rank that is killed
# or stops ends the job with a message. LLMC_TEST_ALL=1 runs the whole grid. Skipped without MPI, nccl.h or the CUDA headers.
# shellcheck source=test/lib.sh disable=SC2317 # functions that only `check` calls
source "$(dirname "$0")/lib.sh"

cuda=${TRAIN_GPT_CUDA:-./train_gpt_nvfp4_cpu} unit=${BUILD:-build}/cuda_on_cpu/ranks_comm
if [ ! -x "$cuda" ] || [ ! -x "$unit" ] || ! command -v mpirun >/dev/null; then
    skip "the CUDA program on many ranks" "no $cuda, $unit or mpirun: built without the CUDA headers, nccl.h or MPI"
    finish
fi
unset OMPI_COMM_WORLD_SIZE PMI_SIZE SLURM_STEP_NUM_TASKS
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1

many() { # many RANKS PROGRAM ARGUMENT...: like gpt
    called="run_local.sh -np $*"
    timeout --kill-after=5 "${limit:-120}" scripts/run_local.sh -np "$@" >"$scratch/out" 2>"$scratch/err" </dev/null
    code=$?
}

# ---- every collective by itself

counts=4
[ "$long" = 1 ] && counts="2 3 4 5 7"
for n in $counts; do
    many "$n" "$unit" check
    check "collectives on $n ranks" says out "7 passed, 0 failed"
done
for seed in $([ "$long" = 1 ] && echo 1 2 3 4) 5; do
    CUDA_ON_CPU_STREAMS=shuffle:$seed many 3 "$unit" check
    check "collectives, streams shuffled by $seed" says out "7 passed, 0 failed"
done

# ---- whole runs

declare -A MODEL=(
    [gpt2]='--arch gpt2 --hidden 40 --heads 5 --ffn 72'
    [llama]='--arch llama --hidden 48 --heads 6 --kv_heads 2 --tie_embeddings false'
    [qwen3]='--arch qwen3 --hidden 32 --heads 4 --kv_heads 2 --head_dim 16'
)
declare -A RECIPE=( # else BF16
    [nvfp4]='--precision nvfp4'
    [parts]='--precision nvfp4 --weight_blocks 1x16 --bf16_last_layers 0 --four_over_six weights --master fp32'
    [pow2]='--precision nvfp4 --weight_blocks 1x16 --tensor_scale pow2 --stochastic_rounding all --switch_to_bf16_at 0.5'
    [forward]='--precision nvfp4 --dgrad bf16 --master fp32'
    [backward]='--precision nvfp4 --fprop bf16 --tensor_scale pow2'
)
documents "$scratch/train.bin" 40 110
documents "$scratch/val.bin" 3 90
model() { echo "${MODEL[${1%:*}]} --precision bf16 ${RECIPE[${1#*:}]:-}"; } # model ARCH[:RECIPE]
options() { # options ARCH[:RECIPE]: 12 micro-batches of 16 tokens a step, for 1, 2, 3 and 4 ranks
    echo "$(model "$1") --layers 3 --seq_len 16 --batch 1 --global_batch_tokens 192 --steps 3 --lr 4e-3
        --warmup_steps 1 --hash_every 1 --train_data $scratch/train.bin --val_data $scratch/val.bin --val_every 3 --val_batches 2
        --checkpoint_every 2 --keep_checkpoints 0 --threads 1"
}
ranks() { # ranks NUMBER RUN ARCH ARGUMENT...
    # shellcheck disable=SC2046 # words
    many "$1" "$cuda" $(options "$3") --run_dir "$2" "${@:4}"
}
on_one() { # on_one RUN ARCH ARGUMENT...: one rank, without a launcher
    # shellcheck disable=SC2046 # words
    program=$cuda gpt $(options "$2") --run_dir "$1" "${@:3}"
}
reference() { # reference ARCH
    [ -d "$scratch/ref_$1" ] && return
    on_one "$scratch/ref_$1" "$1"
    check "$1: one rank trains" exits 0
}
same_tensors() { cmp "$(step_dir "$1" 3)/model.safetensors" "$(step_dir "$2" 3)/model.safetensors"; } # same_tensors RUN REFERENCE
variant() { # variant RANKS STAGE ARCH STREAMS
    local run=$scratch/run name="$3, $1 ranks, stage $2, streams $4"
    reference "$3"
    CUDA_ON_CPU_STREAMS=$4 ranks "$1" "$run" "$3" --zero_stage "$2" --overwrite
    check "$name: exit code" exits 0
    check "$name: log" same_log "$run" "$scratch/ref_$3"
    check "$name: tensors" same_tensors "$run" "$scratch/ref_$3"
}
if [ "$long" = 1 ]; then
    for arch in "${!MODEL[@]}" gpt2:nvfp4 llama:nvfp4 gpt2:parts llama:parts qwen3:pow2 llama:forward llama:backward; do for n in 2 3 4; do for stage in 0 1 2 3; do
        variant $n $stage "$arch" in-order
        variant $n $stage "$arch" shuffle:$((10 * n + stage))
    done; done; done
else
    variant 2 0 llama:nvfp4 in-order
    variant 2 1 gpt2:parts in-order
    variant 2 2 llama in-order
    variant 2 3 llama:parts shuffle:2
    variant 4 0 llama shuffle:4
    variant 4 1 llama shuffle:1
    variant 4 2 qwen3:pow2 in-order
    variant 4 3 llama:nvfp4 shuffle:6
    variant 3 3 llama:forward shuffle:5
    variant 3 1 llama:backward in-order
fi

# ---- fast order: near, not equal; bytes on the wire as planned

reference llama
for stage in $([ "$long" = 1 ] && echo 1 2) 0 3:llama:parts 3; do
    arch=${stage#*:} stage=${stage%%:*}
    [ "$arch" = "$stage" ] && arch=llama
    for ordered in true false; do
        [ "$long$stage$ordered" = 00true ] && continue
        name="$arch, 3 ranks, stage $stage, deterministic $ordered"
        run=$scratch/wire
        ranks 3 "$run" "$arch" --zero_stage "$stage" --overwrite --deterministic_reduction $ordered --straggler_every 3 --val_every 0 \
            --checkpoint_every 0
        check "$name: exit code" exits 0
        check "$name: the slowest rank" matches out '^slowest of 3 ranks in the last 3 steps: rank [0-2], [0-9.]+% more work'
        sent=$(field "$(log_line "$run" 3)" wire_bytes)
        loss=$(field "$(log_line "$run" 3)" loss) expected=$(field "$(log_line "$scratch/ref_$arch" 3)" loss)
        check "$name: loss near that of one rank" holds "($loss - $expected)^2 < 1e-6"
        # shellcheck disable=SC2046 # words
        program=$cuda gpt plan $(model "$arch") --layers 3 --seq_len 16 --batch 1 --global_batch_tokens 192 --ranks 3 \
            --zero_stage "$stage" --deterministic_reduction $ordered
        check "$name: bytes on the wire as planned" says out "on the wire, per step   $sent bytes"
    done
done

# ---- through checkpoints: from 4 ranks to 1, to 3; and from the CPU's program and back

run=$scratch/resharded
cut() { rm -r "$(step_dir "$run" 3)"; } # as if the job had ended after step 2
ranks 4 "$run" llama --zero_stage 3
cut
on_one "$run" llama --resume auto
check "resharded 4 to 1: log" same_log "$run" "$scratch/ref_llama"
cut
ranks 3 "$run" llama --zero_stage 1 --resume auto
check "resharded 1 to 3: log" same_log "$run" "$scratch/ref_llama"
check "resharded: tensors" same_tensors "$run" "$scratch/ref_llama"
cut
# shellcheck disable=SC2046 # words
many 2 "$program" $(options llama) --run_dir "$run" --zero_stage 2 --resume auto
check "the CPU's program goes on" exits 0
cut
ranks 2 "$run" llama --zero_stage 2 --resume auto
check "and CUDA's after it" exits 0
check "and CUDA's after it: log" same_log "$run" "$scratch/ref_llama"

# ---- a rank that dies or stops

trainers() { pgrep -f -- "--run_dir $run" | while read -r pid; do [ "$(basename "$(readlink "/proc/$pid/exe")")" = "$(basename "$cuda")" ] && echo "$pid"; done; }
hurt() { # hurt SIGNAL RUN STREAMS
    local signal=$1 victim started name="SIG$1, streams $3"
    run=$2
    true >"$scratch/out" # or the last job's steps are counted
    # shellcheck disable=SC2046 # words
    CUDA_ON_CPU_STREAMS=$3 timeout --kill-after=5 60 scripts/run_local.sh -np 3 "$cuda" $(options llama) --steps 100000 --val_every 0 \
        --run_dir "$run" --zero_stage 2 --hang_timeout_s 3 >"$scratch/out" 2>"$scratch/err" </dev/null &
    child=$!
    for _ in {1..200}; do [ "$(grep -c '^step ' "$scratch/out")" -ge 3 ] && break; sleep 0.1; done
    sleep "0.$((RANDOM % 90 + 10))"
    victim=$(trainers | sed -n 2p)
    kill -"$signal" "$victim"
    started=$SECONDS
    wait $child
    code=$?
    child=
    called="a rank gets SIG$signal after its third step"
    check "$name: the job fails" not exits 0
    check "$name: within 10 s" holds "$((SECONDS - started)) <= 10"
    kill -KILL "$victim" 2>/dev/null
    check "$name: no orphan" same "$(pgrep -cf -- "--run_dir $run")" 0
    [ "$signal" = KILL ] && check "$name: the launcher says so" says err "exited on signal 9"
    matches err '^rank [0-2] on .*: step [0-9]+, [a-z_]+: told to stop while' && told=$((told + 1)) # if it is quick enough
    [ "$signal" = STOP ] && check "$name: a message names rank, step and operation" matches err \
        '^error: rank [0-2] on .*: step [0-9]+, [a-z_]+: no (end|answer) .*for 3 s \(hang_timeout_s\)'
}
RANDOM=11 told=0
for ((i = 0; i < (long == 1 ? 5 : 1); i++)); do
    hurt KILL "$scratch/killed_$i" in-order
    hurt STOP "$scratch/stopped_$i" shuffle:$i
done
if [ "$long" = 1 ]; then
    hurt KILL "$scratch/killed" shuffle:9
    check "SIGKILL: survivors say what they wait for" holds "$told >= 1"
    hurt STOP "$scratch/stopped" in-order
fi

# ---- what is refused

CUDA_ON_CPU_DEVICES=2 ranks 3 "$scratch/no" llama
check "3 ranks, 2 GPUs: exit code" exits 1
check "3 ranks, 2 GPUs: says so" matches err '^error: rank [0-2] on .*: 3 ranks on this machine, but 2 GPUs here'
check "3 ranks, 2 GPUs: no run folder" not test -e "$scratch/no"
finish
