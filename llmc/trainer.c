/* See trainer.h. */
#include "trainer.h"

#include "algorithms.h"
#include "checkpoint.h"
#include "dataloader.h"
#include "evaluate.h"
#include "file.h"
#include "generate.h"
#include "logger.h"
#include "mathfn.h"
#include "plan.h"
#include "start.h"
#include "telemetry.h"
#include "tokenizer.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct { /* a step that was issued; what is said of it waits for its result */
    int64_t number;
    Step step;
    double began, issued_ms;        /* clock; how long issuing took, which on a CPU is the step */
    double wait_ms, waited_s;       /* for data; of comm, at the step's start */
    uint64_t data_hash, wire_bytes; /* wire_bytes: that this rank sent */
} Issued;

typedef struct {
    const Options *options; /* precision resolved */
    const Machine *machine;
    bool automatic; /* precision auto was given */
    char precision_reason[160];
    Telemetry telemetry;
    Model model;
    DataLoader *data, *val; /* val NULL: no validation */
    Logger *log;
    RunState state;     /* of the steps done */
    int64_t saved_step; /* the newest step on the disk or on its way there, or -1 */
    CheckpointWriter writer;
    char *config_text;
    Schedule schedule;
    int64_t global_batch;
    double peak_flops, started;
    int64_t started_step;
    Issued issued;                      /* on a GPU the step before the one that is issued; number 0: none */
    double reported, reported_waited_s; /* when the last step was; comm's waits by then */
    double busy_s;                      /* that this rank has worked in steps since the last line on stragglers */
} Trainer;

/* ---- signals ---- */

static volatile sig_atomic_t interrupted;

static void on_signal(int number)
{
    (void)number;
    interrupted = 1;
    signal(SIGINT, SIG_DFL); /* the next one, of either kind, ends the process at once */
    signal(SIGTERM, SIG_DFL);
}

static bool stopping(void) { return interrupted; }

/* ---- set-up ---- */

static DataLoader *open_data(const Trainer *t, const char *pattern, bool train, int64_t first_step)
{
    const ModelSpec *s = &t->model.spec;
    Error error;
    DataLoaderConfig config = {.pattern = pattern,
                               .B = s->B,
                               .T = s->config.T,
                               .micro_batches = train ? s->micro_steps * s->sharding.comm->ranks : 1,
                               .rank = train ? s->sharding.comm->rank : 0,
                               .ranks = train ? s->sharding.comm->ranks : 1,
                               .seed = (uint64_t)t->options->seed,
                               .shuffle = train,
                               .vocab = s->config.V};
    DataLoader *loader = dataloader_open(&config, first_step, &error);
    if (!loader) die("%s: %s", train ? "train_data" : "val_data", error.text);
    return loader;
}

/* A folder and those above it. */
static void make_folders(const char *path)
{
    char *copy = xstrdup(path);
    for (char *p = copy + 1; *p; p++)
        if (*p == '/') {
            *p = 0;
            mkdir(copy, 0777);
            *p = '/';
        }
    if (mkdir(copy, 0777) && errno != EEXIST) die("run_dir %s: cannot create: %s", path, strerror(errno));
    if (access(path, W_OK)) die("run_dir %s: cannot write there: %s", path, strerror(errno));
    free(copy);
}

/* config.json: the options, and what was resolved from them. */
static char *config_text(const Trainer *t)
{
    const ModelSpec *s = &t->model.spec;
    char census[CENSUS_BYTES];
    Json *config = json_new_object();
    options_to_json(t->options, json_add_object(config, "options"));
    json_add_string(config, "isa", t->machine->isa);
    json_add_int(config, "threads", t->machine->threads);
    json_add_int(config, "ranks", s->sharding.comm->ranks);
    json_add_int(config, "zero_stage", s->sharding.stage);
    json_add_string(config, "precision", precision_name(s->recipe.precision));
    json_add_string(config, "precision_reason", t->precision_reason);
    recipe_census(&t->model.recipe, &s->config, census, sizeof census);
    json_add_string(config, "recipe", census);
    json_add_float(config, "fp4_share", recipe_fp4_share(&t->model.recipe, &s->config, 0));
    recipe_census_table(&t->model.recipe, json_add_array(config, "census"));
    json_add_int(config, "parameters", config_parameters(&s->config));
    json_add_int(config, "micro_steps", s->micro_steps);
    if (s->config.V == BYTE_TOKENIZER_VOCAB) json_add_int(config, "bytes_per_token", 1);
    char *body = json_print(config, true), *text = xformat("%s\n", body);
    free(body);
    json_free(config);
    return text;
}

static void write_config(const Trainer *t)
{
    char *path = xformat("%s/config.json", t->options->run_dir);
    Error error;
    if (file_write_text(path, t->config_text, &error)) die("%s", error.text);
    free(path);
}

static void print_header(const Trainer *t, const char *from)
{
    const ModelSpec *s = &t->model.spec;
    const GPTConfig *c = &s->config;
    printf("model       %s, %" PRId64 " layers, hidden %" PRId64 ", %" PRId64 " heads, %" PRId64
           " parameters, context %" PRId64 "\n",
           arch_name(c->arch), c->L, c->C, c->NH, config_parameters(c), c->T);
    plan_print_precision(&t->model, t->automatic, t->precision_reason);
    plan_print_line(&t->model);
    printf("device      %s, %d threads; matrix products at most %.0f GFLOP/s here, the base of mfu\n",
           t->model.ops->name, t->machine->threads, t->peak_flops * 1e-9);
    printf("data        %" PRId64 " tokens, %" PRId64 " windows; a step is %" PRId64 " tokens in %" PRId64
           " micro-batches of %" PRId64 " x %" PRId64 "\n",
           dataloader_tokens(t->data), dataloader_windows(t->data), t->global_batch, s->micro_steps, s->B, c->T);
    if (dataloader_raw_files(t->data))
        printf("            %" PRId64 " of the files have no header and are read as uint16\n",
               dataloader_raw_files(t->data));
    if (s->sharding.comm->ranks > 1)
        printf("ranks       %d, zero_stage %d; memory, threads and micro-batches above are of one rank\n",
               s->sharding.comm->ranks, s->sharding.stage);
    printf("run         %s, %" PRId64 " steps%s%s\n\n", t->options->run_dir, t->options->steps,
           from ? ", continued from " : "", from ? from : "");
    fflush(stdout);
}

/* Every token that validation will read, so that a bad one is found now and not after an hour. */
static void check_validation(const Trainer *t)
{
    int64_t T = t->model.spec.config.T, windows = dataloader_windows(t->val);
    int32_t *window = xmalloc((size_t)(T + 1) * sizeof *window);
    Error error;
    for (int64_t w = 0; w < min_i64(windows, t->options->val_batches * t->model.spec.B); w++)
        if (dataloader_read_window(t->val, w, window, &error)) die("val_data: %s", error.text);
    free(window);
}

/* One process a run folder: the lock goes with the process, however it ends. */
static void lock_run(const char *run_dir)
{
    char *path = xformat("%s/.lock", run_dir);
    int fd = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0666);
    if (fd < 0) die("%s: cannot open: %s", path, strerror(errno));
    if (flock(fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK)
        die("run_dir %s: another process is training there; wait for it, or choose another --run_dir", run_dir);
    free(path); /* fd stays open until the process ends */
}

/* From here on the run folder changes; on rank 0 alone. */
static void open_run(Trainer *t, const Start *from)
{
    const Options *o = t->options;
    Error error;
    make_folders(o->run_dir);
    lock_run(o->run_dir);
    if (checkpoint_delete_after(o->run_dir, t->saved_step, &error)) die("run_dir: %s", error.text);
    t->log = logger_open(o->run_dir, t->saved_step, &error);
    if (!t->log) die("%s", error.text);
    write_config(t);
    if (!from->dir) algorithms_forget(o->run_dir);
    if (from->dir) checkpoint_prune(o->run_dir, t->state.step, o->keep_checkpoints); /* a kill may have left one more */
}

/* Opens and checks all that the run reads; then the run folder changes. Resolves the precision in *o. */
static void start(Trainer *t, Options *o)
{
    Error error;
    Start from;
    ModelSpec spec;
    Comm *comm = t->machine->comm;
    comm->hang_timeout_s = o->hang_timeout_s;
    comm->stopping = stopping;
    if (o->tune_gemm && !t->machine->ops->tune) die_usage("tune_gemm: this program has nothing to choose from");
    start_choose(&from, o);
    t->automatic = o->recipe.precision == PRECISION_AUTO;
    if (start_resolve(&from, o, t->machine->ops->native_fp4, t->precision_reason, &error)) die("%s", error.text);
    o->ranks = comm->ranks;
    if (start_spec(o, &spec, &error)) die_usage("%s", error.text);
    if (comm->ranks > 1 && (o->telemetry_every || o->shadow_every))
        die_usage("telemetry_every and shadow_every look at whole gradients: they need one rank");
    spec.sharding.comm = comm;
    t->model.spec = spec;
    t->global_batch = spec.micro_steps * spec.B * spec.config.T * comm->ranks;
    t->schedule = (Schedule){.kind = o->lr_schedule,
                             .lr = o->lr,
                             .final_lr_fraction = o->final_lr_fraction,
                             .wsd_decay_fraction = o->wsd_decay_fraction,
                             .steps = o->steps,
                             .warmup_steps = o->warmup_steps};

    t->data = open_data(t, o->train_data, true, start_first_step(&from));
    if (*o->val_data && o->val_every) t->val = open_data(t, o->val_data, false, 0);
    if (t->val) check_validation(t);
    start_check(&from, o, &spec, t->data, comm);
    t->state = from.state;
    t->saved_step = from.dir ? from.state.step : -1;
    if (model_open(&t->model, &spec, t->machine->ops, &error)) die_usage("%s", error.text);
    if (from.dir && checkpoint_load(from.dir, &t->model, from.state.optimizer_files, &error))
        die("resume: %s", error.text);
    if (from.dir && zero_state_hash(&t->model.zero) != t->state.state_hash)
        die("resume: the state read from %s is not the one that was saved; this is a bug", from.dir);

    t->config_text = config_text(t);
    comm_check_equal(comm, "configuration", hash64(t->config_text, strlen(t->config_text), 0));
    if (comm->rank == 0) open_run(t, &from);
    if (!from.dir) zero_init_params(&t->model.zero, (uint64_t)o->seed);
    t->state.file_list_hash = dataloader_file_list_hash(t->data);
    gpt_enter_step(&t->model.gpt, (uint32_t)t->state.step);
    algorithms_choose(&t->model, o->run_dir, from.dir != NULL, o->tune_gemm);
    telemetry_open(&t->telemetry, &t->model, o);
    t->peak_flops = t->model.ops->peak_flops(t->model.recipe.act);
    print_header(t, from.dir);
    start_free(&from);
}

/* ---- one step ---- */

static bool due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

/* After a call of the checkpoint's writer: 0, or how it failed. */
static void check_saved(const Trainer *t, int status, const Error *error)
{
    if (status > 0) comm_await_end(t->machine->comm, "checkpoint of step %" PRId64 ": %s", t->saved_step, error->text);
    if (status)
        die("checkpoint of step %" PRId64 ": %s; the checkpoints before are as they were", t->saved_step, error->text);
}

static void finish_saving(Trainer *t)
{
    Error error;
    check_saved(t, checkpoint_finish(&t->writer, &error), &error);
}

static void save(Trainer *t, bool background)
{
    const Options *o = t->options;
    Error error;
    finish_saving(t);
    t->state.state_hash = zero_state_hash(&t->model.zero);
    t->saved_step = t->state.step;
    check_saved(t,
                checkpoint_start(&t->writer, o->run_dir, &t->model, &t->state, t->config_text, o->keep_checkpoints,
                                 background, &error),
                &error);
}

static void print_layers(const Trainer *t, bool before)
{
    const ParamTable *table = &t->model.table;
    int bad = 0;
    for (int i = 0; i < table->count; i++) {
        GradientReport r = optimizer_gradient(&t->model.optimizer, i, before);
        if (!r.finite && bad++ < 16) fprintf(stderr, "  %-24s gradient norm %g\n", table->param[i].name, r.norm);
    }
    if (bad) fprintf(stderr, "  %d of %d parameters have a gradient that is not finite\n", bad, table->count);
    for (int i = 0; !bad && i < table->count; i++)
        fprintf(stderr, "  %-24s gradient norm %g\n", table->param[i].name,
                optimizer_gradient(&t->model.optimizer, i, before).norm);
}

static const char *instead_of(const Options *options) { return options->overwrite ? " instead of --overwrite" : ""; }

static void stop_not_finite(Trainer *t, int64_t step, const StepResult *r)
{
    Comm *comm = t->machine->comm;
    bool before = t->state.step > step; /* one more was issued, and changed nothing */
    int64_t bad = optimizer_bad_loss(&t->model.optimizer, before);
    char whose[64] = "";
    if (comm->ranks > 1 && bad >= 0)
        snprintf(whose, sizeof whose, " (first that of rank %" PRId64 ")", bad % comm->ranks);
    finish_saving(t);
    if (comm->rank > 0)
        comm_await_end(comm, "step %" PRId64 ", forward and backward: %s is not finite%s", step,
                       isfinite(r->loss) ? "the gradient norm" : "the loss", whose);
    print_layers(t, before);
    die("step %" PRId64 ": %s is %g%s; weights and moments are those of step %" PRId64
        ". Replay: the same command with --resume auto%s%s; a lower --lr may help, in a new run "
        "--precision fp32 or a longer --warmup_steps too",
        step, isfinite(r->loss) ? "the gradient norm" : "the loss", isfinite(r->loss) ? r->grad_norm : r->loss, whose,
        step - 1, instead_of(t->options),
        checkpoint_count(t->options->run_dir) ? "" : " (no checkpoint yet: it starts from step 0)");
}

static void report_issued(Trainer *t);

/* Data, gradients, update. */
static Issued issue_step(Trainer *t)
{
    const Options *o = t->options;
    const ModelSpec *s = &t->model.spec;
    Issued issued = {.began = now_seconds(), .waited_s = t->machine->comm->waited_s};
    int64_t N = s->B * s->config.T;
    StepData data;
    Error error;
    if (dataloader_next(t->data, &data, &error)) {
        if (t->machine->comm->ranks > 1) die("train_data: %s", error.text); /* the others are already in the step */
        report_issued(t);
        if (t->state.step > t->saved_step) save(t, false);
        finish_saving(t);
        die("train_data: %s; step %" PRId64 " was saved", error.text, t->state.step);
    }
    issued.wait_ms = data.wait_ms;
    data.hash = comm_sum_u64(t->machine->comm, data.hash);

    int64_t index = t->state.step;
    issued.step = (Step){.seed = (uint64_t)o->seed,
                         .step = (uint32_t)index,
                         .lr = schedule_lr(&t->schedule, index),
                         .beta1 = (float)o->beta1,
                         .beta2 = (float)o->beta2,
                         .eps = (float)o->eps,
                         .weight_decay = (float)o->weight_decay,
                         .correction1 = (float)(1 / (1 - f64_power(o->beta1, index + 1))),
                         .correction2 = (float)(1 / (1 - f64_power(o->beta2, index + 1))),
                         .loss_scale = (float)(1.0 / (double)t->global_batch),
                         .grad_clip = (float)o->grad_clip};
    Batch *batch = xcalloc((size_t)s->micro_steps, sizeof *batch);
    for (int64_t m = 0; m < s->micro_steps; m++)
        batch[m] = model_upload(&t->model, m, data.tokens + m * N, data.targets + m * N);
    size_t sent = t->machine->comm->bytes_sent;
    telemetry_gradients(&t->telemetry, &issued.step, batch);
    free(batch);

    optimizer_step(&t->model.optimizer, t->global_batch);
    issued.wire_bytes = t->machine->comm->bytes_sent - sent;
    issued.issued_ms = (now_seconds() - issued.began) * 1e3;
    issued.number = ++t->state.step;
    t->state.last_batch_hash = data.hash;
    uint64_t chain[2] = {t->state.data_hash, data.hash};
    issued.data_hash = t->state.data_hash = hash64(chain, sizeof chain, 0);
    return issued;
}

/* ---- what is due after a step ---- */

static void print_token(void *context, int32_t token)
{
    tokenizer_print(token, ((const Model *)context)->spec.config.V);
}

/* From the first tokens of the validation data (or the training data), so that the start is in the model's language. */
static void print_sample(Trainer *t)
{
    int64_t T = t->model.spec.config.T, prompt = min_i64(16, T);
    int32_t *window = xmalloc((size_t)(T + 1) * sizeof *window);
    Sampling sampling = {.tokens = t->options->sample_tokens,
                         .top_k = t->options->top_k,
                         .temperature = t->options->temperature,
                         .seed = (uint64_t)t->options->seed};
    Error error;
    if (dataloader_read_window(t->val ? t->val : t->data, 0, window, &error)) die("sample: %s", error.text);
    printf("--- sample after step %" PRId64 " ---\n", t->state.step);
    for (int64_t i = 0; i < prompt; i++) print_token(&t->model, window[i]);
    if (generate(&t->model, window, prompt, &sampling, print_token, &t->model, &error)) die("%s", error.text);
    printf("\n---\n");
    model_use(&t->model, USE_TRAIN, 0);
    free(window);
}

typedef struct {
    double ms, tokens_per_s, mfu;
    Evaluation val;
    uint64_t state_hash, wire_bytes; /* wire_bytes: of all ranks */
    bool validated, hashed;
} StepReport;

static void write_log(Trainer *t, const Issued *s, const StepResult *r, const StepReport *report)
{
    Json *line = json_new_object();
    Error error;
    char hash[17];
    json_add_int(line, "step", s->number);
    json_add_int(line, "tokens", s->number * t->global_batch);
    json_add_float(line, "loss", r->loss);
    if (report->validated) json_add_float(line, "val_loss", report->val.loss);
    if (report->validated && isfinite(report->val.bits_per_byte))
        json_add_float(line, "val_bpb", report->val.bits_per_byte);
    json_add_float(line, "grad_norm", r->grad_norm);
    json_add_float(line, "lr", (double)s->step.lr);
    json_add_float(line, "step_ms", report->ms);
    json_add_float(line, "tokens_per_s", report->tokens_per_s);
    json_add_float(line, "mfu", report->mfu);
    json_add_float(line, "data_wait_ms", s->wait_ms);
    if (t->machine->comm->ranks > 1) json_add_int(line, "wire_bytes", (int64_t)report->wire_bytes);
    snprintf(hash, sizeof hash, "%016" PRIx64, s->data_hash);
    json_add_string(line, "data_hash", hash);
    if (report->hashed) {
        snprintf(hash, sizeof hash, "%016" PRIx64, report->state_hash);
        json_add_string(line, "state_hash", hash);
    }
    if (t->telemetry.number == s->number) telemetry_log(&t->telemetry, line); /* else it is of the step that follows */
    if (logger_write(t->log, line, &error)) die("%s", error.text);
    json_free(line);
}

static void print_step(const Trainer *t, const Issued *s, const StepResult *r, const StepReport *report)
{
    double per_step = (now_seconds() - t->started) / (double)(s->number - t->started_step);
    int64_t left = (int64_t)(per_step * (double)(t->options->steps - s->number) + 0.5);
    printf("step %5" PRId64 "/%" PRId64 " | loss %.4f | norm %7.4f | lr %.2e | %8.0f tok/s | mfu %4.1f%% | eta %" PRId64
           ":%02" PRId64 "\n",
           s->number, t->options->steps, r->loss, r->grad_norm, (double)s->step.lr, report->tokens_per_s,
           100 * report->mfu, left / 60, left % 60);
    if (report->validated) {
        printf("validation after step %" PRId64 ": loss %.4f", s->number, report->val.loss);
        if (isfinite(report->val.bits_per_byte)) printf(", %.4f bits per byte", report->val.bits_per_byte);
        printf(" over %" PRId64 " tokens\n", report->val.tokens);
    }
    if (t->telemetry.number == s->number) telemetry_print(&t->telemetry, s->number);
    fflush(stdout);
}

/* Every straggler_every steps: which rank worked longest while the others waited for it. */
static void print_straggler(Trainer *t, int64_t step)
{
    Comm *c = t->machine->comm;
    if (c->ranks == 1 || !due(step, t->options->straggler_every)) return;
    double *busy = xcalloc((size_t)c->ranks, sizeof *busy), mean = 0;
    int slowest = 0;
    busy[c->rank] = t->busy_s;
    c->sum_host(c, busy, c->ranks);
    for (int r = 0; r < c->ranks; r++) {
        mean += busy[r] / c->ranks;
        if (busy[r] > busy[slowest]) slowest = r;
    }
    printf("slowest of %d ranks in the last %" PRId64 " steps: rank %d, %.1f%% more work than the mean\n", c->ranks,
           t->options->straggler_every, slowest, 100 * (busy[slowest] / mean - 1));
    t->busy_s = 0;
    free(busy);
}

/* Is there something to do after a step that reads the state it leaves? */
static bool is_looked_at(const Trainer *t, int64_t step)
{
    const Options *o = t->options;
    return step == o->steps || due(step, o->val_every) || due(step, o->hash_every) || due(step, o->sample_every) ||
           due(step, o->checkpoint_every) || due(step, o->telemetry_every) || due(step, o->shadow_every);
}

/* Waits for the step's result, and says it. The state is that of the step where it is looked at. */
static void report_step(Trainer *t, const Issued *s)
{
    const Options *o = t->options;
    Comm *comm = t->machine->comm;
    StepReport report = {0};
    Error error;
    StepResult result = optimizer_result(&t->model.optimizer);
    if (!result.finite) stop_not_finite(t, s->number, &result);
    report.ms = fmax((now_seconds() - fmax(s->began, t->reported)) * 1e3, s->issued_ms);
    t->busy_s += report.ms * 1e-3 - (comm->waited_s - fmax(s->waited_s, t->reported_waited_s));
    print_straggler(t, s->number);
    report.wire_bytes = comm_sum_u64(comm, s->wire_bytes);
    report.tokens_per_s = (double)t->global_batch / report.ms * 1e3;
    report.mfu = report.tokens_per_s * config_flops_per_token(&t->model.spec.config) / t->peak_flops / comm->ranks;

    bool last = s->number == o->steps;
    report.validated = t->val && (due(s->number, o->val_every) || last);
    if (report.validated && evaluate(&t->model, t->val, o->val_batches, &report.val, &error))
        die("val_data: %s", error.text);
    report.hashed = due(s->number, o->hash_every);
    if (report.hashed) report.state_hash = zero_state_hash(&t->model.zero);
    if (t->log) write_log(t, s, &result, &report);
    print_step(t, s, &result, &report);
    if (due(s->number, o->sample_every)) print_sample(t);
    if (o->checkpoint_every && (due(s->number, o->checkpoint_every) || last)) save(t, o->checkpoint_async);
    t->reported = now_seconds();
    t->reported_waited_s = comm->waited_s;
}

static void report_issued(Trainer *t)
{
    Issued issued = t->issued;
    t->issued.number = 0;
    if (issued.number) report_step(t, &issued);
}

/* One step; where the host may run ahead, its result is said when the next one is on its way. */
static void run_step(Trainer *t)
{
    Issued issued = issue_step(t);
    report_issued(t);
    t->issued = issued;
    if (t->model.ops->result_lag == 0 || is_looked_at(t, issued.number)) report_issued(t);
}

/* Between steps, all ranks alike: whether to stop; ends a checkpoint that all have written. */
static bool settle(Trainer *t)
{
    Comm *comm = t->machine->comm;
    enum { STOP = 1 << 20 }; /* above any number of ranks */
    uint64_t sum = comm_sum_u64(comm, (interrupted ? STOP : 0) + (uint64_t)checkpoint_ready(&t->writer));
    if (sum % STOP == (uint64_t)comm->ranks) finish_saving(t);
    return sum >= STOP;
}

void trainer_run(const Options *options, const Machine *machine)
{
    Options resolved = *options; /* its strings belong to `options` */
    Trainer t = {.options = &resolved, .machine = machine};
    if (signal(SIGINT, SIG_IGN) != SIG_IGN) signal(SIGINT, on_signal); /* ignored from outside: stays so */
    if (signal(SIGTERM, SIG_IGN) != SIG_IGN) signal(SIGTERM, on_signal);
    start(&t, &resolved);
    t.started = now_seconds();
    t.started_step = t.state.step;

    bool stop = false;
    while (t.state.step < options->steps && !(stop = settle(&t))) {
        machine->comm->step = t.state.step + 1;
        run_step(&t);
    }
    report_issued(&t);
    if (stop && t.state.step != t.saved_step) save(&t, false);
    finish_saving(&t);
    if (stop) {
        printf("stopped after step %" PRId64 " and saved; go on with the same command and --resume auto%s\n",
               t.state.step, instead_of(options));
    } else {
        printf("done: %" PRId64 " steps, %.0f s, peak memory %.2f GiB\n", t.state.step, now_seconds() - t.started,
               (double)peak_rss_bytes() / 0x1p30);
    }
    checkpoint_close(&t.writer);
    telemetry_close(&t.telemetry);
    if (t.log) logger_close(t.log);
    dataloader_close(t.data);
    dataloader_close(t.val);
    model_close(&t.model);
    free(t.config_text);
}
