/* Memory of a model: what `plan` counts is what a run lays out, purpose by purpose and to the byte; nothing is written
 * beyond it; and the process grows by no more than it says.
 */
#include <math.h>
#include <unistd.h>

#include "cpu/backend.h"
#include "model.h"
#include "test.h"

static ModelSpec spec_of(Arch arch, Recompute recompute, bool train, bool generate)
{
    Error error;
    ModelSpec spec = {.config = {.arch = arch,
                                 .L = 3,
                                 .C = 48,
                                 .NH = 3,
                                 .F = 80,
                                 .V = 150,
                                 .T = 48,
                                 .tied = arch != ARCH_LLAMA,
                                 .rope_theta = 1e4,
                                 .init_std = 0.1f,
                                 .embedding_init_std = 0.1f},
                      .precision = PRECISION_BF16,
                      .train = train,
                      .generate = generate,
                      .B = 3,
                      .micro_steps = 2,
                      .recompute = recompute,
                      .document_mask = true,
                      .eot_token = 149};
    if (config_finish(&spec.config, &error)) die("%s", error.text);
    return spec;
}

static void run_a_step(Model *model)
{
    const ModelSpec *s = &model->spec;
    int64_t N = s->B * s->config.T;
    int32_t *tokens = xmalloc((size_t)N * sizeof *tokens);
    Batch batch[2];
    Step step = {.lr = 1e-3f,
                 .beta1 = 0.9f,
                 .beta2 = 0.95f,
                 .eps = 1e-8f,
                 .correction1 = 10,
                 .correction2 = 20,
                 .loss_scale = 0.5f / (float)N};
    for (int64_t i = 0; i < N; i++) tokens[i] = (int32_t)(i * 7 % s->config.V);
    for (int m = 0; m < 2; m++) batch[m] = model_upload(model, m, tokens, tokens);
    gpt_gradients(&model->gpt, &step, batch, 2);
    CHECK(optimizer_step(&model->optimizer, 2 * N).finite, "the step was not finite");
    gpt_evaluate(&model->gpt, batch);
    if (s->generate) {
        model_use(model, USE_GENERATE, s->config.T);
        Batch prompt = model_upload_tokens(model, tokens, s->config.T);
        gpt_logits(&model->gpt, &prompt, 0);
        model_use(model, USE_TRAIN, 0);
    }
    free(tokens);
}

/* alloc with a guard behind the arena */
enum { GUARD = 4096 };
static const Ops *real;
static char *guard;
static void *guarded_alloc(size_t bytes)
{
    char *memory = real->alloc(bytes + GUARD);
    guard = memory + bytes;
    memset(guard, 0x5a, GUARD);
    return memory;
}
static void guarded_free(void *memory, size_t bytes) { real->free(memory, bytes + GUARD); }

static void test_plan(Arch arch, Recompute recompute, bool generate)
{
    Model counted, model;
    Error error;
    char name[96];
    ModelSpec spec = spec_of(arch, recompute, true, generate);
    snprintf(name, sizeof name, "%s, recompute %d%s: plan is the run's memory", arch_name(arch), recompute,
             generate ? ", samples" : "");
    test_case(name);
    if (cpu_open(&real, "auto", 2, &error)) die("%s", error.text);
    Ops guarded = *real;
    guarded.alloc = guarded_alloc;
    guarded.free = guarded_free;
    if (model_plan(&counted, &spec, &guarded, &error) || model_open(&model, &spec, &guarded, &error))
        die("%s", error.text);
    CHECK(counted.arena.peak == model.arena.capacity, "counted %zu, allocated %zu", counted.arena.peak,
          model.arena.capacity);
    zero_init_params(&model.zero, 1);
    gpt_enter_phase(&model.gpt, 0);
    for (int i = 0; i < 2; i++) run_a_step(&model);
    size_t sum = 0;
    for (int p = 0; p < PURPOSE_COUNT; p++) {
        sum += counted.arena.bytes[p];
        CHECK(counted.arena.bytes[p] == model.arena.bytes[p], "%s: counted %zu, laid out %zu", purpose_name((Purpose)p),
              counted.arena.bytes[p], model.arena.bytes[p]);
    }
    CHECK(sum == counted.arena.peak && model.arena.peak == counted.arena.peak, "%zu booked of %zu, peak %zu", sum,
          counted.arena.peak, model.arena.peak);
    for (int i = 0; i < GUARD; i++)
        if (!CHECK(guard[i] == 0x5a, "byte %d behind the arena was written", i)) break;
    model_close(&counted);
    model_close(&model);
}

static size_t planned(Recompute recompute, bool train, bool generate)
{
    Model model;
    Error error;
    const Ops *ops;
    ModelSpec spec = spec_of(ARCH_LLAMA, recompute, train, generate);
    spec.config.L = 8;
    if (cpu_open(&ops, "auto", 2, &error) || model_plan(&model, &spec, ops, &error)) die("%s", error.text);
    size_t peak = model.arena.peak;
    model_close(&model);
    return peak;
}

static int64_t resident(void)
{
    long pages = 0, all;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%ld %ld", &all, &pages) != 2) pages = 0;
    if (f) fclose(f);
    return (int64_t)pages * sysconf(_SC_PAGESIZE);
}

static void test_resident(void)
{
    Model model;
    Error error;
    const Ops *ops;
    ModelSpec spec = spec_of(ARCH_GPT2, RECOMPUTE_NONE, true, false);
    test_case("a process grows by what plan says, within 5%");
    spec.config = (GPTConfig){.arch = ARCH_GPT2,
                              .L = 4,
                              .C = 512,
                              .NH = 8,
                              .V = 5000,
                              .T = 128,
                              .tied = true,
                              .init_std = 0.02f,
                              .embedding_init_std = 0.02f};
    spec.B = 2;
    int64_t before = resident();
    if (!before) {
        test_skip("no /proc/self/statm");
        return;
    }
    if (config_finish(&spec.config, &error) || cpu_open(&ops, "auto", 2, &error) ||
        model_open(&model, &spec, ops, &error))
        die("%s", error.text);
    zero_init_params(&model.zero, 1);
    gpt_enter_phase(&model.gpt, 0);
    run_a_step(&model);
    double ratio = (double)(resident() - before) / (double)model.arena.peak;
    CHECK(ratio > 0.9 && ratio < 1.05, "resident memory grew by %.3f of the %zu bytes planned", ratio,
          model.arena.peak);
    printf("measured resident memory over plan: %.3f of %.0f MiB\n", ratio, (double)model.arena.peak / 0x1p20);
    model_close(&model);
}

int main(void)
{
    for (int arch = 0; arch < 3; arch++)
        for (int recompute = 0; recompute < 3; recompute++)
            test_plan((Arch)arch, (Recompute)recompute, recompute == RECOMPUTE_NONE);
    test_case("levels of recomputation, and uses, are ordered by memory");
    size_t none = planned(RECOMPUTE_NONE, true, false), operands = planned(RECOMPUTE_OPERANDS, true, false),
           block = planned(RECOMPUTE_BLOCK, true, false), evaluation = planned(RECOMPUTE_NONE, false, false);
    CHECK(none > operands && operands > block && block > evaluation, "%zu %zu %zu, evaluation %zu", none, operands,
          block, evaluation);
    CHECK(planned(RECOMPUTE_BLOCK, true, true) >= block, "samples take no less");
    test_resident();
    return test_done();
}
