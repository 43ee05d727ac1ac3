/* How the kernels that quantize load a source (views.cuh): 16 columns of a row as words of two BF16.
 *
 * Floor 2.
 */
#ifndef LLMC_CUDA_QUANTIZE_LOAD_CUH
#define LLMC_CUDA_QUANTIZE_LOAD_CUH

#include "quantize.cuh"

#ifdef __CUDA_ARCH__
#define ASSUME(condition) __builtin_assume(condition)
#else
#define ASSUME(condition) (void)0
#endif

/* `rows` rows on in a matrix with rows of less than 2^32 bytes: one instruction, of 64-bit offsets it would be four. */
template <class T> __device__ inline gmem<T> rows_on(gmem<T> from, int rows, int64_t ld)
{
    return gmem<T>((T *)((char *)from.p + (uint64_t)(uint32_t)rows * (uint32_t)(ld * (int64_t)sizeof(T))));
}

/* How much of a tile is left where `left` of the matrix is. */
__device__ inline int tile_end(int64_t left) { return left < TILE ? (int)left : TILE; }

/* A source in two steps. Early: what a thread loads and can hold as words of two BF16, before a barrier. Late: what the
 * rows and columns of a whole tile share, loaded once, in shared memory (`fill`, by all threads), and applied to those
 * words after the barrier (`finish`; row and column are of the tile). Most sources do all early; with W = 1 all do. */
template <class Source, int W> struct SourceTile {
    using Early = Source;
    static __device__ const Early &early(const Source &from) { return from; }
    __device__ void fill(const Source &, int64_t, int64_t, int, int) {}
    template <int WORDS> __device__ void finish(uint32_t *, int, int) const {}
};

/* 16 columns from c on, of rows from r0 on, as words of two BF16; zeros beyond the columns. */
template <class Source, int W> struct BlockLoader {
    static constexpr int parts = Source::parts, kept = W > 1 ? 16 / W : 1; /* columns of single elements are not kept */
    typename Source::template Columns<W> columns[kept];
    const Source &from;
    int64_t c, part_cols, r0;

    __device__ BlockLoader(const Source &from_, int64_t c_, int64_t part_cols_, int64_t r0_)
        : from(from_), c(c_), part_cols(part_cols_), r0(r0_)
    {
#pragma unroll
        for (int i = 0; i < kept; i++) {
            if (W == 1 || c >= part_cols) continue;
            ASSUME(c + i * W + W <= from.part_cols());
            columns[i] = from.template columns<W>(c + i * W);
        }
    }
    __device__ void load(uint32_t (&word)[parts][8], int row) const
    {
        float x[parts][16];
#pragma unroll
        for (int i = 0; i < 16; i += W) {
            float part[parts][W] = {};
            ASSUME(W == 1 || c + i + W <= from.part_cols());
            if (W > 1)
                from.template load<W>(part, r0 + row, c + i, columns[i / W % kept]);
            else if (c + i < part_cols)
                from.template load<W>(part, r0 + row, c + i, from.template columns<W>(c + i));
#pragma unroll
            for (int p = 0; p < parts; p++)
#pragma unroll
                for (int j = 0; j < W; j++) x[p][i + j] = part[p][j];
        }
#pragma unroll
        for (int p = 0; p < parts; p++)
#pragma unroll
            for (int j = 0; j < 8; j++) word[p][j] = bf16x2(x[p][2 * j], x[p][2 * j + 1]);
    }
};

/* A BF16 matrix is its own words. */
template <> struct BlockLoader<TensorSource<bf16>, 8> {
    gmem<const bf16> first;
    int64_t ld;

    __device__ BlockLoader(const TensorSource<bf16> &from, int64_t c, int64_t, int64_t r0)
        : first(from.x.row(r0) + c), ld(from.x.ld)
    {
    }
    __device__ void load(uint32_t (&word)[1][8], int row) const
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Pack<bf16, 8> pack = rows_on(first, row, ld).template ld_pack<8>(8 * i);
            memcpy(word[0] + 4 * i, &pack, sizeof pack);
        }
    }
};

#endif
