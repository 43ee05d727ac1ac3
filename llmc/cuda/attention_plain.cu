/* Attention without tensor cores: for FP32 runs, and for BF16 where tiles do not fit (attention.cuh: head sizes that are
 * no multiple of 16 or above 128, rows that are not 16-byte aligned). Simple rather than fast.
 *
 * A warp owns one query of one head (forward, dQ) or one key of one key head (dK, dV), and goes over the keys or queries
 * on the other side 32 at a time: first a lane computes the whole dot products of one of them with the warp's own rows,
 * which are in shared memory as FP32; then a lane owns the columns lane + 32 j of the sums, and the warp adds row after
 * row, in order. Only rows that are seen are read at all, so nothing of the others can spill.
 *
 * Sums in FP32; P and dS rounded to the dtype of the activations before they multiply, as everywhere. The exponential is
 * the CPU's. Every row of the other side is read twice a warp, from the caches. Floor 2.
 */
#include "attention.cuh"

using namespace attention;

namespace
{

enum { COLUMNS = OPS_MAX_HEAD_DIM / 32 }; /* of a sum, a lane */

typedef struct {
    float x[OPS_MAX_HEAD_DIM];
} Row;

template <class T> __device__ inline void load_row(Row *row, gmem<const T> from, int HD)
{
    for (int c = threadIdx.x % 32; c < HD; c += 32) row->x[c] = to_f32(from.ld(c));
    __syncwarp();
}

template <class T> __device__ inline float dot(const Row *own, gmem<const T> other, int HD)
{
    float sum = 0;
    for (int c = 0; c < HD; c++) sum = fmaf(own->x[c], to_f32(other.ld(c)), sum);
    return sum;
}

/* sum += weight row, by the warp. */
template <class T> __device__ inline void add_row(float (&sum)[COLUMNS], float weight, gmem<const T> row, int HD)
{
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        int c = threadIdx.x % 32 + 32 * j;
        if (c < HD) sum[j] = fmaf(weight, to_f32(row.ld(c)), sum[j]);
    }
}

template <class T> __device__ inline void write_row(gmem<T> to, const float (&sum)[COLUMNS], float factor, int HD)
{
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        int c = threadIdx.x % 32 + 32 * j;
        if (c < HD) to.st(c, from_f32<T>(sum[j] * factor));
    }
}

template <class T> __device__ inline float rounded(float x) { return to_f32(from_f32<T>(x)); }

/* The row of a warp among `count` of B sequences and `heads` heads of T rows. */
typedef struct {
    int64_t b;
    int h, t;
    bool inside;
} Place;

__device__ inline Place place_of_warp(int heads, int T, int64_t count)
{
    int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    return Place{i / T / heads, (int)(i / T % heads), (int)(i % T), i < count};
}

template <class T>
__global__ void plain_forward_kernel(Matrix<T> att, Matrix<float> lse, Matrix<const T> q, Matrix<const T> k,
                                     Matrix<const T> v, Shape a, int64_t count)
{
    __shared__ Row rows[WARPS];
    Place place = place_of_warp(a.NH, a.Tq, count);
    if (!place.inside) return;
    Row *own = &rows[threadIdx.x / 32];
    int64_t row = place.b * a.Tq + place.t, key_row = place.b * a.Tk;
    int lane = threadIdx.x % 32, h = place.h, column = h / a.group * a.HD;
    int first = first_key_of(a, place.b, place.t), last = a.position0 + place.t;
    load_row(own, q.row(row) + h * a.HD, a.HD);

    float o[COLUMNS] = {}, maximum = -INFINITY, sum = 0;
    for (int key0 = first / 32 * 32; key0 <= last; key0 += 32) {
        int key = key0 + lane;
        bool visible = key >= first && key <= last;
        float s = visible ? dot(own, k.row(key_row + key) + column, a.HD) * a.scale : -INFINITY;
        float largest = fmaxf(maximum, warp_max(s)), shift = largest == -INFINITY ? 0 : largest;
        float shrink = f32_exp(maximum - shift), p = f32_exp(s - shift), weight = rounded<T>(p);
        sum = fmaf(sum, shrink, warp_sum(p));
        maximum = largest;
        for (int j = 0; j < COLUMNS; j++) o[j] *= shrink;
        for (int j = 0; j < 32; j++) {
            float w = __shfl_sync(0xffffffffu, weight, j);
            if (key0 + j >= first && key0 + j <= last) add_row(o, w, v.row(key_row + key0 + j) + column, a.HD);
        }
    }
    write_row(att.row(row) + h * a.HD, o, 1.0f / sum, a.HD);
    if (lane == 0) lse.row(row).st(h, maximum + logf(sum));
}

template <class T>
__global__ void plain_dq_kernel(Matrix<T> dq, Matrix<const T> datt, Matrix<const float> lse, Matrix<const float> delta,
                                Matrix<const T> q, Matrix<const T> k, Matrix<const T> v, Shape a, int64_t count)
{
    __shared__ Row rows[2 * WARPS];
    Place place = place_of_warp(a.NH, a.Tq, count);
    if (!place.inside) return;
    Row *own_q = &rows[threadIdx.x / 32], *own_datt = own_q + WARPS;
    int64_t row = place.b * a.Tq + place.t, key_row = place.b * a.Tk;
    int h = place.h, column = h / a.group * a.HD;
    int first = first_key_of(a, place.b, place.t), last = a.position0 + place.t;
    float row_lse = lse.row(row).ld(h), row_delta = delta.row(row).ld(h), sum[COLUMNS] = {};
    load_row(own_q, q.row(row) + h * a.HD, a.HD);
    load_row(own_datt, datt.row(row) + h * a.HD, a.HD);

    for (int key0 = first / 32 * 32; key0 <= last; key0 += 32) {
        int key = key0 + threadIdx.x % 32;
        float ds = 0;
        if (key >= first && key <= last) {
            float p = f32_exp(dot(own_q, k.row(key_row + key) + column, a.HD) * a.scale - row_lse);
            ds = p * (dot(own_datt, v.row(key_row + key) + column, a.HD) - row_delta) * a.scale;
        }
        for (int j = 0; j < 32; j++) {
            float w = __shfl_sync(0xffffffffu, rounded<T>(ds), j);
            if (key0 + j >= first && key0 + j <= last) add_row(sum, w, k.row(key_row + key0 + j) + column, a.HD);
        }
    }
    write_row(dq.row(row) + h * a.HD, sum, 1, a.HD);
}

template <class T>
__global__ void plain_dkdv_kernel(Matrix<T> dk, Matrix<T> dv, Matrix<const T> datt, Matrix<const float> lse,
                                  Matrix<const float> delta, Matrix<const T> q, Matrix<const T> k, Matrix<const T> v,
                                  Shape a, int64_t count)
{
    __shared__ Row rows[2 * WARPS];
    Place place = place_of_warp(a.NKV, a.Tk, count);
    if (!place.inside) return;
    Row *own_k = &rows[threadIdx.x / 32], *own_v = own_k + WARPS;
    int64_t row = place.b * a.Tk + place.t, query_row = place.b * a.Tq;
    int kv = place.h, key = place.t, begin = key > a.position0 ? key - a.position0 : 0;
    float dk_sum[COLUMNS] = {}, dv_sum[COLUMNS] = {};
    load_row(own_k, k.row(row) + kv * a.HD, a.HD);
    load_row(own_v, v.row(row) + kv * a.HD, a.HD);

    for (int h = kv * a.group; h < (kv + 1) * a.group; h++)
        for (int t0 = begin / 32 * 32; t0 < a.Tq; t0 += 32) {
            int t = t0 + threadIdx.x % 32;
            bool visible = t >= begin && t < a.Tq && first_key_of(a, place.b, t) <= key;
            float p = 0, ds = 0;
            if (visible) {
                p = dot(own_k, q.row(query_row + t) + h * a.HD, a.HD) * a.scale;
                p = f32_exp(p - lse.row(query_row + t).ld(h));
                ds = dot(own_v, datt.row(query_row + t) + h * a.HD, a.HD) - delta.row(query_row + t).ld(h);
                ds = p * ds * a.scale;
            }
            unsigned seen = __ballot_sync(0xffffffffu, visible);
            for (; seen; seen &= seen - 1) {
                int j = __ffs(seen) - 1;
                float wk = __shfl_sync(0xffffffffu, rounded<T>(ds), j), wv = __shfl_sync(0xffffffffu, rounded<T>(p), j);
                add_row(dk_sum, wk, q.row(query_row + t0 + j) + h * a.HD, a.HD);
                add_row(dv_sum, wv, datt.row(query_row + t0 + j) + h * a.HD, a.HD);
            }
        }
    write_row(dk.row(row) + kv * a.HD, dk_sum, 1, a.HD);
    write_row(dv.row(row) + kv * a.HD, dv_sum, 1, a.HD);
}

unsigned blocks_of(int64_t count) { return (unsigned)((count + WARPS - 1) / WARPS); }

template <class T> void launch_forward(Tensor att, Tensor lse, Tensor q, Tensor k, Tensor v, const Attention *a)
{
    int64_t count = a->B * a->NH * a->Tq;
    plain_forward_kernel<T><<<blocks_of(count), THREADS, 0, cuda.stream>>>(matrix<T>(att), matrix<float>(lse),
                                                                           matrix<const T>(q), matrix<const T>(k),
                                                                           matrix<const T>(v), shape_of(a), count);
    cuda_check(cudaGetLastError(), "attention_forward");
}

template <class T>
void launch_backward(Tensor dq, Tensor dk, Tensor dv, Tensor datt, Matrix<const float> delta, Tensor lse, Tensor q,
                     Tensor k, Tensor v, const Attention *a)
{
    int64_t queries = a->B * a->NH * a->Tq, keys = a->B * a->NKV * a->Tk;
    plain_dq_kernel<T><<<blocks_of(queries), THREADS, 0, cuda.stream>>>(
        matrix<T>(dq), matrix<const T>(datt), matrix<const float>(lse), delta, matrix<const T>(q), matrix<const T>(k),
        matrix<const T>(v), shape_of(a), queries);
    cuda_check(cudaGetLastError(), "attention_backward");
    plain_dkdv_kernel<T><<<blocks_of(keys), THREADS, 0, cuda.stream>>>(
        matrix<T>(dk), matrix<T>(dv), matrix<const T>(datt), matrix<const float>(lse), delta, matrix<const T>(q),
        matrix<const T>(k), matrix<const T>(v), shape_of(a), keys);
    cuda_check(cudaGetLastError(), "attention_backward");
}

} // namespace

void attention::plain_forward(Tensor att, Tensor lse, Tensor q, Tensor k, Tensor v, const Attention *a)
{
    if (a->HD > OPS_MAX_HEAD_DIM) die("attention_forward: head_dim %d", (int)a->HD);
    BY_DTYPE(q.dtype, T, launch_forward<T>(att, lse, q, k, v, a));
}

void attention::plain_backward(Tensor dq, Tensor dk, Tensor dv, Tensor datt, Matrix<const float> delta, Tensor lse,
                               Tensor q, Tensor k, Tensor v, const Attention *a)
{
    if (a->HD > OPS_MAX_HEAD_DIM) die("attention_backward: head_dim %d", (int)a->HD);
    BY_DTYPE(q.dtype, T, launch_backward<T>(dq, dk, dv, datt, delta, lse, q, k, v, a));
}
