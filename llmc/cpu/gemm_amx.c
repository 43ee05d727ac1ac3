/* The BF16 matrix-product kernel on AMX tiles (Sapphire Rapids and later): TDPBF16PS on 2 x 2 tiles of 16 x 16.
 *
 * A tile register is 16 rows of 64 bytes. TDPBF16PS reads A as 16 rows of 32 k, B as 16 rows, each a pair of k's for 16
 * columns ("VNNI" order), and does exactly the order of summation of gemm.h, whatever MXCSR says.
 *
 *     A panel   [rows / 16][ks / 32] tiles of [16 rows][32 k]
 *     B panel   [cols / 16][ks / 32] tiles of [16 pairs][16 columns][2 k]
 *
 * Both come from two moves: 16 x 16 transposition of 32-bit pairs (when the pair is contiguous in memory but the tile
 * wants the other order), and interleaving two rows of memory (when k runs across memory rows).
 */
#include "expand.h"

#include <string.h>

enum { TILE = 16, GROUP = 32, TILE_ELEMENTS = TILE * GROUP };

static void configure_tiles(void)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t column_bytes[16];
        uint8_t rows[16];
    } config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int t = 0; t < 8; t++) {
        config.rows[t] = 16;
        config.column_bytes[t] = 64;
    }
    __asm__ volatile("" ::: "memory"); /* gcc 12 believes that the intrinsic reads only the first 8 bytes */
    _tile_loadconfig(&config);
}

/* Two times 16 floats that are BF16 values, as 16 pairs. */
static inline __m512i bf16_pairs(__m512 first, __m512 second)
{
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(_mm512_castps_si512(first), 16),
                                   _mm512_castps_si512(second));
}

static inline uint32_t low_bits(int64_t n) { return n >= 32 ? 0xffffffffu : n <= 0 ? 0 : (1u << n) - 1; }

/* 16 rows of 32 k's from an input with contiguous k. */
static inline void load_rows(__m512i r[16], const GemmInput *in, int64_t i, int64_t rows, int64_t k, int64_t ks)
{
    if (in->block_scale) {
        for (int64_t j = 0; j < 16; j++) {
            __m512 even = _mm512_setzero_ps(), odd = even;
            if (j < rows) fp4_expand_row(&even, &odd, in, i + j, k, k + ks);
            r[j] = bf16_pairs(even, odd);
        }
        return;
    }
    const uint16_t *p = (const uint16_t *)in->data + i * in->ld + k;
    __mmask32 mask = low_bits(ks);
    for (int64_t j = 0; j < 16; j++, p += in->ld)
        r[j] = j < rows ? _mm512_maskz_loadu_epi16(mask, p) : _mm512_setzero_si512();
}

/* 16 pairs of k for 16 columns from an input where k runs across memory rows: element 2 c + p of pair j is (c, k + 2 j
 * + p). */
static inline void load_pairs(__m512i r[16], const GemmInput *in, int64_t i, int64_t rows, int64_t k, int64_t ks)
{
    if (in->block_scale) {
        __m512 zero = _mm512_setzero_ps();
        for (int64_t j = 0; j < 32; j += 2)
            r[j / 2] = bf16_pairs(j < ks && rows > 0 ? fp4_expand_across(in, i, k + j) : zero,
                                  j + 1 < ks && rows > 0 ? fp4_expand_across(in, i, k + j + 1) : zero);
        return;
    }
    const uint16_t *p = (const uint16_t *)in->data + k * in->ld + i;
    __mmask16 mask = (__mmask16)low_bits(min_i64(rows, 16));
    for (int64_t j = 0; j < 32; j += 2, p += 2 * in->ld) {
        __m256i first = j < ks ? _mm256_maskz_loadu_epi16(mask, p) : _mm256_setzero_si256();
        __m256i second = j + 1 < ks ? _mm256_maskz_loadu_epi16(mask, p + in->ld) : _mm256_setzero_si256();
        r[j / 2] = _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
    }
}

/* Tiles for rows i0.. of an input: as A wants them (pairs along the row) or as B does (pairs down). */
static void pack(uint16_t *out, const GemmInput *in, int64_t i0, int64_t rows, int64_t padded_rows, int64_t k0,
                 int64_t ks, bool down)
{
    for (int64_t i = 0; i < padded_rows; i += TILE)
        for (int64_t k = 0; k < ks; k += GROUP, out += TILE_ELEMENTS) {
            __m512i r[16];
            if (in->k_contiguous)
                load_rows(r, in, i0 + i, rows - i, k0 + k, ks - k);
            else
                load_pairs(r, in, i0 + i, rows - i, k0 + k, ks - k);
            if (in->k_contiguous == down) transpose_16x16(r);
            for (int j = 0; j < 16; j++) _mm512_storeu_si512(out + j * GROUP, r[j]);
        }
}

static void pack_a(void *panel, const GemmInput *a, int64_t i0, int64_t rows, int64_t k0, int64_t ks)
{
    pack(panel, a, i0, rows, round_up(rows, 2 * TILE), k0, ks, false);
}

static void pack_b(void *panel, const GemmInput *b, int64_t j0, int64_t cols, int64_t k0, int64_t ks)
{
    pack(panel, b, j0, cols, round_up(cols, 2 * TILE), k0, ks, true);
}

/* c[32, 32] += 2 x 2 tiles over all groups of k. */
static void tile_2x2(float *c, int64_t ldc, const uint16_t *a, const uint16_t *b, int64_t groups, bool from_zero)
{
    const uint16_t *a1 = a + groups * TILE_ELEMENTS, *b1 = b + groups * TILE_ELEMENTS;
    size_t stride = (size_t)ldc * sizeof *c;

    if (from_zero) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, c, stride);
        _tile_loadd(1, c + 16, stride);
        _tile_loadd(2, c + 16 * ldc, stride);
        _tile_loadd(3, c + 16 * ldc + 16, stride);
    }
    for (int64_t g = 0; g < groups * TILE_ELEMENTS; g += TILE_ELEMENTS) {
        _tile_loadd(4, a + g, 64);
        _tile_loadd(6, b + g, 64);
        _tile_loadd(7, b1 + g, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a1 + g, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, stride);
    _tile_stored(1, c + 16, stride);
    _tile_stored(2, c + 16 * ldc, stride);
    _tile_stored(3, c + 16 * ldc + 16, stride);
}

static void block(float *c, int64_t ldc, const void *a, const void *b, int64_t rows, int64_t cols, int64_t ks,
                  bool from_zero)
{
    int64_t groups = ceil_div(ks, GROUP), padded = groups * GROUP;
    configure_tiles();
    for (int64_t j = 0; j < cols; j += 2 * TILE)
        for (int64_t i = 0; i < rows; i += 2 * TILE)
            tile_2x2(c + i * ldc + j, ldc, (const uint16_t *)a + i * padded, (const uint16_t *)b + j * padded, groups,
                     from_zero);
    _tile_release();
}

const GemmKernel gemm_kernel_amx = {.mr = 2 * TILE,
                                    .nr = 2 * TILE,
                                    .mc = 256,
                                    .kc = 1024,
                                    .k_multiple = GROUP,
                                    .element_bytes = 2,
                                    .pack_a = pack_a,
                                    .pack_b = pack_b,
                                    .block = block};
