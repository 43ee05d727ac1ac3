/* Causal attention without a T x T matrix (Dao et al. 2205.14135): blocks of 64 queries against blocks of 64 keys, with
 * a running maximum and sum per query. Queries that share a key head (grouped queries) read it without copies.
 *
 * What defines the numbers, whatever the machine:
 *   - products follow the order of gemm.h: scores over HD from +0; the output over keys, and the gradients over keys or
 *     queries, continue one chain from block to block, blocks in increasing order; for dK and dV the query heads of the
 *     group come one after the other;
 *   - scores are scaled in FP32, p = exp(s - m) in FP32; the row sum takes p unrounded, the product takes p in the dtype
 *     of the activations, likewise ds = p (dp - delta) scale;
 *   - a block of keys none of which any query of the block sees is left out.
 *
 * Forward: a thread takes one (sequence, head, block of queries). Backward: one (sequence, key head), keys outside,
 * queries inside; dQ of the whole sequence is summed in FP32 in the thread's workspace:
 *
 *     | s, dp [64, 64] FP32 | p, ds [64, 64] act | packed A, B | o or dk, dv [64, HD] | dq, delta of the group |
 */
#include "cpu.h"
#include "simd.h"

#ifdef _OPENMP
#include <omp.h>
#endif

enum { BLOCK = 64, TALL = 96 }; /* TALL: 64 rows padded to whole micro-tiles of any kernel */

typedef struct {
    float *s, *dp;     /* [TALL, BLOCK] */
    void *p, *ds;      /* [BLOCK, BLOCK] act */
    void *a, *b;       /* packed inputs of one product */
    float *acc, *acc2; /* [TALL, wide]: o, or dk and dv */
    float *delta;      /* [group, T] */
    float *dq;         /* [group, ceil(T / BLOCK), TALL, wide] */
    int64_t wide;      /* HD padded to whole micro-tiles */
} Scratch;

/* Takes the pieces from `memory`, or with NULL counts. */
static size_t scratch_layout(Scratch *x, char *memory, int64_t HD, int64_t group, int64_t T, const GemmKernel gemm[2])
{
    size_t used = 0,
           element = gemm[0].element_bytes > gemm[1].element_bytes ? gemm[0].element_bytes : gemm[1].element_bytes;
    int64_t blocks = ceil_div(T, BLOCK), deep = round_up(max_i64(HD, BLOCK), 32) + 16;
    x->wide = round_up(HD, 32);
#define TAKE(member, bytes) (x->member = memory ? (void *)(memory + used) : NULL, used += ((bytes) + 63) / 64 * 64)
    TAKE(s, sizeof(float) * TALL * BLOCK);
    TAKE(dp, sizeof(float) * TALL * BLOCK);
    TAKE(p, sizeof(float) * BLOCK * BLOCK);
    TAKE(ds, sizeof(float) * BLOCK * BLOCK);
    TAKE(a, element * (size_t)(max_i64(TALL, x->wide + 32) * deep));
    TAKE(b, element * (size_t)(max_i64(TALL, x->wide + 32) * deep));
    TAKE(acc, sizeof(float) * (size_t)(TALL * x->wide));
    TAKE(acc2, sizeof(float) * (size_t)(TALL * x->wide));
    TAKE(delta, sizeof(float) * (size_t)(group * T));
    TAKE(dq, sizeof(float) * (size_t)(group * blocks * TALL * x->wide));
#undef TAKE
    return (used + 4095) / 4096 * 4096;
}

size_t attention_workspace_bytes(const Need *need, const GemmKernel gemm[2])
{
    Scratch x;
    return scratch_layout(&x, NULL, need->head_dim, need->group, need->T, gemm);
}

static Scratch scratch_of_thread(const Attention *a, int64_t T)
{
    Scratch x;
    size_t thread = 0;
#ifdef _OPENMP
    thread = (size_t)omp_get_thread_num();
#endif
    scratch_layout(&x, cpu.attention + thread * cpu.attention_bytes, a->HD, a->NH / a->NKV, T, cpu.gemm);
    return x;
}

/* ---- which keys a query sees ---- */

typedef struct {
    int64_t first, end; /* keys [first, end) within a block, maybe empty */
} Range;

static int64_t first_key_of(const Attention *a, int64_t b, int64_t t)
{
    return a->first_key ? a->first_key[b * a->Tq + t] : 0;
}

static Range visible(const Attention *a, int64_t b, int64_t t, int64_t key0)
{
    int64_t first = max_i64(first_key_of(a, b, t) - key0, 0), end = min_i64(a->position0 + t + 1 - key0, BLOCK);
    return (Range){first, end};
}

/* Smallest first key among queries t0 .. t0 + n - 1. */
static int64_t earliest_key(const Attention *a, int64_t b, int64_t t0, int64_t n)
{
    int64_t earliest = first_key_of(a, b, t0);
    for (int64_t t = t0 + 1; t < t0 + n; t++) earliest = min_i64(earliest, first_key_of(a, b, t));
    return earliest;
}

/* scale x s for keys of the range, -inf elsewhere; 16 keys from j on. */
static inline v16 scaled_scores(const float *s, int64_t j, Range range, v16 scale)
{
    static const float LANE[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    v16 key = v16_add(v16_load(LANE), v16_set1((float)j)), none = v16_set1(-INFINITY);
    v16 x = v16_mul(v16_load(s + j), scale);
    x = v16_less_select(key, v16_set1((float)range.end), x, none);
    return v16_less_select(key, v16_set1((float)range.first), none, x);
}

static GemmInput rows_of(Tensor t, int64_t row, bool k_contiguous)
{
    return (GemmInput){.data = row_of(t, row), .dtype = t.dtype, .ld = t.ld, .k_contiguous = k_contiguous};
}

static GemmInput square(const void *data, DType dtype, bool k_contiguous)
{
    return (GemmInput){.data = data, .dtype = dtype, .ld = BLOCK, .k_contiguous = k_contiguous};
}

static Tensor head_of(Tensor t, int64_t h, int64_t HD) { return tensor_cols(t, h * HD, HD); }

/* ---- forward ---- */

/* One query against one block of scores: updates maximum, sum and the row of o; writes p. */
static void softmax_row(float *s, void *p, DType dtype, float *o, int64_t wide, float *maximum, float *sum, Range range,
                        v16 scale)
{
    v16 lanes = v16_set1(-INFINITY), total = v16_set1(0);
    for (int64_t j = 0; j < BLOCK; j += 16) {
        v16 x = scaled_scores(s, j, range, scale);
        v16_store(s + j, x);
        lanes = v16_max(x, lanes);
    }
    float largest = v16_largest(lanes);
    if (!(largest > *maximum)) largest = *maximum;
    float shift = largest == -INFINITY ? 0 : largest; /* no key seen so far, or only NaN: e is 0, or stays NaN */
    float shrink = f32_exp(*maximum - shift);
    for (int64_t j = 0; j < BLOCK; j += 16) {
        v16 e = v16_exp(v16_sub(v16_load(s + j), v16_set1(shift)));
        total = v16_add(total, e);
        v16_store_row(p, dtype, j, BLOCK, e);
    }
    *sum = f32_fma(*sum, shrink, v16_sum(total));
    *maximum = largest;
    for (int64_t c = 0; c < wide; c += 16) v16_store(o + c, v16_mul(v16_load(o + c), v16_set1(shrink)));
}

static void forward_block(const Scratch *x, Tensor att, Tensor lse, Tensor q, Tensor k, Tensor v, const Attention *a,
                          int64_t b, int64_t h, int64_t t0)
{
    int64_t HD = a->HD, n = min_i64(BLOCK, a->Tq - t0), row = b * a->Tq + t0, keys = a->position0 + t0 + n;
    const GemmKernel *kernel = &cpu.gemm[q.dtype];
    v16 scale = v16_set1(1.0f / sqrtf((float)HD));
    float maximum[BLOCK], sum[BLOCK] = {0};
    for (int64_t r = 0; r < BLOCK; r++) maximum[r] = -INFINITY;
    memset(x->acc, 0, sizeof(float) * (size_t)(TALL * x->wide));

    for (int64_t key0 = earliest_key(a, b, t0, n) / BLOCK * BLOCK; key0 < keys; key0 += BLOCK) {
        int64_t count = min_i64(BLOCK, keys - key0), key_row = b * a->Tk + key0;
        gemm_small(kernel, x->s, BLOCK, n, count, HD, rows_of(q, row, true), rows_of(k, key_row, true), true, x->a,
                   x->b);
        for (int64_t r = 0; r < n; r++)
            softmax_row(x->s + r * BLOCK, (char *)x->p + (size_t)(r * BLOCK) * dtype_bytes(q.dtype), q.dtype,
                        x->acc + r * x->wide, x->wide, &maximum[r], &sum[r], visible(a, b, t0 + r, key0), scale);
        gemm_small(kernel, x->acc, x->wide, n, HD, count, square(x->p, q.dtype, true), rows_of(v, key_row, false),
                   false, x->a, x->b);
    }
    for (int64_t r = 0; r < n; r++) {
        v16 inverse = v16_set1(1.0f / sum[r]);
        for (int64_t c = 0; c < HD; c += 16)
            v16_store_row(row_of(att, row + r), att.dtype, c, HD, v16_mul(v16_load(x->acc + r * x->wide + c), inverse));
        ((float *)row_of(lse, row + r))[h] = (float)((double)maximum[r] + f64_log((double)sum[r]));
    }
}

void cpu_attention_forward(Tensor att, Tensor lse, Tensor q, Tensor k, Tensor v, const Attention *a)
{
    int64_t group = a->NH / a->NKV;
#pragma omp parallel num_threads(cpu.threads)
    {
        Scratch x = scratch_of_thread(a, a->Tk);
#pragma omp for collapse(3) schedule(dynamic)
        for (int64_t b = 0; b < a->B; b++)
            for (int64_t h = 0; h < a->NH; h++)
                for (int64_t t0 = 0; t0 < a->Tq; t0 += BLOCK)
                    forward_block(&x, head_of(att, h, a->HD), lse, head_of(q, h, a->HD), head_of(k, h / group, a->HD),
                                  head_of(v, h / group, a->HD), a, b, h, t0);
    }
}

/* ---- backward ---- */

typedef struct {
    Tensor q, k, v, datt, att, lse, dq;
} BackwardTensors;

/* The columns of query head h and of the key head that it reads. */
static BackwardTensors tensors_of_head(const BackwardTensors *all, const Attention *a, int64_t h)
{
    int64_t kv = h / (a->NH / a->NKV), HD = a->HD;
    return (BackwardTensors){.q = head_of(all->q, h, HD),
                             .k = head_of(all->k, kv, HD),
                             .v = head_of(all->v, kv, HD),
                             .datt = head_of(all->datt, h, HD),
                             .att = head_of(all->att, h, HD),
                             .lse = tensor_cols(all->lse, h, 1),
                             .dq = head_of(all->dq, h, HD)};
}

/* delta = sum over HD of datt att, per query: what the softmax's gradient subtracts. */
static void row_deltas(float *delta, const BackwardTensors *t, const Attention *a, int64_t b)
{
    for (int64_t i = 0; i < a->Tq; i++) {
        v16 sum = v16_set1(0);
        for (int64_t c = 0; c < a->HD; c += 16)
            sum = v16_fma(v16_load_row(row_of(t->datt, b * a->Tq + i), t->datt.dtype, c, a->HD, 0),
                          v16_load_row(row_of(t->att, b * a->Tq + i), t->att.dtype, c, a->HD, 0), sum);
        delta[i] = v16_sum(sum);
    }
}

/* One query: scores and dp of a block -> p and ds. */
static void softmax_backward_row(const float *s, const float *dp, void *p, void *ds, DType dtype, float lse,
                                 float delta, Range range, v16 scale)
{
    for (int64_t j = 0; j < BLOCK; j += 16) {
        v16 e = v16_exp(v16_sub(scaled_scores(s, j, range, scale), v16_set1(lse)));
        v16_store_row(p, dtype, j, BLOCK, e);
        v16 d = v16_mul(v16_mul(e, v16_sub(v16_load(dp + j), v16_set1(delta))), scale);
        v16_store_row(ds, dtype, j, BLOCK, v16_less_select(v16_set1(0), e, d, e)); /* dp is not defined where p is 0 */
    }
}

/* Queries t0.. of one head against keys key0..: adds to dk (x->acc), dv (x->acc2) and dq. */
static void backward_block(const Scratch *x, const BackwardTensors *t, const Attention *a, int64_t b, int64_t t0,
                           int64_t key0, const float *delta, float *dq)
{
    int64_t HD = a->HD, n = min_i64(BLOCK, a->Tq - t0), count = min_i64(BLOCK, a->Tk - key0);
    int64_t row = b * a->Tq + t0, key_row = b * a->Tk + key0;
    DType dtype = t->q.dtype;
    const GemmKernel *kernel = &cpu.gemm[dtype];
    v16 scale = v16_set1(1.0f / sqrtf((float)HD));

    gemm_small(kernel, x->s, BLOCK, n, count, HD, rows_of(t->q, row, true), rows_of(t->k, key_row, true), true, x->a,
               x->b);
    gemm_small(kernel, x->dp, BLOCK, n, count, HD, rows_of(t->datt, row, true), rows_of(t->v, key_row, true), true,
               x->a, x->b);
    for (int64_t r = 0; r < n; r++) {
        size_t offset = (size_t)(r * BLOCK) * dtype_bytes(dtype);
        softmax_backward_row(x->s + r * BLOCK, x->dp + r * BLOCK, (char *)x->p + offset, (char *)x->ds + offset, dtype,
                             *(float *)row_of(t->lse, row + r), delta[t0 + r], visible(a, b, t0 + r, key0), scale);
    }
    gemm_small(kernel, x->acc2, x->wide, count, HD, n, square(x->p, dtype, false), rows_of(t->datt, row, false), false,
               x->a, x->b);
    gemm_small(kernel, x->acc, x->wide, count, HD, n, square(x->ds, dtype, false), rows_of(t->q, row, false), false,
               x->a, x->b);
    gemm_small(kernel, dq + t0 / BLOCK * TALL * x->wide, x->wide, n, HD, count, square(x->ds, dtype, true),
               rows_of(t->k, key_row, false), false, x->a, x->b);
}

static void store_block(Tensor out, int64_t row, int64_t rows, const float *acc, int64_t wide)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < out.cols; c += 16)
            v16_store_row(row_of(out, row + r), out.dtype, c, out.cols, v16_load(acc + r * wide + c));
}

/* Key head kv of sequence b, for all query heads that read it. */
static void backward_head(const Scratch *x, const BackwardTensors *all, Tensor dk, Tensor dv, const Attention *a,
                          int64_t b, int64_t kv)
{
    int64_t group = a->NH / a->NKV, blocks = ceil_div(a->Tq, BLOCK), head_dq = blocks * TALL * x->wide;
    memset(x->dq, 0, sizeof(float) * (size_t)(group * head_dq));
    for (int64_t g = 0; g < group; g++) {
        BackwardTensors t = tensors_of_head(all, a, kv * group + g);
        row_deltas(x->delta + g * a->Tq, &t, a, b);
    }
    for (int64_t key0 = 0; key0 < a->Tk; key0 += BLOCK) {
        memset(x->acc, 0, sizeof(float) * (size_t)(TALL * x->wide));
        memset(x->acc2, 0, sizeof(float) * (size_t)(TALL * x->wide));
        for (int64_t g = 0; g < group; g++) {
            BackwardTensors t = tensors_of_head(all, a, kv * group + g);
            for (int64_t t0 = key0; t0 < a->Tq; t0 += BLOCK) /* earlier queries see none of these keys */
                if (earliest_key(a, b, t0, min_i64(BLOCK, a->Tq - t0)) < key0 + BLOCK)
                    backward_block(x, &t, a, b, t0, key0, x->delta + g * a->Tq, x->dq + g * head_dq);
        }
        store_block(dk, b * a->Tk + key0, min_i64(BLOCK, a->Tk - key0), x->acc, x->wide);
        store_block(dv, b * a->Tk + key0, min_i64(BLOCK, a->Tk - key0), x->acc2, x->wide);
    }
    for (int64_t g = 0; g < group; g++) {
        BackwardTensors t = tensors_of_head(all, a, kv * group + g);
        for (int64_t i = 0; i < blocks; i++)
            store_block(t.dq, b * a->Tq + i * BLOCK, min_i64(BLOCK, a->Tq - i * BLOCK),
                        x->dq + g * head_dq + i * TALL * x->wide, x->wide);
    }
}

void cpu_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor datt, Tensor att, Tensor lse, Tensor q, Tensor k,
                            Tensor v, const Attention *a)
{
    BackwardTensors all = {q, k, v, datt, att, lse, dq};
#pragma omp parallel num_threads(cpu.threads)
    {
        Scratch x = scratch_of_thread(a, a->Tk);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t b = 0; b < a->B; b++)
            for (int64_t kv = 0; kv < a->NKV; kv++)
                backward_head(&x, &all, head_of(dk, kv, a->HD), head_of(dv, kv, a->HD), a, b, kv);
    }
}
