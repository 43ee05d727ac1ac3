/* Evaluation and generation in process. Evaluation: the mean over the windows whatever the batch, a last batch that is
 * not full, fewer windows than a batch; the losses are those of the logits that generation computes on its own way.
 * Generation: with its cache it gives token by token what a whole pass over the same context gives, bit for bit, also
 * beyond the end of the context; and it leaves a model in training as it was.
 */
#include "evaluate.h"

#include <math.h>

#include "cpu/backend.h"
#include "generate.h"
#include "numerics.h"
#include "sampler.h"
#include "test.h"
#include "test_files.h"
#include "tokenizer.h"

static const Ops *ops;

static const struct {
    Arch arch;
    Precision precision;
    bool mask;
    const char *name;
} CASES[] = {
    {ARCH_GPT2, PRECISION_BF16, false, "gpt2 bf16"},         {ARCH_GPT2, PRECISION_FP32, false, "gpt2 fp32"},
    {ARCH_LLAMA, PRECISION_BF16, false, "llama bf16"},       {ARCH_LLAMA, PRECISION_FP32, false, "llama fp32"},
    {ARCH_QWEN3, PRECISION_BF16, false, "qwen3 bf16"},       {ARCH_QWEN3, PRECISION_FP32, false, "qwen3 fp32"},
    {ARCH_LLAMA, PRECISION_BF16, true, "llama bf16 masked"}, {ARCH_GPT2, PRECISION_FP32, true, "gpt2 fp32 masked"}};
enum { CASE_COUNT = sizeof CASES / sizeof *CASES };

/* T is more than one block of keys (64) in attention, and no multiple of it. */
static ModelSpec spec_of(int i, int64_t T, int64_t V)
{
    ModelSpec spec = {.config = {.arch = CASES[i].arch, .L = 2, .C = 32, .NH = 4, .V = V, .T = T, .tied = true},
                      .recipe = recipe_defaults(CASES[i].precision, MASTER_DEFAULT),
                      .train = true,
                      .generate = true,
                      .B = 2,
                      .micro_steps = 1,
                      .document_mask = CASES[i].mask,
                      .eot_token = V - 1};
    Error error;
    spec.config.init_std = 0.3f; /* far from uniform, so that the likeliest token depends on the context */
    spec.config.embedding_init_std = CASES[i].arch == ARCH_GPT2 ? 0.3f : 1;
    if (CASES[i].arch != ARCH_GPT2) {
        spec.config.NKV = 2;
        spec.config.rope_theta = 10000;
    }
    if (config_finish(&spec.config, &error)) die("%s", error.text);
    return spec;
}

static void open_model(Model *model, const ModelSpec *spec)
{
    Error error;
    if (model_open(model, spec, ops, &error)) die("%s", error.text);
    zero_init_params(&model->zero, 5);
    gpt_enter_step(&model->gpt, 0);
}

static int32_t token_at(int64_t i, int64_t V)
{
    int32_t drawn = (int32_t)(philox4x32(10, (uint32_t)i, 9, 9, 9, 9, 9).word[0] % (uint32_t)V);
    return i % 29 == 11 ? (int32_t)V - 1 : drawn; /* some documents end */
}

/* A token file without header; owned by the caller. */
static char *write_tokens(const char *folder, int64_t count, int64_t V)
{
    char *path = xformat("%s/%lld_%lld.bin", folder, (long long)count, (long long)V);
    uint16_t *tokens = xcalloc((size_t)count, sizeof *tokens);
    for (int64_t i = 0; i < count; i++) tokens[i] = (uint16_t)token_at(i, V);
    test_write_file(path, tokens, (size_t)count * sizeof *tokens);
    free(tokens);
    return path;
}

static DataLoader *open_data(const char *path, const ModelSpec *spec)
{
    Error error;
    DataLoaderConfig config = {
        .pattern = path, .B = 1, .T = spec->config.T, .micro_batches = 1, .ranks = 1, .vocab = UINT16_MAX};
    config.vocab = spec->config.V;
    DataLoader *data = dataloader_open(&config, 0, &error);
    if (!data) die("%s", error.text);
    return data;
}

/* The evaluation of a file by a model of batch size B, of `batches` of them. */
static Evaluation evaluated(ModelSpec spec, int64_t B, bool train, const char *path, int64_t batches)
{
    Model model;
    Evaluation result = {0};
    Error error;
    spec.B = B;
    spec.train = train;
    open_model(&model, &spec);
    DataLoader *data = open_data(path, &spec);
    CHECK(evaluate(&model, data, batches, &result, &error) == 0, "%s", error.text);
    dataloader_close(data);
    model_close(&model);
    return result;
}

/* ---- evaluation ---- */

static void test_batches(const char *folder)
{
    enum { T = 24, V = BYTE_TOKENIZER_VOCAB };
    char *path = write_tokens(folder, 7 * T + 20, V); /* seven windows and a tail */
    for (int i = 0; i < CASE_COUNT; i++) {
        char *name = xformat("evaluate: any batch size gives the same: %s", CASES[i].name);
        test_case(name);
        free(name);
        ModelSpec spec = spec_of(i, T, V);
        Evaluation one = evaluated(spec, 1, true, path, 0), six = evaluated(spec, 1, true, path, 6);
        CHECK(one.tokens == 7 * T, "%lld tokens", (long long)one.tokens);
        CHECK(six.tokens == 6 * T && six.loss != one.loss, "six windows: %lld tokens", (long long)six.tokens);
        static const int64_t SIZES[] = {2, 3, 4, 7, 8, 20};
        for (int k = 0; k < 6; k++) {
            Evaluation same = evaluated(spec, SIZES[k], true, path, 0);
            CHECK(same.loss == one.loss && same.bits_per_byte == one.bits_per_byte && same.tokens == one.tokens,
                  "batch %lld: %.17g, 1: %.17g", (long long)SIZES[k], same.loss, one.loss);
            same = evaluated(spec, SIZES[k], true, path, 1000);
            CHECK(same.loss == one.loss, "batch %lld, more batches than there are", (long long)SIZES[k]);
        }
        Evaluation part = evaluated(spec, 3, true, path, 2);
        CHECK(part.loss == six.loss && part.tokens == six.tokens, "two batches of 3: %.17g, six of 1: %.17g", part.loss,
              six.loss);
        Evaluation reader = evaluated(spec, 3, false, path, 0);
        CHECK(reader.loss == one.loss, "a model that cannot train: %.17g, one that can: %.17g", reader.loss, one.loss);
    }
    free(path);
}

static void test_bytes(const char *folder)
{
    enum { T = 24 };
    test_case("evaluate: bits per byte leave end-of-text out, and are unknown where tokens are not bytes");
    char *path = write_tokens(folder, 5 * T + 1, BYTE_TOKENIZER_VOCAB), *other = write_tokens(folder, 5 * T + 1, 300);
    int64_t bytes = 0;
    for (int64_t i = 1; i <= 5 * T; i++) bytes += token_at(i, BYTE_TOKENIZER_VOCAB) != BYTE_TOKENIZER_EOT;
    Evaluation e = evaluated(spec_of(2, T, BYTE_TOKENIZER_VOCAB), 2, true, path, 0);
    double expected = e.loss * (double)e.tokens / (double)bytes / log(2);
    CHECK(bytes < 5 * T && fabs(e.bits_per_byte / expected - 1) < 1e-12, "%.9g, expected %.9g", e.bits_per_byte,
          expected);
    e = evaluated(spec_of(2, T, 300), 2, true, other, 0);
    CHECK(isnan(e.bits_per_byte) && isfinite(e.loss), "%g bits per byte of 300 tokens", e.bits_per_byte);
    free(other);
    other = write_tokens(folder, 10, BYTE_TOKENIZER_VOCAB);
    e = evaluated(spec_of(2, T, BYTE_TOKENIZER_VOCAB), 2, true, other, 0);
    CHECK(e.tokens == T && isfinite(e.loss), "a file shorter than a window: %lld tokens", (long long)e.tokens);
    free(other);

    test_case("evaluate: a token beyond the vocabulary names file and place");
    Model model;
    ModelSpec spec = spec_of(2, T, 200);
    Error error = {""};
    Evaluation unused;
    open_model(&model, &spec);
    DataLoader *data = open_data(path, &spec);
    CHECK(evaluate(&model, data, 0, &unused, &error) == -1, "it was taken");
    CHECK(strstr(error.text, path) && strstr(error.text, "position"), "\"%s\"", error.text);
    dataloader_close(data);
    model_close(&model);
    free(path);
}

/* ---- generation ---- */

/* Logits after tokens [count] from one whole pass, nothing cached. */
static void whole_logits(Model *model, const int32_t *tokens, int64_t count, float *logits)
{
    model_use(model, USE_GENERATE, count);
    Batch batch = model_upload_tokens(model, tokens, count);
    Tensor t = gpt_logits(&model->gpt, &batch, 0);
    for (int64_t v = 0; v < model->spec.config.V; v++)
        logits[v] = t.dtype == DTYPE_BF16 ? bf16_to_f32(((const uint16_t *)t.data)[v]) : ((const float *)t.data)[v];
}

static void test_losses(const char *folder)
{
    enum { T = 70, V = 60 };
    char *path = write_tokens(folder, T + 1, V);
    for (int i = 0; i < CASE_COUNT; i++) {
        if (CASES[i].mask) continue; /* generation sees one document */
        char *name = xformat("evaluate: the loss is that of generation's logits: %s", CASES[i].name);
        test_case(name);
        free(name);
        Model model;
        ModelSpec spec = spec_of(i, T, V);
        int32_t tokens[T + 1];
        float logits[V];
        double sum = 0, bound = CASES[i].precision == PRECISION_FP32 ? 1e-6 : 2e-3;
        for (int64_t t = 0; t <= T; t++) tokens[t] = token_at(t, V);
        open_model(&model, &spec);
        for (int64_t t = 0; t < T; t++) {
            double total = 0;
            whole_logits(&model, tokens, t + 1, logits);
            for (int64_t v = 0; v < V; v++) total += exp((double)logits[v] - (double)logits[tokens[t + 1]]);
            sum += log(total);
        }
        Evaluation e = evaluated(spec, 1, true, path, 0);
        CHECK(fabs(e.loss / (sum / T) - 1) < bound, "evaluation %.9g, logits %.9g", e.loss, sum / T);
        model_close(&model);
    }
    free(path);
}

typedef struct {
    int32_t token[512];
    int64_t count;
} Emitted;

static void emit(void *context, int32_t token)
{
    Emitted *e = context;
    e->token[e->count++] = token;
}

/* What generate must give, with a whole pass for every token: when the context is full its last half goes on. */
static Emitted expected_tokens(Model *model, const int32_t *prompt, int64_t length, const Sampling *s)
{
    int64_t T = model->spec.config.T, V = model->spec.config.V, count = min_i64(length, T);
    int32_t *window = xmalloc((size_t)T * sizeof *window);
    float *logits = xmalloc((size_t)V * sizeof *logits), *scratch = xmalloc((size_t)V * sizeof *scratch);
    Emitted e = {.count = 0};
    memcpy(window, prompt + length - count, (size_t)count * sizeof *window);
    while (e.count < s->tokens) {
        whole_logits(model, window, count, logits);
        int32_t token = sampler_pick(logits, V, s->temperature, s->top_k, s->seed, (uint32_t)e.count, scratch);
        e.token[e.count++] = token;
        if (count == T) memmove(window, window + T - T / 2, (size_t)(count = T / 2) * sizeof *window);
        window[count++] = token;
    }
    free(window);
    free(logits);
    free(scratch);
    return e;
}

static void check_generation(Model *model, const int32_t *prompt, int64_t length, Sampling sampling, const char *what)
{
    Emitted e = {.count = 0}, expected = expected_tokens(model, prompt, length, &sampling);
    Error error = {""};
    CHECK(generate(model, prompt, length, &sampling, emit, &e, &error) == 0, "%s: %s", what, error.text);
    CHECK(e.count == sampling.tokens, "%s: %lld tokens", what, (long long)e.count);
    for (int64_t i = 0; i < e.count; i++)
        if (!CHECK(e.token[i] == expected.token[i], "%s: token %lld is %d, a whole pass gives %d", what, (long long)i,
                   e.token[i], expected.token[i]))
            break;
    int64_t kinds = 0;
    for (int64_t i = 0; i < e.count; i++) {
        bool seen = false;
        for (int64_t k = 0; k < i; k++) seen |= e.token[k] == e.token[i];
        kinds += !seen;
    }
    CHECK(kinds > 4 || sampling.tokens <= 4, "%s: only %lld different tokens prove little", what, (long long)kinds);
}

static void test_generation(void)
{
    enum { T = 70, V = 60 };
    for (int i = 0; i < CASE_COUNT; i++) {
        if (CASES[i].mask) continue;
        char *name = xformat("generate: the cache changes no token: %s", CASES[i].name);
        test_case(name);
        free(name);
        Model model;
        ModelSpec spec = spec_of(i, T, V);
        int32_t prompt[2 * T];
        for (int64_t t = 0; t < 2 * T; t++) prompt[t] = token_at(t, V);
        open_model(&model, &spec);
        Sampling greedy = {.tokens = 25, .temperature = 0, .seed = 1};
        Sampling drawn = {.tokens = 25, .temperature = 0.9, .top_k = 12, .seed = 3}, far = drawn;
        far.tokens = test_long() ? 250 : 110;
        check_generation(&model, prompt, 10, greedy, "greedy");
        check_generation(&model, prompt, 1, drawn, "drawn");
        check_generation(&model, prompt, 10, far, "beyond the context");
        check_generation(&model, prompt, T, drawn, "a full prompt");
        check_generation(&model, prompt, T - 1, drawn, "a prompt of all but one");
        check_generation(&model, prompt, 2 * T, drawn, "a prompt longer than the context");
        model_close(&model);
    }

    test_case("generate: a context of one and of two tokens");
    for (int64_t short_T = 1; short_T <= 2; short_T++) {
        Model model;
        ModelSpec spec = spec_of(2, short_T, V);
        int32_t prompt[3] = {3, 1, 2};
        open_model(&model, &spec);
        check_generation(&model, prompt, 3, (Sampling){.tokens = 20, .temperature = 3, .seed = 1}, "a short context");
        model_close(&model);
    }
}

static void test_between_steps(const char *folder)
{
    enum { T = 24, V = BYTE_TOKENIZER_VOCAB };
    test_case("generate: leaves a model in training as it was");
    char *path = write_tokens(folder, 3 * T, V);
    Model model;
    ModelSpec spec = spec_of(0, T, V);
    int32_t prompt[1] = {7};
    Emitted e = {.count = 0};
    Evaluation before, after;
    Error error;
    open_model(&model, &spec);
    DataLoader *data = open_data(path, &spec);
    uint64_t hash = zero_state_hash(&model.zero);
    CHECK(evaluate(&model, data, 0, &before, &error) == 0, "%s", error.text);
    CHECK(generate(&model, prompt, 1, &(Sampling){.tokens = 50, .temperature = 1, .seed = 1}, emit, &e, &error) == 0,
          "%s", error.text);
    model_use(&model, USE_TRAIN, 0);
    CHECK(evaluate(&model, data, 0, &after, &error) == 0, "%s", error.text);
    CHECK(before.loss == after.loss, "%.17g before, %.17g after", before.loss, after.loss);
    CHECK(zero_state_hash(&model.zero) == hash, "the weights changed");

    test_case("generate: weights that are NaN end it with the reason");
    for (int i = 0; i < model.table.count; i++)
        if (model.table.param[i].kind == PARAM_FINAL_GAIN)
            for (int64_t c = 0; c < spec.config.C; c++) ((float *)model.zero.shard[i].master.data)[c] = NAN;
    model.gpt.hooks.prepare_weights(model.gpt.hooks.context);
    e.count = 0;
    CHECK(generate(&model, prompt, 1, &(Sampling){.tokens = 5, .temperature = 1, .seed = 1}, emit, &e, &error) == -1,
          "it went on");
    CHECK(e.count == 0 && strstr(error.text, "NaN"), "%lld tokens, \"%s\"", (long long)e.count, error.text);
    dataloader_close(data);
    model_close(&model);
    free(path);
}

int main(void)
{
    Error error;
    if (cpu_open(&ops, "auto", 1, &error)) die("%s", error.text);
    char *folder = test_folder();
    test_batches(folder);
    test_bytes(folder);
    test_losses(folder);
    test_generation();
    test_between_steps(folder);
    test_folder_remove(folder);
    return test_done();
}
