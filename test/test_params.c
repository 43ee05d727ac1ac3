/* The parameter table and initialisation: order, sizes, bucket offsets; the statistics of the drawn values; values that
 * depend on the place in the whole parameter only.
 */
#include <math.h>

#include "params.h"
#include "test.h"

static GPTConfig config_of(Arch arch, bool tied)
{
    Error error;
    GPTConfig c = {.arch = arch,
                   .L = 3,
                   .C = 96,
                   .NH = 4,
                   .NKV = arch == ARCH_GPT2 ? 4 : 2,
                   .F = 160,
                   .V = 301,
                   .T = 40,
                   .tied = tied,
                   .rope_theta = 1e4,
                   .init_std = 0.05f,
                   .embedding_init_std = 0.5f};
    if (config_finish(&c, &error)) die("%s", error.text);
    return c;
}

static void test_table(Arch arch, bool tied)
{
    GPTConfig c = config_of(arch, tied);
    ParamTable t = params_table(&c, DTYPE_BF16);
    int64_t total = 0;
    int bucket = 0;
    char name[96];
    snprintf(name, sizeof name, "%s%s: the table", arch_name(arch), tied ? "" : " untied");
    test_case(name);
    CHECK(t.buckets == c.L + (tied ? 1 : 2) && t.layers == c.L, "%d buckets", t.buckets);
    for (int i = 0; i < t.count; i++) {
        const Param *p = &t.param[i];
        bool vocabulary = p->kind == PARAM_WTE || p->kind == PARAM_LM_HEAD;
        total += p->rows * p->cols;
        CHECK(p->bucket >= bucket && p->bucket < t.buckets, "%s is out of order", p->name);
        if (p->bucket > bucket || i == 0)
            CHECK(p->offset == 0, "%s does not start its bucket", p->name);
        else {
            const Param *q = &t.param[i - 1];
            CHECK(p->offset % 64 == 0 && p->offset >= q->offset + (size_t)(q->rows_padded * q->cols), "%s overlaps",
                  p->name);
        }
        bucket = p->bucket;
        CHECK(p->offset + (size_t)(p->rows_padded * p->cols) <= t.bucket_elements[p->bucket], "%s leaves its bucket",
              p->name);
        CHECK(p->rows_padded == (vocabulary ? 384 : p->rows), "%s has %ld rows in memory", p->name,
              (long)p->rows_padded);
        CHECK(p->decay == (p->rows > 1) && p->master == (p->decay ? DTYPE_BF16 : DTYPE_FP32), "%s: decay, dtype",
              p->name);
    }
    CHECK(total == config_parameters(&c), "%ld parameters, config says %ld", (long)total, (long)config_parameters(&c));
    params_free(&t);
}

static const Param *find(const ParamTable *t, ParamKind kind, int layer)
{
    for (int i = 0; i < t->count; i++)
        if (t->param[i].kind == kind && t->param[i].layer == layer) return &t->param[i];
    die("no such parameter");
}

typedef struct {
    double mean, std, kurtosis, neighbours;
} Statistics;

static Statistics statistics(const float *x, int64_t n)
{
    double sum = 0, squares = 0, fourth = 0, product = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)x[i];
    double mean = sum / (double)n;
    for (int64_t i = 0; i < n; i++) {
        double d = (double)x[i] - mean;
        squares += d * d;
        fourth += d * d * d * d;
        if (i) product += d * ((double)x[i - 1] - mean);
    }
    double variance = squares / (double)n;
    return (Statistics){mean, sqrt(variance), fourth / (double)n / variance / variance, product / squares};
}

static void test_statistics(void)
{
    GPTConfig c = config_of(ARCH_LLAMA, false);
    c.C = 512, c.F = 1024, c.V = 2000;
    ParamTable t = params_table(&c, DTYPE_FP32);
    test_case("initial values are normal with the stated deviations, uncorrelated");
    for (int i = 0; i < t.count; i++) {
        const Param *p = &t.param[i];
        int64_t n = p->rows * p->cols;
        float *x = xmalloc((size_t)n * sizeof *x);
        params_initial(p, 7, 0, p->rows, x);
        if (!p->decay) {
            for (int64_t k = 0; k < n; k++)
                CHECK(x[k] == (p->init == INIT_ONE ? 1.0f : 0.0f), "%s[%ld]", p->name, (long)k);
        } else {
            bool deep = p->kind == PARAM_O || p->kind == PARAM_DOWN;
            double std = p->kind == PARAM_WTE ? 0.5 : deep ? 0.05 / sqrt(2.0 * (double)c.L) : 0.05;
            double root = sqrt((double)n);
            Statistics s = statistics(x, n);
            CHECK(fabs(s.mean) < 5 * std / root, "%s: mean %g", p->name, s.mean);
            CHECK(fabs(s.std / std - 1) < 5 / root, "%s: deviation %g, expected %g", p->name, s.std, std);
            CHECK(fabs(s.kurtosis - 3) < 5 * sqrt(24.0) / root, "%s: kurtosis %g", p->name, s.kurtosis);
            CHECK(fabs(s.neighbours) < 5 / root, "%s: neighbours correlate by %g", p->name, s.neighbours);
        }
        free(x);
    }
    params_free(&t);
}

static double correlation(const Param *p, uint64_t seed_p, const Param *q, uint64_t seed_q)
{
    enum { ROWS = 32 };
    int64_t n = ROWS * p->cols;
    float *x = xmalloc((size_t)n * sizeof *x), *y = xmalloc((size_t)n * sizeof *y);
    double product = 0, xx = 0, yy = 0;
    params_initial(p, seed_p, 0, ROWS, x);
    params_initial(q, seed_q, 0, ROWS, y);
    for (int64_t i = 0; i < n; i++) {
        product += (double)x[i] * (double)y[i];
        xx += (double)x[i] * (double)x[i];
        yy += (double)y[i] * (double)y[i];
    }
    free(x), free(y);
    return product / sqrt(xx * yy) * sqrt((double)n); /* in standard errors */
}

static void test_places(void)
{
    GPTConfig c = config_of(ARCH_LLAMA, true);
    ParamTable t = params_table(&c, DTYPE_FP32);
    const Param *qkv0 = find(&t, PARAM_QKV, 0), *qkv1 = find(&t, PARAM_QKV, 1), *up0 = find(&t, PARAM_UP, 0);
    test_case("layers, kinds and seeds draw independent values; the same place repeats");
    CHECK(fabs(correlation(qkv0, 1, qkv1, 1)) < 5, "layers correlate");
    CHECK(fabs(correlation(qkv0, 1, up0, 1)) < 5, "kinds correlate");
    CHECK(fabs(correlation(qkv0, 1, qkv0, 2)) < 5, "seeds correlate");
    CHECK(fabs(correlation(qkv0, 1, qkv0, (uint64_t)1 << 32 | 1)) < 5, "the seed's upper half does not enter");
    CHECK(correlation(qkv0, 1, qkv0, 1) > 10, "the same place must repeat");

    test_case("rows drawn in any pieces are the rows of the whole");
    int64_t n = qkv0->rows * qkv0->cols;
    float *whole = xmalloc((size_t)n * sizeof *whole), *part = xmalloc((size_t)n * sizeof *part);
    params_initial(qkv0, 3, 0, qkv0->rows, whole);
    for (int64_t row = 0, step = 1; row < qkv0->rows; row += step, step += 4) {
        step = min_i64(step, qkv0->rows - row);
        params_initial(qkv0, 3, row, step, part);
        CHECK(!memcmp(part, whole + row * qkv0->cols, (size_t)(step * qkv0->cols) * 4), "rows %ld..", (long)row);
    }
    free(whole), free(part);
    params_free(&t);
}

int main(void)
{
    test_table(ARCH_GPT2, true);
    test_table(ARCH_LLAMA, true);
    test_table(ARCH_LLAMA, false);
    test_table(ARCH_QWEN3, true);
    test_statistics();
    test_places();
    return test_done();
}
