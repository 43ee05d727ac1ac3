#!/usr/bin/env bash
# Tiny Shakespeare, 1.1 MB (public domain): the text, and llm.c's two files of GPT-2 tokens made of it.
#
#     data/tiny_shakespeare.sh
#
# Into data/tiny_shakespeare: tiny_shakespeare.txt (of karpathy/char-rnn; train on its bytes with
# `scripts/demo.sh data/tiny_shakespeare/tiny_shakespeare.txt`), tiny_shakespeare_train.bin (305,260 tokens) and
# tiny_shakespeare_val.bin (32,768), of the hub's karpathy/llmc-starter-pack. HF_ENDPOINT: a mirror of the hub.
set -euo pipefail
case ${1:-} in
-h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit 0 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=data/tiny_shakespeare
text=${GITHUB_RAW:-https://raw.githubusercontent.com}/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
hub=${HF_ENDPOINT:-https://huggingface.co}/datasets/karpathy/llmc-starter-pack/resolve/main
data/download.sh "$text" $folder/tiny_shakespeare.txt 1115394
data/download.sh "$hub/tiny_shakespeare_train.bin" $folder/tiny_shakespeare_train.bin 611544
data/download.sh "$hub/tiny_shakespeare_val.bin" $folder/tiny_shakespeare_val.bin 66560
echo "$folder: a text of 1115394 bytes; 305260 tokens to train on, 32768 for validation"
