/* The transformer: GPT-2, Llama and Qwen3 as one struct, one forward and one backward (gpt.c). config.h has the table
 * of what differs between the three.
 *
 * Floor 3.
 */
#ifndef LLMC_GPT_H
#define LLMC_GPT_H

#include "params.h"
#include "recipe.h"

C_BEGIN

/* ---- parameters, as the model sees them ---- */

typedef struct {
    Norm norm1, norm2;
    Linear qkv, o, up, down;                 /* [QKV, C] [C, NH*HD] [F1, C] [C, F] */
    Tensor q_gain, k_gain, dq_gain, dk_gain; /* [1, HD] FP32, qwen3 */
} Block;

/* ---- activations: every buffer of a micro-step, placed by gpt_layout ---- */

typedef struct {
    Operand a, o, b, u;                   /* inputs of qkv [N, C], o [N, NH*HD], up [N, C], down [N, F] */
    Tensor qkv, att, lse, x2, stats2, h;  /* [N,QKV] [N,NH*HD] [N,NH] [N,C] [N,S] [N,F1] */
    Tensor rotated;                       /* [N, QKV] after QK-norm and RoPE; is qkv itself unless qwen3 */
    Operand dy_qkv, dy_o, dy_up, dy_down; /* output gradients as operands */
    Tensor dqkv, datt, du;                /* [N, QKV] [N, NH*HD] [N, F] */
    size_t saved, saved_operands; /* bytes that the block keeps for its backward; of them, views of its operands */
} BlockActivations;

typedef struct {
    int64_t N, chunk;  /* tokens; tokens a classifier chunk, a pure function of N and Vp: part of the numbers */
    Tensor *x, *stats; /* [L+1] of [N, C], [N, S]: the residual stream at each block's door; arrays owned by GPT */
    BlockActivations *block;   /* [L] owned by GPT */
    Tensor y, dx, dnorm;       /* [N, C] a branch's output; gradient of the stream; gradient of a norm's output */
    Operand f, dy_head;        /* classifier chunk: [chunk, C], [chunk, Vp] */
    Tensor logits, df;         /* [chunk, Vp], [chunk, C] */
    Tensor losses;             /* [N, 1] FP32 */
    Tensor *k_cache, *v_cache; /* [L] of [T, NKV*HD], generate only; arrays owned by GPT */
} Activations;

/* USE_TRAIN serves evaluation too. USE_GENERATE: one sequence, T new tokens a call, keys and values in a cache that
 * stands first in memory, so that the layout for the prompt and the one for single tokens share it. */
typedef enum { USE_TRAIN, USE_EVALUATE, USE_GENERATE } Use;

typedef struct {
    int64_t B, T;
    Use use;
    Recompute recompute;
} Shape;

typedef struct {
    const int32_t *tokens, *targets; /* [N], backend memory */
    const int32_t *first_key;        /* [N] document starts (gpt_document_starts), or NULL */
    int64_t row0;                    /* (m R + r) N */
    double *loss;                    /* out: sum over the micro-batch, backend memory */
} Batch;

/* ---- hooks: where sharding, gathering and reduction live (zero.h). On one rank a block's do nothing. ---- */

typedef enum { FORWARD, BACKWARD } Direction;

/* bucket: 0..L-1 a block, L the embedding (if tied with head and final norm), L+1 the untied head and final norm */
typedef struct {
    void *context;
    /* After it the bucket's weights are readable. Backward: every gradient pointer is set too, to the running sum, or
     * to a contribution, zeroed at its first acquire of the micro-step. `direction` says what to prefetch. */
    void (*block_acquire)(void *context, int bucket, Direction direction);
    void (*block_release)(void *context, int bucket, Direction direction);
    void (*grads_ready)(void *context, int bucket); /* this micro-batch's gradient of the bucket is complete */
    void (*prepare_weights)(void *context);         /* views are stale: after adamw, resume, or a change of phase */
} Hooks;

typedef struct {
    const GPTConfig *config;
    const Ops *ops;
    const Recipe *recipe;
    Hooks hooks;
    Shape shape;
    int phase;     /* of the recipe; -1 before the first step */
    uint64_t seed; /* of stochastic rounding; set by whoever creates the GPT */
    uint32_t step; /* for which the weights' views were made */

    Block *block;                /* [L] owned */
    Tensor wte, wpe, dwte, dwpe; /* [Vp, C], [T, C] */
    Norm final_norm;
    Linear head;    /* [Vp, C]; weight and dW are wte's when tied */
    Tensor cos_sin; /* [T, HD] FP32, made by gpt_create in the arena */

    Arena *arena; /* activations only, from arena_start up */
    size_t arena_start;
    Activations acts;
} GPT;

/* Places every activation, or with arena->base NULL counts: the allocator and `plan` both call this. `acts` needs its
 * arrays (gpt_activations_new). */
void gpt_layout(Activations *acts, Arena *arena, const Ops *ops, const GPTConfig *config, const Recipe *recipe,
                int phase, const Shape *shape);
void gpt_activations_new(Activations *acts, const GPTConfig *config);
void gpt_activations_free(Activations *acts);
Need gpt_need(const GPTConfig *config, const Shape *shape);

/* Takes the RoPE table from the arena and, where it has memory, fills it; the activations come after it. Parameters are
 * bound by zero.c through gpt_place. Everything pointed to must outlive the GPT. */
void gpt_create(GPT *gpt, const GPTConfig *config, const Ops *ops, const Recipe *recipe, Arena *arena);
void gpt_free(GPT *gpt);

typedef struct {          /* where a parameter and its gradient live in the model */
    Linear *linear;       /* a matrix that products read: views of weight, dW; else NULL and: */
    Tensor *value, *grad; /* a vector, wte or wpe */
} ParamPlace;
ParamPlace gpt_place(GPT *gpt, const Param *param);
void gpt_tune(const GPT *gpt); /* ops->tune for every linear layer as it is trained */
void gpt_tie_head(GPT *gpt);   /* tied models: the head reads wte and adds to dwte, both bound before */

void gpt_set_shape(GPT *gpt,
                   const Shape *shape); /* lays the activations out anew; nothing in them survives but caches */
/* Formats of this step, and every view of the weights made anew: after parameters were loaded or updated, and before
 * the first evaluation; so what is evaluated after a step is in the formats of the next one. On a change of phase the activations are laid out anew too. */
void gpt_enter_step(GPT *gpt, uint32_t step);
/* The recipe's shadow phase, until the next gpt_enter_step. */
void gpt_enter_shadow(GPT *gpt);
/* Places the views of an operand that is made from `source` (Tensor{0}: by computation) and lives as a whole. */
void gpt_place_operand(Arena *arena, const Ops *op, Operand *o, Tensor source);

/* Gradient accumulation: adds this rank's micro-batches, and through grads_ready all ranks', to sums that the optimizer
 * left at zero. */
void gpt_gradients(GPT *gpt, const Step *step, const Batch *micro_batch, int64_t micro_steps);
void gpt_evaluate(GPT *gpt, const Batch *batch); /* acts.losses and the batch's loss */
/* USE_GENERATE: shape.T new tokens at position0; logits of the last one, [1, Vp] act. */
Tensor gpt_logits(GPT *gpt, const Batch *batch, int64_t position0);

/* first_key[b, t] = where the document of token (b, t) starts: at the last `eot` at or before t, else 0. Host memory.
 */
void gpt_document_starts(int32_t *first_key, const int32_t *tokens, int64_t B, int64_t T, int32_t eot);

C_END
#endif
