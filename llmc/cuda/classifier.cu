/* Softmax and cross-entropy of a chunk of tokens, and the sum of losses. The formulas stand in cpu/classifier.c.
 *
 * A block a token: rows are long (a vocabulary), and there are enough of them in a chunk to fill the GPU. The largest
 * logit and the sum of exponentials come from one reading of the row: a thread keeps both over its packs and rescales
 * its sum when it meets a larger logit.
 */
#include "rows.cuh"

#include "../mathfn.h"

enum { ROW_WARPS = 16, ROW_THREADS = WARP * ROW_WARPS };

typedef struct {        /* of some logits */
    float largest, sum; /* sum of exp(x - largest) */
} Softmax;

/* `largest` of nothing. Finite: the exponential of the difference of two infinities is NaN, and a logit may be -Inf. */
#define LEAST (-3.402823466e38f)

__device__ inline Softmax join(Softmax a, Softmax b)
{
    float largest = f32_max(a.largest, b.largest);
    return Softmax{largest, a.sum * f32_exp(a.largest - largest) + b.sum * f32_exp(b.largest - largest)};
}

/* Of the whole block, in a fixed order; every thread gets it. */
__device__ inline Softmax join_block(Softmax s, Softmax *of_warp)
{
    for (int distance = 1; distance < WARP; distance *= 2)
        s = join(s, Softmax{__shfl_xor_sync(0xffffffffu, s.largest, distance),
                            __shfl_xor_sync(0xffffffffu, s.sum, distance)});
    if (lane_number() == 0) of_warp[threadIdx.x / WARP] = s;
    __syncthreads();
    s = of_warp[0];
    for (int i = 1; i < ROW_WARPS; i++) s = join(s, of_warp[i]);
    return s;
}

/* Reads the row, and with `gradient` reads it again (mostly from the L2 cache) and writes it: 6 bytes an element in
 * BF16. Columns V .. are padding. */
template <class T, int W>
__global__ void __launch_bounds__(ROW_THREADS)
    softmax_rows(gmem<float> losses, Matrix<T> logits, gmem<const int32_t> targets, int64_t V, bool gradient,
                 gmem<const DeviceStep> step)
{
    __shared__ Softmax of_warp[ROW_WARPS];
    gmem<T> row = logits.row(blockIdx.x);
    int64_t target = targets.ld(blockIdx.x), first = (int64_t)threadIdx.x * W;
    float x_target = to_f32(row.ld(target)), x[W];
    Softmax s = {LEAST, 0};

    for (int64_t c = first; c < V; c += ROW_THREADS * W) {
        float largest = s.largest, sum = 0;
        load_row<W>(x, row, c, V);
#pragma unroll
        for (int j = 0; j < W; j++)
            if (c + j < V) largest = f32_max(x[j], largest); /* NaN is passed over, and makes the sum NaN */
#pragma unroll
        for (int j = 0; j < W; j++)
            if (c + j < V) sum += f32_exp(x[j] - largest);
        s = Softmax{largest, s.sum * f32_exp(s.largest - largest) + sum};
    }
    s = join_block(s, of_warp); /* its barrier: all have read the target's logit */
    if (threadIdx.x == 0) losses.st(blockIdx.x, (float)(f64_log((double)s.sum) + (double)s.largest - (double)x_target));
    if (!gradient) return;

    float inverse = f32_div(1.0f, s.sum), scale = load_struct(step).step.loss_scale;
    for (int64_t c = first; c < logits.cols; c += ROW_THREADS * W) {
        load_row<W>(x, row, c, logits.cols);
#pragma unroll
        for (int j = 0; j < W; j++) {
            float p = f32_exp(x[j] - s.largest) * inverse;
            x[j] = c + j < V ? (c + j == target ? p - 1.0f : p) * scale : 0.0f;
        }
        store_row<W>(row, c, logits.cols, x);
    }
}

void cuda_softmax_cross_entropy(Tensor losses, Tensor logits, const int32_t *targets, int64_t V, bool gradient)
{
    if (!logits.rows) return;
    unsigned blocks = (unsigned)logits.rows;
    BY_DTYPE(logits.dtype, T,
             BY_WIDTH(is_aligned(logits), T, W,
                      softmax_rows<T, W>
                      <<<blocks, ROW_THREADS, 0, cuda.stream>>>(gmem<float>(losses.data), matrix<T>(logits),
                                                                gmem<const int32_t>(targets), V, gradient, cuda.step)));
    cuda_check(cudaGetLastError(), "softmax_cross_entropy");
}

/* One block: a thread adds the 16 losses of a piece in FP64, then thread 0 adds up to 256 pieces in order. 4 bytes a
 * token, a thousandth of what the rest of the classifier reads of it. */
__global__ void __launch_bounds__(BLOCK) add_losses(gmem<double> sum, gmem<const float> losses, int64_t n)
{
    __shared__ double of_piece[BLOCK];
    double total = 0;
    for (int64_t base = 0; base < n; base += BLOCK * 16) {
        double piece = 0;
        for (int i = 0; i < 16; i++) {
            int64_t r = base + threadIdx.x * 16 + i;
            if (r < n) piece += (double)losses.ld(r);
        }
        of_piece[threadIdx.x] = piece;
        __syncthreads();
        if (threadIdx.x == 0)
            for (int i = 0; i < BLOCK && base + i * 16 < n; i++) total += of_piece[i];
        __syncthreads();
    }
    if (threadIdx.x == 0) sum.st(0, total);
}

void cuda_loss_sum(double *sum, Tensor losses)
{
    add_losses<<<1, BLOCK, 0, cuda.stream>>>(gmem<double>(sum), gmem<const float>(losses.data), losses.rows);
    cuda_check(cudaGetLastError(), "loss_sum");
}
