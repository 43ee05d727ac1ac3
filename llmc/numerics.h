/* Number formats as bits: BF16. Inline, host and device, exhaustively tested (test_numerics.c).
 *
 *     FP32   s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm
 *     BF16   s eeeeeeee mmmmmmm                   the upper half of an FP32
 *
 * Rounding to BF16 is to nearest, ties to even, denormals kept (x86's VCVTNEPS2BF16 flushes them: not used), NaN stays
 * NaN (quiet). Stochastic rounding adds 16 random bits below the kept ones and cuts: P(up) is exactly the fraction.
 *
 * Floor 0.
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

#endif
