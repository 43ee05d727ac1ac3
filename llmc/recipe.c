/* See recipe.h. */
#include "recipe.h"

#include <stdio.h>
#include <stdlib.h>

const char *precision_name(Precision precision) { return precision == PRECISION_FP32 ? "fp32" : "bf16"; }

static LinearFormats plain_formats(Format format)
{
    ViewFormat view = {format};
    return (LinearFormats){view, view, view, view, view, view};
}

int recipe_make(Recipe *recipe, const GPTConfig *config, Precision precision, Master master, Error *error)
{
    bool fp32 = precision == PRECISION_FP32;
    if (fp32 && master == MASTER_BF16)
        return error_set(error, "master bf16 under precision fp32 would round the weights that fp32 is meant to keep; "
                                "use --master fp32 or --precision bf16");

    LinearFormats formats = plain_formats(fp32 ? FORMAT_FP32 : FORMAT_BF16);
    *recipe = (Recipe){.phases = 1, .head = formats, .act = fp32 ? DTYPE_FP32 : DTYPE_BF16};
    recipe->master = fp32 || master == MASTER_FP32 ? DTYPE_FP32 : DTYPE_BF16;
    recipe->first_step = xcalloc(1, sizeof *recipe->first_step);
    recipe->formats = xcalloc((size_t)config->L * PROJ_COUNT, sizeof *recipe->formats);
    for (int64_t i = 0; i < config->L * PROJ_COUNT; i++) recipe->formats[i] = formats;
    return 0;
}

void recipe_free(Recipe *recipe)
{
    free(recipe->first_step);
    free(recipe->formats);
    *recipe = (Recipe){0};
}

void recipe_census(const Recipe *recipe, const GPTConfig *config, char *text, size_t bytes)
{
    int64_t fp32 = 0, products = config->L * PROJ_COUNT;
    for (int64_t i = 0; i < products; i++) fp32 += recipe->formats[i].x_row.format == FORMAT_FP32;
    snprintf(text, bytes, "fprop, dgrad, wgrad of %lld linears: %s; head %s; master weights %s", (long long)products,
             fp32 == products ? "fp32" : "bf16", recipe->head.x_row.format == FORMAT_FP32 ? "fp32" : "bf16",
             recipe->master == DTYPE_FP32 ? "fp32" : "bf16 with stochastic rounding");
}
