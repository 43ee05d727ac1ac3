#!/usr/bin/env bash
# A tiny model of each architecture learns 2 kB of text by heart: mean loss over all of it below 0.05 nats, and greedy
# generation recites it. Random 9-word sentences of 28 words leave nothing to guess at, so only memory gets there:
# every parameter must be trained, by the right gradient. LLMC_TEST_ALL=1: in FP32 and with FP32 masters too.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
token_file "$scratch/text.bin" 2048 1
start=127 prompt=40 recited=80 # byte 127 is the first of the second window: byte 0 is token 1

overfit() { # overfit ARCH ARGUMENT...
    local run=$scratch/run name="$*" loss
    rm -rf "$run"
    gpt --arch "$@" --layers 2 --hidden 64 --heads 4 --seq_len 128 --batch 4 --steps 220 --lr 8e-3 --warmup_steps 20 \
        --final_lr_fraction 0.02 --weight_decay 0 --init_std 0.08 --embedding_init_std 0.5 --checkpoint_every 220 \
        --train_data "$scratch/text.bin" --run_dir "$run"
    check "$name: trains" exits 0
    gpt eval --checkpoint "$(step_dir "$run" 220)" --data "$scratch/text.bin"
    loss=$(sed -n 's/^loss \([0-9.]*\) nats.*/\1/p' "$scratch/out")
    echo "measured $name: loss ${loss:-unknown} nats over 2048 tokens after 220 steps (bound 0.05)"
    check "$name: loss ${loss:-unknown} is below 0.05" holds "${loss:-1} < 0.05"
    gpt generate --checkpoint "$(step_dir "$run" 220)" --prompt "$(tail -c +$((start + 1)) "$scratch/text.bin.txt" | head -c $prompt)" \
        --tokens $recited --temperature 0
    check "$name: recites $recited bytes" same "$(cat "$scratch/out")" \
        "$(tail -c +$((start + 1)) "$scratch/text.bin.txt" | head -c $((prompt + recited)))"
}

for arch in gpt2 llama qwen3; do
    overfit $arch
    if [ "$long" = 1 ]; then
        overfit $arch --precision fp32
        overfit $arch --master fp32
    fi
done
if [ "$long" = 1 ]; then
    overfit llama --kv_heads 2 --tie_embeddings false
    overfit qwen3 --kv_heads 1 --head_dim 32
fi
finish
