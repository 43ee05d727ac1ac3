/* QK-norm (RMSNorm per head, Qwen3) and rotary positions (Su et al. 2104.09864) of q and k, forward and backward.
 *
 * Rotation pairs element i of a head with i + HD/2 ("split halves", as Hugging Face):
 *     out_i = n_i cos - n_{i+HD/2} sin        out_{i+HD/2} = n_{i+HD/2} cos + n_i sin
 * Row p of cos_sin has the cosines of position p, then its sines. v passes through.
 */
#include "cpu.h"
#include "simd.h"

typedef struct { /* one head of one token */
    float value[OPS_MAX_HEAD_DIM], rstd;
} Head;

static void load_head(Head *head, const void *row, DType dtype, int64_t HD)
{
    for (int64_t c = 0; c < HD; c += 16)
        v16_store_row(head->value, DTYPE_FP32, c, HD, v16_load_row(row, dtype, c, HD, 0));
}

static void store_head(void *row, DType dtype, const Head *head, int64_t HD)
{
    for (int64_t c = 0; c < HD; c += 16)
        v16_store_row(row, dtype, c, HD, v16_load_row(head->value, DTYPE_FP32, c, HD, 0));
}

/* By the angle (direction 1) or back (-1). */
static void rotate(Head *head, const float *cos_sin, int64_t HD, float direction)
{
    int64_t half = HD / 2;
    float *low = head->value, *high = head->value + half;
    for (int64_t c = 0; c < half; c += 16) {
        v16 cosine = v16_load_row(cos_sin, DTYPE_FP32, c, half, 0);
        v16 sine = v16_mul(v16_load_row(cos_sin + half, DTYPE_FP32, c, half, 0), v16_set1(direction));
        v16 a = v16_load_row(low, DTYPE_FP32, c, half, 0), b = v16_load_row(high, DTYPE_FP32, c, half, 0);
        v16_store_row(low, DTYPE_FP32, c, half, v16_sub(v16_mul(a, cosine), v16_mul(b, sine)));
        v16_store_row(high, DTYPE_FP32, c, half, v16_add(v16_mul(b, cosine), v16_mul(a, sine)));
    }
}

static void normalise(Head *head, const float *gain, int64_t HD)
{
    for (int64_t c = 0; c < HD; c += 16) {
        v16 n = v16_mul(v16_load_row(head->value, DTYPE_FP32, c, HD, 0), v16_set1(head->rstd));
        v16_store_row(head->value, DTYPE_FP32, c, HD, v16_mul(n, v16_load_row(gain, DTYPE_FP32, c, HD, 0)));
    }
}

static const float *position_row(Tensor cos_sin, const Attention *a, int64_t r)
{
    return row_of(cos_sin, a->position0 + r % a->Tq);
}

void cpu_qk_norm_rope_forward(Tensor out, Tensor qkv, Tensor q_gain, Tensor k_gain, float eps, Tensor cos_sin,
                              const Attention *a)
{
    int64_t HD = a->HD, heads = a->NH + a->NKV, v_cols = a->NKV * HD;
#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t r = 0; r < qkv.rows; r++) {
        for (int64_t h = 0; h < heads; h++) {
            Tensor in = tensor_cols(qkv, h * HD, HD), to = tensor_cols(out, h * HD, HD);
            const float *gain = h < a->NH ? q_gain.data : k_gain.data;
            Head head;
            load_head(&head, row_of(in, r), qkv.dtype, HD);
            if (gain) {
                norm_row_stats(&head.rstd, row_of(in, r), qkv.dtype, HD, NORM_RMSNORM, eps);
                normalise(&head, gain, HD);
            }
            rotate(&head, position_row(cos_sin, a, r), HD, 1);
            store_head(row_of(to, r), out.dtype, &head, HD);
        }
        if (out.data != qkv.data)
            memcpy(row_of(tensor_cols(out, heads * HD, v_cols), r), row_of(tensor_cols(qkv, heads * HD, v_cols), r),
                   (size_t)v_cols * dtype_bytes(qkv.dtype));
    }
}

/* d: gradient of the norm's output -> of its input x; gain_sum += d n. */
static void normalise_backward(Head *d, const Head *x, const float *gain, int64_t HD, float *gain_sum)
{
    v16 rstd = v16_set1(x->rstd), sum = v16_set1(0);
    for (int64_t c = 0; c < HD; c += 16) {
        v16 n = v16_mul(v16_load_row(x->value, DTYPE_FP32, c, HD, 0), rstd);
        v16 dy = v16_load_row(d->value, DTYPE_FP32, c, HD, 0),
            g = v16_mul(dy, v16_load_row(gain, DTYPE_FP32, c, HD, 0));
        sum = v16_fma(g, n, sum);
        v16_store_row(gain_sum, DTYPE_FP32, c, HD, v16_fma(dy, n, v16_load_row(gain_sum, DTYPE_FP32, c, HD, 0)));
        v16_store_row(d->value, DTYPE_FP32, c, HD, g);
    }
    v16 mean = v16_set1(v16_sum(sum) / (float)HD);
    for (int64_t c = 0; c < HD; c += 16) {
        v16 n = v16_mul(v16_load_row(x->value, DTYPE_FP32, c, HD, 0), rstd),
            g = v16_load_row(d->value, DTYPE_FP32, c, HD, 0);
        v16_store_row(d->value, DTYPE_FP32, c, HD, v16_mul(rstd, v16_sub(g, v16_mul(n, mean))));
    }
}

void cpu_qk_norm_rope_backward(Tensor dqkv, Tensor dq_gain, Tensor dk_gain, Tensor qkv, Tensor q_gain, Tensor k_gain,
                               float eps, Tensor cos_sin, const Attention *a)
{
    int64_t HD = a->HD, heads = a->NH + a->NKV, blocks = ceil_div(qkv.rows, SUM_ROWS);
    bool norm = q_gain.data != NULL;

#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t b = 0; b < blocks; b++) {
        if (norm) memset(partial_row(b, 0, HD), 0, (size_t)(2 * HD) * sizeof(float)); /* of q, then of k */
        for (int64_t r = b * SUM_ROWS; r < min_i64(qkv.rows, (b + 1) * SUM_ROWS); r++)
            for (int64_t h = 0; h < heads; h++) {
                Tensor gradient = tensor_cols(dqkv, h * HD, HD), in = tensor_cols(qkv, h * HD, HD);
                Head d, x;
                load_head(&d, row_of(gradient, r), dqkv.dtype, HD);
                rotate(&d, position_row(cos_sin, a, r), HD, -1);
                if (norm) {
                    load_head(&x, row_of(in, r), qkv.dtype, HD);
                    norm_row_stats(&x.rstd, row_of(in, r), qkv.dtype, HD, NORM_RMSNORM, eps);
                    normalise_backward(&d, &x, h < a->NH ? q_gain.data : k_gain.data, HD,
                                       partial_row(b, h < a->NH ? 0 : 1, HD));
                }
                store_head(row_of(gradient, r), dqkv.dtype, &d, HD);
            }
    }
    if (norm) {
        add_partial_sums(dq_gain, blocks, 0);
        add_partial_sums(dk_gain, blocks, 1);
    }
}
