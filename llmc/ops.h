/* The operations: the one interface between the transformer (gpt.c) and a machine (cpu/, cuda/).
 *
 * An op is as coarse as the best GPU kernel. Wherever a result is read only as the input of a matrix product, the op
 * writes that operand (operand_from_*), so the normalised, activated or differentiated BF16 matrix exists only where
 * BF16 is the format asked for. The CPU composes these from plain loops and is the definition of every one.
 *
 * Rules for all entries
 *   Memory   No op allocates. Tensors come from the arena; so does the backend's workspace, given once.
 *   Order    Ops run in the order of the calls, as if each had finished before the next began: a CPU does just that, a
 *            GPU issues to its one compute stream and the host runs ahead. Only `copy_out` and `result_collect` wait for it.
 *   Errors   A wrong shape or format is a bug: die with the op's name. NaN/Inf is data, not an error: adamw changes
 *            nothing when the step's result was not finite.
 *   Random   begin_step gives seed and step, begin_micro_step the first global token row; layer and role are in the
 *            slice. Nothing else enters Philox, so a repeated call repeats its bits.
 *   Gradients of parameters are ADDED, each computed from zero over the micro-batch and rounded to FP32 first.
 *   Context  A backend is one per process: its state is one static struct in its backend.c/.cu, no handle is passed.
 *
 * N = B*T tokens, C = hidden, F = ffn, F1 = F (GELU) or 2F (SwiGLU: gate, then up), QKV = (NH + 2*NKV)*HD,
 * S = 2 (LayerNorm: mean, rstd) or 1 (RMSNorm: rstd). "act" = dtype of activations: BF16, or FP32 in FP32 runs.
 * Outputs come first. The caller owns everything. Floor 2.
 */
#ifndef LLMC_OPS_H
#define LLMC_OPS_H

#include "tensor.h"

C_BEGIN

typedef struct { /* constant within a step; on a GPU one device struct, so a captured graph stays valid */
    uint64_t seed;
    uint32_t step;
    float lr, beta1, beta2, eps, weight_decay;
    float correction1, correction2; /* 1 / (1 - beta^(step + 1)) */
    float loss_scale;               /* 1 / tokens of the global batch */
    float grad_clip;                /* 0: off */
} Step;

typedef struct {            /* what a step came to, in the backend's memory */
    double loss, grad_norm; /* mean over the global batch, nats a token; before clipping */
    float clip;             /* factor on every gradient */
    int32_t finite;         /* 0: loss or norm is NaN or Inf, and adamw leaves everything as it is */
} StepResult;

typedef struct {  /* from which a backend computes its workspace; the largest of each over all layouts of a run */
    int64_t N, T; /* tokens of a micro-batch, keys of a sequence */
    int64_t cols; /* widest row that is summed over tokens: bias and gain gradients */
    int64_t V;    /* vocabulary, unpadded */
    int64_t head_dim, heads, group; /* group = query heads per key head */
    int64_t weight_rows;            /* most rows of a quantized weight; 0: nothing is quantized */
    int64_t weight_elements;        /* of the largest quantized weight */
    bool native_rounding;           /* the device's own stochastic rounding: other bits, fewer instructions */
    bool attention_backward;        /* in BF16 and of all earlier tokens: what cuDNN does where a build has it */
    bool fast_sums; /* gradients may be added within a product, without a rounding of their own before */
} Need;

enum { OPS_MAX_HEAD_DIM = 256 }; /* what attention and RoPE have room for */

typedef enum { NORM_LAYERNORM, NORM_RMSNORM } NormKind;
typedef enum { ACTIVATION_GELU, ACTIVATION_SWIGLU } Activation;

typedef struct {
    NormKind kind;
    float eps;
    Tensor gain, bias;   /* [1, C] FP32; bias absent in RMSNorm */
    Tensor dgain, dbias; /* [1, C] FP32 */
} Norm;

/* B sequences of Tq queries; query t stands at position0 + t and sees keys 0 .. position0 + t, times 1/sqrt(HD). A
 * sequence's keys begin every Tk rows: Tq in training, the cache's length in generate. */
typedef struct {
    int64_t B, Tq, Tk, NH, NKV, HD, position0;
    const int32_t *first_key; /* [B, Tq] first key of the query's document, or NULL: 0 */
} Attention;

typedef struct {       /* 16-row-aligned rows of one parameter: what one rank updates */
    Tensor master;     /* [rows, cols] BF16 or FP32 */
    Tensor grad, m, v; /* [rows, cols] FP32; grad is left at zero, but for a step that was not finite */
    int64_t row0;      /* of the whole parameter: Philox row */
    int layer;         /* Philox fields */
    uint8_t role;
    bool decay;
} ParamSlice;

enum { PRODUCT_FPROP, PRODUCT_DGRAD, PRODUCT_WGRAD, PRODUCT_COUNT };

typedef struct { /* matrix products of linear layers since the backend was opened, by kind and operand format */
    int64_t count[PRODUCT_COUNT][FORMAT_COUNT];
} ProductCounts;

typedef struct { /* what quantization did to the operands of one layer and role, summed over calls */
    int64_t elements;
    int64_t zeroed;              /* not zero before, zero after */
    int64_t clipped;             /* beyond 6 after scaling */
    int64_t blocks, zero_blocks; /* block scale 0 */
    double error2, signal2;      /* sums of (after - before)^2 and before^2 */
} QuantStats;

LLMC_INLINE void quant_stats_add(QuantStats *to, const QuantStats *s)
{
    to->elements += s->elements;
    to->zeroed += s->zeroed;
    to->clipped += s->clipped;
    to->blocks += s->blocks;
    to->zero_blocks += s->zero_blocks;
    to->error2 += s->error2;
    to->signal2 += s->signal2;
}

enum { OPERAND_ROLES = 4 * OPERAND_COPIES }; /* 4 projections (recipe.h) */

/* Memory of a weight's views that 16 rows of the master fill: what ranks gather. */
typedef struct {
    char *data;
    size_t unit, bytes; /* of 16 rows; in all. The last unit is shorter when the rows are no multiple of 16 */
} WeightPiece;
enum { WEIGHT_PIECES = 4 };

typedef struct {
    const char *name; /* "cpu amx", ... */
    bool native_fp4;  /* NVFP4 products run in hardware */
    int result_lag;   /* steps that the host may run ahead of their results: 0 on a CPU, 1 on a GPU */

    /* -- memory and run state -- */
    void *(*alloc)(size_t bytes); /* zeroed; once per run: the arena; dies when there is not so much */
    void (*free)(void *memory, size_t bytes);
    size_t (*workspace_bytes)(const Need *need);
    void (*workspace_set)(void *memory, const Need *need);
    void (*copy_in)(void *dst, const void *host, size_t bytes);  /* the host buffer may be reused on return */
    void (*copy_out)(void *host, const void *src, size_t bytes); /* waits for what was issued before */
    void (*copy)(Tensor dst, Tensor src);                        /* same shape; converts FP32 <-> BF16 (nearest) */
    void (*zero)(Tensor t);
    double (*peak_flops)(DType dtype); /* FLOP/s that matrix products could reach: measured once, or the data sheet's */
    void (*begin_step)(const Step *step);
    void (*begin_micro_step)(int64_t row0); /* global row of this micro-batch's first token: (m R + r) N */
    /* The result of a step that was issued, without waiting at once: post sends it, collect waits for the oldest that
     * was posted and not collected; at most two. */
    void (*result_post)(const StepResult *result);
    void (*result_collect)(StepResult *host);
    void (*product_counts)(ProductCounts *counts);
    /* Choices of algorithms by timing, all NULL where there are none to make. tune times candidates for a layer's three
     * products with N rows; choices are all made so far, as text, owned by the caller; choices_set takes such a text: 0, or
     * -1 with the reason when it is of another library or device. */
    void (*tune)(const Linear *w, int64_t N);
    char *(*choices)(void);
    int (*choices_set)(const char *text, Error *error);
    /* From now on every quantization adds to stats[layer * OPERAND_ROLES + role - ROLE_OPERAND] (host memory, the
     * caller's); NULL: no longer. Slow; changes no result. */
    void (*measure)(QuantStats *stats);

    /* -- operands: make the asked views of `o` (0: nothing; a view that is its source: nothing) -- */
    size_t (*view_bytes)(const ViewFormat *format, unsigned view, int64_t rows, int64_t cols);
    void (*view_place)(View *v, unsigned view, int64_t rows, int64_t cols, void *memory); /* pointers into memory */
    void (*operand_from_tensor)(Operand *o, Tensor x, unsigned views);                    /* x [N, cols] act */
    void (*operand_from_norm)(Operand *o, Tensor x, Tensor stats, const Norm *norm, unsigned views); /* stats [N, S] */
    void (*operand_from_activation)(Operand *o, Tensor h, Activation f, unsigned views); /* h [N, F1] -> o [N, F] */
    void (*operand_from_gradient)(Operand *dy, Tensor g, Tensor dbias); /* dbias [1, cols] += sum of rows */
    void (*operand_from_activation_backward)(Operand *dh, Tensor du, Tensor h, Activation f, Tensor dbias); /* of h */

    /* -- linear layers: the three products -- */
    void (*linear_forward)(Tensor y, const Operand *x, const Linear *w);            /* y [N, out] act, + bias */
    void (*linear_backward_input)(Tensor dx, const Operand *dy, const Linear *w);   /* dx [N, in] act */
    void (*linear_backward_weight)(Linear *w, const Operand *dy, const Operand *x); /* w->dW += */
    /* views from the whole master, once per optimizer step; seed and step place stochastic rounding: the step that will
     * read them */
    void (*weight_prepare)(Linear *w, Tensor master, uint64_t seed, uint32_t step);
    /* The same by parts, when the master is sharded: the largest magnitude of some rows (NaN when there is one) into
     * *amax; and those rows, from row0 (a multiple of 16) on, of every view, given the amax of the whole. */
    void (*weight_amax)(float *amax, Tensor rows);
    void (*weight_pack)(Linear *w, Tensor rows, int64_t row0, const float *amax, uint64_t seed, uint32_t step);
    size_t (*gather_bytes)(const Operand *weight);                         /* of Operand.gathered; or NULL: none */
    int (*weight_pieces)(const Linear *w, WeightPiece out[WEIGHT_PIECES]); /* returns their count */
    /* Once all rows are there, before a product reads the views: what is made of them together; or NULL. */
    void (*weight_unpack)(Linear *w);

    /* -- residual stream and norms -- */
    void (*embedding_forward)(Tensor x, Tensor stats, const int32_t *tokens, Tensor wte, Tensor wpe, int64_t T,
                              int64_t position0, const Norm *first); /* x [N, C]; wte [Vp, C]; wpe [T, C] or absent */
    void (*embedding_backward)(Tensor dwte, Tensor dwpe, Tensor dx, const int32_t *tokens, int64_t T);
    void (*residual_add)(Tensor x, Tensor stats, Tensor x_prev, Tensor y, const Norm *next); /* kind and eps of next */
    void (*norm_backward)(Tensor dx, const Norm *norm, Tensor dy, Tensor x, Tensor stats);   /* dx, dgain, dbias += */

    /* -- attention -- */
    void (*qk_norm_rope_forward)(Tensor out, Tensor qkv, Tensor q_gain, Tensor k_gain, float eps, Tensor cos_sin,
                                 const Attention *a); /* out may be qkv; gains [1, HD] or absent; cos_sin [T, HD] */
    void (*qk_norm_rope_backward)(Tensor dqkv, Tensor dq_gain, Tensor dk_gain, Tensor qkv, Tensor q_gain, Tensor k_gain,
                                  float eps, Tensor cos_sin,
                                  const Attention *a); /* dqkv in place; qkv as forward read */
    void (*attention_forward)(Tensor att, Tensor lse, Tensor q, Tensor k, Tensor v, const Attention *a);
    /* att [B*Tq, NH*HD] act; lse [B*Tq, NH] FP32; k, v [B*Tk, NKV*HD] act */
    void (*attention_backward)(Tensor dq, Tensor dk, Tensor dv, Tensor datt, Tensor att, Tensor lse, Tensor q, Tensor k,
                               Tensor v, const Attention *a);

    /* -- classifier: one chunk of n tokens -- */
    void (*softmax_cross_entropy)(Tensor losses, Tensor logits, const int32_t *targets, int64_t V, bool gradient);
    /* losses [n, 1] FP32; logits [n, Vp] act, replaced by loss_scale * gradient */
    void (*loss_sum)(double *sum, Tensor losses); /* *sum = FP64 over 16-row pieces */

    /* -- optimizer: on the slices that this rank owns -- */
    void (*add)(Tensor sum, Tensor contribution);    /* FP32; one micro-batch's gradient */
    void (*sum_squares)(double *piece, Tensor grad); /* [ceil(rows/16)] FP64, one per 16-row piece */
    /* pieces in table order; loss[j] of every micro-batch in order; tokens of the global batch */
    void (*finish_step)(StepResult *result, const double *piece, int64_t pieces, const double *loss,
                        int64_t micro_batches, int64_t tokens);
    void (*adamw)(const ParamSlice *p, const StepResult *result); /* after it: weight_prepare */
} Ops;

C_END
#endif
