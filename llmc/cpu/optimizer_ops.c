/* The optimizer's loops: sums of squares by 16-row pieces in FP64, and AdamW in FP32 with one rounding to the master.
 *
 * AdamW of step t (Loshchilov, Hutter 1711.05101), g = gradient x clip:
 *     m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
 *     w = w - lr (m c1 / (sqrt(v c2) + eps) + decay w),    c = 1 / (1 - beta^(t+1))
 * A BF16 master rounds stochastically: 16 random bits an element, from two Philox calls for 16 columns of a row
 * (element i takes half i % 2 of output word (i % 8) / 2 of call i / 8), so the bits depend on the place in the whole
 * parameter only.
 */
#include "cpu.h"
#include "simd_int.h"

void cpu_add(Tensor sum, Tensor contribution)
{
    int64_t n = sum.rows * sum.cols; /* both contiguous */
#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t i = 0; i < n; i += 16)
        v16_store_row(
            sum.data, DTYPE_FP32, i, n,
            v16_add(v16_load_row(sum.data, DTYPE_FP32, i, n, 0), v16_load_row(contribution.data, DTYPE_FP32, i, n, 0)));
}

/* One piece: 16 lanes in FP64, rows one after the other, then the tree 8, 4, 2, 1. */
void cpu_sum_squares(double *piece, Tensor grad)
{
#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t p = 0; p < ceil_div(grad.rows, 16); p++) {
        double lane[16] = {0};
        for (int64_t r = 16 * p; r < min_i64(grad.rows, 16 * p + 16); r++) {
            const float *row = row_of(grad, r);
            int64_t c = 0;
            for (; c + 16 <= grad.cols; c += 16)
                for (int j = 0; j < 16; j++) lane[j] += (double)row[c + j] * (double)row[c + j];
            for (int j = 0; c + j < grad.cols; j++) lane[j] += (double)row[c + j] * (double)row[c + j];
        }
        for (int width = 8; width; width /= 2)
            for (int j = 0; j < width; j++) lane[j] += lane[j + width];
        piece[p] = lane[0];
    }
}

enum { DRAWN = 128 }; /* columns whose random bits are drawn together: 8 blocks of two calls, one a lane */

__attribute__((noinline)) static void draw_bits(uint16_t bits[DRAWN], const ParamSlice *p, int64_t row, int64_t block)
{
    static const uint32_t BLOCK[16] = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
    static const uint32_t CALL[16] = {0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1};
    uint32_t place = (uint32_t)p->layer << 16 | (uint32_t)p->role << 8;
    v16u draw[4] = {v16u_set1((uint32_t)(p->row0 + row)), v16u_add(v16u_load(BLOCK), v16u_set1((uint32_t)block)),
                    v16u_set1(cpu.step.step), v16u_or(v16u_load(CALL), v16u_set1(place))};
    v16u_philox(draw, cpu.step.seed);
    uint64_t pair[2][16]; /* words 0 and 1, 2 and 3 of a call; bytes in memory lowest first */
    v16u_store_pairs(pair[0], draw[0], draw[1]);
    v16u_store_pairs(pair[1], draw[2], draw[3]);
    for (int call = 0; call < 16; call++)
        for (int i = 0; i < 2; i++) memcpy(bits + 8 * call + 4 * i, &pair[i][call], sizeof(uint64_t));
}

/* bf16_from_f32_stochastic of 16 floats, as floats. */
static v16 round_stochastic(v16 x, const uint16_t *bits)
{
    v16u random = v16u_right(v16u_bits(v16_load_bf16(bits)), 16);
    v16u sum = v16u_and(v16u_add(v16u_bits(x), random), v16u_set1(0xffff0000));
    return v16_less_select(v16_abs(x), v16_set1(INFINITY), v16_of_bits(sum), x);
}

static void update_row(const ParamSlice *p, int64_t r, v16 clip)
{
    const Step *s = &cpu.step;
    int64_t n = p->grad.cols;
    float *grad = row_of(p->grad, r), *m_row = row_of(p->m, r), *v_row = row_of(p->v, r);
    void *master = row_of(p->master, r);
    DType dtype = p->master.dtype;
    uint16_t bits[DRAWN];
    v16 beta1 = v16_set1(s->beta1), beta2 = v16_set1(s->beta2), rest1 = v16_set1(1.0f - s->beta1),
        rest2 = v16_set1(1.0f - s->beta2), decay = v16_set1(p->decay ? s->weight_decay : 0);

    for (int64_t c = 0; c < n; c += 16) {
        v16 g = v16_mul(v16_load_row(grad, DTYPE_FP32, c, n, 0), clip), w = v16_load_row(master, dtype, c, n, 0);
        v16 m = v16_fma(beta1, v16_load_row(m_row, DTYPE_FP32, c, n, 0), v16_mul(rest1, g));
        v16 v = v16_fma(beta2, v16_load_row(v_row, DTYPE_FP32, c, n, 0), v16_mul(rest2, v16_mul(g, g)));
        v16 root = v16_add(v16_sqrt(v16_mul(v, v16_set1(s->correction2))), v16_set1(s->eps));
        v16 update = v16_fma(decay, w, v16_div(v16_mul(m, v16_set1(s->correction1)), root));
        w = v16_fma(v16_set1(-s->lr), update, w);
        v16_store_row(m_row, DTYPE_FP32, c, n, m);
        v16_store_row(v_row, DTYPE_FP32, c, n, v);
        v16_store_row(grad, DTYPE_FP32, c, n, v16_set1(0));
        if (dtype == DTYPE_BF16) {
            if (c % DRAWN == 0) draw_bits(bits, p, r, c / 16);
            w = round_stochastic(w, bits + c % DRAWN);
        }
        v16_store_row(master, dtype, c, n, w);
    }
}

void cpu_adamw(const ParamSlice *p, const StepResult *result)
{
    if (!result->finite) return;
#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t r = 0; r < p->grad.rows; r++) update_row(p, r, v16_set1(result->clip));
}
