/* The runtime's functions: memory, copies, streams, events, errors, what the device says of itself. Everything that
 * must be ordered is, so the results are the same with shuffled streams. */
#include "check.cuh"

#include <cmath>
#include <cstring>

__global__ void add(gmem<float> x, float value) { x.st(threadIdx.x, x.ld(threadIdx.x) + value); }
__global__ void copy(gmem<float> to, gmem<const float> from) { to.st(threadIdx.x, from.ld(threadIdx.x)); }
__global__ void shared_bytes() {}

static void test_memory()
{
    float *x, *none = (float *)1, h[25];
    size_t available, total;
    CHECK(cudaMalloc(&x, 100) == cudaSuccess && (uintptr_t)x % 256 == 0);
    CHECK(cudaMemGetInfo(&available, &total) == cudaSuccess && total - available == 100);
    CHECK(cudaMemcpy(h, x, 100, cudaMemcpyDeviceToHost) == cudaSuccess && std::isnan(h[0]) && std::isnan(h[24]));
    CHECK(cudaMemset(x, 0, 100) == cudaSuccess && cudaMemset(x + 1, 0x3f, 4) == cudaSuccess);
    CHECK(cudaMemcpy(h, x, 100, cudaMemcpyDefault) == cudaSuccess && h[0] == 0 && h[1] > 0.7f && h[2] == 0);
    CHECK(cudaMemcpy(x + 5, x, 20, cudaMemcpyDeviceToDevice) == cudaSuccess);
    CHECK(cudaMemcpy(h, x + 6, 4, cudaMemcpyDeviceToHost) == cudaSuccess && h[0] > 0.7f);
    CHECK(cudaMalloc(&none, 0) == cudaSuccess && none == nullptr && cudaFree(none) == cudaSuccess);
    CHECK(cudaFree(x) == cudaSuccess);
    CHECK(cudaMalloc(&x, total + 1) == cudaErrorMemoryAllocation && x == nullptr);
    CHECK(cudaPeekAtLastError() == cudaErrorMemoryAllocation && cudaGetLastError() == cudaErrorMemoryAllocation);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(cudaMallocHost(&x, 40) == cudaSuccess && std::isnan(x[9]) && cudaFreeHost(x) == cudaSuccess);
    CHECK(cudaHostAlloc(&x, 40, cudaHostAllocDefault) == cudaSuccess && cudaFreeHost(x) == cudaSuccess);
}

static void refused(cudaError_t expected)
{
    CHECK(cudaPeekAtLastError() == expected);
    CHECK(cudaGetLastError() == expected);
}

static void test_errors()
{
    shared_bytes<<<1, 1025>>>();
    refused(cudaErrorInvalidConfiguration);
    shared_bytes<<<1, dim3(1, 1, 65)>>>();
    refused(cudaErrorInvalidConfiguration);
    shared_bytes<<<0, 32>>>();
    refused(cudaErrorInvalidConfiguration);
    shared_bytes<<<dim3(1, 65536), 32>>>();
    refused(cudaErrorInvalidConfiguration);
    shared_bytes<<<1, 32, (48 << 10) + 1>>>();
    refused(cudaErrorInvalidValue);
    CHECK(cudaFuncSetAttribute(shared_bytes, cudaFuncAttributeMaxDynamicSharedMemorySize, (227 << 10) + 1) !=
          cudaSuccess);
    refused(cudaErrorInvalidValue);
#ifdef CUDA_ON_CPU
    CHECK(cuda_on_cpu::kernel_stats("shared_bytes").launches == 0);
#endif
    CHECK(cudaSetDevice(0) == cudaSuccess && cudaSetDevice(1024) == cudaErrorInvalidDevice);
    refused(cudaErrorInvalidDevice);
    CHECK(!strcmp(cudaGetErrorName(cudaErrorNotReady), "cudaErrorNotReady"));
    CHECK(!strcmp(cudaGetErrorString(cudaSuccess), "no error"));
}

static void test_device()
{
    int count, device, runtime, driver, major, shared, least, greatest;
    cudaDeviceProp p;
    CHECK(cudaGetDeviceCount(&count) == cudaSuccess && count >= 1);
    CHECK(cudaGetDevice(&device) == cudaSuccess && device == 0);
    CHECK(cudaGetDeviceProperties(&p, 0) == cudaSuccess && strstr(p.name, "cuda_on_cpu") && p.warpSize == 32);
    CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && major == p.major);
    CHECK(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0) == cudaSuccess &&
          shared == 227 << 10);
    CHECK(cudaRuntimeGetVersion(&runtime) == cudaSuccess && cudaDriverGetVersion(&driver) == cudaSuccess);
    CHECK(runtime == CUDART_VERSION && driver >= runtime);
    CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest) == cudaSuccess && greatest < least);
}

static void half(void *x) { *(float *)x /= 2; }

/* A chain over three streams: each link waits for the one before. */
static void test_streams()
{
    cudaStream_t a, b, c;
    cudaEvent_t first, second;
    float *pinned, pageable[32];
    gmem<float> x = floats_on_device(32, 0, 1), y = floats_on_device(32, 0, 0);
    CHECK(cudaStreamCreate(&a) == cudaSuccess && cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking) == cudaSuccess);
    CHECK(cudaStreamCreateWithPriority(&c, cudaStreamNonBlocking, 0) == cudaSuccess);
    CHECK(cudaEventCreate(&first) == cudaSuccess &&
          cudaEventCreateWithFlags(&second, cudaEventDisableTiming) == cudaSuccess);
    cudaMallocHost(&pinned, 128);
    int right = 0;
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < 32; i++) pageable[i] = (float)(round + i);
        cudaMemcpyAsync(x.p, pageable, 128, cudaMemcpyHostToDevice, a); /* read now */
        for (int i = 0; i < 32; i++) pageable[i] = -1;
        add<<<1, 32, 0, a>>>(x, 1);
        cudaEventRecord(first, a);
        cudaStreamWaitEvent(b, first, 0);
        copy<<<1, 32, 0, b>>>(y, gmem<const float>(x.p));
        cudaEventRecord(second, b);
        cudaStreamWaitEvent(c, second, 0);
        cudaStreamWaitEvent(a, second, 0);
        add<<<1, 32, 0, a>>>(x, 100); /* too late to be seen in y */
        cudaMemcpyAsync(pinned, y.p, 128, cudaMemcpyDeviceToHost, c);
        cudaLaunchHostFunc(c, half, pinned);
        cudaStreamSynchronize(c);
        right += pinned[0] == (float)(round + 1) / 2 && pinned[31] == (float)(round + 32);
    }
    CHECK(right == 10);
    add<<<1, 32, 0, a>>>(y, 1); /* the default stream comes after a, and a after it */
    add<<<1, 32>>>(y, 1);
    add<<<1, 32, 0, a>>>(y, 1);
    cudaMemcpyAsync(pageable, y.p, 128, cudaMemcpyDeviceToHost, a); /* pageable: there when the call returns */
    CHECK(pageable[0] == 10 + 3);

    float ms = -1;
    cudaEventRecord(second, a);
    CHECK(cudaEventElapsedTime(&ms, first, second) == cudaErrorInvalidResourceHandle);
    cudaGetLastError();
    CHECK(cudaEventDestroy(second) == cudaSuccess && cudaEventCreate(&second) == cudaSuccess);
    cudaEventRecord(first, a);
    add<<<1, 32, 0, a>>>(y, 1);
    cudaEventRecord(second, a);
    int queries = 0;
    while (cudaEventQuery(second) == cudaErrorNotReady) queries++;
    while (cudaStreamQuery(a) == cudaErrorNotReady) queries++;
    cudaError_t remembered = cudaGetLastError();
#ifdef CUDA_ON_CPU
    CHECK(remembered == (queries ? cudaErrorNotReady : cudaSuccess)); /* a program must expect it of any version */
#else
    (void)remembered;
#endif
    CHECK(queries < 10 && cudaEventElapsedTime(&ms, first, second) == cudaSuccess && ms >= 0);
    CHECK(cudaEventSynchronize(first) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess);
    CHECK(cudaEventDestroy(first) == cudaSuccess && cudaEventDestroy(second) == cudaSuccess);
    CHECK(cudaStreamDestroy(a) == cudaSuccess && cudaStreamDestroy(b) == cudaSuccess &&
          cudaStreamDestroy(c) == cudaSuccess);
    cudaFreeHost(pinned);
}

int main()
{
    test_memory();
    test_errors();
    test_device();
    test_streams();
    CHECK(cudaGetLastError() == cudaSuccess);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
