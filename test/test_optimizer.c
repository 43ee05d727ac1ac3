/* The optimizer on the CPU backend, through a small model's parameter table: AdamW against a double-precision loop,
 * decay and clipping, what a step that is not finite leaves alone, stochastic rounding that depends on the place only,
 * and state_hash.
 */
#include <math.h>

#include "cpu/backend.h"
#include "model.h"
#include "numerics.h"
#include "test.h"

typedef struct {
    Model model;
    Step step;
} Setup;

static void setup_open(Setup *s, const char *isa, Precision precision, Master master)
{
    const Ops *ops;
    Error error;
    ModelSpec spec = {.config = {.arch = ARCH_GPT2,
                                 .L = 2,
                                 .C = 40,
                                 .NH = 2,
                                 .F = 72,
                                 .V = 61,
                                 .T = 24,
                                 .tied = true,
                                 .init_std = 0.1f,
                                 .embedding_init_std = 0.1f},
                      .precision = precision,
                      .master = master,
                      .train = true,
                      .B = 1,
                      .micro_steps = 1};
    if (config_finish(&spec.config, &error) || cpu_open(&ops, isa, 2, &error) ||
        model_open(&s->model, &spec, ops, &error))
        die("%s", error.text);
    zero_init_params(&s->model.zero, 5);
    gpt_enter_phase(&s->model.gpt, 0);
    s->step = (Step){.seed = 11,
                     .lr = 0.01f,
                     .beta1 = 0.9f,
                     .beta2 = 0.95f,
                     .eps = 1e-8f,
                     .weight_decay = 0.1f,
                     .correction1 = 10,
                     .correction2 = 20};
    *s->model.optimizer.loss = 3.0 * 24;
}

/* Gradients that are a function of the place: about `scale`, both signs, a few zeros. */
static void fill_gradients(Setup *s, float scale)
{
    for (int i = 0; i < s->model.table.count; i++) {
        Tensor g = zero_slice(&s->model.zero, i).grad;
        for (int64_t k = 0; k < g.rows * g.cols; k++)
            ((float *)g.data)[k] = scale * (float)((k * 37 + i * 11) % 19 - 9) / 9;
    }
}

static StepResult step_once(Setup *s)
{
    s->model.ops->begin_step(&s->step);
    return optimizer_step(&s->model.optimizer, 24);
}

static float value(Tensor t, int64_t k)
{
    return t.dtype == DTYPE_BF16 ? bf16_to_f32(((uint16_t *)t.data)[k]) : ((float *)t.data)[k];
}

static void test_adamw(const char *isa, float clip)
{
    Setup s;
    char name[64];
    snprintf(name, sizeof name, "AdamW against double, %s, clip %g", isa, (double)clip);
    test_case(name);
    setup_open(&s, isa, PRECISION_FP32, MASTER_FP32);
    s.step.grad_clip = clip;
    for (int round = 0; round < 3; round++) {
        double squares = 0;
        size_t bytes = s.model.arena.peak;
        char *before = xmalloc(bytes);
        fill_gradients(&s, 0.5f + (float)round);
        memcpy(before, s.model.arena.base, bytes); /* the whole memory, to read old values from */
        for (int i = 0; i < s.model.table.count; i++) {
            Tensor g = zero_slice(&s.model.zero, i).grad;
            for (int64_t k = 0; k < g.rows * g.cols; k++) squares += (double)value(g, k) * (double)value(g, k);
        }
        StepResult r = step_once(&s);
        double norm = sqrt(squares), factor = clip > 0 && norm > (double)clip ? (double)clip / norm : 1;
        CHECK(fabs(r.grad_norm / norm - 1) < 1e-12, "norm %g, expected %g", r.grad_norm, norm);
        CHECK(r.loss == 3.0 && r.finite, "loss %g", r.loss);
        for (int i = 0; i < s.model.table.count; i++) {
            ParamSlice p = zero_slice(&s.model.zero, i);
            ptrdiff_t back = before - s.model.arena.base;
            for (int64_t k = 0; k < p.grad.rows * p.grad.cols; k++) {
                const float *w0 = (float *)((char *)p.master.data + back), *g0 = (float *)((char *)p.grad.data + back);
                const float *m0 = (float *)((char *)p.m.data + back), *v0 = (float *)((char *)p.v.data + back);
                double g = (double)g0[k] * factor, w = (double)w0[k];
                double m = 0.9 * (double)m0[k] + 0.1 * g, v = 0.95 * (double)v0[k] + 0.05 * g * g;
                double decay = s.model.table.param[i].rows > 1 ? 0.1 : 0;
                double expected = w - 0.01 * (m * 10 / (sqrt(v * 20) + 1e-8) + decay * w);
                CHECK(fabs((double)value(p.master, k) - expected) < 1e-6, "%s[%ld]: %.9g, expected %.9g",
                      s.model.table.param[i].name, (long)k, (double)value(p.master, k), expected);
                CHECK(value(p.grad, k) == 0, "gradient left at %g", (double)value(p.grad, k));
            }
        }
        free(before);
    }
    model_close(&s.model);
}

/* One bad gradient or loss: every byte of masters, m and v stays, and the report names the parameter. */
static void test_not_finite(Precision precision, float bad, bool in_loss)
{
    Setup s;
    char name[64];
    snprintf(name, sizeof name, "%s: a %s of %g changes nothing", precision_name(precision),
             in_loss ? "loss" : "gradient", (double)bad);
    test_case(name);
    setup_open(&s, "auto", precision, MASTER_DEFAULT);
    fill_gradients(&s, 1);
    step_once(&s);
    uint64_t before = zero_state_hash(&s.model.zero);
    fill_gradients(&s, 1);
    if (in_loss)
        *s.model.optimizer.loss = (double)bad;
    else
        ((float *)zero_slice(&s.model.zero, 3).grad.data)[17] = bad;
    StepResult r = step_once(&s);
    CHECK(!r.finite, "taken as finite: loss %g, norm %g", r.loss, r.grad_norm);
    CHECK(zero_state_hash(&s.model.zero) == before, "the state changed");
    for (int i = 0; i < s.model.table.count; i++) {
        GradientReport g = optimizer_gradient(&s.model.optimizer, i);
        CHECK(g.finite == (in_loss || i != 3), "%s: finite %d", s.model.table.param[i].name, g.finite);
    }
    fill_gradients(&s, 1);
    *s.model.optimizer.loss = 24;
    CHECK(step_once(&s).finite && zero_state_hash(&s.model.zero) != before, "a good step after it must work");
    model_close(&s.model);
}

/* The update of rows 16.. alone, with row0, gives the rows of the whole update. */
static void test_rounding_by_place(void)
{
    Setup a, b;
    test_case("stochastic rounding depends on the place in the whole parameter, not on the slice");
    setup_open(&a, "auto", PRECISION_BF16, MASTER_BF16);
    fill_gradients(&a, 1);
    step_once(&a);
    int64_t bytes = 0;
    uint16_t *whole[2] = {0};
    for (int i = 0; i < 2; i++) {
        Tensor t = zero_slice(&a.model.zero, i).master;
        bytes = (int64_t)tensor_bytes(t);
        whole[i] = xmalloc((size_t)bytes);
        memcpy(whole[i], t.data, (size_t)bytes);
    }
    model_close(&a.model);

    setup_open(&b, "auto", PRECISION_BF16, MASTER_BF16);
    fill_gradients(&b, 1);
    b.model.ops->begin_step(&b.step);
    StepResult result = {.clip = 1, .finite = 1};
    for (int i = 0; i < 2; i++) {
        ParamSlice p = zero_slice(&b.model.zero, i);
        for (int64_t row = 0; row < p.grad.rows; row += 16) {
            ParamSlice piece = p;
            int64_t rows = min_i64(16, p.grad.rows - row);
            piece.row0 = row;
            piece.master = tensor_rows(p.master, row, rows);
            piece.grad = tensor_rows(p.grad, row, rows);
            piece.m = tensor_rows(p.m, row, rows);
            piece.v = tensor_rows(p.v, row, rows);
            b.model.ops->adamw(&piece, &result);
        }
        CHECK(!memcmp(whole[i], p.master.data, tensor_bytes(p.master)), "%s differs", b.model.table.param[i].name);
        free(whole[i]);
    }
    model_close(&b.model);
}

/* Many steps with a tiny lr: BF16 masters follow FP32 ones on average, and two parameters draw different bits. */
static void test_rounding_unbiased(void)
{
    Setup s;
    enum { STEPS = 400 };
    test_case("BF16 masters move as FP32 ones do, on average");
    setup_open(&s, "auto", PRECISION_BF16, MASTER_BF16);
    ParamSlice p = zero_slice(&s.model.zero, 0);
    int64_t n = p.master.rows * p.master.cols;
    for (int64_t k = 0; k < n; k++) ((uint16_t *)p.master.data)[k] = bf16_from_f32(1.0f);
    s.step.lr = 0x1p-7f / 100, s.step.weight_decay = 0, s.step.grad_clip = 0; /* about 1/100 ulp a step */
    for (uint32_t t = 0; t < STEPS; t++) {
        for (int64_t k = 0; k < n; k++) ((float *)p.grad.data)[k] = -1.0f;
        s.step.step = t;
        s.step.correction1 = (float)(1 / (1 - pow(0.9, t + 1.0)));
        s.step.correction2 = (float)(1 / (1 - pow((double)0.95f, t + 1.0)));
        StepResult result = {.clip = 1, .finite = 1};
        s.model.ops->begin_step(&s.step);
        s.model.ops->adamw(&p, &result);
    }
    double sum = 0;
    for (int64_t k = 0; k < n; k++) sum += ((double)value(p.master, k) - 1) / 0x1p-7;
    double mean = sum / (double)n, error = sqrt(STEPS / 100.0 / (double)n);
    CHECK(fabs(mean - STEPS / 100.0) < 5 * error + 0.01, "moved %g ulp on average, expected %g", mean, STEPS / 100.0);
    model_close(&s.model);
}

static void test_state_hash(void)
{
    Setup s;
    test_case("state_hash sees every element of masters, m and v, and no padding row");
    setup_open(&s, "auto", PRECISION_BF16, MASTER_BF16);
    uint64_t whole = zero_state_hash(&s.model.zero);
    for (int i = 0; i < s.model.table.count; i++) {
        ParamSlice p = zero_slice(&s.model.zero, i);
        Tensor tensor[3] = {p.master, p.m, p.v};
        for (int k = 0; k < 3; k++)
            for (int64_t at = 0; at < (int64_t)tensor_bytes(tensor[k]);
                 at += 1 + (int64_t)tensor_bytes(tensor[k]) / 7) {
                ((char *)tensor[k].data)[at] ^= 1;
                CHECK(zero_state_hash(&s.model.zero) != whole, "%s: byte %ld of state %d does not enter",
                      s.model.table.param[i].name, (long)at, k);
                ((char *)tensor[k].data)[at] ^= 1;
            }
        if (s.model.table.param[i].kind != PARAM_WTE) continue;
        Tensor padded = s.model.zero.shard[i].master;
        CHECK(padded.rows > p.master.rows, "the vocabulary is not padded");
        ((uint16_t *)padded.data)[p.master.rows * padded.cols] = 1;
        CHECK(zero_state_hash(&s.model.zero) == whole, "a padding row enters");
        ((uint16_t *)padded.data)[p.master.rows * padded.cols] = 0;
    }
    CHECK(zero_state_hash(&s.model.zero) == whole, "the hash must repeat");
    ParamSlice a = zero_slice(&s.model.zero, 0); /* two equal pieces exchanged: place enters */
    uint16_t *w = a.master.data, row[40];
    memcpy(row, w, sizeof row);
    memcpy(w, w + 16 * 40, sizeof row);
    memcpy(w + 16 * 40, row, sizeof row);
    CHECK(zero_state_hash(&s.model.zero) != whole, "rows of two pieces exchanged go unseen");
    model_close(&s.model);
}

int main(void)
{
    static const char *const ISAS[] = {"portable", "avx2", "avx512"};
    const Ops *ops;
    for (int i = 0; i < 3; i++)
        if (cpu_open(&ops, ISAS[i], 1, NULL) == 0) {
            test_adamw(ISAS[i], 0);
            test_adamw(ISAS[i], 0.7f);
        }
    for (int precision = 0; precision < 2; precision++) {
        test_not_finite((Precision)precision, NAN, false);
        test_not_finite((Precision)precision, INFINITY, false);
        test_not_finite((Precision)precision, NAN, true);
    }
    test_rounding_by_place();
    test_rounding_unbiased();
    test_state_hash();
    return test_done();
}
