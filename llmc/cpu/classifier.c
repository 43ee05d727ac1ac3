/* Softmax and cross-entropy of a chunk of tokens: loss = log(sum exp(x - max)) + max - x[target]; the gradient
 * (softmax - one-hot) x loss_scale replaces the logits, with zeros in the padding columns V .. Vp - 1.
 */
#include "cpu.h"
#include "simd.h"

void cpu_softmax_cross_entropy(Tensor losses, Tensor logits, const int32_t *targets, int64_t V, bool gradient)
{
    v16 scale = v16_set1(cpu.step.loss_scale);
    DType dtype = logits.dtype;

#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t r = 0; r < logits.rows; r++) {
        void *row = row_of(logits, r);
        v16 lanes = v16_set1(-INFINITY), sum = v16_set1(0);
        for (int64_t c = 0; c < V; c += 16) lanes = v16_max(v16_load_row(row, dtype, c, V, -INFINITY), lanes);
        float largest = v16_largest(lanes);
        for (int64_t c = 0; c < V; c += 16)
            sum = v16_add(sum, v16_exp(v16_sub(v16_load_row(row, dtype, c, V, -INFINITY), v16_set1(largest))));
        float total = v16_sum(sum);

        Tensor target = {row, dtype, 1, logits.cols, logits.cols};
        target = tensor_cols(target, targets[r], 1);
        float x_target = dtype == DTYPE_BF16 ? bf16_to_f32(*(uint16_t *)target.data) : *(float *)target.data;
        ((float *)losses.data)[r] = (float)(f64_log((double)total) + (double)largest - (double)x_target);
        if (!gradient) continue;

        v16 inverse = v16_set1(1.0f / total);
        float p_target = f32_mul(f32_exp(x_target - largest), 1.0f / total);
        for (int64_t c = 0; c < V; c += 16) {
            v16 p = v16_mul(v16_exp(v16_sub(v16_load_row(row, dtype, c, V, -INFINITY), v16_set1(largest))), inverse);
            v16_store_row(row, dtype, c, V, v16_mul(p, scale));
        }
        float d_target = (p_target - 1.0f) * cpu.step.loss_scale;
        if (dtype == DTYPE_BF16)
            *(uint16_t *)target.data = bf16_from_f32(d_target);
        else
            *(float *)target.data = d_target;
        for (int64_t c = V; c < logits.cols; c++)
            if (dtype == DTYPE_BF16)
                ((uint16_t *)row)[c] = 0;
            else
                ((float *)row)[c] = 0;
    }
}
