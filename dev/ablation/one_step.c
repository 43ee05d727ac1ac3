/* What each ingredient of the NVFP4 recipe does to the gradients of one step, with statistical power: on a fixed trained
 * checkpoint and fixed micro-batches, the loss and every block's weight gradient under a recipe, for many seeds of
 * stochastic rounding, against the same in FP32.
 *
 *     one_step CHECKPOINT DATA SEEDS MICRO_BATCHES "NAME|OPTIONS of train" ...
 *
 *     error   |g - g32| / |g32|            how far one draw is off
 *     cosine  g . g32 / (|g| |g32|)        and in which direction
 *     bias    |mean over seeds of g - g32| / |g32|, with what the scatter of `SEEDS` draws leaves in it taken out:
 *             sqrt(max(0, |mean - g32|^2 - scatter^2 / SEEDS)) / |g32|    what averaging over steps does not remove
 *     loss    loss - loss in FP32, nats per token
 *
 * Means over the weight gradients of all quantized blocks and over micro-batches; +- is the standard error over
 * micro-batches. Rows are Markdown; the first one is BF16. A recipe that draws nothing is run once a micro-batch.
 */
#include "checkpoint.h"
#include "cpu/backend.h"
#include "dataloader.h"
#include "start.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    Model model;
    double loss; /* of the last gradient, nats per token */
} Subject;

typedef struct { /* FP32 gradients of the block matrices, one after the other */
    float *value;
    int64_t *first; /* [matrices + 1] */
    int matrices;
} Gradient;

static const Ops *ops;

static void subject_open(Subject *s, const char *checkpoint, const char *options_text)
{
    enum { MAX = 64 };
    char *words[MAX] = {"one_step", "train", "--config", NULL}, *text = xstrdup(options_text), *save = NULL;
    char *config = words[3] = xformat("%s/config.json", checkpoint);
    int count = 4;
    for (char *w = strtok_r(text, " ", &save); w && count < MAX; w = strtok_r(NULL, " ", &save)) words[count++] = w;
    Options options;
    ModelSpec spec;
    Error error;
    bool help;
    if (options_parse(&options, count, words, &help, &error)) die_usage("%s", error.text);
    if (start_spec(&options, &spec, &error)) die_usage("%s", error.text);
    spec.micro_steps = 1;
    spec.generate = spec.recipe.shadow = false;
    if (model_open(&s->model, &spec, ops, &error)) die_usage("%s: %s", options_text, error.text);
    if (checkpoint_load(checkpoint, &s->model, false, &error)) die("%s", error.text);
    options_free(&options);
    free(config);
    free(text);
}

/* Gradient of one micro-batch, from zero. */
static void subject_gradient(Subject *s, Gradient *g, const StepData *data, int64_t micro_batch, uint64_t seed,
                             uint32_t at)
{
    Model *model = &s->model;
    int64_t N = model->spec.B * model->spec.config.T;
    Step step = {.seed = seed, .step = at, .loss_scale = 1.0f / (float)N};
    model->gpt.seed = seed;
    ops->workspace_set(model->workspace, &model->need);
    gpt_enter_step(&model->gpt, at);
    for (int i = 0; i < model->table.count; i++) ops->zero(model->zero.shard[i].sum);
    Batch batch = model_upload(model, 0, data->tokens + micro_batch * N, data->targets + micro_batch * N);
    gpt_gradients(&model->gpt, &step, &batch, 1);
    ops->copy_out(&s->loss, batch.loss, sizeof s->loss);
    s->loss /= (double)N;
    for (int i = 0, m = 0; i < model->table.count; i++) {
        const Param *p = &model->table.param[i];
        if (p->kind > PARAM_DOWN) continue;
        ops->copy_out(g->value + g->first[m++], model->zero.shard[i].sum.data, (size_t)(p->rows * p->cols) * 4);
    }
}

static Gradient gradient_new(const ParamTable *table)
{
    Gradient g = {.first = xcalloc((size_t)table->count + 1, sizeof *g.first)};
    for (int i = 0; i < table->count; i++) {
        const Param *p = &table->param[i];
        if (p->kind > PARAM_DOWN) continue;
        g.first[g.matrices + 1] = g.first[g.matrices] + p->rows * p->cols;
        g.matrices++;
    }
    g.value = xcalloc((size_t)g.first[g.matrices], sizeof *g.value);
    return g;
}

static void gradient_free(Gradient *g)
{
    free(g->value);
    free(g->first);
}

typedef struct {
    double error, cosine, bias, loss;
} Report;

/* One micro-batch: `seeds` draws of g against the truth; means over the matrices. */
static Report measure(Subject *s, Gradient *g, const Gradient *truth, const StepData *data, int64_t micro_batch,
                      int seeds, double loss32, uint32_t at)
{
    Report r = {0};
    int64_t n = truth->first[truth->matrices];
    double *sum = xcalloc((size_t)n, sizeof *sum), *squares = xcalloc((size_t)truth->matrices, sizeof *squares);
    double *energy = xcalloc((size_t)truth->matrices, sizeof *energy);
    for (int seed = 0; seed < seeds; seed++) {
        subject_gradient(s, g, data, micro_batch, (uint64_t)(1000 + seed), at);
        r.loss += (s->loss - loss32) / seeds;
        for (int m = 0; m < truth->matrices; m++) {
            double dd = 0, gg = 0, tt = 0, gt = 0;
            for (int64_t i = truth->first[m]; i < truth->first[m + 1]; i++) {
                double a = (double)g->value[i], b = (double)truth->value[i];
                dd += (a - b) * (a - b);
                gg += a * a;
                tt += b * b;
                gt += a * b;
                sum[i] += a;
            }
            squares[m] += gg;
            energy[m] = tt;
            r.error += sqrt(dd / tt) / seeds / truth->matrices;
            r.cosine += gt / sqrt(gg * tt) / seeds / truth->matrices;
        }
    }
    for (int m = 0; m < truth->matrices; m++) {
        double off = 0, of_mean = 0;
        for (int64_t i = truth->first[m]; i < truth->first[m + 1]; i++) {
            double mean = sum[i] / seeds;
            off += (mean - (double)truth->value[i]) * (mean - (double)truth->value[i]);
            of_mean += mean * mean;
        }
        double scatter = seeds > 1 ? (squares[m] - seeds * of_mean) / (seeds - 1) : 0; /* of one draw about the mean */
        r.bias += sqrt(fmax(0, off - scatter / seeds) / energy[m]) / truth->matrices;
    }
    free(sum);
    free(squares);
    free(energy);
    return r;
}

static void print_mean(const Report *r, int64_t n, size_t member, const char *format)
{
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < n; i++) mean += *(const double *)((const char *)&r[i] + member) / (double)n;
    for (int64_t i = 0; i < n; i++) {
        double d = *(const double *)((const char *)&r[i] + member) - mean;
        squares += d * d;
    }
    printf(format, mean, n > 1 ? sqrt(squares / (double)(n - 1) / (double)n) : NAN);
}

static bool draws(const Model *model)
{
    const LinearFormats *f = model->recipe.formats;
    for (int64_t i = 0; i < model->recipe.L * PROJ_COUNT; i++)
        if (f[i].dy_row.nvfp4.rounding || f[i].dy_col.nvfp4.rounding || f[i].x_row.nvfp4.rounding) return true;
    return false;
}

int main(int argc, char **argv)
{
    Error error;
    if (argc < 6) die_usage("one_step CHECKPOINT DATA SEEDS MICRO_BATCHES \"NAME|OPTIONS\" ...");
    const char *checkpoint = argv[1];
    int seeds = atoi(argv[3]), micro_batches = atoi(argv[4]);
    RunState state;
    Json *config;
    if (seeds < 1 || micro_batches < 1) die_usage("SEEDS and MICRO_BATCHES: at least 1");
    if (cpu_open(&ops, "auto", 0, &error)) die_usage("%s", error.text);
    if (checkpoint_verify(checkpoint, false, &state, &config, &error)) die("%s", error.text);

    Subject truth;
    StepData data;
    subject_open(&truth, checkpoint, "--precision fp32 --master fp32");
    const ModelSpec *spec = &truth.model.spec;
    DataLoaderConfig loading = {.pattern = argv[2],
                                .B = spec->B,
                                .T = spec->config.T,
                                .micro_batches = micro_batches,
                                .ranks = 1,
                                .seed = 1,
                                .shuffle = true,
                                .vocab = spec->config.V};
    DataLoader *loader = dataloader_open(&loading, 0, &error);
    if (!loader || dataloader_next(loader, &data, &error)) die("%s", error.text);
    Gradient *exact = xcalloc((size_t)micro_batches, sizeof *exact), g = gradient_new(&truth.model.table);
    double *loss = xcalloc((size_t)micro_batches, sizeof *loss);
    for (int m = 0; m < micro_batches; m++) {
        exact[m] = gradient_new(&truth.model.table);
        subject_gradient(&truth, &exact[m], &data, m, 1, (uint32_t)state.step);
        loss[m] = truth.loss;
    }
    printf("%d weight gradients of %s, step %lld; %d micro-batches of %lld tokens, up to %d seeds\n\n", g.matrices,
           checkpoint, (long long)state.step, micro_batches, (long long)(spec->B * spec->config.T), seeds);
    printf("| recipe | relative error | 1 - cosine | bias | loss - FP32 (1e-3 nats) |\n|---|---|---|---|---|\n");
    for (int v = 5; v < argc; v++) {
        Subject s;
        char *bar = strchr(argv[v], '|');
        if (!bar) die_usage("%s: write NAME|OPTIONS", argv[v]);
        subject_open(&s, checkpoint, bar + 1);
        Report *report = xcalloc((size_t)micro_batches, sizeof *report);
        int times = draws(&s.model) ? seeds : 1;
        for (int m = 0; m < micro_batches; m++) {
            report[m] = measure(&s, &g, &exact[m], &data, m, times, loss[m], (uint32_t)state.step);
            report[m].cosine = 1 - report[m].cosine;
            report[m].loss *= 1e3;
        }
        printf("| %.*s ", (int)(bar - argv[v]), argv[v]);
        print_mean(report, micro_batches, offsetof(Report, error), "| %.4f +- %.4f ");
        print_mean(report, micro_batches, offsetof(Report, cosine), "| %.5f +- %.5f ");
        print_mean(report, micro_batches, offsetof(Report, bias), "| %.4f +- %.4f ");
        print_mean(report, micro_batches, offsetof(Report, loss), "| %+.2f +- %.2f |\n");
        fflush(stdout);
        free(report);
        model_close(&s.model);
    }
    for (int m = 0; m < micro_batches; m++) gradient_free(&exact[m]);
    gradient_free(&g);
    free(exact);
    free(loss);
    dataloader_close(loader);
    model_close(&truth.model);
    json_free(config);
    return 0;
}
