/* A table of operations that computes nothing and betrays every mistake of lifetime: each op first spoils what it
 * writes, with garbage that depends on nothing it reads, then writes a hash of everything that it reads, row by row
 * where the real op works by rows. A value that is overwritten too early, read too late or never made reaches the
 * hashes in the gradients and the losses.
 *
 * What an op reads and writes is what ops.h says: absent tensors are left alone, only the views asked for are made, a
 * view that is its source is left alone. Gradients of parameters are added, as 32-bit words, so that zeroing and adding
 * contributions work as for numbers. When a micro-step begins, everything that may not survive is spoiled too.
 */
#ifndef LLMC_STUB_OPS_H
#define LLMC_STUB_OPS_H

#include "ops.h"
#include "test.h"

static struct {
    uint64_t garbage; /* two values give different garbage everywhere */
    uint64_t spoiled; /* counts, so that no garbage comes twice */
    Step step;
    int64_t row0;
    char *dead; /* memory in which nothing lives when a micro-step begins */
    size_t dead_bytes;
} stub;

/* ---- hashes of rows ---- */

static inline uint64_t stub_mix(uint64_t a, uint64_t b)
{
    uint64_t x = (a + 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u + b;
    x = (x ^ x >> 30) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static inline char *stub_row(Tensor t, int64_t r) { return (char *)t.data + (size_t)(r * t.ld) * dtype_bytes(t.dtype); }
static inline size_t stub_row_bytes(Tensor t) { return (size_t)t.cols * dtype_bytes(t.dtype); }

static inline void stub_fill(char *p, size_t bytes, uint64_t h)
{
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t x = stub_mix(h, i);
        memcpy(p + i, &x, bytes - i < 8 ? bytes - i : 8);
    }
}

static inline uint64_t stub_read_row(uint64_t h, Tensor t, int64_t r)
{
    return t.data ? hash64(stub_row(t, r), stub_row_bytes(t), h) : stub_mix(h, 1);
}

static inline uint64_t stub_read(uint64_t h, Tensor t)
{
    for (int64_t r = 0; t.data && r < t.rows; r++) h = stub_read_row(h, t, r);
    return stub_mix(h, (uint64_t)t.rows);
}

static inline void stub_write_row(Tensor t, int64_t r, uint64_t h)
{
    if (t.data) stub_fill(stub_row(t, r), stub_row_bytes(t), h);
}

static inline void stub_spoil(Tensor t)
{
    for (int64_t r = 0; t.data && r < t.rows; r++) stub_write_row(t, r, stub_mix(stub.garbage, stub.spoiled++));
}

static inline void stub_add_row(Tensor sum, int64_t r, uint64_t h)
{
    for (int64_t c = 0; sum.data && c < sum.cols; c++)
        ((uint32_t *)stub_row(sum, r))[c] += (uint32_t)(stub_mix(h, (uint64_t)c) >> 32);
}

static inline void stub_add_hash(Tensor sum, uint64_t h)
{
    for (int64_t r = 0; r < sum.rows; r++) stub_add_row(sum, r, stub_mix(h, (uint64_t)r));
}

/* ---- operands ---- */

static size_t stub_view_bytes(const ViewFormat *format, unsigned view, int64_t rows, int64_t cols)
{
    (void)view;
    return (size_t)(rows * cols) * (format->format == FORMAT_FP32 ? 4 : 2);
}

static void stub_view_place(View *v, unsigned view, int64_t rows, int64_t cols, void *memory)
{
    (void)view, (void)rows, (void)cols;
    v->data = memory;
}

static inline Tensor stub_view(const Operand *o, const View *v)
{
    return (Tensor){v->data, v->format.format == FORMAT_FP32 ? DTYPE_FP32 : DTYPE_BF16, o->rows, o->cols, o->cols};
}

static inline const View *stub_asked(const Operand *o, unsigned view, unsigned views, const void *source)
{
    const View *v = view == VIEW_ROW ? &o->row : &o->col;
    return views & view && v->format.format != FORMAT_NONE && v->data != source ? v : NULL;
}

static inline void stub_spoil_views(const Operand *o, unsigned views, const void *source)
{
    for (unsigned view = VIEW_ROW; view <= VIEW_COL; view++) {
        const View *v = stub_asked(o, view, views, source);
        if (v) stub_spoil(stub_view(o, v));
    }
}

/* The same for row and column view of one format: they may be one memory. */
static inline void stub_write_views(const Operand *o, unsigned views, const void *source, int64_t r, uint64_t h)
{
    for (unsigned view = VIEW_ROW; view <= VIEW_COL; view++) {
        const View *v = stub_asked(o, view, views, source);
        if (v) stub_write_row(stub_view(o, v), r, stub_mix(h, (uint64_t)v->format.format));
    }
}

/* Stochastic rounding of gradients: the place of a row. */
static inline uint64_t stub_place(const Operand *dy, int64_t r)
{
    uint64_t place = (uint64_t)(stub.row0 + dy->row0 + r);
    return stub_mix(stub_mix(stub_mix(stub.step.seed, stub.step.step), place), (uint64_t)dy->layer);
}

static void stub_operand_from_tensor(Operand *o, Tensor x, unsigned views)
{
    CHECK(o->rows == x.rows && o->cols == x.cols, "operand_from_tensor");
    stub_spoil_views(o, views, x.data);
    for (int64_t r = 0; views && r < o->rows; r++) stub_write_views(o, views, x.data, r, stub_read_row(1, x, r));
}

static void stub_operand_from_norm(Operand *o, Tensor x, Tensor stats, const Norm *norm, unsigned views)
{
    CHECK(o->rows == x.rows && o->rows == stats.rows && o->cols == x.cols, "operand_from_norm");
    if (!views) return;
    stub_spoil_views(o, views, NULL);
    uint64_t w = stub_read(stub_read(2, norm->gain), norm->bias);
    for (int64_t r = 0; r < o->rows; r++)
        stub_write_views(o, views, NULL, r, stub_read_row(stub_read_row(w, x, r), stats, r));
}

static void stub_operand_from_activation(Operand *o, Tensor h, Activation f, unsigned views)
{
    CHECK(o->rows == h.rows && h.cols == o->cols * (f == ACTIVATION_SWIGLU ? 2 : 1), "operand_from_activation");
    stub_spoil_views(o, views, NULL);
    for (int64_t r = 0; views && r < o->rows; r++) stub_write_views(o, views, NULL, r, stub_read_row(3, h, r));
}

static void stub_operand_from_gradient(Operand *dy, Tensor g, Tensor dbias)
{
    CHECK(dy->rows == g.rows && dy->cols == g.cols, "operand_from_gradient");
    stub_spoil_views(dy, VIEW_ROW | VIEW_COL, g.data);
    for (int64_t r = 0; r < dy->rows; r++)
        stub_write_views(dy, VIEW_ROW | VIEW_COL, g.data, r, stub_read_row(stub_place(dy, r), g, r));
    if (dbias.data) stub_add_hash(dbias, stub_read(4, g));
}

static void stub_operand_from_activation_backward(Operand *dh, Tensor du, Tensor h, Activation f, Tensor dbias)
{
    uint64_t all = 5;
    CHECK(dh->rows == du.rows && dh->cols == h.cols && h.cols == du.cols * (f == ACTIVATION_SWIGLU ? 2 : 1),
          "operand_from_activation_backward");
    stub_spoil_views(dh, VIEW_ROW | VIEW_COL, NULL);
    for (int64_t r = 0; r < dh->rows; r++) {
        uint64_t row = stub_read_row(stub_read_row(stub_place(dh, r), du, r), h, r);
        stub_write_views(dh, VIEW_ROW | VIEW_COL, NULL, r, row);
        all = stub_mix(all, row);
    }
    if (dbias.data) stub_add_hash(dbias, all);
}

/* ---- linear layers ---- */

static void stub_linear_forward(Tensor y, const Operand *x, const Linear *w)
{
    CHECK(y.rows == x->rows && y.cols == w->weight.rows && x->cols == w->weight.cols, "linear_forward");
    stub_spoil(y);
    uint64_t weight = stub_read(stub_read(6, stub_view(&w->weight, &w->weight.row)), w->bias);
    for (int64_t r = 0; r < y.rows; r++) stub_write_row(y, r, stub_read_row(weight, stub_view(x, &x->row), r));
}

static void stub_linear_backward_input(Tensor dx, const Operand *dy, const Linear *w)
{
    CHECK(dx.rows == dy->rows && dx.cols == w->weight.cols && dy->cols == w->weight.rows, "linear_backward_input");
    stub_spoil(dx);
    uint64_t weight = stub_read(7, stub_view(&w->weight, &w->weight.col));
    for (int64_t r = 0; r < dx.rows; r++) stub_write_row(dx, r, stub_read_row(weight, stub_view(dy, &dy->row), r));
}

static void stub_linear_backward_weight(Linear *w, const Operand *dy, const Operand *x)
{
    CHECK(dy->rows == x->rows && dy->cols == w->weight.rows && x->cols == w->weight.cols, "linear_backward_weight");
    if (w->dW.data) stub_add_hash(w->dW, stub_read(stub_read(8, stub_view(dy, &dy->col)), stub_view(x, &x->col)));
}

static void stub_weight_prepare(Linear *w, Tensor master, uint64_t seed, uint32_t step)
{
    (void)seed, (void)step;
    stub_operand_from_tensor(&w->weight, master, VIEW_ROW | VIEW_COL);
}

/* ---- residual stream and norms: of `first` and `next` only kind and eps are read ---- */

static void stub_write_stream(Tensor x, Tensor stats, int64_t r, uint64_t h, const Norm *norm)
{
    stub_write_row(x, r, h);
    stub_write_row(stats, r, hash64(&norm->eps, sizeof norm->eps, stub_mix(h, norm->kind)));
}

static void stub_embedding_forward(Tensor x, Tensor stats, const int32_t *tokens, Tensor wte, Tensor wpe, int64_t T,
                                   int64_t position0, const Norm *first)
{
    stub_spoil(x);
    stub_spoil(stats);
    for (int64_t r = 0; r < x.rows; r++) {
        uint64_t h = stub_read_row(stub_mix(9, (uint64_t)tokens[r]), wte, tokens[r]);
        stub_write_stream(x, stats, r, stub_read_row(h, wpe, position0 + r % T), first);
    }
}

static void stub_embedding_backward(Tensor dwte, Tensor dwpe, Tensor dx, const int32_t *tokens, int64_t T)
{
    for (int64_t r = 0; r < dx.rows; r++) {
        stub_add_row(dwte, tokens[r], stub_read_row(10, dx, r));
        stub_add_row(dwpe, r % T, stub_read_row(11, dx, r));
    }
}

static void stub_residual_add(Tensor x, Tensor stats, Tensor x_prev, Tensor y, const Norm *next)
{
    CHECK(x.rows == x_prev.rows && x.rows == y.rows && x.rows == stats.rows && x.cols == y.cols, "residual_add");
    stub_spoil(x);
    stub_spoil(stats);
    for (int64_t r = 0; r < x.rows; r++)
        stub_write_stream(x, stats, r, stub_read_row(stub_read_row(12, x_prev, r), y, r), next);
}

static void stub_norm_backward(Tensor dx, const Norm *norm, Tensor dy, Tensor x, Tensor stats)
{
    uint64_t gain = stub_read(13, norm->gain), all = 14;
    CHECK(dx.rows == dy.rows && dx.rows == x.rows && dx.rows == stats.rows && dx.cols == dy.cols, "norm_backward");
    for (int64_t r = 0; r < dx.rows; r++) {
        uint64_t before = stub_read_row(gain, dx, r); /* dx is added to */
        stub_spoil(tensor_rows(dx, r, 1));
        uint64_t h = stub_read_row(stub_read_row(stub_read_row(before, dy, r), x, r), stats, r);
        stub_write_row(dx, r, h);
        all = stub_mix(all, h);
    }
    if (norm->dgain.data) stub_add_hash(norm->dgain, all);
    if (norm->dbias.data) stub_add_hash(norm->dbias, stub_mix(all, 1));
}

/* ---- attention ---- */

static void stub_qk_norm_rope_forward(Tensor out, Tensor qkv, Tensor q_gain, Tensor k_gain, float eps, Tensor cos_sin,
                                      const Attention *a)
{
    uint64_t gain = hash64(&eps, sizeof eps, stub_read(stub_read(15, q_gain), k_gain));
    CHECK(out.rows == qkv.rows && out.cols == qkv.cols && qkv.rows == a->B * a->Tq, "qk_norm_rope_forward");
    if (out.data != qkv.data) stub_spoil(out);
    for (int64_t r = 0; r < out.rows; r++)
        stub_write_row(out, r, stub_read_row(stub_read_row(gain, qkv, r), cos_sin, a->position0 + r % a->Tq));
}

static void stub_qk_norm_rope_backward(Tensor dqkv, Tensor dq_gain, Tensor dk_gain, Tensor qkv, Tensor q_gain,
                                       Tensor k_gain, float eps, Tensor cos_sin, const Attention *a)
{
    uint64_t gain = hash64(&eps, sizeof eps, stub_read(stub_read(16, q_gain), k_gain)), all = 17;
    for (int64_t r = 0; r < dqkv.rows; r++) {
        uint64_t h = stub_read_row(stub_read_row(gain, dqkv, r), cos_sin, a->position0 + r % a->Tq);
        stub_spoil(tensor_rows(dqkv, r, 1));
        if (q_gain.data) h = stub_read_row(h, qkv, r); /* the rotation alone needs no input */
        stub_write_row(dqkv, r, h);
        all = stub_mix(all, h);
    }
    if (dq_gain.data) stub_add_hash(dq_gain, all);
    if (dk_gain.data) stub_add_hash(dk_gain, stub_mix(all, 1));
}

/* Query t of sequence b sees keys first_key .. position0 + t, no others. */
static void stub_attention_forward(Tensor att, Tensor lse, Tensor q, Tensor k, Tensor v, const Attention *a)
{
    CHECK(att.rows == a->B * a->Tq && q.rows == att.rows && att.cols == q.cols && att.cols == a->NH * a->HD &&
              k.cols == a->NKV * a->HD && v.cols == k.cols && k.rows == a->B * a->Tk && lse.cols == a->NH,
          "attention_forward");
    stub_spoil(att);
    stub_spoil(lse);
    for (int64_t r = 0; r < att.rows; r++) {
        int64_t b = r / a->Tq, t = r % a->Tq;
        uint64_t h = stub_read_row(18, q, r);
        for (int64_t key = a->first_key ? a->first_key[r] : 0; key <= a->position0 + t; key++)
            h = stub_read_row(stub_read_row(h, k, b * a->Tk + key), v, b * a->Tk + key);
        stub_write_row(att, r, h);
        stub_write_row(lse, r, stub_mix(h, 1));
    }
}

static void stub_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor datt, Tensor att, Tensor lse, Tensor q,
                                    Tensor k, Tensor v, const Attention *a)
{
    CHECK(dq.rows == a->B * a->Tq && dk.rows == a->B * a->Tk && datt.cols == att.cols && dq.cols == q.cols,
          "attention_backward");
    stub_spoil(dq);
    stub_spoil(dk);
    stub_spoil(dv);
    for (int64_t b = 0; b < a->B; b++) {
        uint64_t all = 19;
        for (int64_t r = b * a->Tq; r < (b + 1) * a->Tq; r++) {
            all = stub_read_row(stub_read_row(stub_read_row(all, datt, r), att, r), lse, r);
            all = stub_read_row(stub_read_row(stub_read_row(all, q, r), k, r), v, r);
            if (a->first_key) all = stub_mix(all, (uint64_t)a->first_key[r]);
        }
        for (int64_t r = b * a->Tq; r < (b + 1) * a->Tq; r++) {
            stub_write_row(dq, r, stub_mix(all, 3 * (uint64_t)r));
            stub_write_row(dk, r, stub_mix(all, 3 * (uint64_t)r + 1));
            stub_write_row(dv, r, stub_mix(all, 3 * (uint64_t)r + 2));
        }
    }
}

/* ---- classifier ---- */

static inline uint64_t stub_loss(Tensor logits, int64_t r, int32_t target)
{
    return stub_mix(stub_read_row(20, logits, r), (uint64_t)target);
}

static void stub_softmax_cross_entropy(Tensor losses, Tensor logits, const int32_t *targets, int64_t V, bool gradient)
{
    CHECK(losses.rows == logits.rows && logits.cols >= V, "softmax_cross_entropy");
    stub_spoil(losses);
    for (int64_t r = 0; r < logits.rows; r++) {
        uint64_t h = stub_loss(logits, r, targets[r]);
        stub_write_row(losses, r, h);
        if (gradient) stub_write_row(logits, r, hash64(&stub.step.loss_scale, sizeof stub.step.loss_scale, h));
    }
}

static void stub_loss_sum(double *sum, Tensor losses)
{
    uint64_t h = stub_read(21, losses);
    memcpy(sum, &h, sizeof h);
}

/* ---- memory, step ---- */

static void stub_copy_host(void *dst, const void *src, size_t bytes) { memcpy(dst, src, bytes); }

static void stub_copy(Tensor dst, Tensor src)
{
    CHECK(dst.rows == src.rows && dst.cols == src.cols, "copy");
    stub_spoil(dst);
    for (int64_t r = 0; dst.data && r < dst.rows; r++)
        if (dst.dtype == src.dtype)
            memcpy(stub_row(dst, r), stub_row(src, r), stub_row_bytes(src));
        else
            stub_write_row(dst, r, stub_read_row(22, src, r));
}

static void stub_zero(Tensor t)
{
    for (int64_t r = 0; t.data && r < t.rows; r++) memset(stub_row(t, r), 0, stub_row_bytes(t));
}

static void stub_add(Tensor sum, Tensor contribution)
{
    for (int64_t r = 0; r < sum.rows; r++)
        for (int64_t c = 0; c < sum.cols; c++)
            ((uint32_t *)stub_row(sum, r))[c] += ((uint32_t *)stub_row(contribution, r))[c];
}

static void stub_begin_step(const Step *step) { stub.step = *step; }

static void stub_begin_micro_step(int64_t row0)
{
    stub.row0 = row0;
    if (stub.dead) stub_fill(stub.dead, stub.dead_bytes, stub_mix(stub.garbage, stub.spoiled++));
}

static const Ops STUB_OPS = {
    .name = "stub",
    .copy_in = stub_copy_host,
    .copy_out = stub_copy_host,
    .copy = stub_copy,
    .zero = stub_zero,
    .begin_step = stub_begin_step,
    .begin_micro_step = stub_begin_micro_step,
    .view_bytes = stub_view_bytes,
    .view_place = stub_view_place,
    .operand_from_tensor = stub_operand_from_tensor,
    .operand_from_norm = stub_operand_from_norm,
    .operand_from_activation = stub_operand_from_activation,
    .operand_from_gradient = stub_operand_from_gradient,
    .operand_from_activation_backward = stub_operand_from_activation_backward,
    .linear_forward = stub_linear_forward,
    .linear_backward_input = stub_linear_backward_input,
    .linear_backward_weight = stub_linear_backward_weight,
    .weight_prepare = stub_weight_prepare,
    .embedding_forward = stub_embedding_forward,
    .embedding_backward = stub_embedding_backward,
    .residual_add = stub_residual_add,
    .norm_backward = stub_norm_backward,
    .qk_norm_rope_forward = stub_qk_norm_rope_forward,
    .qk_norm_rope_backward = stub_qk_norm_rope_backward,
    .attention_forward = stub_attention_forward,
    .attention_backward = stub_attention_backward,
    .softmax_cross_entropy = stub_softmax_cross_entropy,
    .loss_sum = stub_loss_sum,
    .add = stub_add,
};

#endif
