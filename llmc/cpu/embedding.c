/* Token and position embeddings. Forward: a row of wte, plus one of wpe. Backward: every vocabulary row gets the sum of
 * the gradients of its tokens, from zero in token order, added once; a counting sort finds them, so that rows divide
 * over threads without atomics.
 */
#include "cpu.h"
#include "simd.h"

void cpu_embedding_forward(Tensor x, Tensor stats, const int32_t *tokens, Tensor wte, Tensor wpe, int64_t T,
                           int64_t position0, const Norm *first)
{
    int64_t C = x.cols;
#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t r = 0; r < x.rows; r++) {
        const void *token = row_of(wte, tokens[r]);
        const void *position = wpe.data ? row_of(wpe, position0 + r % T) : NULL;
        for (int64_t c = 0; c < C; c += 16) {
            v16 v = v16_load_row(token, wte.dtype, c, C, 0);
            if (position) v = v16_add(v, v16_load_row(position, wpe.dtype, c, C, 0));
            v16_store_row(row_of(x, r), x.dtype, c, C, v);
        }
        norm_row_stats(row_of(stats, r), row_of(x, r), x.dtype, C, first->kind, first->eps);
    }
}

/* sum[cols] += rows of dx, one by one from zero: `count` of them, at index[0], index[1], ... */
static void add_rows(float *sum, Tensor dx, const int32_t *index, int64_t count, int64_t stride)
{
    for (int64_t c = 0; c < dx.cols; c += 16) {
        v16 total = v16_set1(0);
        for (int64_t i = 0; i < count; i++) {
            int64_t r = index ? index[i] : i * stride;
            total = v16_add(total, v16_load_row(row_of(dx, r), dx.dtype, c, dx.cols, 0));
        }
        v16_store_row(sum, DTYPE_FP32, c, dx.cols, v16_add(v16_load_row(sum, DTYPE_FP32, c, dx.cols, 0), total));
    }
}

/* Token numbers 0..N-1 sorted by vocabulary row, in order within one: those of row v are sorted[end[v - 1]] up to
 * end[v]. */
static void sort_by_row(int32_t *end, int32_t *sorted, const int32_t *tokens, int64_t N, int64_t V)
{
    memset(end, 0, (size_t)(V + 1) * sizeof *end);
    for (int64_t n = 0; n < N; n++) end[tokens[n] + 1]++;
    for (int64_t v = 0; v < V; v++) end[v + 1] += end[v];
    for (int64_t n = 0; n < N; n++) sorted[end[tokens[n]]++] = (int32_t)n; /* starts become ends */
}

void cpu_embedding_backward(Tensor dwte, Tensor dwpe, Tensor dx, const int32_t *tokens, int64_t T)
{
    int64_t N = dx.rows, V = dwte.rows;
    int32_t *end = cpu.sorted, *sorted = cpu.sorted + V + 1;

    sort_by_row(end, sorted, tokens, N, V);
#pragma omp parallel for schedule(dynamic, 16) num_threads(cpu.threads)
    for (int64_t v = 0; v < V; v++) {
        int32_t first = v ? end[v - 1] : 0;
        if (end[v] > first) add_rows(row_of(dwte, v), dx, sorted + first, end[v] - first, 0);
    }
    if (!dwpe.data) return;
#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t t = 0; t < T; t++) add_rows(row_of(dwpe, t), tensor_rows(dx, t, N - t), NULL, N / T, T);
}
