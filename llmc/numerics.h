/* Number formats as bits: BF16, E4M3, E2M1. Inline, host and device, exhaustively tested (test_numerics.c).
 *
 *     FP32   s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm
 *     BF16   s eeeeeeee mmmmmmm                   the upper half of an FP32
 *     E4M3   s eeee mmm       0, 2^-9 .. 448; no infinity; 0x7F and 0xFF are NaN (OCP 8-bit floating point, 2023)
 *     E2M1   s ee m           0, .5, 1, 1.5, 2, 3, 4, 6; neither infinity nor NaN (OCP microscaling formats, 2023)
 *
 * Rounding is to nearest, ties to even, denormals kept (x86's VCVTNEPS2BF16 flushes them: not used). In BF16 NaN stays
 * NaN (quiet); E4M3 saturates at 448; E2M1 saturates at 6 and turns NaN into +6, as PTX's cvt.satfinite does. Stochastic
 * rounding adds random bits below the kept ones and cuts: P(up) is the fraction, in BF16 exactly (16 bits of it are all
 * there are), in E2M1 cut to a multiple of 1/256.
 *
 * Device code must not contract a * b + c into one rounding, so arithmetic on device is spelled with f32_mul and its
 * like, all of it: test_nvfp4_cuda.sh finds a plain operator. Floor 0.
 */
#ifndef LLMC_NUMERICS_H
#define LLMC_NUMERICS_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define LLMC_INLINE __host__ __device__ static inline
#else
#define LLMC_INLINE static inline
#endif

LLMC_INLINE uint32_t f32_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

LLMC_INLINE float f32_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- one IEEE operation each ---- */

#ifdef __CUDA_ARCH__
#define F32_OPERATION(name, operator, intrinsic)                                                                       \
    LLMC_INLINE float name(float a, float b) { return intrinsic(a, b); }
#else
#define F32_OPERATION(name, operator, intrinsic)                                                                       \
    LLMC_INLINE float name(float a, float b) { return a operator b; }
#endif
F32_OPERATION(f32_add, +, __fadd_rn)
F32_OPERATION(f32_sub, -, __fsub_rn)
F32_OPERATION(f32_mul, *, __fmul_rn)
F32_OPERATION(f32_div, /, __fdiv_rn)
LLMC_INLINE float f32_abs(float a) { return f32_from_bits(f32_bits(a) & 0x7fffffffu); }
LLMC_INLINE float f32_min(float a, float b) { return a < b ? a : b; } /* b when either is NaN */
LLMC_INLINE float f32_max(float a, float b) { return a > b ? a : b; } /* b when either is NaN */

/* ---- BF16 ---- */

LLMC_INLINE float bf16_to_f32(uint16_t b) { return f32_from_bits((uint32_t)b << 16); }

LLMC_INLINE uint16_t bf16_from_f32(float x)
{
    uint32_t bits = f32_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/* Up with probability (discarded bits) / 65536; random16 < 65536. Inf stays Inf, NaN stays NaN. */
LLMC_INLINE uint16_t bf16_from_f32_stochastic(float x, uint32_t random16)
{
    uint32_t bits = f32_bits(x);
    if ((bits & 0x7f800000u) == 0x7f800000u) return bf16_from_f32(x);
    return (uint16_t)((bits + random16) >> 16);
}

/* ---- E4M3 ---- */

LLMC_INLINE uint8_t e4m3_from_f32(float x)
{
    uint32_t bits = f32_bits(x), sign = bits >> 24 & 0x80;
    float a = f32_abs(x);
    if (a != a) return 0x7f;
    if (a >= 448.0f) return (uint8_t)(sign | 0x7e);
    if (a < 0x1p-6f) /* multiples of 2^-9: the unit of 2^23 rounds them */
        return (uint8_t)(sign | (f32_bits(f32_add(f32_mul(a, 512.0f), 0x1p23f)) & 0xf));
    bits &= 0x7fffffffu;
    bits += 0x7ffffu + (bits >> 20 & 1); /* to 3 bits of mantissa; a carry moves into the exponent */
    return (uint8_t)(sign | ((bits >> 20) - (120u << 3)));
}

LLMC_INLINE float e4m3_to_f32(uint8_t b)
{
    uint32_t sign = (uint32_t)(b & 0x80) << 24, rest = b & 0x7f;
    if (rest == 0x7f) return f32_from_bits(sign | 0x7fc00000u);
    if (rest < 8) return f32_from_bits(sign | f32_bits(f32_mul((float)rest, 0x1p-9f)));
    return f32_from_bits(sign | ((rest + (120u << 3)) << 20));
}

/* ---- E2M1: codes 0 .. 7, sign in bit 3 ---- */

LLMC_INLINE float e2m1_to_f32(uint8_t code)
{
    uint32_t m = code & 7, sign = (uint32_t)(code & 8) << 28;
    uint32_t halves = m < 4 ? m : m < 6 ? 2 * m - 4 : 4 * m - 16; /* 0 1 2 3 4 6 8 12 */
    return f32_from_bits(sign | f32_bits(f32_mul((float)halves, 0.5f)));
}

/* A tie goes to the even code: half of the midpoints count as above. */
LLMC_INLINE uint8_t e2m1_from_f32(float x)
{
    float a = f32_abs(x);
    if (a != a) return 7;
    return (uint8_t)((a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f) +
                     (f32_bits(x) >> 31) * 8);
}

/* P(away from zero) = floor(256 f) / 256, f the place between two neighbours; random8 < 256. */
LLMC_INLINE uint8_t e2m1_from_f32_stochastic(float x, uint32_t random8)
{
    float a = f32_abs(x);
    if (a != a) return 7;
    uint32_t sign = (f32_bits(x) >> 31) * 8;
    if (a >= 6.0f) return (uint8_t)(sign | 7);
    uint32_t below = (a >= 0.5f) + (a >= 1.0f) + (a >= 1.5f) + (a >= 2.0f) + (a >= 3.0f) + (a >= 4.0f);
    float steps = below < 4 ? 512.0f : below < 6 ? 256.0f : 128.0f; /* 256 / (next - below); all of this is exact */
    uint32_t fraction = (uint32_t)f32_mul(f32_sub(a, e2m1_to_f32((uint8_t)below)), steps);
    return (uint8_t)(sign | (below + (fraction + random8 >= 256)));
}

#endif
