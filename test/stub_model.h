/* A small model over the stub operations, in memory of one of two kinds, for test_gpt.c.
 *
 * Overlaid: the arena that gpt_layout lays out, of exactly the size that counting gave, with a guard behind it.
 *
 * Separate: after every gpt_layout each buffer of each block gets memory of its own. Three equalities only are kept, the
 * ones that tensor.h promises: a plain view of a tensor of its dtype is that tensor; plain row and column views of one
 * format are one memory, unless the column is late; the rotated qkv is qkv itself without QK-norm. This layout is
 * written from those rules and takes nothing of gpt_layout but sizes and formats: were it derived from the addresses
 * that gpt_layout chose, a fault there would be copied into it.
 *
 * In both, garbage differs from model to model, all activations are spoiled when a micro-step begins, and the hooks
 * keep weights out of sight but between acquire and release.
 */
#ifndef LLMC_STUB_MODEL_H
#define LLMC_STUB_MODEL_H

#include "model.h"
#include "stub_ops.h"
#include "test.h"

enum { B = 2, T = 20, N = B * T, V = 150, MICRO_STEPS = 2, STEPS = 2, CHUNK = 16, MAX_PARAMS = 64 };

typedef enum { GPT2, LLAMA, LLAMA_TIED, QWEN3, ARCHS } Architecture;
static const char *const ARCH_NAME[ARCHS] = {"gpt2", "llama untied", "llama tied", "qwen3"};
static const char *const RECOMPUTE_NAME[] = {"none", "operands", "block"};

/* ---- recipes: two phases, formats of every view of every product ---- */

enum { ALL_BF16, ALL_FP32, MIXED, MIXED_FP32, TO_FP32, RANDOM };

static int recipe_count(void) { return RANDOM + (test_long() ? 60 : 6); }

static ViewFormat fp32_if(bool fp32) { return (ViewFormat){.format = fp32 ? FORMAT_FP32 : FORMAT_BF16}; }

/* x and dy as bits: x_row, x_col, dy_row, dy_col; weights are read as they are kept. */
static LinearFormats formats_of(unsigned bits, DType act)
{
    ViewFormat w = fp32_if(act == DTYPE_FP32);
    return (LinearFormats){fp32_if(bits & 1), fp32_if(bits & 2), w, w, fp32_if(bits & 4), fp32_if(bits & 8)};
}

static unsigned format_bits(int kind, int phase, int64_t l)
{
    switch (kind) {
    case ALL_BF16:
        return 0;
    case ALL_FP32:
        return 15;
    case MIXED: /* row and column views differ in every second block and are of one format in the others */
    case MIXED_FP32:
        return (l + phase) % 2 ? 6 : phase ? 12 : 3;
    case TO_FP32:
        return phase ? 15 : 0;
    default:
        return (unsigned)stub_mix(stub_mix((uint64_t)kind, (uint64_t)phase), (uint64_t)l) & 15;
    }
}

static Recipe recipe_of(int kind, const GPTConfig *c)
{
    bool fp32 = kind == ALL_FP32 || kind == MIXED_FP32 || (kind >= RANDOM && kind % 2);
    Recipe r = {.L = c->L, .phases = 2, .act = fp32 ? DTYPE_FP32 : DTYPE_BF16};
    r.master = kind == MIXED ? DTYPE_FP32 : r.act; /* FP32 under BF16: weights are prepared, not the masters */
    r.first_step = xcalloc(2, sizeof *r.first_step);
    r.first_step[1] = 1;
    r.formats = xcalloc((size_t)(2 * c->L) * PROJ_COUNT, sizeof *r.formats);
    for (int phase = 0; phase < 2; phase++)
        for (int64_t l = 0; l < c->L; l++)
            for (int p = 0; p < PROJ_COUNT; p++) {
                unsigned bits = format_bits(kind, phase, l);
                if (kind >= RANDOM) bits = bits * 5 + (unsigned)stub_mix((uint64_t)p, bits) % 16;
                r.formats[(phase * c->L + l) * PROJ_COUNT + p] = formats_of(bits, r.act);
            }
    r.head = formats_of(format_bits(kind, 0, c->L), r.act);
    return r;
}

static GPTConfig config_of(Architecture arch)
{
    Error error;
    GPTConfig c = {.arch = arch == GPT2    ? ARCH_GPT2
                           : arch == QWEN3 ? ARCH_QWEN3
                                           : ARCH_LLAMA,
                   .L = 3,
                   .C = 24,
                   .NH = 4,
                   .NKV = arch == GPT2 ? 4 : 2,
                   .HD = arch == QWEN3 ? 10 : 6,
                   .F = 40,
                   .V = V,
                   .T = T,
                   .rope_theta = 10000,
                   .tied = arch != LLAMA};
    if (config_finish(&c, &error)) die("%s", error.text);
    return c;
}

/* ---- one model with its memory ---- */

typedef enum {
    NO_FAULT,
    DY_UP_OVER_DU,
    LATE_U_OVER_DY_DOWN,
    LATE_B_OVER_DY_UP,
    LATE_A_OVER_DQKV,
    LOGITS_OVER_DX,
    DF_OVER_DY_HEAD,
    X2_OVER_Y,
    ROTATED_OVER_DQKV,
    BLOCKS_SHARE_H,
    B_ROW_OVER_X2,
    DATT_OVER_DQKV,
    DX_OVER_DNORM,
    LSE_OVER_STATS2,
    CACHE_OVER_SCRATCH
} Fault;

typedef struct {
    Architecture arch;
    int recipe;
    Recompute recompute;
    bool separate;
    Fault fault;
} Setting;

typedef struct {
    Setting set;
    GPTConfig config;
    Recipe recipe;
    ParamTable table;
    Zero zero;
    GPT gpt;
    Hooks inner;  /* zero.c's */
    Arena arena;  /* of gpt_layout, of the exact size that counting gave, and a guard */
    Arena own;    /* of the separate layout */
    char **kept;  /* [params] the weights, while the model may not read them */
    bool *hidden; /* [params] */
    uint64_t ready[8];
    char events[1024];
    int open; /* bucket between acquire and release, or -1 */
    int32_t tokens[MICRO_STEPS * N], targets[MICRO_STEPS * N], first_key[N];
    int64_t row0; /* of the first micro-batch */
    double loss[MICRO_STEPS];
} World;

static uint64_t garbage_seed = 1;

/* ---- the separate layout ---- */

static void own(World *w, Tensor *t)
{
    if (t->cols) t->data = arena_take(&w->own, tensor_bytes(*t) + 256);
}

static bool source_serves(const View *v, Tensor source)
{
    return source.data && (v->format.format == FORMAT_FP32) == (source.dtype == DTYPE_FP32);
}

static void own_operand(World *w, Operand *o, Tensor source)
{
    View *view[2] = {&o->row, &o->col};
    for (int i = 0; i < 2; i++) {
        if (view[i]->format.format == FORMAT_NONE) continue;
        bool one = i == 1 && !(o->late & VIEW_COL) && o->row.format.format == o->col.format.format;
        view[i]->data = source_serves(view[i], source) ? source.data
                        : one                          ? o->row.data
                                                       : arena_take(&w->own, (size_t)(o->rows * o->cols) * 4 + 256);
    }
}

static void own_block(World *w, BlockActivations *s, bool train)
{
    const Tensor computed = {0};
    bool qk_norm = w->config.qk_norm;
    own(w, &s->qkv), own(w, &s->att), own(w, &s->lse), own(w, &s->x2), own(w, &s->stats2), own(w, &s->h);
    if (qk_norm)
        own(w, &s->rotated);
    else
        s->rotated = s->qkv;
    own_operand(w, &s->a, computed);
    own_operand(w, &s->o, s->att);
    own_operand(w, &s->b, computed);
    own_operand(w, &s->u, computed);
    if (!train) return;
    own(w, &s->dqkv), own(w, &s->datt), own(w, &s->du);
    own_operand(w, &s->dy_down, w->gpt.acts.dx);
    own_operand(w, &s->dy_up, computed);
    own_operand(w, &s->dy_o, w->gpt.acts.dx);
    own_operand(w, &s->dy_qkv, s->dqkv);
}

static void separate(World *w)
{
    Activations *s = &w->gpt.acts;
    bool train = w->gpt.shape.use == USE_TRAIN;
    w->own.used = 0;
    for (int64_t l = 0; l < w->config.L; l++) { /* first: all generation layouts must find them again */
        own(w, &s->k_cache[l]);
        own(w, &s->v_cache[l]);
    }
    for (int64_t l = 0; l <= w->config.L; l++) {
        own(w, &s->x[l]);
        own(w, &s->stats[l]);
    }
    own(w, &s->y), own(w, &s->losses), own(w, &s->logits);
    own_operand(w, &s->f, (Tensor){0});
    if (train) {
        own(w, &s->dx), own(w, &s->dnorm), own(w, &s->df);
        own_operand(w, &s->dy_head, s->logits);
    }
    for (int64_t l = 0; l < w->config.L; l++) own_block(w, &s->block[l], train);
}

/* ---- planted faults: two buffers that live at once laid over one another ---- */

static void plant(Activations *s, Fault fault)
{
    BlockActivations *b = &s->block[1];
    switch (fault) {
    case NO_FAULT:
        return;
    case DY_UP_OVER_DU:
        b->dy_up.row.data = b->du.data;
        return;
    case LATE_U_OVER_DY_DOWN:
        b->u.col.data = b->dy_down.col.data;
        return;
    case LATE_B_OVER_DY_UP:
        b->b.col.data = b->dy_up.row.data;
        return;
    case LATE_A_OVER_DQKV:
        b->a.col.data = b->dqkv.data;
        return;
    case LOGITS_OVER_DX:
        s->logits.data = s->dx.data;
        return;
    case DF_OVER_DY_HEAD:
        s->df.data = s->dy_head.row.data;
        return;
    case X2_OVER_Y:
        b->x2.data = s->y.data;
        return;
    case ROTATED_OVER_DQKV:
        b->rotated.data = b->dqkv.data;
        return;
    case BLOCKS_SHARE_H:
        b->h.data = s->block[0].h.data;
        return;
    case B_ROW_OVER_X2:
        b->b.row.data = b->x2.data;
        return;
    case DATT_OVER_DQKV:
        b->datt.data = b->dqkv.data;
        return;
    case DX_OVER_DNORM:
        s->dnorm.data = s->dx.data;
        return;
    case LSE_OVER_STATS2:
        b->lse.data = b->stats2.data;
        return;
    case CACHE_OVER_SCRATCH:
        s->v_cache[1].data = s->y.data;
        return;
    }
}

/* After every layout of gpt_layout's: smaller chunks, so that there are several; then the layout under test. */
static void settle(World *w)
{
    Activations *s = &w->gpt.acts;
    if (w->gpt.shape.use != USE_GENERATE) {
        CHECK(s->chunk == N, "a small model has one chunk, not of %d", (int)s->chunk);
        s->chunk = CHUNK;
    }
    if (w->set.separate) separate(w);
    plant(s, w->set.fault);
    stub.dead = w->set.separate ? w->own.base : w->arena.base + w->gpt.arena_start;
    stub.dead_bytes = w->set.separate ? w->own.used : w->arena.capacity - w->gpt.arena_start;
    if (w->gpt.shape.use == USE_GENERATE) stub.dead = NULL; /* the caches live */
}

/* ---- hooks: zero.c's, with weights out of sight but between acquire and release ---- */

static void hide(World *w, int bucket)
{
    for (int i = 0; i < w->table.count; i++) {
        Tensor t = w->zero.shard[i].prepared;
        if (w->table.param[i].bucket != bucket || w->hidden[i]) continue;
        memcpy(w->kept[i], t.data, tensor_bytes(t));
        stub_spoil(t);
        w->hidden[i] = true;
    }
}

static void show(World *w, int bucket)
{
    for (int i = 0; i < w->table.count; i++) {
        Tensor t = w->zero.shard[i].prepared;
        if (w->table.param[i].bucket != bucket || !w->hidden[i]) continue;
        memcpy(t.data, w->kept[i], tensor_bytes(t));
        w->hidden[i] = false;
    }
}

static uint64_t bucket_gradient(const World *w, int bucket)
{
    uint64_t h = 30;
    for (int i = 0; i < w->table.count; i++)
        if (w->table.param[i].bucket == bucket) h = stub_read(h, w->zero.shard[i].sum);
    return h;
}

static void event(World *w, char what, int bucket, char direction)
{
    size_t used = strlen(w->events);
    snprintf(w->events + used, sizeof w->events - used, "%c%d%c ", what, bucket, direction);
}

static void block_acquire(void *context, int bucket, Direction direction)
{
    World *w = context;
    event(w, 'a', bucket, direction == FORWARD ? 'F' : 'B');
    CHECK(w->open < 0, "bucket %d acquired within bucket %d", bucket, w->open);
    w->open = bucket;
    CHECK(!w->ready[bucket] || w->ready[bucket] == bucket_gradient(w, bucket),
          "gradient of bucket %d changed after grads_ready", bucket);
    if (direction == BACKWARD) w->ready[bucket] = 0;
    show(w, bucket);
    w->inner.block_acquire(w->inner.context, bucket, direction);
}

static void block_release(void *context, int bucket, Direction direction)
{
    World *w = context;
    event(w, 'r', bucket, direction == FORWARD ? 'F' : 'B');
    CHECK(w->open == bucket, "bucket %d released within bucket %d", bucket, w->open);
    w->open = -1;
    w->inner.block_release(w->inner.context, bucket, direction);
    hide(w, bucket);
}

static void grads_ready(void *context, int bucket)
{
    World *w = context;
    event(w, 'g', bucket, 'B');
    CHECK(w->open < 0, "gradients of %d ready within %d", bucket, w->open);
    w->inner.grads_ready(w->inner.context, bucket);
    w->ready[bucket] = bucket_gradient(w, bucket);
}

static void prepare_weights(void *context)
{
    World *w = context;
    settle(w); /* called right after the layout of a new phase */
    for (int b = 0; b < w->table.buckets; b++) show(w, b);
    w->inner.prepare_weights(w->inner.context);
    for (int b = 0; b < w->table.buckets; b++) hide(w, b);
}

/* ---- opening, running, closing ---- */

static Shape shape_of(const World *w, Use use, int64_t tokens)
{
    return (Shape){use == USE_GENERATE ? 1 : B, tokens, use, use == USE_TRAIN ? w->set.recompute : RECOMPUTE_NONE};
}

static void lay_out(World *w)
{
    Shape shape[] = {shape_of(w, USE_TRAIN, T), shape_of(w, USE_EVALUATE, T), shape_of(w, USE_GENERATE, T),
                     shape_of(w, USE_GENERATE, 1)};
    zero_create(&w->zero, &w->table, &w->recipe, &STUB_OPS, &(Sharding){.comm = comm_alone()}, true, &w->arena);
    gpt_create(&w->gpt, &w->config, &STUB_OPS, &w->recipe, &w->arena);
    for (int s = 0; s < 4; s++)
        for (int phase = 0; phase < 2; phase++) {
            w->arena.used = w->gpt.arena_start;
            gpt_layout(&w->gpt.acts, &w->arena, &STUB_OPS, &w->config, &w->recipe, phase, &shape[s]);
        }
}

static void make_batches(World *w)
{
    for (int n = 0; n < MICRO_STEPS * N; n++) {
        w->tokens[n] = (int32_t)(stub_mix(100, (uint64_t)n) % V);
        w->targets[n] = (int32_t)(stub_mix(101, (uint64_t)n) % V);
    }
    gpt_document_starts(w->first_key, w->tokens + N, B, T, w->tokens[N + 7]);
}

static Batch batch_of(World *w, int m) /* the second micro-batch has documents */
{
    return (Batch){w->tokens + m * N, w->targets + m * N, m == 1 ? w->first_key : NULL, w->row0 + m * N, &w->loss[m]};
}

static const char GUARD[256] = "nobody writes here";

static void world_open(World *w, Setting set)
{
    *w = (World){.set = set, .config = config_of(set.arch), .open = -1};
    w->recipe = recipe_of(set.recipe, &w->config);
    w->table = params_table(&w->config, w->recipe.master);
    lay_out(w);
    size_t bytes = w->arena.peak;
    zero_free(&w->zero);
    gpt_free(&w->gpt);

    stub.garbage = garbage_seed++;
    w->arena = (Arena){.base = aligned_alloc(256, bytes + sizeof GUARD), .capacity = bytes};
    w->own = (Arena){.base = aligned_alloc(256, (size_t)4 << 20), .capacity = (size_t)4 << 20};
    if (!w->arena.base || !w->own.base) die("out of memory");
    stub_fill(w->arena.base, bytes, stub.garbage);
    stub_fill(w->own.base, w->own.capacity, stub.garbage);
    memcpy(w->arena.base + bytes, GUARD, sizeof GUARD);
    lay_out(w);
    zero_bind(&w->zero, &w->gpt);
    w->inner = w->gpt.hooks;
    w->gpt.hooks = (Hooks){w, block_acquire, block_release, grads_ready, prepare_weights};
    w->kept = xcalloc((size_t)w->table.count, sizeof *w->kept);
    w->hidden = xcalloc((size_t)w->table.count, sizeof *w->hidden);
    for (int i = 0; i < w->table.count; i++) {
        Shard *s = &w->zero.shard[i];
        w->kept[i] = xmalloc(tensor_bytes(s->prepared));
        stub_fill(s->master.data, tensor_bytes(s->master), (uint64_t)i);
        stub_zero(s->sum);
    }
    make_batches(w);
    Shape shape = shape_of(w, USE_TRAIN, T);
    gpt_set_shape(&w->gpt, &shape);
}

static void world_close(World *w)
{
    CHECK(memcmp(w->arena.base + w->arena.capacity, GUARD, sizeof GUARD) == 0, "written beyond the arena");
    for (int i = 0; i < w->table.count; i++) free(w->kept[i]);
    free(w->kept);
    free(w->hidden);
    free(w->arena.base);
    free(w->own.base);
    zero_free(&w->zero);
    gpt_free(&w->gpt);
    params_free(&w->table);
    recipe_free(&w->recipe);
    stub.dead = NULL;
}

#endif
