/* The optimizer through the operations of the CPU: AdamW against plain FP64, clipping, decay, what happens to a step
 * that is not finite, stochastic rounding of BF16 masters, and what state_hash sees.
 */
#include <math.h>

#include "cpu/backend.h"
#include "model.h"
#include "numerics.h"
#include "philox.h"
#include "test.h"

static uint64_t random_state = 88172645463325252u;
static double uniform(void) /* -1 .. 1 */
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (double)(random_state >> 11) * 0x1p-52 - 1;
}

static const Ops *ops;

static Step step_of(uint32_t step)
{
    return (Step){.seed = 5,
                  .step = step,
                  .lr = 1e-2f,
                  .beta1 = 0.9f,
                  .beta2 = 0.99f,
                  .eps = 1e-6f,
                  .weight_decay = 0.1f,
                  .correction1 = (float)(1 / (1 - pow(0.9, step + 1.0))),
                  .correction2 = (float)(1 / (1 - pow(0.99, step + 1.0)))};
}

/* ---- one parameter ---- */

static Tensor new_tensor(DType dtype, int64_t rows, int64_t cols)
{
    Tensor t = {xcalloc((size_t)(rows * cols), dtype_bytes(dtype)), dtype, rows, cols, cols};
    return t;
}

static ParamSlice slice_new(DType master, int64_t rows, int64_t cols)
{
    return (ParamSlice){.master = new_tensor(master, rows, cols),
                        .grad = new_tensor(DTYPE_FP32, rows, cols),
                        .m = new_tensor(DTYPE_FP32, rows, cols),
                        .v = new_tensor(DTYPE_FP32, rows, cols),
                        .layer = 3,
                        .role = ROLE_MASTER,
                        .decay = true};
}

static void slice_free(ParamSlice *p)
{
    free(p->master.data);
    free(p->grad.data);
    free(p->m.data);
    free(p->v.data);
}

static double value(Tensor t, int64_t i)
{
    return t.dtype == DTYPE_BF16 ? (double)bf16_to_f32(((uint16_t *)t.data)[i]) : (double)((float *)t.data)[i];
}

static void set(Tensor t, int64_t i, double x)
{
    if (t.dtype == DTYPE_BF16)
        ((uint16_t *)t.data)[i] = bf16_from_f32((float)x);
    else
        ((float *)t.data)[i] = (float)x;
}

static void test_adamw(bool decay, float clip)
{
    enum { ROWS = 5, COLS = 37, N = ROWS * COLS, STEPS = 20 };
    ParamSlice p = slice_new(DTYPE_FP32, ROWS, COLS);
    double w[N], m[N] = {0}, v[N] = {0}, beta1 = (double)0.9f, beta2 = (double)0.99f;
    p.decay = decay;
    for (int i = 0; i < N; i++) set(p.master, i, w[i] = (double)(float)uniform());
    for (uint32_t s = 0; s < STEPS; s++) {
        Step step = step_of(s);
        StepResult result = {.clip = clip, .finite = 1};
        for (int i = 0; i < N; i++) {
            double g = (double)(float)(uniform() * (i % 3 ? 1 : 1e-5));
            set(p.grad, i, g);
            g *= (double)clip;
            m[i] = beta1 * m[i] + (1 - beta1) * g;
            v[i] = beta2 * v[i] + (1 - beta2) * g * g;
            double update = m[i] / (1 - pow(0.9, s + 1.0)) / (sqrt(v[i] / (1 - pow(0.99, s + 1.0))) + 1e-6);
            w[i] -= 0.01 * (update + (decay ? 0.1 * w[i] : 0));
        }
        ops->begin_step(&step);
        ops->adamw(&p, &result);
    }
    for (int i = 0; i < N; i++) {
        CHECK(fabs(value(p.master, i) - w[i]) < 2e-6, "weight %d is %.9g, expected %.9g", i, value(p.master, i), w[i]);
        CHECK(fabs(value(p.m, i) - m[i]) < 1e-7, "m %d is %.9g, not %.9g", i, value(p.m, i), m[i]);
        CHECK(fabs(value(p.v, i) - v[i]) < 1e-6 * v[i], "v %d is %.9g, expected %.9g", i, value(p.v, i), v[i]);
        CHECK(value(p.grad, i) == 0, "gradient %d is left at %g", i, value(p.grad, i));
    }
    slice_free(&p);
}

/* BF16 masters: the FP32 result goes to one of its two neighbours, by bits that depend on the place alone. */
static void test_places(void)
{
    enum { ROWS = 64, COLS = 45, N = ROWS * COLS };
    ParamSlice bf16 = slice_new(DTYPE_BF16, ROWS, COLS), parts = slice_new(DTYPE_BF16, ROWS, COLS);
    ParamSlice fp32 = slice_new(DTYPE_FP32, ROWS, COLS);
    StepResult result = {.clip = 1, .finite = 1};
    Step step = step_of(7);
    int64_t moved = 0;
    test_case("BF16 masters: the same bits when rows are updated in slices, each bit from its place");
    for (int i = 0; i < N; i++) {
        double g = uniform();
        set(bf16.master, i, uniform());
        set(fp32.master, i, value(bf16.master, i));
        set(parts.master, i, value(bf16.master, i));
        set(bf16.grad, i, g), set(fp32.grad, i, g), set(parts.grad, i, g);
    }
    ops->begin_step(&step);
    ops->adamw(&bf16, &result);
    ops->adamw(&fp32, &result);
    for (int64_t row = 0; row < ROWS; row += 32) {
        ParamSlice half = parts;
        half.master = tensor_rows(parts.master, row, 32);
        half.grad = tensor_rows(parts.grad, row, 32);
        half.m = tensor_rows(parts.m, row, 32);
        half.v = tensor_rows(parts.v, row, 32);
        half.row0 = row;
        ops->adamw(&half, &result);
    }
    CHECK(!memcmp(bf16.master.data, parts.master.data, tensor_bytes(bf16.master)), "two slices differ from the whole");
    for (int64_t i = 0; i < N; i++) { /* element c takes half c % 2 of output word c % 8 / 2 of call c % 16 / 8 */
        int64_t r = i / COLS, c = i % COLS;
        Philox draw = philox_draw(5, (uint32_t)r, (uint32_t)c / 16, 7, 3, ROLE_MASTER, (uint32_t)c % 16 / 8);
        uint32_t random = draw.word[c % 8 / 2] >> 16 * (c % 2) & 0xffff;
        float exact = ((float *)fp32.master.data)[i];
        uint16_t got = ((uint16_t *)bf16.master.data)[i];
        CHECK(got == bf16_from_f32_stochastic(exact, random), "[%d,%d] %a became %04x", (int)r, (int)c, (double)exact,
              got);
        moved += got != bf16_from_f32(exact);
    }
    CHECK(moved > N / 5 && moved < N / 3, "%d of %d are not the nearest: should be a quarter", (int)moved, N);
    slice_free(&bf16), slice_free(&parts), slice_free(&fp32);
}

/* A constant small gradient: the BF16 master follows the FP32 one on average, where nearest would stand still. */
static void test_unbiased(void)
{
    enum { ROWS = 40, COLS = 50, N = ROWS * COLS, STEPS = 300 };
    ParamSlice bf16 = slice_new(DTYPE_BF16, ROWS, COLS);
    double sum = 0, squares = 0;
    test_case("BF16 masters: many updates of a fraction of an ulp are right on average");
    bf16.decay = false;
    for (int i = 0; i < N; i++) set(bf16.master, i, 1);
    for (uint32_t s = 0; s < STEPS; s++) {
        Step step = step_of(s);
        step.lr = 0x1p-8f / 50; /* the update is 1: 1/50 of the ulp below 1 */
        for (int i = 0; i < N; i++) set(bf16.grad, i, 1);
        ops->begin_step(&step);
        ops->adamw(&bf16, &(StepResult){.clip = 1, .finite = 1});
    }
    for (int i = 0; i < N; i++) {
        double moved = (1 - value(bf16.master, i)) * 256;
        sum += moved / N;
        squares += moved * moved / N;
    }
    double expected = STEPS / 50.0, variance = STEPS * 0.02 * 0.98;
    CHECK(fabs(sum - expected) < 5 * sqrt(variance / N), "moved %.4f ulp on average, expected %.4f", sum, expected);
    CHECK(fabs(squares - sum * sum - variance) < 5 * variance * sqrt(2.0 / N), "variance %.4f, expected %.4f",
          squares - sum * sum, variance);
    printf("measured %d updates of 1/50 ulp through AdamW: %.3f ulp (expected %.0f)\n", STEPS, sum, expected);
    slice_free(&bf16);
}

/* ---- norm, clipping, finite ---- */

static void test_finish(void)
{
    double piece[] = {9, 16, 0, 11}, loss[] = {10, 20, 30};
    StepResult r;
    Step step = step_of(0);
    test_case("finish_step: mean loss, norm, clip, finite");
    for (int i = 0; i < 4; i++) {
        step.grad_clip = (float[]){0, 3, 6, 100}[i];
        ops->begin_step(&step);
        ops->finish_step(&r, piece, 4, loss, 3, 120);
        CHECK(r.loss == 0.5 && r.grad_norm == 6 && r.finite == 1, "loss %g, norm %g", r.loss, r.grad_norm);
        CHECK(r.clip == (i == 1 ? 0.5f : 1), "clip %g of limit %g", (double)r.clip, (double)step.grad_clip);
    }
    static const double BAD[] = {(double)NAN, (double)INFINITY, (double)-INFINITY};
    for (int i = 0; i < 3; i++) {
        double bad_piece[] = {9, BAD[i]}, bad_loss[] = {10, BAD[i]};
        ops->finish_step(&r, bad_piece, 2, loss, 3, 120);
        CHECK(!r.finite, "norm of %g is finite", BAD[i]);
        ops->finish_step(&r, piece, 4, bad_loss, 2, 120);
        CHECK(!r.finite, "loss of %g is finite", BAD[i]);
    }
}

/* ---- a whole model: state, hash, report ---- */

static void model_of(Model *model, Precision precision, const Ops *with)
{
    Error error;
    ModelSpec spec = {.recipe = recipe_defaults(precision, MASTER_DEFAULT), .train = true, .B = 2, .micro_steps = 1};
    spec.config = (GPTConfig){.arch = ARCH_LLAMA, .L = 2, .C = 16, .NH = 2, .F = 24, .V = 140, .T = 16};
    spec.config.rope_theta = 1e4;
    spec.config.init_std = spec.config.embedding_init_std = 0.1f;
    if (config_finish(&spec.config, &error) || model_open(model, &spec, with, &error)) die("%s", error.text);
    zero_init_params(&model->zero, 9);
    model->gpt.hooks.prepare_weights(&model->zero);
}

static void fill_gradients(Model *model)
{
    Step step = step_of(0);
    for (int i = 0; i < model->table.count; i++) {
        ParamSlice p = zero_slice(&model->zero, i);
        for (int64_t k = 0; k < p.grad.rows * p.grad.cols; k++) set(p.grad, k, uniform() * (i + 1));
    }
    *model->optimizer.loss[model->optimizer.turn] = 64;
    ops->begin_step(&step);
}

static char *state_copy(const Model *model, size_t *bytes)
{
    char *copy = NULL;
    *bytes = 0;
    for (int i = 0; i < model->table.count; i++) {
        const Shard *s = &model->zero.shard[i];
        const Tensor t[] = {s->master, s->m, s->v, s->prepared};
        for (int k = 0; k < 4; k++) {
            copy = xrealloc(copy, *bytes + tensor_bytes(t[k]));
            memcpy(copy + *bytes, t[k].data, tensor_bytes(t[k]));
            *bytes += tensor_bytes(t[k]);
        }
    }
    return copy;
}

static void test_step(Precision precision)
{
    Model model;
    char name[128];
    double squares = 0;
    snprintf(name, sizeof name, "%s: a step changes every matrix and vector, decay only of matrices, norm of all",
             precision_name(precision));
    test_case(name);
    model_of(&model, precision, ops);
    fill_gradients(&model);
    double *norm = xcalloc((size_t)model.table.count, sizeof *norm);
    for (int i = 0; i < model.table.count; i++) {
        ParamSlice p = zero_slice(&model.zero, i);
        for (int64_t k = 0; k < p.grad.rows * p.grad.cols; k++) norm[i] += value(p.grad, k) * value(p.grad, k);
        squares += norm[i];
        CHECK(p.decay == (p.grad.rows > 1), "%s: decay", model.table.param[i].name);
        CHECK(p.grad.rows == model.table.param[i].rows, "%s: padding is updated", model.table.param[i].name);
    }
    uint64_t before = zero_state_hash(&model.zero);
    optimizer_step(&model.optimizer, 32);
    StepResult r = optimizer_result(&model.optimizer);
    CHECK(r.finite && r.loss == 2 && fabs(r.grad_norm / sqrt(squares) - 1) < 1e-12, "norm %.17g, expected %.17g",
          r.grad_norm, sqrt(squares));
    CHECK(zero_state_hash(&model.zero) != before, "the hash is the same after a step");
    for (int i = 0; i < model.table.count; i++) {
        GradientReport report = optimizer_gradient(&model.optimizer, i, false);
        ParamSlice p = zero_slice(&model.zero, i);
        CHECK(report.finite && fabs(report.norm / sqrt(norm[i]) - 1) < 1e-12, "%s: norm %g", model.table.param[i].name,
              report.norm);
        for (int64_t k = 0; k < p.grad.rows * p.grad.cols; k++) {
            CHECK(value(p.grad, k) == 0, "%s: gradient left at %g", model.table.param[i].name, value(p.grad, k));
            CHECK(value(p.m, k) != 0 && value(p.v, k) > 0, "%s: moments", model.table.param[i].name);
        }
    }
    free(norm);
    model_close(&model);
}

/* One bad element in one gradient, or a bad loss; `ahead`: another step follows before the report, as on a GPU. */
static void test_not_finite(Precision precision, float bad, bool ahead)
{
    Model model;
    Ops lagging = *ops;
    size_t bytes;
    char name[128];
    snprintf(name, sizeof name, "%s: a step with %g changes nothing and says where%s", precision_name(precision),
             (double)bad, ahead ? ", one step later too" : "");
    test_case(name);
    lagging.result_lag = ahead;
    model_of(&model, precision, &lagging);
    fill_gradients(&model);
    optimizer_step(&model.optimizer, 32); /* moments that are not zero */
    optimizer_result(&model.optimizer);
    for (int where = -1; where < model.table.count; where++) {
        fill_gradients(&model);
        if (where < 0)
            *model.optimizer.loss[model.optimizer.turn] = (double)bad;
        else
            set(zero_slice(&model.zero, where).grad, 3, (double)bad);
        char *before = state_copy(&model, &bytes);
        uint64_t hash = zero_state_hash(&model.zero);
        optimizer_step(&model.optimizer, 32);
        StepResult r = optimizer_result(&model.optimizer);
        char *after = state_copy(&model, &bytes);
        CHECK(!r.finite, "parameter %d: finite", where);
        CHECK(!memcmp(before, after, bytes) && hash == zero_state_hash(&model.zero), "parameter %d: changed", where);
        if (ahead) {
            fill_gradients(&model);
            optimizer_step(&model.optimizer, 32);
        }
        CHECK(optimizer_bad_loss(&model.optimizer, ahead) == (where < 0 ? 0 : -1), "the loss of %d", where);
        for (int i = 0; i < model.table.count; i++)
            CHECK(optimizer_gradient(&model.optimizer, i, ahead).finite == (i != where), "%s reported for %d",
                  model.table.param[i].name, where);
        free(before);
        free(after);
    }
    model_close(&model);
}

static void flip(Tensor t, int64_t i) { ((unsigned char *)t.data)[i * (int64_t)dtype_bytes(t.dtype)] ^= 1; }

static void test_state_hash(Precision precision)
{
    Model model;
    char name[128];
    snprintf(name, sizeof name, "%s: state_hash sees every element of masters, m and v, and no padding",
             precision_name(precision));
    test_case(name);
    model_of(&model, precision, ops);
    uint64_t hash = zero_state_hash(&model.zero);
    CHECK(hash == zero_state_hash(&model.zero), "not the same twice");
    for (int i = 0; i < model.table.count; i++) {
        const Param *p = &model.table.param[i];
        const Shard *s = &model.zero.shard[i];
        const Tensor t[] = {s->master, s->m, s->v};
        int64_t stride = test_long() ? 1 : max_i64(1, p->rows_padded * p->cols / 40);
        for (int k = 0; k < 3; k++)
            for (int64_t e = 0; e < p->rows_padded * p->cols; e += stride) {
                flip(t[k], e);
                bool seen = zero_state_hash(&model.zero) != hash;
                flip(t[k], e);
                CHECK(seen == (e < p->rows * p->cols), "%s, tensor %d, element %d of %d", p->name, k, (int)e,
                      (int)(p->rows * p->cols));
            }
    }
    /* exchanged: two rows of one piece, two pieces, m with v */
    Tensor m = model.zero.shard[0].m, v = model.zero.shard[0].v;
    set(m, 0, 1), set(m, 16 * m.cols, 2);
    hash = zero_state_hash(&model.zero);
    set(m, 0, 2), set(m, 16 * m.cols, 1);
    CHECK(hash != zero_state_hash(&model.zero), "two pieces exchanged");
    set(m, 0, 0), set(m, 16 * m.cols, 0), set(v, 0, 1), set(v, 16 * v.cols, 2);
    CHECK(hash != zero_state_hash(&model.zero), "m and v exchanged");
    model_close(&model);
}

int main(void)
{
    Error error;
    if (cpu_open(&ops, "auto", 2, &error)) die("%s", error.text);
    for (int i = 0; i < 4; i++) {
        test_case((const char *[]){"AdamW against FP64", "AdamW with decay", "AdamW clipped",
                                   "AdamW with decay, clipped"}[i]);
        test_adamw(i & 1, i & 2 ? 0.25f : 1);
    }
    test_places();
    test_unbiased();
    test_finish();
    for (int precision = 0; precision < 2; precision++) {
        test_step((Precision)precision);
        test_not_finite((Precision)precision, NAN, false);
        test_not_finite((Precision)precision, NAN, true);
        test_not_finite((Precision)precision, INFINITY, false);
        test_not_finite((Precision)precision, INFINITY, true);
        test_state_hash((Precision)precision);
    }
    return test_done();
}
