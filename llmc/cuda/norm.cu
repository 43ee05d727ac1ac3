/* The residual stream and its norms: x = x_prev + y with the statistics of the norm that follows, and the norm's
 * backward. The formulas stand in cpu/norm.c.
 *
 * Both walk rows with one warp each: a row is reduced by shuffles alone, without barriers, and a row of 2048 BF16
 * columns stays in registers between the sums and their use.
 */
#include "rows.cuh"

/* ---- x = x_prev + y ---- */

/* A warp a row. Reads x_prev and y, writes x: 6 bytes an element in BF16; rows longer than
 * what is kept read x twice more. */
template <class T, int W>
__global__ void __launch_bounds__(BLOCK) residual_add_rows(Matrix<T> x, Matrix<float> stats, Matrix<const T> x_prev,
                                                           Matrix<const T> y, NormKind kind, float eps)
{
    int64_t r = warp_number();
    if (r >= x.rows) return;
    gmem<const T> from = x_prev.row(r), change = y.row(r);
    int64_t cols = x.cols;
    WarpRow<T, W> row{x.row(r), cols, {}};
    row.fill([&](int64_t c) {
        float a[W], b[W];
        Pack<T, W> sum;
        unpack(a, load_pack<W>(from, c, cols));
        unpack(b, load_pack<W>(change, c, cols));
#pragma unroll
        for (int j = 0; j < W; j++) a[j] += b[j];
        round_pack(&sum, a);
        return sum;
    });
    row.write_stats(stats.row(r), kind, eps);
}

static void need_one_dtype(const char *op, Tensor a, Tensor b, Tensor c)
{
    if (a.dtype != b.dtype || a.dtype != c.dtype) die("%s: tensors of several dtypes; this is a bug", op);
}

void cuda_residual_add(Tensor x, Tensor stats, Tensor x_prev, Tensor y, const Norm *next)
{
    need_one_dtype("residual_add", x, x_prev, y);
    if (!x.rows) return;
    bool aligned = is_aligned(x) && is_aligned(x_prev) && is_aligned(y);
    unsigned blocks = blocks_for_warps(x.rows);
    BY_DTYPE(x.dtype, T,
             BY_WIDTH(aligned, T, W,
                      residual_add_rows<T, W>
                      <<<blocks, BLOCK, 0, cuda.stream>>>(matrix<T>(x), matrix<float>(stats), matrix<const T>(x_prev),
                                                          matrix<const T>(y), next->kind, next->eps)));
    cuda_check(cudaGetLastError(), "residual_add");
}

/* ---- backward ---- */

template <class T> struct NormBackward {
    Matrix<T> dx;
    Matrix<const T> dy, x;
    Matrix<const float> stats;
    gmem<const float> gain;
    NormKind kind;

    __device__ float mean(int64_t r) const { return kind == NORM_LAYERNORM ? stats.row(r).ld(0) : 0.0f; }
    __device__ float rstd(int64_t r) const { return stats.row(r).ld(kind == NORM_LAYERNORM ? 1 : 0); }
};

/* g = dy gain and n = (x - mean) rstd of one pack. */
template <int W, class T>
__device__ inline void gradient_and_norm(float (&g)[W], float (&n)[W], const NormBackward<T> &p, Pack<T, W> dy,
                                         Pack<T, W> x, int64_t c, float mean, float rstd)
{
    float gain[W];
    load_row<W>(gain, p.gain, c, p.x.cols);
#pragma unroll
    for (int j = 0; j < W; j++) {
        g[j] = to_f32(dy.v[j]) * gain[j];
        n[j] = (to_f32(x.v[j]) - mean) * rstd;
    }
}

/* dx += rstd (g - mean(g) - n mean(g n)), a warp a row. Reads dy, x and dx, writes dx: 8 bytes an element in BF16. dy
 * and x of the first KEPT packs stay in registers between the two passes; the gain comes from the cache. */
template <class T, int W> __global__ void __launch_bounds__(BLOCK) norm_backward_rows(NormBackward<T> p)
{
    enum { KEPT = 4 };
    int64_t r = warp_number(), cols = p.x.cols;
    if (r >= p.x.rows) return;
    gmem<const T> dy_row = p.dy.row(r), x_row = p.x.row(r);
    gmem<T> dx_row = p.dx.row(r);
    float mean = p.mean(r), rstd = p.rstd(r), sum_g = 0, sum_gn = 0, g[W], n[W];
    int64_t first = (int64_t)lane_number() * W, step = WARP * W;
    Pack<T, W> dy[KEPT], x[KEPT];

    auto add_sums = [&](int64_t c, Pack<T, W> dy_pack, Pack<T, W> x_pack) {
        gradient_and_norm<W>(g, n, p, dy_pack, x_pack, c, mean, rstd);
#pragma unroll
        for (int j = 0; j < W; j++) { /* beyond the row g is zero: gain and dy are */
            sum_g += g[j];
            sum_gn = fmaf(g[j], n[j], sum_gn);
        }
    };
    auto add_change = [&](int64_t c, Pack<T, W> dy_pack, Pack<T, W> x_pack) {
        float sum[W];
        gradient_and_norm<W>(g, n, p, dy_pack, x_pack, c, mean, rstd);
        load_row<W>(sum, dx_row, c, cols);
#pragma unroll
        for (int j = 0; j < W; j++) sum[j] += rstd * ((g[j] - sum_g) - n[j] * sum_gn);
        store_row<W>(dx_row, c, cols, sum);
    };

#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        int64_t c = first + i * step;
        if (c >= cols) continue;
        dy[i] = load_pack<W>(dy_row, c, cols);
        x[i] = load_pack<W>(x_row, c, cols);
    }
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        if (first + i * step < cols) add_sums(first + i * step, dy[i], x[i]);
    for (int64_t c = first + KEPT * step; c < cols; c += step)
        add_sums(c, load_pack<W>(dy_row, c, cols), load_pack<W>(x_row, c, cols));
    sum_g = p.kind == NORM_LAYERNORM ? f32_div(warp_sum(sum_g), (float)cols) : 0.0f; /* the means from here on */
    sum_gn = f32_div(warp_sum(sum_gn), (float)cols);
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        if (first + i * step < cols) add_change(first + i * step, dy[i], x[i]);
    for (int64_t c = first + KEPT * step; c < cols; c += step)
        add_change(c, load_pack<W>(dy_row, c, cols), load_pack<W>(x_row, c, cols));
}

/* Partial sums of dy n and dy: a warp takes 32 W columns of SUM_ROWS rows, a lane W of them from row to row. Reads dy
 * and x once more, 4 bytes an element in BF16, in part from the L2 cache: with the sums in the kernel above, a lane
 * would hold sums of all its columns, or a block would have too few rows to keep the memory busy. */
template <class T, int W>
__global__ void __launch_bounds__(BLOCK) norm_sums(NormBackward<T> p, gmem<float> partial, uint32_t chunks)
{
    enum { BATCH = 4 }; /* rows whose loads are on their way at once */
    Place place = warp_place(chunks, WARP * W);
    int64_t tile = place.row, cols = p.x.cols, rows = p.x.rows, c = place.col + lane_number() * W;
    int64_t end = (tile + 1) * SUM_ROWS;
    if (end > rows) end = rows;
    if (tile * SUM_ROWS >= rows || c >= cols) return;
    float gain_sum[W] = {}, bias_sum[W] = {};
#pragma unroll 1
    for (int64_t r = tile * SUM_ROWS; r < end; r += BATCH) {
        Pack<T, W> dy[BATCH], x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (r + i >= end) continue;
            dy[i] = load_pack<W>(p.dy.row(r + i), c, cols);
            x[i] = load_pack<W>(p.x.row(r + i), c, cols);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (r + i >= end) continue;
            float mean = p.mean(r + i), rstd = p.rstd(r + i);
#pragma unroll
            for (int j = 0; j < W; j++) {
                float d = to_f32(dy[i].v[j]), n = (to_f32(x[i].v[j]) - mean) * rstd;
                gain_sum[j] = fmaf(d, n, gain_sum[j]);
                bias_sum[j] += d;
            }
        }
    }
    store_row<W>(partial + 2 * tile * cols, c, cols, gain_sum);
    if (p.kind == NORM_LAYERNORM) store_row<W>(partial + (2 * tile + 1) * cols, c, cols, bias_sum);
}

template <class T, int W> static void launch_norm_backward(const NormBackward<T> &p)
{
    int64_t chunks = ceil_div(p.x.cols, WARP * W), tiles = ceil_div(p.x.rows, SUM_ROWS);
    norm_backward_rows<T, W><<<blocks_for_warps(p.x.rows), BLOCK, 0, cuda.stream>>>(p);
    norm_sums<T, W><<<blocks_for_warps(tiles * chunks), BLOCK, 0, cuda.stream>>>(p, cuda.partial, (uint32_t)chunks);
}

void cuda_norm_backward(Tensor dx, const Norm *norm, Tensor dy, Tensor x, Tensor stats)
{
    need_one_dtype("norm_backward", dx, dy, x);
    if (!x.rows) return;
    Tensor sums = {cuda.partial.p, DTYPE_FP32, 2, x.cols, x.cols};
    bool aligned = is_aligned(dx) && is_aligned(dy) && is_aligned(x) && is_aligned(norm->gain) && is_aligned(sums);
    BY_DTYPE(x.dtype, T,
             BY_WIDTH(aligned, T, W,
                      launch_norm_backward<T, W>({matrix<T>(dx), matrix<const T>(dy), matrix<const T>(x),
                                                  matrix<const float>(stats), gmem<const float>(norm->gain.data),
                                                  norm->kind})));
    cuda_check(cudaGetLastError(), "norm_backward");
    int64_t tiles = ceil_div(x.rows, SUM_ROWS);
    cuda_add_partial_sums(norm->dgain, tiles, 0);
    if (norm->kind == NORM_LAYERNORM) cuda_add_partial_sums(norm->dbias, tiles, 1);
}
