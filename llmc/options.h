/* The command line and the config file: one table of options, one struct of values.
 *
 *     PROGRAM [verb] [--config FILE.json] [--key value | --key=value ...]
 *
 * Every option is one row of OPTIONS in options.c: name, type, default, range or choices, the verbs that take it, help.
 * The table makes the parser, `--help` (one screen a verb), the JSON config reader and the saved config.json. Given
 * twice, the last wins; the command line wins over --config wherever it stands. An unknown key is an error that names
 * the nearest known one. Errors of this module end the program with exit code 2 when they reach the user.
 *
 * Floor 4.
 */
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include "json.h"
#include "recipe.h"
#include "schedule.h"

C_BEGIN

typedef enum {
    VERB_TRAIN,
    VERB_EVAL,
    VERB_GENERATE,
    VERB_TOKENIZE,
    VERB_QUANTIZE,
    VERB_PLAN,
    VERB_COMPARE,
    VERB_EXPORT,
    VERB_COUNT
} Verb;

typedef enum { EXPORT_BF16, EXPORT_NVFP4 } ExportFormat;

/* Values of all options. Strings are owned by the struct (options_free). A string that was not given is "". */
typedef struct {
    Verb verb;

    /* model; 0 = derived, see config_finish */
    Arch arch;
    int64_t layers, hidden, heads, kv_heads, head_dim, ffn, vocab, seq_len;
    bool tie_embeddings;
    double norm_eps, rope_theta;
    double rope_scaling_factor; /* 0: none; else Llama-3's rule with the three below */
    double rope_scaling_low_freq_factor, rope_scaling_high_freq_factor;
    int64_t rope_scaling_original_context;
    double init_std, embedding_init_std;

    /* training */
    int64_t batch, global_batch_tokens, steps; /* global_batch_tokens 0: one micro-batch, batch x seq_len */
    double lr;
    LrSchedule lr_schedule;
    int64_t warmup_steps;
    double final_lr_fraction, wsd_decay_fraction, weight_decay, beta1, beta2, eps, grad_clip;
    int64_t seed;
    RecipeSpec recipe; /* steps and shadow: filled by start_spec */
    Recompute recompute;
    bool document_mask;
    int64_t eot_token; /* -1: vocab - 1 */

    /* data and run */
    char *train_data, *val_data;
    int64_t val_every, val_batches, sample_every, sample_tokens, checkpoint_every, keep_checkpoints, hash_every;
    int64_t telemetry_every, shadow_every; /* steps; 0: never */
    bool telemetry_table;                  /* telemetry on the console too */
    char *run_dir, *resume;                /* resume: "never", "auto" or a path */
    bool overwrite, allow_recipe_change;
    int64_t ranks, zero_stage; /* ranks: plan's option; of a run those that were started */
    double hang_timeout_s;
    bool deterministic_reduction;
    bool checkpoint_async, tune_gemm, native_rounding, profile;
    int64_t straggler_every; /* steps; 0: never */

    /* machine */
    int64_t threads; /* 0: all cores this process may use */
    char *isa;       /* "auto", "portable", "avx2", "avx512", "amx" */

    /* eval, generate, tokenize, quantize, compare, export */
    char *checkpoint, *data, *hellaswag, *prompt, *input, *output;
    int64_t tokens, top_k;       /* top_k 0: all */
    int64_t eval_batch;          /* 0: that of the run */
    double temperature;          /* 0: greedy */
    double max_gap;              /* < 0: none */
    int64_t block_steps;         /* compare: steps a block */
    double last_fraction;        /* compare: of the common steps */
    char *compare_a, *compare_b; /* the two positional arguments of compare; each a comma-separated list of runs */
    int64_t rows, cols, row0;    /* quantize: of a raw file; Philox row of the first row */
    char *tensor;                /* quantize: name within a safetensors file */
    ScaleBlock blocks;
    Rounding rounding;
    bool quantize_rht, transpose;
    FourOverSix quantize_four_over_six;
    ExportFormat format;
} Options;

/* Parses argv, then checks what must hold between options: required ones, the model's shape, batches, steps. 0, or -1
 * with the reason in terms of the keys. `--help`, `-h` and `help [verb]` print the verb's screen, or the list of verbs, to
 * stdout and set *help; the caller exits 0. Fills *options from nothing; options_free is due in every case. A value
 * that begins with "--" is written --key=VALUE; a boolean alone means true. */
int options_parse(Options *options, int argc, char **argv, bool *help, Error *error);
/* Reads values from an object: {"key": value, ...}, or a saved config.json with such an object as its "options".
 * Unknown keys are errors. A config file serves every verb: what the verb does not take is checked and left alone.
 */
int options_from_json(Options *options, const Json *object, const char *name, Error *error);
/* All options of the verb `train`, in table order: what config.json saves. `overwrite` is left out: that permission is
 * given once, not to whoever starts from the saved file. */
void options_to_json(const Options *options, Json *object);
void options_defaults(Options *options, Verb verb); /* fills *options from nothing */
void options_free(Options *options);

/* The architecture that the options describe, checked (impossible shapes are -1 with the reason). */
int options_model(const Options *options, GPTConfig *config, Error *error);

/* What a resume does when the value of an option of `train` is another one than before. */
typedef enum { RESUME_SILENT, RESUME_FREE, RESUME_RECIPE, RESUME_FIXED } ResumeRule;
ResumeRule options_resume_rule(const char *key);

const char *verb_name(Verb verb);

C_END
#endif
