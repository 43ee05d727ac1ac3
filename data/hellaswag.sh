#!/usr/bin/env bash
# HellaSwag's 10,042 validation questions as GPT-2 tokens, for `train_gpt eval --hellaswag`: llm.c's file, 3.6 MB.
#
#     data/hellaswag.sh
#
# Into data/hellaswag/hellaswag_val.bin, of the hub's karpathy/llmc-starter-pack (HellaSwag: Zellers et al. 2019, MIT).
# For another tokenizer make it with dev/reference/make_hellaswag.py. HF_ENDPOINT: a mirror of the hub.
set -euo pipefail
case ${1:-} in
-h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit 0 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
hub=${HF_ENDPOINT:-https://huggingface.co}/datasets/karpathy/llmc-starter-pack/resolve/main
data/download.sh "$hub/hellaswag_val.bin" data/hellaswag/hellaswag_val.bin
echo "data/hellaswag/hellaswag_val.bin"
