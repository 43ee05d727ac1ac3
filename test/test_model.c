/* model.h: what `plan` counts is what a run lays out, by purpose, and what it really touches; steps, evaluation and
 * generation stay within it, between two pages that cannot be touched; recomputing more takes less.
 */
#include "model.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cpu/backend.h"
#include "test.h"

static const Ops *real_ops;
static Ops guarded_ops;

static ModelSpec spec_of(Arch arch, Precision precision)
{
    Error error;
    ModelSpec s = {.recipe = recipe_defaults(precision, MASTER_DEFAULT),
                   .train = true,
                   .generate = true,
                   .B = 2,
                   .micro_steps = 2,
                   .eot_token = 3};
    s.config = (GPTConfig){.arch = arch,
                           .L = 3,
                           .C = 48,
                           .NH = 4,
                           .NKV = arch == ARCH_GPT2 ? 4 : 2,
                           .HD = arch == ARCH_QWEN3 ? 20 : 12,
                           .F = 90,
                           .V = 300,
                           .T = 70,
                           .rope_theta = 1e4,
                           .tied = arch != ARCH_LLAMA};
    s.config.init_std = s.config.embedding_init_std = 0.05f;
    if (config_finish(&s.config, &error)) die("%s", error.text);
    return s;
}

/* ---- an arena between two pages without access ---- */

enum { PAGE = 4096 };

static void *guarded_alloc(size_t bytes)
{
    size_t pages = (bytes + PAGE - 1) / PAGE * PAGE;
    char *memory = mmap(NULL, pages + 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, PAGE, PROT_NONE) || mprotect(memory + PAGE + pages, PAGE, PROT_NONE))
        die("cannot map guard pages");
    return memory + PAGE + pages - bytes; /* the end is exact: the arena's pieces are multiples of 256 */
}

static void guarded_free(void *memory, size_t bytes)
{
    size_t pages = (bytes + PAGE - 1) / PAGE * PAGE;
    munmap((char *)memory + bytes - pages - PAGE, pages + 2 * PAGE);
}

static void open_model(Model *model, const ModelSpec *spec)
{
    Error error;
    guarded_ops = *real_ops;
    guarded_ops.alloc = guarded_alloc;
    guarded_ops.free = guarded_free;
    if (model_open(model, spec, &guarded_ops, &error)) die("%s", error.text);
    zero_init_params(&model->zero, 1);
    model->gpt.hooks.prepare_weights(&model->zero);
}

static size_t booked(const Arena *a)
{
    size_t sum = 0;
    for (int p = 0; p < PURPOSE_COUNT; p++) sum += a->bytes[p];
    return sum;
}

/* ---- plan and open ---- */

static void check_plan(const ModelSpec *spec)
{
    Model planned, opened;
    Error error;
    if (!CHECK(!model_plan(&planned, spec, real_ops, &error), "plan: %s", error.text)) return;
    open_model(&opened, spec);
    CHECK(opened.arena.peak == planned.arena.peak && opened.arena.capacity == planned.arena.peak, "%zu bytes, plan %zu",
          opened.arena.peak, planned.arena.peak);
    for (int p = 0; p < PURPOSE_COUNT; p++)
        CHECK(opened.arena.bytes[p] == planned.arena.bytes[p], "%s: %zu bytes, plan %zu", purpose_name((Purpose)p),
              opened.arena.bytes[p], planned.arena.bytes[p]);
    char *end = opened.gpt.cos_sin.data ? opened.gpt.cos_sin.data : opened.arena.base + opened.gpt.arena_start;
    CHECK((char *)opened.workspace + real_ops->workspace_bytes(&opened.need) <= end, "the workspace has no room");
    CHECK(booked(&planned.arena) == planned.arena.peak, "booked %zu of %zu", booked(&planned.arena),
          planned.arena.peak);
    model_close(&planned);
    model_close(&opened);
}

/* What each purpose must come to, from the shapes alone. */
static void check_purposes(const ModelSpec *spec)
{
    Model m;
    Error error;
    if (model_plan(&m, spec, real_ops, &error)) die("%s", error.text);
    const GPTConfig *c = &m.spec.config;
    double elements = 0, vectors = 0, master = m.recipe.master == DTYPE_BF16 ? 2 : 4, act = dtype_bytes(m.recipe.act);
    for (int i = 0; i < m.table.count; i++) {
        double n = (double)(m.table.param[i].rows_padded * m.table.param[i].cols);
        if (m.table.param[i].decay)
            elements += n;
        else
            vectors += n;
    }
    const double slack = 256.0 * (double)(m.table.count + 100), train = spec->train ? 1 : 0;
    double N = (double)(spec->B * c->T), largest = (double)c->Vp * (double)c->C;
    const struct {
        Purpose purpose;
        double low, more;
    } EXPECTED[] = {
        {PURPOSE_MASTER, elements * master + vectors * 4, 0},
        {PURPOSE_PREPARED, master == act ? 0 : elements * act, 0},
        {PURPOSE_GRADIENT, train * 4 * (elements + vectors + largest), train * 4 * (double)((c->T + 2) * c->C)},
        {PURPOSE_OPTIMIZER, train * 8 * (elements + vectors), 0},
        {PURPOSE_RESIDUAL, N * (double)((train ? c->L + 1 : 1) * c->C) * act,
         N * (double)(c->L + 1) * 8}, /* with statistics */
    };
    for (size_t i = 0; i < sizeof EXPECTED / sizeof *EXPECTED; i++) {
        double got = (double)m.arena.bytes[EXPECTED[i].purpose];
        if (spec->generate && EXPECTED[i].purpose == PURPOSE_RESIDUAL) continue; /* shares the training's memory */
        CHECK(got >= EXPECTED[i].low && got <= EXPECTED[i].low + EXPECTED[i].more + slack, "%s: %.0f, expected %.0f",
              purpose_name(EXPECTED[i].purpose), got, EXPECTED[i].low);
    }
    model_close(&m);
}

static void test_plan(void)
{
    test_case("plan counts what a run lays out, purpose by purpose");
    for (int arch = 0; arch < 3; arch++)
        for (int use = 0; use < 4; use++)
            for (int recompute = 0; recompute < 3; recompute++) {
                ModelSpec s = spec_of((Arch)arch, recompute ? PRECISION_BF16 : PRECISION_FP32);
                s.recompute = (Recompute)recompute;
                s.recipe.master = arch == 1 ? MASTER_FP32 : MASTER_DEFAULT;
                s.train = use < 2;
                s.generate = use & 1;
                if (use == 3) s.B = 0; /* generation alone */
                check_plan(&s);
                if (s.B) check_purposes(&s);
            }
}

static size_t planned_bytes(const ModelSpec *spec, Purpose purpose)
{
    Model m;
    Error error;
    if (model_plan(&m, spec, real_ops, &error)) die("%s", error.text);
    size_t bytes = purpose == PURPOSE_COUNT ? m.arena.peak : m.arena.bytes[purpose];
    model_close(&m);
    return bytes;
}

static void test_recompute(void)
{
    test_case("recompute none >= operands >= block; a cache costs what it holds");
    for (int arch = 0; arch < 3; arch++) {
        ModelSpec s = spec_of((Arch)arch, PRECISION_BF16);
        size_t bytes[3], saved[3];
        s.config.T = 256; /* activations outweigh the rest */
        s.generate = false;
        for (int r = 0; r < 3; r++) {
            s.recompute = (Recompute)r;
            bytes[r] = planned_bytes(&s, PURPOSE_COUNT);
            saved[r] = planned_bytes(&s, PURPOSE_SAVED);
        }
        CHECK(bytes[0] >= bytes[1] && bytes[1] >= bytes[2] && bytes[0] > bytes[2], "%s: %zu, %zu, %zu",
              arch_name((Arch)arch), bytes[0], bytes[1], bytes[2]);
        CHECK(saved[0] > saved[1] && saved[1] > saved[2], "%s saves %zu, %zu, %zu", arch_name((Arch)arch), saved[0],
              saved[1], saved[2]);

        s.recompute = RECOMPUTE_NONE;
        s.train = false;
        s.B = 0;
        s.generate = true;
        size_t caches = (size_t)(2 * s.config.L * s.config.T * s.config.NKV * s.config.HD) * 2;
        size_t scratch = planned_bytes(&s, PURPOSE_SCRATCH);
        CHECK(scratch >= caches, "%s: scratch of generation %zu, caches alone %zu", arch_name((Arch)arch), scratch,
              caches);
    }
}

/* ---- a run within its memory ---- */

static void run_steps(Model *model, int steps)
{
    const ModelSpec *s = &model->spec;
    int64_t T = s->config.T, N = max_i64(s->B, 1) * T;
    int32_t *tokens = xcalloc((size_t)(N + 1), sizeof *tokens);
    Batch batch[4];
    for (int64_t n = 0; n <= N; n++) tokens[n] = (int32_t)(n * n * 7 % s->config.V);
    tokens[N / 2] = (int32_t)s->config.V - 1;
    for (int step = 0; step < steps && s->train; step++) {
        Step now = {.seed = 1, .step = (uint32_t)step, .lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.9f, .eps = 1e-8f};
        now.loss_scale = 1.0f / (float)(s->micro_steps * N);
        now.correction1 = now.correction2 = 1;
        for (int64_t m = 0; m < s->micro_steps; m++) batch[m] = model_upload(model, m, tokens, tokens + 1);
        gpt_gradients(&model->gpt, &now, batch, s->micro_steps);
        optimizer_step(&model->optimizer, s->micro_steps * N);
        StepResult r = optimizer_result(&model->optimizer);
        CHECK(r.finite && r.loss > 1 && r.loss < 12, "loss %g", r.loss);
        gpt_evaluate(&model->gpt, &batch[0]);
    }
    for (int64_t t = 0; t < T && s->generate; t += t ? 1 : T - 5) { /* a long prompt, then the rest one by one */
        int64_t count = t ? 1 : T - 5;
        model_use(model, USE_GENERATE, count);
        Batch prompt = model_upload_tokens(model, tokens, count);
        gpt_enter_step(&model->gpt, UINT32_MAX);
        gpt_logits(&model->gpt, &prompt, t);
    }
    free(tokens);
}

static void test_guarded(void)
{
    test_case("training, evaluation and generation touch nothing beyond the arena");
    for (int arch = 0; arch < 3; arch++)
        for (int precision = 0; precision < 2; precision++)
            for (int recompute = 0; recompute < 3; recompute++) {
                Model model;
                ModelSpec s = spec_of((Arch)arch, (Precision)precision);
                s.recompute = (Recompute)recompute;
                s.document_mask = recompute == 1;
                fflush(stdout);
                open_model(&model, &s);
                run_steps(&model, 2);
                model_close(&model);
            }
    for (int arch = 0; arch < 3; arch++) { /* generation alone: the arena is small and its layout another */
        Model model;
        ModelSpec s = spec_of((Arch)arch, PRECISION_BF16);
        s.train = false;
        s.B = 0;
        open_model(&model, &s);
        run_steps(&model, 0);
        model_close(&model);
    }
}

/* ---- resident memory, in a process of its own ---- */

static int resident_of_child(const ModelSpec *spec)
{
    Model model;
    Error error;
    int64_t before = peak_rss_bytes();
    if (model_open(&model, spec, real_ops, &error)) die("%s", error.text);
    zero_init_params(&model.zero, 1);
    model.gpt.hooks.prepare_weights(&model.zero);
    run_steps(&model, 1);
    double plan = (double)model.arena.peak, grown = (double)(peak_rss_bytes() - before);
    printf("measured resident memory: %.1f MB, plan %.1f MB\n", grown / 1e6, plan / 1e6);
    fflush(stdout);
    return grown > 0.9 * plan && grown < 1.05 * plan + 8e6 ? 0 : 1;
}

static void test_resident(void)
{
    ModelSpec s = spec_of(ARCH_GPT2, PRECISION_BF16);
    int status;
    test_case("resident memory is what plan said");
#ifdef __SANITIZE_ADDRESS__
    test_skip("AddressSanitizer's own memory would count");
    return;
#endif
    s.config.L = 4;
    s.config.C = 256;
    s.config.HD = 64;
    s.config.F = 1024;
    s.config.V = 8000;
    s.config.Vp = 8064;
    s.config.T = 256;
    s.B = 3;
    s.micro_steps = 1;
    s.generate = false;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) _exit(resident_of_child(&s));
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "see the figures above (status %x)", (unsigned)status);
}

int main(void)
{
    Error error;
    if (cpu_open(&real_ops, "auto", 1, &error)) die("%s", error.text); /* no threads yet: the child starts its own */
    test_resident();
    if (cpu_open(&real_ops, "auto", 2, &error)) die("%s", error.text);
    test_plan();
    test_recompute();
    test_guarded();
    return test_done();
}
