/* Rows of matrices as warps read them: 16 bytes a lane where every row begins at a multiple of 16 bytes, one element a
 * lane where not.
 *
 * A kernel that works on rows is a template over the element type T and the width W, the elements that a lane takes at
 * once: 16 / sizeof(T), or 1 for odd shapes (BY_WIDTH chooses on the host). FP32 vectors beside a BF16 matrix (gains,
 * sums) are then read as two times 16 bytes. A row whose length is no multiple of W ends with single elements.
 *
 *     lane          0        1             31       0              1          ...
 *     columns    0 .. W-1  W .. 2W-1  ...        32 W ..       33 W ..
 *
 * Floor 2.
 */
#ifndef LLMC_CUDA_ROWS_CUH
#define LLMC_CUDA_ROWS_CUH

#include "cuda.cuh"

enum { WARP = 32, BLOCK_WARPS = 8, BLOCK = WARP * BLOCK_WARPS };

/* ---- on the host ---- */

inline bool is_aligned(Tensor t) /* every row begins at a multiple of 16 bytes; an absent tensor's do */
{
    size_t step = t.rows > 1 ? (size_t)t.ld * dtype_bytes(t.dtype) : 0;
    return ((uintptr_t)t.data | step) % 16 == 0;
}

/* Runs the statements with W the width for elements of type T. */
#define BY_WIDTH(aligned, T, W, ...)                                                                                   \
    do {                                                                                                               \
        if (aligned) {                                                                                                 \
            constexpr int W = 16 / sizeof(T);                                                                          \
            __VA_ARGS__;                                                                                               \
        } else {                                                                                                       \
            constexpr int W = 1;                                                                                       \
            __VA_ARGS__;                                                                                               \
        }                                                                                                              \
    } while (0)

inline unsigned blocks_for_warps(int64_t warps)
{
    if (warps > UINT32_MAX - BLOCK_WARPS) die("a kernel of %lld warps: too many; this is a bug", (long long)warps);
    return (unsigned)ceil_div(warps, BLOCK_WARPS);
}

/* ---- who am I ---- */

__device__ inline int lane_number() { return (int)(threadIdx.x % WARP); }
__device__ inline uint32_t warp_number() { return blockIdx.x * BLOCK_WARPS + threadIdx.x / WARP; }

/* Warps that divide a matrix: `chunks` neighbours share a row (or a tile of rows), each has `columns` columns of it. */
typedef struct {
    int64_t row, col;
} Place;
__device__ inline Place warp_place(uint32_t chunks, int64_t columns)
{
    uint32_t w = warp_number(); /* of 32 bits: a division of 64 takes several times the instructions */
    return Place{w / chunks, w % chunks * columns};
}

/* ---- packs: W elements of one row from column c on ---- */

/* BF16 as the hardware rounds it, two at a time. */
template <int W> __device__ inline void round_pack(Pack<float, W> *to, const float (&x)[W])
{
#pragma unroll
    for (int j = 0; j < W; j++) to->v[j] = x[j];
}
template <int W> __device__ inline void round_pack(Pack<bf16, W> *to, const float (&x)[W])
{
    uint32_t pair[(W + 1) / 2]; /* whole words, or the compiler stores halves */
#pragma unroll
    for (int j = 0; j < W; j += 2) pair[j / 2] = bf16x2(x[j], W == 1 ? 0.0f : x[(j + 1) % W]);
    memcpy(to, pair, sizeof *to);
}

template <class T, int W> __device__ inline void unpack(float (&out)[W], Pack<T, W> p)
{
#pragma unroll
    for (int j = 0; j < W; j++) out[j] = to_f32(p.v[j]);
}

/* Beyond `cols` elements are zero when loaded and left alone when stored. At most 16 bytes. */
template <int W, class T>
__device__ inline Pack<typename gmem<T>::Value, W> load_pack(gmem<T> row, int64_t c, int64_t cols)
{
    if (c + W <= cols) return row.template ld_pack<W>(c);
    Pack<typename gmem<T>::Value, W> p;
    for (int j = 0; j < W; j++) p.v[j] = c + j < cols ? row.ld(c + j) : from_f32<typename gmem<T>::Value>(0.0f);
    return p;
}
template <int W, class T> __device__ inline void store_pack(gmem<T> row, int64_t c, int64_t cols, Pack<T, W> p)
{
    if (c + W <= cols) {
        row.template st_pack<W>(c, p);
        return;
    }
    for (int j = 0; j < W; j++)
        if (c + j < cols) row.st(c + j, p.v[j]);
}

/* The same as floats, of any length: in several accesses when W elements are more than 16 bytes. */
template <int W, class T> __device__ inline void load_row(float (&out)[W], gmem<T> row, int64_t c, int64_t cols)
{
    constexpr int N = W * sizeof(T) <= 16 ? W : 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < W; i += N) {
        float part[N];
        unpack(part, load_pack<N>(row, c + i, cols));
#pragma unroll
        for (int j = 0; j < N; j++) out[i + j] = part[j];
    }
}
template <int W, class T> __device__ inline void store_row(gmem<T> row, int64_t c, int64_t cols, const float (&x)[W])
{
    constexpr int N = W * sizeof(T) <= 16 ? W : 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < W; i += N) {
        float part[N];
        Pack<T, N> p;
#pragma unroll
        for (int j = 0; j < N; j++) part[j] = x[i + j];
        round_pack(&p, part);
        store_pack<N>(row, c + i, cols, p);
    }
}

/* ---- structs of a multiple of 8 bytes ---- */

template <class T> __device__ inline T load_struct(gmem<const T> at)
{
    constexpr int N = sizeof(T) / 8;
    gmem<const uint64_t> from((const uint64_t *)at.p);
    uint64_t word[N];
    T x;
    static_assert(sizeof(T) % 8 == 0, "a struct of whole words");
#pragma unroll
    for (int i = 0; i < N; i++) word[i] = from.ld(i);
    memcpy(&x, word, sizeof x);
    return x;
}

/* ---- a whole row in one warp ---- */

/* The packs lane, lane + 32, ... of a row; the first KEPT stay in registers (2048 columns of BF16, 1024 of FP32), any
 * others are read again. */
template <class T, int W> struct WarpRow {
    enum { KEPT = 8 };
    gmem<T> at;
    int64_t cols;
    Pack<T, W> kept[KEPT];

    __device__ int64_t column(int64_t i) const { return (i * WARP + lane_number()) * W; }

    /* Stores make(c), a pack, in every column c of this lane. */
    template <class Make> __device__ void fill(Make make)
    {
#pragma unroll
        for (int i = 0; i < KEPT; i++)
            if (column(i) < cols) store_pack<W>(at, column(i), cols, kept[i] = make(column(i)));
        for (int64_t i = KEPT; column(i) < cols; i++) store_pack<W>(at, column(i), cols, make(column(i)));
    }

    /* Sum of (x - mean)^power over the row; every lane gets it. */
    template <int power> __device__ float moment(float mean) const
    {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < KEPT; i++)
            if (column(i) < cols) sum = add_powers<power>(sum, kept[i], mean, cols - column(i));
        for (int64_t i = KEPT; column(i) < cols; i++)
            sum = add_powers<power>(sum, load_pack<W>(at, column(i), cols), mean, cols - column(i));
        return warp_sum(sum);
    }

    /* What the norm that comes next needs: mean and 1 / sqrt(variance + eps), or 1 / sqrt(mean square + eps). */
    __device__ void write_stats(gmem<float> stats, NormKind kind, float eps) const
    {
        float mean = 0;
        if (kind == NORM_LAYERNORM) mean = f32_div(moment<1>(0), (float)cols);
        float rstd = f32_div(1.0f, sqrtf(f32_div(moment<2>(mean), (float)cols) + eps));
        if (lane_number()) return;
        if (kind == NORM_LAYERNORM) stats.st(0, mean);
        stats.st(kind == NORM_LAYERNORM ? 1 : 0, rstd);
    }

  private:
    template <int power> static __device__ float add_powers(float sum, Pack<T, W> p, float mean, int64_t left)
    {
#pragma unroll
        for (int j = 0; j < W; j++) {
            float d = to_f32(p.v[j]) - mean;
            if (j < left) sum = power == 1 ? sum + d : fmaf(d, d, sum);
        }
        return sum;
    }
};

#endif
