/* The table of options and everything made of it: see options.h.
 *
 * One row is the whole truth about an option. Its default is kept as a user would type it, so defaults, command line
 * and config file go through the same option_set, and a wrong default would be caught by the first run. A new option
 * is one row here and one field in options.h.
 * Over 600 lines because the table and all that is made of it stand together: a quarter is the table. */
#include "options.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum { TYPE_INT, TYPE_DOUBLE, TYPE_BOOL, TYPE_CHOICE, TYPE_SET, TYPE_STRING, TYPE_CONFIG, TYPE_HEADING } Type;

typedef struct {
    const char *key;
    Type type;
    unsigned verbs; /* set of 1 << Verb, and the two flags below; 0: a heading of the help screen */
    size_t offset;
    const char *fallback; /* the default */
    double min, max;      /* numbers: both allowed */
    const char *choices;  /* "a|b|c": the only values; a TYPE_CHOICE is stored as the place in this list, a
                            TYPE_SET (written with commas) as the set of places */
    const char *help;
} Option;

enum {
    TRAIN = 1 << VERB_TRAIN,
    EVAL = 1 << VERB_EVAL,
    GENERATE = 1 << VERB_GENERATE,
    TOKENIZE = 1 << VERB_TOKENIZE,
    QUANTIZE = 1 << VERB_QUANTIZE,
    PLAN = 1 << VERB_PLAN,
    COMPARE = 1 << VERB_COMPARE,
    EXPORT = 1 << VERB_EXPORT,
    MODEL = TRAIN | PLAN,
    MACHINE = TRAIN | EVAL | GENERATE | PLAN | EXPORT,
    ALL = (1 << VERB_COUNT) - 1,
    REQUIRED = 1 << 16,   /* a string that may not stay empty */
    NOT_SAVED = 1 << 17,  /* not in config.json: what was allowed once is not allowed to whoever reads that file */
    FIXED = 1 << 18,      /* on a resume: must be the same */
    RECIPE_KEY = 1 << 19, /* must be the same, but for --allow_recipe_change */
    FREE = 1 << 20        /* may change, and is said; without any of the three it may change silently */
};

_Static_assert(sizeof(Arch) == sizeof(unsigned) && sizeof(LrSchedule) == sizeof(unsigned) &&
                   sizeof(Precision) == sizeof(unsigned) && sizeof(Master) == sizeof(unsigned) &&
                   sizeof(Recompute) == sizeof(unsigned) && sizeof(FourSixScope) == sizeof(unsigned) &&
                   sizeof(ScaleBlock) == sizeof(unsigned) && sizeof(ExportFormat) == sizeof(unsigned),
               "a TYPE_CHOICE is stored as unsigned");

#define HEADING(text)                                                                                                  \
    {                                                                                                                  \
        "", TYPE_HEADING, 0, 0, NULL, 0, 0, NULL, text                                                                 \
    }
#define FIELD(key) offsetof(Options, key)
#define INT(key, fallback, min, max, verbs, help)                                                                      \
    {                                                                                                                  \
#key, TYPE_INT, verbs, FIELD(key), fallback, min, max, NULL, help                                              \
    }
#define NUM(key, fallback, min, max, verbs, help)                                                                      \
    {                                                                                                                  \
#key, TYPE_DOUBLE, verbs, FIELD(key), fallback, min, max, NULL, help                                           \
    }
#define BOOL(key, fallback, verbs, help)                                                                               \
    {                                                                                                                  \
#key, TYPE_BOOL, verbs, FIELD(key), fallback, 0, 0, NULL, help                                                 \
    }
#define ENUM(key, fallback, choices, verbs, help)                                                                      \
    {                                                                                                                  \
#key, TYPE_CHOICE, verbs, FIELD(key), fallback, 0, 0, choices, help                                            \
    }
#define RECIPE(key, fallback, choices, help)                                                                           \
    {                                                                                                                  \
#key, TYPE_CHOICE, MODEL | RECIPE_KEY, FIELD(recipe.key), fallback, 0, 0, choices, help                        \
    }
#define TEXT(key, fallback, choices, verbs, help)                                                                      \
    {                                                                                                                  \
#key, TYPE_STRING, verbs, FIELD(key), fallback, 0, 0, choices, help                                            \
    }

#define STEPS_MAX (0x1p31 - 1) /* a step and a row of the global batch are 32-bit fields of Philox */

/* clang-format off */
static const Option OPTIONS[] = {
    {"config", TYPE_CONFIG, ALL, 0, "", 0, 0, NULL, "JSON of options, or a run's config.json"},

    HEADING("model"),
    ENUM(arch, "llama", "gpt2|llama|qwen3", MODEL | FIXED, ""),
    INT(layers, "6", 1, CONFIG_MAX_LAYERS, MODEL | FIXED, "transformer blocks"),
    INT(hidden, "192", 1, CONFIG_MAX_HIDDEN, MODEL | FIXED, "width of the residual stream"),
    INT(heads, "6", 1, CONFIG_MAX_HEADS, MODEL | FIXED, "query heads"),
    INT(kv_heads, "0", 0, CONFIG_MAX_HEADS, MODEL | FIXED, "key and value heads; 0: heads"),
    INT(head_dim, "0", 0, CONFIG_MAX_HEAD_DIM, MODEL | FIXED, "0: hidden / heads"),
    INT(ffn, "0", 0, CONFIG_MAX_FFN, MODEL | FIXED, "0: 4 hidden (gpt2), 8/3 hidden (SwiGLU)"),
    INT(vocab, "257", 1, CONFIG_MAX_VOCAB, MODEL | FIXED, "257: bytes and end-of-text"),
    INT(seq_len, "256", 1, CONFIG_MAX_SEQ_LEN, MODEL | FIXED, "tokens of a sequence"),
    BOOL(tie_embeddings, "true", MODEL | FIXED, "the head is the embedding"),
    NUM(norm_eps, "0", 0, 1, MODEL | FIXED, "0: 1e-5; qwen3: 1e-6"),
    NUM(rope_theta, "10000", 1, 1e12, MODEL | FIXED, "base of the RoPE frequencies"),
    NUM(rope_scaling_factor, "0", 0, 1e6, MODEL | FIXED, "0: none; else Llama-3's rule"),
    NUM(rope_scaling_low_freq_factor, "1", 0, 1e6, MODEL | FIXED, "of that rule"),
    NUM(rope_scaling_high_freq_factor, "4", 0, 1e6, MODEL | FIXED, "of that rule"),
    INT(rope_scaling_original_context, "8192", 1, CONFIG_MAX_SEQ_LEN, MODEL | FIXED, "of that rule"),
    NUM(init_std, "0.02", 0, 100, MODEL, "o and down: over sqrt(2 layers)"),
    NUM(embedding_init_std, "0.02", 0, 100, MODEL, "of tokens and learned positions"),

    HEADING("training"),
    INT(batch, "8", 1, 1 << 20, MODEL | FREE, "sequences per rank and micro-step"),
    {"batch", TYPE_INT, EVAL, FIELD(eval_batch), "0", 0, 1 << 20, NULL, "sequences a time; 0: as the run"},
    INT(global_batch_tokens, "0", 0, STEPS_MAX, MODEL | FIXED, "tokens of a step; 0: batch x seq_len"),
    INT(steps, "1000", 1, STEPS_MAX, MODEL | FREE, "optimizer steps of the whole run"),
    NUM(lr, "1e-3", 0, 1000, TRAIN | FREE, "peak learning rate"),
    ENUM(lr_schedule, "cosine", "cosine|linear|constant|wsd", TRAIN | FREE, ""),
    INT(warmup_steps, "100", 0, STEPS_MAX, TRAIN | FREE, "linear warm-up; may be longer than the run"),
    NUM(final_lr_fraction, "0.1", 0, 1, TRAIN | FREE, "lr of the last step, of the peak"),
    NUM(wsd_decay_fraction, "0.2", 0, 1, TRAIN | FREE, "wsd: last part of the steps"),
    NUM(weight_decay, "0.1", 0, 100, TRAIN | FREE, "of matrices and embeddings"),
    NUM(beta1, "0.9", 0, 0.999999, TRAIN | FREE, "AdamW"),
    NUM(beta2, "0.95", 0, 0.999999, TRAIN | FREE, "AdamW"),
    NUM(eps, "1e-8", 1e-30, 1, TRAIN | FREE, "AdamW"),
    NUM(grad_clip, "1.0", 0, 1e9, TRAIN | FREE, "largest gradient norm; 0: off"),
    INT(seed, "1", 0, 0x1p53, TRAIN | GENERATE | QUANTIZE, "of all random numbers"),
    ENUM(recompute, "none", "none|operands|block", MODEL, "less memory, same bits"),
    BOOL(document_mask, "false", MODEL | FIXED, "attention stays within a document"),
    INT(eot_token, "-1", -1, CONFIG_MAX_VOCAB, TRAIN | FIXED, "starts a document; -1: vocab - 1"),

    HEADING("precision (all but the first two: of nvfp4)"),
    RECIPE(precision, "auto", "fp32|bf16|nvfp4|auto", "of matrix products"),
    {"master", TYPE_CHOICE, MODEL | FIXED, FIELD(recipe.master), "default", 0, 0, "default|bf16|fp32", "fp32 for fp32, else bf16"},
    {"bf16_first_layers", TYPE_INT, MODEL | RECIPE_KEY, FIELD(recipe.bf16_first_layers), "0", 0, CONFIG_MAX_LAYERS, NULL, "blocks in BF16"},
    {"bf16_last_layers", TYPE_INT, MODEL | RECIPE_KEY, FIELD(recipe.bf16_last_layers), "-1", -1, CONFIG_MAX_LAYERS, NULL, "-1: 15%, rounded up"},
    {"quantize_projections", TYPE_SET, MODEL | RECIPE_KEY, FIELD(recipe.quantize_projections), "qkv,o,up,down", 0, 0, "qkv|o|up|down", "with commas"},
    RECIPE(fprop, "nvfp4", "nvfp4|bf16", "Y = X W^T"),
    RECIPE(dgrad, "nvfp4", "nvfp4|bf16", "dX = dY W"),
    RECIPE(wgrad, "nvfp4", "nvfp4|bf16", "dW = dY^T X"),
    RECIPE(weight_blocks, "16x16", "16x16|1x16", "of W in fprop and dgrad"),
    RECIPE(rht, "wgrad", "wgrad|off", "Hadamard transform"),
    RECIPE(stochastic_rounding, "gradients", "gradients|off|all", "of what"),
    BOOL(native_rounding, "false", MODEL | RECIPE_KEY, "by the GPU (sm_100a, 103a)"),
    {"tensor_scale", TYPE_CHOICE, MODEL | QUANTIZE | RECIPE_KEY, FIELD(recipe.tensor_scale), "amax", 0, 0, "amax|pow2", "of a tensor"},
    RECIPE(four_over_six, "off", "off|activations|weights|both", "row copies"),
    RECIPE(four_over_six_metric, "mae", "mae|mse", "errors that it compares"),
    RECIPE(gradient_headroom, "1", "1|17/16", "amax of gradients, times"),
    {"switch_to_bf16_at", TYPE_DOUBLE, MODEL | RECIPE_KEY, FIELD(recipe.switch_to_bf16_at), "1", 0, 1, NULL, "fraction of the steps; 1: never"},
    RECIPE(switch_scope, "forward", "forward|all", "what switches"),

    HEADING("data and run"),
    TEXT(train_data, "", NULL, TRAIN | REQUIRED, "token files: globs, commas between"),
    TEXT(val_data, "", NULL, TRAIN, "same; none: no validation"),
    INT(val_every, "100", 0, STEPS_MAX, TRAIN, "steps; 0: never (so all *_every)"),
    INT(val_batches, "20", 1, STEPS_MAX, TRAIN, "micro-batches of a validation"),
    INT(sample_every, "0", 0, STEPS_MAX, MODEL, "steps between samples"),
    INT(sample_tokens, "128", 1, 1 << 20, TRAIN, "tokens of a sample"),
    INT(checkpoint_every, "0", 0, STEPS_MAX, TRAIN, "steps between checkpoints"),
    BOOL(checkpoint_async, "false", MODEL, "training goes on while one is written"),
    INT(keep_checkpoints, "2", 0, STEPS_MAX, TRAIN, "newest ones that stay; 0: all"),
    INT(hash_every, "0", 0, STEPS_MAX, TRAIN, "steps between lines with state_hash"),
    INT(telemetry_every, "0", 0, STEPS_MAX, TRAIN, "steps between quantization errors"),
    INT(shadow_every, "0", 0, STEPS_MAX, MODEL, "steps between comparisons with BF16"),
    BOOL(telemetry_table, "false", TRAIN, "both also on the console"),
    TEXT(run_dir, "runs/default", NULL, TRAIN | REQUIRED, "log, config, checkpoints"),
    TEXT(resume, "never", NULL, TRAIN | REQUIRED, "never, auto or a checkpoint's path"),
    BOOL(overwrite, "false", TRAIN | NOT_SAVED, "a run in run_dir may be replaced"),
    BOOL(allow_recipe_change, "false", TRAIN | NOT_SAVED, "resume in another precision"),
    TEXT(checkpoint, "", NULL, EVAL | GENERATE | EXPORT | REQUIRED, "folder of a checkpoint"),
    TEXT(data, "", NULL, EVAL, "token files: globs, commas between"),
    TEXT(hellaswag, "", NULL, EVAL, "HellaSwag file of llm.c: right answers"),
    TEXT(prompt, "", NULL, GENERATE, "the text to go on from"),
    INT(tokens, "256", 1, 1 << 20, GENERATE, "how many to generate"),
    NUM(temperature, "0.8", 0, 100, GENERATE, "0: always the likeliest token"),
    INT(top_k, "40", 0, CONFIG_MAX_VOCAB, GENERATE, "only the k likeliest; 0: all"),
    TEXT(input, "", NULL, TOKENIZE | REQUIRED, "text files: globs, commas between"),
    TEXT(output, "", NULL, TOKENIZE | REQUIRED, "token file to write (.bin)"),
    TEXT(input, "", NULL, QUANTIZE | REQUIRED, "X.f32 (raw little-endian) or F.safetensors"),
    TEXT(output, "", NULL, QUANTIZE | REQUIRED, "prefix of .codes, .packed, .scales, .json"),
    INT(rows, "0", 0, 0x1p40, QUANTIZE, "of X.f32"),
    INT(cols, "0", 0, 0x1p40, QUANTIZE, "of X.f32"),
    TEXT(tensor, "", NULL, QUANTIZE, "its name in F.safetensors"),
    ENUM(blocks, "1x16", "1x16|16x16", QUANTIZE, ""),
    ENUM(rounding, "nearest", "nearest|stochastic", QUANTIZE, ""),
    {"rht", TYPE_BOOL, QUANTIZE, FIELD(quantize_rht), "off", 0, 0, NULL, "Hadamard transform along columns"},
    BOOL(transpose, "off", QUANTIZE, "first of all"),
    {"four_over_six", TYPE_CHOICE, QUANTIZE, FIELD(quantize_four_over_six), "off", 0, 0, "off|mae|mse", ""},
    INT(row0, "0", 0, STEPS_MAX, QUANTIZE, "random bits: number of the first row"),
    TEXT(output, "", NULL, EXPORT | REQUIRED, "folder to write"),
    ENUM(format, "bf16", "bf16|nvfp4", EXPORT, "nvfp4: llama and qwen3"),
    NUM(max_gap, "-1", -1, 1000, COMPARE, "exit 3 if B's mean loss is higher by more"),
    INT(block_steps, "10", 1, STEPS_MAX, COMPARE, "steps of a block"),
    NUM(last_fraction, "1", 1e-9, 1, COMPARE, "only the last part of the steps"),

    HEADING("machine"),
    INT(ranks, "1", 1, 1 << 16, PLAN, "of which this is one"),
    INT(zero_stage, "0", 0, 3, MODEL, "shared: 1 m v, 2 gradients, 3 weights too"),
    BOOL(deterministic_reduction, "true", MODEL | FREE, "same bits on any number of ranks and GPUs"),
    INT(straggler_every, "100", 0, STEPS_MAX, TRAIN, "steps between lines on the slowest rank"),
    NUM(hang_timeout_s, "600", 0, 1e9, TRAIN, "a silent rank ends the job; 0: never"),
    BOOL(tune_gemm, "false", TRAIN, "GPU: time algorithms of products at start"),
    BOOL(profile, "false", TRAIN, "time of each operation, at the end"),
    INT(threads, "0", 0, 1024, MACHINE, "0: all cores this process may use"),
    TEXT(isa, "auto", "auto|portable|avx2|avx512|amx", MACHINE, ""),
};
/* clang-format on */

enum { OPTION_COUNT = sizeof OPTIONS / sizeof OPTIONS[0] };

static const struct {
    const char *name, *arguments, *what;
} VERBS[VERB_COUNT] = {
    [VERB_TRAIN] = {"train", "", "train a model on token files (the default verb)"},
    [VERB_EVAL] = {"eval", "", "loss of a checkpoint on token files; answers to HellaSwag"},
    [VERB_GENERATE] = {"generate", "", "text from a checkpoint"},
    [VERB_TOKENIZE] = {"tokenize", "", "text files to one file of byte tokens"},
    [VERB_QUANTIZE] = {"quantize", "", "one tensor to NVFP4, with statistics: to study the format"},
    [VERB_PLAN] = {"plan", "", "parameters and memory of a run, without running it"},
    [VERB_EXPORT] = {"export", "", "a checkpoint as a Hugging Face folder, BF16 or NVFP4"},
    [VERB_COMPARE] = {"compare", " RUN_A RUN_B", "gap of loss, B - A; a side may be several runs: A1,A2"},
};

const char *verb_name(Verb verb) { return VERBS[verb].name; }

static bool takes(Verb verb, const Option *o) { return o->verbs >> verb & 1; }

ResumeRule options_resume_rule(const char *key)
{
    for (const Option *o = OPTIONS; o < OPTIONS + OPTION_COUNT; o++) {
        if (!takes(VERB_TRAIN, o) || strcmp(o->key, key)) continue;
        return o->verbs & FIXED        ? RESUME_FIXED
               : o->verbs & RECIPE_KEY ? RESUME_RECIPE
               : o->verbs & FREE       ? RESUME_FREE
                                       : RESUME_SILENT;
    }
    return RESUME_SILENT;
}

/* ---- values ---- */

static int choice_index(const char *choices, const char *text)
{
    size_t length = strlen(text);
    for (int index = 0; choices; index++) {
        size_t width = strcspn(choices, "|");
        if (width == length && strncmp(choices, text, width) == 0) return index;
        choices = choices[width] ? choices + width + 1 : NULL;
    }
    return -1;
}

/* "qkv,up" -> set of places, or -1. */
static int choice_set(const char *choices, const char *text)
{
    int set = 0;
    for (const char *p = text; p;) {
        size_t width = strcspn(p, ",");
        char word[32];
        snprintf(word, sizeof word, "%.*s", (int)width, p);
        int index = choice_index(choices, word);
        if (index < 0) return -1;
        set |= 1 << index;
        p = p[width] ? p + width + 1 : NULL;
    }
    return set;
}

/* The text of a choice or set; owned by the caller. */
static char *choices_text(const Option *o, unsigned value)
{
    char *text = xstrdup("");
    const char *choice = o->choices;
    for (unsigned i = 0; choice; i++) {
        size_t width = strcspn(choice, "|");
        if (o->type == TYPE_SET ? value >> i & 1 : value == i) {
            char *longer = xformat("%s%s%.*s", text, *text ? "," : "", (int)width, choice);
            free(text);
            text = longer;
        }
        choice = choice[width] ? choice + width + 1 : NULL;
    }
    return text;
}

static int option_refuse(const Option *o, const char *text, const char *where, Error *error)
{
    switch (o->type) {
    case TYPE_INT:
        return error_set(error, "%s%s %.200s: allowed are whole numbers from %.0f to %.0f", where, o->key, text, o->min,
                         o->max);
    case TYPE_DOUBLE:
        return error_set(error, "%s%s %.200s: allowed are numbers from %g to %g", where, o->key, text, o->min, o->max);
    case TYPE_BOOL:
        return error_set(error, "%s%s %.200s: allowed are true, 1, on, false, 0, off", where, o->key, text);
    default:
        return error_set(error, "%s%s %.200s: allowed are %s", where, o->key, text, o->choices);
    }
}

/* `where` stands before the key in messages: "--", or "FILE: ". */
static int option_set(Options *options, const Option *o, const char *text, const char *where, Error *error)
{
    void *field = (char *)options + o->offset;
    bool number = *text && strchr("+-.0123456789", *text); /* strtod would skip spaces and take "inf" and "nan" */
    char *end = NULL;
    if (o->type == TYPE_INT && number) {
        int64_t value = strtoll(text, &end, 10); /* beyond int64 the nearest end: out of any range */
        if (*end || !((double)value >= o->min && (double)value <= o->max)) return option_refuse(o, text, where, error);
        *(int64_t *)field = value;
    } else if (o->type == TYPE_DOUBLE && number) {
        double value = strtod(text, &end);
        if (*end || !(value >= o->min && value <= o->max)) return option_refuse(o, text, where, error);
        *(double *)field = value;
    } else if (o->type == TYPE_BOOL && choice_index("true|1|on|false|0|off", text) >= 0) {
        *(bool *)field = choice_index("true|1|on", text) >= 0;
    } else if (o->type == TYPE_CHOICE && choice_index(o->choices, text) >= 0) {
        *(unsigned *)field = (unsigned)choice_index(o->choices, text);
    } else if (o->type == TYPE_SET && choice_set(o->choices, text) >= 0) {
        *(unsigned *)field = (unsigned)choice_set(o->choices, text);
    } else if (o->type == TYPE_STRING && (!o->choices || choice_index(o->choices, text) >= 0)) {
        free(*(char **)field);
        *(char **)field = xstrdup(text);
    } else {
        return option_refuse(o, text, where, error);
    }
    return 0;
}

void options_defaults(Options *options, Verb verb)
{
    Error error;
    memset(options, 0, sizeof *options);
    options->verb = verb;
    options->compare_a = xstrdup("");
    options->compare_b = xstrdup("");
    for (const Option *o = OPTIONS; o < OPTIONS + OPTION_COUNT; o++)
        if (o->offset && option_set(options, o, o->fallback, "default of --", &error)) die("%s", error.text);
}

void options_free(Options *options)
{
    for (const Option *o = OPTIONS; o < OPTIONS + OPTION_COUNT; o++)
        if (o->type == TYPE_STRING) {
            char **field = (char **)((char *)options + o->offset); /* rows of different verbs may share one */
            free(*field);
            *field = NULL;
        }
    free(options->compare_a);
    free(options->compare_b);
    memset(options, 0, sizeof *options);
}

/* ---- finding a row ---- */

/* Insertions, deletions and replacements from a to b (Levenshtein); b shorter than 64, of a the first 64 count. */
static int edit_distance(const char *a, const char *b)
{
    int width = (int)strlen(b), row[64];
    for (int j = 0; j <= width; j++) row[j] = j;
    for (int i = 1; i <= 64 && a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= width; j++) {
            int replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            int inserted = 1 + (row[j] < row[j - 1] ? row[j] : row[j - 1]);
            row[j] = replaced < inserted ? replaced : inserted;
        }
    }
    return row[width];
}

/* The row of a key; NULL with a message that names the nearest key of the verb. */
static const Option *option_find(const char *key, Verb verb, const char *where, Error *error)
{
    const Option *nearest = OPTIONS; /* --config, of every verb */
    int best = edit_distance(key, nearest->key);
    const Option *of_other_verb = NULL; /* a key may mean different things to different verbs */
    for (const Option *o = OPTIONS; o < OPTIONS + OPTION_COUNT; o++) {
        if (o->type != TYPE_HEADING && strcmp(o->key, key) == 0) {
            if (takes(verb, o)) return o;
            if (!of_other_verb) of_other_verb = o;
        }
        if (!takes(verb, o)) continue;
        int distance = edit_distance(key, o->key);
        if (distance < best) {
            best = distance;
            nearest = o;
        }
    }
    if (of_other_verb) return of_other_verb;
    error_set(error, "%s%.80s is not an option; the nearest is %s (`%s --help` lists all)", where, key, nearest->key,
              verb_name(verb));
    return NULL;
}

static int verb_find(const char *text, Verb *verb, Error *error)
{
    int best = -1;
    for (int v = 0; v < VERB_COUNT; v++) {
        if (best < 0 || edit_distance(text, VERBS[v].name) < edit_distance(text, VERBS[best].name)) best = v;
        if (strcmp(text, VERBS[v].name)) continue;
        *verb = (Verb)v;
        return 0;
    }
    return error_set(error, "\"%.80s\" is not a verb; the nearest is %s (--help lists all)", text, VERBS[best].name);
}

static int refuse_verb(const Option *o, Verb verb, Error *error)
{
    char list[128] = "";
    for (int v = 0; v < VERB_COUNT; v++)
        if (takes((Verb)v, o)) {
            strcat(list, *list ? ", " : "");
            strcat(list, VERBS[v].name);
        }
    return error_set(error, "--%s is not an option of %s; it belongs to %s", o->key, verb_name(verb), list);
}

/* ---- JSON ---- */

/* A value of the right JSON type, as a user would type it, goes through option_set. */
static int option_from_json(Options *options, Verb verb, const Json *member, const char *where, Error *error)
{
    const Option *o = option_find(json_key(member), verb, where, error);
    if (!o) return -1;
    if (o->type == TYPE_CONFIG) return error_set(error, "%s%s may stand on the command line only", where, o->key);

    const char *text = json_string(member), *wanted = "a string";
    char typed[40];
    double number;
    bool flag;
    if (o->type == TYPE_INT || o->type == TYPE_DOUBLE) {
        wanted = "a number";
        text = json_number(member, &number) ? typed : NULL;
        if (text) snprintf(typed, sizeof typed, "%.17g", number);
    } else if (o->type == TYPE_BOOL) {
        wanted = "true or false";
        text = !json_bool(member, &flag) ? NULL : flag ? "true" : "false";
    }
    if (!text) return error_set(error, "%s%s must be %s", where, o->key, wanted);
    return option_set(options, o, text, where, error);
}

int options_from_json(Options *options, const Json *object, const char *name, Error *error)
{
    const Json *saved = json_get(object, "options");
    Verb verb = saved ? VERB_TRAIN : options->verb; /* whose meaning of a key it is */
    if (saved) object = saved;
    if (json_type(object) != JSON_OBJECT) return error_set(error, "%s: must be an object of options", name);

    char *where = xformat("%.400s: ", name);
    int result = 0;
    for (const Json *member = json_first(object); member && result == 0; member = json_next(member))
        result = option_from_json(options, verb, member, where, error);
    free(where);
    return result;
}

void options_to_json(const Options *options, Json *object)
{
    for (const Option *o = OPTIONS; o < OPTIONS + OPTION_COUNT; o++) {
        const void *field = (const char *)options + o->offset;
        if (!takes(VERB_TRAIN, o) || o->verbs & NOT_SAVED) continue;
        if (o->type == TYPE_INT) json_add_int(object, o->key, *(const int64_t *)field);
        if (o->type == TYPE_DOUBLE) json_add_double(object, o->key, *(const double *)field);
        if (o->type == TYPE_BOOL) json_add_bool(object, o->key, *(const bool *)field);
        if (o->type == TYPE_STRING) json_add_string(object, o->key, *(char *const *)field);
        if (o->type != TYPE_CHOICE && o->type != TYPE_SET) continue;

        char *text = choices_text(o, *(const unsigned *)field);
        json_add_string(object, o->key, text);
        free(text);
    }
}

/* ---- help ---- */

static void print_help(const char *program, Verb verb)
{
    const char *heading = NULL;
    printf("%s %s%s [--key value ...]\n  %s\n\n", program, VERBS[verb].name, VERBS[verb].arguments, VERBS[verb].what);
    printf("  %-24s default\n", "option");
    for (const Option *o = OPTIONS; o < OPTIONS + OPTION_COUNT; o++) {
        if (o->type == TYPE_HEADING) heading = o->help;
        if (!takes(verb, o)) continue;
        if (heading) printf("%s\n", heading);
        heading = NULL;
        const char *fallback = *o->fallback ? o->fallback : o->verbs & REQUIRED ? "required" : "-";
        printf("  --%-22s %-9s %s%s%s\n", o->key, fallback, o->choices ? o->choices : "",
               o->choices && *o->help ? "  " : "", o->help);
    }
}

static void print_verbs(const char *program)
{
    printf("usage: %s [verb] [--config FILE.json] [--key value | --key=value ...]\n\n", program);
    for (int v = 0; v < VERB_COUNT; v++) {
        char *call = xformat("%s%s", VERBS[v].name, VERBS[v].arguments);
        printf("  %-20s %s\n", call, VERBS[v].what);
        free(call);
    }
    printf("\n`%s VERB --help` lists the options of a verb. Given twice, the last wins;\n"
           "the command line wins over --config. Exit codes: 0 done, 1 files, disk, device\n"
           "or numbers, 2 command line or config file, 3 a gap beyond --max_gap.\n",
           program);
}

/* ---- the command line ---- */

typedef struct {
    const Option *option; /* NULL: a positional argument */
    const char *value;
} Argument;

/* Takes the argument argv[*i], and the next one where the value stands apart; *i moves on. */
static int argument_take(Argument *argument, int argc, char **argv, int *i, Verb verb, Error *error)
{
    const char *text = argv[(*i)++];
    *argument = (Argument){NULL, text};
    if (strncmp(text, "--", 2) != 0) return 0;

    char key[64];
    snprintf(key, sizeof key, "%.*s", (int)strcspn(text + 2, "="), text + 2);
    const Option *o = argument->option = option_find(key, verb, "--", error);
    if (!o) return -1;
    if (!takes(verb, o)) return refuse_verb(o, verb, error);

    const char *equals = strchr(text, '=');
    if (equals)
        argument->value = equals + 1;
    else if (*i < argc && strncmp(argv[*i], "--", 2) != 0)
        argument->value = argv[(*i)++];
    else if (o->type == TYPE_BOOL)
        argument->value = "true";
    else
        return error_set(error, "--%s needs a value (one that begins with -- is written --%s=VALUE)", key, key);
    return 0;
}

static int read_config(Options *options, const char *path, Error *error)
{
    Json *json = json_read_file(path, error);
    if (!json) return -1;
    int result = options_from_json(options, json, path, error);
    json_free(json);
    return result;
}

static int take_positional(Options *options, const char *text, Error *error)
{
    if (options->verb != VERB_COMPARE || *options->compare_b)
        return error_set(error, "unexpected argument \"%.200s\": options are written --key value", text);
    char **run = *options->compare_a ? &options->compare_b : &options->compare_a;
    free(*run);
    *run = xstrdup(text);
    return 0;
}

/* First the last --config, then everything else: so the command line wins wherever --config stands. */
static int read_arguments(Options *options, int argc, char **argv, int first, Error *error)
{
    Argument argument;
    const char *config = NULL;
    for (int i = first; i < argc;) {
        if (argument_take(&argument, argc, argv, &i, options->verb, error)) return -1;
        if (argument.option && argument.option->type == TYPE_CONFIG) config = argument.value;
    }
    if (config && read_config(options, config, error)) return -1;

    for (int i = first; i < argc;) {
        int result = argument_take(&argument, argc, argv, &i, options->verb, error);
        if (result == 0 && !argument.option)
            result = take_positional(options, argument.value, error);
        else if (result == 0 && argument.option->type != TYPE_CONFIG)
            result = option_set(options, argument.option, argument.value, "--", error);
        if (result) return -1;
    }
    return 0;
}

/* ---- what must hold between options ---- */

int options_model(const Options *o, GPTConfig *config, Error *error)
{
    *config = (GPTConfig){
        .arch = o->arch,
        .L = o->layers,
        .C = o->hidden,
        .NH = o->heads,
        .NKV = o->kv_heads,
        .HD = o->head_dim,
        .F = o->ffn,
        .V = o->vocab,
        .T = o->seq_len,
        .tied = o->tie_embeddings,
        .norm_eps = (float)o->norm_eps,
        .rope_theta = o->rope_theta,
        .rope_factor = o->rope_scaling_factor,
        .rope_low_freq_factor = o->rope_scaling_low_freq_factor,
        .rope_high_freq_factor = o->rope_scaling_high_freq_factor,
        .rope_original_context = o->rope_scaling_original_context,
        .init_std = (float)o->init_std,
        .embedding_init_std = (float)o->embedding_init_std,
    };
    if (config_finish(config, error)) return -1;
    if (o->eot_token >= o->vocab)
        return error_set(error, "eot_token %" PRId64 " is not below vocab %" PRId64, o->eot_token, o->vocab);
    return 0;
}

static int check_batch(const Options *o, Error *error)
{
    int64_t micro_batch = o->batch * o->seq_len;
    if (micro_batch > (int64_t)STEPS_MAX)
        return error_set(error, "batch %" PRId64 " x seq_len %" PRId64 " is more than %.0f tokens", o->batch,
                         o->seq_len, STEPS_MAX);
    if (o->global_batch_tokens % micro_batch)
        return error_set(error, "global_batch_tokens %" PRId64 " is not a multiple of batch x seq_len = %" PRId64,
                         o->global_batch_tokens, micro_batch);
    return 0;
}

static int check_quantize(const Options *o, Error *error)
{
    size_t length = strlen(o->input);
    bool safetensors = length > 12 && strcmp(o->input + length - 12, ".safetensors") == 0;
    if (safetensors && !*o->tensor) return error_set(error, "quantize needs --tensor NAME with a .safetensors file");
    if (safetensors && (o->rows || o->cols))
        return error_set(error, "--rows and --cols are for raw float32; a .safetensors file knows its shapes");
    if (!safetensors && *o->tensor)
        return error_set(error, "--tensor is for a .safetensors file; raw float32 takes --rows and --cols");
    if (!safetensors && (!o->rows || !o->cols))
        return error_set(error, "quantize needs --rows and --cols with raw float32 (or --tensor with .safetensors)");
    if (o->quantize_four_over_six && o->rounding == ROUND_STOCHASTIC)
        return error_set(error, "four_over_six with rounding stochastic: 4/6 compares errors of rounding to nearest; "
                                "use --rounding nearest");
    if (o->quantize_four_over_six && o->recipe.tensor_scale == TENSOR_SCALE_POW2)
        return error_set(error, "four_over_six with tensor_scale pow2: 4/6 is defined with --tensor_scale amax only");
    return 0;
}

static int options_check(const Options *options, Error *error)
{
    GPTConfig config;
    for (const Option *o = OPTIONS; o < OPTIONS + OPTION_COUNT; o++)
        if (takes(options->verb, o) && o->verbs & REQUIRED && !**(char *const *)((const char *)options + o->offset))
            return error_set(error, "%s needs --%s: %s", verb_name(options->verb), o->key, o->help);

    if (options->verb == VERB_EVAL && !*options->data && !*options->hellaswag)
        return error_set(error, "eval needs --data (token files), --hellaswag (a file of questions), or both");
    if (options->verb == VERB_COMPARE && options->max_gap < 0 && options->max_gap != -1)
        return error_set(error, "max_gap %g must be at least 0 (or left out)", options->max_gap);
    if (options->verb == VERB_COMPARE && !*options->compare_b)
        return error_set(error, "compare needs two runs: compare RUN_A RUN_B");
    if (options->verb == VERB_QUANTIZE) return check_quantize(options, error);
    if (options->verb != VERB_TRAIN && options->verb != VERB_PLAN) return 0;

    return options_model(options, &config, error) || check_batch(options, error) ? -1 : 0;
}

int options_parse(Options *options, int argc, char **argv, bool *help, Error *error)
{
    Verb verb = VERB_TRAIN;
    int first = 1;
    *help = first < argc && strcmp(argv[first], "help") == 0;
    if (*help) first++;
    bool named = first < argc && argv[first][0] != '-';
    options_defaults(options, verb);
    if (named && verb_find(argv[first++], &verb, error)) return -1;
    options->verb = verb;

    for (int i = first; i < argc; i++) *help |= strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0;
    if (!*help) return read_arguments(options, argc, argv, first, error) ? -1 : options_check(options, error);

    const char *slash = argc > 0 ? strrchr(argv[0], '/') : NULL, *program = slash ? slash + 1 : argv[0];
    if (named)
        print_help(program, verb);
    else
        print_verbs(program);
    return 0;
}
