/* The residual stream and its norms: x = x_prev + y with the statistics of the norm that follows, and the norm's
 * backward.
 *
 *     LayerNorm (Ba et al. 1607.06450)      y = (x - mean) rstd gain + bias,   rstd = 1 / sqrt(variance + eps)
 *     RMSNorm (Zhang, Sennrich 1910.07467)  y = x rstd gain,                   rstd = 1 / sqrt(mean square + eps)
 *
 * Backward, with n = (x - mean) rstd (or x rstd) and g = dy gain:
 *     dx += rstd (g - mean(g) - n mean(g n))      RMSNorm: without mean(g)
 *     dgain += sum over tokens of dy n;  dbias += sum of dy
 */
#include "cpu.h"
#include "simd.h"

void norm_row_stats(float *stats, const void *row, DType dtype, int64_t n, NormKind kind, float eps)
{
    v16 sum = v16_set1(0), zero = sum;
    float mean = 0;
    if (kind == NORM_LAYERNORM) {
        for (int64_t c = 0; c < n; c += 16) sum = v16_add(sum, v16_load_row(row, dtype, c, n, 0));
        mean = stats[0] = v16_sum(sum) / (float)n;
        sum = zero;
        stats++;
    }
    for (int64_t c = 0; c < n; c += 16) {
        v16 d = v16_sub(v16_load_row(row, dtype, c, n, mean), v16_set1(mean)); /* 0 beyond the row */
        sum = v16_fma(d, d, sum);
    }
    *stats = 1.0f / sqrtf(v16_sum(sum) / (float)n + eps);
}

static void row_stats(Tensor stats, Tensor x, int64_t r, const Norm *norm)
{
    norm_row_stats(row_of(stats, r), row_of(x, r), x.dtype, x.cols, norm->kind, norm->eps);
}

void cpu_residual_add(Tensor x, Tensor stats, Tensor x_prev, Tensor y, const Norm *next)
{
#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t r = 0; r < x.rows; r++) {
        for (int64_t c = 0; c < x.cols; c += 16)
            v16_store_row(row_of(x, r), x.dtype, c, x.cols,
                          v16_add(v16_load_row(row_of(x_prev, r), x_prev.dtype, c, x.cols, 0),
                                  v16_load_row(row_of(y, r), y.dtype, c, x.cols, 0)));
        row_stats(stats, x, r, next);
    }
}

typedef struct { /* one row's parameters, the same for all of its columns */
    v16 mean, rstd, mean_g, mean_gn;
} RowBackward;

static inline v16 normalised(const RowBackward *p, v16 x) { return v16_mul(v16_sub(x, p->mean), p->rstd); }

/* One row: dx, and its part of the sums over tokens (bias_sum NULL in RMSNorm). */
static void backward_row(void *dx, DType dx_dtype, const float *gain, const void *dy, DType dy_dtype, const void *x,
                         DType x_dtype, const float *stats, NormKind kind, int64_t C, float *gain_sum, float *bias_sum)
{
    bool layernorm = kind == NORM_LAYERNORM;
    v16 sum_g = v16_set1(0), sum_gn = sum_g;
    RowBackward p = {v16_set1(layernorm ? stats[0] : 0), v16_set1(stats[layernorm ? 1 : 0]), sum_g, sum_g};

    for (int64_t c = 0; c < C; c += 16) {
        v16 g = v16_mul(v16_load_row(dy, dy_dtype, c, C, 0), v16_load_row(gain, DTYPE_FP32, c, C, 0));
        sum_g = v16_add(sum_g, g);
        sum_gn = v16_fma(g, normalised(&p, v16_load_row(x, x_dtype, c, C, 0)), sum_gn);
    }
    if (layernorm) p.mean_g = v16_set1(v16_sum(sum_g) / (float)C);
    p.mean_gn = v16_set1(v16_sum(sum_gn) / (float)C);
    for (int64_t c = 0; c < C; c += 16) {
        v16 d = v16_load_row(dy, dy_dtype, c, C, 0), n = normalised(&p, v16_load_row(x, x_dtype, c, C, 0));
        v16 g = v16_mul(d, v16_load_row(gain, DTYPE_FP32, c, C, 0));
        v16 change = v16_mul(p.rstd, v16_sub(v16_sub(g, p.mean_g), v16_mul(n, p.mean_gn)));
        v16_store_row(dx, dx_dtype, c, C, v16_add(v16_load_row(dx, dx_dtype, c, C, 0), change));
        v16_store_row(gain_sum, DTYPE_FP32, c, C, v16_fma(d, n, v16_load_row(gain_sum, DTYPE_FP32, c, C, 0)));
        if (bias_sum)
            v16_store_row(bias_sum, DTYPE_FP32, c, C, v16_add(v16_load_row(bias_sum, DTYPE_FP32, c, C, 0), d));
    }
}

void cpu_norm_backward(Tensor dx, const Norm *norm, Tensor dy, Tensor x, Tensor stats)
{
    int64_t C = x.cols, blocks = ceil_div(x.rows, SUM_ROWS);
    bool bias = norm->kind == NORM_LAYERNORM;

#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t b = 0; b < blocks; b++) {
        float *gain_sum = partial_row(b, 0, C), *bias_sum = bias ? partial_row(b, 1, C) : NULL;
        memset(gain_sum, 0, (size_t)(bias ? 2 * C : C) * sizeof *gain_sum);
        for (int64_t r = b * SUM_ROWS; r < min_i64(x.rows, (b + 1) * SUM_ROWS); r++)
            backward_row(row_of(dx, r), dx.dtype, norm->gain.data, row_of(dy, r), dy.dtype, row_of(x, r), x.dtype,
                         row_of(stats, r), norm->kind, C, gain_sum, bias_sum);
    }
    add_partial_sums(norm->dgain, blocks, 0);
    if (bias) add_partial_sums(norm->dbias, blocks, 1);
}
