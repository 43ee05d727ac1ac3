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

/* 16 columns of one row from c on, as words of two BF16; zeros beyond the matrix. */
template <class Source, int W> struct BlockLoader {
    static constexpr int parts = Source::parts, kept = W > 1 ? 16 / W : 1; /* columns of single elements are not kept */
    typename Source::template Columns<W> columns[kept];

    __device__ BlockLoader(const Source &from, int64_t c, int64_t part_cols)
    {
#pragma unroll
        for (int i = 0; i < kept; i++) {
            if (W == 1 || c >= part_cols) continue;
            ASSUME(c + i * W + W <= from.part_cols());
            columns[i] = from.template columns<W>(c + i * W);
        }
    }
    __device__ void load(uint32_t (&word)[parts][8], const Source &from, int64_t r, int64_t c, int64_t part_cols) const
    {
        float x[parts][16];
#pragma unroll
        for (int i = 0; i < 16; i += W) {
            float part[parts][W] = {};
            ASSUME(W == 1 || c + i + W <= from.part_cols());
            if (W > 1)
                from.template load<W>(part, r, c + i, columns[i / W % kept]);
            else if (c + i < part_cols)
                from.template load<W>(part, r, c + i, from.template columns<W>(c + i));
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
    __device__ BlockLoader(const TensorSource<bf16> &, int64_t, int64_t) {}
    __device__ void load(uint32_t (&word)[1][8], const TensorSource<bf16> &from, int64_t r, int64_t c, int64_t) const
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Pack<bf16, 8> pack = from.x.row(r).template ld_pack<8>(c + 8 * i);
            memcpy(word[0] + 4 * i, &pack, sizeof pack);
        }
    }
};

#endif
