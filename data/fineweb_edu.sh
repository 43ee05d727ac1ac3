#!/usr/bin/env bash
# FineWeb-Edu as GPT-2 tokens, ready-made in llm.c's .bin format, from the Hugging Face hub (licence: ODC-By).
#
#     data/fineweb_edu.sh [10B|100B] [SHARDS]
#
#   10B    kjj0/finewebedu10B-gpt2, into data/fineweb_edu10B: a validation shard and 99 to train on, 9.85e9 tokens, 20 GB
#   100B   karpathy/fineweb-edu-100B-gpt2-token-shards, into data/fineweb_edu100B: 1 and 1001 shards, 200 GB
#   SHARDS only so many of those to train on, from the first; each is 1e8 tokens, 200 MB
#
# Run it again after an interruption: what is there stays, a half-loaded shard goes on. In the environment:
#   JOBS=4                                 files at a time
#   DIR=DATA/FOLDER                        elsewhere
#   HF_ENDPOINT=https://huggingface.co     a mirror of the hub
set -euo pipefail
stop() { echo "fineweb_edu: $*" >&2 && exit 1; }
case ${1:-10B} in
-h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit 0 ;;
10B) dataset=kjj0/finewebedu10B-gpt2 prefix=finewebedu all=99 ;;
100B) dataset=karpathy/fineweb-edu-100B-gpt2-token-shards prefix=edu_fineweb all=1001 ;;
*) stop "$1: 10B or 100B (--help)" ;;
esac
shards=${2:-$all}
if ! [[ $shards =~ ^[1-9][0-9]*$ ]] || [ "$shards" -gt "$all" ]; then stop "$shards: from 1 to $all shards"; fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${DIR:-data/fineweb_edu${1:-10B}}
url=${HF_ENDPOINT:-https://huggingface.co}/datasets/$dataset/resolve/main

# The validation shard first, alone: without a network that is one message and not a hundred.
data/download.sh "$url/${prefix}_val_000000.bin" "$folder/${prefix}_val_000000.bin" || exit 1
for ((i = 1; i <= shards; i++)); do
    printf '%s/%s_train_%06d.bin\0%s/%s_train_%06d.bin\0' "$url" "$prefix" "$i" "$folder" "$prefix" "$i"
done | xargs -0 -n 2 -P "${JOBS:-4}" data/download.sh || true

there=0
for ((i = 1; i <= shards; i++)); do
    if [ -e "$(printf '%s/%s_train_%06d.bin' "$folder" "$prefix" "$i")" ]; then there=$((there + 1)); fi
done
[ "$there" -eq "$shards" ] || stop "$there of $shards shards are in $folder; run it again to go on"
echo "$folder: $shards shards to train on and one for validation"
