/* What launch_filter.py writes in place of CUDA's syntax.
 *
 *   name<T, 4><<<grid, block, shared, stream>>>(args);
 *     becomes a Launch object made of the kernel and the configuration, called with (args). The arguments are converted
 *     to the kernel's parameters there and kept, so that a launch that runs later has copies, as on a GPU.
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
#include <utility>

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

[[noreturn]] void fail_extent(const char *kernel);

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

/* Find gives the kernel as a function pointer, where its template arguments are all written. */
struct Same {
    template <class... Parameters> auto operator()(void (*kernel)(Parameters...)) const { return kernel; }
};

template <class Find, class Call> class Launch
{
  public:
    Launch(const char *name, Find find, Call call, const Configuration &configuration)
        : name(name), find(find), call(call), configuration(configuration)
    {
    }
    template <class... Arguments> void operator()(Arguments &&...arguments) const
    {
        start(0, std::forward<Arguments>(arguments)...);
    }

  private:
    const char *name;
    Find find;
    Call call;
    Configuration configuration;

    template <class... Parameters, class... Arguments>
    void start_function(void (*kernel)(Parameters...), Arguments &&...arguments) const
    {
        std::tuple<Parameters...> kept(std::forward<Arguments>(arguments)...);
        launch(name, (const void *)kernel, configuration, [kernel, kept] { std::apply(kernel, kept); });
    }
    template <class F = Find, class... Arguments>
    auto start(int, Arguments &&...arguments) const -> decltype((void)std::declval<F>()(Same()))
    {
        start_function(find(Same()), std::forward<Arguments>(arguments)...);
    }
    /* A kernel whose template arguments follow from what it is called with. */
    template <class... Arguments> void start(long, Arguments &&...arguments) const
    {
        std::tuple<typename std::decay<Arguments>::type...> kept(std::forward<Arguments>(arguments)...);
        auto kernel = call;
        launch(name, nullptr, configuration, [kernel, kept] { std::apply(kernel, kept); });
    }
};

template <class Find, class Call>
Launch<Find, Call> kernel(const char *name, Find find, Call call, const Configuration &configuration)
{
    return Launch<Find, Call>(name, find, call, configuration);
}

} // namespace cuda_on_cpu

#define CUDA_ON_CPU_KERNEL(name, ...)                                                                                  \
    name, [&](auto get) -> decltype(get(__VA_ARGS__)) { return get(__VA_ARGS__); },                                    \
        [=](const auto &...arguments) { __VA_ARGS__(arguments...); }

#endif
