#!/usr/bin/env bash
# The architecture of Llama 3 8B, context 8192, in NVFP4: 40,000 steps of 4,194,304 tokens (168B), lr 3e-4, cosine to a tenth.
# Weights, gradients and optimizer state of one sequence take 137 GiB: one GPU of 180 GB, or ZeRO stage 3 on eight of 80 GB.
#
#     scripts/run_llama3_8b.sh [-np N] [OPTION of train ...]
#
# On all GPUs of this machine, or N. Prints plan and command first; the same command goes on from the newest checkpoint.
# Precision auto: NVFP4 where the GPU multiplies FP4 (Blackwell), else BF16. In the environment:
#   DATA=data/llama3              folder of *_train_*.bin and *_val_*.bin in Llama 3's vocabulary (llm.c's version 7), of your
#                                 own making: its tokenizer may not be passed on. llm.c: dev/data/fineweb.py -m llama-3
#   RUN_DIR=runs/llama3_8b        log and checkpoints
#   BATCH=...                     sequences of a GPU and micro-step; else the largest power of two that fits by plan
#   PROGRAM=./train_gpt_nvfp4     ./train_gpt: on the CPU
#   LAUNCH=..., RANKS=...         several machines: LAUNCH="mpirun -np 16 --hostfile HOSTS --bind-to none" RANKS=16
#   DRY_RUN=1                     only prints
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/run_lib.sh
run_name=llama3_8b run_data=data/llama3 run_get_data="make them with llm.c's dev/data/fineweb.py -t edu -m llama-3"
run_options=(--recompute operands --checkpoint_async) run_shared=(--zero_stage 3)
run_main "$@"
