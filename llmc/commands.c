/* See commands.h. */
#include "commands.h"

#include "checkpoint.h"
#include "compare.h"
#include "evaluate.h"
#include "export.h"
#include "generate.h"
#include "plan.h"
#include "profile.h"
#include "quantize.h"
#include "start.h"
#include "tokenizer.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int command_train(const Options *options, const Machine *machine)
{
    Machine timed = *machine;
    if (options->profile) timed.ops = profile_open(machine->ops);
    trainer_run(options, &timed);
    if (options->profile) profile_print();
    return 0;
}

/* A model with the weights of a checkpoint, for reading only: to evaluate, B sequences a batch (0: as the run), or to
 * generate. */
static void open_checkpoint(Model *model, const Options *options, const Machine *machine, bool generate, int64_t B)
{
    RunState state;
    Json *config;
    Error error;
    Options saved;
    ModelSpec spec;

    if (checkpoint_verify(options->checkpoint, false, &state, &config, &error)) die("checkpoint: %s", error.text);
    if (start_saved(&saved, &spec, config, options->checkpoint, &error)) die("checkpoint %s", error.text);
    spec.train = spec.recipe.shadow = false;
    spec.generate = generate;
    if (generate || B) spec.B = B;
    spec.micro_steps = 1;
    spec.recompute = RECOMPUTE_NONE;
    if (model_open(model, &spec, machine->ops, &error)) die("checkpoint %s: %s", options->checkpoint, error.text);
    if (checkpoint_load(options->checkpoint, model, 0, &error)) die("checkpoint: %s", error.text);
    gpt_enter_step(&model->gpt, (uint32_t)state.step);
    json_free(config);
    options_free(&saved);
}

static void eval_data(Model *model, const char *pattern)
{
    Error error;
    Evaluation result;
    DataLoaderConfig config = {.pattern = pattern,
                               .B = model->spec.B,
                               .T = model->spec.config.T,
                               .micro_batches = 1,
                               .ranks = 1,
                               .vocab = model->spec.config.V};
    DataLoader *data = dataloader_open(&config, 0, &error);
    if (!data || evaluate(model, data, 0, &result, &error)) die("data: %s", error.text);
    printf("loss %.6f nats per token", result.loss);
    if (isfinite(result.bits_per_byte)) printf(", %.6f bits per byte", result.bits_per_byte);
    printf(", over %" PRId64 " tokens of %s\n", result.tokens, pattern);
    dataloader_close(data);
}

static void eval_hellaswag(Model *model, const char *path)
{
    Error error;
    HellaSwag file;
    ChoiceEvaluation result;
    if (hellaswag_open(&file, path, &error) || evaluate_choices(model, &file, &result, &error))
        die("hellaswag: %s", error.text);
    double percent = 100.0 / (double)result.examples;
    printf("hellaswag %.2f%% (%" PRId64 "/%" PRId64 ") by mean loss (acc_norm, as llm.c), %.2f%% (%" PRId64 "/%" PRId64
           ") by sum (acc)",
           percent * (double)result.by_mean, result.by_mean, result.examples, percent * (double)result.by_sum,
           result.by_sum, result.examples);
    if (result.skipped)
        printf(", %" PRId64 " skipped: longer than the context of %" PRId64, result.skipped, model->spec.config.T);
    printf("\n");
    hellaswag_close(&file);
}

int command_eval(const Options *options, const Machine *machine)
{
    Model model;
    open_checkpoint(&model, options, machine, false, options->eval_batch);
    if (*options->data) eval_data(&model, options->data);
    if (*options->hellaswag) eval_hellaswag(&model, options->hellaswag);
    model_close(&model);
    return 0;
}

static void print_token(void *context, int32_t token)
{
    tokenizer_print(token, ((const Model *)context)->spec.config.V);
}

/* "12,7,301" -> ids; for models whose vocabulary is not bytes. */
static int64_t parse_ids(const char *text, int64_t vocab, int32_t *out)
{
    int64_t count = 0;
    for (const char *p = text; *p;) {
        char *end;
        long id = strtol(p, &end, 10);
        if (end == p || id < 0 || id >= vocab || (*end && *end != ','))
            die_usage("prompt \"%s\": this model's vocabulary (%" PRId64 ") is not bytes; give token ids, like "
                      "--prompt 12,7,301",
                      text, vocab);
        out[count++] = (int32_t)id;
        p = *end ? end + 1 : end;
    }
    return count;
}

int command_generate(const Options *options, const Machine *machine)
{
    Model model;
    Error error;
    open_checkpoint(&model, options, machine, true, 0);
    int64_t vocab = model.spec.config.V, length = (int64_t)strlen(options->prompt);
    bool bytes = vocab == BYTE_TOKENIZER_VOCAB;
    int32_t *prompt = xmalloc((size_t)(length + 1) * sizeof *prompt);
    Sampling sampling = {.tokens = options->tokens,
                         .top_k = options->top_k,
                         .temperature = options->temperature,
                         .seed = (uint64_t)options->seed};

    if (bytes)
        tokenizer_encode(options->prompt, (size_t)length, prompt);
    else
        length = parse_ids(options->prompt, vocab, prompt);
    if (!length) prompt[length++] = (int32_t)model.spec.eot_token;
    printf("%s", options->prompt);
    if (generate(&model, prompt, length, &sampling, print_token, &model, &error)) die("%s", error.text);
    printf("\n");
    free(prompt);
    model_close(&model);
    return 0;
}

int command_plan(const Options *options, const Machine *machine)
{
    Model model;
    ModelSpec spec;
    Error error;
    Options resolved = *options; /* its strings belong to `options` */
    char reason[160];
    Comm counting = {.rank = (int)options->ranks - 1, .ranks = (int)options->ranks}; /* the last rank has most rows */
    if (start_resolve(&(Start){0}, &resolved, machine->ops->native_fp4, reason, &error) ||
        start_spec(&resolved, &spec, &error))
        die_usage("%s", error.text);
    spec.sharding.comm = &counting;
    if (model_plan(&model, &spec, machine->ops, &error)) die_usage("%s", error.text);
    printf("%s on %s, %d threads\n\n", arch_name(spec.config.arch), machine->ops->name, machine->threads);
    plan_print_precision(&model, options->recipe.precision == PRECISION_AUTO, reason);
    printf("\n");
    plan_print(&model, spec.micro_steps * spec.B * spec.config.T * counting.ranks, options->checkpoint_async);
    model_close(&model);
    return 0;
}

int command_tokenize(const Options *options)
{
    int64_t tokens, files;
    Error error;
    if (tokenize_files(options->input, options->output, &tokens, &files, &error)) die("%s", error.text);
    printf("%s: %" PRId64 " tokens from %" PRId64 " %s\n", options->output, tokens, files,
           files == 1 ? "file" : "files");
    return 0;
}

int command_quantize(const Options *options)
{
    Error error;
    if (quantize_file(options, &error)) die("quantize: %s", error.text);
    return 0;
}

int command_export(const Options *options, const Machine *machine)
{
    Model model;
    Error error;
    open_checkpoint(&model, options, machine, true, 0);
    if (export_model(&model, options->output, options->format, &error)) die("export: %s", error.text);
    printf("%s\n", options->output);
    model_close(&model);
    return 0;
}

int command_compare(const Options *options)
{
    Error error;
    int code = compare_runs(options->compare_a, options->compare_b, options->block_steps, options->last_fraction,
                            options->max_gap, &error);
    if (code < 0) die("compare: %s", error.text);
    return code;
}
