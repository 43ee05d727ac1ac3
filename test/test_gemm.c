/* Matrix products of the CPU backend: every instruction set and thread count gives the bits of the order of summation
 * in gemm.h, written here once more as three plain loops, on ordinary and on hostile data and around every tile edge.
 * NVFP4 products also against the exact sum in 64-bit fixed point, within the bound that gemm.h derives: every product is
 * a multiple of 2^-20 and 16 of them sum to less than 2^47 of those, so int64 is exact up to K = 2^20.
 */
#include "cpu/backend.h"
#include "cpu/cpu.h"
#include "mathfn.h"
#include "test.h"

static const char *const ISAS[] = {"portable", "avx2", "avx512", "amx"};

static uint64_t random_state = 88172645463325252u;
static uint64_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    return random_state ^= random_state << 17;
}
static double uniform(void) { return (double)(random_bits() >> 11) * 0x1p-53; }
static double normal(void) { return f64_inverse_normal(uniform() * 0.999999 + 5e-7); }

typedef enum {
    NORMAL,
    WIDE,
    TINY_INPUT,
    TINY_PRODUCT,
    HUGE_PRODUCT,
    SPECIAL,
    ANY_FINITE,
    ZEROS,
    FLUSH_EDGE,
    CLASSES
} Class;
static const char *const CLASS_NAME[CLASSES] = {
    "normal",      "wide range",      "denormal inputs", "products around 2^-126", "products around 2^127",
    "NaN and Inf", "any finite bits", "signed zeros",    "around 2^-126"};

static float draw(Class class)
{
    uint16_t bits;
    switch (class) {
    case NORMAL:
        return (float)normal();
    case WIDE:
        return ldexpf((float)normal(), (int)(random_bits() % 121) - 60);
    case TINY_INPUT:
        return ldexpf((float)normal(), -126 + (int)(random_bits() % 8) - 6);
    case TINY_PRODUCT:
        return ldexpf((float)normal(), -63 + (int)(random_bits() % 5) - 2);
    case HUGE_PRODUCT:
        return ldexpf((float)normal(), 61 + (int)(random_bits() % 4));
    case SPECIAL:
        return random_bits() % 50 ? (float)normal() : random_bits() & 1 ? INFINITY : NAN;
    case ZEROS:
        return random_bits() % 3 ? (float)normal() : random_bits() & 1 ? -0.0f : 0.0f;
    case FLUSH_EDGE:
        return random_bits() & 1 ? 0x1p-63f * (1 + (float)(random_bits() % 3)) : -0x1p-64f;
    default:
        bits = (uint16_t)random_bits();
        return bf16_to_f32((bits & 0x7f80) == 0x7f80 ? bits & 0xbfff : bits);
    }
}

/* ---- the law, as plain loops ---- */

#ifdef __aarch64__ /* tininess before rounding: differs from x86 within half an ulp of 2^-126 only */
static const double TINY = 0x1p-126;
#else
static const double TINY = 0x1.ffffffp-127;
#endif
static float flushed(double x) { return (float)(fabs(x) < TINY ? copysign(0.0, x) : x); }

/* Where an NVFP4 element stands: its block, and its place in it. */
static int64_t block_of(const GemmInput *in, int64_t i, int64_t k, int64_t *place)
{
    *place = in->k_contiguous ? k % 16 : i % 16;
    return in->k_contiguous ? i * in->ld + k / 16 * in->ld_block : k * in->ld + i / 16;
}

static uint8_t fp4_scale_byte(const GemmInput *in, int64_t i, int64_t k)
{
    int64_t row = in->k_contiguous ? i : k, column = in->k_contiguous ? k / 16 * in->ld_block : i / 16;
    return in->block_scale[(in->scale_shift ? row / 16 : row) * in->ld + column];
}

static int fp4_code(const GemmInput *in, int64_t block, int64_t place)
{
    return ((const uint8_t *)in->data)[8 * block + place / 2] >> 4 * (place % 2) & 15;
}

static float element(const GemmInput *in, int64_t i, int64_t k)
{
    if (in->block_scale) {
        int64_t place, block = block_of(in, i, k, &place);
        return e2m1_to_f32((uint8_t)fp4_code(in, block, place)) * e4m3_to_f32(fp4_scale_byte(in, i, k));
    }
    int64_t at = in->k_contiguous ? i * in->ld + k : k * in->ld + i;
    return in->dtype == DTYPE_BF16 ? bf16_to_f32(((const uint16_t *)in->data)[at]) : ((const float *)in->data)[at];
}

static float sum_of_products(const GemmInput *a, const GemmInput *b, int64_t i, int64_t j, int64_t K)
{
    float c = 0;
    if (a->dtype == DTYPE_FP32) {
        for (int64_t k = 0; k < K; k++) c = fmaf(element(a, i, k), element(b, j, k), c);
        return c;
    }
    for (int64_t k0 = 0; k0 < K; k0 += 32) {
        float sum[2] = {0, 0};
        for (int64_t k = k0; k < k0 + 32; k++) {
            double x = k < K ? (double)element(a, i, k) : 0, y = k < K ? (double)element(b, j, k) : 0;
            double product = (double)flushed(x) * (double)flushed(y);
            sum[k & 1] = flushed((double)sum[k & 1] + product);
        }
        c = flushed((double)c + (double)flushed((double)sum[0] + (double)sum[1]));
    }
    return c;
}

/* ---- one problem ---- */

typedef struct {
    int64_t M, N, K;
    DType dtype;
    bool a_contiguous, b_contiguous, bias, accumulate;
    Class class;
} Problem;

static void *matrix(int64_t rows, int64_t cols, DType dtype, Class class)
{
    char *data = xmalloc((size_t)(rows * cols) * dtype_bytes(dtype));
    for (int64_t i = 0; i < rows * cols; i++) {
        float x = draw(class);
        if (dtype == DTYPE_BF16)
            ((uint16_t *)data)[i] = bf16_from_f32(x);
        else
            ((float *)data)[i] = x;
    }
    return data;
}

static bool same_bits(float a, float b) { return f32_bits(a) == f32_bits(b) || (a != a && b != b); }

static void open_isa(const char *isa, int threads, char **memory)
{
    const Ops *ops;
    Error error;
    Need need = {.N = 64, .T = 64, .cols = 64, .V = 64, .head_dim = 16, .group = 1};
    if (cpu_open(&ops, isa, threads, &error)) die("%s", error.text);
    free(*memory);
    *memory = aligned_alloc(4096, (ops->workspace_bytes(&need) + 4095) / 4096 * 4096);
    ops->workspace_set(*memory, &need);
}

static bool have(const char *isa)
{
    const Ops *ops;
    return cpu_open(&ops, isa, 1, NULL) == 0;
}

static void run_problem(const Problem *p, char **memory, bool many_threads)
{
    int64_t lda = p->a_contiguous ? p->K + 3 : p->M + 5, ldb = p->b_contiguous ? p->K + 1 : p->N + 2;
    void *a = matrix(p->a_contiguous ? p->M : p->K, lda, p->dtype, p->class);
    void *b = matrix(p->b_contiguous ? p->N : p->K, ldb, p->dtype, p->class);
    GemmInput in_a = {.data = a, .dtype = p->dtype, .ld = lda, .k_contiguous = p->a_contiguous};
    GemmInput in_b = {.data = b, .dtype = p->dtype, .ld = ldb, .k_contiguous = p->b_contiguous};
    float *bias = matrix(1, p->N, DTYPE_FP32, NORMAL), *old = matrix(p->M, p->N, DTYPE_FP32, NORMAL);
    float *expected = xmalloc((size_t)(p->M * p->N) * sizeof *expected);
    float *got = xmalloc((size_t)(p->M * p->N) * sizeof *got);

    for (int64_t i = 0; i < p->M; i++)
        for (int64_t j = 0; j < p->N; j++) {
            float c = sum_of_products(&in_a, &in_b, i, j, p->K);
            if (p->bias) c = c + bias[j];
            if (p->accumulate) c = old[i * p->N + j] + c;
            expected[i * p->N + j] = c;
        }
    for (size_t s = 0; s < 4; s++)
        for (int threads = 1; threads <= (many_threads ? 3 : 1); threads++) {
            if (!have(ISAS[s])) continue;
            open_isa(ISAS[s], threads, memory);
            memcpy(got, old, (size_t)(p->M * p->N) * sizeof *got);
            gemm(&cpu.gemm[p->dtype], &cpu.workspace, p->M, p->N, p->K, in_a, in_b,
                 (GemmOutput){got, DTYPE_FP32, p->N, p->bias ? bias : NULL, p->accumulate, 1});
            for (int64_t i = 0; i < p->M * p->N; i++)
                if (!CHECK(same_bits(got[i], expected[i]),
                           "%s, %d threads, %s, %s, M %ld N %ld K %ld: [%ld,%ld] %a not %a", ISAS[s], threads,
                           p->dtype ? "bf16" : "fp32", CLASS_NAME[p->class], (long)p->M, (long)p->N, (long)p->K,
                           (long)(i / p->N), (long)(i % p->N), (double)got[i], (double)expected[i]))
                    break;
        }
    free(a), free(b), free(bias), free(old), free(expected), free(got);
}

/* ---- NVFP4 ---- */

typedef enum { BY_ROW, BY_COL, ACROSS } Layout; /* row view, column view, weight in 16 x 16 blocks read across */

/* Scales: of all sizes; one block in four extreme; or all values the largest, with signs that cancel from one block to the
 * next. */
typedef enum { ALL_SIZES, EXTREME, CANCELLING } Fp4Class;

/* n rows of K, in one of the layouts. */
static GemmInput fp4_input(Layout layout, int64_t n, int64_t K, Fp4Class class)
{
    bool square = layout == ACROSS || (layout == BY_ROW && random_bits() & 1); /* 16 rows share a scale */
    int64_t rows = layout == ACROSS ? K : n, columns = ceil_div(layout == ACROSS ? n : K, 16), blocks = rows * columns;
    uint8_t *codes = xcalloc((size_t)blocks, 8), *scales = xmalloc((size_t)blocks);
    static const uint8_t EDGE[] = {0x00, 0x01, 0x07, 0x08, 0x7e, 0x7d};
    GemmInput in = {.data = codes, .dtype = DTYPE_BF16, .block_scale = scales, .k_contiguous = layout != ACROSS};
    in.ld = layout == BY_ROW ? ceil_div(K, 16) : layout == BY_COL ? 1 : ceil_div(n, 16);
    in.ld_block = layout == BY_ROW ? 1 : n;
    in.scale_shift = square ? 4 : 0;
    for (int64_t b = 0; b < blocks; b++)
        scales[b] = class == CANCELLING                          ? 0x7e
                    : class == EXTREME && random_bits() % 4 == 0 ? EDGE[random_bits() % 6]
                                                                 : (uint8_t)(random_bits() % 0x7f);
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < K; k++) {
            int64_t place, block = block_of(&in, i, k, &place);
            uint64_t code = random_bits() & 15;
            if (class == CANCELLING)
                code = 7 | (layout == BY_ROW && k / 16 % 2 ? 8 : 0) | (random_bits() % 1000 == 0 ? 8 : 0);
            codes[8 * block + place / 2] |= (uint8_t)(code << 4 * (place % 2));
        }
    return in;
}

/* The exact sum and the sum of magnitudes, in units of 2^-20: codes in halves, scales in 2^-9. */
static void exact_sum(const GemmInput *a, const GemmInput *b, int64_t i, int64_t j, int64_t K, int64_t *sum,
                      double *size)
{
    static const int HALVES[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    *sum = 0;
    *size = 0;
    for (int64_t k = 0; k < K; k++) {
        int64_t term = 1, place;
        for (int side = 0; side < 2; side++) {
            const GemmInput *in = side ? b : a;
            int64_t block = block_of(in, side ? j : i, k, &place);
            int code = fp4_code(in, block, place);
            term *= (int64_t)(e4m3_to_f32(fp4_scale_byte(in, side ? j : i, k)) * 512) *
                    (code & 8 ? -HALVES[code & 7] : HALVES[code & 7]);
        }
        *sum += term;
        *size += fabs((double)term);
    }
}

static double worst; /* distance from the exact sum, of the bound */

static void run_fp4(Layout of_a, Layout of_b, int64_t M, int64_t N, int64_t K, Fp4Class class, char **memory)
{
    GemmInput a = fp4_input(of_a, M, K, class), b = fp4_input(of_b, N, K, class);
    float alpha = ldexpf((float)(1 + uniform()), (int)(random_bits() % 40) - 30),
          *bias = matrix(1, N, DTYPE_FP32, NORMAL);
    float *old = matrix(M, N, DTYPE_FP32, NORMAL), *expected = xmalloc((size_t)(M * N) * sizeof *expected),
          *got = xmalloc((size_t)(M * N) * sizeof *got);
    bool with_bias = random_bits() & 1, accumulate = !with_bias && random_bits() & 1;
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = 0; j < N; j++) {
            int64_t sum;
            double size, u = 0x1p-24, roundings = 17 + (double)ceil_div(K, 32);
            float c = sum_of_products(&a, &b, i, j, K);
            exact_sum(&a, &b, i, j, K, &sum, &size);
            double bound = (pow(1 + u, roundings) - 1) * size * 0x1p-20,
                   distance = fabs((double)c - (double)sum * 0x1p-20);
            CHECK(distance <= bound, "M %ld N %ld K %ld: [%ld,%ld] %g from the exact sum, bound %g", (long)M, (long)N,
                  (long)K, (long)i, (long)j, distance, bound);
            if (bound > 0) worst = fmax(worst, distance / bound);
            c = alpha * c;
            if (with_bias) c = c + bias[j];
            expected[i * N + j] = accumulate ? old[i * N + j] + c : c;
        }
    for (size_t s = 0; s < 4; s++)
        for (int threads = 1; threads <= 3; threads += 2) {
            if (!have(ISAS[s])) continue;
            open_isa(ISAS[s], threads, memory);
            memcpy(got, old, (size_t)(M * N) * sizeof *got);
            gemm(&cpu.gemm[DTYPE_BF16], &cpu.workspace, M, N, K, a, b,
                 (GemmOutput){got, DTYPE_FP32, N, with_bias ? bias : NULL, accumulate, alpha});
            for (int64_t i = 0; i < M * N; i++)
                if (!CHECK(same_bits(got[i], expected[i]),
                           "%s, %d threads, layouts %d %d, M %ld N %ld K %ld: [%ld,%ld] %a not %a", ISAS[s], threads,
                           of_a, of_b, (long)M, (long)N, (long)K, (long)(i / N), (long)(i % N), (double)got[i],
                           (double)expected[i]))
                    break;
        }
    free((void *)a.data), free((void *)a.block_scale), free((void *)b.data), free((void *)b.block_scale);
    free(bias), free(old), free(expected), free(got);
}

static void test_fp4(char **memory)
{
    static const int64_t EDGE[] = {1, 13, 14, 15, 16, 17, 31, 32, 33, 65, 113};
    test_case("NVFP4: the order of summation and the exact sum, in every layout");
    for (Layout of_a = BY_ROW; of_a <= BY_COL; of_a++)
        for (Layout of_b = BY_ROW; of_b <= ACROSS; of_b++) {
            for (int64_t K = 16; K <= 8192; K *= 2)
                run_fp4(of_a, of_b, K > 1000 ? 5 : 19, K > 1000 ? 7 : 35, K, K & 64 ? EXTREME : ALL_SIZES, memory);
            for (int round = 0; round < (test_long() ? 100 : 12); round++)
                run_fp4(of_a, of_b, EDGE[random_bits() % 11], EDGE[random_bits() % 11],
                        1 + (int64_t)(random_bits() % 333), random_bits() & 1, memory);
        }
    run_fp4(BY_ROW, BY_ROW, 3, 5, GEMM_SLICE_K + 77, EXTREME, memory);
    run_fp4(BY_COL, BY_COL, GEMM_SUPER_ROWS + 14, 3, 40, EXTREME, memory);
    run_fp4(BY_ROW, ACROSS, 5, GEMM_PANEL_COLS + 9, 70, EXTREME, memory);
    printf("measured largest distance from the exact sum: %.2f of the bound\n", worst);
}

int main(void)
{
    char *memory = NULL;

    test_case("every instruction set of this machine is tried");
    for (size_t s = 0; s < 4; s++)
        if (!have(ISAS[s])) printf("skipped %s: not on this machine\n", ISAS[s]);
    CHECK(have("portable"), "portable is everywhere");

    for (int dtype = 0; dtype < 2; dtype++)
        for (int class = 0; class < CLASSES; class ++) {
            char name[64];
            snprintf(name, sizeof name, "%s, %s", dtype ? "bf16" : "fp32", CLASS_NAME[class]);
            test_case(name);
            for (int64_t K = 16; K <= 48; K += 16)
                run_problem(&(Problem){33, 35, K, dtype, true, true, false, false, class}, &memory, false);
            run_problem(&(Problem){17, 31, 333, dtype, true, false, true, false, class}, &memory, false);
            run_problem(&(Problem){19, 16, 768, dtype, false, false, false, true, class}, &memory, false);
            if (class == NORMAL || test_long())
                run_problem(&(Problem){9, 13, 4096, dtype, false, true, true, false, class}, &memory, false);
        }

    test_case("odd sizes around every tile edge, both orders of both inputs, threads");
    for (int round = 0; round < (test_long() ? 400 : 60); round++) {
        static const int64_t EDGE[] = {1, 5, 6, 7, 13, 14, 15, 16, 17, 28, 31, 32, 33, 47, 63, 65, 113, 130};
        uint64_t r = random_bits();
        run_problem(&(Problem){EDGE[r % 18], EDGE[r / 18 % 18], 1 + (int64_t)(r / 324 % 290), r >> 40 & 1, r >> 41 & 1,
                               r >> 42 & 1, r >> 43 & 1, r >> 44 & 1, NORMAL},
                    &memory, round % 3 == 0);
    }

    test_case("more rows than a super-block, more columns than a panel, more k than a slice");
    run_problem(&(Problem){2 * 7 + GEMM_SUPER_ROWS, 3, 40, DTYPE_BF16, true, true, false, false, NORMAL}, &memory,
                true);
    run_problem(&(Problem){5, GEMM_PANEL_COLS + 9, 70, DTYPE_FP32, true, false, false, false, NORMAL}, &memory, true);
    run_problem(&(Problem){3, 5, GEMM_SLICE_K + 77, DTYPE_BF16, false, false, false, true, NORMAL}, &memory, true);
    run_problem(&(Problem){3, 5, GEMM_SLICE_K + 77, DTYPE_FP32, false, true, false, true, NORMAL}, &memory, true);

    test_case("a BF16 result is the FP32 one rounded once; FTZ is off again after a product");
    for (size_t s = 0; s < 4; s++) {
        if (!have(ISAS[s])) continue;
        open_isa(ISAS[s], 2, &memory);
        enum { M = 21, N = 37, K = 64 };
        uint16_t *a = matrix(M, K, DTYPE_BF16, NORMAL), *b = matrix(N, K, DTYPE_BF16, NORMAL), out[M * N];
        GemmInput in_a = {.data = a, .dtype = DTYPE_BF16, .ld = K, .k_contiguous = true}, in_b = in_a;
        in_b.data = b;
        gemm(&cpu.gemm[DTYPE_BF16], &cpu.workspace, M, N, K, in_a, in_b,
             (GemmOutput){out, DTYPE_BF16, N, NULL, false, 1});
        for (int i = 0; i < M * N; i++)
            CHECK(out[i] == bf16_from_f32(sum_of_products(&in_a, &in_b, i / N, i % N, K)), "%s element %d", ISAS[s], i);
        volatile float tiny = 0x1p-126f;
        CHECK(tiny / 2 != 0, "%s left denormals flushed", ISAS[s]);
        free(a), free(b);
    }
    test_fp4(&memory);
    free(memory);
    return test_done();
}
