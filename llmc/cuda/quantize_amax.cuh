/* The magnitudes of both copies of a source, with tensor scales of mode amax: a thread takes 16 rows x W columns in
 * registers, so that it can transform columns; a block 128 rows. Reads 2 bytes an element (BF16); the last block makes the tensor's scales.
 *
 * Floor 2.
 */
#ifndef LLMC_CUDA_QUANTIZE_AMAX_CUH
#define LLMC_CUDA_QUANTIZE_AMAX_CUH

#include "quantize_load.cuh"

/* Twice as wide would spill registers. */
template <class Source> constexpr int amax_width = Source::wide / (2 * Source::parts);

/* 16 rows of words of one part: what both copies see. */
template <int WORDS, int parts>
__device__ inline void see_columns(Seen (&seen)[2], const uint32_t (&word)[16][parts][WORDS], int part,
                                   const QuantizeJob &job)
{
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
        uint32_t column[16], larger = 0, nan = 0;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            column[i] = word[i][part][j];
            larger = bf16x2_larger(larger, column[i]);
            nan = bf16x2_larger<true>(nan, column[i]);
        }
        see(&seen[0], larger_half(larger), nan);
        if (!job.copy[1].rht) {
            see(&seen[1], larger_half(larger), nan);
            continue;
        }
        rht16_rounded(column);
        larger = nan = 0;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            larger = bf16x2_larger(larger, column[i]);
            nan = bf16x2_larger<true>(nan, column[i]);
        }
        see(&seen[1], larger_half(larger), nan);
    }
}

/* W columns of one row as words of two BF16. */
template <int W, class Source, int WORDS>
__device__ inline void load_words(uint32_t (&word)[Source::parts][WORDS], const Source &from, int64_t r, int64_t c,
                                  const typename Source::template Columns<W> &columns)
{
    if constexpr (W > 1 && std::is_same<Source, TensorSource<bf16>>::value) {
        Pack<bf16, W> pack = from.x.row(r).template ld_pack<W>(c);
        memcpy(word[0], &pack, sizeof pack);
    } else {
        float x[Source::parts][W];
        from.template load<W>(x, r, c, columns);
#pragma unroll
        for (int part = 0; part < Source::parts; part++)
#pragma unroll
            for (int j = 0; j < W; j += 2) word[part][j / 2] = bf16x2(x[part][j], W == 1 ? 0.0f : x[part][(j + 1) % W]);
    }
}

template <class Source, int W> __global__ void __launch_bounds__(BLOCK, 2) find_amax(Source from, QuantizeJob job)
{
    using Late = SourceTile<Source, W>;
    constexpr int parts = Source::parts, WORDS = (W + 1) / 2;
    __shared__ uint32_t most[4];
    __shared__ Late late;
    int row = (int)threadIdx.x / WARP * 16, column = lane_number() * W; /* in the tile */
    int64_t tile_row = (int64_t)blockIdx.y * TILE, tile_col = (int64_t)blockIdx.x * (WARP * W);
    int64_t r0 = tile_row + row, c = tile_col + column;
    bool inside = r0 < job.rows && c < job.part_cols;
    Seen seen[2] = {};
    uint32_t word[16][parts][WORDS] = {};
    if (inside) {
        const typename Late::Early &early = Late::early(from);
        ASSUME(c + W <= early.part_cols());
        typename Late::Early::template Columns<W> columns = early.template columns<W>(c);
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (r0 + i < job.rows) load_words<W>(word[i], early, r0 + i, c, columns);
    }
    if (threadIdx.x < 4) most[threadIdx.x] = 0;
    late.fill(from, tile_row, tile_col, tile_end(job.rows - tile_row), tile_end(job.part_cols - tile_col));
    __syncthreads();
    if (inside) {
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (r0 + i < job.rows) late.template finish<WORDS>(word[i][0], row + i, column);
#pragma unroll
        for (int part = 0; part < parts; part++) see_columns<WORDS>(seen, word, part, job);
    }
    publish_block(job, seen, most);
}

template <class Source, int W> void launch_find_amax(const Source &from, const QuantizeJob &job)
{
    dim3 grid((unsigned)ceil_div(job.part_cols, WARP * W), (unsigned)ceil_div(job.rows, TILE));
    find_amax<Source, W><<<grid, BLOCK, 0, cuda.stream>>>(from, job);
}

#endif
