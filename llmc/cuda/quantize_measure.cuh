/* What quantization did to an operand, for telemetry: a slow pass over the source after its copies were made, by the
 * definition of cpu/quantize.c (measure_block). A thread takes blocks of 16 far apart; sums are made in a fixed order: of a
 * thread's blocks, of a block's threads, and on the host of all blocks.
 *
 * Floor 2.
 */
#ifndef LLMC_CUDA_QUANTIZE_MEASURE_CUH
#define LLMC_CUDA_QUANTIZE_MEASURE_CUH

#include "quantize.cuh"

typedef struct {
    QuantizeCopy copy;
    bool col;
    int64_t rows, cols;
    gmem<const DeviceScale> scale;
    gmem<const uint8_t> squares; /* block scales of 16 x 16 blocks, or absent */
    gmem<uint64_t> stats;        /* [MEASURE_BLOCKS] QuantStats */
} MeasureJob;

/* Element (r, c) in BF16; 0 beyond the matrix. */
template <class Source>
__device__ inline float element_at(const Source &from, const MeasureJob &job, int64_t r, int64_t c)
{
    float x[1][1];
    if (r >= job.rows || c >= job.cols) return 0.0f;
    from.template load<1>(x, r, c, from.template columns<1>(c));
    return to_f32(to_bf16(x[0][0]));
}

__device__ inline float magnitude(float amax, float x) { return f32_max(f32_abs(x), amax); }

/* Adds one block: outer index of the copy, and which block of it. */
template <class Source>
__device__ inline void measure_block(QuantStats *s, const Source &from, const MeasureJob &job, const Nvfp4Scale &tensor,
                                     int64_t outer, int64_t block)
{
    const Nvfp4Form *form = &job.copy.form;
    int64_t blocks = blocks_of(job.copy.K), n = job.copy.K - 16 * block < 16 ? job.copy.K - 16 * block : 16;
    float x[16], amax = 0, encode;
    for (int i = 0; i < 16; i++)
        x[i] = job.col ? element_at(from, job, 16 * block + i, outer) : element_at(from, job, outer, 16 * block + i);
    if (job.copy.rht) nvfp4_rht16(x);
    for (int i = 0; i < 16; i++) amax = magnitude(amax, x[i]);
    uint8_t scale;
    if (job.squares.absent()) {
        gmem<const uint8_t> tiles((const uint8_t *)job.copy.scales.p);
        scale = tiles.ld((int64_t)nvfp4_tile_offset(outer, block, blocks));
    } else {
        scale = job.squares.ld(outer / 16 * blocks + block);
        for (int i = 0; i < 256; i++)
            amax = magnitude(amax, element_at(from, job, outer / 16 * 16 + i / 16, 16 * block + i % 16));
    }
    float decode = nvfp4_decode_scale(scale, tensor.stored, form);
    nvfp4_block_scale(amax, &tensor, form, &encode);
    if (form->four_over_six) encode = nvfp4_encode_block(scale, tensor.decode);
    s->blocks++;
    s->zero_blocks += scale == 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t word = job.copy.codes.ld(outer * job.copy.ld_words + 2 * block + i / 8);
        float after = f32_mul(e2m1_to_f32((uint8_t)(word >> 4 * (i % 8) & 15)), decode);
        double d = (double)after - (double)x[i];
        s->elements++;
        s->zeroed += x[i] != 0 && after == 0;
        s->clipped += f32_abs(f32_mul(x[i], encode)) > 6.0f;
        s->error2 += d * d;
        s->signal2 += (double)x[i] * (double)x[i];
    }
}

template <class Source> __global__ void __launch_bounds__(MEASURE_THREADS, 8) measure_copy(Source from, MeasureJob job)
{
    __shared__ QuantStats stats[MEASURE_THREADS];
    Nvfp4Scale tensor = load_struct(job.scale).tensor;
    int64_t blocks = blocks_of(job.copy.K), all = job.copy.outer * blocks;
    QuantStats mine = {};
    for (int64_t i = (int64_t)blockIdx.x * MEASURE_THREADS + threadIdx.x; i < all;
         i += MEASURE_BLOCKS * MEASURE_THREADS)
        measure_block(&mine, from, job, tensor, i / blocks, i % blocks);
    stats[threadIdx.x] = mine;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < MEASURE_THREADS; i++) quant_stats_add(&mine, &stats[i]);
    uint64_t word[sizeof mine / 8];
    memcpy(word, &mine, sizeof mine);
    for (int i = 0; i < (int)(sizeof mine / 8); i++) job.stats.st(blockIdx.x * (sizeof mine / 8) + i, word[i]);
}

/* One copy of a job, from its source in one part. squares: see MeasureJob. */
template <class Source> void measure_one(const Source &from, const QuantizeJob &job, int i, gmem<const uint8_t> squares)
{
    MeasureJob m = {job.copy[i], i == 1,          job.rows, job.part_cols, gmem<const DeviceScale>(job.scale.p + i),
                    squares,     quantize_stats()};
    if (!squares.absent()) m.copy.outer = job.rows; /* perhaps a part of the weight */
    measure_copy<Source><<<MEASURE_BLOCKS, MEASURE_THREADS, 0, cuda.stream>>>(from, m);
    cuda_check(cudaGetLastError(), "measure");
    quantize_collect_stats(job.copy[i].place);
}

template <class Source> void measure_copies(const Source &from, const QuantizeJob &job)
{
    for (int i = 0; i < 2; i++)
        if (cuda.measure && job.copy[i].made) measure_one(from, job, i, gmem<const uint8_t>((const uint8_t *)NULL));
}

#endif
