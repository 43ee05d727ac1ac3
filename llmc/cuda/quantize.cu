/* Quantizing: the job that the kernels of quantize_tile.cuh get, its workspace, and the small kernels before and after
 * them.
 */
#include "quantize_measure.cuh"

#include <string.h>

/* ---- memory ---- */

static struct {
    gmem<DeviceSeen> seen;
    gmem<DeviceScale> scale;
    gmem<uint64_t> stats;
    gmem<uint32_t> tile_base; /* in the workspace */
} space;

void quantize_open(void)
{
    void *seen, *scale, *stats;
    cuda_check(cudaMalloc(&seen, sizeof(DeviceSeen)), "cudaMalloc");
    cuda_check(cudaMalloc(&scale, 2 * sizeof(DeviceScale)), "cudaMalloc");
    cuda_check(cudaMalloc(&stats, MEASURE_BLOCKS * sizeof(QuantStats)), "cudaMalloc");
    cuda_check(cudaMemsetAsync(seen, 0, sizeof(DeviceSeen), cuda.stream), "quantize_open");
    cuda_check(cudaMemsetAsync(scale, 0, 2 * sizeof(DeviceScale), cuda.stream),
               "quantize_open"); /* read even if absent */
    space.seen = gmem<DeviceSeen>(seen);
    space.scale = gmem<DeviceScale>(scale);
    space.stats = gmem<uint64_t>(stats);
}

size_t quantize_workspace_bytes(const Need *need)
{
    int64_t rows = max_i64(need->N, need->weight_rows), tiles = ceil_div(rows, TILE) * ceil_div(need->cols, TILE / 2);
    return need->weight_rows ? (size_t)tiles * 2 * sizeof(uint32_t) : 0;
}

void quantize_workspace_set(void *memory) { space.tile_base = gmem<uint32_t>(memory); }

/* ---- jobs ---- */

bool wants_quantized(const Operand *o, unsigned views)
{
    return (views & VIEW_ROW && o->row.format.format == FORMAT_NVFP4) ||
           (views & VIEW_COL && o->col.format.format == FORMAT_NVFP4);
}

static QuantizeCopy copy_of(const Operand *o, const View *v, bool col)
{
    Nvfp4Copy c = nvfp4_copy(v, col, o->rows, o->cols);
    QuantizeCopy q = {};
    q.made = true;
    q.rht = v->format.rht;
    q.form = v->format.nvfp4;
    q.codes = gmem<uint32_t>((void *)c.codes);
    q.scales = gmem<uint32_t>((void *)c.scales);
    q.tensor_scale = gmem<float>(c.tensor_scale);
    q.outer = c.outer, q.K = c.K, q.ld_words = (int)(c.ld / 8);
    q.scale_tiles = (int)ceil_div(c.K, 64);
    q.place = (uint32_t)o->layer << 16 | (uint32_t)v->format.role << 8;
    return q;
}

QuantizeJob quantize_job(const Operand *o, unsigned views, QuantizePlace place, int64_t rows, int64_t part_cols)
{
    QuantizeJob job = {};
    for (int col = 0; col < 2; col++) {
        const View *v = col ? &o->col : &o->row;
        if (!(views & (col ? VIEW_COL : VIEW_ROW)) || v->format.format != FORMAT_NVFP4) continue;
        job.copy[col] = copy_of(o, v, col);
        job.pow2 = v->format.nvfp4.tensor_scale == TENSOR_SCALE_POW2;
    }
    if (rows > INT32_MAX / 2 - TILE || part_cols > INT32_MAX / 4 - TILE)
        die("an operand of %lld x %lld is too large to quantize", (long long)rows, (long long)part_cols);
    job.rows = (int)rows, job.part_cols = (int)part_cols;
    if (place.of_step) job.step = cuda.step;
    job.random = random_place(place.of_step ? cuda.seed : place.seed, place.step, place.row0);
    job.seen = space.seen, job.scale = space.scale, job.tile_base = space.tile_base;
    return job;
}

/* ---- a tensor whose amax is known ---- */

__global__ void scales_from_amax(QuantizeJob job, gmem<const float> amax)
{
    float x = amax.ld(0);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (job.copy[i].made) make_scale(job, i, x == x ? x : 0.0f, x != x);
}

void quantize_scales_from(const QuantizeJob &job, const float *amax)
{
    scales_from_amax<<<1, 1, 0, cuda.stream>>>(job, gmem<const float>(amax));
    cuda_check(cudaGetLastError(), "scales from amax");
}

/* ---- block scales that wait ---- */

/* A thread has 16 bytes of scale tiles: the scales of 4 outer indices, 32 apart, in 4 blocks; a warp has a whole tile. They
 * waited in one tile of quantize_tile, or, where columns are of two parts of a source, in two. Reads and writes 1 byte a
 * block. */
template <int parts, int copy>
__global__ void __launch_bounds__(BLOCK) finish_block_scales(QuantizeJob job, int64_t pieces)
{
    constexpr int BASES = copy && parts == 2 ? 2 : 1;
    const QuantizeCopy &q = job.copy[copy];
    int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x, tile = i / 32;
    if (i >= pieces) return;
    float encode = ld_warp(gmem<const float>((void *)(job.scale.p + copy)),
                           offsetof(Nvfp4Scale, encode) / sizeof(float));
    int64_t tiles_x = (job.part_cols + TILE / parts - 1) / (TILE / parts), outer0 = tile / q.scale_tiles * TILE;
    int64_t k0 = tile % q.scale_tiles * 64;
    uint32_t base[BASES];
#pragma unroll
    for (int j = 0; j < BASES; j++) {
        int64_t row = copy ? k0 : outer0, column = copy ? outer0 + 64 * j : k0;
        if (parts == 2 && column >= job.part_cols) column -= job.part_cols;
        gmem<const uint32_t> bases(job.tile_base.p);
        base[j] = ld_warp(bases, 2 * (row / TILE * tiles_x + column / (TILE / parts)) + copy);
    }
    Pack<uint32_t, 4> words = q.scales.template ld_pack<4>(4 * i);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t word = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t byte = words.v[j] >> 8 * k & 0xff;
            float rounded = f32_from_bits(byte ? (byte + base[j * BASES / 4]) << 20 : 0);
            word |= e4m3_nearest(f32_mul(rounded, encode)) << 8 * k;
        }
        words.v[j] = word;
    }
    q.scales.template st_pack<4>(4 * i, words);
}

template <int parts, int copy> static void finish_copy(const QuantizeJob &job)
{
    const QuantizeCopy &q = job.copy[copy];
    int64_t pieces = ceil_div(q.outer, TILE) * q.scale_tiles * 32;
    if (q.made)
        finish_block_scales<parts, copy><<<(unsigned)ceil_div(pieces, BLOCK), BLOCK, 0, cuda.stream>>>(job, pieces);
}

void quantize_finish(const char *op, const QuantizeJob &job, int parts)
{
    if (!job.pow2) return;
    if (parts == 1) {
        finish_copy<1, 0>(job);
        finish_copy<1, 1>(job);
    } else {
        finish_copy<2, 0>(job);
        finish_copy<2, 1>(job);
    }
    cuda_check(cudaGetLastError(), op);
}

/* ---- statistics ---- */

gmem<uint64_t> quantize_stats(void) { return space.stats; }

void quantize_collect_stats(uint32_t place)
{
    QuantStats of_block[MEASURE_BLOCKS];
    int role = (int)(place >> 8 & 0xff) - ROLE_OPERAND;
    QuantStats *sum = &cuda.measure[(int64_t)(place >> 16) * OPERAND_ROLES + role];
    cuda_check(cudaMemcpyAsync(of_block, space.stats.p, sizeof of_block, cudaMemcpyDeviceToHost, cuda.stream),
               "measure");
    cuda_check(cudaStreamSynchronize(cuda.stream), "measure");
    for (int i = 0; i < MEASURE_BLOCKS; i++) quant_stats_add(sum, &of_block[i]);
}
