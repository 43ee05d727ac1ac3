#!/usr/bin/env bash
# GPT-2 1558M on 32B tokens of FineWeb-Edu, with the recipe that llm.c published: 32,000 steps of 1,048,576 tokens, lr 6e-4
# after 700 steps of warm-up, cosine to a tenth. There: 24 hours on eight H100. OpenAI's GPT-2 of this size answers 48.93% of HellaSwag.
#
#     scripts/run_gpt2_1558m.sh [-np N] [OPTION of train ...]
#
# On all GPUs of this machine, or N. Prints plan and command first; the same command goes on from the newest checkpoint.
# Width 1600 is below what precision auto trains in 4 bits: BF16, or --precision nvfp4. In the environment:
#   DATA=data/fineweb_edu100B     folder of *_train_*.bin and *_val_*.bin, made by data/fineweb_edu.sh 100B 336
#   RUN_DIR=runs/gpt2_1558m       log and checkpoints
#   BATCH=...                     sequences of a GPU and micro-step; else the largest of 64, 32 ... that fits by plan
#   PROGRAM=./train_gpt_nvfp4     ./train_gpt: on the CPU
#   LAUNCH=..., RANKS=...         several machines: LAUNCH="mpirun -np 16 --hostfile HOSTS --bind-to none" RANKS=16
#   DRY_RUN=1                     only prints
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/run_lib.sh
run_name=gpt2_1558m run_data=data/fineweb_edu100B run_get_data="data/fineweb_edu.sh 100B 336 loads them (67 GB)"
run_options=() run_shared=(--zero_stage 1)
run_main "$@"
