/* Cases of the operations that quantize, for a backend whose NVFP4 memory is laid out as llmc/cuda/nvfp4_view.cuh says: each
 * runs on the CPU and there, and what the two made is brought into one form and compared bit by bit (cuda_ops.c):
 *
 *     codes [outer][K to a multiple of 16]    scales [outer][blocks]    the tensor's scale
 *
 * What only a GPU has, padding, must be zero. Random numbers choose the formats: rounding, tensor scale, headroom, 4/6,
 * transform, a plain view instead of one of both.
 */
#ifndef LLMC_QUANTIZE_CASES_H
#define LLMC_QUANTIZE_CASES_H

#include "ops_cases.h"

static void (*quantize_unpack)(Linear *w); /* of the backend: set by its test */

/* ---- views ---- */

typedef struct { /* where a copy is in host memory */
    const uint8_t *codes, *scales;
    int64_t outer, K;
} CopyBytes;

static int64_t padded(int64_t bytes) { return round_up(bytes, 256); }
static int64_t device_code_bytes(int64_t outer, int64_t K) { return outer * round_up(K, 32) / 2; }
static int64_t device_copy_bytes(int64_t outer, int64_t K)
{
    return padded(device_code_bytes(outer, K)) + padded((int64_t)nvfp4_tile_bytes(outer, ceil_div(K, 16)));
}

static CopyBytes device_copy(const Operand *o, const View *v, bool col)
{
    CopyBytes c = {.outer = col ? o->cols : o->rows, .K = col ? o->rows : o->cols};
    c.codes = (const uint8_t *)on_host(v->data);
    if (col && v->format.nvfp4.block == SCALE_16X16) c.codes += device_copy_bytes(o->rows, o->cols);
    c.scales = c.codes + padded(device_code_bytes(c.outer, c.K));
    return c;
}

static void check_zero(const Run *run, const char *what, int64_t at, unsigned byte)
{
    CHECK(byte == 0, "%s, round %d: %s has %u at %ld, not 0", run->isa, run->round, what, byte, (long)at);
}

/* Codes and scales from the device's layout; what is beyond the matrix must be zero. */
static void read_device_copy(const Run *run, CopyBytes c, Tensor codes, Tensor scales)
{
    int64_t blocks = scales.cols, ld = round_up(c.K, 32);
    int32_t *code = (int32_t *)on_host(codes.data), *scale = (int32_t *)on_host(scales.data);
    for (int64_t r = 0; r < c.outer; r++) {
        for (int64_t k = 0; k < ld; k++) {
            int value = c.codes[(r * ld + k) / 2] >> 4 * (k % 2) & 15;
            if (k < 16 * blocks)
                code[r * codes.cols + k] = value;
            else
                check_zero(run, "padding of codes", k, (unsigned)value);
        }
    }
    for (int64_t r = 0; r < round_up(c.outer, 128); r++)
        for (int64_t b = 0; b < round_up(blocks, 4); b++) {
            uint8_t value = c.scales[nvfp4_tile_offset(r, b, blocks)];
            if (r < c.outer && b < blocks)
                scale[r * blocks + b] = value;
            else
                check_zero(run, "padding of scales", r, value);
        }
}

/* From the CPU's: blocks of a row view by rows, of a column view by groups of 16 rows; 16 x 16 read across. */
static void read_cpu_copy(const Operand *o, const View *v, bool col, Tensor codes, Tensor scales)
{
    int64_t row_blocks = ceil_div(o->cols, 16), blocks = scales.cols;
    bool square = v->format.nvfp4.block == SCALE_16X16;
    int32_t *code = (int32_t *)on_host(codes.data), *scale = (int32_t *)on_host(scales.data);
    const uint8_t *from = (const uint8_t *)v->data;
    for (int64_t r = 0; r < codes.rows; r++)
        for (int64_t k = 0; k < codes.cols; k++) {
            int64_t block = col ? k / 16 * o->cols + r : r * row_blocks + k / 16, i = k % 16;
            bool inside = true;
            if (col && square) block = k * row_blocks + r / 16, i = r % 16, inside = k < o->rows;
            code[r * codes.cols + k] = inside ? from[8 * block + i / 2] >> 4 * (i % 2) & 15 : 0;
            if (square) block = col ? k / 16 * row_blocks + r / 16 : r / 16 * row_blocks + k / 16;
            scale[r * blocks + k / 16] = v->block_scale[block];
        }
}

/* The outputs that are compared: of one copy. */
static void compare_copy(Run *run, const Operand *o, bool col, Tensor codes, Tensor scales, Tensor tensor_scale)
{
    const View *v = col && !views_are_one(&o->row.format, &o->col.format) ? &o->col : &o->row;
    if (run->device)
        read_device_copy(run, device_copy(o, v, col), codes, scales);
    else
        read_cpu_copy(o, v, col, codes, scales);
    memcpy(on_host(tensor_scale.data), on_host(v->tensor_scale), sizeof(float));
}

typedef struct {
    Tensor codes[2], scales[2], tensor_scale[2];
} Compared;

/* Memory for a view, and what is compared of it. Operands come with their formats. */
static void place_view(Run *run, Operand *o, bool col)
{
    View *v = col ? &o->col : &o->row;
    unsigned which = col ? VIEW_COL : VIEW_ROW;
    if (format_is_plain(v->format.format)) {
        v->data = output(run, col ? "plain view by columns" : "plain view by rows", DTYPE_BF16, o->rows, o->cols).data;
        return;
    }
    size_t bytes = run->ops->view_bytes(&v->format, which, o->rows, o->cols);
    HarnessBlock *b = new_block(run, DTYPE_INT32, 1, (int64_t)((bytes + 3) / 4));
    b->scratch = true;
    run->ops->view_place(v, which, o->rows, o->cols, b->t.data);
}

static Compared place_views(Run *run, Operand *o, unsigned views)
{
    static const char *const NAME[2][3] = {{"codes by rows", "scales by rows", "tensor scale by rows"},
                                           {"codes by columns", "scales by columns", "tensor scale by columns"}};
    Compared c = {0};
    bool one = views_are_one(&o->row.format, &o->col.format);
    for (int col = 0; col < 2; col++) {
        if (!(views >> col & 1)) continue;
        if (!one || !col) place_view(run, o, col);
        if (one && col) o->col.data = o->row.data;
        if ((col ? &o->col : &o->row)->format.format != FORMAT_NVFP4) continue;
        int64_t outer = col ? o->cols : o->rows, blocks = ceil_div(col ? o->rows : o->cols, 16);
        c.codes[col] = output(run, NAME[col][0], DTYPE_INT32, outer, 16 * blocks);
        c.scales[col] = output(run, NAME[col][1], DTYPE_INT32, outer, blocks);
        c.tensor_scale[col] = output(run, NAME[col][2], DTYPE_FP32, 1, 1);
    }
    return c;
}

static void compare_views(Run *run, const Operand *o, const Compared *c)
{
    for (int col = 0; col < 2; col++)
        if (c->codes[col].data) compare_copy(run, o, col, c->codes[col], c->scales[col], c->tensor_scale[col]);
}

/* ---- random formats and shapes ---- */

static ViewFormat random_view_format(Run *run, bool col, TensorScaleMode mode, Rounding rounding)
{
    ViewFormat f = {.format = FORMAT_NVFP4, .rht = col && pick(run, 0, 3) > 0};
    f.role = (uint8_t)(ROLE_OPERAND + pick(run, 0, 3) * OPERAND_COPIES + col);
    f.nvfp4 = (Nvfp4Form){.rounding = rounding, .tensor_scale = mode, .headroom = pick(run, 0, 3) ? 1 : 17.0f / 16.0f};
    if (mode == TENSOR_SCALE_AMAX && rounding == ROUND_NEAREST && !pick(run, 0, 3))
        f.nvfp4.four_over_six = coin(run) ? FOUR_OVER_SIX_MAE : FOUR_OVER_SIX_MSE;
    return f;
}

static Operand random_quantized(Run *run, int64_t rows, int64_t cols, unsigned *views)
{
    Operand o = {.rows = rows, .cols = cols, .layer = (int)pick(run, 0, 40), .row0 = 16 * pick(run, 0, 9)};
    TensorScaleMode mode = pick(run, 0, 2) ? TENSOR_SCALE_AMAX : TENSOR_SCALE_POW2;
    Rounding rounding = coin(run) ? ROUND_STOCHASTIC : ROUND_NEAREST;
    o.row.format = random_view_format(run, false, mode, rounding);
    o.col.format = random_view_format(run, true, mode, pick(run, 0, 5) ? rounding : ROUND_NEAREST);
    int64_t plain = pick(run, 0, 7);
    if (plain == 0) o.row.format = (ViewFormat){.format = FORMAT_BF16};
    if (plain == 1) o.col.format = (ViewFormat){.format = FORMAT_BF16};
    if (views) *views = plain < 2 ? 3 : (unsigned)pick(run, 1, 3);
    return o;
}

/* Tokens and channels: few, any, whole tiles, more than one tile. */
static int64_t rows_to_quantize(Run *run)
{
    static const int64_t ROWS[] = {1, 16, 31, 32, 48, 100, 128, 129, 192, 256, 270};
    return ROWS[pick(run, 0, 10)];
}
static int64_t cols_to_quantize(Run *run)
{
    static const int64_t COLS[] = {1, 7, 16, 40, 48, 64, 112, 128, 144, 192, 208, 256, 320};
    return COLS[pick(run, 0, 12)];
}

/* Statistics are compared as an output: counts, and sums to 12 digits. */
enum { STATS_LAYERS = 41 };
static QuantStats measured[STATS_LAYERS * OPERAND_ROLES];

static Tensor measure_from_now(Run *run)
{
    memset(measured, 0, sizeof measured);
    bool asked = !pick(run, 0, 2) && !run->hostile;
    run->ops->measure(asked ? measured : NULL);
    return asked ? output(run, "statistics", DTYPE_FP32, 8, 7) : (Tensor){0};
}

static void put_statistics(Run *run, Tensor to)
{
    run->ops->measure(NULL);
    for (int k = 0, row = 0; to.data && k < STATS_LAYERS * OPERAND_ROLES; k++) {
        const QuantStats *s = &measured[k];
        if (!s->elements) continue;
        double value[7] = {(double)s->elements,    (double)s->zeroed, (double)s->clipped, (double)s->blocks,
                           (double)s->zero_blocks, s->error2,         s->signal2};
        for (int i = 0; i < 7; i++) put(to, row, i, value[i]);
        row++;
    }
}

static void begin_random_step(Run *run)
{
    Step step = {.seed = random_bits(run), .step = (uint32_t)pick(run, 0, 100000)};
    int64_t row0 = 16 * pick(run, 0, 1000);
    ops(run)->begin_step(&step);
    ops(run)->begin_micro_step(row0);
}

/* A source of BF16 whose rows and columns have magnitudes of their own; in some rounds very large or small. */
static Tensor source(Run *run, int64_t rows, int64_t cols)
{
    static const double SIZE[] = {1, 1, 1, 0x1p-100, 0x1p100, 0x1p-126, 0x1p126};
    Tensor x = input(run, DTYPE_BF16, rows, cols, 1);
    double size = SIZE[pick(run, 0, 6)], *of_col = values(cols);
    bool zeros = !pick(run, 0, 4);
    for (int64_t c = 0; c < cols; c++) of_col[c] = exp(2 * normal(run));
    for (int64_t r = 0; r < rows; r++) {
        double of_row = exp(3 * normal(run)) * size;
        for (int64_t c = 0; c < cols; c++) {
            double v = get(x, r, c);
            if (isfinite(v) && fabs(v) < 1e3) v *= of_row * of_col[c];
            if (fabs(v) > 3e38 && isfinite(v)) v = 3e38;
            if (zeros && r / 16 % 2 == 0 && c / 16 % 3 == 0) v = coin(run) ? 0.0 : -0.0;
            put(x, r, c, v);
        }
    }
    input_changed(run, x);
    free(of_col);
    return x;
}

static void need_quantized(Run *run, int64_t N, int64_t cols)
{
    need(run, (Need){.N = N, .cols = cols, .weight_rows = N});
}

/* ---- cases ---- */

static void case_quantize_tensor(Run *run)
{
    int64_t N = rows_to_quantize(run), C = cols_to_quantize(run);
    unsigned views;
    Operand o = random_quantized(run, N, C, &views);
    Tensor x = source(run, N, C);
    Compared c = place_views(run, &o, views);
    need_quantized(run, N, C);
    begin_random_step(run);
    Tensor quant_stats = measure_from_now(run);
    ops(run)->operand_from_tensor(&o, x, views);
    put_statistics(run, quant_stats);
    compare_views(run, &o, &c);
}

static void case_quantize_norm(Run *run)
{
    int64_t N = rows_to_quantize(run), C = cols_to_quantize(run);
    unsigned views;
    Operand o = random_quantized(run, N, C, &views);
    Tensor x = input(run, DTYPE_BF16, N, C, 2);
    Norm norm = random_norm(run, C);
    Tensor stats = input_stats(run, x, &norm);
    Compared c = place_views(run, &o, views);
    need_quantized(run, N, C);
    begin_random_step(run);
    Tensor quant_stats = measure_from_now(run);
    ops(run)->operand_from_norm(&o, x, stats, &norm, views);
    put_statistics(run, quant_stats);
    compare_views(run, &o, &c);
}

static void case_quantize_activation(Run *run)
{
    int64_t N = rows_to_quantize(run), F = cols_to_quantize(run);
    Activation f = coin(run) ? ACTIVATION_GELU : ACTIVATION_SWIGLU;
    unsigned views;
    Operand o = random_quantized(run, N, F, &views);
    Tensor h = input(run, DTYPE_BF16, N, f == ACTIVATION_GELU ? F : 2 * F, 2);
    Compared c = place_views(run, &o, views);
    need_quantized(run, N, F);
    begin_random_step(run);
    Tensor quant_stats = measure_from_now(run);
    ops(run)->operand_from_activation(&o, h, f, views);
    put_statistics(run, quant_stats);
    compare_views(run, &o, &c);
}

/* dbias is a sum in an order of its own: against FP64, of the matrix y [N, cols]. */
static void check_bias_sums(Run *run, Tensor dbias, const double *before, Tensor y)
{
    for (int64_t c = 0; dbias.data && !run->hostile && c < y.cols; c++) {
        double sum = before[c], size = fabs(before[c]);
        for (int64_t r = 0; r < y.rows; r++) {
            sum += get(y, r, c);
            size += fabs(get(y, r, c));
        }
        double got = get(dbias, 0, c), error = fabs(got - sum);
        CHECK(error <= 1e-6 * size || fabs(sum) > 1e37, "%s, round %d: dbias [%ld] is %.9g, not %.9g", run->isa,
              run->round, (long)c, got, sum);
    }
}

static Tensor bias_sums(Run *run, int64_t cols, double **before)
{
    *before = values(cols);
    if (!coin(run)) return (Tensor){0};
    Tensor t = input(run, DTYPE_FP32, 1, cols, 1);
    for (int64_t c = 0; c < cols; c++) (*before)[c] = get(t, 0, c);
    block_of(run, t)->scratch = true; /* an output, but not of the CPU's bits */
    return t;
}

static void case_quantize_gradient(Run *run)
{
    int64_t N = rows_to_quantize(run), C = cols_to_quantize(run);
    double *before;
    Operand o = random_quantized(run, N, C, NULL);
    Tensor x = source(run, N, C), dbias = bias_sums(run, C, &before);
    Compared c = place_views(run, &o, 3);
    need_quantized(run, N, C);
    begin_random_step(run);
    Tensor quant_stats = measure_from_now(run);
    ops(run)->operand_from_gradient(&o, x, dbias);
    put_statistics(run, quant_stats);
    compare_views(run, &o, &c);
    check_bias_sums(run, dbias, before, x);
    free(before);
}

static void case_quantize_activation_backward(Run *run)
{
    int64_t N = rows_to_quantize(run), F = cols_to_quantize(run);
    Activation f = coin(run) ? ACTIVATION_GELU : ACTIVATION_SWIGLU;
    int64_t F1 = f == ACTIVATION_GELU ? F : 2 * F;
    double *before;
    Operand o = random_quantized(run, N, F1, NULL);
    Operand plain = {
        .rows = N, .cols = F1, .row.format = {.format = FORMAT_BF16}, .col.format = {.format = FORMAT_BF16}};
    Tensor h = input(run, DTYPE_BF16, N, F1, 2), du = input(run, DTYPE_BF16, N, F, 1);
    Tensor dbias = bias_sums(run, F1, &before), matrix = output(run, "the same in BF16", DTYPE_BF16, N, F1);
    plain.row.data = plain.col.data = matrix.data;
    Compared c = place_views(run, &o, 3);
    need_quantized(run, N, F1);
    begin_random_step(run);
    Tensor quant_stats = measure_from_now(run);
    ops(run)->operand_from_activation_backward(&o, du, h, f, dbias);
    put_statistics(run, quant_stats);
    ops(run)->operand_from_activation_backward(&plain, du, h, f, (Tensor){0});
    compare_views(run, &o, &c);
    check_bias_sums(run, dbias, before, matrix);
    free(before);
}

/* ---- weights ---- */

/* In 1 x 16 blocks, or in 16 x 16, the latter sometimes beside a plain view by columns. */
static Operand random_weight(Run *run, int64_t rows, int64_t cols)
{
    Operand o = random_quantized(run, rows, cols, NULL);
    int64_t kind = pick(run, 0, 6);
    o.row0 = 0;
    o.row.format.rht = o.col.format.rht = false;
    if (kind < 3) return o;
    if (o.row.format.format != FORMAT_NVFP4) o.row.format = o.col.format;
    o.row.format.nvfp4.block = SCALE_16X16;
    o.col.format = kind < 6 ? o.row.format : (ViewFormat){.format = FORMAT_BF16};
    return o;
}

static Tensor random_master(Run *run, int64_t rows, int64_t cols)
{
    Tensor bf16 = source(run, rows, cols);
    if (coin(run)) return bf16;
    Tensor fp32 = input(run, DTYPE_FP32, rows, cols, 1);
    for (int64_t k = 0; k < rows * cols; k++)
        put(fp32, k / cols, k % cols, get(bf16, k / cols, k % cols) * 1.0009765625);
    input_changed(run, fp32);
    return fp32;
}

static void case_quantize_weight(Run *run)
{
    int64_t rows = rows_to_quantize(run), cols = cols_to_quantize(run);
    Linear w = {.weight = random_weight(run, rows, cols)};
    Tensor master = random_master(run, rows, cols);
    Compared c = place_views(run, &w.weight, 3);
    uint64_t seed = random_bits(run);
    uint32_t step = (uint32_t)pick(run, 0, 1000);
    need_quantized(run, rows, cols);
    Tensor quant_stats = measure_from_now(run);
    ops(run)->weight_prepare(&w, master, seed, step);
    put_statistics(run, quant_stats);
    compare_views(run, &w.weight, &c);
}

/* By parts, as ranks do: the amax of each, their largest; rows by parts; on a GPU then what is made of all of them. */
static void pack_by_parts(Run *run, Linear *w, Tensor master, uint64_t seed, uint32_t step)
{
    int64_t half = round_up(master.rows / 2, 16), first[3] = {0, half, half}, rows[3] = {half, 0, master.rows - half};
    Tensor amax = output(run, NULL, DTYPE_FP32, 1, 4);
    block_of(run, amax)->scratch = true;
    if (half > master.rows) rows[0] = master.rows, rows[2] = 0;
    for (int i = 0; i < 3; i++)
        ops(run)->weight_amax((float *)amax.data + i, tensor_rows(master, min_i64(first[i], master.rows), rows[i]));
    double largest = 0;
    for (int i = 0; i < 3; i++) {
        double x = get(amax, 0, i);
        largest = isnan(x) || isnan(largest) ? (double)NAN : fmax(x, largest);
    }
    put(amax, 0, 3, largest);
    for (int i = 0; i < 3; i++)
        ops(run)->weight_pack(w, tensor_rows(master, min_i64(first[i], master.rows), rows[i]), first[i],
                              (float *)amax.data + 3, seed, step);
    if (!run->device) return;
    ops(run);
    quantize_unpack(w);
}

/* Memory for what ranks gather beside the views. */
static void place_gathered(Run *run, Operand *o)
{
    size_t bytes = run->ops->gather_bytes ? run->ops->gather_bytes(o) : 0;
    if (!bytes) return;
    Tensor memory = output(run, NULL, DTYPE_INT32, 1, (int64_t)((bytes + 3) / 4));
    block_of(run, memory)->scratch = true;
    o->gathered = memory.data;
}

/* What ranks gather lies in the views, or in what was asked for beside them, and is cut at 16 rows. */
static void check_pieces(const Run *run, const Linear *w)
{
    const Operand *o = &w->weight;
    WeightPiece piece[WEIGHT_PIECES];
    int count = run->ops->weight_pieces(w, piece), quantized = 0, plain = 0;
    bool one = views_are_one(&o->row.format, &o->col.format);
    size_t units = (size_t)ceil_div(o->rows, 16), beside = 0;
    for (int i = 0; i < (one ? 1 : 2); i++)
        *(format_is_plain((i ? &o->col : &o->row)->format.format) ? &plain : &quantized) += 1;
    CHECK(count == plain + 2 * quantized, "%d pieces of %d plain and %d NVFP4 copies", count, plain, quantized);
    for (int i = 0; i < count; i++) {
        CHECK(piece[i].bytes <= units * piece[i].unit && piece[i].bytes > (units - 1) * piece[i].unit,
              "piece %d: %ld bytes of %ld", i, (long)piece[i].bytes, (long)piece[i].unit);
        const char *gathered = o->gathered, *end = piece[i].data + piece[i].bytes;
        if (gathered && piece[i].data >= gathered && piece[i].data <= gathered + run->ops->gather_bytes(o)) {
            CHECK(end <= gathered + run->ops->gather_bytes(o), "piece %d ends beyond what was asked for", i);
            beside++;
        }
        for (int k = 0; k < i; k++)
            CHECK(piece[k].data >= end || piece[k].data + piece[k].bytes <= piece[i].data, "pieces %d, %d overlap", k,
                  i);
    }
    CHECK(!o->gathered == !beside, "%d pieces beside the views", (int)beside);
}

static void case_pack_weight(Run *run)
{
    int64_t rows = rows_to_quantize(run), cols = cols_to_quantize(run);
    Linear w = {.weight = random_weight(run, rows, cols)};
    Tensor master = random_master(run, rows, cols);
    Compared c = place_views(run, &w.weight, 3);
    uint64_t seed = random_bits(run);
    uint32_t step = (uint32_t)pick(run, 0, 1000);
    place_gathered(run, &w.weight);
    need_quantized(run, rows, cols);
    pack_by_parts(run, &w, master, seed, step);
    compare_views(run, &w.weight, &c);
    if (run->device) check_pieces(run, &w);
}

#endif
