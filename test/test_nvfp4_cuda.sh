#!/usr/bin/env bash
# numerics.h and nvfp4.h as device code: every function that is for the device compiles without a warning for sm_80 and
# sm_100a, and its PTX holds what the host computes. That is: no fused multiply-add (one rounding instead of two), no
# float operation that the assembler may still fuse (in PTX one without .rn), no approximate division, no flush of
# denormals. The search is itself tried on code that does have these. Skipped where nvcc is not installed, and sm_100a where
# nvcc is older than that; no GPU needed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
command -v "$nvcc" >/dev/null || { echo "skipped nvfp4 on CUDA: nvcc is not installed" && echo "0 passed, 0 failed, 1 skipped" && exit 0; }

out=$(mktemp -d) || exit 1
trap 'rm -rf "$out"' EXIT
passed=0 failed=0 skipped=0
ok() { passed=$((passed + 1)); }
bad() { # bad NAME [FILE]: its first lines say why
    failed=$((failed + 1))
    echo "FAILED  $1"
    [ $# -lt 2 ] || head -n 8 "$2" | sed 's/^/        /'
}

cat >"$out/kernel.cu" <<'CUDA'
#include "nvfp4.h"

struct Out {
    uint8_t code[16], scale[4];
    uint16_t bf16[16];
    float value[16], factor[8];
    size_t offset[2];
};

__global__ void quantize(Out *out, const float *x, const float *amax, Nvfp4Form form, Nvfp4Form other)
{
    Nvfp4Scale tensor = nvfp4_scale(*amax, false, &form);
    Philox draw = philox_draw(1, blockIdx.x, threadIdx.x, 2, 3, ROLE_OPERAND, 0);
    float block_amax = 0, encode, error = 0, row[16];
    for (int i = 0; i < 16; i++) block_amax = f32_max(f32_abs(x[i]), block_amax);
    out->scale[0] = nvfp4_block_scale(block_amax, &tensor, &form, &encode);
    nvfp4_scales_4_6(block_amax, &tensor, &out->scale[1], &out->scale[2]);
    for (int i = 0; i < 16; i++) {
        float y = f32_mul(x[i], encode);
        out->code[i] = form.rounding == ROUND_STOCHASTIC ? e2m1_from_f32_stochastic(y, nvfp4_random8(&draw, i))
                                                         : e2m1_from_f32(y);
        error = f32_add(error, nvfp4_error_4_6(x[i], out->code[i], out->scale[1], &tensor, form.four_over_six));
        out->value[i] = f32_mul(e2m1_to_f32(out->code[i]), nvfp4_decode_scale(out->scale[0], tensor.stored, &form));
        out->bf16[i] = bf16_from_f32_stochastic(x[i], draw.word[0] & 0xffff);
        row[i] = bf16_to_f32(bf16_from_f32(x[i]));
    }
    nvfp4_rht16(row);
    for (int i = 0; i < 16; i++) out->value[i] = f32_sub(out->value[i], f32_min(row[i], 1.0f));
    out->factor[0] = error;
    out->factor[1] = nvfp4_encode_block(out->scale[2], tensor.decode);
    out->factor[2] = nvfp4_alpha(tensor.stored, &form, *amax, &other);
    out->factor[3] = nvfp4_pow2_encode(f32_div(*amax, nvfp4_bound(&other)));
    out->factor[4] = e4m3_to_f32(e4m3_from_f32(*amax));
    out->factor[5] = f32_from_bits(f32_bits(*amax) ^ 1);
    out->offset[0] = nvfp4_tile_offset(blockIdx.x, threadIdx.x, 7);
    out->offset[1] = nvfp4_tile_bytes(blockIdx.x, threadIdx.x);
}
CUDA

while read -r name; do
    if grep -q "\b$name(" "$out/kernel.cu"; then ok; else bad "the kernel of this test does not call $name"; fi
done < <(sed -nE 's/^LLMC_INLINE [^(]*[ *]([a-z0-9_]+)\(.*/\1/p' llmc/numerics.h llmc/nvfp4.h)

flags=(-std=c++17 -Werror all-warnings -Illmc)
archs=(sm_80)
if [[ $'\n'$("$nvcc" --list-gpu-code)$'\n' == *$'\nsm_100\n'* ]]; then
    archs+=(sm_100a)
else
    skipped=2
    echo "skipped nvfp4 on sm_100a: this nvcc does not know it"
fi
for arch in "${archs[@]}"; do
    if "$nvcc" "${flags[@]}" -arch="$arch" -cubin "$out/kernel.cu" -o "$out/kernel.cubin" >"$out/log" 2>&1; then ok; else bad "$arch: does not compile" "$out/log"; fi
done

# Lines of PTX that compute something else than the host.
inexact() { grep -nE '\bfma\.|\bmad\.[a-z.]*f32|\b(add|sub|mul)\.(ftz\.|sat\.)*f32|\bdiv\.(full|approx)|\.approx|\.ftz' "$1"; }
ptx() { "$nvcc" "${flags[@]}" -arch="$1" --ptx "$2" -o "$out/ptx" >"$out/log" 2>&1; }

for arch in "${archs[@]}"; do
    if ! ptx "$arch" "$out/kernel.cu"; then
        bad "$arch: no PTX" "$out/log"
    elif inexact "$out/ptx" >"$out/log"; then
        bad "$arch: PTX that is not what the host computes" "$out/log"
    elif ! grep -q 'div\.rn\.f32' "$out/ptx" || ! grep -q 'mul\.rn\.f32' "$out/ptx"; then
        bad "$arch: PTX without the quantizer"
    else
        ok
    fi
done

for planted in 'a * b + c' 'a * b' 'a - b' '__fdividef(a, b)' '__frcp_rn(a) + b' '__fmaf_rn(a, b, c)' '__expf(a)'; do
    echo "__global__ void f(float *x, float a, float b, float c) { *x = $planted; }" >"$out/planted.cu"
    if ptx sm_80 "$out/planted.cu" && inexact "$out/ptx" >/dev/null; then ok; else bad "the search does not find $planted" "$out/log"; fi
done

sum="$passed passed, $failed failed"
[ "$skipped" -gt 0 ] && sum="$sum, $skipped skipped"
echo "$sum"
[ "$failed" -eq 0 ]
