/* See profile.h. One list holds every timed operation; numbers, names, wrappers and the table are made of it. */
#include "profile.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- work, from the arguments ---- */

static size_t size(Tensor t) { return t.data ? tensor_bytes(t) : 0; }

/* Of a table, a row for each of x's. */
static size_t rows_of(Tensor t, Tensor x) { return t.data ? (size_t)(x.rows * x.cols) * dtype_bytes(t.dtype) : 0; }

/* Bytes of the views that an operation makes, and of what it reads for that; one that is its source costs nothing. */
static size_t made_from(const Ops *ops, const Operand *o, unsigned views, const void *source, size_t read)
{
    size_t bytes = 0;
    for (unsigned view = VIEW_ROW; view <= VIEW_COL; view++) {
        const View *v = view == VIEW_ROW ? &o->row : &o->col;
        bool second = view == VIEW_COL && views & VIEW_ROW && v->data == o->row.data; /* in the row view's memory */
        if (views & view && v->format.format != FORMAT_NONE && v->data != source && !second)
            bytes += ops->view_bytes(&v->format, view, o->rows, o->cols);
    }
    return bytes ? bytes + read : 0;
}

static double product(const Linear *w, int64_t N) { return 2 * (double)(N * w->weight.rows * w->weight.cols); }

static double attention(const Attention *a, int products)
{
    double pairs = (double)a->Tq * ((double)a->position0 + ((double)a->Tq + 1) / 2);
    return products * 2 * pairs * (double)(a->B * a->NH * a->HD);
}

static Format format_of(Tensor t) { return t.dtype == DTYPE_FP32 ? FORMAT_FP32 : FORMAT_BF16; }

/* ---- the list: X(operation, parameters, arguments, format, flops, bytes); format: of products and attention ---- */

enum { BOTH = VIEW_ROW | VIEW_COL };

/* clang-format off */
#define MOVES(X, op, parameters, arguments, bytes) X(op, parameters, arguments, FORMAT_NONE, 0, bytes)
#define OPERATIONS(X)                                                                                                  \
    MOVES(X, copy_in, (void *dst, const void *host, size_t n), (dst, host, n), 2 * n)                                  \
    MOVES(X, copy_out, (void *host, const void *src, size_t n), (host, src, n), 2 * n)                                 \
    MOVES(X, copy, (Tensor dst, Tensor src), (dst, src), size(dst) + size(src))                                        \
    MOVES(X, zero, (Tensor t), (t), size(t))                                                                           \
    MOVES(X, begin_step, (const Step *step), (step), 0)                                                                \
    MOVES(X, begin_micro_step, (int64_t row0), (row0), 0)                                                              \
    MOVES(X, result_post, (const StepResult *result), (result), 0)                                                     \
    MOVES(X, result_collect, (StepResult *host), (host), 0)                                                            \
    MOVES(X, operand_from_tensor, (Operand *o, Tensor x, unsigned views), (o, x, views),                               \
          made_from(profile.ops, o, views, x.data, size(x)))                                                           \
    MOVES(X, operand_from_norm, (Operand *o, Tensor x, Tensor stats, const Norm *norm, unsigned views),                \
          (o, x, stats, norm, views), made_from(profile.ops, o, views, NULL, size(x) + size(stats)))                   \
    MOVES(X, operand_from_activation, (Operand *o, Tensor h, Activation f, unsigned views), (o, h, f, views),          \
          made_from(profile.ops, o, views, NULL, size(h)))                                                             \
    MOVES(X, operand_from_gradient, (Operand *dy, Tensor g, Tensor dbias), (dy, g, dbias),                             \
          dbias.data ? size(g) + made_from(profile.ops, dy, BOTH, g.data, 0)                                           \
                     : made_from(profile.ops, dy, BOTH, g.data, size(g)))                                              \
    MOVES(X, operand_from_activation_backward, (Operand *dh, Tensor du, Tensor h, Activation f, Tensor dbias),         \
          (dh, du, h, f, dbias), made_from(profile.ops, dh, BOTH, NULL, size(du) + size(h)))                           \
    X(linear_forward, (Tensor y, const Operand *x, const Linear *w), (y, x, w), x->row.format.format,                  \
      product(w, x->rows), 0)                                                                                          \
    X(linear_backward_input, (Tensor dx, const Operand *dy, const Linear *w), (dx, dy, w), dy->row.format.format,      \
      product(w, dy->rows), 0)                                                                                         \
    X(linear_backward_weight, (Linear *w, const Operand *dy, const Operand *x), (w, dy, x), dy->col.format.format,     \
      product(w, dy->rows), 0)                                                                                         \
    MOVES(X, weight_prepare, (Linear *w, Tensor master, uint64_t seed, uint32_t step), (w, master, seed, step),        \
          made_from(profile.ops, &w->weight, BOTH, master.data, size(master)))                                         \
    MOVES(X, weight_amax, (float *amax, Tensor rows), (amax, rows), size(rows))                                        \
    MOVES(X, weight_pack, (Linear *w, Tensor rows, int64_t row0, const float *amax, uint64_t seed, uint32_t step),     \
          (w, rows, row0, amax, seed, step),                                                                           \
          size(rows) + made_from(profile.ops, &w->weight, BOTH, NULL, 0) * (size_t)rows.rows / (size_t)w->weight.rows) \
    MOVES(X, weight_unpack, (Linear *w), (w), 0)                                                                       \
    MOVES(X, embedding_forward, (Tensor x, Tensor stats, const int32_t *tokens, Tensor wte, Tensor wpe, int64_t T,     \
          int64_t position0, const Norm *first), (x, stats, tokens, wte, wpe, T, position0, first),                    \
          size(x) + size(stats) + rows_of(wte, x) + rows_of(wpe, x))                                                   \
    MOVES(X, embedding_backward, (Tensor dwte, Tensor dwpe, Tensor dx, const int32_t *tokens, int64_t T),              \
          (dwte, dwpe, dx, tokens, T), size(dx) + (size_t)(dx.rows * dx.cols) * (dwpe.data ? 16 : 8))                  \
    MOVES(X, residual_add, (Tensor x, Tensor stats, Tensor x_prev, Tensor y, const Norm *next),                        \
          (x, stats, x_prev, y, next), size(x) + size(stats) + size(x_prev) + size(y))                                 \
    MOVES(X, norm_backward, (Tensor dx, const Norm *norm, Tensor dy, Tensor x, Tensor stats),                          \
          (dx, norm, dy, x, stats), 2 * size(dx) + size(dy) + size(x) + size(stats))                                   \
    MOVES(X, qk_norm_rope_forward, (Tensor out, Tensor qkv, Tensor q_gain, Tensor k_gain, float eps, Tensor cos_sin,   \
          const Attention *a), (out, qkv, q_gain, k_gain, eps, cos_sin, a), size(out) + size(qkv))                     \
    MOVES(X, qk_norm_rope_backward, (Tensor dqkv, Tensor dq_gain, Tensor dk_gain, Tensor qkv, Tensor q_gain,           \
          Tensor k_gain, float eps, Tensor cos_sin, const Attention *a),                                               \
          (dqkv, dq_gain, dk_gain, qkv, q_gain, k_gain, eps, cos_sin, a),                                              \
          2 * size(dqkv) + (q_gain.data ? size(qkv) : 0))                                                              \
    X(attention_forward, (Tensor att, Tensor lse, Tensor q, Tensor k, Tensor v, const Attention *a),                   \
      (att, lse, q, k, v, a), format_of(q), attention(a, 2), 0)                                                        \
    X(attention_backward, (Tensor dq, Tensor dk, Tensor dv, Tensor datt, Tensor att, Tensor lse, Tensor q, Tensor k,   \
      Tensor v, const Attention *a), (dq, dk, dv, datt, att, lse, q, k, v, a), format_of(q), attention(a, 5), 0)       \
    MOVES(X, softmax_cross_entropy, (Tensor losses, Tensor logits, const int32_t *targets, int64_t V, bool gradient),  \
          (losses, logits, targets, V, gradient), size(losses) + size(logits) * (gradient ? 2 : 1))                    \
    MOVES(X, loss_sum, (double *sum, Tensor losses), (sum, losses), size(losses))                                      \
    MOVES(X, add, (Tensor sum, Tensor contribution), (sum, contribution), 2 * size(sum) + size(contribution))          \
    MOVES(X, sum_squares, (double *piece, Tensor grad), (piece, grad), size(grad))                                     \
    MOVES(X, finish_step, (StepResult *result, const double *piece, int64_t pieces, const double *loss,                \
          int64_t micro_batches, int64_t tokens), (result, piece, pieces, loss, micro_batches, tokens),                \
          (size_t)(pieces + micro_batches) * sizeof(double))                                                           \
    MOVES(X, adamw, (const ParamSlice *p, const StepResult *result), (p, result),                                      \
          2 * (size(p->master) + size(p->grad) + size(p->m) + size(p->v)))
/* clang-format on */

#define NUMBER(op, parameters, arguments, format, flops, bytes) OP_##op,
enum { OPERATIONS(NUMBER) OP_COUNT };
#define NAME(op, parameters, arguments, format, flops, bytes) #op,
static const char *const NAMES[] = {OPERATIONS(NAME)};
static const char *const FORMATS[FORMAT_COUNT] = {"", " fp32", " bf16", " nvfp4"};

typedef struct {
    int op;
    Format format;
    int64_t calls;
    double seconds, flops, bytes;
} Row;

static struct { /* of the one profile of the process */
    const Ops *ops;
    Ops timed;
    void *memory; /* [1] float of the backend: reading it waits for what was issued */
    double peak_flops[FORMAT_COUNT], peak_bytes;
    double began, ended; /* clock; 0: no step has begun */
    Row row[OP_COUNT * FORMAT_COUNT];
} profile;

/* ---- the wrappers ---- */

static void wait_for(const Ops *ops, const void *memory)
{
    float word;
    if (ops->result_lag) ops->copy_out(&word, memory, sizeof word);
}

static void account(int op, Format format, double start, double flops, double bytes)
{
    wait_for(profile.ops, profile.memory);
    double end = now_seconds();
    if (op == OP_begin_step && profile.began == 0) profile.began = start;
    if (profile.began == 0) return;
    Row *row = &profile.row[op * FORMAT_COUNT + (int)format];
    profile.ended = end;
    row->op = op;
    row->format = format;
    row->calls++;
    row->seconds += end - start;
    row->flops += flops;
    row->bytes += bytes;
}

#define WRAPPER(op, parameters, arguments, format, flops, bytes)                                                       \
    static void timed_##op parameters                                                                                  \
    {                                                                                                                  \
        double start = now_seconds();                                                                                  \
        profile.ops->op arguments;                                                                                     \
        account(OP_##op, format, start, flops, (double)(bytes));                                                       \
    }
OPERATIONS(WRAPPER)

/* ---- opening ---- */

/* Bytes a second, read and written ones counted: the best of some copies. */
static double copy_rate(const Ops *ops)
{
    enum { ROWS = 4096, COLS = 4096 };
    size_t bytes = (size_t)ROWS * COLS * sizeof(float);
    char *memory = ops->alloc(2 * bytes);
    Tensor from = {memory, DTYPE_FP32, ROWS, COLS, COLS}, to = {memory + bytes, DTYPE_FP32, ROWS, COLS, COLS};
    double best = 0, begin = now_seconds();
    ops->zero(from); /* touches the pages; the first copy does those of `to` */
    for (int i = 0; i < 2 || (i < 8 && now_seconds() - begin < 0.4); i++) {
        wait_for(ops, memory);
        double start = now_seconds();
        ops->copy(to, from);
        wait_for(ops, memory);
        double rate = 2 * (double)bytes / (now_seconds() - start);
        if (rate > best) best = rate;
    }
    ops->free(memory, 2 * bytes);
    return best;
}

const Ops *profile_open(const Ops *ops)
{
    memset(&profile, 0, sizeof profile);
    profile.ops = ops;
    profile.timed = *ops;
    if (ops->result_lag) profile.memory = ops->alloc(sizeof(float));
    profile.peak_bytes = copy_rate(ops);
    profile.peak_flops[FORMAT_FP32] = ops->peak_flops(DTYPE_FP32);
    profile.peak_flops[FORMAT_BF16] = profile.peak_flops[FORMAT_NVFP4] = ops->peak_flops(DTYPE_BF16);
#define WRAP(op, parameters, arguments, format, flops, bytes)                                                          \
    if (ops->op) profile.timed.op = timed_##op;
    OPERATIONS(WRAP)
    return &profile.timed;
}

/* ---- the table ---- */

static int slower_first(const void *a, const void *b)
{
    const Row *x = a, *y = b; /* what was not called comes last, also behind no time at all */
    if (x->seconds == y->seconds) return (x->calls < y->calls) - (x->calls > y->calls);
    return x->seconds < y->seconds ? 1 : -1;
}

static void print_row(const Row *row, double steps, double seconds)
{
    double work = row->flops > 0 ? row->flops : row->bytes, rate = work / row->seconds;
    double peak = row->flops > 0 ? profile.peak_flops[row->format] : profile.peak_bytes;
    char name[64];
    snprintf(name, sizeof name, "%s%s", NAMES[row->op], FORMATS[row->format]);
    printf("%-35s %8lld %10.3f %6.2f%%", name, (long long)row->calls, row->seconds * 1e3 / steps,
           100 * row->seconds / seconds);
    if (work > 0 && row->seconds > 0)
        printf(" %11.3f %s %5.1f%%", rate * 1e-9, row->flops > 0 ? "GFLOP/s" : "GB/s   ", 100 * rate / peak);
    printf("\n");
}

void profile_print(void)
{
    double seconds = profile.ended - profile.began, sum = 0;
    double steps = (double)profile.row[OP_result_post * FORMAT_COUNT].calls;
    const Row *end = profile.row + OP_COUNT * FORMAT_COUNT;
    if (steps == 0) {
        printf("profile: no step was run\n");
        return;
    }
    qsort(profile.row, OP_COUNT * FORMAT_COUNT, sizeof(Row), slower_first);
    printf("\nprofile of %.0f steps, %.3f s, on %s; peaks: %.0f GFLOP/s fp32, %.0f bf16, copy %.1f GB/s\n", steps,
           seconds, profile.ops->name, profile.peak_flops[FORMAT_FP32] * 1e-9, profile.peak_flops[FORMAT_BF16] * 1e-9,
           profile.peak_bytes * 1e-9);
    printf("%-35s %8s %10s %7s %19s %6s\n", "operation", "calls", "ms a step", "share", "rate", "peak");
    for (const Row *row = profile.row; row < end && row->calls; row++) {
        print_row(row, steps, seconds);
        sum += row->seconds;
    }
    printf("%-35s %8s %10.3f %6.2f%%\n", "all operations", "", sum * 1e3 / steps, 100 * sum / seconds);
    printf("%-35s %8s %10.3f %6.2f%%\n", "rest: data, log, collectives, files", "", (seconds - sum) * 1e3 / steps,
           100 * (1 - sum / seconds));
}
