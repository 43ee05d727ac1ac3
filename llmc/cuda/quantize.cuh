/* Making the NVFP4 copies of an operand: what the files that quantize share. Definition: nvfp4.h and cpu/quantize.c.
 *
 *     tensor scale amax    find_amax: reads the source, magnitudes of both copies; its last block makes their scales
 *                          quantize_tile: reads the source again, writes codes and block scales
 *     tensor scale pow2    quantize_tile: writes codes and block scales that wait; its last block makes the scales
 *                          finish_block_scales: turns what waits into E4M3
 *     weights in 16 x 16   find_amax, quantize_squares: codes by rows and one scale a square; cuda_weight_unpack: the rest
 *
 * No copy of the source is written but the plain view that was asked for. A source that is computed (views.cuh) is computed
 * in FP32 and rounded to BF16, as a matrix would hold it, before anything else.
 *
 * Floor 2.
 */
#ifndef LLMC_CUDA_QUANTIZE_CUH
#define LLMC_CUDA_QUANTIZE_CUH

#include "nvfp4_view.cuh"
#include "quantize_block.cuh"
#include "views.cuh"

enum { TILE = 128, TILE_SCALES = TILE * TILE / 16 };

typedef struct { /* in device memory, of one copy */
    Nvfp4Scale tensor;
    float unused;
} DeviceScale;

typedef struct { /* in device memory, zero between operations */
    uint32_t amax[2], nan[2], blocks_done, unused;
} DeviceSeen;

typedef struct { /* one copy to make; absent: made is false */
    bool made, rht;
    Nvfp4Form form;
    gmem<uint32_t> codes; /* words of 8 codes */
    gmem<uint32_t> scales;
    gmem<float> tensor_scale;
    int64_t outer, K;
    int ld_words;    /* words of a row of codes */
    int scale_tiles; /* along K */
    uint32_t place;  /* Philox: layer and role */
} QuantizeCopy;

typedef struct {
    QuantizeCopy copy[2]; /* by rows, by columns */
    int rows, part_cols;  /* of the source: 32 bits, for 64 would take a dozen instructions more a thread */
    bool pow2;
    gmem<bf16> plain; /* [rows, plain_ld], or absent */
    int64_t plain_ld;
    gmem<float> partial;         /* sums over SUM_ROWS rows, two rows of all columns apart, or absent */
    gmem<const DeviceStep> step; /* absent: random says all */
    RandomPlace random;
    gmem<DeviceSeen> seen;
    gmem<DeviceScale> scale;  /* [2] */
    gmem<uint32_t> tile_base; /* [tiles][2]: what is to be added to the bytes that wait */
    gmem<float> amax;         /* find_amax: write it here, and make no scales */
} QuantizeJob;

/* ---- memory ---- */

enum { MEASURE_BLOCKS = 64, MEASURE_THREADS = 64 };

void quantize_open(void);                          /* what a process has once */
size_t quantize_workspace_bytes(const Need *need); /* bases of tiles; 0: nothing is quantized */
void quantize_workspace_set(void *memory);

/* ---- on the host ---- */

/* Where random bits come from: the step, or the weights' own numbers. */
typedef struct {
    bool of_step;
    uint64_t seed;
    uint32_t step;
    int64_t row0;
} QuantizePlace;

bool wants_quantized(const Operand *o, unsigned views);
/* Job for the asked views of an operand that are NVFP4; part_cols: columns of one part of the source. */
QuantizeJob quantize_job(const Operand *o, unsigned views, QuantizePlace place, int64_t rows, int64_t part_cols);
void quantize_scales_from(const QuantizeJob &job, const float *amax); /* of a tensor whose amax is known */
void quantize_finish(const char *op, const QuantizeJob &job, int parts);
/* Of the copies of a job, from a matrix: defined in operand_tensor.cu. dbias, where it is not absent, += the sums over
 * rows. */
void quantize_tensor(const char *op, Operand *o, Tensor x, unsigned views, const Targets &to, QuantizePlace place,
                     Tensor dbias);
void find_amax_of_tensor(const char *op, const QuantizeJob &job, Tensor x);
void measure_square_tensor(const QuantizeJob &job, Tensor x, const uint8_t *squares); /* with its block scales */
gmem<uint64_t> quantize_stats(void);         /* where measuring blocks leave theirs */
void quantize_collect_stats(uint32_t place); /* adds them to the caller's (cuda.measure) */

/* An element that all lanes of a warp want: one loads it. */
template <class T> __device__ inline T ld_warp(gmem<const T> from, int64_t i)
{
    T x = lane_number() == 0 ? from.ld(i) : T{};
    return __shfl_sync(0xffffffffu, x, 0);
}

/* ---- the last block of a kernel makes the tensor's scales ---- */

__device__ inline gmem<uint32_t> seen_field(gmem<DeviceSeen> seen, size_t offset)
{
    return gmem<uint32_t>((void *)((char *)seen.p + offset));
}

/* Of one copy, by one thread. */
__device__ inline void make_scale(const QuantizeJob &job, int i, float amax, bool nan)
{
    DeviceScale s;
    s.tensor = nvfp4_scale(amax, nan, &job.copy[i].form);
    s.unused = 0;
    gmem<uint64_t> to((void *)(job.scale.p + i));
    uint64_t word[sizeof s / 8];
    memcpy(word, &s, sizeof s);
#pragma unroll
    for (int k = 0; k < (int)(sizeof s / 8); k++) to.st(k, word[k]);
    job.copy[i].tensor_scale.st(0, s.tensor.stored);
}

/* By one thread of every block, with what its block has seen of both copies. The counters are zero again at the end. */
__device__ inline void publish_seen(const QuantizeJob &job, const Seen (&block)[2])
{
    gmem<uint32_t> amax = seen_field(job.seen, offsetof(DeviceSeen, amax));
    gmem<uint32_t> nan = seen_field(job.seen, offsetof(DeviceSeen, nan));
    gmem<uint32_t> done = seen_field(job.seen, offsetof(DeviceSeen, blocks_done));
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (!job.copy[i].made) continue;
        amax.atomic_max(i, block[i].amax);
        if (block[i].nan) nan.atomic_max(i, 1u);
    }
    __threadfence();
    if (done.atomic_add(0, 1u) + 1 != gridDim.x * gridDim.y) return;
    __threadfence();
    done.st(0, 0u);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (!job.copy[i].made) continue;
        float largest = f32_from_bits(amax.atomic_max(i, 0u));
        bool has_nan = nan.atomic_max(i, 0u);
        amax.st(i, 0u);
        nan.st(i, 0u);
        if (job.amax.absent())
            make_scale(job, i, largest, has_nan);
        else
            job.amax.st(0, has_nan ? f32_from_bits(0x7fc00000u) : largest);
    }
}

/* All threads of a block: what they have seen, together, for thread 0 to publish. `most` is shared, zero before. */
__device__ inline void publish_block(const QuantizeJob &job, const Seen (&mine)[2], uint32_t *most)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t amax = mine[i].amax, nan = mine[i].nan;
        for (int distance = 16; distance; distance /= 2) {
            uint32_t other = __shfl_xor_sync(0xffffffffu, amax, distance);
            amax = other > amax ? other : amax;
            nan |= __shfl_xor_sync(0xffffffffu, nan, distance);
        }
        if (lane_number() == 0) {
            atomicMax(&most[2 * i], amax);
            atomicMax(&most[2 * i + 1], nan);
        }
    }
    __syncthreads();
    if (threadIdx.x) return;
    Seen block[2];
#pragma unroll
    for (int i = 0; i < 2; i++) block[i] = Seen{most[2 * i], most[2 * i + 1]};
    publish_seen(job, block);
}

#endif
