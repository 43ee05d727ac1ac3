/* Training steps in NVFP4 through the whole model: what is kept between forward and backward is 4 bits, NaN cannot hide
 * in a quantizer, gradients are those of BF16 up to quantization, and rounding bits depend on the place only.
 *
 * What went wrong elsewhere and has no test of its own, because here it cannot happen:
 *   padding tokens that distort an amax   a micro-batch is whole windows of B x T tokens, all of them trained on, and the
 *                                         padded rows of the vocabulary belong to the head, which is never quantized
 *   a weight cached in one copy only,     weight_prepare makes both views at once, and a product of views that do not
 *   or one copy stale                     belong together dies; test_gpt.c follows what every op reads
 *   halves of a fused matrix with two     qkv, and gate and up, are one Linear, one Operand, one tensor scale
 *   scales but one alpha
 *   shards with different amax, partly    a weight is quantized whole, by one call, and a block of codes is 8 bytes
 *   written bytes, a swap done twice
 *   an amax of the wrong copy in alpha    each view keeps its scale beside its codes, and a product takes both factors
 *                                         from the views that it reads (test_layer)
 *   sizes that must be multiples of 32    none must: test_gemm.c and test_quantize.c try every edge
 */
#include <math.h>

#include "cpu/backend.h"
#include "model.h"
#include "test.h"

static const Ops *real_ops;

static ModelSpec spec_of(Arch arch)
{
    Error error;
    ModelSpec s = {.recipe = recipe_defaults(PRECISION_NVFP4, MASTER_DEFAULT),
                   .seed = 7,
                   .train = true,
                   .B = 2,
                   .micro_steps = 2,
                   .eot_token = 3};
    s.config = (GPTConfig){.arch = arch,
                           .L = 3,
                           .C = 64,
                           .NH = 4,
                           .NKV = arch == ARCH_GPT2 ? 4 : 2,
                           .HD = 16,
                           .F = 112,
                           .V = 200,
                           .T = 48,
                           .rope_theta = 1e4,
                           .tied = arch != ARCH_LLAMA};
    s.config.init_std = s.config.embedding_init_std = 0.08f;
    if (config_finish(&s.config, &error)) die("%s", error.text);
    return s;
}

static void open_model(Model *model, const ModelSpec *spec, const Ops *ops)
{
    Error error;
    if (model_open(model, spec, ops, &error)) die("%s", error.text);
    zero_init_params(&model->zero, 9);
    gpt_enter_step(&model->gpt, 0);
}

static Step step_of(const ModelSpec *s, uint32_t step)
{
    float tokens = (float)(s->B * s->config.T * s->micro_steps);
    return (Step){.seed = s->seed,
                  .step = step,
                  .lr = 1e-3f,
                  .beta1 = 0.9f,
                  .beta2 = 0.95f,
                  .eps = 1e-8f,
                  .correction1 = 1,
                  .correction2 = 1,
                  .loss_scale = 1 / tokens,
                  .grad_clip = 1};
}

static void gradients(Model *model, uint32_t at)
{
    const ModelSpec *s = &model->spec;
    int64_t N = s->B * s->config.T;
    int32_t *tokens = xmalloc((size_t)(s->micro_steps * N + 1) * sizeof *tokens);
    Batch batch[2];
    Step step = step_of(s, at);
    for (int64_t i = 0; i <= s->micro_steps * N; i++) tokens[i] = (int32_t)((i * i * 31 + i * 17) % s->config.V);
    for (int64_t m = 0; m < s->micro_steps; m++) batch[m] = model_upload(model, m, tokens + m * N, tokens + m * N + 1);
    gpt_gradients(&model->gpt, &step, batch, s->micro_steps);
    free(tokens);
}

static StepResult train_step(Model *model, uint32_t at)
{
    const ModelSpec *s = &model->spec;
    gradients(model, at);
    optimizer_step(&model->optimizer, s->B * s->config.T * s->micro_steps);
    return optimizer_result(&model->optimizer);
}

/* ---- memory ---- */

static size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

static void test_memory(Arch arch)
{
    Model model;
    ModelSpec spec = spec_of(arch);
    const GPTConfig *c = &spec.config;
    size_t N = (size_t)(spec.B * c->T), views = 0, plain = 0;
    test_case(arch_name(arch));
    open_model(&model, &spec, real_ops);
    for (int l = 0; l < 3; l++) {
        const BlockActivations *s = &model.gpt.acts.block[l];
        const Operand *saved[] = {&s->a, &s->o, &s->b, &s->u};
        for (int i = 0; i < 4; i++) {
            const Operand *o = saved[i];
            size_t elements = (size_t)(o->rows * o->cols),
                   bytes = real_ops->view_bytes(&o->col.format, VIEW_COL, o->rows, o->cols);
            bool last = l == 2; /* the recipe keeps it in BF16 */
            CHECK(o->col.format.format == (last ? FORMAT_BF16 : FORMAT_NVFP4), "block %d operand %d", l, i);
            CHECK(o->row.format.format == o->col.format.format, "block %d operand %d: row view", l, i);
            if (!last) CHECK(bytes == elements * 9 / 16 + 4, "0.5625 bytes an element: %zu of %zu", bytes, elements);
            CHECK(last || o->row.data != o->col.data, "two copies");
            if (last && i == 1) continue; /* o's view is the attention output itself */
            views += aligned(last ? 2 * elements : bytes);
        }
        size_t stats = c->norm == NORM_LAYERNORM ? 8 : 4;
        size_t tensors[] = {N * (size_t)config_qkv_cols(c) * 2,
                            N * (size_t)(c->NH * c->HD) * 2,
                            N * (size_t)c->NH * 4,
                            N * (size_t)c->C * 2,
                            N * stats,
                            N * (size_t)config_up_cols(c) * 2};
        for (int i = 0; i < 6; i++) plain += aligned(tensors[i]);
    }
    /* qkv, attention output, its statistics, x2, its statistics, pre-activation, and the views: nothing else is kept */
    CHECK(model.arena.bytes[PURPOSE_SAVED] == plain + views, "saved %zu bytes, expected %zu + %zu",
          model.arena.bytes[PURPOSE_SAVED], plain, views);
    for (int i = 0; i < model.table.count; i++) {
        const Param *p = &model.table.param[i];
        size_t elements = (size_t)(p->rows_padded * p->cols);
        if (p->kind > PARAM_DOWN) continue;
        CHECK(model.zero.shard[i].prepared_bytes == (p->layer == 2 ? 0 : aligned(elements / 2 + elements / 256 + 4)),
              "%s: one copy in 4 bits beside the master, %zu bytes", p->name, model.zero.shard[i].prepared_bytes);
    }
    model_close(&model);
}

/* ---- NaN in an activation gradient or an activation ---- */

static struct {
    Ops ops;
    int call, at;   /* the value is planted before call number `at` of the hooked operations */
    uint16_t value; /* BF16 */
} plant;

static void poison(Tensor t)
{
    if (plant.call++ == plant.at) ((uint16_t *)t.data)[t.ld + 3] = plant.value;
}

static void plant_gradient(Operand *dy, Tensor g, Tensor dbias)
{
    poison(g);
    real_ops->operand_from_gradient(dy, g, dbias);
}
static void plant_activation(Operand *dh, Tensor du, Tensor h, Activation f, Tensor dbias)
{
    poison(du);
    real_ops->operand_from_activation_backward(dh, du, h, f, dbias);
}
static void plant_tensor(Operand *o, Tensor x, unsigned views)
{
    if (views & VIEW_ROW) poison(x);
    real_ops->operand_from_tensor(o, x, views);
}

static void test_not_finite(Arch arch, TensorScaleMode scale, bool forward, uint16_t value)
{
    Model model;
    ModelSpec spec = spec_of(arch);
    char name[96];
    snprintf(name, sizeof name, "%s, %s: %s before any %s stops the step with the state untouched", arch_name(arch),
             scale ? "pow2" : "amax", value == 0x7fc0 ? "NaN" : "Inf",
             forward ? "attention output" : "gradient operand");
    test_case(name);
    spec.recipe.tensor_scale = scale;
    spec.recipe.bf16_last_layers = 0;
    plant.ops = *real_ops;
    if (forward) {
        plant.ops.operand_from_tensor = plant_tensor;
    } else {
        plant.ops.operand_from_gradient = plant_gradient;
        plant.ops.operand_from_activation_backward = plant_activation;
    }
    open_model(&model, &spec, &plant.ops);
    plant.at = -1;
    plant.value = value;
    plant.call = 0;
    CHECK(train_step(&model, 0).finite, "finite without a NaN");
    int calls = plant.call;
    CHECK(calls >= (forward ? 6 : 24), "%d operands", calls);
    uint64_t hash = zero_state_hash(&model.zero);
    for (int at = 0; at < calls; at++) {
        plant.at = at;
        plant.call = 0;
        for (int i = 0; i < model.table.count; i++) model.ops->zero(model.zero.shard[i].sum);
        StepResult r = train_step(&model, 1);
        CHECK(!r.finite && zero_state_hash(&model.zero) == hash, "operand %d of %d", at, calls);
    }
    model_close(&model);
}

/* ---- gradients ---- */

typedef struct {
    double cosine, ratio;
} Agreement;

static float *gradient_copy(const Model *model, int i)
{
    Tensor g = zero_slice(&model->zero, i).grad;
    float *copy = xmalloc(tensor_bytes(g));
    memcpy(copy, g.data, tensor_bytes(g));
    return copy;
}

static Agreement agreement(const float *a, const float *b, int64_t n)
{
    double aa = 0, bb = 0, ab = 0;
    for (int64_t i = 0; i < n; i++) {
        aa += (double)a[i] * (double)a[i];
        bb += (double)b[i] * (double)b[i];
        ab += (double)a[i] * (double)b[i];
    }
    return (Agreement){ab / sqrt(aa * bb), sqrt(aa / bb)};
}

static void test_gradients(Arch arch)
{
    Model nvfp4, bf16;
    ModelSpec spec = spec_of(arch);
    char name[96];
    double worst = 1;
    snprintf(name, sizeof name, "%s: gradients point where those of BF16 do, in every form of the recipe",
             arch_name(arch));
    test_case(name);
    for (int form = 0; form < 9; form++) {
        RecipeSpec r = recipe_defaults(PRECISION_NVFP4, MASTER_DEFAULT);
        r.bf16_last_layers = 0;
        if (form == 1) r.tensor_scale = TENSOR_SCALE_POW2;
        if (form == 2) r.weight_blocks = WEIGHTS_1X16;
        if (form == 3) r.rht = RHT_OFF;
        if (form == 4) r.four_over_six = FOUR_SIX_BOTH;
        if (form == 5) r.gradient_headroom = HEADROOM_17_16;
        if (form == 6) r.fprop = PRODUCT_IN_BF16;
        if (form == 7) r.wgrad = r.dgrad = PRODUCT_IN_BF16;
        if (form == 8) r.master = MASTER_FP32, r.quantize_projections = 1u << PROJ_UP | 1u << PROJ_O;
        spec.recipe = r;
        open_model(&nvfp4, &spec, real_ops);
        gradients(&nvfp4, 0);
        ModelSpec plain = spec;
        plain.recipe = recipe_defaults(PRECISION_BF16, r.master);
        open_model(&bf16, &plain, real_ops);
        bf16.ops->workspace_set(bf16.workspace, &bf16.need);
        gradients(&bf16, 0);
        for (int i = 0; i < nvfp4.table.count; i++) {
            const Param *p = &nvfp4.table.param[i];
            if (p->kind > PARAM_DOWN) continue;
            float *a = gradient_copy(&nvfp4, i), *b = gradient_copy(&bf16, i);
            Agreement g = agreement(a, b, p->rows * p->cols);
            worst = fmin(worst, g.cosine);
            CHECK(g.cosine > 0.75 && g.ratio > 0.8 && g.ratio < 1.25, "form %d, %s: cosine %.4f, ratio %.4f", form,
                  p->name, g.cosine, g.ratio);
            CHECK(g.cosine < 0.9999, "form %d, %s: nothing was quantized", form, p->name);
            free(a), free(b);
        }
        model_close(&nvfp4);
        model_close(&bf16);
    }
    printf("measured %s: smallest cosine with the BF16 gradient %.4f\n", arch_name(arch), worst);
}

/* ---- one layer: its three products against plain sums ---- */

static Tensor random_matrix(int64_t rows, int64_t cols, uint32_t seed)
{
    Tensor t = {xmalloc((size_t)(rows * cols) * 2), DTYPE_BF16, rows, cols, cols};
    for (int64_t i = 0; i < rows * cols; i++) {
        Philox p = philox_draw(seed, (uint32_t)i, 0, 0, 0, 0, 0); /* a sum of uniforms, some columns larger */
        double x = 0;
        for (int k = 0; k < 4; k++) x += p.word[k] * 0x1p-32 - 0.5;
        ((uint16_t *)t.data)[i] = bf16_from_f32((float)(x * (i % cols % 9 ? 1 : 4)));
    }
    return t;
}

static double at(Tensor t, int64_t r, int64_t c)
{
    if (t.dtype == DTYPE_BF16) return (double)bf16_to_f32(((uint16_t *)t.data)[r * t.ld + c]);
    return (double)((float *)t.data)[r * t.ld + c];
}

/* Relative distance of `got` [rows, cols] from the sum over k of a(i, k) b(j, k). */
typedef struct {
    Tensor t;
    bool by_row; /* element (i, k) is t[i, k], else t[k, i] */
} Side;
static double distance(Tensor got, Side a, Side b, int64_t K)
{
    double error = 0, size = 0;
    for (int64_t i = 0; i < got.rows; i++)
        for (int64_t j = 0; j < got.cols; j++) {
            double sum = 0;
            for (int64_t k = 0; k < K; k++)
                sum += (a.by_row ? at(a.t, i, k) : at(a.t, k, i)) * (b.by_row ? at(b.t, j, k) : at(b.t, k, j));
            error += pow(at(got, i, j) - sum, 2);
            size += sum * sum;
        }
    return sqrt(error / size);
}

static void place_views(Operand *o, ViewFormat row, ViewFormat col)
{
    o->row.format = row;
    o->col.format = col;
    real_ops->view_place(&o->row, VIEW_ROW, o->rows, o->cols,
                         xcalloc(1, real_ops->view_bytes(&row, VIEW_ROW, o->rows, o->cols)));
    if (views_are_one(&row, &col)) {
        o->col = o->row;
        o->col.format = col;
    } else {
        real_ops->view_place(&o->col, VIEW_COL, o->rows, o->cols,
                             xcalloc(1, real_ops->view_bytes(&col, VIEW_COL, o->rows, o->cols)));
    }
}

static void free_views(Operand *o)
{
    if (o->col.data != o->row.data) free(o->col.data);
    free(o->row.data);
}

static void test_layer(const RecipeSpec *r, const char *what, int64_t N, int64_t in, int64_t out)
{
    Recipe recipe;
    Model model; /* for its workspace */
    Error error;
    ModelSpec spec = spec_of(ARCH_LLAMA);
    test_case(what);
    if (recipe_make(&recipe, &spec.config, r, &error)) die("%s", error.text);
    open_model(&model, &spec, real_ops);
    const LinearFormats *f = &recipe.formats[PROJ_UP];
    Tensor x = random_matrix(N, in, 1), dy = random_matrix(N, out, 2), w = random_matrix(out, in, 3);
    Tensor y = random_matrix(N, out, 4), dx = random_matrix(N, in, 5);
    Tensor dW = {xcalloc((size_t)(out * in), 4), DTYPE_FP32, out, in, in};
    Operand ox = {.rows = N, .cols = in}, ody = {.rows = N, .cols = out};
    Linear linear = {.weight = {.rows = out, .cols = in}, .dW = dW};
    place_views(&ox, f->x_row, f->x_col);
    place_views(&ody, f->dy_row, f->dy_col);
    place_views(&linear.weight, f->w_row, f->w_col);
    real_ops->begin_step(&(Step){.seed = 3});
    real_ops->begin_micro_step(0);
    real_ops->weight_prepare(&linear, w, 3, 0);
    real_ops->operand_from_tensor(&ox, x, VIEW_ROW | VIEW_COL);
    real_ops->operand_from_gradient(&ody, dy, (Tensor){0});
    real_ops->linear_forward(y, &ox, &linear);
    real_ops->linear_backward_input(dx, &ody, &linear);
    real_ops->linear_backward_weight(&linear, &ody, &ox);
    double of_y = distance(y, (Side){x, true}, (Side){w, true}, in);
    double of_dx = distance(dx, (Side){dy, true}, (Side){w, false}, out);
    double of_dw = distance(dW, (Side){dy, false}, (Side){x, false}, N);
    printf("measured %s: relative error of Y %.3f, dX %.3f, dW %.3f\n", what, of_y, of_dx, of_dw);
    CHECK(of_y > 0.02 && of_y < 0.2, "Y %g", of_y); /* two roundings of about a tenth */
    CHECK(of_dx > 0.02 && of_dx < 0.25, "dX %g", of_dx);
    CHECK(of_dw > 0.02 && of_dw < 0.25, "dW %g", of_dw);
    free_views(&ox), free_views(&ody), free_views(&linear.weight);
    free(x.data), free(dy.data), free(w.data), free(y.data), free(dx.data), free(dW.data);
    recipe_free(&recipe);
    model_close(&model);
}

static void test_layers(void)
{
    RecipeSpec r = recipe_defaults(PRECISION_NVFP4, MASTER_DEFAULT);
    test_layer(&r, "one layer, the default recipe", 96, 64, 112);
    test_layer(&r, "one layer, odd widths", 48, 50, 69);
    r.tensor_scale = TENSOR_SCALE_POW2;
    test_layer(&r, "one layer, pow2", 96, 64, 112);
    r.tensor_scale = TENSOR_SCALE_AMAX;
    r.weight_blocks = WEIGHTS_1X16;
    test_layer(&r, "one layer, 1x16 weights", 96, 64, 112);
    test_layer(&r, "one layer, 1x16 weights, odd widths", 48, 50, 69);
    r.four_over_six = FOUR_SIX_BOTH;
    test_layer(&r, "one layer, 4/6", 96, 64, 112);
    r.four_over_six = FOUR_SIX_OFF;
    r.rht = RHT_OFF;
    r.stochastic_rounding = STOCHASTIC_OFF;
    test_layer(&r, "one layer, no transform, nearest", 96, 64, 112);
}

/* The same step in other circumstances repeats its bits; another step, seed or micro-batch draws others. */
static uint64_t gradient_hash(const ModelSpec *spec, uint32_t at)
{
    Model model;
    uint64_t h = 0;
    open_model(&model, spec, real_ops);
    gradients(&model, at);
    for (int i = 0; i < model.table.count; i++) {
        Tensor g = zero_slice(&model.zero, i).grad;
        h = hash64(g.data, tensor_bytes(g), h);
    }
    model_close(&model);
    return h;
}

static void test_places(void)
{
    ModelSpec spec = spec_of(ARCH_LLAMA);
    test_case("rounding bits: a step repeats, another step or seed does not; nearest rounding knows neither");
    uint64_t once = gradient_hash(&spec, 5);
    CHECK(gradient_hash(&spec, 5) == once, "a repeated step");
    CHECK(gradient_hash(&spec, 6) != once, "another step");
    spec.seed = 8;
    CHECK(gradient_hash(&spec, 5) != once, "another seed");
    spec.recipe.stochastic_rounding = STOCHASTIC_OFF;
    uint64_t nearest = gradient_hash(&spec, 5);
    CHECK(gradient_hash(&spec, 6) == nearest, "nearest");
    spec.recipe.stochastic_rounding = STOCHASTIC_ALL;
    uint64_t all = gradient_hash(&spec, 5);
    CHECK(all != nearest && gradient_hash(&spec, 6) != all, "all");
}

int main(void)
{
    Error error;
    if (cpu_open(&real_ops, "auto", 2, &error)) die("%s", error.text);
    for (int arch = 0; arch < 3; arch++) test_memory((Arch)arch);
    for (int forward = 0; forward < 2; forward++)
        for (int which = 0; which < 4; which++)
            test_not_finite(forward ? ARCH_GPT2 : ARCH_LLAMA, (TensorScaleMode)(which % 2), forward,
                            which < 2 ? 0x7fc0 : 0x7f80);
    test_layers();
    for (int arch = 0; arch < 3; arch++) test_gradients((Arch)arch);
    test_places();
    return test_done();
}
