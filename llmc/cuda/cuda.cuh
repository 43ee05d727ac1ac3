/* Inside the CUDA backend: what its files share.
 *
 * The operations are those of ops.h, documented there; a file cuda/x.cu holds the ones of its name, as cpu/x.c does.
 * All run in one stream. Nothing waits for the device but copy_out and result_collect. Sums are made in a fixed order (no atomics on
 * floats), so the same input gives the same bits on the same GPU.
 *
 * Floor 2.
 */
#ifndef LLMC_CUDA_CUDA_CUH
#define LLMC_CUDA_CUDA_CUH

#include "../ops.h"
#include "ptx.cuh"

/* ---- state of the process: set by backend.cu ---- */

enum { SUM_ROWS = 64 }; /* rows a partial sum covers */

typedef struct { /* in device memory: what changes from step to step, so that launches do not */
    Step step;
    int64_t row0;   /* global row of this micro-batch's first token */
    int32_t finite; /* 0 once loss or norm was not finite; then no weight changes any more */
} DeviceStep;

typedef struct {
    cudaStream_t stream;
    gmem<const DeviceStep> step;
    uint64_t seed;         /* of the step; one for a whole run, so launches may have it as an argument */
    gmem<float> partial;   /* [ceil(N / SUM_ROWS)][2][cols]: partial sums over tokens */
    gmem<int32_t> sorted;  /* [Vp + 1 + N]: embedding_backward's counting sort */
    gmem<float> attention; /* [N, NH]: attention_backward's row sums */
    ProductCounts counts;
    bool fast_sums;       /* a product may add into a gradient without a rounding of its own before */
    bool native_rounding; /* stochastic rounding by cvt.rs: sm_100a and sm_103a only, with random bits of its own */
    QuantStats *measure;  /* [layers][OPERAND_ROLES] of the caller, or NULL */
} CudaState;

extern CudaState cuda;

/* Dies with the operation's name when `status` is an error; after every launch: cuda_check(cudaGetLastError(), "op"). */
void cuda_check(cudaError_t status, const char *what);

/* ---- matrices ---- */

template <class T> struct Matrix { /* element (r, c) is at.ld(r * ld + c) */
    gmem<T> at;
    int64_t rows, cols, ld;
    __device__ gmem<T> row(int64_t r) const { return at + r * ld; }
    __host__ __device__ bool absent() const { return at.absent(); }
};

template <class T> Matrix<T> matrix(Tensor t) { return Matrix<T>{gmem<T>(t.data), t.rows, t.cols, t.ld}; }

/* Runs the statements with T the element type of `dtype`: BY_DTYPE(x.dtype, T, kernel<T><<<...>>>(matrix<T>(x))). */
#define BY_DTYPE(dtype, T, ...)                                                                                        \
    do {                                                                                                               \
        if ((dtype) == DTYPE_BF16) {                                                                                   \
            using T = bf16;                                                                                            \
            __VA_ARGS__;                                                                                               \
        } else {                                                                                                       \
            using T = float;                                                                                           \
            __VA_ARGS__;                                                                                               \
        }                                                                                                              \
    } while (0)

/* ---- sums in a fixed order ---- */

__device__ inline float warp_sum(float x) /* every lane gets it */
{
    for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

__device__ inline float warp_max(float x)
{
    for (int distance = 16; distance; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

/* ---- the operations ---- */

void cuda_copy(Tensor dst, Tensor src);
void cuda_zero(Tensor t);
void cuda_operand_from_tensor(Operand *o, Tensor x, unsigned views);
void cuda_operand_from_norm(Operand *o, Tensor x, Tensor stats, const Norm *norm, unsigned views);
void cuda_operand_from_activation(Operand *o, Tensor h, Activation f, unsigned views);
void cuda_operand_from_gradient(Operand *dy, Tensor g, Tensor dbias);
void cuda_operand_from_activation_backward(Operand *dh, Tensor du, Tensor h, Activation f, Tensor dbias);
void cuda_linear_forward(Tensor y, const Operand *x, const Linear *w);
void cuda_linear_backward_input(Tensor dx, const Operand *dy, const Linear *w);
void cuda_linear_backward_weight(Linear *w, const Operand *dy, const Operand *x);
void cuda_tune(const Linear *w, int64_t N);
void cuda_weight_prepare(Linear *w, Tensor master, uint64_t seed, uint32_t step);
void cuda_weight_amax(float *amax, Tensor rows);
void cuda_weight_pack(Linear *w, Tensor rows, int64_t row0, const float *amax, uint64_t seed, uint32_t step);
size_t cuda_gather_bytes(const Operand *weight);
int cuda_weight_pieces(const Linear *w, WeightPiece out[WEIGHT_PIECES]);
void cuda_embedding_forward(Tensor x, Tensor stats, const int32_t *tokens, Tensor wte, Tensor wpe, int64_t T,
                            int64_t position0, const Norm *first);
void cuda_embedding_backward(Tensor dwte, Tensor dwpe, Tensor dx, const int32_t *tokens, int64_t T);
void cuda_residual_add(Tensor x, Tensor stats, Tensor x_prev, Tensor y, const Norm *next);
void cuda_norm_backward(Tensor dx, const Norm *norm, Tensor dy, Tensor x, Tensor stats);
void cuda_qk_norm_rope_forward(Tensor out, Tensor qkv, Tensor q_gain, Tensor k_gain, float eps, Tensor cos_sin,
                               const Attention *a);
void cuda_qk_norm_rope_backward(Tensor dqkv, Tensor dq_gain, Tensor dk_gain, Tensor qkv, Tensor q_gain, Tensor k_gain,
                                float eps, Tensor cos_sin, const Attention *a);
void cuda_attention_forward(Tensor att, Tensor lse, Tensor q, Tensor k, Tensor v, const Attention *a);
void cuda_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor datt, Tensor att, Tensor lse, Tensor q, Tensor k,
                             Tensor v, const Attention *a);
void cuda_softmax_cross_entropy(Tensor losses, Tensor logits, const int32_t *targets, int64_t V, bool gradient);
void cuda_loss_sum(double *sum, Tensor losses);
void cuda_add(Tensor sum, Tensor contribution);
void cuda_sum_squares(double *piece, Tensor grad);
void cuda_finish_step(StepResult *result, const double *piece, int64_t pieces, const double *loss,
                      int64_t micro_batches, int64_t tokens);
void cuda_adamw(const ParamSlice *p, const StepResult *result);

/* sum[c] += the sum over blocks of cuda.partial's row `which` (0 or 1), added in order from zero. */
void cuda_add_partial_sums(Tensor sum, int64_t blocks, int which);

#endif
