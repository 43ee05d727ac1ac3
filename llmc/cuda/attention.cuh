/* What the attention kernels share: the arguments, which keys a query sees, and for BF16 tiles in shared memory with the
 * two products that all of attention is made of (Dao et al. 2205.14135, Dao 2307.08691).
 *
 *     forward (a block owns queries)    S = Q K^T                         O += P V
 *     dQ (a block owns queries)         S = Q K^T,    dP = dO V^T         dQ += dS K
 *     dK, dV (a block owns keys)        S^T = K Q^T,  dP^T = V dO^T       dV += P^T dO,  dK += dS^T Q
 *                                       rows_times_rows                  weights_times_rows
 *
 * Left of each product is what the block owns. Its four warps share the rows, 16 MF each, and a warp needs no other's
 * rows: so P and dS never leave its registers, where the result of one mma has the layout of an input of the next.
 *
 * Of a product [16 MF, 8 NF] a lane = 4 g + t holds of every 16 x 8 piece, [m][n], the elements (ptx.cuh)
 *
 *             column 8 n + 2 t, 2 t + 1
 *     row 16 m + g      x[0] x[1]            x[2], x[3] of pieces n and n + 1, packed, are
 *     row 16 m + g + 8  x[2] x[3]            the A fragment of 16 columns.
 *
 * MF = 2 where registers permit: each fragment from shared memory then feeds two mma, 128 bytes of shared memory an mma
 * instead of 256, and at 128 bytes a cycle and multiprocessor the latter would hold the tensor cores back.
 *
 * A tile is rows of HD elements without padding. Of a row, the 16-byte chunks are permuted, so that the 8 rows that one
 * 8 x 8 matrix of ldmatrix reads, at one chunk, lie in all 32 banks (8 groups of 4 banks). HD = 64, and HD = 32:
 *
 *     row 0   0 1 2 3 4 5 6 7          row 0, 1   0 1 2 3 | 0 1 2 3
 *     row 1   1 0 3 2 5 4 7 6          row 2, 3   1 0 3 2 | 1 0 3 2
 *     row 2   2 3 0 1 6 7 4 5          row 4, 5   2 3 0 1 | 2 3 0 1
 *     ...     chunk c at c ^ row % 8   ...        chunk c at c ^ row / 2 % 4
 *
 * Floor 2.
 */
#ifndef LLMC_CUDA_ATTENTION_CUH
#define LLMC_CUDA_ATTENTION_CUH

#include "../common.h"
#include "../mathfn.h"
#include "cuda.cuh"

namespace attention
{

constexpr int WARPS = 4, THREADS = 32 * WARPS, MAX_TILE_HEAD_DIM = 128;
constexpr float LOG2E = 1.44269504f;

/* ---- arguments ---- */

typedef struct {
    int Tq, Tk, position0;
    int NH, NKV, group, HD;        /* group: query heads per key head */
    float scale;                   /* 1 / sqrt(HD) */
    gmem<const int32_t> first_key; /* [B, Tq] or absent */
} Shape;

inline Shape shape_of(const Attention *a)
{
    return Shape{(int)a->Tq,
                 (int)a->Tk,
                 (int)a->position0,
                 (int)a->NH,
                 (int)a->NKV,
                 (int)(a->NH / a->NKV),
                 (int)a->HD,
                 1.0f / sqrtf((float)a->HD),
                 gmem<const int32_t>((void *)a->first_key)};
}

/* Whether the kernels with tiles can read and write `t`: BF16, every row 16-byte aligned. */
inline bool fits_tiles(Tensor t) { return t.dtype == DTYPE_BF16 && t.ld % 8 == 0 && (uintptr_t)t.data % 16 == 0; }

inline bool head_dim_fits_tiles(int64_t HD) { return HD % 16 == 0 && HD <= MAX_TILE_HEAD_DIM; }

/* Runs the statements with HD a constant, for a head size that fits tiles. */
#define ATTENTION_BY_HEAD_DIM(head_dim, HD, ...)                                                                       \
    do {                                                                                                               \
        switch (head_dim) {                                                                                            \
            ATTENTION_HEAD_DIM_CASE(16, HD, __VA_ARGS__)                                                               \
            ATTENTION_HEAD_DIM_CASE(32, HD, __VA_ARGS__)                                                               \
            ATTENTION_HEAD_DIM_CASE(48, HD, __VA_ARGS__)                                                               \
            ATTENTION_HEAD_DIM_CASE(64, HD, __VA_ARGS__)                                                               \
            ATTENTION_HEAD_DIM_CASE(80, HD, __VA_ARGS__)                                                               \
            ATTENTION_HEAD_DIM_CASE(96, HD, __VA_ARGS__)                                                               \
            ATTENTION_HEAD_DIM_CASE(112, HD, __VA_ARGS__)                                                              \
            ATTENTION_HEAD_DIM_CASE(128, HD, __VA_ARGS__)                                                              \
        }                                                                                                              \
    } while (0)
#define ATTENTION_HEAD_DIM_CASE(value, HD, ...)                                                                        \
    case value: {                                                                                                      \
        constexpr int HD = value;                                                                                      \
        __VA_ARGS__;                                                                                                   \
        break;                                                                                                         \
    }

/* Without this a kernel gets 48 KiB of dynamic shared memory at most. */
template <class Kernel> void allow_shared_bytes(Kernel *kernel, size_t bytes, const char *op)
{
    cuda_check(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes), op);
}

/* The plain kernels (attention_plain.cu): any head size and dtype, row alignment of one element. */
void plain_forward(Tensor att, Tensor lse, Tensor q, Tensor k, Tensor v, const Attention *a);
void plain_backward(Tensor dq, Tensor dk, Tensor dv, Tensor datt, Matrix<const float> delta, Tensor lse, Tensor q,
                    Tensor k, Tensor v, const Attention *a);

/* ---- which keys a query sees: from the first of its document to itself ---- */

__device__ inline int first_key_of(const Shape &a, int64_t b, int t)
{
    return a.first_key.absent() ? 0 : a.first_key.ld(b * a.Tq + t);
}

/* Of queries t0 .. t0 + n - 1; all 32 lanes call and get it. */
__device__ inline int smallest_first_key(const Shape &a, int64_t b, int t0, int n)
{
    if (a.first_key.absent()) return 0;
    int smallest = INT32_MAX;
    for (int i = threadIdx.x % 32; i < n; i += 32) smallest = min(smallest, first_key_of(a, b, t0 + i));
    for (int distance = 16; distance; distance /= 2)
        smallest = min(smallest, __shfl_xor_sync(0xffffffffu, smallest, distance));
    return smallest;
}

/* Keys first .. last of one query, the 32 queries of a warp one a lane; no query sees none. */
typedef struct {
    int first, last;
} Seen;

__device__ inline Seen seen_by(const Shape &a, int64_t b, int t)
{
    return Seen{t < a.Tq ? first_key_of(a, b, t) : INT32_MAX, a.position0 + t};
}

/* Whether any of the warp's queries sees any of the keys; whether all see all. */
__device__ inline bool warp_sees_any(Seen seen, int key0, int keys)
{
    return __any_sync(0xffffffffu, seen.first < key0 + keys && seen.last >= key0);
}
__device__ inline bool warp_sees_all(Seen seen, int key0, int keys)
{
    return __all_sync(0xffffffffu, seen.first <= key0 && seen.last >= key0 + keys - 1);
}

/* Of a product (below) whose rows are queries and columns keys: where the query does not see the key, x becomes `masked`,
 * also if it is NaN. `t0` is the lane's first query. First keys are read here each time: registers are scarce. */
template <int MF, int NF>
__device__ inline void mask_columns(float (&x)[MF][NF][4], float masked, const Shape &a, int64_t b, int t0, int key0)
{
    key0 += threadIdx.x % 4 * 2;
#pragma unroll
    for (int m = 0; m < MF; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int t = t0 + 16 * m + 8 * half, last = a.position0 + t - key0;
            int first = t < a.Tq ? first_key_of(a, b, t) - key0 : 0;
#pragma unroll
            for (int n = 0; n < NF; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (8 * n + e < first || 8 * n + e > last) x[m][n][2 * half + e] = masked;
        }
}

/* ---- tiles ---- */

/* Chunks that are permuted among each other. */
template <int HD> __host__ __device__ constexpr int permuted_chunks()
{
    return HD / 8 % 8 == 0 ? 8 : HD / 8 % 4 == 0 ? 4 : 2;
}

/* Element at which chunk c of a row begins. */
template <int HD> __device__ inline int tile_at(int row, int chunk)
{
    constexpr int permuted = permuted_chunks<HD>();
    return row * HD + 8 * (chunk ^ row / (8 / permuted) % permuted);
}

/* The same for row `row`, plus any constant multiple of 8 rows, and chunk even_chunk + odd, where even_chunk is a
 * constant: written so that the addresses of a loop are few registers plus constants. */
template <int HD> __device__ inline int tile_at(int row, int even_chunk, int odd)
{
    constexpr int permuted = permuted_chunks<HD>();
    int within = even_chunk % permuted;
    return row * HD + 8 * ((within | odd) ^ row / (8 / permuted) % permuted) + 8 * (even_chunk - within);
}

/* The first chunk that this thread copies of rows of a head. As many lanes as chunks are permuted go along a row, so that
 * all copies of a thread differ by constants, and by multiples of ld. */
template <int HD> __device__ inline gmem<const bf16> thread_chunk(gmem<const bf16> head, int64_t ld)
{
    constexpr int lanes = permuted_chunks<HD>();
    return head + (threadIdx.x / lanes * ld + threadIdx.x % lanes * 8);
}

/* The block copies rows into a tile, `from` as above; rows from `valid` on become zero and are not read. */
template <int HD, int ROWS> __device__ inline void load_tile(bf16 *tile, gmem<const bf16> from, int64_t ld, int valid)
{
    constexpr int lanes = permuted_chunks<HD>(), step = THREADS / lanes;
    int row = threadIdx.x / lanes;
    bf16 *to = tile + tile_at<HD>(row, threadIdx.x % lanes);
    if (ROWS < step && row >= ROWS) return;
#pragma unroll
    for (int pass = 0; pass < (ROWS + step - 1) / step; pass++)
#pragma unroll
        for (int c = 0; c < HD / 8; c += lanes)
            cp_async_16(to + pass * step * HD + 8 * c, from, pass * step * ld + 8 * c, row + pass * step < valid);
}

/* A warp's rows of a product to global memory: through its own rows of a tile that nobody
 * else reads any more, so that a row goes out in 16-byte stores. */
template <int HD, int MF>
__device__ inline void store_rows(gmem<bf16> head, int64_t ld, int valid, bf16 *tile, int row0,
                                  const float (&x)[MF][HD / 8][4])
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < MF; m++)
#pragma unroll
        for (int n = 0; n < HD / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                bf16 *at = tile + tile_at<HD>(row0 + 16 * m + 8 * half + g, n) + 2 * t;
                *(uint32_t *)at = bf16x2(x[m][n][2 * half], x[m][n][2 * half + 1]);
            }
    __syncwarp();
    for (int i = lane; i < 16 * MF * (HD / 8); i += 32) {
        int row = row0 + i / (HD / 8), chunk = i % (HD / 8);
        if (row < valid) head.st_pack(row * ld + 8 * chunk, *(const Pack<bf16, 8> *)(tile + tile_at<HD>(row, chunk)));
    }
}

/* ---- the two products, of one warp ---- */

/* x [16 MF, 8 NF] = rows a_row0 .. of tile a times the first 8 NF rows of tile b, transposed. The loop over HD is unrolled
 * `unrolled` times: each kernel takes what leaves it without spills. */
template <int HD, int unrolled, int MF, int NF>
__device__ inline void rows_times_rows(float (&x)[MF][NF][4], const bf16 *a, int a_row0, const bf16 *b)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MF; m++)
#pragma unroll
        for (int n = 0; n < NF; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) x[m][n][e] = 0;
#pragma unroll unrolled
    for (int k = 0; k < HD / 16; k++) {
        uint32_t rows[MF][4];
#pragma unroll
        for (int m = 0; m < MF; m++)
            ldmatrix_x4(rows[m], a + a_row0 * HD + tile_at<HD>(lane % 16, 2 * k, lane / 16) + 16 * m * HD);
#pragma unroll
        for (int n = 0; n < NF; n += 2) {
            uint32_t columns[4]; /* two fragments: of rows 8 n .. and 8 n + 8 .. */
            ldmatrix_x4(columns, b + tile_at<HD>(lane / 16 * 8 + lane % 8, 2 * k, lane / 8 % 2) + 8 * n * HD);
#pragma unroll
            for (int m = 0; m < MF; m++) {
                mma_bf16(x[m][n], rows[m], columns);
                mma_bf16(x[m][n + 1], rows[m], columns + 2);
            }
        }
    }
}

/* x [16 MF, HD] += w [16 MF, 8 NF], rounded to BF16, times the first 8 NF rows of tile b. */
template <int HD, int MF, int NF>
__device__ inline void weights_times_rows(float (&x)[MF][HD / 8][4], const float (&w)[MF][NF][4], const bf16 *b)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < NF / 2; k++) {
        uint32_t weights[MF][4];
#pragma unroll
        for (int m = 0; m < MF; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                weights[m][i] = bf16x2(w[m][2 * k + i / 2][i % 2 * 2], w[m][2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < HD / 8; n += 2) {
            uint32_t columns[4];
            ldmatrix_x4_transposed(columns, b + tile_at<HD>(lane % 16, n, lane / 16) + 16 * k * HD);
#pragma unroll
            for (int m = 0; m < MF; m++) {
                mma_bf16(x[m][n], weights[m], columns);
                mma_bf16(x[m][n + 1], weights[m], columns + 2);
            }
        }
    }
}

} // namespace attention

#endif
