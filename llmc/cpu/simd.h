/* Sixteen floats as one value: v16. The element-wise code of cpu/ is written once over it and compiled once per
 * instruction set (-DISA=...); all forms give the same bits.
 *
 *     avx512     one 512-bit register
 *     avx2       two 256-bit registers, lanes 0-7 and 8-15
 *     portable   an array of 16 floats: the definition
 *
 * Rules that make the bits equal: fma only where written, one IEEE operation per call; min and max are (a < b ? a : b)
 * and (a > b ? a : b), so that NaN behaves alike; a row is reduced in 16 lanes (element i goes to lane i % 16, also in
 * the tail), and the lanes by the fixed tree 8, 4, 2, 1.
 *
 * Floor 2.
 */
#ifndef LLMC_CPU_SIMD_H
#define LLMC_CPU_SIMD_H

#include "mathfn.h"
#include "tensor.h"

#if defined(__AVX512F__)
#define SIMD_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__)
#define SIMD_AVX2 1
#include <immintrin.h>
#endif

/* ---- AVX-512 ---- */
#if SIMD_AVX512

typedef __m512 v16;

static inline v16 v16_set1(float x) { return _mm512_set1_ps(x); }
static inline v16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v16_store(float *p, v16 a) { _mm512_storeu_ps(p, a); }
static inline v16 v16_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
static inline v16 v16_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
static inline v16 v16_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
static inline v16 v16_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
static inline v16 v16_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
static inline v16 v16_sqrt(v16 a) { return _mm512_sqrt_ps(a); }
static inline v16 v16_max(v16 a, v16 b) { return _mm512_max_ps(a, b); } /* a > b ? a : b */
static inline v16 v16_abs(v16 a) { return _mm512_abs_ps(a); }
static inline v16 v16_copysign(v16 a, v16 sign)
{
    __m512i mask = _mm512_set1_epi32(0x7fffffff);
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(mask, _mm512_castps_si512(a), _mm512_castps_si512(sign), 0xCA)); /* mask ? a : sign */
}
static inline v16 v16_less_select(v16 a, v16 b, v16 yes, v16 no)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
static inline v16 v16_exp2_of_biased(v16 a)
{
    __m512i bits = _mm512_slli_epi32(_mm512_castps_si512(a), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(0x3f800000)));
}
static inline v16 v16_load_bf16(const uint16_t *p)
{
    __m256i half = _mm256_loadu_si256((const __m256i *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
static inline void v16_store_bf16(uint16_t *p, v16 a)
{
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
/* Lanes 8..15 onto 0..7, then 4, 2, 1. */
static inline float v16_sum(v16 a)
{
    __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}

/* ---- AVX2 ---- */
#elif SIMD_AVX2

typedef struct {
    __m256 low, high;
} v16;

static inline v16 v16_of(__m256 low, __m256 high) { return (v16){low, high}; }
static inline v16 v16_set1(float x) { return v16_of(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
static inline v16 v16_load(const float *p) { return v16_of(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
static inline void v16_store(float *p, v16 a)
{
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
}
#define V16_PAIRWISE(name, operation)                                                                                  \
    static inline v16 name(v16 a, v16 b) { return v16_of(operation(a.low, b.low), operation(a.high, b.high)); }
V16_PAIRWISE(v16_add, _mm256_add_ps)
V16_PAIRWISE(v16_sub, _mm256_sub_ps)
V16_PAIRWISE(v16_mul, _mm256_mul_ps)
V16_PAIRWISE(v16_div, _mm256_div_ps)
V16_PAIRWISE(v16_max, _mm256_max_ps) /* a > b ? a : b */
static inline v16 v16_fma(v16 a, v16 b, v16 c)
{
    return v16_of(_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high));
}
static inline v16 v16_sqrt(v16 a) { return v16_of(_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)); }
static inline v16 v16_abs(v16 a)
{
    __m256 sign = _mm256_set1_ps(-0.0f);
    return v16_of(_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high));
}
static inline v16 v16_copysign(v16 a, v16 sign)
{
    __m256 bit = _mm256_set1_ps(-0.0f);
    return v16_of(_mm256_or_ps(_mm256_andnot_ps(bit, a.low), _mm256_and_ps(bit, sign.low)),
                  _mm256_or_ps(_mm256_andnot_ps(bit, a.high), _mm256_and_ps(bit, sign.high)));
}
static inline v16 v16_less_select(v16 a, v16 b, v16 yes, v16 no)
{
    return v16_of(_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)),
                  _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)));
}
static inline __m256 v8_exp2_of_biased(__m256 a)
{
    __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(a), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(0x3f800000)));
}
static inline v16 v16_exp2_of_biased(v16 a) { return v16_of(v8_exp2_of_biased(a.low), v8_exp2_of_biased(a.high)); }
static inline __m256 v8_load_bf16(const uint16_t *p)
{
    __m128i half = _mm_loadu_si128((const __m128i *)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
static inline v16 v16_load_bf16(const uint16_t *p) { return v16_of(v8_load_bf16(p), v8_load_bf16(p + 8)); }
static inline __m256i v8_round_bf16(__m256 a)
{
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256 nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
    rounded = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan));
    return _mm256_srli_epi32(rounded, 16);
}
static inline void v16_store_bf16(uint16_t *p, v16 a)
{
    __m256i packed = _mm256_packus_epi32(v8_round_bf16(a.low), v8_round_bf16(a.high)); /* within 128-bit halves */
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xD8));
}
static inline float v16_sum(v16 a)
{
    __m256 s8 = _mm256_add_ps(a.low, a.high);
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}

/* ---- portable: the definition ---- */
#else

typedef struct {
    float lane[16];
} v16;

#define V16_LANES(expression)                                                                                          \
    v16 out;                                                                                                           \
    for (int i = 0; i < 16; i++) out.lane[i] = (expression);                                                           \
    return out
static inline v16 v16_set1(float x) { V16_LANES(x); }
static inline v16 v16_load(const float *p) { V16_LANES(p[i]); }
static inline void v16_store(float *p, v16 a) { memcpy(p, a.lane, sizeof a.lane); }
static inline v16 v16_add(v16 a, v16 b) { V16_LANES(a.lane[i] + b.lane[i]); }
static inline v16 v16_sub(v16 a, v16 b) { V16_LANES(a.lane[i] - b.lane[i]); }
static inline v16 v16_mul(v16 a, v16 b) { V16_LANES(a.lane[i] * b.lane[i]); }
static inline v16 v16_div(v16 a, v16 b) { V16_LANES(a.lane[i] / b.lane[i]); }
static inline v16 v16_fma(v16 a, v16 b, v16 c) { V16_LANES(f32_fma(a.lane[i], b.lane[i], c.lane[i])); }
static inline v16 v16_sqrt(v16 a) { V16_LANES(sqrtf(a.lane[i])); }
static inline v16 v16_max(v16 a, v16 b) { V16_LANES(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
static inline v16 v16_abs(v16 a) { V16_LANES(f32_abs(a.lane[i])); }
static inline v16 v16_copysign(v16 a, v16 sign) { V16_LANES(f32_copysign(a.lane[i], sign.lane[i])); }
static inline v16 v16_less_select(v16 a, v16 b, v16 yes, v16 no)
{
    V16_LANES(a.lane[i] < b.lane[i] ? yes.lane[i] : no.lane[i]);
}
static inline v16 v16_exp2_of_biased(v16 a) { V16_LANES(f32_exp2_of_biased(a.lane[i])); }
static inline v16 v16_load_bf16(const uint16_t *p) { V16_LANES(bf16_to_f32(p[i])); }
static inline void v16_store_bf16(uint16_t *p, v16 a)
{
    for (int i = 0; i < 16; i++) p[i] = bf16_from_f32(a.lane[i]);
}
static inline float v16_sum(v16 a)
{
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) a.lane[i] += a.lane[i + width];
    return a.lane[0];
}

#endif

/* ---- the same for all: largest lane, parts of 16, act dtype, functions ---- */

static inline float v16_largest(v16 a)
{
    float lane[16];
    v16_store(lane, a);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
    return lane[0];
}

/* Elements i .. i + 15 of a row of n, FP32 or BF16; beyond n: `fill` on load, left alone on store. */
static inline v16 v16_load_row(const void *row, DType dtype, int64_t i, int64_t n, float fill)
{
    if (i + 16 <= n)
        return dtype == DTYPE_BF16 ? v16_load_bf16((const uint16_t *)row + i) : v16_load((const float *)row + i);
    float part[16];
    for (int64_t j = 0; j < 16; j++)
        part[j] = i + j >= n            ? fill
                  : dtype == DTYPE_BF16 ? bf16_to_f32(((const uint16_t *)row)[i + j])
                                        : ((const float *)row)[i + j];
    return v16_load(part);
}

static inline void v16_store_row(void *row, DType dtype, int64_t i, int64_t n, v16 a)
{
    if (i + 16 <= n) {
        if (dtype == DTYPE_BF16)
            v16_store_bf16((uint16_t *)row + i, a);
        else
            v16_store((float *)row + i, a);
        return;
    }
    float part[16];
    v16_store(part, a);
    for (int64_t j = 0; i + j < n; j++) {
        if (dtype == DTYPE_BF16)
            ((uint16_t *)row)[i + j] = bf16_from_f32(part[j]);
        else
            ((float *)row)[i + j] = part[j];
    }
}

/* What a row will hold after rounding to dtype: the value that later readers see. */
static inline v16 v16_round_to(DType dtype, v16 a)
{
    if (dtype != DTYPE_BF16) return a;
    uint16_t part[16];
    v16_store_bf16(part, a);
    return v16_load_bf16(part);
}

MATHFN_DEFINE_FP32(v16, v16)

#endif
