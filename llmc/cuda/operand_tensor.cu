/* Operands that are the tensor itself, gradients among them, and sums over tokens (operand.cuh). */
#include "operand.cuh"

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

void cuda_operand_from_gradient(Operand *dy, Tensor g, Tensor dbias)
{
    unsigned views = VIEW_ROW | VIEW_COL;
    quantize_tensor("operand_from_gradient", dy, g, views, targets_of(dy, views, g.data), step_place(dy), dbias);
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
