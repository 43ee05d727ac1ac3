/* recipe.c: the format of every layer x projection x copy, in the default recipe and with every single change; roles;
 * how many blocks stay in BF16; combinations that are refused; auto; phases; census; share; products. */
#include "recipe.h"
#include "philox.h"
#include "test.h"

#include <math.h>

static GPTConfig config_of(int64_t L)
{
    Error error;
    GPTConfig c = {
        .arch = ARCH_LLAMA, .L = L, .C = 192, .NH = 6, .V = 257, .T = 256, .tied = true, .rope_theta = 10000};
    if (config_finish(&c, &error)) die("%s", error.text);
    return c;
}

static RecipeSpec nvfp4(void)
{
    RecipeSpec spec = recipe_defaults(PRECISION_NVFP4, MASTER_DEFAULT);
    spec.steps = 100;
    return spec;
}

static Recipe make(const GPTConfig *c, const RecipeSpec *spec)
{
    Recipe recipe;
    Error error;
    if (recipe_make(&recipe, c, spec, &error)) die("%s", error.text);
    return recipe;
}

/* ---- formats, as one word a copy: "-" plain, else blocks, rounding and what else there is ---- */

static const char *word(const ViewFormat *v)
{
    static char text[64];
    const Nvfp4Form *f = &v->nvfp4;
    if (v->format != FORMAT_NVFP4) return v->format == FORMAT_BF16 ? "-" : "?";
    snprintf(text, sizeof text, "%s%s%s%s%s%s", f->block == SCALE_16X16 ? "16x16" : "1x16",
             f->rounding == ROUND_STOCHASTIC ? "s" : "n", v->rht ? "r" : "",
             f->tensor_scale == TENSOR_SCALE_POW2 ? "p" : "",
             f->four_over_six == FOUR_OVER_SIX_MAE   ? "4"
             : f->four_over_six == FOUR_OVER_SIX_MSE ? "5"
                                                     : "",
             f->headroom == 17.0f / 16 ? "h"
             : f->headroom == 1        ? ""
                                       : "?");
    return text;
}

static const ViewFormat *copy_of(const LinearFormats *f, int copy)
{
    const ViewFormat *copies[OPERAND_COPIES] = {
        [COPY_X_ROW] = &f->x_row,   [COPY_X_COL] = &f->x_col, [COPY_DY_ROW] = &f->dy_row,
        [COPY_DY_COL] = &f->dy_col, [COPY_W_ROW] = &f->w_row, [COPY_W_COL] = &f->w_col};
    return copies[copy];
}

/* "x_row w_row | dy_row w_col | dy_col x_col" of one linear layer; owned by the caller. */
static char *words(const LinearFormats *f)
{
    static const int order[] = {COPY_X_ROW, COPY_W_ROW, COPY_DY_ROW, COPY_W_COL, COPY_DY_COL, COPY_X_COL};
    char *text = xstrdup("");
    for (int i = 0; i < OPERAND_COPIES; i++) {
        char *longer = xformat("%s%s%s", text, i == 0 ? "" : i % 2 ? " " : " | ", word(copy_of(f, order[i])));
        free(text);
        text = longer;
    }
    return text;
}

/* Blocks first .. end - 1 have `wanted` in the projections of the set, all else is plain. */
static void check_table(const Recipe *r, int phase, int64_t first, int64_t end, unsigned projections,
                        const char *wanted)
{
    for (int64_t l = 0; l < r->L; l++)
        for (int j = 0; j < PROJ_COUNT; j++) {
            char *is = words(&r->formats[(phase * r->L + l) * PROJ_COUNT + j]);
            bool quantized = l >= first && l < end && projections >> j & 1;
            CHECK(!strcmp(is, quantized ? wanted : "- - | - - | - -"), "phase %d, block %d, projection %d: %s, not %s",
                  phase, (int)l, j, is, wanted);
            free(is);
        }
}

#define DEFAULT "1x16n 16x16n | 1x16s 16x16n | 1x16sr 1x16nr"

static void check_change(const char *name, RecipeSpec spec, const char *wanted)
{
    test_case(name);
    GPTConfig c = config_of(6);
    Recipe r = make(&c, &spec);
    CHECK(r.phases == 1, "%d phases", r.phases);
    check_table(&r, 0, 0, 5, 15, wanted);
    recipe_free(&r);
}

#define CHANGE(name, wanted, ...)                                                                                      \
    do {                                                                                                               \
        RecipeSpec spec = nvfp4();                                                                                     \
        __VA_ARGS__;                                                                                                   \
        check_change("formats: " name, spec, wanted);                                                                  \
    } while (0)

static void test_formats(void)
{
    check_change("formats: the default", nvfp4(), DEFAULT);
    CHANGE("fprop bf16", "- - | 1x16s 1x16n | 1x16sr 1x16nr", spec.fprop = PRODUCT_IN_BF16);
    CHANGE("dgrad bf16", "1x16n 16x16n | - - | 1x16sr 1x16nr", spec.dgrad = PRODUCT_IN_BF16);
    CHANGE("wgrad bf16", "1x16n 16x16n | 1x16s 16x16n | - -", spec.wgrad = PRODUCT_IN_BF16);
    CHANGE("weight_blocks 1x16", "1x16n 1x16n | 1x16s 1x16n | 1x16sr 1x16nr", spec.weight_blocks = WEIGHTS_1X16);
    CHANGE("rht off", "1x16n 16x16n | 1x16s 16x16n | 1x16s 1x16n", spec.rht = RHT_OFF);
    CHANGE("stochastic_rounding off", "1x16n 16x16n | 1x16n 16x16n | 1x16nr 1x16nr",
           spec.stochastic_rounding = STOCHASTIC_OFF);
    CHANGE("stochastic_rounding all", "1x16s 16x16s | 1x16s 16x16s | 1x16sr 1x16sr",
           spec.stochastic_rounding = STOCHASTIC_ALL);
    CHANGE("tensor_scale pow2", "1x16np 16x16np | 1x16sp 16x16np | 1x16srp 1x16nrp",
           spec.tensor_scale = TENSOR_SCALE_POW2);
    CHANGE("four_over_six activations", "1x16n4 16x16n | 1x16s 16x16n | 1x16sr 1x16nr",
           spec.four_over_six = FOUR_SIX_ACTIVATIONS);
    CHANGE("four_over_six weights", "1x16n 16x16n4 | 1x16s 16x16n4 | 1x16sr 1x16nr",
           spec.four_over_six = FOUR_SIX_WEIGHTS);
    CHANGE("four_over_six both, mse", "1x16n5 16x16n5 | 1x16s 16x16n5 | 1x16sr 1x16nr",
           spec.four_over_six = FOUR_SIX_BOTH;
           spec.four_over_six_metric = FOUR_SIX_MSE);
    CHANGE("four_over_six weights 1x16", "1x16n 1x16n4 | 1x16s 1x16n | 1x16sr 1x16nr",
           spec.four_over_six = FOUR_SIX_WEIGHTS;
           spec.weight_blocks = WEIGHTS_1X16);
    CHANGE("gradient_headroom", "1x16n 16x16n | 1x16sh 16x16n | 1x16srh 1x16nr",
           spec.gradient_headroom = HEADROOM_17_16);

    test_case("formats: first and last blocks, projections");
    GPTConfig c = config_of(8);
    RecipeSpec spec = nvfp4();
    spec.bf16_first_layers = 3;
    spec.bf16_last_layers = 0;
    spec.quantize_projections = 1u << PROJ_O | 1u << PROJ_DOWN;
    Recipe r = make(&c, &spec);
    check_table(&r, 0, 3, 8, spec.quantize_projections, DEFAULT);
    recipe_free(&r);

    test_case("formats: bf16 and fp32 are plain");
    for (int fp32 = 0; fp32 < 2; fp32++) {
        spec = recipe_defaults(fp32 ? PRECISION_FP32 : PRECISION_BF16, MASTER_DEFAULT);
        spec.switch_to_bf16_at = 0.5;
        spec.steps = 10;
        r = make(&c, &spec);
        CHECK(r.phases == 1 && !recipe_quantizes(&r) && !recipe_quantizes_tokens(&r), "%d phases", r.phases);
        CHECK(r.act == (fp32 ? DTYPE_FP32 : DTYPE_BF16) && r.master == r.act, "dtypes");
        if (!fp32) check_table(&r, 0, 0, 0, 0, "");
        for (int64_t i = 0; i < c.L * PROJ_COUNT; i++)
            for (int copy = 0; copy < OPERAND_COPIES; copy++)
                CHECK(copy_of(&r.formats[i], copy)->format == (fp32 ? FORMAT_FP32 : FORMAT_BF16), "a copy");
        recipe_free(&r);
    }
}

static void test_roles(void)
{
    test_case("the 24 copies of a block have 24 roles, the same in every block");
    GPTConfig c = config_of(6);
    RecipeSpec spec = nvfp4();
    Recipe r = make(&c, &spec);
    for (int64_t l = 0; l < 5; l++) {
        bool seen[OPERAND_ROLES] = {false};
        for (int j = 0; j < PROJ_COUNT; j++)
            for (int copy = 0; copy < OPERAND_COPIES; copy++) {
                int role = copy_of(&r.formats[l * PROJ_COUNT + j], copy)->role - ROLE_OPERAND;
                CHECK(role == j * OPERAND_COPIES + copy, "role %d", role);
                if (!CHECK(role >= 0 && role < OPERAND_ROLES && !seen[role], "role %d", role)) continue;
                seen[role] = true;
            }
    }
    recipe_free(&r);
}

static void test_last_layers(void)
{
    test_case("15% of 1 to 40 blocks, rounded up");
    for (int64_t L = 1; L <= 40; L++) {
        GPTConfig c = config_of(L);
        RecipeSpec spec = nvfp4();
        int64_t last = (int64_t)ceil(0.15 * (double)L - 1e-9);
        CHECK(recipe_resolved(&spec, L).bf16_last_layers == last, "%d blocks", (int)L);
        Error error;
        Recipe r;
        if (L == 1) {
            CHECK(recipe_make(&r, &c, &spec, &error) == -1 && strstr(error.text, "leave none of the 1 blocks"), "%s",
                  error.text);
            continue;
        }
        r = make(&c, &spec);
        check_table(&r, 0, 0, L - last, 15, DEFAULT);
        recipe_free(&r);
    }
}

static void refuses(RecipeSpec spec, const char *reason)
{
    GPTConfig c = config_of(6);
    Recipe r;
    Error error = {""};
    if (CHECK(recipe_make(&r, &c, &spec, &error) == -1, "accepted: %s", reason))
        CHECK(strstr(error.text, reason), "wanted \"%s\", got \"%s\"", reason, error.text);
    else
        recipe_free(&r);
}

#define REFUSES(reason, ...)                                                                                           \
    do {                                                                                                               \
        RecipeSpec spec = nvfp4();                                                                                     \
        __VA_ARGS__;                                                                                                   \
        refuses(spec, reason);                                                                                         \
    } while (0)

static void test_refused(void)
{
    test_case("combinations that mean nothing are refused with the reason");
    REFUSES("bf16_first_layers 3 and bf16_last_layers 3 leave none",
            spec.bf16_first_layers = spec.bf16_last_layers = 3);
    REFUSES("bf16_first_layers 5 and bf16_last_layers 1 leave none", spec.bf16_first_layers = 5);
    REFUSES("no product in nvfp4", spec.fprop = spec.dgrad = spec.wgrad = PRODUCT_IN_BF16);
    REFUSES("no product in nvfp4", spec.quantize_projections = 0);
    REFUSES("four_over_six with tensor_scale pow2", spec.four_over_six = FOUR_SIX_WEIGHTS;
            spec.tensor_scale = TENSOR_SCALE_POW2);
    REFUSES("four_over_six with stochastic_rounding all", spec.four_over_six = FOUR_SIX_BOTH;
            spec.stochastic_rounding = STOCHASTIC_ALL);
    REFUSES("four_over_six with fprop bf16", spec.four_over_six = FOUR_SIX_ACTIVATIONS; spec.fprop = PRODUCT_IN_BF16);
    REFUSES("no gradient is quantized", spec.gradient_headroom = HEADROOM_17_16;
            spec.dgrad = spec.wgrad = PRODUCT_IN_BF16);
    REFUSES("in BF16 from the start", spec.switch_to_bf16_at = 0.5; spec.fprop = PRODUCT_IN_BF16);
    REFUSES("none of the 20 steps comes after it", spec.switch_to_bf16_at = 0.99; spec.steps = 20);
    refuses(recipe_defaults(PRECISION_FP32, MASTER_BF16), "master bf16 under precision fp32");
    test_case("what nvfp4 would refuse is left alone in bf16");
    RecipeSpec spec = recipe_defaults(PRECISION_BF16, MASTER_DEFAULT);
    spec.bf16_last_layers = 99;
    spec.four_over_six = FOUR_SIX_BOTH;
    spec.tensor_scale = TENSOR_SCALE_POW2;
    GPTConfig c = config_of(6);
    Recipe r = make(&c, &spec);
    recipe_free(&r);
}

static void test_auto(void)
{
    test_case("auto: nvfp4 with FP4 hardware from hidden 2048 on");
    GPTConfig c = config_of(6);
    char reason[160];
    for (int native = 0; native < 2; native++)
        for (c.C = 2047; c.C <= 2048; c.C++) {
            bool fp4 = native && c.C == 2048;
            CHECK(recipe_auto(&c, native, reason) == (fp4 ? PRECISION_NVFP4 : PRECISION_BF16), "%s", reason);
            CHECK(strstr(reason, fp4      ? "nvfp4: this device multiplies FP4"
                                 : native ? "bf16: hidden is below 2048"
                                          : "bf16: this device only emulates"),
                  "%s", reason);
        }
}

static void test_resolved(void)
{
    test_case("resolved: equal recipes are equal in every field, others are not");
    RecipeSpec a = recipe_defaults(PRECISION_BF16, MASTER_DEFAULT), b = a;
    b.master = MASTER_BF16;
    b.rht = RHT_OFF;
    b.switch_to_bf16_at = 0.5;
    a = recipe_resolved(&a, 6), b = recipe_resolved(&b, 6);
    CHECK(a.master == MASTER_BF16 && b.master == MASTER_BF16, "masters");
    CHECK(a.rht == b.rht && a.switch_to_bf16_at == b.switch_to_bf16_at && a.bf16_last_layers == b.bf16_last_layers,
          "bf16 has no options of nvfp4");
    RecipeSpec fp32 = recipe_defaults(PRECISION_FP32, MASTER_DEFAULT);
    CHECK(recipe_resolved(&fp32, 6).master == MASTER_FP32, "master of fp32");
    a = b = nvfp4();
    b.bf16_last_layers = 1;
    b.four_over_six_metric = FOUR_SIX_MSE;
    b.switch_scope = SWITCH_ALL;
    a = recipe_resolved(&a, 6), b = recipe_resolved(&b, 6);
    CHECK(a.bf16_last_layers == 1 && b.four_over_six_metric == FOUR_SIX_MAE && b.switch_scope == SWITCH_FORWARD,
          "what means nothing");
    b = nvfp4();
    b.rht = RHT_OFF;
    b.four_over_six = FOUR_SIX_BOTH;
    b.four_over_six_metric = FOUR_SIX_MSE;
    b.switch_to_bf16_at = 0.5;
    b.switch_scope = SWITCH_ALL;
    b = recipe_resolved(&b, 6);
    CHECK(b.rht == RHT_OFF && b.four_over_six_metric == FOUR_SIX_MSE && b.switch_scope == SWITCH_ALL, "what means");
}

/* ---- phases ---- */

static void check_phases(double at, int64_t steps, SwitchScope scope, uint32_t switch_step, const char *after)
{
    GPTConfig c = config_of(6);
    RecipeSpec spec = nvfp4();
    spec.steps = steps;
    spec.switch_to_bf16_at = at;
    spec.switch_scope = scope;
    for (int shadow = 0; shadow < 2; shadow++) {
        spec.shadow = shadow;
        Recipe r = make(&c, &spec);
        int last = r.phases - 1 - shadow;
        CHECK(r.shadow_phase == (shadow ? last + 1 : 0), "shadow %d", r.shadow_phase);
        CHECK(last == (switch_step > 0), "%d phases", r.phases);
        check_table(&r, last, 0, 5, 15, after);
        if (shadow) check_table(&r, r.shadow_phase, 0, 0, 0, "");
        for (uint32_t step = 0; step <= (uint32_t)steps; step++)
            CHECK(recipe_phase(&r, step) == (step >= switch_step ? last : 0), "step %u", step);
        CHECK(recipe_phase(&r, UINT32_MAX - 1) == last, "the last step of all");
        recipe_free(&r);
    }
}

static void test_phases(void)
{
#define BACKWARD_ONLY "- - | 1x16s 1x16n | 1x16sr 1x16nr"
    test_case("phases: the switch's step and what it leaves");
    check_phases(0.5, 10, SWITCH_FORWARD, 5, BACKWARD_ONLY);
    check_phases(0.5, 10, SWITCH_ALL, 5, "- - | - - | - -");
    check_phases(0.5, 11, SWITCH_FORWARD, 6, BACKWARD_ONLY);
    check_phases(0.07, 100, SWITCH_FORWARD, 7, BACKWARD_ONLY);
    check_phases(0, 10, SWITCH_FORWARD, 0, BACKWARD_ONLY);
    check_phases(0, 10, SWITCH_ALL, 0, "- - | - - | - -");
    check_phases(1e-9, 10, SWITCH_ALL, 0, "- - | - - | - -");
    for (int k = 1; k < 100; k++) check_phases(k / 100.0, 100, SWITCH_ALL, (uint32_t)k, "- - | - - | - -");

    test_case("phases: without a switch and in bf16; shadow");
    GPTConfig c = config_of(6);
    RecipeSpec spec = nvfp4(), bf16 = recipe_defaults(PRECISION_BF16, MASTER_FP32);
    spec.shadow = bf16.shadow = true;
    Recipe r = make(&c, &spec), b = make(&c, &bf16);
    CHECK(r.phases == 2 && r.shadow_phase == 1 && recipe_phase(&r, UINT32_MAX) == 0, "nvfp4: %d", r.phases);
    CHECK(b.phases == 2 && b.shadow_phase == 1 && recipe_phase(&b, UINT32_MAX) == 0, "bf16: %d", b.phases);
    check_table(&r, 0, 0, 5, 15, DEFAULT);
    check_table(&b, 1, 0, 0, 0, "");
    recipe_free(&r);
    recipe_free(&b);

    test_case("phases: a switch of the forward where only fprop was nvfp4 leaves bf16");
    spec = nvfp4();
    spec.dgrad = spec.wgrad = PRODUCT_IN_BF16;
    spec.four_over_six = FOUR_SIX_BOTH;
    spec.switch_to_bf16_at = 0.5;
    r = make(&c, &spec);
    CHECK(recipe_quantizes(&r) && !recipe_quantizes_tokens(&r), "what is quantized");
    check_table(&r, 1, 0, 0, 0, "");
    recipe_free(&r);
}

/* ---- census, share, products ---- */

static void check_census(const RecipeSpec *spec, int64_t L, const char *wanted)
{
    GPTConfig c = config_of(L);
    Recipe r = make(&c, spec);
    char text[CENSUS_BYTES], cut[20];
    recipe_census(&r, &c, text, sizeof text);
    CHECK(!strcmp(text, wanted), "\n  %s\nnot\n  %s", text, wanted);
    recipe_census(&r, &c, cut, sizeof cut);
    CHECK(strlen(cut) == 19 && !strncmp(cut, text, 19), "cut: %s", cut);
    recipe_free(&r);
}

static void test_census(void)
{
    test_case("census, in short");
    RecipeSpec spec = nvfp4();
    check_census(
        &spec, 6,
        "nvfp4 in blocks 0-4 of 6 (qkv o up down: fprop dgrad wgrad), 83% of the blocks' FLOPs; bf16: block 5, "
        "embedding, head; master weights bf16 with stochastic rounding");
    spec.bf16_first_layers = 2;
    spec.wgrad = PRODUCT_IN_BF16;
    spec.quantize_projections = 1u << PROJ_O;
    spec.master = MASTER_FP32;
    spec.switch_to_bf16_at = 0.25;
    spec.switch_scope = SWITCH_ALL;
    spec.shadow = true;
    check_census(&spec, 4,
                 "nvfp4 in block 2 of 4 (o: fprop dgrad), 1% of the blocks' FLOPs; bf16: blocks 0-1 and 3, embedding, "
                 "head; from step 26: bf16 throughout; master weights fp32");
    spec = nvfp4();
    spec.bf16_last_layers = 0;
    spec.switch_to_bf16_at = 0.5;
    check_census(&spec, 2,
                 "nvfp4 in blocks 0-1 of 2 (qkv o up down: fprop dgrad wgrad), 100% of the blocks' FLOPs; bf16: "
                 "embedding, head; from step 51: nvfp4 in blocks 0-1 of 2 (qkv o up down: dgrad wgrad); master weights "
                 "bf16 with stochastic rounding");
    spec = recipe_defaults(PRECISION_BF16, MASTER_DEFAULT);
    check_census(&spec, 2, "bf16 throughout; master weights bf16 with stochastic rounding");
    spec = recipe_defaults(PRECISION_FP32, MASTER_DEFAULT);
    check_census(&spec, 2, "fp32 throughout; master weights fp32");

    test_case("census, in full");
    GPTConfig c = config_of(6);
    spec = nvfp4();
    spec.four_over_six = FOUR_SIX_ACTIVATIONS;
    spec.gradient_headroom = HEADROOM_17_16;
    spec.quantize_projections = 1u << PROJ_QKV | 1u << PROJ_UP;
    spec.switch_to_bf16_at = 0.5;
    spec.switch_scope = SWITCH_ALL;
    Recipe r = make(&c, &spec);
    Json *table = json_new_array();
    recipe_census_table(&r, table);
    char *text = json_print(table, false);
    CHECK(json_count(table) == 3 * 3 + 3 + 3, "%d rows", (int)json_count(table));
    static const char *const rows[] = {
        "[{\"from_step\":1,\"blocks\":\"0-4\",\"projections\":\"qkv up\",\"product\":\"fprop\",\"first\":\"X nvfp4 "
        "1x16 "
        "nearest, tensor scale amax, 4/6 mae\",\"second\":\"W nvfp4 16x16 nearest, tensor scale amax\"}",
        "\"first\":\"dY nvfp4 1x16 RHT stochastic, tensor scale amax, headroom 17/16\",\"second\":\"X nvfp4 1x16 RHT "
        "nearest, tensor scale amax\"}",
        "{\"from_step\":1,\"blocks\":\"0-4\",\"projections\":\"o down\",\"product\":\"fprop\",\"first\":\"X bf16\"",
        "{\"from_step\":1,\"blocks\":\"5\",\"projections\":\"qkv o up down\",\"product\":\"fprop\",\"first\":\"X "
        "bf16\"",
        "{\"from_step\":51,\"blocks\":\"0-5\",\"projections\":\"qkv o up down\",\"product\":\"wgrad\",\"first\":\"dY "
        "bf16\"",
        "{\"from_step\":1,\"blocks\":\"head\",\"product\":\"wgrad\",\"first\":\"dY bf16\",\"second\":\"X bf16\"}]"};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        CHECK(strstr(text, rows[i]), "no %s in %s", rows[i], text);
    free(text);
    json_free(table);
    recipe_free(&r);
}

static void test_share(void)
{
    test_case("share of the blocks' FLOPs: 83% of 6 and 12 blocks, 75% of 8");
    static const struct {
        int64_t L;
        double share;
    } rows[] = {{6, 5.0 / 6}, {12, 10.0 / 12}, {8, 6.0 / 8}, {20, 17.0 / 20}};
    for (int i = 0; i < 4; i++) {
        GPTConfig c = config_of(rows[i].L);
        RecipeSpec spec = nvfp4();
        spec.switch_to_bf16_at = 0.5;
        Recipe r = make(&c, &spec);
        CHECK(fabs(recipe_fp4_share(&r, &c, 0) - rows[i].share) < 1e-12, "%g", recipe_fp4_share(&r, &c, 0));
        CHECK(fabs(recipe_fp4_share(&r, &c, 1) - rows[i].share * 2 / 3) < 1e-12, "%g", recipe_fp4_share(&r, &c, 1));
        recipe_free(&r);
    }
    test_case("share of single projections and products, by their sizes");
    GPTConfig c = config_of(6);
    const double size[PROJ_COUNT] = {3 * 192 * 192, 192 * 192, 2.0 * 192 * 512, 192 * 512}; /* ffn: 8/3 of 192 */
    double all = size[0] + size[1] + size[2] + size[3];
    for (int j = 0; j < PROJ_COUNT; j++) {
        RecipeSpec spec = nvfp4();
        spec.quantize_projections = 1u << j;
        spec.bf16_last_layers = 0;
        spec.dgrad = PRODUCT_IN_BF16;
        Recipe r = make(&c, &spec);
        CHECK(fabs(recipe_fp4_share(&r, &c, 0) - size[j] / all * 2 / 3) < 1e-12, "projection %d: %g", j,
              recipe_fp4_share(&r, &c, 0));
        recipe_free(&r);
    }
}

static void check_products(const Recipe *r, const GPTConfig *c, int phase, Recompute recompute,
                           const int64_t wanted[PRODUCT_COUNT][2])
{
    ProductCounts n = recipe_products(r, c, phase, recompute, 3, 2);
    for (int p = 0; p < PRODUCT_COUNT; p++)
        CHECK(n.count[p][FORMAT_NVFP4] == 3 * wanted[p][0] && n.count[p][FORMAT_BF16] == 3 * wanted[p][1] &&
                  !n.count[p][FORMAT_FP32] && !n.count[p][FORMAT_NONE],
              "%s: %d %d", product_name(p), (int)n.count[p][FORMAT_NVFP4], (int)n.count[p][FORMAT_BF16]);
}

static void test_products(void)
{
    test_case("products of 3 micro-steps with 2 chunks: nvfp4, bf16");
    GPTConfig c = config_of(6);
    RecipeSpec spec = nvfp4();
    spec.switch_to_bf16_at = 0.5;
    spec.shadow = true;
    Recipe r = make(&c, &spec);
    static const int64_t all[][2] = {{20, 6}, {20, 6}, {20, 6}}, block[][2] = {{35, 9}, {20, 6}, {20, 6}},
                         backward[][2] = {{0, 26}, {20, 6}, {20, 6}}, shadow[][2] = {{0, 44}, {0, 26}, {0, 26}};
    check_products(&r, &c, 0, RECOMPUTE_NONE, all);
    check_products(&r, &c, 0, RECOMPUTE_OPERANDS, all);
    check_products(&r, &c, 0, RECOMPUTE_BLOCK, block);
    check_products(&r, &c, 1, RECOMPUTE_NONE, backward);
    check_products(&r, &c, 2, RECOMPUTE_BLOCK, shadow);
    recipe_free(&r);
    spec = recipe_defaults(PRECISION_FP32, MASTER_DEFAULT);
    r = make(&c, &spec);
    CHECK(recipe_products(&r, &c, 0, RECOMPUTE_NONE, 1, 1).count[PRODUCT_DGRAD][FORMAT_FP32] == 25, "fp32");
    recipe_free(&r);
}

int main(void)
{
    test_formats();
    test_roles();
    test_last_layers();
    test_refused();
    test_auto();
    test_resolved();
    test_phases();
    test_census();
    test_share();
    test_products();
    return test_done();
}
