/* params.h: the table (order, sizes, offsets, counts of every architecture) and the initial values: their distribution,
 * that nothing correlates with its neighbours, other layers or other matrices, and that they do not depend on how the
 * rows are divided.
 */
#include "params.h"

#include "philox.h"
#include "test.h"

#include <math.h>

static GPTConfig config_of(Arch arch, bool tied)
{
    Error error;
    GPTConfig c = {.arch = arch,
                   .L = 3,
                   .C = 40,
                   .NH = 4,
                   .NKV = arch == ARCH_GPT2 ? 4 : 2,
                   .HD = arch == ARCH_QWEN3 ? 14 : 10,
                   .F = 70,
                   .V = 300,
                   .T = 33,
                   .rope_theta = 1e4,
                   .init_std = 0.02f,
                   .embedding_init_std = 0.3f,
                   .tied = tied};
    if (config_finish(&c, &error)) die("%s", error.text);
    return c;
}

/* ---- the table ---- */

static void check_param(const Param *p, const GPTConfig *c, DType master)
{
    bool vector = p->rows == 1, vocabulary = p->kind == PARAM_WTE || p->kind == PARAM_LM_HEAD;
    CHECK(p->rows_padded == (vocabulary ? 384 : p->rows), "%s has %d rows in memory", p->name, (int)p->rows_padded);
    CHECK(p->decay == !vector && p->master == (vector ? DTYPE_FP32 : master), "%s: decay or master", p->name);
    CHECK(p->offset % 64 == 0 && p->layer >= 0 && p->layer <= c->L, "%s: offset or layer", p->name);
    CHECK((p->init == INIT_NORMAL) == !vector, "%s: init", p->name);
    bool gain = strstr(p->name, "gain") != NULL;
    CHECK(!vector || p->init == (gain ? INIT_ONE : INIT_ZERO), "%s: init", p->name);
    double std = p->kind == PARAM_WTE || p->kind == PARAM_WPE ? 0.3 : 0.02;
    if (p->kind == PARAM_O || p->kind == PARAM_DOWN) std /= sqrt(2.0 * (double)c->L);
    CHECK(vector || fabs((double)p->init_std - std) < 1e-7, "%s: std %g, not %g", p->name, (double)p->init_std, std);
}

static void check_table(Arch arch, bool tied, DType master)
{
    GPTConfig c = config_of(arch, tied);
    ParamTable t = params_table(&c, master);
    int64_t total = 0;
    size_t *used = xcalloc((size_t)t.buckets, sizeof *used);
    CHECK(t.buckets == c.L + (tied ? 1 : 2) && t.layers == c.L, "%d buckets", t.buckets);
    for (int i = 0; i < t.count; i++) {
        const Param *p = &t.param[i];
        check_param(p, &c, master);
        total += p->rows * p->cols;
        if (!CHECK(p->bucket >= 0 && p->bucket < t.buckets, "%s: bucket %d", p->name, p->bucket)) continue;
        CHECK(i == 0 || p->bucket == t.param[i - 1].bucket || p->bucket == t.param[i - 1].bucket + 1, "order of %s",
              p->name);
        CHECK(p->bucket == p->layer || p->layer == c.L, "%s is in bucket %d of layer %d", p->name, p->bucket, p->layer);
        CHECK(p->offset == used[p->bucket], "%s begins at %zu, not %zu", p->name, p->offset, used[p->bucket]);
        used[p->bucket] += (size_t)round_up(p->rows_padded * p->cols, 64);
        for (int k = 0; k < i; k++) {
            CHECK(strcmp(p->name, t.param[k].name), "two parameters are called %s", p->name);
            CHECK(p->kind != t.param[k].kind || p->layer != t.param[k].layer, "%s draws the numbers of %s", p->name,
                  t.param[k].name);
        }
        CHECK(param_pieces(p) == (p->rows + 15) / 16, "%s: pieces", p->name);
    }
    for (int b = 0; b < t.buckets; b++) CHECK(used[b] == t.bucket_elements[b], "bucket %d", b);
    CHECK(total == config_parameters(&c), "%s: %d parameters, config says %d", arch_name(arch), (int)total,
          (int)config_parameters(&c));
    free(used);
    params_free(&t);
}

/* What a block and the rest consist of, in order: written out once. */
static void check_names(Arch arch, bool tied, const char *const *expected)
{
    GPTConfig c = config_of(arch, tied);
    ParamTable t = params_table(&c, DTYPE_BF16);
    int i = 0;
    for (int l = 0; l < 3; l++)
        for (const char *const *name = expected; strcmp(*name, "|"); name++, i++) {
            char full[32];
            snprintf(full, sizeof full, "block.%d.%s", l, *name);
            CHECK(i < t.count && !strcmp(t.param[i].name, full), "parameter %d is %s, not %s", i, t.param[i].name,
                  full);
        }
    while (strcmp(*expected, "|")) expected++;
    for (expected++; *expected; expected++, i++)
        CHECK(i < t.count && !strcmp(t.param[i].name, *expected), "parameter %d is not %s", i, *expected);
    CHECK(i == t.count, "%d parameters, expected %d", t.count, i);
    params_free(&t);
}

static void test_table(void)
{
    static const char *const GPT2[] = {"qkv",     "o",         "up",         "down",       "qkv_bias",   "o_bias",
                                       "up_bias", "down_bias", "norm1_gain", "norm1_bias", "norm2_gain", "norm2_bias",
                                       "|",       "wte",       "wpe",        "final_gain", "final_bias", NULL};
    static const char *const LLAMA[] = {"qkv", "o",   "up",      "down",       "norm1_gain", "norm2_gain",
                                        "|",   "wte", "lm_head", "final_gain", NULL};
    static const char *const QWEN3[] = {"qkv",    "o",      "up", "down", "norm1_gain", "norm2_gain",
                                        "q_gain", "k_gain", "|",  "wte",  "final_gain", NULL};
    test_case("the table of every architecture: order, sizes, offsets, buckets, the count of parameters");
    check_table(ARCH_GPT2, true, DTYPE_BF16);
    for (int tied = 0; tied < 2; tied++) {
        check_table(ARCH_LLAMA, tied, DTYPE_FP32);
        check_table(ARCH_QWEN3, tied, DTYPE_BF16);
    }
    check_names(ARCH_GPT2, true, GPT2);
    check_names(ARCH_LLAMA, false, LLAMA);
    check_names(ARCH_QWEN3, true, QWEN3);

    test_case("shapes of the matrices");
    GPTConfig c = config_of(ARCH_QWEN3, true);
    ParamTable t = params_table(&c, DTYPE_BF16);
    static const int64_t ROWS[] = {(4 + 2 * 2) * 14, 40, 2 * 70, 40}, COLS[] = {40, 4 * 14, 40, 70};
    for (int i = 0; i < 4; i++)
        CHECK(t.param[i].rows == ROWS[i] && t.param[i].cols == COLS[i], "%s [%d, %d]", t.param[i].name,
              (int)t.param[i].rows, (int)t.param[i].cols);
    params_free(&t);
}

/* ---- initial values ---- */

static Param matrix(ParamKind kind, int layer, int64_t rows, int64_t cols)
{
    return (Param){
        .name = "matrix", .kind = kind, .layer = layer, .rows = rows, .cols = cols, .init = INIT_NORMAL, .init_std = 1};
}

static float *initial(const Param *p, uint64_t seed)
{
    float *x = xmalloc((size_t)(p->rows * p->cols) * sizeof *x);
    params_initial(p, seed, 0, p->rows, x);
    return x;
}

/* n draws of a standard normal: each moment lies within five deviations of its own distribution. */
static void check_moments(const char *what, const float *x, int64_t n)
{
    double sum[5] = {0}, size = (double)n, beyond2 = 0, beyond3 = 0;
    for (int64_t i = 0; i < n; i++) {
        double v = (double)x[i], power = 1;
        for (int k = 1; k <= 4; k++) sum[k] += power *= v;
        beyond2 += fabs(v) > 2;
        beyond3 += fabs(v) > 3;
    }
    double p2 = erfc(2 / sqrt(2)), p3 = erfc(3 / sqrt(2));
    CHECK(fabs(sum[1] / size) < 5 / sqrt(size), "%s: mean %g", what, sum[1] / size);
    CHECK(fabs(sum[2] / size - 1) < 5 * sqrt(2 / size), "%s: variance %g", what, sum[2] / size);
    CHECK(fabs(sum[3] / size) < 5 * sqrt(15 / size), "%s: third moment %g", what, sum[3] / size);
    CHECK(fabs(sum[4] / size - 3) < 5 * sqrt(96 / size), "%s: fourth moment %g", what, sum[4] / size);
    CHECK(fabs(beyond2 - size * p2) < 5 * sqrt(size * p2), "%s: %g beyond 2", what, beyond2);
    CHECK(fabs(beyond3 - size * p3) < 5 * sqrt(size * p3), "%s: %g beyond 3", what, beyond3);
}

static void check_uncorrelated(const char *what, const float *x, const float *y, int64_t n)
{
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += (double)x[i] * (double)y[i];
        squares += ((double)x[i] * (double)x[i] - 1) * ((double)y[i] * (double)y[i] - 1) / 2;
    }
    CHECK(fabs(sum) < 5 * sqrt((double)n), "%s: correlation %g", what, sum / (double)n);
    CHECK(fabs(squares) < 5 * sqrt((double)n), "%s: correlation of squares %g", what, squares / (double)n);
}

static void test_distribution(void)
{
    enum { ROWS = 1000, COLS = 333, N = ROWS * COLS };
    test_case("initial values: moments and tails of the normal distribution");
    Param p = matrix(PARAM_QKV, 1, ROWS, COLS);
    float *x = initial(&p, 1234);
    check_moments("all", x, N);
    for (int c = 0; c < 16; c++) { /* each place within a block of 16 columns: each word of each call */
        float *column = xmalloc(ROWS * 20 * sizeof *column);
        for (int r = 0; r < ROWS; r++)
            for (int b = 0; b < 20; b++) column[r * 20 + b] = x[r * COLS + 16 * b + c];
        check_moments("one place of 16", column, ROWS * 20);
        free(column);
    }

    test_case("initial values: neighbours, layers, kinds, seeds do not correlate");
    check_uncorrelated("next column", x, x + 1, N - 1);
    check_uncorrelated("fourth column on", x, x + 4, N - 4);
    check_uncorrelated("next block", x, x + 16, N - 16);
    check_uncorrelated("next row", x, x + COLS, N - COLS);
    Param other[] = {matrix(PARAM_QKV, 2, ROWS, COLS), matrix(PARAM_O, 1, ROWS, COLS),
                     matrix(PARAM_WTE, 1, ROWS, COLS)};
    for (int i = 0; i < 3; i++) {
        float *y = initial(&other[i], 1234);
        check_uncorrelated("another layer or kind", x, y, N);
        free(y);
    }
    for (int i = 0; i < 3; i++) {
        float *y = initial(&p, (uint64_t[]){1235, 1234 + ((uint64_t)1 << 32), 0}[i]);
        check_uncorrelated("another seed", x, y, N);
        free(y);
    }
    free(x);
}

static void test_places(void)
{
    enum { ROWS = 37, COLS = 45 };
    test_case("initial values are a function of the place alone: any division of the rows");
    Param p = matrix(PARAM_UP, 5, ROWS, COLS);
    float *x = initial(&p, 99), part[ROWS * COLS];
    for (int64_t size = 1; size <= ROWS; size++) {
        for (int64_t row = 0; row < ROWS; row += size)
            params_initial(&p, 99, row, min_i64(size, ROWS - row), part + row * COLS);
        CHECK(memcmp(part, x, sizeof part) == 0, "%d rows at a time", (int)size);
    }
    Param narrow = p; /* a column is the same in a narrower matrix: block columns count from the left */
    narrow.cols = 20;
    params_initial(&narrow, 99, 0, ROWS, part);
    for (int r = 0; r < ROWS; r++)
        CHECK(memcmp(part + r * 20, x + r * COLS, 20 * sizeof *x) == 0, "row %d of the narrow matrix", r);
    free(x);

    test_case("the standard deviation scales, vectors are zeros or ones");
    Param wide = matrix(PARAM_DOWN, 0, 500, 100), small = wide;
    small.init_std = 0.25f;
    float *a = initial(&wide, 3), *b = initial(&small, 3);
    for (int i = 0; i < 50000; i++) CHECK(b[i] == a[i] / 4, "element %d: %g, %g", i, (double)a[i], (double)b[i]);
    small.init = INIT_ONE;
    params_initial(&small, 3, 0, 500, b);
    for (int i = 0; i < 50000; i++) CHECK(b[i] == 1, "element %d", i);
    small.init = INIT_ZERO;
    params_initial(&small, 3, 0, 500, b);
    for (int i = 0; i < 50000; i++) CHECK(b[i] == 0, "element %d", i);
    free(a);
    free(b);
}

/* In place: element (r, c) is the inverse normal of word c % 4 of call c % 16 / 4 at (row, c / 16). */
static void test_law(void)
{
    test_case("initial values: the draw that the header describes");
    Param p = matrix(PARAM_WPE, 6, 4, 40);
    float *x = initial(&p, 0x123456789abcdefu);
    for (int r = 0; r < 4; r++)
        for (int c = 0; c < 40; c++) {
            Philox draw = philox_draw(0x123456789abcdefu, (uint32_t)r, (uint32_t)c / 16, 0, 6, ROLE_INIT + PARAM_WPE,
                                      (uint32_t)c % 16 / 4);
            double u = ((double)draw.word[c % 4] + 0.5) / 4294967296.0, value = (double)x[r * 40 + c];
            CHECK(fabs(erfc(-value / sqrt(2)) / 2 - u) < 1e-7, "[%d,%d] is %g", r, c, value);
        }
    free(x);
}

int main(void)
{
    test_table();
    test_distribution();
    test_places();
    test_law();
    return test_done();
}
