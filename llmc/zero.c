/* See zero.h. Order: memory, weights, gradients, bytes on the wire, the model's pointers, checkpoints, start and hash.
 * Over 600 lines because the four stages are one set of cases over the same memory: split, each case would be read twice. */
#include "zero.h"

#include "numerics.h"
#include "philox.h"

#include <stdlib.h>

/* ---- memory ---- */

enum { TABLE_SLOT = 2 }; /* of contributions: embedding and head; 0 and 1: blocks by turns */

static bool is_table(const ParamTable *table, int bucket) { return bucket >= table->layers; }
static int slot_of(const Zero *zero, int bucket) { return is_table(zero->table, bucket) ? TABLE_SLOT : bucket % 2; }
static int ranks_of(const Zero *zero) { return zero->sharding.comm->ranks; }
bool zero_sharded(const Zero *zero) { return ranks_of(zero) > 1 && zero->sharding.stage >= 1; }
static bool sum_is_own(const Zero *zero) { return ranks_of(zero) > 1 && zero->sharding.stage >= 2; }
static bool reduces_once(const Zero *zero)
{
    return ranks_of(zero) > 1 && zero->sharding.order == REDUCE_FAST && zero->sharding.stage <= 1;
}
static bool in_slots(const Zero *zero, int bucket)
{
    return ranks_of(zero) > 1 && zero->sharding.stage == 3 && !is_table(zero->table, bucket);
}

static DType read_dtype(const Param *p, const Recipe *recipe) { return p->decay ? recipe->act : DTYPE_FP32; }

/* The piece of `bucket` (one tensor over all its elements) that belongs to a parameter. */
static Tensor piece_of(Tensor bucket, const Param *p)
{
    Tensor piece = {NULL, bucket.dtype, p->rows_padded, p->cols, p->cols};
    if (bucket.data) piece.data = (char *)bucket.data + p->offset * dtype_bytes(bucket.dtype);
    return piece;
}

/* This rank's rows, or everything with its padding. */
static Tensor own_tensor(const Zero *zero, Arena *arena, DType dtype, int i)
{
    const Param *p = &zero->table->param[i];
    return arena_tensor(arena, dtype, zero_sharded(zero) ? zero->shard[i].rows : p->rows_padded, p->cols);
}

int64_t zero_share(const Param *p, int rank, int ranks, int64_t *row0)
{
    int64_t units = ceil_div(p->rows, 16), end = min_i64(p->rows, 16 * share_first(units, rank + 1, ranks));
    *row0 = min_i64(p->rows, 16 * share_first(units, rank, ranks));
    return end - *row0;
}

static void own_rows(Zero *zero)
{
    const Comm *c = zero->sharding.comm;
    for (int i = 0; i < zero->table->count; i++) {
        Shard *s = &zero->shard[i];
        s->rows = zero_sharded(zero) ? zero_share(&zero->table->param[i], c->rank, c->ranks, &s->row0)
                                     : zero->table->param[i].rows;
    }
}

/* Gradient sums: one buffer a bucket, of all rows or of this rank's. */
static void place_sums(Zero *zero, Arena *arena)
{
    const ParamTable *table = zero->table;
    const Comm *c = zero->sharding.comm;
    arena->purpose = PURPOSE_GRADIENT;
    for (int b = 0; b < table->buckets; b++) {
        BucketState *state = &zero->bucket[b];
        size_t own = 0;
        for (int k = 0; k < state->count; k++) {
            const Param *p = &table->param[state->first + k];
            state->gradient[k] = (Piece){p->offset * sizeof(float), own, 16 * (size_t)p->cols * sizeof(float),
                                         (size_t)(p->rows * p->cols) * sizeof(float)};
            Bucket one = {NULL, false, 1, &state->gradient[k]};
            own += (share_bytes(&one, c->rank, c->ranks) + 255) / 256 * 256;
        }
        size_t floats = sum_is_own(zero) ? own / sizeof(float) : table->bucket_elements[b];
        Tensor bucket = arena_tensor(arena, DTYPE_FP32, 1, (int64_t)floats);
        for (int k = 0; k < state->count; k++) {
            const Param *p = &table->param[state->first + k];
            Shard *s = &zero->shard[state->first + k];
            s->sum = piece_of(bucket, p);
            if (!sum_is_own(zero)) continue;
            s->sum = (Tensor){bucket.data, DTYPE_FP32, s->rows, p->cols, p->cols};
            if (bucket.data) s->sum.data = (char *)bucket.data + state->gradient[k].own;
        }
    }
}

/* One micro-batch's gradient: on one rank only of embedding and head. */
static void place_contributions(Zero *zero, Arena *arena)
{
    const ParamTable *table = zero->table;
    const Comm *c = zero->sharding.comm;
    for (int slot = c->ranks > 1 ? 0 : TABLE_SLOT; slot <= TABLE_SLOT; slot++) {
        size_t largest = 0, most_work = 0;
        for (int b = 0; b < table->buckets; b++) {
            const BucketState *state = &zero->bucket[b];
            Bucket bucket = {NULL, false, state->count, state->gradient};
            if (slot_of(zero, b) != slot) continue;
            if (table->bucket_elements[b] > largest) largest = table->bucket_elements[b];
            size_t work = comm_reduce_scatter_work(&bucket, c->rank, c->ranks);
            if (work > most_work) most_work = work;
        }
        if (reduces_once(zero) && slot != TABLE_SLOT) largest = 0;
        Tensor whole = arena_tensor(arena, DTYPE_FP32, 1, (int64_t)largest);
        void *work = arena_take(arena, most_work);
        for (int b = 0; b < table->buckets; b++) {
            if (slot_of(zero, b) != slot) continue;
            zero->bucket[b].work = work;
            for (int k = 0; k < zero->bucket[b].count; k++) {
                int i = zero->bucket[b].first + k;
                if (largest) zero->shard[i].contribution = piece_of(whole, &table->param[i]);
            }
        }
    }
}

static void place_training(Zero *zero, Arena *arena)
{
    place_sums(zero, arena);
    place_contributions(zero, arena);
    arena->purpose = PURPOSE_OPTIMIZER;
    for (int i = 0; i < zero->table->count; i++) zero->shard[i].m = own_tensor(zero, arena, DTYPE_FP32, i);
    for (int i = 0; i < zero->table->count; i++) zero->shard[i].v = own_tensor(zero, arena, DTYPE_FP32, i);
}

/* Formats of a matrix's operands in one phase; NULL for tables that no product reads. */
static const LinearFormats *formats_of(const Recipe *recipe, int phase, const Param *p)
{
    if (p->kind == PARAM_LM_HEAD) return &recipe->head;
    if (p->kind > PARAM_DOWN) return NULL;
    return recipe_formats(recipe, phase, p->layer, (int)(p->kind - PARAM_QKV));
}

static Operand weight_operand(const Param *p, const LinearFormats *f)
{
    return (Operand){
        .rows = p->rows_padded, .cols = p->cols, .layer = p->layer, .row.format = f->w_row, .col.format = f->w_col};
}

/* A view may be the master itself where that is whole. */
static Tensor view_source(const Zero *zero, const Shard *shard)
{
    Tensor computed = {0};
    return zero_sharded(zero) ? computed : shard->master;
}

static void place_weight(const Zero *zero, Arena *arena, Operand *o, const Shard *shard)
{
    gpt_place_operand(arena, zero->ops, o, view_source(zero, shard));
    if (zero_sharded(zero) && zero->ops->gather_bytes) o->gathered = arena_take(arena, zero->ops->gather_bytes(o));
}

/* What the reader of a parameter needs beside the master: the most of any phase. */
static size_t prepared_bytes(const Zero *zero, const Param *p, const Recipe *recipe, const Shard *shard)
{
    size_t most = 0;
    if (!formats_of(recipe, 0, p)) {
        if (!zero_sharded(zero) && read_dtype(p, recipe) == p->master) return 0;
        return (size_t)(p->rows_padded * p->cols) * dtype_bytes(read_dtype(p, recipe));
    }
    for (int phase = 0; phase < recipe->phases; phase++) {
        Arena count = {0};
        Operand o = weight_operand(p, formats_of(recipe, phase, p));
        place_weight(zero, &count, &o, shard);
        if (count.peak > most) most = count.peak;
    }
    return most;
}

/* Prepared weights: after one another; at stage 3 the blocks take turns in two slots. */
static void place_prepared(Zero *zero, const Recipe *recipe, Arena *arena)
{
    const ParamTable *table = zero->table;
    size_t slot_bytes = 0;
    char *slot[2] = {NULL, NULL};
    arena->purpose = PURPOSE_PREPARED;
    for (int b = 0; b < table->buckets; b++) {
        size_t bytes = 0;
        for (int k = 0; k < zero->bucket[b].count; k++) {
            int i = zero->bucket[b].first + k;
            zero->shard[i].prepared_bytes = prepared_bytes(zero, &table->param[i], recipe, &zero->shard[i]);
            bytes += (zero->shard[i].prepared_bytes + 255) / 256 * 256;
        }
        if (in_slots(zero, b) && bytes > slot_bytes) slot_bytes = bytes;
        if (!in_slots(zero, b)) zero->bucket[b].region = arena_take(arena, bytes);
    }
    for (int k = 0; k < 2 && slot_bytes; k++) slot[k] = arena_take(arena, slot_bytes);
    for (int b = 0; b < table->buckets; b++) {
        size_t at = 0;
        if (in_slots(zero, b)) zero->bucket[b].region = slot[b % 2];
        for (int k = 0; k < zero->bucket[b].count; k++) {
            const Param *p = &table->param[zero->bucket[b].first + k];
            Shard *s = &zero->shard[zero->bucket[b].first + k];
            s->prepared = (Tensor){NULL, read_dtype(p, recipe), p->rows_padded, p->cols, p->cols};
            if (!s->prepared_bytes) s->prepared = s->master;
            if (s->prepared_bytes && zero->bucket[b].region) s->prepared.data = zero->bucket[b].region + at;
            at += (s->prepared_bytes + 255) / 256 * 256;
        }
    }
}

void zero_create(Zero *zero, const ParamTable *table, const Recipe *recipe, const Ops *ops, const Sharding *sharding,
                 bool train, Arena *arena)
{
    *zero = (Zero){.table = table,
                   .ops = ops,
                   .sharding = *sharding,
                   .contribution_bucket = -1,
                   .held = {-1, -1},
                   .reducing = {-1, -1, -1}};
    zero->shard = xcalloc((size_t)table->count, sizeof *zero->shard);
    zero->bucket = xcalloc((size_t)table->buckets, sizeof *zero->bucket);
    for (int i = table->count - 1; i >= 0; i--) {
        BucketState *state = &zero->bucket[table->param[i].bucket];
        state->first = i;
        state->count++;
    }
    for (int b = 0; b < table->buckets; b++) {
        BucketState *state = &zero->bucket[b];
        state->gradient = xcalloc((size_t)state->count, sizeof *state->gradient);
        state->weight = xcalloc((size_t)state->count * WEIGHT_PIECES, sizeof *state->weight);
    }
    own_rows(zero);
    arena->purpose = PURPOSE_MASTER;
    for (int i = 0; i < table->count; i++) zero->shard[i].master = own_tensor(zero, arena, table->param[i].master, i);
    place_prepared(zero, recipe, arena);
    if (zero_sharded(zero)) {
        size_t largest = 0;
        arena->purpose = PURPOSE_WORKSPACE;
        size_t bytes = (size_t)table->count * sizeof *zero->amax;
        zero->amax = arena_take(arena, bytes);
        zero->amax_work = arena_take(arena, comm_all_reduce_work(bytes, ranks_of(zero)));
        for (int i = 0; i < table->count; i++) {
            const Param *p = &table->param[i];
            size_t whole = (size_t)(p->rows_padded * p->cols) * dtype_bytes(p->master);
            if (whole > largest) largest = whole;
        }
        zero->whole = arena_take(arena, largest);
    }
    if (train) place_training(zero, arena);
}

static void forget_gathers(Zero *zero);

void zero_free(Zero *zero)
{
    if (zero->bucket) forget_gathers(zero);
    for (int b = 0; zero->bucket && b < zero->table->buckets; b++) {
        free(zero->bucket[b].gradient);
        free(zero->bucket[b].weight);
    }
    free(zero->bucket);
    free(zero->shard);
    *zero = (Zero){0};
}

/* ---- weights: own rows packed in place, the others' gathered ---- */

static Linear *linear_of(const Zero *zero, int i) { return gpt_place(zero->gpt, &zero->table->param[i]).linear; }

/* The views that the formats of the phase ask for, in the parameter's prepared memory; of a sharded bucket also what is
 * gathered. */
static void place_weights(Zero *zero, int b)
{
    BucketState *state = &zero->bucket[b];
    state->weights = 0;
    for (int i = state->first; i < state->first + state->count; i++) {
        const Param *p = &zero->table->param[i];
        const Shard *s = &zero->shard[i];
        Linear *linear = linear_of(zero, i);
        WeightPiece piece[WEIGHT_PIECES];
        int count = 1;
        size_t row_bytes = (size_t)p->cols * dtype_bytes(s->prepared.dtype);
        piece[0] = (WeightPiece){s->prepared.data, 16 * row_bytes, (size_t)p->rows * row_bytes};
        if (linear) {
            Arena arena = {.base = s->prepared_bytes ? s->prepared.data : NULL, .capacity = s->prepared_bytes};
            place_weight(zero, &arena, &linear->weight, s);
        }
        if (!zero_sharded(zero)) continue;
        if (linear && p->rows == p->rows_padded) count = zero->ops->weight_pieces(linear, piece);
        for (int k = 0; k < count; k++)
            state->weight[state->weights++] = (Piece){(size_t)(piece[k].data - state->region), 0, piece[k].unit,
                                                      piece[k].bytes};
    }
}

static void start_gather(Zero *zero, int b)
{
    BucketState *state = &zero->bucket[b];
    for (int i = state->first; i < state->first + state->count; i++) {
        Shard *s = &zero->shard[i];
        Linear *linear = linear_of(zero, i);
        Tensor own = tensor_rows(s->master, 0, s->rows);
        if (linear)
            zero->ops->weight_pack(linear, own, s->row0, &zero->amax[i], zero->gpt->seed, zero->gpt->step);
        else if (s->rows)
            zero->ops->copy(tensor_rows(s->prepared, s->row0, s->rows), own);
    }
    Bucket whole = {state->region, false, state->weights, state->weight};
    state->gather = zero->sharding.comm->all_gather_start(zero->sharding.comm, whole, whole);
}

enum { GATHERS_AHEAD = 4 }; /* of blocks at stages 1 and 2: a Comm has room for COMM_IN_FLIGHT */

static void gather_stale(Zero *zero, int b)
{
    if (b >= zero->table->buckets || !zero->bucket[b].stale) return;
    zero->bucket[b].stale = false;
    start_gather(zero, b);
}

/* The gather is over; false when none was on its way. */
static bool await_gather(Zero *zero, int b)
{
    if (!zero->bucket[b].gather) return false;
    zero->sharding.comm->finish(zero->sharding.comm, zero->bucket[b].gather);
    zero->bucket[b].gather = 0;
    return true;
}

/* The same of weights that are about to be read. */
static void finish_gather(Zero *zero, int b)
{
    const BucketState *state = &zero->bucket[b];
    if (!await_gather(zero, b) || !zero->ops->weight_unpack) return;
    for (int i = state->first; i < state->first + state->count; i++)
        if (linear_of(zero, i)) zero->ops->weight_unpack(linear_of(zero, i));
}

static void forget_gathers(Zero *zero) /* of weights that no pass has read */
{
    for (int b = 0; b < zero->table->buckets; b++) await_gather(zero, b);
}

/* Stage 3: the block's weights are in its slot, or on their way. */
static void fetch(Zero *zero, int b)
{
    if (b < 0 || b >= zero->table->layers || !in_slots(zero, b) || zero->held[b % 2] == b) return;
    if (zero->held[b % 2] >= 0) await_gather(zero, zero->held[b % 2]);
    zero->held[b % 2] = b;
    start_gather(zero, b);
}

static void find_amax(Zero *zero)
{
    Comm *c = zero->sharding.comm;
    zero->ops->zero((Tensor){zero->amax, DTYPE_FP32, 1, zero->table->count, zero->table->count});
    for (int i = 0; i < zero->table->count; i++) {
        Linear *linear = linear_of(zero, i);
        if (linear &&
            (linear->weight.row.format.format == FORMAT_NVFP4 || linear->weight.col.format.format == FORMAT_NVFP4))
            zero->ops->weight_amax(&zero->amax[i], tensor_rows(zero->shard[i].master, 0, zero->shard[i].rows));
    }
    c->finish(c, c->all_reduce_max_start(c, zero->amax, zero->table->count, zero->amax_work));
}

static void prepare_weights(void *context)
{
    Zero *zero = context;
    forget_gathers(zero);
    zero->held[0] = zero->held[1] = -1;
    for (int b = 0; b < zero->table->buckets; b++) place_weights(zero, b);
    if (zero_sharded(zero)) {
        find_amax(zero);
        for (int b = 0; b < zero->table->buckets; b++) zero->bucket[b].stale = !in_slots(zero, b);
        for (int b = zero->table->layers; b < zero->table->buckets; b++) gather_stale(zero, b);
        for (int b = 0; b < GATHERS_AHEAD; b++) gather_stale(zero, b);
        return;
    }
    for (int i = 0; i < zero->table->count; i++) {
        const Shard *shard = &zero->shard[i];
        Linear *linear = linear_of(zero, i);
        if (linear)
            zero->ops->weight_prepare(linear, shard->master, zero->gpt->seed, zero->gpt->step);
        else if (shard->prepared.data != shard->master.data)
            zero->ops->copy(shard->prepared, shard->master);
    }
}

/* ---- gradients ---- */

/* Do products add into the sum itself? Else into the contribution. */
static bool adds_directly(const Zero *zero, int b)
{
    return (ranks_of(zero) == 1 || reduces_once(zero)) && !is_table(zero->table, b);
}

static void finish_reduction(Zero *zero, int slot)
{
    int b = zero->reducing[slot];
    if (b < 0) return;
    zero->sharding.comm->finish(zero->sharding.comm, zero->bucket[b].reduce);
    zero->reducing[slot] = -1;
}

/* The bucket's contribution, free and zero. */
static void open_contribution(Zero *zero, int b)
{
    const BucketState *state = &zero->bucket[b];
    Tensor whole = zero->shard[state->first].contribution; /* the first parameter stands first */
    finish_reduction(zero, slot_of(zero, b));
    zero->ops->zero((Tensor){whole.data, DTYPE_FP32, 1, (int64_t)zero->table->bucket_elements[b],
                             (int64_t)zero->table->bucket_elements[b]});
}

static void block_acquire(void *context, int bucket, Direction direction)
{
    Zero *zero = context;
    if (in_slots(zero, bucket)) {
        fetch(zero, bucket);
        finish_gather(zero, bucket);
        fetch(zero, direction == FORWARD ? bucket + 1 : bucket - 1);
    } else {
        for (int b = bucket; b <= bucket + GATHERS_AHEAD; b++) gather_stale(zero, b);
        finish_gather(zero, bucket);
    }
    if (direction != BACKWARD || adds_directly(zero, bucket)) return;
    if (!is_table(zero->table, bucket)) {
        open_contribution(zero, bucket);
    } else if (zero->contribution_bucket != bucket) {
        open_contribution(zero, bucket);
        zero->contribution_bucket = bucket;
    }
}

static void block_release(void *context, int bucket, Direction direction)
{
    (void)context, (void)bucket, (void)direction; /* a slot is free when the next block but one is fetched */
}

static void grads_ready(void *context, int bucket)
{
    Zero *zero = context;
    BucketState *state = &zero->bucket[bucket];
    bool alone = ranks_of(zero) == 1;
    if (is_table(zero->table, bucket)) {
        zero->contribution_bucket = -1;
        for (int i = state->first; i < state->first + state->count && (alone || reduces_once(zero)); i++)
            zero->ops->add(zero->shard[i].sum, zero->shard[i].contribution);
    }
    if (alone || (reduces_once(zero) && ++state->ready < zero->sharding.micro_steps)) return;
    state->ready = 0;
    Bucket sum = {zero->shard[state->first].sum.data, sum_is_own(zero), state->count, state->gradient};
    Bucket contribution = {zero->shard[state->first].contribution.data, false, state->count, state->gradient};
    if (reduces_once(zero)) {
        contribution = sum;
        finish_reduction(zero, slot_of(zero, bucket)); /* its work is this one's */
    }
    Comm *c = zero->sharding.comm;
    state->reduce = c->reduce_scatter_start(c, sum, contribution, zero->sharding.order, state->work);
    zero->reducing[slot_of(zero, bucket)] = bucket;
}

/* What this rank added up for the rows of others, who have it now. */
static void forget_others(Zero *zero)
{
    for (int i = 0; i < zero->table->count; i++) {
        const Shard *s = &zero->shard[i];
        int64_t rows = zero->table->param[i].rows, end = s->row0 + s->rows;
        if (s->row0) zero->ops->zero(tensor_rows(s->sum, 0, s->row0));
        if (end < rows) zero->ops->zero(tensor_rows(s->sum, end, rows - end));
    }
}

void zero_finish_gradients(Zero *zero)
{
    Comm *c = zero->sharding.comm;
    for (int slot = 0; slot <= TABLE_SLOT; slot++) finish_reduction(zero, slot);
    if (reduces_once(zero) && zero->sharding.stage == 1) forget_others(zero);
    if (c->ranks == 1 || zero->sharding.stage > 0) return;
    for (int b = 0; b < zero->table->buckets; b++) {
        BucketState *state = &zero->bucket[b];
        Bucket sum = {zero->shard[state->first].sum.data, false, state->count, state->gradient};
        c->finish(c, c->all_gather_start(c, sum, sum));
    }
}

/* ---- bytes on the wire ---- */

/* Of a bucket's weights as they are gathered, in one phase. */
static size_t gathered_bytes(const Zero *zero, const Recipe *recipe, int phase, int b)
{
    size_t bytes = 0;
    for (int i = zero->bucket[b].first; i < zero->bucket[b].first + zero->bucket[b].count; i++) {
        const Param *p = &zero->table->param[i];
        const LinearFormats *f = formats_of(recipe, phase, p);
        WeightPiece piece[WEIGHT_PIECES];
        if (f && p->rows == p->rows_padded) {
            Linear linear = {.weight = weight_operand(p, f)};
            for (int k = zero->ops->weight_pieces(&linear, piece) - 1; k >= 0; k--) bytes += piece[k].bytes;
        } else {
            bytes += (size_t)(p->rows * p->cols) * dtype_bytes(zero->shard[i].prepared.dtype);
        }
    }
    return bytes;
}

/* Times that a block of stage 3 is gathered in a step: forward and backward of every micro-step, but the last two blocks
 * of a forward pass and the first two of a backward pass are still there for the pass that follows. */
static int64_t times_gathered(const Zero *zero, int b)
{
    int64_t M = zero->sharding.micro_steps, L = zero->table->layers;
    return 1 + (M - 1) * (b >= 2) + M * (b < L - 2);
}

size_t zero_wire_bytes(const Zero *zero, const Recipe *recipe, int phase)
{
    size_t others = (size_t)(ranks_of(zero) - 1), all = others + 1, bytes = 0, floats = 0, pieces = 0;
    int64_t M = zero->sharding.micro_steps, reductions = reduces_once(zero) ? 1 : M;
    if (others == 0) return 0;
    for (int b = 0; b < zero->table->buckets; b++) {
        const BucketState *state = &zero->bucket[b];
        Bucket gradient = {NULL, false, state->count, state->gradient};
        int64_t gathers = !zero_sharded(zero) ? 0 : in_slots(zero, b) ? times_gathered(zero, b) : 1;
        bytes += others * bucket_bytes(&gradient) * (size_t)reductions;
        if (zero->sharding.stage == 0) bytes += others * bucket_bytes(&gradient);
        bytes += others * gathered_bytes(zero, recipe, phase, b) * (size_t)gathers;
    }
    for (int i = 0; i < zero->table->count; i++) pieces += (size_t)param_pieces(&zero->table->param[i]);
    floats = zero_sharded(zero) ? (size_t)zero->table->count : 0;
    if (!zero_sharded(zero)) pieces = 0;
    /* every rank sends all values to every other: amax of matrices, pieces of the norm, losses */
    return bytes + all * others * (floats * sizeof(float) + (pieces + (size_t)M * all) * sizeof(double));
}

/* ---- the model's pointers ---- */

void zero_bind(Zero *zero, GPT *gpt)
{
    zero->gpt = gpt;
    for (int i = 0; i < zero->table->count; i++) {
        const Param *p = &zero->table->param[i];
        const Shard *shard = &zero->shard[i];
        Tensor grad = adds_directly(zero, p->bucket) ? shard->sum : shard->contribution;
        ParamPlace place = gpt_place(gpt, p);
        if (place.linear) { /* formats come with the phase, views with prepare_weights */
            place.linear->weight = weight_operand(p, &place.linear->formats);
            place.linear->dW = grad;
        } else {
            *place.value = shard->prepared;
            *place.grad = grad;
        }
    }
    if (gpt->config->tied) gpt_tie_head(gpt);
    gpt->hooks = (Hooks){zero, block_acquire, block_release, grads_ready, prepare_weights};
}

ParamSlice zero_slice(const Zero *zero, int i)
{
    const Param *p = &zero->table->param[i];
    const Shard *s = &zero->shard[i];
    return (ParamSlice){.master = tensor_rows(s->master, 0, s->rows),
                        .grad = tensor_rows(s->sum, sum_is_own(zero) ? 0 : s->row0, s->rows),
                        .m = tensor_rows(s->m, 0, s->rows),
                        .v = tensor_rows(s->v, 0, s->rows),
                        .row0 = s->row0,
                        .layer = p->layer,
                        .role = (uint8_t)(ROLE_MASTER + p->kind),
                        .decay = p->decay};
}

/* ---- for checkpoints ---- */

Tensor zero_own(const Zero *zero, int i, ShardMember member)
{
    const Shard *s = &zero->shard[i];
    return member == SHARD_MASTER ? s->master : member == SHARD_M ? s->m : s->v;
}

Tensor zero_whole(const Zero *zero, int i)
{
    const Param *p = &zero->table->param[i];
    if (!zero_sharded(zero)) return zero->shard[i].master;
    return (Tensor){zero->whole, p->master, p->rows_padded, p->cols, p->cols};
}

Tensor zero_gather(const Zero *zero, int i)
{
    const Shard *s = &zero->shard[i];
    Comm *c = zero->sharding.comm;
    Tensor whole = zero_whole(zero, i);
    if (!zero_sharded(zero)) return whole;
    if (s->rows) zero->ops->copy(tensor_rows(whole, s->row0, s->rows), tensor_rows(s->master, 0, s->rows));
    size_t row_bytes = (size_t)whole.cols * dtype_bytes(whole.dtype);
    Piece piece = {0, 0, 16 * row_bytes, (size_t)zero->table->param[i].rows * row_bytes};
    Bucket bucket = {whole.data, false, 1, &piece};
    c->finish(c, c->all_gather_start(c, bucket, bucket));
    return whole;
}

void zero_take(const Zero *zero, int i)
{
    const Shard *s = &zero->shard[i];
    if (!zero_sharded(zero) || !s->rows) return;
    zero->ops->copy(tensor_rows(s->master, 0, s->rows), tensor_rows(zero_whole(zero, i), s->row0, s->rows));
}

/* ---- start and hash, in host memory by pieces of whole rows ---- */

enum { HOST_ELEMENTS = 1 << 20 };

void zero_init_params(Zero *zero, uint64_t seed)
{
    int64_t done = 0, total = 0;
    for (int i = 0; i < zero->table->count; i++) total += zero->shard[i].rows * zero->table->param[i].cols;
    for (int i = 0; i < zero->table->count; i++) {
        const Param *p = &zero->table->param[i];
        int64_t rows_a_time = max_i64(1, HOST_ELEMENTS / p->cols);
        float *values = xmalloc((size_t)(rows_a_time * p->cols) * sizeof *values);
        uint16_t *rounded = xmalloc((size_t)(rows_a_time * p->cols) * sizeof *rounded);
        for (int64_t row = 0; row < zero->shard[i].rows; row += rows_a_time) {
            Tensor t = tensor_rows(zero->shard[i].master, row, min_i64(rows_a_time, zero->shard[i].rows - row));
            params_initial(p, seed, zero->shard[i].row0 + row, t.rows, values);
            for (int64_t k = 0; k < t.rows * t.cols; k++) rounded[k] = bf16_from_f32(values[k]);
            zero->ops->copy_in(t.data, p->master == DTYPE_BF16 ? (void *)rounded : values, tensor_bytes(t));
            progress("initial weights", done += t.rows * t.cols, total);
        }
        free(values);
        free(rounded);
    }
}

static uint64_t mix(uint64_t a, uint64_t b) { return hash64(&a, sizeof a, b); }

/* Sum over pieces of 16 rows of mix(hash of the bytes, place). */
static uint64_t tensor_hash(const Ops *ops, Tensor t, uint64_t place)
{
    uint64_t sum = 0;
    int64_t at_once = max_i64(16, HOST_ELEMENTS / t.cols / 16 * 16);
    char *host = xmalloc((size_t)(min_i64(at_once, t.rows) * t.cols) * dtype_bytes(t.dtype) + 1);
    for (int64_t row = 0; row < t.rows; row += at_once) {
        Tensor part = tensor_rows(t, row, min_i64(at_once, t.rows - row)), on_host = part;
        on_host.data = host;
        ops->copy_out(host, part.data, tensor_bytes(part));
        for (int64_t r = 0; r < part.rows; r += 16) {
            Tensor piece = tensor_rows(on_host, r, min_i64(16, part.rows - r));
            sum += mix(hash64(piece.data, tensor_bytes(piece), 0), place + (uint64_t)(row + r) / 16);
        }
    }
    free(host);
    return sum;
}

uint64_t zero_state_hash(const Zero *zero)
{
    uint64_t sum = 0;
    for (int i = 0; i < zero->table->count; i++) {
        ParamSlice s = zero_slice(zero, i);
        uint64_t place = ((uint64_t)i << 40) + (uint64_t)s.row0 / 16;
        sum += tensor_hash(zero->ops, s.master, place);
        sum += tensor_hash(zero->ops, s.m, place + ((uint64_t)1 << 38));
        sum += tensor_hash(zero->ops, s.v, place + ((uint64_t)2 << 38));
    }
    return zero_sharded(zero) ? comm_sum_u64(zero->sharding.comm, sum) : sum;
}
