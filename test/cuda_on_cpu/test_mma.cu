/* mma, ldmatrix and cp.async of CUDA on a CPU, called as kernels call them, against what PTX ISA says of fragments.
 *
 *     test_mma           all of it
 *     test_mma FAULT     a kernel with that fault: must end the program with a message
 */
#include "../test.h"

#include "cuda/ptx.cuh"

#include <math.h>
#include <string.h>
#include <vector>

enum { M = 16, N = 8, K = 16, WARPS = 3 };

/* ---- memory ---- */

static uint64_t seed = 7;

static std::vector<uint16_t> random_bf16(size_t count)
{
    std::vector<uint16_t> out(count);
    for (uint16_t &x : out) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        x = (uint16_t)((seed >> 33 & 0x807f) | (120 + (seed >> 50) % 12) << 7); /* 2^-7 to 2^4, both signs */
    }
    return out;
}

static double value(uint16_t code)
{
    double x = ldexp(128 + (code & 127), (code >> 7 & 255) - 134);
    return code & 0x8000 ? -x : x;
}

template <class T> static T *on_device(const std::vector<T> &host)
{
    T *p;
    cudaMalloc((void **)&p, host.size() * sizeof(T));
    cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice);
    return p;
}

template <class T> static std::vector<T> from_device(T *p, size_t count)
{
    std::vector<T> host(count);
    cudaMemcpy(host.data(), p, count * sizeof(T), cudaMemcpyDeviceToHost);
    cudaFree(p);
    return host;
}

/* ---- mma ---- */

__device__ static uint32_t pair(gmem<const uint16_t> at, int64_t first, int64_t second)
{
    return at.ld(first) | (uint32_t)at.ld(second) << 16;
}

/* Each warp multiplies its own A [M][K] with its own B [K][N], onto C [M][N]. */
__global__ static void multiply(gmem<float> d, gmem<const uint16_t> a, gmem<const uint16_t> b, gmem<const float> c)
{
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    a = a + warp * M * K, b = b + warp * K * N, c = c + warp * M * N, d = d + warp * M * N;
    uint32_t left[4], right[2];
    for (int i = 0; i < 4; i++) {
        int row = g + i % 2 * 8, col = 2 * t + i / 2 * 8;
        left[i] = pair(a, row * K + col, row * K + col + 1);
    }
    for (int i = 0; i < 2; i++) right[i] = pair(b, (2 * t + 8 * i) * N + g, (2 * t + 8 * i + 1) * N + g);
    float sum[4];
    for (int i = 0; i < 4; i++) sum[i] = c.ld((g + i / 2 * 8) * N + 2 * t + i % 2);
    mma_bf16(sum, left, right);
    for (int i = 0; i < 4; i++) d.st((g + i / 2 * 8) * N + 2 * t + i % 2, sum[i]);
}

/* The same with fragments from shared memory: A as it lies, B transposed. */
__global__ static void multiply_shared(gmem<float> d, gmem<const uint16_t> a, gmem<const uint16_t> b,
                                       gmem<const float> c)
{
    __shared__ alignas(16) uint16_t left_rows[M * K];
    __shared__ alignas(16) uint16_t right_rows[2 * K * N];
    int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int i = lane; i < M * K; i += 32) left_rows[i] = a.ld(i);
    for (int i = lane; i < 2 * K * N; i += 32) right_rows[i] = i < K * N ? b.ld(i) : 0;
    __syncwarp();
    uint32_t left[4], right[4];
    ldmatrix_x4(left, left_rows + (lane % 16) * K + lane / 16 * 8);
    ldmatrix_x4_transposed(right, right_rows + lane * N); /* rows 0 to 7, 8 to 15 of B, and zeros */
    float sum[4];
    for (int i = 0; i < 4; i++) sum[i] = c.ld((g + i / 2 * 8) * N + 2 * t + i % 2);
    mma_bf16(sum, left, right);
    for (int i = 0; i < 4; i++) d.st((g + i / 2 * 8) * N + 2 * t + i % 2, sum[i]);
}

static void check_product(const char *what, const std::vector<float> &d, const std::vector<uint16_t> &a,
                          const std::vector<uint16_t> &b, const std::vector<float> &c, int warps)
{
    for (int w = 0; w < warps; w++)
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) {
                double sum = c[w * M * N + i * N + j];
                for (int k = 0; k < K; k++) sum += value(a[w * M * K + i * K + k]) * value(b[w * K * N + k * N + j]);
                float x = d[w * M * N + i * N + j];
                CHECK(x == (float)sum, "%s: D[%d][%d] of warp %d is %.9g, not %.9g", what, i, j, w, x, sum);
            }
}

static void test_mma()
{
    test_case("mma: the product, one rounding");
    std::vector<uint16_t> a = random_bf16(WARPS * M * K), b = random_bf16(WARPS * K * N);
    std::vector<float> c(WARPS * M * N);
    for (size_t i = 0; i < c.size(); i++) c[i] = (float)value(random_bf16(1)[0]) * 1.001f;
    const uint16_t *a_device = on_device(a), *b_device = on_device(b);
    const float *c_device = on_device(c);
    float *d_device = on_device(c);
    multiply<<<1, 32 * WARPS>>>(gmem<float>(d_device), gmem<const uint16_t>(a_device), gmem<const uint16_t>(b_device),
                                gmem<const float>(c_device));
    CHECK(cudaDeviceSynchronize() == cudaSuccess, "the kernel failed");
    check_product("from registers", from_device(d_device, c.size()), a, b, c, WARPS);

    test_case("mma: fragments by ldmatrix");
    d_device = on_device(c);
    multiply_shared<<<1, 32>>>(gmem<float>(d_device), gmem<const uint16_t>(a_device), gmem<const uint16_t>(b_device),
                               gmem<const float>(c_device));
    CHECK(cudaDeviceSynchronize() == cudaSuccess, "the kernel failed");
    check_product("from shared memory", from_device(d_device, c.size()), a, b, c, 1);
}

/* ---- ldmatrix ---- */

/* Element (row, col) of matrix m is 256 m + 16 row + col; the matrices' rows lie 40 elements apart. */
__global__ static void load_matrices(gmem<uint32_t> out, bool transposed)
{
    __shared__ alignas(16) uint16_t rows[32 * 40];
    int lane = threadIdx.x;
    for (int col = 0; col < 8; col++) rows[lane * 40 + col] = (uint16_t)(lane / 8 * 256 + lane % 8 * 16 + col);
    __syncwarp();
    uint32_t r[4];
    if (transposed)
        ldmatrix_x4_transposed(r, rows + lane * 40);
    else
        ldmatrix_x4(r, rows + lane * 40);
    for (int m = 0; m < 4; m++) out.st(lane * 4 + m, r[m]);
}

static void test_ldmatrix()
{
    for (int transposed = 0; transposed < 2; transposed++) {
        test_case(transposed ? "ldmatrix, transposed" : "ldmatrix");
        uint32_t *device = on_device(std::vector<uint32_t>(128));
        load_matrices<<<1, 32>>>(gmem<uint32_t>(device), transposed);
        std::vector<uint32_t> r = from_device(device, 128);
        for (unsigned lane = 0; lane < 32; lane++)
            for (unsigned m = 0; m < 4; m++)
                for (unsigned half = 0; half < 2; half++) {
                    unsigned row = lane / 4, col = lane % 4 * 2 + half;
                    unsigned expected = 256 * m + (transposed ? 16 * col + row : 16 * row + col);
                    unsigned got = r[lane * 4 + m] >> 16 * half & 0xffff;
                    CHECK(got == expected, "lane %u, matrix %u, half %u: %u, not %u", lane, m, half, got, expected);
                }
    }
}

/* ---- cp.async ---- */

enum { VALUES = 4, MOMENTS = 5 };

/* Two groups of one copy each, then one that is not committed; what shared memory holds at five moments. */
__global__ static void copy_groups(gmem<uint32_t> out, gmem<const uint32_t> in)
{
    __shared__ alignas(16) uint32_t at[4][VALUES];
    auto note = [&](int moment) {
        for (int i = 0; i < 4; i++) out.st(moment * 4 + i, at[i][1]);
    };
    cp_async_16(at[0], in, 0, true);
    cp_async_commit();
    cp_async_16(at[1], in, VALUES, true);
    cp_async_commit();
    cp_async_16(at[2], in, 2 * VALUES, false);
    at[3][1] = 3;
    note(0);
    cp_async_wait<2>();
    note(1);
    cp_async_wait<1>();
    note(2);
    cp_async_wait<0>();
    note(3);
    cp_async_commit();
    cp_async_wait<0>();
    note(4);
}

static void test_cp_async()
{
    test_case("cp.async: groups land at their wait and not before");
    uint32_t *out_device = on_device(std::vector<uint32_t>(MOMENTS * 4));
    const uint32_t *in_device = on_device(std::vector<uint32_t>{10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33});
    copy_groups<<<1, 1>>>(gmem<uint32_t>(out_device), gmem<const uint32_t>(in_device));
    std::vector<uint32_t> out = from_device(out_device, MOMENTS * 4);
    const uint32_t none = 0xffffffffu;
    const uint32_t expected[MOMENTS][4] = {
        {none, none, none, 3}, {none, none, none, 3}, {11, none, none, 3}, {11, 21, none, 3}, {11, 21, 0, 3}};
    for (int moment = 0; moment < MOMENTS; moment++)
        for (int i = 0; i < 4; i++)
            CHECK(out[(size_t)moment * 4 + (size_t)i] == expected[moment][i], "moment %d, copy %d: %x, not %x", moment,
                  i, out[(size_t)moment * 4 + (size_t)i], expected[moment][i]);
}

/* ---- faults ---- */

enum Fault {
    LDMATRIX_MISALIGNED,
    LDMATRIX_NOT_SHARED,
    LDMATRIX_BEYOND,
    CP_ASYNC_MISALIGNED,
    CP_ASYNC_NOT_SHARED,
    CP_ASYNC_HOST,
    MMA_DIVERGENT,
    FAULTS
};
static const char *const fault_names[FAULTS] = {"ldmatrix-misaligned", "ldmatrix-not-shared", "ldmatrix-beyond",
                                                "cp-async-misaligned", "cp-async-not-shared", "cp-async-host",
                                                "mma-divergent"};

__global__ static void faulty(int fault, gmem<const uint32_t> in, gmem<const uint32_t> host)
{
    __shared__ alignas(16) uint32_t rows[32 * 4];
    uint32_t own[8] = {}, r[4] = {};
    float d[4] = {};
    int lane = threadIdx.x;
    if (fault == LDMATRIX_MISALIGNED) ldmatrix_x4(r, (const char *)(rows + lane * 4) + (lane == 5 ? 8 : 0));
    if (fault == LDMATRIX_NOT_SHARED) ldmatrix_x4(r, own);
    if (fault == LDMATRIX_BEYOND) ldmatrix_x4(r, rows + (lane + 1) * 4);
    if (fault == CP_ASYNC_MISALIGNED) cp_async_16(rows, in, 1, true);
    if (fault == CP_ASYNC_NOT_SHARED) cp_async_16(own, in, 0, true);
    if (fault == CP_ASYNC_HOST) cp_async_16(rows, host, 0, true);
    if (fault == MMA_DIVERGENT && lane < 31) mma_bf16(d, r, r);
}

int main(int argc, char **argv)
{
    if (argc == 2) {
        static uint32_t host[8];
        const uint32_t *in = on_device(std::vector<uint32_t>(8));
        for (int fault = 0; fault < FAULTS; fault++)
            if (strcmp(argv[1], fault_names[fault]) == 0)
                faulty<<<1, 32>>>(fault, gmem<const uint32_t>(in), gmem<const uint32_t>(host));
        return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
    }
    test_mma();
    test_ldmatrix();
    test_cp_async();
    return test_done();
}
