#!/usr/bin/env bash
# The verb quantize: its bytes against a second quantizer, in Python, dev/reference/nvfp4.py, over inputs of every kind and
# every option; a worked example by hand; safetensors in F32 and BF16; what is refused, and that nothing is left then.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
OUT=$scratch/q

quantize() { gpt quantize --output "$OUT" "$@"; } # quantize ARGUMENT...
hex() { od -An -tx1 -v "$1" | tr -d ' \n'; }       # hex FILE
floats() { # floats 0000803f ...: bytes as given
    local word
    for word; do
        for (( ; ${#word} > 0; )); do printf '%b' "\\x${word:0:2}" && word=${word:2}; done
    done
}
outputs() { find "$scratch" -maxdepth 1 -name 'q.*' -printf '%f\n' | sort | tr '\n' ' '; }
# shellcheck disable=SC2317 # called by check
empty() { [ -z "$1" ]; } # empty TEXT

# ---- by hand: the example at the head of nvfp4.h. A tensor of amax 2; a block with amax 0.5 has scale 112 = 0x6e and
# factor 12: 0.5 -> 6 (code 7), 0.3 -> 3.6 -> 4 (code 6), -0.3 (code e)
zero=00000000
{
    floats 00000040 && for _ in {1..15}; do floats $zero; done
    floats 0000003f 9a99993e 9a9999be && for _ in {1..13}; do floats $zero; done
} >"$scratch/hand.f32"
quantize --input "$scratch/hand.f32" --rows 2 --cols 16
check "by hand: exit code" exits 0
check "by hand: four files" same "$(outputs)" 'q.codes q.json q.packed q.scales '
check "by hand: codes" same "$(hex "$OUT.codes")" 07000000000000000000000000000000"07060e00000000000000000000000000"
check "by hand: packed" same "$(hex "$OUT.packed")" 0700000000000000"670e000000000000"
check "by hand: scales" same "$(hex "$OUT.scales")" 7e6e
check "by hand: says nothing else" silent err
check "by hand: encode scale 1344" grep -q '"encode_scale_bits":.*"0x44a80000"' "$OUT.json"
check "by hand: prints the SNR" matches out '^SNR +[0-9.]+ dB$'
check "by hand: prints scales" matches out '^256 .. 448 +50.000%  \(1 of 2\)$'
quantize --input "$scratch/hand.f32" --rows 2 --cols 16 --transpose on --blocks 16x16
check "by hand, transposed: one scale a row" same "$(hex "$OUT.scales")" "$(printf '7e%.0s' {1..16})"

# ---- against the reference: kind, rows, cols, options
CASES='
normal    20  50
normal    33  16  --blocks 16x16
normal    20  50  --rounding stochastic --seed 12345678901 --row0 7
normal    40  33  --rounding stochastic --blocks 16x16 --row0 2147483600
normal    17  48  --rht on
normal    48  18  --rht on --transpose on --blocks 16x16 --rounding stochastic
normal    19  35  --four_over_six mae
normal    35  19  --four_over_six mse --blocks 16x16
normal    19  35  --tensor_scale pow2
normal    35  19  --tensor_scale pow2 --blocks 16x16 --rounding stochastic --seed 9007199254740992
wide      21  40  --rht off --transpose on
wide      32  32  --four_over_six mse
wide      32  32  --tensor_scale pow2 --rht on
rare      20  64
rare      20  64  --tensor_scale pow2
rare      20  64  --tensor_scale pow2 --blocks 16x16 --rounding stochastic
rare      20  64  --four_over_six mse
ties      16  64
ties      16  64  --four_over_six mae --blocks 16x16
zeros      3   5
zeros      3   5  --tensor_scale pow2
tiny      10  32
tiny      10  32  --blocks 16x16 --tensor_scale pow2
tiny      10  32  --four_over_six mae
special   18  34  --rounding stochastic
special   18  34  --tensor_scale pow2 --blocks 16x16
special   16  32  --rht on --transpose on
special   18  34  --four_over_six mse
infinite   9  20
infinite   9  20  --four_over_six mae --blocks 16x16
nan        9  20  --blocks 16x16
nan        9  20  --rounding stochastic --tensor_scale pow2
normal     1   1
normal     1   1  --transpose on --blocks 16x16 --rounding stochastic'
if command -v python3 >/dev/null; then
    reference=(python3 dev/reference/nvfp4.py) made=
    while read -r kind rows cols options; do
        [ -n "$kind" ] || continue
        input=(--input "$scratch/x.f32" --rows "$rows" --cols "$cols")
        if [ "$kind $rows $cols" != "$made" ]; then
            "${reference[@]}" --make "$kind" --rows "$rows" --cols "$cols" --seed 3 --output "$scratch/x.f32"
            made="$kind $rows $cols"
        fi
        # shellcheck disable=SC2086 # words
        quantize "${input[@]}" $options
        check "$kind $rows x $cols $options: exit code" exits 0
        # shellcheck disable=SC2086 # words
        check "$kind $rows x $cols $options: as the reference" "${reference[@]}" "${input[@]}" $options --compare "$OUT"
    done <<<"$CASES"
    # The comparison can fail.
    "${reference[@]}" --make normal --rows 20 --cols 50 --output "$scratch/x.f32"
    quantize --input "$scratch/x.f32" --rows 20 --cols 50 --rounding stochastic --seed 2
    check "another seed differs" grep -q '^codes: ' <("${reference[@]}" --input "$scratch/x.f32" --rows 20 --cols 50 \
        --rounding stochastic --compare "$OUT")
else
    skip "bytes against dev/reference/nvfp4.py" "no python3"
fi

# ---- safetensors: the same values as F32, as BF16 and raw give the same bytes
tensors() { # tensors FILE DTYPE SHAPE DATA-FILE: one tensor "w", data not aligned
    local header bytes
    bytes=$(wc -c <"$4")
    header="{\"first\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"w\":{\"dtype\":\"$2\",\"shape\":[$3],\"data_offsets\":[1,$((1 + bytes))]}}"
    { printf "\\x$(printf '%02x' $((${#header} % 256)))\\x$(printf '%02x' $((${#header} / 256)))\\0\\0\\0\\0\\0\\0%sA" "$header" && cat "$4"; } >"$1"
}
digest() { cat "$OUT.codes" "$OUT.packed" "$OUT.scales" "$OUT.json" | sha256sum; }
one=0000803f two=00000040
for _ in {1..12}; do floats $one $two; done >"$scratch/x.f32"
for _ in {1..12}; do floats 803f 0040; done >"$scratch/x.bf16"
quantize --input "$scratch/x.f32" --rows 4 --cols 6
raw=$(digest)
tensors "$scratch/f32.safetensors" F32 4,6 "$scratch/x.f32"
tensors "$scratch/bf16.safetensors" BF16 4,6 "$scratch/x.bf16"
for dtype in f32 bf16; do
    quantize --input "$scratch/$dtype.safetensors" --tensor w
    check "$dtype.safetensors: exit code" exits 0
    check "$dtype.safetensors: as raw" same "$(digest)" "$raw"
done
tensors "$scratch/vector.safetensors" F32 24 "$scratch/x.f32"
quantize --input "$scratch/vector.safetensors" --tensor w
vector=$(digest)
quantize --input "$scratch/x.f32" --rows 1 --cols 24
check "a vector is one row" same "$(digest)" "$vector"

# ---- refused, with nothing left behind
rm -f "$OUT".*
refused() { # refused CODE TEXT ARGUMENT...
    quantize "${@:3}"
    check "refused: $2: exit code" exits "$1"
    check "refused: $2" says err "$2"
    check "refused: $2: one line" same "$(wc -l <"$scratch/err")" 1
    check "refused: $2: nothing left" empty "$(outputs)"
}
x=(--input "$scratch/x.f32")
refused 2 "needs --rows and --cols" "${x[@]}" --rows 4
refused 2 "--tensor is for a .safetensors file" "${x[@]}" --rows 4 --cols 6 --tensor w
refused 2 "quantize needs --tensor" --input a.safetensors
refused 2 "a .safetensors file knows its shapes" --input a.safetensors --tensor w --rows 4
refused 2 "use --rounding nearest" "${x[@]}" --rows 4 --cols 6 --four_over_six mae --rounding stochastic
refused 2 "--tensor_scale amax only" "${x[@]}" --rows 4 --cols 6 --four_over_six mse --tensor_scale pow2
refused 1 "holds 96 bytes, not 4 x --rows 5 x --cols 6" "${x[@]}" --rows 5 --cols 6
refused 1 "holds 96 bytes, not 4 x" "${x[@]}" --rows 1099511627776 --cols 1099511627776
refused 1 "groups of 16, here 6" "${x[@]}" --rows 4 --cols 6 --rht on
refused 1 "here 4 after --transpose" "${x[@]}" --rows 4 --cols 6 --rht on --transpose on
refused 1 "no/where" --input no/where --rows 4 --cols 6
refused 1 "not a regular file" --input "$scratch" --rows 4 --cols 6
refused 1 'has no tensor "x"; it has first, w (2 in all)' --input "$scratch/f32.safetensors" --tensor x
refused 1 "tensor first is U8; only F32 and BF16" --input "$scratch/f32.safetensors" --tensor first
tensors "$scratch/cube.safetensors" F32 2,3,4 "$scratch/x.f32"
refused 1 "tensor w has 3 dimensions" --input "$scratch/cube.safetensors" --tensor w
tensors "$scratch/empty.safetensors" F32 0,6 /dev/null
refused 1 "tensor w is empty" --input "$scratch/empty.safetensors" --tensor w
head -c 60 "$scratch/f32.safetensors" >"$scratch/cut.safetensors"
refused 1 "cut.safetensors" --input "$scratch/cut.safetensors" --tensor w
refused 1 "No such file" "${x[@]}" --rows 4 --cols 6 --output "$scratch/no/where"
mkdir "$scratch/q.json"
quantize "${x[@]}" --rows 4 --cols 6
check "a folder in the way: exit code" exits 1
check "a folder in the way: nothing else left" same "$(outputs)" 'q.json '
rmdir "$scratch/q.json"
head -c 65536 /dev/zero >"$scratch/big.f32"
called="quantize with no file beyond 8 KB"
(trap '' XFSZ && ulimit -f 8 && "$program" quantize --input "$scratch/big.f32" --rows 128 --cols 128 --output "$OUT") \
    >"$scratch/out" 2>"$scratch/err"
code=$?
check "a full disk: exit code" exits 1
check "a full disk is named" says err "free some space"
check "a full disk: nothing left" empty "$(outputs)"
finish
