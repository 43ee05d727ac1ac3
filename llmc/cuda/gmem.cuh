/* Global memory as kernels see it: a typed pointer that cannot be dereferenced, only loaded from and stored to.
 *
 * On a GPU a gmem<T> is a T* and its members compile to one load or store each; a Pack of 16 bytes is one 128-bit
 * access. When the kernels run on a CPU (dev/cuda_on_cpu) every access is checked against the device's allocations and
 * counted in bytes and 32-byte sectors. Raw pointers do not convert, so no access is missed. gmem<const T> only loads.
 *
 * Elements of BF16 matrices are `bf16`: 16 bits that convert to float exactly and back with one rounding.
 *
 * Floor 2.
 */
#ifndef LLMC_CUDA_GMEM_CUH
#define LLMC_CUDA_GMEM_CUH

#include "../numerics.h"

#include <cuda_runtime.h>
#include <type_traits>

struct bf16 {
    uint16_t bits;
};

template <class T, int n> struct alignas(sizeof(T) * n) Pack { /* n a power of two, at most 16 bytes in all */
    T v[n];
};

template <class T> struct gmem {
    T *p;

    gmem() = default;
    __host__ __device__ explicit gmem(T *memory) : p(memory) {}
    __host__ __device__ explicit gmem(void *memory) : p((T *)memory) {}
    __host__ __device__ gmem operator+(int64_t i) const { return gmem(p + i); }
    __host__ __device__ bool absent() const { return p == nullptr; }

    using Value = typename std::remove_const<T>::type;
    __device__ Value ld(int64_t i) const { return *access(p + i, sizeof(T), false); }
    __device__ void st(int64_t i, Value x) const { *access(p + i, sizeof(T), true) = x; }

    /* n elements from element i on, whose address is a multiple of their size. */
    template <int n> __device__ Pack<Value, n> ld_pack(int64_t i) const
    {
        Pack<Value, n> x;
        move<sizeof x>(&x, access(p + i, sizeof x, false));
        return x;
    }
    template <int n> __device__ void st_pack(int64_t i, Pack<Value, n> x) const
    {
        store(access(p + i, sizeof x, true), x);
    }

    /* Integers only: sums of floats would depend on the order. Returns the value before. */
    __device__ Value atomic_max(int64_t i, Value x) const
    {
        static_assert(std::is_integral<T>::value, "atomics on integers only");
        return atomicMax(access(p + i, sizeof(T), true), x);
    }
    __device__ Value atomic_add(int64_t i, Value x) const
    {
        static_assert(std::is_integral<T>::value, "atomics on integers only");
        return atomicAdd(access(p + i, sizeof(T), true), x);
    }

  private:
    /* The address to use for an access of `bytes` at `at`. */
    static __device__ T *access(T *at, size_t bytes, bool write)
    {
#ifdef CUDA_ON_CPU
        return (T *)cuda_on_cpu::global_access((const void *)at, bytes, write);
#else
        (void)bytes, (void)write;
        return at;
#endif
    }
    /* By name: nvcc makes four stores of 4 bytes of many an assignment of 16. */
    template <int n> static __device__ void store(T *to, Pack<Value, n> x)
    {
#ifdef __CUDA_ARCH__
        if (sizeof x == 16) {
            uint4 words;
            memcpy(&words, &x, sizeof words);
            __stwb((uint4 *)to, words);
            return;
        }
        if (sizeof x == 8) {
            uint2 words;
            memcpy(&words, &x, sizeof words);
            __stwb((uint2 *)to, words);
            return;
        }
#endif
        move<sizeof x>(to, &x);
    }
    template <size_t bytes> static __device__ void move(void *to, const void *from)
    {
        static_assert(bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16, "one access of 2, 4, 8 or 16 bytes");
        if (bytes == 16) *(uint4 *)to = *(const uint4 *)from;
        if (bytes == 8) *(uint2 *)to = *(const uint2 *)from;
        if (bytes == 4) *(uint32_t *)to = *(const uint32_t *)from;
        if (bytes == 2) *(uint16_t *)to = *(const uint16_t *)from;
    }
};

#endif
