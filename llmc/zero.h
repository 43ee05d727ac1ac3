/* Who owns which rows of which parameter, and the hooks that make gpt.c run on them: ZeRO (Rajbhandari et al.
 * 1910.02054), stages 0 to 3, over the ranks of a Comm.
 *
 *     stage   masters, m, v   gradient sum   prepared weights
 *       0     whole           whole          whole, made on every rank
 *       1     own rows        whole          whole, gathered after the update
 *       2     own rows        own rows       whole, gathered after the update
 *       3     own rows        own rows       two blocks, gathered before use; embedding and head whole
 *
 * Each parameter is cut on its own at units of 16 rows: rank r of R owns units [U r / R, U (r + 1) / R) (comm.h). What is
 * gathered is what the products read, NVFP4 codes and scales or BF16, never the master: each rank makes its rows of every
 * view (weight_pack) in place, in the memory where all of them will be read, or, where a view does not keep 16 rows
 * together, beside it (Operand.gathered).
 *
 *     master       BF16 or FP32, what the optimizer updates and a checkpoint saves
 *     prepared     the weights in the form that the products read, where that is not the master itself
 *     sum          FP32 gradients of the step; left at zero by adamw
 *     contribution FP32: one micro-batch's gradient, whole, on its way into the owners' sums
 *     m, v         FP32
 *
 * On one rank a block's products add into the sum directly. Embedding and head add into a contribution, zeroed at the
 * bucket's first backward acquire of a micro-step and added to the sum at grads_ready, because their gradient is made of
 * several additions (chunks of tokens, both ends of a tied table) whose order must not depend on what was in the sum
 * before. On several ranks every bucket has a contribution: grads_ready starts its reduction, which adds rank 0's, rank
 * 1's, ... to the owners' sums (so over micro-batches in the order j = m R + r, as one rank would), and the memory is
 * waited for when the next bucket needs it: blocks take turns in two slots, embedding and head share one. In fast order
 * stages 0 and 1 add up all micro-steps in the rank's own whole sum first and reduce that once.
 *
 * Floor 3.
 */
#ifndef LLMC_ZERO_H
#define LLMC_ZERO_H

#include "comm.h"
#include "gpt.h"

C_BEGIN

typedef struct { /* how a run is spread */
    Comm *comm;
    int stage;           /* 0 .. 3; without meaning on one rank */
    ReduceOrder order;   /* ordered: the same bits for any number of ranks */
    int64_t micro_steps; /* of this rank */
} Sharding;

typedef struct {           /* one parameter's memory; absent where not used */
    int64_t row0, rows;    /* this rank's rows, without padding; all of them where it is not sharded */
    Tensor master, m, v;   /* [rows, cols]; whole ones [rows_padded, cols] */
    Tensor sum;            /* [rows_padded, cols], or own rows */
    Tensor contribution;   /* [rows_padded, cols] */
    Tensor prepared;       /* what is read, where plain: on one rank often the master itself */
    size_t prepared_bytes; /* memory at prepared.data for the views of any phase; 0: the master is the view */
} Shard;

typedef struct {      /* one bucket's collectives */
    int first, count; /* its parameters in the table */
    Piece *gradient;  /* [count] owned: of sum and contribution */
    char *region;     /* prepared memory; stage 3: a slot that blocks share */
    Piece *weight;    /* [weights] owned, made when views are placed */
    int weights;
    Request gather, reduce; /* in flight, or 0 */
    bool stale;             /* its weights are to be gathered, and are not on their way */
    int64_t ready;          /* micro-steps of this step whose gradient is in a sum that is reduced once */
    void *work;             /* of a reduction; shared like the contribution */
} BucketState;

typedef struct {
    const ParamTable *table;
    const Ops *ops;
    GPT *gpt;
    Sharding sharding;
    Shard *shard;            /* [table->count] owned */
    BucketState *bucket;     /* [table->buckets] owned */
    int contribution_bucket; /* of embedding and head: whose gradient is in the contribution, or -1 */
    int held[2];             /* stage 3: the block whose weights are in a slot, or -1 */
    int reducing[3]; /* the bucket whose contribution is in a slot and being reduced, or -1; 2: embedding, head */
    float *amax;     /* [table->count] of sharded NVFP4 matrices, over all ranks */
    void *amax_work;
    void *whole; /* room for one whole tensor: checkpoints */
} Zero;

/* Places everything in the arena (or counts); without `train` only weights. Pointers must outlive the Zero. */
void zero_create(Zero *zero, const ParamTable *table, const Recipe *recipe, const Ops *ops, const Sharding *sharding,
                 bool train, Arena *arena);
void zero_free(Zero *zero);
void zero_bind(Zero *zero, GPT *gpt); /* sets the model's pointers and its hooks */

bool zero_sharded(const Zero *zero); /* are masters, m and v split over ranks */
/* Payload bytes that all ranks together send in one training step (gradients and update) of a phase: the formula that
 * comm->bytes_sent is tested against. */
size_t zero_wire_bytes(const Zero *zero, const Recipe *recipe, int phase);
ParamSlice zero_slice(const Zero *zero, int param); /* what this rank's adamw updates: true rows, no padding */
void zero_init_params(Zero *zero, uint64_t seed);   /* initial masters; m and v are zero */

/* After the last micro-step: every reduction has ended, and at stage 0 every rank has the whole sums. */
void zero_finish_gradients(Zero *zero);

/* 64-bit hash of masters, m and v: a sum over 16-row pieces, so that shards add up to the whole's. Waits for the
 * backend; on several ranks all call it. Padding rows never enter. */
uint64_t zero_state_hash(const Zero *zero);

/* For checkpoints. The rows of a parameter that one of `ranks` ranks owns where it is sharded: returns their count, from
 * *row0 on. And this rank's memory of a kind of state, which begins with row zero_slice().row0. */
typedef enum { SHARD_MASTER, SHARD_M, SHARD_V } ShardMember;
int64_t zero_share(const Param *p, int rank, int ranks, int64_t *row0);
Tensor zero_own(const Zero *zero, int param, ShardMember member);

/* One master whole: the memory where it stands whole (the master itself where it is); every rank's rows gathered there,
 * called by all ranks; and own rows taken from there. Valid until the next call. */
Tensor zero_whole(const Zero *zero, int param);
Tensor zero_gather(const Zero *zero, int param);
void zero_take(const Zero *zero, int param);

C_END
#endif
