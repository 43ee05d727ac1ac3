#!/usr/bin/env bash
# The verb export from the command line: a trained checkpoint of every architecture becomes a folder; what is refused says
# why, with which exit code, and leaves nothing. What is in the folders: test_export.c.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

token_file "$scratch/train.bin" 4000 1
for arch in gpt2 llama qwen3; do
    gpt --arch $arch --precision bf16 --layers 1 --hidden 32 --heads 2 --seq_len 32 --batch 2 --steps 2 --threads 1 \
        --train_data "$scratch/train.bin" --checkpoint_every 2 --run_dir "$scratch/$arch"
    check "$arch: trains" exits 0
    checkpoint=$(step_dir "$scratch/$arch" 2)
    before=$(tree_sum "$checkpoint")
    gpt export --checkpoint "$checkpoint" --output "$scratch/hf_$arch"
    check "$arch: exit code" exits 0
    check "$arch: names the folder" same "$(cat "$scratch/out")" "$scratch/hf_$arch"
    check "$arch: the files" same "$(cd "$scratch/hf_$arch" && echo *)" "config.json generation_config.json model.safetensors"
    check "$arch: the architecture" grep -q "\"model_type\":.*\"$arch\"" "$scratch/hf_$arch/config.json"
    check "$arch: the checkpoint is as it was" same "$(tree_sum "$checkpoint")" "$before"
    first=$(tree_sum "$scratch/hf_$arch")
    gpt export --checkpoint "$checkpoint" --output "$scratch/again" --format bf16 --threads 2
    check "$arch: the same bytes again" same "$(tree_sum "$scratch/again")" "$first"
    rm -rf "$scratch/again"
done

# A run in NVFP4: the packed folder decodes to what fprop reads at the saved step, and a BF16 layer is not packed.
for options in '' '--weight_blocks 1x16 --tensor_scale pow2' '--stochastic_rounding all'; do
    # shellcheck disable=SC2086 # words
    gpt --arch llama --precision nvfp4 --layers 2 --hidden 32 --heads 2 --seq_len 32 --batch 2 --steps 3 --threads 1 --seed 6 \
        --train_data "$scratch/train.bin" --checkpoint_every 3 --run_dir "$scratch/nvfp4" --overwrite $options
    check "nvfp4 $options: trains" exits 0
    checkpoint=$(step_dir "$scratch/nvfp4" 3)
    rm -rf "$scratch/packed" "$scratch/plain"
    gpt export --checkpoint "$checkpoint" --output "$scratch/plain"
    gpt export --checkpoint "$checkpoint" --output "$scratch/packed" --format nvfp4
    check "nvfp4 $options: exports" exits 0
    if ! command -v python3 >/dev/null; then
        skip "nvfp4 $options: the packed folder" "no python3"
        continue
    fi
    form=(--blocks 16x16 --step 3 --seed 6)
    [[ $options = *1x16* ]] && form=(--blocks 1x16 --tensor_scale pow2 --step 3 --seed 6)
    [[ $options = *all* ]] && form+=(--rounding stochastic)
    called="read_export.py of nvfp4 $options"
    python3 dev/reference/read_export.py "$scratch/packed" --weights "$scratch/plain" "${form[@]}" >"$scratch/out" 2>&1
    code=$?
    check "nvfp4 $options: the packed folder" exits 0
    check "nvfp4 $options: 7 modules of block 0" matches out '^7 packed modules, [0-9]+ checks, 0 failed$'
done

refused() { # refused CODE TEXT ARGUMENT...: the folder "new" must not appear
    gpt export "${@:3}"
    check "refused: $2: exit code" exits "$1"
    check "refused: $2" says err "$2"
    check "refused: $2: nothing left" same "$(find "$scratch" -maxdepth 1 -name 'new*')" ""
}
checkpoint=$(step_dir "$scratch/llama" 2)
refused 1 "no layer's forward product reads its weight in NVFP4; use --format bf16" --checkpoint "$checkpoint" \
    --output "$scratch/new" --format nvfp4
refused 1 "gpt2 in nvfp4" --checkpoint "$(step_dir "$scratch/gpt2" 2)" --output "$scratch/new" --format nvfp4
refused 1 "hf_llama is not empty" --checkpoint "$checkpoint" --output "$scratch/hf_llama"
refused 1 "train.bin: Not a directory" --checkpoint "$checkpoint" --output "$scratch/train.bin"
refused 1 "no/where.tmp: cannot create the folder" --checkpoint "$checkpoint" --output "$scratch/no/where"
refused 1 "no/checkpoint" --checkpoint no/checkpoint --output "$scratch/new"
refused 2 "export needs --output" --checkpoint "$checkpoint"
refused 2 "allowed are bf16|nvfp4" --checkpoint "$checkpoint" --output "$scratch/new" --format fp8
printf 'x' | dd of="$checkpoint/model.safetensors" bs=1 seek=4000 conv=notrunc 2>/dev/null
refused 1 "is damaged" --checkpoint "$checkpoint" --output "$scratch/new"
finish
