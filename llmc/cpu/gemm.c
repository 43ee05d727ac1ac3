/* The driver of matrix products: see gemm.h for the blocking. */
#include "gemm.h"

#ifdef _OPENMP
#include <omp.h>
#endif

float gemm_e4m3[128];

void gemm_fill_e4m3(void)
{
    for (int b = 0; b < 128; b++) gemm_e4m3[b] = e4m3_to_f32((uint8_t)b);
}

enum { C_LD = GEMM_PANEL_COLS + 16, MAX_TILE = 64 }; /* + 16: consecutive rows of C do not share cache sets */

static int thread_index(void)
{
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

static size_t aligned(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

static size_t b_panel_bytes(const GemmKernel *k)
{
    return (size_t)(GEMM_PANEL_COLS + k->nr) * (GEMM_SLICE_K + GEMM_SLICE_K / k->kc * 16 + 32) * k->element_bytes;
}

static size_t a_panel_bytes(const GemmKernel *k) { return (size_t)(k->mc + k->mr) * (k->kc + 16) * k->element_bytes; }

static size_t larger(size_t a, size_t b) { return aligned(a > b ? a : b); }

static size_t c_bytes(void) { return aligned((size_t)(GEMM_SUPER_ROWS + MAX_TILE) * C_LD * sizeof(float)); }

size_t gemm_workspace_bytes(const GemmKernel kernel[2], int threads)
{
    return larger(b_panel_bytes(&kernel[0]), b_panel_bytes(&kernel[1])) + c_bytes() +
           larger(a_panel_bytes(&kernel[0]), a_panel_bytes(&kernel[1])) * (size_t)threads;
}

void gemm_workspace_set(GemmWorkspace *w, const GemmKernel kernel[2], int threads, void *memory)
{
    w->b_panel = memory;
    w->c = (float *)(w->b_panel + larger(b_panel_bytes(&kernel[0]), b_panel_bytes(&kernel[1])));
    w->a_panels = (char *)w->c + c_bytes();
    w->a_panel_bytes = larger(a_panel_bytes(&kernel[0]), a_panel_bytes(&kernel[1]));
    w->threads = threads;
}

/* How the rows and columns of one super-block x panel are divided over threads. */
typedef struct {
    int64_t block_rows, blocks; /* blocks of rows, each a multiple of mr high but for the last */
    int64_t part_cols, parts;   /* few rows (generate): the panel's columns are divided too */
} Division;

static Division divide(const GemmKernel *kernel, int64_t rows, int64_t cols, int threads)
{
    Division d;
    d.block_rows = min_i64(kernel->mc, round_up(ceil_div(rows, threads), kernel->mr));
    d.blocks = ceil_div(rows, d.block_rows);
    d.part_cols = round_up(ceil_div(cols, max_i64(1, threads / d.blocks)), kernel->nr);
    d.parts = ceil_div(cols, d.part_cols);
    return d;
}

/* One slice of K for one block of rows and part of columns: packs A by passes of kc, multiplies into c. */
static void multiply_block(const GemmKernel *kernel, const GemmWorkspace *w, float *c, const GemmInput *a, int64_t i0,
                           int64_t rows, int64_t col0, int64_t cols, int64_t panel_cols, int64_t k0, int64_t ks)
{
    char *a_panel = w->a_panels + (size_t)thread_index() * w->a_panel_bytes;
    for (int64_t k = 0; k < ks; k += kernel->kc) {
        int64_t pass = min_i64(kernel->kc, ks - k), padded = round_up(pass, kernel->k_multiple);
        const char *b_pass = w->b_panel + (size_t)(panel_cols * k) * kernel->element_bytes;
        kernel->pack_a(a_panel, a, i0, rows, k0 + k, pass);
        kernel->block(c, C_LD, a_panel, b_pass + (size_t)(col0 * padded) * kernel->element_bytes, rows, cols, pass,
                      k0 + k == 0);
    }
}

/* All threads together: the panel of B for columns j0.. and the slice of K at k0, in passes of kc. */
static void pack_panel(const GemmKernel *kernel, const GemmWorkspace *w, const GemmInput *b, int64_t j0, int64_t cols,
                       int64_t k0, int64_t ks)
{
    int64_t panel_cols = round_up(cols, kernel->nr), groups = panel_cols / kernel->nr,
            passes = ceil_div(ks, kernel->kc);
#pragma omp for schedule(static) collapse(2)
    for (int64_t p = 0; p < passes; p++)
        for (int64_t g = 0; g < groups; g++) {
            int64_t k = p * kernel->kc, pass = min_i64(kernel->kc, ks - k), padded = round_up(pass, kernel->k_multiple);
            int64_t j = g * kernel->nr;
            kernel->pack_b(w->b_panel + (size_t)(panel_cols * k + j * padded) * kernel->element_bytes, b, j0 + j,
                           min_i64(kernel->nr, cols - j), k0 + k, pass);
        }
}

void gemm(const GemmKernel *kernel, const GemmWorkspace *w, int64_t M, int64_t N, int64_t K, GemmInput a, GemmInput b,
          GemmOutput out)
{
#pragma omp parallel num_threads(w->threads)
    for (int64_t i0 = 0; i0 < M; i0 += GEMM_SUPER_ROWS) {
        int64_t rows = min_i64(GEMM_SUPER_ROWS, M - i0);
        for (int64_t j0 = 0; j0 < N; j0 += GEMM_PANEL_COLS) {
            int64_t cols = min_i64(GEMM_PANEL_COLS, N - j0), panel_cols = round_up(cols, kernel->nr);
            Division d = divide(kernel, rows, cols, w->threads);
            for (int64_t k0 = 0; k0 < K; k0 += GEMM_SLICE_K) {
                int64_t ks = min_i64(GEMM_SLICE_K, K - k0);
                pack_panel(kernel, w, &b, j0, cols, k0, ks);
#pragma omp for schedule(static)
                for (int64_t task = 0; task < d.blocks * d.parts; task++) {
                    int64_t i = task / d.parts * d.block_rows, j = task % d.parts * d.part_cols;
                    int64_t block_rows = min_i64(d.block_rows, rows - i), part_cols = min_i64(d.part_cols, cols - j);
                    float *c = w->c + i * C_LD + j;
                    multiply_block(kernel, w, c, &a, i0 + i, block_rows, j, part_cols, panel_cols, k0, ks);
                    if (k0 + ks == K) kernel->store(&out, c, C_LD, i0 + i, block_rows, j0 + j, part_cols);
                }
            }
        }
    }
}

void gemm_small(const GemmKernel *kernel, float *c, int64_t ldc, int64_t M, int64_t N, int64_t K, GemmInput a,
                GemmInput b, bool from_zero, void *panel_a, void *panel_b)
{
    int64_t padded = round_up(K, kernel->k_multiple);
    kernel->pack_a(panel_a, &a, 0, M, 0, K);
    for (int64_t j = 0; j < N; j += kernel->nr)
        kernel->pack_b((char *)panel_b + (size_t)(j * padded) * kernel->element_bytes, &b, j,
                       min_i64(kernel->nr, N - j), 0, K);
    kernel->block(c, ldc, panel_a, panel_b, M, N, K, from_zero);
}
