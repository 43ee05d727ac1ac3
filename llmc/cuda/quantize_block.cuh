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

__device__ inline int64_t blocks_of(int64_t k) { return (k + 15) / 16; }

/* ---- magnitudes ---- */

/* What a thread has seen: as bits, so that integer maxima order them. */
typedef struct {
    uint32_t amax; /* of an FP32, NaN passed over */
    uint32_t nan;  /* 1: there was one */
} Seen;

/* `nan`: of a bf16x2_larger<true> chain. The sign bits of a magnitude + 0x7f are set by NaN, and only by it. */
__device__ inline void see(Seen *seen, float amax, uint32_t nan)
{
    seen->amax = f32_bits(amax) > seen->amax ? f32_bits(amax) : seen->amax;
    seen->nan |= ((nan & 0x7fff7fffu) + 0x007f007fu) & 0x80008000u ? 1 : 0;
}

/* The larger half of a bf16x2_larger chain. */
__device__ inline float larger_half(uint32_t larger)
{
    F32x2 x = both_halves(larger);
    return fmaxf(fmaxf(fabsf(x.a), fabsf(x.b)), 0.0f); /* all NaN: 0 */
}

/* ---- scales ---- */

__device__ inline float e4m3_value(uint32_t scale) /* of a positive one: as FP32 bits it is 2^-120 of itself */
{
    return f32_mul(f32_from_bits(scale << 20), 0x1p120f);
}

/* The factor on the block's values under an E4M3 scale: min(1 / (scale x decode), FLT_MAX). Tiny products are taken 2^64
 * times as large, and the result 2^64 times, so that reciprocals are of normal numbers; a scale of 0 gives FLT_MAX. */
__device__ inline float encode_factor(uint32_t scale, float decode)
{
    float up = decode < 0x1p-64f ? 0x1p64f : 1.0f;
    float product = f32_mul(f32_mul(e4m3_value(scale), decode), up);
    return fminf(f32_mul(reciprocal_normal(product), up), NVFP4_FLT_MAX);
}

/* In pow2 mode: the factor, and in *kept the 11 bits that wait. Reciprocals of what can come, up to FLT_MAX / 6, and of
 * Inf's 0x1.ep127, are those of numbers 2^64 times nearer to 1: the last product rounds nothing, or ends in FLT_MAX. */
__device__ inline float encode_factor_pow2(uint32_t *kept, float amax)
{
    uint32_t bits = f32_bits(fminf(f32_mul(amax, 1.0f / 6.0f), 0x1.ep127f));
    bits = bits + 0x7ffffu + (bits >> 20 & 1);
    *kept = bits >> 20;
    float x = f32_from_bits(bits & 0xfff00000u), toward_1 = x < 1.0f ? 0x1p64f : 0x1p-64f;
    return fminf(f32_mul(reciprocal_normal(f32_mul(x, toward_1)), toward_1), NVFP4_FLT_MAX);
}

/* The factor, from an amax with its headroom; *kept: the E4M3 byte, or in pow2 mode the 11 bits that wait. */
__device__ inline float block_encode(uint32_t *kept, float amax, const Nvfp4Scale &tensor, bool pow2)
{
    if (pow2) return encode_factor_pow2(kept, amax);
    *kept = e4m3_nearest(f32_mul(amax, tensor.multiplier)); /* Inf saturates as FLT_MAX does */
    return encode_factor(*kept, tensor.decode);
}

/* ---- codes ---- */

/* Two halves with 8 random bits each added below E2M1's: bits 9-11 are the code, bit 15 the sign. */
__device__ inline uint32_t e2m1_halves(float low, float high, uint32_t random)
{
    const uint32_t six = 0x0e000e00u; /* 6 2^-14 as a half */
    return f16x2_clamp(f16x2_cut(low, high), six) + 2 * (random & 0x00ff00ffu);
}

/* Code and sign of four halves into the low nibbles of four bytes; the high ones mean nothing. */
__device__ inline uint32_t e2m1_nibbles(uint32_t first, uint32_t second)
{
    uint32_t upper = choose_bytes(first, second, 0x7531); /* of each: sign, 3 zeros, code, 1 bit */
    return (upper >> 1 & 0x07070707u) | (upper >> 4 & ~0x07070707u);
}

/* Eight codes of x 2^14; the random bytes of elements 0..3 in `low`, of 4..7 in `high`. */
__device__ inline uint32_t e2m1x8_stochastic(const float x[8], uint32_t low, uint32_t high)
{
    uint32_t even = e2m1_nibbles(e2m1_halves(x[0], x[2], low), e2m1_halves(x[4], x[6], high));
    uint32_t odd = e2m1_nibbles(e2m1_halves(x[1], x[3], low >> 8), e2m1_halves(x[5], x[7], high >> 8));
    return (even & 0x0f0f0f0fu) | (odd << 4 & ~0x0f0f0f0fu);
}

typedef enum { QUANTIZE_NEAREST, QUANTIZE_STOCHASTIC, QUANTIZE_NATIVE, QUANTIZE_ANY } QuantizeMode;

typedef struct {                    /* where random bits come from */
    alignas(16) uint32_t key[7][2]; /* of the rounds of Philox: as an argument of the kernel they cost no instruction */
    int64_t row0;
    uint32_t step;
} RandomPlace;

inline RandomPlace random_place(uint64_t seed, uint32_t step, int64_t row0)
{
    RandomPlace place = {{}, row0, step};
    for (uint32_t round = 0; round < 7; round++) {
        place.key[round][0] = (uint32_t)seed + round * 0x9E3779B9u;
        place.key[round][1] = (uint32_t)(seed >> 32) + round * 0xBB67AE85u;
    }
    return place;
}

/* philox_draw with these keys. */
__device__ inline Philox draw_at(const uint32_t (&key)[7][2], uint32_t row, uint32_t block, uint32_t step,
                                 uint32_t place)
{
    uint32_t c0 = row, c1 = block, c2 = step, c3 = place;
#pragma unroll
    for (int round = 0; round < 7; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ key[round][0];
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ key[round][1];
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
    }
    return Philox{{c0, c1, c2, c3}};
}

/* Codes of y, which with QUANTIZE_STOCHASTIC is 2^-14 of what it stands for: word 0 of elements 0..7. */
__device__ inline void encode(uint32_t (&code)[2], const float (&y)[16], QuantizeMode mode, const uint32_t (&key)[7][2],
                              uint32_t step, uint32_t row, uint32_t block, uint32_t place)
{
    if (mode == QUANTIZE_NEAREST) {
        code[0] = e2m1x8_nearest(y);
        code[1] = e2m1x8_nearest(y + 8);
        return;
    }
    Philox draw = draw_at(key, row, block, step, place);
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

__device__ inline void rht16(F32x2 (&x)[16], const uint32_t (&word)[16])
{
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const float a = NVFP4_RHT_SIGNS >> i & 1 ? -0.25f : 0.25f, b = NVFP4_RHT_SIGNS >> (i + 1) & 1 ? -0.25f : 0.25f;
        F32x2 first = bf16x2_fma(word[i], a, F32x2{-0.0f, -0.0f}); /* the product, its zeros too */
        x[i] = bf16x2_fma(word[i + 1], b, first);
        x[i + 1] = bf16x2_fma(word[i + 1], -b, first);
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

/* Words, transformed and rounded. */
__device__ inline void rht16_rounded(uint32_t (&word)[16])
{
    F32x2 x[16];
    rht16(x, word);
#pragma unroll
    for (int i = 0; i < 16; i++) word[i] = bf16x2(x[i].a, x[i].b);
}

#endif
