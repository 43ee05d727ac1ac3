/* Sixteen 32-bit integers as one value, v16u: the bits of a v16, and what quantizing needs of them. Forms and rules as
 * in simd.h. Also the 16 x 16 transposition, min, and the two ways 4-bit codes are laid down and picked up again.
 *
 * Floor 2.
 */
#ifndef LLMC_CPU_SIMD_INT_H
#define LLMC_CPU_SIMD_INT_H

#include "simd.h"
#include "transpose.h"

#if SIMD_AVX512

typedef __m512i v16u;

static inline v16u v16u_set1(uint32_t x) { return _mm512_set1_epi32((int)x); }
static inline v16u v16u_load(const uint32_t *p) { return _mm512_loadu_si512(p); }
static inline void v16u_store(uint32_t *p, v16u a) { _mm512_storeu_si512(p, a); }
static inline v16u v16u_bits(v16 a) { return _mm512_castps_si512(a); }
static inline v16 v16_of_bits(v16u a) { return _mm512_castsi512_ps(a); }
static inline v16u v16u_truncate(v16 a) { return _mm512_cvttps_epi32(a); }
static inline v16u v16u_add(v16u a, v16u b) { return _mm512_add_epi32(a, b); }
static inline v16u v16u_sub(v16u a, v16u b) { return _mm512_sub_epi32(a, b); }
static inline v16u v16u_and(v16u a, v16u b) { return _mm512_and_si512(a, b); }
static inline v16u v16u_or(v16u a, v16u b) { return _mm512_or_si512(a, b); }
static inline v16u v16u_xor(v16u a, v16u b) { return _mm512_xor_si512(a, b); }
static inline v16u v16u_max(v16u a, v16u b) { return _mm512_max_epu32(a, b); }
#define v16u_left(a, n)  _mm512_slli_epi32(a, n)
#define v16u_right(a, n) _mm512_srli_epi32(a, n)
static inline void v16u_multiply(v16u a, uint32_t factor, v16u *high, v16u *low)
{
    __m512i f = _mm512_set1_epi32((int)factor), even = _mm512_mul_epu32(a, f);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), f);
    *high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    *low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
}
static inline v16 v16_min(v16 a, v16 b) { return _mm512_min_ps(a, b); } /* a < b ? a : b */
static inline void v16u_store_bytes(uint8_t *p, v16u a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a)); }
/* low[i], high[i] as 16 words of 64 bits. */
static inline void v16u_store_pairs(void *p, v16u low, v16u high)
{
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    _mm512_storeu_si512(p, _mm512_permutex2var_epi32(low, first, high));
    _mm512_storeu_si512((char *)p + 64, _mm512_permutex2var_epi32(low, second, high));
}
static inline void v16_transpose(v16 row[16])
{
    __m512i r[16];
    UNROLL for (int i = 0; i < 16; i++) r[i] = _mm512_castps_si512(row[i]);
    transpose_16x16(r);
    UNROLL for (int i = 0; i < 16; i++) row[i] = _mm512_castsi512_ps(r[i]);
}

#elif SIMD_AVX2

typedef struct {
    __m256i low, high;
} v16u;

static inline v16u v16u_of(__m256i low, __m256i high) { return (v16u){low, high}; }
static inline v16u v16u_set1(uint32_t x) { return v16u_of(_mm256_set1_epi32((int)x), _mm256_set1_epi32((int)x)); }
static inline v16u v16u_load(const uint32_t *p)
{
    return v16u_of(_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 8)));
}
static inline void v16u_store(uint32_t *p, v16u a)
{
    _mm256_storeu_si256((__m256i *)p, a.low);
    _mm256_storeu_si256((__m256i *)(p + 8), a.high);
}
static inline v16u v16u_bits(v16 a) { return v16u_of(_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)); }
static inline v16 v16_of_bits(v16u a) { return v16_of(_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)); }
static inline v16u v16u_truncate(v16 a) { return v16u_of(_mm256_cvttps_epi32(a.low), _mm256_cvttps_epi32(a.high)); }
#define V16U_PAIRWISE(name, operation)                                                                                 \
    static inline v16u name(v16u a, v16u b) { return v16u_of(operation(a.low, b.low), operation(a.high, b.high)); }
V16U_PAIRWISE(v16u_add, _mm256_add_epi32)
V16U_PAIRWISE(v16u_sub, _mm256_sub_epi32)
V16U_PAIRWISE(v16u_and, _mm256_and_si256)
V16U_PAIRWISE(v16u_or, _mm256_or_si256)
V16U_PAIRWISE(v16u_xor, _mm256_xor_si256)
V16U_PAIRWISE(v16u_max, _mm256_max_epu32)
V16_PAIRWISE(v16_min, _mm256_min_ps) /* a < b ? a : b */
#define v16u_left(a, n)  v16u_of(_mm256_slli_epi32((a).low, n), _mm256_slli_epi32((a).high, n))
#define v16u_right(a, n) v16u_of(_mm256_srli_epi32((a).low, n), _mm256_srli_epi32((a).high, n))
static inline void v8u_multiply(__m256i a, __m256i f, __m256i *high, __m256i *low)
{
    __m256i even = _mm256_mul_epu32(a, f), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), f);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}
static inline void v16u_multiply(v16u a, uint32_t factor, v16u *high, v16u *low)
{
    __m256i f = _mm256_set1_epi32((int)factor);
    v8u_multiply(a.low, f, &high->low, &low->low);
    v8u_multiply(a.high, f, &high->high, &low->high);
}
static inline void v16u_store_bytes(uint8_t *p, v16u a) /* values below 256 */
{
    __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(a.low, a.high), 0xD8);
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i *)p, bytes);
}
static inline void v8u_store_pairs(char *p, __m256i low, __m256i high)
{
    __m256i even = _mm256_unpacklo_epi32(low, high), odd = _mm256_unpackhi_epi32(low, high); /* within 128-bit halves */
    _mm256_storeu_si256((__m256i *)p, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256((__m256i *)(p + 32), _mm256_permute2x128_si256(even, odd, 0x31));
}
static inline void v16u_store_pairs(void *p, v16u low, v16u high)
{
    v8u_store_pairs(p, low.low, high.low);
    v8u_store_pairs((char *)p + 64, low.high, high.high);
}
static inline void v8_transpose(__m256 r[8])
{
    __m256 t[8];
    UNROLL for (int i = 0; i < 4; i++)
    {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 2; i++)
    {
        r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    UNROLL for (int i = 0; i < 4; i++)
    {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    UNROLL for (int i = 0; i < 8; i++) r[i] = t[i];
}
static inline void v16_transpose(v16 row[16]) /* four quarters; those off the diagonal change places */
{
    __m256 low[2][8], high[2][8]; /* of rows 0-7 and 8-15 */
    UNROLL for (int i = 0; i < 16; i++)
    {
        low[i / 8][i % 8] = row[i].low;
        high[i / 8][i % 8] = row[i].high;
    }
    for (int half = 0; half < 2; half++) {
        v8_transpose(low[half]);
        v8_transpose(high[half]);
    }
    UNROLL for (int i = 0; i < 8; i++)
    {
        row[i] = v16_of(low[0][i], low[1][i]);
        row[8 + i] = v16_of(high[0][i], high[1][i]);
    }
}

#else

typedef struct {
    uint32_t lane[16];
} v16u;

#define V16U_LANES(expression)                                                                                         \
    v16u out;                                                                                                          \
    for (int i = 0; i < 16; i++) out.lane[i] = (expression);                                                           \
    return out
static inline v16u v16u_set1(uint32_t x) { V16U_LANES(x); }
static inline v16u v16u_load(const uint32_t *p) { V16U_LANES(p[i]); }
static inline void v16u_store(uint32_t *p, v16u a) { memcpy(p, a.lane, sizeof a.lane); }
static inline v16u v16u_bits(v16 a) { V16U_LANES(f32_bits(a.lane[i])); }
static inline v16 v16_of_bits(v16u a) { V16_LANES(f32_from_bits(a.lane[i])); }
static inline v16u v16u_truncate(v16 a) { V16U_LANES((uint32_t)(int32_t)a.lane[i]); }
static inline v16u v16u_add(v16u a, v16u b) { V16U_LANES(a.lane[i] + b.lane[i]); }
static inline v16u v16u_sub(v16u a, v16u b) { V16U_LANES(a.lane[i] - b.lane[i]); }
static inline v16u v16u_and(v16u a, v16u b) { V16U_LANES(a.lane[i] & b.lane[i]); }
static inline v16u v16u_or(v16u a, v16u b) { V16U_LANES(a.lane[i] | b.lane[i]); }
static inline v16u v16u_xor(v16u a, v16u b) { V16U_LANES(a.lane[i] ^ b.lane[i]); }
static inline v16u v16u_max(v16u a, v16u b) { V16U_LANES(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
static inline v16u v16u_left(v16u a, int n) { V16U_LANES(a.lane[i] << n); }
static inline v16u v16u_right(v16u a, int n) { V16U_LANES(a.lane[i] >> n); }
static inline void v16u_multiply(v16u a, uint32_t factor, v16u *high, v16u *low)
{
    for (int i = 0; i < 16; i++) {
        uint64_t product = (uint64_t)a.lane[i] * factor;
        high->lane[i] = (uint32_t)(product >> 32);
        low->lane[i] = (uint32_t)product;
    }
}
static inline v16 v16_min(v16 a, v16 b) { V16_LANES(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); }
static inline void v16u_store_bytes(uint8_t *p, v16u a)
{
    for (int i = 0; i < 16; i++) p[i] = (uint8_t)a.lane[i];
}
static inline void v16u_store_pairs(void *p, v16u low, v16u high)
{
    for (int i = 0; i < 16; i++) {
        uint32_t pair[2] = {low.lane[i], high.lane[i]};
        memcpy((char *)p + 8 * i, pair, sizeof pair);
    }
}
static inline void v16_transpose(v16 row[16])
{
    v16 out[16];
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) out[j].lane[i] = row[i].lane[j];
    memcpy(row, out, sizeof out);
}

#endif

/* Philox4x32-7 with one counter a lane: philox.h, 16 times. */
static inline void v16u_philox(v16u c[4], uint64_t seed)
{
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    UNROLL for (int round = 0; round < 7; round++)
    {
        v16u high0, low0, high1, low1;
        v16u_multiply(c[0], 0xD2511F53u, &high0, &low0);
        v16u_multiply(c[2], 0xCD9E8D57u, &high1, &low1);
        c[0] = v16u_xor(v16u_xor(high1, c[1]), v16u_set1(k0));
        c[2] = v16u_xor(v16u_xor(high0, c[3]), v16u_set1(k1));
        c[1] = low1;
        c[3] = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

/* Rounded to BF16, as floats. Without the care for NaN of v16_store_bf16: only for what is quantized next, where every NaN
 * is alike. */
static inline v16 v16_round_bf16(v16 a)
{
    v16u bits = v16u_bits(a), odd = v16u_and(v16u_right(bits, 16), v16u_set1(1));
    v16u rounded = v16u_and(v16u_add(v16u_add(bits, odd), v16u_set1(0x7fff)), v16u_set1(0xffff0000));
    return v16_of_bits(rounded);
}

#endif
