/* See telemetry.h. */
#include "telemetry.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void telemetry_open(Telemetry *t, Model *model, const Options *o)
{
    size_t L = (size_t)model->spec.config.L;
    *t = (Telemetry){.model = model,
                     .every = o->telemetry_every,
                     .shadow_every = o->shadow_every,
                     .table = o->telemetry_table,
                     .checked_phase = -1,
                     .stats = xcalloc((L + 1) * OPERAND_ROLES, sizeof *t->stats),
                     .zero_share = xcalloc(L * PROJ_COUNT, sizeof *t->zero_share),
                     .gap = xcalloc(L * PROJ_COUNT, sizeof *t->gap)};
}

void telemetry_close(Telemetry *t)
{
    free(t->stats);
    free(t->zero_share);
    free(t->gap);
    *t = (Telemetry){0};
}

/* ---- gradients of the blocks' matrices, read from the backend by pieces ---- */

typedef struct {
    double aa, ab, bb; /* scalar products */
    int64_t zeros;     /* of a */
} Sums;

static Sums read_sums(const Ops *ops, const float *a, const float *b, int64_t count)
{
    enum { PIECE = 1 << 18 };
    size_t room = (size_t)min_i64(count, PIECE);
    float *x = xmalloc(room * sizeof *x), *y = xmalloc(room * sizeof *y);
    Sums s = {0};
    for (int64_t i = 0; i < count; i += PIECE) {
        int64_t n = min_i64(count - i, PIECE);
        ops->copy_out(x, a + i, (size_t)n * sizeof *x);
        ops->copy_out(y, b + i, (size_t)n * sizeof *y);
        for (int64_t k = 0; k < n; k++) {
            s.aa += (double)x[k] * (double)x[k];
            s.ab += (double)x[k] * (double)y[k];
            s.bb += (double)y[k] * (double)y[k];
            s.zeros += x[k] == 0;
        }
    }
    free(x);
    free(y);
    return s;
}

/* The next matrix of a block, from *i on; false at the end. `index`: layer x projection. */
static bool next_matrix(const Model *model, int *i, Tensor *gradient, int64_t *index)
{
    const ParamTable *table = &model->table;
    while (*i < table->count && table->param[*i].kind > PARAM_DOWN) ++*i;
    if (*i == table->count) return false;
    const Param *p = &table->param[*i];
    *gradient = zero_slice(&model->zero, (*i)++).grad;
    *index = p->layer * PROJ_COUNT + (int)(p->kind - PARAM_QKV);
    return true;
}

static void count_zero_gradients(Telemetry *t)
{
    Tensor gradient;
    int64_t index;
    for (int i = 0; next_matrix(t->model, &i, &gradient, &index);) {
        int64_t elements = gradient.rows * gradient.cols;
        Sums s = read_sums(t->model->ops, gradient.data, gradient.data, elements);
        t->zero_share[index] = (double)s.zeros / (double)elements;
    }
}

/* ---- the shadow step ---- */

/* One micro-batch's gradients in sums that were zero; its loss. */
static double shadow_pass(Model *model, const Step *step, const Batch *batch)
{
    double loss;
    gpt_gradients(&model->gpt, step, batch, 1);
    model->ops->copy_out(&loss, batch->loss, sizeof loss);
    return loss / (double)(model->spec.B * model->spec.config.T);
}

static void zero_sums(Model *model)
{
    for (int i = 0; i < model->table.count; i++) model->ops->zero(model->zero.shard[i].sum);
}

/* Leaves sums, formats and views as they were; what it overwrites (losses, activations) the step makes anew. */
static void shadow_step(Telemetry *t, const Step *step, const Batch *batch)
{
    Model *model = t->model;
    Tensor gradient;
    int64_t index;
    float *kept = model->shadow.data;

    t->loss_gap = shadow_pass(model, step, batch);
    for (int i = 0; next_matrix(model, &i, &gradient, &index); kept += gradient.rows * gradient.cols) {
        Tensor keep = gradient;
        keep.data = kept;
        model->ops->copy(keep, gradient);
    }
    zero_sums(model);
    gpt_enter_shadow(&model->gpt);
    t->loss_gap -= shadow_pass(model, step, batch);
    kept = model->shadow.data;
    for (int i = 0; next_matrix(model, &i, &gradient, &index); kept += gradient.rows * gradient.cols) {
        Sums s = read_sums(model->ops, kept, gradient.data, gradient.rows * gradient.cols);
        t->gap[index] = (GradientGap){s.ab / sqrt(s.aa) / sqrt(s.bb), s.bb > 0 ? sqrt(s.aa / s.bb) : (double)NAN};
    }
    zero_sums(model);
    gpt_enter_step(&model->gpt, step->step);
}

/* ---- around a step's gradients ---- */

static void check_products(const Model *model, const ProductCounts *before)
{
    const ModelSpec *s = &model->spec;
    const Activations *acts = &model->gpt.acts;
    ProductCounts ran, wanted = recipe_products(&model->recipe, &s->config, model->gpt.phase, s->recompute,
                                                s->micro_steps, ceil_div(acts->N, acts->chunk));
    model->ops->product_counts(&ran);
    for (int p = 0; p < PRODUCT_COUNT; p++)
        for (int f = 0; f < FORMAT_COUNT; f++)
            if (ran.count[p][f] - before->count[p][f] != wanted.count[p][f])
                die("%s in %s: %lld products ran in this step, the recipe asks for %lld; this is a bug",
                    product_name(p), format_name((Format)f), (long long)(ran.count[p][f] - before->count[p][f]),
                    (long long)wanted.count[p][f]);
}

void telemetry_gradients(Telemetry *t, const Step *step, const Batch *micro_batch)
{
    Model *model = t->model;
    const Ops *ops = model->ops;
    int64_t number = (int64_t)step->step + 1;
    ProductCounts before;

    t->number = number;
    t->measured = t->every && number % t->every == 0;
    t->compared = t->shadow_every && number % t->shadow_every == 0;
    if (t->compared) shadow_step(t, step, micro_batch);
    if (t->measured) {
        memset(t->stats, 0, (size_t)((model->spec.config.L + 1) * OPERAND_ROLES) * sizeof *t->stats);
        ops->measure(t->stats);
        gpt_enter_step(&model->gpt, step->step); /* the weights' views once more: the same bits, measured */
    }
    ops->product_counts(&before);
    gpt_gradients(&model->gpt, step, micro_batch, model->spec.micro_steps);
    if (t->measured) {
        ops->measure(NULL);
        count_zero_gradients(t);
    }
    if (model->gpt.phase != t->checked_phase) check_products(model, &before);
    t->checked_phase = model->gpt.phase;
}

/* ---- the log ---- */

enum { ERROR, ZEROED, CLIPPED, ZERO_BLOCKS, MEASURES };
static const char *const MEASURE_NAMES[MEASURES] = {"error", "zeroed", "clipped", "zero_blocks"};

static double measure(const QuantStats *q, int kind)
{
    switch (kind) {
    case ERROR:
        return q->signal2 > 0 ? sqrt(q->error2 / q->signal2) : 0;
    case ZEROED:
        return (double)q->zeroed / (double)q->elements;
    case CLIPPED:
        return (double)q->clipped / (double)q->elements;
    default:
        return (double)q->zero_blocks / (double)q->blocks;
    }
}

static const char *role_name(char name[24], int role)
{
    static const char *const COPIES[OPERAND_COPIES] = {"x_row", "x_col", "dy_row", "dy_col", "w_row", "w_col"};
    snprintf(name, 24, "%s.%s", projection_name(role / OPERAND_COPIES), COPIES[role % OPERAND_COPIES]);
    return name;
}

static const QuantStats *stats_of(const Telemetry *t, int64_t l, int role)
{
    return &t->stats[l * OPERAND_ROLES + role];
}

static bool role_used(const Telemetry *t, int role)
{
    bool used = false;
    for (int64_t l = 0; l < t->model->spec.config.L; l++) used |= stats_of(t, l, role)->elements > 0;
    return used;
}

static void log_role(const Telemetry *t, Json *operands, int role)
{
    char name[24];
    Json *object = json_add_object(operands, role_name(name, role)), *layer = json_add_array(object, "layer");
    Json *array[MEASURES];
    for (int k = 0; k < MEASURES; k++) array[k] = json_add_array(object, MEASURE_NAMES[k]);
    for (int64_t l = 0; l < t->model->spec.config.L; l++) {
        const QuantStats *q = stats_of(t, l, role);
        if (!q->elements) continue;
        json_append_int(layer, l);
        for (int k = 0; k < MEASURES; k++) json_append_float(array[k], measure(q, k));
    }
}

/* {"qkv":[one value a layer], ...}; `stride` doubles from one value to the next. */
static void log_matrices(const Telemetry *t, Json *parent, const char *key, const double *values, int stride)
{
    Json *object = json_add_object(parent, key);
    for (int j = 0; j < PROJ_COUNT; j++) {
        Json *array = json_add_array(object, projection_name(j));
        for (int64_t l = 0; l < t->model->spec.config.L; l++)
            json_append_float(array, values[(l * PROJ_COUNT + j) * stride]);
    }
}

void telemetry_log(const Telemetry *t, Json *line)
{
    enum { GAP_DOUBLES = sizeof(GradientGap) / sizeof(double) };
    if (t->measured) {
        Json *object = json_add_object(line, "telemetry"), *operands = json_add_object(object, "operands");
        for (int role = 0; role < OPERAND_ROLES; role++)
            if (role_used(t, role)) log_role(t, operands, role);
        log_matrices(t, object, "zero_gradients", t->zero_share, 1);
    }
    if (t->compared) {
        Json *object = json_add_object(line, "shadow");
        json_add_float(object, "loss_gap", t->loss_gap);
        log_matrices(t, object, "cosine", &t->gap->cosine, GAP_DOUBLES);
        log_matrices(t, object, "norm_ratio", &t->gap->norm_ratio, GAP_DOUBLES);
    }
}

/* ---- the console ---- */

static void print_role(const Telemetry *t, int role)
{
    char name[24];
    double sum[MEASURES] = {0}, max = 0;
    int64_t layers = 0;
    for (int64_t l = 0; l < t->model->spec.config.L; l++) {
        const QuantStats *q = stats_of(t, l, role);
        if (!q->elements) continue;
        layers++;
        for (int k = 0; k < MEASURES; k++) sum[k] += measure(q, k);
        max = fmax(max, measure(q, ERROR));
    }
    for (int k = 0; k < MEASURES; k++) sum[k] *= 100.0 / (double)layers;
    printf("  %-12s %6.2f%% %6.2f%% %6.2f%% %6.2f%% %8.2f%%\n", role_name(name, role), sum[ERROR], 100 * max,
           sum[ZEROED], sum[CLIPPED], sum[ZERO_BLOCKS]);
}

void telemetry_print(const Telemetry *t, int64_t step)
{
    int64_t L = t->model->spec.config.L;
    if (!t->table) return;
    if (t->measured) {
        printf("quantization of step %lld, over blocks\n  %-12s   error     max  zeroed clipped zero blocks\n",
               (long long)step, "operand");
        for (int role = 0; role < OPERAND_ROLES; role++)
            if (role_used(t, role)) print_role(t, role);
    }
    if (!t->compared) return;
    printf("shadow of step %lld: loss %+.6f against %s\n  %-12s  cosine     min  norm ratio\n", (long long)step,
           t->loss_gap, t->model->recipe.act == DTYPE_FP32 ? "FP32" : "BF16", "gradient");
    for (int j = 0; j < PROJ_COUNT; j++) {
        GradientGap sum = {0};
        double min = INFINITY;
        int64_t count = 0; /* gradients that are not zero */
        for (int64_t l = 0; l < L; l++) {
            const GradientGap *g = &t->gap[l * PROJ_COUNT + j];
            if (isnan(g->cosine)) continue;
            count++;
            sum.cosine += g->cosine;
            sum.norm_ratio += g->norm_ratio;
            min = fmin(min, g->cosine);
        }
        if (count)
            printf("  %-12s %7.4f %7.4f %11.4f\n", projection_name(j), sum.cosine / (double)count, min,
                   sum.norm_ratio / (double)count);
        else
            printf("  %-12s       -       -           -\n", projection_name(j));
    }
}
