/* Cases for every operation but attention (attention_cases.h), in ops_harness.h's way: random shapes and inputs, and
 * what is expected by plain loops in FP64. Bounds are relative to |value| + rms; a BF16 result may be off by its
 * rounding, 2^-8.
 */
#ifndef LLMC_OPS_CASES_H
#define LLMC_OPS_CASES_H

#include "ops_harness.h"

static const double HALF_ULP = 0x1p-8; /* of BF16, relative, with room for what precedes the rounding */

static double bound_of(DType dtype, double fp32) { return dtype == DTYPE_BF16 ? HALF_ULP : fp32; }
static double rounded(double x, DType dtype)
{
    return dtype == DTYPE_BF16 ? (double)bf16_to_f32(bf16_from_f32((float)x)) : (double)(float)x;
}

/* Sizes with every remainder by 16 and 64, sums over one, two and three blocks of 64 rows. */
static int64_t rows_of_run(Run *run) { return coin(run) ? pick(run, 1, 20) : pick(run, 60, 140); }
static int64_t cols_of_run(Run *run) { return shape_cols(run, coin(run) ? pick(run, 1, 40) : pick(run, 60, 130)); }

/* ---- operands ---- */

static const Format FORMATS[] = {FORMAT_NONE, FORMAT_FP32, FORMAT_BF16};
static DType dtype_of(Format f) { return f == FORMAT_FP32 ? DTYPE_FP32 : DTYPE_BF16; }

/* Random formats; views of one format are one memory or two, a view that can be its source may be. */
static Operand random_operand(Run *run, int64_t rows, int64_t cols, Tensor source)
{
    Operand o = {.rows = rows, .cols = cols};
    View *view[2] = {&o.row, &o.col};
    for (int i = 0; i < 2; i++) {
        Format f = FORMATS[pick(run, 0, 2)];
        view[i]->format.format = f;
        if (f == FORMAT_NONE) continue;
        if (source.data && dtype_of(f) == source.dtype && coin(run))
            view[i]->data = source.data;
        else if (i == 1 && o.row.format.format == f && coin(run))
            view[1]->data = o.row.data;
        else
            view[i]->data = output(run, i ? "column view" : "row view", dtype_of(f), rows, cols).data;
    }
    return o;
}

/* value(r, c) in every view asked for, but in one that is its source; the others stay as they are. */
static void expect_views(Run *run, const Operand *o, unsigned views, const void *source, const double *value,
                         double bound)
{
    const View *view[2] = {&o->row, &o->col};
    if (!run->reference || run->hostile) return;
    for (int i = 0; i < 2; i++) {
        DType dtype = dtype_of(view[i]->format.format);
        if (!view[i]->data || view[i]->data == source) continue;
        if (i == 1 && o->col.data == o->row.data && views & VIEW_ROW) continue;
        Tensor t = {view[i]->data, dtype, o->rows, o->cols, o->cols};
        bool asked = views >> i & 1;
        double *expected = block_of(run, t)->expected;
        if (!expected) expected = expect(run, t, asked && bound > 0 ? bound_of(dtype, bound) : 0);
        if (!asked) continue;
        block_of(run, t)->bound = bound > 0 ? bound_of(dtype, bound) : 0;
        for (int64_t k = 0; k < o->rows * o->cols; k++) expected[k] = bound > 0 ? value[k] : rounded(value[k], dtype);
    }
}

static double *values(int64_t count) { return xcalloc((size_t)count, sizeof(double)); }

static void case_from_tensor(Run *run)
{
    int64_t N = rows_of_run(run), C = cols_of_run(run);
    Tensor x = input(run, run->act, N, C, 1);
    Operand o = random_operand(run, N, C, x);
    unsigned views = (unsigned)pick(run, 0, 3);
    double *y = values(N * C);
    for (int64_t k = 0; k < N * C; k++) y[k] = get(x, k / C, k % C);
    expect_views(run, &o, views, x.data, y, 0);
    ops(run)->operand_from_tensor(&o, x, views);
    free(y);
}

static Norm random_norm(Run *run, int64_t C)
{
    Norm norm = {.kind = coin(run) ? NORM_LAYERNORM : NORM_RMSNORM, .eps = 1e-5f};
    norm.gain = input(run, DTYPE_FP32, 1, C, 0.3);
    for (int64_t c = 0; c < C; c++) put(norm.gain, 0, c, get(norm.gain, 0, c) + 1);
    input_changed(run, norm.gain);
    if (norm.kind == NORM_LAYERNORM) norm.bias = input(run, DTYPE_FP32, 1, C, 0.3);
    return norm;
}

/* Mean and rstd of a row in FP64. */
static void statistics(Tensor x, int64_t r, const Norm *norm, double *mean, double *rstd)
{
    double sum = 0, squares = 0;
    for (int64_t c = 0; c < x.cols; c++) sum += get(x, r, c);
    *mean = norm->kind == NORM_LAYERNORM ? sum / (double)x.cols : 0;
    for (int64_t c = 0; c < x.cols; c++) squares += (get(x, r, c) - *mean) * (get(x, r, c) - *mean);
    *rstd = 1 / sqrt(squares / (double)x.cols + (double)norm->eps);
}

static Tensor input_stats(Run *run, Tensor x, const Norm *norm)
{
    int64_t S = norm->kind == NORM_LAYERNORM ? 2 : 1;
    Tensor stats = input(run, DTYPE_FP32, x.rows, S, 1);
    for (int64_t r = 0; r < x.rows && !run->hostile; r++) {
        double mean, rstd;
        statistics(x, r, norm, &mean, &rstd);
        if (S == 2) put(stats, r, 0, mean);
        put(stats, r, S - 1, rstd);
    }
    input_changed(run, stats);
    return stats;
}

static void case_from_norm(Run *run)
{
    int64_t N = rows_of_run(run), C = cols_of_run(run);
    Tensor x = input(run, run->act, N, C, 2);
    Norm norm = random_norm(run, C);
    Tensor stats = input_stats(run, x, &norm);
    Operand o = random_operand(run, N, C, (Tensor){0});
    unsigned views = (unsigned)pick(run, 0, 3);
    double *y = values(N * C);
    for (int64_t r = 0; r < N && !run->hostile; r++)
        for (int64_t c = 0; c < C; c++) {
            double mean = norm.bias.data ? get(stats, r, 0) : 0, rstd = get(stats, r, stats.cols - 1);
            y[r * C + c] = (get(x, r, c) - mean) * rstd * get(norm.gain, 0, c);
            if (norm.bias.data) y[r * C + c] += get(norm.bias, 0, c);
        }
    expect_views(run, &o, views, NULL, y, 1e-6);
    ops(run)->operand_from_norm(&o, x, stats, &norm, views);
    free(y);
}

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }
static double gelu(double x) { return x / 2 * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }
static double gelu_slope(double x) /* by differences: independent of the formula */
{
    return (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5;
}
static double silu_slope(double x) { return sigmoid(x) * (1 + x * (1 - sigmoid(x))); }

static void case_from_activation(Run *run)
{
    int64_t N = rows_of_run(run), F = cols_of_run(run);
    Activation f = coin(run) ? ACTIVATION_GELU : ACTIVATION_SWIGLU;
    Tensor h = input(run, run->act, N, f == ACTIVATION_GELU ? F : 2 * F, 2);
    Operand o = random_operand(run, N, F, (Tensor){0});
    unsigned views = (unsigned)pick(run, 0, 3);
    double *y = values(N * F);
    for (int64_t k = 0; k < N * F; k++) {
        double x = get(h, k / F, k % F);
        y[k] = f == ACTIVATION_GELU ? gelu(x) : x * sigmoid(x) * get(h, k / F, F + k % F);
    }
    expect_views(run, &o, views, NULL, y, 1e-6);
    ops(run)->operand_from_activation(&o, h, f, views);
    free(y);
}

/* A gradient tensor that is added to, or absent. */
static Tensor maybe_sum(Run *run, const char *name, int64_t cols)
{
    return coin(run) ? inout(run, name, DTYPE_FP32, 1, cols, 1) : (Tensor){0};
}

/* The law of sums over tokens, in FP32: blocks of 64 rows from zero, their sums in order from zero, added once. */
static void add_over_tokens(double *sum, Tensor t)
{
    for (int64_t c = 0; c < t.cols; c++) {
        float total = 0;
        for (int64_t block = 0; block < t.rows; block += 64) {
            float part = 0;
            for (int64_t r = block; r < min_i64(t.rows, block + 64); r++) part += (float)get(t, r, c);
            total += part;
        }
        sum[c] = (double)((float)sum[c] + total);
    }
}

static void expect_sum(Run *run, Tensor sum, const double *value, int64_t rows, double bound)
{
    double *expected = sum.data ? expect(run, sum, bound) : NULL;
    for (int64_t k = 0; expected && k < rows * sum.cols; k++) expected[k % sum.cols] += value[k];
}

static void gradient_case(Run *run, int64_t N, int64_t C, bool sums)
{
    Tensor g = input(run, run->act, N, C, 1);
    Tensor dbias = sums ? inout(run, "dbias", DTYPE_FP32, 1, C, 1) : maybe_sum(run, "dbias", C);
    Operand dy = random_operand(run, N, C, g);
    double *y = values(N * C);
    for (int64_t k = 0; k < N * C; k++) y[k] = get(g, k / C, k % C);
    expect_views(run, &dy, VIEW_ROW | VIEW_COL, g.data, y, 0);
    double *expected = dbias.data ? expect(run, dbias, 0) : NULL;
    if (expected) add_over_tokens(expected, g);
    need(run, (Need){.N = N, .cols = C});
    ops(run)->operand_from_gradient(&dy, g, dbias);
    free(y);
}

static void case_from_gradient(Run *run)
{
    bool blocks = run->round % 4 < 2; /* sums over several blocks of 64 rows */
    int64_t N = blocks ? pick(run, 65, 200) : rows_of_run(run);
    gradient_case(run, N, cols_of_run(run), blocks);
}

static void case_from_activation_backward(Run *run)
{
    int64_t N = rows_of_run(run), F = cols_of_run(run);
    Activation f = coin(run) ? ACTIVATION_GELU : ACTIVATION_SWIGLU;
    int64_t F1 = f == ACTIVATION_GELU ? F : 2 * F;
    Tensor h = input(run, run->act, N, F1, 2), du = input(run, run->act, N, F, 1), dbias = maybe_sum(run, "dbias", F1);
    Operand dh = random_operand(run, N, F1, (Tensor){0});
    double *y = values(N * F1);
    for (int64_t r = 0; r < N; r++)
        for (int64_t c = 0; c < F; c++) {
            double x = get(h, r, c), d = get(du, r, c);
            y[r * F1 + c] = f == ACTIVATION_GELU ? d * gelu_slope(x) : d * get(h, r, F + c) * silu_slope(x);
            if (F1 > F) y[r * F1 + F + c] = d * x * sigmoid(x);
        }
    expect_views(run, &dh, VIEW_ROW | VIEW_COL, NULL, y, bound_of(run->act, 1e-5));
    for (int64_t k = 0; k < N * F1; k++)
        y[k] = rounded(y[k], run->act); /* a BF16 run sums what the matrix would hold */
    expect_sum(run, dbias, y, N, bound_of(run->act, 4e-6));
    need(run, (Need){.N = N, .cols = F1});
    ops(run)->operand_from_activation_backward(&dh, du, h, f, dbias);
    Tensor wide = {dh.row.format.format == FORMAT_FP32 ? dh.row.data : NULL, DTYPE_FP32, N, F1, F1};
    for (int64_t k = 0; wide.data && !run->hostile && k < N * F1; k++) {
        double x = get(wide, k / F1, k % F1);
        CHECK(x == rounded(x, run->act), "an FP32 view holds %a, which a BF16 matrix would not", x);
    }
    free(y);
}

/* ---- linear layers: FP32 or BF16 operands, act results ---- */

static Operand operand_of(Tensor t)
{
    View v = {.format.format = t.dtype == DTYPE_FP32 ? FORMAT_FP32 : FORMAT_BF16, .data = t.data};
    return (Operand){.rows = t.rows, .cols = t.cols, .row = v, .col = v};
}

/* On a GPU the bias of a BF16 product is added in BF16 (cuda/gemm.cuh). */
static void case_linear(Run *run)
{
    int64_t N = rows_of_run(run), in = cols_of_run(run), out = cols_of_run(run);
    Tensor x = input(run, run->act, N, in, 1), w = input(run, run->act, out, in, 0.3);
    Tensor dy = input(run, run->act, N, out, 1), y = output(run, "y", run->act, N, out);
    Tensor dx = output(run, "dx", run->act, N, in), dW = inout(run, "dW", DTYPE_FP32, out, in, 1);
    Tensor bias = coin(run) ? input(run, DTYPE_FP32, 1, out, 1) : (Tensor){0};
    Operand ox = operand_of(x), ody = operand_of(dy);
    Linear linear = {.weight = operand_of(w), .bias = bias, .dW = dW};
    double *ey = expect(run, y, bound_of(run->act, 2e-6)), *edx = expect(run, dx, bound_of(run->act, 2e-6));
    double *edW = expect(run, dW, 2e-6);

    for (int64_t n = 0; ey && n < N; n++) {
        for (int64_t o = 0; o < out; o++) {
            ey[n * out + o] = !bias.data ? 0 : run->device ? rounded(get(bias, 0, o), run->act) : get(bias, 0, o);
            for (int64_t i = 0; i < in; i++) {
                ey[n * out + o] += get(x, n, i) * get(w, o, i);
                edW[o * in + i] += get(dy, n, o) * get(x, n, i);
            }
        }
        for (int64_t i = 0; i < in; i++) {
            edx[n * in + i] = 0;
            for (int64_t o = 0; o < out; o++) edx[n * in + i] += get(dy, n, o) * get(w, o, i);
        }
    }
    need(run, (Need){.N = N});
    ops(run)->linear_forward(y, &ox, &linear);
    ops(run)->linear_backward_input(dx, &ody, &linear);
    ops(run)->linear_backward_weight(&linear, &ody, &ox);
}

static void case_weight_prepare(Run *run)
{
    int64_t rows = rows_of_run(run), cols = cols_of_run(run);
    Tensor master = input(run, coin(run) ? DTYPE_FP32 : DTYPE_BF16, rows, cols, 1);
    Linear linear = {.weight = random_operand(run, rows, cols, master)};
    double *y = values(rows * cols);
    for (int64_t k = 0; k < rows * cols; k++) y[k] = get(master, k / cols, k % cols);
    expect_views(run, &linear.weight, VIEW_ROW | VIEW_COL, master.data, y, 0);
    ops(run)->weight_prepare(&linear, master, 0, 0);
    free(y);
}

/* ---- embedding, residual stream, norms ---- */

static void expect_stats(Run *run, Tensor stats, Tensor x, const Norm *norm) /* after the op, from the x it wrote */
{
    double *expected = expect(run, stats, 2e-6);
    for (int64_t r = 0; expected && r < x.rows; r++) {
        double mean, rstd;
        statistics(x, r, norm, &mean, &rstd);
        if (stats.cols == 2) expected[2 * r] = mean;
        expected[(r + 1) * stats.cols - 1] = rstd;
    }
}

/* Rows of dx summed in order from zero, in FP32: those of one token, or of one position (rows modulo T). */
static double in_order(Tensor dx, int64_t c, const int32_t *tokens, int32_t which, int64_t T)
{
    float sum = 0;
    for (int64_t r = 0; r < dx.rows; r++)
        if ((tokens ? tokens[r] : (int32_t)(r % T)) == which) sum += (float)get(dx, r, c);
    return (double)sum;
}

static void embedding_case(Run *run, int64_t B, int64_t Vp, int64_t C)
{
    int64_t T = pick(run, 1, 50), N = B * T, position0 = 0;
    bool learned = coin(run);
    if (learned && coin(run)) position0 = pick(run, 1, 9);
    int32_t *tokens = integers(run, N, 0, coin(run) ? Vp - 1 : 2); /* many or hardly any different ones */
    Tensor wte = input(run, run->act, Vp, C, 1);
    Tensor wpe = learned ? input(run, run->act, position0 + T, C, 1) : (Tensor){0};
    Norm first = {.kind = coin(run) ? NORM_LAYERNORM : NORM_RMSNORM, .eps = 1e-5f};
    Tensor x = output(run, "x", run->act, N, C);
    Tensor stats = output(run, "stats", DTYPE_FP32, N, first.kind == NORM_LAYERNORM ? 2 : 1);
    Tensor dx = input(run, run->act, N, C, 1), dwte = inout(run, "dwte", DTYPE_FP32, Vp, C, 1);
    Tensor dwpe = learned ? inout(run, "dwpe", DTYPE_FP32, T, C, 1) : (Tensor){0};
    double *ex = expect(run, x, 0), *edwte = expect(run, dwte, 0), *edwpe = learned ? expect(run, dwpe, 0) : NULL;

    for (int64_t r = 0; ex && r < N; r++)
        for (int64_t c = 0; c < C; c++) {
            double sum = get(wte, tokens[r], c);
            if (learned) sum = (double)(float)(sum + get(wpe, position0 + r % T, c));
            ex[r * C + c] = rounded(sum, run->act);
        }
    for (int64_t k = 0; ex && k < Vp * C; k++) {
        double of_token = in_order(dx, k % C, tokens, (int32_t)(k / C), 1);
        edwte[k] = (double)(float)(edwte[k] + of_token);
        if (learned && k < T * C) edwpe[k] = (double)(float)(edwpe[k] + in_order(dx, k % C, NULL, (int32_t)(k / C), T));
    }
    need(run, (Need){.N = N, .V = Vp - coin(run)}); /* rows are padded: the workspace must know */
    ops(run)->embedding_forward(x, stats, on_device(tokens), wte, wpe, T, position0, &first);
    ops(run)->embedding_backward(dwte, dwpe, dx, on_device(tokens), T);
    expect_stats(run, stats, x, &first);
}

static void case_embedding(Run *run) { embedding_case(run, pick(run, 1, 3), 128, cols_of_run(run)); }

static void case_residual_add(Run *run)
{
    int64_t N = rows_of_run(run), C = cols_of_run(run);
    Norm next = {.kind = coin(run) ? NORM_LAYERNORM : NORM_RMSNORM, .eps = coin(run) ? 1e-5f : 0.5f};
    Tensor x_prev = input(run, run->act, N, C, 1), y = input(run, run->act, N, C, 1);
    Tensor x = output(run, "x", run->act, N, C);
    Tensor stats = output(run, "stats", DTYPE_FP32, N, next.kind == NORM_LAYERNORM ? 2 : 1);
    double *expected = expect(run, x, 0);
    for (int64_t k = 0; expected && k < N * C; k++)
        expected[k] = rounded((double)(float)(get(x_prev, k / C, k % C) + get(y, k / C, k % C)), run->act);
    ops(run)->residual_add(x, stats, x_prev, y, &next);
    expect_stats(run, stats, x, &next);
}

static void case_norm_backward(Run *run)
{
    int64_t N = rows_of_run(run), C = shape_cols(run, pick(run, 2, 130));
    Tensor x = input(run, run->act, N, C, 2), dy = input(run, run->act, N, C, 1);
    Norm norm = random_norm(run, C);
    Tensor stats = input_stats(run, x, &norm), dx = inout(run, "dx", run->act, N, C, 1);
    norm.dgain = inout(run, "dgain", DTYPE_FP32, 1, C, 1);
    if (norm.bias.data) norm.dbias = inout(run, "dbias", DTYPE_FP32, 1, C, 1);
    double *edx = expect(run, dx, bound_of(run->act, 4e-6)), *egain = expect(run, norm.dgain, 4e-6);
    double *ebias = norm.bias.data ? expect(run, norm.dbias, 4e-6) : NULL;

    for (int64_t r = 0; edx && r < N; r++) {
        double mean = norm.bias.data ? get(stats, r, 0) : 0, rstd = get(stats, r, stats.cols - 1);
        double mean_g = 0, mean_gn = 0;
        for (int64_t c = 0; c < C; c++) {
            double n = (get(x, r, c) - mean) * rstd, g = get(dy, r, c) * get(norm.gain, 0, c);
            if (norm.bias.data) mean_g += g / (double)C;
            mean_gn += g * n / (double)C;
            egain[c] += get(dy, r, c) * n;
            if (ebias) ebias[c] += get(dy, r, c);
        }
        for (int64_t c = 0; c < C; c++) {
            double n = (get(x, r, c) - mean) * rstd, g = get(dy, r, c) * get(norm.gain, 0, c);
            edx[r * C + c] += rstd * (g - mean_g - n * mean_gn);
        }
    }
    need(run, (Need){.N = N, .cols = C});
    ops(run)->norm_backward(dx, &norm, dy, x, stats);
}

/* ---- classifier ---- */

static void softmax_case(Run *run, int64_t n, int64_t V)
{
    int64_t Vp = round_up(V, 128);
    bool gradient = pick(run, 0, 3) > 0;
    Step step = {.loss_scale = 1.0f / 37};
    Tensor logits = inout(run, "logits", run->act, n, Vp, 3), losses = output(run, "losses", DTYPE_FP32, n, 1);
    int32_t *targets = integers(run, n, 0, V - 1);
    double *e = expect(run, logits, gradient ? bound_of(run->act, 2e-6) : 0), *el = expect(run, losses, 2e-6);

    for (int64_t r = 0; e && r < n; r++) {
        double sum = 0;
        for (int64_t c = 0; c < V; c++) sum += exp(get(logits, r, c));
        /* cppcheck-suppress invalidFunctionArg ; V is at least 1 */
        el[r] = log(sum) - get(logits, r, targets[r]);
        for (int64_t c = 0; gradient && c < Vp; c++)
            e[r * Vp + c] = c < V ? (exp(get(logits, r, c)) / sum - (c == targets[r])) / 37 : 0;
    }
    ops(run)->begin_step(&step);
    ops(run)->softmax_cross_entropy(losses, logits, on_device(targets), V, gradient);
    for (int64_t r = 0; e && gradient && r < n; r++)
        for (int64_t c = V; c < Vp; c++) CHECK(get(logits, r, c) == 0, "padding [%d,%d]", (int)r, (int)c);
}

static void case_softmax(Run *run)
{
    int64_t n = pick(run, 1, 40);
    softmax_case(run, n, coin(run) ? pick(run, 1, 128) : pick(run, 129, 300));
}

static void loss_sum_case(Run *run, int64_t n)
{
    Tensor losses = input(run, DTYPE_FP32, n, 1, 5), out = output(run, "sum", DTYPE_INT32, 1, 2);
    double sum, expected = 0;
    ops(run)->loss_sum((double *)out.data, losses);
    sum = get_double(out, 0);
    for (int64_t r = 0; r < n; r++) expected += get(losses, r, 0);
    CHECK(run->hostile || fabs(sum - expected) <= 1e-13 * (double)n * 5, "sum %.17g, expected %.17g", sum, expected);
}

static void case_loss_sum(Run *run) { loss_sum_case(run, pick(run, 1, 100)); }

/* ---- memory and optimizer loops (what AdamW computes: test_optimizer.c) ---- */

static void case_moving(Run *run)
{
    int64_t rows = rows_of_run(run), cols = cols_of_run(run);
    DType to = coin(run) ? DTYPE_FP32 : DTYPE_BF16;
    Tensor src = input(run, run->act, rows, cols, 1), wide = inout(run, "a slice", to, rows, cols + 9, 1);
    Tensor zeros = inout(run, "zeros", run->act, rows, cols + 5, 1), sum = inout(run, "sum", DTYPE_FP32, rows, cols, 1);
    Tensor part = input(run, DTYPE_FP32, rows, cols, 1);
    double *ew = expect(run, wide, 0), *ez = expect(run, zeros, 0), *es = expect(run, sum, 0);
    for (int64_t k = 0; ew && k < rows * cols; k++) {
        int64_t r = k / cols, c = k % cols;
        ew[r * (cols + 9) + 4 + c] = rounded(get(src, r, c), to);
        ez[r * (cols + 5) + 3 + c] = 0;
        es[k] = (double)(float)(es[k] + get(part, r, c));
    }
    ops(run)->copy(tensor_cols(wide, 4, cols), src);
    ops(run)->zero(tensor_cols(zeros, 3, cols));
    ops(run)->add(sum, part);
}

static void case_sum_squares(Run *run)
{
    int64_t rows = rows_of_run(run), cols = cols_of_run(run), pieces = ceil_div(rows, 16);
    Tensor grad = input(run, DTYPE_FP32, rows, cols, 1), out = output(run, "pieces", DTYPE_INT32, pieces, 2);
    ops(run)->sum_squares((double *)out.data, grad);
    for (int64_t p = 0; p < pieces; p++) {
        double sum = 0, piece = get_double(out, p);
        for (int64_t r = 16 * p; r < min_i64(rows, 16 * p + 16); r++)
            for (int64_t c = 0; c < cols; c++) sum += get(grad, r, c) * get(grad, r, c);
        CHECK(run->hostile || fabs(piece - sum) <= 1e-12 * sum, "piece %d: %.17g, expected %.17g", (int)p, piece, sum);
    }
}

static void case_adamw(Run *run)
{
    int64_t rows = pick(run, 1, 40), cols = cols_of_run(run);
    Step step = {11, 3, 1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.5f, 2.5f, 1, 1};
    StepResult result = {.clip = 0.5f, .finite = 1};
    ParamSlice p = {.master = inout(run, "master", run->act, rows, cols, 1),
                    .grad = inout(run, "grad", DTYPE_FP32, rows, cols, 1),
                    .m = inout(run, "m", DTYPE_FP32, rows, cols, 1),
                    .v = inout(run, "v", DTYPE_FP32, rows, cols, 0),
                    .row0 = 32,
                    .layer = 2,
                    .role = 40,
                    .decay = coin(run)};
    for (int64_t k = 0; k < rows * cols; k++) put(p.v, k / cols, k % cols, (double)(k % 7) * 0.3);
    double *e = expect(run, p.grad, 0), *ew = expect(run, p.master, 0), *em = expect(run, p.m, 0),
           *ev = expect(run, p.v, 0);
    for (int64_t k = 0; e && k < rows * cols; k++) {
        int64_t r = k / cols, c = k % cols;
        float g = (float)get(p.grad, r, c) * result.clip, w = (float)ew[k], decay = p.decay ? step.weight_decay : 0;
        float m = fmaf(step.beta1, (float)em[k], (1 - step.beta1) * g);
        float v = fmaf(step.beta2, (float)ev[k], (1 - step.beta2) * (g * g));
        float root = sqrtf(v * step.correction2) + step.eps;
        w = fmaf(-step.lr, fmaf(decay, w, m * step.correction1 / root), w);
        Philox draw = philox_draw(step.seed, (uint32_t)(p.row0 + r), (uint32_t)(c / 16), step.step, 2, 40, c % 16 / 8);
        uint32_t half = draw.word[c % 8 / 2] >> 16 * (c % 2) & 0xffff;
        e[k] = 0, em[k] = m, ev[k] = v;
        ew[k] = run->act == DTYPE_BF16 ? bf16_to_f32(bf16_from_f32_stochastic(w, half)) : w;
    }
    StepResult *of_step = constant(run, &result, sizeof result);
    ops(run)->begin_step(&step);
    ops(run)->adamw(&p, of_step);
}

static const struct {
    const char *name;
    void (*one)(Run *);
    int rounds;
    bool exact; /* the same bits on every backend */
} OPS_CASES[] = {{"operand_from_tensor", case_from_tensor, 18, true},
                 {"operand_from_norm", case_from_norm, 18, false},
                 {"operand_from_activation", case_from_activation, 18, false},
                 {"operand_from_gradient", case_from_gradient, 18, true},
                 {"operand_from_activation_backward", case_from_activation_backward, 18, false},
                 {"linear_forward, linear_backward_input, linear_backward_weight", case_linear, 12, false},
                 {"weight_prepare", case_weight_prepare, 18, true},
                 {"embedding_forward, embedding_backward", case_embedding, 18, false},
                 {"residual_add", case_residual_add, 12, false},
                 {"norm_backward", case_norm_backward, 18, false},
                 {"softmax_cross_entropy", case_softmax, 18, false},
                 {"loss_sum", case_loss_sum, 12, true},
                 {"copy, zero, add", case_moving, 12, true},
                 {"sum_squares", case_sum_squares, 12, true},
                 {"adamw", case_adamw, 12, true}};
enum { OPS_CASE_COUNT = sizeof OPS_CASES / sizeof *OPS_CASES };

#endif
