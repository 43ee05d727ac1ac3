/* Inside the CPU backend: what its files share. Everything compiled per instruction set is declared here under its
 * plain name and linked under name_avx512, name_avx2 or name_portable, so that the sources read like ordinary C.
 *
 * The operations are those of ops.h, documented there; a file cpu/x.c holds the ones of its name. Each is a loop over
 * rows (tokens) that OpenMP divides; what a thread computes for a row does not depend on the division, and sums over
 * rows go through blocks of SUM_ROWS rows whose partial sums are added in order. So any thread count gives the same
 * bits.
 *
 * Floor 2.
 */
#ifndef LLMC_CPU_H
#define LLMC_CPU_H

#include "gemm.h"
#include "ops.h"

#define ISA_JOIN2(name, isa) name##_##isa
#define ISA_JOIN(name, isa)  ISA_JOIN2(name, isa)
#define ISA_NAME(name)       ISA_JOIN(name, ISA)

/* ---- state of the process: set by backend.c ---- */

enum { SUM_ROWS = 64 }; /* rows a partial sum covers: part of the numbers */

typedef struct {
    Step step;
    int64_t row0; /* global row of this micro-batch's first token */
    int threads;
    GemmKernel gemm[2]; /* by DTYPE_FP32, DTYPE_BF16 */
    GemmWorkspace workspace;
    StepResult result; /* posted */
    ProductCounts counts;
    QuantStats *measure;      /* [layers][OPERAND_ROLES] of the caller, or NULL */
    float *partial;           /* [ceil(N / SUM_ROWS)][2][cols]: partial sums over tokens */
    int32_t *sorted;          /* [Vp + 1 + N]: embedding_backward's counting sort */
    uint16_t *source;         /* [N][cols] BF16: what an op computed and quantizes; within the op only */
    uint16_t *pending_scales; /* [2][blocks]: of a row and a column view in pow2 mode, before the tensor's scale */
    QuantStats *tile_stats;   /* [ceil(rows / 16)] */
    char *attention;          /* [threads] pieces of attention_bytes */
    size_t attention_bytes;
} CpuState;

extern CpuState cpu;

/* The element-wise operations of one instruction set, and its matrix-product kernels. */
typedef struct {
    Ops ops;
    const GemmKernel *gemm[2];                                             /* by DTYPE_FP32, DTYPE_BF16 */
    size_t (*attention_bytes)(const Need *need, const GemmKernel gemm[2]); /* per thread */
} CpuTable;

#ifdef ISA

#define cpu_table ISA_NAME(cpu_table)
extern const CpuTable cpu_table;

#define cpu_copy                             ISA_NAME(cpu_copy)
#define cpu_operand_from_tensor              ISA_NAME(cpu_operand_from_tensor)
#define cpu_operand_from_norm                ISA_NAME(cpu_operand_from_norm)
#define cpu_operand_from_activation          ISA_NAME(cpu_operand_from_activation)
#define cpu_operand_from_gradient            ISA_NAME(cpu_operand_from_gradient)
#define cpu_operand_from_activation_backward ISA_NAME(cpu_operand_from_activation_backward)
#define cpu_linear_forward                   ISA_NAME(cpu_linear_forward)
#define cpu_linear_backward_input            ISA_NAME(cpu_linear_backward_input)
#define cpu_linear_backward_weight           ISA_NAME(cpu_linear_backward_weight)
#define cpu_weight_prepare                   ISA_NAME(cpu_weight_prepare)
#define cpu_weight_amax                      ISA_NAME(cpu_weight_amax)
#define cpu_weight_pack                      ISA_NAME(cpu_weight_pack)
#define cpu_embedding_forward                ISA_NAME(cpu_embedding_forward)
#define cpu_embedding_backward               ISA_NAME(cpu_embedding_backward)
#define cpu_residual_add                     ISA_NAME(cpu_residual_add)
#define cpu_norm_backward                    ISA_NAME(cpu_norm_backward)
#define cpu_qk_norm_rope_forward             ISA_NAME(cpu_qk_norm_rope_forward)
#define cpu_qk_norm_rope_backward            ISA_NAME(cpu_qk_norm_rope_backward)
#define cpu_attention_forward                ISA_NAME(cpu_attention_forward)
#define cpu_attention_backward               ISA_NAME(cpu_attention_backward)
#define cpu_softmax_cross_entropy            ISA_NAME(cpu_softmax_cross_entropy)
#define cpu_add                              ISA_NAME(cpu_add)
#define cpu_sum_squares                      ISA_NAME(cpu_sum_squares)
#define cpu_adamw                            ISA_NAME(cpu_adamw)

void cpu_copy(Tensor dst, Tensor src);
void cpu_operand_from_tensor(Operand *o, Tensor x, unsigned views);
void cpu_operand_from_norm(Operand *o, Tensor x, Tensor stats, const Norm *norm, unsigned views);
void cpu_operand_from_activation(Operand *o, Tensor h, Activation f, unsigned views);
void cpu_operand_from_gradient(Operand *dy, Tensor g, Tensor dbias);
void cpu_operand_from_activation_backward(Operand *dh, Tensor du, Tensor h, Activation f, Tensor dbias);
void cpu_linear_forward(Tensor y, const Operand *x, const Linear *w);
void cpu_linear_backward_input(Tensor dx, const Operand *dy, const Linear *w);
void cpu_linear_backward_weight(Linear *w, const Operand *dy, const Operand *x);
void cpu_weight_prepare(Linear *w, Tensor master, uint64_t seed, uint32_t step);
void cpu_weight_amax(float *amax, Tensor rows);
void cpu_weight_pack(Linear *w, Tensor rows, int64_t row0, const float *amax, uint64_t seed, uint32_t step);
void cpu_embedding_forward(Tensor x, Tensor stats, const int32_t *tokens, Tensor wte, Tensor wpe, int64_t T,
                           int64_t position0, const Norm *first);
void cpu_embedding_backward(Tensor dwte, Tensor dwpe, Tensor dx, const int32_t *tokens, int64_t T);
void cpu_residual_add(Tensor x, Tensor stats, Tensor x_prev, Tensor y, const Norm *next);
void cpu_norm_backward(Tensor dx, const Norm *norm, Tensor dy, Tensor x, Tensor stats);
void cpu_qk_norm_rope_forward(Tensor out, Tensor qkv, Tensor q_gain, Tensor k_gain, float eps, Tensor cos_sin,
                              const Attention *a);
void cpu_qk_norm_rope_backward(Tensor dqkv, Tensor dq_gain, Tensor dk_gain, Tensor qkv, Tensor q_gain, Tensor k_gain,
                               float eps, Tensor cos_sin, const Attention *a);
void cpu_attention_forward(Tensor att, Tensor lse, Tensor q, Tensor k, Tensor v, const Attention *a);
void cpu_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor datt, Tensor att, Tensor lse, Tensor q, Tensor k,
                            Tensor v, const Attention *a);
void cpu_softmax_cross_entropy(Tensor losses, Tensor logits, const int32_t *targets, int64_t V, bool gradient);
void cpu_add(Tensor sum, Tensor contribution);
void cpu_sum_squares(double *piece, Tensor grad);
void cpu_adamw(const ParamSlice *p, const StepResult *result);

/* Statistics of one row for a norm: LayerNorm mean and 1/sqrt(variance + eps), RMSNorm 1/sqrt(mean square + eps). */
#define norm_row_stats ISA_NAME(norm_row_stats)
void norm_row_stats(float *stats, const void *row, DType dtype, int64_t n, NormKind kind, float eps);
/* sum[c] += the sum over blocks of cpu.partial's row `which` (0 or 1), added in order from zero. */
#define add_partial_sums ISA_NAME(add_partial_sums)
void add_partial_sums(Tensor sum, int64_t blocks, int which);
#define attention_workspace_bytes ISA_NAME(attention_workspace_bytes)
size_t attention_workspace_bytes(const Need *need, const GemmKernel gemm[2]);

/* The asked views of `o` that are NVFP4, from src [rows, cols]; FP32 is rounded to BF16 first. seed, step and row0, the
 * first row's number in the global batch (of weights: in the matrix), place stochastic rounding. amax: of the whole, where
 * src is a part of it; NULL: of src. */
#define quantize_operand ISA_NAME(quantize_operand)
void quantize_operand(Operand *o, unsigned views, Tensor src, const float *amax, uint64_t seed, uint32_t step,
                      int64_t row0);

extern const GemmKernel ISA_NAME(gemm_kernel_fp32), ISA_NAME(gemm_kernel_bf16);

static inline void *row_of(Tensor t, int64_t r) { return (char *)t.data + (size_t)(r * t.ld) * dtype_bytes(t.dtype); }

/* Row `which` of the partial sums of one block of SUM_ROWS tokens, [cols]. */
static inline float *partial_row(int64_t block, int which, int64_t cols)
{
    return cpu.partial + (2 * block + which) * cols;
}

#endif
#endif
