/* Operands of matrix products: a source computed element by element (the tensor itself, a norm, an activation, a
 * gradient through an activation), written to the plain views that were asked for. The kernels are those of views.cuh;
 * here are the sources. Formulas and what a view is: cpu/linear.c.
 */
#include "views.cuh"

#include "../mathfn.h"

/* ---- targets ---- */

static void add_view(Targets *t, const Operand *o, const View *v, const void *source)
{
    if (v->format.format == FORMAT_NONE || v->data == source) return;
    if (!format_is_plain(v->format.format))
        die("operand of format %d: the CUDA backend does not make it; this is a bug", v->format.format);
    DType dtype = v->format.format == FORMAT_FP32 ? DTYPE_FP32 : DTYPE_BF16;
    add_target(t, Tensor{v->data, dtype, o->rows, o->cols, o->cols});
}

/* The asked views, but those that are the source. */
static Targets targets_of(const Operand *o, unsigned views, const void *source)
{
    Targets t = {};
    t.aligned = true;
    if (views & VIEW_ROW) add_view(&t, o, &o->row, source);
    if (views & VIEW_COL) add_view(&t, o, &o->col, source);
    return t;
}

/* ---- sources ---- */

template <class T> struct NormSource {
    static constexpr int wide = 16 / sizeof(T), parts = 1;
    Matrix<const T> x;
    Matrix<const float> stats;
    gmem<const float> gain, bias; /* bias absent: RMSNorm */

    template <int W> struct Columns {
        float gain[W], bias[W];
    };
    template <int W> __device__ Columns<W> columns(int64_t c) const
    {
        Columns<W> of = {};
        load_row<W>(of.gain, gain, c, x.cols);
        if (!bias.absent()) load_row<W>(of.bias, bias, c, x.cols);
        return of;
    }
    template <int W> __device__ void load(float (&out)[1][W], int64_t r, int64_t c, const Columns<W> &of) const
    {
        bool layernorm = !bias.absent();
        float mean = layernorm ? stats.row(r).ld(0) : 0.0f, rstd = stats.row(r).ld(layernorm ? 1 : 0);
        load_row<W>(out[0], x.row(r), c, x.cols);
#pragma unroll
        for (int j = 0; j < W; j++) {
            float v = out[0][j];
            out[0][j] = layernorm ? fmaf((v - mean) * rstd, of.gain[j], of.bias[j]) : v * rstd * of.gain[j];
        }
    }
};

template <class T, Activation f> struct ActivationSource {
    static constexpr int wide = 16 / sizeof(T), parts = 1;
    Matrix<const T> h;
    int64_t F;

    template <int W> using Columns = NoColumns;
    template <int W> __device__ NoColumns columns(int64_t) const { return {}; }
    template <int W> __device__ void load(float (&out)[1][W], int64_t r, int64_t c, NoColumns) const
    {
        float up[W];
        load_row<W>(out[0], h.row(r), c, F);
        if (f == ACTIVATION_SWIGLU) load_row<W>(up, h.row(r) + F, c, F);
#pragma unroll
        for (int j = 0; j < W; j++) {
            float v = out[0][j];
            out[0][j] = f == ACTIVATION_GELU ? f32_gelu(v) : v * f32_sigmoid(v) * up[j];
        }
    }
};

/* dh, rounded to what a matrix of du's dtype would hold: bias gradients sum that. SwiGLU: of the gate, then of up. */
template <class T, Activation f> struct ActivationGradientSource {
    static constexpr int wide = 16 / sizeof(T), parts = f == ACTIVATION_SWIGLU ? 2 : 1;
    Matrix<const T> du, h;

    template <int W> using Columns = NoColumns;
    template <int W> __device__ NoColumns columns(int64_t) const { return {}; }
    template <int W> __device__ void load(float (&out)[parts][W], int64_t r, int64_t c, NoColumns) const
    {
        int64_t F = du.cols;
        float d[W], x[W], up[W];
        load_row<W>(d, du.row(r), c, F);
        load_row<W>(x, h.row(r), c, F);
        if (parts == 2) load_row<W>(up, h.row(r) + F, c, F);
#pragma unroll
        for (int j = 0; j < W; j++) {
            if (parts == 1) {
                out[0][j] = rounded(d[j] * f32_gelu_derivative(x[j]));
                continue;
            }
            float s = f32_sigmoid(x[j]), slope = s * fmaf(x[j], 1.0f - s, 1.0f);
            out[0][j] = rounded(d[j] * up[j] * slope);
            out[parts - 1][j] = rounded(d[j] * (x[j] * s));
        }
    }

  private:
    static __device__ float rounded(float x) { return to_f32(from_f32<T>(x)); }
};

/* ---- operations ---- */

void cuda_operand_from_tensor(Operand *o, Tensor x, unsigned views)
{
    Targets to = targets_of(o, views, x.data);
    BY_DTYPE(x.dtype, T,
             make_views("operand_from_tensor", TensorSource<T>{matrix<const T>(x)}, to, is_aligned(x), x.rows, x.cols));
}

void cuda_operand_from_norm(Operand *o, Tensor x, Tensor stats, const Norm *norm, unsigned views)
{
    Targets to = targets_of(o, views, NULL);
    bool layernorm = norm->kind == NORM_LAYERNORM;
    bool aligned = is_aligned(x) && is_aligned(norm->gain) && (!layernorm || is_aligned(norm->bias));
    gmem<const float> gain(norm->gain.data), bias(layernorm ? norm->bias.data : NULL);
    BY_DTYPE(x.dtype, T,
             make_views("operand_from_norm", NormSource<T>{matrix<const T>(x), matrix<const float>(stats), gain, bias},
                        to, aligned, o->rows, o->cols));
}

template <Activation f> static void from_activation(Operand *o, Tensor h, unsigned views)
{
    Targets to = targets_of(o, views, NULL);
    bool aligned = is_aligned(h) && is_aligned(tensor_cols(h, o->cols, 1));
    BY_DTYPE(h.dtype, T,
             make_views("operand_from_activation", ActivationSource<T, f>{matrix<const T>(h), o->cols}, to, aligned,
                        o->rows, o->cols));
}

void cuda_operand_from_activation(Operand *o, Tensor h, Activation f, unsigned views)
{
    if (f == ACTIVATION_GELU)
        from_activation<ACTIVATION_GELU>(o, h, views);
    else
        from_activation<ACTIVATION_SWIGLU>(o, h, views);
}

void cuda_operand_from_gradient(Operand *dy, Tensor g, Tensor dbias)
{
    Targets to = targets_of(dy, VIEW_ROW | VIEW_COL, g.data);
    BY_DTYPE(g.dtype, T,
             make_views_and_sums("operand_from_gradient", TensorSource<T>{matrix<const T>(g)}, to, is_aligned(g),
                                 g.rows, g.cols, dbias));
}

template <Activation f> static void from_activation_backward(Operand *dh, Tensor du, Tensor h, Tensor dbias)
{
    const char *op = "operand_from_activation_backward";
    Targets to = targets_of(dh, VIEW_ROW | VIEW_COL, NULL);
    int64_t F = du.cols; /* where the second half of a row begins, in h and in the targets */
    bool aligned = is_aligned(du) && is_aligned(h) && F * (int64_t)dtype_bytes(du.dtype) % 16 == 0;
    if (du.dtype != h.dtype) die("%s: du and h of two dtypes; this is a bug", op);
    for (int i = 0; i < to.count; i++) aligned = aligned && F * (to.to[i].half ? 2 : 4) % 16 == 0;
    BY_DTYPE(du.dtype, T,
             make_views_and_sums(op, ActivationGradientSource<T, f>{matrix<const T>(du), matrix<const T>(h)}, to,
                                 aligned, du.rows, F, dbias));
}

void cuda_operand_from_activation_backward(Operand *dh, Tensor du, Tensor h, Activation f, Tensor dbias)
{
    if (f == ACTIVATION_GELU)
        from_activation_backward<ACTIVATION_GELU>(dh, du, h, dbias);
    else
        from_activation_backward<ACTIVATION_SWIGLU>(dh, du, h, dbias);
}

/* ---- partial sums ---- */

/* A thread a column: loads of BATCH blocks are on their way at once, their sum is made in order. Reads 4 bytes a block
 * and column, a 64th of what the sums were made of; blocks of one warp, so that few columns spread over many
 * processors. */
__global__ void __launch_bounds__(WARP)
    add_partial_sums(gmem<float> sum, gmem<const float> partial, int64_t blocks, int64_t cols)
{
    enum { BATCH = 32 };
    int64_t c = (int64_t)blockIdx.x * WARP + threadIdx.x;
    if (c >= cols) return;
    float total = 0;
    for (int64_t first = 0; first < blocks; first += BATCH) {
        float x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) x[i] = first + i < blocks ? partial.ld(2 * (first + i) * cols + c) : 0.0f;
#pragma unroll
        for (int i = 0; i < BATCH; i++) total += x[i];
    }
    sum.st(c, sum.ld(c) + total);
}

void cuda_add_partial_sums(Tensor sum, int64_t blocks, int which)
{
    gmem<const float> partial(cuda.partial.p + which * sum.cols);
    add_partial_sums<<<(unsigned)ceil_div(sum.cols, WARP), WARP, 0, cuda.stream>>>(gmem<float>(sum.data), partial,
                                                                                   blocks, sum.cols);
    cuda_check(cudaGetLastError(), "sums over tokens");
}
