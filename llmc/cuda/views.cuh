/* Matrices that are computed element by element and written in one or more places: operands, copies.
 *
 * What is computed is a source: a struct whose `load` gives W elements of a row. Where it goes are targets. The kernels
 * here join any source to plain targets, with or without the sums over tokens that a bias gradient needs; a kernel that
 * quantizes takes the same sources.
 *
 *     struct Source {
 *         static constexpr int wide;    elements of a lane where all is aligned
 *         static constexpr int parts;   a load gives so many packs: columns c, part_cols + c, ...
 *         int64_t part_cols() const;
 *         template <int W> using Columns; what is the same in all rows, loaded once: gains, or NoColumns
 *         template <int W> __device__ Columns<W> columns(int64_t c) const;
 *         template <int W> __device__ void load(float (&out)[parts][W], int64_t r, int64_t c, Columns<W>) const;
 *     };
 *
 * Floor 2.
 */
#ifndef LLMC_CUDA_VIEWS_CUH
#define LLMC_CUDA_VIEWS_CUH

#include "rows.cuh"

struct NoColumns {
};

struct Target {
    void *data;
    int64_t ld;
    bool half; /* BF16, else FP32 */
};

struct Targets { /* plain views of one operand: two at most */
    Target to[2];
    int count;
    bool aligned;
};

inline void add_target(Targets *t, Tensor to)
{
    if (t->count && t->to[0].data == to.data) return; /* plain views are usually one memory */
    t->aligned = t->aligned && is_aligned(to);
    t->to[t->count++] = Target{to.data, to.ld, to.dtype == DTYPE_BF16};
}

/* The asked views that are plain, but those that are the source. */
inline Targets targets_of(const Operand *o, unsigned views, const void *source)
{
    Targets t = {};
    const View *view[2] = {&o->row, &o->col};
    t.aligned = true;
    for (int i = 0; i < 2; i++)
        if (views >> i & 1 && format_is_plain(view[i]->format.format) && view[i]->data != source)
            add_target(&t, Tensor{view[i]->data, view_dtype(view[i]), o->rows, o->cols, o->cols});
    return t;
}

template <int W>
__device__ inline void store_targets(const Targets &t, int64_t r, int64_t c, int64_t col0, int64_t cols,
                                     const float (&x)[W])
{
#pragma unroll
    for (int i = 0; i < 2; i++) { /* the same way for all lanes */
        if (i >= t.count) return;
        int64_t at = r * t.to[i].ld + col0;
        if (t.to[i].half)
            store_row<W>(gmem<bf16>(t.to[i].data) + at, c, cols, x);
        else
            store_row<W>(gmem<float>(t.to[i].data) + at, c, cols, x);
    }
}

/* A warp takes 32 W columns of ROWS rows, a lane W of them; its loads are all on their way before it stores, and what
 * is the same for all rows (a gain) is loaded once. Bytes: those of the source once, those of each target once. Three
 * blocks a multiprocessor leave 80 registers a thread: nvcc on its own stops at 64 and spills. */
template <class Source> constexpr int rows_of_warp = Source::parts == 1 ? 4 : 2;

template <class Source, int W>
__global__ void __launch_bounds__(BLOCK, 3)
    write_views(Source from, Targets to, int64_t rows, int64_t cols, uint32_t chunks)
{
    constexpr int ROWS = rows_of_warp<Source>;
    Place place = warp_place(chunks, WARP * W);
    int64_t r = place.row * ROWS, c = place.col + lane_number() * W;
    float x[ROWS][Source::parts][W];
    if (r >= rows || c >= cols) return;
    typename Source::template Columns<W> columns = from.template columns<W>(c);
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        if (r + i < rows) from.template load<W>(x[i], r + i, c, columns);
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int part = 0; part < Source::parts; part++)
            if (r + i < rows) store_targets<W>(to, r + i, c, part * cols, cols, x[i][part]);
}

/* The same with partial sums over SUM_ROWS rows: a warp takes 32 W columns of them, a lane W columns from row to row,
 * so a column is added in the order of its rows. The sums cost nothing but registers. */
template <class Source, int W>
__global__ void __launch_bounds__(BLOCK)
    write_views_and_sums(Source from, Targets to, gmem<float> partial, int64_t rows, int64_t cols, uint32_t chunks)
{
    constexpr int BATCH = rows_of_warp<Source>; /* rows whose loads are on their way at once */
    Place place = warp_place(chunks, WARP * W);
    int64_t tile = place.row, end = (tile + 1) * SUM_ROWS, c = place.col + lane_number() * W;
    if (end > rows) end = rows;
    if (tile * SUM_ROWS >= rows || c >= cols) return;
    typename Source::template Columns<W> columns = from.template columns<W>(c);
    float sum[Source::parts][W] = {};
#pragma unroll 1
    for (int64_t r = tile * SUM_ROWS; r < end; r += BATCH) {
        float x[BATCH][Source::parts][W];
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (r + i < end) from.template load<W>(x[i], r + i, c, columns);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (r + i >= end) continue;
#pragma unroll
            for (int part = 0; part < Source::parts; part++) {
                store_targets<W>(to, r + i, c, part * cols, cols, x[i][part]);
#pragma unroll
                for (int j = 0; j < W; j++) sum[part][j] += x[i][part][j];
            }
        }
    }
#pragma unroll
    for (int part = 0; part < Source::parts; part++)
        store_row<W>(partial + 2 * tile * Source::parts * cols + part * cols, c, cols, sum[part]);
}

template <class Source, int W> void launch_views(const Source &from, const Targets &to, int64_t rows, int64_t part_cols)
{
    int64_t chunks = ceil_div(part_cols, WARP * W), warps = ceil_div(rows, rows_of_warp<Source>) * chunks;
    write_views<Source, W>
        <<<blocks_for_warps(warps), BLOCK, 0, cuda.stream>>>(from, to, rows, part_cols, (uint32_t)chunks);
}

template <class Source, int W>
void launch_views_and_sums(const Source &from, const Targets &to, int64_t rows, int64_t part_cols)
{
    int64_t chunks = ceil_div(part_cols, WARP * W), warps = ceil_div(rows, SUM_ROWS) * chunks;
    write_views_and_sums<Source, W>
        <<<blocks_for_warps(warps), BLOCK, 0, cuda.stream>>>(from, to, cuda.partial, rows, part_cols, (uint32_t)chunks);
}

/* Writes the source to its targets. aligned: the source's tensors are. part_cols: columns of one part. */
template <class Source>
void make_views(const char *op, const Source &from, const Targets &to, bool aligned, int64_t rows, int64_t part_cols)
{
    if (!rows || !part_cols || !to.count) return;
    if (aligned && to.aligned)
        launch_views<Source, Source::wide>(from, to, rows, part_cols);
    else
        launch_views<Source, 1>(from, to, rows, part_cols);
    cuda_check(cudaGetLastError(), op);
}

/* The same, and dbias += the sums over rows, where dbias is not absent. */
template <class Source>
void make_views_and_sums(const char *op, const Source &from, const Targets &to, bool aligned, int64_t rows,
                         int64_t part_cols, Tensor dbias)
{
    if (!rows || !part_cols) return;
    if (!dbias.data) {
        make_views(op, from, to, aligned, rows, part_cols);
        return;
    }
    Tensor sums = {cuda.partial.p, DTYPE_FP32, 2, part_cols, part_cols};
    if (aligned && to.aligned && is_aligned(sums))
        launch_views_and_sums<Source, Source::wide>(from, to, rows, part_cols);
    else
        launch_views_and_sums<Source, 1>(from, to, rows, part_cols);
    cuda_check(cudaGetLastError(), op);
    cuda_add_partial_sums(dbias, ceil_div(rows, SUM_ROWS), 0);
}

/* ---- the simplest source: a matrix as it is ---- */

template <class T> struct TensorSource {
    static constexpr int wide = 16 / sizeof(T), parts = 1;
    Matrix<const T> x;

    __device__ int64_t part_cols() const { return x.cols; }
    template <int W> using Columns = NoColumns;
    template <int W> __device__ NoColumns columns(int64_t) const { return {}; }
    template <int W> __device__ void load(float (&out)[1][W], int64_t r, int64_t c, NoColumns) const
    {
        load_row<W>(out[0], x.row(r), c, x.cols);
    }
};

#endif
