/* The three products of a linear layer.
 *
 * A plain view is a matrix as the source, [rows, cols], that row and column view share; a product that sums over rows
 * reads it with k not contiguous. An NVFP4 view has k contiguous always (nvfp4_view.cuh).
 */
#include "gemm.cuh"
#include "nvfp4_view.cuh"

typedef struct { /* one operand of a product */
    const Operand *o;
    const View *view;
    bool k_contiguous; /* the product sums over the source's columns */
} Factor;

static GemmInput input_of(Factor f)
{
    GemmInput in = {};
    in.data = f.view->data, in.dtype = view_dtype(f.view), in.ld = f.o->cols, in.k_contiguous = f.k_contiguous;
    if (f.view->format.format != FORMAT_NVFP4) return in;
    Nvfp4Copy copy = nvfp4_copy(f.view, !f.k_contiguous, f.o->rows, f.o->cols);
    in.data = copy.codes, in.ld = copy.ld, in.k_contiguous = true;
    in.scales = copy.scales, in.tensor_scale = copy.tensor_scale, in.form = f.view->format.nvfp4;
    return in;
}

/* out (+)= the product of both factors; counts it. */
static void product(int kind, Factor a, Factor b, GemmOutput out)
{
    Format format = a.view->format.format;
    if (format != b.view->format.format || a.view->format.rht != b.view->format.rht)
        die("matrix product of operands that do not belong together: formats %d and %d; this is a bug", format,
            b.view->format.format);
    int64_t M = a.k_contiguous ? a.o->rows : a.o->cols, N = b.k_contiguous ? b.o->rows : b.o->cols;
    int64_t K = a.k_contiguous ? a.o->cols : a.o->rows;
    if (format == FORMAT_NVFP4) K = round_up(K, 32); /* with the zeros behind it */
    cuda_gemm(M, N, K, input_of(a), input_of(b), out, 1.0f);
    cuda.counts.count[kind][format]++;
}

void cuda_linear_forward(Tensor y, const Operand *x, const Linear *w)
{
    product(PRODUCT_FPROP, Factor{x, &x->row, true}, Factor{&w->weight, &w->weight.row, true},
            GemmOutput{y.data, y.dtype, y.ld, w->bias.data, false});
}

void cuda_linear_backward_input(Tensor dx, const Operand *dy, const Linear *w)
{
    product(PRODUCT_DGRAD, Factor{dy, &dy->row, true}, Factor{&w->weight, &w->weight.col, false},
            GemmOutput{dx.data, dx.dtype, dx.ld, NULL, false});
}

void cuda_linear_backward_weight(Linear *w, const Operand *dy, const Operand *x)
{
    product(PRODUCT_WGRAD, Factor{dy, &dy->col, false}, Factor{x, &x->col, false},
            GemmOutput{w->dW.data, w->dW.dtype, w->dW.ld, NULL, true});
}

/* On scratch memory of its own; the gradient is left alone. */
void cuda_tune(const Linear *w, int64_t N)
{
    int64_t out = w->weight.rows, in = w->weight.cols;
    const LinearFormats *f = &w->formats;
    size_t bytes = (size_t)(N * max_i64(in, out)) * sizeof(float) + (1 << 20); /* with the padding of NVFP4 */
    char *memory;
    cuda_check(cudaMalloc((void **)&memory, 2 * bytes + sizeof(float)), "tune_gemm");
    cuda_check(cudaMemsetAsync(memory, 0, 2 * bytes + sizeof(float), cuda.stream), "tune_gemm");
    Operand x = {}, dy = {};
    x.rows = dy.rows = N;
    x.cols = in, dy.cols = out;
    x.row.format = f->x_row, x.col.format = f->x_col, dy.row.format = f->dy_row, dy.col.format = f->dy_col;
    x.row.data = x.col.data = dy.row.data = dy.col.data = memory;
    x.row.tensor_scale = x.col.tensor_scale = dy.row.tensor_scale = dy.col.tensor_scale = (float *)(memory + 2 * bytes);
    DType act = view_dtype(&x.row);
    Linear layer = *w;

    gemm_tuning(true);
    cuda_linear_forward(Tensor{memory + bytes, act, N, out, out}, &x, w);
    if (f->dy_row.format != FORMAT_NONE) cuda_linear_backward_input(Tensor{memory + bytes, act, N, in, in}, &dy, w);
    if (f->dy_col.format != FORMAT_NONE) cuda_linear_backward_weight(&layer, &dy, &x);
    gemm_tuning(false);
    cuda_check(cudaStreamSynchronize(cuda.stream), "tune_gemm");
    cuda_check(cudaFree(memory), "tune_gemm");
}
