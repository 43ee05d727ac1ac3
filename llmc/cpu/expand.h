/* NVFP4 back to numbers, while a matrix product packs its panels: code x block scale, exact in BF16 and so in FP32.
 *
 * 32 codes are 16 bytes, two codes a byte, the even one low. So the 16 even elements are the low nibbles of the 16 bytes
 * and the 16 odd ones the high nibbles: just the two halves that the order of summation wants (gemm.h). Floor 2.
 */
#ifndef LLMC_CPU_EXPAND_H
#define LLMC_CPU_EXPAND_H

#include "gemm.h"
#include "simd_int.h"

static inline const uint8_t *fp4_codes(const GemmInput *in, int64_t block)
{
    return (const uint8_t *)in->data + 8 * block;
}
/* Of the block `column` blocks (or ld_block steps) into row `row` of the codes. */
static inline float fp4_scale(const GemmInput *in, int64_t row, int64_t column)
{
    return gemm_e4m3[in->block_scale[(row >> in->scale_shift) * in->ld + column]];
}

#if SIMD_AVX512

static inline __m512 fp4_values(void)
{
    return _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
}

static inline void fp4_expand_bytes(v16 *even, v16 *odd, __m128i bytes, __m512 scale)
{
    __m512i low = _mm512_cvtepu8_epi32(bytes), high = _mm512_srli_epi32(low, 4); /* a permutation reads 4 bits */
    *even = _mm512_mul_ps(_mm512_permutexvar_ps(low, fp4_values()), scale);
    *odd = _mm512_mul_ps(_mm512_permutexvar_ps(high, fp4_values()), scale);
}

/* Elements k .. k + 31 of row i, k a multiple of 32, where k is contiguous: two blocks; the second may be beyond k_end. */
static inline void fp4_expand_row(v16 *even, v16 *odd, const GemmInput *in, int64_t i, int64_t k, int64_t k_end)
{
    int64_t column = k / 16 * in->ld_block, first = i * in->ld + column, second = first + in->ld_block;
    __m128i bytes = _mm_loadl_epi64((const __m128i *)fp4_codes(in, first));
    __m512 scale = _mm512_set1_ps(fp4_scale(in, i, column));
    if (k + 16 < k_end) {
        bytes = _mm_unpacklo_epi64(bytes, _mm_loadl_epi64((const __m128i *)fp4_codes(in, second)));
        scale = _mm512_mask_blend_ps(0xff00, scale, _mm512_set1_ps(fp4_scale(in, i, column + in->ld_block)));
    }
    fp4_expand_bytes(even, odd, bytes, scale);
}

/* Elements i .. i + 15 at k, where i is contiguous: one block, in order. */
static inline v16 fp4_expand_across(const GemmInput *in, int64_t i, int64_t k)
{
    int64_t block = k * in->ld + i / 16;
    __m512i half = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)fp4_codes(in, block)));
    __m512i words = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), half);
    __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    __m512 values = _mm512_permutexvar_ps(_mm512_srlv_epi32(words, shifts), fp4_values());
    return _mm512_mul_ps(values, _mm512_set1_ps(fp4_scale(in, k, i / 16)));
}

#elif SIMD_AVX2

static inline __m256 fp4_expand_codes(__m256i codes, __m256 scale) /* 8 words; the low 4 bits count */
{
    __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), codes);
    __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28), _mm256_set1_epi32((int)0x80000000));
    return _mm256_mul_ps(_mm256_or_ps(magnitude, _mm256_castsi256_ps(sign)), scale);
}

static inline void fp4_expand_half(__m256 *even, __m256 *odd, const GemmInput *in, int64_t row, int64_t column)
{
    __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)fp4_codes(in, row * in->ld + column)));
    __m256 scale = _mm256_set1_ps(fp4_scale(in, row, column));
    *even = fp4_expand_codes(bytes, scale);
    *odd = fp4_expand_codes(_mm256_srli_epi32(bytes, 4), scale);
}

static inline void fp4_expand_row(v16 *even, v16 *odd, const GemmInput *in, int64_t i, int64_t k, int64_t k_end)
{
    int64_t column = k / 16 * in->ld_block;
    *even = *odd = v16_set1(0);
    fp4_expand_half(&even->low, &odd->low, in, i, column);
    if (k + 16 < k_end) fp4_expand_half(&even->high, &odd->high, in, i, column + in->ld_block);
}

static inline v16 fp4_expand_across(const GemmInput *in, int64_t i, int64_t k)
{
    int64_t block = k * in->ld + i / 16;
    uint32_t words[2];
    memcpy(words, fp4_codes(in, block), sizeof words);
    __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    __m256 scale = _mm256_set1_ps(fp4_scale(in, k, i / 16));
    return v16_of(fp4_expand_codes(_mm256_srlv_epi32(_mm256_set1_epi32((int)words[0]), shifts), scale),
                  fp4_expand_codes(_mm256_srlv_epi32(_mm256_set1_epi32((int)words[1]), shifts), scale));
}

#else

static inline void fp4_expand_row(v16 *even, v16 *odd, const GemmInput *in, int64_t i, int64_t k, int64_t k_end)
{
    *even = *odd = v16_set1(0);
    for (int half = 0; half < 2 && k + 16 * half < k_end; half++) {
        int64_t column = (k / 16 + half) * in->ld_block, block = i * in->ld + column;
        float scale = fp4_scale(in, i, column);
        for (int j = 0; j < 8; j++) {
            even->lane[8 * half + j] = e2m1_to_f32(fp4_codes(in, block)[j] & 15) * scale;
            odd->lane[8 * half + j] = e2m1_to_f32(fp4_codes(in, block)[j] >> 4) * scale;
        }
    }
}

static inline v16 fp4_expand_across(const GemmInput *in, int64_t i, int64_t k)
{
    int64_t block = k * in->ld + i / 16;
    v16 out;
    for (int j = 0; j < 16; j++)
        out.lane[j] = e2m1_to_f32(fp4_codes(in, block)[j / 2] >> 4 * (j % 2) & 15) * fp4_scale(in, k, i / 16);
    return out;
}

#endif
#endif
