/* telemetry.c over a backend that this test puts its own numbers into: a shadow step compares what it should and leaves
 * state, sums, formats and the step's gradients as they were; measures, shares of zeros, log and table say what was
 * planted; the products of a step are those that recipe_products says, and a difference ends the run. */
#include "telemetry.h"

#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cpu/backend.h"
#include "test.h"
#include "test_capture.h"

enum { L = 2, B = 2, T = 16, N = B * T, V = 140, MICRO_STEPS = 2 };

static const Ops *real;
static Ops ops; /* real, with the hooks below */

static struct {
    const GPT *gpt;
    bool disturb; /* outside of the shadow phase */
    QuantStats *stats;
    int measured_products;
    ProductCounts counts;
} hook;

/* ---- hooks ---- */

static void counted(int product, const Operand *first)
{
    const View *v = product == PRODUCT_WGRAD ? &first->col : &first->row;
    hook.counts.count[product][v->format.format]++;
    hook.measured_products += hook.stats != NULL;
}

static void forward(Tensor y, const Operand *x, const Linear *w)
{
    counted(PRODUCT_FPROP, x);
    real->linear_forward(y, x, w);
}

static void backward_input(Tensor dx, const Operand *dy, const Linear *w)
{
    counted(PRODUCT_DGRAD, dy);
    real->linear_backward_input(dx, dy, w);
}

static bool disturbed(void)
{
    int shadow = hook.gpt->recipe->shadow_phase;
    return hook.disturb && !(shadow && hook.gpt->phase == shadow);
}

/* The down of block 1 has its gradient tripled, of the o of block 0 the first half is lost. */
static void backward_weight(Linear *w, const Operand *dy, const Operand *x)
{
    counted(PRODUCT_WGRAD, dy);
    real->linear_backward_weight(w, dy, x);
    if (!disturbed()) return;
    float *dW = w->dW.data;
    int64_t elements = w->dW.rows * w->dW.cols;
    if (w == &hook.gpt->block[1].down)
        for (int64_t i = 0; i < elements; i++) dW[i] *= 3;
    if (w == &hook.gpt->block[0].o) memset(dW, 0, (size_t)(elements / 2) * sizeof *dW);
}

static void loss_sum(double *sum, Tensor losses)
{
    real->loss_sum(sum, losses);
    if (disturbed()) *sum += 0.25 * N;
}

static void add(QuantStats *to, QuantStats q)
{
    to->elements += q.elements;
    to->zeroed += q.zeroed;
    to->clipped += q.clipped;
    to->blocks += q.blocks;
    to->zero_blocks += q.zero_blocks;
    to->error2 += q.error2;
    to->signal2 += q.signal2;
}

/* What a backend would have found: the x_row of o in block 1, the dy_col of up in both. */
static void measure(QuantStats *stats)
{
    hook.stats = stats;
    if (!stats) return;
    add(&stats[OPERAND_ROLES + PROJ_O * OPERAND_COPIES + COPY_X_ROW], (QuantStats){320, 32, 16, 20, 5, 1, 16});
    for (int l = 0; l < 2; l++)
        add(&stats[l * OPERAND_ROLES + PROJ_UP * OPERAND_COPIES + COPY_DY_COL],
            (QuantStats){160, 40 * l, 0, 10, 0, 1 + 3 * (double)l, 4});
}

static void product_counts(ProductCounts *counts) { *counts = hook.counts; }

/* ---- a model and its batches ---- */

typedef struct {
    Model model;
    Telemetry telemetry;
    Batch batch[MICRO_STEPS];
    Step step;
} World;

static void open_world(World *w, Precision precision, Recompute recompute, const char *arguments)
{
    char *line = xformat("train_gpt --train_data x %s", arguments), *argv[16];
    int argc = 0;
    Error error;
    Options o;
    bool help;
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    if (options_parse(&o, argc, argv, &help, &error)) die("%s", error.text);
    ModelSpec spec = {.config = {.arch = ARCH_QWEN3, .L = L, .C = 48, .NH = 4, .V = V, .T = T, .rope_theta = 1e4},
                      .recipe = recipe_defaults(precision, MASTER_DEFAULT),
                      .seed = 3,
                      .train = true,
                      .B = B,
                      .micro_steps = MICRO_STEPS,
                      .recompute = recompute};
    spec.recipe.shadow = o.shadow_every > 0;
    spec.config.init_std = spec.config.embedding_init_std = 0.1f;
    if (config_finish(&spec.config, &error) || model_open(&w->model, &spec, &ops, &error)) die("%s", error.text);
    memset(&hook, 0, sizeof hook);
    hook.gpt = &w->model.gpt;
    zero_init_params(&w->model.zero, 3);
    gpt_enter_step(&w->model.gpt, 0);
    for (int m = 0; m < MICRO_STEPS; m++) {
        int32_t tokens[N], targets[N];
        for (int n = 0; n < N; n++) tokens[n] = (7 * n + n * n + 31 * m) % V, targets[n] = (5 * n + 3 * m) % V;
        w->batch[m] = model_upload(&w->model, m, tokens, targets);
    }
    w->step = (Step){.seed = 3,
                     .lr = 1e-3f,
                     .beta1 = 0.9f,
                     .beta2 = 0.95f,
                     .eps = 1e-8f,
                     .correction1 = 10,
                     .correction2 = 20,
                     .loss_scale = 1.0f / (N * MICRO_STEPS),
                     .grad_clip = 1};
    telemetry_open(&w->telemetry, &w->model, &o);
    options_free(&o);
    free(line);
}

static void close_world(World *w)
{
    telemetry_close(&w->telemetry);
    model_close(&w->model);
}

static StepResult run_step(World *w, uint32_t index)
{
    w->step.step = index;
    telemetry_gradients(&w->telemetry, &w->step, w->batch);
    optimizer_step(&w->model.optimizer, N * MICRO_STEPS);
    return optimizer_result(&w->model.optimizer);
}

/* ---- tests ---- */

static void check_same_run(Precision precision, Recompute recompute)
{
    World plain, watched;
    StepResult results[4];
    uint64_t hashes[4];
    open_world(&plain, precision, recompute, "");
    hook.disturb = precision == PRECISION_BF16;
    for (uint32_t i = 0; i < 4; i++) {
        results[i] = run_step(&plain, i);
        hashes[i] = zero_state_hash(&plain.model.zero);
        CHECK(!plain.telemetry.measured && !plain.telemetry.compared, "nothing was asked for");
    }
    close_world(&plain);
    open_world(&watched, precision, recompute, "--telemetry_every 2 --shadow_every 3");
    hook.disturb = precision == PRECISION_BF16;
    for (uint32_t i = 0; i < 4; i++) {
        StepResult r = run_step(&watched, i);
        CHECK(r.loss == results[i].loss && r.grad_norm == results[i].grad_norm, "step %u: loss %.17g norm %.17g", i,
              r.loss, r.grad_norm);
        CHECK(zero_state_hash(&watched.model.zero) == hashes[i], "step %u: another state", i);
        CHECK(watched.model.gpt.phase == 0, "step %u: phase %d", i, watched.model.gpt.phase);
        CHECK(watched.telemetry.measured == (i % 2 == 1) && watched.telemetry.compared == (i == 2), "step %u: due", i);
        CHECK(hook.stats == NULL, "step %u: goes on measuring", i);
    }
    int products = L * PROJ_COUNT * 3 + 3 + (recompute == RECOMPUTE_BLOCK ? L * 3 : 0);
    CHECK(hook.measured_products == 2 * MICRO_STEPS * products, "%d products measured", hook.measured_products);
    close_world(&watched);
}

static void test_same_run(void)
{
    test_case("a run is the same with shadow and telemetry: bf16, disturbed");
    check_same_run(PRECISION_BF16, RECOMPUTE_NONE);
    check_same_run(PRECISION_BF16, RECOMPUTE_BLOCK);
    test_case("a run is the same with shadow and telemetry: fp32");
    check_same_run(PRECISION_FP32, RECOMPUTE_OPERANDS);
}

static void test_shadow(void)
{
    World w;
    test_case("shadow of the same precision: cosine 1, ratio 1, no gap");
    open_world(&w, PRECISION_BF16, RECOMPUTE_NONE, "--shadow_every 1");
    run_step(&w, 0);
    CHECK(w.telemetry.compared && w.telemetry.loss_gap == 0, "gap %g", w.telemetry.loss_gap);
    for (int i = 0; i < L * PROJ_COUNT; i++)
        CHECK(fabs(w.telemetry.gap[i].cosine - 1) < 1e-14 && w.telemetry.gap[i].norm_ratio == 1, "%d: %.17g %.17g", i,
              w.telemetry.gap[i].cosine, w.telemetry.gap[i].norm_ratio);

    test_case("shadow: what was planted into one side");
    Tensor o = zero_slice(&w.model.zero, 1).grad; /* block.0.o; the sums are zero now */
    double all = 0, kept = 0;
    w.step.step = 1;
    gpt_gradients(&w.model.gpt, &w.step, w.batch, 1);
    for (int64_t i = 0; i < o.rows * o.cols; i++) {
        double x = (double)((float *)o.data)[i];
        all += x * x;
        if (i >= o.rows * o.cols / 2) kept += x * x;
    }
    for (int i = 0; i < w.model.table.count; i++) ops.zero(w.model.zero.shard[i].sum);
    hook.disturb = true;
    run_step(&w, 1);
    CHECK(fabs(w.telemetry.loss_gap - 0.25) < 1e-12, "gap %.17g", w.telemetry.loss_gap);
    for (int i = 0; i < L * PROJ_COUNT; i++) {
        double share = sqrt(kept / all), cosine = i == PROJ_O ? share : 1,
               ratio = i == PROJ_O                   ? share
                       : i == PROJ_COUNT + PROJ_DOWN ? 3
                                                     : 1;
        CHECK(fabs(w.telemetry.gap[i].cosine - cosine) < 1e-7 && fabs(w.telemetry.gap[i].norm_ratio - ratio) < 1e-7,
              "%d: %.17g %.17g, not %.17g %.17g", i, w.telemetry.gap[i].cosine, w.telemetry.gap[i].norm_ratio, cosine,
              ratio);
    }
    CHECK(kept < 0.9 * all && kept > 0.1 * all, "the planted gap is a poor one");
    close_world(&w);

    test_case("shadow: its memory is planned, and only where it is asked for");
    World with, without;
    open_world(&without, PRECISION_BF16, RECOMPUTE_NONE, "");
    open_world(&with, PRECISION_BF16, RECOMPUTE_NONE, "--shadow_every 1");
    int64_t elements = 0;
    for (int i = 0; i < with.model.table.count; i++)
        if (with.model.table.param[i].layer < L && with.model.table.param[i].rows > 1)
            elements += with.model.table.param[i].rows * with.model.table.param[i].cols;
    CHECK(with.model.shadow.cols == elements && !without.model.shadow.data, "%d elements", (int)with.model.shadow.cols);
    size_t more = with.model.arena.bytes[PURPOSE_GRADIENT] - without.model.arena.bytes[PURPOSE_GRADIENT];
    CHECK(more >= (size_t)elements * 4 && more < (size_t)elements * 4 + 512, "%zu bytes more", more);
    close_world(&with);
    close_world(&without);
}

static void test_log(void)
{
    World w;
    test_case("log: measures and shares of zeros");
    open_world(&w, PRECISION_BF16, RECOMPUTE_NONE, "--telemetry_every 2 --telemetry_table");
    hook.disturb = true;
    run_step(&w, 1);
    run_step(&w, 2);
    run_step(&w, 3);
    CHECK(w.telemetry.stats[OPERAND_ROLES + PROJ_O * OPERAND_COPIES + COPY_X_ROW].elements == 320,
          "more than the one step is in the measures");
    Json *line = json_new_object();
    telemetry_log(&w.telemetry, line);
    char *text = json_print(line, false);
    const char *wanted =
        "{\"telemetry\":{\"operands\":{\"o.x_row\":{\"layer\":[1],\"error\":[0.25],\"zeroed\":[0.1],\"clipped\":[0.05],"
        "\"zero_blocks\":[0.25]},\"up.dy_col\":{\"layer\":[0,1],\"error\":[0.5,1],\"zeroed\":[0,0.25],\"clipped\":[0,0]"
        ","
        "\"zero_blocks\":[0,0]}},\"zero_gradients\":{\"qkv\":[0,0],\"o\":[0.5,0],\"up\":[0,0],\"down\":[0,0]}}}";
    CHECK(!strcmp(text, wanted), "%s", text);
    free(text);
    json_free(line);

    test_case("table: means and the largest error");
    Capture capture = capture_start();
    telemetry_print(&w.telemetry, 4);
    char *table = capture_end(&capture);
    CHECK(!strcmp(table, "quantization of step 4, over blocks\n"
                         "  operand        error     max  zeroed clipped zero blocks\n"
                         "  o.x_row       25.00%  25.00%  10.00%   5.00%    25.00%\n"
                         "  up.dy_col     75.00% 100.00%  12.50%   0.00%     0.00%\n"),
          "%s", table);
    free(table);
    run_step(&w, 4);
    line = json_new_object();
    telemetry_log(&w.telemetry, line);
    CHECK(json_count(line) == 0, "a step that is not due");
    json_free(line);
    close_world(&w);

    test_case("log and table of a shadow step");
    open_world(&w, PRECISION_BF16, RECOMPUTE_NONE, "--shadow_every 1");
    run_step(&w, 0);
    hook.disturb = true;
    run_step(&w, 1);
    line = json_new_object();
    telemetry_log(&w.telemetry, line);
    text = json_print(line, false);
    CHECK(strstr(text, "{\"shadow\":{\"loss_gap\":0.25,\"cosine\":{\"qkv\":[1,1],\"o\":[0.") == text, "%s", text);
    CHECK(strstr(text, "\"norm_ratio\":{\"qkv\":[1,1],\"o\":[0."), "%s", text);
    CHECK(strstr(text, ",1],\"up\":[1,1],\"down\":[1,3]}}}"), "%s", text);
    capture = capture_start();
    telemetry_print(&w.telemetry, 2);
    w.telemetry.table = true;
    telemetry_print(&w.telemetry, 2);
    table = capture_end(&capture);
    CHECK(strstr(table, "shadow of step 2: loss +0.250000 against BF16\n") == table, "%s", table);
    CHECK(strstr(table, "\n  down          1.0000  1.0000      2.0000\n"), "%s", table);
    free(table);
    free(text);
    json_free(line);
    close_world(&w);
}

/* Makes recipe_quantizes true by the shadow's table, which no step reads: so the products are checked. */
static void pretend_nvfp4(World *w)
{
    Recipe *r = &w->model.recipe;
    r->formats[r->shadow_phase * r->L * PROJ_COUNT].x_row.format = FORMAT_NVFP4;
}

static int run_child(World *w, char *output, size_t room)
{
    int ends[2], status = 0;
    fflush(stdout);
    if (pipe(ends)) die("cannot make a pipe");
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        run_step(w, 0);
        _exit(0);
    }
    close(ends[1]);
    ssize_t got = read(ends[0], output, room - 1);
    output[got > 0 ? got : 0] = 0;
    close(ends[0]);
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void test_products(void)
{
    World w;
    char output[512];
    test_case("products of a step are those that the recipe asks for, whatever is recomputed");
    for (int precision = PRECISION_FP32; precision <= PRECISION_BF16; precision++)
        for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_BLOCK; recompute++) {
            open_world(&w, (Precision)precision, (Recompute)recompute, "--shadow_every 9");
            ProductCounts wanted = recipe_products(&w.model.recipe, &w.model.spec.config, 0, (Recompute)recompute,
                                                   MICRO_STEPS, ceil_div(N, w.model.gpt.acts.chunk));
            run_step(&w, 0);
            CHECK(!memcmp(&wanted, &hook.counts, sizeof wanted), "%s, recompute %d",
                  precision_name((Precision)precision), recompute);
            pretend_nvfp4(&w);
            w.telemetry.checked_phase = -1;
            run_step(&w, 1);
            CHECK(w.telemetry.checked_phase == 0, "not checked");
            close_world(&w);
        }

    test_case("products: a difference ends the run, in the first step of a phase");
    open_world(&w, PRECISION_BF16, RECOMPUTE_NONE, "--shadow_every 9");
    ops.linear_backward_input = real->linear_backward_input;
    CHECK(run_child(&w, output, sizeof output) == EXIT_RUNTIME, "not seen");
    CHECK(strstr(output, "dgrad in bf16: 0 products ran in this step, the recipe asks for 18; this is a bug"), "%s",
          output);
    w.telemetry.checked_phase = 0;
    CHECK(run_child(&w, output, sizeof output) == 0, "seen again: %s", output);
    ops.linear_backward_input = backward_input;
    close_world(&w);
}

int main(void)
{
    Error error;
    if (cpu_open(&real, "auto", 1, &error)) die("%s", error.text); /* one thread: it forks */
    ops = *real;
    ops.linear_forward = forward;
    ops.linear_backward_input = backward_input;
    ops.linear_backward_weight = backward_weight;
    ops.loss_sum = loss_sum;
    ops.measure = measure;
    ops.product_counts = product_counts;
    test_same_run();
    test_shadow();
    test_log();
    test_products();
    return test_done();
}
