/* start.c: precision auto and what it becomes, saved configurations of earlier versions, what the model is told. (Resumes
 * that are refused or go on are in test_damage.sh and test_nvfp4_run.sh.) */
#include "start.h"
#include "test.h"

static Json *parsed(const char *text)
{
    Error error;
    Json *json = json_parse(text, strlen(text), "text", &error);
    if (!json) die("%s", error.text);
    return json;
}

/* What precision auto becomes for a model of this width, from a checkpoint's config.json (NULL: a new run). */
static void check_auto(Precision asked, int64_t hidden, bool native_fp4, const char *config, Precision wanted,
                       const char *why)
{
    Options o;
    Error error = {""};
    char reason[160] = "";
    Start from = {.dir = config ? "some/where" : NULL, .config = config ? parsed(config) : NULL};
    options_defaults(&o, VERB_TRAIN);
    CHECK(o.recipe.precision == PRECISION_AUTO, "the default is %s", precision_name(o.recipe.precision));
    o.recipe.precision = asked;
    o.hidden = hidden;
    o.heads = 8;
    CHECK(start_resolve(&from, &o, native_fp4, reason, &error) == 0, "%s", error.text);
    CHECK(o.recipe.precision == wanted, "%s", precision_name(o.recipe.precision));
    CHECK(strstr(reason, why) == reason, "wanted \"%s\", got \"%s\"", why, reason);
    options_free(&o);
    json_free(from.config);
}

static void test_auto(void)
{
    test_case("auto: by model and machine");
    check_auto(PRECISION_AUTO, 2048, true, NULL, PRECISION_NVFP4, "nvfp4: this device multiplies FP4");
    check_auto(PRECISION_AUTO, 2032, true, NULL, PRECISION_BF16, "bf16: hidden is below 2048");
    check_auto(PRECISION_AUTO, 2048, false, NULL, PRECISION_BF16, "bf16: this device only emulates NVFP4");
    test_case("auto: on a resume that of the checkpoint, wherever it goes on");
    check_auto(PRECISION_AUTO, 2048, true, "{\"options\": {\"precision\": \"bf16\"}}", PRECISION_BF16,
               "bf16: that of the checkpoint");
    check_auto(PRECISION_AUTO, 192, false, "{\"options\": {\"precision\": \"nvfp4\"}}", PRECISION_NVFP4,
               "nvfp4: that of the checkpoint");
    test_case("auto: a precision that was given stays");
    for (int p = PRECISION_FP32; p <= PRECISION_NVFP4; p++) {
        check_auto((Precision)p, 192, false, NULL, (Precision)p, "as asked");
        check_auto((Precision)p, 192, false, "{\"options\": {\"precision\": \"fp32\"}}", (Precision)p, "as asked");
    }
    Options o;
    Error error;
    char reason[160];
    Start from = {.dir = "some/where", .config = parsed("{\"options\": {\"precison\": \"bf16\"}}")};
    test_case("auto: a broken config.json of the checkpoint");
    options_defaults(&o, VERB_TRAIN);
    CHECK(start_resolve(&from, &o, true, reason, &error) == -1, "accepted");
    CHECK(strstr(error.text, "some/where: its config.json cannot be used: some/where: precison is not an option"), "%s",
          error.text);
    options_free(&o);
    json_free(from.config);
}

static void test_saved(void)
{
    Options o;
    ModelSpec spec;
    Error error = {""};
    test_case("a config.json from before NVFP4: what it lacks takes the defaults");
    Json *old = parsed("{\"options\": {\"layers\": 3, \"precision\": \"bf16\", \"master\": \"fp32\", \"batch\": 4, "
                       "\"steps\": 70}, \"census\": \"fprop, dgrad, wgrad of 24 linears: bf16\"}");
    CHECK(start_saved(&o, &spec, old, "dir", &error) == 0, "%s", error.text);
    CHECK(spec.recipe.precision == PRECISION_BF16 && spec.recipe.master == MASTER_FP32 && spec.config.L == 3 &&
              spec.B == 4 && spec.recipe.quantize_projections == 15 && spec.recipe.bf16_last_layers == -1 &&
              spec.recipe.switch_to_bf16_at == 1 && !spec.recipe.shadow && spec.recipe.steps == 70,
          "values");
    options_free(&o);
    json_free(old);

    test_case("a saved precision auto is no precision");
    Json *open = parsed("{\"options\": {\"layers\": 3}}");
    CHECK(start_saved(&o, &spec, open, "dir", &error) == -1, "accepted");
    CHECK(strstr(error.text, "dir: its config.json cannot be used: precision auto"), "%s", error.text);
    options_free(&o);
    json_free(open);

    test_case("the recipe is told the steps and whether there are shadow steps");
    options_defaults(&o, VERB_TRAIN);
    o.recipe.precision = PRECISION_NVFP4;
    o.steps = 123;
    for (o.shadow_every = 0; o.shadow_every < 2; o.shadow_every++) {
        CHECK(start_spec(&o, &spec, &error) == 0, "%s", error.text);
        CHECK(spec.recipe.steps == 123 && spec.recipe.shadow == (o.shadow_every > 0), "values");
    }
    options_free(&o);
}

int main(void)
{
    test_auto();
    test_saved();
    return test_done();
}
