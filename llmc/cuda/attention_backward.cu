/* Attention backward in BF16 on tensor cores (Dao 2307.08691), and the choice of kernels.
 *
 *     delta = sum over HD of dO O                                  one number a query and head
 *     P = exp(S / sqrt(HD) - lse),  dS = P (dO V^T - delta) / sqrt(HD),  both then rounded to BF16
 *     dV = P^T dO,  dK = dS^T Q     a block owns keys of one key head, and goes over the queries that see them, of all
 *                                   query heads of the group one after the other
 *     dQ = dS K                     a block owns queries of one head, and goes over the keys that they see
 *
 * P is computed twice, once in each kernel: seven products instead of five, and in return every sum has one owner and a
 * fixed order, without atomics on floats and without dQ in FP32 in memory.
 *
 * Shared memory of both kernels, where "own" are the rows of the block and "other" 32 rows a step, double-buffered:
 *
 *     dK, dV    | K, V [own, HD]  | Q, dO [32, HD] | Q, dO | lse, delta, first key [32] | the same |
 *     dQ        | Q, dO [own, HD] | K, V [32, HD]  | K, V  | lse, delta [own] |
 *
 * A warp owns 16 MF rows. dK and dV take HD MF registers a lane, so MF is 2 up to HD = 64 (48 KiB of shared memory) and
 * 1 above (64 KiB for HD = 128); dQ takes half as many, MF = 2 (97 KiB for HD = 128, of 99 where a block may have least).
 * Blocks with most work start first: early keys, late queries. Floor 2.
 */
#include "attention.cuh"
#include "attention_cudnn.h"

using namespace attention;

namespace
{

enum { OTHER = 32, NF = OTHER / 8 };

/* ---- delta: eight lanes a query and head, n elements a load; 2 HD elements read, 4 bytes written ---- */

template <class T, int n>
__global__ void delta_kernel(Matrix<float> delta, Matrix<const T> datt, Matrix<const T> att, unsigned count, Shape a)
{
    unsigned i = blockIdx.x * (blockDim.x / 8) + threadIdx.x / 8, row = i / a.NH, h = i % a.NH;
    float sum = 0;
    if (i < count)
        for (int c = threadIdx.x % 8 * n; c < a.HD; c += 8 * n) {
            auto x = datt.row(row).template ld_pack<n>(h * a.HD + c),
                 y = att.row(row).template ld_pack<n>(h * a.HD + c);
            for (int e = 0; e < n; e++) sum = fmaf(to_f32(x.v[e]), to_f32(y.v[e]), sum);
        }
    for (int distance = 4; distance; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (i < count && threadIdx.x % 8 == 0) delta.row(row).st(h, sum);
}

/* ---- S and dP -> P and dS ---- */

__device__ inline void softmax_backward(float &s, float &dp, float lse2, float delta, float scale)
{
    s = exp2_approximate(fmaf(s, scale * LOG2E, -lse2));
    dp = s * (dp - delta) * scale;
}

/* ---- dK, dV ---- */

typedef struct {                     /* of the queries of a step */
    float lse2[OTHER], delta[OTHER]; /* lse2: base 2 */
    int first[OTHER];                /* first key; beyond all keys for rows that are no queries */
} Stats;

/* What thread i < OTHER brings for query t0 + i: loaded before a step's products, stored after. */
typedef struct {
    float lse, delta;
    int first;
} Stat;

__device__ inline Stat load_stat(const Shape &a, Matrix<const float> lse, Matrix<const float> delta, int64_t b, int t0,
                                 int h)
{
    int t = t0 + threadIdx.x;
    if (threadIdx.x >= OTHER || t >= a.Tq) return Stat{0, 0, INT32_MAX};
    return Stat{lse.row(b * a.Tq + t).ld(h), delta.row(b * a.Tq + t).ld(h), first_key_of(a, b, t)};
}

__device__ inline void store_stat(Stats *stats, Stat x)
{
    if (threadIdx.x >= OTHER) return;
    stats->lse2[threadIdx.x] = x.lse * LOG2E;
    stats->delta[threadIdx.x] = x.delta;
    stats->first[threadIdx.x] = x.first;
}

/* One past the last query that sees a key before `key_end`; every thread calls and gets it. */
__device__ inline int last_query_end(const Shape &a, int64_t b, int key_end)
{
    __shared__ int of_warp[WARPS];
    if (a.first_key.absent()) return a.Tq;
    int end = 0;
    for (int t = threadIdx.x; t < a.Tq; t += THREADS)
        if (first_key_of(a, b, t) < key_end) end = t + 1;
    for (int distance = 16; distance; distance /= 2) end = max(end, __shfl_xor_sync(0xffffffffu, end, distance));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = end;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) end = max(end, of_warp[w]);
    return end;
}

/* Here keys are rows, queries columns. */
template <int MF>
__device__ inline void softmax_backward_columns(float (&s)[MF][NF][4], float (&dp)[MF][NF][4], const Stats *stats,
                                                float scale)
{
#pragma unroll
    for (int n = 0; n < NF; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int column = 8 * n + threadIdx.x % 4 * 2 + e % 2;
#pragma unroll
            for (int m = 0; m < MF; m++)
                softmax_backward(s[m][n][e], dp[m][n][e], stats->lse2[column], stats->delta[column], scale);
        }
}

/* Zeros where the query does not see the key, also if it is NaN; `key` is the lane's first, `last` is what query 0 of
 * the step sees. */
template <int MF>
__device__ inline void mask_rows(float (&s)[MF][NF][4], float (&dp)[MF][NF][4], const Stats *stats, int key, int last)
{
#pragma unroll
    for (int n = 0; n < NF; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int column = 8 * n + threadIdx.x % 4 * 2 + e % 2, first = stats->first[column];
#pragma unroll
            for (int m = 0; m < MF; m++) {
                int row = key + 16 * m + e / 2 * 8;
                if (row < first || row > last + column) s[m][n][e] = dp[m][n][e] = 0;
            }
        }
}

/* Q and dO of the queries from `row` on. */
template <int HD>
__device__ inline void load_queries(bf16 *tiles, Matrix<const bf16> q, Matrix<const bf16> datt, int64_t row, int h,
                                    int valid)
{
    load_tile<HD, OTHER>(tiles, thread_chunk<HD>(q.row(row) + h * HD, q.ld), q.ld, valid);
    load_tile<HD, OTHER>(tiles + OTHER * HD, thread_chunk<HD>(datt.row(row) + h * HD, datt.ld), datt.ld, valid);
    cp_async_commit();
}

template <int HD> __host__ __device__ constexpr int dkdv_fragments() { return HD <= 64 ? 2 : 1; }

template <int HD>
__global__ void __launch_bounds__(THREADS, 2)
    dkdv_kernel(Matrix<bf16> dk, Matrix<bf16> dv, Matrix<const bf16> datt, Matrix<const float> lse,
                Matrix<const float> delta, Matrix<const bf16> q, Matrix<const bf16> k, Matrix<const bf16> v, Shape a)
{
    constexpr int MF = dkdv_fragments<HD>(), KEYS = WARPS * 16 * MF, TILE = OTHER * HD;
    extern __shared__ uint4 shared[];
    bf16 *k_tile = (bf16 *)shared, *v_tile = k_tile + KEYS * HD, *tiles = v_tile + KEYS * HD;
    Stats *stats = (Stats *)(tiles + 4 * TILE);
    int b = blockIdx.x / a.NKV, kv = blockIdx.x % a.NKV, key0 = blockIdx.y * KEYS, keys = min(KEYS, a.Tk - key0);
    int warp_row = threadIdx.x / 32 * 16 * MF, warp_key = key0 + warp_row, lane = threadIdx.x % 32;
    int64_t key_row = (int64_t)b * a.Tk + key0, query_row = (int64_t)b * a.Tq;
    int begin = key0 > a.position0 ? (key0 - a.position0) / OTHER * OTHER : 0;
    int end = last_query_end(a, b, key0 + KEYS);
    int h = kv * a.group, h_end = begin < end ? h + a.group : h, t0 = begin;

    float dk_sum[MF][HD / 8][4] = {}, dv_sum[MF][HD / 8][4] = {};
    load_tile<HD, KEYS>(k_tile, thread_chunk<HD>(k.row(key_row) + kv * HD, k.ld), k.ld, keys);
    load_tile<HD, KEYS>(v_tile, thread_chunk<HD>(v.row(key_row) + kv * HD, v.ld), v.ld, keys);
    load_queries<HD>(tiles, q, datt, query_row + t0, h, a.Tq - t0);
    store_stat(stats, load_stat(a, lse, delta, b, t0, h));
    for (int step = 0; h < h_end; step++) {
        float s[MF][NF][4], dp[MF][NF][4];
        bf16 *q_tile = tiles + step % 2 * 2 * TILE;
        int next_t0 = t0 + OTHER < end ? t0 + OTHER : begin, next_h = t0 + OTHER < end ? h : h + 1;
        Stat next = {};
        cp_async_wait<0>();
        __syncthreads(); /* this step's tiles and stats are there, and no warp reads those of the step before any more */
        if (next_h < h_end) {
            load_queries<HD>(tiles + (step + 1) % 2 * 2 * TILE, q, datt, query_row + next_t0, next_h, a.Tq - next_t0);
            next = load_stat(a, lse, delta, b, next_t0, next_h);
        }
        Seen seen = {stats[step % 2].first[lane], a.position0 + t0 + lane};
        if (warp_sees_any(seen, warp_key, 16 * MF)) {
            rows_times_rows<HD, 2>(s, k_tile, warp_row, q_tile);
            rows_times_rows<HD, 2>(dp, v_tile, warp_row, q_tile + TILE);
            softmax_backward_columns(s, dp, stats + step % 2, a.scale);
            if (!warp_sees_all(seen, warp_key, 16 * MF))
                mask_rows(s, dp, stats + step % 2, warp_key + lane / 4, a.position0 + t0);
            weights_times_rows<HD>(dv_sum, s, q_tile + TILE);
            weights_times_rows<HD>(dk_sum, dp, q_tile);
        }
        store_stat(stats + (step + 1) % 2, next);
        h = next_h;
        t0 = next_t0;
    }
    cp_async_wait<0>();
    __syncthreads(); /* for K and V, where there was no step */
    store_rows<HD, MF>(dk.row(key_row) + kv * HD, dk.ld, keys, k_tile, warp_row, dk_sum);
    store_rows<HD, MF>(dv.row(key_row) + kv * HD, dv.ld, keys, v_tile, warp_row, dv_sum);
}

/* ---- dQ ---- */

enum { DQ_MF = 2, DQ_ROWS = WARPS * 16 * DQ_MF };

__device__ inline void softmax_backward_row(float (&s)[NF][4], float (&dp)[NF][4], int half, float lse2, float delta,
                                            float scale)
{
#pragma unroll
    for (int n = 0; n < NF; n++)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; e++) softmax_backward(s[n][e], dp[n][e], lse2, delta, scale);
}

template <int HD>
__global__ void __launch_bounds__(THREADS, 2)
    dq_kernel(Matrix<bf16> dq, Matrix<const bf16> datt, Matrix<const float> lse, Matrix<const float> delta,
              Matrix<const bf16> q, Matrix<const bf16> k, Matrix<const bf16> v, Shape a)
{
    constexpr int MF = DQ_MF, TILE = OTHER * HD;
    extern __shared__ uint4 shared[];
    bf16 *q_tile = (bf16 *)shared, *datt_tile = q_tile + DQ_ROWS * HD, *kv_tiles = datt_tile + DQ_ROWS * HD;
    float *lse2 = (float *)(kv_tiles + 4 * TILE), *row_delta = lse2 + DQ_ROWS;
    int b = blockIdx.x / a.NH, t0 = (gridDim.y - 1 - blockIdx.y) * DQ_ROWS, h = blockIdx.x % a.NH;
    int warp_row = threadIdx.x / 32 * 16 * MF, lane_row = warp_row + threadIdx.x % 32 / 4;
    int queries = min(DQ_ROWS, a.Tq - t0);
    int64_t row = (int64_t)b * a.Tq + t0;
    Seen seen = seen_by(a, b, t0 + warp_row + threadIdx.x % 32);
    int begin = smallest_first_key(a, b, t0, queries) / OTHER * OTHER, end = a.position0 + t0 + queries;
    gmem<const bf16> k_from = thread_chunk<HD>(k.row((int64_t)b * a.Tk + begin) + h / a.group * HD, k.ld);
    gmem<const bf16> v_from = thread_chunk<HD>(v.row((int64_t)b * a.Tk + begin) + h / a.group * HD, v.ld);

    float sum[MF][HD / 8][4] = {};
    if (threadIdx.x < DQ_ROWS) {
        bool inside = (int)threadIdx.x < queries;
        lse2[threadIdx.x] = inside ? lse.row(row + threadIdx.x).ld(h) * LOG2E : 0;
        row_delta[threadIdx.x] = inside ? delta.row(row + threadIdx.x).ld(h) : 0;
    }
    load_tile<HD, DQ_ROWS>(q_tile, thread_chunk<HD>(q.row(row) + h * HD, q.ld), q.ld, queries);
    load_tile<HD, DQ_ROWS>(datt_tile, thread_chunk<HD>(datt.row(row) + h * HD, datt.ld), datt.ld, queries);
    load_tile<HD, OTHER>(kv_tiles, k_from, k.ld, end - begin);
    load_tile<HD, OTHER>(kv_tiles + TILE, v_from, v.ld, end - begin);
    cp_async_commit();
    for (int key0 = begin, step = 0; key0 < end; key0 += OTHER, step++) {
        float s[MF][NF][4], dp[MF][NF][4];
        bf16 *tiles = kv_tiles + step % 2 * 2 * TILE, *next = kv_tiles + (step + 1) % 2 * 2 * TILE;
        cp_async_wait<0>();
        __syncthreads();
        if (key0 + OTHER < end) {
            k_from = k_from + OTHER * k.ld;
            v_from = v_from + OTHER * v.ld;
            load_tile<HD, OTHER>(next, k_from, k.ld, end - key0 - OTHER);
            load_tile<HD, OTHER>(next + TILE, v_from, v.ld, end - key0 - OTHER);
            cp_async_commit();
        }
        if (!warp_sees_any(seen, key0, OTHER)) continue;
        rows_times_rows<HD, 2>(s, q_tile, warp_row, tiles);
        rows_times_rows<HD, 2>(dp, datt_tile, warp_row, tiles + TILE);
#pragma unroll
        for (int m = 0; m < MF; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int i = lane_row + 16 * m + 8 * half;
                softmax_backward_row(s[m], dp[m], half, lse2[i], row_delta[i], a.scale);
            }
        if (!warp_sees_all(seen, key0, OTHER)) mask_columns(dp, 0, a, b, t0 + lane_row, key0);
        weights_times_rows<HD>(sum, dp, tiles);
    }
    store_rows<HD, MF>(dq.row(row) + h * HD, dq.ld, queries, q_tile, warp_row, sum);
}

/* ---- launches ---- */

template <class T, int n> void launch_delta(Matrix<float> delta, Tensor datt, Tensor att, const Attention *a)
{
    unsigned count = (unsigned)(a->B * a->Tq * a->NH);
    delta_kernel<T, n><<<(count + 31) / 32, 256, 0, cuda.stream>>>(delta, matrix<const T>(datt), matrix<const T>(att),
                                                                   count, shape_of(a));
    cuda_check(cudaGetLastError(), "attention_backward");
}

template <int HD>
void launch_backward(Tensor dq, Tensor dk, Tensor dv, Tensor datt, Matrix<const float> delta, Tensor lse, Tensor q,
                     Tensor k, Tensor v, const Attention *a)
{
    int keys = WARPS * 16 * dkdv_fragments<HD>();
    size_t dkdv_bytes = (2 * keys + 4 * OTHER) * HD * sizeof(bf16) + 2 * sizeof(Stats);
    size_t dq_bytes = (2 * DQ_ROWS + 4 * OTHER) * HD * sizeof(bf16) + 2 * DQ_ROWS * sizeof(float);
    dim3 dkdv_grid((unsigned)(a->B * a->NKV), (unsigned)((a->Tk + keys - 1) / keys));
    dim3 dq_grid((unsigned)(a->B * a->NH), (unsigned)((a->Tq + DQ_ROWS - 1) / DQ_ROWS));
    Matrix<const bf16> q_ = matrix<const bf16>(q), k_ = matrix<const bf16>(k), v_ = matrix<const bf16>(v);
    Matrix<const bf16> datt_ = matrix<const bf16>(datt);
    Matrix<const float> lse_ = matrix<const float>(lse);

    allow_shared_bytes(dkdv_kernel<HD>, dkdv_bytes, "attention_backward");
    allow_shared_bytes(dq_kernel<HD>, dq_bytes, "attention_backward");
    dkdv_kernel<HD><<<dkdv_grid, THREADS, dkdv_bytes, cuda.stream>>>(matrix<bf16>(dk), matrix<bf16>(dv), datt_, lse_,
                                                                     delta, q_, k_, v_, shape_of(a));
    cuda_check(cudaGetLastError(), "attention_backward");
    dq_kernel<HD>
        <<<dq_grid, THREADS, dq_bytes, cuda.stream>>>(matrix<bf16>(dq), datt_, lse_, delta, q_, k_, v_, shape_of(a));
    cuda_check(cudaGetLastError(), "attention_backward");
}

} // namespace

void cuda_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor datt, Tensor att, Tensor lse, Tensor q, Tensor k,
                             Tensor v, const Attention *a)
{
#ifdef LLMC_CUDNN
    if (attention_cudnn_backward(dq, dk, dv, datt, att, lse, q, k, v, a)) return;
#endif
    int64_t N = a->B * a->Tq;
    Matrix<float> delta = {cuda.attention, N, a->NH, a->NH};
    Matrix<const float> delta_in = {gmem<const float>(cuda.attention.p), N, a->NH, a->NH};
    bool tiles = head_dim_fits_tiles(a->HD) && fits_tiles(dq) && fits_tiles(dk) && fits_tiles(dv) && fits_tiles(datt) &&
                 fits_tiles(att) && fits_tiles(q) && fits_tiles(k) && fits_tiles(v);
    if (tiles) {
        launch_delta<bf16, 8>(delta, datt, att, a);
        ATTENTION_BY_HEAD_DIM(a->HD, HD, launch_backward<HD>(dq, dk, dv, datt, delta_in, lse, q, k, v, a));
    } else {
        BY_DTYPE(q.dtype, T, launch_delta<T, 1>(delta, datt, att, a));
        plain_backward(dq, dk, dv, datt, delta_in, lse, q, k, v, a);
    }
}
