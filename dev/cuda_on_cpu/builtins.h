/* What nvcc itself declares for device code, for a host compiler.
 *
 * Variables of a thread are read from `running`, which the scheduler of block.cpp sets whenever another thread goes on.
 * Warp collectives hand each lane's value to all lanes of the mask (warp_exchange) and compute the result from them.
 * Arithmetic with a rounding in its name is the plain operation: the compiler is told not to fuse or reorder
 * (-ffp-contract=off). As in CUDA, atomics are for the types of CUDA; floats are left out, since their sum would depend
 * on the order. Places (file and line) are passed by default arguments, for messages.
 */
#ifndef CUDA_ON_CPU_BUILTINS_H
#define CUDA_ON_CPU_BUILTINS_H

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace cuda_on_cpu
{

struct Thread;

struct Running { /* of this OS thread; thread is null outside kernels */
    Thread *thread;
    const uint3 *thread_index;
    uint3 block_index;
    dim3 block_dim, grid_dim;
    unsigned lane;
};
extern __thread Running running;

struct Place { /* where a collective is called */
    const char *file;
    int line;
};
/* The last parameters of a collective, never given: where it is called. */
#define CUDA_ON_CPU_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

/* All threads of the block meet; how many of them gave true. */
int block_barrier(const char *what, bool predicate, Place place);

/* All lanes of `mask` meet; returns their values, `bytes` apart (at most 64), of lanes that take no part 0xff...: valid
 * until this thread's next collective. */
const void *warp_exchange(const char *what, uint32_t mask, const void *mine, size_t bytes, Place place);
uint32_t lanes_alive();

[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

} // namespace cuda_on_cpu

#define threadIdx (*cuda_on_cpu::running.thread_index)
#define blockIdx  (cuda_on_cpu::running.block_index)
#define blockDim  (cuda_on_cpu::running.block_dim)
#define gridDim   (cuda_on_cpu::running.grid_dim)
enum { warpSize = 32 };
#undef __launch_bounds__
#define __launch_bounds__(...)

/* ---- barriers and fences ---- */

inline void __syncthreads(CUDA_ON_CPU_CALLER) { cuda_on_cpu::block_barrier("__syncthreads", false, {file, line}); }
inline int __syncthreads_count(int predicate, CUDA_ON_CPU_CALLER)
{
    return cuda_on_cpu::block_barrier("__syncthreads_count", predicate != 0, {file, line});
}
inline int __syncthreads_or(int predicate, CUDA_ON_CPU_CALLER)
{
    return cuda_on_cpu::block_barrier("__syncthreads_or", predicate != 0, {file, line}) != 0;
}
inline int __syncthreads_and(int predicate, CUDA_ON_CPU_CALLER)
{
    return cuda_on_cpu::block_barrier("__syncthreads_and", predicate == 0, {file, line}) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, CUDA_ON_CPU_CALLER)
{
    const uint32_t nothing = 0;
    cuda_on_cpu::warp_exchange("__syncwarp", mask, &nothing, sizeof nothing, {file, line});
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

/* ---- shuffles: a lane of a segment of `width` lanes reads another's value ---- */

namespace cuda_on_cpu
{
template <class T> T shuffle(const char *what, unsigned mask, T value, unsigned source, Place place)
{
    static_assert(std::is_arithmetic<T>::value && (sizeof(T) == 4 || sizeof(T) == 8), "shuffles move 4 or 8 bytes");
    const T *values = (const T *)warp_exchange(what, mask, &value, sizeof value, place);
    return values[source];
}
inline void check_width(int width)
{
    if (width < 1 || width > 32 || (width & (width - 1))) fail("a shuffle of width %d", width);
}
} // namespace cuda_on_cpu

template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUDA_ON_CPU_CALLER)
{
    cuda_on_cpu::check_width(width);
    unsigned first = cuda_on_cpu::running.lane & ~(unsigned)(width - 1);
    return cuda_on_cpu::shuffle("__shfl_sync", mask, value, first | ((unsigned)source & (unsigned)(width - 1)),
                                {file, line});
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, CUDA_ON_CPU_CALLER)
{
    cuda_on_cpu::check_width(width);
    unsigned lane = cuda_on_cpu::running.lane, source = lane ^ (unsigned)lane_mask;
    unsigned end = (lane & ~(unsigned)(width - 1)) + (unsigned)width;
    return cuda_on_cpu::shuffle("__shfl_xor_sync", mask, value, source < end ? source : lane, {file, line});
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_ON_CPU_CALLER)
{
    cuda_on_cpu::check_width(width);
    unsigned lane = cuda_on_cpu::running.lane, in_segment = lane & (unsigned)(width - 1);
    return cuda_on_cpu::shuffle("__shfl_up_sync", mask, value, delta <= in_segment ? lane - delta : lane, {file, line});
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_ON_CPU_CALLER)
{
    cuda_on_cpu::check_width(width);
    unsigned lane = cuda_on_cpu::running.lane, left = (unsigned)width - 1 - (lane & (unsigned)(width - 1));
    return cuda_on_cpu::shuffle("__shfl_down_sync", mask, value, delta <= left ? lane + delta : lane, {file, line});
}

/* ---- votes ---- */

namespace cuda_on_cpu
{
inline unsigned vote(const char *what, unsigned mask, int predicate, Place place)
{
    uint32_t mine = predicate != 0, lanes = 0;
    const uint32_t *values = (const uint32_t *)warp_exchange(what, mask, &mine, sizeof mine, place);
    for (unsigned lane = 0; lane < 32; lane++) lanes |= (values[lane] == 1 ? 1u : 0u) << lane;
    return lanes & mask;
}
} // namespace cuda_on_cpu

inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_ON_CPU_CALLER)
{
    return cuda_on_cpu::vote("__ballot_sync", mask, predicate, {file, line});
}
inline int __any_sync(unsigned mask, int predicate, CUDA_ON_CPU_CALLER)
{
    return cuda_on_cpu::vote("__any_sync", mask, predicate, {file, line}) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUDA_ON_CPU_CALLER)
{
    return cuda_on_cpu::vote("__all_sync", mask, !predicate, {file, line}) == 0;
}
inline unsigned __activemask() { return cuda_on_cpu::lanes_alive(); }

/* ---- atomics: on shared memory, or on what global_access returned ---- */

namespace cuda_on_cpu
{
template <class T> struct Value { /* the second argument is converted to the type of the first */
    static_assert(std::is_same<T, int>::value || std::is_same<T, unsigned>::value ||
                      std::is_same<T, unsigned long long>::value || std::is_same<T, long long>::value,
                  "atomics are for int, unsigned, long long and unsigned long long");
    using Type = T;
};
template <class T, class Change> T atomic_change(T *at, Change change)
{
    T before = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(at, &before, change(before), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return before;
}
} // namespace cuda_on_cpu

template <class T> T atomicAdd(T *at, typename cuda_on_cpu::Value<T>::Type value)
{
    static_assert(!std::is_same<T, long long>::value, "atomicAdd has no form for long long");
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
template <class T> T atomicSub(T *at, typename cuda_on_cpu::Value<T>::Type value)
{
    static_assert(sizeof(T) == 4, "atomicSub is for int and unsigned");
    return __atomic_fetch_sub(at, value, __ATOMIC_RELAXED);
}
template <class T> T atomicMax(T *at, typename cuda_on_cpu::Value<T>::Type value)
{
    return cuda_on_cpu::atomic_change(at, [value](T old) { return old > value ? old : value; });
}
template <class T> T atomicMin(T *at, typename cuda_on_cpu::Value<T>::Type value)
{
    return cuda_on_cpu::atomic_change(at, [value](T old) { return old < value ? old : value; });
}
template <class T> T atomicExch(T *at, typename cuda_on_cpu::Value<T>::Type value)
{
    return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicCAS(T *at, typename cuda_on_cpu::Value<T>::Type expected, typename cuda_on_cpu::Value<T>::Type value)
{
    __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
template <class T> T atomicOr(T *at, typename cuda_on_cpu::Value<T>::Type value)
{
    return __atomic_fetch_or(at, value, __ATOMIC_RELAXED);
}
template <class T> T atomicAnd(T *at, typename cuda_on_cpu::Value<T>::Type value)
{
    return __atomic_fetch_and(at, value, __ATOMIC_RELAXED);
}
template <class T> T atomicXor(T *at, typename cuda_on_cpu::Value<T>::Type value)
{
    return __atomic_fetch_xor(at, value, __ATOMIC_RELAXED);
}
inline unsigned atomicInc(unsigned *at, unsigned last)
{
    return cuda_on_cpu::atomic_change(at, [last](unsigned old) { return old >= last ? 0 : old + 1; });
}
inline unsigned atomicDec(unsigned *at, unsigned last)
{
    return cuda_on_cpu::atomic_change(at, [last](unsigned old) { return old == 0 || old > last ? last : old - 1; });
}

/* ---- bits ---- */

namespace cuda_on_cpu
{
template <class To, class From> To bits_as(From from)
{
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
} // namespace cuda_on_cpu

inline unsigned __float_as_uint(float x) { return cuda_on_cpu::bits_as<unsigned>(x); }
inline int __float_as_int(float x) { return cuda_on_cpu::bits_as<int>(x); }
inline float __uint_as_float(unsigned x) { return cuda_on_cpu::bits_as<float>(x); }
inline float __int_as_float(int x) { return cuda_on_cpu::bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return cuda_on_cpu::bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return cuda_on_cpu::bits_as<double>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline unsigned __brev(unsigned x)
{
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= (x >> i & 1) << (31 - i);
    return reversed;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector)
{
    unsigned long long bytes = (unsigned long long)y << 32 | x;
    unsigned picked = 0;
    for (int i = 0; i < 4; i++) picked |= (unsigned)(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return picked;
}

/* ---- products and extremes ---- */

inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long min(long a, long b) { return a < b ? a : b; }
inline long max(long a, long b) { return a > b ? a : b; }
inline unsigned long min(unsigned long a, unsigned long b) { return a < b ? a : b; }
inline unsigned long max(unsigned long a, unsigned long b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

/* ---- arithmetic with a stated rounding ---- */

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return sqrt(a); }
inline float __double2float_rn(double x) { return (float)x; }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __ll2float_rn(long long x) { return (float)x; }
inline float __ull2float_rn(unsigned long long x) { return (float)x; }

namespace cuda_on_cpu
{ /* as the GPU converts: saturating, NaN is 0 */
inline int int_from(double whole)
{
    if (whole != whole) return 0;
    return whole >= 2147483647.0 ? 2147483647 : whole <= -2147483648.0 ? -2147483647 - 1 : (int)whole;
}
inline unsigned unsigned_from(double whole)
{
    if (!(whole > 0)) return 0;
    return whole >= 4294967295.0 ? 4294967295u : (unsigned)whole;
}
} // namespace cuda_on_cpu

inline int __float2int_rn(float x) { return cuda_on_cpu::int_from(nearbyintf(x)); }
inline int __float2int_rz(float x) { return cuda_on_cpu::int_from(truncf(x)); }
inline int __float2int_rd(float x) { return cuda_on_cpu::int_from(floorf(x)); }
inline int __float2int_ru(float x) { return cuda_on_cpu::int_from(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return cuda_on_cpu::unsigned_from(nearbyintf(x)); }
inline unsigned __float2uint_rz(float x) { return cuda_on_cpu::unsigned_from(truncf(x)); }

inline float rsqrtf(float x) { return (float)(1.0 / sqrt((double)x)); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }

#endif
