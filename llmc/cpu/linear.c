/* Operands and the three products of a linear layer.
 *
 * A plain view is a matrix as the source, [rows, cols], that the row and the column view share; where the source already
 * has the format, the view is the source and making it is nothing. An NVFP4 view is quantized from a BF16 matrix: the
 * source, or the plain view that stands beside it, or what the op computed into the workspace.
 */
#include "cpu.h"
#include "simd.h"

static Tensor view_tensor(const Operand *o, const View *v)
{
    return (Tensor){v->data, view_dtype(v), o->rows, o->cols, o->cols};
}

/* Where an op writes the matrix that an operand is made of. */
typedef struct {
    Tensor to[3];
    int count;
    Tensor quantize; /* the one of them that is quantized next, or absent */
} Targets;

static void add_target(Targets *t, Tensor to)
{
    if (!(t->count && t->to[0].data == to.data)) t->to[t->count++] = to; /* plain views are usually one memory */
    if (to.dtype == DTYPE_BF16) t->quantize = to;
}

/* Of the asked views. With `source`, the op computes nothing: what is quantized is the source. */
static Targets targets_of(const Operand *o, unsigned views, Tensor source)
{
    Targets t = {.quantize = source};
    bool quantized = false;
    for (int col = 0; col < 2; col++) {
        const View *v = col ? &o->col : &o->row;
        if (!(views & (col ? VIEW_COL : VIEW_ROW))) continue;
        if (v->format.format == FORMAT_NVFP4) quantized = true;
        if (format_is_plain(v->format.format) && v->data != source.data) add_target(&t, view_tensor(o, v));
    }
    if (source.data) t.quantize = source;
    if (!quantized) t.quantize = (Tensor){0};
    if (quantized && !t.quantize.data) add_target(&t, (Tensor){cpu.source, DTYPE_BF16, o->rows, o->cols, o->cols});
    return t;
}

static void store_targets(const Targets *t, int64_t r, int64_t c, int64_t col0, int64_t cols, v16 v)
{
    for (int i = 0; i < t->count; i++) {
        Tensor part = tensor_cols(t->to[i], col0, cols);
        v16_store_row(row_of(part, r), part.dtype, c, cols, v);
    }
}

static void quantize_targets(Operand *o, const Targets *t, unsigned views)
{
    if (t->quantize.data)
        quantize_operand(o, views, t->quantize, NULL, cpu.step.seed, cpu.step.step, cpu.row0 + o->row0);
}

void cpu_operand_from_tensor(Operand *o, Tensor x, unsigned views)
{
    Targets t = targets_of(o, views, x);
    for (int i = 0; i < t.count; i++) cpu_copy(t.to[i], x);
    quantize_targets(o, &t, views);
}

void cpu_operand_from_norm(Operand *o, Tensor x, Tensor stats, const Norm *norm, unsigned views)
{
    Targets t = targets_of(o, views, (Tensor){0});
    int S = norm->kind == NORM_LAYERNORM ? 2 : 1;
    int64_t C = o->cols;
    const float *gain = norm->gain.data, *bias = norm->bias.data;
    if (!t.count) return;

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
            store_targets(&t, r, c, 0, C, v);
        }
    }
    quantize_targets(o, &t, views);
}

void cpu_operand_from_activation(Operand *o, Tensor h, Activation f, unsigned views)
{
    Targets t = targets_of(o, views, (Tensor){0});
    int64_t F = o->cols;
    if (!t.count) return;

#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t r = 0; r < o->rows; r++) {
        Tensor gate = tensor_cols(h, 0, F), up = tensor_cols(h, F, F);
        for (int64_t c = 0; c < F; c += 16) {
            v16 v = v16_load_row(row_of(gate, r), h.dtype, c, F, 0);
            if (f == ACTIVATION_GELU)
                v = v16_gelu(v);
            else
                v = v16_mul(v16_mul(v, v16_sigmoid(v)), v16_load_row(row_of(up, r), h.dtype, c, F, 0));
            store_targets(&t, r, c, 0, F, v);
        }
    }
    quantize_targets(o, &t, views);
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
    unsigned views = VIEW_ROW | VIEW_COL;
    Targets t = targets_of(dh, views, (Tensor){0});
    int halves = f == ACTIVATION_SWIGLU ? 2 : 1;
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
                    store_targets(&t, r, c, half * F, F, v);
                }
            }
        }
    }
    if (dbias.data) add_partial_sums(dbias, blocks, 0);
    quantize_targets(dh, &t, views);
}

/* ---- products ---- */

/* A row view summed over its columns (k_contiguous), or a column view summed over its rows. In NVFP4 both have k within
 * the block; but a weight in 16 x 16 blocks is read across, like a plain matrix. */
static GemmInput input_of(const Operand *o, const View *v, bool k_contiguous)
{
    int64_t row_blocks = ceil_div(o->cols, NVFP4_BLOCK);
    if (v->format.format != FORMAT_NVFP4)
        return (GemmInput){.data = v->data, .dtype = view_dtype(v), .ld = o->cols, .k_contiguous = k_contiguous};
    GemmInput in = {.data = v->data, .dtype = DTYPE_BF16, .block_scale = v->block_scale, .k_contiguous = k_contiguous};
    bool across = !k_contiguous && v->format.nvfp4.block == SCALE_16X16;
    in.k_contiguous = !across;
    in.ld = k_contiguous || across ? row_blocks : 1;
    in.ld_block = k_contiguous ? 1 : o->cols;
    in.scale_shift = v->format.nvfp4.block == SCALE_16X16 ? 4 : 0;
    return in;
}

typedef struct { /* one operand of a product */
    const Operand *o;
    const View *view;
    bool k_contiguous; /* of the source: the product sums over its columns */
} Factor;

/* out (+)= the product of both factors; counts it. */
static void product(int kind, Factor a, Factor b, GemmOutput out)
{
    const ViewFormat *fa = &a.view->format, *fb = &b.view->format;
    Format format = fa->format;
    if (format != fb->format || fa->rht != fb->rht || fa->nvfp4.tensor_scale != fb->nvfp4.tensor_scale)
        die("matrix product of operands that do not belong together: formats %d and %d; this is a bug", format,
            fb->format);
    int64_t M = a.k_contiguous ? a.o->rows : a.o->cols, N = b.k_contiguous ? b.o->rows : b.o->cols;
    int64_t K = a.k_contiguous ? a.o->cols : a.o->rows;
    GemmInput in_a = input_of(a.o, a.view, a.k_contiguous), in_b = input_of(b.o, b.view, b.k_contiguous);
    out.alpha = 1;
    if (format == FORMAT_NVFP4)
        out.alpha = nvfp4_alpha(*a.view->tensor_scale, &fa->nvfp4, *b.view->tensor_scale, &fb->nvfp4);
    gemm(&cpu.gemm[in_a.dtype], &cpu.workspace, M, N, K, in_a, in_b, out);
    cpu.counts.count[kind][format]++;
}

void cpu_linear_forward(Tensor y, const Operand *x, const Linear *w)
{
    product(PRODUCT_FPROP, (Factor){x, &x->row, true}, (Factor){&w->weight, &w->weight.row, true},
            (GemmOutput){.data = y.data, .dtype = y.dtype, .ld = y.ld, .bias = w->bias.data});
}

void cpu_linear_backward_input(Tensor dx, const Operand *dy, const Linear *w)
{
    product(PRODUCT_DGRAD, (Factor){dy, &dy->row, true}, (Factor){&w->weight, &w->weight.col, false},
            (GemmOutput){.data = dx.data, .dtype = dx.dtype, .ld = dx.ld});
}

void cpu_linear_backward_weight(Linear *w, const Operand *dy, const Operand *x)
{
    product(PRODUCT_WGRAD, (Factor){dy, &dy->col, false}, (Factor){x, &x->col, false},
            (GemmOutput){.data = w->dW.data, .dtype = w->dW.dtype, .ld = w->dW.ld, .accumulate = true});
}

void cpu_weight_prepare(Linear *w, Tensor master, uint64_t seed, uint32_t step)
{
    Targets t = targets_of(&w->weight, VIEW_ROW | VIEW_COL, master);
    for (int i = 0; i < t.count; i++) cpu_copy(t.to[i], master);
    if (t.quantize.data) quantize_operand(&w->weight, VIEW_ROW | VIEW_COL, master, NULL, seed, step, 0);
}

/* A view of the rows from row0 on. */
static View view_from(const View *v, bool col, int64_t row0, int64_t cols)
{
    View part = *v;
    int64_t row_blocks = ceil_div(cols, NVFP4_BLOCK), by_16 = row0 / 16 * row_blocks;
    if (v->format.format == FORMAT_NONE) return part;
    if (v->format.format != FORMAT_NVFP4) {
        part.data = (char *)v->data + (size_t)(row0 * cols) * dtype_bytes(view_dtype(v));
        return part;
    }
    bool square = v->format.nvfp4.block == SCALE_16X16;
    int64_t block = col && !square ? row0 / 16 * cols : row0 * row_blocks;
    part.data = (char *)v->data + 8 * block;
    part.block_scale = v->block_scale + (square ? by_16 : block);
    return part;
}

void cpu_weight_pack(Linear *w, Tensor rows, int64_t row0, const float *amax, uint64_t seed, uint32_t step)
{
    Operand part = w->weight;
    if (!rows.rows) { /* the tensor's scale is everybody's */
        quantize_operand(&part, VIEW_ROW | VIEW_COL, rows, amax, seed, step, row0);
        return;
    }
    part.rows = rows.rows;
    part.row = view_from(&w->weight.row, false, row0, part.cols);
    part.col = view_from(&w->weight.col, true, row0, part.cols);
    Targets t = targets_of(&part, VIEW_ROW | VIEW_COL, rows);
    for (int i = 0; i < t.count; i++) cpu_copy(t.to[i], rows);
    quantize_operand(&part, VIEW_ROW | VIEW_COL, rows, amax, seed, step, row0);
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
