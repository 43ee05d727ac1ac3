/* gpt.c without numbers: which buffer lives from where to where, in what order hooks and ops are called, what the
 * classifier's chunks cover. The ops are those of stub_ops.h, which spoil what they write and then write a hash of what
 * they read.
 *
 * Lifetimes. gpt_layout lays buffers over one another by hand. Here two steps with a change of recipe and an evaluation
 * between them run in that layout and in one that never uses a byte twice (stub_model.h). Every gradient and loss must
 * be the same hash in both, for every recompute level. Then layout faults planted on purpose must each be noticed.
 */
#include "stub_model.h"

/* ---- what a run comes to ---- */

typedef struct {
    int params;
    uint64_t gradient[STEPS][MAX_PARAMS], loss[STEPS][MICRO_STEPS], evaluation[2];
} Result;

static uint64_t bits_of(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static uint64_t evaluate_once(World *w, Use use)
{
    Shape shape = shape_of(w, use, T);
    gpt_set_shape(&w->gpt, &shape);
    settle(w);
    Batch batch = batch_of(w, 1);
    gpt_evaluate(&w->gpt, &batch);
    return stub_read(bits_of(w->loss[1]), w->gpt.acts.losses);
}

static void train_step(World *w, uint32_t s, Result *r)
{
    Step step = {.seed = 7, .step = s, .loss_scale = 1.0f / (MICRO_STEPS * N)};
    Batch batch[MICRO_STEPS];
    for (int m = 0; m < MICRO_STEPS; m++) batch[m] = batch_of(w, m);
    w->events[0] = 0;
    gpt_gradients(&w->gpt, &step, batch, MICRO_STEPS);
    for (int b = 0; b < w->table.buckets; b++)
        CHECK(w->ready[b] == bucket_gradient(w, b), "gradient of bucket %d is not the one that was ready", b);
    memset(w->ready, 0, sizeof w->ready);
    for (int i = 0; i < w->table.count; i++) {
        Tensor sum = w->zero.shard[i].sum;
        r->gradient[s][i] = stub_read(0, sum);
        stub_zero(sum); /* as the optimizer leaves it */
    }
    for (int m = 0; m < MICRO_STEPS; m++) r->loss[s][m] = bits_of(w->loss[m]);
}

/* Two steps with a change of recipe between them, and an evaluation, once in each layout. */
static void run(World *w, Result *r, bool evaluation)
{
    *r = (Result){.params = w->table.count};
    train_step(w, 0, r);
    if (evaluation) {
        r->evaluation[0] = evaluate_once(w, USE_TRAIN);
        r->evaluation[1] = evaluate_once(w, USE_EVALUATE);
        Shape shape = shape_of(w, USE_TRAIN, T);
        gpt_set_shape(&w->gpt, &shape);
        settle(w);
    }
    train_step(w, 1, r);
}

static Result result_of(Setting set)
{
    World w;
    Result r;
    world_open(&w, set);
    run(&w, &r, true);
    world_close(&w);
    return r;
}

/* What differs first, or NULL. */
static const char *difference(const Result *a, const Result *b)
{
    static char text[64];
    for (int s = 0; s < STEPS; s++) {
        for (int m = 0; m < MICRO_STEPS; m++)
            if (a->loss[s][m] != b->loss[s][m]) return snprintf(text, sizeof text, "loss of step %d", s), text;
        for (int i = 0; i < a->params; i++)
            if (a->gradient[s][i] != b->gradient[s][i])
                return snprintf(text, sizeof text, "gradient of parameter %d in step %d", i, s), text;
    }
    return memcmp(a->evaluation, b->evaluation, sizeof a->evaluation) ? "evaluation" : NULL;
}

/* ---- the cases ---- */

static void test_lifetimes(Architecture arch)
{
    char name[96];
    snprintf(name, sizeof name, "%s: both layouts, every recompute level and recipe: the same hashes", ARCH_NAME[arch]);
    test_case(name);
    for (int recipe = 0; recipe < recipe_count(); recipe++) {
        Result expected = result_of((Setting){arch, recipe, RECOMPUTE_NONE, true, NO_FAULT});
        CHECK(expected.evaluation[0] == expected.evaluation[1], "recipe %d: the evaluation layout gives other losses",
              recipe);
        CHECK(expected.loss[0][0] != expected.loss[1][0] || recipe != TO_FP32, "the recipe did not change");
        for (int recompute = 0; recompute < 3; recompute++)
            for (int own_memory = 0; own_memory < 2; own_memory++) {
                Setting set = {arch, recipe, (Recompute)recompute, own_memory, NO_FAULT};
                Result r = result_of(set);
                const char *where = difference(&expected, &r);
                CHECK(!where, "recipe %d, recompute %s, %s: %s differs", recipe, RECOMPUTE_NAME[recompute],
                      own_memory ? "separate" : "overlaid", where);
            }
    }
}

static void test_evaluation_leaves_no_trace(void)
{
    test_case("an evaluation between two steps changes neither");
    for (int arch = 0; arch < ARCHS; arch++) {
        World w;
        Result with, without;
        Setting set = {(Architecture)arch, MIXED, RECOMPUTE_OPERANDS, false, NO_FAULT};
        with = result_of(set);
        world_open(&w, set);
        run(&w, &without, false);
        world_close(&w);
        memcpy(without.evaluation, with.evaluation, sizeof with.evaluation);
        const char *where = difference(&with, &without);
        CHECK(!where, "%s: %s differs", ARCH_NAME[arch], where);
    }
}

/* The stub notices what a layout cannot show: every parameter has a gradient, and it depends on everything. */
static void test_stub_is_sensitive(void)
{
    test_case("token, target, document start, weight, row and step reach losses and gradients");
    for (int arch = 0; arch < ARCHS; arch++) {
        World w;
        Result base, other;
        Setting set = {(Architecture)arch, MIXED, RECOMPUTE_NONE, false, NO_FAULT};
        base = result_of(set);
        for (int i = 0; i < base.params; i++) {
            CHECK(base.gradient[0][i] != base.gradient[1][i], "%s: parameter %d has the same gradient twice",
                  ARCH_NAME[arch], i);
        }
        for (int change = 0; change < 5; change++) {
            world_open(&w, set);
            if (change == 0) w.tokens[N - 1] ^= 1;
            if (change == 1) w.targets[N - 1] ^= 1;
            if (change == 2) w.first_key[N - 1] = T - 2;
            if (change == 3) stub_fill(w.zero.shard[0].master.data, 8, 99);
            if (change == 4) w.row0 = N;
            run(&w, &other, true);
            CHECK(difference(&base, &other), "%s: change %d is not seen", ARCH_NAME[arch], change);
            world_close(&w);
        }
    }
}

static void test_planted_faults(void)
{
    static const struct {
        const char *name;
        Setting set;
    } PLANTS[] = {
        {"dY of up over du", {GPT2, ALL_BF16, RECOMPUTE_NONE, false, DY_UP_OVER_DU}},
        {"late u over dY of down", {LLAMA, MIXED_FP32, RECOMPUTE_BLOCK, false, LATE_U_OVER_DY_DOWN}},
        {"late b over dY of up", {LLAMA, MIXED, RECOMPUTE_OPERANDS, false, LATE_B_OVER_DY_UP}},
        {"late a over dqkv", {QWEN3, ALL_BF16, RECOMPUTE_OPERANDS, false, LATE_A_OVER_DQKV}},
        {"logits over dx", {GPT2, ALL_FP32, RECOMPUTE_NONE, false, LOGITS_OVER_DX}},
        {"df over dY of the head", {LLAMA_TIED, ALL_BF16, RECOMPUTE_BLOCK, false, DF_OVER_DY_HEAD}},
        {"x2 over y", {LLAMA, ALL_FP32, RECOMPUTE_OPERANDS, false, X2_OVER_Y}},
        {"rotated over dqkv", {QWEN3, ALL_BF16, RECOMPUTE_NONE, false, ROTATED_OVER_DQKV}},
        {"h of two blocks", {GPT2, ALL_BF16, RECOMPUTE_OPERANDS, false, BLOCKS_SHARE_H}},
        {"row view of b over x2", {GPT2, MIXED_FP32, RECOMPUTE_NONE, false, B_ROW_OVER_X2}},
        {"datt over dqkv", {LLAMA_TIED, MIXED, RECOMPUTE_NONE, false, DATT_OVER_DQKV}},
        {"dnorm over dx", {GPT2, ALL_BF16, RECOMPUTE_NONE, false, DX_OVER_DNORM}},
        {"lse over stats2", {QWEN3, ALL_FP32, RECOMPUTE_NONE, false, LSE_OVER_STATS2}},
    };
    test_case("planted layout faults are noticed, in either layout");
    for (size_t i = 0; i < sizeof PLANTS / sizeof *PLANTS; i++)
        for (int own_memory = 0; own_memory < 2; own_memory++) {
            Setting faulty = PLANTS[i].set, healthy = faulty;
            faulty.separate = healthy.separate = own_memory;
            healthy.fault = NO_FAULT;
            Result a = result_of(healthy), b = result_of(faulty);
            CHECK(difference(&a, &b), "%s, %s: nothing differs", PLANTS[i].name, own_memory ? "separate" : "overlaid");
        }
}

/* acquire and release pair up and never nest; every bucket's gradient is ready once a micro-step, after its release. */
static void test_hooks(Architecture arch)
{
    char name[64];
    World w;
    Result r;
    snprintf(name, sizeof name, "%s: order of the hooks", ARCH_NAME[arch]);
    test_case(name);
    world_open(&w, (Setting){arch, ALL_BF16, RECOMPUTE_BLOCK, false, NO_FAULT});
    run(&w, &r, true);

    int L = (int)w.config.L, head = w.config.tied ? L : L + 1;
    World expected = {0};
    for (int m = 0; m < MICRO_STEPS; m++) {
        event(&expected, 'a', L, 'F'), event(&expected, 'r', L, 'F');
        for (int l = 0; l < L; l++) event(&expected, 'a', l, 'F'), event(&expected, 'r', l, 'F');
        event(&expected, 'a', head, 'B'), event(&expected, 'r', head, 'B');
        if (!w.config.tied) event(&expected, 'g', head, 'B');
        for (int l = L - 1; l >= 0; l--)
            event(&expected, 'a', l, 'B'), event(&expected, 'r', l, 'B'), event(&expected, 'g', l, 'B');
        event(&expected, 'a', L, 'B'), event(&expected, 'r', L, 'B'), event(&expected, 'g', L, 'B');
    }
    CHECK(strcmp(w.events, expected.events) == 0, "%s\n  expected %s", w.events, expected.events);
    CHECK(w.open < 0, "bucket %d is still acquired", w.open);
    world_close(&w);
}

/* The prompt in one call, then token by token, gives the losses of an evaluation: it reads the same keys. */
static uint64_t generated_losses(Setting set, int64_t prompt, uint64_t *evaluated)
{
    World w;
    uint64_t h = 0;
    world_open(&w, set);
    gpt_enter_step(&w.gpt, UINT32_MAX);
    evaluate_once(&w, USE_EVALUATE);
    Batch batch = batch_of(&w, 0);
    gpt_evaluate(&w.gpt, &batch);
    *evaluated = stub_read(0, tensor_rows(w.gpt.acts.losses, prompt - 1, T - prompt + 1));

    const void *cache = NULL;
    Tensor loss = {xcalloc(T, 4), DTYPE_FP32, T, 1, 1};
    for (int64_t t = prompt - 1; t < T; t++) {
        int64_t count = t == prompt - 1 ? prompt : 1, position0 = t + 1 - count;
        Shape shape = shape_of(&w, USE_GENERATE, count);
        gpt_set_shape(&w.gpt, &shape);
        CHECK(!cache || cache == w.gpt.acts.v_cache[2].data, "the layout of one token has another cache");
        cache = w.gpt.acts.v_cache[2].data;
        settle(&w);
        batch.tokens = w.tokens + position0;
        Tensor logits = gpt_logits(&w.gpt, &batch, position0);
        CHECK(logits.rows == 1 && logits.cols == w.config.Vp, "logits [%d, %d]", (int)logits.rows, (int)logits.cols);
        stub_write_row(loss, t, stub_loss(logits, 0, w.targets[t]));
    }
    h = stub_read(0, tensor_rows(loss, prompt - 1, T - prompt + 1));
    free(loss.data);
    world_close(&w);
    return h;
}

static void test_generation(void)
{
    test_case("generation: prompt and single tokens share the caches and read what an evaluation reads");
    for (int arch = 0; arch < ARCHS; arch++)
        for (int recipe = 0; recipe < recipe_count(); recipe++)
            for (int own_memory = 0; own_memory < 2; own_memory++)
                for (int64_t prompt = 1; prompt <= T; prompt += 6) {
                    uint64_t evaluated;
                    Setting set = {(Architecture)arch, recipe, RECOMPUTE_NONE, own_memory, NO_FAULT};
                    uint64_t generated = generated_losses(set, prompt, &evaluated);
                    CHECK(generated == evaluated, "%s, recipe %d, prompt of %d, %s", ARCH_NAME[arch], recipe,
                          (int)prompt, own_memory ? "separate" : "overlaid");
                }
    uint64_t evaluated;
    CHECK(generated_losses((Setting){LLAMA, ALL_BF16, RECOMPUTE_NONE, false, CACHE_OVER_SCRATCH}, 5, &evaluated) !=
              evaluated,
          "a cache under scratch is not noticed");
}

/* ---- chunks of the classifier: a model that has shapes but no memory ---- */

static struct {
    int64_t next, chunk, calls, covered[400];
    const int32_t *targets;
    const float *losses;
} chunks;

static void record_norm(Operand *o, Tensor x, Tensor stats, const Norm *norm, unsigned views)
{
    stub_operand_from_norm(o, x, stats, norm, views);
    if (o->layer != 3) return; /* only the head's */
    CHECK(o->row0 == chunks.next, "chunk at %d, expected at %d", (int)o->row0, (int)chunks.next);
    chunks.next = o->row0 + o->rows;
    chunks.calls++;
}

static void record_softmax(Tensor losses, Tensor logits, const int32_t *targets, int64_t vocabulary, bool gradient)
{
    int64_t n = targets - chunks.targets;
    CHECK(losses.data == chunks.losses + n, "targets and losses of different tokens");
    CHECK(logits.rows <= chunks.chunk && vocabulary > 0 && gradient, "a chunk of %d rows", (int)logits.rows);
    for (int64_t r = 0; r < logits.rows; r++) chunks.covered[n + r]++;
}

static void record_gradient(Operand *dy, Tensor g, Tensor dbias)
{
    stub_operand_from_gradient(dy, g, dbias);
    if (dy->layer != 3) return;
    CHECK(dy->row0 + dy->rows == chunks.next, "dY of the head at row %d, %d rows, in the chunk before %d",
          (int)dy->row0, (int)dy->rows, (int)chunks.next);
}

static void no_bucket(void *context, int bucket) { (void)context, (void)bucket; }
static void no_direction(void *context, int bucket, Direction d) { (void)context, (void)bucket, (void)d; }
static void no_prepare(void *context) { (void)context; }

static void one_chunking(int64_t tokens, int64_t vocabulary)
{
    Ops ops = STUB_OPS;
    GPTConfig c = config_of(LLAMA);
    int32_t *zeros = xcalloc((size_t)tokens, sizeof *zeros);
    double loss;
    ops.operand_from_norm = record_norm;
    ops.softmax_cross_entropy = record_softmax;
    ops.operand_from_gradient = record_gradient;
    c.V = vocabulary;
    c.Vp = round_up(vocabulary, VOCAB_MULTIPLE);
    c.T = tokens;
    Recipe recipe = recipe_of(ALL_BF16, &c);
    Arena counting = {0};
    GPT gpt;
    Shape shape = {1, tokens, USE_TRAIN, RECOMPUTE_NONE};
    gpt_create(&gpt, &c, &ops, &recipe, &counting);
    gpt.hooks = (Hooks){NULL, no_direction, no_direction, no_bucket, no_prepare};
    gpt.head.weight = (Operand){.rows = c.Vp, .cols = c.C};
    for (int64_t l = 0; l < c.L; l++) {
        Block *w = &gpt.block[l];
        w->qkv.weight = (Operand){.rows = config_qkv_cols(&c), .cols = c.C};
        w->o.weight = (Operand){.rows = c.C, .cols = c.NH * c.HD};
        w->up.weight = (Operand){.rows = config_up_cols(&c), .cols = c.C};
        w->down.weight = (Operand){.rows = c.C, .cols = c.F};
    }
    gpt_set_shape(&gpt, &shape);
    gpt_enter_step(&gpt, 0);
    gpt.acts.losses.data = xcalloc((size_t)tokens, sizeof(float));

    int64_t chunk = gpt.acts.chunk;
    chunks.targets = zeros;
    chunks.losses = gpt.acts.losses.data;
    chunks.next = chunks.calls = 0;
    chunks.chunk = chunk;
    memset(chunks.covered, 0, sizeof chunks.covered);
    CHECK(chunk >= 1 && chunk <= tokens && (chunk % 16 == 0 || chunk == tokens), "%d tokens, V %d: chunk %d",
          (int)tokens, (int)vocabulary, (int)chunk);
    CHECK(chunk <= 16 || (chunk - 15) * c.Vp <= (int64_t)1 << 25, "%d tokens, V %d: chunk %d has too many logits",
          (int)tokens, (int)vocabulary, (int)chunk);
    Batch batch = {zeros, zeros, NULL, 0, &loss};
    gpt_gradients(&gpt, &(Step){0}, &batch, 1);
    CHECK(chunks.next == tokens && chunks.calls == ceil_div(tokens, chunk), "%d tokens in %d chunks of %d", (int)tokens,
          (int)chunks.calls, (int)chunk);
    for (int64_t n = 0; n < tokens; n++)
        CHECK(chunks.covered[n] == 1, "token %d of %d is covered %d times", (int)n, (int)tokens,
              (int)chunks.covered[n]);
    free((void *)chunks.losses);
    free(zeros);
    recipe_free(&recipe);
    gpt_free(&gpt);
}

static void test_chunks(void)
{
    static const int64_t TOKENS[] = {1, 15, 16, 17, 31, 48, 50, 100, 257, 399};
    static const int64_t VOCABULARY[] = {1, 257, 50257, 128256, 1 << 20, (1 << 22) + 1, 1 << 24};
    test_case("the classifier's chunks cover every token once: multiples of 16, the last one shorter");
    for (int i = 0; i < 10; i++)
        for (int k = 0; k < 7; k++) one_chunking(TOKENS[i], VOCABULARY[k]);
}

int main(void)
{
    for (int arch = 0; arch < ARCHS; arch++) test_lifetimes((Architecture)arch);
    test_evaluation_leaves_no_trace();
    test_stub_is_sensitive();
    test_planted_faults();
    for (int arch = 0; arch < ARCHS; arch++) test_hooks((Architecture)arch);
    test_generation();
    test_chunks();
    return test_done();
}
