/* See start.h. */
#include "start.h"

#include "recipe.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int start_spec(const Options *o, ModelSpec *spec, Error *error)
{
    *spec = (ModelSpec){.recipe = o->recipe,
                        .seed = (uint64_t)o->seed,
                        .train = true,
                        .generate = o->sample_every > 0,
                        .B = o->batch,
                        .recompute = o->recompute,
                        .document_mask = o->document_mask,
                        .native_rounding = o->native_rounding};
    if (o->recipe.precision == PRECISION_AUTO)
        return error_set(error, "precision auto stands for no precision here: give fp32, bf16 or nvfp4");
    spec->recipe.steps = o->steps;
    spec->recipe.shadow = o->shadow_every > 0;
    if (options_model(o, &spec->config, error)) return -1;
    int64_t micro_batch = o->batch * spec->config.T * o->ranks; /* of all ranks at once */
    spec->sharding.stage = (int)o->zero_stage;
    spec->sharding.order = o->deterministic_reduction ? REDUCE_ORDERED : REDUCE_FAST;
    if (o->global_batch_tokens % micro_batch)
        return error_set(error,
                         "global_batch_tokens %" PRId64 " is not a multiple of batch x seq_len x ranks = %" PRId64,
                         o->global_batch_tokens, micro_batch);
    spec->eot_token = o->eot_token >= 0 ? o->eot_token : spec->config.V - 1;
    spec->micro_steps = o->global_batch_tokens ? o->global_batch_tokens / micro_batch : 1;
    return 0;
}

int start_saved(Options *saved, ModelSpec *spec, const Json *config, const char *dir, Error *error)
{
    options_defaults(saved, VERB_TRAIN);
    json_int(json_get(config, "ranks"), &saved->ranks);
    if (!options_from_json(saved, config, dir, error) && !start_spec(saved, spec, error)) return 0;
    Error why = *error;
    return error_set(error, "%s: its config.json cannot be used: %s", dir, why.text);
}

static bool holds_a_run(const char *run_dir)
{
    char *log = xformat("%s/log.jsonl", run_dir);
    bool there = access(log, F_OK) == 0 || checkpoint_count(run_dir) > 0;
    free(log);
    return there;
}

/* Is this checkpoint one of the run in run_dir? */
static bool belongs_to(const char *checkpoint, const char *run_dir)
{
    char *above = xformat("%s/../..", checkpoint), *a = realpath(above, NULL), *b = realpath(run_dir, NULL);
    bool same = a && b && strcmp(a, b) == 0;
    free(above);
    free(a);
    free(b);
    return same;
}

void start_choose(Start *s, const Options *o)
{
    Error error;
    bool never = strcmp(o->resume, "never") == 0, automatic = strcmp(o->resume, "auto") == 0;
    *s = (Start){.state = {.seed = (uint64_t)o->seed}};
    if (never && holds_a_run(o->run_dir) && !o->overwrite)
        die_usage("run_dir %s holds a run already; continue it with --resume auto, or replace it with --overwrite",
                  o->run_dir);
    if (!never && o->overwrite) die_usage("--overwrite and --resume exclude each other");
    if (automatic && !checkpoint_newest(o->run_dir, &s->dir, &s->state, &s->config)) {
        if (checkpoint_count(o->run_dir))
            die("resume: no checkpoint in %s is complete; start anew with --overwrite", o->run_dir);
        if (holds_a_run(o->run_dir))
            note("note: run_dir %s has a log but no checkpoint; the run starts again from step 0", o->run_dir);
        *s = (Start){.state = {.seed = (uint64_t)o->seed}};
    }
    if (never || automatic) return;
    if (holds_a_run(o->run_dir) && !belongs_to(o->resume, o->run_dir))
        die_usage("run_dir %s holds another run than that of %s; choose another --run_dir", o->run_dir, o->resume);
    if (checkpoint_verify(o->resume, true, &s->state, &s->config, &error)) die("resume: %s", error.text);
    s->dir = xstrdup(o->resume);
}

int start_resolve(const Start *s, Options *o, bool native_fp4, char reason[160], Error *error)
{
    GPTConfig config;
    Options saved;
    ModelSpec spec;
    snprintf(reason, 160, "as asked");
    if (o->recipe.precision != PRECISION_AUTO) return 0;
    if (!s->config) {
        if (options_model(o, &config, error)) return -1;
        o->recipe.precision = recipe_auto(&config, native_fp4, reason);
        return 0;
    }
    int result = start_saved(&saved, &spec, s->config, s->dir, error);
    o->recipe.precision = saved.recipe.precision;
    snprintf(reason, 160, "%s: that of the checkpoint", precision_name(saved.recipe.precision));
    options_free(&saved);
    return result;
}

/* The options with nothing of the model left to be derived, so that two runs can be compared key by key. */
static Json *resolved_options(const Options *options, const ModelSpec *spec)
{
    const GPTConfig *c = &spec->config;
    Options o = *options; /* its strings belong to `options` */
    o.kv_heads = c->NKV;
    o.head_dim = c->HD;
    o.ffn = c->F;
    o.norm_eps = (double)c->norm_eps;
    o.eot_token = spec->eot_token;
    o.global_batch_tokens = spec->micro_steps * spec->B * c->T * o.ranks;
    o.recipe = recipe_resolved(&o.recipe, c->L);
    Json *object = json_new_object();
    options_to_json(&o, object);
    return object;
}

/* First step of the forward pass in BF16, or of all; INT64_MAX: never. */
static int64_t switch_step(const RecipeSpec *r)
{
    return r->precision == PRECISION_NVFP4 && r->switch_to_bf16_at < 1 ? recipe_switch_step(r) : INT64_MAX;
}

/* One option that is not what it was: dies, or with `say` says so (see options_resume_rule). */
static void option_changed(const Start *s, const char *key, const char *was, const char *is, bool allow_recipe_change,
                           bool say)
{
    ResumeRule rule = options_resume_rule(key);
    if (rule == RESUME_FIXED)
        die("resume: %s is %s in %s and %s now; give the same, or start a new run", key, was, s->dir, is);
    if (rule == RESUME_RECIPE && !allow_recipe_change)
        die("resume: %s is %s in %s and %s now; give the same, start a new run, or go on in another recipe with "
            "--allow_recipe_change",
            key, was, s->dir, is);
    if (say && rule != RESUME_SILENT)
        note("note: %s is %s in %s and %s now; the run goes on %s", key, was, s->dir, is,
             rule == RESUME_RECIPE ? "in the new recipe" : "with the new value");
}

static void compare_options(const Start *s, const Json *before, const Json *now, bool allow_recipe_change, bool say)
{
    for (const Json *option = json_first(now); option; option = json_next(option)) {
        char *was = json_print(json_get(before, json_key(option)), false), *is = json_print(option, false);
        if (strcmp(was, is)) option_changed(s, json_key(option), was, is, allow_recipe_change, say);
        free(was);
        free(is);
    }
}

/* What must not change over a resume, because the continuation would silently be another run; other shapes often fit
 * into the same tensors. What may change is said. The step of a switch to BF16 moves with `steps`: it may, unless that
 * takes back a switch that was, or asks for one that should have been. */
static void check_same_options(const Start *s, const Options *options, const ModelSpec *now_spec)
{
    Options saved;
    ModelSpec spec;
    Error error;
    if (start_saved(&saved, &spec, s->config, s->dir, &error)) die("resume: %s", error.text);
    Json *before = resolved_options(&saved, &spec), *now = resolved_options(options, now_spec);
    compare_options(s, before, now, options->allow_recipe_change, false);
    int64_t was = switch_step(&spec.recipe), is = switch_step(&now_spec->recipe);
    if ((was <= s->state.step) != (is <= s->state.step) && !options->allow_recipe_change)
        die("resume: with --steps %" PRId64 " the switch to BF16 would be after step %" PRId64
            ", and in %s it is after "
            "step %" PRId64 "; give the same --steps, or go on with --allow_recipe_change",
            options->steps, is, s->dir, was);
    compare_options(s, before, now, options->allow_recipe_change, true);
    json_free(before);
    json_free(now);
    options_free(&saved);
}

/* Reads the last consumed step again: the same bits, or the data changed behind our back. */
static void check_receipt(const Start *s, DataLoader *data, Comm *comm)
{
    StepData step;
    Error error;
    if (s->state.step == 0) return;
    if (dataloader_next(data, &step, &error)) die("train_data: %s", error.text);
    if (comm_sum_u64(comm, step.hash) != s->state.last_batch_hash)
        die("resume: the batch of step %" PRId64 " is not the one that %s was trained on: the files changed",
            s->state.step, s->dir);
}

void start_check(const Start *s, const Options *options, const ModelSpec *spec, DataLoader *data, Comm *comm)
{
    if (!s->dir) return;
    check_same_options(s, options, spec);
    if (s->state.seed != (uint64_t)options->seed)
        die("resume: %s was trained with --seed %" PRIu64 "; give the same seed (it is in config.json)", s->dir,
            s->state.seed);
    if (s->state.file_list_hash != dataloader_file_list_hash(data))
        die("resume: the training files are not those that %s was trained on (names, sizes or tokens differ); restore "
            "them, or start a new run",
            s->dir);
    check_receipt(s, data, comm);
}

void start_free(Start *s)
{
    free(s->dir);
    json_free(s->config);
    *s = (Start){0};
}
