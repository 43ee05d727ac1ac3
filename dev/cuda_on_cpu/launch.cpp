/* One launch: its configuration checked against a GPU's limits, then all blocks over the cores.
 *
 * A refused launch is an error as on a GPU: cudaGetLastError gives it, and the reason is printed. A program that ends
 * without having asked for it fails.
 */
#include "internal.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>

namespace cuda_on_cpu
{

enum : unsigned { MAX_BLOCK_X = 1024, MAX_BLOCK_Z = 64, MAX_BLOCK_THREADS = 1024, MAX_GRID_YZ = 65535 };

struct SharedLimit { /* bytes */
    size_t dynamic, all;
};

struct SharedLimits { /* of kernels that cudaFuncSetAttribute was called for */
    std::map<const void *, SharedLimit> by_kernel;
    std::mutex lock;
};
static SharedLimits &shared_limits()
{
    static SharedLimits *limits = new SharedLimits;
    return *limits;
}

static SharedLimit shared_limit(const void *kernel)
{
    std::lock_guard<std::mutex> guard(shared_limits().lock);
    auto found = shared_limits().by_kernel.find(kernel);
    if (found == shared_limits().by_kernel.end()) return SharedLimit{STATIC_SHARED_BYTES, STATIC_SHARED_BYTES};
    return found->second;
}

static bool within(dim3 d, unsigned x, unsigned y, unsigned z)
{
    return d.x >= 1 && d.y >= 1 && d.z >= 1 && d.x <= x && d.y <= y && d.z <= z;
}

static cudaError_t check(const char *kernel, const Configuration &c, const SharedLimit &limit)
{
    if (c.truncated) fail("kernel %s launched with a dimension that is not in 0 to 2^32 - 1", kernel);
    if (!within(c.block, MAX_BLOCK_X, MAX_BLOCK_X, MAX_BLOCK_Z) ||
        c.block.x * c.block.y * c.block.z > MAX_BLOCK_THREADS) {
        fprintf(stderr,
                "cuda_on_cpu: kernel %s refused: blocks of %u x %u x %u threads (1 to 1024 in all, z up to 64)\n",
                kernel, c.block.x, c.block.y, c.block.z);
        return cudaErrorInvalidConfiguration;
    }
    if (!within(c.grid, 0x7fffffff, MAX_GRID_YZ, MAX_GRID_YZ)) {
        fprintf(stderr,
                "cuda_on_cpu: kernel %s refused: a grid of %u x %u x %u blocks (1 to 2^31 - 1, y and z to 65535)\n",
                kernel, c.grid.x, c.grid.y, c.grid.z);
        return cudaErrorInvalidConfiguration;
    }
    if (c.shared > limit.dynamic) {
        fprintf(stderr, "cuda_on_cpu: kernel %s refused: %zu bytes of dynamic shared memory, %zu allowed%s\n", kernel,
                c.shared, limit.dynamic, limit.all < MAX_SHARED_BYTES ? " (cudaFuncSetAttribute allows more)" : "");
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

static void error_was_asked_for()
{
    if (cudaPeekAtLastError() != cudaSuccess) fail("the program ends without cudaGetLastError after a refused launch");
}

/* Block `i` in the order of the settings; random: a walk through all of them by a stride that shares no divisor. */
static uint64_t nth_block(uint64_t i, uint64_t blocks, uint64_t launch_number)
{
    if (settings().order == Order::forward) return i;
    if (settings().order == Order::reverse) return blocks - 1 - i;
    Random random = {settings().order_seed + (launch_number << 40)};
    uint64_t first = random.next() % blocks, stride = random.next() % blocks;
    while (std::gcd(stride, blocks) != 1) stride++;
    return (uint64_t)(((unsigned __int128)i * stride + first) % blocks);
}

static void run_grid(const Grid &grid)
{
    if (running.thread) fail("a kernel launches a kernel");
    dim3 d = grid.configuration.grid;
    uint64_t blocks = (uint64_t)d.x * d.y * d.z;
#pragma omp parallel for schedule(dynamic, 1) if (blocks > 1)
    for (uint64_t i = 0; i < blocks; i++) {
        uint64_t block = nth_block(i, blocks, grid.number);
        uint3 index = {(unsigned)(block % d.x), (unsigned)(block / d.x % d.y), (unsigned)(block / d.x / d.y)};
        run_block(grid, index, block);
    }
}

void launch(const char *kernel, const void *address, const Configuration &configuration, std::function<void()> thread)
{
    static std::atomic<uint64_t> launches{0};
    SharedLimit limit = shared_limit(address);
    cudaError_t error = check(kernel, configuration, limit);
    if (error != cudaSuccess) {
        static const bool at_exit = atexit(error_was_asked_for) == 0;
        (void)at_exit;
        set_error(error);
        return;
    }
    dim3 g = configuration.grid, b = configuration.block;
    Counters *counters = counters_of(kernel);
    count_launch(counters, (uint64_t)g.x * g.y * g.z * b.x * b.y * b.z);
    Grid grid = {kernel, configuration, nullptr, limit.all, launches++, counters};
    enqueue(configuration.stream, [grid, thread = std::move(thread)]() mutable {
        grid.thread = &thread;
        run_grid(grid);
    });
}

} // namespace cuda_on_cpu

using namespace cuda_on_cpu;

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value)
{
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || (size_t)value > MAX_SHARED_BYTES)
        return set_error(cudaErrorInvalidValue);
    std::lock_guard<std::mutex> guard(shared_limits().lock);
    shared_limits().by_kernel[kernel] = SharedLimit{(size_t)value, MAX_SHARED_BYTES};
    return cudaSuccess;
}
