/* One model in memory with all that a run needs: parameters, gradients, optimizer, activations, batches, workspace.
 *
 * One function lays it out (model.c: lay_out), into an arena that only counts, for `plan`, and then into one allocation
 * of exactly that size. So what `plan` prints is what a run takes.
 *
 *     | masters, prepared | gradients, contribution | m, v | shadow | pieces, batches | workspace | RoPE table | activations |
 *
 * The activations' place is used in turn by training (evaluation shares its layout) and generation. Floor 4.
 */
#ifndef LLMC_MODEL_H
#define LLMC_MODEL_H

#include "optimizer.h"

C_BEGIN

typedef struct {
    GPTConfig config;
    RecipeSpec recipe;
    Sharding sharding;      /* without a Comm: one rank */
    uint64_t seed;          /* of stochastic rounding */
    bool train, generate;   /* which uses memory is laid out for; without train: evaluation, if B > 0 */
    int64_t B, micro_steps; /* sequences of a micro-batch, micro-batches a step of this rank */
    Recompute recompute;
    bool document_mask, native_rounding;
    int64_t eot_token;
} ModelSpec;

typedef struct {
    ModelSpec spec;
    const Ops *ops;
    Recipe recipe;
    ParamTable table;
    Zero zero;
    Tensor shadow;       /* FP32 [1, elements of the blocks' matrices] for telemetry.c; with recipe.shadow only */
    Optimizer optimizer; /* train only */
    GPT gpt;
    Need need;
    Arena arena;
    int32_t *tokens, *targets, *first_key; /* [micro_steps][B][T] backend memory */
    double *loss;                          /* [1] of an evaluation */
    void *workspace;
    int32_t *host; /* [B][T] */
} Model;

/* Counts only: model->arena.bytes by purpose. 0 or -1 (a recipe that cannot be, alone or with these micro-batches).
 * model_close is due after 0. */
int model_plan(Model *model, const ModelSpec *spec, const Ops *ops, Error *error);
/* The same, then allocates; parameters are not filled yet. */
int model_open(Model *model, const ModelSpec *spec, const Ops *ops, Error *error);
void model_close(Model *model);

/* Laid out for training or evaluation (the default after model_open) or for generation of `tokens` at a time. */
void model_use(Model *model, Use use, int64_t tokens);

/* Uploads one micro-batch, [B][T] each in host memory, into slot m. */
Batch model_upload(Model *model, int64_t m, const int32_t *tokens, const int32_t *targets);
/* For generation: `count` tokens of one sequence. */
Batch model_upload_tokens(Model *model, const int32_t *tokens, int64_t count);

C_END
#endif
