/* Operands that are an activation of a tensor, and gradients through one (operand.cuh). */
#include "operand.cuh"

#include "../mathfn.h"

template <class T, Activation f> struct ActivationSource {
    static constexpr int wide = 16 / sizeof(T), parts = 1;
    Matrix<const T> h;
    int64_t F;

    __device__ int64_t part_cols() const { return F; }
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

    __device__ int64_t part_cols() const { return du.cols; }
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

/* The same in one part, element by element: SwiGLU whose halves are not whole blocks. */
template <class T> struct SwigluGradientElement {
    static constexpr int wide = 1, parts = 1;
    ActivationGradientSource<T, ACTIVATION_SWIGLU> both;

    __device__ int64_t part_cols() const { return 2 * both.du.cols; }
    template <int W> using Columns = NoColumns;
    template <int W> __device__ NoColumns columns(int64_t) const { return {}; }
    template <int W> __device__ void load(float (&out)[1][W], int64_t r, int64_t c, NoColumns none) const
    {
        static_assert(W == 1, "one element");
        float x[2][1];
        int64_t F = both.du.cols;
        both.template load<1>(x, r, c < F ? c : c - F, none);
        out[0][0] = x[c < F ? 0 : 1][0];
    }
};

/* ---- operations ---- */

template <Activation f> static void from_activation(Operand *o, Tensor h, unsigned views)
{
    const char *op = "operand_from_activation";
    Targets to = targets_of(o, views, NULL);
    bool aligned = is_aligned(h) && is_aligned(tensor_cols(h, o->cols, 1));
    if (h.dtype == DTYPE_BF16) {
        ActivationSource<bf16, f> from{matrix<const bf16>(h), o->cols};
        make_operand<false>(op, from, from, o, views, to, aligned, o->cols, step_place(o), Tensor{});
    } else {
        ActivationSource<float, f> from{matrix<const float>(h), o->cols};
        make_plain(op, from, o, views, to, aligned, o->cols, Tensor{});
    }
}

void cuda_operand_from_activation(Operand *o, Tensor h, Activation f, unsigned views)
{
    if (f == ACTIVATION_GELU)
        from_activation<ACTIVATION_GELU>(o, h, views);
    else
        from_activation<ACTIVATION_SWIGLU>(o, h, views);
}

template <class T>
static const SwigluGradientElement<T> element_of(const ActivationGradientSource<T, ACTIVATION_SWIGLU> &s)
{
    return {s};
}
template <class T>
static const ActivationGradientSource<T, ACTIVATION_GELU> &
element_of(const ActivationGradientSource<T, ACTIVATION_GELU> &s)
{
    return s;
}

template <Activation f> static void from_activation_backward(Operand *dh, Tensor du, Tensor h, Tensor dbias)
{
    const char *op = "operand_from_activation_backward";
    unsigned views = VIEW_ROW | VIEW_COL;
    Targets to = targets_of(dh, views, NULL);
    int64_t F = du.cols; /* where the second half of a row begins, in h and in the targets */
    bool aligned = is_aligned(du) && is_aligned(h) && F * (int64_t)dtype_bytes(du.dtype) % 16 == 0;
    if (du.dtype != h.dtype) die("%s: du and h of two dtypes; this is a bug", op);
    for (int i = 0; i < to.count; i++) aligned = aligned && F * (to.to[i].half ? 2 : 4) % 16 == 0;
    if (du.dtype == DTYPE_BF16) {
        ActivationGradientSource<bf16, f> from{matrix<const bf16>(du), matrix<const bf16>(h)};
        make_operand<true>(op, from, element_of(from), dh, views, to, aligned, F, step_place(dh), dbias);
    } else {
        ActivationGradientSource<float, f> from{matrix<const float>(du), matrix<const float>(h)};
        make_plain(op, from, dh, views, to, aligned, F, dbias);
    }
}

void cuda_operand_from_activation_backward(Operand *dh, Tensor du, Tensor h, Activation f, Tensor dbias)
{
    if (f == ACTIVATION_GELU)
        from_activation_backward<ACTIVATION_GELU>(dh, du, h, dbias);
    else
        from_activation_backward<ACTIVATION_SWIGLU>(dh, du, h, dbias);
}
