/* Who owns which rows of which parameter, and the hooks that make gpt.c run on them.
 *
 * On one rank everything is whole:
 *
 *     master       BF16 or FP32, what the optimizer updates and a checkpoint saves
 *     prepared     the weights in the form that the products read, where that is not the master itself
 *     sum          FP32 gradients of the step; left at zero by adamw
 *     contribution FP32, as large as the larger of embedding and head
 *     m, v         FP32
 *
 * A block's products add into the sum directly. Embedding and head add into the contribution, zeroed at the bucket's
 * first backward acquire of a micro-step and added to the sum at grads_ready, because their gradient is made of several
 * additions (chunks of tokens, both ends of a tied table) whose order must not depend on what was in the sum before. An
 * untied head is done before the embedding begins, so one buffer serves both.
 *
 * Floor 3.
 */
#ifndef LLMC_ZERO_H
#define LLMC_ZERO_H

#include "gpt.h"

C_BEGIN

typedef struct { /* one parameter's memory, each [rows_padded, cols] of its dtype; absent where not used */
    Tensor master;
    Tensor prepared;       /* what is read, where plain: often the master itself */
    size_t prepared_bytes; /* of a matrix: memory at prepared.data for the views of any phase; 0: master is the view */
    Tensor sum, contribution, m, v;
} Shard;

typedef struct {
    const ParamTable *table;
    const Ops *ops;
    GPT *gpt;
    Shard *shard;            /* [table->count] owned */
    Tensor contribution;     /* FP32 [1, elements] */
    int contribution_bucket; /* whose gradient is in it, or -1 */
    bool train;
} Zero;

/* Places everything in the arena (or counts); without `train` only weights. Pointers must outlive the Zero. */
void zero_create(Zero *zero, const ParamTable *table, const Recipe *recipe, const Ops *ops, bool train, Arena *arena);
void zero_free(Zero *zero);
void zero_bind(Zero *zero, GPT *gpt); /* sets the model's pointers and its hooks */

ParamSlice zero_slice(const Zero *zero, int param); /* what this rank's adamw updates: true rows, no padding */
void zero_init_params(Zero *zero, uint64_t seed);   /* initial masters; m and v are zero */

/* 64-bit hash of masters, m and v: a sum over 16-row pieces, so that shards add up to the whole's. Waits for the
 * backend. Padding rows never enter. */
uint64_t zero_state_hash(const Zero *zero);

C_END
#endif
