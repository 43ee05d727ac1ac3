/* options.c: every option from the command line and from JSON and back, ranges, verbs, precedence, what must hold
 * between options, the help screens; config files made by chance. Over 500 lines because every option stands here. */
#include "options.h"
#include "test.h"
#include "test_capture.h"
#include "test_files.h"

enum { ARGS_MAX = 24 };

/* Parses a command line given as one text, split at spaces ("~" stands for a space within a value). */
static int parse(Options *options, const char *line, bool *help, Error *error)
{
    char *copy = xformat("train_gpt %s", line), *argv[ARGS_MAX];
    int argc = 0;
    for (char *word = strtok(copy, " "); word && argc < ARGS_MAX; word = strtok(NULL, " ")) {
        for (char *c = word; *c; c++)
            if (*c == '~') *c = ' ';
        argv[argc++] = word;
    }
    error->text[0] = 0;
    int result = options_parse(options, argc, argv, help, error);
    free(copy);
    return result;
}

static bool accepts(Options *options, const char *line)
{
    Error error;
    bool help;
    return CHECK(parse(options, line, &help, &error) == 0 && !help, "%s: %s", line, error.text);
}

static void refuses(const char *line, const char *message)
{
    Error error;
    Options options;
    bool help;
    CHECK(parse(&options, line, &help, &error) == -1, "accepted: %s", line);
    CHECK(strstr(error.text, message), "%s: wanted \"%s\", got \"%s\"", line, message, error.text);
    options_free(&options);
}

/* Every option of `train`: a value that is not the default, as JSON (a string without its quotes on the command line).
 */
static const struct {
    const char *key, *json;
} TRAIN_OPTIONS[] = {
    {"arch", "\"qwen3\""},
    {"layers", "2"},
    {"hidden", "96"},
    {"heads", "12"},
    {"kv_heads", "3"},
    {"head_dim", "64"},
    {"ffn", "100"},
    {"vocab", "300"},
    {"seq_len", "64"},
    {"tie_embeddings", "false"},
    {"norm_eps", "0.125"},
    {"rope_theta", "500000"},
    {"rope_scaling_factor", "8"},
    {"rope_scaling_low_freq_factor", "2"},
    {"rope_scaling_high_freq_factor", "16"},
    {"rope_scaling_original_context", "4096"},
    {"init_std", "0.5"},
    {"embedding_init_std", "0.25"},
    {"batch", "4"},
    {"global_batch_tokens", "16384"},
    {"steps", "123"},
    {"lr", "0.375"},
    {"lr_schedule", "\"wsd\""},
    {"warmup_steps", "7"},
    {"final_lr_fraction", "0.5"},
    {"wsd_decay_fraction", "0.75"},
    {"weight_decay", "0"},
    {"beta1", "0.5"},
    {"beta2", "0.75"},
    {"eps", "0.0009765625"},
    {"grad_clip", "0"},
    {"seed", "9007199254740991"},
    {"precision", "\"nvfp4\""},
    {"master", "\"fp32\""},
    {"bf16_first_layers", "1"},
    {"bf16_last_layers", "2"},
    {"quantize_projections", "\"qkv,down\""},
    {"fprop", "\"bf16\""},
    {"dgrad", "\"bf16\""},
    {"wgrad", "\"bf16\""},
    {"weight_blocks", "\"1x16\""},
    {"rht", "\"off\""},
    {"stochastic_rounding", "\"all\""},
    {"tensor_scale", "\"pow2\""},
    {"four_over_six", "\"weights\""},
    {"four_over_six_metric", "\"mse\""},
    {"gradient_headroom", "\"17/16\""},
    {"switch_to_bf16_at", "0.75"},
    {"switch_scope", "\"all\""},
    {"recompute", "\"operands\""},
    {"document_mask", "true"},
    {"eot_token", "5"},
    {"train_data", "\"a*.bin,b.bin\""},
    {"val_data", "\"v.bin\""},
    {"val_every", "3"},
    {"val_batches", "4"},
    {"sample_every", "5"},
    {"sample_tokens", "6"},
    {"checkpoint_every", "7"},
    {"checkpoint_async", "true"},
    {"tune_gemm", "true"},
    {"profile", "true"},
    {"native_rounding", "true"},
    {"keep_checkpoints", "8"},
    {"hash_every", "9"},
    {"telemetry_every", "10"},
    {"shadow_every", "11"},
    {"telemetry_table", "true"},
    {"run_dir", "\"runs/x\""},
    {"resume", "\"auto\""},
    {"threads", "3"},
    {"isa", "\"avx2\""},
    {"zero_stage", "3"},
    {"deterministic_reduction", "false"},
    {"straggler_every", "7"},
    {"hang_timeout_s", "5.5"},
};
enum { TRAIN_COUNT = sizeof TRAIN_OPTIONS / sizeof TRAIN_OPTIONS[0] };

/* The saved form of one option, as JSON text; owned by the caller. */
static char *saved_value(const Options *options, const char *key)
{
    Json *object = json_new_object();
    options_to_json(options, object);
    const Json *member = json_get(object, key);
    char *text = member ? json_print(member, false) : xstrdup("(absent)");
    json_free(object);
    return text;
}

static char *saved_all(const Options *options)
{
    Json *object = json_new_object();
    options_to_json(options, object);
    char *text = json_print(object, true);
    json_free(object);
    return text;
}

static void check_saved(const Options *options, const char *key, const char *json)
{
    char *text = saved_value(options, key);
    CHECK(strcmp(text, json) == 0, "%s is %s, not %s", key, text, json);
    free(text);
}

static int from_text(Options *options, const char *text, Error *error)
{
    Json *json = json_parse(text, strlen(text), "text", error);
    int result = json ? options_from_json(options, json, "text", error) : -1;
    json_free(json);
    return result;
}

/* key=value with the JSON string's quotes taken off. */
static char *assignment(const char *form, const char *key, const char *json)
{
    size_t length = strlen(json), quoted = json[0] == '"';
    char *value = xformat("%.*s", (int)(length - 2 * quoted), json + quoted);
    char *line = xformat(form, key, value);
    free(value);
    return line;
}

static void test_every_option(void)
{
    Options defaults;
    options_defaults(&defaults, VERB_TRAIN);
    for (int i = 0; i < TRAIN_COUNT; i++) {
        const char *key = TRAIN_OPTIONS[i].key, *json = TRAIN_OPTIONS[i].json;
        Options options;
        Error error = {""};
        test_case(key);
        char *before = saved_value(&defaults, key);
        CHECK(strcmp(before, json) != 0, "the test sets the default");
        for (int form = 0; form < 2; form++) {
            char *line = form ? assignment("--train_data x --%s %s", key, json)
                              : assignment("train --train_data=x --%s=%s", key, json);
            if (accepts(&options, line)) check_saved(&options, key, json);
            options_free(&options);
            free(line);
        }
        options_defaults(&options, VERB_TRAIN);
        char *object = xformat("{\"%s\": %s}", key, json);
        CHECK(from_text(&options, object, &error) == 0, "%s", error.text);
        check_saved(&options, key, json);
        options_free(&options);
        free(object);
        free(before);
    }
    options_free(&defaults);
}

static void test_round_trip(void)
{
    Options options, back;
    Error error = {""};
    test_case("saved options read back are the same, bare or in a config.json");
    options_defaults(&options, VERB_TRAIN);
    for (int i = 0; i < TRAIN_COUNT; i++) {
        char *object = xformat("{\"%s\": %s}", TRAIN_OPTIONS[i].key, TRAIN_OPTIONS[i].json);
        CHECK(from_text(&options, object, &error) == 0, "%s", error.text);
        free(object);
    }
    options.lr = 1.0 / 3;
    options.overwrite = options.allow_recipe_change = true;
    char *text = saved_all(&options), *wrapped = xformat("{\"isa\": \"amx\", \"options\": %s}", text);
    CHECK(strstr(text, "overwrite") == NULL, "overwrite is saved");
    CHECK(strstr(text, "allow_recipe_change") == NULL, "allow_recipe_change is saved");
    for (int form = 0; form < 2; form++) {
        options_defaults(&back, VERB_TRAIN);
        CHECK(from_text(&back, form ? wrapped : text, &error) == 0, "%s", error.text);
        char *again = saved_all(&back);
        CHECK(strcmp(text, again) == 0, "another text");
        CHECK(back.lr == options.lr && back.seed == options.seed, "numbers lost digits");
        free(again);
        options_free(&back);
    }
    options_free(&options);
    free(text);
    free(wrapped);
}

static void test_other_verbs(void)
{
    Options o;
    test_case("the options of eval, generate, tokenize, quantize, export, compare");
    if (accepts(&o, "eval --checkpoint c --data d --batch 3"))
        CHECK(o.verb == VERB_EVAL && !strcmp(o.checkpoint, "c") && !strcmp(o.data, "d") && o.eval_batch == 3, "eval");
    options_free(&o);
    if (accepts(&o, "eval --checkpoint c --hellaswag h"))
        CHECK(!*o.data && !strcmp(o.hellaswag, "h"), "eval of questions only");
    options_free(&o);
    if (accepts(&o, "generate --checkpoint c --prompt In~the --tokens 9 --temperature 0 --top_k 0 --seed 5"))
        CHECK(o.verb == VERB_GENERATE && !strcmp(o.prompt, "In the") && o.tokens == 9 && o.temperature == 0 &&
                  o.top_k == 0 && o.seed == 5,
              "generate");
    options_free(&o);
    if (accepts(&o, "tokenize --input a,b --output c.bin"))
        CHECK(o.verb == VERB_TOKENIZE && !strcmp(o.input, "a,b") && !strcmp(o.output, "c.bin"), "tokenize");
    options_free(&o);
    if (accepts(&o,
                "quantize --input x.safetensors --tensor t --output q --blocks 16x16 --rounding stochastic --rht on "
                "--transpose on --tensor_scale pow2 --seed 7 --row0 9"))
        CHECK(!strcmp(o.tensor, "t") && o.blocks == SCALE_16X16 && o.rounding == ROUND_STOCHASTIC && o.quantize_rht &&
                  o.transpose && o.recipe.tensor_scale == TENSOR_SCALE_POW2 && o.seed == 7 && o.row0 == 9,
              "quantize");
    options_free(&o);
    if (accepts(&o, "quantize --input x --output q --rows 3 --cols 5 --four_over_six mse"))
        CHECK(o.rows == 3 && o.cols == 5 && o.quantize_four_over_six == FOUR_OVER_SIX_MSE && o.blocks == SCALE_1X16 &&
                  o.rounding == ROUND_NEAREST && !o.quantize_rht && !o.transpose && o.seed == 1 &&
                  o.recipe.tensor_scale == TENSOR_SCALE_AMAX,
              "defaults of quantize");
    options_free(&o);
    if (accepts(&o, "export --checkpoint c --output d --format nvfp4"))
        CHECK(!strcmp(o.output, "d") && o.format == EXPORT_NVFP4, "export");
    options_free(&o);
    if (accepts(&o, "export --checkpoint c --output d")) CHECK(o.format == EXPORT_BF16, "default of export");
    options_free(&o);
    if (accepts(&o, "compare r/a,r/b --max_gap 0.5 r/c --block_steps 20 --last_fraction 0.2"))
        CHECK(o.verb == VERB_COMPARE && !strcmp(o.compare_a, "r/a,r/b") && !strcmp(o.compare_b, "r/c") &&
                  o.max_gap == 0.5 && o.block_steps == 20 && o.last_fraction == 0.2,
              "compare");
    options_free(&o);
    if (accepts(&o, "compare a b")) CHECK(o.max_gap < 0 && o.block_steps == 10, "defaults of compare");
    options_free(&o);
    refuses("quantize --input x", "quantize needs --output");
    refuses("export --output x", "export needs --checkpoint");
    refuses("tokenize --output x", "tokenize needs --input");
    test_case("what a resume may change");
    CHECK(options_resume_rule("arch") == RESUME_FIXED && options_resume_rule("master") == RESUME_FIXED, "fixed");
    CHECK(options_resume_rule("precision") == RESUME_RECIPE && options_resume_rule("switch_scope") == RESUME_RECIPE &&
              options_resume_rule("quantize_projections") == RESUME_RECIPE &&
              options_resume_rule("rht") == RESUME_RECIPE,
          "recipe");
    CHECK(options_resume_rule("lr") == RESUME_FREE && options_resume_rule("batch") == RESUME_FREE, "free");
    CHECK(options_resume_rule("threads") == RESUME_SILENT && options_resume_rule("run_dir") == RESUME_SILENT &&
              options_resume_rule("init_std") == RESUME_SILENT,
          "silent");
    test_case("keys of two meanings: each verb has its own");
    if (accepts(&o, "--train_data x --rht off --four_over_six both"))
        CHECK(o.recipe.rht == RHT_OFF && o.recipe.four_over_six == FOUR_SIX_BOTH && !o.quantize_rht &&
                  !o.quantize_four_over_six,
              "train");
    options_free(&o);
    refuses("--train_data x --rht on", "--rht on: allowed are wgrad|off");
    refuses("--train_data x --four_over_six mae", "--four_over_six mae: allowed are off|activations|weights|both");
    refuses("quantize --input x --output y --rht wgrad", "--rht wgrad: allowed are true, 1, on, false, 0, off");
    refuses("quantize --input x --output y --four_over_six both", "--four_over_six both: allowed are off|mae|mse");
    refuses("eval --rht off", "--rht is not an option of eval; it belongs to train, plan");
    test_case("sets");
    if (accepts(&o, "plan --quantize_projections down,qkv,down"))
        CHECK(o.recipe.quantize_projections == (1u << PROJ_QKV | 1u << PROJ_DOWN), "%u", o.recipe.quantize_projections);
    check_saved(&o, "quantize_projections", "\"qkv,down\"");
    options_free(&o);
    refuses("plan --quantize_projections qkv,k", "--quantize_projections qkv,k: allowed are qkv|o|up|down");
    refuses("plan --quantize_projections qkv,,o", "--quantize_projections qkv,,o: allowed are");
    refuses("plan --quantize_projections=", "--quantize_projections : allowed are");
    refuses("plan --quantize_projections qkv|o", "--quantize_projections qkv|o: allowed are");
    test_case("positional and missing arguments");
    refuses("compare a", "compare needs two runs");
    refuses("compare a b c", "unexpected argument \"c\"");
    refuses("train --train_data x y", "unexpected argument \"y\"");
    refuses("eval --checkpoint c", "eval needs --data");
    refuses("train --hellaswag h --train_data d", "belongs to eval");
    refuses("generate", "generate needs --checkpoint");
    refuses("tokenize --input a", "tokenize needs --output");
    refuses("quantize --input a", "quantize needs --output");
    refuses("quantize --input a --output b", "quantize needs --rows and --cols");
    refuses("quantize --input a --output b --rows 4", "quantize needs --rows and --cols");
    refuses("quantize --input a --output b --rows 4 --cols 4 --tensor t", "--tensor is for a .safetensors file");
    refuses("quantize --input a.safetensors --output b", "quantize needs --tensor NAME");
    refuses("quantize --input a.safetensors --tensor t --cols 4 --output b", "--rows and --cols are for raw float32");
    refuses("quantize --input a --output b --rows 4 --cols 4 --four_over_six mae --rounding stochastic",
            "four_over_six with rounding stochastic");
    refuses("quantize --input a --output b --rows 4 --cols 4 --four_over_six mae --tensor_scale pow2",
            "four_over_six with tensor_scale pow2");
    refuses("export --checkpoint c", "export needs --output");
    refuses("export --output d", "export needs --checkpoint");
    refuses("train", "train needs --train_data");
    refuses("--train_data x --run_dir=", "train needs --run_dir");
}

static void test_words(void)
{
    Options o;
    test_case("unknown keys and verbs name the nearest");
    refuses("--precison bf16", "--precison is not an option; the nearest is precision");
    refuses("--precison=bf16", "nearest is precision");
    refuses("--warmup-steps 3", "nearest is warmup_steps");
    refuses("--confg x.json", "nearest is config");
    refuses("generate --temprature 1", "nearest is temperature");
    refuses("plan --tempreture 1", "--tempreture is not an option; the nearest is "); /* not plan's: another key */
    refuses("-lr 3", "\"-lr\": options are written --key value");
    refuses("--train_data x -lr", "unexpected argument \"-lr\"");
    refuses("--", "-- is not an option");
    refuses("--=3", "-- is not an option");
    refuses("--aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 1",
            "is not an option");
    refuses("trian", "\"trian\" is not a verb; the nearest is train");
    refuses("generates --tokens 3", "nearest is generate");
    test_case("a key of another verb is refused with the verbs that take it");
    refuses("generate --lr 3", "--lr is not an option of generate; it belongs to train");
    refuses("train --prompt x", "--prompt is not an option of train; it belongs to generate");
    refuses("eval --layers 3", "it belongs to train, plan");
    refuses("compare a b --threads 3", "it belongs to train, eval, generate, plan");
    test_case("booleans: all words, and alone");
    static const char *const yes[] = {"--overwrite", "--overwrite=true", "--overwrite 1", "--overwrite on"};
    static const char *const no[] = {"--overwrite=0", "--overwrite false", "--overwrite off",
                                     "--overwrite --overwrite=off"};
    for (int i = 0; i < 8; i++) {
        char *line = xformat("%s --train_data x", i < 4 ? yes[i] : no[i - 4]);
        if (accepts(&o, line)) CHECK(o.overwrite == (i < 4), "%s", line);
        options_free(&o);
        free(line);
    }
    if (accepts(&o, "--train_data x --allow_recipe_change")) CHECK(o.allow_recipe_change, "allow_recipe_change");
    options_free(&o);
    refuses("--train_data x --overwrite yes", "--overwrite yes: allowed are true, 1, on, false, 0, off");
    test_case("values that are missing or look like keys");
    refuses("--train_data x --lr", "--lr needs a value");
    refuses("--train_data --lr 1", "--train_data needs a value");
    if (accepts(&o, "generate --checkpoint x --prompt=--what=now"))
        CHECK(!strcmp(o.prompt, "--what=now"), "%s", o.prompt);
    options_free(&o);
}

static void test_ranges(void)
{
    static const char *const bad[][2] = {
        {"lr abc", "--lr abc: allowed are numbers from 0 to 1000"},
        {"lr 1e-3x", "--lr 1e-3x: allowed"},
        {"lr nan", "--lr nan: allowed"},
        {"lr -nan", "--lr -nan: allowed"},
        {"lr inf", "--lr inf: allowed"},
        {"lr 1e999", "--lr 1e999: allowed"},
        {"lr -1e-9", "--lr -1e-9: allowed"},
        {"lr=", "--lr : allowed"},
        {"lr=~1", "--lr  1: allowed"},
        {"steps 0", "--steps 0: allowed are whole numbers from 1 to 2147483647"},
        {"steps 1.5", "--steps 1.5: allowed"},
        {"steps 10k", "--steps 10k: allowed"},
        {"steps 2147483648", "--steps 2147483648: allowed"},
        {"steps 99999999999999999999999", "--steps 99999999999999999999999: allowed"},
        {"steps -", "--steps -: allowed"},
        {"seed -1", "--seed -1: allowed are whole numbers from 0 to 9007199254740992"},
        {"beta1 1", "--beta1 1: allowed are numbers from 0 to 0.999999"},
        {"eps 0", "--eps 0: allowed"},
        {"final_lr_fraction 1.01", "--final_lr_fraction 1.01: allowed are numbers from 0 to 1"},
        {"vocab 16777217", "--vocab 16777217: allowed are whole numbers from 1 to 16777216"},
        {"precision fp16", "--precision fp16: allowed are fp32|bf16|nvfp4|auto"},
        {"switch_to_bf16_at 1.5", "--switch_to_bf16_at 1.5: allowed are numbers from 0 to 1"},
        {"bf16_last_layers -2", "--bf16_last_layers -2: allowed are whole numbers from -1"},
        {"gradient_headroom 2", "--gradient_headroom 2: allowed are 1|17/16"},
        {"precision fp", "--precision fp: allowed"},
        {"precision fp32|bf16", "--precision fp32|bf16: allowed"},
        {"precision=", "--precision : allowed"},
        {"isa sse", "--isa sse: allowed are auto|portable|avx2|avx512|amx"},
        {"master fp16", "--master fp16: allowed are default|bf16|fp32"},
    };
    test_case("values out of range, with rubbish behind, not numbers: key, value, what is allowed");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char *line = xformat("--train_data x --%s", bad[i][0]);
        refuses(line, bad[i][1]);
        free(line);
    }
    Options o;
    test_case("the ends of ranges are in");
    if (accepts(&o, "--train_data x --steps 2147483647 --lr 1000 --seed 9007199254740992 --eot_token -1 --val_every 0"))
        CHECK(o.steps == 2147483647 && o.lr == 1000 && o.seed == 9007199254740992 && o.eot_token == -1, "values");
    options_free(&o);
}

static void test_between(void)
{
    test_case("what must hold between options");
    refuses("--train_data x --global_batch_tokens 3000",
            "global_batch_tokens 3000 is not a multiple of batch x seq_len = 2048");
    refuses("--train_data x --batch 1048576 --seq_len 4096", "is more than 2147483647 tokens");
    refuses("--train_data x --eot_token 257", "eot_token 257 is not below vocab 257");
    refuses("--train_data x --heads 5", "heads 5 does not divide hidden 192");
    refuses("plan --kv_heads 4", "kv_heads 4 does not divide heads 6");
    Options o;
    if (accepts(&o, "--train_data x --steps 50 --warmup_steps 100 --global_batch_tokens 4096"))
        CHECK(o.steps == 50, "steps");
    options_free(&o);
}

/* A config file with this text; accepts or refuses lines whose FILE stands for it. */
static const char *config_path;
static char *config_line(const char *text, const char *line)
{
    test_write_file(config_path, text, strlen(text));
    return xformat(line, config_path);
}

static void refuses_config(const char *text, const char *message)
{
    char *line = config_line(text, "--train_data x --config %s");
    refuses(line, message);
    free(line);
}

static void test_config_file(void)
{
    static const char *const lines[] = {"--config %s --train_data x --lr 0.5 --lr 0.25",
                                        "--lr 0.25 --train_data x --config %s",
                                        "--lr=0.25 --config /nowhere --train_data x --config=%s"};
    test_case("the command line wins wherever --config stands; given twice, the last wins");
    for (int i = 0; i < 3; i++) {
        Options o;
        char *line = config_line("{\"lr\": 0.125, \"steps\": 777, \"train_data\": \"y\"}", lines[i]);
        if (accepts(&o, line)) CHECK(o.lr == 0.25 && o.steps == 777 && !strcmp(o.train_data, "x"), "%s", line);
        options_free(&o);
        free(line);
    }
    test_case("one config file serves every verb");
    Options o;
    char *line = config_line("{\"lr\": 0.125, \"layers\": 3, \"prompt\": \"x\"}", "plan --config %s");
    if (accepts(&o, line)) CHECK(o.layers == 3, "layers");
    options_free(&o);
    free(line);

    test_case("broken config files");
    refuses("--train_data x --config /nowhere.json", "/nowhere.json");
    refuses_config("{\"precison\": \"bf16\"}", "config.json: precison is not an option; the nearest is precision");
    refuses_config("{\"lr\": \"0.1\"}", "config.json: lr must be a number");
    refuses_config("{\"lr\": 1e999}", "config.json: lr must be a number");
    refuses_config("{\"lr\": null}", "lr must be a number");
    refuses_config("{\"lr\": [1]}", "lr must be a number");
    refuses_config("{\"lr\": -1}", "config.json: lr -1: allowed are numbers from 0 to 1000");
    refuses_config("{\"steps\": 1.5}", "config.json: steps 1.5: allowed are whole numbers");
    refuses_config("{\"overwrite\": 1}", "overwrite must be true or false");
    refuses_config("{\"precision\": \"fp8\"}", "config.json: precision fp8: allowed are fp32|bf16");
    refuses_config("{\"config\": \"x\"}", "config may stand on the command line only");
    refuses_config("{\"lr\": 1, \"lr\": 2}", "lr");
    refuses_config("[1]", "must be an object");
    refuses_config("{\"options\": 3}", "must be an object");
    refuses_config("{\"lr\": 1", "config.json");
    refuses_config("", "config.json");
}

static void test_mutated_config(void)
{
    Options defaults;
    test_case("mutated config files are read or refused with a reason");
    options_defaults(&defaults, VERB_TRAIN);
    char *text = saved_all(&defaults);
    int refused = 0;
    for (uint32_t i = 0; i < 500; i++) {
        size_t bytes = strlen(text);
        char *mutated = xstrdup(text);
        Error error = {""};
        Options o;
        test_mutate(mutated, &bytes, 200, i);
        options_defaults(&o, VERB_TRAIN);
        Json *json = json_parse(mutated, bytes, "text", &error);
        int result = json ? options_from_json(&o, json, "text", &error) : -1;
        refused += result == -1;
        CHECK(result == 0 || error.text[0], "refused without a reason: mutation %u", i);
        json_free(json);
        options_free(&o);
        free(mutated);
    }
    CHECK(refused > 250, "only %d of 500 refused", refused);
    free(text);
    options_free(&defaults);
}

static bool tested(const char *key)
{
    static const char *const others[] = {"config",      "overwrite",
                                         "checkpoint",  "data",
                                         "prompt",      "tokens",
                                         "top_k",       "input",
                                         "output",      "max_gap",
                                         "rows",        "cols",
                                         "row0",        "blocks",
                                         "block_steps", "last_fraction",
                                         "temperature", "tensor",
                                         "format",      "rounding",
                                         "transpose",   "allow_recipe_change",
                                         "ranks",       "hellaswag"};
    for (int i = 0; i < TRAIN_COUNT; i++)
        if (strcmp(TRAIN_OPTIONS[i].key, key) == 0) return true;
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        if (strcmp(others[i], key) == 0) return true;
    return false;
}

static char *help_screen(const char *line, Verb verb)
{
    Options options;
    Error error;
    bool help = false;
    Capture capture = capture_start();
    int result = parse(&options, line, &help, &error);
    char *screen = capture_end(&capture);
    CHECK(result == 0 && help, "%s: %s", line, error.text);
    CHECK(options.verb == verb, "%s: another verb", line);
    options_free(&options);
    return screen;
}

static void check_screen(char *screen)
{
    int lines = 0;
    for (char *line = strtok(screen, "\n"); line; line = strtok(NULL, "\n"), lines++) {
        char key[64];
        CHECK(strlen(line) <= 80 && line[strlen(line) - 1] != ' ', "line too long or ends with a space: %s", line);
        if (sscanf(line, " --%63[a-z0-9_]", key) == 1) CHECK(tested(key), "no test sets --%s", key);
    }
    CHECK(lines >= 5 && lines <= 88, "%d lines", lines);
}

static void test_help(void)
{
    for (int v = 0; v < VERB_COUNT; v++) {
        test_case("a help screen: fits, and every option on it is set by a test");
        char *line = xformat("%s --help", verb_name((Verb)v)), *other = xformat("help %s", verb_name((Verb)v));
        char *screen = help_screen(line, (Verb)v), *same = help_screen(other, (Verb)v);
        CHECK(strcmp(screen, same) == 0, "help VERB and VERB --help differ");
        CHECK(strstr(screen, "--config"), "no --config");
        check_screen(screen);
        free(line);
        free(other);
        free(screen);
        free(same);
    }
    test_case("the list of verbs");
    char *screen = help_screen("--help", VERB_TRAIN), *same = help_screen("help", VERB_TRAIN);
    for (int v = 0; v < VERB_COUNT; v++) CHECK(strstr(screen, verb_name((Verb)v)), "no %s", verb_name((Verb)v));
    CHECK(strcmp(screen, same) == 0, "help and --help differ");
    check_screen(screen);
    free(screen);
    free(same);
    test_case("--help behind other options, even broken ones");
    free(help_screen("train --lr abc --help", VERB_TRAIN));
}

int main(void)
{
    char *folder = test_folder(), *path = xformat("%s/config.json", folder);
    config_path = path;
    test_every_option();
    test_round_trip();
    test_other_verbs();
    test_words();
    test_ranges();
    test_between();
    test_config_file();
    test_mutated_config();
    test_help();
    free(path);
    test_folder_remove(folder);
    return test_done();
}
