#!/usr/bin/env bash
# The scripts around the trainer, without GPU, cluster or network: what the run scripts would start, for one GPU, several,
# several machines and Slurm, with stand-ins for nvidia-smi, mpirun, srun and the trainer; what they say when something is
# missing; that the batch they choose fits by the real `plan`. And the data scripts on a hub of files: whole, resumed,
# wrong, and without a network.
# shellcheck source=test/lib.sh disable=SC2317 # functions that are called through check
source "$(dirname "$0")/lib.sh"
unset CUDA_VISIBLE_DEVICES LAUNCH RANKS BATCH PROGRAM RUN_DIR DRY_RUN SLURM_JOB_ID SLURM_NTASKS HF_ENDPOINT
here=$PWD program=$(realpath "$program")

# ---- stand-ins: what they were called with is in $scratch/started, a line a word ----

bin=$scratch/bin
mkdir "$bin"
stand_in() { # stand_in NAME LINE...
    printf '%s\n' '#!/bin/bash' "${@:2}" >"$bin/$1"
    chmod +x "$bin/$1"
}
gpus() { # gpus COUNT MIB: what nvidia-smi finds
    if [ "$1" = 0 ]; then
        stand_in nvidia-smi 'exit 9'
    else
        stand_in nvidia-smi "for ((i = 0; i < $1; i++)); do echo $2; done"
    fi
}
stand_in train_gpt_nvfp4 "if [ \"\$1\" = plan ]; then exec '$program' \"\$@\"; fi" "printf '%s\\n' trainer \"\$@\" >'$scratch/started'"
stand_in mpirun "printf '%s\\n' mpirun \"\$@\" >'$scratch/started'"
stand_in srun "printf '%s\\n' srun \"\$@\" >'$scratch/started'"
export PATH="$bin:$PATH" PROGRAM="$bin/train_gpt_nvfp4" DATA="$scratch/tokens"
mkdir "$DATA"
touch "$DATA/a_train_000001.bin" "$DATA/a_val_000000.bin"

script() { # script PATH ARGUMENT...: $code, out, err, and what it started
    called="$*"
    rm -f "$scratch/started"
    touch "$scratch/started"
    timeout --kill-after=5 120 "$@" >"$scratch/out" 2>"$scratch/err" </dev/null
    code=$?
    started=" $(xargs -d '\n' <"$scratch/started") "
}
starts() { [[ $started == *" $1 "* ]]; }              # starts WORDS
starts_nothing() { [ ! -s "$scratch/started" ]; }
total() { awk '$1 == "total" { print $2 }' "$scratch/out"; } # of the plan that was printed
word_after() { sed -nE "s/.* $1 ([^ ]+) .*/\1/p" <<<"$started"; }

# ---- one machine ----

for run in gpt2_124m gpt2_1558m; do
    gpus 1 81559
    script scripts/run_$run.sh
    check "$run on one GPU: exit code" exits 0
    check "$run on one GPU: no mpirun" starts "trainer train --config scripts/configs/$run.json"
    check "$run on one GPU: the data" starts "--train_data $DATA/*_train_*.bin --val_data $DATA/*_val_*.bin"
    check "$run on one GPU: goes on where it was" starts "--run_dir runs/$run --resume auto"
    check "$run on one GPU: prints the plan" matches out '^memory by purpose'
    check "$run on one GPU: prints the command" says out "$PROGRAM train --config scripts/configs/$run.json"
    check "$run on one GPU: fits 80 GB by plan" holds "$(total) <= 0.9 * 81559 * 1048576"
    check "$run on one GPU: nothing shared" not starts "--zero_stage 1"

    gpus 8 81559
    script scripts/run_$run.sh
    check "$run on 8 GPUs: all of them" starts "mpirun --oversubscribe --bind-to none -np 8 $PROGRAM train"
    check "$run on 8 GPUs: ZeRO stage 1" starts "--zero_stage 1"
    script scripts/run_$run.sh -np 2
    check "$run with -np 2" starts "-np 2 $PROGRAM train"
    check "$run with -np 2: planned for two" matches out 'all 2 ranks at zero_stage 1'
done

# The largest batch that fits: twice as many sequences would not, or are more than 64.
for memory in 8192 16384 24576 81559 183359; do
    gpus 1 $memory
    script scripts/run_gpt2_1558m.sh
    if [ "$code" != 0 ]; then
        check "1558M on $memory MiB: why it does not fit" matches err "one sequence a GPU takes [0-9]+ MiB, a GPU here has $memory"
        continue
    fi
    batch=$(word_after --batch)
    check "1558M on $memory MiB: batch $batch fits" holds "$(total) <= 0.9 * $memory * 1048576"
    gpt plan --config scripts/configs/gpt2_1558m.json --batch $((2 * batch))
    check "1558M on $memory MiB: batch $((2 * batch)) would not" holds "$batch == 64 || $(total) > 0.9 * $memory * 1048576"
done
gpus 8 81559
script scripts/run_llama3_8b.sh
check "llama3_8b on eight of 80 GB: exit code" exits 0
check "llama3_8b on eight of 80 GB: shares all, in NVFP4 or as auto says" starts "--recompute operands --checkpoint_async --zero_stage 3"
check "llama3_8b on eight of 80 GB: fits by plan" holds "$(total) <= 0.9 * 81559 * 1048576"
gpus 1 81559
script scripts/run_llama3_8b.sh
check "llama3_8b on one GPU: refused" exits 1
check "llama3_8b on one GPU: why" says err 'more GPUs with --zero_stage 3'
check "llama3_8b on one GPU: nothing started" starts_nothing

# What the user gives wins, and reaches the plan.
gpus 8 81559
script scripts/run_gpt2_124m.sh -np 4 --precision nvfp4 --lr 1e-3 --recompute=block --tune_gemm
check "options are passed on" starts "--precision nvfp4 --lr 1e-3 --recompute=block --tune_gemm"
check "options reach the plan" matches out '^precision +nvfp4 in blocks'
fitted=$(total)
script scripts/run_gpt2_124m.sh -np 4 --precision nvfp4
check "options reach the plan: recompute takes less" holds "$fitted < $(total)"
BATCH=4 script scripts/run_gpt2_124m.sh
check "BATCH: is taken" starts "--batch 4"
script scripts/run_gpt2_124m.sh --batch 2
check "--batch: is taken, once" same "$(grep -c -- --batch "$scratch/started")" 1
check "--batch: is planned" matches out 'micro-batches of 2 x 1024$'
RUN_DIR=$scratch/elsewhere script scripts/run_gpt2_124m.sh
check "RUN_DIR" starts "--run_dir $scratch/elsewhere"
DRY_RUN=1 script scripts/run_gpt2_124m.sh
check "DRY_RUN: exit code" exits 0
check "DRY_RUN: prints the command" says out 'scripts/run_local.sh -np 8'
check "DRY_RUN: nothing started" starts_nothing
CUDA_VISIBLE_DEVICES=2,5 script scripts/run_gpt2_124m.sh
check "CUDA_VISIBLE_DEVICES: two of eight" starts "-np 2 $PROGRAM"
gpus 1 '[N/A]'
script scripts/run_gpt2_124m.sh
check "a GPU without a known size: the config's batch" not starts --batch
check "a GPU without a known size: exit code" exits 0

# ---- what is missing ----

gpus 0
DATA=$scratch/nowhere PROGRAM=$scratch/train_gpt_nvfp4 script scripts/run_gpt2_124m.sh
check "nothing there: exit code" exits 1
check "nothing there: no GPU" says err 'gpt2_124m: no GPU: nvidia-smi finds none'
check "nothing there: not built" says err "gpt2_124m: $scratch/train_gpt_nvfp4 is not built: make train_gpt_nvfp4"
check "nothing there: no data" says err "gpt2_124m: no token files $scratch/nowhere/*_train_*.bin and *_val_*.bin: data/fineweb_edu.sh 10B"
check "nothing there: nothing started" starts_nothing
PROGRAM=$program DRY_RUN=1 script scripts/run_gpt2_124m.sh
check "on the CPU: one process" says out "$program train --config"
check "on the CPU: exit code" exits 0
gpus 3 81559
script scripts/run_gpt2_124m.sh
check "three GPUs: what plan says" says err 'is not a multiple of batch x seq_len x ranks = 3072'
script scripts/run_gpt2_124m.sh -np 4
check "more than there are" says err '-np 4, but 3 GPUs are here'
script scripts/run_gpt2_124m.sh -np x
check "-np x" says err '-np x: give a number'
script scripts/run_gpt2_124m.sh -np 2 --precison bf16
check "a wrong option is the trainer's to refuse" starts '--precison bf16'
for run in gpt2_124m gpt2_1558m llama3_8b; do
    script scripts/run_$run.sh --help
    check "run_$run.sh --help" matches out "^ +scripts/run_$run.sh \[-np N\]"
done

# ---- several machines ----

gpus 8 183359
LAUNCH='mpirun -np 16 --hostfile hosts --bind-to none' RANKS=16 script scripts/run_gpt2_124m.sh --seed 3
check "LAUNCH: the command" starts "mpirun -np 16 --hostfile hosts --bind-to none $PROGRAM train --config scripts/configs/gpt2_124m.json"
check "LAUNCH: planned for all" matches out 'all 16 ranks at zero_stage 1'
check "LAUNCH: a batch that all can share" starts "--batch 32 --seed 3"
script scripts/run_slurm.sbatch gpt2_124m
check "Slurm, not in a job" says err 'run_slurm: not a Slurm job: sbatch'
script scripts/run_slurm.sbatch --help
check "Slurm --help" matches out 'sbatch .*scripts/run_slurm.sbatch gpt2_124m\|'
export SLURM_JOB_ID=7 SLURM_NTASKS=16 SLURM_SUBMIT_DIR=$here
cp scripts/run_slurm.sbatch "$scratch/slurm_script" # as Slurm does
cd / && script "$scratch/slurm_script" gpt2_1558m --seed 4
cd "$here" || exit 1
check "Slurm: exit code" exits 0
check "Slurm: srun" starts "srun --mpi=pmix --kill-on-bad-exit=1 $PROGRAM train --config scripts/configs/gpt2_1558m.json"
check "Slurm: goes on where it was" starts "--resume auto"
check "Slurm: options passed on" starts "--seed 4"
LAUNCH='mpirun --bind-to none' script scripts/run_slurm.sbatch gpt2_124m
check "Slurm: with mpirun" starts "mpirun --bind-to none $PROGRAM train"
script scripts/run_slurm.sbatch gpt5
check "Slurm: no such run" says err 'no scripts/run_gpt5.sh'
unset SLURM_JOB_ID SLURM_NTASKS SLURM_SUBMIT_DIR

# ---- data ----

if ! command -v curl >/dev/null; then
    skip "the data scripts" "no curl"
    finish
fi
hub=$scratch/hub/datasets/kjj0/finewebedu10B-gpt2/resolve/main
mkdir -p "$hub"
for name in val_000000 train_000001 train_000002 train_000003; do token_file "$hub/finewebedu_$name.bin" 30000 ${#name}; done
export DIR=$scratch/loaded HF_ENDPOINT=file://$scratch/hub

script data/fineweb_edu.sh 10B 2
check "fineweb_edu: exit code" exits 0
check "fineweb_edu: three files, nothing else" same "$(cd "$DIR" && echo *)" 'finewebedu_train_000001.bin finewebedu_train_000002.bin finewebedu_val_000000.bin'
check "fineweb_edu: whole" cmp "$DIR/finewebedu_train_000002.bin" "$hub/finewebedu_train_000002.bin"
script data/fineweb_edu.sh 10B 2
check "fineweb_edu again: silent" silent err
rm "$DIR"/*
head -c 20000 "$hub/finewebedu_train_000001.bin" >"$DIR/finewebedu_train_000001.bin.part"
cp "$hub/finewebedu_train_000002.bin" "$DIR/finewebedu_train_000002.bin.part"
{ cat "$hub/finewebedu_train_000003.bin" && echo more; } >"$DIR/finewebedu_train_000003.bin.part"
script data/fineweb_edu.sh 10B 3
check "fineweb_edu, half, whole and too long: exit code" exits 0
for i in 1 2 3; do check "fineweb_edu: shard $i" cmp "$DIR/finewebedu_train_00000$i.bin" "$hub/finewebedu_train_00000$i.bin"; done
check "fineweb_edu: no part is left" same "$(cd "$DIR" && echo *.part)" '*.part'

rm "$DIR"/*
head -c 20000 "$hub/finewebedu_train_000002.bin" >"$scratch/short" && mv "$scratch/short" "$hub/finewebedu_train_000002.bin"
script data/fineweb_edu.sh 10B 3
check "fineweb_edu, a shard cut off: exit code" exits 1
check "fineweb_edu, a shard cut off: which" says err 'finewebedu_train_000002.bin.part: 20000 bytes'
check "fineweb_edu, a shard cut off: how many are there" says err '2 of 3 shards are in'
check "fineweb_edu, a shard cut off: not under its name" not test -e "$DIR/finewebedu_train_000002.bin"

rm -r "$DIR"
HF_ENDPOINT=http://127.0.0.1:9 script data/fineweb_edu.sh
check "no network: exit code" exits 1
check "no network: one message" same "$(grep -c '^download: cannot reach http://127.0.0.1:9/' "$scratch/err")" 1
check "no network: no train shard was tried" not says err train_000001
check "no network: no file" not compgen -G "$DIR/*"
HF_ENDPOINT=file://$scratch/hub script data/fineweb_edu.sh 100B 1
check "not there: exit code" exits 1
script data/fineweb_edu.sh 1B
check "fineweb_edu 1B" says err '1B: 10B or 100B'
script data/fineweb_edu.sh 10B 100
check "fineweb_edu 10B 100" says err '100: from 1 to 99 shards'
for name in fineweb_edu tiny_shakespeare hellaswag kjv; do
    script data/$name.sh --help
    check "$name.sh --help: exit code" exits 0
    check "$name.sh --help" says out "data/$name.sh"
done

# In a copy of the tree, for what has its place in it.
copy=$scratch/copy
mkdir -p "$copy/scripts" "$copy/data" "$scratch/hub/karpathy/char-rnn/master/data/tinyshakespeare" "$scratch/hub/datasets/karpathy/llmc-starter-pack/resolve/main"
cp data/*.sh "$copy/data" && cp scripts/setup.sh "$copy/scripts"
truncate -s 1115394 "$scratch/hub/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
starter=$scratch/hub/datasets/karpathy/llmc-starter-pack/resolve/main
sizes() { (cd "$1" && stat -c '%n %s' -- * | xargs); }
for part in train:611544 val:66560; do
    token_file "$scratch/t.bin" $(((${part#*:} - 1024) / 2 - 1)) 1
    mv "$scratch/t.bin" "$starter/tiny_shakespeare_${part%:*}.bin"
done
echo questions >"$starter/hellaswag_val.bin"
GITHUB_RAW=file://$scratch/hub script "$copy/data/tiny_shakespeare.sh"
check "tiny_shakespeare: exit code" exits 0
check "tiny_shakespeare: the files" same "$(sizes "$copy/data/tiny_shakespeare")" \
    'tiny_shakespeare.txt 1115394 tiny_shakespeare_train.bin 611544 tiny_shakespeare_val.bin 66560'
truncate -s 1000 "$scratch/hub/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
rm -r "$copy/data/tiny_shakespeare"
GITHUB_RAW=file://$scratch/hub script "$copy/data/tiny_shakespeare.sh"
check "tiny_shakespeare, too short: exit code" exits 1
check "tiny_shakespeare, too short: says so" says err '1000 bytes of'
script "$copy/data/hellaswag.sh"
check "hellaswag" cmp "$copy/data/hellaswag/hellaswag_val.bin" "$starter/hellaswag_val.bin"

stand_in bible 'echo "Gen1:1 In the beginning"; echo "Gen1:2 And the earth"'
script "$copy/data/kjv.sh"
check "kjv: exit code" exits 0
check "kjv: verses without their marks" same "$(cat "$copy/data/kjv/kjv.txt")" $'In the beginning\nAnd the earth'
check "kjv: another edition is said" says err 'not the text this was tested with'
finish
