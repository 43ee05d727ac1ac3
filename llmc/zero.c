/* See zero.h. */
#include "zero.h"

#include "numerics.h"
#include "philox.h"

#include <stdlib.h>

/* ---- memory ---- */

static bool is_contribution(const ParamTable *table, const Param *p) { return p->bucket >= table->layers; }

static DType read_dtype(const Param *p, const Recipe *recipe) { return p->decay ? recipe->act : DTYPE_FP32; }

/* The piece of `bucket` (one tensor over all its elements) that belongs to a parameter. */
static Tensor piece_of(Tensor bucket, const Param *p)
{
    Tensor piece = {NULL, bucket.dtype, p->rows_padded, p->cols, p->cols};
    if (bucket.data) piece.data = (char *)bucket.data + p->offset * dtype_bytes(bucket.dtype);
    return piece;
}

/* One contiguous FP32 buffer a bucket, for sums, m or v. */
static void place_buckets(Zero *zero, Arena *arena, Purpose purpose, size_t member)
{
    const ParamTable *table = zero->table;
    arena->purpose = purpose;
    for (int b = 0; b < table->buckets; b++) {
        Tensor bucket = arena_tensor(arena, DTYPE_FP32, 1, (int64_t)table->bucket_elements[b]);
        for (int i = 0; i < table->count; i++)
            if (table->param[i].bucket == b)
                *(Tensor *)((char *)&zero->shard[i] + member) = piece_of(bucket, &table->param[i]);
    }
}

static void place_training(Zero *zero, Arena *arena)
{
    const ParamTable *table = zero->table;
    size_t largest = 0;

    place_buckets(zero, arena, PURPOSE_GRADIENT, offsetof(Shard, sum));
    for (int i = 0; i < table->count; i++) {
        size_t elements = table->bucket_elements[table->param[i].bucket];
        if (is_contribution(table, &table->param[i]) && elements > largest) largest = elements;
    }
    zero->contribution = arena_tensor(arena, DTYPE_FP32, 1, (int64_t)largest);
    for (int i = 0; i < table->count; i++)
        if (is_contribution(table, &table->param[i]))
            zero->shard[i].contribution = piece_of(zero->contribution, &table->param[i]);
    place_buckets(zero, arena, PURPOSE_OPTIMIZER, offsetof(Shard, m));
    place_buckets(zero, arena, PURPOSE_OPTIMIZER, offsetof(Shard, v));
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

/* What the views of a matrix take beside the master: the most of any phase. */
static size_t prepared_bytes(const Param *p, const Recipe *recipe, const Ops *ops, Tensor master)
{
    size_t most = 0;
    for (int phase = 0; phase < recipe->phases; phase++) {
        Arena count = {0};
        Operand o = weight_operand(p, formats_of(recipe, phase, p));
        gpt_place_operand(&count, ops, &o, master);
        if (count.peak > most) most = count.peak;
    }
    return most;
}

void zero_create(Zero *zero, const ParamTable *table, const Recipe *recipe, const Ops *ops, bool train, Arena *arena)
{
    *zero = (Zero){.table = table, .ops = ops, .train = train, .contribution_bucket = -1};
    zero->shard = xcalloc((size_t)table->count, sizeof *zero->shard);
    for (int i = 0; i < table->count; i++) {
        const Param *p = &table->param[i];
        arena->purpose = PURPOSE_MASTER;
        zero->shard[i].master = zero->shard[i].prepared = arena_tensor(arena, p->master, p->rows_padded, p->cols);
        arena->purpose = PURPOSE_PREPARED;
        if (formats_of(recipe, 0, p)) {
            Shard *s = &zero->shard[i];
            s->prepared_bytes = prepared_bytes(p, recipe, ops, s->master);
            if (s->prepared_bytes) s->prepared.data = arena_take(arena, s->prepared_bytes);
            s->prepared.dtype = recipe->act;
        } else if (read_dtype(p, recipe) != p->master) {
            zero->shard[i].prepared = arena_tensor(arena, read_dtype(p, recipe), p->rows_padded, p->cols);
        }
    }
    if (train) place_training(zero, arena);
}

void zero_free(Zero *zero)
{
    free(zero->shard);
    *zero = (Zero){0};
}

/* ---- hooks ---- */

static void block_acquire(void *context, int bucket, Direction direction)
{
    Zero *zero = context;
    if (direction != BACKWARD || bucket < zero->gpt->config->L || zero->contribution_bucket == bucket) return;
    zero->ops->zero(zero->contribution);
    zero->contribution_bucket = bucket;
}

static void block_release(void *context, int bucket, Direction direction)
{
    (void)context, (void)bucket, (void)direction; /* on one rank nothing is gathered */
}

static void grads_ready(void *context, int bucket)
{
    Zero *zero = context;
    if (bucket < zero->gpt->config->L) return;
    for (int i = 0; i < zero->table->count; i++)
        if (zero->table->param[i].bucket == bucket) zero->ops->add(zero->shard[i].sum, zero->shard[i].contribution);
    zero->contribution_bucket = -1;
}

/* The views that the formats of the phase ask for, in the parameter's prepared memory. */
static void place_weight(const Zero *zero, Linear *linear, const Shard *shard)
{
    Arena arena = {.base = shard->prepared.data, .capacity = shard->prepared_bytes};
    gpt_place_operand(&arena, zero->ops, &linear->weight, shard->master);
}

static void prepare_weights(void *context)
{
    Zero *zero = context;
    const GPT *gpt = zero->gpt;
    for (int i = 0; i < zero->table->count; i++) {
        const Shard *shard = &zero->shard[i];
        Linear *linear = gpt_place(zero->gpt, &zero->table->param[i]).linear;
        if (linear) {
            place_weight(zero, linear, shard);
            zero->ops->weight_prepare(linear, shard->master, gpt->seed, gpt->step);
        } else if (shard->prepared.data != shard->master.data) {
            zero->ops->copy(shard->prepared, shard->master);
        }
    }
}

/* ---- the model's pointers ---- */

/* Formats come with the phase, views with prepare_weights. */
static void bind_linear(Linear *linear, const Param *p, Tensor grad)
{
    linear->weight = weight_operand(p, &linear->formats);
    linear->dW = grad;
}

void zero_bind(Zero *zero, GPT *gpt)
{
    zero->gpt = gpt;
    for (int i = 0; i < zero->table->count; i++) {
        const Param *p = &zero->table->param[i];
        const Shard *shard = &zero->shard[i];
        Tensor grad = shard->contribution.data ? shard->contribution : shard->sum;
        ParamPlace place = gpt_place(gpt, p);
        if (place.linear) {
            bind_linear(place.linear, p, grad);
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
    return (ParamSlice){.master = tensor_rows(s->master, 0, p->rows),
                        .grad = tensor_rows(s->sum, 0, p->rows),
                        .m = tensor_rows(s->m, 0, p->rows),
                        .v = tensor_rows(s->v, 0, p->rows),
                        .layer = p->layer,
                        .role = (uint8_t)(ROLE_MASTER + p->kind),
                        .decay = p->decay};
}

/* ---- start and hash, in host memory by pieces of whole rows ---- */

enum { HOST_ELEMENTS = 1 << 20 };

void zero_init_params(Zero *zero, uint64_t seed)
{
    int64_t done = 0, total = 0;
    for (int i = 0; i < zero->table->count; i++) total += zero->table->param[i].rows * zero->table->param[i].cols;
    for (int i = 0; i < zero->table->count; i++) {
        const Param *p = &zero->table->param[i];
        int64_t rows_a_time = max_i64(1, HOST_ELEMENTS / p->cols);
        float *values = xmalloc((size_t)(rows_a_time * p->cols) * sizeof *values);
        uint16_t *rounded = xmalloc((size_t)(rows_a_time * p->cols) * sizeof *rounded);
        for (int64_t row = 0; row < p->rows; row += rows_a_time) {
            Tensor t = tensor_rows(zero->shard[i].master, row, min_i64(rows_a_time, p->rows - row));
            params_initial(p, seed, row, t.rows, values);
            for (int64_t k = 0; k < t.rows * t.cols; k++) rounded[k] = bf16_from_f32(values[k]);
            zero->ops->copy_in(t.data, p->master == DTYPE_BF16 ? (void *)rounded : values, tensor_bytes(t));
            progress("initial weights", done += t.rows * t.cols, total);
        }
        free(values);
        free(rounded);
    }
}

static uint64_t mix(uint64_t a, uint64_t b) { return hash64(&a, sizeof a, b); }

/* Sum over pieces of mix(hash of the bytes, place). */
static uint64_t tensor_hash(const Ops *ops, Tensor t, uint64_t place)
{
    uint64_t sum = 0;
    char *host = xmalloc((size_t)(16 * t.cols) * dtype_bytes(t.dtype));
    for (int64_t row = 0; row < t.rows; row += 16) {
        Tensor piece = tensor_rows(t, row, min_i64(16, t.rows - row));
        ops->copy_out(host, piece.data, tensor_bytes(piece));
        sum += mix(hash64(host, tensor_bytes(piece), 0), place + (uint64_t)row / 16);
    }
    free(host);
    return sum;
}

uint64_t zero_state_hash(const Zero *zero)
{
    uint64_t sum = 0;
    for (int i = 0; i < zero->table->count; i++) {
        ParamSlice s = zero_slice(zero, i);
        uint64_t place = (uint64_t)i << 40;
        sum += tensor_hash(zero->ops, s.master, place);
        sum += tensor_hash(zero->ops, s.m, place | (uint64_t)1 << 38);
        sum += tensor_hash(zero->ops, s.v, place | (uint64_t)2 << 38);
    }
    return sum;
}
