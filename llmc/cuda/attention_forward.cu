/* Attention forward in BF16 on tensor cores (Dao et al. 2205.14135, Dao 2307.08691), and the choice of kernels.
 *
 * A block takes 128 queries of one head and goes over the keys that any of them sees, 64 or 32 at a time, in
 * increasing order, with a running maximum m, sum l and output O per query:
 *
 *     S = Q K^T;  m' = max(m, S);  P = exp((S - m') / sqrt(HD));  r = exp((m - m') / sqrt(HD))
 *     l = r l + sum P;  O = r O + bf16(P) V;  in the end att = O / l, lse = m / sqrt(HD) + log l
 *
 * The scale is inside the exponential, which is one fma and one exp2. A warp owns 32 queries. S takes one register a
 * lane and key, O one for two dimensions of HD, 128 of them for HD = 128: there 32 keys at a time, not 64. K and V are
 * double-buffered, one barrier a step:
 *
 *     | Q [128, HD] | K, V [keys, HD] | K, V |     64 KiB for HD = 128 (two blocks a multiprocessor of 164 KiB),
 *                                                  48 KiB for HD = 64
 *
 * Per head and block of queries K and V are read once, 4 HD bytes a key, mostly from the L2 cache: the heads of a group
 * and neighbouring blocks run side by side.
 *
 * Blocks of late queries, which see most, start first. Floor 2.
 */
#include "attention.cuh"
#include "attention_cudnn.h"

using namespace attention;

namespace
{

enum { MF = 2, ROWS = WARPS * 16 * MF };

template <int HD> __host__ __device__ constexpr int keys_at_once() { return HD <= 64 ? 64 : 32; }

typedef struct {          /* of a lane's queries: rows 16 m + 8 half + g of the warp */
    float maximum[MF][2]; /* of S, not scaled */
    float sum[MF][2];     /* over this lane's keys only */
} Rows;

/* Scores -> P; maximum and sum move on; O shrinks. */
template <int HD, int NF>
__device__ inline void online_softmax(float (&s)[MF][NF][4], float (&o)[MF][HD / 8][4], Rows &r, float factor)
{
#pragma unroll
    for (int m = 0; m < MF; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float largest = r.maximum[m][half], before = largest;
#pragma unroll
            for (int n = 0; n < NF; n++) largest = fmaxf(largest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1)); /* the four lanes of a row */
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            float shift = largest == -INFINITY ? 0 : largest;                    /* no key seen so far, or only NaN */
            float shrink = exp2_approximate((before - shift) * factor), sum = 0; /* 1 where the maximum stays */
            shift *= factor;
#pragma unroll
            for (int n = 0; n < NF; n++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    s[m][n][e] = exp2_approximate(fmaf(s[m][n][e], factor, -shift));
                    sum += s[m][n][e];
                }
#pragma unroll
            for (int n = 0; n < HD / 8; n++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) o[m][n][e] *= shrink;
            r.sum[m][half] = fmaf(r.sum[m][half], shrink, sum);
            r.maximum[m][half] = largest;
        }
}

/* att = O / l, lse. */
template <int HD>
__device__ inline void write_rows(Matrix<bf16> att, Matrix<float> lse, bf16 *tile, float (&o)[MF][HD / 8][4],
                                  const Rows &r, const Shape &a, int64_t row, int valid, int h)
{
    int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16 * MF;
#pragma unroll
    for (int m = 0; m < MF; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = r.sum[m][half];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            float inverse = 1.0f / sum;
#pragma unroll
            for (int n = 0; n < HD / 8; n++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) o[m][n][e] *= inverse;
            int i = row0 + 16 * m + 8 * half + lane / 4;
            if (lane % 4 == 0 && i < valid) lse.row(row + i).st(h, fmaf(r.maximum[m][half], a.scale, logf(sum)));
        }
    store_rows<HD, MF>(att.row(row) + h * HD, att.ld, valid, tile, row0, o);
}

template <int HD>
__global__ void __launch_bounds__(THREADS, 2) forward_kernel(Matrix<bf16> att, Matrix<float> lse, Matrix<const bf16> q,
                                                             Matrix<const bf16> k, Matrix<const bf16> v, Shape a)
{
    constexpr int KEYS = keys_at_once<HD>(), TILE = KEYS * HD;
    extern __shared__ uint4 shared[];
    bf16 *q_tile = (bf16 *)shared, *kv_tiles = q_tile + ROWS * HD; /* K, V of even and of odd steps */
    int b = blockIdx.x / a.NH, t0 = (gridDim.y - 1 - blockIdx.y) * ROWS, h = blockIdx.x % a.NH;
    int warp_row = threadIdx.x / 32 * 16 * MF, queries = min(ROWS, a.Tq - t0);
    int64_t row = (int64_t)b * a.Tq + t0;
    Seen seen = seen_by(a, b, t0 + warp_row + threadIdx.x % 32);
    int begin = smallest_first_key(a, b, t0, queries) / KEYS * KEYS, end = a.position0 + t0 + queries;
    gmem<const bf16> k_from = thread_chunk<HD>(k.row((int64_t)b * a.Tk + begin) + h / a.group * HD, k.ld);
    gmem<const bf16> v_from = thread_chunk<HD>(v.row((int64_t)b * a.Tk + begin) + h / a.group * HD, v.ld);

    Rows r = {{{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}}, {}};
    float o[MF][HD / 8][4] = {};
    load_tile<HD, ROWS>(q_tile, thread_chunk<HD>(q.row(row) + h * HD, q.ld), q.ld, queries);
    load_tile<HD, KEYS>(kv_tiles, k_from, k.ld, end - begin);
    load_tile<HD, KEYS>(kv_tiles + TILE, v_from, v.ld, end - begin);
    cp_async_commit();
    for (int key0 = begin, step = 0; key0 < end; key0 += KEYS, step++) {
        float s[MF][KEYS / 8][4];
        bf16 *tiles = kv_tiles + step % 2 * 2 * TILE, *next = kv_tiles + (step + 1) % 2 * 2 * TILE;
        cp_async_wait<0>();
        __syncthreads(); /* this step's K and V are there, and no warp reads those of the step before any more */
        if (key0 + KEYS < end) {
            int64_t keys = key0 + KEYS - begin;
            load_tile<HD, KEYS>(next, k_from + keys * k.ld, k.ld, end - key0 - KEYS);
            load_tile<HD, KEYS>(next + TILE, v_from + keys * v.ld, v.ld, end - key0 - KEYS);
            cp_async_commit();
        }
        if (!warp_sees_any(seen, key0, KEYS)) continue;
        rows_times_rows<HD, HD / 16>(s, q_tile, warp_row, tiles);
        if (!warp_sees_all(seen, key0, KEYS))
            mask_columns(s, -INFINITY, a, b, t0 + warp_row + threadIdx.x % 32 / 4, key0);
        online_softmax<HD>(s, o, r, a.scale * LOG2E);
        weights_times_rows<HD>(o, s, tiles + TILE);
    }
    write_rows<HD>(att, lse, q_tile, o, r, a, row, queries, h);
}

template <int HD> void launch_forward(Tensor att, Tensor lse, Tensor q, Tensor k, Tensor v, const Attention *a)
{
    size_t bytes = (ROWS + 4 * keys_at_once<HD>()) * HD * sizeof(bf16);
    dim3 grid((unsigned)(a->B * a->NH), (unsigned)((a->Tq + ROWS - 1) / ROWS));
    allow_shared_bytes(forward_kernel<HD>, bytes, "attention_forward");
    forward_kernel<HD><<<grid, THREADS, bytes, cuda.stream>>>(matrix<bf16>(att), matrix<float>(lse),
                                                              matrix<const bf16>(q), matrix<const bf16>(k),
                                                              matrix<const bf16>(v), shape_of(a));
    cuda_check(cudaGetLastError(), "attention_forward");
}

} // namespace

void cuda_attention_forward(Tensor att, Tensor lse, Tensor q, Tensor k, Tensor v, const Attention *a)
{
#ifdef LLMC_CUDNN
    if (attention_cudnn_forward(att, lse, q, k, v, a)) return;
#endif
    if (head_dim_fits_tiles(a->HD) && fits_tiles(att) && fits_tiles(q) && fits_tiles(k) && fits_tiles(v))
        ATTENTION_BY_HEAD_DIM(a->HD, HD, launch_forward<HD>(att, lse, q, k, v, a));
    else
        plain_forward(att, lse, q, k, v, a);
}
