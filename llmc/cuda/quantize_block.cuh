/* One block of 16 values in a thread's registers: its magnitude, its scale, its codes, the random Hadamard transform.
 * The bits are those of nvfp4.h (the law), reached by other ways:
 *
 *   stochastic rounding   y 2^-14 as a half, cut: 3 bits of it are the code below (E2M1 has the exponents of a half from
 *                         2^-14 on, denormals too), 9 bits the place between two neighbours. 8 random bits are added to the
 *                         upper 8 of those, and a carry is the step away from zero: floor(256 f) + r >= 256.
 *   transform             the law multiplies by +-1/4, exactly, then adds: the products are made within the first stage's
 *                         multiply-adds.
 *   scales that wait      with pow2 tensor scales a block scale has 4 significant bits: 11 bits of an FP32 (8 of
 *                         exponent, 3 of mantissa), kept until the tensor's scale is known.
 *
 * Values are in pairs: BF16 in the halves of a word, FP32 as F32x2. Floor 2.
 */
#ifndef LLMC_CUDA_QUANTIZE_BLOCK_CUH
#define LLMC_CUDA_QUANTIZE_BLOCK_CUH

#include "../philox.h"
#include "rows.cuh"

/* ---- words of two BF16 ---- */

__device__ inline F32x2 both_halves(uint32_t word)
{
    return F32x2{f32_from_bits(word << 16), f32_from_bits(word & 0xffff0000u)};
}

/* What a thread has seen: as bits, so that integer maxima order them. */
typedef struct {
    uint32_t amax; /* of an FP32, NaN passed over */
    uint32_t nan;  /* 1: there was one */
} Seen;

/* The sign bits of a magnitude + 0x7f are set by NaN, and only by it. */
__device__ inline uint32_t nan_halves(uint32_t word) { return (word & 0x7fff7fffu) + 0x007f007fu; }

__device__ inline void see(Seen *seen, float amax, uint32_t nan)
{
    seen->amax = f32_bits(amax) > seen->amax ? f32_bits(amax) : seen->amax;
    seen->nan |= nan & 0x80008000u ? 1 : 0;
}

/* The larger half of a bf16x2_larger chain. */
__device__ inline float larger_half(uint32_t larger)
{
    F32x2 x = both_halves(larger & 0x7fff7fffu);
    return fmaxf(fmaxf(x.a, x.b), 0.0f); /* all NaN: 0 */
}

/* ---- scales ---- */

__device__ inline float e4m3_value(uint32_t scale) /* of a positive one: as FP32 bits it is 2^-120 of itself */
{
    return f32_mul(f32_from_bits(scale << 20), 0x1p120f);
}

/* The factor on the block's values. *kept: the E4M3 byte, or in pow2 mode the 11 bits that wait. */
__device__ inline float block_encode(uint32_t *kept, float amax, const Nvfp4Scale &tensor, float headroom, bool pow2)
{
    float value;
    amax = f32_mul(amax, headroom);
    if (pow2) {
        uint32_t bits = f32_bits(fminf(f32_mul(amax, 1.0f / 6.0f), 0x1.ep127f));
        bits = bits + 0x7ffffu + (bits >> 20 & 1);
        *kept = bits >> 20;
        value = f32_from_bits(bits & 0xfff00000u);
    } else {
        *kept = e4m3_nearest(f32_mul(amax, tensor.multiplier)); /* Inf saturates as FLT_MAX does */
        value = f32_mul(e4m3_value(*kept), tensor.decode);
    }
    return fminf(reciprocal(value), NVFP4_FLT_MAX);
}

/* ---- codes ---- */

/* Eight codes of x 2^14; the random bytes of elements 0..3 in `low`, of 4..7 in `high`. Halves j and j + 4 share a word. */
__device__ inline uint32_t e2m1x8_stochastic(const float x[8], uint32_t low, uint32_t high)
{
    const uint32_t six = 0x0e000e00u; /* 6 2^-14 as a half */
    uint32_t r01 = choose_bytes(low, high, 0x5410), r23 = choose_bytes(low, high, 0x7632), t[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t random = (j < 2 ? r01 : r23) >> 8 * (j % 2) & 0x00ff00ffu;
        t[j] = f16x2_clamp(f16x2_cut(x[j], x[j + 4]), six) + 2 * random;
    }
    return (t[0] >> 9 & 0x00070007u) | (t[1] >> 5 & 0x00700070u) | (t[2] >> 1 & 0x07000700u) |
           (t[3] << 3 & 0x70007000u) | (t[0] >> 12 & 0x00080008u) | (t[1] >> 8 & 0x00800080u) |
           (t[2] >> 4 & 0x08000800u) | (t[3] & 0x80008000u);
}

typedef enum { QUANTIZE_NEAREST, QUANTIZE_STOCHASTIC, QUANTIZE_NATIVE, QUANTIZE_ANY } QuantizeMode;

typedef struct { /* where random bits come from */
    uint64_t seed;
    int64_t row0;
    uint32_t step;
} RandomPlace;

/* Codes of y, which with QUANTIZE_STOCHASTIC is 2^-14 of what it stands for: word 0 of elements 0..7. */
__device__ inline void encode(uint32_t (&code)[2], const float (&y)[16], QuantizeMode mode, uint64_t seed,
                              uint32_t step, uint32_t row, uint32_t block, uint32_t place)
{
    if (mode == QUANTIZE_NEAREST) {
        code[0] = e2m1x8_nearest(y);
        code[1] = e2m1x8_nearest(y + 8);
        return;
    }
    Philox draw = philox_draw(seed, row, block, step, place >> 16, place >> 8 & 0xff, 0);
    if (mode == QUANTIZE_NATIVE) {
        code[0] = e2m1x8_native(y, draw.word[0], draw.word[1]);
        code[1] = e2m1x8_native(y + 8, draw.word[2], draw.word[3]);
    } else {
        code[0] = e2m1x8_stochastic(y, draw.word[0], draw.word[1]);
        code[1] = e2m1x8_stochastic(y + 8, draw.word[2], draw.word[3]);
    }
}

/* 4/6: codes under one scale; returns the sum of their errors, from element 0 to 15. */
__device__ inline float try_4_6(uint32_t (&code)[2], const float (&x)[16], uint32_t scale, const Nvfp4Scale &tensor,
                                FourOverSix kind)
{
    float factor = nvfp4_encode_block((uint8_t)scale, tensor.decode), sum = 0;
    code[0] = code[1] = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        uint32_t c = e2m1_nearest_by_sums(f32_mul(x[i], factor));
        code[i / 8] |= c << 4 * (i % 8);
        sum = f32_add(sum, nvfp4_error_4_6(x[i], (uint8_t)c, (uint8_t)scale, &tensor, kind));
    }
    return sum;
}

/* ---- the transform, of two blocks side by side ---- */

__device__ inline void rht16(F32x2 (&x)[16])
{
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const float a = NVFP4_RHT_SIGNS >> i & 1 ? -0.25f : 0.25f, b = NVFP4_RHT_SIGNS >> (i + 1) & 1 ? -0.25f : 0.25f;
        F32x2 first = f32x2_mul(x[i], F32x2{a, a});
        x[i] = f32x2_fma(x[i + 1], F32x2{b, b}, first);
        x[i + 1] = f32x2_fma(x[i + 1], F32x2{-b, -b}, first);
    }
#pragma unroll
    for (int stage = 1; stage < 4; stage++)
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int stride = 1 << stage;
            if (i & stride) continue;
            F32x2 sum = f32x2_add(x[i], x[i + stride]);
            x[i + stride] = f32x2_fma(x[i + stride], F32x2{-1.0f, -1.0f}, x[i]);
            x[i] = sum;
        }
}

/* The words of x, transformed and rounded. */
__device__ inline void rht16_rounded(uint32_t (&word)[16], F32x2 (&x)[16])
{
    rht16(x);
#pragma unroll
    for (int i = 0; i < 16; i++) word[i] = bf16x2(x[i].a, x[i].b);
}

#endif
