/* The magnitudes of both copies of a source, with tensor scales of mode amax: a thread takes 16 rows x W columns in
 * registers, so that it can transform columns. Reads 2 bytes an element (BF16); the last block makes the tensor's scales.
 *
 * Floor 2.
 */
#ifndef LLMC_CUDA_QUANTIZE_AMAX_CUH
#define LLMC_CUDA_QUANTIZE_AMAX_CUH

#include "quantize_load.cuh"

/* Twice as wide would spill registers. */
template <class Source> constexpr int amax_width = Source::wide / (2 * Source::parts);

/* 16 rows of words of one part: what both copies see. */
template <int WORDS>
__device__ inline void see_columns(Seen (&seen)[2], const uint32_t (&word)[16][WORDS], const QuantizeJob &job)
{
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
        uint32_t column[16], larger = 0, nan = 0;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            column[i] = word[i][j];
            larger = bf16x2_larger(larger, column[i]);
            nan |= nan_halves(column[i]);
        }
        see(&seen[0], larger_half(larger), nan);
        if (!job.copy[1].rht) {
            see(&seen[1], larger_half(larger), nan);
            continue;
        }
        F32x2 x[16];
#pragma unroll
        for (int i = 0; i < 16; i++) x[i] = both_halves(column[i]);
        rht16_rounded(column, x);
        larger = nan = 0;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            larger = bf16x2_larger(larger, column[i]);
            nan |= nan_halves(column[i]);
        }
        see(&seen[1], larger_half(larger), nan);
    }
}

template <class Source, int W>
__global__ void __launch_bounds__(BLOCK, 2) find_amax(Source from, QuantizeJob job, uint32_t chunks)
{
    constexpr int parts = Source::parts, WORDS = (W + 1) / 2;
    __shared__ uint32_t most[4];
    if (threadIdx.x < 4) most[threadIdx.x] = 0;
    __syncthreads();
    Place place = warp_place(chunks, WARP * W);
    int64_t r0 = place.row * 16, c = place.col + lane_number() * W;
    Seen seen[2] = {};
    if (r0 < job.rows && c < job.part_cols) {
        ASSUME(c + W <= from.part_cols());
        typename Source::template Columns<W> columns = from.template columns<W>(c);
        uint32_t word[parts][16][WORDS] = {};
#pragma unroll
        for (int i = 0; i < 16; i++) {
            if (r0 + i >= job.rows) continue;
            float x[parts][W];
            from.template load<W>(x, r0 + i, c, columns);
#pragma unroll
            for (int part = 0; part < parts; part++)
#pragma unroll
                for (int j = 0; j < W; j += 2)
                    word[part][i][j / 2] = bf16x2(x[part][j], W == 1 ? 0.0f : x[part][(j + 1) % W]);
        }
#pragma unroll
        for (int part = 0; part < parts; part++) see_columns<WORDS>(seen, word[part], job);
    }
    publish_block(job, seen, most);
}

template <class Source, int W> void launch_find_amax(const Source &from, const QuantizeJob &job)
{
    int64_t chunks = ceil_div(job.part_cols, WARP * W), warps = ceil_div(job.rows, 16) * chunks;
    find_amax<Source, W><<<blocks_for_warps(warps), BLOCK, 0, cuda.stream>>>(from, job, (uint32_t)chunks);
}

#endif
