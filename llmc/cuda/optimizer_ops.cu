/* The optimizer's loops: gradients added, sums of squares by 16-row pieces in FP64, what a step came to, and AdamW in
 * FP32 with one rounding to the master. The formulas, and the order of every sum, are those of cpu/optimizer_ops.c and
 * cpu/backend.c, and so are the bits.
 */
#include "rows.cuh"

#include "../philox.h"

/* ---- add ---- */

/* A warp takes 4 x 32 W numbers. 12 bytes a number: one read, one read and written. */
template <int W>
__global__ void __launch_bounds__(BLOCK) add_numbers(gmem<float> sum, gmem<const float> contribution, int64_t n)
{
    enum { PACKS = 4 };
    int64_t first = ((int64_t)warp_number() * PACKS * WARP + lane_number()) * W;
    float a[PACKS][W], b[PACKS][W];
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
        int64_t c = first + i * WARP * W;
        if (c >= n) continue;
        load_row<W>(a[i], sum, c, n);
        load_row<W>(b[i], contribution, c, n);
    }
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
        int64_t c = first + i * WARP * W;
        if (c >= n) continue;
#pragma unroll
        for (int j = 0; j < W; j++) a[i][j] += b[i][j];
        store_row<W>(sum, c, n, a[i]);
    }
}

void cuda_add(Tensor sum, Tensor contribution)
{
    int64_t n = sum.rows * sum.cols; /* both contiguous */
    gmem<float> to(sum.data);
    gmem<const float> from(contribution.data);
    if (!n) return;
    sum.rows = contribution.rows = 1;
    BY_WIDTH(is_aligned(sum) && is_aligned(contribution), float, W,
             add_numbers<W><<<blocks_for_warps(ceil_div(n, 4 * WARP * W)), BLOCK, 0, cuda.stream>>>(to, from, n));
    cuda_check(cudaGetLastError(), "add");
}

/* ---- sums of squares ---- */

/* A piece is summed in 16 lanes, element c in lane c % 16, rows one after the other, and the lanes by the tree 8, 4,
 * 2, 1. A thread has W neighbouring lanes, so 16 / W threads work on a piece and read 64 bytes of a row at once. 4
 * bytes an element; the loads of BATCH times 16 columns are on their way at once, because the sums of a lane cannot
 * be. The square of a float is exact in FP64, so fma rounds as the CPU's addition does. */
template <int W> __global__ void __launch_bounds__(BLOCK) square_pieces(gmem<double> piece, Matrix<const float> grad)
{
    enum { THREADS = 16 / W, BATCH = 8 };
    int64_t p = ((int64_t)blockIdx.x * BLOCK + threadIdx.x) / THREADS, own = threadIdx.x % THREADS * W;
    double lane[W] = {};
    for (int64_t r = 16 * p; r < 16 * p + 16 && r < grad.rows; r++)
        for (int64_t c0 = own; c0 < grad.cols; c0 += 16 * BATCH) {
            float x[BATCH][W];
#pragma unroll
            for (int i = 0; i < BATCH; i++) load_row<W>(x[i], grad.row(r), c0 + 16 * i, grad.cols);
#pragma unroll
            for (int i = 0; i < BATCH; i++)
#pragma unroll
                for (int j = 0; j < W; j++) lane[j] = fma((double)x[i][j], (double)x[i][j], lane[j]);
        }
#pragma unroll
    for (int width = 8; width >= W; width /= 2)
#pragma unroll
        for (int j = 0; j < W; j++) lane[j] += __shfl_down_sync(0xffffffffu, lane[j], width / W);
#pragma unroll
    for (int width = W / 2; width; width /= 2)
#pragma unroll
        for (int j = 0; j < width; j++) lane[j] += lane[j + width];
    if (own == 0 && 16 * p < grad.rows) piece.st(p, lane[0]);
}

void cuda_sum_squares(double *piece, Tensor grad)
{
    int64_t pieces = ceil_div(grad.rows, 16);
    if (!pieces) return;
    BY_WIDTH(is_aligned(grad), float, W,
             square_pieces<W><<<(unsigned)ceil_div(pieces * (16 / W), BLOCK), BLOCK, 0, cuda.stream>>>(
                 gmem<double>(piece), matrix<const float>(grad)));
    cuda_check(cudaGetLastError(), "sum_squares");
}

/* ---- what a step came to ---- */

enum { SUM_TILE = 1024 };

/* Sum of n numbers one after the other, in thread 0. Tiles of SUM_TILE go through shared memory: while thread 0 adds
 * one, the other warps read the next, so the time is that of the additions alone (some 10 cycles each: 0.1 ms for
 * 20000). */
__device__ inline double sum_in_order(gmem<const double> x, int64_t n, double (*tile)[SUM_TILE])
{
    double sum = 0;
    int64_t tiles = (n + SUM_TILE - 1) / SUM_TILE;
    for (int64_t t = 0; t <= tiles; t++) {
        for (int64_t i = (int64_t)threadIdx.x - WARP; t < tiles && i >= 0 && i < SUM_TILE; i += BLOCK - WARP)
            if (t * SUM_TILE + i < n) tile[t % 2][i] = x.ld(t * SUM_TILE + i);
        if (threadIdx.x == 0 && t > 0) {
            int64_t last = n - (t - 1) * SUM_TILE;
            for (int i = 0; i < SUM_TILE && i < last; i++) sum += tile[(t - 1) % 2][i];
        }
        __syncthreads();
    }
    return sum;
}

/* One block: 8 bytes a 16-row piece, nothing beside the gradients that the pieces were made of. `finite` is the step's
 * flag, which stays 0 once it is. */
__global__ void __launch_bounds__(BLOCK)
    step_result(StepResult *result, gmem<const double> piece, int64_t pieces, gmem<const double> loss,
                int64_t micro_batches, int64_t tokens, gmem<const DeviceStep> step, gmem<int32_t> finite)
{
    __shared__ double tile[2][SUM_TILE];
    double squares = sum_in_order(piece, pieces, tile), sum = sum_in_order(loss, micro_batches, tile);
    if (threadIdx.x) return;
    double limit = (double)load_struct(step).step.grad_clip, mean = sum / (double)tokens, norm = sqrt(squares);
    bool all_finite = fabs(mean) < (double)INFINITY && fabs(norm) < (double)INFINITY;
    gmem<double>(&result->loss).st(0, mean);
    gmem<double>(&result->grad_norm).st(0, norm);
    gmem<float>(&result->clip).st(0, limit > 0 && norm > limit ? (float)(limit / norm) : 1.0f);
    gmem<int32_t>(&result->finite).st(0, all_finite);
    if (!all_finite) finite.st(0, 0);
}

void cuda_finish_step(StepResult *result, const double *piece, int64_t pieces, const double *loss,
                      int64_t micro_batches, int64_t tokens)
{
    step_result<<<1, BLOCK, 0, cuda.stream>>>(result, gmem<const double>(piece), pieces, gmem<const double>(loss),
                                              micro_batches, tokens, cuda.step,
                                              gmem<int32_t>((void *)&cuda.step.p->finite));
    cuda_check(cudaGetLastError(), "finish_step");
}

/* ---- AdamW ---- */

template <class T> struct Slice {
    Matrix<T> master;
    Matrix<float> grad, m, v;
    int64_t row0;
    uint32_t layer, role;
    bool decay;
};

/* One rounding to the master: FP32 takes the number as it is. */
template <int W>
__device__ inline void round_master(Pack<float, W> *to, const float (&w)[W], const Slice<float> &, const Step &,
                                    int64_t, int64_t)
{
    round_pack(to, w);
}

/* BF16: 16 random bits an element, from two Philox calls for 16 columns of a row. A lane with 8 columns makes one call
 * and uses all of it. */
template <int W>
__device__ inline void round_master(Pack<bf16, W> *to, const float (&w)[W], const Slice<bf16> &p, const Step &s,
                                    int64_t r, int64_t c)
{
    Philox draw = philox_draw(s.seed, (uint32_t)(p.row0 + r), (uint32_t)(c / 16), s.step, p.layer, p.role,
                              (uint32_t)(c % 16 / 8));
#pragma unroll
    for (int j = 0; j < W; j++) {
        int i = (int)(W == 8 ? j : c % 8);
        uint32_t word = i < 4 ? (i < 2 ? draw.word[0] : draw.word[1]) : (i < 6 ? draw.word[2] : draw.word[3]);
        to->v[j].bits = bf16_from_f32_stochastic(w[j], word >> 16 * (i % 2) & 0xffff);
    }
}

/* A warp takes 32 W columns of a row. Reads gradient, m, v and master and writes them all: 28 bytes an element with a
 * BF16 master, 32 with FP32. */
template <class T, int W>
__global__ void __launch_bounds__(BLOCK)
    update_rows(Slice<T> p, gmem<const StepResult> result, gmem<const DeviceStep> step, uint32_t chunks)
{
    Place place = warp_place(chunks, WARP * W);
    int64_t r = place.row, c = place.col + lane_number() * W, n = p.grad.cols;
    StepResult of_step = load_struct(result);
    DeviceStep now = load_struct(step);
    if (!of_step.finite || !now.finite || r >= p.grad.rows || c >= n) return;
    const Step &s = now.step;
    float g[W], m[W], v[W], w[W], zero[W] = {}, decay = p.decay ? s.weight_decay : 0.0f;
    Pack<T, W> rounded;
    load_row<W>(g, p.grad.row(r), c, n);
    load_row<W>(m, p.m.row(r), c, n);
    load_row<W>(v, p.v.row(r), c, n);
    load_row<W>(w, p.master.row(r), c, n);
#pragma unroll
    for (int j = 0; j < W; j++) {
        g[j] *= of_step.clip;
        m[j] = fmaf(s.beta1, m[j], (1.0f - s.beta1) * g[j]);
        v[j] = fmaf(s.beta2, v[j], (1.0f - s.beta2) * (g[j] * g[j]));
        float root = sqrtf(v[j] * s.correction2) + s.eps;
        w[j] = fmaf(-s.lr, fmaf(decay, w[j], f32_div(m[j] * s.correction1, root)), w[j]);
    }
    round_master(&rounded, w, p, s, r, c);
    store_row<W>(p.m.row(r), c, n, m);
    store_row<W>(p.v.row(r), c, n, v);
    store_row<W>(p.grad.row(r), c, n, zero);
    store_pack<W>(p.master.row(r), c, n, rounded);
}

template <class T, int W> static void launch_adamw(const ParamSlice *p, const StepResult *result)
{
    int64_t chunks = ceil_div(p->grad.cols, WARP * W);
    Slice<T> slice = {matrix<T>(p->master),
                      matrix<float>(p->grad),
                      matrix<float>(p->m),
                      matrix<float>(p->v),
                      p->row0,
                      (uint32_t)p->layer,
                      p->role,
                      p->decay};
    update_rows<T, W><<<blocks_for_warps(p->grad.rows * chunks), BLOCK, 0, cuda.stream>>>(
        slice, gmem<const StepResult>(result), cuda.step, (uint32_t)chunks);
}

void cuda_adamw(const ParamSlice *p, const StepResult *result)
{
    bool aligned = is_aligned(p->master) && is_aligned(p->grad) && is_aligned(p->m) && is_aligned(p->v);
    if (!p->grad.rows || !p->grad.cols) return;
    BY_DTYPE(p->master.dtype, T, BY_WIDTH(aligned, T, W, launch_adamw<T, W>(p, result)));
    cuda_check(cudaGetLastError(), "adamw");
}
