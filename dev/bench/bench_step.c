/* A training step in NVFP4 against one in BF16, by turns in one process: the median time of each and their ratio.
 *
 *     make bench && build/bench/bench_step [--steps N] [-- OPTIONS of train]
 *
 * Default: GPT-2 124M's shapes (12 layers, hidden 768, vocabulary 50257), 1 sequence of 512 tokens, 7 steps of each.
 * OPTIONS change shapes, recipe, instruction set and threads; train_data is not read, the tokens are random.
 */
#include "cpu/backend.h"
#include "start.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int smaller(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void open_model(Model *model, Options *options, Precision precision, const Ops *ops)
{
    ModelSpec spec;
    Error error;
    options->recipe.precision = precision;
    if (start_spec(options, &spec, &error)) die_usage("%s", error.text);
    spec.generate = false;
    if (model_open(model, &spec, ops, &error)) die_usage("%s", error.text);
    zero_init_params(&model->zero, 1);
    gpt_enter_step(&model->gpt, 0);
}

static double step_seconds(Model *model, uint32_t step, const int32_t *tokens)
{
    const ModelSpec *s = &model->spec;
    int64_t N = s->B * s->config.T;
    Step settings = {.seed = 1,
                     .step = step,
                     .lr = 1e-4f,
                     .beta1 = 0.9f,
                     .beta2 = 0.95f,
                     .eps = 1e-8f,
                     .grad_clip = 1,
                     .correction1 = 1,
                     .correction2 = 1,
                     .loss_scale = 1 / (float)(N * s->micro_steps)};
    Batch *batch = xcalloc((size_t)s->micro_steps, sizeof *batch);
    model->ops->workspace_set(model->workspace, &model->need);
    for (int64_t m = 0; m < s->micro_steps; m++) batch[m] = model_upload(model, m, tokens, tokens + 1);
    double start = now_seconds();
    gpt_gradients(&model->gpt, &settings, batch, s->micro_steps);
    optimizer_step(&model->optimizer, N * s->micro_steps);
    optimizer_result(&model->optimizer);
    double seconds = now_seconds() - start;
    free(batch);
    return seconds;
}

int main(int argc, char **argv)
{
    enum { MAX = 64 };
    char *words[MAX] = {"bench_step", "train", "--train_data", "none", "--arch",  "gpt2",
                        "--layers",   "12",    "--hidden",     "768",  "--heads", "12",
                        "--vocab",    "50257", "--seq_len",    "512",  "--batch", "1"};
    int count = 18, steps = 7;
    for (int i = 1; i < argc && count < MAX; i++) {
        if (strcmp(argv[i], "--steps") == 0 && i + 1 < argc)
            steps = atoi(argv[++i]);
        else if (strcmp(argv[i], "--") != 0)
            words[count++] = argv[i];
    }
    Options options;
    Error error;
    bool help;
    const Ops *ops;
    if (options_parse(&options, count, words, &help, &error)) die_usage("%s", error.text);
    if (cpu_open(&ops, options.isa, options.threads, &error)) die_usage("%s", error.text);
    if (steps < 1) die_usage("--steps %d: at least 1", steps);

    Model model[2];
    double *seconds[2];
    const Precision precision[2] = {PRECISION_BF16, PRECISION_NVFP4};
    for (int p = 0; p < 2; p++) {
        open_model(&model[p], &options, precision[p], ops);
        seconds[p] = xcalloc((size_t)steps, sizeof **seconds);
    }
    int64_t tokens = model[0].spec.B * model[0].spec.config.T;
    int32_t *text = xmalloc((size_t)(tokens + 1) * sizeof *text);
    for (int64_t i = 0; i <= tokens; i++) text[i] = (int32_t)((i * 7919 + i * i) % model[0].spec.config.V);
    for (int step = -1; step < steps; step++) /* the first of each touches its memory and is not counted */
        for (int p = 0; p < 2; p++) {
            double s = step_seconds(&model[p], (uint32_t)(step + 1), text);
            if (step >= 0) seconds[p][step] = s;
        }
    for (int p = 0; p < 2; p++) qsort(seconds[p], (size_t)steps, sizeof **seconds, smaller);
    double bf16 = seconds[0][steps / 2], nvfp4 = seconds[1][steps / 2];
    printf("%s, %d threads, %lld tokens: bf16 %.1f ms, nvfp4 %.1f ms (medians of %d), ratio %.3f\n", ops->name,
           cpu_threads(), (long long)tokens, bf16 * 1e3, nvfp4 * 1e3, steps, nvfp4 / bf16);
    for (int p = 0; p < 2; p++) {
        free(seconds[p]);
        model_close(&model[p]);
    }
    free(text);
    options_free(&options);
    return 0;
}
