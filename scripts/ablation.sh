#!/usr/bin/env bash
# What each ingredient of the NVFP4 recipe is worth: one change at a time against the default and against BF16.
#
#     scripts/ablation.sh              trains what is not there yet, then prints both tables (an hour on 2 cores)
#     scripts/ablation.sh --tables     only the first table, from the logs in dev/notes/ablation
#
# The model is scripts/configs/ablation.json (9 blocks, 4.1M parameters, 1.02M tokens of the King James Bible, which
# scripts/demo.sh makes): written down before the first run. One run a core, one thread each; a run's losses stay in
# dev/notes/ablation/NAME.jsonl, the rest in runs/ablation. First table: gaps of loss, paired step by step (train_gpt
# compare). Second: gradients of one step of a trained checkpoint against FP32 (dev/ablation/one_step.c).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_WAIT_POLICY=passive
config=scripts/configs/ablation.json logs=dev/notes/ablation runs=runs/ablation

nvfp4='--precision nvfp4'
RUNS=( # name | options
    "bf16_1|--precision bf16 --seed 1"
    "nvfp4_1|$nvfp4 --seed 1"
    "bf16_2|--precision bf16 --seed 2"
    "nvfp4_2|$nvfp4 --seed 2"
    "bf16_3|--precision bf16 --seed 3"
    "nvfp4_3|$nvfp4 --seed 3"
    "bf16_moved|--precision bf16 --embedding_init_std 0.50005"
    "bf16_fp32_masters|--precision bf16 --master fp32"
    "fp32_masters|$nvfp4 --master fp32"
    "no_rht|$nvfp4 --rht off"
    "nearest|$nvfp4 --stochastic_rounding off"
    "stochastic_all|$nvfp4 --stochastic_rounding all"
    "weights_1x16|$nvfp4 --weight_blocks 1x16"
    "no_bf16_layers|$nvfp4 --bf16_last_layers 0"
    "first_layers_bf16|$nvfp4 --bf16_first_layers 2 --bf16_last_layers 0"
    "four_over_six|$nvfp4 --four_over_six both"
    "headroom|$nvfp4 --gradient_headroom 17/16"
    "pow2|$nvfp4 --tensor_scale pow2"
    "forward_bf16_last_20|$nvfp4 --switch_to_bf16_at 0.8"
)

train() { # train NAME OPTION...
    [ -s "$logs/$1.jsonl" ] && return
    local keep=0
    [ "$1" = bf16_1 ] && keep=$steps
    ./train_gpt train --config $config --train_data data/kjv/train.txt.bin --val_data data/kjv/val.txt.bin \
        --run_dir "$runs/$1" --overwrite --threads 1 --checkpoint_every "$keep" "${@:2}" >"$runs/$1.out" 2>&1 ||
        { echo "ablation: $1 failed, see $runs/$1.out" >&2 && return 1; }
    sed -nE 's/^\{"step":([0-9]+),.*"loss":([-+.0-9e]+)(,"val_loss":([-+.0-9e]+))?.*/\1 \2 \4/p' "$runs/$1/log.jsonl" |
        awk '{ printf "{\"step\":%d,\"loss\":%.5f%s}\n", $1, $2, (NF > 2 ? sprintf(",\"val_loss\":%.5f", $3) : "") }' \
            >"$logs/$1.jsonl"
    echo "ablation: $1 done"
}

gap() { # gap A B: names, or lists of them; "training loss of the last 20% of the steps | validation", bits per byte
    ./train_gpt compare "$(sed "s,[^\,]*,$scratch/&,g" <<<"$1")" "$(sed "s,[^\,]*,$scratch/&,g" <<<"$2")" --last_fraction 0.2 |
        awk '/^mean gap/ { getline; mean = sprintf("%+.4f +- %.4f", $1, $3) } /^last gap/ { getline; last = sprintf("%+.4f", $1) }
            END { print mean " | " last }'
}

row() { # row NAME AGAINST
    local file
    for file in ${1//,/ } ${2//,/ }; do [ -d "$scratch/$file" ] || return 0; done
    local numbers
    numbers=$(gap "$2" "$1")
    echo "| $1 | $2 | $numbers |"
}

print_losses() {
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    for file in "$logs"/*.jsonl; do
        name=$(basename "$file" .jsonl)
        mkdir "$scratch/$name"
        cp "$file" "$scratch/$name/log.jsonl"
        echo '{"bytes_per_token":1}' >"$scratch/$name/config.json"
    done
    printf '| run | against | training loss, last 20%% | validation, last |\n|---|---|---|---|\n'
    row nvfp4_1,nvfp4_2,nvfp4_3 bf16_1,bf16_2,bf16_3
    for seed in 1 2 3; do row nvfp4_$seed bf16_$seed; done
    row bf16_moved bf16_1
    row bf16_fp32_masters bf16_1
    for against in nvfp4_1 bf16_1; do
        for entry in "${RUNS[@]}"; do
            case ${entry%%|*} in bf16* | nvfp4*) ;; *) row "${entry%%|*}" $against ;; esac
        done
    done
}

if [ "${1:-}" = --tables ]; then
    print_losses
    exit
fi
[ $# = 0 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit 2; }
[ -f data/kjv/train.txt.bin ] || { echo "ablation: no data/kjv/train.txt.bin; run scripts/demo.sh once" >&2 && exit 1; }
make -s all build/ablation/one_step
mkdir -p $logs $runs
steps=$(sed -nE 's/.*"steps": ([0-9]+).*/\1/p' $config)

cores=$(getconf _NPROCESSORS_ONLN)
for entry in "${RUNS[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge "$cores" ]; do wait -n; done
    # shellcheck disable=SC2086 # words
    train "${entry%%|*}" ${entry#*|} &
done
while [ -n "$(jobs -rp)" ]; do wait -n; done
print_losses

printf '\n'
backward='--fprop bf16'
build/ablation/one_step "$(find $runs/bf16_1/checkpoints -maxdepth 1 -name 'step_*' | sort | tail -n 1)" \
    data/kjv/val.txt.bin 32 8 $logs/one_step.csv 'BF16|--precision bf16' "NVFP4, default|$nvfp4" "no RHT|$nvfp4 --rht off" \
    "gradients nearest|$nvfp4 --stochastic_rounding off" "stochastic on everything|$nvfp4 --stochastic_rounding all" \
    "1x16 weights|$nvfp4 --weight_blocks 1x16" "no BF16 layers|$nvfp4 --bf16_last_layers 0" \
    "first instead of last layers in BF16|$nvfp4 --bf16_first_layers 2 --bf16_last_layers 0" \
    "4/6|$nvfp4 --four_over_six both" "headroom 17/16|$nvfp4 --gradient_headroom 17/16" "pow2|$nvfp4 --tensor_scale pow2" \
    "forward in BF16|$nvfp4 $backward" "forward in BF16, no RHT|$nvfp4 $backward --rht off" \
    "forward in BF16, gradients nearest|$nvfp4 $backward --stochastic_rounding off" \
    "forward in BF16, headroom 17/16|$nvfp4 $backward --gradient_headroom 17/16" \
    "only fprop in NVFP4|$nvfp4 --dgrad bf16 --wgrad bf16" "only dgrad in NVFP4|$nvfp4 $backward --wgrad bf16" \
    "only wgrad in NVFP4|$nvfp4 $backward --dgrad bf16"
