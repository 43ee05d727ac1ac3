/* What the device says of itself, and error codes.
 *
 * Several alike, whose name says that they are none, of which a process uses the one that it sets first: ranks of a job
 * take one each. The limits are those that launch.cpp checks; its compute capability is
 * CUDA_ON_CPU_CAPABILITY's, for programs that choose by it. It has few multiprocessors, so that grids sized by them are
 * small.
 */
#include "internal.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace cuda_on_cpu
{

enum : int { MULTIPROCESSORS = 8 };

static thread_local cudaError_t last_error = cudaSuccess;

cudaError_t set_error(cudaError_t error)
{
    if (error != cudaSuccess) last_error = error;
    return error;
}

struct Name {
    cudaError_t error;
    const char *name, *text;
};
static const Name NAMES[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};

static Name name_of(cudaError_t error)
{
    for (const Name &name : NAMES)
        if (name.error == error) return name;
    return Name{error, "cudaErrorUnknown", "an error that cuda_on_cpu does not give"};
}

} // namespace cuda_on_cpu

using namespace cuda_on_cpu;

cudaError_t cudaGetLastError()
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char *cudaGetErrorName(cudaError_t error) { return name_of(error).name; }
const char *cudaGetErrorString(cudaError_t error) { return name_of(error).text; }

cudaError_t cudaGetDeviceCount(int *count)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES"); /* set and empty: none, as with a GPU */
    *count = !visible || *visible ? settings().devices : 0;
    return set_error(*count ? cudaSuccess : cudaErrorNoDevice);
}
static bool is_device(int device) { return device >= 0 && device < settings().devices; }
static std::atomic<int> current{-1}; /* -1: none was set, so it is number 0 */
cudaError_t cudaSetDevice(int device)
{
    int before = -1;
    if (!is_device(device)) return set_error(cudaErrorInvalidDevice);
    if (!current.compare_exchange_strong(before, device) && before != device)
        fail("cudaSetDevice(%d) after %d: several devices in one process are not played", device, before);
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device)
{
    *device = std::max(0, current.load());
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device)
{
    if (!is_device(device)) return set_error(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "cuda_on_cpu (no GPU)");
    p->totalGlobalMem = settings().memory_bytes;
    p->sharedMemPerBlock = STATIC_SHARED_BYTES;
    p->sharedMemPerBlockOptin = MAX_SHARED_BYTES;
    p->sharedMemPerMultiprocessor = MAX_SHARED_BYTES + 1024;
    p->reservedSharedMemPerBlock = 1024;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7fffffff;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = settings().capability_major;
    p->minor = settings().capability_minor;
    p->multiProcessorCount = MULTIPROCESSORS;
    p->concurrentKernels = 1;
    p->asyncEngineCount = 1;
    p->unifiedAddressing = 1;
    p->streamPrioritiesSupported = 1;
    p->l2CacheSize = 64 << 20;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device)
{
    cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, device) != cudaSuccess) return cudaErrorInvalidDevice;
    const struct {
        cudaDeviceAttr attribute;
        int value;
    } known[] = {
        {cudaDevAttrMaxThreadsPerBlock, p.maxThreadsPerBlock},
        {cudaDevAttrMaxBlockDimX, p.maxThreadsDim[0]},
        {cudaDevAttrMaxBlockDimY, p.maxThreadsDim[1]},
        {cudaDevAttrMaxBlockDimZ, p.maxThreadsDim[2]},
        {cudaDevAttrMaxGridDimX, p.maxGridSize[0]},
        {cudaDevAttrMaxGridDimY, p.maxGridSize[1]},
        {cudaDevAttrMaxGridDimZ, p.maxGridSize[2]},
        {cudaDevAttrMaxSharedMemoryPerBlock, (int)p.sharedMemPerBlock},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, (int)p.sharedMemPerBlockOptin},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, (int)p.sharedMemPerMultiprocessor},
        {cudaDevAttrWarpSize, p.warpSize},
        {cudaDevAttrMultiProcessorCount, p.multiProcessorCount},
        {cudaDevAttrMaxThreadsPerMultiProcessor, p.maxThreadsPerMultiProcessor},
        {cudaDevAttrComputeCapabilityMajor, p.major},
        {cudaDevAttrComputeCapabilityMinor, p.minor},
        {cudaDevAttrL2CacheSize, p.l2CacheSize},
        {cudaDevAttrClockRate, 1000000},
        {cudaDevAttrMemoryClockRate, 1000000},
        {cudaDevAttrGlobalMemoryBusWidth, 1024},
        {cudaDevAttrMemoryPoolsSupported, 0},
        {cudaDevAttrCooperativeLaunch, 0},
    };
    for (const auto &k : known) {
        if (k.attribute != attribute) continue;
        *value = k.value;
        return cudaSuccess;
    }
    return set_error(cudaErrorNotSupported);
}
