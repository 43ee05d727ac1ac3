/* Operands in plain formats and the three products of a linear layer. A plain view is a matrix as the source, [rows,
 * cols], that the row and the column view share; where the source already has the format, the view is the source and
 * making it is nothing.
 */
#include "cpu.h"
#include "simd.h"

static DType view_dtype(const View *v) { return v->format.format == FORMAT_FP32 ? DTYPE_FP32 : DTYPE_BF16; }

/* The different memories among the asked views: plain row and column views are usually one. */
static int wanted_views(const Operand *o, unsigned views, const View *out[2])
{
    int count = 0;
    if (views & VIEW_ROW && o->row.format.format != FORMAT_NONE) out[count++] = &o->row;
    if (views & VIEW_COL && o->col.format.format != FORMAT_NONE && !(count && out[0]->data == o->col.data))
        out[count++] = &o->col;
    return count;
}

static Tensor view_tensor(const Operand *o, const View *v)
{
    return (Tensor){v->data, view_dtype(v), o->rows, o->cols, o->cols};
}

void cpu_operand_from_tensor(Operand *o, Tensor x, unsigned views)
{
    const View *view[2];
    int count = wanted_views(o, views, view);
    for (int i = 0; i < count; i++)
        if (view[i]->data != x.data) cpu_copy(view_tensor(o, view[i]), x);
}

void cpu_operand_from_norm(Operand *o, Tensor x, Tensor stats, const Norm *norm, unsigned views)
{
    const View *view[2];
    int count = wanted_views(o, views, view), S = norm->kind == NORM_LAYERNORM ? 2 : 1;
    int64_t C = o->cols;
    const float *gain = norm->gain.data, *bias = norm->bias.data;

#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t r = 0; r < o->rows; r++) {
        const float *s = (const float *)stats.data + r * S;
        v16 mean = v16_set1(S == 2 ? s[0] : 0), rstd = v16_set1(s[S - 1]);
        for (int64_t c = 0; c < C; c += 16) {
            v16 v = v16_load_row(row_of(x, r), x.dtype, c, C, 0), g = v16_load_row(gain, DTYPE_FP32, c, C, 0);
            if (S == 2)
                v = v16_fma(v16_mul(v16_sub(v, mean), rstd), g, v16_load_row(bias, DTYPE_FP32, c, C, 0));
            else
                v = v16_mul(v16_mul(v, rstd), g);
            for (int i = 0; i < count; i++) {
                Tensor t = view_tensor(o, view[i]);
                v16_store_row(row_of(t, r), t.dtype, c, C, v);
            }
        }
    }
}

void cpu_operand_from_activation(Operand *o, Tensor h, Activation f, unsigned views)
{
    const View *view[2];
    int count = wanted_views(o, views, view);
    int64_t F = o->cols;
    if (!count) return;

#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t r = 0; r < o->rows; r++) {
        Tensor gate = tensor_cols(h, 0, F), up = tensor_cols(h, F, F);
        for (int64_t c = 0; c < F; c += 16) {
            v16 v = v16_load_row(row_of(gate, r), h.dtype, c, F, 0);
            if (f == ACTIVATION_GELU)
                v = v16_gelu(v);
            else
                v = v16_mul(v16_mul(v, v16_sigmoid(v)), v16_load_row(row_of(up, r), h.dtype, c, F, 0));
            for (int i = 0; i < count; i++) {
                Tensor t = view_tensor(o, view[i]);
                v16_store_row(row_of(t, r), t.dtype, c, F, v);
            }
        }
    }
}

/* ---- gradients as operands, with the bias gradient: sums over tokens, by blocks of SUM_ROWS ---- */

void add_partial_sums(Tensor sum, int64_t blocks, int which)
{
    int64_t cols = sum.cols;
#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t c = 0; c < cols; c += 16) {
        v16 total = v16_set1(0);
        for (int64_t b = 0; b < blocks; b++)
            total = v16_add(total, v16_load_row(partial_row(b, which, cols), DTYPE_FP32, c, cols, 0));
        v16_store_row(sum.data, DTYPE_FP32, c, cols, v16_add(v16_load_row(sum.data, DTYPE_FP32, c, cols, 0), total));
    }
}

static void add_to_row(float *sum, int64_t c, int64_t n, v16 v)
{
    v16_store_row(sum, DTYPE_FP32, c, n, v16_add(v16_load_row(sum, DTYPE_FP32, c, n, 0), v));
}

void cpu_operand_from_gradient(Operand *dy, Tensor g, Tensor dbias)
{
    int64_t blocks = ceil_div(g.rows, SUM_ROWS), C = g.cols;
    cpu_operand_from_tensor(dy, g, VIEW_ROW | VIEW_COL);
    if (!dbias.data) return;

#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t b = 0; b < blocks; b++) {
        float *sum = partial_row(b, 0, C);
        memset(sum, 0, (size_t)C * sizeof *sum);
        for (int64_t r = b * SUM_ROWS; r < min_i64(g.rows, (b + 1) * SUM_ROWS); r++)
            for (int64_t c = 0; c < C; c += 16) add_to_row(sum, c, C, v16_load_row(row_of(g, r), g.dtype, c, C, 0));
    }
    add_partial_sums(dbias, blocks, 0);
}

/* One row's du and h, in dtype. SwiGLU: h is gate, then up, F each. */
typedef struct {
    const void *du, *gate, *up;
    DType dtype;
    int64_t F;
} ActivationRow;

/* Columns c .. c + 15 of dh: out[0], and in SwiGLU out[1] of the up half. */
static inline void activation_gradient(v16 out[2], const ActivationRow *row, Activation f, int64_t c)
{
    v16 d = v16_load_row(row->du, row->dtype, c, row->F, 0), x = v16_load_row(row->gate, row->dtype, c, row->F, 0);
    if (f == ACTIVATION_GELU) {
        out[0] = out[1] = v16_mul(d, v16_gelu_derivative(x));
        return;
    }
    v16 up = v16_load_row(row->up, row->dtype, c, row->F, 0), one = v16_set1(1), s = v16_sigmoid(x);
    v16 slope = v16_mul(s, v16_fma(x, v16_sub(one, s), one)); /* (x s(x))' = s (1 + x (1 - s)) */
    out[0] = v16_mul(v16_mul(d, up), slope);
    out[1] = v16_mul(d, v16_mul(x, s));
}

void cpu_operand_from_activation_backward(Operand *dh, Tensor du, Tensor h, Activation f, Tensor dbias)
{
    const View *view[2];
    int count = wanted_views(dh, VIEW_ROW | VIEW_COL, view), halves = f == ACTIVATION_SWIGLU ? 2 : 1;
    int64_t F = du.cols, F1 = dh->cols, blocks = ceil_div(du.rows, SUM_ROWS);

#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t b = 0; b < blocks; b++) {
        float *sum = dbias.data ? partial_row(b, 0, F1) : NULL;
        if (sum) memset(sum, 0, (size_t)F1 * sizeof *sum);
        for (int64_t r = b * SUM_ROWS; r < min_i64(du.rows, (b + 1) * SUM_ROWS); r++) {
            ActivationRow row = {row_of(du, r), row_of(h, r), row_of(tensor_cols(h, F, F), r), du.dtype, F};
            for (int64_t c = 0; c < F; c += 16) {
                v16 out[2];
                activation_gradient(out, &row, f, c);
                for (int half = 0; half < halves; half++) {
                    v16 v = v16_round_to(du.dtype, out[half]); /* what the BF16 matrix would hold */
                    if (sum) add_to_row(sum + half * F, c, F, v);
                    for (int i = 0; i < count; i++) {
                        Tensor t = tensor_cols(view_tensor(dh, view[i]), half * F, F);
                        v16_store_row(row_of(t, r), t.dtype, c, F, v);
                    }
                }
            }
        }
    }
    if (dbias.data) add_partial_sums(dbias, blocks, 0);
}

/* ---- products ---- */

static GemmInput input_of(const Operand *o, const View *v, bool k_contiguous)
{
    return (GemmInput){v->data, view_dtype(v), o->cols, k_contiguous};
}

static void product(int64_t M, int64_t N, int64_t K, GemmInput a, GemmInput b, GemmOutput out)
{
    if (a.dtype != b.dtype) die("matrix product of two formats: %d and %d; this is a bug", a.dtype, b.dtype);
    gemm(&cpu.gemm[a.dtype], &cpu.workspace, M, N, K, a, b, out);
}

void cpu_linear_forward(Tensor y, const Operand *x, const Linear *w)
{
    product(x->rows, w->weight.rows, x->cols, input_of(x, &x->row, true), input_of(&w->weight, &w->weight.row, true),
            (GemmOutput){y.data, y.dtype, y.ld, w->bias.data, false});
}

void cpu_linear_backward_input(Tensor dx, const Operand *dy, const Linear *w)
{
    product(dy->rows, w->weight.cols, dy->cols, input_of(dy, &dy->row, true),
            input_of(&w->weight, &w->weight.col, false), (GemmOutput){dx.data, dx.dtype, dx.ld, NULL, false});
}

void cpu_linear_backward_weight(Linear *w, const Operand *dy, const Operand *x)
{
    product(dy->cols, x->cols, x->rows, input_of(dy, &dy->col, false), input_of(x, &x->col, false),
            (GemmOutput){w->dW.data, w->dW.dtype, w->dW.ld, NULL, true});
}

void cpu_weight_prepare(Linear *w, Tensor master, uint64_t seed, uint32_t step)
{
    (void)seed, (void)step;
    cpu_operand_from_tensor(&w->weight, master, VIEW_ROW | VIEW_COL);
}

/* ---- moving ---- */

void cpu_copy(Tensor dst, Tensor src)
{
#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t r = 0; r < src.rows; r++)
        for (int64_t c = 0; c < src.cols; c += 16)
            v16_store_row(row_of(dst, r), dst.dtype, c, src.cols,
                          v16_load_row(row_of(src, r), src.dtype, c, src.cols, 0));
}
