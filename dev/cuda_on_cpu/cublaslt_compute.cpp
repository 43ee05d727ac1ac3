/* The product itself: D = epilogue(alpha op(A) op(B) + beta C), FP32 sums, in an order that is fixed for an algorithm.
 *
 *     tile of D    one thread computes it: 128 x 128 or what the algorithm's tile is
 *       slice      64 to 256 of K: A and B are unpacked to floats, as [groups of 16 rows][k][16] and [groups of 4][k][4]
 *         micro    16 x 4 sums from zero over the slice, products in order of k, then added to the tile
 *
 * A product and its addition are two roundings, on every machine, so the bits do not depend on the processor. FP4 and
 * block scales: code x scale has at most 6 significant bits and the product of two 12, exact in FP32. With K split each
 * part's sum goes to the workspace, rounded to D's type when the algorithm says so, and the parts are added in order.
 */
#include "cublaslt_problem.h"
#include "convert.h"
#include "internal.h"

#include <algorithm>
#include <math.h>
#include <memory>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace cuda_on_cpu
{
namespace lt
{

/* ---- unpacking ---- */

struct Source { /* op(A), or op(B) transposed: element (i, p), p along K, is at i * outer + p * inner */
    const uint8_t *data;
    uint32_t type;
    int64_t rows, outer, inner;
    const uint8_t *scales; /* of blocks, in tiles of 128 rows x 4 blocks; or NULL */
    int block;
    int64_t tiles_k;
};

struct Tables {
    float e2m1[16], e4m3[256], e5m2[256], ue8m0[256];
    Tables()
    {
        for (int i = 0; i < 16; i++) e2m1[i] = e2m1_value((uint8_t)i);
        for (int i = 0; i < 256; i++) {
            e4m3[i] = e4m3_value((uint8_t)i);
            e5m2[i] = e5m2_value((uint8_t)i);
            ue8m0[i] = ue8m0_value((uint8_t)i);
        }
    }
};
static const Tables tables;

static float block_scale(const Source &s, int64_t i, int64_t p)
{
    int64_t j = p / s.block;
    uint8_t code = s.scales[(i / 128 * s.tiles_k + j / 4) * 512 + i % 32 * 16 + i % 128 / 32 * 4 + j % 4];
    return s.block == 16 ? tables.e4m3[code & 127] : tables.ue8m0[code]; /* unsigned: the sign bit does not count */
}

template <uint32_t type> static float element(const Source &s, int64_t index)
{
    if (type == CUDA_R_32F) return ((const float *)s.data)[index];
    if (type == CUDA_R_16BF) return bf16_value(((const uint16_t *)s.data)[index]);
    if (type == CUDA_R_8F_E4M3) return tables.e4m3[s.data[index]];
    if (type == CUDA_R_8F_E5M2) return tables.e5m2[s.data[index]];
    return tables.e2m1[s.data[index / 2] >> index % 2 * 4 & 15]; /* the even element is in the low nibble */
}

/* Rows i0 .. i0 + rows, k from p0 on, to groups of `width` rows, the last one filled up with zeros. */
template <uint32_t type, int width>
static void unpack_type(float *to, const Source &s, int64_t i0, int64_t rows, int64_t p0, int64_t ks)
{
    for (int64_t group = 0; group < rows; group += width)
        for (int64_t p = p0; p < p0 + ks; p++, to += width)
            for (int64_t j = 0; j < width; j++) {
                int64_t i = i0 + group + j;
                to[j] = group + j < rows ? element<type>(s, i * s.outer + p * s.inner) : 0.0f;
                if (s.scales && group + j < rows) to[j] *= block_scale(s, i, p);
            }
}

template <int width> static void unpack(float *to, const Source &s, int64_t i0, int64_t rows, int64_t p0, int64_t ks)
{
    switch (s.type) {
    case CUDA_R_32F:
        return unpack_type<CUDA_R_32F, width>(to, s, i0, rows, p0, ks);
    case CUDA_R_16BF:
        return unpack_type<CUDA_R_16BF, width>(to, s, i0, rows, p0, ks);
    case CUDA_R_8F_E4M3:
        return unpack_type<CUDA_R_8F_E4M3, width>(to, s, i0, rows, p0, ks);
    case CUDA_R_8F_E5M2:
        return unpack_type<CUDA_R_8F_E5M2, width>(to, s, i0, rows, p0, ks);
    default:
        return unpack_type<CUDA_R_4F_E2M1, width>(to, s, i0, rows, p0, ks);
    }
}

/* ---- multiplying ---- */

typedef float Vector __attribute__((vector_size(32)));
enum { MICRO_ROWS = 16, MICRO_COLS = 4, LARGEST_TILE = 128, LARGEST_SLICE = 256 };

struct Panels { /* of one thread */
    alignas(64) float a[LARGEST_TILE * LARGEST_SLICE];
    alignas(64) float b[LARGEST_TILE * LARGEST_SLICE];
    alignas(64) float tile[LARGEST_TILE * LARGEST_TILE]; /* column-major, columns of LARGEST_TILE */
};

static inline __attribute__((always_inline)) void micro_tiles(Panels *w, int64_t rows, int64_t cols, int64_t ks)
{
    for (int64_t j = 0; j < cols; j += MICRO_COLS)
        for (int64_t i = 0; i < rows; i += MICRO_ROWS) {
            const Vector *a = (const Vector *)(w->a + i * ks);
            const float *b = w->b + j * ks;
            Vector sum[MICRO_COLS][2] = {};
            for (int64_t p = 0; p < ks; p++, a += 2, b += MICRO_COLS)
                for (int c = 0; c < MICRO_COLS; c++) {
                    sum[c][0] += a[0] * b[c];
                    sum[c][1] += a[1] * b[c];
                }
            for (int c = 0; c < MICRO_COLS; c++) {
                Vector *tile = (Vector *)(w->tile + (j + c) * LARGEST_TILE + i);
                tile[0] += sum[c][0];
                tile[1] += sum[c][1];
            }
        }
}

static void multiply_plain(Panels *w, int64_t rows, int64_t cols, int64_t ks) { micro_tiles(w, rows, cols, ks); }

#ifdef __x86_64__
__attribute__((target("avx2"))) static void multiply_avx2(Panels *w, int64_t rows, int64_t cols, int64_t ks)
{
    micro_tiles(w, rows, cols, ks);
}
static void multiply(Panels *w, int64_t rows, int64_t cols, int64_t ks)
{
    static const bool avx2 = __builtin_cpu_supports("avx2");
    (avx2 ? multiply_avx2 : multiply_plain)(w, rows, cols, ks);
}
#else
static void multiply(Panels *w, int64_t rows, int64_t cols, int64_t ks) { multiply_plain(w, rows, cols, ks); }
#endif

/* The tile's sums over [k0, k1). */
static void multiply_tile(Panels *w, const Source &a, const Source &b, int64_t i0, int64_t rows, int64_t j0,
                          int64_t cols, int64_t k0, int64_t k1, int64_t slice)
{
    memset(w->tile, 0, (size_t)(cols + MICRO_COLS - 1) / MICRO_COLS * MICRO_COLS * LARGEST_TILE * sizeof(float));
    for (int64_t p = k0; p < k1; p += slice) {
        int64_t ks = std::min(slice, k1 - p);
        unpack<MICRO_ROWS>(w->a, a, i0, rows, p, ks);
        unpack<MICRO_COLS>(w->b, b, j0, cols, p, ks);
        multiply(w, rows, cols, ks);
    }
}

/* ---- storing ---- */

struct Output {
    const Problem *p;
    const uint8_t *c, *bias;
    uint8_t *d;
    float scale, alpha, beta, d_scale; /* scale: of A times that of B, when each has one for the whole matrix */
    float amax;
};

static float load(const uint8_t *data, uint32_t type, int64_t index)
{
    return type == CUDA_R_32F ? ((const float *)data)[index] : bf16_value(((const uint16_t *)data)[index]);
}

static void store(uint8_t *data, uint32_t type, int64_t index, float x)
{
    if (type == CUDA_R_32F) ((float *)data)[index] = x;
    if (type == CUDA_R_16BF) ((uint16_t *)data)[index] = bf16_code(x);
    if (type == CUDA_R_8F_E4M3) data[index] = e4m3_code(x);
    if (type == CUDA_R_8F_E5M2) data[index] = e5m2_code(x);
}

static float gelu(float x) { return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x))); }

/* Element (i, j) from its sum. Returns its magnitude before it is scaled and rounded for D. */
static float finish(const Output &o, int64_t i, int64_t j, float sum)
{
    const Problem &p = *o.p;
    float x = o.alpha * (sum * o.scale);
    if (o.beta != 0) x += o.beta * load(o.c, p.c.type, j * p.c.ld + i); /* beta 0: C is not read */
    if (o.bias) x += load(o.bias, bias_type_of(p), i);
    if (p.desc.epilogue & CUBLASLT_EPILOGUE_RELU) x = x < 0 ? 0 : x;
    if (p.desc.epilogue & CUBLASLT_EPILOGUE_GELU) x = gelu(x);
    store(o.d, p.d.type, j * p.d.ld + i, x * o.d_scale);
    return fabsf(x);
}

static void raise(float *amax, float x)
{
#pragma omp critical(cuda_on_cpu_amax)
    *amax = std::max(*amax, x);
}

static float part_of(const Call &call, float sum) /* as the workspace holds it */
{
    bool narrow = call.kernel.reduction == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE && call.problem.d.type == CUDA_R_16BF;
    return narrow ? bf16_value(bf16_code(sum)) : sum;
}

static void add_parts(Output *o, const float *parts, int split_k)
{
    int64_t m = o->p->m, n = o->p->n;
#pragma omp parallel for schedule(static)
    for (int64_t j = 0; j < n; j++) {
        float amax = 0;
        for (int64_t i = 0; i < m; i++) {
            float sum = 0;
            for (int s = 0; s < split_k; s++) sum += parts[(s * n + j) * m + i];
            amax = std::max(amax, finish(*o, i, j, sum));
        }
        raise(&o->amax, amax);
    }
}

/* One matrix of the batch. */
static void product(const Call &call, const Source &a, const Source &b, Output *o, float *parts)
{
    const Problem &p = call.problem;
    const Kernel &k = call.kernel;
    int64_t across = (p.m + k.tile_rows - 1) / k.tile_rows, down = (p.n + k.tile_cols - 1) / k.tile_cols;
    int64_t part = ((p.k + k.split_k - 1) / k.split_k + 31) / 32 * 32;
#pragma omp parallel
    {
        std::unique_ptr<Panels> panels(new Panels);
        Panels *w = panels.get();
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < across * down * k.split_k; task++) {
            int64_t s = task / (across * down), i0 = task % across * k.tile_rows,
                    j0 = task / across % down * k.tile_cols;
            int64_t rows = std::min<int64_t>(k.tile_rows, p.m - i0), cols = std::min<int64_t>(k.tile_cols, p.n - j0);
            int64_t k0 = std::min(p.k, s * part), k1 = std::min(p.k, k0 + part);
            multiply_tile(w, a, b, i0, rows, j0, cols, k0, k1, k.slice_k);
            float amax = 0;
            for (int64_t j = 0; j < cols; j++)
                for (int64_t i = 0; i < rows; i++) {
                    float sum = w->tile[j * LARGEST_TILE + i];
                    if (parts)
                        parts[(s * p.n + j0 + j) * p.m + i0 + i] = part_of(call, sum);
                    else
                        amax = std::max(amax, finish(*o, i0 + i, j0 + j, sum));
                }
            raise(&o->amax, amax);
        }
    }
    if (parts) add_parts(o, parts, k.split_k);
}

/* ---- the call ---- */

/* Addresses are looked up when the stream gets there: memory may have been freed since. */
static uint8_t *host(const char *name, const void *device, int64_t bytes)
{
    return device ? (uint8_t *)device_memory(device, (size_t)bytes, name) : nullptr;
}

static float scalar(const char *name, const void *device, float otherwise)
{
    if (!device) return otherwise;
    float x;
    memcpy(&x, host(name, device, sizeof x), sizeof x);
    return x;
}

static Source make_source(const char *name, const void *device, const Layout &l, bool outer_is_rows, int64_t rows,
                          int64_t k, const void *scales, int block)
{
    Source s = {host(name, device, matrix_bytes(l)),
                l.type,
                rows,
                outer_is_rows ? 1 : l.ld,
                outer_is_rows ? l.ld : 1,
                nullptr,
                block,
                0};
    if (!block) return s;
    s.scales = host("cublasLtMatmul: scales", scales, scale_bytes(rows, k, block));
    s.tiles_k = ((k + block - 1) / block + 3) / 4;
    return s;
}

void compute(const Call &call)
{
    const Problem &p = call.problem;
    const Desc &desc = p.desc;
    int block = scale_block(desc);
    Source a = make_source("cublasLtMatmul: A", call.a, p.a, !p.transposed_a, p.m, p.k, desc.a_scale, block);
    Source b = make_source("cublasLtMatmul: B", call.b, p.b, p.transposed_b, p.n, p.k, desc.b_scale, block);
    Output o = {&p,      host("cublasLtMatmul: C", call.c, matrix_bytes(p.c)),
                nullptr, host("cublasLtMatmul: D", call.d, matrix_bytes(p.d)),
                1,       0,
                0,       1,
                0};
    if (!block)
        o.scale = scalar("cublasLtMatmul: scale of A", desc.a_scale, 1) *
                  scalar("cublasLtMatmul: scale of B", desc.b_scale, 1);
    o.alpha = scalar("cublasLtMatmul: alpha", call.alpha_device, call.alpha);
    o.beta = scalar("cublasLtMatmul: beta", call.beta_device, call.beta);
    o.d_scale = scalar("cublasLtMatmul: scale of D", desc.d_scale, 1);
    int64_t bias_elements = p.m + (p.d.batch_count - 1) * desc.bias_batch_stride;
    const uint8_t *bias = nullptr;
    if (has_bias(desc.epilogue))
        bias = host("cublasLtMatmul: bias", desc.bias, bytes_of(bias_type_of(p), bias_elements));
    float *parts = nullptr;
    if (call.kernel.split_k > 1)
        parts = (float *)host("cublasLtMatmul: workspace", call.workspace,
                              p.m * p.n * call.kernel.split_k * (int64_t)sizeof(float));
    for (int64_t batch = 0; batch < p.d.batch_count; batch++) {
        if (bias) o.bias = bias + bytes_of(bias_type_of(p), batch * desc.bias_batch_stride);
        product(call, a, b, &o, parts);
        a.data += bytes_of(p.a.type, p.a.batch_stride);
        b.data += bytes_of(p.b.type, p.b.batch_stride);
        if (o.c) o.c += bytes_of(p.c.type, p.c.batch_stride);
        o.d += bytes_of(p.d.type, p.d.batch_stride);
    }
    if (desc.d_amax) memcpy(host("cublasLtMatmul: amax of D", desc.d_amax, sizeof o.amax), &o.amax, sizeof o.amax);
}

} // namespace lt
} // namespace cuda_on_cpu
