/* The matrix product C[M, N] (+)= A[M, K] B[N, K]^T of the CPU backend: a driver that packs and divides (gemm.c), over
 * a kernel per instruction set and dtype (gemm_kernel.c, gemm_amx.c).
 *
 * Order of summation, part of the numbers and the same for every kernel, blocking and thread count:
 *
 *     FP32   c = fma(a_k, b_k, c) for k = 0, 1, 2, ... from +0
 *     BF16   for each 32 consecutive k (the last group padded with +0):
 *                E = fma(a_k, b_k, E) over its even k, O likewise over its odd k, each from +0;  c += (E + O)
 *            where denormal inputs and every denormal result count as zero (tininess after rounding, sign kept).
 *
 * The BF16 order is what AMX's TDPBF16PS does, to the bit; x86 vector units do it with FTZ and DAZ set, plain C goes
 * through double. NVFP4 inputs are expanded to BF16 while they are packed and summed in that order.
 *
 * How far a sum can be from the exact one: of S = sum |a_k b_k|, u = 2^-24 and K padded to a multiple of 32, the product
 * inside an fma is exact, and a term passes at most 16 roundings in E or O, one in E + O and K / 32 in c. So
 * |c - exact| <= ((1 + u)^(17 + K / 32) - 1) S, plus 2^-126 for each operation where a denormal was flushed. For NVFP4 no
 * product is denormal (the smallest is 2^-20), and alpha adds one rounding of the result.
 *
 * K is never divided over threads: an element of C is one chain, held in FP32 between passes over K.
 *
 * Blocking (Goto, van de Geijn, "Anatomy of high-performance matrix multiplication", 2008):
 *
 *     rows M in super-blocks of 2048     C of a super-block x 512 columns is held in FP32 scratch: 4.3 MB
 *       columns N in panels of 512
 *         K in slices of 4096            B panel, packed by all threads together: at most 8 MB (L3)
 *           rows in blocks of mc         A block of mc x kc, packed by the thread that uses it (L2)
 *             micro-tiles of mr x nr     registers or AMX tiles
 *
 * Floor 2.
 */
#ifndef LLMC_CPU_GEMM_H
#define LLMC_CPU_GEMM_H

#include "tensor.h"

C_BEGIN

/* One input: element (i, k) is data[i * ld + k] when k is contiguous, else data[k * ld + i]. FP32 or BF16.
 *
 * With block_scale it is NVFP4: codes, 8 bytes a block of 16, whose values are code x block scale, each exact in BF16;
 * dtype is BF16. Element (i, k) is in block i * ld + k / 16 * ld_block, at k % 16, when k is contiguous; else in block
 * k * ld + i / 16, at i % 16. The scale of a block has its number; where 16 rows share one (scale_shift 4), the first
 * factor, i or k, counts by 16. */
typedef struct {
    const void *data;
    DType dtype;
    int64_t ld;
    bool k_contiguous;
    const uint8_t *block_scale; /* NULL: plain */
    int64_t ld_block;
    int scale_shift; /* 0 or 4 */
} GemmInput;

/* The result: out[i, j] = round(alpha c + bias[j]), or out[i, j] += alpha c (FP32). Each operation rounds once; alpha 1
 * changes nothing. */
typedef struct {
    void *data;
    DType dtype;
    int64_t ld;
    const float *bias; /* [N] or NULL */
    bool accumulate;
    float alpha;
} GemmOutput;

/* Panels hold whole micro-tiles, padded with zeros; k is padded to a multiple of k_multiple. Layouts are the kernel's
 * own: only its block() reads what its pack_*() wrote. A panel of `rows` x `ks` takes at most round_up(rows, mr or nr)
 * x (round_up(ks, 32) + 16) x element_bytes. */
typedef struct {
    int mr, nr, mc, kc, k_multiple;
    size_t element_bytes;
    void (*pack_a)(void *panel, const GemmInput *a, int64_t i0, int64_t rows, int64_t k0, int64_t ks);
    void (*pack_b)(void *panel, const GemmInput *b, int64_t j0, int64_t cols, int64_t k0, int64_t ks);
    /* c[rows, cols] (ld in floats, padded to whole tiles) = or += the product over ks k's */
    void (*block)(float *c, int64_t ldc, const void *a, const void *b, int64_t rows, int64_t cols, int64_t ks,
                  bool from_zero);
    void (*store)(const GemmOutput *out, const float *c, int64_t ldc, int64_t i0, int64_t rows, int64_t j0,
                  int64_t cols);
} GemmKernel;

extern const GemmKernel gemm_kernel_amx; /* gemm_amx.c: packs and multiplies; store is the AVX-512 kernel's */

extern float gemm_e4m3[128]; /* value of an E4M3 block scale, which is never negative */
void gemm_fill_e4m3(void);   /* once, before the first product in NVFP4 */

enum { GEMM_SUPER_ROWS = 2048, GEMM_PANEL_COLS = 512, GEMM_SLICE_K = 4096 };

typedef struct {
    char *b_panel;        /* shared by all threads */
    float *c;             /* [GEMM_SUPER_ROWS + padding][GEMM_PANEL_COLS + 16] shared */
    char *a_panels;       /* one per thread */
    size_t a_panel_bytes; /* of one */
    int threads;
} GemmWorkspace;

size_t gemm_workspace_bytes(const GemmKernel kernel[2], int threads);
void gemm_workspace_set(GemmWorkspace *workspace, const GemmKernel kernel[2], int threads, void *memory);

/* The whole product, on all threads. */
void gemm(const GemmKernel *kernel, const GemmWorkspace *workspace, int64_t M, int64_t N, int64_t K, GemmInput a,
          GemmInput b, GemmOutput out);

/* A small product on the calling thread, for attention: c is padded to whole tiles (rows to mr, cols to nr); panel_a
 * and panel_b hold the packed inputs. K at most kernel->kc. */
void gemm_small(const GemmKernel *kernel, float *c, int64_t ldc, int64_t M, int64_t N, int64_t K, GemmInput a,
                GemmInput b, bool from_zero, void *panel_a, void *panel_b);

/* FTZ and DAZ (x86), FZ (aarch64) on this thread: kernels set them around a block and restore what was. */
static inline unsigned long gemm_flush_on(void);
static inline void gemm_flush_restore(unsigned long saved);

#if defined(__x86_64__)
#include <xmmintrin.h>
static inline unsigned long gemm_flush_on(void)
{
    unsigned saved = _mm_getcsr();
    _mm_setcsr(saved | 0x8040);
    return saved;
}
static inline void gemm_flush_restore(unsigned long saved) { _mm_setcsr((unsigned)saved); }
#elif defined(__aarch64__)
static inline unsigned long gemm_flush_on(void)
{
    unsigned long saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" ::"r"(saved | 1ul << 24));
    return saved;
}
static inline void gemm_flush_restore(unsigned long saved) { __asm__ volatile("msr fpcr, %0" ::"r"(saved)); }
#else
static inline unsigned long gemm_flush_on(void) { return 0; }
static inline void gemm_flush_restore(unsigned long saved) { (void)saved; }
#endif

C_END
#endif
