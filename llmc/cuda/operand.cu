/* Operands of matrix products: a source computed element by element (the tensor itself, a norm, an activation, a
 * gradient through an activation), written to the plain views and quantized into the NVFP4 views that were asked for.
 * The kernels are those of views.cuh and quantize_tile.cuh; here are the sources. Formulas and what a view is:
 * cpu/linear.c.
 */
#include "quantize_source.cuh"

#include "../mathfn.h"

/* ---- targets ---- */

static void add_view(Targets *t, const Operand *o, const View *v, const void *source)
{
    if (!format_is_plain(v->format.format) || v->data == source) return;
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

template <class T, NormKind kind> struct NormSource {
    static constexpr int wide = 16 / sizeof(T), parts = 1;
    static constexpr bool layernorm = kind == NORM_LAYERNORM;
    Matrix<const T> x;
    Matrix<const float> stats;
    gmem<const float> gain, bias;

    __device__ int64_t part_cols() const { return x.cols; }
    template <int W> struct Columns {
        float gain[W], bias[layernorm ? W : 1];
    };
    template <int W> __device__ Columns<W> columns(int64_t c) const
    {
        Columns<W> of = {};
        load_row<W>(of.gain, gain, c, x.cols);
        if constexpr (layernorm) load_row<W>(of.bias, bias, c, x.cols);
        return of;
    }
    template <int W> __device__ void load(float (&out)[1][W], int64_t r, int64_t c, const Columns<W> &of) const
    {
        float mean = layernorm ? stats.row(r).ld(0) : 0.0f, rstd = stats.row(r).ld(layernorm ? 1 : 0);
        load_row<W>(out[0], x.row(r), c, x.cols);
#pragma unroll
        for (int j = 0; j < W; j++) {
            float v = out[0][j];
            out[0][j] = layernorm ? fmaf((v - mean) * rstd, of.gain[j], of.bias[layernorm ? j : 0])
                                  : v * rstd * of.gain[j];
        }
    }
};

/* In a tile (quantize_load.cuh): x early; gains and statistics late, pairs at once. The same operations. */
template <NormKind kind> struct NormTile {
    static constexpr bool layernorm = kind == NORM_LAYERNORM;
    using Early = TensorSource<bf16>;
    static constexpr int each = layernorm ? 2 : 1;
    alignas(16) float rows[TILE][each], columns[each][TILE]; /* rstd and mean; gain, then bias */

    static __device__ Early early(const NormSource<bf16, kind> &from) { return Early{from.x}; }
    __device__ void fill(const NormSource<bf16, kind> &from, int64_t r0, int64_t c0, int row_end, int col_end)
    {
        int i = (int)threadIdx.x % TILE;
        if (threadIdx.x >= TILE) {
            if (i >= col_end) return;
            columns[0][i] = (from.gain + c0).ld(i);
            if constexpr (layernorm) columns[1][i] = (from.bias + c0).ld(i);
        } else if (i < row_end) {
            gmem<const float> row = rows_on(from.stats.row(r0), i, from.stats.ld);
            rows[i][0] = row.ld(each - 1);
            if constexpr (layernorm) rows[i][1] = row.ld(0);
        }
    }
    template <int WORDS> __device__ void finish(uint32_t *word, int row, int column) const
    {
        const F32x2 *gain = (const F32x2 *)&columns[0][column], *bias = (const F32x2 *)&columns[each - 1][column];
        float rstd = rows[row][0], mean = rows[row][each - 1];
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            F32x2 x = layernorm ? bf16x2_fma(word[i], 1.0f, F32x2{-mean, -mean}) : both_halves(word[i]);
            x = f32x2_mul(x, F32x2{rstd, rstd});
            x = layernorm ? f32x2_fma(x, gain[i], bias[i]) : f32x2_mul(x, gain[i]);
            word[i] = bf16x2(x.a, x.b);
        }
    }
};
template <NormKind kind> struct SourceTile<NormSource<bf16, kind>, 8> : NormTile<kind> {
};
template <NormKind kind> struct SourceTile<NormSource<bf16, kind>, 4> : NormTile<kind> {
};

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

/* ---- views, plain and quantized ---- */

static QuantizePlace step_place(const Operand *o) { return QuantizePlace{true, 0, 0, o->row0}; }

/* The plain view becomes a part of the job, the sums over rows too. */
static void add_outputs(QuantizeJob *job, const Targets &to, Tensor dbias)
{
    if (to.count > 1 || (to.count && !to.to[0].half))
        die("a plain view beside an NVFP4 view is in BF16; this is a bug");
    if (to.count) job->plain = gmem<bf16>(to.to[0].data), job->plain_ld = to.to[0].ld;
    if (dbias.data) job->partial = cuda.partial;
}

/* Makes all views that were asked for of an operand; of a gradient also dbias += the sums over rows, where that is not
 * absent. */
template <bool gradient, class Source, class Element>
static void make_operand(const char *op, const Source &from, const Element &element, Operand *o, unsigned views,
                         const Targets &to, bool aligned, int64_t part_cols, QuantizePlace place, Tensor dbias)
{
    if (!wants_quantized(o, views)) {
        make_views_and_sums(op, from, to, aligned, o->rows, part_cols, dbias);
        return;
    }
    QuantizeJob job = quantize_job(o, views, place, o->rows, part_cols);
    add_outputs(&job, to, dbias);
    quantize_source<gradient>(op, from, element, aligned && to.aligned, job);
    if (dbias.data && o->rows) cuda_add_partial_sums(dbias, ceil_div(o->rows, SUM_ROWS), 0);
}

/* Activations are BF16 wherever something is quantized. */
template <class Source>
static void make_plain(const char *op, const Source &from, const Operand *o, unsigned views, const Targets &to,
                       bool aligned, int64_t part_cols, Tensor dbias)
{
    if (wants_quantized(o, views)) die("%s: an operand in NVFP4 of FP32; this is a bug", op);
    make_views_and_sums(op, from, to, aligned, o->rows, part_cols, dbias);
}

void quantize_tensor(const char *op, Operand *o, Tensor x, unsigned views, const Targets &to, QuantizePlace place,
                     Tensor dbias)
{
    BY_DTYPE(x.dtype, T, TensorSource<T> from{matrix<const T>(x)};
             make_operand<true>(op, from, from, o, views, to, is_aligned(x), x.cols, place, dbias));
}

void find_amax_of_tensor(const char *op, const QuantizeJob &job, Tensor x)
{
    BY_DTYPE(x.dtype, T, TensorSource<T> from{matrix<const T>(x)}; if (is_aligned(x) && x.cols % 16 == 0)
                 launch_find_amax<TensorSource<T>, amax_width<TensorSource<T>>>(from, job);
             else launch_find_amax<TensorSource<T>, 1>(from, job));
    cuda_check(cudaGetLastError(), op);
}

void measure_square_tensor(const QuantizeJob &job, Tensor x, const uint8_t *squares)
{
    BY_DTYPE(x.dtype, T, measure_one(TensorSource<T>{matrix<const T>(x)}, job, 0, gmem<const uint8_t>(squares)));
}

/* ---- operations ---- */

void cuda_operand_from_tensor(Operand *o, Tensor x, unsigned views)
{
    quantize_tensor("operand_from_tensor", o, x, views, targets_of(o, views, x.data), step_place(o), Tensor{});
}

template <NormKind kind> static void from_norm(Operand *o, Tensor x, Tensor stats, const Norm *norm, unsigned views)
{
    const char *op = "operand_from_norm";
    Targets to = targets_of(o, views, NULL);
    bool aligned = is_aligned(x) && is_aligned(norm->gain) && (kind == NORM_RMSNORM || is_aligned(norm->bias));
    gmem<const float> gain(norm->gain.data), bias(norm->bias.data);
    Matrix<const float> s = matrix<const float>(stats);
    if (x.dtype == DTYPE_BF16) {
        NormSource<bf16, kind> from{matrix<const bf16>(x), s, gain, bias};
        make_operand<false>(op, from, from, o, views, to, aligned, o->cols, step_place(o), Tensor{});
    } else {
        NormSource<float, kind> from{matrix<const float>(x), s, gain, bias};
        make_plain(op, from, o, views, to, aligned, o->cols, Tensor{});
    }
}

void cuda_operand_from_norm(Operand *o, Tensor x, Tensor stats, const Norm *norm, unsigned views)
{
    if (norm->kind == NORM_LAYERNORM)
        from_norm<NORM_LAYERNORM>(o, x, stats, norm, views);
    else
        from_norm<NORM_RMSNORM>(o, x, stats, norm, views);
}

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

void cuda_operand_from_gradient(Operand *dy, Tensor g, Tensor dbias)
{
    unsigned views = VIEW_ROW | VIEW_COL;
    quantize_tensor("operand_from_gradient", dy, g, views, targets_of(dy, views, g.data), step_place(dy), dbias);
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
