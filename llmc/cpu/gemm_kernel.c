/* Matrix-product kernels over the 16-lane type, FP32 and BF16: packing, micro-tiles, storing. Compiled once per
 * instruction set; gemm.h has the order of summation that all share.
 *
 * Panels hold FP32, whatever the input.
 *     A   [rows][ks + 16]               row-major; the micro-tile broadcasts its elements
 *     B   [cols / NR][ks][NR]           one row of NR columns per k
 * In BF16 each group of 32 k is stored evens first, then odds, so that a micro-tile reads straight on: it sums the 16
 * even k in registers, parks the sums in L1, sums the odd ones, and adds E + O to C.
 *
 *     tile        mr x nr    registers
 *     avx512      14 x 32    28 sums, 2 of B, 1 broadcast
 *     avx2         6 x 16    12 sums, 2 of B, 1 broadcast
 *     portable     4 x 16    arrays
 */
#include "cpu.h"
#include "expand.h"

#if SIMD_AVX512
enum { MR = 14, NV = 2, MC = 112 };
#elif SIMD_AVX2
enum { MR = 6, NV = 1, MC = 120 };
#else
enum { MR = 4, NV = 1, MC = 128 };
#endif
enum { NR = 16 * NV, KC = 256 };

#if SIMD_AVX512 || SIMD_AVX2 || defined(__aarch64__)
#define HARDWARE_FMA 1 /* with denormals flushed by the unit; else the BF16 order goes through double */
#endif

/* ---- packing ---- */

/* Where k of a group of 32 stands in a panel: FP32 in place, BF16 evens before odds. */
static inline int64_t place(DType dtype, int64_t k)
{
    return dtype == DTYPE_BF16 ? (k & ~(int64_t)31) + (k & 1) * 16 + (k & 31) / 2 : k;
}

/* The 16 x 16 corner at (i, k) of an input with contiguous k, as 16 rows of 16 k's; zeros outside. */
static inline void load_rows(v16 row[16], const GemmInput *in, int64_t i, int64_t i_end, int64_t k, int64_t k_end)
{
    for (int64_t r = 0; r < 16; r++) {
        const char *p = (const char *)in->data + (size_t)((i + r) * in->ld) * dtype_bytes(in->dtype);
        row[r] = i + r < i_end && k < k_end ? v16_load_row(p, in->dtype, k, k_end, 0) : v16_set1(0);
    }
}

/* Row k of an input with contiguous i: 16 values from i on; zeros outside. */
static inline v16 load_across(const GemmInput *in, int64_t i, int64_t i_end, int64_t k, int64_t k_end)
{
    const char *p = (const char *)in->data + (size_t)(k * in->ld) * dtype_bytes(in->dtype);
    if (in->block_scale) return k < k_end && i < i_end ? fp4_expand_across(in, i, k) : v16_set1(0);
    return k < k_end && i < i_end ? v16_load_row(p, in->dtype, i, i_end, 0) : v16_set1(0);
}

static void pack_a(void *panel, const GemmInput *a, int64_t i0, int64_t rows, int64_t k0, int64_t ks)
{
    int64_t padded_rows = round_up(rows, MR), padded = a->dtype == DTYPE_BF16 ? round_up(ks, 32) : ks, ld = padded + 16;
    float *out = panel;

    if (a->block_scale) { /* k is contiguous: only weights are read across, and they are B */
        for (int64_t i = 0; i < padded_rows; i++)
            for (int64_t k = 0; k < padded; k += 32) {
                v16 even = v16_set1(0), odd = even;
                if (i < rows) fp4_expand_row(&even, &odd, a, i0 + i, k0 + k, k0 + ks);
                v16_store(out + i * ld + k, even);
                v16_store(out + i * ld + k + 16, odd);
            }
        return;
    }
    if (!a->k_contiguous) {
        for (int64_t i = 0; i < padded_rows; i += 16)
            for (int64_t k = 0; k < padded; k += 32)
                for (int64_t half = 0; half < 2; half++) { /* 16 k's that stand together in the panel */
                    v16 across[16];
                    for (int64_t j = 0; j < 16; j++) {
                        int64_t kk = a->dtype == DTYPE_BF16 ? k + 2 * j + half : k + 16 * half + j;
                        across[j] = load_across(a, i0 + i, i0 + rows, k0 + kk, k0 + ks);
                    }
                    v16_transpose(across);
                    for (int64_t r = 0; r < 16 && i + r < padded_rows && k + 16 * half < padded; r++)
                        v16_store(out + (i + r) * ld + k + 16 * half, across[r]);
                }
        return;
    }
    for (int64_t i = 0; i < padded_rows; i++) {
        const char *row = (const char *)a->data + (size_t)((i0 + i) * a->ld) * dtype_bytes(a->dtype);
        for (int64_t k = 0; k < padded; k += 16) {
            v16 v = i < rows && k < ks ? v16_load_row(row, a->dtype, k0 + k, k0 + ks, 0) : v16_set1(0);
            if (a->dtype == DTYPE_FP32) {
                v16_store(out + i * ld + k, v);
                continue;
            }
            float part[16], *group = out + i * ld + (k & ~(int64_t)31) + (k & 31) / 2;
            v16_store(part, v);
            for (int j = 0; j < 8; j++) group[j] = part[2 * j];
            for (int j = 0; j < 8; j++) group[16 + j] = part[2 * j + 1];
        }
    }
}

/* 16 columns of B in NVFP4, k contiguous. */
static void pack_b_fp4(float *out, const GemmInput *b, int64_t j, int64_t j_end, int64_t k0, int64_t ks)
{
    for (int64_t k = 0; k < ks; k += 32) {
        v16 even[16], odd[16];
        for (int64_t r = 0; r < 16; r++) {
            even[r] = odd[r] = v16_set1(0);
            if (j + r < j_end) fp4_expand_row(&even[r], &odd[r], b, j + r, k0 + k, k0 + ks);
        }
        v16_transpose(even);
        v16_transpose(odd);
        for (int64_t r = 0; r < 16; r++) v16_store(out + (k + r) * NR, even[r]);
        for (int64_t r = 0; r < 16; r++) v16_store(out + (k + 16 + r) * NR, odd[r]);
    }
}

static void pack_b(void *panel, const GemmInput *b, int64_t j0, int64_t cols, int64_t k0, int64_t ks)
{
    int64_t padded = b->dtype == DTYPE_BF16 ? round_up(ks, 32) : ks;
    float *out = panel;

    for (int64_t j = 0; j < NR; j += 16) {
        if (!b->k_contiguous) {
            for (int64_t k = 0; k < padded; k++)
                v16_store(out + place(b->dtype, k) * NR + j, load_across(b, j0 + j, j0 + cols, k0 + k, k0 + ks));
            continue;
        }
        if (b->block_scale) {
            pack_b_fp4(out + j, b, j0 + j, j0 + cols, k0, ks);
            continue;
        }
        for (int64_t k = 0; k < padded; k += 16) {
            v16 row[16];
            load_rows(row, b, j0 + j, j0 + cols, k0 + k, k0 + ks);
            v16_transpose(row);
            for (int64_t r = 0; r < 16 && k + r < padded; r++) v16_store(out + place(b->dtype, k + r) * NR + j, row[r]);
        }
    }
}

/* ---- micro-tiles: c[MR, NR] ---- */

__attribute__((noinline)) static void tile_fp32(float *c, int64_t ldc, const float *a, int64_t lda, const float *b,
                                                int64_t ks, bool from_zero)
{
    v16 sum[MR][NV];
    UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NV; j++)
        sum[i][j] = from_zero ? v16_set1(0) : v16_load(c + i * ldc + 16 * j);
    for (int64_t k = 0; k < ks; k++, b += NR) {
        v16 bk[NV];
        UNROLL for (int j = 0; j < NV; j++) bk[j] = v16_load(b + 16 * j);
        UNROLL for (int i = 0; i < MR; i++)
        {
            v16 ak = v16_set1(a[i * lda + k]);
            UNROLL for (int j = 0; j < NV; j++) sum[i][j] = v16_fma(ak, bk[j], sum[i][j]);
        }
    }
    UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NV; j++) v16_store(c + i * ldc + 16 * j, sum[i][j]);
}

#if HARDWARE_FMA

/* 16 k's of one parity: each sum is one chain from +0. */
static inline void sum_parity(v16 sum[MR][NV], const float *a, int64_t lda, const float *b)
{
    for (int k = 0; k < 16; k++, b += NR) {
        v16 bk[NV];
        UNROLL for (int j = 0; j < NV; j++) bk[j] = v16_load(b + 16 * j);
        UNROLL for (int i = 0; i < MR; i++)
        {
            v16 ak = v16_set1(a[i * lda + k]);
            UNROLL for (int j = 0; j < NV; j++) sum[i][j] = v16_fma(ak, bk[j], sum[i][j]);
        }
    }
}

__attribute__((noinline)) static void tile_bf16(float *c, int64_t ldc, const float *a, int64_t lda, const float *b,
                                                int64_t ks, bool from_zero)
{
    float even[MR][NR];
    for (int64_t k = 0; k < ks; k += 32, a += 32, b += 32 * NR) {
        v16 sum[MR][NV];
        UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NV; j++) sum[i][j] = v16_set1(0);
        sum_parity(sum, a, lda, b);
        UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NV; j++)
        {
            v16_store(&even[i][16 * j], sum[i][j]);
            sum[i][j] = v16_set1(0);
        }
        sum_parity(sum, a + 16, lda, b + 16 * NR);
        UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NV; j++)
        {
            v16 both = v16_add(v16_load(&even[i][16 * j]), sum[i][j]), old = v16_set1(0);
            if (k > 0 || !from_zero) old = v16_load(c + i * ldc + 16 * j);
            v16_store(c + i * ldc + 16 * j, v16_add(old, both));
        }
    }
}

#else

/* Denormal to zero, sign kept. */
static inline float flush(float x) { return f32_abs(x) < 0x1p-126f ? f32_copysign(0, x) : x; }

/* fma of BF16 values with the flush after rounding: the product is exact in double, and a sum that double has to round
 * is never near a tie of FP32 (test_gemm.c). Tininess after rounding: below 0x1.ffffffp-127 the rounded result is
 * denormal. */
static inline float fma_flush(float a, float b, float c)
{
    double sum = (double)c + (double)a * (double)b;
    if (fabs(sum) < 0x1.ffffffp-127) sum = copysign(0.0, sum);
    return (float)sum;
}

static void tile_bf16(float *c, int64_t ldc, const float *a, int64_t lda, const float *b, int64_t ks, bool from_zero)
{
    for (int i = 0; i < MR; i++)
        for (int64_t k = 0; k < ks; k += 32) {
            float sum[2][NR] = {{0}}; /* even, odd */
            for (int parity = 0; parity < 2; parity++)
                for (int64_t n = 16 * parity; n < 16 * parity + 16; n++) {
                    float ak = flush(a[i * lda + k + n]);
                    for (int j = 0; j < NR; j++)
                        sum[parity][j] = fma_flush(ak, flush(b[(k + n) * NR + j]), sum[parity][j]);
                }
            for (int j = 0; j < NR; j++) {
                float old = k > 0 || !from_zero ? flush(c[i * ldc + j]) : 0;
                c[i * ldc + j] = flush(old + flush(sum[0][j] + sum[1][j]));
            }
        }
}

#endif

static void block_fp32(float *c, int64_t ldc, const void *a, const void *b, int64_t rows, int64_t cols, int64_t ks,
                       bool from_zero)
{
    for (int64_t j = 0; j < cols; j += NR)
        for (int64_t i = 0; i < rows; i += MR)
            tile_fp32(c + i * ldc + j, ldc, (const float *)a + i * (ks + 16), ks + 16, (const float *)b + j * ks, ks,
                      from_zero);
}

static void block_bf16(float *c, int64_t ldc, const void *a, const void *b, int64_t rows, int64_t cols, int64_t ks,
                       bool from_zero)
{
    int64_t padded = round_up(ks, 32), lda = padded + 16;
#if HARDWARE_FMA
    unsigned long saved = gemm_flush_on();
#endif
    for (int64_t j = 0; j < cols; j += NR)
        for (int64_t i = 0; i < rows; i += MR)
            tile_bf16(c + i * ldc + j, ldc, (const float *)a + i * lda, lda, (const float *)b + j * padded, padded,
                      from_zero);
#if HARDWARE_FMA
    gemm_flush_restore(saved);
#endif
}

/* ---- storing ---- */

static void store(const GemmOutput *out, const float *c, int64_t ldc, int64_t i0, int64_t rows, int64_t j0,
                  int64_t cols)
{
    v16 alpha = v16_set1(out->alpha);
    for (int64_t i = 0; i < rows; i++) {
        char *row = (char *)out->data + (size_t)((i0 + i) * out->ld + j0) * dtype_bytes(out->dtype);
        for (int64_t j = 0; j < cols; j += 16) {
            v16 v = v16_mul(alpha, v16_load(c + i * ldc + j)); /* C is padded: reading past cols is fine */
            if (out->bias) v = v16_add(v, v16_load_row(out->bias + j0, DTYPE_FP32, j, cols, 0));
            if (out->accumulate) v = v16_add(v16_load_row(row, out->dtype, j, cols, 0), v);
            v16_store_row(row, out->dtype, j, cols, v);
        }
    }
}

const GemmKernel ISA_NAME(gemm_kernel_fp32) = {.mr = MR,
                                               .nr = NR,
                                               .mc = MC,
                                               .kc = KC,
                                               .k_multiple = 1,
                                               .element_bytes = 4,
                                               .pack_a = pack_a,
                                               .pack_b = pack_b,
                                               .block = block_fp32,
                                               .store = store};
const GemmKernel ISA_NAME(gemm_kernel_bf16) = {.mr = MR,
                                               .nr = NR,
                                               .mc = MC,
                                               .kc = KC,
                                               .k_multiple = 32,
                                               .element_bytes = 4,
                                               .pack_a = pack_a,
                                               .pack_b = pack_b,
                                               .block = block_bf16,
                                               .store = store};
