/* What launch_filter.py writes in place of CUDA's syntax.
 *
 *   name<T, 4><<<grid, block, shared, stream>>>(args);
 *     becomes CUDA_ON_CPU_LAUNCH((name<T, 4>), grid, block, shared, stream)(args): an object made of the kernel and the
 *     configuration, called with the arguments. They are converted to the kernel's parameters there and kept, so that
 *     a launch that runs later has copies, as on a GPU.
 *
 *   __shared__ float tile[32][33];
 *     becomes a reference to memory of the running block, found by the address of a static SharedVariable. That is
 *     one per function and, in a template, per instance: as nvcc does it.
 *
 *   extern __shared__ float rows[];
 *     becomes a pointer to the block's dynamic shared memory.
 */
#ifndef CUDA_ON_CPU_LAUNCH_H
#define CUDA_ON_CPU_LAUNCH_H

#include <cuda_runtime.h>

#include <cstddef>
#include <functional>
#include <tuple>
#include <type_traits>

/* A declaration that did not go through the filter must not become a variable of one thread. */
#undef __shared__
#define __shared__ static_assert(false, "__shared__ in a file that launch_filter.py did not rewrite");

namespace cuda_on_cpu
{

/* ---- shared variables ---- */

struct SharedVariable {
    const char *name;
    size_t bytes, alignment;
};

void *shared_address(const SharedVariable &variable); /* in the running block; the same for all its threads */
void *dynamic_shared();

/* ---- launches ---- */

/* A grid or block: a dim3, or one number that must not lose bits on its way to 32. */
struct Extent {
    dim3 dim;
    bool truncated = false;
    Extent(dim3 d) : dim(d) {}
    Extent(uint3 d) : dim(d) {}
    template <class Integer,
              class = typename std::enable_if<std::is_integral<Integer>::value || std::is_enum<Integer>::value>::type>
    Extent(Integer n) : dim((unsigned)n), truncated((Integer)(unsigned)n != n || n < Integer(0))
    {
    }
};

struct Configuration {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
    bool truncated;
    Configuration(Extent g, Extent b, size_t shared_bytes = 0, cudaStream_t s = nullptr)
        : grid(g.dim), block(b.dim), shared(shared_bytes), stream(s), truncated(g.truncated || b.truncated)
    {
    }
};

/* Checks the configuration (an error goes to cudaGetLastError) and runs `thread` once per thread, now or later. */
void launch(const char *kernel, const void *address, const Configuration &configuration, std::function<void()> thread);

/* A launch of a kernel whose template arguments are all written: called as the kernel is, with the same conversions. */
template <class... Parameters> struct Launch {
    const char *name;
    void (*kernel)(Parameters...);
    Configuration configuration;
    void operator()(Parameters... arguments) const
    {
        std::tuple<Parameters...> kept(arguments...);
        launch(name, (const void *)kernel, configuration, [kernel = kernel, kept] { std::apply(kernel, kept); });
    }
};

/* One whose template arguments follow from what it is called with. */
template <class Call> struct DeducedLaunch {
    const char *name;
    Call call;
    Configuration configuration;
    template <class... Arguments> void operator()(Arguments... arguments) const
    {
        std::tuple<Arguments...> kept(arguments...);
        launch(name, nullptr, configuration, [call = call, kept] { std::apply(call, kept); });
    }
};

struct Same { /* accepts a kernel where its name stands for one function */
    template <class... Parameters> auto operator()(void (*kernel)(Parameters...)) const { return kernel; }
};

template <class... Parameters>
Launch<Parameters...> launch_of(const char *name, void (*kernel)(Parameters...), const Configuration &configuration)
{
    return {name, kernel, configuration};
}
template <class Find, class Call>
auto prepare_launch(int, const char *name, Find find, Call, const Configuration &configuration)
    -> decltype(launch_of(name, find(Same()), configuration))
{
    return launch_of(name, find(Same()), configuration);
}
template <class Find, class Call>
DeducedLaunch<Call> prepare_launch(long, const char *name, Find, Call call, const Configuration &configuration)
{
    return {name, call, configuration};
}

} // namespace cuda_on_cpu

/* Kernel in parentheses, then the configuration: so the commas of template arguments do no harm. */
#define CUDA_ON_CPU_NAME(...) #__VA_ARGS__
#define CUDA_ON_CPU_LAUNCH(kernel_, ...)                                                                               \
    cuda_on_cpu::prepare_launch(                                                                                       \
        0, CUDA_ON_CPU_NAME kernel_, [&](auto get_) -> decltype(get_(kernel_)) { return get_(kernel_); },              \
        [=](const auto &...arguments_) { kernel_(arguments_...); }, cuda_on_cpu::Configuration(__VA_ARGS__))

template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute, int value)
{
    return cudaFuncSetAttribute((const void *)kernel, attribute, value);
}

#endif
