/* The whole model against the independent NumPy float64 implementation of dev/reference: loss, logits, every gradient
 * and ten AdamW steps of the three architectures, in FP32 and BF16, on every instruction set and recompute level. Then
 * the other way round: one planted error for each backward op must turn the comparison red.
 *
 * Bounds: FP32 loss 1e-5 relative, gradients 1e-4 of the tensor's norm; BF16 has 8 bits, so loss 1e-2 and gradients
 * 6e-2 of the norm (measured worst values are printed).
 */
#include <math.h>

#include "cpu/backend.h"
#include "hf.h"
#include "model.h"
#include "numerics.h"
#include "test.h"

static const char *const FIXTURES[] = {"gpt2", "llama", "llama_tied", "qwen3", "gpt2_docmask"};
enum { FIXTURE_COUNT = 5 };

typedef struct {
    StFile file;
    ModelSpec spec;
    Step step;
    int64_t micro_batches, steps;
    const int32_t *tokens, *targets; /* [steps * micro_batches][B][T] */
} Fixture;

static double number(const Fixture *f, const char *key)
{
    const char *text = st_metadata(&f->file, key);
    if (!text) die("fixture without metadata %s", key);
    return strtod(text, NULL);
}

static const StTensor *tensor(const Fixture *f, const char *prefix, const char *name)
{
    char full[512];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    const StTensor *t = st_find(&f->file, full);
    if (!t) die("fixture without tensor %s", full);
    return t;
}

static void fixture_open(Fixture *f, const char *name)
{
    static const char *const ARCH[] = {"gpt2", "llama", "qwen3"};
    char path[128];
    Error error;
    *f = (Fixture){0};
    snprintf(path, sizeof path, "test/fixtures/%s.safetensors", name);
    if (st_open(&f->file, path, &error)) die("%s", error.text);

    GPTConfig *c = &f->spec.config;
    for (int i = 0; i < 3; i++)
        if (!strcmp(st_metadata(&f->file, "arch"), ARCH[i])) c->arch = (Arch)i;
    c->L = (int64_t)number(f, "layers");
    c->C = (int64_t)number(f, "hidden");
    c->NH = (int64_t)number(f, "heads");
    c->NKV = (int64_t)number(f, "kv_heads");
    c->HD = (int64_t)number(f, "head_dim");
    c->F = (int64_t)number(f, "ffn");
    c->V = (int64_t)number(f, "vocab");
    c->T = (int64_t)number(f, "seq_len");
    c->tied = number(f, "tie") != 0;
    c->norm_eps = (float)number(f, "norm_eps");
    c->rope_theta = number(f, "rope_theta");
    c->rope_factor = number(f, "rope_factor");
    c->rope_low_freq_factor = number(f, "rope_low_freq_factor");
    c->rope_high_freq_factor = number(f, "rope_high_freq_factor");
    c->rope_original_context = (int64_t)number(f, "rope_original_context");
    if (config_finish(c, &error)) die("%s: %s", name, error.text);

    f->micro_batches = (int64_t)number(f, "micro_batches");
    f->steps = (int64_t)number(f, "steps");
    f->spec.B = (int64_t)number(f, "batch");
    f->spec.micro_steps = f->micro_batches;
    f->spec.train = true;
    f->spec.document_mask = number(f, "document_mask") != 0;
    f->spec.eot_token = (int64_t)number(f, "eot_token");
    f->step = (Step){.seed = 1,
                     .lr = (float)number(f, "lr"),
                     .beta1 = (float)number(f, "beta1"),
                     .beta2 = (float)number(f, "beta2"),
                     .eps = (float)number(f, "eps"),
                     .weight_decay = (float)number(f, "weight_decay"),
                     .grad_clip = (float)number(f, "grad_clip")};
    f->tokens = tensor(f, "", "tokens")->data;
    f->targets = tensor(f, "", "targets")->data;
}

/* Masters from the fixture. BF16 ones are rounded to nearest on the way. */
static void load_parameters(Model *model, const Fixture *f)
{
    Error error;
    for (int i = 0; i < model->table.count; i++) {
        const Param *p = &model->table.param[i];
        HfTensor part[HF_PARTS];
        int parts = hf_tensors(&model->spec.config, p, part);
        Tensor wide = {xcalloc((size_t)(p->rows_padded * p->cols), 4), DTYPE_FP32, p->rows_padded, p->cols, p->cols};
        for (int k = 0; k < parts; k++)
            if (hf_read(tensor(f, "", part[k].name), &part[k], wide, model->ops, &error)) die("%s", error.text);
        model->ops->copy(model->zero.shard[i].master, wide);
        free(wide.data);
    }
    model->gpt.hooks.prepare_weights(&model->zero);
}

/* Distance of one parameter's tensor (gradient or weight) from the fixture's, over its norm. */
static double distance(const Model *model, const Fixture *f, const char *prefix, int param, Tensor ours)
{
    HfTensor part[HF_PARTS];
    int parts = hf_tensors(&model->spec.config, &model->table.param[param], part);
    double squares = 0, total = 0;
    for (int k = 0; k < parts; k++) {
        const StTensor *expected = tensor(f, prefix, part[k].name);
        for (int64_t r = 0; r < part[k].rows; r++)
            for (int64_t c = 0; c < part[k].cols; c++) {
                int64_t at = part[k].transposed ? c * part[k].rows + r : r * part[k].cols + c;
                int64_t mine = (part[k].row0 + r) * ours.ld + c;
                double x = ours.dtype == DTYPE_BF16 ? (double)bf16_to_f32(((uint16_t *)ours.data)[mine])
                                                    : (double)((float *)ours.data)[mine];
                float e;
                memcpy(&e, (const char *)expected->data + 4 * at, 4);
                squares += (x - (double)e) * (x - (double)e);
                total += (double)e * (double)e;
            }
    }
    return sqrt(squares) / (sqrt(total) + 1e-30);
}

static void open_model(Model *model, const Fixture *f, const char *isa, Precision precision, Recompute recompute)
{
    const Ops *ops;
    Error error;
    ModelSpec spec = f->spec;
    spec.recipe = recipe_defaults(precision, MASTER_DEFAULT);
    spec.recompute = recompute;
    if (cpu_open(&ops, isa, 2, &error) || model_open(model, &spec, ops, &error)) die("%s", error.text);
    load_parameters(model, f);
}

/* Gradients of `count` micro-batches from `first` on. */
static void gradients(Model *model, const Fixture *f, int64_t first, int64_t count, uint32_t step)
{
    int64_t N = f->spec.B * f->spec.config.T;
    Batch batch[8];
    Step s = f->step;
    s.step = step;
    s.correction1 = (float)(1 / (1 - pow((double)s.beta1, step + 1.0)));
    s.correction2 = (float)(1 / (1 - pow((double)s.beta2, step + 1.0)));
    s.loss_scale = 1.0f / (float)(count * N);
    for (int64_t m = 0; m < count; m++)
        batch[m] = model_upload(model, m, f->tokens + (first + m) * N, f->targets + (first + m) * N);
    gpt_gradients(&model->gpt, &s, batch, count);
}

static double fixture_scalar(const Fixture *f, const char *name, int64_t i)
{
    float x;
    memcpy(&x, (const char *)tensor(f, "", name)->data + 4 * i, 4);
    return (double)x;
}

/* The key bias of GPT-2 has gradient zero (softmax does not see it): its relative distance means nothing. So a bias of
 * qkv is compared as the whole that it is on disk. Returns the worst distance; `name` of where. */
static double worst_gradient(const Model *model, const Fixture *f, const char **name)
{
    double worst = 0;
    for (int i = 0; i < model->table.count; i++) {
        double d = distance(model, f, "grad.", i, model->zero.shard[i].sum);
        if (d > worst || d != d) {
            worst = d != d ? INFINITY : d;
            *name = model->table.param[i].name;
        }
    }
    return worst;
}

static void test_one_batch(const Fixture *f, const char *name, const char *isa, Precision precision,
                           Recompute recompute)
{
    Model model;
    const char *where = "", *p = precision_name(precision);
    double loss_bound = precision == PRECISION_FP32 ? 1e-5 : 1e-2, bound = precision == PRECISION_FP32 ? 1e-4 : 6e-2;
    int64_t N = f->spec.B * f->spec.config.T;

    open_model(&model, f, isa, precision, recompute);
    gradients(&model, f, 0, 1, 0);
    double expected = number(f, "loss"), loss = *model.optimizer.loss[0] / (double)N;
    double loss_error = fabs(loss - expected) / expected, worst = worst_gradient(&model, f, &where);
    CHECK(loss_error < loss_bound, "%s %s %s: loss %.9g, expected %.9g", name, isa, p, loss, expected);
    CHECK(worst < bound, "%s %s %s: gradient of %s is %.3g off", name, isa, p, where, worst);
    if (!strcmp(isa, "portable") && !recompute)
        printf("measured %s %s: loss %.1e relative, worst gradient %.1e (%s)\n", name, p, loss_error, worst, where);
    model_close(&model);
}

/* Logits, through generation with the KV cache: the prompt in one call, then token by token. */
static void test_logits(const Fixture *f, const char *name)
{
    Model model;
    Fixture g = *f;
    g.spec.generate = true;
    const GPTConfig *c = &f->spec.config;
    int64_t T = c->T, prompt = T / 2;
    double squares = 0, total = 0;

    open_model(&model, &g, "auto", PRECISION_FP32, RECOMPUTE_NONE);
    gpt_enter_step(&model.gpt, 0);
    for (int64_t t = prompt - 1; t < T; t++) {
        int64_t count = t == prompt - 1 ? prompt : 1, position0 = t + 1 - count;
        model_use(&model, USE_GENERATE, count);
        Batch batch = model_upload_tokens(&model, f->tokens + position0, count);
        const float *logits = gpt_logits(&model.gpt, &batch, position0).data;
        for (int64_t v = 0; v < c->V; v++) {
            double expected = fixture_scalar(f, "logits", t * c->V + v);
            squares += ((double)logits[v] - expected) * ((double)logits[v] - expected);
            total += expected * expected;
        }
    }
    CHECK(sqrt(squares / total) < 1e-5, "%s: logits are %.3g off", name, sqrt(squares / total));
    model_close(&model);
}

static void test_ten_steps(const Fixture *f, const char *name, Precision precision)
{
    Model model;
    bool fp32 = precision == PRECISION_FP32;
    double worst = 0, worst_loss = 0, worst_norm = 0;
    open_model(&model, f, "auto", precision, RECOMPUTE_NONE);
    for (int64_t s = 0; s < f->steps; s++) {
        gradients(&model, f, s * f->micro_batches, f->micro_batches, (uint32_t)s);
        optimizer_step(&model.optimizer, f->micro_batches * f->spec.B * f->spec.config.T);
        StepResult r = optimizer_result(&model.optimizer);
        double loss = fixture_scalar(f, "adamw_losses", s), norm = fixture_scalar(f, "adamw_grad_norms", s);
        worst_loss = fmax(worst_loss, fabs(r.loss - loss) / loss);
        worst_norm = fmax(worst_norm, fabs(r.grad_norm - norm) / norm);
    }
    for (int i = 0; i < model.table.count; i++)
        worst = fmax(worst, distance(&model, f, "final.", i, model.zero.shard[i].master));
    CHECK(worst_loss < (fp32 ? 1e-5 : 3e-2), "%s: loss of ten steps is %.3g off", name, worst_loss);
    CHECK(worst_norm < (fp32 ? 1e-4 : 0.1), "%s: gradient norm of ten steps is %.3g off", name, worst_norm);
    CHECK(worst < (fp32 ? 1e-4 : 0.15), "%s: weights after ten steps are %.3g off", name, worst);
    printf("measured %s %s ten steps: loss %.1e, norm %.1e, weights %.1e\n", name, precision_name(precision),
           worst_loss, worst_norm, worst);
    model_close(&model);
}

/* ---- planted errors: an op table with one op wrong must be noticed ---- */

static Ops wrong;
static const Ops *right;

#define DAMAGE(t) (((float *)(t).data)[0] = ((float *)(t).data)[0] * 1.5f + 1e-3f)

static void wrong_gradient(Operand *dy, Tensor g, Tensor dbias)
{
    right->operand_from_gradient(dy, g, dbias);
    if (dbias.data) DAMAGE(dbias);
}
static void wrong_activation(Operand *dh, Tensor du, Tensor h, Activation f, Tensor dbias)
{
    right->operand_from_activation_backward(dh, du, h, f, dbias);
    for (int64_t i = 0; i < dh->rows * dh->cols; i += 7) ((float *)dh->row.data)[i] *= 1.01f;
}
static void wrong_input(Tensor dx, const Operand *dy, const Linear *w)
{
    right->linear_backward_input(dx, dy, w);
    for (int64_t i = 0; i < dx.rows * dx.cols; i += 7) ((float *)dx.data)[i] *= 1.01f;
}
static void wrong_weight(Linear *w, const Operand *dy, const Operand *x)
{
    right->linear_backward_weight(w, dy, x);
    DAMAGE(w->dW);
}
static void wrong_embedding(Tensor dwte, Tensor dwpe, Tensor dx, const int32_t *tokens, int64_t T)
{
    Tensor none = {0};
    right->embedding_backward(dwte, dwpe.data ? dwpe : none, tensor_rows(dx, 0, dx.rows / T * T - T), tokens, T);
}
static void wrong_norm(Tensor dx, const Norm *norm, Tensor dy, Tensor x, Tensor stats)
{
    Norm other = *norm; /* the mean terms left out where the gain is small: here, a gain off by 1% */
    Tensor gain = {xmalloc((size_t)norm->gain.cols * 4), DTYPE_FP32, 1, norm->gain.cols, norm->gain.cols};
    for (int64_t c = 0; c < gain.cols; c++) ((float *)gain.data)[c] = ((float *)norm->gain.data)[c] * 1.01f;
    other.gain = gain;
    right->norm_backward(dx, &other, dy, x, stats);
    free(gain.data);
}
static void wrong_rope(Tensor dqkv, Tensor dq_gain, Tensor dk_gain, Tensor qkv, Tensor q_gain, Tensor k_gain, float eps,
                       Tensor cos_sin, const Attention *a)
{
    Attention shifted = *a;
    if (dq_gain.data) DAMAGE(dq_gain);
    shifted.Tq = a->Tq - 1; /* positions wrap one early */
    right->qk_norm_rope_backward(dqkv, dq_gain, dk_gain, qkv, q_gain, k_gain, eps, cos_sin, &shifted);
}
static void wrong_attention(Tensor dq, Tensor dk, Tensor dv, Tensor datt, Tensor att, Tensor lse, Tensor q, Tensor k,
                            Tensor v, const Attention *a)
{
    right->attention_backward(dq, dk, dv, datt, att, lse, q, k, v, a);
    for (int64_t r = 0; r < dk.rows; r++) ((float *)dk.data)[r * dk.ld] *= 1.01f;
}
static void wrong_classifier(Tensor losses, Tensor logits, const int32_t *targets, int64_t V, bool gradient)
{
    right->softmax_cross_entropy(losses, logits, targets, V, gradient);
    for (int64_t r = 0; r < logits.rows; r++) ((float *)logits.data)[r * logits.ld + targets[r]] *= 1.01f;
}

static void test_planted_errors(const Fixture *f, const char *name)
{
    enum { PLANTS = 9 };
    static const char *const WHAT[PLANTS] = {"operand_from_gradient", "operand_from_activation_backward",
                                             "linear_backward_input", "linear_backward_weight",
                                             "embedding_backward",    "norm_backward",
                                             "qk_norm_rope_backward", "attention_backward",
                                             "softmax_cross_entropy"};
    for (int plant = 0; plant < PLANTS; plant++) {
        Model model;
        const char *where = "";
        bool gpt2 = f->spec.config.arch == ARCH_GPT2;
        if (plant == 0 && !gpt2) continue; /* no biases */
        if (plant == 6 && gpt2) continue;  /* no RoPE */
        open_model(&model, f, "auto", PRECISION_FP32, RECOMPUTE_NONE);
        right = model.ops;
        wrong = *right;
        switch (plant) {
        case 0:
            wrong.operand_from_gradient = wrong_gradient;
            break;
        case 1:
            wrong.operand_from_activation_backward = wrong_activation;
            break;
        case 2:
            wrong.linear_backward_input = wrong_input;
            break;
        case 3:
            wrong.linear_backward_weight = wrong_weight;
            break;
        case 4:
            wrong.embedding_backward = wrong_embedding;
            break;
        case 5:
            wrong.norm_backward = wrong_norm;
            break;
        case 6:
            wrong.qk_norm_rope_backward = wrong_rope;
            break;
        case 7:
            wrong.attention_backward = wrong_attention;
            break;
        case 8:
            wrong.softmax_cross_entropy = wrong_classifier;
            break;
        }
        model.gpt.ops = &wrong;
        gradients(&model, f, 0, 1, 0);
        double worst = worst_gradient(&model, f, &where);
        CHECK(worst > 1e-4, "%s: an error planted in %s moves gradients by %.3g only", name, WHAT[plant], worst);
        model_close(&model);
    }
}

int main(void)
{
    static const char *const ISAS[] = {"portable", "avx2", "avx512", "amx"};
    const Ops *ops;
    for (int i = 0; i < FIXTURE_COUNT; i++) {
        Fixture f;
        char name[96];
        fixture_open(&f, FIXTURES[i]);
        for (int precision = 0; precision < 2; precision++)
            for (int s = 0; s < 4; s++) {
                snprintf(name, sizeof name, "%s, %s, %s: loss and gradients", FIXTURES[i],
                         precision_name((Precision)precision), ISAS[s]);
                test_case(name);
                if (cpu_open(&ops, ISAS[s], 1, NULL)) {
                    test_skip("not on this machine");
                    continue;
                }
                for (int recompute = 0; recompute < 3; recompute++)
                    test_one_batch(&f, FIXTURES[i], ISAS[s], (Precision)precision, (Recompute)recompute);
            }
        snprintf(name, sizeof name, "%s: logits with the KV cache, ten AdamW steps", FIXTURES[i]);
        test_case(name);
        if (!f.spec.document_mask) test_logits(&f, FIXTURES[i]);
        test_ten_steps(&f, FIXTURES[i], PRECISION_FP32);
        test_ten_steps(&f, FIXTURES[i], PRECISION_BF16);
        snprintf(name, sizeof name, "%s: planted errors are noticed", FIXTURES[i]);
        test_case(name);
        test_planted_errors(&f, FIXTURES[i]);
        st_close(&f.file);
    }
    return test_done();
}
