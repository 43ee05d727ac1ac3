/* See recipe.h. */
#include "recipe.h"

#include <math.h>
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
    enum { HIDDEN_MIN = 2048 }; /* below it quantizing costs what the faster product saves */
    bool nvfp4 = native_fp4 && config->C >= HIDDEN_MIN;
    snprintf(reason, 160, "%s: %s", nvfp4 ? "nvfp4" : "bf16",
             nvfp4        ? "this device multiplies FP4 and the model is wide enough to gain by it"
             : native_fp4 ? "hidden is below 2048, where quantizing costs what FP4 saves"
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
    double switch_step = ceil(spec->switch_to_bf16_at * (double)spec->steps);
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
    if (!switches || switch_step > 0) add_phase(recipe, config, spec, 0);
    if (switches) add_phase(recipe, config, &switched, (uint32_t)switch_step);
    if (nvfp4 && spec->shadow) {
        recipe->shadow_phase = recipe->phases;
        add_phase(recipe, config, &bf16, UINT32_MAX);
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

bool recipe_quantizes(const Recipe *recipe)
{
    for (int64_t i = 0; i < recipe->phases * recipe->L * PROJ_COUNT; i++) {
        const LinearFormats *f = &recipe->formats[i];
        if (f->x_row.format == FORMAT_NVFP4 || f->dy_row.format == FORMAT_NVFP4 || f->dy_col.format == FORMAT_NVFP4)
            return true;
    }
    return false;
}

void recipe_census(const Recipe *recipe, const GPTConfig *config, char *text, size_t bytes)
{
    int64_t fp32 = 0, products = config->L * PROJ_COUNT;
    for (int64_t i = 0; i < products; i++) fp32 += recipe->formats[i].x_row.format == FORMAT_FP32;
    snprintf(text, bytes, "fprop, dgrad, wgrad of %lld linears: %s; head %s; master weights %s", (long long)products,
             fp32 == products ? "fp32" : "bf16", recipe->head.x_row.format == FORMAT_FP32 ? "fp32" : "bf16",
             recipe->master == DTYPE_FP32 ? "fp32" : "bf16 with stochastic rounding");
}
