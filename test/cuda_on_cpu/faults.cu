/* Planted faults, one per run: faults NAME. Each ends the program with a message, or prints "wrong" where the order of
 * threads or streams that the environment asks for brings it to light, and "right" where it does not. */
#include "check.cuh"

#include <cstdlib>
#include <cstring>

/* ---- those that end the program ---- */

__global__ void some_at_barrier()
{
    if (threadIdx.x % 64 < 63) __syncthreads();
}
__global__ void two_barriers()
{
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
}
__global__ void barrier_and_shuffle(gmem<int> out)
{
    if (threadIdx.x == 5) __syncthreads();
    out.st(threadIdx.x, __shfl_xor_sync(0xffffffffu, (int)threadIdx.x, 1));
    if (threadIdx.x != 5) __syncthreads();
}
__global__ void barrier_without_end()
{
    if (threadIdx.x == 0)
        __syncwarp();
    else
        __syncthreads();
}
__global__ void two_collectives(gmem<int> out)
{
    int x = threadIdx.x;
    if (x < 7)
        x = __shfl_xor_sync(0xffffffffu, x, 1);
    else
        x = (int)__ballot_sync(0xffffffffu, x);
    out.st(threadIdx.x, x);
}
__global__ void not_in_mask() { __syncwarp(0xfffffffeu); }
__global__ void overrun_static(int column)
{
    __shared__ float before[3];
    __shared__ float rows[4][33];
    __shared__ float after;
    ((volatile float *)rows)[3 * 33 + column] = 1;
    ((volatile float *)before)[0] = *(volatile float *)&after;
}
__global__ void overrun_dynamic(int i)
{
    extern __shared__ float values[];
    ((volatile float *)values)[i] = 1;
}
__global__ void large_shared()
{
    __shared__ volatile char large[100 << 10];
    large[0] = 1;
}
__global__ void static_and_dynamic()
{
    __shared__ volatile char some[40 << 10];
    some[0] = 1;
}
__global__ void store(gmem<float> x, int i) { x.st(i, 1); }
__global__ void load(gmem<float> x, int i)
{
    if (x.ld(i) == 0.5f) __syncwarp();
}
__global__ void load_four(gmem<float> x, int i)
{
    if (x.ld_pack<4>(i).v[0] == 0.5f) __syncwarp();
}
__global__ void deep(int n)
{
    volatile char large[8 << 10];
    large[0] = (char)n;
    if (n > 0) deep(n - 1);
    large[1] = large[0];
}

static bool end_in_kernel(const char *name, gmem<float> x, float *host)
{
#define FAULT(fault) else if (strcmp(name, fault) == 0)
    gmem<int> out = on_device(std::vector<int>(1024));
    if (false) {
    }
    FAULT("thread ends before a barrier") some_at_barrier<<<2, 128>>>();
    FAULT("two barriers") two_barriers<<<2, 64>>>();
    FAULT("barrier and shuffle") barrier_and_shuffle<<<1, 64>>>(out);
    FAULT("barrier without end") barrier_without_end<<<1, 32>>>();
    FAULT("two collectives") two_collectives<<<1, 32>>>(out);
    FAULT("lane not in mask") not_in_mask<<<1, 32>>>();
    FAULT("shared overrun") overrun_static<<<dim3(1, 3), 1>>>(33);
    FAULT("shared underrun") overrun_static<<<1, 1>>>(-3 * 33 - 1);
    FAULT("dynamic shared overrun") overrun_dynamic<<<1, 1, 64>>>(-1);
    FAULT("no dynamic shared memory") overrun_dynamic<<<1, 1>>>(0);
    FAULT("static shared memory too large") large_shared<<<1, 1>>>();
    FAULT("shared memory too large in all") static_and_dynamic<<<1, 1, 10 << 10>>>();
    FAULT("store out of bounds") store<<<1, 32>>>(x, 25);
    FAULT("load out of bounds") load<<<1, dim3(2, 2)>>>(x, -1);
    FAULT("pack out of bounds") load_four<<<1, 1>>>(x, 24);
    FAULT("misaligned pack") load_four<<<1, 1>>>(x, 2);
    FAULT("null pointer") load<<<1, 1>>>(gmem<float>((float *)nullptr), 0);
    FAULT("host pointer as device pointer") store<<<1, 1>>>(gmem<float>(host), 0);
    FAULT("stack overflow") deep<<<1, 1>>>(100);
    FAULT("truncated grid") store<<<(int64_t)1 << 32, 1>>>(x, 0);
    FAULT("error not asked for") store<<<1, 2000>>>(x, 0);
    FAULT("access after free")
    {
        cudaFree(x.p);
        load<<<1, 1>>>(x, 3);
    }
    else return false;
    cudaDeviceSynchronize();
    return true;
}

static bool end_on_host(const char *name, gmem<float> x, float *host)
{
    if (false) {
    }
    FAULT("device pointer followed by the host") x.p[0] = 1;
    FAULT("device access by host code") x.st(0, 1);
    FAULT("copy to the device from the device") cudaMemcpy(x.p, x.p, 4, cudaMemcpyHostToDevice);
    FAULT("copy to a host pointer") cudaMemcpy(host, host, 4, cudaMemcpyHostToDevice);
    FAULT("copy out of bounds") cudaMemcpy(host, x.p + 1, 100, cudaMemcpyDeviceToHost);
    FAULT("memset out of bounds") cudaMemset(x.p, 0, 101);
    FAULT("free of a host pointer") cudaFree(host);
    FAULT("free twice")
    {
        cudaFree(x.p);
        cudaFree(x.p);
    }
    FAULT("stream that was destroyed")
    {
        cudaStream_t s;
        cudaStreamCreate(&s);
        cudaStreamDestroy(s);
        store<<<1, 1, 0, s>>>(x, 0);
    }
    FAULT("event that was destroyed")
    {
        cudaEvent_t e;
        cudaEventCreate(&e);
        cudaEventDestroy(e);
        cudaEventRecord(e);
    }
    else return false;
    return true;
}

/* ---- those that an order brings to light ---- */

__global__ void missing_barrier(gmem<float> out) /* right when threads run upwards */
{
    __shared__ float x[64];
    x[threadIdx.x] = (float)threadIdx.x;
    out.st(threadIdx.x, threadIdx.x ? x[threadIdx.x - 1] : 0);
}
__global__ void missing_order_of_blocks(gmem<float> out) /* right when blocks run upwards on one core */
{
    out.st(0, (float)blockIdx.x);
}
__global__ void fill(gmem<float> x, float value) { x.st(threadIdx.x, value); }
__global__ void copy(gmem<float> to, gmem<float> from) { to.st(threadIdx.x, from.ld(threadIdx.x)); }

static bool right_over_streams(bool with_event)
{
    cudaStream_t a, b;
    cudaEvent_t filled;
    gmem<float> x = floats_on_device(32, 0, 0), y = floats_on_device(32, 0, 0);
    cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking);
    cudaEventCreate(&filled);
    fill<<<1, 32, 0, a>>>(x, 1);
    cudaEventRecord(filled, a);
    if (with_event) cudaStreamWaitEvent(b, filled, 0);
    copy<<<1, 32, 0, b>>>(y, x);
    cudaDeviceSynchronize();
    return to_host(y, 32)[0] == 1;
}

static bool right_with_pinned_memory(const char *name, gmem<float> x)
{
    float *pinned;
    cudaMallocHost(&pinned, 4);
    *pinned = 5;
    if (strstr(name, "read")) {
        cudaMemcpyAsync(pinned, x.p, 4, cudaMemcpyDeviceToHost, nullptr);
        if (strstr(name, "in time")) cudaStreamSynchronize(nullptr);
        return *pinned == 0;
    }
    cudaMemcpyAsync(x.p, pinned, 4, cudaMemcpyHostToDevice, nullptr);
    if (strstr(name, "in time")) cudaStreamSynchronize(nullptr);
    *pinned = 6;
    return to_host(x, 1)[0] == 5;
}

static bool right_in_this_order(const char *name, gmem<float> x)
{
    gmem<float> out = floats_on_device(64, 0, 0);
    if (strcmp(name, "missing barrier") == 0) {
        missing_barrier<<<1, 64>>>(out);
        std::vector<float> got = to_host(out, 64);
        for (int i = 1; i < 64; i++)
            if (got[i] != (float)(i - 1)) return false;
        return true;
    }
    if (strcmp(name, "missing order of blocks") == 0) {
        missing_order_of_blocks<<<9, 1>>>(out);
        return to_host(out, 1)[0] == 8;
    }
    if (strcmp(name, "missing event") == 0) return right_over_streams(false);
    if (strcmp(name, "event") == 0) return right_over_streams(true);
    if (strncmp(name, "pinned", 6) == 0) return right_with_pinned_memory(name, x);
    printf("no such fault: %s\n", name);
    exit(2);
}

int main(int argc, char **argv)
{
    static float host[32];
    const char *name = argc > 1 ? argv[1] : "";
    gmem<float> x = floats_on_device(25, 0, 0); /* 100 bytes */
    if (end_in_kernel(name, x, host) || end_on_host(name, x, host))
        printf("not found\n");
    else
        printf("%s\n", right_in_this_order(name, x) ? "right" : "wrong");
    return 0;
}
