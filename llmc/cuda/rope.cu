/* QK-norm (RMSNorm per head) and rotary positions of q and k, forward and backward. The formulas stand in cpu/rope.c.
 *
 * A warp works on one token and walks its heads, several at once: element i of a head is turned together with i + HD/2,
 * so a lane takes V neighbours of the lower half and the same V of the upper, and as many lanes as make a head form a
 * group that sums by shuffles. The angles of a lane's elements are the same for all heads, so they stay in registers.
 *
 *     HD = 64, BF16   forward V = 8, 4 lanes a head, 8 heads at once; backward V = 4, 8 lanes, 4 heads
 *     odd shapes      V = 1, 32 lanes a head, up to 4 pairs a lane
 */
#include "rows.cuh"

typedef struct {
    int64_t HD, NH, NKV, Tq, position0;
    float eps;
    int lanes; /* of a head: a power of two */
    gmem<const float> q_gain, k_gain;
    Matrix<const float> cos_sin;
} Heads;

enum { MOST_PAIRS = OPS_MAX_HEAD_DIM / 2 / WARP }; /* of a lane, in odd shapes */

/* What one lane holds of one head: `low` elements and, HD/2 further, `high` ones. */
template <int V, int PAIRS> struct Part {
    float low[PAIRS][V], high[PAIRS][V];
};

template <int V, int PAIRS> struct Lane {
    int64_t half;
    int position, slot, slots, lanes; /* in the group; the group, of how many; lanes of a group */

    __device__ explicit Lane(const Heads &h)
        : half(h.HD / 2), position(lane_number() % h.lanes), slot(lane_number() / h.lanes), slots(WARP / h.lanes),
          lanes(h.lanes)
    {
    }
    __device__ int64_t column(int i) const { return (int64_t)(position + i * lanes) * V; }

    template <class T> __device__ void load(Part<V, PAIRS> &x, gmem<T> row) const /* zeros beyond half */
    {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            load_row<V>(x.low[i], row, column(i), half);
            load_row<V>(x.high[i], row + half, column(i), half);
        }
    }
    template <class T> __device__ void store(gmem<T> row, const Part<V, PAIRS> &x) const
    {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            store_row<V>(row, column(i), half, x.low[i]);
            store_row<V>(row + half, column(i), half, x.high[i]);
        }
    }
    __device__ float sum(float x) const /* over the group, every lane of it */
    {
        for (int distance = lanes / 2; distance; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
        return x;
    }
    __device__ float rstd(const Part<V, PAIRS> &x, float eps) const
    {
        float squares = 0;
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
#pragma unroll
            for (int j = 0; j < V; j++)
                squares = fmaf(x.high[i][j], x.high[i][j], fmaf(x.low[i][j], x.low[i][j], squares));
        return f32_div(1.0f, sqrtf(f32_div(sum(squares), (float)(2 * half)) + eps));
    }
};

/* By the angle, or back with direction -1. angle.low: cosines, angle.high: sines. */
template <int V, int PAIRS>
__device__ inline void rotate(Part<V, PAIRS> &x, const Part<V, PAIRS> &angle, float direction)
{
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
#pragma unroll
        for (int j = 0; j < V; j++) {
            float a = x.low[i][j], b = x.high[i][j], cosine = angle.low[i][j], sine = angle.high[i][j] * direction;
            x.low[i][j] = a * cosine - b * sine;
            x.high[i][j] = b * cosine + a * sine;
        }
}

template <int V, int PAIRS> __device__ inline void scale_by(Part<V, PAIRS> &x, float rstd, const Part<V, PAIRS> &gain)
{
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
#pragma unroll
        for (int j = 0; j < V; j++) {
            x.low[i][j] = x.low[i][j] * rstd * gain.low[i][j];
            x.high[i][j] = x.high[i][j] * rstd * gain.high[i][j];
        }
}

/* ---- forward ---- */

/* A warp a token. Reads and writes q and k once, 4 bytes an element in BF16; the gains come from the cache; v is copied
 * when the result has another place. */
template <class T, int V, int PAIRS>
__global__ void __launch_bounds__(BLOCK) turn_heads(Matrix<T> out, Matrix<const T> qkv, Heads p, bool copy_v)
{
    int64_t r = warp_number(), heads = p.NH + p.NKV, v_cols = p.NKV * p.HD;
    if (r >= qkv.rows) return;
    gmem<const T> from = qkv.row(r);
    gmem<T> to = out.row(r);
    Lane<V, PAIRS> lane(p);
    Part<V, PAIRS> angle, x = {}, gain;
    lane.load(angle, p.cos_sin.row(p.position0 + (uint32_t)r % (uint32_t)p.Tq));

    for (int64_t h0 = 0; h0 < heads; h0 += lane.slots) { /* all lanes stay: they sum together */
        int64_t h = h0 + lane.slot;
        if (h < heads) lane.load(x, from + h * p.HD);
        if (!p.q_gain.absent()) {
            float rstd = lane.rstd(x, p.eps);
            lane.load(gain, h < p.NH ? p.q_gain : p.k_gain);
            scale_by(x, rstd, gain);
        }
        rotate(x, angle, 1.0f);
        if (h < heads) lane.store(to + h * p.HD, x);
    }
    if (!copy_v) return;
    for (int64_t c = lane_number() * V; c < v_cols; c += WARP * V)
        store_pack<V>(to + heads * p.HD, c, v_cols, load_pack<V>(from + heads * p.HD, c, v_cols));
}

/* ---- backward ---- */

/* d: gradient of the norm's output to that of its input x; gain_sum += d n. */
template <int V, int PAIRS>
__device__ inline void norm_gradient(Part<V, PAIRS> &d, Part<V, PAIRS> &x, const Part<V, PAIRS> &gain,
                                     const Lane<V, PAIRS> &lane, float eps, Part<V, PAIRS> &gain_sum)
{
    float rstd = lane.rstd(x, eps), sum = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
#pragma unroll
        for (int j = 0; j < V; j++) {
            float low = x.low[i][j] * rstd, high = x.high[i][j] * rstd;
            gain_sum.low[i][j] = fmaf(d.low[i][j], low, gain_sum.low[i][j]);
            gain_sum.high[i][j] = fmaf(d.high[i][j], high, gain_sum.high[i][j]);
            d.low[i][j] *= gain.low[i][j];
            d.high[i][j] *= gain.high[i][j];
            sum = fmaf(d.high[i][j], high, fmaf(d.low[i][j], low, sum));
            x.low[i][j] = low;
            x.high[i][j] = high;
        }
    float mean = f32_div(lane.sum(sum), (float)(2 * lane.half));
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
#pragma unroll
        for (int j = 0; j < V; j++) {
            d.low[i][j] = rstd * (d.low[i][j] - x.low[i][j] * mean);
            d.high[i][j] = rstd * (d.high[i][j] - x.high[i][j] * mean);
        }
}

/* Sums of the groups of a warp, then of the block's warps in order, to `partial` [HD]. All threads come here. */
template <int V, int PAIRS>
__device__ inline void write_gain_sum(gmem<float> partial, Part<V, PAIRS> &sum, const Lane<V, PAIRS> &lane,
                                      float (*of_warp)[OPS_MAX_HEAD_DIM])
{
    float *to = of_warp[threadIdx.x / WARP];
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
#pragma unroll
        for (int j = 0; j < V; j++) {
            for (int distance = lane.lanes; distance < WARP; distance *= 2) {
                sum.low[i][j] += __shfl_xor_sync(0xffffffffu, sum.low[i][j], distance);
                sum.high[i][j] += __shfl_xor_sync(0xffffffffu, sum.high[i][j], distance);
            }
            if (lane.slot || lane.column(i) + j >= lane.half) continue;
            to[lane.column(i) + j] = sum.low[i][j];
            to[lane.half + lane.column(i) + j] = sum.high[i][j];
        }
    __syncthreads();
    for (int c = (int)threadIdx.x; c < 2 * lane.half; c += BLOCK) {
        float total = 0;
        for (int w = 0; w < BLOCK_WARPS; w++) total += of_warp[w][c];
        partial.st(c, total);
    }
    __syncthreads(); /* of_warp is free again */
}

/* One head of one token. gain and gain_sum: of q or k. */
template <class T, int V, int PAIRS>
__device__ inline void head_backward(gmem<T> gradient, gmem<const T> qkv, const Heads &p, const Lane<V, PAIRS> &lane,
                                     const Part<V, PAIRS> &angle, bool here, gmem<const float> gain_row,
                                     Part<V, PAIRS> &gain_sum)
{
    Part<V, PAIRS> d = {}, x = {}, gain;
    if (here) lane.load(d, gradient);
    rotate(d, angle, -1.0f);
    if (!gain_row.absent()) {
        if (here) lane.load(x, qkv);
        lane.load(gain, gain_row);
        norm_gradient(d, x, gain, lane, p.eps, gain_sum);
    }
    if (here) lane.store(gradient, d);
}

/* A block takes SUM_ROWS tokens, a warp every 8th of them; heads of q, then of k. Reads and writes the gradient, reads
 * q and k when there is a norm: 6 bytes an element in BF16. A lane sums its elements' gain gradients in registers;
 * partial sums of q are row 0 of the tile, of k row 1. */
template <class T, int V, int PAIRS>
__global__ void __launch_bounds__(BLOCK)
    turn_heads_back(Matrix<T> dqkv, Matrix<const T> qkv, Heads p, gmem<float> partial)
{
    __shared__ float of_warp[BLOCK_WARPS][OPS_MAX_HEAD_DIM];
    Lane<V, PAIRS> lane(p);
    Part<V, PAIRS> q_sum = {}, k_sum = {}, angle;
    int64_t tile = blockIdx.x, end = (tile + 1) * SUM_ROWS;
    if (end > dqkv.rows) end = dqkv.rows;
    for (int64_t r = tile * SUM_ROWS + threadIdx.x / WARP; r < end; r += BLOCK_WARPS) {
        gmem<T> gradient = dqkv.row(r), k_gradient = gradient + p.NH * p.HD;
        gmem<const T> from = qkv.row(r), k_from = from + p.NH * p.HD;
        lane.load(angle, p.cos_sin.row(p.position0 + (uint32_t)r % (uint32_t)p.Tq));
        for (int64_t h = lane.slot; h < p.NH + lane.slot; h += lane.slots)
            head_backward(gradient + h * p.HD, from + h * p.HD, p, lane, angle, h < p.NH, p.q_gain, q_sum);
        for (int64_t h = lane.slot; h < p.NKV + lane.slot; h += lane.slots)
            head_backward(k_gradient + h * p.HD, k_from + h * p.HD, p, lane, angle, h < p.NKV, p.k_gain, k_sum);
    }
    if (p.q_gain.absent()) return;
    write_gain_sum(partial + 2 * tile * p.HD, q_sum, lane, of_warp);
    write_gain_sum(partial + (2 * tile + 1) * p.HD, k_sum, lane, of_warp);
}

/* ---- operations ---- */

static Heads heads_of(const char *op, Tensor q_gain, Tensor k_gain, float eps, Tensor cos_sin, const Attention *a)
{
    if (a->HD > OPS_MAX_HEAD_DIM || a->HD % 2) die("%s: head size %d; this is a bug", op, (int)a->HD);
    return Heads{a->HD,
                 a->NH,
                 a->NKV,
                 a->Tq,
                 a->position0,
                 eps,
                 WARP,
                 gmem<const float>(q_gain.data),
                 gmem<const float>(k_gain.data),
                 matrix<const float>(cos_sin)};
}

/* V elements at once need heads, and halves of heads, that begin at multiples of their size. */
static bool wide_heads(int V, const Attention *a, Tensor x, Tensor y, Tensor q_gain, Tensor k_gain, Tensor cos_sin)
{
    return a->HD / 2 % V == 0 && is_aligned(x) && is_aligned(y) && is_aligned(q_gain) && is_aligned(k_gain) &&
           is_aligned(cos_sin);
}

static int lanes_of(int64_t packs) /* of half a head, at most 32: the next power of two */
{
    int lanes = 1;
    while (lanes < packs) lanes *= 2;
    return lanes;
}

template <class T>
static void forward(Tensor out, Tensor qkv, Heads p, const Attention *a, Tensor q_gain, Tensor k_gain, Tensor cos_sin)
{
    constexpr int V = 16 / sizeof(T);
    bool copy_v = out.data != qkv.data;
    unsigned blocks = blocks_for_warps(qkv.rows);
    if (wide_heads(V, a, out, qkv, q_gain, k_gain, cos_sin)) {
        p.lanes = lanes_of(p.HD / 2 / V);
        turn_heads<T, V, 1><<<blocks, BLOCK, 0, cuda.stream>>>(matrix<T>(out), matrix<const T>(qkv), p, copy_v);
    } else {
        turn_heads<T, 1, MOST_PAIRS>
            <<<blocks, BLOCK, 0, cuda.stream>>>(matrix<T>(out), matrix<const T>(qkv), p, copy_v);
    }
}

void cuda_qk_norm_rope_forward(Tensor out, Tensor qkv, Tensor q_gain, Tensor k_gain, float eps, Tensor cos_sin,
                               const Attention *a)
{
    const char *op = "qk_norm_rope_forward";
    if (!qkv.rows) return;
    Heads p = heads_of(op, q_gain, k_gain, eps, cos_sin, a);
    BY_DTYPE(qkv.dtype, T, forward<T>(out, qkv, p, a, q_gain, k_gain, cos_sin));
    cuda_check(cudaGetLastError(), op);
}

/* In BF16 too a lane takes 4 elements: with 8 its sums and operands would fill 164 registers, and a multiprocessor
 * would hold one block. */
template <class T>
static void backward(Tensor dqkv, Tensor qkv, Heads p, const Attention *a, Tensor q_gain, Tensor k_gain, Tensor cos_sin)
{
    constexpr int V = 4;
    unsigned blocks = (unsigned)ceil_div(qkv.rows, SUM_ROWS);
    if (wide_heads(V, a, dqkv, qkv, q_gain, k_gain, cos_sin)) {
        p.lanes = lanes_of(p.HD / 2 / V);
        turn_heads_back<T, V, 1>
            <<<blocks, BLOCK, 0, cuda.stream>>>(matrix<T>(dqkv), matrix<const T>(qkv), p, cuda.partial);
    } else {
        turn_heads_back<T, 1, MOST_PAIRS>
            <<<blocks, BLOCK, 0, cuda.stream>>>(matrix<T>(dqkv), matrix<const T>(qkv), p, cuda.partial);
    }
}

void cuda_qk_norm_rope_backward(Tensor dqkv, Tensor dq_gain, Tensor dk_gain, Tensor qkv, Tensor q_gain, Tensor k_gain,
                                float eps, Tensor cos_sin, const Attention *a)
{
    const char *op = "qk_norm_rope_backward";
    if (!qkv.rows) return;
    Heads p = heads_of(op, q_gain, k_gain, eps, cos_sin, a);
    BY_DTYPE(qkv.dtype, T, backward<T>(dqkv, qkv, p, a, q_gain, k_gain, cos_sin));
    cuda_check(cudaGetLastError(), op);
    if (!q_gain.data) return;
    cuda_add_partial_sums(dq_gain, ceil_div(qkv.rows, SUM_ROWS), 0);
    cuda_add_partial_sums(dk_gain, ceil_div(qkv.rows, SUM_ROWS), 1);
}
