/* See recipe.h. */
#include "recipe.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *precision_name(Precision precision)
{
    static const char *const NAMES[] = {"fp32", "bf16", "nvfp4", "auto"};
    return NAMES[precision];
}

const char *format_name(Format format)
{
    static const char *const NAMES[FORMAT_COUNT] = {"none", "fp32", "bf16", "nvfp4"};
    return NAMES[format];
}

RecipeSpec recipe_defaults(Precision precision, Master master)
{
    return (RecipeSpec){.precision = precision,
                        .master = master,
                        .bf16_last_layers = -1,
                        .quantize_projections = (1u << PROJ_COUNT) - 1,
                        .switch_to_bf16_at = 1};
}

Precision recipe_auto(const GPTConfig *config, bool native_fp4, char reason[160])
{
    enum { HIDDEN_MIN = 2048 }; /* assumed, not measured: below it quantizing may cost what the faster product saves */
    bool nvfp4 = native_fp4 && config->C >= HIDDEN_MIN;
    snprintf(reason, 160, "%s: %s", nvfp4 ? "nvfp4" : "bf16",
             nvfp4        ? "this device multiplies FP4 and the model is wide enough to gain by it"
             : native_fp4 ? "hidden is below 2048, where quantizing may cost what FP4 saves"
                          : "this device only emulates NVFP4: the same numbers, but slower than BF16");
    return nvfp4 ? PRECISION_NVFP4 : PRECISION_BF16;
}

/* ---- formats ---- */

static LinearFormats plain_formats(Format format)
{
    ViewFormat view = {.format = format};
    return (LinearFormats){view, view, view, view, view, view};
}

static ViewFormat quantized(const RecipeSpec *spec, int projection, OperandCopy copy)
{
    bool gradient = copy == COPY_DY_ROW || copy == COPY_DY_COL, weight = copy == COPY_W_ROW || copy == COPY_W_COL;
    bool stochastic = spec->stochastic_rounding == STOCHASTIC_ALL ||
                      (gradient && spec->stochastic_rounding == STOCHASTIC_GRADIENTS);
    bool both_16x16 = weight && spec->weight_blocks == WEIGHTS_16X16 && spec->fprop == PRODUCT_IN_NVFP4;
    FourSixScope scope = spec->four_over_six;
    bool four_six = (copy == COPY_X_ROW && (scope == FOUR_SIX_ACTIVATIONS || scope == FOUR_SIX_BOTH)) ||
                    ((copy == COPY_W_ROW || both_16x16) && weight &&
                     (scope == FOUR_SIX_WEIGHTS || scope == FOUR_SIX_BOTH));
    ViewFormat view = {.format = FORMAT_NVFP4, .role = (uint8_t)(ROLE_OPERAND + projection * OPERAND_COPIES + copy)};
    view.nvfp4 = (Nvfp4Form){.rounding = stochastic ? ROUND_STOCHASTIC : ROUND_NEAREST,
                             .block = both_16x16 ? SCALE_16X16 : SCALE_1X16,
                             .tensor_scale = spec->tensor_scale,
                             .headroom = gradient && spec->gradient_headroom == HEADROOM_17_16 ? 17.0f / 16.0f : 1.0f};
    if (four_six)
        view.nvfp4.four_over_six = spec->four_over_six_metric == FOUR_SIX_MSE ? FOUR_OVER_SIX_MSE : FOUR_OVER_SIX_MAE;
    view.rht = spec->rht == RHT_WGRAD && (copy == COPY_X_COL || copy == COPY_DY_COL);
    return view;
}

/* The six copies of one quantized linear layer; a product that stays in BF16 has two plain ones. */
static LinearFormats quantized_formats(const RecipeSpec *spec, int projection)
{
    LinearFormats f = plain_formats(FORMAT_BF16);
    if (spec->fprop == PRODUCT_IN_NVFP4) {
        f.x_row = quantized(spec, projection, COPY_X_ROW);
        f.w_row = quantized(spec, projection, COPY_W_ROW);
    }
    if (spec->dgrad == PRODUCT_IN_NVFP4) {
        f.dy_row = quantized(spec, projection, COPY_DY_ROW);
        f.w_col = quantized(spec, projection, COPY_W_COL);
    }
    if (spec->wgrad == PRODUCT_IN_NVFP4) {
        f.dy_col = quantized(spec, projection, COPY_DY_COL);
        f.x_col = quantized(spec, projection, COPY_X_COL);
    }
    return f;
}

/* ---- what the options may say ---- */

static int64_t last_layers(const RecipeSpec *spec, int64_t L)
{
    return spec->bf16_last_layers >= 0 ? spec->bf16_last_layers : ceil_div(15 * L, 100);
}

RecipeSpec recipe_resolved(const RecipeSpec *spec, int64_t L)
{
    bool fp32 = spec->precision == PRECISION_FP32 || spec->master == MASTER_FP32;
    RecipeSpec r = spec->precision == PRECISION_NVFP4 ? *spec : recipe_defaults(spec->precision, MASTER_DEFAULT);
    r.master = fp32 ? MASTER_FP32 : MASTER_BF16;
    r.bf16_last_layers = last_layers(&r, L);
    if (r.four_over_six == FOUR_SIX_OFF) r.four_over_six_metric = FOUR_SIX_MAE;
    if (r.fprop == PRODUCT_IN_BF16) r.weight_blocks = WEIGHTS_16X16;
    if (r.wgrad == PRODUCT_IN_BF16) r.rht = RHT_WGRAD;
    if (r.switch_to_bf16_at == 1) r.switch_scope = SWITCH_FORWARD;
    return r;
}

int64_t recipe_switch_step(const RecipeSpec *spec)
{
    return (int64_t)ceil(spec->switch_to_bf16_at * (double)spec->steps - 1e-6); /* 0.07 of 100 is 7, not 8 */
}

static int check_nvfp4(const RecipeSpec *spec, int64_t L, Error *error)
{
    int64_t last = last_layers(spec, L);
    if (spec->bf16_first_layers + last >= L)
        return error_set(error,
                         "precision nvfp4: bf16_first_layers %lld and bf16_last_layers %lld leave none of the %lld "
                         "blocks; give smaller ones (--bf16_last_layers 0), or --precision bf16",
                         (long long)spec->bf16_first_layers, (long long)last, (long long)L);
    if (!spec->quantize_projections ||
        (spec->fprop == PRODUCT_IN_BF16 && spec->dgrad == PRODUCT_IN_BF16 && spec->wgrad == PRODUCT_IN_BF16))
        return error_set(error, "precision nvfp4 with no product in nvfp4: fprop, dgrad and wgrad are all bf16; "
                                "that is --precision bf16");
    if (spec->four_over_six && spec->tensor_scale == TENSOR_SCALE_POW2)
        return error_set(error, "four_over_six with tensor_scale pow2: 4/6 is defined with --tensor_scale amax only");
    if (spec->four_over_six && spec->stochastic_rounding == STOCHASTIC_ALL)
        return error_set(error,
                         "four_over_six with stochastic_rounding all: 4/6 compares errors of rounding to nearest; "
                         "use --stochastic_rounding gradients");
    if (spec->four_over_six && spec->fprop == PRODUCT_IN_BF16)
        return error_set(error, "four_over_six with fprop bf16: 4/6 is for the copies that fprop reads");
    if (spec->gradient_headroom && spec->dgrad == PRODUCT_IN_BF16 && spec->wgrad == PRODUCT_IN_BF16)
        return error_set(error, "gradient_headroom 17/16 with dgrad and wgrad bf16: no gradient is quantized");
    if (spec->switch_to_bf16_at == 1) return 0;
    if (spec->switch_scope == SWITCH_FORWARD && spec->fprop == PRODUCT_IN_BF16)
        return error_set(error, "switch_to_bf16_at with fprop bf16: the forward pass is in BF16 from the start; use "
                                "--switch_scope all");
    if (spec->steps && recipe_switch_step(spec) >= spec->steps)
        return error_set(error, "switch_to_bf16_at %g: none of the %lld steps comes after it", spec->switch_to_bf16_at,
                         (long long)spec->steps);
    return 0;
}

/* ---- the table ---- */

static void add_phase(Recipe *recipe, const GPTConfig *config, const RecipeSpec *spec, uint32_t first_step)
{
    bool nvfp4 = spec->precision == PRECISION_NVFP4;
    LinearFormats plain = plain_formats(spec->precision == PRECISION_FP32 ? FORMAT_FP32 : FORMAT_BF16);
    LinearFormats *formats = &recipe->formats[recipe->phases * config->L * PROJ_COUNT];
    int64_t first = spec->bf16_first_layers, end = config->L - last_layers(spec, config->L);

    for (int64_t l = 0; l < config->L; l++)
        for (int j = 0; j < PROJ_COUNT; j++) {
            bool quantize = nvfp4 && l >= first && l < end && spec->quantize_projections >> j & 1;
            formats[l * PROJ_COUNT + j] = quantize ? quantized_formats(spec, j) : plain;
        }
    recipe->first_step[recipe->phases++] = first_step;
}

int recipe_make(Recipe *recipe, const GPTConfig *config, const RecipeSpec *spec, Error *error)
{
    enum { PHASES_MAX = 3 };
    bool fp32 = spec->precision == PRECISION_FP32, nvfp4 = spec->precision == PRECISION_NVFP4;
    if (spec->precision == PRECISION_AUTO) die("recipe_make: precision auto was not resolved; this is a bug");
    if (fp32 && spec->master == MASTER_BF16)
        return error_set(error, "master bf16 under precision fp32 would round the weights that fp32 is meant to keep; "
                                "use --master fp32 or --precision bf16");
    if (nvfp4 && check_nvfp4(spec, config->L, error)) return -1;

    *recipe = (Recipe){.L = config->L,
                       .head = plain_formats(fp32 ? FORMAT_FP32 : FORMAT_BF16),
                       .act = fp32 ? DTYPE_FP32 : DTYPE_BF16,
                       .master = fp32 || spec->master == MASTER_FP32 ? DTYPE_FP32 : DTYPE_BF16};
    recipe->first_step = xcalloc(PHASES_MAX, sizeof *recipe->first_step);
    recipe->formats = xcalloc((size_t)(PHASES_MAX * config->L * PROJ_COUNT), sizeof *recipe->formats);

    RecipeSpec bf16 = recipe_defaults(PRECISION_BF16, spec->master), switched = *spec;
    if (spec->switch_scope == SWITCH_ALL) switched = bf16;
    switched.fprop = PRODUCT_IN_BF16;
    switched.four_over_six = FOUR_SIX_OFF;
    if (switched.dgrad == PRODUCT_IN_BF16 && switched.wgrad == PRODUCT_IN_BF16) switched = bf16;
    bool switches = nvfp4 && spec->switch_to_bf16_at < 1;
    if (!switches || recipe_switch_step(spec) > 0) add_phase(recipe, config, spec, 0);
    if (switches) add_phase(recipe, config, &switched, (uint32_t)recipe_switch_step(spec));
    if (spec->shadow) {
        recipe->shadow_phase = recipe->phases;
        add_phase(recipe, config, nvfp4 ? &bf16 : spec, UINT32_MAX);
    }
    return 0;
}

void recipe_free(Recipe *recipe)
{
    free(recipe->first_step);
    free(recipe->formats);
    *recipe = (Recipe){0};
}

int recipe_phase(const Recipe *recipe, uint32_t step)
{
    int phase = (recipe->shadow_phase ? recipe->shadow_phase : recipe->phases) - 1;
    while (recipe->first_step[phase] > step) phase--;
    return phase;
}

/* What a product reads; its first operand names its format. */
static const ViewFormat *operand(const LinearFormats *f, int product, bool second)
{
    switch (product) {
    case PRODUCT_FPROP:
        return second ? &f->w_row : &f->x_row;
    case PRODUCT_DGRAD:
        return second ? &f->w_col : &f->dy_row;
    default:
        return second ? &f->x_col : &f->dy_col;
    }
}

const LinearFormats *recipe_formats(const Recipe *recipe, int phase, int64_t l, int projection)
{
    return &recipe->formats[(phase * recipe->L + l) * PROJ_COUNT + projection];
}

static Format product_format(const Recipe *recipe, int phase, int64_t l, int projection, int product)
{
    return operand(recipe_formats(recipe, phase, l, projection), product, false)->format;
}

/* Adds the products and projections of a block that are in NVFP4 to the two sets. */
static bool uses(const Recipe *recipe, int phase, int64_t l, unsigned *products, unsigned *projections)
{
    bool any = false;
    for (int j = 0; j < PROJ_COUNT; j++)
        for (int p = 0; p < PRODUCT_COUNT; p++) {
            if (product_format(recipe, phase, l, j, p) != FORMAT_NVFP4) continue;
            *products |= 1u << p;
            *projections |= 1u << j;
            any = true;
        }
    return any;
}

static unsigned quantized_products(const Recipe *recipe)
{
    unsigned products = 0, projections = 0;
    for (int phase = 0; phase < recipe->phases; phase++)
        for (int64_t l = 0; l < recipe->L; l++) uses(recipe, phase, l, &products, &projections);
    return products;
}

bool recipe_quantizes(const Recipe *recipe) { return quantized_products(recipe); }
bool recipe_quantizes_tokens(const Recipe *recipe) { return quantized_products(recipe) >> PRODUCT_WGRAD & 1; }

double recipe_fp4_share(const Recipe *recipe, const GPTConfig *c, int phase)
{
    const int64_t size[PROJ_COUNT] = {[PROJ_QKV] = config_qkv_cols(c) * c->C,
                                      [PROJ_O] = c->C * c->NH * c->HD,
                                      [PROJ_UP] = config_up_cols(c) * c->C,
                                      [PROJ_DOWN] = c->C * c->F};
    double all = 0, nvfp4 = 0;
    for (int64_t l = 0; l < recipe->L; l++)
        for (int j = 0; j < PROJ_COUNT; j++)
            for (int p = 0; p < PRODUCT_COUNT; p++) {
                all += (double)size[j];
                if (product_format(recipe, phase, l, j, p) == FORMAT_NVFP4) nvfp4 += (double)size[j];
            }
    return nvfp4 / all;
}

ProductCounts recipe_products(const Recipe *recipe, const GPTConfig *config, int phase, Recompute recompute,
                              int64_t micro_steps, int64_t chunks)
{
    ProductCounts expected = {0};
    for (int p = 0; p < PRODUCT_COUNT; p++) {
        for (int64_t l = 0; l < config->L; l++)
            for (int j = 0; j < PROJ_COUNT; j++) {
                bool twice = p == PRODUCT_FPROP && j != PROJ_DOWN && recompute == RECOMPUTE_BLOCK;
                expected.count[p][product_format(recipe, phase, l, j, p)] += micro_steps * (twice ? 2 : 1);
            }
        expected.count[p][operand(&recipe->head, p, false)->format] += micro_steps * chunks;
    }
    return expected;
}

/* ---- the census ---- */

static const char *const PRODUCT_NAMES[PRODUCT_COUNT] = {"fprop", "dgrad", "wgrad"};
static const char *const PROJECTION_NAMES[PROJ_COUNT] = {"qkv", "o", "up", "down"};

const char *projection_name(int projection) { return PROJECTION_NAMES[projection]; }
const char *product_name(int product) { return PRODUCT_NAMES[product]; }

/* Adds to a text of `bytes`; what does not fit is left out. */
__attribute__((format(printf, 3, 4))) static void append(char *text, size_t bytes, const char *format, ...)
{
    size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, bytes - used, format, arguments);
    va_end(arguments);
}

static void append_set(char *text, size_t bytes, const char *const *names, int count, unsigned set)
{
    bool first = true;
    for (int i = 0; i < count; i++) {
        if (!(set >> i & 1)) continue;
        append(text, bytes, "%s%s", first ? "" : " ", names[i]);
        first = false;
    }
}

static void append_range(char *text, size_t bytes, int64_t from, int64_t end)
{
    append(text, bytes, end == from + 1 ? "%lld" : "%lld-%lld", (long long)from, (long long)(end - 1));
}

/* Blocks from *first on, up to the result, have a product in NVFP4. */
static int64_t quantized_blocks(const Recipe *recipe, int phase, int64_t *first, unsigned *products,
                                unsigned *projections)
{
    int64_t end = 0;
    *first = recipe->L;
    for (int64_t l = 0; l < recipe->L; l++) {
        if (!uses(recipe, phase, l, products, projections)) continue;
        *first = min_i64(*first, l);
        end = l + 1;
    }
    return end;
}

static void append_phase(char *text, size_t bytes, const Recipe *recipe, int phase)
{
    unsigned products = 0, projections = 0;
    int64_t first, end = quantized_blocks(recipe, phase, &first, &products, &projections);
    if (!end) {
        append(text, bytes, "%s throughout", recipe->act == DTYPE_FP32 ? "fp32" : "bf16");
        return;
    }
    append(text, bytes, "nvfp4 in block%s ", end == first + 1 ? "" : "s");
    append_range(text, bytes, first, end);
    append(text, bytes, " of %lld (", (long long)recipe->L);
    append_set(text, bytes, PROJECTION_NAMES, PROJ_COUNT, projections);
    append(text, bytes, ": ");
    append_set(text, bytes, PRODUCT_NAMES, PRODUCT_COUNT, products);
    append(text, bytes, ")");
}

void recipe_census(const Recipe *recipe, const GPTConfig *config, char *text, size_t bytes)
{
    unsigned products = 0, projections = 0;
    int64_t first, end = quantized_blocks(recipe, 0, &first, &products, &projections);
    *text = 0;
    append_phase(text, bytes, recipe, 0);
    if (end) {
        int64_t plain = first + recipe->L - end;
        bool rest = plain > 0;
        append(text, bytes, ", %.0f%% of the blocks' FLOPs; bf16: %s", 100 * recipe_fp4_share(recipe, config, 0),
               !rest       ? ""
               : plain > 1 ? "blocks "
                           : "block ");
        if (first > 0) append_range(text, bytes, 0, first);
        if (first > 0 && end < recipe->L) append(text, bytes, " and ");
        if (end < recipe->L) append_range(text, bytes, end, recipe->L);
        append(text, bytes, "%sembedding, head", rest ? ", " : "");
    }
    for (int phase = 1; phase < recipe->phases && phase != recipe->shadow_phase; phase++) {
        append(text, bytes, "; from step %lld: ", (long long)recipe->first_step[phase] + 1);
        append_phase(text, bytes, recipe, phase);
    }
    append(text, bytes, "; master weights %s", recipe->master == DTYPE_FP32 ? "fp32" : "bf16 with stochastic rounding");
}

static char *operand_text(const ViewFormat *v, const char *name)
{
    const Nvfp4Form *f = &v->nvfp4;
    if (v->format != FORMAT_NVFP4) return xformat("%s %s", name, format_name(v->format));
    return xformat("%s nvfp4 %s%s %s, tensor scale %s%s%s", name, f->block == SCALE_16X16 ? "16x16" : "1x16",
                   v->rht ? " RHT" : "", f->rounding == ROUND_STOCHASTIC ? "stochastic" : "nearest",
                   f->tensor_scale == TENSOR_SCALE_POW2 ? "pow2" : "amax",
                   f->four_over_six == FOUR_OVER_SIX_OFF   ? ""
                   : f->four_over_six == FOUR_OVER_SIX_MSE ? ", 4/6 mse"
                                                           : ", 4/6 mae",
                   f->headroom > 1 ? ", headroom 17/16" : "");
}

static void add_row(Json *table, const Recipe *recipe, int phase, const char *blocks, unsigned projections,
                    const LinearFormats *f, int product)
{
    static const char *const SECOND[PRODUCT_COUNT] = {"W", "W", "X"};
    char names[32] = "";
    char *first = operand_text(operand(f, product, false), product == PRODUCT_FPROP ? "X" : "dY");
    char *second = operand_text(operand(f, product, true), SECOND[product]);
    Json *row = json_append_object(table);
    append_set(names, sizeof names, PROJECTION_NAMES, PROJ_COUNT, projections);
    json_add_int(row, "from_step", (int64_t)recipe->first_step[phase] + 1);
    json_add_string(row, "blocks", blocks);
    if (projections) json_add_string(row, "projections", names);
    json_add_string(row, "product", PRODUCT_NAMES[product]);
    json_add_string(row, "first", first);
    json_add_string(row, "second", second);
    free(first);
    free(second);
}

static bool same_formats(const LinearFormats *a, const LinearFormats *b)
{
    for (int p = 0; p < PRODUCT_COUNT; p++)
        for (int second = 0; second < 2; second++) {
            char *x = operand_text(operand(a, p, second), ""), *y = operand_text(operand(b, p, second), "");
            bool same = strcmp(x, y) == 0;
            free(x);
            free(y);
            if (!same) return false;
        }
    return true;
}

static bool same_block(const Recipe *recipe, int phase, int64_t a, int64_t b)
{
    for (int j = 0; j < PROJ_COUNT; j++)
        if (!same_formats(recipe_formats(recipe, phase, a, j), recipe_formats(recipe, phase, b, j))) return false;
    return true;
}

/* The rows of blocks from .. end - 1, which are alike: one a product and group of projections that are alike. */
static void add_blocks(Json *table, const Recipe *recipe, int phase, int64_t from, int64_t end)
{
    char blocks[48] = "";
    append_range(blocks, sizeof blocks, from, end);
    for (unsigned done = 0, j = 0; j < PROJ_COUNT; j++) {
        const LinearFormats *f = recipe_formats(recipe, phase, from, (int)j);
        unsigned alike = 0;
        for (unsigned k = j; k < PROJ_COUNT; k++)
            if (same_formats(f, recipe_formats(recipe, phase, from, (int)k))) alike |= 1u << k;
        if (done >> j & 1) continue;
        for (int p = 0; p < PRODUCT_COUNT; p++) add_row(table, recipe, phase, blocks, alike, f, p);
        done |= alike;
    }
}

void recipe_census_table(const Recipe *recipe, Json *table)
{
    int phases = recipe->shadow_phase ? recipe->shadow_phase : recipe->phases;
    for (int phase = 0; phase < phases; phase++)
        for (int64_t from = 0, end; from < recipe->L; from = end) {
            for (end = from + 1; end < recipe->L && same_block(recipe, phase, from, end);) end++;
            add_blocks(table, recipe, phase, from, end);
        }
    for (int p = 0; p < PRODUCT_COUNT; p++) add_row(table, recipe, 0, "head", 0, &recipe->head, p);
}
