/* Kernels of every shape that the backend uses, each with a result that is known: reductions, transposes, dynamic
 * shared memory, grids and blocks of three dimensions, templates, shuffles of every kind, votes, atomics. The results
 * are the same in every order of threads. */
#include "check.cuh"

#include <cmath>

/* ---- grids, blocks, launches ---- */

__global__ void axpy(gmem<float> y, gmem<const float> x, float a, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y.st(i, a * x.ld(i) + y.ld(i));
}

__global__ void own_number(gmem<unsigned> out)
{
    unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    unsigned i = block * blockDim.x * blockDim.y * blockDim.z + thread;
    out.st(i, i + 1);
}

template <class T> __global__ void deduced(gmem<T> out, T value) { out.st(threadIdx.x, value); }
template <class T> void launch_deduced(gmem<T> out, size_t blocks, unsigned threads)
{
    deduced<T><<<blocks, threads>>>(out, T(9));
    deduced<<<blocks, dim3(threads)>>>(out + 1, T(10));
}
__global__ void takes_pointer(gmem<int> out, const int *p) { out.st(0, p == nullptr ? 1 : 2); }

#define FOR_TYPE(T, ...)                                                                                               \
    do {                                                                                                               \
        using T = float;                                                                                               \
        __VA_ARGS__;                                                                                                   \
    } while (0)
/* clang-format off */
#define LAUNCH_ONE(kernel, ...)                                                                                        \
    kernel<<<1,                                                                                                        \
             1>>>(__VA_ARGS__)
/* clang-format on */

static void test_launches()
{
    gmem<float> y = floats_on_device(1000, 0, 1), x = floats_on_device(1000, 1, 0);
    axpy<<<(1000 + 127) / 128, 128>>>(y, gmem<const float>(x.p), 2.0, 999); /* a double and an int are converted */
    std::vector<float> got = to_host(y, 1000);
    int right = 0;
    for (int i = 0; i < 1000; i++) right += got[i] == i + (i < 999 ? 2 : 0);
    CHECK(right == 1000);

    gmem<unsigned> numbers = on_device(std::vector<unsigned>(3 * 4 * 5 * 6 * 7 * 8));
    own_number<<<dim3(3, 4, 5), dim3(6, 7, 8)>>>(numbers);
    std::vector<unsigned> n = to_host(numbers, 3 * 4 * 5 * 6 * 7 * 8);
    right = 0;
    for (unsigned i = 0; i < n.size(); i++) right += n[i] == i + 1;
    CHECK(right == 3 * 4 * 5 * 6 * 7 * 8);

    /* clang-format off */
    const char *text = "a<<<1, 2>>>(3) stays"; // so does b<<<1, 2>>>(3); and it's not a quote
    CHECK(text[1] == '<' && text[8] == '>' && 1'000 == 1000 && R"(c<<<"1"
>>>)"[1] == '<');
    FOR_TYPE(T, deduced<T><<<dim3{2, 1, 1}, (1 << 3) >> 1, /* shared <<< */ 0>>>(y, 5.0f)); /* in a macro */
    CHECK(to_host(y, 4)[3] == 5);
    deduced /* no template arguments */
        <<<1, 2, // two threads
           0, nullptr
        >>> // four of them
        (y, 6.0f);
    CHECK(__LINE__ == 70);
    /* clang-format on */
    CHECK(to_host(y, 2)[1] == 6 && to_host(y, 3)[2] == 5);
    auto pointer = deduced<float>;
    pointer<<<1, 1>>>(y, 7.0f);
    CHECK(to_host(y, 1)[0] == 7);
    LAUNCH_ONE(deduced, y, 8.0f);
    CHECK(to_host(y, 1)[0] == 8);
    launch_deduced(y, 1, 1);
    CHECK(to_host(y, 2)[0] == 9 && to_host(y, 2)[1] == 10);
    gmem<int> flag = on_device(std::vector<int>(1));
    takes_pointer<<<1, 1>>>(flag, 0); /* a null pointer, not an int */
    CHECK(to_host(flag, 1)[0] == 1);
}

/* ---- shared memory ---- */

template <class T, int threads> __global__ void block_sum(gmem<T> out, gmem<const T> x)
{
    __shared__ T part[threads / 32];
    T sum = x.ld(blockIdx.x * threads + threadIdx.x);
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = threadIdx.x < threads / 32 ? part[threadIdx.x] : 0;
        for (int distance = 16; distance; distance /= 2) sum += __shfl_down_sync(0xffffffffu, sum, distance);
        if (threadIdx.x == 0) out.st(blockIdx.x, sum);
    }
}

__global__ void transpose(gmem<float> out, gmem<const float> in, int rows, int cols)
{
    __shared__ float tile[32][32 + 1];
    int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32;
    for (int i = threadIdx.y; i < 32; i += blockDim.y)
        if (x < cols && y + i < rows) tile[i][threadIdx.x] = in.ld((int64_t)(y + i) * cols + x);
    __syncthreads();
    x = blockIdx.y * 32 + threadIdx.x, y = blockIdx.x * 32;
    for (int i = threadIdx.y; i < 32; i += blockDim.y)
        if (x < rows && y + i < cols) out.st((int64_t)(y + i) * rows + x, tile[threadIdx.x][i]);
}

template <class T> __global__ void reverse_row(gmem<T> row)
{
    alignas(16) extern __shared__ unsigned char bytes[];
    T *values = (T *)bytes;
    values[threadIdx.x] = row.ld(threadIdx.x);
    __syncthreads();
    row.st(threadIdx.x, values[blockDim.x - 1 - threadIdx.x]);
}

template <int n> __device__ int sum_of_unwritten()
{
#ifndef NO_SUCH_MACRO
    alignas(64) __shared__ Pack<int, 4> x[n];
#endif
    static __shared__ int one; /* is alignas looked at? */
    if (threadIdx.x == 0) one = (uintptr_t)x % 64 == 0;
    __syncthreads();
    return x[threadIdx.x % n].v[1] + one; /* shared memory begins as bits that are all one: -1 + 1 */
}
__global__ void variables_of_instances(gmem<int> out)
{
    out.st(threadIdx.x, sum_of_unwritten<4>() + sum_of_unwritten<8>());
}

static void test_shared_memory()
{
    gmem<float> x = floats_on_device(2048, 1, 0), sums = floats_on_device(16, 0, 0);
    block_sum<float, 512><<<4, 512>>>(sums, gmem<const float>(x.p));
    CHECK(to_host(sums, 4)[0] == 512 && to_host(sums, 4)[3] == 512);
    block_sum<float, 128><<<16, 128>>>(sums, gmem<const float>(x.p));
    CHECK(to_host(sums, 16)[0] == 128 && to_host(sums, 16)[15] == 128);
    gmem<double> doubles = on_device(std::vector<double>(64, 0.5)), sum = on_device(std::vector<double>(1));
    block_sum<double, 64><<<1, 64>>>(sum, gmem<const double>(doubles.p));
    CHECK(to_host(sum, 1)[0] == 32);

    enum { ROWS = 70, COLS = 100 };
    gmem<float> in = floats_on_device(ROWS * COLS, 0, 1), out = floats_on_device(ROWS * COLS, 0, 0);
    transpose<<<dim3((COLS + 31) / 32, (ROWS + 31) / 32), dim3(32, 8)>>>(out, gmem<const float>(in.p), ROWS, COLS);
    std::vector<float> t = to_host(out, ROWS * COLS);
    int right = 0;
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLS; c++) right += t[c * ROWS + r] == r * COLS + c;
    CHECK(right == ROWS * COLS);

    gmem<double> row = on_device(std::vector<double>{0, 1, 2, 3, 4, 5, 6});
    reverse_row<double><<<1, 7, 7 * sizeof(double)>>>(row);
    CHECK(to_host(row, 7)[0] == 6 && to_host(row, 7)[6] == 0);
    gmem<float> large = floats_on_device(1024, 0, 1);
    CHECK(cudaFuncSetAttribute(reverse_row<float>, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 << 10) ==
          cudaSuccess);
    reverse_row<float><<<1, 1024, 227 << 10>>>(large);
    CHECK(cudaGetLastError() == cudaSuccess && to_host(large, 1)[0] == 1023);
    gmem<int> zero = on_device(std::vector<int>(64, 7));
    variables_of_instances<<<1, 64>>>(zero);
    CHECK(to_host(zero, 64) == std::vector<int>(64, 0));
}

/* ---- warps ---- */

__global__ void shuffles(gmem<int> out, int width)
{
    int lane = threadIdx.x, value = 100 + lane;
    out.st(0 * 32 + lane, __shfl_sync(0xffffffffu, value, 3, width));
    out.st(1 * 32 + lane, __shfl_xor_sync(0xffffffffu, value, 5, width));
    out.st(2 * 32 + lane, __shfl_up_sync(0xffffffffu, value, 2, width));
    out.st(3 * 32 + lane, __shfl_down_sync(0xffffffffu, value, 2, width));
}

__global__ void half_warps(gmem<int> out) /* two groups of lanes that go their own ways, and run ahead of each other */
{
    int lane = threadIdx.x, sum = lane;
    unsigned mask = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    for (int i = 0; i < (lane < 16 ? 3 : 50); i++) sum = __shfl_xor_sync(mask, sum, 1) + (lane & 1);
    __syncwarp();
    out.st(lane, sum + __popc(__ballot_sync(0xffffffffu, lane % 3 == 0)));
}

__global__ void votes(gmem<unsigned> out) /* 48 threads: the second warp has 16 lanes */
{
    unsigned t = threadIdx.x;
    unsigned ballot = __ballot_sync(0xffffffffu, t % 2), any = __any_sync(0xffffffffu, t == 40);
    unsigned all = __all_sync(0xffffffffu, t >= 32);
    unsigned count = __syncthreads_count(t % 3 == 0), or_ = __syncthreads_or(t == 47), and_ = __syncthreads_and(t < 47);
    unsigned values[] = {ballot, any, all, count, or_, and_, __activemask()};
    for (int i = 0; i < 7; i++) out.st(i * 48 + t, values[i]);
}

static void test_warps()
{
    gmem<int> out = on_device(std::vector<int>(128));
    for (int width : {32, 8}) {
        shuffles<<<1, 32>>>(out, width);
        std::vector<int> got = to_host(out, 128);
        int right = 0;
        for (int lane = 0; lane < 32; lane++) {
            int first = lane / width * width, in = lane - first;
            right += got[lane] == 100 + first + 3;
            right += got[32 + lane] == 100 + (lane ^ 5);
            right += got[64 + lane] == 100 + (in >= 2 ? lane - 2 : lane);
            right += got[96 + lane] == 100 + (in + 2 < width ? lane + 2 : lane);
        }
        CHECK(right == 128);
    }
    half_warps<<<1, 32>>>(out);
    std::vector<int> got = to_host(out, 32);
    CHECK(got[0] == 1 + 1 + 11 && got[1] == 0 + 2 + 11); /* three exchanges: 0 -> 1 -> 1 -> 2 ... */
    CHECK(got[16] == 16 + 25 + 11 && got[17] == 17 + 25 + 11);

    gmem<unsigned> v = on_device(std::vector<unsigned>(7 * 48));
    votes<<<1, 48>>>(v);
    std::vector<unsigned> u = to_host(v, 7 * 48);
    CHECK(u[0] == 0xaaaaaaaau && u[47] == 0xaaaau);
    CHECK(u[48] == 0 && u[48 + 47] == 1 && u[2 * 48] == 0 && u[2 * 48 + 47] == 1);
    CHECK(u[3 * 48] == 16 && u[4 * 48 + 1] == 1 && u[5 * 48 + 2] == 0 && (u[6 * 48 + 47] & 0x8000));
}

/* ---- atomics and intrinsics ---- */

__global__ void atomics(gmem<int> sum, gmem<unsigned> most)
{
    __shared__ unsigned ticket;
    if (threadIdx.x == 0) ticket = 0;
    __syncthreads();
    unsigned mine = atomicInc(&ticket, 9);
    sum.atomic_add(0, (int)mine);
    most.atomic_max(0, blockIdx.x * blockDim.x + threadIdx.x);
}

__global__ void intrinsics(gmem<unsigned> out)
{
    unsigned values[] = {__brev(1),
                         __byte_perm(0x33221100, 0x77665544, 0x0257),
                         __umulhi(0x80000000u, 6),
                         (unsigned)__clz(1),
                         (unsigned)__ffs(8),
                         __float_as_uint(__fmaf_rn(3, 4, 5)),
                         (unsigned)__float2int_rn(2.5f),
                         (unsigned)__float2int_rz(-3e9f),
                         __float2uint_rn(-1.0f),
                         (unsigned)min(3, max(-1, -2))};
    for (int i = 0; i < 10; i++) out.st(i, values[i]);
}

static void test_atomics_and_intrinsics()
{
    gmem<int> sum = on_device(std::vector<int>(1));
    gmem<unsigned> most = on_device(std::vector<unsigned>(10));
    atomics<<<8, 100>>>(sum, most);
    CHECK(to_host(sum, 1)[0] == 8 * 10 * 45 && to_host(most, 1)[0] == 799);
    intrinsics<<<1, 1>>>(most);
    CHECK((to_host(most, 10) ==
           std::vector<unsigned>{0x80000000u, 0x00225577, 3, 31, 4, 0x41880000, 2, 0x80000000u, 0, 0xffffffffu}));
}

#ifdef CUDA_ON_CPU
/* ---- counters: not of CUDA ---- */

__global__ void strided(gmem<const float> x, gmem<float> y, int stride)
{
    float sum = 0;
    for (int i = 0; i < 2; i++) sum += x.ld((i * blockDim.x + threadIdx.x) * stride);
    if (threadIdx.x < 4) y.st(threadIdx.x, sum);
}

static void test_counters()
{
    gmem<float> x = floats_on_device(1024, 0, 0), y = floats_on_device(64, 0, 0);
    cuda_on_cpu::count_accesses(true);
    for (int stride : {1, 2, 8}) {
        cuda_on_cpu::reset_stats();
        strided<<<1, 64>>>(gmem<const float>(x.p), y, stride);
        cudaDeviceSynchronize();
        cuda_on_cpu::KernelStats s = cuda_on_cpu::kernel_stats("strided");
        CHECK(s.launches == 1 && s.threads == 64 && s.bytes_read == 512 && s.bytes_written == 16);
        CHECK(s.sectors_read >= 16u * stride && s.sectors_read <= 18u * stride && s.sectors_written == 1);
    }
    cuda_on_cpu::count_accesses(false);
    CHECK(cuda_on_cpu::kernel_stats("no such kernel").launches == 0);
}
#else
static void test_counters() {}
#endif

int main()
{
    test_launches();
    test_shared_memory();
    test_warps();
    test_atomics_and_intrinsics();
    test_counters();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
