/* What each ingredient of the NVFP4 recipe does to the gradients of one step, with statistical power: on a fixed trained
 * checkpoint and fixed micro-batches, the loss and every block's weight gradient under a recipe, for many seeds of
 * stochastic rounding, against the same in FP32.
 *
 *     one_step CHECKPOINT DATA SEEDS MICRO_BATCHES CSV "NAME|OPTIONS of train" ...
 *
 *     error   |g - g32| / |g32|            how far one draw is off
 *     cosine  g . g32 / (|g| |g32|)        and in which direction
 *     bias    |mean over seeds of g - g32| / |g32|, with what the scatter of `SEEDS` draws leaves in it taken out:
 *             sqrt(max(0, |mean - g32|^2 - scatter^2 / SEEDS)) / |g32|    what averaging over steps does not remove
 *     loss    loss - loss in FP32, nats per token
 *
 * The table, in Markdown: means over the weight gradients of all blocks, those in BF16 too, and over micro-batches; +- is
 * the standard error over micro-batches. CSV: a line for every recipe and gradient, means over micro-batches. A recipe
 * that draws nothing is run once a micro-batch, and its bias is its error.
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
    if (checkpoint_load(checkpoint, &s->model, 0, &error)) die("%s", error.text);
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
    double error, one_minus_cosine, bias;
} Report;

/* One micro-batch: `seeds` draws of g against the truth; adds each matrix's share of the mean over `micro_batches` to
 * each[]. Returns the mean over matrices; the mean loss in *loss. */
static Report measure(Subject *s, Gradient *g, const Gradient *truth, const StepData *data, int64_t micro_batch,
                      int micro_batches, int seeds, uint32_t at, Report *each, double *loss)
{
    Report mean = {0};
    int64_t n = truth->first[truth->matrices];
    double *sum = xcalloc((size_t)n, sizeof *sum);
    struct {
        double error, cosine, squares, energy;
    } *m = xcalloc((size_t)truth->matrices, sizeof *m);
    *loss = 0;
    for (int seed = 0; seed < seeds; seed++) {
        subject_gradient(s, g, data, micro_batch, (uint64_t)(1000 + seed), at);
        *loss += s->loss / seeds;
        for (int k = 0; k < truth->matrices; k++) {
            double dd = 0, gg = 0, tt = 0, gt = 0;
            for (int64_t i = truth->first[k]; i < truth->first[k + 1]; i++) {
                double a = (double)g->value[i], b = (double)truth->value[i];
                dd += (a - b) * (a - b);
                gg += a * a;
                tt += b * b;
                gt += a * b;
                sum[i] += a;
            }
            m[k].squares += gg;
            m[k].energy = tt;
            m[k].error += sqrt(dd / tt) / seeds;
            m[k].cosine += gt / sqrt(gg * tt) / seeds;
        }
    }
    for (int k = 0; k < truth->matrices; k++) {
        double off = 0, of_mean = 0;
        for (int64_t i = truth->first[k]; i < truth->first[k + 1]; i++) {
            double average = sum[i] / seeds;
            off += (average - (double)truth->value[i]) * (average - (double)truth->value[i]);
            of_mean += average * average;
        }
        double scatter = seeds > 1 ? (m[k].squares - seeds * of_mean) / (seeds - 1) : 0; /* of one draw */
        Report r = {m[k].error, 1 - m[k].cosine, sqrt(fmax(0, off - scatter / seeds) / m[k].energy)};
        for (int i = 0; i < 3; i++) {
            ((double *)&mean)[i] += ((double *)&r)[i] / truth->matrices;
            ((double *)&each[k])[i] += ((double *)&r)[i] / micro_batches;
        }
    }
    free(sum);
    free(m);
    return mean;
}

/* Mean and standard error of n values that stand `stride` doubles apart. */
static void print_mean(const double *value, int64_t n, int stride, const char *format)
{
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < n; i++) mean += value[i * stride] / (double)n;
    for (int64_t i = 0; i < n; i++) squares += (value[i * stride] - mean) * (value[i * stride] - mean);
    printf(format, mean, n > 1 ? sqrt(squares / (double)(n - 1) / (double)n) : NAN);
}

static bool draws(const Model *model)
{
    const LinearFormats *f = model->recipe.formats;
    for (int64_t i = 0; i < model->recipe.L * PROJ_COUNT; i++)
        if (f[i].dy_row.nvfp4.rounding || f[i].dy_col.nvfp4.rounding || f[i].x_row.nvfp4.rounding) return true;
    return false;
}

typedef struct {
    Gradient *exact; /* [micro_batches] in FP32 */
    double *loss;    /* [micro_batches] */
    StepData data;
    int micro_batches, seeds;
    uint32_t at;
    FILE *csv;
} Bench;

/* One recipe: a row of the table, and its lines of the CSV. */
static void run_recipe(const Bench *b, const char *checkpoint, const char *variant)
{
    Subject s;
    const char *bar = strchr(variant, '|');
    if (!bar) die_usage("%s: write NAME|OPTIONS", variant);
    int width = (int)(bar - variant), matrices = b->exact[0].matrices;
    subject_open(&s, checkpoint, bar + 1);
    Gradient g = gradient_new(&s.model.table);
    Report *mean = xcalloc((size_t)b->micro_batches, sizeof *mean), *each = xcalloc((size_t)matrices, sizeof *each);
    double *gap = xcalloc((size_t)b->micro_batches, sizeof *gap);
    for (int m = 0; m < b->micro_batches; m++) {
        mean[m] = measure(&s, &g, &b->exact[m], &b->data, m, b->micro_batches, draws(&s.model) ? b->seeds : 1, b->at,
                          each, &gap[m]);
        gap[m] = 1e3 * (gap[m] - b->loss[m]);
    }
    printf("| %.*s ", width, variant);
    print_mean(&mean->error, b->micro_batches, 3, "| %.4f +- %.4f ");
    print_mean(&mean->one_minus_cosine, b->micro_batches, 3, "| %.5f +- %.5f ");
    print_mean(&mean->bias, b->micro_batches, 3, "| %.4f +- %.4f ");
    print_mean(gap, b->micro_batches, 1, "| %+.2f +- %.2f |\n");
    fflush(stdout);
    for (int i = 0, k = 0; i < s.model.table.count; i++) {
        if (s.model.table.param[i].kind > PARAM_DOWN) continue;
        fprintf(b->csv, "\"%.*s\",%s,%.5f,%.6f,%.5f\n", width, variant, s.model.table.param[i].name, each[k].error,
                1 - each[k].one_minus_cosine, each[k].bias);
        k++;
    }
    free(mean);
    free(each);
    free(gap);
    gradient_free(&g);
    model_close(&s.model);
}

int main(int argc, char **argv)
{
    Error error;
    if (argc < 7) die_usage("one_step CHECKPOINT DATA SEEDS MICRO_BATCHES CSV \"NAME|OPTIONS\" ...");
    const char *checkpoint = argv[1];
    Bench b = {.seeds = atoi(argv[3]), .micro_batches = atoi(argv[4]), .csv = fopen(argv[5], "w")};
    RunState state;
    Json *config;
    if (b.seeds < 1 || b.micro_batches < 1) die_usage("SEEDS and MICRO_BATCHES: at least 1");
    if (!b.csv) die("%s: cannot write", argv[5]);
    if (cpu_open(&ops, "auto", 0, &error)) die_usage("%s", error.text);
    if (checkpoint_verify(checkpoint, false, &state, &config, &error)) die("%s", error.text);
    b.at = (uint32_t)state.step;

    Subject truth;
    subject_open(&truth, checkpoint, "--precision fp32 --master fp32");
    const ModelSpec *spec = &truth.model.spec;
    DataLoaderConfig loading = {.pattern = argv[2],
                                .B = spec->B,
                                .T = spec->config.T,
                                .micro_batches = b.micro_batches,
                                .ranks = 1,
                                .seed = 1,
                                .shuffle = true,
                                .vocab = spec->config.V};
    DataLoader *loader = dataloader_open(&loading, 0, &error);
    if (!loader || dataloader_next(loader, &b.data, &error)) die("%s", error.text);
    b.exact = xcalloc((size_t)b.micro_batches, sizeof *b.exact);
    b.loss = xcalloc((size_t)b.micro_batches, sizeof *b.loss);
    for (int m = 0; m < b.micro_batches; m++) {
        b.exact[m] = gradient_new(&truth.model.table);
        subject_gradient(&truth, &b.exact[m], &b.data, m, 1, b.at);
        b.loss[m] = truth.loss;
    }
    printf("%d weight gradients of a run at step %lld; %d micro-batches of %lld tokens, %d seeds\n\n",
           b.exact[0].matrices, (long long)state.step, b.micro_batches, (long long)(spec->B * spec->config.T), b.seeds);
    printf("| recipe | relative error | 1 - cosine | bias | loss - FP32 (1e-3 nats) |\n|---|---|---|---|---|\n");
    fprintf(b.csv, "recipe,gradient,error,cosine,bias\n");
    for (int v = 6; v < argc; v++) run_recipe(&b, checkpoint, argv[v]);
    if (fclose(b.csv)) die("%s: cannot write", argv[5]);
    for (int m = 0; m < b.micro_batches; m++) gradient_free(&b.exact[m]);
    free(b.exact);
    free(b.loss);
    dataloader_close(loader);
    model_close(&truth.model);
    json_free(config);
    return 0;
}
