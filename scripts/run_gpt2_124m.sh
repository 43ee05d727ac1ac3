#!/usr/bin/env bash
# GPT-2 124M on 10B tokens of FineWeb-Edu, with the recipe that llm.c published: 18,865 steps of 524,288 tokens, lr 6e-4
# after 700 steps of warm-up, cosine to 0 (95 minutes there, on eight A100). OpenAI's GPT-2 of this size answers 29.55% of HellaSwag.
#
#     scripts/run_gpt2_124m.sh [-np N] [OPTION of train ...]
#
# On all GPUs of this machine, or N. Prints plan and command first; the same command goes on from the newest checkpoint.
# With one GPU or eight the steps are the same: only the micro-batches of a step are shared out. Trains in BF16, which is
# what precision auto says of so small a model; in 4 bits with --precision nvfp4. In the environment:
#   DATA=data/fineweb_edu10B      folder of *_train_*.bin and *_val_*.bin, made by data/fineweb_edu.sh 10B
#   RUN_DIR=runs/gpt2_124m        log and checkpoints
#   BATCH=...                     sequences of a GPU and micro-step; else the largest of 64, 32 ... that fits by plan
#   PROGRAM=./train_gpt_nvfp4     ./train_gpt: on the CPU
#   LAUNCH=..., RANKS=...         several machines: LAUNCH="mpirun -np 16 --hostfile HOSTS --bind-to none" RANKS=16
#   DRY_RUN=1                     only prints
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/run_lib.sh
run_name=gpt2_124m run_data=data/fineweb_edu10B run_get_data="data/fineweb_edu.sh 10B loads them (20 GB)"
run_options=() run_shared=(--zero_stage 1)
run_main "$@"
