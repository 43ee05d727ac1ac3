/* Cases for rotary positions, QK-norm and attention, in ops_harness.h's way; then what bounds cannot say: a document
 * behind the mask gives the bits that it gives alone, and a NaN reaches every query that sees it.
 */
#ifndef LLMC_ATTENTION_CASES_H
#define LLMC_ATTENTION_CASES_H

#include "ops_harness.h"

/* BF16: the result is rounded to 2^-9, and P (and dS backward) before it. */
static double attention_bound(DType dtype, double fp32) { return dtype == DTYPE_BF16 ? 0x1p-6 : fp32; }

/* ---- rotary positions and QK-norm ---- */

typedef struct {
    Attention a;
    int64_t N, cols;                       /* of qkv */
    Tensor qkv, q_gain, k_gain, cos_sin;   /* gains maybe absent */
    double q[256], n[256], dn[256], angle; /* one head */
} Rope;

static Rope random_rope(Run *run)
{
    static const int64_t HEAD_DIM[] = {2, 4, 6, 10, 16, 30, 32, 62, 64, 98, 128, 254, 256};
    Rope p = {
        .a = {.B = pick(run, 1, 3), .Tq = pick(run, 1, 40), .NKV = pick(run, 1, 2), .HD = HEAD_DIM[pick(run, 0, 12)]}};
    p.a.NH = p.a.NKV * pick(run, 1, 3);
    p.a.position0 = coin(run) ? pick(run, 1, 30) : 0;
    p.a.Tk = p.a.position0 + p.a.Tq;
    p.N = p.a.B * p.a.Tq;
    p.cols = (p.a.NH + 2 * p.a.NKV) * p.a.HD;
    p.cos_sin = input(run, DTYPE_FP32, p.a.Tk, p.a.HD, 1);
    for (int64_t k = 0; k < p.a.Tk * p.a.HD; k++) {
        int64_t t = k / p.a.HD, i = k % p.a.HD, half = p.a.HD / 2;
        double angle = (double)t * pow(100, -(double)(i % half) / (double)half);
        put(p.cos_sin, t, i, i < half ? cos(angle) : sin(angle));
    }
    input_changed(run, p.cos_sin);
    if (coin(run)) {
        p.q_gain = input(run, DTYPE_FP32, 1, p.a.HD, 1);
        p.k_gain = input(run, DTYPE_FP32, 1, p.a.HD, 1);
    }
    return p;
}

static double head_rstd(Tensor qkv, int64_t r, int64_t col, int64_t HD)
{
    double squares = 0;
    for (int64_t i = 0; i < HD; i++) squares += get(qkv, r, col + i) * get(qkv, r, col + i);
    return 1 / sqrt(squares / (double)HD + 1e-6);
}

/* out[HD] = x[HD] turned by the angle of row r, or back. */
static void turn(const Rope *p, int64_t r, const double *x, double *out, double direction)
{
    int64_t half = p->a.HD / 2, t = p->a.position0 + r % p->a.Tq;
    for (int64_t i = 0; i < half; i++) {
        double cosine = get(p->cos_sin, t, i), sine = direction * get(p->cos_sin, t, half + i);
        out[i] = x[i] * cosine - x[half + i] * sine;
        out[half + i] = x[half + i] * cosine + x[i] * sine;
    }
}

static void case_rope_forward(Run *run)
{
    Rope p = random_rope(run);
    bool in_place = coin(run);
    Tensor qkv = in_place ? inout(run, "qkv", run->act, p.N, p.cols, 1) : input(run, run->act, p.N, p.cols, 1);
    Tensor out = in_place ? qkv : output(run, "out", run->act, p.N, p.cols);
    double *e = expect(run, out, attention_bound(run->act, 2e-6));
    int64_t HD = p.a.HD, heads = p.a.NH + p.a.NKV;

    for (int64_t k = 0; e && k < p.N * (heads + p.a.NKV); k++) {
        int64_t r = k / (heads + p.a.NKV), h = k % (heads + p.a.NKV);
        Tensor gain = h < p.a.NH ? p.q_gain : p.k_gain;
        double rstd = gain.data && h < heads ? head_rstd(qkv, r, h * HD, HD) : 1;
        for (int64_t i = 0; i < HD; i++) {
            p.q[i] = get(qkv, r, h * HD + i) * rstd;
            if (gain.data && h < heads) p.q[i] *= get(gain, 0, i);
        }
        double *to = e + r * p.cols + h * HD;
        if (h < heads)
            turn(&p, r, p.q, to, 1);
        else
            memcpy(to, p.q, (size_t)HD * sizeof *to);
    }
    ops(run)->qk_norm_rope_forward(out, qkv, p.q_gain, p.k_gain, 1e-6f, p.cos_sin, &p.a);
}

static void case_rope_backward(Run *run)
{
    Rope p = random_rope(run);
    Tensor qkv = input(run, run->act, p.N, p.cols, 1), dqkv = inout(run, "dqkv", run->act, p.N, p.cols, 1), none = {0};
    int64_t HD = p.a.HD, heads = p.a.NH + p.a.NKV;
    Tensor dq_gain = p.q_gain.data ? inout(run, "dq_gain", DTYPE_FP32, 1, HD, 1) : none;
    Tensor dk_gain = p.q_gain.data ? inout(run, "dk_gain", DTYPE_FP32, 1, HD, 1) : none;
    double *e = expect(run, dqkv, attention_bound(run->act, 4e-6));
    double *eq = p.q_gain.data ? expect(run, dq_gain, 4e-6) : NULL, *ek = eq ? expect(run, dk_gain, 4e-6) : NULL;

    for (int64_t k = 0; e && k < p.N * heads; k++) {
        int64_t r = k / heads, h = k % heads, at = r * p.cols + h * HD;
        Tensor gain = h < p.a.NH ? p.q_gain : p.k_gain;
        double rstd = head_rstd(qkv, r, h * HD, HD), mean = 0;
        memcpy(p.q, e + at, (size_t)HD * sizeof *e);
        turn(&p, r, p.q, p.dn, -1);
        for (int64_t i = 0; i < HD; i++) {
            p.n[i] = get(qkv, r, h * HD + i) * rstd;
            if (!gain.data) continue;
            (h < p.a.NH ? eq : ek)[i] += p.dn[i] * p.n[i];
            p.dn[i] *= get(gain, 0, i);
            mean += p.dn[i] * p.n[i] / (double)HD;
        }
        for (int64_t i = 0; i < HD; i++) e[at + i] = gain.data ? rstd * (p.dn[i] - p.n[i] * mean) : p.dn[i];
    }
    need(run, (Need){.N = p.N, .cols = HD});
    ops(run)->qk_norm_rope_backward(dqkv, dq_gain, dk_gain, qkv, p.q_gain, p.k_gain, 1e-6f, p.cos_sin, &p.a);
}

/* ---- attention: q, k, v are slices of one tensor where lengths agree, as in training ---- */

static const int64_t HEAD_DIM[] = {8, 10, 16, 26, 34, 64, 66, 80, 128, 130, 256};

static Attention random_attention(Run *run)
{
    Attention a = {
        .B = pick(run, 1, 2), .Tq = pick(run, 1, 150), .NKV = pick(run, 1, 2), .HD = HEAD_DIM[pick(run, 0, 10)]};
    if (a.HD > 80) a.Tq = 1 + a.Tq % 70; /* portable products are slow */
    if (run->round == 2 || run->round == 3) a.Tq = 130;
    a.NH = a.NKV * pick(run, 1, 3);
    a.Tk = a.Tq;
    return a;
}

/* Documents, their starts at random; in rounds 2 and 3 one a sequence, that begins with the last key of a block; or
 * none. */
static void add_documents(Run *run, Attention *a)
{
    bool edge = run->round == 2 || run->round == 3;
    if (coin(run) && !edge) return;
    int32_t *first = integers(run, a->B * a->Tq, 0, 0), start = 0;
    for (int64_t r = 0; r < a->B * a->Tq; r++) {
        int64_t t = r % a->Tq;
        if (t == 0) start = 0;
        if (edge ? a->position0 + t == 63 : pick(run, 0, 19) == 0) start = (int32_t)(a->position0 + t);
        first[r] = start;
    }
    integers_changed(run, first);
    a->first_key = on_device(first);
}

static int64_t first_key(const Attention *a, int64_t r)
{
    return a->first_key ? ((const int32_t *)on_host(a->first_key))[r] : 0;
}

/* Softmax of query r, head h, into p[Tk]; returns log of the sum of exponentials. */
static double attend(const Attention *a, Tensor q, Tensor k, int64_t r, int64_t h, double *p)
{
    int64_t b = r / a->Tq, last = a->position0 + r % a->Tq, kv = h / (a->NH / a->NKV);
    double sum = 0;
    for (int64_t j = 0; j < a->Tk; j++) {
        p[j] = 0;
        if (j < first_key(a, r) || j > last) continue;
        for (int64_t i = 0; i < a->HD; i++) p[j] += get(q, r, h * a->HD + i) * get(k, b * a->Tk + j, kv * a->HD + i);
        sum += p[j] = exp(p[j] / sqrt((double)a->HD));
    }
    for (int64_t j = 0; j < a->Tk; j++) p[j] /= sum;
    /* cppcheck-suppress invalidFunctionArg ; a query sees at least one key */
    return log(sum);
}

/* q has `gap` columns before it and after it. */
static void attention_forward_case(Run *run, Attention a, int64_t gap)
{
    int64_t C = a.NH * a.HD, G = a.NKV * a.HD, N = a.B * a.Tq;
    Tensor q = tensor_cols(input(run, run->act, N, C + 2 * gap, 1), gap, C);
    Tensor kv = input(run, run->act, a.B * a.Tk, 2 * G, 1), k = tensor_cols(kv, 0, G), v = tensor_cols(kv, G, G);
    Tensor att = output(run, "att", run->act, N, C), lse = output(run, "lse", DTYPE_FP32, N, a.NH);
    double *e = expect(run, att, attention_bound(run->act, 4e-6)), *el = expect(run, lse, 4e-6);
    double *p = xcalloc((size_t)a.Tk, sizeof *p);

    for (int64_t x = 0; e && x < N * a.NH; x++) {
        int64_t r = x / a.NH, h = x % a.NH, head = h / (a.NH / a.NKV);
        el[x] = attend(&a, q, k, r, h, p);
        for (int64_t i = 0; i < a.HD; i++) {
            double *o = &e[r * C + h * a.HD + i];
            *o = 0;
            for (int64_t j = first_key(&a, r); j <= a.position0 + r % a.Tq; j++)
                *o += p[j] * get(v, r / a.Tq * a.Tk + j, head * a.HD + i);
        }
    }
    need(run, (Need){.N = N, .T = a.Tk, .head_dim = a.HD, .group = a.NH / a.NKV, .heads = a.NH});
    ops(run)->attention_forward(att, lse, q, k, v, &a);
    free(p);
}

static void case_attention_forward(Run *run)
{
    Attention a = random_attention(run);
    if (coin(run) && a.Tq < 130) { /* generate: a call within a longer cache */
        a.position0 = pick(run, 0, 100);
        a.Tk = a.position0 + a.Tq + pick(run, 0, 70);
    }
    add_documents(run, &a);
    attention_forward_case(run, a, 5);
}

typedef struct {
    Tensor q, k, v, datt, att;
    double *dq, *dk, *dv; /* expected, within dqkv */
    int64_t ld;
} Backward;

/* One query and head of the expected gradients. */
static void expect_backward(const Attention *a, const Backward *x, int64_t r, int64_t h, double *p)
{
    int64_t HD = a->HD, kv = h / (a->NH / a->NKV), key_row = r / a->Tq * a->Tk;
    double delta = 0, scale = 1 / sqrt((double)HD);
    attend(a, x->q, x->k, r, h, p);
    for (int64_t i = 0; i < HD; i++) delta += get(x->datt, r, h * HD + i) * get(x->att, r, h * HD + i);
    for (int64_t j = first_key(a, r); j <= r % a->Tq; j++) {
        double dp = 0;
        for (int64_t i = 0; i < HD; i++) dp += get(x->datt, r, h * HD + i) * get(x->v, key_row + j, kv * HD + i);
        double ds = p[j] * (dp - delta) * scale;
        for (int64_t i = 0; i < HD; i++) {
            x->dv[(key_row + j) * x->ld + kv * HD + i] += p[j] * get(x->datt, r, h * HD + i);
            x->dk[(key_row + j) * x->ld + kv * HD + i] += ds * get(x->q, r, h * HD + i);
            x->dq[r * x->ld + h * HD + i] += ds * get(x->k, key_row + j, kv * HD + i);
        }
    }
}

static void attention_backward_case(Run *run, Attention a)
{
    int64_t C = a.NH * a.HD, G = a.NKV * a.HD, N = a.B * a.Tq, W = C + 2 * G;
    Tensor qkv = input(run, run->act, N, W, 1), datt = input(run, run->act, N, C, 1);
    Tensor q = tensor_cols(qkv, 0, C), k = tensor_cols(qkv, C, G), v = tensor_cols(qkv, C + G, G);
    Tensor att = output(run, "att", run->act, N, C), lse = output(run, "lse", DTYPE_FP32, N, a.NH);
    Tensor dqkv = output(run, "dqkv", run->act, N, W);
    double *e = expect(run, dqkv, 2 * attention_bound(run->act, 6e-6)), *p = xcalloc((size_t)a.Tk, sizeof *p);

    need(run, (Need){.N = N, .T = a.Tk, .head_dim = a.HD, .group = a.NH / a.NKV, .heads = a.NH});
    ops(run)->attention_forward(att, lse, q, k, v, &a);
    ops(run)->attention_backward(tensor_cols(dqkv, 0, C), tensor_cols(dqkv, C, G), tensor_cols(dqkv, C + G, G), datt,
                                 att, lse, q, k, v, &a);
    if (e) {
        Backward x = {q, k, v, datt, att, e, e + C, e + C + G, W};
        memset(e, 0, (size_t)(N * W) * sizeof *e);
        for (int64_t i = 0; i < N * a.NH; i++) expect_backward(&a, &x, i / a.NH, i % a.NH, p);
    }
    free(p);
}

static void case_attention_backward(Run *run)
{
    Attention a = random_attention(run);
    add_documents(run, &a);
    attention_backward_case(run, a);
}

/* ---- documents and NaN, on every instruction set ---- */

typedef struct {
    Run run;
    Attention a;
    Tensor qkv, datt, att, lse, dqkv;
} Pass;

/* Forward and backward of rows row0 .. of the given sequence as one of its own. */
static void run_pass(Pass *x)
{
    const Attention *a = &x->a;
    int64_t C = a->NH * a->HD, G = a->NKV * a->HD;
    Tensor q = tensor_cols(x->qkv, 0, C), k = tensor_cols(x->qkv, C, G), v = tensor_cols(x->qkv, C + G, G);
    need(&x->run, (Need){.N = a->B * a->Tq, .T = a->Tk, .head_dim = a->HD, .group = a->NH / a->NKV, .heads = a->NH});
    ops(&x->run)->attention_forward(x->att, x->lse, q, k, v, a);
    ops(&x->run)->attention_backward(tensor_cols(x->dqkv, 0, C), tensor_cols(x->dqkv, C, G),
                                     tensor_cols(x->dqkv, C + G, G), x->datt, x->att, x->lse, q, k, v, a);
}

static bool pass_open(Pass *x, const char *isa, DType act, Attention a)
{
    *x = (Pass){.run = {.act = act, .random = 77}, .a = a};
    if (!harness_open(&x->run, isa, 2)) return false;
    int64_t N = a.B * a.Tq, W = (a.NH + 2 * a.NKV) * a.HD;
    x->qkv = inout(&x->run, "qkv", act, N, W, 1);
    x->datt = inout(&x->run, "datt", act, N, a.NH * a.HD, 1);
    x->att = output(&x->run, "att", act, N, a.NH * a.HD);
    x->lse = output(&x->run, "lse", DTYPE_FP32, N, a.NH);
    x->dqkv = output(&x->run, "dqkv", act, N, W);
    return true;
}

static bool same_rows(Tensor a, int64_t a0, Tensor b, int64_t b0, int64_t rows)
{
    for (int64_t r = 0; r < rows; r++)
        if (memcmp(element_of(a, a0 + r, 0), element_of(b, b0 + r, 0), (size_t)a.cols * dtype_bytes(a.dtype)))
            return false;
    return true;
}

static void copy_rows(Tensor to, Tensor from, int64_t row)
{
    memcpy(element_of(to, 0, 0), element_of(from, row, 0), tensor_bytes(to));
}

/* Documents that begin at a whole block of 64 keys, at [0, 64, 128): each alone gives the same bits, both ways. */
static void test_document_alone(const char *isa, DType act, int64_t HD)
{
    enum { T = 150, STARTS = 3 };
    static const int64_t START[STARTS + 1] = {0, 64, 128, T};
    Attention a = {.B = 1, .Tq = T, .Tk = T, .NH = 4, .NKV = 2, .HD = HD};
    Pass whole, alone;
    if (!pass_open(&whole, isa, act, a)) return;
    int32_t *first = integers(&whole.run, T, 0, 0);
    for (int t = 0; t < T; t++) first[t] = t < 64 ? 0 : t < 128 ? 64 : 128;
    integers_changed(&whole.run, first);
    whole.a.first_key = on_device(first);
    run_pass(&whole);
    for (int d = 0; d < STARTS; d++) {
        int64_t row = START[d], rows = START[d + 1] - row;
        Attention one = a;
        one.Tq = one.Tk = rows;
        pass_open(&alone, isa, act, one);
        if (strstr(ops(&alone.run)->name, "attention by cuDNN")) /* it takes no documents: the same kernels for both */
            one.first_key = on_device(integers(&alone.run, rows, 0, 0));
        alone.a = one;
        copy_rows(alone.qkv, whole.qkv, row);
        copy_rows(alone.datt, whole.datt, row);
        run_pass(&alone);
        CHECK(same_rows(whole.att, row, alone.att, 0, rows), "%s, act %d, document %d: att", isa, act, d);
        CHECK(same_rows(whole.lse, row, alone.lse, 0, rows), "%s, act %d, document %d: lse", isa, act, d);
        CHECK(same_rows(whole.dqkv, row, alone.dqkv, 0, rows), "%s, act %d, document %d: dqkv", isa, act, d);
        run_free(&alone.run);
    }
    check_memory(&whole.run);
    run_free(&whole.run);
}

static bool row_is_nan(Tensor t, int64_t r, int64_t c0, int64_t cols)
{
    for (int64_t c = c0; c < c0 + cols; c++)
        if (!isnan(get(t, r, c))) return false;
    return true;
}

/* One NaN in q, k or v at `at`: every query that sees it gives NaN, in att and in its gradient. The other sequence and
 * the other key head are as if nothing had been. */
static void one_nan(const char *isa, DType act, int64_t HD, int which, int64_t at, int64_t document)
{
    enum { T = 140 };
    Attention a = {.B = 2, .Tq = T, .Tk = T, .NH = 4, .NKV = 2, .HD = HD};
    int64_t C = a.NH * HD, G = a.NKV * HD, col = which == 0 ? HD : which == 1 ? C : C + G;
    Pass clean, spoilt;
    if (!pass_open(&clean, isa, act, a)) return;
    pass_open(&spoilt, isa, act, a);
    int32_t *first = integers(&clean.run, 2 * T, 0, 0);
    for (int r = 0; r < 2 * T; r++) first[r] = r % T < document ? 0 : (int32_t)document;
    integers_changed(&clean.run, first);
    clean.a.first_key = spoilt.a.first_key = on_device(first);
    put(spoilt.qkv, at, col + 3, (double)NAN);
    run_pass(&clean);
    run_pass(&spoilt);

    for (int64_t t = at; t < (at < document ? document : T); t++) {
        if (which == 0 && t > at) break; /* a query is its own only */
        int64_t head = which == 0 ? HD : 0, c0 = which == 2 ? head + 3 : head;
        CHECK(row_is_nan(spoilt.att, t, c0, which == 2 ? 1 : HD), "%s, act %d, NaN in %c[%d]: att of query %d is not",
              isa, act, "qkv"[which], (int)at, (int)t);
        CHECK(row_is_nan(spoilt.dqkv, t, head, HD), "%s, act %d, NaN in %c[%d]: dq of query %d is not", isa, act,
              "qkv"[which], (int)at, (int)t);
    }
    CHECK(same_rows(clean.att, T, spoilt.att, T, T) && same_rows(clean.dqkv, T, spoilt.dqkv, T, T),
          "%s: NaN reached another sequence", isa);
    CHECK(same_rows(tensor_cols(clean.att, 2 * HD, 2 * HD), 0, tensor_cols(spoilt.att, 2 * HD, 2 * HD), 0, T),
          "%s: NaN reached another key head", isa);
    check_memory(&spoilt.run);
    run_free(&clean.run);
    run_free(&spoilt.run);
}

static void test_nan(const char *isa, DType act, int64_t HD)
{
    static const int64_t AT[] = {0, 1, 63, 64, 100, 139};
    for (int which = 0; which < 3; which++)
        for (int i = 0; i < 6; i++)
            for (int64_t document = 63; document <= 64; document++) one_nan(isa, act, HD, which, AT[i], document);
}

#endif
